"""The jobs in hand: those that wait for a free place, and those whose handler runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import cast

from ._errors import RotaError
from ._heart import Heart
from ._host import Host
from ._job import AsyncJob, BaseJob, Job
from ._log import log_job
from ._outcome import Failed, Outcome, Succeeded, outcome_of, run_async, run_sync
from ._reading import Unreadable
from ._registry import Registry, is_async
from ._rows import ClaimedJob
from ._settler import Settler
from ._signals import JobCancelled
from ._threads import Threads

logger = logging.getLogger("rota")

LONG_ENDING = 1.0
"""Seconds after which a job whose handler has ended takes up no place any more."""
LAST_WORDS = 1.0
"""Seconds that a handler has to end after it was told that the grace period is over."""


class Runner:
    """Runs jobs, *concurrency* at a time; calls *on_free* whenever one has ended."""

    def __init__(
        self,
        host: Host,
        registry: Registry,
        settler: Settler,
        heart: Heart,
        concurrency: int,
        on_free: Callable[[], None],
    ) -> None:
        self._host = host
        self._registry = registry
        self._settler = settler
        self._heart = heart
        self._concurrency = concurrency
        self._on_free = on_free
        self._waiting: deque[BaseJob] = deque()
        self._running: dict[BaseJob, asyncio.Task[None]] = {}
        self._handlers: dict[BaseJob, asyncio.Task[Outcome]] = {}
        self._aside: set[BaseJob] = set()
        self.threads = Threads()
        self._is_open = True

    @property
    def is_idle(self) -> bool:
        """Whether there is no job in hand."""
        return not self._running and not self._waiting

    @property
    def running(self) -> int:
        """How many handlers run."""
        return len(self._running)

    @property
    def free(self) -> int:
        """How many more jobs could start at once."""
        return max(0, self._concurrency - self._occupied - len(self._waiting))

    def accept(self, claims: Iterable[ClaimedJob], claimed_at: float) -> None:
        """Take claimed jobs in hand."""
        for claim in claims:
            try:
                kind = AsyncJob if is_async(self._registry[claim.job_type]) else Job
                job = kind(claim, self._host, claimed_at)
            except Exception:  # the others shall run, and this one when its lease is over
                logger.exception("job %s cannot be taken in hand", claim.job_id)
                continue
            self._heart.add(job)
            self._waiting.append(job)
            log_job("claimed", job)
        self._start()

    def cancel(self, job: BaseJob) -> None:
        """Cancel an async handler, once; a thread sees the flags of its job."""
        task = self._handlers.get(job)
        if task is not None and not job.is_settling and not task.cancelling():
            task.cancel()

    def cancel_lost(self) -> None:
        """Cancel the handlers of jobs whose lease ran out because no heartbeat came through."""
        for job in self._handlers:
            if job.is_lost:
                self.cancel(job)

    def close(self) -> None:
        """Start no more jobs."""
        self._is_open = False

    async def give_back_waiting(self) -> None:
        """Release the jobs that have not been started."""
        jobs = list(self._waiting)
        self._waiting.clear()
        await self._release(jobs)

    async def wait(self, timeout: float, give_up: asyncio.Event) -> None:
        """Wait until all running jobs have ended, but not after *timeout* or *give_up*."""
        waiter = asyncio.create_task(give_up.wait())
        deadline = time.monotonic() + timeout
        while self._running and not give_up.is_set() and time.monotonic() < deadline:
            await asyncio.wait(
                [waiter, *self._running.values()],
                timeout=deadline - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
        waiter.cancel()

    async def stop_running(self) -> None:
        """Tell the handlers to end, and give back what does not."""
        for job in list(self._running):
            job.is_stopping = True
            self.cancel(job)
        if self._running:
            await asyncio.wait(self._running.values(), timeout=LAST_WORDS)
        left = dict(self._running)
        for task in left.values():
            task.cancel()
        await self._release(list(left))

    async def _release(self, jobs: list[BaseJob]) -> None:
        if jobs:
            released = await self._settler.release(jobs)
            for job in jobs:
                self._heart.remove(job)
                log_job("released" if job.job_id in released else "lost", job)

    @property
    def _occupied(self) -> int:
        return len(self._running) - min(len(self._aside), self._concurrency)

    def _step_aside(self, job: BaseJob) -> None:
        """Let others run while the end of a job cannot be reported."""
        if job in self._running:
            self._aside.add(job)
            self._start()
            self._on_free()

    def _start(self) -> None:
        while self._is_open and self._waiting and self._occupied < self._concurrency:
            job = self._waiting.popleft()
            task = asyncio.create_task(self._run(job))
            self._running[job] = task
            task.add_done_callback(partial(self._end, job))

    async def _run(self, job: BaseJob) -> None:
        started = time.monotonic()
        outcome = await self._execute(job)
        job.is_settling = True
        duration = time.monotonic() - started
        if job.is_finished and not isinstance(outcome, Succeeded):
            logger.warning("job %s is finished; what came after: %s", job.job_id, outcome)
        if job.is_finished:
            log_job("succeeded", job, duration)
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(LONG_ENDING, self._step_aside, job)
        try:
            event, details = await self._settler.settle(job, outcome)
        finally:
            timer.cancel()
        log_job(event, job, duration, **details)

    async def _execute(self, job: BaseJob) -> Outcome:
        try:
            job.check()
        except (RotaError, JobCancelled) as error:
            return outcome_of(job, error)
        for name in ("payload", "stage_input"):
            if isinstance(value := getattr(job, name), Unreadable):
                reason = f"the {name} cannot be read: {value.reason}"
                return Failed(reason, name, "", is_fatal=True)
        handler = self._registry[job.job_type]
        if isinstance(job, Job):
            try:
                return await self.threads.run(partial(run_sync, handler, job))
            except Exception as error:  # no thread could be started, say
                return outcome_of(job, error)
        assert isinstance(job, AsyncJob)  # noqa: S101 - for the type checker
        coroutine = cast(Callable[[AsyncJob], Awaitable[object]], handler)
        task = asyncio.create_task(run_async(coroutine, job))
        self._handlers[job] = task
        try:
            await asyncio.wait([task])
        finally:
            del self._handlers[job]
        if task.cancelled():  # before its first step
            return outcome_of(job, asyncio.CancelledError())
        return task.result()

    def _end(self, job: BaseJob, task: asyncio.Task[None]) -> None:
        del self._running[job]
        self._aside.discard(job)
        self._heart.remove(job)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("job %s could not be ended: %r", job.job_id, error, exc_info=error)
        self._start()
        self._on_free()
