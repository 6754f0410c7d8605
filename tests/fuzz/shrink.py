"""Forms of a value that lack one thing: what a failing call is made smaller with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fuzz.hostile import quoted

JSON = re.compile(r"'(.*)'::jsonb", re.DOTALL)


class Number(str):
    """A number as it was written: 1e400 is none of Python's."""


def smaller_values(value: str) -> Iterator[str]:
    """Yield expressions like this one, with less in its json, unless that is very deep."""
    found = JSON.fullmatch(value)
    if not found or len(value) > 5000:
        return
    text = found[1].replace("''", "'")
    with suppress(RecursionError):
        for less in less_of(json.loads(text, parse_float=Number, parse_int=Number)):
            yield quoted(written(less), "jsonb")


def less_of(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in value:
            yield {other: value[other] for other in value if other != key}
        for key in value:
            for less in less_of(value[key]):
                yield {**value, key: less}
    elif isinstance(value, list):
        for number in range(len(value)):
            yield value[:number] + value[number + 1 :]
        for number in range(len(value)):
            for less in less_of(value[number]):
                yield [*value[:number], less, *value[number + 1 :]]


def written(value: Any) -> str:
    if isinstance(value, Number):
        return value
    if isinstance(value, dict):
        members = (f"{written(key)}: {written(member)}" for key, member in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
