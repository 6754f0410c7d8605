/*
 * operations/statistics.sql -- how much ended, how, and how long it waited and ran.
 *
 * Everything here reads job_stats, which maintenance fills (maintenance/statistics.sql), and
 * never the jobs.  Of a span it takes rows of days for the whole days in it, rows of hours for
 * the whole hours that are left, and rows of minutes for the rest.  So a month costs little
 * more than an hour.  Of up to 20 queues it looks up the rows of each time.
 */

create or replace function rota.job_stats(
    since timestamptz default null, until timestamptz default null, step text default 'hour',
    queues text[] default null, job_types text[] default null,
    group_by text[] default '{queue,job_type}'
) returns table (
        starts_at timestamptz, queue text, job_type text, attempts bigint, succeeded bigint,
        failures bigint, dead bigint, cancelled bigint, average_wait interval,
        wait_p50 interval, wait_p95 interval, wait_p99 interval, longest_wait interval,
        average_run interval, run_p50 interval, run_p95 interval, run_p99 interval,
        longest_run interval
    ) language plpgsql stable security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off set jit = off
    set work_mem = '16MB' as $$
#variable_conflict use_column
declare
    c_visible constant text[] := rota._allowed_queues('observer');
    -- Where many rows become one, to add up their buckets first is less to sort.
    c_is_coarse constant boolean := step = 'total' or cardinality(group_by) < 2;
    c_now constant timestamptz := rota.now();
    -- Nothing ends tomorrow, and steps cannot be counted to the end of all times.
    c_since constant timestamptz := least(greatest('1970-01-01 00:00+00', coalesce(since,
        least(case when until is not null then greatest(until, '1970-01-01 00:00+00') end,
            c_now) - case step
            when 'hour' then interval '1 day'
            when 'day' then interval '30 days'
            else interval '1 hour'
        end)), c_now + interval '1 day');
    -- Rounded down to what is kept of that time.
    c_from constant timestamptz := date_bin(case
        when step = 'day' or c_since < c_now - interval '29 days' then interval '1 day'
        when step = 'hour' or c_since < c_now - interval '47 hours' then interval '1 hour'
        else interval '1 minute'
    end, c_since, 'epoch');
begin
    perform rota._check_choice('step', step, '{minute,hour,day,total}');
    if group_by is null or not group_by <@ '{queue,job_type}' then
        perform rota._refuse('group_by', 'must be a list of queue and job_type');
    end if;

    return query
    with parts as materialized (
        -- By a number of its own for each row of the answer, which is quicker to group by.
        select dense_rank() over (order by r.starts_at, r.queue, r.job_type) as place, r.*
        from (
            select
                case job_stats.step when 'total' then c_from else date_bin(
                    ('1 ' || job_stats.step)::interval, s.starts_at, 'epoch') end as starts_at,
                case when 'queue' = any(group_by) then s.queue end as queue,
                case when 'job_type' = any(group_by) then s.job_type end as job_type,
                s.outcome, s.outcome in ('succeeded', 'failed') as is_attempt, s.total,
                s.total_wait, s.longest_wait, s.wait_buckets, s.wait_counts, s.waits,
                s.total_run, s.longest_run, s.run_buckets, s.run_counts, s.runs
            from rota._stats_rows(job_stats.step, c_from,
                greatest(least(job_stats.until, c_now + interval '1 day'),
                    '1970-01-01 00:00+00'),
                case when cardinality(queues) <= 20 then queues end) as s
            where (queues is null or s.queue = any(queues))
              and (c_visible is null or s.queue = any(c_visible))
              and (job_types is null or s.job_type = any(job_types))
        ) as r
    ),
    sums as materialized (
        select p.place, p.starts_at, p.queue, p.job_type,
            sum(case p.outcome when 'succeeded' then p.total else 0 end)::bigint as succeeded,
            sum(case p.outcome when 'failed' then p.total else 0 end)::bigint as failures,
            sum(case p.outcome when 'dead' then p.total else 0 end)::bigint as dead,
            sum(case p.outcome when 'cancelled' then p.total else 0 end)::bigint as cancelled,
            sum(p.waits::float8) filter (where p.is_attempt) as waits,
            sum(p.total_wait) filter (where p.is_attempt) as total_wait,
            max(p.longest_wait) filter (where p.is_attempt) as longest_wait,
            sum(p.runs::float8) filter (where p.is_attempt) as runs,
            sum(p.total_run) filter (where p.is_attempt) as total_run,
            max(p.longest_run) filter (where p.is_attempt) as longest_run
        from parts as p group by 1, 2, 3, 4
    ),
    counts as not materialized (
        select p.place, false as is_run, unnest(p.wait_buckets) as bucket,
            unnest(p.wait_counts)::float8 as total
        from parts as p where p.is_attempt
        union all
        select p.place, true, unnest(p.run_buckets), unnest(p.run_counts)
        from parts as p where p.is_attempt
    ),
    percentiles as (
        select r.place,
            min(r.bucket) filter (where not r.is_run and r.share >= 0.5) as wait_p50,
            min(r.bucket) filter (where not r.is_run and r.share >= 0.95) as wait_p95,
            min(r.bucket) filter (where not r.is_run and r.share >= 0.99) as wait_p99,
            min(r.bucket) filter (where r.is_run and r.share >= 0.5) as run_p50,
            min(r.bucket) filter (where r.is_run and r.share >= 0.95) as run_p95,
            min(r.bucket) filter (where r.is_run and r.share >= 0.99) as run_p99
        from (
            select b.place, b.is_run, b.bucket,
                -- Equal buckets of several rows have one share: that of all of them.
                sum(b.total) over (partition by b.place, b.is_run order by b.bucket)
                    / nullif(case when b.is_run then s.runs else s.waits end, 0) as share
            from (
                select c.place, c.is_run, c.bucket, sum(c.total) as total from counts as c
                where c_is_coarse group by 1, 2, 3
                union all
                select c.* from counts as c where not c_is_coarse
            ) as b
            join sums as s on s.place = b.place
        ) as r
        group by r.place
    )
    select s.starts_at, s.queue, s.job_type, s.succeeded + s.failures, s.succeeded, s.failures,
        s.dead, s.cancelled, s.total_wait / nullif(s.waits, 0), rota._bucket_time(p.wait_p50),
        least(rota._bucket_time(p.wait_p95), s.longest_wait),
        least(rota._bucket_time(p.wait_p99), s.longest_wait), s.longest_wait,
        s.total_run / nullif(s.runs, 0), rota._bucket_time(p.run_p50),
        least(rota._bucket_time(p.run_p95), s.longest_run),
        least(rota._bucket_time(p.run_p99), s.longest_run), s.longest_run
    from sums as s left join percentiles as p on p.place = s.place order by s.place;
