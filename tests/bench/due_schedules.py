"""Enqueue the jobs of very many schedules that are due in the same minute, and claim meanwhile.

    due_schedules.py [--schedules N] [--texts N] [--rounds N]

In each round all schedules are made due at one time.  Then tick() is called until nothing is
left, while another session claims and finishes jobs of the queue that these come into.  Before
that it claims as many from the same queue in peace.  Shown are the medians over the rounds.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

from rota.testing import EmbeddedPostgres, find_binaries

SQL = Path(__file__).resolve().parents[2] / "sql"
Db = psycopg.Connection[Any]

DUE = """
    update rota.job_definitions
    set next_run_at = date_trunc('minute', rota.now()), last_run_at = null
"""
BEHIND = """
    insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status, run_at)
    select 'default', 'x', '{}', 0, 10, 'queued', rota.now() - interval '1 hour'
    from generate_series(1, 30000)
"""


def claim(db: Db) -> float:
    """Claim and finish one job; return how many milliseconds the claim took."""
    begin = time.perf_counter()
    row = db.execute("select job_id, lease_token from rota.claim_jobs('w')").fetchone()
    took = time.perf_counter() - begin
    assert row is not None
    db.execute("select rota.finish_job(%s, %s)", row)
    return took * 1000


def tick_all(db: Db) -> list[float]:
    """Tick until nothing is due; return the milliseconds of each tick."""
    times = []
    while True:
        begin = time.perf_counter()
        row = db.execute("select jobs_enqueued from rota.tick()").fetchone()
        assert row is not None
        if row[0] == 0:
            return times
        times.append((time.perf_counter() - begin) * 1000)


def one_round(ticker: Db, worker: Db, schedules: int) -> dict[str, float]:
    for table in ("jobs", "occurrences", "finished_jobs", "pending_checks"):
        ticker.execute(f"truncate rota.{table}")
    ticker.execute(BEHIND)
    ticker.execute(DUE)
    ticker.execute("vacuum analyze rota.jobs, rota.occurrences, rota.job_definitions")
    peace = [claim(worker) for _ in range(2000)]

    meanwhile: list[float] = []
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            meanwhile.append(claim(worker))

    thread = threading.Thread(target=work)
    thread.start()
    begin = time.perf_counter()
    ticks = tick_all(ticker)
    took = time.perf_counter() - begin
    is_over.set()
    thread.join()
    made = ticker.execute("select count(distinct definition) from rota.occurrences").fetchone()
    assert made == (schedules,), made
    return {
        "all enqueued, s": took,
        "per job, us": took / schedules * 1e6,
        "tick, p50 ms": statistics.median(ticks),
        "tick, max ms": max(ticks),
        "claim in peace, p50 ms": statistics.median(peace),
        "claim meanwhile, p50 ms": statistics.median(meanwhile),
        "claim in peace, p99 ms": statistics.quantiles(peace, n=100)[98],
        "claim meanwhile, p99 ms": statistics.quantiles(meanwhile, n=100)[98],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--texts", type=int, default=60, help="different schedule texts")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    bindir, _ = find_binaries(None)
    settings = ["fsync=off", "autovacuum=off", "max_wal_size=8GB", "shared_buffers=512MB"]
    with EmbeddedPostgres(bindir=bindir, settings=settings) as server:
        url = server.url("template1")
        subprocess.run(["psql", "-X", "-q", "-d", url, "-f", SQL / "install.sql"], check=True)
        with (
            psycopg.connect(url, autocommit=True) as ticker,
            psycopg.connect(url, autocommit=True) as worker,
        ):
            begin = time.perf_counter()
            ticker.execute(
                "select rota.schedule_job('report:' || n, n %% %s || ' 2 * * *', 'x')"
                " from generate_series(1, %s) as g (n)",
                (options.texts, options.schedules),
            )
            took = (time.perf_counter() - begin) / options.schedules * 1e6
            print(f"{options.schedules} schedules put in, {took:.0f} us each", flush=True)
            rounds = [
                one_round(ticker, worker, options.schedules) for _ in range(options.rounds)
            ]
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        middle = statistics.median(values)
        print(f"{name:24}{middle:9.2f}   {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()
