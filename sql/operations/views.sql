/*
 * operations/views.sql -- what people and dashboards read.
 *
 * The columns of a view are an interface and those of a table are not.  Replacing a view can
 * only add columns at its end; an upgrade that needs more drops the view first.
 *
 * An observer who is confined to queues sees only their rows; what is compared with the queues
 * of any other is null, for these are null.  So views are security barriers: else a function of
 * the caller in a condition could reveal any row.  Behind a barrier the server does not find
 * the newest of a million jobs by an index.  So where there may be many rows, unconfined roles
 * read the tables, by a branch that is closed to all others (README.md, Decisions, Views with a
 * gate).
 */

create or replace view rota._runs as
select j.id, j.queue, j.job_type, j.payload, j.priority, j.run_at, j.status, j.attempts,
    j.max_attempts, j.locked_by, j.locked_until, j.lease_token, j.idempotency_key,
    j.progress_percent, j.progress_message, j.cancel_requested_at, j.cancel_reason,
    j.last_error, j.error_type, j.failed_at, j.created_at, j.updated_at, j.started_at,
    null::timestamptz as finished_at, null::jsonb as result, j.ordering_key, j.limit_key,
    j.pipeline, j.stage, j.stage_input, j.definition, j.scheduled_for, j.time_limit,
    j.expires_at, j.headers, null::timestamptz as discarded_at
from rota.jobs as j
union all
select f.id, f.queue, f.job_type, f.payload, f.priority, f.run_at, f.status, f.attempts,
    f.max_attempts, f.locked_by, null::timestamptz, f.lease_token, f.idempotency_key,
    f.progress_percent, f.progress_message, f.cancel_requested_at, f.cancel_reason,
    f.last_error, f.error_type, f.failed_at, f.created_at, f.updated_at, f.started_at,
    f.finished_at, f.result, f.ordering_key, f.limit_key, f.pipeline, f.stage,
    f.stage_input, f.definition, f.scheduled_for, f.time_limit, f.expires_at, f.headers,
    f.discarded_at
from rota.finished_jobs as f;

create or replace view rota._visible_runs with (security_barrier = true) as
select r.* from rota._runs as r where r.queue = any((select rota.visible_queues())::text[]);

create or replace view rota._barred_runs with (security_barrier = true) as
select r.* from rota._runs as r;

/* All conditions are outside: the planner finds the newest by an index only through branches
 * that have none. */
create or replace view rota.job_runs as
select r.id, r.queue, r.job_type, r.payload, r.priority, r.run_at, r.status, r.attempts,
    r.max_attempts, r.locked_by, r.locked_until, r.lease_token, r.idempotency_key,
    r.progress_percent, r.progress_message, r.cancel_requested_at, r.cancel_reason,
    r.last_error, r.error_type, r.failed_at, r.created_at, r.updated_at, r.started_at,
    r.finished_at, r.result, r.ordering_key, r.limit_key, r.pipeline, r.stage, r.stage_input,
    r.definition, r.scheduled_for, r.time_limit, r.expires_at, r.headers, r.discarded_at
from (
    select a.*, 'open'::text as way from rota._runs as a
    union all
    select v.*, 'queues'::text as way from rota._visible_runs as v
    union all
    select b.*, 'barred'::text as way from rota._barred_runs as b
) as r
-- The plan for a confined role does not have the open way.  It may be run when the role is
-- confined no more: then behind a barrier.
where (rota.sees_all_queues() or r.way <> 'open')
  -- Asked once for each table, before anything is read of it.
  and r.way = case
    when (select rota.visible_queues()) is not null then 'queues'
    when rota.sees_all_queues() then 'open' else 'barred'
  end;

comment on view rota.job_runs is 'Every job, live or ended, one row each, in one shape.';

