/*
 * maintenance/sweep.sql -- end leases that ran out and jobs that expired, let in jobs whose
 * time has come.
 *
 * Any session may call it at any time: each call does a bounded amount, and skips rows that
 * another session holds.  The late jobs of a kind are tried together and, if that fails, one by
 * one: a job for which it cannot be done stays with a warning, and keeps no other.
 *
 * A running job whose lease has ended, or that is over its time limit though its worker lives,
 * is treated as one whose attempt failed: the attempt counts.
 *
 * A job begins no attempt at expires_at or later: a claim takes it out of its lane
 * (jobs/claim.sql), and here it ends, as cancelled and with error_type expired.  Its producer
 * said that it is useless from then on, so no operator has to look at it, unlike a dead one.
 *
 * Jobs for later are those with a place of their own (waiting/fairness.sql), which are kept out
 * of their lanes until their time has come.
 *
 * In the first seconds of a server nothing is swept.  The leases that ended while it was away
 * say nothing of their workers, which come back with what they have ended meanwhile.
 *
 * A clock that goes back would make the leases longer.  So the next tick moves them with it.
 */

create or replace function rota.sweep_stale_leases(max_jobs integer default 1000)
    returns integer language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_number('max_jobs', max_jobs, 1, 10000);
    return rota._do_late('sweep', max_jobs);
end $$;

comment on function rota.sweep_stale_leases is
    'Fail up to max_jobs running jobs whose lease has expired, with error_type lease_expired, '
    'or time_limit if that had expired too, and return how many; raises 22023.';

/* Do what is due with the late jobs of a kind, together; where that fails, one by one: more are
 * looked at then, so that those for which it cannot be done do not fill the call. */
create or replace function rota._do_late(kind text, max_jobs integer)
    returns integer language plpgsql set enable_seqscan = off set jit = off
    set plan_cache_mode = force_generic_plan set enable_bitmapscan = off
    set enable_sort = off as $$
declare
    v_job_id bigint;
    v_done integer := 0;
begin
    if not rota._has_late(kind) then return 0; end if;
    begin
        return rota._do_these_late(kind, rota._lock_late(kind, max_jobs));
    exception when others then
        raise warning '% falls back to one job at a time: %', kind, sqlerrm;
    end;

    foreach v_job_id in array rota._lock_late(kind, 10 * max_jobs) loop
        exit when v_done >= max_jobs;
        begin
            v_done := v_done + rota._do_these_late(kind, array[v_job_id]);
        exception when others then
            raise warning '% of job % failed and will be tried again: %', kind, v_job_id,
                sqlerrm;
        end;
    end loop;
    return v_done;
end $$;

/* Lock the first late jobs of a kind: whose lease has ended, that wait and have expired, or
 * whose time has come. */
create or replace function rota._lock_late(kind text, max_jobs integer)
    returns bigint[] language plpgsql as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
declare
    c_scan constant rota.scan := rota._begin_scan(kind, null,
        case kind when 'sweep' then interval '1 minute' else '2 seconds' end);
    v_now constant timestamptz := c_scan.begun_at;
    v_since constant timestamptz := rota._from_micros(c_scan.start);
begin
    if kind = 'sweep' then
        return array(
            select j.id from rota.jobs as j
            where j.status = 'running' and j.locked_until < v_now and j.locked_until >= v_since
            order by j.locked_until limit _lock_late.max_jobs for update skip locked
        );
    elsif kind = 'expiry' then
        return array(
            select j.id from rota.jobs as j
            where j.locked_until is null and j.expires_at <= v_now and j.expires_at >= v_since
            -- By both columns: the server does not see that the first is the same for all.
            order by j.locked_until, j.expires_at limit _lock_late.max_jobs
            for update skip locked
        );
    end if;
    return array(
        select j.id from rota.jobs as j
        where j.hold = 'time' and j.status in ('queued', 'failed')
          and j.run_at <= v_now and j.run_at >= v_since
        order by j.run_at, j.id limit _lock_late.max_jobs for update skip locked
    );
end $$;

/* Whether there is a late job of a kind; remembers where the first one is, or that none is left
 * from before this time: a little earlier, for late commits. */
create or replace function rota._has_late(kind text)
    returns boolean language plpgsql as $$
declare
    c_scan constant rota.scan := rota._begin_scan(kind,
        case kind when 'later' then 'rota.jobs_later_idx'::regclass
            else 'rota.jobs_deadline_idx' end,
        case kind when 'sweep' then interval '1 minute' else '2 seconds' end);
    v_now constant timestamptz := c_scan.begun_at;
    v_since constant timestamptz := rota._from_micros(c_scan.start);
    v_first timestamptz;
