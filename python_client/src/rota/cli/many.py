"""One command on many databases: on each by itself, and what fails on one is said of that one.

Jobs that are named by their ids are looked for in the database whose number they have, and
where that says nothing in all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ..client.connecting import connect, one_line
from ..client.sync_client import Client
from ..exceptions import RotaError
from .output import CommandError, print_json

FAILED = 1
Run = Callable[[argparse.Namespace], int]


def run_on_many(arguments: argparse.Namespace, databases: Sequence[str], run: Run) -> int:
    """Run a command on each of several databases; return 1 if it failed on any, or its code."""
    job_ids = _job_ids(arguments)
    chosen = _places_of(job_ids, databases) if job_ids else {each: [] for each in databases}
    codes: dict[str, int] = {}
    answers: list[dict[str, object]] = []
    as_json = getattr(arguments, "json", False)
    for database, its_ids in chosen.items():
        name = name_of(database)
        arguments.database_url = database
        if job_ids and hasattr(arguments, "job_ids"):
            arguments.job_ids = its_ids
        elif job_ids:
            arguments.job_id = its_ids[0]
        if as_json:
            with redirect_stdout(StringIO()) as written:
                codes[name] = run(arguments)
            answers.append(
                {
                    "database": name,
                    "exit_code": codes[name],
                    "answer": _read(written.getvalue()),
                }
            )
            continue
        print(f"== {name}")
        sys.stdout.flush()
        codes[name] = run(arguments)
    if as_json:
        print_json(answers)  # one document; what failed has no answer, and its error is above
    failed = [name for name, code in codes.items() if code]
    if failed and len(codes) > 1:
        told = f"{len(failed)} of {len(codes)} databases: {', '.join(failed)}"
        print(f"rota: exit status other than 0 on {told}", file=sys.stderr)
    return max(codes.values(), default=0)


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text or None


def name_of(database: str) -> str:
    """Return what tells a database from others, without a password."""
    words = conninfo_to_dict(database)
    place = ":".join(str(words[key]) for key in ("host", "port") if words.get(key))
    return f"{place}/{words.get('dbname', '')}" if place else str(words.get("dbname", ""))


def _job_ids(arguments: argparse.Namespace) -> list[int]:
    if (job_id := getattr(arguments, "job_id", None)) is not None:
        return [job_id]
    return list(getattr(arguments, "job_ids", None) or [])


def _places_of(job_ids: list[int], databases: Sequence[str]) -> dict[str, list[int]]:
    """Return in which databases these jobs are; an id in none, or in two, is an error."""
    found: dict[int, list[str]] = {job_id: [] for job_id in job_ids}
    others: dict[int, list[str]] = {job_id: [] for job_id in job_ids}
    silent: list[str] = []
    for database in databases:
        try:
            with connect(database, "rota") as connection:
                number = Client(connection).database_number()
                there = connection.execute(
                    "select id from rota.job_runs where id = any(%s)", (job_ids,)
                ).fetchall()
        except (psycopg.Error, RotaError) as error:
            silent.append(f"{name_of(database)} ({one_line(error)})")
            continue
        for (job_id,) in there:
            (found if job_id & 1023 == number else others)[job_id].append(database)
    places: dict[str, list[int]] = {}
    for job_id in job_ids:
        where = found[job_id] or others[job_id]
        if len(where) != 1:
            what = "is in none of the databases" if not where else "is in more than one of them"
            hint = f"Could not ask {', '.join(silent)}" if silent else None
            raise CommandError(f"job {job_id} {what}", hint)
        places.setdefault(where[0], []).append(job_id)
    return places
