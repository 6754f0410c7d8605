"""Databases in which an older version is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

HERE = Path(__file__).parent

_numbers = count(1)


@pytest.fixture
def make(
    empty_database: Callable[[str], str], admin: psycopg.Connection[Any], psql: Any
) -> Iterator[Callable[[Path | None], str]]:
    """Make a database with what a file installs, or nothing; return the URL of its owner."""
    made: list[str] = []

    def make(file: Path | None) -> str:
        made.append(f"release{next(_numbers)}")
        dsn = empty_database(made[-1])
        if file is not None:
            psql(dsn, "-v", "ON_ERROR_STOP=1", "-f", file)
        return dsn

    yield make
    for name in made:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def old(make: Callable[[Path | None], str]) -> str:
    """A database with version 0.1.0."""
    return make(HERE / "0.1.0.sql")
