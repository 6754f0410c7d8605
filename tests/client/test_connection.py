"""A connection of a worker to its database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import psycopg
import psycopg2
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rota import AsyncClient, Client, Job, Registry, Worker, install
from rota.client.connecting import connect
from rota.worker.connection import (
    Connection,
    ConnectionState,
    NoAnswerError,
    Retry,
    end_task,
    time_limit,
)
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
OURS = "select count(*) from pg_stat_activity where application_name = 'rota fetcher'"


def test_a_worker_takes_the_url_of_sqlalchemy_and_tells_no_password(
    client: Client, dsn: str
) -> None:
    registry, done = Registry(), []
    registry.handler("a")(lambda job: done.append(job.job_id))
    job_id = client.enqueue("a").job_id

    Worker(dsn.replace("postgresql:", "postgresql+psycopg:"), registry).run(drain=True)
    with pytest.raises(psycopg.ProgrammingError) as caught:
        Worker("mysql://shop:hunter2@localhost/shop", registry).run(drain=True)

    assert done == [job_id]
    assert "hunter2" not in str(caught.value)


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


def test_json_is_utf_8_whatever_the_environment_says(
    client: Client, dsn: str, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    seen: list[Any] = []

    @registry.handler("mail")
    def mail(job: Job) -> None:
        with job.transaction() as connection:
            row = connection.execute("select payload from rota.jobs").fetchone()
        seen.extend([job.payload, *(row or [])])

    client.enqueue("mail", {"name": "Zoë"})
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    drain(registry)

    assert seen == [{"name": "Zoë"}] * 2


def test_an_error_is_kept_where_the_database_lacks_its_characters(
    admin: psycopg.Connection[Any], server: Any
) -> None:
    admin.execute("create database latin template template0 encoding 'LATIN1' locale 'C'")
    url = server.url("latin")
    registry = Registry()

    @registry.handler("fails")
    def fails(job: Job) -> None:
        raise ValueError("Zoë \N{RIGHTWARDS ARROW} nowhere")

    try:
        with psycopg.connect(url, autocommit=True) as db:
            install(db)
            Client(db).enqueue("fails", max_attempts=1)
            Worker(url, registry).run(drain=True)
            dead = db.execute("select error_type, last_error from rota.dead_jobs").fetchall()
    finally:
        admin.execute("drop database latin with (force)")

    assert dead == [("ValueError", r"Zo\xeb \u2192 nowhere")]


def test_progress_is_kept_where_the_database_lacks_its_characters(in_latin1: str) -> None:
    registry = Registry()

    @registry.handler("climbs")
    def climbs(job: Job) -> None:
        job.set_progress(50, "Zoë \N{RIGHTWARDS ARROW} up")

    with psycopg.connect(in_latin1, autocommit=True, client_encoding="utf8") as db:
        job_id = Client(db).enqueue("climbs", queue="climbs", max_attempts=1).job_id
        Worker(in_latin1, registry, queues=["climbs"]).run(drain=True)
        done = "select status, progress_message from rota.job_runs where id = %s"
        found = db.execute(done, [job_id]).fetchone()

    assert found == ("succeeded", r"Zoë \u2192 up")


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_database_that_counts_bytes_takes_every_character(of_bytes: str, driver: str) -> None:
    """It refuses the escapes that JSON may have for characters outside of ASCII."""
    text = 'Zoë \\u00e9 "\N{CRAB}" \t\x01'
    registry = Registry()
    seen: list[Any] = []

    @registry.handler("returns")
    def returns(job: Job) -> dict[str, str]:
        seen.append(job.payload)
        return {text: text}

    @registry.handler("raises")
    def raises(job: Job) -> None:
        raise ValueError(text)

    with psycopg.connect(of_bytes, autocommit=True, client_encoding="utf8") as db:
        own: Any = db
        if driver == "psycopg2":
            own = psycopg2.connect(of_bytes, options="-c client_encoding=utf8")
        ids = [Client(own).enqueue("returns", {"t": text}, queue=driver).job_id]
        ids += [Client(own).enqueue("raises", queue=driver, max_attempts=1).job_id]
        own.commit()
        own.close() if own is not db else None
        Worker(of_bytes, registry, queues=[driver]).run(drain=True)

        runs = "select id, status, result, last_error from rota.job_runs"
        found = sorted(row[1:] for row in db.execute(runs) if row[0] in ids)

    assert seen == [{"t": text}]
    assert found == [("dead", None, text), ("succeeded", {text: text}, None)]


def count(db: psycopg.Connection[Any]) -> int:
    row = db.execute(OURS + " and datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


def test_a_cancellation_is_heard_where_the_answer_came_at_the_same_moment(dsn: str) -> None:
    async def call(answer: Exception | None) -> None:
        connection = Connection(dsn, "rota fetcher", ConnectionState())
        has_begun = asyncio.Event()

        async def swallow(client: AsyncClient) -> int:
            has_begun.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            if answer is not None:
                raise answer
            return 1

        calling = asyncio.create_task(connection.call(swallow))
        await has_begun.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await connection.close()

    asyncio.run(call(None))
    asyncio.run(call(psycopg.errors.LockNotAvailable("busy")))


@pytest.mark.own_session
def test_a_call_has_a_time_limit_and_the_next_one_another_connection(
    db: psycopg.Connection[Any], dsn: str
) -> None:
    async def call() -> None:
        connection = Connection(dsn, "rota fetcher", ConnectionState())
        first = await connection.call(_backend)
        with pytest.raises(NoAnswerError, match=r"no answer within 0\.2 seconds"):
            await connection.call(
                lambda client: client.connection.execute("select pg_sleep(60)"), timeout=0.2
            )
        assert await connection.call(_backend) != first
        await connection.close()

    asyncio.run(call())

    wait_until(lambda: count(db) == 0, "the end of its sessions")


def test_a_call_ends_though_the_server_hangs(dsn: str) -> None:
    """A server that is frozen answers neither the call nor the request to cancel it."""

    async def hang(client: AsyncClient) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    async def call() -> None:
        connection = Connection(dsn, "rota fetcher", ConnectionState())
        with pytest.raises(NoAnswerError):
            await connection.call(hang, timeout=0.1)
        task = asyncio.create_task(connection.call(hang))
        await asyncio.sleep(0.1)
        await end_task(task)
        assert task.cancelled()

    begun = time.monotonic()
    asyncio.run(call())

    assert time.monotonic() - begun < 10


async def _backend(client: AsyncClient) -> int:
    await client.version()
    return client.connection.info.backend_pid


def test_a_connection_is_closed_when_the_last_who_uses_it_has_closed_it(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    """worker shares it -- other calls -- worker leaves -- other has its answer."""
    query = "select state from pg_stat_activity where application_name = 'shared'"

    def states() -> list[str]:
        return [state for (state,) in db.execute(query).fetchall()]

    async def play() -> tuple[int, int]:
        connection = Connection(dsn, "shared", ConnectionState())
        first = await connection.call(_backend)
        connection.share()
        db.execute("select pg_advisory_lock(7)")
        call = asyncio.create_task(
            connection.call(lambda c: c.connection.execute("select pg_advisory_lock_shared(7)"))
        )
        while states() != ["active"]:
            await asyncio.sleep(0.01)
        await connection.close()
        db.execute("select pg_advisory_unlock(7)")
        await call
        again = await connection.call(_backend)
        await connection.close()
        return first, again

    first, again = asyncio.run(play())

    assert first == again
    wait_until(lambda: states() == [], "the end of the session")


def test_a_host_that_is_switched_off_is_waited_for_once(dsn: str) -> None:
    words: dict[str, Any] = dict(conninfo_to_dict(dsn))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words |= {
            "host": f"127.0.0.1,{words['host']}",
            "port": f"{silent.getsockname()[1]},{words['port']}",
            "target_session_attrs": "read-write",
            "connect_timeout": 2,
        }
        for _ in range(2):
            connect(make_conninfo("", **words)).close()

        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_waiting_ends_when_the_database_is_back(caplog: pytest.LogCaptureFixture) -> None:
    state = ConnectionState()
    state.works(time.monotonic())
    retries = [Retry("this", state), Retry("that", state)]
    for retry in retries:
        retry.failures = 10  # it waits for five seconds at least

    async def wait() -> None:
        opened_at = time.monotonic()
        error = psycopg.OperationalError("connection refused")
        state.lost(error, opened_at)
        waits = [asyncio.create_task(retry.wait(error)) for retry in retries]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(state.works, time.monotonic())
        await asyncio.gather(*waits)

    begun = time.monotonic()
    asyncio.run(wait())

    assert time.monotonic() - begun < 4
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("left", [0, 1])
def test_a_job_ends_once_its_process_can_open_files_again(
    client: Client,
    background: Callable[..., BackgroundWorker],
    status: Callable[[int], str],
    caplog: pytest.LogCaptureFixture,
    left: int,
) -> None:
    """A handler has leaked all files but so many, and the end needs a new connection."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    registry = Registry()

    @registry.handler("leak")
    def leak(job: Job) -> None:
        os.close(lowest := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, before[1]))

    try:
        job_id = client.enqueue("leak").job_id
        background(registry, listen=False)
        wait_until(lambda: "Too many open files" in caplog.text, "the lack of files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    wait_until(lambda: status(job_id) == "succeeded", "the end")
    assert "the connection to the database is lost" in caplog.text


def test_a_call_that_had_no_answer_gets_more_time(dsn: str) -> None:
    """Else one that takes long, such as a large batch, would never come to its end."""
    seconds = 0.5

    async def take_long(client: AsyncClient) -> None:
        await client.connection.execute("select pg_sleep(%s)", [seconds])

    async def call() -> int:
        connection = Connection(dsn, "rota completer", ConnectionState())
        refusals = 0
        while True:
            try:
                await connection.call(take_long, timeout=0.2)
            except NoAnswerError:
                refusals += 1
            else:
                await connection.close()
                return refusals

    assert 1 <= asyncio.run(call()) <= 3


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_time_limit_leaves_no_cancellation_behind(error: type[Exception] | None) -> None:
    """The task is that of a handler, which others may want to cancel later."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.suppress(ValueError):
            async with time_limit(0.05):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    if error is not None:
                        raise error from None
        assert task.cancelling() == 0
        with pytest.raises(NoAnswerError):
            async with time_limit(0.05):
                await asyncio.sleep(60)
        assert task.cancelling() == 0

    asyncio.run(run())


def test_a_cancellation_by_others_is_no_time_limit() -> None:
    async def wait() -> None:
        async with time_limit(0.05):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(60)  # as psycopg waits for the server

    async def run() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(run())


def test_an_answer_that_came_while_the_loop_was_blocked_is_no_failure(dsn: str) -> None:
    """Else the jobs of a claim would wait for the end of their leases."""

    async def call() -> str:
        connection = Connection(dsn, "rota test", ConnectionState())
        await connection.open()
        asking = asyncio.create_task(connection.call(AsyncClient.version, timeout=0.5))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.0, time.sleep, 2.0)
        try:
            return await asking
        finally:
            await connection.close()

    assert asyncio.run(call())


@pytest.mark.own_session
def test_the_server_also_notices_that_the_host_of_a_worker_has_vanished(
    client: Client, drain: Drain, dsn: str
) -> None:
    """Where it did not, the session would keep its locks for hours, as in a transaction."""
    asked = "select array[current_setting('tcp_keepalives_idle'), {}]".format(
        "current_setting('tcp_keepalives_interval'), current_setting('tcp_user_timeout')"
    )
    registry, found = Registry(), []

    @registry.handler("ask")
    def ask(job: Job) -> None:
        with job.transaction() as connection:
            found.append(connection.execute(asked).fetchone())

    async def call() -> None:
        connection = Connection(dsn, "rota notifier", ConnectionState())
        found.append(await (await (await connection.open()).execute(asked)).fetchone())
        await connection.close()

    asyncio.run(call())
    client.enqueue("ask")
    client.enqueue("ask")  # in the same session, which was reset meanwhile
    drain(registry, concurrency=1)

    assert found == [(["30", "10", "30000"],)] * 3
