"""How many jobs there are, and what fails more than usual."""

from __future__ import annotations

from typing import Any

import pytest

from sql.helpers import Db, call, enqueue, one, owner, rows, running, scalar, settle, value
from sql.maintenance.test_statistics import end, look
from support.clock import Clock


def stock(db: Db) -> None:
    """Put in jobs of each status."""
    end(db, "dead", queue="q", job_type="a")
    running(db, queue="q", job_type="a")
    failed = running(db, queue="q", job_type="b")
    one(db, "fail_job", **owner(failed), error="e", retry_in="1 hour")
    for _ in range(3):
        enqueue(db, queue="q", job_type="b")
    enqueue(db, queue="r", delay="1 hour")


def counts(db: Db) -> dict[tuple[Any, ...], int]:
    return {
        (row.queue, row.job_type, row.status, row.is_due): row.jobs
        for row in call(db, "job_counts")
    }


STOCK = {
    ("q", "a", "dead", True): 1,
    ("q", "a", "running", True): 1,
    ("q", "b", "failed", False): 1,
    ("q", "b", "queued", True): 3,
    ("r", "x", "queued", False): 1,
}


def test_job_counts_of_few_jobs_are_of_this_moment(db):
    stock(db)

    assert counts(db) == STOCK


@pytest.fixture
def many(db: Db, clock: Clock) -> Db:
    """Take any table for one that has too many jobs to be counted for an answer."""
    clock.set("2026-01-12 12:00+00")
    db.execute(
        "create or replace function rota._are_many(name text) returns boolean"
        " language sql as 'select true'"
    )
    return db


def test_job_counts_of_many_jobs_are_those_of_the_last_whole_round(many, clock):
    stock(many)
    settle(many)
    assert counts(many) == STOCK

    enqueue(many, queue="new")
    assert counts(many) == STOCK
    clock.advance("31 s")
    settle(many)
    assert counts(many) == STOCK | {("new", "x", "queued", True): 1}
    assert {row.counted_at for row in call(many, "job_counts")} == {clock.now()}


def test_job_counts_do_not_stand_still_while_nothing_ticks(many, clock):
    """Then the workers are away, and operators look."""
    enqueue(many, delay="1 hour")
    settle(many)
    enqueue(many, queue="new")

    clock.advance("4 minutes")
    assert ("new", "x", "queued", True) not in counts(many)
    clock.advance("2 minutes")
    assert ("new", "x", "queued", True) in counts(many)


def test_a_round_goes_on_page_by_page_and_is_read_when_it_is_whole(many, clock):
    for _ in range(40):
        enqueue(many, payload='{"a": "%s"}' % ("x" * 1500))
    pages = scalar(many, "select pg_relation_size('rota.jobs') / 8192")
    assert pages > 4

    seen = []
    for _ in range(pages):
        many.execute("select rota._count_jobs(1)")
        seen.append(rows(many, "select * from rota.count_progress where round > 0") != [])
    assert seen == [False] * (pages - 1) + [True]
    assert counts(many) == {("default", "x", "queued", True): 40}
    many.execute("select rota._count_jobs(1)")
    assert counts(many) == {("default", "x", "queued", True): 40}


def test_a_tick_that_is_not_committed_keeps_no_round(many, connect, clock):
    settle(many)
    clock.advance("31 s")
    other = connect(autocommit=False)
    other.execute("select")
    one(other, "tick")
    enqueue(many)
    settle(many)

    assert counts(many) == {("default", "x", "queued", True): 1}


def test_discarded_jobs_are_not_counted(many, clock):
    job = end(many, "dead")
    many.execute(
        "update rota.finished_jobs set discarded_at = rota.now() where id = %s", (job,)
    )
    settle(many)

    assert counts(many) == {}


def fail(db: Db, times: int, **arguments: Any) -> None:
    for _ in range(times):
        job = running(db, **arguments)
        one(db, "fail_job", **owner(job), error="e", fatal=True)


@pytest.mark.slow
def test_failures_that_rise_are_a_row_and_a_finding(db, clock):
    clock.set("2026-01-12 12:00+00")
    for _ in range(20):
        end(db, "succeeded", job_type="a")
    look(db, clock)
    assert call(db, "rising_failures") == []

    clock.advance("30 minutes")
    fail(db, 5, job_type="a")
    end(db, "succeeded", job_type="a")
    look(db, clock)

    (row,) = call(db, "rising_failures")
    assert (row.queue, row.job_type, row.attempts, row.failures) == ("default", "a", 6, 5)
    findings = [row for row in call(db, "doctor") if row.finding == "failures"]
    assert [row.severity for row in findings] == ["warning"]
    assert "5 of 6 attempts in the last 10 minutes, usually 0; the last" in findings[0].evidence
    last = max(row.job_id for row in rows(db, findings[0].remedy))
    assert findings[0].evidence.endswith(f"; the last of job {last} with e")


@pytest.mark.parametrize(("before", "now"), [(0, 4), (144 * 2, 6)])
def test_failures_that_are_few_or_usual_are_none(db, clock, before, now):
    clock.set("2026-01-12 12:00+00")
    db.execute(
        "insert into rota.job_stats select 'hour', '2026-01-12 10:00+00', 'default', 'x',"
        " 'failed', %s, '0', null, '{}', '{}', '0', null, '{}', '{}'",
        (before,),
    )
    db.execute("update rota.stats_progress set hours_until = '2026-01-12 12:00+00'")
    fail(db, now)
    look(db, clock)

    assert call(db, "rising_failures") == []


@pytest.mark.slow
def test_doctor_tells_of_statistics_that_are_behind(db, clock):
    clock.set("2026-01-12 12:00+00")
    end(db, "succeeded")
    look(db, clock)
    clock.advance("10 s")
    end(db, "succeeded")
    clock.advance("20 minutes")

    findings = {row.finding: row for row in call(db, "doctor")}
    assert findings["statistics"].severity == "warning"
    settle(db)
    findings = {row.finding: row for row in call(db, "doctor")}
    assert findings["statistics"].severity == "ok"


def test_queue_stats_names_queues_that_have_only_settings(db):
    value(db, "set_queue", queue="quiet")

    assert [tuple(row)[:3] for row in rows(db, "select * from rota.queue_stats")] == [
        ("quiet", False, 0)
    ]
