/*
 * jobs/claim.sql -- give jobs to a worker.
 *
 * A claim locks due rows with `for update skip locked`, so that two workers never wait for
 * each other and never get the same job, and marks them running in the same transaction.  The
 * attempt is counted here and not when a failure is reported: a job that kills its worker
 * reports nothing, and must still come to its end.
 *
 * The order is priority, run_at, id.  The index jobs_ready_idx is a set of lanes, one for each
 * (queue, priority), each in order of run_at.  A claim walks the priorities from the lowest
 * number up, and within one takes only the due beginning of each lane.  So a million jobs for
 * next month in front of a lane cost nothing: it never looks behind the first that is not due.
 *
 * The lane hint.  While somebody holds an old snapshot (a report, a dump, a forgotten
 * transaction) vacuum cannot remove what is done, and the index entries of all jobs that went
 * by stay in front of the lane.  So a session remembers where the first job of each lane was
 * and begins there the next time.  A job behind that place -- its transaction committed late,
 * somebody moved it -- is found by a full look from the start of the lane.  Full looks take at
 * most a twentieth of the time: after one that took 5 ms the next comes 100 ms later.  A
 * million old entries take 0.1 s to walk, so even behind them nothing is found later than after
 * 2 s, and sooner the more workers there are.  Where a full look meets few old entries, every
 * look is one.  A new lane is seen at once.  Nothing but speed rests on the hint: it may be
 * lost, wrong, or another's.
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
    worker text,
    queues text[] default '{default}',
    max_jobs integer default 1,
    lease interval default null,
    job_types text[] default null
)
    returns table (
        job_id bigint,
        lease_token bigint,
        queue text,
        job_type text,
        payload jsonb,
        priority smallint,
        attempt integer,
        max_attempts integer,
        run_at timestamptz,
        locked_until timestamptz,
        locked_for interval,
        idempotency_key text,
        created_at timestamptz,
        pipeline text,
        stage text,
        stage_input jsonb,
        definition text,
        scheduled_for timestamptz
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
    set enable_sort = off
as $$
declare
    v_now constant timestamptz := rota.now();
    v_call constant text := format('%L %s %s %s',
        claim_jobs.worker, claim_jobs.queues, claim_jobs.lease, claim_jobs.job_types);
    v_hint constant bigint[] := rota._hint(v_call);
    v_rows tid[] := rota._lock_head(
        v_hint, claim_jobs.queues, claim_jobs.max_jobs, claim_jobs.job_types, v_now);
    v_lease interval;
    v_has_settings boolean := false;
    v_limited_ids bigint[] := '{}'::bigint[];
begin
    if cardinality(v_rows) < claim_jobs.max_jobs is not false and (
        -- All that is due, if the look was from the start of the only lane.
        v_rows <> '{}' and v_hint[4] = 0 and not exists (
            select
            from rota.jobs as j
            where j.queue = claim_jobs.queues[1]
              and j.priority > v_hint[3]::integer
              and j.bucket is null
              and j.status in ('queued', 'failed')
        )
    ) is not true then
        if v_hint is null or claim_jobs.max_jobs between 1 and 1000 is not true
          or current_setting('transaction_isolation') <> 'read committed' then
            perform rota._check_claim(
                claim_jobs.worker, claim_jobs.queues, claim_jobs.max_jobs, claim_jobs.lease,
                claim_jobs.job_types);
        end if;
        select d.locked_rows, d.limited_ids, d.has_settings
        into v_rows, v_limited_ids, v_has_settings
        from rota._lock_due(
            v_call, v_hint, claim_jobs.queues, claim_jobs.max_jobs, claim_jobs.job_types,
            v_now) as d;
        if v_rows = '{}' then
            return;
        end if;
    end if;
    if claim_jobs.lease is not null then
        v_lease := rota._exact(claim_jobs.lease);
    end if;

    return query
    with claimed as (
        update rota.jobs as j
        set status = 'running',
            -- No number or lease that somebody wrote by hand may stop the jobs beside it.
            attempts = least(j.attempts, 2147483646) + 1,
            lease_token = greatest(
                least(j.lease_token, 9223372036854775806) + 1,
                (extract(epoch from v_now) * 1000000)::bigint),
            locked_by = claim_jobs.worker,
            locked_until = v_now + greatest('1 ms', least('30 days', coalesce(
                j.lease, v_lease,
                case when v_has_settings then (
                    select q.lease from rota.queues as q where q.queue = j.queue) end,
                '1 minute'))),
            is_limited = j.id = any(v_limited_ids),
            progress_percent = null,
            progress_message = null,
            started_at = v_now,
            updated_at = v_now
        where j.ctid = any(v_rows)
        returning
            j.id, j.lease_token, j.queue, j.job_type, j.payload, j.priority, j.attempts,
            j.max_attempts, j.run_at, j.locked_until, j.idempotency_key, j.created_at,
            j.pipeline, j.stage, j.stage_input, j.definition, j.scheduled_for
    )
    select
        c.id, c.lease_token, c.queue, c.job_type, c.payload, c.priority, c.attempts,
        c.max_attempts, c.run_at, c.locked_until, c.locked_until - v_now, c.idempotency_key,
        c.created_at, c.pipeline, c.stage, c.stage_input, c.definition, c.scheduled_for
    from claimed as c
    order by c.priority, c.run_at, c.id;
end;
$$;

comment on function rota.claim_jobs(text, text[], integer, interval, text[]) is
    'Lease up to max_jobs due jobs of these queues to a worker, by priority, run_at and id; '
    'a lease lasts as the job says, else the argument, else the queue; raises 22023 or RT009.';

/*
 * The rows of the first due jobs from the hint on, locked.  Null if there is no fresh hint for
 * this very call, and none or too few where more has to be looked at: another lane, a limit, a
 * paused queue, jobs whose turn has to be found.  What is in this one statement is all that
 * most claims need.
 */