end $$;

comment on function rota.job_stats is
    'What ended, by minute, hour or day in UTC, or in total, and by queue and job type or as '
    'group_by says: attempts, jobs, and waiting and run times of attempts, with percentiles '
    'within 5 %; since is by default an hour ago, with step hour a day and with step day 30 '
    'days, and is rounded down to what is kept: minutes for 2 days, hours for 30, days for '
    '400; raises 22023.';

/* The rows of job_stats that make up a span, each end of a job in one of them.  The row of a
 * day or hour that goes on has what ended up to days_until or hours_until. */
create or replace function rota._stats_rows(
    step text, since timestamptz, until timestamptz, queues text[] default null
) returns setof rota.job_stats language plpgsql stable as $$
declare
    v_progress rota.stats_progress; v_days_from timestamptz; v_days_to timestamptz;
    v_hours_from timestamptz; v_hours_to timestamptz;
begin
    select p.* into v_progress from rota.stats_progress as p;
    -- The days and hours that are wholly in the span; of neither if from is the end.
    v_days_from := case when step in ('day', 'total') then date_bin('1 day',
        since + interval '24 hours' - interval '1 us', 'epoch') end;
    v_days_to := case when until < v_progress.days_until then date_bin('1 day', until, 'epoch')
        else v_progress.days_until end;
    v_hours_from := case when step <> 'minute' then date_bin('1 hour',
        since + interval '1 hour' - interval '1 us', 'epoch') end;
    v_hours_to := case when until < v_progress.hours_until
        then date_bin('1 hour', until, 'epoch') else v_progress.hours_until end;
    if v_hours_from < v_hours_to is not true then
        v_hours_from := until;
        v_hours_to := until;
    end if;
    if v_days_from < v_days_to is not true then
        v_days_from := v_hours_to;
        v_days_to := v_hours_to;
    end if;

    return query select s.*
    from (
        values ('day', v_days_from, v_days_to), ('hour', v_hours_from, v_days_from),
            ('hour', v_days_to, v_hours_to), ('minute', _stats_rows.since, v_hours_from),
            ('minute', v_hours_to, _stats_rows.until)
    ) as p (step, since, until)
    cross join lateral (
        select a.* from rota.job_stats as a
        where queues is null and a.step = p.step
          and a.starts_at >= p.since and a.starts_at < p.until
        union all
        select o.*
        from (select distinct u from unnest(queues) as u) as q (queue)
        cross join lateral (
            -- From the first that is kept.
            select f.starts_at from rota.job_stats as f
            where f.step = p.step and f.starts_at >= p.since and f.starts_at < p.until
            order by f.starts_at limit 1
        ) as k
        cross join generate_series(k.starts_at, p.until,
            case p.step when 'day' then '24 hours' else '1 ' || p.step end::interval)
            as t (starts_at)
        cross join lateral (
            select b.* from rota.job_stats as b
            where b.step = p.step and b.starts_at = t.starts_at and b.queue = q.queue offset 0
        ) as o
        where t.starts_at < p.until
    ) as s;
end $$;

-- The middle of a bucket, by proportion.
create or replace function rota._bucket_time(bucket smallint)
    returns interval language sql immutable as $$
    select power(1.1::float8, bucket) * 2 / 2.1 * interval '1 millisecond';
$$;

create or replace function rota.rising_failures()
    returns table (
        queue text, job_type text, attempts bigint, failures bigint, usual_failures numeric,
        failed_share numeric, usual_share numeric
    ) language plpgsql stable security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
    c_until constant timestamptz := (select p.counted_until from rota.stats_progress as p);
    c_since constant timestamptz := date_bin('1 minute', c_until - interval '10 minutes',
        'epoch');
    c_hour constant timestamptz := date_bin('1 hour', c_since, 'epoch');
begin
    perform rota._check_sees_all('rising_failures()');
    return query select r.queue, r.job_type, r.attempts, r.failures, round(r.usual_failures, 1),
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
end $$;

comment on function rota.rising_failures is
    'Queues and job types of which at least 5 attempts failed in the last 10 minutes, more '
    'than three times as many as usual in such a period of the day before, and more than twice '
    'the usual share of all attempts; alert on each row.';
