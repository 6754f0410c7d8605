/*
 * jobs/claim.sql -- give jobs to a worker.
 *
 * A claim locks due rows with `for update skip locked`, so that two workers never wait for
 * each other and never get the same job, and marks them running in the same transaction.  The
 * attempt is counted here and not when a failure is reported: a job that kills its worker
 * reports nothing, and must still come to its end.
 *
 * A claim is always the same walk along one index: jobs_ready_idx is a set of lanes, one for
 * each (queue, lane), each in order of place.  The lane of a plain job is its priority and its
 * place is run_at; waiting/fairness.sql gives other places to jobs that age or take turns.  A
 * claim walks the lanes from the lowest number up, and within one takes only the due beginning.
 * So a million jobs for next month in a lane cost nothing: a claim never looks behind the first
 * that is not due.  Where each lane begins is remembered (base/scan_start.sql).
 *
 * A claim reads the settings of its own queues and of the jobs that it has found.  It does no
 * work for jobs that wait: a job whose limit is full, whose type is paused, or that has
 * expired, leaves its lane, and maintenance examines it.  At most max_jobs + 100 leave in
 * one claim, which then returns what it has and notifies, so that a waiting worker claims
 * again at once.  Where keys have limits it takes 200 at most: the slots of a new key take
 * locks, and the server has a limited number of these.
 *
 * No lease lasts more than 30 seconds beyond a time limit: time for the worker to stop the job.
 *
 * The lease token is the clock in microseconds, or one more than the job's last token if that
 * is greater.  So it grows with every claim of the job, also when the clock steps back, and a
 * database restored from an old dump does not hand out a token for the second time.  After a
 * restore that rests on the clock alone: if it then steps back, to before claims that the dump
 * does not know, one of their tokens can be given to the same job again.
 *
 * The planner is told to stay on the indexes: this statement is planned once per session, often
 * on an empty table, and has to be right a million jobs later.
 */

create or replace function rota.claim_jobs(
    worker text, queues text[] default '{default}', max_jobs integer default 1,
    lease interval default null, job_types text[] default null
) returns table (
        job_id bigint, lease_token bigint, queue text, job_type text, payload jsonb,
        priority smallint, attempt integer, max_attempts integer, run_at timestamptz,
        locked_until timestamptz, locked_for interval, idempotency_key text,
        created_at timestamptz, pipeline text, stage text, stage_input jsonb, definition text,
        scheduled_for timestamptz, time_limit interval, headers jsonb
    ) language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off set enable_sort = off set enable_nestloop = on as $$
declare
    v_now constant timestamptz := rota.now();
    v_call constant text := format('claim %L %s %s %s', worker, queues, lease, job_types);
    v_start constant bigint[] := string_to_array(rota._scan_start(v_call), ' ')::bigint[];
    c_moment constant bigint := (extract(epoch from v_now) * 1000000)::bigint;
    -- Which tables have settings for these queues: three are told at most.
    v_configured constant text[] := array(
        select c.source from rota.configured_names as c
        where c.name = any(case when array_ndims(claim_jobs.queues) = 1
            then array_append(claim_jobs.queues, 'access worker') end)
          and rota._may_confine(c.role)
        limit 3
    );
    -- Those of the queues that are neither paused nor full, and where their walk begins.
    v_open text[] := queues;
    v_from bigint[] := v_start;
    v_ids bigint[]; v_rows tid[]; v_names text[];
    v_end timestamptz := v_now;
    v_has_pauses boolean := false;
    v_may_be_more boolean := false;
    v_are_limited boolean := false;
    v_held_limits jsonb; v_claimed integer; v_index oid; v_walked bigint; v_lease interval;
    v_settings jsonb;
