"""plpgsql_check reads the body of every function and finds nothing."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest


@pytest.fixture
def checker(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    row = db.execute(
        "select exists (select from pg_available_extensions where name = 'plpgsql_check')"
    ).fetchone()
    if row == (False,):
        pytest.skip("the server has no plpgsql_check")
    db.execute("create extension plpgsql_check")
    return db


CHECK = """
    select p.oid::regprocedure::text, c.lineno, c.level, c.message, c.query
    from pg_proc as p
    join pg_language as l on l.oid = p.prolang and l.lanname = 'plpgsql'
    cross join lateral plpgsql_check_function_tb(
        p.oid,
        coalesce((select t.tgrelid from pg_trigger as t where t.tgfoid = p.oid limit 1), 0),
        fatal_errors => false, extra_warnings => true, security_warnings => true,
        performance_warnings => true, other_warnings => true,
        compatibility_warnings => true
    ) as c
    where p.pronamespace = %s::regnamespace
    order by 1, 2
"""


# It would have these be stable, and then they would not see what their caller has just done, or
# could lock no row.
_VOLATILE = """
    _aged_lanes _bucket_head _common_head _count_running _create_partition _drop_partitions
    _find_jobs _free_time _has_parents _is_free_key _is_leased _is_live _limits_of
    _live_definitions _lock_bucket _lock_head _lock_line _lock_merged _new_job _next_buckets
    _next_lane _outcomes _plan_fires _run_status _uncounted _within_room
"""


def test_nothing_could_be_faster_but_what_would_be_wrong(
    checker: psycopg.Connection[Any],
) -> None:
    findings = checker.execute(CHECK, ("rota",)).fetchall()

    notices = [
        (message, signature.split(".")[1].split("(")[0])
        for signature, _, level, message, _ in findings
        if level == "performance"
    ]
    assert [name for message, name in notices if "VOLATILE" in message] == _VOLATILE.split()
    assert [notice for notice in notices if "VOLATILE" not in notice[0]] == []


def test_functions_that_it_does_not_read_are_one_statement_each(
    db: psycopg.Connection[Any],
) -> None:
    others = db.execute(
        "select proname::text from pg_proc as p join pg_language as l on l.oid = p.prolang"
        " where pronamespace = 'rota'::regnamespace and lanname <> 'plpgsql' order by 1"
    ).fetchall()

    assert others == [("_access",), ("version",)]


def test_no_function_has_a_finding(checker: psycopg.Connection[Any]) -> None:
    found = checker.execute(CHECK, ("rota",)).fetchall()
    findings = [finding for finding in found if finding[2] != "performance"]

    # pg_cron is not in this database; its own tests run these statements.
    elsewhere = [
        "rota._forget_cron_runs(integer)",
        "rota.start_ticker(interval)",
        "rota.stop_ticker()",
    ]
    of_cron = [finding for finding in findings if " cron." in (finding[4] or "")]
    assert [finding for finding in findings if finding not in of_cron] == []
    assert sorted({finding[0] for finding in of_cron}) == elsewhere


def test_the_check_would_find_something(checker: psycopg.Connection[Any]) -> None:
    checker.execute("create schema bad")
    checker.execute(
        "create function bad.f() returns void language plpgsql as"
        " $$ declare unused integer; begin perform no_such_column from rota.jobs; end $$"
        ";create function bad.g(name text) returns void language plpgsql as"
        " $$ begin execute 'drop table ' || name; end $$"
    )

    levels = {finding[2] for finding in checker.execute(CHECK, ("bad",)).fetchall()}

    assert levels == {"error", "warning", "security", "performance"}
