"""From the call of enqueue to the start of the handler, with a worker that is idle.

A job comes every 20 ms, give or take 5, so each finds the worker asleep.  The producer is the
peer's own client and notes the time just before it sends its call; the handler notes the time
as the first thing it does.  Both write to files and read the same clock.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psycopg

from bench.figures import Figure, Missing, Ratio, Reading
from bench.measure import percentile
from bench.measured_server import BenchServer
from bench.peers.catalogue import PEERS, PGQ, ROTA, NotInstalledError, Peer
from bench.peers.fleet import PeerError, Program, call

NUMBER = 4
GOALS = {"p50": 1.2, "p99": 4.0}
SHARES = {"p50": 0.5, "p99": 0.99}
NO_PGQ = "its events wait for the next tick, by default seconds apart, to be a batch"
WARM_UP = 1.0
COLD = 10
"""Jobs of a producer that do not count: it connects and prepares its statements."""
FIRST = 1_000_000
PATIENCE = 60
Latencies = dict[str, list[float]]


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    seconds = (2.0 if is_quick else 20.0) / rounds
    found: defaultdict[str, list[list[float]]] = defaultdict(list)
    missing = {PGQ.name: NO_PGQ}
    everybody = [ROTA, *PEERS]
    for _ in range(rounds):
        for peer in random.sample(everybody, len(everybody)):
            if peer.name in missing:
                continue
            try:
                found[peer.name].append(one_round(server, peer, seconds))
            except (NotInstalledError, PeerError, psycopg.Error) as error:
                missing[peer.name] = str(error).splitlines()[0]
    yield from figures(found, missing)


def one_round(server: BenchServer, peer: Peer, seconds: float) -> list[float]:
    """Return the latencies of a round in milliseconds."""
    peer.command("listen")
    dsn = server.fresh("latency")
    call(peer, "fill", dsn, jobs=0)
    with tempfile.TemporaryDirectory() as folder:
        begun, sent, warm = (Path(folder, name) for name in ("begun", "sent", "warm"))
        with Program(peer, "listen", dsn, file=begun) as listener:
            call(peer, "produce", dsn, file=warm, seconds=WARM_UP)
            wait_for(listener, begun, set(read(warm)))
            call(peer, "produce", dsn, file=sent, seconds=seconds, first=FIRST)
            calls = read(sent)
            wait_for(listener, begun, set(calls))
            starts = read(begun)
    server.drop("latency")
    counted = sorted(calls)[COLD:]
    return [(starts[number] - calls[number]) / 1e6 for number in counted]


def wait_for(listener: Program, path: Path, numbers: set[int]) -> None:
    """Wait until the handler has seen all these jobs."""
    until = time.monotonic() + PATIENCE
    while not numbers <= set(read(path)):
        listener.check()
        if time.monotonic() > until:
            raise PeerError(f"some jobs were not started in {PATIENCE} s")
        time.sleep(0.1)


def read(path: Path) -> dict[int, int]:
    """Return the first time noted for each number, in nanoseconds."""
    found: dict[int, int] = {}
    if path.exists():
        # A line that is just being written has no end yet.
        for line in path.read_text().splitlines(keepends=True):
            number, _, when = line.partition(" ")
            if line.endswith("\n"):
                found.setdefault(int(number), int(when))
    return found


def figures(found: dict[str, list[list[float]]], missing: dict[str, str]) -> Iterator[Figure]:
    """Say the latencies of each, and how rota compares with the best of the others."""
    of = {
        name: {mark: [percentile(one, SHARES[mark]) for one in rounds] for mark in SHARES}
        for name, rounds in found.items()
        if name not in missing
    }
    for mark in SHARES:
        if ROTA.name in of:
            yield from compare(mark, of)
        for peer in (ROTA, *PEERS, PGQ):
            if peer.name in of:
                yield reading(peer, mark, of[peer.name][mark])
            elif peer.name in missing:
                name = f"{peer.name}, start latency, {mark}"
                yield Missing(number=NUMBER, name=name, reason=missing[peer.name])


def compare(mark: str, of: dict[str, Latencies]) -> Iterator[Figure]:
    """Compare rota with the best peer."""
    rivals = [peer.name for peer in PEERS if peer.name in of]
    if rivals:
        best = min(rivals, key=lambda name: statistics.median(of[name][mark]))
        yield Ratio(
            number=NUMBER,
            name=f"start latency, {mark}, against the best peer",
            unit="ms",
            ours=of[ROTA.name][mark],
            theirs=of[best][mark],
            yardstick=best,
            goal=1.0,
            is_cost=True,
        )


def reading(peer: Peer, mark: str, values: list[float]) -> Reading:
    """Say one percentile of one contender."""
    return Reading(
        number=NUMBER,
        name=f"{peer.name}, start latency, {mark}",
        unit="ms",
        values=values,
        goal=GOALS[mark] if peer is ROTA else None,
        note="default settings" if peer is ROTA else "",
    )
