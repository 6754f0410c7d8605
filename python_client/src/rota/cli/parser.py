"""The words and options of the command line."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from typing import Any, NoReturn

from .._version import __version__
from . import (
    front,
    jobs,
    maintenance,
    many,
    moves,
    queues,
    schedules,
    status,
    web,
    worker,
)
from .jobs import add_filter
from .output import CommandError, UsageError, command_terminal

DESCRIPTION = "Background jobs in the Postgres you already have."
MAX_INTEGER = 2**31 - 1
MAX_ID = 2**63 - 1
FOR_MANY = {
    *("status", "doctor", "verify", "explain", "job", "jobs", "errors", "limits", "tick"),
    *("audit", "effects", "top", "list", "show", "next", *many.ACTS),
}
"""Commands that take several databases, and are run on each."""
OWN_MANY = {"worker", "forward", "web", "make", "queue move"}
"""Commands that take several databases themselves."""
DOCTOR = "Exit code: 0 all is well, 1 warnings, 2 critical, 3 could not query the database."
VERIFY = "Exit code: 0 all are kept, 1 one is broken, 3 could not query the database."
STATUS = "Exit code: 0, 2 if the doctor finds something critical, 1 if the query failed."
COULD_NOT_ASK = 3
EPILOG = """\
examples:
  rota install -d postgresql://localhost/shop
  rota enqueue send_mail '{"user_id": 7}' --delay '10 minutes'
  rota worker shop.jobs:registry --queue default --concurrency 8
  rota jobs --status dead
  rota schedule add cleanup '0 2 * * *' clean_up --tz Europe/Warsaw

Name the database with -d (a URL or a name) or DATABASE_URL; otherwise libpq
finds it (PGHOST, PGSERVICE, …).

exit codes: 0 done, 1 failed, 2 wrong usage, 3 a worker left handlers that did
not end, or doctor or verify could not query the database
"""

PAUSE = """\
examples:
  rota pause mail --reason 'the mail server moves' --for '2 hours'
  rota pause --type charge_card --reason 'the bank is down'
  rota pause --all --reason 'restored from production' --yes

The command counts the waiting jobs, and asks. Without a terminal it
pauses a given queue or type without asking; --all then needs --yes.
"""
ACTS = """\
Give job ids, or a filter; a job has to meet all its conditions. The command
first counts the jobs, and asks; then it changes them in short steps, and you
may stop it and run it again. It reports a job that it cannot change, and
continues with the others.

examples:
{more}
  rota {name} --queue mail --older-than '2 hours' --dry-run

exit codes: 0 done, 1 failed, or not all jobs changed, 2 wrong usage
"""
EXAMPLES = {
    "retry": """\
  rota retry 4711 4712
  rota retry --type charge_card --error 'card 7 declined' --set currency=EUR
  rota retry --status cancelled --newer-than '1 hour' --keep-run-at --dry-run""",
    "cancel": "  rota cancel --type send_mail --payload '{\"user_id\": 7}' --reason 'gone'",
    "discard": "  rota discard --type send_mail --error 'mailbox full'",
    "reschedule": "  rota reschedule --queue reports --delay '1 hour'",
    "set_priority": "  rota priority --to -10 --payload '{\"shop\": 7}'",
    "move": "  rota move --to slow --type make_report",
    "purge": "  rota purge --queue mail --status dead --older-than '30 days'",
    "erase": '  rota erase --payload \'{"customer": {"id": 7}}\'',
}
COMPLETION = """\
examples:
  rota completion bash > ~/.local/share/bash-completion/completions/rota
  rota completion zsh > /usr/local/share/zsh/site-functions/_rota
"""
WORKER = """\
examples:
  rota worker shop.jobs:registry --queue default --concurrency 8
  rota worker shop.jobs:registry --queue default --queue mail=2 --health 8080
  rota worker shop.jobs:registry --drain          # for cron

It imports the module from the current directory. After SIGTERM it claims no
more and waits for running jobs; after a second one it does not wait.

