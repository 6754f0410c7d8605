"""What the commands share: how they connect, and how they print."""

from __future__ import annotations

import argparse
import getpass
import json
import logging
import os
import re
import select
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from inspect import signature
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any, LiteralString, TextIO

import psycopg
from psycopg import Connection
from psycopg.pq import Format
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from ..client.connecting import connect, named, one_line, spelled_for, words_of
from ..client.statement import forgive
from ..client.sync_client import Client
from ..exceptions import (
    BadScheduleError,
    JobFinishedError,
    JobRunningError,
    RotaError,
    UnknownScheduleError,
)
from ..worker.events import JsonFormatter

logger = logging.getLogger("rota")

LOCK_TIMEOUT = "set local lock_timeout = '3s'"
LOCKED_THIS = "another session has locked this"
OLDEST: LiteralString = """
    select format('pid %s (%s)', a.pid, concat_ws(', ', 'role ' || a.usename,
        'application ' || nullif(a.application_name, ''),
        a.state || ' for ' || date_trunc('second', now() - a.state_change))) as who
    from pg_stat_activity as a
    cross join lateral (
        select bool_or(l.mode = 'AccessExclusiveLock') as stops_all
        from pg_locks as l join pg_class as c on c.oid = l.relation
        where l.pid = a.pid and c.relnamespace = to_regnamespace('rota')
          and (l.granted and l.mode <> 'AccessShareLock' or l.mode = 'AccessExclusiveLock')
        having count(*) > 0
    ) as h
    -- In a copy of this database the tables may have the same numbers.
    where a.datname = current_database()
      and a.pid <> pg_backend_pid() and a.xact_start is not null
    -- Who changes a table stops all others as soon as it waits for its turn to do so.
    order by a.wait_event_type is not distinct from 'Lock' and not h.stops_all, a.xact_start
    limit 1
    """
OWN_PATH = "set local search_path = pg_catalog, pg_temp"
"""Look into no schema that others may fill, in a transaction: a pooler lends sessions."""
NAMES = ("DATABASE_URL", "PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE")
LEFT_BEHIND = 3
"""The exit code of a worker that has left a handler, or a thread of a job, behind."""
MAKES_ROOM = 4
"""What a process of --processes ends with that wants a successor at once."""
MAX_LOG = 4_000_000
"""So many bytes of the log may wait for whoever reads it."""
LAST_LINES = 1.0
"""Seconds that they may take at the end of a process."""
FAR = timedelta(days=300)
MAX_WIDTH = 48
MAX_TEXT = 2000
NAMING = (
    "scope", "key", "name", "queue", "queues", "job_type", "job type", "worker", "limit",
    "what", "answer",
)  # fmt: skip
"""Columns of which a value is what another command wants to be told, or an error, and so is
cut only where the line has no room for the other columns."""
LEAST_NAME, LEAST_LAST = 14, 24
"""The columns of the screen that a long name, and the last column, keep in any case."""


UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What moves the cursor, changes colours, turns the direction of writing or cannot be seen."""


def printable(text: str) -> str:
    """Return a text with what a terminal would obey, or not show, as escapes."""
    if text.isprintable():  # as nearly all are, and this is a tenth of the work
        return text
    return UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


class InFront:
    """A stream in front of another one, *raw*, which answers what is not about writing."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def close(self) -> None:
        """Do nothing: a job that closes it, closes not the other one."""

    def writelines(self, texts: Iterable[str]) -> None:
        """Write them one by one, as this stream writes."""
        for text in texts:
            self.write(text)


class PlainText(InFront):
    """A stream that a terminal shows and does not obey, whatever texts come from jobs."""

    def write(self, text: str) -> int:
        """Write it with escapes, also of what the encoding of the terminal lacks."""
        encoding = self.raw.encoding or "utf-8"
        self.raw.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)


def command_terminal(sequence: str) -> None:
    """Send the terminal what it shall obey."""
    getattr(sys.stdout, "raw", sys.stdout).write(sequence)


class CommandError(Exception):
    """A command cannot do what it was asked for: why, what helps, and the exit code."""

    code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UnknownOutcomeError(CommandError):
    """The connection was lost at the commit, so nothing here knows whether it was done."""

    def __init__(self, error: Exception, before: str = "") -> None:
        self.error = error
        message = f"outcome unknown, the answer was lost: {one_line(error)}"
        super().__init__(message + before, "Check whether it was done before you repeat it")


class UsageError(CommandError):
    """The command was used wrongly."""

    code = 2


