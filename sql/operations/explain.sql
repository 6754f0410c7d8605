/*
 * operations/explain.sql -- why does this job not run?
 *
 * Each thing that can keep a job from running is checked in turn, and what is found becomes a
 * row: a reason, what it says about this job, and the statement that would change it.  The
 * first row decides, and the others are what would keep the job next.
 *
 * It only reads, waits a second for a table that a session has locked against readers, and
 * looks at a bounded number of rows: so it may be called at the worst moment, on a standby, and
 * for any job.
 */

create or replace function rota.explain_job(job_id bigint)
    returns table (ordinal integer, reason text, explanation text, remedy text) language plpgsql
    stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
    set enable_bitmapscan = off set enable_sort = off set jit = off
    set lock_timeout = '1s' as $$
declare
    v_live record; v_ended rota.finished_jobs;
begin
    perform rota._check_given('job_id', job_id is not null);
    -- Stable, so that a job on its way between the tables is seen in one of them.
    select j as job, j.xmax as row_xmax into v_live from rota.jobs as j
    where j.id = explain_job.job_id;
    select f.* into v_ended from rota.finished_jobs as f
    where f.id = explain_job.job_id limit 1;
    if coalesce((v_live.job).id, v_ended.id) is null
      or rota._jobs_outside_grants(array[explain_job.job_id], 'observer') <> '{}' then
        perform rota._raise_not_found(job_id);
    end if;

    return query select r.ordinal::integer, r.reason, rota._printable(r.explanation), r.remedy
    from rota._explain(v_live.job, v_live.row_xmax, v_ended)
        with ordinality as r (reason, explanation, remedy, ordinal)
    order by r.ordinal;
end $$;

comment on function rota.explain_job is
    'Why a job does not run, or how it runs or ended: in order a reason, its explanation for '
    'this job, and the statement that would change it, or null; the first row decides; only '
    'reads, and waits for a locked table for a second; raises RT001, 22023, 55P03.';

create or replace function rota._explain(job rota.jobs, row_xmax xid, ended rota.finished_jobs)
    returns table (reason text, explanation text, remedy text) language plpgsql stable as $$
declare
    v_is_free boolean := true;
begin
    if job.id is null then
        return query select e.* from rota._explain_ended(ended) as e;
        return;
    elsif job.status = 'running' then
        return query select r.* from rota._explain_running(job) as r;
    elsif job.status = 'blocked' then
        return query select p.* from rota._explain_parents(job) as p
        union all
        select o.* from rota._explain_order(job) as o;
        if not found and exists (
            select from rota.pending_checks as c
            where c.kind in ('job', 'parent', 'retry')
              or c.kind = 'order' and c.subject = job.ordering_key
        ) then
            return query
            select 'needs_tick', 'nothing blocks it any longer: the next tick queues it' || case
                    when job.ordering_key is not null then ', unless a transaction that is '
                        'still open has enqueued one of its key before it' else '' end,
                'select * from rota.tick();';
        elsif not found then
            return query
            select 'waits_for_nothing', 'what it waited for is gone, as when rows are deleted '
                    'by hand: once it is retried, a tick finds that',
                format('select rota.retry_job(%s);', job.id);
        end if;
    else
        return query select t.* from rota._explain_time(job) as t;
        v_is_free := not found;
    end if;
    return query
    select 'row_locked', format('its row is locked by %s; claims skip it', h.words), h.remedy
    from rota._lasting_holder(array[row_xmax]) as h;
    v_is_free := v_is_free and not found;
    -- What moves starts in the other database.
    if job.status in ('queued', 'failed') and not rota._moves_away(job.queue) then
        return query select n.* from rota._explain_limits(job) as n;
        v_is_free := v_is_free and not found;
        return query select w.* from rota._explain_workers(job) as w;
        v_is_free := v_is_free and not found;
        return query select p.* from rota._explain_place(job, v_is_free) as p;
    end if;
    -- Whether any session does the maintenance that lets jobs in and takes them back.  While
    -- there is nothing to do, a tick is recorded every five minutes.
    return query
    select 'no_tick', format('no tick has run for %s: jobs that wait for more than a '
            'free worker keep waiting; start a worker, or rota tick --loop', rota._span(t.lag)),
        'select * from rota.tick();'
    from rota.ticker_health as t where t.lag > interval '6 minutes'
    union all
    select 'standby', 'seen on a standby: only the primary shows which workers are connected, '
        'and whether another transaction has locked the job', null::text
    where pg_is_in_recovery();
