"""How fast maintenance removes what has expired, and what others feel of it.

    removal.py [--rows N] [--seconds N] [--against PATH]

On a server of its own: rows/s of each kind, free and while another session holds a snapshot;
whether has_more is true exactly while there is more; whether keep_finished holds at 2,000 ended
jobs a second; and the claims of another session while rows are purged.  With --against, first
the same of another tree, before this one.
"""

# ruff: noqa: T201 -- a command talks to its user, and the names are its own
from __future__ import annotations

import argparse
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import psycopg

from rota.testing import EmbeddedPostgres

HERE = Path(__file__).resolve().parents[2]
Db = psycopg.Connection[Any]

FINISHED = """
    insert into rota.finished_jobs (
        id, queue, job_type, payload, priority, max_attempts, status, run_at, attempts,
        lease_token, created_at, updated_at, finished_at
    )
    select n, '{queue}', 'x', '{{}}', 0, 10, '{status}', now(), 1, 1, now(), now(),
        now() - interval '{age}' + n * interval '1 microsecond'
    from generate_series(1, {rows}) as n
"""
KINDS = {
    "keys": (
        "idempotency_keys",
        "insert into rota.idempotency_keys (idempotency_key, key_scope, {expires_at})"
        " select 'k' || n, 'x', now() - interval '1 hour' + n * interval '1 microsecond'"
        " from generate_series(1, {rows}) as n",
    ),
    "effects": (
        "effects",
        "insert into rota.effects (scope, key, job_id, lease_token, completed_at, {expires_at})"
        " select 's', 'k' || n, n, 1, now(),"
        " now() - interval '1 hour' + n * interval '1 microsecond'"
        " from generate_series(1, {rows}) as n",
    ),
    "occurrences": (
        "occurrences",
        "insert into rota.occurrences (definition, scheduled_for, outcome, job_id, recorded_at)"
        " select 's', t.at, 'enqueued', n, t.at from generate_series(1, {rows}) as n"
        " cross join lateral ("
        "  select now() - interval '91 days' + n * interval '1 microsecond') as t (at)",
    ),
    "errors": (
        "job_errors",
        "insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker,"
        " started_at, failed_at, message)"
        " select n, n, 1, 'q', 'x', 'w', t.at, t.at, 'm' from generate_series(1, {rows}) as n"
        " cross join lateral ("
        "  select now() - interval '98 days' + n * interval '1 microsecond') as t (at)",
    ),
    "short jobs": ("finished_jobs", FINISHED.replace("{queue}", "short")
                   .replace("{status}", "succeeded").replace("{age}", "2 hours")),
    "dead jobs": ("finished_jobs", FINISHED.replace("{queue}", "q")
                  .replace("{status}", "dead").replace("{age}", "91 days")),
}  # fmt: skip


