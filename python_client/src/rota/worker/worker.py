"""The worker: claim jobs, keep them in hand, and leave in good order.

Retries, ordering and leases are decided in SQL.  This module decides only when to ask for
jobs and when to stop.  Claims and maintenance share one connection, endings have another, the
heartbeat thread a third and the notifier a fourth, so a slow claim never delays an ending or a
heartbeat.  Handlers are lent connections of their own.
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
from math import inf

import psycopg

from ..client.async_client import AsyncClient
from ..client.values import check_name, check_range
from ..exceptions import RotaError, to_duration
from ..job import BaseJob, JobContext
from ..registry import Registry
from ..rows import ClaimedJob
from .connection import Connection, ConnectionState, JobConnections, end_task
from .events import log_start, log_stop
from .executor import MAX_BATCH, Executor, Prefetch
from .fetcher import Fetcher, Poller
from .heartbeat import Heartbeat
from .maintenance import Maintenance
from .notifier import Notifier
from .process import run_in_loop, stop_on_signals

logger = logging.getLogger("rota")

LEAVE_TIMEOUT = 5.0
"""Seconds that each step of leaving may wait for the database."""
MAX_LEASE = 30 * 24 * 3600


class Worker:
    """Runs the jobs that its registry has handlers for, once: a worker that has left is over.

    *concurrency* handlers run at a time.  *batch* jobs are claimed at once, and the next when
    half of them have started; without it, what is likely to start within 0.2 seconds.
    *lease*, a timedelta or seconds, is for jobs that bring none of their own.  After `stop`,
    running jobs have *grace_period* seconds to end.  Without *tick* the maintenance is left to
    others.  Without *listen* no job wakes it, and it only polls; *listen_conninfo* leads past
    a pooler, through which no notification comes.
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
        lease: timedelta | float | None = None,
        poll_interval: float = 1.0,
        tick: bool = True,
        tick_interval: float = 1.0,
        grace_period: float = 20.0,
        listen: bool = True,
        listen_conninfo: str | None = None,
    ) -> None:
        _check_settings(
            registry, name, queues, concurrency, batch, lease,
            poll_interval=poll_interval, tick_interval=tick_interval, grace_period=grace_period,
        )  # fmt: skip
        self.name = name or f"{socket.gethostname()[:200]}:{os.getpid()}:{secrets.token_hex(3)}"
        self._registry = registry
        self._queues = list(queues)
        self._lease = None if lease is None else to_duration("lease", lease)
        self._concurrency = concurrency
        self._grace_period = grace_period
        self._has_signals = False
        self._is_begun = False
        self._has_ended = True
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        state = ConnectionState()
        self._connection = Connection(conninfo, "rota fetcher", state)
        self._connections = JobConnections(conninfo, concurrency, state)
        self._context = JobContext(self.name, self._connections)
        self._heartbeat = Heartbeat(
            Connection(conninfo, "rota heartbeat", state), self._on_change
        )
        self._maintenance = Maintenance(
            self._connection,
            self.name,
            self._queues,
            registry,
            tick_interval if tick else None,
        )
        self._notifier: Notifier | None = None
        if listen:
            self._notifier = Notifier(
                Connection(listen_conninfo or conninfo, "rota notifier", state),
                self._connection,
                self._queues,
                registry,
                poll_interval,
            )
        poller = Poller(self._notifier, poll_interval)
        self._fetcher = Fetcher(self._connection, self._claim, self._maintenance, poller)
        state.on_back(partial(self._call, self._fetcher.hurry))
        self._executor = Executor(
            self._context,
            registry,
            Connection(conninfo, "rota completer", state),
            self._heartbeat,
            concurrency,
            Prefetch(batch),
            self._fetcher.wake,
        )

    def run(self, *, drain: bool = False, once: bool = False) -> None:
        """Work until `stop` or a signal: SIGTERM or SIGINT; a second one stops at once.

        With *drain* leave as soon as nothing is due, with *once* after one claim.
        """
        if _is_in_loop():
            raise RuntimeError("an event loop runs here already: await worker.run_async()")
        with stop_on_signals(self.stop) as self._has_signals:
            self._has_ended = run_in_loop(self.run_async(drain=drain, once=once))

    async def run_async(self, *, drain: bool = False, once: bool = False) -> None:
        """Work like `run`, in the caller's event loop and without signals.

        Cancelling it is like `stop`, and cancelling it again like `stop` with *now*.
        """
        if self._is_begun:
            raise RuntimeError("a Worker runs once: make another one")
        self._is_begun = True
        self._context.loop = asyncio.get_running_loop()
        try:
            await self._maintenance.introduce()
        except BaseException:
            await self._connection.close()
            raise
        self._heartbeat.start()
        log_start(
            self.name, self._connection.database, self._queues, self._registry.job_types,
            self._concurrency,
        )  # fmt: skip
        fetching = asyncio.create_task(
            self._fetcher.run(self._executor, drain=drain, once=once)
        )
        stopping = asyncio.create_task(self._stop.wait())
        notifying: asyncio.Task[None] | None = None
        if self._notifier is not None and not (drain or once):
            notifying = asyncio.create_task(self._notifier.run())
        self._ready.set()
        try:
            await asyncio.wait([fetching, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.stop()
            stopping.cancel()
            await self._finish(asyncio.create_task(self._leave(fetching, notifying)))
        if not fetching.cancelled():
            fetching.result()  # raises what ended the loop

    async def wait_until_ready(self) -> None:
        """Wait until the worker has reached the database and asks for jobs."""
        await self._ready.wait()

    def stop(self, *, now: bool = False) -> None:
        """Claim no more, give back what has not been started, and let the running jobs end.

        With *now* they get no grace period.  May be called from any thread.
        """
        self._fetcher.stop()
        self._call(self._fetcher.wake)
        self._call(self._stop.set)
        if now:
            self._call(self._stop_now.set)

    @property
    def has_threads(self) -> bool:
        """Whether a handler that did not want to end still runs, in a thread or in the loop."""
        return bool(self._executor.threads) or not self._has_ended

    async def _claim(self, client: AsyncClient, max_jobs: int) -> list[ClaimedJob]:
        job_types = self._registry.job_types
        return await client.claim_jobs(
            self.name, self._queues, max_jobs, self._lease, job_types
        )

    async def _finish(self, leaving: asyncio.Task[None]) -> None:
        """Wait until the worker has left, however often the caller is cancelled meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        while not leaving.done():
            try:
                await asyncio.shield(leaving)
            except asyncio.CancelledError as error:
                cancelled = error
                self._stop_now.set()
        if cancelled is not None:
            raise cancelled
        leaving.result()

    async def _leave(
        self, fetching: asyncio.Task[None], notifying: asyncio.Task[None] | None
    ) -> None:
        if notifying is not None:
            notifying.cancel()
        self._executor.close()
        log_stop(self.name, self._executor.running, self._grace_period, self._has_signals)
        await _try(self._executor.give_back_held())
        # A claim or a tick may hang behind a lock; a claim that still comes through is undone.
        await asyncio.wait([fetching], timeout=LEAVE_TIMEOUT)
        await end_task(fetching)
        await _try(self._executor.give_back_held())
        await self._executor.wait(self._grace_period, self._stop_now)
        await _try(self._executor.stop_running())
        self._heartbeat.stop()
        await _try(self._maintenance.leave())
        await self._connection.close()
        if notifying is not None:
            await asyncio.wait([notifying], timeout=LEAVE_TIMEOUT)
        self._connections.close()
        self._heartbeat.join(timeout=1.0)
        logger.info("worker %s stopped", self.name)

    def _on_change(self, job: BaseJob) -> None:
        self._call(partial(self._executor.cancel, job))

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function in the loop's thread, if there is a loop yet, or still."""
        loop = getattr(self._context, "loop", None)
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function)


async def _try(action: Awaitable[None]) -> None:
    """Do what needs the database, but not for long: leaving matters more."""
    try:
        await asyncio.wait_for(action, timeout=LEAVE_TIMEOUT)
    except (TimeoutError, psycopg.Error, RotaError) as error:
        logger.warning("leaving without the database: %r", error)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_settings(
    registry: Registry,
    name: str | None,
    queues: Sequence[str],
    concurrency: int,
    batch: int | None,
    lease: timedelta | float | None,
    *,
    poll_interval: float,
    tick_interval: float,
    grace_period: float,
) -> None:
    """Raise ValueError, or TypeError, for the first that is wrong."""
    if not isinstance(registry, Registry):
        raise TypeError(
            f"the handlers must be in a rota.Registry, got {type(registry).__name__}: "
            "registry.add(job_type, function) puts one in"
        )
    if not len(registry):
        raise ValueError("the registry has no handler")
    if isinstance(queues, str):
        raise TypeError(f"queues must be a list, got the text {queues!r}")
    if not queues:
        raise ValueError("queues must have a name")
    for queue in queues:
        check_name("queue", queue)
    if name is not None:
        check_range("the length of name", len(name), 1, 255)
    check_range("concurrency", concurrency, 1, inf)
    if batch is not None:
        check_range("batch", batch, 1, MAX_BATCH)
    if lease is not None:
        seconds = to_duration("lease", lease).total_seconds()
        check_range("lease in seconds", seconds, 0.001, MAX_LEASE)
    check_range("poll_interval", poll_interval, 0.001, inf)
    check_range("tick_interval", tick_interval, 0.001, inf)
    check_range("grace_period", grace_period, 0, inf)
