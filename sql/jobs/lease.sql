/*
 * jobs/lease.sql -- keep a claimed job alive, and say how far it is.
 *
 * A claim is a lease: the worker owns the job until jobs.locked_until, and
 * sweep_stale_leases() takes back whatever runs past it.  A handler that needs longer moves
 * the deadline with a heartbeat, every quarter to half a lease.
 *
 * The lease token is the fence.  Every claim draws a new one and it never goes back, so a
 * worker that was given up for dead and wakes up late matches no row: it is told to stop, and
 * cannot take the job back from its new owner.
 *
 * The heartbeat is also how a worker learns that an operator wants the job cancelled, or that
 * the attempt has taken longer than the job's time limit.  No lease lasts more than 30 seconds
 * beyond that limit, in which a worker stops the handler: so a handler that hangs loses its
 * job.
 */

create or replace function rota.heartbeat(
    job_id bigint, lease_token bigint, lease interval default null
) returns table (locked_until timestamptz, is_cancel_requested boolean, is_overdue boolean)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_now timestamptz; v_lease interval;
begin
    perform rota._check_job_ref(job_id, lease_token);
    perform rota._check_interval('lease', lease, may_be_null => true);
    v_lease := rota._exact(lease);

    -- The lease begins after the wait for the row's lock.
    perform rota._lock_lease(job_id, lease_token);
    v_now := rota.now();
    return query
    update rota.jobs as j
    set locked_until = least(j.overdue_at + interval '30 s', v_now + greatest('1 ms', least(
            '30 days', coalesce(v_lease, j.lease, rota._queue_lease(j.queue))))),
        updated_at = v_now
    where j.id = heartbeat.job_id
      and j.lease_token = heartbeat.lease_token and j.status = 'running'
    returning j.locked_until, j.cancel_requested_at is not null,
        coalesce(j.overdue_at <= v_now, false);
    if not found then perform rota._raise_lost(job_id, lease_token); end if;
end $$;

comment on function rota.heartbeat is
    'Extend the lease of a running job, by the argument, else by the setting of the job, else '
    'of its queue, and return whether a cancel was requested and whether it is over its time '
    'limit, beyond which no lease extends by more than 30 seconds; raises RT002 if the lease '
    'is lost, RT001, RT003, 22023.';

create or replace function rota.heartbeat_jobs(
    job_ids bigint[], lease_tokens bigint[], lease interval default null
) returns table (
        job_id bigint, locked_until timestamptz, is_lost boolean, is_cancel_requested boolean,
        is_overdue boolean
    ) language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off as $$
declare
    v_lease interval; v_ids bigint[];
begin
    perform rota._check_job_refs(job_ids, lease_tokens);
    perform rota._check_interval('lease', lease, may_be_null => true);
    v_lease := rota._exact(lease);
    v_ids := rota._hold_jobs(rota._newest_refs(job_ids, lease_tokens), lease_tokens);
    return query select t.job_id, b.locked_until,
        b.job_id is null and not rota._is_running(t.job_id, t.lease_token),
        coalesce(b.is_cancel_requested, false), coalesce(b.is_overdue, false)
    from unnest(heartbeat_jobs.job_ids, heartbeat_jobs.lease_tokens)
        with ordinality as t (job_id, lease_token, ordinal)
    left join rota._extend_leases(v_ids, heartbeat_jobs.lease_tokens, v_lease) as b
        on b.job_id = t.job_id and b.lease_token = t.lease_token
    order by t.ordinal;
end $$;

comment on function rota.heartbeat_jobs is
    'heartbeat() for up to 1000 jobs, one row for each in the order given: is_lost where the '
    'lease is lost, locked_until null where another session has the row locked just now, or a '
    'trigger refuses it; raises 22023 for a bad argument.';

/* Extend the leases of jobs that the caller has locked; one row for each.  One that a trigger
 * or a constraint of the database refuses has none, and costs the others nothing: where all
 * together fail they are extended in halves, and so on. */
create or replace function rota._extend_leases(
    job_ids bigint[], lease_tokens bigint[], lease interval
) returns table (
        job_id bigint, lease_token bigint, locked_until timestamptz,
        is_cancel_requested boolean, is_overdue boolean
    ) language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    c_half constant integer := cardinality(job_ids) / 2;
begin
    begin
        return query
        with beaten as (
            update rota.jobs as j
            -- A lease written by hand must not stop those of the other jobs.
            set locked_until = least(j.overdue_at + interval '30 s', v_now + greatest('1 ms',
                    least('30 days', coalesce(_extend_leases.lease, j.lease,
                        rota._queue_lease(j.queue))))),
                updated_at = v_now
            where j.id = any(_extend_leases.job_ids) and j.lease_token
                = _extend_leases.lease_tokens[array_position(_extend_leases.job_ids, j.id)]
              and j.status = 'running'
            returning j.id, j.lease_token, j.locked_until,
                j.cancel_requested_at is not null as is_cancel_requested,
                coalesce(j.overdue_at <= v_now, false) as is_overdue
        )
        -- In an order, so that none is told before all are written.
        select b.* from beaten as b order by b.id;
        return;
    exception when others then
        if rota._is_no_fault_of_a_row(sqlstate) then raise; end if;
        if c_half = 0 then
            raise warning 'heartbeat of job % failed: %', job_ids[1], sqlerrm;
            return;
        end if;
    end;
    return query select e.*
    from (
        values (_extend_leases.job_ids[:c_half], _extend_leases.lease_tokens[:c_half]),
            (_extend_leases.job_ids[c_half + 1:], _extend_leases.lease_tokens[c_half + 1:])
    ) as h (job_ids, lease_tokens)
    cross join lateral rota._extend_leases(h.job_ids, h.lease_tokens, lease) as e;
end $$;

/* The length of a lease where neither job nor caller says one. */
create or replace function rota._queue_lease(queue text)
    returns interval language plpgsql stable as $$
begin
    return coalesce((select q.lease from rota.queues as q where q.queue = _queue_lease.queue),
        '1 minute');
end $$;

create or replace function rota.set_progress(
    job_id bigint, lease_token bigint, percent double precision, message text default null
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
begin
    perform rota._check_job_ref(job_id, lease_token);
    if percent is null or not percent between 0 and 100 then
        perform rota._refuse('percent',
            format('must be 0 to 100, got %s', coalesce(percent::text, 'null')));
    end if;

    update rota.jobs as j
    set progress_percent = set_progress.percent,
        progress_message = rota._cut(set_progress.message, 1000), updated_at = rota.now()
    where j.id = set_progress.job_id
      and j.lease_token = set_progress.lease_token and j.status = 'running';
    if not found then perform rota._raise_lost(job_id, lease_token); end if;
end $$;

comment on function rota.set_progress is
    'Record how far a running job is, in percent and in words (cut to 1000 characters); raises '
    'RT002 if the lease is lost, RT001, RT003, 22023.';
