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
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"{what} did not come true within {seconds} seconds")
