"""Threads for handlers that are plain functions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """Runs functions that never raise, each in a thread of its own.

    The threads are daemons: those of an executor would keep the process from leaving.
    """

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def __bool__(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    async def run(self, function: Callable[[], T]) -> T:
        """Return what *function* returns."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def put(value: T) -> None:
            if not future.done():
                future.set_result(value)

        def fail(error: BaseException) -> None:
            if not future.done():
                future.set_exception(RuntimeError(f"the thread ended by {type(error)!r}"))

        def target() -> None:
            try:
                answer = partial(put, function())
            except BaseException as error:  # whatever it is, somebody waits for an answer
                answer = partial(fail, error)
            self._threads.discard(thread)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(answer)

        thread = threading.Thread(target=target, name="rota-job", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.discard(thread)
            raise
        return await future
