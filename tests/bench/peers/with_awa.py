"""awa: its Rust runtime with handlers in Python."""

from __future__ import annotations

import os
from dataclasses import dataclass

import awa
from common import FILE, URL, Times, begin, chunks, main, pace, until_told

WORKERS = int(os.environ.get("BENCH_WORKERS", "128"))
CONNECTIONS = int(os.environ.get("BENCH_CONNECTIONS", "24"))
CLAIMERS = int(os.environ.get("BENCH_CLAIMERS", "1"))
BATCH = int(os.environ.get("BENCH_BATCH", "512"))
QUEUE = "bench"


@dataclass
class Noop:
    n: int


async def fill() -> None:
    client = awa.AsyncClient(URL, max_connections=10)
    await client.migrate()
    await run_worker(client, None)  # the first worker of a fresh database activates its storage
    await client.shutdown()
    client = awa.AsyncClient(URL, max_connections=4)
    for numbers in chunks():
        await client.enqueue_many_copy([Noop(n) for n in numbers], queue=QUEUE)


async def run_worker(client: awa.AsyncClient, times: Times | None) -> None:
    @client.task(Noop, queue=QUEUE)
    async def noop(job: awa.Job) -> None:
        if times is None:
            begin()
        else:
            times.add(job.args.n)

    queue = {"name": QUEUE, "max_workers": WORKERS}
    if CLAIMERS:
        queue |= {"claimers": CLAIMERS, "claim_batch_size": BATCH}
    await client.start([queue])


async def work() -> None:
    client = awa.AsyncClient(URL, max_connections=CONNECTIONS)
    await run_worker(client, None if FILE.is_dir() else Times())
    await until_told()
    await client.shutdown()


async def produce() -> None:
    sent = Times()
    client = awa.AsyncClient(URL, max_connections=4)
    async for n in pace():
        sent.add(n)
        await client.insert(Noop(n), queue=QUEUE)


if __name__ == "__main__":
    main({"fill": fill, "work": work, "listen": work, "produce": produce})
