/*
 * jobs/finish.sql -- a job did its work.
 *
 * Every way out of the live table is one statement in _archive_jobs(): it deletes the row and
 * writes it to the history.  The deleted row is the proof that the job was there, with this
 * token and in this state; so of two that want to end a job exactly one does, and what the
 * other had written in its transaction rolls back with the error it gets.
 *
 * A worker whose answer was lost asks again by the same token, and is told already_finished.
 *
 * What a job leads to is made in the same transaction: a run that was asked for meanwhile, the
 * start of those that wait for it.  A job of a pipeline (waiting/pipelines.sql) that has a next
 * stage does not end: _end_stages() writes what became of the stage, and the row goes on.
 */

create or replace function rota.finish_job(
    job_id bigint, lease_token bigint, result jsonb default null, next_stage text default null
) returns text language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off as $$
declare
    v_results jsonb; v_ended bigint[];
begin
    if job_id is null or lease_token is null or result is not null then
        perform rota._check_job_ref(job_id, lease_token);
        perform rota._check_size('result', result, '');
    end if;
    if next_stage is not null then
        perform rota._check_next_stage('next_stage', job_id, lease_token, next_stage);
    end if;

    if result is not null then v_results := jsonb_build_array(result); end if;
    v_ended := rota._archive_jobs(array[job_id], array[lease_token], 'running', 'succeeded',
        v_results);
    if v_ended = '{}' and rota._lock_lease(job_id, lease_token) then
        v_ended := rota._end_stages(array[job_id], array[lease_token], 'running', 'succeeded',
            v_results, array[next_stage]);
    end if;
    if v_ended <> '{}' then
        return 'finished';
    elsif not rota._is_finished(job_id, lease_token) then
        perform rota._raise_lost(job_id, lease_token);
    end if;
    return 'already_finished';
end $$;

comment on function rota.finish_job is
    'End a running job as succeeded and return finished, or already_finished if this token did '
    'so before; a job of a pipeline enters next_stage instead, the next stage in order if that '
    'is null, or ends if it is end; raises RT002 if the lease is lost, RT003 if it ended '
    'otherwise, RT001, 22023.';

create or replace function rota.finish_jobs(
    job_ids bigint[], lease_tokens bigint[], results jsonb default null,
    next_stages text[] default null
) returns table (job_id bigint, outcome text) language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
    set plan_cache_mode = force_generic_plan set enable_bitmapscan = off as $$
begin
    return query select f.job_id, f.answer
    from unnest(finish_jobs.job_ids, rota._finish_listed(finish_jobs.job_ids,
        finish_jobs.lease_tokens, finish_jobs.results, finish_jobs.next_stages))
        as f (job_id, answer);
end $$;

comment on function rota.finish_jobs is
    'End up to 1000 running jobs as succeeded and return finished, already_finished, lost, or '
    'busy (another session has the row locked, ask again) for each in the order given; results '
    'and next_stages are as long as job_ids; raises 22023.';

/* What finish_jobs() answers for each of these jobs, whose arguments nobody has checked. */
create or replace function rota._finish_listed(
    job_ids bigint[], lease_tokens bigint[], results jsonb, next_stages text[]
) returns text[] language plpgsql as $$
begin
    -- One expression that most calls pass costs less than the call that tells what is wrong.
    -- Whatever is no list ends it before an operator that is for lists only.
    if (array_ndims(job_ids) = 1
        and array_dims(job_ids) is not distinct from array_dims(lease_tokens)
        and array_lower(job_ids, 1) = 1 and cardinality(job_ids) <= 1000
        and array_position(job_ids, null) is null
        and array_position(lease_tokens, null) is null) is not true then
        perform rota._check_job_refs(job_ids, lease_tokens);
    end if;
    if results is not null then
        if jsonb_typeof(results) <> 'array'
          or jsonb_array_length(results) <> cardinality(job_ids) then
            perform rota._refuse('results', format('must be an array as long as job_ids (%s)',
                cardinality(job_ids)));
        end if;
        perform rota._check_size(format('results[%s]', r.ordinal), r.result, '')
        from jsonb_array_elements(_finish_listed.results)
            with ordinality as r (result, ordinal);
    end if;
    if next_stages is not null then
        if array_ndims(next_stages) > 1 or array_lower(next_stages, 1) <> 1
          or cardinality(next_stages) <> cardinality(job_ids) then
            perform rota._refuse('next_stages', format(
                'must be a plain list as long as job_ids (%s)', cardinality(job_ids)));
        end if;
        perform rota._check_next_stage(format('next_stages[%s]', n.ordinal), n.job_id,
            n.lease_token, n.next_stage)
        from unnest(_finish_listed.job_ids, _finish_listed.lease_tokens,
                _finish_listed.next_stages)
            with ordinality as n (job_id, lease_token, next_stage, ordinal)
        where n.next_stage is not null;
    end if;
    return rota._finish_running(job_ids, lease_tokens, results, next_stages);
