"""The command that ticks: `rota tick --loop`."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from rota import Client, InvalidArgumentError
from rota.__main__ import main
from rota.worker import maintenance
from rota.worker.connection import Connection, ConnectionState
from support.supervisor import Command, killing
from support.waiting import wait_until

Start = Callable[..., Command]


@pytest.fixture
def start(dsn: str, tmp_path: Path) -> Iterator[Start]:
    """Start `rota tick --loop`; those that still run at the end are killed."""
    with killing() as started:

        def run(*options: str, dsn: str = dsn) -> Command:
            command = [sys.executable, "-m", "rota", "tick", "--loop", *options]
            log = tmp_path / f"ticker{len(started)}.log"
            started.append(ticker := Command(command, None, {"DATABASE_URL": dsn}, log))
            return ticker

        yield run


def lose_a_job(client: Client, db: psycopg.Connection[Any]) -> None:
    client.enqueue("lost", max_attempts=1)
    client.claim_jobs("gone")
    db.execute("update rota.jobs set locked_until = rota.now() - interval '1 minute'")


@pytest.mark.slow
def test_loop_says_what_it_did_and_is_quiet_otherwise(
    start: Start, client: Client, db: psycopg.Connection[Any]
) -> None:
    db.execute("select rota._create_partitions()")  # the database may be of yesterday
    ticker = start("--every", "0.05")
    ticker.wait_for_line(f"ticker started database={db.info.dbname} every=0.05")

    for count in (1, 2):
        lose_a_job(client, db)
        ticker.wait_for_line("INFO tick jobs_swept=1", count)

    assert len(ticker.lines("")) == 3


@pytest.mark.slow
def test_loop_ticks_sooner_where_a_job_may_start(start: Start, client: Client) -> None:
    """As a worker does whose places are all taken: at a rate it would let in one a second."""
    client.set_limit(job_type="mail", max_starts=10, burst=1)
    started = [client.enqueue("mail") and client.claim_jobs("w", max_jobs=9) for _ in range(5)]

    start("--every", "3600")

    wait_until(
        lambda: started.append(client.claim_jobs("w")) or sum(map(len, started)) == 5,
        "all to have started",
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_loop_ends_by_a_signal(
    start: Start, db: psycopg.Connection[Any], number: signal.Signals
) -> None:
    ticker = start("--every", "60")
    ticker.wait_for_line("ticker started")

    ticker.signal(number)

    assert ticker.wait(10) == 0
    ticker.wait_for_line("ticker stopped")


@pytest.mark.slow
@pytest.mark.own_session
def test_loop_survives_a_lost_connection(
    start: Start, client: Client, db: psycopg.Connection[Any]
) -> None:
    ticker = start("--every", "0.05")
    ticker.wait_for_line("ticker started")
    ticked = "select from rota.ticker_health where last_tick_by like 'rota tick%'"
    wait_until(lambda: db.execute(ticked).rowcount)

    ended = wait_until(
        lambda: (
            db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'rota tick' and datname = current_database()"
            ).rowcount
        )
    )
    ticker.wait_for_line("the database is back")
    lose_a_job(client, db)
    ticker.wait_for_line("tick jobs_swept=1")

    assert ended == 1
    assert len(ticker.lines("the database is lost")) == 1
    assert len(ticker.lines("WARNING")) == 2


@pytest.mark.slow
def test_loop_goes_on_where_a_part_fails(
    start: Start, client: Client, db: psycopg.Connection[Any]
) -> None:
    definition = db.execute(
        "select pg_get_functiondef('rota._do_checks(integer)'::regprocedure)"
    ).fetchone()
    assert definition is not None
    db.execute("drop function rota._do_checks(integer)")
    # Each tick shall come to the part that fails, also where nothing is due.
    db.execute(
        "create or replace function rota._has_maintenance(patient boolean default false)"
        " returns boolean"
        " language sql as 'select true'"
    )

    ticker = start("--every", "0.05")
    ticker.wait_for_line("failing (see the server log): checks_done")
    lose_a_job(client, db)
    ticker.wait_for_line("tick jobs_swept=1")
    db.execute(definition[0])
    ticker.wait_for_line("the server log): none")

    assert len(ticker.lines("WARNING failing")) == 2
    assert len(ticker.lines("WARNING database: pending checks failed")) == 1


@pytest.mark.slow
def test_loop_waits_longer_and_longer_where_every_tick_fails(
    start: Start, db: psycopg.Connection[Any]
) -> None:
    ticker = start("--every", "0.05")
    ticker.wait_for_line("ticker started")
    # A function could be renamed without notice: a prepared statement goes by its number.
    db.execute("alter table rota.maintenance rename to rest")
    ticker.wait_for_line('tick failed, retrying: relation "rota.maintenance" does not exist')
    db.execute("alter table rota.rest rename to maintenance")

    last = "select done_at from rota.maintenance where task = 'tick'"
    db.execute("update rota.maintenance set done_at = '-infinity'")
    wait_until(lambda: db.execute(f"{last} and done_at > '-infinity'").fetchone())

    assert 1 <= len(ticker.lines("tick failed")) < 8


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--every", "0"], 2, "rota: every must be 0.001 to 3600"),
        (["--every", "3601"], 2, "rota: every must be 0.001 to 3600"),
        (["-d", "postgresql://127.0.0.1:1/x"], 1, "Connection refused"),
    ],
)
def test_loop_that_cannot_begin_says_why(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tick", "--loop", *words]) == code

    assert message in capsys.readouterr().err


def test_tick_of_a_client_is_alone_in_its_transaction_however_often(
    connect: Callable[..., psycopg.Connection[Any]],
) -> None:
    """Else no worker would ever make or drop a partition, or find another tick running."""
    holder, ticking = connect(autocommit=False), connect(prepare_threshold=2)
    for _ in range(4):
        partition = "rota.finished_jobs_done_" + a_week_from_now(ticking)
        ticking.execute(f"drop table if exists {partition}")
        ticking.execute("update rota.maintenance set done_at = done_at - interval '10 minutes'")
        assert Client(ticking).tick().partitions_created == 1

    holder.execute("lock table rota.maintenance in share update exclusive mode")
    assert Client(ticking).tick().was_skipped


def a_week_from_now(db: psycopg.Connection[Any]) -> str:
    row = db.execute(
        "select to_char((rota.now() at time zone 'UTC')::date + 7, 'YYYYMMDD')"
    ).fetchone()
    assert row
    return str(row[0])


@pytest.mark.slow
def test_loop_tells_of_a_schedule_that_it_disabled(
    start: Start, client: Client, db: psycopg.Connection[Any]
) -> None:
    client.schedule_job("nightly", "* * * * * *", "x")
    db.execute("update rota.job_definitions set schedule = 'soon'")

    ticker = start()

    ticker.wait_for_line("schedule nightly is disabled")


@pytest.mark.parametrize("payload", [[1], 5, True, 1.5, "[1]"])
def test_a_payload_that_is_no_object_is_refused_as_such(client: Client, payload: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="payload must be a JSON object"):
        client.schedule_job("p", "@daily", "x", payload)
    with pytest.raises(InvalidArgumentError, match="payload must be a JSON object"):
        client.enqueue("x", payload)


def test_a_standby_is_no_place_to_tick_and_nobody_dies_of_it(
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_read_only=on")

    async def tick_before_and_after_the_failover() -> list[bool]:
        connection = Connection(dsn, "rota tick", ConnectionState())
        ticker = maintenance.Ticker(connection, 1.0)
        reports = [await ticker.tick()]
        monkeypatch.delenv("PGOPTIONS")
        reports.append(await ticker.tick())
        await connection.close()
        return [report is not None for report in reports]

    assert main(["tick", "-d", dsn]) == 1
    assert "tick at the primary" in capsys.readouterr().err
    assert asyncio.run(tick_before_and_after_the_failover()) == [False, True]
    assert "tick failed, retrying: tick() cannot run" in caplog.messages[0]


def test_nobody_ticks_before_the_others_can_be_back_after_an_outage() -> None:
    """Jobs whose leases ended in the outage still run, and their workers will say so."""
    state = ConnectionState()
    connection: Any = SimpleNamespace(state=state)
    ticker = maintenance.Ticker(connection, 1.0)
    never = maintenance.Ticker(connection, None)

    state.works(time.monotonic())
    assert ticker.due_at <= time.monotonic()
    state.lost(psycopg.OperationalError("connection refused"), time.monotonic())
    state.works(time.monotonic())
    ticker.hurry()

    assert 9 < ticker.due_at - time.monotonic() <= 10
    assert never.due_at == inf
