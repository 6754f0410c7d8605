/*
 * schedules/occurrences.sql -- make the jobs whose time has come.
 *
 * A tick locks definitions that are due and that no other session has locked, makes the jobs
 * that each has due, and advances it to its next planned time, all in one transaction.  That a
 * planned time makes at most one job does not depend on this: only the transaction that
 * inserted its row in occurrences makes the job.
 *
 * A late tick sees all planned times that have passed since the last one.  Only catch_up
 * decides what happens to them, so two databases that were equally late do the same.
 *
 * Many definitions have the same few times.  A tick finds these once for each batch, and writes
 * the rows of a batch together.  If that fails, the definitions are tried one by one.
 */

create or replace function rota._enqueue_due_schedules(max_jobs integer)
    returns integer language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    v_since timestamptz; v_names text[];
    v_enqueued integer := 0;
begin
    -- Some are dealt with and make no job; of such ten batches are enough for a call.
    for v_batch in 1..10 loop
        exit when v_enqueued >= _enqueue_due_schedules.max_jobs;
        v_since := rota._first_due_schedule();
        exit when v_since is null;
        begin
            v_names := array(
                select d.name from rota.job_definitions as d
                where d.next_run_at between v_since and v_now
                order by d.next_run_at limit _enqueue_due_schedules.max_jobs - v_enqueued
                for update skip locked
            );
            exit when v_names = '{}';
            v_enqueued := v_enqueued + rota._enqueue_due(v_names, v_now, max_jobs - v_enqueued);
        exception when others then
            raise warning 'schedules are tried one by one: %', sqlerrm;
            return v_enqueued + rota._enqueue_one_by_one(v_now, max_jobs - v_enqueued);
        end;
    end loop;
    return v_enqueued;
end $$;

/* When the first of the definitions that are due was; null if none is.  Each advance leaves a
 * dead index entry, so the scan begins where the last one ended (base/scan_start.sql): a little
 * earlier, for late commits. */
create or replace function rota._first_due_schedule()
    returns timestamptz language plpgsql as $$
declare
    c_scan constant rota.scan := rota._begin_scan('schedule',
        'rota.job_definitions_next_run_at_idx');
    v_since constant timestamptz := rota._from_micros(c_scan.start);
    v_first timestamptz;
begin
    select d.next_run_at into v_first from rota.job_definitions as d
    where d.next_run_at between v_since and c_scan.begun_at order by d.next_run_at limit 1;
    perform rota._end_scan(c_scan, rota._micros(coalesce(v_first, c_scan.begun_at)) - 10000);
    return v_first;
end $$;

create or replace function rota._enqueue_one_by_one(due timestamptz, max_jobs integer)
    returns integer language plpgsql as $$
declare
    v_name text;
    v_enqueued integer := 0;
begin
    -- More than are wanted: those that stay due must not fill the call.
    for v_name in
        select d.name from rota.job_definitions as d
        where d.next_run_at <= _enqueue_one_by_one.due
        order by d.next_run_at limit 10 * _enqueue_one_by_one.max_jobs
    loop
        exit when v_enqueued >= max_jobs;
        -- The lock outlasts an error: what is disabled for it is still what has failed.
        begin
            perform from rota.job_definitions as d
            where d.name = v_name and d.next_run_at <= _enqueue_one_by_one.due
            for update skip locked;
            continue when not found;
            v_enqueued := v_enqueued + rota._enqueue_one(v_name, due);
        exception when others then
            raise warning 'schedule % stays due: %', v_name, sqlerrm;
        end;
    end loop;
    return v_enqueued;
end $$;

/* Enqueue the jobs of one definition that is due and that the caller has locked; returns how
 * many.  One whose own values make it fail is disabled; another error may pass, and is raised.
 */
create or replace function rota._enqueue_one(name text, due timestamptz)
    returns integer language plpgsql as $$
begin
    return rota._enqueue_due(array[name], due, 1);
