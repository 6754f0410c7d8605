"""The worker: claim jobs, keep their leases, and stop in good order.

Retries, ordering and leases are decided in SQL.  This module decides only when to ask for
jobs and when to stop.  Claims and maintenance share one connection, endings have another, the
heartbeat thread a third and the notifier a fourth, so a slow claim never delays an ending or a
heartbeat.  Handlers are lent connections of their own.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import timedelta
from functools import partial
from math import inf

import psycopg

from .. import __version__
from ..client.async_client import AsyncClient
from ..client.connecting import name_of, one_line
from ..client.values import check_name, check_range
from ..exceptions import (
    InvalidArgumentError,
    NotGrantedError,
    RotaError,
    grant_remedy,
    to_duration,
)
from ..job import JobContext
from ..registry import Registry
from ..rows import ClaimedJob
from .connection import Connection, ConnectionState, Retry, end_task, first_of, outlast
from .executor import MAX_BATCH, Executor, Places, Prefetch, Share
from .fetcher import Fetcher
from .heartbeat import Heartbeat
from .lending import CALLS, Pool, Watch
from .maintenance import Presence
from .notifier import Notifier
from .process import (
    LAST_WORDS,
    call_in_loop,
    is_in_loop,
    new_name,
    notify_service,
    peak_memory,
    run_in_loop,
    stop_on_signals,
)

logger = logging.getLogger("rota")

LEAVE_TIMEOUT = 5.0
"""Seconds that each step of leaving may wait for the database."""
MAX_LEASE = 30 * 24 * 3600


class Worker:
    """Runs the jobs that its registry has handlers for; create another one to run again.

    *concurrency* handlers run at a time.  It claims *batch* jobs at once, and the next when
    half of them have started; without it, what is likely to start soon.
    *lease*, a timedelta or seconds, is for jobs without their own.  After `stop`, running jobs
    have *grace_period* seconds to end.  Without *tick* it leaves the maintenance to others.
    Without *listen* it only polls; *listen_conninfo* bypasses a pooler, through which no
    notification comes.  After about *max_jobs* jobs, or when the process has used *max_memory*
    megabytes, it claims no more and exits when its running jobs have ended.  Workers of
    several databases share *places*, and wait for databases that are down.
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
        max_jobs: int | None = None,
        max_memory: float | None = None,
        places: Places | None = None,
    ) -> None:
        if not isinstance(conninfo, str):
            raise TypeError(
                f"conninfo must be a URL, got {type(conninfo).__name__}: a worker opens its "
                "own connections"
            )
        if not isinstance(registry, Registry):
            raise TypeError(
                f"the handlers must be in a rota.Registry, got {type(registry).__name__}: "
                "registry.add(job_type, function) adds one"
            )
        if not registry.job_types:
            raise ValueError("the registry has no handler")
        if isinstance(queues, str):
            raise TypeError(f"queues must be a list, got the text {queues!r}")
        self._queues = list(queues)
        if not self._queues:
            raise ValueError("queues must have a name")
        for queue in self._queues:
            check_name("queue", queue)
        self._lease = None if lease is None else to_duration("lease", lease)
        seconds = None if self._lease is None else self._lease.total_seconds()
        for argument, value, lowest, highest in (
            ("the length of name", None if name is None else len(name), 1, 255),
            ("concurrency", concurrency, 1, inf),
            ("batch", batch, 1, MAX_BATCH),
            ("lease in seconds", seconds, 0.001, MAX_LEASE),
            ("poll_interval", poll_interval, 0.001, inf),
            ("tick_interval", tick_interval, 0.001, inf),
            ("grace_period", grace_period, 0, inf),
            ("max_jobs", max_jobs, 1, inf),
            ("max_memory", max_memory, 1, inf),
        ):
            if value is not None:
                check_range(argument, value, lowest, highest)
        self.name = name or new_name()
        self._registry = registry
        # Among others the database may be away, also from the start on.
        self._is_patient = places is not None
        self._share = Share(places or Places(concurrency))
        self._grace_period = grace_period
        self._max_jobs = max_jobs
        self._max_memory = max_memory
        self._has_signals = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self.is_retiring = False
        """Whether it leaves since it is time for another process."""
        self._together: Sequence[Worker] = [self]
        """The workers of its process, which leaves only when all of them do."""
        self._nothing_after = -1
        """How many attempts had ended in its process when it found no job; -1 if it did."""
        self._is_told = asyncio.Event()
        """Set by `stop`: a worker that retires has its grace period from then on."""
        # One of several is named in the log.
        self._state = state = ConnectionState(name_of(conninfo) if self._is_patient else "")
        self._connection = Connection(conninfo, "rota fetcher", state)
        places_in_all, watch = self._share.places.total, Watch()
        self._context = JobContext(
            self.name,
            Pool(conninfo, places_in_all, watch, resets=True),
            Pool(conninfo, min(places_in_all, CALLS), watch),
            state,
        )
        self._heartbeat = Heartbeat(
            Connection(conninfo, "rota heartbeat", state),
            lambda job: self._call(partial(self._executor.cancel, job)),
            watch,
        )
        self._presence = Presence(
            self._connection, self.name, self._queues,
            lambda: [] if self._stop.is_set() else registry.job_types, self._share.floor,
        )  # fmt: skip
        self._listens = listen
        self._notifier = Notifier(
            Connection(listen_conninfo or conninfo, "rota notifier", state),
            self._connection,
            self._queues,
            lambda: registry.job_types,
            poll_interval,
        )
        self._fetcher = Fetcher(
            self._connection, self._claim, self._is_over, self._is_drained, self._presence,
            self._notifier, poll_interval, tick_interval if tick else None,
        )  # fmt: skip
        state.on_back(partial(self._call, self._fetcher.hurry))
        self._heartbeat.on_recovery = partial(self._call, self._fetcher.wake)
        self._notifier.on_running = self._heartbeat.ask
        self._executor = Executor(
            self._context,
            registry,
            Connection(conninfo, "rota completer", state),
            self._heartbeat,
            self._share,
            Prefetch(batch),
            self._fetcher.wake,
        )
        self._share.is_hungry = self._is_hungry

    def run(self, *, drain: bool = False, once: bool = False) -> None:
        """Work until `stop`, SIGTERM, SIGINT or SIGHUP; a second signal stops at once.

        With *drain* return as soon as nothing is due, with *once* after one claim.
        """
        run_together([self], drain=drain, once=once)

    async def run_async(self, *, drain: bool = False, once: bool = False) -> None:
        """Work like `run`, in the caller's event loop and without signals.

        Cancelling it is like `stop`, and cancelling it again like `stop` with *now*.
        """
        if self._loop is not None:
            raise RuntimeError("a Worker runs once: create another one")
        self._loop = asyncio.get_running_loop()
        running = asyncio.create_task(self._run(drain=drain, once=once))
        try:
            await outlast(running, lambda: self.stop(now=self._is_told.is_set()))
        finally:
            self._ready.set()  # nobody waits for what has failed

    async def _run(self, *, drain: bool, once: bool) -> None:
        is_open, is_closing = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            async with self._registry.open_resources() as self._context.resources:
                is_open.set()
                try:
                    await self._work(drain=drain, once=once)
                finally:
                    await self._connection.close()
                    is_closing.set()

        working = asyncio.create_task(work())
        try:
            await first_of(working, is_open, self._stop)
            if is_open.is_set():
                await first_of(working, is_closing)
                seconds = max(LEAVE_TIMEOUT, self._grace_period)
                await first_of(working, self._stop_now, timeout=seconds)
                if self._stop_now.is_set():
                    await first_of(working, timeout=LAST_WORDS)
        finally:
            await end_task(working)
            self._stop.set()
            for each in self._together:
                each._fetcher.wake()  # one that drains waits for this no more
        if working.done() and not working.cancelled():
            working.result()
        else:
            text = (
                "worker %s exits, although a lifespan of its registry neither opens nor closes"
            )
            logger.warning(text, self.name)

    async def _work(self, *, drain: bool, once: bool) -> None:
        if self._max_memory is not None and (used := peak_memory()) >= self._max_memory:
            raise InvalidArgumentError(  # one after the other would leave without a job
                f"max_memory {self._max_memory:g} is no more than the {used:.0f} MB that the "
                "process uses before its first job"
            )
        is_patient = self._is_patient and not (drain or once)
        introducing = asyncio.create_task(self._introduce(is_patient=is_patient))
        await first_of(introducing, self._stop)
        await end_task(introducing)
        if introducing.cancelled():
            await _try(self._presence.leave())
            return
        introducing.result()
        self._heartbeat.start()
        logger.info(  # one that runs nothing may be told from it
            "worker %s started database=%s queues=%s job_types=%s concurrency=%s",
            self.name, self._connection.database, ",".join(self._queues),
            ",".join(self._registry.job_types), self.concurrency,
        )  # fmt: skip
        taken = {queue for each in self._together for queue in each._queues}
        others = sorted(self._registry.task_queues - taken)
        if others and self is self._together[0]:
            # Right if another worker takes them, and a common slip if none does.
            text = "its tasks use queues that this worker does not take: %s"
            logger.info(text, ",".join(others))
        fetching = asyncio.create_task(
            self._fetcher.run(self._executor, drain=drain, once=once)
        )
        notifying: asyncio.Task[None] | None = None
        if self._listens and not (drain or once):
            notifying = asyncio.create_task(self._notifier.run())
        self._ready.set()
        try:
            await first_of(fetching, self._stop)
        finally:
            self._stop.set()
            self._fetcher.wake()
            await self._leave(fetching, notifying)
        if not fetching.cancelled():
            fetching.result()  # raises what ended the loop

    async def _introduce(self, *, is_patient: bool) -> None:
        """Reach the database; if the worker is patient, try again until it is there."""
        retry = Retry(None, self._state)
        while True:
            try:
                await self._compare_versions()
                await self._presence.report()
                return
            except (psycopg.Error, RotaError) as error:
                if not is_patient:
                    raise
                if not retry.failures:
                    text = "%s cannot be used, trying again: %s"
                    logger.warning(text, self._state.database, one_line(error))
                # Readiness of all does not wait for a database that is away.
                self._ready.set()
                await retry.wait(error)

    async def wait_until_ready(self) -> None:
        """Wait until the worker has reached the database and asks for jobs, or has ended."""
        await self._ready.wait()

    async def wait_until_stopping(self) -> None:
        """Wait until the worker has been told to stop."""
        await self._stop.wait()

    def stop(self, *, now: bool = False) -> None:
        """Claim no more, give back what has not been started, and let the running jobs end.

        With *now* they get no grace period.  May be called from any thread.
        """
        for event in (self._stop, self._is_told, *([self._stop_now] if now else [])):
            self._call(event.set)

    @property
    def is_ready(self) -> bool:
        """Whether it reaches the database, which answers, and asks for jobs."""
        is_working = self._ready.is_set() and not self._stop.is_set()
        is_up = self._state.is_up and not self._connection.is_overdue
        is_refused = self._fetcher.failures or self._heartbeat.failures
        return is_working and is_up and not is_refused

    @property
    def concurrency(self) -> int:
        """How many handlers may run at a time; of shared places its own."""
        return self._share.floor

    @property
    def idle_connections(self) -> tuple[Connection, Notifier]:
        """What it keeps open while it is idle, and may be used by others of its loop."""
        return self._connection, self._notifier

    def _is_hungry(self) -> bool:
        if not self._state.is_up or self._stop.is_set():
            return False
        is_short = self._share.is_short
        return self._executor.has_waiting or self._fetcher.is_hungry(is_short=is_short)

    @property
    def running(self) -> int:
        """How many handlers run, or have ended without the database knowing."""
        return self._executor.running

    async def _claim(self, client: AsyncClient, max_jobs: int) -> list[ClaimedJob]:
        job_types, ended = self._registry.job_types, self._ended
        claims = await client.claim_jobs(
            self.name, self._queues, max_jobs, self._lease, job_types
        )
        self._nothing_after = -1 if claims else ended
        return claims

    def _is_drained(self) -> bool:
        """Whether no worker of its process has found a job since the last one has ended.

        The jobs of one may enqueue those of another, so one that has looked before that looks
        again, and if none has, all leave.
        """
        late = [
            each
            for each in self._together
            if not each._stop.is_set()
            and not (each._executor.is_idle and each._nothing_after == self._ended)
        ]
        for each in late or self._together:
            each._fetcher.wake()
        return not late

    async def _compare_versions(self) -> None:
        try:
            found = await self._connection.call(AsyncClient.version)
        except NotGrantedError:  # which names the least that lets a role ask for the version
            remedy = grant_remedy("claim_jobs")
            raise NotGrantedError(f"permission denied for schema rota: {remedy}") from None
        theirs, ours = (
            [int(number) for number in re.findall(r"\d+", version)]
            for version in (found, __version__)
        )
        if theirs[:2] < ours[:2]:  # the last number changes no function
            raise RotaError(
                f"the database has rota {found}, and this worker needs {__version__}: "
                "upgrade the database first (rota install)"
            )
        if theirs != ours:
            remedy = "database (rota install)" if theirs < ours else "worker"
            text = "the database has rota %s and this worker %s: upgrade the %s"
            logger.warning(text, found, __version__, remedy)

    def _is_over(self) -> bool:
        """Whether to claim no more, also since it is time for another process."""
        if self._stop.is_set() or self.is_retiring:
            return True
        if (reason := self._reason_to_retire()) is None:
            return False
        logger.info("worker %s makes room for a new one: %s", self.name, reason)
        for worker in self._together:
            worker.is_retiring = True  # what runs may end, however long
            worker._stop.set()
        return True

    @property
    def _ended(self) -> int:
        """How many attempts have ended in its process."""
        return sum(each._executor.ends.count for each in self._together)

    def _reason_to_retire(self) -> str | None:
        if self._executor.hung:
            return "a handler goes on without its job"
        ended = self._ended
        if self._max_jobs is not None and ended >= self._max_jobs:
            return f"jobs that have ended: {ended}"
        if self._max_memory is not None and (used := peak_memory()) >= self._max_memory:
            return f"{used:.0f} MB of memory were in use"
        return None

    async def _leave(
        self, fetching: asyncio.Task[None], notifying: asyncio.Task[None] | None
    ) -> None:
        if notifying is not None:
            notifying.cancel()
        waits_for_all = self.is_retiring and not self._is_told.is_set()
        self._executor.close(has_time=waits_for_all)
        wait = ""
        if running := self._executor.running:
            jobs = f"{running} running job{'s' if running > 1 else ''}"
            way_out = "; a second signal ends the wait" if self._has_signals else ""
            wait = f": waits up to {self._grace_period:g} s for {jobs}{way_out}"
            if waits_for_all:
                wait = f": waits for {jobs}"
        logger.info("worker %s stops%s", self.name, wait)
        # A claim or a tick may hang behind a lock; a claim that still comes through is undone.
        await asyncio.wait([fetching], timeout=LEAVE_TIMEOUT)
        await end_task(fetching)
        at_rest = self._executor.at_rest
        if not at_rest.is_set():
            self._presence.hurry()
            reporting = asyncio.create_task(self._presence.go_on())
            try:
                if self.is_retiring:
                    await first_of(at_rest, self._is_told)
                await first_of(at_rest, self._stop_now, timeout=self._grace_period)
            finally:
                await end_task(reporting)
        await _try(self._executor.stop_running())
        await _try(self._context.processes.close())
        await self._executor.ends.catch_up(self._is_told)
        await _try(self._executor.ends.close(), "functions of on_end have not ended")
        self._heartbeat.stop()
        await _try(self._presence.leave())
        if notifying is not None:
            await asyncio.wait([notifying], timeout=LEAVE_TIMEOUT)
        self._context.handlers.close()
        self._context.calls.close()
        self._heartbeat.watch.cut()
        self._heartbeat.join(timeout=1.0)
        logger.info("worker %s stopped", self.name)

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function in the loop's thread, if there is a loop still."""
        if self._loop is None:
            function()  # nobody waits for it yet
        else:
            call_in_loop(self._loop, function)


