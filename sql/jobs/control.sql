/*
 * jobs/control.sql -- what an operator does to one job.
 *
 * Each of these locks the job's row first, so it happens wholly before or wholly after a
 * claim, a finish or a sweep of the same job, and says what it found.  A job that moves
 * between jobs and finished_jobs meanwhile is looked for again.
 *
 * The database cannot stop a worker from outside.  cancel_job() therefore ends a waiting job at
 * once, but of a running one it only asks; the worker learns of it at its next heartbeat, which
 * one that listens sends at once.
 */

create or replace function rota.retry_job(job_id bigint, force boolean default false)
    returns text language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_before record; v_status text;
begin
    perform rota._check_own_job(job_id);
    perform rota._check_given('force', force is not null);

    for v_round in 1..3 loop
        select j.status, j.attempts into v_before from rota.jobs as j
        where j.id = retry_job.job_id for update;
        if found then
            if v_before.status = 'running' and not force then
                perform rota._raise_running(job_id);
            end if;
            v_status := rota._requeue(job_id);
            exit;
        end if;
        select f.status, f.attempts into v_before from rota.finished_jobs as f
        where f.id = retry_job.job_id for update;
        if rota._restore_jobs(array[job_id]) <> '{}' then
            v_status := (select j.status from rota.jobs as j where j.id = retry_job.job_id);
            exit;
        end if;
        if v_round = 3 then perform rota._raise_not_found(job_id); end if;
    end loop;

    perform rota._audit('retry', null, array[job_id], to_jsonb(v_before),
        jsonb_build_object('status', v_status, 'force', force));
    return v_status;
end $$;

comment on function rota.retry_job is
    'Run a job again now and return queued, or blocked if it has to wait for others: a waiting '
    'one at once, an ended one with all its attempts, a running one only if forced (its worker '
    'loses the lease); raises RT001, RT007 if its idempotency_key is taken, RT008 if it is '
    'running, RT016 if its queue, or a job that it waits for, moves, 22023 if it was erased.';

/* A live job, back to the head of its lane, unless it keeps a time that it was planned for; its
 * worker has lost the lease. */
create or replace function rota._requeue(job_id bigint, keeps_run_at boolean default false)
    returns text language plpgsql as $$
declare
    v_held_limits text[]; v_status text;
begin
    select j.held_limits, j.status into v_held_limits, v_status from rota.jobs as j
    where j.id = _requeue.job_id;
    perform rota._notify_holders(array[job_id]) where v_status = 'running';
    perform rota._begin_rerun(array[job_id], keeps_run_at => true);
    update rota.jobs as j
    set status = case when j.status = 'blocked' then 'blocked' else 'queued' end,
        held_limits = null,
        run_at = case when keeps_run_at and j.status <> 'failed' then j.run_at
            else least(j.run_at, rota.now()) end,
        expires_at = case when j.expires_at > rota.now() then j.expires_at end,
        attempts = least(j.attempts, j.max_attempts - 1),
        lease_token = j.lease_token + (j.status = 'running')::integer, locked_by = null,
        locked_until = null, cancel_requested_at = null, cancel_reason = null,
        updated_at = rota.now()
    where j.id = _requeue.job_id returning j.status into v_status;
    perform rota._enter_lanes(array[job_id], v_held_limits);
    perform rota._notify_for(array[job_id]);
    -- What it waits for may have been deleted by hand, which nobody has told it.
    perform rota._add_checks('job', array[job_id::text]) where v_status = 'blocked';
    return v_status;
end $$;

/* Ended jobs, back to life with their ids and tokens; returns the ids of those that there were.
 * If one halted its ordering key, the first job of the key, mostly itself, becomes the head;
 * any other waits behind the head.  It waits again for those parents that have not succeeded,
 * and whatever becomes of them: an operator wants it to run.  In a pipeline it is the next time
 * in its stage, which needs a token of its own.  If it has expired it does so no more. */
