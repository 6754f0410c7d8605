/*
 * jobs/forward.sql -- jobs that travel to another database.
 *
 * enqueue_to() makes a job here, in the caller's transaction, whose payload is the job to be
 * enqueued there.  A forwarder carries it, in one transaction of this database: it takes jobs
 * by take_forwards(), calls receive_jobs() there, which commits by itself, tells end_forwards()
 * what became of them, and commits.  Killed anywhere it leaves nothing behind: here all is as
 * before, and what had arrived there has a receipt (jobs/receive.sql).
 *
 * A batch is bounded by its bytes too.  Each forwarder reports itself as a worker with the
 * databases that it knows, so rota.workers shows whether a database has one.
 *
 * A job that the other database refuses is dead here.  One with a key whose queue is still on
 * its way there, or from there, waits here and is sent later; so does one whose key a
 * transaction there has just taken, since all that is carried would wait for that with it.
 *
 * Jobs of one ordering key go in the order of their ids: they wait here behind each other, and
 * the first is carried together with those next behind it.  These stay blocked, and are locked
 * while they travel; so any other session that would end them waits, and finds them gone.
 */

create or replace function rota.enqueue_to(
    database integer, job_type text, payload jsonb default '{}', queue text default 'default',
    run_at timestamptz default null, delay interval default null, priority integer default 0,
    max_attempts integer default null, lease interval default null, backoff jsonb default null,
    idempotency_key text default null, unique_for interval default null,
    on_conflict text default 'keep', updated_at timestamptz default null,
    max_wait interval default null, ordering_key text default null,
    skip_dead boolean default false, limit_key text default null,
    time_limit interval default null, expires_at timestamptz default null,
    headers jsonb default null, expires_after interval default null
) returns bigint language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_payload jsonb; v_line text; v_ids bigint[];
begin
    perform rota._check_number('database', database, 0, 1023);
    if rota.database_number() is null then
        raise exception using errcode = 'RT015', message = 'this database has no number',
            hint = 'Its owner gives it one with set_database_number().';
    elsif database = rota.database_number() then
        return rota.enqueue(job_type, payload, queue, run_at, delay, priority, max_attempts,
            lease, backoff, idempotency_key, unique_for, on_conflict, updated_at, max_wait,
            ordering_key, skip_dead, limit_key => limit_key, time_limit => time_limit,
            expires_at => expires_at, headers => headers, expires_after => expires_after);
    end if;
    -- What the other database would refuse is refused here, as far as it can be known.
    perform rota._check_new_job('', job_type, payload, queue, run_at, delay, priority,
        max_attempts, lease, backoff, idempotency_key, time_limit, expires_at, headers,
        expires_after);
    expires_at := coalesce(expires_at, coalesce(run_at,
        rota.now() + coalesce(rota._exact(delay), '0')) + rota._exact(expires_after));
    perform rota._check_key_rule('', idempotency_key, unique_for, on_conflict, updated_at,
        max_wait, expires_at);
    perform rota._check_waits('', ordering_key, skip_dead, null, null, 'cancel', limit_key);
    v_payload := jsonb_strip_nulls(jsonb_build_object('job_type', job_type, 'queue',
            queue, 'run_at', coalesce(run_at, rota.now() + rota._exact(delay)), 'priority',
            priority, 'max_attempts', max_attempts, 'lease', lease, 'backoff', backoff,
            'idempotency_key', idempotency_key, 'unique_for', unique_for, 'on_conflict',
            nullif(on_conflict, 'keep'), 'updated_at', updated_at, 'max_wait', max_wait,
            'ordering_key', ordering_key, 'skip_dead', nullif(skip_dead, false), 'limit_key',
            limit_key, 'time_limit', time_limit, 'expires_at', expires_at, 'headers', headers,
            -- The forwarder may enqueue to more queues there.
            'only_queues', case when on_conflict <> 'keep' then
                rota._allowed_queues('producer') end))
        || jsonb_build_object('payload', payload);
    -- A line of its own for each database; null without a key.
    v_line := 'forward:' || database::text || ':' || case
        when char_length(ordering_key) > 200 then md5(ordering_key) else ordering_key end;
    -- A confined caller has a right to the queue there, and to none of those that carry.
    perform rota._check_queues('producer', array[queue]);
    v_ids := rota._insert_jobs(
        array[jsonb_populate_record(null::rota.jobs, jsonb_build_object('job_type',
            'rota.forward', 'queue', 'forward:' || database::text, 'payload', v_payload,
            'priority', priority, 'ordering_key', v_line, 'skip_dead', skip_dead))],
        rota._new_ids(1));
    if v_line is not null then perform rota._jobs_came_in(v_ids); end if;
    perform rota._notify_for(v_ids);
    return v_ids[1];
