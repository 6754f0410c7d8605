/*
 * waiting/limits.sql -- how much may run, and who is told when there is room.
 *
 * A running job holds a slot of each limit that it counts for.  A trigger gives the slots back
 * in the transaction in which the job stops running, by whichever way: finish, fail, release,
 * sweep, force.  It leaves a note for the limit, and one for the bucket of each job that begins
 * to wait in one.  So no way out of running, and none into a line, can forget it; plain jobs
 * pay for a look at two columns.
 *
 * A note of a limit wakes as many of its buckets as it has room, in each queue, since nobody
 * may be working on one of them.  A bucket that was woken and cannot start anything for another
 * reason passes the note on.  What was woken in vain is parked again by the claim that sees it.
 *
 * Who is held up by a rate is parked as well, with a note for the time of the next start.  The
 * rate is one time per limit: when the starts so far are paid for, at one start in per /
 * max_starts.  A start is free if that time is less than burst starts ahead.
 *
 * A limit that is set while jobs run does not know of the claims under way.  So it is looked at
 * again for some seconds, until every transaction that was there then has ended.
 */

create or replace function rota.set_limit(
    queue text default null,
    job_type text default null,
    limit_key text default null,
    max_running integer default null,
    max_starts integer default null,
    per interval default null,
    burst integer default null,
    weight integer default null,
    is_reset boolean default false
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_limit_name constant text := coalesce(
        'queue ' || set_limit.queue, 'type ' || set_limit.job_type,
        'key ' || set_limit.limit_key);
    v_limit rota.limits;
begin
    perform rota._check_limit(
        set_limit.queue, set_limit.job_type, set_limit.limit_key, set_limit.max_running,
        set_limit.max_starts, set_limit.per, set_limit.burst, set_limit.weight,
        set_limit.is_reset);

    insert into rota.limits as l (
        limit_name, queue, job_type, limit_key, max_running, max_starts, per, burst, weight
    )
    values (
        v_limit_name, set_limit.queue, set_limit.job_type, set_limit.limit_key,
        set_limit.max_running, set_limit.max_starts, rota._exact(set_limit.per),
        set_limit.burst, set_limit.weight
    )
    on conflict on constraint limits_pkey do update
    set max_running = coalesce(
            excluded.max_running, case when not is_reset then l.max_running end),
        max_starts = coalesce(
            excluded.max_starts, case when not is_reset then l.max_starts end),
        per = coalesce(excluded.per, case when not is_reset then l.per end),
        burst = coalesce(excluded.burst, case when not is_reset then l.burst end),
        weight = coalesce(excluded.weight, case when not is_reset then l.weight end),
        updated_at = rota.now(),
        is_settled = false,
        settled_xid = null
    returning l.*
    into v_limit;
    perform rota._check_burst(v_limit);

    delete from rota.limits as l
    where l.limit_name = v_limit_name
      and num_nonnulls(l.max_running, l.max_starts, l.weight) = 0;
    if found then
        perform rota._unsettle_class(set_limit.limit_key);
    elsif set_limit.job_type is not null then
        perform rota._fill_buckets(set_limit.job_type);
    end if;
    perform rota._note('limit', v_limit_name, rota.now());
    if set_limit.limit_key like '%:*' then
        perform rota._recheck_class(v_limit_name);
    end if;
end;
$$;

comment on function rota.set_limit(
    text, text, text, integer, integer, interval, integer, integer, boolean) is
    'Limit how many jobs of a queue, job_type or limit_key run at once or start in a time: '
    'null leaves a setting as it is, is_reset takes the others away, and the limit with the '
    'last of them; raises 22023.';

create or replace function rota._check_limit(
    queue text,
    job_type text,
    limit_key text,
    max_running integer,
    max_starts integer,
    per interval,
    burst integer,
    weight integer,
    is_reset boolean
)
    returns void
    language plpgsql
as $$
begin
    if num_nonnulls(_check_limit.queue, _check_limit.job_type, _check_limit.limit_key) <> 1 then
        perform rota._refuse('queue', 'or job_type or limit_key must be given, and only one');
    elsif _check_limit.queue is not null then
        perform rota._check_name('queue', _check_limit.queue);
    elsif _check_limit.job_type is not null then
        perform rota._check_name('job_type', _check_limit.job_type);
    else
        perform rota._check_text('limit_key', _check_limit.limit_key, 255);
        if _check_limit.limit_key like '%:%:*' then
            perform rota._refuse('limit_key', format(
                'with :* is a class, all keys with the same text before their first colon, so '
                'it must have no other colon, got %L', left(_check_limit.limit_key, 80)));
        end if;
    end if;
    if _check_limit.max_running not between 0 and 1000000 then
        perform rota._refuse('max_running', format(
            'must be 0 to 1000000, got %s', _check_limit.max_running));
    elsif _check_limit.max_starts not between 1 and 1000000 then
        perform rota._refuse('max_starts', format(
            'must be 1 to 1000000, got %s', _check_limit.max_starts));
    elsif _check_limit.burst not between 1 and 10000 then
        perform rota._refuse('burst', format(
            'must be 1 to 10000, got %s', _check_limit.burst));
    elsif _check_limit.weight not between 1 and 1000 then
        perform rota._refuse('weight', format(
            'must be 1 to 1000, got %s', _check_limit.weight));
    elsif _check_limit.weight is not null and _check_limit.limit_key is null then
        perform rota._refuse('weight', 'goes with limit_key only');
    elsif _check_limit.is_reset is null then
        perform rota._refuse('is_reset', 'must not be null');
    end if;
    if _check_limit.per is not null then
        perform rota._check_interval('per', _check_limit.per, '1 millisecond', '366 days');
    end if;
end;
$$;

/* No time may be out of range.  What was set before counts too, so this looks at the row. */
create or replace function rota._check_burst(bound rota.limits)
    returns void
    language plpgsql
as $$
declare
    c_gap constant interval := rota._gap(bound.max_starts, bound.per);
    c_most constant bigint := 1 + floor(
        extract(epoch from interval '100 years') / extract(epoch from c_gap))::bigint;
begin
    if bound.burst > c_most then
        perform rota._refuse('burst', format(
            'must be 1 to %s at one start in %s, got %s', c_most, c_gap, bound.burst));
    end if;
end;
$$;

/* Put the jobs of a type that is limited now into its buckets; claims see to the rest. */
create or replace function rota._fill_buckets(job_type text)
    returns void
    language plpgsql
as $$
begin
    update rota.jobs as j
    set bucket = rota._bucket(j.job_type, j.limit_key)
    where j.id = any(array(
        select w.id
        from rota.jobs as w
        where w.job_type = _fill_buckets.job_type
          and w.status <> 'running'
          and coalesce(w.bucket, '|') like '|%'
        for update skip locked
    ));
end;
$$;

/* The line that a job stands in; null is the common line. */
create or replace function rota._bucket(job_type text, limit_key text)
    returns text
    language plpgsql
    stable
as $$
declare
    v_type constant text := (
        select l.job_type from rota.limits as l where l.job_type = _bucket.job_type);
begin
    if v_type is not null or _bucket.limit_key is not null then
        return format('%s|%s', v_type, _bucket.limit_key);
    end if;
    return null;
end;
$$;

/* The limits of the jobs of a bucket; that of the key goes first. */
create or replace function rota._limits_of(bucket text)
    returns table (
        limit_name text,
        max_running integer,
        max_starts integer,
        per interval,
        burst integer,
        weight integer
    )
    language plpgsql
    stable
as $$
declare
    c_type constant text := split_part(_limits_of.bucket, '|', 1);
    c_key constant text := substr(_limits_of.bucket, length(c_type) + 2);
begin
    if c_key <> '' then
        return query
        select 'key ' || c_key, l.max_running, l.max_starts, l.per, l.burst, l.weight
        from rota.limits as l
        where l.limit_name = any(rota._key_limits(c_key))
        order by l.limit_key = c_key desc
        limit 1;
    end if;
    if c_type <> '' then
        return query
        select l.limit_name, l.max_running, l.max_starts, l.per, l.burst, l.weight
        from rota.limits as l
        where l.limit_name = 'type ' || c_type;
    end if;
end;
$$;

/* The names of the limits that may be meant for a key: its own and that of its class. */
create or replace function rota._key_limits(limit_key text)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return array[
        'key ' || _key_limits.limit_key,
        'key ' || substring(_key_limits.limit_key, '^[^:]*:') || '*'
    ];
end;
$$;

/* Lock a limit in use; false if somebody else has it. */
create or replace function rota._hold_limit(limit_name text, may_wait boolean)
    returns boolean
    language plpgsql
as $$
begin
    perform
    from rota.limit_states as s
    where s.limit_name = _hold_limit.limit_name
    for update skip locked;
    if found then
        return true;
    elsif not _hold_limit.may_wait and exists (
        select from rota.limit_states as s where s.limit_name = _hold_limit.limit_name
    ) then
        return false;
    end if;
    return rota._wait_for_limit(_hold_limit.limit_name);
end;
$$;

create or replace function rota._wait_for_limit(limit_name text)
    returns boolean
    language plpgsql
    set lock_timeout = '50ms'
as $$
begin
    insert into rota.limit_states (limit_name, used_until)
    values (_wait_for_limit.limit_name, rota.now())
    on conflict do nothing;
    perform
    from rota.limit_states as s
    where s.limit_name = _wait_for_limit.limit_name
    for update;
    return found;
exception
    when lock_not_available then
        return false;
end;
$$;

/*
 * How many may start now under a limit that is held, besides those of ids; with none for its
 * rate, when the next may.
 */
create or replace function rota._room(
    limit_name text,
    max_running integer,
    max_starts integer,
    per interval,
    burst integer,
    ids bigint[]
)
    returns table (room integer, next_start_at timestamptz)
    language plpgsql
    stable
as $$
declare
    v_now constant timestamptz := rota.now();
    v_gap interval;
    v_paid_at timestamptz;
begin
    room := 1000000;
    if _room.max_running is not null then
        room := _room.max_running - rota._count_running(
            _room.limit_name, _room.max_running, _room.ids);
    end if;
    if _room.max_starts is null then
        return next;
        return;
    end if;

    v_gap := rota._gap(_room.max_starts, _room.per);
    v_paid_at := greatest(
        v_now - (coalesce(_room.burst, 1) - 1) * v_gap,
        rota._paid_at(_room.limit_name, v_gap, _room.burst));
    if v_paid_at > v_now then
        room := 0;
        next_start_at := v_paid_at;
    else
        room := least(
            room,
            1 + floor(extract(epoch from v_now - v_paid_at) / extract(epoch from v_gap))
        )::integer;
    end if;
    return next;
end;
$$;

/* The time from one start to the next at this rate, in whole microseconds. */
create or replace function rota._gap(max_starts integer, per interval)
    returns interval
    language plpgsql
    immutable
as $$
begin
    return ceil(extract(epoch from coalesce(_gap.per, '1 second')) * 1000000 / _gap.max_starts)
        ::float8 * interval '1 microsecond';
end;
$$;

/*
 * At this rate no start is paid for later than a burst from now.  A time that is later came of
 * a clock that was set back, or of a slower rate: then one start is free, and more follow at
 * the rate.
 */
create or replace function rota._used_until(
    used_until timestamptz,
    gap interval,
    burst integer
)
    returns timestamptz
    language plpgsql
    stable
as $$
declare
    c_burst constant integer := coalesce(_used_until.burst, 1);
begin
    if _used_until.used_until > rota.now() + c_burst * _used_until.gap then
        return rota.now() + (c_burst - 1) * _used_until.gap;
    end if;
    return _used_until.used_until;
end;
$$;

/* When the next start is free, which may be long ago; null if there was none. */
create or replace function rota._paid_at(limit_name text, gap interval, burst integer)
    returns timestamptz
    language plpgsql
    stable
as $$
begin
    return (
        select rota._used_until(s.used_until, _paid_at.gap, _paid_at.burst)
            - (coalesce(_paid_at.burst, 1) - 1) * _paid_at.gap
        from rota.limit_states as s
        where s.limit_name = _paid_at.limit_name
    );
end;
$$;

create or replace function rota._use_rate(
    limit_name text,
    max_starts integer,
    per interval,
    burst integer,
    starts integer
)
    returns void
    language plpgsql
as $$
declare
    c_gap constant interval := rota._gap(_use_rate.max_starts, _use_rate.per);
begin
    update rota.limit_states as s
    set used_until = greatest(
            rota._used_until(s.used_until, c_gap, _use_rate.burst), rota.now())
        + _use_rate.starts * c_gap
    where s.limit_name = _use_rate.limit_name
      and _use_rate.starts > 0;
end;
$$;

/* What runs under a limit, up to that many, and those of ids that will. */
create or replace function rota._count_running(
    limit_name text,
    max_running integer,
    ids bigint[]
)
    returns integer
    language plpgsql
    stable
as $$
declare
    c_kind constant text := split_part(_count_running.limit_name, ' ', 1);
    c_subject constant text := substr(_count_running.limit_name, length(c_kind) + 2);
    v_running integer;
begin
    -- Each by its id: the planner must not think of reading the jobs in the order of theirs.
    v_running := (
        select count(*)::integer
        from (
            select
            from rota.slots as s
            where s.limit_name = _count_running.limit_name
              and (select j.status from rota.jobs as j where j.id = s.job_id) = 'running'
            limit _count_running.max_running
        ) as r
    );
    -- Asked here, as a call for each key would cost.
    if v_running < _count_running.max_running and exists (
        select
        from rota.limits as l
        where l.limit_name in (
            _count_running.limit_name,
            substring(_count_running.limit_name, '^key [^:]*:') || '*')
          and not l.is_settled
          and (l.settled_xid is null or l.updated_at > rota.now() - interval '10 seconds')
    ) then
        v_running := v_running
            + rota._count_unseen(_count_running.limit_name, c_kind, c_subject);
    end if;
    if cardinality(_count_running.ids) > 0 then
        v_running := v_running + (
            select count(*)::integer
            from rota.jobs as j
            where j.id = any(_count_running.ids)
              and case c_kind
                when 'queue' then j.queue
                when 'type' then j.job_type
                else j.limit_key
              end = c_subject
        );
    end if;
    return v_running;
end;
$$;

/*
 * What runs without a slot that can be seen.  Under a limit that was set a moment ago nobody
 * has looked at it, or who does has not committed.  What a transaction from before claims later
 * than that is counted by the looks that follow.
 */
create or replace function rota._count_unseen(limit_name text, kind text, subject text)
    returns integer
    language plpgsql
    stable
as $$
begin
    return (
        select count(*)::integer
        from rota.jobs as j
        where j.status = 'running'
          and j.locked_until is not null
          and case _count_unseen.kind
            when 'queue' then j.queue
            when 'type' then j.job_type
            else j.limit_key
          end = _count_unseen.subject
          and (
            select s.job_id
            from rota.slots as s
            where s.limit_name = _count_unseen.limit_name
              and s.job_id = j.id
          ) is null
    );
end;
$$;

/*
 * Nothing of this bucket, nor of any other of its type in the queue if it is the type that is
 * limited, can start before there is room.  The note looks at what is so after the parking.
 */
create or replace function rota._park(queue text, bucket text, limit_name text)
    returns void
    language plpgsql
as $$
declare
    c_type constant text := split_part(_park.bucket, '|', 1);
begin
    -- Not "is null": for that the planner may walk the whole line of turns to find a bucket.
    if _park.limit_name = 'type ' || c_type then
        update rota.buckets as b
        set waits_for = _park.limit_name
        where b.queue = _park.queue
          and b.bucket = any(array(
            select w.bucket
            from rota.buckets as w
            where w.queue = _park.queue
              and w.bucket >= c_type || '|'
              and w.bucket < c_type || '}'
              and coalesce(w.waits_for, '') = ''
            limit 1000
            for update skip locked
          ));
    elsif c_type <> '' then
        perform rota._note('limit', 'type ' || c_type, rota.now());
    end if;
    update rota.buckets as b
    set waits_for = _park.limit_name
    where b.queue = _park.queue
      and b.bucket = _park.bucket
      and coalesce(b.waits_for, '') = '';
    perform rota._note('limit', _park.limit_name, rota.now());
end;
$$;

/* Add a note, unless this transaction has just written the same. */
create or replace function rota._note(kind text, subject text, due_at timestamptz)
    returns void
    language plpgsql
as $$
begin
    insert into rota.rechecks (due_at, kind, subject)
    select _note.due_at, _note.kind, _note.subject
    where (
        select r.kind = _note.kind and r.made_by = pg_current_xact_id() and not r.is_seen
          and (r.kind = 'limit' or r.due_at = _note.due_at)
        from rota.rechecks as r
        where r.kind in ('bucket', 'limit')
          and r.subject = _note.subject
          and r.due_at <= _note.due_at
        order by r.due_at desc, r.id desc
        limit 1
    ) is not true;
    if found and _note.due_at <= rota.now() then
        perform rota._notify('');
    end if;
end;
$$;

/* Have a limit or a bucket looked at again at that time at the latest. */
create or replace function rota._note_later(kind text, subject text, due_at timestamptz)
    returns void
    language plpgsql
as $$
begin
    insert into rota.rechecks (due_at, kind, subject)
    select _note_later.due_at, _note_later.kind, _note_later.subject
    where not exists (
        select
        from rota.rechecks as r
        where r.kind in ('bucket', 'limit')
          and r.kind = _note_later.kind
          and r.subject = _note_later.subject
          and not r.is_seen
          and r.due_at > rota.now()
          and r.due_at <= _note_later.due_at
    );
end;
$$;

/*
 * These jobs are going to run, but for strays, which go to the right line.  The others take
 * their slots.
 */
create or replace function rota._apply_limits(ids bigint[])
    returns table (kept_ids bigint[], limited_ids bigint[])
    language plpgsql
as $$
declare
    c_queues constant text[] := array(
        select l.queue from rota.limits as l where l.queue is not null);
    c_strays constant bigint[] := rota._strays(_apply_limits.ids);
    v_is_counted boolean;
begin
    select bool_or(j.bucket is not null or j.queue = any(c_queues))
    into v_is_counted
    from rota.jobs as j
    where j.id = any(_apply_limits.ids);

    kept_ids := _apply_limits.ids;
    limited_ids := '{}';
    if c_strays <> '{}' then
        update rota.jobs as j
        set bucket = rota._bucket(j.job_type, j.limit_key)
        where j.id = any(c_strays);
        kept_ids := array(
            select i.id from unnest(kept_ids) as i (id) where i.id <> all(c_strays));
    end if;
    if v_is_counted then
        limited_ids := rota._take_slots(kept_ids);
    end if;
    return next;
end;
$$;

/* Those that came into a line without the limit of their type; they do not start there. */
create or replace function rota._strays(ids bigint[])
    returns bigint[]
    language plpgsql
    stable
as $$
declare
    c_types constant text[] := array(
        select l.job_type from rota.limits as l where l.job_type is not null);
begin
    if c_types = '{}' then
        return '{}'::bigint[];
    end if;
    return array(
        select j.id
        from rota.jobs as j
        where j.id = any(_strays.ids)
          and j.job_type = any(c_types)
          and coalesce(j.bucket, '|') like '|%'
    );
end;
$$;

/* Take the slots of jobs that are going to run; returns those that count for a limit. */
create or replace function rota._take_slots(ids bigint[])
    returns bigint[]
    language plpgsql
as $$
declare
    v_jobs record;
    v_limited bigint[];
begin
    select array_agg(j.id) as ids, array_agg(j.queue) as queues, array_agg(j.bucket) as buckets
    into v_jobs
    from rota.jobs as j
    where j.id = any(_take_slots.ids);

    with counted as (
        select j.id, b.limit_name
        from (
            select d.bucket, l.limit_name
            from (select distinct u.bucket from unnest(v_jobs.buckets) as u (bucket)) as d
            cross join lateral rota._limits_of(d.bucket) as l
            where l.max_running is not null
        ) as b
        join unnest(v_jobs.ids, v_jobs.buckets) as j (id, bucket) on j.bucket = b.bucket
        union all
        select j.id, l.limit_name
        from unnest(v_jobs.ids, v_jobs.queues) as j (id, queue)
        join rota.limits as l on l.queue = j.queue
        where l.max_running is not null
    ),
    taken as (
        insert into rota.slots (limit_name, job_id)
        select c.limit_name, c.id
        from counted as c
        on conflict do nothing
    )
    select coalesce(array_agg(distinct c.id), '{}')
    into v_limited
    from counted as c;
    return v_limited;
end;
$$;

/*
 * The trigger of changes of jobs: they come into a line, or stop running.  It fires also where
 * session_replication_role is replica.  But rows of logical replication, which are no statement
 * of anybody, come with their notes and slots.
 */
create or replace function rota._on_job_change()
    returns trigger
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('session_replication_role') = 'replica' and current_query() is null then
        return null;
    end if;
    if tg_op <> 'INSERT' and old.is_limited and old.status = 'running'
      and (tg_op = 'DELETE' or new.status <> 'running') then
        perform rota._free_slots(old.id);
    end if;
    if tg_op <> 'DELETE' and new.bucket is not null and new.status in ('queued', 'failed')
      and (tg_op = 'INSERT' or (old.status in ('queued', 'failed'), old.run_at, old.priority,
        old.bucket) is distinct from (true, new.run_at, new.priority, new.bucket)) then
        perform rota._note('bucket', format('%s %s', new.queue, new.bucket), new.run_at);
    end if;
    return null;
end;
$$;

create or replace function rota._free_slots(job_id bigint)
    returns void
    language plpgsql
as $$
declare
    v_limit_name text;
begin
    for v_limit_name in
        delete from rota.slots as s
        where s.job_id = _free_slots.job_id
        returning s.limit_name
    loop
        -- A queue is asked for its room by each claim.
        continue when v_limit_name like 'queue %';
        perform rota._note('limit', v_limit_name, rota.now());
    end loop;
end;
$$;

/*
 * A bucket has a job that is due now: it takes turns from now on.  False if it is locked and
 * its priority has to change.  One that is there may be about to go; but whoever takes it away
 * leaves a note, so it is looked at again.
 */
create or replace function rota._recheck_bucket(subject text)
    returns boolean
    language plpgsql
as $$
declare
    c_queue constant text := split_part(_recheck_bucket.subject, ' ', 1);
    c_bucket constant text := substr(_recheck_bucket.subject, length(c_queue) + 2);
    c_ageing constant interval := (
        select q.ageing from rota.queues as q where q.queue = c_queue);
    v_known integer;
    v_priority integer;
    v_run_at timestamptz;
    v_next_run_at timestamptz;
begin
    select h.priority, h.run_at, h.next_run_at
    into v_priority, v_run_at, v_next_run_at
    from rota._bucket_head(c_queue, c_bucket, rota.now(), '{}') as h;
    if v_priority is null then
        -- Each job left a note for its time, but the clock may have been set back since.
        if v_next_run_at is not null then
            perform rota._note_later('bucket', _recheck_bucket.subject, v_next_run_at);
        end if;
        return true;
    end if;

    select b.priority::integer
    into v_known
    from rota.buckets as b
    where b.queue = c_queue
      and b.bucket = c_bucket;
    if not found then
        insert into rota.buckets (queue, bucket, priority, run_at, turn_at)
        values (c_queue, c_bucket, v_priority, v_run_at, v_run_at)
        on conflict do nothing;
        if not found then
            return false;
        end if;
        perform rota._notify(c_queue);
        return true;
    elsif v_known <= v_priority and c_ageing is null then
        return true;
    end if;

    perform
    from rota.buckets as b
    where b.queue = c_queue
      and b.bucket = c_bucket
    for update skip locked;
    if not found then
        return false;
    end if;
    update rota.buckets as b
    set priority = v_priority,
        run_at = v_run_at
    where b.queue = c_queue
      and b.bucket = c_bucket;
    return true;
end;
$$;

/* A limit may have room: wake the buckets that can use it; false if one of them is locked. */
create or replace function rota._recheck_limit(limit_name text)
    returns boolean
    language plpgsql
as $$
declare
    c_is_type constant boolean := _recheck_limit.limit_name like 'type %';
    v_limit record;
    v_room record;
    v_is_new boolean;
    v_is_done boolean := true;
begin
    v_is_new := not exists (
        select
        from rota.limits as l
        where l.limit_name = _recheck_limit.limit_name
          and l.settled_xid is not null
    );
    perform rota._settle_limit(_recheck_limit.limit_name);
    if _recheck_limit.limit_name like '%:*' and v_is_new then
        -- Until it was committed, others looked at keys of the class under the limit before it.
        perform rota._recheck_class(_recheck_limit.limit_name);
    end if;
    if _recheck_limit.limit_name like 'queue %' or _recheck_limit.limit_name like '%:*' then
        return true;
    end if;

    select l.max_running, l.max_starts, l.per, l.burst
    into v_limit
    from rota._limits_of(case
        when c_is_type then substr(_recheck_limit.limit_name, 6) || '|'
        else '|' || substr(_recheck_limit.limit_name, 5)
    end) as l;
    select r.room, r.next_start_at
    into v_room
    from rota._room(
        _recheck_limit.limit_name, v_limit.max_running, v_limit.max_starts, v_limit.per,
        v_limit.burst, '{}') as r;
    if v_room.room > 0 then
        -- A key has few buckets, one for each queue and limited type, and nobody knows which
        -- of them the workers that are there can serve.
        v_is_done := rota._wake(
            _recheck_limit.limit_name,
            case when c_is_type then least(v_room.room, 1000) else 1000 end);
    end if;
    -- Without a rate those who free a slot leave the next note.
    if v_room.room >= 1000
      or v_limit.max_starts is not null and (
        v_room.room > 0 or v_room.next_start_at is not null
    ) then
        perform rota._note_later(
            'limit',
            _recheck_limit.limit_name,
            coalesce(
                v_room.next_start_at,
                rota.now() + coalesce(
                    rota._gap(v_limit.max_starts, v_limit.per), interval '1 millisecond')))
        where exists (
            select from rota.buckets as b where b.waits_for = _recheck_limit.limit_name);
    end if;
    return v_is_done;
end;
$$;

/*
 * Let up to max_buckets that are parked at a limit take turns again, in each queue; false if
 * there are too few that nobody has locked.
 */
create or replace function rota._wake(limit_name text, max_buckets integer)
    returns boolean
    language plpgsql
as $$
declare
    v_queue text := '';
    v_buckets text[];
    v_is_done boolean := true;
begin
    loop
        v_queue := (
            select b.queue
            from rota.buckets as b
            where b.waits_for = _wake.limit_name
              and b.queue > v_queue
            order by b.queue
            limit 1
        );
        exit when v_queue is null;
        v_buckets := array(
            select b.bucket
            from rota.buckets as b
            where b.waits_for = _wake.limit_name
              and b.queue = v_queue
            order by b.priority, b.turn_at
            limit _wake.max_buckets
            for update skip locked
        );
        update rota.buckets as b
        set waits_for = null
        where b.queue = v_queue
          and b.bucket = any(v_buckets);
        perform rota._notify(v_queue);
        v_is_done := v_is_done and (
            cardinality(v_buckets) = _wake.max_buckets or not exists (
                select
                from rota.buckets as b
                where b.waits_for = _wake.limit_name
                  and b.queue = v_queue
            ));
    end loop;
    return v_is_done;
end;
$$;

/* The limit of a class changed: have every key of it looked at that is parked. */
create or replace function rota._recheck_class(limit_name text)
    returns void
    language plpgsql
as $$
declare
    c_prefix constant text := left(_recheck_class.limit_name, -1);
begin
    perform rota._note('limit', w.waits_for, rota.now())
    from (
        select distinct b.waits_for
        from rota.buckets as b
        where b.waits_for >= c_prefix
          and b.waits_for < left(c_prefix, -1) || ';'
    ) as w;
end;
$$;

/* A key has no limit of its own any more: what runs counts for that of its class. */
create or replace function rota._unsettle_class(limit_key text)
    returns void
    language plpgsql
as $$
declare
    v_class text;
begin
    update rota.limits as l
    set updated_at = rota.now(),
        is_settled = false,
        settled_xid = null
    where l.limit_name = any(rota._key_limits(_unsettle_class.limit_key))
    returning l.limit_name into v_class;
    if found then
        perform rota._note('limit', v_class, rota.now());
    end if;
end;
$$;

/* Let what runs already count for a limit that was set just now, and ask for another look. */
create or replace function rota._settle_limit(limit_name text)
    returns void
    language plpgsql
as $$
declare
    v_limit rota.limits;
    v_age interval;
    v_is_over boolean;
    v_is_settled boolean;
begin
    select l.*
    into v_limit
    from rota.limits as l
    where l.limit_name = _settle_limit.limit_name
      and not l.is_settled
    for update skip locked;
    if not found then
        return;
    end if;

    v_age := rota.now() - v_limit.updated_at;
    -- Asked before the count: one that ends in between is not in it.
    v_is_over := v_age > '5 seconds' and coalesce(
        v_limit.settled_xid <= pg_snapshot_xmin(pg_current_snapshot()), false);
    perform rota._count_started(v_limit);
    if v_is_over and v_limit.job_type is not null then
        -- Those that did not know of the limit have put their jobs into the common line.
        perform rota._fill_buckets(v_limit.job_type);
    end if;
    v_is_settled := v_is_over and cardinality(rota._uncounted(v_limit)) = 0;
    update rota.limits as l
    set settled_xid = coalesce(
            -- A snapshot alone does not know of those that began after the last that ended.
            l.settled_xid,
            -- Until the limit is committed, others go on beginning without it.
            case when not exists (
                select
                from rota.rechecks as r
                where r.kind = 'limit'
                  and r.subject = l.limit_name
                  and r.made_by = pg_current_xact_id()
            ) then greatest(pg_current_xact_id(), pg_snapshot_xmax(pg_current_snapshot())) end),
        is_settled = v_is_settled
    where l.limit_name = v_limit.limit_name;
    if not v_is_settled then
        perform rota._note_later(
            'limit',
            v_limit.limit_name,
            rota.now() + case
                when v_is_over then '1 second'
                else greatest('1 second', v_age / 2)
            end);
    end if;
end;
$$;

create or replace function rota._count_started(bound rota.limits)
    returns void
    language plpgsql
as $$
declare
    v_ids bigint[] := rota._uncounted(bound);
begin
    -- Those that count already are left alone: a lock would hold up their end.
    v_ids := array(
        select j.id
        from rota.jobs as j
        where j.id = any(v_ids)
          and j.status = 'running'
        for update skip locked
    );
    update rota.jobs as j
    set is_limited = true,
        bucket = rota._bucket(j.job_type, j.limit_key)
    where j.id = any(v_ids);
    perform rota._take_slots(v_ids);
end;
$$;

/* What runs without a slot of this limit, though it counts for it. */
create or replace function rota._uncounted(bound rota.limits)
    returns bigint[]
    language plpgsql
    stable
as $$
begin
    return array(
        select j.id
        from rota.jobs as j
        where j.status = 'running'
          and j.locked_until is not null
          and (j.queue = bound.queue or j.job_type = bound.job_type
            or j.limit_key = bound.limit_key
            or bound.limit_key like '%:*'
              and bound.limit_name = any(rota._key_limits(j.limit_key))
              and not exists (
                select from rota.limits as l where l.limit_name = 'key ' || j.limit_key
              ))
          and bound.max_running is not null
          and (
            select s.job_id
            from rota.slots as s
            where s.limit_name = case
                when bound.limit_key is not null then 'key ' || j.limit_key
                else bound.limit_name
              end
              and s.job_id = j.id
          ) is null
    );
end;
$$;

/* Delete what no limit needs any more: states out of use, slots whose job is gone. */
create or replace function rota._purge_limits(max_rows integer)
    returns integer
    language plpgsql
as $$
declare
    v_deleted integer;
begin
    delete from rota.limit_states as s
    where s.limit_name = any(array(
        select u.limit_name
        from rota.limit_states as u
        where u.used_until < rota.now() - interval '1 hour'
        order by u.used_until
        limit _purge_limits.max_rows
        for update skip locked
    ));
    get diagnostics v_deleted = row_count;
    delete from rota.slots as s
    where not exists (select from rota.jobs as j where j.id = s.job_id);
    -- A note that is further ahead than the next start can be: the clock was set back.
    update rota.rechecks as r
    set due_at = rota.now()
    where r.ctid = any(array(
        select f.ctid
        from rota.rechecks as f
        cross join lateral rota._limits_of(case
            when f.subject like 'type %' then substr(f.subject, 6) || '|'
            else '|' || substr(f.subject, 5)
        end) as l
        where f.kind = 'limit'
          and f.due_at > rota.now() + interval '10 seconds'
          and f.due_at > rota.now() + rota._gap(l.max_starts, l.per)
          and l.limit_name = f.subject
        limit _purge_limits.max_rows
        for update of f skip locked
    ));
    return v_deleted;
end;
$$;
