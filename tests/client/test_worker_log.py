"""What a worker says of itself, and of a database that goes and comes back."""

import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

import rota
from rota import Client, Job, JsonFormatter, Registry, Worker
from rota.cli.output import TextFormatter
from rota.forwarding import Database
from rota.worker.connection import ConnectionState, Retry
from rota.worker.worker import run_together
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Background = Callable[..., BackgroundWorker]
LOST = psycopg.OperationalError("connection refused\nIs it running?")


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "rota"):
        yield


@pytest.mark.parametrize(
    ("queues", "left"),
    [
        ([["default"]], "audio,export,mail"),
        ([["mail"], ["export"]], "audio,default"),
        ([["mail", "default"], ["export"], ["audio"]], None),
    ],
)
def test_the_log_of_a_worker_names_the_queues_of_tasks_that_it_leaves(
    dsn: str,
    db: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
    queues: list[list[str]],
    left: str | None,
) -> None:
    registry = Registry()
    for queue in ("mail", "export", "audio", None):
        part = Registry()

        def task() -> None: ...

        part.task(f"in_{queue}", queue=queue)(task)
        registry.include(part)

    run_together([Worker(dsn, registry, queues=each) for each in queues], drain=True)

    told = [message for message in caplog.messages if "its tasks" in message]
    text = "its tasks use queues that this worker does not take: "
    assert told == ([text + left] if left else [])