end $$;

/* Whether a running job may go on to a stage; one that is lost is told so by its finish. */
create or replace function rota._check_next_stage(
    argument text, job_id bigint, lease_token bigint, next_stage text
) returns void language plpgsql as $$
declare
    v_pipeline text;
begin
    select j.pipeline into v_pipeline from rota.jobs as j
    where j.id = _check_next_stage.job_id
      and j.lease_token = _check_next_stage.lease_token and j.status = 'running';
    if not found then
        return;
    elsif v_pipeline is null then
        perform rota._refuse(argument, format(
            'goes with a job of a pipeline only, and job %s is in none', job_id));
    elsif _check_next_stage.next_stage <> 'end' and not exists (
        select from rota.pipeline_stages as p
        where p.pipeline = v_pipeline and p.stage = _check_next_stage.next_stage
          -- Of a pipeline that was dropped, the runs in progress still enter any.
          and (p.ordinal is not null or not exists (
            select from rota.pipeline_stages as o
            where o.pipeline = v_pipeline and o.ordinal is not null
        ))
    ) then
        perform rota._refuse(argument, format(
            'must be end or a stage of the pipeline %L, got %L', v_pipeline,
            rota._cut(next_stage, 80)));
    end if;
end $$;

/* What finish_jobs() answers for each job, whose arguments are checked; ids may be null. */
create or replace function rota._finish_running(
    job_ids bigint[], lease_tokens bigint[], results jsonb, next_stages text[],
    until timestamptz default 'infinity'
) returns text[] language plpgsql as $$
declare
    v_first bigint[]; v_newest bigint[]; v_ended bigint[];
begin
    v_first := rota._end_jobs(job_ids, lease_tokens, 'running', 'succeeded', results,
        next_stages, true);
    if cardinality(v_first) = cardinality(array_remove(job_ids, null)) then
        return array_fill('finished'::text, array[cardinality(job_ids)]);
    end if;

    -- Some are not ours any more, or locked by another session, or were.
    v_newest := rota._newest_refs(job_ids, lease_tokens);
    v_ended := rota._end_jobs(rota._hold_jobs(v_newest, lease_tokens, until), lease_tokens,
        'running', 'succeeded', results, next_stages);
    return array(
        select
            case
                when t.job_id is null then null
                when h.job_id is not null and t.lease_token = t.first_token
                  or e.job_id is not null then 'finished'
                when rota._is_running(t.job_id, t.lease_token) then 'busy'
                when rota._is_finished(t.job_id, t.lease_token) then 'already_finished'
                else 'lost'
            end
        from (
            select i.*, first_value(i.lease_token)
                    over (partition by i.job_id order by i.ordinal) as first_token
            from unnest(_finish_running.job_ids, _finish_running.lease_tokens, v_newest)
                with ordinality as i (job_id, lease_token, newest_id, ordinal)
        ) as t
        -- Of a job that was given twice, the first token is the one that was tried first.
        left join unnest(v_first) as h (job_id) on h.job_id = t.job_id
        left join unnest(v_ended) as e (job_id) on e.job_id = t.newest_id order by t.ordinal
    );
end $$;

/* End jobs of any kind; returns the ids of those that ended or went to their next stage. */
create or replace function rota._end_jobs(
    job_ids bigint[], lease_tokens bigint[], old_status text, new_status text,
    results jsonb default null, next_stages text[] default null,
    is_optimistic boolean default false
) returns bigint[] language plpgsql as $$
declare
    v_ended bigint[];
begin
    v_ended := rota._archive_jobs(job_ids, lease_tokens, old_status, new_status, results,
        is_optimistic);
    if cardinality(v_ended) < cardinality(array_remove(job_ids, null)) then
        v_ended := v_ended || rota._end_stages(job_ids, lease_tokens, old_status, new_status,
            results, next_stages);
    end if;
    return v_ended;
end $$;

/* Move jobs from old_status to new_status and into the history; returns the ids moved.
 *
 * An index scan for `= any` goes in the order of the key, so two batches that share jobs cannot
 * deadlock; each caller has switched other scans off, which here would cost once more.  The
 * pair (id, token) is matched by position: no join, whose cost the planner could misjudge.
 *
 * If optimistic, it skips rows that another transaction may have locked: the last locker leaves
 * its mark in a row's xmax, and the claim of the job itself leaves none.  A lock that is taken
 * in the microseconds between that look and the delete of the row is waited for: see the
 * decision on optimistic endings in sql/README.md.
 *
 * A job of a pipeline is passed over, too, unless it is named as one in its last stage: then
 * these alone end. */
