"""What runs around handlers: lifespan, middleware and the functions that hear of ends."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

import rota
from rota import AsyncJob, Client, Job, JobEnd, Registry, Worker
from rota.cli import main
from rota.testing import run_job
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
Status = Callable[[int], str]
AnyJob = Job | AsyncJob
TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")


def test_resources_are_opened_once_and_closed_after_the_last_job(
    client: Client, drain: Drain
) -> None:
    registry = Registry()
    seen: list[object] = []

    @registry.lifespan
    async def numbers() -> AsyncIterator[dict[str, Any]]:
        seen.append("open")
        yield {"answer": 42}
        seen.append("closed")

    @registry.lifespan
    async def nothing() -> AsyncIterator[None]:
        yield None

    @registry.handler("plain")
    def plain(job: Job) -> None:
        seen.append(job.resources["answer"])

    @registry.handler("in_loop")
    async def in_loop(job: AsyncJob) -> None:
        seen.append(job.resources["answer"])

    client.enqueue_many([{"job_type": "plain"}, {"job_type": "in_loop"}])
    drain(registry)

    assert seen == ["open", 42, 42, "closed"]


@pytest.mark.parametrize(
    ("error", "opens"),
    [
        (ConnectionRefusedError("no cache here"), False),
        (OSError(errno.EADDRINUSE, "in use"), True),
        (TimeoutError("too slow"), False),
        (ValueError("no URL"), False),
        (psycopg.errors.UndefinedTable("no table"), True),
        (asyncio.CancelledError("a task of its own"), False),
        (asyncio.CancelledError("a task of its own"), True),
    ],
)
def test_a_lifespan_that_fails_is_named_and_keeps_the_worker_from_claiming(
    client: Client,
    dsn: str,
    status: Status,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    opens: bool,
) -> None:
    """Not even those errors are taken for ours that the command knows how to mend."""
    registry = Registry()
    registry.add("nothing", lambda job: None)

    @registry.lifespan
    async def pool() -> AsyncIterator[None]:
        if opens:
            yield
        raise error

    job = client.enqueue("nothing")
    monkeypatch.setitem(sys.modules, "shop", SimpleNamespace(registry=registry))
    command = ["worker", "shop", "--once", "--health", "0", "-d", dsn]
    with pytest.raises(RuntimeError, match=r"^the lifespan \S+pool failed: ") as caught:
        main(command)

    assert str(caught.value).endswith(f"{type(error).__name__}: {error}")
    assert caught.value.__cause__ is error
    assert status(job.job_id) == ("succeeded" if opens else "queued")


def test_a_lifespan_that_yields_no_mapping_is_named(dsn: str) -> None:
    registry = Registry()
    registry.add("nothing", lambda job: None)
    closed = []

    @registry.lifespan  # type: ignore[type-var]
    async def pool() -> AsyncIterator[str]:
        try:
            yield "http"
        finally:
            closed.append(True)

    with pytest.raises(RuntimeError, match=r"pool failed: TypeError: it must yield a mapping"):
        rota.Worker(dsn, registry).run(drain=True)

    assert closed == [True]


@pytest.mark.parametrize(
    ("place", "grace_period", "then"),
    [("open", 60.0, []), ("close", 0.1, []), ("close", 60.0, [True])],
)
def test_a_lifespan_that_hangs_holds_up_no_signal(
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    grace_period: float,
    then: list[bool],
) -> None:
    for name in ("LEAVE_TIMEOUT", "LAST_WORDS"):
        monkeypatch.setattr(f"rota.worker.worker.{name}", 0.1)
    registry = Registry()
    registry.add("nothing", lambda job: None)
    reached = {"open": threading.Event(), "close": threading.Event()}

    async def reach(where: str) -> None:
        reached[where].set()
        if where == place:
            await asyncio.sleep(60)

    @registry.lifespan
    async def hangs() -> AsyncIterator[None]:
        await reach("open")
        yield
        await reach("close")

    worker = BackgroundWorker(dsn, registry, grace_period=grace_period)
    assert reached["open"].wait(30)
    worker.worker.stop()
    for now in then:
        assert reached["close"].wait(30)
        worker.worker.stop(now=now)
    worker.stop()

    assert "a lifespan of its registry neither opens nor closes" in caplog.text


def test_a_lifespan_that_hangs_holds_up_no_worker_that_makes_room(
    client: Client,
    background: Callable[..., BackgroundWorker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its jobs have ended, and its successor is started only when it has left."""
    monkeypatch.setattr("rota.worker.worker.LEAVE_TIMEOUT", 0.1)
    registry = Registry()
    registry.add("nothing", lambda job: None)

    @registry.lifespan
    async def hangs() -> AsyncIterator[None]:
        yield
        await asyncio.sleep(60)

    client.enqueue("nothing")
    worker = background(registry, max_jobs=1, grace_period=0.1)

    wait_until(lambda: not worker.thread.is_alive(), "the end of its process")
    assert "a lifespan of its registry neither opens nor closes" in caplog.text


