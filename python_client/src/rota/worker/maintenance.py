"""What every worker does beside its jobs: tick, and say that it is there."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from math import inf

import psycopg

from .. import __version__
from ..client.async_client import AsyncClient
from ..client.statement import UNSET, Unset
from ..exceptions import RotaError
from ..rows import TickReport
from .connection import Connection, Retry

logger = logging.getLogger("rota")

REPORT_INTERVAL = 30.0
IDLE_REPORT_INTERVAL = 300.0
UNTAKEN_INTERVAL = 300.0
"""Seconds between two looks for jobs of these queues that no live worker takes."""
DEREGISTER_TIMEOUT = 3.0
HURRY_INTERVAL = 0.1
OUTAGE_PAUSE = 10.0
"""Seconds after an outage until a tick.  It takes back the jobs of workers that are silent, so
all of them first get the longest pause between two of their tries to connect."""


class Ticker:
    """Calls ``tick()`` every so many seconds, or never, and later after failures.

    Sooner if a tick says so: where all workers are busy none asks when a job may start.

    With *jitter* many workers do not all tick at once.
    """

    def __init__(
        self, connection: Connection, every: float | None, *, jitter: float = 0.0
    ) -> None:
        self._due_at = inf if every is None else 0.0
        self._connection = connection
        self._every = every or 0.0
        self._ticked_at = -inf
        self._jitter = jitter
        self._retry = Retry("tick", connection.state)

    @property
    def due_at(self) -> float:
        """When to tick next, on the monotonic clock; after an outage others come first."""
        return max(self._due_at, self._connection.state.back_at + OUTAGE_PAUSE)

    async def tick(self, *, is_patient: bool = True) -> TickReport | None:
        """Tick once; a failure is logged, and tried again later and later, or raised."""
        began_at = self._ticked_at = time.monotonic()
        try:
            report = await self._connection.call(AsyncClient.tick)
        except (psycopg.Error, RotaError) as error:
            if not is_patient:
                raise
            pause = self._retry.fail(error)
            self._due_at = time.monotonic() + max(self._every, pause)
            return None
        self._retry.succeed()
        pause = self._every * random.uniform(1.0 - self._jitter, 1.0 + self._jitter)  # noqa: S311
        # When there is more, claims get their turn between two ticks.
        self._due_at = 0.0 if report.has_more else began_at + pause
        if report.look_again_in is not None:
            # From now on: one that comes too early finds nothing, and is told nothing.
            pause = max(report.look_again_in.total_seconds(), HURRY_INTERVAL)
            self._due_at = min(self._due_at, time.monotonic() + pause)
        return report

    def hurry(self) -> None:
        """Tick at once, but no more than ten times a second."""
        if self._due_at < inf:
            self._due_at = min(self._due_at, self._ticked_at + HURRY_INTERVAL)

    def defer(self) -> None:
        """Tick no sooner than in a tenth of a second."""
        self._due_at = time.monotonic() + HURRY_INTERVAL


class Presence:
    """Says now and then, and after an outage, that a worker is there, and what it takes."""

    def __init__(
        self,
        connection: Connection,
        worker: str,
        queues: list[str],
        job_types: Callable[[], list[str]],
        concurrency: int | Unset = UNSET,
    ) -> None:
        self.interval = REPORT_INTERVAL
        self.look_at = 0.0
        """When to look for jobs that nobody takes, on the monotonic clock."""
        self._connection = connection
        self._worker = worker
        self._queues = queues
        self._job_types = job_types
        self._concurrency = concurrency
        self._reported_at = -inf
        self._is_known = False
        self._retry = Retry("reporting the worker", connection.state)
        self._untaken: set[tuple[str, str]] = set()

    @property
    def due_at(self) -> float:
        """When to report next, on the monotonic clock: after an outage at once."""
        was_away = self._reported_at < self._connection.state.back_at
        return -inf if was_away else self._reported_at + self.interval

    def hurry(self) -> None:
        """Report as soon as possible."""
        self._reported_at = -inf

    async def report(self) -> None:
        """Report; any error is the caller's."""
        self._reported_at = time.monotonic()
        await self._connection.call(self._report)

    async def maintain(self) -> None:
        """Do what is due; a failure is logged, and tried again when it is due again."""
        try:
            if time.monotonic() >= self.due_at:
                await self.report()
            if time.monotonic() >= self.look_at:
                await self.look_for_untaken()
        except (psycopg.Error, RotaError) as error:
            self._retry.fail(error)

    async def go_on(self) -> None:
        """Report until cancelled: a worker that waits for its last jobs is not gone."""
        self.look_at = inf  # it would take none of the jobs that nobody takes
        while True:
            await asyncio.sleep(max(self.due_at - time.monotonic(), 0.0))
            await self.maintain()

    async def _report(self, client: AsyncClient) -> None:
        self._is_known = True  # first: it may be stored though no answer comes
        await client.report_worker(
            self._worker, socket.gethostname(), os.getpid(), __version__, self._queues,
            self._job_types(), self._concurrency, client.connection.info.backend_pid,
        )  # fmt: skip

    async def look_for_untaken(self) -> None:
        """Warn of jobs that wait for a worker that nobody has started, of each type once."""
        self.look_at = time.monotonic() + UNTAKEN_INTERVAL
        found = await self._connection.call(lambda client: client.untaken_jobs(self._queues))
        for jobs in found:
            if (jobs.queue, jobs.job_type) not in self._untaken:
                text = (
                    "no live worker takes %s in queue %s: jobs are due there since %s, such as "
                    "job %s"
                )
                logger.warning(text, jobs.job_type, jobs.queue, jobs.due_since, jobs.job_id)
        self._untaken = {(jobs.queue, jobs.job_type) for jobs in found}

    async def leave(self) -> None:
        """Say that the worker is not there any more."""
        if self._is_known:
            await self._connection.call(
                lambda client: client.deregister_worker(self._worker), DEREGISTER_TIMEOUT
            )
