"""Who is there."""

from __future__ import annotations

import pytest

from sql.helpers import claim, enqueue, owner, refused, rows, scalar, value
from sql.jobs.test_enqueue import BAD_NAMES

ME = {"worker": "w", "host": "h", "pid": 7, "version": "1.0", "queues": ["a", "b"]}


def test_report_worker_notes_who_is_there(db, clock):
    first = clock.set("2026-01-01 00:00+00")
    value(db, "report_worker", **ME)
    later = clock.advance("1 minute")

    value(db, "report_worker", **{**ME, "queues": ["c"], "version": "1.1"})

    (row,) = rows(db, "select * from rota.workers")
    assert (row.worker, row.host, row.pid, row.version) == ("w", "h", 7, "1.1")
    assert (row.queues, row.started_at, row.last_seen_at) == (["c"], first, later)


def test_report_worker_of_a_new_process_starts_anew(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "report_worker", **ME)
    later = clock.advance("1 minute")

    value(db, "report_worker", **{**ME, "pid": 8})

    assert scalar(db, "select started_at from rota.workers") == later


def test_each_start_of_a_worker_is_counted_once(db, clock):
    clock.set("2026-01-01 00:07+00")
    for worker in ("w1", "w2"):
        value(db, "report_worker", **{**ME, "worker": worker}, concurrency=5)
    clock.advance("2 minutes")
    value(db, "report_worker", **{**ME, "worker": "w1"})
    value(db, "report_worker", **{**ME, "worker": "w3", "version": None})
    value(db, "report_worker", **{**ME, "worker": "w2", "pid": 8})
    value(db, "deregister_worker", worker="w1")
    clock.advance("10 minutes")
    value(db, "report_worker", **{**ME, "worker": "w1"})

    starts = rows(
        db,
        "select to_char(started_at at time zone 'UTC', 'HH24:MI'), version, workers"
        " from rota.worker_starts order by 1, 2",
    )
    assert starts == [("00:05", "", 1), ("00:05", "1.0", 3), ("00:15", "1.0", 1)]
    assert scalar(db, "select concurrency from rota.workers where worker = 'w2'") is None
    clock.advance("91 days")
    for _ in range(3):
        rows(db, "select * from rota.tick()")
    assert scalar(db, "select count(*) from rota.worker_starts") == 0


@pytest.mark.of_utf8
def test_report_worker_takes_nulls_and_cuts_long_texts(db):
    value(db, "report_worker", **{**ME, "host": None, "pid": None, "version": None})
    value(db, "report_worker", **{**ME, "worker": "🦀" * 255, "host": "h" * 999})

    lengths = rows(db, 'select char_length(host) from rota.workers order by worker collate "C"')
    assert lengths == [(None,), (255,)]


@pytest.mark.of_utf8
def test_report_worker_refuses_every_bad_argument_by_name(db):
    for argument, bad in [
        *(("worker", x) for x in (None, "", "w" * 256)),
        *(("queues", x) for x in (None, [], ["q"] * 1001, [None])),
        *(("queues", [x]) for x in BAD_NAMES),
        *(("concurrency", x) for x in (0, -1)),
    ]:
        with refused(argument):
            value(db, "report_worker", **{**ME, argument: bad})

    assert rows(db, "select * from rota.workers") == []


def test_forget_worker_removes_the_worker_and_no_lease(db):
    enqueue(db)
    value(db, "report_worker", **ME)
    (job,) = claim(db)

    value(db, "deregister_worker", worker="w")
    value(db, "deregister_worker", worker="w")

    assert rows(db, "select * from rota.workers") == []
    assert value(db, "finish_job", **owner(job)) == "finished"


def test_forget_worker_refuses_bad_names(db):
    for bad in (None, "", "w" * 256):
        with refused("worker"):
            value(db, "deregister_worker", worker=bad)


def test_report_worker_notes_what_it_takes_and_by_which_session(db):
    value(db, "report_worker", **ME, job_types=["x", "y"], backend_pid=db.info.backend_pid)

    (row,) = rows(db, "select job_types, backend_pid from rota.workers")
    assert row.job_types == ["x", "y"]
    assert row.backend_pid == db.info.backend_pid
    # A pooler tells its clients numbers of its own.
    for other in (None, db.info.backend_pid + 1):
        value(db, "report_worker", **ME, backend_pid=other)
        assert rows(db, "select backend_pid from rota.workers") == [(None,)]
    value(db, "report_worker", **ME, job_types=[])
    assert rows(db, "select job_types from rota.workers") == [([],)]
    with refused("job_types"):
        value(db, "report_worker", **ME, job_types=["a b"])
