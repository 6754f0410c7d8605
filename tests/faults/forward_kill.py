"""Kill forwarders again and again while jobs travel, and look for each job at its end.

    forward_kill.py [--jobs N] [--kills N] [--seed N]

Two databases, producers with an ordering key of their own each, of whose transactions a third
rolls back, and two forwarders at a time, each killed with -9 and followed by another.  In the
end each committed job has to be in the other database once, those of a key in the order in
which they were committed, and no other.  Then as many jobs are carried without kills, to see
what that costs the server, and singly, to see how long one takes.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

import rota.forwarding
from rota.cli.databases import run_forwarder
from rota.testing.server import EmbeddedPostgres
from support.supervisor import Process, Supervisor, running
from support.waiting import comes_true

PRODUCERS = 8
PATIENCE = 60.0
MAX_COST, MAX_LATENCY = 100.0, 12.0
"""Microseconds of CPU a job, and milliseconds for half of those sent singly."""
TICKS = os.sysconf("SC_CLK_TCK")
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["rota.cli.databases"])


@dataclass
class Count:
    """What a run has found."""

    committed: int = 0
    rolled_back: int = 0
    kills: int = 0
    problems: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        names = ("lost", "ghosts", "doubled", "out of order")
        found = ", ".join(f"{name} {self.problems[name]}" for name in names)
        return (
            f"{self.committed} committed, {self.rolled_back} rolled back, "
            f"{self.kills} kills: {found}"
        )


def play(urls: list[str], jobs: int, kills: int, seed: int, pause: float = 0.5) -> Count:
    """Enqueue so many jobs in the first database for the second, and kill meanwhile."""
    count = Count()
    dice = random.Random(seed)
    committed: list[list[int]] = [[] for _ in range(PRODUCERS)]
    producers = [
        threading.Thread(
            target=_produce,
            args=(urls[0], key, jobs // PRODUCERS, random.Random(seed + key), committed[key]),
            # As long as there are kills to come.
            kwargs={"pause": kills / 2 * (pause + 0.1) / (jobs / PRODUCERS)},
        )
        for key in range(PRODUCERS)
    ]
    for thread in producers:
        thread.start()
    killers = [
        threading.Thread(
            target=_kill_again_and_again,
            args=(urls, kills // 2, pause, random.Random(dice.random()), count),
        )
        for _ in range(2)
    ]
    for thread in killers:
        thread.start()
    for thread in producers + killers:
        thread.join()
    with forwarding(urls):
        wait_until_carried(urls[0])
    count.committed = sum(len(each) for each in committed)
    count.rolled_back = jobs // PRODUCERS * PRODUCERS - count.committed
    _judge(urls[1], committed, count)
    return count


def _produce(
    url: str, key: int, jobs: int, dice: random.Random, committed: list[int], *, pause: float
) -> None:
    with psycopg.connect(url) as db:
        for number in range(jobs):
            time.sleep(dice.uniform(0, 2) * pause)
            # Half of the jobs are in the line of their producer, half in none.
            line = f"line {key}" if number % 2 else None
            db.execute(
                "select rota.enqueue_to(2, 'x', %s::jsonb, ordering_key => %s)",
                (json.dumps({"key": key, "n": number}), line),
            )
            if dice.random() < 1 / 3:
                db.rollback()
            else:
                db.commit()
                committed.append(number)


def _kill_again_and_again(
    urls: list[str],
    kills: int,
    pause: float,
    dice: random.Random,
    count: Count,
) -> None:
    with forwarding(urls) as forwarder:
        for _ in range(kills):
            time.sleep(dice.uniform(0.5, 1.5) * pause)
            forwarder.kill(0)
    count.kills += forwarder.counts["killed"]


@contextmanager
def forwarding(
    urls: list[str], max_jobs: Callable[[], int] = lambda: rota.forwarding.MAX_JOBS
) -> Iterator[Supervisor]:
    """Run a forwarder, which is a mover too, and carries so many jobs at a time."""

    def start() -> Process:
        process = _processes.Process(target=_forward, args=(urls, max_jobs()))
        process.start()
        return process

    with running(start, last_words=signal.SIGUSR1) as forwarder:
        yield forwarder


def _forward(urls: list[str], max_jobs: int) -> None:
    signal.signal(signal.SIGUSR1, _tell_tasks)
    rota.forwarding.MAX_JOBS = max_jobs
    run_forwarder(urls)


def _tell_tasks(*_: object) -> None:
    for task in asyncio.all_tasks():
        task.print_stack()


def wait_until_carried(url: str) -> None:
    """Wait until no job is to be carried any more."""
    with psycopg.connect(url, autocommit=True) as db:
        is_empty = "select not exists (select from rota.jobs)"
        comes_true(lambda: ask(db, is_empty), PATIENCE, every=0.05)
        left = db.execute("select to_jsonb(j) from rota.jobs as j limit 5").fetchall()
        assert not left, f"{left} and others were not carried within {PATIENCE:g} s"


def ask(db: psycopg.Connection[Any], query: str) -> Any:
    row = db.execute(query.encode()).fetchone()
    return row[0] if row else None


def _judge(url: str, committed: list[list[int]], count: Count) -> None:
    arrived: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
    with psycopg.connect(url) as db:
        for key, number, is_ordered in db.execute(
            "select (payload ->> 'key')::int, (payload ->> 'n')::int, ordering_key is not null"
            " from rota.job_runs order by id"
        ):
            arrived[key].append((number, is_ordered))
    for key, sent in enumerate(committed):
        numbers = Counter(number for number, _ in arrived[key])
        count.problems["lost"] += len(set(sent) - numbers.keys())
        count.problems["ghosts"] += len(numbers.keys() - set(sent))
        count.problems["doubled"] += sum(times - 1 for times in numbers.values())
        line = [number for number, is_ordered in arrived[key] if is_ordered]
        count.problems["out of order"] += sum(a > b for a, b in pairwise(line))


def cost(urls: list[str], jobs: int) -> tuple[float, float]:
    """Return what carrying a job costs the servers, in us of CPU, without and with a line."""
    costs = []
    for line in (None, "line"):
        with psycopg.connect(urls[0], autocommit=True) as db:
            db.execute(
                "select rota.enqueue_to(2, 'x', ordering_key => %s)"
                " from generate_series(1, %s)",
                (line, jobs),
            )
            with forwarding(urls):
                used, until = 0.0, time.monotonic() + PATIENCE
                while ask(db, "select count(*) from rota.jobs") and time.monotonic() < until:
                    used = max(used, _cpu(db))
                    time.sleep(0.01)
            costs.append(used / jobs * 1e6)
    return costs[0], costs[1]


def _cpu(db: psycopg.Connection[Any]) -> float:
    """Return the seconds of CPU that the backends have used which carry and receive."""
    used = 0
    for (pid,) in db.execute(
        "select pid from pg_stat_activity"
        " where application_name in ('rota forwarder', 'rota receiver')"
    ).fetchall():
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used += int(words[11]) + int(words[12])
    return used / TICKS


def latency(urls: list[str], jobs: int) -> list[float]:
    """Return how many seconds each of some jobs took, sent one after the other."""
    took = []
    with (
        forwarding(urls),
        psycopg.connect(urls[0], autocommit=True) as here,
        psycopg.connect(urls[1], autocommit=True) as there,
    ):
        for number in range(-10, jobs):
            before = ask(there, "select coalesce(max(id), 0) from rota.jobs")
            began = time.monotonic()
            here.execute("select rota.enqueue_to(2, 'x')")
            while ask(there, "select coalesce(max(id), 0) from rota.jobs") == before:
                pass
            if number >= 0:
                took.append(time.monotonic() - began)
            time.sleep(0.05)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=15000, help="a third is rolled back")
    parser.add_argument("--kills", type=int, default=120)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with databases() as urls:
        count = play(urls, arguments.jobs, arguments.kills, arguments.seed)
        print(count)
        plain, in_line = cost(urls, 5000)
        print(f"CPU of the servers: {plain:.0f} us a job, {in_line:.0f} in one line")
        took = sorted(latency(urls, 200))
        print(f"one job: p50 {median(took) * 1e3:.1f} ms, p99 {took[-2] * 1e3:.1f} ms")
    is_slow = max(plain, in_line) > MAX_COST or median(took) * 1e3 > MAX_LATENCY
    if is_slow:
        print(f"too slow: {MAX_COST} us a job and {MAX_LATENCY} ms are what was promised")
    sys.exit(1 if is_slow or any(count.problems.values()) else 0)


@contextmanager
def databases() -> Iterator[list[str]]:
    """Make two databases with the numbers 1 and 2 on a server of their own."""
    install = Path(__file__).resolve().parents[2] / "sql" / "install.sql"
    with EmbeddedPostgres(settings=["max_connections=200"]) as server:
        with psycopg.connect(server.url("template1"), autocommit=True) as admin:
            for number in (1, 2):
                admin.execute(f"create database d{number}".encode())
        for number in (1, 2):
            words = ["psql", "-X", "-q", "-d", server.url(f"d{number}"), "-f", str(install)]
            subprocess.run([*words, "-v", f"database_number={number}"], check=True)
        yield [server.url("d1"), server.url("d2")]


if __name__ == "__main__":
    main()
