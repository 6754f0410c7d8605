"""The plugin of pytest, as a project of its own uses it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import rota
from rota.testing.server import EmbeddedPostgres, memory
from support.waiting import wait_until

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.own_session

CONFTEST = """
import psycopg, pytest

pytest_plugins = ["rota.testing.pytest"]

@pytest.fixture(scope="session")
def rota_prepare():
    def prepare(url):
        global left
        left = psycopg.connect(url)  # as a pool that nobody closes
        left.execute("create table letters (id int)")
        left.commit()
    return prepare
"""
TESTS = """
import psycopg, pytest, rota
from rota.testing import assert_enqueued, assert_not_enqueued, drain, drain_async

registry = rota.Registry()

@registry.handler("write")
def write(job):
    with job.transaction() as connection:
        connection.execute("insert into letters values (1)")

@registry.handler("write_async")
async def write_async(job):
    async with job.transaction() as connection:
        await connection.execute("insert into letters values (1)")

@pytest.fixture
def anyio_backend():
    return "asyncio"

def count(connection):
    return connection.execute("select count(*) from letters").fetchone()[0]

@pytest.mark.parametrize("again", range(2))
def test_rolls_back(rota_connection, again):
    assert_not_enqueued(rota_connection, "write")
    with rota_connection.transaction():  # which would commit, were it not within another
        rota.Client(rota_connection).enqueue("write")
    assert_enqueued(rota_connection, "write")
    drain(rota_connection, registry)
    assert count(rota_connection) == 1

@pytest.mark.parametrize("again", range(2))
def test_commits(rota_url, again):
    with psycopg.connect(rota_url) as connection:
        rota.Client(connection).enqueue("write")
    rota.Worker(rota_url, registry).run(drain=True)
    with psycopg.connect(rota_url) as connection:
        assert count(connection) == 1

@pytest.mark.anyio
@pytest.mark.parametrize("again", range(2))
async def test_async_rolls_back(rota_async_connection, rota_connection, again):
    async with rota_async_connection.transaction():
        await rota.AsyncClient(rota_async_connection).enqueue("write_async")
    assert_enqueued(rota_async_connection, "write_async")
    await drain_async(rota_async_connection, registry)
    assert count(rota_connection) == 1

def test_what_a_test_does_to_its_connection_is_its_own(rota_connection):
    rota_connection.close()

def test_one_more_database(rota_databases):
    with rota_databases.copy() as one, rota_databases.copy() as two:
        assert one != two
        drain(one, registry)
"""
ASYNCIO = """
import pytest, pytest_asyncio, rota
from rota.testing import assert_enqueued, drain_async, run_job_async

registry = rota.Registry()

@registry.handler("write")
async def write(job):
    async with job.effect("mail", "k") as effect:
        effect.result = 7
    async with job.transaction() as connection:
        await connection.execute("insert into letters values (1)")

@registry.handler("plain")
def plain(job):
    job.set_progress(50)
    return job.payload

@pytest_asyncio.fixture
async def client(rota_async_connection):
    return rota.AsyncClient(rota_async_connection)

@pytest.mark.asyncio
@pytest.mark.parametrize("again", range(2))
async def test_drains_and_rolls_back(client, rota_async_connection, rota_connection, again):
    await client.enqueue("write")
    await client.enqueue("plain", {"n": 1})
    assert_enqueued(rota_async_connection, "write")
    done = await drain_async(rota_async_connection, registry)
    assert [each.status for each in done] == ["succeeded"] * 2
    assert rota_connection.execute("select count(*) from letters").fetchone() == (1,)

@pytest.mark.asyncio
async def test_runs_one(rota_async_connection):
    done = await run_job_async(registry, "plain", {"n": 1}, connection=rota_async_connection)
    assert done.result == {"n": 1}
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(rota.__file__).parents[1]))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    return pytester