end $$;

create or replace function rota._explain_time(job rota.jobs)
    returns table (reason text, explanation text, remedy text) language plpgsql stable as $$
declare
    c_now constant timestamptz := rota.now();
    -- By hand it may be put off for ever.
    c_run_at constant timestamptz := least(job.run_at, '9999-01-01');
    c_too_late constant text := case when job.expires_at <= job.run_at
        then '; but it expires before that, at ' || rota._moment(job.expires_at) else '' end;
begin
    if job.expires_at <= c_now then
        return query select 'expired', format('it expired %s ago, and the next tick cancels it',
                rota._ago(job.expires_at)),
            format('select rota.retry_job(%s);', job.id);
    elsif job.run_at > c_now and job.status = 'failed' then
        return query select 'retry', format(
                '%s failed %s ago with %s; %s in %s, at %s%s', case job.attempts
                    when 0 then 'the last attempt before its rerun'
                    else format('attempt %s of %s', job.attempts, job.max_attempts) end,
                rota._ago(job.failed_at),
                rota._error_words(job.error_type, job.last_error),
                case when exists (
                    select from rota._past_rule(job.error_type, job.job_type, job.queue,
                        job.failed_at) as r
                    where job.failed_at + r.retry_in = job.run_at
                ) then 'by a retry rule for that error the next begins'
                    else 'the next begins' end,
                rota._span(c_run_at - c_now), rota._moment(c_run_at), c_too_late),
            format('select rota.retry_job(%s);', job.id);
    elsif job.run_at > c_now then
        return query select 'not_due', format('it is not due for another %s, until %s%s%s',
                rota._span(c_run_at - c_now), rota._moment(c_run_at),
                ', as planned by schedule ' || job.definition, c_too_late),
            format('select rota.reschedule_job(%s, delay => ''0'');', job.id);
    elsif job.hold = 'time' then
        return query
        select 'needs_tick', format('it has been due for %s, and the next tick makes it ready',
            rota._ago(job.run_at)), 'select * from rota.tick();';
    end if;
    return query select case when p.job_type is not null then 'type_paused'
            when p.queue is not null then 'queue_paused' else 'all_paused' end,
        w.words, w.remedy
    from rota.pauses as p cross join lateral rota._pause_finding(p) as w
    where coalesce(p.queue, job.queue) = job.queue
      and coalesce(p.job_type, job.job_type) = job.job_type
      and (p.until is null or p.until > c_now)
      -- What a breaker lets through to try.
      and (p.set_by = 'breaker' and job.opened_for = 'try ' || p.pause_name) is not true
    order by num_nonnulls(p.queue, p.job_type), p.pause_name;
    if job.hold like 'pause %' and not found then
        return query
        select 'needs_tick', 'the pause that held it has ended: the next tick makes it ready',
            'select * from rota.tick();';
    -- No tick spends the budget of a queue that is paused.
    elsif job.hold like 'retries %' and job.run_at <= c_now
      and (job.expires_at <= c_now) is not true then
        return query select b.* from rota._explain_budget(job) as b;
    end if;
end $$;

/* The retry rule that a failure met, unless it was changed since. */
create or replace function rota._past_rule(
    error_type text, job_type text, queue text, failed_at timestamptz
) returns setof rota.retry_rules language sql stable as $$
    select r.*
    from rota._retry_rule(_past_rule.error_type, _past_rule.job_type, _past_rule.queue) as r
    where r.updated_at <= _past_rule.failed_at;
$$;

/* Its retry is due, and waits for the retry budget of its queue. */
create or replace function rota._explain_budget(job rota.jobs)
    returns table (reason text, explanation text, remedy text) language plpgsql stable as $$
declare
    c_max_ahead constant integer := 1000;
    c_budget constant jsonb := (
        select q.retry_budget from rota.queues as q where q.queue = job.queue);
    v_state record; v_ahead integer; v_wait interval;
