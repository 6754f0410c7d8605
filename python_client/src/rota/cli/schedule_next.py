"""The command ``rota schedule next``: what a schedule means, and when it runs."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..client.sync_client import Client
from .definitions import definition, is_after, upcoming, use_zone
from .output import UsageError, connected, print_json
from .runs import print_runs

MAX_RUNS = 1000


def next_runs(arguments: argparse.Namespace) -> None:
    """Explain a schedule, and list its next runs."""
    schedule, name, time_zone = arguments.schedule, arguments.name, arguments.time_zone
    if (schedule is None) == (name is None):
        raise UsageError("give the text of a schedule, in quotes, or --name NAME")
    if name is not None and time_zone is not None:
        raise UsageError("--tz is for a text; a schedule that is there has its own zone")
    if not 1 <= arguments.number <= MAX_RUNS:
        raise UsageError(f"-n must be 1 to {MAX_RUNS}, got {arguments.number}")
    more: dict[str, Any] = {"max_runs": arguments.number}
    if arguments.after is not None:
        more["after"] = arguments.after
    with connected(arguments) as connection, connection.transaction():
        client = Client(connection)
        row = definition(connection, name) if name else {"schedule": schedule}
        zone = row.get("time_zone", time_zone or "UTC")
        words = client.describe_schedule(row["schedule"])
        use_zone(connection, zone, arguments.after)
        if name:
            runs = upcoming(client, row, **more)
        else:
            runs = client.upcoming_runs(schedule, zone, **more)
        if arguments.json:
            said = {"schedule": row["schedule"], "time_zone": zone, "description": words}
            print_json(said | {"runs": list(map(dataclasses.asdict, runs))})
            return
        print(f"{words}, in {zone}")
        if not name and time_zone is None:
            print("(for another zone: --tz Europe/Warsaw)")
        if row.get("state", "").startswith("overdue"):
            print(f"({row['state']})")
        print()
        shown = runs[:1] if is_after(row["schedule"]) else runs
        print_runs(connection, shown, row["schedule"], zone)
    if is_after(row["schedule"]):
        if not name:
            print("(here counted from now; the first run is at once, or at starts_at)")
        print("(each later run is planned when the one before it has ended)")
    elif not name and words.endswith("counted from its start"):
        print("(here counted from now; with starts_at, or from when it is put in)")
