"""Functions that tests let run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import date
from functools import wraps
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import rota

registry = rota.Registry()


@registry.task(own_process=True, give_up_on=LookupError)
def days_until(day: date, begin: date = date(2026, 1, 1)) -> dict[str, int]:
    if day < begin:
        raise LookupError("it is over")
    return {"days": (day - begin).days, "pid": os.getpid()}


class Unpicklable(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, text: str, *, more: object) -> None:
        super().__init__(text)
        self.more = more


class Silent(Unpicklable):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Coded(Exception):
    """Would be made again with another text."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Thing:
    """Is equal to itself alone."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "snooze": lambda: rota.Snooze(3600),
    "retry_in": lambda: rota.RetryIn(3600),
    "fatal": lambda: rota.FatalError("never"),
    "unpicklable": lambda: Unpicklable("odd", more="more"),
    "coded": lambda: Coded(7),
    "thing": lambda: ValueError(Thing()),
    "file": lambda: FileNotFoundError(2, "no such file", "a.txt"),
    "bytes": lambda: UnicodeDecodeError("ascii", b"\xff", 0, 1, "not ascii"),
}


def raise_it(what: str) -> None:
    raise RAISED[what]()


def doubled(function: Callable[..., int]) -> Callable[..., int]:
    @wraps(function)
    def double(*args: Any, **kwargs: Any) -> int:
        return 2 * function(*args, **kwargs)

    return double


@doubled
def six() -> int:
    return 3


def square(number: int) -> int:
    os.write(1, b"what a handler prints goes to the log")
    return number * number


def own_pid() -> int:
    return os.getpid()


def refuse(text: str) -> None:
    raise LookupError(text)


def refuse_oddly(text: str) -> None:
    raise Unpicklable(text, more="more")


def refuse_for_good(text: str) -> None:
    raise Unpicklable(text, more=threading.Lock())


def refuse_without_a_text(text: str) -> None:
    raise Silent(text, more=threading.Lock())


def die() -> None:
    os._exit(7)


def die_and_leave_a_child() -> None:
    get_context("fork").Process(target=time.sleep, args=[40]).start()
    os._exit(7)


def close_all_and_leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=[40]).start()
    os.closerange(3, 256)


def leave_a_daemon_and_hang(started: str) -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(40)
        os._exit(0)
    hang(started)


def leave() -> None:
    raise SystemExit("no more")


def fork_one_that_leaves(code: int | None) -> int:
    """Let a child return from here, or leave by an exception; return its exit code."""
    child = os.fork()
    if child == 0:
        if code is not None:
            raise SystemExit(code)
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def return_what_cannot_be_sent() -> object:
    return lambda: None


def hang(started: str) -> None:
    """Start another program, tell the ids of both, and stay."""
    with subprocess.Popen(["sleep", "60"]) as other:
        written = Path(f"{started}.new")
        written.write_text(f"{os.getpid()} {other.pid}")
        written.rename(started)


def close_all_and_hang(started: str) -> None:
    """Do what a daemon does first, also with the pipe for the answer."""
    os.closerange(3, 256)
    hang(started)
