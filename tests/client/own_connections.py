"""The connections and sessions that users of other libraries have, each in a transaction.

Each is a context that is committed at its end, and rolled back by an exception.  It lends what
a client is given, and a function that makes a savepoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    closing,
    contextmanager,
)
from typing import Any

import asyncpg
import django
import psycopg
import psycopg2
import psycopg2.extras
import sqlalchemy
from django.conf import settings
from django.db import connection as django_connection
from django.db import connections, transaction
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}},
    INSTALLED_APPS=["django_tasks", "rota.contrib.django"],
    TASKS={
        "default": {
            "BACKEND": "rota.contrib.django.backend.RotaBackend",
            "QUEUES": ["default", "mail"],
            "OPTIONS": {"max_attempts": 2, "backoff": {"kind": "fixed", "base_seconds": 0.001}},
        }
    },
    USE_TZ=True,
)
django.setup()

Lent = tuple[Any, Callable[[], AbstractContextManager[Any]]]
LentInLoop = tuple[Any, Callable[[], AbstractAsyncContextManager[Any]]]


def url(dsn: str, driver: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


@contextmanager
def django_on(dsn: str) -> Iterator[Any]:
    """Let Django's default connection, which is of this thread, be one to a database."""
    connections["default"].close()  # one that another test has left to a thread of a pool
    said = conninfo_to_dict(dsn)
    found = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host"}
    found |= {"PORT": "port"}
    default = connections["default"].settings_dict
    default.update({key: str(said[name]) for key, name in found.items()})
    try:
        yield django_connection
    finally:
        connections["default"].close()


@contextmanager
def engine_on(dsn: str, driver: str = "psycopg", **options: Any) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(url(dsn, driver), **options)
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def async_engine_on(dsn: str, driver: str = "psycopg") -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url(dsn, driver))
    try:
        yield engine
    finally:
        await engine.dispose()


@contextmanager
def of_psycopg(dsn: str) -> Iterator[Lent]:
    with psycopg.connect(dsn) as connection:
        yield connection, connection.transaction


@contextmanager
def of_django(dsn: str) -> Iterator[Lent]:
    with django_on(dsn) as connection, transaction.atomic():
        yield connection, transaction.atomic


@contextmanager
def of_djangos_wrapper(dsn: str) -> Iterator[Lent]:
    with django_on(dsn), transaction.atomic(using="default"):
        yield connections["default"], transaction.atomic


@contextmanager
def of_alchemy(dsn: str) -> Iterator[Lent]:
    with engine_on(dsn) as engine, engine.begin() as connection:
        yield connection, connection.begin_nested


@contextmanager
def of_session(dsn: str) -> Iterator[Lent]:
    with engine_on(dsn) as engine, sessionmaker(engine).begin() as session:
        yield session, session.begin_nested


@contextmanager
def of_session_without_begin(dsn: str) -> Iterator[Lent]:
    with engine_on(dsn) as engine, Session(engine) as session:
        yield session, session.begin_nested
        session.commit()


@contextmanager
def of_scoped_session(dsn: str) -> Iterator[Lent]:
    with engine_on(dsn) as engine:
        session = scoped_session(sessionmaker(engine))
        try:
            with session.begin():
                yield session, session.begin_nested
        finally:
            session.remove()


@contextmanager
def of_alchemy_without_begin(dsn: str) -> Iterator[Lent]:
    with engine_on(dsn) as engine, engine.connect() as connection:
        yield connection, connection.begin_nested
        connection.commit()


@contextmanager
def of_session_on_psycopg2(dsn: str) -> Iterator[Lent]:
    with engine_on(dsn, "psycopg2") as engine, sessionmaker(engine).begin() as session:
        yield session, session.begin_nested


@contextmanager
def of_psycopg2(dsn: str) -> Iterator[Lent]:
    connection: Any = psycopg2.connect(dsn, cursor_factory=psycopg2.extras.DictCursor)
    psycopg2.extras.register_default_jsonb(connection, loads=lambda text: text)

    @contextmanager
    def savepoint() -> Iterator[None]:
        with connection.cursor() as cursor:
            cursor.execute("savepoint s")
            try:
                yield
            except BaseException:
                cursor.execute("rollback to s")
                raise

    with closing(connection), connection:
        yield connection, savepoint


SYNC = [
    of_psycopg, of_django, of_djangos_wrapper, of_alchemy, of_alchemy_without_begin, of_session,
    of_session_without_begin, of_scoped_session, of_session_on_psycopg2, of_psycopg2,
]  # fmt: skip


@asynccontextmanager
async def of_async_psycopg(dsn: str) -> AsyncIterator[LentInLoop]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        yield connection, connection.transaction


@asynccontextmanager
async def of_async_alchemy(dsn: str, driver: str = "psycopg") -> AsyncIterator[LentInLoop]:
    async with async_engine_on(dsn, driver) as engine, engine.begin() as connection:
        yield connection, connection.begin_nested


@asynccontextmanager
async def of_async_session(dsn: str, driver: str = "psycopg") -> AsyncIterator[LentInLoop]:
    async with (
        async_engine_on(dsn, driver) as engine,
        AsyncSession(engine) as session,
        session.begin(),
    ):
        yield session, session.begin_nested


@asynccontextmanager
async def of_async_session_without_begin(
    dsn: str, driver: str = "psycopg"
) -> AsyncIterator[LentInLoop]:
    async with async_engine_on(dsn, driver) as engine, AsyncSession(engine) as session:
        yield session, session.begin_nested
        await session.commit()


@asynccontextmanager
async def of_async_scoped_session(dsn: str) -> AsyncIterator[LentInLoop]:
    async with async_engine_on(dsn) as engine:
        session = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
        try:
            async with session.begin():
                yield session, session.begin_nested
        finally:
            await session.remove()


@asynccontextmanager
async def of_alchemy_on_asyncpg(dsn: str) -> AsyncIterator[LentInLoop]:
    async with of_async_alchemy(dsn, "asyncpg") as lent:
        yield lent


@asynccontextmanager
async def of_session_on_asyncpg(dsn: str) -> AsyncIterator[LentInLoop]:
    async with of_async_session_without_begin(dsn, "asyncpg") as lent:
        yield lent


@asynccontextmanager
async def of_asyncpg(dsn: str) -> AsyncIterator[LentInLoop]:
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            yield connection, connection.transaction
    finally:
        await connection.close()


@asynccontextmanager
async def of_pool_of_asyncpg(dsn: str) -> AsyncIterator[LentInLoop]:
    async with asyncpg.create_pool(dsn, min_size=1) as pool, pool.acquire() as connection:
        # A codec of the user's, as many have one.
        await connection.set_type_codec(
            "jsonb", encoder=repr, decoder=lambda _: "theirs", schema="pg_catalog"
        )
        async with connection.transaction():
            yield connection, connection.transaction


IN_LOOP = [
    of_async_psycopg, of_async_alchemy, of_async_session, of_async_session_without_begin,
    of_async_scoped_session, of_alchemy_on_asyncpg, of_session_on_asyncpg, of_asyncpg,
    of_pool_of_asyncpg,
]  # fmt: skip
