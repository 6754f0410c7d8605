"""Functions that tests let run in processes of their own."""

from __future__ import annotations

import os
import time
from datetime import date
from pathlib import Path

import rota

registry = rota.Registry()


@registry.task(own_process=True, give_up_on=LookupError)
def days_until(day: date, begin: date = date(2026, 1, 1)) -> dict[str, int]:
    if day < begin:
        raise LookupError("it is over")
    return {"days": (day - begin).days, "pid": os.getpid()}


class Unpicklable(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, text: str, *, more: str) -> None:
        super().__init__(text)
        self.more = more


def square(number: int) -> int:
    os.write(1, b"what a handler prints goes to the log")
    return number * number


def own_pid() -> int:
    return os.getpid()


def refuse(text: str) -> None:
    raise LookupError(text)


def refuse_oddly(text: str) -> None:
    raise Unpicklable(text, more="more")


def die() -> None:
    os._exit(7)


def leave() -> None:
    raise SystemExit("no more")


def return_what_cannot_be_sent() -> object:
    return lambda: None


def hang(started: str) -> None:
    Path(started).write_text(str(os.getpid()))
    while True:
        time.sleep(1)
