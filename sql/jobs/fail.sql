/*
 * jobs/fail.sql -- a job did not do its work, or not yet.
 *
 * fail: the attempt counts; the job waits for its next try, or is dead after the last one.
 * snooze and release: the attempt is given back, because nothing went wrong.
 *
 * What the worker asks for goes before rules for errors (jobs/retries.sql), they before
 * backoff.
 *
 * _fail_running() is the only place where it is decided what a failure leads to.  fail_job(),
 * end_jobs() and the sweep all go through it, so a job whose worker vanished is treated
 * exactly like one whose worker reported an error.  Nothing exceeds max_attempts, not even a
 * retry_in.
 *
 * A job whose cancel was requested is not tried again: it ends as cancelled, and what its
 * worker reported then is not a failure that needs attention.
 */

create or replace function rota.fail_job(
    job_id bigint, lease_token bigint, error text, error_type text default null,
    stack text default null, retry_in interval default null, fatal boolean default false
) returns table (status text, run_at timestamptz) language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
    set plan_cache_mode = force_generic_plan set enable_bitmapscan = off as $$
begin
    perform rota._check_job_ref(job_id, lease_token);
    perform rota._check_given('error', error is not null);
    perform rota._check_given('fatal', fatal is not null);
    perform rota._check_interval('retry_in', retry_in, '0', '1 year', true);
    return query select f.status, f.run_at
    from rota._fail_running(array[fail_job.job_id], array[fail_job.lease_token],
        array[fail_job.error], array[fail_job.error_type], array[fail_job.stack],
        array[fail_job.retry_in], array[fail_job.fatal]) as f;
    if found then return; end if;
    return query select f.status, f.run_at
    from rota._failed_before(fail_job.job_id, fail_job.lease_token, fail_job.error) as f;
    if not found then perform rota._raise_lost(job_id, lease_token); end if;
end $$;

comment on function rota.fail_job is
    'Report a failed attempt and return failed with the next run_at, or dead or cancelled with '
    'null; error is cut to 10000 characters and stack to 20000; raises RT002 if the lease is '
    'lost, RT001, RT003, 22023.';

/* Fail running jobs, with one entry of each list for each job; one row for each that was ours.
 * Of several each is already locked: no session waits for a row while it holds others. */
create or replace function rota._fail_running(
    job_ids bigint[], lease_tokens bigint[], errors text[], error_types text[], stacks text[],
    retry_ins interval[], fatals boolean[]
) returns table (job_id bigint, status text, run_at timestamptz) language plpgsql as $$
declare
    v_now timestamptz;
    c_has_rules constant boolean := exists (select from rota.retry_rules);
    v_rule rota.retry_rules; v_job rota.jobs; v_n integer; v_error_type text;
    v_dead_ids bigint[] := '{}'::bigint[];
    v_dead_tokens bigint[] := '{}'::bigint[];
    v_cancelled_ids bigint[] := '{}'::bigint[];
    v_cancelled_tokens bigint[] := '{}'::bigint[];
    v_failed_ids bigint[] := '{}'::bigint[];
    v_paused text[] := '{}'::text[];
    v_soon_ids bigint[] := '{}'::bigint[];
    v_held_limits text[] := '{}'::text[];
