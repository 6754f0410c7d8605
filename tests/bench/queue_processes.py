"""Processes that work on a queue or fill it, and note how long each call took.

They are processes of their own, so that none waits for another's interpreter, and speak the
least Python that will do: the ids of a batch come and go as arrays.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from threading import BrokenBarrierError
from typing import Any

from bench.contenders import PAYLOAD, ROTA, connect, finish
from bench.measure import percentile
from bench.measured_server import Db

# Not forked: a child would share the sockets of its parent.
SPAWN = multiprocessing.get_context("spawn")
Counter = Synchronized


@dataclass(frozen=True, slots=True)
class Call:
    """One call: when it ended by the clock, how many seconds it took, for how many jobs."""

    ended: float
    seconds: float
    jobs: int


def work(db: Db, stop: Event, done: Counter[int], size: int, idle: float) -> list[Call]:
    """Claim and finish until told to stop; note the claims that gave something."""
    calls = []
    while not stop.is_set():
        began = time.perf_counter()
        ids, tokens = db.execute(ROTA.claim, (size,)).fetchone() or (None, None)
        seconds = time.perf_counter() - began
        if not ids:
            time.sleep(idle)
            continue
        calls.append(Call(time.time(), seconds, len(ids)))
        finish(db, ROTA, ids, tokens)
        done.value += len(ids)
    return calls


def produce(db: Db, stop: Event, done: Counter[int], size: int, every: float) -> list[Call]:
    """Enqueue at a steady pace, one call *every* so many seconds, and note the calls."""
    calls = []
    jobs = many_jobs(size)
    due = time.perf_counter()
    while not stop.is_set():
        began = time.perf_counter()
        if size == 1:
            db.execute("select rota.enqueue('noop', %s::jsonb)", (PAYLOAD,)).fetchone()
        else:
            db.execute("select count(*) from rota.enqueue_many(%s)", (jobs,)).fetchone()
        calls.append(Call(time.time(), time.perf_counter() - began, size))
        done.value += size
        due += every
        if (wait := due - time.perf_counter()) > 0:
            time.sleep(wait)
    return calls


def many_jobs(count: int) -> str:
    """Return what enqueue_many() takes."""
    return json.dumps([{"job_type": "noop", "payload": {"n": n}} for n in range(count)])


class Crew:
    """Some processes that do the same until `stop`."""

    def __init__(
        self, task: Callable[..., list[Call]], dsn: str, count: int, *values: float
    ) -> None:
        self._stop = SPAWN.Event()
        self._counters = [SPAWN.Value("q", 0) for _ in range(count)]
        self._pipes: list[Connection] = []
        self._processes = []
        self._calls: list[Call] | None = None
        # Kept, since its memory is shared with those that have yet to pass it.
        self._ready = SPAWN.Barrier(count + 1)
        for counter in self._counters:
            ours, theirs = SPAWN.Pipe(duplex=False)
            process = SPAWN.Process(
                target=_main,
                args=(task, dsn, self._ready, self._stop, counter, values, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._ready.wait(60)
        except BrokenBarrierError:
            for process in self._processes:
                process.kill()
            raise RuntimeError("a process of the benchmark did not start") from None

    @property
    def done(self) -> int:
        """How many jobs they have done so far."""
        return sum(counter.value for counter in self._counters)

    def stop(self) -> list[Call]:
        """Stop them; return the calls of all in the order of time."""
        if self._calls is None:
            self._stop.set()
            try:
                found = [pipe.recv() for pipe in self._pipes]
            except EOFError:
                raise RuntimeError("a process of the benchmark died") from None
            finally:
                for process in self._processes:
                    process.join(10)
                    process.kill()
            calls = [Call(*each) for calls in found for each in calls]
            self._calls = sorted(calls, key=lambda call: call.ended)
        return self._calls

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.stop()
        for process in self._processes:
            process.kill()


def _main(
    task: Callable[..., list[Call]],
    dsn: str,
    ready: Any,
    stop: Event,
    counter: Counter[int],
    values: Sequence[float],
    pipe: Connection,
) -> None:
    with connect(dsn, is_quiet=False) as db:
        ready.wait(60)
        calls = task(db, stop, counter, *values)
    pipe.send([(call.ended, call.seconds, call.jobs) for call in calls])


def between(calls: Sequence[Call], begin: float, end: float) -> list[Call]:
    """Return the calls that ended in this time."""
    return [call for call in calls if begin <= call.ended < end]


def milliseconds(
    calls: Sequence[Call], share: float, begin: float, end: float, parts: int = 5
) -> list[float]:
    """Return a percentile of their lengths for each of so many equal parts of a time."""
    step = (end - begin) / parts
    slices = [between(calls, begin + n * step, begin + (n + 1) * step) for n in range(parts)]
    return [percentile([call.seconds for call in one], share) * 1e3 for one in slices if one]


def rate_series(calls: Sequence[Call], begin: float, step: float) -> list[tuple[float, float]]:
    """Return jobs in a second over time, by steps."""
    sums: dict[int, int] = {}
    for call in calls:
        if call.ended >= begin:
            n = int((call.ended - begin) / step)
            sums[n] = sums.get(n, 0) + call.jobs
    # The last step is not whole.
    return [(n * step, sums.get(n, 0) / step) for n in range(max(sums, default=0))]


def latency_series(
    calls: Sequence[Call], share: float, begin: float, step: float
) -> list[tuple[float, float]]:
    """Return a percentile in milliseconds over time, by steps."""
    steps: dict[int, list[float]] = {}
    for call in calls:
        if call.ended >= begin:
            steps.setdefault(int((call.ended - begin) / step), []).append(call.seconds)
    return [(n * step, percentile(steps[n], share) * 1e3) for n in sorted(steps)]
