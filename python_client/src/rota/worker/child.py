"""What runs in the process of a handler: take a function and its arguments, answer, again.

Messages are pickles, as the processes of multiprocessing send them: parent and child are one
program of one user.  Each stands behind its length in eight bytes.  The function is named by
its module, which is imported here, and not sent: it may be that of a task.
"""

from __future__ import annotations

import importlib
import os
import signal
import struct
import sys
import traceback
from functools import reduce
from multiprocessing.reduction import ForkingPickler
from typing import Any, BinaryIO

from .process import die_with

LENGTH = struct.Struct(">Q")


def main() -> None:
    """Answer until the parent closes the pipe."""
    die_with(int(sys.argv[1]), signal.SIGKILL)  # what it computes is of no use any more
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What a handler prints is no answer, and it has nobody to ask.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    while head := questions.read(LENGTH.size):
        body = questions.read(LENGTH.unpack(head)[0])
        send(answers, answer(body))


def answer(body: bytes) -> tuple[Any, ...]:
    """Call the function; return its result, or what it raised and where."""
    try:
        module, name, args, kwargs, path = ForkingPickler.loads(body)
        sys.path[:] = path
        found: Any = reduce(getattr, name.split("."), importlib.import_module(module))
        result = (True, getattr(found, "__wrapped__", found)(*args, **kwargs))
        ForkingPickler.dumps(result)
    except BaseException as error:  # also SystemExit: the parent shall know
        stack = "".join(traceback.format_exception(error))
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:
            kind = type(error)
            error = RuntimeError(f"{kind.__module__}.{kind.__qualname__}: {error}")
        return False, error, stack
    return result


def send(stream: BinaryIO, message: Any) -> None:
    """Write a message with its length."""
    stream.write(packed(message))
    stream.flush()


def packed(message: Any) -> bytes:
    """Return a message with its length in front."""
    body = bytes(ForkingPickler.dumps(message))
    return LENGTH.pack(len(body)) + body
