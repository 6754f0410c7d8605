"""What handlers with a transaction or an effect cost, against plain ones and the same by hand.

A plain job's end is reported together with those of many others, so one flush to the disk is
enough for hundreds.  A transaction of a handler has its own commit, and an effect two: that a
server has to flush each of them is no part of rota.  So beside plain jobs stands what a program
could do at best that has nothing but psycopg: in each thread or task one connection, which
claims a hundred jobs and makes for each the same calls, one after the other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

import rota
from bench.figures import Figure, Ratio, Reading
from bench.measured_server import BenchServer, one
from rota.worker.process import loop_factory

NUMBER = 13
PLACES = 4
"""Handlers at a time: so many are the worker's default."""
BATCH = 100
KINDS = {"plain": 20_000, "transaction": 4_000, "effect": 4_000}
"""What a handler does, and the jobs of a round."""
WORK = "insert into payments (job_id, amount) values (%s, 7)"
TABLE = "create table payments (job_id bigint, amount integer)"
FILL = """
    select count(*) from rota.enqueue_many((
        select jsonb_agg(jsonb_build_object('job_type', %s::text))
        from generate_series(1, 1000)))
"""
CLAIM = "select job_id, lease_token from rota.claim_jobs('by hand', max_jobs => 100)"
FINISH = "select rota.finish_job(job_id => %s, lease_token => %s)"
FINISH_ALL = "select outcome from rota.finish_jobs(job_ids => %s, lease_tokens => %s)"
RECORD = """
    select rota.record_effect(scope => %s, key => %s, job_id => %s, lease_token => %s)
"""
COMPLETE = """
    select rota.complete_effect(scope => %s, key => %s, job_id => %s, lease_token => %s)
"""

threads, tasks = rota.Registry(), rota.Registry()


@threads.handler("plain")
def plain(job: rota.Job) -> None:
    """Do nothing."""


@threads.handler("transaction")
def transaction(job: rota.Job) -> None:
    with job.transaction() as connection:
        connection.execute(WORK, [job.job_id])


@threads.handler("effect")
def effect(job: rota.Job) -> None:
    with job.effect("mail", str(job.job_id)):
        pass


@tasks.handler("plain")
async def plain_in_loop(job: rota.AsyncJob) -> None:
    """Do nothing."""


@tasks.handler("transaction")
async def transaction_in_loop(job: rota.AsyncJob) -> None:
    async with job.transaction() as connection:
        await connection.execute(WORK, [job.job_id])


@tasks.handler("effect")
async def effect_in_loop(job: rota.AsyncJob) -> None:
    async with job.effect("mail", str(job.job_id)):
        pass


def by_worker(dsn: str, registry: rota.Registry) -> None:
    """Drain with rota's worker."""
    logging.getLogger("rota").setLevel(logging.WARNING)
    rota.Worker(dsn, registry, concurrency=PLACES).run(drain=True)


def by_thread(dsn: str, kind: str) -> None:
    """Drain by hand, with one connection."""
    with psycopg.connect(dsn, autocommit=True) as db:
        while jobs := db.execute(CLAIM).fetchall():
            for job_id, token in jobs:
                if kind == "transaction":
                    with db.transaction():
                        db.execute(WORK, [job_id])
                        db.execute(FINISH, [job_id, token])
                elif kind == "effect":
                    names = ["mail", str(job_id), job_id, token]
                    db.execute(RECORD, names)
                    db.execute(COMPLETE, names)
            if kind != "transaction":
                db.execute(FINISH_ALL, [list(column) for column in zip(*jobs, strict=True)])


