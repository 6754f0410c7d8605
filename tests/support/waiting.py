"""How tests wait for what other processes, sessions and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

DEADLINE = 30.0


def wait_until(
    condition: Callable[[], Any], what: str = "the condition", seconds: float = DEADLINE
) -> Any:
    """Return the first true value of *condition*; fail after a deadline."""
    if value := comes_true(condition, seconds):
        return value
    pytest.fail(f"{what} did not come true within {seconds} seconds")


def comes_true(condition: Callable[[], Any], seconds: float, every: float = 0.02) -> Any:
    """Return the first true value of *condition*, or after a deadline a false one."""
    until = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < until:
        time.sleep(every)
    return value
