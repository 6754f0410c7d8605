from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from races.harness import Session


@pytest.fixture
def session(connect: Callable[..., psycopg.Connection[Any]]) -> Iterator[Callable[[], Session]]:
    """Open one more session of a race; all are ended with the test."""
    sessions: list[Session] = []
    observer = connect()

    def open_session() -> Session:
        sessions.append(Session(connect(), observer))
        return sessions[-1]

    yield open_session
    for each in sessions:
        each.close()


@pytest.fixture
def a(session: Callable[[], Session]) -> Session:
    return session()


@pytest.fixture
def b(session: Callable[[], Session]) -> Session:
    return session()
