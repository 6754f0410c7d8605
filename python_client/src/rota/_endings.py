"""The jobs whose handler has ended, until the database knows how."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context
from functools import partial

from ._checks import check_stage
from ._database import Database
from ._errors import InvalidArgumentError
from ._finisher import Finisher
from ._heart import Heart
from ._job import BaseJob
from ._json import dump_result
from ._log import log_job
from ._outcome import Outcome, Succeeded, failure
from ._settler import Ending, Settler

logger = logging.getLogger("rota")


class Endings:
    """Has ends reported and logged, and then lets go of the jobs; calls *on_end* after it."""

    def __init__(
        self, database: Database, settler: Settler, heart: Heart, on_end: Callable[[], None]
    ) -> None:
        self._finisher = Finisher(database, self._on_finished)
        self._settler = settler
        self._heart = heart
        self._on_end = on_end
        self._finishing: dict[BaseJob, float] = {}
        self._settling: dict[BaseJob, asyncio.Task[Ending]] = {}

    def __len__(self) -> int:
        return len(self._finishing) + len(self._settling)

    @property
    def is_full(self) -> bool:
        """Whether no more jobs should end for the time being."""
        return self._finisher.is_full

    @property
    def slow(self) -> int:
        """How many of the ends are reported one by one."""
        return len(self._settling)

    def put(self, job: BaseJob, duration: float, outcome: Outcome) -> None:
        """Report how a job ended, if it has not said so in its own transaction."""
        job.is_settling = True
        if job.is_finished:
            if not isinstance(outcome, Succeeded):
                logger.warning("job %s is finished; what came after: %s", job.job_id, outcome)
            self._heart.remove([job])
            log_job("succeeded", job, duration)
            return
        if isinstance(outcome, Succeeded):
            try:
                check_stage(job.next_stage)
            except (InvalidArgumentError, TypeError) as error:
                outcome = failure(error)  # the handler named a stage that there is not
            else:
                self._finishing[job] = duration
                self._finisher.put(job, dump_result(outcome.result, job.job_id))
                return
        self._settle(job, duration, outcome)

    def drop(self) -> list[BaseJob]:
        """Return the jobs, and take no interest any more in what becomes of them."""
        jobs = [*self._finishing, *self._settling]
        self._finishing.clear()
        for task in self._settling.values():
            task.cancel()
        self._settling.clear()
        self._finisher.stop()
        return jobs

    async def close(self) -> None:
        """End the call that is under way."""
        await self._finisher.close()

    def _settle(self, job: BaseJob, duration: float, outcome: Outcome) -> None:
        report = self._settler.settle(job, outcome)
        # In a context of its own: this may be called in that of the job.
        task = self._settling[job] = asyncio.create_task(report, context=Context())
        task.add_done_callback(partial(self._on_settled, job, duration))

    def _on_settled(self, job: BaseJob, duration: float, task: asyncio.Task[Ending]) -> None:
        if self._settling.pop(job, None) is None:
            return  # dropped
        self._heart.remove([job])
        if task.cancelled():
            return
        if error := task.exception():
            _log_error(job, error)
        else:
            event, details = task.result()
            log_job(event, job, duration, **details)
        self._on_end()

    def _on_finished(self, jobs: list[BaseJob], events: list[str | Exception]) -> None:
        ended = []
        for job, event in zip(jobs, events, strict=True):
            duration = self._finishing.pop(job, None)
            if duration is None:
                continue  # dropped
            if isinstance(event, InvalidArgumentError):
                self._settle(job, duration, failure(event))
                continue
            ended.append(job)
            if isinstance(event, Exception):
                _log_error(job, event)
            else:
                log_job(event, job, duration)
        self._heart.remove(ended)
        self._on_end()


def _log_error(job: BaseJob, error: BaseException) -> None:
    logger.error("job %s could not be ended: %r", job.job_id, error, exc_info=error)
