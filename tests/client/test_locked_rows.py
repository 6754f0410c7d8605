"""One row that another session has locked costs its worker's other jobs nothing."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import rota
from rota import Client, Job, Registry
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

Background = Callable[..., BackgroundWorker]
Status = Callable[[int], str]
Lock = Callable[..., Any]

pytestmark = [pytest.mark.own_session, pytest.mark.slow]


@pytest.fixture
def lock(connect: Callable[..., psycopg.Connection[Any]]) -> Lock:
    """Cancel jobs and forget to commit; in the end roll back."""

    @contextmanager
    def hold(*job_ids: int) -> Iterator[None]:
        operator = connect()
        with operator.transaction(force_rollback=True):
            for job_id in job_ids:
                operator.execute("select rota.cancel_job(%s)", [job_id])
            yield

    return hold


def _succeeded(db: psycopg.Connection[Any]) -> int:
    row = db.execute(
        "select count(*) from rota.finished_jobs where status = 'succeeded'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _waiting_for_locks(db: psycopg.Connection[Any]) -> int:
    row = db.execute(
        "select count(*) from pg_stat_activity"
        " where wait_event_type = 'Lock' and application_name like 'rota%'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _at_each_end(db: psycopg.Connection[Any], action: str) -> None:
    """Let a trigger do this with each job that ends."""
    db.execute(
        f"""
        create function public.at_each_end() returns trigger language plpgsql as $$
        begin
            {action}
            return new;
        end $$;
        create trigger at_each_end before insert on rota.finished_jobs
            for each row execute function public.at_each_end();
        """  # type: ignore[arg-type]
    )


class Gate:
    """Handlers that begin, wait, and then end each in its own way."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.is_open = threading.Event()
        self.registry = Registry()
        self.registry.add("quick", lambda job: None)
        for name, end in {
            "succeeds": lambda job: None,
            "fails": self._fail,
            "snoozes": self._snooze,
            "tells": lambda job: job.set_progress(50),
        }.items():
            self.registry.add(name, self._after_the_gate(end))

    def _after_the_gate(self, end: Callable[[Job], None]) -> Callable[[Job], None]:
        def handle(job: Job) -> None:
            self.begun.release()
            assert self.is_open.wait(30)
            end(job)

        return handle

    def _fail(self, job: Job) -> None:
        raise ValueError("no")

    def _snooze(self, job: Job) -> None:
        raise rota.Snooze(3600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "end"),
    [("succeeds", "succeeded"), ("fails", "failed"), ("snoozes", "queued"), ("tells", None)],
)
def test_an_end_that_waits_holds_up_no_other(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    lock: Lock,
    status: Status,
    kind: str,
    end: str | None,
) -> None:
    """Three jobs want to end, or to tell how far they are, while their rows are locked."""
    gate = Gate()
    stuck = [client.enqueue(kind).job_id for _ in range(3)]
    failing = gate.registry
    failing.add("bad", gate._fail)
    background(failing, concurrency=4)
    for _ in stuck:
        assert gate.begun.acquire(timeout=10)

    with lock(*stuck):
        gate.is_open.set()
        time.sleep(1.0)
        begun = time.monotonic()
        client.enqueue_many([{"job_type": "quick"}] * 20)
        bad = [client.enqueue("bad").job_id for _ in range(3)]
        wait_until(lambda: _succeeded(db) == 20)
        wait_until(lambda: [status(job_id) for job_id in bad] == ["failed"] * 3)
        assert time.monotonic() - begun < 4.0
        assert [status(job_id) for job_id in stuck] == ["running"] * 3

    if end is not None:
        wait_until(lambda: [status(job_id) for job_id in stuck] == [end] * 3)


@pytest.mark.parametrize("kind", ["succeeds", "fails"])
def test_a_locked_row_takes_up_no_place(
    client: Client, db: psycopg.Connection[Any], background: Background, lock: Lock, kind: str
) -> None:
    gate = Gate()
    stuck = client.enqueue(kind).job_id
    background(gate.registry, concurrency=1)
    assert gate.begun.acquire(timeout=10)

    with lock(stuck):
        gate.is_open.set()
        client.enqueue_many([{"job_type": "quick"}] * 3)
        wait_until(lambda: _succeeded(db) == 3, "the jobs behind the locked one")


