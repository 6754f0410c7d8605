"""Settings of queues, and the brake."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sql.helpers import (
    claim,
    enqueue,
    owner,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    value,
)
from sql.jobs.test_enqueue import BAD_NAMES

SETTINGS = {
    "lease": timedelta(minutes=5),
    "max_attempts": 3,
    "backoff": {"kind": "fixed"},
    "keep_finished": timedelta(days=1),
    "keep_dead": timedelta(days=2),
    "time_limit": timedelta(hours=1),
}


def settings(db, queue):
    found = rows(
        db,
        "select lease, max_attempts, backoff, keep_finished, keep_dead, time_limit"
        " from rota.queues where queue = %s",
        queue,
    )
    return found[0]._asdict() if found else None


def test_set_queue_keeps_every_setting(db):
    value(db, "set_queue", queue="q", **SETTINGS)

    assert settings(db, "q") == SETTINGS


def test_set_queue_leaves_what_is_null_as_it_is(db):
    value(db, "set_queue", queue="q", **SETTINGS)

    value(db, "set_queue", queue="q", max_attempts=4)

    assert settings(db, "q") == {**SETTINGS, "max_attempts": 4}


def test_set_queue_puts_the_others_back_when_reset(db):
    value(db, "set_queue", queue="q", **SETTINGS)
    value(db, "pause_queue", queue="q")

    value(db, "set_queue", queue="q", max_attempts=4, reset=True)

    assert settings(db, "q") == {**dict.fromkeys(SETTINGS), "max_attempts": 4}
    assert scalar(db, "select is_paused from rota.queues") is True


def test_set_queue_refuses_every_bad_argument_by_name(db):
    intervals = ["-1 s", "101 years"] + ["infinity"] * (db.info.server_version >= 170000)
    for argument, bad in [
        *(("queue", x) for x in BAD_NAMES),
        *(("lease", x) for x in ("0", "-1 s", "31 days", "2147483647 s")),
        *(("time_limit", x) for x in ("0", "-1 s", "31 days")),
        *(("max_attempts", x) for x in (0, -1)),
        *(("keep_finished", x) for x in intervals),
        *(("keep_dead", x) for x in intervals),
        ("reset", None),
    ]:
        with refused(argument):
            value(db, "set_queue", **{"queue": "q", argument: bad})

    assert settings(db, "q") is None


def test_set_queue_accepts_its_limits(db):
    for limits in [
        {"keep_finished": timedelta(0), "keep_dead": timedelta(0)},
        {"keep_finished": "100 years", "keep_dead": "100 years"},
        {"lease": "1 millisecond", "max_attempts": 1},
        {"lease": "30 days", "max_attempts": 2**31 - 1},
    ]:
        value(db, "set_queue", queue="q", **limits)


def test_pause_queue_stops_claims_and_nothing_else(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, queue="q")
    waiting = enqueue(db, queue="q")

    value(db, "pause_queue", queue="q", reason="r" * 2000)

    (row,) = rows(db, "select * from rota.queues")
    assert (row.is_paused, row.paused_at, row.paused_by) == (True, now, "postgres")
    assert row.pause_reason == "r" * 1000
    assert claim(db, queues=["q"]) == []
    assert enqueue(db, queue="q") > waiting
    assert value(db, "finish_job", **owner(job)) == "finished"
    assert claim(db, queues=["q", "default"]) == []


def test_pause_queue_keeps_who_paused_first(db, clock):
    first = clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="q")
    value(db, "pause_queue", queue="q", reason="a")
    clock.advance("1 hour")

    value(db, "pause_queue", queue="q")
    (row,) = rows(db, "select * from rota.queues")
    assert (row.paused_at, row.pause_reason) == (first, "a")
    value(db, "pause_queue", queue="q", reason="b")
    assert scalar(db, "select pause_reason from rota.queues") == "b"


def test_resume_queue_lets_jobs_be_claimed_again(db):
    job_id = enqueue(db, queue="q")
    value(db, "set_queue", queue="q", max_attempts=3)
    value(db, "pause_queue", queue="q", reason="r")

    value(db, "resume_queue", queue="q")
    value(db, "resume_queue", queue="q")

    (row,) = rows(db, "select * from rota.queues")
    assert (row.is_paused, row.paused_at, row.paused_by) == (False, None, None)
    assert (row.pause_reason, row.max_attempts) == (None, 3)
    assert [job.job_id for job in claim(db, queues=["q"])] == [job_id]


@pytest.mark.parametrize("function", ["pause_queue", "resume_queue"])
def test_pause_queue_and_resume_queue_refuse_unknown_and_bad_names(db, function):
    job_id = enqueue(db, queue="known")

    for name in BAD_NAMES:
        with refused("queue"):
            value(db, function, queue=name)
    with raises("RT004"):
        value(db, function, queue="knwon")

    value(db, function, queue="known")
    assert run(db, job_id).status == "queued"
