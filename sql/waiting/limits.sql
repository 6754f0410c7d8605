/*
 * waiting/limits.sql -- what happens to jobs that have to wait for a limit.
 *
 * A claim takes slots and starts (jobs/slots.sql).  A job that a claim finds under a full limit
 * leaves its lane: hold is the name of the limit.  The transaction that gives a slot back opens
 * the next held job; and where the two could miss each other, the one that comes in leaves a
 * check for maintenance.  The check finds a free slot, or waits until every transaction has
 * ended that may have given one back without seeing the held job.
 *
 * Until maintenance has counted what runs already (with its next tick, mostly), nothing starts
 * under a limit that was set just now.  What it finds running uses slots from then on: a job
 * whose row it can lock holds its own, and part -2 of the limit holds those of the others until
 * they can be locked or have ended.  A claim that was under way is counted after its commit.
 */

create or replace function rota.set_limit(
    queue text default null, job_type text default null, limit_key text default null,
    max_running integer default null, max_starts integer default null,
    per interval default null, burst integer default null, weight integer default null,
    reset boolean default false
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_limit_name constant text := coalesce('queue ' || queue, 'type ' || job_type,
        'key ' || limit_key);
    v_limit rota.limits;
begin
    if num_nonnulls(queue, job_type, limit_key) <> 1 then
        perform rota._refuse('queue', 'or job_type or limit_key must be given, and only one');
    elsif queue is not null then
        perform rota._check_name('queue', queue);
    elsif job_type is not null then
        perform rota._check_name('job_type', job_type);
    else
        perform rota._check_text('limit_key', limit_key, 255);
        if limit_key like '%*' and limit_key not like '%:*' then
            perform rota._refuse('limit_key', format(
                'is no key and no class: the name of a class ends in :*, got %L',
                rota._cut(limit_key, 80)));
        elsif limit_key like '%:%:*' then
            perform rota._refuse('limit_key', format(
                'with :* is a class, all keys with the same text before their first colon, so '
                'it must have no other colon, got %L', rota._cut(limit_key, 80)));
        end if;
    end if;
    perform rota._check_number('max_running', max_running, 0, 1000000, true);
    perform rota._check_number('max_starts', max_starts, 1, 1000000, true);
    perform rota._check_number('burst', burst, 1, 10000, true);
    perform rota._check_number('weight', weight, 1, 1000, true);
    perform rota._refuse('weight', 'goes with limit_key only')
    where set_limit.weight is not null and set_limit.limit_key is null;
    perform rota._check_given('reset', reset is not null);
    perform rota._check_interval('per', per, '1 millisecond', '366 days', true);
    perform rota._check_queues('operator', array[coalesce(queue, '*')]);
    if num_nonnulls(set_limit.max_running, set_limit.max_starts, set_limit.weight) > 0 then
        null;
    elsif reset then
        delete from rota.limits as l where l.limit_name = v_limit_name;
        if found then
            -- What runs counts for the class of the key from now on.
            insert into rota.limits_to_count (limit_name)
            select l.limit_name from rota.limits as l
            where l.limit_name = any(rota._key_limits(set_limit.limit_key));
            perform rota._check_first(v_limit_name || rota._key_limits(limit_key));
        end if;
        return;
    elsif not exists (select from rota.limits as l where l.limit_name = v_limit_name) then
        perform rota._refuse('max_running', 'or max_starts or weight must be given');
    end if;

    insert into rota.limits as l (limit_name, queue, job_type, limit_key, max_running,
        max_starts, per, burst, weight)
    values (v_limit_name, set_limit.queue, set_limit.job_type, set_limit.limit_key,
        set_limit.max_running, set_limit.max_starts, rota._exact(set_limit.per),
        set_limit.burst, set_limit.weight)
    on conflict on constraint limits_pkey do update
    set max_running = coalesce(
            excluded.max_running, case when not reset then l.max_running end),
        max_starts = coalesce(excluded.max_starts, case when not reset then l.max_starts end),
        per = coalesce(excluded.per, case when not reset then l.per end),
        burst = coalesce(excluded.burst, case when not reset then l.burst end),
        weight = coalesce(excluded.weight, case when not reset then l.weight end),
        updated_at = rota.now() returning l.* into v_limit;
    -- Maintenance has to count again after the commit, when all claims know of the limit.
    insert into rota.limits_to_count (limit_name, asked_xid)
    select v_limit_name, case
        -- An older snapshot does not show all that runs.
        when current_setting('transaction_isolation') = 'read committed'
          and not exists (select from rota._uncounted(v_limit))
          then '18446744073709551615'::xid8
        end
    where v_limit.max_running is not null;
    -- No time may be out of range.  What was set before counts too, so this looks at the row.
    perform rota._refuse('burst', format('must be 1 to %s at one start in %s, got %s', m.burst,
        m.gap * interval '1 microsecond', v_limit.burst))
    from (
        select c.gap, 1 + floor(extract(epoch from interval '100 years') * 1000000
            / c.gap)::bigint as burst
        from rota._cells(v_limit) as c
    ) as m
    where v_limit.burst > m.burst;
    perform rota._adjust_slots(v_limit)
    where v_limit.max_running is not null and rota._is_counted(v_limit) and not exists (
        select from rota.limit_parts as p where p.limit_name = v_limit_name
    );
    perform rota._check_first(array[v_limit_name]);
end $$;

comment on function rota.set_limit is
    'Limit how many jobs of a queue, job_type or limit_key run at once or start per period: '
    'null leaves a setting unchanged, reset removes the others, and the limit with the last of '
    'them; raises 22023.';

/* Have limits checked before all that is due already, of which there may be very many: until
 * then nothing starts under a limit that has changed. */
create or replace function rota._check_first(limit_names text[])
    returns void language plpgsql as $$
begin
    insert into rota.pending_checks (id, kind, subject) overriding system value
    select -nextval('rota.pending_checks_id_seq'), 'limit', n.limit_name
    from unnest(_check_first.limit_names) as n (limit_name);
    perform rota._notify('');
end $$;

/* Trigger at the commit: what others have started since set_limit() looked, and before they can
 * know of the limit, is counted before anything starts under it. */
create or replace function rota._look_again_at_commit()
    returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
begin
    insert into rota.limits_to_count (limit_name)
    select l.limit_name from rota.limits as l
    where l.limit_name = new.limit_name
      and l.max_running is not null and exists (select from rota._uncounted(l));
    return null;
end $$;

/* Jobs stopped and give back these slots, one for each name; held jobs may come in. */
create or replace function rota._leave_limits(limit_names text[])
    returns void language plpgsql as $$
declare
    v_name text; v_given integer;
begin
    perform rota._give_slots(limit_names);
    -- An older snapshot does not show which jobs are held by now, and to lock one that others
    -- have let in since would fail this end.
    if current_setting('transaction_isolation') <> 'read committed' then
        perform rota._add_checks('limit', limit_names);
        return;
    end if;
    for v_name, v_given in
        select u.limit_name, count(*)::integer
        from unnest(_leave_limits.limit_names) as u (limit_name) group by u.limit_name
    loop
        if v_name like 'queue %' then
            perform rota._notify(substr(v_name, 7));
        else
            perform rota._open_held(v_name, slots_given => v_given);
        end if;
    end loop;
end $$;

/* Let held jobs of a limit into their lanes, but for those that a session has locked, until
 * there are max_jobs, or as many as slots are free; returns how many were let in.  So many of
 * each queue and type, since it is not known which of those have workers.  Those that are in
 * their lanes already count: else more and more would be in the way of claims.
 *
 * An end that gives slots back tells how many, and lets in no more than these, or 20: while a
 * hundred are in their lanes, or after one end of twenty, it then has nothing to do.  It looks
 * at no more than 20 kinds, and leaves a check where there may be more, or where sessions that
 * may leave them as they are have locked all of a kind. */
create or replace function rota._open_held(
    limit_name text, max_jobs integer default null, slots_given integer default null
) returns integer language plpgsql as $$
declare
    c_scan constant text := 'held ' || limit_name;
    v_now constant timestamptz := rota.now();
    v_start constant jsonb := rota._scan_start(c_scan)::jsonb;
    v_is_full constant boolean := rota._is_full_scan_due((v_start ->> 'full_scan_at')::bigint,
        v_now);
    c_index constant oid := 'rota.jobs_hold_idx'::regclass::oid;
    c_has_triggers constant boolean := rota._has_triggers();
    v_walked bigint := pg_stat_get_xact_tuples_returned(c_index);
    v_kinds jsonb := '[]'::jsonb;
    v_kind record;
    v_free integer := max_jobs;
    v_first record; v_open record; v_room integer; v_step integer; v_found bigint[];
    v_refused bigint[]; v_ids bigint[];
    v_opened bigint[] := '{}'::bigint[];
    v_place timestamptz;
    v_is_kept boolean := false;
begin
    for v_kind in
        select k.* from jsonb_to_recordset(v_start -> 'kinds') as k (queue text, job_type text,
            lane smallint, place timestamptz, open_id bigint)
        where not v_is_full
        union all
        select k.queue, k.job_type, '-32768', '-infinity', 0
        from rota._held_kinds(case when v_is_full then _open_held.limit_name end,
            case when slots_given is not null then 20 else 1000 end) as k
    loop
        exit when cardinality(v_opened) >= 2000;  -- the next check goes on
        select coalesce(j.own_lane, j.priority) as lane,
            coalesce(j.own_place, j.run_at) as place
        into v_first from rota.jobs as j
        where j.hold = _open_held.limit_name
          and j.hold <> 'time' and j.status in ('queued', 'failed') and j.queue = v_kind.queue
          and j.job_type = v_kind.job_type
          and (coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at))
            >= (v_kind.lane, v_kind.place)
        order by coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at), j.id
        limit 1;
        if found and (slots_given is null or (
            select o.jobs from rota._opened(limit_name, v_kind.queue, v_kind.job_type,
                v_first.lane, v_kind.open_id, 100, 1000) as o) < 100) then
            -- Slots before jobs: a claim takes both.
            v_free := coalesce(v_free, rota._free_slots(rota._bound(limit_name), 200), 200);
            -- Before any is locked: the end of one of these opens the next by itself.
            select o.jobs, o.id into v_open
            from rota._opened(limit_name, v_kind.queue, v_kind.job_type, v_first.lane,
                v_kind.open_id, v_free,
                case when slots_given is not null then 1000 end) as o;
            v_room := least(100, greatest(20, coalesce(slots_given, 100)),
                v_free - v_open.jobs);
            v_step := v_room;
            -- Where dead entries pile up no claim walks from their old places any more.
            if v_start is not null and v_room > 0 then
                v_place := rota._place_behind_dead(v_kind.queue, v_first.lane);
            end if;
            v_ids := case when not c_has_triggers
                then rota._open_for(limit_name, rota._lock_held(limit_name, v_kind.queue,
                    v_kind.job_type, v_first.lane, v_first.place, v_room), v_first.lane,
                    v_place)
                else '{}'::bigint[] end;
            v_refused := '{}'::bigint[];
            while c_has_triggers and cardinality(v_ids) < v_room
              and cardinality(v_refused) < 20 loop
                begin
                    -- In one subtransaction with the update, or the marks of the locks stay.
                    v_found := rota._lock_held(limit_name, v_kind.queue, v_kind.job_type,
                        v_first.lane, v_first.place, v_step, v_refused);
                    v_ids := v_ids || rota._open_for(limit_name, v_found, v_first.lane,
                        v_place);
                exception when others then
                    if rota._is_no_fault_of_a_row(sqlstate) then raise; end if;
                    if v_step > 1 then
                        v_step := 1;
                        continue;
                    end if;
                    raise warning 'job % cannot be let in: %', v_found[1], sqlerrm;
                end;
                -- One that a trigger refuses, or keeps held, keeps no other out.
                v_refused := v_refused || array(
                    select unnest(v_found) except select unnest(v_ids));
                exit when cardinality(v_found) < v_step;
            end loop;
            v_is_kept := v_is_kept or v_room > 0 and v_ids = '{}';
            v_kind.lane := v_first.lane;
            v_kind.place := v_first.place;
            v_kind.open_id := coalesce(
                least(v_open.id, (select min(i.id) from unnest(v_ids) as i (id))),
                v_kind.open_id);
            v_opened := v_opened || v_ids;
        end if;
        v_kinds := v_kinds || to_jsonb(v_kind);
    end loop;

    perform rota._notify_for(v_opened) where v_opened <> '{}';
    if slots_given is not null and (v_is_kept or jsonb_array_length(v_kinds) >= 20) then
        perform rota._check_later(limit_name, v_now + interval '1 second');
    end if;
    v_walked := pg_stat_get_xact_tuples_returned(c_index) - v_walked;
    if (v_opened <> '{}' or v_is_full and v_walked >= 200) and jsonb_array_length(v_kinds) <= 20
    then
        perform rota._keep_scan_start(c_scan, jsonb_build_object(
            'full_scan_at', case
                when v_is_full then rota._micros(v_now) + least(20 * v_walked, 2000000)
                else (v_start ->> 'full_scan_at')::bigint end,
            'kinds', v_kinds)::text);
    end if;
    return cardinality(v_opened);
