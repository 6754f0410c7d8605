"""The jobs in hand: those that wait for a free place, and those whose handler runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context, copy_context
from functools import partial
from typing import Any, cast

from ..client.reading import Unreadable
from ..exceptions import RotaError
from ..job import AsyncJob, BaseJob, Job
from ..registry import Registry
from ..rows import ClaimedJob
from ..signals import JobCancelled
from .completer import Completer
from .connection import Database
from .events import log_job
from .heartbeat import Heart
from .host import Host
from .outcome import (
    Failed,
    Outcome,
    outcome_of,
    run_async,
    run_sync,
)  # fmt: skip
from .supply import Supply
from .threads import Threads

logger = logging.getLogger("rota")

AsyncHandler = Callable[[AsyncJob], Awaitable[object]]
RELEASE_PATIENCE = 2.0
"""Seconds that a release may take: a worker that leaves cannot wait for ever."""
LAST_WORDS = 1.0
"""Seconds that a handler has to end after it was told that the grace period is over."""


class Runner:
    """Runs jobs, *concurrency* at a time; calls *on_free* when it could do with more.

    A job whose handler has ended takes up no place while its end is reported, unless very many
    wait for that.
    """

    def __init__(
        self,
        host: Host,
        registry: Registry,
        endings: Database,
        heart: Heart,
        concurrency: int,
        supply: Supply,
        on_free: Callable[[], None],
    ) -> None:
        self._host = host
        self._registry = registry
        self._completer = Completer(endings, heart, self._go_on)
        self._heart = heart
        self._concurrency = concurrency
        self._supply = supply
        self._on_free = on_free
        self._waiting: deque[BaseJob] = deque()
        self._handlers: dict[BaseJob, asyncio.Task[Any] | None] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._at_rest = asyncio.Event()
        self._at_rest.set()
        self._is_open = True
        self._context = Context()
        self.threads = Threads()

    @property
    def is_idle(self) -> bool:
        """Whether there is no job in hand."""
        return not (self._waiting or self.running or self._releases)

    @property
    def is_behind(self) -> bool:
        """Whether the database could not be told of ends, and so may take jobs for stale."""
        return self._completer.is_behind

    @property
    def running(self) -> int:
        """How many handlers run, or have ended without the database knowing."""
        return len(self._handlers) + len(self._completer)

    @property
    def wanted(self) -> int:
        """How many more jobs to claim."""
        return self._supply.wanted(self._places, len(self._waiting))

    def accept(self, claims: Iterable[ClaimedJob], claimed_at: float) -> None:
        """Take claimed jobs in hand."""
        self._context = copy_context()
        jobs: list[BaseJob] = []
        for claim in claims:
            try:
                kind = AsyncJob if self._registry.is_async(claim.job_type) else Job
                jobs.append(kind(claim, self._host, claimed_at))
            except Exception:  # the others shall run, and this one when its lease is over
                logger.exception("job %s cannot be taken in hand", claim.job_id)
        self._heart.add(jobs)
        self._waiting.extend(jobs)
        for job in jobs:
            log_job("claimed", job)
        self._start()
        if self._waiting and self._supply.max_wait:
            loop = asyncio.get_running_loop()
            loop.call_later(self._supply.max_wait, self._give_back_late, self._waiting[-1])

    def cancel(self, job: BaseJob) -> None:
        """Cancel an async handler, once; a thread sees the flags of its job."""
        task = self._handlers.get(job)
        if task is not None and not task.cancelling():
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
        if self._releases:
            await asyncio.wait(self._releases)

    async def wait(self, timeout: float, give_up: asyncio.Event) -> None:
        """Wait until all running jobs have ended, but not after *timeout* or *give_up*."""
        waiters = [asyncio.create_task(event.wait()) for event in (self._at_rest, give_up)]
        await asyncio.wait(waiters, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for waiter in waiters:
            waiter.cancel()

    async def stop_running(self) -> None:
        """Tell the handlers to end, and give back what does not."""
        for job in list(self._handlers):
            job.is_stopping = True
            self.cancel(job)
        await self.wait(LAST_WORDS, asyncio.Event())
        left = [*self._handlers, *self._completer.drop()]
        tasks = [*self._handlers.values(), *self._releases]
        self._handlers.clear()  # how they end is of no interest any more
        for task in tasks:
            if task is not None:
                task.cancel()
        self.threads.close()
        try:
            await self._release(left)
        finally:
            await self._completer.close()

    @property
    def _places(self) -> int:
        if self._completer.is_full:
            return 0
        return max(0, self._concurrency - len(self._handlers))

    def _start(self) -> None:
        while self._is_open and self._waiting and self._places:
            job = self._waiting.popleft()
            self._at_rest.clear()
            self._handlers[job] = None
            if isinstance(job, AsyncJob):
                # Not in the context of the job that has just ended, where this may be called.
                context = self._context.copy()
                asyncio.create_task(self._run(job), context=context)  # noqa: RUF006 - see _run
            else:
                self._run_in_thread(cast(Job, job))

    async def _run(self, job: AsyncJob) -> None:
        if job not in self._handlers:
            return  # given back
        self._handlers[job] = asyncio.current_task()  # until here the loop has kept it
        began_at = time.monotonic()
        if (outcome := _refusal(job)) is None:
            handler = cast(AsyncHandler, self._registry[job.job_type])
            outcome = await run_async(handler, job)
        self._end(job, began_at, outcome)
        self._go_on()

    def _run_in_thread(self, job: Job) -> None:
        began_at = time.monotonic()
        if (outcome := _refusal(job)) is None:
            function = partial(run_sync, self._registry[job.job_type], job)
            try:
                self.threads.run(function, partial(self._on_answer, job, began_at))
                return
            except Exception as error:  # no thread could be started, say
                outcome = outcome_of(job, error)
        self._end(job, began_at, outcome)

    def _on_answer(self, job: Job, began_at: float, answer: Outcome | BaseException) -> None:
        if isinstance(answer, BaseException):
            answer = outcome_of(job, RuntimeError(f"the thread ended by {type(answer)!r}"))
        self._end(job, began_at, answer)
        self._go_on()

    def _end(self, job: BaseJob, began_at: float, outcome: Outcome) -> None:
        """Go on to report how a handler ended."""
        if job not in self._handlers:
            return  # given back
        del self._handlers[job]
        self._supply.count()
        self._completer.put(job, time.monotonic() - began_at, outcome)

    def _go_on(self) -> None:
        self._start()
        if not self.running:
            self._at_rest.set()
        if self.wanted or self.is_idle:
            self._on_free()

    def _give_back_late(self, last: BaseJob) -> None:
        """Release what has waited as long as *last*: somebody else may have time for it."""
        if last in self._waiting:
            count = self._waiting.index(last) + 1
            jobs = [self._waiting.popleft() for _ in range(count)]
            task = asyncio.create_task(self._release(jobs, patience=None))
            self._releases.add(task)
            task.add_done_callback(self._on_released)

    def _on_released(self, task: asyncio.Task[None]) -> None:
        self._releases.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("jobs could not be given back: %r", error, exc_info=error)
        self._on_free()

    async def _release(
        self, jobs: list[BaseJob], patience: float | None = RELEASE_PATIENCE
    ) -> None:
        if jobs:
            try:
                released = await self._completer.release(jobs, patience)
            finally:  # or they would be kept for ever, and nobody runs them
                self._heart.remove(jobs)
            for job in jobs:
                log_job("released" if job.job_id in released else "lost", job)


def _refusal(job: BaseJob) -> Outcome | None:
    """Return how a job ends that should not be started."""
    try:
        job.check()
    except (RotaError, JobCancelled) as error:
        return outcome_of(job, error)
    for name, value in (("payload", job.payload), ("stage_input", job.stage_input)):
        if isinstance(value, Unreadable):
            reason = f"the {name} cannot be read: {value.reason}"
            return Failed(reason, name, "", is_fatal=True)
    return None
