/*
 * waiting/pipelines.sql -- jobs that pass through stages.
 *
 * A run of a pipeline is one job, which goes from stage to stage.  It has the payload of the
 * run and, as stage_input, the result of the stage before; the stage says its job type, queue
 * and retries.  A finish in a stage that has a next one does not end the job: it writes what
 * became of the stage to stage_runs and puts the same row of jobs, queued, into the next.  So
 * the id, the keys, the limit and the dependants of a run are those of its job, and nothing
 * else has to know that there are stages.
 *
 * Each stage begins with a lease token of its own.  The token that a worker had in an earlier
 * stage therefore fits nothing any more, and stage_runs knows that it has finished.
 *
 * A stage that is dead or cancelled is the end of the job, until retry_job() repeats the stage
 * or restart_pipeline() goes on from any.  If the cancel of a job was requested and its stage
 * succeeds all the same, the job is cancelled where it would enter the next.
 */

create or replace function rota.define_pipeline(pipeline text, stages jsonb)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_stages text[]; v_before jsonb;
begin
    perform rota._check_name('pipeline', pipeline);
    perform rota._check_stages(stages);
    v_stages := array(
        select s.stage from rota._stages(define_pipeline.stages) as s order by s.ordinal);
    perform rota._check_queues('operator', array(
        select s.queue from rota._stages(define_pipeline.stages) as s));

    perform rota._lock_pipeline(pipeline, true);
    v_before := rota._stages_of(pipeline);
    -- Take it apart, and let stages that do not come again lead to those that do.  A round
    -- doubles how many of them, at most 1000, one leads past.
    for v_round in 1..10 loop
        update rota.pipeline_stages as p
        set next_stage = n.next_stage from rota.pipeline_stages as n
        where p.pipeline = define_pipeline.pipeline and p.next_stage <> all(v_stages)
          and n.pipeline = p.pipeline and n.stage = p.next_stage;
        exit when not found;
    end loop;
    update rota.pipeline_stages as p
    set ordinal = null where p.pipeline = define_pipeline.pipeline;
    insert into rota.pipeline_stages as p (pipeline, stage, ordinal, next_stage, job_type,
        queue, priority, max_attempts, lease, time_limit, backoff)
    select define_pipeline.pipeline, s.stage, s.ordinal, v_stages[s.ordinal + 1], s.job_type,
        s.queue, s.priority, s.max_attempts, rota._exact(s.lease), rota._exact(s.time_limit),
        s.backoff
    from rota._stages(define_pipeline.stages) as s
    on conflict on constraint pipeline_stages_pkey do update
    set ordinal = excluded.ordinal, next_stage = excluded.next_stage,
        job_type = excluded.job_type, queue = excluded.queue, priority = excluded.priority,
        max_attempts = excluded.max_attempts, lease = excluded.lease,
        time_limit = excluded.time_limit, backoff = excluded.backoff;
    -- After the write, for which a move waits that begins later.
    perform rota._check_stays(s.queue, 'a stage')
    from rota._stages(define_pipeline.stages) as s;
    if v_before is distinct from rota._stages_of(pipeline) then
        perform rota._audit('define_pipeline', jsonb_build_object('pipeline', pipeline), null,
            v_before, rota._stages_of(pipeline));
    end if;
end $$;

comment on function rota.define_pipeline is
    'Set the stages of a pipeline, given as objects in their order; runs in progress continue '
    'by stage name, and from a removed stage with the next remaining one; raises 22023 for a '
    'bad stage, naming it, RT016 if its queue moves to another database.';

/* Lock a pipeline, and refuse one that leads through queues that an operator is kept from, or
 * has: its runs, also those that are retried, continue by the names of stages.  Two definitions
 * at once would make one of both.  Where it has no stages that could be locked, a row that is
 * deleted at once holds the name until the commit: who writes the same waits for that.  Calls
 * that start, finish or claim jobs read the stages, and take no lock. */
create or replace function rota._lock_pipeline(pipeline text, may_be_new boolean)
    returns void language plpgsql as $$
begin
    for v_try in 1..2 loop
        perform from rota.pipeline_stages as p where p.pipeline = _lock_pipeline.pipeline
        order by p.stage for update;
        exit when found or v_try = 2 or not may_be_new;
        insert into rota.pipeline_stages (pipeline, stage, job_type, queue)
        values (_lock_pipeline.pipeline, ' ', '', '');
        delete from rota.pipeline_stages as p
        where p.pipeline = _lock_pipeline.pipeline and p.stage = ' ';
    end loop;
    perform rota._check_queues('operator', array(
        select p.queue from rota.pipeline_stages as p
        where p.pipeline = _lock_pipeline.pipeline
    ), format('pipeline %L', pipeline));
end $$;

/* The stages of a pipeline as they are defined; null if it is not. */
create or replace function rota._stages_of(pipeline text)
    returns jsonb language plpgsql stable as $$
begin
    return (
        select jsonb_build_object('stages', jsonb_agg(
            jsonb_strip_nulls(to_jsonb(p) - '{pipeline,ordinal,next_stage}'::text[])
            order by p.ordinal))
        from rota.pipeline_stages as p
        where p.pipeline = _stages_of.pipeline and p.ordinal is not null
        having count(*) > 0
    );
