"""How a handler ended, and how to find that out.

`run_sync` and `run_async` are the only place where whatever a handler raises is caught.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ._errors import LeaseLostError
from ._job import AsyncJob, BaseJob, Job
from ._signals import FatalError, RetryIn, Snooze

MAX_TEXT = 100_000
"""Longer error texts are cut before they are sent; SQL cuts them again to what it keeps."""


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned."""

    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised."""

    error: str
    error_type: str
    stack: str
    retry_in: timedelta | None = None
    is_fatal: bool = False


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler wants to be asked again later."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease went to somebody else while the handler ran."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The worker stopped the handler in order to leave."""


Outcome = Succeeded | Failed | Snoozed | Lost | Stopped


def run_sync(handler: Callable[[Job], object], job: Job) -> Outcome:
    """Run a plain function on a job; never raise."""
    try:
        result = handler(job)
        if inspect.isawaitable(result):
            raise TypeError("the handler returned an awaitable: declare it with async def")
    except BaseException as error:  # also SystemExit: it would leave the job without an end
        return outcome_of(job, error)
    return Succeeded(result)


async def run_async(handler: Callable[[AsyncJob], Awaitable[object]], job: AsyncJob) -> Outcome:
    """Run an ``async def`` function on a job; never raise."""
    try:
        result = await handler(job)
    except BaseException as error:  # also CancelledError: this task ends here anyway
        return outcome_of(job, error)
    return Succeeded(result)


def failure(error: BaseException) -> Failed:
    """Describe an exception; one whose text cannot be had is described all the same."""
    described = traceback.TracebackException.from_exception(error)
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return Failed(
        error=(str(described) or kind.__qualname__)[:MAX_TEXT],
        error_type=f"{module}{kind.__qualname__}",
        stack="".join(described.format())[-MAX_TEXT:],
        retry_in=error.delay if isinstance(error, RetryIn) else None,
        is_fatal=isinstance(error, FatalError),
    )


def outcome_of(job: BaseJob, error: BaseException) -> Outcome:
    """Return what an exception that left a handler means; never raise."""
    try:
        return _outcome_of(job, error)
    except Exception:  # an exception may be built so that nothing can be asked of it
        name = type(error).__qualname__
        return Failed(name, name, "", is_fatal=isinstance(error, FatalError))


def _outcome_of(job: BaseJob, error: BaseException) -> Outcome:
    if isinstance(error, Snooze):
        return Snoozed(error.delay)
    if isinstance(error, LeaseLostError) or (job.is_ended_by(error) and job.is_lost):
        return Lost()
    if job.is_ended_by(error) and job.is_stopping and not job.is_cancel_requested:
        return Stopped()
    return failure(error)
