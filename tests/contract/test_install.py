"""What `psql -f sql/install.sql` promises to the person who types it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support.waiting import wait_until

pytestmark = pytest.mark.slow

Dump = Callable[[str], str]

WAITING = "waiting for another session, which is installing rota in this database"


def has_rota(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("select to_regnamespace('rota') is not null").fetchone()
    assert row is not None
    return bool(row[0])


@pytest.fixture
def copied(tmp_path: Path, sql_dir: Path) -> Path:
    """A copy of the parts that a test may break."""
    return shutil.copytree(sql_dir, tmp_path / "sql")


def test_install_needs_no_more_than_connect_and_create(
    empty: str, psql: Any, sql_dir: Path
) -> None:
    psql(empty, "-f", sql_dir / "install.sql")

    with psycopg.connect(empty) as connection:
        row = connection.execute(
            "select rolsuper or rolcreaterole or rolcreatedb from pg_roles"
            " where rolname = current_user"
        ).fetchone()
        job = connection.execute("select rota.enqueue('hello')").fetchone()
    assert row == (False,)
    assert job is not None


def test_install_says_nothing_when_all_is_well(empty: str, psql: Any, sql_dir: Path) -> None:
    first = psql(empty, "-f", sql_dir / "install.sql")
    second = psql(empty, "-f", sql_dir / "install.sql")

    assert (first.stdout + first.stderr).strip() == ""
    assert (second.stdout + second.stderr).strip() == ""


def test_install_where_the_default_tablespace_is_named(
    empty: str, psql: Any, sql_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c default_tablespace=pg_default")

    psql(empty, "-f", sql_dir / "install.sql")

    assert has_rota(empty)


@pytest.mark.parametrize("setting", ["statement_timeout", "transaction_timeout"])
def test_install_takes_longer_than_statements_of_the_role_may(
    empty: str, psql: Any, sql_dir: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    lock = "hashtextextended('rota.install', 0)"
    with ThreadPoolExecutor() as pool, psycopg.connect(empty, autocommit=True) as other:
        known = other.execute("select from pg_settings where name = %s", (setting,))
        if not known.rowcount:
            pytest.skip("this server does not know it")
        other.execute(f"select pg_advisory_lock({lock})".encode())
        monkeypatch.setenv("PGOPTIONS", f"-c {setting}=1s")
        install = pool.submit(psql, empty, "-f", sql_dir / "install.sql", check=False)
        waits = "select from pg_locks where locktype = 'advisory' and not granted"
        wait_until(lambda: other.execute(waits).rowcount > 0 or install.done(), "the install")
        other.execute("select pg_sleep(1.5)")
        other.execute(f"select pg_advisory_unlock({lock})".encode())

    assert install.result().returncode == 0, install.result().stderr


@pytest.mark.slow
def test_install_twice_changes_nothing(
    empty: str, psql: Any, dump: Dump, sql_dir: Path
) -> None:
    psql(empty, "-f", sql_dir / "install.sql")
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute("select rota.enqueue('kept')")
    before = dump(empty)

    psql(empty, "-f", sql_dir / "install.sql")

    assert dump(empty) == before
    with psycopg.connect(empty) as connection:
        assert connection.execute("select job_type from rota.jobs").fetchall() == [("kept",)]


def test_install_again_in_savepoints_drops_nothing(
    empty: str, psql: Any, sql_dir: Path
) -> None:
    """As psql makes them where ~/.psqlrc says so, and a migration tool around the whole."""
    options = ("-v", "ON_ERROR_ROLLBACK=on", "-f", sql_dir / "install.sql")
    psql(empty, *options)
    psql(empty, *options)

    with psycopg.connect(empty) as connection:
        assert connection.execute("select rota.enqueue('x') > 0").fetchall() == [(True,)]


@pytest.mark.slow
def test_install_works_from_any_directory(
    empty: str, psql: Any, sql_dir: Path, tmp_path: Path
) -> None:
    psql(empty, "-f", sql_dir / "install.sql", cwd=tmp_path)
    psql(empty, "-f", "install.sql", cwd=sql_dir)

    assert has_rota(empty)


@pytest.mark.slow
def test_a_broken_part_leaves_nothing_behind(empty: str, psql: Any, copied: Path) -> None:
    with (copied / "access/grants.sql").open("a") as part:
        part.write("\nselect no_such_column;\n")

    done = psql(empty, "-f", copied / "install.sql", check=False)

    assert done.returncode == 3
    assert not has_rota(empty)


@pytest.mark.slow
def test_a_broken_part_leaves_an_installed_one_as_it_was(
    empty: str, psql: Any, dump: Dump, sql_dir: Path, copied: Path
) -> None:
    psql(empty, "-f", sql_dir / "install.sql")
    before = dump(empty)
    version = copied / "base/version.sql"
    version.write_text(version.read_text().replace("select '", "select '99."))
    with (copied / "access/grants.sql").open("a") as part:
        part.write("\nselect no_such_column;\n")

    done = psql(empty, "-f", copied / "install.sql", check=False)

    assert done.returncode == 3
    assert dump(empty) == before


def test_a_foreign_schema_of_that_name_is_left_alone(
    empty: str, psql: Any, dump: Dump, sql_dir: Path
) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute("create schema rota create table precious (id integer)")
    before = dump(empty)

    done = psql(empty, "-f", sql_dir / "install.sql", check=False)

    assert done.returncode == 3
    assert dump(empty) == before


@pytest.mark.slow
def test_installers_at_once_take_turns(empty: str, sql_dir: Path) -> None:
    """Four installers start together; the first creates, the others find it and replay."""
    command = ["psql", "-X", "-q", "-d", empty, "-f", str(sql_dir / "install.sql")]

    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ended = [(process.communicate()[1], process.returncode) for process in running]

    assert [code for _, code in ended] == [0] * 4
    assert all(WAITING in said for said, _ in ended if said)


@pytest.mark.slow
def test_an_install_waits_longer_for_another_than_for_a_lock(empty: str, copied: Path) -> None:
    """As where an application has many processes, and each of them begins with it."""
    manifest = copied / "install.sql"
    manifest.write_text(manifest.read_text().replace("'5s'", "'20ms'"))
    command = ["psql", "-X", "-q", "-d", empty, "-f", str(manifest)]
    long_since = "select from pg_locks where waitstart < clock_timestamp() - interval '60 ms'"

    with psycopg.connect(empty) as other, psycopg.connect(empty, autocommit=True) as db:
        other.execute("select pg_advisory_xact_lock(hashtextextended('rota.install', 0))")
        second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: db.execute(long_since).rowcount or second.poll(), "the second")
    said = second.communicate()[1]

    assert (WAITING in said, second.returncode) == (True, 0)


@pytest.mark.slow
def test_an_install_and_who_reads_several_views_do_not_wait_for_each_other(
    empty: str, psql: Any, sql_dir: Path
) -> None:
    """The reader has a view, which the install waits for, and wants what that has."""
    psql(empty, "-f", sql_dir / "install.sql")
    waiting = (
        "select exists (select from pg_locks as l join pg_class as c on c.oid = l.relation"
        " where not l.granted and c.relnamespace = 'rota'::regnamespace)"
    )
    with (
        psycopg.connect(empty) as reader,
        psycopg.connect(empty, autocommit=True) as observer,
        ThreadPoolExecutor(1) as pool,
    ):
        reader.execute("select from rota.error_groups")
        installing = pool.submit(psql, empty, "-f", sql_dir / "install.sql")
        wait_until(lambda: observer.execute(waiting).fetchone() == (True,), "it does not wait")

        for view in ("job_runs", "queue_stats", "unknown_effects"):
            reader.execute(f"select from rota.{view}".encode())
        reader.commit()

        assert installing.result().returncode == 0


@pytest.mark.slow
def test_uninstall_leaves_nothing(empty: str, psql: Any, dump: Dump, sql_dir: Path) -> None:
    before = dump(empty)
    psql(empty, "-f", sql_dir / "install.sql")

    psql(empty, "-f", sql_dir / "uninstall.sql")

    assert dump(empty) == before


def test_uninstall_takes_nothing_of_others_away(
    empty: str, psql: Any, dump: Dump, sql_dir: Path
) -> None:
    psql(empty, "-f", sql_dir / "install.sql")
    psql(
        empty, "-c", "create schema mine create view mine.dead as select id from rota.dead_jobs"
    )
    psql(empty, "-c", "create table mine.log (at timestamptz default rota.now())")
    before = dump(empty)

    done = psql(empty, "-f", sql_dir / "uninstall.sql", check=False)

    assert done.returncode == 3
    assert "these use tables or functions of rota" in done.stderr
    assert ": default value for mine.log.at, view mine.dead\n" in done.stderr
    assert dump(empty) == before


@pytest.mark.parametrize("again", [False, True])
def test_uninstall_takes_no_table_that_somebody_put_into_the_schema(
    empty: str, psql: Any, dump: Dump, sql_dir: Path, again: bool
) -> None:
    """As the migrations of an application do whose search_path begins with rota."""
    psql(empty, "-f", sql_dir / "install.sql")
    psql(empty, "-c", 'create table rota."Orders" as select 1 as id')
    psql(empty, "-c", "create materialized view rota.totals as select 1 as n")
    if again:
        psql(empty, "-f", sql_dir / "install.sql")
    before = dump(empty)

    done = psql(empty, "-f", sql_dir / "uninstall.sql", check=False)

    assert done.returncode == 3
    assert 'these in schema rota are not of the install: "Orders", totals\n' in done.stderr
    assert dump(empty) == before
    psql(empty, "-c", "create schema mine")
    for moves in re.findall("alter table .*? set schema public;", done.stderr):
        psql(empty, "-c", moves.replace("public", "mine"))
    psql(empty, "-f", sql_dir / "uninstall.sql")
    psql(empty, "-c", 'select from mine."Orders", mine.totals')


def test_uninstall_leaves_the_archive(empty: str, psql: Any, dump: Dump, sql_dir: Path) -> None:
    psql(empty, "-f", sql_dir / "install.sql")
    psql(
        empty,
        *("-c", "create schema history", "-c", "select rota.set_archive('history')"),
        *("-c", "create table rota.finished_jobs_done_20010101 partition of"
          " rota.finished_jobs_done for values from ('2001-01-01') to ('2001-01-02')"),
        *("-c", "update rota.stats_progress set complete_until = now()"),
        *("-c", "select rota._drop_partitions()"),
    )  # fmt: skip

    psql(empty, "-f", sql_dir / "uninstall.sql")

    psql(empty, "-c", "select from history.finished_jobs_done_20010101, history.rota_rows")
    psql(empty, "-f", sql_dir / "install.sql")


def test_uninstall_leaves_a_foreign_schema_of_that_name(
    empty: str, psql: Any, sql_dir: Path
) -> None:
    psql(empty, "-c", "create schema rota", "-c", "create table rota.staff (name text)")

    done = psql(empty, "-f", sql_dir / "uninstall.sql", check=False)

    assert (done.returncode, "not installed in it" in done.stderr) == (3, True)
    psql(empty, "-c", "select from rota.staff")


def test_only_the_owner_can_install_again(
    empty: str, psql: Any, sql_dir: Path, admin: psycopg.Connection[Any]
) -> None:
    psql(empty, "-f", sql_dir / "install.sql")
    database = sql.Identifier(conninfo_to_dict(empty)["dbname"])  # type: ignore[arg-type]
    admin.execute("create role stranger login password 'stranger'")
    admin.execute(sql.SQL("grant connect on database {} to stranger").format(database))
    stranger = make_conninfo(empty, user="stranger", password="stranger")
    try:
        done = psql(stranger, "-f", sql_dir / "install.sql", check=False)
    finally:
        admin.execute("drop owned by stranger; drop role stranger")

    assert done.returncode == 3
    assert "rota belongs to role rota_installer, and you are stranger" in done.stderr


def test_who_reads_for_too_long_is_named_to_the_install(
    empty: str, psql: Any, copied: Path, admin: psycopg.Connection[Any]
) -> None:
    """And nobody who reads a copy of this database, whose tables have the same numbers."""
    psql(empty, "-f", copied / "install.sql")
    upgrade = copied / "upgrades/all.sql"
    upgrade.write_text(upgrade.read_text().replace("25", "2"))
    name = sql.Identifier(str(conninfo_to_dict(empty)["dbname"]))
    admin.execute(sql.SQL("create database reads_too template {}").format(name))
    try:
        with (
            psycopg.connect(empty, application_name="a dump") as reader,
            psycopg.connect(
                make_conninfo(admin.info.dsn, password=admin.info.password, dbname="reads_too")
            ) as other,
        ):
            for each in (reader, other):
                each.execute("select * from rota.job_runs")
            pid, stays = reader.info.backend_pid, other.info.backend_pid
            done = psql(empty, "-f", copied / "install.sql", check=False)
    finally:
        admin.execute("drop database reads_too with (force)")

    assert done.returncode == 3
    told = f"another transaction has read rota.job_runs and stays open: pid {pid} (a dump)\n"
    assert told in done.stderr
    assert f"select pg_terminate_backend({pid});" in done.stderr
    assert f"({stays})" not in done.stderr


def test_variables_of_psql_can_also_say_no(empty: str, psql: Any, sql_dir: Path) -> None:
    """A role that may create no roles, where no pg_cron is, installs."""
    psql(empty, "-v", "with_roles=0", "-v", "with_cron=off", "-f", sql_dir / "install.sql")


def test_another_installer_that_takes_too_long_is_named(
    empty: str, psql: Any, copied: Path, admin: psycopg.Connection[Any]
) -> None:
    manifest = copied / "install.sql"
    manifest.write_text(manifest.read_text().replace("'1min'", "'1ms'"))
    lock = "select pg_advisory_xact_lock(hashtextextended('rota.install', 0))"
    with psycopg.connect(empty) as other, admin.transaction():
        other.execute(lock)
        pid = other.info.backend_pid
        admin.execute(lock)  # in another database
        done = psql(empty, "-f", manifest, check=False)

    assert done.returncode == 3
    assert "another session is installing rota in this database" in done.stderr
    assert f"or end it: select pg_terminate_backend({pid});" in done.stderr


def test_an_install_waits_for_no_transaction_of_a_caller(
    empty: str, psql: Any, sql_dir: Path
) -> None:
    psql(empty, "-f", sql_dir / "install.sql")
    with psycopg.connect(empty) as forgotten:
        forgotten.execute("select rota.tick()")
        forgotten.execute("select rota.enqueue('x', idempotency_key => 'k', limit_key => 'l')")
        forgotten.execute("select rota.set_queue('default', max_attempts => 2)")
        forgotten.execute("select rota.set_limit(queue => 'default', max_running => 2)")
        forgotten.execute("select rota.schedule_job('s', 'every 1 minute', 'x')")
        forgotten.execute("select rota.claim_jobs('w')")

        psql(empty, "-f", sql_dir / "install.sql")


def test_a_schema_whose_owner_was_changed_without_its_objects_is_told(
    empty: str, psql: Any, sql_dir: Path, server: Any
) -> None:
    psql(empty, "-f", sql_dir / "install.sql")
    superuser = server.url(conninfo_to_dict(empty)["dbname"])
    psql(superuser, "-c", "alter schema rota owner to postgres")

    for dsn in (empty, superuser):
        done = psql(dsn, "-f", sql_dir / "install.sql", check=False)
        assert done.returncode == 3
        assert "belongs to role postgres, and its tables to rota_installer" in done.stderr
    psql(superuser, "-c", "alter schema rota owner to rota_installer")
    psql(empty, "-f", sql_dir / "install.sql")


def test_who_keeps_an_uninstall_waiting_is_named(empty: str, psql: Any, copied: Path) -> None:
    psql(empty, "-f", copied / "install.sql")
    script = copied / "uninstall.sql"
    script.write_text(script.read_text().replace("lock_timeout = '5s'", "lock_timeout = 1"))
    with psycopg.connect(empty, application_name="a dump") as reader:
        reader.execute("select * from rota.jobs")
        pid = reader.info.backend_pid
        done = psql(empty, "-f", script, check=False)

    assert done.returncode == 3
    assert f"other transactions use rota and stay open: pid {pid} (a dump)\n" in done.stderr
    psql(empty, "-f", script)
    psql(empty, "-f", copied / "install.sql")


def test_uninstall_of_nothing_is_no_error(empty: str, psql: Any, sql_dir: Path) -> None:
    psql(empty, "-f", sql_dir / "uninstall.sql")


@pytest.mark.slow
def test_the_flat_file_through_a_driver_makes_the_same_schema(
    make_empty: Callable[[], str], psql: Any, dump: Dump, sql_dir: Path, tmp_path: Path
) -> None:
    by_psql, by_driver = make_empty(), make_empty()
    shutil.copy(sql_dir.parent / "Makefile", tmp_path)
    shutil.copytree(sql_dir, tmp_path / "sql")
    made = subprocess.check_output(["make", "-s", "dist"], cwd=tmp_path, text=True).strip()

    psql(by_psql, "-f", sql_dir / "install.sql")
    with psycopg.connect(by_driver, autocommit=True) as connection:
        connection.execute((tmp_path / made).read_bytes())
        row = connection.execute("select rota.version()").fetchone()

    assert dump(by_driver) == dump(by_psql)
    assert row is not None
    assert made == f"dist/rota-{row[0]}.sql"


@pytest.mark.parametrize(
    "line", ["\\copy jobs from 'x'", "\\if :fresh", "select 1 as one \\gx"]
)
def test_the_flattener_refuses_what_it_does_not_know(
    line: str, sql_dir: Path, tmp_path: Path
) -> None:
    manifest = tmp_path / "install.sql"
    manifest.write_text(f"begin;\n{line}\ncommit;\n")

    command = ["awk", "-f", str(sql_dir / "flatten.awk"), str(manifest)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 1
    assert "install.sql" in done.stderr
