"""Faults of clocks: those of the workers are wrong by an hour, and that of the server jumps.

Workers have no say in what time it is, so for them nothing may change.  When the server's own
clock jumps, leases end too early or an hour late; that is a delay, and never a second owner.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

import psycopg

from faults.fault_run import Scene, fault, keep_every_promise
from faults.history.context import Context
from faults.workload import Load

HOUR = 3600
BY_THE_CLOCK = ("was accepted after it had failed", "was refused, and it was live")
"""The order of calls is known all the same, from themselves, and that of leases by tokens."""
LIBRARIES = ("libfaketimeMT.so.1", "libfaketime.so.1")
PLACES = ("/usr/lib", "/usr/lib64", "/usr/local/lib")


def find_faketime(name: str) -> str:
    """Return where a library is that tells a false time, or nothing."""
    patterns = (f"faketime/{name}", f"*/faketime/{name}")
    found = (p for place in PLACES for pattern in patterns for p in Path(place).glob(pattern))
    return str(next(found, ""))


def lacks_faketime() -> str:
    """Say what this machine lacks for false clocks, or nothing."""
    return "" if all(map(find_faketime, LIBRARIES)) else "needs the package faketime"


def falsified(file: Path, library: str) -> dict[str, str]:
    """Return the environment of a process whose clock is as the file says."""
    return {
        "LD_PRELOAD": find_faketime(library),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@fault("clocks", "jumps of workers' clocks by an hour", 60, minutes=2, lacks=lacks_faketime)
def clocks_of_workers(scene: Scene) -> None:
    """Let each of six workers live an hour before or after the others, and change it."""
    files = [scene.folder / f"clock-{number}" for number in range(6)]
    for number, file in enumerate(files):
        file.write_text(f"{(number % 3 - 1) * HOUR:+d}")
    environments = [falsified(file, LIBRARIES[0]) for file in files]
    skew = time.time_ns() // 1000 - time.monotonic_ns() // 1000
    with scene.load(workers=6, environments=environments, skew=skew) as load:
        load.pause(3.0)
        for _ in scene.rounds():
            file = scene.dice.choice(files)
            file.write_text(f"{scene.dice.choice([-HOUR, 0, HOUR]):+d}")
            load.pause(1.5)


def believe_the_calls(scene: Scene, context: Context) -> list[str]:
    """Judge without the two rules that compare a time of the server with a call's.

    Nor do the statistics tell of what ended before the clock had caught up.
    """
    dropped = [
        v for v in context.violations
        if v.problem.endswith(BY_THE_CLOCK) or _tells_of_less(v.problem)
    ]  # fmt: skip
    context.broken.subtract(v.promise for v in dropped)
    context.violations[:] = [v for v in context.violations if v not in dropped]
    return keep_every_promise(scene, context)


def _tells_of_less(problem: str) -> bool:
    found = re.search(r"(\d+) are told, and there are (\d+)", problem)
    return found is not None and int(found[1]) < int(found[2])


@fault("clock", "jumps of the server's clock by an hour or two", 40, minutes=3,
       judge=believe_the_calls, lacks=lacks_faketime)  # fmt: skip
def clock_of_server(scene: Scene) -> None:
    """Let the server's clock jump; the last jump is forward, so all comes due."""
    file = scene.folder / "clock"
    file.write_text("+0")
    server = scene.server(environment=falsified(file, LIBRARIES[1]))
    # A key that is free again at a time is not at an earlier one.
    options = {"has_keys": False}
    scene.forgiven = ("ended before it began",)
    offset = 0
    with scene.load(server.url(), producer_options=options) as load:
        load.pause(2.0)
        for number in scene.rounds():
            offset = scene.dice.choice([o for o in (-HOUR, 0, HOUR) if o != offset])
            if number == scene.times - 1:
                offset = 2 * HOUR
            _jump(file, offset)
            load.pause(4.0)
        load.clock = lambda: {"wall": _now(load)}


def _jump(file: Path, offset: int) -> None:
    part = file.with_suffix(".part")
    part.write_text(f"{offset:+d}")
    os.replace(part, file)


def _now(load: Load) -> int:
    with suppress(psycopg.OperationalError):
        load.ask("select pg_sleep(2)")  # until each session has seen the last jump
    return int(load.ask("select (extract(epoch from clock_timestamp()) * 1000000)::bigint"))
