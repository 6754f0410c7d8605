/*
 * maintenance/wakeups.sql -- how a worker that found no job waits for the next.
 *
 * What a client has to do is told in README.md, A worker in another language: when a claim
 * brought fewer than wanted it calls wait_for_jobs(), listens, sleeps, and claims again.  When
 * notified on a channel that begins with rota_maintenance it ticks: a check is to be done.
 *
 * base/notify.sql tells which locks say that a worker waits.  They outlive transactions.  Which
 * of them a session has, pg_locks knows: so the locks of its application are left alone, and
 * one that a rollback left behind is found again.
 *
 * Of many idle workers the first few do the looking.  The first of a queue polls as often as it
 * was told, the others four to thirty times less often, and from the fifth on they do not ask
 * when something comes due.  The first of all is told each time whether there is maintenance,
 * the others after 3 s and up to 5 min, in case those before them hang.
 *
 * look_again_in says when a worker has to look for what no session notifies it of: a run_at, a
 * retry or a start at a rate whose time comes, and what was claimable before it held the locks.
 * It is 0 after the locks have changed, unless nothing is due; so LISTEN comes before that
 * claim.  What came due since the call before makes it 0 once: a claim has been between, and
 * has refused the job or taken it.  With claimed => false whatever is due makes it 0.
 *
 * A transaction that looked for waiting workers before this one held its locks, and commits
 * after the worker has claimed, does not notify it.  So until all transactions have ended that
 * had an id when the locks were taken, the worker looks again after 5 ms, 20 ms and so on, and
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
    ) language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off set enable_sort = off as $$
declare
    v_now constant timestamptz := rota.now();
    v_ask_at constant bigint := rota._scan_start('asked')::bigint;
    v_slots integer[]; v_place integer; v_has_changed boolean; v_times integer;
begin
    perform rota._check_names('queues', queues), rota._check_queues('worker', queues),
        case when job_types is not null then rota._check_names('job_types', job_types) end,
        rota._check_interval('poll_interval', poll_interval, '1 ms', '1 hour'),
        rota._check_given('active', active is not null),
        rota._check_given('claimed', claimed is not null);

    select t.channels, t.slots, t.place, t.has_changed, t.is_active
    into channels, v_slots, v_place, v_has_changed, is_active
    -- What a session can lock is limited, and so each queue costs the others something.
    from rota._take_listen_slots(wait_for_jobs.queues[1:100], wait_for_jobs.active) as t;
    v_times := case when is_active or 0 = any(v_slots) then 1
        when v_slots && '{1,2,3}'::integer[] then 4 when v_slots <@ '{16}'::integer[] then 30
        else 10 end;
    look_again_in := rota._look_again_in(
        wait_for_jobs.queues[1:100], v_slots, job_types, v_now,
        v_now + wait_for_jobs.poll_interval * (0.9 + random() / 10) * v_times, v_times < 5,
        v_has_changed, channels, claimed);
    if is_active then look_again_in := least(look_again_in, '10 ms'); end if;
    -- The first worker ticks without being asked to where it does not ask each second.
    has_maintenance := v_place = 0
        and (is_active or wait_for_jobs.poll_interval > '1 second');
    -- Also where it may let a job in now: the first may not look at this queue.
    if not has_maintenance and (look_again_in <= '0'
      or rota._is_full_scan_due(v_ask_at, v_now, '5 minutes')) then
        has_maintenance := rota._has_maintenance(patient => true);
        if not has_maintenance then
            perform rota._keep_scan_start('asked',
                rota._micros(v_now + v_place * (v_place + 2) * interval '1 s')::text);
        end if;
    end if;
    return next;
end $$;

comment on function rota.wait_for_jobs is
    'Return the channels to which this session should listen, and in what time to claim again '
    'without a notification; has_maintenance asks for tick(); with active no producer notifies '
    'while this worker claims every few milliseconds; with claimed => false, for a session '
    'that has not claimed since the last call, look_again_in is 0 if any job is due; raises '
    '22023.';

create or replace function rota.stop_waiting()
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_keys constant integer[] := array(
        select h.key from rota._held_locks() as h where h.kind between 1 and 17);
begin
    -- One that it took twice, as after a rollback, it also gives up twice.
    for v_time in 1..16 loop
        perform rota._give_up(h.kind, h.key) from rota._held_locks() as h;
        exit when not found;
    end loop;
    perform set_config('rota.held_locks', '', false);
    perform set_config('rota.waiting', '', false);
    -- The next worker also moves up to the slot, and so looks again until the transactions of
    -- all producers have ended that had found this session there.
    perform rota._notify(null, key => k.key) from unnest(v_keys) as k (key);
end $$;

comment on function rota.stop_waiting is
    'Stop notifying this session, and notify the next waiting worker instead.';

/* Take the lowest free listen slot of each queue and of all queues together, or become their
 * active poller, and give up what was held before instead.  A slot is -1 of who polls, 16 if it
 * is shared, and 17 if there is none.  The place is that among all who wait: 0 for the first.
 */
