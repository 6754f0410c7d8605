"""The command ``rota schedule import``: put in all schedules of a file, or none."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
from psycopg import Connection

from .._client import Client
from .._errors import RotaError
from ._crontab import BadLineError, Entry, read
from ._definitions import use_zone
from ._output import CommandError, connected, table_lines
from ._schedule_changes import Changes, lines, put


def import_file(arguments: argparse.Namespace) -> None:
    """Put in, or change, what each line of a file says."""
    source = "stdin" if arguments.file == "-" else arguments.file
    try:
        entries = read(_lines(arguments.file), arguments.time_zone or "UTC")
    except BadLineError as error:
        raise CommandError(f"{source}:{error.line}: {error}") from None
    with (
        connected(arguments) as connection,
        connection.transaction(force_rollback=arguments.dry_run),
    ):
        # By name, so that two imports at once wait for each other in one order.
        rows = {
            entry.name: _put(connection, entry, source)
            for entry in sorted(entries, key=lambda entry: entry.name)
        }
    head, *shown = table_lines([rows[entry.name][0] for entry in entries])
    print(head)
    for entry, line in zip(entries, shown, strict=True):
        print(line, *lines(rows[entry.name][1]), sep="\n    ")
    counts = Counter(row["outcome"] for row, _ in rows.values())
    said = ", ".join(f"{counts[o]} {o}" for o in ("created", "changed", "unchanged"))
    print(said + (" (dry run: nothing was done)" if arguments.dry_run else ""))


def _lines(file: str) -> list[str]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    return text.splitlines()


def _put(
    connection: Connection[Any], entry: Entry, source: str
) -> tuple[dict[str, Any], Changes]:
    client = Client(connection)
    said = entry.arguments
    try:
        use_zone(connection, said["time_zone"], said.get("starts_at"), said.get("ends_at"))
        change, _, changed = put(connection, said)
        words = client.describe_schedule(said["schedule"])
    except (RotaError, psycopg.DataError) as error:
        reason = error.diag.message_primary if isinstance(error, psycopg.Error) else error
        hint = error.hint if isinstance(error, RotaError) else None
        raise CommandError(f"{source}:{entry.line}: {reason}", hint) from None
    row = {
        "outcome": change.outcome,
        "name": entry.name,
        "schedule": said["schedule"],
        "time_zone": said["time_zone"],
        "meaning": words,
    }
    return row, changed
