"""What can go wrong, as exceptions.

RotaError                  a stored function refused (carries sqlstate and hint)
 ├ JobNotFoundError        RT001  no job with this id
 ├ LeaseLostError          RT002  another claim owns the job by now
 ├ JobFinishedError        RT003  the job has already ended
 ├ UnknownQueueError       RT004  no queue with this name
 ├ UnknownScheduleError    RT005  no schedule with this name
 ├ BadScheduleError        RT006  a text is no schedule
 ├ KeyTakenError           RT007  another live job holds the idempotency key
 ├ JobRunningError         RT008  not possible while the job runs
 ├ IsolationLevelError     RT009  claim_jobs() needs READ COMMITTED
 ├ EffectInProgressError   RT010  another running job has recorded the effect
 ├ EffectNotHeldError      RT011  this job has no open record of the effect
 ├ KeyNotHaltedError        RT012  the ordering key does not wait for a dead job
 ├ JobNotBlockedError      RT013  the job can wait for no more jobs
 ├ RunInProgressError      RT014  the run of the pipeline is under way
 ├ NoDatabaseNumberError   RT015  the database has no number
 └ InvalidArgumentError    22023  an argument is wrong (also a ValueError)

Any other database error passes through as psycopg raised it.

A handler raises Snooze, RetryIn or FatalError to say how its job goes on, and gets to see
JobCancelled in turn.
"""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar


class RotaError(Exception):
    """A stored function of rota refused the call."""

    sqlstate: ClassVar[str] = ""
    hint: str | None = None


class JobNotFoundError(RotaError):
    """There is no job with this id."""

    sqlstate = "RT001"


class LeaseLostError(RotaError):
    """The lease token is no longer the newest: somebody else owns the job by now."""

    sqlstate = "RT002"


class JobFinishedError(RotaError):
    """The job has already ended."""

    sqlstate = "RT003"


class UnknownQueueError(RotaError):
    """There is no queue with this name."""

    sqlstate = "RT004"


class UnknownScheduleError(RotaError):
    """There is no schedule with this name."""

    sqlstate = "RT005"


class BadScheduleError(RotaError):
    """A text is no schedule, or one that never comes."""

    sqlstate = "RT006"


class KeyTakenError(RotaError):
    """Another live job holds the idempotency key."""

    sqlstate = "RT007"


class JobRunningError(RotaError):
    """The job is running, and this cannot be done to a running job."""

    sqlstate = "RT008"


class IsolationLevelError(RotaError):
    """Jobs are claimed in READ COMMITTED only."""

    sqlstate = "RT009"


class EffectInProgressError(RotaError):
    """Another job has recorded the effect and still runs."""

    sqlstate = "RT010"


class EffectNotHeldError(RotaError):
    """The job has no open record of the effect."""

    sqlstate = "RT011"


class KeyNotHaltedError(RotaError):
    """The ordering key does not wait for a dead job."""

    sqlstate = "RT012"


class JobNotBlockedError(RotaError):
    """The job is not blocked, so it can wait for no more jobs."""

    sqlstate = "RT013"


class RunInProgressError(RotaError):
    """The run of the pipeline is under way."""

    sqlstate = "RT014"


class NoDatabaseNumberError(RotaError):
    """The database has no number, so its jobs cannot travel."""

    sqlstate = "RT015"


class InvalidArgumentError(RotaError, ValueError):
    """An argument is wrong; the message begins with its name."""

    sqlstate = "22023"


class Snooze(Exception):
    """Run the job again after *delay* (seconds or timedelta); no attempt is used."""

    def __init__(self, delay: timedelta | float) -> None:
        self.delay = to_duration("delay", delay)
        super().__init__(f"snooze for {self.delay}")


class RetryIn(Exception):
    """Fail the attempt and try again after *delay* (seconds or timedelta)."""

    def __init__(self, delay: timedelta | float, reason: str = "the handler asked") -> None:
        super().__init__(reason)
        self.delay = to_duration("delay", delay)


class FatalError(Exception):
    """Fail the job for good: it is dead at once, whatever attempts are left."""


class JobCancelled(Exception):
    """Raised by ``job.check()`` when the job should end: cancelled, or the worker stops."""


class TimeLimitExceeded(JobCancelled):
    """Raised by ``job.check()`` when the attempt has taken longer than its time limit."""


_BY_SQLSTATE: dict[str | None, type[RotaError]] = {
    error.sqlstate: error
    for error in (
        JobNotFoundError,
        LeaseLostError,
        JobFinishedError,
        UnknownQueueError,
        UnknownScheduleError,
        BadScheduleError,
        KeyTakenError,
        JobRunningError,
        IsolationLevelError,
        EffectInProgressError,
        EffectNotHeldError,
        KeyNotHaltedError,
        JobNotBlockedError,
        RunInProgressError,
        NoDatabaseNumberError,
        InvalidArgumentError,
    )
}


def to_duration(argument: str, value: timedelta | float) -> timedelta:
    """Return a duration, of which a number means seconds; raise TypeError or ValueError."""
    message = f"{argument} must be a timedelta or seconds >= 0, got {value!r}"
    if not isinstance(value, timedelta | int | float):
        raise TypeError(message)
    try:
        duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError):  # infinite, or no number
        raise ValueError(message) from None
    if duration < timedelta(0):
        raise ValueError(message)
    return duration


def text_of(error: BaseException) -> str:
    """Return the text of any exception, also of one that has none to give."""
    try:
        return str(error)
    except BaseException:
        return f"{type(error).__name__}, whose text cannot be had"


def translate(error: Exception) -> Exception:
    """Return the exception for an error of a driver: one of ours, or the error itself."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    ours = _BY_SQLSTATE.get(state)
    if ours is None:
        return error
    told = getattr(error, "diag", error)  # asyncpg has no diag
    message = getattr(told, "message_primary", None) or getattr(told, "message", None)
    translated = ours(message or str(error))
    translated.hint = getattr(told, "message_hint", None) or getattr(told, "hint", None)
    return translated
