"""Commands about a database: install, uninstall, tick; status, top, doctor, verify."""

from __future__ import annotations

import argparse
import asyncio
import logging
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from math import inf
from typing import Any, LiteralString

import psycopg

from .. import __version__
from ..client.connecting import one_line
from ..client.sync_client import Client
from ..client.values import check_range, span
from ..rows import Finding, TickReport
from ..schema import run_script, script_text
from ..worker.connection import Connection, ConnectionState, wait_for
from ..worker.maintenance import Ticker
from ..worker.process import run_until_signal
from .output import (
    CommandError,
    UsageError,
    answered,
    asking,
    command_terminal,
    confirm,
    connected,
    conninfo,
    guarded,
    height,
    list_lines,
    lock_holder,
    print_findings,
    print_json,
    print_list,
    print_record,
    set_up_log,
    short,
    shortened,
    tell,
    width,
    wrapped,
)

logger = logging.getLogger("rota")

MAX_EVERY = 3600.0


def install(arguments: argparse.Namespace) -> None:
    """Install, or bring up to date."""
    options = {
        "with_roles": arguments.with_roles,
        "with_cron": arguments.with_cron,
        "allow_downgrade": arguments.force,
    }
    with connected(arguments) as connection:
        if arguments.dry_run:
            text = script_text(connection, "install.sql", options)
            print_json({"sql": text}) if arguments.json else print(text, end="")
            return
        run_script(connection, "install.sql", options)
        version, database = Client(connection).version(), connection.info.dbname
    said = {"database": database, "version": version}
    tell(arguments, said, f"rota {version} is installed in {database}")


def uninstall(arguments: argparse.Namespace) -> None:
    """Remove the schema with everything in it, after a question."""
    with connected(arguments) as connection:
        database = connection.info.dbname
        row = connection.execute("select to_regnamespace('rota') as schema").fetchone()
        if not row or row["schema"] is None:
            raise CommandError(f"rota is not installed in {database}")
        if not arguments.yes:
            confirm(f"delete rota and all its jobs from {database}")
        run_script(connection, "uninstall.sql", {})
    tell(arguments, {"database": database, "version": None}, f"rota is removed from {database}")


def tick(arguments: argparse.Namespace) -> None:
    """Do the maintenance that is due, or go on doing it."""
    if arguments.loop:
        try:
            check_range("every", arguments.every, 0.001, MAX_EVERY)
        except ValueError as error:
            raise UsageError(str(error)) from None
        set_up_log()
        run_ticker(conninfo(arguments), arguments.every)
        return
    arguments.patience = LONGEST_TICK
    with connected(arguments) as connection, answered(connection):
        report = asdict(Client(connection).tick())
    (print_json if arguments.json else print_record)(report)


def run_ticker(database: str, every: float) -> None:
    """Tick until a signal comes, SIGTERM or SIGINT; only an error of the first tick ends it."""

    async def tick_until(stopping: asyncio.Event) -> None:
        connection = Connection(database, "rota tick", ConnectionState())
        try:
            ticker, broken = Ticker(connection, every), list[str]()
            report = await ticker.tick(is_patient=False)
            name = connection.database
            logger.info("ticker started database=%s every=%s", name, every)
            while True:
                if report is not None:
                    broken = _log(report, broken)
                if await wait_for(stopping, ticker.due_at - time.monotonic()):
                    break
                report = await ticker.tick()
        finally:
            await connection.close()

    run_until_signal(tick_until)
    logger.info("ticker stopped")


def _log(report: TickReport, broken_before: list[str]) -> list[str]:
    """Log what a tick did, if anything, and which parts fail; return these."""
    did = {
        name: value
        for name, value in asdict(report).items()
        if name != "look_again_in" and type(value) is not bool
    }
    if any(did.values()):
        counts = " ".join(f"{name}={value}" for name, value in did.items() if value)
        logger.info("tick %s", counts)
    broken = [name for name, value in did.items() if value is None]
    if broken != broken_before:
        logger.warning("failing (see the server log): %s", ", ".join(broken) or "none")
    return broken


CRITICAL = 2
MAX_ROWS = 20
PATIENCE = 20.0
"""Seconds after which what is asked again and again takes a database that hangs for lost."""
LONGEST_TICK = 60.0
"""Seconds; where cron starts one each minute, those that hang would else be ever more."""
OLD_COUNT = timedelta(seconds=3)
CLEAR = "\x1b[H\x1b[J"
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
QUEUES: LiteralString = """
    select *, rota.now() - counted_at as counted_ago from rota.queue_stats order by queue
    """
