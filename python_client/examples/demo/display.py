"""What the demo prints: one line per event, and on a terminal a live list of the jobs."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .mail import message_id
from .records import Run
from .story import Part

COLORS = {
    "queued": "cyan",
    "running": "yellow",
    "failed": "red",
    "succeeded": "green",
    "dead": "magenta",
}


def make_console(*, is_plain: bool) -> Console:
    """Return the console; a plain one has neither colours nor cursor movement."""
    is_terminal = sys.stdout.isatty()
    if is_plain or os.environ.get("NO_COLOR") or not is_terminal or Console().is_dumb_terminal:
        width = None if is_terminal else 108
        return Console(no_color=True, force_terminal=False, width=width, highlight=False)
    return Console(highlight=False)


class Display:
    """Shows the play while it goes on; use it in a ``with`` block."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._parts: dict[str, Part] = {}
        self._runs: dict[int, Run] = {}
        self._mails: Counter[str] = Counter()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, transient=True, refresh_per_second=8)

    def expect(self, parts: Sequence[Part]) -> None:
        """Learn what the jobs are about."""
        self._parts = {part.key: part for part in parts}

    def say(self, text: str, style: str = "bold") -> None:
        """Print one event with its time."""
        seconds = time.monotonic() - self._begun
        line = Text(f"{seconds:6.1f} s  ", "dim") + Text(text, style)
        self._console.print(line, soft_wrap=True)

    def show(self, runs: Sequence[Run], mails: Counter[str]) -> None:
        """Print what is new since the last call, and renew the live list."""
        changed = [run for run in runs if run != self._runs.get(run.id)]
        for run in changed:
            self._tell_begin(run, self._runs.get(run.id))
        for part in self._parts.values():
            if mails[message_id(part.key)] > self._mails[message_id(part.key)]:
                self.say(f"the provider has the mail to {part.about}", "blue")
        for run in changed:
            self._tell_end(run, self._runs.get(run.id))
        self._mails, self._runs = mails, {run.id: run for run in runs}
        if self._live is not None:
            rows = Table(box=None, padding=(0, 2, 0, 0))
            for title in ("id", "job", "status", "attempt", "worker", ""):
                rows.add_column(title, no_wrap=True)
            for run in runs:
                rows.add_row(*self._cells(run))
            self._live.update(Group(Text(), rows))

    def _tell_begin(self, run: Run, before: Run | None) -> None:
        if run.status == "running" and (before is None or run.attempts > before.attempts):
            text = f"{self._name(run)}: attempt {run.attempts}, {run.worker}"
            self.say(text, COLORS["running"])

    def _tell_end(self, run: Run, before: Run | None) -> None:
        for failure in run.failures[len(before.failures) if before else 0 :]:
            text = f"{self._name(run)}: attempt {failure.attempt} failed, {failure.message}"
            self.say(text, COLORS["failed"])
        if before is not None and (run.status, run.attempts) == (
            before.status,
            before.attempts,
        ):
            return
        if run.status == "failed":
            self.say(f"{self._name(run)}: next try in {run.seconds:.1f} s", COLORS["failed"])
        elif run.is_over:
            result = f": {run.result}" if run.result else ""
            self.say(f"{self._name(run)} {run.status}{result}", COLORS[run.status])

    def _name(self, run: Run) -> str:
        return f"{run.job_type} ({self._parts[run.idempotency_key].about})"

    def _cells(self, run: Run) -> list[Any]:
        clock = ""
        if run.status == "running":
            clock = f"lease {max(run.seconds, 0):.1f} s"
        elif run.status == "failed":
            clock = f"retry {max(run.seconds, 0):.1f} s"
        status = Text(run.status, COLORS.get(run.status, ""))
        attempt = str(run.attempts) if run.attempts else ""
        return [str(run.id), self._name(run), status, attempt, run.worker or "", clock]

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()
