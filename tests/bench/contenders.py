"""The queues that are compared: rota, and the two bare ones of bare.sql.

Each says in SQL how it is filled, how jobs are claimed and how they are finished; both calls
speak of many jobs through arrays, so that the client's part is the same for all.  The finish
returns how many are to be asked for again, because another session has them locked just now.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from bench.measured_server import Db

PAYLOAD = '{"n": 1}'


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A queue as a benchmark sees it."""

    name: str
    tables: tuple[str, ...]
    fill: str
    claim: str
    finish: str
    claim_one: str
    finish_one: str


# Filled as enqueue() would, without a call for each: filling is measured elsewhere.
ROTA = Contender(
    name="rota",
    tables=("rota.jobs",),
    fill=f"""
        insert into rota.jobs (
            queue, job_type, payload, priority, max_attempts, status, run_at)
        select 'default', 'noop', '{PAYLOAD}', 0, 10, 'queued',
            clock_timestamp() - interval '1 hour' + n * interval '1 microsecond'
        from generate_series(1, %s) as g (n)
    """,
    claim="""
        select array_agg(job_id), array_agg(lease_token)
        from rota.claim_jobs('bench', max_jobs => %s)
    """,
    finish="select count(*) from rota.finish_jobs(%s, %s) where outcome = 'busy'",
    claim_one="select job_id, lease_token, job_type, payload from rota.claim_jobs('bench')",
    finish_one="select rota.finish_job(%s, %s)",
)


def _bare(name: str, prefix: str) -> Contender:
    table = f"bare.{prefix}tasks"
    return Contender(
        name=name,
        tables=(table,),
        fill=f"""
            insert into {table} (task_type, payload, run_at)
            select 'noop', '{PAYLOAD}',
                clock_timestamp() - interval '1 hour' + n * interval '1 microsecond'
            from generate_series(1, %s) as g (n)
        """,
        claim=f"select array_agg(task_id), null::bigint[] from bare.{prefix}claim_tasks(%s)",
        finish=f"""
            select count(*) - count(*) from bare.{prefix}finish_tasks(%s)
            where %s::bigint[] is null
        """,
        claim_one=f"""
            select task_id, null::bigint, task_type, payload from bare.{prefix}claim_tasks(1)
        """,
        finish_one=f"select bare.{prefix}finish_task(%s) where %s::bigint is null",
    )


BARE = _bare("bare", "")
LEAN = _bare("lean", "lean_")
CONTENDERS = (ROTA, BARE, LEAN)

# What the autovacuum does is work too, but comes when it likes: here it is done between the
# rounds, and measured by itself.
QUIET = """
    do $$
    declare
        v_table regclass;
    begin
        for v_table in
            select c.oid
            from pg_class as c
            where c.relnamespace in ('rota'::regnamespace, 'bare'::regnamespace)
              and c.relkind = 'r'
        loop
            execute format('alter table %s set (autovacuum_enabled = false)', v_table);
        end loop;
    end;
    $$
"""
VACUUM = "vacuum (index_cleanup on) rota.jobs, rota.finished_jobs, bare.tasks, bare.lean_tasks"


def connect(dsn: str, *, is_quiet: bool = True) -> Db:
    """Connect and prepare every statement; *is_quiet* keeps the autovacuum off the tables."""
    db: Db = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
    if is_quiet:
        db.execute(QUIET)
    return db


def drain(db: Db, queue: Contender, batches: int, size: int) -> int:
    """Claim and finish so many batches; return how many jobs that were."""
    done = 0
    for _ in range(batches):
        ids, tokens = db.execute(queue.claim, (size,)).fetchone() or (None, None)
        if not ids:
            break
        finish(db, queue, ids, tokens)
        done += len(ids)
    return done


def finish(db: Db, queue: Contender, ids: list[int], tokens: list[int] | None) -> None:
    """Finish a batch, and again what was busy."""
    while db.execute(queue.finish, (ids, tokens)).fetchone() != (0,):
        pass


def drain_singly(db: Db, queue: Contender, jobs: int) -> int:
    """Claim and finish so many jobs, one after the other; return how many there were."""
    for done in range(jobs):
        row = db.execute(queue.claim_one).fetchone()
        if row is None:
            return done
        db.execute(queue.finish_one, row[:2]).fetchone()
    return jobs