begin
    if max_jobs between 201 and 1000 then
        if exists (select from rota.limits as l where l.limit_name like 'key %') and exists (
            select from rota.fair_queues as f where f.queue = any(claim_jobs.queues)
        ) then
            max_jobs := 200;
        end if;
    end if;
    if v_configured = '{}' then
        null;  -- as for most claims, which so evaluate no more
    elsif v_configured <@ '{fair_queues,queues}' and cardinality(queues) = 1 then
        if 'fair_queues' = any(v_configured) then v_end := v_now + interval '1 minute'; end if;
        if 'queues' = any(v_configured) then
            select case when q.ageing is null then v_end else 'infinity' end,
                jsonb_build_object(q.queue, jsonb_build_array(q.lease, q.time_limit))
            into v_end, v_settings from rota.queues as q where q.queue = claim_jobs.queues[1];
        end if;
    else
        v_index := 'rota.limit_slots_pkey'::regclass::oid;
        v_walked := pg_stat_get_xact_tuples_returned(v_index);
        select o.open_queues, case when o.ends[1] = all(o.ends) then o.ends[1] end, o.settings,
            exists (select from rota.pauses)
        into v_open, v_end, v_settings, v_has_pauses
        from rota._open_queues(claim_jobs.queues, v_now) as o
        where not exists (select from rota.queue_grants)
           or (claim_jobs.queues <@ rota._allowed_queues('worker')) is not false;
        if cardinality(v_open) < cardinality(queues) then
            -- As _lock_due() calls it.
            v_from := string_to_array(
                rota._scan_start(concat('some ', v_call, ' ', v_open)), ' ')::bigint[];
            -- A session that takes no slot would walk past all dead ones in each claim.
            perform rota._free_slots(l, 1) from rota.limits as l
            where l.queue = any(claim_jobs.queues) and l.queue <> all(v_open)
              and l.max_running is not null
              and pg_stat_get_xact_tuples_returned(v_index) - v_walked >= 200;
        end if;
    end if;
    -- Most claims find all in the lane in which the last one of this very call found its jobs.
    -- Null where more has to be looked at: a queue that is full or paused, a job that expired.
    if v_from[1] > c_moment and v_from[1] <= c_moment + 3000000 and cardinality(v_from) >= 5
      and max_jobs between 1 and 1000 and v_end is not null
      and current_setting('transaction_isolation') = 'read committed' then
        if cardinality(v_open) = 1 then
            select case when bool_or(h.is_expired) is not true then array_agg(h.ctid) end,
                array_agg(rota._limit_names(h.queue, h.job_type, h.limit_key))
            into v_rows, v_names
            from (
                select j.ctid, j.queue, j.job_type, j.limit_key,
                    j.expires_at <= v_now as is_expired
                from rota.jobs as j
                where j.queue = v_open[1]
                  and coalesce(j.own_lane, j.priority) = v_from[3]::integer
                  and j.hold is null and j.status in ('queued', 'failed')
                  and coalesce(j.own_place, j.run_at) <= v_end and j.run_at <= v_now
                  and (coalesce(j.own_place, j.run_at), j.id)
                    >= (coalesce('epoch'::timestamptz + nullif(v_from[4], 0)
                        * interval '1 microsecond', '-infinity'), v_from[5])
                  and (claim_jobs.job_types is null or j.job_type = any(claim_jobs.job_types))
                  and not exists (
                    select from rota.jobs as u where u.queue = v_open[1]
                      and coalesce(u.own_lane, u.priority) < v_from[3]::integer
                      and u.hold is null and u.status in ('queued', 'failed')
                  )
                order by coalesce(j.own_place, j.run_at), j.id limit claim_jobs.max_jobs
                for update of j skip locked
            ) as h;
        elsif rota._next_lane(v_open, -32769, v_from[3]) = v_from[3] then
            select m.ids into v_ids
            from rota._lock_merged(v_open, array_fill(v_end, array[cardinality(v_open)]),
                v_from[3]::integer, coalesce('epoch'::timestamptz + nullif(v_from[4], 0)
                    * interval '1 microsecond', '-infinity'), v_from[5],
                claim_jobs.max_jobs, claim_jobs.job_types, v_now, '{}') as m;
            select case when (0 > any(v_ids)) is not true then
                    array_agg(j.ctid order by coalesce(j.own_place, j.run_at), j.id) end,
                array_agg(rota._limit_names(j.queue, j.job_type, j.limit_key))
            into v_rows, v_names from rota.jobs as j where j.id = any(v_ids);
        end if;
        if v_has_pauses then
            if exists (
                select from rota.jobs as j join rota.pauses as p on p.job_type = j.job_type
                where j.ctid = any(v_rows)
            ) then
                v_rows := null;
            end if;
        end if;
    end if;
    if cardinality(v_rows) = max_jobs is not true then
        -- Fewer are all that is due if the scan was from the start of the only lane.
        v_may_be_more := (v_from[4] = 0 and cardinality(v_rows) > 0 and not exists (
            select from rota.jobs as j
            where j.queue = any(v_open)
              and coalesce(j.own_lane, j.priority) > v_from[3]::integer and j.hold is null
              and j.status in ('queued', 'failed')
        )) is not true;
    end if;
    if not v_may_be_more then
        -- Asked when this transaction has an id: a limit not seen now waits for its end to
        -- count what runs.
        v_are_limited := exists (
            select from rota.limits as l
            -- A weight alone holds no job.
            where l.limit_name = any(v_names)
              and num_nonnulls(l.max_running, l.max_starts) > 0
        );
    end if;
    if v_may_be_more or v_are_limited then
        if v_start is null or max_jobs between 1 and 1000 is not true
          or current_setting('transaction_isolation') <> 'read committed' then
            perform rota._check_claim(worker, queues, max_jobs, lease, job_types);
            if array_to_string(queues, ' ') ~ '(^| )forward:[0-9]+( |$)' then
                perform rota._refuse('queues',
                    'must not have one whose jobs travel: take_forwards() takes these');
            end if;
        end if;
        select d.locked_rows, d.held_limits into v_rows, v_held_limits
        from rota._lock_due(v_call, v_start, claim_jobs.queues, claim_jobs.max_jobs,
            claim_jobs.job_types, v_now, case when v_are_limited then v_rows end) as d;
        if v_rows = '{}' then return; end if;
    end if;
    if lease is not null then v_lease := rota._exact(lease); end if;
    return query
    update rota.jobs as j
    set status = 'running',
        -- No number or lease written by hand may stop the jobs beside it.
        attempts = least(j.attempts, 2147483646) + 1,
        lease_token = greatest(least(j.lease_token, 9223372036854775806) + 1, c_moment),
        locked_by = claim_jobs.worker,
        locked_until = v_now + greatest('1 ms', least('30 days',
            coalesce(j.lease, v_lease, (v_settings -> j.queue ->> 0)::interval, '1 minute'),
            coalesce(j.time_limit, (v_settings -> j.queue ->> 1)::interval) + '30 s')),
        overdue_at = v_now + nullif(greatest('0', least('31 days',
            coalesce(j.time_limit, (v_settings -> j.queue ->> 1)::interval, '31 days'))),
            '31 days'),
        held_limits = (v_held_limits ->> j.id::text)::text[], opened_for = null,
        progress_percent = null, progress_message = null, started_at = v_now, updated_at = v_now
    -- The one plan that the settings leave looks up one row after the other, and so returns
    -- them in the order of their lanes, for less than a sort of what it returns.
    from (select unnest(v_rows) as row_id) as r
    where j.ctid = r.row_id
    returning j.id, j.lease_token, j.queue, j.job_type, j.payload, j.priority, j.attempts,
        j.max_attempts, j.run_at, j.locked_until, j.locked_until - v_now, j.idempotency_key,
        j.created_at, j.pipeline, j.stage, j.stage_input, j.definition, j.scheduled_for,
        j.overdue_at - v_now, j.headers;
    get diagnostics v_claimed = row_count;
    if v_held_limits is not null and v_claimed < cardinality(v_rows) then
        -- A trigger has kept a row as it was, without an error.
        perform rota._give_slots(array(
            select unnest(h.limit_names::text[])
            from jsonb_each_text(v_held_limits) as h (id, limit_names)
            where not exists (
                select from rota.jobs as j
                where j.id = h.id::bigint and j.status = 'running'
            )
        ));
    end if;
