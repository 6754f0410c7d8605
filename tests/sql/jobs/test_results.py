"""Who waits for the result of a job, and who tells."""

from __future__ import annotations

from decimal import Decimal

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import claim, enqueue, one, owner, raises, refused, rows, scalar, value

LOCKS = """
    select count(*) from pg_locks
    where locktype = 'advisory' and classid::bigint in (1919907970, 1919907971)
"""


def heard(connection):
    return [n.channel for n in connection.notifies(timeout=0.2, stop_after=1)]


def test_the_end_of_a_job_is_notified_to_who_waits(db, connect):
    job_id, other_id = enqueue(db), enqueue(db)
    waiter = connect()
    told = one(waiter, "wait_for_result", job_id=job_id)
    assert (told.is_ended, told.status) == (False, "queued")
    waiter.execute(f"listen {told.channel}; listen rota_result_{other_id}")
    jobs = {job.job_id: job for job in claim(db, max_jobs=2)}

    value(db, "finish_job", **owner(jobs[other_id]))
    assert heard(waiter) == []
    value(db, "finish_job", **owner(jobs[job_id]), result=Jsonb({"a": 1}))

    assert heard(waiter) == [told.channel]
    told = one(waiter, "wait_for_result", job_id=job_id)
    assert (told.is_ended, told.status, told.result) == (True, "succeeded", {"a": 1})
    assert scalar(db, LOCKS) == 0


def test_it_tells_how_far_a_job_is(db):
    job_id = enqueue(db)
    (job,) = claim(db)
    for percent, message in ((Decimal("12.5"), "page 1 of 8"), (100, None)):
        value(db, "set_progress", **owner(job), percent=percent, message=message)

        told = one(db, "wait_for_result", job_id=job_id, active=False)

        assert (told.status, told.progress_percent, told.progress_message) == (
            "running", percent, message,
        )  # fmt: skip
    value(db, "finish_job", **owner(job))
    assert one(db, "wait_for_result", job_id=job_id).progress_percent == 100


@pytest.mark.own_session
@pytest.mark.parametrize("lock", ["1919907970, 0", "1919907971, hashint8({})"])
def test_a_stranger_that_keeps_the_locks_keeps_nobody_waiting(db, connect, lock):
    job_id = enqueue(db)
    stranger, waiter = connect(), connect()
    stranger.execute(f"select pg_advisory_lock({lock.format(job_id)})")
    waiter.execute("set statement_timeout = '20s'")

    assert one(waiter, "wait_for_result", job_id=job_id).status == "queued"
    assert scalar(db, LOCKS) == 1  # that of the stranger

    stranger.execute("select pg_advisory_unlock_all()")
    one(waiter, "wait_for_result", job_id=job_id)
    assert scalar(db, LOCKS) == 2


def test_every_kind_of_end_is_notified(db, connect):
    waiter = connect()
    ids = [enqueue(db, max_attempts=1) for _ in range(3)]
    for job_id in ids:
        waiter.execute(f"listen {one(waiter, 'wait_for_result', job_id=job_id).channel}")
    failed, many = claim(db, max_jobs=2)

    value(db, "cancel_job", job_id=ids[2])
    one(db, "fail_job", **owner(failed), error="boom", error_type="E")
    one(db, "finish_jobs", job_ids=[many.job_id], lease_tokens=[many.lease_token])

    told = [one(waiter, "wait_for_result", job_id=job_id) for job_id in ids]
    assert [row.status for row in told] == ["dead", "succeeded", "cancelled"]
    assert (told[0].error_type, told[0].last_error) == ("E", "boom")
    assert {n.channel for n in waiter.notifies(timeout=0.2)} == {row.channel for row in told}


def test_a_failure_that_is_tried_again_is_no_end(db, connect):
    job_id = enqueue(db)
    waiter = connect()
    waiter.execute(f"listen {one(waiter, 'wait_for_result', job_id=job_id).channel}")

    one(db, "fail_job", **owner(claim(db)[0]), error="boom")

    assert heard(waiter) == []
    assert not one(waiter, "wait_for_result", job_id=job_id).is_ended


def test_who_does_not_wait_any_more_is_not_notified(db, connect):
    job_id = enqueue(db)
    waiter = connect()
    for _ in range(2):
        told = one(waiter, "wait_for_result", job_id=job_id)
    waiter.execute(f"listen {told.channel}")
    assert scalar(db, LOCKS) == 2

    one(waiter, "wait_for_result", job_id=job_id, active=False)
    one(waiter, "wait_for_result", job_id=job_id, active=False)
    value(db, "finish_job", **owner(claim(db)[0]))

    assert scalar(db, LOCKS) == 0
    assert heard(waiter) == []


def test_a_job_that_is_not_there_holds_no_locks(db):
    with raises("RT001"):
        one(db, "wait_for_result", job_id=10**15)
    with refused("job_id"):
        one(db, "wait_for_result", job_id=None)
    with refused("active"):
        one(db, "wait_for_result", job_id=1, active=None)

    assert rows(db, LOCKS)[0][0] == 0
