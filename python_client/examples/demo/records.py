"""What the database has recorded of the demo's jobs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection
from psycopg.rows import class_row

from .story import QUEUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt, from ``rota.job_errors``."""

    job_id: int
    attempt: int
    worker: str
    error_type: str
    message: str
    started_at: datetime
    failed_at: datetime

    @property
    def error(self) -> str:
        """The error type without its module."""
        return self.error_type.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job, from ``rota.job_runs``."""

    id: int
    idempotency_key: str
    job_type: str
    status: str
    attempts: int
    worker: str | None
    started_at: datetime | None
    is_over: bool
    result: Any
    seconds: float
    """Until the next try, or until the end of the lease."""
    failures: tuple[Failure, ...] = ()

    @property
    def waits(self) -> list[float]:
        """Seconds between each failure and the start of the next attempt."""
        starts = [failure.started_at for failure in self.failures] + [self.started_at]
        return [
            (start - failure.failed_at).total_seconds()
            for failure, start in zip(self.failures, starts[1:], strict=True)
            if start is not None and start > failure.failed_at
        ]


def read_runs(connection: Connection[Any]) -> list[Run]:
    """Return all jobs of the demo, the oldest first."""
    with connection.transaction():  # so that both queries see the same moment
        connection.execute("set transaction isolation level repeatable read, read only")
        with connection.cursor(row_factory=class_row(Failure)) as cursor:
            failures = cursor.execute(
                "select job_id, attempt, worker, error_type, message, started_at, failed_at"
                " from rota.job_errors where queue = %s order by job_id, lease_token",
                [QUEUE],
            ).fetchall()
        rows = connection.execute(
            "select id, idempotency_key, job_type, status, attempts, locked_by as worker,"
            " started_at, finished_at is not null as is_over, result,"
            " extract(epoch from coalesce(locked_until, run_at) - rota.now())::float as seconds"
            " from rota.job_runs where queue = %s order by id",
            [QUEUE],
        )
        names = [column.name for column in rows.description or ()]
        return [
            Run(
                **(values := dict(zip(names, row, strict=True))),
                failures=tuple(f for f in failures if f.job_id == values["id"]),
            )
            for row in rows
        ]
