/*
 * jobs/keys.sql -- what an idempotency key can do beyond being unique.
 *
 * Promises.  A key has at most one live job.  With unique_for it makes no new job for that
 * time, whatever became of the last one.  With on_conflict replace, the job that waits takes
 * the new payload, time and priority.  With rerun, so it does too, and if the job is running,
 * exactly one more run follows it, with the newest payload, and the two never overlap; an
 * update that is not newer than the last one seen is ignored.
 *
 * Held by two unique rows.  jobs_idempotency_key_idx is the key's live job.  The row of
 * idempotency_keys is the memory of a key that outlives its job: until when it is unique, and
 * which version was seen last.  Both are locked in this order, the job first, and many keys in
 * their order.  No subtransaction is opened and closed in between: who waits for a lock that
 * it took would wait for the whole transaction, also after the lock was given back.
 *
 * The rerun of a running job waits in the job's own row, so whoever ends the job finds it there
 * under the row's lock: nothing can come between.  _end_jobs() makes a new job of it in the
 * statement that ends the old one.
 *
 * A batch waits for a job that somebody else has locked only while it holds nothing itself,
 * since finish_jobs() and the like lock jobs in the order of their ids.
 */

/* A new row of jobs with its defaults; the id comes with the insert, the checks before. */
create or replace function rota._new_job(
    job_type text,
    payload jsonb,
    queue text,
    run_at timestamptz,
    delay interval,
    priority integer,
    max_attempts integer,
    lease interval,
    backoff jsonb,
    idempotency_key text,
    ordering_key text,
    skip_dead boolean,
    after bigint[],
    if_parent_dead text,
    limit_key text
)
    returns rota.jobs
    language plpgsql
    stable
as $$
declare
    v_now constant timestamptz := rota.now();
begin
    return jsonb_populate_record(null::rota.jobs, jsonb_build_object(
        'job_type', _new_job.job_type,
        'payload', _new_job.payload,
        'queue', _new_job.queue,
        'created_at', v_now,
        'run_at', coalesce(_new_job.run_at, v_now + rota._exact(_new_job.delay), v_now),
        'priority', _new_job.priority,
        'max_attempts', coalesce(
            _new_job.max_attempts,
            (select q.max_attempts from rota.queues as q where q.queue = _new_job.queue),
            10),
        'lease', rota._exact(_new_job.lease),
        'backoff', _new_job.backoff,
        'idempotency_key', _new_job.idempotency_key,
        'ordering_key', _new_job.ordering_key,
        'skip_dead', case when _new_job.ordering_key is not null then _new_job.skip_dead end,
        'if_parent_dead', case
            when _new_job.ordering_key is not null or _new_job.after is not null
            then _new_job.if_parent_dead
        end,
        'limit_key', _new_job.limit_key,
        'status', case
            when _new_job.ordering_key is null and _new_job.after is null then 'queued'
            else 'blocked'
        end));
end;
$$;

/* enqueue() for a job with a rule for its key, or with something that it waits for. */
create or replace function rota._enqueue_special(
    job rota.jobs,
    unique_for interval,
    on_conflict text,
    updated_at timestamptz,
    max_wait interval,
    has_time boolean,
    after bigint[],
    before bigint
)
    returns bigint
    language plpgsql
as $$
declare
    v_job_id bigint;
    v_is_new boolean;
begin
    perform rota._check_key_rule(
        '', job.idempotency_key, _enqueue_special.unique_for, _enqueue_special.on_conflict,
        _enqueue_special.updated_at, _enqueue_special.max_wait);
    perform rota._check_before(
        '', _enqueue_special.after, _enqueue_special.before, job.ordering_key);
    perform rota._check_queues('producer', array[job.queue]);

    select k.job_id, k.is_new
    into v_job_id, v_is_new
    from rota._enqueue_keyed(
        job, _enqueue_special.unique_for, _enqueue_special.on_conflict,
        _enqueue_special.updated_at, _enqueue_special.max_wait, _enqueue_special.has_time,
        true, '') as k;
    if not v_is_new and _enqueue_special.on_conflict <> 'keep' then
        perform rota._check_queues_of_jobs(array[v_job_id]);
    end if;
    perform rota._link_job(
        v_job_id, v_is_new, _enqueue_special.after, _enqueue_special.before);
    perform rota._notify_for(array[v_job_id]);
    return v_job_id;
