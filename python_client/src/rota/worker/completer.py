"""Report how jobs ended, as many as there are in one call, until the database has answered.

What ends while a call is under way goes together in the next one, and the databases of a worker
take turns with such calls.  Repeating is safe: the lease token says which claim speaks, and a
report that arrives twice gets the same answer.

end_jobs() answers each ending by itself.  One whose row another session has locked is reported
again soon.  One that the database refuses is reported as failed, or without its result, if its
values are wrong; otherwise it is tried again until its lease ends, and then left to the sweep.
None of these holds up the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import psycopg
from psycopg.errors import QueryCanceled

from ..client.statement import UNSET
from ..client.values import check_stage, dump_result, join_endings, join_results
from ..exceptions import InvalidArgumentError, RotaError
from ..job import BaseJob, State
from ..rows import EndedJob
from .connection import (
    BUSY_PAUSE,
    IDLE_TIMEOUT,
    MAX_JOBS,
    PASSING,
    Connection,
    NoAnswerError,
    Retry,
    end_task,
    is_lost,
    is_wrong,
    wait_for,
)
from .events import Ends, Outcome, failure
from .heartbeat import Heartbeat

logger = logging.getLogger("rota")

MAX_SIZE = 16_000_000
"""Characters of results and errors that may wait to be reported, and that go in one call."""
LAST_REPORT = 2.0
"""Seconds that the last reports of a worker that leaves may take."""
LEAVING_PAUSE = 0.01
"""Seconds after which it looks again whether all are answered."""
RELEASE_PAUSE = 0.1
"""Seconds until a locked job is given back again, maybe by a worker that leaves."""
MAX_SILENT = 10
"""How often the row of a job may be locked before the log says so: a handler may have left its
own transaction open."""
UNTRANSLATABLE = "22P05"
"""A text has characters that the encoding of the database lacks."""
EVENTS = {"finished": "succeeded", "already_finished": "succeeded"}
ANSWERS = {
    answer: EndedJob(None, None, answer, None, None, None)
    for answer in (*EVENTS, "lost", "busy")
}
"""What `finish_jobs` answers, as `end_jobs` would."""


NOT_COMMITTED = Outcome(
    "failed",
    error="finish_in() was called in a transaction that was not committed: what the handler "
    "wrote is lost, so the attempt fails",
    error_type="rota.NotCommitted",
)
"""The outcome of a handler that returns and has not committed the transaction of its end."""


@dataclass(eq=False, slots=True)
class _Report:
    """What is told of a job; *result* is JSON text, *size* what it takes of `MAX_SIZE`.

    *came_after* is how the handler ended, if a transaction of its own may have ended the job.
    *refusals* counts how often its row was locked.
    """

    job: BaseJob
    duration: float
    outcome: Outcome
    came_after: Outcome | None = None
    result: str | None = None
    is_changed: bool = False
    is_given_back: bool = False
    refusals: int = 0
    size: int = 0
    retry: Retry | None = None

    def ending(self) -> tuple[dict[str, Any], str | None]:
        """Return the ending as `end_jobs` takes it, and apart from it the result."""
        job, outcome = self.job, self.outcome
        ending: dict[str, Any] = {"job_id": job.job_id, "lease_token": job.lease_token}
        ending["outcome"] = outcome.kind
        if outcome.kind == "failed":
            ending |= {"error": outcome.error, "error_type": outcome.error_type}
            ending |= {"stack": outcome.stack, "fatal": outcome.fatal}
        elif outcome.kind == "succeeded" and job.next_stage is not None:
            ending["next_stage"] = job.next_stage
        for name, duration in (("retry_in", outcome.retry_in), ("delay", outcome.delay)):
            if duration is not None:
                ending[name] = duration.total_seconds()
        return ending, self.result


class Completer:
    """Has ends reported and logged, and then lets go of the jobs; calls *on_end* after it.

    Before each call *take_turn* says how long to wait.  When none has come for a while it
    closes its connection and calls *on_rest*, as it does when it finds no database.
    """

    def __init__(
        self,
        connection: Connection,
        heartbeat: Heartbeat,
        ends: Ends,
        take_turn: Callable[[], float],
        on_end: Callable[[], None],
        on_rest: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._heartbeat = heartbeat
        self._ends = ends
        self._take_turn = take_turn
        self._on_end, self._on_rest = on_end, on_rest
        self._retry = Retry("reporting ends", connection.state)
        self._reports: dict[BaseJob, _Report] = {}
        self._pending: list[_Report] = []
        self._size = 0
        self._reporting: asyncio.Task[None] | None = None
        self._is_asked = asyncio.Event()
        self._given_back = 0

    def __len__(self) -> int:
        """How many ends are not reported yet, beside the jobs that are given back."""
        return len(self._reports) - self._given_back

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to report."""
        return not self._reports

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be reported that no more jobs should end."""
        is_full = len(self._reports) >= 2 * MAX_JOBS or self._size >= MAX_SIZE
        return is_full or self._ends.is_full

    @property
    def is_behind(self) -> bool:
        """Whether the database could not be told of ends, and so may take jobs for stale."""
        return self._retry.failures > 0

    def put(self, job: BaseJob, outcome: Outcome) -> None:
        """Report how a job ended, if it has not said so in its own transaction."""
        duration = time.monotonic() - job.began_at
        if job.is_finished or outcome.kind == "lost":
            if job.is_finished:
                _warn_of_what_came_after(job, outcome)
            self._heartbeat.remove([job])
            self._ends.add("succeeded" if job.is_finished else "lost", job, duration)
            self._wake()  # to rest after a while
            return
        report = _Report(job, duration, outcome)
        if job.state is State.FINISHING:
            report.came_after = outcome
            if outcome.kind == "succeeded":
                report.outcome = outcome = NOT_COMMITTED
        job.state = State.ENDED
        if outcome.kind == "succeeded":
            try:
                check_stage(job.next_stage)
            except (InvalidArgumentError, TypeError) as error:
                report.outcome = failure(error)  # the handler named a stage that there is not
            else:
                report.result = dump_result(outcome.result, f"job {job.job_id}")
        self._reports[job] = report
        errors = report.outcome.error + report.outcome.stack
        report.size = len(report.result or "") + len(errors)
        self._size += report.size
        self._add(report)

    async def close(self) -> None:
        """Report what can be reported in a short time; the leases of other jobs will expire."""
        deadline = time.monotonic() + LAST_REPORT
        while self._reports and time.monotonic() < deadline:
            await asyncio.sleep(LEAVING_PAUSE)
        for job, report in self._reports.items():
            logger.warning("job %s: its end could not be reported", job.job_id)
            self._ends.add("lost", job, report.duration)
        self._heartbeat.remove(self._reports)
        self._reports.clear()
        self._pending.clear()
        if self._reporting is not None:
            await end_task(self._reporting)
        await self._connection.close()

    def give_back(self, jobs: Iterable[BaseJob]) -> None:
        """Release jobs that did not start here, or do not end, for other workers."""
        for job in jobs:
            report = _Report(job, 0.0, Outcome("released"), is_given_back=True)
            self._reports[job] = report
            self._given_back += 1
            self._add(report)

    def _add(self, report: _Report) -> None:
        if report.job in self._reports:
            self._pending.append(report)
            self._wake()

    def _wake(self) -> None:
        self._is_asked.set()
        if self._reporting is None or self._reporting.done():
            # In a context of its own: this may be called in that of a job.
            self._reporting = asyncio.create_task(self._run(), context=Context())

    async def _run(self) -> None:
        """Report until cancelled, and rest when nothing has come for a while."""
        while True:
            if not await wait_for(self._is_asked, IDLE_TIMEOUT):
                self._on_rest()
                await self._connection.close()
                await self._is_asked.wait()
            self._is_asked.clear()
            while self._pending:
                if (pause := self._take_turn()) > 0:
                    await asyncio.sleep(pause)
                count = self._count_for_call()
                part, self._pending = self._pending[:count], self._pending[count:]
                try:
                    await self._report(part)
                except PASSING as error:
                    self._pending = part + self._pending
                    if is_lost(error):
                        self._on_rest()  # closes idle ones: the server may be full
                    await self._retry.wait(error)
                    continue
                except Exception:  # no lease may be kept for a job that nobody ends
                    logger.exception("ends could not be reported; their leases will expire")
                    self._heartbeat.remove([report.job for report in part])
                    for report in part:
                        if report.job in self._reports:
                            self._forget(report)
                self._retry.succeed()
                self._on_end()

    def _count_for_call(self) -> int:
        """Return how many of the reports go in the next call, which must not be too large."""
        if self._size <= MAX_SIZE:
            return MAX_JOBS
        sizes = accumulate(report.size for report in self._pending[:MAX_JOBS])
        return max(1, sum(size <= MAX_SIZE for size in sizes))

    async def _report(self, part: list[_Report]) -> None:
        rows: Sequence[EndedJob] | None = None
        if all(report.outcome.kind == "succeeded" for report in part):
            rows = await self._finish_jobs(part)
        if rows is None:
            rows = await self._end_jobs(part)
        self._heartbeat.remove(
            [
                report.job
                for report, row in zip(part, rows, strict=True)
                if self._take_answer(report, row)
            ]
        )

    async def _finish_jobs(self, part: list[_Report]) -> list[EndedJob] | None:
        """Report successes in the way that costs least; return None if one is refused."""
        ids = [report.job.job_id for report in part]
        tokens = [report.job.lease_token for report in part]
        results = [report.result for report in part]
        stages = [report.job.next_stage for report in part]
        try:
            rows = await self._connection.call(
                lambda client: client.finish_jobs(
                    ids,
                    tokens,
                    join_results(results) if any(results) else UNSET,
                    stages if any(stage is not None for stage in stages) else UNSET,
                )
            )
        except (psycopg.Error, RotaError, ValueError, RecursionError) as error:
            if is_lost(error) or isinstance(error, NoAnswerError):
                raise
            return None
        return [ANSWERS[row.outcome] for row in rows]

    async def _end_jobs(self, part: list[_Report]) -> list[EndedJob]:
        """Report endings of any kind; what cannot even be sent is found one by one."""
        try:
            endings = join_endings([report.ending() for report in part])
            return await self._connection.call(lambda client: client.end_jobs(endings))
        except (psycopg.Error, RotaError, ValueError, RecursionError) as error:
            # One ending may exceed statement_timeout, or what the server can do, each time, and
            # all that go with it.
            is_too_much = is_wrong(getattr(error, "sqlstate", None))
            if isinstance(error, PASSING) and not (
                is_too_much or isinstance(error, QueryCanceled)
            ):
                raise
            if len(part) > 1:
                return [row for report in part for row in await self._end_jobs([report])]
            code = getattr(error, "sqlstate", None) or "22000"
            return [EndedJob(None, None, "refused", None, code, str(error).strip())]

    def _take_answer(self, report: _Report, row: EndedJob) -> bool:
        """Log what became of a job; return whether that was its end."""
        job = report.job
        if row.answer == "busy":
            report.refusals += 1
            if report.refusals == MAX_SILENT:
                text = "job %s: its end waits for another session, which has locked its row"
                logger.warning(text + "; rota explain %s names it", job.job_id, job.job_id)
            pause = RELEASE_PAUSE if report.is_given_back else BUSY_PAUSE
            asyncio.get_running_loop().call_later(pause, self._add, report)
            return False
        if row.answer == "refused" and self._try_otherwise(report, row):
            return False
        if row.answer == "lost" and job.is_in_doubt and report.outcome.kind != "succeeded":
            # Only a success is answered by what ended it: its transaction, or another lease.
            report.outcome = Outcome("succeeded")
            self._add(report)
            return False
        self._forget(report)
        event = EVENTS.get(row.answer, row.answer)
        details: dict[str, Any] = {}
        outcome = report.outcome
        if event in ("failed", "dead", "snoozed"):
            details = {"next_run": row.run_at, "exception": outcome.exception}
            if event != "snoozed":
                details |= {"error_type": outcome.error_type, "error": outcome.error}
                details["is_asked_for"] = outcome.is_asked_for
        elif event == "succeeded" and report.came_after is not None:
            _warn_of_what_came_after(job, report.came_after)
        if event == "refused":
            logger.error("job %s could not be ended: %s", job.job_id, row.message)
            event = "lost"
        self._ends.add(event, job, report.duration, **details)
        return True

    def _forget(self, report: _Report) -> None:
        del self._reports[report.job]
        self._size -= report.size
        self._given_back -= report.is_given_back

    def _try_otherwise(self, report: _Report, row: EndedJob) -> bool:
        """Report again what was refused; return False when it is time to give up."""
        job, loop = report.job, asyncio.get_running_loop()
        if is_wrong(row.error_code) and not report.is_changed:
            # An argument is wrong, and the same report would be refused again.
            if row.error_code == UNTRANSLATABLE and report.outcome.kind == "failed":
                report.is_changed = True
                error, stack = map(_ascii_of, (report.outcome.error, report.outcome.stack))
                report.outcome = replace(report.outcome, error=error, stack=stack)
            elif report.result is not None and job.next_stage is None:
                text = "job %s: its result was refused and dropped: %s"
                logger.warning(text, job.job_id, row.message)
            else:
                report.is_changed = True
                report.outcome = failure(InvalidArgumentError(row.message))
            report.result = None
            loop.call_soon(self._add, report)
            return True
        if report.retry is None:
            report.retry = Retry(None, self._connection.state)
            # Its lease is not extended any more, so another worker can try later.
            self._heartbeat.remove([job])
            text = "job %s: its end was refused, retrying until its lease expires: %s"
            logger.warning(text, job.job_id, row.message)
        pause = report.retry.fail(RotaError(row.message))
        if pause >= job.seconds_left:
            return False
        loop.call_later(pause, self._add, report)
        return True


def _ascii_of(text: str) -> str:
    """Escape the characters that another encoding may lack."""
    return text.encode("ascii", "backslashreplace").decode()


def _warn_of_what_came_after(job: BaseJob, outcome: Outcome) -> None:
    """Tell of what a handler returned or raised after the transaction that ended its job."""
    if outcome.kind == "succeeded":
        if outcome.result is not None and outcome.result is not job.result:
            text = "job %s: what its handler returned after its transaction is not stored: "
            logger.warning(text + "set job.result before that ends", job.job_id)
    elif outcome.kind in ("failed", "snoozed"):
        text = "job %s succeeded in its transaction; what came later is dropped: %s"
        told = outcome.error or "a snooze"
        logger.error(text, job.job_id, told, exc_info=outcome.exception)
