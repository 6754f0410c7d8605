"""The processes of a load: they can be killed, frozen and replaced, and write down all calls.

A server that has everything imported forks them, so one is at work a moment after its start,
and a thousand deaths are a matter of minutes.  Whoever dies takes his processes along.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from faults.history import recorder
from faults.history.recording import record
from faults.producer import MIX, PAUSE, Producer
from faults.workload_handlers import registry
from rota import Worker
from support.supervisor import Supervisor

TESTS = Path(__file__).resolve().parents[1]
LEASE = 1.0
TICK = 0.4
NEW_NAMESPACE = 0x40000000  # CLONE_NEWNET
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
Run = Callable[..., None]


@dataclass(frozen=True)
class Task:
    """What a process is told."""

    url: str
    folder: Path
    seed: str
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = ""
    """The network namespace that it lives in."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What it is started with; such a process is not forked but started anew."""
    by_database: bool = False
    """Whether there are many, with a folder for each."""
    skew: int | None = None
    """What to add to the clock of the calls, if its other clock is a false one."""


class Crew(Supervisor):
    """Processes that are forked, and all run the same."""

    def __init__(self, run: Run, task: Task, name: str, count: int, *arguments: Any) -> None:
        self._run, self._arguments = run, arguments
        self._tasks = [
            replace(task, name=f"{name}-{number}", seed=f"{task.seed} {name} {number}")
            for number in range(count)
        ]
        super().__init__(self._begin, count)

    def _begin(self, number: int) -> Any:
        task = self._tasks[number]
        context: Any = multiprocessing.get_context(
            "spawn" if task.environment else "forkserver"
        )
        if not task.environment:
            context.set_forkserver_preload(["__main__", "faults.processes"])
        process = context.Process(target=self._run, args=(task, *self._arguments), daemon=True)
        with _environment({"PYTHONPATH": str(TESTS), **task.environment}):
            process.start()
        return process


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def begin(task: Task) -> None:
    """Do what every process does first: be alone, be heard, and write down all calls."""
    os.setsid()  # Ctrl-C is for the conductor
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if task.namespace:
        with open(f"/run/netns/{task.namespace}") as there:
            if libc.setns(there.fileno(), NEW_NAMESPACE):
                raise OSError(ctypes.get_errno(), "setns")
    log = os.open(task.folder / f"{task.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    if task.skew is not None:
        recorder.both_clocks = partial(_clocks, task.skew)
        time.sleep = _sleep
    record(task.folder, by_database=task.by_database)


def _clocks(skew: int) -> dict[str, int]:
    at = time.monotonic_ns()
    return {"at": at, "wall": at // 1000 + skew}


def _sleep(seconds: Any) -> None:
    """Sleep by a call that takes a duration: libfaketime refuses those that take a moment."""
    select.select([], [], [], seconds)


def run_worker(task: Task) -> None:
    """Be a worker; one that cannot begin is started again, as a supervisor would do."""
    begin(task)
    options: dict[str, Any] = {"concurrency": 4, "poll_interval": 0.1, **task.options}
    lease = timedelta(seconds=LEASE)
    while True:
        worker = Worker(
            task.url, registry, name=task.name, lease=lease, tick_interval=TICK, **options
        )
        try:
            worker.run()
            return
        except psycopg.OperationalError as error:
            logging.warning("cannot begin: %s", error)
            time.sleep(0.2)


def run_producer(task: Task, limit: Any) -> None:
    """Be a producer."""
    begin(task)
    options: dict[str, Any] = {"mix": MIX, "has_keys": True, "pause": PAUSE, **task.options}
    Producer(task.url, task.seed, **options).run(limit)