end $$;

comment on function rota.claim_jobs is
    'Lease up to max_jobs due jobs of these queues to a worker, by priority, run_at and id, or '
    'up to 200 where their keys have limits; the lease is that of the job, else the argument, '
    'else that of the queue; raises 22023 or RT009.';

/* Lock due jobs of the queues that are open, and say which slots they hold: a jsonb object from
 * id to the text of an array of limits, null if none holds any.  A job whose limit is full, or
 * that has expired, leaves its lane on the way, and the walk goes on for another; not for ever.
 * It begins with the rows that the caller has locked, if these are neither paused nor expired.
 */
create or replace function rota._lock_due(
    call text, start bigint[], queues text[], max_jobs integer, job_types text[],
    due timestamptz, head tid[] default null, out locked_rows tid[], out held_limits jsonb
) language plpgsql as $$
declare
    v_queues text[]; v_ends timestamptz[];
    v_full_queues text[] := '{}'::text[];
    v_full_limits text[] := '{}'::text[];
    v_call text := call;
    v_start bigint[] := start;
    v_head bigint[]; v_found bigint[]; v_is_end boolean; v_is_limited boolean;
    v_admitted record;
    v_ids bigint[] := '{}'::bigint[];
    v_wanted integer;
    -- How many more may leave their lanes, or find their queue full.
    v_may_leave integer := 100 + max_jobs;
    v_has_pauses constant boolean := exists (
        select from rota.pauses as p where p.job_type is not null);
    v_limits_to_check text[] := '{}'::text[];