exception when others then
    if left(sqlstate, 2) not in ('22', '23', '42', '54', 'RT') then raise; end if;
    update rota.job_definitions as d
    set is_enabled = false, disabled_at = rota.now(), disabled_by = null,
        last_error = rota._cut(sqlerrm, 1000), next_run_at = null
    where d.name = _enqueue_one.name;
    raise warning 'schedule % is disabled: %', name, sqlerrm;
    return 0;
end $$;

/* Enqueue the jobs of definitions that are due and that the caller has locked: of all, or of
 * the oldest until there are *max_jobs*; the last may add more.  Returns how many there are.
 * From array to array: the planner would have to guess at the size of anything else. */
create or replace function rota._enqueue_due(names text[], due timestamptz, max_jobs integer)
    returns integer language plpgsql set enable_seqscan = off set jit = off
    set plan_cache_mode = force_generic_plan set enable_bitmapscan = off as $$
declare
    v_names text[]; v_times timestamptz[]; v_outcomes text[]; v_lasts timestamptz[];
    v_nexts timestamptz[]; v_made_names text[]; v_made_times timestamptz[]; v_made_ids bigint[];
begin
    select array_agg(p.name), array_agg(p.scheduled_for), array_agg(p.outcome),
        array_agg(p.last_run_at), array_agg(p.next_run_at)
    into v_names, v_times, v_outcomes, v_lasts, v_nexts
    from (
        select w.name, w.scheduled_for, w.outcome, w.last_run_at, w.next_run_at
        from rota._plan_due(_enqueue_due.names, _enqueue_due.due, _enqueue_due.max_jobs) as w
        order by w.scheduled_for, w.name
    ) as p;

    perform rota._guard_ids();
    with new_occurrences as (
        insert into rota.occurrences as o (
            definition, scheduled_for, outcome, job_id, recorded_at)
        select p.name, p.scheduled_for, p.outcome,
            case when p.outcome = 'enqueued' then nextval('rota.jobs_id_seq') end, due
        from unnest(v_names, v_times, v_outcomes) as p (name, scheduled_for, outcome)
        on conflict do nothing returning o.definition, o.scheduled_for, o.job_id
    )
    select coalesce(array_agg(n.definition), '{}'), array_agg(n.scheduled_for),
        array_agg(n.job_id)
    into v_made_names, v_made_times, v_made_ids from new_occurrences as n
    where n.job_id is not null;

    perform rota._make_jobs(v_made_names, v_made_times, v_made_ids, false, due);

    with moved as (
        update rota.job_definitions as d
        set last_run_at = u.last_run_at, last_job_id = coalesce(u.job_id, d.last_job_id),
            next_run_at = case when u.job_id is null or d.kind <> 'after' then u.next_run_at end
        from (
            select p.name, max(p.last_run_at) as last_run_at, max(p.next_run_at) as next_run_at,
                max(p.job_id) as job_id
            from (
                select n.name, n.last_run_at, n.next_run_at, null::bigint as job_id
                from unnest(v_names, v_lasts, v_nexts) as n (name, last_run_at, next_run_at)
                union all
                select m.name, null, null, m.job_id
                from unnest(v_made_names, v_made_ids) as m (name, job_id)
            ) as p
            group by p.name
        ) as u
        where d.name = u.name returning d.name, d.kind, d.next_run_at, u.job_id
    )
    -- A last job that was live may be about to end without knowing that this waits for it.
    insert into rota.pending_checks (kind, subject)
    select 'schedule', m.name from moved as m
    where m.next_run_at is null and m.job_id is null and m.kind = 'after';
    return cardinality(v_made_names);
end $$;

/* A row for each planned time that is dealt with, of as many definitions as are taken, with the
 * last of all times until now, and the next.  What is planned by the end of the job before has
 * but one time, which cannot be missed, only come later. */
create or replace function rota._plan_due(names text[], due timestamptz, max_jobs integer)
    returns table (
        name text, scheduled_for timestamptz, outcome text, last_run_at timestamptz,
        next_run_at timestamptz
    ) language plpgsql stable as $$