end $$;

/* Lock up to so many held jobs of a kind from this place on, but for the refused. */
create or replace function rota._lock_held(
    limit_name text, queue text, job_type text, lane smallint, place timestamptz,
    max_jobs integer, refused bigint[] default '{}'
) returns bigint[] language plpgsql as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
begin
    return array(
        select j.id from rota.jobs as j
        where j.hold = _lock_held.limit_name
          and j.hold <> 'time' and j.status in ('queued', 'failed')
          and j.queue = _lock_held.queue and j.job_type = _lock_held.job_type
          and (coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at))
            >= (_lock_held.lane, _lock_held.place)
          and j.id <> all(_lock_held.refused)
        order by coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at), j.id
        limit _lock_held.max_jobs for update skip locked
    );
end $$;

/* Let held jobs into their lanes for this, as to take free slots of a limit; into this lane not
 * in front of that place, unless it is null.  Returns which went in. */
create or replace function rota._open_for(
    opened_for text, job_ids bigint[], lane integer, first_place timestamptz
) returns bigint[] language plpgsql as $$
declare
    v_opened bigint[];
begin
    with opened as (
        update rota.jobs as j
        set hold = null, opened_for = _open_for.opened_for, own_place = case
                when coalesce(j.own_lane, j.priority) = _open_for.lane
                    and coalesce(j.own_place, j.run_at) < _open_for.first_place
                    -- Their order stays.
                    then _open_for.first_place
                        + array_position(_open_for.job_ids, j.id) * interval '1 microsecond'
                else j.own_place
            end
        where j.id = any(_open_for.job_ids) returning j.id
    )
    select coalesce(array_agg(o.id), '{}') into v_opened from opened as o;
    return v_opened;
