"""What the commands about schedules ask, and how they show what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from psycopg import Connection

from ..client.sync_client import Client
from ..exceptions import UnknownScheduleError
from ..rows import UpcomingRun
from .output import span

Definition = dict[str, Any]


def definitions(connection: Connection[Any], name: str | None = None) -> list[Definition]:
    """Return the rows of all schedules, or of the one of that name, each with its state."""
    rows: list[Definition] = connection.execute(
        """
        select d.*, r.scheduled_for as last_run, r.status as last_status, rota.now() as now
        from rota.job_definitions as d
        left join rota.job_runs as r on r.id = d.last_job_id
        where %(name)s::text is null or d.name = %(name)s
        order by d.name
        """,
        {"name": name},
    ).fetchall()
    for row in rows:
        row["state"] = _state(row, row.pop("now"))
    return rows


def definition(connection: Connection[Any], name: str) -> Definition:
    """Return the row of a schedule; raise UnknownScheduleError if there is none."""
    for row in definitions(connection, name):
        return row
    raise UnknownScheduleError(f"schedule {name!r} not found")


def upcoming(client: Client, row: Definition, max_runs: int, **more: Any) -> list[UpcomingRun]:
    """Return the next runs of a schedule, as far as they can be known."""
    if is_after(row["schedule"]) and row["is_enabled"] and row["next_run_at"] is None:
        return []
    runs = client.upcoming_runs(name=row["name"], max_runs=max_runs, **more)
    return runs[:1] if is_after(row["schedule"]) else runs


def is_after(schedule: str) -> bool:
    """Whether each run is planned by the end of the one before."""
    return schedule.split()[:1] != [] and schedule.split()[0].lower() == "after"


def _state(row: Definition, now: datetime) -> str:
    """Say in a few words whether a schedule makes jobs."""
    if row["disabled_by"] is not None:
        return f"disabled by {row['disabled_by']}"
    if not row["is_enabled"]:
        return f"disabled: {row['last_error']}"
    if row["next_run_at"] is None:
        waits = is_after(row["schedule"]) and row["last_job_id"] is not None
        return f"waits for the end of job {row['last_job_id']}" if waits else "over"
    late = now - row["next_run_at"]
    if late > timedelta(minutes=1):
        return f"overdue by {span(late)}: does anybody tick?"
    return "due" if late >= timedelta(0) else "enabled"


def in_zone(moment: datetime | None, row: Mapping[str, Any]) -> datetime | None:
    """Return *moment* in the zone of a schedule, in UTC where that is not known here."""
    if moment is None:
        return None
    try:
        return moment.astimezone(ZoneInfo(row["time_zone"]))
    except (OSError, ValueError, LookupError):
        return moment.astimezone(UTC)


def use_zone(connection: Connection[Any], time_zone: str | None, *moments: str | None) -> None:
    """Let moments that name no zone be of *time_zone*, until the end of the transaction."""
    if any(moments):
        connection.execute("select set_config('TimeZone', %s, true)", [time_zone or "UTC"])
