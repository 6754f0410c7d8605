/*
 * jobs/pauses.sql -- pause a queue, a job type or everything.
 *
 * A pause is a row: of a queue, of a job type in one queue or in all, or of everything.  It
 * stops claims only: jobs still come in, and running ones finish.  Every reader compares until
 * with the clock, so a pause ends at its time without any call.
 *
 * A claim leaves a paused queue out.  A million jobs of a paused type may stand in front of
 * others, so a claim that finds one takes it out of its lane: hold is then the word pause and
 * the name of the pause.  Maintenance lets such jobs in when the pause is over.  A claim may
 * not see that it is over already, so it leaves a check when it holds jobs; so does the
 * operator who resumes, and each pause with an end has a check that is due then.
 */

create or replace function rota.pause_queue(
    queue text, reason text default null, until timestamptz default null
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_known_queue(queue);
    perform rota._check_queues('operator', array[queue]);
    perform rota._pause(queue, null, reason, until);
end $$;

comment on function rota.pause_queue is
    'Stop claims from a queue until this time, or until resume_queue(), recording who paused '
    'it and why; raises RT004 if it is unknown, RT016 if it moves to another database, '
    '22023.';

create or replace function rota.resume_queue(queue text) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_known_queue(queue);
    perform rota._check_queues('operator', array[queue]);
    return rota._resume(queue, null);
end $$;

comment on function rota.resume_queue is
    'Let jobs of a queue be claimed again and return whether it was paused; raises RT004 if '
    'it is unknown, RT016 if it moves to another database, 22023.';

create or replace function rota.pause_type(
    job_type text, queue text default null, reason text default null,
    until timestamptz default null
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_name('job_type', job_type);
    if queue is not null then perform rota._check_known_queue(queue); end if;
    perform rota._check_queues('operator', array[coalesce(queue, '*')]);
    perform rota._pause(queue, job_type, reason, until);
end $$;

comment on function rota.pause_type is
    'Stop claims of a job type, in one queue or in all, until this time or until '
    'resume_type(), recording who paused it and why; raises RT004 for an unknown queue, '
    '22023.';

create or replace function rota.resume_type(job_type text, queue text default null)
    returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_name('job_type', job_type);
    if queue is not null then perform rota._check_known_queue(queue); end if;
    perform rota._check_queues('operator', array[coalesce(queue, '*')]);
    return rota._resume(queue, job_type);
end $$;

comment on function rota.resume_type is
    'Let jobs of a type be claimed again that was paused in this queue, or in all if that is '
    'null, and return whether it was paused there; raises RT004 for an unknown queue, 22023.';

create or replace function rota.pause_all(
    reason text default null, until timestamptz default null
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_queues('operator', '{*}');
    perform rota._pause(null, null, reason, until);
end $$;

comment on function rota.pause_all is
    'Stop all claims until this time, or until resume_all(), recording who paused it and why: '
    'for example in a restored copy of production; raises 22023.';

create or replace function rota.resume_all() returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_queues('operator', '{*}');
    return rota._resume(null, null);
end $$;

comment on function rota.resume_all is
    'End what pause_all() began and return whether all was paused; queues and job types that '
    'were paused separately stay paused.';

/* How a pause is called: all, or what it is of. */
create or replace function rota._pause_name(queue text, job_type text)
    returns text language plpgsql immutable as $$
begin
    return case when job_type is not null then concat_ws(' ', 'type', job_type, 'of ' || queue)
        else coalesce('queue ' || queue, 'all') end;
end $$;

/* Pause it.  An operator who pauses again changes the end, and the reason if one is given.  A
 * breaker and a rule leave the pause of any other as it is. */
create or replace function rota._pause(
    queue text, job_type text, reason text, until timestamptz, set_by text default 'operator'
) returns void language plpgsql as $$
declare
    c_name constant text := rota._pause_name(queue, job_type);
begin
    if until is not null then perform rota._check_run_at('until', until); end if;
    -- A rule may come to it when its time is over.
    perform rota._refuse('until', format('must be later than now, got %s', until))
    where set_by = 'operator' and until <= rota.now();
    -- One that is over is as none.
    delete from rota.pauses as p where p.pause_name = c_name and p.until <= rota.now();
    insert into rota.pauses as p (pause_name, queue, job_type, set_by, reason, until)
    values (c_name, _pause.queue, _pause.job_type, _pause.set_by,
        rota._cut(_pause.reason, 1000), _pause.until)
    on conflict on constraint pauses_pkey do update
    set set_by = excluded.set_by, until = excluded.until,
        -- That of a breaker says when it tries again.
        reason = coalesce(excluded.reason,
            case when p.set_by = excluded.set_by then p.reason end),
        paused_at = case when p.set_by = excluded.set_by then p.paused_at
            else excluded.paused_at end,
        paused_by = case when p.set_by = excluded.set_by then p.paused_by
            else excluded.paused_by end
    where excluded.set_by = 'operator' or p.set_by = excluded.set_by;
    -- Now that this has waited for a move that has just begun.
    if job_type is null then perform rota._check_stays(queue, 'another pause'); end if;
    perform rota._add_checks('pause', array[c_name], _pause.until)
    where _pause.until is not null;
end $$;

/* End a pause, or only one that was set by this, and return whether there was one. */
create or replace function rota._resume(queue text, job_type text, set_by text default null)
    returns boolean language plpgsql as $$
declare
    c_name constant text := rota._pause_name(queue, job_type);
    v_was_paused boolean;
begin
    delete from rota.pauses as p
    where p.pause_name = c_name and p.set_by = coalesce(_resume.set_by, p.set_by)
    returning coalesce(p.until > rota.now(), true) into v_was_paused;
    -- Else the trigger leaves it.
    if not found then perform rota._add_checks('pause', array[c_name]); end if;
    if job_type is null then perform rota._check_stays(queue, 'claims'); end if;
    perform rota._notify_paused(queue);
    return coalesce(v_was_paused, false);
end $$;

/* Wake the workers of a queue, or of all that workers have said they take jobs of. */
create or replace function rota._notify_paused(queue text)
    returns void language plpgsql as $$
begin
    perform rota._notify(q.queue, 16)
    from (
        select _notify_paused.queue as queue where _notify_paused.queue is not null
        union
        select unnest(w.queues) from rota.workers as w where _notify_paused.queue is null
    ) as q;
end $$;

/* Whether nothing at all is to be claimed from a queue, or no job of a type if one is given. */
create or replace function rota._is_paused(
    queue text, due timestamptz, job_type text default null
) returns boolean language plpgsql stable as $$
begin
    return exists (
        select from rota.pauses as p
        where p.pause_name in ('all', 'queue ' || _is_paused.queue,
                'type ' || _is_paused.job_type,
                concat('type ', _is_paused.job_type, ' of ', _is_paused.queue))
          and (p.until is null or p.until > _is_paused.due)
    );
end $$;

/* Let up to a thousand jobs into their lanes if the pause that held them is over. */
create or replace function rota._check_pause(pause_name text)
    returns boolean language plpgsql as $$
declare
    v_pause rota.pauses; v_ids bigint[];
begin
    select p.* into v_pause from rota.pauses as p where p.pause_name = _check_pause.pause_name;
    if v_pause.until <= rota.now() then
        delete from rota.pauses as p
        where p.ctid = any(array(
            select d.ctid from rota.pauses as d
            where d.pause_name = _check_pause.pause_name and d.until <= rota.now()
            for update skip locked
        ));
        if v_pause.job_type is null then perform rota._notify_paused(v_pause.queue); end if;
    elsif v_pause.pause_name is not null then
        return true;
    end if;

    v_ids := array(
        select j.id from rota.jobs as j
        where j.hold = 'pause ' || _check_pause.pause_name and j.hold <> 'time'
          and j.status in ('queued', 'failed')
        order by j.queue, j.job_type, coalesce(j.own_lane, j.priority),
            coalesce(j.own_place, j.run_at), j.id limit 1000 for update skip locked
    );
    if v_ids = '{}' then
        -- Those that another session has locked are asked for again, and so is the pause.
        return not exists (
            select from rota.jobs as j
            where j.hold = 'pause ' || _check_pause.pause_name
              and j.hold <> 'time' and j.status in ('queued', 'failed')
        ) and not exists (
            select from rota.pauses as p where p.pause_name = _check_pause.pause_name
        );
    end if;
    v_ids := rota._let_in(v_ids, 'pause ' || pause_name, keep_places => true);
    if v_ids = '{}' then return false; end if;
    perform rota._notify_for(v_ids);
    perform rota._add_checks('pause', array[pause_name]);
    return true;
end $$;

/* Let jobs that are held for that reason, and that the caller has locked, into their lanes, and
 * return which; if one cannot be let in the others are, one by one. */
create or replace function rota._let_in(
    job_ids bigint[], hold text, keep_places boolean default false
) returns bigint[] language plpgsql as $$
declare
    v_job_id bigint;
begin
    begin
        perform rota._enter_lanes(job_ids, keep_places => keep_places);
    exception when others then
        raise warning 'held jobs are let in one by one: %', sqlerrm;
        foreach v_job_id in array job_ids loop
            begin
                perform rota._enter_lanes(array[v_job_id], keep_places => keep_places);
            exception when others then
                raise warning 'job % cannot be let in: %', v_job_id, sqlerrm;
            end;
        end loop;
    end;
    return array(
        select j.id from rota.jobs as j
        -- A trigger may have kept one as it was, without an error.
        where j.id = any(_let_in.job_ids) and j.hold is distinct from _let_in.hold
    );
end $$;

/* A typing error in the name of a queue, at the moment one wants to stop it, must not pass. */
create or replace function rota._check_known_queue(queue text)
    returns void language plpgsql as $$
begin
    perform rota._check_name('queue', queue);
    if exists (select from rota.configured_names as c where c.name = _check_known_queue.queue)
      or exists (select from rota.workers as w where _check_known_queue.queue = any(w.queues))
      or exists (select from rota.job_definitions as d where d.queue = _check_known_queue.queue)
      or exists (select from rota.pipeline_stages as g where g.queue = _check_known_queue.queue)
      or exists (select from rota.finished_jobs as f where f.queue = _check_known_queue.queue)
      -- Last, since no index has the queues of all.
      or exists (select from rota.jobs as j where j.queue = _check_known_queue.queue)
    then
        return;
    end if;

    raise exception using errcode = 'RT004',
        message = format('queue %s is unknown: it has no settings, schedules, stages, jobs or '
            'workers', queue),
        hint = 'Check its name in rota.queue_stats, or make it known with set_queue().';
end $$;
