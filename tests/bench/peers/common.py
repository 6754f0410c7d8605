"""What the programs of all peers share; plain Python, for each has an environment of its own.

A program is called with one step: `fill`, `work`, `listen` or `produce`.  It finds in its
environment DATABASE_URL, BENCH_JOBS (how many to fill in), BENCH_SECONDS and BENCH_FIRST (how
long to produce, from which number on) and BENCH_FILE.  That is for `work` a directory in which
each process leaves a file when its first job starts, and for `listen` and `produce` a file
with a line `number nanoseconds` for each job, taken when its handler begins, or just before
its enqueue is sent.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

JOBS = int(os.environ.get("BENCH_JOBS", "0"))
SECONDS = float(os.environ.get("BENCH_SECONDS", "0"))
FIRST = int(os.environ.get("BENCH_FIRST", "0"))
FILE = Path(os.environ.get("BENCH_FILE", "/dev/null"))
URL = os.environ.get("DATABASE_URL", "")
CHUNK = 5_000
_has_begun = False


def begin() -> None:
    """Leave the file that says that this process has started its first job."""
    global _has_begun
    if not _has_begun:
        _has_begun = True
        (FILE / str(os.getpid())).touch()


class Times:
    """Writes down when something happened to a job."""

    def __init__(self) -> None:
        self._file = FILE.open("ab", buffering=0)

    def add(self, number: int) -> None:
        """Take the time now."""
        now = time.time_ns()
        self._file.write(b"%d %d\n" % (number, now))


def chunks() -> Iterator[range]:
    """Cut the numbers of the jobs into pieces fit for one call."""
    for first in range(0, JOBS, CHUNK):
        yield range(first, min(first + CHUNK, JOBS))


async def pace() -> AsyncIterator[int]:
    """Give a number every 20 ms or so, for as long as shall be produced."""
    end = time.monotonic() + SECONDS
    due = time.monotonic()
    number = FIRST
    while due < end:
        yield number
        number += 1
        due += random.uniform(0.015, 0.025)
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def until_told() -> None:
    """Wait for SIGTERM."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    await told.wait()


Step = Callable[[], Coroutine[Any, Any, None]]


def main(steps: dict[str, Step], run: Callable[..., None] = asyncio.run) -> None:
    """Take the step that the command line names."""
    run(steps[sys.argv[1]]())
