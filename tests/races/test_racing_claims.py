"""Claims that meet: no job twice, nobody waits, nobody is sent away while there is work."""

from __future__ import annotations

from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from invariants import check_invariants
from races.harness import Session, call
from races.instrument import ARM, DISARM, GATE, PAUSE, instrument, stopped
from support.clock import Clock
from support.mutation import mutate

QUEUES = ["default", "mail", "reports"]


def enqueue(session: Session, count: int, queues: list[str]) -> None:
    for number in range(count):
        session.fetch(*call("enqueue", job_type="t", queue=queues[number % len(queues)]))


def claim(session: Session, count: int, **arguments: Any) -> list[int]:
    rows = session.fetch(*call("claim_jobs", worker="w", max_jobs=count, **arguments))
    return [row[0] for row in rows]


@pytest.mark.parametrize("queues", [["default"], QUEUES])
@pytest.mark.parametrize("size", [1, 7])
def test_claim_passes_over_what_an_open_claim_holds(
    a: Session, b: Session, db: psycopg.Connection[Any], queues: list[str], size: int
) -> None:
    """A claims and stays open; B claims the next ones at once, thrice; A commits."""
    enqueue(a, 4 * size, queues)

    with a.transaction():
        first = claim(a, size, queues=queues)
        rest = [claim(b, size, queues=queues) for _ in range(4)]

    assert len(first) == size
    assert [len(part) for part in rest] == [size, size, size, 0]
    assert len({*first, *(job_id for part in rest for job_id in part)}) == 4 * size
    check_invariants(db)


@pytest.mark.parametrize("queues", [["default"], QUEUES])
def test_claim_that_is_rolled_back_leaves_the_jobs_to_others(
    a: Session, b: Session, db: psycopg.Connection[Any], queues: list[str]
) -> None:
    """A claims all, stays open; B finds none; A rolls back; B claims them, no attempt used."""
    enqueue(a, 6, queues)

    with a.transaction() as transaction:
        assert len(claim(a, 10, queues=queues)) == 6
        assert claim(b, 10, queues=queues) == []
        raise psycopg.Rollback(transaction)

    assert len(claim(b, 10, queues=queues)) == 6
    assert db.execute("select distinct attempts from rota.jobs").fetchall() == [(1,)]


def test_claims_of_many_queues_in_other_orders_never_wait(a: Session, b: Session) -> None:
    """A claims from three queues and stays open; B names them the other way round."""
    enqueue(a, 30, QUEUES)

    with a.transaction():
        first = claim(a, 15, queues=QUEUES)
        second = claim(b, 15, queues=QUEUES[::-1])

    assert len({*first, *second}) == 30