end $$;

/* How many jobs of a kind a limit has let into their lanes, up to so many, and the first.  One
 * that another session has locked does not count, once so many transactions have begun since:
 * the session may keep it, while the slot is for another.  Nor does one that is not due any
 * more, since the clock went back. */
create or replace function rota._opened(
    limit_name text, queue text, job_type text, last_lane smallint, first_id bigint,
    max_jobs integer, max_lock_age integer, out jobs integer, out id bigint
) language plpgsql stable as $$
declare
    c_now constant timestamptz := rota.now();
begin
    select count(*)::integer, min(o.id) into jobs, id
    from (
        select j.id from rota.jobs as j
        where j.opened_for = _opened.limit_name
          and j.hold is null and j.status in ('queued', 'failed')
          and j.queue = _opened.queue and j.job_type = _opened.job_type
          and j.id >= _opened.first_id
          and coalesce(j.own_lane, j.priority) <= _opened.last_lane and j.run_at <= c_now
          and (j.xmax = '0'::xid or j.xmax = j.xmin or age(j.xmax) < _opened.max_lock_age)
        order by j.id limit _opened.max_jobs
    ) as o;
end $$;

/* The limits of which other sessions have locked jobs that were let in, up to a hundred jobs.
 * Ticks look for them, since it may be that no job ends that would let in another; the two that
 * look remember apart when they last did (base/scan_start.sql). */
