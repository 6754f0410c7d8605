"""All that the page asks of the database: public functions and views, each answer bounded.

JSON is read as text: the numbers in it may be larger than what others can hold.  `statement`
makes the call of a function that an act shows and sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, LiteralString

from psycopg import sql

from ..client.listing import grouped

MAX_ERRORS = 5000
"""How many of the newest failed attempts are looked at for the groups."""
MAX_LISTED = 200
"""How many rows any list has, where it does not say another number."""

PLACE: LiteralString = """
    select current_database() as database, rota.version() as version, rota.now() as now,
        pg_is_in_recovery() as is_standby, current_user as reads_as, session_user as login
    """

DOCTOR: LiteralString = "select severity, finding, evidence, remedy from rota.doctor()"

COUNTED = ("ready", "scheduled", "running", "retrying", "blocked", "dead")
QUEUES: LiteralString = """
    select queue, is_paused, ready, scheduled, retrying, running, blocked, dead,
        oldest_ready_age, next_run_at, array[sum(ready) over (), sum(scheduled) over (),
            sum(running) over (), sum(retrying) over (), sum(blocked) over (),
            sum(dead) over ()]::bigint[] as totals
    from rota.queue_stats order by oldest_ready_age desc nulls last, queue limit 200
    """
"""The first queues, each with the totals of all of them, in the order of `COUNTED`."""


def totals(queues: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many jobs there are in all queues."""
    return dict(zip(COUNTED, queues[0]["totals"] if queues else [0] * 6, strict=True))


# A view tells what is ready; this is by status, as the list is.
COUNTS: LiteralString = """
    select c.status, sum(c.jobs)::bigint as jobs from rota.job_counts() as c
    where %(queue)s::text is null or c.queue = %(queue)s group by c.status
    """

# What workers take, schedules make, and came in of late: no table has all types.
TYPES: LiteralString = """
    select t.job_type
    from (
        select unnest(w.job_types) from rota.workers as w
        union
        select d.job_type from rota.job_definitions as d
        union
        select n.job_type
        from (select i.job_type from rota.job_runs as i order by i.id desc limit 1000) as n
    ) as t (job_type)
    order by t.job_type limit 500
    """

TICKER: LiteralString = """
    select last_tick_at, last_tick_by, lag, schedules_overdue, schedules_broken
    from rota.ticker_health
    """

DIED: LiteralString = """
    select count(*) as jobs from (
        select from rota.dead_jobs as d where d.finished_at > rota.now() - interval '1 day'
        limit 10000
    ) as d
    """

WORKERS: LiteralString = """
    select w.worker, w.host, w.pid, w.version, w.queues, w.job_types, w.started_at,
        w.last_seen_at, not w.is_live as is_stale,
        coalesce(h.jobs, 0) as jobs, h.oldest_started_at, h.job_ids, w.concurrency,
        count(*) filter (where w.is_live) over () as live
    from rota.worker_health as w
    left join (
        select r.locked_by, count(*) as jobs, min(r.started_at) as oldest_started_at,
            (array_agg(r.id order by r.started_at))[:20] as job_ids
        from rota.running_jobs as r group by r.locked_by
    ) as h on h.locked_by = w.worker
    order by is_stale, w.worker limit 500
    """

RUNNING: LiteralString = """
    select id, queue, job_type, attempts, max_attempts, locked_by, started_at, locked_until,
        progress_percent, progress_message, cancel_requested_at
    from rota.running_jobs order by started_at limit 100
    """

ERRORS = grouped(
    """
    width_bucket(
        extract(epoch from %(since)s::interval
            - (rota.now() - least(i.failed_at, rota.now()))), 0,
        extract(epoch from %(since)s::interval), 24) as part
    """,
    "array_agg(n.part) as parts",
)

NEWEST: LiteralString = """
    select coalesce(max(n.id), 0) as id, max(s.seqincrement) as stride, max(s.seqstart) as since
    from (select i.id from rota.job_runs as i order by i.id desc limit 1) as n
    right join pg_sequence as s on true
    where s.seqrelid = 'rota.jobs_id_seq'::regclass
    """
"""The newest id, and how far apart ids have been since which one."""

JOB: LiteralString = """
    select id, queue, job_type, payload::text as payload, priority, run_at, status, attempts,
        max_attempts, locked_by, locked_until, lease_token::text as lease_token,
        idempotency_key, progress_percent, progress_message, cancel_requested_at,
        cancel_reason, last_error, error_type, failed_at, created_at, updated_at, started_at,
        finished_at, result::text as result, ordering_key, limit_key, pipeline, stage,
        stage_input::text as stage_input, definition, scheduled_for, time_limit, expires_at,
        headers::text as headers
    from rota.job_runs where id = %(id)s limit 1
    """