begin
    if kind = 'sweep' then
        select j.locked_until into v_first from rota.jobs as j
        where j.status = 'running' and j.locked_until < v_now and j.locked_until >= v_since
        order by j.locked_until limit 1;
    elsif kind = 'expiry' then
        select j.expires_at into v_first from rota.jobs as j
        where j.locked_until is null and j.expires_at <= v_now and j.expires_at >= v_since
        order by j.locked_until, j.expires_at limit 1;
    else
        select j.run_at into v_first from rota.jobs as j
        where j.hold = 'time' and j.status in ('queued', 'failed')
          and j.run_at <= v_now and j.run_at >= v_since order by j.run_at, j.id limit 1;
    end if;
    perform rota._end_scan(c_scan, rota._micros(coalesce(v_first, v_now)) - 10000);
    if v_first is null or kind <> 'sweep' then return v_first is not null; end if;
    -- A worker looks for a server that is away every half second.  After a crash of a backend,
    -- a long replay or a promotion the postmaster is older than the service: the writer of the
    -- log begins after all of these.  Not every owner may see it.
    return v_now - greatest(pg_postmaster_start_time(), (
        select max(a.backend_start) from pg_stat_activity as a
        where a.backend_type = 'walwriter'
    )) not between interval '0' and interval '3 seconds';
end $$;

/* Do it with these jobs, which the caller has locked, and return with how many. */
create or replace function rota._do_these_late(kind text, job_ids bigint[])
    returns integer language plpgsql as $$
declare
    v_ids bigint[] := job_ids;
begin
    case kind
        when 'sweep' then perform rota._sweep_jobs(job_ids);
        when 'expiry' then perform rota._cancel_jobs(job_ids, null, have_expired => true);
        when 'later' then
            v_ids := rota._let_in(job_ids, 'time');
            perform rota._notify_for(v_ids);
    end case;
    return cardinality(v_ids);
end $$;

/* A lease ended through no fault of the job's code, as far as is known, and the job has waited
 * for that end: so it is tried again about a second later.  Where the attempt before it ended
 * in the same way, the job may be what kills its workers, and after a time limit whatever hung
 * may hang again: then the backoff holds.  What an operator has set goes before both. */
create or replace function rota._sweep_jobs(job_ids bigint[])
    returns void language plpgsql as $$
begin
    perform rota._fail_running(array_agg(s.id), array_agg(s.lease_token),
        array_agg(case
            when s.is_overdue
            -- In quotes, since fold_error() is to take the errors of all workers as one.
            then format('time limit: worker %L did not end the job within %s', s.locked_by,
                rota._elapsed(s.started_at, s.overdue_at))
            else format('lease expired: worker %L neither finished the job nor sent a '
                'heartbeat before %s', s.locked_by, s.locked_until)
        end),
        array_agg(case when s.is_overdue then 'time_limit' else 'lease_expired' end), null,
        array_agg(case when not s.is_overdue
                and s.error_type is distinct from 'lease_expired'
                and (rota._retry_rule('lease_expired', s.job_type, s.queue)).retry_in is null
            then least(
                rota._backoff(
                    coalesce(s.policy, '{}') || '{"kind": "fixed", "base_seconds": 1}', 1),
                rota._backoff(s.policy, s.attempts))
        end),
        null)
    from (
        select j.*, coalesce(j.overdue_at <= rota.now(), false) as is_overdue,
            coalesce(j.backoff, (
                select q.backoff from rota.queues as q where q.queue = j.queue)) as policy
        from rota.jobs as j where j.id = any(_sweep_jobs.job_ids)
    ) as s;
end $$;

/* Where the last tick that is recorded was later than it is now, the clock has gone back: then
 * what was left of each lease, as of the last sign of life of its worker, begins again.  A step
 * of up to a minute is left to pass. */
create or replace function rota._move_leases()
    returns void language plpgsql as $$
declare
    c_now constant timestamptz := rota.now();
begin
    if not exists (
        select from rota.maintenance as m
        where m.task = 'tick' and m.done_at > c_now + interval '1 minute'
    ) then
        return;
    end if;
    update rota.jobs as j
    set locked_until = j.locked_until - greatest(j.updated_at - c_now, '0'),
        -- Of an attempt that began before the clock was ahead the time goes on.
        started_at = case when j.started_at > c_now
            then j.started_at - (greatest(j.updated_at, j.started_at) - c_now)
            else j.started_at end,
        overdue_at = case when j.started_at > c_now
            then j.overdue_at - (greatest(j.updated_at, j.started_at) - c_now)
            else j.overdue_at end,
        updated_at = least(j.updated_at, c_now)
    where j.id = any(array(
        select r.id from rota.jobs as r
        where r.status = 'running' and r.locked_until > c_now
          and greatest(r.updated_at, r.started_at) > c_now
          -- Not what a hand has written infinite.
          and greatest(r.updated_at, r.started_at) < '9999-12-31' for update skip locked
    ));
end $$;