begin
    if exists (select from rota.queue_grants) then
        perform rota._check_queues('worker', queues);
    end if;
    if head is null then
        select o.open_queues, o.ends into v_queues, v_ends
        from rota._open_queues(_lock_due.queues, _lock_due.due) as o;
    else
        v_head := array(
            select j.id from rota.jobs as j where j.ctid = any(head)
            order by coalesce(j.own_place, j.run_at), j.id
        );
    end if;

    loop
        exit when v_queues = '{}';
        if cardinality(v_queues) < cardinality(queues) then
            -- The others have jobs in front of where those of these begin.
            v_call := concat('some ', call, ' ', v_queues);
            v_start := string_to_array(rota._scan_start(v_call), ' ')::bigint[];
        end if;
        v_wanted := least(max_jobs - cardinality(v_ids), v_may_leave);
        v_found := coalesce(v_head, rota._lock_lanes(v_call, v_start, v_queues, v_ends,
            v_wanted, job_types, due, v_ids));
        exit when cardinality(v_found) = 0;
        v_is_end := cardinality(v_found) < v_wanted;
        if v_has_pauses or 0 > any(v_found) or v_full_limits <> '{}' then
            select u.ids, v_may_leave - u.held into v_found, v_may_leave
            -- By half, or what is behind them would not be found by this claim.
            from rota._hold_unfit(v_found, due, (v_may_leave - cardinality(v_found)) / 2,
                v_full_limits) as u;
        end if;
        v_is_limited := true;
        if v_head is null then  -- else the caller has seen a limit
            v_is_limited := exists (select from rota.limits) and exists (
                select from rota.jobs as j
                where j.id = any(v_found) and (j.limit_key is not null
                  or exists (select from rota.limits as l where l.job_type = j.job_type)
                  or exists (select from rota.limits as l where l.queue = j.queue))
            );
        end if;
        if not v_is_limited then
            v_ids := v_ids || v_found;
        else
            select a.* into v_admitted from rota._admit_jobs(v_found) as a;
            v_ids := v_ids || v_admitted.ids;
            v_full_queues := v_full_queues || v_admitted.full_queues;
            v_full_limits := v_full_limits || v_admitted.full_limits;
            v_limits_to_check := v_limits_to_check || v_admitted.limits_to_check;
            held_limits := coalesce(held_limits || v_admitted.held_limits, held_limits,
                v_admitted.held_limits);
            v_may_leave := v_may_leave - cardinality(v_found) + cardinality(v_admitted.ids);
            v_is_end := v_is_end and v_admitted.full_queues = '{}'
                and not v_admitted.must_look_again;
        end if;
        exit when v_is_end or cardinality(v_ids) >= max_jobs or v_may_leave <= 0;

        v_head := null;
        v_call := call;
        v_start := string_to_array(rota._scan_start(call), ' ')::bigint[];
        select coalesce(array_agg(q.queue), '{}'), coalesce(array_agg(q.until), '{}')
        into v_queues, v_ends
        from rota._open_queues(_lock_due.queues, _lock_due.due) as o
        cross join unnest(o.open_queues, o.ends) as q (queue, until)
        where q.queue <> all(v_full_queues);
    end loop;
    if v_limits_to_check <> '{}' then
        perform rota._add_checks('limit', v_limits_to_check);
    end if;
    if v_may_leave <= 0 and cardinality(v_ids) < max_jobs then
        -- Behind those that left their lanes there may be others that can start.
        perform rota._notify(q.queue) from unnest(_lock_due.queues) as q (queue);
    end if;
    if v_ids = v_head then
        locked_rows := head;
        return;
    end if;
    -- By number: an update of rows that are locked needs no index to find them.
    locked_rows := array(
        select j.ctid from rota.jobs as j where j.id = any(v_ids)
        order by coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at), j.id
    );
