"""The worker's own connections: how they are opened, and opened again."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection, IsolationLevel
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import Diagnostic

from ..client.async_client import AsyncClient
from ..exceptions import IsolationLevelError
from .outage import Outage, is_lost

logger = logging.getLogger("rota")

T = TypeVar("T")

# Settings of the client's side only: a pooler refuses startup options.
_SOCKET = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

_BARE_NAME = re.compile(r"[^=/:@]+")


def named(database: str) -> str:
    """Return a connection string for what may, as in psql, be the bare name of a database."""
    return make_conninfo(dbname=database) if _BARE_NAME.fullmatch(database) else database


def settings(conninfo: str, name: str) -> dict[str, Any]:
    """Return the arguments of a connection; what *conninfo* says goes first."""
    chosen = {**_SOCKET, "fallback_application_name": name, **conninfo_to_dict(conninfo)}
    # Prepared statements break behind a pooler in transaction mode.
    return {**chosen, "autocommit": True, "prepare_threshold": None}


def connect(conninfo: str, name: str = "rota") -> Connection[Any]:
    """Open a connection in autocommit mode, fit for a pooler."""
    connection = psycopg.connect("", **settings(conninfo, name))
    connection.add_notice_handler(_WarningLog().add)
    return connection


async def connect_async(conninfo: str, name: str = "rota") -> AsyncConnection[Any]:
    """Open an async connection in autocommit mode, fit for a pooler."""
    connection = await AsyncConnection.connect("", **settings(conninfo, name))
    connection.add_notice_handler(_WarningLog().add)
    return connection


class _WarningLog:
    """Logs what upkeep has to say: a schedule that it disabled, a part that failed."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def add(self, notice: Diagnostic) -> None:
        """Log a warning of the server, the same one once in a minute."""
        if notice.severity_nonlocalized != "WARNING":
            return
        now, message = time.monotonic(), notice.message_primary or ""
        if now - self._logged_at.get(message, -60.0) >= 60.0:
            logger.warning("database: %s", message)
            if len(self._logged_at) >= 100:
                self._logged_at.clear()
            self._logged_at[message] = now


def backoff(failures: int) -> float:
    """Return how many seconds to wait after so many failures in a row."""
    return min(10.0, 0.1 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)  # noqa: S311


class Database:
    """One connection that is opened when it is needed; calls take turns."""

    def __init__(self, conninfo: str, outage: Outage) -> None:
        self.name = ""
        """The name of the database, once there was a connection."""
        self._conninfo = conninfo
        self._outage = outage
        self._opened_at = 0.0
        self._connection: AsyncConnection[Any] | None = None
        self._turn = asyncio.Lock()
        self._is_default_refused = False

    async def call(self, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Run *action*; after a database error the next call opens a new connection."""
        async with self._turn:
            try:
                connection = self._connection
                if connection is None or connection.closed:
                    connection = await self._open()
                value = await action(AsyncClient(connection))
            except (psycopg.Error, asyncio.CancelledError) as error:
                if isinstance(error, psycopg.Error) and is_lost(error):
                    self._outage.begin(error, self._opened_at)
                # Also when it seems usable: after a failover it may lead to a standby.
                await self._drop()
                raise
            self._outage.end(self._opened_at)
            return value

    async def call_read_committed(self, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Run *action* like `call`, also where the database's default is another level."""

        async def begin_and_act(client: AsyncClient) -> T:
            async with client.connection.transaction():
                return await action(client)

        if not self._is_default_refused:
            try:
                return await self.call(action)
            except IsolationLevelError:
                self._is_default_refused = True
        return await self.call(begin_and_act)

    async def close(self) -> None:
        """Close the connection, if there is one."""
        async with self._turn:
            await self._drop()

    async def _open(self) -> AsyncConnection[Any]:
        self._opened_at = time.monotonic()
        # Ours from here on: the questions below may fail or be cancelled.
        self._connection = connection = await connect_async(self._conninfo, "rota worker")
        await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
        self.name = connection.info.dbname
        if await _is_direct(connection):
            connection.prepare_threshold = 2
        return connection

    async def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()


async def _is_direct(connection: AsyncConnection[Any]) -> bool:
    """Return whether the server's session is ours alone: a pooler tells a number of its own."""
    cursor = await connection.execute("select pg_backend_pid()")
    row = await cursor.fetchone()
    return row is not None and row[0] == connection.info.backend_pid
