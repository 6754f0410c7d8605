"""Worker processes that are stopped, killed, frozen and cut off."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rota import Client
from support.started_workers import WorkerProcess
from support.supervisor import Command, killing
from support.waiting import wait_until

Start = Callable[..., WorkerProcess]
pytestmark = pytest.mark.slow
RUNNING = "select count(*) from rota.jobs where status = 'running'"
NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
DEAD = "select count(*) from rota.finished_jobs where status = 'dead'"


def _count(db: psycopg.Connection[Any], query: Any) -> int:
    row = db.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def _wait_for_running(db: psycopg.Connection[Any], count: int) -> None:
    wait_until(lambda: _count(db, RUNNING) == count, f"{count} running jobs")


@pytest.mark.parametrize("kind", ["sleep", "async_in_thread", "async_stubborn"])
def test_a_handler_that_does_not_end_goes_with_its_process(
    client: Client, db: psycopg.Connection[Any], start_worker: Start, kind: str
) -> None:
    client.enqueue(kind, {"seconds": 60})
    worker = start_worker("--grace-period", "0.1")
    _wait_for_running(db, 1)

    worker.signal(signal.SIGTERM)

    assert worker.process.wait(20) == 3
    assert db.execute("select status, attempts from rota.jobs").fetchall() == [("queued", 0)]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("leaves_thread", "leaves these threads: beacon"),
        ("leaves_process", "leaves these processes: beacon"),
    ],
)
def test_what_a_job_has_left_keeps_no_process(
    client: Client, start_worker: Start, kind: str, told: str
) -> None:
    client.enqueue(kind)
    worker = start_worker("--max-jobs", "1")

    assert worker.wait() == 3
    assert told in worker.log.read_text()


def test_texts_of_jobs_cannot_command_the_terminal_that_shows_the_log(
    client: Client, start_worker: Start
) -> None:
    client.enqueue("fail", {"text": "a\x1b[2J\x1b]0;b\x07\rc\u202ed\x9b1m"}, max_attempts=1)

    worker = start_worker("--drain", "--name", "w\x1b[2J")

    assert worker.wait() == 0
    told = worker.log.read_bytes().decode()  # as it is, with each end of a line
    assert "ValueError: a\\x1b[2J" in told
    assert told.replace("\n", "").isprintable()


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
def test_a_log_that_nobody_reads_holds_up_no_job(
    client: Client,
    db: psycopg.Connection[Any],
    start_worker: Start,
    tmp_path: Path,
    options: list[str],
) -> None:
    """As of a journal that hangs.  When it goes on, it is told that lines are missing."""
    log = tmp_path / "worker0.log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    long = {"job_type": "fail", "max_attempts": 1, "payload": {"text": "x" * 100_000}}
    worker = start_worker(*options)

    client.enqueue_many([long] * 60)
    wait_until(lambda: _count(db, DEAD) == 60, "the end of the jobs")
    with open(reader, "rb", buffering=0) as told:
        wait_until(lambda: b"lines of the log are lost" in (told.read(1_000_000) or b""))
        client.enqueue_many([long] * 60)
        wait_until(lambda: _count(db, DEAD) == 120, "the end of the jobs")
        worker.signal(signal.SIGTERM)

        assert worker.wait() == 0


def test_a_log_that_another_program_has_unblocked_misses_no_line(
    client: Client, db: psycopg.Connection[Any], start_worker: Start, tmp_path: Path
) -> None:
    log = tmp_path / "worker0.log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    long = {"job_type": "fail", "max_attempts": 1, "payload": {"text": "x" * 100_000}}
    start_worker("--concurrency", "1")

    client.enqueue_many([{"job_type": "unblocks"}, *[long] * 10])
    wait_until(lambda: _count(db, DEAD) == 10, "the end of the jobs")

    told = b""
    with open(reader, "rb", buffering=0) as lines:
        while told.count(b"dead job_type=fail") < 10:
            told += wait_until(lambda: lines.read(1_000_000), "the next lines")
    assert b"are lost" not in told


def test_sigterm_ends_the_first_process_of_a_container_while_it_imports(
    dsn: str, tmp_path: Path
) -> None:
    """Linux ignores there a signal that has no handler, so the worker went on and claimed."""
    if subprocess.run([*NAMESPACE, "true"], check=False).returncode != 0:
        pytest.skip("this machine makes no namespaces")
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "pathlib.Path('begun').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
    )
    command = [*NAMESPACE, sys.executable, "-m", "rota", "worker", "-d", dsn, "slow"]
    with killing() as started:
        started.append(outside := Command(command, tmp_path, {}, tmp_path / "log"))
        wait_until((tmp_path / "begun").exists, "the import")
        first = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text()

        os.kill(int(first), signal.SIGTERM)

        assert outside.wait() == 0


def test_sigterm_gives_a_batch_back_within_a_second(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    sleep = {"job_type": "sleep", "payload": {"seconds": 3}}
    client.enqueue_many([sleep] * 100)
    worker = start_worker("--concurrency", "2", "--batch", "100")
    _wait_for_running(db, 100)

    worker.signal(signal.SIGTERM)
    asked_at = time.monotonic()
    _wait_for_running(db, 2)
    took = time.monotonic() - asked_at

    assert took < 1.5  # a second, and what a busy machine adds
    assert worker.wait() == 0
    assert _count(db, "select count(*) from rota.finished_jobs") == 2
    untouched = "select count(*) from rota.jobs where status = 'queued' and attempts = 0"
    assert _count(db, untouched) == 98
    assert len(worker.lines("released")) == 98


@pytest.mark.parametrize("kind", ["sleep", "async_sleep", "block_loop"])
def test_heartbeats_go_on_after_sigterm(
    client: Client, db: psycopg.Connection[Any], start_worker: Start, kind: str
) -> None:
    lease = timedelta(seconds=1.5)
    job_id = client.enqueue(kind, {"seconds": 5}, lease=lease).job_id
    worker = start_worker()
    worker.wait_for_line("claimed")

    worker.signal(signal.SIGTERM)
    while worker.process.poll() is None:
        client.sweep_stale_leases()
        time.sleep(0.1)

    row = db.execute("select id, status, attempts from rota.finished_jobs").fetchone()
    assert row == (job_id, "succeeded", 1)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_worker_stops_when_its_terminal_is_closed_but_after_nohup(
    client: Client, db: psycopg.Connection[Any], start_worker: Start, is_ignored: bool
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        worker = start_worker()
    finally:
        signal.signal(signal.SIGHUP, before)
    client.enqueue("sleep", {"seconds": 0.5})
    _wait_for_running(db, 1)

    worker.signal(signal.SIGHUP)

    wait_until(lambda: _count(db, "select count(*) from rota.finished_jobs") == 1)
    if is_ignored:
        client.enqueue("sleep", {"seconds": 0})
        wait_until(lambda: _count(db, "select count(*) from rota.finished_jobs") == 2)
        worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_second_signal_stops_at_once(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    for kind in ("sleep", "async_sleep", "polite"):
        client.enqueue(kind, {"seconds": 60})
    worker = start_worker()
    # In the database they run before the worker has the answer, without which it has none.
    wait_until(lambda: len(worker.lines("claimed")) == 3, "3 running jobs")

    worker.signal(signal.SIGINT)
    stops = "stops: waits up to 20 s for 3 running jobs; a second signal ends the wait"
    wait_until(lambda: stops in worker.log.read_text())
    worker.signal(signal.SIGINT)

    assert worker.wait(10) == 3  # a handler did not end
    assert _count(db, "select count(*) from rota.jobs where status = 'queued'") == 3
    assert _count(db, "select sum(attempts) from rota.jobs") == 0


def test_kill_9_is_repaired_by_another_worker(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    client.enqueue(
        "sleep",
        {"seconds": 1},
        lease=timedelta(seconds=1.5),
        backoff={"kind": "fixed", "base_seconds": 0.1},
    )
    first = start_worker()
    first.wait_for_line("claimed")
    first.signal(signal.SIGKILL)
    first.wait()

    start_worker("--queue", "default")

    finished = "select count(*) from rota.finished_jobs where attempts = 2"
    wait_until(lambda: _count(db, finished) == 1, "the second run")


@pytest.mark.parametrize("kind", ["polite", "async_sleep"])
def test_a_handler_is_not_given_up_before_it_could_end(
    client: Client, db: psycopg.Connection[Any], start_worker: Start, kind: str
) -> None:
    """Awake again, its worker finds both the lease and the time limit over."""
    client.enqueue(kind, {"seconds": 60}, lease=2, time_limit=timedelta(seconds=2))
    worker = start_worker("--tick-interval", "600")
    beats = "select count(*) from pg_stat_activity where application_name = 'rota heartbeat'"
    wait_until(lambda: _count(db, beats) == 1, "a heartbeat")

    worker.signal(signal.SIGSTOP)
    wait_until(client.sweep_stale_leases, "the end of the lease")
    worker.signal(signal.SIGCONT)

    worker.wait_for_line("lost")
    assert not worker.lines("continues")


def test_a_frozen_worker_is_refused(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    """Frozen past its lease, the job goes to a thief; awake again, its finish is refused."""
    job_id = client.enqueue("sleep", {"seconds": 2}).job_id
    worker = start_worker("--tick-interval", "600", "--lease", "1")
    worker.wait_for_line("claimed")

    worker.signal(signal.SIGSTOP)
    wait_until(client.sweep_stale_leases, "the end of the lease")
    client.retry_job(job_id)
    (stolen,) = client.claim_jobs("thief", lease=timedelta(minutes=5))
    worker.signal(signal.SIGCONT)

    assert f"job_id={job_id}" in worker.wait_for_line("lost")
    assert not worker.lines("succeeded")
    assert client.finish_job(job_id, stolen.lease_token, {"by": "thief"}) == "finished"


@pytest.mark.own_session
def test_cut_connections_do_not_double_a_finish(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    lease = timedelta(seconds=3)
    job_id = client.enqueue("sleep", {"seconds": 2}, lease=lease).job_id
    worker = start_worker()
    worker.wait_for_line("claimed")

    for _ in range(3):
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'rota %' and datname = current_database()"
        )
        time.sleep(0.2)
    worker.wait_for_line("succeeded")
    later = client.enqueue("quick").job_id

    done = "select count(*) from rota.finished_jobs"
    wait_until(lambda: _count(db, done) == 2, "the next job")
    rows = db.execute("select id, attempts from rota.finished_jobs order by id").fetchall()
    assert rows == [(job_id, 1), (later, 1)]


@pytest.mark.own_session
def test_unreachable_database_makes_the_lease_lost(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    client.enqueue("async_sleep", {"seconds": 60}, lease=timedelta(seconds=1.5))
    worker = start_worker("--tick-interval", "0.3")
    worker.wait_for_line("claimed")
    name = db.info.dbname

    with psycopg.connect(db.info.dsn, password=db.info.password, dbname="template1") as admin:
        admin.autocommit = True
        admin.execute(f'alter database "{name}" allow_connections false')
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'rota %' and datname = current_database()"
        )
        worker.wait_for_line("lost")
        admin.execute(f'alter database "{name}" allow_connections true')

    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


@pytest.mark.own_session
def test_a_stopped_worker_leaves_no_transaction_open(
    client: Client, db: psycopg.Connection[Any], start_worker: Start
) -> None:
    db.execute("create table marks (job_id bigint)")
    job_id = client.enqueue("mark", {"seconds": 1}).job_id
    worker = start_worker()
    worker.wait_for_line("claimed")

    worker.signal(signal.SIGTERM)

    assert worker.wait() == 0
    assert db.execute("select job_id from marks").fetchall() == [(job_id,)]
    gone = "select count(*) from pg_stat_activity where application_name like 'rota %'"
    wait_until(lambda: _count(db, gone + " and datname = current_database()") == 0)


def test_no_garbage_is_looked_for_in_what_was_imported(
    client: Client, start_worker: Start
) -> None:
    job = client.enqueue("frozen")

    assert start_worker("--drain").wait() == 0

    assert client.wait_for_result(job.job_id).result is True
