"""One server per run, one installed template, one fresh clone of it per test.

So every test makes real commits and real races, and leaves nothing to the next one.
Set ROTA_PG_BINDIR to run on the PostgreSQL programs of another directory, ROTA_TEST_SETTINGS
to give the server settings, one on a line, ROTA_TEST_POOLER to come through pgbouncer,
ROTA_TEST_PAUSES to run on the functions as the races instrument them,
ROTA_TEST_DATABASE_NUMBER to give the databases this number, ROTA_TEST_LOCALE to give them a
language and encoding of support/locales.py, and ROTA_TEST_COLUMNS to run over the tables of a
newer version, as after a downgrade: each has one column more.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from races.instrument import instrument
from rota.testing.server import EmbeddedPostgres, find_binaries, memory
from support.clock import Clock
from support.locales import chosen, generated
from support.pooler import pooled

SQL = Path(__file__).resolve().parents[2] / "sql"
TEMPLATE = "rota_template"
INSTALLER = "rota_installer"

Connect = Callable[..., psycopg.Connection[Any]]
Psql = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def sql_dir() -> Path:
    return SQL


@pytest.fixture(scope="session")
def server(_own_environment: None) -> Iterator[EmbeddedPostgres]:
    """The server of this run, with pg_cron where its library is installed."""
    bindir, _ = find_binaries(os.environ.get("ROTA_PG_BINDIR"))
    # To compile plans costs a fifth of all, where each runs once; make test-settings does it.
    settings = ["max_connections=300", "log_min_messages=log", "jit=off"]
    libraries = ["plpgsql"]  # else each session loads it
    if has_library(bindir, "pg_cron"):
        libraries += ["pg_cron"]
        settings += ["cron.database_name=postgres", "cron.use_background_workers=on"]
    settings += [f"shared_preload_libraries={','.join(libraries)}"]
    settings += os.environ.get("ROTA_TEST_SETTINGS", "").splitlines()
    with (
        generated(),
        EmbeddedPostgres(
            bindir=bindir,
            settings=settings,
            directory=memory(room=6 << 30),
            initdb_options=chosen(),
        ) as server,
    ):
        _make_passwords_cheap(server)
        yield server


def _make_passwords_cheap(server: EmbeddedPostgres) -> None:
    """Let a login hash its password 1000 times, the fewest that all drivers take, not 4096."""
    password, salt = conninfo_to_dict(server.url())["password"], secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", str(password).encode(), salt, iterations=1000)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    keys = hashlib.sha256(client_key).digest(), hmac.digest(salted, b"Server Key", "sha256")
    salt64, stored, own = (base64.b64encode(part).decode() for part in (salt, *keys))
    with psycopg.connect(server.url(), autocommit=True) as connection:
        verifier = f"SCRAM-SHA-256$1000:{salt64}${stored}:{own}"
        connection.execute(sql.SQL("alter role postgres password {}").format(verifier))


@pytest.fixture(scope="session")
def psql() -> Psql:
    """Run psql as a user would; it must succeed unless *check* is false."""

    def run(dsn: str, *args: str | Path, check: bool = True, **options: Any) -> Any:
        command = ["psql", "-X", "-q", "-d", dsn, *map(str, args)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, **options)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def pg_dump(dsn: str) -> str:
    """Return the program that dumps a database, or skip the test if it is too old for it."""
    version = subprocess.check_output(["pg_dump", "--version"], text=True).split()[2]
    with psycopg.connect(dsn) as connection:
        if int(version.split(".")[0]) < connection.info.server_version // 10000:
            pytest.skip(f"pg_dump {version} is older than the server")
    return "pg_dump"


@pytest.fixture(scope="session")
def admin(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[Any]]:
    """A superuser's connection outside of the databases under test."""
    with psycopg.connect(server.url("template1"), autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def empty_database(
    server: EmbeddedPostgres, admin: psycopg.Connection[Any]
) -> Callable[[str], str]:
    """Make an empty database by name; return the DSN of one who may only connect and create."""
    admin.execute(
        sql.SQL("create role {} login password 'installer'").format(sql.Identifier(INSTALLER))
    )

    def make(name: str) -> str:
        database, role = sql.Identifier(name), sql.Identifier(INSTALLER)
        admin.execute(sql.SQL("create database {} template template0").format(database))
        admin.execute(sql.SQL("revoke all on database {} from public").format(database))
        admin.execute(
            sql.SQL("grant connect, create on database {} to {}").format(database, role)
        )
        return make_conninfo(server.url(name), user=INSTALLER, password="installer")

    return make


COLUMNS = """
do $$
declare
    v_table regclass;
begin
    for v_table in
        select c.oid from pg_class as c
        where c.relnamespace = 'rota'::regnamespace and c.relkind in ('r', 'p')
          and not c.relispartition
    loop
        execute format('alter table %s add column of_newer text', v_table);
    end loop;
    perform rota._keep_manifest();
end $$;
"""


@pytest.fixture(scope="session")
def template(
    server: EmbeddedPostgres,
    empty_database: Callable[[str], str],
    admin: psycopg.Connection[Any],
    psql: Psql,
    sql_dir: Path,
) -> str:
    """The database that every test gets a copy of."""
    psql(empty_database(TEMPLATE), "-f", sql_dir / "install.sql")
    # So long a server sweeps nothing.
    admin.execute("select pg_sleep_until(pg_postmaster_start_time() + interval '3 seconds')")
    if number := os.environ.get("ROTA_TEST_DATABASE_NUMBER"):
        with psycopg.connect(server.url(TEMPLATE)) as connection:
            connection.execute("select rota.set_database_number(%s)", (int(number),))
    if os.environ.get("ROTA_TEST_COLUMNS"):
        with psycopg.connect(server.url(TEMPLATE)) as connection:
            connection.execute(COLUMNS)
    if os.environ.get("ROTA_TEST_PAUSES"):
        with psycopg.connect(server.url(TEMPLATE), autocommit=True) as connection:
            instrument(connection)
    # What the first session of each copy would do to its catalog is done here, once.
    with psycopg.connect(server.url(TEMPLATE), autocommit=True) as connection:
        catalog = connection.execute(
            "select oid::regclass::text from pg_class"
            " where relnamespace = 'pg_catalog'::regnamespace and relkind = 'r'"
            " and not relisshared"
        )
        for (table,) in catalog.fetchall():
            connection.execute(sql.SQL("vacuum (full, freeze) {}").format(sql.SQL(table)))
    psycopg.connect(server.url(TEMPLATE)).close()  # keeps what it read in a file
    # Copying needs a database without visitors, so nobody is let in any more.
    admin.execute(
        sql.SQL("alter database {} allow_connections false").format(sql.Identifier(TEMPLATE))
    )
    return TEMPLATE


@pytest.fixture(scope="session")
def make_encoded(
    server: EmbeddedPostgres, admin: psycopg.Connection[Any], psql: Psql
) -> Callable[..., str]:
    """Make a database in another encoding or order, and install rota there."""

    def make(name: str, encoding: str, provider: str = "locale_provider libc") -> str:
        if admin.info.server_version < 150000:
            if "icu" in provider:
                pytest.skip("no database has a collation of ICU before 15")
            provider = ""
        command = f"create database {name} template template0 encoding '{encoding}' locale 'C'"
        try:
            admin.execute(f"{command} {provider}".encode())
        except (psycopg.errors.FeatureNotSupported, psycopg.errors.SyntaxError):
            if "icu" not in provider:
                raise
            pytest.skip("the server has no ICU")
        psql(server.url(name), "-f", SQL / "install.sql")
        return server.url(name)

    return make


@pytest.fixture(scope="session")
def of_bytes(make_encoded: Callable[..., str]) -> str:
    """A database of encoding SQL_ASCII, which its tests share: it counts bytes."""
    return make_encoded("of_bytes", "SQL_ASCII")


@pytest.fixture(scope="session")
def in_latin1(make_encoded: Callable[..., str]) -> str:
    """A database that lacks most characters, which its tests share."""
    return make_encoded("in_latin1", "LATIN1")


@pytest.fixture(scope="session")
def turkish(make_encoded: Callable[..., str]) -> str:
    """A database where the small letter of I is not i, which its tests share."""
    return make_encoded("in_turkish", "UTF8", "locale_provider icu icu_locale 'tr'")


@pytest.fixture(scope="session")
def url_of(server: EmbeddedPostgres) -> Iterator[Callable[[str], str]]:
    """The way to a database, by its name: direct, or through a pooler."""
    if not os.environ.get("ROTA_TEST_POOLER"):
        yield server.url
        return
    with pooled(server.url("postgres")) as url, pytest.MonkeyPatch.context() as patch:
        # Statements are prepared for a session, and this one is another each time.
        defaults = psycopg.Connection.connect.__func__.__kwdefaults__  # type: ignore[attr-defined]
        patch.setitem(defaults, "prepare_threshold", None)
        yield lambda name: url.removesuffix("postgres") + name


_numbers = count(1)
_finished: list[str] = []
_unused: dict[str, list[str]] = {}  # by what they are copies of


@pytest.fixture
def dsn(
    admin: psycopg.Connection[Any], template: str, url_of: Callable[[str], str]
) -> Iterator[str]:
    """Where this test's own database is, as its superuser sees it.

    The test before may have had it too, if nothing was written since and nobody is left there.
    """
    unused = _unused.setdefault(template, [])
    name = unused.pop() if unused else _clone(admin, template)
    before = _written(admin)
    yield url_of(name)
    is_unused = _written(admin) == before and _is_empty(admin, name)
    (unused if is_unused else _finished).append(name)


def _clone(admin: psycopg.Connection[Any], template: str) -> str:
    name = f"t{next(_numbers)}"
    # A drop waits for a session that is leaving, in steps of 100 ms.  The one before has none.
    while len(_finished) > 1:
        admin.execute(
            sql.SQL("drop database {} with (force)").format(sql.Identifier(_finished.pop(0)))
        )
    copying: LiteralString = "create database {} template {}"
    if admin.info.server_version >= 150000:
        copying += " strategy file_copy"  # twice as fast as by the log, for a small database
    admin.execute(sql.SQL(copying).format(sql.Identifier(name), sql.Identifier(template)))
    return name


def _is_empty(admin: psycopg.Connection[Any], name: str) -> bool:
    """Return whether nobody is in a database; a session takes a moment to leave."""
    for _ in range(10):
        asked = admin.execute("select from pg_stat_activity where datname = %s", [name])
        if not asked.rowcount:
            return True
        time.sleep(0.002)
    return False


def _written(admin: psycopg.Connection[Any]) -> object:
    """Return the place in the server's log that the next change of anything is written to.

    A sequence is in it when a database has it counted for the first time.
    """
    return admin.execute("select pg_current_wal_insert_lsn()").fetchone()


@pytest.fixture(scope="session")
def _read_only_db(
    server: EmbeddedPostgres, admin: psycopg.Connection[Any], template: str
) -> Iterator[psycopg.Connection[Any]]:
    admin.execute(
        sql.SQL("create database read_only template {}").format(sql.Identifier(template))
    )
    with psycopg.connect(server.url("read_only"), autocommit=True) as connection:
        yield connection


@pytest.fixture
def read_only_db(_read_only_db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """The connection of a test that only computes, to a database that all such tests share."""
    _read_only_db.execute("reset all")
    _read_only_db.execute("set default_transaction_read_only = on")
    return _read_only_db


@pytest.fixture
def connect(dsn: str) -> Iterator[Connect]:
    """Open one more connection to this test's database, in autocommit unless told otherwise."""
    connections: list[psycopg.Connection[Any]] = []

    def open_connection(**kwargs: Any) -> psycopg.Connection[Any]:
        connections.append(psycopg.connect(dsn, **{"autocommit": True, **kwargs}))
        return connections[-1]

    yield open_connection
    for connection in connections:
        connection.close()


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection[Any]:
    """The connection of a test that needs one."""
    return connect()


@pytest.fixture
def unnumbered(db: psycopg.Connection[Any]) -> None:
    """Let the database have no number, as those of the docs, which show ids."""
    db.execute("alter sequence rota.jobs_id_seq increment by 1 start with 1 restart with 1")


@pytest.fixture
def clock(connect: Connect) -> Clock:
    return Clock(connect())


@pytest.fixture
def utc(db: psycopg.Connection[Any]) -> None:
    """Let the session of the test name its times in UTC, whatever the server has."""
    db.execute("set timezone = 'UTC'")


def has_library(bindir: Path, name: str) -> bool:
    """Return whether this PostgreSQL has a library of an extension."""
    pg_config = bindir / "pg_config"
    if not pg_config.exists():
        return False
    found = subprocess.check_output([pg_config, "--pkglibdir"], text=True)
    return Path(found.strip(), f"{name}.so").exists()