end;
$$;

/*
 * Find or insert the one job of a key, then ask the memory of the key, then change the job;
 * *prefix* says which of many it is.
 */
create or replace function rota._enqueue_keyed(
    job rota.jobs,
    unique_for interval,
    on_conflict text,
    updated_at timestamptz,
    max_wait interval,
    has_time boolean,
    may_wait boolean,
    prefix text
)
    returns table (job_id bigint, is_new boolean)
    language plpgsql
as $$
declare
    v_is_versioned constant boolean :=
        _enqueue_keyed.unique_for is not null or _enqueue_keyed.updated_at is not null;
begin
    loop
        if v_is_versioned or _enqueue_keyed.on_conflict <> 'keep' then
            job_id := rota._lock_keyed(job.idempotency_key, _enqueue_keyed.may_wait);
            is_new := false;
            exit when job_id is not null;
        end if;
        job_id := rota._insert_job(job);
        is_new := true;
        exit when job_id is not null;
        if not v_is_versioned and _enqueue_keyed.on_conflict = 'keep' then
            select j.id
            into job_id
            from rota.jobs as j
            where j.idempotency_key = job.idempotency_key;
            is_new := false;
            exit when found;
        end if;
    end loop;

    if v_is_versioned and not rota._hold_key(
        job.idempotency_key, job_id, _enqueue_keyed.unique_for, _enqueue_keyed.updated_at) then
        if is_new then
            -- The key is still unique, or has seen this version: as if we had not come.
            delete from rota.jobs as j where j.id = _enqueue_keyed.job_id and j.lease_token = 0;
            is_new := false;
            select k.job_id
            into job_id
            from rota.idempotency_keys as k
            where k.idempotency_key = job.idempotency_key;
        end if;
    elsif not is_new and _enqueue_keyed.on_conflict <> 'keep' then
        perform rota._update_keyed(
            job_id, job, _enqueue_keyed.on_conflict = 'rerun', _enqueue_keyed.max_wait,
            _enqueue_keyed.has_time, _enqueue_keyed.prefix);
    end if;
    return next;
end;
$$;

/*
 * Lock the live job of a key; null if there is none.  Raises RTB00, which nobody sees, where
 * somebody else has it locked and it may not wait.
 */
create or replace function rota._lock_keyed(idempotency_key text, may_wait boolean)
    returns bigint
    language plpgsql
as $$
declare
    v_job_id bigint;
begin
    if _lock_keyed.may_wait then
        select j.id
        into v_job_id
        from rota.jobs as j
        where j.idempotency_key = _lock_keyed.idempotency_key
        for update;
        return v_job_id;
    end if;

    select j.id
    into v_job_id
    from rota.jobs as j
    where j.idempotency_key = _lock_keyed.idempotency_key
    for update skip locked;
    if not found and exists (
        select from rota.jobs as j where j.idempotency_key = _lock_keyed.idempotency_key
    ) then
        raise exception using errcode = 'RTB00', message = _lock_keyed.idempotency_key;
    end if;
    return v_job_id;
end;
$$;

/* Take the key for a new event; false if it is still unique, or has seen this version. */
create or replace function rota._hold_key(
    idempotency_key text,
    job_id bigint,
    unique_for interval,
    updated_at timestamptz
)
    returns boolean
    language plpgsql
as $$
declare
    v_now constant timestamptz := rota.now();
    v_unique_until constant timestamptz := v_now + rota._exact(_hold_key.unique_for);
