"""Many sessions at once in a random order: nothing may deadlock.

The sessions take jobs and keys in random order, so any two statements that lock in the order
they were given would soon wait for each other.  Each test also asserts that work was done:
sessions that only fail, or find nothing, cannot deadlock.
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
from races.harness import call

SECONDS, PATIENCE = 4.0, 90.0
ENOUGH = 20  # of each step; a slow server is given longer
Step = Callable[["Client"], int]


class Client:
    """One session that does random steps and counts what came of them."""

    def __init__(self, connection: psycopg.Connection[Any], seed: str) -> None:
        self.connection = connection
        self.connection.execute("set deadlock_timeout = '200ms'")
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def fetch(self, function: str, **arguments: Any) -> list[Any]:
        return self.connection.execute(*call(function, **arguments)).fetchall()

    def running(self) -> tuple[list[int], list[int]]:
        """Return up to 40 running jobs, of anybody, in random order, with their tokens."""
        rows = self.connection.execute(
            "select j.id, j.lease_token from rota.jobs as j where j.status = 'running'"
        ).fetchall()
        rows = self.random.sample(rows, min(40, len(rows)))
        return [row[0] for row in rows], [row[1] for row in rows]

    def work(self, steps: dict[str, Step], is_over: Callable[[], bool]) -> None:
        while not is_over():
            name = self.random.choice(list(steps))
            try:
                self.done[name] += steps[name](self)
            except psycopg.Error as error:
                self.failed[f"{name}: {error.sqlstate} {error.diag.message_primary}"] += 1


def enqueue_shuffled(client: Client) -> int:
    keys = client.random.sample(range(120), 40)
    jobs = [{"job_type": "t", "idempotency_key": f"k{key}"} for key in keys]
    return sum(row[2] for row in client.fetch("enqueue_many", jobs=Jsonb(jobs)))


def claim(client: Client) -> int:
    lease = client.random.choice(["1 ms", "1 minute"])
    return len(client.fetch("claim_jobs", worker="w", max_jobs=30, lease=lease))


def finish(client: Client) -> int:
    ids, tokens = client.running()
    rows = client.fetch("finish_jobs", job_ids=ids, lease_tokens=tokens)
    return sum(outcome == "finished" for _, outcome in rows)


def heartbeat(client: Client) -> int:
    ids, tokens = client.running()
    rows = client.fetch("heartbeat_jobs", job_ids=ids, lease_tokens=tokens, lease="1 ms")
    return sum(not row[2] for row in rows)


def release(client: Client) -> int:
    ids, tokens = (part[:5] for part in client.running())
    rows = client.fetch("release_jobs", job_ids=ids, lease_tokens=tokens)
    return sum(is_released is True for _, is_released in rows)


def end(client: Client) -> int:
    ids, tokens = client.running()
    kinds = [
        {"outcome": "succeeded"},
        {"outcome": "failed", "error": "e", "retry_in": 0},
        {"outcome": "snoozed", "delay": 0},
        {"outcome": "released"},
    ]
    endings = [
        {"job_id": job_id, "lease_token": token, **client.random.choice(kinds)}
        for job_id, token in zip(ids[:10], tokens, strict=False)
    ]
    rows = client.fetch("end_jobs", endings=Jsonb(endings))
    return sum(row[2] not in ("lost", "busy") for row in rows)


def fail(client: Client) -> int:
    ids, tokens = (part[:1] for part in client.running())
    for job_id, token in zip(ids, tokens, strict=True):
        arguments = {"job_id": job_id, "lease_token": token, "retry_in": "0"}
        try:
            client.fetch("fail_job", error="no luck", **arguments)
        except psycopg.Error as error:
            if error.sqlstate not in ("RT001", "RT002", "RT003"):
                raise
            return 0
    return len(ids)


def cancel(client: Client) -> int:
    rows = client.connection.execute("select j.id from rota.jobs as j limit 100").fetchall()
    if not rows:
        return 0
    try:
        client.fetch("cancel_job", job_id=client.random.choice(rows)[0])
    except psycopg.Error as error:
        if error.sqlstate != "RT003":
            raise
        return 0
    return 1


def sweep(client: Client) -> int:
    return int(client.fetch("sweep_stale_leases", max_jobs=20)[0][0])


def tick(client: Client) -> int:
    # As if the last tick were long ago, so that each one deletes and makes partitions.
    client.connection.execute(
        "update rota.maintenance set done_at = '-infinity' where task = 'tick'"
    )
    return int(client.fetch("tick")[0][4])


def age(client: Client) -> int:
    """Let some of the ended jobs be old enough for tick to delete them."""
    try:
        return client.connection.execute(
            """
            update rota.finished_jobs as f
            set
                started_at = f.started_at - interval '200 days',
                finished_at = f.finished_at - interval '200 days'
            where f.id in (
                select o.id
                from rota.finished_jobs as o
                where o.finished_at > rota.now() - interval '1 day'
                limit 20
                for update skip locked
            )
            """
        ).rowcount
    except psycopg.errors.SerializationFailure:
        return 0  # another one moved the same row; rota itself never moves one


def play(
    connect: Callable[..., psycopg.Connection[Any]], steps: dict[str, Step], sessions: int
) -> tuple[Counter[str], Counter[str]]:
    """Let so many sessions do random steps for a while; return what was done, what failed."""
    clients = [Client(connect(), f"session {number}") for number in range(sessions)]
    began_at = time.monotonic()

    def is_over() -> bool:
        passed = time.monotonic() - began_at
        return passed > PATIENCE or (
            passed > SECONDS
            and all(sum(each.done[name] for each in clients) > ENOUGH for name in steps)
        )

    threads = [threading.Thread(target=each.work, args=(steps, is_over)) for each in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = sum((client.done for client in clients), Counter())
    return done, sum((client.failed for client in clients), Counter())


@pytest.mark.slow
@pytest.mark.parametrize("statistics", ["none", "empty", "full"])
def test_batches_in_random_order_never_deadlock(
    connect: Callable[..., psycopg.Connection[Any]],
    db: psycopg.Connection[Any],
    statistics: str,
) -> None:
    """Eight sessions enqueue the same keys and end, beat, give back and cancel the same jobs.

    The planner knows nothing of the table, or thinks that it is empty, or knows a full one.
    """
    db.execute("alter table rota.jobs set (autovacuum_enabled = off)")
    if statistics == "full":
        db.execute(
            "select count(*) from generate_series(1, 3000) as i, "
            "rota.enqueue('t', queue => 'other', delay => '1 hour')"
        )
    if statistics != "none":
        db.execute("vacuum analyze rota.jobs")
    steps: dict[str, Step] = {
        "enqueue": enqueue_shuffled,
        "claim": claim,
        "finish": finish,
        "heartbeat": heartbeat,
        "release": release,
        "fail": fail,
        "end": end,
        "cancel": cancel,
        "sweep": sweep,
    }

    done, failed = play(connect, steps, sessions=8)

    assert not failed, f"{failed} of {done}"
    assert all(done[name] > ENOUGH for name in steps), done
    check_invariants(db)


@pytest.mark.slow
def test_maintenance_among_claims_and_finishes_never_deadlocks(
    connect: Callable[..., psycopg.Connection[Any]], db: psycopg.Connection[Any]
) -> None:
    """Eight sessions delete old jobs, sweep, look after partitions, claim and finish."""
    db.execute("select rota.set_queue('default', keep_finished => '1 day')")
    # Nothing is deleted that is not counted, and what was counted first while others end jobs
    # is counted again half a minute later.
    db.execute("select * from rota.tick()")
    steps: dict[str, Step] = {
        "enqueue": enqueue_shuffled,
        "claim": claim,
        "finish": finish,
        "tick": tick,
        "age": age,
    }

    done, failed = play(connect, steps, sessions=8)

    assert not failed, f"{failed} of {done}"
    assert all(done[name] > ENOUGH for name in steps), done
    check_invariants(db)
