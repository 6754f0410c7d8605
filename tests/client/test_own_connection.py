"""A client works in the transaction of the connection, or session, that its user has."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections, transaction
from django.db.transaction import TransactionManagementError
from psycopg2.pool import ThreadedConnectionPool
from psycopg_pool import ConnectionPool
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import rota
from client.own_connections import (
    IN_LOOP,
    SYNC,
    async_engine_on,
    django_on,
    engine_on,
    of_async_session,
    of_session,
    url,
)
from rota import AsyncClient, Client
from rota.contrib.django import fresh_connections
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Kind = Callable[[str], Any]
ROOT = Path(__file__).resolve().parents[2]
ENDS = pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
EACH = pytest.mark.parametrize("kind", SYNC, ids=lambda kind: kind.__name__)
EACH_IN_LOOP = pytest.mark.parametrize("kind", IN_LOOP, ids=lambda kind: kind.__name__)
registry = rota.Registry()


class Undo(Exception):
    pass


def async_engine(dsn: str) -> AsyncEngine:
    return create_async_engine(url(dsn, "asyncpg"))


@registry.task()
def count_to(n: int) -> None: ...


def _numbers(db: psycopg.Connection[Any]) -> list[int]:
    return [n for (n,) in db.execute("select payload -> 'n' from rota.jobs order by id")]


@EACH
@ENDS
def test_a_job_joins_the_transaction_of_its_producer(
    kind: Kind, commits: bool, dsn: str, db: psycopg.Connection[Any]
) -> None:
    with suppress(Undo), kind(dsn) as (connection, savepoint):
        count_to.enqueue(connection, n=1)
        with suppress(Undo), savepoint():
            count_to.enqueue(connection, n=2)
            raise Undo
        with savepoint():
            count_to.enqueue_many(connection, [count_to.job(n=3)])
        assert _numbers(db) == []
        if not commits:
            raise Undo

    assert _numbers(db) == ([1, 3] if commits else [])


@EACH_IN_LOOP
@ENDS
def test_a_job_joins_the_transaction_of_its_async_producer(
    kind: Kind, commits: bool, dsn: str, db: psycopg.Connection[Any]
) -> None:
    async def produce() -> None:
        async with kind(dsn) as (connection, savepoint):
            await count_to.enqueue(connection, n=1)
            with suppress(Undo):
                async with savepoint():
                    await count_to.enqueue(connection, n=2)
                    raise Undo
            async with savepoint():
                await count_to.enqueue_many(connection, [count_to.job(n=3)])
            assert _numbers(db) == []
            if not commits:
                raise Undo

    with suppress(Undo):
        asyncio.run(produce())

    assert _numbers(db) == ([1, 3] if commits else [])


@EACH
def test_a_transaction_goes_on_after_a_refusal_within_a_savepoint(
    kind: Kind, dsn: str, db: psycopg.Connection[Any]
) -> None:
    with kind(dsn) as (connection, savepoint):
        count_to.enqueue(connection, n=1)
        with pytest.raises(rota.JobNotFoundError), savepoint():
            count_to.options(depends_on=[4711]).enqueue(connection, n=2)
        count_to.enqueue(connection, n=3)

    assert _numbers(db) == [1, 3]


PAYLOAD = {"text": "é '%s' $1", "list": [1, None, {"a": 1.5}], "": True}
AT = datetime(2030, 1, 1, 12, tzinfo=UTC)


@EACH
def test_values_of_every_kind_go_both_ways(kind: Kind, dsn: str) -> None:
    with kind(dsn) as (connection, _):
        client = Client(connection)
        client.schedule_job("s", "@daily", "b", {"n": 1}, jitter=timedelta(minutes=1))
        client.enqueue("c", run_at=AT, depends_on=[])
        client.enqueue(
            "a", PAYLOAD, lease=timedelta(minutes=5), backoff={"kind": "fixed"},
            headers={"trace": "5"}, time_limit=timedelta(hours=1),
        )  # fmt: skip
        (job,) = client.claim_jobs("w", ["default"], job_types=["a"])
        client.set_progress(job.job_id, job.lease_token, 12.5, "on")
        client.record_effect("mail", "k", job.job_id, job.lease_token)
        client.complete_effect("mail", "k", job.job_id, job.lease_token, PAYLOAD)
        (beat,) = client.heartbeat_jobs([job.job_id], [job.lease_token])
        ended = client.end_jobs(
            [{"job_id": job.job_id, "lease_token": job.lease_token, "outcome": "succeeded"}]
        )

        assert job.payload == PAYLOAD
        assert job.locked_for == timedelta(minutes=5)
        assert (job.headers, job.time_limit) == ({"trace": "5"}, timedelta(hours=1))
        assert beat.locked_until is not None
        assert job.run_at.utcoffset() is not None
        assert client.effect_result("mail", "k") == rota.EffectResult(
            is_done=True, result=PAYLOAD
        )
        assert [end.answer for end in ended] == ["finished"]
        assert client.wait_for_jobs().channels
        assert client.version() == rota.__version__
        assert client.grant_statements("producer", "postgres")
        with pytest.raises(rota.JobNotFoundError) as told:
            client.cancel_job(12345)
        assert str(told.value) == "job 12345 not found"
        assert told.value.hint


@EACH_IN_LOOP
def test_values_of_every_kind_go_both_ways_in_the_loop(kind: Kind, dsn: str) -> None:
    async def tour() -> None:
        async with kind(dsn) as (connection, _):
            client = AsyncClient(connection)
            await client.schedule_job("s", "@daily", "b", {"n": 1}, jitter=timedelta(minutes=1))
            await client.enqueue("c", run_at=AT, depends_on=[])
            await client.enqueue(
                "a", PAYLOAD, lease=timedelta(minutes=5), backoff={"kind": "fixed"},
                headers={"trace": "5"}, time_limit=timedelta(hours=1),
            )  # fmt: skip
            (job,) = await client.claim_jobs("w", ["default"], job_types=["a"])
            names: dict[str, Any] = {"job_id": job.job_id, "lease_token": job.lease_token}
            await client.set_progress(**names, percent=12.5, message="on")
            await client.record_effect("mail", "k", **names)
            await client.complete_effect("mail", "k", **names, result=PAYLOAD)
            (beat,) = await client.heartbeat_jobs([job.job_id], [job.lease_token])
            ended = await client.end_jobs([{**names, "outcome": "succeeded"}])

            assert job.payload == PAYLOAD
            assert job.locked_for == timedelta(minutes=5)
            assert (job.headers, job.time_limit) == ({"trace": "5"}, timedelta(hours=1))
            assert beat.locked_until is not None
            assert job.run_at.utcoffset() is not None
            effect = await client.effect_result("mail", "k")
            assert effect == rota.EffectResult(is_done=True, result=PAYLOAD)
            assert [end.answer for end in ended] == ["finished"]
            assert (await client.wait_for_jobs()).channels
            assert await client.version() == rota.__version__
            assert await client.grant_statements("producer", "postgres")
            with pytest.raises(rota.JobNotFoundError) as told:
                await client.cancel_job(12345)
            assert str(told.value) == "job 12345 not found"
            assert told.value.hint

    with suppress(Undo):
        asyncio.run(tour())


@EACH
def test_what_is_no_json_is_refused_before_it_is_sent(
    kind: Kind, dsn: str, db: psycopg.Connection[Any]
) -> None:
    with kind(dsn) as (connection, _):
        client = Client(connection)
        for n, payload in enumerate(({"at": AT}, {"n": float("nan")}, {"nul": "\x00"})):
            with pytest.raises(rota.InvalidArgumentError, match=r"^payload"):
                client.enqueue("a", payload)
            client.enqueue("a", {"n": n})  # the transaction is not broken

    assert _numbers(db) == [0, 1, 2]


def test_a_job_is_seen_by_what_django_does_on_commit(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    seen: list[list[int]] = []
    with django_on(dsn) as connection:
        with transaction.atomic():
            transaction.on_commit(lambda: seen.append(_numbers(db)))
            count_to.enqueue(connection, n=1)
        count_to.enqueue(connection, n=2)  # outside of a block Django commits at once

        assert seen == [[1]]
        assert _numbers(db) == [1, 2]


@pytest.mark.own_session
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_connection_that_django_keeps_is_renewed_like_its_own(
    db: psycopg.Connection[Any], dsn: str, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    with django_on(dsn) as connection:
        for name, value in {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": is_checked}.items():
            monkeypatch.setitem(connection.settings_dict, name, value)
        client = Client(connection)
        client.enqueue("a")
        db.execute("select pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
        close_old_connections()  # as Django between two requests

        if not is_checked:
            with pytest.raises(psycopg.OperationalError):
                client.enqueue("a")
            close_old_connections()
        client.enqueue("a")

    assert db.execute("select count(*) from rota.jobs").fetchone() == (2,)


@pytest.mark.own_session
def test_a_connection_of_async_handlers_that_broke_is_renewed(
    db: psycopg.Connection[Any], dsn: str, drain: Callable[..., None]
) -> None:
    own = rota.Registry()
    own.middleware(fresh_connections)
    seen: list[int] = []

    def ask() -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("select pg_backend_pid()")
            seen.append(cursor.fetchone()[0])

    @own.handler("a")
    async def handler(job: rota.AsyncJob) -> None:
        await sync_to_async(ask)()

    def pid_of_the_next() -> int:
        seen.clear()
        Client(db).enqueue("a", backoff={"kind": "fixed", "base_seconds": 0.001})
        wait_until(lambda: drain(own) or seen)
        return seen[0]

    def close() -> None:
        asyncio.run(sync_to_async(lambda: connections["default"].close())())

    with django_on(dsn):
        close()  # another test may have left its own, to a database that is gone
        first = pid_of_the_next()
        db.execute("select pg_terminate_backend(%s)", [first])
        second = pid_of_the_next()
        close()

    assert first != second
    assert db.execute("select count(*) from rota.job_errors").fetchone() == (1,)


def test_a_broken_transaction_of_django_takes_no_job(dsn: str) -> None:
    """It will be rolled back in any case, and the job with it."""
    with django_on(dsn) as connection, transaction.atomic():
        transaction.set_rollback(True)

        with pytest.raises(TransactionManagementError):
            count_to.enqueue(connection, n=1)


def test_a_session_is_used_in_each_of_its_transactions(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    """Between two it has given its connection back, and maybe gets another."""
    with engine_on(dsn) as engine, Session(engine) as session:
        client = Client(session)
        client.enqueue("a", {"n": 1})
        session.commit()
        client.enqueue("a", {"n": 2})
        session.rollback()
        with session.begin():
            client.enqueue("a", {"n": 3})

    assert _numbers(db) == [1, 3]


def test_a_connection_of_sqlalchemy_may_commit_by_itself(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    with (
        engine_on(dsn, isolation_level="AUTOCOMMIT") as engine,
        engine.connect() as connection,
    ):
        count_to.enqueue(connection, n=1)

        assert _numbers(db) == [1]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_rows_and_jobs_of_an_async_session_are_committed_together(
    dsn: str, db: psycopg.Connection[Any], driver: str
) -> None:
    db.execute("create table public.orders (id int)")

    async def order(n: int) -> None:
        async with async_engine_on(dsn, driver) as engine, AsyncSession(engine) as session:
            await count_to.enqueue(session, n=n)  # the first statement of the transaction
            await session.execute(sqlalchemy.text(f"insert into public.orders values ({n})"))
            await session.commit()
            await count_to.enqueue(session, n=n + 1)
            await session.execute(sqlalchemy.text("insert into public.orders values (9)"))
            await session.rollback()

    asyncio.run(order(1))

    assert _numbers(db) == [1]
    assert db.execute("select id from public.orders").fetchall() == [(1,)]


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ("postgresql://localhost/shop", r"str: open it first, psycopg\.connect"),
        (None, "it takes connections of psycopg, Django, SQLAlchemy, psycopg2 and asyncpg"),
        (sqlalchemy.create_engine("postgresql+psycopg://"), "its connections or|the async"),
    ],
)
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_what_is_no_connection_is_refused_with_what_helps(
    wrong: Any, remedy: str, client: Any
) -> None:
    with pytest.raises(TypeError, match=remedy) as told:
        client(wrong)

    pages = re.findall(r"python_client/\S+\.md", str(told.value))
    assert [page for page in pages if (ROOT / page).exists()]


@pytest.mark.parametrize(
    ("client", "make", "remedy"),
    [
        (Client, lambda dsn: connections, "pass django.db.connection, or django.db.conn"),
        (AsyncClient, lambda dsn: connections, "within sync_to_async"),
        (Client, async_engine, "to rota.AsyncClient, as in `async with engine.begin()"),
        (AsyncClient, async_engine, "to rota.AsyncClient, as in `async with engine.begin()"),
        (AsyncClient, lambda dsn: asyncpg.create_pool(dsn), "`async with pool.acquire() as c`"),
        (Client, lambda dsn: ThreadedConnectionPool(0, 1, dsn), "`c = pool.getconn()`"),
        (Client, lambda dsn: ConnectionPool(dsn, open=False), "`with pool.connection() as c`"),
    ],
)
def test_what_has_connections_is_refused_with_how_to_get_one(
    dsn: str, client: Any, make: Kind, remedy: str
) -> None:
    async def refuse() -> None:  # a pool of asyncpg wants a loop
        with pytest.raises(TypeError) as told:
            client(make(dsn))
        assert remedy in str(told.value)

    asyncio.run(refuse())


def test_the_other_kind_of_client_is_named(dsn: str) -> None:
    async def swap() -> None:
        wrong: Any = await psycopg.AsyncConnection.connect(dsn)
        with pytest.raises(TypeError, match=r"use rota\.AsyncClient with it"):
            Client(wrong)
        await wrong.close()
        pool: Any = asyncpg.create_pool(dsn)
        with pytest.raises(TypeError, match=r"pass one of its connections, as in"):
            AsyncClient(pool)
        async with of_async_session(dsn) as (session, _):
            with pytest.raises(TypeError, match=r"use rota\.AsyncClient with it"):
                Client(session)
            with pytest.raises(TypeError, match=r"use rota\.AsyncClient with it"):
                await session.run_sync(lambda inner: Client(inner).version())

    asyncio.run(swap())
    with of_session(dsn) as (session, _), pytest.raises(TypeError, match="the async ones"):
        AsyncClient(session)
    with django_on(dsn) as connection, pytest.raises(TypeError, match="within sync_to_async"):
        AsyncClient(connection)


def test_no_library_is_imported_unless_it_is_used() -> None:
    libraries = {"django", "sqlalchemy", "psycopg2", "asyncpg"}
    text = f"import sys, rota; print(sorted({libraries} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)

    assert done.stdout == "[]\n"
