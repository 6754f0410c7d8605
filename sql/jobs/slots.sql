/*
 * jobs/slots.sql -- the slots and starts that a claim takes under limits.
 *
 * A running job holds a slot of each limit that it counts for.  Free slots are rows: a claim
 * deletes rows that no other session has locked, and what ends the attempt (finish, fail,
 * release, sweep, force) inserts new ones in the same transaction.  No row is ever updated, so
 * no session waits, an open transaction keeps from others only the slots that it has taken, and
 * a slot is free with the lease that held it.
 *
 * set_limit() issues all slots of a limit as rows, and maintenance adjusts them when the
 * setting changes (waiting/limits.sql).  The exceptions are keys that may have a class, of
 * which there are many, and limits above 10,000: claims issue these in parts when they need
 * them, each part under an advisory lock of its own.  While such a claim is open, its whole
 * part is kept from others: a slot up to a limit of 64, else a 64th, at most 260.
 *
 * A rate is counted in cells, spans of time of one gap (per / max_starts) or, for a large
 * burst, a sixteenth of it.  A start takes a unit of a cell of the last `burst` gaps.  So in
 * any time at most as many jobs start as the rate allows in it, rounded up, and a burst more.
 * A claim that is open keeps the other starts of its cell from others: none up to a burst of
 * 16, else a sixteenth of it, and no longer than the cell counts, which is `burst` gaps.
 */

/* Of locked jobs that are about to run, in their order, those that find a slot and a start
 * under each of their limits, with the slots that they take, as _lock_due() has it.  The others
 * leave their lane, and their limits, which are named as full, are to be checked after the
 * commit.  Two kinds stay: jobs of a full queue, which is named, since no claim walks past them
 * to others; and jobs for which a slot or a start is left after all, because another limit
 * refused a job in front of them: for these the caller looks again. */
create or replace function rota._admit_jobs(
    job_ids bigint[], out ids bigint[], out held_limits jsonb, out full_queues text[],
    out full_limits text[], out limits_to_check text[], out must_look_again boolean
) language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    v_rates text[] := '{}'::text[];
    v_left integer; v_limit record; v_bound rota.limits; v_wanted bigint[]; v_refused bigint[];
    v_slots integer; v_free integer;
    v_unused text[] := '{}'::text[];
    v_slots_back text[];
    v_leaving bigint[] := '{}'::bigint[];
    v_holds text[] := '{}'::text[];
