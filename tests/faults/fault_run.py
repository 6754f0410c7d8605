"""One fault from its first blow to the judgement, and the list of all faults.

A fault is a function that gets a `Scene`: there it finds its servers, its load and how often it
has to strike, and all that it opens is closed with the scene.  What happened is recorded, and
when the load has come to rest the history is held against the promise.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg

from faults.history import checker
from faults.history.context import Context
from faults.history.dump import dump
from faults.history.recording import record, stop_recording
from faults.workload import Load
from invariants import BROKEN
from support.server import Server

EVERYTHING = 1 << 30
Judge = Callable[["Scene", Context], list[str]]
FAULTS: dict[str, Fault] = {}


@dataclass(frozen=True)
class Fault:
    """How to do what how often; *minutes* are a guess for scale 1, not a measurement."""

    name: str
    what: str
    times: int
    minutes: float
    play: Callable[[Scene], None]
    judge: Judge
    lacks: Callable[[], str]
    """Says what this machine lacks for it, or nothing."""


def fault(
    name: str,
    what: str,
    times: int,
    *,
    minutes: float,
    judge: Judge | None = None,
    lacks: Callable[[], str] = str,
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Put a function on the list of the faults."""

    def register(play: Callable[[Scene], None]) -> Callable[[Scene], None]:
        judged = judge or keep_every_promise
        FAULTS[name] = Fault(name, what, times, minutes, play, judged, lacks)
        return play

    return register


def keep_every_promise(scene: Scene, context: Context) -> list[str]:
    """Judge a fault that must do no harm."""
    return [f"{each} ({each.subject})\n{each.story}" for each in context.violations]


def be_found(scene: Scene, context: Context) -> list[str]:
    """Judge a canary: who does not name each lost job, or finds nothing, is blind."""
    named = {violation.subject for violation in context.violations}
    missed = [
        f"job {lost} was lost, unseen" for lost in scene.found if f"job {lost}" not in named
    ]
    return missed if named else [*missed, "nothing was found, so nothing was shown"]


@dataclass(frozen=True)
class Verdict:
    """What came of a fault."""

    line: str
    problems: list[str]


class Scene:
    """What a fault works with; leave the `with` block to close it all."""

    def __init__(
        self,
        name: str,
        scale: float,
        seed: int,
        folder: Path,
        *,
        url: str = "",
        show: Callable[[int, int], None] = lambda done, times: None,
    ) -> None:
        self.fault, self.scale, self.seed = FAULTS[name], scale, seed
        self.folder, self.history = folder, folder / "history"
        self.times, self.done = max(1, round(self.fault.times * scale)), 0
        self.dice = random.Random(f"{seed} {name}")
        self.counts: Counter[str] = Counter()
        self.general: set[str] = set()
        """More errors that any call may meet here."""
        self.forgiven: tuple[str, ...] = ()
        """Invariants of the tables that this fault may break."""
        self.found: list[Any] = []
        """What the fault has seen itself to be lost, for its judge."""
        self.stack = ExitStack()
        self._began = time.monotonic()
        self._url, self._show = url, show
        self._broken: list[str] = []
        self._troubles: dict[str, int] = {}
        self.history.mkdir(parents=True)

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stack.close()

    def server(self, *settings: str, name: str = "server", **options: Any) -> Server:
        """Return a new server with rota in it."""
        home = self.folder / name
        home.mkdir()
        self.stack.callback(shutil.rmtree, home, ignore_errors=True)
        server = Server.create(home, settings, **options)
        self.stack.callback(server.destroy)
        return server

    def url(self) -> str:
        """Return where a database with rota is, for those who need no server of their own."""
        return self._url or self.server().url()

    def rounds(self) -> Iterator[int]:
        """Count how often it struck, as often as it has to."""
        for number in range(self.times):
            yield number
            self.done = number + 1

    def show(self) -> None:
        """Tell how far it is."""
        self._show(self.done, self.times)

    @contextmanager
    def load(self, url: str = "", **options: Any) -> Iterator[Load]:
        """Run a load within the block, let it come to rest, and dump what came of it."""
        record(self.history)
        seed = f"{self.seed} {self.fault.name}"
        load = Load(url or self.url(), self.history, seed, show=self.show, **options)
        try:
            load.start()
            yield load
            load.rest()
        finally:
            load.stop()
            stop_recording()
        self._troubles = load.troubles()
        dump(load.observed, self.history, is_drained=load.is_drained)
        self._look_at_tables(load.observed)

    def judge(self) -> Verdict:
        """Return what the checker says to all that happened."""
        seconds = time.monotonic() - self._began
        context = checker.check(
            self.history, general=frozenset(self.general), stories=EVERYTHING
        )
        problems = self.fault.judge(self, context)
        problems += [*self._broken, *(f"{n} {what}" for what, n in self._troubles.items())]
        if not context.counts["jobs"]:
            problems.append("there were no jobs")
        if self.done < self.times:
            problems.append(f"it struck {self.done} times of {self.times}")
        counts = context.counts
        told = "".join(f", {number:,} {name}" for name, number in sorted(self.counts.items()))
        line = (
            f"{self.fault.name:<11}{self.done:>7,} {self.fault.what}{told}; "
            f"{counts['operations']:,} operations, {counts['jobs']:,} jobs, "
            f"{counts['unknown']:,} unknown replies, {counts['run out']:,} leases run out, "
            f"{counts['stale']:,} stale tokens refused, "
            f"{sum(context.broken.values()):,} violations, {seconds:.0f} s"
        )
        return Verdict(line, problems)

    def _look_at_tables(self, url: str) -> None:
        with psycopg.connect(url, autocommit=True, prepare_threshold=None) as db:
            db.execute("set jit = off")
            for rule, job_id in db.execute(BROKEN.encode()).fetchall():
                if rule not in self.forgiven:
                    self._broken.append(f"job {job_id} {rule}")
