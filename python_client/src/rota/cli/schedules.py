"""Commands about schedules: add, list, remove, enable, disable, run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from psycopg import Connection

from ..client.sync_client import Client
from ..exceptions import RotaError
from .definitions import definition, definitions, in_zone, upcoming, use_zone
from .hints import hint_for
from .jobs import parse_payload
from .output import UsageError, connected, print_json, print_table, reason_of
from .runs import print_runs
from .schedule_changes import lines, put

OPTIONS = (
    "queue", "time_zone", "priority", "max_attempts", "lease", "catch_up", "catch_up_window",
    "catch_up_max", "overlap", "jitter", "starts_at", "ends_at",
)  # fmt: skip


def add(arguments: argparse.Namespace) -> None:
    """Put in one schedule, or change it."""
    name, schedule = arguments.name, arguments.schedule
    job: dict[str, Any] = {"name": name, "schedule": schedule, "job_type": arguments.job_type}
    job["payload"] = parse_payload(arguments.payload)
    job |= {key: value for key in OPTIONS if (value := getattr(arguments, key)) is not None}
    with (
        connected(arguments) as connection,
        connection.transaction(force_rollback=arguments.dry_run),
    ):
        use_zone(connection, arguments.time_zone, arguments.starts_at, arguments.ends_at)
        client = Client(connection)
        change, row, changed = put(connection, job)
        words = client.describe_schedule(schedule)
        runs = upcoming(client, row, 3)
        if arguments.json:
            said = {"name": name, "description": words, "is_dry_run": arguments.dry_run}
            said |= dataclasses.asdict(change) | {"changes": changed}
            print_json(said | {"runs": list(map(dataclasses.asdict, runs))})
            return
        print(f"{change.outcome} {name}: {words}, in {row['time_zone']}")
        for line in lines(changed):
            print(line)
        print_runs(connection, runs, schedule, row["time_zone"])
    if not row["is_enabled"]:
        print(f"(it is disabled: rota schedule enable {name})")
    if arguments.dry_run:
        print("(dry run: nothing was done)")


def list_all(arguments: argparse.Namespace) -> None:
    """List the schedules, by their names."""
    with connected(arguments) as connection:
        rows = definitions(connection)
    if arguments.json:
        print_json(rows)
        return
    print_table(
        [
            {
                **{key: row[key] for key in ("name", "schedule", "time_zone", "job_type")},
                "next_run": in_zone(row["next_run_at"], row),
                "last_run": in_zone(row["last_run"], row),
                "last_status": row["last_status"],
                "state": row["state"],
            }
            for row in rows
        ]
    )


def remove(arguments: argparse.Namespace) -> int:
    """Forget a schedule, after a question."""
    name = arguments.name
    with connected(arguments) as connection:
        definition(connection, name)
        if not arguments.yes:
            if not sys.stdin.isatty():
                raise UsageError(f"this forgets the schedule {name}: confirm it with --yes")
            answer = input(f"Forget the schedule {name}? [y/N] ")
            if answer.strip().lower() not in ("y", "yes"):
                print("nothing was done")
                return 1
        Client(connection).unschedule_job(name)
    print(f"schedule {name} is removed; the jobs that it has made stay")
    return 0


def enable(arguments: argparse.Namespace) -> int:
    """Let schedules make jobs again."""

    def do(connection: Connection[Any], name: str) -> str:
        Client(connection).enable_schedule(name)
        row = definition(connection, name)
        when = in_zone(row["next_run_at"], row)
        return f"enabled: {f'it runs next at {when}' if when else 'no next run is planned'}"

    return _switch(arguments, do, is_enabled=True)


def disable(arguments: argparse.Namespace) -> int:
    """Let schedules make no more jobs."""

    def do(connection: Connection[Any], name: str) -> str:
        Client(connection).disable_schedule(name)
        return "disabled; the jobs that it has made stay"

    return _switch(arguments, do, is_enabled=False)


def _switch(
    arguments: argparse.Namespace,
    do: Callable[[Connection[Any], str], str],
    *,
    is_enabled: bool,
) -> int:
    """Do it with each that is named, or with all that are not so yet; say what was done."""
    if bool(arguments.names) == arguments.all:
        raise UsageError("give the names of schedules, or --all")
    code = 0
    with connected(arguments) as connection:
        others = [r["name"] for r in definitions(connection) if r["is_enabled"] != is_enabled]
        names = others if arguments.all else arguments.names
        for arguments.name in names:
            try:
                print(f"schedule {arguments.name} is {do(connection, arguments.name)}")
            except RotaError as error:
                code = 1
                hint = hint_for(error, arguments)
                print(f"rota: {reason_of(error)} ({hint})", file=sys.stderr)
    if not names:
        print(f"all schedules are {'enabled' if is_enabled else 'disabled'} already")
    return code


def run(arguments: argparse.Namespace) -> None:
    """Make a job of a schedule now and print its id."""
    with connected(arguments) as connection:
        job_id = Client(connection).run_schedule_now(arguments.name)
    if arguments.json:
        print_json({"job_id": job_id})
    else:
        print(job_id)