@pytest.mark.slow
def test_an_end_that_waits_long_is_told_once(
    client: Client,
    background: Background,
    lock: Lock,
    status: Status,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("rota.worker.completer.BUSY_PAUSE", 0.01)
    registry = Registry()
    is_open, has_begun = threading.Event(), threading.Event()
    registry.add("waits", lambda job: (has_begun.set(), is_open.wait(30))[0])
    job_id = client.enqueue("waits").job_id
    background(registry)
    assert has_begun.wait(10)

    with lock(job_id):
        is_open.set()
        wait_until(lambda: "which has locked its row" in caplog.text)
    wait_until(lambda: status(job_id) == "succeeded")

    assert caplog.text.count(f"rota explain {job_id} names it") == 1


@pytest.mark.slow
def test_a_call_that_takes_long_is_not_begun_anew(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    status: Status,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large batch may take long, and would never end if it were cut off each time."""
    calls = []
    finish_jobs = rota.AsyncClient.finish_jobs

    async def slow(self: rota.AsyncClient, *args: Any) -> Any:
        calls.append(args)
        await self.connection.execute("select pg_sleep(2.5)")
        return await finish_jobs(self, *args)

    monkeypatch.setattr(rota.AsyncClient, "finish_jobs", slow)
    registry = Registry()
    registry.add("quick", lambda job: None)
    job_id = client.enqueue("quick").job_id
    background(registry)

    wait_until(lambda: status(job_id) == "succeeded")
    assert len(calls) == 1


def test_a_locked_row_keeps_no_other_from_being_given_back(
    client: Client, db: psycopg.Connection[Any], background: Background, lock: Lock
) -> None:
    gate = Gate()
    client.enqueue("succeeds")
    waiting = [client.enqueue("quick").job_id for _ in range(5)]
    worker = background(gate.registry, concurrency=1, batch=10, grace_period=10)
    assert gate.begun.acquire(timeout=10)

    with lock(waiting[2]):
        worker.worker.stop()
        queued = "select count(*) from rota.jobs where status = 'queued' and attempts = 0"
        wait_until(lambda: db.execute(queued).fetchone() == (4,), "four jobs given back")
        gate.is_open.set()
        worker.stop()
        wait_until(lambda: _waiting_for_locks(db) == 0, "no call that still waits")


def test_locked_rows_of_other_jobs_keep_none_from_being_given_back(
    client: Client, db: psycopg.Connection[Any], background: Background, lock: Lock
) -> None:
    """Twenty failures wait for rows, each on its own connection, while the worker leaves."""
    gate, end = Gate(), threading.Event()
    gate.registry.add("naps", lambda job: end.wait(30))
    stuck = [client.enqueue("fails").job_id for _ in range(20)]
    client.enqueue_many([{"job_type": "naps"}] * 40)
    worker = background(gate.registry, concurrency=20, batch=40, grace_period=1)
    for _ in stuck:
        assert gate.begun.acquire(timeout=10)

    with lock(*stuck):
        gate.is_open.set()
        count = "select count(*) from rota.jobs where status = %s and attempts = %s"
        wait_until(lambda: db.execute(count, ["running", 1]).fetchone() == (60,), "all claimed")
        worker.worker.stop()
        wait_until(lambda: db.execute(count, ["queued", 0]).fetchone() == (20,), "given back")
        end.set()
        worker.stop()


def test_locked_rows_of_other_jobs_hold_up_no_progress(
    client: Client, db: psycopg.Connection[Any], background: Background, lock: Lock
) -> None:
    gate, begun = Gate(), threading.Event()

    @gate.registry.handler("well")
    def well(job: Job) -> None:
        begun.set()
        assert gate.is_open.wait(30)
        time.sleep(0.5)
        job.set_progress(50)

    stuck = [client.enqueue("fails").job_id for _ in range(30)]
    client.enqueue("well")
    background(gate.registry, concurrency=31)
    for _ in stuck:
        assert gate.begun.acquire(timeout=10)
    assert begun.wait(10)

    with lock(*stuck):
        gate.is_open.set()
        wait_until(lambda: _succeeded(db) == 1, "the job of nobody's row")
        told = "select progress_percent from rota.finished_jobs where status = 'succeeded'"
        assert db.execute(told).fetchone() == (50,)


def test_ends_of_locked_rows_need_no_more_connections(
    client: Client, db: psycopg.Connection[Any], background: Background, lock: Lock
) -> None:
    gate = Gate()
    stuck = [client.enqueue("fails").job_id for _ in range(20)]
    stuck += [client.enqueue("snoozes").job_id for _ in range(20)]
    background(gate.registry, concurrency=40)
    for _ in stuck:
        assert gate.begun.acquire(timeout=10)
    open_ones = "select count(*) from pg_stat_activity where application_name like 'rota%'"

    with lock(*stuck):
        gate.is_open.set()
        time.sleep(0.5)
        client.enqueue("quick")
        wait_until(lambda: _succeeded(db) == 1, "another job")
        # One that is closed takes a moment to leave.
        wait_until(
            lambda: db.execute(open_ones).fetchone()[0] <= 5,  # type: ignore[index]
            "no more connections",
        )
        assert _waiting_for_locks(db) == 0

    ended = "select count(*) from rota.jobs where status in ('failed', 'queued')"
    wait_until(lambda: db.execute(ended).fetchone() == (40,), "all ends")


@pytest.mark.slow
def test_one_end_that_is_refused_holds_up_no_other(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    status: Status,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A trigger raises an error for one of forty jobs, until its lease has ended."""
    gate = Gate()
    lease = timedelta(seconds=3)
    ids = [client.enqueue("succeeds", lease=lease).job_id for _ in range(40)]
    refused = f"new.id = {ids[17]} and new.status = 'succeeded' and new.attempts = 1"
    _at_each_end(db, f"if {refused} then raise 'not this one'; end if;")
    background(gate.registry, concurrency=40)
    for _ in ids:
        assert gate.begun.acquire(timeout=10)

    gate.is_open.set()
    wait_until(lambda: _succeeded(db) == 39, "the other ends")
    client.enqueue("quick")
    wait_until(lambda: _succeeded(db) == 40, "a job after it")
    wait_until(lambda: any("not this one" in m for m in caplog.messages), "the refusal")
    leases: set[Any] = set()

    def has_failed() -> bool:
        row = db.execute(
            "select status, locked_until from rota.jobs where id = %s", [ids[17]]
        ).fetchone()
        assert row is not None
        if row[0] == "running":
            leases.add(row[1])
        return bool(row[0] == "failed")

    wait_until(has_failed, "the end of the lease")
    told = [m for m in caplog.messages if "not this one" in m]

    assert 1 <= len(leases) <= 2  # a heartbeat may have been under way, and no other comes
    assert len(told) <= 2
    assert f"job {ids[17]}: its end was refused" in told[0]


@pytest.mark.slow
def test_one_end_that_takes_too_long_holds_up_no_other(
    client: Client,
    db: psycopg.Connection[Any],
    dsn: str,
    status: Status,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A trigger waits for one of twenty jobs; the role of the worker allows no such time."""
    gate = Gate()
    lease = timedelta(seconds=3)
    ids = [client.enqueue("succeeds", lease=lease).job_id for _ in range(20)]
    _at_each_end(db, f"if new.id = {ids[7]} then perform pg_sleep(60); end if;")
    hurried = make_conninfo(dsn, options="-c statement_timeout=500ms")
    worker = BackgroundWorker(hurried, gate.registry, concurrency=20)
    try:
        for _ in ids:
            assert gate.begun.acquire(timeout=10)
        gate.is_open.set()
        wait_until(lambda: _succeeded(db) == 19, "the other ends")
        wait_until(lambda: status(ids[7]) == "failed", "the end of the lease")
    finally:
        worker.stop(now=True)

    told = f"job {ids[7]}: its end was refused, retrying until its lease expires"
    assert [m for m in caplog.messages if told in m and "statement timeout" in m]


def test_heartbeats_go_on_beside_a_transaction_that_stays_open(
    client: Client, db: psycopg.Connection[Any], background: Background, status: Status
) -> None:
    """A handler ends its job itself, and takes its time with the commit."""
    registry = Registry()
    ended, go_on = threading.Event(), threading.Event()

    @registry.handler("lingers")
    def lingers(job: Job) -> None:
        with job.transaction() as connection:
            Client(connection).set_progress(job.job_id, job.lease_token, 99)
            ended.set()
            assert go_on.wait(30)

    @registry.handler("waits")
    async def waits(job: rota.AsyncJob) -> None:
        while not go_on.is_set():
            await asyncio.sleep(0.02)

    lease = timedelta(seconds=0.6)
    ids = [client.enqueue(kind, lease=lease).job_id for kind in ("lingers", "waits")]
    background(registry)
    assert ended.wait(10)
    time.sleep(1.5)
    rows = db.execute("select status, attempts from rota.jobs where id = %s", [ids[1]])
    assert rows.fetchall() == [("running", 1)]
    go_on.set()

    wait_until(lambda: [status(job_id) for job_id in ids] == ["succeeded"] * 2)


def test_a_short_lease_brings_no_heartbeats_of_long_ones(
    client: Client, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    heartbeat_jobs = rota.AsyncClient.heartbeat_jobs

    def count(self: rota.AsyncClient, job_ids: list[int], *args: Any, **options: Any) -> Any:
        sent.append(len(job_ids))
        return heartbeat_jobs(self, job_ids, *args, **options)

    monkeypatch.setattr(rota.AsyncClient, "heartbeat_jobs", count)
    gate = Gate()
    client.enqueue("succeeds", lease=timedelta(milliseconds=200), priority=-1)
    client.enqueue_many([{"job_type": "quick"}] * 200)
    background(gate.registry, concurrency=1, batch=300)
    assert gate.begun.acquire(timeout=10)

    wait_until(lambda: len(sent) >= 10)
    gate.is_open.set()

    assert max(sent) == 1
