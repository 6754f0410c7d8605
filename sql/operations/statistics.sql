/*
 * operations/statistics.sql -- how much ended, how, and how long it waited and ran.
 *
 * Everything here reads job_stats, which maintenance fills (maintenance/statistics.sql), and
 * never the jobs.  Of a span it takes rows of days for the whole days in it, rows of hours for
 * the whole hours that are left, and rows of minutes for the rest; so a month costs little more
 * than an hour.
 */

create or replace function rota.job_stats(
    since timestamptz default null,
    until timestamptz default null,
    step text default 'hour',
    queues text[] default null,
    job_types text[] default null,
    group_by text[] default '{queue,job_type}'
)
    returns table (
        starts_at timestamptz, queue text, job_type text, attempts bigint, succeeded bigint,
        failures bigint, dead bigint, cancelled bigint, average_wait interval,
        wait_p50 interval, wait_p95 interval, wait_p99 interval, longest_wait interval,
        average_run interval, run_p50 interval, run_p95 interval, run_p99 interval,
        longest_run interval
    ) language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off set jit = off
as $$
#variable_conflict use_column
declare
    c_visible constant text[] := rota._allowed_queues('observer');
    v_since timestamptz;
begin
    perform rota._check_choice('step', step, '{minute,hour,day,total}');
    if group_by is null or not group_by <@ '{queue,job_type}' then
        perform rota._refuse('group_by', 'must be a list of queue and job_type');
    end if;

    v_since := rota._stats_since(step, since, until);
    return query
    with parts as materialized (
        select
            case job_stats.step when 'total' then v_since else date_bin(
                ('1 ' || job_stats.step)::interval, s.starts_at, 'epoch') end as starts_at,
            case when 'queue' = any(group_by) then s.queue end as queue,
            case when 'job_type' = any(group_by) then s.job_type end as job_type, s.outcome,
            s.total, s.total_wait, s.longest_wait, s.wait_buckets, s.wait_counts, s.total_run,
            s.longest_run, s.run_buckets, s.run_counts
        from rota._stats_rows(job_stats.step, v_since,
            greatest(least(job_stats.until, rota.now() + interval '1 day'),
                '1970-01-01 00:00+00')) as s
        where (queues is null or s.queue = any(queues))
          and (c_visible is null or s.queue = any(c_visible))
          and (job_types is null or s.job_type = any(job_types))
    ),
    waits as (
        select p.starts_at, p.queue, p.job_type, h.bucket, sum(h.total) as total
        from parts as p
        cross join lateral unnest(p.wait_buckets, p.wait_counts) as h (bucket, total)
        where p.outcome in ('succeeded', 'failed') group by 1, 2, 3, 4
    ),
    runs as (
        select p.starts_at, p.queue, p.job_type, h.bucket, sum(h.total) as total
        from parts as p
        cross join lateral unnest(p.run_buckets, p.run_counts) as h (bucket, total)
        where p.outcome in ('succeeded', 'failed') group by 1, 2, 3, 4
    ),
    wait_times as (
        select r.starts_at, r.queue, r.job_type, max(r.of_all) as total,
            min(r.bucket) filter (where r.reached >= 0.5 * r.of_all) as p50,
            min(r.bucket) filter (where r.reached >= 0.95 * r.of_all) as p95,
            min(r.bucket) filter (where r.reached >= 0.99 * r.of_all) as p99
        from (
            select w.*, sum(w.total) over (g order by w.bucket) as reached,
                sum(w.total) over g as of_all
            from waits as w window g as (partition by w.starts_at, w.queue, w.job_type)
        ) as r
        group by 1, 2, 3
    ),
    run_times as (
        select r.starts_at, r.queue, r.job_type, max(r.of_all) as total,
            min(r.bucket) filter (where r.reached >= 0.5 * r.of_all) as p50,
            min(r.bucket) filter (where r.reached >= 0.95 * r.of_all) as p95,
            min(r.bucket) filter (where r.reached >= 0.99 * r.of_all) as p99
        from (
            select w.*, sum(w.total) over (g order by w.bucket) as reached,
                sum(w.total) over g as of_all
            from runs as w window g as (partition by w.starts_at, w.queue, w.job_type)
        ) as r
        group by 1, 2, 3
    )
    select t.starts_at, t.queue, t.job_type, t.succeeded + t.failures, t.succeeded, t.failures,
        t.dead, t.cancelled, t.total_wait / w.total::float8, rota._bucket_time(w.p50),
        least(rota._bucket_time(w.p95), t.longest_wait),
        least(rota._bucket_time(w.p99), t.longest_wait), t.longest_wait,
        t.total_run / r.total::float8, rota._bucket_time(r.p50),
        least(rota._bucket_time(r.p95), t.longest_run),
        least(rota._bucket_time(r.p99), t.longest_run), t.longest_run
    from (
        select p.starts_at, p.queue, p.job_type,
            sum(case p.outcome when 'succeeded' then p.total else 0 end)::bigint as succeeded,
            sum(case p.outcome when 'failed' then p.total else 0 end)::bigint as failures,
            sum(case p.outcome when 'dead' then p.total else 0 end)::bigint as dead,
            sum(case p.outcome when 'cancelled' then p.total else 0 end)::bigint as cancelled,
            sum(p.total_wait) filter (where p.outcome in ('succeeded', 'failed')) as total_wait,
            max(p.longest_wait) filter (where p.outcome in ('succeeded', 'failed'))
                as longest_wait,
            sum(p.total_run) filter (where p.outcome in ('succeeded', 'failed')) as total_run,
            max(p.longest_run) filter (where p.outcome in ('succeeded', 'failed'))
                as longest_run
        from parts as p group by 1, 2, 3
    ) as t
    left join wait_times as w on w.starts_at = t.starts_at
      and w.queue is not distinct from t.queue and w.job_type is not distinct from t.job_type
    left join run_times as r on r.starts_at = t.starts_at
      and r.queue is not distinct from t.queue and r.job_type is not distinct from t.job_type
    order by t.starts_at, t.queue, t.job_type;
