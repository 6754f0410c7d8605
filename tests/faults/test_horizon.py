"""What keeps vacuum from removing dead rows: a prepared transaction, a standby, its slot.

Each is there for real, on servers of their own, and old by transactions, of which a server
makes a hundred thousand in a second or two.  The remedy is what removes it, or says where.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.rows import dict_row, namedtuple_row
from psycopg.types.json import Jsonb

from rota.testing.server import find_binaries, memory
from support.server import INSTALL, Server
from support.waiting import wait_until

Db = psycopg.Connection[Any]
SETTINGS = ("max_prepared_transactions=5", "synchronous_commit=off", "autovacuum=off")
MANY = """
do $$ begin
    for i in 1..100100 loop perform pg_current_xact_id(); commit; end loop;
end $$
"""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def primary() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(dir=memory()))
    folder.chmod(0o755)
    (folder / "primary").mkdir()
    server = Server.create(folder / "primary", SETTINGS)
    yield server
    server.destroy()
    shutil.rmtree(folder)


@pytest.fixture
def db(primary: Server) -> Iterator[Db]:
    with psycopg.connect(primary.url(), autocommit=True) as connection:
        connection.execute("select rota.tick()")
        yield connection


def horizon(db: Db) -> list[Any]:
    with db.cursor(row_factory=namedtuple_row) as cursor:
        cursor.execute(
            "select severity, evidence, remedy from rota.doctor()"
            " where finding = 'horizon' and severity <> 'ok'"
        )
        return cursor.fetchall()


def test_a_prepared_transaction_is_named_and_rolled_back(primary: Server, db: Db) -> None:
    with psycopg.connect(primary.url(), autocommit=True) as other:
        other.execute("begin; select rota.enqueue('x'); prepare transaction 'it''s \x1b left'")
    assert horizon(db) == []
    db.execute(MANY)
    # Since when is known, too; it is not five minutes.
    assert horizon(db) == []
    db.execute("create or replace function rota.now() returns timestamptz stable language sql"
               " as $$ select clock_timestamp() + interval '6 minutes' $$")  # fmt: skip

    (row,) = horizon(db)

    assert row.severity == "warning"
    assert row.evidence.startswith("prepared transaction 'it''s ? left' of postgres holds a")
    assert "dead rows of rota's tables cannot be removed meanwhile" in row.evidence
    assert row.remedy.isprintable()
    db.execute(row.remedy)
    assert horizon(db) == []
    assert db.execute("select count(*) from pg_prepared_xacts").fetchone() == (0,)
    db.execute("create or replace function rota.now() returns timestamptz stable language sql"
               " as $$ select clock_timestamp() $$")  # fmt: skip


def test_a_query_on_a_standby_is_told_and_then_the_slot_that_nobody_reads(
    primary: Server, db: Db
) -> None:
    standby = primary.copy(primary.home.parent / "standby")
    try:
        standby.configure(hot_standby_feedback="on", wal_receiver_status_interval="1s")
        with psycopg.connect(standby.url(), autocommit=False) as reader:
            reader.execute("set transaction isolation level repeatable read")
            reader.execute("select count(*) from rota.jobs")
            sender = "select backend_xmin is not null from pg_stat_replication"
            wait_until(lambda: db.execute(sender).fetchone() == (True,), "the feedback")
            assert horizon(db) == []
            db.execute(MANY)

            (row,) = horizon(db)

            assert row.severity == "warning"
            assert row.evidence.startswith("a query on the standby of pid ")
            assert "which you have to end there, holds a snapshot" in row.evidence
            assert row.remedy is None
            reader.rollback()
            wait_until(lambda: horizon(db) == [], "the feedback of the standby without it")

            db.execute("select pg_create_physical_replication_slot('left', true)")
            standby.configure(primary_slot_name="left")
            reader.execute("set transaction isolation level repeatable read")
            reader.execute("select count(*) from rota.jobs")
            slot = "select xmin is not null from pg_replication_slots"
            wait_until(lambda: db.execute(slot).fetchone() == (True,), "the slot's horizon")
            db.execute(MANY)

            (row,) = horizon(db)

            assert row.evidence.startswith(
                "replication slot left, which a standby reads, where you have to end a query"
            )
            assert row.remedy is None
        standby.stop()
        gone = "select active from pg_replication_slots"
        wait_until(lambda: db.execute(gone).fetchone() == (False,), "the end of the standby")

        (row,) = horizon(db)

        assert row.evidence.startswith(
            "replication slot left, which no client reads, holds a snap"
        )
        db.execute(row.remedy)
        assert horizon(db) == []
    finally:
        standby.destroy()


def test_a_job_that_a_prepared_transaction_has_locked_is_let_go(
    primary: Server, db: Db
) -> None:
    (job_id,) = db.execute("select rota.enqueue('x')").fetchone() or (0,)
    with psycopg.connect(primary.url(), autocommit=True) as other:
        other.execute("begin")
        other.execute("select from rota.jobs where id = %s for update", (job_id,))
        other.execute("prepare transaction 'it''s locked'")

    def asked() -> list[Any]:
        with db.cursor(row_factory=namedtuple_row) as cursor:
            return cursor.execute("select * from rota.explain_job(%s)", (job_id,)).fetchall()

    row = asked()[0]
    cancel = "select conflicts from rota.act_on_jobs('cancel', %s)"
    ((conflict,),) = db.execute(cancel, (f'{{"ids": [{job_id}]}}',)).fetchone() or ([],)

    assert conflict["reason"] == "locked by the prepared transaction 'it''s locked'"
    assert row.reason == "row_locked"
    assert "by the prepared transaction 'it''s locked'; claims skip it" in row.explanation
    db.execute(row.remedy)
    assert "row_locked" not in {found.reason for found in asked()}


def test_a_number_that_a_prepared_transaction_holds_up_names_it(
    primary: Server, db: Db
) -> None:
    with psycopg.connect(primary.url(), autocommit=True) as other:
        other.execute("begin; select rota.enqueue('x'); prepare transaction 'it''s open'")
    try:
        with pytest.raises(psycopg.errors.LockNotAvailable) as caught:
            db.execute("select rota.set_database_number(6)")
    finally:
        db.execute("rollback prepared 'it''s open'")

    remedy = "rollback prepared 'it''s open';"
    assert caught.value.diag.message_hint == f"End it, and try again: {remedy}"


def test_an_install_that_a_prepared_transaction_holds_up_says_so(
    primary: Server, db: Db
) -> None:
    with psycopg.connect(primary.url(), autocommit=True) as other:
        other.execute("begin; select from rota.ticker_health; prepare transaction 'reads'")
    try:
        install = ["psql", "-X", "-q", "-d", primary.url(), "-f", str(INSTALL)]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
    finally:
        db.execute("rollback prepared 'reads'")

    assert "another transaction has read rota.ticker_health and stays open" in done.stderr
    assert "End it, or wait for it, then install again" in done.stderr


@pytest.fixture(scope="module")
def exhausted() -> Iterator[tuple[Server, dict[str, int]]]:
    """A server without transaction ids, as a slot that nobody reads keeps it, and a job of it.

    A slot of logical decoding, since the server starts at once with it.  With a transaction
    that is as old it first writes eight gigabytes.
    """
    if not (find_binaries(os.environ.get("ROTA_PG_BINDIR"))[0] / "pg_resetwal").exists():
        pytest.skip("these PostgreSQL programs have no pg_resetwal")
    folder = Path(tempfile.mkdtemp(dir=memory()))
    folder.chmod(0o755)
    server = Server.create(folder, (*SETTINGS, "wal_level=logical"))
    try:
        with psycopg.connect(server.url(), autocommit=True, row_factory=dict_row) as db:
            db.execute("select rota.set_database_number(3)")
            db.execute("select rota.enqueue('x')")
            (job,) = db.execute("select job_id, lease_token from rota.claim_jobs('w')")
            db.execute("select pg_create_logical_replication_slot('old', 'pgoutput')")
        server.stop()
        server.age(2_145_500_000)
        server.start()
        yield server, job
    finally:
        server.destroy()


@pytest.mark.parametrize("call", ["end_jobs", "receive_jobs"])
def test_a_server_that_is_out_of_transaction_ids_refuses_nothing_for_good(
    exhausted: tuple[Server, dict[str, int]], call: str
) -> None:
    """The code is that of a value which is too large, for which a job would fail or die."""
    server, job = exhausted
    calls: dict[str, tuple[LiteralString, object]] = {
        "end_jobs": ("select * from rota.end_jobs(%s)", {**job, "outcome": "succeeded"}),
        "receive_jobs": (
            "select * from rota.receive_jobs(3, '{7, 8}', array[now(), now()], %s)",
            {"job_type": "x"},
        ),
    }
    text, each = calls[call]

    with (
        psycopg.connect(server.url(), autocommit=True) as db,
        pytest.raises(psycopg.errors.ProgramLimitExceeded),
    ):
        db.execute(text, (Jsonb([each] * 2),))


def test_a_server_that_is_out_of_transaction_ids_is_told(
    exhausted: tuple[Server, dict[str, int]],
) -> None:
    """It comes last, since it gives the server ids again."""

    def told() -> list[Any]:
        return db.execute(
            "select severity, evidence, remedy from rota.doctor() where finding = 'vacuum'"
            " and evidence like 'database jobs %'"
        ).fetchall()

    with psycopg.connect(exhausted[0].url(), autocommit=True) as db:
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            db.execute("select rota.enqueue('x')")

        ((severity, evidence, remedy),) = told()

        assert severity == "critical"
        assert " transactions behind: " in evidence
        assert "pg_replication_slots, there also as catalog_xmin; then" in evidence
        db.execute("select pg_drop_replication_slot('old')")
        db.execute(remedy)
        assert told() == []


def test_autovacuum_that_is_off_is_put_on_by_two_statements(primary: Server, db: Db) -> None:
    def off() -> list[Any]:
        with db.cursor(row_factory=namedtuple_row) as cursor:
            cursor.execute(
                "select * from rota.doctor() where finding = 'vacuum' and severity = 'critical'"
            )
            return cursor.fetchall()

    setting, reload = off()

    assert setting.evidence.startswith("autovacuum is off, so no table is vacuumed")
    assert "The server reads the setting with this statement" in reload.evidence
    db.execute(setting.remedy)
    db.execute(reload.remedy)
    wait_until(lambda: off() == [], "the server to read its settings")
