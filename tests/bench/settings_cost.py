"""What a setting of another queue costs, and what enqueue does, beside another tree of rota.

    settings_cost.py [--rounds N] [--calls N] [--against PATH]

Each call is measured as CPU time of its own backend, in turn with and without one grant, limit,
queue setting and schedule that has nothing to do with it; printed are the medians over the
rounds, and the ratio to those without.  With a path, enqueue is measured there as well, in the
same rounds.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from rota.testing import EmbeddedPostgres

HERE = Path(__file__).resolve().parents[2]
SETTINGS = {
    "nothing": "",
    "grant": "create role bench_other; select rota.grant_queue('bench_other', 'other')",
    "producer grant": "create role bench_maker;"
    " select rota.grant_queue('bench_maker', 'other', 'producer')",
    "limit": "select rota.set_limit(queue => 'other', max_running => 5)",
    "queue setting": "select rota.set_queue('other', lease => '5 minutes')",
    "schedule": "select rota.schedule_job('other', '0 3 * * *', 'other', queue => 'other')",
}
CLAIM = "select job_id, lease_token from rota.claim_jobs('bench')"
JOBS = json.dumps([{"job_type": "noop", "payload": {"n": n}} for n in range(1000)])
KEYED = json.dumps(
    [{"job_type": "noop", "payload": {"n": n}, "idempotency_key": f"k{n}"} for n in range(1000)]
)
Db = psycopg.Connection[Any]


class Bench:
    """One database with one tree of rota and one setting, and the backend that is measured."""

    def __init__(self, server: EmbeddedPostgres, name: str, tree: Path, setting: str) -> None:
        with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
            admin.execute(f"create database {name}".encode())
        install = ["psql", "-X", "-q", "-d", server.url(name), "-f", tree / "sql/install.sql"]
        subprocess.run(install, check=True)
        self._db: Db = psycopg.connect(server.url(name), autocommit=True, prepare_threshold=0)
        # Not a superuser: such a one is confined to nothing, and known by less.
        user = f"bench_user_{name}"
        for command in (
            *filter(None, setting.split(";")),
            f"create role {user} login",
            f"grant usage on schema rota to {user}",
            f"grant execute on all functions in schema rota to {user}",
            f"set session authorization {user}",
        ):
            # A role is of all databases.
            with suppress(psycopg.errors.DuplicateObject):
                self._db.execute(command.encode(), prepare=False)
        row = self._db.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        self._stat = Path(f"/proc/{row[0]}/schedstat")

    def cpu(self) -> int:
        return int(self._stat.read_text().split()[0])

    def timed(self, calls: int, query: Any, each: list[Any] | None = None) -> float:
        """Return the CPU microseconds of a call."""
        before = self.cpu()
        for values in each or [None] * calls:
            self._db.execute(query, values).fetchall()
        return (self.cpu() - before) / (len(each) if each else calls) / 1000

    def round(self, calls: int) -> dict[str, float]:
        """Let jobs go their way, and time each step."""
        took = {"enqueue": self.timed(calls, "select rota.enqueue('noop', '{\"n\": 1}')")}
        before, jobs = self.cpu(), []
        for _ in range(calls):
            jobs += self._db.execute(CLAIM).fetchall()
        took["claim"] = (self.cpu() - before) / calls / 1000
        took["heartbeat"] = self.timed(calls, "select rota.heartbeat(%s, %s)", jobs)
        took["heartbeat_jobs"] = self.timed(
            calls, "select rota.heartbeat_jobs(array[%s]::bigint[], array[%s]::bigint[])", jobs
        )
        took["finish"] = self.timed(calls, "select rota.finish_job(%s, %s)", jobs)
        for name, many in (("enqueue_many, per job", JOBS), ("... with keys", KEYED)):
            query = "select count(*) from rota.enqueue_many(%s)"
            took[name] = self.timed(1, query, [(many,)]) / 1000
            self._clear()
        return took

    def _clear(self) -> None:
        self._db.execute("reset session authorization")
        row = self._db.execute("select current_database()").fetchone()
        assert row is not None
        self._db.execute("truncate rota.jobs, rota.finished_jobs")
        self._db.execute(b"set session authorization bench_user_%s" % row[0].encode())


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    with EmbeddedPostgres(settings=["shared_buffers=256MB", "autovacuum=off"]) as server:
        trees = {"here": HERE}
        if arguments.against:
            trees = {"blocks": arguments.against, **trees}
        benches = {
            (tree, name): Bench(server, f"{tree}_{number}", path, setting)
            for tree, path in trees.items()
            for number, (name, setting) in enumerate(SETTINGS.items())
        }
        taken: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
        for turn in range(arguments.rounds + 1):
            for (tree, name), bench in benches.items():
                for step, micros in bench.round(arguments.calls).items():
                    if turn:
                        taken[tree, name, step].append(micros)
        steps = list(dict.fromkeys(step for _, _, step in taken))
        for tree in trees:
            print(f"{tree}: CPU us a call without any setting, and the ratio to it with one")
            print(f"{'':24}" + "".join(f"{name:>16}" for name in SETTINGS))
            for step in steps:
                base = median(taken[tree, "nothing", step])
                ratios = [median(taken[tree, name, step]) / base for name in SETTINGS]
                print(f"{step:24}{base:16.1f}" + "".join(f"{r:16.2f}" for r in ratios[1:]))
        if arguments.against:
            for step in steps:
                old, new = (median(taken[tree, "nothing", step]) for tree in trees)
                print(f"{step:24}{old:10.1f} -> {new:.1f} us, {old / new:.2f} of before")


if __name__ == "__main__":
    main()
