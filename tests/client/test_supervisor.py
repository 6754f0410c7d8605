"""Several processes of workers under one parent; recycling, reloading, health and places."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import psycopg
import pytest
from prometheus_client import REGISTRY, Metric
from prometheus_client.registry import Collector
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rota import Client, InvalidArgumentError, Job, Registry, RotaError, Worker
from rota.cli.supervisor import Child, Supervisor, _Files
from rota.cli.worker import serve_health
from rota.worker.process import peak_memory
from rota.worker.worker import run_together
from support.mutation import mutate
from support.started_workers import HANDLERS, BackgroundWorker, WorkerProcess, lives
from support.supervisor import Command, killing
from support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.slow

Start = Callable[..., WorkerProcess]
Run = Callable[..., str]
LEASED = "select count(*) from rota.jobs where status = 'running'"
DONE = "select count(*) from rota.finished_jobs where status = 'succeeded'"
PIDS = "select coalesce(array_agg(pid order by pid), '{}') from rota.workers"


def _value(db: psycopg.Connection[Any], query: Any) -> Any:
    row = db.execute(query).fetchone()
    assert row is not None
    return row[0]


def _pids(db: psycopg.Connection[Any], count: int) -> list[int]:
    """Wait until so many processes have said that they work, and return their ids."""

    def look() -> list[int] | None:
        pids: list[int] = _value(db, PIDS)
        return pids if len(pids) == count else None

    found: list[int] = wait_until(look, f"{count} workers")
    return found


@pytest.mark.slow
def test_processes_share_the_work_and_leave_with_their_parent(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    parent = start_worker("--processes", "2", "--concurrency", "1", "--name", "mine")
    pids = _pids(db, 2)
    assert parent.process.pid not in pids
    client.enqueue_many([{"job_type": "polite", "payload": {"seconds": 60}}] * 2)
    wait_until(lambda: _value(db, LEASED) == 2, "both at work")
    names = db.execute("select worker from rota.workers order by 1").fetchall()
    assert names == [("mine:0",), ("mine:1",)]

    parent.signal(signal.SIGTERM)
    parent.wait_for_line("stops: waits")  # two at once may be one to the system
    parent.signal(signal.SIGTERM)

    assert parent.wait() == 0
    assert [pid for pid in pids if lives(pid)] == []
    assert (
        db.execute("select status, attempts from rota.jobs").fetchall() == [("queued", 0)] * 2
    )


@pytest.mark.slow
def test_a_process_that_is_killed_is_followed_by_another(
    db: psycopg.Connection[Any], start_worker: Start
) -> None:
    parent = start_worker("--processes", "2")
    pids = _pids(db, 2)

    os.kill(pids[0], signal.SIGKILL)

    wait_until(lambda: set(_value(db, PIDS)) - set(pids), "a successor")
    assert "ended with -9, SIGKILL (by hand, or by the system" in parent.wait_for_line("ended")
    parent.signal(signal.SIGTERM)
    assert parent.wait() == 0


@pytest.mark.slow
def test_processes_leave_when_their_parent_is_killed(
    db: psycopg.Connection[Any], start_worker: Start
) -> None:
    parent = start_worker("--processes", "2")
    pids = _pids(db, 2)

    parent.signal(signal.SIGKILL)

    wait_until(lambda: not any(map(lives, pids)), "the end of the children")
    assert _value(db, PIDS) == []  # they have taken leave


def test_jobs_have_their_grace_period_however_often_their_process_is_told_to_leave(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    """As by systemd and the parent, and when that is killed once for each of its threads."""
    parent = start_worker("--processes", "1", "--reload")
    (pid,) = _pids(db, 1)
    client.enqueue("sleep", {"seconds": 2})
    parent.wait_for_line("claimed")

    os.kill(pid, signal.SIGTERM)
    parent.wait_for_line("stops: waits")
    parent.signal(signal.SIGKILL)

    wait_until(lambda: not lives(pid), "the end of the child")
    assert _value(db, DONE) == 1


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_each_process_once(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    """The terminal signals the whole group; a second signal would skip the grace period."""
    client.enqueue("sleep", {"seconds": 2})
    parent = start_worker("--processes", "1", "--reload")
    wait_until(lambda: _value(db, LEASED) == 1, "a job at work")
    (pid,) = _pids(db, 1)
    assert os.getpgid(pid) != os.getpgid(parent.process.pid)

    parent.signal(signal.SIGINT)

    assert parent.wait() == 0
    assert _value(db, DONE) == 1


def test_a_handler_that_reads_from_the_terminal_stops_no_process(
    client: Client, db: psycopg.Connection[Any], dsn: str, tmp_path: Path
) -> None:
    """Processes in the background of a terminal are stopped when they read from it."""
    # A terminal that is gone ends them, also where nohup has begun the tests.
    spawn = "signal.signal(signal.SIGHUP, signal.SIG_DFL); pty.spawn(sys.argv[1:])"
    in_terminal = [sys.executable, "-c", f"import pty, signal, sys; {spawn}"]
    worker = [sys.executable, "-m", "rota", "worker", "sample_handlers", "--processes", "2"]
    client.enqueue("asks", max_attempts=1)

    with killing() as started:
        command = [*in_terminal, *worker, "-d", dsn]
        started.append(Command(command, HANDLERS, {}, tmp_path / "log"))
        ended = "select error_type from rota.finished_jobs"
        wait_until(lambda: db.execute(ended).fetchall() == [("OSError",)], "the end of the job")


def test_a_signal_that_comes_while_a_process_starts_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What a child does between the fork and its program, its parent does not know it yet.
    monkeypatch.setattr("rota.cli.supervisor.die_with", os.kill)
    command = [sys.executable, "-c", "import time; time.sleep(30); raise SystemExit(5)"]

    # It had no job yet, so whoever stops it has not made it fail.
    assert Supervisor(command, 1, reload=False, is_done=False).run() == 0


def test_a_process_that_is_signalled_together_with_its_parent_has_not_failed() -> None:
    """As by systemd, while it imports."""
    command = ["sh", "-c", "kill -TERM $PPID $$; sleep 30"]

    assert Supervisor(command, 1, reload=False, is_done=False).run() == 0


def test_a_process_that_leaves_before_its_second_signal_has_not_failed() -> None:
    child = Child([sys.executable, "-c", "import time; time.sleep(30)"], 0)
    child.start_if_due()
    codes = []

    def has_ended() -> bool:
        codes.append(child.poll())
        return not child.is_running

    child.stop(2)
    child.tell()
    child.tell()

    wait_until(has_ended, "its end")
    assert codes[-1] == 0


def test_a_process_that_ends_well_but_unasked_is_not_started_again_at_once() -> None:
    """As one does whose handler calls os._exit(0), with each job anew."""
    child = Child([sys.executable, "-c", ""], 0)
    child.start_if_due()
    codes = []

    def has_ended() -> bool:
        codes.append(child.poll())
        return not child.is_running

    wait_until(has_ended, "its end")
    child.start_if_due()

    assert codes[-1] == 0
    assert child.has_failed
    assert not child.is_running


@pytest.mark.slow
def test_a_process_that_cannot_be_started_is_tried_again_and_ends_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"  # as of an environment that a deployment replaces
    log = tmp_path / "log"
    code = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')"
    python.symlink_to(sys.executable)
    command = [str(python), "-c", f"{code}; time.sleep(600)", str(log)]
    supervisor, codes = Supervisor(command, 2, reload=False, is_done=False), []
    thread = threading.Thread(target=lambda: codes.append(supervisor.run()))

    def pids(count: int) -> list[int]:
        found: list[int] = wait_until(
            lambda: (
                log.exists()
                and len(lines := log.read_text().split()) == count
                and [int(line) for line in lines]
            )
        )
        return found

    thread.start()
    try:
        first, other = pids(2)
        python.unlink()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "cannot be started: [Errno 2]" in caplog.text, "a warning")
        python.symlink_to(sys.executable)
        pids(3)
        assert lives(other)
    finally:
        supervisor._stop(False)
        thread.join(DEADLINE)
    assert codes == [0]


@pytest.mark.slow
def test_processes_that_drain_end_and_have_no_successors(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    client.enqueue_many([{"job_type": "quick"}] * 50)
    assert start_worker("--processes", "2", "--drain").wait() == 0
    assert _value(db, DONE) == 50


@pytest.mark.slow
def test_a_registry_that_cannot_be_imported_is_told_once(dsn: str) -> None:
    command = [sys.executable, "-m", "rota", "worker", "no_such_module", "--processes", "2"]
    done = subprocess.run(
        command, env={**os.environ, "DATABASE_URL": dsn}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "cannot import no_such_module" in done.stderr
    assert "started again" not in done.stderr


@pytest.mark.slow
def test_a_registry_that_cannot_be_imported_any_more_ends_no_other_process(
    client: Client, db: psycopg.Connection[Any], dsn: str, tmp_path: Path
) -> None:
    good = "import rota\nregistry = rota.Registry()\nregistry.add('a', print)\n"
    module, log = tmp_path / "deployed.py", tmp_path / "log"
    module.write_text(good)
    command = [sys.executable, "-m", "rota", "worker", "deployed", "--processes", "2"]
    command += ["--max-jobs", "1"]
    environment = {**os.environ, "DATABASE_URL": dsn, "PYTHONDONTWRITEBYTECODE": "1"}

    with (
        log.open("w") as to,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=to) as parent,
    ):
        try:
            before = _pids(db, 2)
            module.write_text("def (")
            client.enqueue("a")
            wait_until(lambda: "ended with 2, restarting it" in log.read_text())
            (other,) = _pids(db, 1)
            module.write_text(good)
            after = _pids(db, 2)
        finally:
            parent.terminate()
        assert parent.wait(30) == 0
    assert other in before
    assert other in after


@pytest.mark.slow
def test_after_its_jobs_a_process_makes_room_for_another(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    # Jobs that run on longer than the grace period are no reason to lose an attempt.
    options = ("--max-jobs", "1", "--grace-period", "0.1", "--concurrency", "2")
    parent = start_worker("--processes", "1", "--reload", *options)
    (first,) = _pids(db, 1)
    client.enqueue_many(
        [{"job_type": "sleep", "payload": {"seconds": 2}}, {"job_type": "quick"}]
    )
    wait_until(lambda: _value(db, DONE) == 2, "both jobs")
    wait_until(lambda: _value(db, PIDS) not in ([], [first]), "another process")

    assert parent.lines("makes room")
    attempts = "select array_agg(attempts) from rota.finished_jobs"
    assert _value(db, attempts) == [1, 1]
    parent.signal(signal.SIGTERM)
    assert parent.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("option", "done"), [("--drain", 8), ("--once", 2)])
def test_processes_that_make_room_drain_all_and_claim_once(
    client: Client,
    db: psycopg.Connection[Any],
    start_worker: Start,
    option: str,
    done: int,
) -> None:
    client.enqueue_many([{"job_type": "sleep", "payload": {"seconds": 0.3}}] * 8)
    options = ("--processes", "2", "--concurrency", "1", "--max-jobs", "1")
    worker = start_worker(option, *options)

    assert worker.wait() == 0
    assert _value(db, DONE) == done


@pytest.mark.slow
def test_a_process_that_used_much_memory_leaves(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    client.enqueue("fill", {"megabytes": 300})
    worker = start_worker("--max-memory", "250")
    assert worker.wait() == 0
    assert "of memory were in use" in worker.log.read_text()
    assert _value(db, "select array_agg(job_type) from rota.finished_jobs") == ["fill"]


@pytest.mark.slow
def test_a_limit_below_what_a_process_uses_at_first_stops_all(start_worker: Start) -> None:
    worker = start_worker("--max-memory", "5", "--processes", "2")
    assert worker.wait() == 2
    assert "--max-memory 5 is no more than the" in worker.log.read_text()


def test_a_limit_below_what_a_lifespan_uses_is_told(client: Client, dsn: str) -> None:
    registry = Registry()
    registry.add("plain", lambda job: None)

    @registry.lifespan
    async def model() -> AsyncIterator[dict[str, Any]]:
        yield {"model": b"x" * 100_000_000}

    client.enqueue("plain")
    worker = Worker(dsn, registry, max_memory=peak_memory() + 20)

    with pytest.raises(InvalidArgumentError, match="MB that the process uses before its first"):
        worker.run(drain=True)


@pytest.mark.slow
def test_reload_starts_again_when_a_file_changes(
    client: Client, db: psycopg.Connection[Any], dsn: str, tmp_path: Path
) -> None:
    code = """
