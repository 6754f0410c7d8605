"""procrastinate: its worker on its psycopg connector."""

from __future__ import annotations

import os

import procrastinate
from common import FILE, URL, Times, begin, chunks, main, pace

CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "20"))
POOL = int(os.environ.get("BENCH_POOL", "10"))

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=URL, min_size=POOL, max_size=POOL)
)
times: list[Times] = []


@app.task(name="noop")
async def noop(n: int) -> None:
    if FILE.is_dir():
        begin()
        return
    if not times:
        times.append(Times())
    times[0].add(n)


async def fill() -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for numbers in chunks():
            await noop.batch_defer_async(*({"n": n} for n in numbers))


async def work() -> None:
    async with app.open_async():
        await app.run_worker_async(
            concurrency=CONCURRENCY,
            delete_jobs=os.environ.get("BENCH_DELETE", "never"),
            listen_notify=True,
        )


async def produce() -> None:
    sent = Times()
    async with app.open_async():
        async for n in pace():
            sent.add(n)
            await noop.defer_async(n=n)


if __name__ == "__main__":
    main({"fill": fill, "work": work, "listen": work, "produce": produce})
