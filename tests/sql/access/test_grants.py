"""How the grants are made; security/ measures what they let each role do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg import sql

from security.rights import FUNCTIONS, READABLE
from sql.helpers import Db, call, claim, enqueue, grant, owner, refused, rows, scalar, value

_numbers = count(1)


@pytest.fixture(scope="module")
def with_roles(server: Any, admin: Db, psql: Any, sql_dir: Any, template: str) -> Iterator[str]:
    """The DSN of a database whose superuser has installed the roles too.

    The template is there before: it would have grants to the roles.
    """
    admin.execute("create database with_grants template template0")
    psql(server.url("with_grants"), "-v", "with_roles=1", "-f", sql_dir / "install.sql")
    yield server.url("with_grants")
    admin.execute("drop database with_grants with (force)")
    # The server is that of the tests behind these, too.
    admin.execute("drop role rota_producer, rota_worker, rota_observer, rota_operator")


@pytest.fixture
def roled(with_roles: str) -> Iterator[Db]:
    """A connection of the superuser to that database."""
    with psycopg.connect(with_roles, autocommit=True) as connection:
        yield connection


@pytest.fixture
def somebody(admin: Db) -> Callable[[], str]:
    """Make new roles without any right; return their names.  They end with the server."""

    def make() -> str:
        name = f"Some Body{next(_numbers)}"
        admin.execute(sql.SQL("create role {}").format(sql.Identifier(name)))
        return name

    return make


def allowed(db: Db, role: str) -> tuple[set[str], set[str], set[str]]:
    """Return the functions, the readable and the writable relations of a role."""
    functions = rows(
        db,
        "select proname::text from pg_proc where pronamespace = 'rota'::regnamespace"
        " and has_function_privilege(%s::name, oid, 'execute')",
        role,
    )
    readable, writable = (
        rows(
            db,
            "select relname::text from pg_class where relnamespace = 'rota'::regnamespace"
            " and case relkind when 'S' then has_sequence_privilege(%s::name, oid, 'usage')"
            " when 'i' then false when 'I' then false"
            " else has_table_privilege(%s::name, oid, %s)"
            "  or has_any_column_privilege(%s::name, oid, %s) end",
            role,
            role,
            table,
            role,
            column,
        )
        for table, column in [
            ("select", "select"),
            ("insert, update, delete, truncate, references, trigger", "insert, update"),
        ]
    )
    return tuple({name for (name,) in found} for found in (functions, readable, writable))


@pytest.mark.parametrize("access", ["producer", "worker", "operator", "observer"])
def test_grants_give_each_role_its_functions_and_views(roled, access):
    functions, readable, writable = allowed(roled, f"rota_{access}")

    assert functions == FUNCTIONS[access]
    assert readable == READABLE[access]
    assert writable == set()
    assert not scalar(
        roled, "select has_schema_privilege(%s, 'rota', 'create')", f"rota_{access}"
    )


def test_grants_give_public_nothing(db, roled, somebody):
    nobody = somebody()
    for connection in (db, roled):
        assert allowed(connection, nobody) == (set(), set(), set())
        assert not scalar(
            connection, "select has_schema_privilege(%s::name, 'rota', 'usage')", nobody
        )
        public = rows(
            connection,
            "select proname from pg_proc,"
            " aclexplode(coalesce(proacl, acldefault('f', proowner)))"
            " where pronamespace = 'rota'::regnamespace and grantee = 0"
            " union all select relname from pg_class, aclexplode(relacl)"
            " where relnamespace = 'rota'::regnamespace and grantee = 0",
        )
        assert public == []


def as_role(connect: Callable[..., Db], role: str) -> Db:
    connection = connect()
    connection.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    return connection


@pytest.mark.parametrize("access", ["producer", "worker", "operator", "observer"])
def test_grant_statements_make_any_role_the_same(db, somebody, access):
    role = somebody()

    grant(db, access, role)

    functions, readable, writable = allowed(db, role)
    assert functions == FUNCTIONS[access]
    assert readable == READABLE[access]
    assert writable == set()


@pytest.mark.slow
@pytest.mark.own_session
def test_grant_statements_are_enough_to_work(db, connect, somebody):
    roles = {access: somebody() for access in ("producer", "worker", "operator", "observer")}
    for access, role in roles.items():
        grant(db, access, role)
    sessions = {access: as_role(connect, role) for access, role in roles.items()}

    job_id = enqueue(sessions["producer"], idempotency_key="k")
    (job,) = claim(sessions["worker"])
    assert call(sessions["worker"], "tick")
    assert value(sessions["worker"], "finish_job", **owner(job)) == "finished"
    assert value(sessions["operator"], "retry_job", job_id=job_id) == "queued"
    for view in READABLE["observer"]:
        for access in ("operator", "observer"):
            sessions[access].execute(f"select * from rota.{view}")
    assert scalar(sessions["observer"], "select ready from rota.queue_stats") == 1


def test_grant_statements_refuses_every_bad_argument_by_name(db):
    for bad in (None, "", "admin", "Producer", "producer;"):
        with refused("access"):
            call(db, "grant_statements", access=bad, role="postgres")
    for bad in (None, "", "nobody here", "public", "postgres; drop"):
        with refused("role"):
            call(db, "grant_statements", access="producer", role=bad)


@pytest.mark.slow
def test_grants_are_made_anew_by_each_install(roled, psql, sql_dir, with_roles):
    roled.execute("grant select on rota.jobs to rota_worker")
    roled.execute("grant execute on function rota.retry_job to rota_producer")
    roled.execute("grant execute on function rota.retry_job to public")

    psql(with_roles, "-f", sql_dir / "install.sql")

    for access in ("producer", "worker"):
        functions, readable, _ = allowed(roled, f"rota_{access}")
        assert (functions, readable) == (FUNCTIONS[access], set())
