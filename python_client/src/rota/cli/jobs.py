"""Commands about jobs: enqueue, jobs, job, explain, errors, effects."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import datetime
from typing import Any, LiteralString

import psycopg
from psycopg import Connection, sql

from ..client.conditions import FEW, NEWEST, all_of
from ..client.statement import UNSET
from ..client.sync_client import Client
from ..exceptions import JobNotFoundError
from .filters import chosen_filter, parse_json
from .output import (
    CommandError,
    UsageError,
    acting,
    asking,
    committing,
    connected,
    print_findings,
    print_json,
    print_list,
    print_record,
    print_table,
    short,
)

ENQUEUE_OPTIONS = (
    "queue", "run_at", "delay", "priority", "max_attempts", "lease", "idempotency_key",
    "unique_for", "ordering_key", "limit_key", "time_limit", "expires_after",
)  # fmt: skip


def enqueue(arguments: argparse.Namespace) -> None:
    """Add one job and print its id."""
    payload = parse_json(arguments.payload)
    job: dict[str, Any] = {"job_type": arguments.job_type, "payload": payload}
    options = {name: getattr(arguments, name) for name in ENQUEUE_OPTIONS}
    job |= {name: value for name, value in options.items() if value is not None}
    with connected(arguments) as connection, acting(connection) as client:
        row = client.enqueue(**job)
    if arguments.json:
        print_json({"job_id": row.job_id, "is_new": row.is_new})
    else:
        print(row.job_id if row.is_new else f"{row.job_id} (already exists)")


LISTED: LiteralString = """
    select
        id, queue, job_type, status, attempts, max_attempts, run_at, created_at, finished_at,
        locked_by, error_type, last_error
    from rota.job_runs
    where {}
    order by {}
    limit %(limit)s
    """
PATIENCE: LiteralString = "set local statement_timeout = '10s'"
"""A rare job among millions is looked for, but not while a database has other work."""


def jobs(arguments: argparse.Namespace) -> None:
    """List jobs, the newest first."""
    chosen = chosen_filter(arguments)
    if arguments.before is not None:
        chosen["before"] = arguments.before
    values = {
        name: [json.dumps(value, ensure_ascii=False)]
        if name in ("payload", "headers")
        else value
        for name, value in chosen.items()
    }
    with asking(arguments) as connection:
        connection.execute(PATIENCE)
        try:
            few = connection.execute(FEW, values).fetchone() if "queue" in chosen else None
            order = sql.SQL(NEWEST[bool(few and few["are_few"])])
            rows = connection.execute(
                sql.SQL(LISTED).format(all_of(chosen), order),
                {**values, "limit": arguments.limit},
            ).fetchall()
        except psycopg.errors.QueryCanceled:
            raise CommandError(
                "searched for 10 seconds and did not find enough",
                "Narrow the search with --limit, --before ID, or --queue",
            ) from None
    if arguments.json:
        print_json(rows)
        return
    print_list([_shown(row) for row in rows])
    if len(rows) == arguments.limit:
        print(f"for more: --before {rows[-1]['id']}")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    error = ": ".join(filter(None, (row["error_type"], row["last_error"])))
    return {
        "id": row["id"],
        "status": row["status"],
        "queue": row["queue"],
        "job_type": row["job_type"],
        "tries": f"{row['attempts']}/{row['max_attempts']}",
        "when": short(row["finished_at"] or row["run_at"]),
        "error": error if row["status"] != "succeeded" else "",
    }


STORY: dict[str, LiteralString] = {
    "errors": """
        select attempt, started_at, failed_at, worker, error_type, message, stack
        from {views}.job_errors where job_id = %s order by lease_token
        """,
    "depends_on": """
        select d.parent_id as job_id, r.job_type, r.queue, r.status
        from {views}.dependencies as d left join {views}.job_runs as r on r.id = d.parent_id
        where d.job_id = %s order by d.parent_id limit 100
        """,
    "dependants": """
        select d.job_id, r.job_type, r.queue, r.status
        from {views}.dependencies as d left join {views}.job_runs as r on r.id = d.job_id
        where d.parent_id = %s order by d.job_id limit 100
        """,
    "stages": """
        select stage, status, attempts, worker, queued_at, started_at, finished_at
        from {views}.stage_runs where job_id = %s order by lease_token
        """,
}
"""What else there is to know of a job: those that it waits for have not succeeded."""


def job(arguments: argparse.Namespace) -> None:
    """Show a job: its state, its history and all its details."""
    job_id = arguments.job_id
    with asking(arguments) as connection:
        reasons = Client(connection).explain_job(job_id)
        views = _views(connection, job_id)
        whole = sql.SQL("select * from {views}.job_runs where id = %s").format(views=views)
        row = connection.execute(whole, [job_id]).fetchone()
        story = {
            name: connection.execute(sql.SQL(query).format(views=views), [job_id]).fetchall()
            for name, query in STORY.items()
        }
    if row is None:
        raise JobNotFoundError(f"job {job_id} not found")
    if arguments.json:
        print_json({**row, **story, "reasons": [asdict(reason) for reason in reasons]})
        return
    print(f"job {job_id}, {row['job_type']} in queue {row['queue']}, is {row['status']}\n")
    print_findings(
        [(r.reason, r.explanation, r.remedy) for r in reasons if r.reason != "attempt"]
    )
    print("\nhistory")
    for moment, what in _happened(row, story["errors"], story["stages"]):
        print(f"{moment.isoformat(sep=' ', timespec='seconds')}  {' '.join(what.split())}")
    for name in ("depends_on", "dependants"):
        if story[name]:
            print(f"\n{name.replace('_', ' ')}")
            print_list(story[name])
    print("\ndetails")
    print_record({name: value for name, value in row.items() if value is not None})
    if story["errors"] and story["errors"][-1]["stack"]:
        print("")
        for line in story["errors"][-1]["stack"].splitlines():
            print(f"  {line}")


def _views(connection: Connection[Any], job_id: int) -> sql.Identifier:
    """Return the schema with the views of a job's database, which may be behind a front."""
    (found,) = connection.execute(
        "select case when to_regclass('rota.job_runs') is not null then 'rota'"
        " else format('rota_%%s', rota.database_number_of(%s)) end as views",
        [job_id],
    ).fetchall()
    return sql.Identifier(found["views"])


