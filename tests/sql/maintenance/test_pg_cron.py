"""pg_cron as the heartbeat, on a server where it serves a database of ours."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from contract.test_plpgsql_check import CHECK
from races.harness import Session
from rota.testing import EmbeddedPostgres, find_binaries
from sql.helpers import Db, call, grant, one, raises, refused, rows, scalar, value
from support.databases import Psql, has_library
from support.server import Server
from support.waiting import wait_until

pytestmark = pytest.mark.slow

ENTRIES = "select jobname, schedule, command, database, username, active from cron.job"
OURS = "* * * * *", "call rota.tick_loop('60 seconds', '1 seconds')"


@pytest.fixture(scope="module")
def cron_server(psql: Psql, sql_dir: Path) -> Iterator[EmbeddedPostgres]:
    """A server whose pg_cron serves the database shop, where shop owns rota."""
    bindir, _ = find_binaries(os.environ.get("ROTA_PG_BINDIR"))
    if not has_library(bindir, "pg_cron"):
        pytest.skip("these PostgreSQL programs have no pg_cron")
    settings = ["shared_preload_libraries=pg_cron", "cron.database_name=shop"]
    settings += ["cron.use_background_workers=on"]
    with EmbeddedPostgres(bindir=bindir, settings=settings) as server:
        with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
            admin.execute("create role shop login password 'shop'")
            for name in ("shop", "elsewhere"):
                admin.execute(f"create database {name} owner shop")  # type: ignore[arg-type]
        with psycopg.connect(server.url("shop"), autocommit=True) as admin:
            admin.execute("create extension pg_cron; grant usage on schema cron to shop")
        for name in ("shop", "elsewhere"):
            owner = make_conninfo(server.url(name), user="shop", password="shop")
            psql(owner, "-f", sql_dir / "install.sql")
        yield server


@pytest.fixture
def shop(cron_server: EmbeddedPostgres) -> Iterator[Db]:
    """A superuser's connection to the database that pg_cron serves."""
    with psycopg.connect(cron_server.url("shop"), autocommit=True) as connection:
        yield connection
        connection.execute("grant usage on schema cron to shop; alter role shop login")
        connection.execute("delete from cron.job; delete from cron.job_run_details")


@pytest.fixture
def elsewhere(cron_server: EmbeddedPostgres) -> Iterator[Db]:
    """A superuser's connection to another database of that server."""
    with psycopg.connect(cron_server.url("elsewhere"), autocommit=True) as connection:
        yield connection


BY_THE_SECOND = [
    ("1 second", "1 seconds", "call rota.tick_loop('1 seconds', '1 seconds')"),
    ("59 seconds", "59 seconds", "call rota.tick_loop('59 seconds', '59 seconds')"),
]
BY_LOOP = [
    ("1 second", "* * * * *", "call rota.tick_loop('60 seconds', '1 seconds')"),
    ("59 seconds", "* * * * *", "call rota.tick_loop('60 seconds', '59 seconds')"),
]
BY_THE_MINUTE = [
    ("60 seconds", "* * * * *", "call rota.tick_loop('30 seconds', '1 minute')"),
    ("1 minute", "* * * * *", "call rota.tick_loop('30 seconds', '1 minute')"),
    ("5 minutes", "*/5 * * * *", "call rota.tick_loop('30 seconds', '1 minute')"),
    ("59 minutes", "*/59 * * * *", "call rota.tick_loop('30 seconds', '1 minute')"),
]


@pytest.mark.parametrize(
    ("version", "every", "schedule", "command"),
    [
        (version, *entry)
        for versions, entries in [
            (["1.5", "1.6", "1.6-1", "1.10", "2.0"], BY_THE_SECOND + BY_THE_MINUTE),
            (["1.3", "1.4-1", "1.4", "0.9", None], BY_LOOP + BY_THE_MINUTE),
        ]
        for version in versions
        for entry in entries
    ],
)
def test_cron_entry_of_each_version(db, version, every, schedule, command):
    entry = one(db, "_cron_entry", version=version, every=every)

    assert entry == (schedule, command)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "0",
        "-1 s",
        "0.5 s",
        "1.5 s",
        "61 s",
        "90 s",
        "60 min",
        "1 day",
        "1 month -30 days",
    ],
)
def test_start_ticker_refuses_what_pg_cron_cannot_do(db, bad):
    with refused("every"):
        value(db, "start_ticker", every=bad)


