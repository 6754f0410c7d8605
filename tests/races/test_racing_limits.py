"""Limits while everybody starts, ends and loses jobs at once.

A limit is watched in two ways that do not trust each other.  A session of its own counts what
runs, again and again, each time in one statement.  And every worker writes down from when to
when it held a job for certain, so that too many at one moment show themselves afterwards.
"""

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
from races.instrument import ARM, GATE, PAUSE, stopped
from support.clock import Clock
from support.mutation import mutate

Connect = Callable[..., psycopg.Connection[Any]]

# Limits of which a slot was lost or made: those issued are the free ones and those in use.
RECOUNT = """
    select p.limit_name, p.slots, f.free, h.held
    from (select limit_name, sum(slots) as slots from rota.limit_parts group by 1) as p
    cross join lateral (
        select count(*) as free from rota.limit_slots as s where s.limit_name = p.limit_name
    ) as f
    cross join lateral (
        select count(*) as held from rota.jobs as j where p.limit_name = any(j.held_limits)
    ) as h
    where p.slots <> f.free + h.held
"""

SECONDS = 4.0
WORKERS = 8
KEYS = ["customer:1", "customer:2", "customer:3", "customer:4", "shop:1"]
# What may run at once, by the condition that finds it.
MOST = {
    "j.job_type = 'charge'": 3,
    "j.queue = 'narrow'": 4,
    "j.limit_key = 'customer:1'": 2,
    "j.limit_key = 'customer:2'": 2,
    "j.limit_key = 'shop:1'": 1,
}
COUNT = "select " + ", ".join(f"count(*) filter (where {condition})" for condition in MOST)


def set_limits(db: psycopg.Connection[Any]) -> None:
    db.execute(*call("set_limit", job_type="charge", max_running=3))
    db.execute(*call("set_limit", queue="narrow", max_running=4))
    db.execute(*call("set_limit", limit_key="customer:*", max_running=2))
    db.execute(*call("set_limit", limit_key="shop:1", max_running=1))


class Worker:
    """A session that does one random thing after the other with the jobs that it holds."""

    def __init__(self, connection: psycopg.Connection[Any], name: str) -> None:
        self.connection = connection
        self.name = name
        self.random = random.Random(name)
        self.held: dict[int, tuple[int, float, dict[str, Any]]] = {}
        self.spans: list[tuple[float, float, dict[str, Any]]] = []
        self.did: Counter[str] = Counter()

    def fetch(self, function: str, **arguments: Any) -> list[Any]:
        return self.connection.execute(*call(function, **arguments)).fetchall()

    def enqueue(self) -> None:
        jobs = [
            {
                "job_type": self.random.choice(["charge", "mail"]),
                "queue": self.random.choice(["narrow", "wide"]),
                "priority": self.random.choice([0, 0, 5]),
                "limit_key": self.random.choice([None, None, *KEYS]),
                "delay": self.random.choice([0, 0, 0.05]),
            }
            for _ in range(self.random.randint(1, 6))
        ]
        self.fetch("enqueue_many", jobs=Jsonb(jobs))

    def claim(self) -> None:
        types = self.random.choice([None, None, ["mail"], ["charge"]])
        queues = self.random.choice([["narrow", "wide"], ["wide"], ["narrow"]])
        rows = self.connection.execute(
            "select c.job_id, c.lease_token, j.queue, j.job_type, j.limit_key"
            " from rota.claim_jobs(%s, %s, %s, job_types => %s) as c"
            " join lateral (select c.queue, c.job_type, (select r.limit_key"
            "  from rota.job_runs as r where r.id = c.job_id) as limit_key) as j on true",
            (self.name, queues, self.random.randint(1, 5), types),
        ).fetchall()
        for job_id, token, queue, job_type, limit_key in rows:
            what = {"queue": queue, "job_type": job_type, "limit_key": limit_key}
            self.held[job_id] = (token, time.monotonic(), what)
        self.did["claimed"] += len(rows)

    def let_go(self, function: str, **arguments: Any) -> None:
        if not self.held:
            return
        job_id = self.random.choice(list(self.held))
        token, since, what = self.held[job_id]
        ended = time.monotonic()
        if function != "release_jobs":
            self.fetch(function, job_id=job_id, lease_token=token, **arguments)
        elif self.fetch(function, job_ids=[job_id], lease_tokens=[token]) == [(job_id, None)]:
            return  # somebody has its row locked
        del self.held[job_id]
        self.spans.append((since, ended, what))
        self.did[function] += 1

    def die(self) -> None:
        """Lose the lease of a job, and sweep."""
        if not self.held:
            return
        job_id = self.random.choice(list(self.held))
        token, since, what = self.held.pop(job_id)
        self.spans.append((since, time.monotonic(), what))
        self.fetch("heartbeat", job_id=job_id, lease_token=token, lease="1 ms")
        self.fetch("sweep_stale_leases")  # perhaps too early; then another one does
        self.did["died"] += 1

    def work(self, until: float) -> None:
        steps: list[Callable[[], None]] = [
            self.enqueue,
            self.claim,
            self.claim,
            lambda: self.let_go("finish_job"),
            lambda: self.let_go("finish_job"),
            lambda: self.let_go("fail_job", error="no", retry_in="0.01"),
            lambda: self.let_go("release_jobs"),
            lambda: self.let_go("snooze_job", delay="0.01"),
            self.die,
            # A claim may give a slot back, and leave it to a check who gets it.
            lambda: self.fetch("tick"),
            lambda: set_limits(self.connection) if self.random.random() < 0.1 else None,
        ]
        while time.monotonic() < until:
            self.random.choice(steps)()
        while self.held:
            self.let_go("finish_job")

    def drain(self, until: float) -> None:
        """Run what is left."""
        while time.monotonic() < until:
            self.fetch("tick")
            rows = self.fetch("claim_jobs", worker="w", queues=["narrow", "wide"], max_jobs=2)
            for row in rows:
                self.fetch("finish_job", job_id=row[0], lease_token=row[1])
            ((left,),) = self.connection.execute("select count(*) from rota.jobs").fetchall()
            if left == 0:
                return


