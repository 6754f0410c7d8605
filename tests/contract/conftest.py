from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from support.databases import pg_dump

_numbers = count(1)


@pytest.fixture
def make_empty(
    empty_database: Callable[[str], str], admin: psycopg.Connection[Any]
) -> Iterator[Callable[[], str]]:
    """Make databases without rota; give the DSN of a role that may connect and create there."""
    made: list[str] = []

    def make() -> str:
        made.append(f"empty{next(_numbers)}")
        return empty_database(made[-1])

    yield make
    for name in made:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def empty(make_empty: Callable[[], str]) -> str:
    return make_empty()


@pytest.fixture
def dump(server: Any) -> Callable[[str], str]:
    """Return everything that a schema dump shows of a database, but its random tokens."""

    def run(dsn: str) -> str:
        url = server.url(conninfo_to_dict(dsn)["dbname"])
        command = [pg_dump(url), "--schema-only", url]
        lines = subprocess.check_output(command, text=True).splitlines()
        return "\n".join(x for x in lines if not x.startswith(("\\restrict", "\\unrestrict")))

    return run
