/*
 * schedules/definitions.sql -- add a schedule, change it, stop it.
 *
 * schedule_job() gets all of a definition, so every deployment may call it, also many at once:
 * it does not rewrite an unchanged one.
 *
 * A change of a definition locks its row, and so does a tick that enqueues its jobs: the
 * change comes wholly before or wholly after the tick.  It first enqueues the jobs that the
 * old definition had due, so that a late tick loses none of them.
 *
 * A program that declares schedules in its code names itself as their source.  So it finds
 * those that its code no longer has, and leaves schedules of other programs alone.
 *
 * For `after 10 minutes` the end of the last job decides.  While that job is live nothing is
 * planned; a call that leaves it so adds a check, since the job may be about to end.
 */

create or replace function rota.schedule_job(
    name text, schedule text, job_type text, payload jsonb default '{}',
    queue text default 'default', time_zone text default 'UTC', priority integer default 0,
    max_attempts integer default null, lease interval default null, backoff jsonb default null,
    catch_up text default 'one', catch_up_window interval default null,
    catch_up_max integer default 100, overlap text default 'allow', jitter interval default '0',
    starts_at timestamptz default null, ends_at timestamptz default null,
    source text default null, time_limit interval default null, headers jsonb default null
) returns table (outcome text, next_run_at timestamptz) language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_name('name', name);
    perform rota._check_new_job('', job_type, payload, queue, null, null, priority,
        max_attempts, lease, backoff, null, time_limit, headers => headers);
    if rota.next_run(schedule, time_zone) is null then
        perform rota._refuse_schedule(schedule, format(
            'names only times that the clocks of %s always skip', time_zone));
    end if;
    perform rota._check_choice('catch_up', catch_up, '{skip,one,all}');
    perform rota._check_number('catch_up_max', catch_up_max, 1, 1000);
    perform rota._check_choice('overlap', overlap, '{allow,skip,queue}');
    perform rota._check_interval('catch_up_window', catch_up_window, '1 second', '100 years',
        true);
    perform rota._check_interval('jitter', jitter, '0', '1 day');
    if starts_at is not null then perform rota._check_run_at('starts_at', starts_at); end if;
    if ends_at is not null then perform rota._check_run_at('ends_at', ends_at); end if;
    if ends_at <= starts_at then
        perform rota._refuse('ends_at', 'must be later than starts_at');
    end if;
    perform rota._check_queues('operator', array[queue]);
    if source is not null then perform rota._check_name('source', source); end if;

    return query select d.outcome, d.next_run_at
    from rota._put_definition(jsonb_populate_record(null::rota.job_definitions,
        jsonb_build_object('name', name, 'job_type', job_type, 'queue', queue, 'payload',
            payload, 'schedule', schedule, 'time_zone', time_zone, 'priority', priority,
            'max_attempts', max_attempts, 'lease', rota._exact(lease), 'backoff', backoff,
            'catch_up', catch_up, 'catch_up_window', rota._exact(catch_up_window),
            'catch_up_max', catch_up_max, 'overlap', overlap, 'jitter', rota._exact(jitter),
            'starts_at', starts_at, 'ends_at', ends_at, 'source', source,
            'time_limit', rota._exact(time_limit), 'headers', headers))) as d;
    -- After the write, for which a move waits that begins later.
    perform rota._check_stays(queue, 'a schedule');
end $$;

comment on function rota.schedule_job is
    'Make a job at each time that a schedule names, or change the schedule of this name, and '
    'return created, changed or unchanged, and the next time; raises RT006 for a bad schedule, '
    'RT016 if the queue moves to another database, 22023, 09000 if a trigger removes the row.';

create or replace function rota._put_definition(new rota.job_definitions)
    returns table (outcome text, next_run_at timestamptz) language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    v_old rota.job_definitions; v_changed rota.job_definitions; v_changed_at timestamptz;
