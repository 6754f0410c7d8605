"""A million jobs due in the same instant: claims and enqueues during the spike and before.

Eight workers go on at full speed all the time.  Before the spike a feeder keeps the queue
shallow, and from then on it feeds at the pace it had; so the load on the machine is the same,
and what is compared is only the depth of the queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from bench.contenders import connect
from bench.figures import Figure, Ratio, Reading, Series
from bench.measured_server import BenchServer, Db, one
from bench.queue_processes import (
    Call,
    Crew,
    between,
    latency_series,
    many_jobs,
    milliseconds,
    produce,
    rate_series,
    work,
)

NUMBER = 10
WORKERS = 8
BATCH = 10
DEPTH = 1_000
# As enqueue_many() would; all wait for the same instant.
SPIKE = """
    insert into rota.jobs (
        queue, job_type, payload, priority, max_attempts, status, run_at)
    select 'default', 'noop', '{"n": 1}', 0, 10, 'queued', to_timestamp(%s)
    from generate_series(1, %s) as g (n)
"""


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    jobs, loading, calm = (30_000, 3.0, 2.0) if is_quick else (1_000_000, 60.0, 30.0)
    dsn = server.fresh("spike")
    db = connect(dsn, is_quiet=False)
    due = one(db, "select extract(epoch from clock_timestamp())::float8") + loading + calm
    db.execute(SPIKE, (due, jobs))
    db.execute("vacuum analyze rota.jobs")

    with (
        Crew(work, dsn, WORKERS, BATCH, 0.002) as workers,
        Crew(produce, dsn, 2, 1, 0.02) as producers,
    ):
        feeder = Feeder(db, workers)
        time.sleep(1)
        began = time.time()
        time.sleep(max(0.0, due - 0.5 - time.time()))
        feeder.keep_pace()
        before = workers.done
        while workers.done < before + jobs:
            feeder.check()
            time.sleep(0.05)
        ended = time.time()
        feeder.stop()
        claims, enqueues = workers.stop(), producers.stop()
    db.close()
    server.drop("spike")
    if due - began < calm / 2:
        raise RuntimeError(f"the jobs were in only {due - began:.0f} s before they were due")
    yield from figures(claims, enqueues, began, due, ended, jobs)


class Feeder:
    """A thread that keeps the queue shallow, and later at a pace of its own."""

    def __init__(self, db: Db, workers: Crew) -> None:
        self._db = db
        self._workers = workers
        self._fed = 0
        self._pace: float | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def keep_pace(self) -> None:
        """Feed as fast as on the average so far, whatever the queue holds."""
        self._pace = self._fed / (time.monotonic() - self._began)

    def check(self) -> None:
        """Raise what the thread met with."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.check()

    def _run(self) -> None:
        jobs, count = many_jobs(200), 200
        try:
            while not self._stop.is_set():
                if self._pace is None:
                    is_time = self._fed - self._workers.done < DEPTH - count
                else:
                    is_time = self._fed < self._pace * (time.monotonic() - self._began)
                if is_time:
                    self._db.execute("select count(*) from rota.enqueue_many(%s)", (jobs,))
                    self._fed += count
                else:
                    time.sleep(0.002)
        except BaseException as error:  # raised again by check()
            self._error = error


def figures(
    claims: list[Call],
    enqueues: list[Call],
    began: float,
    due: float,
    ended: float,
    jobs: int,
) -> Iterator[Figure]:
    done = sum(call.jobs for call in between(claims, due, ended))
    calm = sum(call.jobs for call in between(claims, began, due - 0.5))
    yield Reading(
        number=NUMBER,
        name=f"{jobs:,} jobs due at once: rate",
        unit="jobs/s",
        values=[done / (ended - due)],
        note=f"{WORKERS} workers, batches of {BATCH}, and those that feed beside them; "
        f"{calm / (due - 0.5 - began):,.0f} jobs/s before",
    )
    for calls, what, share, goal in (
        (claims, "claim", 0.99, 3.0),
        (claims, "claim", 0.5, None),
        (enqueues, "enqueue", 0.5, 1.2),
        (enqueues, "enqueue", 0.99, None),
    ):
        during = milliseconds(calls, share, due, ended)
        before = milliseconds(calls, share, began, due - 0.5)
        name = f"{what} during the spike: p{share * 100:.0f}"
        if goal is None:
            yield Reading(number=NUMBER, name=name, unit="ms", values=during)
            yield Reading(number=NUMBER, name=f"{name} before it", unit="ms", values=before)
        else:
            yield Ratio(
                number=NUMBER,
                name=name,
                unit="ms",
                ours=during,
                theirs=before,
                yardstick="shallow queue",
                goal=goal,
                is_cost=True,
                note="the same workers at the same load before the spike, of each fifth",
            )
    claims, enqueues = between(claims, began, ended), between(enqueues, began, ended)
    step = max(0.5, (ended - began) / 100)
    for calls, what in ((claims, "claim"), (enqueues, "enqueue")):
        for share in (0.5, 0.99):
            yield Series(
                plot="Latency over a spike",
                name=f"{what} p{share * 100:.0f} (due at {due - began:.0f} s)",
                unit="ms",
                points=latency_series(calls, share, began, step),
            )
    yield Series(
        plot="Rate over a spike",
        name="jobs finished",
        unit="jobs/s",
        points=rate_series(claims, began, step),
    )
