"""Nothing that an unprivileged role puts in the way of a name is run by us or read by us.

One who may call everything has made all that our functions name without a schema once more, in
a schema that comes first on his path and among his temporary objects.  Every call ends as it
would without, and none of his objects is ever run by the owner.  With the path of the functions
taken off, the same calls run them, or the attack would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from security import shadows
from security.good_calls import CALLS, UNAVAILABLE, as_role, attempt, set_scene
from security.rights import CALLERS, READABLE, ROLES
from sql.helpers import grant, rows

pytestmark = pytest.mark.own_session

Db = psycopg.Connection[Any]

ATTACKER = "gate_attacker"
VIEWS = {f"view {name}": f"select * from rota.{name}" for name in READABLE["observer"]}


@pytest.fixture
def attacker(db: Db, connect: Any) -> Iterator[Db]:
    """One who may call everything, and has put his own things before ours."""
    if not rows(db, "select from pg_roles where rolname = %s", ATTACKER):
        db.execute(f"create role {ATTACKER}")
    for role in ROLES[:-1]:
        grant(db, role, ATTACKER)
    db.execute(
        f"create schema trap authorization {ATTACKER}; grant usage on schema trap to public"
    )
    session = as_role(connect(), ATTACKER)
    assert shadows.make(session, "trap") > 500
    yield session
    session.close()
    db.execute(f"drop owned by {ATTACKER} cascade")


def test_no_call_runs_what_is_not_ours(db: Db, attacker: Db) -> None:
    scene = set_scene(db)
    shadows.put_first(attacker, "trap")

    answers = {
        name: attempt(attacker, query, scene) for name, query in {**CALLS, **VIEWS}.items()
    }

    of_the_owner = {name: "42501" for name, may in CALLERS.items() if not may}
    expected = {**UNAVAILABLE, **of_the_owner}
    assert {name: code for name, code in answers.items() if code} == expected
    assert shadows.marks(db, "trap") == dict.fromkeys(shadows.KINDS, 0)


def test_the_attack_hits_functions_without_their_path(db: Db, attacker: Db) -> None:
    scene = set_scene(db)
    unpin(db)
    shadows.put_first(attacker, "trap")

    for query in {**CALLS, **VIEWS}.values():
        attempt(attacker, query, scene)

    missed = [kind for kind, times in shadows.marks(db, "trap").items() if times == 0]
    assert missed == []


def unpin(db: Db, name: str = "%") -> None:
    """Take the path off our functions."""
    for (signature,) in rows(
        db,
        "select oid::regprocedure::text from pg_proc where prosecdef"
        " and pronamespace = 'rota'::regnamespace and proname like %s",
        name,
    ):
        db.execute(f"alter function {signature} reset search_path")


@pytest.mark.parametrize("name", ["enqueue", "now", "claim_jobs", "tick"])
def test_the_attack_hits_one_function_without_its_path(db: Db, attacker: Db, name: str) -> None:
    scene = set_scene(db)
    unpin(db, name)
    shadows.put_first(attacker, "trap")

    attempt(attacker, CALLS[name], scene)

    assert sum(shadows.marks(db, "trap").values()) > 0


def test_casts_of_arguments_run_as_the_caller(db: Db, attacker: Db) -> None:
    """A type of the attacker's that turns into any of ours by itself."""
    scene = set_scene(db)
    attacker.execute("create type trap.thing as (number bigint)")
    for kind, value in {"bigint": "$1.number", "text": "'q'", "jsonb": "'{}'"}.items():
        attacker.execute(
            f"create function trap.{kind}_of(trap.thing) returns {kind} language sql as $$"
            f" select trap.mark('function'); select {value}::{kind} $$;"
            f"create cast (trap.thing as {kind}) with function trap.{kind}_of as implicit"
        )
    thing = "row(%(job_id)s)::trap.thing"
    shadows.put_first(attacker, "trap")

    answers = [
        attempt(attacker, query, scene)
        for query in (
            f"select rota.enqueue({thing}, {thing}, {thing})",
            f"select rota.set_priority({thing}, 3)",
            f"select rota.enqueue_many({thing})",
            f"select rota.finish_job({thing}, %(token)s, {thing})",
        )
    ]

    assert answers == [None, None, "22023", None]
    assert shadows.marks(db, "trap") == dict.fromkeys(shadows.KINDS, 0)
