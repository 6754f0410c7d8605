/*
 * maintenance/tick.sql -- all the maintenance there is, in one call.
 *
 * Any session may call it, as often as it likes: every worker does between polls, pg_cron may,
 * a person may from psql.  Each call does a bounded amount, and nothing but this is needed to
 * recover from anything.  If any part left something to do, has_more is true, and the caller
 * ticks again at once.
 *
 * Two ticks at once skip the rows that the other holds.  But they would look at the same
 * things, so one that finds another running returns at once (README.md, Decisions, A lock that
 * elects no leader).
 *
 * Recovery comes first.  Each part is a subtransaction of its own: what fails in one leaves a
 * warning, and undoes and stops nothing else.  Nor does a part wait long for a table that is
 * locked while others can do without, as one of the history while vacuum full rewrites it.
 */

create or replace function rota.tick()
    returns table (
        jobs_enqueued integer, jobs_swept integer, jobs_expired integer, checks_done integer,
        jobs_deleted integer, keys_deleted integer, effects_deleted integer,
        errors_deleted integer, occurrences_deleted integer, others_deleted integer,
        partitions_created integer, partitions_dropped integer, was_skipped boolean,
        has_more boolean, look_again_in interval
    ) language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off set enable_sort = off as $$
declare
    v_is_alone constant boolean := rota._is_alone();
    v_now constant timestamptz := rota.now();
    v_part text; v_deleted jsonb; v_rows_counted bigint; v_has_uncounted boolean;
begin
    -- Each part would fail by itself, and who ticks here would take that for done.
    if current_setting('transaction_read_only')::boolean then
        raise exception using
            errcode = '25006', message = 'tick() cannot run in a read-only transaction',
            hint = 'On a standby, tick at the primary; else see default_transaction_read_only.';
    end if;
    was_skipped := false;
    if v_is_alone then
        begin
            -- It writes nothing, and only vacuum and changes of the table want the same lock.
            lock table rota.maintenance in share update exclusive mode nowait;
        exception when lock_not_available then
            was_skipped := exists (
                -- In the last ten seconds; where nothing happens none is recorded.
                select from rota.maintenance as u where u.task = 'tick'
                  and u.done_at between rota.now() - interval '10 seconds' and rota.now()
            );
        end;
    end if;
    if was_skipped or not rota._has_maintenance() then
        return query select 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, was_skipped, false,
            null::interval;
        return;
    end if;
    -- What a table of a user refers to must fail here, and not at the commit.
    if v_is_alone then set constraints all immediate; end if;

    -- Statistics before retention, which takes nothing away that is not counted.
    foreach v_part in array '{leases,sweep,expiry,schedules,breakers,retry budgets,'
        'pending checks,statistics,counting jobs,retention}'::text[]
    loop
        begin
            case v_part
                when 'leases' then perform rota._move_leases();
                when 'sweep' then jobs_swept := rota.sweep_stale_leases(1000);
                when 'expiry' then jobs_expired := rota._do_late('expiry', 1000);
                when 'schedules' then jobs_enqueued := case
                    when rota._leaves_to_others() and rota._first_due_schedule()
                      > rota.now() - interval '3 seconds' then 0
                    else rota._enqueue_due_schedules(1000) end;
                when 'breakers' then
                    perform rota._check_breakers()
                    where not rota._leaves_to_others('15 seconds');
                when 'retry budgets' then perform rota._spend_budgets();
                when 'pending checks' then
                    perform rota._check_later(k.limit_name, rota.now() + interval '1 second')
                    from unnest(rota._kept_limits('do')) as k (limit_name);
                    checks_done := rota._do_late('later', 1000) + rota._do_checks(1000);
                when 'statistics' then
                    select c.rows_counted, c.has_more into v_rows_counted, v_has_uncounted
                    from rota._count_ends() as c;
                when 'counting jobs' then perform rota._count_jobs(4000);
                when 'retention' then
                    select r.deleted, r.partitions_created, r.partitions_dropped, r.has_more
                    into v_deleted, partitions_created, partitions_dropped, has_more
                    -- What failed before is null, and it is busy then too.
                    from rota._retain(v_is_alone, (jobs_swept + jobs_expired + jobs_enqueued
                        + checks_done + v_rows_counted = 0) is not true) as r;
            end case;
        exception when others then
            raise warning '% failed and will be tried again: %', v_part, sqlerrm;
        end;
    end loop;

    jobs_deleted := (v_deleted ->> 'jobs')::integer;
    keys_deleted := (v_deleted ->> 'keys')::integer;
    effects_deleted := (v_deleted ->> 'effects')::integer;
    errors_deleted := (v_deleted ->> 'errors')::integer;
    occurrences_deleted := (v_deleted ->> 'occurrences')::integer;
    others_deleted := (
        select sum(d.value::integer)::integer from jsonb_each_text(v_deleted) as d
        where d.key not in ('jobs', 'keys', 'effects', 'errors', 'occurrences')
    );
    -- What a part left because it could not do it is not asked for again at once.
    has_more := coalesce(
        has_more or v_has_uncounted or jobs_swept >= 1000 and rota._has_late('sweep')
        or jobs_expired >= 1000 and rota._has_late('expiry')
        or jobs_enqueued >= 1000 and rota._first_due_schedule() is not null
        or checks_done >= 1000 and rota._has_late('later')
        -- What was done may have led to more, which can be done after the commit.
        or greatest(jobs_swept, jobs_expired, jobs_enqueued, checks_done) > 0
        and rota._due_checks(1, with_own => true) <> '{}',
        false);
    -- To one of those that tick: it has let jobs in, the others look again when they would.
    if greatest(jobs_enqueued, checks_done) > 0 then
        look_again_in := nullif(
            rota._next_let_in_at(null, v_now, v_now + interval '1 minute'),
            v_now + interval '1 minute') - v_now;
    end if;
    return next;