def run_together(steps: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def most_at_once(spans: list[tuple[float, float, dict[str, Any]]]) -> int:
    """Return how many of these spans there were at one moment."""
    edges = sorted(edge for since, until, _ in spans for edge in ((since, 1), (until, -1)))
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


@pytest.mark.slow
def test_limits_hold_and_nothing_is_left_waiting(connect: Connect) -> None:
    """Eight workers, and at no moment more than allowed; then all that waits is run."""
    db = connect()
    for queue in ("narrow", "wide"):
        backoff = Jsonb({"kind": "fixed", "base_seconds": 0.01})
        db.execute(*call("set_queue", queue=queue, backoff=backoff))
    set_limits(db)
    workers = [Worker(connect(), f"w{n}") for n in range(WORKERS)]
    counts: list[Any] = []
    until = time.monotonic() + SECONDS

    def watch() -> None:
        watcher = connect()
        while time.monotonic() < until:
            counts.extend(
                watcher.execute(f"{COUNT} from rota.jobs as j where j.status = 'running'")
            )

    run_together([watch, *[lambda w=w: w.work(until) for w in workers]])  # type: ignore[misc]

    tops = [max(row[n] for row in counts) for n in range(len(MOST))]
    assert all(top <= most for top, most in zip(tops, MOST.values(), strict=True)), tops
    spans = [span for worker in workers for span in worker.spans]
    for column, value, most in [
        ("job_type", "charge", 3),
        ("queue", "narrow", 4),
        ("limit_key", "customer:1", 2),
        ("limit_key", "customer:2", 2),
        ("limit_key", "shop:1", 1),
    ]:
        held = [span for span in spans if span[2][column] == value]
        # And the slots were used, or nothing would be proved.
        assert 1 <= most_at_once(held) <= most, (column, value)
    assert tops[:2] == [3, 4]
    did = sum((worker.did for worker in workers), Counter())
    assert min(did[name] for name in ("finish_job", "fail_job", "release_jobs", "died")) > 3

    db.execute(*call("sweep_stale_leases"))
    until = time.monotonic() + 20
    run_together([lambda w=w: w.drain(until) for w in workers])  # type: ignore[misc]

    left = db.execute(
        "select j.queue, j.hold, j.status, j.run_at from rota.jobs as j"
    ).fetchall()
    assert left == [], db.execute("select * from rota.pending_checks").fetchall()
    assert db.execute(RECOUNT).fetchall() == []
    check_invariants(db)


def claimed(session: Session, max_jobs: int = 10) -> list[Any]:
    return session.fetch(*call("claim_jobs", worker="w", max_jobs=max_jobs))


def tick_each_second(session: Session, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.advance("1 s")
        session.fetch(*call("tick"))


def finish(session: Session, job: Any) -> None:
    session.fetch(*call("finish_job", job_id=job[0], lease_token=job[1]))


def test_slot_freed_while_a_claim_turns_a_job_away_is_used(a: Session, b: Session) -> None:
    """The claim found no slot before the finish, and its commit is later."""
    for _ in range(2):
        a.fetch(*call("enqueue", job_type="x"))
    a.fetch(*call("set_limit", job_type="x", max_running=1))
    (job,) = claimed(b, 1)

    with a.transaction():
        assert claimed(a) == []
        finish(b, job)
        b.fetch(*call("tick"))
        meanwhile = claimed(b)

    assert meanwhile == []
    b.fetch(*call("tick"))
    assert len(claimed(b)) == 1


def test_slot_freed_while_a_tick_looks_for_the_last_time_is_used(
    session: Callable[[], Session], a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """The tick found no slot before the finish, and no older transaction after it."""
    c = session()
    due = "update rota.pending_checks set due_at = rota.now() where due_at > '-infinity'"
    for _ in range(2):
        a.fetch(*call("enqueue", job_type="x"))
    a.fetch(*call("set_limit", job_type="x", max_running=1))
    while b.fetch("select from rota.limits_to_count"):
        b.fetch(*call("tick"))
        db.execute(due)
    (job,) = claimed(b, 1)
    db.execute(PAUSE)
    counted = "if not exists (select from rota._held_kinds(limit_name, 1)) then"
    mutate(db, "_check_limit", counted, f"perform race.pause(''); {counted}")

    with a.transaction():
        finish(a, job)
        assert claimed(b) == []
        while not b.fetch("select from rota.pending_checks where deferrals > 0"):
            b.fetch(*call("tick"))
            db.execute(due)
        db.execute("select pg_advisory_lock(%s)", [GATE])
        c.fetch(ARM, [1])
        pending = c.start("select rota._do_checks(10)", ())
        pending.wait_blocked()
    db.execute("select pg_advisory_unlock(%s)", [GATE])
    pending.result()

    db.execute(due)
    b.fetch(*call("tick"))
    assert len(claimed(b)) == 1


@pytest.mark.parametrize("queues", [["default"], ["default", "idle"]])
def test_slot_freed_while_the_held_job_is_locked_is_used(
    a: Session, b: Session, db: psycopg.Connection[Any], queues: list[str]
) -> None:
    """A cancels it and stays open; B ends the job that runs; A rolls back."""
    due = "update rota.pending_checks set due_at = rota.now() where due_at > '-infinity'"
    for queue in ("default", *queues):
        a.fetch(*call("enqueue", job_type="x", queue=queue))
    a.fetch(*call("set_limit", job_type="x", max_running=1))
    while b.fetch("select from rota.limits_to_count"):
        b.fetch(*call("tick"))
        db.execute(due)
    (job,) = claimed(b, 1)
    b.fetch(*call("claim_jobs", worker="w", queues=queues))
    while b.fetch("select from rota.pending_checks"):
        b.fetch(*call("tick"))
        db.execute(due)

    with a.transaction() as transaction:
        a.fetch(
            "select rota.cancel_job(j.id) from rota.jobs as j where j.hold is not null"
            " and j.queue = 'default'"
        )
        finish(b, job)
        for _ in range(3):
            db.execute(due)
            b.fetch(*call("tick"))
        raise psycopg.Rollback(transaction)
    db.execute(due)
    b.fetch(*call("tick"))

    assert len(claimed(b)) == 1


def test_held_job_that_is_moved_while_its_queue_comes_to_age_keeps_its_place(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A has found it in the queue; B moves it to another; A gives places for the age."""
    a.fetch(*call("set_limit", job_type="x", max_running=1))
    jobs = [a.fetch(*call("enqueue", job_type="x", priority=9))[0][0] for _ in range(2)]
    a.fetch(*call("set_queue", queue="default", ageing="1 day"))
    db.execute(PAUSE)
    lock = "v_locked := array("
    mutate(db, "_check_queue", lock, f"perform race.pause(''); {lock}")

    with stopped(db, a, "select rota._check_queue('default')"):
        move = {"filter": Jsonb({"ids": jobs[1:]}), "arguments": Jsonb({"queue": "other"})}
        b.fetch(*call("act_on_jobs", act="move", **move))
        assert b.fetch("select j.hold from rota.jobs as j where j.queue = 'other'") == [
            ("type x",)
        ]

    b.fetch(*call("cancel_job", job_id=jobs[0]))
    b.fetch(*call("tick"))
    found = b.fetch(*call("claim_jobs", worker="w", queues=["other"]))
    assert [job_id for job_id, *_ in found] == jobs[1:]


def test_forgotten_claim_keeps_only_what_it_has_taken(a: Session, b: Session) -> None:
    """Others take the other slots of its limits at once, also of one never used before."""
    a.fetch(*call("set_limit", job_type="x", max_running=2))
    a.fetch(*call("set_limit", queue="full", max_running=2))
    for _ in range(3):
        a.fetch(*call("enqueue", job_type="x"))
        a.fetch(*call("enqueue", job_type="y", queue="full"))
    ((plain,),) = a.fetch(*call("enqueue", job_type="y"))

    with a.transaction():
        queues = ["default", "full"]
        mine = a.fetch(*call("claim_jobs", worker="w", queues=queues, max_jobs=2))
        jobs = b.fetch(*call("claim_jobs", worker="w", queues=queues, max_jobs=10))
        again = b.fetch(*call("claim_jobs", worker="w", queues=queues, max_jobs=10))

    assert [job[2:4] for job in mine] == [("default", "x"), ("full", "y")]
    assert sorted(job[2:4] for job in jobs) == [
        ("default", "x"),
        ("default", "y"),
        ("full", "y"),
    ]
    assert plain in [job[0] for job in jobs]
    assert again == []


def test_limit_counts_what_ran_though_its_row_was_held_at_each_look(
    a: Session, b: Session, clock: Clock
) -> None:
    """By one transaction after the other; and nothing else waits for that."""
    clock.set("2026-01-12 10:00+00")
    for job_type in ("x", "x", "y"):
        a.fetch(*call("enqueue", job_type=job_type, lease="1 hour"))
    ((job_id, token, *_),) = claimed(a, 1)
    for job_type in ("x", "y"):
        b.fetch(*call("set_limit", job_type=job_type, max_running=1))

    for seconds in (1, 60):
        with a.transaction():
            a.fetch(*call("set_progress", job_id=job_id, lease_token=token, percent=50))
            tick_each_second(b, clock, seconds)
            counted = b.fetch("select held_limits from rota.jobs where id = %s", (job_id,))
            assert counted == [(None,)]
            if seconds == 1:
                assert [job[3] for job in claimed(b)] == ["y"]
    tick_each_second(b, clock, 10)

    assert claimed(b) == []
    counted = b.fetch("select held_limits from rota.jobs where id = %s", (job_id,))
    assert counted == [(["type x"],)]
    assert b.fetch(RECOUNT) == []


def test_limit_counts_a_claim_that_began_while_it_was_set(
    a: Session, b: Session, clock: Clock
) -> None:
    """Its transaction is younger than that of the limit, did not see it, and ends late."""
    clock.set("2026-01-12 10:00+00")
    for _ in range(2):
        a.fetch(*call("enqueue", job_type="x", limit_key="k", lease="1 hour"))
    a.fetch(*call("tick"))

    with a.transaction():
        with b.transaction():
            b.fetch(*call("set_limit", limit_key="k", max_running=1))
            assert len(claimed(a, 1)) == 1
        b.fetch(*call("tick"))
        tick_each_second(b, clock, 10)
    tick_each_second(b, clock, 10)

    assert claimed(b) == []


@pytest.mark.parametrize(
    "subject",
    [{"job_type": "x"}, {"queue": "default"}, {"limit_key": "c:8"}, {"limit_key": "c:*"}],
)
@pytest.mark.parametrize("act", ["heartbeat", "finish_job"])
def test_limit_lets_others_start_beside_a_job_whose_row_is_held(
    a: Session, b: Session, clock: Clock, subject: dict[str, str], act: str
) -> None:
    """What runs uncounted uses a slot until it is counted, or has ended, and then no more."""
    clock.set("2026-01-12 10:00+00")
    for _ in range(6):
        a.fetch(*call("enqueue", job_type="x", limit_key="c:8", lease="1 hour"))
    (mine,) = claimed(a, 1)

    with a.transaction():
        a.fetch(*call(act, job_id=mine[0], lease_token=mine[1]))
        b.fetch(*call("set_limit", **subject, max_running=3))
        tick_each_second(b, clock, 1)
        jobs = claimed(b)
        tick_each_second(b, clock, 10)
        assert (len(jobs), claimed(b)) == (2, [])
        assert b.fetch(RECOUNT) == []
    tick_each_second(b, clock, 20)

    last = claimed(b)
    assert len(last) == (1 if act == "finish_job" else 0)
    for job in [*jobs, *last, *([mine] if act == "heartbeat" else [])]:
        finish(b, job)
    tick_each_second(b, clock, 10)
    assert len(claimed(b)) == (2 if act == "finish_job" else 3)
    assert b.fetch(RECOUNT) == []


def test_key_keeps_what_runs_uncounted_when_it_gets_a_row_of_its_own(
    a: Session, b: Session, clock: Clock
) -> None:
    """And gives it to its class again when that row is taken away."""
    clock.set("2026-01-12 10:00+00")
    for _ in range(6):
        a.fetch(*call("enqueue", job_type="x", limit_key="c:8", lease="1 hour"))
    mine = claimed(a, 2)

    with a.transaction():
        for job in mine:
            a.fetch(*call("heartbeat", job_id=job[0], lease_token=job[1]))
        b.fetch(*call("set_limit", limit_key="c:*", max_running=2))
        tick_each_second(b, clock, 5)
        assert claimed(b) == []
        b.fetch(*call("set_limit", limit_key="c:8", max_running=3))
        tick_each_second(b, clock, 10)
        assert len(claimed(b)) == 1
        b.fetch(*call("set_limit", limit_key="c:8", reset=True))
        tick_each_second(b, clock, 10)
        assert claimed(b) == []
    tick_each_second(b, clock, 20)
    for job in mine:
        finish(b, job)
    tick_each_second(b, clock, 10)

    assert len(claimed(b)) == 1
    assert b.fetch(RECOUNT) == []


@pytest.mark.parametrize("state", ["new", "changed", "idle"])
def test_forgotten_tick_keeps_no_limit_from_others(
    a: Session, b: Session, clock: Clock, state: str
) -> None:
    """One that is not alone in its transaction leaves limits to those that are."""
    now = clock.set("2026-01-12 10:00+00")
    b.fetch("update rota.maintenance set done_at = %s where task = 'tick alone'", (now,))
    subject = {"limit_key": "c:8" if state == "idle" else "c:*"}
    if state != "new":
        b.fetch(*call("set_limit", limit_key="c:*", max_running=3))
        b.fetch(*call("tick"))
    for _ in range(6):
        a.fetch(*call("enqueue", job_type="x", limit_key="c:8", lease="1 day"))
    (job,) = claimed(b, 1)
    if state == "idle":
        finish(b, job)
        tick_each_second(b, clock, 10)
        clock.advance("2 hours")
        b.fetch(*call("tick"))
        (job,) = claimed(b, 1)
        finish(b, job)
        clock.advance("70 minutes")
        b.fetch("update rota.maintenance set done_at = rota.now() where task = 'tick alone'")
    else:
        b.fetch(*call("set_limit", **subject, max_running=2))

    with a.transaction():
        a.fetch("select 1")
        a.fetch(*call("tick"))
        tick_each_second(b, clock, 1)
        assert len(claimed(b)) == (3 if state == "idle" else 1)


@pytest.mark.parametrize(
    "subject", [{"job_type": "x"}, {"queue": "default"}, {"limit_key": "k"}]
)
def test_forgotten_claim_keeps_one_slot_of_three_hundred(
    a: Session, b: Session, subject: dict[str, str]
) -> None:
    """All are issued when the limit is set, and not in parts by those who claim."""
    b.fetch(*call("set_limit", **subject, max_running=300))
    b.fetch(
        "select rota.enqueue('x', limit_key => %s) from generate_series(1, 400)",
        (subject.get("limit_key"),),
    )

    with a.transaction():
        assert len(claimed(a, 1)) == 1
        others = 0
        for _ in range(6):
            b.fetch(*call("tick"))
            others += len(claimed(b, 1000))
        assert others == 299
