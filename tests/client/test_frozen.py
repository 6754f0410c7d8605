"""A server that hangs holds no handler: its sessions are stopped while jobs wait for them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import rota
from rota import AsyncJob, Client, Job, Registry
from support.frozen import Frozen
from support.started_workers import BackgroundWorker, WorkerProcess
from support.waiting import wait_until

pytestmark = pytest.mark.own_session

Background = Callable[..., BackgroundWorker]
LEASE = timedelta(seconds=2)
BOUND = 2 * LEASE.total_seconds() + 1.0
"""Seconds after which nothing may wait any more: a call and the lease have both had theirs."""
KINDS = ["plain", "async"]


@pytest.fixture
def frozen(db: psycopg.Connection[Any]) -> Iterator[Callable[[str], Frozen]]:
    made: list[Frozen] = []

    def make(name: str) -> Frozen:
        made.append(Frozen(db, name))
        return made[-1]

    yield make
    for each in made:
        each.thaw()


class Gate:
    """What a handler and its test tell each other, and how long the handler then took."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.is_open = threading.Event()
        self.seconds: float | None = None
        self.error: BaseException | None = None

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.seconds = time.monotonic() - began

    async def wait(self) -> None:
        while not self.is_open.is_set():
            await asyncio.sleep(0.01)


def _registry(gate: Gate, act: str) -> Registry:
    """Handlers that are in the midst of their *act* when the server stops to answer."""
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> None:
        if job.attempt > 1:
            return
        with gate.timed():
            if act == "effect":
                with job.effect("mail", "k"):
                    gate.is_reached.set()
                    gate.is_open.wait()
            elif act == "progress":
                job.set_progress(1)
                gate.is_reached.set()
                gate.is_open.wait()
                job.set_progress(2)
            else:
                with job.transaction() as connection:
                    connection.execute("select 1")
                    gate.is_reached.set()
                    gate.is_open.wait()
                    if act == "statement":
                        connection.execute("select 2")

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        if job.attempt > 1:
            return
        with gate.timed():
            if act == "effect":
                async with job.effect("mail", "k"):
                    gate.is_reached.set()
                    await gate.wait()
            elif act == "progress":
                await job.set_progress(1)
                gate.is_reached.set()
                await gate.wait()
                await job.set_progress(2)
            else:
                async with job.transaction() as connection:
                    await connection.execute("select 1")
                    gate.is_reached.set()
                    await gate.wait()
                    if act == "statement":
                        await connection.execute("select 2")

    return registry


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ["effect", "transaction", "progress"])
def test_what_a_handler_waits_for_ends_while_the_server_hangs(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    frozen: Callable[[str], Frozen],
    kind: str,
    act: str,
) -> None:
    gate = Gate()
    client.enqueue(kind, lease=LEASE, backoff={"kind": "fixed", "base_seconds": 0.1})
    background(_registry(gate, act))
    assert gate.is_reached.wait(10)

    sessions = frozen("rota %")
    sessions.freeze()
    gate.is_open.set()
    wait_until(lambda: gate.seconds is not None, "the end of the handler", BOUND)
    sessions.thaw()

    done = "select count(*) from rota.finished_jobs where status = 'succeeded'"
    wait_until(lambda: db.execute(done).fetchone() == (1,), "the end of the job")
    kinds = db.execute("select distinct error_type from rota.job_errors").fetchall()
    assert {k for (k,) in kinds} <= {
        "lease_expired",
        "rota.worker.connection.NoAnswerError",
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ["effect", "transaction", "statement", "progress"])
def test_a_lease_that_ends_while_the_server_hangs_ends_what_the_handler_waits_for(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    frozen: Callable[[str], Frozen],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    act: str,
) -> None:
    """No session can be begun either, so no heartbeat comes through."""
    gate = Gate()
    client.enqueue(kind, lease=LEASE, backoff={"kind": "fixed", "base_seconds": 0.1})
    background(_registry(gate, act))
    assert gate.is_reached.wait(10)
    # A session that is just being begun is not seen, and its heartbeat would come through.
    beats = "select exists (select from pg_stat_activity where application_name = %s)"
    wait_until(lambda: db.execute(beats, ["rota heartbeat"]).fetchone() == (True,), "a beat")

    sessions = frozen("rota %")
    sessions.freeze_all()
    gate.is_open.set()
    wait_until(lambda: gate.seconds is not None, "the end of the handler", BOUND)
    sessions.thaw()

    done = "select count(*) from rota.finished_jobs where status = 'succeeded'"
    wait_until(lambda: db.execute(done).fetchone() == (1,), "the end of the job")
    if act == "progress":  # which is given up before, and what cannot be stored is no matter
        return
    assert isinstance(
        gate.error, rota.LeaseLostError | asyncio.CancelledError | psycopg.OperationalError
    )
    kinds = db.execute("select error_type from rota.job_errors").fetchall()
    assert {k for (k,) in kinds} <= {"lease_expired", "rota.LeaseLostError"}


