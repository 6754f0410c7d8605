"""The command ``rota``."""

import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from .cli import main
from .cli.output import LEFT_BEHIND

__all__ = ["main", "run"]

TIME_TO_END = 10.0
"""Seconds that the interpreter may wait, at its end, for what jobs have left."""


def run(argv: Sequence[str] | None = None, again: Sequence[str] | None = None) -> int:
    """Run one command, as `main`, and as the last thing that this process does."""
    code = main(argv, again)
    ending = threading.Timer(TIME_TO_END, _end)
    ending.daemon = True
    ending.start()
    return code


def _end() -> None:
    waited_for = [each for each in threading.enumerate() if not each.daemon]
    left = {
        "threads": [each.name for each in waited_for if each is not threading.main_thread()],
        "processes": [each.name for each in multiprocessing.active_children()],
    }
    told = [f"these {kind}: {', '.join(names)}" for kind, names in left.items() if names]
    text = "the process exits and leaves %s"
    what = " and ".join(told) or "a function of atexit, which has not returned"
    logging.getLogger("rota").error(text, what)
    logging.shutdown()
    with suppress(Exception):  # it may be closed already
        sys.stdout.flush()
    os._exit(LEFT_BEHIND)


if __name__ == "__main__":
    sys.exit(run())
