"""Settings of queues."""

from __future__ import annotations

from datetime import timedelta

from sql.helpers import refused, rows, value
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
