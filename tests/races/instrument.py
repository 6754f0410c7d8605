"""Make the functions of one test database stop between their statements.

For its client a call of rota is one statement, but inside it are many, and what another
session does between two of them is what races are made of.  `instrument` rewrites the bodies
of the functions in one database, so that before each statement that names a table they call

    assert race.pause('function: first line of the statement');

which does nothing unless the session was armed by `ARM`.  Then the pause with that number
waits until whoever holds the advisory lock GATE lets go of it.  An `assert`, because unlike
`perform` it leaves `found` as it was.

The other statements see and change nothing that sessions share: to stop before one of them is
to stop before the next that does, or before the commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import psycopg
import pytest

GATE = 1
# The number of the pause to wait at, counted from 1 in the order in which the session comes
# by; 0 counts without waiting and tells each place in a notice.
ARM = "select setval('race.passed', 1, false), set_config('race.stop', %s::text, false)"
DISARM = "select set_config('race.stop', '', false)"

PAUSE = """
create schema race;
create sequence race.passed;
create function race.pause(place text)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if coalesce(current_setting('race.stop', true), '') = '' then
        return true;
    elsif current_setting('race.stop') = '0' then
        raise notice '%', place;
    elsif nextval('race.passed') = current_setting('race.stop')::bigint then
        perform pg_advisory_lock(1);
        perform pg_advisory_unlock(1);
    end if;
    return true;
end;
$$;
grant usage on schema race to public;
"""

FUNCTIONS = """
select p.proname, p.prosrc, pg_get_functiondef(p.oid)
from pg_proc as p
join pg_language as l on l.oid = p.prolang and l.lanname = 'plpgsql'
where p.pronamespace = 'rota'::regnamespace and p.prokind = 'f'
order by p.proname
"""
TABLES = """
select relname from pg_class
where relnamespace = 'rota'::regnamespace and relkind in ('r', 'p', 'v')
"""

TOKEN = re.compile(
    r"(?P<hidden>\s+|--[^\n]*|/\*.*?\*/)|'(?:[^']|'')*'|\"[^\"]*\"|\w+|.", re.DOTALL
)
# Words that may stand where a statement may, and begin none that could be stopped before.
NO_STATEMENT = {"begin", "else", "elsif", "end", "exception", "loop", "when"}


def find_statements(body: str) -> list[tuple[int, int]]:
    """Return where the statements of a PL/pgSQL body begin and end, as positions in the text.

    A statement begins after `begin`, `;`, `then`, `else` and `loop`; but `then` and `else` may
    also be of a `case` in an expression, and a `;` closes an `end if` too.  One that holds
    others, as an `if`, ends where the first of them begins.
    """
    found: list[tuple[int, int]] = []
    has_begun = is_start = is_closing = False
    parentheses = cases = begin = 0
    for token in TOKEN.finditer(body):
        word = token[0].lower()
        if token["hidden"]:
            continue
        if not has_begun:
            has_begun = is_start = word == "begin"
        elif is_start:
            if word == "declare":
                raise NotImplementedError("a block with declarations of its own")
            begin = -1 if word in NO_STATEMENT else token.start()
            is_start = word in {"begin", "else", "exception", "loop"}
            is_closing = word == "end"
        elif word in {"(", ")"}:
            parentheses += 1 if word == "(" else -1
        elif word == "case" and not is_closing:
            cases += 1
        elif word == "end" and cases:
            cases -= 1
        elif not parentheses and not cases:
            is_start = word == ";" or (word in {"then", "loop"} and not is_closing)
            if is_start and begin >= 0:
                found.append((begin, token.end()))
    return found


def add_pauses(name: str, body: str, tables: list[str]) -> str:
    """Return the body with a pause before each statement that names one of the tables."""
    touches = re.compile(rf"\brota\.(?:{'|'.join(tables)})\b")
    pieces, done = [], 0
    for begin, end in find_statements(body):
        if touches.search(body, begin, end):
            place = f"{name}: {body[begin:end].splitlines()[0]}".replace("'", "''")
            pieces += [body[done:begin], f"assert race.pause('{place}'); "]
            done = begin
    return "".join([*pieces, body[done:]])


def instrument(db: psycopg.Connection[Any]) -> None:
    """Rewrite the functions of this database once; *db* must be a superuser's connection."""
    if db.execute("select from pg_namespace where nspname = 'race'").fetchall():
        return
    tables = [row[0] for row in db.execute(TABLES).fetchall()]
    db.execute(PAUSE)
    for name, body, definition in db.execute(FUNCTIONS).fetchall():
        paused = add_pauses(name, body, tables)
        if paused != body:
            db.execute(definition.replace(body, paused))


def mutate(db: psycopg.Connection[Any], function: str, old: str, new: str) -> None:
    """Replace a piece of a function in this database, to see whether the tests notice."""
    bodies = {name: (body, source) for name, body, source in db.execute(FUNCTIONS).fetchall()}
    body, source = bodies[function]
    if body.count(old) != 1:
        raise ValueError(f"{function} has {body.count(old)} times {old!r}")
    db.execute(source.replace(body, body.replace(old, new)))


def some_of(mutants: Iterable[str]) -> list[Any]:
    """Return them as parameters: every twelfth for `make test`, the others for `make prove`."""
    return [
        name if n % 12 == 0 else pytest.param(name, marks=pytest.mark.long)
        for n, name in enumerate(mutants)
    ]
