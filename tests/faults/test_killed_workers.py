"""Workers that are killed, frozen and stopped in the middle of their jobs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from faults.conftest import FaultyWorker
from invariants import check_invariants
from support.waiting import wait_until

Start = Callable[[str], FaultyWorker]
LEASE = 1.0
SOON = {"kind": "fixed", "base_seconds": 0.001, "jitter": 0}


@pytest.fixture(autouse=True)
def _invariants(db: psycopg.Connection[Any]) -> Iterator[None]:
    yield
    check_invariants(db)


def enqueue(
    db: psycopg.Connection[Any], job_type: str, count: int = 1, **job: Any
) -> list[int]:
    jobs = [{"job_type": job_type, "backoff": SOON, **job} for _ in range(count)]
    rows = db.execute("select job_id from rota.enqueue_many(%s)", (Jsonb(jobs),)).fetchall()
    return [row[0] for row in rows]


def counts(db: psycopg.Connection[Any]) -> dict[str, int]:
    return dict(
        db.execute("select r.status, count(*) from rota.job_runs as r group by 1").fetchall()
    )


def open_gate(db: psycopg.Connection[Any]) -> None:
    db.execute("update faults.gate set is_open = true")


@pytest.mark.slow
def test_jobs_of_a_killed_worker_are_run_by_the_next_of_its_name(
    db: psycopg.Connection[Any], start: Start
) -> None:
    """kill -9 with eight jobs running; its row in workers is deleted; it starts again."""
    job_ids = enqueue(db, "hold", 8)
    options = f"--name pod-0 --concurrency 8 --lease {LEASE}"
    first = start(options)
    first.wait_for_executions(8)

    first.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    db.execute("delete from rota.workers")
    second = start(options)
    wait_until(lambda: counts(db).get("succeeded") == 8, "the end of all jobs")

    assert time.monotonic() - killed_at <= LEASE + 2 + 1.5, "the last is for Python to start"
    second.wait_for_executions(8)
    attempts = db.execute("select f.id, f.attempts from rota.finished_jobs as f").fetchall()
    assert sorted(attempts) == [(job_id, 2) for job_id in job_ids]


@pytest.mark.slow
def test_jobs_of_a_killed_worker_move_to_another_in_time(
    db: psycopg.Connection[Any], start: Start
) -> None:
    """kill -9 with eight jobs running while an idle worker is there."""
    enqueue(db, "hold", 8)
    first = start(f"--concurrency 8 --lease {LEASE}")
    first.wait_for_executions(8)
    start(f"--concurrency 8 --lease {LEASE}")
    wait_until(
        lambda: db.execute("select from rota.workers").rowcount == 2, "the second worker"
    )

    first.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(lambda: counts(db).get("succeeded") == 8, "the end of all jobs")

    assert time.monotonic() - killed_at <= LEASE + 2


@pytest.mark.slow
def test_job_that_kills_its_worker_runs_max_attempts_times(
    db: psycopg.Connection[Any], start: Start
) -> None:
    """The handler sends SIGKILL to itself; whenever the worker is gone another one starts."""
    (job_id,) = enqueue(db, "killer", max_attempts=3)
    worker = start(f"--name victim --lease {LEASE}")

    def is_dead() -> bool:
        nonlocal worker
        if worker.exitcode is not None:
            worker = start(f"--name victim --lease {LEASE}")
        return counts(db) == {"dead": 1}

    wait_until(is_dead, "the death of the job")

    executions = db.execute("select job_id, attempt from faults.executions").fetchall()
    assert sorted(executions) == [(job_id, 1), (job_id, 2), (job_id, 3)]
    assert worker.exitcode is None
    errors = db.execute("select distinct error_type from rota.job_errors").fetchall()
    assert errors == [("lease_expired",)]


@pytest.mark.slow
def test_frozen_worker_that_wakes_up_late_cannot_end_its_job(
    db: psycopg.Connection[Any], start: Start
) -> None:
    """A is frozen past its lease; B runs the job; A wakes up, its handler returns."""
    (job_id,) = enqueue(db, "hold")
    a = start(f"--name a --lease {LEASE} --log-format json")
    a.wait_for_executions(1)

    a.signal(signal.SIGSTOP)
    b = start(f"--name b --lease {LEASE}")
    wait_until(lambda: counts(db).get("succeeded") == 1, "the end of the job")
    before = db.execute("select f.* from rota.finished_jobs as f").fetchall()
    open_gate(db)
    a.signal(signal.SIGCONT)
    wait_until(lambda: '"event": "lost"' in a.log.read_text(), "the refusal")
    (token,) = (
        db.execute("select lease_token from faults.executions order by 1").fetchone() or ()
    )
    with pytest.raises(psycopg.Error) as refused:
        db.execute("select rota.finish_job(%s, %s)", (job_id, token))

    assert refused.value.sqlstate == "RT002"
    b.wait_for_executions(1)
    assert db.execute("select f.* from rota.finished_jobs as f").fetchall() == before
    assert db.execute("select locked_by, attempts from rota.finished_jobs").fetchall() == [
        ("b", 2)
    ]


@pytest.mark.slow
def test_terminated_worker_gives_back_what_it_has_not_begun(
    db: psycopg.Connection[Any], start: Start
) -> None:
    """SIGTERM with one job running and 49 of its batch waiting; the one ends in peace."""
    enqueue(db, "hold", 50)
    worker = start("--concurrency 1 --batch 50")
    worker.wait_for_executions(1)
    assert counts(db) == {"running": 50}

    worker.signal(signal.SIGTERM)
    told_at = time.monotonic()
    wait_until(lambda: counts(db) == {"running": 1, "queued": 49}, "the release")
    took = time.monotonic() - told_at
    open_gate(db)

    assert worker.wait(30) == 0
    assert took <= 1
    assert counts(db) == {"succeeded": 1, "queued": 49}
    assert db.execute("select distinct attempts from rota.jobs").fetchall() == [(0,)]


@pytest.mark.slow
@pytest.mark.own_session
def test_worker_goes_on_after_its_connections_are_cut(
    db: psycopg.Connection[Any], start: Start
) -> None:
    """All its connections are terminated while its job runs; it ends that and the next one."""
    enqueue(db, "hold")
    worker = start("--concurrency 2 --lease 10")
    worker.wait_for_executions(1)

    db.execute(
        "select pg_terminate_backend(a.pid) from pg_stat_activity as a "
        "where a.application_name like 'rota %' and a.datname = current_database()"
    )
    open_gate(db)
    enqueue(db, "plain", 5, payload={"failing": 0})
    wait_until(lambda: counts(db) == {"succeeded": 6}, "the end of all jobs")

    assert worker.exitcode is None
    assert db.execute("select sum(attempts) from rota.finished_jobs").fetchall() == [(6,)]
