"""The file of a process: a line for each call as it begins, and one when it is answered.

Each line is one write at the end of the file, so a process that is killed has written what it
began: a call without an answer is unknown, it may have happened or not.  The times are those of
CLOCK_MONOTONIC, which all processes of a machine share.  A call in a transaction counts only
when its commit was answered.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus
from psycopg.types.json import Jsonb

from rota import RotaError

# What a checker has no use for, and what nobody should find in a file.
HIDDEN = frozenset({"payload", "stage_input", "result", "results", "stack", "host", "job"})
EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
MICROSECOND = timedelta(microseconds=1)
# The columns of each kind of row.
NAMES: dict[Any, tuple[str, ...]] = {}
AnyConnection = Connection[Any] | AsyncConnection[Any]


class Transaction:
    """An open transaction, the calls in it, and where its savepoints are among them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[int] = []
        self.savepoints: list[tuple[bytes, int]] = []


class Recorder:
    """Writes the lines of one process; threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._file = -1
        self._opening = threading.Lock()
        self._calls, self._numbers = count(1), count(1)
        self._open: WeakKeyDictionary[AnyConnection, Transaction] = WeakKeyDictionary()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line, in one piece."""
        if self._pid != os.getpid():
            self._begin_file()
        os.write(self._file, json.dumps(line, default=plain).encode() + b"\n")

    def begin(
        self, connection: AnyConnection, function: str, arguments: Mapping[str, Any]
    ) -> int:
        """Note that a call is about to be sent; return its number."""
        number = next(self._calls)
        line: dict[str, Any] = {
            "call": number,
            "function": function,
            "began": time.monotonic_ns(),
            "arguments": shown(arguments),
        }
        if not self._is_in_transaction(connection):
            self._open.pop(connection, None)
        else:
            transaction = self._transaction(connection)
            transaction.calls.append(number)
            line["transaction"] = transaction.number
        self.write(line)
        return number

    def answer(self, call: int, rows: list[Any]) -> None:
        """Note what a call returned."""
        ended = time.monotonic_ns()
        self.write({"call": call, "ended": ended, "rows": [shown_row(row) for row in rows]})

    def fail(self, call: int, error: BaseException) -> None:
        """Note that a call was refused, or that nobody knows."""
        ended, code = time.monotonic_ns(), refusal(error)
        how = {"error": code} if code else {"lost": f"{type(error).__name__}: {error}"[:200]}
        self.write({"call": call, "ended": ended, **how})

    def begin_command(self, connection: AnyConnection, command: bytes) -> Transaction | None:
        """Note what is sent to the transaction of a connection, if that ends some of it."""
        word, _, name = command.partition(b" ")
        transaction = self._open.get(connection)
        if word == b"SAVEPOINT":
            transaction = self._transaction(connection)
            transaction.savepoints.append((name, len(transaction.calls)))
        if transaction is None:
            return None
        if word == b"ROLLBACK" and name.startswith(b"TO "):
            names = [point for point, _ in transaction.savepoints]
            place = transaction.savepoints[names.index(name[3:])][1]
            self.write({"undone": transaction.calls[place:]})
            del transaction.calls[place:]
        if word not in (b"COMMIT", b"ROLLBACK") or name:
            return None
        del self._open[connection]
        if word == b"COMMIT":
            now = time.monotonic_ns()
            self.write({"transaction": transaction.number, "commits": now})
        return transaction

    def end_transaction(self, transaction: Transaction, outcome: str) -> None:
        """Note that a transaction ended by ``commit`` or ``rollback``, or was ``lost``."""
        now = time.monotonic_ns()
        self.write({"transaction": transaction.number, "ended": now, "outcome": outcome})

    def _is_in_transaction(self, connection: AnyConnection) -> bool:
        status = connection.pgconn.transaction_status
        if status == TransactionStatus.ACTIVE:  # by another thread, and then as it was before
            return connection in self._open or not connection.autocommit
        return status != TransactionStatus.IDLE or not connection.autocommit

    def _transaction(self, connection: AnyConnection) -> Transaction:
        if connection not in self._open:
            self._open[connection] = Transaction(next(self._numbers))
        return self._open[connection]

    def _begin_file(self) -> None:
        with self._opening:
            if self._pid == os.getpid():
                return
            now = time.monotonic_ns()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            path = self._folder / f"calls-{os.getpid()}-{now}.ndjson"
            self._file = os.open(path, flags, 0o600)
            self._pid = os.getpid()
        self.write({"process": self._pid, "name": " ".join(sys.argv)[:200], **both_clocks()})


def both_clocks() -> dict[str, int]:
    """Return this moment on the clock of the calls and on that of the database."""
    return {"at": time.monotonic_ns(), "wall": time.time_ns() // 1000}


def plain(value: Any) -> Any:
    """Turn a value into JSON: a moment into microseconds, a duration into seconds."""
    if isinstance(value, datetime):
        return (value - EPOCH) // MICROSECOND
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Jsonb):
        return value.obj
    return float(value) if isinstance(value, Decimal) else str(value)


def shown(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that carry data of the user."""
    told = {name: value for name, value in arguments.items() if name not in HIDDEN}
    if isinstance(jobs := told.get("jobs"), Jsonb):
        told["jobs"] = [shown(job) for job in jobs.obj]
    elif isinstance(jobs, str):  # what a forwarder has taken, as it came
        del told["jobs"]
    if isinstance(endings := told.get("endings"), Jsonb):
        # The worker has them as texts.
        parts = (json.loads(e) if isinstance(e, str) else e for e in endings.obj)
        told["endings"] = [shown(ending) for ending in parts]
    if isinstance(error := told.get("error"), str):
        told["error"] = error[:100]
    return told


def shown_row(row: Any) -> Any:
    """Return what is told of a row, or of a single value."""
    if isinstance(row, tuple):
        names = _names(type(row))
        return {n: v for n, v in zip(names, row, strict=True) if n and v is not None}
    if dataclasses.is_dataclass(row):
        return {name: getattr(row, name) for name in _names(type(row)) if name}
    return row


def _names(kind: Any) -> tuple[str, ...]:
    if kind not in NAMES:
        fields = getattr(kind, "_fields", None) or list(kind.__dataclass_fields__)
        NAMES[kind] = tuple("" if name in HIDDEN else name for name in fields)
    return NAMES[kind]


def refusal(error: BaseException) -> str:
    """Return the SQLSTATE by which the server refused, or nothing if it may have done it."""
    if isinstance(error, RotaError):
        return error.sqlstate
    if not isinstance(error, psycopg.Error):
        return ""
    if code := error.sqlstate:
        # The server, or the line to it, went away: perhaps after the commit.
        return "" if code[:2] == "08" or code[:4] == "57P0" else code
    # What cannot be sent was not sent.
    return "" if isinstance(error, psycopg.OperationalError) else type(error).__name__