@pytest.mark.slow
def test_start_ticker_says_what_it_set_up(shop):
    said = value(shop, "start_ticker")

    (entry,) = rows(shop, ENTRIES)
    assert entry == ("rota tick", *OURS, "shop", "shop", True)
    assert re.fullmatch(
        r"""pg_cron 1\.\S+ runs "(?P<c>.*)" at "(?P<s>.*)" as shop""", said
    ).group("c", "s") == (entry.command, entry.schedule)


def test_start_ticker_again_changes_the_one_entry(shop):
    value(shop, "start_ticker")
    first = scalar(shop, "select jobid from cron.job")

    value(shop, "start_ticker", every="5 minutes")

    assert scalar(shop, "select jobid from cron.job") == first
    assert scalar(shop, "select schedule from cron.job") == "*/5 * * * *"


def test_a_login_without_rights_holds_up_no_ticker(cron_server, shop):
    value(shop, "start_ticker")
    with psycopg.connect(cron_server.url("shop")) as stranger:
        stranger.execute("set role pg_signal_backend")
        stranger.execute("select pg_advisory_lock(hashtextextended('rota.ticker', 0))")
        shop.execute("set statement_timeout = '5s'")

        assert value(shop, "start_ticker")
        assert value(shop, "stop_ticker")


def test_start_ticker_switches_on_what_was_switched_off(shop):
    value(shop, "start_ticker")
    shop.execute("update cron.job set active = false")

    value(shop, "start_ticker")

    assert rows(shop, ENTRIES) == [("rota tick", *OURS, "shop", "shop", True)]


def test_start_ticker_takes_an_entry_along_to_a_database_of_another_name(shop):
    """As that of a database that was renamed, or restored from a dump."""
    value(shop, "start_ticker")
    shop.execute("update cron.job set database = 'before'")
    value(shop, "start_ticker")
    assert rows(shop, ENTRIES) == [("rota tick", *OURS, "shop", "shop", True)]
    shop.execute("update cron.job set nodeport = 1")
    value(shop, "start_ticker")
    assert scalar(shop, "select nodeport from cron.job") == shop.info.port

    shop.execute("update cron.job set database = 'before'")
    assert value(shop, "stop_ticker")
    assert rows(shop, ENTRIES) == []


def test_start_ticker_needs_no_right_of_the_operator_on_pg_cron(shop):
    shop.execute("create role somebody")
    try:
        grant(shop, "operator", "somebody")
        shop.execute("set role somebody")
        value(shop, "start_ticker")
        assert value(shop, "stop_ticker")
        with raises("42501"):
            shop.execute("select cron.unschedule(1)")
    finally:
        shop.execute("reset role; drop owned by somebody; drop role somebody")


def test_stop_ticker_takes_ours_and_nothing_else(shop):
    shop.execute("select cron.schedule('mine', '* * * * *', 'select 1')")
    shop.execute("select cron.schedule('rota tick', '* * * * *', 'select 2')")
    value(shop, "start_ticker")

    stopped = [value(shop, "stop_ticker") for _ in range(2)]

    assert stopped == [True, False]
    assert rows(shop, "select command from cron.job order by 1") == [
        ("select 1",),
        ("select 2",),
    ]


def test_stop_ticker_without_pg_cron_has_nothing_to_stop(db):
    assert value(db, "stop_ticker") is False


def problem(db: Db) -> tuple[str, str]:
    """Return the message and the hint of start_ticker(), which must fail."""
    with pytest.raises(psycopg.errors.FeatureNotSupported) as caught:
        value(db, "start_ticker")
    diagnostic = caught.value.diag
    return str(diagnostic.message_primary), str(diagnostic.message_hint)


def test_start_ticker_names_the_grant_that_is_missing(shop):
    shop.execute("revoke usage on schema cron from shop")

    message, hint = problem(shop)

    assert message == "role shop may not use pg_cron"
    assert value(shop, "stop_ticker") is False
    shop.execute(hint.removeprefix("As a superuser: "))
    value(shop, "start_ticker")


def test_start_ticker_says_that_its_owner_cannot_log_in(shop):
    shop.execute("alter role shop nologin")

    message, hint = problem(shop)

    assert message == "pg_cron would have to log in as shop"
    shop.execute(hint.removeprefix("As a superuser: "))
    value(shop, "start_ticker")


@pytest.mark.parametrize("is_named", [True, False])
def test_start_ticker_says_what_to_run_where_pg_cron_is(shop, elsewhere, is_named):
    """The owner of rota may be allowed to know which database that is, or not."""
    if is_named:
        shop.execute("grant pg_read_all_settings to shop")
    try:
        message, hint = problem(elsewhere)
    finally:
        shop.execute("revoke pg_read_all_settings from shop")

    assert message == (
        "pg_cron is in database shop" if is_named else "pg_cron is not in this database"
    )
    assert ("show cron.database_name" in hint) is not is_named
    (statement,) = re.findall(r"select cron\.schedule_in_database\(.*?\);", hint)
    shop.execute(statement)
    assert rows(shop, ENTRIES) == [("rota tick elsewhere", *OURS, "elsewhere", "shop", True)]


