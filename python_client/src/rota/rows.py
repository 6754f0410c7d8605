"""The rows that the stored functions return, one class per shape.

Those that come by the thousand are tuples: a frozen dataclass takes four times as long to fill.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedJob:
    """A job that was enqueued, or that already existed with the same key."""

    ordinal: int
    job_id: int
    is_new: bool


class ClaimedJob(NamedTuple):
    """A claimed job: its lease lasts until *locked_until*, *locked_for* long."""

    job_id: int
    lease_token: int
    queue: str
    job_type: str
    payload: Any
    priority: int
    attempt: int
    max_attempts: int
    run_at: datetime
    locked_until: datetime
    locked_for: timedelta
    idempotency_key: str | None
    created_at: datetime
    pipeline: str | None
    stage: str | None
    stage_input: Any
    definition: str | None
    scheduled_for: datetime | None
    time_limit: timedelta | None
    headers: dict[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How a session waits for jobs: listen to *channels*, and claim after a notification.

    *look_again_in* is the longest time until then, and zero if there may be something now.
    *has_maintenance* asks for a tick.  While a worker *is_active* no other is notified.
    """

    channels: list[str]
    look_again_in: timedelta
    has_maintenance: bool
    is_active: bool


class NextJob(NamedTuple):
    """A claimed job, or one that did not end or stay as requested, with only its ids.

    *outcome* is ``claimed``, ``cancel_requested``, ``overdue``, or an answer of `EndedJob`.
    """

    outcome: str
    job_id: int
    lease_token: int
    queue: str | None
    job_type: str | None
    payload: Any
    priority: int | None
    attempt: int | None
    max_attempts: int | None
    run_at: datetime | None
    locked_until: datetime | None
    locked_for: timedelta | None
    idempotency_key: str | None
    created_at: datetime | None
    pipeline: str | None
    stage: str | None
    stage_input: Any
    definition: str | None
    scheduled_for: datetime | None
    time_limit: timedelta | None
    headers: dict[str, str] | None


class FinishedJob(NamedTuple):
    """The answer to a finish: ``finished``, ``already_finished``, ``lost`` or ``busy``."""

    job_id: int
    outcome: str


class ForwardJob(NamedTuple):
    """A job for another database; *job* is the text to enqueue there."""

    job_id: int
    lease_token: int
    created_at: datetime
    job: str


class ReceivedJob(NamedTuple):
    """The outcome of a sent job: its id here, or why it was refused."""

    ordinal: int
    job_id: int | None
    error_code: str | None
    message: str | None


class MoveFinding(NamedTuple):
    """What keeps a queue from moving (*severity* ``refused``), or has to be known before."""

    severity: str
    finding: str
    evidence: str
    remedy: str | None


class MoveStatus(NamedTuple):
    """How far a queue has moved."""

    move_id: int
    direction: str
    database: int
    state: str
    waiting: int
    running: int
    in_transit: int
    moved: int
    obstacle: str | None
    started_at: datetime


class WaitingMove(NamedTuple):
    """A move that has something to carry."""

    move_id: int
    queue: str
    database: int


class TakenMoves(NamedTuple):
    """What is to be sent of a move, and whether to take again at once.

    *jobs* is the text of an array, None if this transaction sends nothing; with *settle_above*
    nothing but what comes late is left.
    """

    job_ids: list[int]
    jobs: str | None
    settle_above: int | None
    has_more: bool


