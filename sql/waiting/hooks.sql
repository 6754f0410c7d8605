/*
 * waiting/hooks.sql -- where jobs/ reports that jobs come in, wait and end.
 *
 * jobs/ does not know how jobs wait for parents, under a key, for a limit or in a schedule:
 * whatever follows when a job comes in or ends begins here, and these five functions are the
 * only ones of waiting/ that jobs/ calls.
 */

/* These jobs are new, or were retried.  Each of child_ids waits for the one of parent_ids at
 * the same place; and each of *blocks* for the one of *parts*, which *arguments* has named, and
 * of which those of are_new are new.  What waits for nothing starts, and the others leave their
 * checks.  Retried jobs may have halted their keys, which then go on. */
create or replace function rota._jobs_came_in(
    job_ids bigint[], child_ids bigint[] default null, parent_ids bigint[] default null,
    blocks bigint[] default null, parts bigint[] default null, are_new boolean[] default null,
    arguments text[] default null, may_have_halted boolean default false
) returns void language plpgsql set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_parents bigint[]; v_waiting text[]; v_keyed bigint[]; v_free bigint[];
begin
    if blocks is not null then
        perform rota._block_children(blocks, parts, are_new, arguments);
    end if;
    if parent_ids <> '{}' then
        -- A producer can guess the ids that this call gives, and would make a cycle.
        perform rota._raise_not_found(min(n.id)) from unnest(job_ids) as n (id)
        where n.id in (select unnest(parent_ids)) having count(*) > 0;
        v_parents := rota._parents_to_come(parent_ids);
        insert into rota.dependencies as d (parent_id, job_id)
        select distinct p.id, p.job_id
        from unnest(_jobs_came_in.parent_ids, _jobs_came_in.child_ids) as p (id, job_id)
        where p.id in (select unnest(v_parents)) order by 1, 2 on conflict do nothing;
    end if;

    select array_agg(b.id) filter (where b.is_keyed),
        array_agg(b.id) filter (where not b.is_keyed and not b.is_waiting),
        array_agg(b.id::text || ' all') filter (where b.is_waiting)
    into v_keyed, v_free, v_waiting
    from (
        select j.id, j.ordering_key is not null as is_keyed,
            exists (select from rota.dependencies as d where d.job_id = j.id) as is_waiting
        from rota.jobs as j where j.id = any(_jobs_came_in.job_ids) and j.status = 'blocked'
    ) as b;
    if v_free is not null then perform rota._open_jobs(v_free); end if;
    if v_keyed is not null then perform rota._enter_keys(v_keyed, may_have_halted); end if;
    if v_waiting is not null then perform rota._add_checks('job', v_waiting); end if;
end $$;

/* _jobs_came_in() and _enter_lanes() for one job that is still to be inserted, in the same
 * transaction, with what is returned: so the row is written once.  A job that needs no place
 * has no run_at here. */
create or replace function rota._job_comes_in(
    job_id bigint, ordering_key text, depends_on bigint[], queue text, job_type text,
    limit_key text, priority integer, run_at timestamptz, out status text, out lane smallint,
    out place timestamptz, out hold text
) language plpgsql set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_parents bigint[]; v_settings record; v_bound rota.limits; v_first timestamptz;
    v_last record; v_limit record;
