"""Threads for handlers that are plain functions."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from queue import SimpleQueue
from typing import Any

Task = tuple[Callable[[], Any], Callable[[Any], None]]


class Threads:
    """Runs functions in threads, as many at a time as are asked for.

    A thread that is free takes the next function.  The threads are daemons: those of an
    executor would keep the process from leaving.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._answers: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_told = False
        self._threads = 0
        self._unanswered = 0
        self._busy: set[threading.Thread] = set()

    def __bool__(self) -> bool:
        """Whether a function still runs."""
        return bool(self._busy)

    def run(self, function: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Call *then* in the loop with what *function* returns or raises."""
        if self._unanswered == self._threads:
            target, loop = self._work, asyncio.get_running_loop()
            threading.Thread(target=target, args=[loop], name="rota-job", daemon=True).start()
            self._threads += 1
        self._unanswered += 1
        self._tasks.put((function, then))

    def close(self) -> None:
        """Let the threads end, each when its function does."""
        for _ in range(self._threads):
            self._tasks.put(None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        thread = threading.current_thread()
        while (task := self._tasks.get()) is not None:
            function, then = task
            self._busy.add(thread)
            try:
                answer = Context().run(function)
            except BaseException as error:  # whatever it is, somebody waits for an answer
                answer = error
            self._busy.discard(thread)
            self._answers.append((then, answer))
            if not self._is_told:  # one call for all that end before the loop gets to it
                self._is_told = True
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(self._deliver, loop)
            del function, then, task, answer  # not kept until the next one comes

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_told = False  # first: an answer that comes from now on is told again
        while self._answers:
            self._unanswered -= 1
            then, answer = self._answers.popleft()
            loop.call_soon(then, answer)
