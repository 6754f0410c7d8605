"""Keys that are replaced and run again, while their jobs are claimed and end."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from invariants import check_invariants
from races.harness import Session, call
from races.instrument import PAUSE, stopped
from support.mutation import mutate

SECONDS = 5.0
KEYS = [f"k{n}" for n in range(6)]
RERUN = {"job_type": "t", "idempotency_key": "k", "on_conflict": "rerun"}


def rerun(version: int) -> tuple[Any, Any]:
    return call("enqueue", payload=Jsonb({"v": version}), **RERUN)


def claimed(session: Session) -> list[Any]:
    return session.fetch(
        "select c.job_id, c.lease_token, (c.payload ->> 'v')::int"
        " from rota.claim_jobs('w') as c"
    )


def to_json(value: Any) -> str:
    return json.dumps(value, default=str)


def do_checks(session: Session) -> None:
    """Do the checks of what is committed, also those that were deferred."""
    session.fetch("update rota.pending_checks set due_at = '-infinity' returning id")
    session.fetch(*call("tick"))


def finish(job: Any) -> tuple[Any, Any]:
    return call("finish_job", job_id=job[0], lease_token=job[1])


def late_rerun(a: Session, b: Session) -> Any:
    """A asks for another run and stays open; B ends the job; A commits; return the job."""
    a.fetch(*rerun(1))
    (job,) = claimed(b)
    with a.transaction():
        a.fetch(*rerun(2))
        b.fetch(*finish(job))
    return job


def ends_for_good(session: Session, job: Any) -> None:
    """End a job, which nothing follows."""
    session.fetch(*finish(job))
    for _ in range(2):
        do_checks(session)
    assert session.fetch("select from rota.jobs union all select from rota.reruns") == []


@pytest.mark.parametrize("is_committed", [True, False])
def test_rerun_that_meets_an_open_finish(a: Session, b: Session, is_committed: bool) -> None:
    """A finishes the job and stays open; B asks for another run at once; A ends."""
    a.fetch(*rerun(1))
    (job,) = claimed(a)
    with a.transaction() as transaction:
        a.fetch(*finish(job))
        assert b.fetch(*rerun(2)) == [(job[0],)]
        do_checks(b)
        if not is_committed:
            raise psycopg.Rollback(transaction)

    assert claimed(b) == []
    if not is_committed:
        b.fetch(*finish(job))
    do_checks(b)
    assert [row[2] for row in claimed(b)] == [2]


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("how", ["finish_job", "finish_jobs", "fail_job", "heartbeat"])
def test_a_worker_does_not_wait_for_an_open_rerun(
    a: Session, b: Session, is_committed: bool, how: str
) -> None:
    """A asks for another run and stays open; B speaks for the job at once; A ends."""
    a.fetch(*rerun(1))
    (job,) = claimed(b)
    ref = {"job_id": job[0], "lease_token": job[1]}
    with a.transaction() as transaction:
        assert a.fetch(*rerun(2)) == [(job[0],)]
        b.fetch("set statement_timeout = '5s'")
        if how == "finish_jobs":
            refs = {"job_ids": [job[0]], "lease_tokens": [job[1]]}
            assert b.fetch(*call(how, **refs)) == [(job[0], "finished")]
        elif how == "fail_job":
            b.fetch(*call(how, **ref, error="e", retry_in="0"))
        else:
            b.fetch(*call(how, **ref))
        do_checks(b)
        if not is_committed:
            raise psycopg.Rollback(transaction)

    if how == "heartbeat":
        b.fetch(*finish(job))
    do_checks(b)
    one_more = [1] if how == "fail_job" else []
    assert [row[2] for row in claimed(b)] == ([2] if is_committed else one_more)


@pytest.mark.parametrize("is_committed", [True, False])
def test_rerun_that_meets_an_open_claim(a: Session, b: Session, is_committed: bool) -> None:
    """A claims and stays open; B asks for another run at once; A ends."""
    a.fetch(*rerun(1))
    with a.transaction() as transaction:
        (job,) = claimed(a)
        assert b.fetch(*rerun(2)) == [(job[0],)]
        do_checks(b)
        if not is_committed:
            raise psycopg.Rollback(transaction)

    if is_committed:
        a.fetch(*finish(job))
    do_checks(b)
    assert [row[2] for row in claimed(b)] == [2]
    assert claimed(b) == []


def test_a_call_after_a_rerun_that_met_an_open_claim_has_the_last_word(
    a: Session, b: Session
) -> None:
    """A claims and stays open; B asks for another run; A rolls back; B asks once more."""
    a.fetch(*rerun(1))
    with a.transaction() as transaction:
        claimed(a)
        b.fetch(*rerun(2))
        raise psycopg.Rollback(transaction)
    b.fetch(*rerun(3))

    do_checks(b)

    assert [row[2] for row in claimed(b)] == [3]
    do_checks(b)
    assert claimed(b) == []


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_rerun_that_was_overtaken_while_it_was_locked_never_comes(
    a: Session, b: Session, is_deleted: bool
) -> None:
    """A tick that is cleaning up has locked an older rerun when the job ends, and fails."""
    a.fetch(*rerun(1))
    (job,) = claimed(b)
    b.fetch(*rerun(2))
    with a.transaction() as transaction:
        a.fetch("select from rota.reruns for update")
        if is_deleted:
            a.fetch("delete from rota.reruns returning id")
        b.fetch(*rerun(3))
        b.fetch(*finish(job))
        do_checks(b)
        raise psycopg.Rollback(transaction)

    (job,) = claimed(b)
    assert job[2] == 3
    do_checks(b)
    b.fetch(*finish(job))
    do_checks(b)
    assert claimed(b) == []
    assert b.fetch("select from rota.reruns") == []


def test_a_rerun_that_is_committed_after_a_newer_one_was_taken_is_not_lost(
    a: Session, b: Session, session: Callable[[], Session]
) -> None:
    """C asks and stays open when the job ends, while a tick has locked what is older."""
    c = session()
    a.fetch(*rerun(1))
    (job,) = claimed(b)
    b.fetch(*rerun(2))
    with a.transaction() as transaction:
        a.fetch("select from rota.reruns for update")
        with c.transaction():
            c.fetch(*rerun(3))
            b.fetch(*rerun(4))
            b.fetch(*finish(job))
            (job,) = claimed(b)
            assert job[2] == 4
        do_checks(b)
        raise psycopg.Rollback(transaction)

    do_checks(b)
    b.fetch(*finish(job))
    do_checks(b)
    (job,) = claimed(b)
    assert job[2] == 3
    ends_for_good(b, job)


@pytest.mark.parametrize("has_job", [False, True])
def test_a_rerun_that_a_tick_has_locked_never_comes_after_a_newer_call(
    a: Session, b: Session, has_job: bool
) -> None:
    """A asks for another run and stays open; the job ends; A commits; a tick meets B."""
    late_rerun(a, b)
    if has_job:
        b.fetch(*call("enqueue", job_type="t", idempotency_key="k"))
    with a.transaction():
        a.fetch("select from rota.reruns for update")
        b.fetch(*rerun(3))

    do_checks(b)
    (job,) = claimed(b)
    assert job[2] == 3
    ends_for_good(b, job)


@pytest.mark.parametrize("is_begun_later", [False, True])
def test_a_rerun_never_comes_after_a_newer_call_of_its_own_transaction(
    a: Session, b: Session, is_begun_later: bool
) -> None:
    """A asks for another run; B ends the job; A asks once more, which makes a new one.

    A snapshot shows nothing from the number on that follows the last one to end: not A, either,
    if the number of B is the lower.
    """
    a.fetch(*rerun(1))
    (job,) = claimed(b)
    with a.transaction():
        with b.transaction():
            for session in [b, a] if is_begun_later else [a, b]:
                session.fetch("select pg_current_xact_id()")
            a.fetch(*rerun(2))
            b.fetch(*finish(job))
        a.fetch(*rerun(3))

    do_checks(b)
    (job,) = claimed(b)
    assert job[2] == 3
    ends_for_good(b, job)


def test_a_rerun_does_not_come_after_a_newer_job_that_has_come_and_gone(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A tick is about to make the job of a late rerun; B makes a newer one, and ends it."""
    late_rerun(a, b)
    db.execute(PAUSE)
    insert = "v_ids := rota._insert_at_once(v_new_job);"
    mutate(db, "_check_reruns", insert, f"assert race.pause(''); {insert}")
    a.fetch("update rota.pending_checks set due_at = '-infinity' returning id")

    with stopped(db, a, *call("tick")):
        b.fetch(*rerun(3))
        (job,) = claimed(b)
        b.fetch(*finish(job))

    for _ in range(2):
        do_checks(b)
    assert b.fetch("select from rota.jobs union all select from rota.reruns") == []


