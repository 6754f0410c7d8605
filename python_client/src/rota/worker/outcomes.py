"""How a handler ended, and how to find that out.

`run_sync` and `run_async` are the only place where whatever a handler raises is caught.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..exceptions import (
    FatalError,
    JobCancelled,
    LeaseLostError,
    RetryIn,
    Snooze,
    only_of,
    text_of,
    to_duration,
)
from ..job import AsyncJob, BaseJob, Job

ANSWERS = (JobCancelled, LeaseLostError, asyncio.CancelledError)
"""What a handler raises that was told to end, by `check` or a cancellation."""
MAX_TEXT = 100_000
"""Longer error texts are cut before they are sent; SQL cuts them again to what it keeps."""


@dataclass(slots=True)
class Outcome:
    """How a handler ended, in the words of `end_jobs`, or that its job was ``lost`` meanwhile.

    It is ``released`` if the worker stopped it in order to leave.  *exception* is for the log,
    where somebody should see it.
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


def failed(error: str, error_type: str, stack: str = "", **more: Any) -> Outcome:
    """Return that a handler failed."""
    return Outcome("failed", None, error, error_type, stack, **more)


def run_sync(handler: Callable[[Job], object], job: Job) -> Outcome:
    """Run a plain function on a job; never raise."""
    try:
        return _returned(job, handler(job))
    except BaseException as error:  # also SystemExit: it would leave the job without an end
        return outcome_of(job, error)


async def run_async(handler: Callable[[AsyncJob], Awaitable[object]], job: AsyncJob) -> Outcome:
    """Run an ``async def`` function on a job; never raise."""
    try:
        return _returned(job, await handler(job))
    except BaseException as error:  # also CancelledError: this task ends here anyway
        return outcome_of(job, error)


def _returned(job: BaseJob, result: object) -> Outcome:
    """Return what a returned value means; one that shows that nothing has run is an error."""
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
    """Describe an exception; never raise, though it may be built so that asking it does."""
    try:
        name = _name(type(error))
        is_asked_for = isinstance(error, RetryIn | JobCancelled)
        return failed(
            error=(text_of(error) or name)[:MAX_TEXT],
            error_type=name,
            stack=_stack(error)[-MAX_TEXT:],
            retry_in=_delay(error) if isinstance(error, RetryIn) else None,
            fatal=fatal or isinstance(error, FatalError),
            exception=None if is_asked_for else error,
        )
    except BaseException:
        return failed("an exception of which nothing can be said", "unknown")


def outcome_of(job: BaseJob, error: BaseException) -> Outcome:
    """Return what an exception that left a handler means; never raise."""
    try:
        error = only_of(error)
        if isinstance(error, Snooze):
            return _snooze(error)
        if isinstance(error, ANSWERS) and job.is_lost:
            return Outcome("lost")
        if isinstance(error, ANSWERS) and not job.is_cancel_requested:
            if job.is_overdue:
                return _overdue(job, error)
            if job.is_leaving:
                return Outcome("released")
    except BaseException:
        return failure(error)
    return failure(error, fatal=job.is_given_up)


def _overdue(job: BaseJob, error: BaseException) -> Outcome:
    """Describe an attempt that its time limit has ended; the stack tells where it was."""
    text = f"time limit: the handler did not end within {job.time_limit}"
    stack = _stack(error)[-MAX_TEXT:]
    return failed(text, "time_limit", stack, fatal=job.is_given_up, exception=error)


def _snooze(error: Snooze) -> Outcome:
    delay = _delay(error)
    if delay is None:  # of a subclass that does not call the constructor, say
        return failed("the snooze has no delay", _name(type(error)), _stack(error))
    return Outcome("snoozed", delay=delay)


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
        return "".join(traceback.format_exception(error))
    except BaseException:
        return "".join(traceback.format_tb(error.__traceback__))