end $$;

comment on function rota.enqueue_to is
    'Add a job to the database of that number, once the caller''s transaction has committed, '
    'and return the id of the job here that carries it; for its own number it is enqueue(); '
    'raises 22023, RT015 if this database has no number.';

create or replace function rota.waiting_forwards()
    returns setof integer language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
    set enable_bitmapscan = off as $$
begin
    return query select substr(q.queue, 9)::integer
    -- No number is above it; others may be from before enqueue() refused them.
    from unnest(rota._ready_queues('forward:', 'forward:9999')) as q (queue)
    where q.queue ~ '^forward:[0-9]{1,4}$' and not rota._is_paused(q.queue, rota.now())
      -- With exists() a plan made on an empty table would begin with all jobs.
      and (
        select true from rota.jobs as j
        where j.queue = q.queue and j.hold is null and j.status in ('queued', 'failed')
          and j.run_at <= rota.now() limit 1
    );
end $$;

comment on function rota.waiting_forwards is
    'The numbers of the databases for which jobs wait here to be carried, and are not paused.';

create or replace function rota.take_forwards(
    worker text, database integer, max_jobs integer default 100,
    max_bytes integer default 8000000
) returns table (job_id bigint, lease_token bigint, created_at timestamptz, job text)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off set enable_sort = off as $$
declare
    c_now constant timestamptz := rota.now();
    c_queue constant text := 'forward:' || database::text;
    c_call constant text := format('claim carriers %L', c_queue);
    v_due record; v_ids bigint[]; v_head record; v_room integer; v_taken integer;
