/*
 * maintenance/wakeups.sql -- how a worker that found no job waits for the next.
 *
 * What a client has to do is told in README.md, A worker in another language: when a claim
 * brought fewer than wanted it calls wait_for_jobs(), listens, sleeps, and claims again.  When
 * notified on a channel that begins with rota_maintenance it ticks: a check is to be done.
 *
 * base/notify.sql tells which locks say that a worker waits.  They outlive transactions, as do
 * those of jobs/results.sql and no others.  pg_locks alone knows which of them the session has,
 * so the locks of its application are left alone, and one that a rollback left behind is found
 * again.
 *
 * A worker has to look by itself for what no session notifies it of: a run_at, a retry or a
 * start at a rate whose time comes, and what was claimable before it held the locks.
 * look_again_in says when.  It is 0 after the locks have changed, unless nothing is due; so
 * LISTEN comes before that claim.  What came due since the call before makes it 0 once and not
 * again: a claim has been between, and has refused the job or taken it.  With claimed => false
 * none has been, and whatever is due makes it 0, also what no session could notify it of.
 *
 * Of a job whose transaction looked for waiting workers before this one held its locks, and
 * commits after the worker has claimed, no notification comes.  Such a transaction has an id by
 * then.  So until all transactions have ended that had an id when the locks were taken, the
 * worker looks again after 5 ms, 20 ms and so on, in intervals that grow with the wait, and
 * once more when the last of them has ended.
 *
 * Workers of one queue may take different job types.  A worker that sees a due job of another
 * type notifies the next higher listen slot, whose holder does the same: that ends at the
 * highest slot, so workers never notify each other in a cycle.
 */

create or replace function rota.wait_for_jobs(
    queues text[] default '{default}', job_types text[] default null,
    poll_interval interval default '1 second', active boolean default false,
    claimed boolean default true
) returns table (
        channels text[], look_again_in interval, has_maintenance boolean, is_active boolean
    ) language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_now constant timestamptz := rota.now();
    v_slots integer[]; v_has_changed boolean; v_is_first boolean;
begin
    perform rota._check_names('queues', queues);
    perform rota._check_queues('worker', queues);
    if job_types is not null then perform rota._check_names('job_types', job_types); end if;
    perform rota._check_interval('poll_interval', poll_interval, '1 ms', '1 hour');
    perform rota._check_given('active', active is not null);
    perform rota._check_given('claimed', claimed is not null);

    select t.channels, t.slots, t.has_changed, t.is_active, t.is_first
    into channels, v_slots, v_has_changed, is_active, v_is_first
    -- What a session can lock is limited, and so each queue costs the others something.
    from rota._take_listen_slots(wait_for_jobs.queues[1:100], wait_for_jobs.active) as t;
    if job_types is not null then
        perform rota._notify_slots(hashtext(q.queue), 1, q.slot)
        from unnest(wait_for_jobs.queues[1:100], v_slots) as q (queue, slot)
        where rota._has_due(q.queue, v_now, wait_for_jobs.job_types);
    end if;

    -- One worker of a queue polls as often as it was told, the others less often.
    look_again_in := rota._look_again_in(
        wait_for_jobs.queues[1:100], v_now,
        v_now + wait_for_jobs.poll_interval * (0.9 + random() / 10) * case
            when is_active or 0 = any(v_slots) then 1
            when (select min(s.slot) from unnest(v_slots) as s (slot) where s.slot >= 0) < 4
                then 2
            else 5
        end,
        v_has_changed, channels, claimed);
    if is_active then look_again_in := least(look_again_in, '10 ms'); end if;
    -- The first worker ticks without being asked to where it does not ask each second.
    has_maintenance := v_is_first and (is_active or wait_for_jobs.poll_interval > '1 second')
        or rota._has_maintenance(patient => true);
    return next;
end $$;

comment on function rota.wait_for_jobs is
    'Return the channels to which this session should listen, and in what time to claim again '
    'without a notification; has_maintenance asks for tick(); with active no producer notifies '
    'while this worker claims every few milliseconds; if it has not claimed since the last '
    'call, look_again_in is 0 if any job is due; raises 22023.';

create or replace function rota.stop_waiting()
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_keys constant integer[] := array(
        select h.key from rota._held_locks() as h where h.kind > 0);
begin
    perform rota._give_up(h.kind, h.key) from rota._held_locks() as h;
    perform set_config('rota.waiting', '', false);
    -- The next worker also moves up to the slot, and so looks again until the transactions of
    -- all producers have ended that had found this session there.
    perform rota._notify(null, key => k.key) from unnest(v_keys) as k (key);
