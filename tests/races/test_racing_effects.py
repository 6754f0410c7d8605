"""Two jobs, or two leases of one job, at the same effect: one is told to go on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from invariants import check_invariants
from races.harness import Pending, Session, call
from races.instrument import instrument, stopped
from support.clock import Clock
from support.mutation import mutate

TICK = call("tick")
SWEPT = 1  # where a tick says so
Query = tuple[Any, dict[str, Any]]


class Lease:
    """A claim of a job, and what it may say of the effect."""

    def __init__(
        self, session: Session, *, is_new: bool = True, queue: str = "default", key: str = "k"
    ) -> None:
        if is_new:
            session.fetch(*call("enqueue", job_type="t", queue=queue))
        row = session.fetch(*call("claim_jobs", worker="w", queues=[queue]))[0]
        names = {"scope": "mail", "key": key, "job_id": row[0], "lease_token": row[1]}
        self.job_id = row[0]
        self.record = call("record_effect", **names)
        self.record_again = call("record_effect", **names, if_unknown="again")
        self.record_briefly = call(
            "record_effect", **names, keep="1 second", if_unknown="again"
        )
        self.complete = call("complete_effect", **names)
        self.withdraw = call("withdraw_effect", **names)
        self.finish = call("finish_job", job_id=row[0], lease_token=row[1])
        self.heartbeat = call("heartbeat", job_id=row[0], lease_token=row[1])


@pytest.fixture(autouse=True)
def _invariants(db: psycopg.Connection[Any]) -> Iterator[None]:
    yield
    check_invariants(db)


@pytest.fixture
def one(a: Session) -> Lease:
    return Lease(a)


@pytest.fixture
def two(a: Session, one: Lease) -> Lease:
    """Another job than that of `one`, which runs at the same time."""
    return Lease(a)


@pytest.fixture
def dead(a: Session, clock: Clock) -> Lease:
    """A lease that recorded the effect and was lost; its job is claimed by the next `Lease`."""
    clock.set("2026-03-01 12:00:00+00")
    lease = Lease(a)
    a.fetch(*lease.record)
    clock.advance("1 hour")
    a.fetch(*TICK)
    clock.advance("1 hour")
    return lease


def sqlstate(pending: Pending) -> str | None:
    with pytest.raises(psycopg.Error) as caught:
        pending.result()
    return caught.value.sqlstate


def holder(session: Session) -> list[Any]:
    """Whose the effect is, as which job of all by their ids, and whether it is done."""
    return session.fetch(
        "select (select count(*) from rota.job_runs as r where r.id <= e.job_id),"
        " e.completed_at is not null from rota.effects as e"
    )


def test_record_waits_for_a_record_and_is_told_that_it_is_in_progress(
    a: Session, b: Session, one: Lease, two: Lease
) -> None:
    """A records and stays open; B records the same key and waits; A commits."""
    with a.transaction():
        assert a.fetch(*one.record) == [(True,)]
        pending = b.start(*two.record_again)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT010"
    assert holder(b) == [(1, False)]


def test_record_waits_for_a_record_that_rolls_back_and_is_the_first(
    a: Session, b: Session, one: Lease, two: Lease
) -> None:
    """A records and stays open; B records the same key and waits; A rolls back."""
    with a.transaction() as transaction:
        assert a.fetch(*one.record) == [(True,)]
        pending = b.start(*two.record)
        pending.wait_blocked(by=a)
        raise psycopg.Rollback(transaction)

    assert pending.result() == [(True,)]
    assert holder(b) == [(2, False)]


def test_record_waits_for_a_record_that_is_completed_at_once(
    a: Session, b: Session, one: Lease, two: Lease
) -> None:
    """A records and completes in one transaction; B records and waits; A commits."""
    with a.transaction():
        a.fetch(*one.record)
        pending = b.start(*two.record_again)
        pending.wait_blocked(by=a)
        assert a.fetch(*one.complete) == [("completed",)]

    assert pending.result() == [(False,)]


def test_records_of_one_lease_are_told_true_once(a: Session, b: Session, one: Lease) -> None:
    """A records and stays open; B records for the same lease and waits; A commits."""
    with a.transaction():
        assert a.fetch(*one.record) == [(True,)]
        pending = b.start(*one.record)
        pending.wait_blocked(by=a)

    assert pending.result() == [(False,)]


def test_record_waits_for_a_sweep_and_is_refused(
    a: Session, b: Session, one: Lease, clock: Clock
) -> None:
    """A sweeps the job and stays open; B records and waits; A commits; nothing is recorded."""
    clock.advance("1 hour")
    with a.transaction():
        a.fetch(*TICK)
        pending = b.start(*one.record)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT002"
    assert holder(b) == []


def test_record_stands_when_the_sweep_before_it_rolls_back(
    a: Session, b: Session, one: Lease, clock: Clock
) -> None:
    """A sweeps the job and stays open; B records and waits; A rolls back."""
    clock.advance("1 hour")
    with a.transaction() as transaction:
        a.fetch(*TICK)
        pending = b.start(*one.record)
        pending.wait_blocked(by=a)
        raise psycopg.Rollback(transaction)

    assert pending.result() == [(True,)]


def test_sweep_passes_over_a_job_that_records(
    a: Session, b: Session, one: Lease, clock: Clock
) -> None:
    """A records late and stays open; B sweeps and does not wait; A commits."""
    clock.advance("1 hour")
    with a.transaction():
        a.fetch(*one.record)
        assert b.fetch(*TICK)[0][SWEPT] == 0

    assert b.fetch(*TICK)[0][SWEPT] == 1
    assert holder(b) == [(1, False)]


def test_record_sees_that_the_holder_was_swept_while_it_waited(
    a: Session, b: Session, one: Lease, two: Lease, clock: Clock, session: Callable[[], Session]
) -> None:
    """A locks the record; B takes over and waits; C sweeps the holder; A lets go."""
    a.fetch(*one.record)
    clock.advance("1 hour")
    c = session()
    with a.transaction():
        a.fetch("select from rota.effects for update")
        pending = b.start(*two.record_again)
        pending.wait_blocked(by=a)
        assert c.fetch(*TICK)[0][SWEPT] == 1  # the waiting one holds its own job

    assert pending.result() == [(True,)]
    assert holder(b) == [(2, False)]


def test_takeover_waits_for_a_completion_and_finds_it_done(
    a: Session, b: Session, one: Lease, two: Lease
) -> None:
    """A completes and stays open; B wants to take over and waits; A commits."""
    a.fetch(*one.record)
    with a.transaction():
        assert a.fetch(*one.complete) == [("completed",)]
        pending = b.start(*two.record_again)
        pending.wait_blocked(by=a)

    assert pending.result() == [(False,)]
    assert holder(b) == [(1, True)]


def test_takeover_waits_for_a_completion_that_rolls_back(
    a: Session, b: Session, one: Lease, two: Lease
) -> None:
    """A completes and stays open; B wants to take over and waits; A rolls back."""
    a.fetch(*one.record)
    with a.transaction() as transaction:
        a.fetch(*one.complete)
        pending = b.start(*two.record_again)
        pending.wait_blocked(by=a)
        raise psycopg.Rollback(transaction)

    assert sqlstate(pending) == "RT010"
    assert holder(b) == [(1, False)]


def test_completion_with_an_old_token_does_not_wait_for_the_takeover(
    a: Session, b: Session, dead: Lease
) -> None:
    """A takes over and stays open; B completes with the old token, and is refused at once."""
    again = Lease(a, is_new=False)
    with a.transaction():
        assert a.fetch(*again.record_again) == [(True,)]
        pending = b.start(*dead.complete)

        assert sqlstate(pending) == "RT002"
    assert holder(b) == [(1, False)]


def test_two_takeovers_are_one(a: Session, b: Session, dead: Lease) -> None:
    """A takes over and stays open; B, another job, wants to as well; A commits."""
    again, other = Lease(a, is_new=False), Lease(a)
    with a.transaction():
        assert a.fetch(*again.record_again) == [(True,)]
        pending = b.start(*other.record_again)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT010"
    assert holder(b) == [(1, False)]


def test_two_takeovers_of_which_the_first_rolls_back_are_one(
    a: Session, b: Session, dead: Lease
) -> None:
    """A takes over and stays open; B, another job, wants to as well; A rolls back."""
    again, other = Lease(a, is_new=False), Lease(a)
    with a.transaction() as transaction:
        a.fetch(*again.record_again)
        pending = b.start(*other.record_again)
        pending.wait_blocked(by=a)
        raise psycopg.Rollback(transaction)

    assert pending.result() == [(True,)]
    assert holder(b) == [(2, False)]


def test_record_waits_for_a_withdrawal_and_is_the_first(
    a: Session, b: Session, one: Lease, two: Lease
) -> None:
    """A withdraws and stays open; B records and waits; A commits."""
    a.fetch(*one.record)
    with a.transaction():
        a.fetch(*one.withdraw)
        pending = b.start(*two.record)
        pending.wait_blocked(by=a)

    assert pending.result() == [(True,)]
    assert holder(b) == [(2, False)]


def test_record_waits_for_a_withdrawal_that_rolls_back(
    a: Session, b: Session, one: Lease, two: Lease
) -> None:
    """A withdraws and stays open; B records and waits; A rolls back."""
    a.fetch(*one.record)
    with a.transaction() as transaction:
        a.fetch(*one.withdraw)
        pending = b.start(*two.record)
        pending.wait_blocked(by=a)
        raise psycopg.Rollback(transaction)

    assert sqlstate(pending) == "RT010"
    assert holder(b) == [(1, False)]


def test_withdrawal_waits_for_a_completion_and_is_refused(
    a: Session, b: Session, one: Lease
) -> None:
    """A completes and stays open; B withdraws the same record and waits; A commits."""
    a.fetch(*one.record)
    with a.transaction():
        a.fetch(*one.complete)
        pending = b.start(*one.withdraw)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT011"
    assert holder(b) == [(1, True)]


def test_completion_waits_for_a_completion_and_is_answered_as_done(
    a: Session, b: Session, one: Lease
) -> None:
    """A completes and stays open; B completes the same record and waits; A commits."""
    a.fetch(*one.record)
    with a.transaction():
        a.fetch(*one.complete)
        pending = b.start(*one.complete)
        pending.wait_blocked(by=a)

    assert pending.result() == [("already_completed",)]


def test_completion_waits_for_a_finish_and_is_refused(
    a: Session, b: Session, one: Lease
) -> None:
    """A finishes the job and stays open; B completes its effect and waits; A commits."""
    a.fetch(*one.record)
    with a.transaction():
        a.fetch(*one.finish)
        pending = b.start(*one.complete)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT003"
    assert holder(b) == [(1, False)]


def test_a_record_that_is_taken_over_while_retention_looks_at_it_stays(
    a: Session, b: Session, db: psycopg.Connection[Any], clock: Clock
) -> None:
    """A finds an old record of a lost lease; B takes it over for a second; A goes on."""
    clock.set("2026-03-01 12:00:00+00")
    lost = Lease(a)
    a.fetch(*lost.record_briefly)
    clock.advance("1 hour")
    a.fetch("select rota.sweep_stale_leases()")
    clock.advance("1 hour")
    instrument(db)
    mutate(db, "_is_leased", "return exists (", "assert race.pause(''); return exists (")

    with stopped(db, a, "select rota._purge('effects', 10)", at=2) as pending:
        held = Lease(b, is_new=False)
        # A goes by the clock that it saw at first, so a second over is one of before.
        clock.set("2026-03-01 13:30:00+00")
        b.fetch(*held.record_briefly)

    assert pending.result() == [(0,)]
    assert b.fetch(*held.complete) == [("completed",)]


def test_retention_passes_over_a_record_that_is_taken_over(
    a: Session, b: Session, one: Lease, clock: Clock
) -> None:
    """A takes a record over whose time is up and stays open; B purges what is old."""
    a.fetch(*one.record_briefly)
    clock.advance("1 hour")
    a.fetch(*TICK)
    other = Lease(a)
    with a.transaction():
        assert a.fetch(*other.record_again) == [(True,)]
        clock.advance("11 seconds")
        b.fetch(*TICK)

    assert holder(b) == [(2, False)]


def test_record_waits_for_retention_and_is_the_first(
    a: Session, b: Session, one: Lease, two: Lease, clock: Clock
) -> None:
    """A purges a completed record and stays open; B records the same key; A commits."""
    a.fetch(*one.record_briefly)
    a.fetch(*one.complete)
    a.fetch(*one.finish)
    clock.advance("30 seconds")
    with a.transaction():
        a.fetch(*TICK)
        pending = b.start(*two.record)
        pending.wait_blocked(by=a)

    assert pending.result() == [(True,)]
    assert holder(b) == [(2, False)]


@pytest.mark.slow
def test_a_crowd_meets_no_deadlock_and_completes_each_effect_once(
    session: Callable[[], Session],
) -> None:
    """Eight sessions record, complete, withdraw, finish and tick at random."""
    problems: list[str] = []
    completed: list[str] = []
    seed = random.SystemRandom().randrange(10**6)
    calls = ["record", "record_again", "complete", "withdraw", "heartbeat", "finish"]

    def act(number: int, session: Session) -> None:
        dice = random.Random(seed + number)
        for turn in range(60):
            key = f"k{turn // 5}"
            lease = Lease(session, queue=f"q{number}", key=key)
            for name in ["record_again", *dice.choices(calls, k=4)]:
                try:
                    answer = session.fetch(*getattr(lease, name))
                    if answer == [("completed",)]:
                        completed.append(key)
                    if name == "heartbeat":
                        session.fetch(*TICK)
                except psycopg.Error as error:
                    if error.sqlstate not in ("RT003", "RT010", "RT011"):
                        problems.append(f"{name}: {error.sqlstate} {error}")
            if turn % 5:
                session.fetch(*call("retry_job", job_id=lease.job_id, force=True))
                session.fetch(*call("cancel_job", job_id=lease.job_id))

    threads = [threading.Thread(target=act, args=(n, session())) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert problems == [], f"seed {seed}"
    assert len(completed) == len(set(completed)) > 0, f"seed {seed}"