begin
    select s.* into v_state from rota.retry_budgets as b
    cross join lateral rota._budget_state(b) as s where b.queue = job.queue;
    v_ahead := rota._held_before(job, c_max_ahead);
    v_wait := make_interval(
        secs => greatest(0, v_ahead + 1 - v_state.tokens) / v_state.per_minute * 60);
    return query
    select 'retry_budget', format('its retry has been due for %s, but the retry budget of '
            'queue %s is used up: it allows %s retries per minute (%s, and %s %% of first '
            'attempts), %s before it, so this one is ready in about %s, at %s',
            rota._ago(job.run_at), job.queue, round(v_state.per_minute::numeric, 1),
            c_budget ->> 'per_minute',
            c_budget ->> 'percent', rota._jobs_words(v_ahead, c_max_ahead), rota._span(v_wait),
            rota._moment(rota.now() + v_wait)),
        format('select rota.retry_job(%s);', job.id)
    where v_wait > interval '1 second';
    return query
    select 'needs_tick', format('its retry has been due for %s, and the next tick makes it '
        'ready', rota._ago(job.run_at)), 'select * from rota.tick();'
    where v_wait <= interval '1 second';
end $$;

/* How many of its queue are held as it is, and come before it; up to so many.  Retries are let
 * in by their times alone, but none of a paused type, and other jobs lane by lane. */
create or replace function rota._held_before(job rota.jobs, max_jobs integer)
    returns integer language plpgsql stable as $$
declare
    c_lane constant smallint := case
        when job.hold not like 'retries %' then coalesce(job.own_lane, job.priority) end;
begin
    return (
        select count(*)::integer
        from (
            select from rota._held_lanes(job.hold, job.queue) as k
            cross join lateral (
                select from rota.jobs as j
                where j.hold = job.hold and j.hold <> 'time' and j.queue = job.queue
                  and j.job_type = k.job_type and coalesce(j.own_lane, j.priority) = k.lane
                  and j.status in ('queued', 'failed')
                  and (coalesce(j.own_place, j.run_at), j.id) < (case when k.lane < c_lane
                    then 'infinity' else coalesce(job.own_place, job.run_at) end, job.id)
                limit _held_before.max_jobs
            ) as a
            where (k.lane > c_lane) is not true
              and (c_lane is not null or k.job_type = job.job_type
                or not rota._is_paused(job.queue, rota.now(), k.job_type))
            limit _held_before.max_jobs
        ) as b
    );
end $$;

/* Who has locked all of these rows, told by their xmax: the holder of the first.  A claim locks
 * the rows that it looks at, too; so it is told when it is still so after a moment. */
create or replace function rota._lasting_holder(row_xmaxes xid[])
    returns table (words text, remedy text) language plpgsql stable as $$
begin
    for v_look in 1..2 loop
        if exists (
            select from (select distinct unnest(row_xmaxes)) as x (row_xmax)
            where not exists (select from rota._row_holder(x.row_xmax))
        ) then
            return;
        end if;
        perform pg_sleep(0.1) where v_look = 1;
    end loop;
    return query select h.words, h.remedy from rota._row_holder(row_xmaxes[1]) as h;
end $$;

/* Which limits it counts for have no room, or hold it although they have. */
create or replace function rota._explain_limits(job rota.jobs)
    returns table (reason text, explanation text, remedy text) language plpgsql stable as $$
declare
    c_now constant timestamptz := rota.now();
    c_hold constant text := substring(job.hold, '^(?:queue|type|key) .*');
    c_visible constant text[] := rota._allowed_queues('observer');
    c_max_room constant integer := 1000;
    v_bound rota.limits; v_free integer; v_next_start_at timestamptz; v_running text[];
    v_is_full boolean := false; v_room integer; v_opened integer;