def main() -> None:
    """Measure the other tree, if there is one, and this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="at most, for each kind")
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    for tree in [*filter(None, [arguments.against]), HERE]:
        print(f"\n{'before' if tree != HERE else 'now'}")
        settings = ["shared_buffers=256MB", "max_wal_size=4GB", "autovacuum_naptime=1s"]
        with EmbeddedPostgres(settings=settings) as server:
            url = server.url("postgres")
            subprocess.run(
                ["psql", "-qX", "-d", url, "-f", str(tree / "sql/install.sql")],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            measure(url, arguments.rows, arguments.seconds)


def measure(url: str, count: int, seconds: float) -> None:
    """Print all figures of one tree."""
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("select from rota.set_queue('short', keep_finished => '1 hour')")
        db.execute("select from rota.tick()")
        for is_held in (False, True):
            for kind, (table, insert) in KINDS.items():
                fill(db, table, insert, count)
                with psycopg.connect(url) as holder:
                    if is_held:
                        holder.execute("set transaction isolation level repeatable read")
                        holder.execute("select 1")
                    print(f"{'held snapshot, ' * is_held}{kind}: {drain(db, table, seconds)}")
                db.execute(f"truncate rota.{table}")
        print("keep_finished at 2,000 jobs/s:", keep(db, seconds))
        print("claims while nothing is purged:", claims(url, lambda: time.sleep(0.01), seconds))
        fill(db, *KINDS["keys"], 40 * count)
        fill(db, *KINDS["short jobs"], 40 * count)
        print("claims while rows are purged:", claims(url, lambda: tick(db), seconds))


def fill(db: Db, table: str, insert: str, count: int) -> None:
    """Insert expired rows, and let the next tick look at once."""
    names = {"kept_until", "expires_at"}
    found = db.execute(
        "select attname::text from pg_attribute where attrelid = 'rota.effects'::regclass"
    ).fetchall()
    (expires_at,) = names & {name for (name,) in found}
    db.execute(insert.format(rows=count, expires_at=expires_at))  # type: ignore[arg-type]
    db.execute(f"vacuum analyze rota.{table}")
    due(db)


def due(db: Db) -> None:
    """Let the next tick look at what is old."""
    row = db.execute(
        "select relname::text from pg_class where relnamespace = 'rota'::regnamespace"
        " and relname in ('maintenance', 'upkeep') and relkind = 'r'"
    ).fetchone()
    db.execute(f"update rota.{row[0] if row else ''} set done_at = '-infinity'")


def tick(db: Db) -> bool:
    """Tick, and return whether there is more."""
    # Prepared, as by default after some calls, it would not be alone in its transaction.
    row = db.execute("select has_more from rota.tick()", prepare=False).fetchone()
    return bool(row and row[0])


def drain(db: Db, table: str, seconds: float) -> str:
    """Tick as a worker does until nothing is left or the time is over."""
    before, began_at, calls, slowest, lies = left(db, table), time.monotonic(), 0, 0.0, 0
    while time.monotonic() - began_at < seconds:
        sent_at = time.monotonic()
        has_more = tick(db)
        slowest = max(slowest, time.monotonic() - sent_at)
        calls += 1
        if not has_more:
            if not left(db, table):
                break
            lies += 1
            time.sleep(1)
    passed, rest = time.monotonic() - began_at, left(db, table)
    return (
        f"{(before - rest) / passed:.0f} rows/s, {rest} left after {passed:.1f} s;"
        f" {calls} ticks, the slowest {slowest * 1000:.0f} ms;"
        f" has_more was false {lies} times though there was more"
    )


def left(db: Db, table: str) -> int:
    """Return how many rows there are."""
    row = db.execute(f"select count(*) from rota.{table}").fetchone()
    return int(row[0]) if row else 0


def keep(db: Db, seconds: float) -> str:
    """End 2,000 jobs a second, keep them for a second, and tick as a worker does."""
    db.execute("select from rota.set_queue('short', keep_finished => '1 second')")
    until, number, most, tick_at = time.monotonic() + max(40.0, 3 * seconds), 0, 0, 0.0
    while time.monotonic() < until:
        sent_at = time.monotonic()
        db.execute(
            FINISHED.format(queue="short", status="succeeded", age="0", rows=200)  # type: ignore[arg-type]
        )
        number += 200
        if sent_at >= tick_at and not tick(db):
            tick_at = sent_at + 1
            most = max(most, left(db, "finished_jobs"))
        time.sleep(max(0.0, 0.1 - (time.monotonic() - sent_at)))
    rest = left(db, "finished_jobs")
    db.execute("truncate rota.finished_jobs")
    db.execute("select from rota.set_queue('short', keep_finished => '1 hour')")
    return f"{number} ended, at most {most} there after a round of ticks, {rest} in the end"


def claims(url: str, beside: Callable[[], object], seconds: float) -> str:
    """Claim and finish one job after the other while something else goes on."""
    is_over = threading.Event()
    thread = threading.Thread(target=lambda: [beside() for _ in iter(is_over.is_set, True)])
    took = []
    with psycopg.connect(url, autocommit=True) as db:
        thread.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            db.execute("select rota.enqueue('x')")
            sent_at = time.monotonic()
            db.execute(
                "select rota.finish_job(c.job_id, c.lease_token) from rota.claim_jobs('w') as c"
            )
            took.append(time.monotonic() - sent_at)
        is_over.set()
        thread.join()
    cuts = quantiles(took, n=100)
    return f"p50 {cuts[49] * 1000:.2f} ms, p99 {cuts[98] * 1000:.2f} ms of {len(took)}"


if __name__ == "__main__":
    main()
