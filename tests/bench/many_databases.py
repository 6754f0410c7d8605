"""One worker process on four databases: is it fair, how fast is it, and what does it cost idle?

    many_databases.py [--runs N] [--jobs N] [--places N] [--kill] [--stop]

Two servers have two databases each.  One database has many jobs and three have few, of 10 ms
each.  Told is what share of what the places could do they did while all four had jobs, also as
a part of what the same worker does on one database just before: what a busy machine or a timer
costs both is no price of many databases.  Told, too, is what the poorest of the four got of its
floor, how long a single job waits, and how many connections and how much CPU are used when
nothing is left.  With --kill the second server is killed and comes back after 3 s, with --stop
it is stopped for 3 s: told is what the databases of the first did meanwhile of what they did
before, and when the others were worked for again.  The exit code is 1 if one of the goals is
missed.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from support.server import Server, give_away

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


SHARE, FLOOR, P99, IDLE_CPU, IDLE_CONNECTIONS = 0.85, 0.95, 15.0, 0.02, 2
OTHERS, BACK = 0.9, 3.0
SETTLING = 70.0
"""What is to be reached: of ideal, of a floor, ms, of a CPU, to each database; of before, s;
and how long a worker is left alone before it is called idle."""


@contextmanager
def databases() -> Iterator[tuple[list[str], Server]]:
    """Make two servers with two databases each; return these, and the second server."""
    urls: list[str] = []
    with tempfile.TemporaryDirectory() as home:
        give_away(Path(home))
        servers = []
        for name in ("first", "second"):
            Path(home, name).mkdir()
            servers.append(Server.create(Path(home, name)))
        try:
            for n in range(4):
                server = servers[n // 2]
                server.execute(f"create database d{n}")
                words = ["psql", "-X", "-q", "-d", server.url(f"d{n}"), "-f", str(INSTALL)]
                subprocess.run([*words, "-v", f"database_number={n}"], check=True)
                urls.append(server.url(f"d{n}"))
            yield urls, servers[1]
        finally:
            for server in servers:
                server.destroy()


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


def alone(url: str, places: int, seconds: float = 1.5) -> float:
    """Return what a worker does on one database, of what its places could."""
    jobs = round(2 * seconds * places / SECONDS)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("select rota.enqueue('x') from generate_series(1, %s)", (jobs,))
        with working([url], places):
            while left(db) > 0.9 * jobs:
                time.sleep(0.02)
            done = _rate([db], seconds) * SECONDS / places
            while left(db):
                time.sleep(0.05)
    return done


def play(urls: list[str], jobs: int, places: int) -> tuple[float, float] | None:
    """Return what was done of what could be, and the poorest one's part of its floor.

    None if one was done before the worker had begun with all.
    """
    counts = [jobs, *([jobs // 8] * (len(urls) - 1))]
    dbs = [psycopg.connect(url, autocommit=True) for url in urls]
    for db, count in zip(dbs, counts, strict=True):
        db.execute("select rota.enqueue('x') from generate_series(1, %s)", (count,))
    with working(urls, places):
        began: float | None = None
        first = counts
        while True:
            now, waiting = time.monotonic(), [left(db) for db in dbs]
            # From when all are at work until the first one has nearly no more: to count is not
            # for nothing, so seldom, and one that has no more would have less than its floor.
            if began is None and all(a < b for a, b in zip(waiting, counts, strict=True)):
                began, first = now, waiting
            if began is not None and min(waiting) < jobs // 64:
                is_early = now == began
                break
            time.sleep(0.1)
        done = [a - b for a, b in zip(first, waiting, strict=True)]
        could = places / SECONDS * (now - began)
        while any(left(db) for db in dbs):
            time.sleep(0.05)
    for db in dbs:
        db.close()
    return None if is_early else (sum(done) / could, min(done) / (sum(done) / len(done)))


def latency(urls: list[str], places: int, jobs: int = 200) -> float:
    """Return the 99th percentile of what a single job waits, in ms."""
    dbs = [psycopg.connect(url, autocommit=True) for url in urls]
    waits: list[float] = []
    with working(urls, places):
        for number in range(-8, jobs):
            db = dbs[number % len(dbs)]
            row = db.execute("select rota.enqueue('x')").fetchone()
            if number == -1:
                time.sleep(2.0)
            while left(db):
                time.sleep(0.01)
            took = db.execute(
                "select extract(epoch from started_at - created_at)::float8"
                " from rota.finished_jobs where id = %s",
                row,
            ).fetchone()
            if number >= 0 and took:
                waits.append(took[0] * 1e3)
    for db in dbs:
        db.close()
    return sorted(waits)[-len(waits) // 100 - 1]


def outage(urls: list[str], places: int, second: Server, *, is_killed: bool) -> list[float]:
    """Return what the others did of before, and after how many seconds it goes on there."""
    dbs = [psycopg.connect(url, autocommit=True) for url in urls[:2]]
    for url in urls:
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("select rota.enqueue('x') from generate_series(1, 8000)")
    with working(urls, places):
        while any(left(db) > 7900 for db in dbs):
            time.sleep(0.02)
        before = _rate(dbs, 3.0)
        if is_killed:
            second.stop(signal.SIGQUIT)
        else:
            stopped = second.processes()
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        meanwhile = _rate(dbs, 3.0)
        if is_killed:
            second.start()
        else:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        up = time.monotonic()
        with psycopg.connect(urls[2], autocommit=True) as there:
            first = left(there)
            while left(there) >= first:
                time.sleep(0.02)
        back = time.monotonic() - up
        for db in dbs:
            while left(db):
                time.sleep(0.05)
        for url in urls[2:]:
            with psycopg.connect(url, autocommit=True) as there:
                while left(there):
                    time.sleep(0.05)
    for db in dbs:
        db.close()
    return [meanwhile / before, back]


def _rate(dbs: list[psycopg.Connection[Any]], seconds: float) -> float:
    before, began = sum(map(left, dbs)), time.monotonic()
    time.sleep(seconds)
    return (before - sum(map(left, dbs))) / (time.monotonic() - began)


def idle(urls: list[str], places: int) -> tuple[float, int]:
    """Return the CPU that a worker without jobs and its backends take, and its connections."""
    dbs = [psycopg.connect(url, autocommit=True) for url in urls[::2]]
    query = (
        "select count(*)::int from pg_stat_activity where application_name like 'rota %'"
        " group by datname"
    )
    with working(urls, places) as worker:
        time.sleep(SETTLING)  # what ended before is counted meanwhile
        before, began = _cpu(dbs, worker.pid), time.monotonic()
        time.sleep(20)
        used = (_cpu(dbs, worker.pid) - before) / (time.monotonic() - began)
        connections = max(n for db in dbs for (n,) in db.execute(query.encode()).fetchall())
    for db in dbs:
        db.close()
    return used, connections


def _cpu(dbs: list[psycopg.Connection[Any]], pid: int) -> float:
    query = "select pid from pg_stat_activity where application_name like 'rota %'"
    backends = [pid for db in dbs for (pid,) in db.execute(query.encode()).fetchall()]
    return sum(map(_seconds, [pid, *backends]))


def _seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=8000)
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--kill", action="store_true", help="kill the second server, too")
    parser.add_argument("--stop", action="store_true", help="stop it for 3 s, too")
    arguments = parser.parse_args()
    missed: list[str] = []

    def tell(what: str, figure: float, *, is_reached: bool) -> None:
        print(f"{what}: {figure:.3g}{'' if is_reached else ' (missed)'}", flush=True)
        if not is_reached:
            missed.append(what)

    with databases() as (urls, second):
        for number in range(arguments.runs):
            run = f"run {number + 1}"
            of_one = alone(urls[0], arguments.places)
            tried = (play(urls, arguments.jobs, arguments.places) for _ in range(3))
            share, poorest = next(filter(None, tried), (0.0, 0.0))
            tell(f"{run}, one database, of ideal", of_one, is_reached=True)
            tell(f"{run}, of ideal", share, is_reached=share >= SHARE)
            tell(f"{run}, of one database", share / of_one, is_reached=True)
            tell(f"{run}, of its floor", poorest, is_reached=poorest >= FLOOR)
        for name in [name for name in ("kill", "stop") if getattr(arguments, name)]:
            kept, back = outage(urls, arguments.places, second, is_killed=name == "kill")
            tell(f"{name}, the others of before", kept, is_reached=kept >= OTHERS)
            tell(f"{name}, back after s", back, is_reached=back <= BACK)
        p99 = latency(urls, arguments.places)
        tell("p99 of a single job in ms", p99, is_reached=p99 <= P99)
        cpu, connections = idle(urls, arguments.places)
        tell("idle, CPUs", cpu, is_reached=cpu <= IDLE_CPU)
        tell("idle, connections each", connections, is_reached=connections <= IDLE_CONNECTIONS)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
