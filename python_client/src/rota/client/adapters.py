"""The connections that a client takes: of psycopg, Django, SQLAlchemy, psycopg2 and asyncpg.

`adapt` and `adapt_async` return a function that finds the connection of the driver, and which
is called for each statement: that of a session is another one in each transaction.  Where a
library has not begun its transaction yet it is made to, so that its own commit or rollback is
that of rota's call too.

A library is recognized by the module of a type.  None is imported.
"""

# ruff: noqa: D102 - the protocols say by their names what they are for
from __future__ import annotations

import json
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeAlias

from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus
from psycopg.types.json import Jsonb

from .statement import SQL_ASCII, Unreadable, call, characters, columns, json_columns


class DjangoConnection(Protocol):
    """``django.db.connection``."""

    def __getattr__(self, item: str, /) -> Any: ...

    def __contains__(self, key: Any, /) -> Any: ...


class DjangoWrapper(Protocol):
    """One of ``django.db.connections``, which the stubs of Django take the other for, too."""

    def ensure_connection(self) -> None: ...

    def validate_no_broken_transaction(self) -> None: ...


class Alchemy(Protocol):
    """A ``Connection``, ``Session`` or ``scoped_session`` of SQLAlchemy."""

    def begin_nested(self) -> Any: ...

    def close(self) -> None: ...


class AsyncAlchemy(Protocol):
    """An ``AsyncConnection``, ``AsyncSession`` or ``async_scoped_session`` of SQLAlchemy."""

    def begin_nested(self) -> Any: ...

    def close(self) -> Coroutine[Any, Any, None]: ...


class Psycopg2Like(Protocol):
    """A connection of psycopg2."""

    def get_dsn_parameters(self) -> Any: ...

    def get_transaction_status(self) -> Any: ...


class AsyncpgLike(Protocol):
    """A connection of asyncpg, also one of its pool."""

    def is_in_transaction(self) -> Any: ...

    def get_server_version(self) -> Any: ...


Caller: TypeAlias = Connection[Any] | DjangoConnection | DjangoWrapper | Alchemy | Psycopg2Like
"""What `Client` takes."""
AsyncCaller: TypeAlias = AsyncConnection[Any] | AsyncAlchemy | AsyncpgLike
"""What `AsyncClient` takes."""
PAGES = {
    "django": "python_client/docs/django.md shows how",
    "sqlalchemy": "python_client/docs/fastapi-sqlalchemy.md shows how",
}
PAGE = "'Your own connection' in python_client/README.md has an example of each"


def adapt(connection: Caller) -> Callable[[], Connection[Any] | Psycopg2]:
    """Return what finds the driver's connection; raise TypeError for what has none."""
    source: Any = connection
    if isinstance(source, Connection):
        return lambda: source
    kinds = _kinds(source)
    if "psycopg2.connection" in kinds:
        adapter = Psycopg2(source)
        return lambda: adapter
    if kinds & {"django.ConnectionProxy", "django.BaseDatabaseWrapper"}:
        return lambda: _in_django(source)
    if "sqlalchemy.Connection" in kinds:
        return lambda: _in_alchemy(source)
    if kinds & {"sqlalchemy.Session", "sqlalchemy.scoped_session"}:
        return lambda: _in_alchemy(source.connection())
    raise TypeError(f"rota.Client cannot work on {_refusal(source, kinds, for_async=False)}")


def adapt_async(
    connection: AsyncCaller,
) -> Callable[[], Awaitable[AsyncConnection[Any] | Asyncpg]]:
    """Do the same for `AsyncClient`."""
    source: Any = connection
    if isinstance(source, AsyncConnection):

        async def itself() -> AsyncConnection[Any]:
            return source

        return itself
    kinds = _kinds(source)
    if kinds & {"asyncpg.Connection", "asyncpg.PoolConnectionProxy"}:

        async def adapted() -> Asyncpg:
            return Asyncpg(source)

        return adapted
    if "sqlalchemy.AsyncConnection" in kinds:
        return lambda: _in_async_alchemy(source)
    if kinds & {"sqlalchemy.AsyncSession", "sqlalchemy.async_scoped_session"}:

        async def of_session() -> AsyncConnection[Any] | Asyncpg:
            return await _in_async_alchemy(await source.connection())

        return of_session
    raise TypeError(
        f"rota.AsyncClient cannot work on {_refusal(source, kinds, for_async=True)}"
    )


def is_async(connection: object) -> bool:
    """Whether a connection, or what might be one, is for `AsyncClient`."""
    kinds = _kinds(connection)
    return not kinds.isdisjoint(_ASYNC)


def check_transaction(driver: Any) -> None:
    """Raise RuntimeError if a statement would be committed by itself."""
    if isinstance(driver, Asyncpg):
        is_alone = not driver.connection.is_in_transaction()
    else:
        connection = driver.connection if isinstance(driver, Psycopg2) else driver
        status = connection.info.transaction_status
        is_alone = connection.autocommit and status == TransactionStatus.IDLE
    if is_alone:
        raise RuntimeError(
            "there is no transaction: begin one, as by `with session.begin()` or "
            "`with transaction.atomic()`, and call this at the end of its block"
        )