create or replace view rota.queue_stats with (security_barrier = true) as
select n.queue, exists (
        select from rota.pauses as p
        where p.pause_name in ('all', 'queue ' || n.queue)
          and (p.until is null or p.until > rota.now())
    ) as is_paused, coalesce(c.ready, 0) as ready,
    coalesce(c.scheduled, 0) as scheduled, coalesce(c.retrying, 0) as retrying,
    coalesce(c.running, 0) as running, coalesce(c.blocked, 0) as blocked,
    coalesce(c.dead, 0) as dead, rota.now() - c.oldest_ready_at as oldest_ready_age,
    c.next_run_at, c.counted_at
from (
    select
        j.queue,
        (sum(j.jobs) filter (where j.status in ('queued', 'failed') and j.is_due))::bigint
            as ready,
        (sum(j.jobs) filter (where j.status = 'queued' and not j.is_due))::bigint as scheduled,
        (sum(j.jobs) filter (where j.status = 'failed' and not j.is_due))::bigint as retrying,
        (sum(j.jobs) filter (where j.status = 'running'))::bigint as running,
        (sum(j.jobs) filter (where j.status = 'blocked'))::bigint as blocked,
        (sum(j.jobs) filter (where j.status = 'dead'))::bigint as dead,
        min(j.first_run_at) filter (where j.status in ('queued', 'failed') and j.is_due)
            as oldest_ready_at,
        min(j.first_run_at) filter (where j.status in ('queued', 'failed') and not j.is_due)
            as next_run_at,
        min(j.counted_at) as counted_at
    from rota.job_counts() as j group by j.queue
) as c
full join (
    select q.queue from rota.queues as q
    union
    select p.queue from rota.pauses as p where p.queue is not null
) as s on s.queue = c.queue
cross join lateral (select coalesce(s.queue, c.queue) as queue) as n
where coalesce(n.queue = any((select rota.visible_queues())::text[]), true);

comment on view rota.queue_stats is
    'One row per queue: how many jobs are ready, scheduled for later, waiting for a retry, '
    'running, blocked or dead, and how long the oldest ready one has waited, as job_counts() '
    'has it.';

create or replace view rota.running_jobs with (security_barrier = true) as
select j.id, j.queue, j.job_type, j.attempts, j.max_attempts, j.locked_by, j.started_at,
    -- From infinity, as written by hand, nothing can be subtracted.
    rota.now() - least(greatest(j.started_at, 'epoch'), '9999-12-31') as running_for,
    j.locked_until, j.updated_at, j.progress_percent, j.progress_message, j.cancel_requested_at,
    j.cancel_reason
from rota.jobs as j
where j.status = 'running' and j.locked_until is not null
  and coalesce(j.queue = any((select rota.visible_queues())::text[]), true);

comment on view rota.running_jobs is 'Jobs that a worker holds now, with their progress.';

create or replace view rota.stale_jobs with (security_barrier = true) as
select r.id, r.queue, r.job_type, r.attempts, r.max_attempts, r.locked_by, r.started_at,
    r.locked_until, r.updated_at, r.locked_until < rota.now() as is_lease_over
from rota.running_jobs as r
where r.locked_until < rota.now() or r.updated_at < rota.now() - interval '1 hour';

comment on view rota.stale_jobs is
    'Running jobs to check: the lease has expired and no tick has swept it yet, or the worker '
    'has reported nothing for an hour.';

create or replace view rota.dead_jobs as
select r.id, r.queue, r.job_type, r.payload, r.attempts, r.max_attempts, r.last_error,
    r.error_type, r.locked_by, r.created_at, r.failed_at, r.finished_at, r.discarded_at
from rota.job_runs as r
-- By its end the server knows that none of them is live, and reads no table of these.
where r.status = 'dead' and r.finished_at is not null;

comment on view rota.dead_jobs is
    'Dead jobs; retry_job(id) gives a job all its attempts again.';

/* An error of a thousand jobs is to be seen once: ids, numbers and what stands in quotes, which
 * differ from job to job, are folded into one word each. */
