"""rota from Node.js with the `pg` driver: what a client in another language needs to know."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from sql.helpers import Db, call, claim, enqueue, rows, run, scalar
from support.frozen import Frozen
from support.waiting import wait_until

pytestmark = pytest.mark.plain_session

HERE = Path(__file__).parent / "node"

TOUR = """\
enqueued once false
claimed send_mail {"user_id":7} 1
heartbeat true false
failed failed true
claimed 2 true
stale finish RT002
finished finished
finished already_finished
unknown job RT001
bad argument 22023
left succeeded 2 node-2 connection refused {"message_id":"m-1"}
"""


@pytest.fixture(scope="module")
def node() -> str:
    """The node program, with the driver beside the script."""
    program, npm = shutil.which("node"), shutil.which("npm")
    assert program, "node is missing: make setup brings it"
    assert npm, "npm is missing: make setup brings it"
    lock, installed = HERE / "package-lock.json", HERE / "node_modules/.package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run([npm, "ci", "--silent", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    return program


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tour_shows_the_life_of_a_job(dsn: str, node: str) -> None:
    done = subprocess.run(
        [node, "tour.mjs"],
        cwd=HERE,
        env={**os.environ, "DATABASE_URL": dsn},
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.stderr == ""
    assert done.stdout == TOUR


class NodeWorker:
    """The worker of worker.mjs on queue ``node``."""

    def __init__(self, dsn: str, node: str) -> None:
        self.process = subprocess.Popen(
            [node, "worker.mjs", "node"],
            cwd=HERE,
            env={**os.environ, "DATABASE_URL": dsn, "PGAPPNAME": "node-worker"},
            stderr=subprocess.PIPE,
            text=True,
        )

    def stop(self) -> None:
        self.process.terminate()
        _, errors = self.process.communicate(timeout=30)
        assert (self.process.returncode, errors) == (0, "")


@pytest.fixture
def worker(dsn: str, node: str) -> Iterator[NodeWorker]:
    worker = NodeWorker(dsn, node)
    yield worker
    worker.process.kill()
    worker.process.communicate()


def eventually(db: Db, query: str, answer: object) -> None:
    """Wait until a query of one value has this answer."""
    wait_until(lambda: rows(db, query) == [(answer,)], f"{query}: {answer}")


IDLE = """
    select count(*)::int from pg_locks
    where locktype = 'advisory' and classid = 1919907936
      and objid = hashtext('node')::bit(32)::bigint::oid
