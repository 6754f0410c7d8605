"""With an archive nothing of the history is deleted."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from races.harness import Session
from sql.helpers import claim, one, owner, refused, rows, scalar, settle, value
from sql.maintenance.test_retention import end, tick_until_done
from sql.operations.test_acts import act, dead
from sql.operations.test_doctor import doctor

pytestmark = pytest.mark.slow

KEPT = """
    select count(*) from (
        select id from rota.finished_jobs
        union all
        select (row_as ->> 'id')::bigint from history.rota_rows where source like 'finished%%'
    ) as k
"""


@pytest.fixture
def history(db):
    """The schema of the archive, which belongs to the owner of rota."""
    db.execute("create schema history authorization rota_installer")
    value(db, "set_archive", schema="history")


@pytest.mark.parametrize("schema", ["rota", "public", "pg_catalog", "none", "theirs", ""])
def test_set_archive_refuses_a_schema_that_is_not_of_the_owner(db, schema):
    db.execute("create schema theirs")
    with refused("schema"):
        value(db, "set_archive", schema=schema)


@pytest.mark.parametrize("is_undone", [False, True])
def test_two_who_set_one_archive_make_one_table(connect, db, is_undone):
    db.execute("create schema history authorization rota_installer")
    a, b = Session(connect(autocommit=False), db), Session(connect(), db)
    set_it = "select rota.set_archive('history')"
    a.fetch(set_it)

    pending = b.start(set_it)
    pending.wait_blocked(by=a)
    (a.connection.rollback if is_undone else a.connection.commit)()
    pending.result()

    assert scalar(db, "select count(*) from history.rota_rows") == 0


def test_a_day_goes_to_the_archive_as_it_is(db, clock, history):
    clock.set("2026-01-10 12:00+00")
    settle(db)
    job_id = end(db, "succeeded")
    clock.advance("9 days")
    tick_until_done(db, clock)

    days = "select id from history.finished_jobs_done_20260110"
    assert scalar(db, "select count(*) from rota.finished_jobs") == 0
    found = rows(db, days) if scalar(
        db, "select to_regclass('history.finished_jobs_done_20260110') is not null"
    ) else rows(db, "select (row_as ->> 'id')::bigint from history.rota_rows")  # fmt: skip
    assert found == [(job_id,)]


def test_rows_that_are_deleted_one_by_one_go_to_its_table(db, clock, history):
    value(db, "set_queue", queue="short", keep_finished="1 minute", keep_dead="1 minute")
    ids = {end(db, status, "short") for status in ("succeeded", "dead", "cancelled")}
    clock.advance("1 hour")
    tick_until_done(db, clock)

    assert scalar(db, "select count(*) from rota.finished_jobs") == 0
    assert {
        job_id for (job_id,) in rows(
            db, "select (row_as ->> 'id')::bigint from history.rota_rows"
            " where source like 'finished%%'",
        )
    } == ids  # fmt: skip


def test_an_archive_that_is_gone_is_told_and_mended(db, clock, history):
    value(db, "set_queue", queue="short", keep_finished="1 minute")
    end(db, "succeeded", "short")
    db.execute("drop schema history cascade")
    clock.advance("1 hour")
    tick_until_done(db, clock)
    assert scalar(db, "select count(*) from rota.finished_jobs") == 1

    (found,) = [row for row in doctor(db) if row.finding == "partitions"]

    assert (found.severity, "history.rota_rows" in found.evidence) == ("warning", True)
    db.execute(found.remedy)
    clock.advance("6 minutes")
    tick_until_done(db, clock)
    assert scalar(db, "select count(*) from history.rota_rows") == 1
    assert [row for row in doctor(db) if row.finding == "partitions"] == []


def test_what_an_operator_purges_goes_there_too(db, history):
    stages = [{"stage": "pay", "job_type": "a"}]
    value(db, "define_pipeline", pipeline="order", stages=Jsonb(stages))
    run = value(db, "start_pipeline", pipeline="order")
    value(db, "finish_job", **owner(claim(db)[0]))
    lost = dead(db)

    act(db, "purge", {"status": ["succeeded", "dead"]})

    assert scalar(db, "select count(*) from rota.finished_jobs") == 0
    archived = {
        (source, row.get("job_id", row.get("id")))
        for source, row in rows(db, "select source, row_as from history.rota_rows")
    }
    assert archived == {
        ("finished_jobs", run), ("stage_runs", run), ("finished_jobs", lost),
        ("job_errors", lost),
    }  # fmt: skip


def test_what_the_archive_cannot_take_is_not_purged(db, history):
    lost = dead(db)
    db.execute("drop table history.rota_rows")

    told = act(db, "purge", {"ids": [lost]})

    assert (told.changed, len(told.conflicts)) == (0, 1)
    assert scalar(db, "select count(*) from rota.finished_jobs") == 1


def test_what_the_archive_cannot_take_stays(db, clock, history):
    value(db, "set_queue", queue="short", keep_finished="1 minute")
    end(db, "succeeded", "short")
    db.execute("drop table history.rota_rows")
    clock.advance("1 hour")

    one(db, "tick")

    assert scalar(db, "select count(*) from rota.finished_jobs") == 1


def test_without_an_archive_it_is_deleted_again(db, clock, history):
    value(db, "set_archive")
    value(db, "set_queue", queue="short", keep_finished="1 minute")
    end(db, "succeeded", "short")
    clock.advance("1 hour")
    tick_until_done(db, clock)

    assert scalar(db, "select count(*) from rota.finished_jobs") == 0
    assert scalar(db, "select count(*) from history.rota_rows") == 0


def test_set_archive_refuses_a_table_of_somebody_else(db, history):
    db.execute("drop table if exists history.rota_rows")
    db.execute("create table history.rota_rows (source text, row_as jsonb)")
    db.execute("alter table history.rota_rows owner to pg_monitor")

    with refused("schema"):
        value(db, "set_archive", schema="history")
