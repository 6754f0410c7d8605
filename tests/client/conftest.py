"""What the tests of the client share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rota import Client, Registry, Worker
from rota.__main__ import main
from support.clock import Clock
from support.started_workers import BackgroundWorker, WorkerProcess
from support.supervisor import killing


@pytest.fixture(autouse=True)
def loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this process run in asyncio's loop, those that are processes in uvloop's."""
    monkeypatch.setattr("rota.worker.process.loop_factory", lambda: asyncio.SelectorEventLoop)


@pytest.fixture
def start_worker(dsn: str, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Start worker processes; those that still run at the end are killed."""
    with killing() as started:

        def start(*options: str) -> WorkerProcess:
            log = tmp_path / f"worker{len(started)}.log"
            started.append(worker := WorkerProcess(dsn, log, *options))
            return worker

        yield start


@pytest.fixture
def client(db: psycopg.Connection[Any]) -> Client:
    return Client(db)


@pytest.fixture
def run(
    dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run a command of the command line; return what it printed."""
    monkeypatch.setenv("DATABASE_URL", dsn)

    def call(*words: str, code: int = 0) -> str:
        assert main(words) == code
        printed = capsys.readouterr()
        assert printed.err.startswith("rota: ") if code else not printed.err
        return printed.err if code else printed.out

    return call


@pytest.fixture
def status(db: psycopg.Connection[Any]) -> Callable[[int], str]:
    """Say the status of a job."""

    def get(job_id: int) -> str:
        row = db.execute("select status from rota.job_runs where id = %s", [job_id]).fetchone()
        assert row is not None
        return str(row[0])

    return get


@pytest.fixture
def drain(dsn: str) -> Callable[..., None]:
    """Run a worker in this process until nothing is due."""

    def run(registry: Registry, **options: Any) -> None:
        Worker(dsn, registry, poll_interval=0.05, **options).run(drain=True)

    return run


@pytest.fixture
def background(dsn: str) -> Iterator[Callable[..., BackgroundWorker]]:
    """Run workers in threads of this process; they are stopped at the end."""
    started: list[BackgroundWorker] = []

    def start(registry: Registry, **options: Any) -> BackgroundWorker:
        started.append(BackgroundWorker(dsn, registry, **options))
        return started[-1]

    yield start
    for worker in started:
        worker.stop(now=True)


@pytest.fixture
def trap_in_public(client: Client, clock: Clock, db: psycopg.Connection[Any]) -> None:
    """An operator that fits figures of the last hour better than that of the server."""
    clock.set("2026-03-27 12:00+00")
    client.enqueue("a")
    (job,) = client.claim_jobs("w")
    client.finish_job(job.job_id, job.lease_token)
    clock.advance("1 minute")
    client.tick()
    db.execute(
        "create function public.tell(float8, integer) returns float8 language plpgsql"
        " as $$ begin raise exception 'run as %', current_user; end $$;"
        "create operator public./"
        " (function = public.tell, leftarg = float8, rightarg = integer)"
    )
