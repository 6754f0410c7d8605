"""What a claim and finish in batches of 100 costs the server, against five-line queues."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from bench.contenders import CONTENDERS, VACUUM, Contender, connect, drain
from bench.figures import Figure, Ratio, Reading
from bench.measure import Meter
from bench.measured_server import BenchServer, Db, one

NUMBER = 1
BATCH = 100
IMAGES = "select wal_fpi from pg_stat_wal"
Values = defaultdict[tuple[str, str], list[float]]


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    jobs = 3_000 if is_quick else 20_000
    db = connect(server.fresh("claims"))
    values: Values = defaultdict(list)
    images = one(db, IMAGES) if db.info.server_version >= 140000 else 0
    for turn in range(rounds + 1):
        for queue in random.sample(CONTENDERS, len(CONTENDERS)):
            measured = one_round(db, queue, jobs)
            if turn:  # the first makes the plans and the pages
                for name, value in measured.items():
                    values[queue.name, name].append(value)
    images = (one(db, IMAGES) if db.info.server_version >= 140000 else 0) - images
    db.close()
    server.drop("claims")
    yield from figures(values, images)


def one_round(db: Db, queue: Contender, jobs: int) -> dict[str, float]:
    db.execute(queue.fill, (jobs + 10 * BATCH,))
    for table in queue.tables:
        db.execute(f"analyze {table}")
    drain(db, queue, 10, BATCH)
    meter = Meter(db)
    meter.start()
    done = drain(db, queue, jobs // BATCH, BATCH)
    meter.stop()
    if done < jobs:
        raise RuntimeError(f"{queue.name}: {done} of {jobs} jobs")
    while drain(db, queue, 10, BATCH):
        pass

    vacuum = Meter(db)
    vacuum.start()
    db.execute(VACUUM)
    vacuum.stop()
    return {
        "cpu": meter.cpu / done * 1e6,
        "wal": meter.wal / done,
        "buffers": meter.buffers / done,
        "wall": meter.wall / done * 1e6,
        "vacuum": vacuum.cpu / done * 1e6,
    }


def figures(values: Values, images: int) -> Iterator[Figure]:
    said = f"{images} page images in the log" if images else "no page images in the log"
    for name, unit, goal, note in (
        ("cpu", "us/job", 0.9, "CPU of the backend"),
        ("wal", "bytes/job", 1.1, said),
        ("buffers", "pages/job", None, "pages looked at"),
        ("wall", "us/job", None, "time as the client sees it"),
        ("vacuum", "us/job", None, "CPU of vacuuming up after a round"),
    ):
        ours = values["rota", name]
        if goal is not None:
            yield Ratio(
                number=NUMBER,
                name=f"claim + finish, batches of {BATCH}: {name}",
                unit=unit,
                ours=ours,
                theirs=values["bare", name],
                yardstick="bare",
                goal=goal,
                is_cost=True,
                note=note,
            )
        for other in ("lean",) if goal is not None else ("rota", "bare", "lean"):
            yield Reading(
                number=NUMBER,
                name=f"claim + finish, batches of {BATCH}: {name} of {other}",
                unit=unit,
                values=values[other, name],
                note=note,
            )
