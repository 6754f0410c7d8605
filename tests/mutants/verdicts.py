"""What a run tells while it goes, and the table that it leaves in the README.

The table is also read: the test that killed a mutant the last time is the first to be asked.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mutants.everything import BY_NAME
from mutants.trial import Verdict

README = Path(__file__).with_name("README.md")
HEADING = "## Who killed whom\n"
TABLE = ("| mutant | what it breaks | killed by |", "|---|---|---|")
ROW = re.compile(r"^\| ([a-z-]+) \| .*? \| `([\w/]+\.py)::(\w+)`", re.MULTILINE)


class Bar:
    """A line for each verdict, and below them on a terminal how far the run is."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._survivors = total, 0, 0
        self._began = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def add(self, verdict: Verdict) -> None:
        """Tell what came of one mutant."""
        self._done += 1
        self._survivors += verdict.outcome != "killed"
        line = (
            f"{self._done:>4}/{self._total} {verdict.outcome:<9}{verdict.seconds:5.0f} s  "
            f"{verdict.mutant.name}  {verdict.test}  {verdict.reason[:80]}".rstrip()
        )
        print(f"\r\033[K{line}" if self._is_terminal else line, file=sys.stderr, flush=True)
        if self._is_terminal and self._done < self._total:
            self._draw()

    def _draw(self) -> None:
        seconds = time.monotonic() - self._began
        left = seconds / self._done * (self._total - self._done)
        bar = "#" * (30 * self._done // self._total)
        print(
            f"[{bar:<30}] {self._done}/{self._total}  {self._survivors} not killed  "
            f"{seconds:.0f} s, {left:.0f} s left",
            end="",
            file=sys.stderr,
            flush=True,
        )


class Record:
    """The verdicts of a run in a file, so that a run which was stopped can go on."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def begin(self, is_resumed: bool) -> list[Verdict]:
        """Return the kills that are recorded if the run goes on; else forget all."""
        lines: list[str] = []
        if is_resumed and self._file.exists():
            lines = self._file.read_text().splitlines()
        else:
            self._file.unlink(missing_ok=True)
        told = {record["mutant"]: record for record in map(json.loads, lines)}
        return [
            Verdict(**{**record, "mutant": BY_NAME[name]})
            for name, record in told.items()
            if name in BY_NAME and record["outcome"] == "killed"
        ]

    def add(self, verdict: Verdict) -> None:
        """Write a verdict down."""
        self._file.parent.mkdir(exist_ok=True)
        with self._file.open("a") as file:
            record = {**asdict(verdict), "mutant": verdict.mutant.name}
            file.write(f"{json.dumps(record)}\n")


def row(verdict: Verdict) -> str:
    """Return the row of the table for a verdict."""
    told = f"`{verdict.function}`" if verdict.outcome == "killed" else verdict.outcome
    told += ", which hung" if verdict.reason == "hung" else ""
    return f"| {verdict.mutant.name} | {verdict.mutant.breaks} | {told} |"


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as a table."""
    return "\n".join([*TABLE, *map(row, verdicts)])


def write(verdicts: Sequence[Verdict], told: str) -> None:
    """Put the table of a run into the README, and in front of it what the run said."""
    text = README.read_text().partition(HEADING)[0]
    today = time.strftime("%Y-%m-%d", time.gmtime())
    README.write_text(
        f"{text}{HEADING}\nWritten by `make mutants ARGS=--write` on {today}: {told}.\n\n"
        f"{table(verdicts)}\n"
    )


def amend(verdicts: Sequence[Verdict]) -> None:
    """Put the rows of a run of some mutants where they belong in the table of the README."""
    text, heading, told = README.read_text().partition(HEADING)
    told, head, rows = told.partition(TABLE[1] + "\n")
    known = {line.split(" | ")[0].removeprefix("| "): line for line in rows.splitlines()}
    known |= {verdict.mutant.name: row(verdict) for verdict in verdicts}
    rows = "".join(f"{known[name]}\n" for name in BY_NAME if name in known)
    README.write_text(f"{text}{heading}{told}{head}{rows}")


def last_killers(tests: Path) -> dict[str, str]:
    """Return by mutant the test that killed it in the run of the README, if it still is."""
    return {
        name: f"{file}::{test}"
        for name, file, test in ROW.findall(README.read_text())
        if (tests / file).is_file()
        and re.search(rf"\bdef {test}\(", (tests / file).read_text())
    }
