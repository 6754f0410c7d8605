"""Sessions that replicate, in which no trigger keeps limits, and streams of all changes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from rota.testing import EmbeddedPostgres, find_binaries
from sql.helpers import (
    Db,
    call,
    claim,
    enqueue,
    owner,
    rows,
    running,
    scalar,
    settle,
    value,
)
from support.databases import Psql, pg_dump
from support.waiting import wait_until

HOLDS = "select id, status, hold, held_limits from rota.jobs order by id"
SLOTS = """
    select p.limit_name, p.slots, (select count(*) from rota.limit_slots) as free
    from rota.limit_parts as p order by 1, 2
"""
LEASED = "select id from rota.jobs where lease_token = %s"
NOT_IDENTIFIED = """
    select c.relname from pg_class as c
    where c.relnamespace = 'rota'::regnamespace and c.relkind in ('r', 'p')
      and c.relreplident <> 'f'
      and not exists (select from pg_index as i where i.indrelid = c.oid and i.indisprimary)
"""
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


def subscribe(publisher: Db, subscriber: Db, publication: LiteralString) -> None:
    publisher.execute(sql.SQL("create publication p for {}").format(sql.SQL(publication)))
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


def test_all_goes_on_where_the_changes_of_all_tables_are_published(db, clock):
    """As for a stream of changes: the server changes no row then that nothing identifies."""
    clock.set("2026-01-01 00:00+00")
    db.execute("alter table rota_test.clock replica identity full")
    db.execute("set client_min_messages = error")
    db.execute("create publication p for all tables")
    call(db, "set_limit", limit_key="shop", max_starts=1)
    settle(db)
    for _ in range(2):
        job = running(db, limit_key="shop")
        call(db, "fail_job", **owner(job), error="e", fatal=True)
        clock.advance("1 day")
        settle(db)
        assert value(db, "retry_job", job_id=job.job_id) == "queued"
        (again,) = claim(db)
        call(db, "finish_job", **owner(again))
        clock.advance("1 minute")
    for act in ("purge", "erase"):
        call(db, "act_on_jobs", act=act, filter={"ids": [job.job_id]})

    clock.advance("1 day")
    settle(db)

    counted = "select counted_until > rota.now() - interval '1 minute' from rota.stats_progress"
    assert scalar(db, counted)
    assert scalar(db, "select count(*) from rota.limit_starts") == 0
    assert rows(db, NOT_IDENTIFIED) == []


@pytest.mark.slow
def test_rows_of_logical_replication_come_as_they_are(publisher_and_subscriber):
    publisher, subscriber = publisher_and_subscriber
    call(publisher, "set_limit", limit_key="shop", max_running=1)
    for _ in range(3):
        enqueue(publisher, limit_key="shop")

    subscribe(publisher, subscriber, "table rota.jobs, rota.limit_parts, rota.limit_slots")
    wait_until(lambda: rows(subscriber, f"{TABLES} having bool_and(srsubstate = 'r')"))
    assert rows(subscriber, HOLDS) == rows(publisher, HOLDS) != []

    (job,) = claim(publisher)
    call(publisher, "finish_job", **owner(job))
    (last,) = claim(publisher)
    wait_until(lambda: rows(subscriber, LEASED, last.lease_token))
    assert rows(subscriber, HOLDS) == rows(publisher, HOLDS)
    assert rows(subscriber, SLOTS) == rows(publisher, SLOTS) != []


@pytest.mark.slow
def test_a_database_moves_by_logical_replication(psql, sql_dir):
    """As the docs say; each day a tick makes a partition that the copy of the schema lacks."""
    bindir, _ = find_binaries(os.environ.get("ROTA_PG_BINDIR"))
    ended = "select id, status from rota.finished_jobs order by id"
    with EmbeddedPostgres(bindir=bindir, settings=["wal_level=logical"]) as server:
        here, there = server.url("postgres"), server.url("target")
        psql(here, "-f", sql_dir / "install.sql")
        with psycopg.connect(here, autocommit=True) as publisher:
            program = pg_dump(here)
            publisher.execute("create database target")
            schema = subprocess.check_output([program, "-s", "-n", "rota", "-d", here])
            psql(there, input=schema.decode())
            call(publisher, "set_queue", queue="mail", max_attempts=3)
            kept = enqueue(publisher, idempotency_key="k", delay="1 day")
            with psycopg.connect(there, autocommit=True) as target:
                (today,) = rows(
                    target, "select inhrelid::regclass::text from pg_inherits where"
                    " inhparent = 'rota.finished_jobs_done'::regclass and"
                    " inhrelid::regclass::text ~ to_char(now() at time zone 'utc', 'YYYYMMDD')",
                )  # fmt: skip
                target.execute(sql.SQL("drop table {}").format(sql.SQL(today[0])))
                subscribe(
                    publisher, target, "all tables with (publish_via_partition_root = true)"
                )
                wait_until(lambda: rows(target, f"{TABLES} having bool_and(srsubstate = 'r')"))

                first, second = (running(publisher) for _ in range(2))
                call(publisher, "finish_jobs", job_ids=[first.job_id, second.job_id],
                     lease_tokens=[first.lease_token, second.lease_token])  # fmt: skip
                wait_until(lambda: rows(target, ended) == rows(publisher, ended) != [])
                value(publisher, "retry_job", job_id=first.job_id)
                wait_until(lambda: rows(target, ended) == rows(publisher, ended))
                given = enqueue(publisher)
                wait_until(lambda: rows(target, "select from rota.jobs where id = %s", given))

                target.execute("drop subscription s")
                behind = "select remedy from rota.doctor() where finding = 'sequences'"
                for (remedy,) in rows(target, behind):
                    target.execute(remedy)
                psql(there, "-f", sql_dir / "install.sql")
                assert rows(target, behind) == [(None,)]
                assert enqueue(target) > given
                assert enqueue(target, idempotency_key="k") == kept
                settle(target)
                assert rows(target, "select * from rota.verify() where violations > 0") == []