exit codes: 0 orderly exit, 1 failed, 2 wrong usage, 3 a handler did not end
"""
WEB = """\
Without --passwords or --trusted-header the page answers only this machine.

examples:
  rota web -d shop
  rota web -d shop --passwords users --add-user ann --allow-acts
  rota web -d shop --passwords users --host 0.0.0.0 --allow-acts
  rota web --database shop --database billing
"""
AT_MOST = "at most this many (default: %(default)s)"


def whole(least: int = 1, most: int = MAX_INTEGER) -> Callable[[str], int]:
    """Return what reads a whole number of these."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}, got {text}")
        return number

    return read


def seconds(text: str) -> float:
    """Return a time to wait, from a millisecond to a day."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.001 <= number <= 86400:
        raise argparse.ArgumentTypeError(f"must be 0.001 to 86400 seconds, got {text!r}")
    return number


count = whole()
job_id = whole(1, MAX_ID)


class Misuse(Exception):
    """The words make no command; *code* is what the command returns then."""

    def __init__(self, message: str, usage: str, code: int) -> None:
        super().__init__(message)
        self.usage, self.code = usage, code


class Arguments(argparse.Namespace):
    """Refuses a second database, which may stand before the command, within it, or in both.

    The command would leave the first one out, unsaid.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "database_url" and getattr(self, name, None) not in (None, value):
            raise argparse.ArgumentError(None, "-d/--database-url takes one database")
        super().__setattr__(name, value)


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, so that a command can print them as JSON."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.color = False  # Python 3.14 would colour help, by escapes that PlainText shows

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, also those of a command, for which argparse makes a namespace."""
        return super().parse_known_args(args, Arguments() if namespace is None else namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print it, and say where that fails, of which argparse says nothing."""
        print(message, end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        code = self.get_default("failed") or UsageError.code
        raise Misuse(message, self.format_usage(), code)


def make_parser() -> Parser:
    """Return the parser; what it parses has the function to call as *run*."""
    parser = Parser(prog="rota", description=DESCRIPTION)
    _teach(parser, EPILOG)
    parser.add_argument("--version", action="version", version=f"rota {__version__}")
    _add_database(parser, default=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_schema_commands(commands)
    _add_job_commands(commands)
    _add_acts(commands)
    _add_queue_commands(commands)
    _add_queue(commands)
    _add_schedule_commands(commands)
    _add_worker(commands)
    _add_forward(commands)
    _add_front(commands)
    _add_web(commands)
    return parser


def _add(
    commands: Any, name: str, run: Callable[..., Any], what: str, *, json: bool = False
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}."
    )
    parser.set_defaults(run=run, command=name, parser=parser)
    _add_database(parser, default=argparse.SUPPRESS)  # it may stand before the command, too
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    if name in FOR_MANY:
        _add_databases(parser)
    return parser


def _add_database(parser: argparse.ArgumentParser, default: Any) -> None:
    what = "which database, by URL or name"
    parser.add_argument("-d", "--database-url", metavar="URL", help=what, default=default)


def _add_schema_commands(commands: Any) -> None:
    what = "install or upgrade rota"
    add = _add(commands, "install", maintenance.install, what, json=True)
    add.add_argument("--dry-run", action="store_true", help="print the SQL, change nothing")
    add.add_argument("--with-roles", action="store_true", help="create the four roles")
    add.add_argument("--with-cron", action="store_true", help="let pg_cron tick")
    what = "even if the database has a newer rota"
    add.add_argument("--force", action="store_true", help=what)
    what = "remove rota and all its jobs"
    add = _add(commands, "uninstall", maintenance.uninstall, what, json=True)
    add.add_argument("--yes", action="store_true", help="do not ask")
    what = "recount the promises on the newest rows"
    add = _add(commands, "verify", status.verify, what, json=True)
    add.description = f"{add.description} {VERIFY}"
    add.set_defaults(failed=COULD_NOT_ASK)
    what = "how many of each kind (default: %(default)s)"
    add.add_argument("--max-rows", type=count, default=10000, metavar="N", help=what)
    what = "show what is wrong with the queue and the database under it"
    add = _add(commands, "doctor", status.doctor, what, json=True)
    add.description = f"{add.description} {DOCTOR}"
    add.set_defaults(failed=COULD_NOT_ASK)
    add.add_argument("--check", action="store_true", help="print one line, for monitoring")
    add.add_argument("--all", action="store_true", help="also show what is well")
    what = "show queues, due jobs and workers"
    add = _add(commands, "status", status.status, what, json=True)
    add.description = f"{add.description} {STATUS}"
    add = _add(commands, "top", status.top, "show what happens now, live; q quits", json=True)
    add.add_argument("--once", action="store_true", help="show it once")
    add.add_argument(
        "--every", type=seconds, default=2.0, metavar="SECONDS", help="refresh (default 2)"
    )
    add = _add(commands, "tick", maintenance.tick, "do the maintenance that is due", json=True)
    add.add_argument("--loop", action="store_true", help="repeat until SIGTERM or Ctrl-C")
    what = "seconds between ticks of --loop (default: %(default)s)"
    add.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help=what)


