"""Faults that callers bring along: no patience, or another idea of a transaction."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

from psycopg.conninfo import make_conninfo

from faults.callers import run_callers
from faults.fault_run import Scene, fault
from faults.workload import Load

SERIALIZATION_FAILURE = "40001"
THREADS = 6


@fault("timeouts", "calls with 1 to 50 ms for statement and lock", 100_000, minutes=3)
def timeouts(scene: Scene) -> None:
    """Cut calls off at any point of their work."""
    with scene.load(workers=2, producers=1) as load:
        _call(scene, load, ["", ""], is_hurried=True)


@fault("isolation", "calls in other isolation levels, or read only", 20_000, minutes=1)
def isolation(scene: Scene) -> None:
    """Let callers have defaults that nobody thought of when he wrote his statements."""
    scene.general.add(SERIALIZATION_FAILURE)
    level, only = "default_transaction_isolation", "default_transaction_read_only"
    defaults = [
        f"-c {level}=repeatable\\ read",
        f"-c {level}=serializable",
        f"-c {only}=on",
        "",
    ]
    with scene.load(workers=2, producers=1) as load:
        _call(scene, load, defaults, is_hurried=False)


def _call(scene: Scene, load: Load, defaults: Sequence[str], *, is_hurried: bool) -> None:
    """Let a process of callers with each of the defaults take steps, so many in all."""
    calls: Any = multiprocessing.get_context("forkserver").Value("i", 0)
    for number, options in enumerate(defaults):
        url = make_conninfo(load.url, options=options) if options else load.url
        task = load.task(url=url, options={"is_hurried": is_hurried})
        load.add(run_callers, task, f"callers-{number}", 1, THREADS, calls, scene.times)
    while calls.value < scene.times:
        scene.done = calls.value
        load.pause(0.1)
    scene.done = scene.times