create or replace function rota._archive_jobs(
    job_ids bigint[], lease_tokens bigint[], old_status text, new_status text,
    results jsonb default null, is_optimistic boolean default false,
    last_stage_ids bigint[] default null
) returns bigint[] language plpgsql as $$
declare
    -- All of one claim, mostly.
    v_token constant bigint := case
        when lease_tokens[1] = all(lease_tokens) then lease_tokens[1] end;
    v_ended bigint[]; v_parents bigint[]; v_leading jsonb; v_held_limits jsonb;
    v_keyed bigint[];
begin
    with ended as (
        delete from rota.jobs as j
        where j.id = any(_archive_jobs.job_ids)
          and j.lease_token = coalesce(v_token,
            _archive_jobs.lease_tokens[array_position(_archive_jobs.job_ids, j.id)])
          and j.status = _archive_jobs.old_status
          and case when _archive_jobs.last_stage_ids is null then j.pipeline is null
            else j.id = any(_archive_jobs.last_stage_ids) end
          and (not _archive_jobs.is_optimistic or j.xmax = '0'::xid or j.xmax = j.xmin)
          -- Only a worker succeeds; other ends may be of a sweep, which is for all queues.
          and (_archive_jobs.new_status <> 'succeeded'
            or not exists (select from rota.queue_grants)
            or coalesce(j.queue = any((select rota._allowed_queues('worker'))::text[]), true))
        -- Read when the first row is deleted: the statistics rely on finished_at being later
        -- than the lock on finished_jobs and the number of this transaction.
        returning j.*, (select rota.now()) as ended_at
    ),
    archived as (
        insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,
            lease, time_limit, expires_at, headers, backoff, idempotency_key, ordering_key,
            skip_dead, limit_key, pipeline, stage, stage_input, definition, scheduled_for,
            run_at, attempts, lease_token, locked_by, cancel_requested_at, cancel_reason,
            progress_percent, progress_message, last_error, error_type, failed_at, created_at,
            started_at, status, updated_at, finished_at, result)
        select e.id, e.queue, e.job_type, e.payload, e.priority, e.max_attempts, e.lease,
            e.time_limit, e.expires_at, e.headers, e.backoff, e.idempotency_key, e.ordering_key,
            e.skip_dead, e.limit_key, e.pipeline, e.stage, e.stage_input, e.definition,
            e.scheduled_for, e.run_at, e.attempts, e.lease_token, e.locked_by,
            e.cancel_requested_at, e.cancel_reason, e.progress_percent, e.progress_message,
            e.last_error, e.error_type, e.failed_at, e.created_at, e.started_at,
            _archive_jobs.new_status, e.ended_at, e.ended_at,
            case when _archive_jobs.results is not null then nullif(_archive_jobs.results
                    -> (array_position(_archive_jobs.job_ids, e.id) - 1), 'null') end
        from ended as e
    )
    select coalesce(array_agg(e.id), '{}'),
        jsonb_agg(jsonb_build_object('id', e.id, 'job_type', e.job_type, 'limit_key',
            e.limit_key, 'ordering_key', e.ordering_key, 'skip_dead', e.skip_dead, 'definition',
            e.definition))
            filter (where num_nonnulls(e.ordering_key, e.definition) > 0
            or _archive_jobs.old_status in ('queued', 'failed')),
        jsonb_agg(e.held_limits) filter (where e.held_limits is not null),
        array_agg(e.id) filter (where e.idempotency_key is not null)
    into v_ended, v_leading, v_held_limits, v_keyed from ended as e;
    if v_keyed is not null then
        if rota._may_have_reruns(v_keyed) then perform rota._follow_up(v_keyed); end if;
    end if;

    -- A statement of its own: it sees those that came to wait while we waited for the rows.
    if current_setting('transaction_isolation') <> 'read committed'
      or exists (select from rota.dependencies as d where d.parent_id = any(v_ended)) then
        v_parents := v_ended;
    end if;
    if num_nonnulls(v_parents, v_leading, v_held_limits) > 0 then
        perform rota._jobs_ended(v_parents, v_leading, v_held_limits, old_status, new_status);
    end if;
    -- A session that waits for any result holds this lock (base/notify.sql).
    if rota._others_hold(1919907970, 0) then perform rota._notify_results(v_ended); end if;
    return v_ended;
end $$;

/* Running or waiting jobs of pipelines leave their stage as _end_jobs() was told: those that
 * succeed and have a next stage enter it, the others end.  Returns the ids of all.
 *
 * Each is locked first, so that the statements after it speak of the same row.  The call skips
 * rows that another transaction has locked: a caller that is to wait for them has done so. */
