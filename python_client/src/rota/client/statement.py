"""What the two clients share: build the one kind of statement they send, and read its rows.

A value that Python cannot hold costs the rows beside it nothing.  A claim is committed before
its rows are read, and an error then would leave all of them leased to a worker that does not
know of them.  The forgiving loaders are slow, so rows are read with them only when the usual
ones have raised.

What goes around the calls that add jobs, such as the span of a trace, are `HOOKS`: context
managers that get the jobs on their way out, may change their headers, and after the call find
the ids that they got.  See `rota.contrib.otel`.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final, TypeVar

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, adapters, sql
from psycopg.abc import Buffer, Loader
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.adapt import Loader as BaseLoader
from psycopg.pq import Format
from psycopg.rows import RowMaker, class_row
from psycopg.types.json import Jsonb, JsonbBinaryLoader

from ..exceptions import InvalidArgumentError
from .values import (
    CONVERTERS,
    check_durations,
    check_is_mapping,
    check_json,
    check_known,
    check_size,
    check_zone,
)


class Unset(enum.Enum):
    """The type of `UNSET`."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
"""Stands for an argument that was not given: it is not sent, so SQL chooses the default."""


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given to a method, of which *self* is none."""
    return {n: value for n, value in arguments.items() if value is not UNSET and n != "self"}


def prepared(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given, as Postgres takes them."""
    found = given(arguments)
    for name in CONVERTERS.keys() & found.keys():
        found[name] = CONVERTERS[name](found[name])
    for name, value in found.items():
        check_zone(name, value)
        if isinstance(value, str):
            check_json(name, value)
    check_durations(found)
    return found


def blame(arguments: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Raise InvalidArgumentError for the first argument that nothing in Postgres can hold.

    *kinds* are the annotations of the method.  Asked only when a call has failed: to look
    through lists of thousands costs time.
    """
    for name, value in arguments.items():
        check_json(name, value.obj if isinstance(value, Jsonb) else value)
        check_size(name, value)
        check_known(name, value)
        if isinstance(value, int | float) and kinds.get(name, "").startswith("str"):
            raise InvalidArgumentError(f"{name} must be a text, got {value!r}")


def call(
    function: str,
    arguments: Iterable[str],
    row: type | None = None,
    *,
    json_as_text: bool = False,
) -> bytes:
    """Return ``select … from rota.function(name => %(name)s, …)``.

    The columns are the fields of *row*; without it, the one value, whose column has the
    function's name.
    """
    return _compose(function, tuple(arguments), row, json_as_text)


@cache
def _compose(
    function: str, arguments: tuple[str, ...], row: type | None, json_as_text: bool
) -> bytes:
    named = sql.SQL(", ").join(
        sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name))
        for name in arguments
    )
    as_text = json_columns(row) if row and json_as_text else ()
    statement = sql.SQL("select {} from {}({})").format(
        sql.SQL(", ").join(
            sql.SQL("{0}::text as {0}" if name in as_text else "{}").format(
                sql.Identifier(name)
            )
            for name in (columns(row) if row else [function])
        ),
        sql.Identifier("rota", function),
        named,
    )
    return statement.as_bytes(None)


def columns(row: type) -> Sequence[str]:
    """Return the names of the columns that make a row."""
    if is_dataclass(row):
        return [field.name for field in fields(row)]
    return row._fields  # type: ignore[attr-defined,no-any-return]


SQL_ASCII = "SQL_ASCII"
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.)")


def unescaped(
    connection: AsyncConnection[Any] | Connection[Any], arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return them with JSON that the server of this database takes.

    In one of encoding SQL_ASCII it refuses escapes of what is not in ASCII.
    """
    if connection.pgconn.parameter_status(b"server_encoding") != SQL_ASCII.encode():
        return arguments
    transformer = Transformer(connection)

    def text_of(value: Jsonb) -> str:
        return bytes(transformer.get_dumper(value, PyFormat.TEXT).dump(value) or b"").decode()

    return {
        name: Jsonb(characters(text_of(value)), dumps=str)
        if isinstance(value, Jsonb)
        else value
        for name, value in arguments.items()
    }


def characters(text: str) -> str:
    """Return a text of JSON with the characters that it has as escapes."""
    return _ESCAPE.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    if found[0][1] != "u":
        return found[0]
    character: str = json.loads(f'"{found[0]}"')
    # Controls have to be escaped, and half a character is none.
    is_one = character >= "\x80" and not "\ud800" <= character <= "\udfff"
    return character if is_one else found[0]


@cache
def json_columns(row: Any) -> frozenset[str]:
    """Return the names of those that are JSON: a mapping, or anything."""
    kinds = {n: getattr(k, "__forward_arg__", k) for n, k in row.__annotations__.items()}
    return frozenset(name for name, kind in kinds.items() if kind.startswith(("Any", "dict[")))


Row = TypeVar("Row")
AnyCursor = AsyncCursor[Any] | Cursor[Any]

_JSONB = adapters.types["jsonb"].oid


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
    """Return all rows of the result of a cursor; let no value raise."""
    result = cursor.pgresult
    assert result is not None  # noqa: S101 - for the type checker
    forgive(cursor.adapters, _unreadable)
    transformer = Transformer(cursor)
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, make)


