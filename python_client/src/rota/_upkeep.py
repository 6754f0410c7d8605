"""What every worker does beside its jobs: tick, and say that it is there."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from math import inf

import psycopg

from ._async_client import AsyncClient
from ._database import Database
from ._errors import RotaError
from ._outage import is_lost
from ._version import __version__

logger = logging.getLogger("rota")

REPORT_INTERVAL = 30.0


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
        self._report_at = 0.0

    @property
    def due_at(self) -> float:
        """When there is something to do next, on the monotonic clock."""
        return min(self._tick_at, self._report_at)

    async def introduce(self) -> None:
        """Report for the first time; any error is the caller's."""
        await self._report()

    async def run_due(self) -> None:
        """Do what is due; a failure is logged, and tried again when it is due again."""
        try:
            if time.monotonic() >= self._tick_at:
                self._tick_at = time.monotonic() + self._interval * random.uniform(0.8, 1.2)  # noqa: S311
                report = await self._database.call_read_committed(AsyncClient.tick)
                if report.has_more:
                    self._tick_at = 0.0  # claims get their turn between two ticks
            if time.monotonic() >= self._report_at:
                await self._report()
        except (psycopg.Error, RotaError) as error:
            if not is_lost(error):
                logger.warning("upkeep failed: %s", str(error).strip())

    async def take_leave(self) -> None:
        """Report for the last time."""
        await self._database.call(lambda client: client.forget_worker(self._worker))

    async def _report(self) -> None:
        self._report_at = time.monotonic() + REPORT_INTERVAL
        host, pid = socket.gethostname(), os.getpid()
        await self._database.call(
            lambda client: client.report_worker(
                self._worker, host, pid, __version__, self._queues
            )
        )