def _happened(
    row: dict[str, Any], errors: list[dict[str, Any]], stages: list[dict[str, Any]]
) -> list[tuple[datetime, str]]:
    found = [(row["created_at"], "enqueued")]
    for error in errors:
        what = ": ".join(filter(None, (error["error_type"], error["message"])))
        line = " ".join(what.split())
        found += [
            (error["started_at"], f"attempt {error['attempt']} began on {error['worker']}"),
            (error["failed_at"], f"attempt {error['attempt']} failed: {line}"),
        ]
    found += [(run["finished_at"], f"stage {run['stage']} {run['status']}") for run in stages]
    if row["started_at"] and row["started_at"] not in [e["started_at"] for e in errors]:
        found.append((row["started_at"], f"attempt {row['attempts']} began"))
    if row["cancel_requested_at"]:
        found.append((row["cancel_requested_at"], "cancel requested"))
    if row["finished_at"]:
        found.append((row["finished_at"], row["status"]))
    return sorted(found, key=lambda entry: entry[0])


def explain(arguments: argparse.Namespace) -> None:
    """Say why a job does not run, or how it runs or ended; what decides comes first."""
    with asking(arguments) as connection:
        reasons = Client(connection).explain_job(arguments.job_id)
        whole = sql.SQL("select job_type, queue, status from {views}.job_runs where id = %s")
        views = _views(connection, arguments.job_id)
        job = connection.execute(whole.format(views=views), [arguments.job_id]).fetchone()
    if arguments.json:
        print_json([asdict(reason) for reason in reasons])
        return
    told = ", {job_type} in queue {queue}, is {status}".format(**job) if job else ""
    print(f"job {arguments.job_id}{told}\n")
    print_findings([(row.reason, row.explanation, row.remedy) for row in reasons])