begin
    if depends_on <> '{}' then
        v_parents := rota._parents_to_come(depends_on);
        if v_parents is not null then
            insert into rota.dependencies (parent_id, job_id)
            select p.id, _job_comes_in.job_id from unnest(v_parents) as p (id);
            perform rota._add_checks('job', array[format('%s all', job_id)]);
        end if;
    end if;

    status := case when v_parents is null then 'queued' else 'blocked' end;
    if ordering_key is not null and (v_parents is not null
        or not rota._may_be_head(ordering_key, job_id)) then
        status := 'blocked';
        perform rota._add_checks('order', array[ordering_key]);
    end if;
    if status = 'blocked' or run_at is null then return; end if;

    select (select q.ageing from rota.queues as q where q.queue = _job_comes_in.queue),
        exists (select from rota.fair_queues as f where f.queue = _job_comes_in.queue)
            as is_fair,
        exists (select from rota.limits) as has_limits, rota._moves_away(queue) as moves_away
    into v_settings;
    if v_settings.moves_away then return; end if;
    if limit_key is not null and v_settings.has_limits then
        v_bound := rota._bound('key ' || limit_key);
    end if;
    if v_settings.is_fair or num_nonnulls(v_settings.ageing, limit_key) > 0 then
        if run_at > rota.now() then
            hold := 'time';
        elsif v_settings.ageing is not null then
            lane := 0;
            place := run_at + priority * v_settings.ageing;
        else
            if not v_settings.is_fair then perform rota._note_fair_queue(queue); end if;
            v_first := rota._first_place(queue, priority);
            v_last := rota._last_of_key(queue, limit_key, priority, v_first,
                coalesce(v_bound.weight, 1), array[job_id]);
            place := case
                when v_last.jobs = 0 then least(run_at, v_last.place)
                else v_last.place
                    + v_last.jobs / coalesce(v_bound.weight, 1) * interval '1 microsecond'
            end;
        end if;
    end if;
    if not v_settings.has_limits or run_at > rota.now() then return; end if;
    for v_limit in
        select v_bound.limit_name, v_bound.max_running
        where num_nonnulls(v_bound.max_running, v_bound.max_starts) > 0
        union all
        select l.limit_name, l.max_running from rota.limits as l
        where l.job_type = _job_comes_in.job_type
    loop
        continue when rota._room_in_lane(v_limit.limit_name, v_limit.max_running, queue,
            job_type, limit_key, coalesce(lane, priority), case
                when v_limit.limit_name like 'key %'
                    then coalesce(v_first, rota._first_place(queue, coalesce(lane, priority)))
            end, array[job_id]) > 0;
        hold := v_limit.limit_name;
        perform rota._add_checks('limit', array[hold]);
        return;
    end loop;
end $$;

/* Jobs that wait, or are about to be inserted with these ids, with their lanes and places, and
 * the reason why they are held.
 *
 * Jobs of one kind differ by their order alone, so what waits already is looked at once for a
 * kind.  Under a limit as many enter their lane as could start at once; the others are held. */
create or replace function rota._give_places(
    jobs rota.jobs[], job_ids bigint[], moment timestamptz, keep_places boolean default false
) returns rota.jobs[] language plpgsql as $$
declare
    v_has_limits constant boolean := exists (select from rota.limits);
    v_ids constant bigint[] := array(
        select i.id from unnest(_give_places.job_ids) as i (id) order by i.id
    );
    v_kind record; v_queue text; v_ageing interval; v_is_fair boolean; v_moves_away boolean;
    v_has_places boolean; v_lane integer; v_next_lane integer; v_first timestamptz;
    v_bound rota.limits; v_key text; v_last timestamptz; v_before integer; v_job record;
    v_limit record; v_free integer; v_room integer; v_name text; v_names text[];
    v_rooms jsonb := '{}'::jsonb;
    v_full text[] := '{}'::text[];
