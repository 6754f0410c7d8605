/*
 * maintenance/wakeups.sql -- wake workers that sleep, and nobody else.
 *
 * NOTIFY takes a lock of the whole cluster at each commit, so it is sent only when somebody
 * sleeps.  Who sleeps is told by advisory locks that the connection of a sleeping worker holds:
 * no row is written, and a worker that dies vanishes by itself.  A queue has three kinds:
 *
 *   the bell    held shared by everybody who sleeps.  Whoever brings a job tries to lock it
 *               alone: if that succeeds nobody sleeps, and that was all it costs.
 *   the doors   16, each held by one sleeper, who listens to the channel of his door.  The
 *               lowest that is held is rung: one job wakes one worker.
 *   the watch   held by one worker who does not sleep but looks again every few milliseconds,
 *               because jobs come all the time.  While it is held nobody is rung.
 *
 * The queue without a name stands for notes: whoever leaves one rings any worker of any queue,
 * since each of them deals with all notes before it claims.
 *
 * These are the only locks of sessions in rota, and nothing is right or wrong by them.  Held by
 * mistake, one costs a NOTIFY too many; lost, a job waits for the next poll.  Workers poll in
 * any case.
 *
 * Of a job whose transaction asked before the worker came to the door and commits after the
 * worker has looked, nobody hears.  Such a transaction has an id by then, so a worker at whose
 * coming none was under way has missed nothing; otherwise is_sure is false, and it looks again
 * soon.
 */

