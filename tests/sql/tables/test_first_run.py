"""Limits in sessions that replicate: no trigger keeps them, so all is as the rows say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from conftest import Psql
from psycopg import sql
from psycopg.conninfo import make_conninfo

from rota.testing import EmbeddedPostgres, find_binaries
from sql.helpers import Db, call, claim, enqueue, owner, rows
from support.waiting import wait_until

HOLDS = "select id, status, hold, held_limits from rota.jobs order by id"
SLOTS = """
    select p.limit_name, p.slots, (select count(*) from rota.limit_slots) as free
    from rota.limit_parts as p order by 1, 2
"""
LEASED = "select id from rota.jobs where lease_token = %s"
TABLES = "select count(*) from pg_subscription_rel"


def test_limits_hold_where_a_session_replicates(db):
    db.execute("set session_replication_role = replica")
    call(db, "set_limit", limit_key="shop", max_running=1)
    first, second = (enqueue(db, limit_key="shop") for _ in range(2))

    (job,) = claim(db)
    nothing = claim(db)
    call(db, "finish_job", **owner(job))

    assert (job.job_id, nothing) == (first, [])
    assert [job.job_id for job in claim(db)] == [second]


@pytest.fixture
def publisher_and_subscriber(psql: Psql, sql_dir: Path) -> Iterator[tuple[Db, Db]]:
    """Two databases with rota; the second is to have what the first has."""
    bindir, _ = find_binaries(os.environ.get("ROTA_PG_BINDIR"))
    with EmbeddedPostgres(bindir=bindir, settings=["wal_level=logical"]) as server:
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            connection.execute("create database subscriber")
        for name in ("postgres", "subscriber"):
            psql(server.url(name), "-f", sql_dir / "install.sql")
        with (
            psycopg.connect(server.url("postgres"), autocommit=True) as publisher,
            psycopg.connect(server.url("subscriber"), autocommit=True) as subscriber,
        ):
            yield publisher, subscriber
            subscriber.execute("drop subscription s")


def subscribe(publisher: Db, subscriber: Db) -> None:
    publisher.execute(
        "create publication p for table rota.jobs, rota.limit_parts, rota.limit_slots"
    )
    # Which would wait for the transaction of a subscription to its own server.
    publisher.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    info = publisher.info
    there = make_conninfo(
        host=info.host,
        port=info.port,
        user=info.user,
        password=info.password,
        dbname=info.dbname,
    )
    subscriber.execute(
        sql.SQL("create subscription s connection {} publication p with (create_slot = false)")
        .format(there)
    )  # fmt: skip


@pytest.mark.slow
def test_rows_of_logical_replication_come_as_they_are(publisher_and_subscriber):
    publisher, subscriber = publisher_and_subscriber
    call(publisher, "set_limit", limit_key="shop", max_running=1)
    for _ in range(3):
        enqueue(publisher, limit_key="shop")

    subscribe(publisher, subscriber)
    wait_until(lambda: rows(subscriber, f"{TABLES} having bool_and(srsubstate = 'r')"))
    assert rows(subscriber, HOLDS) == rows(publisher, HOLDS) != []

    (job,) = claim(publisher)
    call(publisher, "finish_job", **owner(job))
    (last,) = claim(publisher)
    wait_until(lambda: rows(subscriber, LEASED, last.lease_token))
    assert rows(subscriber, HOLDS) == rows(publisher, HOLDS)
    assert rows(subscriber, SLOTS) == rows(publisher, SLOTS) != []
