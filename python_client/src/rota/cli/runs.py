"""Print when a schedule runs, and where the clocks change."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from psycopg import Connection

from ..rows import UpcomingRun
from .output import span

WANTED = """
    select rota.next_run(
        %(schedule)s, 'UTC',
        ((%(run_at)s::timestamptz - interval '1 microsecond') at time zone %(zone)s)
            at time zone 'UTC'
    ) at time zone 'UTC' as wanted
    """


def print_runs(
    connection: Connection[Any], runs: Sequence[UpcomingRun], schedule: str, time_zone: str
) -> None:
    """Print the runs of *schedule* in the zone and in UTC, with a note for changed clocks."""
    row = connection.execute("select rota.now() as now").fetchone() or {}
    has_seconds = any(run.local_time.second or run.local_time.microsecond for run in runs)
    shape = "%Y-%m-%d %H:%M:%S" if has_seconds else "%Y-%m-%d %H:%M"
    table = [[time_zone, "" if time_zone == "UTC" else "UTC", "from now", ""]]
    for run in runs:
        local = f"{run.local_time:%a {shape}} {offset(run.utc_offset)}"
        utc = "" if time_zone == "UTC" else f"{run.local_time - run.utc_offset:{shape}}"
        mark = _mark(connection, run, schedule, time_zone)
        table.append([local, utc, _distance(row["now"], run.run_at), mark])
    if not runs:
        print("(none is planned)")
        return

    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True) if w).rstrip()
        for cells in table
    ]
    print("\n".join(lines[:2]))
    for (before, run), line in zip(pairwise(runs), lines[2:], strict=True):
        if before.utc_offset != run.utc_offset:
            print(_change(before.utc_offset, run.utc_offset))
        print(line)


def offset(value: timedelta) -> str:
    """Return an offset from UTC as in +02:00."""
    minutes, seconds = divmod(abs(round(value.total_seconds())), 60)
    sign = "-" if value < timedelta(0) else "+"
    text = f"{sign}{minutes // 60:02}:{minutes % 60:02}"
    return f"{text}:{seconds:02}" if seconds else text


def _change(before: timedelta, after: timedelta) -> str:
    direction = "forward" if after > before else "back"
    return f"--- clocks go {direction}, from {offset(before)} to {offset(after)}"


def _mark(connection: Connection[Any], run: UpcomingRun, schedule: str, time_zone: str) -> str:
    shown = _clock(run.local_time)
    if run.clock_change == "moved":
        arguments = {"schedule": schedule, "run_at": run.run_at, "zone": time_zone}
        row = connection.execute(WANTED, arguments).fetchone() or {}
        wanted = _clock(row["wanted"])
        return f"clocks go forward: {wanted} does not exist, runs at {shown}"
    return f"{run.clock_change} of two {shown}" if run.clock_change else ""


def _clock(local_time: datetime) -> str:
    return f"{local_time:%H:%M:%S}".removesuffix(":00")


def _distance(now: datetime, moment: datetime) -> str:
    """Return a distance in time by its two largest units."""
    # Of two times of one zone Python subtracts what the wall clocks show.
    distance = moment.astimezone(UTC) - now.astimezone(UTC)
    text = span(distance)
    if not text:
        return "now"
    return f"{text} ago" if distance < timedelta(0) else f"in {text}"
