"""Processes that are killed and frozen on purpose, and are replaced under the same names."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from support.waiting import DEADLINE, wait_until

GRACE = 20.0
"""Seconds that a process has to leave."""


class Process(Protocol):
    """What is needed of a process: those of multiprocessing have it."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class Command:
    """A command that runs; it appends what it says to *log*, where it can be waited for."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path | None,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.pid = self.process.pid
        self.kill, self.terminate = self.process.kill, self.process.terminate
        self.signal = self.process.send_signal

    @property
    def exitcode(self) -> int | None:
        return self.process.poll()

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)

    def wait(self, timeout: float = DEADLINE) -> int:
        """Return its exit code."""
        return self.process.wait(timeout)

    def lines(self, word: str) -> list[str]:
        """Return the lines of its log with this word."""
        return [line for line in self.log.read_text().splitlines() if word in line]

    def wait_for_line(self, word: str, count: int = 1) -> str:
        """Return the first line with this word when there are so many."""
        found: list[str] = wait_until(
            lambda: len(lines := self.lines(word)) >= count and lines, f"a line with {word!r}"
        )
        return found[0]


class Supervisor:
    """Keeps *count* processes at work; *start* starts the one of a number, from 0 on.

    By the signal of the *last_words* one that does not leave tells what it is doing.
    """

    def __init__(
        self,
        start: Callable[[int], Process],
        count: int,
        last_words: signal.Signals | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.exits: Counter[int] = Counter()
        """How often each exit code was seen."""
        self.killed: set[int] = set()
        """The process ids of those that were killed, also by themselves."""
        self._start = start
        self._last_words = last_words
        self._processes = [start(number) for number in range(count)]
        self._frozen: dict[int, threading.Timer] = {}

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> set[int]:
        """Their process ids."""
        return {process.pid for process in self._processes if process.pid is not None}

    @property
    def frozen(self) -> int:
        """How many are frozen now."""
        return sum(timer.is_alive() for timer in self._frozen.values())

    def kill(self, number: int) -> None:
        """Kill one and start it again."""
        self._forget_timer(number)
        self._processes[number].kill()
        self._replace(number)
        self.counts["killed"] += 1

    def freeze(self, number: int, seconds: float) -> bool:
        """Freeze one for some time; return whether it was not frozen before.

        A thread lets it go on: whoever has frozen it may be waiting for what it has locked.
        """
        if number in self._frozen and self._frozen[number].is_alive():
            return False
        process = self._processes[number]
        _send(process, signal.SIGSTOP)
        self._frozen[number] = timer = threading.Timer(
            seconds, _send, [process, signal.SIGCONT]
        )
        timer.daemon = True
        timer.start()
        self.counts["frozen"] += 1
        return True

    def hurt(self, dice: random.Random, share: float, seconds: float) -> None:
        """Kill any of them, or freeze it in that share of the cases."""
        number = dice.randrange(len(self._processes))
        if not (dice.random() < share and self.freeze(number, seconds)):
            self.kill(number)

    def thaw(self) -> None:
        """Let all go on that are frozen."""
        for number in list(self._frozen):
            self._forget_timer(number)
            _send(self._processes[number], signal.SIGCONT)

    def look(self) -> None:
        """Start those again that have ended by themselves."""
        for number, process in enumerate(self._processes):
            if process.exitcode is not None:
                self.counts["ended by themselves"] += 1
                self._forget_timer(number)
                self._replace(number)

    def stop(self) -> None:
        """End all of them, by force those that do not go."""
        self.thaw()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(GRACE)
            if process.exitcode is None:
                self.counts["did not leave"] += 1
                if self._last_words is not None:
                    _send(process, self._last_words)
                    process.join(1.0)
                process.kill()
            self._bury(process)
        self._processes.clear()

    def _replace(self, number: int) -> None:
        self._bury(self._processes[number])
        self._processes[number] = self._start(number)

    def _bury(self, process: Process) -> None:
        process.join()
        code: Any = process.exitcode
        self.exits[code] += 1
        if code == -signal.SIGKILL and process.pid is not None:
            self.killed.add(process.pid)

    def _forget_timer(self, number: int) -> None:
        if (timer := self._frozen.pop(number, None)) is not None:
            timer.cancel()


@contextmanager
def running(
    start: Callable[[], Process], last_words: signal.Signals | None = None
) -> Iterator[Supervisor]:
    """Keep one process at work, and see that it ends when it is told to."""
    supervisor = Supervisor(lambda _: start(), 1, last_words)
    try:
        yield supervisor
    finally:
        supervisor.stop()
    assert not supervisor.counts["did not leave"], "a process did not end; it tells above why"


@contextmanager
def killing() -> Iterator[list[Any]]:
    """Kill at the end what of the commands in the list still runs."""
    started: list[Command] = []
    try:
        yield started
    finally:
        for command in started:
            command.kill()
            command.join()


def _send(process: Process, number: signal.Signals) -> None:
    if process.pid is not None and process.exitcode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