begin
    for v_try in 1..100 loop
        -- What is so already is neither written nor waited for.
        select d.* into v_old from rota.job_definitions as d where d.name = new.name;
        if not found then
            new.anchored_at := coalesce(new.starts_at, v_now);
            next_run_at := rota._plan_next(new, v_now);
            insert into rota.job_definitions (name, job_type, queue, payload, schedule, source,
                time_zone, priority, max_attempts, lease, time_limit, headers, backoff,
                catch_up, catch_up_window, catch_up_max, overlap, jitter, starts_at, ends_at,
                anchored_at, next_run_at, created_at, updated_at)
            values (new.name, new.job_type, new.queue, new.payload, new.schedule, new.source,
                new.time_zone, new.priority, new.max_attempts, new.lease, new.time_limit,
                new.headers, new.backoff, new.catch_up, new.catch_up_window, new.catch_up_max,
                new.overlap, new.jitter, new.starts_at, new.ends_at, new.anchored_at,
                _put_definition.next_run_at, v_now, v_now)
            on conflict do nothing;
            outcome := case when found then 'created' end;
            -- Else another session has just taken the name.
            exit when found;
        elsif (rota._changed_by(new, v_old)).name is null then
            outcome := 'unchanged';
            next_run_at := v_old.next_run_at;
            exit;
        end if;

        select d.* into v_old from rota.job_definitions as d where d.name = new.name for update;
        v_changed := case when found then rota._changed_by(new, v_old) end;
        if v_changed.name is not null then
            outcome := 'changed';
            -- First, or a time that passes meanwhile is neither late nor planned.
            v_changed_at := rota.now();
            if v_old.next_run_at <= v_changed_at then
                begin
                    perform rota._enqueue_one(v_old.name, v_changed_at);
                exception when raise_exception then
                    -- What a trigger has refused stays due: the change may be what mends it.
                    null;
                end;
                select d.* into v_old from rota.job_definitions as d where d.name = new.name;
            end if;
            next_run_at := rota._change_definition(v_changed, v_old, v_changed_at);
            exit;
        end if;
    end loop;
    if outcome is null then perform rota._raise_swallowed('the schedule'); end if;
    return next;
end $$;

/* What *new* makes of the definition *old*; null if both say the same: the rest of a row says
 * how far it has come.  It keeps its source; refused if that is another one, or if the old one
 * is of a queue that an operator is kept from. */
create or replace function rota._changed_by(new rota.job_definitions, old rota.job_definitions)
    returns rota.job_definitions language plpgsql as $$
declare
    -- The kind is generated, and so is not there before the row is written.
    c_progress constant text[] := '{kind,is_enabled,disabled_at,disabled_by,last_error,'
        'anchored_at,next_run_at,last_run_at,last_job_id,created_at,updated_at}'::text[];
begin
    perform rota._check_queues('operator', array[old.queue], format('schedule %L', old.name));
    if new.source <> old.source then
        perform rota._refuse('source', format(
            'must be %L, which has put in schedule %L, got %L', old.source, old.name,
            new.source));
    end if;
    new.source := coalesce(new.source, old.source);
    return case when to_jsonb(new) - c_progress <> to_jsonb(old) - c_progress then new end;
end $$;

/* Make the definition *old*, whose row the caller holds, say what *new* says. */
create or replace function rota._change_definition(
    new rota.job_definitions, old rota.job_definitions, changed_at timestamptz
) returns timestamptz language plpgsql as $$
declare
    v_has_new_times constant boolean :=
        (new.schedule, new.time_zone, new.starts_at, new.ends_at)
            is distinct from (old.schedule, old.time_zone, old.starts_at, old.ends_at);
    -- What an error has disabled is mended by a change; what a person has is not.
    v_is_enabled constant boolean := old.is_enabled or old.disabled_by is null;
    v_next_run_at timestamptz := old.next_run_at;
begin
    new.anchored_at := coalesce(new.starts_at, case when new.schedule = old.schedule
        and old.starts_at is null then old.anchored_at else changed_at end);
    new.last_run_at := old.last_run_at;
    new.last_job_id := old.last_job_id;
    if v_is_enabled and (v_has_new_times or not old.is_enabled) then
        v_next_run_at := rota._plan_next(new, changed_at);
    end if;

    update rota.job_definitions as d
    set job_type = new.job_type, queue = new.queue, payload = new.payload,
        schedule = new.schedule, time_zone = new.time_zone, priority = new.priority,
        max_attempts = new.max_attempts, lease = new.lease, time_limit = new.time_limit,
        headers = new.headers, backoff = new.backoff,
        catch_up = new.catch_up, catch_up_window = new.catch_up_window,
        catch_up_max = new.catch_up_max, overlap = new.overlap, jitter = new.jitter,
        starts_at = new.starts_at, ends_at = new.ends_at, source = new.source,
        anchored_at = new.anchored_at, next_run_at = v_next_run_at, is_enabled = v_is_enabled,
        disabled_at = case when not v_is_enabled then old.disabled_at end,
        disabled_by = case when not v_is_enabled then old.disabled_by end,
        last_error = case when not v_is_enabled then old.last_error end, updated_at = changed_at
    where d.name = old.name;
    if v_is_enabled and v_next_run_at is null then
        -- Its last job may be about to end, without knowing that a schedule waits for that.
        perform rota._add_checks('schedule', array[new.name]);
    end if;
    return v_next_run_at;
