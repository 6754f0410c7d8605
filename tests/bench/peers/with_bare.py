"""No queue at all: the five lines of bare.sql, called in a loop by psycopg."""

from __future__ import annotations

import os
import time

import psycopg
from common import JOBS, URL, begin, main

BATCH = int(os.environ.get("BENCH_BATCH", "100"))


async def fill() -> None:
    """Put the tasks in."""
    with psycopg.connect(URL, autocommit=True) as db:
        db.execute(
            "insert into bare.tasks (task_type, payload)"
            " select 'noop', jsonb_build_object('n', n) from generate_series(1, %s) as g (n)",
            [JOBS],
        )


async def nothing(payload: object) -> None:
    """Do nothing, as the handlers of the others."""
    begin()


async def work() -> None:
    """Claim, call, finish; each call is a transaction."""
    async with await psycopg.AsyncConnection.connect(URL, autocommit=True) as db:
        while True:
            rows = await db.execute("select * from bare.claim_tasks(%s)", [BATCH])
            tasks = await rows.fetchall()
            for _, _, payload in tasks:
                await nothing(payload)
            if tasks:
                ids = [task[0] for task in tasks]
                await db.execute("select from bare.finish_tasks(%s)", [ids])
            else:
                time.sleep(0.1)


if __name__ == "__main__":
    main({"fill": fill, "work": work})
