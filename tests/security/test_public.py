"""Nothing for PUBLIC, nothing of anybody but the owner: now, after an upgrade, and tomorrow.

Asked of the catalog, with the defaults that an empty access list stands for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from sql.helpers import call, grant, rows
from support.databases import Psql

Db = psycopg.Connection[Any]

# Everything in the schema that has an access list, and the schema; columns have one too.
GRANTED = """
    with ours as (
        select 'schema ' || nspname as thing, nspacl as acl, nspowner as owner, 'n' as kind
        from pg_namespace where nspname = 'rota'
        union all
        select 'routine ' || p.oid::regprocedure, proacl, proowner, 'f'
        from pg_proc as p where pronamespace = 'rota'::regnamespace
        union all
        select 'relation ' || c.oid::regclass, relacl, relowner,
            case relkind when 'S' then 's' else 'r' end
        from pg_class as c
        where relnamespace = 'rota'::regnamespace and relkind not in ('i', 'I', 'c')
        union all
        select 'column ' || attrelid::regclass || '.' || attname, attacl, relowner, 'c'
        from pg_attribute
        join pg_class as c on c.oid = attrelid and relnamespace = 'rota'::regnamespace
        where attacl is not null
        union all
        select 'type ' || t.oid::regtype, typacl, typowner, 'T'
        from pg_type as t
        where typnamespace = 'rota'::regnamespace and typelem = 0
    )
    select o.thing, a.grantee::regrole::text, a.privilege_type
    from ours as o
    cross join lateral aclexplode(coalesce(o.acl, acldefault(o.kind::"char", o.owner))) as a
    where a.grantee <> o.owner
      -- Other tests make our roles, and every install then gives them their functions.
      and (a.grantee::regrole::text !~ '^rota_(producer|worker|operator|observer)$'
        or o.thing ~ '_id_seq$')
"""
OWNERS = """
    select nspowner::regrole::text from pg_namespace where nspname = 'rota'
    union
    select proowner::regrole::text from pg_proc where pronamespace = 'rota'::regnamespace
    union
    select relowner::regrole::text from pg_class where relnamespace = 'rota'::regnamespace
    union
    select typowner::regrole::text from pg_type where typnamespace = 'rota'::regnamespace
    union
    select collowner::regrole::text from pg_collation
    where collnamespace = 'rota'::regnamespace
    union
    select oprowner::regrole::text from pg_operator where oprnamespace = 'rota'::regnamespace