def _add_job_commands(commands: Any) -> None:
    add = _add(commands, "enqueue", jobs.enqueue, "add a job and print its id", json=True)
    add.add_argument("job_type")
    add.add_argument("payload", nargs="?", default="{}", help="JSON (default: {})")
    add.add_argument("--queue")
    add.add_argument("--run-at", metavar="TIME", help="such as '2026-03-01 02:00 Europe/Paris'")
    add.add_argument("--delay", metavar="INTERVAL", help="such as '10 minutes'")
    add.add_argument("--priority", type=whole(-32768, 32767), help="lower runs first")
    add.add_argument("--max-attempts", type=count)
    add.add_argument("--lease", metavar="INTERVAL", help="such as '5 minutes'")
    add.add_argument("--key", dest="idempotency_key", help="idempotency key")
    what = "keep the idempotency key taken for so long"
    add.add_argument("--unique-for", metavar="INTERVAL", help=what)
    add.add_argument("--ordering-key", metavar="KEY", help="after all earlier jobs of this key")
    add.add_argument("--limit-key", metavar="KEY", help="such as customer:7")
    add.add_argument("--time-limit", metavar="INTERVAL", help="of one attempt")
    what = "no attempt begins later than this"
    add.add_argument("--expires-after", metavar="INTERVAL", help=what)
    add = _add(commands, "jobs", jobs.jobs, "list jobs, the newest first", json=True)
    add_filter(add)
    add.add_argument("--before", type=job_id, metavar="ID", help="continue after this job")
    add.add_argument("--limit", type=count, default=50, help=AT_MOST)
    what = "list the errors of failed attempts, grouping similar ones"
    add = _add(commands, "errors", jobs.errors, what, json=True)
    add.add_argument("--queue")
    add.add_argument("--type", dest="job_type")
    what = "how far back (default: %(default)s)"
    add.add_argument("--since", default="1 day", metavar="AGE", help=what)
    add.add_argument("--limit", type=count, default=20, help=AT_MOST)
    what = "list effects that may or may not have happened"
    add = _add(commands, "effects", jobs.effects, what, json=True)
    add.add_argument("--limit", type=count, default=50, help=AT_MOST)
    own = add.add_subparsers(title="commands", metavar="COMMAND")
    what = "record whether an unknown effect has happened"
    add = _add(own, "settle", jobs.settle, what, json=True)
    add.add_argument("scope")
    add.add_argument("key")
    how = add.add_mutually_exclusive_group(required=True)
    what = "it happened, and no job repeats it"
    how.add_argument("--done", dest="outcome", action="store_const", const="done", help=what)
    what = "it did not happen, and the next job with this effect does it"
    how.add_argument("--again", dest="outcome", action="store_const", const="again", help=what)
    add.add_argument(
        "--result", metavar="JSON", help="what a run that did it would have stored"
    )
    add.add_argument("--dry-run", action="store_true", help="show the effect, change nothing")
    add = _add(commands, "job", jobs.job, "show the history of a job", json=True)
    add.add_argument("job_id", type=job_id)
    what = "show why a job does not run, and what would change that"
    add = _add(commands, "explain", jobs.explain, what, json=True)
    add.add_argument("job_id", type=job_id)