begin
    for v_job in
        select j.* from rota.jobs as j
        where j.id = any(_fail_running.job_ids) and j.lease_token
            = _fail_running.lease_tokens[array_position(_fail_running.job_ids, j.id)]
          and j.status = 'running' for update
    loop
        job_id := v_job.id;
        run_at := null;
        v_n := array_position(job_ids, v_job.id);
        if v_job.cancel_requested_at is not null then
            status := 'cancelled';
            v_cancelled_ids := v_cancelled_ids || v_job.id;
            v_cancelled_tokens := v_cancelled_tokens || v_job.lease_token;
            return next;
            continue;
        end if;
        v_error_type := rota._cut(error_types[v_n], 200);
        if c_has_rules then
            v_rule := rota._retry_rule(v_error_type, v_job.job_type, v_job.queue);
        end if;
        if v_rule.pause_for is not null then
            v_paused := v_paused
                || jsonb_build_array(v_error_type, v_job.job_type, v_job.queue)::text;
        end if;
        status := case
            when fatals[v_n] or v_job.attempts >= v_job.max_attempts then 'dead'
            when v_rule.is_fatal then 'dead' else 'failed' end;
        -- The clock is read by this statement, as the statistics need it (jobs/finish.sql).
        insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker,
            started_at, failed_at, error_type, message, stack, run_at)
        select v_job.id, v_job.lease_token, v_job.attempts, v_job.queue, v_job.job_type,
            coalesce(v_job.locked_by, ''), coalesce(v_job.started_at, c.now), c.now,
            v_error_type, rota._cut(_fail_running.errors[v_n], 10000),
            rota._cut(_fail_running.stacks[v_n], 20000),
            greatest(v_job.run_at, v_job.created_at)
        from (select rota.now() as now offset 0) as c returning failed_at into v_now;

        if status = 'failed' then
            run_at := v_now + coalesce(rota._exact(retry_ins[v_n]), v_rule.retry_in,
                rota._backoff(coalesce(v_job.backoff, (
                    select q.backoff from rota.queues as q where q.queue = v_job.queue
                )), v_job.attempts));
        end if;

        update rota.jobs as j
        set status = case when _fail_running.status = 'failed' then 'failed' else j.status end,
            run_at = coalesce(_fail_running.run_at, j.run_at),
            locked_by = case when _fail_running.status <> 'failed' then j.locked_by end,
            locked_until = case when _fail_running.status <> 'failed' then j.locked_until end,
            held_limits = case when _fail_running.status <> 'failed' then j.held_limits end,
            last_error = rota._cut(_fail_running.errors[v_n], 1000), error_type = v_error_type,
            failed_at = v_now, updated_at = v_now
        where j.id = v_job.id and j.lease_token = v_job.lease_token and j.status = 'running';

        if status = 'dead' then
            v_dead_ids := v_dead_ids || v_job.id;
            v_dead_tokens := v_dead_tokens || v_job.lease_token;
        else
            if v_job.idempotency_key is not null
              and rota._may_have_reruns(array[v_job.id])
              and rota._begin_rerun(array[v_job.id]) <> '{}' then
                select j.run_at into run_at from rota.jobs as j where j.id = v_job.id;
            end if;
            v_failed_ids := v_failed_ids || v_job.id;
            v_held_limits := v_held_limits || v_job.held_limits;
            if run_at < v_now + rota._soon() then v_soon_ids := v_soon_ids || v_job.id; end if;
        end if;
        return next;
    end loop;

    if v_dead_ids <> '{}' then
        perform rota._end_jobs(v_dead_ids, v_dead_tokens, 'running', 'dead');
    end if;
    if v_cancelled_ids <> '{}' then
        perform rota._end_jobs(v_cancelled_ids, v_cancelled_tokens, 'running', 'cancelled');
    end if;
    if v_failed_ids <> '{}' then
        if exists (select from rota.retry_budgets) then
            v_failed_ids := rota._hold_retries(v_failed_ids);
        end if;
        perform rota._enter_lanes(v_failed_ids, v_held_limits);
    end if;
    if v_soon_ids <> '{}' then perform rota._notify_for(v_soon_ids); end if;
    if v_paused <> '{}' then perform rota._add_checks('error', v_paused); end if;
end $$;

/* What a failure came to that is reported again because its answer was lost. */
create or replace function rota._failed_before(job_id bigint, lease_token bigint, error text)
    returns table (status text, run_at timestamptz) language plpgsql stable as $$
begin
    return query select r.status, case when r.status = 'failed' then r.run_at end
    from (
        select j.status, j.run_at, j.lease_token, j.cancel_requested_at from rota.jobs as j
        where j.id = _failed_before.job_id
        union all
        select f.status, f.run_at, f.lease_token, f.cancel_requested_at
        from rota.finished_jobs as f where f.id = _failed_before.job_id
    ) as r
    where r.lease_token = _failed_before.lease_token
      and r.status in ('failed', 'dead', 'cancelled')
      and (r.status = 'cancelled' and r.cancel_requested_at is not null or exists (
        select from rota.job_errors as e
        where e.job_id = _failed_before.job_id and e.lease_token = _failed_before.lease_token
          and e.message = rota._cut(_failed_before.error, 10000)
      ))
      -- A job that was cancelled after its stage: that has succeeded.
      and not rota._is_finished(_failed_before.job_id, r.lease_token);
end $$;

create or replace function rota.snooze_job(job_id bigint, lease_token bigint, delay interval)
    returns timestamptz language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off as $$
declare
    v_run_at timestamptz;
begin
    perform rota._check_job_ref(job_id, lease_token);
    perform rota._check_interval('delay', delay, '0', '100 years');

    select g.next_run_at into v_run_at
    from rota._give_back(array[snooze_job.job_id], array[snooze_job.lease_token],
        array[rota.now() + rota._exact(snooze_job.delay)]) as g;
    if not found then perform rota._raise_lost(job_id, lease_token); end if;
    return nullif(v_run_at, 'infinity');
end $$;

comment on function rota.snooze_job is
    'Defer a running job without using an attempt and return when it runs, or null if it was '
    'cancelled by request; raises RT002 if the lease is lost, RT001, RT003, 22023.';

