"""Putting jobs in, one at a time and in bulk, against a function with one plain insert."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator

from bench.contenders import connect
from bench.figures import Figure, Ratio, Reading
from bench.measure import Meter, Pgbench, pgbench
from bench.measured_server import BenchServer

NUMBER = 7
CONNECTIONS = (1, 8)
SINGLE = {
    "rota": """select rota.enqueue('noop', '{"n": 1}');\n""",
    "bare": """select bare.enqueue_task('noop', '{"n": 1}');\n""",
}
CALL = 10_000
BULK = {
    "rota": "select count(*) from rota.enqueue_many(%s)",
    "bare": "select count(*) from bare.enqueue_tasks(%s)",
}
CLEAN = "truncate rota.jobs, bare.tasks"


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    yield from singly(server, rounds, 1 if is_quick else 6)
    yield from in_bulk(server, rounds, 2 if is_quick else 10)


def singly(server: BenchServer, rounds: int, seconds: int) -> Iterator[Figure]:
    dsn = server.fresh("enqueue")
    db = connect(dsn, is_quiet=False)
    for clients in CONNECTIONS:
        runs: defaultdict[str, list[Pgbench]] = defaultdict(list)
        for _ in range(rounds):
            db.execute(CLEAN)
            for name in random.sample(list(SINGLE), len(SINGLE)):
                runs[name].append(
                    pgbench(server, dsn, SINGLE[name], clients=clients, seconds=seconds)
                )
        name = f"enqueue singly, {clients} connection{'s' * (clients > 1)}"
        yield Ratio(
            number=NUMBER,
            name=name,
            unit="jobs/s",
            ours=[each.rate for each in runs["rota"]],
            theirs=[each.rate for each in runs["bare"]],
            yardstick="bare",
            goal=0.8,
        )
        ours, theirs = (
            [each.server_cpu / each.transactions * 1e6 for each in runs[queue]]
            for queue in ("rota", "bare")
        )
        yield Ratio(
            number=NUMBER,
            name=f"{name}: cpu",
            unit="us/job",
            ours=ours,
            theirs=theirs,
            yardstick="bare",
            goal=1.25,
            is_cost=True,
            note="CPU of all server processes",
        )
    db.close()
    server.drop("enqueue")


def in_bulk(server: BenchServer, rounds: int, calls: int) -> Iterator[Figure]:
    """Several full calls in one transaction, timed from the first to the commit."""
    db = connect(server.fresh("bulk"))
    jobs = [{"job_type": "noop", "payload": {"n": n}} for n in range(CALL)]
    tasks = [{"task_type": "noop", "payload": {"n": n}} for n in range(CALL)]
    texts = {"rota": json.dumps(jobs), "bare": json.dumps(tasks)}
    rates, cpus = defaultdict(list), defaultdict(list)
    for turn in range(rounds + 1):
        for name in random.sample(list(BULK), len(BULK)):
            db.execute(CLEAN)
            meter = Meter(db)
            meter.start()
            with db.transaction():
                for _ in range(calls):
                    db.execute(BULK[name], (texts[name],)).fetchone()
            meter.stop()
            if turn:
                rates[name].append(calls * CALL / meter.wall)
                cpus[name].append(meter.cpu / calls / CALL * 1e6)
    db.close()
    server.drop("bulk")
    name = f"enqueue {calls * CALL:,} jobs in calls of {CALL:,}"
    yield Ratio(
        number=NUMBER,
        name=name,
        unit="jobs/s",
        ours=rates["rota"],
        theirs=rates["bare"],
        yardstick="bare",
        goal=0.77,
        note="one transaction; insert from jsonb_to_recordset() as the yardstick",
    )
    yield Reading(
        number=NUMBER,
        name=f"{name}: rate",
        unit="jobs/s",
        values=rates["rota"],
        goal=100_000,
        is_cost=False,
    )
    for queue, values in cpus.items():
        yield Reading(
            number=NUMBER, name=f"{name}: cpu of {queue}", unit="us/job", values=values
        )