@pytest.mark.slow
def test_it_starts_a_server_of_its_own(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("-q")

    result.assert_outcomes(passed=8)


@pytest.mark.slow
def test_it_goes_with_pytest_asyncio_in_its_strict_mode(
    project: pytest.Pytester, server: EmbeddedPostgres
) -> None:
    path = project.makepyfile(test_in_loop=ASYNCIO)
    modes = ("asyncio_mode=strict", "asyncio_default_fixture_loop_scope=function")
    options = [word for mode in modes for word in ("-o", mode)]

    result = project.runpytest_subprocess(
        "-q", "-W", "error", *options, f"--rota-url={server.url()}", path
    )

    result.assert_outcomes(passed=3)


@pytest.mark.slow
def test_it_works_with_xdist_on_a_server_that_is_there(
    project: pytest.Pytester, server: EmbeddedPostgres, admin: psycopg.Connection[Any]
) -> None:
    result = project.runpytest_subprocess("-q", "-n", "2", f"--rota-url={server.url()}")

    result.assert_outcomes(passed=8)
    left = admin.execute("select datname from pg_database where datname ~ 'rota_test'")
    assert left.fetchall() == []


@pytest.mark.slow
def test_it_takes_its_addresses_in_each_form(server: EmbeddedPostgres) -> None:
    from rota.testing.pytest import Databases

    for address in (
        server.url("postgres") + "?application_name=tests",
        make_conninfo(server.url("postgres"), application_name="tests"),
    ):
        databases = Databases(address, lambda url: None)
        with databases.copy() as url, psycopg.connect(url) as connection:
            row = connection.execute(
                "select rota.version(), current_setting('application_name')"
            )
            assert (row.fetchone() or ("", ""))[1] == "tests"
        databases.close()


def databases_of(admin: psycopg.Connection[Any]) -> set[str]:
    rows = admin.execute("select datname from pg_database where datname ~ '^rota_test_'")
    return {row[0] for row in rows}


@pytest.mark.slow
def test_it_leaves_no_database_when_something_fails(
    server: EmbeddedPostgres, admin: psycopg.Connection[Any]
) -> None:
    from rota.testing.pytest import Databases

    def fail(url: str) -> None:
        raise LookupError("no such migration")

    before = databases_of(admin)

    with pytest.raises(LookupError):
        Databases(server.url(), fail)
    databases = Databases(server.url(), lambda url: None)
    with pytest.raises(LookupError), databases.copy() as url:
        fail(url)
    databases.close()

    assert databases_of(admin) == before


@pytest.mark.slow
def test_it_needs_no_right_over_what_the_server_does_in_a_database() -> None:
    from rota.testing.pytest import Databases

    def prepare(url: str, table: LiteralString = "letters") -> None:
        rows = sql.SQL("create table {} as select generate_series(1, 1000000)")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(rows.format(sql.Identifier(table)))
        with psycopg.connect(server.url(), autocommit=True) as admin:
            at_work = "select from pg_stat_activity where backend_type = 'autovacuum worker'"
            where, name = " and datname = %s", conninfo_to_dict(url)["dbname"]
            wait_until(
                lambda: admin.execute(at_work + where, [name]).rowcount > 0, "autovacuum"
            )

    # So many that none is missing here while they are slow elsewhere.
    slow = ["autovacuum_max_workers=20", "autovacuum_naptime=1s"]
    settings = [*slow, "autovacuum_vacuum_cost_delay=100ms", "autovacuum_vacuum_cost_limit=1"]
    with EmbeddedPostgres(settings=settings, directory=memory()) as server:
        with psycopg.connect(server.url(), autocommit=True) as admin:
            admin.execute("create role tester login createdb password 'tester'")
            admin.execute("grant create on database test to tester")
        address = make_conninfo(server.url(), user="tester", password="tester")
        with closing(Databases(address, prepare)) as databases, databases.copy() as url:
            prepare(url, "more")
