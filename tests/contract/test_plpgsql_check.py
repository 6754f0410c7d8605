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
        compatibility_warnings => true
    ) as c
    where p.pronamespace = %s::regnamespace
    order by 1, 2
"""


def test_no_function_has_a_finding(checker: psycopg.Connection[Any]) -> None:
    findings = checker.execute(CHECK, ("rota",)).fetchall()

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
    )

    levels = {finding[2] for finding in checker.execute(CHECK, ("bad",)).fetchall()}

    assert levels == {"error", "warning"}
