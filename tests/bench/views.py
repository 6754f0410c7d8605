"""How long the questions take at a million live, ten million ended jobs and a million errors.

    python tests/bench/views.py [--scale 0.1] [--keep | --url URL]

The jobs are of 10 queues with 5 types each, and of the last seven days.  A hundredth of the
live ones each waits under a full limit, behind a halted key, and for a dead job.  Twenty
workers are there.  Ticks count what ended, as they would have; then each question is asked six
times, and the median of the last five told.  Autovacuum is on, as it should be.

To fill the tables takes long.  With --keep the server stays until Ctrl-C, and --url asks it
again, with what this tree installs.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from rota.testing.server import EmbeddedPostgres

SQL = Path(__file__).resolve().parents[2] / "sql"
FILL = """
select rota._create_partition('finished_jobs_done', 'finished_at', current_date - n, 1)
from generate_series(1, 8) as n;
select rota._create_partition('job_errors', 'failed_at',
    date_trunc('week', now())::date - 7 * n, 7) from generate_series(1, 2) as n;

insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts, status,
    run_at, attempts, lease_token, locked_by, created_at, updated_at, started_at, finished_at)
select i, 'queue' || i %% 10, 'type' || i %% 50, '{"user_id": 7}', 0, 10,
    case when i %% 500 = 0 then 'dead' else 'succeeded' end, t.at - interval '3 s', 1, 1, 'w',
    t.at - interval '3 s', t.at, t.at - random() * interval '2 s', t.at
from generate_series(1, (10000000 * %(scale)s::float)::integer) as i
cross join lateral (
    select now() - (i / (10000000 * %(scale)s::float)) * interval '6.9 days' as at
) as t;

insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker, started_at,
    failed_at, error_type, message)
select i, 1, 1, 'queue' || i %% 10, 'type' || i %% 50, 'w', t.at - interval '1 s', t.at, 'E',
    format('mailbox %%s of user %%s is full', i %% 7, i)
from generate_series(1, (1000000 * %(scale)s::float)::integer) as i
cross join lateral (
    select now() - (i / (1000000 * %(scale)s::float)) * interval '6.9 days' as at
) as t;

select setval('rota.jobs_id_seq', (10000000 * %(scale)s::float)::bigint);
insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status, run_at)
select 'queue' || i %% 10, 'type' || i %% 50, '{"user_id": 7}', 0, 10, 'queued',
    now() + (i %% 100 - 50) * interval '1 minute'
from generate_series(1, (1000000 * %(scale)s::float)::integer) as i;

select rota.set_limit(queue => 'queue1', max_running => 10);
select rota.set_limit(job_type => 'type7', max_starts => 10);
"""
WAITING = """
select rota.report_worker('w' || n, 'box', n, rota.version(),
    array(select 'queue' || i from generate_series(0, 9) as i) || '{waiting}'::text[])
