"""What a worker does with a job, for each way in which a handler can end."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import JsonbBinaryLoader, set_json_loads

import rota
from rota import AsyncJob, Client, Job, JsonFormatter, Registry, Worker
from rota.worker import executor
from rota.worker.connection import NoAnswerError
from support.mutation import mutate
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
Status = Callable[[int], str]
Background = Callable[..., BackgroundWorker]


def _result(db: psycopg.Connection[Any], job_id: int) -> Any:
    row = db.execute("select result from rota.finished_jobs where id = %s", [job_id]).fetchone()
    assert row is not None
    return row[0]


def _live(db: psycopg.Connection[Any], job_id: int) -> dict[str, Any]:
    with db.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        cursor.execute("select * from rota.job_runs where id = %s", [job_id])
        row = cursor.fetchone()
        assert row is not None
        return row


def test_plain_and_async_handlers_finish_with_their_results(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> Any:
        return {"thread": threading.current_thread().name, "payload": job.payload}

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> Any:
        await asyncio.sleep(0)
        return {"thread": threading.current_thread().name, "attempt": job.attempt}

    first = client.enqueue("plain", {"n": 1}).job_id
    second = client.enqueue("async").job_id
    drain(registry)

    assert _result(db, first) == {"thread": "rota-job", "payload": {"n": 1}}
    assert _result(db, second)["attempt"] == 1
    assert _result(db, second)["thread"] != "rota-job"


def test_queues_may_be_what_gives_them_once(
    client: Client, status: Status, drain: Drain
) -> None:
    registry = Registry()
    registry.add("a", lambda job: None)
    job_id = client.enqueue("a", queue="mail").job_id

    drain(registry, queues=iter(["mail"]))

    assert status(job_id) == "succeeded"


def test_drain_runs_more_jobs_than_one_batch(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()
    registry.add("quick", lambda job: job.payload)
    client.enqueue_many([{"job_type": "quick", "payload": {"n": n}} for n in range(250)])

    drain(registry, concurrency=8, batch=100)

    rows = db.execute("select result, payload, attempts from rota.finished_jobs").fetchall()
    assert len(rows) == 250
    assert all(result == payload and attempts == 1 for result, payload, attempts in rows)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_worker_claims_though_the_default_isolation_is_another(
    client: Client, db: psycopg.Connection[Any], drain: Drain, level: str
) -> None:
    db.execute(
        sql.SQL("alter database {} set default_transaction_isolation = {}").format(
            sql.Identifier(db.info.dbname), sql.Literal(level)
        )
    )
    registry = Registry()
    registry.add("work", lambda job: job.payload)
    client.enqueue_many([{"job_type": "work"}] * 3)

    drain(registry)

    rows = db.execute("select status, attempts from rota.job_runs").fetchall()
    assert rows == [("succeeded", 1)] * 3


def test_drain_leaves_jobs_of_other_types_and_of_later(
    client: Client, status: Status, drain: Drain
) -> None:
    registry = Registry()
    registry.add("quick", lambda job: None)
    other = client.enqueue("other").job_id
    later = client.enqueue("quick", delay=timedelta(hours=1)).job_id

    drain(registry)

    assert status(other) == "queued"
    assert status(later) == "queued"


def test_drain_runs_what_its_jobs_enqueue(
    client: Client, db: psycopg.Connection[Any], dsn: str, drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("chain")
    def chain(job: Job) -> None:
        if job.payload["left"] > 0:
            with job.transaction() as connection:
                Client(connection).enqueue("chain", {"left": job.payload["left"] - 1})

    client.enqueue("chain", {"left": 3})
    drain(registry)

    assert db.execute("select count(*) from rota.finished_jobs").fetchone() == (4,)


def test_once_runs_one_claim(client: Client, db: psycopg.Connection[Any], dsn: str) -> None:
    registry = Registry()
    registry.add("quick", lambda job: None)
    client.enqueue_many([{"job_type": "quick"}] * 9)

    Worker(dsn, registry, concurrency=2, batch=5).run(once=True)

    assert db.execute("select count(*) from rota.finished_jobs").fetchone() == (5,)
    assert db.execute("select count(*) from rota.jobs where attempts = 0").fetchone() == (4,)


def test_an_exception_fails_the_attempt(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("bad")
    def bad(job: Job) -> None:
        raise LookupError("no such user \x00\ud800")

    job_id = client.enqueue("bad").job_id
    drain(registry)

    job = _live(db, job_id)
    assert (job["status"], job["attempts"], job["error_type"]) == ("failed", 1, "LookupError")
    assert job["last_error"] == "no such user \ufffd\ufffd"
    stack = db.execute("select stack from rota.job_errors").fetchone()
    assert stack is not None
    assert "in bad" in stack[0]


def _generator(job: Any) -> Any:
    yield job


async def _async_generator(job: Any) -> Any:
    yield job


class _Awaitable:
    """What a function returns that calls an async one and does not await it."""

    def __init__(self, job: Any) -> None:
        pass

    def __await__(self) -> Any:
        yield


@pytest.mark.parametrize("handler", [_generator, _async_generator])
def test_a_generator_is_no_handler(handler: Any) -> None:
    with pytest.raises(TypeError, match="generator"):
        Registry().add("lazy", handler)


@pytest.mark.parametrize("make", [_generator, _async_generator, _Awaitable])
def test_a_handler_of_which_no_line_has_run_is_no_success(
    client: Client, db: psycopg.Connection[Any], drain: Drain, make: Any
) -> None:
    registry = Registry()
    registry.add("lazy", lambda job: make(job))
    client.enqueue("lazy", max_attempts=1)
    drain(registry)

    rows = db.execute("select status, error_type from rota.job_runs").fetchall()
    assert rows == [("dead", "TypeError")]


def end_one_by_one(
    client: Client,
    drain: Drain,
    kind: str,
    errors: list[BaseException],
    end: Callable[[BaseException], object],
) -> list[int]:
    """Let a handler for each error, plain or async, end a job as *end* does with it."""
    registry = Registry()
    for number, error in enumerate(errors):

        def plain(job: Job, error: BaseException = error) -> object:
            return end(error)

        async def in_loop(job: AsyncJob, error: BaseException = error) -> object:
            return end(error)

        registry.add(f"end-{number}", plain if kind == "plain" else in_loop)
    ids = [client.enqueue(f"end-{number}").job_id for number in range(len(errors))]
    drain(registry)
    return ids


RETURNED: list[tuple[BaseException, str]] = [
    (rota.RetryIn(3600, "closed"), "failed"),
    (rota.Snooze(3600), "queued"),
    (rota.FatalError("never"), "dead"),
    (ValueError("no"), "failed"),
]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_exception_that_is_returned_is_as_good_as_raised(
    client: Client, status: Status, drain: Drain, kind: str
) -> None:
    ids = end_one_by_one(client, drain, kind, [error for error, _ in RETURNED], lambda e: e)

    for job_id, (returned, expected) in zip(ids, RETURNED, strict=True):
        assert status(job_id) == expected, returned


@pytest.mark.parametrize(("max_attempts", "level"), [(3, "WARNING"), (1, "ERROR")])
def test_the_log_has_the_traceback_of_a_failure(
    client: Client,
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
    max_attempts: int,
    level: str,
) -> None:
    registry = Registry()

    @registry.handler("bad")
    def bad(job: Job) -> None:
        raise LookupError("no such user")

    client.enqueue("bad", max_attempts=max_attempts)
    drain(registry)

    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.levelname == level
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LookupError)
    assert "in bad" in json.loads(JsonFormatter().format(record))["exception"]


def test_a_delay_that_a_handler_asks_for_is_no_traceback(
    client: Client, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()

    @registry.handler("later")
    def later(job: Job) -> None:
        raise rota.RetryIn(60, "closed")

    client.enqueue("later")
    drain(registry)

    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.exc_info is None


def test_a_job_that_is_dead_after_what_it_asked_for_has_a_traceback(
    client: Client, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no next run to wait for: somebody has to see why, and on_end is told."""
    registry = Registry()
    told: list[BaseException | None] = []
    registry.on_end(lambda job, end: told.append(end.exception))

    @registry.handler("later")
    def later(job: Job) -> None:
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise rota.RetryIn(60, "closed") from error

    client.enqueue("later", max_attempts=1)
    drain(registry)

    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.exc_info is not None
    assert [record.exc_info[1]] == told
    assert isinstance(told[0], rota.RetryIn)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handler_that_is_cancelled_by_itself_ends_its_job(
    client: Client, status: Status, drain: Drain, kind: str
) -> None:
    def end(error: BaseException) -> None:
        raise error

    (job_id,) = end_one_by_one(client, drain, kind, [asyncio.CancelledError()], end)

    assert status(job_id) == "failed"


