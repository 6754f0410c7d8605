"""What a worker believes of its leases: never more than the database said."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import rota
from rota import AsyncClient, AsyncJob, Client, Job, Registry, Worker
from rota.job import BaseJob, JobContext, State
from rota.rows import ClaimedJob, JobHeartbeat
from rota.worker.connection import ConnectionState, NoAnswerError
from rota.worker.heartbeat import Heartbeat
from rota.worker.lending import Pool, Watch
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
Background = Callable[..., BackgroundWorker]
NONE = cast(Pool, None)
BEATEN = JobHeartbeat(
    job_id=1, locked_until=datetime.now(UTC), is_lost=False, is_cancel_requested=False
)
LOCKED = JobHeartbeat(job_id=1, locked_until=None, is_lost=False, is_cancel_requested=False)
LOST = JobHeartbeat(job_id=1, locked_until=None, is_lost=True, is_cancel_requested=False)


def _job(lease: float, claimed_at: float) -> BaseJob:
    claim = ClaimedJob(*[None] * len(ClaimedJob._fields))._replace(
        job_id=1, lease_token=1, locked_for=timedelta(seconds=lease)
    )
    return BaseJob(claim, JobContext("w", NONE, NONE, ConnectionState()), claimed_at)


class _Connection:
    """Answers with what *beat* returns or raises."""

    def __init__(self, beat: Callable[[], list[JobHeartbeat]]) -> None:
        self.state = ConnectionState()
        self._beat = beat

    async def call(self, action: Any, timeout: float) -> list[JobHeartbeat]:
        return self._beat()

    async def close(self) -> None:
        pass


def _heartbeat(beat: Callable[[], list[JobHeartbeat]]) -> Heartbeat:
    connection: Any = _Connection(beat)
    return Heartbeat(connection, lambda job: None, Watch())


def test_a_job_whose_claim_took_as_long_as_its_lease_keeps_its_attempts(
    client: Client, db: psycopg.Connection[Any], background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The network stood still, and now the database begins to count the lease."""
    claim = AsyncClient.claim_jobs
    calls: list[float] = []

    async def late(*arguments: Any, **named: Any) -> Any:
        calls.append(time.monotonic())
        if len(calls) == 1:
            await asyncio.sleep(1.2)
        return await claim(*arguments, **named)

    monkeypatch.setattr(AsyncClient, "claim_jobs", late)
    registry = Registry()
    registry.add("a", lambda job: None)
    job_id = client.enqueue("a", lease=timedelta(seconds=1), max_attempts=1).job_id

    background(registry)

    ended = (
        "select status, attempts from rota.job_runs where id = %s and finished_at > created_at"
    )
    row = wait_until(lambda: db.execute(ended, (job_id,)).fetchone(), "the end")
    assert row == ("succeeded", 1)


