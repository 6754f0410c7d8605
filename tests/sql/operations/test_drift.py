"""What is otherwise than it was installed: it is named, and the remedy makes it as it was."""

from __future__ import annotations

import re

import psycopg
import pytest

from sql.helpers import rows, scalar
from sql.operations.test_doctor import doctor

pytestmark = pytest.mark.slow

OWNER = "select nspowner::regrole::text from pg_namespace where nspname = 'rota'"


def only(db):
    (row,) = [row for row in doctor(db) if row.finding == "drift"]
    return row


# What is done, and what is said of it.
HARMS = [
    ("drop index rota.jobs_ready_idx", "critical", "index jobs_ready_idx is missing"),
    ("drop index rota.finished_jobs_id_idx", "critical", "index finished_jobs_id_idx is"),
    (
        "drop index rota.jobs_hold_idx; create index jobs_hold_idx on rota.jobs (id)",
        "critical",
        "index jobs_hold_idx was changed: it is CREATE INDEX",
    ),
    ("create index mine_idx on rota.jobs (payload)", "warning", "index mine_idx is not part"),
    (
        "alter table rota.jobs drop constraint jobs_status_check",
        "critical",
        "constraint jobs.jobs_status_check is missing",
    ),
    (
        "alter table rota.effects drop constraint effects_pkey",
        "critical",
        "constraint effects.effects_pkey is missing",
    ),
    (
        "alter table rota.jobs add constraint mine check (id > 0)",
        "warning",
        "constraint jobs.mine is not part of the install",
    ),
    (
        "alter table rota.jobs add column mine text",
        "warning",
        "column jobs.mine is not part of",
    ),
    ("alter table rota.jobs drop column skip_dead", "critical", "column jobs.skip_dead is"),
    (
        "alter table rota.jobs alter column created_at drop default",
        "critical",
        "column jobs.created_at was changed: default is nothing, and should be rota.now()",
    ),
    (
        "alter table rota.jobs alter column progress_message set not null",
        "critical",
        "column jobs.progress_message was changed",
    ),
    (
        "alter table rota.workers set unlogged",
        "critical",
        "table workers was changed: logged is false, and should be true",
    ),
    (
        "alter table rota.jobs reset (fillfactor); alter table rota.jobs"
        " set (autovacuum_enabled = off)",
        "critical",
        "table jobs was changed: options is autovacuum_enabled=off, and should be fillf",
    ),
    (
        "alter table rota.effects disable row level security",
        "critical",
        "table effects was changed",
    ),
    (
        "alter table rota.receipts enable row level security",
        "critical",
        "table receipts was changed",
    ),
    (
        "drop policy visible_rows on rota.occurrences",
        "critical",
        "policy occurrences.visible_rows is missing",
    ),
    (
        "alter policy visible_rows on rota.limits using (true)",
        "critical",
        "policy limits.visible_rows was changed",
    ),
    (
        "create policy mine on rota.limits for select using (true)",
        "warning",
        "policy limits.mine is not part of the install",
    ),
    (
        "create table rota.mine (n integer)",
        "warning",
        "table mine is not part of the install",
    ),
    (
        "drop trigger queues_configured on rota.queues",
        "critical",
        "trigger queues.queues_configured is missing",
    ),
    (
        "alter table rota.queues disable trigger queues_configured",
        "critical",
        "trigger queues.queues_configured was changed",
    ),
    (
        "create view rota.my_view as select 1 as n",
        "warning",
        "view my_view is not part of the install",
    ),
    (
        "create function rota.mine(n integer) returns integer language sql as 'select 1'",
        "warning",
        "function mine(n integer) is not part of the install",
    ),
    (
        "grant execute on function rota._end_jobs to pg_monitor",
        "critical",
        "execute on function rota._end_jobs",
    ),
    (
        "grant select (payload) on rota.jobs to public",
        "critical",
        "select on table rota.jobs is granted to everybody",
    ),
    (
        "grant select on rota.job_runs to public",
        "critical",
        "select on table rota.job_runs is granted to everybody",
    ),
    (
        "grant delete on rota.jobs to pg_monitor",
        "critical",
        "delete on table rota.jobs is granted to pg_monitor",
    ),
    ("alter table rota.jobs owner to postgres", "critical", "table rota.jobs belongs to"),
    (
        "alter table rota.finished_jobs detach partition rota.finished_jobs_dead",
        "critical",
        "table finished_jobs_dead was changed: part of is nothing, and should be rota.",
    ),
    (
        "alter table rota.job_errors detach partition rota.job_errors_default",
        "critical",
        "table job_errors_default was changed: part of is nothing, and should be rota.",
    ),
    # Names of others, of which some begin as one of ours.
    (
        'create index "jobs_hold_idx.old" on rota.jobs (payload)',
        "warning",
        'index "jobs_hold_idx.old" is not part of the install',
    ),
    (
        'alter table rota.jobs add column "payload.old" text',
        "warning",
        'column jobs."payload.old" is not part of the install',
    ),
    (
        'create policy "My own" on rota.limits for select using (true)',
        "warning",
        'policy limits."My own" is not part of the install',
    ),
]


