"""`rota.testing` within what Django's TestCase and SQLAlchemy's recipe roll back."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from django.db import IntegrityError, transaction
from django.db import connection as django_connection
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session

import rota
from client.django_jobs import add
from client.own_connections import async_engine_on, django_on, engine_on
from rota.contrib.django.jobs import registry as django_tasks
from rota.testing import (
    assert_enqueued,
    assert_not_enqueued,
    drain,
    drain_async,
    run_job,
    run_job_async,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.own_session,
    pytest.mark.usefixtures("letters"),
]

INSERT = "insert into public.letters values (%s)"
ALL = "select id from public.letters order by id"


@pytest.fixture
def letters(db: psycopg.Connection[Any]) -> None:
    db.execute("create table public.letters (id int primary key)")


@pytest.fixture
def registry() -> rota.Registry:
    return rota.Registry()


def nothing_is_left(db: psycopg.Connection[Any]) -> bool:
    return not db.execute("select from rota.job_runs").fetchall() + db.execute(ALL).fetchall()


def test_jobs_run_within_atomic_of_django(
    dsn: str, db: psycopg.Connection[Any], registry: rota.Registry
) -> None:
    """As a TestCase has one around each test."""

    @registry.handler("write")
    def write(job: rota.Job) -> None:
        number = job.payload["n"]
        with django.cursor() as cursor:
            cursor.execute(INSERT, [number])
            if number == 2:
                cursor.execute(INSERT, [number])
            with transaction.atomic(), django.cursor() as inner:
                inner.execute(INSERT, [number * 10])
                job.finish_in(django)

    with django_on(dsn) as django, transaction.atomic():
        for number in (1, 2, 3):
            rota.Client(django).enqueue("write", {"n": number})
        assert_enqueued(django, "write", count=3)

        outcomes = drain(django, registry, raise_errors=False)

        assert_enqueued(django, "write", {"n": 2}, status="failed", count=1)
        with django.cursor() as cursor:
            cursor.execute(ALL)
            rows = cursor.fetchall()
        transaction.set_rollback(True)

    assert [outcome.status for outcome in outcomes] == ["succeeded", "failed", "succeeded"]
    assert isinstance(outcomes[1].error, IntegrityError)
    assert rows == [(1,), (3,), (10,), (30,)]
    assert nothing_is_left(db)


@pytest.mark.parametrize("is_test_case", [True, False])
def test_a_job_of_a_test_has_the_connection_of_the_test(
    dsn: str, registry: rota.Registry, *, is_test_case: bool
) -> None:
    """A worker's threads keep no old one; TransactionTestCase has no transaction around it."""
    registry.include(django_tasks)

    @registry.handler("write")
    def write(job: rota.Job) -> None:
        with django_connection.cursor() as cursor:
            cursor.execute(INSERT, [job.payload["n"]])

    with django_on(dsn) as django, transaction.atomic() if is_test_case else nullcontext():
        rota.Client(django).enqueue("write", {"n": 1})
        result = add.enqueue(1, 2)

        outcomes = drain(django, registry)
        run_job(registry, "write", {"n": 2}, connection=django)

        result.refresh()
        with django.cursor() as cursor:
            cursor.execute(ALL)
            rows = cursor.fetchall()

    assert [outcome.status for outcome in outcomes] == ["succeeded", "succeeded"]
    assert (result.return_value, rows) == (3, [(1,), (2,)])


@pytest.mark.parametrize("error", [IntegrityError, ValueError])
def test_an_error_within_atomic_of_django_undoes_its_job_alone(
    dsn: str, registry: rota.Registry, error: type[Exception]
) -> None:
    """Its models save within an atomic() that has no savepoint but lets all be rolled back."""

    @registry.handler("write")
    def write(job: rota.Job) -> None:
        with transaction.atomic(savepoint=False), django_connection.cursor() as cursor:
            cursor.execute(INSERT, [job.payload["n"]])
            if job.payload["n"] == 1:
                if error is ValueError:
                    raise error
                cursor.execute(INSERT, [1])

    with django_on(dsn) as django, transaction.atomic():
        for number in (1, 2):
            rota.Client(django).enqueue("write", {"n": number}, max_attempts=1)

        outcomes = drain(django, registry, raise_errors=False)

        with django.cursor() as cursor:
            cursor.execute(ALL)
            rows = cursor.fetchall()

    assert [outcome.status for outcome in outcomes] == ["dead", "succeeded"]
    assert isinstance(outcomes[0].error, error)
    assert rows == [(2,)]