create or replace function rota.fold_error(message text)
    returns text language plpgsql immutable security definer
    set search_path = pg_catalog, pg_temp as $$
declare
    v_text text := rota._cut(message, 1000);
begin
    v_text := regexp_replace(v_text,
        E'\\m[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\\M', 'ID', 'gi');
    -- An apostrophe is no quote.
    v_text := regexp_replace(v_text, E'(?<!\\w)''[^'']*''(?!\\w)|"[^"]*"', '''...''', 'g');
    v_text := regexp_replace(v_text, E'\\m(0x[0-9a-f]+|(?=[a-f]*[0-9])[0-9a-f]{8,})\\M', 'ID',
        'gi');
    v_text := regexp_replace(v_text, '[0-9]+([.,:][0-9]+)*', 'N', 'g');
    -- Who copies it from a screen, or sends it by a form, may have other line breaks.  To
    -- replace each single space as well takes twice as long.
    return btrim(regexp_replace(v_text, E'\\s*[\\t-\\r]\\s*|  +', ' ', 'g'));
end $$;

comment on function rota.fold_error is
    'The text of an error in one line, without what differs from job to job: numbers become N, '
    'ids ID, and quoted texts ''...''.';

/* The newest 2000, since to fold a million takes half a minute.  Texts that differ only in
 * their digits are folded alike, so one of them is folded for all; but that of 0x counts. */
create or replace view rota.error_groups with (security_barrier = true) as
with newest as materialized (
    select e.queue, e.job_type, e.error_type,
        -- Longer by a character, which fold_error() then may cut in two.
        left(e.message, 1004) as text,
        translate(replace(replace(translate(left(e.message, 1000), '12346789', '55555555'),
            '0x', '4x'), '0X', '4X'), '0', '5') as shape,
        e.failed_at, e.job_id
    from rota.job_errors as e
    -- Of an "or" the planner expects few rows, and would read and sort them all.
    where coalesce(e.queue = any((select rota.visible_queues())::text[]), true)
    order by e.failed_at desc limit 2000
),
folded as materialized (
    select n.shape, rota.fold_error(min(n.text)) as message from newest as n group by n.shape),
-- Of each job once, so that jobs are counted without a sort.
jobs as (
    select n.queue, n.job_type, n.error_type, f.message, n.job_id, count(*) as failures,
        min(n.failed_at) as first_failed_at, max(n.failed_at) as last_failed_at
    from newest as n join folded as f on f.shape = n.shape group by 1, 2, 3, 4, 5
)
select j.queue, j.job_type, j.error_type, j.message, sum(j.failures)::bigint as failures,
    count(*) as jobs, min(j.first_failed_at) as first_failed_at,
    max(j.last_failed_at) as last_failed_at, max(j.job_id) as last_job_id
from jobs as j group by 1, 2, 3, 4;

comment on view rota.error_groups is
    'The newest 2000 failed attempts, grouped by fold_error() of the error.';

create or replace view rota.hourly_stats with (security_barrier = true) as
select date_bin('1 hour', s.starts_at, 'epoch') as hour, s.queue, s.job_type,
    coalesce(sum(s.total) filter (where s.outcome = 'succeeded'), 0)::bigint as succeeded,
    coalesce(sum(s.total) filter (where s.outcome = 'dead'), 0)::bigint as dead,
    coalesce(sum(s.total) filter (where s.outcome = 'cancelled'), 0)::bigint as cancelled,
    sum(s.total_run) filter (where s.runs > 0) as total_duration,
    sum(s.total_run) / nullif(sum(s.runs), 0)::double precision as average_duration,
    max(s.longest_run) as longest_duration
