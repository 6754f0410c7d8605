"""What every upgrade and downgrade promises, whatever the versions are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

Make = Callable[[Path | None], str]


@pytest.fixture
def other(tmp_path: Path, sql_dir: Path) -> Path:
    """The parts of a newer version, which has a function that the present one has not."""
    copied = shutil.copytree(sql_dir, tmp_path / "sql")
    version = copied / "base/version.sql"
    version.write_text(
        version.read_text().replace("select '", "select '10.")
        + "\ncreate or replace function rota.of_newer() returns text language sql\n"
        "set search_path = pg_catalog, pg_temp as $$ select 'newer' $$;\n"
    )
    return copied / "install.sql"


def functions(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as db:
        found = db.execute(
            "select proname from pg_proc where pronamespace = 'rota'::regnamespace"
        ).fetchall()
    return {name for (name,) in found}


@pytest.mark.slow
def test_a_downgrade_is_refused_unless_asked_for(
    make: Make, other: Path, psql: Any, sql_dir: Path
) -> None:
    dsn = make(other)
    psql(dsn, "-c", "select rota.enqueue('kept')")
    psql(
        dsn,
        "-c",
        "create function rota.by_hand() returns text language sql as 'select 1::text'",
    )

    for words in ((), ("-v", "allow_downgrade=0")):
        refused = psql(dsn, *words, "-f", sql_dir / "install.sql", check=False)

        assert refused.returncode == 3
        assert "has rota 10.0.2.0, and this is the older 0.2.0" in refused.stderr
        assert "of_newer" in functions(dsn)

    psql(dsn, "-v", "allow_downgrade=1", "-f", sql_dir / "install.sql")

    # What the other version had and this one has not is gone; what is not of rota stays.
    assert "of_newer" not in functions(dsn)
    assert "by_hand" in functions(dsn)
    with psycopg.connect(dsn) as db:
        assert db.execute("select job_type from rota.claim_jobs('w')").fetchone() == ("kept",)


@pytest.mark.slow
def test_grants_by_hand_survive_an_upgrade_and_those_of_the_roles_are_made_anew(
    make: Make, other: Path, psql: Any, sql_dir: Path, admin: psycopg.Connection[Any]
) -> None:
    dsn = make(sql_dir / "install.sql")
    admin.execute("create role upgraded_app")
    try:
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute("grant usage on schema rota to upgraded_app")
            db.execute("grant execute on function rota.version to upgraded_app, public")

        psql(dsn, "-f", other)

        with psycopg.connect(dsn) as db:
            row = db.execute(
                "select has_function_privilege('upgraded_app', 'rota.version()', 'execute'),"
                " has_schema_privilege('upgraded_app', 'rota', 'usage'),"
                " has_function_privilege('public', 'rota.version()', 'execute')"
            ).fetchone()
        assert row == (True, True, False)
    finally:
        psql(dsn, "-c", "drop owned by rota_installer cascade")
        admin.execute("drop role upgraded_app")


CHANGED = """
create view rota.of_newer as select rota.of_newer();
do $$ begin
    execute format('create or replace view rota.ticker_health as select t.*, 1 as more '
        'from (%s) as t', rtrim(pg_get_viewdef('rota.ticker_health'::regclass), ';'));
end $$;
drop function rota.set_priority(bigint, integer);
create function rota.set_priority(id bigint, priority integer, reason text default null)
    returns text language sql as $$ select 'newer' $$;
drop function rota.cancel_job(bigint, text);
create function rota.cancel_job(job_id bigint, reason text, out status text, out at timestamptz)
    language sql as $$ select 'newer', now() $$;
drop function rota._one_line(text);
create function rota._one_line(words text) returns text[] language sql
    as $$ select '{}'::text[] $$;
"""
USED = (
    "function rota.set_priority",
    "function rota.cancel_job",
    "table rota.ticker_health",
    "function rota.enqueue",
)


@pytest.fixture
def app(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A role of the application's own, which no install knows."""
    admin.execute("create role changed_app")
    yield "changed_app"
    admin.execute("drop role changed_app")


@pytest.fixture
def roles(
    admin: psycopg.Connection[Any], empty_database: Callable[[str], str], sql_dir: Path
) -> Iterator[None]:
    """The four roles, until the databases that grant to them are gone.

    Whoever may make databases (*empty_database*) passes a right on.
    """
    admin.execute((sql_dir / "access/roles.sql").read_text().encode())
    admin.execute("grant rota_producer to rota_installer")
    yield
    # The server is that of the tests behind this one, too.
    admin.execute("drop role rota_producer, rota_worker, rota_observer, rota_operator")


