"""What every worker does beside its jobs: tick, and say that it is there."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from math import inf

import psycopg

from .._version import __version__
from ..client.async_client import AsyncClient
from ..exceptions import RotaError
from .connection import Database
from .outage import is_lost

logger = logging.getLogger("rota")

REPORT_INTERVAL = 30.0
IDLE_REPORT_INTERVAL = 300.0
FOLLOWER_FACTOR = 5
"""So many times less often those look whether to tick whom wait_for_jobs() did not ask to."""


class Upkeep:
    """Calls ``tick()`` about every *interval* seconds, or never, and reports now and then."""

    def __init__(
        self, database: Database, worker: str, queues: list[str], interval: float | None
    ) -> None:
        self._database = database
        self._worker = worker
        self._queues = queues
        self._interval = interval or 0.0
        self._tick_at = inf if interval is None else 0.0
        self._reported_at = -inf
        self._report_interval = REPORT_INTERVAL

    @property
    def due_at(self) -> float:
        """When there is something to do next, on the monotonic clock."""
        return min(self._tick_at, self._reported_at + self._report_interval)

    async def introduce(self) -> None:
        """Report for the first time; any error is the caller's."""
        await self._report()

    async def run_due(self, *, is_idle: bool, is_follower: bool, may_tick: bool) -> None:
        """Do what is due; a failure is logged, and tried again when it is due again."""
        self._report_interval = IDLE_REPORT_INTERVAL if is_idle else REPORT_INTERVAL
        try:
            if time.monotonic() >= self._tick_at:
                pause = self._interval * random.uniform(0.8, 1.2)  # noqa: S311
                if not may_tick:
                    self._tick_at = time.monotonic() + min(pause, 0.1)
                elif is_idle and is_follower:
                    self._tick_at = time.monotonic() + FOLLOWER_FACTOR * pause
                else:
                    self._tick_at = time.monotonic() + pause
                    report = await self._database.call_read_committed(AsyncClient.tick)
                    if report.has_more:
                        self._tick_at = 0.0  # claims get their turn between two ticks
            if time.monotonic() >= self._reported_at + self._report_interval:
                await self._report()
        except (psycopg.Error, RotaError) as error:
            if not is_lost(error):
                logger.warning("maintenance failed: %s", str(error).strip())

    async def take_leave(self) -> None:
        """Report for the last time."""
        await self._database.call(lambda client: client.forget_worker(self._worker))

    async def _report(self) -> None:
        self._reported_at = time.monotonic()
        host, pid = socket.gethostname(), os.getpid()
        await self._database.call(
            lambda client: client.report_worker(
                self._worker, host, pid, __version__, self._queues
            )
        )