end $$;

/* Take out of their lanes what has expired, and jobs of paused types and of limits that this
 * claim has found full: of these, which are locked, and for each reason of the 100 behind the
 * first of them all that no other session has locked, since one is seldom alone, but in all not
 * more than *max_more*.  Returns the ids that are left, in the order given and without a minus,
 * and how many went. */
create or replace function rota._hold_unfit(
    job_ids bigint[], due timestamptz, max_more integer, full_limits text[], out ids bigint[],
    out held integer
) language plpgsql as $$
declare
    -- A variable: see _lock_merged().
    c_waiting constant text[] := '{queued,failed}'::text[];
    v_unfit record; v_first rota.jobs; v_ids bigint[];
begin
    ids := array(
        select abs(i.id) from unnest(_hold_unfit.job_ids) with ordinality as i (id, ordinal)
        order by i.ordinal
    );
    held := 0;
    for v_unfit in
        select u.hold, array_agg(u.id) as ids
        from (
            select j.id, rota._unfit_hold(j.queue, j.job_type, j.limit_key, j.expires_at,
                j.opened_for, _hold_unfit.due, full_limits) as hold
            from rota.jobs as j where j.id = any(ids) offset 0
        ) as u
        where u.hold is not null group by u.hold order by u.hold
    loop
        ids := array(
            select i.id from unnest(ids) with ordinality as i (id, ordinal)
            where i.id <> all(v_unfit.ids) order by i.ordinal
        );
        select j.* into v_first from rota.jobs as j where j.id = any(v_unfit.ids)
        order by coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at), j.id
        limit 1;
        v_ids := array(
            select j.id from rota.jobs as j
            where j.id = any(array(
                select b.id from rota.jobs as b
                where b.queue = v_first.queue and coalesce(b.own_lane, b.priority)
                    = coalesce(v_first.own_lane, v_first.priority)
                  and b.hold is null and b.status in ('queued', 'failed')
                  and (coalesce(b.own_place, b.run_at), b.id)
                    > (coalesce(v_first.own_place, v_first.run_at), v_first.id)
                order by coalesce(b.own_place, b.run_at), b.id limit 100
            ))
              and j.id <> all(v_unfit.ids) and j.status = any(c_waiting) and j.hold is null
              and j.queue = v_first.queue and j.run_at <= _hold_unfit.due
              and rota._unfit_hold(j.queue, j.job_type, j.limit_key, j.expires_at, j.opened_for,
                _hold_unfit.due, full_limits) = v_unfit.hold
            limit _hold_unfit.max_more for update skip locked
        );
        max_more := max_more - cardinality(v_ids);
        v_ids := v_ids || v_unfit.ids;
        -- The place in its lane that a limit let one of these take is for another.
        -- The nulls are taken out after: the planner would read all that limits have let in.
        perform rota._add_checks('limit', array_remove(array(
            select j.opened_for from rota.jobs as j where j.id = any(v_ids)), null));
        update rota.jobs as j set hold = v_unfit.hold, opened_for = null
        where j.id = any(v_ids);
        perform rota._add_checks('pause', array[substr(v_unfit.hold, 7)])
        where v_unfit.hold like 'pause %';
        held := held + cardinality(v_ids);
    end loop;
end $$;

/* Why a job that is due has to leave its lane, as hold has it; null if it need not.  It takes
 * columns: to pass a row, PostgreSQL would read its payload. */
