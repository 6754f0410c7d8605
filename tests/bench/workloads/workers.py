"""Draining jobs that do nothing with a real worker, against the workers of other queues.

Start-up does not count: the clock starts when every process has started its first job, and
runs to the end of the last one.  What has ended is counted in the tables, from outside and in
the same way for all, 20 ms apart where it matters.  Who needs longer than the limit is
measured as far as it came.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench.figures import Figure, Missing, Ratio, Reading
from bench.measured_server import BenchServer, Db, one
from bench.peers.catalogue import (
    BARE,
    PEERS,
    PGQ,
    ROTA,
    ROTA_THREADS,
    NotInstalledError,
    Peer,
)
from bench.peers.fleet import PeerError, Program, call

NUMBER = 3
GOAL = 1.3
PROCESSES = 4
NO_FOUR = "its consumer is one process; the package has no way to share a queue's batches"
PATIENCE = 60
"""Seconds that the processes may take to start."""
POLL = 0.02
MAX_POLL = 0.2
Entry = tuple[Peer, int]
EVERYBODY = [ROTA, ROTA_THREADS, BARE, *PEERS, PGQ]


@dataclass
class Drain:
    """What a run gave: jobs a second, and microseconds of CPU for each."""

    rate: float
    worker_cpu: float
    server_cpu: float


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    jobs, limit = (10_000, 2.0) if is_quick else (50_000, 10.0)
    entries: list[Entry] = [(peer, 1) for peer in EVERYBODY]
    if not is_quick:
        entries += [(peer, PROCESSES) for peer in (ROTA, *PEERS)]
    found: defaultdict[tuple[str, int], list[Drain]] = defaultdict(list)
    missing: dict[tuple[str, int], str] = {(PGQ.name, PROCESSES): NO_FOUR}
    for _ in range(rounds):
        for peer, processes in random.sample(entries, len(entries)):
            key = (peer.name, processes)
            if key in missing:
                continue
            try:
                found[key].append(one_drain(server, peer, processes, jobs, limit))
            except (NotInstalledError, PeerError, psycopg.Error) as error:
                missing[key] = str(error).splitlines()[0]
    for processes in (1, PROCESSES):
        yield from figures(processes, found, missing)


def one_drain(
    server: BenchServer, peer: Peer, processes: int, jobs: int, limit: float
) -> Drain:
    """Fill a new database and let so many processes drain it."""
    peer.command("work")  # installs, or raises, before anything else is done
    dsn = server.fresh("workers")
    call(peer, "fill", dsn, jobs=jobs)
    with ExitStack() as stack:
        db = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        db.execute("vacuum analyze")
        marks = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        programs = [
            stack.enter_context(Program(peer, "work", dsn, file=marks, jobs=jobs))
            for _ in range(processes)
        ]
        first = wait_for_all(db, peer, marks, programs, jobs)
        worker_cpu = sum(program.cpu for program in programs)
        server_cpu = server.cpu()
        began = time.perf_counter()
        left, seconds = watch(db, peer, programs, first, began, limit)
        done = first - left
        worker_cpu = sum(program.cpu for program in programs) - worker_cpu
        server_cpu = server.cpu() - server_cpu
    server.drop("workers")
    return Drain(done / seconds, worker_cpu / done * 1e6, server_cpu / done * 1e6)


def wait_for_all(db: Db, peer: Peer, marks: Path, programs: list[Program], jobs: int) -> int:
    """Wait until each process has begun, or half of the jobs are gone; return how many wait."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        for program in programs:
            program.check()
        begun = sum(1 for _ in marks.iterdir())
        left: int = one(db, peer.waiting)
        if left < jobs and (begun == len(programs) or left < jobs / 2):
            return left
        time.sleep(POLL)
    raise PeerError(f"no job was ended in {PATIENCE} s")


def watch(
    db: Db, peer: Peer, programs: list[Program], first: int, began: float, limit: float
) -> tuple[int, float]:
    """Count until none waits or the time is up; return how many wait, and the seconds."""
    while True:
        left: int = one(db, peer.waiting)
        seconds = time.perf_counter() - began
        if left <= 0 or seconds >= limit:
            if left == first:
                raise PeerError(f"it ended no job in {limit:.0f} s")
            return left, seconds
        for program in programs:
            program.check()
        # A count costs the server something, so it is rare while much is left.
        expected = left * seconds / (first - left) if left < first else 0.0
        time.sleep(min(max(expected / 10, POLL), MAX_POLL))


def figures(
    processes: int,
    found: dict[tuple[str, int], list[Drain]],
    missing: dict[tuple[str, int], str],
) -> Iterator[Figure]:
    """Say how fast each was, and how rota compares with the best of the others."""
    of = f"{processes} process{'es' if processes > 1 else ''}"
    rates = {
        peer.name: [drain.rate for drain in found[peer.name, processes]]
        for peer in EVERYBODY
        if (peer.name, processes) not in missing and found[peer.name, processes]
    }
    rivals = [peer.name for peer in PEERS if peer.name in rates]
    if ROTA.name in rates and rivals:
        best = max(rivals, key=lambda name: statistics.median(rates[name]))
        yield Ratio(
            number=NUMBER,
            name=f"worker, {of}, against the best peer",
            unit="jobs/s",
            ours=rates[ROTA.name],
            theirs=rates[best],
            yardstick=best,
            goal=GOAL,
        )
    for peer in EVERYBODY:
        key = (peer.name, processes)
        if key in missing:
            name = f"{peer.name}, {of}"
            yield Missing(number=NUMBER, name=name, reason=missing[key])
        elif peer.name in rates:
            yield from readings(peer, of, found[key])


def readings(peer: Peer, of: str, drains: list[Drain]) -> Iterator[Reading]:
    """Say how fast one was and what it cost its own side."""
    yield Reading(
        number=NUMBER,
        name=f"{peer.name}, {of}",
        unit="jobs/s",
        values=[drain.rate for drain in drains],
        is_cost=False,
        note=peer.note,
    )
    costs = {
        "worker": [drain.worker_cpu for drain in drains],
        "server": [drain.server_cpu for drain in drains],
    }
    for side, values in costs.items():
        yield Reading(
            number=NUMBER,
            name=f"{peer.name}, {of}, CPU of the {side}",
            unit="us/job",
            values=values,
        )
