"""What is always true of a row, whoever writes it."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from sql.helpers import call, claim, enqueue, one, owner, raises, running, scalar, value

BROKEN = [
    "status = 'succeeded'",
    "status = 'qeued'",
    "status = 'running'",
    "locked_until = now()",
]


def violated(db, query):
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        db.execute(query)
    return caught.value.diag.constraint_name


@pytest.mark.parametrize("change", BROKEN)
def test_jobs_refuses_a_state_that_nobody_would_look_for(db, change):
    enqueue(db)

    assert violated(db, f"update rota.jobs set {change}") == "jobs_status_check"


def test_jobs_refuses_a_running_one_without_a_deadline(db):
    running(db)

    assert violated(db, "update rota.jobs set locked_until = null") == "jobs_status_check"


def test_jobs_refuse_two_live_jobs_of_one_key(db):
    enqueue(db, idempotency_key="k")
    other = enqueue(db)

    with raises("23505"):
        db.execute("update rota.jobs set idempotency_key = 'k' where id = %s", (other,))


@pytest.mark.parametrize("first", [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 6])
def test_jobs_live_their_whole_life_with_ids_of_any_size(db, first):
    db.execute(f"alter sequence rota.jobs_id_seq increment by 1 restart with {first}")

    one_job = running(db, idempotency_key="k")
    many = call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x"}] * 3))
    batch = claim(db, max_jobs=3)

    assert one_job.job_id == first
    assert [row.job_id for row in many] == [first + 1, first + 2, first + 3]
    assert one(db, "fail_job", **owner(one_job), error="e").status == "failed"
    assert value(db, "retry_job", job_id=first) == "queued"
    assert value(db, "cancel_job", job_id=first) == "cancelled"
    assert [job.job_id for job in batch] == [first + 1, first + 2, first + 3]
    assert [
        row.outcome
        for row in call(
            db,
            "finish_jobs",
            job_ids=[job.job_id for job in batch],
            lease_tokens=[job.lease_token for job in batch],
        )
    ] == ["finished"] * 3


def test_jobs_end_their_ids_with_a_clean_error(db):
    db.execute(f"alter sequence rota.jobs_id_seq increment by 1 restart with {2**63 - 1}")
    assert enqueue(db) == 2**63 - 1

    with raises("2200H"):
        enqueue(db)
    with raises("2200H"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x"}]))

    assert scalar(db, "select count(*) from rota.jobs") == 1


def test_queues_and_workers_refuse_rows_that_make_no_sense(db):
    for query, constraint in [
        ("insert into rota.queues (queue) values ('')", "queues_queue_check"),
        ("insert into rota.queues (queue, lease) values ('q', '0')", "queues_lease_check"),
        (
            "insert into rota.queues (queue, max_attempts) values ('q', 0)",
            "queues_max_attempts_check",
        ),
        ("insert into rota.queues (queue, backoff) values ('q', '1')", "queues_backoff_check"),
        (
            "insert into rota.queues (queue, keep_finished) values ('q', '-1 s')",
            "queues_keep_finished_check",
        ),
        (
            "insert into rota.queues (queue, keep_dead) values ('q', '36526 days')",
            "queues_keep_dead_check",
        ),
        ("insert into rota.workers (worker, queues) values ('', '{}')", "workers_worker_check"),
    ]:
        assert violated(db, query) == constraint


def test_no_hand_writes_a_length_that_stops_what_is_computed_with_it(db):
    value(db, "set_retry_rule", error_type="E", retry_in="1 year", pause_for="30 days")
    value(db, "set_breaker", job_type="x", max_failures=1, span="1 hour", pause_for="1 day")
    db.execute("insert into rota.restored_ends select 'q', 'x', 'dead', null, null, now(), '3'")
    db.execute(
        "insert into rota.job_stats select 'day', now(), 'q', 'x', 'dead', 1, '0', '0', '{}',"
        " '{}', '0', '0', '{}', '{}', 1, 1"
    )

    for table, columns in (
        ("retry_rules", ("retry_in", "pause_for")),
        ("breakers", ("span", "pause_for")),
        ("restored_ends", ("waited", "ran")),
        ("job_stats", ("total_wait", "total_run")),
    ):
        for column in columns:
            query = f"update rota.{table} set {column} = '170000000 years'"
            assert violated(db, query) == f"{table}_{column}_check"


@pytest.mark.parametrize("status", ["queued", "running", "failed", "blocked", "done"])
def test_finished_jobs_hold_no_live_status(db, status):
    job = running(db)
    value(db, "finish_job", **owner(job))

    with raises("23514"):
        db.execute("update rota.finished_jobs set status = %s", (status,))