end $$;

comment on function rota.stop_waiting is
    'Stop notifying this session, and notify the next waiting worker instead.';

/* Take the lowest free listen slot of each queue and of all queues together, or become their
 * active poller, and give up what was held before instead. */
create or replace function rota._take_listen_slots(
    queues text[], active boolean, out channels text[], out slots integer[],
    out has_changed boolean, out is_active boolean, out is_first boolean
) language plpgsql as $$
declare
    v_held text[] := array(select concat(h.kind, ' ', h.key) from rota._held_locks() as h);
    v_kept text[] := '{}'::text[];
    v_key integer; v_slot integer; v_lock text; v_is_active boolean;
begin
    channels := '{}';
    slots := '{}';
    has_changed := false;
    is_active := false;
    for v_key in
        select hashtext(q.queue)
        from unnest(array[''] || _take_listen_slots.queues) as q (queue)
    loop
        v_slot := null;
        v_lock := concat('1 ', v_key);
        v_is_active := active
            and (v_lock = any(v_held) or pg_try_advisory_lock(1919907937, v_key));
        if v_is_active then
            -- It claims by itself, and what it does not take it passes on to all slots.
            is_active := true;
            v_held := v_held || v_lock;
            v_kept := v_kept || v_lock;
        end if;
        for v_lower in 0..15 loop
            exit when v_is_active or v_slot is not null;
            v_lock := concat(v_lower + 2, ' ', v_key);
            if v_lock = any(v_held) or pg_try_advisory_lock(1919907938 + v_lower, v_key) then
                v_slot := v_lower;
                channels := channels || rota._channel(v_key, v_slot);
                has_changed := has_changed or v_lock <> all(v_held);
                v_held := v_held || v_lock;
                v_kept := v_kept || v_lock;
            end if;
        end loop;
        -- After the slot: from here on producers look for it.
        if v_slot is not null or v_key = hashtext('') then
            v_lock := concat('0 ', v_key);
            if v_lock <> all(v_held) and rota._share_lock(1919907936, v_key) then
                v_held := v_held || v_lock;
            end if;
            v_kept := v_kept || v_lock;
        end if;
        if is_first is null then
            is_first := v_is_active or v_slot is not distinct from 0;
        else
            slots := slots || coalesce(v_slot, -1);
        end if;
    end loop;

    perform rota._give_up(split_part(h.lock, ' ', 1)::integer,
        split_part(h.lock, ' ', 2)::integer)
    from unnest(v_held) as h (lock) where h.lock <> all(v_kept);
end $$;

/* The locks of this session: kind 0 idle lock, 1 active poller, 2 and more the listen slots. */
create or replace function rota._held_locks()
    returns table (kind integer, key integer) language plpgsql as $$
begin
    return query
    select (l.classid::bigint - 1919907936)::integer, l.objid::bigint::bit(32)::integer
    from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.objsubid = 2
      and l.classid::bigint between 1919907936 and 1919907953;
end $$;

create or replace function rota._give_up(kind integer, key integer)
    returns void language plpgsql as $$
begin
    if kind = 0 then
        perform pg_advisory_unlock_shared(1919907936, key);
    else
        perform pg_advisory_unlock(1919907936 + kind, key);
    end if;
end $$;

/* How long until this session has to look again.  The setting rota.waiting holds, in
 * microseconds and as an id: the call before, the last change of the locks, the first
 * transaction after it, and until when a look takes long. */
create or replace function rota._look_again_in(
    queues text[], moment timestamptz, until timestamptz, has_changed boolean, channels text[],
    claimed boolean
) returns interval language plpgsql set enable_seqscan = off set jit = off
    set plan_cache_mode = force_generic_plan set enable_bitmapscan = off
    set enable_sort = off as $$
declare
    c_now constant bigint := rota._micros(moment);
    c_text constant text := current_setting('rota.waiting', true);
    -- The next id is asked for after all locks are taken.
    c_xmin constant bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    v_state bigint[] := case when c_text ~ '^[0-9]{1,18}( [0-9]{1,18}){3}$'
        then string_to_array(c_text, ' ')::bigint[] end;
    v_is_new constant boolean := has_changed or v_state is null or v_state[1] > c_now;
    v_is_sure boolean; v_due bigint;
