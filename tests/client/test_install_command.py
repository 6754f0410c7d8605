"""`rota install` does without psql what ``psql -f install.sql`` does."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import rota
from rota import schema
from rota.__main__ import main

CATALOG = """
    select 'function', p.oid::regprocedure::text, p.prosrc, p.proacl::text
    from pg_proc as p
    where p.pronamespace = 'rota'::regnamespace
    union all
    select c.relkind::text, c.oid::regclass::text, pg_get_viewdef(c.oid), c.relacl::text
    from pg_class as c
    where c.relnamespace = 'rota'::regnamespace and c.relkind in ('v')
    union all
    select 'column', a.attrelid::regclass::text, a.attname, format_type(a.atttypid, a.atttypmod)
    from pg_attribute as a
    join pg_class as c on c.oid = a.attrelid
    where c.relnamespace = 'rota'::regnamespace and a.attnum > 0
    union all
    select 'constraint', c.conrelid::regclass::text, c.conname, pg_get_constraintdef(c.oid)
    from pg_constraint as c
    where c.connamespace = 'rota'::regnamespace
    order by 1, 2, 3, 4
"""


def _catalog(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(CATALOG).fetchall()


def _empty(empty_database: Callable[[str], str], request: pytest.FixtureRequest) -> str:
    return empty_database("client_" + request.node.name[5:50])


@pytest.fixture
def by_psql(
    empty_database: Callable[[str], str],
    psql: Callable[..., Any],
    sql_dir: Path,
    request: pytest.FixtureRequest,
) -> str:
    """A database that psql has installed just now: roles made by other tests get grants."""
    dsn = empty_database("psql_" + request.node.name[5:50])
    psql(dsn, "-f", sql_dir / "install.sql")
    return dsn


@pytest.mark.slow
@pytest.mark.own_session
def test_install_gives_what_psql_gives(
    empty_database: Callable[[str], str], by_psql: str, request: pytest.FixtureRequest
) -> None:
    own = _empty(empty_database, request)

    assert main(["install", "-d", own]) == 0
    first = _catalog(own)
    assert main(["install", "-d", own]) == 0

    assert first == _catalog(by_psql)
    assert first == _catalog(own)


@pytest.mark.slow
@pytest.mark.own_session
def test_dry_run_prints_what_install_would_run(
    empty_database: Callable[[str], str],
    by_psql: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = _empty(empty_database, request)

    assert main(["install", "--dry-run", "-d", own]) == 0
    text = capsys.readouterr().out
    with psycopg.connect(own, autocommit=True) as connection:
        assert connection.execute("select to_regnamespace('rota')").fetchone() == (None,)
        connection.execute(text.encode())

    assert _catalog(own) == _catalog(by_psql)


def test_uninstall_leaves_nothing(dsn: str, db: psycopg.Connection[Any]) -> None:
    assert main(["uninstall", "-d", dsn]) == 2
    assert main(["uninstall", "--yes", "-d", dsn]) == 0

    assert db.execute("select to_regnamespace('rota')").fetchone() == (None,)


@pytest.mark.slow
def test_failed_install_leaves_nothing(
    empty_database: Callable[[str], str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = _empty(empty_database, request)
    subprocess.run(["cp", "-r", f"{schema.sql_dir()}/.", str(tmp_path)], check=True)
    part = tmp_path / "operations/views.sql"
    part.write_text(part.read_text() + "\nselect no_such_function();\n")
    monkeypatch.setattr(schema, "sql_dir", lambda: tmp_path)

    assert main(["install", "-d", own]) == 1

    with psycopg.connect(own) as connection:
        assert connection.execute("select to_regnamespace('rota')").fetchone() == (None,)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["\\i other.sql\n", "\\if 1 = 1\n\\endif\n", "\\if :fresh\n", "\\ir none.sql\n"]
)
def test_what_cannot_be_followed_is_an_error(
    dsn: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "install.sql").write_text(text)
    monkeypatch.setattr(schema, "sql_dir", lambda: tmp_path)

    assert main(["install", "-d", dsn]) == 1
    assert capsys.readouterr().err.startswith("rota: ")


@pytest.mark.slow
def test_install_over_functions_of_another_shape_by_force(
    dsn: str, db: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    db.execute("drop function rota.retry_job")
    db.execute(
        "create function rota.retry_job(job_id bigint, force boolean, out status integer)"
        " language sql as 'select 1'"
    )
    db.execute("reassign owned by rota_installer to current_user")

    assert main(["install", "-d", dsn]) == 1
    told = "cannot change return type of existing function (This drops the functions first: "
    assert told + "rota install --force)" in capsys.readouterr().err

    assert main(["install", "--force", "-d", dsn]) == 0
    job_id = rota.Client(db).enqueue("a").job_id
    assert rota.Client(db).retry_job(job_id) == "queued"


@pytest.mark.slow
def test_install_puts_no_older_functions_over_newer_ones(
    dsn: str, db: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    newer = "create or replace function rota.version() returns text language sql as $$"
    db.execute(newer + "select '99.1.0'$$")

    db.execute("reassign owned by rota_installer to current_user")
    assert main(["install", "-d", dsn]) == 1
    assert "has rota 99.1.0, and this is the older " in capsys.readouterr().err
    assert db.execute("select rota.version()").fetchone() == ("99.1.0",)

    assert main(["install", "--force", "-d", dsn]) == 0
    assert db.execute("select rota.version()").fetchone() != ("99.1.0",)


def test_install_says_what_the_database_says_of_who_is_in_its_way(
    dsn: str, sql_dir: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    manifest = Path(shutil.copytree(sql_dir, tmp_path / "sql"), "install.sql")
    manifest.write_text(manifest.read_text().replace("'1min'", "'1ms'"))
    monkeypatch.setattr(schema, "sql_dir", lambda: manifest.parent)
    with psycopg.connect(dsn) as other:
        other.execute("select pg_advisory_xact_lock(hashtextextended('rota.install', 0))")
        pid = other.info.backend_pid
        assert main(["install", "-d", dsn]) == 1

    said = capsys.readouterr().err
    assert said.startswith("rota: another session is installing rota in this database (")
    assert f"select pg_terminate_backend({pid});" in said


@pytest.mark.slow
@pytest.mark.own_session
def test_a_program_installs_over_its_own_connection(
    empty_database: Callable[[str], str], request: pytest.FixtureRequest
) -> None:
    own = _empty(empty_database, request)
    with psycopg.connect(own) as connection, pytest.raises(ValueError, match="autocommit"):
        rota.install(connection)
    with psycopg.connect(own, autocommit=True) as connection:
        rota.install(connection)
        assert rota.Client(connection).version() == rota.__version__


@pytest.mark.own_session
def test_install_says_which_rights_it_needs(
    db: psycopg.Connection[Any], dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    role = f"guest_{db.info.dbname}"
    db.execute(f"create role {role} login password 'x'")  # type: ignore[arg-type]
    db.execute("drop schema rota cascade")

    assert main(["install", "-d", make_conninfo(dsn, user=role, password="x")]) == 1

    told = capsys.readouterr().err
    assert "CREATE on the database" in told
    assert "grant_statements" not in told  # which is not there yet
