"""Half an hour at 2,000 jobs a second under the default autovacuum: does anything drift?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

from bench.contenders import connect
from bench.figures import Figure, Ratio, Reading, Series
from bench.measured_server import BenchServer, one
from bench.queue_processes import (
    Call,
    Crew,
    between,
    latency_series,
    milliseconds,
    produce,
    work,
)

NUMBER = 11
RATE = 2_000
PRODUCERS = 2
CALL = 10
WORKERS = 4
BATCH = 20
HEAP = "select pg_relation_size('rota.jobs')"
INDEXES = "select pg_indexes_size('rota.jobs')"
WAITED = """
    select percentile_cont(%s) within group (
        order by extract(epoch from f.started_at - f.created_at) * 1000)
    from rota.finished_jobs as f
    where f.finished_at > to_timestamp(%s)
"""
Sample = tuple[float, int, int, int]


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    # A minute is the unit: the first two are for warming up.
    minute, minutes = (0.5, 12) if is_quick else (60.0, 30)
    dsn = server.fresh("steady")
    db = connect(dsn, is_quiet=False)
    samples: list[Sample] = []
    with (
        Crew(work, dsn, WORKERS, BATCH, 0.005) as workers,
        Crew(produce, dsn, PRODUCERS, CALL, PRODUCERS * CALL / RATE) as producers,
    ):
        began, cpu = time.time(), server.cpu()
        while time.time() < began + minutes * minute:
            db.execute("select from rota.tick()")
            samples.append((time.time(), workers.done, one(db, HEAP), one(db, INDEXES)))
            time.sleep(minute / 30)
        ended, cpu = time.time(), server.cpu() - cpu
        calls, made = workers.stop(), producers.stop()
    waited = [one(db, WAITED, (share, ended - minute)) for share in (0.5, 0.99)]
    finished = one(db, "select count(*) from rota.finished_jobs")
    db.close()
    server.drop("steady")

    done = sum(call.jobs for call in calls)
    if finished != done:
        raise RuntimeError(f"the workers finished {done} jobs, the history has {finished}")
    enqueued = sum(call.jobs for call in between(made, began, ended))
    yield Reading(
        number=NUMBER,
        name="jobs put in",
        unit="jobs/s",
        values=[enqueued / (ended - began)],
        note=f"wanted were {RATE:,}; {PRODUCERS} producers, {CALL} jobs a call",
    )
    yield Reading(
        number=NUMBER,
        name="cpu of the server",
        unit="us/job",
        values=[cpu / done * 1e6],
        note="all server processes, enqueue and autovacuum included",
    )
    yield from drift(calls, samples, began, ended, minute)
    for share, value in zip(("p50", "p99"), waited, strict=True):
        yield Reading(
            number=NUMBER,
            name=f"from enqueue to claim in the last minute: {share}",
            unit="ms",
            values=[value],
            note="workers look every 5 ms while there is nothing",
        )


def drift(
    calls: list[Call], samples: list[Sample], began: float, ended: float, minute: float
) -> Iterator[Figure]:
    """Compare the last minute with the third, and draw what was in between."""
    third = (began + 2 * minute, began + 3 * minute)
    last = (ended - minute, ended)
    rates = [
        sum(call.jobs for call in between(calls, *part)) / minute for part in (last, third)
    ]
    yield Ratio(
        number=NUMBER,
        name="jobs done in the last minute",
        unit="jobs/s",
        ours=rates[:1],
        theirs=rates[1:],
        yardstick="the third minute",
        goal=0.95,
    )
    for share in (0.5, 0.99):
        yield Ratio(
            number=NUMBER,
            name=f"claim p{share * 100:.0f} in the last minute",
            unit="ms",
            ours=milliseconds(calls, share, *last),
            theirs=milliseconds(calls, share, *third),
            yardstick="the third minute",
            goal=1.25,
            is_cost=True,
        )
    for column, what in ((2, "table"), (3, "indexes")):
        sizes = [
            [sample[column] / 1e6 for sample in samples if part[0] <= sample[0] < part[1]]
            for part in (last, third)
        ]
        yield Ratio(
            number=NUMBER,
            name=f"size of jobs in the last minute: {what}",
            unit="MB",
            ours=sizes[0],
            theirs=sizes[1],
            yardstick="the third minute",
            goal=1.25,
            is_cost=True,
            note=f"median {statistics.median(s[column] for s in samples) / 1e6:.1f} MB, "
            f"most {max(s[column] for s in samples) / 1e6:.1f} MB",
        )
        yield Series(
            plot="Size of jobs",
            name=what,
            unit="MB",
            points=[(sample[0] - began, sample[column] / 1e6) for sample in samples],
        )
    for share in (0.5, 0.99):
        yield Series(
            plot="Latency of a claim",
            name=f"p{share * 100:.0f}",
            unit="ms",
            points=latency_series(calls, share, began, minute / 4),
        )
    yield Series(
        plot="Jobs done",
        name="jobs finished",
        unit="jobs/s",
        points=[
            (now[0] - began, (now[1] - then[1]) / (now[0] - then[0]))
            for then, now in pairwise(samples)
        ],
    )
