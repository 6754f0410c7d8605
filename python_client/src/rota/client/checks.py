"""What is checked before anything starts: the form of names, ranges, durations, moments.

SQL checks every argument too; these are the mistakes that would otherwise show late, or never.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo
from decimal import Decimal
from math import inf, isfinite
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from ..exceptions import InvalidArgumentError

REFUSED = re.compile("[\x00\ud800-\udfff]")
"""The characters that Postgres refuses in text and in jsonb."""

_WIDE = re.compile(r"(.*_)?(ids?|tokens?|after|before)")
"""The arguments that are numbers of 64 bits; all others have 32."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}")


def check_name(argument: str, name: str) -> None:
    """Raise ValueError unless *name* has the form of names of queues and job types."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{argument} must be 1 to 63 of the characters A-Z a-z 0-9 _ . : / - and begin "
            f"with a letter or digit, got {name[:80]!r}"
        )


def check_stage(next_stage: str | None) -> None:
    """Raise TypeError or InvalidArgumentError for what cannot be a stage."""
    if not isinstance(next_stage, str | None):
        raise TypeError(f"next_stage must be the name of a stage, got {next_stage!r}")
    check_json("next_stage", next_stage)


def check_range(argument: str, value: float, least: float, most: float) -> None:
    """Raise ValueError unless *value* is in the range, both ends included."""
    if not least <= value <= most:  # also for what is no number
        limits = f"{least} to {most}" if most < inf else f"at least {least}"
        raise ValueError(f"{argument} must be {limits}, got {value}")


def check_size(argument: str, value: Any) -> None:
    """Raise InvalidArgumentError for a whole number, also in a list, of too many bits."""
    bits = 63 if _WIDE.fullmatch(argument) else 31
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and not -(2**bits) <= number < 2**bits:
            raise InvalidArgumentError(
                f"{argument} must be {-(2**bits)} to {2**bits - 1}, got {number}"
            )


def check_zone(argument: str, value: Any) -> None:
    """Raise InvalidArgumentError for a moment that each session would take for another."""
    if isinstance(value, datetime) and value.utcoffset() is None:
        raise InvalidArgumentError(
            f"{argument} must have a time zone, such as datetime.now(UTC)"
        )


def check_json(argument: str, value: Any) -> None:
    """Raise InvalidArgumentError for what ``jsonb`` and ``text`` refuse, also deep inside.

    Found here, it does not break the transaction of the caller.  What is no JSON at all is left
    to the one who dumps it, who may know how.
    """
    try:
        flaw = _flaw(value)
    except RecursionError:
        flaw = " is nested too deeply, or in itself"
    if flaw:
        raise InvalidArgumentError(f"{argument}{flaw}")


def _flaw(value: Any) -> str | None:
    """Say where a value has something that cannot be stored, and what."""
    if isinstance(value, str):
        return " has a NUL character or a lone surrogate" if REFUSED.search(value) else None
    if isinstance(value, float):
        return None if isfinite(value) else f" must be a finite number, got {value}"
    if isinstance(value, int):
        return " has more digits than Python can write" if _is_too_long(value) else None
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value) and (same := _same_keys(value)):
            return f" has the keys {same[0]!r} and {same[1]!r}, which are one key in JSON"
        for key, item in value.items():
            if isinstance(key, str) and REFUSED.search(key):
                return f" has a NUL character or a lone surrogate in the key {key!r}"
            if flaw := _flaw(item):
                return f"[{key!r}]{flaw}"
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if flaw := _flaw(item):
                return f"[{index}]{flaw}"
    return None


def _same_keys(value: Mapping[Any, Any]) -> tuple[Any, Any] | None:
    """Return two keys that JSON, where all keys are texts, cannot tell apart."""
    seen: dict[str, Any] = {}
    for key in value:
        text = key if isinstance(key, str) else json.dumps(key, default=repr)
        if text in seen:
            return seen[text], key
        seen[text] = key
    return None


def check_known(argument: str, value: Any) -> None:
    """Raise InvalidArgumentError for what no argument and no JSON can be."""
    if isinstance(value, datetime | timedelta | Decimal):
        return  # an argument can be one
    if isinstance(value, Jsonb):
        value = value.obj
        if argument in ("jobs", "stages") and isinstance(value, list):
            for number, item in enumerate(value, 1):
                for name, part in item.items() if isinstance(item, Mapping) else ():
                    _check_known(f"{argument}[{number}].{name}", part)
            return
    _check_known(argument, value)


def _check_known(path: str, value: Any) -> None:
    if value is None or isinstance(value, str | int | float | bytes):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_known(f"{path}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_known(f"{path}[{index}]", item)
    else:
        kind = type(value).__name__
        if hasattr(value, "job_id"):
            remedy = "pass its job_id"
        elif isinstance(value, tzinfo):
            remedy = f"pass its name as text, such as {str(value)!r}"
        elif hasattr(value, "isoformat"):
            remedy = "send it as text, such as value.isoformat()"
        elif isinstance(value, timedelta):
            remedy = "send its value.total_seconds()"
        elif isinstance(value, Set):
            remedy = "send it as a list"
        else:
            remedy = "send it as text, such as str(value), or a mapping of what it holds"
        raise InvalidArgumentError(f"{path} is a {kind}, which JSON does not have: {remedy}")


def _is_too_long(number: int) -> bool:
    try:
        return number.bit_length() > 2000 and not str(number)
    except ValueError:  # the limit can be set
        return True


def check_connection(connection: object, kind: type) -> None:
    """Raise TypeError, with what helps, for what is no connection of psycopg of that kind."""
    if isinstance(connection, kind):
        return
    client = "AsyncClient" if kind is psycopg.AsyncConnection else "Client"
    got = type(connection).__name__
    if isinstance(connection, str):
        remedy = "open it first, psycopg.connect(...), or run a Worker, which opens its own"
    elif isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        other = "Client" if client == "AsyncClient" else "AsyncClient"
        remedy = f"use rota.{other} with it"
    elif isinstance(getattr(connection, "connection", None), kind):
        remedy = "pass its attribute `connection`, which is the one of psycopg"  # Django's
    elif hasattr(connection, "connection"):
        remedy = "pass the connection of psycopg inside it, such as SQLAlchemy's "
        remedy += "session.connection().connection.driver_connection"
    else:
        remedy = "other drivers call the SQL functions themselves"
    raise TypeError(f"rota.{client} needs a psycopg.{kind.__name__}, got {got}: {remedy}")


@contextmanager
def of_one_job() -> Iterator[None]:
    """Speak of the arguments of a single job, which is not the first of many to its caller."""
    try:
        yield
    except InvalidArgumentError as error:
        error.args = (str(error).removeprefix("jobs[1]."),)
        raise