# Two neighbours may be of one thing.
@pytest.mark.parametrize("harms", [HARMS[::2], HARMS[1::2]], ids=["one half", "the other"])
def test_what_differs_is_named_and_mended(db, harms):
    """Half of it at once: none hides what another has done."""
    before = rows(db, "select * from rota._objects() order by 1, 2")
    for harm, _, _ in harms:
        db.execute(harm)
        if made := re.match(r"create (view|function|table) (rota\.m\w+)", harm):
            # By the owner, and not for everybody: then that is all that is to be said of it.
            db.execute(f"alter {made[1]} {made[2]} owner to {scalar(db, OWNER)}")
            db.execute(
                f"revoke all on {'function' * (made[1] == 'function')} {made[2]} from public"
            )

    found = [row for row in doctor(db) if row.finding == "drift"]

    told = [(row.severity, row.evidence) for row in found]
    for harm, severity, evidence in harms:
        assert (harm, [s for s, e in told if e.startswith(evidence)]) == (harm, [severity])
    for row in found:
        db.execute(row.remedy)
    assert [row for row in doctor(db) if row.finding == "drift"] == []
    assert rows(db, "select * from rota._objects() order by 1, 2") == before


@pytest.mark.parametrize(
    ("action", "effect"),
    [
        ("", "so a job that it names cannot end, and runs again"),
        ("deferrable initially deferred", "so a job that it names cannot end, and runs again"),
        ("on delete cascade", "so its rows are deleted then"),
        ("on delete set null", None),
    ],
)
def test_a_table_of_a_user_that_refers_to_jobs_is_named(db, action, effect):
    """Jobs that end leave the table."""
    db.execute(
        f"""create table public."My orders" (job_id bigint references rota.jobs {action})"""
    )
    db.execute("insert into public.\"My orders\" select rota.enqueue('x')")

    found = [row for row in doctor(db) if row.finding == "drift"]

    if effect is not None:
        (row,) = found
        assert row.severity == "critical"
        assert row.evidence == (
            'constraint "My orders_job_id_fkey" of public."My orders" refers to rota.jobs, '
            f"which a job leaves when it ends, {effect}"
        )
        db.execute(row.remedy)
    assert [row for row in doctor(db) if row.finding == "drift"] == []
    finish = "rota.finish_job(c.job_id, c.lease_token)"
    assert scalar(db, f"select count({finish}) from rota.claim_jobs('w') as c") == 1
    assert scalar(db, 'select count(*) from public."My orders"') == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "evidence"),
    [
        ("drop function rota.enqueue", "function enqueue("),
        (
            "create or replace function rota._span(duration interval) returns text"
            " language plpgsql immutable as $$ begin return ''; end; $$",
            "function _span(duration interval) was changed",
        ),
        ("alter function rota.tick() set search_path = public", "function tick() was changed"),
        ("alter function rota.tick() security invoker", "function tick() was changed"),
        ("drop view rota.dead_jobs", "view dead_jobs is missing"),
    ],
)
def test_code_is_mended_by_the_install(db, dsn, psql, sql_dir, harm, evidence, monkeypatch):
    db.execute(harm)

    row = only(db)

    assert row.severity == "critical"
    assert row.evidence.startswith(evidence)
    assert row.evidence.endswith(": run the install again, which repairs it")
    assert row.remedy is None
    monkeypatch.setenv("PGOPTIONS", f"-c role={scalar(db, OWNER)}")
    psql(dsn, "-f", sql_dir / "install.sql")
    assert [row for row in doctor(db) if row.finding == "drift"] == []


@pytest.mark.slow
def test_an_install_does_not_take_what_is_out_of_order_for_right(
    db, dsn, psql, sql_dir, monkeypatch
):
    db.execute("drop index rota.jobs_ready_idx")
    db.execute("alter table rota.workers add column mine text")
    before = [row for row in doctor(db) if row.finding == "drift"]

    monkeypatch.setenv("PGOPTIONS", f"-c role={scalar(db, OWNER)}")
    for _ in range(2):
        psql(dsn, "-f", sql_dir / "install.sql")

    assert len(before) == 2
    assert [row for row in doctor(db) if row.finding == "drift"] == before
    for row in before:
        db.execute(row.remedy)
    psql(dsn, "-f", sql_dir / "install.sql")
    assert [row for row in doctor(db) if row.finding == "drift"] == []