begin
    perform rota._check_number('database', database, 0, 1023);
    perform rota._check_number('max_bytes', max_bytes, 1, 2147483647);
    perform rota._check_claim(worker, array[c_queue], max_jobs, null, null);
    -- claim_jobs() refuses their queues, since a worker that had a handler for them would end
    -- them without the others being anywhere.
    select d.locked_rows, d.held_limits into v_due
    from rota._lock_due(c_call, string_to_array(rota._scan_start(c_call), ' ')::bigint[],
        array[c_queue], take_forwards.max_jobs, '{rota.forward}', c_now) as d;
    with claimed as (
        update rota.jobs as j
        set status = 'running', attempts = least(j.attempts, 2147483646) + 1,
            lease_token = greatest(least(j.lease_token, 9223372036854775806) + 1,
                rota._micros(c_now)),
            locked_by = take_forwards.worker, locked_until = c_now + interval '1 minute',
            held_limits = (v_due.held_limits ->> j.id::text)::text[], opened_for = null,
            started_at = c_now, updated_at = c_now
        where j.ctid = any(v_due.locked_rows) returning j.id
    )
    select coalesce(array_agg(c.id), '{}') into v_ids from claimed as c;
    v_room := max_jobs - cardinality(v_ids);
    for v_head in
        select j.id, j.ordering_key, count(*) over () as heads from rota.jobs as j
        where j.id = any(v_ids) and j.ordering_key is not null
    loop
        v_ids := v_ids || rota._lock_beginning(c_queue, array(
            -- By a range of one key, so that no planner walks the primary key.
            select j.id from rota.jobs as j
            where (j.ordering_key, j.id) > (v_head.ordering_key, v_head.id)
              and j.ordering_key <= v_head.ordering_key and j.status = 'blocked'
            order by j.ordering_key, j.id limit (v_room / v_head.heads)::integer
        ));
    end loop;
    v_ids := rota._leave_for_move(v_ids, database);
    return query
    -- As text: no client has to read it, and none can change a number in it.
    with taken as materialized (
        select j.id, j.lease_token, j.created_at, j.payload::text as job from rota.jobs as j
        where j.id = any(v_ids)
    )
    select s.id, s.lease_token, s.created_at, s.job
    from (
        select t.id, t.lease_token, t.created_at, t.job, row_number() over by_id as n,
            sum(octet_length(t.job)) over by_id as bytes
        from taken as t window by_id as (order by t.id)
    ) as s
    where s.n = 1 or s.bytes <= take_forwards.max_bytes order by s.id;
    get diagnostics v_taken = row_count;
    if v_taken < cardinality(v_ids) then
        perform rota._give_back(array_agg(l.id), array_agg(l.lease_token))
        from (
            select j.id, j.lease_token, j.status from rota.jobs as j
            where j.id = any(v_ids) order by j.id offset v_taken
        ) as l
        where l.status = 'running';
    end if;
end $$;

comment on function rota.take_forwards is
    'Claim jobs for the database of that number, with those behind them, in the order in which '
    'to send them, and at most max_bytes unless one job is larger; call it in the transaction '
    'that ends them with end_forwards(); raises 22023, RT009.';

