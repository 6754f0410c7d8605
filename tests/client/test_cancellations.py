"""What a handler or a call of the worker leaves behind that is cancelled: nothing, wherever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Generator
from typing import Any

import psycopg
import pytest

from rota import AsyncClient, Client
from rota.job import AsyncJob, JobContext
from rota.worker.connection import Connection, ConnectionState
from rota.worker.lending import Pool, Watch
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.own_session]

SESSIONS = (
    "select count(*) from pg_stat_activity"
    " where application_name = 'rota job' and datname = current_database()"
)


class CancelledAt:
    """Runs what may wait, and cancels its task where it waits for so many things.

    That is before what it waits for is there, or *late*: when it is there, but not seen yet.
    """

    def __init__(self, runs: Coroutine[Any, Any, None], number: int, *, late: bool) -> None:
        self.number = number
        self._runs, self._late = runs, late

    def __await__(self) -> Generator[Any, Any, None]:
        task = asyncio.current_task()
        assert task is not None
        resume, value = self._runs.send, None
        while True:
            try:
                waits_for = resume(value)  # type: ignore[arg-type]
            except StopIteration:
                return
            self.number -= 1
            if self.number == 0 and self._late and waits_for is not None:
                waits_for.add_done_callback(lambda _: task.cancel())
            elif self.number == 0:
                task.cancel()
            resume, value = self._runs.send, None
            try:
                yield waits_for
            except asyncio.CancelledError as error:
                resume, value = self._runs.throw, error  # type: ignore[assignment]


async def _use(kind: str, job: AsyncJob, connection: Connection) -> None:
    if kind == "transaction":
        async with job.transaction() as lent:
            await lent.execute("select 1")
    elif kind == "effect":
        async with job.effect("mail", "k"):
            pass
    elif kind == "progress":
        await job.set_progress(50)
    else:
        await connection.call(AsyncClient.version)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("kind", ["transaction", "effect", "progress", "call"])
def test_a_cancellation_leaves_nothing_behind_wherever_it_comes(
    client: Client, db: psycopg.Connection[Any], dsn: str, kind: str, late: bool
) -> None:
    async def cancel_at(number: int) -> bool:
        """Return whether it was still under way there."""
        handlers, calls = Pool(dsn, 1, Watch(), resets=True), Pool(dsn, 1, Watch())
        state = ConnectionState()
        connection = Connection(dsn, "rota job", state)
        client.enqueue("a", idempotency_key=f"{number}")
        (claim,) = client.claim_jobs("w")
        job = AsyncJob(claim, JobContext("w", handlers, calls, state), time.monotonic())
        runs = CancelledAt(_use(kind, job, connection), number, late=late)

        async def run() -> None:
            await runs

        task = asyncio.create_task(run())
        async with asyncio.timeout(30):
            await asyncio.wait([task])
            assert task.cancelled() == (runs.number <= 0)
            for pool in (handlers, calls):  # each has one connection
                async with pool.lend_async(job, 1.0) as lent:
                    await lent.connection.execute("select 1")
            await connection.call(AsyncClient.version)
        handlers.close()
        calls.close()
        await connection.close()
        done = db.execute("select status from rota.job_runs where id = %s", [job.job_id])
        assert job.is_in_doubt or done.fetchone() == ("running",)
        assert len(asyncio.all_tasks()) == 1
        return task.cancelled()

    async def cancel_everywhere() -> int:
        number = 1
        while await cancel_at(number):
            # While the task lives, with all that its frames have.
            wait_until(lambda: db.execute(SESSIONS).fetchone() == (0,), "their ends", 5.0)
            number += 1
        return number

    assert asyncio.run(cancel_everywhere()) > 3