create or replace function rota._take_listen_slots(
    queues text[], active boolean, out channels text[], out slots integer[],
    out place integer, out has_changed boolean, out is_active boolean
) language plpgsql as $$
declare
    c_queues constant text[] := array[''] || queues;
    c_text constant text := current_setting('rota.held_locks', true);
    -- Of a slot that the application has dropped nobody would be notified.  A session without
    -- one is one of many, and need not read pg_locks, which lists the locks of all sessions.
    v_held text[] := case when c_text ~ '^(0|18) -?[0-9]{1,10}(, (0|18) -?[0-9]{1,10})*$'
        then string_to_array(c_text, ', ')
        else array(select concat(h.kind, ' ', h.key) from rota._held_locks() as h) end;
    v_kept text[] := '{}'::text[];
    v_key integer; v_slot integer; v_lock text; v_is_active boolean;
begin
    channels := '{}';
    slots := '{}';
    has_changed := false;
    is_active := false;
    for v_queue in 1..cardinality(c_queues) loop
        v_key := hashtext(c_queues[v_queue]);
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
        -- The last slot is shared by all who find no other, but not in many queues: what the
        -- server can lock is limited.
        for v_lower in 0..case when v_queue between 2 and 11 then 16 else 15 end loop
            exit when v_is_active or v_slot is not null;
            v_lock := concat(v_lower + 2, ' ', v_key);
            if v_lock = any(v_held)
              or v_lower < 16 and pg_try_advisory_lock(1919907938 + v_lower, v_key)
              or v_lower = 16 and rota._share_lock(1919907954, v_key) then
                v_slot := v_lower;
                channels := channels || rota._channel(v_key, v_slot);
                has_changed := has_changed or v_lock <> all(v_held);
                v_held := v_held || v_lock;
                v_kept := v_kept || v_lock;
            end if;
        end loop;
        -- After the slot: from here on producers look for it.
        if v_slot is not null or v_queue = 1 then
            v_lock := concat('0 ', v_key);
            if v_lock <> all(v_held) and rota._share_lock(1919907936, v_key) then
                v_held := v_held || v_lock;
            end if;
            v_kept := v_kept || v_lock;
        end if;
        if v_queue = 1 then
            place := case when v_is_active then 0 else coalesce(v_slot, 16) end;
        else
            slots := slots || case when v_is_active then -1 else coalesce(v_slot, 17) end;
        end if;
    end loop;

    foreach v_lock in array v_held loop
        continue when v_lock = any(v_kept);
        perform rota._give_up(split_part(v_lock, ' ', 1)::integer,
            split_part(v_lock, ' ', 2)::bigint::bit(32)::integer);
    end loop;
    perform set_config('rota.held_locks', array_to_string(v_kept, ', '), false);
end $$;

/* The locks of this session: kind 0 idle lock, 1 active poller, 2 to 17 the listen
 * slots, 18 the shared one. */
create or replace function rota._held_locks()
    returns table (kind integer, key integer) language sql stable as $$
select (l.classid::bigint - 1919907936)::integer, l.objid::bigint::bit(32)::integer
from pg_locks as l
where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.objsubid = 2
  and l.classid::bigint between 1919907936 and 1919907954
$$;

/* The sessions of this database that wait for jobs: each has the idle lock of no queue. */
create or replace function rota._waiting_pids()
    returns integer[] language sql stable as $$
select array(
    select l.pid from pg_locks as l join pg_database as d on d.oid = l.database
    where d.datname = current_database() and l.locktype = 'advisory' and l.objsubid = 2
      and l.classid::bigint = 1919907936
      and l.objid::bigint::bit(32)::integer = hashtext('') order by l.pid
)
$$;

create or replace function rota._give_up(kind integer, key integer)
    returns void language plpgsql as $$
begin
    if kind in (0, 18) then
        perform pg_advisory_unlock_shared(1919907936 + kind, key);
    else
        perform pg_advisory_unlock(1919907936 + kind, key);
    end if;
end $$;

/* How long until this session has to look again; notifies those above its slots of due jobs of
 * other types.  The setting rota.waiting holds the time of the call before and of the last
 * change of the locks, the first transaction after that, and until when a look takes long. */