def _add_queue_commands(commands: Any) -> None:
    what = "stop claims of a queue, of a type, or of all jobs"
    add = _add(commands, "pause", queues.pause, what, json=True)
    _teach(add, PAUSE)
    _add_paused(add)
    add.add_argument("--reason", help="shown by rota status")
    how = add.add_mutually_exclusive_group()
    how.add_argument("--until", metavar="TIME", help="end the pause at this time")
    what = "end the pause after this time, such as '2 hours'"
    how.add_argument("--for", dest="length", metavar="INTERVAL", help=what)
    what = "list the limits in use, and how many jobs wait for them"
    add = _add(commands, "limits", queues.limits, what, json=True)
    add.add_argument("--limit", type=count, default=50, help=AT_MOST)
    what = "resume claims of a queue, of a type, or of all jobs"
    _add_paused(_add(commands, "resume", queues.resume, what, json=True))


def _add_paused(add: argparse.ArgumentParser) -> None:
    add.add_argument("queue", nargs="?")
    add.add_argument("--type", dest="job_type", help="only this type, in the queue or all")
    add.add_argument("--all", action="store_true", help="everything")
    add.add_argument("--dry-run", action="store_true", help="count, change nothing")
    add.add_argument("--yes", action="store_true", help="do not ask")


def _add_acts(commands: Any) -> None:
    add = _add_act(commands, "retry", "retry", "run failed and dead jobs again now")
    what = "also running jobs: their workers lose them; a filter needs --status running"
    add.add_argument("--force", action="store_true", help=what)
    what = "jobs that were planned for later wait for their time, as after a mistaken cancel"
    add.add_argument("--keep-run-at", action="store_true", help=what)
    what = "for one job: also restore the jobs that were cancelled because of it"
    add.add_argument("--with-dependants", action="store_true", help=what)
    what = "change this value of the payload, to JSON or a text; may be repeated"
    add.add_argument("--set", action="append", metavar="NAME=VALUE", help=what)
    add.add_argument("--new-payload", metavar="JSON", help="replace the payload")
    add.add_argument("--max-attempts", type=count, metavar="N", help="give up after N attempts")
    what = "cancel waiting jobs, and ask the workers of running ones to stop"
    add = _add_act(commands, "cancel", "cancel", what)
    add.add_argument("--reason")
    what = "acknowledge dead jobs: they are kept, but no longer raise alerts"
    _add_act(commands, "discard", "discard", what)
    what = "move waiting jobs to another time"
    add = _add_act(commands, "reschedule", "reschedule", what)
    how = add.add_mutually_exclusive_group(required=True)
    how.add_argument("--run-at", metavar="TIME", help="such as '2026-03-01 02:00 Europe/Paris'")
    how.add_argument("--delay", metavar="INTERVAL", help="from now, such as '10 minutes'")
    add = _add_act(commands, "priority", "set_priority", "give jobs another priority")
    what = "lower runs first"
    add.add_argument("--to", type=whole(-32768, 32767), required=True, metavar="N", help=what)
    add = _add_act(commands, "move", "move", "move waiting jobs to another queue")
    add.add_argument("--to", required=True, metavar="QUEUE")
    what = "delete jobs that have ended; dead ones only with --status dead"
    _add_act(commands, "purge", "purge", what)
    what = "erase personal data from jobs: payload, result, headers, keys, errors"
    _add_act(commands, "erase", "erase", what)
    what = "list what operators did, the newest first"
    add = _add(commands, "audit", jobs.audit, what, json=True)
    add.add_argument("--job", type=job_id, metavar="ID", help="to this job")
    add.add_argument("--act", help="such as retry, pause or set_limit")
    add.add_argument("--by", metavar="NAME", help="of a role, or of the person behind it")
    add.add_argument("--since", metavar="AGE", help="such as '1 day'")
    add.add_argument("--limit", type=count, default=50, help=AT_MOST)
    what = "print a completion script for a shell"
    add = _add(commands, "completion", _print_completion, what)
    _teach(add, COMPLETION)
    add.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def _add_act(commands: Any, name: str, act: str, what: str) -> argparse.ArgumentParser:
    add = _add(commands, name, jobs.act, what, json=True)
    add.set_defaults(act=act)
    _teach(add, ACTS.format(name=name, more=EXAMPLES[act]))
    add.add_argument("job_ids", nargs="*", type=job_id, metavar="ID")
    which = add_filter(add)
    which.add_argument(
        "--all", action="store_true", help="all jobs that the command can change"
    )
    which.add_argument("--limit", type=count, metavar="N", help="at most N jobs")
    add.add_argument("--dry-run", action="store_true", help="count and show, change nothing")
    add.add_argument("--yes", action="store_true", help="do not ask")
    return add


