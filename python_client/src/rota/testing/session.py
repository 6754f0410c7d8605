"""The session of a test, as the connections that handlers get see it.

A test that rolls back has one session, and what it has enqueued is nowhere else to be seen.
So a claim, a handler's connection and the end of a job all have to use it.  A `Session` has
two further psycopg connections over the same libpq connection, a plain and an async one:
each is as a worker lends it, whatever the test's own is set to, and both are in its
transaction.  Only one of the three is in use at a time, because jobs run one by one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from ..client.adapters import adapt, is_async
from ..client.async_client import AsyncClient
from ..client.connecting import connect, named
from ..client.sync_client import Client
from ..job import BaseJob
from ..worker.lending import Lent, Pool, Watch

JOB = b"savepoint rota_job"
END = b"savepoint rota_end"
PAGE = "see docs/pytest.md of rota"

Driver = Connection[Any] | AsyncConnection[Any]
C = TypeVar("C", Connection[Any], AsyncConnection[Any])


class NoDatabaseError(psycopg.OperationalError):
    """A handler was run without a database, and asked for one."""


class _Own(Lent[C]):
    """The session of a test, lent as it is: it outlives the job, and has no time limit."""

    def __init__(self, connection: C) -> None:
        self.connection = connection

    @contextmanager
    def to_handler(self) -> Iterator[C]:
        yield self.connection

    def expect(self, seconds: float | None = None) -> None:
        pass


class Session(Pool):
    """Lends the test's own session to handlers, as if these were connections of a worker."""

    def __init__(self, source: Any) -> None:
        super().__init__("", 1, Watch())
        self._source = source.connection if isinstance(source, Client) else source
        self._driver = driver = driver_of(source)
        self._plain = _second(Connection, driver)
        self.async_connection = _second(AsyncConnection, driver)

    @property
    def connection(self) -> Connection[Any]:
        """The plain connection, which begins a transaction where the test's own would."""
        if self._is_free(self._plain):
            self._plain.autocommit = self._driver.autocommit
        return self._plain

    @property
    def client(self) -> Client:
        """A client over the session."""
        return Client(self.connection)

    @contextmanager
    def lend(
        self, job: BaseJob, seconds: float | None = None
    ) -> Iterator[Lent[Connection[Any]]]:
        """Lend the session to a plain function."""
        yield _Own(self.connection)

    @asynccontextmanager
    async def lend_async(
        self, job: BaseJob, seconds: float | None = None
    ) -> AsyncIterator[Lent[AsyncConnection[Any]]]:
        """Lend the session to an async function."""
        if self._is_free(self.async_connection):
            await self.async_connection.set_autocommit(self._driver.autocommit)
        yield _Own(self.async_connection)

    @contextmanager
    def savepoint(self, what: str) -> Iterator[None]:
        """Let a block that breaks the test's transaction undo no more than itself.

        Where there is no transaction, each statement of the block is one.
        """
        if self._status is TransactionStatus.IDLE:
            yield
            return
        self._execute(JOB)
        try:
            yield
        finally:
            self._leave(what)

    def release(self) -> None:
        """Forget the connections that were made here; the session goes on."""
        for connection in (self._plain, self.async_connection):
            del connection.pgconn  # or it would complain that nobody has closed it

    @property
    def is_broken(self) -> bool:
        """Whether the transaction, or a part of it to Django, can only be rolled back."""
        is_marked = getattr(self._source, "needs_rollback", False) is True
        return self._status is TransactionStatus.INERROR or is_marked

    def _leave(self, what: str) -> None:
        if self._status is TransactionStatus.IDLE:
            raise RuntimeError(
                f"{what} has ended the transaction of the test, so its job cannot end there; "
                f"let it work on a connection of its own, or let the test commit: {PAGE}"
            )
        if self.is_broken:
            self._execute(b"rollback to " + JOB)
            if hasattr(self._source, "needs_rollback"):
                self._source.needs_rollback = False
        # Who has released an older savepoint has released ours with it.
        self._execute(END)
        try:
            self._execute(b"release " + JOB)
        except psycopg.errors.InvalidSavepointSpecification:
            self._execute(b"rollback to " + END)
            self._execute(b"release " + END)

    def _execute(self, statement: bytes) -> None:
        self.connection.execute(statement, prepare=False)

    def _is_free(self, connection: Driver) -> bool:
        is_idle = self._status is TransactionStatus.IDLE
        return is_idle and connection.autocommit != self._driver.autocommit

    @property
    def _status(self) -> TransactionStatus:
        return self._driver.info.transaction_status


class NoDatabase(Pool):
    """Stands for the connections of a job that is run without any."""

    def __init__(self) -> None:
        super().__init__("", 1, Watch())

    def lend(self, job: BaseJob, seconds: float | None = None) -> NoReturn:
        """Raise NoDatabaseError."""
        raise NoDatabaseError(
            "job.transaction() and job.effect() need a database: run_job(..., connection=...)"
        )

    lend_async = lend


@contextmanager
def session_of(source: object) -> Iterator[Session]:
    """Return the session behind a connection, a client, or the address of a database."""
    if isinstance(source, str):
        with connect(named(source), "rota testing") as opened, session_of(opened) as session:
            yield session
        return
    session = Session(source)
    try:
        yield session
    finally:
        session.release()


def driver_of(source: Any) -> Driver:
    """Return the psycopg connection that is below what a test calls its connection."""
    if isinstance(source, Client | AsyncClient):
        return driver_of(source.connection)
    if isinstance(source, Connection | AsyncConnection):
        return source
    driver = _below_async(source) if is_async(source) else adapt(source)()
    if not isinstance(driver, Connection | AsyncConnection):
        raise TypeError(
            f"rota.testing shares the session of a test only where that is one of psycopg 3, "
            f"not with {type(source).__module__}.{type(source).__name__}: pass the address of "
            "the database, and commit before"
        )
    return driver


def _below_async(source: Any) -> object:
    """Return what is below an async connection or session, without a question to the server."""
    if callable(source):  # an async_scoped_session of SQLAlchemy
        source = source()
    if (session := getattr(source, "sync_session", None)) is not None:
        try:
            return session.connection().connection.driver_connection
        except Exception as error:
            if "greenlet" not in str(error):
                raise
            raise RuntimeError(
                "the session has not begun its transaction: await session.connection() first"
            ) from None
    if (connection := getattr(source, "sync_connection", None)) is not None:
        return connection.connection.driver_connection
    return source


def _second(kind: type[C], first: Driver) -> C:
    """Return one more connection over the session of another."""
    pgconn = first.pgconn
    handlers = pgconn.notice_handler, pgconn.notify_handler
    second = kind(pgconn)
    second.prepare_threshold = None  # each would give its statements the same names
    pgconn.notice_handler, pgconn.notify_handler = handlers
    return second
