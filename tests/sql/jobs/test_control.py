"""What an operator does to one job."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from sql.helpers import (
    call,
    claim,
    enqueue,
    everything,
    one,
    owner,
    owners,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    value,
)

OPERATIONS = {
    "retry_job": {},
    "cancel_job": {},
    "set_priority": {"priority": 1},
    "reschedule_job": {"delay": "1 s"},
}


@pytest.mark.parametrize("function", OPERATIONS)
def test_control_refuses_null_and_knows_no_unknown_job(db, function):
    with refused("job_id"):
        value(db, function, job_id=None, **OPERATIONS[function])
    for job_id in (0, -1, 10**15):
        with raises("RT001"):
            value(db, function, job_id=job_id, **OPERATIONS[function])


def test_control_refuses_every_bad_argument_by_name(db):
    job_id = enqueue(db)
    before = everything(db)

    for function, argument, bad in [
        ("retry_job", "force", None),
        *(("set_priority", "priority", x) for x in (None, 32768, -32769, 2**31 - 1)),
        *(("reschedule_job", "run_at", x) for x in (None, "infinity", "-infinity")),
        *(("reschedule_job", "delay", x) for x in ("-1 s", "101 years")),
    ]:
        with refused(argument):
            value(db, function, job_id=job_id, **{argument: bad})
    with refused("run_at"):
        value(db, "reschedule_job", job_id=job_id, run_at="2026-01-01", delay="1 s")

    assert everything(db) == before


def test_retry_job_runs_a_waiting_job_now(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db)
    one(db, "fail_job", **owner(job), error="e", retry_in="1 day")

    assert value(db, "retry_job", job_id=job.job_id) == "queued"

    (again,) = claim(db)
    assert (again.job_id, again.attempt, again.run_at) == (job.job_id, 2, now)
    assert again.lease_token > job.lease_token


def test_retry_job_keeps_the_place_of_a_job_that_is_due(db, clock):
    early = clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db)
    clock.advance("1 hour")

    value(db, "retry_job", job_id=job_id)

    assert run(db, job_id).run_at == early


def test_retry_job_takes_a_running_job_away_only_by_force(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db, max_attempts=1)
    value(db, "cancel_job", job_id=job.job_id, reason="r")

    with raises("RT008"):
        value(db, "retry_job", job_id=job.job_id)
    assert run(db, job.job_id).status == "running"

    assert value(db, "retry_job", job_id=job.job_id, force=True) == "queued"
    row = run(db, job.job_id)
    assert (row.status, row.attempts, row.locked_by) == ("queued", 0, None)
    assert (row.cancel_requested_at, row.cancel_reason) == (None, None)
    (again,) = claim(db)
    assert again.lease_token > job.lease_token


@pytest.mark.parametrize("status", ["succeeded", "dead", "cancelled"])
def test_retry_job_restores_an_ended_job_with_all_its_attempts(db, clock, status):
    clock.set("2026-01-01 00:00+00")
    job = running(db, payload={"a": 1}, priority=4, max_attempts=2, idempotency_key="k")
    if status == "succeeded":
        value(db, "finish_job", **owner(job))
    elif status == "cancelled":
        value(db, "cancel_job", job_id=job.job_id)
    if status != "succeeded":
        one(db, "fail_job", **owner(job), error="e", fatal=True)
    assert run(db, job.job_id).status == status
    now = clock.advance("1 hour")

    assert value(db, "retry_job", job_id=job.job_id) == "queued"

    row = run(db, job.job_id)
    assert scalar(db, "select count(*) from rota.finished_jobs") == 0
    assert (row.status, row.attempts, row.max_attempts, row.run_at) == ("queued", 0, 2, now)
    assert (row.payload, row.priority, row.idempotency_key) == ({"a": 1}, 4, "k")
    assert (row.last_error, row.cancel_requested_at) == (
        "e" if status == "dead" else None,
        None,
    )
    (again,) = claim(db)
    assert again.lease_token > job.lease_token
    assert again.attempt == 1


def test_retry_job_leaves_an_ended_job_whose_key_is_taken(db):
    job = running(db, idempotency_key="k")
    value(db, "finish_job", **owner(job))
    holder = enqueue(db, idempotency_key="k")
    before = everything(db)

    with pytest.raises(psycopg.Error) as caught:
        value(db, "retry_job", job_id=job.job_id)

    assert caught.value.sqlstate == "RT007"
    said = f"job {job.job_id}: idempotency_key 'k' of job type x is taken by job {holder}"
    assert caught.value.diag.message_primary == said
    assert everything(db) == before


def test_retry_job_does_not_mind_the_same_key_of_another_type(db):
    job = running(db, idempotency_key="k")
    value(db, "finish_job", **owner(job))
    enqueue(db, "another", idempotency_key="k")

    assert value(db, "retry_job", job_id=job.job_id) == "queued"


def test_cancel_job_ends_a_waiting_job(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    queued, failed = enqueue(db, delay="1 day"), running(db)
    one(db, "fail_job", **owner(failed), error="e")

    for job_id in (queued, failed.job_id):
        assert value(db, "cancel_job", job_id=job_id, reason="r" * 2000) == "cancelled"
        row = run(db, job_id)
        assert (row.status, row.finished_at, row.cancel_reason) == (
            "cancelled",
            now,
            "r" * 1000,
        )
        assert value(db, "cancel_job", job_id=job_id, reason="other") == "cancelled"
        assert run(db, job_id) == row


def test_cancel_job_asks_the_worker_of_a_running_job(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db)

    assert value(db, "cancel_job", job_id=job.job_id, reason="first") == "running"
    clock.advance("1 s")
    assert value(db, "cancel_job", job_id=job.job_id) == "running"

    row = run(db, job.job_id)
    assert (row.status, row.cancel_requested_at, row.cancel_reason) == ("running", now, "first")
    assert row.locked_until == job.locked_until


@pytest.mark.parametrize("end", ["fail", "snooze", "release", "sweep", "finish"])
def test_cancel_job_of_a_running_job_is_its_last_attempt(db, clock, end):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    value(db, "cancel_job", job_id=job.job_id, reason="r")

    match end:
        case "fail":
            assert one(db, "fail_job", **owner(job), error="e") == ("cancelled", None)
        case "snooze":
            assert value(db, "snooze_job", **owner(job), delay="1 s") is None
        case "release":
            assert one(db, "release_jobs", **owners(job)).is_released is True
        case "sweep":
            clock.advance("1 hour")
            assert value(db, "sweep_stale_leases") == 1
        case "finish":
            assert value(db, "finish_job", **owner(job)) == "finished"

    row = run(db, job.job_id)
    assert row.status == ("succeeded" if end == "finish" else "cancelled")
    assert row.cancel_reason == "r"
    assert scalar(db, "select count(*) from rota.jobs") == 0


def test_set_priority_changes_every_live_job(db):
    queued, job = enqueue(db, run_at="2100-01-01"), running(db)

    value(db, "set_priority", job_id=queued, priority=-32768)
    value(db, "set_priority", job_id=job.job_id, priority=32767)

    assert run(db, queued).priority == -32768
    assert (run(db, job.job_id).priority, run(db, job.job_id).status) == (32767, "running")
    assert value(db, "finish_job", **owner(job)) == "finished"


def test_reschedule_job_moves_a_waiting_job(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db)
    failed = running(db, queue="q")
    one(db, "fail_job", **owner(failed), error="e")

    by_delay = value(db, "reschedule_job", job_id=job_id, delay="1 hour")
    by_time = value(db, "reschedule_job", job_id=failed.job_id, run_at=now)

    assert by_delay == run(db, job_id).run_at == now + timedelta(hours=1)
    assert by_time == run(db, failed.job_id).run_at == now
    assert run(db, failed.job_id).status == "failed"
    assert [job.attempt for job in claim(db, queues=["q"])] == [2]


def test_reschedule_job_counts_from_the_clock_and_not_from_the_transaction(db, connect, clock):
    clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db)
    with connect(autocommit=False) as old:
        old.execute("select 1")
        now = clock.advance("1 hour")

        moved = value(old, "reschedule_job", job_id=job_id, delay="10 s")

        assert moved == now + timedelta(seconds=10)


def test_reschedule_job_refuses_a_running_job(db):
    job = running(db)

    with raises("RT008"):
        value(db, "reschedule_job", job_id=job.job_id, delay="1 s")


def test_control_keeps_the_errors_of_every_attempt(db):
    job = running(db)
    one(db, "fail_job", **owner(job), error="first", fatal=True)
    value(db, "retry_job", job_id=job.job_id)
    (again,) = claim(db)
    one(db, "fail_job", **owner(again), error="second", fatal=True)

    errors = rows(db, "select message from rota.job_errors order by lease_token")
    assert errors == [("first",), ("second",)]
    assert call(db, "tick")
