"""The command ``rota schedule import``: put in all schedules of a file, or none."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
from psycopg import Connection

from ..client.sync_client import Client
from ..exceptions import RotaError
from .crontab import Crontab, Entry, read
from .definitions import use_zone
from .output import CommandError, connected, reason_of, table_lines
from .schedule_changes import Changes, lines, put

Row = tuple[dict[str, Any], Changes]


def import_file(arguments: argparse.Namespace) -> None:
    """Put in, or change, what each line of a file says."""
    crontab = read(_lines(arguments.file), arguments.time_zone or "UTC")
    entries = crontab.entries
    with (
        connected(arguments) as connection,
        connection.transaction(force_rollback=arguments.dry_run),
    ):
        rows = _put_all(connection, crontab)
        if crontab.problems:
            raise _refusal(
                "stdin" if arguments.file == "-" else arguments.file, crontab.problems
            )
    head, *shown = table_lines([rows[entry.name][0] for entry in entries])
    print(head)
    for entry, line in zip(entries, shown, strict=True):
        print(line, *lines(rows[entry.name][1]), sep="\n    ")
    counts = Counter(row["outcome"] for row, _ in rows.values())
    said = ", ".join(f"{counts[o]} {o}" for o in ("created", "changed", "unchanged"))
    print(said + (" (dry run: nothing was done)" if arguments.dry_run else ""))


def _lines(file: str) -> list[str]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"cannot read {file}: it is not text in UTF-8") from None
    return text.splitlines()


def _put_all(connection: Connection[Any], crontab: Crontab) -> dict[str, Row]:
    """Put in what can be; what cannot becomes a problem of its line."""
    problems = crontab.problems
    bad_zones = set()
    for line, zone in crontab.zones:
        try:
            with connection.transaction():
                connection.execute("select rota.next_run('@daily', %s)", [zone])
        except (RotaError, psycopg.DataError) as error:
            problems[line] = reason_of(error)
            bad_zones.add(zone)

    rows = {}
    # By name, so that two imports at once wait for each other in one order.
    for entry in sorted(crontab.entries, key=lambda entry: entry.name):
        if entry.arguments["time_zone"] in bad_zones:
            # Its own line has told of the zone; here the rest is of interest.
            entry.arguments["time_zone"] = "UTC"
        try:
            with connection.transaction():
                rows[entry.name] = _put(connection, entry)
        except (RotaError, psycopg.DataError) as error:
            hint = error.hint if isinstance(error, RotaError) else None
            problems[entry.line] = reason_of(error) + (f" ({hint})" if hint else "")
    return rows


def _put(connection: Connection[Any], entry: Entry) -> Row:
    said = entry.arguments
    use_zone(connection, said["time_zone"], said.get("starts_at"), said.get("ends_at"))
    change, _, changed = put(connection, said)
    row = {
        "outcome": change.outcome,
        "name": entry.name,
        "schedule": said["schedule"],
        "time_zone": said["time_zone"],
        "meaning": Client(connection).describe_schedule(said["schedule"]),
    }
    return row, changed


def _refusal(source: str, problems: dict[int, str]) -> CommandError:
    """Print the problems by line, but for one alone, and return what ends the command."""
    told = [
        f"{source}:{line}: {problem}" if line else f"--tz: {problem}"
        for line, problem in sorted(problems.items())
    ]
    if len(told) == 1:
        return CommandError(told[0])
    for text in told:
        print(f"rota: {text}", file=sys.stderr)
    return CommandError(f"{len(told)} lines are wrong: no schedule is put in")
