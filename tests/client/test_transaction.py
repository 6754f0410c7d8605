"""Business writes and the end of the job are committed together, or not at all."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.adapt import Loader

import rota
from rota import AsyncJob, Client, Job, Registry
from rota.job import State
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
Status = Callable[[int], str]


@pytest.fixture(autouse=True)
def _marks(db: psycopg.Connection[Any]) -> None:
    db.execute("create table public.marks (job_id bigint)")


def _marks_of(db: psycopg.Connection[Any]) -> list[int]:
    return [row[0] for row in db.execute("select job_id from public.marks").fetchall()]


def test_writes_and_finish_commit_together(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> None:
        job.result = {"from": "transaction"}
        with job.transaction() as connection:
            connection.execute("insert into public.marks values (%s)", [job.job_id])
        assert job.is_finished

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> str:
        async with job.transaction() as connection:
            await connection.execute("insert into public.marks values (%s)", [job.job_id])
        return "comes too late"

    ids = [client.enqueue("plain").job_id, client.enqueue("async").job_id]
    drain(registry)

    assert sorted(_marks_of(db)) == ids
    rows = db.execute("select status, result from rota.finished_jobs order by id").fetchall()
    assert rows == [("succeeded", {"from": "transaction"}), ("succeeded", None)]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_lost_lease_rolls_the_writes_back(
    client: Client, db: psycopg.Connection[Any], dsn: str, drain: Drain, kind: str
) -> None:
    """The job is taken away after the write and before the end of the transaction."""
    registry = Registry()
    seen: list[BaseException] = []

    def take_away(job_id: int) -> None:
        # In one transaction, or the worker itself would be the next to claim it.
        with psycopg.connect(dsn) as other:
            Client(other).retry_job(job_id, force=True)
            Client(other).claim_jobs("thief", max_jobs=1)

    @registry.handler("plain")
    def plain(job: Job) -> None:
        try:
            with job.transaction() as connection:
                connection.execute("insert into public.marks values (%s)", [job.job_id])
                take_away(job.job_id)
        except BaseException as error:
            seen.append(error)
            raise

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        try:
            async with job.transaction() as connection:
                await connection.execute("insert into public.marks values (%s)", [job.job_id])
                take_away(job.job_id)
        except BaseException as error:
            seen.append(error)
            raise

    client.enqueue(kind)
    drain(registry)

    assert [type(error) for error in seen] == [rota.LeaseLostError]
    assert _marks_of(db) == []
    row = db.execute("select status, locked_by from rota.jobs").fetchone()
    assert row == ("running", "thief")


def test_an_exception_inside_rolls_back_and_fails(
    client: Client, db: psycopg.Connection[Any], status: Status, drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("bad")
    def bad(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute("insert into public.marks values (%s)", [job.job_id])
            raise ValueError("no")

    job_id = client.enqueue("bad").job_id
    drain(registry)

    assert _marks_of(db) == []
    assert status(job_id) == "failed"


def test_a_rollback_inside_leaves_the_job_to_its_handler(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> bool:
        with job.transaction() as connection:
            connection.execute("insert into public.marks values (%s)", [job.job_id])
            raise psycopg.Rollback
        return job.is_finished

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> bool:
        async with job.transaction() as connection:
            await connection.execute("insert into public.marks values (%s)", [job.job_id])
            raise psycopg.Rollback
        return job.is_finished

    client.enqueue("plain")
    client.enqueue("async")
    drain(registry)

    assert _marks_of(db) == []
    rows = db.execute("select status, result from rota.finished_jobs").fetchall()
    assert rows == [("succeeded", False)] * 2


def test_an_exception_after_it_changes_nothing(
    client: Client, db: psycopg.Connection[Any], status: Status, drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("late")
    def late(job: Job) -> None:
        with job.transaction():
            pass
        with pytest.raises(RuntimeError), job.transaction():
            pass
        raise ValueError("too late")

    job_id = client.enqueue("late").job_id
    drain(registry)

    assert status(job_id) == "succeeded"


def test_heartbeats_go_on_while_the_finish_waits(
    client: Client, db: psycopg.Connection[Any], status: Status, drain: Drain
) -> None:
    """The transaction takes longer than the lease; nobody else gets the job."""
    registry = Registry()

    @registry.handler("long")
    def long(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute("insert into public.marks values (%s)", [job.job_id])
            threading.Event().wait(3)

    job_id = client.enqueue("long", lease=timedelta(seconds=1)).job_id
    drain(registry)

    assert _marks_of(db) == [job_id]
    assert status(job_id) == "succeeded"


def test_a_commit_whose_reply_was_lost_is_a_success(
    client: Client, db: psycopg.Connection[Any], status: Status, drain: Drain
) -> None:
    """The handler tries again after the lost reply: its writes must not be made twice."""
    registry = Registry()

    @registry.handler("cut")
    def cut(job: Job) -> None:
        for _ in range(2):
            with job.transaction() as connection:
                connection.execute("insert into public.marks values (%s)", [job.job_id])
            job.state = State.RUNNING  # as if the reply had not come

    job_id = client.enqueue("cut").job_id
    drain(registry)

    assert _marks_of(db) == [job_id]
    assert status(job_id) == "succeeded"


def test_what_comes_after_the_transaction_is_told(
    client: Client, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()

    @registry.handler("returns")
    def returns(job: Job) -> dict[str, int]:
        with job.transaction():
            pass
        return {"n": 5}

    @registry.handler("as_stored")
    def as_stored(job: Job) -> object:
        job.result = {"n": 5}
        with job.transaction():
            pass
        return job.result

    @registry.handler("raises")
    def raises(job: Job) -> None:
        with job.transaction():
            pass
        raise ValueError("too late")

    ids = {kind: client.enqueue(kind).job_id for kind in ("returns", "as_stored", "raises")}
    drain(registry, concurrency=1)

    told = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [r.getMessage() for r in told] == [
        f"job {ids['returns']}: what its handler returned after its transaction is not stored: "
        "set job.result before that ends",
        f"job {ids['raises']} succeeded in its transaction; what came later is dropped: "
        "too late",
    ]
    assert told[1].exc_info is not None
    assert isinstance(told[1].exc_info[1], ValueError)


@pytest.mark.own_session
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_transactions_and_effects_use_connections_again(
    client: Client, db: psycopg.Connection[Any], drain: Drain, kind: str
) -> None:
    registry = Registry()
    sessions: list[int] = []

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with job.effect("mail", str(job.job_id)):
            pass
        with job.transaction() as connection:
            sessions.append(connection.info.backend_pid)

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.effect("mail", str(job.job_id)):
            pass
        async with job.transaction() as connection:
            sessions.append(connection.info.backend_pid)

    client.enqueue_many([{"job_type": kind}] * 30)
    drain(registry, concurrency=2)

    assert len(sessions) == 30
    assert len(set(sessions)) <= 2
    gone = "select count(*) from pg_stat_activity where pid = any (%s)"
    wait_until(lambda: db.execute(gone, [sessions]).fetchone() == (0,), "their end")


@pytest.mark.own_session
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    "change",
    [
        "create temp table t (); set search_path = public; select pg_advisory_lock(1)",
        "prepare t as select 1",
        "deallocate all; set search_path = public",
    ],
)
def test_a_handler_sees_nothing_of_the_session_of_another(
    client: Client, drain: Drain, kind: str, change: LiteralString
) -> None:
    registry = Registry()
    seen: list[Any] = []
    look = """
        select current_setting('search_path'), to_regclass('pg_temp.t'),
            exists (select from pg_prepared_statements where name = 't'),
            exists (select from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())
    """

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with job.transaction() as connection:
            seen.append(connection.execute(look).fetchone())
            connection.execute(change)

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.transaction() as connection:
            seen.append(await (await connection.execute(look)).fetchone())
            await connection.execute(change)

    client.enqueue_many([{"job_type": kind}] * 3)
    drain(registry, concurrency=1)

    assert seen == [('"$user", public', None, False, False)] * 3


class Shouted(Loader):
    def load(self, data: Any) -> str:
        return bytes(data).decode().upper()


CHANGES: dict[str, Callable[[Any, list[Any]], object]] = {
    "a row factory": lambda c, seen: setattr(c, "row_factory", psycopg.rows.dict_row),
    "a loader": lambda c, seen: c.adapters.register_loader("text", Shouted),
    "a limit": lambda c, seen: setattr(c, "prepared_max", 0),
    "a callback": lambda c, seen: c.add_notice_handler(seen.append),
}


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_handler_sees_nothing_of_what_another_has_changed_in_a_connection(
    client: Client, drain: Drain, kind: str, change: Callable[[Any, list[Any]], object]
) -> None:
    registry = Registry()
    seen: list[Any] = []
    told = "do $$ begin raise notice 'told'; end $$"

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with job.transaction() as connection:
            seen.append(connection.execute("select 'a'").fetchone())
            seen.append(connection.prepared_max)
            connection.execute(told)
            change(connection, seen)

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.transaction() as connection:
            seen.append(await (await connection.execute("select 'a'")).fetchone())
            seen.append(connection.prepared_max)
            await connection.execute(told)
            change(connection, seen)

    client.enqueue_many([{"job_type": kind}] * 3)
    drain(registry, concurrency=1)

    assert seen == [("a",), 100] * 3


def test_a_handler_hears_the_notices_of_its_statements(client: Client, drain: Drain) -> None:
    registry = Registry()
    heard: list[str | None] = []

    @registry.handler("x")
    def handle(job: Job) -> None:
        with job.transaction() as connection:
            connection.add_notice_handler(lambda notice: heard.append(notice.message_primary))
            connection.execute("do $$ begin raise notice 'told'; end $$")

    client.enqueue("x")
    drain(registry)

    assert heard == ["told"]


@pytest.mark.parametrize("error", [None, ValueError, psycopg.Rollback])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_goes_on_after_its_transaction_writes_nothing_in_the_next(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    kind: str,
    error: type[Exception] | None,
) -> None:
    """As the other calls of `asyncio.gather` do when one raises, and tasks without an end."""
    registry = Registry()
    is_next, is_refused = threading.Event(), threading.Event()
    refusals: list[str] = []
    db.execute("create table written (job_type text)")
    insert = "insert into written values ('first')"

    def write(connection: psycopg.Connection[Any], cursor: psycopg.Cursor[Any]) -> None:
        is_next.wait(10)
        for act in (
            lambda: connection.execute(insert),
            lambda: cursor.execute(insert),
            connection.commit,
            connection.transaction().__enter__,
        ):
            with pytest.raises(psycopg.InterfaceError) as raised:
                act()
            refusals.append(str(raised.value))
        connection.close()
        is_refused.set()

    async def write_async(
        connection: psycopg.AsyncConnection[Any], cursor: psycopg.AsyncCursor[Any]
    ) -> None:
        await asyncio.to_thread(is_next.wait, 10)
        for act in (
            lambda: connection.execute(insert),
            lambda: cursor.execute(insert),
            connection.commit,
            connection.transaction().__aenter__,
        ):
            with pytest.raises(psycopg.InterfaceError) as raised:
                await act()
            refusals.append(str(raised.value))
        await connection.close()
        is_refused.set()

    tasks: list[asyncio.Task[None]] = []

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with job.transaction() as connection:
            threading.Thread(target=write, args=[connection, connection.cursor()]).start()
            if error is not None:
                raise error

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.transaction() as connection:
            writing = write_async(connection, connection.cursor())
            tasks.append(asyncio.create_task(writing))
            if error is not None:
                raise error

    @registry.handler("plain_next")
    def plain_next(job: Job) -> None:
        with job.transaction() as connection:
            is_next.set()
            is_refused.wait(10)
            connection.execute("insert into written values ('next')")

    @registry.handler("async_next")
    async def next_in_loop(job: AsyncJob) -> None:
        async with job.transaction() as connection:
            is_next.set()
            await asyncio.to_thread(is_refused.wait, 10)
            await connection.execute("insert into written values ('next')")

    client.enqueue(kind, max_attempts=1)
    client.enqueue(f"{kind}_next")
    drain(registry, concurrency=1)

    assert db.execute("select job_type from written").fetchall() == [("next",)]
    assert len(refusals) == 4
    assert all("transaction() of job" in text for text in refusals)


def test_a_part_that_has_not_ended_fails_the_whole(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    """A task has written half of what it means to write, and is refused the rest."""
    registry = Registry()
    has_begun, tasks = asyncio.Event(), []

    async def write(connection: psycopg.AsyncConnection[Any]) -> None:
        async with connection.transaction():
            await connection.execute("insert into public.marks values (1)")
            has_begun.set()
            await asyncio.Event().wait()

    @registry.handler("x")
    async def handle(job: AsyncJob) -> None:
        async with job.transaction() as connection:
            tasks.append(asyncio.create_task(write(connection)))
            await has_begun.wait()

    client.enqueue("x", max_attempts=1)
    drain(registry)

    assert _marks_of(db) == []
    kinds = db.execute("select status, error_type from rota.finished_jobs").fetchall()
    assert kinds == [("dead", "psycopg.transaction.OutOfOrderTransactionNesting")]


def _numbers(connection: psycopg.Connection[Any]) -> Iterator[Any]:
    with connection.cursor().copy("copy (select generate_series(1, 1000)) to stdout") as copy:
        yield from copy.rows()


async def _numbers_async(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[Any]:
    cursor = connection.cursor()
    async with cursor.copy("copy (select generate_series(1, 1000)) to stdout") as copy:
        async for row in copy.rows():
            yield row


def _streamed(connection: psycopg.Connection[Any]) -> Iterator[Any]:
    return connection.cursor().stream("select generate_series(1, 1000)")


def _streamed_async(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[Any]:
    return connection.cursor().stream("select generate_series(1, 1000)")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "numbers", [_numbers, _streamed, _numbers_async, _streamed_async], ids=lambda f: f.__name__
)
def test_a_copy_that_is_not_read_to_its_end_keeps_no_handler(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    numbers: Callable[[Any], Any],
    fails: bool,
) -> None:
    """A generator has it open, and with it the lock of the connection."""
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute("insert into public.marks values (1)")
            rows = numbers(connection)
            next(rows)
            if fails:
                raise ValueError

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.transaction() as connection:
            await connection.execute("insert into public.marks values (1)")
            rows = numbers(connection)
            await anext(rows)
            if fails:
                raise ValueError

    client.enqueue("async" if "async" in numbers.__name__ else "plain", max_attempts=1)
    drain(registry)

    assert _marks_of(db) == []
    ((kind, text),) = db.execute("select error_type, last_error from rota.dead_jobs").fetchall()
    assert kind == ("ValueError" if fails else "RuntimeError")
    assert fails or "a copy(), stream() or statement" in text


@pytest.mark.parametrize("statement", ["commit", "rollback"])
def test_a_handler_that_ends_the_transaction_by_itself_fails(
    client: Client, db: psycopg.Connection[Any], drain: Drain, statement: LiteralString
) -> None:
    """What it wrote and the end of its job would not be committed together."""
    registry = Registry()

    @registry.handler("x")
    def handle(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute(statement)

    client.enqueue("x", max_attempts=1)
    drain(registry)

    ((text,),) = db.execute("select last_error from rota.dead_jobs").fetchall()
    assert "has ended its transaction" in text


@pytest.mark.own_session
def test_a_search_path_that_shadows_the_catalog_is_not_used(
    client: Client, db: psycopg.Connection[Any], admin: psycopg.Connection[Any], drain: Drain
) -> None:
    """What the worker itself asks of a session calls no function of others."""
    registry = Registry()
    pids: list[int] = []

    @registry.handler("x")
    def handle(job: Job) -> None:
        with job.transaction() as connection:
            pids.append(connection.info.backend_pid)

    db.execute("create schema shadows")
    for name in ("pg_backend_pid", "pg_advisory_unlock_all", "current_setting"):
        db.execute(
            sql.SQL(
                "create function shadows.{}(text default '') returns text language plpgsql"
                " as $$ begin raise exception 'run by %', current_user; end $$"
            ).format(sql.Identifier(name))
        )
    name = sql.Identifier(db.info.dbname)
    path = "alter database {} set search_path = shadows, pg_catalog"
    admin.execute(sql.SQL(path).format(name))
    client.enqueue_many([{"job_type": "x"}] * 3)
    drain(registry, concurrency=1)

    assert db.execute("select attempts from rota.finished_jobs").fetchall() == [(1,)] * 3
    assert len(set(pids)) == 1  # it was reset, and lent again


@pytest.mark.own_session
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_connection_that_was_ended_while_nobody_had_it_is_not_lent(
    client: Client, db: psycopg.Connection[Any], drain: Drain, kind: str
) -> None:
    registry = Registry()
    end = "select pg_terminate_backend(%s, 5000)"

    @registry.handler("plain")
    def plain(job: Job) -> None:
        with job.transaction() as connection:
            backend = connection.info.backend_pid
        db.execute(end, [backend])

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        async with job.transaction() as connection:
            backend = connection.info.backend_pid
        db.execute(end, [backend])

    client.enqueue_many([{"job_type": kind}] * 3)
    drain(registry, concurrency=1)

    rows = db.execute("select status, attempts from rota.job_runs").fetchall()
    assert rows == [("succeeded", 1)] * 3