create or replace function rota._unfit_hold(
    queue text, job_type text, limit_key text, expires_at timestamptz, opened_for text,
    due timestamptz, full_limits text[]
) returns text language plpgsql stable as $$
begin
    return coalesce(case when expires_at <= due then 'expired' end, (
        select 'pause ' || p.pause_name from rota.pauses as p
        -- There may be very many.
        where p.pause_name in ('type ' || _unfit_hold.job_type,
                concat('type ', _unfit_hold.job_type, ' of ', _unfit_hold.queue))
          and (p.until is null or p.until > _unfit_hold.due)
          -- What a breaker lets through to try.
          and (p.set_by = 'breaker' and opened_for = 'try ' || p.pause_name) is not true
        order by p.pause_name limit 1
    ), (
        select n.name
        from unnest(rota._limit_names(null, job_type, limit_key)) as n (name)
        where n.name = any(full_limits) limit 1
    ));
end $$;

/* The queues that are not paused, nor full; until which place their lanes are walked; and what
 * they set for a lease.  A place is in the future where jobs of a high number age, or of a key
 * that has just sent many; jobs for later are not in the lanes of such queues.  The planner
 * puts the body into the statement of the caller. */
create or replace function rota._open_queues(queues text[], due timestamptz)
    returns table (open_queues text[], ends timestamptz[], settings jsonb)
    language sql stable as $$
    select coalesce(array_agg(c.queue), '{}'),
        coalesce(array_agg(case
            when q.ageing is not null then 'infinity'
            when f.queue is not null then _open_queues.due + interval '1 minute'
            else _open_queues.due end), '{}'),
        jsonb_object_agg(c.queue, jsonb_build_array(q.lease, q.time_limit))
            filter (where num_nonnulls(q.lease, q.time_limit) > 0)
    from (select distinct u.queue from unnest(_open_queues.queues) as u (queue)) as c
    left join rota.queues as q on q.queue = c.queue
    left join rota.fair_queues as f on f.queue = c.queue
    left join rota.limits as b on b.queue = c.queue
    where (not exists (select from rota.pauses) or not rota._is_paused(c.queue, due))
      -- If it seems to have free capacity; a claim that goes on takes it for certain.
      and (b.max_running is null or exists (
            select from rota.limit_slots as s where s.limit_name = b.limit_name
              and s.version >= coalesce((rota._begin_scan('free ' || b.limit_name)).start, 0)
          ) and rota._is_issued_for(b) or rota._parts(b) > 0 and rota._free_slots(b, 1) > 0)
      and (b.max_starts is null or rota._next_start_at(b) <= rota.now());
$$;

/* Walk the lanes from the lowest number up, until there are enough.  The place of the first job
 * of each is remembered, but not where that is only some 30 entries further on: most that
 * commit late are before those.  Where there is none it is a tenth of a second ago after a scan
 * from the start of the lane, and else stays: jobs that waited for others come in behind it.
 *
 * A full scan that walks very many entries is made by one session for all that ask alike, and
 * told to them by a row of lane_starts.  That session holds a lock, but may forget to commit:
 * 5 seconds after it was due every session makes its own.
 *
 * A start is two times, until when the next claim may begin there at once and when the next
 * full scan is due (0 if the last one walked few), and lane, place and id of each lane. */
create or replace function rota._lock_lanes(
    call text, start bigint[], queues text[], ends timestamptz[], max_jobs integer,
    job_types text[], due timestamptz, locked_ids bigint[]
) returns bigint[] language plpgsql as $$
declare
    c_due constant bigint := (extract(epoch from _lock_lanes.due) * 1000000)::bigint;
    v_start bigint[] := coalesce(start, '{0}'::bigint[]);
    v_call bigint; v_told bigint[];
    v_is_full boolean := rota._is_full_scan_due(v_start[2], due);
    v_begin timestamptz; v_taken bigint[]; v_first timestamptz; v_found bigint; v_place bigint;
    v_next integer := 3;
    v_from bigint[] := '{-32769}'::bigint[];
    v_seen bigint[] := '{}'::bigint[];
    v_used bigint[] := '{}'::bigint[];
    v_ids bigint[] := '{}'::bigint[];
    c_index constant oid := 'rota.jobs_ready_idx'::regclass::oid;
    v_walked bigint := pg_stat_get_xact_tuples_returned(c_index);