begin
    for v_bound in
        select l.* from rota._limits_of(job.job_type, job.limit_key, job.queue) as l
        where num_nonnulls(l.max_running, l.max_starts) > 0
        order by l.limit_name is distinct from c_hold
    loop
        v_free := case when v_bound.max_running is not null
            then rota._free_slots(v_bound, c_max_room, is_full => true) else c_max_room end;
        v_next_start_at := case
            when v_bound.max_starts is not null then rota._next_start_at(v_bound) end;
        if v_bound.limit_name = c_hold then
            v_room := least(v_free, case when v_bound.max_starts is not null
                then (select c.burst from rota._cells(v_bound) as c) end);
            -- Also those that still have the mark of a claim that was rolled back.
            v_opened := (select o.jobs from rota._opened(c_hold, job.queue, job.job_type,
                coalesce(job.own_lane, job.priority), 0, v_room, 2147483647) as o);
            -- A tick that has let in a burst lets in no more until this time.
            if v_opened < v_room and v_next_start_at <= c_now then
                v_next_start_at := coalesce((
                    select min(c.due_at) from rota.pending_checks as c
                    where c.kind = 'limit' and c.subject = c_hold and c.due_at > '-infinity'
                ), c_now);
            end if;
        end if;

        if not rota._is_counted(v_bound) then
            return query
            select 'limit_new', format('limit %s was set %s ago: nothing starts under it until '
                    'maintenance has counted the running jobs', v_bound.limit_name,
                    rota._ago(v_bound.updated_at)),
                'select * from rota.tick();';
        elsif v_free = 0 then
            v_running := array(
                select case when r.queue <> all(c_visible) then 'one of another queue'
                    else r.id::text || coalesce(' (' || r.locked_by || ')', '') end
                from rota.jobs as r
                where r.status = 'running' and r.locked_until is not null
                  and (v_bound.limit_name = any(r.held_limits) or r.id = any(array(
                    -- Their rows do not say so yet.
                    select u.id from rota._uncounted(v_bound, array[v_bound.limit_name]) as u
                    where exists (select from rota.limit_parts as p
                        where p.limit_name = v_bound.limit_name and p.part = -2))))
                order by r.locked_until, r.id limit 1000
            );
            -- While more run than a limit that was lowered allows, no tick lets another start.
            if cardinality(v_running) < v_bound.max_running
              and not rota._is_issued_for(v_bound) then
                return query
                select 'needs_tick', format('limit %s was changed %s ago, to %s at once: '
                        'nothing starts under it until maintenance has issued the free places',
                        v_bound.limit_name, rota._ago(v_bound.updated_at),
                        v_bound.max_running),
                    'select * from rota.tick();'
                -- Of a class a tick looks at the keys that have held jobs: a claim comes first.
                where v_bound.limit_name = c_hold
                   or (v_bound.limit_key <> job.limit_key) is not true;
            else
                return query select 'limit_full', format(
                        'limit %s is full: %s may run at once%s', v_bound.limit_name,
                        v_bound.max_running,
                        coalesce(', running: ' || nullif(rota._list(v_running), ''), '') || case
                            when cardinality(v_running) = 1000 then ' or more'
                            when cardinality(v_running) < v_bound.max_running
                                then '. The others were lost, as when rows are changed by '
                                    'hand: once the limit is set again, a tick finds them'
                            else ''
                        end),
                    rota._limit_statement(v_bound, job.limit_key, 'max_running', case
                        when cardinality(v_running) < least(v_bound.max_running, 1000)
                            then v_bound.max_running
                        else least(1000000,
                            greatest(v_bound.max_running, cardinality(v_running)) + 1)
                    end);
            end if;
        elsif v_next_start_at > c_now then
            return query
            select 'rate', format('limit %s lets %s start per %s: the next is in %s, '
                    'at %s', v_bound.limit_name, v_bound.max_starts,
                    rota._span(coalesce(v_bound.per, '1 second')),
                    rota._span(v_next_start_at - c_now), rota._moment(v_next_start_at)),
                rota._limit_statement(v_bound, job.limit_key, 'max_starts',
                    least(v_bound.max_starts * 2, 1000000));
        else
            -- Others may have locked all free slots, as by a claim that is not committed.
            return query
            select 'limit_full', format('limit %s is full: %s may run at once, and what is '
                'free is locked by %s', v_bound.limit_name, v_bound.max_running, h.words),
                h.remedy
            from (
                select array(
                    select s.xmax from rota.limit_slots as s
                    where s.limit_name = v_bound.limit_name order by s.version limit v_free
                ) as row_xmaxes
            ) as f
            cross join lateral rota._lasting_holder(f.row_xmaxes) as h
            where v_bound.max_running is not null and cardinality(f.row_xmaxes) = v_free;
            continue when not found;
        end if;
        v_is_full := true;
    end loop;
    if c_hold is not null and not v_is_full then
        return query
        select 'needs_tick', format('it waits for limit %s, which has free capacity: the next '
            'tick, or the end of a job under that limit, makes it ready', c_hold),
            'select * from rota.tick();'
        -- A tick lets in no more than can start; those it has let in may have no worker.  Where
        -- it has no check left to do, jobs are in their lanes whose end lets in the next.  Of
        -- very many checks one may be for it.
        where (v_opened < v_room) is not false and (
            select count(*) = 1000 or bool_or(c.kind in ('limit', 'slots')
                and c.subject = any(case when c_hold like 'key %'
                    then rota._key_limits(job.limit_key) else array[c_hold] end))
            from (
                select p.kind, p.subject from rota.pending_checks as p
                order by p.due_at, p.id limit 1000
            ) as c
        );
    end if;