EXPLAIN: LiteralString = """
    select reason, explanation, remedy from rota.explain_job(job_id => %(id)s) order by ordinal
    """

ATTEMPTS: LiteralString = """
    select attempt, started_at, failed_at, worker, error_type, message, stack,
        payload::text as payload
    from rota.job_errors where job_id = %(id)s order by lease_token desc limit 50
    """

PARENTS: LiteralString = """
    select d.parent_id as id, r.job_type, r.queue, r.status
    from rota.dependencies as d
    left join lateral (
        select i.job_type, i.queue, i.status from rota.job_runs as i
        where i.id = d.parent_id limit 1
    ) as r on true
    where d.job_id = %(id)s order by d.parent_id limit 50
    """

CHILDREN: LiteralString = """
    select d.job_id as id, r.job_type, r.queue, r.status
    from rota.dependencies as d
    left join lateral (
        select i.job_type, i.queue, i.status from rota.job_runs as i
        where i.id = d.job_id limit 1
    ) as r on true
    where d.parent_id = %(id)s order by d.job_id limit 50
    """

STAGES: LiteralString = """
    select stage, status, attempts, worker, queued_at, started_at, finished_at
    from rota.stage_runs where job_id = %(id)s order by lease_token limit 200
    """

PIPELINE: LiteralString = """
    select stage, queue, job_type, next_stage from rota.pipeline_stages
    where pipeline = %(pipeline)s and ordinal is not null order by ordinal limit 200
    """

# The outcomes of the latest planned times, the newest first.  Jobs are looked for last, of the
# rows that are shown.
SCHEDULES: LiteralString = """
    select d.name, d.job_type, d.queue, d.schedule, d.time_zone, d.is_enabled, d.disabled_by,
        d.disabled_at, d.last_error, d.next_run_at, d.last_run_at, d.last_job_id,
        r.status as last_status,
        d.next_run_at < rota.now() - interval '1 minute' as is_overdue,
        array(
            select o.outcome from rota.occurrences as o where o.definition = d.name
            order by o.scheduled_for desc limit 20
        ) as outcomes
    from (
        select i.* from rota.job_definitions as i
        where %(text)s::text is null or strpos(i.name || ' ' || i.job_type, %(text)s) > 0
        order by i.next_run_at nulls first, i.name limit 100
    ) as d
    left join lateral (
        select i.status from rota.job_runs as i where i.id = d.last_job_id limit 1
    ) as r on true
    order by d.next_run_at nulls first, d.name limit 100
    """

SCHEDULE: LiteralString = """
    select d.name, d.job_type, d.queue, d.payload::text as payload, d.schedule, d.source,
        d.kind, d.time_zone, d.priority, d.max_attempts, d.lease, d.time_limit, d.catch_up,
        d.catch_up_window, d.catch_up_max, d.overlap, d.jitter, d.starts_at, d.ends_at,
        d.is_enabled, d.disabled_at, d.disabled_by, d.last_error, d.next_run_at, d.last_run_at,
        d.last_job_id, d.created_at, d.updated_at,
        d.next_run_at < rota.now() - interval '1 minute' as is_overdue
    from rota.job_definitions as d where d.name = %(name)s
    """

# One that was broken by hand has no words, and all that are asked with it.
DESCRIBED: LiteralString = """
    select t.schedule, rota.describe_schedule(t.schedule) as description
    from unnest(%(schedules)s::text[]) as t (schedule)
    """

# Each setting as schedule_job() takes it.
SCHEDULE_AS_GIVEN: LiteralString = """
    select d.name, d.schedule, d.time_zone, d.job_type, d.queue, d.payload::text as payload,
        d.priority, d.max_attempts, d.lease::text as lease, d.time_limit::text as time_limit,
        d.headers::text as headers, d.backoff::text as backoff, d.overlap, d.catch_up,
        d.catch_up_window::text as catch_up_window, d.catch_up_max, d.jitter::text as jitter,
        d.starts_at::text as starts_at, d.ends_at::text as ends_at, d.source
    from rota.job_definitions as d where d.name = %(name)s
    """

