"""One worker process on four databases: is it fair, how fast is it, and what does it cost idle?

    many_databases.py [--runs N] [--jobs N] [--places N]

One database has many jobs and three have few, of 10 ms each.  Told is what share of what the
places could do they did while all four had jobs, what the poorest of the four got of its floor,
and how many times as many connections and how much CPU are used when nothing is left.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from rota.testing.server import EmbeddedPostgres

INSTALL = Path(__file__).resolve().parents[2] / "sql" / "install.sql"
TICKS = os.sysconf("SC_CLK_TCK")
SECONDS = 0.01
JOBS = f"""\
import asyncio
from rota import Registry
registry = Registry()

@registry.handler("x")
async def x(job):
    await asyncio.sleep({SECONDS})
"""


@contextmanager
def databases(number: int) -> Iterator[list[str]]:
    """Make so many databases on a server of their own."""
    with EmbeddedPostgres(settings=["max_connections=200"]) as server:
        with psycopg.connect(server.url("template1"), autocommit=True) as admin:
            for n in range(number):
                admin.execute(f"create database d{n}".encode())
        for n in range(number):
            words = ["psql", "-X", "-q", "-d", server.url(f"d{n}"), "-f", str(INSTALL)]
            subprocess.run([*words, "-v", f"database_number={n}"], check=True)
        yield [server.url(f"d{n}") for n in range(number)]


@contextmanager
def working(urls: list[str], places: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "jobs.py").write_text(JOBS)
        words = [word for url in urls for word in ("--database", url)]
        words += ["--concurrency", str(places), "--log-level", "warning"]
        command = [sys.executable, "-m", "rota", "worker", "jobs:registry", *words]
        with subprocess.Popen(command, cwd=folder) as worker:
            try:
                yield worker
            finally:
                worker.terminate()


def left(db: psycopg.Connection[Any]) -> int:
    row = db.execute("select count(*) from rota.jobs").fetchone()
    return int(row[0]) if row else 0


def play(urls: list[str], jobs: int, places: int) -> tuple[float, float]:
    """Return what was done of what could be, and the poorest one's part of its floor."""
    counts = [jobs, *([jobs // 16] * (len(urls) - 1))]
    dbs = [psycopg.connect(url, autocommit=True) for url in urls]
    for db, count in zip(dbs, counts, strict=True):
        db.execute("select rota.enqueue('x') from generate_series(1, %s)", (count,))
    with working(urls, places):
        began: float | None = None
        first = counts
        while True:
            now, waiting = time.monotonic(), [left(db) for db in dbs]
            # From when all are at work until the first one has no more.
            if began is None and all(a < b for a, b in zip(waiting, counts, strict=True)):
                began, first = now, waiting
            if began is not None and min(waiting) < places:
                break
            time.sleep(0.02)
        done = [a - b for a, b in zip(first, waiting, strict=True)]
        could = places / SECONDS * (now - began)
        while any(left(db) for db in dbs):
            time.sleep(0.05)
    for db in dbs:
        db.close()
    return sum(done) / could, min(done) / (sum(done) / len(done))


def idle(urls: list[str], places: int) -> None:
    """Tell what a worker without jobs takes."""
    with working(urls, places) as worker, psycopg.connect(urls[0], autocommit=True) as db:
        time.sleep(15)
        before, began = _cpu(db, worker.pid), time.monotonic()
        time.sleep(10)
        passed = time.monotonic() - began
        used = [b - a for a, b in zip(before, _cpu(db, worker.pid), strict=True)]
        rows = db.execute(
            "select application_name, count(*) from pg_stat_activity"
            " where application_name like 'rota %' group by 1 order by 1"
        ).fetchall()
    print(f"idle: connections to {len(urls)} databases: {dict(rows)}")
    worker_cpu, backends_cpu = (each / passed for each in used)
    print(f"idle: CPU of the worker {worker_cpu:.1%}, of its backends {backends_cpu:.1%}")


def _cpu(db: psycopg.Connection[Any], pid: int) -> tuple[float, float]:
    rows = db.execute(
        "select pid from pg_stat_activity where application_name like 'rota %'"
    ).fetchall()
    return _seconds(pid), sum(_seconds(backend) for (backend,) in rows)


def _seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=8000)
    parser.add_argument("--places", type=int, default=16)
    arguments = parser.parse_args()
    with databases(4) as urls:
        for number in range(arguments.runs):
            share, poorest = play(urls, arguments.jobs, arguments.places)
            print(
                f"run {number + 1}: {share:.2f} of ideal, the poorest {poorest:.2f} of its part"
            )
        idle(urls, arguments.places)


if __name__ == "__main__":
    main()