def _print_completion(arguments: argparse.Namespace) -> None:
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        hint = "Install it: pip install './python_client[cli]'"
        raise CommandError("completion needs the package shtab", hint) from None
    command_terminal(shtab.complete(make_parser(), arguments.shell) + "\n")  # as it is


def _add_web(commands: Any) -> None:
    add = _add(commands, "web", web.web, "show everything in a browser")
    _teach(add, WEB)
    _add_databases(add)
    add.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    add.add_argument(
        "--port", type=whole(0, 65535), default=8025, help="(default: %(default)s)"
    )
    what = "let operators act: without it the page is read-only"
    add.add_argument("--allow-acts", action="store_true", help=what)
    what = "admit the users in this file, by name and password"
    add.add_argument("--passwords", metavar="FILE", help=what)
    what = "add a user to the file: an observer, or with --allow-acts an operator"
    add.add_argument("--add-user", metavar="NAME", help=what)
    what = "header in which a proxy sends the user's name, such as X-Remote-User"
    add.add_argument("--trusted-header", metavar="NAME", help=what)
    what = "address of that proxy (default: this machine)"
    add.add_argument("--proxy", action="append", metavar="ADDRESS", help=what)
    what = "a user from that header who may act, or * for all"
    add.add_argument("--operator", action="append", metavar="NAME", help=what)
    what = "payloads and results: mask by key (default), hide, or show"
    add.add_argument("--payloads", choices=("mask", "hide", "show"), default="mask", help=what)
    what = "path of the page at a proxy, which removes it from the request"
    add.add_argument("--root-path", default="", metavar="PATH", help=what)


def _add_worker(commands: Any) -> None:
    add = _add(commands, "worker", worker.work, "run jobs until SIGTERM or Ctrl-C")
    _teach(add, WORKER)

    def number(kind: type, name: str, default: float | None, what: str) -> None:
        what += " (default: %(default)s)" if default is not None else ""
        add.add_argument(name, type=kind, default=default, metavar="N", help=what)

    what = "MODULE:NAME of a rota.Registry; without :NAME, registry"
    add.add_argument("registry", help=what)
    _add_databases(add)
    what = "leave jobs of enqueue_to() to rota forward"
    add.add_argument("--no-forward", action="store_true", help=what)
    what = (
        "a queue, or QUEUE=PLACES to give it its own places; may be repeated (default: default)"
    )
    add.add_argument("--queue", action="append", help=what)
    number(int, "--concurrency", 4, "jobs at a time, for queues without their own places")
    number(int, "--processes", 1, "worker processes, each with this concurrency")
    number(int, "--batch", None, "hold N jobs (default: what starts soon)")
    add.add_argument(
        "--lease",
        type=float,
        metavar="SECONDS",
        help="lease of jobs that were enqueued without one",
    )
    add.add_argument("--name", help="(default: host:pid:random)")
    number(float, "--poll-interval", 1.0, "seconds between polls while nothing is due")
    add.add_argument("--no-listen", action="store_true", help="poll only, do not listen")
    what = "where to listen for notifications, past a pooler (default: the database)"
    add.add_argument("--listen-url", metavar="URL", help=what)
    add.add_argument("--no-tick", action="store_true", help="leave maintenance to others")
    what = "seconds between calls of tick(), while there is anything to do"
    number(float, "--tick-interval", 1.0, what)
    number(float, "--grace-period", 20.0, "seconds that running jobs get after SIGTERM")
    what = "exit after about N jobs; with --processes another process follows"
    number(int, "--max-jobs", None, what)
    what = "the same when the process has used N megabytes of memory"
    number(float, "--max-memory", None, what)
    what = "serve GET /live, /ready and /metrics there; further processes use the next ports"
    add.add_argument("--health", metavar="[HOST:]PORT", help=what)
    what = "restart when a Python file below the current directory changes"
    add.add_argument("--reload", action="store_true", help=what)
    add.add_argument("--process-number", type=int, help=argparse.SUPPRESS)
    how = add.add_mutually_exclusive_group()
    what = "exit when nothing is due, or a rate lets nothing start just now"
    how.add_argument("--drain", action="store_true", help=what)
    how.add_argument("--once", action="store_true", help="exit after one claim")
    _add_log(add)