begin
    insert into rota.idempotency_keys as k (
        idempotency_key, job_id, unique_until, source_updated_at, expires_at
    )
    values (
        _hold_key.idempotency_key, _hold_key.job_id, v_unique_until, _hold_key.updated_at,
        coalesce(v_unique_until, v_now + interval '90 days')
    )
    on conflict on constraint idempotency_keys_pkey do update
    set job_id = excluded.job_id,
        unique_until = coalesce(excluded.unique_until, k.unique_until),
        source_updated_at = coalesce(excluded.source_updated_at, k.source_updated_at),
        expires_at = greatest(excluded.expires_at, k.expires_at)
    where (excluded.unique_until is null or coalesce(k.unique_until, '-infinity') <= v_now)
      and (
        excluded.source_updated_at is null
        or coalesce(k.source_updated_at, '-infinity') < excluded.source_updated_at
      );
    return found;
end;
$$;

/* Null if its key has a live job. */
create or replace function rota._insert_job(job rota.jobs)
    returns bigint
    language plpgsql
as $$
declare
    v_new_id constant bigint := nextval('rota.jobs_id_seq');
    v_job_id bigint;
begin
    insert into rota.jobs as j (
        id, queue, job_type, payload, priority, max_attempts, lease, backoff,
        idempotency_key, ordering_key, skip_dead, if_parent_dead, limit_key, pipeline, stage,
        stage_input, stage_queued_at, status, run_at, created_at, updated_at
    )
    overriding system value
    values (
        v_new_id, job.queue, job.job_type, job.payload, job.priority, job.max_attempts,
        job.lease, job.backoff, job.idempotency_key, job.ordering_key, job.skip_dead,
        job.if_parent_dead, job.limit_key,
        job.pipeline, job.stage, job.stage_input,
        case when job.pipeline is not null then job.created_at end,
        job.status, job.run_at, job.created_at, job.created_at
    )
    on conflict do nothing
    returning j.id into v_job_id;
    if found then
        perform rota._enter_lanes(array[v_job_id]);
    end if;
    return v_job_id;
end;
$$;

/*
 * Give the job of the key, which the caller has locked, what is new, or note it as the run that
 * follows this one.  A failed job has all its attempts for it, and keeps its backoff unless a
 * time was given.
 */
create or replace function rota._update_keyed(
    job_id bigint,
    job rota.jobs,
    is_rerun boolean,
    max_wait interval,
    has_time boolean,
    prefix text
)
    returns void
    language plpgsql
as $$
begin
    update rota.jobs as j
    set payload = case when j.status = 'running' then j.payload else job.payload end,
        priority = case when j.status = 'running' then j.priority else job.priority end,
        run_at = case
            when j.status = 'running' then j.run_at
            when j.status = 'failed' and not _update_keyed.has_time then j.run_at
            else least(job.run_at, j.created_at + rota._exact(_update_keyed.max_wait))
        end,
        rerun_payload = case when j.status = 'running' then job.payload end,
        rerun_run_at = case when j.status = 'running' then job.run_at end,
        rerun_priority = case when j.status = 'running' then job.priority end,
        attempts = case when j.status = 'running' then j.attempts else 0 end,
        updated_at = case when j.status = 'running' then j.updated_at else job.created_at end
    where j.id = _update_keyed.job_id
      and (j.status <> 'running' or _update_keyed.is_rerun)
      and j.pipeline is null;
    if not found and exists (
        select
        from rota.jobs as j
        where j.id = _update_keyed.job_id
          and j.pipeline is not null
    ) then
        perform rota._refuse(_update_keyed.prefix || 'on_conflict', format(
            'must be keep, because a pipeline runs under the idempotency key %L',
            job.idempotency_key));
    end if;
    perform rota._enter_lanes(array[_update_keyed.job_id]);
end;
$$;

/* Wait until nobody has the live job of a key locked, and let go of it again. */
create or replace function rota._wait_for_key(idempotency_key text)
    returns void
    language plpgsql
as $$
begin
    perform
    from rota.jobs as j
    where j.idempotency_key = _wait_for_key.idempotency_key
    for update;
    raise no_data_found;
exception
    when no_data_found then
        null;
end;
$$;

/* enqueue_many() for a batch with rules for its keys. */
create or replace function rota._enqueue_many_keyed(jobs jsonb)
    returns table (ordinal integer, job_id bigint, is_new boolean)
    language plpgsql
