"""What is true of the tables at any moment, whatever raced or died before."""

from __future__ import annotations

from typing import Any

import psycopg

# Each part finds the jobs that break one rule; the tables' own constraints are not trusted.
BROKEN = """
with runs as materialized (
    select
        j.id, 'live' as place, j.status, j.attempts, j.max_attempts, j.lease_token,
        j.locked_by, j.locked_until, j.idempotency_key, j.cancel_requested_at,
        j.started_at, null::timestamptz as finished_at, j.pipeline, j.stage,
        j.stage_queued_at, coalesce('pipeline ' || j.pipeline, j.job_type) as key_scope
    from rota.jobs as j
    union all
    select
        f.id, 'ended', f.status, f.attempts, f.max_attempts, f.lease_token,
        f.locked_by, null, f.idempotency_key, f.cancel_requested_at,
        f.started_at, f.finished_at, f.pipeline, f.stage, null,
        coalesce('pipeline ' || f.pipeline, f.job_type)
    from rota.finished_jobs as f
)
select 'has more than one row' as rule, r.id from runs as r group by r.id having count(*) > 1
union all
select 'is in the wrong table for its status', r.id from runs as r
where (r.place = 'live') <> (r.status in ('blocked', 'queued', 'running', 'failed'))
   or (r.place = 'ended') <> (r.status in ('succeeded', 'dead', 'cancelled'))
union all
select 'is the second job of a planned time', max(r.id) from rota.job_runs as r
where r.definition is not null
group by r.definition, r.scheduled_for having count(*) > 1
union all
-- A run by hand takes the next microsecond that is free.
select 'was dealt with before its planned time', coalesce(f.job_id, 0)
from rota.occurrences as f
where f.scheduled_for > f.recorded_at + interval '1 millisecond'
union all
select 'has more attempts than allowed', r.id from runs as r
where r.attempts not between 0 and r.max_attempts
union all
select 'waits without an attempt left', r.id from runs as r
where r.place = 'live' and r.status <> 'running' and r.attempts >= r.max_attempts
union all
select 'is running and not locked, or locked and not running', r.id from runs as r
where r.place = 'live'
  and ((r.status = 'running') <> (r.locked_by is not null)
    or (r.status = 'running') <> (r.locked_until is not null))
union all
select 'was run and has no token, or no start', r.id from runs as r
where (r.status in ('running', 'succeeded', 'dead') or r.attempts > 0)
  and (r.lease_token = 0 or r.started_at is null)
  -- Those that travel behind the first of their line are not claimed.
  and r.key_scope <> 'rota.forward'
union all
select 'waits with a request to cancel it', r.id from runs as r
where r.place = 'live' and r.status <> 'running' and r.cancel_requested_at is not null
union all
select 'shares its key with another live job', min(r.id) from runs as r
where r.place = 'live' and r.idempotency_key is not null
group by r.idempotency_key, r.key_scope
having count(*) > 1
union all
select 'is in a stage and in no pipeline, or has not come to it', r.id from runs as r
where (r.pipeline is null) <> (r.stage is null)
   or r.place = 'live' and (r.pipeline is null) <> (r.stage_queued_at is null)
union all
select 'has left a stage with a later lease than its last', s.job_id
from rota.stage_runs as s
join runs as r on r.id = s.job_id
where s.lease_token > r.lease_token
   or s.lease_token = r.lease_token and r.place = 'live'
union all
select 'has left a stage before it came to it', s.job_id
from rota.stage_runs as s
where s.finished_at < s.queued_at or s.started_at < s.queued_at
union all
select 'has ended in a stage and not left it', r.id from runs as r
where r.place = 'ended' and r.pipeline is not null
  -- Retention may have taken one and not the other.
  and r.finished_at > rota.now() - interval '1 day'
  and not exists (select from rota.queues as q where q.keep_finished < interval '1 day')
  and not exists (
    select
    from rota.stage_runs as s
    where (s.job_id, s.lease_token, s.stage) = (r.id, r.lease_token, r.stage)
      and (s.status = r.status or (s.status, r.status) = ('succeeded', 'cancelled'))
  )
union all
select 'ended before it began', r.id from runs as r
where r.finished_at < r.started_at
union all
select 'is the head of a key that has another', j.id from rota.jobs as j
where j.ordering_key is not null and j.status <> 'blocked' and exists (
    select from rota.jobs as o
    where o.ordering_key = j.ordering_key and o.status <> 'blocked' and o.id < j.id
)
union all
select 'is the head of a key and below the start of it', j.id from rota.jobs as j
where j.ordering_key is not null and j.status <> 'blocked'
  and j.id < rota._key_start(j.ordering_key)
union all
select 'is to be followed, does not run and has no check', r.job_id from rota.reruns as r
where not exists (select from rota.jobs as j where j.id = r.job_id and j.status = 'running')
  and not exists (
    select from rota.pending_checks as c
    where c.kind = 'rerun' and c.subject = r.job_id::text
)
union all
select 'is none, but a limit whose running jobs no check counts', 0
from rota.limits_to_count as t
where not exists (
    select from rota.pending_checks as c
    where c.kind in ('limit', 'slots') and c.subject = t.limit_name
)
union all
select 'has a failure of a later claim than its last', e.job_id
from rota.job_errors as e
join runs as r on r.id = e.job_id and e.lease_token > r.lease_token
"""


def check_invariants(db: psycopg.Connection[Any]) -> None:
    """Fail with the rule and the job's id if any job breaks a rule."""
    db.execute("set jit = off")  # it would take longer than the query
    broken = [f"job {job_id} {rule}" for rule, job_id in db.execute(BROKEN).fetchall()]
    assert not broken, "; ".join(broken[:20])
