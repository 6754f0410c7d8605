"""The process of a worker: uvloop's loop where that is installed, and what is forked there."""

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import uvloop
from psycopg.conninfo import make_conninfo

import rota
from rota.worker.process import loop_factory, run_until_signal, told_of
from support.started_workers import BackgroundWorker
from support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.slow

both_loops = pytest.mark.parametrize(
    "make_loop", [loop_factory, lambda: asyncio.SelectorEventLoop], ids=["uvloop", "asyncio"]
)


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
        loops.append(isinstance(asyncio.get_running_loop(), uvloop.Loop))
        async with job.transaction() as connection:
            await connection.execute("select 1")

    @registry.handler("in_thread")
    def in_thread(job: rota.Job) -> None:
        loops.append(threading.current_thread().name == "rota-job")

    client.enqueue_many([{"job_type": kind} for kind in ("in_loop", "in_thread")])
    rota.Worker(dsn, registry, poll_interval=0.05).run(drain=True)

    assert loops == [True, True]
    ended = "select count(*) from rota.finished_jobs where status = 'succeeded'"
    assert db.execute(ended).fetchone() == (2,)


def test_without_uvloop_it_is_the_one_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)

    assert issubclass(loop_factory(), asyncio.SelectorEventLoop)


@both_loops
@pytest.mark.parametrize("how", ["exits", "interrupts", "stops"])
def test_a_task_of_a_handler_that_leaves_the_loop_ends_no_worker(
    client: rota.Client,
    db: psycopg.Connection[Any],
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    make_loop: Any,
    how: str,
) -> None:
    monkeypatch.setattr("rota.worker.process.loop_factory", make_loop)
    registry = rota.Registry()
    goes_on = asyncio.Event()

    async def leave() -> None:
        if how == "exits":
            sys.exit(7)
        if how == "interrupts":
            raise KeyboardInterrupt
        asyncio.get_running_loop().stop()

    @registry.handler("leaves")
    async def leaves(job: rota.AsyncJob) -> None:
        try:
            await asyncio.gather(leave())
        finally:
            goes_on.set()

    @registry.handler("other")
    async def other(job: rota.AsyncJob) -> None:
        await goes_on.wait()

    client.enqueue_many([{"job_type": "leaves", "max_attempts": 1}, {"job_type": "other"}])
    rota.Worker(dsn, registry, poll_interval=0.05).run(drain=True)

    ended = "select job_type, status, error_type from rota.finished_jobs order by 1"
    error = {"exits": "SystemExit", "interrupts": "KeyboardInterrupt"}.get(how)
    assert db.execute(ended).fetchall() == [
        ("leaves", "dead" if error else "succeeded", error),
        ("other", "succeeded", None),
    ]


@both_loops
@pytest.mark.parametrize("where", ["in_a_step", "in_the_loop"])
def test_a_second_signal_is_an_interrupt_and_no_other_error(
    monkeypatch: pytest.MonkeyPatch, make_loop: Any, where: str
) -> None:
    monkeypatch.setattr("rota.worker.process.loop_factory", make_loop)
    ended = []

    async def main(stopping: asyncio.Event) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await stopping.wait()
            if where == "in_a_step":
                signal.raise_signal(signal.SIGINT)
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_signal(main)
    assert ended == [True]


@pytest.mark.own_session
def test_handlers_that_use_all_threads_of_the_loop_hold_up_no_other_job(
    client: rota.Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    registry, told = rota.Registry(), []
    are_used, go_on = threading.Event(), threading.Event()

    @registry.handler("uses_threads")
    async def uses_threads(job: rota.AsyncJob) -> None:
        calls = [asyncio.create_task(asyncio.to_thread(go_on.wait, 30)) for _ in range(64)]
        await asyncio.sleep(0)
        are_used.set()
        await asyncio.gather(*calls)

    @registry.handler("other")
    async def other(job: rota.AsyncJob) -> None:
        pass

    registry.on_end(lambda job, end: told.append(job.job_type))
    # A name is looked up when a connection is opened.
    worker = BackgroundWorker(make_conninfo(dsn, host="localhost"), registry)
    try:
        client.enqueue("uses_threads")
        assert are_used.wait(DEADLINE)
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'rota %' and datname = current_database()"
        )
        client.enqueue("other")
        wait_until(lambda: told == ["other"], "the end of the other job")
    finally:
        go_on.set()
        worker.stop()


@both_loops
def test_a_name_that_is_not_found_for_long_keeps_no_worker(
    client: rota.Client, dsn: str, monkeypatch: pytest.MonkeyPatch, make_loop: Any
) -> None:
    monkeypatch.setattr("rota.worker.process.loop_factory", make_loop)
    registry, look_up = rota.Registry(), socket.getaddrinfo
    has_begun, hangs, go_on = threading.Event(), threading.Event(), threading.Event()

    def look_up_in_vain(*arguments: Any, **named: Any) -> Any:
        hangs.set()
        go_on.wait(60)
        return look_up(*arguments, **named)

    @registry.handler("waits")
    async def waits(job: rota.AsyncJob) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", look_up_in_vain)
        has_begun.set()
        await asyncio.sleep(60)

    client.enqueue("waits", lease=timedelta(seconds=1))
    worker = BackgroundWorker(make_conninfo(dsn, host="localhost"), registry)
    try:
        assert has_begun.wait(DEADLINE)
        assert hangs.wait(DEADLINE)  # the heartbeats want a connection
        worker.stop(now=True)
        assert "rota-heartbeat" not in [thread.name for thread in threading.enumerate()]
    finally:
        go_on.set()
        worker.stop(now=True)


def test_a_job_can_terminate_a_process_that_it_has_forked(
    client: rota.Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    registry = rota.Registry()

    @registry.handler("forks")
    def forks(job: rota.Job) -> int | None:
        forking = multiprocessing.get_context("fork")
        is_begun = forking.Event()
        process = forking.Process(target=lambda: (is_begun.set(), signal.pause()))
        process.start()
        is_begun.wait(10)
        process.terminate()
        process.join(10)
        process.kill()
        return process.exitcode

    client.enqueue("forks")
    rota.Worker(dsn, registry, poll_interval=0.05).run(drain=True)

    ended = "select result from rota.finished_jobs"
    assert db.execute(ended).fetchone() == (-signal.SIGTERM,)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_a_process_that_a_job_has_forked_runs_no_other_job(
    client: rota.Client, db: psycopg.Connection[Any], dsn: str, ends: str, kind: str
) -> None:
    registry = rota.Registry()

    def fork() -> int:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # which ends it, if nothing else does
            if ends == "raises":
                sys.exit(7)
            return 0
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    async def fork_in_loop(job: rota.AsyncJob) -> int:
        return fork()

    registry.add("forks", fork_in_loop if kind == "async" else lambda job: fork())

    client.enqueue_many([{"job_type": "forks"}] * 2)
    rota.Worker(dsn, registry, concurrency=1, batch=2, poll_interval=0.05).run(drain=True)

    results = db.execute("select result from rota.finished_jobs").fetchall()
    assert results == [(int(ends == "raises"),)] * 2


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (0, "0"),
        (7, "7"),
        (-9, "-9, SIGKILL (by hand, or by the system for want of memory: see dmesg, and"),
        (-11, "-11, SIGSEGV (a crash, as of an extension in C: PYTHONFAULTHANDLER=1 shows"),
        (-15, "-15, SIGTERM"),
        (-50, "-50"),
    ],
)
def test_an_exit_code_tells_what_may_be_behind_it(code: int, told: str) -> None:
    assert told_of(code).startswith(told)
