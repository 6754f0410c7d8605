"""The promises, counted again: each is found broken where it is, and holds under load."""

from __future__ import annotations

import random
import threading

import psycopg
import pytest

from sql.helpers import (
    call,
    claim,
    enqueue,
    one,
    owner,
    owners,
    refused,
    running,
    settle,
    value,
)
from sql.operations.test_explain import die

pytestmark = pytest.mark.slow


def broken(db, **arguments):
    return [row for row in call(db, "verify", **arguments) if row.violations]


def only(db):
    (row,) = broken(db)
    return row


def limited(db):
    value(db, "set_limit", job_type="x", max_running=2)
    settle(db)
    job = running(db)
    enqueue(db)
    return job.job_id


def followed(db):
    job = running(db, idempotency_key="k")
    enqueue(db, idempotency_key="k", on_conflict="rerun")
    return job.job_id


def planned(db):
    call(db, "schedule_job", name="s", schedule="@daily", job_type="x")
    db.execute("update rota.job_definitions set next_run_at = '2026-01-01 00:00+00'")
    settle(db)
    (job,) = claim(db)
    return job.job_id


COPY = """
    insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,
        status, run_at, attempts, lease_token, created_at, updated_at, finished_at)
    select id, queue, job_type, payload, priority, max_attempts,
        'succeeded', run_at, attempts, lease_token, created_at, updated_at, now()
    from rota.job_runs where id = %s
"""
CASES = {
    "a job is live or has ended": (enqueue, COPY),
    "a job ends once": (die, COPY),
    "a running job has": (
        lambda db: running(db).job_id,
        "update rota.jobs set locked_until = now() + interval '40 days' where id = %s",
    ),
    "a planned time": (
        planned,
        "update rota.occurrences set job_id = %s + 1 where outcome = 'enqueued'",
    ),
    "a job has at most": (enqueue, "update rota.jobs set attempts = 99 where id = %s"),
    "the lease tokens": (
        lambda db: one(db, "fail_job", **owner(running(db)), error="e", retry_in="0") and 1,
        "update rota.jobs set lease_token = 1 where id >= %s",
    ),
    "a rerun of a job": (
        followed,
        "update rota.jobs set status = 'queued', locked_by = null, locked_until = null"
        " where id = %s",
    ),
    "jobs of an ordering key": (
        lambda db: [enqueue(db, ordering_key="k") for _ in range(2)][1],
        "update rota.jobs set status = 'queued' where id = %s",
    ),
    "a halted key": (
        lambda db: running(db).job_id,
        "insert into rota.halted_keys (ordering_key, job_id) values ('k', %s)",
    ),
    "a blocked job": (
        lambda db: enqueue(db, depends_on=[enqueue(db)]),
        "delete from rota.dependencies where job_id = %s",
    ),
    "a held job": (
        enqueue,
        "update rota.jobs set hold = 'type gone' where id = %s",
    ),
    "the slots of a limit": (
        limited,
        "insert into rota.limit_slots (limit_name) select 'type x' where %s > 0",
    ),
    "no more jobs run under": (
        limited,
        "update rota.limits set max_running = 0 where %s > 0;"
        "update rota.limit_parts set max_running = 0",
    ),
}


@pytest.mark.parametrize("promise", CASES)
def test_each_promise_is_found_broken(db, promise):
    stage, harm = CASES[promise]
    job_id = stage(db)
    settle(db)
    assert broken(db) == []

    for statement in harm.split(";"):
        db.execute(statement, (job_id,) if "%s" in statement else None)

    row = only(db)
    assert row.promise.startswith(promise)
    assert row.violations >= 1
    assert row.examined >= row.violations
    assert row.example


def test_an_idempotency_key_is_found_to_have_two_jobs(db):
    enqueue(db, idempotency_key="k")
    other = enqueue(db)
    db.execute("drop index rota.jobs_idempotency_key_idx")

    db.execute("update rota.jobs set idempotency_key = 'k' where id = %s", (other,))

    assert only(db).promise.startswith("an idempotency key has")


@pytest.mark.parametrize("if_parent_dead", ["cancel", "run", "wait"])
def test_a_job_that_waits_for_one_that_is_not_there_waits_for_ever(db, if_parent_dead):
    parent = enqueue(db)
    enqueue(db, depends_on=[parent], if_parent_dead=if_parent_dead)
    settle(db)
    assert broken(db) == []

    db.execute("delete from rota.jobs where id = %s", (parent,))

    assert only(db).promise.startswith("a blocked job")


def test_a_job_that_waits_for_the_retry_of_another_is_no_violation(db):
    dead = die(db)
    enqueue(db, depends_on=[dead], if_parent_dead="wait")
    settle(db)

    assert broken(db) == []


def test_verify_looks_at_no_more_than_max_rows(db):
    for _ in range(5):
        enqueue(db)

    assert max(row.examined for row in call(db, "verify", max_rows=3)) == 3
    with refused("max_rows"):
        call(db, "verify", max_rows=0)


def test_every_promise_is_tested_here(db):
    promises = {row.promise for row in call(db, "verify")}

    tested = {*CASES, "an idempotency key"}
    assert {next(t for t in tested if p.startswith(t)) for p in promises} == tested


@pytest.mark.own_session
def test_what_is_under_way_is_no_violation(db, connect):
    """Workers, producers and maintenance at full load, while everything is counted again."""
    value(db, "set_limit", job_type="x", max_running=3)
    value(db, "set_limit", limit_key="c:*", max_running=1)
    for _ in range(12):
        enqueue(db, "x", delay="1 day")
    settle(db)
    is_over = threading.Event()
    errors = []

    def go_on(work):
        connection = connect()

        def loop():
            try:
                while not is_over.is_set():
                    work(connection)
            except psycopg.Error as error:
                errors.append(error)

        return threading.Thread(target=loop)

    def produce(connection):
        parent = enqueue(connection, random.choice("xy"), limit_key=f"c:{random.randint(1, 3)}")
        enqueue(connection, "x", ordering_key=f"k{random.randint(1, 3)}", skip_dead=True)
        enqueue(connection, "y", depends_on=[parent], if_parent_dead="run")
        enqueue(connection, "y", idempotency_key="k", on_conflict="rerun")

    def work(connection):
        jobs = claim(connection, max_jobs=4)
        if jobs and random.random() < 0.2:
            one(connection, "fail_job", **owner(jobs.pop()), error="e", fatal=True)
        call(connection, "finish_jobs", **owners(*jobs))

    threads = [go_on(w) for w in (produce, work, work, settle)]
    for thread in threads:
        thread.start()
    try:
        found = [broken(db) for _ in range(30)]
    finally:
        is_over.set()
        for thread in threads:
            thread.join()

    assert errors == []
    assert [rows for rows in found if rows] == []
    assert max(row.examined for row in call(db, "verify")) > 10
