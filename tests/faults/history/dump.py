"""Write down what the database holds: the rows that a checker compares with the calls.

All of it is read in one snapshot.  Each dump is a file of its own with a number; the last one
is what came of the history, and earlier ones show what changed after a job had ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from faults.history.recorder import both_clocks, plain
from support.waiting import comes_true

TABLES = (
    *("jobs", "finished_jobs", "job_errors", "effects", "occurrences", "queues", "job_stats"),
    *("stage_runs", "audit_log", "hourly_stats", "queue_stats", "receipts"),
    "moved_jobs",
)
HIDDEN = ("payload", "stage_input", "result", "stack", "message", "progress")
CODE = re.compile(r"\bRT\d{3}\b")
COLUMNS = """
select a.attname
from pg_attribute as a
where a.attrelid = to_regclass('rota.' || %s) and a.attnum > 0 and not a.attisdropped
"""
AT_WORK = """
select from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid()
  and backend_type = 'client backend' and (state = 'active' or backend_xid is not null)
"""
COMMENTS = """
select p.proname, obj_description(p.oid, 'pg_proc')
from pg_proc as p
where p.pronamespace = 'rota'::regnamespace and p.proname !~ '^_'
"""


def dump(url: str, folder: Path | str, *, is_drained: bool | None = None) -> Path:
    """Write the rows of now into a file of the folder.

    *is_drained* is none while the history goes on.  When it has ended, it says whether every
    job has had its time to end, so one that is live is lost.
    """
    path = next(
        path
        for number in count(1)
        if not (path := Path(folder, f"rows-{number:03}.ndjson")).exists()
    )
    part = path.with_suffix(".part")
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as db, part.open("w") as f:
        if is_drained is not None and _columns(db, "stats_progress"):
            _wait_for_the_last(db)
            _count_what_ended(db)
        number = int(path.stem.partition("-")[2])
        tables = [table for table in TABLES if _columns(db, table)]
        now = both_clocks()
        for line in _lines(db, tables):
            f.write(json.dumps(line, default=plain) + "\n")
        end = {"dump": number, "tables": tables, "is_drained": bool(is_drained), **now}
        f.write(json.dumps(end) + "\n")
    part.rename(path)
    return path


def _wait_for_the_last(db: psycopg.Connection[dict[str, Any]]) -> None:
    """Let the last statements of processes that were killed come to their end."""
    comes_true(lambda: not db.execute(AT_WORK).fetchone(), 10.0, every=0.05)


def _count_what_ended(db: psycopg.Connection[dict[str, Any]]) -> None:
    """Let be counted at once what a tick would count in ten seconds, or in a minute."""
    if _columns(db, "count_progress"):
        db.execute(
            "delete from rota.counted_jobs as c using rota.count_progress as p"
            " where c.round > p.round"
        )
        db.execute(
            "update rota.count_progress"
            " set counted_at = '-infinity', began_at = null, pages_done = 0"
        )
        db.execute("select rota._count_jobs(1000000)")
    db.execute("update rota.stats_progress set sampled_at = '-infinity'")
    while (row := db.execute("select has_more from rota.tick()").fetchone()) and row[
        "has_more"
    ]:
        pass


def _columns(db: psycopg.Connection[dict[str, Any]], table: str) -> list[str]:
    found = [row["attname"] for row in db.execute(COLUMNS, (table,)).fetchall()]
    return [name for name in found if not name.startswith(HIDDEN) and name != "job"]


def _lines(
    db: psycopg.Connection[dict[str, Any]], tables: list[str]
) -> Iterator[dict[str, Any]]:
    db.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with db.transaction():
        db.execute(
            "set local jit = off; set local time zone 'UTC';"
            " set local DateStyle = ISO; set local IntervalStyle = postgres"
        )
        for function, comment in _comments(db):
            yield {"function": function, "documented": CODE.findall(comment or "")}
        for table in tables:
            with db.cursor(f"dump_{table}") as cursor:
                names = ", ".join(f'"{name}"' for name in _columns(db, table))
                cursor.itersize = 5000
                cursor.execute(f"select {names} from rota.{table}".encode())
                for row in cursor:
                    told = {k: v for k, v in row.items() if v is not None}
                    yield {"table": table, "row": told}


def _comments(db: psycopg.Connection[dict[str, Any]]) -> list[tuple[str, str | None]]:
    rows = db.execute(COMMENTS).fetchall()
    return [(row["proname"], row["obj_description"]) for row in rows]