end $$;

/* The jobs that it depends on, those first that will never end well by themselves. */
create or replace function rota._explain_parents(job rota.jobs)
    returns table (reason text, explanation text, remedy text) language sql stable as $$
    select 'waits_for_job', format('it waits for job %s (%s%s)%s', s.parent_id,
            case
                when s.status is null
                    then 'which is gone: once this one is retried, a tick finds that'
                when s.status in ('dead', 'cancelled') then s.status || ': '
                    || rota._error_words(r.error_type, case s.status
                        when 'dead' then r.last_error
                        else coalesce(r.cancel_reason, 'no reason') end)
                else coalesce(r.job_type || ', ', '') || s.status
            end,
            ', and ' || case
                when s.status in ('dead', 'cancelled') then rota._key_words(s.parent_id) end,
            case when s.open > 1 then format(', one of %s%s that have not succeeded',
                case when cardinality(p.ids) = 200 then 'at least ' end, s.open) end),
        case
            when s.status in ('dead', 'cancelled') then rota._retry_statement(s.parent_id)
            when s.status is not null
                then format('select * from rota.explain_job(%s);', s.parent_id)
            else format('select rota.retry_job(%s);', job.id)
        end
    from (
        select array(
            select d.parent_id from rota.dependencies as d where d.job_id = job.id
            order by d.parent_id desc limit 200
        ) as ids
    ) as p
    cross join lateral (
        select i.parent_id, i.status, count(*) over () as open
        from rota._parent_statuses(p.ids) as i where i.status is distinct from 'succeeded'
    ) as s
    -- Of a job of another queue a confined observer sees its status alone.
    left join lateral (
        select i.job_type, i.error_type, i.last_error, i.cancel_reason from rota.job_runs as i
        where i.id = s.parent_id limit 1
    ) as r on true
    order by coalesce(s.status, '') not in ('dead', 'cancelled', ''), s.parent_id limit 5;
$$;

create or replace function rota._explain_order(job rota.jobs)
    returns table (reason text, explanation text, remedy text) language plpgsql stable as $$
declare
    c_max_ahead constant integer := 1000;
    v_head_id bigint; v_ahead integer;
begin
    if job.ordering_key is null then return; end if;
    return query select 'key_halted', 'its ' || w.words, w.remedy
    from rota._halt_words(array[job.ordering_key]) as w
    union all
    select 'key_halted', format('or let the others run without job %s', h.job_id),
        format('select rota.resume_ordering_key(%s);', rota._literal(h.ordering_key))
    from rota.halted_keys as h where h.ordering_key = job.ordering_key;

    v_head_id := rota._key_head(job.ordering_key, rota._key_start(job.ordering_key));
    v_ahead := (
        select count(*)::integer
        from (
            select from rota.jobs as j
            where j.ordering_key >= job.ordering_key and j.ordering_key <= job.ordering_key
              and j.status = 'blocked' and j.id < job.id
            limit c_max_ahead
        ) as a
    );
    if v_head_id is not null or v_ahead > 0 then
        return query select 'behind_in_key', format('%s before it under ordering key %L%s',
                rota._jobs_words(v_ahead + (v_head_id is not null)::integer, c_max_ahead),
                job.ordering_key,
                (select format(', and the first of them is job %s (%s, %s)', j.id,
                    j.job_type, j.status)
                from rota.job_runs as j where j.id = v_head_id)),
            'select * from rota.explain_job(' || v_head_id::text || ');'
        where v_head_id is distinct from job.id;
    end if;
