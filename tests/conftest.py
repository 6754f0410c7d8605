"""One server per run, one installed template, one fresh clone of it per test.

So every test makes real commits and real races, and leaves nothing to the next one.
Set ROTA_PG_BINDIR to run on the PostgreSQL programs of another directory, ROTA_TEST_SETTINGS
to give the server settings, one on a line, ROTA_TEST_POOLER to come through pgbouncer,
ROTA_TEST_PAUSES to run on the functions as the races instrument them, and
ROTA_TEST_DATABASE_NUMBER to give the databases this number.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from styles import CURSOR, PLAIN_SESSION

from races.instrument import instrument
from rota.testing.server import EmbeddedPostgres, find_binaries, memory
from support.clock import Clock
from support.pooler import pooled

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SLOW_ROOMS = {
    "races",
    "model",
    "mutants",
    "fuzz",
    "faults",
    "security",
    "web",
    "releases",
}
# Each of them takes 10 to 90 seconds.  They are run first, so that all processes end together.
SLOWEST = (
    "web/test_browser.py",
    "model/test_machine.py",
    "contract/test_plans.py",
    "client/test_demo.py",
    "races/test_pairs.py",
    "contract/test_install_sh.py",
    "races/test_racing_pipelines.py",
    "client/test_frozen.py",
    "faults/test_move_kill.py",
    "faults/test_scale_history.py",
    "faults/test_promotions.py",
    "sql/maintenance/test_pg_cron.py",
    "races/test_interleavings.py",
    "races/test_strangers.py",
    "client/test_types.py",
    "model/test_tickers.py",
    "client/test_example_apps.py",
    "model/test_storms.py",
    "mutants/test_storms_notice.py",
    "mutants/test_tickers_notice.py",
    "client/test_testing_plugin.py",
    "client/test_worker_process.py",
    "faults/test_killed_workers.py",
    "races/test_racing_schedules.py",
    "races/test_games.py",
    "client/test_supervisor.py",
    "client/test_time_limit.py",
    "client/test_worker.py",
    "fuzz/test_cron_oracle.py",
    "security/test_gate.py",
    "mutants/test_mutants.py",
    "client/test_locked_rows.py",
    "contract/test_install.py",
    "contract/test_node.py",
    "races/test_load.py",
    "client/test_package.py",
    "client/test_django_suite.py",
    "sql/schedules/test_describe.py",
)
TEMPLATE = "rota_template"
INSTALLER = "rota_installer"

_left_out: Counter[str] = Counter()
Connect = Callable[..., psycopg.Connection[Any]]
Psql = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", autouse=True)
def _own_environment() -> Iterator[None]:
    """Hide the developer's own database from everything that a test starts."""
    # A shell starts what it puts in the background with SIGINT ignored, and so would all
    # that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            is_ours = name == "PGBINDIR" or os.environ[name] == PLAIN_SESSION
            if name == "DATABASE_URL" or (name.startswith("PG") and not is_ours):
                patch.delenv(name)
        # What a test starts in another directory finds the same code.
        if path := os.environ.get("PYTHONPATH"):
            folders = [str(Path(folder).resolve()) for folder in path.split(os.pathsep)]
            patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        yield


@pytest.fixture(scope="session", autouse=True)
def _styles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        defaults = psycopg.Connection.connect.__func__.__kwdefaults__  # type: ignore[attr-defined]
        patch.setitem(defaults, "cursor_factory", CURSOR)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let what is about texts or plans see those of a server without settings."""
    with pytest.MonkeyPatch.context() as patch:
        if "ROTA_TEST_SETTINGS" in os.environ and item.get_closest_marker("plain_session"):
            patch.setenv("PGOPTIONS", PLAIN_SESSION)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what no process can send to another: a log that tells of half a character."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode())
        for name, text in report.sections
    ]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the rooms that take long for slow as a whole, and begin with the slowest files."""
    turns = {HERE / name: turn for turn, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))
    for item in items:
        if item.path.relative_to(HERE).parts[0] in SLOW_ROOMS:
            item.add_marker(pytest.mark.slow)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what is left out for being slow; with xdist each worker sees all of it."""
    for item in items:
        is_asked_for = "not slow" in item.config.getoption("markexpr")
        if is_asked_for and item.get_closest_marker("slow"):
            _left_out[item.path.relative_to(HERE).as_posix()] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts from a worker of xdist to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive them; all workers have the same."""
    for name, number in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        _left_out[name] = number


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what a quick run has left out."""
    if _left_out:
        told = ", ".join(f"{name} {number}" for name, number in sorted(_left_out.items()))
        number = sum(_left_out.values())
        config = terminalreporter.config
        rooms = {Path(arg.partition("::")[0]).parts[0] for arg in config.args}
        others = " ".join(sorted({*config.getini("testpaths")} - rooms)) or "none"
        terminalreporter.write_line(f"left out: {number} slow tests (make test), of {told}")
        terminalreporter.write_line(f"left out as a whole: {others}")


@pytest.fixture(scope="session")
def sql_dir() -> Path:
    return ROOT / "sql"


@pytest.fixture(scope="session")
def server(_own_environment: None) -> Iterator[EmbeddedPostgres]:
    """The server of this run, with pg_cron where its library is installed."""
    bindir, _ = find_binaries(os.environ.get("ROTA_PG_BINDIR"))
    # To compile plans costs a fifth of all, where each runs once; make test-settings does it.
    settings = ["max_connections=300", "log_min_messages=log", "jit=off"]
    libraries = ["plpgsql"]  # else each session loads it
    if _has_library(bindir, "pg_cron"):
        libraries += ["pg_cron"]
        settings += ["cron.database_name=postgres", "cron.use_background_workers=on"]
    settings += [f"shared_preload_libraries={','.join(libraries)}"]
    settings += os.environ.get("ROTA_TEST_SETTINGS", "").splitlines()
    with EmbeddedPostgres(
        bindir=bindir, settings=settings, directory=memory(room=6 << 30)
    ) as server:
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


def _has_library(bindir: Path, name: str) -> bool:
    pg_config = bindir / "pg_config"
    if not pg_config.exists():
        return False
    found = subprocess.check_output([pg_config, "--pkglibdir"], text=True)
    return Path(found.strip(), f"{name}.so").exists()
