/*
 * maintenance/statistics.sql -- count what ended, each end once.
 *
 * The history tells what ended: finished_jobs, job_errors and stage_runs.  No producer and no
 * worker counts anything; a tick reads what is new in the history by its time, adds it to the
 * minutes of job_stats, and later adds minutes to hours, five at a time, and hours to days.  So
 * a question about a month reads days, a few hours and a few minutes.
 *
 * A row may become visible after later ones, if its transaction continues after it has ended a
 * job.  But the transaction that writes such a row has a number (xid) and a lock on the table
 * before it reads the clock.  So a tick reads the clock and then the locks: what ended by that
 * time is either visible to the next statement, or of a transaction that still holds a lock.
 *
 *   - No transaction holds one: all until that time is counted at once.
 *   - Transactions do: all until the look before is counted, since most of those seen then have
 *     ended meanwhile.  One that has not is written to late_xids.  Its rows are left out, and
 *     are found by its number, which is in each row, when it is over; counting never waits.
 *
 * Counting and the new counted_until are one transaction, of one tick at a time.  So each
 * end is counted once, in the minute in which it ended.  Retention leaves alone what is not
 * counted, and acts of operators that take it out of the history leave it in restored_ends.
 * After the clock was set back, what ends before it has caught up is not counted.
 *
 * A tick begins with ten seconds of history, or two minutes if it is behind, and then takes
 * more or less by how many rows there were; after 100 ms it begins nothing more, and has_more
 * is true.
 */

/* Each end of a job, of an attempt that failed, and of a stage; part is what the index of its
 * table by time begins with, the queue or the pipeline. */
create or replace view rota._ends as
select f.id as job_id, f.queue as part, f.queue, f.job_type, f.status as outcome,
    f.finished_at as ended_at, f.ended_by,
    case when f.locked_by is not null
        then rota._elapsed(greatest(f.run_at, f.created_at), f.started_at) end as waited,
    case when f.locked_by is not null
        then rota._elapsed(f.started_at, f.finished_at) end as ran
from rota.finished_jobs as f where f.pipeline is null
union all
select e.job_id, '', e.queue, e.job_type, 'failed', e.failed_at, e.ended_by,
    rota._elapsed(e.run_at, e.started_at), rota._elapsed(e.started_at, e.failed_at)
from rota.job_errors as e
union all
-- Of several attempts the latest has not waited since the job came to its stage.
select s.job_id, s.pipeline, s.queue, s.job_type, s.status, s.finished_at, s.ended_by,
    case when s.worker is not null and s.attempts = 1
        then rota._elapsed(s.queued_at, s.started_at) end,
    case when s.worker is not null then rota._elapsed(s.started_at, s.finished_at) end
from rota.stage_runs as s;

/* Count what ended; returns how many rows, and whether more can be counted at once. */
create or replace function rota._count_ends(out rows_counted bigint, out has_more boolean)
    language plpgsql set lock_timeout = '100ms' as $$
declare
    -- What ends in the same microsecond, which may be after the look at the locks, is later.
    c_now constant timestamptz := rota.now() - interval '1 us';
    v_counted_until timestamptz; v_sampled_at timestamptz; v_was_open xid[]; v_open xid[];
    v_length interval; v_span record; v_first timestamptz; v_to timestamptz; v_rows bigint;
    c_scan constant rota.scan := rota._begin_scan('ends', null, '2 minutes', is_full => true);
