"""Objects that hide what our functions use behind the same names, and tell who ran them.

Whatever a function body of rota names without its schema is made again in a schema of the
attacker's: each function of pg_catalog of that name, each operator, type and aggregate, and
each relation as a temporary view.  They do what the true ones do, and count who was the
current user.  The counters are sequences, because those outlive the rollback of a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from sql.helpers import rows, scalar

Db = psycopg.Connection[Any]

SQL = Path(__file__).resolve().parents[2] / "sql"
KINDS = ("relation", "function", "operator", "type", "aggregate")
_CONCRETE = ("bigint", "text")
_TYPES = [*("bigint", "integer", "smallint", "text", "boolean", "numeric", "double precision")]
_TYPES += [*("jsonb", "timestamptz", "interval", "date", "name", "oid")]
# What the grammar resolves in pg_catalog whatever the path is, and so cannot be hidden.
_GRAMMAR = {"coalesce", "nullif", "greatest", "least", "extract", "position", "row", "array"}
# Those of the tests themselves; and what a domain over would need more than its name.
_AGGREGATES = {
    "count(*)": "bigint",
    "count(bigint)": "bigint",
    "max(bigint)": "bigint",
    "min(bigint)": "bigint",
    "sum(bigint)": "bigint",
    "max(timestamptz)": "timestamptz",
    "min(timestamptz)": "timestamptz",
    "max(integer)": "integer",
    "bool_or(boolean)": "boolean",
    "bool_and(boolean)": "boolean",
}
_DOMAINS = ("text", "jsonb", "timestamptz", "int8", "int4", "name", "date", "float8")


def make(db: Db, schema: str, *, is_temporary_too: bool = True) -> int:
    """Make it all as the user of *db*, who may create in *schema*; return how much it was."""
    made = [*_counters(schema, scalar(db, "select current_user"))]
    made += [*_functions(db, schema), *_operators(db, schema)]
    made += [*_domains(schema), *_aggregates(schema)]
    if is_temporary_too:
        made += [*_views(db, schema), *_in_pg_temp(schema)]
    for statement in made:
        db.execute(statement)
    return len(made)


def put_first(db: Db, schema: str) -> None:
    """Look for everything there, then among temporary objects, and in pg_catalog last."""
    db.execute(f"set search_path = {schema}, pg_temp, pg_catalog")


def marks(db: Db, schema: str) -> dict[str, int]:
    """Return how often each kind was run by anybody but the attacker."""
    return {
        kind: scalar(
            db, f"select case when is_called then last_value else 0 end from {schema}.m_{kind}"
        )
        for kind in KINDS
    }


def _counters(schema: str, attacker: str) -> Iterator[str]:
    for kind in KINDS:
        yield f"create sequence {schema}.m_{kind}"
        yield f"grant usage, select on {schema}.m_{kind} to public"
    yield f"""
        create function {schema}.mark(kind text) returns boolean language plpgsql
            set search_path = pg_catalog, pg_temp
        as $$
        begin
            if current_user <> '{attacker}' then
                perform nextval('{schema}.m_' || mark.kind);
            end if;
            return true;
        end;
        $$"""


def _functions(db: Db, schema: str) -> Iterator[str]:
    """Functions of pg_catalog by the names that our bodies call without a schema."""
    found = rows(
        db,
        "select p.proname::text, p.proretset, p.prorettype::regtype::text,"
        " array(select t::regtype::text from unnest(p.proargtypes) as t) as types"
        " from pg_catalog.pg_proc as p where p.pronamespace = 'pg_catalog'::regnamespace"
        " and p.prokind = 'f' and p.proname::text = any(%s) and p.provariadic = 0"
        " and p.proallargtypes is null",
        sorted(_words() - _GRAMMAR),
    )
    for name, is_set, returns, types in found:
        for concrete in _CONCRETE if any("any" in t for t in types) else ("",):
            signature = [_settle(t, concrete) for t in types]
            result = _settle(returns, concrete)
            if any(_is_pseudo(t) for t in (result, *signature)):
                continue
            arguments = ", ".join(f"${n}" for n, _ in enumerate(signature, 1))
            yield f"""
                create or replace function {schema}."{name}"({", ".join(signature)})
                    returns {"setof " if is_set else ""}{result} language sql
                as $$
                    select {schema}.mark('function');
                    select pg_catalog."{name}"({arguments})
                $$"""


def _operators(db: Db, schema: str) -> Iterator[str]:
    """Binary operators of pg_catalog between the types that our tables and arguments have."""
    found = rows(
        db,
        "select distinct o.oprname::text, o.oprleft::regtype::text, o.oprright::regtype::text,"
        " o.oprresult::regtype::text from pg_catalog.pg_operator as o"
        " where o.oprnamespace = 'pg_catalog'::regnamespace"
        " and o.oprname not in ('~<=~', '~>=~', '~<~', '~>~') and o.oprleft <> 0"
        " and o.oprleft = any(%s::regtype[]) and o.oprright = any(%s::regtype[])",
        _TYPES,
        _TYPES,
    )
    arrays = [("=", f"{t}[]", f"{t}[]", "boolean") for t in _CONCRETE]
    arrays += [("||", f"{t}[]", t, f"{t}[]") for t in _CONCRETE]
    arrays += [("||", f"{t}[]", f"{t}[]", f"{t}[]") for t in _CONCRETE]
    for n, (name, left, right, returns) in enumerate([*found, *arrays]):
        yield f"""
            create function {schema}.o_{n}({left}, {right}) returns {returns} language sql
            as $$
                select {schema}.mark('operator');
                select $1 operator(pg_catalog.{name}) $2
            $$"""
        yield (
            f"create operator {schema}.{name}"
            f" (function = {schema}.o_{n}, leftarg = {left}, rightarg = {right})"
        )


def _domains(schema: str) -> Iterator[str]:
    for name in _DOMAINS:
        yield (
            f"create domain {schema}.{name} as pg_catalog.{name} check ({schema}.mark('type'))"
        )


def _aggregates(schema: str) -> Iterator[str]:
    for n, (signature, state) in enumerate(_AGGREGATES.items()):
        one = "" if "*" in signature else f", {state}"
        yield f"""
            create function {schema}.a_{n}({state}{one}) returns {state} language sql
            as $$
                select {schema}.mark('aggregate');
                select {"$2" if one else "$1 + 1"}
            $$"""
        start = "" if one else ", initcond = '0'"
        yield (
            f"create aggregate {schema}.{signature}"
            f" (sfunc = {schema}.a_{n}, stype = {state}{start})"
        )


def _views(db: Db, schema: str) -> Iterator[str]:
    """Temporary views that count their readers, and take what is written to them."""
    found = rows(
        db,
        "select c.relname::text, n.nspname::text, c.relkind::text from pg_catalog.pg_class as c"
        " join pg_catalog.pg_namespace as n on n.oid = c.relnamespace"
        " where c.relkind in ('r', 'p', 'v') and (n.nspname = 'rota'"
        "  or n.nspname = 'pg_catalog' and c.relname::text = any(%s))",
        sorted(_words(after="")),
    )
    yield f"create table {schema}.bait (id bigint)"
    yield f"insert into {schema}.bait values (0)"
    for name, nspname, _ in found:
        source, columns = f"{schema}.bait", "b.*"
        if nspname == "pg_catalog":
            source = f"pg_catalog.{name}"
            columns = ", ".join(f"b.{column}" for column in _columns(db, source))
        yield (
            f"create temp view {name} as select {columns} from {source} as b"
            f" where {schema}.mark('relation')"
        )
        yield f"grant all on {name} to public"


def _columns(db: Db, relation: str) -> list[str]:
    """The columns of a relation that a view may have."""
    query = (
        "select quote_ident(a.attname) from pg_catalog.pg_attribute as a"
        " join pg_catalog.pg_type as t on t.oid = a.atttypid"
        " where a.attrelid = %s::regclass and a.attnum > 0 and t.typtype <> 'p'"
    )
    return [name for (name,) in rows(db, query, relation)]


def _in_pg_temp(schema: str) -> Iterator[str]:
    """Functions and operators are never looked for there; if they were, we would know."""
    for name in ("now", "clock_timestamp", "version"):
        yield (
            f"create function pg_temp.{name}() returns timestamptz language sql as"
            f" $$ select {schema}.mark('function'); select pg_catalog.now() $$"
        )
    for name in ("tid", "regclass", "regprocedure"):
        yield f"create domain pg_temp.{name} as pg_catalog.{name} check ({schema}.mark('type'))"


def _words(after: str = r"\s*\(") -> set[str]:
    """Names in the text of the parts that have no schema before them."""
    text = " ".join(part.read_text() for part in SQL.glob("*/*.sql"))
    return set(re.findall(rf"(?<![\w.])([a-z_][a-z0-9_]*)\b{after}", text))


def _settle(name: str, concrete: str) -> str:
    for array in ("anycompatiblearray", "anyarray"):
        name = name.replace(array, f"{concrete}[]")
    for element in ("anycompatible", "anyelement"):
        name = name.replace(element, concrete)
    return name


def _is_pseudo(name: str) -> bool:
    return name.strip('"') in {"any", "internal", "cstring", "record", "void", "trigger"} or (
        name.startswith("any")
    )
