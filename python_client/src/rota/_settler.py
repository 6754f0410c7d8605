"""Report how jobs ended that did not succeed: calls that are repeated until they are heard.

Another session may have the row of a job locked, for as long as it likes, and these functions
wait for it, on connections of their own.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ._async_client import AsyncClient
from ._errors import JobFinishedError, JobNotFoundError, LeaseLostError
from ._insist import REFUSED, insist
from ._job import BaseJob
from ._outcome import Failed, Lost, Outcome, Snoozed, Stopped, failure
from ._patient_calls import PatientCalls
from ._rows import ReleasedJob

Ending = tuple[str, dict[str, Any]]
MAX_JOBS = 1000
TOGETHER = 2.0
"""Seconds after which jobs that are released together are released one by one."""


class Settler:
    """Carries outcomes other than success."""

    def __init__(self, patient: PatientCalls) -> None:
        self._patient = patient

    async def settle(self, job: BaseJob, outcome: Outcome) -> Ending:
        """End a job; return the event to log, and its details."""
        if isinstance(outcome, Lost):
            return "lost", {}
        try:
            try:
                return await self._end(job, outcome)
            except REFUSED as error:
                # A delay that SQL refuses, say: the job fails for that reason instead.
                return await self._end(job, failure(error))
        except (LeaseLostError, JobNotFoundError):
            return "lost", {}
        except JobFinishedError:
            # The reply to a commit was lost, and the handler took that for a failure.
            return ("succeeded" if job.is_in_doubt else "lost"), {}

    async def _end(self, job: BaseJob, outcome: Outcome) -> Ending:
        job_id, token = job.job_id, job.lease_token
        match outcome:
            case Snoozed(delay):
                moment = await insist(
                    self._patient, lambda c: c.snooze_job(job_id, token, delay)
                )
                return ("snoozed" if moment else "cancelled"), {"next_run": moment}
            case Stopped():
                return ("released" if await self.release([job], TOGETHER) else "lost"), {}
            case Failed(error, error_type, stack, retry_in, is_fatal):
                row = await insist(
                    self._patient,
                    lambda c: c.fail_job(
                        job_id, token, error, error_type, stack, retry_in, is_fatal
                    ),
                )
                details = {"next_run": row.run_at, "error_type": error_type, "error": error}
                return row.status, details
        raise AssertionError(outcome)

    async def release(self, jobs: list[BaseJob], patience: float | None) -> set[int]:
        """Give jobs back; return the ids of those that were still ours, as far as is known.

        Without *patience*, in seconds, wait until it is known of all.
        """
        released: set[int] = set()
        for start in range(0, len(jobs), MAX_JOBS):
            part = jobs[start : start + MAX_JOBS]
            ids = await self._release_for_a_while([part], TOGETHER)
            if ids is None and (len(part) > 1 or patience is None):
                # One row may be locked: let the others go.
                ids = await self._release_for_a_while([[job] for job in part], patience)
            released |= ids or set()
        return released

    async def _release_for_a_while(
        self, parts: list[list[BaseJob]], timeout: float | None
    ) -> set[int] | None:
        """Return the ids that were released, or None if no part was answered in time."""
        calls = [
            asyncio.create_task(insist(self._patient, partial(_release, part)))
            for part in parts
        ]
        try:
            done, late = await asyncio.wait(calls, timeout=timeout)
        finally:
            for call in calls:
                call.cancel()
        if late:
            await asyncio.wait(late)
        rows = [row for call in done for row in call.result()]
        return {row.job_id for row in rows if row.is_released} if done else None


async def _release(jobs: list[BaseJob], client: AsyncClient) -> list[ReleasedJob]:
    ids = [job.job_id for job in jobs]
    return await client.release_jobs(ids, [job.lease_token for job in jobs])
