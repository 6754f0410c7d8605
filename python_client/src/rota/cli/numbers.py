"""Numbers as options take them: whole, or seconds, within bounds that the words name."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MAX_INTEGER = 2**31 - 1
MAX_ID = 2**63 - 1


def whole(least: int = 1, most: int = MAX_INTEGER) -> Callable[[str], int]:
    """Return what reads a whole number of these."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}, got {text}")
        return number

    return read


def seconds(text: str) -> float:
    """Return a time to wait, from a millisecond to a day."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.001 <= number <= 86400:
        raise argparse.ArgumentTypeError(f"must be 0.001 to 86400 seconds, got {text!r}")
    return number


count = whole()
job_id = whole(1, MAX_ID)
