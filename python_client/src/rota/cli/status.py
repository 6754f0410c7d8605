"""The commands that answer questions: status, explain, doctor, verify."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, LiteralString

import psycopg
from psycopg import Connection

from .._version import __version__
from ..client.connecting import one_line
from ..client.sync_client import Client
from ..rows import Finding
from .output import asking, connected, print_findings, print_json, print_list, short, span
from .top import MAX_ROWS, brief, count_age, share, worst_of

CRITICAL = 2
PARTS: dict[str, LiteralString] = {
    "queues": """
        select *, rota.now() - counted_at as counted_ago from rota.queue_stats order by queue
        """,
    "paused": """
        select pause_name, queue, job_type, set_by, paused_by, paused_at, reason, until
        from rota.pauses
        where until is null or until > rota.now()
        order by pause_name
        """,
    "due_jobs": """
        select
            j.queue, j.job_type, sum(j.jobs)::bigint as due,
            rota.now() - min(j.first_run_at) as oldest_waits,
            (
                select count(*)
                from rota.worker_health as w
                where w.is_live and j.queue = any (w.queues)
                  and (w.job_types is null or j.job_type = any (w.job_types))
            ) as workers_of_type
        from rota.job_counts() as j
        where j.status in ('queued', 'failed') and j.is_due
        group by j.queue, j.job_type
        order by min(j.first_run_at)
        limit 20
        """,
    "last_hour": """
        select s.*, extract(epoch from rota.now() - s.starts_at)::float / 60 as minutes
        from rota.job_stats(step => 'total') as s
        order by s.failures desc, s.attempts desc, s.queue, s.job_type
        limit 10
        """,
    "ticker": "select * from rota.ticker_health",
    "disabled_schedules": """
        select name, disabled_at, last_error
        from rota.job_definitions
        where not is_enabled and disabled_by is null
        order by name
        """,
    "workers": """
        select
            worker, host, pid, version, queues, job_types, started_at, last_seen_at,
            silent_for, not is_live as is_gone
        from rota.worker_health
        order by is_gone, worker
        """,
}

TITLES = {"disabled_schedules": "schedules disabled by an error"}


def status(arguments: argparse.Namespace) -> int:
    """Show on one screen how it stands; return 2 if the doctor finds something critical."""
    with asking(arguments) as connection:
        overview = {
            "database": connection.info.dbname,
            "version": Client(connection).version(),
            "client": __version__,
        }
        wrong, untold = _wrong(connection)
        parts = {name: _part(connection, query) for name, query in PARTS.items()}
    worst = wrong[0].severity if wrong else "ok"
    if arguments.json:
        verdict = {
            "verdict": None if untold else worst,
            "findings": None if untold else [asdict(row) for row in wrong],
        }
        print_json({**overview, **verdict, **parts})
    else:
        print("rota {version} in {database}, seen by client {client}".format(**overview))
        # What one act mends is told once.
        told = list({row.remedy or row.evidence: row for row in reversed(wrong)}.values())[::-1]
        print_findings(
            [(row.severity, row.evidence, row.remedy) for row in told[:3]]
            or [
                ("untold", untold, None) if untold else ("ok", "the doctor found nothing", None)
            ]
        )
        if len(told) > 3:
            print(f"and {len(told) - 3} more: rota doctor")
        for name, rows in parts.items():
            if rows is None:
                print(f"\n{TITLES.get(name, name.replace('_', ' '))}")
                print("(a session has locked a table that this reads)")
            elif rows:
                print(f"\n{TITLES.get(name, name.replace('_', ' '))}")
                print_list([SHOWN[name](row) for row in worst_of(rows)])
                if name == "queues" and (old := count_age(rows)):
                    print(f"{old}: the table of jobs is large")
                if len(rows) > MAX_ROWS:
                    print(f"the worst of {len(rows)}; all: rota status --json")
    return CRITICAL if worst == "critical" else 0


def _part(connection: Connection[Any], query: LiteralString) -> list[dict[str, Any]] | None:
    """Return the rows of one part, or None if a session has locked a table that it reads."""
    try:
        with connection.transaction():
            return connection.execute(query).fetchall()
    except psycopg.errors.LockNotAvailable:
        connection.execute("set local lock_timeout = '10ms'")  # it was waited for long enough
        return None


def _wrong(connection: Connection[Any]) -> tuple[list[Finding], str | None]:
    """Return what the doctor finds, or why it tells this role nothing."""
    try:
        with connection.transaction():
            found = Client(connection).doctor()
    except psycopg.errors.InsufficientPrivilege as error:
        # Who is confined to some queues sees these.
        return [], one_line(error)
    return [row for row in found if row.severity != "ok"], None


def _queue(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "queue": row["queue"],
        "ready": row["ready"],
        "oldest": span(row["oldest_ready_age"]) if row["oldest_ready_age"] else "",
        "later": row["scheduled"],
        "retrying": row["retrying"],
        "running": row["running"],
        "blocked": row["blocked"],
        "dead": row["dead"],
        "": "paused" if row["is_paused"] else "",
    }


def _paused(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": row["pause_name"],
        "since": short(row["paused_at"]),
        "until": short(row["until"]),
        "by": row["paused_by"] if row["set_by"] == "operator" else row["set_by"],
        "because": row["reason"],
    }


def _due(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "queue": row["queue"],
        "job_type": row["job_type"],
        "due": row["due"],
        "oldest waits": span(row["oldest_waits"]),
        "workers": row["workers_of_type"],
    }


def _last_hour(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "queue": row["queue"],
        "job_type": row["job_type"],
        "attempts": row["attempts"],
        "failed": share(row),
        "died": row["dead"],
        "wait p95": brief(row["wait_p95"]),
        "run p95": brief(row["run_p95"]),
    }


def _ticker(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "last tick": f"{span(row['lag']) or '0 s'} ago" if row["last_tick_at"] else "never",
        "by": row["last_tick_by"],
        "schedules overdue": row["schedules_overdue"],
        "broken": row["schedules_broken"],
    }


def _disabled(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "disabled_at": short(row["disabled_at"])}


def _worker(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "worker": row["worker"],
        "version": row["version"],
        "seen": f"{'gone, ' * row['is_gone']}{span(row['silent_for']) or '0 s'} ago",
        "queues": " ".join(row["queues"]),
        "job types": " ".join(row["job_types"] or ["all"]),
    }


SHOWN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "queues": _queue,
    "paused": _paused,
    "due_jobs": _due,
    "last_hour": _last_hour,
    "ticker": _ticker,
    "disabled_schedules": _disabled,
    "workers": _worker,
}


def explain(arguments: argparse.Namespace) -> None:
    """Say why a job does not run, or how it runs or ended; what decides comes first."""
    with asking(arguments) as connection:
        reasons = Client(connection).explain_job(arguments.job_id)
        job = None
        # A front passes the question on, and has no views.
        with suppress(psycopg.errors.UndefinedTable), connection.transaction():
            job = connection.execute(
                "select job_type, queue, status from rota.job_runs where id = %s",
                [arguments.job_id],
            ).fetchone()
    if arguments.json:
        print_json([asdict(reason) for reason in reasons])
        return
    told = ", {job_type} in queue {queue}, is {status}".format(**job) if job else ""
    print(f"job {arguments.job_id}{told}\n")
    print_findings([(row.reason, row.explanation, row.remedy) for row in reasons])


def doctor(arguments: argparse.Namespace) -> int:
    """Say what is wrong, the worst first; the exit code says how bad it is."""
    with connected(arguments) as connection:
        found = Client(connection).doctor()
    wrong = [row for row in found if row.severity != "ok"]
    worst = wrong[0].severity if wrong else "ok"
    if arguments.json and arguments.check:
        first = asdict(wrong[0]) if wrong else dict.fromkeys(("finding", "evidence", "remedy"))
        print_json({**first, "severity": worst, "wrong": len(wrong)})
    elif arguments.json:
        print_json([asdict(row) for row in found])
    elif arguments.check:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        said = f"{wrong[0].finding}: {wrong[0].evidence}" if wrong else "all is well"
        print(f"{worst.upper()} {said}{more}")
    else:
        shown = found if arguments.all else wrong
        # What mends several is told once.
        above = [None, *(row.remedy for row in shown)]
        print_findings(
            [
                (
                    f"{row.severity} {row.finding}",
                    row.evidence,
                    row.remedy if row.remedy != before else None,
                )
                for row, before in zip(shown, above, strict=False)
            ]
        )
        in_order = len({row.finding for row in found if row.severity == "ok"})
        if not arguments.all:
            print(f"{in_order} of {len({row.finding for row in found})} checks found nothing")
    return ("ok", "warning", "critical").index(worst)


def verify(arguments: argparse.Namespace) -> int:
    """Count the promises again; return 1 if one of them is broken."""
    with asking(arguments) as connection:
        verdicts = Client(connection).verify(arguments.max_rows)
    if arguments.json:
        print_json([asdict(row) for row in verdicts])
    else:
        print_findings(
            [
                (
                    "BROKEN" if row.violations else "kept",
                    f"{row.promise}: {row.violations} of {row.examined}"
                    + (f", such as: {row.example}" if row.example else ""),
                    None,
                )
                for row in verdicts
            ]
        )
    return int(any(row.violations for row in verdicts))