begin
    ids := job_ids;
    full_queues := '{}';
    limits_to_check := '{}';
    for v_limit in
        select l.limit_name, l.queue, (array_agg(l.l))[1] as bound,
            array_agg(i.id order by array_position(_admit_jobs.job_ids, i.id)) as job_ids,
            (count(*) over ())::integer as limits
        -- Many are of few kinds, and each is asked for once.
        from (
            select j.job_type, j.limit_key, j.queue, array_agg(j.id) as ids from rota.jobs as j
            where j.id = any(_admit_jobs.job_ids) group by 1, 2, 3
        ) as k
        cross join lateral (
            select n.limit_name, n.queue, n as l
            from rota._limits_of(k.job_type, k.limit_key, k.queue) as n
        ) as l
        cross join lateral unnest(k.ids) as i (id) group by 1, 2
        -- A queue comes last: the jobs that take its slots shall be able to start.
        order by l.queue is not null, l.limit_name
    loop
        v_left := coalesce(v_left, v_limit.limits) - 1;
        v_wanted := v_limit.job_ids;
        if cardinality(ids) < cardinality(job_ids) then
            v_wanted := array(
                select w.id from unnest(v_wanted) with ordinality as w (id, ordinal)
                where w.id = any(ids) order by w.ordinal
            );
        end if;
        v_bound := v_limit.bound;
        v_free := cardinality(v_wanted);
        if v_bound.max_running is not null and v_free > 0 then
            v_free := rota._take_slots(v_bound, v_free);
        end if;
        if v_bound.max_starts is not null and v_free > 0 then
            v_slots := v_free;
            -- What a limit after this one refuses must not count as started.
            v_free := rota._take_starts(v_bound, v_slots, v_now, v_left = 0);
            if v_left > 0 then v_rates := v_rates || v_limit.limit_name; end if;
            if v_bound.max_running is not null and v_slots > v_free then
                perform rota._give_slots(array_fill(v_limit.limit_name,
                    array[v_slots - v_free]));
            end if;
        end if;
        if v_bound.max_running is not null and v_free > 0 then
            held_limits := coalesce(held_limits, '{}') || (
                select jsonb_object_agg(w.id::text,
                    (coalesce((held_limits ->> w.id::text)::text[], '{}')
                        || v_limit.limit_name)::text)
                from unnest(v_wanted[:v_free]) as w (id)
            );
        end if;
        v_refused := v_wanted[v_free + 1:];
        continue when v_refused = '{}';

        ids := array(
            select i.id from unnest(ids) with ordinality as i (id, ordinal)
            where i.id <> all(v_refused) order by i.ordinal
        );
        v_slots_back := array(
            select unnest((held_limits ->> r.id::text)::text[])
            from unnest(v_refused) as r (id)
        );
        if v_slots_back <> '{}' then
            -- Jobs that are held for the other limit may have these slots.
            perform rota._give_slots(v_slots_back);
            limits_to_check := limits_to_check || v_slots_back;
        end if;
        v_unused := v_unused || v_slots_back || array(
            select l.limit_name from rota.jobs as j
            cross join lateral rota._limits_of(j.job_type, j.limit_key, j.queue) as l
            where j.id = any(v_refused) and l.limit_name = any(v_rates)
              and l.limit_name <> v_limit.limit_name
        );
        held_limits := held_limits - v_refused::text[];
        if v_limit.queue is not null then
            full_queues := full_queues || v_limit.queue;
        else
            -- Another job may have the slot that one of these was let in for.
            limits_to_check := limits_to_check || v_limit.limit_name || array_remove(array(
                select j.opened_for from rota.jobs as j where j.id = any(v_refused)), null);
            v_leaving := v_leaving || v_refused;
            v_holds := v_holds
                || array_fill(v_limit.limit_name, array[cardinality(v_refused)]);
        end if;
    end loop;
    if v_leaving <> '{}' then
        update rota.jobs as j
        set hold = v_holds[array_position(v_leaving, j.id)], opened_for = null
        where j.id = any(v_leaving)
          and v_holds[array_position(v_leaving, j.id)] <> all(v_unused);
    end if;
    must_look_again := v_holds && v_unused;
    full_limits := array(select unnest(v_holds) except select unnest(v_unused));
    if v_rates <> '{}' then
        perform rota._take_starts(r.bound, r.starts, v_now, true)
        from (
            select (array_agg(n.l))[1] as bound, count(*)::integer as starts
            from rota.jobs as j
            cross join lateral (
                select l.limit_name, l
                from rota._limits_of(j.job_type, j.limit_key, j.queue) as l
                where l.limit_name = any(v_rates)
            ) as n
            where j.id = any(ids) group by n.limit_name
        ) as r;
    end if;
end $$;

/* How many slots are free, up to that many: those that are issued, from where this session
 * takes them or, in a full scan, from the first on, and those of parts that are not.  Where it
 * finds the first is remembered for those who take. */
create or replace function rota._free_slots(
    bound rota.limits, max_slots integer, is_full boolean default false
) returns integer language plpgsql as $$
declare
    c_parts constant integer := rota._parts(bound);
    c_scan constant rota.scan := rota._begin_scan('free ' || bound.limit_name,
        'rota.limit_slots_pkey', is_full => is_full);
    -- Before the scan: what comes in during it stands behind it.
    c_last constant bigint := (select q.last_value from rota.limit_slots_version_seq as q);
    v_free integer; v_oldest bigint;
begin
    if not rota._is_issued_for(bound) then return 0; end if;
    select count(*)::integer, min(f.version) into v_free, v_oldest
    from (
        select s.version from rota.limit_slots as s
        where s.limit_name = bound.limit_name and s.version >= coalesce(c_scan.start, 0)
        order by s.version limit _free_slots.max_slots
    ) as f;
    perform rota._end_scan(c_scan, coalesce(v_oldest, c_scan.start, c_last));
    if v_free < max_slots and c_parts > 0 then
        v_free := v_free + bound.max_running - (
            select count(*)::integer * (bound.max_running / c_parts)
                + (count(*) filter (where p.part < bound.max_running % c_parts))::integer
            from rota.limit_parts as p
            where p.limit_name = bound.limit_name and p.part between 0 and c_parts - 1
        );
    end if;
    return least(v_free, max_slots);
end $$;

