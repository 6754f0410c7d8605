/*
 * jobs/insert.sql -- new jobs as rows, and the statement that writes them.
 *
 * A caller that makes jobs passes them as rows of jobs: a batch of enqueue_many(), a job with a
 * key, the run that follows another, a job that comes back from the history, the jobs of
 * schedules and pipelines.  What a new job has is the list of columns in _insert_jobs() and
 * stands there alone; all else of a row, as what its last attempt left, is not taken over.  A
 * single enqueue() and a batch of plain jobs have inserts of their own: as rows they would take
 * 1.4 to 1.7 times, and 1.3 times, the CPU.
 *
 * A caller passes jobs with keys in the order of the keys, so that two calls that share some
 * wait for each other in one direction only.
 */

/* Insert what a caller enqueues or retries.  One with a key is refused while its queue is still
 * coming here; what a schedule or a job here makes by itself has nothing to come before it. */
create or replace function rota._insert_requested(new_jobs rota.jobs[], new_ids bigint[])
    returns bigint[] language plpgsql as $$
declare
    v_ids bigint[];
begin
    if exists (select from rota.queue_moves) then
        perform rota._check_arrived(n.queue, coalesce(n.ordering_key, n.idempotency_key))
        from unnest(_insert_requested.new_jobs) as n;
    end if;
    v_ids := rota._insert_jobs(new_jobs, new_ids);
    if cardinality(v_ids) < cardinality(new_ids) and exists (
        select _insert_requested.new_ids[n.ordinality]
        from unnest(_insert_requested.new_jobs) with ordinality as n
        where n.idempotency_key is null
        except select unnest(v_ids)
    ) then
        perform rota._raise_swallowed('one of the jobs');
    end if;
    return v_ids;
end $$;

/* For a job that did not go in, though no other has its key. */
create or replace function rota._raise_swallowed(job text)
    returns void language plpgsql as $$
begin
    raise exception using errcode = 'triggered_action_exception',
        message = format('a trigger of this database refused %s', job);
end $$;

/* Insert new jobs with these ids, and put those that need not wait for others into their lanes;
 * returns the ids of those that went in, which are not those whose key has a live job.
 *
 * An insert waits for a transaction that has changed the live job of its key, such as an open
 * claim.  So each key is looked up first. */
create or replace function rota._insert_jobs(new_jobs rota.jobs[], new_ids bigint[])
    returns bigint[] language plpgsql set enable_seqscan = off as $$
declare
    v_now constant timestamptz := rota.now();
    c_shows_live constant boolean
        := current_setting('transaction_isolation') = 'read committed';
    v_have_settings boolean := false;
    v_need_places boolean := false;
    v_have_keys boolean; v_are_placed boolean; v_ids bigint[]; v_have_limit_keys boolean;
begin
    if exists (select from rota.configured_names) then
        select coalesce(bool_or(c.source in ('queues', 'job_types')), false),
            coalesce(bool_or(rota._gives_place(c.source, c.name, k.queue) or exists (
                select from rota.queues as q where q.queue = k.queue and q.ageing is not null
            )), false), max(k.keys) > 0
        into v_have_settings, v_need_places, v_have_keys
        from (
            select coalesce(n.queue, 'default') as queue, n.job_type,
                count(n.idempotency_key) as keys
            from unnest(_insert_jobs.new_jobs) as n group by 1, 2
        ) as k
        left join rota.configured_names as c
            on c.name = any(array[k.queue, 'type ' || k.job_type]);
    end if;
    -- One that is found by its key, and does not go in, must not take the place of another.
    v_are_placed := v_need_places and not v_have_keys;
    if v_are_placed then new_jobs := rota._give_places(new_jobs, new_ids, v_now); end if;
    with added as (
        insert into rota.jobs as j (id, queue, job_type, payload, priority, max_attempts, lease,
            time_limit, expires_at, headers, backoff, idempotency_key, ordering_key, skip_dead,
            if_parent_dead, limit_key, pipeline, stage, stage_input, stage_queued_at,
            definition, scheduled_for, status, run_at, own_lane, own_place, hold, lease_token,
            last_error, error_type, failed_at, created_at, updated_at)
        overriding system value
        select _insert_jobs.new_ids[n.ordinality], coalesce(n.queue, 'default'), n.job_type,
            coalesce(n.payload, '{}'), coalesce(n.priority, 0::smallint),
            coalesce(n.max_attempts, case when v_have_settings then (
                select q.max_attempts from rota.queues as q
                where q.queue = coalesce(n.queue, 'default')
            ) end, 10),
            case when n.lease is not null then rota._exact(n.lease) end,
            case
                when n.time_limit is not null then rota._exact(n.time_limit)
                when v_have_settings and not v.is_back then (
                    select t.time_limit from rota.job_types as t where t.job_type = n.job_type)
            end,
            case
                when n.expires_at is not null then n.expires_at
                -- A run ends with its last stage, which is of another type.
                when v_have_settings and not v.is_back and n.pipeline is null
                    then rota._default_expiry(n.job_type, coalesce(n.queue, 'default'),
                        coalesce(n.run_at, v_now))
            end,
            n.headers, n.backoff, n.idempotency_key, n.ordering_key,
            case when n.ordering_key is not null then coalesce(n.skip_dead, false) end,
            case when n.status = 'blocked' or n.status is null and n.ordering_key is not null
                then coalesce(n.if_parent_dead, 'cancel') end,
            n.limit_key, n.pipeline, n.stage, n.stage_input,
            case when n.pipeline is not null then v_now end, n.definition, n.scheduled_for,
            coalesce(n.status,
                case when n.ordering_key is null then 'queued' else 'blocked' end),
            coalesce(n.run_at, v_now), n.own_lane, n.own_place, n.hold,
            coalesce(n.lease_token, 0), n.last_error, n.error_type, n.failed_at,
            coalesce(n.created_at, v_now), v_now
        from unnest(_insert_jobs.new_jobs) with ordinality as n
        -- Whether it comes back from the history, with what it had.
        cross join lateral (
            select num_nonnulls(n.created_at, n.lease_token) = 2 as is_back) as v
        where n.idempotency_key is null or (
            select u.id from rota.jobs as u
            where c_shows_live and u.idempotency_key = n.idempotency_key
              and coalesce('pipeline ' || u.pipeline, u.job_type)
                = coalesce('pipeline ' || n.pipeline, n.job_type) limit 1
        ) is null
        on conflict (idempotency_key, coalesce('pipeline ' || pipeline, job_type))
            where idempotency_key is not null do nothing returning j.id, j.limit_key
    )
    select coalesce(array_agg(a.id), '{}'), count(a.limit_key) > 0
    into v_ids, v_have_limit_keys from added as a;
    if (v_need_places or v_have_limit_keys) and not v_are_placed then
        perform rota._enter_lanes(v_ids);
    end if;
    return v_ids;
