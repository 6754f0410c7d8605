"""Which event loop a worker runs in."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable
from importlib import import_module
from typing import cast


def loop_factory() -> Callable[[], AbstractEventLoop] | None:
    """Return what makes a loop of uvloop where that is installed, or None for asyncio's own."""
    try:
        found = import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return cast(Callable[[], AbstractEventLoop], found)