def test_of_reruns_that_come_late_the_newest_runs_once_though_an_older_one_is_locked(
    a: Session, b: Session
) -> None:
    """A asks many times and stays open; B ends the job; A commits, and a tick locks one."""
    a.fetch(*rerun(1))
    (job,) = claimed(b)
    with a.transaction():
        for version in range(2, 5):
            a.fetch(*rerun(version))
        b.fetch(*finish(job))
    with a.transaction():
        a.fetch("select from rota.reruns order by id limit 1 for update")
        do_checks(b)

    do_checks(b)
    do_checks(b)
    (job,) = claimed(b)
    assert job[2] == 4
    do_checks(b)
    ends_for_good(b, job)


def test_a_rerun_does_not_expire_with_the_job_that_was_locked(a: Session, b: Session) -> None:
    """A claims and stays open; B asks for another run; A rolls back, and the job expires."""
    new = {"job_type": "t", "idempotency_key": "k", "expires_after": "1 hour"}
    ((job_id,),) = a.fetch(*call("enqueue", **new))
    with a.transaction() as transaction:
        claimed(a)
        b.fetch(*rerun(2))
        raise psycopg.Rollback(transaction)
    b.fetch("update rota.jobs set expires_at = rota.now() - interval '1 s' returning id")

    assert b.fetch("select jobs_expired from rota.tick()") == [(1,)]

    do_checks(b)
    assert b.fetch("select id, error_type from rota.finished_jobs") == [(job_id, "expired")]
    assert [row[2] for row in claimed(b)] == [2]


