"""Installing where somebody was before: his objects are not run, and his schema is not used."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from security import shadows
from security.good_calls import CALLS, UNAVAILABLE, attempt, set_scene
from support.databases import pg_dump

Db = psycopg.Connection[Any]

STRANGER = "gate_stranger"
INSTALL_SH = Path(__file__).resolve().parents[2] / "install.sh"


@pytest.fixture
def installer(empty: str, admin: Db) -> str:
    """The DSN of who installs into a database where a stranger may create what he likes."""
    if not admin.execute("select 1 from pg_roles where rolname = %s", (STRANGER,)).fetchone():
        admin.execute(f"create role {STRANGER} login password 'stranger'")
    admin.execute(
        sql.SQL("grant connect, create, temporary on database {} to {}").format(
            sql.Identifier(str(conninfo_to_dict(empty)["dbname"])), sql.Identifier(STRANGER)
        )
    )
    return empty


@pytest.fixture
def superuser(installer: str, server: Any) -> str:
    return str(server.url(conninfo_to_dict(installer)["dbname"]))


@pytest.fixture
def stranger(installer: str) -> str:
    return make_conninfo(installer, user=STRANGER, password="stranger")


@pytest.fixture
def dumped(superuser: str) -> Callable[..., str]:
    """Return what a dump shows of the whole database, or of one schema."""

    def run(*options: str) -> str:
        command = [pg_dump(superuser), *options, superuser]
        lines = subprocess.check_output(command, text=True).splitlines()
        return "\n".join(x for x in lines if not x.startswith(("\\restrict", "\\unrestrict")))

    return run


def infest(superuser: str, stranger: str) -> None:
    """Let the stranger fill public, and make everybody look there first."""
    with psycopg.connect(superuser, autocommit=True) as db:
        db.execute("grant create, usage on schema public to public")
        db.execute(
            sql.SQL("alter database {} set search_path = public, pg_catalog").format(
                sql.Identifier(db.info.dbname)
            )
        )
    with psycopg.connect(stranger, autocommit=True) as db:
        shadows.make(db, "public", is_temporary_too=False)
        db.execute("create table public.jobs (id bigint); create table public.queues (id int)")


@pytest.mark.slow
def test_an_infested_public_schema_does_no_harm(
    installer: str, superuser: str, stranger: str, dumped: Any, psql: Any, sql_dir: Path
) -> None:
    """The same database as anywhere else, made without running anything of the stranger's."""
    psql(installer, "-f", sql_dir / "install.sql")
    clean = dumped("--schema=rota", "--schema-only")
    psql(installer, "-f", sql_dir / "uninstall.sql")
    infest(superuser, stranger)

    for _ in "fresh", "again":
        psql(installer, "-f", sql_dir / "install.sql")

        assert dumped("--schema=rota", "--schema-only") == clean
    with psycopg.connect(installer, autocommit=True) as owner:
        assert harm(superuser) == dict.fromkeys(shadows.KINDS, 0)
        owner.execute("set search_path = pg_catalog")
        scene = set_scene(owner)
        answers = {name: attempt(owner, query, scene) for name, query in CALLS.items()}
    assert {name: code for name, code in answers.items() if code} == UNAVAILABLE
    assert harm(superuser) == dict.fromkeys(shadows.KINDS, 0)


def test_tick_loop_begins_on_the_path_of_its_caller_and_finds_nothing_there(
    installer: str, superuser: str, stranger: str, psql: Any, sql_dir: Path
) -> None:
    """Only where the path says that pg_catalog comes after what others may create in."""
    psql(installer, "-f", sql_dir / "install.sql")
    infest(superuser, stranger)

    with psycopg.connect(installer, autocommit=True) as owner:
        owner.execute(CALLS["tick_loop"])

    assert harm(superuser) == dict.fromkeys(shadows.KINDS, 0)


def harm(superuser: str) -> dict[str, int]:
    with psycopg.connect(superuser) as db:
        return shadows.marks(db, "public")


def test_an_event_trigger_of_another_superuser_is_no_obstacle(
    installer: str, superuser: str, dumped: Any, psql: Any, sql_dir: Path
) -> None:
    """He who watches all commands sees ours, on the path of the install."""
    psql(installer, "-f", sql_dir / "install.sql")
    clean = dumped("--schema=rota", "--schema-only")
    psql(installer, "-f", sql_dir / "uninstall.sql")
    with psycopg.connect(superuser, autocommit=True) as db:
        db.execute(
            "create table public.seen (tag text, path text);"
            "create function public.see() returns event_trigger language plpgsql"
            " security definer as $$ begin insert into public.seen"
            " values (tg_tag, current_setting('search_path')); end $$;"
            "create event trigger see on ddl_command_end execute function public.see();"
            "alter event trigger see enable always"
        )

    psql(installer, "-f", sql_dir / "install.sql")

    assert dumped("--schema=rota", "--schema-only") == clean
    with psycopg.connect(superuser) as db:
        paths = db.execute("select distinct path from public.seen").fetchall()
    assert paths == [("pg_catalog, pg_temp",)]


