"""Acts on 100,000 jobs, and what claims feel of them: `make bench-acts`.

One session enqueues, claims and finishes a job every few milliseconds and times each claim.
Another one acts on jobs of another queue, a second at a time, and rests as long in between:
so the claims with and without an act under way are of the same minutes of the machine.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from math import nan
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg
from psycopg.types.json import Jsonb

from rota.testing import EmbeddedPostgres

TREE = Path(__file__).resolve().parents[2]
SPAN = 1.0
DEAD = """
    with dead as (
        insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,
            status, run_at, attempts, lease_token, locked_by, last_error, error_type, failed_at,
            created_at, updated_at, started_at, finished_at)
        select nextval('rota.jobs_id_seq'), 'dead', 'charge', '{"cents": 5}', 0, 10, 'dead',
            now(), 10, 1, 'w', 'card ' || n || ' declined', 'Declined', now(), now(), now(),
            now(), now()
        from generate_series(1, %s) as n
        returning id
    )
    insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker,
        started_at, failed_at, message)
    select id, 1, 10, 'dead', 'charge', 'w', now(), now(), 'card declined' from dead
"""
ACTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("discard", {}, {}),
    ("retry", {"error": "card 1 declined"}, {"merge": {"currency": "EUR"}}),
    ("set_priority", {}, {"priority": 5}),
    ("reschedule", {}, {"delay": "1 hour"}),
    ("move", {}, {"queue": "moved"}),
    ("cancel", {}, {"reason": "of no use"}),
    ("retry", {"status": "cancelled"}, {}),
    ("cancel", {}, {}),
    ("erase", {"payload": {"cents": 5}}, {}),
    ("purge", {}, {}),
]


class Claims(threading.Thread):
    """Claim all the time; how long each took, with and without an act under way."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self._db = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
        self.is_acting = False
        self.is_over = False
        self.took: dict[bool, list[float]] = {False: [], True: []}

    def run(self) -> None:
        while not self.is_over:
            self._db.execute("select rota.enqueue('noop', queue => 'live')")
            was_acting, began = self.is_acting, time.perf_counter()
            job = self._db.execute(
                "select job_id, lease_token from rota.claim_jobs('w', '{live}')"
            ).fetchone()
            took = time.perf_counter() - began
            if was_acting == self.is_acting:
                self.took[was_acting].append(took * 1000)
            self._db.execute("select rota.finish_job(%s, %s)", job)
            time.sleep(0.002)


def percentile(took: list[float], number: int) -> float:
    """Return a percentile; no number where a small run has made too few claims."""
    return quantiles(took, n=100)[number - 1] if len(took) > 1 else nan


def act(db: psycopg.Connection[Any], claims: Claims, what: str, given: Any, more: Any) -> str:
    """Act on all, and return a line of the table."""
    claims.took = {False: [], True: []}
    after_id, jobs, busy, conflicts, longest = 0, 0, 0.0, 0, 0.0
    while after_id is not None:
        claims.is_acting = True
        began = time.perf_counter()
        while after_id is not None and time.perf_counter() < began + SPAN:
            call = time.perf_counter()
            row = db.execute(
                "select changed, jsonb_array_length(conflicts), next_after_id"
                " from rota.act_on_jobs(%s, %s, %s, after_id => %s)",
                [what, Jsonb({"queue": "dead", **given}), Jsonb(more), after_id],
            ).fetchone()
            assert row is not None
            longest = max(longest, time.perf_counter() - call)
            jobs, conflicts, after_id = jobs + row[0], conflicts + row[1], row[2]
        busy += time.perf_counter() - began
        claims.is_acting = False
        time.sleep(SPAN)
    p99 = {which: percentile(took, 99) for which, took in claims.took.items()}
    p50 = {which: percentile(took, 50) for which, took in claims.took.items()}
    return (
        f"{what:13}{jobs:8}{conflicts:10}{busy:8.1f}{jobs / busy:10.0f}{longest * 1000:10.0f}"
        f"{p50[False]:10.2f}{p50[True]:9.2f}{p99[False]:9.2f}{p99[True]:9.2f}"
        f"{p99[True] / p99[False]:8.2f}"
    )


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    arguments = parser.parse_args()
    with EmbeddedPostgres(settings=["shared_buffers=512MB", "max_wal_size=4GB"]) as server:
        dsn = server.url("postgres")
        install = ["psql", "-X", "-q", "-d", dsn, "-f", TREE / "sql/install.sql"]
        subprocess.run(install, check=True)
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=0) as db:
            db.execute(DEAD, [arguments.jobs])
            db.execute("analyze")
            claims = Claims(dsn)
            claims.start()
            time.sleep(SPAN)
            print(f"{'':13}{'':8}{'':10}{'':8}{'':10}{'longest':>10}", end="")
            print(f"{'claim p50, ms':>19}{'claim p99, ms':>18}")
            print(f"{'act':13}{'jobs':>8}{'conflicts':>10}{'s':>8}{'jobs/s':>10}", end="")
            print(
                f"{'call, ms':>10}{'without':>10}{'with':>9}{'without':>9}{'with':>9}", end=""
            )
            print(f"{'ratio':>8}")
            try:
                was_moved = False
                for what, given, more in ACTS:
                    chosen = {**given, **({"queue": "moved"} if was_moved else {})}
                    print(act(db, claims, what, chosen, more), flush=True)
                    was_moved = was_moved or what == "move"
            finally:
                claims.is_over = True
                claims.join()


if __name__ == "__main__":
    main()