create or replace function rota._look_again_in(
    queues text[], slots integer[], job_types text[], moment timestamptz, until timestamptz,
    with_times boolean, has_changed boolean, channels text[], claimed boolean
) returns interval language plpgsql as $$
declare
    c_now constant bigint := rota._micros(moment);
    c_text constant text := current_setting('rota.waiting', true);
    -- The next id is asked for after all locks are taken.
    c_xmin constant bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    v_state bigint[] := case when c_text ~ '^[0-9]{1,18}( [0-9]{1,18}){3}$'
        then string_to_array(c_text, ' ')::bigint[] end;
    v_is_new constant boolean := has_changed or v_state is null or v_state[1] > c_now;
    c_has_pauses constant boolean := exists (select from rota.pauses);
    v_is_sure boolean; v_since timestamptz; v_must_claim boolean; v_is_put_off boolean;
    v_next timestamptz := until;
    v_due bigint; v_found record;
begin
    if v_is_new then
        v_state := array[c_now, c_now, c_xmin
            + age(pg_snapshot_xmin(pg_current_snapshot())::xid), coalesce(v_state[4], 0)];
        v_must_claim := c_xmin < v_state[3] or v_state[4] > c_now or exists (
            select unnest(_look_again_in.channels) except select pg_listening_channels()
        );
        v_is_put_off := v_must_claim;
    else
        v_since := rota._from_micros(v_state[1]);
        -- Under a held snapshot a look takes long, and is worth it now and then.
        v_is_put_off := v_state[4] > c_now and v_state[4] <= c_now + 60000000;
        v_must_claim := v_is_put_off and not claimed;
    end if;
    v_is_sure := c_xmin >= v_state[3];

    if with_times and not v_is_put_off then
        -- In no lane yet, or no session notifies of it.
        v_next := least(rota._next_let_in_at(queues, coalesce(v_since, '-infinity'), until), (
            select min(n.start_at) from rota.limits as l
            cross join lateral rota._next_start_at(l) as n (start_at)
            where l.queue = any(_look_again_in.queues) and l.max_starts is not null
              and n.start_at > coalesce(v_since, '-infinity')));
    end if;
    for v_n in 1..cardinality(queues) loop
        continue when c_has_pauses and rota._is_paused(queues[v_n], moment);
        v_found := rota._look_into_lanes(queues[v_n], job_types, moment,
            case when not v_is_put_off then coalesce(v_since, moment) end, v_next);
        v_next := least(v_next, v_found.next_run_at);
        v_must_claim := v_must_claim or v_found.has_due and (v_is_new or not claimed);
        if v_found.has_others then
            perform rota._notify_slots(hashtext(queues[v_n]), 1, slots[v_n]);
        end if;
    end loop;
    v_due := rota._micros(v_next);
    if not v_is_put_off then
        v_state[4] := case when rota.now() - moment > interval '5 ms'
            then c_now + least(20 * (rota._micros(rota.now()) - c_now), 60000000) else 0 end;
    elsif not v_is_new then
        v_due := least(v_due, v_state[4]);
    end if;
    if v_must_claim then
        v_due := c_now;
    elsif not v_is_new then
        -- Of what comes due all the time, and is not for this worker, the most together.
        v_due := greatest(v_due, v_state[1] + 10000);
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

/* What waits in the lanes of a queue: whether a job is due, and one of other types than these,
 * asked of the first ones of each lane, and the first run_at between two times.  In a queue of
 * more lanes than are looked at both are taken to be due. */
create or replace function rota._look_into_lanes(
    queue text, job_types text[], due timestamptz, after timestamptz, before timestamptz,
    out has_due boolean, out has_others boolean, out next_run_at timestamptz
) language plpgsql stable as $$
declare
    v_lane bigint := -32769::bigint;
    v_job_type text;
    v_run_at timestamptz;
begin
    has_due := false;
    has_others := false;
    for v_step in 1..11 loop
        v_lane := rota._next_lane(array[queue], v_lane, null);
        exit when v_lane is null;
        if v_step = 11 then
            has_due := true;
            has_others := job_types is not null;
            exit;
        end if;
        for v_job_type in
            select j.job_type from rota.jobs as j
            where j.queue = _look_into_lanes.queue
              and coalesce(j.own_lane, j.priority) = v_lane and j.hold is null
              and j.status in ('queued', 'failed')
              and coalesce(j.own_place, j.run_at) <= _look_into_lanes.due
            limit case when job_types is null then 1 else 1000 end
        loop
            has_due := true;
            has_others := has_others or (v_job_type <> all(job_types)) is true;
            exit when has_others;
        end loop;
        continue when after is null;
        select min(j.run_at) into v_run_at from rota.jobs as j
        where j.queue = _look_into_lanes.queue
          and coalesce(j.own_lane, j.priority) = v_lane and j.hold is null
          and j.status in ('queued', 'failed')
          and coalesce(j.own_place, j.run_at) > _look_into_lanes.after
          and coalesce(j.own_place, j.run_at) < _look_into_lanes.before;
        next_run_at := least(next_run_at, v_run_at);
    end loop;
end $$;