begin
    -- Not where a full scan has walked few: there each scan is one.
    if v_is_full and v_start[2] is distinct from 0 then
        v_call := hashtextextended(format('%s %s', queues, job_types), 0);
        select s.start into v_told from rota.lane_starts as s
        where s.call = v_call order by s.call desc, s.id desc limit 1;
        -- One that is farther ahead is of a clock that went back.
        if v_told[2] between c_due - 5000000 and c_due + 3000000
          and (v_told[2] > c_due or not rota._try_lock(concat('rota.scan ', v_call))) then
            v_start := v_told;
            v_is_full := false;
        end if;
    end if;
    while cardinality(v_ids) < max_jobs loop
        v_from := array[rota._next_lane(queues, v_from[1], v_start[v_next]), 0, 0];
        exit when v_from[1] is null;
        if v_from[1] = v_start[v_next] then
            if not v_is_full then v_from := v_start[v_next:v_next + 2]; end if;
            v_next := v_next + 3;
        end if;

        v_begin := coalesce('epoch'::timestamptz
            + nullif(v_from[2], 0) * interval '1 microsecond', '-infinity');
        if cardinality(queues) = 1 then
            select array_agg(l.id), min(l.place) into v_taken, v_first
            from (
                select case when j.expires_at <= _lock_lanes.due then -j.id else j.id end as id,
                    coalesce(j.own_place, j.run_at) as place
                from rota.jobs as j
                where j.queue = _lock_lanes.queues[1]
                  and coalesce(j.own_lane, j.priority) = v_from[1]::integer and j.hold is null
                  and j.status in ('queued', 'failed')
                  and coalesce(j.own_place, j.run_at) <= _lock_lanes.ends[1]
                  and j.run_at <= _lock_lanes.due
                  and (coalesce(j.own_place, j.run_at), j.id) >= (v_begin, v_from[3])
                  and (_lock_lanes.job_types is null or j.job_type = any(_lock_lanes.job_types))
                  and j.id <> all(_lock_lanes.locked_ids)
                order by coalesce(j.own_place, j.run_at), j.id
                limit _lock_lanes.max_jobs - cardinality(v_ids) for update skip locked
            ) as l;
        else
            select m.ids, m.place into v_taken, v_first
            from rota._lock_merged(_lock_lanes.queues, _lock_lanes.ends, v_from[1]::integer,
                v_begin, v_from[3], _lock_lanes.max_jobs - cardinality(v_ids),
                _lock_lanes.job_types, _lock_lanes.due, _lock_lanes.locked_ids) as m;
        end if;
        v_found := (extract(epoch from greatest(v_first, 'epoch')) * 1000000)::bigint;
        v_place := case v_from[2] when 0 then c_due - 100000 else v_from[2] end;
        if v_taken is not null then
            v_place := v_found;
            v_ids := v_ids || v_taken;
            v_used := v_used || array[v_from[1], 0, 0];
        end if;
        if v_from[2] <> 0 then
            -- Nor nearer to now than the last 30 entries of those walked reach back, evenly.
            v_place := least(v_place, c_due - 30 * (c_due - v_from[2])
                / greatest(30, pg_stat_get_xact_tuples_returned(c_index) - v_walked
                    - cardinality(v_ids)));
        end if;
        if v_from[2] = 0 or v_place > v_from[2] then
            v_from := array[v_from[1], v_place,
                case v_place when v_found then v_taken[1] else 0 end];
        end if;
        v_seen := v_seen || v_from;
    end loop;

    -- The places are brought up to date the sooner the more was walked in front of them.
    v_walked := pg_stat_get_xact_tuples_returned(c_index) - v_walked - cardinality(v_ids);
    v_start[1] := c_due + 10000000 / (10 + greatest(v_walked, 0));
    if v_is_full then
        v_start[2] := c_due + least(20 * v_walked, 2000000);
        if v_walked < 500 + 2 * cardinality(queues) * (max_jobs + 20) - cardinality(v_ids) then
            -- Each scan is a full one, and only what is in front is counted now and then.
            v_seen := v_used;
            v_start[1:2] := array[c_due + 1000000, 0];
        end if;
    end if;
    -- A lane to which a full scan does not come is looked at from its start when one does.
    v_start := v_start[:2] || v_seen[:24]
        || case when not v_is_full then v_start[v_next:26] end;
    perform rota._keep_scan_start(call, array_to_string(v_start, ' '));
    if v_is_full and v_call is not null and v_walked >= 10000 then
        insert into rota.lane_starts (call, start) values (v_call, v_start)
        on conflict do nothing;
    end if;
    return v_ids;
end $$;