declare
    v_live constant text[] := rota._live_definitions(names);
    v_group record; v_parsed rota.parsed_schedule; v_since timestamptz; v_first timestamptz;
    v_times timestamptz[]; v_next timestamptz; v_taken text[];
    v_planned integer := 0;
begin
    for v_group in
        select d.schedule, d.time_zone, d.next_run_at, d.ends_at, d.catch_up, d.catch_up_window,
            d.catch_up_max, d.overlap,
            -- Nothing else has its times counted from there.
            case when d.kind = 'every' then d.anchored_at end as anchored_at,
            d.name = any(v_live) as is_live, d.kind = 'after' as is_after,
            array_agg(d.name) as names
        from rota.job_definitions as d where d.name = any(_plan_due.names)
        group by 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 order by d.next_run_at
    loop
        v_parsed := rota._parse_schedule(v_group.schedule);
        v_first := v_group.next_run_at;
        v_times := array[v_first];
        if not v_group.is_after then
            v_since := due - coalesce(v_group.catch_up_window,
                case when v_group.catch_up = 'skip' then interval '1 minute' end);
            -- What lies before the window is not even looked for: it may be a lot.
            if v_first < v_since then
                v_first := rota._next_occurrence(v_parsed, v_group.time_zone,
                    v_since - interval '1 microsecond', v_group.anchored_at);
            end if;
            v_times := rota._occurrences_until(v_parsed, v_group.time_zone,
                v_group.anchored_at, v_first, least(due, v_group.ends_at),
                case when v_group.catch_up = 'all' then v_group.catch_up_max else 1 end);
        end if;
        v_next := rota._next_occurrence(v_parsed, v_group.time_zone,
            greatest(due, v_first - interval '1 microsecond'), v_group.anchored_at);
        v_taken := v_group.names[:greatest(1,
            (max_jobs - v_planned) / greatest(1, cardinality(v_times)))];
        return query select n.name, o.scheduled_for, o.outcome,
            coalesce(v_times[cardinality(v_times)], v_group.next_run_at),
            case when not (v_group.is_live and v_group.is_after)
                and (v_next > v_group.ends_at) is not true then v_next end
        from unnest(v_taken) as n (name)
        cross join (
            -- Of those that were missed the first stands for all.
            select v_group.next_run_at, 'missed'
            where v_group.next_run_at <> all(v_times)
            union all
            select p.scheduled_for, case
                when v_group.is_live then 'skipped'
                -- The first of several that are late is live when it is the turn of the second.
                when v_group.overlap = 'skip' and p.number > 1 then 'skipped'
                else 'enqueued'
            end
            from unnest(v_times) with ordinality as p (scheduled_for, number)
        ) as o (scheduled_for, outcome);
        v_planned := v_planned + cardinality(v_taken) * cardinality(v_times);
        exit when v_planned >= max_jobs;
    end loop;
end $$;

/* Those with a live job, of definitions to which that matters; to `after` only the last one. */
create or replace function rota._live_definitions(names text[])
    returns text[] language plpgsql stable set enable_seqscan = off as $$
begin
    return array(
        select d.name
        from (select distinct unnest(_live_definitions.names) as name) as n
        cross join lateral (
            select i.* from rota.job_definitions as i where i.name = n.name limit 1
        ) as d
        where case
            when d.kind = 'after'
                then (select true from rota.jobs as j where j.id = d.last_job_id limit 1)
            when d.overlap = 'skip'
                then (select true from rota.jobs as j where j.definition = d.name limit 1)
        end
    );
end $$;

/* Put in the jobs of planned times that are theirs already. */
create or replace function rota._make_jobs(
    names text[], times timestamptz[], ids bigint[], is_manual boolean, made_at timestamptz
) returns void language plpgsql set enable_seqscan = off as $$
declare
    v_blocked bigint[];
