/*
 * jobs/queues.sql -- settings of a queue, and the brake.
 *
 * A queue needs no row: it exists as soon as somebody enqueues to it, with the defaults.  A
 * row holds what differs.  Pausing stops claims only: jobs still come in, and running ones go
 * on to their end.
 */

create or replace function rota.set_queue(
    queue text,
    lease interval default null,
    max_attempts integer default null,
    backoff jsonb default null,
    keep_finished interval default null,
    keep_dead interval default null,
    ageing interval default null,
    time_limit interval default null,
    reset boolean default false
)
    returns void language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_name('queue', queue);
    perform rota._check_lease('lease', lease);
    perform rota._check_lease('time_limit', time_limit);
    if max_attempts < 1 then
        perform rota._refuse('max_attempts',
            format('must be at least 1, got %s', max_attempts));
    end if;
    perform rota._check_backoff('backoff', backoff);
    perform rota._check_interval('keep_finished', keep_finished, '0', '100 years', true);
    perform rota._check_interval('keep_dead', keep_dead, '0', '100 years', true);
    perform rota._check_interval('ageing', ageing, '1 second', '30 days', true);
    perform rota._check_given('reset', reset is not null);

    insert into rota.queues as q (queue, lease, max_attempts, backoff, keep_finished, keep_dead,
        ageing, time_limit)
    values (set_queue.queue, rota._exact(set_queue.lease), set_queue.max_attempts,
        set_queue.backoff, set_queue.keep_finished, set_queue.keep_dead,
        rota._exact(set_queue.ageing), rota._exact(set_queue.time_limit))
    on conflict on constraint queues_pkey do update
    set lease = coalesce(excluded.lease, case when not reset then q.lease end),
        max_attempts = coalesce(excluded.max_attempts,
            case when not reset then q.max_attempts end),
        backoff = coalesce(excluded.backoff, case when not reset then q.backoff end),
        keep_finished = coalesce(excluded.keep_finished,
            case when not reset then q.keep_finished end),
        keep_dead = coalesce(excluded.keep_dead, case when not reset then q.keep_dead end),
        ageing = coalesce(excluded.ageing, case when not reset then q.ageing end),
        time_limit = coalesce(excluded.time_limit, case when not reset then q.time_limit end),
        updated_at = rota.now();
    if ageing is not null or reset then
        -- Jobs that wait take the places that the new setting gives them.
        perform rota._add_checks('queue', array[queue]);
    end if;
end;
$$;

comment on function rota.set_queue is
    'Change settings of a queue: null leaves one as it is, reset puts the others back to their '
    'defaults; raises 22023 for a bad argument.';

create or replace function rota.pause_queue(queue text, reason text default null)
    returns void language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_known_queue(queue);

    insert into rota.queues as q (queue, is_paused, paused_at, paused_by, pause_reason)
    values (pause_queue.queue, true, rota.now(), session_user, left(pause_queue.reason, 1000))
    on conflict on constraint queues_pkey do update
    set is_paused = true, paused_at = coalesce(q.paused_at, excluded.paused_at),
        paused_by = coalesce(q.paused_by, excluded.paused_by),
        pause_reason = coalesce(excluded.pause_reason, q.pause_reason), updated_at = rota.now();
end;
$$;

comment on function rota.pause_queue is
    'Stop claims from a queue until resume_queue(), noting who and why; raises RT004 if it has '
    'neither settings nor jobs.';

create or replace function rota.resume_queue(queue text)
    returns void language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_known_queue(queue);

    update rota.queues as q
    set is_paused = false, paused_at = null, paused_by = null, pause_reason = null,
        updated_at = rota.now()
    where q.queue = resume_queue.queue and q.is_paused;
    perform rota._notify(queue);
end;
$$;

comment on function rota.resume_queue is
    'Let jobs of a queue be claimed again; raises RT004 if it has neither settings nor jobs.';

/* A typing error in the name of a queue, at the moment one wants to stop it, must not pass. */
create or replace function rota._check_known_queue(queue text)
    returns void language plpgsql as $$
begin
    perform rota._check_name('queue', queue);
    if exists (select from rota.queues as q where q.queue = _check_known_queue.queue)
      or exists (select from rota.jobs as j where j.queue = _check_known_queue.queue) then
        return;
    end if;

    raise exception using
        errcode = 'RT004',
        message = format('queue %s is unknown: it has no settings and no jobs', queue),
        hint = 'Check its name in rota.queue_stats, or make it known with set_queue().';
end;
$$;
