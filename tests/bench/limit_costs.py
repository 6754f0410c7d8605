"""What claims cost under limits, in fair turns, and beside settings of others.

Each scenario has a database of its own and claims and finishes jobs one by one; shown is the
median time of a claim in microseconds, and the ratio to the scenario that it is compared with.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from rota.testing import EmbeddedPostgres, find_binaries

SQL = Path(__file__).resolve().parents[2] / "sql"
Db = psycopg.Connection[Any]
CLAIM = "select job_id, lease_token from rota.claim_jobs('w', %s, 1)"
ADD = (
    "select count(rota.enqueue('x', queue => %s, limit_key => %s)) from generate_series(1, %s)"
)
MANY = """
    select count(*) from rota.enqueue_many((
        select jsonb_agg(jsonb_build_object('job_type', 'x', 'queue', %s::text)
            || case when %s::text is null then '{}' else jsonb_build_object('limit_key',
                %s || case when %s > 1 then (n %% %s)::text else '' end) end)
        from generate_series(1, %s) as n))
"""


def add(db: Db, count: int, queue: str = "q", key: str | None = None, keys: int = 1) -> None:
    for _ in range(0, count, 1000):
        db.execute(MANY, [queue, key, key, keys, keys, min(count, 1000)])


def tick(db: Db, rounds: int = 3) -> None:
    for _ in range(rounds):
        # Prepared, as by default after some calls, it would not be alone in its transaction.
        db.execute("select rota.tick()", prepare=False)


def claims(db: Db, count: int, queue: str = "q") -> list[float]:
    """Claim and finish so many jobs; return how long each claim took."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        job = db.execute(CLAIM, [[queue]]).fetchone()
        times.append(time.perf_counter() - began)
        if job:
            db.execute("select rota.finish_job(%s, %s)", job)
    return times


def running(many: int) -> Callable[[Db], None]:
    def prepare(db: Db) -> None:
        db.execute("select rota.set_limit(limit_key => 'k', max_running => 20000)")
        tick(db)
        add(db, many, key="k")
        for _ in range(0, many, 100):
            db.execute("select from rota.claim_jobs('busy', '{q}', 100, '1 day')")
        add(db, 100, key="k")
        tick(db)
        db.execute("vacuum analyze")

    return prepare


def plain(db: Db) -> None:
    add(db, 600)


def setting(text: str) -> Callable[[Db], None]:
    def prepare(db: Db) -> None:
        db.execute(text)
        plain(db)
        tick(db)

    return prepare


SCENARIOS: dict[str, tuple[Callable[[Db], None], str | None]] = {
    "10 running": (running(10), None),
    "10000 running": (running(10_000), "10 running"),
    "plain": (plain, None),
    "other limit": (
        setting("select rota.set_limit(job_type => 'o', max_running => 1)"),
        "plain",
    ),
    "other queue": (setting("select rota.set_queue('o', lease => '1 h')"), "plain"),
}


def show(name: str, times: list[float], base: list[float] | None) -> None:
    median = statistics.median(times) * 1e6
    ratio = f"{median / (statistics.median(base) * 1e6):8.2f}" if base else ""
    print(f"{name:40} {median:10.0f} {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    bindir, _ = find_binaries(None)
    with EmbeddedPostgres(bindir=bindir, settings=["max_connections=50"]) as server:
        admin = psycopg.connect(server.url("postgres"), autocommit=True)

        def fresh(name: str) -> Db:
            name = name.replace(" ", "_")
            admin.execute(f'create database "{name}"'.encode())
            db = psycopg.connect(server.url(name), autocommit=True)
            _install(server.url(name))
            return db

        done: dict[str, list[float]] = {}
        dbs = {name: fresh(name) for name in SCENARIOS}
        for name, (prepare, _) in SCENARIOS.items():
            prepare(dbs[name])
            claims(dbs[name], 20)
            done[name] = []
        for _ in range(4):
            for name, db in dbs.items():
                done[name] += claims(db, 20)
        for name, (_, base) in SCENARIOS.items():
            show(name, done[name], done[base] if base else None)


def _install(url: str) -> None:
    subprocess.run(["psql", "-X", "-q", "-d", url, "-f", SQL / "install.sql"], check=True)


if __name__ == "__main__":
    main()
