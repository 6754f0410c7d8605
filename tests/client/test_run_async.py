"""A worker inside the event loop of somebody else's program: cancelled, begun twice."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import rota
from rota import AsyncJob, Client, Job, Registry, RotaError, Worker
from rota.worker.executor import Places

pytestmark = pytest.mark.slow

SESSIONS = (
    "select count(*) from pg_stat_activity"
    " where application_name like 'rota %' and datname = current_database()"
)


def _registry(started: threading.Event) -> Registry:
    registry = Registry()

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        started.set()
        await asyncio.sleep(60)

    @registry.handler("checks")
    def checks(job: Job) -> None:
        started.set()
        while True:
            job.check()
            threading.Event().wait(0.02)

    return registry


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def _is_left(db: psycopg.Connection[Any]) -> None:
    """Nothing of a worker is there any more: no session, no task, no thread."""
    await _until(lambda: db.execute(SESSIONS).fetchone() == (0,))
    await _until(lambda: len(asyncio.all_tasks()) == 1)
    await _until(lambda: not [t for t in threading.enumerate() if t.name.startswith("rota")])
    assert db.execute("select count(*) from rota.workers").fetchone() == (0,)


@pytest.mark.parametrize("cancels", [1, 2, 5])
@pytest.mark.parametrize("kind", [None, "waits", "checks"])
@pytest.mark.own_session
def test_a_cancelled_worker_leaves(
    client: Client, db: psycopg.Connection[Any], dsn: str, kind: str | None, cancels: int
) -> None:
    """With a job under way, or none; a cancel scope of anyio cancels again and again."""
    started = threading.Event()
    worker = Worker(dsn, _registry(started), poll_interval=0.05, grace_period=0.2)
    if kind:
        client.enqueue(kind, lease=timedelta(seconds=2))

    async def run() -> None:
        task = asyncio.create_task(worker.run_async())
        await worker.wait_until_ready()
        if kind:
            await _until(started.is_set)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        client.enqueue("waits")
        await _is_left(db)

    asyncio.run(run())

    rows = db.execute("select status, attempts from rota.jobs order by id").fetchall()
    assert rows == [("queued", 0)] * (2 if kind else 1)


@pytest.mark.own_session
def test_a_worker_that_is_cancelled_while_it_leaves_takes_no_longer(
    client: Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    """The first cancel grants the grace period, the second ends it."""
    started = threading.Event()
    worker = Worker(dsn, _registry(started), grace_period=60)
    client.enqueue("waits")

    async def run() -> None:
        task = asyncio.create_task(worker.run_async())
        await _until(started.is_set)
        task.cancel()
        await asyncio.sleep(0.5)
        assert not task.done()
        task.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await task
        await _is_left(db)

    asyncio.run(run())

    assert db.execute("select status, attempts from rota.jobs").fetchall() == [("queued", 0)]


@pytest.mark.own_session
def test_a_handler_that_cannot_complete_its_effect_leaves_with_its_worker(
    admin: psycopg.Connection[Any], client: Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    """Its database is away for longer than anybody wants to wait."""
    allow = f"alter database {db.info.dbname} with allow_connections {{}}"
    registry, begun = Registry(), threading.Event()

    @registry.handler("mail")
    async def mail(job: AsyncJob) -> None:
        async with job.effect("mail", "k"):
            admin.execute(allow.format("false"))
            db.execute(f"select pg_terminate_backend(pid) {SESSIONS.partition('(*) ')[2]}")
            begun.set()

    client.enqueue("mail", lease=timedelta(minutes=10))
    worker = Worker(dsn, registry)

    async def run() -> None:
        task = asyncio.create_task(worker.run_async())
        await _until(begun.is_set)
        worker.stop(now=True)
        await task
        await _until(lambda: len(asyncio.all_tasks()) == 1)

    try:
        asyncio.run(run())
    finally:
        admin.execute(allow.format("true"))


def test_a_worker_runs_once(dsn: str) -> None:
    worker = Worker(dsn, _registry(threading.Event()))
    worker.run(drain=True)

    with pytest.raises(RuntimeError, match="create another one"):
        worker.run(drain=True)


def test_run_inside_a_loop_says_what_to_do_instead(dsn: str) -> None:
    worker = Worker(dsn, _registry(threading.Event()))

    async def run() -> None:
        with pytest.raises(RuntimeError, match=r"await worker\.run_async"):
            worker.run(drain=True)
        await worker.run_async(drain=True)

    asyncio.run(run())


def test_a_worker_says_when_it_is_ready(db: psycopg.Connection[Any], dsn: str) -> None:
    async def run() -> None:
        worker = Worker(dsn, _registry(threading.Event()))
        task = asyncio.create_task(worker.run_async())
        async with asyncio.timeout(30):
            await worker.wait_until_ready()
        assert db.execute("select count(*) from rota.workers").fetchone() == (1,)
        worker.stop()
        await task

    asyncio.run(run())


def test_who_waits_for_a_worker_that_fails_waits_no_more(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.worker.worker.__version__", "9.9.9")
    worker = Worker(dsn, _registry(threading.Event()))

    async def run() -> None:
        task = asyncio.create_task(worker.run_async())
        async with asyncio.timeout(30):
            await worker.wait_until_ready()
        assert not worker.is_ready
        with pytest.raises(RotaError, match="needs 9"):
            await task

    asyncio.run(run())


def test_a_worker_that_is_stopped_before_it_runs_leaves() -> None:
    """Also one that waits for its database among others."""
    registry = _registry(threading.Event())
    worker = Worker("host=127.0.0.1 port=1", registry, places=Places(1))
    worker.stop()

    async def run() -> None:
        async with asyncio.timeout(10):
            await worker.run_async()

    asyncio.run(run())


def test_a_worker_runs_where_tasks_begin_at_once(client: Client, dsn: str) -> None:
    if sys.version_info < (3, 12):
        pytest.skip("asyncio.eager_task_factory is of Python 3.12")
    registry, ended = Registry(), []

    @registry.handler("quick")
    async def quick(job: AsyncJob) -> None:
        await job.set_progress(50)

    @registry.on_end
    async def note(job: AsyncJob, end: rota.JobEnd) -> None:
        ended.append(end.outcome)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        worker = Worker(dsn, registry, concurrency=1)
        working = asyncio.create_task(worker.run_async())
        for number in range(1, 4):
            client.enqueue("quick")
            await _until(lambda number=number: len(ended) == number)
        worker.stop()
        await working

    asyncio.run(main())

    assert ended == ["succeeded"] * 3


def test_a_worker_connects_where_the_threads_of_the_loop_are_all_used(
    db: psycopg.Connection[Any], dsn: str
) -> None:
    """Its program uses them, and the name of the host has to be looked up."""
    go_on = threading.Event()
    worker = Worker(make_conninfo(dsn, host="localhost"), _registry(threading.Event()))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        used = loop.run_in_executor(None, go_on.wait, 60)
        running = asyncio.create_task(worker.run_async())
        try:
            async with asyncio.timeout(20):
                await worker.wait_until_ready()
            assert worker.is_ready
        finally:
            go_on.set()
            worker.stop()
            await asyncio.gather(running, used)

    asyncio.run(run())


@pytest.mark.parametrize("by", [Worker.stop, None], ids=["stop", "cancel"])
def test_a_worker_leaves_while_its_database_does_not_answer(
    by: Callable[[Worker], None] | None,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        conninfo = f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=x"
        worker = Worker(conninfo, _registry(threading.Event()))

        async def run() -> None:
            task = asyncio.create_task(worker.run_async())
            accepted, _ = await asyncio.to_thread(silent.accept)
            with accepted:
                if by is None:
                    task.cancel()
                else:
                    by(worker)
                await asyncio.wait([task], timeout=10)
            assert task.cancelled() == (by is None)
            assert by is None or task.result() is None

        asyncio.run(run())
