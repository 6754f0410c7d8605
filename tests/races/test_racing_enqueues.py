"""Enqueues of the same key that meet: one job, whoever commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from invariants import check_invariants
from races.harness import Pending, Session, call

ONE = call("enqueue", job_type="t", idempotency_key="k")


def many(*keys: str, **rules: str) -> tuple[Any, Any]:
    jobs = [{"job_type": "t", "idempotency_key": key, **rules} for key in keys]
    return call("enqueue_many", jobs=Jsonb(jobs))


def test_enqueue_waits_for_an_open_one_and_returns_its_job(a: Session, b: Session) -> None:
    """A enqueues and stays open; B enqueues the same key and waits; A commits."""
    with a.transaction():
        job = a.fetch(*ONE)
        pending = b.start(*ONE)
        pending.wait_blocked(by=a)

    assert pending.result() == job


def test_enqueue_takes_over_from_one_that_is_rolled_back(a: Session, b: Session) -> None:
    """A enqueues and stays open; B enqueues the same key and waits; A rolls back."""
    with a.transaction() as transaction:
        job = a.fetch(*ONE)
        pending = b.start(*ONE)
        pending.wait_blocked(by=a)
        raise psycopg.Rollback(transaction)

    assert pending.result() != job
    assert b.fetch("select j.id from rota.jobs as j") == pending.result()


def test_five_enqueues_of_one_key_leave_one_job_when_four_roll_back(
    session: Callable[[], Session], db: psycopg.Connection[Any]
) -> None:
    """Five enqueue in open transactions; whoever got through rolls back, but the last one."""
    sessions = [session() for _ in range(5)]
    for each in sessions:
        each.fetch("begin")
    waiting: dict[Session, Pending] = {each: each.start(*ONE) for each in sessions}

    ids = []
    while waiting:
        through = [each for each, pending in waiting.items() if not pending.wait_settled()]
        assert len(through) <= 1, "two hold the same key"
        for each in through:
            ids.append(waiting.pop(each).result()[0][0])
            each.fetch("rollback" if waiting else "commit")

    assert len(set(ids)) == 5
    assert db.execute("select j.id from rota.jobs as j").fetchall() == [(ids[-1],)]
    check_invariants(db)


@pytest.mark.parametrize("is_committed", [True, False])
def test_enqueue_many_of_the_same_keys_in_opposite_orders(
    a: Session, b: Session, db: psycopg.Connection[Any], is_committed: bool
) -> None:
    """A enqueues k1 k2 k3 and stays open; B enqueues k3 k2 k1 and waits; A ends."""
    with a.transaction() as transaction:
        first = a.fetch(*many("k1", "k2", "k3"))
        pending = b.start(*many("k3", "k2", "k1"))
        pending.wait_blocked(by=a)
        if not is_committed:
            raise psycopg.Rollback(transaction)
    second = pending.result()

    assert [row[2] for row in first] == [True] * 3
    assert [row[2] for row in second] == [not is_committed] * 3
    if is_committed:
        assert [row[1] for row in second] == [row[1] for row in first][::-1]
    assert db.execute("select count(*) from rota.jobs").fetchall() == [(3,)]
    check_invariants(db)


@pytest.mark.parametrize("rules", [{}, {"on_conflict": "rerun"}], ids=str)
def test_enqueue_many_takes_its_keys_in_one_order(
    session: Callable[[], Session], rules: dict[str, str]
) -> None:
    """C has k2.  A gets k1 and waits for k2; B, told k3 first, waits for A and has none."""
    a, b, c = session(), session(), session()
    c.fetch("begin")
    c.fetch(*many("k2", **rules))

    first = a.start(*many("k1", "k2", "k3", **rules))
    first.wait_blocked(by=c)
    second = b.start(*many("k3", "k2", "k1", **rules))
    second.wait_blocked(by=a)
    c.fetch("rollback")

    assert [row[2] for row in first.result()] == [True] * 3
    assert [row[2] for row in second.result()] == [False] * 3


def test_enqueue_many_gives_its_keys_up_when_it_must_begin_again(
    session: Callable[[], Session], db: psycopg.Connection[Any]
) -> None:
    """The job that A found under k1 ends before A can read it: A must not hold k3 meanwhile.

    A passes over k1, inserts k3, and waits for C's k5.  B finishes the job of k1, enqueues k1
    anew in an open transaction, then k3, and waits for A.  C rolls back.  A, having all other
    keys, lacks k1 and begins again.  So B gets k3; it commits, and A finds both.
    """
    a, b, c = session(), session(), session()
    b.fetch(*many("k1"))
    job_id, token = b.fetch(*call("claim_jobs", worker="w"))[0][:2]
    c.fetch("begin")
    c.fetch(*many("k5"))

    pending = a.start(*many("k9", "k5", "k3", "k1"))
    pending.wait_blocked(by=c)
    b.fetch(*call("finish_job", job_id=job_id, lease_token=token))
    b.fetch("begin")
    b.fetch(*many("k1"))
    third = b.start(*many("k3"))
    third.wait_blocked(by=a)
    c.fetch("rollback")
    assert third.result()[0][2]
    b.fetch("commit")

    assert [row[2] for row in pending.result()] == [True, True, False, False]
    assert db.execute("select count(*) from rota.jobs").fetchall() == [(4,)]
    check_invariants(db)


@pytest.mark.parametrize("act", ["heartbeat", "finish_job"])
@pytest.mark.parametrize(
    "way",
    [
        ONE,
        call("enqueue", job_type="t", idempotency_key="k", ordering_key="o"),
        call("enqueue", job_type="t", idempotency_key="k", unique_for="1 hour"),
        many("k", "other"),
        many("k", "other", unique_for="1 hour"),
    ],
    ids=["one", "in order", "unique for", "many", "many unique for"],
)
def test_enqueue_finds_a_job_that_an_open_transaction_changes(
    a: Session, b: Session, act: str, way: Any
) -> None:
    """A has the job of the key in an open transaction; B enqueues the key and does not wait."""
    (job,) = a.fetch(*ONE)[0]
    job_id, token = a.fetch(*call("claim_jobs", worker="w"))[0][:2]
    b.fetch("set statement_timeout = '5s'")

    with a.transaction():
        a.fetch(*call(act, job_id=job_id, lease_token=token))
        answer = b.fetch(*way)

    assert job in answer[0]
    assert False in answer[0] or len(answer[0]) == 1


def test_enqueue_finds_a_job_whose_claim_is_open(a: Session, b: Session) -> None:
    """A claims the job of the key and stays open; B enqueues the key and does not wait."""
    job = a.fetch(*ONE)
    b.fetch("set statement_timeout = '5s'")

    with a.transaction():
        a.fetch(*call("claim_jobs", worker="w"))

        assert b.fetch(*ONE) == job


def test_replace_waits_for_an_open_claim(a: Session, b: Session) -> None:
    """A claims the job and stays open; B replaces it, and waits for A."""
    job = a.fetch(*ONE)

    with a.transaction():
        a.fetch(*call("claim_jobs", worker="w"))
        replace = call("enqueue", job_type="t", idempotency_key="k", on_conflict="replace")
        pending = b.start(*replace)
        pending.wait_blocked(by=a)

    assert pending.result() == job


def test_replace_of_a_running_job_holds_up_nothing(a: Session, b: Session) -> None:
    """A worker claims the job; B replaces it and stays open; A ends it."""
    job = a.fetch(*ONE)
    (claim,) = a.fetch(*call("claim_jobs", worker="w"))

    with b.transaction():
        assert job == b.fetch(
            *call("enqueue", job_type="t", idempotency_key="k", on_conflict="replace")
        )
        a.fetch("set statement_timeout = '5s'")
        finish = call("finish_job", job_id=claim[0], lease_token=claim[1])
        assert a.fetch(*finish) == [("finished",)]


def test_replace_of_many_waits_for_an_open_claim_and_then_leaves_the_job(
    a: Session, b: Session
) -> None:
    """A claims the job and stays open; B replaces it in a batch, and waits; A commits."""
    (job,) = a.fetch(*ONE)[0]

    with a.transaction():
        a.fetch(*call("claim_jobs", worker="w"))
        pending = b.start(*many("k", "new", on_conflict="replace"))
        pending.wait_blocked(by=a)

    (first, second) = pending.result()
    assert (first[1], first[2], second[2]) == (job, False, True)


def test_retry_is_refused_at_once_where_another_job_has_the_key(a: Session, b: Session) -> None:
    """The job of a key ends, and another comes; A claims that one; B retries the first."""
    first = a.fetch(*ONE)[0][0]
    a.fetch(*call("cancel_job", job_id=first))
    a.fetch(*ONE)
    b.fetch("set statement_timeout = '5s'")

    with a.transaction():
        a.fetch(*call("claim_jobs", worker="w"))

        with pytest.raises(psycopg.Error) as caught:
            b.fetch(*call("retry_job", job_id=first))

    assert caught.value.sqlstate == "RT007"


def test_a_batch_is_told_of_a_job_whose_cancel_is_open_and_the_line_goes_on(
    a: Session, b: Session
) -> None:
    """A cancels the head of a line and stays open; B enqueues its key, and one of no key.

    Nothing waits, and all that is left runs: the next of the line, which has a place of the
    lane without the head, behind the job that B was given the place of the head for.
    """
    line = {"ordering_key": "o", "limit_key": "c"}
    head = a.fetch(*call("enqueue", job_type="t", idempotency_key="k", **line))[0][0]
    following = a.fetch(*call("enqueue", job_type="t", **line))[0][0]
    b.fetch("set statement_timeout = '5s'")
    batch = Jsonb([{"job_type": "t", "idempotency_key": "k"}, {"job_type": "t"}])

    with a.transaction():
        a.fetch(*call("cancel_job", job_id=head))
        told, other = b.fetch(*call("enqueue_many", jobs=batch))
    ran = [row[0] for row in a.fetch(*call("claim_jobs", worker="w", max_jobs=9))]

    assert told == (1, head, False)
    assert ran == [other[1], following]


# In read committed nobody has to wait; an older snapshot cannot tell that a job has ended.
OLDER = "begin isolation level repeatable read"


def test_enqueue_in_an_older_snapshot_waits_for_an_open_finish(a: Session, b: Session) -> None:
    """A finishes the job and stays open; B enqueues its key and waits; A commits: a new job."""
    job = a.fetch(*ONE)
    job_id, token = a.fetch(*call("claim_jobs", worker="w"))[0][:2]
    b.fetch(OLDER)

    with a.transaction():
        a.fetch(*call("finish_job", job_id=job_id, lease_token=token))
        pending = b.start(*ONE)
        pending.wait_blocked(by=a)

    assert pending.result() != job
    b.fetch("commit")


def test_enqueue_in_an_older_snapshot_finds_the_job_whose_finish_is_rolled_back(
    a: Session, b: Session
) -> None:
    """A finishes the job and stays open; B enqueues its key and waits; A rolls back."""
    job = a.fetch(*ONE)
    job_id, token = a.fetch(*call("claim_jobs", worker="w"))[0][:2]
    b.fetch(OLDER)

    with a.transaction() as transaction:
        a.fetch(*call("finish_job", job_id=job_id, lease_token=token))
        pending = b.start(*ONE)
        pending.wait_blocked(by=a)
        raise psycopg.Rollback(transaction)

    assert pending.result() == job
    b.fetch("commit")


def test_enqueue_many_answers_once_for_each_job_in_an_older_snapshot(
    connect: Callable[..., psycopg.Connection[Any]],
) -> None:
    """A takes a snapshot that stays; B ends the job of a key; A enqueues the key."""
    a, b = connect(), connect()
    old = b.execute("select rota.enqueue('t', idempotency_key => 'k')").fetchone()
    assert old is not None

    with a.transaction():
        a.execute("set transaction isolation level repeatable read")
        a.execute("select from rota.jobs")
        b.execute("select rota.cancel_job(%s)", old)
        jobs = Jsonb([{"job_type": "t", "idempotency_key": "k"}, {"job_type": "other"}])
        answers = a.execute("select * from rota.enqueue_many(%s)", (jobs,)).fetchall()

    assert [(ordinal, is_new) for ordinal, _, is_new in answers] == [(1, True), (2, True)]
