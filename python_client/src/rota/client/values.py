"""Dump values so that Postgres always takes them.

``jsonb`` refuses NUL characters, lone surrogates, NaN and Infinity, and ``text`` refuses the
first two.  A result or an error message that holds one must not keep its job from ending, so
characters are replaced by U+FFFD, and numbers that are none by null.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from psycopg.types.json import Jsonb

from ..exceptions import text_of
from .checks import REFUSED, check_json, check_zone

logger = logging.getLogger("rota")

MAX_RESULT = 1_000_000
"""A result of more characters than this, as JSON, is not stored."""


def clean_text(text: str) -> str:
    """Replace the characters that Postgres refuses in text."""
    return REFUSED.sub("\ufffd", text)


def clean(value: Any) -> Any:
    """Replace what ``jsonb`` refuses, all the way down."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float) and not math.isfinite(value):
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


def dump_result(value: Any, job_id: int) -> str | None:
    """Return the JSON text of a job's result, or None, with a warning if it cannot be stored.

    At once, because the handler may have left the value to somebody who goes on changing it.
    """
    if value is None:
        return None
    try:
        text = _dump(value)
    except Exception as error:  # a mapping may raise whatever it likes
        told = text_of(error)
        logger.warning("job %s: its result is not JSON and is dropped: %s", job_id, told)
        return None
    if len(text) > MAX_RESULT:
        size = len(text)
        logger.warning("job %s: its result has %s characters and is dropped", job_id, size)
        return None
    return text


def storable(value: Any, job_id: int) -> Jsonb | None:
    """Wrap what `dump_result` returns."""
    text = dump_result(value, job_id)
    return None if text is None else Jsonb(text, dumps=str)


def to_array(texts: Sequence[str | None]) -> Jsonb:
    """Wrap what `dump_result` returned for many jobs."""
    return Jsonb([text or "null" for text in texts], dumps=_join)


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
    return dump_clean(value)


def _join(texts: Sequence[str]) -> str:
    return f"[{','.join(texts)}]"


def to_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the arguments of one ``enqueue`` into what ``enqueue_many`` reads.

    Only its own values are turned: a duration into seconds, a moment into ISO text.
    A payload is never changed: one that Postgres would not take is refused.
    """
    return {name: _plain(name, value) for name, value in job.items()}


def to_jsonb(name: str, value: Any) -> Any:
    """Wrap an argument that is JSON, as it is or as its text; or raise InvalidArgumentError."""
    check_json(name, value)
    return Jsonb(value) if isinstance(value, Mapping | list | int | float) else value


def _plain(name: str, value: Any) -> Any:
    check_zone(name, value)
    check_json(name, value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime):
        return value.isoformat()
    return value