/* The limits that jobs of this kind count for. */
create or replace function rota._limits_of(
    job_type text, limit_key text, queue text default null
) returns setof rota.limits language sql stable as $$
select b.* from rota._bound('key ' || limit_key) as b
where num_nonnulls(b.max_running, b.max_starts) > 0
union all
select l.* from rota.limits as l where l.job_type = _limits_of.job_type
union all
select l.* from rota.limits as l where l.queue = _limits_of.queue;
$$;

/* The names that limits of a job of this kind may have; null where there can be none. */
create or replace function rota._limit_names(queue text, job_type text, limit_key text)
    returns text[] language sql immutable as $$
select array['queue ' || queue, 'type ' || job_type, 'key ' || limit_key,
    'key ' || substring(limit_key, '^[^:]*:') || '*']
$$;

/* What is set for a limit: for that of a key its own setting, else that of its class. */
create or replace function rota._bound(name text)
    returns rota.limits language plpgsql stable as $$
declare
    v_bound record;
begin
    if name is null then return null; end if;
    select l.* into v_bound from rota.limits as l
    where l.limit_name in (_bound.name, substring(_bound.name, '^key [^:]*:') || '*')
    order by l.limit_name = _bound.name desc limit 1;
    v_bound.limit_name := case when found then name end;
    return v_bound;
end $$;

/* The names of the limits that may be meant for a key: its own and that of its class. */
create or replace function rota._key_limits(limit_key text)
    returns text[] language sql immutable as $$
select array_remove(rota._limit_names(null, null, limit_key), null)
$$;

/* Into how many parts the slots of a limit are split that claims issue; none where maintenance
 * issues them all.  It is the name that says so and not whether the key has a row of its own: a
 * claim that knew the class only may be under way when that row is set. */
create or replace function rota._parts(bound rota.limits)
    returns integer language sql immutable as $$
select case when bound.max_running > 10000 or bound.limit_name like 'key %:%'
    then greatest(least(bound.max_running, 64), bound.max_running / 256) else 0 end
$$;

/* Whether all that is issued of a limit is for this setting, and what ran before it is counted;
 * else nothing starts under it. */
create or replace function rota._is_issued_for(bound rota.limits)
    returns boolean language plpgsql stable as $$
begin
    -- By two ranges, which an index finds.
    return not exists (
        select from rota.limit_parts as p
        where p.limit_name = bound.limit_name and p.max_running < bound.max_running
    ) and not exists (
        select from rota.limit_parts as p
        where p.limit_name = bound.limit_name and p.max_running > bound.max_running
    ) and not exists (
        -- As _is_counted() has it, which would be one more function to call.
        select from rota.limits_to_count as c
        where c.limit_name = coalesce('key ' || bound.limit_key, bound.limit_name)
          and c.asked_xid is null
    );
end $$;

/* Take up to that many slots that no other session has locked; returns how many.  Where there
 * are not enough, parts are issued that were not yet, if there are any.  A session that has the
 * lock of a part and then, in another statement, does not see it issued is the only one that
 * issues it; one that does not get the lock goes on to another part. */
create or replace function rota._take_slots(bound rota.limits, wanted integer)
    returns integer language plpgsql as $$
declare
    c_parts constant integer := rota._parts(bound);
    c_scan constant rota.scan := rota._begin_scan('free ' || bound.limit_name,
        'rota.limit_slots_pkey');
    v_taken integer; v_oldest bigint; v_issued integer[]; v_part integer; v_slots integer;
begin
    if not rota._is_issued_for(bound) then return 0; end if;
    with taken as (
        delete from rota.limit_slots as s
        where s.ctid = any(array(
            select f.ctid from rota.limit_slots as f
            where f.limit_name = bound.limit_name and f.version >= coalesce(c_scan.start, 0)
            order by f.version limit _take_slots.wanted for update skip locked
        ))
        returning s.version
    )
    select count(*)::integer, min(t.version) into v_taken, v_oldest from taken as t;
    perform rota._end_scan(c_scan, coalesce(v_oldest, c_scan.start,
        (select q.last_value from rota.limit_slots_version_seq as q)));
    if v_taken = wanted or c_parts = 0 then return v_taken; end if;

    v_issued := array(
        select p.part from rota.limit_parts as p
        where p.limit_name = bound.limit_name and p.part between 0 and c_parts - 1
    );
    if cardinality(v_issued) >= c_parts then return v_taken; end if;
    v_part := floor(random() * c_parts)::integer;
    for v_step in 1..c_parts loop
        exit when v_taken = wanted;
        v_part := (v_part + 1) % c_parts;
        continue when v_part = any(v_issued);
        continue when not rota._try_lock(concat('rota.part ', v_part, ' ', bound.limit_name));
        continue when exists (
            select from rota.limit_parts as p
            where p.limit_name = bound.limit_name and p.part = v_part
        );

        v_slots := bound.max_running / c_parts
            + (v_part < bound.max_running % c_parts)::integer;
        insert into rota.limit_parts (limit_name, part, max_running, slots)
        values (bound.limit_name, v_part, bound.max_running, v_slots);
        perform rota._give_slots(array_fill(bound.limit_name,
            array[greatest(0, v_slots - (wanted - v_taken))]));
        v_taken := least(v_taken + v_slots, wanted);
    end loop;
    return v_taken;