@pytest.mark.parametrize("how", ["new rerun", "new replace", "waiting", "running"])
def test_a_call_after_a_rerun_whose_job_has_ended_has_the_last_word(
    a: Session, b: Session, how: str
) -> None:
    """A asks and stays open; B ends the job; A commits; B asks once more before a tick."""
    late_rerun(a, b)
    if how in ("waiting", "running"):
        b.fetch(*call("enqueue", job_type="t", idempotency_key="k"))
    if how == "running":
        (job,) = claimed(b)
    on_conflict = "replace" if how == "new replace" else "rerun"
    b.fetch(*call("enqueue", payload=Jsonb({"v": 3}), **RERUN | {"on_conflict": on_conflict}))
    if how == "running":
        b.fetch(*finish(job))

    do_checks(b)
    do_checks(b)
    (job,) = claimed(b)
    assert job[2] == 3
    do_checks(b)
    ends_for_good(b, job)


@pytest.mark.parametrize("act", ["erase", "purge"])
def test_a_rerun_outlives_the_job_that_has_ended(a: Session, b: Session, act: str) -> None:
    """A asks for another run and stays open; B ends the job; A commits; B acts on the job."""
    job = late_rerun(a, b)
    filter_ = Jsonb({"ids": [job[0]]})
    ((changed,),) = b.fetch("select changed from rota.act_on_jobs(%s, %s)", (act, filter_))
    assert changed == 1

    do_checks(b)
    assert [row[2] for row in claimed(b)] == [2]


