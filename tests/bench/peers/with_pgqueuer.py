"""PgQueuer: queue managers on asyncpg, under uvloop as in its own benchmark."""

from __future__ import annotations

import asyncio
import os
import signal

import asyncpg
import uvloop
from common import FILE, URL, Times, begin, chunks, main, pace
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

MANAGERS = int(os.environ.get("BENCH_MANAGERS", "5"))
BATCH = int(os.environ.get("BENCH_BATCH", "10"))
times: list[Times] = []


async def noop(job: Job) -> None:
    if FILE.is_dir():
        begin()
        return
    if not times:
        times.append(Times())
    times[0].add(int(job.payload or b"0"))


async def connect() -> AsyncpgDriver:
    return AsyncpgDriver(await asyncpg.connect(dsn=URL))


async def fill() -> None:
    queries = Queries(await connect())
    await queries.install()
    await queries.optimize_autovacuum()
    for numbers in chunks():
        size = len(numbers)
        await queries.enqueue(["noop"] * size, [b"%d" % n for n in numbers], [0] * size)


async def work() -> None:
    managers = [PgQueuer(await connect()) for _ in range(MANAGERS)]
    for manager in managers:
        manager.entrypoint("noop")(noop)

    def stop() -> None:
        for manager in managers:
            manager.shutdown.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await asyncio.gather(*(manager.run(batch_size=BATCH) for manager in managers))


async def produce() -> None:
    sent = Times()
    queries = Queries(await connect())
    async for n in pace():
        sent.add(n)
        await queries.enqueue("noop", b"%d" % n)


if __name__ == "__main__":
    main({"fill": fill, "work": work, "listen": work, "produce": produce}, uvloop.run)