from rota.stats_progress as p
cross join lateral (
    select h.* from rota.job_stats as h
    -- Not '1 day', which has 23 to 25 hours in the zone of a session.
    where h.step = 'hour' and h.starts_at > rota.now() - interval '24 hours'
      and h.starts_at < p.hours_until
    union all
    select m.* from rota.job_stats as m
    -- The planner takes the index for few rows, as between two bounds.
    where m.step = 'minute' and m.starts_at >= p.hours_until
      and m.starts_at < p.hours_until + interval '1 day'
) as s
where s.outcome <> 'failed'
  and coalesce(s.queue = any((select rota.visible_queues())::text[]), true)
group by 1, 2, 3;

comment on view rota.hourly_stats is
    'Ended jobs of this hour and the 23 before it, by hour, queue and job type, as job_stats() '
    'has them for any period; durations are those of the attempts that ended them.';

create or replace view rota.limit_stats with (security_barrier = true) as
select n.limit_name, l.max_running, coalesce(w.running, r.running, 0) as running,
    coalesce(w.waiting, h.waiting) as waiting, l.max_starts,
    coalesce(l.per, '1 second') as per, coalesce(s.burst, l.burst, 1) as burst, s.next_start_at
from (
    select l.limit_name from rota.limits as l
    where l.limit_key is null or l.limit_key !~ ':[*]$'
    union
    select p.limit_name from rota.limit_parts as p
    union
    select t.limit_name from rota.limit_starts as t
) as n
-- Of very many keys each side of a join is read once.
left join rota.limits as o on o.limit_name = n.limit_name
left join rota.limits as c on c.limit_name = substring(n.limit_name, '^key [^:]*:') || '*'
cross join lateral (select (coalesce(o, c)).*) as l
-- As _next_start_at() has it, in cells.
left join lateral (
    select c.burst, case
            when sum(least(coalesce(k.starts, 0), case
                    when k.cell = c.cell - c.cells + 1 then c.burst - (c.cells - 1) * c.starts
                    else c.starts
                end)) < c.burst
            then rota.now()
            else 'epoch'::timestamptz + (c.cell + 1) * c.length * interval '1 microsecond'
        end as next_start_at
    from (
        select ceil(extract(epoch from coalesce(l.per, '1 second')) * 1000000
            / l.max_starts)::bigint as gap
        where l.max_starts is not null
    ) as g
    cross join lateral (
        select coalesce(l.burst, greatest(1, least(10000, 100000 / g.gap)))::integer as burst
    ) as b
    cross join lateral (
        select b.burst, (b.burst + 15) / 16 as starts, (b.burst + 15) / 16 * g.gap as length
    ) as r
    cross join lateral (
        select r.burst, r.starts, r.length, (r.burst + r.starts - 1) / r.starts as cells,
            floor(extract(epoch from rota.now()) * 1000000 / r.length)::bigint as cell
    ) as c
    left join lateral (
        select t.cell, sum(t.starts) as starts from rota.limit_starts as t
        where t.limit_name = n.limit_name and t.cell between c.cell - c.cells + 1 and c.cell
        group by t.cell
    ) as k on true
    group by c.burst, c.cell, c.length
) as s on true
left join (
    select k.limit_name,
        (sum(c.jobs) filter (where c.status = 'running'))::bigint as running,
        (sum(c.jobs) filter (where c.status <> 'running'))::bigint as waiting
    from rota.job_counts() as c
    cross join lateral (values ('queue ' || c.queue), ('type ' || c.job_type)) as k (limit_name)
    where c.status = 'running' or c.status in ('queued', 'failed') and c.is_due group by 1
) as w on w.limit_name = n.limit_name
-- Keys may be very many: their jobs are found by indexes, of those that wait up to 1000.
left join (
    select 'key ' || j.limit_key as limit_name, count(*) as running from rota.jobs as j
    where j.status = 'running' and j.locked_until is not null and j.limit_key is not null
    group by 1
) as r on r.limit_name = n.limit_name
cross join lateral (
    select count(*) as waiting
    from (
        select from rota.jobs as j where j.hold = n.limit_name and j.hold <> 'time'
        -- By the index, also if one key is known to have held most jobs.
        order by j.queue limit 1000
    ) as i
) as h
-- Not before the row is chosen: a key with a weight of its own has no other limit.
where num_nonnulls(l.max_running, l.max_starts) > 0
  and ((select rota.visible_queues()) is null
    or n.limit_name = any(
        select 'queue ' || q.queue from unnest((select rota.visible_queues())) as q (queue)
    ));