as $$
declare
    v_ids bigint[];
    v_news boolean[];
    v_is_done boolean := false;
    v_new record;
begin
    while not v_is_done loop
        begin
            for v_new in
                select n.*, k.job_id, k.is_new
                from (
                    select m.*
                    from rota._new_jobs(_enqueue_many_keyed.jobs) as m
                    order by m.idempotency_key, m.ordinal
                ) as n
                cross join lateral rota._enqueue_keyed(
                    rota._new_job(
                        n.job_type, n.payload, n.queue, n.run_at, n.delay, n.priority,
                        n.max_attempts, n.lease, n.backoff, n.idempotency_key, n.ordering_key,
                        n.skip_dead, n.after, n.if_parent_dead, n.limit_key),
                    n.unique_for, n.on_conflict, n.updated_at, n.max_wait,
                    n.run_at is not null or n.delay is not null, false,
                    format('jobs[%s].', n.ordinal)) as k
            loop
                v_ids[v_new.ordinal] := v_new.job_id;
                v_news[v_new.ordinal] := v_new.is_new;
            end loop;
            v_is_done := true;
        exception
            when sqlstate 'RTB00' then
                perform rota._wait_for_key(sqlerrm);
        end;
    end loop;

    -- A key is one in all queues, so it may have found a job of any.
    perform rota._check_queues_of_jobs(array(
        select v_ids[n.ordinal]
        from rota._new_jobs(_enqueue_many_keyed.jobs) as n
        where n.on_conflict <> 'keep'
          and not v_news[n.ordinal]
    ));
    return query
    select o.ordinal, v_ids[o.ordinal], v_news[o.ordinal]
    from generate_series(1, cardinality(v_ids)) as o (ordinal);
end;
$$;

create or replace function rota._check_key_rule(
    prefix text,
    idempotency_key text,
    unique_for interval,
    on_conflict text,
    updated_at timestamptz,
    max_wait interval
)
    returns void
    language plpgsql
as $$
declare
    v_is_plain constant boolean := _check_key_rule.on_conflict is not distinct from 'keep'
        and _check_key_rule.unique_for is null and _check_key_rule.updated_at is null
        and _check_key_rule.max_wait is null;
begin
    if v_is_plain then
        return;
    elsif _check_key_rule.on_conflict is null
      or _check_key_rule.on_conflict not in ('keep', 'replace', 'rerun') then
        perform rota._refuse(_check_key_rule.prefix || 'on_conflict', format(
            'must be keep, replace or rerun, got %L', left(_check_key_rule.on_conflict, 80)));
    elsif _check_key_rule.idempotency_key is null then
        perform rota._refuse(_check_key_rule.prefix || 'idempotency_key',
            'is needed for on_conflict, unique_for, updated_at and max_wait');
    end if;
    if _check_key_rule.unique_for is not null then
        perform rota._check_interval(_check_key_rule.prefix || 'unique_for',
            _check_key_rule.unique_for, '1 millisecond', '100 years');
        if _check_key_rule.on_conflict <> 'keep' then
            perform rota._refuse(
                _check_key_rule.prefix || 'unique_for', 'goes with on_conflict keep only');
        end if;
    end if;
    if _check_key_rule.updated_at is not null then
        perform rota._check_run_at(
            _check_key_rule.prefix || 'updated_at', _check_key_rule.updated_at);
        if _check_key_rule.on_conflict <> 'rerun' then
            perform rota._refuse(
                _check_key_rule.prefix || 'updated_at', 'goes with on_conflict rerun only');
        end if;
    end if;
    if _check_key_rule.max_wait is not null then
        perform rota._check_interval(_check_key_rule.prefix || 'max_wait',
            _check_key_rule.max_wait, '0', '100 years');
        if _check_key_rule.on_conflict = 'keep' then
            perform rota._refuse(_check_key_rule.prefix || 'max_wait',
                'goes with on_conflict replace or rerun only');
        end if;
    end if;
end;
$$;