end $$;

comment on function rota.tick is
    'Sweep leases that ended, end jobs that expired, enqueue the jobs of schedules, do pending '
    'checks, create partitions ahead and purge what has expired, a bounded amount per call, '
    'and return what was done and whether there is more; look_again_in is the time until a '
    'tick can make the next job ready, if this one has made any ready; does nothing while '
    'another tick runs; raises 25006.';

/* Whether there is anything to do: most ticks find nothing, and to ask first costs a third of
 * looking at each part.  A *patient* session that found nothing looks for what can wait after
 * five seconds only.  Where a table is locked the parts find out what can be done without. */
create or replace function rota._has_maintenance(patient boolean default false)
    returns boolean language plpgsql stable set lock_timeout = '100ms' as $$
declare
    v_now constant timestamptz := rota.now();
    v_full_scan_at bigint;
begin
    if rota._has_late('sweep') or rota._has_late('expiry')
      or rota._first_due_schedule() is not null
      or rota._due_checks(1, with_own => true, asks => patient) <> '{}'
      or rota._has_late('later') or exists (select from rota.breaker_states)
      or exists (
        select from rota._held_budgets() as b where rota._first_retries(b.queue, 1) <> '{}'
    ) then
        return true;
    end if;
    -- A variable: the planner puts no function in line of which an argument is a call.
    v_full_scan_at := rota._scan_start('patient')::bigint;
    if patient and not rota._is_full_scan_due(v_full_scan_at, v_now, '6 s') then
        return false;
    elsif rota._has_uncounted() or rota._has_count_due() or rota._is_tick_due(true, false)
      or rota._kept_limits('ask') <> '{}'
      or exists (
        select from rota.maintenance as m where m.task = 'retention' and m.has_more
    ) then
        return true;
    elsif patient then
        perform rota._keep_scan_start('patient',
            rota._micros(v_now + interval '5 seconds')::text);
    end if;
    return false;
exception when lock_not_available then
    return true;
end $$;