end $$;

create or replace function rota._explain_workers(job rota.jobs)
    returns table (reason text, explanation text, remedy text) language plpgsql stable as $$
declare
    v_takers bigint; v_others text[]; v_gone text;
begin
    select count(*) filter (where w.takes_type), array_agg(w.worker order by w.worker)
    into v_takers, v_others
    from (
        select l.worker, l.job_types is null or job.job_type = any(l.job_types) as takes_type
        from rota._workers as l where l.is_live and job.queue = any(l.queues)
    ) as w;
    if v_takers > 0 then
        return;
    elsif job.queue ~ '^forward:[0-9]+$' then
        return query select 'waits_for_forwarder', rota._forwarder_words(job.queue), null::text;
        return;
    end if;

    v_gone := (
        select format('; %s did, last seen %s ago', w.worker, rota._ago(w.last_seen_at))
        from rota.workers as w
        where job.queue = any(w.queues)
          and (w.job_types is null or job.job_type = any(w.job_types))
        order by w.last_seen_at desc limit 1
    );
    return query select 'no_worker', case
            when v_others is null
                then format('no live worker takes jobs of queue %s%s', job.queue, v_gone)
            else format('no live worker takes jobs of type %s (%s on queue %s take%s others: '
                '%s)%s', job.job_type, cardinality(v_others), job.queue,
                case cardinality(v_others) when 1 then 's' else '' end, rota._list(v_others),
                v_gone)
        end || format('. Start one with a handler for %s and --queue %s', job.job_type,
            job.queue),
        null::text;
end $$;

/* How many are before it, in its lane or among those of its queue that wait for the same limit,
 * and when it will start if such jobs go on ending as those of the last ten minutes did.  Both
 * are counted up to a thousand.  If it *is_free*, nothing else keeps it. */
create or replace function rota._explain_place(job rota.jobs, is_free boolean)
    returns table (reason text, explanation text, remedy text) language plpgsql stable as $$
declare
    c_max constant integer := 1000;
    c_now constant timestamptz := rota.now();
    c_lane constant smallint := coalesce(job.own_lane, job.priority);
    c_limit constant text := substring(job.hold, '^(?:queue|type|key) .*');
    -- A worker may have had it meanwhile, and lost it.
    c_ready_since constant timestamptz := greatest(job.run_at, job.updated_at);
    v_ahead integer; v_ended record; v_full bigint;
