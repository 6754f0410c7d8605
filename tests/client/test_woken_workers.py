"""Workers that are woken, and that go on where nothing wakes them."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from client.test_pooler import pooler  # noqa: F401 - a fixture
from rota import AsyncClient, AsyncJob, Client, Job, Registry
from rota.client.connecting import connect_async
from rota.worker import notifier
from rota.worker.connection import Connection, ConnectionState
from rota.worker.fetcher import Poller
from rota.worker.heartbeat import Heartbeat
from rota.worker.notifier import Notifier, Place
from support.pooler import find_pgbouncer
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

Background = Callable[..., BackgroundWorker]
Db = psycopg.Connection[Any]
Status = Callable[[int], str]

NEVER = 3600.0
"""A poll interval: what runs before was woken."""
HELD = "select count(*) from pg_locks where locktype = 'advisory' and classid = 1919907936"
LIVE = "select count(*) from rota.jobs where job_type = 't'"
LISTENERS = "select pid from pg_stat_activity where application_name = 'rota notifier'"

pytestmark = [pytest.mark.own_session, pytest.mark.slow]


class Starts:
    """A registry whose jobs write down when they have started."""

    def __init__(self, *job_types: str, seconds: float = 0.0) -> None:
        self.registry = Registry()
        self.at: list[float] = []
        self._seconds = seconds
        for job_type in job_types or ("t",):
            self.registry.add(job_type, self._run)

    async def _run(self, job: AsyncJob) -> None:
        self.at.append(time.monotonic())
        await asyncio.sleep(self._seconds)


def value(db: Db, query: str) -> Any:
    row = db.execute(query).fetchone()  # type: ignore[arg-type]
    return None if row is None else row[0]


def wait_for_idle(db: Db, count: int) -> None:
    """Each holds the idle lock of its queue, and that of all queues."""
    wait_until(lambda: value(db, HELD) == 2 * count, f"{count} idle workers")


def test_worker_is_woken_by_a_job(client: Client, db: Db, background: Background) -> None:
    starts = Starts()
    background(starts.registry, poll_interval=NEVER)
    wait_for_idle(db, 1)

    for count in range(1, 4):
        client.enqueue("t")
        wait_until(lambda: len(starts.at) == count, "the start")  # noqa: B023


def test_a_worker_of_more_queues_than_can_wake_it_polls_for_the_others(
    client: Client, db: Db, background: Background
) -> None:
    queues = [f"q{number}" for number in range(notifier.MAX_QUEUES + 1)]
    starts = Starts()
    background(starts.registry, queues=queues, poll_interval=1.0)
    wait_until(lambda: value(db, HELD) == len(queues), "the idle worker")

    for count in range(1, 4):
        client.enqueue("t", queue=queues[-1])
        wait_until(lambda: len(starts.at) == count, "the start")  # noqa: B023


def test_worker_is_woken_by_the_time_of_a_schedule(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts()
    background(starts.registry, poll_interval=NEVER, tick_interval=NEVER)
    wait_for_idle(db, 1)

    client.schedule_job("s", "every 1 second", "t")
    client.enqueue("t")  # as nobody is notified of a schedule

    wait_until(lambda: len(starts.at) == 4, "the job and three runs of the schedule")


ALWAYS = timedelta(hours=20)
"""A lease without a heartbeat during the test."""


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("act", ["cancel", "retry"])
def test_a_handler_ends_as_soon_as_an_operator_cancels_or_takes_its_job(
    client: Client, db: Db, status: Status, background: Background, act: str, concurrency: int
) -> None:
    """Also in a worker that waits for no job any more, since all of its places are taken."""
    attempts: list[AsyncJob] = []

    async def wait(job: AsyncJob) -> None:
        attempts.append(job)
        if len(attempts) == 1:
            await asyncio.Event().wait()

    registry = Registry()
    registry.add("t", wait)
    background(registry, concurrency=concurrency)
    wait_for_idle(db, 1)
    job_id = client.enqueue("t", lease=ALWAYS).job_id
    wait_until(lambda: len(attempts) == 1, "the start")

    if act == "cancel":
        assert client.cancel_job(job_id) == "running"
        ended = "cancelled"
    else:
        client.retry_job(job_id, force=True)
        ended = "succeeded"

    wait_until(lambda: status(job_id) == ended, f"the job to be {ended}")
    assert [job.is_cancel_requested for job in attempts][:1] == [act == "cancel"]
    # The other place may have run the second attempt before the first has heard of it.
    wait_until(
        lambda: attempts[0].is_lost is (act == "retry"), "what the first attempt is told"
    )


def test_a_handler_is_told_of_a_cancel_after_the_notifier_has_lost_its_connection(
    client: Client, db: Db, status: Status, background: Background
) -> None:
    """It has come back while all places are taken, so the worker waits for no job."""
    has_begun = threading.Event()

    async def wait(job: AsyncJob) -> None:
        has_begun.set()
        await asyncio.Event().wait()

    registry = Registry()
    registry.add("t", wait)
    background(registry, concurrency=1)
    wait_for_idle(db, 1)
    job_id = client.enqueue("t", lease=ALWAYS).job_id
    wait_until(has_begun.is_set, "the start")
    db.execute(f"select pg_terminate_backend(pid, 5000) from ({LISTENERS}) as l")
    back = f"{LISTENERS} and state = 'idle' and query like '%stop_waiting%'"
    wait_until(lambda: value(db, back) is not None, "another session of the notifier")

    client.cancel_job(job_id)

    wait_until(lambda: status(job_id) == "cancelled", "the cancelled job to end")


@pytest.mark.parametrize("queues", [["default"], ["default", "other"]])
def test_one_that_has_no_slot_of_its_own_listens_to_the_shared_one(
    db: Db, background: Background, connect: Callable[[], Db], queues: list[str]
) -> None:
    others = [connect() for _ in range(16)]
    for other in others:
        other.execute("select from rota.wait_for_jobs(%s)", (queues,))

    late = background(Starts().registry, queues=queues)
    notifier, running, own = late.worker._notifier, "rota_running_jobs", len(queues)
    wait_until(lambda: len(notifier._channels) == own + 1, "a worker without a slot")
    shared = notifier._channels - {running}
    assert all(channel.endswith("_16") for channel in shared)

    others[0].execute("select rota.stop_waiting()")  # of one queue after the other
    wait_until(lambda: not notifier._channels & shared, "slots of its own")
    assert len(notifier._channels) == own + 2  # of all queues, too
    assert running in notifier._channels


def test_a_message_that_comes_during_a_heartbeat_is_followed_by_another(
    client: Client,
    db: Db,
    status: Status,
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, beats = threading.Event(), 0
    ask, beat = Heartbeat.ask, AsyncClient.heartbeat_jobs

    def ask_and_tell(self: Heartbeat, job_ids: frozenset[int]) -> None:
        ask(self, job_ids)
        asked.set()

    async def beat_and_cancel(self: AsyncClient, *args: Any, **options: Any) -> Any:
        nonlocal beats
        rows = await beat(self, *args, **options)
        beats += 1
        if beats == 1:  # its answer knows nothing of this
            asked.clear()
            await asyncio.to_thread(client.cancel_job, job_id)
            await asyncio.to_thread(asked.wait, 30)
        return rows

    monkeypatch.setattr(Heartbeat, "ask", ask_and_tell)
    monkeypatch.setattr(AsyncClient, "heartbeat_jobs", beat_and_cancel)
    starts = Starts(seconds=100)
    background(starts.registry)
    wait_for_idle(db, 1)
    job_id = client.enqueue("t", lease=ALWAYS).job_id
    wait_until(lambda: starts.at, "the start")  # the claim is committed before it is known
    message = f"x {job_id} " + "9" * 7000
    is_heard = False
    while not is_heard:  # it holds its locks before it listens
        db.execute("select pg_notify('rota_running_jobs', %s)", (message,))
        is_heard = asked.wait(2)

    wait_until(lambda: status(job_id) == "cancelled", "the cancel")
    assert beats == 2


def test_worker_is_woken_while_it_has_a_free_place(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts(seconds=0.3)
    background(starts.registry, poll_interval=NEVER, concurrency=2)
    wait_for_idle(db, 1)

    client.enqueue("t")
    wait_until(lambda: len(starts.at) == 1, "the first start")
    for _ in range(5):
        client.enqueue("t")
    wait_until(lambda: len(starts.at) == 6, "the other starts")

    assert starts.at[1] - starts.at[0] < 0.3
    wait_for_idle(db, 1)


def test_a_burst_wakes_as_many_workers_as_it_needs(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts(seconds=1.0)
    for _ in range(8):
        background(starts.registry, poll_interval=NEVER, concurrency=1)
    wait_for_idle(db, 8)

    began_at = time.monotonic()
    client.enqueue_many([{"job_type": "t"}] * 8)
    wait_until(lambda: len(starts.at) == 8, "eight starts")

    assert max(starts.at) - began_at < 1.0


def test_a_full_worker_has_the_next_notified(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts(seconds=1.0)
    workers = [
        background(starts.registry, poll_interval=NEVER, concurrency=1).worker for _ in range(4)
    ]
    wait_for_idle(db, 4)
    # Until the database has told them of nothing sooner, they look for jobs by themselves.
    pollers = [worker._fetcher._poller for worker in workers]
    rest = 1.5 * NEVER
    wait_until(lambda: all(p.claim_at > time.monotonic() + rest for p in pollers), "their rest")

    began_at = time.monotonic()
    with db.transaction():
        for _ in range(4):
            client.enqueue("t")
    wait_until(lambda: len(starts.at) == 4, "four starts")

    assert max(starts.at) - began_at < 1.0


def test_a_worker_that_one_job_fills_wakes_no_other(
    client: Client, db: Db, background: Background, connect: Callable[[], Db], status: Status
) -> None:
    """It finds that no other is due, and stays where the next job notifies it."""
    starts = Starts(seconds=0.3)
    background(starts.registry, poll_interval=NEVER, concurrency=1)
    wait_for_idle(db, 1)
    other = connect()
    ((channels,),) = other.execute("select channels from rota.wait_for_jobs()").fetchall()
    other.execute(";".join(f"listen {channel}" for channel in channels).encode())

    def is_alone() -> bool:
        job_id = client.enqueue("t").job_id
        wait_until(lambda: status(job_id) == "succeeded", "its end")
        return not list(other.notifies(timeout=0))

    # While another transaction is open, such as an analyze, the worker looks for its jobs.
    wait_until(is_alone, "a job that wakes no other")


def test_old_jobs_that_become_claimable_together_start_together(
    client: Client, db: Db, background: Background
) -> None:
    """Only the first worker is notified, and their times are before it began to wait."""
    starts = Starts(seconds=1.0)
    children = [client.enqueue("t", depends_on=[client.enqueue("p").job_id]) for _ in range(4)]
    parents = client.claim_jobs("w", max_jobs=4)
    for _ in range(2):
        background(starts.registry, poll_interval=NEVER, concurrency=1)
    wait_for_idle(db, 2)

    # In the second round the workers have been waiting for a second.
    for count in (2, 4):
        with db.transaction():
            for parent in parents[count - 2 : count]:
                client.finish_job(parent.job_id, parent.lease_token)
        wait_until(lambda: value(db, LIVE) == len(children) - count, "their ends")  # noqa: B023
        assert starts.at[count - 1] - starts.at[count - 2] < 1.0


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_job_that_comes_due_while_a_worker_is_full_is_for_the_next(
    client: Client, db: Db, background: Background, is_planned: bool
) -> None:
    """So far ahead that no worker is notified of it, if it is planned."""
    seconds = 3.0 if is_planned else 1.0
    starts = Starts(seconds=seconds)
    for _ in range(2):
        background(starts.registry, poll_interval=NEVER, concurrency=1, tick=False)
    wait_for_idle(db, 2)

    # In the second round the workers have been waiting for a while.
    for count in (1, 3):
        if is_planned:
            client.enqueue("t", delay=timedelta(seconds=2.2))
        client.enqueue("t")
        wait_until(lambda: len(starts.at) == count, "the first start")  # noqa: B023
        if not is_planned:
            client.enqueue("t")
        wait_until(lambda: value(db, LIVE) == 0, "their ends")
        assert starts.at[count] - starts.at[count - 1] < seconds


def test_a_worker_of_other_types_has_the_right_one_notified(
    client: Client, db: Db, background: Background
) -> None:
    first, second = Starts("a"), Starts("b")
    background(first.registry, poll_interval=NEVER)
    wait_for_idle(db, 1)
    background(second.registry, poll_interval=NEVER)
    wait_for_idle(db, 2)

    client.enqueue("b")
    wait_until(lambda: len(second.at) == 1, "the start of b")
    client.enqueue("a")
    wait_until(lambda: len(first.at) == 1, "the start of a")


def test_jobs_that_come_all_the_time_seldom_notify(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts()
    background(starts.registry, poll_interval=NEVER, concurrency=100)
    wait_for_idle(db, 1)
    calls = "select coalesce(pg_stat_get_function_calls('rota._notify_slots'::regproc), 0)"
    db.execute("set track_functions = 'all'")

    for _ in range(300):
        client.enqueue_many([{"job_type": "t"}] * 20)
    wait_until(lambda: len(starts.at) == 6000, "all starts")

    if db.info.server_version >= 150000:
        db.execute("select pg_stat_force_next_flush()")
    # An older server tells what it has counted half a second later.
    wait_until(lambda: value(db, calls) > 0, "the count")
    assert value(db, calls) < 100
    wait_for_idle(db, 1)


def test_the_next_of_an_ordering_key_starts_at_once(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts()
    background(starts.registry, poll_interval=NEVER, tick=False)
    wait_for_idle(db, 1)

    for _ in range(5):
        client.enqueue("t", ordering_key="k")
    wait_until(lambda: len(starts.at) == 5, "five in order")


def test_a_check_that_somebody_left_is_done_at_once(db: Db, background: Background) -> None:
    background(Starts().registry, poll_interval=NEVER, tick_interval=NEVER)
    wait_for_idle(db, 1)

    def is_first_done() -> bool:
        # Between its locks and its LISTEN a worker cannot be notified, so once is not enough.
        db.execute("select rota._add_checks('order', '{k}')")
        return bool(value(db, "select min(id) > 1 from rota.pending_checks"))

    wait_until(is_first_done, "a tick")


def test_a_worker_that_leaves_lets_the_others_sleep_on(
    client: Client, db: Db, background: Background
) -> None:
    first, second = Starts(), Starts()
    leaving = background(first.registry, poll_interval=NEVER)
    wait_for_idle(db, 1)
    background(second.registry, poll_interval=NEVER)
    wait_for_idle(db, 2)

    leaving.stop()
    wait_for_idle(db, 1)
    client.enqueue("t")

    wait_until(lambda: len(second.at) == 1, "the start")


def test_worker_that_does_not_listen_only_polls(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts()
    background(starts.registry, poll_interval=0.05, listen=False)

    client.enqueue("t")
    wait_until(lambda: starts.at, "the start")

    assert value(db, HELD) == 0
    assert db.execute(LISTENERS).fetchall() == []


def test_listener_comes_back_when_its_session_is_ended(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts()
    background(starts.registry, poll_interval=NEVER)
    wait_for_idle(db, 1)
    pid = value(db, LISTENERS)

    db.execute("select pg_terminate_backend(%s, 5000)", [pid])
    wait_until(lambda: value(db, LISTENERS) not in (None, pid), "another session")
    wait_for_idle(db, 1)
    client.enqueue("t")

    wait_until(lambda: starts.at, "the start")


def test_listener_comes_back_whatever_it_raises(
    client: Client, db: Db, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, failures = Notifier._serve, []

    async def fail_once(self: Notifier, connection: Any) -> None:
        if not failures:
            failures.append(RuntimeError("no"))
            raise failures[0]
        await serve(self, connection)

    monkeypatch.setattr(Notifier, "_serve", fail_once)
    starts = Starts()
    background(starts.registry, poll_interval=NEVER)

    wait_for_idle(db, 1)
    client.enqueue("t")

    wait_until(lambda: starts.at, "the start")
    assert failures


class Proxy:
    """Passes bytes on, or swallows those of the listeners and lets nobody know."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.is_swallowing = False
        self._threads: list[threading.Thread] = []
        self._sockets = [self._server]
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                names: set[str] = set()
                self._start(self._pass, near, far, names)
                self._start(self._pass, far, near, names)

    def _pass(self, source: socket.socket, sink: socket.socket, names: set[str]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if b"rota notifier" in data:
                    names.add("listener")
                if not (self.is_swallowing and names):
                    sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


@pytest.fixture
def proxy(dsn: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy in front of this test's database, and its DSN."""
    server = conninfo_to_dict(dsn)
    found = Proxy(str(server["host"]), int(server["port"]))
    yield found, make_conninfo(dsn, port=found.port)
    found.close()


def test_worker_polls_while_its_listener_hangs_and_is_woken_again_after(
    client: Client,
    db: Db,
    proxy: tuple[Proxy, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(notifier, "CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(notifier, "ANSWER_TIMEOUT", 0.5)
    caplog.set_level(logging.INFO, logger="rota")
    starts = Starts()
    worker = BackgroundWorker(proxy[1], starts.registry, poll_interval=0.3)
    try:
        wait_for_idle(db, 1)
        proxy[0].is_swallowing = True
        for count in range(1, 4):
            client.enqueue("t")
            wait_until(lambda: len(starts.at) == count, "a start by polling")  # noqa: B023
        wait_until(lambda: "notifications are off" in caplog.text, "the log line")
        proxy[0].is_swallowing = False
        wait_until(lambda: "notifications are on again" in caplog.text, "the other line")
        client.enqueue("t")
        wait_until(lambda: len(starts.at) == 4, "a start")
    finally:
        worker.stop()

    assert caplog.text.count("notifications are off") == 1


def test_a_worker_is_woken_though_each_connection_takes_long_to_open(
    client: Client, db: Db, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the first of several hosts is dead: it is tried for ten seconds each time."""
    monkeypatch.setattr(notifier, "ANSWER_TIMEOUT", 0.3)

    async def connect(conninfo: str, name: str, seconds: float) -> psycopg.AsyncConnection[Any]:
        await asyncio.sleep(0.5)
        return await connect_async(conninfo, name, seconds)

    monkeypatch.setattr("rota.worker.connection.connect_async", connect)
    starts = Starts()
    background(starts.registry, poll_interval=NEVER)
    wait_for_idle(db, 1)

    client.enqueue("t")

    wait_until(lambda: starts.at, "the start")


def test_a_listener_that_may_not_wait_tries_ever_more_seldom(
    db: Db, background: Background, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "rota")
    tries: list[float] = []

    async def refuse(*arguments: object) -> None:
        tries.append(time.monotonic())
        raise psycopg.errors.InsufficientPrivilege("no right to work in queue default")

    monkeypatch.setattr(AsyncClient, "wait_for_jobs", refuse)
    background(Starts().registry, poll_interval=0.1)
    wait_until(lambda: len(tries) >= 5, "five tries")

    assert tries[4] - tries[3] >= 0.7  # the least after four failures, and 0.1 after one
    assert caplog.text.count("notifications are off") == 1
    assert "notifications are on" not in caplog.text


@pytest.mark.skipif(find_pgbouncer() is None, reason="pgbouncer is not installed")
def test_worker_behind_a_pooler_takes_no_lock_and_polls(
    client: Client,
    db: Db,
    pooler: str,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="rota")
    starts = Starts()
    worker = BackgroundWorker(pooler, starts.registry, poll_interval=0.1)
    try:
        wait_until(lambda: "notifications are off" in caplog.text, "the log line")
        client.enqueue("t")
        wait_until(lambda: starts.at, "the start")
        held = value(db, HELD)
    finally:
        worker.stop()

    assert held == 0
    assert caplog.text.count("notifications are off") == 1
    assert "polling every 0.1 s" in caplog.text


def test_jobs_are_found_though_all_notifications_are_lost(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts()
    background(starts.registry, poll_interval=0.1)
    wait_for_idle(db, 1)

    with db.transaction():
        db.execute("set local rota.wakeups = off")
        client.enqueue("t")

    wait_until(lambda: starts.at, "the start")


def test_a_job_that_notified_before_the_idle_lock_was_taken_is_looked_for(
    client: Client, db: Db, connect: Callable[..., Db], background: Background
) -> None:
    """enqueue -- worker claims, takes an idle lock, claims -- commit: it was not notified."""
    writer = connect(autocommit=False)
    Client(writer).enqueue("t")
    starts = Starts()
    background(starts.registry, poll_interval=NEVER)
    wait_for_idle(db, 1)

    writer.commit()

    wait_until(lambda: starts.at, "the start")


def test_a_job_that_came_between_claim_and_idle_lock_is_looked_for(
    client: Client, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """worker claims -- enqueue, commit -- worker takes an idle lock: no worker was notified."""
    original = AsyncClient.wait_for_jobs
    came: list[int] = []

    async def wait_late(*args: Any) -> Any:
        if not came:
            came.append(client.enqueue("t").job_id)
        return await original(*args)

    monkeypatch.setattr(AsyncClient, "wait_for_jobs", wait_late)
    starts = Starts()
    background(starts.registry, poll_interval=NEVER)

    wait_until(lambda: starts.at, "the start")


@pytest.mark.parametrize("job", [{}, {"limit_key": "k"}, {"priority": 7}])
def test_a_later_job_starts_when_its_time_comes_and_not_at_a_poll(
    client: Client, db: Db, background: Background, job: dict[str, Any]
) -> None:
    starts = Starts()
    background(starts.registry, poll_interval=NEVER)
    wait_for_idle(db, 1)

    began_at = time.monotonic()
    client.enqueue("t", delay="300 ms", **job)
    wait_until(lambda: len(starts.at) == 1, "the start")

    assert starts.at[0] - began_at >= 0.3


def test_a_failed_job_starts_again_when_its_backoff_is_over(
    client: Client, db: Db, background: Background
) -> None:
    registry, attempts = Registry(), []

    def fail_twice(job: Job) -> None:
        attempts.append(job.attempt)
        if job.attempt < 3:
            raise ValueError("not yet")

    registry.add("t", fail_twice)
    background(registry, poll_interval=NEVER)
    wait_for_idle(db, 1)

    client.enqueue("t", backoff={"kind": "fixed", "base_seconds": 0.2})

    wait_until(lambda: attempts == [1, 2, 3], "three attempts")


def test_jobs_that_come_due_one_after_the_other_wait_for_no_poll(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts()
    background(starts.registry, poll_interval=NEVER)
    wait_for_idle(db, 1)

    for milliseconds in range(300, 400, 2):
        client.enqueue("t", delay=f"{milliseconds} ms")

    wait_until(lambda: len(starts.at) == 50, "fifty starts")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "rate"), [("queue", 400), ("job_type", 20), ("limit_key", 20)]
)
def test_starts_at_a_rate_come_at_that_rate_and_not_at_the_polls(
    client: Client, db: Db, background: Background, bound: str, rate: int
) -> None:
    names: dict[str, Any] = {"queue": "default", "job_type": "t", "limit_key": "k"}
    client.set_limit(**{bound: names[bound]}, max_starts=rate, burst=1)
    starts = Starts()
    for _ in range(2):
        background(starts.registry, poll_interval=NEVER)
    wait_for_idle(db, 2)

    client.enqueue_many([{"job_type": "t", "limit_key": "k"}] * 10)

    wait_until(lambda: len(starts.at) == 10, "ten starts")
    assert starts.at[9] - starts.at[0] > 8 / rate


@pytest.mark.parametrize("bound", [{"job_type": "t"}, {"limit_key": "k"}])
def test_starts_at_a_rate_of_a_type_or_key_follow_each_other(
    client: Client, db: Db, background: Background, bound: dict[str, Any]
) -> None:
    client.set_limit(**bound, max_starts=20)
    client.tick()
    starts = Starts()
    background(starts.registry)
    wait_for_idle(db, 1)

    client.enqueue_many([{"job_type": "t", "limit_key": "k"}] * 10)

    wait_until(lambda: len(starts.at) == 10, "ten starts")


class Calls(Counter[str]):
    """How often the workers of this process have called some functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        super().__init__()
        for name in names:
            monkeypatch.setattr(AsyncClient, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., Awaitable[Any]]:
        original = getattr(AsyncClient, name)

        async def call(*args: Any) -> Any:
            self[name] += 1
            return await original(*args)

        return call


def test_an_idle_worker_asks_by_one_call_whether_there_is_anything(
    background: Background, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, "claim_jobs", "tick", "wait_for_jobs")
    background(Starts().registry, poll_interval=0.4, tick_interval=0.4)

    def is_at_rest() -> bool:
        before = Counter(calls)
        wait_until(lambda: calls["wait_for_jobs"] >= before["wait_for_jobs"] + 6, "six looks")
        return calls["claim_jobs"] + calls["tick"] <= before["claim_jobs"] + before["tick"] + 2

    wait_until(is_at_rest, "rest")


def test_an_idle_worker_ticks_when_there_is_something_to_do(
    client: Client, db: Db, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, "tick", "wait_for_jobs")
    background(Starts().registry, poll_interval=0.05, tick_interval=0.05)

    def has_answered_no() -> bool:
        before = Counter(calls)
        wait_until(lambda: calls["wait_for_jobs"] >= before["wait_for_jobs"] + 5, "five looks")
        return calls["tick"] == before["tick"]

    wait_until(has_answered_no, "rest")
    db.execute("set rota.wakeups = off")
    client.enqueue("other", queue="other", ordering_key="k")
    (job,) = client.claim_jobs("lost", queues=["other"], lease=timedelta(milliseconds=1))

    status = f"select status <> 'running' from rota.job_runs where id = {job.job_id}"
    wait_until(lambda: value(db, status), "the sweep")


def test_a_worker_without_a_free_place_goes_on_to_tick(
    client: Client, db: Db, background: Background
) -> None:
    starts = Starts(seconds=60.0)
    worker = background(starts.registry, concurrency=1, poll_interval=0.05, tick_interval=0.05)
    wait_for_idle(db, 1)
    client.enqueue("t")
    wait_until(lambda: starts.at, "the start")

    for number in range(3):
        job_id = client.enqueue("u", queue="elsewhere").job_id
        client.claim_jobs(f"dead {number}", ["elsewhere"], lease=timedelta(seconds=0.001))
        status = f"select status <> 'running' from rota.job_runs where id = {job_id}"
        wait_until(lambda text=status: value(db, text), "the sweep")
    worker.stop(now=True)


@pytest.mark.parametrize("event", ["notification", "answer", "change"])
def test_what_comes_while_a_claim_is_under_way_brings_another_claim(event: str) -> None:
    """Claim looks -- job comes, and notifies or has come unheard -- claim has found nothing."""
    listener: Any = SimpleNamespace(
        is_on=True, place=Place.IDLE, wanted=Place.IDLE, go=lambda place: None
    )
    poller = Poller(listener, NEVER, lambda: None)
    assert poller.is_due()

    {
        "notification": lambda: listener.on_notify(),
        "answer": lambda: listener.on_answer(0.0),
        "change": lambda: listener.on_change(),
    }[event]()
    poller.record(0, is_full=False)

    assert poller.is_due()
    poller.record(0, is_full=False)
    assert not poller.is_due()


def test_an_answer_says_when_the_next_claim_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """It also moves the claim away; looks that find nothing become ever more seldom.

    What is far is the notifier's to ask for, and a claim comes if its answer does not.
    """
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    listener: Any = SimpleNamespace(
        is_on=True,
        place=Place.IDLE,
        wanted=Place.IDLE,
        go=lambda place: None,
        asks_for_all=True,
    )
    poller = Poller(listener, 1.0, lambda: None)
    waits = []
    for seconds in (5.0, 0.001, 0.001, 0.001):
        assert poller.is_due()
        poller.record(0, is_full=False)
        listener.on_answer(seconds)
        waits.append(round(poller.claim_at - now, 3))
        now = poller.claim_at

    assert waits == [6.0, 0.01, 0.02, 0.04]


def test_a_worker_looks_by_itself_only_while_jobs_come_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where fewer come most looks would find nothing."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    listener: Any = SimpleNamespace(is_on=True, place=Place.IDLE, wanted=Place.IDLE)

    def go(place: Place) -> None:
        listener.place = listener.wanted = place

    listener.go = go
    poller = Poller(listener, 1.0, lambda: None)
    places = []
    for jobs, interval in ((50, 0.02), (500, 0.002), (50, 0.01), (500, 0.002), (0, 0.02)):
        for _ in range(max(jobs, 2)):
            now += interval
            if jobs:
                listener.on_notify()
            assert poller.is_due() or listener.place is not Place.IDLE or not jobs
            poller.record(min(jobs, 1), is_full=False)
        places.append(listener.place.value)

    assert places == ["idle", "active", "idle", "active", "idle"]


@asynccontextmanager
async def notifier_of(
    dsn: str, queues: list[str]
) -> AsyncIterator[tuple[Notifier, psycopg.AsyncConnection[Any]]]:
    """Give a notifier of jobs of type t that has its connection and does nothing by itself."""
    listening = Connection(dsn, "rota notifier", ConnectionState())
    waits = Notifier(listening, listening, queues, lambda: ["t"], NEVER)
    session = await listening.open()
    session.add_notify_handler(waits._receive)
    yield waits, session
    await listening.close()


def test_a_job_that_travels_is_heard_of_while_the_notifier_waits_for_it_again(
    db: Db, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notification comes after the locks are taken, and before the answer is read."""
    db.execute("select rota.set_database_number(1)")
    heard: list[bool] = []
    wait_for_jobs = AsyncClient.wait_for_jobs

    async def and_one_comes(client: AsyncClient, *arguments: Any) -> Any:
        waiting = await wait_for_jobs(client, *arguments)
        db.execute("select rota.enqueue_to(2, 't')")
        await client.connection.execute("select")
        return waiting

    async def wait_again() -> None:
        async with notifier_of(dsn, []) as (waits, session):
            for queues in (["forward:2"], []):
                waits.wait_also(queues)
                await waits._move(session, Place.AWAY)
            waits.on_other = heard.append
            monkeypatch.setattr(AsyncClient, "wait_for_jobs", and_one_comes)
            waits.wait_also(["forward:2"])
            await waits._move(session, Place.AWAY)

    asyncio.run(wait_again())

    assert heard == [True]


def test_a_check_is_heard_of_with_the_answer_to_listen(
    db: Db, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    wait_for_jobs = AsyncClient.wait_for_jobs

    async def and_a_check_comes(client: AsyncClient, *arguments: Any) -> Any:
        waiting = await wait_for_jobs(client, *arguments)
        await client.connection.execute("listen rota_maintenance_0")
        db.execute("notify rota_maintenance_0")  # it arrives with the next answer
        return replace(waiting, has_maintenance=False)

    async def begin_to_wait() -> None:
        async with notifier_of(dsn, ["default"]) as (waits, session):
            waits.on_maintenance = lambda: heard.append("check")
            await waits._move(session, Place.IDLE)

    monkeypatch.setattr(AsyncClient, "wait_for_jobs", and_a_check_comes)
    asyncio.run(begin_to_wait())

    assert heard == ["check"]