"""
TOMORROW = "2029-01-01 00:00+00"


def granted(db: Db, *, types: bool = False) -> list[tuple[str, ...]]:
    found = rows(db, GRANTED)
    return [tuple(row) for row in found if row.thing.startswith("type ") == types]


@pytest.fixture
def owner(empty: str, psql: Psql, sql_dir: Path) -> str:
    """The DSN of the owner of a rota without roles."""
    psql(empty, "-f", sql_dir / "install.sql")
    return empty


def test_nothing_is_granted_to_anybody(db: Db) -> None:
    assert granted(db) == []


def test_no_type_is_granted_to_anybody(db: Db) -> None:
    assert granted(db, types=True) == []


@pytest.mark.own_session
def test_a_producer_cannot_stop_an_upgrade(db: Db, connect: Callable[..., Db]) -> None:
    """A column of our row type would forbid to change the type of a column of ours."""
    make_producer(db)

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connect_as(connect).execute("create table trap.mine (job rota.jobs)")


def make_producer(db: Db) -> None:
    db.execute("drop role if exists gate_p; create role gate_p; create schema trap")
    db.execute("grant all on schema trap to gate_p")
    grant(db, "producer", "gate_p")


def connect_as(connect: Callable[..., Db]) -> Db:
    connection = connect()
    connection.execute("set role gate_p")
    return connection


def test_all_belongs_to_one_owner(db: Db) -> None:
    assert rows(db, OWNERS) == [("rota_installer",)]


def test_definer_functions_have_the_path_and_no_setting_that_a_user_could_use(db: Db) -> None:
    """The path is the first setting, so that what follows is read on it."""
    settings = rows(
        db,
        "select proname::text, proconfig[1], array(select split_part(c, '=', 1)"
        " from unnest(proconfig[2:]) as c) as others from pg_proc"
        " where pronamespace = 'rota'::regnamespace and prosecdef",
    )

    assert len(settings) > 50
    assert {path for _, path, _ in settings} == {"search_path=pg_catalog, pg_temp"}
    assert {name for *_, others in settings for name in others} <= {
        "enable_bitmapscan",
        "enable_nestloop",
        "enable_seqscan",
        "enable_sort",
        "jit",
        "lock_timeout",
        "plan_cache_mode",
        "work_mem",
    }


def test_views_run_with_the_rights_of_the_owner_and_never_bend(db: Db) -> None:
    """No rule, no trigger function but ours; no view with invoker's rights.

    Row security hides rows from who reads a table himself, and nothing from the owner.
    """
    relations = "select oid, relname from pg_class where relnamespace = 'rota'::regnamespace"

    bent = rows(
        db,
        f"{relations} and (relforcerowsecurity or relkind = 'v'"
        " and reloptions <> '{security_barrier=true}'"
        " or relrowsecurity <> exists (select from pg_policy as p"
        " where p.polrelid = pg_class.oid and p.polname = 'visible_rows'"
        " and p.polcmd = 'r' and p.polpermissive))",
    )
    rules = rows(
        db,
        f"select rulename from pg_rewrite join ({relations}) as c on c.oid = ev_class"
        " where rulename <> '_RETURN'",
    )
    triggers = rows(
        db,
        f"select tgname from pg_trigger join ({relations}) as c on c.oid = tgrelid"
        " join pg_proc as p on p.oid = tgfoid"
        " where not tgisinternal and p.pronamespace <> 'rota'::regnamespace",
    )

    assert (bent, rules, triggers) == ([], [], [])
    # All others are barriers; job_runs and dead_jobs open no table to who is confined.
    no_barriers = rows(
        db, f"{relations} and relkind = 'v' and reloptions is null order by relname"
    )
    assert [name for _, name in no_barriers] == [
        "_ends", "_runs", "_workers", "dead_jobs", "job_runs", "ticker_health",
    ]  # fmt: skip


BARRIERS = """
    select c.relname::text from pg_rewrite as r join pg_class as c on c.oid = r.ev_class
    where c.reloptions = '{security_barrier=true}' and c.relnamespace = %s::regnamespace
      -- The last one is that of the view itself.
      and (substring(r.ev_action, '.*:setOperations (.)') = '{') = %s order by 1
"""


def test_no_barrier_is_a_union(db: Db) -> None:
    """The server takes such a view apart, and asks the caller's conditions of all rows."""
    db.execute("""
        create schema trap;
        create view trap.union_of_two with (security_barrier = true) as
            select 1 as one union all select 2;
        create view trap.plain with (security_barrier = true) as
            select * from (select 1 as one union all select 2) as u where u.one = 1
    """)

    assert rows(db, BARRIERS, "trap", True) == [("union_of_two",)]
    assert rows(db, BARRIERS, "trap", False) == [("plain",)]
    assert rows(db, BARRIERS, "rota", True) == []
    assert len(rows(db, BARRIERS, "rota", False)) >= 10


def test_what_an_upgrade_adds_is_not_for_public(
    owner: str, psql: Psql, sql_dir: Path, tmp_path: Path
) -> None:
    """A part of the next version with one of each kind, installed over this one."""
    parts = shutil.copytree(sql_dir, tmp_path / "sql")
    with (parts / "jobs/round_trip.sql").open("a") as part:
        part.write(
            "create function rota.new_function() returns integer language sql as 'select 1';\n"
            "create procedure rota.new_procedure() language sql as 'select 1';\n"
            "create aggregate rota.new_aggregate(bigint) (sfunc = int8pl, stype = bigint);\n"
            "create table rota.new_table (id bigint generated always as identity);\n"
            "create view rota.new_view as select 1 as one;\n"
            "create sequence rota.new_sequence;\n"
        )

    psql(owner, "-f", parts / "install.sql")

    with psycopg.connect(owner) as db:
        assert granted(db) == []


def test_what_somebody_granted_to_public_is_gone_after_an_install(
    owner: str, psql: Psql, sql_dir: Path
) -> None:
    psql(
        owner,
        "-c",
        "grant all on schema rota to public; grant all on all tables in schema rota to public;"
        "grant all on all routines in schema rota to public;"
        "grant select (payload) on rota.jobs to public",
    )

    psql(owner, "-f", sql_dir / "install.sql")

    with psycopg.connect(owner) as db:
        assert granted(db) == []


