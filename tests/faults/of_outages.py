"""A fault that takes long: the database is away, and then everything is due at once."""

from __future__ import annotations

import time
from datetime import timedelta

import psycopg

from faults.fault_run import Scene, fault
from faults.producer import BACKOFF
from faults.workload import Load
from rota import Client

MINUTES = 10
JOBS = 1_000_000
WORKERS = 64
BATCH = 2000
DELAY = timedelta(seconds=2)


@fault("outage", "outages of ten minutes, a million due jobs, 64 workers", 1, minutes=25)
def outage(scene: Scene) -> None:
    """Stop the server while jobs come due, and let 64 workers at them when it is back."""
    server = scene.server()
    count = max(BATCH, round(JOBS * scene.scale))
    workers = WORKERS if scene.scale >= 0.1 else 8
    with scene.load(server.url(), workers=workers, producers=1) as load:
        for _ in scene.rounds():
            load.execute("select rota.pause_queue('default')")
            _enqueue(load, count)
            server.stop()
            load.pause(max(3.0, 60 * MINUTES * scene.scale))
            server.start()
            load.execute("select rota.resume_queue('default')")
            began = time.monotonic()
            load.wait(lambda live: live < BATCH)
            scene.counts["seconds to drain"] = round(time.monotonic() - began)
    scene.counts["due jobs"] = count


def _enqueue(load: Load, count: int) -> None:
    """Let so many jobs come due while nobody takes them, however long that takes."""
    job = {"job_type": "quick", "max_attempts": 60, "backoff": BACKOFF}
    with psycopg.connect(load.url, autocommit=True) as connection:
        for _ in range(0, count, BATCH):
            Client(connection).enqueue_many([{**job, "delay": DELAY}] * BATCH)
            load.pause(0)