PARTS: dict[str, LiteralString] = {
    "queues": QUEUES,
    "paused": """
        select pause_name, queue, job_type, set_by, paused_by, paused_at, reason,
            nullif(until, 'infinity') as until
        from rota.pauses
        where until is null or until > rota.now()
        order by pause_name
        """,
    "due_jobs": """
        with live as materialized (
            select w.queues, w.job_types from rota.worker_health as w where w.is_live
        )
        select
            j.queue, j.job_type, sum(j.jobs)::bigint as due,
            rota.now() - min(j.first_run_at) as oldest_waits,
            (
                select count(*)
                from live as w
                where j.queue = any (w.queues)
                  and (w.job_types is null or j.job_type = any (w.job_types))
            ) as workers_of_type
        from rota.job_counts() as j
        where j.status in ('queued', 'failed') and j.is_due
        group by j.queue, j.job_type
        order by min(j.first_run_at)
        """,
    "last_hour": """
        select s.*, extract(epoch from rota.now() - s.starts_at)::float / 60 as minutes
        from rota.job_stats(step => 'total') as s
        order by s.failures desc, s.attempts desc, s.queue, s.job_type
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
        by_act: dict[str, Finding] = {}
        for row in wrong:
            by_act.setdefault(row.remedy or row.evidence, row)
        told = list(by_act.values())
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


def _part(
    connection: psycopg.Connection[Any], query: LiteralString
) -> list[dict[str, Any]] | None:
    """Return the rows of one part, or None if a session has locked a table that it reads."""
    try:
        with connection.transaction():
            return connection.execute(query).fetchall()
    except psycopg.errors.LockNotAvailable:
        connection.execute("set local lock_timeout = '10ms'")  # it was waited for long enough
        return None


def _wrong(connection: psycopg.Connection[Any]) -> tuple[list[Finding], str | None]:
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
        "oldest waits": span(row["oldest_waits"] or timedelta()),
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
        "job types": _types(row["job_types"]),
    }


def _types(job_types: list[str] | None) -> str:
    if job_types is None:
        return "all"
    return " ".join(job_types) or "none: it is stopping"


SHOWN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "queues": _queue,
    "paused": _paused,
    "due_jobs": _due,
    "last_hour": _last_hour,
    "ticker": _ticker,
    "disabled_schedules": _disabled,
    "workers": _worker,
}


TOP_PARTS: dict[str, LiteralString] = {
    "now": "select rota.now() as now",
    "queues": QUEUES,
    "rates": """
        select s.*, extract(epoch from rota.now() - s.starts_at)::float / 60 as minutes
        from rota.job_stats(
            rota.now() - interval '5 minutes', step => 'total', group_by => '{queue}'
        ) as s
        """,
    "job_types": """
        select s.*, extract(epoch from rota.now() - s.starts_at)::float / 60 as minutes
        from rota.job_stats(rota.now() - interval '5 minutes', step => 'total') as s
        order by s.attempts desc, s.queue, s.job_type
        """,
    "workers": """
        select w.worker, w.last_seen_at, w.silent_for, w.concurrency,
            count(r.id) as jobs, max(r.running_for) as longest
        from rota.worker_health as w
        left join rota.running_jobs as r on r.locked_by = w.worker
        where w.is_live
        group by w.worker, w.last_seen_at, w.silent_for, w.concurrency
        order by jobs desc, w.worker
        """,
}


def top(arguments: argparse.Namespace) -> None:
    """Show what happens, anew every few seconds, or once."""
    if not (arguments.json or arguments.once) and sys.stdin.isatty() and sys.stdout.isatty():
        _go_on(arguments)
        return
    with connected(arguments) as connection:
        if arguments.json:
            print_json(ask(connection))
        else:
            print("\n".join(screen(ask(connection), connection.info.dbname)))


def _go_on(arguments: argparse.Namespace) -> None:
    """Show it until q is pressed, also while the database comes and goes."""
    arguments.patience = PATIENCE
    with _keys() as pressed:
        has_shown = is_over = False

        def show(lines: list[str]) -> bool:
            command_terminal(CLEAR)
            print(f"{chr(10).join(lines)}\n\nq quits", end="", flush=True)
            return pressed(arguments.every) in ("q", "Q", "\x03", "")

        while not is_over:
            try:
                with connected(arguments) as connection:
                    while not is_over:
                        try:
                            lines = screen(
                                ask(connection), connection.info.dbname, height() - 1
                            )
                        except psycopg.errors.LockNotAvailable:
                            lines = wrapped(lock_holder(connection), width())
                        is_over = show(lines)
                        has_shown = True
            except psycopg.OperationalError as error:
                if not has_shown:
                    raise
                is_over = show(wrapped(f"the database is lost: {one_line(error)}", width()))


def ask(connection: psycopg.Connection[Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what is to be shown, each part as rows."""
    with guarded(connection):
        return {name: connection.execute(part).fetchall() for name, part in TOP_PARTS.items()}


def screen(
    parts: dict[str, list[dict[str, Any]]], database: str, room: float = inf
) -> list[str]:
    """Return the lines of one screen, which has room for so many."""
    rates = {row["queue"]: row for row in parts["rates"]}
    queues = parts["queues"]
    total = {name: sum(row[name] for row in queues) for name in ("ready", "running", "dead")}
    oldest = max((row["oldest_ready_age"] or timedelta() for row in queues), default=None)
    per_minute = sum(rate(row) for row in rates.values())
    old = count_age(queues)
    summary = (
        f"ready {total['ready']}, oldest {span(oldest or timedelta()) or '0 s'}; "
        f"running {total['running']}; dead {total['dead']}; "
        f"{figure(per_minute)} attempts a minute; workers {len(parts['workers'])}"
    )
    lines = [
        f"rota in {database}, {parts['now'][0]['now']:%Y-%m-%d %H:%M:%S %Z}"
        f"{', ' * bool(old)}{old}",
        *wrapped(summary, width()),
        "",
    ]
    # What scrolls off the screen cannot be seen again.
    for most in range(MAX_ROWS, 0, -1):
        tables = [
            *_cut(queues, worst_of(queues, most), lambda row: _top_queue(row, rates)),
            *_cut(parts["job_types"], parts["job_types"][: (most + 1) // 2], _top_type),
            *_cut(parts["workers"], parts["workers"][: (most + 1) // 2], _top_worker),
        ]
        if len(lines) + len(tables) <= room:
            break
    lines += tables
    return [shortened(line) for line in lines[:-1]]


def _cut(
    rows: list[dict[str, Any]],
    shown: list[dict[str, Any]],
    cells: Callable[[dict[str, Any]], dict[str, Any]],
) -> list[str]:
    """Return the lines of a table of those that are shown, and how many more there are."""
    more = [f"and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else []
    return [*list_lines([cells(row) for row in shown]), *more, ""] if rows else []


def worst_of(rows: list[dict[str, Any]], most: int = MAX_ROWS) -> list[dict[str, Any]]:
    """Return the rows of which a screen has room, where the others are in less trouble."""

    def trouble(row: dict[str, Any]) -> tuple[timedelta, int]:
        ages = (row.get(name) for name in ("oldest_ready_age", "oldest_waits", "silent_for"))
        age = next(filter(None, ages), timedelta(0))
        # Those that are gone would hide the others: a worker that is killed leaves many.
        return -age if row.get("is_gone") else age, row.get("failures", row.get("dead", 0))

    return rows if len(rows) <= most else sorted(rows, key=trouble)[: -most - 1 : -1]


def count_age(queues: list[dict[str, Any]]) -> str:
    """Return how old the numbers of the queues are, unless they were just counted."""
    age = max((row["counted_ago"] or timedelta() for row in queues), default=timedelta())
    return f"counted {span(age)} ago" if age > OLD_COUNT else ""


def rate(row: dict[str, Any]) -> float:
    """Return how many attempts there were a minute."""
    return float(row["attempts"] / max(row["minutes"], 1.0))


def figure(number: float) -> str:
    """Return a number with three digits, or all that it has before its point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def brief(length: timedelta | None) -> str:
    """Return a length of time in its largest unit."""
    if length is None:
        return ""
    seconds = length.total_seconds()
    if seconds < 1:
        return f"{figure(seconds * 1000)} ms"
    return f"{seconds:.3g} s" if seconds < 100 else span(length)


def share(row: dict[str, Any]) -> str:
    """Return which part of the attempts failed."""
    return f"{100 * row['failures'] / row['attempts']:.3g} %" if row["attempts"] else ""


def _times(row: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "a min": figure(rate(row)) if row else "",
        "failed": share(row) if row else "",
        "wait p95": brief(row["wait_p95"]) if row else "",
        "run p95": brief(row["run_p95"]) if row else "",
    }


def _top_queue(row: dict[str, Any], rates: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        # Beside the name: a last column would be cut off on a narrow screen.
        "queue": row["queue"] + (" (paused)" if row["is_paused"] else ""),
        "ready": row["ready"],
        "oldest": span(row["oldest_ready_age"]) if row["oldest_ready_age"] else "",
        "run": row["running"],
        "retry": row["retrying"],
        "dead": row["dead"],
        **_times(rates.get(row["queue"])),
    }


def _top_type(row: dict[str, Any]) -> dict[str, Any]:
    return {"job type": row["job_type"], "queue": row["queue"], **_times(row)}


def _top_worker(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "worker": row["worker"],
        "jobs": "/".join(str(n) for n in (row["jobs"], row["concurrency"]) if n is not None),
        "longest": brief(row["longest"]),
        "seen": f"{span(row['silent_for']) or '0 s'} ago",
    }


@contextmanager
def _keys() -> Iterator[Any]:
    """Read single keys, and give the terminal back as it was."""
    import termios  # there is none on Windows
    import tty

    before = termios.tcgetattr(sys.stdin)

    def pressed(seconds: float) -> str | None:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else None

    try:
        tty.setcbreak(sys.stdin)
        command_terminal(ENTER)
        sys.stdout.flush()
        yield pressed
    finally:
        command_terminal(LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def doctor(arguments: argparse.Namespace) -> int:
    """Say what is wrong, the worst first; the exit code says how bad it is."""
    if arguments.check:  # of a monitor, which would learn nothing
        arguments.patience = PATIENCE
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
        more = f"; other findings: {len(wrong) - 1}" if len(wrong) > 1 else ""
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
                    f"{row.promise}: {row.violations} of {row.examined} violate it"
                    + (f", such as: {row.example}" if row.example else ""),
                    None,
                )
                for row in verdicts
            ]
        )
    return int(any(row.violations for row in verdicts))
