"""What became of a job: how its handler ended, the line of the log, and who is told.

`run_sync` and `run_async` are the only place where whatever a handler raises is caught.  `Ends`
tells how attempts ended, once the database knows: the log, the worker's figures, and the
functions of `on_end`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any

from ..client.statement import Unreadable
from ..exceptions import (
    STOP_ERRORS,
    FatalError,
    JobCancelled,
    RetryIn,
    Snooze,
    only_of,
    text_of,
    to_duration,
)
from ..job import AsyncJob, BaseJob, Job, JobEnd
from ..registry import EndFunction, is_async
from .connection import first_of

logger = logging.getLogger("rota")

MAX_TEXT = 100_000
"""Longer error texts are cut before they are sent; SQL cuts them again to what it keeps."""
MAX_PENDING = 2000
"""Ends that may wait for their functions; with more, no job is started."""
LONG = 60.0
"""Seconds after which a function that has not returned is named in the log."""
_LEVELS = {"failed": logging.WARNING, "lost": logging.WARNING, "dead": logging.ERROR}


@dataclass(slots=True)
class Outcome:
    """How a handler ended, in the words of `end_jobs`, or that its job was ``lost`` meanwhile.

    It is ``released`` if the worker stopped it in order to leave.  The log shows *exception*,
    but not one that *is_asked_for* while the job is tried again.
    """

    kind: str
    result: Any = None
    error: str = ""
    error_type: str = ""
    stack: str = ""
    retry_in: timedelta | None = None
    fatal: bool = False
    delay: timedelta | None = None
    exception: BaseException | None = None
    is_asked_for: bool = False


SUCCEEDED = Outcome("succeeded")
"""How most handlers end, which return nothing."""


def run_sync(handler: Callable[[Job], object], job: Job) -> Outcome:
    """Run a plain function on a job, unless that is not wanted any more; never raise."""
    try:
        return _refusal(job) or _returned(job, handler(job))
    except BaseException as error:  # also SystemExit: it would leave the job without an end
        return outcome_of(job, error)


async def run_async(handler: Callable[[AsyncJob], Awaitable[object]], job: AsyncJob) -> Outcome:
    """Run an ``async def`` function on a job like `run_sync`."""
    try:
        return _refusal(job) or _returned(job, await handler(job))
    except BaseException as error:  # also CancelledError: this task ends here anyway
        return outcome_of(job, error)


def _refusal(job: BaseJob) -> Outcome | None:
    """Return how a job ends that cannot be read; raise if it is not wanted any more."""
    job.check()
    for name, value in (("payload", job.payload), ("stage_input", job.stage_input)):
        if isinstance(value, Unreadable):
            reason = f"the {name} cannot be read: {value.reason}"
            return Outcome("failed", error=reason, error_type=name, fatal=True)
    return None


def _returned(job: BaseJob, result: object) -> Outcome:
    """Return what a returned value means; one that shows that nothing has run is an error."""
    if result is None and (result := job.result) is None:
        return SUCCEEDED  # the usual case, without half a microsecond of questions
    if isinstance(result, BaseException):
        return outcome_of(job, result)
    if inspect.isawaitable(result):
        raise TypeError(
            "the handler returned an awaitable: declare it, and what decorates it, with "
            "async def"
        )
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(
            "the handler is a generator, so none of its code has run: return instead"
        )
    return Outcome("succeeded", result)


def failure(error: BaseException, *, fatal: bool = False) -> Outcome:
    """Describe an exception; never raise, even if its own methods do."""
    try:
        if isinstance(error, MemoryError):
            # Its frames would keep what the handler had, and the report needs a part of that.
            traceback.clear_frames(error.__traceback__)
        name = _name(type(error))
        if isinstance(error, RetryIn):  # by a middleware, instead of what was given up
            fatal = False
        return Outcome(
            "failed",
            error=(text_of(error) or name)[:MAX_TEXT],
            error_type=name,
            stack=_stack(error),
            retry_in=_delay(error) if isinstance(error, RetryIn) else None,
            fatal=fatal or isinstance(error, FatalError),
            exception=error,
            is_asked_for=isinstance(error, RetryIn | JobCancelled),
        )
    except BaseException:
        text = "an exception of which nothing can be said"
        return Outcome("failed", error=text, error_type="unknown")


def outcome_of(job: BaseJob, error: BaseException) -> Outcome:
    """Return what an exception that left a handler means; never raise."""
    try:
        error = only_of(error)
        # A snooze of a subclass that does not call the constructor has no delay, and fails.
        if isinstance(error, Snooze) and (delay := _delay(error)) is not None:
            return Outcome("snoozed", delay=delay)
        if isinstance(error, STOP_ERRORS) and job.is_lost:
            return Outcome("lost")
        if isinstance(error, STOP_ERRORS) and not job.is_cancel_requested:
            if job.is_overdue:
                return Outcome(
                    "failed",
                    error=f"time limit: the handler did not end within {job.time_limit}",
                    error_type="time_limit",
                    stack=_stack(error),  # which tells where it was
                    fatal=job.is_given_up,
                    exception=error,
                )
            if job.is_leaving:
                return Outcome("released")
    except BaseException:
        return failure(error)
    return failure(error, fatal=job.is_given_up)


def _delay(error: Snooze | RetryIn) -> timedelta | None:
    try:
        return to_duration("delay", error.delay)
    except Exception:
        return None


def _name(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _stack(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(error)
    except BaseException:
        lines = traceback.format_tb(error.__traceback__)
    return "".join(lines)[-MAX_TEXT:]


def _guard(handle: Callable[[logging.LogRecord], None]) -> Callable[[logging.LogRecord], None]:
    """Let no error of a log handler end a worker, but print it as `logging` does."""

    def guarded(record: logging.LogRecord) -> None:
        try:
            handle(record)
        except Exception:
            if logging.raiseExceptions:
                with suppress(Exception):  # a job may have closed sys.stderr
                    traceback.print_exc()

    return guarded


logger.handle = _guard(logger.handle)  # type: ignore[method-assign,assignment]


def log_job(
    event: str,
    job: BaseJob,
    duration: float | None = None,
    exception: BaseException | None = None,
    **details: Any,
) -> None:
    """Log one event; *details* that are None are left out."""
    level = _LEVELS.get(event, logging.INFO)
    if not logger.isEnabledFor(level):
        return
    fields = {
        "event": event,
        "job_type": job.job_type,
        "job_id": job.job_id,
        "queue": job.queue,
        "schedule": job.definition,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "worker": job.worker,
        "duration": None if duration is None else round(duration, 3),
        **details,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    words = [f"{name}={_word(value)}" for name, value in fields.items() if name != "event"]
    logger.log(
        level, "%s %s", event, " ".join(words), exc_info=exception, extra={"rota": fields}
    )


class Ends:
    """Logs the ends of attempts, and calls *functions* for each, one after the other."""

    def __init__(self, functions: Sequence[EndFunction]) -> None:
        self.count = 0
        """How many attempts have ended, without jobs that were given back."""
        self.is_calling = False
        """Whether a plain function runs."""
        self._functions = functions
        self._pending: deque[tuple[BaseJob, JobEnd]] = deque()
        self._telling: asyncio.Task[None] | None = None
        # Of its own: handlers may use all threads of the loop.
        self._thread = ThreadPoolExecutor(1, "rota-on-end")

    @property
    def is_full(self) -> bool:
        """Whether the functions are so far behind that no more jobs should end."""
        return len(self._pending) >= MAX_PENDING

    def add(
        self,
        event: str,
        job: BaseJob,
        duration: float = 0.0,
        exception: BaseException | None = None,
        next_run: datetime | None = None,
        *,
        is_asked_for: bool = False,
        **details: Any,
    ) -> None:
        """Log an end that the database knows of, and tell the functions."""
        self.count += event != "released"
        shown = None if is_asked_for and event == "failed" else exception
        log_job(event, job, duration or None, shown, next_run=next_run, **details)
        if self._functions:
            self._pending.append((job, JobEnd(event, duration, exception, next_run)))
            if self._telling is None or self._telling.done():
                # In a context of its own: this may be called in that of a job.
                self._telling = asyncio.create_task(self._tell(), context=Context())

    async def catch_up(self, hurry: asyncio.Event) -> None:
        """Wait until the functions know of all, hang, or are no longer waited for."""
        left: float = inf
        while self._telling is not None and len(self._pending) < left:
            left = len(self._pending)
            await first_of(self._telling, hurry, timeout=LONG)
            if hurry.is_set():
                return

    async def close(self) -> None:
        """Wait until the functions know of all; if that is cancelled, they get no more."""
        try:
            if self._telling is not None:
                # A function may swallow a cancellation, and the wait would go on.
                await asyncio.wait([self._telling])
        finally:
            self._pending.clear()
            if self._telling is not None:
                self._telling.cancel()
            self._thread.shutdown(wait=False)

    async def _tell(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            job, end = self._pending.popleft()
            for function in self._functions:
                name = getattr(function, "__qualname__", repr(function))
                warning = loop.call_later(LONG, self._warn_of, name, job)
                try:
                    if is_async(function):
                        error = await loop.create_task(
                            _call_async(function, job, end), context=Context()
                        )
                    else:
                        error = await loop.run_in_executor(
                            self._thread, self._call, function, job, end
                        )
                finally:
                    warning.cancel()
                if error is not None:
                    text = "job %s: %s, of on_end, failed"
                    logger.error(text, job.job_id, name, exc_info=error)

    def _call(self, function: EndFunction, job: BaseJob, end: JobEnd) -> BaseException | None:
        """Call a plain function; return what it raises, also SystemExit and StopIteration."""
        self.is_calling = True
        try:
            Context().run(function, job, end)
        except BaseException as error:
            return error
        finally:
            self.is_calling = False
        return None

    def _warn_of(self, name: str, job: BaseJob) -> None:
        logger.warning(
            "job %s: %s, of on_end, has not returned for %g seconds; %s more ends wait, and "
            "with %s no more jobs start",
            job.job_id, name, LONG, len(self._pending), MAX_PENDING,
        )  # fmt: skip


async def _call_async(function: EndFunction, job: BaseJob, end: JobEnd) -> BaseException | None:
    """Await an async function; return what it raises, unless this task is cancelled."""
    try:
        await function(job, end)
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
            raise
        return error
    return None


class JsonFormatter(logging.Formatter):
    """Format each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; events of jobs keep their fields apart."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= getattr(record, "rota", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=_plain)


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    return str(value)


def _word(value: Any) -> str:
    text = _plain(value)
    # A quoted word keeps line breaks and spaces of an error message inside one line.
    if text and text.isprintable() and " " not in text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in quoted)
