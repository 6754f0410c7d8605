"""Processes for handlers that compute: each runs one function at a time, and can be killed.

A thread cannot be ended from outside, and holds the interpreter while it computes.  A process
that is cancelled, because its time is over or its lease lost, is killed, and so it costs no
place for long and no other job its time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

from .child import LENGTH, packed

MAX_IDLE = 64
START = "from rota.worker.child import main; main()"


class RemoteTraceback(Exception):
    """The traceback of the other process, as the cause of what it raised."""


class Processes:
    """Runs functions in processes, which are kept to be used again."""

    def __init__(self) -> None:
        self._idle: list[Process] = []
        self._is_closed = False

    async def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call *function* in a process; raise what it raises, ChildProcessError if it dies."""
        names = function.__module__, function.__qualname__
        if names[0] == "__main__" or "<" in names[1]:
            raise TypeError(
                f"{names[1]} of {names[0]} cannot run in a process, which finds it by name: "
                "put it into a module, not into the script that is run or another function"
            )
        question = packed((*names, args, kwargs, sys.path))
        process = self._idle.pop() if self._idle else await _start()
        try:
            body = await _ask(process, question)
        except (asyncio.IncompleteReadError, OSError):
            code = await process.wait()
            raise ChildProcessError(f"the process of the handler ended with {code}") from None
        except BaseException:
            await _kill(process)
            raise
        if self._is_closed or len(self._idle) >= MAX_IDLE:
            await _kill(process)
        else:
            self._idle.append(process)
        is_result, *answer = ForkingPickler.loads(body)
        if is_result:
            return answer[0]
        error, stack = answer
        raise error from RemoteTraceback("\n" + stack)

    async def close(self) -> None:
        """End the processes that are idle, and the others when they have answered."""
        self._is_closed = True
        idle, self._idle = self._idle, []
        for process in idle:
            await _kill(process)


async def _start() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, str(os.getpid()), stdin=PIPE, stdout=PIPE,
        start_new_session=True,  # Ctrl-C is for the worker, which knows what to do
    )  # fmt: skip


async def _ask(process: Process, question: bytes) -> bytes:
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stdout is not None  # noqa: S101
    process.stdin.write(question)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH.size)
    return await process.stdout.readexactly(LENGTH.unpack(head)[0])


async def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