/* The lowest lane in use above this one, up to the known one, which itself is not scanned. */
create or replace function rota._next_lane(queues text[], lane bigint, known bigint)
    returns bigint language plpgsql stable as $$
declare
    v_after constant integer := lane::integer;
    v_before constant integer := coalesce(known, 32768)::integer;
begin
    return coalesce((
        select min(l.lane) from unnest(_next_lane.queues) as c (queue)
        cross join lateral (
            select coalesce(j.own_lane, j.priority) as lane from rota.jobs as j
            where j.queue = c.queue and j.hold is null and j.status in ('queued', 'failed')
              and coalesce(j.own_lane, j.priority) > v_after
              and coalesce(j.own_lane, j.priority) < v_before
            order by coalesce(j.own_lane, j.priority) limit 1
        ) as l
    ), _next_lane.known);
end $$;

/* Lock the first due jobs of one lane of several queues that no other session holds, from that
 * place on, in one order over all of them, but for those that this claim has; returns the ids,
 * with a minus if the job has expired, and the place of the first.  No index has that order,
 * and locking the head of each lane would take from other workers what is then not claimed.  So
 * the lanes are merged first and locked after, window by window. */
create or replace function rota._lock_merged(
    queues text[], ends timestamptz[], lane integer, after_place timestamptz, after_id bigint,
    max_jobs integer, job_types text[], due timestamptz, locked_ids bigint[],
    out ids bigint[], out place timestamptz
) language plpgsql as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_window constant integer := max_jobs + 20;
    -- A variable: with literals the planner may read the whole lane to find known ids.
    c_waiting constant text[] := '{queued,failed}'::text[];
    v_after_place timestamptz := after_place;
    v_after_id bigint := after_id - 1;
    v_candidates bigint[];
begin
    ids := '{}';
    loop
        v_candidates := array(
            select m.id from unnest(_lock_merged.queues, _lock_merged.ends) as c (queue, until)
            cross join lateral (
                select j.id, coalesce(j.own_place, j.run_at) as place from rota.jobs as j
                where j.queue = c.queue
                  and coalesce(j.own_lane, j.priority) = _lock_merged.lane and j.hold is null
                  and j.status in ('queued', 'failed')
                  and coalesce(j.own_place, j.run_at) <= c.until
                  and j.run_at <= _lock_merged.due
                  and (coalesce(j.own_place, j.run_at), j.id) > (v_after_place, v_after_id)
                  and (_lock_merged.job_types is null
                    or j.job_type = any(_lock_merged.job_types))
                  and j.id <> all(_lock_merged.locked_ids)
                order by coalesce(j.own_place, j.run_at), j.id limit v_window
            ) as m
            order by m.place, m.id limit v_window
        );
        ids := ids || array(
            select case when j.expires_at <= _lock_merged.due then -j.id else j.id end
            from rota.jobs as j
            where j.id = any(v_candidates) and j.queue = any(_lock_merged.queues)
              and coalesce(j.own_lane, j.priority) = _lock_merged.lane
              and j.status = any(c_waiting) and j.run_at <= _lock_merged.due
              and coalesce(j.hold, '') = '' order by coalesce(j.own_place, j.run_at), j.id
            limit _lock_merged.max_jobs - cardinality(ids) for update skip locked
        );
        exit when cardinality(ids) = max_jobs or cardinality(v_candidates) < v_window;

        v_after_id := v_candidates[v_window];
        select coalesce(j.own_place, j.run_at) into v_after_place from rota.jobs as j
        where j.id = v_after_id;
        exit when not found;
    end loop;

    ids := nullif(ids, '{}');
    select coalesce(j.own_place, j.run_at) into place from rota.jobs as j
    where j.id = abs(ids[1]);
end $$;

create or replace function rota._check_claim(
    worker text, queues text[], max_jobs integer, lease interval, job_types text[]
) returns void language plpgsql as $$
begin
    perform rota._check_text('worker', worker, 255);
    perform rota._check_number('max_jobs', max_jobs, 1, 1000);
    perform rota._check_names('queues', queues);
    perform rota._check_interval('lease', lease, '1 millisecond', '30 days', true);
    if job_types is not null then perform rota._check_names('job_types', job_types); end if;
    perform rota._check_isolation('claim_jobs');
end $$;
