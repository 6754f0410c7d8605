"""How many claimed jobs a worker holds that cannot start at once.

They are there so that no place is free while the next claim is under way.  But a job that
waits here waits for this worker alone, so the worker takes no more than it is likely to start
soon, from the rate at which its jobs have ended lately, and gives back what has waited long.
"""

from __future__ import annotations

import time

MAX_BATCH = 1000
AHEAD = 0.2
"""Seconds for which there shall be work at hand."""
WINDOW = 0.05
"""Seconds after which the rate is looked at again."""
MAX_WAIT = 2.0
"""Seconds after which a job that has not been started is given back."""


class Supply:
    """Counts what ends; *batch* is a number of jobs that the user wants to hold anyway."""

    def __init__(self, batch: int | None) -> None:
        self._batch = batch
        self._rate = 0.0
        self._ended = 0
        self._since = time.monotonic()

    @property
    def max_wait(self) -> float | None:
        """How long a job may wait to be started, unless that is the user's choice."""
        return MAX_WAIT if self._batch is None else None

    def count(self) -> None:
        """Note that a handler has ended."""
        self._ended += 1

    def wanted(self, free: int, waiting: int) -> int:
        """Return how many jobs to claim, with so many free places and jobs that wait."""
        batch = self._look_ahead() if self._batch is None else self._batch
        if free - waiting <= 0 and waiting >= batch // 2:
            return 0
        return min(max(free - waiting, batch), MAX_BATCH)

    def _look_ahead(self) -> int:
        elapsed = time.monotonic() - self._since
        if elapsed >= WINDOW:
            # What is long ago says nothing, so after a pause it begins with few again.
            weight = min(elapsed, 0.5) + 0.5
            self._rate = weight * self._ended / elapsed + (1.0 - weight) * self._rate
            self._ended = 0
            self._since += elapsed
        return int(self._rate * AHEAD)
