"""Report how jobs ended: short calls that are repeated until the database has heard them.

Successes that come while a call is under way go together in the next one.  Repeating is safe:
the lease token says which claim speaks, and a finish heard twice is ``already_finished``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import psycopg

from ._async_client import AsyncClient
from ._database import Database, backoff
from ._errors import InvalidArgumentError, JobFinishedError, JobNotFoundError, LeaseLostError
from ._job import BaseJob
from ._json import storable
from ._outage import is_lost
from ._outcome import Failed, Lost, Outcome, Snoozed, Stopped, Succeeded, failure
from ._rows import ReleasedJob

logger = logging.getLogger("rota")

T = TypeVar("T")
Ending = tuple[str, dict[str, Any]]
Finish = tuple[BaseJob, Any, asyncio.Future[str]]
MAX_JOBS = 1000
BUSY_PAUSE = 0.5
"""Seconds until a job whose row another session has locked is tried again."""
PATIENCE = 2.0
"""Seconds that one call may take: behind it wait the endings of all other jobs."""
REFUSED = (InvalidArgumentError, psycopg.DataError)
"""Errors that say that an argument is wrong: calling again would not help."""


class Settler:
    """Carries outcomes to the database over one connection."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pending: list[Finish] = []
        self._flush: asyncio.Task[None] | None = None

    async def settle(self, job: BaseJob, outcome: Outcome) -> Ending:
        """End a job; return the event to log, and its details."""
        match outcome:
            case Succeeded(result):
                return await self._finish(job, storable(result, job.job_id)), {}
            case Lost():
                return "lost", {}
        try:
            try:
                return await self._end_without_success(job, outcome)
            except REFUSED as error:
                # A delay that SQL refuses, say: the job fails for that reason instead.
                return await self._end_without_success(job, failure(error))
        except (LeaseLostError, JobNotFoundError):
            return "lost", {}
        except JobFinishedError:
            # The reply to a commit was lost, and the handler took that for a failure.
            return ("succeeded" if job.is_in_doubt else "lost"), {}

    async def _end_without_success(self, job: BaseJob, outcome: Outcome) -> Ending:
        job_id, token = job.job_id, job.lease_token
        match outcome:
            case Snoozed(delay):
                moment = await self._insist(lambda c: c.snooze_job(job_id, token, delay))
                return ("snoozed" if moment else "cancelled"), {"next_run": moment}
            case Stopped():
                return ("released" if await self.release([job]) else "lost"), {}
            case Failed(error, error_type, stack, retry_in, is_fatal):
                row = await self._insist(
                    lambda c: c.fail_job(
                        job_id, token, error, error_type, stack, retry_in, is_fatal
                    )
                )
                details = {"next_run": row.run_at, "error_type": error_type, "error": error}
                return row.status, details
        raise AssertionError(outcome)

    async def release(self, jobs: list[BaseJob]) -> set[int]:
        """Give jobs back; return the ids of those that were still ours."""
        released: set[int] = set()
        for start in range(0, len(jobs), MAX_JOBS):
            ids = [job.job_id for job in jobs[start : start + MAX_JOBS]]
            tokens = [job.lease_token for job in jobs[start : start + MAX_JOBS]]
            rows = await self._insist(partial(_release, ids, tokens))
            released |= {row.job_id for row in rows if row.is_released}
        return released

    async def _finish(self, job: BaseJob, result: Any) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._put((job, result, future))
        return await future

    def _put(self, finish: Finish) -> None:
        if not finish[2].done():
            self._pending.append(finish)
            if self._flush is None or self._flush.done():
                self._flush = asyncio.create_task(self._finish_pending())

    async def _finish_pending(self) -> None:
        while self._pending:
            part, self._pending = self._pending[:MAX_JOBS], self._pending[MAX_JOBS:]
            try:
                try:
                    await self._finish_part(part)
                except REFUSED as error:
                    await self._finish_one_by_one(part, error)
            except Exception as error:  # each job's own task raises it
                for _, _, future in part:
                    if not future.done():
                        future.set_exception(error)

    async def _finish_part(self, part: list[Finish]) -> None:
        ids = [job.job_id for job, _, _ in part]
        tokens = [job.lease_token for job, _, _ in part]
        results = [result for _, result, _ in part]
        rows = await self._insist(lambda c: c.finish_jobs(ids, tokens, results))
        for finish, row in zip(part, rows, strict=True):
            if row.outcome == "busy":
                asyncio.get_running_loop().call_later(BUSY_PAUSE, self._put, finish)
            elif not finish[2].done():
                finish[2].set_result("lost" if row.outcome == "lost" else "succeeded")

    async def _finish_one_by_one(self, part: list[Finish], error: Exception) -> None:
        """Find the result that the database refuses, and drop it."""
        if len(part) > 1:
            for one in part:
                try:
                    await self._finish_part([one])
                except REFUSED as refused:
                    await self._finish_one_by_one([one], refused)
        else:
            job, _, future = part[0]
            logger.warning("job %s: its result is refused and dropped: %s", job.job_id, error)
            await self._finish_part([(job, None, future)])

    async def _insist(self, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Call until the database has answered."""
        failures = 0
        while True:
            try:
                async with asyncio.timeout(PATIENCE):
                    return await self._database.call(action)
            except TimeoutError:
                # It may wait for a row that another session has locked.
                failures += 1
                await asyncio.sleep(backoff(failures))
            except psycopg.DataError:
                raise
            except psycopg.Error as error:
                failures += 1
                if not is_lost(error):
                    logger.warning("a job's end could not be reported: %s", str(error).strip())
                await asyncio.sleep(backoff(failures))


async def _release(
    job_ids: list[int], lease_tokens: list[int], client: AsyncClient
) -> list[ReleasedJob]:
    return await client.release_jobs(job_ids, lease_tokens)