begin
    if job.run_at > c_now or job.hold <> coalesce(c_limit, '') then return; end if;
    v_ahead := case when c_limit is not null then rota._held_before(job, c_max) else (
        select count(*)::integer
        from (
            -- The lanes before its own and its own by themselves: a comparison of all three at
            -- once reads its lane to the end.
            (select from rota.jobs as j
            where j.queue = job.queue and j.hold is null
              and j.status in ('queued', 'failed')
              and coalesce(j.own_lane, j.priority) < c_lane and j.run_at <= c_now
            limit c_max)
            union all
            (select from rota.jobs as j
            where j.queue = job.queue and j.hold is null
              and j.status in ('queued', 'failed')
              and coalesce(j.own_lane, j.priority) = c_lane
              and (coalesce(j.own_place, j.run_at), j.id)
                < (coalesce(job.own_place, job.run_at), job.id)
              and j.run_at <= c_now
            limit c_max)
            limit c_max
        ) as a
    ) end;
    select count(*) filter (where c_limit is null or c_limit = any(f.names)) as jobs,
        c_now - min(f.finished_at) as span
    into v_ended
    from (
        select e.finished_at,
            array['queue ' || job.queue, 'type ' || e.job_type, 'key ' || e.limit_key] as names
        from rota._newest_ends(job.queue, c_now - interval '10 minutes', c_max) as e
        where e.is_end order by e.finished_at desc limit c_max
    ) as f;

    -- Null if a worker has a free place, or has not said how many it has.
    select case when bool_and(coalesce(h.jobs >= w.concurrency, false))
            then sum(w.concurrency) end
    into v_full from rota._workers as w
    left join (
        select r.locked_by, count(*) as jobs
        from (
            select j.locked_by from rota.jobs as j
            where j.status = 'running' and j.locked_until is not null
            order by j.locked_until limit 10000
        ) as r
        group by r.locked_by
    ) as h on h.locked_by = w.worker
    where w.is_live and job.queue = any(w.queues)
      and (w.job_types is null or job.job_type = any(w.job_types));

    return query select
        case
            when c_limit is not null then 'behind_in_limit'
            when v_ahead = 0 then 'next'
            else 'behind_in_lane'
        end,
        case
            when c_limit is null and v_ahead = 0
                then 'it is next in its queue: ' || case when job.queue ~ '^forward:[0-9]+$'
                    then 'a forwarder will carry it, or its log says why it does not'
                    else 'a worker with a free place will claim it'
                        || case when v_full > 0
                            then format(', but its workers are full (places: %s)', v_full)
                            when is_free and c_ready_since < c_now - interval '1 minute'
                            -- Such as one whose handlers continue without their jobs.
                            then format(', but none has for %s: if rota top shows one that is '
                                'not busy, its log says why', rota._ago(c_ready_since))
                        else '' end end
            when v_ahead = 0 then format('it is the first in queue %s to wait for limit %s',
                job.queue, c_limit)
            else format('%s before it in queue %s', rota._jobs_words(v_ahead, c_max), job.queue)
                || coalesce(', waiting for limit ' || c_limit, '')
        end || case
            when v_ended.jobs = 0 then case
                -- Unless that is not kept, or is of a stage, whose key is not known.
                when not exists (
                    select from rota.queues as q
                    where q.queue = job.queue and q.keep_finished < interval '10 minutes'
                ) and (c_limit like 'key %' and job.pipeline is not null) is not true
                then format('; no job %s ended in the last ten minutes',
                    case when c_limit is null then 'of queue ' || job.queue
                        else 'under it' end)
                else '' end
            when v_ahead > 0 then format('; %s ended in the last %s: at that rate it starts in '
                'about %s, at %s', v_ended.jobs, rota._span(v_ended.span),
                rota._span(v_ahead * v_ended.span / v_ended.jobs),
                rota._moment(c_now + v_ahead * v_ended.span / v_ended.jobs))
            else ''
        end,
        null::text;
end $$;

/* Who has it, and what can be seen of that worker. */
create or replace function rota._explain_running(job rota.jobs)
    returns table (reason text, explanation text, remedy text) language plpgsql stable as $$
declare
    c_now constant timestamptz := rota.now();
    c_holder constant text := format('%s has had it for %s, in attempt %s of %s',
        job.locked_by, rota._ago(job.started_at), job.attempts, job.max_attempts);
    c_take_back constant text := rota._take_statement(job.id, job.cancel_requested_at,
        job.cancel_reason);