@pytest.mark.parametrize(
    ("known", "message", "remedy"),
    [
        ("null", "pg_cron is not installed", "cron.database_name = 'elsewhere'"),
        ("'elsewhere'", "the extension pg_cron is not created", "create extension pg_cron; "),
    ],
)
def test_start_ticker_says_how_to_get_pg_cron(elsewhere, known, message, remedy):
    with elsewhere.transaction(force_rollback=True):
        elsewhere.execute(
            "create or replace function rota._cron_database() returns text"
            f" language plpgsql as $$ begin return {known}; end $$"
        )
        with elsewhere.transaction(force_rollback=True):
            said = problem(elsewhere)

    assert said[0].startswith(message)
    assert remedy in said[1]
    assert said[1].endswith("create extension pg_cron; grant usage on schema cron to shop;")


def log_run(db: Db, runid: int, command: str, ended: str, username: str = "shop") -> None:
    db.execute(
        "insert into cron.job_run_details (jobid, runid, database, username, command, status,"
        " end_time) values (1, %s, 'shop', %s, %s, 'succeeded', now() + %s::interval)",
        (runid, username, command, ended),
    )


def test_tick_forgets_our_runs_after_a_day(shop):
    value(shop, "start_ticker")
    log_run(shop, 1001, OURS[1], "-25 hours")
    log_run(shop, 1002, OURS[1], "-23 hours")
    log_run(shop, 1003, "call shop.close_day()", "-25 hours")
    log_run(shop, 1004, OURS[1], "-25 hours", "postgres")
    logged = (
        "select array_agg(runid order by runid) from cron.job_run_details where runid > 1000"
    )

    shop.execute("update rota.maintenance set done_at = '-infinity' where task = 'tick'")
    one(shop, "tick")
    too_soon = scalar(shop, logged)
    shop.execute("update rota.maintenance set done_at = '-infinity'")
    one(shop, "tick")

    assert too_soon == [1001, 1002, 1003, 1004]
    assert scalar(shop, logged) == [1002, 1003, 1004]


def test_tick_goes_on_forgetting_where_many_runs_are_logged(shop):
    value(shop, "start_ticker")
    for runid in range(2001, 2006):
        log_run(shop, runid, OURS[1], "-25 hours")
    shop.execute("update rota.maintenance set done_at = '-infinity'")
    owner = "select nspowner::regrole::text from pg_namespace where nspname = 'rota'"
    shop.execute(f"set role {scalar(shop, owner)}")

    left = []
    for _ in range(3):
        value(shop, "_purge_cron_runs", max_rows=3)
        left.append(
            scalar(shop, "select count(*) from cron.job_run_details where runid > 2000")
        )
    shop.execute("reset role")

    assert left == [2, 0, 0]


@pytest.mark.parametrize(
    "hindrance",
    [
        "revoke usage on schema cron from shop",
        "revoke delete on cron.job_run_details from public",
    ],
)
def test_tick_does_the_rest_where_the_log_is_not_ours(shop, hindrance):
    with shop.transaction():  # pg_cron would do the work before tick() is called
        value(shop, "start_ticker")
        shop.execute("update cron.job set active = false")
    warnings: list[str] = []
    shop.add_notice_handler(lambda found: warnings.append(str(found.message_primary)))
    shop.execute(hindrance)

    try:
        for _ in range(30):  # on a busy machine a tick leaves some to the next
            shop.execute("update rota.maintenance set done_at = '-infinity'")
            assert None not in one(shop, "tick")[:-1]
            if warnings:
                break
    finally:
        shop.execute("grant delete on cron.job_run_details to public")

    assert ["retention of cron_runs failed" in text for text in warnings] == (
        [True] if "delete" in hindrance else []
    )


@pytest.fixture
def owner(cron_server: EmbeddedPostgres, psql: Psql, sql_dir: Path) -> Iterator[str]:
    """The DSN of the owner of rota; it is installed again afterwards."""
    dsn = make_conninfo(cron_server.url("shop"), user="shop", password="shop")
    yield dsn
    psql(dsn, "-f", sql_dir / "install.sql")


def test_install_with_cron_starts_the_ticker(shop, owner, psql, sql_dir):
    psql(owner, "-v", "with_cron=1", "-f", sql_dir / "install.sql")

    assert rows(shop, ENTRIES) == [("rota tick", *OURS, "shop", "shop", True)]


