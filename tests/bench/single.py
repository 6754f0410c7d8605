"""The CPU of the plain calls, one by one and in batches, beside that of another tree of rota.

    single.py PATH [--rounds N] [--calls N]

PATH is a checkout of the other commit (git worktree add PATH COMMIT).  Both trees are installed
in one server, and their backends take turns in random order, a few hundred calls at a time.
Told is the CPU time of the backend for each call: the median over the rounds, and the lower
quartile, which a busy machine disturbs less; and how many times as fast as the other this is.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import json
import random
import subprocess
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psycopg

from rota.testing import EmbeddedPostgres

HERE = Path(__file__).resolve().parents[2]
BATCH = 100
ENQUEUE = "select rota.enqueue('noop', '{\"n\": 1}')"
WITH_KEY = "select rota.enqueue('noop', '{}', idempotency_key => gen_random_uuid()::text)"
WITH_DELAY = "select rota.enqueue('noop', '{}', delay => '1 hour')"
# By place, as some of these arguments had other names once.
UP_TO_KEY = (
    "'noop', '{}', 'special', null, null, 0, null, null, null, null, null, 'keep', null, null"
)
ON_EMPTY_LINE = f"select rota.enqueue({UP_TO_KEY}, gen_random_uuid()::text)"
BEHIND = f"select rota.enqueue({UP_TO_KEY}, 'line')"
WITH_PARENT = f"select rota.enqueue({UP_TO_KEY}, null, false, array[%s::bigint])"
WITH_LIMIT_KEY = "select rota.enqueue('noop', '{}', 'turns', limit_key => 'tenant')"
CLAIM_SPECIAL = "select job_id, lease_token from rota.claim_jobs('bench', array['special'])"
FINISH = "select rota.finish_job(%s, %s)"
CLAIM = "select job_id, lease_token from rota.claim_jobs('bench')"
CLAIM_MANY = f"select job_id, lease_token from rota.claim_jobs('bench', max_jobs => {BATCH})"
MANY = json.dumps([{"job_type": "noop", "payload": {"n": n}} for n in range(BATCH)])
LATER = json.dumps(
    [{"job_type": "noop", "payload": {"n": n}, "delay": "1 hour"} for n in range(BATCH)]
)
ROUND_TRIP = (
    "select job_id, lease_token from rota.finish_and_claim("
    "'bench', array[%s]::bigint[], array[%s]::bigint[])"
)


class Bench:
    """One database with one tree of rota, and the backend that is measured."""

    def __init__(self, server: EmbeddedPostgres, name: str, tree: Path) -> None:
        with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
            admin.execute(f"create database {name}".encode())
        install = ["psql", "-X", "-q", "-d", server.url(name), "-f", tree / "sql/install.sql"]
        subprocess.run(install, check=True)
        self._db = psycopg.connect(server.url(name), autocommit=True, prepare_threshold=0)
        self._stat = Path(f"/proc/{self._db.info.backend_pid}/schedstat")

    def _cpu(self) -> int:
        return int(self._stat.read_text().split()[0])

    def _timed(self, query: str, each: list[Any], jobs: int = 1) -> tuple[float, list[Any]]:
        """Return the CPU microseconds of a call for each of these, per job, and their rows."""
        before, rows = self._cpu(), []
        for values in each:
            rows += self._db.execute(query.encode(), values).fetchall()
        return (self._cpu() - before) / len(each) / jobs / 1000, rows

    def _truncate(self) -> None:
        # All but settings: the name of the table of checks has changed once.
        self._db.execute("""
            do $$ begin
                execute (
                    select 'truncate ' || string_agg('rota.' || c.relname, ', ')
                    from pg_class as c
                    where c.relnamespace = 'rota'::regnamespace and c.relkind = 'r'
                      and c.relname in ('jobs', 'finished_jobs', 'dependencies', 'rechecks',
                        'pending_checks')
                );
            end $$
        """)

    def round(self, calls: int) -> dict[str, float]:
        """Let jobs go their way, and time each step."""
        plain: list[Any] = [None] * calls
        took = {}
        took["enqueue"], _ = self._timed(ENQUEUE, plain)
        took["claim_jobs"], jobs = self._timed(CLAIM, plain)
        took["heartbeat"], _ = self._timed("select rota.heartbeat(%s, %s)", jobs)
        took["finish_job"], _ = self._timed("select rota.finish_job(%s, %s)", jobs)
        took["claim_jobs + finish_job"] = took["claim_jobs"] + took["finish_job"]

        many = max(1, calls // BATCH)
        took["enqueue_many, a job"], _ = self._timed(
            "select count(*) from rota.enqueue_many(%s)", [(MANY,)] * many, BATCH
        )
        took[f"claim {BATCH}, a job"], jobs = self._timed(CLAIM_MANY, [None] * many, BATCH)
        ids, tokens = ([job[column] for job in jobs] for column in (0, 1))
        lists = [(ids[n : n + BATCH], tokens[n : n + BATCH]) for n in range(0, len(ids), BATCH)]
        took[f"heartbeat {BATCH}, a job"], _ = self._timed(
            "select count(*) from rota.heartbeat_jobs(%s, %s)", lists, BATCH
        )
        took[f"finish {BATCH}, a job"], _ = self._timed(
            "select count(*) from rota.finish_jobs(%s, %s)", lists, BATCH
        )

        self._timed(ENQUEUE, plain)
        _, first = self._timed(CLAIM, [None])
        before, job = self._cpu(), first[0]
        for _ in range(calls - 1):
            (job,) = self._db.execute(ROUND_TRIP.encode(), job).fetchall()
        took["finish_and_claim"] = (self._cpu() - before) / (calls - 1) / 1000
        took["enqueue with a key"], _ = self._timed(WITH_KEY, plain)
        took["enqueue with a delay"], _ = self._timed(WITH_DELAY, plain)
        took["enqueue_many with delays"], _ = self._timed(
            "select count(*) from rota.enqueue_many(%s)", [(LATER,)] * many, BATCH
        )
        self._truncate()

        took["enqueue on an empty line"], rows = self._timed(ON_EMPTY_LINE, plain)
        took["enqueue with a parent"], _ = self._timed(WITH_PARENT, rows)
        self._truncate()
        took["enqueue with a limit key"], _ = self._timed(WITH_LIMIT_KEY, plain)
        self._truncate()
        took["enqueue behind others"], _ = self._timed(BEHIND, plain)
        before = self._cpu()
        for _ in plain:
            (job,) = self._db.execute(CLAIM_SPECIAL.encode()).fetchall()
            self._db.execute(FINISH.encode(), job)
        took["claim + finish in a line"] = (self._cpu() - before) / calls / 1000
        self._truncate()
        return took


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    # What a disk costs is the same for both, and not of the call.
    settings = ["shared_buffers=256MB", "autovacuum=off", "fsync=off"]
    with EmbeddedPostgres(settings=settings) as server:
        benches = {
            "other": Bench(server, "other", arguments.other),
            "this": Bench(server, "this", HERE),
        }
        taken: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for turn in range(arguments.rounds + 1):
            for tree in random.sample(list(benches), len(benches)):
                for step, micros in benches[tree].round(arguments.calls).items():
                    if turn:  # the first makes the plans
                        taken[step, tree].append(micros)
    print("CPU us a call: median (lower quartile)")
    print(f"{'':26}{'other':>18}{'this':>18}{'times as fast':>20}")
    for step in dict.fromkeys(step for step, _ in taken):
        told = [
            (median(taken[step, tree]), quantiles(taken[step, tree], n=4)[0])
            for tree in benches
        ]
        cells = "".join(f"{middle:10.1f} ({low:.1f})".rjust(18) for middle, low in told)
        ratios = [told[0][which] / told[1][which] for which in (0, 1)]
        print(f"{step:26}{cells}{f'{ratios[0]:.2f} ({ratios[1]:.2f})':>20}")


if __name__ == "__main__":
    main()