begin
    if job.locked_until < c_now then
        return query
        select 'lease_over', format('%s, but its lease expired %s ago: the next tick takes it '
                'back', c_holder, rota._ago(job.locked_until)),
            'select rota.sweep_stale_leases();';
    elsif exists (
        select from rota._workers as w where w.worker = job.locked_by and not w.is_live
    ) then
        return query
        select 'worker_gone', format('%s, but that worker is no longer connected: without a '
                'sign of life the job is taken back in %s, when its lease expires', c_holder,
                rota._span(rota._elapsed(c_now, job.locked_until))), c_take_back;
    else
        return query select 'overdue', format('%s: %s', c_holder, o.words), c_take_back
        from (select rota._overdue_words(job.overdue_at, job.locked_until) as words) as o
        where o.words is not null
        union all
        select 'hung', h.words, c_take_back
        from (select rota._hung_words(job.queue, job.job_type, job.started_at) as words) as h
        where h.words is not null
        union all
        select 'running', format('%s; its last sign of life was %s ago, its lease '
                'expires in %s%s', c_holder, rota._ago(job.updated_at),
                rota._span(rota._elapsed(c_now, job.locked_until)),
                coalesce('; its time limit expires in ' || case when job.overdue_at >= c_now
                    then rota._span(rota._elapsed(c_now, job.overdue_at)) end, '')
                || coalesce('; it is ' || job.progress_percent::text || ' % done', '')
                || coalesce(': ' || rota._one_line(job.progress_message), '')),
            null::text;
    end if;
    return query
    select 'cancel_requested', format('its worker was asked %s ago to stop%s; the remedy does '
            'not wait for it: it takes the job from the worker, where its handler keeps a '
            'place until it ends or that worker is restarted, and %s',
            rota._ago(job.cancel_requested_at),
            coalesce(', because ' || rota._one_line(job.cancel_reason), ''), case
                when exists (select from rota.reruns as r
                    where r.job_id = job.id and r.seen is null)
                    then 'lets the rerun begin that was asked for since'
                else 'cancels it' end),
        c_take_back
    where job.cancel_requested_at is not null;
end $$;

/* How it ended, and each attempt that failed, the newest first. */
create or replace function rota._explain_ended(ended rota.finished_jobs)
    returns table (reason text, explanation text, remedy text) language plpgsql stable as $$
declare
    c_ago constant text := rota._ago(ended.finished_at) || ' ago';
    -- Because of which it was cancelled, if so.  One that is live again needs no other call.
    c_parent_id constant bigint := (
        select d.parent_id from rota.dependencies as d
        cross join rota._parent_statuses(array[d.parent_id]) as p
        where d.job_id = ended.id
          and d.parent_id = substring(ended.cancel_reason, '^parent ([0-9]{1,18}) ')::bigint
          and ended.cancel_reason = any(rota._parent_reasons(d.parent_id))
          and p.status in ('dead', 'cancelled')
    );
begin
    return query select ended.status, case ended.status
            when 'succeeded' then case
                -- One that went along behind the first of its key had no attempt here.
                when ended.queue ^@ 'forward:' then format(
                    'it arrived in database %s %s, where it is job %s',
                    substr(ended.queue, 9), c_ago, ended.result ->> 'job_id')
                else format('it succeeded %s in attempt %s of %s, after %s, by %s', c_ago,
                    ended.attempts, ended.max_attempts,
                    rota._span(rota._elapsed(ended.started_at, ended.finished_at)),
                    ended.locked_by)
            end
            when 'dead' then format('it is dead: attempt %s of %s, %s, failed with %s%s%s',
                ended.attempts, ended.max_attempts, c_ago,
                rota._error_words(ended.error_type, ended.last_error),
                case when ended.attempts < ended.max_attempts and exists (
                    select from rota._past_rule(ended.error_type, ended.job_type, ended.queue,
                        ended.failed_at) as r
                    where r.is_fatal
                ) then '; a retry rule for that error lets no attempt follow' end,
                '; ' || rota._key_words(ended.id))
            else format('it was cancelled %s%s', c_ago,
                coalesce(', because ' || rota._one_line(ended.cancel_reason),
                    ', without a reason') || coalesce('; ' || rota._key_words(ended.id), ''))
        end,
        case
            -- One whose key is taken stays cancelled when its parent comes back.
            when c_parent_id is not null and rota._key_holder(ended.id) is null
                then rota._retry_statement(c_parent_id, with_dependants => true)
            when ended.status <> 'succeeded' then rota._retry_statement(ended.id)
        end;
    return query
    select 'attempt', format('attempt %s by %s ended %s ago, after %s, with %s', e.attempt,
            e.worker, rota._ago(e.failed_at),
            rota._span(rota._elapsed(e.started_at, e.failed_at)),
            rota._error_words(e.error_type, e.message)),
        null::text
    from rota.job_errors as e where e.job_id = ended.id order by e.lease_token desc limit 50;
end $$;