begin
    rows_counted := 0;
    has_more := false;
    -- An older snapshot does not show what the locks tell to be committed.
    if current_setting('transaction_isolation') = 'read committed'
      and not rota._leaves_to_others() and (rota._has_uncounted() or exists (
        select from rota.stats_progress as p
        where p.sampled_at not between c_now - interval '4 minutes' and c_now
      )) then
        select p.counted_until, p.sampled_at, p.open_xids,
            case when p.is_behind then interval '2 minutes' else interval '10 seconds' end
        into v_counted_until, v_sampled_at, v_was_open, v_length
        from rota.stats_progress as p for update skip locked;
    end if;
    if v_counted_until is null then return; end if;

    -- Transactions that have ended jobs and are open hold a lock as writers on a table of the
    -- history, and have a number.  So have those that let jobs wait for others, which nobody
    -- sees yet: this keeps retention from removing a parent that has ended since.
    v_open := array(
        select x.transactionid from pg_locks as x
        where x.locktype = 'transactionid' and x.mode = 'ExclusiveLock' and x.granted
          and x.virtualtransaction = any((select rota._open_writers(array['rota.finished_jobs',
            'rota.job_errors', 'rota.stage_runs', 'rota.dependencies']::regclass[]))::text[])
    );
    insert into rota.late_xids (xid, since)
    select o.xid, v_counted_until from unnest(v_was_open) as o (xid)
    where o.xid = any(v_open) and not exists (
        select from rota.late_xids as l where l.xid = o.xid and l.until is null);
    update rota.late_xids as l set until = v_counted_until
    where l.xid <> all(v_open) and l.until is null;
    -- First what late transactions that are over have ended, and then what is new.
    for v_span in
        select l.xid, l.since, l.until from rota.late_xids as l where l.until is not null
        union all
        select null, v_counted_until, case when v_open = '{}' then c_now else v_sampled_at end
    loop
        while v_span.since < v_span.until and not has_more loop
            v_first := rota._first_uncounted(v_span.since);
            v_to := least(v_span.until, v_first
                + case when v_span.xid is null then v_length else interval '1 minute' end);
            v_rows := case when v_first > v_to then 0
                else rota._count_between(v_span.since, v_to, v_span.xid) end;
            if v_span.xid is null then
                v_length := case when v_rows < 2000 then least(v_length * 2, '1 hour')
                    when v_rows > 20000 then greatest(v_length / 2, '1 second')
                    else v_length end;
            end if;
            rows_counted := rows_counted + v_rows;
            v_span.since := v_to;
            has_more := rota.now() - c_now > interval '100 ms'
                and (v_span.xid is not null or v_to < v_span.until);
        end loop;
        if v_span.xid is null then
            v_counted_until := v_span.since;
        else
            update rota.late_xids as l set since = v_span.since
            where l.xid = v_span.xid and l.until = v_span.until;
        end if;
    end loop;
    delete from rota.late_xids as l where l.since >= l.until;
    while not has_more and rota._roll_up(v_counted_until) loop
        has_more := rota.now() - c_now > interval '100 ms';
    end loop;

    update rota.stats_progress as p
    set counted_until = v_counted_until,
        complete_until = least(v_counted_until,
            (select min(l.since) from rota.late_xids as l)),
        sampled_at = c_now, open_xids = v_open, is_behind = _count_ends.has_more;
    delete from rota.restored_ends as r where r.finished_at <= rota._counted_until();
    perform rota._end_scan(c_scan, 0);
end $$;

/* Whether it is time to count: ten seconds after the last time, if anything ended since.  To
 * look takes as long as there are queues: so a session looks and counts for a twentieth of the
 * time, but every two minutes at the latest. */
create or replace function rota._has_uncounted()
    returns boolean language plpgsql stable as $$
declare
    c_scan constant rota.scan := rota._begin_scan('ends', max_pause => '2 minutes');
    c_now constant timestamptz := c_scan.begun_at;
    v_progress rota.stats_progress;
begin
    select p.* into v_progress from rota.stats_progress as p;
    if v_progress.is_behind then
        return true;
    elsif (v_progress.sampled_at not between c_now - interval '10 seconds' and c_now)
        is not true
      or c_scan.start is not null then
        return false;
    elsif exists (select from rota.late_xids)
      or rota._first_uncounted(v_progress.counted_until) < 'infinity' then
        return true;
    end if;
    perform rota._end_scan(c_scan, 0);
    return false;
end $$;

/* The other transactions, by their virtual ids, that are writers on one of these tables. */
create or replace function rota._open_writers(tables regclass[])
    returns text[] language plpgsql as $$
begin
    return array(
        select distinct t.virtualtransaction from pg_locks as t
        where t.locktype = 'relation' and t.mode = 'RowExclusiveLock' and t.granted
          and t.database = (select d.oid from pg_database as d
            where d.datname = current_database())
          and t.relation = any(_open_writers.tables)
          and t.pid is distinct from pg_backend_pid()
    );
end $$;

/* The queues of which jobs ended on the day of this time or later.  Not the day after tomorrow:
 * that would be a probe more for each queue in each partition ahead. */
create or replace function rota._queues_since(since timestamptz)
    returns setof text language sql stable as $$
    select rota._history_queues(date_bin('1 day', greatest(since, 'epoch'), 'epoch'),
        date_bin('1 day', rota.now(), 'epoch') + interval '48 hours');
$$;

/* When the first row of the history after this time ended; infinity if there is none. */
create or replace function rota._first_uncounted(since timestamptz)
    returns timestamptz language plpgsql stable as $$