create or replace function rota._kept_limits(reader text)
    returns text[] language plpgsql set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    c_scan constant rota.scan := rota._begin_scan('kept ' || reader,
        'rota.jobs_opened_for_idx');
    v_marked bigint[]; v_free bigint[];
begin
    -- In an older snapshot, to lock what was changed since would be an error.
    if c_scan.start is not null
      or current_setting('transaction_isolation') <> 'read committed' then
        return '{}'::text[];
    end if;
    v_marked := array(
        select j.id from rota.jobs as j
        where j.opened_for is not null and j.opened_for not like 'try %'
          and j.xmax <> '0'::xid and j.xmax <> j.xmin
        limit 100
    );
    perform rota._end_scan(c_scan, 0);
    if v_marked = '{}' then return '{}'::text[]; end if;
    begin
        -- The mark of a lock stays when the lock is gone.
        v_free := array(
            select j.id from rota.jobs as j where j.id = any(v_marked) for update skip locked
        );
        raise exception using errcode = 'RTB01';
    exception
        when sqlstate 'RTB01' then null;
    end;
    return array(
        select distinct j.opened_for from rota.jobs as j
        where j.id = any(v_marked) and j.id <> all(v_free) and j.opened_for is not null
    );
end $$;

/* The queues and types that have held jobs of a limit, at most so many. */
create or replace function rota._held_kinds(limit_name text, max_kinds integer)
    returns table (queue text, job_type text) language plpgsql stable as $$
declare
    v_queue text := '';
    v_job_type text := '';
begin
    for v_kind in 1..max_kinds loop
        select j.queue, j.job_type into v_queue, v_job_type from rota.jobs as j
        where j.hold = _held_kinds.limit_name
          and j.hold <> 'time' and j.status in ('queued', 'failed')
          and (j.queue, j.job_type) > (v_queue, v_job_type)
        order by j.queue, j.job_type limit 1;
        exit when not found;
        queue := v_queue;
        job_type := v_job_type;
        return next;
    end loop;
end $$;

/* Look again at a limit: jobs may be held that can start, or its setting has changed.  If its
 * slots are taken, a second check is left, one at a time: when all transactions are over that
 * were there when it was first looked at, those that gave slots back and could not see the held
 * job have ended, and every job that runs now will see it at its end. */
create or replace function rota._check_limit(limit_name text, is_second boolean)
    returns boolean language plpgsql as $$
declare
    -- Asked first: what one that ends meanwhile gives back may come after the count.
    c_is_last constant boolean := is_second
        and rota._has_outlasted_others('slots', limit_name);
    v_bound rota.limits; v_taken integer;
    v_free integer := 1000;
    v_next timestamptz := rota.now();
    v_opened integer; v_is_backfilled boolean;
