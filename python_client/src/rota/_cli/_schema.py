"""Commands about the whole: install, uninstall, status, tick."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from .._client import Client
from .._install import run_script, script_text
from .._version import __version__
from ._output import UsageError, connected, print_json, print_record, print_table


def install(arguments: argparse.Namespace) -> None:
    """Install, or bring up to date."""
    options = {"with_roles": arguments.with_roles, "with_cron": arguments.with_cron}
    with connected(arguments) as connection:
        if arguments.dry_run:
            print(script_text(connection, "install.sql", options), end="")
            return
        run_script(connection, "install.sql", options)
        print(f"rota {Client(connection).version()} is installed in {connection.info.dbname}")


def uninstall(arguments: argparse.Namespace) -> int:
    """Remove the schema with everything in it, after a question."""
    with connected(arguments) as connection:
        database = connection.info.dbname
        if not arguments.yes:
            if not sys.stdin.isatty():
                raise UsageError("uninstall deletes all jobs: confirm it with --yes")
            answer = input(f"Delete rota and all its jobs from {database}? [y/N] ")
            if answer.strip().lower() not in ("y", "yes"):
                print("nothing was done")
                return 1
        run_script(connection, "uninstall.sql", {})
        print(f"rota is gone from {database}")
    return 0


def status(arguments: argparse.Namespace) -> None:
    """Show version, queues, upkeep and workers."""
    with connected(arguments) as connection:
        overview = {
            "database": connection.info.dbname,
            "version": Client(connection).version(),
            "client": __version__,
        }
        queues = connection.execute("select * from rota.queue_stats order by queue").fetchall()
        upkeep = connection.execute(
            "select task, nullif(done_at, '-infinity') as done_at from rota.upkeep"
        ).fetchall()
        workers = connection.execute(
            "select worker, host, pid, version, queues, started_at, last_seen_at,"
            " rota.now() - last_seen_at as silent_for from rota.workers order by worker"
        ).fetchall()
    if arguments.json:
        print_json({**overview, "queues": queues, "upkeep": upkeep, "workers": workers})
        return
    print_record(overview)
    for title, rows in (("queues", queues), ("upkeep", upkeep), ("workers", workers)):
        print(f"\n{title}")
        print_table(rows)


def tick(arguments: argparse.Namespace) -> None:
    """Do the upkeep that is due."""
    with connected(arguments) as connection:
        report = dataclasses.asdict(Client(connection).tick())
    (print_json if arguments.json else print_record)(report)
