"""What claims cost while another session holds an old snapshot: part of `make bench-waiting`.

Each scenario has two databases.  In one of them a session holds a snapshot, and then many jobs
pass through, so that all their index entries stay.  After that the same calls are measured in
both, taking turns: the CPU of the backend for an enqueue, a claim and a finish, of one job and
of ten.  Shown is the median of the control, that under the snapshot, and their ratio.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from rota.testing import EmbeddedPostgres, find_binaries

TREE = Path(__file__).resolve().parents[2]
Db = psycopg.Connection[Any]
Costs = dict[str, list[float]]
CLAIM = """
    select array_agg(job_id), array_agg(lease_token), count(*)
    from rota.claim_jobs('w', array[%s], %s)
"""
MANY = """
    select count(*) from rota.enqueue_many((
        select jsonb_agg(jsonb_build_object('job_type', 'x', 'queue', %s::text)
            || case when %s::text is null then '{}'
                else jsonb_build_object(%s::text, 'k' || n %% %s) end)
        from generate_series(1, %s) as n))
"""
ROUNDS = 6
CALLS = 50


@dataclass
class Kind:
    """Jobs of a queue, with keys of some sort."""

    queue: str
    key: str | None = None
    keys: int = 1


@dataclass
class Scenario:
    """What passes by, what is measured, and what is set before."""

    passing: Kind
    measured: Kind
    setting: str = ""
    at_once: int = 1000


PLAIN = Kind("q")
LIMIT = "select rota.set_limit(limit_key => 'k0', max_running => 100)"
SCENARIOS = {
    "plain, beside ordered ones": Scenario(Kind("o", "ordering_key", 500), PLAIN),
    "plain, beside limited ones": Scenario(Kind("o", "limit_key"), PLAIN, LIMIT, 100),
    "plain, beside fair ones": Scenario(Kind("o", "limit_key", 100), PLAIN),
    "plain, beside their own": Scenario(PLAIN, PLAIN),
    "limited": Scenario(Kind("q", "limit_key"), Kind("q", "limit_key"), LIMIT, 100),
    "fair": Scenario(Kind("q", "limit_key", 100), Kind("q", "limit_key", 100)),
    "ordered": Scenario(Kind("q", "ordering_key", 500), Kind("q", "ordering_key", 500)),
    "ordered, of one key": Scenario(Kind("q", "ordering_key"), Kind("q", "ordering_key")),
}


class Place:
    """A database with one tree's rota in it, and the session that is measured."""

    def __init__(self, server: EmbeddedPostgres, name: str, tree: Path) -> None:
        self._dsn = server.url(name)
        with psycopg.connect(server.url("template1"), autocommit=True) as admin:
            admin.execute(f'create database "{name}"'.encode())
        command = ["psql", "-X", "-q", "-d", self._dsn, "-f", tree / "sql" / "install.sql"]
        subprocess.run(command, check=True)
        self.db: Db = psycopg.connect(self._dsn, autocommit=True, prepare_threshold=0)
        self.db.execute("set client_min_messages = error")

    def hold(self) -> None:
        """Hold a snapshot from now on."""
        self._holder = psycopg.connect(self._dsn)
        self._holder.execute("set transaction isolation level repeatable read")
        self._holder.execute("select from rota.jobs limit 1")

    def add(self, kind: Kind, count: int) -> None:
        arguments = [kind.queue, kind.key, kind.key, kind.keys, count]
        self.db.execute(MANY, arguments)

    def enqueue(self, kind: Kind, number: int) -> None:
        key = f", {kind.key} => 'k{number % kind.keys}'" if kind.key else ""
        query = f"select rota.enqueue('x', queue => '{kind.queue}'{key})"
        self.db.execute(query.encode())

    def claim(self, queue: str, count: int) -> Any:
        """Return ids and tokens; tick where the first jobs have still to be let in."""
        for _ in range(1000):
            row = self.db.execute(CLAIM, [queue, count]).fetchone()
            if row and row[2]:
                return row[:2]
            left = self.db.execute(
                "select from rota.jobs where queue = %s limit 1", [queue]
            ).fetchone()
            if left is None:
                return None
            self.tick()
        raise RuntimeError(f"the jobs of queue {queue} do not start")

    def finish(self, jobs: Any) -> None:
        self.db.execute("select from rota.finish_jobs(%s, %s)", jobs)

    def tick(self) -> None:
        # Prepared, it would not be alone in its transaction.
        self.db.execute("select from rota.tick()", prepare=False)

    def empty(self, queue: str, at_once: int) -> None:
        while jobs := self.claim(queue, at_once):
            self.finish(jobs)

    def let_pass(self, kind: Kind, count: int, at_once: int) -> None:
        for _ in range(0, count, 1000):
            self.add(kind, min(count, 1000))
            self.empty(kind.queue, at_once)
            self.tick()

    def cpu(self) -> float:
        """Microseconds that the session's backend has been on a processor."""
        stat = Path(f"/proc/{self.db.info.backend_pid}/schedstat")
        return int(stat.read_text().split()[0]) / 1000

    def measure(self, kind: Kind, costs: Costs) -> None:
        """Do each call some times; append what each took for one job."""

        def timed(name: str, call: Callable[[], Any], jobs: int = 0) -> Any:
            begun = self.cpu()
            result = call()
            costs[name].append((self.cpu() - begun) / (jobs or len(result[0])))
            return result

        for number in range(CALLS):
            timed("enqueue", lambda n=number: self.enqueue(kind, n), 1)
        self.tick()
        for _ in range(CALLS):
            jobs = timed("claim", lambda: self.claim(kind.queue, 1))
            timed("finish", lambda j=jobs: self.finish(j), 1)
        self.add(kind, 10 * CALLS)
        self.tick()
        for _ in range(CALLS // 2):
            jobs = timed("claim of ten", lambda: self.claim(kind.queue, 10))
            timed("finish of ten", lambda j=jobs: self.finish(j), len(jobs[0]))
        self.empty(kind.queue, 1000)
        self.tick()


def compare(server: EmbeddedPostgres, name: str, tree: Path, steps: list[int]) -> None:
    scenario = SCENARIOS[name]
    label = f"{name} {tree.resolve().name}"
    control = Place(server, "control", tree)
    held = Place(server, "held", tree)
    for place in (control, held):
        if scenario.setting:
            place.db.execute(scenario.setting.encode())
        place.let_pass(scenario.measured, 2000, scenario.at_once)
        place.db.execute("vacuum analyze")
    held.hold()
    passed = 0
    for step in steps:
        begun = time.monotonic()
        held.let_pass(scenario.passing, step - passed, scenario.at_once)
        rate = (step - passed) / (time.monotonic() - begun)
        passed = step
        found: dict[bool, Costs] = {False: defaultdict(list), True: defaultdict(list)}
        for place in (control, held):
            place.measure(scenario.measured, defaultdict(list))
        for _ in range(ROUNDS):
            control.measure(scenario.measured, found[False])
            held.measure(scenario.measured, found[True])
        print(f"{label}, after {step} at {rate:.0f}/s, microseconds of CPU a job:")
        for call, costs in found[False].items():
            before = statistics.median(costs)
            after = statistics.median(found[True][call])
            print(f"    {call:15} {before:8.0f} {after:8.0f} {after / before:8.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--jobs", type=int, nargs="+", default=[100_000, 1_000_000], help="that pass by"
    )
    parser.add_argument("--against", type=Path, help="another tree to measure as well")
    parser.add_argument("--only", choices=SCENARIOS, action="append")
    options = parser.parse_args()
    trees = [TREE] + ([options.against] if options.against else [])
    bindir, _ = find_binaries(None)
    settings = ["max_connections=50", "fsync=off", "shared_buffers=512MB", "jit=off"]
    for name in options.only or SCENARIOS:
        for tree in trees:
            # A server of its own: what one scenario leaves behind is none of the next.
            with EmbeddedPostgres(bindir=bindir, settings=settings) as server:
                compare(server, name, tree, options.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
