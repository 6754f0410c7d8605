"""The command ``rota schedule show``: all about one schedule, also of one that is broken."""

from __future__ import annotations

import argparse
import dataclasses
from datetime import datetime
from typing import Any

import psycopg

from ..client.sync_client import Client
from ..exceptions import BadScheduleError
from ..rows import UpcomingRun
from .definitions import Definition, definition, in_zone, upcoming
from .output import connected, print_json, print_record, print_table, reason_of
from .runs import print_runs

FIRES = """
    select
        f.scheduled_for, f.fired_at - f.scheduled_for as late, f.outcome, f.job_id, r.status
    from rota.fires as f
    left join rota.job_runs as r on r.id = f.job_id
    where f.definition = %s
    order by f.scheduled_for desc
    limit 10
    """


def show(arguments: argparse.Namespace) -> None:
    """Show one schedule, when it runs next, and what became of its last times."""
    name = arguments.name
    words: str | None = None
    problem: str | None = None
    runs: list[UpcomingRun] = []
    with connected(arguments) as connection:
        client = Client(connection)
        row = definition(connection, name)
        try:
            words = client.describe_schedule(row["schedule"])
            runs = upcoming(client, row, 5)
        except (BadScheduleError, psycopg.DataError) as error:
            problem = reason_of(error)
        fires = connection.execute(FIRES, [name]).fetchall()
        if arguments.json:
            said: dict[str, Any] = {"description": words, "problem": problem}
            said |= {"runs": list(map(dataclasses.asdict, runs))}
            print_json({**row, **said, "fires": fires})
            return
        head = {"name": name, "description": words or problem, "state": row["state"]}
        print_record(head | _shown(row))
        if problem or (row["last_error"] and not row["is_enabled"]):
            print(f"(put it right with: rota schedule add {name} ...)")
        if not problem:
            print("\nnext runs" if row["is_enabled"] else "\nnext runs, if it were enabled")
            print_runs(connection, runs, row["schedule"], row["time_zone"])
    print("\nlast runs")
    print_table([{**f, "scheduled_for": in_zone(f["scheduled_for"], row)} for f in fires])


def _shown(row: Definition) -> Definition:
    """Return what a row tells to a person, in the zone of the schedule."""
    # The last planned time may have made no job: the list of the last runs tells.
    left_out = {"last_run_at"}
    if row["schedule"].lower().split()[:1] != ["every"]:
        left_out.add("anchored_at")
    return {
        key: in_zone(value, row) if isinstance(value, datetime) else value
        for key, value in row.items()
        if value is not None and key not in left_out
    }