create or replace function rota.release_jobs(job_ids bigint[], lease_tokens bigint[])
    returns table (job_id bigint, is_released boolean) language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
    set plan_cache_mode = force_generic_plan set enable_bitmapscan = off as $$
declare
    v_ids bigint[];
begin
    perform rota._check_job_refs(job_ids, lease_tokens);
    v_ids := rota._hold_jobs(rota._newest_refs(job_ids, lease_tokens), lease_tokens);
    return query select t.job_id,
        case when g.next_run_at is not null then true
            when not rota._is_running(t.job_id, t.lease_token) then false end
    from unnest(release_jobs.job_ids, release_jobs.lease_tokens, v_ids)
        with ordinality as t (job_id, lease_token, held_id, ordinal)
    left join rota._give_back(v_ids, release_jobs.lease_tokens) as g on g.job_id = t.held_id
    order by t.ordinal;
end $$;

comment on function rota.release_jobs is
    'Give back up to 1000 running jobs without using an attempt, so that any worker can claim '
    'them at once; one row for each in the order given: is_released is false where the lease '
    'is lost, null where another session has the row locked (call again); raises 22023.';

/* Running jobs back to queued with their attempt returned; one row for each that was ours.
 * Where run_ats has none the time stays as it is, and the place.  One whose cancel was
 * requested ends instead, and is answered with infinity.  Of several jobs each is already
 * locked: no session waits for a row while it holds others. */
create or replace function rota._give_back(
    job_ids bigint[], lease_tokens bigint[], run_ats timestamptz[] default null
) returns table (job_id bigint, next_run_at timestamptz) language plpgsql as $$
declare
    v_cancelled_ids bigint[]; v_cancelled_tokens bigint[]; v_kept_ids bigint[];
    v_moved_ids bigint[]; v_keyed_ids bigint[];
    v_rerun_ids bigint[] := '{}'::bigint[];
    v_held_limits text[];
begin
    -- Each is locked before it is looked at: the planner moves a condition on a subquery into
    -- it, in front of the lock, but not on a CTE.
    with held as (
        select j.id, j.lease_token, j.cancel_requested_at, j.held_limits, j.idempotency_key,
            _give_back.run_ats[array_position(_give_back.job_ids, j.id)] is null as is_kept
        from rota.jobs as j
        where j.id = any(_give_back.job_ids)
          and j.lease_token = _give_back.lease_tokens[array_position(_give_back.job_ids, j.id)]
          and j.status = 'running' for update
    )
    select array_agg(h.id) filter (where h.cancel_requested_at is not null),
        array_agg(h.lease_token) filter (where h.cancel_requested_at is not null),
        (select array_agg(n.limit_name) from held as l
            cross join lateral unnest(l.held_limits) as n (limit_name)
            where l.cancel_requested_at is null),
        array_agg(h.id) filter (where h.is_kept), array_agg(h.id) filter (where not h.is_kept),
        array_agg(h.id)
            filter (where h.idempotency_key is not null and h.cancel_requested_at is null)
    into v_cancelled_ids, v_cancelled_tokens, v_held_limits, v_kept_ids, v_moved_ids,
        v_keyed_ids
    from held as h;
    return query
    select e.job_id, timestamptz 'infinity' from unnest(rota._end_jobs(v_cancelled_ids,
        v_cancelled_tokens, 'running', 'cancelled')) as e (job_id);
    if v_keyed_ids is not null and rota._may_have_reruns(v_keyed_ids) then
        v_rerun_ids := rota._begin_rerun(v_keyed_ids);
        v_moved_ids := v_moved_ids || v_rerun_ids;
        v_kept_ids := array(select unnest(v_kept_ids) except select unnest(v_rerun_ids));
    end if;
    return query
    update rota.jobs as j
    set status = 'queued',
        run_at = greatest(_give_back.run_ats[array_position(_give_back.job_ids, j.id)],
            case when j.id = any(v_rerun_ids)
                or _give_back.run_ats[array_position(_give_back.job_ids, j.id)] is null
                then j.run_at end),
        attempts = case when j.id = any(v_rerun_ids) then 0 else j.attempts - 1 end,
        locked_by = null, locked_until = null, held_limits = null, updated_at = rota.now()
    where j.id = any(_give_back.job_ids)
      and j.lease_token = _give_back.lease_tokens[array_position(_give_back.job_ids, j.id)]
      and j.status = 'running' returning j.id, j.run_at;
    perform rota._enter_lanes(v_moved_ids, v_held_limits);
    if v_kept_ids is not null then
        perform rota._enter_lanes(v_kept_ids, keep_places => true);
    end if;
    perform rota._notify_for(job_ids);
end $$;
