"""Report successes, as many as there are in one call, until the database has heard them.

Those that come while a call is under way go together in the next one.  Repeating is safe:
the lease token says which claim speaks, and a finish heard twice is ``already_finished``.
Another session may have the row of a job locked, for as long as it likes: finish_jobs() goes
past it and says ``busy``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextvars import Context

from ._database import Database
from ._errors import InvalidArgumentError
from ._insist import insist
from ._job import BaseJob
from ._json import to_array
from ._statement import UNSET

logger = logging.getLogger("rota")

Finish = tuple[BaseJob, str | None]
MAX_JOBS = 1000
MAX_SIZE = 16_000_000
"""So many characters of results may wait to be reported."""
PAUSE = 0.005
"""Seconds between two calls, in which more jobs may end: each call costs as much as ten."""
BUSY_PAUSE = 0.5
"""Seconds until a job whose row another session has locked is tried again."""


class Finisher:
    """Ends jobs well.

    Calls *on_end* with the jobs that have ended, and the event that each led to, or with the
    error that keeps a job from ending.
    """

    def __init__(
        self,
        database: Database,
        on_end: Callable[[list[BaseJob], list[str | Exception]], None],
    ) -> None:
        self._database = database
        self._on_end = on_end
        self._pending: list[Finish] = []
        self._size = 0
        self._sent_at = 0.0
        self._flush: asyncio.Task[None] | None = None
        self._is_open = True

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be reported that no more should be added."""
        return len(self._pending) >= 2 * MAX_JOBS or self._size >= MAX_SIZE

    def put(self, job: BaseJob, result: str | None) -> None:
        """Report that a job has succeeded, with the JSON text of its result."""
        if self._is_open:
            self._pending.append((job, result))
            if result is not None:
                self._size += len(result)
            if self._flush is None:
                # In a context of its own: this may be called in that of a job.
                task = asyncio.create_task(self._finish_pending(), context=Context())
                self._flush = task

    def stop(self) -> None:
        """Begin no more calls."""
        self._is_open = False
        self._pending.clear()

    async def close(self) -> None:
        """End the call that is under way."""
        if self._flush is not None:
            self._flush.cancel()
            await asyncio.wait([self._flush])

    async def _finish_pending(self) -> None:
        try:
            while self._pending:
                if (pause := self._sent_at + PAUSE - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                self._sent_at = time.monotonic()
                part, self._pending = self._pending[:MAX_JOBS], self._pending[MAX_JOBS:]
                self._size = sum(len(result or "") for _, result in self._pending)
                try:
                    await self._finish_part(part)
                except Exception as error:  # one of the results, and no matter what is wrong
                    await self._finish_one_by_one(part, error)
        finally:
            self._flush = None

    async def _finish_part(self, part: list[Finish]) -> None:
        jobs = [job for job, _ in part]
        ids = [job.job_id for job in jobs]
        tokens = [job.lease_token for job in jobs]
        results = [result for _, result in part]
        stages = [job.next_stage for job in jobs]
        rows = await insist(
            self._database,
            lambda client: client.finish_jobs(
                ids,
                tokens,
                to_array(results) if any(results) else UNSET,
                stages if any(stage is not None for stage in stages) else UNSET,
            ),
        )
        outcomes = [row.outcome for row in rows]
        if "busy" in outcomes:
            loop = asyncio.get_running_loop()
            busy = [n for n, outcome in enumerate(outcomes) if outcome == "busy"]
            for n in reversed(busy):
                loop.call_later(BUSY_PAUSE, self.put, *part[n])
                del jobs[n], outcomes[n]
        self._on_end(jobs, ["lost" if o == "lost" else "succeeded" for o in outcomes])

    async def _finish_one_by_one(self, part: list[Finish], error: Exception) -> None:
        """Find what the database refuses: drop a result, but not a stage."""
        if len(part) > 1:
            for one in part:
                try:
                    await self._finish_part([one])
                except Exception as refused:
                    await self._finish_one_by_one([one], refused)
            return
        job, result = part[0]
        is_stage = isinstance(error, InvalidArgumentError) and str(error).startswith("next_st")
        if is_stage or result is None:
            self._on_end([job], [error])
            return
        logger.warning("job %s: its result is refused and dropped: %s", job.job_id, error)
        try:
            await self._finish_part([(job, None)])
        except Exception as again:
            self._on_end([job], [again])