def _add_log(add: argparse.ArgumentParser) -> None:
    default = "(default: %(default)s)"
    formats = ("text", "json")
    add.add_argument("--log-format", choices=formats, default="text", help=default)
    what = "write the log as JSON, as --log-format json does"
    add.add_argument("--json", action="store_true", help=what)
    levels = ("debug", "info", "warning", "error")
    add.add_argument("--log-level", choices=levels, default="info", help=default)


def _add_databases(add: argparse.ArgumentParser) -> None:
    what = "one of several databases, by URL or name; may be repeated"
    add.add_argument("--database", action="append", metavar="URL", help=what)
    what = "a file that names several, one per line"
    add.add_argument("--databases", metavar="FILE", help=what)


def _add_forward(commands: Any) -> None:
    what = "carry jobs of enqueue_to() between databases, and tick, until SIGTERM or Ctrl-C"
    add = _add(commands, "forward", moves.forward, what)
    _add_databases(add)
    _add_log(add)


FRONT = """\
A front has no jobs: it forwards calls that enqueue, or act on one job, to the
named databases through PL/Proxy (Debian: postgresql-15-plproxy). The database
commits each call at once.

examples:
  rota front make --front postgresql://postgres@front/shop --databases FILE \\
      --role shop=producer --role ann=operator --passwords FILE
  rota front status --front postgresql://postgres@front/shop

Run it again to add a database, or after an upgrade. A password file has lines
ROLE:PASSWORD.
exit codes: 0 done, 1 failed, or slots are left to hand over, 2 wrong usage
"""


def _add_front(commands: Any) -> None:
    what = "make one database forward calls to many, or check it"
    parser = commands.add_parser(
        "front", help=what, description=f"{what[0].upper()}{what[1:]}."
    )
    _teach(parser, FRONT)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    what = "make a front, or update it"
    add = _add(actions, "make", front.make, what, json=True)
    _add_databases(add)
    add.add_argument("--role", action="append", metavar="ROLE=ACCESS", help=(
        "let a role of the front enqueue (producer) or act and read (operator); may be repeated"
    ))  # fmt: skip
    add.add_argument(
        "--passwords", metavar="FILE", help="passwords of the roles, at the databases"
    )
    add.add_argument("--time-limit", metavar="SPAN", help="of each call: '5 seconds'")
    add.add_argument("--dry-run", action="store_true", help="print the SQL, change nothing")
    _add_front_of(add)
    add = _add(actions, "status", front.status, "show what is behind a front", json=True)
    add.set_defaults(command="front status")
    _add_front_of(add)


def _add_front_of(add: argparse.ArgumentParser) -> None:
    what = "the front, by URL or name; making one needs a superuser"
    add.add_argument("--front", metavar="URL", required=True, help=what)


QUEUE_MOVE = """\
examples:
  rota queue move mail --to 8 --databases /etc/shop/databases --dry-run
  rota queue move mail --to 8 --databases /etc/shop/databases
  rota queue move mail --to 8 --databases /etc/shop/databases --end

Exit code: 0 settled, or it can move; 1 refused; 3 not settled: run it again, or
leave it to rota forward. You may stop it at any moment.
"""


