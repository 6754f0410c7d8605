"""Assert which jobs wait, also those that the test's own transaction has not committed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from psycopg.rows import dict_row

from ..codec import Codec
from ..tasks import Task
from .session import Session, session_of

MAX_LISTED = 20
A_LITTLE = timedelta(seconds=1)
"""So far a delay may be from the one that was asked for: it is read from two times."""
_ANYTHING = object()
"""Nothing is equal to it but what equals anything."""
_FIRST = ("id", "job_type", "payload")
_SHOWN = ("queue", "status", "priority", "idempotency_key", "ordering_key", "limit_key")

Wanted = str | Task[..., ..., Any] | Mapping[str, Any]


def assert_enqueued(
    connection: object,
    job: Wanted,
    payload: Mapping[str, Any] | None = None,
    *,
    count: int | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """Assert that such a job waits, or *count* of them; return the first.

    *job* is a type, a task, or what ``task.job(...)`` returns.  The job's payload must contain
    *payload*, and may have more.  *columns* are those of ``rota.job_runs``, and ``delay``, the
    time from its creation to its first run.  With a ``status`` it checks all jobs.
    """
    __tracebackhide__ = True
    wanted, found, others = _search(connection, job, payload, columns)
    if count is not None and len(found) != count:
        there = _list(found + others, wanted)
        raise AssertionError(f"{len(found)}, not {count}, found with {_told(wanted)}{there}")
    if count is None and not found:
        raise AssertionError(f"no job has {_told(wanted)}{_list(others, wanted)}")
    return found[0] if found else {}


def assert_not_enqueued(
    connection: object, job: Wanted, payload: Mapping[str, Any] | None = None, **columns: Any
) -> None:
    """Assert that no such job waits; the arguments are those of `assert_enqueued`."""
    __tracebackhide__ = True
    wanted, found, _ = _search(connection, job, payload, columns)
    if found:
        raise AssertionError(f"{len(found)} found with {_told(wanted)}{_list(found, wanted)}")


def _search(
    connection: object, job: Wanted, payload: Mapping[str, Any] | None, columns: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what is wanted, the jobs that are it, and the others."""
    with session_of(connection) as session:
        names, rows = _rows(session, "status" in columns)
    for name in columns:
        if name not in names:
            raise TypeError(f"{name!r} is none of {', '.join(names)}")
    wanted: dict[str, Any] = {}
    if isinstance(job, Task):
        wanted["job_type"] = job.job_type
        for name in payload or ():
            if name not in job._decoders:
                raise TypeError(f"{name!r} is no parameter of {job.job_type}{job._signature}")
        if payload is not None:
            payload = {
                name: value if value == _ANYTHING else job._encode(name, value)
                for name, value in payload.items()
            }
    elif isinstance(job, Mapping):
        if payload is not None and "payload" in job:
            raise TypeError("a job that task.job(...) has made brings its payload")
        # Its updated_at is when its data changed, that of the row when the row did.
        known = {name for name in names if name != "updated_at"}
        wanted |= {name: value for name, value in job.items() if name in known}
    else:
        wanted["job_type"] = job
    if payload is not None:
        wanted["payload"] = payload
    if "payload" in wanted:
        wanted["payload"] = _as_stored(wanted["payload"])
    wanted |= columns
    found = [row for row in rows if all(_fits(row, *item) for item in wanted.items())]
    others = [row for row in rows if row not in found]
    others.sort(key=lambda row: row["job_type"] != wanted.get("job_type"))
    return wanted, found, others


def _rows(session: Session, with_ended: bool) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of what is known of jobs, and all jobs that wait, or all there are."""
    # In binary, what is read does not depend on DateStyle and IntervalStyle.
    with session.connection.cursor(row_factory=dict_row, binary=True) as cursor:
        cursor.execute(
            "select r.*, r.run_at - r.created_at as delay from rota.job_runs as r"
            " where %s or r.status in ('blocked', 'queued', 'failed') order by r.id",
            [with_ended],
        )
        return [column.name for column in cursor.description or ()], cursor.fetchall()


def _fits(row: Mapping[str, Any], name: str, wanted: Any) -> bool:
    if name == "delay":
        if not isinstance(wanted, timedelta):  # as enqueue() takes it too: in seconds
            wanted = timedelta(seconds=wanted or 0)
        return bool(abs(row[name] - wanted) < A_LITTLE)
    if name == "payload":
        return _has(row[name], wanted)
    return bool(wanted == row[name])


def _has(value: Any, wanted: Any) -> bool:
    """Whether a value has all that is wanted of it; what equals anything is equal too."""
    if isinstance(wanted, Mapping) and isinstance(value, Mapping):
        return all(name in value and _has(value[name], wanted[name]) for name in wanted)
    return bool(wanted == value)


def _as_stored(wanted: Any) -> Any:
    """Return what is wanted as JSON has it; what JSON has not may equal anything."""
    if isinstance(wanted, Mapping):
        items = wanted.items()
        return {k if isinstance(k, str) else json.dumps(k): _as_stored(v) for k, v in items}
    if isinstance(wanted, list | tuple):
        return [*map(_as_stored, wanted)]
    try:
        return Codec().encode(wanted)
    except TypeError:
        return wanted


def _told(wanted: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in wanted.items())


def _list(rows: list[dict[str, Any]], wanted: Mapping[str, Any]) -> str:
    if not rows:
        return "\nno job waits"
    lines = []
    for row in rows[:MAX_LISTED]:
        # Of what was asked for each is shown, and as it is compared.
        shown = [f"{n}={row[n]!r}" for n in _SHOWN if n in wanted or row[n] is not None]
        shown += [f"{n}={row[n]!r}" for n in wanted if n not in (*_SHOWN, *_FIRST)]
        if "run_at" not in wanted:
            shown.append(f"run_at={row['run_at']:%Y-%m-%d %H:%M:%S%z}")
        lines.append(f"  {row['id']} {row['job_type']} {row['payload']!r} {' '.join(shown)}")
    if len(rows) > MAX_LISTED:
        lines.append(f"  and {len(rows) - MAX_LISTED} more")
    return "\nthere are:\n" + "\n".join(lines)
