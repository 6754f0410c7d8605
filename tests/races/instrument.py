"""Make the functions of one test database stop between their statements.

For its client a call of rota is one statement, but inside it are many, and what another
session does between two of them is what races are made of.  `instrument` rewrites the bodies
of the functions in one database, so that before each statement that reads a table they call

    assert race.pause('function: first line of the statement');

which does nothing unless the session was armed by `ARM`.  Then the pause with that number
waits until whoever holds the advisory lock GATE lets go of it.  An `assert`, because unlike
`perform` it leaves `found` as it was.

The other statements see and change nothing that sessions share: to stop before one of them is
to stop before the next that does, or before the commit.  Nor is there a stop in a function that
is stable: all of it sees what the statement sees that called it, and the stop is before that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import cache
from typing import Any

import psycopg

from races.harness import Pending, Session
from support.mutation import FUNCTIONS

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
    set lock_timeout = 0 -- of the function that waits here, which is for other locks
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

TABLES = """
select relname from pg_class
where relnamespace = 'rota'::regnamespace and relkind in ('r', 'p', 'v')
"""

TOKEN = re.compile(
    r"(?P<hidden>\s+|--[^\n]*|/\*.*?\*/)|'(?:[^']|'')*'|\"[^\"]*\"|\w+|.", re.DOTALL
)
# Words that may stand where a statement may, and begin none that could be stopped before.
NO_STATEMENT = {"begin", "else", "elsif", "end", "exception", "loop", "when"}


@contextmanager
def stopped(
    db: psycopg.Connection[Any],
    session: Session,
    query: Any,
    arguments: Any = (),
    *,
    at: int = 1,
) -> Iterator[Pending]:
    """Start a call that stops at the pause with this number, and ends when the block has."""
    db.execute("select pg_advisory_lock(%s)", [GATE])
    session.fetch(ARM, [at])
    pending = session.start(query, arguments)
    pending.wait_blocked()
    try:
        yield pending
    finally:
        db.execute("select pg_advisory_unlock(%s)", [GATE])
    pending.result()


def find_statements(body: str) -> list[list[tuple[int, int]]]:
    """Return where the statements of a PL/pgSQL body begin and end, as positions in the text.

    A statement begins after `begin`, `;`, `then`, `else` and `loop`; but `then` and `else` may
    also be of a `case` in an expression, and a `;` closes an `end if` too.  One that holds
    others, as an `if`, ends where the first of them begins, and has one more piece for each
    `elsif`.
    """
    found: list[list[tuple[int, int]]] = []
    open_ifs: list[list[tuple[int, int]]] = []
    has_begun = is_start = is_closing = False
    parentheses = cases = begin = 0
    first = ""
    for token in TOKEN.finditer(body):
        word = token[0].lower()
        if token["hidden"]:
            continue
        if not has_begun:
            has_begun = is_start = word == "begin"
        elif is_start:
            if word == "declare":
                raise NotImplementedError("a block with declarations of its own")
            first, begin = word, token.start()
            is_start = word in {"begin", "else", "exception", "loop"}
            is_closing = word == "end"
        elif is_closing and word == "if":
            open_ifs.pop()
        elif word in {"(", ")"}:
            parentheses += 1 if word == "(" else -1
        elif word == "case" and not is_closing:
            cases += 1
        elif word == "end" and cases:
            cases -= 1
        elif not parentheses and not cases:
            is_start = word == ";" or (word in {"then", "loop"} and not is_closing)
            if is_start and first == "elsif":
                open_ifs[-1].append((begin, token.end()))
            elif is_start and first not in NO_STATEMENT:
                found.append([(begin, token.end())])
                if first == "if":
                    open_ifs.append(found[-1])
    return found


@cache
def add_pauses(name: str, body: str, names: frozenset[str]) -> str:
    """Return the body with a pause before each statement that has one of the names."""
    pieces, done = [], 0
    for parts in find_statements(body):
        if any(has_one(names, body[begin:end]) for begin, end in parts):
            begin, end = parts[0]
            place = f"{name}: {body[begin:end].splitlines()[0]}".replace("'", "''")
            pieces += [body[done:begin], f"assert race.pause('{place}'); "]
            done = begin
    return "".join([*pieces, body[done:]])


def has_one(names: Set[str], text: str) -> bool:
    return re.search(rf"\brota\.(?:{'|'.join(names)})\b", text) is not None


@cache
def find_readers(
    tables: frozenset[str], functions: tuple[tuple[str, str, str, bool], ...]
) -> frozenset[str]:
    """Return the tables, and the functions that look at one in the snapshot of their caller.

    These are the stable ones, and what others do before they begin.
    """
    readers = tables
    bodies = {
        name: re.split(r"\bbegin\b", body, maxsplit=1)[0] if is_volatile else body
        for name, body, _, is_volatile in functions
    }
    while more := {n for n in {*bodies} - readers if has_one(readers, bodies[n])}:
        readers |= more
    return readers


def instrument(db: psycopg.Connection[Any]) -> None:
    """Rewrite the functions of this database once; *db* must be a superuser's connection."""
    if db.execute("select from pg_namespace where nspname = 'race'").fetchall():
        return
    functions = tuple(db.execute(FUNCTIONS).fetchall())
    readers = find_readers(frozenset(name for (name,) in db.execute(TABLES)), functions)
    db.execute(PAUSE)
    for name, body, definition, is_volatile in functions:
        paused = add_pauses(name, body, readers) if is_volatile else body
        if paused != body:
            db.execute(definition.replace(body, paused))
