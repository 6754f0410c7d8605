"""plpgsql_check reads the body of every function and finds nothing."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

pytestmark = pytest.mark.plain_session


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
        p.oid::regprocedure,
        -- That of another encoding has no table here.
        coalesce((select t.tgrelid from pg_trigger as t where t.tgfoid = p.oid limit 1),
            case when p.prorettype = 'trigger'::regtype then 'rota.jobs'::regclass else 0 end)
            ::regclass,
        fatal_errors => false, extra_warnings => true, security_warnings => true,
        performance_warnings => true, other_warnings => true,
        compatibility_warnings => true, use_incomment_options => %s
    ) as c
    where p.pronamespace = %s::regnamespace
    order by 1, 2
"""

# As a database has them that came from one before 8.3, or whose drivers send texts.
LEGACY_CASTS = [
    *((kind, "text") for kind in ("smallint", "integer", "bigint", "numeric", "float8")),
    *((kind, "text") for kind in ("oid", "interval", "timestamptz", "jsonb")),
    *(("text", kind) for kind in ("integer", "bigint", "interval", "timestamptz", "jsonb")),
]


@pytest.fixture
def legacy(request: pytest.FixtureRequest, db: psycopg.Connection[Any]) -> None:
    """Casts that are done without a word, if the test wants them."""
    for source, target in LEGACY_CASTS if request.param else []:
        db.execute(f"create cast ({source} as {target}) with inout as implicit")


with_and_without_legacy_casts = pytest.mark.parametrize(
    "legacy", [False, True], ids=["plain", "legacy casts"], indirect=True
)


# It does not see that these lock rows or make and drop tables, and would have them be stable.
# With that the server refuses what they do.  A comment in each tells it to overlook that.
_OVERLOOKED = {
    "_create_partition": "'finished_jobs_done', 'finished_at', '2001-01-01', 1",
    "_lock_beginning": "'q', '{1}'",
    "_lock_held": "'key x', 'q', 'x', 0::smallint, '-infinity', 1",
    "_lock_late": "'expiry', 1",
    "_lock_merged": "'{default}', array[now()], 0, '-infinity', 0, 1, null, now(), '{}'",
}


@pytest.mark.parametrize("name", _OVERLOOKED)
def test_what_it_is_told_to_overlook_cannot_be_stable(
    checker: psycopg.Connection[Any], name: str
) -> None:
    checker.execute(f"select rota.{name}({_OVERLOOKED[name]})")
    checker.execute("drop table if exists rota.finished_jobs_done_20010101")
    checker.execute(f"alter function rota.{name} stable")

    with pytest.raises(psycopg.errors.FeatureNotSupported, match="non-volatile function"):
        checker.execute(f"select rota.{name}({_OVERLOOKED[name]})")


def test_maintenance_that_it_is_told_to_overlook_cannot_be_stable(
    checker: psycopg.Connection[Any],
) -> None:
    checker.execute(
        "select rota._create_partition('finished_jobs_done', 'finished_at', '2001-01-01', 1)"
    )
    checker.execute("update rota.stats_progress set complete_until = 'infinity'")
    checker.execute("alter function rota._drop_partitions stable")
    kept = checker.execute("select rota._drop_partitions()").fetchone()
    checker.execute("alter function rota._drop_partitions volatile")
    dropped = checker.execute("select rota._drop_partitions()").fetchone()

    assert (kept, dropped) == ((0,), (1,))


def test_a_delete_that_it_is_told_to_overlook_cannot_be_stable(
    checker: psycopg.Connection[Any],
) -> None:
    checker.execute("insert into rota.maintenance (task, done_at) values ('a', now())")
    delete = "'x', 'delete from rota.maintenance where task = any($1)', '{a}'"
    deleted = []
    for volatility in ("stable", "volatile"):
        checker.execute(f"alter function rota._delete_rows {volatility}")
        deleted += checker.execute(f"select rota._delete_rows({delete})").fetchall()

    assert deleted == [(0,), (1,)]


@pytest.mark.slow
def test_nothing_else_is_overlooked(checker: psycopg.Connection[Any]) -> None:
    findings = checker.execute(CHECK, (False, "rota")).fetchall()

    notices = [
        (signature.split(".")[1].split("(")[0], message)
        for signature, _, level, message, _ in findings
        if level == "performance"
    ]
    message = "routine is marked as VOLATILE, should be STABLE"
    overlooked = [*_OVERLOOKED, "_delete_rows", "_drop_partitions"]
    assert notices == [(name, message) for name in sorted(overlooked)]


@with_and_without_legacy_casts
@pytest.mark.usefixtures("legacy")
def test_functions_that_it_does_not_read_are_one_statement_each(
    db: psycopg.Connection[Any],
) -> None:
    # The install takes their bodies unread, since they may name functions of later parts.
    db.execute("set check_function_bodies = on")
    others = db.execute(
        "select pg_get_functiondef(p.oid), p.prosrc from pg_proc as p"
        " join pg_language as l on l.oid = p.prolang"
        " where pronamespace = 'rota'::regnamespace and lanname <> 'plpgsql'"
    ).fetchall()

    assert others
    for definition, body in others:
        db.execute(definition)
        assert body.strip().count(";\n") == 0
        assert body.lstrip("( \n").startswith(("select ", "with "))


@pytest.mark.slow
@with_and_without_legacy_casts
@pytest.mark.usefixtures("legacy")
def test_no_function_has_a_finding(checker: psycopg.Connection[Any]) -> None:
    findings = checker.execute(CHECK, (True, "rota")).fetchall()

    # pg_cron is not in this database; the test of that name asks where it is.
    elsewhere = [
        "rota._cron_trouble()",
        "rota._purge_cron_runs(integer)",
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

    levels = {finding[2] for finding in checker.execute(CHECK, (True, "bad")).fetchall()}

    assert levels == {"error", "warning", "security", "performance"}
