"""What many workers cost that have to walk far for a job, and how soon they find a late one.

    full_scans.py [--rows N] [--workers N] [--seconds N] [--against PATH]

On a server of its own: sessions that claim and finish one job at a time, 60 a second in all,
behind jobs of another type, and under a snapshot that keeps the index entries of ended ones.
Every third of a second a transaction commits a job that it has enqueued so long before.  With
--against, first the same of another tree, before this one.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import subprocess
import threading
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import psycopg

from rota.testing import EmbeddedPostgres

HERE = Path(__file__).resolve().parents[2]
PART = 10_000
OTHERS = """
    insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status, run_at)
    select 'default', 'other', '{}', 0, 10, 'queued', clock_timestamp()
    from generate_series(1, %s)
"""
END = """
    with c as materialized (select * from rota.claim_jobs('w', max_jobs => 1000))
    select count(*) from rota.finish_jobs(
        (select array_agg(job_id order by job_id) from c),
        (select array_agg(lease_token order by job_id) from c))
"""


def cpu_of(pid: int) -> float:
    """Return how many seconds a server process has used of a processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


class Workers:
    """Sessions that claim, one job each, until stopped."""

    def __init__(self, url: str, count: int, job_types: list[str] | None) -> None:
        self.cpu = 0.0
        self.claims: list[float] = []
        self.found: dict[int, float] = {}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(url, f"worker-{n}", job_types))
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, url: str, name: str, job_types: list[str] | None) -> None:
        with psycopg.connect(url, autocommit=True) as db:
            begun = cpu_of(db.info.backend_pid)
            while not self._stop.wait(0.02):
                asked = time.monotonic()
                job = db.execute(
                    "select job_id, lease_token from rota.claim_jobs(%s, job_types => %s)",
                    (name, job_types),
                ).fetchone()
                self.claims.append(time.monotonic() - asked)
                if job is not None:
                    self.found[job[0]] = time.monotonic()
                    db.execute("select rota.finish_job(%s, %s)", job)
            self.cpu += cpu_of(db.info.backend_pid) - begun

    def stop(self) -> None:
        """Stop them and wait for it."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


def measure(tree: Path, what: str, options: argparse.Namespace) -> None:
    """Print the figures of one tree."""
    with EmbeddedPostgres() as server:
        url = server.url()
        install = ["psql", "-qX", "-v", "ON_ERROR_STOP=1", "-f", str(tree / "sql/install.sql")]
        subprocess.run([*install, url], check=True, capture_output=True)
        holder: psycopg.Connection[Any] = psycopg.connect(url)
        db = psycopg.connect(url, autocommit=True)
        if what == "ended":
            holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            holder.execute("select from rota.jobs")
        for _ in range(options.rows // PART):
            db.execute(OTHERS, (PART,))
            for _ in range(PART // 1000 if what == "ended" else 0):
                db.execute(END)
        db.execute("vacuum analyze rota.jobs")

        workers = Workers(url, options.workers, None if what == "ended" else ["mine"])
        committed: dict[int, float] = {}
        begun = time.monotonic()
        with psycopg.connect(url) as late:
            while time.monotonic() < begun + options.seconds:
                (job_id,) = late.execute("select rota.enqueue('mine')").fetchone() or (0,)
                for _ in range(6):
                    db.execute("select rota.enqueue('mine') from generate_series(1, 3)")
                    time.sleep(0.05)
                late.commit()
                committed[job_id] = time.monotonic()
        time.sleep(4.0)
        took = time.monotonic() - begun
        workers.stop()
        waits = [workers.found.get(n, begun + took) - at for n, at in committed.items()]
        claims, late_ones = quantiles(workers.claims, n=100), quantiles(waits, n=10)
        print(
            f"{tree.name:>12} {what:>6}: {workers.cpu / took:5.2f} processors"
            f"  claim p50 {claims[49] * 1e3:6.1f} p99 {claims[98] * 1e3:7.1f} ms"
            f"  late job p50 {late_ones[4]:5.2f} p90 {late_ones[8]:5.2f} s"
            f"  {len(workers.found)} jobs",
            flush=True,
        )
        holder.close()
        db.close()


def main() -> None:
    """Measure both, in both trees."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    for what in ("other", "ended"):
        for tree in filter(None, (options.against, HERE)):
            measure(tree.resolve(), what, options)


if __name__ == "__main__":
    main()