begin
    return coalesce(least(
        (select min(n.moment) from rota._queues_since(_first_uncounted.since) as q (queue)
        cross join lateral (
            select f.finished_at as moment from rota.finished_jobs_done as f
            where f.queue = q.queue and f.finished_at > _first_uncounted.since
            order by f.finished_at limit 1
        ) as n),
        (select min(f.finished_at) from rota.finished_jobs_dead as f
        where f.finished_at > _first_uncounted.since),
        (select min(e.failed_at) from rota.job_errors as e
        where e.failed_at > _first_uncounted.since),
        (select min(n.moment)
        from (select distinct s.pipeline from rota.pipeline_stages as s) as p
        cross join lateral (
            select r.finished_at as moment from rota.stage_runs as r
            where r.pipeline = p.pipeline and r.finished_at > _first_uncounted.since
            order by r.finished_at limit 1
        ) as n),
        (
            select min(r.finished_at) from rota.restored_ends as r
            where r.finished_at > _first_uncounted.since
        )), 'infinity');
end $$;

-- The bucket of a time; all that is less than a hundredth of a millisecond is in the first.
create or replace function rota._bucket(duration interval)
    returns smallint language sql immutable as $$
    select case when duration is not null
        then ceil(ln(greatest(date_part('epoch', duration) * 1000, 0.01)) / ln(1.1::float8))
    end::smallint;
$$;

/* Add to job_stats what ended after the one time and until the other, by this transaction or by
 * all but the late ones, and return how many rows of the history that were.  What comes late
 * may be of hours and days that are added up. */
create or replace function rota._count_between(
    since timestamptz, until timestamptz, late_xid xid default null
) returns bigint language plpgsql as $$
declare
    c_late constant xid[] := array(select l.xid from rota.late_xids as l where l.until is null);
    c_parts constant text[] := array(
        select ''
        union all
        select rota._queues_since(since)
        union
        select f.queue from rota.finished_jobs_dead as f
        where f.finished_at > since and f.finished_at <= until
        union all
        select distinct s.pipeline from rota.pipeline_stages as s
    );
    v_added rota.job_stats[];
begin
    with ends as (
        -- As long as they may be: what a hand has written has to go into the index.
        select left(u.queue, 63) as queue, left(u.job_type, 63) as job_type, u.outcome,
            u.ended_at, u.ended_by,
            -- The clock may have been set back meanwhile.
            case when u.waited < '0' then '0' else u.waited end as waited,
            case when u.ran < '0' then '0' else u.ran end as ran
        from (
            select e.queue, e.job_type, e.outcome, e.ended_at, e.ended_by, e.waited, e.ran
            from rota._ends as e
            where e.part = any(c_parts)
              and e.ended_at > _count_between.since and e.ended_at <= _count_between.until
            union all
            select r.queue, r.job_type, r.status, r.finished_at, r.ended_by, r.waited, r.ran
            from rota.restored_ends as r
            where r.finished_at > _count_between.since
              and r.finished_at <= _count_between.until
        ) as u
    ),
    binned as materialized (
        select s.step, date_bin(s.length, e.ended_at, 'epoch') as starts_at, e.queue,
            e.job_type, e.outcome, rota._bucket(e.waited) as wait_bucket,
            rota._bucket(e.ran) as run_bucket, count(*) as total,
            coalesce(sum(e.waited), '0') as total_wait, max(e.waited) as longest_wait,
            coalesce(sum(e.ran), '0') as total_run, max(e.ran) as longest_run
        from ends as e cross join rota.stats_progress as p
        cross join lateral (
            values ('minute', interval '1 minute', true),
                ('hour', interval '1 hour',
                    late_xid is not null and e.ended_at < p.hours_until),
                ('day', interval '1 day',
                    late_xid is not null and e.ended_at < p.days_until)
        ) as s (step, length, is_wanted)
        where s.is_wanted
          and case when late_xid is not null then e.ended_by = late_xid
            else e.ended_by <> all(c_late) end
        group by 1, 2, 3, 4, 5, 6, 7
    )
    -- Of one bucket each, which is null where a job has not waited or run; _add_stats() adds.
    -- By names, since a newer version may have added columns.
    select array_agg(jsonb_populate_record(null::rota.job_stats, to_jsonb(a)))
    into v_added
    from (
        select b.step, b.starts_at, b.queue, b.job_type, b.outcome, b.total, b.total_wait,
            b.longest_wait, array[b.wait_bucket] as wait_buckets, array[b.total] as wait_counts,
            b.total_run, b.longest_run, array[b.run_bucket] as run_buckets,
            array[b.total] as run_counts,
            b.total * (b.wait_bucket is not null)::integer as waits,
            b.total * (b.run_bucket is not null)::integer as runs
        from binned as b
    ) as a;
    if v_added is not null then perform rota._add_stats(v_added); end if;
    return coalesce(
        (select sum(a.total) from unnest(v_added) as a where a.step = 'minute'), 0)::bigint;
end $$;

/* Add rows to those of job_stats with the same step, time, queue, job type and outcome. */
create or replace function rota._add_stats(added rota.job_stats[])
    returns void language plpgsql as $$