def test_uninstall_takes_the_entry_and_its_log_with_it(shop, owner, psql, sql_dir):
    value(shop, "start_ticker")
    log_run(shop, 3001, OURS[1], "-1 hour")
    log_run(shop, 3002, "call shop.close_day()", "-1 hour")

    psql(owner, "-f", sql_dir / "uninstall.sql")

    assert rows(shop, ENTRIES) == []
    assert rows(shop, "select runid from cron.job_run_details") == [(3002,)]


@pytest.mark.parametrize("script", ["install.sql", "uninstall.sql"])
def test_scripts_work_where_pg_cron_is_not_ours(shop, owner, psql, sql_dir, script):
    shop.execute("revoke usage on schema cron from shop")

    psql(owner, "-f", sql_dir / script)


def test_start_ticker_as_the_readme_has_it(cron_server, shop):
    text = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    (command,) = re.findall(r"^\$ (psql .*start_ticker.*)$", text, re.M)

    environment = {**os.environ, "DATABASE_URL": cron_server.url("shop")}
    subprocess.run(["sh", "-c", command], check=True, env=environment)

    assert rows(shop, ENTRIES) == [("rota tick", *OURS, "shop", "shop", True)]


def crash(server: EmbeddedPostgres) -> None:
    """Kill the server as a power cut would, and start it again on the same data."""
    database = server._server
    database.child_process.send_signal(signal.SIGKILL)
    database.child_process.wait()
    with (Path(database.base_dir) / "again.log").open("w") as log:

        def start() -> bool:
            # Not before the last process of the old one has gone.
            database.child_process = subprocess.Popen(
                database.get_server_commandline(), stdout=log, stderr=log
            )
            while database.child_process.poll() is None:
                if database.is_server_available():
                    return True
            return False

        wait_until(start, "the server")


def last(condition: Callable[[], Any], what: str) -> None:
    """Wait for what pg_cron does at the next minute, or during the one after it."""
    for _ in range(4):
        with suppress(pytest.fail.Exception):
            wait_until(condition, what)
            return
    wait_until(condition, what)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("before", [0, pytest.param(65, marks=pytest.mark.long)])
def test_start_ticker_enqueues_by_the_second_also_after_a_crash(
    cron_server: EmbeddedPostgres, before: int
) -> None:
    """So many ticks; then the server is killed; at the next minute it ticks again."""
    with psycopg.connect(cron_server.url("shop"), autocommit=True) as shop:
        value(shop, "start_ticker")
        call(
            shop, "schedule_job", name="pulse", schedule="* * * * * *", job_type="beat",
            catch_up="all", catch_up_max=1000,
        )  # fmt: skip
        assert_enqueues_by_the_second(shop, before)
        shop.close()

    crash(cron_server)
    with psycopg.connect(cron_server.url("shop"), autocommit=True) as shop:
        assert_enqueues_by_the_second(shop, 8)
        by = scalar(shop, "select last_tick_by from rota.ticker_health")
        stopped = value(shop, "stop_ticker")
        entries = rows(shop, "select * from cron.job")
        # The running loop would go on to the end of its minute.
        loop = "from pg_stat_activity where query like 'call rota.tick_loop%'"
        shop.execute(f"select pg_terminate_backend(pid) {loop}")
        last(lambda: not shop.execute(f"select {loop}").rowcount, "the end of the loop")
        made = [
            run.scheduled_for
            for run in rows(
                shop, "select scheduled_for from rota.jobs where job_type = 'beat' order by 1"
            )
        ]
        call(shop, "unschedule_job", name="pulse")

    assert {(after - before).total_seconds() for before, after in pairwise(made)} == {1}
    assert by == "pg_cron as shop"
    assert (stopped, entries) == (True, [])


