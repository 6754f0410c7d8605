"""PgQ: the loop that its documentation gives a consumer, one batch after the other."""

from __future__ import annotations

import time

import psycopg
from common import JOBS, URL, begin, main

TICK = 500  # events to a batch: ticker_max_count, unless a queue sets it


async def fill() -> None:
    with psycopg.connect(URL, autocommit=True) as db:
        db.execute("create extension pgq")
        db.execute("select pgq.create_queue('bench')")
        db.execute("select pgq.register_consumer('bench', 'worker')")
        for first in range(0, JOBS, TICK):
            last = min(first + TICK, JOBS)
            db.execute(
                "select count(pgq.insert_event('bench', 'noop', n::text))"
                " from generate_series(%s::int, %s::int) as g (n)",
                [first, last - 1],
            )
            db.execute("select pgq.ticker('bench')")


async def nothing(event: object) -> None:
    begin()


async def work() -> None:
    async with await psycopg.AsyncConnection.connect(URL, autocommit=True) as db:
        while True:
            got = await db.execute("select pgq.next_batch('bench', 'worker')")
            (batch,) = await got.fetchone() or (None,)
            if batch is None:
                time.sleep(0.1)
                continue
            events = await db.execute("select * from pgq.get_batch_events(%s)", [batch])
            for event in await events.fetchall():
                await nothing(event)
            await db.execute("select pgq.finish_batch(%s)", [batch])


if __name__ == "__main__":
    main({"fill": fill, "work": work})
