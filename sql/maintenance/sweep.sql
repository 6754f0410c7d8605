/*
 * maintenance/sweep.sql -- take back the jobs of workers that vanished.
 *
 * A running job whose lease has ended is treated as one whose attempt failed.  No leader does
 * this and no daemon: anybody may call it at any time, each call does a bounded amount, and
 * rows that somebody else holds (a heartbeat, a finish, another sweep) are skipped.  The
 * attempt counts, but where the one before did not end like this the next try comes at once.
 * A job that is over its time limit comes back in the same way, though its worker lives, and is
 * tried again after its backoff: whatever hung may hang again.
 *
 * One row that cannot be swept must not keep the others.  All are first tried together; if
 * that fails they are tried one by one, each in its own subtransaction, and the bad one stays
 * with a warning; up to ten times as many are looked at, so that bad ones do not fill the call.
 *
 * In the first seconds of a server nothing is swept.  The leases that ended while it was away
 * say nothing of their workers, which come back with what they have ended meanwhile.
 *
 * While somebody holds an old snapshot, the index entries of all leases that ended well stay in
 * front.  So a session remembers until when it has swept and begins there, as claims do (see
 * there): looks from the very start take at most a twentieth of the time.
 */

create or replace function rota.sweep_stale_leases(max_jobs integer default 1000)
    returns integer language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off set enable_sort = off
as $$
begin
    perform rota._check_number('max_jobs', max_jobs, 1, 10000);
    begin
        return rota._sweep(max_jobs, false);
    exception
        when others then
            raise warning 'sweep falls back to one job at a time: %', sqlerrm;
            return rota._sweep(max_jobs, true);
    end;
end;
$$;

comment on function rota.sweep_stale_leases is
    'Fail up to max_jobs running jobs whose lease has ended, with error_type lease_expired, or '
    'time_limit where that was over, too, and return how many; raises 22023.';

create or replace function rota._sweep(max_jobs integer, is_one_by_one boolean)
    returns integer language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    v_since constant timestamptz := rota._swept_until(v_now, is_one_by_one);
    v_walked constant bigint :=
        pg_stat_get_xact_tuples_returned('rota.jobs_deadline_idx'::regclass::oid);
    v_job rota.jobs;
    v_swept integer := 0;
begin
    if rota._has_just_started(v_now) then return 0; end if;
    for v_job in
        select j.* from rota.jobs as j
        where j.status = 'running' and j.locked_until < v_now and j.locked_until >= v_since
        order by j.locked_until
        limit _sweep.max_jobs * case when _sweep.is_one_by_one then 10 else 1 end
        for update skip locked
    loop
        exit when v_swept = max_jobs;
        if not is_one_by_one then
            perform rota._sweep_one(v_job);
            v_swept := v_swept + 1;
            continue;
        end if;

        begin
            perform rota._sweep_one(v_job);
            v_swept := v_swept + 1;
        exception
            when others then
                raise warning 'job % cannot be swept: %', v_job.id, sqlerrm;
        end;
    end loop;

    if v_swept < max_jobs and not is_one_by_one then
        perform rota._keep_sweep(v_now, not isfinite(v_since), v_walked);
    end if;
    return v_swept;
end;
$$;

/*
 * Whether a lease has ended; true without a look when one from the start would take long, and
 * is due: then the sweep does it.
 */
create or replace function rota._has_stale_leases()
    returns boolean language plpgsql stable as $$
declare
    v_now constant timestamptz := rota.now();
    v_since timestamptz := timestamptz '-infinity';
begin
    if rota._has_just_started(v_now) then return false; end if;
    if (string_to_array(rota._scan_start('sweep'), ' '))[3]::bigint > 5000 then
        v_since := rota._swept_until(v_now, false);
        if not isfinite(v_since) then return true; end if;
    end if;
    return exists (
        select from rota.jobs as j
        where j.status = 'running' and j.locked_until < v_now and j.locked_until >= v_since
    );
end;
$$;

/* A worker looks for a server that is away every half second. */
create or replace function rota._has_just_started(moment timestamptz)
    returns boolean language sql stable as $$
select moment - pg_postmaster_start_time() between interval '0' and interval '3 seconds'
$$;

/* Before that no lease is looked for; '-infinity' when it is time for a full scan. */
create or replace function rota._swept_until(moment timestamptz, is_full boolean)
    returns timestamptz language plpgsql stable as $$
declare
    v_hint constant bigint[] := string_to_array(rota._scan_start('sweep'), ' ')::bigint[];
    v_moment constant bigint := (extract(epoch from _swept_until.moment) * 1000000)::bigint;
begin
    if is_full or (v_hint[1] > v_moment and v_hint[1] <= v_moment + 60000000
        and v_hint[2] <= v_moment and v_hint[3] > 5000) is not true then
        return timestamptz '-infinity';
    end if;
    return 'epoch'::timestamptz + v_hint[2] * interval '1 microsecond' - interval '10 ms';
end;
$$;

/* The hint: when a look from the start is due, until when was swept, what the last walked. */
create or replace function rota._keep_sweep(moment timestamptz, was_full boolean, walked bigint)
    returns void language plpgsql as $$
declare
    v_hint bigint[] := string_to_array(rota._scan_start('sweep'), ' ')::bigint[];
begin
    if was_full then
        v_hint[1] := (extract(epoch from _keep_sweep.moment + least(
            21 * (rota.now() - _keep_sweep.moment), interval '1 minute')) * 1000000)::bigint;
        v_hint[3] := pg_stat_get_xact_tuples_returned('rota.jobs_deadline_idx'::regclass::oid)
            - walked;
    end if;
    v_hint[2] := (extract(epoch from _keep_sweep.moment) * 1000000)::bigint;
    perform rota._keep_scan_start('sweep', array_to_string(v_hint, ' '));
end;
$$;

/*
 * The lease ended through no fault of the job's code, as far as anybody knows, and the job has
 * waited for that end: so it is tried again about a second later.  Where the attempt before it
 * ended in the same way, the job may be what kills its workers, and the backoff holds.
 */
create or replace function rota._sweep_one(job rota.jobs)
    returns void language plpgsql as $$
declare
    v_is_overdue constant boolean := coalesce(job.overdue_at <= rota.now(), false);
    v_policy constant jsonb := coalesce(job.backoff,
        (select q.backoff from rota.queues as q where q.queue = job.queue));
begin
    perform rota._fail_running(
        array[job.id], array[job.lease_token],
        array[case
            when v_is_overdue
            then format('time limit: %s did not end the job within %s', job.locked_by,
                job.overdue_at - job.started_at)
            else format(
                'lease expired: %s neither finished the job nor sent a heartbeat before %s',
                job.locked_by, job.locked_until)
        end],
        array[case when v_is_overdue then 'time_limit' else 'lease_expired' end],
        array[null::text],
        array[case when not v_is_overdue
                and job.error_type is distinct from 'lease_expired' then least(
            rota._backoff(coalesce(v_policy, '{}') || '{"kind": "fixed", "base_seconds": 1}',
                1),
            rota._backoff(v_policy, job.attempts))
        end],
        array[false]);
end;
$$;