begin
    with every as materialized (
        select a.* from unnest(_add_stats.added) as a
        union all
        select s.*
        from (
            select distinct a.step, a.starts_at, a.queue, a.job_type, a.outcome
            from unnest(_add_stats.added) as a
        ) as k
        join rota.job_stats as s using (step, starts_at, queue, job_type, outcome)
    ),
    histograms as (
        select e.step, e.starts_at, e.queue, e.job_type, e.outcome, h.is_wait, h.bucket,
            sum(h.total)::bigint as total
        from every as e
        cross join lateral (
            select true, w.* from unnest(e.wait_buckets, e.wait_counts) as w
            union all
            select false, r.* from unnest(e.run_buckets, e.run_counts) as r
        ) as h (is_wait, bucket, total)
        where h.bucket is not null group by 1, 2, 3, 4, 5, 6, 7
    )
    insert into rota.job_stats as s (step, starts_at, queue, job_type, outcome, total,
        total_wait, longest_wait, wait_buckets, wait_counts, total_run, longest_run,
        run_buckets, run_counts, waits, runs)
    select t.step, t.starts_at, t.queue, t.job_type, t.outcome, t.total, t.total_wait,
        t.longest_wait, coalesce(h.wait_buckets, '{}'), coalesce(h.wait_counts, '{}'),
        t.total_run, t.longest_run, coalesce(h.run_buckets, '{}'),
        coalesce(h.run_counts, '{}'), t.waits, t.runs
    from (
        select e.step, e.starts_at, e.queue, e.job_type, e.outcome,
            sum(e.total)::bigint as total, sum(e.total_wait) as total_wait,
            max(e.longest_wait) as longest_wait, sum(e.total_run) as total_run,
            max(e.longest_run) as longest_run, sum(e.waits)::bigint as waits,
            sum(e.runs)::bigint as runs
        from every as e group by 1, 2, 3, 4, 5
    ) as t
    left join (
        select i.step, i.starts_at, i.queue, i.job_type, i.outcome,
            array_agg(i.bucket order by i.bucket) filter (where i.is_wait) as wait_buckets,
            array_agg(i.total order by i.bucket) filter (where i.is_wait) as wait_counts,
            array_agg(i.bucket order by i.bucket) filter (where not i.is_wait) as run_buckets,
            array_agg(i.total order by i.bucket) filter (where not i.is_wait) as run_counts
        from histograms as i group by 1, 2, 3, 4, 5
    ) as h using (step, starts_at, queue, job_type, outcome)
    on conflict on constraint job_stats_pkey do update
    set total = excluded.total, total_wait = excluded.total_wait,
        longest_wait = excluded.longest_wait, wait_buckets = excluded.wait_buckets,
        wait_counts = excluded.wait_counts, total_run = excluded.total_run,
        longest_run = excluded.longest_run, run_buckets = excluded.run_buckets,
        run_counts = excluded.run_counts, waits = excluded.waits, runs = excluded.runs;
end $$;

/* Add the next minutes to their hour, or the next hours to their day: those that are counted,
 * up to the end of that hour or day; returns whether there were any. */
create or replace function rota._roll_up(counted_until timestamptz)
    returns boolean language plpgsql as $$
declare
    v_progress rota.stats_progress; v_step record; v_start timestamptz; v_end timestamptz;
begin
    select p.* into v_progress from rota.stats_progress as p;
    for v_step in
        select 'minute' as of, 'hour' as name, interval '1 hour' as length,
            interval '5 minutes' as part, v_progress.hours_until as since,
            _roll_up.counted_until as until
        union all
        -- Of UTC, and so not '1 day', which has 23 to 25 hours in the zone of a session.
        select 'hour', 'day', '24 hours', '1 hour', v_progress.days_until,
            v_progress.hours_until
    loop
        v_end := date_bin(v_step.part, v_step.until, 'epoch');
        continue when v_end <= v_step.since;
        v_start := date_bin(v_step.length, (
            select min(s.starts_at) from rota.job_stats as s
            where s.step = v_step.of and s.starts_at >= v_step.since
        ), 'epoch');
        -- Otherwise nothing ended in any of them.
        if v_start < v_end then
            v_end := least(v_end, v_start + v_step.length);
            perform rota._add_stats((
                select array_agg(jsonb_populate_record(s,
                    jsonb_build_object('step', v_step.name, 'starts_at', v_start)))
                from rota.job_stats as s
                where s.step = v_step.of and s.starts_at >= greatest(v_start, v_step.since)
                  and s.starts_at < v_end
            ));
        end if;
        update rota.stats_progress as p
        set hours_until = case v_step.name when 'hour' then v_end else p.hours_until end,
            days_until = case v_step.name when 'day' then v_end else p.days_until end;
        return true;
    end loop;
    return false;
end $$;
