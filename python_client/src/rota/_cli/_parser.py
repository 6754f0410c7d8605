"""The words and options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .._version import __version__
from . import _jobs, _schema, _worker

DESCRIPTION = "Background jobs in the Postgres you already have."
EPILOG = """\
examples:
  rota install -d postgresql://localhost/shop
  rota enqueue send_mail '{"user_id": 7}' --delay '10 minutes'
  rota worker shop.jobs:registry --queue default --concurrency 8
  rota jobs --status dead

The database is that of -d, else of DATABASE_URL, else what libpq finds (PGHOST, PGSERVICE, …).
exit codes: 0 done, 1 failed, 2 used wrongly
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; what it parses has the function to call as *run*."""
    parser = argparse.ArgumentParser(
        prog="rota",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rota {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_schema_commands(commands)
    _add_job_commands(commands)
    _add_worker(commands)
    _add(commands, "demo", lambda _: 0, "see jobs run, fail, retry and survive a crash")
    return parser


def _add(
    commands: Any, name: str, run: Callable[..., Any], what: str, *, json: bool = False
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}."
    )
    parser.set_defaults(run=run)
    parser.add_argument("-d", "--database-url", metavar="URL", help="which database")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_schema_commands(commands: Any) -> None:
    add = _add(commands, "install", _schema.install, "install rota, or bring it up to date")
    add.add_argument("--dry-run", action="store_true", help="print the SQL, change nothing")
    add.add_argument("--with-roles", action="store_true", help="create the four roles")
    add.add_argument("--with-cron", action="store_true", help="let pg_cron call tick()")
    add = _add(commands, "uninstall", _schema.uninstall, "remove rota and all its jobs")
    add.add_argument("--yes", action="store_true", help="do not ask")
    _add(commands, "status", _schema.status, "show version, queues and workers", json=True)
    _add(commands, "tick", _schema.tick, "do the upkeep that is due", json=True)


def _add_job_commands(commands: Any) -> None:
    add = _add(commands, "enqueue", _jobs.enqueue, "add a job and print its id", json=True)
    add.add_argument("job_type")
    add.add_argument("payload", nargs="?", default="{}", help="JSON (default: {})")
    add.add_argument("--queue")
    add.add_argument("--run-at", metavar="TIME", help="such as '2026-03-01 02:00 Europe/Paris'")
    add.add_argument("--delay", metavar="INTERVAL", help="such as '10 minutes'")
    add.add_argument("--priority", type=int, help="lower runs first")
    add.add_argument("--max-attempts", type=int)
    add.add_argument("--lease", metavar="INTERVAL", help="such as '5 minutes'")
    add.add_argument("--key", dest="idempotency_key", help="idempotency key")
    add = _add(commands, "jobs", _jobs.jobs, "list jobs, the newest first", json=True)
    add.add_argument("--queue")
    add.add_argument("--status")
    add.add_argument("--type", dest="job_type")
    add.add_argument("--limit", type=int, default=50)
    add = _add(commands, "job", _jobs.job, "show one job and its errors", json=True)
    add.add_argument("job_id", type=int)
    add = _add(commands, "retry", _jobs.retry, "run a job again now", json=True)
    add.add_argument("job_id", type=int)
    add.add_argument("--force", action="store_true", help="also when it is running")
    add = _add(commands, "cancel", _jobs.cancel, "cancel a job", json=True)
    add.add_argument("job_id", type=int)
    add.add_argument("--reason")


def _add_worker(commands: Any) -> None:
    add = _add(commands, "worker", _worker.work, "run jobs until SIGTERM or Ctrl-C")
    add.add_argument("registry", help="module:name of a rota.Registry")
    add.add_argument("--queue", action="append", help="may be repeated (default: default)")
    add.add_argument("--concurrency", type=int, default=4, help="jobs at a time (default: 4)")
    add.add_argument("--batch", type=int, default=1, help="claim up to so many at once")
    add.add_argument("--lease", type=float, metavar="SECONDS", help="for jobs without one")
    add.add_argument("--name", help="default: host:pid:random")
    add.add_argument("--poll-interval", type=float, default=1.0, metavar="SECONDS")
    add.add_argument("--tick-interval", type=float, default=1.0, metavar="SECONDS")
    add.add_argument(
        "--grace-period", type=float, default=30.0, metavar="SECONDS",
        help="what running jobs get after SIGTERM (default: 30); a second signal ends it",
    )  # fmt: skip
    how = add.add_mutually_exclusive_group()
    how.add_argument("--drain", action="store_true", help="leave when nothing is due")
    how.add_argument("--once", action="store_true", help="leave after one claim")
    add.add_argument("--log-format", choices=("text", "json"), default="text")
    levels = ("debug", "info", "warning", "error")
    add.add_argument("--log-level", choices=levels, default="info")
