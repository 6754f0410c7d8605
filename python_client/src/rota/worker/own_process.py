"""Processes for handlers that compute: each runs one function at a time, and can be killed.

A thread cannot be ended from outside, and holds the interpreter while it computes.  A process
that is cancelled, because its time is over or its lease lost, is killed, and so it costs no
place for long and no other job its time.

Messages are pickles, as the processes of multiprocessing send them: parent and child are one
program of one user.  Each stands behind its length in eight bytes.  The function is named by
its module, which the child imports, and not sent: it may be that of a task.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import signal
import struct
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import reduce
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..exceptions import text_of
from .process import LAST_WORDS, die_with, told_of

MAX_IDLE = 64
LOOK_INTERVAL = 0.25
"""Seconds between two looks whether a process still lives."""
END_TIMEOUT = 5.0
"""Seconds that the end of a process is waited for."""
LENGTH = struct.Struct(">Q")
START = "from rota.worker.own_process import answer_parent; answer_parent()"


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
        check_can_be_found(function)
        if function.__module__ == "__main__":
            raise TypeError(
                f"{function.__qualname__} of the script that is run cannot run in a process, "
                "which finds it by name: put it into a module"
            )
        question = question_of(function, args, kwargs)
        # One may have died meanwhile, such as by the system when memory was short.
        self._idle = [each for each in self._idle if each.returncode is None]
        process = self._idle.pop() if self._idle else await _start()
        try:
            try:
                body = await _ask(process, question)
            except (asyncio.IncompleteReadError, OSError):
                await _wait(process)
                code = process.returncode
                became = "closed its files" if code is None else f"ended with {told_of(code)}"
                raise ChildProcessError(f"the process of the handler {became}") from None
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
    """Return the answer; raise OSError or IncompleteReadError if the process ends without."""
    answering = asyncio.create_task(_converse(process, question))
    try:
        # wait() would wait for the end of the pipes, too.
        while process.returncode is None and not answering.done():
            await asyncio.wait([answering], timeout=LOOK_INTERVAL)
        if not answering.done():
            # What the function has started holds the pipe open; there may be an answer in it.
            _kill_group(process)
            await asyncio.wait([answering], timeout=LAST_WORDS)
        if not answering.done():
            raise BrokenPipeError
        return answering.result()
    finally:
        answering.cancel()


async def _converse(process: Process, question: bytes) -> bytes:
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stdout is not None  # noqa: S101
    process.stdin.write(question)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH.size)
    return await process.stdout.readexactly(LENGTH.unpack(head)[0])


async def _kill(process: Process) -> None:
    _kill_group(process)
    await _wait(process)
    process._transport.close()  # type: ignore[attr-defined]  # what another has open, too


async def _wait(process: Process) -> None:
    """Wait for its end, but not long: it goes on, or another process has its pipes open."""
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_TIMEOUT)


def _kill_group(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and what the function has started


def question_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """Return the message that asks for a call."""
    call = function.__module__, function.__qualname__, args, kwargs
    return packed((sys.path, _has_django(), bytes(ForkingPickler.dumps(call))))


def _has_django() -> bool:
    """Whether this program uses Django, by settings that another process finds as well."""
    django = sys.modules.get("django.apps")
    return django is not None and django.apps.ready and "DJANGO_SETTINGS_MODULE" in os.environ


def check_can_be_found(function: Callable[..., Any]) -> None:
    """Raise TypeError for a function that another process does not find by its name."""
    name = getattr(function, "__qualname__", "<partial>")
    if "<" in name or inspect.ismethod(function):
        raise TypeError(
            f"{function!r} cannot run in a process, which finds it by name: give it a function "
            "of a module, not a method or one that another function or partial() made"
        )


class _Parts:
    """An exception on its way, not to be made again by a call of its class.

    That would need the arguments that it was made with, which `BaseException.args` need not be.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _put_together, (type(self._error), self._error.args, vars(self._error))


def _put_together(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def portable(error: BaseException) -> Any:
    """Return what arrives in another process as this exception, or at least as its text."""
    parts = _Parts(error)
    for sent in (error, parts):
        with suppress(Exception):
            arrived = ForkingPickler.loads(ForkingPickler.dumps(sent))
            # Made again by its class, it may have got other arguments.
            if sent is parts or arrived.args == error.args:
                return sent
    kind = type(error)
    return RuntimeError(f"{kind.__module__}.{kind.__qualname__}: {text_of(error)}")


def answer_parent() -> None:
    """Answer in the child until the parent closes the pipe."""
    die_with(int(sys.argv[1]), signal.SIGKILL)  # what it computes is of no use any more
    own = os.getpid()
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What a handler prints is no answer, and it has nobody to ask.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    while head := questions.read(LENGTH.size):
        body = questions.read(LENGTH.unpack(head)[0])
        is_result, *told = answer(body)
        if os.getpid() != own:
            # A process that the function has forked: an answer of it would be taken for that
            # of the next call.
            raise SystemExit if is_result else told[0]
        answers.write(packed((is_result, *told)))
        answers.flush()


def answer(body: bytes) -> tuple[Any, ...]:
    """Call the function; return its result, or what it raised and where."""
    try:
        path, has_django, call = ForkingPickler.loads(body)
        sys.path[:] = path
        with _with_django() if has_django else nullcontext():
            # Not before: the arguments may be of classes that are found only now.
            module, name, args, kwargs = ForkingPickler.loads(call)
            found: Any = reduce(getattr, name.split("."), importlib.import_module(module))
            result = (True, found(*args, **kwargs))  # a task that is called is its function
            ForkingPickler.dumps(result)
    except BaseException as error:  # also SystemExit: the parent shall know
        return False, portable(error), "".join(traceback.format_exception(error))
    return result


@contextmanager
def _with_django() -> Iterator[None]:
    """Have models, which can be imported only now, and keep no broken or old connection."""
    import django
    from django.apps import apps
    from django.db import close_old_connections

    if not apps.ready:
        django.setup()
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


def packed(message: Any) -> bytes:
    """Return a message with its length in front."""
    body = bytes(ForkingPickler.dumps(message))
    return LENGTH.pack(len(body)) + body