begin
    if v_is_new then
        v_state := array[c_now, c_now, c_xmin
            + age(pg_snapshot_xmin(pg_current_snapshot())::xid), coalesce(v_state[4], 0)];
    end if;
    v_is_sure := c_xmin >= v_state[3];

    if v_is_new and (not v_is_sure or v_state[4] > c_now or exists (
        select unnest(_look_again_in.channels) except select pg_listening_channels()
    )) then
        v_due := c_now;
    elsif v_state[4] > c_now and v_state[4] <= c_now + 60000000 then
        -- Under a held snapshot a look takes long, and is worth it now and then.
        v_due := case when claimed then least(rota._micros(until), v_state[4]) else c_now end;
    else
        v_due := rota._micros(rota._next_due_at(queues,
            case when v_is_new then '-infinity' else rota._from_micros(v_state[1]) end, until));
        if not v_is_new then
            -- Of what comes due all the time, and is not for this worker, the most together.
            v_due := greatest(v_due, v_state[1] + 10000);
        end if;
        if not claimed and exists (
            select from unnest(_look_again_in.queues) as c (queue)
            where (not exists (select from rota.pauses) or not rota._is_paused(c.queue, moment))
              and rota._has_due(c.queue, moment)
        ) then
            v_due := c_now;
        end if;
        v_state[4] := case when rota.now() - moment > interval '5 ms'
            then c_now + least(20 * (rota._micros(rota.now()) - c_now), 60000000) else 0 end;
    end if;
    if not v_is_sure then
        v_due := least(v_due, c_now + greatest(3 * (c_now - v_state[2]), 5000));
    elsif v_state[3] > 0 then
        -- The last of those transactions may have committed after the claim before this call.
        if not v_is_new then v_due := c_now; end if;
        v_state[3] := 0;
    end if;
    v_state[1] := c_now;
    perform set_config('rota.waiting', array_to_string(v_state, ' '), false);
    return greatest(v_due - c_now, 0) * interval '1 microsecond';
end $$;

/* Whether a queue has a due job, of other types than these if any are given, asked of the first
 * ones of each lane.  True also where a queue has more lanes than are looked at. */
create or replace function rota._has_due(
    queue text, due timestamptz, other_than text[] default null
) returns boolean language plpgsql stable set enable_seqscan = off set jit = off
    set plan_cache_mode = force_generic_plan set enable_bitmapscan = off
    set enable_sort = off as $$
declare
    v_lane bigint := -32769::bigint;
begin
    for v_step in 1..11 loop
        v_lane := rota._next_lane(array[queue], v_lane, null);
        exit when v_lane is null;
        if v_step = 11 or exists (
            select
            from (
                select j.job_type from rota.jobs as j
                where j.queue = _has_due.queue
                  and coalesce(j.own_lane, j.priority) = v_lane and j.hold is null
                  and j.status in ('queued', 'failed')
                  and coalesce(j.own_place, j.run_at) <= _has_due.due
                limit 1000
            ) as d
            where (d.job_type = any(_has_due.other_than)) is not true
        ) then
            return true;
        end if;
    end loop;
    return false;
end $$;

/* When something comes due between these times that no session notifies of: the time of a job
 * or of a schedule, a start at a rate, or a check that may let a job in. */
create or replace function rota._next_due_at(
    queues text[], since timestamptz, until timestamptz
) returns timestamptz language plpgsql stable as $$
declare
    v_next timestamptz := least(rota._next_let_in_at(queues, since, until),
        (select min(n.start_at) from rota.limits as l
        cross join lateral rota._next_start_at(l) as n (start_at)
        where l.queue = any(_next_due_at.queues)
          and l.max_starts is not null and n.start_at > _next_due_at.since));
begin
    return least(v_next, (
        select min(rota._next_run_at(c.queue, since, v_next))
        from unnest(_next_due_at.queues) as c (queue)
        where not exists (select from rota.pauses) or not rota._is_paused(c.queue, rota.now())
    ));
end $$;

/* The first run_at between these times in the lanes of a queue. */
create or replace function rota._next_run_at(queue text, after timestamptz, before timestamptz)
    returns timestamptz language plpgsql stable as $$
declare
    v_lane bigint := -32769::bigint;
    v_run_at timestamptz; v_first timestamptz;
begin
    for v_step in 1..10 loop
        v_lane := rota._next_lane(array[queue], v_lane, null);
        exit when v_lane is null;
        select min(j.run_at) into v_run_at from rota.jobs as j
        where j.queue = _next_run_at.queue
          and coalesce(j.own_lane, j.priority) = v_lane and j.hold is null
          and j.status in ('queued', 'failed')
          and coalesce(j.own_place, j.run_at) > _next_run_at.after
          and coalesce(j.own_place, j.run_at) < _next_run_at.before;
        v_first := least(v_first, v_run_at);
    end loop;
    return v_first;
end $$;