def _add_queue(commands: Any) -> None:
    what = "move a queue to another database"
    group = _add(commands, "queue", lambda _: 0, what)
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    what = "move the jobs of a queue while producers and workers run"
    add = _add(actions, "move", moves.move, what, json=True)
    add.set_defaults(command="queue move")
    _teach(add, QUEUE_MOVE)
    add.add_argument("queue")
    add.add_argument("--to", type=int, required=True, metavar="NUMBER", help="to database")
    what = "from database, if more than two are named"
    add.add_argument("--from", dest="source", type=int, metavar="NUMBER", help=what)
    which = add.add_mutually_exclusive_group()
    what = "show what keeps it from moving, and do nothing"
    which.add_argument("--dry-run", action="store_true", help=what)
    which.add_argument("--status", action="store_true", help="show the progress")
    what = "end the move, once nothing is left: new jobs stay where they are enqueued"
    which.add_argument("--end", action="store_true", help=what)


SCHEDULE = """\
examples:
  rota schedule next '0 2 * * MON-FRI' --tz Europe/Warsaw
  rota schedule add nightly '0 2 * * *' clean_up '{"days": 30}' --tz Asia/Tokyo
  rota schedule list
  rota schedule import jobs.cron --dry-run

A schedule has five fields (minute hour day month weekday), or six with seconds
in front; or it is @hourly, @daily, @weekly, @monthly or @yearly; or
'every 90 seconds', counted from its start; or 'after 10 minutes', counted from
the end of its last run. Quote it for the shell.
"""
ADD = """\
examples:
  rota schedule add nightly '0 2 * * *' clean_up --tz Europe/Warsaw
  rota schedule add report '0 9 * * MON#1' send_report --catch-up all
  rota schedule add poll 'after 30 seconds' poll_inbox --queue mail
  rota schedule add cache 'every 10 minutes' warm_cache --overlap skip

An option that you leave out gets its default, even for an existing schedule. So
each deployment may repeat the command: an unchanged schedule keeps its next
run.
"""
NEXT = """\
examples:
  rota schedule next '30 2 * * *' --tz Europe/Warsaw -n 3 --after 2026-03-28
  rota schedule next 'every 90 seconds'
  rota schedule next --name nightly

A time that the clocks skip runs at the first instant after the gap; a time that
occurs twice runs the first time. If minute or hour begins with a star, the
schedule follows the wall clock instead.
"""
IMPORT = """\
a file:
  # name=... is needed if two lines have the same job type
  TZ=Europe/Warsaw
  0 2 * * *         clean_up
  0 9 * * MON-FRI   send_report  name=report catch_up=all {"to": "board"}
  every 10 minutes  warm_cache   overlap=skip jitter='30 seconds'  # a comment

A line is SCHEDULE JOB_TYPE, then optionally KEY=VALUE (the arguments of
schedule_job), then a JSON payload. TZ= and CRON_TZ= apply to the lines below
them. The command applies all lines, or none, and leaves other schedules alone.
"""
SYNC = """\
in the code:
  registry = rota.Registry("shop")

  @registry.schedule("0 2 * * *", time_zone="Europe/Warsaw")
  @registry.task()
  def clean_up(days: int = 30) -> None: ...

at each deployment:
  rota schedule sync shop.jobs:registry --prune

The command adds and changes schedules, all of them or none. Schedules belong to
the registry of that name: it never removes others, or those that were added
without a registry.
"""


