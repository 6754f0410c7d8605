"""Faults of the server: it falls down under a signal, and it throws sessions out.

The canary is a server that promises too early: with synchronous_commit off a commit is told
before it is written, and a crash loses it.  The checker must see that.
"""

from __future__ import annotations

import os
import signal
from contextlib import closing, suppress

import psycopg

from faults.fault_run import Scene, be_found, fault
from faults.workload import Load
from rota import Client

JOBS = 1_000_000
VICTIM = """
select a.pid
from pg_stat_activity as a
where a.backend_type = 'client backend' and a.pid <> pg_backend_pid()
  and a.datname = current_database()
order by a.state <> 'active', random()
limit 1
"""
FORGETFUL = ("synchronous_commit=off", "wal_writer_delay=10s", "wal_writer_flush_after=1GB",
             "wal_buffers=64MB", "checkpoint_timeout=1h")  # fmt: skip


@fault("crash", "crashes of the server by kill -9 of a backend", 100, minutes=15)
def crash(scene: Scene) -> None:
    """Crash the server under a load of a million jobs."""
    mix = {"quick": 97, "plain": 1, "together": 1, "mail": 1}
    options = {"concurrency": 16, "batch": 100}
    url = scene.server().url()
    with scene.load(
        url,
        workers=3,
        backlog=2000,
        worker_options=options,
        producer_options={"mix": mix, "pause": 0},
    ) as load:
        for number in scene.rounds():
            load.pause(1.0)
            while load.enqueued() * scene.times < JOBS * scene.scale * (number + 1):
                load.pause(0.2)
            while not crash_once(load):
                load.pause(0.1)
            # Each crash takes the counters that autovacuum goes by.
            load.execute("vacuum rota.jobs")


@fault("unsynced", "crashes with synchronous_commit off", 5, minutes=0.5, judge=be_found)
def crash_without_sync(scene: Scene) -> None:
    """Lose what was told already; this is the canary."""
    url = scene.server(*FORGETFUL).url()
    with scene.load(url) as load:
        for number in scene.rounds():
            load.pause(2.0)
            with closing(psycopg.connect(url, autocommit=True)) as connection:
                key = f"probe {number}"
                probe = Client(connection).enqueue("quick", idempotency_key=key)
            while not crash_once(load):
                load.pause(0.1)
            there = "select count(*) from rota.job_runs as r where r.idempotency_key = %s"
            if not load.ask(there, key):
                scene.found.append(probe.job_id)
    scene.counts["probes lost"] = len(scene.found)


@fault("terminate", "sessions terminated, five in a second", 3000, minutes=11)
def terminate(scene: Scene) -> None:
    """Throw a session out every fifth of a second."""
    with scene.load() as load:
        for _ in scene.rounds():
            load.pause(0.2)
            load.ask(f"select pg_terminate_backend(v.pid) from ({VICTIM}) as v")


def crash_once(load: Load) -> bool:
    """Kill a backend, and wait until the server has fallen and is up again."""
    with (
        suppress(ProcessLookupError),
        closing(psycopg.connect(load.observed, autocommit=True)) as witness,
    ):
        if row := witness.execute(VICTIM).fetchone():
            os.kill(row[0], signal.SIGKILL)
            try:
                witness.execute("select pg_sleep(10)")
            except psycopg.OperationalError:
                load.ask("select 1")
                return True
    return False
