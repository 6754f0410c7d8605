"""The words and options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .._version import __version__
from . import jobs, queues, schema, status, tick, worker
from .schedule_parser import add_schedule_commands

DESCRIPTION = "Background jobs in the Postgres you already have."
STATUSES = ("blocked", "queued", "running", "failed", "succeeded", "dead", "cancelled")
EPILOG = """\
examples:
  rota install -d postgresql://localhost/shop
  rota enqueue send_mail '{"user_id": 7}' --delay '10 minutes'
  rota worker shop.jobs:registry --queue default --concurrency 8
  rota jobs --status dead
  rota schedule add cleanup '0 2 * * *' clean_up --tz Europe/Warsaw

The database is that of -d, a URL or a name, else that of DATABASE_URL, else what libpq finds
(PGHOST, PGSERVICE, …).
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
    _add_queue_commands(commands)
    add_schedule_commands(commands, _add)
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
    parser.add_argument(
        "-d", "--database-url", metavar="URL", help="which database, by URL or name"
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_schema_commands(commands: Any) -> None:
    add = _add(commands, "install", schema.install, "install rota, or bring it up to date")
    add.add_argument("--dry-run", action="store_true", help="print the SQL, change nothing")
    add.add_argument("--with-roles", action="store_true", help="create the four roles")
    add.add_argument("--with-cron", action="store_true", help="let pg_cron tick")
    add = _add(commands, "uninstall", schema.uninstall, "remove rota and all its jobs")
    add.add_argument("--yes", action="store_true", help="do not ask")
    _add(commands, "status", status.status, "show queues, due jobs and workers", json=True)
    add = _add(commands, "tick", tick.tick, "do the maintenance that is due", json=True)
    add.add_argument("--loop", action="store_true", help="again, until SIGTERM or Ctrl-C")
    what = "seconds between two ticks of --loop (default: %(default)s)"
    add.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help=what)


def _add_job_commands(commands: Any) -> None:
    add = _add(commands, "enqueue", jobs.enqueue, "add a job and print its id", json=True)
    add.add_argument("job_type")
    add.add_argument("payload", nargs="?", default="{}", help="JSON (default: {})")
    add.add_argument("--queue")
    add.add_argument("--run-at", metavar="TIME", help="such as '2026-03-01 02:00 Europe/Paris'")
    add.add_argument("--delay", metavar="INTERVAL", help="such as '10 minutes'")
    add.add_argument("--priority", type=int, help="lower runs first")
    add.add_argument("--max-attempts", type=int)
    add.add_argument("--lease", metavar="INTERVAL", help="such as '5 minutes'")
    add.add_argument("--key", dest="idempotency_key", help="idempotency key")
    add = _add(commands, "jobs", jobs.jobs, "list jobs, the newest first", json=True)
    add.add_argument("--queue")
    add.add_argument("--status", choices=STATUSES)
    add.add_argument("--type", dest="job_type")
    add.add_argument("--schedule", metavar="NAME", help="that has made them")
    add.add_argument("--limit", type=int, default=50, help="(default: %(default)s)")
    add = _add(commands, "job", jobs.job, "show one job and its errors", json=True)
    add.add_argument("job_id", type=int)
    add = _add(commands, "retry", jobs.retry, "run a job again now", json=True)
    add.add_argument("job_id", type=int)
    add.add_argument("--force", action="store_true", help="also when it is running")
    add = _add(commands, "cancel", jobs.cancel, "cancel a job", json=True)
    add.add_argument("job_id", type=int)
    add.add_argument("--reason")


def _add_queue_commands(commands: Any) -> None:
    what = "let no more jobs of a queue be claimed"
    add = _add(commands, "pause", queues.pause, what, json=True)
    add.add_argument("queue")
    add.add_argument("--reason", help="shown by rota status")
    what = "let the jobs of a queue be claimed again"
    add = _add(commands, "resume", queues.resume, what, json=True)
    add.add_argument("queue")


def _add_worker(commands: Any) -> None:
    add = _add(commands, "worker", worker.work, "run jobs until SIGTERM or Ctrl-C")

    def number(kind: type, name: str, default: float | None, what: str) -> None:
        what += " (default: %(default)s)" if default is not None else ""
        add.add_argument(name, type=kind, default=default, metavar="N", help=what)

    add.add_argument("registry", help="module:name of a rota.Registry")
    add.add_argument("--queue", action="append", help="may be repeated (default: default)")
    number(int, "--concurrency", 4, "jobs at a time")
    number(int, "--batch", None, "hold so many jobs (default: what starts in 0.2 seconds)")
    add.add_argument("--lease", type=float, metavar="SECONDS", help="for jobs without one")
    add.add_argument("--name", help="(default: host:pid:random)")
    number(float, "--poll-interval", 1.0, "seconds between two claims while nothing is due")
    add.add_argument("--no-listen", action="store_true", help="poll only: let no job wake it")
    add.add_argument("--no-tick", action="store_true", help="leave the maintenance to others")
    number(float, "--tick-interval", 1.0, "seconds between two calls of tick()")
    number(float, "--grace-period", 30.0, "seconds that running jobs get after SIGTERM")
    how = add.add_mutually_exclusive_group()
    how.add_argument("--drain", action="store_true", help="leave when nothing is due")
    how.add_argument("--once", action="store_true", help="leave after one claim")
    default = "(default: %(default)s)"
    formats = ("text", "json")
    add.add_argument("--log-format", choices=formats, default="text", help=default)
    levels = ("debug", "info", "warning", "error")
    add.add_argument("--log-level", choices=levels, default="info", help=default)