class Psycopg2:
    """Sends the calls over a connection of psycopg2, and reads their rows."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def fetch(
        self, row: type[Any] | None, function: str, arguments: Mapping[str, Any]
    ) -> list[Any]:
        """Return the rows that a function answers, or its one value, without *row*."""
        statement = call(function, arguments, row, json_as_text=True).decode()
        encoding = self.connection.get_parameter_status("server_encoding")
        sent = {
            name: _dump(value, encoding) if isinstance(value, Jsonb) else value
            for name, value in arguments.items()
        }
        # Not of the class that the connection may have chosen for its own cursors.
        plain = sys.modules["psycopg2.extensions"].cursor
        with self.connection.cursor(cursor_factory=plain) as cursor:
            cursor.execute(statement, sent or None)
            return [_make(row, values) for values in cursor.fetchall()]


class Asyncpg:
    """Sends the calls over a connection of asyncpg, and reads their rows."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def fetch(
        self, row: type[Any] | None, function: str, arguments: Mapping[str, Any]
    ) -> list[Any]:
        """Return the rows that a function answers, or its one value, without *row*."""
        names = list(arguments)

        def number(found: re.Match[str]) -> str:
            # As text: the connection may have a codec of its own for jsonb, or none.
            cast = "::text::jsonb" if isinstance(arguments[found[1]], Jsonb) else ""
            return f"${names.index(found[1]) + 1}{cast}"

        statement = call(function, arguments, row, json_as_text=True).decode()
        encoding = self.connection.get_settings().server_encoding
        sent = [_dump(v, encoding) if isinstance(v, Jsonb) else v for v in arguments.values()]
        records = await self.connection.fetch(_NAMED.sub(number, statement), *sent)
        return [_make(row, tuple(record.values())) for record in records]


_NAMED = re.compile(r"%\((\w+)\)s")
_ASYNC = {
    "psycopg.AsyncConnection",
    "sqlalchemy.AsyncConnection",
    "sqlalchemy.AsyncSession",
    "sqlalchemy.async_scoped_session",
    "asyncpg.Connection",
    "asyncpg.PoolConnectionProxy",
}


def _kinds(value: object) -> set[str]:
    """Return the names of a value's classes, each with the package that has defined it."""
    return {f"{t.__module__.partition('.')[0]}.{t.__name__}" for t in type(value).__mro__}


def _in_django(wrapper: Any) -> Connection[Any] | Psycopg2:
    wrapper.validate_no_broken_transaction()
    # As before each statement of Django's own; and what broke in one of ours it did not see.
    wrapper.close_if_health_check_failed()
    is_closed = wrapper.connection is not None and wrapper.connection.closed
    if is_closed and not wrapper.in_atomic_block:
        wrapper.close()
    wrapper.ensure_connection()
    return adapt(wrapper.connection)()


def _in_alchemy(connection: Any) -> Connection[Any] | Psycopg2:
    if not connection.in_transaction():
        connection.begin()
    return adapt(connection.connection.driver_connection)()


async def _in_async_alchemy(connection: Any) -> AsyncConnection[Any] | Asyncpg:
    if not connection.in_transaction():
        await connection.begin()
    driver = (await connection.get_raw_connection()).driver_connection
    if "asyncpg.Connection" in _kinds(driver) and not driver.is_in_transaction():
        # SQLAlchemy lets asyncpg begin with the first statement that it sends itself.
        await connection.exec_driver_sql("select 1")
    return await adapt_async(driver)()


def _dump(value: Jsonb, encoding: str | None) -> str:
    text = (value.dumps or json.dumps)(value.obj)
    text = text if isinstance(text, str) else text.decode()
    return characters(text) if encoding == SQL_ASCII else text


def _make(row: Any, values: tuple[Any, ...]) -> Any:
    if row is None:
        return values[0]
    are_json = json_columns(row)
    named = zip(columns(row), values, strict=True)
    return row(**{n: _load(v) if n in are_json else v for n, v in named})


def _load(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except Exception as error:
        return Unreadable(f"{type(error).__name__}: {error}")


def _refusal(source: object, kinds: set[str], *, for_async: bool) -> str:
    """Return what was given instead of a connection, what helps, and which page."""
    packages = {kind.partition(".")[0] for kind in kinds}
    engines = {"sqlalchemy.Engine", "sqlalchemy.sessionmaker"}
    if isinstance(source, str):
        remedy = "open it first, psycopg.connect(...), or run a Worker, which opens its own"
    elif is_async(source):
        remedy = "use rota.AsyncClient with it"
    elif isinstance(source, Connection):
        remedy = "use rota.Client with it"
    elif "django" in packages and for_async:
        remedy = "Django's connections are not async: use rota.Client, within sync_to_async()"
    elif "django" in packages:
        remedy = 'pass django.db.connection, or django.db.connections["default"]'
    elif kinds & engines and not for_async:
        remedy = "pass one of its connections or sessions, as in `with engine.begin() as c`"
    elif kinds & {"sqlalchemy.AsyncEngine", "sqlalchemy.async_sessionmaker"}:
        remedy = (
            "pass one of its connections or sessions to rota.AsyncClient, as in "
            "`async with engine.begin() as c`"
        )
    elif "sqlalchemy" in packages:
        remedy = "pass its Session or Connection, or with rota.AsyncClient the async ones"
    elif any("Pool" in kind for kind in kinds):
        borrow = "`with pool.connection() as c`"
        if "asyncpg" in packages:
            borrow = "`async with pool.acquire() as c`"
        elif "psycopg2" in packages:
            borrow = "`c = pool.getconn()`"
        remedy = f"pass one of its connections, as in {borrow}"
    else:
        remedy = "it takes connections of psycopg, Django, SQLAlchemy, psycopg2 and asyncpg"
    page = next((PAGES[package] for package in PAGES if package in packages), PAGE)
    return f"{type(source).__module__}.{type(source).__name__}: {remedy}; {page}"