import rota
registry = rota.Registry()
@registry.handler("tell")
def tell(job):
    return {0}
"""
    module = tmp_path / "fresh.py"
    module.write_text(code.format(1))
    command = [
        sys.executable,
        "-m",
        "rota",
        "worker",
        "fresh",
        "--reload",
        "--poll-interval",
        "0.1",
    ]
    environment = {**os.environ, "DATABASE_URL": dsn, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as parent:
        try:
            results = "select array_agg(result order by id) from rota.finished_jobs"
            for number in (1, 22):
                module.write_text(code.format(number))
                _wait_for_result(client, db, number)
            assert _value(db, results)[0] == 1
        finally:
            parent.terminate()
        assert parent.wait(30) == 0


def test_reload_looks_at_a_package_with_a_private_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rota.cli.supervisor.RELOAD_INTERVAL", 0.0)
    package = tmp_path / "_shared"
    package.mkdir()
    files = _Files()

    (package / "__init__.py").touch()

    assert files.have_changed()
    assert not files.have_changed()


@pytest.mark.slow
def test_reload_outlives_a_file_that_cannot_be_imported(dsn: str, tmp_path: Path) -> None:
    good = "import rota\nregistry = rota.Registry()\nregistry.add('a', print)\n"
    module = tmp_path / "half.py"
    module.write_text(good)
    command = [sys.executable, "-m", "rota", "worker", "half", "--reload"]
    environment = {**os.environ, "DATABASE_URL": dsn, "PYTHONDONTWRITEBYTECODE": "1"}
    log = tmp_path / "log"

    def logged(text: str, times: int = 1) -> None:
        wait_until(lambda: log.read_text().count(text) >= times, text)

    with (
        log.open("w") as to,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=to) as parent,
    ):
        try:
            logged(" started ")
            module.write_text("def (")
            logged("waits for the next change")
            module.write_text(good)
            logged(" started ", times=2)
        finally:
            parent.terminate()
        assert parent.wait(30) == 0


def test_a_process_is_told_twice_at_most(tmp_path: Path) -> None:
    """As by changes of files while a job runs: the third signal would kill it."""
    script = """
    trap 'touch first' TERM
    trap 'trap - INT; touch second' INT
    touch ready
    until test -e go; do sleep 0.01; done
    exit 7
    """
    child = Child(["sh", "-c", f"cd {tmp_path}; {script}"], 0)
    child.start_if_due()
    for done in ("ready", "first", "second"):
        wait_until((tmp_path / done).exists, done)
        child.stop(3)
        child.tell()
    (tmp_path / "go").touch()

    assert wait_until(child.poll, "the end") == 7


def _wait_for_result(client: Client, db: psycopg.Connection[Any], wanted: int) -> None:
    """Enqueue job after job until one is run by the new code."""

    def try_it() -> bool:
        job = client.enqueue("tell")
        query = f"select result from rota.finished_jobs where id = {job.job_id}"
        wait_until(lambda: db.execute(query).fetchone(), "the job")
        return bool(_value(db, query) == wanted)

    wait_until(try_it, f"the result {wanted}")


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_tells_live_ready_and_figures(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    client.enqueue_many([{"job_type": "quick"}] * 3)
    worker = start_worker("--health", "0", "--concurrency", "7")
    told = worker.wait_for_line("health")
    port = int(re.search(r":(\d+)/ready", told)[1])  # type: ignore[index]

    wait_until(lambda: _get(port, "/ready") == (200, "ready\n"), "readiness")
    assert _get(port, "/live") == (200, "live\n")
    assert _get(port, "/nothing")[0] == 404
    counted = 'rota_jobs_total{job_type="quick",outcome="succeeded",queue="default"} 3.0'
    wait_until(lambda: counted in _get(port, "/metrics")[1], "the figures")
    figures = _get(port, "/metrics")[1]
    assert "rota_places 7.0" in figures
    assert "rota_is_ready 1.0" in figures
    assert 'rota_job_seconds_count{job_type="quick",queue="default"} 3.0' in figures

    with socket.create_connection(("127.0.0.1", port)) as rude:
        rude.sendall(b"\r\n" * 5000)  # neither a request nor short
    assert _get(port, "/live")[0] == 200
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_figures_that_hang_keep_neither_probes_nor_the_end_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_go_on = threading.Event()

    class Hanging(Collector):
        def describe(self) -> list[Metric]:
            return []

        def collect(self) -> list[Metric]:
            may_go_on.wait(DEADLINE)
            return []

    async def probe() -> None:
        async with serve_health("127.0.0.1", 0, []):
            port = int(re.search(r":(\d+)/ready", caplog.text)[1])  # type: ignore[index]
            scrapes = [asyncio.to_thread(_get, port, "/metrics") for _ in range(2)]
            waiting = asyncio.gather(*scrapes)
            while "rota-metrics" not in [each.name for each in threading.enumerate()]:
                await asyncio.sleep(0)
            assert await asyncio.to_thread(_get, port, "/live") == (200, "live\n")
            assert [each.name for each in threading.enumerate()].count("rota-metrics") == 1
            may_go_on.set()
            assert [code for code, _ in await waiting] == [200, 200]

    hanging = Hanging()
    REGISTRY.register(hanging)
    try:
        with caplog.at_level("INFO", logger="rota"):
            asyncio.run(probe())
    finally:
        REGISTRY.unregister(hanging)


def test_health_at_an_address_of_ipv6_is_told_as_a_url(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def url() -> SplitResult:
        async with serve_health("::1", 0, []):
            return urlsplit(re.search(r"http://\S+", caplog.text)[0])  # type: ignore[index]

    with caplog.at_level("INFO", logger="rota"):
        told = asyncio.run(url())

    assert (told.hostname, told.path) == ("::1", "/ready")


def test_a_port_that_is_taken_is_named(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = run("worker", "client.sample_handlers", "--health", str(port), "--once", code=1)
    assert f"another process already uses port {port}" in told


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--health", "65536"], "PORT or HOST:PORT, got '65536'"),
        (["--health", "0.0.0.0:" + "9" * 5000], "PORT or HOST:PORT, got '0.0.0.0:999"),
        (["--health", "65534", "--processes", "3"], "of 3 processes has no port 65536"),
    ],
)
def test_a_port_that_does_not_exist_is_named(
    run: Run, options: list[str], problem: str
) -> None:
    assert problem in run("worker", "client.sample_handlers", *options, code=2)


def test_a_worker_is_not_ready_while_its_database_is_away(dsn: str) -> None:
    registry = Registry()
    registry.add("plain", lambda job: None)
    assert not Worker(dsn, registry).is_ready  # it has not begun
    name = conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as admin:
        background = BackgroundWorker(dsn, registry)
        worker = background.worker
        try:
            wait_until(lambda: worker.is_ready, "readiness")
            admin.execute(f"alter database {name} allow_connections false")
            ended = "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s"
            admin.execute(ended, [name])
            wait_until(lambda: not worker.is_ready, "the outage")
            admin.execute(f"alter database {name} allow_connections true")
            wait_until(lambda: worker.is_ready, "the return")
        finally:
            admin.execute(f"alter database {name} allow_connections true")
            background.stop()
        assert not worker.is_ready


@pytest.mark.parametrize("function", ["claim_jobs", "heartbeat_jobs"])
def test_a_worker_whose_calls_are_refused_is_not_ready(
    function: str, dsn: str, db: psycopg.Connection[Any]
) -> None:
    """The database answers, but the worker claims no jobs."""
    registry, ended = Registry(), threading.Event()
    registry.add("waits", lambda job: ended.wait())
    Client(db).enqueue("waits", lease=timedelta(seconds=3))
    db.execute("create role may_work")
    background = None
    try:
        grants = db.execute("select rota.grant_statements('worker', 'may_work')").fetchall()
        for (grant,) in grants:
            db.execute(grant)
        background = BackgroundWorker(make_conninfo(dsn, options="-c role=may_work"), registry)
        worker = background.worker
        wait_until(lambda: worker.is_ready, "readiness")
        db.execute(f"revoke execute on function rota.{function} from may_work")
        wait_until(lambda: not worker.is_ready, "the refusal")
        db.execute(f"grant execute on function rota.{function} to may_work")
        wait_until(lambda: worker.is_ready, "the return")
    finally:
        ended.set()
        if background is not None:
            background.stop()
        db.execute("drop owned by may_work; drop role may_work")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where systemd would hear of the workers that are started."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "of@systemd"))
        listening.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "of@systemd"))
        yield listening


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
def test_systemd_hears_that_a_worker_is_ready_and_that_it_stops(
    db: psycopg.Connection[Any],
    start_worker: Start,
    service: socket.socket,
    options: list[str],
) -> None:
    worker = start_worker(*options)
    assert service.recv(100) == b"READY=1"
    assert _value(db, PIDS)
    _pids(db, 2 if options else 1)
    worker.signal(signal.SIGTERM)
    assert service.recv(100) == b"STOPPING=1"
    assert worker.wait() == 0
    service.setblocking(False)
    with pytest.raises(BlockingIOError):
        service.recv(100)


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
def test_a_watchdog_hears_of_a_worker_as_long_as_its_loop_turns(
    client: Client,
    db: psycopg.Connection[Any],
    start_worker: Start,
    service: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    """systemd would end a silent worker; of several the parent ends only that which hangs."""
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    worker = start_worker(*options)
    pids = _pids(db, 2 if options else 1)
    heard = [service.recv(100) for _ in range(4)]
    assert sorted(heard) == [b"READY=1"] + [b"WATCHDOG=1"] * 3

    client.enqueue("block_loop", {"seconds": 60}, max_attempts=1)
    if options:
        assert "-6, SIGABRT" in worker.wait_for_line("ended with")
        assert "nothing for 4 s" in worker.wait_for_line("killing")
        wait_until(lambda: set(_value(db, PIDS)) - set(pids), "a successor")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    else:
        wait_until(lambda: _value(db, LEASED) == 1, "the job at work")
        service.settimeout(4)
        with pytest.raises(TimeoutError):
            list(iter(lambda: service.recv(100), b""))


def test_a_watchdog_of_another_process_ends_no_worker(
    start_worker: Start, service: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a script that systemd has started, and which starts this."""
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    worker = start_worker("--processes", "2")
    assert service.recv(100) == b"READY=1"  # each tells that its loop turns before that
    worker.signal(signal.SIGTERM)

    assert worker.wait() == 0
    assert worker.lines("killing") == []


