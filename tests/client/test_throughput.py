"""What lets a worker run many jobs: work at hand, few calls, places and threads used again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import rota
from rota import AsyncJob, Client, Job, Registry, Worker
from rota.worker.events import Outcome, run_sync
from rota.worker.executor import AHEAD, MAX_BATCH, WINDOW, Prefetch
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
Background = Callable[..., BackgroundWorker]
VALUE: ContextVar[str] = ContextVar("value", default="empty")


def _calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """Keep the arguments of each call of a function."""
    original = getattr(rota.AsyncClient, name)
    calls = []

    async def keep(self: rota.AsyncClient, *args: Any) -> Any:
        calls.append(args)
        return await original(self, *args)

    monkeypatch.setattr(rota.AsyncClient, name, keep)
    return calls


def _counts(db: psycopg.Connection[Any]) -> dict[str, int]:
    return dict(db.execute("select status, count(*) from rota.job_runs group by 1").fetchall())


def test_worker_claims_more_at_once_while_jobs_end_quickly(
    client: Client, db: psycopg.Connection[Any], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = _calls(monkeypatch, "claim_jobs")
    registry = Registry()

    @registry.handler("quick")
    async def quick(job: AsyncJob) -> None:
        pass

    for _ in range(3):
        client.enqueue_many([{"job_type": "quick"}] * 1000)
    drain(registry)

    wanted = [call[2] for call in claims]
    assert wanted[0] == 4
    assert max(wanted) > 40
    assert _counts(db) == {"succeeded": 3000}


def test_worker_reports_many_ends_in_one_call(
    client: Client, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    finishes = _calls(monkeypatch, "finish_jobs")
    registry = Registry()

    @registry.handler("quick")
    async def quick(job: AsyncJob) -> None:
        pass

    client.enqueue_many([{"job_type": "quick"}] * 1000)
    drain(registry, batch=500)

    assert sum(len(call[0]) for call in finishes) == 1000
    assert len(finishes) <= 100


def test_worker_that_got_slow_gives_back_what_it_cannot_start(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs that end at once, and then as many that do not end at all."""
    releases = _calls(monkeypatch, "end_jobs")
    registry = Registry()
    go_on = threading.Event()
    registry.add("quick", lambda job: time.sleep(0.005))
    registry.add("slow", lambda job: go_on.wait(30))
    client.enqueue_many([{"job_type": "quick"}] * 200)
    client.enqueue_many([{"job_type": "slow"}] * 200)

    background(registry)

    in_the_end = {"succeeded": 200, "running": 4, "queued": 196}
    wait_until(lambda: _counts(db) == in_the_end, "only jobs that run")
    attempts = "select distinct attempts from rota.jobs where status = 'queued'"
    assert db.execute(attempts).fetchall() == [(0,)]
    assert releases
    go_on.set()
    wait_until(lambda: _counts(db) == {"succeeded": 400})


def test_a_worker_goes_on_at_once_where_the_database_gives_less_than_it_wants(
    background: Background, client: Client
) -> None:
    """Where keys have limits a claim gives at most 200; no notification tells of the rest."""
    client.set_limit(limit_key="k:*", max_running=3)
    client.tick()
    jobs = [{"job_type": "nothing", "limit_key": f"k:{number}"} for number in range(500)]
    client.enqueue_many(jobs)
    registry = Registry()
    ended: list[int] = []
    registry.add("nothing", lambda job: ended.append(job.job_id))

    background(registry, batch=500, concurrency=2, listen=False, poll_interval=600.0)

    wait_until(lambda: len(ended) == 500, "all jobs")


