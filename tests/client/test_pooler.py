"""Client, worker and command line behind pgbouncer in transaction mode."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from rota import AsyncClient, AsyncJob, Client, Job, Registry, Worker
from rota.__main__ import main
from rota.worker.connection import Connection, ConnectionState
from support.pooler import find_pgbouncer, pooled
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_pgbouncer() is None, reason="pgbouncer is not installed"),
]


@pytest.fixture
def pooler(dsn: str) -> Iterator[str]:
    with pooled(dsn) as url:
        yield url


@pytest.mark.own_session
def test_a_worker_prepares_statements_only_where_its_session_is_its_own(
    dsn: str, pooler: str
) -> None:
    async def threshold(conninfo: str) -> int | None:
        connection = Connection(conninfo, "rota fetcher", ConnectionState())
        try:
            return await connection.call(_threshold)
        finally:
            await connection.close()

    assert asyncio.run(threshold(pooler)) is None
    assert asyncio.run(threshold(dsn)) is not None


async def _threshold(client: AsyncClient) -> int | None:
    return client.connection.prepare_threshold


def test_a_worker_counts_on_its_session_only_where_that_is_its_own(
    dsn: str, db: psycopg.Connection[Any], pooler: str
) -> None:
    """A pooler ends its sessions when it likes, and the worker lives on."""
    registry = Registry()
    registry.handler("x")(lambda job: None)
    seen = (
        "select w.backend_pid is null, h.is_live"
        " from rota.workers as w join rota.worker_health as h using (worker)"
    )
    for url, is_pooled in ((pooler, True), (dsn, False)):
        worker = BackgroundWorker(url, registry)
        try:
            wait_until(lambda: db.execute(seen).fetchall(), "its report")
            assert db.execute(seen).fetchall() == [(is_pooled, True)]
        finally:
            worker.stop()


def test_a_command_leaves_nothing_in_the_sessions_of_a_pooler(
    client: Client, pooler: str
) -> None:
    client.tick()  # or the last one may have been long ago
    with psycopg.connect(pooler, autocommit=True) as other:
        path = other.execute("show search_path").fetchone()
        for _ in range(4):
            assert main(["status", "-d", pooler]) == 0
            assert other.execute("show search_path").fetchone() == path


@pytest.mark.usefixtures("trap_in_public")
def test_a_command_runs_nothing_that_somebody_has_put_into_public(
    pooler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two operators of one name that fits better which takes what it is given as it is."""
    main(["status", "--json", "-d", pooler])

    assert json.loads(capsys.readouterr().out)["last_hour"]


def test_everything_works_behind_a_pooler(
    client: Client, db: psycopg.Connection[Any], pooler: str
) -> None:
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> None:
        job.set_progress(50)
        with job.transaction() as connection:
            connection.execute("select 1")

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.transaction() as connection:
            await connection.execute("select 1")

    db.execute("reassign owned by rota_installer to current_user")  # only its owner installs
    assert main(["install", "-d", pooler]) == 0
    assert main(["enqueue", "plain", "-d", pooler]) == 0
    client.enqueue_many([{"job_type": kind} for kind in ("plain", "async")] * 20)
    Worker(pooler, registry, concurrency=8, poll_interval=0.05).run(drain=True)

    done = "select count(*) from rota.finished_jobs where status = 'succeeded' and attempts = 1"
    assert db.execute(done).fetchone() == (41,)


def test_workers_that_share_two_sessions_and_their_hints_get_every_job_once(
    client: Client, db: psycopg.Connection[Any], pooler: str
) -> None:
    """Old entries stand in front of all lanes, so every hint says to begin behind them."""
    holder = psycopg.connect(db.info.dsn, password=db.info.password)
    holder.execute("set transaction isolation level repeatable read")
    holder.execute("select 1")
    db.execute("alter table rota.jobs set (autovacuum_enabled = false)")
    jobs = [
        {"job_type": "x", "queue": "abc"[n % 3], "priority": n % 2, "payload": {"n": n}}
        for n in range(9000)
    ]
    done: list[int] = []

    def work(queues: list[str], batch: int) -> None:
        with psycopg.connect(pooler, autocommit=True, prepare_threshold=None) as connection:
            mine = Client(connection)
            while len(done) < len(jobs):
                claims = mine.claim_jobs("w", queues, batch)
                ids, tokens = [c.job_id for c in claims], [c.lease_token for c in claims]
                if claims:
                    ended = mine.finish_jobs(ids, tokens)
                    assert {row.outcome for row in ended} == {"finished"}
                done.extend(c.payload["n"] for c in claims)

    with ThreadPoolExecutor() as pool:
        kinds = [(["a"], 100), (["b"], 7), (["c"], 40), (["c", "a", "b"], 25)]
        workers = [pool.submit(work, *kind) for kind in kinds * 2]
        for part in range(0, len(jobs), 1000):
            client.enqueue_many(jobs[part : part + 1000])
        for worker in workers:
            worker.result(timeout=100)
    holder.close()

    assert sorted(done) == list(range(len(jobs)))
    used = "select count(*) from rota.finished_jobs where attempts = 1"
    assert db.execute(used).fetchone() == (len(jobs),)


@pytest.mark.own_session
def test_a_worker_behind_a_pooler_is_woken_past_it(
    client: Client, db: psycopg.Connection[Any], dsn: str, pooler: str
) -> None:
    registry, started = Registry(), threading.Event()
    registry.add("a", lambda job: started.set())
    options: Any = {"poll_interval": 60.0, "listen_conninfo": dsn}
    worker = BackgroundWorker(pooler, registry, **options)
    try:
        waits = "select count(*) from pg_locks where locktype = 'advisory' and granted"
        wait_until(lambda: db.execute(waits).fetchone() != (0,), "a worker that waits")
        client.enqueue("a")

        assert started.wait(20)
    finally:
        worker.stop(now=True)


@pytest.mark.own_session
def test_a_worker_goes_on_when_its_sessions_begin_otherwise(
    client: Client, db: psycopg.Connection[Any], pooler: str
) -> None:
    """As when another client of the pooler has set it, or the pooler has opened new ones."""
    registry, started = Registry(), threading.Event()
    registry.add("a", lambda job: started.set())
    worker = BackgroundWorker(pooler, registry, poll_interval=0.05, listen=False)
    try:
        wait_until(lambda: worker.worker.is_ready, "a worker that claims")
        with psycopg.connect(pooler) as first, psycopg.connect(pooler) as second:
            for other in (first, second):
                other.execute("set default_transaction_isolation = 'repeatable read'")
        client.enqueue("a")

        assert started.wait(20)
    finally:
        worker.stop(now=True)


@pytest.mark.own_session
def test_a_worker_that_gets_no_session_for_its_ends_says_what_it_needs(
    client: Client, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And after one call: with the second its own ticks would take its jobs for stale."""
    registry = Registry()
    registry.add("a", lambda job: None)
    with pooled(dsn, "pool_mode = session\ndefault_pool_size = 1\n") as url:
        worker = BackgroundWorker(url, registry, listen=False)
        try:
            wait_until(lambda: worker.worker.is_ready, "a worker that claims")
            ends: Any = worker.worker._executor._completer
            ends._connection.limit = lambda timeout: 0.5
            client.enqueue("a")

            wait_until(lambda: ends.is_behind, "the first failure")
            assert ends._connection._unanswered == 1
            assert "reporting ends failed, retrying: no answer within 0.5" in caplog.text
            assert "a worker needs four connections" in caplog.text
        finally:
            worker.stop(now=True)
