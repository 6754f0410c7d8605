/*
 * waiting/pipelines.sql -- jobs that pass through stages.
 *
 * Each stage of a run is a job of its own: with a job type, retries, a place in the history.
 * It has the payload of the run and the result of the stage before.  The job of the next stage
 * is made in the transaction that ends this one, so the run is never in two stages and never
 * in none; a unique index on first_job_id holds the first, and that _end_jobs() is the only way
 * out holds the second.  What the run owns (its idempotency key, the place at the head of its
 * ordering key) goes over from job to job without a gap.
 *
 * A stage that is dead or cancelled is the end of its run, until somebody retries it or lets
 * the run go on from another.  If its cancel was requested and it succeeds all the same, then
 * it is the next stage that is cancelled.
 */

create or replace function rota.define_pipeline(pipeline text, stages jsonb)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_stages text[];
begin
    perform rota._check_name('pipeline', define_pipeline.pipeline);
    perform rota._check_stages(define_pipeline.stages);
    v_stages := array(
        select s.stage from rota._stages(define_pipeline.stages) as s order by s.ordinal
    );

    -- Two at once would make one of both.  Whoever starts or finishes a job only reads.
    lock table rota.pipeline_stages in share row exclusive mode;
    perform rota._retire_stages(define_pipeline.pipeline, v_stages);
    insert into rota.pipeline_stages as p (
        pipeline, stage, ordinal, next_stage, job_type, queue, priority, max_attempts, lease,
        backoff
    )
    select
        define_pipeline.pipeline, s.stage, s.ordinal, v_stages[s.ordinal + 1], s.job_type,
        s.queue, s.priority, s.max_attempts, rota._exact(s.lease), s.backoff
    from rota._stages(define_pipeline.stages) as s
    on conflict on constraint pipeline_stages_pkey do update
    set ordinal = excluded.ordinal,
        next_stage = excluded.next_stage,
        job_type = excluded.job_type,
        queue = excluded.queue,
        priority = excluded.priority,
        max_attempts = excluded.max_attempts,
        lease = excluded.lease,
        backoff = excluded.backoff;
end;
$$;

comment on function rota.define_pipeline(text, jsonb) is
    'Set the stages of a pipeline, given as objects in their order; runs under way go on by '
    'the names of their stages, from one that is left out to the next that is still there; '
    'raises 22023 for a bad stage, naming it.';

/* Take a pipeline apart, and let the stages that do not come again lead to those that do. */
create or replace function rota._retire_stages(pipeline text, stages text[])
    returns void
    language plpgsql
as $$
begin
    with recursive ways (stage, next_stage) as (
        select p.stage, p.next_stage
        from rota.pipeline_stages as p
        where p.pipeline = _retire_stages.pipeline
        union
        select w.stage, p.next_stage
        from ways as w
        join rota.pipeline_stages as p on p.pipeline = _retire_stages.pipeline
          and p.stage = w.next_stage
        where w.next_stage <> all(_retire_stages.stages)
    )
    update rota.pipeline_stages as p
    set ordinal = null,
        next_stage = (
            select w.next_stage
            from ways as w
            where w.stage = p.stage
              and w.next_stage = any(_retire_stages.stages)
        )
    where p.pipeline = _retire_stages.pipeline;
end;
$$;

