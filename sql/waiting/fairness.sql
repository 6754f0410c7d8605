/*
 * waiting/fairness.sql -- whose turn it is.
 *
 * The claim of queues with limits, tenants or ageing.  It walks the levels from the lowest up:
 * the level of a job is its priority, less one for each `ageing` of its queue that it waited.
 * Within a level jobs of the common line and of the buckets go by age, and the buckets of a
 * queue take turns: each has `weight` starts and goes behind the others.  Only the buckets that
 * are served are looked at, so a claim costs the same however many there are, and however many
 * jobs wait in them.
 *
 * A limit is held while jobs are started under it: its row in limit_states is locked first,
 * and what runs is counted after that.  So two claims never both take the last slot.  Where it
 * is reached the bucket is parked.  Whoever frees a slot leaves a note, and so does whoever
 * parks: of the two the one that commits last has its note read after both, and the reader
 * sees the free slot and the parked bucket.  A bucket that is taken away as empty, and a job
 * that comes in meanwhile, find each other in the same way.
 *
 * A claim takes what nobody has locked.  Only one that would go away with nothing looks again
 * and waits, 50 ms for each: eight workers of one bucket pass it on to each other, and a
 * transaction that somebody forgot holds up nobody.
 */

/*
 * Lock due jobs of queues that may have limits, buckets or ageing.  It also returns the queues
 * that the caller may go on with as if there was nothing of the kind.
 */
