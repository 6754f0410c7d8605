from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg import sql

from security.good_calls import set_scene
from security.leaks import DEFAULTS, KEY, SECRET, ServerLog
from security.rights import ROLES
from sql.helpers import grant

Db = psycopg.Connection[Any]

_numbers = count(1)


@pytest.fixture
def empty(empty_database: Callable[[str], str], admin: Db) -> Iterator[str]:
    """The DSN of a role that may connect to a database without rota, and create there."""
    name = f"gate{next(_numbers)}"
    yield empty_database(name)
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture(scope="module")
def gate(server: Any, admin: Db, template: str) -> Iterator[str]:
    """The DSN of a database that a module shares, where each role has its grants."""
    admin.execute(f"create database gate template {template}")
    with psycopg.connect(server.url("gate"), autocommit=True) as owner:
        for role in ROLES:
            owner.execute(f"create role gate_{role}")
            if role != "nobody":
                grant(owner, role, f"gate_{role}")
    yield server.url("gate")
    admin.execute("drop database gate with (force)")
    for role in ROLES:
        admin.execute(f"drop role gate_{role}")


@pytest.fixture(scope="module")
def scene(gate: str) -> dict[str, Any]:
    """What the calls of good_calls.py refer to in that database."""
    with psycopg.connect(gate, autocommit=True) as owner:
        return set_scene(owner)


@pytest.fixture
def loud(db: Db, connect: Callable[..., Db]) -> Db:
    """A session with the defaults of a server, where the tests' own is more silent."""
    database = sql.Identifier(db.info.dbname)
    for name, value in DEFAULTS.items():
        db.execute(
            sql.SQL("alter database {} set {} = {}").format(database, sql.SQL(name), value)
        )
    return connect()


@pytest.fixture
def log(server: Any) -> ServerLog:
    return ServerLog(server)


@pytest.fixture
def secrets(loud: Db) -> dict[str, Any]:
    """What the calls of good_calls.py refer to in that session's database, full of secrets."""
    return set_scene(loud, SECRET, KEY)
