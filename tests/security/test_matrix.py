"""Each role against each function and relation: what rights.py says, and nothing else.

Functions are really called and relations really read, as the role.  Who may must not be stopped
by a right that is missing inside; who may not must be told 42501 before anything else happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from security.good_calls import CALLS, UNAVAILABLE, as_role, attempt
from security.rights import CALLERS, OBSERVED, READERS, ROLES
from sql.helpers import rows

Db = psycopg.Connection[Any]

PRIVILEGES = ("select", "insert", "update", "delete", "truncate", "references", "trigger")
BY_COLUMN = ("select", "insert", "update", "references")
ON_SEQUENCES = ("select", "usage", "update")


@pytest.fixture(scope="module")
def sessions(gate: str) -> Iterator[dict[str, Db]]:
    """A session of each role."""
    opened = {role: psycopg.connect(gate, autocommit=True) for role in ROLES}
    yield {role: as_role(db, f"gate_{role}") for role, db in opened.items()}
    for db in opened.values():
        db.close()


def relations(db: Db, kinds: str) -> set[str]:
    found = rows(
        db,
        "select relname::text from pg_class where relnamespace = 'rota'::regnamespace"
        " and relkind = any(%s) and relname !~ '_(done|errors)_([0-9]{8}|default)$'",
        list(kinds),
    )
    return {name for (name,) in found}


@pytest.mark.slow
@pytest.mark.plain_session
def test_the_table_names_all_that_there_is(db: Db) -> None:
    functions = rows(
        db,
        "select proname::text from pg_proc"
        " where pronamespace = 'rota'::regnamespace and proname not like '\\_%'",
    )

    assert {name for (name,) in functions} == CALLERS.keys() == CALLS.keys()
    assert relations(db, "rpvmfS") == READERS.keys()
    assert len(ROLES) * (len(CALLERS) + len(READERS)) >= 300


@pytest.mark.slow
@pytest.mark.plain_session
def test_what_observers_alone_may_call_only_reads(db: Db) -> None:
    found = rows(
        db,
        "select proname::text from pg_proc where pronamespace = 'rota'::regnamespace"
        " and proname = any(%s) and provolatile = 'v'",
        list(OBSERVED),
    )

    assert len(OBSERVED) >= 8
    assert found == []


@pytest.mark.parametrize("role", ROLES)
def test_call(sessions: dict[str, Db], scene: dict[str, Any], role: str) -> None:
    answers = {name: attempt(sessions[role], call, scene) for name, call in CALLS.items()}

    assert answers == {
        name: UNAVAILABLE.get(name) if role in callers else "42501"
        for name, callers in CALLERS.items()
    }


@pytest.mark.parametrize("role", ROLES)
def test_relation(sessions: dict[str, Db], role: str) -> None:
    db = sessions[role]
    sequences = relations(db, "S")
    held = {
        name: {
            privilege
            for privilege in (ON_SEQUENCES if name in sequences else PRIVILEGES)
            if holds(db, f"gate_{role}", name, privilege, name in sequences)
        }
        for name in READERS
    }
    answers = {name: attempt(db, f"select * from rota.{name}", {}) for name in READERS}

    read = {name for name, readers in READERS.items() if role in readers}
    assert held == {name: {"select"} if name in read else set() for name in READERS}
    assert answers == {name: None if name in read else "42501" for name in READERS}


def holds(db: Db, role: str, name: str, privilege: str, is_sequence: bool) -> bool:
    oid = "(select oid from pg_class where relname = %s and relnamespace = %s)"
    where = (name, rows(db, "select oid from pg_namespace where nspname = 'rota'")[0][0])
    kind = "sequence" if is_sequence else "table"
    ((held,),) = rows(
        db, f"select has_{kind}_privilege(%s, {oid}, %s)", role, *where, privilege
    )
    if not is_sequence and privilege in BY_COLUMN:
        query = f"select has_any_column_privilege(%s, {oid}, %s)"
        held |= rows(db, query, role, *where, privilege)[0][0]
    return bool(held)


WRITES = {
    "insert": "insert into rota.{} default values",
    "update": "update rota.{} set {} = default",
    "delete": "delete from rota.{}",
    "truncate": "truncate rota.{}",
    "lock": "lock table rota.{} in access exclusive mode",
    "drop": "drop table rota.{}",
    "alter": "alter table rota.{} disable trigger all",
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("write", WRITES)
def test_writes_of_tables_are_refused(
    sessions: dict[str, Db], db: Db, role: str, write: str
) -> None:
    first_columns = rows(
        db,
        "select relname::text, attname::text from pg_class"
        " join pg_attribute on attrelid = pg_class.oid and attnum = 1"
        " where relkind in ('r', 'p') and relnamespace = 'rota'::regnamespace",
    )

    answers = {
        name: attempt(sessions[role], WRITES[write].format(name, column), {})
        for name, column in first_columns
    }

    assert len(answers) > 20
    assert answers == dict.fromkeys(answers, "42501")


@pytest.mark.parametrize("role", ROLES)
def test_private_functions_are_for_nobody(sessions: dict[str, Db], role: str) -> None:
    """Also those of triggers, and partitions of single days."""
    db = sessions[role]
    private = rows(
        db,
        "select proname::text, coalesce((select string_agg('null', ', ')"
        " from unnest(proargtypes) as t), '') as nulls from pg_proc"
        " where pronamespace = (select oid from pg_namespace where nspname = 'rota')"
        " and left(proname, 1) = '_'",
    )

    answers = {name: attempt(db, f"select rota.{name}({nulls})", {}) for name, nulls in private}

    assert len(answers) > 150
    assert answers == dict.fromkeys(answers, "42501")


@pytest.mark.parametrize("role", ROLES)
def test_days_of_the_history_are_for_nobody(sessions: dict[str, Db], db: Db, role: str) -> None:
    days = rows(
        db,
        "select relname::text from pg_class where relname ~ '^(finished_jobs_done|job_errors)_'"
        " and relkind in ('r', 'p') and relnamespace = 'rota'::regnamespace",
    )

    answers = {
        name: attempt(sessions[role], f"select from rota.{name}", {}) for (name,) in days
    }

    assert len(answers) >= 8 + 3
    assert set(answers.values()) == {"42501"}


@pytest.mark.parametrize("role", ROLES)
def test_nobody_may_create_in_the_schema(sessions: dict[str, Db], role: str) -> None:
    assert attempt(sessions[role], "create table rota.mine (id integer)", {}) == "42501"
    assert attempt(sessions[role], "create view rota.mine as select 1", {}) == "42501"
    usage = "select has_schema_privilege(current_user, nspname, 'usage')"
    ((can_look,),) = rows(sessions[role], f"{usage} from pg_namespace where nspname = 'rota'")
    assert can_look == (role != "nobody")
