"""Report how jobs ended: short calls that are repeated until the database has heard them.

Successes that come while a call is under way go together in the next one.  Repeating is safe:
the lease token says which claim speaks, and a finish heard twice is ``already_finished``.

Another session may have the row of a job locked, for as long as it likes.  finish_jobs() goes
past it and says ``busy``; the other functions wait, on connections of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import psycopg

from ._async_client import AsyncClient
from ._checks import check_stage
from ._database import Database, backoff
from ._errors import InvalidArgumentError, JobFinishedError, JobNotFoundError, LeaseLostError
from ._job import BaseJob
from ._json import storable
from ._outage import is_lost
from ._outcome import Failed, Lost, Outcome, Snoozed, Stopped, Succeeded, failure
from ._patient_calls import PatientCalls
from ._rows import ReleasedJob
from ._statement import UNSET

logger = logging.getLogger("rota")

T = TypeVar("T")
Ending = tuple[str, dict[str, Any]]
Finish = tuple[BaseJob, Any, asyncio.Future[str]]
MAX_JOBS = 1000
BUSY_PAUSE = 0.5
"""Seconds until a job whose row another session has locked is tried again."""
RELEASE_PATIENCE = 2.0
"""Seconds that a release may take: a worker that leaves cannot wait for ever."""
REFUSED = (
    InvalidArgumentError,
    psycopg.DataError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
)
"""Errors that say that an argument is wrong: calling again would not help."""


class Caller(Protocol):
    """What lends a client to a call: a database, or `PatientCalls`."""

    async def call(self, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Run *action*."""


class Settler:
    """Carries outcomes: successes over *database*, the others over *patient*."""

    def __init__(self, database: Database, patient: PatientCalls) -> None:
        self._database = database
        self._patient = patient
        self._pending: list[Finish] = []
        self._flush: asyncio.Task[None] | None = None

    async def settle(self, job: BaseJob, outcome: Outcome) -> Ending:
        """End a job; return the event to log, and its details."""
        match outcome:
            case Succeeded(result):
                try:
                    check_stage(job.next_stage)
                    return await self._finish(job, storable(result, job.job_id)), {}
                except (InvalidArgumentError, TypeError) as error:
                    # The handler named a stage that there is not.
                    outcome = failure(error)
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
                moment = await _insist(
                    self._patient, lambda c: c.snooze_job(job_id, token, delay)
                )
                return ("snoozed" if moment else "cancelled"), {"next_run": moment}
            case Stopped():
                return ("released" if await self.release([job]) else "lost"), {}
            case Failed(error, error_type, stack, retry_in, is_fatal):
                row = await _insist(
                    self._patient,
                    lambda c: c.fail_job(
                        job_id, token, error, error_type, stack, retry_in, is_fatal
                    ),
                )
                details = {"next_run": row.run_at, "error_type": error_type, "error": error}
                return row.status, details
        raise AssertionError(outcome)

    async def release(self, jobs: list[BaseJob]) -> set[int]:
        """Give jobs back; return the ids of those that were still ours."""
        released: set[int] = set()
        for start in range(0, len(jobs), MAX_JOBS):
            part = jobs[start : start + MAX_JOBS]
            ids = await self._release_for_a_while([part])
            if ids is None and len(part) > 1:  # one row may be locked: let the others go
                ids = await self._release_for_a_while([[job] for job in part])
            released |= ids or set()
        return released

    async def _release_for_a_while(self, parts: list[list[BaseJob]]) -> set[int] | None:
        """Return the ids that were released, or None if no part was answered in time."""
        calls = [
            asyncio.create_task(_insist(self._patient, partial(_release, part)))
            for part in parts
        ]
        try:
            done, late = await asyncio.wait(calls, timeout=RELEASE_PATIENCE)
        finally:
            for call in calls:
                call.cancel()
        if late:
            await asyncio.wait(late)
        rows = [row for call in done for row in call.result()]
        return {row.job_id for row in rows if row.is_released} if done else None

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
                except Exception as error:  # one of the results, and no matter what is wrong
                    await self._finish_one_by_one(part, error)
            except Exception as error:  # each job's own task raises it
                for _, _, future in part:
                    if not future.done():
                        future.set_exception(error)

    async def _finish_part(self, part: list[Finish]) -> None:
        ids = [job.job_id for job, _, _ in part]
        tokens = [job.lease_token for job, _, _ in part]
        results = [result for _, result, _ in part]
        stages = [job.next_stage for job, _, _ in part]
        named = UNSET if all(stage is None for stage in stages) else stages
        rows = await _insist(
            self._database, lambda c: c.finish_jobs(ids, tokens, results, named)
        )
        for finish, row in zip(part, rows, strict=True):
            if row.outcome == "busy":
                asyncio.get_running_loop().call_later(BUSY_PAUSE, self._put, finish)
            elif not finish[2].done():
                finish[2].set_result("lost" if row.outcome == "lost" else "succeeded")

    async def _finish_one_by_one(self, part: list[Finish], error: Exception) -> None:
        """Find what the database refuses: drop a result, but not a stage."""
        if len(part) > 1:
            for one in part:
                try:
                    await self._finish_part([one])
                except Exception as refused:
                    await self._finish_one_by_one([one], refused)
        elif isinstance(error, InvalidArgumentError) and str(error).startswith("next_stages"):
            if not part[0][2].done():
                part[0][2].set_exception(error)
        else:
            job, _, future = part[0]
            logger.warning("job %s: its result is refused and dropped: %s", job.job_id, error)
            await self._finish_part([(job, None, future)])


async def _insist(caller: Caller, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Call until the database has answered."""
    failures = 0
    while True:
        try:
            return await caller.call(action)
        except REFUSED:
            raise
        except psycopg.Error as error:
            failures += 1
            if not is_lost(error):
                logger.warning("a job's end could not be reported: %s", str(error).strip())
            await asyncio.sleep(backoff(failures))


async def _release(jobs: list[BaseJob], client: AsyncClient) -> list[ReleasedJob]:
    ids = [job.job_id for job in jobs]
    return await client.release_jobs(ids, [job.lease_token for job in jobs])