/* When a tick lets a job of these queues in, or of all for null, between these times. */
create or replace function rota._next_let_in_at(
    queues text[], since timestamptz, until timestamptz
) returns timestamptz language plpgsql stable as $$
begin
    return least(until,
        (select min(l.run_at)
        from (
            select j.run_at, j.queue from rota.jobs as j where j.hold = 'time'
              and j.status in ('queued', 'failed') and j.run_at > _next_let_in_at.since
            order by j.run_at limit 100
        ) as l
        where coalesce(l.queue = any(_next_let_in_at.queues), true)),
        (select min(s.next_run_at)
        from (
            select d.next_run_at, d.queue from rota.job_definitions as d
            where d.next_run_at > _next_let_in_at.since order by d.next_run_at limit 100
        ) as s
        where coalesce(s.queue = any(_next_let_in_at.queues), true)),
        (select min(f.run_at) from rota.retry_budgets as b
        cross join lateral rota._held_lanes('retries ' || b.queue, b.queue) as k
        cross join lateral (
            select j.run_at from rota.jobs as j
            where j.hold = 'retries ' || b.queue and j.hold <> 'time'
              and j.queue = b.queue and j.job_type = k.job_type
              and coalesce(j.own_lane, j.priority) = k.lane
              and j.status in ('queued', 'failed')
              and coalesce(j.own_place, j.run_at) > _next_let_in_at.since
            order by coalesce(j.own_place, j.run_at) limit 1
        ) as f
        where coalesce(b.queue = any(_next_let_in_at.queues), true)),
        (select min(c.due_at)
        from (
            select p.due_at, p.kind, p.subject, p.deferrals from rota.pending_checks as p
            where p.due_at > '-infinity' and p.due_at > _next_let_in_at.since
            order by p.due_at limit 100
        ) as c
        where c.kind = 'limit' and c.deferrals = 0 and exists (
            select from unnest(coalesce(_next_let_in_at.queues, '{null}')) as q (queue)
            cross join lateral (
                -- The first from its queue on: of other queues there may be very many.
                select j.queue from rota.jobs as j
                where j.hold = c.subject and j.hold <> 'time'
                  and j.status in ('queued', 'failed') and j.queue >= coalesce(q.queue, '')
                order by j.hold, j.queue limit 1
            ) as h
            where coalesce(h.queue = q.queue, true)
        )));
end $$;

/* A function or procedure with a setting of its own cannot commit, so this one runs as its
 * caller and on the caller's search_path, which must decide nothing: each transaction begins by
 * setting it.  Each sleeps first and then ticks, so that no lock is held asleep. */
create or replace procedure rota.tick_loop(
    duration interval default '55 seconds', every interval default '1 second'
) language plpgsql as $$
declare
    v_seconds numeric; v_every numeric;
    -- Written out, because the path is set by the first statement only.
    v_began_at pg_catalog.timestamptz;
    v_due numeric := 0.0;
    v_passed numeric := 0.0;
    v_has_more boolean; v_next interval;
begin
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    v_seconds := extract(epoch from tick_loop.duration);
    v_every := extract(epoch from tick_loop.every);
    if v_seconds is null or v_seconds not between 0.001 and 86400 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('duration must be 1 millisecond to 1 day, got %s',
                coalesce(duration::text, 'null'));
    elsif v_every is null or v_every not between 0.001 and 60 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('every must be 1 millisecond to 1 minute, got %s',
                coalesce(every::text, 'null'));
    end if;

    v_began_at := clock_timestamp();
    loop
        commit;
        set transaction isolation level read committed;
        perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
        -- Not longer than that, should the clock step back.
        perform pg_sleep(least(v_due - v_passed, v_every));
        select t.has_more, t.look_again_in into v_has_more, v_next from rota.tick() as t;
        v_passed := extract(epoch from clock_timestamp() - v_began_at);
        if not v_has_more then
            v_next := case when v_next < '100 ms' then '100 ms' else v_next end;
            v_due := least((floor(v_passed / v_every) + 1) * v_every,
                v_passed + extract(epoch from v_next));
        end if;
        exit when greatest(v_due, v_passed) >= v_seconds;
    end loop;
end $$;

comment on procedure rota.tick_loop is
    'Tick, commit and sleep until the next multiple of every, sooner where a job may start, or '
    'not at all while there is more to do, for the duration; raises 22023, 2D000.';
