"""The worker: claim jobs, keep them in hand, and leave in good order.

Retries, ordering and leases are decided in SQL.  This module decides only when to ask for
jobs and when to stop.  Claims and upkeep share one connection, endings have another, progress a
third, the heartbeat thread a fourth and the listener a fifth, so a slow claim never delays an
ending or a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial

import psycopg

from ..client.async_client import AsyncClient
from ..exceptions import RotaError
from ..job import BaseJob
from ..registry import Registry
from ..rows import ClaimedJob
from .connection import Database, connect, connect_async
from .events import log_start, log_stop
from .executor import Runner
from .fetcher import ClaimLoop
from .heartbeat import Heart
from .host import Host
from .loop import run_in_loop
from .maintenance import Upkeep
from .notifier import Listener
from .outage import Outage
from .pace import Pace
from .patient_calls import PatientCalls
from .settings import check_settings
from .signal_handlers import stop_on_signals
from .supply import Supply

logger = logging.getLogger("rota")

LEAVE_TIMEOUT = 5.0
"""Seconds that each step of leaving may wait for the database."""


class Worker:
    """Runs the jobs that its registry has handlers for.

    *concurrency* handlers run at a time.  *batch* jobs are claimed at once, and the next when
    half of them have started; without it, what is likely to start within 0.2 seconds.  *lease*
    is for jobs that bring none of their own.  After `stop`, running jobs have *grace_period*
    seconds to end.  Without *tick* the upkeep is left to others.  Without
    *listen* no job wakes it, and it only polls.
    """

    def __init__(
        self,
        conninfo: str,
        registry: Registry,
        *,
        name: str | None = None,
        queues: Sequence[str] = ("default",),
        concurrency: int = 4,
        batch: int | None = None,
        lease: timedelta | None = None,
        poll_interval: float = 1.0,
        tick: bool = True,
        tick_interval: float = 1.0,
        grace_period: float = 30.0,
        listen: bool = True,
    ) -> None:
        check_settings(
            registry, name, queues, concurrency, batch, lease,
            poll_interval=poll_interval, tick_interval=tick_interval, grace_period=grace_period,
        )  # fmt: skip
        self.name = name or f"{socket.gethostname()[:200]}:{os.getpid()}:{secrets.token_hex(3)}"
        self._registry = registry
        self._queues = list(queues)
        self._lease = lease
        self._concurrency = concurrency
        self._grace_period = grace_period
        self._hears_signals = False
        self._has_ended = True
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        outage = Outage()
        self._claims = Database(conninfo, outage)
        self._endings = Database(conninfo, outage)
        self._patient = PatientCalls(partial(Database, conninfo, outage))
        self._host = Host(self.name, conninfo, self._patient)
        connect_heart = partial(connect, conninfo, "rota heartbeat")
        self._heart = Heart(connect_heart, outage, self._on_change)
        self._upkeep = Upkeep(
            self._claims, self.name, self._queues, tick_interval if tick else None
        )
        self._listener: Listener | None = None
        if listen:
            connect_listener = partial(connect_async, conninfo, "rota listener")
            self._listener = Listener(
                connect_listener, self._claims, self._queues, registry, poll_interval
            )
        pace = Pace(self._listener, poll_interval)
        self._loop = ClaimLoop(self._claims, self._claim, self._upkeep, pace)
        self._runner = Runner(
            self._host,
            registry,
            self._endings,
            self._heart,
            concurrency,
            Supply(batch),
            self._loop.wake,
        )

    def run(self, *, drain: bool = False, once: bool = False) -> None:
        """Work until `stop` or a signal: SIGTERM or SIGINT; a second one stops at once.

        With *drain* leave as soon as nothing is due, with *once* after one claim.
        """
        with stop_on_signals(self.stop) as self._hears_signals:
            self._has_ended = run_in_loop(self.run_async(drain=drain, once=once))

    async def run_async(self, *, drain: bool = False, once: bool = False) -> None:
        """Work like `run`, in the caller's event loop and without signals."""
        self._host.loop = asyncio.get_running_loop()
        try:
            await self._upkeep.introduce()
        except BaseException:
            await self._claims.close()
            raise
        self._heart.start()
        log_start(
            self.name, self._claims.name, self._queues, self._registry.job_types,
            self._concurrency,
        )  # fmt: skip
        claiming = asyncio.create_task(self._loop.run(self._runner, drain=drain, once=once))
        stopping = asyncio.create_task(self._stop.wait())
        listening: asyncio.Task[None] | None = None
        if self._listener is not None and not (drain or once):
            listening = asyncio.create_task(self._listener.run())
        try:
            await asyncio.wait([claiming, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if listening is not None:
                listening.cancel()
            await self._leave(claiming, listening)
        if not claiming.cancelled():
            claiming.result()  # raises what ended the loop

    def stop(self, *, now: bool = False) -> None:
        """Claim no more, give back what has not been started, and let the running jobs end.

        With *now* they get no grace period.  May be called from any thread.
        """
        self._loop.stop()
        self._call(self._loop.wake)
        self._call(self._stop.set)
        if now:
            self._call(self._stop_now.set)

    @property
    def has_threads(self) -> bool:
        """Whether a handler that did not want to end still runs, in a thread or in the loop."""
        return bool(self._runner.threads) or not self._has_ended

    async def _claim(self, client: AsyncClient, max_jobs: int) -> list[ClaimedJob]:
        job_types = self._registry.job_types
        return await client.claim_jobs(
            self.name, self._queues, max_jobs, self._lease, job_types
        )

    async def _leave(
        self, claiming: asyncio.Task[None], listening: asyncio.Task[None] | None
    ) -> None:
        self._runner.close()
        log_stop(self.name, self._runner.running, self._grace_period, self._hears_signals)
        await _try(self._runner.give_back_waiting())
        # A claim or a tick may hang behind a lock; a claim that still comes through is undone.
        await asyncio.wait([claiming], timeout=LEAVE_TIMEOUT)
        claiming.cancel()
        await asyncio.wait([claiming])
        await _try(self._runner.give_back_waiting())
        await self._runner.wait(self._grace_period, self._stop_now)
        await _try(self._runner.stop_running())
        self._heart.stop()
        await _try(self._upkeep.take_leave())
        await self._claims.close()
        if listening is not None:
            await asyncio.wait([listening], timeout=LEAVE_TIMEOUT)
        await self._endings.close()
        await self._patient.close()
        self._heart.join(timeout=1.0)
        logger.info("worker %s stopped", self.name)

    def _on_change(self, job: BaseJob) -> None:
        self._call(partial(self._runner.cancel, job))

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function in the loop's thread, if there is a loop yet, or still."""
        loop = getattr(self._host, "loop", None)
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function)


async def _try(action: Awaitable[None]) -> None:
    """Do what needs the database, but not for long: leaving matters more."""
    try:
        await asyncio.wait_for(action, timeout=LEAVE_TIMEOUT)
    except (TimeoutError, psycopg.Error, RotaError) as error:
        logger.warning("leaving without the database: %r", error)