comment on view rota.limit_stats is
    'One row per limit in use: how many jobs run under it, how many due ones wait for any '
    'reason, and when the next may start at its rate.';

create or replace view rota.unknown_effects with (security_barrier = true) as
select e.scope, e.key, e.recorded_at, e.expires_at, e.job_id, r.job_type, r.status
from rota.effects as e
-- One look-up for each, however the planner sees the history.
left join lateral (
    select h.job_type, h.status from rota.job_runs as h where h.id = e.job_id limit 1
) as r on true
where e.completed_at is null
  and ((select rota.visible_queues()) is null
    or e.queue = any((select rota.visible_queues())::text[]))
  and not exists (
      select from rota.jobs as j
      where j.id = e.job_id and j.lease_token = e.lease_token and j.status = 'running'
  )
  -- The record of a job that has moved goes on where that is.
  and not exists (select from rota.moved_jobs as t where t.job_id = e.job_id);

comment on view rota.unknown_effects is
    'Effects that may or may not have happened, with the job that recorded them; '
    'settle_effect() records which.';

/* The session by which a worker reports must be connected too.  On a standby the sessions of
 * the primary are not to be seen. */
create or replace view rota._workers as
select w.worker, w.host, w.pid, w.version, w.queues, w.job_types, w.concurrency, w.started_at,
    w.last_seen_at,
    rota.now() - least(greatest(w.last_seen_at, 'epoch'), '9999-12-31') as silent_for,
    -- A worker that is idle reports every five minutes.
    w.last_seen_at > rota.now() - interval '6 minutes'
    and (w.backend_pid is null or pg_is_in_recovery()
        or exists (select from pg_stat_get_activity(w.backend_pid))) as is_live
from rota.workers as w;

create or replace view rota.worker_health with (security_barrier = true) as
select w.* from rota._workers as w
where coalesce(w.queues && (select rota.visible_queues())::text[], true);

comment on view rota.worker_health is
    'One row per worker that has reported within a day: what it takes, how long ago it '
    'reported, and whether it is live: it reported within six minutes and is still connected.';

create or replace view rota.ticker_health as
select nullif(u.done_at, '-infinity') as last_tick_at, u.done_by as last_tick_by,
    -- Of a tick that is still to come none has run since the clock went back.
    greatest(n.now - t.at, t.at - n.now) as lag, (
        select count(*) from rota.job_definitions as o
        where o.next_run_at < n.now - interval '1 minute'
    ) as schedules_overdue, (
        select n.now - min(o.next_run_at) from rota.job_definitions as o
        where o.next_run_at < n.now - interval '1 minute'
    ) as oldest_overdue, (
        select count(*) from rota.job_definitions as o
        where not o.is_enabled and o.disabled_by is null
    ) as schedules_broken
-- Each count by itself: a query for the lag alone makes none.
from rota.maintenance as u join rota.upgrade_log as i on i.id = 0
cross join (select rota.now() as now) as n
cross join lateral (select coalesce(nullif(u.done_at, '-infinity'), i.applied_at) as at) as t
where u.task = 'tick';

comment on view rota.ticker_health is
    'The last tick that was recorded, by whom and how long ago, how many schedules should have '
    'run more than a minute ago, and how many an error has disabled.';
comment on column rota.ticker_health.lag is
    'Ticks are recorded every 10 seconds, or 5 minutes while they find nothing to do; before '
    'the first, the time since the installation; before the first since the clock went back, '
    'by how much.';
