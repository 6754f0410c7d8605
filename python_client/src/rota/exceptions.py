"""What can go wrong, as exceptions.

A `RotaError` says that a stored function refused.  Any other database error passes through as
psycopg raised it.

A handler raises Snooze, RetryIn or FatalError to say how its job goes on, and gets to see
JobCancelled in turn.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import psycopg

_PRODUCER = "enqueue enqueue_many enqueue_to start_pipeline wait_for_result find_live_keys"
_WORKER = (
    "claim_jobs finish_job finish_jobs finish_and_claim end_jobs fail_job snooze_job "
    "release_jobs heartbeat heartbeat_jobs set_progress record_effect complete_effect "
    "withdraw_effect effect_result report_worker deregister_worker wait_for_jobs stop_waiting "
    "untaken_jobs sweep_stale_leases tick waiting_forwards take_forwards end_forwards "
    "receive_jobs waiting_moves take_moves receive_moves end_moves"
)
_OPERATOR = (
    "retry_job retry_with_dependants cancel_job set_priority reschedule_job pause_queue "
    "resume_queue pause_type set_type resume_type pause_all resume_all set_queue set_limit "
    "resume_ordering_key define_pipeline drop_pipeline restart_pipeline schedule_job "
    "unschedule_job enable_schedule disable_schedule run_schedule_now start_ticker "
    "stop_ticker settle_effect act_on_jobs set_archive set_retry_rule set_breaker "
    "plan_queue_move queue_move_facts receive_plan begin_queue_move end_queue_move "
    "queue_move_status grant_statements"
)
ACCESS = {
    function: access
    for access, functions in (
        ("operator", _OPERATOR),
        ("worker", _WORKER),
        ("producer", _PRODUCER),
    )
    for function in functions.split()
}
"""Which access a role needs for a function; of what only reads, an observer's is enough."""
OWNERS = {"set_database_number", "front_statements", "grant_queue", "revoke_queue"}
"""What only the owner of the schema may call."""


class RotaError(Exception):
    """A stored function of rota refused the call."""

    sqlstate: ClassVar[str] = ""
    hint: str | None = None


class JobNotFoundError(RotaError):
    """There is no job with this id."""

    sqlstate = "RT001"


class LeaseLostError(RotaError):
    """The lease is lost: it ended, was given back, or belongs to another worker now."""

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
    """The text is not a schedule, or never has a next time."""

    sqlstate = "RT006"


class KeyTakenError(RotaError):
    """Another live job holds the idempotency key."""

    sqlstate = "RT007"


class JobRunningError(RotaError):
    """The job is running, and this cannot be done to a running job."""

    sqlstate = "RT008"


class IsolationLevelError(RotaError):
    """Jobs are claimed, and carried between databases, in READ COMMITTED only."""

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
    """The job is not blocked, or is locked, so it cannot be made to wait for more jobs."""

    sqlstate = "RT013"


class RunInProgressError(RotaError):
    """The run of the pipeline, or the last run of the schedule, is in progress."""

    sqlstate = "RT014"


class NoDatabaseNumberError(RotaError):
    """The database has no number, so its jobs cannot go to other databases."""

    sqlstate = "RT015"


class JobMovedError(RotaError):
    """The job or queue is in another database, or in transit to it."""

    sqlstate = "RT016"
    detail: str | None = None

    @property
    def database(self) -> int | None:
        """The number of that database."""
        return int(self.detail.split()[0]) if self.detail else None


class InvalidArgumentError(RotaError, ValueError):
    """An argument is wrong; the message begins with its name."""

    sqlstate = "22023"


class NotGrantedError(RotaError, psycopg.errors.InsufficientPrivilege):
    """The role may not do this; message or hint names the statement that lets it."""

    sqlstate = "42501"  # type: ignore[misc]  # which psycopg has in the instance


