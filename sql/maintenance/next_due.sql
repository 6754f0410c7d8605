/*
 * maintenance/next_due.sql -- when a worker that sleeps has to look again.
 *
 * Nobody rings when a time comes: of a retry, of a later run_at, of the next start at a rate.
 * So a worker that sleeps asks for it, and looks again then and not only at the next poll.
 * What has come due since its last look it has to look for at once.  Who is asleep when
 * something new is due before the next poll is rung for it, and asks again.
 *
 * What is in a line counts by its note, or by its rate while it takes turns.  Each queue is
 * asked about by its own workers, so none has to be awake for another.
 */

create or replace function rota.next_due_in(
    queues text[] default '{default}',
    since interval default '0'
)
    returns interval
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
    v_slow_until constant timestamptz := 'epoch'::timestamptz
        + rota._scan_start('next')::bigint * interval '1 microsecond';
    v_since timestamptz;
    v_next timestamptz := v_now + interval '1 minute';
begin
    perform rota._check_names('queues', next_due_in.queues);
    perform rota._check_queues('worker', next_due_in.queues);
    perform rota._check_interval('since', next_due_in.since, '0', '1 hour');
    -- Under a held snapshot a look takes long, and is worth it now and then.
    if v_slow_until > v_now and v_slow_until <= v_next then
        return v_slow_until - v_now;
    end if;

    v_since := v_now - next_due_in.since;
    v_next := least(
        v_next,
        rota._next_check_at(next_due_in.queues, v_since),
        rota._next_start_of(next_due_in.queues, v_since));
    v_next := least(v_next, (
        select min(rota._next_run_at(c.queue, v_since, v_next))
        from unnest(next_due_in.queues[1:100]) as c (queue)
        left join rota.queues as q on q.queue = c.queue
        where q.is_paused is not true
    ));

    if rota.now() - v_now > interval '5 ms' then
        perform rota._keep_scan_start('next', (extract(epoch from
            v_now + least(20 * (rota.now() - v_now), '1 minute')) * 1000000)::bigint::text);
    end if;
    return case when v_next < v_now + interval '1 minute'
        then greatest(v_next - v_now, '0') end;
end;
$$;

comment on function rota.next_due_in(text[], interval) is
    'Return how long it is until something comes due in these queues, a job or the next start '
    'at a rate, and 0 if something has since the caller looked, since ago; null if that is a '
    'minute or more; where a look takes long, when to ask again; raises 22023.';

/* When the time of a job of these queues comes, or of a check that may let one in. */
create or replace function rota._next_check_at(queues text[], since timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
begin
    return least(
        (
            select min(l.run_at)
            from (
                select j.run_at, j.queue
                from rota.jobs as j
                where j.hold = 'time'
                  and j.status in ('queued', 'failed')
                  and j.run_at > _next_check_at.since
                order by j.run_at
                limit 100
            ) as l
            where l.queue = any(_next_check_at.queues)
        ),
        (
            select min(c.due_at)
            from (
                select p.due_at, p.subject
                from rota.pending_checks as p
                where p.kind = 'limit'
                  and p.due_at > '-infinity'
                  and p.due_at > _next_check_at.since
                order by p.due_at
                limit 100
            ) as c
            where exists (
                select
                from rota.jobs as j
                where j.hold = c.subject
                  and j.hold <> 'time'
                  and j.status in ('queued', 'failed')
                  and j.queue = any(_next_check_at.queues)
            )
        )
    );
end;
$$;

/* The next start at a rate of one of these queues. */
create or replace function rota._next_start_of(queues text[], since timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
begin
    return (
        select min(n.start_at)
        from rota.limits as l
        cross join lateral rota._next_start_at(
            l.limit_name, l.max_starts, l.per, l.burst) as n (start_at)
        where l.queue = any(_next_start_of.queues)
          and l.max_starts is not null
          and n.start_at > _next_start_of.since
    );
end;
$$;

/* The first run_at between these times in the common line of a queue. */
create or replace function rota._next_run_at(
    queue text,
    after timestamptz,
    before timestamptz
)
    returns timestamptz
    language plpgsql
    stable
as $$
declare
    v_lane bigint := -32769::bigint;
    v_run_at timestamptz;
    v_first timestamptz;
begin
    for v_step in 1..10 loop
        v_lane := rota._next_lane(array[_next_run_at.queue], v_lane, null);
        exit when v_lane is null;
        select min(j.run_at)
        into v_run_at
        from rota.jobs as j
        where j.queue = _next_run_at.queue
          and j.lane = v_lane
          and j.hold is null
          and j.status in ('queued', 'failed')
          and j.place > _next_run_at.after
          and j.place < _next_run_at.before;
        v_first := least(v_first, v_run_at);
    end loop;
    return v_first;
end;
$$;
