"""Jobs that wait for their turn or for other jobs, while those come, end and are claimed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from invariants import check_invariants
from races.harness import Session, call
from races.instrument import PAUSE, instrument, stopped
from support.mutation import mutate

SECONDS = 3.0
RETRIES = {
    "max_attempts": 3,
    "backoff": {"kind": "fixed", "base_seconds": 0.01, "cap_seconds": 0.01},
}
BOTH = pytest.mark.parametrize("is_committed", [True, False])


def enqueue(session: Session, **arguments: Any) -> int:
    ((job_id,),) = session.fetch(*call("enqueue", job_type="t", **arguments))
    return int(job_id)


def claimed(session: Session) -> list[Any]:
    return session.fetch(
        "select c.job_id, c.lease_token from rota.claim_jobs('w', max_jobs => 100) as c"
    )


def ids(session: Session) -> list[int]:
    """Do what is left for maintenance, and what was deferred, and claim."""
    deadline = time.monotonic() + 10
    while session.fetch("select exists (select from rota.pending_checks)") == [(True,)]:
        assert time.monotonic() < deadline, session.fetch(
            "select c.kind, c.subject, c.deferrals from rota.pending_checks as c"
        )
        tick(session)
    return [job[0] for job in claimed(session)]


def tick(session: Session) -> None:
    session.fetch("select from rota.tick()")


def state(session: Session, job_id: int) -> str:
    query = "select r.status from rota.job_runs as r where r.id = %s"
    return str(session.fetch(query, [job_id])[0][0])


def finish(job: Any) -> tuple[Any, Any]:
    return call("finish_job", job_id=job[0], lease_token=job[1])


def give_up(is_committed: bool, transaction: psycopg.Transaction) -> None:
    if not is_committed:
        raise psycopg.Rollback(transaction)


@BOTH
def test_a_parent_ends_without_waiting_for_a_child_that_comes_in(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A enqueues a child and stays open; B finishes the parent; A ends."""
    parent = enqueue(a)
    (job,) = claimed(b)
    with a.transaction() as transaction:
        child = enqueue(a, depends_on=[parent])
        assert b.fetch(*finish(job)) == [("finished",)]
        tick(b)
        give_up(is_committed, transaction)

    assert ids(b) == ([child] if is_committed else [])


