"""What a worker costs for each job: its CPU time, by phase, and the jobs per second.

Fills a database with jobs that do nothing and lets workers drain it.  CPU time of the client
and of the server are told apart, because they may have a core each, or share one.  The phases
are from samples of the main thread, taken each millisecond of CPU time: a sample belongs to
the part of the worker that is on its stack.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg

import rota
from rota.testing import EmbeddedPostgres, find_binaries

SQL = Path(__file__).resolve().parents[2] / "sql"
PHASES = {
    "fetcher.py": "claim",
    "completer.py": "finish",
    "maintenance.py": "maintenance",
    "executor.py": "run",
    "run_async": "run",
    "_returned": "run",
    "_refusal": "run",
    "events.py": "log",
}
FILL = """
    select count(*) from rota.enqueue_many((
        select jsonb_agg(jsonb_build_object(
            'job_type', %(type)s::text,
            'payload', jsonb_build_object('n', n, 'fill', repeat('x', %(size)s))))
        from generate_series(1, %(count)s) as g (n)
    ))
"""


async def nothing(job: rota.AsyncJob) -> None:
    """Do nothing."""


def nothing_plain(job: rota.Job) -> None:
    """Do nothing in a thread."""


class Sampler:
    """Counts where the main thread is, by CPU time."""

    def __init__(self) -> None:
        self.phases: Counter[str] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _sample(self, _number: int, frame: FrameType | None) -> None:
        phase = "loop"
        while frame is not None:
            code = frame.f_code
            found = PHASES.get(code.co_name) or PHASES.get(os.path.basename(code.co_filename))
            if found:
                phase = found
                break
            frame = frame.f_back
        self.phases[phase] += 1


def drain(dsn: str, options: argparse.Namespace, queue: Any) -> None:
    """Work until nothing is due; report seconds, CPU seconds, memory and phases."""
    if options.log:
        logging.basicConfig(filename="/dev/null", level=logging.INFO)
    else:
        logging.getLogger("rota").setLevel(logging.WARNING)
    registry = rota.Registry()
    registry.add("noop", nothing_plain if options.plain else nothing)
    settings = {"concurrency": options.concurrency, "batch": options.batch}
    worker = rota.Worker(
        dsn, registry, **{name: value for name, value in settings.items() if value}
    )
    sampler = Sampler()
    if options.phases:
        sampler.start()
    before, began = os.times(), time.perf_counter()
    worker.run(drain=True)
    after, ended = os.times(), time.perf_counter()
    sampler.stop()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = after.user + after.system - before.user - before.system
    queue.put((ended - began, cpu, memory, sampler.phases))


def server_seconds(datadir: Path) -> float:
    """Return the CPU time of all processes of a server, living and waited for."""
    postmaster = (datadir / "postmaster.pid").read_text().split()[0]
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if stat.parent.name == postmaster:
            ticks += sum(int(field) for field in fields[11:15])
        elif fields[1] == postmaster:
            ticks += sum(int(field) for field in fields[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def fill(dsn: str, count: int, size: int) -> None:
    """Add jobs, in parts."""
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("truncate rota.jobs, rota.finished_jobs")
        while count > 0:
            part = min(count, 1000)
            db.execute(FILL, {"type": "noop", "count": part, "size": size})
            count -= part
        db.execute("vacuum analyze rota.jobs")
        db.execute("checkpoint")


def measure(dsn: str, datadir: Path, options: argparse.Namespace) -> None:
    fill(dsn, options.jobs, options.payload)
    context = multiprocessing.get_context("spawn")
    queue: Any = context.SimpleQueue()
    processes = [
        context.Process(target=drain, args=(dsn, options, queue))
        for _ in range(options.processes)
    ]
    server = server_seconds(datadir)
    for process in processes:
        process.start()
    reports = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    server = server_seconds(datadir) - server
    with psycopg.connect(dsn) as db:
        row = db.execute("select count(*) from rota.finished_jobs").fetchone()
        assert row == (options.jobs,), row
    seconds = max(report[0] for report in reports)
    cpu = sum(report[1] for report in reports)
    memory = max(report[2] for report in reports)
    print(
        f"{options.jobs / seconds:8.0f} jobs/s   client {cpu / options.jobs * 1e6:6.1f} us/job"
        f"   server {server / options.jobs * 1e6:6.1f} us/job   memory {memory:4.0f} MB"
    )
    phases = sum((report[3] for report in reports), Counter[str]())
    total = sum(phases.values())
    for phase, samples in phases.most_common():
        print(f"    {phase:8} {samples / total * cpu / options.jobs * 1e6:6.1f} us/job")


def main() -> None:
    """Measure as often as told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=0, help="else the default")
    parser.add_argument("--batch", type=int, default=0, help="else the default")
    parser.add_argument("--payload", type=int, default=0, help="characters of a payload")
    parser.add_argument("--plain", action="store_true", help="plain functions, in threads")
    parser.add_argument("--log", action="store_true", help="write the log to nowhere")
    parser.add_argument("--phases", action="store_true", help="show the phases; costs 5 us")
    options = parser.parse_args()
    bindir, _ = find_binaries(os.environ.get("ROTA_PG_BINDIR"))
    with EmbeddedPostgres(bindir=bindir, settings=["max_connections=200"]) as server:
        dsn = server.url("postgres")
        install = ["psql", "-X", "-q", "-d", dsn, "-f", str(SQL / "install.sql")]
        subprocess.run(install, check=True)
        with psycopg.connect(dsn) as db:
            row = db.execute("show data_directory").fetchone()
        assert row is not None
        for _ in range(options.rounds):
            measure(dsn, Path(row[0]), options)


if __name__ == "__main__":
    main()
