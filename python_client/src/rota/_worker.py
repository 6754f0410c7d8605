"""The worker: claim jobs, keep them in hand, and leave in good order.

Retries, ordering and leases are decided in SQL.  This module decides only when to ask for
jobs and when to stop.  Claims and upkeep share one connection, outcomes have another, and the
heartbeat thread a third, so a slow claim never delays a finish or a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection

from ._database import Database, backoff, connect, connect_async
from ._errors import LeaseLostError
from ._heart import Heart
from ._job import BaseJob
from ._registry import Registry
from ._runner import Runner
from ._settler import Settler
from ._signal_handlers import stop_on_signals
from ._upkeep import Upkeep

logger = logging.getLogger("rota")

MAX_BATCH = 1000
DATABASE_PATIENCE = 5
"""Failed claims in a row after which `run` with *drain* or *once* gives up."""


class Worker:
    """Runs the jobs that its registry has handlers for.

    *concurrency* handlers run at a time.  A claim takes as many jobs as can start, or *batch*
    if that is more; the others wait in memory.  *lease* is for jobs that bring none of their
    own.  After `stop`, running jobs have *grace_period* seconds to end.
    """

    def __init__(
        self,
        conninfo: str,
        registry: Registry,
        *,
        name: str | None = None,
        queues: Sequence[str] = ("default",),
        concurrency: int = 4,
        batch: int = 1,
        lease: timedelta | None = None,
        poll_interval: float = 1.0,
        tick_interval: float = 1.0,
        grace_period: float = 30.0,
    ) -> None:
        if not len(registry):
            raise ValueError("registry must have a handler")
        if concurrency < 1 or not 1 <= batch <= MAX_BATCH:
            raise ValueError(f"concurrency must be at least 1, and batch 1 to {MAX_BATCH}")
        self.name = name or f"{socket.gethostname()[:200]}:{os.getpid()}:{secrets.token_hex(3)}"
        self.loop: asyncio.AbstractEventLoop
        self._conninfo = conninfo
        self._registry = registry
        self._queues = list(queues)
        self._batch = batch
        self._lease = lease
        self._poll_interval = poll_interval
        self._grace_period = grace_period
        self._is_stopping = False
        self._wake = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._claims = Database(conninfo)
        self._endings = Database(conninfo)
        self._heart = Heart(partial(connect, conninfo, "rota heartbeat"), self._on_change)
        self._runner = Runner(
            self, registry, Settler(self._endings), self._heart, concurrency, self._wake.set
        )
        self._upkeep = Upkeep(self._claims, self.name, self._queues, tick_interval)

    def run(self, *, drain: bool = False, once: bool = False) -> None:
        """Work until `stop` or a signal: SIGTERM or SIGINT; a second one stops at once.

        With *drain* leave as soon as nothing is due, with *once* after one claim.
        """
        with stop_on_signals(self.stop):
            asyncio.run(self.run_async(drain=drain, once=once))

    async def run_async(self, *, drain: bool = False, once: bool = False) -> None:
        """Work like `run`, in the caller's event loop and without signals."""
        self.loop = asyncio.get_running_loop()
        await self._upkeep.introduce()
        self._heart.start()
        logger.info("worker %s started", self.name)
        try:
            await self._work(drain=drain, once=once)
        finally:
            await self._leave()

    def stop(self, *, now: bool = False) -> None:
        """Claim no more, give back what has not been started, and let the running jobs end.

        With *now* they get no grace period.  May be called from any thread.
        """
        self._is_stopping = True
        if hasattr(self, "loop") and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._wake.set)
            if now:
                self.loop.call_soon_threadsafe(self._stop_now.set)

    @property
    def has_threads(self) -> bool:
        """Whether a handler that did not want to end still runs in a thread."""
        return self._runner.has_threads

    def connect(self) -> Connection[Any]:
        """Open a connection for a handler in a thread."""
        return connect(self._conninfo, "rota job")

    async def connect_async(self) -> AsyncConnection[Any]:
        """Open a connection for a handler in the loop."""
        return await connect_async(self._conninfo, "rota job")

    async def report_progress(self, job: BaseJob, percent: float, message: str | None) -> None:
        """Store the progress of a job, if the database can be reached."""
        ids = (job.job_id, job.lease_token)
        try:
            await self._endings.call(lambda c: c.set_progress(*ids, percent, message))
        except LeaseLostError:
            job.is_told_lost = True
            raise
        except psycopg.OperationalError as error:
            logger.warning("job %s: progress not stored: %s", job.job_id, error)

    async def _work(self, *, drain: bool, once: bool) -> None:
        failures, next_claim, may_claim = 0, 0.0, True
        while not self._is_stopping:
            self._wake.clear()
            await self._upkeep.run_due()
            self._runner.cancel_lost()
            was_idle = self._runner.is_idle
            if was_idle and not may_claim:
                return
            if drain and was_idle and not failures:
                next_claim = 0.0
            if may_claim and self._runner.free and time.monotonic() >= next_claim:
                try:
                    pause = await self._claim()
                except psycopg.Error as error:
                    failures += 1
                    if (drain or once) and failures >= DATABASE_PATIENCE:
                        raise
                    logger.warning("claim failed, trying again: %s", str(error).strip())
                    pause = backoff(failures)
                else:
                    failures, may_claim = 0, not once
                    if drain and was_idle and self._runner.is_idle:
                        return
                next_claim = time.monotonic() + pause
            until = self._upkeep.due_at
            if may_claim and self._runner.free:
                until = min(until, next_claim)
            await self._sleep(until - time.monotonic())

    async def _claim(self) -> float:
        """Claim what can start, or a batch; return how long to wait before the next claim."""
        wanted = min(max(self._runner.free, self._batch), MAX_BATCH)
        sent_at = time.monotonic()
        claims = await self._claims.call(
            lambda client: client.claim_jobs(
                self.name, self._queues, wanted, self._lease, self._registry.job_types
            )
        )
        self._runner.accept(claims, sent_at)
        is_full = len(claims) == wanted
        return 0.0 if is_full else self._poll_interval * random.uniform(0.75, 1.25)  # noqa: S311

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(seconds, 0.0))

    async def _leave(self) -> None:
        logger.info("worker %s stops", self.name)
        await self._try(self._runner.give_back_waiting())
        await self._runner.wait(self._grace_period, self._stop_now)
        await self._try(self._runner.stop_running())
        self._heart.stop()
        await self._try(self._upkeep.take_leave())
        await self._claims.close()
        await self._endings.close()
        self._heart.join(timeout=1.0)
        logger.info("worker %s stopped", self.name)

    async def _try(self, action: Any) -> None:
        """Do what needs the database, but not for long: leaving matters more."""
        try:
            await asyncio.wait_for(action, timeout=5.0)
        except (TimeoutError, psycopg.Error) as error:
            logger.warning("leaving without the database: %r", error)

    def _on_change(self, job: BaseJob) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._runner.cancel, job)