def run_together(
    workers: Sequence[Worker],
    *,
    drain: bool = False,
    once: bool = False,
    beside: Sequence[AbstractAsyncContextManager[object]] = (),
    has_parent: bool = False,
) -> bool:
    """Run workers in this process until all have left; if one fails, the others stop.

    With *drain* or *once* the others do theirs before the failure is raised.  All this is
    within the contexts *beside*.  *has_parent* is whether a process that started this one tells
    it to leave.  Return whether all handlers have ended: some ignore that they are told to, in
    a thread or in the loop.
    """
    if is_in_loop():
        raise RuntimeError("an event loop is already running: await worker.run_async()")

    def stop(now: bool = False) -> None:
        notify_service("STOPPING=1")
        for worker in workers:
            worker.stop(now=now)

    async def work() -> None:
        async with AsyncExitStack() as stack:
            for each in beside:
                await stack.enter_async_context(each)
            running = [
                asyncio.create_task(worker.run_async(drain=drain, once=once))
                for worker in workers
            ]
            telling = asyncio.create_task(_tell_ready(workers, running))
            try:
                if drain or once:
                    await asyncio.wait(running)
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                telling.cancel()
                if not all(task.done() for task in running):
                    stop()
                await asyncio.wait(running)
            for task in running:
                task.result()

    with stop_on_signals(stop, has_parent=has_parent) as has_signals:
        for worker in workers:
            worker._has_signals, worker._together = has_signals, workers
        has_ended = run_in_loop(work())
    executors = [worker._executor for worker in workers]
    return has_ended and not any(
        each.busy_threads or each.ends.is_calling for each in executors
    )


async def _tell_ready(workers: Sequence[Worker], tasks: Sequence[asyncio.Task[None]]) -> None:
    for worker, task in zip(workers, tasks, strict=True):
        await worker.wait_until_ready()
        if task.done() and task.exception() is not None:
            return
    notify_service("READY=1")


async def _try(action: Awaitable[None], otherwise: str = "the database is away") -> None:
    """Do one step of leaving, but wait no longer for it than `LEAVE_TIMEOUT`."""
    try:
        await asyncio.wait_for(action, timeout=LEAVE_TIMEOUT)
    except (TimeoutError, psycopg.Error, RotaError) as error:
        logger.warning("exiting, although %s: %r", otherwise, error)
