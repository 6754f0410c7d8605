"""The thread that keeps the leases of all jobs in hand, started or not.

It has a connection of its own and shares no lock with the event loop for longer than a
look-up, so neither a blocked loop nor a handler that computes can starve it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from psycopg import Connection

from ..client.sync_client import Client
from ..job import BaseJob
from ..rows import JobHeartbeat
from .connection import backoff
from .outage import Outage, is_lost

logger = logging.getLogger("rota")

BEATS_PER_LEASE = 3
MAX_JOBS = 1000
BUSY_PAUSE = 0.5


class Heart(threading.Thread):
    """Heartbeat every third of a lease; tell *on_change* which jobs are not wanted any more."""

    def __init__(
        self,
        connect: Callable[[], Connection[Any]],
        outage: Outage,
        on_change: Callable[[BaseJob], None],
    ) -> None:
        super().__init__(name="rota-heartbeat", daemon=True)
        self._connect = connect
        self._outage = outage
        self._opened_at = 0.0
        self._on_change = on_change
        self._connection: Connection[Any] | None = None
        self._due: dict[BaseJob, float] = {}
        self._changed = threading.Condition()
        self._wakes_at = 0.0
        self._is_stopping = False
        self._failures = 0
        self._pause_until = 0.0

    def add(self, jobs: Iterable[BaseJob]) -> None:
        """Keep the leases of jobs from now on."""
        with self._changed:
            for job in jobs:
                due = self._due[job] = job.confirmed_at + _interval(job)
                if due < self._wakes_at:
                    self._wakes_at = due
                    self._changed.notify()

    def remove(self, jobs: Iterable[BaseJob]) -> None:
        """Let go of jobs."""
        with self._changed:
            for job in jobs:
                self._due.pop(job, None)

    def stop(self) -> None:
        """Let the thread end."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Beat until stopped."""
        while (jobs := self._wait()) is not None:
            try:
                for part in _parts(jobs):
                    self._beat(part)
                self._failures = 0
                self._outage.end(self._opened_at)
            except Exception as error:  # whatever it is, without this thread all leases run out
                self._failures += 1
                self._pause_until = time.monotonic() + backoff(self._failures)
                self._disconnect()
                if is_lost(error):
                    self._outage.begin(error, self._opened_at)
                else:
                    logger.warning("heartbeat failed, trying again: %s", str(error).strip())
        self._disconnect()

    def _wait(self) -> list[BaseJob] | None:
        """Return the jobs when one of them is due, None when there is nothing left to do."""
        with self._changed:
            while not self._is_stopping:
                due = max(min(self._due.values(), default=inf), self._pause_until)
                if (pause := due - time.monotonic()) <= 0:
                    soon = time.monotonic()
                    # Those that are nearly due go along.
                    return [j for j, at in self._due.items() if at - _interval(j) / 2 <= soon]
                self._wakes_at = due
                self._changed.wait(pause if pause < inf else None)
        return None

    def _beat(self, jobs: list[BaseJob]) -> None:
        if self._connection is None:
            self._opened_at = time.monotonic()
            self._connection = self._connect()
        sent_at = time.monotonic()
        beats = Client(self._connection).heartbeat_jobs(
            [job.job_id for job in jobs],
            [job.lease_token for job in jobs],
            lease=jobs[0].lease,
        )
        # Not by their ids: an old and a new lease may be of one job.
        for job, beat in zip(jobs, beats, strict=True):
            with self._changed:
                if job not in self._due:
                    continue  # it has ended meanwhile
                self._due[job] = sent_at + _interval(job)
            if self._note(job, beat, sent_at):
                self._on_change(job)

    def _note(self, job: BaseJob, beat: JobHeartbeat, sent_at: float) -> bool:
        """Store what a heartbeat said; return whether the job should stop."""
        if beat.is_lost:
            if job.is_settling:
                return False  # it is gone because it has just been finished
            job.is_told_lost = True
            self.remove([job])
            return True
        if beat.locked_until is None:
            # Another session has the row locked: ask again before long.
            with self._changed:
                if job in self._due:
                    self._due[job] = sent_at + min(_interval(job), BUSY_PAUSE)
            return False
        job.confirmed_at = sent_at
        job.is_cancel_requested = beat.is_cancel_requested
        return job.is_cancel_requested

    def _disconnect(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()


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
