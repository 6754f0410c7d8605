/*
 * maintenance/budgets.sql -- let retries begin within the budget of their queue.
 *
 * When a job of a queue with a retry budget has failed, hold is the word retries and the name
 * of the queue (jobs/retries.sql), so no claim finds it.  Each tick lets those whose time has
 * come into their lanes, the oldest first, as long as the budget has tokens: it fills with
 * per_minute and percent of the first attempts that ended in the last minute, and keeps ten
 * seconds' worth.  So while a provider is down, first attempts make retries possible in
 * proportion, and a thousand jobs that come back together do not hammer it.
 *
 * Only ticks write the row of a budget.  A tick that finds it locked goes on without it, and
 * one that may hold it for long leaves budgets, as it leaves limits, for three seconds to ticks
 * that are alone in their transaction.  While no retry is due nothing is counted or written.  A
 * row stays when the budget is taken away: a transaction that has not seen that may still
 * commit jobs that are held.
 */

create or replace function rota._spend_budgets()
    returns void language plpgsql set lock_timeout = '100ms' as $$
declare
    c_leaves constant boolean := rota._leaves_to_others();
    v_budget rota.retry_budgets; v_state record; v_max_jobs integer;
    v_due bigint[]; v_locked bigint[]; v_ids bigint[];
begin
    if current_setting('transaction_isolation') <> 'read committed' then return; end if;
    for v_budget in select b.* from rota._held_budgets() as b order by b.queue loop
        v_due := rota._first_retries(v_budget.queue, 1);
        continue when v_due = '{}'
          or c_leaves and rota.now() - interval '3 seconds' < greatest(v_budget.filled_at,
            (select j.run_at from rota.jobs as j where j.id = any(v_due)));
        begin
            select b.* into v_budget from rota.retry_budgets as b
            where b.queue = v_budget.queue for update skip locked;
            continue when not found;
            v_state := rota._budget_state(v_budget);
            v_max_jobs := least(floor(v_state.tokens), 1000)::integer;
            -- More than may begin: another session may have locked the first ones for long.
            v_due := rota._first_retries(v_budget.queue, v_max_jobs + 1000);
            v_ids := '{}'::bigint[];
            loop
                v_locked := array(
                    select j.id from rota.jobs as j
                    where j.id = any(v_due) and j.hold = 'retries ' || v_budget.queue
                      and j.hold <> 'time' and j.status in ('queued', 'failed')
                    order by array_position(v_due, j.id)
                    limit v_max_jobs - cardinality(v_ids) for update skip locked
                );
                exit when v_locked = '{}';
                -- In place of those that cannot be let in the next ones are.
                v_ids := v_ids || rota._let_in(v_locked, 'retries ' || v_budget.queue);
                v_due := array(
                    select d.id from unnest(v_due) with ordinality as d (id, place)
                    where d.id <> all(v_locked) order by d.place
                );
            end loop;
            update rota.retry_budgets as b
            set tokens = v_state.tokens - cardinality(v_ids), filled_at = rota.now()
            where b.queue = v_budget.queue;
            perform rota._notify_for(v_ids);
        exception when others then
            raise warning 'retries of queue % stay for now: %', v_budget.queue, sqlerrm;
        end;
    end loop;
end $$;

/* The budgets of queues whose retries are held.  There may be very many of others. */
create or replace function rota._held_budgets()
    returns setof rota.retry_budgets language plpgsql stable as $$
declare
    v_hold text := 'retries ';
begin
    while exists (select from rota.retry_budgets) loop
        select j.hold into v_hold from rota.jobs as j
        where j.hold > v_hold and j.hold < 'retries!' and j.hold <> 'time'
        order by j.hold limit 1;
        exit when not found;
        return query select b.* from rota.retry_budgets as b
        where b.queue = substr(v_hold, 9);
    end loop;
end $$;

/* How many retries of a queue may begin in a minute as it is now, and how many at once. */
create or replace function rota._budget_state(
    budget rota.retry_budgets, out per_minute float8, out tokens float8
) language plpgsql stable as $$
declare
    c_set constant jsonb := (
        select q.retry_budget from rota.queues as q where q.queue = budget.queue);