WOULD_COME: LiteralString = """
    select run_at, local_time, utc_offset, clock_change,
        rota.describe_schedule(%(schedule)s) as description
    from rota.upcoming_runs(
        schedule => %(schedule)s, time_zone => %(time_zone)s, max_runs => 5)
    """

UPCOMING: LiteralString = """
    select run_at, local_time, utc_offset, clock_change
    from rota.upcoming_runs(name => %(name)s, max_runs => 5)
    """

OCCURRENCES: LiteralString = """
    select o.scheduled_for, o.outcome, o.job_id, o.recorded_at, r.status
    from rota.occurrences as o
    left join lateral (
        select i.status from rota.job_runs as i where i.id = o.job_id limit 1
    ) as r on true
    where o.definition = %(name)s order by o.scheduled_for desc limit 50
    """

LIMITS: LiteralString = """
    select s.limit_name, s.max_running, s.running, s.waiting, s.max_starts, s.per,
        s.next_start_at, l.queue, l.job_type, l.limit_key, l.per::text as per_text, l.burst
    from rota.limit_stats as s left join rota.limits as l on l.limit_name = s.limit_name
    order by s.waiting desc, s.running desc, s.limit_name limit 200
    """

SHARES: LiteralString = """
    select limit_name, limit_key, weight from rota.limits
    where weight is not null order by weight desc, limit_name limit 100
    """

# Who has how much of each queue now, by the key that shares it.
USE_BY_KEY: LiteralString = """
    select k.queue, k.limit_key, k.running, k.oldest_started_at, k.out_of, l.weight
    from (
        select i.queue, r.limit_key, count(*) as running,
            min(i.started_at) as oldest_started_at, max(i.out_of) as out_of
        from (
            select n.id, n.queue, n.started_at, count(*) over () as out_of
            from (select id, queue, started_at from rota.running_jobs limit 1000) as n
        ) as i
        cross join lateral (
            select j.limit_key from rota.job_runs as j where j.id = i.id limit 1
        ) as r
        where r.limit_key is not null
        group by i.queue, r.limit_key
    ) as k
    left join rota.limits as l on l.limit_name = 'key ' || k.limit_key
    order by k.running desc, k.queue, k.limit_key limit 50
    """

BREAKERS: LiteralString = """
    select b.job_type, b.queue, b.max_failures, b.failed_percent, b.min_attempts, b.span,
        b.error_type, b.pause_for, b.probes, s.times_opened, s.retry_at, s.probed_at
    from rota.breakers as b join rota.breaker_states as s on s.tag = b.tag
    order by s.retry_at is null, b.job_type, b.queue limit 100
    """

HALTED: LiteralString = """
    select h.ordering_key, h.job_id, h.halted_since, r.job_type, r.queue, r.status,
        r.error_type, r.last_error,
        (
            select count(*)
            from (
                select from rota.job_runs as j
                where j.ordering_key = h.ordering_key and j.status = 'blocked' limit 1000
            ) as b
        ) as behind
    from (select i.* from rota.halted_keys as i order by i.halted_since limit 100) as h
    left join lateral (
        select i.job_type, i.queue, i.status, i.error_type, i.last_error
        from rota.job_runs as i where i.id = h.job_id limit 1
    ) as r on true
    order by h.halted_since limit 100
    """

# Of the newest that wait for others: those that most wait for.
PARENTS_OF_MOST: LiteralString = """
    select g.parent_id as id, g.children, r.job_type, r.queue, r.status
    from (
        select d.parent_id, count(*) as children
        from (
            select i.parent_id from rota.dependencies as i order by i.parent_id desc limit 5000
        ) as d
        group by d.parent_id order by count(*) desc, d.parent_id limit 50
    ) as g
    left join lateral (
        select i.job_type, i.queue, i.status from rota.job_runs as i
        where i.id = g.parent_id limit 1
    ) as r on true
    order by r.status not in ('dead', 'cancelled'), g.children desc
    """

EFFECTS: LiteralString = """
    select scope, key, recorded_at, expires_at, job_id, job_type, status
    from rota.unknown_effects order by recorded_at limit 100
    """

PAUSES: LiteralString = """
    select pause_name, queue, job_type, set_by, paused_at, paused_by, reason,
        nullif(until, 'infinity') as until
    from rota.pauses where until is null or until > rota.now()
    order by pause_name <> 'all', paused_at limit 100
    """