def test_systemd_hears_nothing_of_a_worker_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    registry.add("plain", lambda job: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with pytest.raises(psycopg.OperationalError):
            run_together([Worker("host=127.0.0.1 port=1", registry)])
        service.setblocking(False)
        with pytest.raises(BlockingIOError):
            service.recv(100)


def test_a_queue_with_its_own_places_takes_none_of_the_others(
    client: Client, db: psycopg.Connection[Any], dsn: str, run: Run
) -> None:
    """One place for mail, two for the rest: a slow mail keeps no other job from starting."""
    registry = Registry()
    running: dict[str, int] = {"mail": 0, "default": 0}
    most = dict(running)
    others_done = threading.Event()
    lock = threading.Lock()

    @registry.handler("count")
    def count(job: Job) -> None:
        with lock:
            running[job.queue] += 1
            most[job.queue] = max(most[job.queue], running[job.queue])
        if job.queue == "mail":
            assert others_done.wait(30)
        elif job.payload.get("is_last"):
            others_done.set()
        with lock:
            running[job.queue] -= 1

    client.enqueue_many([{"job_type": "count", "queue": "mail"}] * 4)
    client.enqueue_many([{"job_type": "count"}] * 20)
    client.enqueue("count", {"is_last": True}, priority=10)
    workers = [
        Worker(dsn, registry, queues=["default"], concurrency=2),
        Worker(dsn, registry, queues=["mail"], concurrency=1),
    ]
    run_together(workers, drain=True)

    assert most["mail"] == 1
    assert most["default"] <= 2
    assert _value(db, DONE) == 25


def test_workers_of_a_process_drain_what_they_enqueue_for_each_other(
    client: Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    """Each would find nothing due before the other has enqueued it."""
    registry = Registry()

    @registry.handler("hop")
    def hop(job: Job) -> None:
        time.sleep(0.1)
        if left := job.payload["left"]:
            queue = {"default": "mail", "mail": "default"}[job.queue]
            with psycopg.connect(dsn) as connection:
                Client(connection).enqueue("hop", {"left": left - 1}, queue=queue)

    client.enqueue("hop", {"left": 4})
    began_at = time.monotonic()
    run_together([Worker(dsn, registry, queues=[q]) for q in ("default", "mail")], drain=True)

    assert _value(db, DONE) == 5
    # Who waits for the other is told when to look.
    assert time.monotonic() - began_at < 5


def test_places_are_given_on_the_command_line(
    client: Client, db: psycopg.Connection[Any], start_worker: Start, run: Run
) -> None:
    client.enqueue_many(
        [{"job_type": "quick", "queue": queue} for queue in ("a", "b", "mail")] * 2
    )
    worker = start_worker("--queue", "a", "--queue", "mail=2", "--queue", "b", "--drain")
    assert worker.wait() == 0
    assert _value(db, DONE) == 6
    started = sorted(line.partition("queues=")[2] for line in worker.lines("started"))
    assert [line.split()[0] for line in started] == ["a,b", "mail"]
    assert [line.rpartition("=")[2] for line in started] == ["4", "2"]

    for word in ("mail=", "mail=x", "mail=-1"):
        told = run("worker", "client.sample_handlers", "--queue", word, code=2)
        assert f"--queue is NAME or NAME=PLACES, got {word!r}" in told
    for twice in (["mail=2", "mail"], ["mail", "mail=2"], ["mail", "mail"]):
        words = [word for queue in twice for word in ("--queue", queue)]
        told = run("worker", "client.sample_handlers", *words, code=2)
        assert "--queue mail is given twice" in told
    told = run("worker", "client.sample_handlers", "--queue", "mail=0", code=2)
    assert "concurrency must be" in told


def test_one_url_to_listen_to_does_not_go_with_several_databases(run: Run) -> None:
    """In all but one of them no notification would arrive, as though there was a pooler."""
    words = [f"--database=postgresql://127.0.0.1:1/{name}" for name in "ab"]

    told = run("worker", "client.sample_handlers", *words, "--listen-url", "a", code=2)

    assert "--listen-url" in told


def test_a_worker_that_makes_room_takes_the_others_along(
    client: Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    """A process that stayed for its other queue would serve this one no more."""
    registry = Registry()
    has_begun = threading.Event()

    @registry.handler("count")
    def count(job: Job) -> None:
        if job.queue == "mail":
            has_begun.set()
            time.sleep(0.5)  # which may end, without a limit
        else:
            assert has_begun.wait(30)

    client.enqueue("count", queue="mail")
    client.enqueue("count")
    workers = [
        Worker(dsn, registry, queues=["default"], max_jobs=1),
        Worker(dsn, registry, queues=["mail"], max_jobs=1000, grace_period=0.0),
    ]
    running = threading.Thread(target=run_together, args=[workers], daemon=True)
    running.start()
    running.join(DEADLINE)
    has_left = not running.is_alive()
    for worker in workers:
        worker.stop()
    running.join(DEADLINE)

    assert has_left
    assert _value(db, DONE) == 2


def test_a_process_makes_room_after_the_jobs_of_all_its_workers(
    client: Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    registry = Registry()
    registry.add("count", lambda job: time.sleep(0.01))
    queues = ("a", "b", "c")
    for queue in queues:
        client.enqueue_many([{"job_type": "count", "queue": queue}] * 40)
    run_together(
        [Worker(dsn, registry, queues=[q], concurrency=1, max_jobs=30) for q in queues]
    )

    assert 30 <= _value(db, DONE) < 60


def test_a_worker_that_fails_stops_the_others(dsn: str) -> None:
    registry = Registry()
    registry.add("plain", lambda job: None)
    workers = [Worker(dsn, registry), Worker("host=127.0.0.1 port=1", registry)]
    with pytest.raises(psycopg.OperationalError):
        run_together(workers)


def test_a_worker_tells_that_the_database_has_another_version(
    db: psycopg.Connection[Any], dsn: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    registry = Registry()
    registry.add("plain", lambda job: None)
    Worker(dsn, registry).run(drain=True)
    assert "upgrade the worker" not in caplog.text

    monkeypatch.setattr("rota.worker.worker.__version__", "0.1.9")
    mutate(db, "report_worker", "if version ~ '^0[.]1[.]' then", "if false then")
    Worker(dsn, registry).run(drain=True)
    assert "and this worker 0.1.9: upgrade the worker" in caplog.text

    monkeypatch.setattr("rota.worker.worker.__version__", "0.2.9")
    Worker(dsn, registry).run(drain=True)
    assert "and this worker 0.2.9: upgrade the database (rota install)" in caplog.text


@pytest.mark.parametrize(
    ("version", "error", "text"),
    [
        ("9.9.9", RotaError, "and this worker needs 9.9.9: upgrade the database first"),
        ("0.1.0", psycopg.errors.FeatureNotSupported, "this database needs 0.2.0 or newer"),
    ],
)
def test_a_worker_and_a_database_that_do_not_go_together_say_so_at_the_start(
    dsn: str, monkeypatch: pytest.MonkeyPatch, version: str, error: type[Exception], text: str
) -> None:
    registry = Registry()
    registry.add("plain", lambda job: None)
    monkeypatch.setattr("rota.worker.worker.__version__", version)
    monkeypatch.setattr("rota.worker.maintenance.__version__", version)

    with pytest.raises(error, match=text):
        Worker(dsn, registry).run(drain=True)