end $$;

create or replace function rota.drop_pipeline(pipeline text)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_before jsonb;
begin
    perform rota._check_name('pipeline', pipeline);
    perform rota._lock_pipeline(pipeline, false);
    v_before := rota._stages_of(pipeline);
    update rota.pipeline_stages as p
    set ordinal = null where p.pipeline = drop_pipeline.pipeline and p.ordinal is not null;
    if not found then
        perform rota._refuse('pipeline', format('%L is not defined', pipeline));
    end if;
    perform rota._audit('drop_pipeline', jsonb_build_object('pipeline', pipeline), null,
        v_before);
end $$;

comment on function rota.drop_pipeline is
    'Let no new run of a pipeline begin; runs in progress continue to their end; raises 22023 '
    'if it is not defined.';

create or replace function rota.start_pipeline(
    pipeline text, payload jsonb default '{}', stage text default null,
    run_at timestamptz default null, delay interval default null, priority integer default 0,
    idempotency_key text default null, unique_for interval default null,
    ordering_key text default null, skip_dead boolean default false,
    depends_on bigint[] default null, blocks bigint default null,
    if_parent_dead text default 'cancel', limit_key text default null,
    expires_at timestamptz default null, headers jsonb default null
) returns bigint language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_stage rota.pipeline_stages; v_job_id bigint;
begin
    v_stage := rota._pipeline_stage(pipeline, stage);
    perform rota._check_new_job('', v_stage.job_type, payload, v_stage.queue, run_at, delay,
        priority, null, null, null, idempotency_key, null, expires_at, headers);
    perform rota._check_waits('', ordering_key, skip_dead, depends_on, blocks, if_parent_dead,
        limit_key);

    v_job_id := rota._enqueue_special(
        jsonb_populate_record(null::rota.jobs, to_jsonb(v_stage) || jsonb_build_object(
            'payload', payload, 'run_at', coalesce(run_at, rota.now() + rota._exact(delay)),
            'priority', coalesce(v_stage.priority, priority), 'expires_at', expires_at,
            'headers', headers, 'idempotency_key', idempotency_key, 'ordering_key',
            ordering_key, 'skip_dead', skip_dead, 'if_parent_dead', if_parent_dead,
            'limit_key', limit_key,
            'status', case when depends_on is not null then 'blocked' end)),
        unique_for, 'keep', null, null, depends_on, blocks);
    -- The stage may have been in another queue when it was read.
    perform rota._check_stays(v_stage.queue, 'a run of a pipeline');
    return v_job_id;
end $$;

comment on function rota.start_pipeline is
    'Begin a run of a pipeline and return the id of its job, or of the job that already has '
    'its idempotency_key, in any stage; raises 22023 for a bad argument, RT001 for an unknown '
    'job in depends_on or blocks, RT013 if the job in blocks has started or another '
    'transaction has it locked, RT003 if it has ended, RT016 if its queue has just moved, or '
    'it has a key and its queue is still coming here from another database.';

create or replace function rota.restart_pipeline(job_id bigint, stage text)
    returns bigint language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_job rota.finished_jobs; v_pipeline text; v_is_live boolean; v_stage rota.pipeline_stages;
begin
    perform rota._check_own_job(job_id);
    perform rota._check_name('stage', stage);

    -- A job that comes back while we look, or ends again, is looked for again.
    for v_round in 1..3 loop
        select f.* into v_job from rota.finished_jobs as f where f.id = restart_pipeline.job_id;
        v_is_live := not found;
        v_pipeline := v_job.pipeline;
        if v_is_live then
            select j.pipeline into v_pipeline from rota.jobs as j where j.id = job_id;
            continue when not found;
        end if;
        if v_pipeline is null then
            perform rota._refuse('job_id', format(
                'must be a job of a pipeline, and job %s is in none', job_id));
        elsif rota._stages_of(v_pipeline) is null then
            perform rota._refuse('job_id', format(
                'must be a job of a pipeline that is defined, and %L is not', v_pipeline));
        end if;
        exit when v_is_live;
        v_stage := rota._pipeline_stage(v_job.pipeline, stage);
        perform rota._check_queues('operator', array[v_stage.queue],
            'stage ' || quote_literal(stage));

        update rota.finished_jobs as f
        set stage = v_stage.stage,
            stage_input = rota._stage_input(v_job, v_stage), job_type = v_stage.job_type,
            queue = v_stage.queue, priority = coalesce(v_stage.priority, f.priority),
            max_attempts = coalesce(v_stage.max_attempts, (
                select q.max_attempts from rota.queues as q where q.queue = v_stage.queue
            ), 10),
            lease = v_stage.lease, time_limit = coalesce(v_stage.time_limit, (
                select t.time_limit from rota.job_types as t where t.job_type = v_stage.job_type
            )),
            backoff = v_stage.backoff, last_error = null, error_type = null, failed_at = null
        where f.id = v_job.id and f.lease_token = v_job.lease_token;
        if found then
            perform rota._restore_jobs(array[v_job.id]);
            perform rota._audit('restart_pipeline', null, array[v_job.id],
                jsonb_build_object('status', v_job.status, 'stage', v_job.stage),
                jsonb_build_object('stage', v_stage.stage));
            return v_job.id;
        end if;
    end loop;

    if v_pipeline is null then perform rota._raise_not_found(job_id); end if;
    raise exception using errcode = 'RT014',
        message = format('job %s: its run of the pipeline is in progress', job_id),
        hint = 'Wait for its end, or cancel it first.';