class EndedJob(NamedTuple):
    """The answer to an ending: the new status, or ``lost``, ``busy`` or ``refused``.

    Report a ``busy`` one again; *message* says why one was ``refused``.
    """

    job_id: int | None
    lease_token: int | None
    answer: str
    run_at: datetime | None
    error_code: str | None
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedJob:
    """The outcome of a failed job: ``failed`` with its next run, ``dead`` or ``cancelled``."""

    status: str
    run_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedJob:
    """Whether a job was given back; None if its row is locked: try again."""

    job_id: int
    is_released: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectResult:
    """What is known of a recorded effect: whether it is done, and with what result."""

    is_done: bool
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """How long the lease lasts now, and why the job should stop.

    An operator has called ``cancel_job()``, or it *is_overdue*: over its time limit.
    """

    locked_until: datetime
    is_cancel_requested: bool
    is_overdue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHeartbeat:
    """The heartbeat of one job among many; *locked_until* is None if it was not extended."""

    job_id: int
    locked_until: datetime | None
    is_lost: bool
    is_cancel_requested: bool
    is_overdue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChange:
    """Whether a schedule was created, changed or unchanged; and when it runs next."""

    outcome: str
    next_run_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpcomingRun:
    """An upcoming run, and what the wall clock shows then.

    *clock_change* is ``moved`` (its time is skipped that day), ``first`` or ``second`` (it
    comes twice), or None.
    """

    run_at: datetime
    local_time: datetime
    utc_offset: timedelta
    clock_change: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TickReport:
    """What one tick did; None for parts that failed and will be retried.

    *was_skipped* says that another tick was running, and *has_more* that there is more to do
    now: tick again at once.  *look_again_in* is when the next tick lets a job in, as at a rate
    or of a schedule; None if this one has let none in, or in none within a minute.
    """

    jobs_enqueued: int | None
    jobs_swept: int | None
    jobs_expired: int | None
    checks_done: int | None
    jobs_deleted: int | None
    keys_deleted: int | None
    effects_deleted: int | None
    errors_deleted: int | None
    occurrences_deleted: int | None
    others_deleted: int | None
    partitions_created: int | None
    partitions_dropped: int | None
    was_skipped: bool
    has_more: bool
    look_again_in: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended: its *result* if it succeeded, else its last error.

    Until then *is_ended* is false, and its end is notified on *channel*.
    """

    channel: str
    is_ended: bool
    status: str
    result: Any
    error_type: str | None
    last_error: str | None
    progress_percent: float | None
    progress_message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActReport:
    """What one call of `act_on_jobs` did; *next_after_id* is None after the last job.

    A conflict has the ``job_id`` and the ``reason`` why nothing was done to it.  Up to 1000
    *dependants* are counted: of a retry the others that were cancelled because of these, and
    stay so unless its arguments have ``with_dependants``; of a cancel or erase those that are
    cancelled with these.
    """

    matched: int
    changed: int
    conflicts: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    next_after_id: int | None
    dependants: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a job does not run; *remedy* is the SQL that would change it, if there is any."""

    ordinal: int
    reason: str
    explanation: str
    remedy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check of ``doctor()`` found; *severity* is ``critical``, ``warning`` or ``ok``."""

    severity: str
    finding: str
    evidence: str
    remedy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UntakenJobs:
    """The due jobs of a type that no live worker takes; *job_id* is one of them."""

    queue: str
    job_type: str
    due_jobs: int
    due_since: datetime
    job_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How many rows were checked for a promise, and how many break it, such as *example*."""

    promise: str
    examined: int
    violations: int
    example: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStats:
    """What ended from *starts_at* on, of one queue and job type unless they are None.

    *attempts* counts those that succeeded and those that failed.  Times and percentiles are
    those of the attempts, and None where none was measured.
    """

    starts_at: datetime
    queue: str | None
    job_type: str | None
    attempts: int
    succeeded: int
    failures: int
    dead: int
    cancelled: int
    average_wait: timedelta | None
    wait_p50: timedelta | None
    wait_p95: timedelta | None
    wait_p99: timedelta | None
    longest_wait: timedelta | None
    average_run: timedelta | None
    run_p50: timedelta | None
    run_p95: timedelta | None
    run_p99: timedelta | None
    longest_run: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCount:
    """How many jobs of a status there were at *counted_at*, due or not."""

    queue: str
    job_type: str
    status: str
    is_due: bool
    jobs: int
    first_run_at: datetime | None
    counted_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RisingFailure:
    """Failures of the last 10 minutes, and of an average 10 minutes of the day before."""

    queue: str
    job_type: str
    attempts: int
    failures: int
    usual_failures: Decimal
    failed_share: Decimal
    usual_share: Decimal