class Snooze(Exception):
    """Run the job again after *delay* (seconds or timedelta); no attempt is used."""

    def __init__(self, delay: timedelta | float) -> None:
        self.delay = to_duration("delay", delay)
        super().__init__(f"snooze for {self.delay}")


class RetryIn(Exception):
    """Fail the attempt and retry after *delay* (seconds or timedelta)."""

    def __init__(self, delay: timedelta | float, reason: str = "the handler asked") -> None:
        super().__init__(reason)
        self.delay = to_duration("delay", delay)


class FatalError(Exception):
    """Fail the job permanently: it is dead at once, whatever attempts are left."""


class JobCancelled(Exception):
    """Raised by ``job.check()`` when the job should end: cancelled, or the worker stops."""


class TimeLimitExceeded(JobCancelled):
    """Raised by ``job.check()`` when the attempt has taken longer than its time limit."""


_BY_SQLSTATE: dict[str | None, type[RotaError]] = {
    error.sqlstate: error for error in RotaError.__subclasses__()
}


def to_duration(argument: str, value: timedelta | float) -> timedelta:
    """Return a duration, of which a number means seconds; raise TypeError or ValueError."""
    message = f"{argument} must be a timedelta or seconds >= 0, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, timedelta | int | float):
        raise TypeError(message)
    try:
        duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError):  # infinite, or no number
        raise ValueError(message) from None
    if duration < timedelta(0):
        raise ValueError(message)
    return duration


def kinds_of(
    argument: str, kinds: object, base: type[BaseException] = Exception
) -> tuple[type[Any], ...]:
    """Return exception classes as a tuple; raise TypeError for what is no class of them."""
    found = kinds if isinstance(kinds, tuple) else (kinds,)
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise TypeError(
                f"{argument} takes an exception class or a tuple of them, got {kind!r}"
            )
    return found


def text_of(error: BaseException) -> str:
    """Return the text of any exception, also of one that has none to give."""
    try:
        return str(error)
    except BaseException:
        return f"{type(error).__name__}, whose text cannot be had"


STOP_ERRORS = (JobCancelled, LeaseLostError, CancelledError)
"""What a handler raises that was told to end, by ``job.check()`` or a cancellation."""
_WISHES = (STOP_ERRORS, Snooze, RetryIn, FatalError)


def only_of(error: BaseException) -> BaseException:
    """Return the only exception of a group, as of a TaskGroup, or else what was given.

    Several are as one if all want the same, such as those of tasks that are told to stop.
    """
    found = list(_all_of(error))
    is_one = len(found) == 1 or any(
        all(isinstance(each, wish) for each in found) for wish in _WISHES
    )
    return found[0] if is_one else error


def _all_of(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _all_of(each)
    else:
        yield error


def translate(error: Exception, function: str) -> Exception:
    """Return the exception for an error of a driver: one of ours, or the error itself.

    *function* is what was called.
    """
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    ours = _BY_SQLSTATE.get(state)
    if ours is None:
        return error
    told = getattr(error, "diag", error)  # asyncpg has no diag
    message = getattr(told, "message_primary", None) or getattr(told, "message", None)
    text = message or str(error)
    if ours is NotGrantedError and getattr(told, "context", None) is None:
        text = f"{text}: {grant_remedy(function)}"  # of Postgres, which says no more than that
    translated = ours(text)
    if isinstance(translated, JobMovedError):
        translated.detail = getattr(told, "message_detail", None) or getattr(
            told, "detail", None
        )
    translated.hint = getattr(told, "message_hint", None) or getattr(told, "hint", None)
    return translated


def grant_remedy(function: str = "") -> str:
    """Return what lets a role call a function, or without one see the views."""
    access = ACCESS.get(function, "observer")
    if function in OWNERS:
        return f"rota.{function}() is for the owner of the schema"
    return (
        f"let the owner of the schema run what select rota.grant_statements({access!r}, "
        "'ROLE') returns"
    )
