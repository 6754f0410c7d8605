"""Does a job cost more where there are more databases?  CPU of the server, 1 to 16 of them.

    growth.py [--rounds N] [--batches N]

One server has sixteen complete databases.  A round does the same number of batches on one of
them, on 4, on 8 and on all, in random order: a batch is `enqueue_many`, a claim and a finish of
100 jobs, and goes to the databases in turn, each by its own connection.  Told are the medians
over the rounds of the CPU of the backends, and of the log, for each job, and the ratio to one
database.  As a control, as many connections take turns at one of the databases: what that
costs more is the turns, not the databases.  The exit code is 1 if a job on several databases
costs more than 1.1 times what it does on one by one connection.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from statistics import median, quantiles

import psycopg

from bench.measure import wal_position
from bench.server import BenchServer, Db, process_cpu

BATCH, DATABASES, COUNTS, GOAL = 100, 16, (1, 4, 8, 16), 1.1
MANY = json.dumps([{"job_type": "noop", "payload": {"n": n}} for n in range(BATCH)])
ENQUEUE = "select count(*) from rota.enqueue_many(%s)"
CLAIM = f"select job_id, lease_token from rota.claim_jobs('bench', max_jobs => {BATCH})"
FINISH = "select count(*) from rota.finish_jobs(%s, %s)"


def batch(db: Db) -> None:
    db.execute(ENQUEUE, (MANY,))
    rows = db.execute(CLAIM).fetchall()
    if len(rows) != BATCH:
        raise RuntimeError(f"{len(rows)} jobs were claimed, not {BATCH}")
    db.execute(FINISH, [list(column) for column in zip(*rows, strict=True)])


def measure(dbs: list[Db], batches: int) -> tuple[float, float]:
    """Return the CPU of the backends in us and the log in bytes, for each job."""
    pids = [db.info.backend_pid for db in dbs]
    before, log = sum(map(process_cpu, pids)), wal_position(dbs[0])
    for number in range(batches):
        batch(dbs[number % len(dbs)])
    jobs = batches * BATCH
    used = sum(map(process_cpu, pids)) - before
    return used / jobs * 1e6, (wal_position(dbs[0]) - log) / jobs


def in_turn(url: str, count: int, batches: int) -> float:
    """Return the CPU of a job in us where so many connections have one database."""
    dbs = [psycopg.connect(url, autocommit=True, prepare_threshold=0) for _ in range(count)]
    for db in dbs:
        for _ in range(5):
            batch(db)
    used, _ = measure(dbs, batches)
    for db in dbs:
        db.close()
    return used


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=64)
    arguments = parser.parse_args()
    cpu: defaultdict[int, list[float]] = defaultdict(list)
    wal: defaultdict[int, list[float]] = defaultdict(list)
    turns: defaultdict[int, list[float]] = defaultdict(list)
    with BenchServer() as server:
        dbs: list[Db] = []
        for number in range(DATABASES):
            dsn = server.fresh(f"growth{number}")
            dbs.append(psycopg.connect(dsn, autocommit=True, prepare_threshold=0))
            dbs[-1].execute("select rota.set_database_number(%s)", (number,))
        for db in dbs:  # plans and pages
            for _ in range(5):
                batch(db)
        for turn in range(arguments.rounds):
            for count in random.sample(COUNTS, len(COUNTS)):
                # Another one each time, so that all databases are as full.
                chosen = [dbs[(turn * 5 + n) % DATABASES] for n in range(count)]
                used, log = measure(chosen, arguments.batches)
                cpu[count].append(used)
                wal[count].append(log)
                if count > 1:
                    url = server.dsn(f"growth{turn * 5 % DATABASES}")
                    turns[count].append(in_turn(url, count, arguments.batches))
        for db in dbs:
            db.close()
    is_reached = True
    for count in COUNTS:
        low, _, high = quantiles(cpu[count], n=4)
        ratio = median(cpu[count]) / median(cpu[1])
        is_reached &= ratio <= GOAL
        print(
            f"{count:2} databases: {median(cpu[count]):.1f} us a job (quartiles {low:.1f} to"
            f" {high:.1f}), {ratio:.2f} of one; log {median(wal[count]):.0f} bytes a job"
        )
    for count, values in sorted(turns.items()):
        ratio = median(values) / median(cpu[1])
        print(
            f"{count:2} connections to one: {median(values):.1f} us a job, {ratio:.2f} of one"
        )
    sys.exit(0 if is_reached else 1)


if __name__ == "__main__":
    main()