async def by_task(dsn: str, kind: str) -> None:
    """Drain by hand, with one connection of an event loop."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as db:
        while jobs := await (await db.execute(CLAIM)).fetchall():
            for job_id, token in jobs:
                if kind == "transaction":
                    async with db.transaction():
                        await db.execute(WORK, [job_id])
                        await db.execute(FINISH, [job_id, token])
                elif kind == "effect":
                    names = ["mail", str(job_id), job_id, token]
                    await db.execute(RECORD, names)
                    await db.execute(COMPLETE, names)
            if kind != "transaction":
                columns = [list(column) for column in zip(*jobs, strict=True)]
                await db.execute(FINISH_ALL, columns)


def by_threads(dsn: str, kind: str) -> None:
    all_threads = [threading.Thread(target=by_thread, args=[dsn, kind]) for _ in range(PLACES)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join()


def by_tasks(dsn: str, kind: str) -> None:
    async def work() -> None:
        await asyncio.gather(*[by_task(dsn, kind) for _ in range(PLACES)])

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work())


WAYS: dict[tuple[str, bool], Callable[[str, str], None]] = {
    ("threads", True): lambda dsn, _: by_worker(dsn, threads),
    ("tasks", True): lambda dsn, _: by_worker(dsn, tasks),
    ("threads", False): by_threads,
    ("tasks", False): by_tasks,
}


def drain(dsn: str, kind: str, where: str, is_ours: bool, answers: Any) -> None:
    """Do all jobs in this process, and tell how many seconds it took."""
    began = time.perf_counter()
    WAYS[where, is_ours](dsn, kind)
    answers.put(time.perf_counter() - began)


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    dsn = server.fresh("handlers")
    rates: defaultdict[tuple[str, str, bool], list[float]] = defaultdict(list)
    costs: defaultdict[tuple[str, str, bool], list[float]] = defaultdict(list)
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(TABLE)
        ways = list(itertools.product(KINDS, ("threads", "tasks"), (True, False)))
        for _ in range(rounds):
            for way in random.sample(ways, len(ways)):
                jobs = 1_000 if is_quick else KINDS[way[0]]
                seconds, cpu = one_drain(server, db, dsn, way, jobs)
                rates[way].append(jobs / seconds)
                costs[way].append(cpu / jobs * 1e6)
    server.drop("handlers")
    yield from figures(rates, costs)


def one_drain(
    server: BenchServer,
    db: psycopg.Connection[Any],
    dsn: str,
    way: tuple[str, str, bool],
    jobs: int,
) -> tuple[float, float]:
    """Let one process do so many jobs; return its seconds and the CPU seconds of the server."""
    kind, where, is_ours = way
    done = "select count(*) from rota.finished_jobs where status = 'succeeded'"
    before = one(db, done)
    for _ in range(jobs // 1_000):
        db.execute(FILL, [kind])
    context = multiprocessing.get_context("spawn")
    answers: Any = context.SimpleQueue()
    process = context.Process(target=drain, args=(dsn, kind, where, is_ours, answers))
    cpu = server.cpu()
    process.start()
    process.join()
    if process.exitcode or one(db, done) - before != jobs:
        raise RuntimeError(f"{way}: exit code {process.exitcode}, jobs are left or have failed")
    return answers.get(), server.cpu() - cpu


def figures(
    rates: dict[tuple[str, str, bool], list[float]],
    costs: dict[tuple[str, str, bool], list[float]],
) -> Iterator[Figure]:
    for where, kind in itertools.product(("threads", "tasks"), KINDS):
        ours, by_hand = rates[kind, where, True], rates[kind, where, False]
        what = f"{kind}, {where}"
        if kind == "plain":
            yield Reading(number=NUMBER, name=what, unit="jobs/s", values=ours, is_cost=False)
            yield Reading(
                number=NUMBER, name=f"{what}, by hand", unit="jobs/s", values=by_hand,
                is_cost=False,
            )  # fmt: skip
        else:
            plain_by_hand = statistics.median(rates["plain", where, False])
            share = statistics.median(by_hand) / plain_by_hand
            yield Ratio(
                number=NUMBER,
                name=f"{what}, against the same by hand",
                unit="jobs/s",
                ours=ours,
                theirs=by_hand,
                yardstick="by hand",
                goal=0.9,
            )
            yield Ratio(
                number=NUMBER,
                name=f"{what}, against plain jobs",
                unit="jobs/s",
                ours=ours,
                theirs=rates["plain", where, True],
                yardstick="plain",
                goal=0.5,
                note=f"by hand it is {share:.2f}",
            )
        for whose, is_ours in (("rota", True), ("by hand", False)):
            yield Reading(
                number=NUMBER,
                name=f"{what}, CPU of the server, {whose}",
                unit="us/job",
                values=costs[kind, where, is_ours],
            )
