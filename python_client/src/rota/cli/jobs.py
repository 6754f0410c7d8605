"""Commands about jobs: enqueue, jobs, job, retry, cancel."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..exceptions import JobNotFoundError
from .output import UsageError, acting, connected, print_json, print_record, print_table

ENQUEUE_OPTIONS = (
    "queue", "run_at", "delay", "priority", "max_attempts", "lease", "idempotency_key",
)  # fmt: skip


def enqueue(arguments: argparse.Namespace) -> None:
    """Add one job and print its id."""
    payload = parse_payload(arguments.payload)
    job: dict[str, Any] = {"job_type": arguments.job_type, "payload": payload}
    options = {name: getattr(arguments, name) for name in ENQUEUE_OPTIONS}
    job |= {name: value for name, value in options.items() if value is not None}
    with connected(arguments) as connection, acting(connection) as client:
        row = client.enqueue(**job)
    if arguments.json:
        print_json({"job_id": row.job_id, "is_new": row.is_new})
    else:
        print(row.job_id if row.is_new else f"{row.job_id} (was there already)")


def parse_payload(text: str) -> Any:
    """Return what a JSON text says."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"the payload is not JSON: {error}") from None


def jobs(arguments: argparse.Namespace) -> None:
    """List jobs, the newest first."""
    filters = {
        "queue": arguments.queue,
        "status": arguments.status,
        "job_type": arguments.job_type,
        "schedule": arguments.schedule,
        "limit": arguments.limit,
    }
    with connected(arguments) as connection:
        rows = connection.execute(
            """
            select
                id, queue, job_type, status, attempts, max_attempts, run_at, finished_at,
                locked_by, last_error
            from rota.job_runs
            where (%(queue)s::text is null or queue = %(queue)s)
              and (%(status)s::text is null or status = %(status)s)
              and (%(job_type)s::text is null or job_type = %(job_type)s)
              and (%(schedule)s::text is null or definition = %(schedule)s)
            order by id desc
            limit %(limit)s
            """,
            filters,
        ).fetchall()
    (print_json if arguments.json else print_table)(rows)


def job(arguments: argparse.Namespace) -> None:
    """Show all there is to know about one job."""
    with connected(arguments) as connection:
        row = connection.execute(
            "select * from rota.job_runs where id = %s", [arguments.job_id]
        ).fetchone()
        if row is None:
            raise JobNotFoundError(f"job {arguments.job_id} not found")
        errors = connection.execute(
            "select attempt, failed_at, worker, error_type, message, stack from rota.job_errors"
            " where job_id = %s order by lease_token",
            [arguments.job_id],
        ).fetchall()
    if arguments.json:
        print_json({**row, "errors": errors})
        return
    print_record(row)
    for error in errors:
        print()
        print_record(error)


def retry(arguments: argparse.Namespace) -> None:
    """Put a job back to be run now."""
    with connected(arguments) as connection, acting(connection) as client:
        status = client.retry_job(arguments.job_id, force=arguments.force)
    _print_status(arguments, status)


def cancel(arguments: argparse.Namespace) -> None:
    """Cancel a job, or ask its worker to."""
    with connected(arguments) as connection, acting(connection) as client:
        status = client.cancel_job(arguments.job_id, reason=arguments.reason)
    _print_status(arguments, status)


def _print_status(arguments: argparse.Namespace, status: str) -> None:
    if arguments.json:
        print_json({"job_id": arguments.job_id, "status": status})
    elif status == "running":
        print(f"job {arguments.job_id} is running: its worker is told at the next heartbeat")
    else:
        print(f"job {arguments.job_id} is {status}")