end $$;

create or replace function rota.unschedule_job(name text)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._hold_definition(name);
    delete from rota.job_definitions as d where d.name = unschedule_job.name;
end $$;

comment on function rota.unschedule_job is
    'Remove a schedule; the jobs that it has made stay; raises RT005, 22023.';

create or replace function rota.enable_schedule(name text)
    returns timestamptz language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
declare
    v_definition rota.job_definitions; v_next_run_at timestamptz;
begin
    v_definition := rota._hold_definition(name);
    if v_definition.is_enabled then return v_definition.next_run_at; end if;

    v_next_run_at := rota._plan_next(v_definition, rota.now());
    update rota.job_definitions as d
    set is_enabled = true, disabled_at = null, disabled_by = null, last_error = null,
        next_run_at = v_next_run_at, updated_at = rota.now()
    where d.name = enable_schedule.name;
    if v_next_run_at is null then perform rota._add_checks('schedule', array[name]); end if;
    return v_next_run_at;
end $$;

comment on function rota.enable_schedule is
    'Let a disabled schedule make jobs again and return its next time, which is later than '
    'now: missed times are not made up; raises RT005, RT006 if its text is no longer valid, '
    '22023.';

create or replace function rota.disable_schedule(name text)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._hold_definition(name);
    update rota.job_definitions as d
    set is_enabled = false, disabled_at = coalesce(d.disabled_at, rota.now()),
        disabled_by = session_user, next_run_at = null, updated_at = rota.now()
    where d.name = disable_schedule.name and d.disabled_by is null;
end $$;

comment on function rota.disable_schedule is
    'Stop a schedule from making jobs until enable_schedule(); raises RT005, 22023.';

/* The row of a schedule, which is not there for an operator that is kept from its queue. */
create or replace function rota._hold_definition(name text)
    returns rota.job_definitions language plpgsql as $$
declare
    v_definition rota.job_definitions;
begin
    select d.* into v_definition from rota.job_definitions as d
    where d.name = _hold_definition.name for update;
    if not found or v_definition.queue <> all(rota._allowed_queues('operator')) then
        perform rota._raise_no_schedule(name);
    end if;
    return v_definition;
end $$;

create or replace function rota.run_schedule_now(name text)
    returns bigint language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_definition rota.job_definitions; v_parsed rota.parsed_schedule; v_time timestamptz;
    v_job_id bigint;
begin
    v_definition := rota._hold_definition(name);
    v_parsed := rota._parse_schedule(v_definition.schedule);
    if rota._live_definitions(array[v_definition.name]) <> '{}' then
        raise exception using errcode = 'RT014',
            message = format('schedule %L: a run of it is in progress, in job %s',
                v_definition.name, (
                    select max(j.id) from rota.jobs as j
                    where j.definition = v_definition.name)),
            hint = 'Wait for the end of that job, or cancel it first.';
    end if;

    -- Now, or the first moment after it that is not a planned time and has no job yet.
    v_time := rota.now();
    while exists (
        select from rota.occurrences as f
        where f.definition = v_definition.name and f.scheduled_for = v_time
    ) or (v_parsed.kind <> 'after' and v_time is not distinct from rota._next_occurrence(
        v_parsed, v_definition.time_zone, v_time - interval '1 microsecond',
        v_definition.anchored_at)
    ) or v_time is not distinct from v_definition.next_run_at loop
        v_time := v_time + interval '1 microsecond';
    end loop;
    v_job_id := (rota._new_ids(1))[1];
    insert into rota.occurrences (definition, scheduled_for, outcome, job_id, recorded_at)
    values (v_definition.name, v_time, 'enqueued', v_job_id, rota.now());
    perform rota._make_jobs(array[v_definition.name], array[v_time], array[v_job_id], true,
        rota.now());
    update rota.job_definitions as d
    set last_job_id = v_job_id,
        next_run_at = case when v_parsed.kind <> 'after' then d.next_run_at end
    where d.name = v_definition.name;
    perform rota._audit('run_schedule_now', jsonb_build_object('name', v_definition.name,
        'queue', v_definition.queue, 'job_type', v_definition.job_type), array[v_job_id]);
    return v_job_id;
end $$;

comment on function rota.run_schedule_now is
    'Make a job of a schedule now, even of a disabled one, in addition to its planned ones, '
    'and return its id; raises RT014 if one is live and only one may be, RT005, RT006 if its '
    'text is no longer valid, 22023.';