end;
$$;

comment on function rota.job_stats is
    'What ended, by minute, hour or day of UTC, or in total, and by queue and job type or as '
    'group_by says: attempts, jobs, and waiting and run times of attempts, with percentiles '
    'within 5 %; since is an hour, a day, 30 days or an hour ago if not given, and is rounded '
    'down to what is kept: minutes for 2 days, hours for 30, days for 400; raises 22023.';

/* Where the span begins that is asked for, rounded down to what is kept of that time. */
create or replace function rota._stats_since(step text, since timestamptz, until timestamptz)
    returns timestamptz language plpgsql stable as $$
declare
    c_now constant timestamptz := rota.now();
    -- Nothing ends tomorrow, and steps cannot be counted to the end of all times.
    c_since constant timestamptz := least(greatest('1970-01-01 00:00+00', coalesce(since,
        least(greatest(until, '1970-01-01 00:00+00'), c_now) - case step
            when 'hour' then interval '1 day'
            when 'day' then interval '30 days'
            else interval '1 hour'
        end)), c_now + interval '1 day');
begin
    return date_bin(case
        when step = 'day' or c_since < c_now - interval '29 days' then interval '1 day'
        when step = 'hour' or c_since < c_now - interval '47 hours' then interval '1 hour'
        else interval '1 minute'
    end, c_since, 'epoch');
end;
$$;

/* The rows of job_stats that make up a span, each end of a job in one of them. */
create or replace function rota._stats_rows(
    step text, since timestamptz, until timestamptz
)
    returns setof rota.job_stats language plpgsql stable as $$
declare
    v_progress rota.stats_progress;
    v_days_from timestamptz;
    v_days_to timestamptz;
    v_hours_from timestamptz;
    v_hours_to timestamptz;