def test_a_rerun_whose_job_ends_and_whose_key_has_a_new_job_follows_that_one(
    a: Session, b: Session
) -> None:
    """A asks for another run and stays open; the job ends, B enqueues another; A commits."""
    a.fetch(*rerun(1))
    (job,) = claimed(b)
    with a.transaction():
        a.fetch(*rerun(2))
        b.fetch(*finish(job))
        ((new_id,),) = b.fetch(*rerun(3))
        assert new_id != job[0]
        (new,) = claimed(b)

    do_checks(b)
    assert claimed(b) == []
    b.fetch(*finish(new))
    assert [row[2] for row in claimed(b)] == [2]


def test_an_older_version_that_meets_an_open_newer_one_is_ignored(
    a: Session, b: Session
) -> None:
    """A enqueues version 2 and stays open; B enqueues version 1 and waits; A commits."""
    with a.transaction():
        job = a.fetch(*call("enqueue", **RERUN, updated_at="2026-01-02"))
        pending = b.start(*call("enqueue", **RERUN, updated_at="2026-01-01"))
        pending.wait_blocked(by=a)

    assert pending.result() == job


@pytest.mark.parametrize("is_committed", [True, False])
def test_unique_for_waits_for_an_open_one(a: Session, b: Session, is_committed: bool) -> None:
    """A takes the key for a day and stays open; B tries and waits; A ends."""
    once = call("enqueue", job_type="t", idempotency_key="k", unique_for="1 day")
    with a.transaction() as transaction:
        job = a.fetch(*once)
        pending = b.start(*once)
        pending.wait_blocked(by=a)
        if not is_committed:
            raise psycopg.Rollback(transaction)

    assert (pending.result() == job) is is_committed


class Player:
    """A session that does random steps on a few keys, and remembers what it did."""

    def __init__(self, connection: psycopg.Connection[Any], seed: int) -> None:
        self.connection = connection
        self.connection.execute("set deadlock_timeout = '200ms'")
        self.random = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.asked: dict[str, int] = {}

    def play(self, versions: dict[str, count[int]], until: float) -> None:
        steps = [
            *(self.ask, self.ask, self.ask_many, self.work, self.work, self.work),
            *(self.sweep, self.tick),
        ]
        while time.monotonic() < until:
            step = self.random.choice(steps)
            try:
                step(versions)
                self.did[step.__name__] += 1
            except psycopg.Error as error:
                self.failed[f"{step.__name__}: {error.sqlstate} {error}"] += 1

    def job(self, key: str, versions: dict[str, count[int]]) -> dict[str, Any]:
        version = next(versions[key])
        return {
            "job_type": "t",
            "payload": {"v": version},
            "idempotency_key": key,
            "on_conflict": "rerun",
            "updated_at": (
                datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=version)
            ).isoformat(),
            "backoff": {"kind": "fixed", "base_seconds": 0.01, "cap_seconds": 0.01},
            "max_attempts": 1000,
        }

    def ask(self, versions: dict[str, count[int]]) -> None:
        self.many([self.random.choice(KEYS)], versions)

    def ask_many(self, versions: dict[str, count[int]]) -> None:
        self.many(self.random.sample(KEYS, 4), versions)

    def many(self, keys: list[str], versions: dict[str, count[int]]) -> None:
        jobs = [self.job(key, versions) for key in keys]
        is_committed = self.random.random() < 0.8
        with self.connection.transaction(force_rollback=not is_committed):
            self.connection.execute(*call("enqueue_many", jobs=Jsonb(jobs)))
        for job in jobs if is_committed else []:
            key = job["idempotency_key"]
            self.asked[key] = max(job["payload"]["v"], self.asked.get(key, 0))

    def work(self, _: dict[str, count[int]]) -> None:
        jobs = self.connection.execute(
            "select c.job_id, c.lease_token from rota.claim_jobs('w', max_jobs => 3,"
            " lease => '20 ms') as c"
        ).fetchall()
        ids, tokens = [job[0] for job in jobs], [job[1] for job in jobs]
        how = self.random.choice(["finish", "finish", "fail", "release", "vanish"])
        if how == "finish":
            self.connection.execute(*call("finish_jobs", job_ids=ids, lease_tokens=tokens))
        elif how == "release":
            self.connection.execute(*call("release_jobs", job_ids=ids, lease_tokens=tokens))
        elif how == "fail":
            for job_id, token in jobs:
                try:
                    self.connection.execute(
                        *call("fail_job", job_id=job_id, lease_token=token, error="e")
                    )
                except psycopg.Error as error:
                    if error.sqlstate not in ("RT002", "RT003"):
                        raise

    def sweep(self, _: dict[str, count[int]]) -> None:
        self.connection.execute(*call("sweep_stale_leases"))

    def tick(self, _: dict[str, count[int]]) -> None:
        self.connection.execute(*call("tick"))


