"""The one connection of a worker to its database."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from client.workers import wait_until
from rota.worker.connection import Connection, ConnectionState

OURS = "select count(*) from pg_stat_activity where application_name = 'rota fetcher'"


@pytest.mark.own_session
def test_a_connection_that_is_refused_its_first_question_is_closed(
    db: psycopg.Connection[Any], dsn: str
) -> None:
    role = f"asker_{db.info.dbname}"
    db.execute(f"create role {role} login password 'x'")  # type: ignore[arg-type]
    db.execute("revoke execute on function pg_backend_pid() from public")
    asked = make_conninfo(dsn, user=role, password="x")
    connection = Connection(asked, "rota fetcher", ConnectionState())

    async def call() -> None:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await connection.call(lambda client: client.connection.execute("select 1"))
        await asyncio.to_thread(wait_until, lambda: count(db) == 0, "the end of its session")

    asyncio.run(call())
    db.execute(f"drop role {role}")  # type: ignore[arg-type]


def count(db: psycopg.Connection[Any]) -> int:
    row = db.execute(OURS + " and datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])