begin
    select p.* into v_progress from rota.stats_progress as p;
    -- The whole days and hours of the span that are added up; of neither if from is the end.
    if step in ('day', 'total') then
        v_days_from := date_bin('1 day', since + interval '1 day' - interval '1 us', 'epoch');
        v_days_to := least(date_bin('1 day', until, 'epoch'), v_progress.days_until);
    end if;
    if step <> 'minute' then
        v_hours_from := date_bin('1 hour', since + interval '1 hour' - interval '1 us',
            'epoch');
        v_hours_to := least(date_bin('1 hour', until, 'epoch'), v_progress.hours_until);
    end if;
    if v_hours_from < v_hours_to is not true then
        v_hours_from := until;
        v_hours_to := until;
    end if;
    if v_days_from < v_days_to is not true then
        v_days_from := v_hours_to;
        v_days_to := v_hours_to;
    end if;

    return query
    select s.* from rota.job_stats as s
    where s.step = 'day' and s.starts_at >= v_days_from and s.starts_at < v_days_to
    union all
    select s.* from rota.job_stats as s
    where s.step = 'hour' and s.starts_at >= v_hours_from and s.starts_at < v_days_from
    union all
    select s.* from rota.job_stats as s
    where s.step = 'hour' and s.starts_at >= v_days_to and s.starts_at < v_hours_to
    union all
    select s.* from rota.job_stats as s
    where s.step = 'minute' and s.starts_at >= _stats_rows.since and s.starts_at < v_hours_from
    union all
    select s.* from rota.job_stats as s
    where s.step = 'minute' and s.starts_at >= v_hours_to and s.starts_at < _stats_rows.until;
end;
$$;

-- The middle of a bucket, by proportion.
create or replace function rota._bucket_time(bucket smallint)
    returns interval language sql immutable as $$
    select power(1.1::float8, bucket) * 2 / 2.1 * interval '1 millisecond';
$$;

create or replace function rota.rising_failures()
    returns table (
        queue text, job_type text, attempts bigint, failures bigint, usual_failures numeric,
        failed_share numeric, usual_share numeric
    ) language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off set jit = off
as $$
#variable_conflict use_column
declare
    c_until constant timestamptz := (select p.counted_until from rota.stats_progress as p);
    c_since constant timestamptz := date_bin('1 minute', c_until - interval '10 minutes',
        'epoch');
    c_hour constant timestamptz := date_bin('1 hour', c_since, 'epoch');
begin
    perform rota._check_sees_all('rising_failures()');
    return query
    select r.queue, r.job_type, r.attempts, r.failures, round(r.usual_failures, 1),
        round(r.failed_share, 3), round(r.usual_share, 3)
    from (
        select n.queue, n.job_type, n.attempts, n.failures, n.failures::numeric / n.attempts
                as failed_share,
            coalesce(u.failures, 0) / 144.0 as usual_failures,
            coalesce(u.failures::numeric / nullif(u.attempts, 0), 0) as usual_share
        from (
            select s.queue, s.job_type, sum(s.total)::bigint as attempts,
                sum(case s.outcome when 'failed' then s.total else 0 end)::bigint as failures
            from rota.job_stats as s
            where s.step = 'minute' and s.starts_at >= c_since
              and s.outcome in ('succeeded', 'failed')
            group by 1, 2
        ) as n
        left join (
            select s.queue, s.job_type, sum(s.total) as attempts,
                sum(case s.outcome when 'failed' then s.total else 0 end) as failures
            from rota._stats_rows('total', c_hour - interval '1 day', c_since) as s
            where s.outcome in ('succeeded', 'failed') group by 1, 2
        ) as u on u.queue = n.queue and u.job_type = n.job_type
        where n.failures >= 5 and c_until > rota.now() - interval '15 minutes'
    ) as r
    -- More of them because there is more to do is no alarm.
    where r.failures > 3 * r.usual_failures and r.failed_share > 2 * r.usual_share
    order by r.failures desc, r.queue, r.job_type;
end;
$$;

comment on function rota.rising_failures is
    'Queues and job types of which, in the last 10 minutes, at least 5 attempts failed, more '
    'than thrice as many as usual in such a time of the day before, and more than twice the '
    'usual share of all attempts; a row is something to be alerted of.';