def grant(dsn: str, app: str) -> None:
    with psycopg.connect(dsn) as db:
        db.execute(f"grant usage on schema rota to {app}".encode())
        for used in USED:
            right = "execute" if used.startswith("function") else "select"
            db.execute(f"grant {right} on {used} to {app}".encode())


def usable(dsn: str, app: str) -> list[str]:
    query = """
        select 'function rota.' || p.proname from pg_proc as p
        where p.pronamespace = 'rota'::regnamespace
          and has_function_privilege(%(app)s, p.oid, 'execute')
        union all
        select 'table rota.' || c.relname from pg_class as c
        where c.relnamespace = 'rota'::regnamespace and c.relkind = 'v'
          and has_table_privilege(%(app)s, c.oid, 'select')
        order by 1
        """
    with psycopg.connect(dsn) as db:
        return [what for (what,) in db.execute(query, {"app": app}).fetchall()]


@pytest.mark.slow
def test_a_downgrade_goes_over_functions_and_views_of_another_shape(
    app: str, make: Make, other: Path, psql: Any, sql_dir: Path
) -> None:
    dsn, plain = make(other), make(sql_dir / "install.sql")
    with psycopg.connect(dsn) as db:
        db.execute(CHANGED.encode())
        db.execute("select rota._keep_manifest()")
    grant(dsn, app)

    psql(dsn, "-v", "allow_downgrade=1", "-f", sql_dir / "install.sql")

    objects = "select kind, name, definition from rota._objects() order by 1, 2, 3"
    with psycopg.connect(dsn) as db, psycopg.connect(plain) as fresh:
        assert db.execute(objects).fetchall() == fresh.execute(objects).fetchall()
        assert db.execute("select * from rota._differences()").fetchall() == []
    assert usable(dsn, app) == sorted(USED)


@pytest.mark.slow
def test_a_downgrade_leaves_a_trigger_of_the_newer_version(
    make: Make, other: Path, psql: Any, sql_dir: Path
) -> None:
    dsn = make(other)
    with psycopg.connect(dsn) as db:
        db.execute(
            "create function rota._newer() returns trigger language plpgsql"
            " set search_path = pg_catalog, pg_temp as 'begin return new; end'"
        )
        db.execute(
            "create trigger newer before insert on rota.jobs"
            " for each row execute function rota._newer()"
        )
        db.execute("select rota._keep_manifest()")

    psql(dsn, "-v", "allow_downgrade=1", "-f", sql_dir / "install.sql")

    assert {"of_newer", "_newer"} & functions(dsn) == {"_newer"}
    with psycopg.connect(dsn) as db:
        db.execute("select rota.enqueue('a')")
        assert db.execute("select * from rota._differences()").fetchall() == []


@pytest.mark.slow
def test_a_downgrade_leaves_views_of_others(
    make: Make, other: Path, psql: Any, sql_dir: Path
) -> None:
    dsn = make(other)
    psql(
        dsn,
        "-c",
        "create schema mine create view runs as select id, rota.now() from rota.job_runs",
    )
    psql(dsn, "-c", "select rota.enqueue('kept')")

    psql(dsn, "-v", "allow_downgrade=1", "-f", sql_dir / "install.sql")

    assert "of_newer" not in functions(dsn)
    with psycopg.connect(dsn) as db:
        assert db.execute("select count(*) from mine.runs").fetchone() == (1,)


@pytest.mark.slow
def test_grants_that_others_have_passed_on_survive_an_upgrade(
    app: str, roles: None, make: Make, other: Path, psql: Any, sql_dir: Path
) -> None:
    """The install takes back those of its own roles, and with them what these have given."""
    dsn = make(sql_dir / "install.sql")
    with psycopg.connect(dsn) as db:
        db.execute("grant execute on function rota.enqueue to rota_producer with grant option")
        db.execute("set role rota_producer")
        db.execute(f"grant execute on function rota.enqueue to {app}".encode())

    psql(dsn, "-f", other)

    assert usable(dsn, app) == ["function rota.enqueue"]


@pytest.mark.slow
def test_grants_by_hand_pass_to_a_function_with_more_arguments(
    app: str, make: Make, other: Path, psql: Any, sql_dir: Path
) -> None:
    dsn = make(sql_dir / "install.sql")
    grant(dsn, app)
    old, new = (
        "priority integer)\n    returns void",
        "priority integer, more text default null)",
    )
    control = other.parent / "jobs/control.sql"
    assert control.read_text().count(f"set_priority(job_id bigint, {old}") == 1
    control.write_text(control.read_text().replace(old, f"{new}\n    returns void"))
    step = other.parent / "upgrades/all.sql"
    step.write_text(step.read_text() + "drop function rota.set_priority(bigint, integer);\n")

    psql(dsn, "-f", other)

    assert usable(dsn, app) == sorted(USED)