create or replace function rota._lock_shared(
    queues text[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns table (ids bigint[], open_queues text[])
    language plpgsql
as $$
declare
    v_open record;
    v_ids bigint[];
begin
    ids := '{}';
    select o.open_queues as queues, o.rooms, o.ageings
    into v_open
    from rota._open_queues(_lock_shared.queues) as o;
    if array_remove(v_open.rooms, null) = '{}' and array_remove(v_open.ageings, null) = '{}'
      and not exists (
        select
        from rota.buckets as b
        where b.queue = any(v_open.queues)
          and b.waits_for is null
    ) then
        open_queues := v_open.queues;
        return next;
        return;
    end if;

    v_ids := rota._walk_levels(
        v_open.queues, v_open.rooms, v_open.ageings, _lock_shared.max_jobs,
        _lock_shared.job_types, _lock_shared.due, false);
    if v_ids is null then
        v_ids := rota._walk_levels(
            v_open.queues, v_open.rooms, v_open.ageings, _lock_shared.max_jobs,
            _lock_shared.job_types, _lock_shared.due, true);
    end if;

    perform rota._use_rate(
        l.limit_name, l.max_starts, l.per, l.burst,
        (
            select count(*)
            from rota.jobs as j
            where j.id = any(v_ids)
              and j.id <> all((select rota._strays(v_ids))::bigint[])
              and j.queue = l.queue
        )::integer)
    from rota.limits as l
    where l.queue = any(v_open.queues)
      and l.max_starts is not null;
    ids := coalesce(v_ids, '{}');
    open_queues := '{}';
    return next;
end;
$$;

/*
 * The queues that have room, how much (null is unlimited), and how their jobs age.  Limited
 * ones are held from here on, in the order of their names.
 */
create or replace function rota._open_queues(queues text[])
    returns table (open_queues text[], rooms integer[], ageings interval[])
    language plpgsql
as $$
declare
    v_limit record;
    v_room integer;
begin
    select
        coalesce(array_agg(c.queue), '{}'), coalesce(array_agg(null::integer), '{}'),
        coalesce(array_agg(q.ageing), '{}')
    into open_queues, rooms, ageings
    from unnest(_open_queues.queues) as c (queue)
    left join rota.queues as q on q.queue = c.queue
    where not exists (select from rota.limits as l where l.queue = c.queue);

    for v_limit in
        select l.limit_name, l.queue, l.max_running, l.max_starts, l.per, l.burst, q.ageing
        from unnest(_open_queues.queues) as c (queue)
        join rota.limits as l on l.queue = c.queue
        left join rota.queues as q on q.queue = c.queue
        order by l.limit_name
    loop
        -- Without the lock first: a queue that is full is left out without waiting for anybody.
        for v_is_held in 0..1 loop
            v_room := (
                select r.room
                from rota._room(
                    v_limit.limit_name, v_limit.max_running, v_limit.max_starts, v_limit.per,
                    v_limit.burst, '{}') as r
            );
            exit when v_room <= 0 or v_is_held = 1;
            if not rota._hold_limit(v_limit.limit_name, true) then
                v_room := 0;
                exit;
            end if;
        end loop;
        continue when v_room <= 0;
        open_queues := open_queues || v_limit.queue;
        rooms := rooms || v_room;
        ageings := ageings || v_limit.ageing;
    end loop;
    return next;
end;
$$;

/* Ids of locked jobs; null if there are none, but somebody holds a bucket that has some. */
create or replace function rota._walk_levels(
    queues text[],
    rooms integer[],
    ageings interval[],
    max_jobs integer,
    job_types text[],
    due timestamptz,
    may_wait boolean
)
    returns bigint[]
    language plpgsql
as $$
declare
    v_level bigint;
    v_lanes record;
    v_round record;
    v_ids bigint[] := '{}'::bigint[];
    v_seen text[] := '{}'::text[];
    v_is_busy boolean := false;
begin
    while cardinality(v_ids) < _walk_levels.max_jobs loop
        v_level := rota._next_level(
            _walk_levels.queues, _walk_levels.ageings, _walk_levels.due, v_level);
        exit when v_level is null;

        -- Each round gives every bucket of its list a turn.
        loop
            select array_agg(l.queue) as queues, array_agg(l.priority) as priorities,
                array_agg(l.until) as untils, array_agg(l.room) as rooms
            into v_lanes
            from rota._level_lanes(
                _walk_levels.queues, _walk_levels.rooms, _walk_levels.ageings, v_level,
                _walk_levels.due, v_ids) as l;
            exit when v_lanes.queues is null;
            select r.new_ids, r.new_seen, r.is_busy, r.is_last
            into v_round
            from rota._take_round(
                v_lanes.queues, v_lanes.priorities, v_lanes.untils, v_lanes.rooms,
                _walk_levels.max_jobs - cardinality(v_ids), _walk_levels.job_types,
                _walk_levels.due, _walk_levels.may_wait and not v_is_busy, v_ids, v_seen) as r;
            v_ids := v_ids || v_round.new_ids;
            v_seen := v_seen || v_round.new_seen;
            v_is_busy := v_is_busy or v_round.is_busy;
            exit when v_round.is_last or cardinality(v_ids) >= _walk_levels.max_jobs;
        end loop;
        -- Not before something is found: all seen so far may be of types that go to others.
        exit when cardinality(v_ids) > 0
          and cardinality(v_seen) > _walk_levels.max_jobs + 50;
    end loop;

    if cardinality(v_ids) = 0 and v_is_busy and not _walk_levels.may_wait then
        return null;
    end if;
    return v_ids;
end;
$$;

/* The lowest level above that one, or of all, that any lane has due jobs of. */
create or replace function rota._next_level(
    queues text[],
    ageings interval[],
    due timestamptz,
    after_level bigint
)
    returns bigint
    language plpgsql
    stable
as $$
declare
    v_level bigint;
    v_aged bigint;
    v_after constant integer := least(
        greatest(coalesce(_next_level.after_level, -32769), -32769), 32768)::integer;
begin
    select min(least(
        (
            select j.priority
            from rota.jobs as j
            where j.queue = c.queue
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.priority > v_after
            order by j.priority
            limit 1
        ),
        (
            select b.priority
            from rota.buckets as b
            where b.queue = c.queue
              and b.waits_for is null
              and b.priority > v_after
            order by b.priority
            limit 1
        )
    ))::bigint
    into v_level
    from unnest(_next_level.queues, _next_level.ageings) as c (queue, ageing)
    where c.ageing is null;

    if array_remove(_next_level.ageings, null) <> '{}' then
        select min(greatest(
            rota._level(p.priority, least(p.run_at, p.turn_at), c.ageing, _next_level.due),
            _next_level.after_level + 1))
        into v_aged
        from unnest(_next_level.queues, _next_level.ageings) as c (queue, ageing)
        cross join lateral rota._aged_lanes(
            c.queue, c.ageing, _next_level.due, _next_level.after_level) as p
        where c.ageing is not null;
    end if;
    return least(v_level, v_aged);
end;
$$;

create or replace function rota._level(
    priority integer,
    since timestamptz,
    ageing interval,
    due timestamptz
)
    returns bigint
    language plpgsql
    immutable
as $$
begin
    return _level.priority - case
        when _level.ageing is null or _level.since > _level.due then 0
        else floor(extract(epoch from _level.due - _level.since)
            / extract(epoch from _level.ageing))::bigint
    end;
end;
$$;

/* How long a job must have waited to be of that level; '-infinity' before any level. */
create or replace function rota._waiting_since(
    priority integer,
    level bigint,
    ageing interval,
    due timestamptz
)
    returns timestamptz
    language plpgsql
    immutable
as $$
begin
    return case
        when _waiting_since.level is null then '-infinity'
        -- Levels are of all queues, and those of one that ages fast are far apart for another.
        when (_waiting_since.priority - _waiting_since.level)
            * extract(epoch from _waiting_since.ageing)
            > extract(epoch from _waiting_since.due - timestamptz '1900-01-01 00:00+00')
        then '-infinity'
        else _waiting_since.due - (_waiting_since.priority - _waiting_since.level)::integer
            * _waiting_since.ageing
    end;
end;
$$;

/* The priorities in use in a queue that ages, and since when the first of each waits. */
create or replace function rota._aged_lanes(
    queue text,
    ageing interval,
    due timestamptz,
    after_level bigint
)
    returns table (priority integer, run_at timestamptz, turn_at timestamptz)
    language plpgsql
    stable
as $$
declare
    v_since timestamptz;
begin
    priority := -32769;
    loop
        priority := least(
            (
                select j.priority
                from rota.jobs as j
                where j.queue = _aged_lanes.queue
                  and j.bucket is null
                  and j.status in ('queued', 'failed')
                  and j.priority > _aged_lanes.priority
                order by j.priority
                limit 1
            ),
            (
                select b.priority
                from rota.buckets as b
                where b.queue = _aged_lanes.queue
                  and b.waits_for is null
                  and b.priority > _aged_lanes.priority
                order by b.priority
                limit 1
            )
        )::integer;
        exit when priority is null;

        v_since := rota._waiting_since(
            priority, _aged_lanes.after_level, _aged_lanes.ageing, _aged_lanes.due);
        run_at := (
            select j.run_at
            from rota.jobs as j
            where j.queue = _aged_lanes.queue
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.priority = _aged_lanes.priority
              and j.run_at > v_since
              and j.run_at <= _aged_lanes.due
            order by j.run_at
            limit 1
        );
        turn_at := (
            select b.turn_at
            from rota.buckets as b
            where b.queue = _aged_lanes.queue
              and b.waits_for is null
              and b.priority = _aged_lanes.priority
              and b.turn_at > v_since
            order by b.turn_at
            limit 1
        );
        if run_at is not null or turn_at is not null then
            return next;
        end if;
    end loop;
end;
$$;

/* The lanes with jobs of a level, until when these came, and the room of the queue. */
create or replace function rota._level_lanes(
    queues text[],
    rooms integer[],
    ageings interval[],
    level bigint,
    due timestamptz,
    ids bigint[]
)
    returns table (queue text, priority integer, until timestamptz, room integer)
    language plpgsql
    stable
as $$
begin
    return query
    select c.queue, p.priority, p.until, c.room - c.taken
    from (
        select
            q.queue, q.room, q.ageing,
            case when q.room is not null then (
                select count(*)
                from rota.jobs as j
                where j.id = any(_level_lanes.ids)
                  and j.queue = q.queue
            ) end::integer as taken
        from unnest(_level_lanes.queues, _level_lanes.rooms, _level_lanes.ageings)
            as q (queue, room, ageing)
    ) as c
    cross join lateral (
        select _level_lanes.level::integer as priority, timestamptz 'infinity' as until
        where c.ageing is null
          and _level_lanes.level between -32768 and 32767
        union all
        select
            a.priority,
            case
                when a.priority = _level_lanes.level then timestamptz 'infinity'
                else rota._waiting_since(
                    a.priority, _level_lanes.level, c.ageing, _level_lanes.due)
            end
        from rota._aged_lanes(c.queue, c.ageing, _level_lanes.due, null) as a
        where c.ageing is not null
          and a.priority >= _level_lanes.level
    ) as p
    where c.room is null
       or c.room > c.taken;
end;
$$;

/*
 * One turn for each of the next buckets, and before it the jobs of the common lanes that are
 * older.  Of k buckets each has its weight as often as half of the jobs wanted allow: so a
 * large batch needs few rounds and is still shared fairly.
 */
create or replace function rota._take_round(
    queues text[],
    priorities integer[],
    untils timestamptz[],
    rooms integer[],
    max_jobs integer,
    job_types text[],
    due timestamptz,
    may_wait boolean,
    ids bigint[],
    seen text[]
)
    returns table (new_ids bigint[], new_seen text[], is_busy boolean, is_last boolean)
    language plpgsql
as $$
declare
    -- Where a queue has only some room it is asked for anew after whatever was taken.
    c_has_rooms constant boolean := array_remove(_take_round.rooms, null) <> '{}';
    v_turns record;
    v_count integer;
    v_share integer := _take_round.max_jobs;
    v_common_at timestamptz;
    v_taken bigint[];
begin
    new_ids := '{}';
    new_seen := '{}';
    is_busy := false;
    select array_agg(b.queue) as queues, array_agg(b.bucket) as buckets,
        array_agg(b.run_at) as times, array_agg(b.room) as rooms, array_agg(b.place) as places
    into v_turns
    from rota._next_buckets(
        _take_round.queues, _take_round.priorities, _take_round.untils, _take_round.rooms,
        least(_take_round.max_jobs, 100), _take_round.job_types, _take_round.seen) as b;
    v_count := coalesce(cardinality(v_turns.queues), 0);
    is_last := v_count = 0;
    if v_count > 1 then
        v_share := greatest(1, _take_round.max_jobs / (2 * v_count));
    end if;

    for v_turn in 1..v_count + 1 loop
        exit when v_turn > v_count and not is_last;
        if v_common_at is null then
            v_common_at := rota._common_head(
                _take_round.queues, _take_round.priorities, _take_round.untils,
                _take_round.due, _take_round.ids || new_ids);
        end if;
        if is_last or v_common_at <= v_turns.times[v_turn] then
            v_taken := rota._lock_common(
                _take_round.queues, _take_round.priorities, _take_round.untils,
                _take_round.rooms, least(v_turns.times[v_turn], _take_round.due),
                _take_round.max_jobs - cardinality(new_ids), _take_round.job_types,
                _take_round.ids || new_ids);
            new_ids := new_ids || v_taken;
            v_common_at := null;
            is_last := is_last and not (c_has_rooms and cardinality(v_taken) > 0);
            exit when c_has_rooms and cardinality(v_taken) > 0;
        end if;
        exit when is_last or cardinality(new_ids) >= _take_round.max_jobs;

        v_taken := rota._serve(
            v_turns.queues[v_turn], v_turns.buckets[v_turn], v_count, v_share,
            least(_take_round.max_jobs - cardinality(new_ids), v_turns.rooms[v_turn]),
            _take_round.job_types, _take_round.due,
            _take_round.may_wait and not is_busy
                and cardinality(_take_round.ids || new_ids) = 0,
            _take_round.ids || new_ids);
        is_busy := is_busy or v_taken is null;
        if coalesce(cardinality(v_taken), 0) = 0 then
            new_seen := new_seen || v_turns.places[v_turn];
        end if;
        new_ids := new_ids || coalesce(v_taken, '{}');
        exit when cardinality(new_ids) >= _take_round.max_jobs
          or c_has_rooms and cardinality(new_ids) > 0;
    end loop;
    return next;
end;
$$;

/* The buckets of these lanes whose turn comes next, but for those that were seen already. */
create or replace function rota._next_buckets(
    queues text[],
    priorities integer[],
    untils timestamptz[],
    rooms integer[],
    max_buckets integer,
    job_types text[],
    seen text[]
)
    returns table (queue text, bucket text, run_at timestamptz, room integer, place text)
    language plpgsql
    stable
as $$
begin
    return query
    select n.queue, n.bucket, n.run_at, n.room, n.place
    from (
        select c.queue, t.bucket, t.run_at, t.turn_at, c.room,
            format('%s %s %s', c.queue, c.priority, t.bucket) as place
        from unnest(
            _next_buckets.queues, _next_buckets.priorities, _next_buckets.untils,
            _next_buckets.rooms) as c (queue, priority, until, room)
        cross join lateral (
            select b.bucket, b.run_at, b.turn_at
            from rota.buckets as b
            where b.queue = c.queue
              and b.priority = c.priority
              and b.waits_for is null
              and b.turn_at <= c.until
              -- Who gave the line of a limited type a turn and took nothing would ring another.
              and (_next_buckets.job_types is null or b.bucket like '|%'
                or split_part(b.bucket, '|', 1) = any(_next_buckets.job_types))
              and format('%s %s %s', b.queue, b.priority, b.bucket) <> all(_next_buckets.seen)
            order by b.turn_at
            limit _next_buckets.max_buckets
        ) as t
    ) as n
    order by n.turn_at, n.bucket
    limit _next_buckets.max_buckets;
end;
$$;

/* When the first due job of these common lanes was due. */
create or replace function rota._common_head(
    queues text[],
    priorities integer[],
    untils timestamptz[],
    due timestamptz,
    ids bigint[]
)
    returns timestamptz
    language plpgsql
    stable
as $$
begin
    return coalesce((
        select min(l.run_at)
        from unnest(_common_head.queues, _common_head.priorities, _common_head.untils)
            as c (queue, priority, until)
        cross join lateral (
            select j.run_at
            from rota.jobs as j
            where j.queue = c.queue
              and j.priority = c.priority
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.run_at <= least(c.until, _common_head.due)
              and j.id <> all(_common_head.ids)
            order by j.run_at, j.id
            limit 1
        ) as l
    ), 'infinity');
end;
$$;

/* Lock the first jobs of these common lanes, of each queue as many as it has room. */
create or replace function rota._lock_common(
    queues text[],
    priorities integer[],
    untils timestamptz[],
    rooms integer[],
    until timestamptz,
    max_jobs integer,
    job_types text[],
    ids bigint[]
)
    returns bigint[]
    language plpgsql
as $$
declare
    v_window constant integer := _lock_common.max_jobs + 20;
    c_waiting constant text[] := '{queued,failed}'::text[];
    v_after_run_at timestamptz := timestamptz '-infinity';
    v_after_id bigint := 0::bigint;
    v_candidates bigint[];
    v_ids bigint[] := '{}'::bigint[];
begin
    if cardinality(_lock_common.queues) = 1 then
        return rota._lock_line(
            _lock_common.queues[1], _lock_common.priorities[1],
            least(_lock_common.untils[1], _lock_common.until),
            least(_lock_common.max_jobs, _lock_common.rooms[1]), _lock_common.job_types,
            _lock_common.ids);
    end if;
    loop
        v_candidates := array(
            select m.id
            from unnest(
                _lock_common.queues, _lock_common.priorities, _lock_common.untils)
                as c (queue, priority, until)
            cross join lateral (
                select j.id, j.run_at
                from rota.jobs as j
                where j.queue = c.queue
                  and j.priority = c.priority
                  and j.bucket is null
                  and j.status in ('queued', 'failed')
                  and j.run_at <= least(c.until, _lock_common.until)
                  and (j.run_at, j.id) > (v_after_run_at, v_after_id)
                  and (_lock_common.job_types is null
                    or j.job_type = any(_lock_common.job_types))
                  and j.id <> all(_lock_common.ids)
                order by j.run_at, j.id
                limit v_window
            ) as m
            order by m.run_at, m.id
            limit v_window
        );
        v_ids := v_ids || array(
            select j.id
            from rota.jobs as j
            where j.id = any(v_candidates)
              and j.status = any(c_waiting)
              and j.run_at <= _lock_common.until
            order by j.run_at, j.id
            limit _lock_common.max_jobs - cardinality(v_ids)
            for update skip locked
        );
        exit when cardinality(v_ids) = _lock_common.max_jobs
          or cardinality(v_candidates) < v_window;

        v_after_id := v_candidates[v_window];
        select j.run_at into v_after_run_at from rota.jobs as j where j.id = v_after_id;
        exit when not found;
    end loop;
    return rota._within_room(v_ids, _lock_common.queues, _lock_common.rooms);
end;
$$;

create or replace function rota._lock_line(
    queue text,
    priority integer,
    until timestamptz,
    max_jobs integer,
    job_types text[],
    ids bigint[]
)
    returns bigint[]
    language plpgsql
as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
begin
    return array(
        select j.id
        from rota.jobs as j
        where j.queue = _lock_line.queue
          and j.priority = _lock_line.priority
          and j.bucket is null
          and j.status in ('queued', 'failed')
          and j.run_at <= _lock_line.until
          and (_lock_line.job_types is null or j.job_type = any(_lock_line.job_types))
          and j.id <> all(_lock_line.ids)
        order by j.run_at, j.id
        limit _lock_line.max_jobs
        for update skip locked
    );
end;
$$;

/* Of these jobs the first of each queue, as many as it has room; the others stay waiting. */
create or replace function rota._within_room(ids bigint[], queues text[], rooms integer[])
    returns bigint[]
    language plpgsql
    stable
as $$
begin
    if array_remove(_within_room.rooms, null) = '{}' then
        return _within_room.ids;
    end if;
    return array(
        select r.id
        from (
            select j.id, j.run_at, c.room,
                row_number() over (partition by j.queue order by j.run_at, j.id) as place
            from rota.jobs as j
            join (
                select u.queue, min(u.room) as room
                from unnest(_within_room.queues, _within_room.rooms) as u (queue, room)
                group by u.queue
            ) as c on c.queue = j.queue
            where j.id = any(_within_room.ids)
        ) as r
        where r.room is null
           or r.place <= r.room
        order by r.run_at, r.id
    );
end;
$$;

/*
 * Start jobs of one bucket; null if somebody has it or its limit locked, and nothing if it has
 * none to give now: then it is parked, or behind the others, or gone.
 */
create or replace function rota._serve(
    queue text,
    bucket text,
    buckets integer,
    share integer,
    max_jobs integer,
    job_types text[],
    due timestamptz,
    may_wait boolean,
    ids bigint[]
)
    returns bigint[]
    language plpgsql
as $$
declare
    c_type constant text := nullif(split_part(_serve.bucket, '|', 1), '');
    v_priority integer;
    v_starts integer;
    v_limit record;
    v_room record;
    v_weight integer := 1;
    v_wanted integer := _serve.max_jobs;
    v_taken bigint[] := '{}'::bigint[];
begin
    if not rota._hold_bucket(_serve.queue, _serve.bucket, _serve.may_wait) then
        return null;
    end if;
    -- Not "is null": for that the planner may walk the whole line of turns to find the bucket.
    select b.priority::integer, b.starts
    into v_priority, v_starts
    from rota.buckets as b
    where b.queue = _serve.queue
      and b.bucket = _serve.bucket
      and coalesce(b.waits_for, '') = '';
    if not found then
        return v_taken;
    end if;

    if c_type is null or _serve.job_types is null or c_type = any(_serve.job_types) then
        for v_limit in select * from rota._limits_of(_serve.bucket) loop
            v_weight := coalesce(v_limit.weight, v_weight);
            continue when v_limit.max_running is null and v_limit.max_starts is null;
            if not rota._hold_limit(v_limit.limit_name, _serve.may_wait) then
                return null;
            end if;
            select r.room
            into v_room
            from rota._room(
                v_limit.limit_name, v_limit.max_running, v_limit.max_starts, v_limit.per,
                v_limit.burst, _serve.ids) as r;
            if v_room.room <= 0 then
                perform rota._park(_serve.queue, _serve.bucket, v_limit.limit_name);
                return v_taken;
            end if;
            -- Buckets of one type share its room, and not the first takes all.
            v_wanted := least(v_wanted, case
                when _serve.buckets = 1 or v_limit.limit_name like 'key %'
                then v_room.room
                else greatest(1, v_room.room / (2 * _serve.buckets))
            end);
        end loop;
        v_wanted := least(v_wanted, greatest(1, _serve.share * v_weight - v_starts));
        v_taken := rota._lock_bucket(
            _serve.queue, _serve.bucket, v_priority, v_wanted, _serve.job_types, _serve.due,
            _serve.ids);
        perform rota._use_rate(
            l.limit_name, l.max_starts, l.per, l.burst,
            cardinality(v_taken) - cardinality(rota._strays(v_taken)))
        from rota._limits_of(_serve.bucket) as l
        where l.max_starts is not null;
    end if;
    perform rota._end_turn(
        _serve.queue, _serve.bucket, cardinality(v_taken), v_weight, _serve.due,
        _serve.ids || v_taken);
    if c_type is not null and cardinality(v_taken) = 0 then
        perform rota._note('limit', 'type ' || c_type, rota.now());
    end if;
    return v_taken;
end;
$$;

/* Lock a bucket; true also if it is gone. */
create or replace function rota._hold_bucket(queue text, bucket text, may_wait boolean)
    returns boolean
    language plpgsql
as $$
begin
    perform
    from rota.buckets as b
    where b.queue = _hold_bucket.queue
      and b.bucket = _hold_bucket.bucket
    for update skip locked;
    if found then
        return true;
    elsif not exists (
        select
        from rota.buckets as b
        where b.queue = _hold_bucket.queue
          and b.bucket = _hold_bucket.bucket
    ) then
        return true;
    end if;
    return _hold_bucket.may_wait
        and rota._wait_for_bucket(_hold_bucket.queue, _hold_bucket.bucket);
end;
$$;

create or replace function rota._wait_for_bucket(queue text, bucket text)
    returns boolean
    language plpgsql
    set lock_timeout = '50ms'
as $$
begin
    perform
    from rota.buckets as b
    where b.queue = _wait_for_bucket.queue
      and b.bucket = _wait_for_bucket.bucket
    for update;
    return true;
exception
    when lock_not_available then
        return false;
end;
$$;

/* Lock the first due jobs of a bucket; for a worker of some types, of whatever priority. */
create or replace function rota._lock_bucket(
    queue text,
    bucket text,
    priority integer,
    max_jobs integer,
    job_types text[],
    due timestamptz,
    ids bigint[]
)
    returns bigint[]
    language plpgsql
as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_taken bigint[];
begin
    v_taken := array(
        select j.id
        from rota.jobs as j
        where j.queue = _lock_bucket.queue
          and j.bucket = _lock_bucket.bucket
          and j.priority = _lock_bucket.priority
          and j.status in ('queued', 'failed')
          and j.run_at <= _lock_bucket.due
          and (_lock_bucket.job_types is null or j.job_type = any(_lock_bucket.job_types))
          and j.id <> all(_lock_bucket.ids)
        order by j.run_at, j.id
        limit _lock_bucket.max_jobs
        for update skip locked
    );
    if cardinality(v_taken) > 0 or _lock_bucket.job_types is null then
        return v_taken;
    end if;
    return array(
        select j.id
        from rota.jobs as j
        where j.queue = _lock_bucket.queue
          and j.bucket = _lock_bucket.bucket
          and j.status in ('queued', 'failed')
          and j.run_at <= _lock_bucket.due
          and j.job_type = any(_lock_bucket.job_types)
          and j.id <> all(_lock_bucket.ids)
        order by j.priority, j.run_at, j.id
        limit _lock_bucket.max_jobs
        for update skip locked
    );
end;
$$;

/* Write down what is the first job of a bucket now, and its place; or that it has none. */
create or replace function rota._end_turn(
    queue text,
    bucket text,
    starts integer,
    weight integer,
    due timestamptz,
    ids bigint[]
)
    returns void
    language plpgsql
as $$
declare
    v_priority integer;
    v_run_at timestamptz;
begin
    select h.priority, h.run_at
    into v_priority, v_run_at
    from rota._bucket_head(_end_turn.queue, _end_turn.bucket, _end_turn.due, _end_turn.ids)
        as h;
    if v_priority is null then
        delete from rota.buckets as b
        where b.queue = _end_turn.queue
          and b.bucket = _end_turn.bucket;
        -- For a job that came in since the look, and found the bucket there.
        perform rota._note(
            'bucket', format('%s %s', _end_turn.queue, _end_turn.bucket), rota.now());
        return;
    end if;

    update rota.buckets as b
    set priority = v_priority,
        run_at = v_run_at,
        turn_at = case
            when _end_turn.starts > 0 and b.starts + _end_turn.starts < _end_turn.weight
            then b.turn_at
            else greatest(rota.now(), b.turn_at + interval '1 microsecond')
        end,
        starts = case
            when b.starts + _end_turn.starts < _end_turn.weight
            then b.starts + _end_turn.starts
            else 0
        end
    where b.queue = _end_turn.queue
      and b.bucket = _end_turn.bucket;
end;
$$;

/* The first due job of a bucket that is none of these; if none is due, when one will be. */
create or replace function rota._bucket_head(
    queue text,
    bucket text,
    due timestamptz,
    ids bigint[]
)
    returns table (priority integer, run_at timestamptz, next_run_at timestamptz)
    language plpgsql
    stable
as $$
declare
    c_ageing constant interval := (
        select q.ageing from rota.queues as q where q.queue = _bucket_head.queue);
    v_priority integer := -32769;
    v_run_at timestamptz;
    v_level bigint;
begin
    loop
        select j.priority::integer, j.run_at
        into v_priority, v_run_at
        from rota.jobs as j
        where j.queue = _bucket_head.queue
          and j.bucket = _bucket_head.bucket
          and j.status in ('queued', 'failed')
          and j.priority > v_priority
          and j.id <> all(_bucket_head.ids)
        order by j.priority, j.run_at, j.id
        limit 1;
        exit when not found;
        next_run_at := least(next_run_at, v_run_at);
        if v_run_at <= _bucket_head.due and coalesce(
            rota._level(v_priority, v_run_at, c_ageing, _bucket_head.due) < v_level, true) then
            v_level := rota._level(v_priority, v_run_at, c_ageing, _bucket_head.due);
            priority := v_priority;
            run_at := v_run_at;
            exit when c_ageing is null;
        end if;
    end loop;
    return next;
end;
$$;
