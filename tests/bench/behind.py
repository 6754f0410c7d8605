"""Claims with a million jobs behind something, against the same claims without.

Each scenario is a database of its own.  In every round each of them, in random order, claims
and finishes some jobs.  Shown is the median over the rounds of the time that one claim takes
as its session sees it (of each round the lower quartile, since others may use the machine),
and the ratio to the scenario it is compared with.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from rota.testing import EmbeddedPostgres, find_binaries

SQL = Path(__file__).resolve().parents[2] / "sql"
Db = psycopg.Connection[Any]

# Rows go in as they would be after enqueue(), without a million single calls.
# The plain ones go in first, so that they lie on the same few pages in every scenario.
INSERT = """
    insert into rota.jobs (
        queue, job_type, payload, priority, max_attempts, limit_key, ordering_key, skip_dead,
        status, run_at
    )
    select %(queue)s, %(type)s, '{}', 0, 10,
        case when %(keys)s > 0 then 'tenant:' || n %% %(keys)s end,
        case when %(stuck)s then 'stuck' end, case when %(stuck)s then false end,
        case when %(stuck)s then 'blocked' else 'queued' end,
        rota.now() - interval '1 hour' + n * interval '1 microsecond'
    from generate_series(1, %(count)s) as g (n)
"""
ENTER = """
    select rota._enter_lanes(array_agg(j.id order by j.id))
    from rota.jobs as j
    where j.id > %s
    group by j.id / 10000
    order by j.id / 10000