def write_in_django(number: int) -> int:
    """Stands for what takes long, which a worker runs in a process of its own."""
    with django_connection.cursor() as cursor:
        cursor.execute(INSERT, [number])
    return os.getpid()


def test_a_process_of_its_own_is_that_of_the_test(
    dsn: str, db: psycopg.Connection[Any], registry: rota.Registry
) -> None:
    """Another process would write into the database of the settings, and not of the test."""
    task = registry.task("write", own_process=True)(write_in_django)

    async def within_a_loop() -> object:
        return (await run_job_async(registry, "now")).result

    registry.task("now", own_process=True)(os.getpid)
    with django_on(dsn) as django, transaction.atomic():
        task.enqueue(django, number=1)
        (outcome,) = drain(django, registry)

        assert outcome.result == asyncio.run(within_a_loop()) == os.getpid()
        with django.cursor() as cursor:
            cursor.execute(ALL)
            assert cursor.fetchall() == [(1,)]
        transaction.set_rollback(True)

    assert nothing_is_left(db)


def test_jobs_run_within_a_session_that_a_rollback_ends(
    dsn: str, db: psycopg.Connection[Any], registry: rota.Registry
) -> None:
    """As SQLAlchemy's recipe "joining a session into an external transaction" has it."""

    @registry.handler("write")
    def write(job: rota.Job) -> None:
        with Session(connection, join_transaction_mode="create_savepoint") as own:
            own.execute(text("insert into public.letters values (:n)"), job.payload)
            if job.payload["n"] == 2:
                raise ValueError(2)
            job.finish_in(own)
            own.commit()

    with engine_on(dsn) as engine, engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            for number in (1, 2, 3):
                rota.Client(session).enqueue("write", {"n": number})
            assert_enqueued(session, "write", count=3)
            session.commit()

            outcomes = drain(session, registry, raise_errors=False)

            assert session.scalars(text(ALL)).all() == [1, 3]
        outer.rollback()

    assert [outcome.status for outcome in outcomes] == ["succeeded", "failed", "succeeded"]
    assert nothing_is_left(db)


def test_jobs_run_on_the_one_session_of_a_test(
    dsn: str, db: psycopg.Connection[Any], registry: rota.Registry
) -> None:
    @registry.handler("write")
    def write(job: rota.Job) -> None:
        session.execute(text("insert into public.letters values (:n)"), job.payload)
        job.finish_in(session)
        session.commit()

    with engine_on(dsn) as engine, engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            rota.Client(session).enqueue("write", {"n": 1})

            (outcome,) = drain(connection, registry)

            assert outcome.status == "succeeded"
            assert session.scalars(text(ALL)).all() == [1]
        outer.rollback()

    assert nothing_is_left(db)


@pytest.mark.parametrize("is_scoped", [False, True])
def test_jobs_run_within_an_async_session(
    dsn: str, db: psycopg.Connection[Any], registry: rota.Registry, is_scoped: bool
) -> None:
    @registry.handler("write")
    async def write(job: rota.AsyncJob) -> None:
        await session.execute(text("insert into public.letters values (:n)"), job.payload)
        await job.finish_in(session)
        await session.commit()

    async def test() -> None:
        nonlocal session
        async with async_engine_on(dsn) as engine, engine.connect() as connection:
            outer = await connection.begin()
            options: Any = {"join_transaction_mode": "create_savepoint"}
            make = async_sessionmaker(connection, **options)
            session = async_scoped_session(make, lambda: 1) if is_scoped else make()
            with pytest.raises(RuntimeError, match="has not begun"):
                assert_not_enqueued(make(), "write")
            await rota.AsyncClient(session).enqueue("write", {"n": 1})
            assert_enqueued(session, "write")
            await session.commit()

            (outcome,) = await drain_async(connection, registry)

            assert outcome.status == "succeeded"
            assert (await session.scalars(text(ALL))).all() == [1]
            await session.close()
            await outer.rollback()

    session: AsyncSession | async_scoped_session[AsyncSession]
    asyncio.run(test())

    assert nothing_is_left(db)


def test_a_session_of_another_driver_is_refused(dsn: str, registry: rota.Registry) -> None:
    with (
        engine_on(dsn, "psycopg2") as engine,
        Session(engine) as session,
        pytest.raises(TypeError, match="address of the database"),
    ):
        drain(session, registry)
