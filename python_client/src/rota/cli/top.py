"""The command ``rota top``: what happens now, again and again until q is pressed."""

from __future__ import annotations

import argparse
import select
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
from psycopg import Connection

from ..client.connecting import one_line
from .output import (
    LOCK_TIMEOUT,
    command_terminal,
    connected,
    lock_holder,
    print_json,
    shortened,
    span,
    table_lines,
    width,
)

MAX_ROWS = 20
OLD_COUNT = timedelta(seconds=3)
CLEAR = "\x1b[H\x1b[J"
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
PARTS: dict[str, LiteralString] = {
    "now": "select rota.now() as now",
    "queues": """
        select *, rota.now() - counted_at as counted_ago from rota.queue_stats order by queue
        """,
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
        limit 10
        """,
    "workers": """
        select w.worker, w.last_seen_at, w.silent_for,
            count(r.id) as jobs, max(r.running_for) as longest
        from rota.worker_health as w
        left join rota.running_jobs as r on r.locked_by = w.worker
        where w.is_live
        group by w.worker, w.last_seen_at, w.silent_for
        order by jobs desc, w.worker
        limit 10
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
                            lines = screen(ask(connection), connection.info.dbname)
                        except psycopg.errors.LockNotAvailable:
                            lines = textwrap.wrap(lock_holder(connection), width())
                        is_over = show(lines)
                        has_shown = True
            except psycopg.OperationalError as error:
                if not has_shown:
                    raise
                is_over = show(
                    textwrap.wrap(f"the database is lost: {one_line(error)}", width())
                )


def ask(connection: Connection[Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what is to be shown, each part as rows."""
    with connection.transaction():
        connection.execute(LOCK_TIMEOUT)
        return {name: connection.execute(part).fetchall() for name, part in PARTS.items()}


def screen(parts: dict[str, list[dict[str, Any]]], database: str) -> list[str]:
    """Return the lines of one screen."""
    rates = {row["queue"]: row for row in parts["rates"]}
    queues = parts["queues"]
    total = {name: sum(row[name] for row in queues) for name in ("ready", "running", "dead")}
    oldest = max((row["oldest_ready_age"] or timedelta() for row in queues), default=None)
    per_minute = sum(rate(row) for row in rates.values())
    old = count_age(queues)
    lines = [
        f"rota in {database}, {parts['now'][0]['now']:%Y-%m-%d %H:%M:%S %Z}"
        f"{', ' * bool(old)}{old}",
        f"ready {total['ready']}, oldest {span(oldest or timedelta()) or '0 s'}; "
        f"running {total['running']}; dead {total['dead']}; "
        f"{figure(per_minute)} attempts a minute; workers {len(parts['workers'])}",
        "",
    ]
    shown: list[list[dict[str, Any]]] = [
        [_queue(row, rates.get(row["queue"])) for row in worst_of(queues)],
        [_type(row) for row in parts["job_types"]],
        [_worker(row) for row in parts["workers"]],
    ]
    for rows in shown:
        if rows:
            lines += [*table_lines(rows), ""]
    return [shortened(line) for line in lines[:-1]]


def worst_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of which a screen has room, where the others are in less trouble."""

    def trouble(row: dict[str, Any]) -> tuple[timedelta, int]:
        age = row.get("oldest_ready_age") or row.get("silent_for") or timedelta(0)
        # Those that are gone would hide the others: a worker that is killed leaves many.
        return -age if row.get("is_gone") else age, row.get("dead", 0)

    return rows if len(rows) <= MAX_ROWS else sorted(rows, key=trouble)[: -MAX_ROWS - 1 : -1]


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


def _queue(row: dict[str, Any], rates: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "queue": row["queue"][:16],
        "ready": row["ready"],
        "oldest": span(row["oldest_ready_age"]) if row["oldest_ready_age"] else "",
        "run": row["running"],
        "retry": row["retrying"],
        "dead": row["dead"],
        **_times(rates),
        "": "paused" if row["is_paused"] else "",
    }


def _type(row: dict[str, Any]) -> dict[str, Any]:
    return {"job type": row["job_type"][:24], "queue": row["queue"][:16], **_times(row)}


def _worker(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "worker": row["worker"],
        "jobs": row["jobs"],
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