create or replace function rota.wait_for_jobs(
    queues text[] default '{default}',
    is_on_watch boolean default false
)
    returns table (
        queue text,
        channel text,
        is_first boolean,
        has_watch boolean,
        is_sure boolean,
        is_due boolean,
        has_upkeep boolean
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_queues text[];
    v_doors integer[] := '{}'::integer[];
    v_watches boolean[] := '{}'::boolean[];
begin
    perform rota._check_names('queues', wait_for_jobs.queues);
    perform rota._check_queues('worker', wait_for_jobs.queues);
    if wait_for_jobs.is_on_watch is null then
        perform rota._refuse('is_on_watch', 'must not be null');
    end if;
    -- What a session can lock is limited, and so each queue costs the others something.
    v_queues := array[''] || wait_for_jobs.queues[1:100];

    perform pg_advisory_unlock_all();
    -- Also where all doors of the notes are taken.
    perform pg_advisory_lock_shared(1919907936, hashtext(''));
    for v_place in 1..cardinality(v_queues) loop
        v_doors[v_place] := rota._take_door(v_queues[v_place]);
        v_watches[v_place] := v_doors[v_place] is not null and wait_for_jobs.is_on_watch
            and pg_try_advisory_lock(1919907937, hashtext(v_queues[v_place]));
    end loop;

    -- The next id is the oldest that is not over: so there is no writer at all.  A transaction
    -- asks for the next id once, hence after all locks.
    is_sure := age(pg_snapshot_xmin(pg_current_snapshot())::xid) = 0;
    is_due := rota._is_any_due(wait_for_jobs.queues, null);
    has_upkeep := rota._has_upkeep();
    return query
    select
        d.queue, case when d.door is not null then rota._channel(d.queue, d.door) end,
        d.door is not distinct from 0, d.has_watch, is_sure, is_due, has_upkeep
    from unnest(v_queues, v_doors, v_watches) as d (queue, door, has_watch);
end;
$$;

comment on function rota.wait_for_jobs(text[], boolean) is
    'Take a door of each of these queues, and of the one of notes whose name is empty, instead '
    'of those that this session had: listen to the channels and then claim, unless it listened '
    'before and nothing is_due; has_watch says that nobody is rung while this worker looks '
    'every few milliseconds; channel is null where all doors are taken; raises 22023.';

/* Take the lowest free door of a queue, and then be among those who may be rung. */
create or replace function rota._take_door(queue text)
    returns integer
    language plpgsql
as $$
declare
    v_key constant integer := hashtext(_take_door.queue);
begin
    for v_door in 0..15 loop
        if pg_try_advisory_lock(1919907938 + v_door, v_key) then
            perform pg_advisory_lock_shared(1919907936, v_key);
            return v_door;
        end if;
    end loop;
    return null;
end;
$$;

create or replace function rota.stop_waiting(queues text[] default '{default}')
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_names('queues', stop_waiting.queues);
    perform rota._check_queues('worker', stop_waiting.queues);

    perform pg_advisory_unlock_all();
    perform rota._ring(q.queue)
    from unnest(array[''] || stop_waiting.queues[1:100]) as q (queue);
end;
$$;

comment on function rota.stop_waiting(text[]) is
    'Give back all doors of this session because its worker is full, and ring the next sleeper '
    'of these queues; raises 22023.';

/*
 * Workers of one queue may take different job types, and who is rung or on watch may not be the
 * one who takes the job.  The message keeps those who are rung by this from passing it on.
 */
create or replace function rota.ring_others(
    queues text[] default '{default}',
    job_types text[] default null
)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_names('queues', ring_others.queues);
    perform rota._check_queues('worker', ring_others.queues);
    if ring_others.job_types is null then
        return false;
    end if;
    perform rota._check_names('job_types', ring_others.job_types);

    if not rota._is_any_due(ring_others.queues, ring_others.job_types) then
        return false;
    end if;
    perform rota._ring_doors(q.queue, 16, 'other')
    from unnest(ring_others.queues[1:100]) as q (queue);
    return true;
end;
$$;

comment on function rota.ring_others(text[], text[]) is
    'Ring all other sleepers of these queues, with the message other, if a job of another type '
    'than these is due, and return whether one is; raises 22023.';

/*
 * Whether these queues have a due job of other types than these; or, with null, anything that a
 * claim may have to do.  True also where a queue has more priorities than are looked at.
 */
create or replace function rota._is_any_due(queues text[], job_types text[])
    returns boolean
    language plpgsql
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
    set enable_sort = off
as $$
declare
    v_now constant timestamptz := rota.now();
    v_queue text;
    v_lane integer;
begin
    -- Under a held snapshot a look takes long, and a claim knows better where to begin.
    if _is_any_due.job_types is null
      and rota._scan_start('due')::bigint > extract(epoch from v_now) * 1000000 then
        return true;
    end if;
    foreach v_queue in array _is_any_due.queues loop
        v_lane := -32769;
        for v_step in 1..11 loop
            select j.lane::integer
            into v_lane
            from rota.jobs as j
            where j.queue = v_queue
              and j.hold is null
              and j.status in ('queued', 'failed')
              and j.lane > v_lane
            order by j.lane
            limit 1;
            exit when not found;
            if v_step = 11 or exists (
                select
                from rota.jobs as j
                where j.queue = v_queue
                  and j.lane = v_lane
                  and j.hold is null
                  and j.status in ('queued', 'failed')
                  and j.place <= v_now
                  and (_is_any_due.job_types is null
                    or j.job_type <> all(_is_any_due.job_types))
            ) then
                return true;
            end if;
        end loop;
    end loop;
    if rota.now() - v_now > interval '5 ms' then
        perform rota._keep_scan_start('due',
            (extract(epoch from v_now + interval '1 minute') * 1000000)::bigint::text);
    end if;
    return false;
end;
$$;

/* Ring up to max_doors sleepers of a queue, if there are any and nobody is on watch. */
create or replace function rota._ring(queue text, max_doors integer default 1)
    returns void
    language plpgsql
as $$
declare
    v_key constant integer := hashtext(_ring.queue);
begin
    -- Nothing can come between the two halves of such a line, so no lock is left behind.
    if not (pg_try_advisory_lock(1919907936, v_key)
        and pg_advisory_unlock(1919907936, v_key))
      and pg_try_advisory_lock_shared(1919907937, v_key)
      and pg_advisory_unlock_shared(1919907937, v_key) then
        perform rota._ring_doors(_ring.queue, _ring.max_doors, '');
    end if;
end;
$$;

create or replace function rota._ring_doors(queue text, max_doors integer, message text)
    returns void
    language plpgsql
as $$
declare
    v_key constant integer := hashtext(_ring_doors.queue);
    v_rung integer := 0;
begin
    -- Where somebody else has filled it a commit would fail; and a transaction that has
    -- notified cannot be prepared, so who prepares them says so.  Workers poll in any case.
    if pg_notification_queue_usage() > 0.5 or current_setting('rota.wakeups', true) = 'off' then
        return;
    end if;

    for v_door in 0..15 loop
        continue when pg_try_advisory_lock_shared(1919907938 + v_door, v_key)
          and pg_advisory_unlock_shared(1919907938 + v_door, v_key);
        perform pg_notify(rota._channel(_ring_doors.queue, v_door), _ring_doors.message);
        v_rung := v_rung + 1;
        exit when v_rung >= _ring_doors.max_doors;
    end loop;
end;
$$;

/* Ring for jobs that may be claimable now: as many sleepers as there are such jobs. */
create or replace function rota._ring_for(job_ids bigint[])
    returns void
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    c_waiting constant text[] := '{queued,failed}'::text[];
begin
    -- The empty name is that of all who sleep.
    if pg_try_advisory_lock(1919907936, hashtext(''))
      and pg_advisory_unlock(1919907936, hashtext('')) then
        return;
    end if;

    perform rota._ring(d.queue, d.jobs)
    from (
        select
            j.queue,
            greatest(1, count(*) filter (where j.run_at <= rota.now()))::integer as jobs
        from rota.jobs as j
        where j.id = any(_ring_for.job_ids)
          and j.status = any(c_waiting)
          and j.run_at < rota.now() + rota._soon()
        group by j.queue
    ) as d;
end;
$$;

/* The same for new jobs in the form of enqueue_many(), without looking them up. */
create or replace function rota._ring_for_new(jobs jsonb)
    returns void
    language plpgsql
as $$
begin
    if pg_try_advisory_lock(1919907936, hashtext(''))
      and pg_advisory_unlock(1919907936, hashtext('')) then
        return;
    end if;

    perform rota._ring(d.queue, d.jobs)
    from (
        select
            coalesce(n.job ->> 'queue', 'default') as queue,
            greatest(1, count(*) filter (where n.job ->> 'delay' is null))::integer as jobs
        from jsonb_array_elements(_ring_for_new.jobs) as n (job)
        where coalesce((n.job ->> 'delay')::interval < rota._soon(), true)
          and coalesce((n.job ->> 'run_at')::timestamptz < rota.now() + rota._soon(), true)
        group by 1
    ) as d;
end;
$$;

/* What is due later than this is seen by a poll in time, as polls are a second apart. */
create or replace function rota._soon()
    returns interval
    language plpgsql
    immutable
as $$
begin
    return interval '2 seconds';
end;
$$;

/* The channel of a door. */
create or replace function rota._channel(queue text, door integer)
    returns text
    language plpgsql
    immutable
as $$
begin
    return format('rota_%s_%s', to_hex(hashtext(_channel.queue)), _channel.door);
end;
$$;
