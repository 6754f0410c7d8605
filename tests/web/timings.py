"""How long each screen takes among many jobs: ``make bench-web``.

Live and finished jobs are made by statements of our own, one in a hundred of
them dead, and with them schedules with what became of their times, workers, limits, halted
keys, dependencies and rows of the audit.  Each screen is asked for ten times by one browser,
and then the overview by fifty pages that stay open for a while, with what that takes of a core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psycopg
from psycopg.conninfo import make_conninfo

from rota.testing.server import EmbeddedPostgres

ROOT = Path(__file__).resolve().parents[2]
OPEN_PAGES = 50
RETRYING = httpx.HTTPTransport(retries=5)


def fill(db: psycopg.Connection[Any], live: int, finished: int, errors: int) -> None:
    """Make the jobs."""
    db.execute("set synchronous_commit = off")
    db.execute(
        "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status,"
        " run_at) select 'q' || i %% 10, 'type_' || i %% 20, jsonb_build_object('n', i), 0, 10,"
        " 'queued', now() + (i - %s / 2) * interval '10 ms' from generate_series(1, %s) as i",
        [live, live],
    )
    db.execute(
        "insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,"
        " status, run_at, attempts, lease_token, locked_by, last_error, error_type, created_at,"
        " updated_at, started_at, finished_at)"
        " overriding system value"
        " select %s + i, 'q' || i %% 10, 'type_' || i %% 20, jsonb_build_object('n', i), 0, 10,"
        " case when i %% 100 = 0 then 'dead' else 'succeeded' end, t, 1, i, 'worker-1',"
        " case when i %% 100 = 0 then 'order ' || i || ' has no currency' end,"
        " case when i %% 100 = 0 then 'BadCurrency' end, t, t, t, t"
        " from generate_series(1, %s) as i"
        " cross join lateral (select now() - i * interval '6 days' / %s as t) as at",
        [live, finished, finished],
    )
    db.execute(
        "insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker,"
        " started_at, failed_at, error_type, message, stack)"
        " select %s + i, i, 1, 'q' || i %% 10, 'type_' || i %% 20, 'worker-1', t, t,"
        " 'BadCurrency', 'order ' || i || ' has no currency', 'a stack'"
        " from generate_series(1, %s) as i"
        " cross join lateral (select now() - i * interval '6 days' / %s as t) as at",
        [live, errors, errors],
    )
    db.execute(
        "select setval(pg_get_serial_sequence('rota.jobs', 'id'), %s)", [live + finished]
    )
    db.execute("vacuum analyze")


def surround(db: psycopg.Connection[Any], live: int) -> None:
    """Make what the other screens show: as much as a large shop has of it."""
    db.execute(
        "select rota.schedule_job('schedule/' || i, (i % 60) || ' * * * *', 'type_' || i % 20,"
        " time_zone => 'Europe/Berlin', queue => 'q' || i % 10)"
        " from generate_series(1, 2000) as i"
    )
    db.execute(
        "insert into rota.occurrences (definition, scheduled_for, outcome, recorded_at)"
        " select 'schedule/' || i, t, 'skipped', t from generate_series(1, 2000) as i"
        " cross join generate_series(now() - interval '100 hours', now(), '1 hour') as t"
    )
    db.execute(
        "select rota.report_worker('worker-' || i, 'host-' || i % 50, i, rota.version(),"
        " array['q' || i % 10], concurrency => 16) from generate_series(1, 400) as i"
    )
    db.execute(
        "select rota.set_limit(job_type => 'type_' || i, max_running => 100)"
        " from generate_series(1, 20) as i"
    )
    db.execute(
        "select rota.set_limit(limit_key => 'customer:' || i, max_running => 5, weight => 2)"
        " from generate_series(1, 500) as i"
    )
    db.execute(
        "update rota.jobs set limit_key = 'customer:' || id %% 500"
        " where id %% 1000 = 0 and id <= %s",
        [live],
    )
    db.execute(
        "select rota.enqueue_many((select jsonb_agg(jsonb_build_object('job_type', 'ordered',"
        " 'queue', 'ordered', 'ordering_key', 'key:' || i % 100, 'max_attempts', 1))"
        " from generate_series(1, 1000) as i))"
    )
    db.execute(
        "select rota.fail_job(c.job_id, c.lease_token, 'the stock of ' || c.job_id || ' is"
        " negative', fatal => true) from rota.claim_jobs('worker-1', '{ordered}',"
        " max_jobs => 100) as c"
    )
    row = db.execute(
        "select rota.enqueue('parent', queue => 'q1', delay => '1 day')"
    ).fetchone()
    db.execute(
        "select rota.enqueue_many((select jsonb_agg(jsonb_build_object('job_type', 'child',"
        " 'queue', 'q1', 'depends_on', jsonb_build_array(%s::bigint)))"
        " from generate_series(1, 1000) as i))",
        [row[0] if row else 0],
    )
    db.execute(
        "insert into rota.audit_log (acted_at, role, actor, act, filter, jobs, job_ids, before)"
        " select now() - i * interval '2 minutes', 'page', 'user-' || i %% 30, 'retry',"
        " jsonb_build_object('queue', 'q' || i %% 10), 2, array[%s + i, %s + i + 1],"
        " '{\"dead\": 2}' from generate_series(1, 200000) as i order by i desc",
        [live, live],
    )
    db.execute("vacuum analyze")


def count(db: psycopg.Connection[Any]) -> None:
    """Let ticks count the jobs, as they would have while those came in."""
    began = time.monotonic()
    counted = "select p.counted_at >= %s from rota.count_progress as p"
    now = db.execute("select rota.now()").fetchone()
    while (row := db.execute(counted, now).fetchone()) is None or not row[0]:
        db.execute("select from rota.tick()")
    say(f"counted in {time.monotonic() - began:.0f} s")
    db.execute("analyze")


def screens(live: int, finished: int) -> list[str]:
    dead = live + finished // 100 * 100
    return [
        "/", "/?since=7d", "/?since=90d", "/jobs", "/jobs?status=dead",
        "/jobs?status=queued&queue=q3", f"/jobs?id={dead}",
        "/jobs?type=type_3&status=succeeded", f"/jobs?payload=n%3D{finished // 2}",
        "/jobs?error=nowhere", f"/jobs/{dead}", "/errors",
        "/errors?since=90d", "/errors?since=7d&queue=q3", "/jobs?key=customer:7",
        "/jobs?worker=worker-1&status=dead", "/jobs?discarded=no&status=dead", "/schedules",
        "/schedules?name=77", "/schedules/schedule/77", "/workers", "/waiting", "/audit",
        "/audit?who=user-7&queue=q7", f"/audit?job={live + 100}",
        "/all/retry?type=type_3&status=dead", "/all/cancel?queue=q3",
        "/all/retry?group=order+N+has+no+currency", "/undo?audit=200000", "/health",
    ]  # fmt: skip


def watch(address: str, seconds: float, work: str | None) -> int:
    """Keep pages open that load again when told; return how many loads that were.

    Meanwhile jobs come and end, if there is a database to *work* in.
    """
    loads, until = [0], time.monotonic() + seconds

    def one() -> None:
        with httpx.Client(base_url=address, timeout=60) as http:
            while time.monotonic() < until:
                with http.stream("GET", "/events") as told:
                    for line in told.iter_lines():
                        if line.startswith("event: change"):
                            http.get("/", headers={"rota-live": "1"})
                            loads[0] += 1
                        if time.monotonic() > until:
                            return

    threads = [threading.Thread(target=one) for _ in range(OPEN_PAGES)]
    if work is not None:
        threads.append(threading.Thread(target=do_jobs, args=(work, until)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return loads[0]


def do_jobs(url: str, until: float) -> None:
    """Enqueue and finish some jobs ten times a second."""
    with psycopg.connect(url, autocommit=True) as db:
        while time.monotonic() < until:
            db.execute(
                "select rota.enqueue('done', queue => 'done') from generate_series(1, 5)"
            )
            db.execute(
                "select rota.finish_job(c.job_id, c.lease_token)"
                " from rota.claim_jobs('worker-1', '{done}', max_jobs => 5) as c"
            )
            time.sleep(0.1)


def cpu(pids: Iterable[int]) -> float:
    """Return how many CPU seconds these processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", type=int, default=1_000_000)
    parser.add_argument("--finished", type=int, default=10_000_000)
    parser.add_argument("--errors", type=int, default=1_000_000)
    parser.add_argument("--watch", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--database", metavar="URL", help="where it is; filled, if it is empty")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        url = arguments.database
        if url is None:
            settings = ["max_wal_size=8GB", "shared_buffers=1GB"]
            url = stack.enter_context(EmbeddedPostgres(settings=settings)).url()
        db = stack.enter_context(psycopg.connect(url, autocommit=True))
        if db.execute("select to_regnamespace('rota')").fetchone() == (None,):
            install = ["psql", "-X", "-q", "-v", "with_roles=1", "-d", url]
            subprocess.run([*install, "-f", str(ROOT / "sql" / "install.sql")], check=True)
            roles = (
                "create role page login password 'page' in role rota_observer, rota_operator"
            )
            db.execute(roles)
            db.execute("select * from rota.tick()")
            fill(db, arguments.live, arguments.finished, arguments.errors)
            surround(db, arguments.live)
            count(db)
        measure(db, url, arguments)


def measure(db: psycopg.Connection[Any], url: str, arguments: argparse.Namespace) -> None:
    """Ask for each screen, and have many open."""
    say(f"{arguments.live} live, {arguments.finished} finished; load {os.getloadavg()}")
    reads = make_conninfo(url, user="page", password="page")
    command = [sys.executable, "-m", "rota", "web", "-d", reads, "--port", "8027"]
    command.append("--allow-acts")
    page = subprocess.Popen(command, stderr=subprocess.PIPE)
    address = "http://127.0.0.1:8027"
    try:
        assert page.stderr is not None
        page.stderr.readline()
        ask(address, screens(arguments.live, arguments.finished))
        ask(address, ["/"], wait=5.1)  # for so long pages share what the doctor said
        sessions = "select pid from pg_stat_activity where application_name = 'rota web'"
        for name, work in (("at rest", None), ("while jobs end", url)):
            before = cpu([page.pid, *(pid for (pid,) in db.execute(sessions).fetchall())])
            loads = watch(address, arguments.watch, work)
            after = cpu([page.pid, *(pid for (pid,) in db.execute(sessions).fetchall())])
            share = (after - before) / arguments.watch
            say(
                f"{OPEN_PAGES} open pages for {arguments.watch:.0f} s {name}: {loads} loads,"
                f" {share:.1%} of a core, with its sessions in the database"
            )
    finally:
        page.terminate()
        page.wait()


def ask(address: str, paths: list[str], *, wait: float = 0) -> None:
    """Ask for each screen ten times, so long after another, and tell how long that took."""
    with httpx.Client(base_url=address, timeout=60, transport=RETRYING) as http:
        for path in paths:
            took, problems = [], 0
            for _ in range(10):
                time.sleep(wait)
                began = time.perf_counter()
                text = http.get(path).text
                took.append((time.perf_counter() - began) * 1000)
                problems += "cancelled the query after" in text
            stopped = f", stopped {problems} times" if problems else ""
            path += f" every {wait} s" if wait else ""
            say(
                f"{path:45} first {took[0]:7.0f} ms, median {statistics.median(took):6.0f},"
                f" longest {max(took):6.0f}{stopped}"
            )


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
