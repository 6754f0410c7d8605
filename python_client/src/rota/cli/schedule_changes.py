"""What a change of a schedule has changed, so that it can be reviewed."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from psycopg import Connection

from ..client.sync_client import Client
from ..rows import ScheduleChange
from .definitions import Definition, definition, definitions, in_zone
from .output import text_of

GIVEN = (
    "schedule", "time_zone", "job_type", "payload", "queue", "priority", "max_attempts",
    "lease", "backoff", "catch_up", "catch_up_window", "catch_up_max", "overlap", "jitter",
    "starts_at", "ends_at",
)  # fmt: skip
Changes = dict[str, tuple[str, str]]


def put(
    connection: Connection[Any], said: dict[str, Any]
) -> tuple[ScheduleChange, Definition, Changes]:
    """Put a schedule in; return what that did, its row, and what is not as before."""
    rows = definitions(connection, said["name"])
    change = Client(connection).schedule_job(**said)
    row = definition(connection, said["name"])
    return change, row, changes(rows[0], row) if rows else {}


def changes(before: Definition, after: Definition) -> Changes:
    """Return the arguments that differ, as they were and as they are."""
    return {
        key: (_said(before[key], after), _said(after[key], after))
        for key in GIVEN
        if before[key] != after[key]
    }


def lines(changed: Changes) -> list[str]:
    """Return one line for each argument that differs."""
    return [f"{key}: {old} -> {new}" for key, (old, new) in changed.items()]


def _said(value: Any, row: Definition) -> str:
    if value is None:
        return "none"
    return text_of(in_zone(value, row) if isinstance(value, datetime) else value)
