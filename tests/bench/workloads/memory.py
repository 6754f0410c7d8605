"""The memory of a worker process that claims 1,000 jobs of 10 kB at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.contenders import connect
from bench.figures import Figure, Reading
from bench.measured_server import BENCH, BenchServer, one

NUMBER = 12
BATCH = 1_000
FILL = """
    select count(*) from rota.enqueue_many((
        select jsonb_agg(jsonb_build_object(
            'job_type', 'part',
            'payload', jsonb_build_object('text', repeat(md5(n::text), 312))))
        from generate_series(1, 1000) as g (n)
    ))
"""


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    batches = 3 if is_quick else 20
    dsn = server.fresh("memory")
    db = connect(dsn, is_quiet=False)
    peaks, rates = [], []
    for _ in range(1 if is_quick else rounds):
        for _ in range(batches):
            db.execute(FILL)
        began = time.perf_counter()
        peaks.append(peak_of_worker(dsn))
        rates.append(batches * BATCH / (time.perf_counter() - began))
        if left := one(db, "select count(*) from rota.jobs"):
            raise RuntimeError(f"the worker left {left} jobs")
    db.close()
    server.drop("memory")
    yield Reading(
        number=NUMBER,
        name=f"peak memory of a worker, batches of {BATCH:,} jobs of 10 kB",
        unit="MB",
        values=peaks,
        goal=150,
        note=f"VmHWM of the process at the end of {batches * BATCH:,} jobs, 100 at a time",
    )
    yield Reading(
        number=NUMBER,
        name="rate of that worker",
        unit="jobs/s",
        values=rates,
        note="its start and end included",
    )


def peak_of_worker(dsn: str) -> float:
    """Let a worker do all there is; return its peak memory in megabytes."""
    command = [
        sys.executable,
        "-m",
        "rota",
        "worker",
        "noop:registry",
        "--log-level",
        "warning",
    ]
    command += ["--batch", str(BATCH), "--concurrency", "100", "--drain"]
    worker = subprocess.Popen(command, cwd=BENCH, env={**os.environ, "DATABASE_URL": dsn})
    try:
        peak = 0
        while worker.poll() is None:
            peak = max(peak, high_water(worker.pid))
            time.sleep(0.005)
    finally:
        worker.kill()
        worker.wait()
    if worker.returncode:
        raise RuntimeError(f"the worker ended with {worker.returncode}")
    return peak / 1024


def high_water(pid: int) -> int:
    """Return the most kilobytes that a process ever held; 0 if it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    return 0
