"""A progress bar for the commands that play for long."""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import sys
import time


class Bar:
    """A bar with a rate and the time left; a line every ten seconds where no screen is.

    What was *done* before it began does not count for the rate.
    """

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self._name, self._total, self._first = name, total, done
        self._began, self._next = time.monotonic(), 0.0
        self._is_full = False

    @property
    def seconds(self) -> float:
        """How long it has been there."""
        return time.monotonic() - self._began

    def show(self, done: int) -> None:
        """Tell that so much is done, unless that was told a moment ago."""
        is_terminal, now = sys.stderr.isatty(), time.monotonic()
        if now < self._next and (done < self._total or self._is_full):
            return
        self._is_full = done >= self._total
        self._next = now + (0.2 if is_terminal else 10)
        rate = (done - self._first) / max(self.seconds, 0.001)
        left = max(0, self._total - done) / rate if rate else 0
        bar = "#" * (30 * min(done, self._total) // max(self._total, 1))
        line = f"{self._name:<8} [{bar:<30}] {done:>6}/{self._total}"
        line += f"  {rate:.1f}/s  {left:.0f} s left  "
        print(f"\r{line}" if is_terminal else line, end="" if is_terminal else "\n",
              file=sys.stderr, flush=True)  # fmt: skip
