"""A server that is away for longer than the leases: what has ended meanwhile has ended once."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from rota import Client, Job, Registry
from support.server import Server
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.own_session]

JOBS = 8
LEASE = timedelta(seconds=2)
SOON = 2.0
"""Seconds after which the first job has run once the server is back; most often it is 0.6."""


@pytest.fixture(scope="module")
def away() -> Iterator[Server]:
    # Not below a directory of pytest, which is for its own user.
    home = Path(tempfile.mkdtemp())
    home.chmod(0o755)
    server = Server.create(home, port=lasting_port())
    yield server
    server.destroy()


def lasting_port() -> int:
    """Return a port that no client is given, as one who knocks there while it is free."""
    for port in range(21000 + os.getpid() % 1000, 29000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    pytest.fail("no port is free")


class ForeignTicker:
    """Calls ``tick()`` whenever there is a server, as pg_cron does, and knows of no outage."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            with (
                suppress(psycopg.Error),
                psycopg.connect(self._dsn, autocommit=True) as connection,
            ):
                while not self._is_over.wait(0.05):
                    Client(connection).tick()


@pytest.mark.parametrize("has_foreign_ticker", [False, True])
def test_no_job_that_has_ended_meanwhile_runs_twice(
    away: Server, has_foreign_ticker: bool
) -> None:
    registry, runs, go = Registry(), Counter[int](), threading.Event()

    @registry.handler("x")
    def handle(job: Job) -> None:
        runs[job.job_id] += 1
        go.wait(30)

    with psycopg.connect(away.url(), autocommit=True) as connection:
        jobs = [{"job_type": "x", "lease": LEASE, "max_attempts": 3}] * JOBS
        ids = [job.job_id for job in Client(connection).enqueue_many(jobs)]
    ticker = ForeignTicker(away.url()) if has_foreign_ticker else None
    try:
        worker = background_of(away, registry)
        wait_until(lambda: len(runs) == JOBS, "all to run")
        away.stop()
        go.set()
        time.sleep(LEASE.total_seconds() + 1.5)
        away.start()

        with psycopg.connect(away.url(), autocommit=True) as connection:
            ended = "select count(*) from rota.finished_jobs where id = any (%s)"
            wait_until(
                lambda: connection.execute(ended, [ids]).fetchone() == (JOBS,), "their ends"
            )
            attempts = connection.execute(
                "select distinct status, attempts from rota.finished_jobs where id = any (%s)",
                [ids],
            ).fetchall()
        worker.stop()
    finally:
        if ticker is not None:
            ticker.stop()

    assert attempts == [("succeeded", 1)]
    assert runs == Counter(dict.fromkeys(ids, 1))


@pytest.mark.parametrize("seconds", [2, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_busy", [False, True])
def test_the_first_job_runs_soon_after_the_server_is_back(
    away: Server, seconds: float, is_busy: bool
) -> None:
    """However long it was away, and also where all places are taken until then."""
    registry, has_run, go = Registry(), threading.Event(), threading.Event()
    registry.add("x", lambda job: has_run.set())
    registry.add("wait", lambda job: go.wait(60))

    with psycopg.connect(away.url(), autocommit=True) as connection:
        if is_busy:
            Client(connection).enqueue_many([{"job_type": "wait"}] * 4)
        worker = background_of(away, registry, concurrency=4)
        if is_busy:
            wait_until(lambda: worker.worker.running == 4, "busy places")
        else:
            wait_until(lambda: worker.worker.is_ready, "the worker")
        Client(connection).enqueue("x", delay=timedelta(seconds=1))
    try:
        away.stop()
        time.sleep(seconds)
        go.set()
        away.start()
        began = time.monotonic()
        assert has_run.wait(30)
        took = time.monotonic() - began
    finally:
        go.set()
        worker.stop(now=True)

    assert took < SOON


def background_of(server: Server, registry: Registry, **options: int) -> BackgroundWorker:
    return BackgroundWorker(server.url(), registry, **{"concurrency": JOBS, **options})


def test_a_worker_that_cannot_report_ends_claims_no_more(
    client: Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    """Its server is full but for the connection over which it claims."""
    role = f"narrow_{db.info.dbname}"
    db.execute(f"create role {role} login password 'x' connection limit 1")  # type: ignore[arg-type]
    for (grant,) in db.execute("select rota.grant_statements('worker', %s)", [role]).fetchall():
        db.execute(grant)
    registry = Registry()
    registry.add("quick", lambda job: None)
    client.enqueue_many([{"job_type": "quick"}] * 300)
    claimed = "select count(*) from rota.jobs where attempts > 0"
    narrow = make_conninfo(dsn, user=role, password="x")
    worker = BackgroundWorker(narrow, registry, concurrency=2, listen=False)
    try:
        retry = worker.worker._executor._completer._retry
        wait_until(lambda: retry.failures >= 2, "two failures")
        claimed_at_first = db.execute(claimed).fetchone()
        wait_until(lambda: retry.failures >= 4, "four failures")
        claimed_at_last = db.execute(claimed).fetchone()
        db.execute(f"alter role {role} connection limit 10")  # type: ignore[arg-type]
        done = "select count(*) from rota.finished_jobs where status = 'succeeded'"
        wait_until(lambda: db.execute(done).fetchone() == (300,), "all jobs")
    finally:
        worker.stop(now=True)
        db.execute(f"drop owned by {role}; drop role {role}")  # type: ignore[arg-type]

    assert claimed_at_last == claimed_at_first != (300,)