def test_lifespans_that_ignore_a_cancellation_hold_up_no_stop(
    background: Callable[..., BackgroundWorker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("rota.worker.worker.LEAVE_TIMEOUT", 0.1)
    registry = Registry()
    registry.add("nothing", lambda job: None)

    async def stubborn() -> AsyncIterator[None]:
        yield
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    for _ in range(2):
        registry.lifespan(stubborn)
    worker = background(registry, grace_period=0.1)
    wait_until(lambda: worker.worker.is_ready, "the start")

    worker.stop()

    assert "a lifespan of its registry neither opens nor closes" in caplog.text


def test_a_lifespan_may_close_after_a_stop_at_once(
    background: Callable[..., BackgroundWorker],
) -> None:
    registry = Registry()
    registry.add("nothing", lambda job: None)
    closed = threading.Event()

    @registry.lifespan
    async def pool() -> AsyncIterator[None]:
        yield
        await asyncio.sleep(0.02)
        closed.set()

    worker = background(registry)
    wait_until(lambda: worker.worker.is_ready, "the start")
    worker.stop(now=True)

    assert closed.is_set()


def test_middleware_runs_around_each_handler_in_its_context(
    client: Client, drain: Drain
) -> None:
    registry = Registry()
    seen: list[object] = []

    @registry.middleware
    def outer(job: AnyJob) -> Iterator[None]:
        TENANT.set(job.payload["tenant"])
        seen.append("outer")
        yield
        seen.append("end of outer")

    @registry.middleware
    def inner(job: AnyJob) -> Iterator[None]:
        seen.append("inner")
        yield
        seen.append("end of inner")

    @registry.handler("plain")
    def plain(job: Job) -> str:
        seen.append(TENANT.get())
        return "result"

    @registry.task("task")
    async def task(job: AsyncJob, tenant: str) -> str:
        await asyncio.sleep(0)
        seen.append(TENANT.get())
        return "result"

    expected = ["outer", "inner", "a", "end of inner", "end of outer"]
    for job_type in ("plain", "task"):
        seen.clear()
        job = client.enqueue(job_type, {"tenant": "a"})
        drain(registry)

        assert seen == expected
        row = client.connection.execute(
            "select result from rota.finished_jobs where id = %s", [job.job_id]
        ).fetchone()
        assert row == ("result",)


@pytest.mark.parametrize("is_async", [False, True])
def test_middleware_sees_what_a_handler_raises_or_returns_as_an_error(
    client: Client, drain: Drain, status: Status, is_async: bool
) -> None:
    registry = Registry()
    seen: list[str] = []

    @registry.middleware
    def watch(job: AnyJob) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            seen.append(str(error))
            if job.payload["then"] == "snooze":
                raise rota.Snooze(60) from error
            if job.payload["then"] == "raise":
                raise

    def fail(job: Job) -> object:
        if job.payload["how"] == "return":
            return ValueError("returned")
        raise ValueError("raised")

    async def fail_in_loop(job: AsyncJob) -> object:
        return fail(job)  # type: ignore[arg-type]

    registry.add("fails", fail_in_loop if is_async else fail)
    jobs = [
        client.enqueue("fails", {"how": how, "then": then})
        for how in ("raise", "return")
        for then in ("raise", "swallow", "snooze")
    ]
    drain(registry)

    assert sorted(seen) == ["raised"] * 3 + ["returned"] * 3
    # A swallowed error is no success: nobody would ever see it.
    assert [status(job.job_id) for job in jobs] == ["failed", "failed", "queued"] * 2


@pytest.mark.parametrize("options", [{"retry_on": OSError}, {"give_up_on": LookupError}])
def test_middleware_has_the_last_word_on_another_attempt(
    client: Client, drain: Drain, status: Status, options: Any
) -> None:
    registry = Registry()

    @registry.middleware
    def slow_down(job: AnyJob) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            raise rota.RetryIn(60, "too many requests") from error

    @registry.task(**options)
    def fails() -> None:
        raise KeyError("429")

    job = fails.enqueue(client)
    drain(registry)

    assert status(job.job_id) == "failed"


def test_middleware_that_fails_before_the_handler_fails_the_attempt(
    client: Client, drain: Drain, status: Status
) -> None:
    registry = Registry()
    ran: list[int] = []
    registry.add("plain", lambda job: ran.append(job.job_id))

    @registry.middleware
    def refuse(job: AnyJob) -> Iterator[None]:
        raise PermissionError("not here")
        yield

    job = client.enqueue("plain")
    drain(registry)

    assert status(job.job_id) == "failed"
    assert ran == []


def _registry_of_ends(seen: dict[int, JobEnd]) -> Registry:
    registry = Registry()

    @registry.on_end
    async def note(job: AnyJob, end: JobEnd) -> None:
        seen[job.job_id] = end

    @registry.on_end
    def fail_itself(job: AnyJob, end: JobEnd) -> None:
        raise RuntimeError("a hook of mine is broken")

    @registry.handler("does")
    def does(job: Job) -> None:
        match job.payload["what"]:
            case "snooze":
                raise rota.Snooze(60)
            case "fail":
                raise KeyError("gone")
            case "die":
                raise rota.FatalError("never")
            case "commit":
                with job.transaction():
                    pass

    return registry


def test_functions_of_on_end_hear_how_each_attempt_ended(
    client: Client, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[int, JobEnd] = {}
    jobs = {
        what: client.enqueue("does", {"what": what}).job_id
        for what in ("nothing", "snooze", "fail", "die", "commit")
    }
    drain(_registry_of_ends(seen))

    outcomes = {what: seen[job_id].outcome for what, job_id in jobs.items()}
    assert outcomes == {
        "nothing": "succeeded",
        "snooze": "snoozed",
        "fail": "failed",
        "die": "dead",
        "commit": "succeeded",
    }
    assert isinstance(seen[jobs["fail"]].exception, KeyError)
    assert isinstance(seen[jobs["die"]].exception, rota.FatalError)
    assert seen[jobs["nothing"]].exception is None
    for what in ("fail", "snooze"):
        assert seen[jobs[what]].next_run is not None
    assert caplog.text.count("fail_itself, of on_end, failed") == len(jobs)


def test_an_object_that_is_async_hears_of_ends(client: Client, drain: Drain) -> None:
    class Note:
        async def __call__(self, job: AnyJob, end: JobEnd) -> None:
            seen.append(job.job_id)

    registry, seen = Registry(), []
    registry.add("plain", lambda job: None)
    registry.on_end(Note())

    job = client.enqueue("plain")
    drain(registry)

    assert seen == [job.job_id]


def test_a_function_of_on_end_ends_no_worker(
    client: Client, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    registry, told = Registry(), []
    registry.add("plain", lambda job: None)

    for error in (SystemExit, asyncio.CancelledError, StopIteration):

        @registry.on_end
        def fails(job: AnyJob, end: JobEnd, error: type[BaseException] = error) -> None:
            raise error

        @registry.on_end
        async def fails_in_loop(
            job: AnyJob, end: JobEnd, error: type[BaseException] = error
        ) -> None:
            raise error

    registry.on_end(lambda job, end: told.append(job.job_id))
    jobs = client.enqueue_many([{"job_type": "plain"}] * 2)
    drain(registry)

    assert sorted(told) == [job.job_id for job in jobs]
    assert caplog.text.count("of on_end, failed") == 12


def test_a_function_of_on_end_sees_no_context_of_another_end(
    client: Client, drain: Drain
) -> None:
    registry, seen = Registry(), []
    registry.add("plain", lambda job: None)

    @registry.on_end
    def tell(job: AnyJob, end: JobEnd) -> None:
        seen.append(TENANT.get(None))
        TENANT.set("of a thread")

    @registry.on_end
    async def tell_in_loop(job: AnyJob, end: JobEnd) -> None:
        seen.append(TENANT.get(None))
        TENANT.set("of the loop")

    client.enqueue_many([{"job_type": "plain"}] * 50)
    drain(registry)

    assert seen == [None] * 100


def test_a_function_of_on_end_that_does_not_return_is_named(
    client: Client,
    dsn: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.worker.events.LONG", 0.05)
    registry, goes_on = Registry(), threading.Event()
    registry.add("plain", lambda job: None)

    @registry.on_end
    def hangs(job: AnyJob, end: JobEnd) -> None:
        goes_on.wait(30)

    client.enqueue_many([{"job_type": "plain"}] * 3)
    worker = BackgroundWorker(dsn, registry)
    try:
        said = ".hangs, of on_end, has not returned for 0.05 seconds; 2 more ends wait"
        wait_until(lambda: said in caplog.text, "a warning")
    finally:
        goes_on.set()
        worker.stop()


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_worker_leaves_though_functions_of_on_end_do_not_return(
    client: Client,
    dsn: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr("rota.worker.worker.LEAVE_TIMEOUT", 0.5)
    registry, told, goes_on = Registry(), [], threading.Event()
    registry.add("plain", lambda job: None)

    def hangs(job: AnyJob, end: JobEnd) -> None:
        told.append(job.job_id)
        goes_on.wait(60)

    async def hangs_in_loop(job: AnyJob, end: JobEnd) -> None:
        told.append(job.job_id)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    registry.on_end(hangs if kind == "plain" else hangs_in_loop)
    client.enqueue_many([{"job_type": "plain"}] * 3)
    worker = BackgroundWorker(dsn, registry)
    try:
        wait_until(lambda: told and worker.worker._executor.ends.count == 3, "its call")
        worker.stop()
    finally:
        goes_on.set()
    assert "exiting, although functions of on_end have not ended" in caplog.text
    assert len(told) == 1


@pytest.mark.parametrize("how", ["drain", "max_jobs"])
def test_a_worker_that_leaves_unasked_first_tells_of_all_ends(
    client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nobody waits for it: it is slow functions alone that take longer than `LEAVE_TIMEOUT`."""
    monkeypatch.setattr("rota.worker.worker.LEAVE_TIMEOUT", 0.1)
    registry, told = Registry(), []
    registry.add("plain", lambda job: None)

    @registry.on_end
    def slow(job: AnyJob, end: JobEnd) -> None:
        time.sleep(0.05)
        told.append(job.job_id)

    client.enqueue_many([{"job_type": "plain"}] * 12)
    if how == "drain":
        Worker(dsn, registry).run(drain=True)
    else:
        Worker(dsn, registry, max_jobs=12).run()

    assert len(told) == 12


def test_a_worker_that_leaves_unasked_waits_for_no_function_that_hangs(
    client: Client, dsn: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.worker.worker.LEAVE_TIMEOUT", 0.5)
    monkeypatch.setattr("rota.worker.events.LONG", 0.1)
    registry, goes_on = Registry(), threading.Event()
    registry.add("plain", lambda job: None)
    registry.on_end(lambda job, end: goes_on.wait(60))
    client.enqueue_many([{"job_type": "plain"}] * 3)
    try:
        running = threading.Thread(target=Worker(dsn, registry).run, kwargs={"drain": True})
        running.start()
        wait_until(lambda: "functions of on_end have not ended" in caplog.text, "its leave")
    finally:
        goes_on.set()
        running.join()


def test_an_end_is_told_after_the_database_knows_of_it(
    client: Client, drain: Drain, dsn: str
) -> None:
    registry = Registry()
    statuses: list[Any] = []
    registry.add("plain", lambda job: None)

    @registry.on_end
    def look(job: AnyJob, end: JobEnd) -> None:
        with psycopg.connect(dsn) as connection:
            query = "select status from rota.finished_jobs where id = %s"
            statuses.append(connection.execute(query, [job.job_id]).fetchone())

    client.enqueue("plain")
    drain(registry)

    assert statuses == [("succeeded",)]


def test_a_worker_that_is_behind_with_telling_starts_no_more_jobs(
    client: Client, dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.worker.events.MAX_PENDING", 3)
    registry = Registry()
    go_on = threading.Event()
    registry.add("plain", lambda job: None)
    registry.on_end(lambda job, end: go_on.wait(30))
    for _ in range(5):
        client.enqueue_many([{"job_type": "plain"}] * 1000)

    worker = BackgroundWorker(dsn, registry, concurrency=1, batch=1)

    def ended() -> int:
        return int(_value(db, "select count(*) from rota.finished_jobs"))

    def is_still() -> bool:
        before = ended()
        time.sleep(0.3)
        return 3 <= before == ended()

    try:
        wait_until(is_still, "an end of its ends")
        # Those that had ended and were not reported yet come on top of the three.
        assert ended() < 3500
    finally:
        go_on.set()
        worker.stop()


def test_ends_of_jobs_that_are_given_back_are_told_before_the_worker_leaves(
    client: Client, dsn: str
) -> None:
    registry = Registry()
    started = threading.Event()
    outcomes: list[str] = []

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        started.set()
        await asyncio.sleep(60)

    @registry.on_end
    def note(job: AnyJob, end: JobEnd) -> None:
        outcomes.append(end.outcome)

    client.enqueue("waits", lease=timedelta(seconds=30))
    worker = BackgroundWorker(dsn, registry, grace_period=0.0)
    assert started.wait(30)
    worker.stop()

    assert outcomes == ["released"]


def test_a_registry_brings_what_runs_around_its_handlers(client: Client, drain: Drain) -> None:
    part, whole = Registry(), Registry()
    seen: list[str] = []

    @part.lifespan
    async def opened() -> AsyncIterator[None]:
        seen.append("lifespan")
        yield

    @part.middleware
    def around(job: AnyJob) -> Iterator[None]:
        seen.append("middleware")
        yield

    @part.on_end
    async def ended(job: AnyJob, end: JobEnd) -> None:
        seen.append("end")

    part.add("plain", lambda job: seen.append("handler"))
    whole.include(part)
    client.enqueue("plain")
    drain(whole)

    assert seen == ["lifespan", "middleware", "handler", "end"]


def test_what_cannot_run_around_a_handler_is_refused_at_once() -> None:
    registry = Registry()
    with pytest.raises(TypeError, match="plain function with one yield"):
        registry.middleware(lambda job: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="async def function with one yield"):
        registry.lifespan(lambda: None)  # type: ignore[arg-type, return-value]


def _value(db: psycopg.Connection[Any], query: Any) -> Any:
    row = db.execute(query).fetchone()
    return row and row[0]


def test_a_middleware_that_ends_before_its_yield_is_named() -> None:
    registry = Registry()
    registry.add("a", lambda job: None)

    @registry.middleware
    def only_async(job: AnyJob) -> Iterator[None]:
        if isinstance(job, AsyncJob):
            yield

    with pytest.raises(RuntimeError, match=r"the middleware .*only_async has not yielded"):
        run_job(registry, "a")


def test_an_error_before_the_yield_of_a_middleware_stays_what_it_is() -> None:
    registry = Registry()
    registry.add("a", lambda job: None)

    @registry.middleware
    def takes_none(job: AnyJob) -> Iterator[None]:
        next(iter(()))
        yield

    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        run_job(registry, "a")