def _add_schedule_commands(commands: Any) -> None:
    what = "manage schedules, which make jobs at planned times"
    schedule = commands.add_parser(
        "schedule", help=what, description="Manage schedules, which make jobs at planned times."
    )
    _teach(schedule, SCHEDULE)
    own = schedule.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_add(own)
    add = _add(own, "list", schedules.list_all, "list schedules and when they run", json=True)
    add.add_argument("--limit", type=count, default=1000, help=AT_MOST)
    what = "show a schedule, its next and last runs"
    _named(_add(own, "show", schedules.show, what, json=True))
    what = "remove a schedule"
    add = _named(_add(own, "remove", schedules.remove, what, json=True))
    add.add_argument("--yes", action="store_true", help="do not ask")
    for name, what in (
        ("enable", "let schedules make jobs again"),
        ("disable", "stop schedules from making jobs"),
    ):
        add = _add(own, name, schedules.switch, what, json=True)
        add.add_argument("names", nargs="*", metavar="name", help="of a schedule")
        add.add_argument("--all", action="store_true", help=f"{name} all schedules")
        add.add_argument("--yes", action="store_true", help="do not ask, as --all does")
    what = "make a job from a schedule now and print its id"
    _named(_add(own, "run", schedules.run, what, json=True))
    _add_next(own)
    what = "add or change all schedules in a file, or none"
    add = _add(own, "import", schedules.import_file, what, json=True)
    _teach(add, IMPORT)
    add.add_argument("file", help="lines as in a crontab; - is standard input")
    add.add_argument("--dry-run", action="store_true", help="show the effect, change nothing")
    _add_zone(add, "zone of lines before the first TZ=")
    what = "apply the schedules declared in the code of handlers"
    add = _add(own, "sync", schedules.sync, what, json=True)
    _teach(add, SYNC)
    add.add_argument("registry", help="module:name of a rota.Registry")
    what = "remove schedules that are no longer in the code"
    add.add_argument("--prune", action="store_true", help=what)
    add.add_argument("--dry-run", action="store_true", help="show the effect, change nothing")


def _add_add(own: Any) -> None:
    add = _named(_add(own, "add", schedules.add, "add or change a schedule", json=True))
    _teach(add, ADD)
    add.add_argument("schedule", help="such as '0 2 * * *' or 'every 10 minutes'")
    add.add_argument("job_type")
    add.add_argument("payload", nargs="?", default="{}", help="JSON (default: {})")
    _add_zone(add, "time zone, such as Europe/Warsaw")
    add.add_argument("--queue")
    add.add_argument("--priority", type=whole(-32768, 32767), help="lower runs first")
    add.add_argument("--max-attempts", type=count)
    add.add_argument("--lease", metavar="INTERVAL", help="such as '5 minutes'")
    what = "stop a run that takes longer, such as '1 hour'"
    add.add_argument("--time-limit", metavar="INTERVAL", help=what)
    what = "what happens to missed times (default: one)"
    add.add_argument("--catch-up", choices=("skip", "one", "all"), help=what)
    what = "skip older ones, such as '3 hours'"
    add.add_argument("--catch-up-window", metavar="INTERVAL", help=what)
    add.add_argument("--catch-up-max", type=count, metavar="N", help="at most N at once")
    what = "while the last job is live (default: allow)"
    add.add_argument("--overlap", choices=("allow", "skip", "queue"), help=what)
    add.add_argument("--jitter", metavar="INTERVAL", help="start up to this much later")
    add.add_argument("--starts-at", metavar="TIME", help="no run before it; in --tz")
    add.add_argument("--ends-at", metavar="TIME", help="no run after it; in --tz")
    add.add_argument("--dry-run", action="store_true", help="show the effect, change nothing")


def _add_next(own: Any) -> None:
    what = "explain a schedule, and list its next runs"
    add = _add(own, "next", schedules.next_runs, what, json=True)
    _teach(add, NEXT)
    add.add_argument("schedule", nargs="?", help="such as '0 2 * * *', in quotes")
    add.add_argument("--name", help="an existing schedule instead")
    _add_zone(add, "time zone")
    add.add_argument("-n", dest="number", type=int, default=10, help="(default: %(default)s)")
    add.add_argument("--after", metavar="TIME", help="start time (default: now); in --tz")


def _add_zone(add: argparse.ArgumentParser, what: str) -> None:
    add.add_argument("--tz", dest="time_zone", metavar="ZONE", help=f"{what} (default: UTC)")


def _named(add: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add.add_argument("name", help="of the schedule")
    return add


def _teach(parser: argparse.ArgumentParser, epilog: str) -> None:
    parser.epilog = epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