create or replace function rota._restore_jobs(
    job_ids bigint[], keeps_run_at boolean default false
)
    returns bigint[] language plpgsql as $$
declare
    c_counted_until constant timestamptz := rota._counted_until();
    v_jobs jsonb; v_ids bigint[]; v_added bigint[]; v_blocked bigint[]; v_erased text;
begin
    with ended as (
        delete from rota.finished_jobs as f where f.id = any(_restore_jobs.job_ids)
        returning f.*,
            -- From the end of the index: the entries at the beginning are those of the dead.
            (
                select d.parent_id from rota.dependencies as d where d.job_id = f.id
                order by d.parent_id desc limit 1
            ) is not null as has_parents,
            case when f.locked_by is not null then
                rota._elapsed(greatest(f.run_at, f.created_at), f.started_at) end as waited,
            case when f.locked_by is not null
                then rota._elapsed(f.started_at, f.finished_at) end as ran
    ),
    uncounted as (
        insert into rota.restored_ends (queue, job_type, status, waited, ran, finished_at,
            ended_by)
        select e.queue, e.job_type, e.status, e.waited, e.ran, e.finished_at, e.ended_by
        from ended as e
        -- Stages are counted by stage_runs, which stay.
        where e.pipeline is null and e.finished_at > c_counted_until
    )
    select jsonb_agg(to_jsonb(e) - '{result,run_at}'::text[] || jsonb_build_object(
            'run_at', case when keeps_run_at and e.run_at > rota.now() then e.run_at end,
            'expires_at', case when e.expires_at > rota.now() then e.expires_at end,
            'lease_token', case when e.pipeline is null then e.lease_token
                else least(e.lease_token, 9223372036854775806) + 1 end,
            'if_parent_dead', case when e.has_parents then 'wait' end, 'status',
            case when e.ordering_key is null and not e.has_parents then 'queued'
                else 'blocked' end) order by e.idempotency_key, e.id),
        coalesce(array_agg(e.id order by e.idempotency_key, e.id), '{}'),
        coalesce(array_agg(e.id order by e.id)
            filter (where e.ordering_key is not null or e.has_parents), '{}')
    into v_jobs, v_ids, v_blocked from ended as e;
    if v_ids = '{}' then return v_ids; end if;
    select j.job ->> 'id' into v_erased from jsonb_array_elements(v_jobs) as j (job)
    where rota._payload_type(j.job -> 'payload') = 'erased' limit 1;
    if found then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'job_id ' || v_erased || ' was erased, and cannot run without a payload',
            hint = format('Retry it with another one: select * from rota.act_on_jobs('
                '''retry'', ''{"ids": [%s]}'', ''{"payload": {}}'')', v_erased);
    end if;
    v_added := rota._insert_requested(array(
        select jsonb_populate_record(null::rota.jobs, j.job)
        from jsonb_array_elements(v_jobs) with ordinality as j (job, ordinal) order by j.ordinal
    ), v_ids);
    if cardinality(v_added) < cardinality(v_ids) then
        perform rota._raise_taken(t.id, v_jobs -> (t.ordinal - 1)::integer)
        from unnest(v_ids) with ordinality as t (id, ordinal) where t.id <> all(v_added)
        order by t.ordinal limit 1;
    end if;

    if v_blocked <> '{}' then
        perform rota._jobs_came_in(v_blocked, may_have_halted => true);
    end if;
    perform rota._check_brought(v_ids);
    perform rota._notify_for(v_ids);
    return v_ids;
end $$;

/* What kind of a payload it is: as jsonb tells it, or erased. */
create or replace function rota._payload_type(payload jsonb)
    returns text language sql immutable as $$
select case when payload = '{"erased": true}' then 'erased' else jsonb_typeof(payload) end
$$;

/* Why an ended job cannot come back: a live one of its type, or pipeline, has its key. */
create or replace function rota._raise_taken(job_id bigint, job jsonb)
    returns void language plpgsql as $$
declare
    v_key constant text := job ->> 'idempotency_key';
    v_pipeline constant text := 'pipeline ' || (job ->> 'pipeline');
    v_scope constant text := coalesce(v_pipeline, job ->> 'job_type');
begin
    -- What was in the way a moment ago may have ended since.
    raise exception using errcode = 'RT007',
        message = format('job %s: idempotency_key %L of %s is taken by %s', job_id, v_key,
            coalesce(v_pipeline, 'job type ' || v_scope),
            coalesce('job ' || rota._find_keyed(v_key, v_scope)::text,
                'a job that has just ended')),
        hint = 'Wait for that job, or cancel it first.';
end $$;

create or replace function rota.cancel_job(job_id bigint, reason text default null)
    returns text language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off as $$
declare
    v_status text;
begin
    perform rota._check_own_job(job_id);

    for v_round in 1..3 loop
        select j.status into v_status from rota.jobs as j
        where j.id = cancel_job.job_id for update;
        if found then
            perform rota._audit('cancel', null, array[job_id],
                jsonb_build_object('status', v_status), jsonb_build_object('reason', reason));
            perform rota._cancel_jobs(array[job_id], reason);
            return case v_status when 'running' then 'running' else 'cancelled' end;
        end if;
        select f.status into v_status from rota.finished_jobs as f
        where f.id = cancel_job.job_id;
        exit when v_status = 'cancelled';
        if found or v_round = 3 then perform rota._raise_not_live(job_id); end if;
    end loop;

    return 'cancelled';
end $$;

comment on function rota.cancel_job is
    'Cancel a waiting job and return cancelled, or ask for the cancel of a running one and '
    'return running; raises RT001 if there is no such job, RT003 if it ended otherwise, '
    '22023.';

/* Cancel jobs, which the caller has locked: those that run are asked for it.  Those of the
 * caller that ends what has waited too long all wait, and tell that as their error. */
create or replace function rota._cancel_jobs(
    job_ids bigint[], reason text, have_expired boolean default false
) returns void language plpgsql set enable_seqscan = off set enable_bitmapscan = off as $$
begin
    update rota.jobs as j
    set cancel_requested_at = case
            when j.status = 'running' then coalesce(j.cancel_requested_at, rota.now()) end,
        cancel_reason = case when _cancel_jobs.have_expired
            then format('expired at %s', j.expires_at)
            else coalesce(rota._cut(_cancel_jobs.reason, 1000), j.cancel_reason) end,
        error_type = case when _cancel_jobs.have_expired then 'expired' else j.error_type end,
        updated_at = case when j.status = 'running' then j.updated_at else rota.now() end
    where j.id = any(_cancel_jobs.job_ids);
    perform rota._notify_holders(array_agg(j.id)) from rota.jobs as j
    where j.id = any(_cancel_jobs.job_ids) and j.status = 'running' having count(*) > 0;
    -- What was asked for before the cancel is cancelled with it, but has not expired with it.
    if not have_expired then perform from rota._take_reruns(_cancel_jobs.job_ids); end if;
    perform rota._end_jobs(s.ids, s.lease_tokens, s.status, 'cancelled')
    from (
        select j.status, array_agg(j.id order by j.id) as ids,
            array_agg(j.lease_token order by j.id) as lease_tokens
        from rota.jobs as j where j.id = any(_cancel_jobs.job_ids) and j.status <> 'running'
        group by j.status
    ) as s;
end $$;

create or replace function rota.set_priority(job_id bigint, priority integer)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_priority smallint;
begin
    perform rota._check_own_job(job_id);
    perform rota._check_priority('priority', priority);

    select j.priority into v_priority from rota.jobs as j where j.id = set_priority.job_id
    for no key update;
    if not found then perform rota._raise_not_live(job_id); end if;
    perform rota._change_jobs(array[job_id], priority => set_priority.priority);
    perform rota._audit('set_priority', null, array[job_id],
        jsonb_build_object('priority', v_priority), jsonb_build_object('priority', priority));
end $$;

comment on function rota.set_priority is
    'Change the priority of a live job; if it is running, that of its retries; raises RT001 if '
    'there is no such job, RT003 if it has ended, 22023.';

create or replace function rota.reschedule_job(
    job_id bigint, run_at timestamptz default null, delay interval default null
) returns timestamptz language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_status text; v_old_run_at timestamptz; v_run_at timestamptz;
begin
    perform rota._check_own_job(job_id);
    if (run_at is null) = (delay is null) then
        perform rota._refuse('run_at', 'or delay must be given, and not both');
    elsif delay is not null then
        perform rota._check_interval('delay', delay, '0', '100 years');
    else
        perform rota._check_run_at('run_at', run_at);
    end if;

    select j.status, j.run_at into v_status, v_old_run_at from rota.jobs as j
    where j.id = reschedule_job.job_id for update;
    if not found then
        perform rota._raise_not_live(job_id);
    elsif v_status = 'running' then
        perform rota._raise_running(job_id);
    end if;

    v_run_at := coalesce(run_at, rota.now() + rota._exact(delay));
    perform rota._change_jobs(array[job_id], v_run_at);
    perform rota._audit('reschedule', null, array[job_id],
        jsonb_build_object('run_at', v_old_run_at), jsonb_build_object('run_at', v_run_at));
    return v_run_at;
end $$;

comment on function rota.reschedule_job is
    'Move the next try of a waiting job and return its time; raises RT001 if there is no such '
    'job, RT003 if it has ended, RT008 if it is running, 22023.';

/* Give live jobs, which the caller has locked, another time, priority or queue, of those that
 * are given, and the places that go with it; the time is up to the spread later, by chance. */
create or replace function rota._change_jobs(
    job_ids bigint[], run_at timestamptz default null, priority integer default null,
    queue text default null, spread interval default null
) returns void language plpgsql as $$
begin
    update rota.jobs as j
    set run_at = coalesce(
            _change_jobs.run_at + random() * coalesce(_change_jobs.spread, '0'), j.run_at),
        priority = coalesce(_change_jobs.priority, j.priority),
        queue = coalesce(_change_jobs.queue, j.queue), updated_at = rota.now(),
        -- Of a running job, which may get another priority, it was in another lane.
        own_lane = case when j.status <> 'running' then j.own_lane end,
        own_place = case when j.status <> 'running' then j.own_place end
    where j.id = any(_change_jobs.job_ids);
    if queue is not null then perform rota._check_brought(job_ids); end if;
    perform rota._enter_lanes(job_ids);
    if num_nonnulls(run_at, queue) > 0 then perform rota._notify_for(job_ids); end if;
end $$;

create or replace function rota._raise_running(job_id bigint)
    returns void language plpgsql as $$
begin
    raise exception using errcode = 'RT008', message = format('job %s is running', job_id),
        hint = 'Wait for its end, or take it away from its worker with '
            'retry_job(..., force => true).';
end $$;

/* For a job that is not in the live table: it has ended, or it does not exist. */
create or replace function rota._raise_not_live(job_id bigint)
    returns void language plpgsql as $$
declare
    v_status text;
begin
    select f.status into v_status from rota.finished_jobs as f
    where f.id = _raise_not_live.job_id;
    if not found then
        -- Retried since we looked for it in jobs: then it had ended when we did.
        select 'succeeded, dead or cancelled, and was retried since' into v_status
        from rota.jobs as j where j.id = _raise_not_live.job_id;
    end if;
    if not found then perform rota._raise_not_found(job_id); end if;
    raise exception using
        errcode = 'RT003', message = format('job %s already ended as %s', job_id, v_status),
        hint = 'retry_job() runs it again.';
end $$;