# The rows of a job are few, none older than the job, and sorted when they are found.
AUDIT: LiteralString = """
    select id, acted_at, role, actor, act, filter::text as filter, jobs,
        job_ids[:20] as job_ids, before::text as before, after::text as after
    from rota.audit_log
    where (%(before)s::bigint is null or id < %(before)s)
      and (%(job)s::bigint is null or job_ids @> array[%(job)s::bigint])
      and (%(since)s::timestamptz is null or acted_at >= %(since)s)
      and (%(who)s::text is null or coalesce(actor, role) = %(who)s)
      and (%(act)s::text is null or act = %(act)s)
      and (%(queue)s::text is null
        or %(queue)s in (filter ->> 'queue', before ->> 'queue', after ->> 'queue'))
    order by case when %(job)s::bigint is null then id else id + 0 end desc limit %(limit)s
    """

CREATED: LiteralString = "select created_at from rota.job_runs where id = %(id)s limit 1"

LAST_OF_AUDIT: LiteralString = """
    select coalesce(max(n.id), 0) as id
    from (select i.id from rota.audit_log as i order by i.id desc limit 1) as n
    """

# Those of this transaction: others act at the same time, and under the same name.
AUDIT_OF_ACT: LiteralString = """
    select i.id from rota.audit_log as i
    where i.id > %(since)s and i.xmin = pg_current_xact_id()::xid
    order by i.id limit 1000
    """

# What an act has left, and what of it no later act has changed.
UNDOABLE: LiteralString = """
    select a.id, a.acted_at, a.role, a.actor, a.act, a.filter::text as filter, a.jobs,
        a.job_ids[:1] as job_ids,
        (
            select jsonb_object_agg(e.key, e.value::text) from jsonb_each(a.before) as e
        ) as before,
        (
            select jsonb_object_agg(e.key, e.value::text) from jsonb_each(a.after) as e
        ) as after,
        a.job_ids is null and exists (
            select from rota.audit_log as l
            where l.id > a.id and l.job_ids is null
              -- A schedule is the same in another queue, too.
              and coalesce(l.filter -> 'name', l.filter)
                is not distinct from coalesce(a.filter -> 'name', a.filter)
              and case l.act when 'unschedule' then 'schedule' when 'resume' then 'pause'
                else l.act end = case a.act when 'unschedule' then 'schedule'
                when 'resume' then 'pause' else a.act end
        ) as is_changed_since,
        array(
            select r.id from rota.job_runs as r
            -- Later acts are read once: no index finds them for who is not the owner.
            where r.id = any(array(
                select unnest(a.job_ids)
                except select unnest(l.job_ids) from rota.audit_log as l
                where l.id > a.id and a.job_ids is not null
              ))
              and case when a.act = 'cancel' then r.status = 'cancelled'
                -- The time of a retry is another one.
                else r.finished_at is null
                  and (a.act = 'reschedule' and r.failed_at > a.acted_at) is not true end
            order by r.id limit 1000
        ) as left_ids
    from rota.audit_log as a where a.id = any(%(ids)s) order by a.id desc limit %(limit)s
    """

STATISTICS: LiteralString = """
    select starts_at, succeeded, failures, dead, cancelled, wait_p50, wait_p95, run_p50, run_p95
    from rota.job_stats(
        since => rota.now() - %(since)s::interval, step => %(step)s, queues => %(queues)s,
        job_types => %(job_types)s, group_by => '{}')
    limit 1000
    """

# Workers that started together came by one deploy; those that left since are told, too.
DEPLOYS: LiteralString = """
    select date_bin('5 minutes', s.started_at, 'epoch') as started_at,
        sum(s.workers)::integer as workers,
        string_agg(distinct nullif(s.version, ''), ', ') as versions
    from rota.worker_starts as s
    where s.started_at > rota.now() - %(since)s::interval
    group by 1 order by 1 desc limit 200
    """


def statement(function: str, arguments: Mapping[str, Any]) -> sql.Composed:
    """Return the call of a function, to be shown and to be sent: the same text."""
    return sql.SQL("select * from rota.{}({})").format(
        _bare(function),
        sql.SQL(", ").join(
            sql.SQL("{} => {}").format(_bare(name), sql.Literal(value))
            for name, value in arguments.items()
        ),
    )


def _bare(name: str) -> sql.SQL:
    """Return a name of ours without quotes, as somebody would write it."""
    if not re.fullmatch("[a-z_]+", name):
        raise ValueError(name)
    return sql.SQL(name)


def told(statement: sql.Composed) -> str:
    """Return a statement as somebody would paste it."""
    return statement.as_string(None) + ";"