@pytest.mark.parametrize(
    "setting",
    [
        "timezone = 'Asia/Kolkata'",
        "datestyle = 'German'",
        "intervalstyle = 'iso_8601'",
        "quote_all_identifiers = on",
        "standard_conforming_strings = off",
    ],
)
def test_the_settings_of_a_session_are_no_drift(db, dsn, psql, sql_dir, setting, monkeypatch):
    """Neither where it asks, nor where it installs."""
    monkeypatch.setenv("PGOPTIONS", f"-c role={scalar(db, OWNER)}")
    db.execute(f"set escape_string_warning = off; set {setting}")
    db.execute("create role mine")
    db.execute("grant execute on function rota.tick() to mine")
    try:
        assert [row for row in doctor(db) if row.finding == "drift"] == []
    finally:
        db.execute("drop owned by mine; drop role mine")

    name = scalar(db, "select quote_ident(current_database())")
    db.execute(f"alter database {name} set {setting}")
    db.execute(f"alter database {name} set escape_string_warning = off")
    db.execute("create function rota._gone(integer) returns integer language sql as 'select 1'")
    db.execute(
        "insert into rota.manifest (kind, name, definition) values"
        " ('function', '_gone(integer)', '')"
    )
    psql(dsn, "-f", sql_dir / "install.sql")
    assert [row for row in doctor(db) if row.finding == "drift"] == []
    assert scalar(db, "select to_regprocedure('rota._gone(integer)')") is None


def test_remedies_are_sql_where_the_small_letters_are_turkish(turkish):
    """There the small letter of I is none of SQL."""
    with psycopg.connect(turkish) as db:
        db.execute("grant insert on rota.jobs to public")
        remedies = [row.remedy for row in doctor(db) if row.finding == "drift"]
        db.rollback()
    assert remedies == ["revoke insert on table rota.jobs from public;"]


def test_rights_of_our_roles_are_compared_where_the_roles_are(db):
    """A manifest that names a role, restored where it is not, and then where it is."""
    db.execute(
        "insert into rota.manifest values ('grant',"
        " 'execute on function rota.tick() to rota_worker', '', false)"
    )
    assert [row for row in doctor(db) if row.finding == "drift"] == []
    db.execute("create role rota_worker")
    try:
        row = only(db)
        assert row.remedy == "grant execute on function rota.tick() to rota_worker;"
        db.execute(row.remedy)
        assert [row for row in doctor(db) if row.finding == "drift"] == []
        db.execute("grant execute on procedure rota.tick_loop to rota_worker")
        db.execute("grant select on rota.effects to rota_worker with grant option")
        db.execute("grant rota_worker to pg_monitor")
        assert [row for row in doctor(db) if row.finding == "drift"] == []
        db.execute("grant delete on rota.effects to rota_worker")
        assert only(db).remedy == "revoke delete on table rota.effects from rota_worker;"
    finally:
        db.execute("drop owned by rota_worker; drop role rota_worker")


def test_a_row_of_this_transaction_is_known_however_old_others_are(db):
    with db.transaction():
        now = scalar(db, "select pg_current_xact_id()::text::bigint")

        def is_ours(number):
            asked = "select rota._is_written_here(%s::text::xid)"
            return scalar(db, asked, number % 2**32)

        assert is_ours(now)
        assert is_ours(now + 3)  # a savepoint of it
        assert not is_ours(now - 1)
        assert not is_ours(now - 2**31 - 5)
        assert not is_ours(now - 3 * 2**30)


def test_views_that_another_major_version_has_written_are_compared_after_the_next_install(
    db, dsn, psql, sql_dir, monkeypatch
):
    """As after pg_upgrade from 15 to 16, which writes the columns of a view otherwise."""
    db.execute("update rota.manifest set definition = '13 other' where kind = 'view'")

    assert [row for row in doctor(db) if row.finding == "drift"] == []
    db.execute("drop view rota.stale_jobs")
    assert only(db).evidence.startswith("view stale_jobs is missing")
    monkeypatch.setenv("PGOPTIONS", f"-c role={scalar(db, OWNER)}")
    psql(dsn, "-f", sql_dir / "install.sql")
    assert [row for row in doctor(db) if row.finding == "drift"] == []
    db.execute("alter view rota.stale_jobs set (security_barrier = false)")
    assert only(db).evidence.startswith("view stale_jobs was changed")


def test_rights_that_a_restore_has_left_out_are_one_finding(
    db, dsn, psql, sql_dir, monkeypatch
):
    for granted in scalar(
        db,
        "select array_agg(format('grant execute on routine %s to public', p.oid::regprocedure))"
        " from pg_proc as p where p.pronamespace = 'rota'::regnamespace",
    ):
        db.execute(granted)
    db.execute("grant delete on rota.effects to pg_monitor")

    found = [row for row in doctor(db) if row.finding == "drift"]

    assert len(found) == 2
    assert re.match(r"[0-9]+ rights are not as installed", found[0].evidence)
    assert found[1].remedy == "revoke delete on table rota.effects from pg_monitor;"
    monkeypatch.setenv("PGOPTIONS", f"-c role={scalar(db, OWNER)}")
    psql(dsn, "-f", sql_dir / "install.sql")
    assert only(db) == found[1]