"""
ENDED = "select count(*)::int from rota.finished_jobs"


def test_worker_is_as_short_as_is_told() -> None:
    assert len((HERE / "worker.mjs").read_text().splitlines()) <= 50


def test_what_a_worker_must_know_fits_in_ten_lines() -> None:
    reference = HERE.parents[2] / "sql/README.md"
    after = reference.read_text().partition("\n## A worker in another language\n")[2]
    told = after.partition("\n1. ")[2].partition("\n\n")[0].splitlines()

    assert [line.partition(". ")[0] for line in told[1:]] == [str(n) for n in range(2, 11)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_starts_what_comes_within_a_second_and_reports_every_end(
    db: Db, worker: NodeWorker
) -> None:
    """Also what is due later, what fails, and what takes longer than its lease."""
    call(db, "set_queue", queue="node", lease="3 s")
    eventually(db, IDLE, 1)
    for n in range(3):
        enqueue(db, "greet", payload={"name": n}, queue="node")
        eventually(db, ENDED, n + 1)
    later = enqueue(db, "greet", payload={"name": "n"}, queue="node", delay="1500 ms")
    failing = enqueue(db, "fail", queue="node", max_attempts=1)
    enqueue(db, "sleep", queue="node", payload={"ms": 5000})
    eventually(db, ENDED, 6)

    late = "select extract(epoch from max(started_at - run_at)) from rota.finished_jobs"
    assert scalar(db, late) < 1
    assert scalar(db, "select max(attempts) from rota.finished_jobs") == 1
    assert run(db, failing).last_error == "no greeting"
    assert run(db, failing).error_type == "TypeError"
    assert run(db, later).result == {"hello": "n"}
    eventually(db, IDLE, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_ends_a_job_whose_result_the_database_does_not_take(
    db: Db, worker: NodeWorker
) -> None:
    long = enqueue(
        db, "greet", queue="node", payload={"name": "x" * (2**20 - 12)}, max_attempts=1
    )
    nul = enqueue(db, "greet", queue="node", payload={"name": "a%00b"})
    eventually(db, ENDED, 2)

    assert run(db, long).status == "dead"
    assert run(db, long).last_error.startswith("result must be at most 1 MiB")
    assert run(db, nul).result == {"hello": "a\ufffdb"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_tells_what_it_takes_until_it_leaves(db: Db, worker: NodeWorker) -> None:
    eventually(db, IDLE, 1)
    enqueue(db, "greet", queue="node", run_at="2000-01-01", payload={"name": "n"})
    enqueue(db, "other", queue="node", run_at="2000-01-01")

    found = rows(db, "select job_types, concurrency, is_live from rota.worker_health")
    untaken = rows(db, "select job_type from rota.untaken_jobs('{node}')")
    sick = rows(
        db, "select finding from rota.doctor() where finding = 'versions' and severity <> 'ok'"
    )
    worker.stop()

    assert found == [(["greet", "fail", "sleep"], 4, True)]
    assert untaken == [("other",)]
    assert sick == []
    assert scalar(db, "select count(*)::int from rota.workers") == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_ticks_while_all_its_places_are_taken(db: Db, worker: NodeWorker) -> None:
    for _ in range(4):
        enqueue(db, "sleep", queue="node", payload={"ms": 60_000})
    eventually(db, "select count(*)::int from rota.jobs where status = 'running'", 4)
    enqueue(db, "left", queue="other")
    claim(db, queues=["other"], lease="10 ms")

    eventually(db, "select error_type from rota.job_errors", "lease_expired")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_ends_its_jobs_at_sigterm_and_leaves_the_rest(
    db: Db, worker: NodeWorker, dsn: str
) -> None:
    for _ in range(6):
        enqueue(db, "sleep", queue="node", payload={"ms": 2000})
    eventually(db, "select count(*)::int from rota.jobs where status = 'running'", 4)

    worker.stop()

    assert scalar(db, ENDED) == 4
    assert rows(db, "select status, attempts from rota.jobs") == [("queued", 0)] * 2
    assert scalar(db, IDLE) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_exits_when_the_server_hangs(db: Db, worker: NodeWorker) -> None:
    """Its lease ends, so its handler must, too."""
    enqueue(db, "sleep", queue="node", payload={"ms": 60_000})
    eventually(db, "select count(*)::int from rota.jobs where status = 'running'", 1)
    frozen = Frozen(db, "node-worker")

    try:
        frozen.freeze()
        _, errors = worker.process.communicate(timeout=45)
    finally:
        frozen.thaw()

    assert worker.process.returncode == 1
    assert "Query read timeout" in errors


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_stops_what_is_cancelled_lost_or_overdue(db: Db, worker: NodeWorker) -> None:
    cancelled, lost = (
        enqueue(db, "sleep", queue="node", payload={"ms": 60_000}) for _ in range(2)
    )
    overdue = enqueue(
        db, "sleep", queue="node", payload={"ms": 60_000}, time_limit="1 s", max_attempts=1
    )
    running = "select count(*)::int from rota.jobs where status = 'running'"
    eventually(db, running, 3)

    call(db, "pause_queue", queue="node")
    call(db, "cancel_job", job_id=cancelled)
    call(db, "retry_job", job_id=lost, force=True)

    eventually(db, running, 0)
    # It returns when no handler is left, so none still sleeps.
    worker.stop()
    assert run(db, cancelled).status == "cancelled"
    assert run(db, overdue).error_type == "time_limit"
    assert run(db, overdue).last_error == "The operation was aborted"
    assert run(db, lost).status == "queued"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_starts_at_once_what_its_tick_lets_in(db: Db, worker: NodeWorker) -> None:
    """No notification comes: a tick sends none to its own session."""
    eventually(db, IDLE, 1)
    waits = []
    for _ in range(4):
        parent = enqueue(db, "greet", queue="node", payload={"name": "n"}, delay="2 s")
        for _ in range(25):  # so many that a tick has to let them in
            enqueue(db, "greet", queue="node", payload={"name": "n"}, depends_on=[parent])
        eventually(db, "select count(*)::int from rota.jobs", 0)
        ended = run(db, parent).finished_at
        waits.append(scalar(db, "select max(started_at) from rota.finished_jobs") - ended)

    assert max(waits) < timedelta(seconds=0.5)