end $$;

/* Slots are free again: new rows, behind all others. */
create or replace function rota._give_slots(limit_names text[])
    returns void language plpgsql as $$
begin
    insert into rota.limit_slots (limit_name)
    select n.limit_name from unnest(_give_slots.limit_names) as n (limit_name);
end $$;

/* How many of so many may start at a rate, with the locks of their cells, under which a second
 * call counts them as started.  A session that has the lock of a cell sees in its next
 * statement all that started in it. */
create or replace function rota._take_starts(
    bound rota.limits, wanted integer, at timestamptz, are_started boolean
) returns integer language plpgsql as $$
declare
    v_rate record; v_now bigint; v_cell bigint; v_free integer;
    v_taken integer := 0;
begin
    select c.* into v_rate from rota._cells(bound) as c;
    v_now := floor(extract(epoch from at) * 1000000 / v_rate.length)::bigint;
    for v_step in 1..v_rate.cells loop
        exit when v_taken >= wanted;
        v_cell := v_now - v_rate.cells + v_step;
        continue when not rota._try_lock(concat('rota.cell ', v_cell, ' ', bound.limit_name));
        v_free := least(wanted - v_taken,
            case when v_step = 1 then v_rate.oldest_starts else v_rate.starts end - (
                select coalesce(sum(s.starts), 0)::integer from rota.limit_starts as s
                where s.limit_name = bound.limit_name and s.cell = v_cell
            ));
        continue when v_free <= 0;
        if are_started then
            insert into rota.limit_starts (limit_name, cell, starts, purge_at)
            values (bound.limit_name, v_cell, v_free,
                at + v_rate.cells * v_rate.length * interval '1 microsecond');
        end if;
        v_taken := v_taken + v_free;
    end loop;
    return v_taken;
end $$;

/* When the next job may start at a rate, as far as is committed; not after now if one may. */
create or replace function rota._next_start_at(bound rota.limits)
    returns timestamptz language plpgsql stable as $$
declare
    v_rate record; v_now bigint; v_used integer;
begin
    select c.* into v_rate from rota._cells(bound) as c;
    v_now := floor(extract(epoch from rota.now()) * 1000000 / v_rate.length)::bigint;
    select coalesce(sum(c.used), 0)::integer into v_used
    from (
        select least(sum(s.starts), case when s.cell = v_now - v_rate.cells + 1
            then v_rate.oldest_starts else v_rate.starts end) as used
        from rota.limit_starts as s
        where s.limit_name = bound.limit_name
          and s.cell between v_now - v_rate.cells + 1 and v_now group by s.cell
    ) as c;
    return 'epoch'::timestamptz + v_rate.length
        * (v_now + (v_used >= v_rate.burst)::integer) * interval '1 microsecond';
end $$;

/* How a rate is counted: the time from one start to the next and the length of a cell, in whole
 * microseconds, how many may start at once and in one cell, and how many cells back a start may
 * come from; of the last one only what is left of the burst.  The burst that nobody has set is
 * what the rate starts in a tenth of a second: workers do not look more often than that. */
create or replace function rota._cells(
    bound rota.limits, out gap bigint, out length bigint, out burst integer, out starts integer,
    out cells integer, out oldest_starts integer
) language plpgsql immutable as $$
begin
    gap := ceil(extract(epoch from coalesce(bound.per, '1 second')) * 1000000
        / bound.max_starts)::bigint;
    burst := coalesce(bound.burst, greatest(1, least(10000, 100000 / gap))::integer);
    starts := (burst + 15) / 16;
    length := gap * starts;
    cells := (burst + starts - 1) / starts;
    oldest_starts := burst - (cells - 1) * starts;
end $$;