end $$;

/* The live job of a key, also while it is locked; null if there is none.  Null too where an
 * older snapshot may show as live what has ended: there the insert has to find out.  To look
 * for the newest, as _find_keyed() does, would take a sixth more of an enqueue with a key. */
create or replace function rota._find_live(idempotency_key text, key_scope text)
    returns bigint language plpgsql stable set enable_seqscan = off as $$
declare
    v_job_id bigint;
begin
    if current_setting('transaction_isolation') = 'read committed' then
        select j.id into v_job_id from rota.jobs as j
        where j.idempotency_key = _find_live.idempotency_key
          and coalesce('pipeline ' || j.pipeline, j.job_type) = _find_live.key_scope;
    end if;
    return v_job_id;
end $$;

/* The live job of a key, after an insert that did not go in; null if it has ended meanwhile. */
create or replace function rota._find_keyed(idempotency_key text, key_scope text)
    returns bigint language plpgsql stable set enable_seqscan = off set jit = off as $$
begin
    return (
        -- The newest: an older snapshot may have the one that has ended, too.
        select max(j.id) from rota.jobs as j
        where j.idempotency_key = _find_keyed.idempotency_key
          and coalesce('pipeline ' || j.pipeline, j.job_type) = _find_keyed.key_scope
    );
end $$;

/* The ids of the jobs now there, null where the one that was found has ended just now. */
create or replace function rota._find_jobs(new_jobs rota.jobs[], new_ids bigint[])
    returns bigint[] language plpgsql stable as $$
begin
    return array(
        select case when n.idempotency_key is null then _find_jobs.new_ids[n.ordinality]
            -- Not a join, which a plan made on an empty table begins with all jobs that have a
            -- key.  The newest: an older snapshot may have the one that has ended, too.
            else (
                select max(k.id)
                from (
                    select j.id from rota.jobs as j
                    where j.idempotency_key = n.idempotency_key
                      and coalesce('pipeline ' || j.pipeline, j.job_type) = n.job_type
                    offset 0
                ) as k
            ) end
        from unnest(_find_jobs.new_jobs) with ordinality as n order by n.ordinality
    );
end $$;

/* Of the objects of a batch what is no column, or means more than one: the rest of a job. */
create or replace function rota._rules_of(jobs jsonb)
    returns table (
        ordinal bigint, delay interval, unique_for interval, on_conflict text,
        updated_at timestamptz, max_wait interval, depends_on bigint[], blocks bigint,
        expires_after interval
    ) language plpgsql stable as $$
begin
    return query
    select r.ordinal, r.delay, r.unique_for, coalesce(r.on_conflict, 'keep'), r.updated_at,
        r.max_wait, r.depends_on, r.blocks, r.expires_after
    from rows from (
        jsonb_to_recordset(_rules_of.jobs) as (delay interval, unique_for interval,
            on_conflict text, updated_at timestamptz, max_wait interval, depends_on bigint[],
            blocks bigint, expires_after interval)
    ) with ordinality as r (delay, unique_for, on_conflict, updated_at, max_wait, depends_on,
        blocks, expires_after, ordinal);
end $$;
