"""Settings of queues."""

from __future__ import annotations

from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    owner,
    refused,
    rows,
    run,
    scalar,
    settle,
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

    value(db, "set_queue", queue="q", max_attempts=4, reset=True)

    assert settings(db, "q") == {**dict.fromkeys(SETTINGS), "max_attempts": 4}


@pytest.mark.of_utf8
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


EXPIRY = "select expires_at from rota.jobs where id = %s"


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"job_type": None, "time_limit": "1 s"}, "job_type"),
        ({"job_type": "a b", "time_limit": "1 s"}, "job_type"),
        ({}, "time_limit"),
        ({"time_limit": "0"}, "time_limit"),
        ({"time_limit": "31 days"}, "time_limit"),
        ({"expires_after": "0"}, "expires_after"),
        ({"expires_after": "101 years"}, "expires_after"),
        ({"expires_after": "1 s", "reset": None}, "reset"),
    ],
)
def test_set_type_refuses_bad_arguments(db, given, argument):
    with refused(argument):
        call(db, "set_type", **{"job_type": "mail", **given})


def test_set_queue_refuses_a_bad_expiry(db):
    for bad in ("0", "-1 s", "101 years"):
        with refused("expires_after"):
            call(db, "set_queue", queue="q", expires_after=bad)


def test_jobs_may_expire_after_a_hundred_years(db):
    call(db, "set_queue", queue="q", expires_after="100 years")
    call(db, "set_type", job_type="mail", expires_after="100 years")


def test_expires_after_counts_from_the_time_of_the_job(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    hour = timedelta(hours=1)
    for given, at in (
        ({}, now + hour),
        ({"delay": "1 hour"}, now + 2 * hour),
        ({"run_at": now + 5 * hour}, now + 6 * hour),
        ({"run_at": now - 5 * hour}, now - 4 * hour),
        ({"idempotency_key": "k", "on_conflict": "replace"}, now + hour),
        ({"ordering_key": "o"}, now + hour),
    ):
        job_id = enqueue(db, expires_after="1 hour", **given)
        assert scalar(db, EXPIRY, job_id) == at
        each = {"job_type": "x", "expires_after": "1 hour", **given}
        if "run_at" in given:
            each["run_at"] = given["run_at"].isoformat()
        (row,) = call(db, "enqueue_many", jobs=Jsonb([each]))
        assert scalar(db, EXPIRY, row.job_id) == at
    with refused("expires_after"):
        enqueue(db, expires_after="1 hour", expires_at=now + hour)
    with refused("jobs[1].expires_after"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", "expires_after": "soon"}]))


def test_the_defaults_of_a_type_go_before_those_of_its_queue(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    minute = timedelta(minutes=1)
    value(db, "set_queue", queue="q", expires_after="10 minutes", time_limit="10 minutes")
    value(db, "set_type", job_type="mail", expires_after="1 minute")
    value(db, "set_type", job_type="mail", time_limit="2 minutes")

    def known(job_id):
        (row,) = rows(db, "select expires_at, time_limit from rota.jobs where id = %s", job_id)
        return tuple(row)

    for add in (
        lambda **given: enqueue(db, **given),
        lambda **given: call(db, "enqueue_many", jobs=Jsonb([given]))[0].job_id,
        lambda **given: enqueue(db, **given, ordering_key=str(given), unique_for="1 s",
                                idempotency_key=str(given)),
    ):  # fmt: skip
        assert known(add(job_type="mail", queue="q")) == (now + minute, 2 * minute)
        assert known(add(job_type="mail")) == (now + minute, 2 * minute)
        assert known(add(job_type="x", queue="q")) == (now + 10 * minute, None)
        assert known(add(job_type="x")) == (None, None)
    own = enqueue(db, "mail", expires_after="1 hour", time_limit="1 s")
    assert known(own) == (now + 60 * minute, timedelta(seconds=1))

    value(db, "set_type", job_type="mail", reset=True)
    assert known(enqueue(db, "mail")) == (None, None)
    assert rows(db, "select from rota.job_types") == []
    acts = rows(db, "select act from rota.audit_log where act = 'set_type'")
    assert len(acts) == 3


def test_only_names_with_a_setting_are_listed(db):
    value(db, "set_type", job_type="mail", time_limit="1 s")
    listed = "select name from rota.configured_names"
    assert [row.name for row in rows(db, listed)] == ["type mail"]
    value(db, "set_type", job_type="mail", reset=True)
    assert rows(db, listed) == []


def test_a_default_expiry_ends_what_waits_and_not_what_was_brought_back(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_type", job_type="mail", expires_after="1 minute")
    job_id = enqueue(db, "mail")
    clock.advance("2 minutes")
    settle(db)
    assert (run(db, job_id).status, run(db, job_id).error_type) == ("cancelled", "expired")

    value(db, "retry_job", job_id=job_id)
    clock.advance("2 minutes")
    settle(db)
    assert [job.job_id for job in claim(db)] == [job_id]


def test_another_time_of_a_waiting_job_gives_it_another_expiry(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="default", expires_after="1 hour")
    job_id = enqueue(db, idempotency_key="k")
    enqueue(db, idempotency_key="k", on_conflict="replace", delay="1 day")
    assert scalar(db, EXPIRY, job_id) == now + timedelta(days=1, hours=1)


def test_a_stage_takes_the_time_limit_of_its_type(db):
    value(db, "set_type", job_type="b", time_limit="5 s", expires_after="1 ms")
    stages = [{"stage": name, "job_type": name} for name in "ab"]
    call(db, "define_pipeline", pipeline="p", stages=Jsonb(stages))
    call(db, "start_pipeline", pipeline="p")
    (first,) = claim(db)
    value(db, "finish_job", **owner(first))
    (second,) = claim(db)
    assert (first.time_limit, second.time_limit) == (None, timedelta(seconds=5))


def test_what_is_set_again_as_it_is_leaves_no_record(db):
    for _ in range(2):
        for setting in (
            "set_queue('mail', max_attempts => 3, retry_budget => '{\"per_minute\": 5}')",
            "set_type('send', time_limit => '1 minute')",
            "set_limit(queue => 'mail', max_running => 2)",
            "set_retry_rule('E', queue => 'mail', fatal => true)",
            "set_breaker('send', 'mail', max_failures => 3)",
        ):
            db.execute(f"select rota.{setting}".encode())
    value(db, "set_queue", queue="mail", max_attempts=4)

    assert [row.act for row in rows(db, "select act from rota.audit_log order by id")] == [
        "set_queue", "set_type", "set_limit", "set_retry_rule", "set_breaker", "set_queue",
    ]  # fmt: skip