def given_to(method: Callable[..., Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are called as the arguments of a method, if they are given."""
    options = {name: getattr(arguments, name, None) for name in signature(method).parameters}
    return {name: value for name, value in options.items() if value is not None}


def url_of(host: str, port: int) -> str:
    """Return the address of a server of ours."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def conninfo(arguments: argparse.Namespace) -> str:
    """Return the connection string: the option, else DATABASE_URL, else libpq's defaults."""
    return _checked(arguments.database_url or os.environ.get("DATABASE_URL", ""))


def conninfos(arguments: argparse.Namespace) -> list[str]:
    """Return the connection strings of --database and of the file of --databases."""
    words = list(arguments.database or [])
    if arguments.databases:
        try:
            text = Path(arguments.databases).read_text()
        except OSError as error:
            raise UsageError(f"cannot read {arguments.databases}: {error.strerror}") from None
        lines = [line.strip() for line in text.splitlines()]
        named_there = [line for line in lines if line and not line.startswith("#")]
        if not named_there:
            raise UsageError(f"{arguments.databases} names no database")
        words += named_there
    return [_checked(word) for word in words]


def _checked(word: str) -> str:
    try:
        words_of(word)
    except psycopg.ProgrammingError as error:
        raise UsageError(str(error)) from None
    return named(word)


def hint_to_connect(arguments: argparse.Namespace) -> str | None:
    """Return what helps when no database was named, and none could be reached."""
    given = [
        getattr(arguments, name, None)
        for name in ("database_url", "database", "databases", "front")
    ]
    if any(given) or any(os.environ.get(name) for name in NAMES):
        return None
    return "Name the database: -d postgresql://user@host/database, or DATABASE_URL"


class BinaryCursor(psycopg.Cursor[Any]):
    """Reads times whatever DateStyle and IntervalStyle are: psycopg knows ISO texts only."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.format = Format.BINARY


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[Connection[Any]]:
    """Open a connection whose rows are dicts."""
    with connect(conninfo(arguments), "rota cli") as connection:
        connection.patience = getattr(arguments, "patience", inf)
        connection.row_factory = dict_row
        connection.cursor_factory = BinaryCursor
        set_json_loads(_loads, connection)
        forgive(connection.adapters)
        yield connection


def _loads(text: str | bytes) -> Any:
    """Return what JSON says, a number of more digits than Python reads as its text."""
    return json.loads(text, parse_int=lambda word: int(word) if len(word) < 4300 else word)


@contextmanager
def asking(arguments: argparse.Namespace) -> Iterator[Connection[Any]]:
    """Open a connection for questions, which wait for no locked table for longer than acts."""
    with connected(arguments) as connection, guarded(connection):
        yield connection


@contextmanager
def guarded(connection: Connection[Any], *, is_dry_run: bool = False) -> Iterator[None]:
    """Have a transaction that waits for no lock for longer, and runs nothing of others."""
    with connection.transaction(force_rollback=is_dry_run):
        connection.execute(LOCK_TIMEOUT)
        connection.execute(OWN_PATH)
        yield


def lock_holder(connection: Connection[Any]) -> str:
    """Say which session may have locked what a statement has waited for."""
    with guarded(connection):
        found = connection.cursor(row_factory=dict_row).execute(OLDEST).fetchone()
    return LOCKED_THIS + (f": the oldest that writes there is {found['who']}" if found else "")


@contextmanager
def answered(connection: Connection[Any]) -> Iterator[None]:
    """Say that nobody knows what became of a call, a transaction of its own, without answer."""
    try:
        yield
    except psycopg.OperationalError as error:
        if connection.closed:
            raise UnknownOutcomeError(error) from error
        raise


@contextmanager
def acting(connection: Connection[Any], *, is_dry_run: bool = False) -> Iterator[Client]:
    """Lend a client that changes all or nothing, as the user of this process.

    Where the answer to its commit is lost, say that nobody knows.  An operator who has gone
    away must not be obeyed by a call that still waited.
    """
    is_committing = False
    try:
        with guarded(connection, is_dry_run=is_dry_run):
            with suppress(OSError, KeyError):  # a process may have no user that has a name
                name = spelled_for(connection, getpass.getuser())
                connection.execute("select set_config('rota.actor', %s, true)", [name])
            yield Client(connection)
            is_committing = not is_dry_run
    except psycopg.OperationalError as error:
        if is_committing and connection.closed:
            raise UnknownOutcomeError(error) from error
        raise


@contextmanager
def changing(arguments: argparse.Namespace) -> Iterator[Connection[Any]]:
    """Open a connection in a transaction, which a dry run takes back."""
    arguments.is_change = True  # what reads first still needs the rights to change
    with connected(arguments) as connection, acting(connection, is_dry_run=arguments.dry_run):
        yield connection


def confirm(what: str) -> None:
    """Ask whether to do it, on stderr, which is no document and not kept back."""
    if not sys.stdin.isatty():
        raise UsageError(f"this would {what}: confirm it with --yes")
    print(f"{printable(what)}? [y/N] ", end="", file=sys.stderr, flush=True)
    if input().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was done")


class LogHandler(logging.Handler):
    """Has a thread write the log to stderr: whoever reads that keeps nobody waiting.

    What is too much is dropped, and the log says so when there is room again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._file = os.dup(2)  # a job may close sys.stderr
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._added = self._written = self._lost = 0
        self._process = os.getpid()
        threading.Thread(target=self._work, name="rota-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a line written; a process that a job has forked does it without the thread."""
        try:
            text = printable(self.format(record))
        except Exception:
            self.handleError(record)
            return
        line = f"{text}\n".encode(self._encoding, "backslashreplace")
        if os.getpid() != self._process:
            self._write(line)
        elif self._added - self._written > MAX_LOG:
            self._lost += 1
        else:
            self._added += len(line)
            self._lines.put(line)

    def close(self) -> None:
        """Wait until all is written, but not for long."""
        until = time.monotonic() + LAST_LINES
        has_thread = os.getpid() == self._process
        while has_thread and self._written < self._added and time.monotonic() < until:
            time.sleep(0.001)
        super().close()

    def _work(self) -> None:
        while line := self._lines.get():
            self._write(line)
            self._written += len(line)
            if self._lost and self._lines.empty():
                lost, self._lost = self._lost, 0
                logger.warning("%s lines of the log are lost: nobody read them in time", lost)

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # nobody reads it any more
            while line:
                try:
                    line = line[os.write(self._file, line) :]
                except BlockingIOError:  # a program that shares it, such as ssh, wants that
                    select.select([], [self._file], [])


class TextFormatter(logging.Formatter):
    """Formats a record as text, which is mostly of the same second as the one before."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the moment of a record, as it is by default."""
        return f"{_second(int(record.created))},{int(record.msecs):03}"


@lru_cache(1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def set_up_log(log_format: str = "text", log_level: str = "info") -> None:
    """Let the process write its log to stderr, unless it has a log already."""
    logging.captureWarnings(True)  # such as that a handler has not awaited a call
    if logging.root.handlers:
        return
    handler = LogHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=log_level.upper(), handlers=[handler])


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2, default=_plain))


def tell(arguments: argparse.Namespace, document: Any, text: object) -> None:
    """Print what was done or found, as JSON where that is wanted, or as text."""
    print_json(document) if arguments.json else print(text)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as aligned columns."""
    print("\n".join(table_lines(rows)))


def print_list(rows: Sequence[Mapping[str, Any]], whole: int = 0) -> None:
    """Print rows as aligned columns that fit on the screen."""
    print("\n".join(list_lines(rows, whole)))


def tell_of_more(shown: int, limit: int) -> None:
    """Say of a list that is as long as it may be that it may leave something out."""
    if shown == limit:
        print("there may be more: --limit")


def list_lines(rows: Sequence[Mapping[str, Any]], whole: int = 0) -> list[str]:
    """Return aligned columns, of which the last takes what is left of the line.

    A pipe gets whole lines, for grep to find every word.  On a screen, long names are cut in
    their middle, since names often begin alike or end alike, and the numbers beside them
    matter more.  So many columns, from the first on, are never cut.
    """
    if not rows:
        return ["(none)"]
    table = _cells(rows)
    for row, cells in zip(rows, table[1:], strict=True):
        *_, (name, value) = row.items()
        cells[-1] = _cell(name, value, MAX_TEXT)
    widths = _widths(table)
    room = max(width(sys.maxsize), sum(w + 2 for w in widths[:whole]) + 1)
    widths[-1] = min(widths[-1], LEAST_LAST)
    names = [n for n, name in enumerate(rows[0]) if n >= whole and name in NAMING]
    while sum(w + 2 for w in widths if w) - 2 > room and (
        long := [n for n in names if widths[n] > LEAST_NAME]
    ):
        widths[max(long, key=widths.__getitem__)] -= 1
    for cells in table:
        cells[:-1] = map(_cut_within, cells[:-1], widths)
    return [shortened(line, room) for line in aligned(table)]


def _cut_within(text: str, room: int) -> str:
    """Return a text without what is too much of its middle."""
    head, tail = text, ""
    if columns(text) > room:
        head, tail = text[: room - room // 3], text[-(room // 3) :]
        while columns(head) + columns(tail) >= room:
            head, tail = (head[:-1], tail) if len(head) > len(tail) else (head, tail[1:])
        head += "…"
    return head + tail


def shortened(line: str, most: int | None = None) -> str:
    """Return what of a line has room on the screen, if there is one, or in so many columns."""
    room = width(sys.maxsize) if most is None else most
    if columns(line) <= room:
        return line
    line = line[:room]
    while columns(line) >= room:
        line = line[:-1]
    return f"{line}…"


def wrapped(text: str, room: int) -> list[str]:
    """Return the lines of a text, each of at most so many columns of the screen."""
    # For textwrap each character is one column: a wide one gets another before it, which may
    # stay behind at the end of the line.
    wide = "".join("\0" * (columns(c) - 1) + c for c in text)
    lines = textwrap.wrap(wide, room - (wide != text), break_on_hyphens=False)
    return [line.replace("\0", "") for line in lines]


def columns(text: str) -> int:
    """Return how many columns a terminal takes for a text."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "FW")
        for c in text
    )


