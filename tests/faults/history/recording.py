"""Write down every call of this process, and how it was answered.

    record(folder)      from now on; or set ROTA_HISTORY and call record_if_asked()
                        (by_database: what goes to each in a folder of its name)
    mark(kind, ...)     a moment of the whole run, such as the end of the faults

All calls of rota go through one method of each client, and all ends of transactions through one
of psycopg: these are wrapped, and nothing of the product is changed.  A transaction has to be
ended by psycopg (`transaction()`, `commit()`, `rollback()`), not by a statement of one's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from faults.history.recorder import AnyConnection, Recorder, both_clocks, refusal
from rota import AsyncClient, Client
from rota.client.statement import prepared

VARIABLE = "ROTA_HISTORY"
SYNC, ASYNC = Client._execute, AsyncClient._execute
COMMANDS = {kind: kind._exec_command for kind in (Connection, AsyncConnection)}
_recorder: Recorder | None = None
Choice = Callable[[AnyConnection], Recorder]


def record(folder: Path | str, *, by_database: bool = False) -> None:
    """Write down all calls of this process and its forks, each in a file of the folder."""
    global _recorder
    _recorder = recorder = Recorder(Path(folder))
    choose: Choice = _by_database(Path(folder)) if by_database else lambda connection: recorder
    Client._execute = _recorded(SYNC, choose)  # type: ignore[method-assign]
    AsyncClient._execute = _recorded_async(ASYNC, choose)  # type: ignore[method-assign]
    for kind, command in COMMANDS.items():
        kind._exec_command = _recorded_command(command, choose)  # type: ignore[method-assign]


def _by_database(folder: Path) -> Choice:
    recorders: dict[str, Recorder] = {}
    chosen: WeakKeyDictionary[AnyConnection, Recorder] = WeakKeyDictionary()

    def choose(connection: AnyConnection) -> Recorder:
        recorder = chosen.get(connection)
        if recorder is None:
            name = "" if connection.closed else connection.info.dbname
            # Of two threads that meet a database at once both write to the same recorder.
            recorder = recorders.setdefault(name, Recorder(folder / name))
            chosen[connection] = recorder
        return recorder

    return choose


def record_if_asked() -> None:
    """Do so if the environment names a folder."""
    if folder := os.environ.get(VARIABLE):
        record(folder)


def stop_recording() -> None:
    """Write down nothing more in this process."""
    Client._execute = SYNC  # type: ignore[method-assign]
    AsyncClient._execute = ASYNC  # type: ignore[method-assign]
    for kind, command in COMMANDS.items():
        kind._exec_command = command  # type: ignore[method-assign]


def mark(kind: str, **facts: Any) -> None:
    """Note a moment of the run; ``calm`` with lease and sweep in seconds ends the faults."""
    assert _recorder is not None, "record() comes first"
    _recorder.write({"mark": kind, **both_clocks(), **facts})


def _recorded(execute: Callable[..., list[Any]], choose: Choice) -> Callable[..., list[Any]]:
    @wraps(execute)
    def run(
        client: Client, row: type[Any] | None, function: str, arguments: Mapping[str, Any]
    ) -> list[Any]:
        recorder = choose(client.connection)
        call = recorder.begin(client.connection, function, prepared(arguments))
        try:
            rows = execute(client, row, function, arguments)
        except BaseException as error:
            recorder.fail(call, error)
            raise
        recorder.answer(call, rows)
        return rows

    return run


def _recorded_async(execute: Callable[..., Any], choose: Choice) -> Callable[..., Any]:
    @wraps(execute)
    async def run(
        client: AsyncClient, row: type[Any] | None, function: str, arguments: Mapping[str, Any]
    ) -> list[Any]:
        recorder = choose(client.connection)
        call = recorder.begin(client.connection, function, prepared(arguments))
        try:
            rows: list[Any] = await execute(client, row, function, arguments)
        except BaseException as error:
            recorder.fail(call, error)
            raise
        recorder.answer(call, rows)
        return rows

    return run


def _recorded_command(send: Callable[..., Any], choose: Choice) -> Callable[..., Any]:
    @wraps(send)
    def run(
        connection: AnyConnection, command: Any, *rest: Any, **options: Any
    ) -> Generator[Any, Any, Any]:
        text = command.encode() if isinstance(command, str) else command
        text = text if isinstance(text, bytes) else text.as_bytes(connection)
        is_failed = connection.pgconn.transaction_status == TransactionStatus.INERROR
        recorder = choose(connection)
        transaction = recorder.begin_command(connection, text)
        outcome = "lost" if text == b"COMMIT" and not is_failed else "rollback"
        try:
            result = yield from send(connection, command, *rest, **options)
            # The commit of what has failed is a rollback, and says so.
            outcome = "commit" if result.command_status == b"COMMIT" else "rollback"
            return result
        except psycopg.Error as error:
            if refusal(error):
                outcome = "rollback"
            raise
        finally:
            if transaction:
                recorder.end_transaction(transaction, outcome)

    return run