begin
    for v_kind in
        select coalesce(n.queue, 'default') as queue, n.job_type, n.limit_key,
            coalesce(n.priority, 0)::integer as priority,
            array_agg(n.ordinality order by k.is_due desc, k.old_place, k.run_at, k.id)
                as numbers,
            (count(*) filter (where k.is_due))::integer as due,
            (count(k.old_place) filter (where k.is_due))::integer as kept,
            -- Those that are about to be inserted begin their lane, too, as if they were there.
            min(min(coalesce(n.own_place, k.run_at)) filter (where n.own_lane is null
                and n.hold is null)) over (
                partition by coalesce(n.queue, 'default'), coalesce(n.priority, 0)
            ) as first_place,
            count(*) over (partition by coalesce(n.queue, 'default'), n.limit_key) > 1
                as shares_key,
            count(*) over (partition by n.job_type) > 1 as shares_type
        from unnest(_give_places.jobs) with ordinality as n
        cross join lateral (
            select _give_places.job_ids[n.ordinality] as id,
                coalesce(n.run_at, _give_places.moment) as run_at,
                (n.run_at > _give_places.moment) is not true as is_due,
                case when _give_places.keep_places and n.own_lane is null
                    then n.own_place end as old_place
        ) as k
        where coalesce(n.status, case when n.ordering_key is null then 'queued' end)
            in ('queued', 'failed')
        -- All of a key together: they follow each other, of whatever type.
        group by 1, 2, 3, 4 order by 1, 4, min(min(n.ordinality)) over (
            partition by coalesce(n.queue, 'default'), coalesce(n.priority, 0), n.limit_key
        ), min(n.ordinality)
    loop
        if v_queue is distinct from v_kind.queue then
            v_queue := v_kind.queue;
            v_lane := null;
            select (select q.ageing from rota.queues as q where q.queue = v_queue),
                exists (select from rota.fair_queues as f where f.queue = v_queue),
                rota._moves_away(v_queue)
            into v_ageing, v_is_fair, v_moves_away;
        end if;
        v_has_places := not v_moves_away
            and (v_is_fair or num_nonnulls(v_ageing, v_kind.limit_key) > 0);
        v_bound := null;
        if v_has_limits and v_kind.due > 0 and v_kind.limit_key is not null then
            v_bound := rota._bound('key ' || v_kind.limit_key);
        end if;
        v_next_lane := case when v_ageing is null then v_kind.priority else 0 end;
        if v_has_places and v_kind.due > 0 and v_lane is distinct from v_next_lane
          and (v_ageing is null or v_bound.limit_name is not null) then
            v_lane := v_next_lane;
            v_first := least(rota._first_place(v_queue, v_lane), v_kind.first_place);
        end if;
        if v_has_places and v_kind.due > 0 and v_ageing is null then
            if not v_is_fair then
                perform rota._note_fair_queue(v_queue);
                v_is_fair := true;
            end if;
            if v_kind.due > v_kind.kept
              and v_key is distinct from concat_ws(' ', v_queue, v_lane, v_kind.limit_key) then
                v_key := concat_ws(' ', v_queue, v_lane, v_kind.limit_key);
                select l.place, l.jobs into v_last, v_before
                from rota._last_of_key(v_queue, v_kind.limit_key, v_lane, v_first,
                    coalesce(v_bound.weight, 1), v_ids) as l;
            end if;
        end if;

        for v_n in 1..cardinality(v_kind.numbers) loop
            v_job := jobs[v_kind.numbers[v_n]];
            v_job.own_lane := null;
            v_job.hold := null;
            if not v_has_places or v_n > v_kind.due then
                v_job.own_place := null;
                if v_has_places then v_job.hold := 'time'; end if;
            elsif v_ageing is not null then
                v_job.own_lane := 0;
                v_job.own_place := coalesce(v_job.run_at, moment) + v_kind.priority * v_ageing;
            elsif v_n > v_kind.kept then
                v_job.own_place := v_last + (v_before + v_n - v_kind.kept - 1)
                    / coalesce(v_bound.weight, 1) * interval '1 microsecond';
            end if;
            jobs[v_kind.numbers[v_n]] := v_job;
        end loop;
        v_before := v_before + v_kind.due - v_kind.kept;
        continue when not v_has_limits or v_moves_away;

        v_room := v_kind.due;
        v_names := '{}';
        for v_limit in
            select v_bound.limit_name, v_bound.max_running,
                v_kind.shares_key as is_shared,
                concat_ws(' ', v_bound.limit_name, v_lane, v_queue) as name
            where num_nonnulls(v_bound.max_running, v_bound.max_starts) > 0
            union all
            select l.limit_name, l.max_running, v_kind.shares_type, l.limit_name
            from rota.limits as l where l.job_type = v_kind.job_type
        loop
            exit when v_room = 0;
            -- Another kind of these may have taken some of the room.
            v_free := (v_rooms ->> v_limit.name)::integer;
            if v_free is null then
                v_free := rota._room_in_lane(v_limit.limit_name, v_limit.max_running, v_queue,
                    v_kind.job_type, v_kind.limit_key, v_lane, v_first, v_ids);
            end if;
            -- Only then are they noted: with ten thousand keys it takes seconds to note each.
            if v_limit.is_shared then
                v_rooms := v_rooms || jsonb_build_object(v_limit.name, v_free);
                v_names := v_names || v_limit.name;
            end if;
            continue when v_free >= v_room;
            for v_n in v_free + 1..v_room loop
                jobs[v_kind.numbers[v_n]].hold := v_limit.limit_name;
            end loop;
            v_full := v_full || v_limit.limit_name;
            v_room := v_free;
        end loop;
        foreach v_name in array v_names loop
            v_rooms := v_rooms || jsonb_build_object(v_name,
                (v_rooms ->> v_name)::integer - v_room);
        end loop;
    end loop;
    if v_full <> '{}' then perform rota._add_checks('limit', v_full); end if;
    return jobs;
