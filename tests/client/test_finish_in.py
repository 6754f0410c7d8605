"""A job is finished in a transaction of the handler's own, together with what that writes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connection as django_connection
from django.db import models, transaction
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import rota
from client.own_connections import (
    IN_LOOP,
    SYNC,
    django_on,
    engine_on,
    of_psycopg,
    of_session,
    url,
)
from rota import AsyncClient, AsyncJob, Client, Job, JobFinishedError, Registry
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Kind = Callable[[str], Any]
Drain = Callable[..., None]
MISSING = "rota.NotCommitted"


class Undo(Exception):
    pass


class Payment(models.Model):
    amount = models.IntegerField()

    class Meta:
        app_label = "shop"
        db_table = "payments"


class Base(DeclarativeBase):
    pass


class Row(Base):
    __tablename__ = "payments"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]


@pytest.fixture(autouse=True)
def _payments(db: psycopg.Connection[Any]) -> None:
    db.execute("create table public.payments (id int generated always as identity, amount int)")


def _amounts(db: psycopg.Connection[Any]) -> list[int]:
    return [row[0] for row in db.execute("select amount from public.payments order by id")]


def _ends(db: psycopg.Connection[Any], way: str = "") -> list[Any]:
    """What became of the jobs of these tests, or of one way, and of what they enqueued."""
    found = db.execute(
        "select job_type, status, error_type, result from rota.job_runs order by id"
    ).fetchall()
    return [row for row in found if way in ("", row[0].removeprefix("written."))]


def _ended(way: str, commits: bool) -> list[Any]:
    """What is to become of a job of that way, and of what its handler enqueued."""
    if not commits:
        return [(way, "failed", "client.test_finish_in.Undo", None)]
    return [
        (way, "succeeded", None, {"charged": True}),
        (f"written.{way}", "queued", None, None),
    ]


def _ways(kinds: list[Kind]) -> dict[str, tuple[Kind, bool]]:
    """Give each connection, with a transaction that commits and one that does not, a name."""
    return {
        f"{kind.__name__}.{end}": (kind, end == "commit")
        for kind in kinds
        for end in ("commit", "rollback")
    }


def _check_each(
    ways: Mapping[str, tuple[Any, bool]],
    charge: Any,
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
) -> None:
    """Let the handler end a job in each of these ways, and look at what is written."""
    registry = Registry()
    for way in ways:
        registry.add(way, charge)
        client.enqueue(way)
    drain(registry, concurrency=1)

    for way, (_, commits) in ways.items():
        assert _ends(db, way) == _ended(way, commits)


def test_writes_and_the_end_are_committed_together_or_not_at_all(
    client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    ways = _ways(SYNC)

    def charge(job: Job) -> None:
        kind, commits = ways[job.job_type]
        with kind(dsn) as (connection, _):
            Client(connection).enqueue(f"written.{job.job_type}", queue="other")
            job.result = {"charged": True}
            job.finish_in(connection)
            assert _ends(db, job.job_type) == [(job.job_type, "running", None, None)]
            if not commits:
                raise Undo

    _check_each(ways, charge, client, db, drain)


def test_the_same_in_the_loop(
    client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    ways = _ways(IN_LOOP)

    async def charge(job: AsyncJob) -> None:
        kind, commits = ways[job.job_type]
        async with kind(dsn) as (connection, _):
            await AsyncClient(connection).enqueue(f"written.{job.job_type}", queue="other")
            job.result = {"charged": True}
            await job.finish_in(connection)
            if not commits:
                raise Undo

    _check_each(ways, charge, client, db, drain)


@pytest.mark.slow
def test_rows_of_an_orm_are_among_the_writes(
    client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("django")
    def by_django(job: Job) -> None:
        with django_on(dsn), transaction.atomic():
            Payment.objects.create(amount=job.payload["amount"])
            job.finish_in(django_connection)

    @registry.handler("django_in_loop")
    async def by_django_in_loop(job: AsyncJob) -> None:
        def charge() -> None:
            with django_on(dsn), transaction.atomic():
                Payment.objects.create(amount=job.payload["amount"])
                job.finish_in(django_connection)

        await sync_to_async(charge)()

    @registry.handler("session")
    def by_session(job: Job) -> None:
        with engine_on(dsn) as engine, Session(engine) as session:
            session.add(Row(amount=job.payload["amount"]))
            job.finish_in(session)
            session.commit()

    @registry.handler("async_session")
    async def by_async_session(job: AsyncJob) -> None:
        engine = create_async_engine(url(dsn, "asyncpg"))
        async with AsyncSession(engine) as session, session.begin():
            session.add(Row(amount=job.payload["amount"]))
            await job.finish_in(session)
        await engine.dispose()

    for amount, kind in enumerate(registry.job_types):
        client.enqueue(kind, {"amount": amount})
    drain(registry, concurrency=1)

    assert _amounts(db) == [0, 1, 2, 3]
    assert {status for _, status, _, _ in _ends(db)} == {"succeeded"}


@pytest.mark.parametrize("how", ["rollback", "twice", "savepoint", "forgotten"])
def test_a_handler_that_returns_without_its_transaction_has_failed(
    how: str, client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    """A success would say that its writes are there."""
    registry = Registry()

    @registry.handler("charge")
    def charge(job: Job) -> str:
        with engine_on(dsn) as engine, Session(engine) as session:
            if how == "savepoint":
                with suppress(Undo), session.begin_nested():
                    job.finish_in(session)
                    raise Undo
                session.commit()
            else:
                job.finish_in(session)
                if how == "twice":
                    with suppress(JobFinishedError):
                        job.finish_in(session)
                if how != "forgotten":
                    session.rollback()
        return "done"

    client.enqueue("charge", max_attempts=1)
    drain(registry)

    assert _ends(db) == [("charge", "dead", MISSING, None)]


def test_after_a_rollback_the_handler_may_try_again(
    client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("charge")
    def charge(job: Job) -> None:
        with engine_on(dsn) as engine, Session(engine) as session:
            for is_last in (False, True):
                session.add(Row(amount=5))
                job.finish_in(session)
                if is_last:
                    session.commit()
                else:
                    session.rollback()

    client.enqueue("charge")
    drain(registry)

    assert _amounts(db) == [5]
    assert _ends(db) == [("charge", "succeeded", None, None)]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_lost_lease_rolls_the_writes_back(
    kind: str, client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()
    seen: list[type] = []

    def take_away(job_id: int) -> None:
        with psycopg.connect(dsn) as other:  # one transaction, or this worker would claim it
            Client(other).retry_job(job_id, force=True)
            Client(other).claim_jobs("thief", max_jobs=1)

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with of_psycopg(dsn) as (connection, _):
            connection.execute("insert into payments (amount) values (5)")
            take_away(job.job_id)
            try:
                job.finish_in(connection)
            except rota.LeaseLostError as error:
                seen.append(type(error))
                raise

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await connection.execute("insert into payments (amount) values (5)")
            take_away(job.job_id)
            try:
                await job.finish_in(connection)
            except rota.LeaseLostError as error:
                seen.append(type(error))
                raise

    client.enqueue(kind)
    drain(registry)

    assert seen == [rota.LeaseLostError]
    assert _amounts(db) == []
    assert db.execute("select status, locked_by from rota.jobs").fetchone() == (
        "running",
        "thief",
    )


def test_a_lease_that_is_lost_after_a_rollback_is_noticed(
    client: Client, dsn: str, drain: Drain
) -> None:
    registry = Registry()
    seen: list[bool] = []

    @registry.handler("charge")
    def charge(job: Job) -> None:
        with engine_on(dsn) as engine, Session(engine) as session:
            job.finish_in(session)
            session.rollback()
        rolled_back_at = time.monotonic()
        wait_until(lambda: job.confirmed_at > rolled_back_at, "a heartbeat")
        with psycopg.connect(dsn) as other:  # one transaction, or this worker would claim it
            Client(other).retry_job(job.job_id, force=True)
            Client(other).claim_jobs("thief", max_jobs=1)
        seen.append(wait_until(lambda: job.is_lost, "the loss"))
        job.check()
        seen.append(False)

    client.enqueue("charge", lease=timedelta(seconds=1))
    drain(registry)

    assert seen == [True]


def test_a_commit_whose_reply_was_lost_is_a_success(
    client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    """The handler takes it for a failure and tries again: nothing is written twice."""
    registry = Registry()

    @registry.handler("charge")
    def charge(job: Job) -> None:
        for _ in range(2):
            with of_session(dsn) as (session, _):
                session.add(Row(amount=5))
                job.finish_in(session)

    client.enqueue("charge")
    drain(registry)

    assert _amounts(db) == [5]
    assert _ends(db) == [("charge", "succeeded", None, None)]


def test_what_comes_after_the_commit_is_told(
    client: Client, dsn: str, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    ends: list[str] = []
    registry.on_end(lambda job, end: ends.append(end.outcome))

    @registry.handler("returns")
    def returns(job: Job) -> dict[str, int]:
        with of_session(dsn) as (session, _):
            job.finish_in(session)
        return {"n": 5}

    @registry.handler("snoozes")
    def snoozes(job: Job) -> None:
        with of_session(dsn) as (session, _):
            job.finish_in(session)
        raise rota.Snooze(5)

    @registry.handler("raises")
    def raises(job: Job) -> None:
        with of_session(dsn) as (session, _):
            job.finish_in(session)
        raise ValueError("too late")

    ids = {kind: client.enqueue(kind).job_id for kind in ("returns", "snoozes", "raises")}
    drain(registry, concurrency=1)

    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert told == [
        f"job {ids['returns']}: what its handler returned after its transaction is not stored: "
        "set job.result before that ends",
        f"job {ids['snoozes']} succeeded in its transaction; what came later is dropped: "
        "a snooze",
        f"job {ids['raises']} succeeded in its transaction; what came later is dropped: "
        "too late",
    ]
    assert ends == ["succeeded"] * 3


@pytest.mark.slow
def test_the_lease_is_kept_until_the_commit(
    client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("long")
    def long(job: Job) -> None:
        with of_session(dsn) as (session, _):
            session.add(Row(amount=5))
            job.finish_in(session)
            threading.Event().wait(3)

    client.enqueue("long", lease=timedelta(seconds=1))
    drain(registry)

    assert _amounts(db) == [5]
    assert _ends(db) == [("long", "succeeded", None, None)]


def test_a_run_of_a_pipeline_goes_on_with_the_commit(
    client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()
    stages = [{"stage": name, "job_type": name} for name in ("first", "second", "third")]
    client.define_pipeline("steps", stages)

    @registry.handler("first")
    def first(job: Job) -> None:
        with of_session(dsn) as (session, _):
            job.next_stage = "third"
            job.finish_in(session)

    @registry.handler("third")
    def third(job: Job) -> None:
        pass

    ends: list[tuple[str, str]] = []
    registry.on_end(lambda job, end: ends.append((job.job_type, end.outcome)))
    client.start_pipeline("steps")
    drain(registry)

    assert _ends(db) == [("third", "succeeded", None, None)]
    # In either order: the third stage may run before the handler of the first has returned.
    assert sorted(ends) == [("first", "succeeded"), ("third", "succeeded")]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_without_a_transaction_it_is_refused(
    driver: str, client: Client, dsn: str, db: psycopg.Connection[Any], drain: Drain
) -> None:
    """The end would be committed by itself, before or after the writes."""
    registry = Registry()

    @registry.handler("alone")
    def alone(job: Job) -> None:
        with (
            engine_on(dsn, driver, isolation_level="AUTOCOMMIT") as engine,
            engine.connect() as connection,
        ):
            job.finish_in(connection)

    client.enqueue("alone", max_attempts=1)
    drain(registry)

    row = db.execute("select status, last_error from rota.finished_jobs").fetchone()
    assert row is not None
    assert row[0] == "dead"
    assert row[1].startswith("there is no transaction: begin one, as by `with session.begin()`")


def test_a_forgotten_await_is_told(client: Client, dsn: str, drain: Drain) -> None:
    registry = Registry()

    @registry.handler("forgets")
    async def forgets(job: AsyncJob) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            job.finish_in(connection)  # type: ignore[unused-coroutine]

    client.enqueue("forgets")
    with pytest.warns(RuntimeWarning, match="_finish_in_async' was never awaited"):
        drain(registry)


def test_after_transaction_there_is_nothing_to_finish(client: Client, drain: Drain) -> None:
    registry = Registry()

    @registry.handler("twice")
    def twice(job: Job) -> None:
        with job.transaction() as connection:
            pass
        with pytest.raises(RuntimeError, match="is finished"):
            job.finish_in(connection)

    client.enqueue("twice")
    drain(registry)
