"""Report how jobs ended that did not succeed: calls that are repeated until they are heard.

Another session may have the row of a job locked, for as long as it likes.  A call about a
single job waits for it, on a connection of its own; one that gives many back says which are
locked, and those are tried again, on the connection on which jobs end.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ._errors import JobFinishedError, JobNotFoundError, LeaseLostError
from ._insist import REFUSED, Caller, insist
from ._job import BaseJob
from ._outcome import Failed, Lost, Outcome, Snoozed, Stopped, failure
from ._patient_calls import PatientCalls
from ._rows import ReleasedJob

Ending = tuple[str, dict[str, Any]]
MAX_JOBS = 1000
LOCKED_PAUSE = 0.1
"""Seconds until jobs are tried again whose rows another session has locked."""
STOPPED_PATIENCE = 2.0
"""Seconds after which a single job that cannot be given back is left to the sweep."""


class Settler:
    """Carries outcomes other than success."""

    def __init__(self, patient: PatientCalls, releases: Caller) -> None:
        self._patient = patient
        self._releases = releases

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
                return (
                    "released" if await self.release([job], STOPPED_PATIENCE) else "lost"
                ), {}
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

        Without *patience*, in seconds, go on until it is known of all.
        """
        released: set[int] = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while jobs:
                    locked = []
                    for start in range(0, len(jobs), MAX_JOBS):
                        part = jobs[start : start + MAX_JOBS]
                        for job, row in zip(part, await self._release(part), strict=True):
                            if row.is_released is None:
                                locked.append(job)
                            elif row.is_released:
                                released.add(job.job_id)
                    if jobs := locked:
                        await asyncio.sleep(LOCKED_PAUSE)
        return released

    async def _release(self, jobs: list[BaseJob]) -> list[ReleasedJob]:
        ids = [job.job_id for job in jobs]
        tokens = [job.lease_token for job in jobs]
        return await insist(self._releases, lambda c: c.release_jobs(ids, tokens))