end $$;

/* Jobs wait for their time, for a retry or with another priority than before, or have come back
 * with the slots that they held: give them their places, or those that they had again where
 * they keep them, and hold those that have to wait.  Called in the transaction that wrote them.
 */
create or replace function rota._enter_lanes(
    job_ids bigint[], left_limits text[] default null, keep_places boolean default false
) returns void language plpgsql set enable_seqscan = off set jit = off as $$
declare
    v_ids bigint[] := array(
        select j.id from rota.jobs as j
        where j.id = any(_enter_lanes.job_ids)
          and (num_nonnulls(j.limit_key, j.own_place, j.hold, j.opened_for) > 0
            or exists (select from rota.limits as l where l.job_type = j.job_type)
            or exists (
                select from rota.queues as q where q.queue = j.queue and q.ageing is not null)
            or exists (select from rota.fair_queues as f where f.queue = j.queue))
    );
begin
    if left_limits <> '{}' then perform rota._leave_limits(left_limits); end if;
    if v_ids <> '{}' then perform rota._place_jobs(v_ids, keep_places); end if;
end $$;

/* These jobs have ended.  *parents* are those that others may wait for; *jobs* are the rows, as
 * they were, of those that lead to a next job of their key or schedule, or, of those that had
 * not started, to a slot that others may have now; *held_limits* are the lists of those that
 * give slots back. */
create or replace function rota._jobs_ended(
    parents bigint[], jobs jsonb, held_limits jsonb, old_status text, new_status text
) returns void language plpgsql as $$
begin
    if old_status = 'running' and held_limits is not null then
        perform rota._leave_limits(array(
            select h.limit_name #>> '{}'
            from jsonb_path_query(_jobs_ended.held_limits, '$[*][*] ? (@ != null)')
                as h (limit_name)
        ));
    elsif old_status in ('queued', 'failed') and exists (select from rota.limits) then
        perform rota._check_held_of(j.job ->> 'job_type', j.job ->> 'limit_key')
        from jsonb_array_elements(_jobs_ended.jobs) as j (job);
    end if;
    if jsonb_path_exists(jobs, '$[*] ? (@.ordering_key != null || @.definition != null)') then
        perform rota._leave_keys(jobs, old_status, new_status);
        -- What follows the last job of a schedule is planned by its end.
        perform rota._add_checks('schedule', array(
            select e.definition
            from jsonb_to_recordset(_jobs_ended.jobs) as e (id bigint, definition text)
            -- Not a join, which a plan made on an empty table begins with all schedules.
            where (
                select d.last_job_id = e.id
                  -- An older snapshot does not show which schedule has come to wait for it.
                  and (d.next_run_at is null
                    or current_setting('transaction_isolation') <> 'read committed')
                from rota.job_definitions as d where d.name = e.definition limit 1
            )
        ));
    end if;
    if parents is not null then perform rota._parents_ended(parents, new_status); end if;
end $$;
