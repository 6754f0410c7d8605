"""Build the one kind of statement the clients send: a call with named arguments."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final

from psycopg import sql
from psycopg.types.json import Jsonb

from .checks import check_json, check_known, check_size, check_zone


class Unset(enum.Enum):
    """The type of `UNSET`."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
"""Stands for an argument that was not given: it is not sent, so SQL chooses the default."""


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given."""
    for name, value in arguments.items():
        check_zone(name, value)
        if isinstance(value, str):
            check_json(name, value)
    return {name: value for name, value in arguments.items() if value is not UNSET}


def blame(arguments: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError for the first argument that nothing in Postgres can hold.

    Asked only when a call has failed: to look through lists of thousands costs time.
    """
    for name, value in arguments.items():
        check_json(name, value.obj if isinstance(value, Jsonb) else value)
        check_size(name, value)
        check_known(name, value)


def call(function: str, arguments: Iterable[str], row: type | None = None) -> bytes:
    """Return ``select … from rota.function(name => %(name)s, …)``.

    The columns are the fields of *row*; without it, the one value, whose column has the
    function's name.
    """
    return _compose(function, tuple(arguments), row)


@cache
def _compose(function: str, arguments: tuple[str, ...], row: type | None) -> bytes:
    named = sql.SQL(", ").join(
        sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name))
        for name in arguments
    )
    statement = sql.SQL("select {} from {}({})").format(
        sql.SQL(", ").join(map(sql.Identifier, _columns(row) if row else [function])),
        sql.Identifier("rota", function),
        named,
    )
    return statement.as_bytes(None)


def _columns(row: type) -> Sequence[str]:
    if is_dataclass(row):
        return [field.name for field in fields(row)]
    return row._fields  # type: ignore[attr-defined,no-any-return]