def short(moment: datetime | None) -> str:
    """Return a time, with the zone that it is in: that of the session."""
    return f"{day(moment)} {moment:%H:%M:%S %Z}" if moment else ""


def day(moment: datetime) -> str:
    """Return a date, with its year if it would pass for one of the coming months."""
    is_far = moment - datetime.now(moment.tzinfo) > FAR
    return moment.strftime("%Y-%m-%d" if is_far else "%m-%d")


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the head of a table and one line for each row."""
    return aligned(_cells(rows)) if rows else ["(none)"]


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [list(rows[0]), *([_cell(*item) for item in row.items()] for row in rows)]


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    """Return how wide each column is: 0 if it is empty in all rows."""
    return [max(map(columns, column)) for column in zip(*table, strict=True)]


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, without the columns that are empty in all."""
    widths = _widths(table)
    return [
        "  ".join(
            cell + " " * (w - columns(cell)) for cell, w in zip(cells, widths, strict=True) if w
        ).rstrip()
        for cells in table
    ]


def print_record(row: Mapping[str, Any]) -> None:
    """Print one row as a list of names and values."""
    width = max(map(len, row))
    for name, value in row.items():
        text = text_of(value).replace("\n", "\\n")
        if len(text) > MAX_TEXT:
            text = f"{text[:MAX_TEXT]}… ({len(text)} characters; all: --json)"
        print(f"{name.ljust(width)}  {text}".rstrip())


