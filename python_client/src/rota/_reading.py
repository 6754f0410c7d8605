"""Read rows so that a value that Python cannot hold costs the rows beside it nothing.

A claim is committed before its rows are read.  An error then would leave all of them leased
to a worker that does not know of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from psycopg import adapters
from psycopg.abc import Buffer, Loader
from psycopg.adapt import AdaptersMap
from psycopg.adapt import Loader as BaseLoader
from psycopg.pq import Format

_JSONB = adapters.types["jsonb"].oid
_TIMESTAMPTZ = adapters.types["timestamptz"].oid


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for JSON that Postgres takes and Python does not, such as 1e5000."""

    reason: str


def forgive(reader: AdaptersMap) -> None:
    """Let no value raise that is read by way of *reader*, the adapters of one cursor.

    Unreadable JSON becomes an `Unreadable`, and a moment outside of Python's range the nearest
    one inside.
    """
    for oid, forgiving in ((_JSONB, _forgiving_jsonb), (_TIMESTAMPTZ, _forgiving_moment)):
        loader = reader.get_loader(oid, Format.BINARY)
        assert loader is not None  # noqa: S101 - for the type checker
        reader.register_loader(oid, forgiving(loader))


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
