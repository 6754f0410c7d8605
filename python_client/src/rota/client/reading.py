"""Read rows so that a value that Python cannot hold costs the rows beside it nothing.

A claim is committed before its rows are read.  An error then would leave all of them leased
to a worker that does not know of them.  The forgiving loaders are slow, so rows are read with
them only when the usual ones have raised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

from psycopg import AsyncCursor, Cursor, adapters
from psycopg.abc import Buffer, Loader
from psycopg.adapt import Loader as BaseLoader
from psycopg.adapt import Transformer
from psycopg.pq import Format
from psycopg.rows import RowMaker, class_row

Row = TypeVar("Row")
AnyCursor = AsyncCursor[Any] | Cursor[Any]

_JSONB = adapters.types["jsonb"].oid
_TIMESTAMPTZ = adapters.types["timestamptz"].oid


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for JSON that Postgres takes and Python does not, such as 1e5000."""

    reason: str


def factory(row: type[Row]) -> Callable[[AnyCursor], RowMaker[Row]]:
    """Return the row factory for a class of `_rows`; those of tuples are the fast ones."""
    if issubclass(row, tuple):
        return lambda _: row._make  # type: ignore[attr-defined]
    return class_row(row)


def read_forgiving(cursor: AnyCursor, make: RowMaker[Row]) -> list[Row]:
    """Return all rows of the result of a cursor; let no value raise.

    Unreadable JSON becomes an `Unreadable`, and a moment outside of Python's range the nearest
    one inside.
    """
    result = cursor.pgresult
    assert result is not None  # noqa: S101 - for the type checker
    for oid, forgiving in ((_JSONB, _forgiving_jsonb), (_TIMESTAMPTZ, _forgiving_moment)):
        loader = cursor.adapters.get_loader(oid, Format.BINARY)
        assert loader is not None  # noqa: S101 - for the type checker
        cursor.adapters.register_loader(oid, forgiving(loader))
    transformer = Transformer(cursor)
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, make)


@cache
def _forgiving_jsonb(loader: type[Loader]) -> type[Loader]:
    class ForgivingJsonb(BaseLoader):
        format = Format.BINARY

        def load(self, data: Buffer) -> Any:
            try:
                return loader(self.oid, self.connection).load(data)
            except Exception as error:
                return Unreadable(f"{type(error).__name__}: {error}")

    return ForgivingJsonb


@cache
def _forgiving_moment(loader: type[Loader]) -> type[Loader]:
    class ForgivingMoment(BaseLoader):
        format = Format.BINARY

        def load(self, data: Buffer) -> Any:
            try:
                return loader(self.oid, self.connection).load(data)
            except Exception:  # microseconds before or after the year 2000
                is_before = int.from_bytes(data, "big", signed=True) < 0
                return (datetime.min if is_before else datetime.max).replace(tzinfo=UTC)

    return ForgivingMoment