begin
    v_is_backfilled := rota._backfill_limit(limit_name);
    v_bound := rota._bound(limit_name);
    if limit_name like '%:*' then
        perform rota._check_class(limit_name);
        return v_is_backfilled;
    elsif v_bound.max_running is not null then
        if not rota._is_counted(v_bound) then
            return false;
        elsif not rota._adjust_slots(v_bound) then
            -- Jobs that run have slots that it has to give back: nobody knows when they end.
            perform rota._check_later(limit_name, rota.now() + interval '1 second');
            return v_is_backfilled;
        end if;
    end if;
    if limit_name like 'queue %' then
        perform rota._notify(substr(limit_name, 7));
        return v_is_backfilled;
    end if;

    if num_nonnulls(v_bound.max_running, v_bound.max_starts) = 0 then
        v_opened := rota._open_held(limit_name, 1000);
        if v_opened > 0 then perform rota._add_checks('limit', array[limit_name]); end if;
        return v_opened > 0 or not exists (select from rota._held_kinds(limit_name, 1));
    elsif v_bound.max_running is not null then
        v_taken := rota._slots_being_taken(limit_name);
        v_free := rota._free_slots(v_bound, 1000 + v_taken, true) - v_taken;
    end if;
    if v_bound.max_starts is not null then v_next := rota._next_start_at(v_bound); end if;

    if v_free > 0 and v_next <= rota.now() then
        v_opened := rota._open_held(limit_name, case when v_bound.max_starts is null then v_free
            else least(v_free, (select c.burst from rota._cells(v_bound) as c)) end);
    end if;
    if not exists (select from rota._held_kinds(limit_name, 1)) then
        return v_is_backfilled;
    elsif v_next > rota.now() then
        perform rota._check_later(limit_name, v_next);
    elsif v_free > 0 and v_bound.max_starts is not null then
        perform rota._check_later(limit_name, rota.now() + (
            select c.gap * interval '1 microsecond' from rota._cells(v_bound) as c));
    elsif v_opened >= 100 then
        perform rota._add_checks('limit', array[limit_name]);
    elsif v_free >= 1000 then
        perform rota._check_later(limit_name, rota.now() + interval '1 second');
    elsif v_free > 0 then
        -- Those that were opened open the next when they end, but perhaps none works on their
        -- kind.
        return v_is_backfilled and not exists (
            select from rota._held_kinds(limit_name, 1000) as k
            where not exists (
                select from rota.jobs as j where j.opened_for = limit_name and j.hold is null
                  and j.status in ('queued', 'failed') and j.queue = k.queue
                  and j.job_type = k.job_type
            )
        );
    elsif is_second then
        return v_is_backfilled and c_is_last;
    elsif exists (
        select from rota.pending_checks as c
        where c.kind = 'slots' and c.subject = limit_name and c.due_at > '-infinity'
    ) then
        -- It may be from before the job was held, which then has the next.
        return false;
    else
        -- No session remembers where to scan from for longer than 2 seconds.
        perform rota._add_checks('slots', array[limit_name],
            rota.now() + interval '2100 milliseconds');
    end if;
    return v_is_backfilled;
end $$;

/* How many slots of a limit are free and locked by a session, which may be a claim that stays
 * open: jobs that were let in for these would be held again by the next claim, and so on.  It
 * looks at the oldest, which claims take first. */
create or replace function rota._slots_being_taken(limit_name text)
    returns integer language plpgsql stable as $$
declare
    v_marks constant xid[] := array(
        select f.xmax
        from (
            select s.xmax from rota.limit_slots as s
            where s.limit_name = _slots_being_taken.limit_name order by s.version limit 2000
        ) as f
        where f.xmax <> '0'::xid
    );
begin
    if v_marks = '{}' then return 0; end if;
    -- The mark of a lock stays when the lock is gone.
    return (
        select count(*)::integer from unnest(v_marks) as m (xid)
        where m.xid = any(array(
            select l.transactionid from pg_locks as l
            where l.locktype = 'transactionid' and l.granted
        ))
    );
end $$;

/* Have a limit checked at that time at the latest, unless it is going to be. */
create or replace function rota._check_later(limit_name text, due_at timestamptz)
    returns void language plpgsql as $$
begin
    perform rota._add_checks('limit', array[_check_later.limit_name], _check_later.due_at)
    where not exists (
        select from rota.pending_checks as c
        where c.kind = 'limit'
          and c.subject = _check_later.limit_name and c.due_at > '-infinity'
          and c.due_at > rota.now() and c.due_at <= _check_later.due_at
    );
end $$;

/* Jobs of this kind will not take the slots they were let in for: have held ones checked. */
create or replace function rota._check_held_of(job_type text, limit_key text)
    returns void language plpgsql as $$
