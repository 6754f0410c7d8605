"""Who may do what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg import sql

from sql.helpers import Db, call, claim, enqueue, owner, raises, refused, rows, scalar, value

ANYBODY = {"version", "now", "next_run", "upcoming_runs", "describe_schedule"}
FUNCTIONS = {
    "producer": {"enqueue", "enqueue_many", "start_pipeline", *ANYBODY},
    "worker": {
        "claim_jobs",
        "finish_job",
        "finish_and_claim",
        "finish_jobs",
        "fail_job",
        "snooze_job",
        "release_jobs",
        "heartbeat",
        "heartbeat_jobs",
        "set_progress",
        "record_effect",
        "complete_effect",
        "withdraw_effect",
        "effect_result",
        "report_worker",
        "ring_others",
        "stop_waiting",
        "wait_for_jobs",
        "forget_worker",
        "sweep_stale_leases",
        "tick",
        "tick_loop",
        *ANYBODY,
    },
    "observer": ANYBODY,
    "operator": {
        *ANYBODY,
        "retry_job",
        "cancel_job",
        "set_priority",
        "reschedule_job",
        "pause_queue",
        "resume_queue",
        "set_queue",
        "set_limit",
        "resume_key",
        "define_pipeline",
        "drop_pipeline",
        "rerun_from",
        "schedule_job",
        "unschedule_job",
        "enable_schedule",
        "disable_schedule",
        "run_schedule_now",
        "tick",
        "tick_loop",
        "start_ticker",
        "stop_ticker",
        "sweep_stale_leases",
        "grant_statements",
    },
    "nobody": set(),
}
READABLE = {
    "job_runs",
    "queue_stats",
    "running_jobs",
    "stale_jobs",
    "dead_jobs",
    "error_groups",
    "hourly_stats",
    "workers",
    "queues",
    "job_errors",
    "effects",
    "dependencies",
    "stuck_keys",
    "pipeline_stages",
    "limits",
    "limit_stats",
    "ticker_health",
    "job_definitions",
    "fires",
}

_numbers = count(1)


@pytest.fixture(scope="module")
def with_roles(server: Any, admin: Db, psql: Any, sql_dir: Any) -> Iterator[str]:
    """The DSN of a database whose superuser has installed the roles too."""
    admin.execute("create database with_grants template template0")
    psql(server.url("with_grants"), "-v", "with_roles=1", "-f", sql_dir / "install.sql")
    yield server.url("with_grants")
    admin.execute("drop database with_grants with (force)")


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
    assert readable == (READABLE if access in ("operator", "observer") else set())
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


def answer(db: Db, query: str) -> str | None:
    """Return the SQLSTATE of a query, None if it works; what it did is undone."""
    with db.transaction(force_rollback=True):
        try:
            db.execute(query)
        except psycopg.Error as error:
            return error.sqlstate
    return None


@pytest.mark.parametrize("access", FUNCTIONS)
def test_grants_are_what_a_call_meets(roled, access, somebody):
    role = f"rota_{access}" if access != "nobody" else somebody()
    signatures = rows(
        roled,
        "select proname::text as name,"
        " case prokind when 'p' then 'call' else 'select * from' end as call,"
        " coalesce((select string_agg('null::' ||"
        " format_type(t, null), ', ') from unnest(proargtypes) as t), '') as nulls"
        " from pg_proc where pronamespace = 'rota'::regnamespace"
        " and prorettype <> 'trigger'::regtype",
    )
    roled.execute(sql.SQL("set role {}").format(sql.Identifier(role)))

    refusals = {
        name
        for name, call, nulls in signatures
        if answer(roled, f"{call} rota.{name}({nulls})") == "42501"
    }
    unreadable = {
        name
        for name in [*READABLE, "jobs", "finished_jobs", "upkeep", "upgrade_log"]
        if answer(roled, f"select * from rota.{name}") == "42501"
    }
    unwritable = [
        answer(roled, f"delete from rota.{name}") for name in ("jobs", "queues", "job_errors")
    ]

    assert refusals == {name for name, _, _ in signatures} - FUNCTIONS[access]
    tables = {"jobs", "finished_jobs", "upkeep", "upgrade_log"}
    assert unreadable == tables | (
        READABLE if access not in ("operator", "observer") else set()
    )
    assert unwritable == ["42501"] * 3


def as_role(connect: Callable[..., Db], role: str) -> Db:
    connection = connect()
    connection.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    return connection


def grant(db: Db, access: str, role: str) -> None:
    for (statement,) in call(db, "grant_statements", access=access, role=role):
        db.execute(statement)


@pytest.mark.parametrize("access", ["producer", "worker", "operator", "observer"])
def test_grant_statements_make_any_role_the_same(db, somebody, access):
    role = somebody()

    grant(db, access, role)

    functions, readable, writable = allowed(db, role)
    assert functions == FUNCTIONS[access]
    assert readable == (READABLE if access in ("operator", "observer") else set())
    assert writable == set()


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
    for view in READABLE:
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


def test_grants_are_made_anew_by_each_install(roled, psql, sql_dir, with_roles):
    roled.execute("grant select on rota.jobs to rota_worker")
    roled.execute("grant execute on function rota.retry_job to rota_producer")
    roled.execute("grant execute on function rota.retry_job to public")

    psql(with_roles, "-f", sql_dir / "install.sql")

    for access in ("producer", "worker"):
        functions, readable, _ = allowed(roled, f"rota_{access}")
        assert (functions, readable) == (FUNCTIONS[access], set())


def hostile(db: Db) -> list[str]:
    """Return statements that hide what our functions use behind objects of the same name.

    Relations are temporary; functions and operators are never looked for among temporary ones.
    """
    relations = [
        name
        for (name,) in rows(
            db,
            "select distinct relname::text from pg_class"
            " where relnamespace = 'rota'::regnamespace and relkind in ('r', 'p', 'v')"
            " union select unnest('{pg_class,pg_inherits,pg_proc}'::text[])",
        )
    ]
    functions = [
        name
        for (name,) in rows(
            db,
            "select distinct oid::regprocedure::text from pg_proc where proname in ('now',"
            " 'clock_timestamp', 'random', 'left', 'format', 'nextval', 'cardinality',"
            " 'array_position', 'coalesce', 'make_interval', 'pg_column_size', 'jsonb_typeof',"
            " 'char_length', 'isfinite', 'current_setting', 'octet_length', 'power',"
            " 'jsonb_array_length', 'to_regclass', 'quote_ident', 'date_trunc', 'rank',"
            " 'set_config', 'pg_sleep', 'extract', 'floor', 'statement_timestamp')"
            " and pronamespace = 'pg_catalog'::regnamespace and prokind = 'f'"
            " and not 2276 = any(proargtypes) and not provariadic > 0",
        )
    ]
    made = [
        "create function trap.stolen() returns integer language plpgsql as"
        " $$ begin raise exception 'hijacked by %', current_user; end; $$"
    ]
    for n, name in enumerate(relations):
        made.append(
            f"create temp table {name} (id int)"
            if n % 2
            else f"create temp view {name} as select trap.stolen() as id"
        )
    for signature in functions:
        returns = scalar(db, "select pg_get_function_result(%s::regprocedure)", signature)
        made.append(
            f"create function trap.{signature} returns {returns} language plpgsql as"
            " $$ begin raise exception 'hijacked by %', current_user; end; $$"
        )
    for operator, left, right in [
        ("=", "text", "text"),
        ("=", "bigint", "bigint"),
        ("<=", "timestamptz", "timestamptz"),
        ("+", "timestamptz", "interval"),
        ("~", "text", "text"),
        ("<", "numeric", "numeric"),
        ("-", "numeric", "numeric"),
        ("<", "timestamptz", "timestamptz"),
        ("||", "text", "text"),
    ]:
        kind = {"+": "timestamptz", "-": "numeric", "||": "text"}.get(operator, "boolean")
        name = f"op_{len(made)}"
        made.append(
            f"create function trap.{name}({left}, {right}) returns {kind} language plpgsql as"
            " $$ begin raise exception 'hijacked by %', current_user; end; $$"
        )
        made.append(
            f"create operator trap.{operator}"
            f" (function = trap.{name}, leftarg = {left}, rightarg = {right})"
        )
    return made


def test_grants_cannot_be_widened_by_a_search_path(db, connect, somebody):
    """Everything works as ever for one whose own objects bear all the names we use."""
    role = somebody()
    for access in ("producer", "worker", "operator", "observer"):
        grant(db, access, role)
    statements = hostile(db)
    db.execute(sql.SQL("create schema trap authorization {}").format(sql.Identifier(role)))
    attacker = as_role(connect, role)
    attacker.execute("grant usage on schema trap to public")
    for statement in statements:
        attacker.execute(statement)
    attacker.execute("set search_path = trap, pg_temp, pg_catalog")
    with raises("P0001"):
        attacker.execute("select now()")

    job_id = enqueue(attacker, idempotency_key="k", delay="0")
    jobs = psycopg.types.json.Jsonb([{"job_type": "x", "idempotency_key": "k", "delay": 1}])
    assert call(attacker, "enqueue_many", jobs=jobs)[0].job_id == job_id
    (job,) = claim(attacker, queues=["default", "other"])
    call(attacker, "report_worker", worker="w", host="h", pid=1, version="1", queues=["q"])
    call(attacker, "heartbeat", **owner(job))
    call(attacker, "heartbeat_jobs", job_ids=[job.job_id], lease_tokens=[job.lease_token])
    call(attacker, "set_progress", **owner(job), percent=5)
    assert value(attacker, "fail_job", **owner(job), error="e") == "failed"
    assert value(attacker, "retry_job", job_id=job_id) == "queued"
    (job,) = claim(attacker)
    call(attacker, "snooze_job", **owner(job), delay="0")
    (job,) = claim(attacker)
    call(attacker, "release_jobs", job_ids=[job.job_id], lease_tokens=[job.lease_token])
    call(attacker, "set_priority", job_id=job_id, priority=1)
    call(attacker, "reschedule_job", job_id=job_id, delay="0")
    call(attacker, "set_queue", queue="default", backoff={"kind": "fixed"})
    call(attacker, "pause_queue", queue="default")
    call(attacker, "resume_queue", queue="default")
    (job,) = claim(attacker)
    call(attacker, "finish_jobs", job_ids=[job.job_id], lease_tokens=[job.lease_token])
    assert value(attacker, "finish_job", **owner(job)) == "already_finished"
    assert value(attacker, "retry_job", job_id=job_id) == "queued"
    assert value(attacker, "cancel_job", job_id=job_id) == "cancelled"
    call(attacker, "sweep_stale_leases")
    call(attacker, "tick")
    attacker.execute("call rota.tick_loop('2 milliseconds', '1 millisecond')")
    call(attacker, "forget_worker", worker="w")
    call(attacker, "grant_statements", access="worker", role=role)
    for view in READABLE:
        attacker.execute(f"select * from rota.{view}")

    assert rows(db, "select id, status from rota.job_runs") == [(job_id, "cancelled")]
