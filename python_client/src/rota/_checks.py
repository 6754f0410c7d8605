"""What is checked before anything starts: the form of names, ranges, durations, moments.

SQL checks every argument too; these are the mistakes that would otherwise show late, or never.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from math import inf
from typing import Any

from ._errors import InvalidArgumentError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}")


def check_name(argument: str, name: str) -> None:
    """Raise ValueError unless *name* has the form of names of queues and job types."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{argument} must be 1 to 63 of the characters A-Z a-z 0-9 _ . : / - and begin "
            f"with a letter or digit, got {name[:80]!r}"
        )


def check_range(argument: str, value: float, least: float, most: float) -> None:
    """Raise ValueError unless *value* is in the range, both ends included."""
    if not least <= value <= most:  # also for what is no number
        limits = f"{least} to {most}" if most < inf else f"at least {least}"
        raise ValueError(f"{argument} must be {limits}, got {value}")


def check_zone(argument: str, value: Any) -> None:
    """Raise InvalidArgumentError for a moment that each session would take for another."""
    if isinstance(value, datetime) and value.utcoffset() is None:
        raise InvalidArgumentError(
            f"{argument} must have a time zone, such as datetime.now(UTC)"
        )


def to_duration(argument: str, value: timedelta | float) -> timedelta:
    """Return a duration, of which a number means seconds; raise TypeError or ValueError."""
    message = f"{argument} must be a timedelta or seconds >= 0, got {value!r}"
    if not isinstance(value, timedelta | int | float):
        raise TypeError(message)
    try:
        duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError):  # infinite, or no number
        raise ValueError(message) from None
    if duration < timedelta(0):
        raise ValueError(message)
    return duration


@contextmanager
def of_one_job() -> Iterator[None]:
    """Speak of the arguments of a single job, which is not the first of many to its caller."""
    try:
        yield
    except InvalidArgumentError as error:
        error.args = (str(error).removeprefix("jobs[1]."),)
        raise
