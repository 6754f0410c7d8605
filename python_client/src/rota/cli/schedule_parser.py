"""The words and options of ``rota schedule``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from . import schedules
from .schedule_import import import_file
from .schedule_next import next_runs
from .schedule_show import show

EPILOG = """\
examples:
  rota schedule next '0 2 * * MON-FRI' --tz Europe/Warsaw
  rota schedule add nightly '0 2 * * *' clean_up '{"days": 30}' --tz Europe/Warsaw
  rota schedule list
  rota schedule import jobs.cron --dry-run

A schedule has five fields (minute hour day month weekday), or six with the second in front; or
it is @hourly, @daily, @weekly, @monthly or @yearly; or 'every 90 seconds', counted from its
start; or 'after 10 minutes', counted from the end of its last run. Quote it for the shell.
"""
ADD = """\
examples:
  rota schedule add nightly '0 2 * * *' clean_up --tz Europe/Warsaw
  rota schedule add report '0 9 * * MON#1' send_report '{"to": "board"}' --catch-up all
  rota schedule add poll 'after 30 seconds' poll_inbox --queue mail
  rota schedule add cache 'every 10 minutes' warm_cache --overlap skip --jitter '30 seconds'

What is not given has its default, also if the schedule is there already. So each deployment may
say it again: what is so already stays as it is, and its next run too.
"""
NEXT = """\
examples:
  rota schedule next '30 2 * * *' --tz Europe/Warsaw -n 3 --after 2026-03-28
  rota schedule next 'every 90 seconds'
  rota schedule next --name nightly

A time that the clocks skip is run at the first instant after the gap; one that comes twice is
run the first time. Where minute or hour begin with a star, the wall clock is followed instead.
"""
IMPORT = """\
a file:
  # name=... is needed if two lines have one job type
  TZ=Europe/Warsaw
  0 2 * * *         clean_up
  0 9 * * MON-FRI   send_report  name=report catch_up=all {"to": "board"}
  every 10 minutes  warm_cache   overlap=skip jitter='30 seconds'  # another comment

A line is SCHEDULE JOB_TYPE, then if you like KEY=VALUE (the arguments of schedule_job), then a
JSON payload. TZ= and CRON_TZ= are for the lines below them. All lines are put in, or none;
schedules that are not in the file are left alone.
"""
Add = Callable[..., argparse.ArgumentParser]


def add_schedule_commands(commands: Any, add_command: Add) -> None:
    """Add ``schedule`` and its own commands."""
    what = "have jobs made again and again"
    schedule = commands.add_parser(
        "schedule", help=what, description="Have jobs made at times."
    )
    _teach(schedule, EPILOG)
    own = schedule.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_add(own, add_command)
    add_command(own, "list", schedules.list_all, "list schedules and when they run", json=True)
    what = "show a schedule, its next and its last runs"
    _named(add_command(own, "show", show, what, json=True))
    add = _named(add_command(own, "remove", schedules.remove, "forget a schedule"))
    add.add_argument("--yes", action="store_true", help="do not ask")
    for name, switch, what in (
        ("enable", schedules.enable, "let schedules make jobs again"),
        ("disable", schedules.disable, "let schedules make no more jobs"),
    ):
        add = add_command(own, name, switch, what)
        add.add_argument("names", nargs="*", metavar="name", help="of a schedule")
        add.add_argument("--all", action="store_true", help="all that are not so yet")
    what = "make a job of a schedule now and print its id"
    _named(add_command(own, "run", schedules.run, what, json=True))
    _add_next(own, add_command)
    add = add_command(own, "import", import_file, "put in the schedules of a file, or none")
    _teach(add, IMPORT)
    add.add_argument("file", help="lines as in a crontab; - is the standard input")
    add.add_argument("--dry-run", action="store_true", help="say what would be, change nothing")
    _add_zone(add, "zone of lines before the first TZ=")


def _add_add(own: Any, add_command: Add) -> None:
    add = _named(
        add_command(own, "add", schedules.add, "put in or change a schedule", json=True)
    )
    _teach(add, ADD)
    add.add_argument("schedule", help="such as '0 2 * * *' or 'every 10 minutes'")
    add.add_argument("job_type")
    add.add_argument("payload", nargs="?", default="{}", help="JSON (default: {})")
    _add_zone(add, "whose clock counts, such as Europe/Warsaw")
    add.add_argument("--queue")
    add.add_argument("--priority", type=int, help="lower runs first")
    add.add_argument("--max-attempts", type=int)
    add.add_argument("--lease", metavar="INTERVAL", help="such as '5 minutes'")
    what = "what becomes of times that were missed (default: one)"
    add.add_argument("--catch-up", choices=("skip", "one", "all"), help=what)
    what = "older ones are left out, such as '3 hours'"
    add.add_argument("--catch-up-window", metavar="INTERVAL", help=what)
    add.add_argument("--catch-up-max", type=int, metavar="N", help="at most so many at once")
    what = "while the last job is live (default: allow)"
    add.add_argument("--overlap", choices=("allow", "skip", "queue"), help=what)
    add.add_argument("--jitter", metavar="INTERVAL", help="start up to so much later")
    add.add_argument("--starts-at", metavar="TIME", help="no run before it; of --tz")
    add.add_argument("--ends-at", metavar="TIME", help="no run after it; of --tz")
    add.add_argument("--dry-run", action="store_true", help="say what would be, change nothing")


def _add_next(own: Any, add_command: Add) -> None:
    what = "explain a schedule, and list its next runs"
    add = add_command(own, "next", next_runs, what, json=True)
    _teach(add, NEXT)
    add.add_argument("schedule", nargs="?", help="a text, in quotes")
    add.add_argument("--name", help="a schedule that is there, instead of a text")
    _add_zone(add, "whose clock counts")
    add.add_argument("-n", dest="number", type=int, default=10, help="(default: %(default)s)")
    add.add_argument("--after", metavar="TIME", help="from when on (default: now); of --tz")


def _add_zone(add: argparse.ArgumentParser, what: str) -> None:
    add.add_argument("--tz", dest="time_zone", metavar="ZONE", help=f"{what} (default: UTC)")


def _named(add: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add.add_argument("name", help="of the schedule")
    return add


def _teach(parser: argparse.ArgumentParser, epilog: str) -> None:
    parser.epilog = epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