begin
    -- Not all at once where they are large: an array holds 1 GB.
    perform rota._insert_jobs(
        array_agg(jsonb_populate_record(null::rota.jobs, jsonb_build_object(
            'queue', d.queue, 'job_type', d.job_type, 'payload', d.payload,
            'priority', d.priority, 'max_attempts', d.max_attempts, 'lease', d.lease,
            'time_limit', d.time_limit, 'headers', d.headers, 'backoff', d.backoff,
            'ordering_key', case when d.overlap = 'queue' then 'schedule:' || d.name end,
            'skip_dead', d.overlap = 'queue', 'definition', d.name,
            'scheduled_for', d.scheduled_for, 'created_at', _make_jobs.made_at,
            'run_at', case when _make_jobs.is_manual then _make_jobs.made_at
                else d.scheduled_for + random() * d.jitter end)) order by d.id),
        array_agg(d.id order by d.id))
    from (
        select d.*, m.scheduled_for, m.id,
            sum(octet_length(d.payload::text)) over (order by m.id) / 33554432 as part
        from unnest(_make_jobs.names, _make_jobs.times, _make_jobs.ids)
            as m (name, scheduled_for, id)
        cross join lateral (
            select i.* from rota.job_definitions as i where i.name = m.name limit 1
        ) as d
    ) as d
    group by d.part order by d.part;

    select array_agg(m.id) into v_blocked
    from unnest(_make_jobs.names, _make_jobs.ids) as m (name, id)
    where (
        select d.overlap = 'queue' from rota.job_definitions as d where d.name = m.name limit 1
    );
    if v_blocked is not null then perform rota._jobs_came_in(v_blocked); end if;
    perform rota._notify_for(ids);
end $$;

/* Plan what follows the last job of a definition, if it has ended; false if that is not to be
 * known just now.  A transaction that ends a live one later finds that its end is waited for.
 */
create or replace function rota._check_schedule(name text)
    returns boolean language plpgsql as $$
declare
    v_definition rota.job_definitions;
begin
    select d.* into v_definition from rota.job_definitions as d
    where d.name = _check_schedule.name for update skip locked;
    if not found then
        return not exists (
            select from rota.job_definitions as d where d.name = _check_schedule.name);
    elsif not v_definition.is_enabled or v_definition.next_run_at is not null
      or v_definition.last_job_id is null or v_definition.kind <> 'after' then
        return true;
    end if;

    if rota._still_to_end(array[v_definition.last_job_id]) <> '{}' then
        return true;
    elsif exists (select from rota.jobs as j where j.id = v_definition.last_job_id) then
        return false;
    end if;
    update rota.job_definitions as d
    set next_run_at = rota._plan_next(v_definition, '-infinity')
    where d.name = v_definition.name;
    return true;
end $$;

/* The first planned time later than *after* and than all that was dealt with; null after the
 * end.  Of `after 10 minutes` it may be *after* itself, and is null while the last job is live.
 */
create or replace function rota._plan_next(definition rota.job_definitions, after timestamptz)
    returns timestamptz language plpgsql stable set enable_seqscan = off
    set enable_bitmapscan = off as $$
declare
    v_parsed constant rota.parsed_schedule := rota._parse_schedule(definition.schedule);
    v_next timestamptz;
begin
    if v_parsed.kind <> 'after' then
        v_next := rota._next_occurrence(
            v_parsed, definition.time_zone, greatest(after, definition.last_run_at,
                definition.starts_at - interval '1 microsecond'),
            definition.anchored_at);
    -- Stable, so that both looks see the same: it may be retried in between.
    elsif not exists (select from rota.jobs as j where j.id = definition.last_job_id) then
        v_next := greatest(after, definition.starts_at,
            definition.last_run_at + interval '1 microsecond',
            rota._next_occurrence(v_parsed, definition.time_zone, case
                -- Now, if its end is forgotten.
                when definition.last_job_id is not null then coalesce((
                    select max(f.finished_at) from rota.finished_jobs as f
                    where f.id = definition.last_job_id
                ), rota.now()) end, null));
    end if;
    return case when v_next > definition.ends_at then null else v_next end;
end $$;