def test_a_batch_of_the_users_choice_is_not_given_back(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("MAX_WAIT", "MAX_WAIT_IN_BATCH"):
        monkeypatch.setattr(f"rota.worker.executor.{limit}", 0.1)
    releases = _calls(monkeypatch, "end_jobs")
    registry = Registry()
    registry.add("slow", lambda job: time.sleep(0.5))
    client.enqueue_many([{"job_type": "slow"}] * 5)

    background(registry, concurrency=2, batch=5)

    wait_until(lambda: _counts(db) == {"succeeded": 5})
    assert not releases


def test_of_a_batch_what_has_a_time_limit_is_given_back(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.worker.executor.MAX_WAIT_IN_BATCH", 0.1)
    released: list[int] = []
    registry = Registry()
    go_on = threading.Event()
    registry.add("slow", lambda job: go_on.wait(30))
    registry.on_end(lambda job, end: released.append(job.job_id))
    _, limited, _ = (
        client.enqueue("slow", time_limit=limit).job_id
        for limit in (None, timedelta(minutes=1), None)
    )

    background(registry, concurrency=1, batch=3)

    wait_until(lambda: released)
    assert set(released) == {limited}
    go_on.set()
    wait_until(lambda: _counts(db) == {"succeeded": 3})
    attempts = "select distinct attempts from rota.finished_jobs"
    assert db.execute(attempts).fetchall() == [(1,)]


def test_a_worker_makes_room_after_jobs_that_it_has_run(
    client: Client, db: psycopg.Connection[Any], dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not after those of its batches that it has given back."""
    monkeypatch.setattr("rota.worker.executor.MAX_WAIT_IN_BATCH", 0.1)
    registry = Registry()
    registry.add("slow", lambda job: time.sleep(0.2))
    client.enqueue_many([{"job_type": "slow", "time_limit": timedelta(minutes=1)}] * 20)

    Worker(dsn, registry, concurrency=1, batch=20, max_jobs=5).run()

    assert 5 <= _counts(db)["succeeded"] < 10


def test_of_a_batch_what_is_cancelled_waits_for_no_place(
    client: Client, db: psycopg.Connection[Any], background: Background
) -> None:
    registry = Registry()
    go_on, ends = threading.Event(), []
    registry.add("slow", lambda job: go_on.wait(30))
    registry.on_end(lambda job, end: ends.append((job.job_id, end.outcome)))
    *_, last = (client.enqueue("slow", lease=timedelta(seconds=3)).job_id for _ in range(3))
    background(registry, concurrency=1, batch=3)
    wait_until(lambda: _counts(db) == {"running": 3})
    client.cancel_job(last)
    try:
        wait_until(lambda: _counts(db) == {"running": 2, "cancelled": 1})
        wait_until(lambda: ends == [(last, "cancelled")])
    finally:
        go_on.set()
    wait_until(lambda: _counts(db) == {"succeeded": 2, "cancelled": 1})


def test_jobs_run_while_a_finish_is_under_way(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish_jobs = rota.AsyncClient.finish_jobs
    may_finish = threading.Event()
    registry = Registry()
    begun: list[int] = []

    async def slow(self: rota.AsyncClient, *args: Any) -> Any:
        while not may_finish.is_set():
            await asyncio.sleep(0.01)
        return await finish_jobs(self, *args)

    @registry.handler("quick")
    async def quick(job: AsyncJob) -> None:
        begun.append(job.job_id)

    monkeypatch.setattr(rota.AsyncClient, "finish_jobs", slow)
    client.enqueue_many([{"job_type": "quick"}] * 50)
    background(registry, concurrency=1, batch=50)

    wait_until(lambda: len(begun) == 50, "the start of all jobs")
    assert _counts(db) == {"running": 50}
    may_finish.set()
    wait_until(lambda: _counts(db) == {"succeeded": 50})


@pytest.mark.parametrize("is_async", [True, False])
def test_no_job_begins_while_very_many_ends_are_not_reported(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
    is_async: bool,
) -> None:
    monkeypatch.setattr("rota.worker.completer.MAX_SIZE", 30)
    finish_jobs = rota.AsyncClient.finish_jobs
    may_finish = threading.Event()
    registry = Registry()
    begun: list[int] = []

    async def slow(self: rota.AsyncClient, *args: Any) -> Any:
        while not may_finish.is_set():
            await asyncio.sleep(0.01)
        return await finish_jobs(self, *args)

    workers: list[rota.Worker] = []

    def large(job: Job) -> str:
        begun.append(job.job_id)
        wait_until(lambda: workers and not workers[0]._executor._ended)
        return "ten chars."

    async def large_in_loop(job: AsyncJob) -> str:
        begun.append(job.job_id)
        return "ten chars."

    registry.add("large", large_in_loop if is_async else large)

    monkeypatch.setattr(rota.AsyncClient, "finish_jobs", slow)
    client.enqueue_many([{"job_type": "large"}] * 50)
    workers.append(background(registry, concurrency=1, batch=50).worker)

    wait_until(lambda: len(begun) >= 3)
    time.sleep(0.2)
    assert len(begun) <= 6
    may_finish.set()
    wait_until(lambda: _counts(db) == {"succeeded": 50})


def test_large_results_that_come_at_once_go_in_several_calls(
    client: Client, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than 256 MB at once PostgreSQL takes none."""
    monkeypatch.setattr("rota.worker.completer.MAX_SIZE", 30)
    calls = _calls(monkeypatch, "finish_jobs")
    registry, at_once = Registry(), threading.Barrier(20)

    @registry.handler("large")
    def large(job: Job) -> str:
        at_once.wait(30)
        return "ten chars."

    client.enqueue_many([{"job_type": "large"}] * 20)
    drain(registry, concurrency=20)

    sizes = [sum(map(len, results.obj)) for _, _, results, _ in calls]
    assert sum(sizes) == 20 * len('"ten chars."')
    assert max(sizes) <= 30


@pytest.mark.parametrize("is_async", [True, False])
def test_a_job_sees_the_context_of_no_other_and_not_that_of_the_worker(
    client: Client, drain: Drain, is_async: bool
) -> None:
    registry = Registry()
    seen: list[str] = []

    def look(job: Job) -> None:
        seen.append(VALUE.get())
        VALUE.set(f"of job {job.job_id}")

    async def look_in_loop(job: AsyncJob) -> None:
        seen.append(VALUE.get())
        VALUE.set(f"of job {job.job_id}")

    registry.add("look", look_in_loop if is_async else look)
    client.enqueue_many([{"job_type": "look"}] * 20)

    def work() -> None:
        VALUE.set("of the caller")
        drain(registry, concurrency=2)

    copy_context().run(work)

    assert seen == ["empty"] * 20


def test_a_thread_is_used_again(client: Client, drain: Drain) -> None:
    registry = Registry()
    threads: set[int] = set()
    registry.add("note", lambda job: threads.add(threading.get_ident()))
    client.enqueue_many([{"job_type": "note"}] * 100)

    drain(registry, concurrency=3)

    assert 1 <= len(threads) <= 3
    wait_until(lambda: not any(t.name == "rota-job" for t in threading.enumerate()))


def test_a_thread_that_raises_ends_its_job_and_goes_on(
    client: Client, db: psycopg.Connection[Any], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that something else raises in a thread may come at any place."""
    registry = Registry()
    registry.add("note", lambda job: None)

    def break_first(handler: Callable[[Job], object], job: Job) -> Outcome:
        if job.payload["n"] == 0:
            raise SystemExit
        return run_sync(handler, job)

    monkeypatch.setattr("rota.worker.executor.run_sync", break_first)
    note = {"job_type": "note", "max_attempts": 1}
    client.enqueue_many([{**note, "payload": {"n": n}} for n in range(3)])
    drain(registry, concurrency=1)

    rows = db.execute("select status, error_type from rota.finished_jobs order by id")
    assert rows.fetchall() == [("dead", "SystemExit"), ("succeeded", None), ("succeeded", None)]


def test_a_thread_goes_on_while_the_loop_is_blocked(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not with all that is held: six jobs end of which the loop does not hear."""
    monkeypatch.setattr("rota.worker.executor.MAX_ENDED", 5)
    registry = Registry()
    is_blocked, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    @registry.handler("blocks")
    async def blocks(job: AsyncJob) -> None:
        is_blocked.set()
        assert go_on.wait(30)

    @registry.handler("plain")
    def plain(job: Job) -> None:
        assert is_blocked.wait(30)
        ran.append(job.job_id)

    client.enqueue_many([{"job_type": "blocks"}] + [{"job_type": "plain"}] * 20)
    worker = background(registry, concurrency=2, batch=21).worker
    wait_until(lambda: ran and not worker._executor.busy_threads, "a thread without a job")
    ended_meanwhile = len(ran)
    go_on.set()

    wait_until(lambda: _counts(db) == {"succeeded": 21})
    assert ended_meanwhile == 6


def test_plain_and_async_handlers_begin_in_one_order(client: Client, drain: Drain) -> None:
    """A thread takes no plain job that stands behind an async one."""
    registry = Registry()
    begun: list[int] = []
    registry.add("plain", lambda job: begun.append(job.job_id))
    registry.handler("async")(_noting(begun))
    kinds = ["plain", "plain", "async", "plain", "async", "async", "plain", "plain"] * 5
    client.enqueue_many([{"job_type": kind} for kind in kinds])

    drain(registry, concurrency=1, batch=len(kinds))

    assert len(begun) == len(kinds)
    assert begun == sorted(begun)


def test_a_handler_that_was_given_up_has_no_place_for_another(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second job has its place when it ends, and the third waits for that of the second."""
    monkeypatch.setattr(rota.Worker, "_reason_to_retire", lambda self: None)
    registry = Registry()
    jobs: list[Job] = []
    gates = [threading.Event() for _ in range(3)]

    @registry.handler("waits")
    def waits(job: Job) -> None:
        jobs.append(job)
        assert gates[job.payload["n"]].wait(30)

    client.enqueue_many([{"job_type": "waits", "payload": {"n": n}} for n in range(3)])
    worker = background(registry, concurrency=1, batch=3).worker
    wait_until(lambda: len(jobs) == 1)
    assert worker._loop is not None
    worker._loop.call_soon_threadsafe(worker._executor._give_up_hung, jobs[0])
    wait_until(lambda: len(jobs) == 2)
    gates[0].set()
    gates[2].set()
    wait_until(lambda: worker._executor.busy_threads == 1, "the end of the first")
    begun_meanwhile = len(jobs)
    gates[1].set()

    wait_until(lambda: _counts(db) == {"running": 1, "succeeded": 2})
    assert begun_meanwhile == 2


def test_prefetch_holds_what_starts_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Prefetch(None)
    assert pace.wanted(4, 0) == 4
    assert pace.wanted(0, 0) == 0

    for _ in range(20):  # a thousand a second
        now += WINDOW
        pace.ended += int(1000 * WINDOW)
        pace.wanted(4, 0)
    wanted = pace.wanted(0, 0)
    assert 0.9 * 1000 * AHEAD <= wanted <= 1000 * AHEAD
    assert pace.wanted(0, wanted // 2 - 1) == wanted
    assert pace.wanted(0, wanted // 2) == 0

    for took, seconds in ((0.01, AHEAD + 0.04), (9.0, AHEAD + 0.2)):  # far away, or asleep
        pace.claim_time = took
        assert 0.9 * 1000 * seconds <= pace.wanted(0, 0) <= 1000 * seconds

    now += 3600.0
    assert pace.wanted(4, 0) == 4


def test_prefetch_holds_a_batch_of_the_users_choice() -> None:
    assert Prefetch(1).wanted(0, 0) == 0
    assert Prefetch(1).wanted(4, 0) == 4
    assert Prefetch(10).wanted(1, 0) == 10
    assert Prefetch(10).wanted(0, 4) == 10
    assert Prefetch(10).wanted(0, 5) == 0
    assert Prefetch(None).wanted(5000, 0) == MAX_BATCH


def test_a_lease_lost_while_the_job_waits_is_found_at_its_start(
    client: Client,
    db: psycopg.Connection[Any],
    background: Background,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry()
    go_on = threading.Event()
    ran: list[int] = []
    registry.add("first", lambda job: go_on.wait(20))
    registry.handler("second")(_noting(ran))
    client.enqueue("first")
    second = client.enqueue("second", lease=timedelta(seconds=1)).job_id
    with caplog.at_level(logging.INFO, "rota"):
        background(registry, concurrency=1, batch=2)
        wait_until(lambda: _counts(db) == {"running": 2})
        client.retry_job(second, force=True)
        client.cancel_job(second)
        time.sleep(0.8)  # a heartbeat
        go_on.set()
        wait_until(lambda: _counts(db) == {"succeeded": 1, "cancelled": 1})
        wait_until(lambda: any(m.startswith("lost ") for m in caplog.messages))

    assert not ran


def _noting(ran: list[int]) -> Callable[[AsyncJob], Any]:
    async def note(job: AsyncJob) -> None:
        ran.append(job.job_id)

    return note


@pytest.mark.parametrize("is_async", [True, False])
def test_stop_at_full_speed_leaves_no_job_behind(
    client: Client, db: psycopg.Connection[Any], background: Background, is_async: bool
) -> None:
    registry = Registry()
    ran: list[int] = []
    registry.add("note", _noting(ran) if is_async else lambda job: ran.append(job.job_id))
    for _ in range(20):
        client.enqueue_many([{"job_type": "note"}] * 1000)

    worker = background(registry)
    wait_until(lambda: len(ran) > 2000)
    worker.stop()

    left = db.execute("select distinct status, attempts from rota.jobs").fetchall()
    assert left == [("queued", 0)]
    done = db.execute("select id from rota.finished_jobs").fetchall()
    assert sorted(job_id for (job_id,) in done) == sorted(ran)


@pytest.mark.own_session
def test_connections_that_break_at_full_speed_cost_no_job(
    client: Client, db: psycopg.Connection[Any], background: Background
) -> None:
    """Those for claims, for ends and for heartbeats are cut, again and again."""
    registry = Registry()
    ran: list[int] = []
    registry.handler("note")(_noting(ran))
    # On a slow machine leases run out before the end is told again.
    note = {
        "job_type": "note",
        "lease": timedelta(seconds=1),
        "backoff": {"kind": "fixed", "base_seconds": 0.1},
    }
    for _ in range(10):
        client.enqueue_many([note] * 1000)
    cut = (
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like 'rota %' and datname = current_database()"
    )

    background(registry)
    for n in range(5):
        wait_until(lambda n=n: len(ran) > 1500 * n)  # type: ignore[misc]
        db.execute(cut)

    wait_until(lambda: _counts(db) == {"succeeded": 10_000})
    assert len(set(ran)) == 10_000