def _reason(_: bytes, error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _unreadable(data: bytes, error: Exception) -> Unreadable:
    return Unreadable(_reason(data, error))


def forgive(known: AdaptersMap, of_json: Callable[[bytes, Exception], Any] = _reason) -> None:
    """Let values that Python cannot hold be read all the same.

    Unreadable JSON becomes what *of_json* makes of it, and a time or length outside of Python's
    range the nearest one inside.
    """
    for name, instead in {**_INSTEAD, "jsonb": of_json}.items():
        oid = adapters.types[name].oid
        for form in (Format.BINARY, Format.TEXT):
            loader = known.get_loader(oid, form)
            assert loader is not None  # noqa: S101 - for the type checker
            known.register_loader(oid, _forgiving(loader, form, instead))


@cache
def _forgiving(
    loader: type[Loader], form: Format, instead: Callable[[bytes, Exception], Any]
) -> type[Loader]:
    class Forgiving(BaseLoader):
        format = form

        def load(self, data: Buffer) -> Any:
            try:
                return loader(self.oid, self.connection).load(data)
            except Exception as error:
                return instead(bytes(data), error)

    return Forgiving


def _nearest(data: bytes, error: Exception) -> datetime:
    if isinstance(error, NotImplementedError):  # a DateStyle that psycopg cannot read
        raise error
    is_before = data[0] >= 0x80 or data[:1] == b"-" or data.endswith(b"BC")
    return (datetime.min if is_before else datetime.max).replace(tzinfo=UTC)


def _longest(data: bytes, error: Exception) -> timedelta:
    if isinstance(error, NotImplementedError):  # an IntervalStyle that psycopg cannot read
        return seconds_of(data, error)
    days, months = (int.from_bytes(data[n : n + 4], "big", signed=True) for n in (8, 12))
    is_negative = data[:1] == b"-" or days + 30 * months < 0
    return timedelta(days=-999_999_999 if is_negative else 999_999_999)


_SECONDS = re.compile(rb"(-?)(?:0:00:|PT|@ )?(-?[\d.]+)(?:S| secs?)?( ago)?")


def seconds_of(data: bytes, error: Exception) -> timedelta:
    """Read less than a minute in any IntervalStyle, as tick() tells when to look again.

    It is the only length that is read as a text; raise *error* for another one.
    """
    found = _SECONDS.fullmatch(data)
    if found is None:
        raise error
    length = timedelta(seconds=float(found[2]))
    return -length if found[1] or found[3] else length


_INSTEAD: dict[str, Callable[[bytes, Exception], Any]] = {
    "timestamptz": _nearest,
    "interval": _longest,
}


class _JsonLoader(JsonbBinaryLoader):
    """Reads what Postgres has written, in a third of the time, unless other `loads` are set."""

    def load(self, data: Buffer) -> Any:
        if self.loads is not json.loads:
            return super().load(data)
        return _DECODER.raw_decode(str(data, "utf-8"), 1)[0]  # after the version


_DECODER = json.JSONDecoder()


def read_quickly(connection: AsyncConnection[Any]) -> None:
    """Let a connection of ours read JSON by that, where psycopg has its own loader."""
    if connection.adapters.get_loader(_JSONB, Format.BINARY) is JsonbBinaryLoader:
        connection.adapters.register_loader("jsonb", _JsonLoader)


MAX_HEADERS = 8192
"""A job that has more than so many bytes of headers is refused."""


class Outgoing:
    """The jobs of one call: mappings of the arguments of ``enqueue``."""

    def __init__(self, jobs: Sequence[Mapping[str, Any]]) -> None:
        self.jobs = jobs
        self.ids: list[int] = []
        """The ids of the jobs once they are added, in the same order."""

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers to all jobs that have room, in copies; those that a job has stay."""
        if headers:
            self.jobs = [_with_headers(job, headers) for job in self.jobs]


def _with_headers(job: Mapping[str, Any], headers: Mapping[str, str]) -> Mapping[str, Any]:
    own = job.get("headers") or {}
    if not isinstance(own, Mapping):
        return job  # which is refused
    together = {**headers, **own}
    size = len(json.dumps(together, skipkeys=True, default=str))
    return {**job, "headers": together} if size <= MAX_HEADERS else job


Hook = Callable[[Outgoing], AbstractContextManager[None]]
HOOKS: list[Hook] = []


@contextmanager
def outgoing(jobs: Sequence[Mapping[str, Any]]) -> Iterator[Outgoing]:
    """Run a call that adds jobs within all hooks, which may take them for mappings."""
    out = Outgoing(list(jobs))
    for number, job in enumerate(out.jobs, 1):
        check_is_mapping("jobs", number, job)
    with ExitStack() as stack:
        for hook in HOOKS:
            stack.enter_context(hook(out))
        yield out