create or replace function rota.drop_pipeline(pipeline text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_pipeline(drop_pipeline.pipeline);

    update rota.pipeline_stages as p
    set ordinal = null
    where p.pipeline = drop_pipeline.pipeline
      and p.ordinal is not null;
    if not found then
        -- Another who drops it was done just now.
        perform rota._check_pipeline(drop_pipeline.pipeline);
    end if;
end;
$$;

comment on function rota.drop_pipeline(text) is
    'Let no more runs of a pipeline begin; those under way go on to their end; raises 22023 if '
    'it is not defined.';

create or replace function rota.start_pipeline(
    pipeline text,
    payload jsonb default '{}',
    stage text default null,
    run_at timestamptz default null,
    delay interval default null,
    priority integer default 0,
    idempotency_key text default null,
    unique_for interval default null,
    ordering_key text default null,
    skip_dead boolean default false,
    after bigint[] default null,
    before bigint default null,
    if_parent_dead text default 'cancel',
    limit_key text default null
)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_stage rota.pipeline_stages;
begin
    v_stage := rota._pipeline_stage(start_pipeline.pipeline, start_pipeline.stage);
    perform rota._check_priority('priority', start_pipeline.priority);
    perform rota._check_new_job(
        '', v_stage.job_type, start_pipeline.payload, v_stage.queue, start_pipeline.run_at,
        start_pipeline.delay, start_pipeline.priority, null, null, null,
        start_pipeline.idempotency_key);
    perform rota._check_waits(
        '', start_pipeline.ordering_key, start_pipeline.skip_dead, start_pipeline.after,
        start_pipeline.if_parent_dead, start_pipeline.limit_key);

    return rota._enqueue_special(
        jsonb_build_object(
            'job_type', v_stage.job_type, 'payload', start_pipeline.payload,
            'queue', v_stage.queue, 'run_at', start_pipeline.run_at,
            'delay', start_pipeline.delay,
            'priority', coalesce(v_stage.priority, start_pipeline.priority),
            'max_attempts', v_stage.max_attempts, 'lease', v_stage.lease,
            'backoff', v_stage.backoff, 'idempotency_key', start_pipeline.idempotency_key,
            'ordering_key', start_pipeline.ordering_key, 'skip_dead', start_pipeline.skip_dead,
            'after', start_pipeline.after, 'if_parent_dead', start_pipeline.if_parent_dead,
            'limit_key', start_pipeline.limit_key, 'pipeline', v_stage.pipeline,
            'stage', v_stage.stage),
        start_pipeline.unique_for, 'keep', null, null, start_pipeline.after,
        start_pipeline.before);
end;
$$;

comment on function rota.start_pipeline(
    text, jsonb, text, timestamptz, interval, integer, text, interval, text, boolean, bigint[],
    bigint, text, text) is
    'Begin a run of a pipeline and return the id of its first job, or of the job that has its '
    'idempotency_key already, in whatever stage; raises 22023 for a bad argument, RT001 for an '
    'unknown job in after or before, RT013 if before has started, RT003 if it has ended.';

/*
 * Let the runs of ended jobs, given as rows of jobs, go on.  Returns what is over by that: of
 * the ended ids those in no pipeline, and the runs for which nothing follows.
 */
create or replace function rota._advance_runs(
    jobs jsonb,
    ended_ids bigint[],
    status text,
    job_ids bigint[],
    results jsonb,
    next_stages text[]
)
    returns bigint[]
    language plpgsql
as $$
declare
    v_now constant timestamptz := rota.now();
    v_new_ids bigint[];
    v_runs bigint[];
begin
    if not jsonb_path_exists(_advance_runs.jobs, '$[*].pipeline ? (@ != null)') then
        return _advance_runs.ended_ids;
    end if;

    with entered as (
        -- The keys are those of the rows just deleted here, so this waits for nobody.
        insert into rota.jobs as j (
            queue, job_type, payload, priority, max_attempts, lease, backoff,
            idempotency_key, ordering_key, skip_dead, limit_key, bucket, pipeline, stage,
            stage_input, first_job_id, status, run_at, created_at, updated_at
        )
        select
            n.queue, n.job_type, e.payload, coalesce(n.priority, e.priority),
            coalesce(n.max_attempts, q.max_attempts, 10), n.lease, n.backoff,
            e.idempotency_key, e.ordering_key, e.skip_dead, e.limit_key,
            rota._bucket(n.job_type, e.limit_key), e.pipeline, n.stage,
            nullif(_advance_runs.results -> (i.place - 1), 'null'), e.first_job_id, 'queued',
            v_now, v_now, v_now
        from jsonb_populate_recordset(null::rota.jobs, _advance_runs.jobs) as e
        cross join lateral (
            select array_position(_advance_runs.job_ids, e.id) as place
        ) as i
        left join rota.pipeline_stages as s on s.pipeline = e.pipeline and s.stage = e.stage
        join rota.pipeline_stages as n on n.pipeline = e.pipeline
          and n.stage = coalesce(_advance_runs.next_stages[i.place], s.next_stage)
        left join rota.queues as q on q.queue = n.queue
        where _advance_runs.status = 'succeeded'
        order by e.id
        returning j.id, j.first_job_id
    )
    select coalesce(array_agg(e.id), '{}'), coalesce(array_agg(e.first_job_id), '{}')
    into v_new_ids, v_runs
    from entered as e;
    perform rota._ring_for(v_new_ids);

    perform rota._cancel(n.id, 0, 'queued', e.cancel_reason)
    from jsonb_populate_recordset(null::rota.jobs, _advance_runs.jobs) as e
    join unnest(v_new_ids, v_runs) as n (id, first_job_id) on n.first_job_id = e.first_job_id
    where e.cancel_requested_at is not null;

    return array(
        select coalesce(e.first_job_id, i.id)
        from unnest(_advance_runs.ended_ids) as i (id)
        left join jsonb_populate_recordset(null::rota.jobs, _advance_runs.jobs) as e
          on e.id = i.id
        where e.first_job_id is null
           or e.first_job_id <> all(v_runs)
    );
end;
$$;

create or replace function rota.rerun_from(job_id bigint, stage text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_old rota.jobs;
    v_stage rota.pipeline_stages;
    v_job_id bigint;
    v_has_place boolean;
begin
    perform rota._check_job_id(rerun_from.job_id);
    perform rota._check_name('stage', rerun_from.stage);
    v_old := rota._ended_stage(rerun_from.job_id);
    v_stage := rota._pipeline_stage(v_old.pipeline, rerun_from.stage);

    v_has_place := rota._take_place(v_old.ordering_key, v_old.first_job_id);
    v_job_id := (rota._insert_jobs(
        jsonb_build_array(jsonb_build_object(
            'job_type', v_stage.job_type, 'payload', v_old.payload, 'queue', v_stage.queue,
            'priority', coalesce(v_stage.priority, v_old.priority),
            'max_attempts', v_stage.max_attempts, 'lease', v_stage.lease,
            'backoff', v_stage.backoff, 'idempotency_key', v_old.idempotency_key,
            'ordering_key', v_old.ordering_key, 'skip_dead', v_old.skip_dead,
            'limit_key', v_old.limit_key, 'pipeline', v_stage.pipeline,
            'stage', v_stage.stage,
            'stage_input', rota._stage_input(v_old.id, v_old.first_job_id, v_stage),
            'first_job_id', v_old.first_job_id,
            'status', case when v_has_place then 'queued' end)),
        array[nextval('rota.jobs_id_seq')]))[1];
    if v_job_id is null then
        perform rota._raise_taken(v_old.id, to_jsonb(v_old));
    end if;
    update rota.dependencies as d
    set is_failed = false
    where d.parent_id = v_old.first_job_id;
    perform rota._note_new(array[v_job_id]);
    perform rota._ring_for(array[v_job_id]);
    return v_job_id;
end;
$$;

comment on function rota.rerun_from(bigint, text) is
    'Let the run that an ended job belongs to go on from a stage and return the id of the new '
    'job, which gets the latest result of a stage before it; raises RT001 if the job or that '
    'result is not there any more, RT014 if the run is under way, RT007 if its idempotency_key '
    'is taken, 22023.';

/* Whether a run takes the place at the head of its ordering key that its dead job has kept. */
create or replace function rota._take_place(ordering_key text, first_job_id bigint)
    returns boolean
    language plpgsql
as $$
begin
    delete from rota.stuck_keys as s
    where s.ordering_key = _take_place.ordering_key
      and s.job_id in (
        select f.id
        from rota.finished_jobs as f
        where f.first_job_id = _take_place.first_job_id
      );
    return found;
end;
$$;

/* A job of a run that is over; raises RT014 if it is under way. */
create or replace function rota._ended_stage(job_id bigint)
    returns rota.jobs
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_job rota.jobs;
begin
    -- A job that ends or comes back while we look is looked for again.
    for v_round in 1..3 loop
        select j.* into v_job from rota.jobs as j where j.id = _ended_stage.job_id;
        exit when found;
        v_job := (
            select jsonb_populate_record(null::rota.jobs, to_jsonb(f))
            from rota.finished_jobs as f
            where f.id = _ended_stage.job_id
        );
        exit when v_job.id is not null;
    end loop;
    if v_job.id is null then
        perform rota._raise_not_found(_ended_stage.job_id);
    end if;

    if v_job.pipeline is null then
        perform rota._refuse('job_id', format(
            'must be a job of a pipeline, and job %s is in none', _ended_stage.job_id));
    elsif not rota._is_defined(v_job.pipeline) then
        perform rota._refuse('job_id', format(
            'must be a job of a pipeline that is defined, and %L is not', v_job.pipeline));
    elsif exists (select from rota.jobs as j where j.first_job_id = v_job.first_job_id) then
        perform rota._raise_taken(v_job.id, to_jsonb(v_job));
    end if;
    return v_job;
end;
$$;

/*
 * What a stage is given if its run goes on from there: the latest result of a stage before it,
 * or what it was given itself if that was later.
 */
create or replace function rota._stage_input(
    job_id bigint,
    first_job_id bigint,
    stage rota.pipeline_stages
)
    returns jsonb
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_input jsonb;
begin
    select case when f.stage = stage.stage then f.stage_input else f.result end
    into v_input
    from rota.finished_jobs as f
    left join rota.pipeline_stages as p on p.pipeline = f.pipeline and p.stage = f.stage
    where f.first_job_id = _stage_input.first_job_id
      and (f.stage = stage.stage or f.status = 'succeeded' and p.ordinal < stage.ordinal)
    order by
        case when f.stage = stage.stage then f.created_at else f.finished_at end desc,
        f.id desc
    limit 1;

    -- Without the first job nobody knows what else is missing.
    if not found and stage.ordinal > 1 and not exists (
        select from rota.finished_jobs as f where f.id = _stage_input.first_job_id
    ) then
        if rota._run_status(_stage_input.first_job_id) = 'live' then
            -- It was retried just now.
            perform rota._raise_taken(
            _stage_input.job_id,
            jsonb_build_object('first_job_id', _stage_input.first_job_id));
        end if;
        raise exception using
            errcode = 'RT001',
            message = format('job %s: no result of a stage before %L is left of its run',
                _stage_input.job_id, stage.stage),
            hint = 'Retention has removed it; let the run go on from its first stage.';
    end if;
    return v_input;
end;
$$;

/* What became of a run: live, or the status of the job that was its last. */
create or replace function rota._run_status(first_job_id bigint)
    returns text
    language plpgsql
    stable
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
begin
    if exists (
        select from rota.jobs as j where j.first_job_id = _run_status.first_job_id
    ) then
        return 'live';
    end if;
    return (
        select f.status
        from rota.finished_jobs as f
        where f.first_job_id = _run_status.first_job_id
        order by f.finished_at desc, f.id desc
        limit 1
    );
end;
$$;

/* The same, and a run that is live does not end before we do; null if it is forgotten. */
create or replace function rota._hold_run(first_job_id bigint)
    returns text
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_status text;
begin
    loop
        v_status := rota._run_status(_hold_run.first_job_id);
        exit when v_status is distinct from 'live';
        perform
        from rota.jobs as j
        where j.first_job_id = _hold_run.first_job_id
        for key share;
        -- Or its job has ended while we waited for it, and another may follow.
        exit when found;
    end loop;
    return v_status;
end;
$$;

/* One stage of a pipeline by its name, or the first. */
create or replace function rota._pipeline_stage(pipeline text, stage text)
    returns rota.pipeline_stages
    language plpgsql
as $$
declare
    v_stage rota.pipeline_stages;
begin
    perform rota._check_pipeline(_pipeline_stage.pipeline);
    select p.*
    into v_stage
    from rota.pipeline_stages as p
    where p.pipeline = _pipeline_stage.pipeline
      and case
        when _pipeline_stage.stage is null then p.ordinal = 1
        else p.ordinal is not null and p.stage = _pipeline_stage.stage
      end;
    if not found then
        perform rota._refuse('stage', format('must be a stage of the pipeline %L, got %L',
            _pipeline_stage.pipeline, left(_pipeline_stage.stage, 80)));
    end if;
    return v_stage;
end;
$$;

create or replace function rota._check_pipeline(pipeline text)
    returns void
    language plpgsql
as $$
begin
    perform rota._check_name('pipeline', _check_pipeline.pipeline);
    if not rota._is_defined(_check_pipeline.pipeline) then
        perform rota._refuse('pipeline', format('%L is not defined', _check_pipeline.pipeline));
    end if;
end;
$$;

create or replace function rota._is_defined(pipeline text)
    returns boolean
    language plpgsql
    stable
as $$
begin
    return exists (
        select
        from rota.pipeline_stages as p
        where p.pipeline = _is_defined.pipeline
          and p.ordinal is not null
    );
end;
$$;

/* Whether a running job may go on to a stage; one that is lost is told so by its finish. */
create or replace function rota._check_next_stage(
    argument text,
    job_id bigint,
    lease_token bigint,
    next_stage text
)
    returns void
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_pipeline text;
begin
    select j.pipeline
    into v_pipeline
    from rota.jobs as j
    where j.id = _check_next_stage.job_id
      and j.lease_token = _check_next_stage.lease_token
      and j.status = 'running';
    if not found then
        return;
    elsif v_pipeline is null then
        perform rota._refuse(_check_next_stage.argument, format(
            'goes with a job of a pipeline only, and job %s is in none',
            _check_next_stage.job_id));
    elsif _check_next_stage.next_stage <> 'end' and not exists (
        select
        from rota.pipeline_stages as p
        where p.pipeline = v_pipeline
          and p.stage = _check_next_stage.next_stage
          and p.ordinal is not null
    ) then
        perform rota._refuse(_check_next_stage.argument, format(
            'must be end or a stage of the pipeline %L, got %L', v_pipeline,
            left(_check_next_stage.next_stage, 80)));
    end if;
end;
$$;

create or replace function rota._check_next_stages(
    job_ids bigint[],
    lease_tokens bigint[],
    next_stages text[]
)
    returns void
    language plpgsql
as $$
begin
    if array_ndims(_check_next_stages.next_stages) > 1
      or array_lower(_check_next_stages.next_stages, 1) <> 1
      or cardinality(_check_next_stages.next_stages)
        <> cardinality(_check_next_stages.job_ids) then
        perform rota._refuse('next_stages', format(
            'must be a plain list as long as job_ids (%s)',
            cardinality(_check_next_stages.job_ids)));
    end if;
    perform rota._check_next_stage(
        format('next_stages[%s]', n.ordinal), n.job_id, n.lease_token, n.next_stage)
    from unnest(
        _check_next_stages.job_ids, _check_next_stages.lease_tokens,
        _check_next_stages.next_stages
    ) with ordinality as n (job_id, lease_token, next_stage, ordinal)
    where n.next_stage is not null;
end;
$$;

/* The objects as typed rows. */
create or replace function rota._stages(stages jsonb)
    returns table (
        ordinal bigint,
        stage text,
        job_type text,
        queue text,
        priority integer,
        max_attempts integer,
        lease interval,
        backoff jsonb
    )
    language plpgsql
    stable
as $$
begin
    return query
    select
        s.ordinal, s.stage, s.job_type, coalesce(s.queue, 'default'), s.priority,
        s.max_attempts, s.lease, nullif(s.backoff, 'null')
    from rows from (
        jsonb_to_recordset(_stages.stages) as (
            stage text, job_type text, queue text, priority integer, max_attempts integer,
            lease interval, backoff jsonb
        )
    ) with ordinality as s (
        stage, job_type, queue, priority, max_attempts, lease, backoff, ordinal
    );
end;
$$;

create or replace function rota._check_stages(stages jsonb)
    returns void
    language plpgsql
as $$
declare
    c_keys constant text[] := array[
        'stage', 'job_type', 'queue', 'priority', 'max_attempts', 'lease', 'backoff'];
begin
    if jsonb_typeof(_check_stages.stages) is distinct from 'array'
      or jsonb_array_length(_check_stages.stages) not between 1 and 1000 then
        perform rota._refuse('stages', 'must be an array of 1 to 1000 objects');
    end if;
    perform case jsonb_typeof(e.stage)
        when 'object' then rota._refuse(
            format('stages[%s]', e.ordinal), format('has an unknown key %L', (
                select left(k.key, 80) from jsonb_each(e.stage - c_keys) as k limit 1)))
        else rota._refuse(format('stages[%s]', e.ordinal), 'must be an object')
    end
    from jsonb_array_elements(_check_stages.stages) with ordinality as e (stage, ordinal)
    where case jsonb_typeof(e.stage) when 'object' then e.stage - c_keys <> '{}' else true end;

    begin
        perform rota._check_stage(format('stages[%s].', s.ordinal), s.stage),
            rota._check_new_job(
                format('stages[%s].', s.ordinal), s.job_type, '{}', s.queue, null, null,
                coalesce(s.priority, 0), s.max_attempts, s.lease, s.backoff, null)
        from rota._stages(_check_stages.stages) as s;
    exception
        when data_exception then
            perform rota._refuse(format('stages[%s].%s', f.ordinal, f.key), f.problem)
            from (
                select e.ordinal, k.key, rota._cast_problem(k.key, k.value) as problem
                from jsonb_array_elements(_check_stages.stages)
                    with ordinality as e (stage, ordinal)
                cross join jsonb_each(e.stage) as k
            ) as f
            where f.problem is not null
            limit 1;
            raise;
    end;

    perform rota._refuse(
        format('stages[%s].stage', max(s.ordinal)), format('%L is there twice', s.stage))
    from rota._stages(_check_stages.stages) as s
    group by s.stage
    having count(*) > 1;
end;
$$;

create or replace function rota._check_stage(prefix text, stage text)
    returns void
    language plpgsql
as $$
begin
    perform rota._check_name(_check_stage.prefix || 'stage', _check_stage.stage);
    if _check_stage.stage = 'end' then
        perform rota._refuse(_check_stage.prefix || 'stage',
            'must not be end, which as a next_stage means none');
    end if;
end;
$$;