GROUPS: LiteralString = """
    select
        count(*) as failures, count(distinct e.job_id) as jobs,
        max(e.failed_at) as last_failed_at,
        min(e.failed_at) as first_failed_at, max(e.job_id) as last_job_id, e.queue, e.job_type,
        e.error_type, e.message,
        left((array_agg(e.text order by e.job_id desc))[1], 200) as last_message
    from (
        select n.*, rota.fold_error(n.text) as message
        from (
            select job_id, queue, job_type, error_type, failed_at, left(message, 1000) as text
            from rota.job_errors
            where failed_at > rota.now() - %(since)s::interval
              and (%(queue)s::text is null or queue = %(queue)s)
              and (%(job_type)s::text is null or job_type = %(job_type)s)
            order by failed_at desc limit %(max_rows)s
        ) as n
    ) as e
    group by e.queue, e.job_type, e.error_type, e.message
    order by failures desc, last_failed_at desc
    limit %(limit)s
    """
MAX_ERRORS = 20000
QUOTE = "'...'"


def errors(arguments: argparse.Namespace) -> None:
    """List the errors of failed attempts, those of one kind in one line, the most first."""
    values = {
        name: getattr(arguments, name) for name in ("since", "queue", "job_type", "limit")
    }
    with asking(arguments) as connection:
        rows = connection.execute(GROUPS, {**values, "max_rows": MAX_ERRORS}).fetchall()
    if arguments.json:
        print_json(rows)
        return
    print_findings(
        [
            (
                f"{row['failures']} x",
                f"{': '.join(filter(None, (row['error_type'], row['message'])))}"
                f" ({row['job_type']} in queue {row['queue']}, {row['jobs']}"
                f" job{'s' * (row['jobs'] != 1)}, last"
                f" {short(row['last_failed_at'])}, such as job {row['last_job_id']}"
                # Folded, a KeyError does not even tell the key.
                f"{': ' + row['last_message'] if QUOTE in row['message'] else ''})",
                None,
            )
            for row in rows
        ]
    )
    if not rows:
        print("(none)")
    if sum(row["failures"] for row in rows) >= MAX_ERRORS:
        print(f"of the newest {MAX_ERRORS} failures")


UNKNOWN = "select * from rota.unknown_effects order by recorded_at desc limit %s"


def effects(arguments: argparse.Namespace) -> None:
    """List the effects that may or may not have happened, the newest first."""
    with asking(arguments) as connection:
        rows = connection.execute(UNKNOWN, [arguments.limit]).fetchall()
    if arguments.json:
        print_json(rows)
        return
    print_table(rows)
    if rows:
        print("\n(once you know: rota effects settle SCOPE KEY --done, or --again)")


def settle(arguments: argparse.Namespace) -> None:
    """Say what became of one of them."""
    scope, key, result = arguments.scope, arguments.key, UNSET
    if arguments.result is not None:
        if arguments.outcome == "again":
            raise UsageError("--result goes with --done")
        result = parse_json(arguments.result, "result")
    with (
        connected(arguments) as connection,
        committing(connection, is_dry_run=arguments.dry_run),
    ):
        job_id = Client(connection).settle_effect(scope, key, arguments.outcome, result)
        found = connection.execute(
            "select job_type, status from rota.job_runs where id = %s", [job_id]
        ).fetchone()
    job = found or {"job_type": None, "status": None}
    if arguments.json:
        said = {"scope": scope, "key": key, "outcome": arguments.outcome, "job_id": job_id}
        print_json(said | job | {"is_dry_run": arguments.dry_run})
        return
    is_done = arguments.outcome == "done"
    print(f"effect {scope} {key} is {'done' if is_done else 'due again'}")
    if not is_done and job["status"] in ("succeeded", "dead", "cancelled"):
        print(f"(job {job_id} has ended, {job['status']}; to run it: rota retry {job_id})")
    if arguments.dry_run:
        print("(dry run: nothing was done)")