PREMADE = {
    "an empty schema": "create schema rota",
    "a schema with a table": "create schema rota create table jobs (id bigint)",
    "a schema that looks installed": "create schema rota create table upgrade_log (id integer)"
    " create table jobs (id bigint, payload jsonb)",
    "a schema open to all": "create schema rota; grant all on schema rota to public",
}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["installer", "superuser"])
@pytest.mark.parametrize("made", PREMADE)
def test_a_schema_of_a_stranger_is_refused(
    request: pytest.FixtureRequest,
    stranger: str,
    dumped: Any,
    psql: Any,
    sql_dir: Path,
    who: str,
    made: str,
) -> None:
    psql(stranger, "-c", PREMADE[made])
    before = dumped()

    done = psql(request.getfixturevalue(who), "-f", sql_dir / "install.sql", check=False)

    assert done.returncode == 3
    assert (
        "a schema rota exists, but rota is not installed in it" in done.stderr
        or f"rota belongs to role {STRANGER}, and you are " in done.stderr
    )
    assert dumped() == before


@pytest.mark.parametrize("who", ["installer", "superuser"])
def test_a_schema_that_is_called_like_an_old_one_stays_and_stops_no_install(
    request: pytest.FixtureRequest,
    installer: str,
    stranger: str,
    psql: Any,
    sql_dir: Path,
    who: str,
) -> None:
    """An upgrade leaves one of that name behind, which the next install removes."""
    psql(installer, "-f", sql_dir / "install.sql")
    psql(stranger, "-c", "create schema rota_0_1_0 create table mine (id bigint)")
    options = {"installer": [], "superuser": ["-c", "set role rota_installer"]}[who]

    psql(request.getfixturevalue(who), *options, "-f", sql_dir / "install.sql")

    psql(stranger, "-c", "insert into rota_0_1_0.mine values (1)")


@pytest.mark.slow
def test_a_rota_of_a_stranger_is_refused_to_a_superuser(
    superuser: str, stranger: str, dumped: Any, psql: Any, sql_dir: Path
) -> None:
    """A trigger of his on our tables would run with the rights of our functions."""
    psql(stranger, "-f", sql_dir / "install.sql")
    psql(
        stranger,
        "-c",
        "drop function rota.version(); create table rota.taken (by name)",
        "-c",
        "create function rota.start_ticker() returns text language plpgsql as"
        " $$ begin insert into rota.taken values (session_user); return ''; end $$",
    )
    before = dumped()

    done = psql(superuser, "-v", "with_cron=1", "-f", sql_dir / "install.sql", check=False)

    assert done.returncode == 3
    assert f"rota belongs to role {STRANGER}, and you are postgres" in done.stderr
    assert dumped() == before


TELLING = (
    "returns {} language plpgsql as $$ begin raise exception 'run as %', current_user; end $$"
)
STRANGE = {
    "a rota of his": [
        "create schema rota; create function rota.tell() " + TELLING.format("integer"),
        "create function rota.version() " + TELLING.format("text"),
        "create view rota.upgrade_log as select rota.tell() as id",
        "create view rota.jobs as select rota.tell() as id",
    ],
    "a function of his in public": [
        "create function public.format(pg_catalog.text, pg_catalog.name, pg_catalog.name) "
        + TELLING.format("pg_catalog.text"),
    ],
}


@pytest.mark.parametrize("made", STRANGE)
@pytest.mark.parametrize(
    "options", [[], ["--dry-run"], ["--status"], ["--uninstall", "--yes"]], ids=str
)
def test_the_install_command_runs_nothing_of_a_stranger(
    superuser: str, stranger: str, psql: Any, options: list[str], made: str
) -> None:
    """It asks what is there, as a superuser, before the SQL could refuse it."""
    if made != "a rota of his":
        infest(superuser, stranger)
    psql(stranger, *(word for statement in STRANGE[made] for word in ("-c", statement)))

    done = subprocess.run(
        [INSTALL_SH, *options, superuser], check=False, capture_output=True, text=True
    )

    assert "run as postgres" not in done.stderr
    # Neither is there anything to look at or to remove in the second.
    expected = {"[]": 0, "['--dry-run']": 0} if made != "a rota of his" else {"[]": 3}
    assert done.returncode == expected.get(str(options), 1)


def test_a_rota_of_a_role_is_refused_to_its_members(
    installer: str, stranger: str, admin: Db, dumped: Any, psql: Any, sql_dir: Path
) -> None:
    """In older servers a role makes anybody its member, asked or not."""
    psql(stranger, "-f", sql_dir / "install.sql")
    user = str(conninfo_to_dict(installer)["user"])
    grant, revoke = (
        sql.SQL(f"{verb} {STRANGER} {{}} {{}}").format(sql.SQL(word), sql.Identifier(user))
        for verb, word in (("grant", "to"), ("revoke", "from"))
    )
    before = sorted(dumped().splitlines())  # the second install writes some rows again
    admin.execute(grant)
    try:
        done = psql(installer, "-f", sql_dir / "install.sql", check=False)
        chosen = make_conninfo(installer, options=f"-c role={STRANGER}")
        psql(chosen, "-f", sql_dir / "install.sql")
    finally:
        admin.execute(revoke)

    assert done.returncode == 3
    assert f"rota belongs to role {STRANGER}, and you are {user}" in done.stderr
    assert sorted(dumped().splitlines()) == before
