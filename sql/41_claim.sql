/*
 * 41_claim.sql -- give jobs to a worker.
 *
 * A claim locks due rows with `for update skip locked`, so that two workers never wait for
 * each other and never get the same job, and marks them running in the same transaction.  The
 * attempt is counted here and not when a failure is reported: a job that kills its worker
 * reports nothing, and must still come to its end.
 *
 * The order is priority, run_at, id.  The index jobs_ready_idx is a set of lanes, one for each
 * (queue, priority), each in order of run_at.  A claim walks the priorities from the lowest
 * number up, and within one takes only the due beginning of each lane.  So a million jobs for
 * next month in front of a lane cost nothing: it never looks behind the first that is not due.
 *
 * The lease token is the clock in microseconds, or one more than the job's last token if that
 * is greater.  So it grows with every claim of the job, also when the clock steps back, and a
 * database restored from an old dump does not hand out a token for the second time.
 *
 * The planner is told to stay on the indexes: this statement is planned once per session, often
 * on an empty table, and has to be right a million jobs later.
 */

create or replace function rota.claim_jobs(
    worker text,
    queues text[] default '{default}',
    max_jobs integer default 1,
    lease interval default null,
    job_types text[] default null
)
    returns table (
        job_id bigint,
        lease_token bigint,
        queue text,
        job_type text,
        payload jsonb,
        priority smallint,
        attempt integer,
        max_attempts integer,
        run_at timestamptz,
        locked_until timestamptz,
        locked_for interval,
        idempotency_key text,
        created_at timestamptz,
        pipeline text,
        stage text,
        stage_input jsonb,
        definition text,
        scheduled_for timestamptz
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
    set enable_sort = off
as $$
declare
    v_now constant timestamptz := rota.now();
    v_lease interval;
    v_ids bigint[];
    v_limited_ids bigint[];
begin
    perform rota._check_claim(
        claim_jobs.worker, claim_jobs.queues, claim_jobs.max_jobs, claim_jobs.lease,
        claim_jobs.job_types);
    v_lease := case when claim_jobs.lease is not null then rota._exact(claim_jobs.lease) end;
    select d.ids, d.limited_ids into v_ids, v_limited_ids
    from rota._lock_due(
        claim_jobs.queues, claim_jobs.max_jobs, claim_jobs.job_types, v_now) as d;
    return query
    with claimed as (
        update rota.jobs as j
        set status = 'running',
            attempts = j.attempts + 1,
            lease_token = greatest(
                j.lease_token + 1, (extract(epoch from v_now) * 1000000)::bigint),
            locked_by = claim_jobs.worker,
            locked_until = v_now + coalesce(
                j.lease, v_lease,
                (select q.lease from rota.queues as q where q.queue = j.queue), '1 minute'),
            is_limited = j.id = any(v_limited_ids),
            progress_percent = null,
            progress_message = null,
            started_at = v_now,
            updated_at = v_now
        where j.id = any(v_ids)
        returning
            j.id, j.lease_token, j.queue, j.job_type, j.payload, j.priority, j.attempts,
            j.max_attempts, j.run_at, j.locked_until, j.idempotency_key, j.created_at,
            j.pipeline, j.stage, j.stage_input, j.definition, j.scheduled_for
    )
    select
        c.id, c.lease_token, c.queue, c.job_type, c.payload, c.priority, c.attempts,
        c.max_attempts, c.run_at, c.locked_until, c.locked_until - v_now, c.idempotency_key,
        c.created_at, c.pipeline, c.stage, c.stage_input, c.definition, c.scheduled_for
    from claimed as c
    order by c.priority, c.run_at, c.id;
end;
$$;

comment on function rota.claim_jobs(text, text[], integer, interval, text[]) is
    'Lease up to max_jobs due jobs of these queues to a worker, by priority, run_at and id; '
    'a lease lasts as the job says, else the argument, else the queue; raises 22023 or RT009.';

/*
 * Lock due jobs, and say which of them count for a limit.  Where nothing is limited and no key
 * waits for its turn, walk the lanes from the lowest priority number up until it is enough.
 */
create or replace function rota._lock_due(
    queues text[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns table (ids bigint[], limited_ids bigint[])
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_queues text[];
    v_has_notes boolean;
    v_has_limits boolean;
    v_is_shared boolean;
    v_priority integer := -32769;
begin
    -- One statement, because each costs as much as a job that is claimed.
    select
        coalesce(array_agg(distinct c.queue) filter (where q.is_paused is not true), '{}'),
        count(q.ageing) > 0 or exists (
            select
            from rota.buckets as b
            where b.queue = any(_lock_due.queues)
              and b.waits_for is null
        ),
        exists (select from rota.limits),
        exists (select from rota.rechecks as r where r.due_at <= _lock_due.due)
    into v_queues, v_is_shared, v_has_limits, v_has_notes
    from unnest(_lock_due.queues) as c (queue)
    left join rota.queues as q on q.queue = c.queue;
    if v_has_notes then
        perform rota._recheck(_lock_due.max_jobs + 20);
    end if;
    ids := '{}';
    limited_ids := '{}';
    if v_is_shared or v_has_notes or v_has_limits then
        select s.ids, s.open_queues
        into ids, v_queues
        from rota._lock_shared(
            v_queues, _lock_due.max_jobs, _lock_due.job_types, _lock_due.due) as s;
    end if;

    while cardinality(ids) < _lock_due.max_jobs loop
        select min(l.priority)
        into v_priority
        from unnest(v_queues) as c (queue)
        cross join lateral (
            select j.priority::integer
            from rota.jobs as j
            where j.queue = c.queue
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.priority > v_priority
            order by j.priority
            limit 1
        ) as l;
        exit when v_priority is null;

        if cardinality(v_queues) = 1 then
            ids := ids || rota._lock_lane(
                v_queues[1], v_priority, _lock_due.max_jobs - cardinality(ids),
                _lock_due.job_types, _lock_due.due);
        else
            ids := ids || rota._lock_lanes(
                v_queues, v_priority, _lock_due.max_jobs - cardinality(ids),
                _lock_due.job_types, _lock_due.due);
        end if;
    end loop;

    if v_has_limits then
        select l.kept_ids, l.limited_ids
        into ids, limited_ids
        from rota._apply_limits(ids) as l;
    end if;
    return next;
end;
$$;

/* Lock the first due jobs of one lane that nobody else holds. */
create or replace function rota._lock_lane(
    queue text,
    priority integer,
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return array(
        select j.id
        from rota.jobs as j
        where j.queue = _lock_lane.queue
          and j.priority = _lock_lane.priority
          and j.bucket is null
          and j.status in ('queued', 'failed')
          and j.run_at <= _lock_lane.due
          and (_lock_lane.job_types is null or j.job_type = any(_lock_lane.job_types))
        order by j.run_at, j.id
        limit _lock_lane.max_jobs
        for update skip locked
    );
end;
$$;

/*
 * The same for several queues of one priority, in one order over all of them.  No index has
 * that order, and locking the head of each lane would take jobs that are then not claimed away
 * from other workers.  So the lanes are merged first and locked after, window by window until
 * there are enough.
 */
create or replace function rota._lock_lanes(
    queues text[],
    priority integer,
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_window constant integer := _lock_lanes.max_jobs + 20;
    -- A variable: with literals the planner may take jobs_ready_idx where the ids are known,
    -- and read the whole line of a priority to find them.
    c_waiting constant text[] := '{queued,failed}'::text[];
    v_after_run_at timestamptz := timestamptz '-infinity';
    v_after_id bigint := 0;
    v_candidates bigint[];
    v_ids bigint[] := '{}'::bigint[];
begin
    loop
        v_candidates := array(
            select m.id
            from unnest(_lock_lanes.queues) as c (queue)
            cross join lateral (
                select j.id, j.run_at
                from rota.jobs as j
                where j.queue = c.queue
                  and j.priority = _lock_lanes.priority
                  and j.bucket is null
                  and j.status in ('queued', 'failed')
                  and j.run_at <= _lock_lanes.due
                  and (j.run_at, j.id) > (v_after_run_at, v_after_id)
                  and (_lock_lanes.job_types is null or j.job_type = any(_lock_lanes.job_types))
                order by j.run_at, j.id
                limit v_window
            ) as m
            order by m.run_at, m.id
            limit v_window
        );
        v_ids := v_ids || array(
            select j.id
            from rota.jobs as j
            where j.id = any(v_candidates)
              and j.priority = _lock_lanes.priority
              and j.status = any(c_waiting)
              and j.run_at <= _lock_lanes.due
            order by j.run_at, j.id
            limit _lock_lanes.max_jobs - cardinality(v_ids)
            for update skip locked
        );
        exit when cardinality(v_ids) = _lock_lanes.max_jobs
          or cardinality(v_candidates) < v_window;

        v_after_id := v_candidates[v_window];
        select j.run_at into v_after_run_at from rota.jobs as j where j.id = v_after_id;
        exit when not found;
    end loop;

    return v_ids;
end;
$$;

create or replace function rota._check_claim(
    worker text,
    queues text[],
    max_jobs integer,
    lease interval,
    job_types text[]
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_text('worker', _check_claim.worker, 255);
    if _check_claim.max_jobs is null or _check_claim.max_jobs not between 1 and 1000 then
        perform rota._refuse('max_jobs', format('must be 1 to 1000, got %s',
            coalesce(_check_claim.max_jobs::text, 'null')));
    end if;
    perform rota._check_names('queues', _check_claim.queues);
    if _check_claim.lease is not null then
        perform rota._check_lease('lease', _check_claim.lease);
    end if;
    if _check_claim.job_types is not null then
        perform rota._check_names('job_types', _check_claim.job_types);
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using
            errcode = 'RT009',
            message = format('claim_jobs needs the isolation level read committed, not %s',
                current_setting('transaction_isolation')),
            hint = 'Begin the transaction with "isolation level read committed"; at a higher '
                'level every second claim would fail.';
    end if;
end;
$$;