@BOTH
def test_a_child_that_comes_in_while_its_dead_parent_is_retried(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A retries a dead job and stays open; B enqueues a child, which sees it dead; A ends."""
    parent = enqueue(a)
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    with a.transaction() as transaction:
        a.fetch(*call("retry_job", job_id=parent))
        child = enqueue(b, depends_on=[parent])
        give_up(is_committed, transaction)

    if is_committed:
        (job,) = claimed(b)
        assert job[0] == parent
        b.fetch(*finish(job))
    assert ids(b) == ([child] if is_committed else [])


def test_two_that_end_and_claim_at_once_leave_nobody_behind(a: Session, b: Session) -> None:
    """A ends the head of a key, claims and stays open; B adds a job and claims; A commits.

    Neither sees what the other does, and each looks at the key.
    """
    enqueue(a, ordering_key="k")
    (job,) = claimed(a)
    with a.transaction():
        a.fetch(*finish(job))
        assert claimed(a) == []
        second = enqueue(b, ordering_key="k")
        assert claimed(b) == []

    assert ids(b) == [second]


def test_a_transaction_that_enqueues_and_claims_leaves_its_job_to_others(
    a: Session, b: Session
) -> None:
    """A enqueues behind the head, claims and stays open; B ends the head and claims."""
    enqueue(a, ordering_key="k")
    (job,) = claimed(b)
    with a.transaction():
        second = enqueue(a, ordering_key="k")
        assert claimed(a) == []
        b.fetch(*finish(job))
        assert claimed(b) == []

    assert ids(b) == [second]


@BOTH
def test_a_child_comes_in_without_waiting_for_its_parent_that_ends(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A finishes the parent and stays open; B enqueues a child; maintenance looks; A ends."""
    parent = enqueue(a)
    (job,) = claimed(a)
    with a.transaction() as transaction:
        a.fetch(*finish(job))
        child = enqueue(b, depends_on=[parent])
        tick(b)
        assert claimed(b) == []
        give_up(is_committed, transaction)

    if not is_committed:
        assert ids(b) == []
        b.fetch(*finish(job))
    assert ids(b) == [child]


def test_a_last_job_starts_once_when_all_parts_end_together(
    session: Callable[[], Session], a: Session
) -> None:
    """Each of 5 sessions finishes a part and stays open; all commit; maintenance looks."""
    parts = [enqueue(a) for _ in range(5)]
    last = enqueue(a, depends_on=parts)
    jobs = claimed(a)
    sessions = [session() for _ in jobs]
    for each, job in zip(sessions, jobs, strict=True):
        each.fetch("begin")
        each.fetch(*finish(job))
    assert claimed(a) == []
    for each in sessions:
        each.fetch("commit")
    tick(a)

    with sessions[0].transaction():
        first = claimed(sessions[0])
        assert claimed(sessions[1]) == []

    assert [job[0] for job in first] == [last]
    assert ids(sessions[1]) == []


@BOTH
def test_a_part_that_comes_in_while_the_others_end(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A adds a part and stays open; B finishes the only other one and claims; A ends."""
    split = enqueue(a)
    (job,) = claimed(b)
    last = enqueue(a, depends_on=[split])
    with a.transaction() as transaction:
        part = enqueue(a, blocks=last)
        b.fetch(*finish(job))
        tick(b)
        assert claimed(b) == []
        give_up(is_committed, transaction)

    if is_committed:
        assert ids(b) == [part]
        b.fetch(
            "select rota.finish_job(j.id, j.lease_token) from rota.jobs as j where"
            " j.status = 'running'"
        )
    assert ids(b) == [last]


@pytest.mark.parametrize("how", ["enqueue", "enqueue_many"])
def test_a_part_that_comes_too_late_is_refused(a: Session, b: Session, how: str) -> None:
    """A frees the last job and stays open; B names it in before, and does not wait."""
    split = enqueue(a)
    last = enqueue(a, depends_on=[split])
    (job,) = claimed(a)
    with a.transaction():
        a.fetch(*finish(job))
        with pytest.raises(psycopg.Error) as caught:
            b.fetch(*whole(how, {"blocks": last}))

    assert caught.value.sqlstate == "RT013"
    assert ids(b) == [last]


def whole(function: str, job: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the call that adds this one job."""
    if function == "enqueue":
        return call(function, job_type="t", **job)
    return call(function, jobs=Jsonb([{"job_type": "t", **job}]))


def test_a_job_that_is_waited_for_while_retention_looks_at_it_stays(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A finds a cancelled job of long ago in its partition; B waits for it; A goes on."""
    parent = enqueue(b)
    b.fetch(*call("cancel_job", job_id=parent))
    ((partition, condition),) = db.execute(
        "select f.tableoid::regclass::text, p.condition from rota.finished_jobs as f,"
        " rota._partitioned() as p where f.id = %s and p.name = 'finished_jobs_done'",
        [parent],
    )
    instrument(db)

    with stopped(
        db,
        a,
        "select rota._purge_partition(%s::text::regclass, 10, %s)",
        [partition, condition],
    ) as pending:
        child = enqueue(b, depends_on=[parent], if_parent_dead="wait")

    assert pending.result() == [(0,)]
    assert ids(b) == []
    assert state(b, child) == "blocked"


def test_who_adds_parts_keeps_only_their_last_job_from_starting(
    session: Callable[[], Session], a: Session, b: Session
) -> None:
    """A and C add parts and stay open; B finishes the first job, and adds one more."""
    c = session()
    split = enqueue(a)
    last = enqueue(a, depends_on=[split])
    (job,) = claimed(b)
    with a.transaction(), c.transaction():
        parts = [enqueue(a, blocks=last), enqueue(c, blocks=last)]
        b.fetch(*finish(job))
        for _ in range(3):
            tick(b)
        parts.append(enqueue(b, blocks=last))
        b.fetch("select rota.set_priority(%s, 1)", [last])
        assert [job[0] for job in claimed(b)] == parts[2:]

    assert ids(b) == parts[:2]
    b.fetch(
        "select rota.finish_job(j.id, j.lease_token) from rota.jobs as j"
        " where j.status = 'running'"
    )
    assert ids(b) == [last]


@BOTH
def test_a_part_found_by_its_key_that_ends_before_the_commit(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A binds a running job to the last one and stays open; B finishes both; A ends."""
    split, part = enqueue(a), enqueue(a, idempotency_key="k")
    last = enqueue(a, depends_on=[split])
    jobs = claimed(b)
    with a.transaction() as transaction:
        assert enqueue(a, idempotency_key="k", blocks=last) == part
        for job in jobs:
            b.fetch(*finish(job))
        tick(b)
        give_up(is_committed, transaction)

    assert ids(b) == [last]


@BOTH
def test_two_producers_of_a_new_key_do_not_wait(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A enqueues a key's first job and stays open; B the second; maintenance looks; A ends."""
    with a.transaction() as transaction:
        first = enqueue(a, ordering_key="k")
        second = enqueue(b, ordering_key="k")
        tick(b)
        assert claimed(b) == []
        give_up(is_committed, transaction)

    assert ids(b) == [first if is_committed else second]


@pytest.mark.slow
def test_a_producer_of_many_keys_holds_up_no_other_key(a: Session, b: Session) -> None:
    """A enqueues first jobs of 2,000 keys and stays open; B enqueues those of others."""
    with a.transaction():
        a.fetch(
            "select rota.enqueue('t', ordering_key => 'a' || n)"
            " from generate_series(1, 2000) as n"
        )
        others = [enqueue(b, ordering_key=f"b{number}") for number in range(20)]
        assert [job[0] for job in claimed(b)] == others


def test_a_producer_and_maintenance_make_no_two_heads(a: Session, b: Session) -> None:
    """A opens a line by a tick and stays open; B enqueues a job of the key; A commits."""
    enqueue(a, ordering_key="k")
    (head,) = claimed(a)
    with b.transaction():
        second = enqueue(b, ordering_key="k")
        a.fetch(*finish(head))
    with a.transaction():
        tick(a)
        third = enqueue(b, ordering_key="k")
        tick(b)
        assert claimed(b) == []

    assert ids(b) == [second]
    assert state(b, third) == "blocked"


def test_who_ticks_and_stays_open_holds_up_no_end(a: Session, b: Session) -> None:
    """A looks at the checks of jobs that wait, and stays open; B ends the head and a parent."""
    head, parent = enqueue(a, ordering_key="k"), enqueue(a)
    jobs = claimed(b)
    a.fetch(*call("set_priority", job_id=head, priority=1))  # leaves a mark in the row
    second, child = enqueue(b, ordering_key="k"), enqueue(b, depends_on=[parent])
    with a.transaction():
        tick(a)
        for job in jobs:
            assert b.fetch(*finish(job)) == [("finished",)]
        assert [job[0] for job in claimed(b)] == [second, child]


def test_an_open_claim_keeps_only_the_jobs_that_it_took(a: Session, b: Session) -> None:
    """A claims from one queue and stays open; B goes on with ordered jobs of another."""
    for queue in ("qa", "qb", "qb"):
        enqueue(a, queue=queue, ordering_key=f"of {queue}")
    claim = "select c.job_id, c.lease_token from rota.claim_jobs('w', array[%s]) as c"
    with a.transaction():
        assert len(a.fetch(claim, ["qa"])) == 1
        for _ in range(2):
            (job,) = b.fetch(claim, ["qb"])
            b.fetch(*finish(job))


def test_an_open_resume_and_a_job_that_comes_in(a: Session, b: Session) -> None:
    """A resumes a halted key and stays open; B enqueues; maintenance looks; A commits."""
    enqueue(a, ordering_key="k")
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    with a.transaction():
        a.fetch(*call("resume_ordering_key", ordering_key="k"))
        second = enqueue(b, ordering_key="k")
        tick(b)
        assert claimed(b) == []

    assert ids(b) == [second]


def test_a_check_of_a_key_that_is_resumed_meanwhile(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """Maintenance has looked for the head; B resumes the key; it looks if the key is halted."""
    _, second, _ = (enqueue(a, ordering_key="k") for _ in range(3))
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    db.execute(PAUSE)
    found = "order by - j.id limit 1\n    )"
    mutate(db, "_key_head", found, f"{found} + case when race.pause('') then 0 end")

    with stopped(
        db, a, "select rota._check_order('k')", at=2
    ):  # the first look of _check_order() is without the lock of the key
        b.fetch(*call("resume_ordering_key", ordering_key="k"))

    assert [job_id for job_id, _ in claimed(b)] == [second]


def test_a_parent_that_succeeds_before_maintenance_restores_its_dependants(
    a: Session, b: Session
) -> None:
    """A retries it with its dependants; B runs it, and the next one, before each tick."""
    jobs = [enqueue(a)]
    for _ in range(2):
        jobs.append(enqueue(a, depends_on=jobs[-1:]))
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    assert ids(a) == []

    assert a.fetch(*call("retry_with_dependants", job_id=jobs[0])) == [(3,)]

    b.fetch(*finish(claimed(b)[0]))
    for job_id in jobs[1:]:
        tick(b)
        (job,) = claimed(b)
        assert job[0] == job_id
        b.fetch(*finish(job))


def test_a_parent_of_many_that_succeeds_before_maintenance_restores_all(
    a: Session, b: Session
) -> None:
    """A retries it with its dependants; B runs it before a tick, and then the first of them."""
    parent = enqueue(a)
    child = enqueue(a, depends_on=[parent])
    jobs = [{"job_type": "t", "depends_on": [parent], "priority": 1}] * 1004
    a.fetch(*call("enqueue_many", jobs=Jsonb(jobs)))
    grandchild = enqueue(a, depends_on=[child])
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    assert ids(a) == []

    assert a.fetch(*call("retry_with_dependants", job_id=parent)) == [(1001,)]

    b.fetch(*finish(claimed(b)[0]))
    while not (jobs := claimed(b)):
        tick(b)
    assert jobs[0][0] == child
    b.fetch(*finish(jobs[0]))
    ids(b)
    assert state(b, grandchild) != "cancelled"
    assert a.fetch("select count(*) from rota.jobs") == [(1005,)]


def test_a_dependant_that_runs_before_maintenance_restores_it(a: Session, b: Session) -> None:
    """A has found what was cancelled; B retries the dependant, its parent ends, and so it."""
    parent = enqueue(a)
    child = enqueue(a, depends_on=[parent])
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    assert ids(a) == []

    a.fetch(*call("retry_with_dependants", job_id=parent))
    b.fetch(*call("retry_job", job_id=child))
    for _ in range(2):
        b.fetch(*finish(claimed(b)[0]))

    assert ids(b) == []
    assert state(b, child) == "succeeded"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_parent_that_is_retried_while_maintenance_cancels_its_dependants(
    a: Session, b: Session, db: psycopg.Connection[Any], is_cancelled: bool
) -> None:
    """A finds that it is dead, and may have cancelled one; B retries all; A goes on."""
    parent = enqueue(a)
    child = enqueue(a, depends_on=[parent])
    tick(a)
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    db.execute(PAUSE)
    found, cancelled = "begin v_doubtful :=", "exception when others then if rota._is_no_fault"
    place = cancelled if is_cancelled else found
    mutate(db, "_check_parent", place, f"perform race.pause(''); {place}")

    with stopped(db, a, "select rota._do_checks(10)"):
        b.fetch(*call("retry_with_dependants", job_id=parent))
        for _ in range(2):
            tick(b)

    b.fetch(*finish(claimed(b)[0]))
    assert ids(b) == [child]


def test_a_dependant_that_comes_back_while_maintenance_cancels_it_stays(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A has found that a parent is dead; B cancels the child and retries it; A goes on."""
    parent = enqueue(a)
    child = enqueue(a, depends_on=[parent])
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    db.execute(PAUSE)
    mutate(db, "_cancel_children", "begin v_ids", "begin perform race.pause(''); v_ids")

    with stopped(db, a, "select from rota.tick()"):
        b.fetch(*call("cancel_job", job_id=child))
        b.fetch(*call("retry_job", job_id=child))

    assert ids(b) == []
    assert state(b, child) == "blocked"


def test_a_dead_parent_that_is_purged_while_jobs_come_in_that_wait_for_it(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A finds that it is dead; B purges it; A lets its jobs wait for it."""
    parent = enqueue(a)
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    db.execute(PAUSE)
    edges = "insert into rota.dependencies as d (parent_id, job_id) select distinct p.id, p.job"
    mutate(db, "_jobs_came_in", edges, f"perform race.pause(''); {edges}")

    jobs = Jsonb([{"job_type": "t", "depends_on": [parent]}])
    with stopped(db, a, *call("enqueue_many", jobs=jobs)) as pending:
        b.fetch("delete from rota.finished_jobs")
    ((_, child, _),) = pending.result()

    assert ids(b) == []
    assert state(b, child) == "cancelled"


def test_a_job_that_waits_for_the_retry_of_a_parent_whose_purge_is_open(
    a: Session, b: Session
) -> None:
    """A purges it and stays open; B lets a job wait for its retry, and ticks; A commits."""
    parent = enqueue(a)
    (job,) = claimed(a)
    a.fetch(*call("fail_job", job_id=job[0], lease_token=job[1], error="x", fatal=True))
    with a.transaction():
        assert a.fetch(*purge(parent)) == [(1, [])]
        child = enqueue(b, depends_on=[parent], if_parent_dead="wait")
        tick(b)

    assert ids(b) == [child]


def test_a_parent_that_is_purged_while_what_waits_for_it_is_committed(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """B lets a job wait for one that ends; A purges that, and looks who waits; B commits."""
    parent = enqueue(a)
    (job,) = claimed(a)
    db.execute(PAUSE)
    writers = "rota._open_writers(array['rota.dependencies'::regclass])"
    mutate(db, "_sort_out", writers, f"case when race.pause('') then {writers} end")
    b.fetch("begin")
    child = enqueue(b, depends_on=[parent])
    a.fetch(*finish(job))

    with stopped(db, a, *purge(parent)) as pending:
        b.fetch("commit")

    refusal = {"job_id": parent, "reason": "other jobs depend on it"}
    assert pending.result() == [(0, [refusal])]
    assert ids(b) == [child]


def purge(job_id: int) -> tuple[Any, Any]:
    query = "select p.changed, p.conflicts from rota.act_on_jobs('purge', %s) as p"
    return query, [Jsonb({"ids": [job_id]})]


@BOTH
def test_the_next_job_of_a_key_waits_for_a_parent_that_ends_with_the_head(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A finishes the head and stays open; B finishes what the next waits for; A ends."""
    head, parent = enqueue(a, ordering_key="k"), enqueue(a)
    second = enqueue(a, ordering_key="k", depends_on=[parent])
    jobs = dict(claimed(a))
    with a.transaction() as transaction:
        a.fetch(*finish((head, jobs[head])))
        b.fetch(*finish((parent, jobs[parent])))
        tick(b)
        give_up(is_committed, transaction)

    if not is_committed:
        assert ids(b) == []
        b.fetch(*finish((head, jobs[head])))
    assert ids(b) == [second]


@BOTH
def test_a_cancelled_child_and_a_parent_that_ends(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A finishes one of two parents and stays open; B cancels the child; A ends."""
    parent, other = enqueue(a), enqueue(a, queue="other")
    child = enqueue(a, depends_on=[parent, other])
    (job,) = claimed(a)
    with a.transaction() as transaction:
        a.fetch(*finish(job))
        assert b.fetch(*call("cancel_job", job_id=child)) == [("cancelled",)]
        give_up(is_committed, transaction)
    if not is_committed:
        a.fetch(*finish(job))

    assert ids(b) == []
    assert state(b, child) == "cancelled"


@BOTH
def test_a_key_goes_on_with_a_job_that_was_not_committed_when_its_head_ended(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A enqueues the second job and stays open; B finishes the first and claims; A ends."""
    enqueue(b, ordering_key="k")
    (head,) = claimed(b)
    with a.transaction() as transaction:
        second = enqueue(a, ordering_key="k")
        b.fetch(*finish(head))
        assert claimed(b) == []
        give_up(is_committed, transaction)

    assert ids(b) == ([second] if is_committed else [])


@BOTH
def test_a_key_waits_for_an_open_finish(a: Session, b: Session, is_committed: bool) -> None:
    """A finishes the head and stays open; B enqueues the second job and claims; A ends."""
    enqueue(a, ordering_key="k")
    (head,) = claimed(a)
    with a.transaction() as transaction:
        a.fetch(*finish(head))
        second = enqueue(b, ordering_key="k")
        assert claimed(b) == []
        give_up(is_committed, transaction)

    assert ids(b) == ([second] if is_committed else [])


@BOTH
def test_a_head_in_an_open_claim_is_nobody_elses(
    a: Session, b: Session, is_committed: bool
) -> None:
    """A claims the head and stays open; B claims; A ends; B claims again."""
    head, _ = enqueue(a, ordering_key="k"), enqueue(a, ordering_key="k")
    with a.transaction() as transaction:
        assert [job[0] for job in claimed(a)] == [head]
        assert claimed(b) == []
        give_up(is_committed, transaction)

    assert ids(b) == ([] if is_committed else [head])


def test_a_job_of_an_older_id_that_comes_in_late_still_runs_alone(
    a: Session, b: Session
) -> None:
    """A enqueues and stays open; B enqueues the next id and ends the head; A commits."""
    enqueue(b, ordering_key="k")
    (head,) = claimed(b)
    with a.transaction():
        older = enqueue(a, ordering_key="k")
        newer = enqueue(b, ordering_key="k")
        last = enqueue(b, ordering_key="k")
        b.fetch(*finish(head))
        (job,) = claimed(b)

    assert job[0] == newer
    assert ids(b) == []
    b.fetch(*finish(job))
    (job,) = claimed(b)
    assert job[0] == older
    b.fetch(*finish(job))
    assert ids(b) == [last]


class Player:
    """A session that does random steps on a few keys and jobs that wait for each other."""

    def __init__(self, connection: psycopg.Connection[Any], seed: int) -> None:
        self.connection = connection
        self.connection.execute("set deadlock_timeout = '200ms'")
        self.random = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def play(self, until: float) -> None:
        steps = [
            self.ask,
            self.ask,
            self.fan,
            self.work,
            self.work,
            self.work,
            self.maintenance,
        ]
        while time.monotonic() < until:
            step = self.random.choice(steps)
            try:
                step()
                self.did[step.__name__] += 1
            except psycopg.Error as error:
                self.failed[f"{step.__name__}: {error.sqlstate} {error}"] += 1

    def ask(self) -> None:
        """Enqueue ordered jobs, perhaps after some that are there, perhaps in vain."""
        recent = self.connection.execute(
            "select r.id from rota.job_runs as r order by r.id desc limit 20"
        ).fetchall()
        jobs = [
            {
                "job_type": "t",
                "ordering_key": self.random.choice("abc"),
                "skip_dead": True,
                "depends_on": [r[0] for r in self.random.sample(recent, min(2, len(recent)))]
                if self.random.random() < 0.3
                else None,
                "if_parent_dead": self.random.choice(["cancel", "run"]),
                **RETRIES,
            }
            for _ in range(3)
        ]
        is_committed = self.random.random() < 0.8
        with self.connection.transaction(force_rollback=not is_committed):
            self.connection.execute(*call("enqueue_many", jobs=Jsonb(jobs)))

    def fan(self) -> None:
        """Split a job into parts with a last job behind them."""
        with self.connection.transaction():
            split = self.enqueue("split")
            last = self.enqueue("last", depends_on=[split], if_parent_dead="run")
        parts = [{"job_type": "part", "blocks": last, **RETRIES} for _ in range(5)]
        try:
            self.connection.execute(*call("enqueue_many", jobs=Jsonb(parts)))
        except psycopg.Error as error:
            if error.sqlstate not in ("RT013", "RT003"):
                raise

    def enqueue(self, job_type: str, **arguments: Any) -> int:
        retries = {**RETRIES, "backoff": Jsonb(RETRIES["backoff"])}
        row = self.connection.execute(
            *call("enqueue", job_type=job_type, **arguments, **retries)
        ).fetchone()
        assert row is not None
        return int(row[0])

    def work(self) -> None:
        jobs = self.connection.execute(
            "select c.job_id, c.lease_token from rota.claim_jobs('w', max_jobs => 4,"
            " lease => '50 ms') as c"
        ).fetchall()
        for job_id, token in jobs:
            how = self.random.choice(["finish", "finish", "fail", "fatal", "vanish", "cancel"])
            owner = {"job_id": job_id, "lease_token": token}
            try:
                if how == "finish":
                    self.connection.execute(*call("finish_job", **owner))
                elif how == "cancel":
                    self.connection.execute(*call("cancel_job", job_id=job_id))
                elif how != "vanish":
                    self.connection.execute(
                        *call("fail_job", **owner, error="e", fatal=how == "fatal")
                    )
            except psycopg.Error as error:
                if error.sqlstate not in ("RT002", "RT003"):
                    raise

    def maintenance(self) -> None:
        self.connection.execute(*call(self.random.choice(["sweep_stale_leases", "tick"])))


def left(db: psycopg.Connection[Any]) -> list[Any]:
    """Return what is still there, and what it waits for."""
    return db.execute(
        """
        select j.id, j.job_type, j.status, j.ordering_key, j.run_at - rota.now(),
            array(select (d.parent_id, r.status)::text from rota.dependencies as d
                left join rota.job_runs as r on r.id = d.parent_id where d.job_id = j.id),
            array(select (n.kind, n.subject, n.due_at)::text from rota.pending_checks as n
                where n.subject = j.ordering_key or split_part(n.subject, ' ', 1) = j.id::text)
        from rota.jobs as j
        order by j.id
        """
    ).fetchall()


@pytest.mark.slow
def test_order_and_dependencies_hold_under_random_steps(
    connect: Callable[..., psycopg.Connection[Any]], db: psycopg.Connection[Any]
) -> None:
    """Eight sessions enqueue, split, work, fail, vanish, cancel and sweep; then all is drained.

    A log that the test writes by trigger has each begin and end of an attempt.  No two attempts
    of a key overlap, first attempts of a key begin in the order of their ids but where a
    transaction was late, a job never begins before those it waits for have ended, and at the
    end nothing is left behind.
    """
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201
    db.execute(
        """
        create table public.watch (n bigserial, id bigint, ordering_key text, waits boolean);
        create function public.watch() returns trigger language plpgsql security definer as $$
        begin
            insert into public.watch (id, ordering_key, waits)
            select new.id, new.ordering_key,
                exists (select from rota.dependencies as d where d.job_id = new.id)
                or (select count(*) from rota.jobs as j where j.ordering_key = new.ordering_key
                    and j.status <> 'blocked') > 1;
            return null;
        end $$;
        create trigger watch after update on rota.jobs for each row
            when (new.status = 'running' and old.status <> 'running')
            execute function public.watch();
        alter table rota.jobs enable always trigger watch;
        """
    )
    players = [Player(connect(), seed + n) for n in range(8)]
    until = time.monotonic() + SECONDS

    threads = [threading.Thread(target=p.play, args=(until,)) for p in players]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {error: n for p in players for error, n in p.failed.items()} == {}
    check_invariants(db)
    deadline = time.monotonic() + 20
    while db.execute("select exists (select from rota.jobs)").fetchone() == (True,):
        assert time.monotonic() < deadline, (seed, left(db))
        db.execute(*call("tick"))
        jobs = db.execute("select c.job_id, c.lease_token from rota.claim_jobs('w') as c")
        for job in jobs.fetchall():
            db.execute(*finish(job))
    watched = "select count(*), count(*) filter (where w.waits) from public.watch as w"
    starts, too_early = db.execute(watched).fetchone() or (0, 0)
    assert (too_early, seed) == (0, seed)
    assert starts > 120
    while db.execute("select exists (select from rota.pending_checks)").fetchone() == (True,):
        assert time.monotonic() < deadline, seed
        db.execute(*call("tick"))
    kept = (
        "select count(*) from rota.dependencies as d join rota.job_runs as r on r.id = d.job_id"
    )
    kept += " where r.status <> 'cancelled'"
    assert db.execute(kept).fetchone() == (0,)
    assert sum(p.did["fan"] for p in players) > 12