end $$;

comment on function rota.restart_pipeline is
    'Restore an ended job of a pipeline, to continue from a stage with the latest result of a '
    'stage before it, and return its id; raises RT001 if the job or that result is gone, RT014 '
    'if it is in progress, RT007 if its idempotency_key is taken, RT016 if its queue moves, '
    '22023.';

/* What a stage is given if an ended job goes on from there: the latest result of a stage before
 * it, or what it was given itself if that was later. */
create or replace function rota._stage_input(job rota.finished_jobs, stage rota.pipeline_stages)
    returns jsonb language plpgsql stable as $$
declare
    v_input jsonb;
begin
    if job.stage = stage.stage then return job.stage_input; end if;

    select case when r.stage = stage.stage then r.stage_input else r.result end into v_input
    from rota.stage_runs as r
    left join rota.pipeline_stages as p on p.pipeline = r.pipeline and p.stage = r.stage
    where r.job_id = job.id
      and (r.stage = stage.stage or r.status = 'succeeded' and p.ordinal < stage.ordinal)
    order by r.lease_token desc limit 1;

    -- Without the row of its first stage it is unknown what else is missing.
    if not found and stage.ordinal > 1 and not exists (
        select from rota.stage_runs as r
        where r.job_id = job.id and r.queued_at = job.created_at
    ) then
        raise exception using errcode = 'RT001',
            message = format('job %s: no result of a stage before %L is left of its run',
                job.id, stage.stage),
            hint = 'Retention has removed it; restart the run from its first stage.';
    end if;
    return v_input;
end $$;

/* One stage of a pipeline by its name, or the first. */
create or replace function rota._pipeline_stage(pipeline text, stage text)
    returns rota.pipeline_stages language plpgsql as $$
declare
    v_stage rota.pipeline_stages;
begin
    perform rota._check_name('pipeline', pipeline);
    select p.* into v_stage from rota.pipeline_stages as p
    where p.pipeline = _pipeline_stage.pipeline
      and case
        when _pipeline_stage.stage is null then p.ordinal = 1
        else p.ordinal is not null and p.stage = _pipeline_stage.stage
      end;
    if not found then
        perform rota._refuse('pipeline', format('%L is not defined', pipeline))
        where rota._stages_of(pipeline) is null;
        perform rota._refuse('stage', format('must be a stage of the pipeline %L, got %L',
            pipeline, rota._cut(stage, 80)));
    end if;
    return v_stage;
end $$;

/* The objects as typed rows. */
create or replace function rota._stages(stages jsonb)
    returns table (
        ordinal bigint, stage text, job_type text, queue text, priority integer,
        max_attempts integer, lease interval, time_limit interval, backoff jsonb
    ) language sql stable as $$
select e.ordinal, s.stage, coalesce(s.job_type, s.stage), coalesce(s.queue, 'default'),
    s.priority, s.max_attempts, s.lease, s.time_limit, nullif(s.backoff, 'null')
from jsonb_array_elements(stages) with ordinality as e (stage, ordinal)
cross join lateral jsonb_to_record(e.stage) as s (stage text, job_type text, queue text,
    priority integer, max_attempts integer, lease interval, time_limit interval, backoff jsonb)
$$;

create or replace function rota._check_stages(stages jsonb)
    returns void language plpgsql as $$
begin
    if jsonb_typeof(_check_stages.stages) is distinct from 'array'
      or jsonb_array_length(_check_stages.stages) not between 1 and 1000 then
        perform rota._refuse('stages', 'must be an array of 1 to 1000 objects');
    end if;
    perform rota._check_keys_of('stages', stages, array['stage', 'job_type', 'queue',
        'priority', 'max_attempts', 'lease', 'time_limit', 'backoff']);
    perform rota._check_durations('stages[%s].', stages);
    begin
        perform rota._check_name(format('stages[%s].stage', s.ordinal), s.stage),
            case when s.stage = 'end' then rota._refuse(format('stages[%s].stage', s.ordinal),
                'must not be end, which as next_stage ends the run') end,
            rota._check_new_job(format('stages[%s].', s.ordinal), s.job_type, '{}', s.queue,
                null, null, coalesce(s.priority, 0), s.max_attempts, s.lease, s.backoff, null,
                s.time_limit)
        from rota._stages(_check_stages.stages) as s;
    exception
        when data_exception then
            perform rota._check_values_of('stages', stages);
            raise;
    end;

    perform rota._refuse(format('stages[%s].stage', max(s.ordinal)),
        format('%L is there twice', s.stage))
    from rota._stages(_check_stages.stages) as s group by s.stage having count(*) > 1;
end $$;