@pytest.mark.slow
def test_a_second_worker_goes_on_where_the_sessions_of_the_first_hang(
    client: Client,
    db: psycopg.Connection[Any],
    dsn: str,
    tmp_path: Path,
    frozen: Callable[[str], Frozen],
) -> None:
    """Each job is charged once and written once, and the first lets go while they hang."""
    db.execute("create table public.marks (job_id bigint)")
    began, go, charged = tmp_path / "began", tmp_path / "go", tmp_path / "charged"
    told = {"began": str(began), "go": str(go), "charged": str(charged)}
    lease = timedelta(seconds=3)
    ids = [client.enqueue(f"{kind}charge", told, lease=lease).job_id for kind in ("", "async_")]
    role, sessions = f"first_{db.info.dbname}", frozen("one")
    db.execute(f"create role {role} login superuser password 'x'")  # type: ignore[arg-type]
    first = make_conninfo(dsn, application_name="one", user=role, password="x")
    workers = [WorkerProcess(first, tmp_path / "1.log")]
    try:
        wait_until(lambda: began.exists() and len(began.read_text().split()) == 2, "both")
        db.execute(f"alter role {role} nologin")  # type: ignore[arg-type]
        sessions.freeze()
        go.touch()
        workers.append(WorkerProcess(dsn, tmp_path / "2.log"))

        def are_done() -> bool:
            done = "select count(*) from rota.finished_jobs where status = 'succeeded'"
            return db.execute(done).fetchone() == (2,) and len(workers[0].lines("lost")) == 2

        wait_until(are_done, "the jobs", 20)
        sessions.thaw()
        for worker in workers:
            worker.signal(signal.SIGTERM)
        assert [worker.wait() for worker in workers] == [0, 0]
    finally:
        sessions.thaw()
        for worker in workers:
            worker.process.kill()
            worker.wait()
        db.execute(f"drop role {role}")  # type: ignore[arg-type]

    assert sorted(map(int, charged.read_text().split())) == ids
    assert sorted(i for (i,) in db.execute("select job_id from public.marks")) == ids
    kinds = db.execute("select distinct error_type from rota.job_errors").fetchall()
    assert kinds == [("lease_expired",)]


@pytest.mark.slow
def test_an_idle_worker_ticks_while_the_session_by_which_it_asks_hangs(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    frozen: Callable[[str], Frozen],
) -> None:
    """When it asked the last time there was nothing to do; a lease ends after that."""
    background(_registry(Gate(), "effect"), poll_interval=0.5, tick_interval=0.5)
    for question, what in (
        ("select not rota._has_maintenance()", "the first ticks"),
        ("select exists (select from pg_locks where locktype = 'advisory')", "the idle worker"),
    ):
        wait_until(lambda: db.execute(question).fetchone() == (True,), what)  # noqa: B023
    client.enqueue("other", queue="other")
    client.claim_jobs("gone", queues=["other"], lease=timedelta(seconds=1))
    asked_at = _asked_at(db)
    wait_until(lambda: _asked_at(db) != asked_at, "an answer that there is nothing to do")

    sessions = frozen("rota notifier")
    sessions.freeze()
    swept = "select count(*) from rota.job_errors where error_type = 'lease_expired'"
    # It asks within half a second, and waits one second for the answer, of the six until it
    # gives up the session.
    wait_until(lambda: db.execute(swept).fetchone() == (1,), "the sweep", 4.0)


@pytest.mark.slow
def test_a_worker_is_not_ready_while_the_server_hangs(
    db: psycopg.Connection[Any],
    background: Background,
    frozen: Callable[[str], Frozen],
) -> None:
    worker = background(_registry(Gate(), "effect")).worker
    wait_until(lambda: worker.is_ready, "readiness")

    server = frozen("rota %")
    server.freeze_all()
    # Long before the calls that are under way are given up, and others find no connection.
    wait_until(lambda: not worker.is_ready, "its end", 15.0)
    server.thaw()

    wait_until(lambda: worker.is_ready, "its return", 60.0)


def _asked_at(db: psycopg.Connection[Any]) -> object:
    query = "select query_start from pg_stat_activity where application_name = 'rota notifier'"
    return db.execute(query).fetchone()