def test_start_and_stop_say_what_the_worker_does(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry()
    started, go_on = threading.Semaphore(0), threading.Event()

    @registry.handler("b")
    @registry.handler("a")
    def waits(job: Job) -> None:
        started.release()
        go_on.wait(10)

    client.enqueue_many([{"job_type": "a"}] * 2)
    worker = background(registry, name="w1", queues=["default", "mail"])
    assert started.acquire(timeout=10)
    assert started.acquire(timeout=10)
    worker.worker.stop()
    stops = "worker w1 stops: waits up to 20 s for 2 running jobs"
    wait_until(lambda: stops in caplog.messages)
    go_on.set()
    worker.stop()

    assert caplog.messages[0] == (
        f"worker w1 started database={db.info.dbname} queues=default,mail job_types=a,b "
        "concurrency=4"
    )


def test_events_name_the_worker_and_moments_are_iso(
    client: Client, drain: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()

    @registry.handler("a")
    def snooze(job: Job) -> None:
        raise rota.Snooze(60)

    client.enqueue("a")
    drain(registry, name="w1")

    records = [record for record in caplog.records if hasattr(record, "rota")]
    lines = [json.loads(JsonFormatter().format(record)) for record in records]
    assert [(line["event"], line["worker"]) for line in lines] == [
        ("claimed", "w1"),
        ("snoozed", "w1"),
    ]
    assert "T" in lines[1]["next_run"]
    assert " worker=w1 " in records[1].getMessage()
    assert f"next_run={lines[1]['next_run']}" in records[1].getMessage()


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ("нет денег", '"нет денег"'),
        ('a "b" c', r'"a \"b\" c"'),
        ("two\nlines é", r'"two\nlines é"'),
        ("red \x1b[31m \x9b31m", r'"red \u001b[31m \u009b31m"'),
    ],
)
def test_a_message_can_be_read_and_is_one_line(
    text: str,
    logged: str,
    client: Client,
    drain: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever its language is, and without what a terminal would obey."""
    registry = Registry()

    @registry.handler("a")
    def fail(job: Job) -> None:
        raise ValueError(text)

    client.enqueue("a", max_attempts=1)
    drain(registry)

    (line,) = (each for each in caplog.messages if each.startswith("dead "))
    assert line.endswith(f" error={logged}")


def test_events_name_the_schedule_of_a_job(
    client: Client, drain: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    registry.add("a", lambda job: None)
    client.enqueue("a")
    client.schedule_job("nightly", "@daily", "a")
    client.run_schedule_now("nightly")

    drain(registry)

    said = [record.getMessage() for record in caplog.records if hasattr(record, "rota")]
    assert len(said) == 4
    assert len([line for line in said if " schedule=nightly " in line]) == 2
    assert len([line for line in said if "schedule" in line]) == 2


@pytest.mark.own_session
def test_a_lost_database_is_one_line_and_its_return_another(
    client: Client,
    db: psycopg.Connection[Any],
    admin: psycopg.Connection[Any],
    background: Background,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry()
    done = threading.Semaphore(0)
    registry.add("slow", lambda job: time.sleep(1.5))
    registry.add("quick", lambda job: done.release())
    client.enqueue("quick")
    client.enqueue("slow", lease=timedelta(seconds=0.9))
    background(registry, name="w1")
    assert done.acquire(timeout=10)

    allow: Any = "alter database {} with allow_connections {}"
    name = sql.Identifier(db.info.dbname)
    admin.execute(sql.SQL(allow).format(name, sql.SQL("false")))
    try:
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'rota %' and datname = current_database()"
        )
        time.sleep(2.0)
    finally:
        admin.execute(sql.SQL(allow).format(name, sql.SQL("true")))
    client.enqueue("quick")
    assert done.acquire(timeout=30)

    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    told = [line for line in told if "database" in line or "retrying" in line]
    assert len(told) == 2, told
    assert told[0].startswith("the connection to the database is lost, retrying: ")
    assert told[1].startswith("the database is back after ")


def test_outage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    state = ConnectionState()
    state.lost(LOST, time.monotonic())  # never reached before: the caller raises it
    assert caplog.messages == []
    opened_at = time.monotonic()
    state.works(opened_at)

    for _ in range(3):
        state.lost(LOST, opened_at)
    state.works(opened_at)  # an old connection that still works
    assert caplog.messages == [
        "the connection to the database is lost, retrying: connection refused Is it running?"
    ]

    state.works(time.monotonic())
    state.lost(LOST, opened_at)  # an old connection that is found broken late
    assert len(caplog.messages) == 2
    state.lost(LOST, time.monotonic())
    assert len(caplog.messages) == 3


def test_another_reason_of_an_outage_is_told_when_it_lasts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, changed = ConnectionState(), psycopg.OperationalError("password refused")
    opened_at = time.monotonic()
    state.works(opened_at)
    state.lost(LOST, opened_at)

    state.lost(changed, time.monotonic())  # so soon it may be one of a restart
    monkeypatch.setattr("rota.worker.connection.REASON_INTERVAL", 0.0)
    state.lost(changed, opened_at)  # of an old connection, that is found broken late
    for _ in range(3):
        state.lost(changed, time.monotonic())

    assert caplog.messages[1:] == ["the database is still away: password refused"]


def test_one_of_several_databases_is_named(caplog: pytest.LogCaptureFixture) -> None:
    state = Database("host=b dbname=shop").state
    state.works(time.monotonic())

    Retry("claim", state).fail(psycopg.DataError("no"))
    state.lost(LOST, time.monotonic())
    state.works(time.monotonic())

    assert caplog.messages[0] == "claim in b/shop failed, retrying: no"
    assert caplog.messages[1].startswith(
        "the connection to the database b/shop is lost, retrying: "
    )
    assert caplog.messages[2].startswith("the database b/shop is back after ")


def test_a_worker_warns_once_of_due_jobs_that_no_worker_takes(
    client: Client,
    background: Background,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.worker.maintenance.UNTAKEN_INTERVAL", 0.05)
    registry = Registry()
    registry.add("mail", lambda job: None)
    ago = datetime.now(UTC) - timedelta(minutes=1)
    first = client.enqueue("charge", run_at=ago).job_id
    client.enqueue("charge", run_at=ago + timedelta(seconds=1))
    client.enqueue("mail", run_at=ago)
    client.enqueue("charge", queue="others", run_at=ago)

    def warnings() -> list[str]:
        return [text for text in caplog.messages if text.startswith("no live worker takes")]

    background(registry)
    wait_until(warnings)
    client.enqueue("refund", run_at=ago)
    wait_until(lambda: len(warnings()) == 2)

    assert [text.partition(":")[0] for text in warnings()] == [
        "no live worker takes charge in queue default",
        "no live worker takes refund in queue default",
    ]
    assert warnings()[0].endswith(f"such as job {first}")


def test_a_handler_of_the_log_that_raises_ends_no_worker(
    client: Client, dsn: str, db: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("no space left")

    assert _succeeded(dsn, client, db, Broken(), lambda job: None) == 3
    assert "ValueError: no space left" in capsys.readouterr().err


def test_a_handler_that_closes_the_log_ends_no_worker(
    client: Client, dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    monkeypatch.setattr("sys.stderr", output)

    log = logging.StreamHandler(output)
    assert _succeeded(dsn, client, db, log, lambda job: output.close()) == 3


def _succeeded(
    dsn: str,
    client: Client,
    db: psycopg.Connection[Any],
    log: logging.Handler,
    handler: Callable[[Job], None],
) -> int:
    """Drain three jobs beside a handler of the log; return how many succeeded."""
    registry = Registry()
    registry.add("a", handler)
    client.enqueue_many([{"job_type": "a"}] * 3)
    logging.getLogger("rota").addHandler(log)
    try:
        rota.Worker(dsn, registry).run(drain=True)
    finally:
        logging.getLogger("rota").removeHandler(log)
    done = "select from rota.finished_jobs where status = 'succeeded'"
    return db.execute(done).rowcount


def test_the_log_tells_moments_as_logging_does() -> None:
    record = logging.makeLogRecord({})
    for record.created in (0.0, 0.5, 1.0, 1e9):
        record.msecs = record.created % 1 * 1000
        assert TextFormatter().formatTime(record) == logging.Formatter().formatTime(record)
