"""install.sh: the same installation, for people who would rather not remember psql."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

Run = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = Path(__file__).resolve().parents[2] / "install.sh"
PASSWORD = "s3cr/t@x:y%7 '\\z"


@pytest.fixture
def install_sh(tmp_path: Path) -> Run:
    """Run the script from a directory that is not its own, with nobody at the terminal."""

    def run(
        *args: str, env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPT), *args],
            check=False,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            **{"stdin": subprocess.DEVNULL, "capture_output": True, **options},
        )

    return run


@pytest.fixture
def secret(empty: str, admin: psycopg.Connection[Any]) -> Iterator[dict[str, str]]:
    """The connection settings of the installer, whose password is now hard to quote."""
    admin.execute(psycopg.sql.SQL("alter role rota_installer password {}").format(PASSWORD))
    yield {**conninfo_to_dict(empty), "password": PASSWORD}  # type: ignore[dict-item]
    admin.execute("alter role rota_installer password 'installer'")


def as_url(have: dict[str, str]) -> str:
    user = f"{have['user']}:{quote(have['password'], safe='')}"
    return f"postgresql://{user}@{have['host']}:{have['port']}/{have['dbname']}"


def as_url_parameter(have: dict[str, str]) -> str:
    address = f"{have['user']}@{have['host']}:{have['port']}/{have['dbname']}"
    return f"postgresql://{address}?password={quote(have['password'], safe='')}&sslmode=disable"


def as_string(have: dict[str, str]) -> str:
    return make_conninfo(**have)


def version(dsn: str) -> str | None:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("select to_regproc('rota.version') is not null").fetchone()
        if row == (False,):
            return None
        row = connection.execute("select rota.version()").fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.slow
def test_it_tells_a_role_without_rights_what_is_missing(
    empty: str, install_sh: Run, admin: psycopg.Connection[Any]
) -> None:
    install_sh("-d", empty)
    database = sql.Identifier(conninfo_to_dict(empty)["dbname"])  # type: ignore[arg-type]
    admin.execute("create role outsider login password 'outsider'")
    admin.execute(sql.SQL("grant connect on database {} to outsider").format(database))
    outsider = make_conninfo(empty, user="outsider", password="outsider")
    try:
        status = install_sh("--status", "-d", outsider)
        uninstall = install_sh("--uninstall", "--yes", "-d", outsider)
    finally:
        admin.execute("drop owned by outsider; drop role outsider")

    assert (status.returncode, uninstall.returncode) == (1, 1)
    assert "this role may not use it" in status.stderr
    assert "this role may not use it" in uninstall.stderr
    assert version(empty) is not None


@pytest.mark.slow
def test_it_installs_and_then_keeps_it_up_to_date(empty: str, install_sh: Run) -> None:
    first = install_sh("-d", empty)
    second = install_sh(empty)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "is installed in" in first.stdout
    assert "up to date" in second.stdout
    assert version(empty) in first.stdout


@pytest.mark.slow
def test_it_reads_database_url(empty: str, install_sh: Run) -> None:
    done = install_sh(env={"DATABASE_URL": empty})

    assert done.returncode == 0, done.stderr
    assert version(empty)


@pytest.mark.slow
def test_it_reads_a_url_for_sqlalchemy(secret: dict[str, str], install_sh: Run) -> None:
    url = as_url(secret).replace("postgresql://", "postgresql+psycopg://")

    named, from_environment = install_sh(url), install_sh(env={"DATABASE_URL": url})

    assert named.returncode == 0, named.stderr
    assert from_environment.returncode == 0, from_environment.stderr


@pytest.mark.slow
def test_it_reads_the_settings_of_libpq(empty: str, install_sh: Run) -> None:
    have = conninfo_to_dict(empty)
    names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
    env = {f"PG{name}": str(have[key]) for key, name in names.items()}

    done = install_sh(env={**env, "PGDATABASE": str(have["dbname"])})

    assert done.returncode == 0, done.stderr
    assert version(empty)


@pytest.mark.slow
@pytest.mark.parametrize("write", [as_url, as_url_parameter, as_string])
def test_a_password_is_neither_printed_nor_on_a_command_line(
    secret: dict[str, str],
    write: Callable[[dict[str, str]], str],
    install_sh: Run,
    tmp_path: Path,
) -> None:
    spy = tmp_path / "bin" / "psql"
    spy.parent.mkdir()
    spy.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/seen\nexec {shutil.which("psql")} "$@"\n'
    )
    spy.chmod(0o755)
    env = {"PATH": f"{spy.parent}:{os.environ['PATH']}"}

    shown = ""
    for args in ((), ("--status",), ("--dry-run",), ("--uninstall", "--yes")):
        done = install_sh("-d", write(secret), *args, env=env)
        assert done.returncode == 0, done.stderr
        shown += done.stdout + done.stderr
    lost = install_sh("-d", write({**secret, "port": "1"}), env=env)
    shown += lost.stdout + lost.stderr + (tmp_path / "seen").read_text()

    assert lost.returncode == 4
    assert PASSWORD not in shown
    assert quote(PASSWORD, safe="") not in shown
    assert "s3cr" not in shown


@pytest.mark.parametrize("url", ["postgresql://u:s3cr/t@h/d", "postgresql://u:s3@cr@h/d"])
def test_a_url_that_libpq_would_print_is_refused(url: str, install_sh: Run) -> None:
    done = install_sh(url)

    assert done.returncode == 2
    assert "s3" not in done.stdout + done.stderr


@pytest.mark.slow
def test_dry_run_touches_nothing_and_prints_sql_that_works(
    make_empty: Callable[[], str], install_sh: Run, dump: Callable[[str], str]
) -> None:
    looked_at, installed = make_empty(), make_empty()
    before = dump(looked_at)

    done = install_sh("-d", looked_at, "--dry-run")

    assert done.returncode == 0, done.stderr
    assert dump(looked_at) == before
    with psycopg.connect(installed, autocommit=True) as connection:
        connection.execute(done.stdout.encode())
    assert version(installed)


@pytest.mark.slow
def test_dry_run_on_an_installed_database_prints_its_upgrade(
    empty: str, install_sh: Run, dump: Callable[[str], str]
) -> None:
    install_sh("-d", empty)
    before = dump(empty)

    done = install_sh("-d", empty, "--dry-run")

    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(done.stdout.encode())
    assert "\ncreate schema" not in done.stdout
    assert dump(empty) == before


def test_dry_run_needs_no_database(install_sh: Run) -> None:
    done = install_sh("postgresql://127.0.0.1:1/none", "--dry-run")

    assert done.returncode == 0
    assert "create schema rota" in done.stdout


@pytest.mark.slow
def test_with_roles_creates_the_four_roles(
    empty: str, server: Any, install_sh: Run, admin: psycopg.Connection[Any]
) -> None:
    name = str(conninfo_to_dict(empty)["dbname"])

    wanted = ["rota_observer", "rota_operator", "rota_producer", "rota_worker"]
    try:
        first = install_sh("-d", server.url(name), "--with-roles")
        second = install_sh("-d", server.url(name), "--with-roles")
        rows = admin.execute(
            "select rolname from pg_roles where rolname like 'rota\\_%' and not rolcanlogin"
            " order by 1"
        ).fetchall()
    finally:
        # The server is that of the tests behind this one, too.
        with psycopg.connect(server.url(name), autocommit=True) as connection:
            for role in wanted:
                connection.execute(f"drop owned by {role}; drop role {role}".encode())

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert [row[0] for row in rows] == wanted


@pytest.mark.slow
def test_print_grants_prints_statements_that_work(
    empty: str, install_sh: Run, admin: psycopg.Connection[Any]
) -> None:
    install_sh("-d", empty)
    admin.execute('create role "odd \'name"')

    done = install_sh("-d", empty, "--print-grants", "worker", "odd 'name")

    assert done.returncode == 0, done.stderr
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(done.stdout.encode())
        row = connection.execute(
            "select bool_and(has_function_privilege('odd ''name', p.oid, 'execute'))"
            " from pg_proc as p where p.oid = to_regproc('rota.claim_jobs')"
        ).fetchone()
        connection.execute('drop owned by "odd \'name"') if row is None else None
    assert row == (True,)


@pytest.mark.slow
def test_print_grants_refuses_an_unknown_access(empty: str, install_sh: Run) -> None:
    install_sh("-d", empty)

    done = install_sh("-d", empty, "--print-grants", "king", "rota_installer")

    assert done.returncode == 3
    assert "access" in done.stderr


@pytest.mark.slow
def test_status_tells_what_is_there(empty: str, install_sh: Run) -> None:
    before = install_sh("-d", empty, "--status")
    install_sh("-d", empty)
    after = install_sh("-d", empty, "--status")

    assert before.returncode == 1
    assert "not installed" in before.stdout
    assert after.returncode == 0, after.stderr
    assert after.stderr == ""
    for word in (
        version(empty),
        "PostgreSQL",
        "pg_cron",
        "ticker",
        "last tick     never",
        "live jobs     0",
    ):
        assert word in after.stdout


@pytest.mark.slow
def test_uninstall_refuses_when_nobody_can_confirm(empty: str, install_sh: Run) -> None:
    install_sh("-d", empty)
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute("select rota.enqueue('precious') from generate_series(1, 3)")

    refused = install_sh("-d", empty, "--uninstall")
    kept = version(empty)
    confirmed = install_sh("-d", empty, "--uninstall", "--yes")

    assert refused.returncode == 1
    assert "live jobs: 3, finished jobs: 0" in refused.stdout
    assert "--yes" in refused.stderr
    assert kept
    assert confirmed.returncode == 0, confirmed.stderr
    assert version(empty) is None


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["on", "off"])
def test_uninstall_names_the_functions_that_would_fail(
    empty: str, install_sh: Run, setting: str
) -> None:
    install_sh("-d", empty)
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute("""
            create schema shop;
            create function shop.mine() returns trigger language plpgsql as
            $$ begin perform rota.enqueue('x'); return new; end $$;
            create function shop.other() returns text language sql as $$ select 'rota' $$
        """)

    options = {"PGOPTIONS": f"-c standard_conforming_strings={setting}"}
    removed = install_sh("-d", empty, "--uninstall", "--yes", env=options)

    assert removed.returncode == 0
    assert removed.stderr.count("WARNING") == 1
    assert "functions still name it: shop.mine()\n" in removed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_uninstall_asks_at_a_terminal(
    empty: str, install_sh: Run, answer: str, code: int
) -> None:
    install_sh("-d", empty)
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())

    done = install_sh("-d", empty, "--uninstall", stdin=theirs)
    os.close(ours)
    os.close(theirs)

    assert done.returncode == code
    assert "[y/N]" in done.stdout
    assert (version(empty) is None) == (code == 0)


@pytest.mark.parametrize(
    "args",
    [
        ("--with-rolls",),
        ("-d",),
        ("--print-grants", "worker"),
        ("one", "two"),
        ("--status", "--uninstall"),
        ("",),
    ],
)
def test_wrong_usage_exits_2_with_a_hint(args: tuple[str, ...], install_sh: Run) -> None:
    done = install_sh(*args)

    assert done.returncode == 2
    assert "--help" in done.stderr
    assert done.stdout == ""


def test_help_and_version_need_no_database(install_sh: Run) -> None:
    shown = install_sh("--help")
    told = install_sh("--version")

    assert (shown.returncode, told.returncode) == (0, 0)
    for option in ("--dry-run", "--with-roles", "--with-cron", "--status", "--uninstall"):
        assert option in shown.stdout
    assert told.stdout.startswith("rota ")


def test_no_connection_exits_4(install_sh: Run) -> None:
    done = install_sh("postgresql://127.0.0.1:1/none")

    assert done.returncode == 4
    assert "connection" in done.stderr


def test_a_machine_without_psql_is_told_so(install_sh: Run, tmp_path: Path) -> None:
    for name in ("sh", "sed", "awk", "cat", "dirname", "basename"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))

    done = install_sh("app", env={"PATH": str(tmp_path)})

    assert done.returncode == 5
    assert "apt install" in done.stderr


@pytest.fixture
def cron_dsn(server: Any, admin: psycopg.Connection[Any], template: str) -> Iterator[str]:
    """The database that pg_cron serves, as a plain role that may use it sees it."""
    row = admin.execute("show shared_preload_libraries").fetchone()
    if row is None or "pg_cron" not in row[0]:
        pytest.skip("the server has no pg_cron")
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        connection.execute("create extension pg_cron")
        connection.execute("grant usage on schema cron to rota_installer")
        connection.execute("grant create on database postgres to rota_installer")
        yield make_conninfo(server.url("postgres"), user="rota_installer", password="installer")
        connection.execute("drop schema if exists rota cascade")
        connection.execute("drop extension pg_cron")
        connection.execute("revoke create on database postgres from rota_installer")


@pytest.mark.plain_session
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_cron_lets_pg_cron_tick(cron_dsn: str, install_sh: Run) -> None:
    """A job whose worker vanished is taken back by a tick that only pg_cron can have made."""
    first = install_sh("-d", cron_dsn, "--with-cron")
    second = install_sh("-d", cron_dsn, "--with-cron")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr

    with psycopg.connect(cron_dsn, autocommit=True) as connection:
        entries = connection.execute("select jobname, active from cron.job").fetchall()
        connection.execute("select rota.enqueue('left_behind', lease => '1 second')")
        connection.execute("select job_id from rota.claim_jobs('doomed')")
        deadline = time.monotonic() + 190  # pg_cron may pass over a minute
        status = ("running",)
        while status == ("running",) and time.monotonic() < deadline:
            time.sleep(0.5)
            status = connection.execute("select status from rota.jobs").fetchone()  # type: ignore[assignment]
    shown = install_sh("-d", cron_dsn, "--status")
    removed = install_sh("-d", cron_dsn, "--uninstall", "--yes")

    assert entries == [("rota tick", True)]
    assert status == ("failed",)
    assert "ticker        pg_cron, * * * * *" in shown.stdout
    assert re.search(r"^last tick     00:00:\d\d ago, by pg_cron\b", shown.stdout, re.M)
    assert removed.returncode == 0, removed.stderr
    with psycopg.connect(cron_dsn) as connection:
        assert connection.execute("select count(*) from cron.job").fetchone() == (0,)
