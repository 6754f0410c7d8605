"""Two sessions, one interleaving, no sleeping.

A race test drives its sessions step by step.  A statement that must wait is started in a
thread, and the test goes on when the server itself reports that it waits for a lock:

    with a.transaction():
        a.fetch("update ...")
        pending = b.start("update ...")
        pending.wait_blocked()
    assert pending.result() == [...]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import QueryNoTemplate
from psycopg.pq import ExecStatus

Params = Sequence[Any] | Mapping[str, Any] | None


def call(function: str, /, **arguments: Any) -> tuple[sql.Composed, dict[str, Any]]:
    """Return the query and the parameters of a call, to be given to `fetch` or `start`."""
    named = [
        sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name))
        for name in arguments
    ]
    query = sql.SQL("select * from rota.{}({})")
    return query.format(sql.Identifier(function), sql.SQL(", ").join(named)), arguments


def keeping(*tables: str) -> str:
    """Return the statements that keep what is in these tables, for a race to begin with."""
    return "create schema kept;" + "".join(
        f"create table kept.{table} as table rota.{table};" for table in tables
    )


def restoring(*tables: str) -> str:
    """Return the statements that bring it back."""
    return "".join(
        f"delete from rota.{table};"
        f"insert into rota.{table} overriding system value table kept.{table};"
        for table in tables
    )


class Session:
    """One connection in autocommit, with a thread of its own for what must wait."""

    def __init__(
        self, connection: psycopg.Connection[Any], observer: psycopg.Connection[Any]
    ) -> None:
        self.connection = connection
        self.pid = connection.info.backend_pid
        self._observer = observer
        self._executor = ThreadPoolExecutor(max_workers=1)

    def transaction(self) -> AbstractContextManager[psycopg.Transaction]:
        """Open a transaction for the length of a `with` block."""
        return self.connection.transaction()

    def fetch(self, query: QueryNoTemplate, params: Params = None) -> list[Any]:
        """Run a statement to its end and return its rows, if it has any."""
        # What has no values goes in one message, so that a tick is alone in its transaction.
        prepare = None if params else False
        cursor = self.connection.execute(query, params or None, prepare=prepare)
        # Rows without a column have no description, and are rows.
        is_query = cursor.pgresult and cursor.pgresult.status == ExecStatus.TUPLES_OK
        return cursor.fetchall() if is_query else []

    def start(self, query: QueryNoTemplate, params: Params = None) -> Pending:
        """Begin a statement and return at once."""
        return self.start_call(lambda: self.fetch(query, params))

    def start_call(self, call: Callable[[], Any]) -> Pending:
        """Begin a function that uses this session's connection, and return at once."""
        return Pending(self, self._executor.submit(call))

    def blockers(self) -> list[int]:
        """Return the process ids of the sessions that this one waits for."""
        row = self._observer.execute("select pg_blocking_pids(%s)", (self.pid,)).fetchone()
        assert row is not None
        return list(row[0])

    def close(self) -> None:
        """End the connection, also in the middle of a statement."""
        self._observer.execute("select pg_terminate_backend(%s)", (self.pid,))
        self._executor.shutdown()
        self.connection.close()


class Pending:
    """A statement on its way."""

    def __init__(self, session: Session, future: Future[Any]) -> None:
        self._session = session
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def wait_blocked(self, by: Session | None = None, timeout: float = 10) -> None:
        """Return when the statement waits for a lock (that of *by*); fail if it ends."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            blockers = self._session.blockers()
            if by.pid in blockers if by else blockers:
                return
            if wait([self._future], timeout=0.002).done:
                raise AssertionError(f"it did not wait, and returned {self._future.result()!r}")
        raise AssertionError(f"it neither waits nor ends after {timeout} s")

    def wait_settled(self, timeout: float = 10) -> bool:
        """Return True when the statement waits for a lock, False when it has ended."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if wait([self._future], timeout=0.002).done:
                return False
            if self._session.blockers():
                return True
        raise AssertionError(f"it neither waits nor ends after {timeout} s")

    def result(self, timeout: float = 10) -> Any:
        """Return the rows of the statement, or raise its error, when it has ended."""
        return self._future.result(timeout)