begin
    if c_set is null then
        per_minute := float8 'infinity';
        tokens := 1000::float8;
        return;
    end if;
    per_minute := (c_set ->> 'per_minute')::float8;
    if c_set -> 'percent' > '0' then
        per_minute := per_minute
            + (c_set ->> 'percent')::float8 / 100 * rota._first_attempts(budget.queue);
    end if;
    tokens := least(greatest(1, per_minute / 6), budget.tokens + per_minute / 60
        * greatest(0, extract(epoch from rota.now() - budget.filled_at)));
end $$;

/* How many first attempts of a queue ended in the last minute: of many, by the time that the
 * newest 5000 took.  A first attempt that failed is among the failures, whatever came later. */
create or replace function rota._first_attempts(queue text)
    returns float8 language plpgsql stable as $$
declare
    c_max constant integer := 5000;
    c_now constant timestamptz := rota.now();
    c_kept_since constant timestamptz := greatest(c_now - interval '1 minute',
        rota._kept_since(_first_attempts.queue));
begin
    return (
        select sum(a.attempts * 60 / greatest(1, extract(epoch from c_now - case
            when a.rows < c_max then a.begin else a.since end))::float8)
        from (
            select count(*) filter (where n.is_end and n.attempts = 1
                    and n.status = 'succeeded') as attempts, count(*) as rows,
                min(n.finished_at) as since, c_kept_since as begin
            from rota._newest_ends(_first_attempts.queue, c_kept_since, c_max) as n
            group by n.pipeline
            union all
            select count(*) filter (where e.attempt = 1 and e.queue = _first_attempts.queue),
                count(*), min(e.failed_at), c_now - interval '1 minute'
            from (
                select i.attempt, i.queue, i.failed_at from rota.job_errors as i
                where i.failed_at > c_now - interval '1 minute' and i.failed_at <= c_now
                order by i.failed_at desc limit c_max
            ) as e
        ) as a
    );
end $$;

/* The job types and lanes of the jobs of a queue that are held for this, up to 1000 of these,
 * and the first place in each. */
create or replace function rota._held_lanes(hold text, queue text)
    returns table (job_type text, lane smallint, first_place timestamptz)
    language plpgsql stable as $$
begin
    job_type := '';
    lane := 0;
    for v_kind in 1..1000 loop
        select j.job_type, coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at)
        into job_type, lane, first_place from rota.jobs as j
        where j.hold = _held_lanes.hold and j.hold <> 'time'
          and j.queue = _held_lanes.queue and j.status in ('queued', 'failed')
          and (j.job_type, coalesce(j.own_lane, j.priority))
            > (_held_lanes.job_type, _held_lanes.lane)
        order by j.job_type, coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at)
        limit 1;
        exit when not found;
        return next;
    end loop;
end $$;

/* The first retries of a queue that are held and due, the oldest first.  Those of a queue
 * or type that is paused could not begin: let in, they would wait for the end of the pause, and
 * then all begin at once.  What a breaker lets through to try is taken from them, too. */
create or replace function rota._first_retries(queue text, max_jobs integer)
    returns bigint[] language plpgsql stable as $$
begin
    return array(
        select d.id
        from (
            select h.job_type, h.lane
            from rota._held_lanes('retries ' || _first_retries.queue, _first_retries.queue) as h
            where not rota._is_paused(_first_retries.queue, rota.now(), h.job_type)
            -- More of them would only be more to sort.
            order by h.first_place limit 100
        ) as k
        cross join lateral (
            select j.id, j.run_at from rota.jobs as j
            where j.hold = 'retries ' || _first_retries.queue and j.hold <> 'time'
              and j.queue = _first_retries.queue and j.job_type = k.job_type
              and coalesce(j.own_lane, j.priority) = k.lane
              and j.status in ('queued', 'failed')
              and coalesce(j.own_place, j.run_at) <= rota.now()
            order by coalesce(j.own_place, j.run_at), j.id limit _first_retries.max_jobs
        ) as d
        order by d.run_at, d.id limit _first_retries.max_jobs
    );
end $$;
