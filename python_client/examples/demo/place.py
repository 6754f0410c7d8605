"""Where the demo plays: a database of its own, or yours, which is left as it was found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from rota import Client
from rota.client.connecting import connect
from rota.schema import run_script
from rota.testing import EmbeddedPostgres

from .outage import QUEUES, forget_breaker
from .outage import WORKERS as OUTAGE_WORKERS
from .shop import SHOP_TABLES
from .story import QUEUE, SCOPE, WORKERS

_NEEDED = ("jobs", "finished_jobs", "job_errors", "workers", "effects")


class CannotPlayError(Exception):
    """The demo cannot be played here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """A database with rota and the tables of the shop in it."""

    conninfo: str
    database: str
    """Which database that is, for people."""
    rota: str
    """Which rota, and what will become of it."""


@contextmanager
def own_server(bindir: str | None) -> Iterator[Place]:
    """Start a PostgreSQL server that ends with the demo, however that ends."""
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]  # they are about some other server
    try:
        server = EmbeddedPostgres(bindir=bindir)
    except FileNotFoundError as error:
        raise CannotPlayError(str(error)) from None
    with server, connect(server.url()) as connection:
        _reserve(connection, is_installed=False)
        version = _set_up(connection, is_installed=False)
        database = f"PostgreSQL {server.version}, a throw-away server of {server.bindir}"
        yield Place(server.url(), database, f"{version}, installed there")


@contextmanager
def given_database(conninfo: str) -> Iterator[Place]:
    """Use a database that is there: change nothing that is in it, and clean up at the end."""
    with connect(conninfo) as connection:
        if _is_there(connection, "rota_demo"):
            raise CannotPlayError(
                "this database has a schema rota_demo: a demo plays here, or was killed; "
                "if none does, make demo ARGS=--clean removes what it left"
            )
        is_installed = _is_there(connection, "rota")
        if is_installed:
            _ask_for_rights(connection)
        _reserve(connection, is_installed)
        info = connection.info
        major, minor = divmod(info.server_version, 10000)
        try:
            yield Place(
                conninfo,
                f"{info.dbname}, PostgreSQL {major}.{minor} at {info.host}:{info.port}",
                _set_up(connection, is_installed)
                + (", which is there already" if is_installed else ", installed for the demo"),
            )
        finally:
            with connect(conninfo) as fresh:  # the other one was idle for long
                print(clean(fresh))


def clean(connection: Connection[Any]) -> str:
    """Remove what a demo brought into a database; return what there is to say."""
    if not _is_there(connection, "rota_demo"):
        return "There is nothing of a demo in this database."
    row = connection.execute("select was_installed from rota_demo.beginning").fetchone()
    was_installed = row is None or bool(row[0])
    said = "rota was there before, and stays"
    if _is_there(connection, "rota"):
        _delete_jobs(connection)
        if not was_installed and _is_in_use(connection):
            said = "rota stays, because somebody else uses it by now"
        elif not was_installed:
            run_script(connection, "uninstall.sql", {})
            said = "rota was not there before, and is gone"
    connection.execute("drop schema rota_demo cascade")
    return f"Cleaned up: the demo's tables and jobs are gone; {said}."


def _delete_jobs(connection: Connection[Any]) -> None:
    names = {
        "queues": [QUEUE, *QUEUES],
        "workers": [*WORKERS, *OUTAGE_WORKERS.values()],
        "scope": SCOPE,
    }
    with connection.transaction():
        forget_breaker(connection)
        for statement in (
            "delete from rota.jobs where queue = any(%(queues)s)",
            "delete from rota.finished_jobs where queue = any(%(queues)s)",
            "delete from rota.job_errors where queue = any(%(queues)s)",
            "delete from rota.effects where scope = %(scope)s",
            "delete from rota.workers where worker = any(%(workers)s) and queues <@ %(queues)s",
        ):
            connection.execute(statement, names)


def _reserve(connection: Connection[Any], is_installed: bool) -> None:
    """Keep a second demo out, and leave word of what there will be to clean."""
    with connection.transaction():
        connection.execute("create schema rota_demo")
        connection.execute("create table rota_demo.beginning (was_installed boolean not null)")
        connection.execute("insert into rota_demo.beginning values (%s)", [is_installed])


def _set_up(connection: Connection[Any], is_installed: bool) -> str:
    if not is_installed:
        run_script(connection, "install.sql", {})
    connection.execute(SHOP_TABLES)
    return Client(connection).version()


def _ask_for_rights(connection: Connection[Any]) -> None:
    for table in _NEEDED:
        row = connection.execute(
            "select has_table_privilege(%s, 'select') and has_table_privilege(%s, 'delete')",
            [f"rota.{table}", f"rota.{table}"],
        ).fetchone()
        if row is None or not row[0]:
            raise CannotPlayError(
                f"{connection.info.user} may not delete from rota.{table}, so the demo could "
                "not clean up; use another role, or no DATABASE_URL at all"
            )


def _is_there(connection: Connection[Any], schema: str) -> bool:
    row = connection.execute("select to_regnamespace(%s) is not null", [schema]).fetchone()
    return row is not None and bool(row[0])


def _is_in_use(connection: Connection[Any]) -> bool:
    row = connection.execute(
        "select exists (select from rota.job_runs) or exists (select from rota.workers)"
        " or exists (select from rota.queues)"
    ).fetchone()
    return row is None or bool(row[0])