def test_a_claim_that_was_long_under_way_makes_no_lease_longer(
    client: Client, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = rota.AsyncClient.claim_jobs
    left: list[float] = []
    registry = Registry()
    registry.add("look", lambda job: left.append(job.seconds_left))

    async def answer_late(*args: Any) -> Any:
        claims = await original(*args)
        await asyncio.sleep(0.3)
        return claims

    monkeypatch.setattr(rota.AsyncClient, "claim_jobs", answer_late)
    client.enqueue("look", lease=timedelta(minutes=1))
    drain(registry)

    assert len(left) == 1
    assert left[0] <= 59.7


def test_two_heartbeats_may_get_lost_before_a_lease_ends() -> None:
    heartbeat, job = _heartbeat(lambda: [BEATEN]), _job(lease=30.0, claimed_at=100.0)
    heartbeat.add([job])

    assert heartbeat._due == {job: pytest.approx(110.0)}


@pytest.mark.parametrize(("answer", "left"), [(BEATEN, 15.0), (LOCKED, 10.0)])
def test_a_heartbeat_extends_from_when_it_was_sent_and_only_what_was_not_locked(
    monkeypatch: pytest.MonkeyPatch, answer: JobHeartbeat, left: float
) -> None:
    """The database gave the lease when it was asked or later; nobody knows when."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def answer_late() -> list[JobHeartbeat]:
        nonlocal now
        now += 5.0
        return [answer]

    heartbeat, job = _heartbeat(answer_late), _job(lease=20.0, claimed_at=95.0)
    heartbeat.add([job])
    with pytest.raises(StopIteration):
        heartbeat._beat([job]).send(None)

    assert now == 105.0
    assert job.seconds_left == left


@pytest.mark.parametrize("state", list(State))
def test_a_job_that_is_gone_is_lost_unless_its_end_is_just_reported(state: State) -> None:
    heartbeat = _heartbeat(lambda: [LOST])
    job = _job(lease=20.0, claimed_at=time.monotonic())
    job.state = state
    heartbeat.add([job])
    asyncio.run(heartbeat._beat([job]))

    assert job.is_lost is (state is State.RUNNING)


def test_heartbeats_go_on_after_an_error() -> None:
    calls: list[float] = []
    is_beaten = threading.Event()

    def fail_once() -> list[JobHeartbeat]:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise psycopg.OperationalError("the connection was cut")
        is_beaten.set()
        return [BEATEN]

    heartbeat = _heartbeat(fail_once)
    heartbeat.start()
    heartbeat.add([_job(lease=0.3, claimed_at=time.monotonic())])

    assert is_beaten.wait(30)
    heartbeat.stop()
    heartbeat.join(30)


def test_heartbeats_go_on_where_memory_was_short_for_a_moment() -> None:
    is_short = True

    class Short(Watch):
        def look(self) -> float:
            nonlocal is_short
            if is_short:
                is_short = False
                raise MemoryError
            return super().look()

    connection: Any = _Connection(lambda: [BEATEN])
    heartbeat = Heartbeat(connection, lambda job: None, Short())
    now = time.monotonic()
    job = _job(lease=0.3, claimed_at=now)
    heartbeat.add([job])
    heartbeat.start()

    wait_until(lambda: job.confirmed_at > now, "a heartbeat", 5.0)
    heartbeat.stop()
    heartbeat.join(30)


def test_a_heartbeat_that_fails_keeps_no_other_lease_from_its_own() -> None:
    """Jobs with leases of another length go with another call."""

    class Refusing(_Connection):
        async def call(self, action: Any, timeout: float) -> list[JobHeartbeat]:
            client = SimpleNamespace(heartbeat_jobs=lambda *jobs, lease: lease)
            if action(client) == refused.lease:
                raise ValueError("it is refused")
            return [BEATEN]

    connection: Any = Refusing(list)
    heartbeat = Heartbeat(connection, lambda job: None, Watch())
    now = time.monotonic()
    refused, beaten = _job(lease=0.3, claimed_at=now), _job(lease=0.6, claimed_at=now)
    heartbeat.add([refused, beaten])
    heartbeat.start()

    wait_until(lambda: beaten.confirmed_at > now, "the other heartbeat", 5.0)
    heartbeat.stop()
    heartbeat.join(30)


def test_a_heartbeat_that_hangs_keeps_no_shorter_lease_from_its_own() -> None:
    """Its connection may be broken, so the next call opens another."""

    class Hanging(_Connection):
        async def call(self, action: Any, timeout: float) -> list[JobHeartbeat]:
            client = SimpleNamespace(heartbeat_jobs=lambda *jobs, lease: lease)
            if action(client) == long.lease:
                await asyncio.sleep(timeout)
                raise NoAnswerError(f"no answer within {timeout:g} seconds")
            return [BEATEN]

    connection: Any = Hanging(list)
    heartbeat = Heartbeat(connection, lambda job: None, Watch())
    now = time.monotonic()
    long, short = _job(lease=3600.0, claimed_at=now), _job(lease=3.0, claimed_at=now)
    heartbeat.add([long, short])
    heartbeat.ask(frozenset([1]))  # both
    heartbeat.start()

    wait_until(lambda: short.confirmed_at > now, "the other heartbeat", 5.0)
    assert not short.is_lost
    heartbeat.stop()
    heartbeat.join(30)


def test_a_time_to_look_by_that_comes_during_a_look_is_not_lost() -> None:
    looks: list[float] = []
    has_looked = threading.Event()

    class Looking(Watch):
        def look(self) -> float:
            looks.append(time.monotonic())
            if len(looks) == 1:
                self.look_by(looks[0] + 0.1)
            elif looks[-1] >= looks[0] + 0.1:
                has_looked.set()
            return looks[0] + 0.1 if len(looks) == 2 else looks[-1] + 60

    connection: Any = _Connection(list)
    heartbeat = Heartbeat(connection, lambda job: None, Looking())
    heartbeat.start()

    assert has_looked.wait(30)
    heartbeat.stop()
    heartbeat.join(30)


@pytest.fixture
def limited(db: psycopg.Connection[Any], client: Client, dsn: str) -> Iterator[str]:
    """The address of a worker's role that may have one connection."""
    role = f"limited_{db.info.dbname}"
    db.execute(f"create role {role} login password 'x' connection limit 1")  # type: ignore[arg-type]
    for statement in client.grant_statements("worker", role):
        db.execute(statement)  # type: ignore[call-overload]
    yield make_conninfo(dsn, user=role, password="x")
    db.execute(f"drop owned by {role}; drop role {role}")  # type: ignore[arg-type]


@pytest.mark.own_session
def test_a_worker_that_cannot_keep_a_lease_takes_no_more_jobs(
    client: Client, db: psycopg.Connection[Any], limited: str
) -> None:
    """Its connection for claims is open, and the server has no place for another."""
    registry, attempts = Registry(), []

    @registry.handler("long")
    def long(job: Job) -> None:
        attempts.append(job.payload["number"])
        while len(attempts) == 1:
            job.check()
            time.sleep(0.01)

    lease = timedelta(seconds=2)
    client.enqueue("long", {"number": 1}, lease=lease)
    background = BackgroundWorker(limited, registry, concurrency=1, listen=False)
    try:
        errors = "select error_type from rota.job_errors"
        wait_until(lambda: db.execute(errors).fetchone() == ("lease_expired",), "its end")
        client.enqueue("long", {"number": 2}, lease=lease)
        worker = background.worker
        wait_until(lambda: worker.running == 0, "the end of its handler")
        assert worker._executor.wanted == 0
        assert attempts == [1]

        db.execute(f"alter role limited_{db.info.dbname} connection limit -1")  # type: ignore[arg-type]
        done = "select array_agg(attempts order by id) from rota.finished_jobs"
        wait_until(lambda: db.execute(done).fetchone() == ([2, 1],), "both")
    finally:
        background.stop(now=True)


@pytest.mark.own_session
def test_a_worker_for_cron_gives_up_where_it_cannot_keep_a_lease(
    client: Client, db: psycopg.Connection[Any], limited: str
) -> None:
    registry = Registry()

    @registry.handler("long")
    def long(job: Job) -> None:
        while True:
            job.check()
            time.sleep(0.01)

    client.enqueue_many([{"job_type": "long", "lease": 1}] * 2)
    with pytest.raises(psycopg.OperationalError, match="heartbeats fail"):
        Worker(limited, registry, concurrency=1, batch=1).run(drain=True)

    attempts = "select array_agg(attempts order by id) from rota.jobs"
    assert db.execute(attempts).fetchone() == ([1, 0],)


def test_a_lost_lease_reaches_the_handler_while_its_worker_has_nothing_else_to_do(
    client: Client, background: Background
) -> None:
    registry = Registry()
    started, ended = threading.Event(), threading.Event()

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    job_id = client.enqueue("waits", lease=timedelta(seconds=3)).job_id
    background(registry, concurrency=1, listen=False, poll_interval=60.0, tick_interval=60.0)
    assert started.wait(30)
    client.retry_job(job_id, force=True)
    client.cancel_job(job_id)

    assert ended.wait(30)


@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_a_handler_goes_on_if_a_heartbeat_comes_through_after_its_lease_seemed_over(
    client: Client, db: psycopg.Connection[Any], background: Background, pause: float
) -> None:
    """As of a worker that was suspended: its thread looks and beats before its loop goes on."""
    registry = Registry()

    @registry.handler("slow")
    async def slow(job: AsyncJob) -> None:
        job.confirmed_at -= 1000
        time.sleep(1.0)  # blocks the loop, as long as the thread needs for both
        await asyncio.sleep(pause)

    job_id = client.enqueue("slow", lease=timedelta(seconds=1.5)).job_id
    background(registry)
    ended = "select status, attempts from rota.job_runs where id = %s and status <> 'running'"
    wait_until(lambda: db.execute(ended, [job_id]).fetchone() not in (None, ("queued", 0)))

    assert db.execute(ended, [job_id]).fetchone() == ("succeeded", 1)


def test_no_tick_comes_before_the_reports_after_an_outage(
    client: Client,
    db: psycopg.Connection[Any],
    background: Callable[..., BackgroundWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs end while the database is away, for longer than their lease; then a tick could."""
    is_away = threading.Event()
    ran: list[int] = []
    registry = Registry()

    @registry.handler("a")
    def handle(job: Job) -> None:
        ran.append(job.job_id)
        is_away.set()

    def fail_while_away(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            if is_away.is_set():
                raise psycopg.OperationalError("the database is away")
            return original(self, *args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("finish_jobs", "end_jobs", "heartbeat_jobs"):
        fail_while_away(AsyncClient, name)
    client.enqueue("a", lease=timedelta(seconds=1))
    background(registry, tick_interval=0.05)
    assert is_away.wait(10)

    time.sleep(2.5)
    still = db.execute("select status, locked_until < now() from rota.jobs").fetchall()
    is_away.clear()
    ended = "select status, attempts from rota.finished_jobs"
    wait_until(lambda: db.execute(ended).fetchall() == [("succeeded", 1)])

    assert still == [("running", True)]
    assert len(ran) == 1


def test_an_async_handler_ends_with_its_lease_while_all_calls_hang(
    client: Client, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim, tick and heartbeat get no answer, as from a server that is frozen."""
    registry = Registry()
    is_frozen, ended = threading.Event(), threading.Event()

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        is_frozen.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def freeze(name: str) -> None:
        original = getattr(AsyncClient, name)

        async def call(self: Any, *args: Any, **options: Any) -> Any:
            if is_frozen.is_set() and not ended.is_set():
                await asyncio.sleep(60)
            return await original(self, *args, **options)

        monkeypatch.setattr(AsyncClient, name, call)

    for name in ("claim_jobs", "tick", "heartbeat_jobs"):
        freeze(name)
    client.enqueue("waits", lease=timedelta(seconds=1))
    worker = background(registry, listen=False)
    assert is_frozen.wait(30)
    began_at = time.monotonic()

    assert ended.wait(10)
    assert time.monotonic() - began_at < 3
    worker.stop(now=True)