from generate_series(1, 20) as n;
select rota.set_limit(job_type => 'full', max_running => 10);
"""
MANY = """
select count(*) from rota.enqueue_many((
    select jsonb_agg(jsonb_build_object('job_type', 'full', 'queue', 'waiting') || %s::jsonb)
    from generate_series(1, %s)
))
"""
JOBS = {
    "a job that waits for its turn": "select max(id) from rota.jobs where queue = 'queue3'"
    " and status = 'queued' and run_at <= now()",
    "a job for later": "select max(id) from rota.jobs where queue = 'queue3'"
    " and run_at > now()",
    "a job under a full limit": "select max(id) from rota.jobs where queue = 'waiting'"
    " and hold = 'type full'",
    "a job behind a halted key": "select max(id) from rota.jobs where ordering_key = 'k'",
    "a job that waits for a dead one": "select max(job_id) from rota.dependencies",
    "a running job": "select max(id) from rota.jobs where status = 'running'",
    "a dead job": "select max(id) from rota.finished_jobs_dead where queue = 'queue0'",
    "a job that succeeded": "select max(id) from rota.finished_jobs_done",
}
"""Of which jobs explain_job() is asked, each by its id."""

# The last hour in which anything ended: a server that is kept does nothing more.
LAST_HOUR = """
select s.* from (
    select max(f.finished_at) as at from rota.finished_jobs_done as f where f.queue = 'queue1'
) as h
cross join lateral rota.job_stats(h.at - interval '1 hour', until => h.at, {}) as s
"""
QUESTIONS = {
    "doctor()": "select * from rota.doctor()",
    "verify()": "select * from rota.verify()",
    "queue_stats": "select * from rota.queue_stats",
    "limit_stats": "select * from rota.limit_stats",
    "job_counts()": "select * from rota.job_counts()",
    "hourly_stats": "select * from rota.hourly_stats",
    "job_stats(), a day by hour": "select * from rota.job_stats()",
    "job_stats(), a day by hour, of all": "select * from rota.job_stats(group_by => '{}')",
    "job_stats(), an hour in total": LAST_HOUR.format("step => 'total'"),
    "job_stats(), an hour by minute, of a queue": LAST_HOUR.format(
        "step => 'minute', queues => '{queue1}', group_by => '{queue}'"
    ),
    "job_stats(), 7 days by day, by queue": "select * from rota.job_stats("
    "now() - interval '7 days', step => 'day', group_by => '{queue}')",
    "rising_failures()": "select * from rota.rising_failures()",
    "ticker_health": "select * from rota.ticker_health",
    "worker_health": "select * from rota.worker_health",
    "running_jobs": "select * from rota.running_jobs",
    "stale_jobs": "select * from rota.stale_jobs",
    "unknown_effects": "select * from rota.unknown_effects",
    "dead_jobs, the newest 50": "select * from rota.dead_jobs"
    " order by finished_at desc limit 50",
    "job_runs, by id": "select * from rota.job_runs where id = 4711",
    "error_groups": "select * from rota.error_groups",
}


def ask(db: psycopg.Connection[Any], question: str) -> Any:
    """Return the one value that a question is answered with."""
    row = db.execute(question).fetchone()  # type: ignore[arg-type]
    return row[0] if row else None


def let_wait(db: psycopg.Connection[Any], each: int) -> None:
    """Have so many jobs wait for each of three reasons, by the functions of rota."""
    db.execute(WAITING)  # type: ignore[arg-type]
    while ask(db, "select has_more from rota.tick()"):
        pass
    add(db, {}, each + 10)
    dead = ask(db, "select rota.enqueue('x', queue => 'dead', ordering_key => 'k')")
    lease = ask(db, "select lease_token from rota.claim_jobs('w1', '{dead}')")
    db.execute("select rota.fail_job(%s, %s, 'bad currency', fatal => true)", [dead, lease])
    add(db, {"ordering_key": "k", "queue": "queue1"}, each)
    add(db, {"depends_on": [dead], "if_parent_dead": "wait", "queue": "queue2"}, each)
    # The claims find that the limit is full, and hold what is behind it.
    for _ in range(each // 100 + 20):
        db.execute("select from rota.claim_jobs('w1', '{waiting}', 100, lease => '1 day')")


def add(db: psycopg.Connection[Any], more: dict[str, Any], jobs: int) -> None:
    """Enqueue so many jobs alike."""
    for begin in range(0, jobs, 1000):
        db.execute(MANY, [Jsonb(more), min(1000, jobs - begin)])


def count(db: psycopg.Connection[Any]) -> tuple[int, float, float]:
    """Tick until all is counted; return how many ticks, the seconds, and the longest."""
    began, longest, ticks = time.perf_counter(), 0.0, 0
    while True:
        start = time.perf_counter()
        has_more = ask(db, "select has_more from rota.tick()")
        longest = max(longest, time.perf_counter() - start)
        ticks += 1
        is_due = ask(db, "select rota._has_count_due()")
        if not has_more and not is_due:
            return ticks, time.perf_counter() - began, longest


def fill(db: psycopg.Connection[Any], scale: float) -> None:
    """Write the jobs, count them and let some wait, and tell how long it took."""
    began = time.perf_counter()
    with psycopg.ClientCursor(db) as cursor:
        cursor.execute(FILL, {"scale": scale})  # type: ignore[arg-type]
    db.execute("vacuum (analyze)")
    print(f"filled in {time.perf_counter() - began:.0f} s", flush=True)
    ticks, seconds, longest = count(db)
    counted = ask(db, "select sum(total) from rota.job_stats where step = 'day'")
    print(
        f"counted in {ticks} ticks, {seconds:.0f} s, longest {longest * 1000:.0f} ms;"
        f" {counted} ends are in days",
        flush=True,
    )
    let_wait(db, int(10_000 * scale))
    db.execute("vacuum (analyze)")
    broken = "select promise || ': ' || example from rota.verify() where violations > 0"
    if found := db.execute(broken).fetchall():
        raise RuntimeError(f"what was filled in is nothing that could be: {found}")


def ask_all(db: psycopg.Connection[Any]) -> None:
    """Ask each question, and tell how long it took."""
    jobs = {name: ask(db, which) for name, which in JOBS.items()}
    questions = QUESTIONS | {
        f"explain_job(), {name}": f"select * from rota.explain_job({job_id})"
        for name, job_id in jobs.items()
        if job_id is not None  # as none is for later after an hour
    }
    for name, question in questions.items():
        times = []
        for _ in range(6):
            start = time.perf_counter()
            db.execute(question).fetchall()  # type: ignore[arg-type]
            times.append((time.perf_counter() - start) * 1000)
            if times[-1] > 5000:
                break
        print(f"{name:<48}{statistics.median(times[1:] or times):10.1f} ms", flush=True)


def connect(url: str) -> psycopg.Connection[Any]:
    """Install this tree's SQL, and connect."""
    command = ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", url]
    subprocess.run([*command, "-f", str(SQL / "install.sql")], check=True)
    return psycopg.connect(url, autocommit=True, prepare_threshold=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the rows")
    parser.add_argument("--keep", action="store_true", help="keep the server until Ctrl-C")
    parser.add_argument("--url", help="ask a server that another run keeps")
    arguments = parser.parse_args()
    if arguments.url:
        with connect(arguments.url) as db:
            ask_all(db)
        return
    settings = ("shared_buffers=2GB", "fsync=off", "max_wal_size=8GB")
    with EmbeddedPostgres(settings=settings) as server:
        with connect(server.url()) as db:
            fill(db, arguments.scale)
            ask_all(db)
        if arguments.keep:
            print(f"kept until Ctrl-C: {server.url()}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()


if __name__ == "__main__":
    main()
