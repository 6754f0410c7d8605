"""Check values before anything starts, and turn them into what Postgres always takes.

SQL checks every argument too; checked here are the mistakes that would otherwise show late, or
never: the form of names, ranges, durations, moments, and what ``jsonb`` and ``text`` refuse,
which are NUL characters, lone surrogates, NaN and Infinity.  A payload with one of these is
refused.  A result or an error message must not keep its job from ending, so there characters
are replaced by U+FFFD, and numbers that are none by null.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from datetime import date, datetime, timedelta, tzinfo
from decimal import Decimal
from functools import partial
from math import inf, isfinite
from typing import Any

from psycopg import adapters
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.types.json import Jsonb

from ..codec import Codec
from ..exceptions import InvalidArgumentError, text_of

REFUSED = re.compile("[\x00\ud800-\udfff]")
"""The characters that Postgres refuses in text and in jsonb."""

_BIGINT = {
    "after_id",
    "job_id",
    "job_ids",
    "kept_job_ids",
    "lease_token",
    "lease_tokens",
    "kept_lease_tokens",
    "move_id",
    "depends_on",
    "blocks",
    "settle_above",
}
"""The arguments that are numbers of 64 bits; all others have 32."""

DURATIONS = {
    "ageing",
    "catch_up_window",
    "delay",
    "every",
    "expires_after",
    "jitter",
    "keep",
    "keep_dead",
    "keep_finished",
    "lease",
    "max_wait",
    "pause_for",
    "per",
    "poll_interval",
    "retry_in",
    "span",
    "time_limit",
    "unique_for",
}
"""The arguments of functions that are durations; of jobs in JSON they may be seconds."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}")


def check_name(argument: str, name: str) -> None:
    """Raise InvalidArgumentError unless *name* has the form of names of queues and types."""
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be a text, got {name!r}")
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"{argument} must be 1 to 63 of the characters A-Z a-z 0-9 _ . : / - and begin "
            f"with a letter or digit, got {name[:80]!r}"
        )


def check_stage(next_stage: str | None) -> None:
    """Raise TypeError or InvalidArgumentError for what cannot be a stage."""
    if next_stage is None:
        return
    if not isinstance(next_stage, str):
        raise TypeError(f"next_stage must be the name of a stage, got {next_stage!r}")
    check_json("next_stage", next_stage)


def check_range(argument: str, value: float, least: float, most: float) -> None:
    """Raise TypeError or ValueError unless *value* is in the range, both ends included."""
    if not isinstance(value, int | float):
        raise TypeError(f"{argument} must be a number, got {value!r}")
    if not least <= value <= most:  # also for what is no number
        limits = f"{least} to {most}" if most < inf else f"at least {least}"
        raise ValueError(f"{argument} must be {limits}, got {value}")


def check_size(argument: str, value: Any) -> None:
    """Raise InvalidArgumentError for a whole number, also in a list, of too many bits."""
    bits = 63 if argument in _BIGINT else 31
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and not -(2**bits) <= number < 2**bits:
            raise InvalidArgumentError(
                f"{argument} must be {-(2**bits)} to {2**bits - 1}, got {number}"
            )


def check_zone(argument: str, value: Any) -> None:
    """Raise InvalidArgumentError for a moment that each session would take for another."""
    is_moment = isinstance(value, datetime) and value.utcoffset() is not None
    if isinstance(value, date) and not is_moment:
        raise InvalidArgumentError(
            f"{argument} must have a time zone, such as datetime.now(UTC)"
        )