RAISED: list[tuple[BaseException, str]] = [
    (SystemExit(3), "failed"),
    (StopIteration(), "failed"),
    (KeyboardInterrupt(), "failed"),
    (UnprintableError(), "failed"),
    (Exception("x" * 1_000_000), "failed"),
    (rota.FatalError("never again"), "dead"),
    (rota.RetryIn(timedelta.max), "failed"),
    (rota.Snooze(timedelta.max), "failed"),
    (rota.RetryIn(3600, "closed"), "failed"),
    (rota.Snooze(3600), "queued"),
    (rota.JobCancelled("of its own will"), "failed"),
]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_whatever_is_raised_ends_the_job(
    client: Client, status: Status, drain: Drain, kind: str
) -> None:
    def end(error: BaseException) -> None:
        raise error

    ids = end_one_by_one(client, drain, kind, [error for error, _ in RAISED], end)

    for job_id, (error, expected) in zip(ids, RAISED, strict=True):
        assert status(job_id) == expected, repr(error)[:100]


def test_snooze_uses_no_attempt_and_retry_in_sets_the_time(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("snooze")
    def snooze(job: Job) -> None:
        raise rota.Snooze(timedelta(hours=1))

    @registry.handler("retry")
    async def retry(job: AsyncJob) -> None:
        raise rota.RetryIn(7200, "closed for lunch")

    snoozed, retried = client.enqueue("snooze").job_id, client.enqueue("retry").job_id
    drain(registry)

    first, second = _live(db, snoozed), _live(db, retried)
    assert (first["status"], first["attempts"]) == ("queued", 0)
    assert timedelta(minutes=59) < first["run_at"] - first["created_at"] < timedelta(minutes=61)
    assert (second["status"], second["attempts"]) == ("failed", 1)
    assert second["last_error"] == "closed for lunch"
    assert second["run_at"] - second["created_at"] > timedelta(minutes=119)


@pytest.mark.parametrize(
    ("result", "stored"),
    [
        ("a\x00b\ud800", "a\ufffdb\ufffd"),
        ({"n": float("nan"), "i": [float("inf")]}, {"n": None, "i": [None]}),
        ("x" * 10_000_000, None),
        ([1e300] * 10_000, None),
        (object(), None),
        (10**200_000, None),
        (None, None),
        (0, 0),
    ],
    ids=[
        "characters",
        "numbers",
        "10 MB",
        "large as jsonb",
        "no JSON",
        "huge number",
        "none",
        "zero",
    ],
)
def test_any_result_ends_the_job(
    client: Client, db: psycopg.Connection[Any], drain: Drain, result: Any, stored: Any
) -> None:
    registry = Registry()
    registry.add("result", lambda job: result)

    job_id = client.enqueue("result").job_id
    drain(registry)

    assert _result(db, job_id) == stored


def test_one_refused_result_does_not_hurt_the_others(
    client: Client, db: psycopg.Connection[Any], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    arrived: list[AsyncJob] = []
    all_are_here = asyncio.Event()

    @registry.handler("number")
    async def number(job: AsyncJob) -> Any:
        arrived.append(job)
        if len(arrived) == 4:
            all_are_here.set()  # and all end in one turn of the loop, so in one call
        await all_are_here.wait()
        return job.payload["n"] or "\x00"

    monkeypatch.setattr("rota.client.values.clean", lambda value: value)
    client.enqueue_many([{"job_type": "number", "payload": {"n": n}} for n in range(4)])
    drain(registry, concurrency=4)

    rows = db.execute(
        "select (payload ->> 'n')::int, result from rota.finished_jobs order by 1"
    )
    assert rows.fetchall() == [(0, None), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("end", "expected"),
    [("succeed", ("succeeded", 1)), ("fail", ("failed", 1)), ("snooze", ("queued", 0))],
)
def test_a_lost_reply_is_asked_for_again(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    expected: tuple[str, int],
) -> None:
    """The database heard the end of the job, and the connection broke before it said so."""
    registry = Registry()
    call = "finish_jobs" if end == "succeed" else "end_jobs"
    original = getattr(rota.AsyncClient, call)
    calls = []

    async def cut(self: rota.AsyncClient, *args: Any) -> Any:
        calls.append([getattr(arg, "obj", arg) for arg in args])
        done = await original(self, *args)
        if len(calls) == 1:
            raise psycopg.OperationalError("the connection was cut")
        return done

    @registry.handler("a")
    def handle(job: Job) -> None:
        if end == "fail":
            raise ValueError("no")
        if end == "snooze":
            raise rota.Snooze(3600)

    monkeypatch.setattr(rota.AsyncClient, call, cut)
    client.enqueue("a")
    drain(registry)

    rows = db.execute("select status, attempts from rota.job_runs").fetchall()
    assert rows == [expected]
    assert calls == [calls[0]] * 2


def test_heartbeats_keep_a_job_longer_than_its_lease(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("blocks")
    async def blocks(job: AsyncJob) -> int:
        time.sleep(2.5)
        return job.attempt

    job_id = client.enqueue("blocks", lease=timedelta(seconds=1), max_attempts=2).job_id
    drain(registry)

    assert _result(db, job_id) == 1


def test_cancel_reaches_an_async_handler(
    client: Client, status: Status, background: Background
) -> None:
    registry = Registry()
    started = threading.Event()

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        started.set()
        await asyncio.sleep(60)

    job_id = client.enqueue("waits", lease=timedelta(seconds=1.5)).job_id
    background(registry, listen=False)
    assert started.wait(10)

    assert client.cancel_job(job_id) == "running"
    wait_until(lambda: status(job_id) == "cancelled")


def test_cancel_reaches_a_thread_that_checks(
    client: Client, status: Status, background: Background
) -> None:
    registry = Registry()
    started = threading.Event()

    @registry.handler("checks")
    def checks(job: Job) -> None:
        started.set()
        while True:
            job.check()
            time.sleep(0.02)

    job_id = client.enqueue("checks", lease=timedelta(seconds=1.5)).job_id
    background(registry, listen=False)
    assert started.wait(10)

    client.cancel_job(job_id)
    wait_until(lambda: status(job_id) == "cancelled")


def test_lost_lease_cancels_the_handler(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry()
    started, ended = threading.Event(), threading.Event()

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            assert job.is_lost
            ended.set()

    job_id = client.enqueue("waits", lease=timedelta(seconds=1.5)).job_id
    with caplog.at_level(logging.INFO, "rota"):
        worker = background(registry)
        assert started.wait(10)
        client.pause_queue("default")
        client.retry_job(job_id, force=True)
        client.cancel_job(job_id)
        assert ended.wait(10)
        worker.stop()

    assert "lost" in _events(caplog)


def test_a_worker_that_has_an_old_and_a_new_lease_of_a_job_hears_of_each(
    client: Client, background: Background
) -> None:
    registry = Registry()
    jobs: list[AsyncJob] = []
    started, is_over = threading.Semaphore(0), threading.Event()

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        jobs.append(job)
        started.release()
        while not is_over.is_set():
            await asyncio.sleep(0.01)

    job_id = client.enqueue("waits", lease=timedelta(seconds=1.5)).job_id
    worker = background(registry)
    assert started.acquire(timeout=10)
    client.retry_job(job_id, force=True)
    assert started.acquire(timeout=10)
    old, new = jobs
    confirmed_at = new.confirmed_at
    deadline = time.monotonic() + 10
    while not (old.is_lease_gone and new.confirmed_at > confirmed_at):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    is_new_lost = new.is_lost
    is_over.set()
    worker.stop()

    assert not is_new_lost


def test_a_handler_that_outlives_its_lease_is_warned_of_once(
    client: Client, background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    """Its place is taken, and the database knows nothing of that."""
    registry = Registry()
    started, is_over = threading.Event(), threading.Event()

    @registry.handler("hangs")
    def hangs(_job: Job) -> None:
        started.set()
        assert is_over.wait(30)

    def warnings() -> list[str]:
        return [text for text in caplog.messages if "continues" in text]

    job_id = client.enqueue("hangs", lease=timedelta(seconds=1.5)).job_id
    with caplog.at_level(logging.INFO, "rota"):
        worker = background(registry)
        assert started.wait(10)
        client.pause_queue("default")
        client.retry_job(job_id, force=True)
        wait_until(warnings)
        time.sleep(2.5)  # it looks again each second
        is_over.set()
        worker.stop()

    assert warnings() == [
        f"job {job_id} is lost, but its handler of hangs continues: it keeps its place until "
        "it ends or this worker is restarted"
    ]
    assert "lost" in _events(caplog)


class Hanging:
    """A registry whose handler of `hangs` goes on until *is_over*; `ok` does nothing."""

    def __init__(self) -> None:
        self.registry, self.is_over = Registry(), threading.Event()
        self.jobs: list[Job] = []
        self.registry.add("ok", lambda _job: None)
        self.registry.add("hangs", self._hang)

    def _hang(self, job: Job) -> None:
        self.jobs.append(job)
        assert self.is_over.wait(60)

    def wait(self, count: int = 1) -> None:
        """Wait until so many have begun."""
        wait_until(lambda: len(self.jobs) == count)


def test_a_worker_whose_places_are_all_of_handlers_without_jobs_leaves(
    client: Client,
    background: Background,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take no job any more, and nobody would know."""
    monkeypatch.setattr(executor, "MAX_USELESS", 3.0)
    hanging = Hanging()
    jobs = [client.enqueue("hangs", lease=timedelta(seconds=1.5)).job_id for _ in "ab"]
    with caplog.at_level(logging.INFO, "rota"):
        worker = background(hanging.registry, concurrency=2)
        hanging.wait(2)
        client.pause_queue("default")
        client.retry_job(jobs[0], force=True)
        wait_until(lambda: "continues" in caplog.text)
        time.sleep(5)  # longer than all may be useless
        assert worker.thread.is_alive()
        client.retry_job(jobs[1], force=True)
        worker.thread.join(30)
        has_left = not worker.thread.is_alive()
        hanging.is_over.set()

    assert has_left
    assert caplog.text.count("the process has to end it") == 2
    assert "makes room for a new one: a handler goes on without its job" in caplog.text


def test_a_worker_that_makes_room_does_not_wait_for_a_handler_without_a_job(
    client: Client, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits however long for what runs, and so would never be replaced."""
    monkeypatch.setattr(executor, "MAX_USELESS", 2.0)
    hanging = Hanging()
    job_id = client.enqueue("hangs", queue="slow", lease=timedelta(seconds=1.5)).job_id
    worker = background(hanging.registry, queues=["slow", "default"], concurrency=2, max_jobs=1)
    hanging.wait()
    client.pause_queue("slow")
    client.retry_job(job_id, force=True)
    client.enqueue("ok")

    worker.thread.join(20)
    has_left = not worker.thread.is_alive()
    hanging.is_over.set()
    assert has_left


def test_a_handler_without_a_job_has_the_grace_period(
    client: Client,
    background: Background,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be in the middle of something, as in an outage."""
    monkeypatch.setattr(executor, "MAX_USELESS", 2.0)
    hanging = Hanging()
    job_id = client.enqueue("hangs", lease=timedelta(seconds=1.5)).job_id
    with caplog.at_level(logging.INFO, "rota"):
        worker = background(hanging.registry, concurrency=2, grace_period=60)
        hanging.wait()
        client.pause_queue("default")
        client.retry_job(job_id, force=True)
        wait_until(lambda: "continues" in caplog.text)
        worker.worker.stop()
        time.sleep(4)  # longer than all may be useless
        hanging.is_over.set()
        worker.stop()

    assert "the process has to end it" not in caplog.text


def test_a_lease_that_was_kept_after_all_counts_from_its_end(
    client: Client,
    background: Background,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a second outage all handlers had long been without jobs, since the first one."""
    monkeypatch.setattr(executor, "MAX_USELESS", 5.0)
    hanging = Hanging()
    lease = timedelta(seconds=3)
    client.enqueue("hangs", lease=lease)
    with caplog.at_level(logging.INFO, "rota"):
        worker = background(hanging.registry, concurrency=1, tick=False)
        hanging.wait()
        (job,) = hanging.jobs
        for pause in (6, 0):  # longer than all may be useless
            job.lease = timedelta(0)  # the database refuses its heartbeats
            wait_until(lambda: job.confirmed_at <= job.over_since < inf)
            job.lease = lease
            wait_until(lambda: not job.is_lost)
            time.sleep(pause)
        hanging.is_over.set()
        worker.stop()

    assert "succeeded" in _events(caplog)
    assert "the process has to end it" not in caplog.text


@pytest.mark.parametrize("how", [{"max_jobs": 1}, {"grace_period": 60}])
def test_a_worker_that_waits_for_its_last_jobs_is_not_gone(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, Any],
) -> None:
    """The remedy for a worker that is gone takes its jobs away, and runs them again."""
    monkeypatch.setattr("rota.worker.fetcher.REPORT_INTERVAL", 0.2)
    hanging = Hanging()
    job_id = client.enqueue("hangs").job_id
    worker = background(hanging.registry, **how)
    hanging.wait()
    if "max_jobs" in how:
        client.enqueue("ok")
    else:
        worker.worker.stop()
    wait_until(worker.worker._stop.is_set)
    db.execute("update rota.workers set last_seen_at = now() - interval '7 minutes'")
    wait_until(lambda: client.explain_job(job_id)[0].reason != "worker_gone")
    waiting = client.enqueue("ok").job_id
    reasons = [row.reason for row in client.explain_job(waiting)]
    hanging.is_over.set()

    assert "no_worker" in reasons


def test_stop_gives_back_and_lets_end(
    client: Client, db: psycopg.Connection[Any], background: Background
) -> None:
    registry = Registry()
    started, go_on = threading.Event(), threading.Event()

    @registry.handler("waits")
    def waits(job: Job) -> None:
        started.set()
        assert go_on.wait(10)

    client.enqueue_many([{"job_type": "waits"}] * 5)
    worker = background(registry, concurrency=1, batch=5)
    assert started.wait(10)
    worker.worker.stop()
    queued = "select count(*) from rota.jobs where status = 'queued' and attempts = 0"
    wait_until(lambda: db.execute(queued).fetchone() == (4,))
    go_on.set()
    worker.stop()

    assert db.execute("select count(*) from rota.finished_jobs").fetchone() == (1,)
    assert db.execute("select count(*) from rota.workers").fetchone() == (0,)


def test_a_claim_that_comes_through_while_the_worker_leaves_is_undone(
    client: Client, db: psycopg.Connection[Any], dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is told to stop while the answer to its claim is under way."""
    original = rota.AsyncClient.claim_jobs
    registry = Registry()
    registry.add("t", lambda job: None)
    worker = Worker(dsn, registry, listen=False)

    async def answer_late(*args: Any) -> Any:
        claims = await original(*args)
        worker.stop()
        await asyncio.sleep(0.3)
        return claims

    monkeypatch.setattr(rota.AsyncClient, "claim_jobs", answer_late)
    client.enqueue("t")
    worker.run()

    assert db.execute("select status, attempts from rota.jobs").fetchall() == [("queued", 0)]


def test_worker_ticks_again_at_once_while_there_is_more(
    client: Client, db: psycopg.Connection[Any], background: Background
) -> None:
    """And claims come between: 3000 jobs of a vanished worker, and one to do."""
    client.enqueue_many([{"job_type": "lost", "max_attempts": 1}] * 3000)
    for _ in range(3):
        client.claim_jobs("gone", max_jobs=1000)
    db.execute("update rota.jobs set locked_until = rota.now() - interval '1 minute'")
    registry = Registry()
    order: list[int] = []

    @registry.handler("now")
    def now(job: Job) -> None:
        order.append(_count(db, "dead"))

    client.enqueue("now")
    background(registry, tick_interval=60.0)
    wait_until(lambda: _count(db, "dead") == 3000)

    assert order
    assert order[0] < 3000


@pytest.mark.parametrize("tick", [True, False])
def test_worker_leaves_the_maintenance_to_others(
    client: Client, db: psycopg.Connection[Any], drain: Callable[..., None], tick: bool
) -> None:
    client.enqueue("lost", max_attempts=1)
    client.claim_jobs("gone")
    db.execute("update rota.jobs set locked_until = rota.now() - interval '1 minute'")
    registry = Registry()
    registry.handler("now")(lambda _: None)
    client.enqueue("now")

    drain(registry, tick=tick)

    assert _count(db, "dead") == tick
    assert client.tick().jobs_swept == (not tick)


def _count(db: psycopg.Connection[Any], status: str) -> int:
    row = db.execute(
        "select count(*) from rota.job_runs where status = %s", (status,)
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.own_session
def test_stop_does_not_wait_for_a_tick(
    client: Client,
    db: psycopg.Connection[Any],
    connect: Callable[..., psycopg.Connection[Any]],
    background: Background,
) -> None:
    """Maintenance hangs behind a lock; what has not been started is given back all the same."""
    registry = Registry()
    started, go_on = threading.Event(), threading.Event()

    @registry.handler("waits")
    def waits(job: Job) -> None:
        started.set()
        assert go_on.wait(10)

    client.enqueue_many([{"job_type": "waits"}] * 5)
    worker = background(registry, concurrency=1, batch=5)
    assert started.wait(10)
    blocker = connect(autocommit=False)
    blocker.execute("lock table rota.workers, rota.maintenance in access exclusive mode")
    hangs = "select count(*) from pg_locks where not granted"
    wait_until(lambda: db.execute(hangs).fetchone() != (0,), "a tick that hangs")

    asked_at = time.monotonic()
    worker.worker.stop()
    queued = "select count(*) from rota.jobs where status = 'queued' and attempts = 0"
    wait_until(lambda: db.execute(queued).fetchone() == (4,), "four jobs given back")
    assert time.monotonic() - asked_at < 2.5
    blocker.rollback()
    go_on.set()
    worker.stop()

    assert db.execute("select count(*) from rota.finished_jobs").fetchone() == (1,)


def test_grace_period_ends_in_release(
    client: Client, db: psycopg.Connection[Any], background: Background
) -> None:
    registry = Registry()
    started = threading.Semaphore(0)
    leave = threading.Event()

    @registry.handler("stubborn")
    def stubborn(job: Job) -> None:
        started.release()
        leave.wait(30)

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        started.release()
        await asyncio.sleep(60)

    client.enqueue("stubborn")
    client.enqueue("waits")
    worker = background(registry, grace_period=0.1)
    assert started.acquire(timeout=10)
    assert started.acquire(timeout=10)
    worker.stop()

    rows = db.execute("select status, attempts from rota.jobs").fetchall()
    assert rows == [("queued", 0), ("queued", 0)]
    leave.set()


def test_what_a_plain_handler_waits_for_in_the_database_ends_with_its_worker(
    client: Client, db: psycopg.Connection[Any], background: Background
) -> None:
    registry = Registry()
    started, errors = threading.Event(), SimpleQueue[Exception]()

    @registry.handler("waits")
    def waits(job: Job) -> None:
        try:
            with job.transaction() as connection:
                started.set()
                connection.execute("select pg_sleep(20)")
        except Exception as error:
            errors.put(error)
            raise

    client.enqueue("waits")
    worker = background(registry)
    assert started.wait(10)
    worker.stop(now=True)

    error = errors.get(timeout=10)
    assert isinstance(error, NoAnswerError)
    assert str(error).endswith("has left")
    assert db.execute("select status, attempts from rota.jobs").fetchall() == [("queued", 0)]


def test_what_a_handler_that_does_not_end_has_locked_is_free_when_its_worker_leaves(
    client: Client, db: psycopg.Connection[Any], background: Background
) -> None:
    registry = Registry()
    started, leave = threading.Event(), threading.Event()

    @registry.handler("stubborn")
    def stubborn(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute("select from rota.jobs where id = %s for update", [job.job_id])
            started.set()
            leave.wait(30)

    client.enqueue("stubborn")
    worker = background(registry)
    assert started.wait(10)
    try:
        worker.stop(now=True)
        # It could not be given back while its row is locked.
        assert db.execute("select status from rota.jobs").fetchall() == [("queued",)]
    finally:
        leave.set()


def test_a_worker_leaves_though_the_database_takes_no_leave_of_it(
    db: psycopg.Connection[Any],
    dsn: str,
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("rota.worker.maintenance.DEREGISTER_TIMEOUT", 0.2)
    registry = Registry()
    registry.add("a", lambda job: None)
    worker = background(registry)
    wait_until(lambda: worker.worker.is_ready)

    with psycopg.connect(dsn) as other:
        other.execute("select from rota.workers for update")
        worker.stop()

    assert "exiting, although the database is away: NoAnswerError" in caplog.text


@pytest.mark.own_session
def test_an_idle_worker_takes_its_leave_of_a_server_that_lets_nobody_in(
    db: psycopg.Connection[Any], admin: psycopg.Connection[Any], background: Background
) -> None:
    """Its own connection will do; else it would be listed as a live one for minutes."""
    registry = Registry()
    registry.add("a", lambda job: None)
    worker = background(registry)
    wait_until(lambda: worker.worker.is_ready)
    allow = sql.SQL("alter database {} allow_connections {}")
    name = sql.Identifier(db.info.dbname)

    admin.execute(allow.format(name, sql.Literal(False)))
    worker.stop()
    admin.execute(allow.format(name, sql.Literal(True)))

    assert db.execute("select worker from rota.workers").fetchall() == []


@pytest.mark.own_session
def test_a_worker_that_is_stopped_while_its_first_report_is_stored_is_known_no_more(
    db: psycopg.Connection[Any], background: Background
) -> None:
    """The report is committed although it is to be cancelled."""
    mutate(
        db,
        "report_worker",
        "last_seen_at = excluded.last_seen_at;",
        "last_seen_at = excluded.last_seen_at;"
        " begin perform pg_sleep(30); exception when query_canceled then null; end;",
    )
    registry = Registry()
    registry.add("a", lambda job: None)
    worker = background(registry)
    sleeps = "select from pg_stat_activity where wait_event = 'PgSleep'"
    sleeps += " and datname = current_database()"
    wait_until(lambda: db.execute(sleeps).fetchone() is not None, "the report")

    worker.stop()

    assert db.execute("select worker from rota.workers").fetchall() == []


def test_a_worker_that_retires_has_its_grace_period_from_a_stop_on(
    client: Client,
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("rota.worker.worker.LEAVE_TIMEOUT", 0.5)
    registry = Registry()

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        await asyncio.sleep(60)

    registry.add("quick", lambda job: None)
    client.enqueue_many([{"job_type": "waits"}, {"job_type": "quick"}])
    worker = background(registry, grace_period=0.1, max_jobs=1)
    wait_until(lambda: "stops: waits for" in caplog.text, "that it retires")
    worker.thread.join(1)
    assert worker.thread.is_alive()

    worker.stop()


@pytest.mark.own_session
def test_a_limit_for_idle_sessions_ends_none_of_a_worker_that_waits(
    client: Client,
    db: psycopg.Connection[Any],
    status: Status,
    background: Callable[..., BackgroundWorker],
    caplog: pytest.LogCaptureFixture,
) -> None:
    db.execute(f"alter database {db.info.dbname} set idle_session_timeout = '100ms'")
    registry = Registry()
    registry.add("quick", lambda job: None)
    worker = background(registry, poll_interval=60, tick_interval=60)

    def waits_for_longer() -> bool:
        found = db.execute(
            "select from pg_stat_activity where application_name like 'rota %'"
            " and datname = current_database() and state_change < now() - interval '300 ms'"
        )
        return found.fetchone() is not None

    wait_until(waits_for_longer, "a session that is idle for longer than the limit")
    job_id = client.enqueue("quick").job_id
    wait_until(lambda: status(job_id) == "succeeded", "the end of the job")
    worker.stop()

    assert "is lost" not in caplog.text


@pytest.mark.own_session
def test_progress_that_a_read_only_database_refuses_is_no_failure(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    read_only = f"alter database {db.info.dbname} set default_transaction_read_only = {{}}"
    registry = Registry()

    @registry.handler("tells")
    def tells(job: Job) -> None:
        db.execute(read_only.format("on"))  # of sessions that begin now
        try:
            job.set_progress(50)
        finally:
            db.execute(read_only.format("off"))

    client.enqueue("tells")
    drain(registry)

    rows = db.execute("select status, attempts, progress_percent from rota.job_runs").fetchall()
    assert rows == [("succeeded", 1, None)]


def test_progress_is_stored_from_both_kinds(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> None:
        job.set_progress(12.5, "in a thread")

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        await job.set_progress(75, "in the loop")

    client.enqueue("plain")
    client.enqueue("async")
    drain(registry)

    rows = db.execute(
        "select progress_message from rota.finished_jobs order by progress_percent"
    ).fetchall()
    assert rows == [("in a thread",), ("in the loop",)]


def test_stale_jobs_are_swept_by_any_worker(
    client: Client, status: Status, background: Background
) -> None:
    registry = Registry()
    registry.add("other", lambda job: None)
    job_id = client.enqueue("quick", lease=timedelta(milliseconds=50)).job_id
    client.claim_jobs("a worker that dies")

    background(registry)

    wait_until(lambda: status(job_id) != "running")


def test_progress_that_is_not_awaited_is_told(client: Client, drain: Drain) -> None:
    registry = Registry()

    @registry.handler("forgets")
    async def forgets(job: AsyncJob) -> None:
        await job.set_progress(10)
        job.set_progress(50)  # type: ignore[unused-coroutine]

    @registry.handler("awaits")
    async def awaits(job: AsyncJob) -> None:
        await job.set_progress(50)

    client.enqueue("forgets")
    client.enqueue("awaits")
    with pytest.warns(RuntimeWarning, match="set_progress' was never awaited") as told:
        drain(registry)

    assert len(told) == 1


def test_a_report_under_way_at_the_end_of_the_grace_period_is_no_loss(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The database has stored the end, and its answer comes a little later."""
    original = rota.AsyncClient.finish_jobs
    is_sent = threading.Event()

    async def answer_late(*args: Any) -> Any:
        ended = await original(*args)
        is_sent.set()
        await asyncio.sleep(2.0)
        return ended

    monkeypatch.setattr(rota.AsyncClient, "finish_jobs", answer_late)
    registry = Registry()
    registry.add("quick", lambda job: None)
    client.enqueue("quick")
    with caplog.at_level(logging.INFO, "rota"):
        worker = background(registry)
        assert is_sent.wait(30)
        worker.stop(now=True)

    assert _events(caplog) == ["claimed", "succeeded"]


def _events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.rota["event"] for record in caplog.records if hasattr(record, "rota")]


def test_log_has_one_line_for_each_event(
    client: Client, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()

    @registry.handler("bad")
    def bad(job: Job) -> None:
        raise ValueError("two\nlines")

    job_id = client.enqueue("bad", max_attempts=3).job_id
    with caplog.at_level(logging.INFO, "rota"):
        drain(registry)

    assert _events(caplog) == ["claimed", "failed"]
    record = next(r for r in caplog.records if r.levelname == "WARNING")
    message = record.getMessage()
    assert message.startswith(f"failed job_type=bad job_id={job_id} queue=default attempt=1 ")
    assert "next_run=" in message
    assert "\n" not in message
    line = json.loads(JsonFormatter().format(record))
    assert line["event"] == "failed"
    assert line["error"] == "two\nlines"
    assert line["duration"] >= 0


def test_worker_fails_at_once_without_a_database() -> None:
    registry = Registry()
    registry.add("quick", lambda job: None)

    with pytest.raises(psycopg.OperationalError):
        Worker("host=127.0.0.1 port=1", registry).run()


def test_worker_refuses_arguments_out_of_range() -> None:
    registry = Registry()
    registry.add("a", lambda job: None)

    with pytest.raises(ValueError, match="interval"):
        Worker("", registry, poll_interval=0)
    with pytest.raises(ValueError, match="handler"):
        Worker("", Registry())
    wrong: Any = {"a": lambda job: None}
    with pytest.raises(TypeError, match=r"rota\.Registry, got dict: registry\.add"):
        Worker("", wrong)
    with pytest.raises(TypeError, match="lease must be a timedelta or seconds"):
        Worker("", registry, lease="60")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="conninfo must be a URL, got NoneType"):
        Worker(None, registry)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="poll_interval must be a number, got '5'"):
        Worker("", registry, poll_interval="5")  # type: ignore[arg-type]
    Worker("", registry, lease=60)


@pytest.mark.parametrize("kind", ["plain", "async", "tasks"])
def test_a_handler_sees_that_the_worker_leaves_and_gives_its_job_back(
    client: Client, db: psycopg.Connection[Any], background: Background, kind: str
) -> None:
    """Long before the end of the grace period; the job has lost no attempt."""
    registry, begun = Registry(), threading.Event()

    @registry.handler("plain")
    def plain(job: Job) -> None:
        begun.set()
        while not job.is_leaving:
            time.sleep(0.02)
        job.check()
        raise rota.JobCancelled("saved")

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        begun.set()
        while not job.is_leaving:
            await asyncio.sleep(0.02)
        raise rota.JobCancelled("saved")

    @registry.handler("tasks")
    async def in_tasks(job: AsyncJob) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):  # which see it in the same turn of the loop
                tasks.create_task(in_loop(job))

    client.enqueue(kind)
    worker = background(registry, grace_period=30)
    assert begun.wait(10)
    began = time.monotonic()
    worker.stop()

    assert time.monotonic() - began < 1
    assert db.execute("select status, attempts from rota.jobs").fetchone() == ("queued", 0)


class AsText(JsonbBinaryLoader):
    def load(self, data: Any) -> Any:
        return bytes(data[1:]).decode()


def test_a_worker_reads_payloads_as_psycopg_was_told_to(
    client: Client, drain: Callable[..., None]
) -> None:
    registry, read = Registry(), []

    @registry.handler("read")
    def handler(job: Job) -> None:
        read.append(job.payload)

    def read_one() -> None:
        client.enqueue("read", {"price": 1.1})
        drain(registry)

    read_one()
    try:
        set_json_loads(partial(json.loads, parse_float=Decimal))
        read_one()
        psycopg.adapters.register_loader("jsonb", AsText)
        read_one()
    finally:
        set_json_loads(json.loads)
        psycopg.adapters.register_loader("jsonb", JsonbBinaryLoader)

    assert read == [{"price": 1.1}, {"price": Decimal("1.1")}, '{"price": 1.1}']