begin
    perform rota._add_checks('limit', array(
        select l.limit_name
        from rota._limits_of(_check_held_of.job_type, _check_held_of.limit_key) as l
    ));
end $$;

/* The limit of a class changed: have each key looked at that has held jobs, behind the one that
 * is named, or all for the name of the class; a chunk at a time. */
create or replace function rota._check_class(subject text)
    returns boolean language plpgsql as $$
declare
    c_chunk constant integer := 1000;
    c_prefix constant text := substring(subject, '^key [^:]*:');
    v_name text := case when subject = c_prefix || '*' then c_prefix else subject end;
    -- A key may have nothing behind its colon.
    v_names text[] := case when subject = c_prefix || '*' then array[c_prefix] end;
begin
    for v_number in 1..c_chunk loop
        select j.hold into v_name from rota.jobs as j
        where j.hold > v_name and j.hold < left(c_prefix, -1) || ';' and j.hold <> 'time'
          and j.status in ('queued', 'failed') order by j.hold limit 1;
        exit when not found;
        v_names := v_names || v_name;
    end loop;
    perform rota._add_checks('limit', v_names);
    perform rota._add_checks('class', array[v_name]) where v_name is not null;
    return true;
end $$;

/* Let what runs already count for a limit that was set just now; false if that has to be asked
 * again.  Claims that did not know of it are counted when they are committed: that is asked for
 * until every transaction from before has ended, and while one that runs has no row of its own.
 */
create or replace function rota._backfill_limit(limit_name text)
    returns boolean language plpgsql as $$
declare
    v_limit rota.limits;
    v_names text[] := array[limit_name];
    v_count integer := 1;
    v_locked text[]; v_is_whole boolean;
    v_rows constant tid[] := array(
        select c.ctid from rota.limits_to_count as c
        where c.limit_name = _backfill_limit.limit_name for update skip locked
    );
begin
    -- Nothing to count, or another tick has locked it, which has a check of its own.
    if v_rows = '{}' then return true; end if;
    select l.* into v_limit from rota.limits as l
    where l.limit_name = _backfill_limit.limit_name;
    if v_limit.max_running is not null then
        if limit_name like '%:*' then
            -- Of a class the keys that run uncounted, or whose part -2 may be too large by now:
            -- about 500 jobs at a time, since each key and each part takes a lock.
            select array_agg(k.limit_name) filter (where k.jobs_before < 500), count(*)::integer
            into v_names, v_count
            from (
                select n.limit_name, sum(count(*)) over (
                        order by bool_or(n.is_noted), n.limit_name) - count(*) as jobs_before
                from (
                    select u.limit_name, false as is_noted from rota._uncounted(v_limit) as u
                    union all
                    select p.limit_name, true from rota.limit_parts as p
                    where p.part = -2
                      -- From its colon on; the next character is the semicolon.
                      and p.limit_name >= left(v_limit.limit_name, -1)
                      and p.limit_name < left(v_limit.limit_name, -2) || ';'
                      and v_limit.limit_name = any(rota._key_limits(substr(p.limit_name, 5)))
                      and not exists (
                        select from rota.limits as l where l.limit_name = p.limit_name
                      )
                ) as n
                group by n.limit_name
            ) as k;
            perform rota._add_checks('limit', array[v_limit.limit_name])
            where cardinality(v_names) < v_count;
        end if;
        -- Of two sessions that count for one limit, of a key and of its class, one.
        v_locked := array(
            select n.name from unnest(v_names) as n (name)
            where rota._try_lock('rota.part -1 ' || n.name)
        );
        if v_locked <> '{}' then perform rota._count_running(v_limit, v_locked); end if;
        v_is_whole := cardinality(v_locked) = v_count;
    end if;

    delete from rota.limits_to_count as c
    where c.ctid = any(v_rows) and (v_limit.max_running is null
        or v_is_whole and c.asked_xid <= pg_snapshot_xmin(pg_current_snapshot())
          and not exists (select from rota._uncounted(v_limit)));
    update rota.limits_to_count as c
    set asked_xid = case when v_is_whole then n.next_xid end
    -- A snapshot alone does not know of those that began after the last that ended.
    from (
        select greatest(pg_current_xact_id(), pg_snapshot_xmax(pg_current_snapshot()))
            as next_xid
    ) as n
    -- A later one is that of set_limit(), or of the server that a dump is from.
    where c.ctid = any(v_rows) and (v_is_whole and c.asked_xid <= n.next_xid) is not true;
    return not exists (
        select from rota.limits_to_count as c
        where c.limit_name = _backfill_limit.limit_name
    );
end $$;

/* Whether what ran before a limit was set is counted, that of a key under its own name. */
create or replace function rota._is_counted(bound rota.limits)
    returns boolean language sql stable as $$