def test_claim_of_many_queues_takes_nothing_that_was_taken_while_it_looked(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A claims and is stopped at each of its statements; B claims all it gets and commits."""
    instrument(db)

    for stop in count(1):
        enqueue(b, 2, QUEUES[:2])
        db.execute("select pg_advisory_lock(%s)", [GATE])
        a.fetch(ARM, [stop])
        pending = a.start(*call("claim_jobs", worker="w", queues=QUEUES[:2], max_jobs=2))
        is_stopped = pending.wait_settled()
        taken = claim(b, 2, queues=QUEUES[:2])
        db.execute("select pg_advisory_unlock(%s)", [GATE])
        got = [row[0] for row in pending.result()]
        a.fetch(DISARM)

        assert len({*taken, *got}) == len(taken) + len(got) == 2
        db.execute("delete from rota.jobs")
        if not is_stopped:
            break
    assert stop > 3


def test_claim_of_many_queues_leaves_a_job_that_was_moved_while_it_looked(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A has found a job of its two queues; B moves it to a third; A locks what it found."""
    job_id = a.fetch(*call("enqueue", job_type="t"))[0][0]
    db.execute(PAUSE)
    lock = "ids := ids || array("
    mutate(db, "_lock_merged", lock, f"perform race.pause(''); {lock}")

    with stopped(
        db, a, *call("claim_jobs", worker="w", queues=QUEUES[:2], max_jobs=2)
    ) as pending:
        move = {"filter": Jsonb({"all": True}), "arguments": Jsonb({"queue": QUEUES[2]})}
        b.fetch(*call("act_on_jobs", act="move", **move))

    assert pending.result() == []
    assert claim(b, 1, queues=QUEUES[2:]) == [job_id]


def test_claim_takes_a_job_that_was_just_retried_by_another(a: Session, b: Session) -> None:
    """A retries a waiting job and stays open; B finds none; A commits; B claims it."""
    job_id = a.fetch(*call("enqueue", job_type="t", delay="1 hour"))[0][0]

    with a.transaction():
        a.fetch(*call("retry_job", job_id=job_id))
        assert claim(b, 1) == []

    assert claim(b, 1) == [job_id]


def test_claim_goes_by_the_priority_that_was_committed(a: Session, b: Session) -> None:
    """A moves a job to the front and stays open; B takes another one; A commits; B takes it."""
    first, second, third = [a.fetch(*call("enqueue", job_type="t"))[0][0] for _ in range(3)]

    with a.transaction():
        a.fetch(*call("set_priority", job_id=first, priority=-5))
        assert claim(b, 1) == [second]

    assert claim(b, 2) == [first, third]


def test_set_priority_waits_for_an_open_claim(a: Session, b: Session) -> None:
    """A claims and stays open; B sets the priority and waits; A commits; B's stands."""
    job_id = a.fetch(*call("enqueue", job_type="t"))[0][0]

    with a.transaction():
        claim(a, 1)
        pending = b.start(*call("set_priority", job_id=job_id, priority=9))
        pending.wait_blocked(by=a)
    pending.result()

    found = b.fetch("select j.status, j.priority, j.attempts from rota.jobs as j")
    assert found == [("running", 9, 1)]


def test_cancel_waits_for_an_open_claim_and_then_asks_its_worker(
    a: Session, b: Session
) -> None:
    """A claims and stays open; B cancels and waits; A commits; B learns that the job runs."""
    job_id = a.fetch(*call("enqueue", job_type="t"))[0][0]

    with a.transaction():
        claim(a, 1)
        pending = b.start(*call("cancel_job", job_id=job_id))
        pending.wait_blocked(by=a)

    assert pending.result() == [("running",)]


def test_claim_passes_over_a_job_that_is_being_cancelled(a: Session, b: Session) -> None:
    """A cancels and stays open; B claims the other job; A rolls back; B claims this one."""
    first, second = [a.fetch(*call("enqueue", job_type="t"))[0][0] for _ in range(2)]

    with a.transaction() as transaction:
        a.fetch(*call("cancel_job", job_id=first))
        assert claim(b, 2) == [second]
        raise psycopg.Rollback(transaction)

    assert claim(b, 2) == [first]


def test_pause_and_claim_never_wait_for_each_other(a: Session, b: Session) -> None:
    """A claims and stays open; B pauses the queue; A's jobs run on; A and B get no more."""
    enqueue(a, 3, ["default"])

    with a.transaction():
        assert len(claim(a, 1)) == 1
        b.fetch(*call("pause_queue", queue="default"))
        assert claim(a, 1) == []

    assert claim(b, 1) == []
    assert b.fetch("select count(*) from rota.jobs as j where j.status = 'running'") == [(1,)]


def test_claim_does_not_see_a_pause_that_is_not_committed(a: Session, b: Session) -> None:
    """A pauses and stays open; B claims without waiting; A rolls back; B claims again."""
    enqueue(a, 2, ["default"])

    with a.transaction() as transaction:
        a.fetch(*call("pause_queue", queue="default"))
        assert len(claim(b, 1)) == 1
        raise psycopg.Rollback(transaction)

    assert len(claim(b, 1)) == 1


def test_tokens_grow_through_everything_that_can_happen_to_a_job(
    a: Session, db: psycopg.Connection[Any], clock: Clock
) -> None:
    """The clock stands still, then goes back; the job is given back in every way there is."""
    clock.set("2026-03-01 12:00:00+00")
    job_id = a.fetch(*call("enqueue", job_type="t", max_attempts=3))[0][0]
    steps = [
        ("release_jobs", {"job_ids": [job_id], "lease_tokens": None}),
        ("snooze_job", {"job_id": job_id, "lease_token": 0, "delay": "0"}),
        ("fail_job", {"job_id": job_id, "lease_token": 0, "error": "x", "retry_in": "0"}),
        ("retry_job", {"job_id": job_id, "force": True}),
        ("fail_job", {"job_id": job_id, "lease_token": 0, "error": "x", "fatal": True}),
        ("finish_job", {"job_id": job_id, "lease_token": 0}),
        ("sweep_stale_leases", {}),
    ]
    tokens = []

    for function, arguments in steps:
        token = a.fetch(*call("claim_jobs", worker="w"))[0][1]
        tokens.append(token)
        if function == "sweep_stale_leases":
            clock.advance("1 hour")
        given = {
            name: [token]
            if name == "lease_tokens"
            else token
            if name == "lease_token"
            else value
            for name, value in arguments.items()
        }
        a.fetch(*call(function, **given))
        clock.advance("-1 second")
        a.fetch(*call("retry_job", job_id=job_id))
        db.execute("update rota.jobs set run_at = rota.now() - interval '1 day'")

    assert tokens == sorted(set(tokens))
