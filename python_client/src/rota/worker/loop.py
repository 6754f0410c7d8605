"""Which event loop a worker runs in, and how it leaves it."""

from __future__ import annotations

import asyncio
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, cast

LAST_WORDS = 1.0
"""Seconds that what is left in a loop has to end after it was cancelled."""


def loop_factory() -> Callable[[], AbstractEventLoop] | None:
    """Return what makes a loop of uvloop where that is installed, or None for asyncio's own."""
    try:
        found = import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return cast(Callable[[], AbstractEventLoop], found)


def run_in_loop(main: Coroutine[Any, Any, None]) -> bool:
    """Run *main* as `asyncio.run` does; return whether all that it began has ended, too.

    That would wait without end for tasks that do not let themselves be cancelled, and for the
    threads of `asyncio.to_thread`.
    """
    runner = asyncio.Runner(loop_factory=loop_factory())
    executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
    runner.get_loop().set_default_executor(executor)
    try:
        runner.run(main)
    finally:
        has_ended = _end_tasks(runner.get_loop()) and _end_threads(executor)
        if has_ended:
            runner.close()
    return has_ended


def _end_tasks(loop: AbstractEventLoop) -> bool:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        _, left = loop.run_until_complete(asyncio.wait(left, timeout=LAST_WORDS))
    return not left


def _end_threads(executor: ThreadPoolExecutor) -> bool:
    ending = threading.Thread(target=executor.shutdown, daemon=True)
    ending.start()
    ending.join(LAST_WORDS)
    return not ending.is_alive()
