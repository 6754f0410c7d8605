"""Fifteen incidents, staged for real: the first line of an answer finds each, and mends it.

`make incidents` prints what was found and what that took of the server's processor time, which
it wants to be a second at most, whoever else is at work on the machine; it also lets a hundred
thousand jobs die, and fills a quarter of the queue of notifications.  Where no statement can
help, as no worker is there, the words of the line are what is done.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import namedtuple_row

import rota
from bench.measured_server import process_cpu
from faults.conftest import FaultyWorker
from rota.testing.server import EmbeddedPostgres
from support.clock import Clock
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

Db = psycopg.Connection[Any]
Connect = Callable[..., Db]
Start = Callable[[str], FaultyWorker]
AT_LENGTH = "ROTA_INCIDENTS" in os.environ
DEAD_JOBS = 100_000 if AT_LENGTH else 2_000
RELEASE = Path(__file__).parents[1] / "releases" / "0.1.0.sql"

pytestmark = [pytest.mark.own_session, pytest.mark.timeout(300)]


class Operator:
    """Somebody who was woken, asks one question, and pastes what the first line says."""

    def __init__(self, db: Db) -> None:
        self._db = db

    def explain(self, job_id: int) -> Any:
        return self._ask("select reason as what, explanation as why, remedy"
                         " from rota.explain_job(%s) order by ordinal", job_id)  # fmt: skip

    def doctor(self) -> Any:
        return self._ask("select finding as what, evidence as why, remedy, severity"
                         " from rota.doctor()")  # fmt: skip

    def paste(self, line: Any) -> None:
        assert line.remedy is not None
        self._db.execute(line.remedy)

    def _ask(self, query: Any, *parameters: Any) -> Any:
        pid = self._db.info.backend_pid
        before = process_cpu(pid)
        with self._db.cursor(row_factory=namedtuple_row) as cursor:
            line, *_ = cursor.execute(query, parameters).fetchall()
        took = process_cpu(pid) - before
        if AT_LENGTH:
            print(f"\n  {took * 1000:.0f} ms  {line.what}: {line.why}")  # noqa: T201
            print(f"         {line.remedy}")  # noqa: T201
            assert took <= 1.0
        return line


@pytest.fixture
def operator(db: Db) -> Iterator[Operator]:
    """An operator, where the owner may see what sessions do, as the reference advises."""
    with operating(db) as found:
        yield found


@contextmanager
def operating(db: Db) -> Iterator[Operator]:
    owner = value(db, "select nspowner::regrole::text from pg_namespace where nspname = 'rota'")
    db.execute(f"grant pg_read_all_stats to {owner}")
    db.execute("select rota.tick()")
    yield Operator(db)
    db.execute(f"revoke pg_read_all_stats from {owner}")


def value(db: Db, query: str, *parameters: Any) -> Any:
    (found,) = db.execute(query, parameters or None).fetchone() or (None,)  # type: ignore[arg-type]
    return found


def enqueue(db: Db, job_type: str = "plain", **arguments: Any) -> int:
    arguments.setdefault("payload", '{"failing": 0}')  # per cent of the attempts
    given = "".join(f", {name} => %({name})s" for name in arguments)
    query = f"select rota.enqueue(%(job_type)s{given})"
    (job_id,) = db.execute(query, {"job_type": job_type, **arguments}).fetchone() or (0,)  # type: ignore[arg-type]
    return int(job_id)


def wait_for(db: Db, job_id: int, status: str) -> None:
    query = "select status from rota.job_runs where id = %s"
    wait_until(lambda: value(db, query, job_id) == status, f"job {job_id} {status}")


def die(db: Db, error: str = "bad currency") -> None:
    """Let the next job of the queue die."""
    db.execute(
        "select rota.fail_job(c.job_id, c.lease_token, %s, fatal => true)"
        " from rota.claim_jobs('w') as c",
        (error,),
    )
    db.execute("select rota.tick()")


def test_a_forgotten_transaction(
    db: Db, connect: Connect, start: Start, operator: Operator
) -> None:
    job_id = enqueue(db)
    console = connect(autocommit=False, application_name="psql")
    console.execute("select rota.cancel_job(%s)", (job_id,))
    start("")

    line = operator.explain(job_id)

    assert line.what == "row_locked"
    assert (
        f"pid {console.info.backend_pid} (role postgres, application psql, idle in" in line.why
    )
    operator.paste(line)
    wait_for(db, job_id, "succeeded")


def test_a_killed_worker(db: Db, start: Start, operator: Operator) -> None:
    job_id = enqueue(db, "hold")
    worker = start("--name pod-0 --lease 600")
    worker.wait_for_executions(1)
    worker.signal(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: operator.doctor().what == "workers", "the end of its sessions")
    db.execute("update faults.gate set is_open = true")
    start("--name pod-1")

    line = operator.doctor()

    assert (line.severity, line.what) == ("warning", "workers")
    assert "worker pod-0" in line.why
    assert operator.explain(job_id).what == "worker_gone"
    operator.paste(line)
    wait_for(db, job_id, "succeeded")


def test_a_hung_handler(db: Db, start: Start, operator: Operator) -> None:
    job_id = enqueue(db, "hold")
    start("--name hung --concurrency 1").wait_for_executions(1)
    # Two hours later: its worker has kept it by heartbeats all the time.
    db.execute("update rota.jobs set started_at = started_at - interval '2 hours'")
    start("--name other --concurrency 1")
    workers = "select count(*) = 2 from rota.workers"
    wait_until(lambda: value(db, workers), "another worker")

    line = operator.explain(job_id)

    assert line.what == "hung"
    assert "it has run for 2 h" in line.why
    assert operator.doctor().what == "running_jobs"
    operator.paste(line)
    query = "select locked_by = 'other' from rota.jobs where id = %s"
    wait_until(lambda: value(db, query, job_id), "another worker that has it")


def test_a_paused_queue(db: Db, start: Start, operator: Operator) -> None:
    job_id = enqueue(db)
    db.execute("select rota.pause_queue('default', 'the mail server moves')")
    start("")

    line = operator.explain(job_id)

    assert line.what == "queue_paused"
    assert "the mail server moves" in line.why
    assert operator.doctor().what == "queues"
    operator.paste(line)
    wait_for(db, job_id, "succeeded")


def test_a_full_limit(db: Db, start: Start, operator: Operator) -> None:
    db.execute("select rota.set_limit(limit_key => 'shop', max_running => 1)")
    holder = enqueue(db, "hold", limit_key="shop")
    start("").wait_for_executions(1)
    job_id = enqueue(db, limit_key="shop")

    line = operator.explain(job_id)

    assert line.what == "limit_full"
    assert f"running: {holder} (" in line.why
    operator.paste(line)
    wait_for(db, job_id, "succeeded")


def test_a_rate(db: Db, start: Start, operator: Operator) -> None:
    db.execute("select rota.set_limit(job_type => 'plain', max_starts => 1, per => '20 s')")
    first, job_id = enqueue(db), enqueue(db)
    start("")
    wait_for(db, first, "succeeded")

    line = operator.explain(job_id)

    assert line.what == "rate"
    assert "lets 1 start per 20 s" in line.why
    operator.paste(line)
    assert value(db, "select max_starts from rota.limits") == 2
    wait_for(db, job_id, "succeeded")


def test_a_type_that_nobody_takes(db: Db, dsn: str, start: Start, operator: Operator) -> None:
    job_id = enqueue(db, "charge")
    start("--name pod-0")
    wait_until(lambda: value(db, "select count(*) from rota.workers"), "the worker")

    line = operator.explain(job_id)

    assert line.what == "no_worker"
    assert (
        "no live worker takes jobs of type charge (1 on queue default takes others" in line.why
    )
    assert line.remedy is None
    assert line.why.endswith("Start one with a handler for charge and --queue default")
    registry = rota.Registry()
    registry.handler("charge")(lambda job: None)
    worker = BackgroundWorker(dsn, registry)
    wait_for(db, job_id, "succeeded")
    worker.stop()


def test_a_halted_key(db: Db, start: Start, operator: Operator) -> None:
    dead = enqueue(db, ordering_key="account:7")
    job_id = enqueue(db, ordering_key="account:7")
    die(db)

    line = operator.explain(job_id)

    assert line.what == "key_halted"
    assert f"by job {dead}, which is dead: bad currency" in line.why
    start("")
    operator.paste(line)
    wait_for(db, job_id, "succeeded")


def test_a_dead_parent(db: Db, start: Start, operator: Operator) -> None:
    parent = enqueue(db)
    job_id = enqueue(db, depends_on=[parent], if_parent_dead="wait")
    die(db)

    line = operator.explain(job_id)

    assert line.what == "waits_for_job"
    assert f"it waits for job {parent} (dead: bad currency)" in line.why
    start("")
    operator.paste(line)
    wait_for(db, job_id, "succeeded")


def test_nobody_ticks_for_an_hour(db: Db, clock: Clock, operator: Operator) -> None:
    job_id = enqueue(db)
    db.execute("select from rota.claim_jobs('w', lease => '1 second')")
    clock.advance("1 hour")

    line = operator.doctor()

    assert (line.severity, line.what) == ("critical", "ticker")
    assert line.why.startswith("no tick has run for 1 h")
    operator.paste(line)
    assert value(db, "select status from rota.jobs where id = %s", job_id) == "failed"


def test_a_poisoned_payload(db: Db, dsn: str, operator: Operator) -> None:
    """The handler cannot take the payload; when it is mended, the job is run again."""
    job_id = enqueue(db, "charge", payload='{"amount": "1.000,00"}', max_attempts=1)
    broken, mended = rota.Registry(), rota.Registry()
    broken.handler("charge")(lambda job: float(job.payload["amount"]) > 0)
    mended.handler("charge")(lambda job: None)
    worker = BackgroundWorker(dsn, broken)
    wait_for(db, job_id, "dead")
    worker.stop()

    line = operator.explain(job_id)

    assert line.what == "dead"
    assert "ValueError: could not convert string to float: '1.000,00'" in line.why
    operator.paste(line)
    worker = BackgroundWorker(dsn, mended)
    wait_for(db, job_id, "succeeded")
    worker.stop()


def test_thousands_of_dead_jobs_of_one_error(db: Db, operator: Operator) -> None:
    for _ in range(DEAD_JOBS // 1000):
        db.execute(
            "select from rota.enqueue_many((select jsonb_agg(jsonb_build_object("
            "'job_type', 'charge', 'max_attempts', 1)) from generate_series(1, 1000)))"
        )
        db.execute(
            "select from rota.end_jobs((select jsonb_agg(jsonb_build_object("
            "'job_id', c.job_id, 'lease_token', c.lease_token, 'outcome', 'failed',"
            " 'error', format('no rate for order %s', c.job_id), 'error_type', 'KeyError'))"
            " from rota.claim_jobs('w', max_jobs => 1000) as c))"
        )

    taken = value(
        db, "update rota.finished_jobs set idempotency_key = 'order:7' where id ="
        " (select id from rota.dead_jobs order by id offset 500 limit 1) returning id",
    )  # fmt: skip
    enqueue(db, "charge", queue="by_hand", idempotency_key="order:7")

    line = operator.doctor()

    assert (line.severity, line.what) == ("critical", "dead_jobs")
    assert f"{min(DEAD_JOBS, 5_000)} jobs of type charge in queue default died" in line.why
    assert "KeyError: no rate for order N" in line.why
    operator.paste(line)
    back = "select count(*) from rota.jobs where status = 'queued' and queue = 'default'"
    assert value(db, back) == DEAD_JOBS - 1
    assert value(db, "select array_agg(id) from rota.dead_jobs") == [taken]
    line = operator.explain(taken)
    assert "its idempotency key is taken by job" in line.why
    operator.paste(line)
    assert value(db, back) == DEAD_JOBS


def test_an_old_client(
    empty_database: Callable[[str], str],
    server: EmbeddedPostgres,
    admin: Db,
    psql: Any,
    sql_dir: Path,
) -> None:
    """A worker of 0.1.0 goes on through an upgrade, by the calls that it has always sent."""
    name = "incident_old_client"
    dsn = empty_database(name)
    psql(dsn, "-v", "ON_ERROR_STOP=1", "-f", RELEASE)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            # A call that is under way meets the upgrade once, and then it connects anew.
            with suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as db:
                work_on(db)

    def work_on(db: Db) -> None:
        while not stop.wait(0.02):
            # Refused after the upgrade, which it logs.
            with suppress(psycopg.errors.FeatureNotSupported):
                db.execute(
                    "select from rota.report_worker(worker => 'old', host => 'box', pid => 1,"
                    " version => '0.1.0', queues => '{default}')"
                )
            for job in db.execute(
                "select job_id, lease_token from rota.claim_jobs(worker => 'old',"
                " queues => '{default}', max_jobs => 5)"
            ).fetchall():
                db.execute("select finish_job from rota.finish_job(%s, %s)", job)

    old = threading.Thread(target=work)
    try:
        old.start()
        with psycopg.connect(server.url(name), autocommit=True) as db:
            wait_for(db, enqueue(db), "succeeded")
        psql(dsn, "-v", "ON_ERROR_STOP=1", "-f", sql_dir / "install.sql")
        with (
            psycopg.connect(server.url(name), autocommit=True) as db,
            operating(db) as operator,
        ):
            wait_for(db, enqueue(db), "succeeded")

            line = operator.doctor()

            assert (line.severity, line.what) == ("warning", "versions")
            assert line.why == (
                f"worker old (pid 1 on box) has version 0.1.0, and the database "
                f"{rota.__version__}: install the package rota {rota.__version__} where it"
                " runs, and restart it"
            )
            assert line.remedy is None
            stop.set()
            old.join()
            # Six minutes later: what it calls at its end is not there any more.
            db.execute(
                "update rota.workers set last_seen_at = last_seen_at - interval '6 minutes'"
            )
            registry = rota.Registry()
            registry.handler("plain")(lambda job: None)
            new = BackgroundWorker(dsn, registry, name="new")
            try:
                wait_until(
                    lambda: value(db, "select true from rota.workers where worker = 'new'"),
                    "the worker",
                )
                assert operator.doctor().severity == "ok"
            finally:
                new.stop()
    finally:
        stop.set()
        old.join()
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def test_a_breaker_that_is_open(db: Db, start: Start, operator: Operator) -> None:
    """A provider is down; when it is back, the operator does not want to wait for a probe."""
    db.execute("select rota.set_breaker('plain', max_failures => 5, pause_for => '1 hour')")
    for _ in range(8):
        enqueue(db, payload='{"failing": 100}', backoff='{"kind": "fixed", "base_seconds": 60}')
    start("--concurrency 1")
    wait_until(lambda: value(db, "select count(*) from rota.pauses"), "the breaker")
    waits = enqueue(db)

    line = operator.explain(waits)

    assert line.what == "type_paused"
    assert "breaker" in line.why
    assert operator.doctor().what == "queues"
    operator.paste(line)
    wait_for(db, waits, "succeeded")


def test_a_full_queue_of_notifications(db: Db, connect: Connect, operator: Operator) -> None:
    deaf = connect(autocommit=False, application_name="deaf listener")
    deaf.execute("listen something")
    deaf.commit()
    deaf.execute("select 1")
    for _ in range(20 if AT_LENGTH else 1):
        db.execute(
            "select pg_notify('something', rpad(n::text, 7900, 'x'))"
            " from generate_series(1, 14000) as n"
        )

    line = operator.doctor()

    severity = "critical" if AT_LENGTH else "warning"
    assert (line.severity, line.what) == (severity, "notifications")
    assert "application deaf listener" in line.why
    operator.paste(line)
    db.execute("select pg_terminate_backend(%s, 10000)", (deaf.info.backend_pid,))
    # Whoever listens next makes room.
    db.execute("listen something")
    db.execute("notify something")
    assert operator.doctor().severity == "ok"
