"""The command ``rota effects``: what may have happened outside of the database, or not."""

from __future__ import annotations

import argparse
import json

from ..client.statement import UNSET
from ..client.sync_client import Client
from .output import (
    LOCK_TIMEOUT,
    UsageError,
    asking,
    committing,
    connected,
    print_json,
    print_table,
)

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
        try:
            result = json.loads(arguments.result)
        except ValueError as error:
            raise UsageError(f"the result is not JSON: {error}") from None
    with (
        connected(arguments) as connection,
        committing(connection, is_dry_run=arguments.dry_run),
    ):
        connection.execute(LOCK_TIMEOUT)
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