create or replace function rota._end_stages(
    job_ids bigint[], lease_tokens bigint[], old_status text, new_status text, results jsonb,
    next_stages text[]
) returns bigint[] language plpgsql as $$
declare
    v_now timestamptz; v_ids bigint[]; v_stages text[]; v_entering bigint[];
    v_cancelled bigint[]; v_last bigint[]; v_held_limits text[];
begin
    with held as (
        select j.id, j.pipeline, j.stage, j.cancel_requested_at,
            array_position(_end_stages.job_ids, j.id) as place
        from rota.jobs as j
        where j.id = any(_end_stages.job_ids) and j.lease_token
            = _end_stages.lease_tokens[array_position(_end_stages.job_ids, j.id)]
          and j.status = _end_stages.old_status and j.pipeline is not null
          -- The same conditions as in _archive_jobs().
          and (_end_stages.new_status <> 'succeeded'
            or not exists (select from rota.queue_grants)
            or coalesce(j.queue = any((select rota._allowed_queues('worker'))::text[]), true))
        for update skip locked
    )
    select array_agg(h.id), array_agg(n.stage),
        array_agg(h.id) filter (where n.stage is not null and h.cancel_requested_at is null),
        array_agg(h.id)
            filter (where n.stage is not null and h.cancel_requested_at is not null),
        array_agg(h.id) filter (where n.stage is null)
    into v_ids, v_stages, v_entering, v_cancelled, v_last from held as h
    left join rota.pipeline_stages as s on s.pipeline = h.pipeline and s.stage = h.stage
    left join rota.pipeline_stages as n on n.pipeline = h.pipeline
      and n.stage = case when _end_stages.new_status = 'succeeded'
        then coalesce(_end_stages.next_stages[h.place], s.next_stage) end;
    if v_ids is null then return '{}'::bigint[]; end if;

    insert into rota.stage_runs (job_id, lease_token, pipeline, stage, status, queue, job_type,
        attempts, worker, queued_at, started_at, finished_at, stage_input, result)
    -- A hand may have left out the stage.
    select j.id, j.lease_token, j.pipeline, coalesce(j.stage, ''), _end_stages.new_status,
        j.queue, j.job_type, j.attempts, j.locked_by, coalesce(j.stage_queued_at, j.created_at),
        j.started_at, (select rota.now()), j.stage_input,
        nullif(_end_stages.results -> (array_position(_end_stages.job_ids, j.id) - 1), 'null')
    from rota.jobs as j where j.id = any(v_ids) on conflict do nothing;
    v_now := rota.now();

    if v_entering is not null then
        v_held_limits := array(
            select unnest(j.held_limits) from rota.jobs as j where j.id = any(v_entering));
        update rota.jobs as j
        set stage = n.stage,
            stage_input = nullif(_end_stages.results
                -> (array_position(_end_stages.job_ids, j.id) - 1), 'null'),
            stage_queued_at = v_now, job_type = n.job_type, queue = n.queue,
            priority = coalesce(n.priority, j.priority),
            max_attempts = coalesce(n.max_attempts, q.max_attempts, 10), lease = n.lease,
            time_limit = coalesce(n.time_limit, (
                select t.time_limit from rota.job_types as t where t.job_type = n.job_type
            )),
            backoff = n.backoff, status = 'queued', run_at = v_now, attempts = 0,
            lease_token = least(j.lease_token, 9223372036854775806) + 1, locked_by = null,
            locked_until = null, held_limits = null, progress_percent = null,
            progress_message = null, last_error = null, error_type = null, failed_at = null,
            started_at = null, updated_at = v_now
        from rota.pipeline_stages as n left join rota.queues as q on q.queue = n.queue
        where j.id = any(v_entering) and j.lease_token
            = _end_stages.lease_tokens[array_position(_end_stages.job_ids, j.id)]
          and j.status = 'running' and n.pipeline = j.pipeline
          and n.stage = v_stages[array_position(v_ids, j.id)];
        perform rota._enter_lanes(v_entering, v_held_limits);
        perform rota._notify_for(v_entering);
    end if;
    if v_cancelled is not null then
        perform rota._archive_jobs(job_ids, lease_tokens, 'running', 'cancelled',
            last_stage_ids => v_cancelled);
    end if;
    if v_last is not null then
        perform rota._archive_jobs(job_ids, lease_tokens, old_status, new_status, results,
            last_stage_ids => v_last);
    end if;
    return v_ids;
end $$;

create or replace function rota._is_finished(job_id bigint, lease_token bigint)
    returns boolean language plpgsql stable as $$
begin
    return exists (
        select from rota.finished_jobs as f
        where f.id = _is_finished.job_id
          and f.lease_token = _is_finished.lease_token and f.status = 'succeeded'
    ) or exists (
        select from rota.stage_runs as r where r.job_id = _is_finished.job_id
          and r.lease_token = _is_finished.lease_token and r.status = 'succeeded'
    );
end $$;