def check_durations(arguments: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError for a number, of which Postgres tells only by its type."""
    for name in DURATIONS & arguments.keys():
        if isinstance(value := arguments[name], int | float):
            raise InvalidArgumentError(
                f"{name} must be a timedelta, such as timedelta(seconds={value})"
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
    items = value if isinstance(value, list) else [value]
    if all(isinstance(item, datetime | timedelta | Decimal) for item in items):
        return  # an argument can be one, or an array of them
    if isinstance(value, Jsonb):
        value = value.obj
        if argument in ("jobs", "stages") and isinstance(value, list):
            for number, item in enumerate(value, 1):
                for name, part in item.items() if isinstance(item, Mapping) else ():
                    _check_known(f"{argument}[{number}].{name}", part)
            return
    _check_known(argument, value)


def _check_known(path: str, value: Any) -> None:
    if value is None or isinstance(value, str | int | float):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int | float | None):
                raise InvalidArgumentError(
                    f"{path} has the key {key!r}, and JSON has texts only: send it as text"
                )
            _check_known(f"{path}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_known(f"{path}[{index}]", item)
    else:
        kind = type(value).__name__
        if hasattr(value, "job_id"):
            remedy = "pass its job_id"
        elif hasattr(value, "job_type"):
            remedy = "it is a task: call its enqueue(), or pass its job_type"
        elif isinstance(value, tzinfo):
            remedy = f"pass its name as text, such as {str(value)!r}"
        elif hasattr(value, "isoformat"):
            remedy = "send it as text, such as value.isoformat()"
        elif isinstance(value, timedelta):
            remedy = "send its value.total_seconds()"
        elif isinstance(value, Set):
            remedy = "send it as a list"
        elif isinstance(value, Mapping):
            remedy = "send it as a dict"
        elif isinstance(value, bytes | bytearray | memoryview):
            remedy = "send it as text, decoded or as base64"
        else:
            remedy = "send it as text, such as str(value), or a mapping of what it holds"
        raise InvalidArgumentError(
            f"{path} is of type {kind}, which JSON does not have: {remedy}"
        )


def _is_too_long(number: int) -> bool:
    try:
        return number.bit_length() > 2000 and not str(number)
    except ValueError:  # the limit can be set
        return True


@contextmanager
def of_one_job() -> Iterator[None]:
    """Speak of the arguments of a single job, which is not the first of many to its caller."""
    try:
        yield
    except InvalidArgumentError as error:
        error.args = (str(error).removeprefix("jobs[1]."),)
        raise


logger = logging.getLogger("rota")

MAX_RESULT = 1_000_000
"""A result of more characters than this, as JSON, is not stored."""


def clean(value: Any) -> Any:
    """Replace what ``text`` and ``jsonb`` refuse, all the way down."""
    if isinstance(value, str):
        return REFUSED.sub("\ufffd", value)
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {clean(k) if isinstance(k, str) else k: clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def dump_clean(value: Any) -> str:
    """Return JSON text that ``jsonb`` takes; raise TypeError for what is no JSON at all."""
    return json.dumps(clean(value), allow_nan=False)


def to_result(value: Any) -> Jsonb | None:
    """Wrap the result of a job; None stays null in the database."""
    if value is None or isinstance(value, Jsonb):
        return value
    return Jsonb(value, dumps=dump_clean)


def dump_result(value: Any, owner: str) -> str | None:
    """Return the JSON text of a result, or None, with a warning if it cannot be stored.

    At once, because the handler may have left the value to somebody who goes on changing it.
    """
    if value is None:
        return None
    try:
        text = _dump(value)
    except BaseException as error:  # a mapping may raise whatever it likes
        told = text_of(error)
        logger.warning("%s: its result is not JSON and is dropped: %s", owner, told)
        return None
    if len(text) > MAX_RESULT:
        size = len(text)
        logger.warning("%s: its result has %s characters and is dropped", owner, size)
        return None
    return text


def storable(value: Any, owner: str) -> Jsonb | None:
    """Wrap what `dump_result` returns."""
    text = dump_result(value, owner)
    return None if text is None else Jsonb(text, dumps=str)


def join_results(texts: Sequence[str | None]) -> Jsonb:
    """Wrap what `dump_result` returned for many jobs."""
    return Jsonb([text or "null" for text in texts], dumps=_join)


class Numbers(list[int]):
    """Whole numbers for a bigint[]: of a plain list psycopg looks at each for its size."""


class _NumbersDumper(Dumper):
    oid = adapters.types["int8"].array_oid

    def dump(self, obj: Numbers) -> Buffer:
        return f"{{{','.join(map(str, obj))}}}".encode()


adapters.register_dumper(Numbers, _NumbersDumper)


def to_array(name: str, value: Any) -> Any:
    """Return a list for a sequence; raise TypeError for a text, which is one, too."""
    if isinstance(value, str):
        raise TypeError(f"{name} must be a list, got the text {value!r}")
    if not isinstance(value, Sequence):
        return value
    return (Numbers if set(map(type, value)) == {int} else list)(value)


def to_endings(endings: Any) -> Any:
    """Wrap the endings of jobs: texts and results are cleaned, durations are seconds."""
    if not isinstance(endings, Sequence) or isinstance(endings, str):
        return endings
    return Jsonb(
        [
            {name: _plain(name, value) for name, value in ending.items()}
            if isinstance(ending, Mapping)
            else ending
            for ending in endings
        ],
        dumps=dump_clean,
    )


def join_endings(endings: Sequence[tuple[Mapping[str, Any], str | None]]) -> Jsonb:
    """Wrap endings, each with what `dump_result` returned."""
    texts = []
    for ending, result in endings:
        text = dump_clean(ending)
        texts.append(text if result is None else f'{text[:-1]}, "result": {result}}}')
    return Jsonb(texts, dumps=_join)


def _dump(value: Any) -> str:
    # Nearly every result can be dumped as it is; to clean it first takes three times as long.
    with suppress(TypeError, ValueError):
        text = json.dumps(value, allow_nan=False)
        if "\\u0000" not in text and "\\ud" not in text:
            return text
    with suppress(Exception):  # then the next line says what is wrong
        value = Codec().encode(value)
    return dump_clean(value)


def _join(texts: Sequence[str]) -> str:
    return f"[{','.join(texts)}]"


def check_is_mapping(name: str, number: int, item: object) -> None:
    """Raise InvalidArgumentError for what is no mapping, as the arguments of a job are."""
    if not isinstance(item, Mapping):
        raise InvalidArgumentError(f"{name}[{number}] must be a mapping, got {item!r:.80}")


def to_jsonb(name: str, value: Any) -> Any:
    """Wrap an argument that is JSON, as it is or as its text; or raise InvalidArgumentError."""
    check_json(name, value)
    if isinstance(value, Mapping):
        value = dict(value)
    return Jsonb(value) if isinstance(value, dict | list | int | float) else value


def _plain(name: str, value: Any) -> Any:
    check_zone(name, value)
    check_json(name, value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime):
        return value.isoformat()
    return dict(value) if isinstance(value, Mapping) else value


def to_jobs(name: str, jobs: Sequence[Mapping[str, Any]] | str) -> Jsonb | str:
    """Wrap a list of jobs; a text of JSON goes as it is, numbers of any size too.

    Only the arguments of a job are turned: a duration into seconds, a moment into ISO text.
    A payload is never changed: one that Postgres would not take is refused.
    """
    if isinstance(jobs, str):
        try:
            json.loads(jobs)
        except (ValueError, RecursionError) as error:
            text = f"{name} must be the text of a JSON array: {error}"
            raise InvalidArgumentError(text) from None
        return jobs
    made = []
    for number, job in enumerate(jobs, 1):
        check_is_mapping(name, number, job)
        try:
            made.append({each: _plain(each, value) for each, value in job.items()})
        except InvalidArgumentError as error:
            error.args = (f"{name}[{number}].{error}",)
            raise
    return Jsonb(made)


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "endings": to_endings,
    **dict.fromkeys(("result", "results"), to_result),
    **dict.fromkeys(("error", "message", "reason", "stack"), clean),
    **{
        name: partial(make, name)
        for make, names in (
            (to_jobs, "databases jobs stages"),
            (to_jsonb, "arguments backoff facts filter headers payload retry_budget"),
            (
                to_array,
                "depends_on enqueue_times group_by job_ids job_types kept_job_ids "
                "kept_lease_tokens lease_tokens next_stages queues",
            ),
        )
        for name in names.split()
    },
}
"""What makes of an argument of that name what Postgres takes."""


def span(length: timedelta) -> str:
    """Return a length of time, as it is told, by its two largest units."""
    left = abs(round(length.total_seconds()))
    parts: list[str] = []
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, seconds)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])
