"""The words and options of the command line."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from .. import __version__
from . import database, databases, jobs, many, queues, schedules, web, worker
from .jobs import STATUSES
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
STATUS = "Exit code: 0, 1 if the query failed, 2 if the doctor finds something critical."
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
Give job ids, or a filter; a job has to meet all its conditions. With a filter
(purge and erase: always) the command first counts the jobs, and asks. It
changes them in short steps: you may stop it and run it again. It reports a job
that it cannot change, and continues with the others.

examples:
{more}
  rota {name} --queue mail --older-than '2 hours' --dry-run

exit codes: 0 done, 1 failed, or not all jobs changed, 2 wrong usage
"""
EXAMPLES = {
    "retry": """\
  rota retry 4711 4712
  rota retry --type charge_card --error 'card 7 declined' --set currency=EUR
  rota retry --type charge_card --with-dependants --spread '10 minutes'
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
        # Who names no command wants to know which there are.
        is_bare = message.endswith((": COMMAND", ": ACTION"))
        raise Misuse(message, self.format_help() if is_bare else self.format_usage(), code)


@cache  # to make it takes longer than many a command
def make_parser() -> Parser:
    """Return the parser; what it parses has the function to call as *run*."""
    parser = Parser(prog="rota", description=DESCRIPTION)
    _teach(parser, EPILOG)
    parser.add_argument("--version", action="version", version=f"rota {__version__}")
    _add_database(parser, default=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_schema_commands(commands)
    _add_worker(commands)
    _add_tick(commands)
    _add_enqueue(commands)
    _add_schedule_commands(commands)
    _add_views(commands)
    _add_web(commands)
    _add_acts(commands)
    _add_pauses(commands)
    _add_queue(commands)
    _add_forward(commands)
    _add_front(commands)
    _add_completion(commands)
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
        _flag(parser, "--json", "print JSON")
    if name in FOR_MANY:
        _add_databases(parser)
    return parser


def _flag(add: Any, name: str, what: str) -> None:
    add.add_argument(name, action="store_true", help=what)


def _option(add: Any, name: str, value: str, what: str, **more: Any) -> None:
    add.add_argument(name, metavar=value, help=what, **more)


def _add_database(parser: argparse.ArgumentParser, default: Any) -> None:
    what = "which database, by URL or name"
    parser.add_argument("-d", "--database-url", metavar="URL", help=what, default=default)


def _add_schema_commands(commands: Any) -> None:
    what = "install or upgrade rota"
    add = _add(commands, "install", database.install, what, json=True)
    _flag(add, "--dry-run", "print the SQL, change nothing")
    _flag(add, "--with-roles", "create the four roles")
    _flag(add, "--with-cron", "let pg_cron tick")
    _flag(add, "--force", "even if the database has a newer rota")
    what = "remove rota and all its jobs"
    add = _add(commands, "uninstall", database.uninstall, what, json=True)
    _flag(add, "--yes", "do not ask")


def _add_views(commands: Any) -> None:
    what = "show queues, due jobs and workers"
    add = _add(commands, "status", database.status, what, json=True)
    add.description = f"{add.description} {STATUS}"
    add = _add(commands, "top", database.top, "show what happens now, live; q quits", json=True)
    _flag(add, "--once", "show it once")
    _option(add, "--every", "SECONDS", "refresh (default 2)", type=seconds, default=2.0)
    what = "show what is wrong with the queue and the database under it"
    add = _add(commands, "doctor", database.doctor, what, json=True)
    add.description = f"{add.description} {DOCTOR}"
    add.set_defaults(failed=COULD_NOT_ASK)
    _flag(add, "--check", "print one line, for monitoring")
    _flag(add, "--all", "also show what is well")
    what = "recount the promises on the newest rows"
    add = _add(commands, "verify", database.verify, what, json=True)
    add.description = f"{add.description} {VERIFY}"
    add.set_defaults(failed=COULD_NOT_ASK)
    what = "how many of each kind (default: %(default)s)"
    _option(add, "--max-rows", "N", what, type=count, default=10000)
    add = _add(commands, "jobs", jobs.jobs, "list jobs, the newest first", json=True)
    _add_filter(add)
    _option(add, "--before", "ID", "continue after this job", type=job_id)
    add.add_argument("--limit", type=count, default=50, help=AT_MOST)
    add = _add(commands, "job", jobs.job, "show the history of a job", json=True)
    add.add_argument("job_id", type=job_id)
    what = "show why a job does not run, and what would change that"
    add = _add(commands, "explain", jobs.explain, what, json=True)
    add.add_argument("job_id", type=job_id)
    what = "list the errors of failed attempts, grouping similar ones"
    add = _add(commands, "errors", jobs.errors, what, json=True)
    add.add_argument("--queue")
    add.add_argument("--type", dest="job_type")
    _option(add, "--since", "AGE", "how far back (default: %(default)s)", default="1 day")
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
    _option(add, "--result", "JSON", "what a run that did it would have stored")
    _flag(add, "--dry-run", "show the effect, change nothing")
    what = "list the limits in use, and how many jobs wait for them"
    add = _add(commands, "limits", queues.limits, what, json=True)
    add.add_argument("--limit", type=count, default=50, help=AT_MOST)
    what = "list what operators did, the newest first"
    add = _add(commands, "audit", jobs.audit, what, json=True)
    _option(add, "--job", "ID", "to this job", type=job_id)
    add.add_argument("--act", help="such as retry, pause or set_limit")
    _option(add, "--by", "NAME", "of a role, or of the person behind it")
    _option(add, "--since", "AGE", "such as '1 day'")
    add.add_argument("--limit", type=count, default=50, help=AT_MOST)


def _add_pauses(commands: Any) -> None:
    what = "stop claims of a queue, of a type, or of all jobs"
    add = _add(commands, "pause", queues.pause, what, json=True)
    _teach(add, PAUSE)
    _add_paused(add)
    add.add_argument("--reason", help="shown by rota status")
    how = add.add_mutually_exclusive_group()
    _option(how, "--until", "TIME", "end the pause at this time")
    what = "end the pause after this time, such as '2 hours'"
    _option(how, "--for", "INTERVAL", what, dest="length")
    what = "resume claims of a queue, of a type, or of all jobs"
    _add_paused(_add(commands, "resume", queues.resume, what, json=True))


def _add_paused(add: argparse.ArgumentParser) -> None:
    add.add_argument("queue", nargs="?")
    add.add_argument("--type", dest="job_type", help="only this type, in the queue or all")
    _flag(add, "--all", "everything")
    _flag(add, "--dry-run", "count, change nothing")
    _flag(add, "--yes", "do not ask")


def _add_enqueue(commands: Any) -> None:
    add = _add(commands, "enqueue", jobs.enqueue, "add a job and print its id", json=True)
    add.add_argument("job_type")
    add.add_argument("payload", nargs="?", default="{}", help="JSON (default: {})")
    add.add_argument("--queue")
    when = add.add_mutually_exclusive_group()
    _option(when, "--run-at", "TIME", "such as '2026-03-01 02:00 Europe/Paris'")
    _option(when, "--delay", "INTERVAL", "such as '10 minutes'")
    add.add_argument("--priority", type=whole(-32768, 32767), help="lower runs first")
    add.add_argument("--max-attempts", type=count)
    _option(add, "--lease", "INTERVAL", "such as '5 minutes'")
    add.add_argument("--key", dest="idempotency_key", help="idempotency key")
    _option(add, "--unique-for", "INTERVAL", "keep the idempotency key taken for so long")
    _option(add, "--ordering-key", "KEY", "after all earlier jobs of this key")
    _option(add, "--limit-key", "KEY", "such as customer:7")
    _option(add, "--time-limit", "INTERVAL", "of one attempt")
    _option(add, "--expires-after", "INTERVAL", "no attempt begins later than this")


def _add_spread(add: argparse.ArgumentParser) -> None:
    what = "not all at once, but each at some time in so long, such as '10 minutes'"
    _option(add, "--spread", "INTERVAL", what)


def _add_acts(commands: Any) -> None:
    add = _add_act(commands, "retry", "retry", "run failed and dead jobs again now")
    what = "also running jobs: their workers lose them; a filter needs --status running"
    _flag(add, "--force", what)
    what = "jobs that were planned for later wait for their time, as after a mistaken cancel"
    _flag(add, "--keep-run-at", what)
    _add_spread(add)
    what = "also restore the jobs that were cancelled because of these"
    _flag(add, "--with-dependants", what)
    what = "change this value of the payload, to JSON or a text; may be repeated"
    _option(add, "--set", "NAME=VALUE", what, action="append")
    _option(add, "--new-payload", "JSON", "replace the payload")
    _option(add, "--max-attempts", "N", "give up after N attempts", type=count)
    what = "cancel waiting jobs, and ask the workers of running ones to stop"
    add = _add_act(commands, "cancel", "cancel", what)
    add.add_argument("--reason")
    what = "acknowledge dead jobs: they are kept, but no longer raise alerts"
    _add_act(commands, "discard", "discard", what)
    what = "move waiting jobs to another time"
    add = _add_act(commands, "reschedule", "reschedule", what)
    how = add.add_mutually_exclusive_group(required=True)
    _option(how, "--run-at", "TIME", "such as '2026-03-01 02:00 Europe/Paris'")
    _option(how, "--delay", "INTERVAL", "from now, such as '10 minutes'")
    _add_spread(add)
    add = _add_act(commands, "priority", "set_priority", "give jobs another priority")
    _option(add, "--to", "N", "lower runs first", type=whole(-32768, 32767), required=True)
    add = _add_act(commands, "move", "move", "move waiting jobs to another queue")
    add.add_argument("--to", required=True, metavar="QUEUE")
    what = "delete jobs that have ended; dead ones only with --status dead"
    _add_act(commands, "purge", "purge", what)
    what = "erase personal data from jobs: payload, result, headers, keys, errors"
    _add_act(commands, "erase", "erase", what)


def _add_filter(parser: argparse.ArgumentParser) -> Any:
    """Add the options; return their group."""
    which = parser.add_argument_group("which jobs")
    which.add_argument("--queue")
    which.add_argument("--status", action="append", choices=STATUSES, metavar="STATUS",
                       help=f"{', '.join(STATUSES)}; may be repeated")  # fmt: skip
    which.add_argument("--type", dest="job_type")
    what = (
        "with this last error, as `rota errors` shows it, with or without its type; numbers and"
        " ids may differ"
    )
    _option(which, "--error", "TEXT", what)
    _option(which, "--error-text", "TEXT", "with this text in the last error")
    which.add_argument("--error-type", metavar="TYPE")
    _option(which, "--cancel-reason", "TEXT", "cancelled for exactly this")
    which.add_argument("--due", choices=("yes", "no"), help="whether their time has come")
    what = "whether `rota discard` was used on them"
    which.add_argument("--discarded", choices=("yes", "no"), help=what)
    _option(which, "--worker", "NAME", "held by this worker, now or last")
    what = "ended (live jobs: created) longer ago than this, such as '2 hours'"
    _option(which, "--older-than", "AGE", what)
    _option(which, "--newer-than", "AGE", "the same, more recently")
    _option(which, "--payload", "JSON", "with this in the payload: '{\"user_id\": 7}'")
    what = "with this header; may be repeated"
    _option(which, "--header", "NAME=VALUE", what, action="append")
    _option(which, "--key", "KEY", "idempotency key", dest="idempotency_key")
    which.add_argument("--ordering-key", metavar="KEY")
    which.add_argument("--limit-key", metavar="KEY")
    _option(which, "--schedule", "NAME", "made by this schedule", dest="definition")
    which.add_argument("--pipeline", metavar="NAME")
    _option(which, "--stage", "NAME", "in this stage of a pipeline")
    return which


def _add_act(commands: Any, name: str, act: str, what: str) -> argparse.ArgumentParser:
    add = _add(commands, name, jobs.act, what, json=True)
    add.set_defaults(act=act)
    _teach(add, ACTS.format(name=name, more=EXAMPLES[act]))
    add.add_argument("job_ids", nargs="*", type=job_id, metavar="ID")
    which = _add_filter(add)
    _flag(which, "--all", "all jobs that the command can change")
    _option(which, "--limit", "N", "at most N jobs", type=count)
    _flag(add, "--dry-run", "count and show, change nothing")
    _flag(add, "--yes", "do not ask")
    return add


def _add_completion(commands: Any) -> None:
    what = "print a completion script for a shell"
    add = _add(commands, "completion", _print_completion, what)
    _teach(add, COMPLETION)
    add.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def _print_completion(arguments: argparse.Namespace) -> None:
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        hint = "Install it: pip install 'rota[cli]'"
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
    _flag(add, "--allow-acts", "let operators act: without it the page is read-only")
    _option(add, "--passwords", "FILE", "admit the users in this file, by name and password")
    what = "add a user to the file: an observer, or with --allow-acts an operator"
    _option(add, "--add-user", "NAME", what)
    what = "header in which a proxy sends the user's name, such as X-Remote-User"
    _option(add, "--trusted-header", "NAME", what)
    what = "address of that proxy (default: this machine)"
    _option(add, "--proxy", "ADDRESS", what, action="append")
    what = "a user from that header who may act, or * for all"
    _option(add, "--operator", "NAME", what, action="append")
    what = "payloads and results: mask by key (default), hide, or show"
    add.add_argument("--payloads", choices=("mask", "hide", "show"), default="mask", help=what)
    what = "path of the page at a proxy, which removes it from the request"
    _option(add, "--root-path", "PATH", what, default="")


def _add_tick(commands: Any) -> None:
    add = _add(commands, "tick", database.tick, "do the maintenance that is due", json=True)
    _flag(add, "--loop", "repeat until SIGTERM or Ctrl-C")
    what = "seconds between ticks of --loop (default: %(default)s)"
    _option(add, "--every", "SECONDS", what, type=float, default=1.0)


def _add_worker(commands: Any) -> None:
    add = _add(commands, "worker", worker.work, "run jobs until SIGTERM or Ctrl-C")
    _teach(add, WORKER)

    def number(kind: type, name: str, default: float | None, what: str) -> None:
        what += " (default: %(default)s)" if default is not None else ""
        add.add_argument(name, type=kind, default=default, metavar="N", help=what)

    what = "MODULE:NAME of a rota.Registry; without :NAME, registry"
    add.add_argument("registry", help=what)
    _add_databases(add)
    _flag(add, "--no-forward", "leave jobs of enqueue_to() to rota forward")
    what = (
        "a queue, or QUEUE=PLACES to give it its own places; may be repeated (default: default)"
    )
    add.add_argument("--queue", action="append", help=what)
    number(int, "--concurrency", 4, "jobs at a time, for queues without their own places")
    number(int, "--processes", 1, "worker processes, each with this concurrency")
    number(int, "--batch", None, "prefetch N jobs (default: what is likely to start soon)")
    add.add_argument(
        "--lease",
        type=float,
        metavar="SECONDS",
        help="lease of jobs that were enqueued without one",
    )
    add.add_argument("--name", help="which no other worker has (default: host:pid:random)")
    number(float, "--poll-interval", 1.0, "seconds between polls while nothing is due")
    _flag(add, "--no-listen", "poll only, do not listen")
    what = "where to listen for notifications, past a pooler (default: the database)"
    _option(add, "--listen-url", "URL", what)
    _flag(add, "--no-tick", "leave maintenance to others")
    what = "seconds between calls of tick(), while there is anything to do"
    number(float, "--tick-interval", 1.0, what)
    number(float, "--grace-period", 20.0, "seconds that running jobs get after SIGTERM")
    what = "exit after about N jobs; with --processes another process follows"
    number(int, "--max-jobs", None, what)
    what = "the same when the process has used N megabytes of memory"
    number(float, "--max-memory", None, what)
    what = "serve GET /live, /ready and /metrics there; further processes use the next ports"
    _option(add, "--health", "[HOST:]PORT", what)
    _flag(add, "--reload", "restart when a Python file below the current directory changes")
    add.add_argument("--process-number", type=int, help=argparse.SUPPRESS)
    how = add.add_mutually_exclusive_group()
    _flag(how, "--drain", "exit when nothing is due, or a rate lets nothing start just now")
    _flag(how, "--once", "exit after one claim")
    _add_log(add)


def _add_log(add: argparse.ArgumentParser) -> None:
    default = "(default: %(default)s)"
    formats = ("text", "json")
    add.add_argument("--log-format", choices=formats, default="text", help=default)
    _flag(add, "--json", "write the log as JSON, as --log-format json does")
    levels = ("debug", "info", "warning", "error")
    # As Python writes them, too.
    add.add_argument(
        "--log-level", type=str.lower, choices=levels, default="info", help=default
    )


def _add_databases(add: argparse.ArgumentParser) -> None:
    what = "one of several databases, by URL or name; may be repeated"
    _option(add, "--database", "URL", what, action="append")
    _option(add, "--databases", "FILE", "a file that names several, one per line")


def _add_forward(commands: Any) -> None:
    what = "carry jobs of enqueue_to() between databases, and tick, until SIGTERM or Ctrl-C"
    add = _add(commands, "forward", databases.forward, what)
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
    add = _add(actions, "make", databases.make_front, what, json=True)
    _add_databases(add)
    add.add_argument("--role", action="append", metavar="ROLE=ACCESS", help=(
        "let a role of the front enqueue (producer) or act and read (operator); may be repeated"
    ))  # fmt: skip
    _option(add, "--passwords", "FILE", "passwords of the roles, at the databases")
    _option(add, "--time-limit", "SPAN", "of each call: '5 seconds'")
    _flag(add, "--dry-run", "print the SQL, change nothing")
    _add_front_of(add)
    add = _add(
        actions, "status", databases.front_status, "show what is behind a front", json=True
    )
    add.set_defaults(command="front status")
    _add_front_of(add)


def _add_front_of(add: argparse.ArgumentParser) -> None:
    what = "the front, by URL or name; making one needs a superuser"
    _option(add, "--front", "URL", what, required=True)


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
    add = _add(actions, "move", databases.move, what, json=True)
    add.set_defaults(command="queue move")
    _teach(add, QUEUE_MOVE)
    add.add_argument("queue")
    _option(add, "--to", "NUMBER", "to database", type=int, required=True)
    what = "from database, if more than two are named"
    _option(add, "--from", "NUMBER", what, dest="source", type=int)
    which = add.add_mutually_exclusive_group()
    _flag(which, "--dry-run", "show what keeps it from moving, and do nothing")
    _flag(which, "--status", "show the progress")
    what = "end the move, once nothing is left: new jobs stay where they are enqueued"
    _flag(which, "--end", what)


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
    _flag(add, "--yes", "do not ask")
    for name, what in (
        ("enable", "let schedules make jobs again"),
        ("disable", "stop schedules from making jobs"),
    ):
        add = _add(own, name, schedules.switch, what, json=True)
        add.add_argument("names", nargs="*", metavar="name", help="of a schedule")
        _flag(add, "--all", f"{name} all schedules")
        _flag(add, "--yes", "do not ask, as --all does")
    what = "make a job from a schedule now and print its id"
    _named(_add(own, "run", schedules.run, what, json=True))
    _add_next(own)
    what = "add or change all schedules in a file, or none"
    add = _add(own, "import", schedules.import_file, what, json=True)
    _teach(add, IMPORT)
    what = "lines as in a crontab; - is standard input"
    add.add_argument("file", type=schedules.Source, help=what)
    _flag(add, "--dry-run", "show the effect, change nothing")
    _add_zone(add, "zone of lines before the first TZ=")
    what = "apply the schedules declared in the code of handlers"
    add = _add(own, "sync", schedules.sync, what, json=True)
    _teach(add, SYNC)
    add.add_argument("registry", help="module:name of a rota.Registry")
    _flag(add, "--prune", "remove schedules that are no longer in the code")
    _flag(add, "--dry-run", "show the effect, change nothing")


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
    _option(add, "--lease", "INTERVAL", "such as '5 minutes'")
    _option(add, "--time-limit", "INTERVAL", "stop a run that takes longer, such as '1 hour'")
    what = "what happens to missed times (default: one)"
    add.add_argument("--catch-up", choices=("skip", "one", "all"), help=what)
    _option(add, "--catch-up-window", "INTERVAL", "skip older ones, such as '3 hours'")
    _option(add, "--catch-up-max", "N", "at most N at once", type=count)
    what = "while the last job is live (default: allow)"
    add.add_argument("--overlap", choices=("allow", "skip", "queue"), help=what)
    _option(add, "--jitter", "INTERVAL", "start up to this much later")
    _option(add, "--starts-at", "TIME", "no run before it; in --tz")
    _option(add, "--ends-at", "TIME", "no run after it; in --tz")
    _flag(add, "--dry-run", "show the effect, change nothing")


def _add_next(own: Any) -> None:
    what = "explain a schedule, and list its next runs"
    add = _add(own, "next", schedules.next_runs, what, json=True)
    _teach(add, NEXT)
    add.add_argument("schedule", nargs="?", help="such as '0 2 * * *', in quotes")
    add.add_argument("--name", help="an existing schedule instead")
    _add_zone(add, "time zone")
    add.add_argument("-n", dest="number", type=int, default=10, help="(default: %(default)s)")
    _option(add, "--after", "TIME", "start time (default: now); in --tz")


def _add_zone(add: argparse.ArgumentParser, what: str) -> None:
    _option(add, "--tz", "ZONE", f"{what} (default: UTC)", dest="time_zone")


def _named(add: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add.add_argument("name", help="of the schedule")
    return add


def _teach(parser: argparse.ArgumentParser, epilog: str) -> None:
    parser.epilog = epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
