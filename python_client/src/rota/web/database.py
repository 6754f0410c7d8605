"""Query the database without slowing down its other users.

Each query is a transaction of its own: read only, as the role that the page reads with, in
UTC, without the schemas that other roles may create objects in, and with a time limit after
which the server cancels it; the page waits little longer for a server that hangs.  The
queries of one page share its time limit: each gets what the ones before it have left, and a
moment if they left nothing.  Nothing stays in the session, so it works behind a pooler.  The
page shows which queries took too long, beside the results of the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from ..client.connecting import named, settings, spelled_for
from ..client.statement import forgive
from ..worker.connection import is_readable, time_limit

Row = dict[str, Any]
Values = Mapping[str, Any]

logger = logging.getLogger("rota")

READ_TIME = 4.0
MOMENT = 0.1
"""Seconds that a question gets even when those before it have taken the time of the page."""
ACT_TIME = 60.0
GRACE = 1.0
"""Seconds that the server has to stop a question, beyond the time of that."""
LOCK_TIME = "3s"
MAX_CONNECTIONS = 4
NOTHING: Values = MappingProxyType({})

# Each time anew: a role may be granted, or taken away, while the page runs.  Roles are those of
# the server: those that another database has made need not have rights in this one.
TAKE_ROLE = sql.SQL("""
    ; select set_config('role', r.rolname, true) from pg_roles as r
    where r.rolname = {} and pg_has_role(session_user, r.oid,
        case when current_setting('server_version_num')::integer >= 160000 then 'SET'
        else 'MEMBER' end)
      and has_schema_privilege(r.oid, to_regnamespace('rota'), 'usage')
    """)

_page_ends: ContextVar[float | None] = ContextVar("page_ends", default=None)


class TooSlowError(Exception):
    """A question took longer than it may."""


class UnreachableError(Exception):
    """The database does not answer, or all connections to it are taken."""


class Database:
    """A few connections that all pages share, and the roles that they act in."""

    def __init__(
        self,
        dsn: str,
        *,
        observer: str | None,
        operator: str | None,
        read_time: float = READ_TIME,
    ) -> None:
        self.read_time = read_time
        self.observer = observer
        self._roles = {"observer": observer, "operator": operator}
        self._missing: set[str] = set()
        self._cached: dict[str, tuple[float, Any]] = {}
        self._asked: dict[str, asyncio.Lock] = {}
        conninfo = named(dsn)
        self._pool: AsyncConnectionPool[AsyncConnection[Row]] = AsyncConnectionPool(
            "",
            kwargs={**settings(conninfo, "rota web"), "row_factory": dict_row},
            min_size=0,
            max_size=MAX_CONNECTIONS,
            timeout=read_time,
            max_idle=600,
            reconnect_timeout=0,
            check=_check,
            configure=_configure,
            open=False,
        )

    async def open(self) -> None:
        """Get ready; connections are made when they are wanted."""
        if self._pool.closed:
            await self._pool.open()

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    def begin_page(self, *, has_end: bool = True) -> None:
        """Let the questions of this task share the time of one page, or each have its own."""
        _page_ends.set(time.monotonic() + self.read_time if has_end else None)

    def _left(self, least: float) -> float:
        """Return how many seconds the next question may take."""
        end = _page_ends.get()
        left = self.read_time if end is None else end - time.monotonic()
        return max(min(left, self.read_time), least)

    async def rows(
        self,
        query: LiteralString | sql.Composed,
        values: Values = NOTHING,
        *,
        least: float = MOMENT,
    ) -> list[Row]:
        """Return what a question finds; raise TooSlowError when the server had to stop it."""
        left = self._left(least)
        async with self._transaction("observer", "read only", left) as connection:
            return await (await connection.execute(query, values)).fetchall()

    async def row(
        self, query: LiteralString, values: Values = NOTHING, *, least: float = MOMENT
    ) -> Row | None:
        """Return the first row of what a question finds."""
        found = await self.rows(query, values, least=least)
        return found[0] if found else None

    async def cached(self, key: str, seconds: float, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return an answer that may be so many seconds old; many who ask make one question."""
        lock = self._asked.setdefault(key, asyncio.Lock())
        try:
            await asyncio.wait_for(lock.acquire(), self._left(1.0))
        except TimeoutError:
            raise TooSlowError from None
        try:
            known = self._cached.get(key)
            if known is None or time.monotonic() - known[0] > seconds:
                known = (time.monotonic(), await ask())
                self._cached[key] = known
            return known[1]
        finally:
            lock.release()

    @asynccontextmanager
    async def acting(self, actor: str) -> AsyncIterator[AsyncConnection[Row]]:
        """Lend a connection that acts as the operator, and waits for no lock for long."""
        try:
            async with self._transaction("operator", "read write", ACT_TIME) as connection:
                name = spelled_for(connection, actor[:255])
                await connection.execute("select set_config('rota.actor', %s, true)", [name])
                yield connection
        finally:
            self._cached.clear()

    @asynccontextmanager
    async def _transaction(
        self, access: str, mode: LiteralString, seconds: float
    ) -> AsyncIterator[AsyncConnection[Row]]:
        try:
            wait = max(min(seconds, self.read_time), 1.0)
            async with (
                self._pool.connection(timeout=wait) as connection,
                time_limit(seconds + GRACE),
            ):
                begin = sql.SQL(
                    "begin {}; set local search_path = pg_catalog, pg_temp;"
                    " set local statement_timeout = {}; set local time zone 'UTC';"
                    " set local datestyle = 'ISO'; set local intervalstyle = 'postgres';"
                    " set local jit = off"
                ).format(sql.SQL(mode), sql.Literal(f"{round(seconds * 1000)}ms"))
                if access == "operator":
                    begin += sql.SQL("; set local lock_timeout = {}").format(LOCK_TIME)
                begin += TAKE_ROLE.format(self._roles[access])
                begun = await connection.execute(begin)
                while begun.nextset():
                    pass
                self._tell(access, is_missing=begun.rowcount == 0)
                try:
                    yield connection
                except BaseException:
                    if not connection.closed:
                        await connection.execute("rollback")
                    raise
                await connection.execute("commit")
        except psycopg.errors.QueryCanceled as error:
            raise TooSlowError from error
        except psycopg.OperationalError as error:  # PoolTimeout is one, too
            if not _is_away(error):
                raise
            raise UnreachableError(str(error)) from error

    def _tell(self, access: str, *, is_missing: bool) -> None:
        """Log once that a role is not to be had, and again when it went after it came."""
        name = self._roles[access]
        if not is_missing:
            self._missing.discard(access)
        elif name is not None and access not in self._missing:
            self._missing.add(access)
            logger.warning("the page cannot act as role %s, only as its login", name)


async def _configure(connection: AsyncConnection[Row]) -> None:
    """Let no value that was put down by hand hide the rows beside it."""
    forgive(connection.adapters)


async def _check(connection: AsyncConnection[Row]) -> None:
    """Refuse a connection that the server has ended while it was idle, without asking it.

    Nothing is to come on an idle connection but the reason for its end, or the end itself.
    """
    if is_readable(connection.fileno()):
        await connection.close()  # or the pool lends it again
        raise psycopg.OperationalError("the server has ended this idle connection")


def _is_away(error: psycopg.OperationalError) -> bool:
    """Whether the database does not answer; a lock or a limit is an answer."""
    state = error.sqlstate
    return state is None or state[:2] in ("08", "57") or state == "53300"
