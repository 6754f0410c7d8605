"""The rows of rota as the model sees them, and what a backoff rule allows.

The columns stand in the order in which `database.STATE` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SECOND = 1_000_000
Rows = list[list[Any]]
Ref = tuple[int, int]  # a job's id and a lease token
ENDED = ("succeeded", "dead", "cancelled")


class Refused(Exception):
    """The call changes nothing, and raises this SQLSTATE."""


class Divergence(AssertionError):
    """The database and the model disagree."""


@dataclass
class Job:
    """A row of job_runs, and what of jobs is not in it, in the order of the state's columns."""

    id: int
    queue: str
    job_type: str
    payload: Any
    priority: int
    run_at: int
    status: str
    attempts: int
    max_attempts: int
    locked_by: str | None
    locked_until: int | None
    lease_token: int
    idempotency_key: str | None
    progress_percent: int | None
    progress_message: str | None
    cancel_requested_at: int | None
    cancel_reason: str | None
    last_error: str | None
    error_type: str | None
    failed_at: int | None
    created_at: int
    started_at: int | None
    finished_at: int | None
    result: Any
    definition: str | None
    scheduled_for: int | None
    lease: int | None
    backoff: Any
    ordering_key: str | None
    skip_dead: bool | None
    limit_key: str | None
    pipeline: str | None
    stage: str | None
    stage_input: Any
    stage_queued_at: int | None
    rerun: list[Any] | None = None  # payload, run_at, priority, first call of a run to follow

    @property
    def is_live(self) -> bool:
        return self.status not in ENDED


@dataclass
class Queue:
    """A row of queues."""

    queue: str
    lease: int | None = None
    max_attempts: int | None = None
    backoff: Any = None


@dataclass
class Limit:
    """A row of limits, in the order of the state's columns."""

    limit_name: str
    max_running: int | None = None
    max_starts: int | None = None
    per: int | None = None
    burst: int | None = None
    weight: int | None = None

    @property
    def gap(self) -> int:
        """From one start to the next."""
        return -((self.per or SECOND) // -(self.max_starts or 1))

    @property
    def most(self) -> int:
        tenth = SECOND // 10
        return self.burst or max(1, min(10000, tenth // self.gap))


@dataclass
class Stage:
    """A row of pipeline_stages without its pipeline, in the order of the state's columns."""

    stage: str
    ordinal: int | None
    next_stage: str | None
    job_type: str
    queue: str
    priority: int | None
    max_attempts: int | None
    lease: int | None
    backoff: Any


@dataclass
class Schedule:
    """A row of job_definitions, in the order of the state's columns."""

    name: str
    schedule: str
    job_type: str
    catch_up: str
    overlap: str
    anchored_at: int
    is_enabled: bool = True
    next_run_at: int | None = None
    last_run_at: int | None = None
    last_job_id: int | None = None


NAMES: dict[str, list[str]] = {
    "jobs": [*Job.__dataclass_fields__],
    "finished_jobs": [*Job.__dataclass_fields__],
    "queues": [*Queue.__dataclass_fields__],
    "job_definitions": [*Schedule.__dataclass_fields__],
}
NUMBERS = {name: number for number, name in enumerate(NAMES["jobs"])}


class Seen:
    """What the database shows after a call: its jobs by their ids, as the columns of `Job`."""

    def __init__(self, jobs: list[list[Any]], holds: dict[str, str] | None = None) -> None:
        self._jobs = {row[0]: row for row in jobs}
        self._holds = holds or {}
        self.claimed: list[int] = []  # in the order of the answer

    def get(self, job_id: int, name: str) -> Any:
        row = self._jobs.get(job_id)
        return row[NUMBERS[name]] if row else None

    def get_hold(self, job_id: int) -> str | None:
        """Return why a waiting job is kept out of its lane."""
        return self._holds.get(str(job_id))

    def has_new(
        self, known: dict[int, Job], key: str, pipeline: str | None, job_type: str | None
    ) -> bool:
        """Tell whether there is a new job of an idempotency key of a pipeline or type."""
        new = (i for i in self._jobs if i not in known)
        its = (i for i in new if self.get(i, "idempotency_key") == key)
        return any(
            self.get(i, "pipeline") == pipeline
            and (pipeline is not None or self.get(i, "job_type") == job_type)
            for i in its
        )

    def new_id(self, known: dict[int, Job], like: Job) -> int:
        """Return the lowest new id of such a job, one beyond all if it was refused."""
        names = ["idempotency_key", "job_type", "definition", "scheduled_for", "pipeline"]
        names += ["stage"]
        wanted = [getattr(like, name) for name in names]
        new = (i for i in self._jobs if i not in known)
        return min((i for i in new if [self.get(i, n) for n in names] == wanted), default=2**62)


def delays(rule: dict[str, Any] | None, attempt: int) -> tuple[int, int]:
    """Return the shortest and the longest delay before the next try; no cap is exceeded."""
    rule = rule or {"kind": "exponential", "cap_seconds": 1800}
    base, jitter = rule.get("base_seconds", 60), rule.get("jitter", 0.2)
    listed = rule.get("delay_seconds", [base])
    middle = {
        "fixed": base,
        "linear": base * attempt,
        "quadratic": base * attempt**2,
        "exponential": base * 2 ** min(attempt - 1, 62),
        "list": listed[min(attempt, len(listed)) - 1],
    }[rule["kind"]]
    if rule["kind"] != "list" or "cap_seconds" in rule:
        middle = min(middle, rule.get("cap_seconds", 86400) / (1 + jitter))
    # The last digit is the database's own.
    low, high = (middle * (1 + side * jitter) * SECOND for side in (-1, 1))
    return int(low) - 1, int(high) + 2
