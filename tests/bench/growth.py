"""Does a job cost more where there are more databases?  CPU of the server, 1 to 16 of them.

    growth.py [--rounds N] [--batches N]
    growth.py --worker [--rounds N] [--jobs N]

One server has sixteen complete databases.  A round does the same number of batches on one of
them, on 4, on 8 and on all, in random order: a batch is `enqueue_many`, a claim and a finish of
100 jobs, and goes to the databases in turn, each by its own connection.  Told are the medians
over the rounds of the CPU of the backends, and of the log, for each job, and the ratio to one
database.  As a control, as many connections take turns at one of the databases: what that
costs more is the turns, not the databases.  The exit code is 1 if a job on several databases
costs more than 1.1 times what it does on one by one connection.

With --worker the same is told of a `rota worker` that drains so many jobs, which do nothing,
from as many databases: the CPU of the servers and of the worker, and the jobs in a second.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

import psycopg

from bench.measure import wal_position
from bench.measured_server import BenchServer, Db, process_cpu

BATCH, DATABASES, COUNTS, GOAL = 100, 16, (1, 4, 8, 16), 1.1
MANY = json.dumps([{"job_type": "noop", "payload": {"n": n}} for n in range(BATCH)])
ENQUEUE = "select count(*) from rota.enqueue_many(%s)"
CLAIM = f"select job_id, lease_token from rota.claim_jobs('bench', max_jobs => {BATCH})"
PLACES = 160
HANDLER = """\
from rota import Registry
registry, done = Registry(), 0

@registry.handler("noop")
async def noop(job):
    global done
    done += 1
    if done % {jobs} == 0:
        print("done", flush=True)
"""
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


def drain(server: BenchServer, dbs: list[Db], jobs: int) -> tuple[float, float, float]:
    """Return what a worker of these databases needs for a job: us of servers, us, jobs/s."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "jobs.py").write_text(HANDLER.format(jobs=jobs))
        words = [word for db in dbs for word in ("--database", server.dsn(db.info.dbname))]
        words += ["--concurrency", str(PLACES), "--log-level", "warning"]
        command = [sys.executable, "-m", "rota", "worker", "jobs:registry", *words]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE) as worker:
            try:
                assert worker.stdout is not None
                for _ in range(2):  # the first is for plans and pages
                    fill(dbs, jobs)
                    before, began = (server.cpu(), process_cpu(worker.pid)), time.monotonic()
                    for db in dbs:
                        db.execute("select rota.resume_queue('default')")
                    if not worker.stdout.readline():
                        raise RuntimeError("the worker has ended")
                    seconds = time.monotonic() - began
                    while any(
                        db.execute("select from rota.jobs limit 1").rowcount for db in dbs
                    ):
                        time.sleep(0.1)
                    after = server.cpu(), process_cpu(worker.pid)
            finally:
                worker.terminate()
    used = [(b - a) / jobs * 1e6 for a, b in zip(before, after, strict=True)]
    return used[0], used[1], jobs / seconds


def fill(dbs: list[Db], jobs: int) -> None:
    """Enqueue as many jobs to each, *jobs* in all, and let the worker wait for them."""
    for db in dbs:
        db.execute("select rota.pause_queue('default')")
        for begin in range(0, jobs // len(dbs), 1000):
            rows = [{"job_type": "noop"}] * min(1000, jobs // len(dbs) - begin)
            db.execute(ENQUEUE, (json.dumps(rows),))
        db.execute("vacuum analyze rota.jobs")


def grow_worker(rounds: int, jobs: int) -> bool:
    """Compare workers; return whether a job on 4 databases costs what it does on one."""
    seen: defaultdict[int, list[tuple[float, float, float]]] = defaultdict(list)
    with BenchServer() as server:
        dbs: list[Db] = []
        for number in range(DATABASES):
            dbs.append(psycopg.connect(server.fresh(f"growth{number}"), autocommit=True))
            dbs[-1].execute("select rota.set_database_number(%s)", (number,))
            dbs[-1].execute("select rota.set_queue('default')")
        for turn in range(rounds):
            for count in random.sample(COUNTS, len(COUNTS)):
                chosen = [dbs[(turn * 5 + n) % DATABASES] for n in range(count)]
                seen[count].append(drain(server, chosen, jobs))
        for db in dbs:
            db.close()
    of_one: dict[int, float] = {}
    for count in COUNTS:
        servers, worker, rate = (median(column) for column in zip(*seen[count], strict=True))
        both = median(a + b for a, b, _ in seen[count])
        of_one[count] = both / median(a + b for a, b, _ in seen[1])
        print(
            f"{count:2} databases: servers {servers:.1f} us a job, worker {worker:.1f},"
            f" {of_one[count]:.2f} of one; {rate:.0f} jobs/s"
        )
    return of_one[4] <= GOAL


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--worker", action="store_true", help="drain jobs by a rota worker")
    parser.add_argument("--jobs", type=int, default=96_000, help="of a drain, in all")
    arguments = parser.parse_args()
    if arguments.worker:
        sys.exit(0 if grow_worker(arguments.rounds, arguments.jobs) else 1)
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
