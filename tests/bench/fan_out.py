"""Fan out to a million jobs and in again, on a server of its own.

    fan_out.py [--parts N] [--workers N] [--concurrency N] [--batch N]

One job enqueues the last job and then the parts, 10,000 with each call; workers whose handlers
do nothing run them.  Printed are the time and rate of each step, the memory of the largest
worker, and whether the last job ran once, after all the others.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

import rota
from rota.testing import EmbeddedPostgres

HERE = Path(__file__).resolve().parent
BATCH = 10_000


def main() -> int:
    """Run the benchmark; return 1 if the last job did not run once and last."""
    arguments = parse()
    settings = ["shared_buffers=256MB", "max_wal_size=4GB", "synchronous_commit=on"]
    with EmbeddedPostgres(settings=settings) as server:
        url = server.url("postgres")
        subprocess.run([sys.executable, "-m", "rota", "install", "-d", url], check=True)
        with psycopg.connect(url, autocommit=True) as db:
            started = time.monotonic()
            report_id = fan_out(db, arguments.parts)
            tell("enqueue", arguments.parts, time.monotonic() - started)
            started = time.monotonic()
            memory = run(db, url, arguments, report_id)
            tell("run", arguments.parts, time.monotonic() - started)
            print(f"largest worker: {memory / 1024:.0f} MB")
            return check(db, report_id, arguments.parts)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--batch", type=int, default=500)
    return parser.parse_args()


def tell(step: str, jobs: int, seconds: float) -> None:
    """Print what a step took."""
    print(f"\r{step}: {jobs} jobs in {seconds:.1f} s, {jobs / seconds:.0f} jobs/s{'':20}")


def fan_out(db: psycopg.Connection[Any], parts: int) -> int:
    """Enqueue the last job and the parts from a running job; return the id of the last."""
    client = rota.Client(db)
    client.enqueue("split")
    (split,) = client.claim_jobs("splitter", lease=timedelta(minutes=5))
    report_id = client.enqueue("report", depends_on=[split.job_id]).job_id
    for first in range(0, parts, BATCH):
        count = min(BATCH, parts - first)
        client.heartbeat(split.job_id, split.lease_token)
        client.enqueue_many(
            [
                {"job_type": "part", "payload": {"n": first + n}, "blocks": report_id}
                for n in range(count)
            ]
        )
        print(f"\renqueued {first + count}", end="", flush=True)
    client.finish_job(split.job_id, split.lease_token)
    return report_id


def run(
    db: psycopg.Connection[Any], url: str, arguments: argparse.Namespace, report_id: int
) -> int:
    """Run workers until the last job has ended; return the kilobytes of the largest."""
    command = [
        sys.executable,
        "-m",
        "rota",
        "worker",
        "noop:registry",
        "--log-level",
        "warning",
    ]
    command += ["--concurrency", str(arguments.concurrency), "--batch", str(arguments.batch)]
    workers = [
        subprocess.Popen(command, cwd=HERE, env={**os.environ, "DATABASE_URL": url})
        for _ in range(arguments.workers)
    ]
    try:
        while not db.execute(
            "select 1 from rota.finished_jobs where id = %s", (report_id,)
        ).fetchone():
            time.sleep(0.5)
            done = db.execute(
                "select n_tup_del from pg_stat_user_tables where relid = 'rota.jobs'::regclass"
            ).fetchone()
            print(f"\rended {done[0] if done else 0}", end="", flush=True)
            if any(worker.poll() is not None for worker in workers):
                raise SystemExit("a worker died")
        return max(peak(worker.pid) for worker in workers)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


def peak(pid: int) -> int:
    """Return the most memory that a process ever had, in kilobytes."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1])


def check(db: psycopg.Connection[Any], report_id: int, parts: int) -> int:
    """Print whether all ended well and the last job ran once, after them."""
    row = db.execute(
        """
        select
            count(*) filter (where f.job_type = 'part' and f.status = 'succeeded'),
            count(*) filter (where f.job_type = 'report'),
            max(f.attempts) filter (where f.id = %(id)s),
            min(f.started_at) filter (where f.id = %(id)s)
                >= max(f.finished_at) filter (where f.id <> %(id)s),
            (select count(*) from rota.dependencies)
        from rota.finished_jobs as f
        """,
        {"id": report_id},
    ).fetchone()
    assert row is not None
    print(
        f"\rparts succeeded: {row[0]}; last jobs: {row[1]}; its attempts: {row[2]}; "
        f"started after all parts: {row[3]}"
    )
    return int(row != (parts, 1, 1, True, 0))


if __name__ == "__main__":
    sys.exit(main())