@pytest.mark.parametrize("role", ["public", "rota_worker"])
def test_what_somebody_granted_on_sequences_is_gone_after_an_install(
    owner: str, psql: Psql, sql_dir: Path, admin: Db, role: str
) -> None:
    """With update on jobs_id_seq one can set it back, and no job can be enqueued any more."""
    if role != "public" and not rows(admin, "select 1 from pg_roles where rolname = %s", role):
        admin.execute(f"create role {role}")
    psql(owner, "-c", f"grant all on all sequences in schema rota to {role}")

    psql(owner, "-f", sql_dir / "install.sql")

    with psycopg.connect(owner) as db:
        assert [thing for thing, *_ in granted(db) if thing.endswith("_id_seq")] == []


def test_default_privileges_do_not_open_the_sequences(
    empty: str, psql: Psql, sql_dir: Path
) -> None:
    sequences = "alter default privileges grant all on sequences to public"
    psql(empty, "-c", sequences, "-f", sql_dir / "install.sql")

    with psycopg.connect(empty) as db:
        assert granted(db) == []


DEFAULTS = (
    "alter default privileges grant all on tables to public, pg_monitor;"
    "alter default privileges grant all on sequences to public, pg_monitor;"
    "alter default privileges grant all on functions to public, pg_monitor;"
    "alter default privileges grant all on schemas to public, pg_monitor;"
)


def test_default_privileges_give_nothing_away(
    empty: str, psql: Psql, sql_dir: Path, admin: Db
) -> None:
    """An owner who gives all that he makes to PUBLIC, or to a role, has not meant this."""
    parts = conninfo_to_dict(empty)
    admin.execute(
        f'create role "Its Owner"; grant "Its Owner" to {parts["user"]};'
        f'grant create on database {parts["dbname"]} to "Its Owner"'
    )
    owner = 'set role "Its Owner"'
    psql(empty, "-c", owner, "-c", DEFAULTS, "-f", sql_dir / "install.sql")

    with psycopg.connect(empty) as db:
        assert granted(db) == []


@pytest.mark.parametrize("force", ["0", "1"])
def test_default_privileges_give_nothing_of_an_upgrade_away(
    empty: str, psql: Psql, sql_dir: Path, tmp_path: Path, force: str
) -> None:
    """By force all functions are made anew, and a newer version has more of everything."""
    psql(empty, "-f", sql_dir / "install.sql", "-c", DEFAULTS)
    by_hand = (
        "grant usage on schema rota to pg_monitor",
        "grant execute on function rota.enqueue to pg_monitor with grant option",
        "grant select on rota.queue_stats to pg_monitor",
        "grant select on rota.limits to pg_monitor",
        # What is not rota's stays as it is.
        "create function rota.by_hand() returns integer language sql as 'select 1'",
        "revoke all on function rota.by_hand from public",
    )
    with psycopg.connect(empty) as db:
        for statement in by_hand:
            db.execute(statement.encode())
        before = granted(db)
    parts = shutil.copytree(sql_dir, tmp_path / "sql")
    for name, more in {
        "upgrades/all": "create table rota.newer (id bigint generated always as identity);",
        "operations/views": "create or replace view rota.newest as select id from rota.newer;",
        "base/version": "create function rota.of_newer() returns text language sql"
        " as $$ select 'newer' $$;",
    }.items():
        file = parts / f"{name}.sql"
        file.write_text(f"{file.read_text()}\n{more}\n")

    psql(empty, "-v", f"allow_downgrade={force}", "-f", parts / "install.sql")

    with psycopg.connect(empty) as db:
        assert len(before) == 5
        assert sorted(granted(db)) == sorted(before)


def test_default_privileges_do_not_open_the_days_that_tick_adds(
    empty: str, psql: Psql, sql_dir: Path
) -> None:
    psql(empty, "-c", DEFAULTS, "-f", sql_dir / "install.sql")
    # This is meant for rota's tables.
    meant = "alter default privileges in schema rota grant select on tables to pg_read_all_data"
    psql(empty, "-c", meant)

    with psycopg.connect(empty, autocommit=True) as db:
        db.execute(
            "create or replace function rota.now() returns timestamptz language sql stable"
            f" security definer set search_path = pg_catalog, pg_temp as"
            f" $$ select '{TOMORROW}'::timestamptz $$"
        )
        if not call(db, "tick")[0].partitions_created:
            pytest.fail("no day was added")

        of_days = granted(db)
        assert {tuple(grant) for _, *grant in of_days} == {("pg_read_all_data", "SELECT")}