create or replace function rota.end_forwards(
    job_ids bigint[], lease_tokens bigint[], endings jsonb
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off as $$
declare
    v_told record; v_ended bigint[];
begin
    perform rota._check_job_refs(job_ids, lease_tokens);
    perform rota._check_endings(job_ids, endings);
    perform rota._raise_not_found(min(o.id))
    from unnest(rota._jobs_outside_grants(job_ids)) as o (id) having min(o.id) is not null;

    -- A list that holds null for the jobs that end otherwise keeps its places.
    select array_agg(i.lease_token) as tokens,
        array_agg(case f.fate when 'arrived' then j.id end) as arrived,
        jsonb_agg(jsonb_build_object('job_id', (i.ending ->> 'job_id')::bigint)) as results,
        array_agg(case f.fate when 'later' then j.id end) as later,
        -- Ever more seldom.
        array_agg(rota.now() + least('30 seconds', greatest('1 second',
            (rota.now() - j.created_at) / 4))) as run_ats,
        array_agg(case f.fate when 'refused' then j.id end) as refused,
        array_agg(coalesce(i.ending ->> 'message', 'the other database did not take it'))
            as errors,
        array_agg(i.ending ->> 'error_code') as error_types, array_agg(true) as fatals
    into v_told
    from rows from (unnest(end_forwards.job_ids, end_forwards.lease_tokens),
        jsonb_array_elements(end_forwards.endings)) as i (id, lease_token, ending)
    cross join lateral (
        select case when i.ending ->> 'job_id' is not null then 'arrived'
            when rota._is_for_later(i.ending ->> 'error_code') then 'later'
            else 'refused' end as fate
    ) as f
    left join lateral (
        select w.* from rota.jobs as w where w.id = i.id and w.job_type = 'rota.forward' limit 1
    ) as j on true;
    -- Those behind first: the end of a head opens the next that is still there.
    v_ended := rota._archive_jobs(v_told.arrived, v_told.tokens, 'blocked', 'succeeded',
        v_told.results);
    v_ended := v_ended || rota._archive_jobs(v_told.arrived, v_told.tokens, 'running',
        'succeeded', v_told.results);
    perform rota._raise_lost(i.id, i.lease_token)
    from rows from (unnest(end_forwards.job_ids, end_forwards.lease_tokens),
        jsonb_array_elements(end_forwards.endings)) as i (id, lease_token, ending)
    where i.ending ->> 'job_id' is not null and i.id <> all(v_ended) limit 1;
    perform from rota._give_back(v_told.later, v_told.tokens, v_told.run_ats);
    perform from rota._fail_running(v_told.refused, v_told.tokens, v_told.errors,
        v_told.error_types, null, null, v_told.fatals);
end $$;

comment on function rota.end_forwards is
    'End jobs of take_forwards() by the rows that receive_jobs() returned, given as endings: '
    'as succeeded or dead, or to be sent again later after RT016, 42501 or a code that begins '
    'with 55 or XX; those behind one that did not arrive stay; raises RT002 if one is lost, '
    'RT003, RT001, 22023.';

/* Refuse what is not one row of receive_jobs() or receive_moves(), or {}, for each job. */
create or replace function rota._check_endings(job_ids bigint[], endings jsonb)
    returns void language plpgsql as $$
begin
    if jsonb_typeof(endings) is distinct from 'array'
      or jsonb_array_length(endings) <> cardinality(job_ids) then
        perform rota._refuse('endings', 'must be an array as long as job_ids');
    end if;
    perform rota._refuse('endings', 'must be rows of receive_jobs(), whose job_id is an id')
    from jsonb_array_elements(_check_endings.endings) as e (ending)
    where e.ending ->> 'job_id' !~ '^[0-9]{1,18}$' limit 1;
end $$;

/* Lock those jobs of a line that can leave this queue, up to the first that cannot. */
create or replace function rota._lock_beginning(queue text, line bigint[])
    returns bigint[] language plpgsql as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_locked constant bigint[] := array(
        select j.id from rota.jobs as j
        where j.id = any(_lock_beginning.line) and j.queue = _lock_beginning.queue
          and case
            when j.queue ^@ 'forward:' then j.job_type = 'rota.forward'
              and j.run_at <= rota.now()
              and not exists (select from rota.dependencies as d where d.job_id = j.id)
            else rota._may_go(j)
          end
        order by j.id for update skip locked
    );
begin
    return array(
        select l.id from unnest(v_locked) as l (id)
        -- It is looked for once: for each of a thousand it would take a second.
        where l.id < all(array(
            select b.id from unnest(_lock_beginning.line) as b (id)
            except select o.id from unnest(v_locked) as o (id)
        ))
        order by l.id
    );
end $$;

/* Leave here what has a key and is for a queue that moves to the same database: those of its
 * key that move are before it, also where that database has not heard of the move. */
create or replace function rota._leave_for_move(job_ids bigint[], database integer)
    returns bigint[] language plpgsql as $$
declare
    v_queues constant text[] := array(
        select m.queue from rota.queue_moves as m
        where m.direction = 'out' and m.state <> 'settled'
          and m.database = _leave_for_move.database
    );
    v_left bigint[];
begin
    if v_queues = '{}' then return job_ids; end if;
    v_left := array(
        select j.id from rota.jobs as j
        where j.id = any(_leave_for_move.job_ids) and j.payload ->> 'queue' = any(v_queues)
          and coalesce(j.payload ->> 'ordering_key', j.payload ->> 'idempotency_key')
            is not null
    );
    perform rota._give_back(array_agg(j.id), array_agg(j.lease_token),
        array_agg(rota.now() + interval '1 second'))
    from rota.jobs as j where j.id = any(v_left) and j.status = 'running';
    return array(
        select j.id from rota.jobs as j
        where j.id = any(_leave_for_move.job_ids) and not exists (
            select from rota.jobs as b
            where b.id = any(v_left) and b.id <= j.id
              and (b.id = j.id or b.ordering_key = j.ordering_key)
        )
    );
end $$;
