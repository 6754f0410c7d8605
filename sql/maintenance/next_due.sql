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
        + (rota._hint('next'))[1] * interval '1 microsecond';
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
        rota._next_note_at(next_due_in.queues, v_since),
        rota._next_start_at(next_due_in.queues, v_since));
    v_next := least(v_next, (
        select min(rota._next_run_at(c.queue, v_since, v_next))
        from unnest(next_due_in.queues[1:100]) as c (queue)
        left join rota.queues as q on q.queue = c.queue
        where q.is_paused is not true
    ));

    if rota.now() - v_now > interval '5 ms' then
        perform rota._keep_hint('next', array[(extract(epoch from
            v_now + least(20 * (rota.now() - v_now), '1 minute')) * 1000000)::bigint]);
    end if;
    return case when v_next < v_now + interval '1 minute'
        then greatest(v_next - v_now, '0') end;
end;
$$;

comment on function rota.next_due_in(text[], interval) is
    'Return how long it is until something comes due in these queues, a job or the next start '
    'at a rate, and 0 if something has since the caller looked, since ago; null if that is a '
    'minute or more; where a look takes long, when to ask again; raises 22023.';

/* The next look at a line of these queues, because of a later job or of a rate. */
create or replace function rota._next_note_at(queues text[], since timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
begin
    return (
        select min(n.due_at)
        from (
            select r.due_at, r.kind, r.subject
            from rota.rechecks as r
            where r.due_at > _next_note_at.since
            order by r.due_at, r.id
            limit 100
        ) as n
        where n.kind = 'bucket' and split_part(n.subject, ' ', 1) = any(_next_note_at.queues)
           or n.kind = 'limit' and exists (
            select
            from rota.buckets as b
            where b.waits_for = n.subject
              and b.queue = any(_next_note_at.queues)
        )
    );
end;
$$;

/* The next start at a rate of these queues, or of their lines that are not parked. */
create or replace function rota._next_start_at(queues text[], since timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
begin
    return (
        select min(p.paid_at)
        from (
            select l.limit_name, l.max_starts, l.per, l.burst
            from rota.limits as l
            where l.queue = any(_next_start_at.queues)
            union
            select l.limit_name, l.max_starts, l.per, l.burst
            from (
                select b.bucket
                from rota.buckets as b
                where b.queue = any(_next_start_at.queues)
                  and b.waits_for is null
                limit 20
            ) as w
            cross join lateral rota._limits_of(w.bucket) as l
        ) as r
        cross join lateral rota._paid_at(
            r.limit_name, rota._gap(r.max_starts, r.per), r.burst) as p (paid_at)
        where p.paid_at > _next_start_at.since
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
    v_priority bigint := -32769::bigint;
    v_run_at timestamptz;
    v_first timestamptz;
begin
    for v_lane in 1..10 loop
        v_priority := rota._next_lane(array[_next_run_at.queue], v_priority, null);
        exit when v_priority is null;
        select min(j.run_at)
        into v_run_at
        from rota.jobs as j
        where j.queue = _next_run_at.queue
          and j.priority = v_priority
          and j.bucket is null
          and j.status in ('queued', 'failed')
          and j.run_at > _next_run_at.after
          and j.run_at < _next_run_at.before;
        v_first := least(v_first, v_run_at);
    end loop;
    return v_first;
end;
$$;
