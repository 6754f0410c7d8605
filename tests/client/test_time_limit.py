"""Handlers that take longer than the time limit of their job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import rota
from client import computing
from rota import AsyncJob, Client, Job, JobEnd, Registry
from support.clock import Clock
from support.started_workers import WorkerProcess, lives
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
SOON = timedelta(milliseconds=300)
ERRORS = "select error_type, message, stack from rota.job_errors"


def _failure(db: psycopg.Connection[Any]) -> tuple[str, str, str]:
    rows = db.execute(ERRORS).fetchall()
    assert len(rows) == 1
    return rows[0]


def test_an_async_handler_is_cancelled_at_its_time_limit(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()
    ends: list[JobEnd] = []
    registry.on_end(lambda job, end: ends.append(end))

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        await asyncio.sleep(60)

    job = client.enqueue("waits", time_limit=SOON)
    drain(registry)

    row = db.execute("select status, attempts from rota.jobs where id = %s", [job.job_id])
    assert row.fetchone() == ("failed", 1)
    error_type, message, stack = _failure(db)
    assert (error_type, message) == (
        "time_limit",
        "time limit: the handler did not end within 0:00:00.300000",
    )
    assert "await asyncio.sleep(60)" in stack  # where it was
    assert ends[0].outcome == "failed"


def test_a_job_that_waits_for_a_place_has_its_whole_time(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()
    registry.add("slow", lambda job: time.sleep(0.6))
    registry.add("quick", lambda job: None)
    jobs: list[dict[str, Any]] = [{"job_type": "slow", "priority": -1}]
    jobs += [{"job_type": "quick", "time_limit": SOON, "max_attempts": 1}] * 4
    client.enqueue_many(jobs)

    drain(registry, concurrency=1, batch=5)

    ended = db.execute("select status, count(*) from rota.finished_jobs group by 1").fetchall()
    assert ended == [("succeeded", 5)]


def test_a_plain_handler_is_told_when_it_asks(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()
    seen: list[object] = []

    @registry.handler("asks")
    def asks(job: Job) -> None:
        seen.append(job.is_wanted)
        while job.is_wanted:
            time.sleep(0.01)
        seen.append(job.is_overdue)
        try:
            job.check()
        except Exception as error:
            seen.append((type(error), "time limit of 0:00:00.3" in str(error)))
            raise

    client.enqueue("asks", time_limit=SOON)
    drain(registry)

    assert seen == [True, True, (rota.TimeLimitExceeded, True)]
    assert _failure(db)[0] == "time_limit"


def test_a_task_may_give_up_at_its_time_limit_wherever_it_runs(
    client: Client, db: psycopg.Connection[Any], drain: Drain, tmp_path: Path
) -> None:
    registry = Registry()

    def plain(job: Job) -> None:
        time.sleep(0.4)
        job.check()

    async def in_loop() -> None:
        await asyncio.sleep(60)

    hour = {"kind": "fixed", "base_seconds": 3600}
    for name, options in (
        ("once", {"give_up_on": rota.TimeLimitExceeded}),
        ("again", {"retry_on": OSError}),
    ):
        shared: Any = {"time_limit": SOON, "backoff": hour, **options}
        started = str(tmp_path / name)
        registry.task(f"{name}-1", **shared)(plain).enqueue(client)
        registry.task(f"{name}-2", **shared)(in_loop).enqueue(client)
        computes = registry.task(f"{name}-3", own_process=True, **shared)(computing.hang)
        computes.enqueue(client, started)
    drain(registry, concurrency=6)

    query = "select job_type, status from rota.job_runs order by 1"
    ends = {"again": "failed", "once": "dead"}
    assert db.execute(query).fetchall() == [
        (f"{name}-{number}", status) for name, status in ends.items() for number in (1, 2, 3)
    ]


def test_what_a_plain_handler_waits_for_in_the_database_ends_at_the_time_limit(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()
    seconds: list[float] = []

    @registry.handler("waits")
    def waits(job: Job) -> None:
        began_at = time.monotonic()
        try:
            with job.transaction() as connection:
                connection.execute("select pg_sleep(20)")
        finally:
            seconds.append(time.monotonic() - began_at)

    client.enqueue("waits", time_limit=SOON)
    drain(registry)

    error_type, _, stack = _failure(db)
    assert error_type == "time_limit"
    assert "select pg_sleep(20)" in stack
    assert seconds[0] < 10


def test_a_handler_may_end_well_although_it_took_too_long(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    """What is done is done: the limit is there to end what would not end."""
    registry = Registry()

    @registry.handler("takes_long")
    def takes_long(job: Job) -> str:
        while job.is_wanted:
            time.sleep(0.01)
        return "done"

    client.enqueue("takes_long", time_limit=SOON)
    drain(registry)

    query = "select status, result from rota.finished_jobs"
    assert db.execute(query).fetchall() == [("succeeded", "done")]


def test_the_last_attempt_that_takes_too_long_is_dead(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        await asyncio.sleep(60)

    client.enqueue("waits", time_limit=SOON, max_attempts=1)
    drain(registry)

    query = "select status, error_type from rota.finished_jobs"
    assert db.execute(query).fetchall() == [("dead", "time_limit")]


def test_a_process_is_killed_at_the_time_limit(
    client: Client, db: psycopg.Connection[Any], drain: Drain, tmp_path: Path
) -> None:
    registry = Registry()

    @registry.handler("hangs")
    async def hangs(job: AsyncJob) -> None:
        await job.run_in_process(computing.hang, str(tmp_path / "pid"))

    client.enqueue("hangs", time_limit=timedelta(seconds=3))
    drain(registry)

    assert _failure(db)[0] == "time_limit"
    process, started_by_it = map(int, (tmp_path / "pid").read_text().split())
    assert not lives(process)
    wait_until(lambda: not lives(started_by_it), "the end of what it has started")


def test_a_queue_can_set_the_limit_and_a_job_brings_headers(
    client: Client, drain: Drain
) -> None:
    registry = Registry()
    seen: list[Any] = []

    @registry.handler("looks")
    def looks(job: Job) -> None:
        seen.append((job.time_limit, job.headers, 0 < job.seconds_to_limit <= 3600))

    client.set_queue("slow", time_limit=timedelta(hours=1))
    client.enqueue("looks", queue="slow", headers={"tenant": "7"})
    drain(registry, queues=["slow"])
    client.enqueue("looks")
    drain(registry)

    assert seen == [(timedelta(hours=1), {"tenant": "7"}, True), (None, {}, False)]


@pytest.mark.parametrize("kind", ["sleep", "async_stubborn"])
def test_a_handler_that_hangs_loses_its_job_and_then_its_process(
    client: Client,
    db: psycopg.Connection[Any],
    clock: Clock,
    start_worker: Callable[..., WorkerProcess],
    kind: str,
) -> None:
    """The worker lives and heartbeats; another follows when what else runs has ended."""
    parent = start_worker("--processes", "1", "--reload", "--concurrency", "2")
    other = client.enqueue("sleep", {"seconds": 6}, lease=timedelta(hours=1))
    hung = client.enqueue(
        kind,
        {"seconds": 80},
        time_limit=timedelta(seconds=1),
        lease=timedelta(seconds=3),
        max_attempts=1,
    )
    running = "select count(*) from rota.jobs where status = 'running'"
    wait_until(lambda: db.execute(running).fetchone() == (2,))
    clock.advance("40 seconds")
    query = "select status, error_type from rota.finished_jobs where id = %s"
    dead = wait_until(lambda: db.execute(query, [hung.job_id]).fetchone())
    assert dead == ("dead", "time_limit")

    parent.wait_for_line("makes room")
    assert db.execute(query, [other.job_id]).fetchone() is None
    done = wait_until(lambda: db.execute(query, [other.job_id]).fetchone())
    assert done == ("succeeded", None)
    parent.wait_for_line("ended with 3 (a handler, or a thread that it left behind, did not")
    again = client.enqueue("quick")
    wait_until(lambda: db.execute(query, [again.job_id]).fetchone())