def print_findings(findings: Sequence[tuple[str, str, str | None]]) -> None:
    """Print a word, what it is about and the SQL that helps, as paragraphs under each other."""
    margin = max((len(word) for word, _, _ in findings), default=0) + 2
    for word, text, remedy in findings:
        for number, line in enumerate(wrapped(text, max(width() - margin, 20))):
            print(f"{'' if number else word:<{margin}}{line}")
        if remedy:  # whole, so that it can be pasted
            print(f"{'':<{margin}}{remedy}")


def width(otherwise: int = 80) -> int:
    """Return how many columns the terminal has, or COLUMNS tells."""
    return shutil.get_terminal_size((otherwise, 24)).columns


def height() -> int:
    """Return how many lines the terminal has."""
    return shutil.get_terminal_size().lines


def _cell(name: str, value: Any, most: int = MAX_WIDTH) -> str:
    text = printable(" ".join(text_of(value).split()))
    return text if name in NAMING else shortened(text, most)


def text_of(value: Any) -> str:
    """Return a value as it is shown."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        is_short = 0 < seconds < 1
        return (
            f"{seconds * 1000:.0f} ms" if is_short else str(timedelta(seconds=round(seconds)))
        )
    if isinstance(value, dict | list):
        return json.dumps(value, default=_plain)
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    return str(value)


_HINTS: dict[type[RotaError], str] = {
    JobFinishedError: "To run it again: rota retry {job_id}",
    JobRunningError: "Wait, or take it from its worker: rota retry {job_id} --force",
    UnknownScheduleError: "To list them: rota schedule list",
}


def hint_for(error: RotaError, arguments: argparse.Namespace) -> str | None:
    """Return a hint that names commands where that of the database names functions."""
    name = getattr(arguments, "name", None)
    if (
        isinstance(error, BadScheduleError)
        and name
        and not getattr(arguments, "schedule", None)
    ):
        return f"Correct it with: rota schedule add {name} ..."
    hint = _HINTS.get(type(error))
    return hint.format(job_id=getattr(arguments, "job_id", "ID")) if hint else error.hint
