"""Handlers that compute in a process of their own."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psycopg
import pytest

from client import computing
from rota import AsyncJob, Client, Job, Registry
from rota.worker.own_process import (
    LENGTH,
    Processes,
    RemoteTraceback,
    answer,
    packed,
    question_of,
)
from support.started_workers import BackgroundWorker, WorkerProcess
from support.waiting import wait_until

Drain = Callable[..., None]
TESTS = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


def _results(db: psycopg.Connection[Any]) -> list[Any]:
    return [r for (r,) in db.execute("select result from rota.finished_jobs order by id")]


@pytest.mark.slow
def test_a_function_runs_elsewhere_where_all_standard_files_are_closed(
    client: Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    """Else its pipes, and connections, get the numbers that it prints to."""
    computing.days_until.enqueue(client, day=date(2026, 1, 3))
    command = [sys.executable, "-m", "rota", "worker", "client.computing:registry", "--drain"]

    closed = " ".join(["exec", *map(shlex.quote, [*command, "-d", dsn]), "<&- >&- 2>&-"])
    done = subprocess.run(closed, shell=True, check=False, cwd=TESTS)

    assert done.returncode == 0
    assert [result["days"] for result in _results(db)] == [2]


@pytest.mark.slow
def test_a_function_runs_elsewhere_and_its_process_is_used_again(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("square")
    async def square(job: AsyncJob) -> Row:
        pids = [await job.run_in_process(computing.own_pid) for _ in range(2)]
        of_six = await job.run_in_process(computing.square, 6)
        decorated = await job.run_in_process(computing.six)
        return {"square": of_six, "decorated": decorated, "pids": pids}

    client.enqueue("square")
    drain(registry)

    (result,) = _results(db)
    assert (result["square"], result["decorated"]) == (36, 6)
    first, second = result["pids"]
    assert first == second != os.getpid()
    assert not Path(f"/proc/{first}").exists()  # it has left with the worker


@pytest.mark.slow
def test_an_idle_process_that_was_killed_is_not_asked() -> None:
    async def ask_twice() -> list[int]:
        processes = Processes()
        pids = [await processes.run(computing.own_pid, [], {})]
        (idle,) = processes._idle
        idle.kill()
        await idle.wait()
        pids.append(await processes.run(computing.own_pid, [], {}))
        await processes.close()
        return pids

    first, second = asyncio.run(ask_twice())

    assert first != second


@pytest.mark.slow
def test_a_child_that_a_function_forks_answers_no_call() -> None:
    async def ask() -> list[int]:
        processes = Processes()
        calls: list[tuple[Callable[..., int], Any]] = [
            (computing.fork_one_that_leaves, 3),
            (computing.fork_one_that_leaves, None),
            (computing.square, 5),
        ]
        answers = [await processes.run(function, [each], {}) for function, each in calls]
        await processes.close()
        return answers

    assert asyncio.run(ask()) == [3, 0, 25]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "args", "kind", "text"),
    [
        (computing.refuse, ["no such page"], LookupError, "no such page"),
        (computing.refuse_oddly, ["odd"], computing.Unpicklable, "^odd$"),
        (computing.refuse_for_good, ["odd"], RuntimeError, "computing.Unpicklable: odd"),
        (computing.refuse_without_a_text, ["odd"], RuntimeError, "Silent, whose text"),
        (computing.die, [], ChildProcessError, "ended with 7"),
        (computing.leave, [], SystemExit, "no more"),
        (computing.return_what_cannot_be_sent, [], Exception, "(?i)pickle"),
        (computing.square, [None], TypeError, "unsupported operand"),
        (lambda: None, [], TypeError, "give it a function of a module"),
    ],
)
def test_what_a_function_raises_fails_the_attempt(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    function: Callable[..., Any],
    args: list[Any],
    kind: type[BaseException],
    text: str,
) -> None:
    registry = Registry()
    seen: list[BaseException] = []

    @registry.handler("computes")
    async def computes(job: AsyncJob) -> int:
        try:
            with pytest.raises(kind, match=text) as caught:
                await job.run_in_process(function, *args)
            seen.append(caught.value)
        except BaseException as error:
            seen.append(error)
        return await job.run_in_process(computing.square, 3)  # the next call has a process

    client.enqueue("computes")
    drain(registry)

    assert isinstance(seen[0], kind)
    assert _results(db) == [9]
    if kind is computing.Unpicklable:
        assert vars(seen[0]) == {"more": "more"}
    if kind is LookupError:
        assert isinstance(seen[0].__cause__, RemoteTraceback)
        assert "in refuse\n    raise LookupError(text)" in str(seen[0].__cause__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "became"),
    [
        (computing.die_and_leave_a_child, "ended with 7"),
        (computing.close_all_and_leave_a_thread, "closed its files"),
    ],
)
def test_a_process_that_cannot_answer_is_not_waited_for(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    function: Callable[[], None],
    became: str,
) -> None:
    """Its child has the pipe for the answer, too; and a thread keeps it from its end."""
    registry = Registry()

    @registry.handler("computes")
    async def computes(job: AsyncJob) -> None:
        async with asyncio.timeout(20):
            await job.run_in_process(function)

    client.enqueue("computes", max_attempts=1)
    drain(registry)

    errors = db.execute("select last_error from rota.finished_jobs").fetchall()
    assert errors == [(f"the process of the handler {became}",)]


@pytest.mark.slow
def test_a_task_can_have_a_process_of_its_own(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    computing.days_until.enqueue(client, day=date(2026, 1, 31))
    computing.days_until.enqueue(client, day=date(2025, 1, 1))
    drain(computing.registry)

    query = "select status, result ->> 'days', result ->> 'pid' from rota.finished_jobs"
    (done, over) = db.execute(query + " order by id").fetchall()
    assert done[:2] == ("succeeded", "30")
    assert int(done[2]) != os.getpid()
    assert over[0] == "dead"
    assert computing.days_until(date(2026, 1, 2))["pid"] == os.getpid()  # just a call


def test_only_a_plain_function_without_a_job_can_have_a_process() -> None:
    registry = Registry()
    with pytest.raises(TypeError, match="without a job"):
        registry.task("a", own_process=True)(_with_job)
    with pytest.raises(TypeError, match="plain function"):
        registry.task("a", own_process=True)(_in_loop)


@pytest.mark.parametrize(
    "function", [Registry().is_async, lambda: None, partial(computing.square, 2)]
)
def test_a_function_that_has_no_name_of_its_own_is_refused_for_a_process(
    function: Any,
) -> None:
    with pytest.raises(TypeError, match=r"not a method or one|is made from a function"):
        Registry().task("a", own_process=True)(function)


@pytest.mark.parametrize("what", computing.RAISED)
def test_an_exception_arrives_as_what_it_is(what: str) -> None:
    question = question_of(computing.raise_it, [what], {})

    said = packed(answer(question[LENGTH.size :]))
    is_result, error, _ = ForkingPickler.loads(said[LENGTH.size :])

    raised = computing.RAISED[what]()
    assert (is_result, type(error)) == (False, type(raised))
    if what != "thing":
        assert (str(error), error.args, vars(error)) == (str(raised), raised.args, vars(raised))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["give_up_on", "retry_on"])
def test_an_exception_counts_as_it_does_in_a_thread(
    client: Client, db: psycopg.Connection[Any], drain: Drain, option: str
) -> None:
    registry = Registry()
    options: dict[str, Any] = {option: (computing.Unpicklable, computing.Coded)}
    options["backoff"] = {"kind": "fixed", "base_seconds": 3600}
    for name, own_process in (("thread", False), ("process", True)):
        task = registry.task(name, own_process=own_process, **options)(computing.raise_it)
        task.enqueue_many(client, [task.job(what) for what in computing.RAISED])
    drain(registry)

    query = (
        "select payload ->> 'what', status, attempts, error_type, last_error, "
        "run_at > now() + interval '30 minutes' from rota.job_runs "
        "where job_type = %s order by 1"
    )
    in_thread, in_process = (
        [row[:4] if row[0] == "thing" else row for row in db.execute(query, [name]).fetchall()]
        for name in ("thread", "process")
    )
    assert in_process == in_thread
    assert {row[1] for row in in_process} == {"queued", "failed", "dead"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"retry_on": ConnectionError}, "failed"),
        ({"give_up_on": Exception}, "failed"),
        ({"give_up_on": ChildProcessError}, "dead"),
    ],
)
def test_a_process_that_dies_is_no_exception_of_the_function(
    client: Client, db: psycopg.Connection[Any], drain: Drain, options: Any, status: str
) -> None:
    """The system may have ended it, as it may end the worker, whose jobs run again."""
    registry = Registry()
    task = registry.task("dies", own_process=True, **options)(computing.die)
    job_id = task.enqueue(client).job_id
    drain(registry)

    query = "select status from rota.job_runs where id = %s"
    assert db.execute(query, [job_id]).fetchone() == (status,)


def _with_job(job: Job, number: int) -> None: ...


async def _in_loop(number: int) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [computing.hang, computing.close_all_and_hang, computing.leave_a_daemon_and_hang],
)
def test_a_process_is_killed_when_its_job_is_cancelled(
    client: Client,
    db: psycopg.Connection[Any],
    dsn: str,
    tmp_path: Path,
    function: Callable[[str], None],
) -> None:
    registry = Registry()

    @registry.handler("hangs")
    async def hangs(job: AsyncJob) -> None:
        await job.run_in_process(function, str(tmp_path / "pid"))

    job = client.enqueue("hangs", lease="900 milliseconds")
    worker = BackgroundWorker(dsn, registry)
    try:
        wait_until((tmp_path / "pid").exists, "the start")
        pid = int((tmp_path / "pid").read_text().split()[0])
        client.cancel_job(job.job_id)
        query = "select status from rota.finished_jobs"
        wait_until(lambda: db.execute(query).fetchone() == ("cancelled",), "the cancel")
        assert not Path(f"/proc/{pid}").exists()
    finally:
        worker.stop(now=True)


def _pid(path: Path) -> int:
    return int(wait_until(path.read_text))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_worker(
    client: Client,
    start_worker: Callable[..., WorkerProcess],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    client.enqueue("computes", {"started": str(tmp_path / "pid")})
    worker = start_worker("--grace-period", "0.1")
    wait_until((tmp_path / "pid").exists, "the start")
    pid = _pid(tmp_path / "pid")

    worker.signal(number)

    worker.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the process")