select not exists (
    select from rota.limits_to_count as c
    where c.limit_name = coalesce('key ' || bound.limit_key, bound.limit_name)
      and c.asked_xid is null
)
$$;

/* What runs without a slot of this limit, or of these keys, though it counts for it. */
create or replace function rota._uncounted(bound rota.limits, names text[] default null)
    returns table (id bigint, limit_name text) language plpgsql stable
    set enable_seqscan = off set enable_bitmapscan = off as $$
begin
    return query select j.id, n.name from rota.jobs as j
    cross join lateral (select rota._counted_name(bound, j.limit_key) as name) as n
    where j.status = 'running' and j.locked_until is not null
      and (j.queue = bound.queue or j.job_type = bound.job_type
        -- Hashed, where an array would be searched for each job.
        or bound.limit_key is not null and n.name in (select unnest(names))
        or names is null and (j.limit_key = bound.limit_key or bound.limit_key like '%:*'
          and bound.limit_name = any(rota._key_limits(j.limit_key))
          and not exists (select from rota.limits as l where l.limit_name = n.name)))
      and (n.name = any(j.held_limits)) is not true;
end $$;

/* Under which name a job with this key counts for a limit: for that of a class by its key. */
create or replace function rota._counted_name(bound rota.limits, limit_key text)
    returns text language sql immutable as $$
select case when bound.limit_key is not null then 'key ' || _counted_name.limit_key
    else bound.limit_name end
$$;

/* Let running jobs that count for these names hold a slot of each, up to a thousand of those
 * that no session has locked, and part -2 those of all others.  What ended gives its own back.
 * What is free and held is counted, too: rows that were changed by hand, or kept as they were
 * by a trigger, may have lost slots or doubled them. */
create or replace function rota._count_running(bound rota.limits, names text[])
    returns void language plpgsql as $$
declare
    v_name text; v_others integer; v_new integer;
begin
    update rota.jobs as j
    set held_limits = coalesce(j.held_limits, '{}') || rota._counted_name(bound, j.limit_key)
    where j.id = any(array(
        select r.id from rota.jobs as r
        where r.id = any(array(
            select u.id from rota._uncounted(bound, names) as u order by u.id limit 1000
        ))
          and r.status = 'running' and r.locked_until is not null
          and (rota._counted_name(bound, r.limit_key) = any(r.held_limits)) is not true
        order by r.id for update skip locked
    ));

    for v_name, v_others, v_new in
        select n.name, coalesce(u.jobs, 0), coalesce(u.jobs, 0) - (
                select coalesce(sum(p.slots), 0)::integer from rota.limit_parts as p
                where p.limit_name = n.name and p.part > -2
            ) + (
                select count(*)::integer from rota.limit_slots as s where s.limit_name = n.name
            ) + coalesce(h.jobs, 0)
        from unnest(_count_running.names) as n (name)
        left join (
            select o.limit_name, count(*)::integer as jobs
            from rota._uncounted(bound, _count_running.names) as o group by o.limit_name
        ) as u on u.limit_name = n.name
        left join (
            select i.limit_name, count(*)::integer as jobs from rota.jobs as j
            cross join lateral unnest(j.held_limits) as i (limit_name)
            where j.status = 'running' and j.locked_until is not null group by i.limit_name
        ) as h on h.limit_name = n.name
    loop
        if v_new <> 0 then
            -- In use already, whatever the capacity: _adjust_slots() makes up for them.
            insert into rota.limit_parts as p (limit_name, part, max_running, slots)
            values (v_name, -1, -1, v_new)
            on conflict on constraint limit_parts_pkey do update
            set slots = p.slots + excluded.slots, max_running = -1;
        end if;
        delete from rota.limit_parts as p where p.limit_name = v_name and p.part = -2;
        if v_others > 0 then
            insert into rota.limit_parts (limit_name, part, max_running, slots)
            values (v_name, -2, -1, -v_others);
        end if;
        if v_name <> bound.limit_name then
            perform rota._adjust_slots(rota._bound(v_name));
            if v_new < 0 then perform rota._add_checks('limit', array[v_name]); end if;
        end if;
    end loop;
end $$;

/* Bring what is issued of a limit in line with its setting; false if that is not done yet.
 * While it is not, nothing starts under the limit.  What is too much is taken from parts that
 * were not issued, then from free slots, and else from those that are given back later. */
create or replace function rota._adjust_slots(bound rota.limits)
    returns boolean language plpgsql as $$
declare
    c_parts constant integer := rota._parts(bound);
    v_surplus integer; v_moved integer;