"""


def add(
    db: Db,
    count: int,
    *,
    queue: str = "q",
    job_type: str = "x",
    keys: int = 0,
    stuck: bool = False,
) -> None:
    last = db.execute("select coalesce(max(id), 0) from rota.jobs").fetchone()
    db.execute(
        INSERT,
        {"queue": queue, "type": job_type, "keys": keys, "stuck": stuck, "count": count},
    )
    if keys or job_type == "slow":
        db.execute(ENTER, last)


def settle(db: Db) -> None:
    """Let every check be done that is due."""
    while db.execute("select rota._do_checks(1000)").fetchone() != (0,):
        pass
    db.execute("vacuum analyze")


def saturate(db: Db, claims: int) -> None:
    """Claim until nothing is given any more, and keep what was got."""
    for _ in range(claims):
        db.execute(
            "select from rota.claim_jobs('busy', '{q}', 100, lease => '1 day',"
            " job_types => '{slow}')"
        )


def plain(db: Db, many: int) -> None:
    add(db, 30_000)


def elsewhere(db: Db, many: int) -> None:
    add(db, 30_000)
    add(db, many, queue="other")


def type_limit(db: Db, many: int) -> None:
    add(db, 30_000)
    db.execute("select rota.set_limit(job_type => 'slow', max_running => 5)")
    add(db, many, job_type="slow")
    settle(db)
    saturate(db, 2)


def key_limits(db: Db, many: int) -> None:
    add(db, 30_000)
    db.execute("select rota.set_limit(limit_key => 'tenant:*', max_running => 1)")
    add(db, many, job_type="slow", keys=1000)
    settle(db)
    saturate(db, 30)


def both_limits(db: Db, many: int) -> None:
    add(db, 30_000)
    db.execute("select rota.set_limit(job_type => 'slow', max_running => 5)")
    db.execute("select rota.set_limit(limit_key => 'tenant:*', max_running => 1)")
    add(db, many, job_type="slow", keys=1000)
    settle(db)
    saturate(db, 30)


def queue_limit(db: Db, many: int) -> None:
    add(db, 30_000)
    db.execute("select rota.set_limit(queue => 'full', max_running => 5)")
    add(db, many, queue="full")
    db.execute("select from rota.claim_jobs('busy', '{full}', 10, lease => '1 day')")


def stuck_key(db: Db, many: int) -> None:
    add(db, 30_000)
    add(db, many, stuck=True)
    db.execute("insert into rota.halted_keys values ('stuck', 0)")


def ten_tenants(db: Db, many: int) -> None:
    add(db, 30_000, keys=10)


def hundred_tenants(db: Db, many: int) -> None:
    add(db, 30_000, keys=100)


def all_tenants(db: Db, many: int) -> None:
    add(db, max(30_000, many // 5), keys=10_000)


# What it is compared with, and the queues that are claimed from.
SCENARIOS: dict[str, tuple[Any, str, str]] = {
    "plain": (plain, "plain", "{q}"),
    "a million in another queue": (elsewhere, "plain", "{q}"),
    "behind a limit of the type": (type_limit, "plain", "{q}"),
    "behind limits of 1000 keys": (key_limits, "plain", "{q}"),
    "behind both": (both_limits, "plain", "{q}"),
    "behind a halted ordering key": (stuck_key, "plain", "{q}"),
    "plain, two queues": (plain, "plain, two queues", "{q,full}"),
    "behind a limit of a queue": (queue_limit, "plain, two queues", "{q,full}"),
    "10 tenants": (ten_tenants, "100 tenants", "{q}"),
    "100 tenants": (hundred_tenants, "100 tenants", "{q}"),
    "10000 tenants": (all_tenants, "100 tenants", "{q}"),
}


def one_round(db: Db, queues: str, max_jobs: int, claims: int) -> float:
    """Return the lower quartile of the times of a claim in microseconds."""
    times = []
    for _ in range(claims):
        begin = time.perf_counter()
        rows = db.execute(
            "select job_id, lease_token from rota.claim_jobs('w', %s, %s)", (queues, max_jobs)
        ).fetchall()
        times.append(time.perf_counter() - begin)
        assert len(rows) == max_jobs, len(rows)
        ids, tokens = zip(*rows, strict=True)
        db.execute("select from rota.finish_jobs(%s, %s)", (list(ids), list(tokens)))
    return statistics.quantiles(times, n=4)[0] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="how many stand behind")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=list(SCENARIOS))
    options = parser.parse_args()
    wanted = {name: SCENARIOS[name] for name in options.only}

    bindir, _ = find_binaries(None)
    settings = ["fsync=off", "autovacuum=off", "max_wal_size=8GB", "shared_buffers=512MB"]
    with EmbeddedPostgres(bindir=bindir, settings=settings) as server:
        dbs = {}
        with psycopg.connect(server.url("template1"), autocommit=True) as admin:
            for n, name in enumerate(wanted):
                admin.execute(f"create database b{n}")
                dsn = make_conninfo(server.url("template1"), dbname=f"b{n}")
                subprocess.run(
                    ["psql", "-X", "-q", "-d", dsn, "-f", SQL / "install.sql"], check=True
                )
                dbs[name] = psycopg.connect(dsn, autocommit=True)
                SCENARIOS[name][0](dbs[name], options.jobs)
                settle(dbs[name])

        times: dict[tuple[str, int], list[float]] = {}
        for turn in range(options.rounds):
            for name in random.sample(list(wanted), len(wanted)):
                # All alike: the autovacuum goes round the databases in a time of its own.
                dbs[name].execute("vacuum (index_cleanup on) rota.jobs, rota.limit_slots")
                for max_jobs, claims in ((1, 100), (10, 30), (100, 4)):
                    took = one_round(dbs[name], wanted[name][2], max_jobs, claims)
                    if turn:  # the first makes the plans
                        times.setdefault((name, max_jobs), []).append(took)

    print(f"{'microseconds a claim of':30}" + "".join(f"{n:>9}  ratio" for n in (1, 10, 100)))
    for name, (_, other, _) in wanted.items():
        line = f"{name:30}"
        for max_jobs in (1, 10, 100):
            took = statistics.median(times[name, max_jobs])
            base = statistics.median(times.get((other, max_jobs), [took]))
            line += f"{took:9.0f}  {took / base:5.2f}"
        print(line)


if __name__ == "__main__":
    main()
