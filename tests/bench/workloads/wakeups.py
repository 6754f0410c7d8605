"""What it costs to be woken: whoever puts jobs in, and from the commit to the start."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack

from psycopg.types.json import Jsonb

from bench.contenders import connect
from bench.figures import Figure, Ratio, Reading
from bench.idle_workers import IdleWorkers
from bench.measure import percentile, pgbench
from bench.measured_server import BenchServer, Db, one

NUMBER = 8
WRITERS = 16
ENQUEUE = """select rota.enqueue('noop', '{"n": 1}');\n"""
NEVER = "3600"
"""A poll interval: what is claimed then was woken."""
CHECK = re.compile(
    r" *if [^;\n]*_others_hold[^;\n]* then\n *perform rota\._notify[^;]*;\n *end if;\n"
)


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    seconds = 1 if is_quick else 6
    yield with_a_worker(server, rounds, seconds)
    yield with_nobody(server, rounds, seconds)
    yield one_of_a_hundred(server)
    yield from start_latency(server, rounds, 50 if is_quick else 300)


def with_a_worker(server: BenchServer, rounds: int, seconds: int) -> Figure:
    """Sixteen workers wait, one of them for these jobs."""
    rates = defaultdict(list)
    for turn in range(2 * rounds):
        name = ("on", "off")[(turn + turn // 2) % 2]
        dsn = server.fresh("wakeups")
        options = ["--no-listen"] if name == "off" else []
        with ExitStack() as stack:
            crews = [
                stack.enter_context(IdleWorkers(dsn, count, "--queue", queue, *options))
                for count, queue in ((1, "default"), (15, "other"))
            ]
            for crew in crews:
                crew.wait()
            found = pgbench(server, dsn, ENQUEUE, clients=WRITERS, seconds=seconds)
            rates[name].append(found.rate)
        server.drop("wakeups")
    return Ratio(
        number=NUMBER,
        name=f"enqueue with {WRITERS} writers and a worker, wake-ups on",
        unit="jobs/s",
        ours=rates["on"],
        theirs=rates["off"],
        yardstick="wake-ups off",
        goal=0.95,
    )


def with_nobody(server: BenchServer, rounds: int, seconds: int) -> Figure:
    """Nobody sleeps: what is left is the question whether anybody does."""
    rates = defaultdict(list)
    dsns = {"asks": server.fresh("asks"), "asks not": server.fresh("asks_not")}
    with connect(dsns["asks not"], is_quiet=False) as db:
        stop_asking(db)
    for turn in range(2 * rounds):
        name = ("asks", "asks not")[(turn + turn // 2) % 2]
        with connect(dsns[name], is_quiet=False) as db:
            db.execute("truncate rota.jobs")
        found = pgbench(server, dsns[name], ENQUEUE, clients=WRITERS, seconds=seconds)
        rates[name].append(found.rate)
    for name in ("asks", "asks_not"):
        server.drop(name)
    return Ratio(
        number=NUMBER,
        name=f"enqueue with {WRITERS} writers and no worker",
        unit="jobs/s",
        ours=rates["asks"],
        theirs=rates["asks not"],
        yardstick="without the check",
        goal=0.95,
    )


def stop_asking(db: Db) -> None:
    source = one(
        db,
        "select pg_get_functiondef(p.oid) from pg_proc as p where p.proname = 'enqueue'"
        " and p.pronamespace = 'rota'::regnamespace",
    )
    without, count = CHECK.subn("", source)
    if count != 2:  # of plain jobs, and of others
        raise RuntimeError("enqueue() does not ask in the way that is known here")
    db.execute(without)


def one_of_a_hundred(server: BenchServer) -> Figure:
    """How many claims one job costs where a hundred listen."""
    dsn = server.fresh("hundred")
    server.admin.execute("alter database hundred set track_functions = 'all'")
    calls = "select sum(calls) from pg_stat_user_functions where funcname = 'claim_jobs'"
    with connect(dsn, is_quiet=False) as db, ExitStack() as stack:
        crews = [
            stack.enter_context(IdleWorkers(dsn, 25, "--poll-interval", NEVER))
            for _ in range(4)
        ]
        for crew in crews:
            crew.wait()
        time.sleep(15)  # a session that is idle brings its counts after ten seconds
        counts = []
        for _ in range(3):
            began = one(db, calls)
            db.execute(ENQUEUE)
            time.sleep(12)
            counts.append(float(one(db, calls) - began))
        for crew in crews:
            crew.stop()
    server.drop("hundred")
    return Reading(
        number=NUMBER,
        name="one job, a hundred workers listen",
        unit="claims",
        values=counts,
        goal=3,
    )


def start_latency(server: BenchServer, rounds: int, jobs: int) -> Iterator[Figure]:
    """One job every 20 ms: from the answer to its commit to the first line of its handler."""
    dsn = server.fresh("latency")
    values = defaultdict(list)
    with connect(dsn, is_quiet=False) as db:
        for _ in range(rounds):
            with IdleWorkers(dsn, 1) as crew:
                crew.wait()
                sent = {}
                for n in range(jobs):
                    db.execute("select rota.enqueue('noop', %s)", (Jsonb({"n": n}),))
                    sent[n] = time.monotonic()
                    time.sleep(0.02)
                time.sleep(1.5)
                starts = crew.stop()
            delays = [(starts[n] - sent[n]) * 1e3 for n in range(jobs)]
            for share in (0.5, 0.99):
                values[share].append(percentile(delays, share))
    server.drop("latency")
    for share, goal in ((0.5, 1.2), (0.99, 4.0)):
        yield Reading(
            number=NUMBER,
            name=f"from commit to start, p{share * 100:g}",
            unit="ms",
            values=values[share],
            goal=goal,
        )
