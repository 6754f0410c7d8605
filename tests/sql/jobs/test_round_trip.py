"""Finish, keep and claim in one call: what the three do by themselves, in one transaction."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from sql.helpers import call, claim, enqueue, one, raises, rows, run, running, scalar

SECOND = timedelta(seconds=1)


def finished(*jobs):
    return {
        "job_ids": [job.job_id for job in jobs],
        "lease_tokens": [job.lease_token for job in jobs],
    }


def kept(*jobs):
    return {f"kept_{name}": value for name, value in finished(*jobs).items()}


def turn(db, **arguments):
    return call(db, "finish_and_claim", worker="w", **arguments)


def told(answer):
    return [(row.outcome, row.job_id) for row in answer]


def test_finish_and_claim_goes_from_job_to_job(db):
    job_ids = [enqueue(db) for _ in range(3)]
    (job,) = turn(db)
    seen = [job.job_id]

    while answer := turn(db, **finished(job)):
        (job,) = answer
        seen.append(job.job_id)

    assert seen == job_ids
    assert {run(db, job_id).status for job_id in job_ids} == {"succeeded"}


def test_finish_and_claim_returns_what_claim_jobs_returns(db, clock):
    clock.set("2026-01-01 00:00+00")
    enqueue(db, "mail", payload={"a": 1}, idempotency_key="k")
    claims = claim(db)
    call(db, "release_jobs", **finished(*claims))

    (row,) = turn(db)

    same = set(claims[0]._fields) - {"lease_token", "attempt"}
    assert {name: getattr(row, name) for name in same} == {
        name: getattr(claims[0], name) for name in same
    }
    assert row.outcome == "claimed"
    assert row.lease_token > claims[0].lease_token


def test_finish_and_claim_takes_results_and_claims_as_told(db):
    first = running(db)
    enqueue(db, "x")
    others = [enqueue(db, "y", queue="q") for _ in range(3)]

    answer = turn(
        db, **finished(first), results=Jsonb([{"n": 1}]), queues=["q"], max_jobs=2,
        lease="7 s", job_types=["y"],
    )  # fmt: skip

    assert told(answer) == [("claimed", job_id) for job_id in others[:2]]
    assert {row.locked_for for row in answer} == {7 * SECOND}
    assert run(db, first.job_id).result == {"n": 1}


def test_finish_and_claim_keeps_leases(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db)
    clock.advance(30 * SECOND)

    assert turn(db, **kept(job), lease="10 min") == []

    assert run(db, job.job_id).locked_until == now + timedelta(minutes=10, seconds=30)


def test_finish_and_claim_tells_what_did_not_go_as_asked(db, connect):
    lost, cancelled, gone, locked, also_locked = (running(db) for _ in range(5))
    call(db, "release_jobs", **finished(lost, gone))
    one(db, "cancel_job", job_id=cancelled.job_id)
    holder = connect()
    holder.execute("begin")
    holder.execute(
        "select 1 from rota.jobs where id = any(%s) for update",
        ([locked.job_id, also_locked.job_id],),
    )

    answer = turn(
        db, **finished(lost, locked), **kept(gone, cancelled, also_locked), queues=["none"]
    )

    assert told(answer) == [
        ("lost", lost.job_id),
        ("busy", locked.job_id),
        ("lost", gone.job_id),
        ("cancel_requested", cancelled.job_id),
        ("busy", also_locked.job_id),
    ]
    assert [row.lease_token for row in answer[:2]] == [lost.lease_token, locked.lease_token]
    assert told(turn(db, **finished(locked), queues=["none"])) == [("busy", locked.job_id)]
    holder.execute("rollback")


def test_finish_and_claim_says_nothing_of_a_finish_that_is_repeated(db):
    job = running(db)
    turn(db, **finished(job))

    assert turn(db, **finished(job)) == []


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"job_ids": None}, "job_ids"),
        ({"job_ids": [1]}, "lease_tokens"),
        ({"lease_tokens": [1, 2]}, "lease_tokens"),
        ({"kept_job_ids": None}, "kept_job_ids"),
        ({"kept_job_ids": [1]}, "kept_lease_tokens"),
        ({"kept_lease_tokens": [1]}, "kept_lease_tokens"),
        ({"results": Jsonb([1, 2])}, "results"),
        ({"next_stages": ["a"]}, "next_stages[1]"),
        ({"queues": []}, "queues"),
        ({"max_jobs": 0}, "max_jobs"),
        ({"lease": "0 s"}, "lease"),
        ({"worker": ""}, "worker"),
    ],
    ids=str,
)
def test_finish_and_claim_refuses_and_then_does_nothing(db, bad, name):
    job = running(db)
    waiting = enqueue(db)
    arguments = {"worker": "w", **finished(job), **bad}
    if name == "lease_tokens" and "job_ids" in bad:
        del arguments["lease_tokens"]

    with raises("22023", name):
        call(db, "finish_and_claim", **arguments)

    assert run(db, job.job_id).status == "running"
    assert run(db, waiting).status == "queued"


def test_finish_and_claim_is_one_transaction(db):
    job = running(db)
    enqueue(db)

    (row,) = turn(db, **finished(job))

    assert rows(
        db,
        "select j.xmin::text = f.xmin::text from rota.jobs as j, rota.finished_jobs as f"
        " where j.id = %s and f.id = %s",
        row.job_id,
        job.job_id,
    ) == [(True,)]


def test_finish_and_claim_refuses_an_isolation_level_that_cannot_work(db):
    db.execute("begin isolation level repeatable read")
    with pytest.raises(psycopg.Error) as caught:
        turn(db)
    assert caught.value.sqlstate == "RT009"
    db.execute("rollback")
    assert scalar(db, "select count(*) from rota.jobs") == 0