begin
    if rota._is_issued_for(bound) and (c_parts > 0 or exists (
        select from rota.limit_parts as p where p.limit_name = bound.limit_name
    )) then
        return true;
    -- Of two sessions that adjust one limit, one; and none takes this part back.
    elsif not rota._try_lock('rota.part -1 ' || bound.limit_name) then
        return false;
    end if;
    -- What part -2 holds is in use, so it is left out as what jobs hold is.
    v_surplus := coalesce((
        select (sum(p.slots)
            - coalesce(sum(bound.max_running / nullif(c_parts, 0)
                + (p.part < bound.max_running % nullif(c_parts, 0))::integer)
            filter (where p.part between 0 and c_parts - 1), 0))::integer
        from rota.limit_parts as p where p.limit_name = bound.limit_name and p.part > -2
    ), 0) - case when c_parts = 0 then bound.max_running else 0 end;
    for v_part in 0..c_parts - 1 loop
        exit when v_surplus <= 0;
        continue when not rota._try_lock(concat('rota.part ', v_part, ' ', bound.limit_name));
        insert into rota.limit_parts (limit_name, part, max_running, slots)
        select bound.limit_name, v_part, bound.max_running, 0
        where not exists (
            select from rota.limit_parts as p
            where p.limit_name = bound.limit_name and p.part = v_part
        );
        if found then
            v_surplus := v_surplus - bound.max_running / c_parts
                - (v_part < bound.max_running % c_parts)::integer;
        end if;
    end loop;

    if v_surplus > 0 then
        delete from rota.limit_slots as s
        where s.ctid = any(array(
            select f.ctid from rota.limit_slots as f
            where f.limit_name = bound.limit_name order by f.version
            limit least(v_surplus, 10000) for update skip locked
        ));
        get diagnostics v_moved = row_count;
        v_moved := -v_moved;
    else
        v_moved := least(-v_surplus, 10000);
        perform rota._give_slots(array_fill(bound.limit_name, array[v_moved]));
    end if;
    insert into rota.limit_parts as p (limit_name, part, max_running, slots)
    values (bound.limit_name, -1, -1, v_moved)
    on conflict on constraint limit_parts_pkey do update
    set slots = p.slots + excluded.slots;
    if v_surplus + v_moved <> 0 then return false; end if;
    update rota.limit_parts as p
    set max_running = bound.max_running
    where p.limit_name = bound.limit_name and p.max_running <> bound.max_running;
    return true;
end $$;

/* Delete what no limit needs any more: starts of long ago and, if it may hold the locks that
 * takes, the slots of keys that are out of use and of limits that were taken away. */
create or replace function rota._purge_limits(max_rows integer, with_slots boolean)
    returns integer language plpgsql as $$
declare
    v_rows integer; v_name text;
begin
    delete from rota.limit_starts as s
    where s.ctid = any(array(
        select f.ctid from rota.limit_starts as f
        where f.purge_at < rota.now() - interval '1 minute' order by f.purge_at
        limit _purge_limits.max_rows for update skip locked
    ));
    get diagnostics v_rows = row_count;
    if not with_slots then return v_rows; end if;

    for v_name in
        select distinct c.limit_name
        from (
            select p.limit_name from rota.limit_parts as p
            where p.checked_at < rota.now() - interval '1 hour'
              and not exists (select from rota.limits as l where l.limit_name = p.limit_name)
            order by p.checked_at limit _purge_limits.max_rows
        ) as c
    loop
        v_rows := v_rows + rota._purge_slots(v_name);
    end loop;
    return v_rows;
end $$;

/* Take back all that was issued of a limit, if nothing of it is in use. */
create or replace function rota._purge_slots(limit_name text)
    returns integer language plpgsql as $$
declare
    v_rows tid[]; v_parts integer[]; v_issued bigint;
begin
    if not rota._try_lock('rota.part -1 ' || limit_name) then return 0; end if;
    v_rows := array(
        select s.ctid from rota.limit_slots as s where s.limit_name = _purge_slots.limit_name
        for update skip locked
    );
    -- After the slots, so that none is of a part that is not among these.
    select array_agg(p.part), sum(p.slots) into v_parts, v_issued from rota.limit_parts as p
    where p.limit_name = _purge_slots.limit_name;
    if cardinality(v_rows) < v_issued
      or exists (
        select from rota.limits_to_count as c
        where c.limit_name in (_purge_slots.limit_name,
            substring(_purge_slots.limit_name, '^key [^:]*:') || '*')
    ) then
        -- Asked again in an hour.
        update rota.limit_parts as p
        set checked_at = rota.now() where p.limit_name = _purge_slots.limit_name;
        return 0;
    end if;
    delete from rota.limit_parts as p
    where p.limit_name = _purge_slots.limit_name and p.part = any(v_parts);
    delete from rota.limit_slots as s where s.ctid = any(v_rows);
    -- Should the limit be set meanwhile.
    if limit_name not like 'key %:%' then
        perform rota._add_checks('limit', array[limit_name]);
    end if;
    return cardinality(v_rows);
end $$;
