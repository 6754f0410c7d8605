"""The thread that extends the leases of all jobs that the worker holds, started or not.

It has an event loop and a connection of its own and shares no lock with the worker's loop for
longer than a look-up, so neither a blocked loop nor a handler that computes can starve it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from ..client.async_client import AsyncClient
from ..job import BaseJob
from .connection import (
    BUSY_PAUSE,
    CALL_TIMEOUT,
    IDLE_TIMEOUT,
    MAX_JOBS,
    SHORTEST_LIMIT,
    Connection,
    Retry,
    end_task,
    wait_for,
)
from .lending import Watch
from .process import call_in_loop

logger = logging.getLogger("rota")

BEATS_PER_LEASE = 3
BEGIN_AGAIN = 0.1
"""Seconds until the thread begins again after an unexpected error."""
LOOK_AGAIN = 1.0
"""Seconds between two looks at a job whose time is over and that the worker still holds."""


class Heartbeat(threading.Thread):
    """Heartbeat every third of a lease; tell *on_change* which jobs are not wanted any more.

    That is told again and again while the worker holds such a job.  The *watch* cuts off what
    it uses of the database when its lease or time is over.  After failures heartbeats go on
    also without a job, and `on_recovery` is called when one comes through.
    """

    def __init__(
        self, connection: Connection, on_change: Callable[[BaseJob], None], watch: Watch
    ) -> None:
        super().__init__(name="rota-heartbeat", daemon=True)
        self._connection = connection
        self._on_change = on_change
        self.on_recovery: Callable[[], None] = lambda: None
        self.watch = watch
        watch.look_by = self._look_by
        self._retry = Retry("heartbeat", connection.state)
        self._lock = threading.Lock()
        self._due: dict[BaseJob, float] = {}
        self._wakes_at = self._beaten_at = inf
        self._not_before = 0.0
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        connection.state.on_back(self._try_at_once)

    @property
    def failures(self) -> int:
        """How many heartbeats in a row have failed: leases of more jobs might expire, too."""
        return self._retry.failures

    def add(self, jobs: Iterable[BaseJob]) -> None:
        """Keep the leases of jobs from now on."""
        with self._lock:
            for job in jobs:
                due = self._due[job] = job.confirmed_at + _interval(job)
                # Without a time limit nothing is over before a heartbeat is due.
                self._look_by(due if job.time_limit is None else min(due, job.over_at))

    def ask(self, job_ids: frozenset[int]) -> None:
        """Send the heartbeats of these jobs at once: they may not be wanted any more."""
        with self._lock:
            for job in self._due:
                if job.job_id in job_ids:
                    self._due[job] = time.monotonic()
                    self._look_by(self._due[job])

    def remove(self, jobs: Iterable[BaseJob]) -> None:
        """Let go of jobs."""
        with self._lock:
            for job in jobs:
                self._due.pop(job, None)

    def stop(self) -> None:
        """Let the thread end."""
        self._is_stopping = True
        self._call_wake()

    def run(self) -> None:
        """Beat until stopped."""
        while not self._is_stopping:
            try:
                with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                    runner.run(self._run())
            except Exception:  # such as MemoryError: no lease may expire because of it
                logger.exception("heartbeats failed, beginning again")
                time.sleep(BEGIN_AGAIN)

    async def _run(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        beating: asyncio.Task[None] | None = None
        try:
            while not self._is_stopping:
                self._wake.clear()
                self._wakes_at = inf  # an earlier time that comes from here on wakes it again
                with self._lock:
                    due = dict(self._due)
                wakes_at = min([self.watch.look(), *map(self._look, due)])
                now = time.monotonic()
                if beating is None or beating.done():
                    never = 0.0 if self.failures else inf
                    beats_at = max(min(due.values(), default=never), self._not_before)
                    rests_at = inf if due else self._beaten_at + IDLE_TIMEOUT
                    if beats_at <= now:
                        # Those that are nearly due go along.
                        jobs = [j for j, at in due.items() if at - _interval(j) / 2 <= now]
                        beating = asyncio.create_task(self._beat_all(jobs))
                    elif rests_at <= now:
                        self._beaten_at = inf
                        await self._connection.close()
                    else:
                        wakes_at = min(wakes_at, beats_at, rests_at)
                self._wakes_at = wakes_at
                await wait_for(self._wake, wakes_at - now)
            if beating is not None:
                await end_task(beating)
        finally:
            await self._connection.close()

    async def _beat_all(self, jobs: list[BaseJob]) -> None:
        failure: Exception | None = None
        for part in _parts(jobs) or [[]]:
            try:
                if part:
                    await self._beat(part)
                else:
                    await self._connection.call(AsyncClient.version, CALL_TIMEOUT)
            except Exception as error:  # whatever it is, the other leases must be extended
                failure = failure or error
        self._beaten_at = time.monotonic()
        if failure is None:
            was_failing = self.failures > 0
            self._retry.succeed()
            if was_failing:
                self.on_recovery()
        else:
            self._not_before = self._beaten_at + self._retry.fail(failure)
        self._wake.set()

    def _look(self, job: BaseJob) -> float:
        """Tell of a job that is not wanted any more; return when to look again."""
        if not job.is_wanted:
            self._on_change(job)
        over_at, now = job.over_at, time.monotonic()
        return over_at if over_at > now else now + LOOK_AGAIN

    def _look_by(self, moment: float) -> None:
        """Look again at that time at the latest."""
        if moment < self._wakes_at:
            self._wakes_at = moment
            self._call_wake()

    def _try_at_once(self) -> None:
        self._not_before = 0.0
        self._call_wake()

    def _call_wake(self) -> None:
        if self._loop is not None:
            call_in_loop(self._loop, self._wake.set)

    async def _beat(self, jobs: list[BaseJob]) -> None:
        sent_at = time.monotonic()
        job_ids = [job.job_id for job in jobs]
        lease_tokens = [job.lease_token for job in jobs]
        with self._lock:
            due = [self._due.get(job) for job in jobs]
            # The other leases wait for this call.
            shortest = min(map(_interval, self._due), default=0.0)
        limit = min(max(shortest, SHORTEST_LIMIT), CALL_TIMEOUT)
        beats = await self._connection.call(
            lambda client: client.heartbeat_jobs(job_ids, lease_tokens, lease=jobs[0].lease),
            timeout=limit,
        )
        # Not by their ids: an old and a new lease may be of one job.
        for job, beat, was_due in zip(jobs, beats, due, strict=True):
            # Another session has the row locked: ask again before long.
            is_locked = beat.locked_until is None and not beat.is_lost
            pause = min(_interval(job), BUSY_PAUSE) if is_locked else _interval(job)
            with self._lock:
                if job not in self._due:
                    continue  # it has ended meanwhile
                if self._due[job] == was_due:  # else it was asked for meanwhile
                    self._due[job] = sent_at + pause
            # The next look acts on what is stored here.
            if beat.is_lost:
                if not job.may_be_finished:  # else it is gone because it has just been finished
                    job.is_lease_gone = True
            elif not is_locked:
                job.confirmed_at = sent_at
                job.is_cancel_requested |= beat.is_cancel_requested


def _interval(job: BaseJob) -> float:
    return job.lease.total_seconds() / BEATS_PER_LEASE


def _parts(jobs: list[BaseJob]) -> list[list[BaseJob]]:
    """Split jobs by the length of their lease, and into parts that one call takes."""
    by_lease: dict[Any, list[BaseJob]] = {}
    for job in jobs:
        by_lease.setdefault(job.lease, []).append(job)
    return [
        same[start : start + MAX_JOBS]
        for same in by_lease.values()
        for start in range(0, len(same), MAX_JOBS)
    ]