def assert_enqueues_by_the_second(shop: Db, seconds: int) -> None:
    """Wait for that many ticks that enqueue; each comes a second after the one before."""
    since = scalar(shop, "select now()")
    ticks = (
        "select distinct on (xmin::text) recorded_at from rota.occurrences"
        " where outcome = 'enqueued' and recorded_at > %s"
    )
    last(lambda: len(rows(shop, ticks, since)) >= seconds, f"{seconds} seconds of occurrences")
    at = sorted(tick.recorded_at for tick in rows(shop, ticks, since))
    gaps = sorted((after - before).total_seconds() for before, after in pairwise(at))
    if gaps:
        assert gaps[len(gaps) // 2] == pytest.approx(1, abs=0.1)
        assert gaps[-1] < 5


def test_a_pg_cron_whose_entries_have_no_names_is_too_old(shop, owner, psql, sql_dir):
    """As after an upgrade of its package without one of the extension."""
    shop.execute("drop extension pg_cron")
    try:
        shop.execute(
            "create extension pg_cron version '1.2'; grant usage on schema cron to shop"
        )
        with pytest.raises(
            psycopg.errors.FeatureNotSupported, match=r"pg_cron 1\.2 is too old"
        ):
            value(shop, "start_ticker")
        stopped = value(shop, "stop_ticker")
        shop.execute("update rota.maintenance set done_at = '-infinity'")
        ticked = one(shop, "tick")
        psql(owner, "-f", sql_dir / "uninstall.sql")
    finally:
        shop.execute("alter extension pg_cron update")

    assert stopped is False
    assert None not in ticked[:-1]


def test_where_pg_cron_is_plpgsql_check_finds_nothing(shop: Db) -> None:
    bindir, _ = find_binaries(os.environ.get("ROTA_PG_BINDIR"))
    if not has_library(bindir, "plpgsql_check"):
        pytest.skip("the server has no plpgsql_check")
    shop.execute("create extension plpgsql_check")

    assert shop.execute(CHECK, (True, "rota")).fetchall() == []


@pytest.mark.parametrize("first", ["start_ticker", "stop_ticker"])
def test_stop_ticker_waits_for_another_who_starts_or_stops(cron_server, shop, first):
    """A calls the first and stays open; B stops; A commits."""
    scalar(shop, "select rota.start_ticker()")
    others = (psycopg.connect(cron_server.url("shop"), autocommit=True) for _ in "ab")
    a, b = (Session(other, shop) for other in others)

    try:
        with a.transaction():
            a.fetch(f"select rota.{first}()")
            pending = b.start("select rota.stop_ticker()")
            pending.wait_blocked(by=a)
        answer = pending.result()
    finally:
        a.close()
        b.close()

    assert answer == [(first == "start_ticker",)]


def told_of_the_ticker(db: Db) -> str:
    return next(row for row in call(db, "doctor") if row.finding == "ticker").evidence


def test_doctor_tells_why_pg_cron_does_not_tick(shop):
    """It may not log in without a password, or its launcher is gone; off it is by an act."""
    with shop.transaction():  # or it would tick meanwhile
        call(shop, "start_ticker")
        shop.execute("update cron.job set schedule = '0 0 1 1 *'")
    shop.execute(
        "update rota.maintenance set done_at = now() - interval '1 hour' where task = 'tick'"
    )
    log = (
        "insert into cron.job_run_details (jobid, runid, username, status, return_message,"
        " start_time) select jobid, 1000000, username, %s, %s, now() - interval '2 hours'"
        " from cron.job on conflict (runid) do update set status = excluded.status"
    )

    assert "; pg_cron is to tick, but it has logged no run. If" in told_of_the_ticker(shop)
    shop.execute(log, ("succeeded", "connection failed"))
    assert "; pg_cron is to tick, but it last began 2 h ago. If" in told_of_the_ticker(shop)
    shop.execute(log, ("failed", None))
    assert told_of_the_ticker(shop).endswith(
        "; pg_cron is to tick, but its last run failed: connection failed"
    )
    shop.execute("update cron.job set active = false")
    assert told_of_the_ticker(shop).endswith(
        "or let pg_cron tick with select rota.start_ticker()"
    )


@pytest.fixture
def moved(cron_server: EmbeddedPostgres) -> Iterator[Server]:
    """A server whose pg_cron serves another database than that where its extension is."""
    home = Path(tempfile.mkdtemp())
    home.chmod(0o755)
    settings = ["shared_preload_libraries=pg_cron", "cron.database_name=jobs"]
    server = Server.create(home, settings)
    try:
        with psycopg.connect(server.url(), autocommit=True) as db:
            db.execute("create extension pg_cron")
        yield server
    finally:
        server.destroy()


@pytest.mark.parametrize("other", ["postgres", "gone"])
def test_start_ticker_says_that_pg_cron_has_been_left_behind(moved, other):
    """As after the database was renamed; pg_cron reads the entries of its own."""
    moved.execute(f"alter system set cron.database_name = '{other}'")
    moved.stop()
    moved.start()

    with psycopg.connect(moved.url(), autocommit=True) as db:
        message, hint = problem(db)
        entries = rows(db, ENTRIES)

    assert message == "pg_cron serves another database than jobs, where its extension is"
    assert "set cron.database_name = 'jobs', and restart the server" in hint
    assert entries == []
