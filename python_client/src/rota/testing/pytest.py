"""A pytest plugin: a throwaway server with rota, and a database for each test.

Put ``pytest_plugins = ["rota.testing.pytest"]`` in the topmost ``conftest.py``.  A test uses
`rota_url`, the URL of its own database, in which it and workers may commit, or
`rota_connection`, whose transaction is rolled back after it.  Override `rota_prepare`, of the
scope session, to create the tables of your application in both.

With xdist each process has its own server.  ``--rota-url`` names an existing one, with a role
that may create databases; the plugin drops those that it has created.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection, Connection, sql
from psycopg.conninfo import make_conninfo

from ..client.connecting import named
from ..schema import install
from .server import EmbeddedPostgres, memory
from .session import Session

__all__ = [
    "pytest_addoption",
    "rota_async_connection",
    "rota_connection",
    "rota_databases",
    "rota_prepare",
    "rota_server",
    "rota_shared_url",
    "rota_url",
]


class Databases:
    """Copies of one database that is prepared once."""

    def __init__(self, server: str, prepare: Callable[[str], None]) -> None:
        self._server = server
        self._admin = psycopg.connect(server, autocommit=True)
        self._left: list[str] = []
        self._template = self._create("template0")
        try:
            self._fill(self._url(self._template), prepare)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def copy(self) -> Iterator[str]:
        """Lend the URL of a new copy."""
        # A drop waits for sessions that are leaving, in steps of 100 ms; those of the last
        # test have had the time of this one.
        while len(self._left) > 1:
            self._drop(self._left.pop(0))
        name = self._create(self._template)
        try:
            yield self._url(name)
        finally:
            self._left.append(name)

    def close(self) -> None:
        """Drop all that was made here."""
        with self._admin:
            for name in (*self._left, self._template):
                self._drop(name)

    def _fill(self, url: str, prepare: Callable[[str], None]) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            install(connection)
        prepare(url)
        self._empty(self._template)

    def _create(self, template: str) -> str:
        name = f"rota_test_{secrets.token_hex(6)}"
        statement = sql.SQL("create database {} template {}").format(
            sql.Identifier(name), sql.Identifier(template)
        )
        if self._admin.info.server_version >= 150000:
            statement += sql.SQL(" strategy file_copy")  # the faster one of so few rows
        self._admin.execute(statement)
        return name

    def _empty(self, name: str) -> None:
        """End the sessions of a database, such as those of the pool of an application.

        Not by force: only a superuser may end what the server itself does there, such as
        autovacuum, and a copy or a drop ends that by itself.
        """
        closed = sql.SQL("alter database {} allow_connections false")
        self._admin.execute(closed.format(sql.Identifier(name)))
        self._admin.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where datname = %s and backend_type = 'client backend'",
            [name],
        )

    def _drop(self, name: str) -> None:
        with suppress(psycopg.errors.InvalidCatalogName):
            self._empty(name)
            self._admin.execute(sql.SQL("drop database {}").format(sql.Identifier(name)))

    def _url(self, name: str) -> str:
        if self._server.startswith(("postgresql://", "postgres://")):
            address, _, options = self._server.partition("?")
            scheme, _, rest = address.partition("://")
            url = f"{scheme}://{rest.partition('/')[0]}/{name}"
            return f"{url}?{options}" if options else url
        return make_conninfo(self._server, dbname=name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names a server."""
    parser.getgroup("rota").addoption(
        "--rota-url",
        help="a database on the server where rota's fixtures create theirs; "
        "by default they start a server of their own",
    )


@pytest.fixture(scope="session")
def rota_server(pytestconfig: pytest.Config) -> Iterator[str]:
    """Return the URL of a database on the server of this run."""
    if url := pytestconfig.getoption("--rota-url"):
        yield named(url)
        return
    with EmbeddedPostgres(directory=memory()) as server:
        yield server.url()


@pytest.fixture(scope="session")
def rota_prepare() -> Callable[[str], None]:
    """Override this: return a function that takes a URL and creates your tables there."""
    return lambda url: None


@pytest.fixture(scope="session")
def rota_databases(
    rota_server: str, rota_prepare: Callable[[str], None]
) -> Iterator[Databases]:
    """Make databases: ``with rota_databases.copy() as url`` gives one more."""
    databases = Databases(rota_server, rota_prepare)
    yield databases
    databases.close()


@pytest.fixture
def rota_url(rota_databases: Databases) -> Iterator[str]:
    """Return the URL of the test's own database, in which it may commit."""
    with rota_databases.copy() as url:
        yield url


@pytest.fixture(scope="session")
def rota_shared_url(rota_databases: Databases) -> Iterator[str]:
    """Return the URL of the database of all tests that roll back."""
    with rota_databases.copy() as url:
        yield url


@pytest.fixture
def rota_connection(rota_shared_url: str) -> Iterator[Connection[Any]]:
    """Open a connection whose transaction is rolled back after the test."""
    connection = psycopg.connect(rota_shared_url)
    connection.execute("")  # so a block of transaction() is a savepoint, and commits nothing
    yield connection
    connection.close()


@pytest.fixture
def rota_async_connection(rota_connection: Connection[Any]) -> Iterator[AsyncConnection[Any]]:
    """Give `rota_connection` as an async connection too, for any event loop."""
    session = Session(rota_connection)
    yield session.async_connection
    session.release()
