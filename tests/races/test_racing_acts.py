"""Acts on many jobs, while others claim, finish and enqueue."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from invariants import check_invariants
from races.harness import Session, call
from races.instrument import PAUSE, stopped
from support.mutation import mutate


def enqueue(session: Session, **arguments: Any) -> int:
    return int(session.fetch(*call("enqueue", job_type="t", **arguments))[0][0])


def act(session: Session, what: str, arguments: dict[str, Any] | None = None) -> Any:
    """Act on all; return how many were changed, and who was not and why."""
    query, values = call(
        "act_on_jobs", act=what, filter=Jsonb({"all": True}), arguments=Jsonb(arguments or {})
    )
    (row,) = session.fetch(query, values)
    return row[1], {c["job_id"]: c["reason"] for c in row[2]}


def claim(session: Session, count: int) -> list[Any]:
    return session.fetch(*call("claim_jobs", worker="w", max_jobs=count))


def test_an_act_passes_over_what_an_open_claim_holds(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A claims two of four and stays open; B cancels all, and does not wait; A commits."""
    ids = [enqueue(a) for _ in range(4)]

    with a.transaction():
        claimed = [row[0] for row in claim(a, 2)]
        changed, conflicts = act(b, "cancel")

    assert claimed == ids[:2]
    assert (changed, set(conflicts)) == (2, set(claimed))
    assert all(reason.startswith("locked by pid") for reason in conflicts.values())
    statuses = dict(db.execute("select id, status from rota.job_runs").fetchall())
    assert [statuses[job_id] for job_id in ids] == ["running"] * 2 + ["cancelled"] * 2
    check_invariants(db)


def test_a_claim_passes_over_what_an_open_act_holds(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A moves all jobs and stays open; B finds none, and does not wait; A commits."""
    ids = [enqueue(a) for _ in range(3)]

    with a.transaction():
        assert act(a, "move", {"queue": "other"}) == (3, {})
        assert claim(b, 3) == []

    assert claim(b, 3) == []
    found = b.fetch(*call("claim_jobs", worker="w", queues=["other"], max_jobs=3))
    assert [row[0] for row in found] == ids
    check_invariants(db)


def test_a_finish_that_is_under_way_is_told_and_not_waited_for(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A finishes a job and stays open; B asks for the cancel of all; A commits."""
    first, second = enqueue(a), enqueue(a)
    jobs = claim(a, 2)

    with a.transaction():
        a.fetch(*call("finish_job", job_id=jobs[0][0], lease_token=jobs[0][1]))
        changed, conflicts = act(b, "cancel")

    assert (changed, set(conflicts)) == (1, {first})
    statuses = dict(db.execute("select id, status from rota.job_runs").fetchall())
    assert statuses == {first: "succeeded", second: "running"}
    check_invariants(db)


def test_a_retry_meets_a_key_that_is_being_taken(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A enqueues under the key of a dead job and stays open; B retries all; A commits."""
    dead = []
    for key in ("k", None):
        dead.append(enqueue(a, idempotency_key=key, max_attempts=1))
        ((job_id, token, *_),) = claim(a, 1)
        a.fetch(*call("fail_job", job_id=job_id, lease_token=token, error="e"))

    with a.transaction():
        holder = enqueue(a, idempotency_key="k")
        query, values = call("act_on_jobs", act="retry", filter=Jsonb({"status": "dead"}))
        pending = b.start(query, values)
        pending.wait_blocked()
    (row,) = pending.result()

    assert (row[1], [c["job_id"] for c in row[2]]) == (1, dead[:1])
    live = [job_id for (job_id,) in db.execute("select id from rota.jobs order by id")]
    assert live == sorted([dead[1], holder])
    check_invariants(db)


def test_two_acts_on_the_same_jobs_do_each_once(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A discards and stays open; B retries all, and does not wait; A commits."""
    enqueue(a, max_attempts=1)
    ((job_id, token, *_),) = claim(a, 1)
    a.fetch(*call("fail_job", job_id=job_id, lease_token=token, error="e"))

    with a.transaction():
        assert act(a, "discard") == (1, {})
        changed, conflicts = act(b, "retry")

    assert (changed, set(conflicts)) == (0, {job_id})
    assert act(b, "retry") == (1, {})
    check_invariants(db)


def test_an_act_leaves_alone_what_its_filter_does_not_find_any_more(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A has found failed jobs; one is retried by others and succeeds; A retries them."""
    first, second = (enqueue(a) for _ in range(2))
    for job_id, token, *_ in claim(a, 2):
        a.fetch(*call("fail_job", job_id=job_id, lease_token=token, error="e"))
    db.execute(PAUSE)
    once = "begin select d.done, act_on_jobs"
    mutate(db, "act_on_jobs", once, f"begin perform race.pause('');{once[5:]}")

    query, values = call("act_on_jobs", act="retry", filter=Jsonb({"job_type": "t"}))
    with stopped(db, a, query, values) as pending:
        b.fetch(*call("retry_job", job_id=first))
        ((job_id, token, *_),) = claim(b, 1)
        b.fetch(*call("finish_job", job_id=job_id, lease_token=token))
    (row,) = pending.result()

    assert job_id == first
    assert (row[1], [c["job_id"] for c in row[2]]) == (1, [first])
    assert [job[0] for job in claim(b, 2)] == [second]
    check_invariants(db)