create or replace function rota._lock_head(
    hint bigint[],
    queues text[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns tid[]
    language plpgsql
as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
declare
    c_due constant bigint := (extract(epoch from _lock_head.due) * 1000000)::bigint;
    v_queue constant text := _lock_head.queues[1];
begin
    if (
        _lock_head.hint[1] > c_due and _lock_head.hint[1] <= c_due + 60000000
        and cardinality(_lock_head.hint) >= 5
        and cardinality(_lock_head.queues) = 1
        and _lock_head.max_jobs between 1 and 1000
        and current_setting('transaction_isolation') = 'read committed'
    ) is not true then
        return null;
    end if;
    return array(
        select j.ctid
        from rota.jobs as j
        where j.queue = v_queue
          and j.priority = _lock_head.hint[3]::integer
          and j.bucket is null
          and j.status in ('queued', 'failed')
          and j.run_at <= _lock_head.due
          and (j.run_at, j.id) >= (
            case
                when _lock_head.hint[4] = 0 then timestamptz '-infinity'
                else 'epoch'::timestamptz + _lock_head.hint[4] * interval '1 microsecond'
            end, _lock_head.hint[5])
          and (_lock_head.job_types is null or j.job_type = any(_lock_head.job_types))
          and not exists (select from rota.limits)
          and not exists (select from rota.queue_grants)
          and not exists (select from rota.rechecks as r where r.due_at <= _lock_head.due)
          and not exists (
            select
            from rota.queues as q
            where q.queue = v_queue
              and (q.is_paused or q.ageing is not null or q.lease is not null)
          )
          and not exists (
            select from rota.buckets as b where b.queue = v_queue and b.waits_for is null)
          and not exists (
            select
            from rota.jobs as u
            where u.queue = v_queue
              and u.priority < _lock_head.hint[3]::integer
              and u.bucket is null
              and u.status in ('queued', 'failed')
          )
        order by j.run_at, j.id
        limit _lock_head.max_jobs
        for update of j skip locked
    );
end;
$$;

/*
 * The hint of this session for such a call: when it ends and when a full look is due, in
 * microseconds; then the priority, run_at and id of the first job of each lane.  A hash over
 * it and the call goes with it, so that another's, or what is no hint, is not taken for ours.
 */
create or replace function rota._hint(call text)
    returns bigint[]
    language plpgsql
    stable
as $$
declare
    v_text constant text := current_setting('rota.hint_' || case
        when strpos(_hint.call, ' ') = 0 then _hint.call
        else (hashtext(_hint.call) & 15)::text
    end, true);
    v_hint constant text := split_part(v_text, '#', 1);
begin
    if split_part(v_text, '#', 2) = hashtext(v_hint || _hint.call)::text then
        return string_to_array(v_hint, ' ')::bigint[];
    end if;
    return null;
end;
$$;

create or replace function rota._keep_hint(call text, hint bigint[])
    returns void
    language plpgsql
as $$
declare
    v_hint constant text := array_to_string(_keep_hint.hint, ' ');
begin
    -- Sixteen settings for all ways to claim, and one for each hint with a name of its own.
    perform set_config(
        'rota.hint_' || case
            when strpos(_keep_hint.call, ' ') = 0 then _keep_hint.call
            else (hashtext(_keep_hint.call) & 15)::text
        end,
        format('%s#%s', v_hint, hashtext(v_hint || _keep_hint.call)), false);
end;
$$;

/*
 * Lock due jobs, and say which of them count for a limit.  Where nothing is set for these
 * queues and no key waits for its turn, only the common lanes are walked.
 */
create or replace function rota._lock_due(
    call text,
    hint bigint[],
    queues text[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns table (locked_rows tid[], limited_ids bigint[], has_settings boolean)
    language plpgsql
as $$
declare
    v_queues text[] := _lock_due.queues;
    v_has_grants boolean;
    v_has_notes boolean;
    v_has_limits boolean;
    v_has_buckets boolean;
    v_ids bigint[] := '{}'::bigint[];
begin
    -- One statement, because each costs as much as a job that is claimed.
    select
        exists (select from rota.queue_grants),
        exists (select from rota.limits),
        exists (select from rota.rechecks as r where r.due_at <= _lock_due.due),
        exists (select from rota.queues as q where q.queue = any(_lock_due.queues)),
        exists (
            select
            from rota.buckets as b
            where b.queue = any(_lock_due.queues)
              and b.waits_for is null
        )
    into v_has_grants, v_has_limits, v_has_notes, has_settings, v_has_buckets;
    if v_has_grants then
        perform rota._check_queues('worker', _lock_due.queues);
    end if;
    limited_ids := '{}'::bigint[];
    if v_has_notes then
        perform rota._recheck(_lock_due.max_jobs + 20);
    end if;
    if v_has_limits or v_has_notes or has_settings or v_has_buckets then
        v_queues := array(
            select distinct c.queue
            from unnest(_lock_due.queues) as c (queue)
            left join rota.queues as q on q.queue = c.queue
            where q.is_paused is not true
        );
        select s.ids, s.open_queues
        into v_ids, v_queues
        from rota._lock_shared(
            v_queues, _lock_due.max_jobs, _lock_due.job_types, _lock_due.due) as s;
    end if;
    if cardinality(v_queues) > 0 and cardinality(v_ids) < _lock_due.max_jobs then
        v_ids := v_ids || rota._lock_lanes(
            _lock_due.call, _lock_due.hint, v_queues,
            _lock_due.max_jobs - cardinality(v_ids), _lock_due.job_types, _lock_due.due);
    end if;
    if v_has_limits then
        select l.kept_ids, l.limited_ids
        into v_ids, limited_ids
        from rota._apply_limits(v_ids) as l;
    end if;
    -- By number: an update of rows that are locked needs no index to find them.
    locked_rows := array(select j.ctid from rota.jobs as j where j.id = any(v_ids));
    return next;
end;
$$;

/*
 * Walk the lanes from the lowest priority number up, until there are enough.  The place of the
 * first job of each is remembered; where a look from the start of a lane found none, all that
 * is older than a tenth of a second.
 */
create or replace function rota._lock_lanes(
    call text,
    hint bigint[],
    queues text[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns bigint[]
    language plpgsql
as $$
declare
    c_due constant bigint := (extract(epoch from _lock_lanes.due) * 1000000)::bigint;
    v_hint bigint[] := coalesce(_lock_lanes.hint, '{0,0}'::bigint[]);
    -- A time too far ahead is of a clock that went back.
    v_is_full constant boolean := (
        v_hint[2] > c_due and v_hint[2] <= c_due + 60000000) is not true;
    v_next integer := 3;
    v_from bigint[] := '{-32769}'::bigint[];
    v_taken bigint[];
    v_seen bigint[] := '{}'::bigint[];
    v_used bigint[] := '{}'::bigint[];
    v_ids bigint[] := '{}'::bigint[];
    v_cost bigint;
    c_index constant oid := 'rota.jobs_ready_idx'::regclass::oid;
    v_walked bigint := pg_stat_get_xact_tuples_returned(c_index);
begin
    while cardinality(v_ids) < _lock_lanes.max_jobs loop
        v_from := array[rota._next_lane(_lock_lanes.queues, v_from[1], v_hint[v_next]), 0, 0];
        exit when v_from[1] is null;
        if v_from[1] = v_hint[v_next] then
            if not v_is_full then
                v_from := v_hint[v_next:v_next + 2];
            end if;
            v_next := v_next + 3;
        end if;

        v_taken := rota._lock_lane(
            _lock_lanes.queues, v_from, _lock_lanes.max_jobs - cardinality(v_ids),
            _lock_lanes.job_types, _lock_lanes.due);
        if cardinality(v_taken) > 1 then
            if v_is_full or v_from[2] > 0 then
                v_from := v_from[1] || v_taken[:2];
            end if;
            v_ids := v_ids || v_taken[2:];
            v_used := v_used || array[v_from[1], 0, 0];
        elsif v_is_full then
            v_from := array[v_from[1], c_due - 100000, 0];
        end if;
        v_seen := v_seen || v_from;
    end loop;

    -- Full looks that take long are rare.  Beside them the places are brought up to date often,
    -- and where each look is a full one, only what is in front has to be counted now and then.
    v_cost := (extract(epoch from rota.now() - _lock_lanes.due) * 1000000)::bigint;
    v_hint[1] := c_due + least(21 * v_cost, 20000);
    if v_is_full then
        v_hint[2] := c_due + least(21 * v_cost, 60000000);
        v_walked := pg_stat_get_xact_tuples_returned(c_index) - v_walked;
        if v_walked < 500
          + 2 * cardinality(_lock_lanes.queues) * (_lock_lanes.max_jobs + 20) then
            v_seen := v_used;
            v_hint[1] := c_due + 1000000;
        end if;
    end if;
    perform rota._keep_hint(
        _lock_lanes.call, v_hint[:2] || v_seen[:24] || v_hint[v_next:26]);
    return v_ids;
end;
$$;

/*
 * The lowest priority number in use above this one, as far as the known one, without a look at
 * the known lane itself.
 */
create or replace function rota._next_lane(
    queues text[],
    priority bigint,
    known bigint
)
    returns bigint
    language plpgsql
    stable
as $$
declare
    v_after constant integer := _next_lane.priority::integer;
    v_before constant integer := coalesce(_next_lane.known, 32768)::integer;
begin
    return coalesce((
        select min(l.priority)
        from unnest(_next_lane.queues) as c (queue)
        cross join lateral (
            select j.priority
            from rota.jobs as j
            where j.queue = c.queue
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.priority > v_after
              and j.priority < v_before
            order by j.priority
            limit 1
        ) as l
    ), _next_lane.known);
end;
$$;

/*
 * Lock the first due jobs of one lane, or of one priority of several queues, that nobody else
 * holds: from (priority, run_at in microseconds, id) on.  Returns the run_at of the first of
 * them, and then the ids.
 */
create or replace function rota._lock_lane(
    queues text[],
    first bigint[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns bigint[]
    language plpgsql
as $$
declare
    c_queue constant text := _lock_lane.queues[1];
    c_priority constant integer := _lock_lane.first[1]::integer;
    c_run_at constant timestamptz := case
        when _lock_lane.first[2] = 0 then timestamptz '-infinity'
        else 'epoch'::timestamptz + _lock_lane.first[2] * interval '1 microsecond'
    end;
    c_id constant bigint := _lock_lane.first[3];
    v_run_at timestamptz;
    v_ids bigint[];
begin
    if cardinality(_lock_lane.queues) = 1 then
        select array_agg(l.id), min(l.run_at)
        into v_ids, v_run_at
        from (
            select j.id, j.run_at
            from rota.jobs as j
            where j.queue = c_queue
              and j.priority = c_priority
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.run_at <= _lock_lane.due
              and (j.run_at, j.id) >= (c_run_at, c_id)
              and (_lock_lane.job_types is null or j.job_type = any(_lock_lane.job_types))
            order by j.run_at, j.id
            limit _lock_lane.max_jobs
            for update skip locked
        ) as l;
    else
        select m.ids, m.run_at
        into v_ids, v_run_at
        from rota._lock_merged(
            _lock_lane.queues, c_priority, c_run_at, c_id, _lock_lane.max_jobs,
            _lock_lane.job_types, _lock_lane.due) as m;
    end if;
    return (extract(epoch from greatest(v_run_at, 'epoch')) * 1000000)::bigint || v_ids;
end;
$$;

/*
 * The same for several queues of one priority, in one order over all of them.  No index has
 * that order, and locking the head of each lane would take jobs that are then not claimed away
 * from other workers.  So the lanes are merged first and locked after, window by window until
 * there are enough.
 */
create or replace function rota._lock_merged(
    queues text[],
    priority integer,
    after_run_at timestamptz,
    after_id bigint,
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns table (ids bigint[], run_at timestamptz)
    language plpgsql
as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_window constant integer := _lock_merged.max_jobs + 20;
    -- A variable: with literals the planner may take jobs_ready_idx where the ids are known,
    -- and read the whole line of a priority to find them.
    c_waiting constant text[] := '{queued,failed}'::text[];
    v_after_run_at timestamptz := _lock_merged.after_run_at;
    v_after_id bigint := _lock_merged.after_id - 1;
    v_candidates bigint[];
begin
    ids := '{}';
    loop
        v_candidates := array(
            select m.id
            from unnest(_lock_merged.queues) as c (queue)
            cross join lateral (
                select j.id, j.run_at
                from rota.jobs as j
                where j.queue = c.queue
                  and j.priority = _lock_merged.priority
                  and j.bucket is null
                  and j.status in ('queued', 'failed')
                  and j.run_at <= _lock_merged.due
                  and (j.run_at, j.id) > (v_after_run_at, v_after_id)
                  and (_lock_merged.job_types is null
                    or j.job_type = any(_lock_merged.job_types))
                order by j.run_at, j.id
                limit v_window
            ) as m
            order by m.run_at, m.id
            limit v_window
        );
        ids := ids || array(
            select j.id
            from rota.jobs as j
            where j.id = any(v_candidates)
              and j.priority = _lock_merged.priority
              and j.status = any(c_waiting)
              and j.run_at <= _lock_merged.due
            order by j.run_at, j.id
            limit _lock_merged.max_jobs - cardinality(ids)
            for update skip locked
        );
        exit when cardinality(ids) = _lock_merged.max_jobs
          or cardinality(v_candidates) < v_window;

        v_after_id := v_candidates[v_window];
        select j.run_at into v_after_run_at from rota.jobs as j where j.id = v_after_id;
        exit when not found;
    end loop;

    if cardinality(ids) = 0 then
        ids := null;
    end if;
    select j.run_at into run_at from rota.jobs as j where j.id = ids[1];
    return next;
end;
$$;

create or replace function rota._check_claim(
    worker text,
    queues text[],
    max_jobs integer,
    lease interval,
    job_types text[]
)
    returns void
    language plpgsql
as $$
begin
    perform rota._check_text('worker', _check_claim.worker, 255);
    if _check_claim.max_jobs is null or _check_claim.max_jobs not between 1 and 1000 then
        perform rota._refuse('max_jobs', format('must be 1 to 1000, got %s',
            coalesce(_check_claim.max_jobs::text, 'null')));
    end if;
    perform rota._check_names('queues', _check_claim.queues);
    if _check_claim.lease is not null then
        perform rota._check_lease('lease', _check_claim.lease);
    end if;
    if _check_claim.job_types is not null then
        perform rota._check_names('job_types', _check_claim.job_types);
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using
            errcode = 'RT009',
            message = format('claim_jobs needs the isolation level read committed, not %s',
                current_setting('transaction_isolation')),
            hint = 'Begin the transaction with "isolation level read committed"; at a higher '
                'level every second claim would fail.';
    end if;
end;
$$;