def test_a_batch_that_asks_twice_for_a_run_needs_no_row_that_others_hold(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A is between two versions of a key; its job ends, and B makes the next, and waits."""
    db.execute(
        "create function gate() returns trigger language plpgsql as"
        " 'begin perform pg_advisory_xact_lock(7); return new; end';"
        "create trigger gate before insert on rota.reruns for each row execute function gate()"
    )
    a.fetch(*rerun(0))
    ((job_id, token, _),) = claimed(a)
    first, second, third = (datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3))
    jobs = [{**RERUN, "payload": {"v": at.day}, "updated_at": at} for at in (first, second)]

    db.execute("select pg_advisory_lock(7)")
    asking = a.start(*call("enqueue_many", jobs=Jsonb(jobs, dumps=to_json)))
    asking.wait_blocked()
    db.execute(*call("finish_job", job_id=job_id, lease_token=token))
    making = b.start(*call("enqueue", payload=Jsonb({"v": 3}), updated_at=third, **RERUN))
    making.wait_blocked(by=a)
    db.execute("select pg_advisory_unlock(7)")
    assert [row[1:] for row in asking.result()] == [(job_id, False)] * 2
    making.result()
    do_checks(a)

    assert [v for _, _, v in claimed(a)] == [3]


@pytest.mark.slow
def test_the_newest_version_of_each_key_is_the_last_to_run_and_runs_once(
    connect: Callable[..., psycopg.Connection[Any]], db: psycopg.Connection[Any]
) -> None:
    """Eight sessions enqueue versions in any order, work, fail, give back, vanish and sweep.

    At any time a key has one live job; what succeeded of a key has versions that only grow;
    and after all is done the newest version that was committed was the last, and once.
    """
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201
    versions = {key: count(1) for key in KEYS}
    players = [Player(connect(), seed + n) for n in range(8)]
    until = time.monotonic() + SECONDS

    threads = [threading.Thread(target=p.play, args=(versions, until)) for p in players]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    check_invariants(db)
    assert {error: n for p in players for error, n in p.failed.items()} == {}
    last = Player(db, seed)
    left = "select exists (select from rota.jobs) or exists (select from rota.reruns)"
    while db.execute(left).fetchone() == (True,):
        last.sweep(versions)
        db.execute(*call("tick"))
        jobs = db.execute("select c.job_id, c.lease_token from rota.claim_jobs('w') as c")
        for job in jobs.fetchall():
            db.execute(*finish(job))
    for key in KEYS:
        ran = db.execute(
            "select (f.payload ->> 'v')::int from rota.finished_jobs as f"
            " where f.idempotency_key = %s and f.status = 'succeeded'"
            " order by f.finished_at, f.id",
            [key],
        ).fetchall()
        done = [row[0] for row in ran]
        assert done == sorted(set(done)), (seed, key)
        assert done[-1] == max(p.asked.get(key, 0) for p in players), (seed, key)
    assert sum(p.did["ask_many"] for p in players) > 50
    assert sum(p.did["work"] for p in players) > 100
