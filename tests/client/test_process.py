"""The event loop of a worker: uvloop's where that is installed."""

import asyncio
import sys
import threading
from typing import Any

import psycopg
import pytest

import rota
from rota.worker.process import loop_factory


def test_a_worker_runs_in_the_loop_of_uvloop(
    client: rota.Client,
    db: psycopg.Connection[Any],
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.worker.process.loop_factory", loop_factory)
    registry, loops = rota.Registry(), []

    @registry.handler("in_loop")
    async def in_loop(job: rota.AsyncJob) -> None:
        loops.append(type(asyncio.get_running_loop()).__module__)
        async with job.transaction() as connection:
            await connection.execute("select 1")

    @registry.handler("in_thread")
    def in_thread(job: rota.Job) -> None:
        loops.append(threading.current_thread().name)

    client.enqueue_many([{"job_type": kind} for kind in ("in_loop", "in_thread")])
    rota.Worker(dsn, registry, poll_interval=0.05).run(drain=True)

    assert sorted(loops) == ["rota-job", "uvloop"]
    ended = "select count(*) from rota.finished_jobs where status = 'succeeded'"
    assert db.execute(ended).fetchone() == (2,)


def test_without_uvloop_it_is_the_one_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)

    assert loop_factory() is None
