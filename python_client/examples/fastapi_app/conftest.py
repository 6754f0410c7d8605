"""Each test is one transaction, which is rolled back; commits within it end savepoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from app import app
from fastapi.testclient import TestClient
from models import Base, Session
from sqlalchemy import Connection, Engine, create_engine

pytest_plugins = ["rota.testing.pytest"]


def engine_of(url: str) -> Engine:
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))


@pytest.fixture(scope="session")
def rota_prepare() -> Callable[[str], None]:
    return lambda url: Base.metadata.create_all(engine_of(url))


@pytest.fixture(scope="session")
def engine(rota_shared_url: str) -> Iterator[Engine]:
    engine = engine_of(rota_shared_url)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        outer = connection.begin()
        Session.configure(bind=connection, join_transaction_mode="create_savepoint")
        yield connection
        outer.rollback()


@pytest.fixture
def web(connection: Connection) -> TestClient:
    return TestClient(app)
