"""Throw hostile arguments at every public function, by the million; what `make fuzz` does.

    arguments.py [--calls N] [--seed N] [--processes N] [--only REGEX]

A call must succeed, or raise what the comment of its function names: 22023 with a message that
begins with the name of an argument, or one of its RT codes.  It must write nothing before it
refuses, leave no lock of the session behind, and take no longer than 100 ms.  What succeeds
must not stop anything later (judge.py says what is tried).  Whatever is found is made as small
as it can be and printed as a line for psql; filled_database.py has the world it speaks of.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import filled_database
from fuzz.arena import Arena, Finding, Key, refused_values
from fuzz.calls import Call, Chooser
from rota.schema import run_script
from rota.testing import EmbeddedPostgres

BATCH = 100
CHUNK = 10_000
WORLD = "fuzz_world"
_seen: set[Key] = set()  # by this process
SETTINGS = (
    "begin",
    "begin; set local timezone = 'America/Sao_Paulo'; set local datestyle = 'German'",
    "begin; set local timezone = 'Pacific/Apia'; set local intervalstyle = 'sql_standard'",
    "begin; set local intervalstyle = 'iso_8601'; set local extra_float_digits = -15",
    "begin; set local search_path = ''; set local check_function_bodies = off",
    "begin; set local bytea_output = 'escape'; set local lc_messages = 'C'",
)
OTHER_ISOLATION = (
    "begin isolation level repeatable read",
    "begin isolation level serializable",
)


@dataclass
class Tally:
    """What a player saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)
    findings: dict[Key, Finding] = field(default_factory=dict)
    slowest: dict[bool, tuple[float, str]] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        known = self.findings.setdefault(finding.key, finding)
        known.count += finding.count if known is not finding else 0

    def merge(self, other: Tally) -> None:
        """Count what another player saw."""
        self.outcomes += other.outcomes
        self.functions += other.functions
        for finding in other.findings.values():
            self.add(finding)
        for is_big, slow in other.slowest.items():
            self.slowest[is_big] = max(self.slowest.get(is_big, slow), slow)

    def count(self, call: Call, verdict: Any) -> None:
        self.outcomes[verdict.state] += 1
        self.functions[call.function.name] += 1
        if verdict.milliseconds > self.slowest.get(call.is_big, (0.0, ""))[0]:
            self.slowest[call.is_big] = (verdict.milliseconds, call.line())


def play(
    url: str,
    calls: int,
    seed: int,
    only: str = "",
    seen: set[Key] | None = None,
    patience: float = 1,
) -> Tally:
    """Make so many calls in a database that has a world; what was *seen* is not made small."""
    seen = set() if seen is None else seen
    dice, tally = random.Random(seed), Tally()
    with Arena(url, only, patience) as arena:
        chooser = Chooser(dice, arena.functions, arena.jobs, refused_values(arena.db))
        for _ in range(0, calls, BATCH):
            is_other = dice.random() < 0.02
            begin = dice.choice(OTHER_ISOLATION if is_other else SETTINGS)
            batch = [chooser.call() for _ in range(BATCH)]
            if is_other:  # what is tried later has to claim
                batch = [replace(call, how_to="undo") for call in batch]
            try:
                verdicts = arena.run(batch, begin)
            except psycopg.OperationalError as error:
                if not arena.db.closed:
                    raise
                tally.add(Finding("takes the session down", batch, begin, str(error)))
                arena.connect()
                continue
            for place, verdict in enumerate(verdicts):
                note(tally, arena, batch[: place + 1], begin, verdict, seen)
    return tally


def note(
    tally: Tally, arena: Arena, calls: list[Call], begin: str, verdict: Any, seen: set[Key]
) -> None:
    """Take down how the last of the calls went, and if it is new what is wrong, made small."""
    *before, call = calls
    tally.count(call, verdict)
    problem = arena.problem(call, verdict)
    if problem is None:
        return
    kept = [one for one in before if one.how_to == "keep"]
    finding = Finding(problem, [*kept, call], begin, verdict.message or "")
    if finding.key not in seen:
        seen.add(finding.key)
        smallest = arena.shrunk(finding)
        if smallest is None and problem == "slow":
            tally.outcomes["slow once"] += 1
            return
        finding = smallest or finding
        seen.add(finding.key)
    tally.add(finding)


@contextmanager
def world_server() -> Iterator[EmbeddedPostgres]:
    """Start a server with a world to take copies of."""
    settings = ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
    bindir = os.environ.get("ROTA_PG_BINDIR")
    with EmbeddedPostgres(bindir=bindir, settings=settings) as server:
        with psycopg.connect(server.url("template1"), autocommit=True) as connection:
            connection.execute(f"create database {WORLD}")
        with psycopg.connect(server.url(WORLD), autocommit=True) as connection:
            run_script(connection, "install.sql", {})
            filled_database.build(connection)
        yield server


def play_in_copy(url: str, name: str, calls: int, seed: int, only: str) -> Tally:
    """Play in a copy of the world, which is thrown away: what is undone stays in the way."""
    with psycopg.connect(url + "template1", autocommit=True) as connection:
        connection.execute(f"create database {name} template {WORLD}")
        try:
            return play(url + name, calls, seed, only, _seen)
        finally:
            connection.execute(f"drop database {name} with (force)")


def show(done: int, total: int, seconds: float, findings: int) -> None:
    """Draw the bar, or a line where there is no terminal."""
    rate, is_terminal = done / seconds, sys.stderr.isatty()
    bar = "#" * (30 * done // total)
    line = (
        f"[{bar:<30}] {done}/{total} calls, {rate:.0f}/s, {(total - done) / rate:.0f} s left,"
    )
    line += f" {findings} findings"
    print(f"\r{line}" if is_terminal else line, end="" if is_terminal else "\n",
          file=sys.stderr, flush=True)  # fmt: skip


def report(tally: Tally, seconds: float) -> None:
    """Tell what was found, and what was seen."""
    for finding in sorted(tally.findings.values(), key=lambda finding: finding.key):
        print(f"\n{finding}")
    print(f"\n{sum(tally.functions.values())} calls of {len(tally.functions)} functions")
    print(", ".join(f"{count} {state}" for state, count in tally.outcomes.most_common()))
    for is_big, (slowest, line) in sorted(tally.slowest.items()):
        size = "with a value of up to 10 MB" if is_big else "of all others"
        print(f"the slowest {size} took {slowest:.0f} ms: {line[:300]}")
    print(f"{seconds:.0f} s, {len(tally.findings)} findings")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="functions, as a regular expression")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    started, done, tally = time.monotonic(), 0, Tally()
    with world_server() as server:
        shares = [
            (server.url(""), f"fuzz{number}", min(CHUNK, arguments.calls - at),
             arguments.seed * 10_000 + number, arguments.only)
            for number, at in enumerate(range(0, arguments.calls, CHUNK))
        ]  # fmt: skip
        with ProcessPoolExecutor(arguments.processes) as pool:
            for player in as_completed([pool.submit(play_in_copy, *share) for share in shares]):
                known = set(tally.findings)
                tally.merge(player.result())
                for key in tally.findings.keys() - known:
                    print(f"\n{tally.findings[key]}", flush=True)
                done = sum(tally.functions.values())
                show(done, arguments.calls, time.monotonic() - started, len(tally.findings))
    report(tally, time.monotonic() - started)
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
