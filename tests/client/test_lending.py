"""How many connections a worker lends, and to whom."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import rota
from rota import AsyncJob, Client, Job, Registry, Worker
from rota.worker.connection import NoAnswerError
from rota.worker.lending import CALLS, Pool, Watch
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.own_session]

Drain = Callable[..., None]


class Peak:
    """Counts, again and again, how many sessions of handlers there are."""

    def __init__(self, dsn: str) -> None:
        self.most = 0
        self._dsn = dsn
        self._is_over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _watch(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._is_over.is_set():
                ports = connection.execute(
                    "select client_port from pg_stat_activity"
                    " where datname = current_database() and application_name = 'rota job'"
                ).fetchall()
                # The session of one that the client has closed is there a moment longer.
                self.most = max(self.most, len(open_ports() & {port for (port,) in ports}))


def open_ports() -> set[int]:
    """Return the ports of this machine that have a TCP connection, open at both ends."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {int(row[1].split(":")[1], 16) for row in fields if row[3] == "01"}


@pytest.fixture
def peak(dsn: str) -> Iterator[Peak]:
    watching = Peak(dsn)
    with watching.watched():
        yield watching


def test_calls_of_handlers_take_turns_also_within_a_transaction(
    client: Client, db: psycopg.Connection[Any], drain: Drain, peak: Peak
) -> None:
    """Both have a transaction while both record progress and effects, forty at once."""
    registry, both = Registry(), threading.Barrier(2)

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.transaction():
            await asyncio.to_thread(both.wait, 10)
            await asyncio.gather(*[job.set_progress(n) for n in range(40)])
            await asyncio.gather(*[effect(job, n) for n in range(40)])

    async def effect(job: AsyncJob, number: int) -> None:
        async with job.effect(str(job.job_id), str(number)):
            pass

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with job.transaction():
            both.wait(10)
            threads = [threading.Thread(target=job.set_progress, args=[n]) for n in range(40)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    for kinds in (["async", "async"], ["plain", "plain"], ["async", "plain"]):
        client.enqueue_many([{"job_type": kind} for kind in kinds])
        drain(registry, concurrency=2)

    assert db.execute("select count(*) from rota.finished_jobs").fetchone() == (6,)
    assert db.execute("select count(*) from rota.effects").fetchone() == (120,)
    assert 2 < peak.most <= 4


def test_idle_connections_of_the_other_kind_make_room(
    client: Client, db: psycopg.Connection[Any], drain: Drain, peak: Peak
) -> None:
    registry, four = Registry(), threading.Barrier(4)

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.transaction():
            await asyncio.to_thread(four.wait, 10)

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with job.transaction():
            four.wait(10)

    for kind in ("async", "plain", "async", "plain"):
        client.enqueue_many([{"job_type": kind}] * 4)
    drain(registry, concurrency=4, batch=4)

    assert db.execute("select count(*) from rota.finished_jobs").fetchone() == (16,)
    # One that closes may be there for a moment after the next has come.
    assert 4 <= peak.most <= 8


def test_many_places_share_few_connections_for_their_calls(
    client: Client, db: psycopg.Connection[Any], drain: Drain, peak: Peak
) -> None:
    registry = Registry()

    @registry.handler("x")
    async def handle(job: AsyncJob) -> None:
        await asyncio.gather(*[job.set_progress(n) for n in range(5)])

    client.enqueue_many([{"job_type": "x"}] * 40)
    drain(registry, concurrency=40)

    assert db.execute("select count(*) from rota.finished_jobs").fetchone() == (40,)
    assert 2 <= peak.most <= CALLS


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_job_has_one_transaction_at_a_time(
    client: Client, db: psycopg.Connection[Any], drain: Drain, kind: str
) -> None:
    """A second one would wait for a connection that the first has."""
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with job.transaction(), job.transaction():
            pass

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.transaction(), job.transaction():
            pass

    job_id = client.enqueue(kind, max_attempts=1).job_id
    drain(registry, concurrency=1)

    rows = db.execute("select status, last_error from rota.finished_jobs").fetchall()
    assert rows == [("dead", f"job {job_id} already has a transaction: use that")]


def test_a_plain_handler_waits_for_a_connection_no_longer_than_its_lease() -> None:
    job: Any = SimpleNamespace(lease=timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        conninfo = f"host=127.0.0.1 port={silent.getsockname()[1]} connect_timeout=20"
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError), Pool(conninfo, 1, Watch()).lend(job):
            pass
    assert time.monotonic() - began < 10


def test_who_waits_for_a_connection_in_vain_takes_none_from_others(dsn: str) -> None:
    job: Any = SimpleNamespace(lease=timedelta(minutes=1), last_words=0)
    pool = Pool(dsn, 1, Watch())

    async def wait() -> None:
        async with pool.lend_async(job, 0.05):
            pass

    with pool.lend(job):
        for _ in range(2):
            with pytest.raises(NoAnswerError, match="no connection became free"):
                asyncio.run(wait())
            with (
                pytest.raises(NoAnswerError, match="no connection became free"),
                pool.lend(job, 0.05),
            ):
                pass
    with pool.lend(job, 0.05):
        pass
    pool.close()


def test_a_call_that_waits_for_its_turn_waits_no_longer_than_it_may(
    client: Client, db: psycopg.Connection[Any], dsn: str, drain: Drain
) -> None:
    """The row of the first is locked, so its call has the only connection for long."""
    registry = Registry()
    seconds: list[float] = []

    @registry.handler("x")
    async def handle(job: AsyncJob) -> None:
        with psycopg.connect(dsn) as other:
            other.execute("select from rota.jobs where id = %s for update", [job.job_id])
            began = time.monotonic()
            with pytest.raises((rota.RotaError, psycopg.Error)):
                async with job.effect("mail", "k"):
                    pass
            seconds.append(time.monotonic() - began)

    client.enqueue("x", lease=1)
    drain(registry, concurrency=1)

    assert len(seconds) == 1
    assert 0.5 < seconds[0] < 3


def test_a_worker_that_leaves_cuts_off_what_goes_on_after_its_handler(
    client: Client,
    db: psycopg.Connection[Any],
    background: Callable[..., BackgroundWorker],
) -> None:
    registry, begun = Registry(), threading.Event()
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def go_on(job: Job) -> None:
        try:
            with job.transaction() as connection:
                begun.set()
                connection.execute("select pg_sleep(60)")
        except BaseException as error:
            errors.append(error)

    @registry.handler("leaves")
    def leaves(job: Job) -> None:
        threads.append(threading.Thread(target=go_on, args=[job]))
        threads[0].start()
        begun.wait(30)

    client.enqueue("leaves", lease=timedelta(hours=1))
    worker = background(registry)
    ended = "select status from rota.finished_jobs"
    wait_until(lambda: db.execute(ended).fetchall() == [("succeeded",)], "the end")

    worker.stop()

    threads[0].join(10)
    assert [type(error) for error in errors] == [NoAnswerError]
    assert str(errors[0]).endswith("has left")


def test_idle_connections_make_room_for_the_end_of_a_job(
    client: Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    role = f"limited_{db.info.dbname}"
    db.execute(f"create role {role} login password 'x' connection limit 3")  # type: ignore[arg-type]
    for statement in client.grant_statements("worker", role):
        db.execute(statement)  # type: ignore[call-overload]
    registry, both = Registry(), threading.Barrier(2)

    @registry.handler("writes")
    def writes(job: Job) -> None:
        with job.transaction():
            both.wait(30)

    registry.add("plain", lambda job: None)
    client.enqueue_many([{"job_type": "writes"}] * 2)
    job_id = client.enqueue("plain", priority=1).job_id
    worker = Worker(make_conninfo(dsn, user=role, password="x"), registry, concurrency=2)
    giving_up = threading.Timer(20, worker.stop)
    giving_up.start()
    worker.run(drain=True)
    giving_up.cancel()

    ended = "select status from rota.finished_jobs where id = %s"
    assert db.execute(ended, [job_id]).fetchone() == ("succeeded",)
    db.execute(f"drop owned by {role}; drop role {role}")  # type: ignore[arg-type]
