"""Functions of a test's database without one of their guards, to see whether anybody notices.

A mutation is a function, a piece of its body, and what stands there instead.  The piece must be
there once, so a list that has fallen behind the product says so.  How the lines are broken does
not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, LiteralString

import psycopg
import pytest

Mutation = tuple[str, str, str]
FUNCTIONS = """
select p.proname, p.prosrc, pg_get_functiondef(p.oid), p.provolatile = 'v'
from pg_proc as p
join pg_language as l on l.oid = p.prolang and l.lanname = 'plpgsql'
where p.pronamespace = 'rota'::regnamespace and p.prokind = 'f'
order by p.proname
"""
# The name of a function before that of its argument may be left out where that is plain.
TOKEN = re.compile(r"(?!rota\.)\w{4,}\.(?=\w)|\w+|\s+|.")
WORD = re.compile(r"\w$|^\w")


def mutate(db: psycopg.Connection[Any], function: str, old: str, new: str) -> None:
    """Replace a piece of a function in this database, to see whether the tests notice."""
    bodies = {name: (body, source) for name, body, source, _ in db.execute(FUNCTIONS)}
    body, source = bodies[function]
    found = [*re.finditer(in_sql(old), body)]
    if len(found) != 1:
        raise ValueError(f"{function} has {len(found)} times {old!r}")
    start, end = found[0].span()
    db.execute(source.replace(body, body[:start] + new.strip() + body[end:]))


def is_noticed(
    db: psycopg.Connection[Any],
    mutations: Iterable[Mutation],
    look: Callable[[int], bool],
    tries: int,
    forget: LiteralString = "select",
) -> bool:
    """Make the mutations; return whether *look* notices by one of so many seeds.

    On a busy machine the moment that shows it may not come with the first.  Between two of them
    the database has to *forget*.
    """
    for mutation in mutations:
        mutate(db, *mutation)
    for seed in range(1, tries + 1):
        if look(seed):
            return True
        db.execute(forget)
    return False


def some_of(names: Iterable[str], every: int = 12) -> list[Any]:
    """Return them as parameters: one in *every* for `make test`, all for `make prove`."""
    return [
        name if n % every == 0 else pytest.param(name, marks=pytest.mark.long)
        for n, name in enumerate(names)
    ]


def in_sql(text: str) -> str:
    """Return the pattern of a piece of SQL, however its lines are broken."""
    pattern, before = "", ""
    for token in TOKEN.findall(text.strip()):
        if token.isspace():
            before += " "
            continue
        if before.endswith(" "):
            pattern += r"\s+" if WORD.search(before.strip()) and WORD.match(token) else r"\s*"
        elif token in ")]" or before in ("(", "["):
            pattern += r"\s*"
        is_left_out = token.endswith(".") and token != "."
        pattern += f"(?:{re.escape(token)})?" if is_left_out else re.escape(token)
        before = token
    return pattern
