"""What a hundred workers cost the server while there is nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from bench.contenders import connect
from bench.figures import Figure, Reading
from bench.idle_workers import IdleWorkers
from bench.measure import wal_position
from bench.measured_server import BenchServer, one

NUMBER = 9
PROCESSES = 4
WORKERS = 100
XMAX = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    seconds = 5.0 if is_quick else 60.0
    dsn = server.fresh("idle")
    db = connect(dsn, is_quiet=False)
    # Its own work is not that of the workers.
    server.admin.execute("alter system set autovacuum = off")
    server.admin.execute("select pg_reload_conf()")
    shares, xids, logs = [], [], []
    try:
        with ExitStack() as stack:
            each = WORKERS // PROCESSES
            crews = [stack.enter_context(IdleWorkers(dsn, each)) for _ in range(PROCESSES)]
            for crew in crews:
                crew.wait()
            time.sleep(75.0 if not is_quick else 5.0)  # maintenance comes less often
            for _ in range(min(rounds, 3)):
                began = (server.cpu(), one(db, XMAX), wal_position(db))
                time.sleep(seconds)
                shares.append((server.cpu() - began[0]) / seconds * 100)
                xids.append(float(one(db, XMAX) - began[1]))
                logs.append(float(wal_position(db) - began[2]))
            for crew in crews:
                crew.stop()
    finally:
        server.admin.execute("alter system reset autovacuum")
        server.admin.execute("select pg_reload_conf()")
        db.close()
        server.drop("idle")
    for name, unit, values, goal, note in (
        ("cpu", "% of a core", shares, 1.0, "all processes of the server"),
        ("transaction ids", "ids", xids, 1.0, "the record of the tick, every five minutes"),
        ("log", "bytes", logs, None, "the server itself notes its snapshot now and then"),
    ):
        yield Reading(
            number=NUMBER,
            name=f"{WORKERS} idle workers for {seconds:g} s: {name}",
            unit=unit,
            values=values,
            goal=goal,
            note=note,
        )
