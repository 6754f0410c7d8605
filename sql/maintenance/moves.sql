/*
 * maintenance/moves.sql -- queues that move to another database.
 *
 * Workers no longer claim from a queue that moves, but producers still enqueue to it here, in
 * their own transactions.  A mover (every forwarder is one, but only one at a time moves a
 * queue) runs one transaction after the other, and may be killed in any of them.  In each it
 * calls take_moves() here, receive_moves() there, which commits by itself, and end_moves()
 * here:
 *
 *   1. One makes rows of moved_jobs of rows of jobs, and sends none.
 *   2. The next sends them: there they become rows of jobs, with their id, attempts and lease
 *      token, and with a receipt, so that none comes in twice.  Here moved_jobs keeps where
 *      they are, for late callers.
 *
 * The first is committed before anything is sent, since the statement of a killed mover may
 * still commit there after all was rolled back here (README.md, Decisions).  Each transaction
 * holds the lock of the move, so that no other mover sends what it has no answer for.
 *
 * Order.  The jobs of an ordering key go in order, not before a running one has ended, and one
 * that cannot go keeps those behind it.  Until all are there the other database takes no job
 * with a key of its own for the queue.  Then its sequence is raised above all ids that came,
 * and from then on late ones get new ids there, or an old low id would overtake.
 *
 * A pass looks at all jobs by their ids.  The first begins when all transactions have ended
 * that may have missed that the queue moves (_missing_move()); one that finds no job of the
 * queue at all, running ones included, lets the move settle.  That is committed before the next
 * transaction has it settled there, and is settled here with it.  After that movers carry what
 * comes late.
 */

create or replace function rota.plan_queue_move(queue text, database integer)
    returns table (severity text, finding text, evidence text, remedy text) language plpgsql
    stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
    set jit = off as $$
declare
    c_here constant integer := rota.database_number();
    c_is_under_way constant boolean := exists (
        select from rota.queue_moves as m
        where m.queue = plan_queue_move.queue
          and (m.direction, m.database) = ('out', plan_queue_move.database)
    );
begin
    perform rota._check_name('queue', queue);
    perform rota._check_number('database', database, 0, 1023);
    perform rota._check_queues('operator', array[queue]);
    return query
    -- A move that is under way goes on: what is found now is what some of its jobs wait for.
    -- So the history, and what only keeps it from beginning, is not read again and again.
    select case when c_is_under_way and f.finding not in ('number', 'read_only')
        then 'info' else 'refused' end, f.finding, f.evidence, f.remedy
    from (
        select v.finding, v.evidence, v.remedy
        from (values
            (c_here is null, 'number', 'this database has no number',
                'select rota.set_database_number(N);'),
            (current_setting('transaction_read_only')::boolean, 'read_only',
                'this database takes no writes, as a standby', null),
            (database = c_here, 'number', format('this is database %s', c_here), null),
            (queue ~ '^forward:[0-9]+$', 'carriers',
                'its jobs travel to another database by themselves', null)
        ) as v (is_so, finding, evidence, remedy) where v.is_so
        union all
        select 'move', format('the queue has a move %s database %s, which is %s',
                case m.direction when 'out' then 'to' else 'from' end, m.database, m.state),
            format('select rota.end_queue_move(%L);', m.queue)
        from rota.queue_moves as m
        where m.queue = plan_queue_move.queue
          and (m.direction, m.database) <> ('out', plan_queue_move.database)
        union all
        (select 'dependencies', format('job %s, for which job %s waits', d.parent_id, d.job_id),
            format('select * from rota.explain_job(%s);', d.job_id)
        -- From the jobs of the queue on, which become fewer, and not from all that waits.
        from rota.jobs as q
        cross join lateral (
            select d.parent_id, d.job_id
            from rota.dependencies as d join rota.jobs as j on j.id = d.job_id
            where d.parent_id = q.id
            union all
            select d.parent_id, d.job_id from rota.dependencies as d
            where d.job_id = q.id and c_is_under_way
            limit 1
        ) as d
        where q.queue = plan_queue_move.queue limit 1)
        union all
        -- One that is dead may be retried, and stays here then.
        (select 'dependencies', format('job %s, for which job %s waits', d.parent_id, d.job_id),
            format('select * from rota.explain_job(%s);', d.job_id)
        from rota.dependencies as d
        join rota.jobs as j on j.id = d.job_id
        join rota.finished_jobs as f on f.id = d.parent_id
        where f.queue = plan_queue_move.queue and not c_is_under_way limit 1)
        union all
        (select 'pipelines', format('stage %s of pipeline %s is in it%s', s.stage, s.pipeline,
                case when s.ordinal is null then ', of which runs are under way' end),
            case when s.ordinal is not null
                then format('select rota.drop_pipeline(%L);', s.pipeline) end
        from rota.pipeline_stages as s
        where s.queue = plan_queue_move.queue
          -- The stages of one that was dropped stay, for the runs that there are.
          and (s.ordinal is not null
            or exists (select from rota.jobs as j where j.pipeline = s.pipeline))
        order by s.ordinal limit 1)
        union all
        (select 'pipelines', format('job %s, which is of pipeline %s', j.id, j.pipeline), null
        from rota.jobs as j where j.queue = plan_queue_move.queue and j.pipeline is not null
        limit 1)
        union all
        (select 'schedules', format('schedule %s makes jobs in it', d.name),
            format('select rota.unschedule_job(%L);', d.name)
        from rota.job_definitions as d where d.queue = plan_queue_move.queue limit 1)
        union all
        (select 'schedules', format('job %s, which is of schedule %s', j.id, j.definition), null
        from rota.jobs as j where j.queue = plan_queue_move.queue and j.definition is not null
        limit 1)
        union all
        (select 'ordering_keys', format('ordering key %L, halted by job %s', h.ordering_key,
                h.job_id), format('select rota.retry_job(%s);', h.job_id)
        from rota.halted_keys as h left join rota.finished_jobs as f on f.id = h.job_id
        where f.queue = plan_queue_move.queue and not c_is_under_way or exists (
            select from rota.jobs as j
            where j.ordering_key = h.ordering_key and j.queue = plan_queue_move.queue
              and j.status = 'blocked'
        ) limit 1)
        union all
        (select 'ordering_keys', format('ordering key %L, %s job %s of queue %s',
                k.ordering_key, o.place, o.id, o.queue), null
        from (
            select distinct j.ordering_key from rota.jobs as j
            where j.queue = plan_queue_move.queue and j.ordering_key is not null
              and (j.status = 'blocked' or not c_is_under_way)
        ) as k
        -- By ranges of one key, so that no planner compares all jobs of a key with all.
        cross join lateral (
            (select 'behind' as place, j.id, j.queue from rota.jobs as j
            where j.ordering_key >= k.ordering_key and j.ordering_key <= k.ordering_key
              and j.status <> 'blocked' and j.queue <> plan_queue_move.queue
            order by j.ordering_key, (- j.id) limit 1)
            union all
            (select 'with', j.id, j.queue from rota.jobs as j
            where j.ordering_key >= k.ordering_key and j.ordering_key <= k.ordering_key
              and j.status = 'blocked' and j.queue <> plan_queue_move.queue
              and not c_is_under_way
            order by j.ordering_key, j.id limit 1)
        ) as o limit 1)
        union all
        (select 'idempotency_keys', format('key %L is unique until %s, also after its job',
                k.idempotency_key, k.expires_at), null
        from rota.idempotency_keys as k
        where (k.queue = plan_queue_move.queue or k.queue is null) and k.expires_at > rota.now()
          and not c_is_under_way
        limit 1)
        union all
        (select 'ids', format('job %s was enqueued before this database had its number', j.id),
            'let it end, or enqueue it again'
        from rota.jobs as j
        where j.queue = plan_queue_move.queue and j.id & 1023 <> c_here and not c_is_under_way
          and (
            -- One that came with its queue has kept its id.  With a limit no planner reads all.
            select r.job_id from rota.receipts as r
            where r.source_job_id = j.id and r.move_id > 0 limit 1
          ) is null limit 1)
    ) as f (finding, evidence, remedy);
end $$;

comment on function rota.plan_queue_move is
    'What keeps a queue from moving to the database of that number (refused), or delays a move '
    'in progress (info), as far as this database knows: no row if nothing does; raises 22023, '
    '42501.';

create or replace function rota.queue_move_facts(queue text)
    returns jsonb language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp as $$
declare
    v_job_types text[];
begin
    perform rota._check_name('queue', queue);
    perform rota._check_queues('operator', array[queue]);
    v_job_types := array(
        select distinct j.job_type from rota.jobs as j
        where j.queue = queue_move_facts.queue order by j.job_type
    );
    return jsonb_build_object(
        'version', rota.version(),
        'move_id', (
            select m.move_id from rota.queue_moves as m
            where m.queue = queue_move_facts.queue and m.direction = 'out'
        ),
        'limits', array(
            select distinct l.limit_name
            from (
                select distinct j.job_type, j.limit_key from rota.jobs as j
                where j.queue = queue_move_facts.queue
                union all
                select null, null
            ) as j
            cross join lateral rota._limits_of(j.job_type, j.limit_key, queue_move_facts.queue)
                as l
        ),
        'pauses', array(
            select p.pause_name from rota.pauses as p
            where p.set_by = 'operator' and (p.until is null or p.until > rota.now())
              and (p.queue = queue_move_facts.queue
                or p.queue is null and (p.job_type is null or exists (
                    select from rota.jobs as j
                    where j.queue = queue_move_facts.queue and j.job_type = p.job_type
                )))
            order by p.pause_name
        ),
        'job_types', v_job_types,
        'settings', rota._settings_of(queue, v_job_types));
end $$;

comment on function rota.queue_move_facts is
    'What the target database of a queue move has to know, for receive_plan(); raises 22023, '
    '42501.';

/* What is set for a queue and these types, and does not move with it; null if nothing is. */
create or replace function rota._settings_of(queue text, job_types text[])
    returns jsonb language sql stable as $$
    select nullif(jsonb_strip_nulls(coalesce((
            select to_jsonb(q) - '{queue,created_at,updated_at}'::text[] from rota.queues as q
            where q.queue = _settings_of.queue
        ), '{}') || jsonb_build_object('job_types', (
            select jsonb_agg(to_jsonb(t) - 'updated_at' order by t.job_type)
            from rota.job_types as t where t.job_type = any(_settings_of.job_types)
        ), 'retry_rules', (
            select jsonb_agg(to_jsonb(r) - 'updated_at' order by r.error_type, r.job_type,
                r.queue)
            from rota.retry_rules as r
            where r.queue = _settings_of.queue
              or r.queue = '*' and r.job_type = any(_settings_of.job_types || '*'::text)
        ), 'breakers', (
            select jsonb_agg(to_jsonb(b) - '{queue,tag,updated_at}'::text[]
                order by b.job_type)
            from rota.breakers as b where b.queue = _settings_of.queue
        ))), '{}');
$$;

create or replace function rota.receive_plan(queue text, facts jsonb)
    returns table (severity text, finding text, evidence text, remedy text) language plpgsql
    stable security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_name('queue', queue);
    perform rota._check_queues('operator', array[queue]);
    if facts ->> 'version' is null then
        perform rota._refuse('facts', 'must be what queue_move_facts() returns');
    end if;
    return query select 'refused', 'number', 'the other database has no number',
        'select rota.set_database_number(N);'
    where rota.database_number() is null
    union all
    -- Begun all the same, no job of the queue would run anywhere.
    select 'refused', 'read_only', 'the other database takes no writes, as a standby', null
    where current_setting('transaction_read_only')::boolean
    union all
    select 'refused', 'version', format('rota is %s here, and %s in the other database',
        facts ->> 'version', rota.version()), 'rota install'
    where facts ->> 'version' is distinct from rota.version()
    union all
    select 'refused', 'move', format('the queue has another move %s database %s there, which '
        'is %s', case m.direction when 'out' then 'to' else 'from' end, m.database, m.state),
        format('select rota.end_queue_move(%L);', m.queue)
    from rota.queue_moves as m
    where m.queue = receive_plan.queue
      and m.move_id::text is distinct from facts ->> 'move_id'
    union all
    -- Of a move that is under way jobs are there already, and forwarders carry the others.
    select case when facts ->> 'move_id' is null then 'refused' else 'info' end, 'limits',
        format('limit %s is not set in the other database', l.name),
        'set it there with set_limit(), by its part'
    from (select f #>> '{}' from jsonb_path_query(facts, '$.limits[*]') as f) as l (name)
    -- That of a key may be set by its class.
    cross join lateral rota._bound(l.name) as b
    where num_nonnulls(b.max_running, b.max_starts) = 0
    union all
    -- Once it is under way, who resumes it there wants it to run.
    select 'refused', 'pauses', format('%s is paused by an operator, and would run in the '
        'other database', n.name), 'pause it there too, or resume it here'
    from (select f #>> '{}' from jsonb_path_query(facts, '$.pauses[*]') as f) as n (name)
    where facts ->> 'move_id' is null and not exists (
            select from rota.pauses as p
            where p.pause_name in (n.name, rota._pause_name(receive_plan.queue, null), 'all')
              and p.set_by = 'operator' and (p.until is null or p.until > rota.now())
        )
    union all
    select 'info', 'settings', format('the settings differ: %s here, %s in the other database',
        coalesce(facts ->> 'settings', 'none'), coalesce(s.settings::text, 'none')),
        'set them there with set_queue(), set_type(), set_retry_rule() and set_breaker()'
    from rota._settings_of(receive_plan.queue, array(
        select f #>> '{}' from jsonb_path_query(facts, '$.job_types[*]') as f)) as s (settings)
    where s.settings is distinct from nullif(facts -> 'settings', 'null');
end $$;

comment on function rota.receive_plan is
    'What keeps a queue from moving here (refused), or should be checked before (info); facts '
    'are what queue_move_facts() returned there; raises 22023, 42501.';

create or replace function rota.begin_queue_move(queue text, database integer)
    returns bigint language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_move_id bigint;
begin
    loop
        perform rota._refuse('queue', format('cannot move: %s (%s)', p.evidence, p.finding))
        from rota.plan_queue_move(begin_queue_move.queue, begin_queue_move.database) as p
        where p.severity = 'refused' limit 1;
        v_move_id := (
            select m.move_id from rota.queue_moves as m
            where m.queue = begin_queue_move.queue);
        if v_move_id is not null then return v_move_id; end if;

        v_move_id := (rota._new_ids(1))[1];
        -- This waits for another session that lets the queue move, and then finds its move.
        insert into rota.queue_moves (move_id, queue, direction, database)
        values (v_move_id, begin_queue_move.queue, 'out', begin_queue_move.database)
        on conflict on constraint queue_moves_queue_key do nothing;
        exit when found;
    end loop;
    delete from rota.pauses as p
    where p.pause_name = rota._pause_name(begin_queue_move.queue, null)
      and p.until <= rota.now();
    insert into rota.pauses as p (pause_name, queue, set_by, reason)
    values (rota._pause_name(queue, null), begin_queue_move.queue, 'move',
        format('it moves to database %s', begin_queue_move.database))
    -- An operator's pause stays as it is, also after the move, but does not end by itself.
    on conflict on constraint pauses_pkey do update set until = null;
    -- Else workers here may have again what has arrived there.
    perform rota._write_before_commit();
    perform rota._audit('move_queue', jsonb_build_object('queue', queue), null, null,
        jsonb_build_object('database', database));
    return v_move_id;
end $$;

comment on function rota.begin_queue_move is
    'Let a queue move to the database of that number: workers claim no more of its jobs here, '
    'and movers carry its jobs and new ones; returns the id of the move, also if it is in '
    'progress; raises 22023 with the first finding of plan_queue_move(), 42501.';

create or replace function rota.end_queue_move(queue text)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_move rota.queue_moves;
begin
    perform rota._check_name('queue', queue);
    perform rota._check_queues('operator', array[queue]);
    -- Else it would not see what a mover, for whose lock it waits, has taken out.
    perform rota._check_isolation('end_queue_move');
    -- A mover may be taking out a late job, which would belong to no move afterwards.
    select m.* into v_move from rota.queue_moves as m where m.queue = end_queue_move.queue
    for update;
    if not found then
        raise exception using
            errcode = 'RT004', message = format('queue %s does not move', queue),
            hint = 'rota.queue_moves lists the moves.';
    elsif exists (
            select from rota.moved_jobs as t
            where t.move_id = v_move.move_id and t.new_job_id is null
        )
      or v_move.state = 'settled' and v_move.direction = 'out'
        and exists (select from rota.jobs as j where j.queue = end_queue_move.queue)
      or v_move.state <> 'settled' and (v_move.state <> 'moving' or exists (
            select from rota.moved_jobs as t where t.move_id = v_move.move_id
            union all
            select from rota.receipts as r
            where r.move_id = v_move.move_id and r.move_id > 0
        )) then
        raise exception using errcode = 'RT016',
            message = format('queue %s still moves %s database %s', queue,
                case v_move.direction when 'out' then 'to' else 'from' end, v_move.database),
            detail = v_move.database::text,
            hint = case
                when v_move.direction = 'in' and v_move.state <> 'settled'
                then format('It ends once database %s has settled it.  If that one is lost, or '
                    'was restored and knows of no move, first: select rota.receive_moves(%s, '
                    '%1$s, %3$L, ''[]'', settle_above => 0);', v_move.database, v_move.move_id,
                    v_move.queue)
                else 'It ends when no job of it is left, or before any has left; '
                    'queue_move_status() counts them.'
            end;
    end if;
    delete from rota.queue_moves as m where m.move_id = v_move.move_id;
    if v_move.direction = 'out' then
        delete from rota.pauses as p
        where p.pause_name = rota._pause_name(end_queue_move.queue, null)
          and p.set_by = 'move';
        perform rota._notify_paused(queue);
        -- Of a move that is called off there are jobs without places.
        perform rota._add_checks('queue', array[queue]);
    else
        -- That of the move itself, by which a late call of a mover does not begin it again.
        insert into rota.receipts (move_id, source_job_id, source_created_at, job_id)
        values (-v_move.move_id, 0, v_move.started_at, 0) on conflict do nothing;
    end if;
    perform rota._audit('end_queue_move', jsonb_build_object('queue', queue));
end $$;

comment on function rota.end_queue_move is
    'End the move of a queue, once none of its jobs are left, or before a job has left: jobs '
    'enqueued here then stay here; call it in both databases, first in the one that the queue '
    'leaves; raises RT004 if it does not move, RT009, RT016, 22023.';

create or replace function rota.queue_move_status(queue text)
    returns table (
        move_id bigint, direction text, database integer, state text, waiting bigint,
        running bigint, in_transit bigint, moved bigint, obstacle text, started_at timestamptz
    ) language plpgsql stable security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off as $$
begin
    perform rota._check_name('queue', queue);
    perform rota._check_queues('operator', array[queue]);
    return query select m.move_id, m.direction, m.database, m.state, w.waiting, w.running,
        t.in_transit,
        t.moved + (
            select count(*) from rota.receipts as r
            where r.move_id = m.move_id and r.move_id > 0
        ),
        case
            when m.direction = 'in' then null
            else coalesce((
                select 'transactions that began before it'
                    || coalesce(', the oldest of them that of pid ' || o.pid::text, '')
                from rota._missing_move(m.horizon) as o limit 1
            ), (
                select p.evidence from rota.plan_queue_move(m.queue, m.database) as p
                where p.finding in ('dependencies', 'pipelines', 'schedules', 'ordering_keys')
                limit 1
            ), (
                select format('a mover: no live forwarder knows database %s', m.database)
                where (m.state <> 'settled' or w.waiting + t.in_transit > 0)
                  and not exists (
                      select from rota.workers as f
                      where concat('forward:', m.database) = any(f.queues)
                        and f.last_seen_at > rota.now() - interval '6 minutes'
                  )
                  -- That of the command line reports itself in no table.
                  and not exists (
                      select from pg_stat_activity as a
                      where a.datname = current_database()
                        and a.application_name = 'rota mover'
                  )
            ))
        end, m.started_at
    from rota.queue_moves as m
    cross join lateral (
        select count(*) filter (where j.status <> 'running') as waiting,
            count(*) filter (where j.status = 'running') as running
        from rota.jobs as j where j.queue = m.queue and m.direction = 'out'
    ) as w
    cross join lateral (
        select count(*) filter (where t.new_job_id is null) as in_transit,
            count(t.new_job_id) as moved
        from rota.moved_jobs as t where t.move_id = m.move_id
    ) as t
    where m.queue = queue_move_status.queue;
end $$;

comment on function rota.queue_move_status is
    'How far a queue has moved: jobs that wait and run here, are in transit and have moved, '
    'and what it waits for; no row if it does not move; raises 22023, 42501.';

create or replace function rota.waiting_moves()
    returns table (move_id bigint, queue text, database integer)
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set enable_bitmapscan = off as $$
declare
    v_allowed constant text[] := rota._allowed_queues('worker');
begin
    return query select m.move_id, m.queue, m.database from rota.queue_moves as m
    where m.direction = 'out' and (v_allowed is null or m.queue = any(v_allowed))
      and (m.state <> 'settled'
        or exists (
            select from rota.moved_jobs as t
            where t.move_id = m.move_id and t.new_job_id is null
        )
        or exists (
            select from rota.jobs as j
            where j.queue = m.queue and j.hold is null and j.status in ('queued', 'failed')
        ));
end $$;

comment on function rota.waiting_moves is
    'The moves from here that have something to carry, of the caller''s queues.';

create or replace function rota.take_moves(
    move_id bigint, max_jobs integer default 500, max_bytes integer default 8000000
) returns table (job_ids bigint[], jobs text, settle_above bigint, has_more boolean)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set enable_bitmapscan = off as $$
declare
    v_move rota.queue_moves;
begin
    perform rota._check_number('max_jobs', max_jobs, 1, 1000);
    perform rota._check_number('max_bytes', max_bytes, 1, 2147483647);
    -- Else it would take a queue for empty in which there are jobs with a key.
    perform rota._check_isolation('take_moves');
    v_move := rota._lock_move(move_id);
    if v_move.move_id is null then return; end if;
    select coalesce(array_agg(s.job_id order by s.job_id), '{}'),
        format('[%s]', string_agg(s.job::text, ',' order by s.job_id))
    into job_ids, jobs
    from (
        select t.job_id, t.job || jsonb_build_object('version', rota.version(), 'database',
                v_move.database) as job,
            row_number() over by_id as n, sum(octet_length(t.job::text)) over by_id as bytes
        from rota.moved_jobs as t
        where t.move_id = v_move.move_id and t.new_job_id is null
        window by_id as (order by t.job_id)
        order by t.job_id limit take_moves.max_jobs
    ) as s
    where s.n = 1 or s.bytes <= take_moves.max_bytes;

    has_more := true;
    if job_ids = '{}' and v_move.state = 'settling' then
        update rota.queue_moves as m set state = 'settled' where m.move_id = v_move.move_id
        returning m.* into v_move;
    elsif job_ids = '{}' then
        has_more := rota._look_on(v_move, max_jobs);
        -- Nobody here waits for the other database: what was just taken out is still locked.
        jobs := case when not has_more then '[]' end;
    end if;
    if v_move.state = 'settled' then
        select s.last_value into settle_above from rota.jobs_id_seq as s;
    end if;
    return next;
end $$;

comment on function rota.take_moves is
    'Return jobs of a moving queue that an earlier transaction took out of the live table, or '
    'take some out; call it in the transaction that sends jobs, unless null, and settle_above '
    'to receive_moves() in the other database and calls end_moves(); if has_more, call it '
    'again at once; no row while another mover does this; raises 22023, RT009, 42501.';

create or replace function rota.end_moves(move_id bigint, job_ids bigint[], endings jsonb)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set enable_bitmapscan = off as $$
declare
    v_move rota.queue_moves; v_job record; v_last_id bigint;
begin
    perform rota._check_job_refs(end_moves.job_ids, end_moves.job_ids);
    perform rota._check_endings(end_moves.job_ids, end_moves.endings);
    v_move := rota._lock_move(move_id);
    if v_move.move_id is null then
        perform rota._refuse('move_id', 'is of a move that another mover is at');
    end if;

    update rota.moved_jobs as t
    set new_job_id = (i.ending ->> 'job_id')::bigint, moved_at = rota.now(), job = null
    from rows from (unnest(end_moves.job_ids), jsonb_array_elements(end_moves.endings))
        as i (id, ending)
    where t.job_id = i.id and t.move_id = v_move.move_id and t.new_job_id is null
      and i.ending ->> 'job_id' is not null;

    -- The others come back: what was refused as dead, what is behind it to its line, also if it
    -- was to be sent later.
    for v_job in
        with back as materialized (
            select t.job_id, t.job ->> 'ordering_key' as ordering_key, i.ending
            from rows from (unnest(end_moves.job_ids), jsonb_array_elements(end_moves.endings))
                as i (id, ending)
            join rota.moved_jobs as t on t.job_id = i.id
            where t.move_id = v_move.move_id and t.new_job_id is null
        ), gone as (
            delete from rota.moved_jobs as t
            where exists (select from back)
              and t.move_id = v_move.move_id and t.new_job_id is null
              and (t.job_id in (select b.job_id from back as b)
                or t.job ->> 'ordering_key' in (select b.ordering_key from back as b))
            returning t.job_id, t.job
        )
        select g.job_id, g.job, b.ending from gone as g left join back as b using (job_id)
        order by g.job_id
    loop
        if rota._is_for_later(v_job.ending ->> 'error_code') is not false then
            v_last_id := greatest(v_last_id, v_job.job_id);
        end if;
        perform rota._come_back(v_move, v_job.job, v_job.ending);
    end loop;
    -- The pass goes on behind them, or they would keep others from going.
    update rota.queue_moves as m
    set after_id = greatest(m.after_id, v_last_id), has_found = true
    where m.move_id = v_move.move_id and v_last_id is not null;
end $$;

comment on function rota.end_moves is
    'End jobs of take_moves() by the rows that receive_moves() returned, given as endings: '
    'gone, or dead here with the error of the other database, or back in their lane, until the '
    'next pass, after a code that begins with 55 or XX; raises 22023.';

/* The move, locked until the end of the transaction; null where another mover is at it. */
create or replace function rota._lock_move(move_id bigint)
    returns rota.queue_moves language plpgsql as $$
declare
    v_move rota.queue_moves;
begin
    perform rota._refuse('move_id', 'is not of a queue that moves')
    where not exists (
        select from rota.queue_moves as m
        where m.move_id = _lock_move.move_id and m.direction = 'out'
    );
    select m.* into v_move from rota.queue_moves as m
    where m.move_id = _lock_move.move_id and m.direction = 'out' for update skip locked;
    perform rota._check_queues('worker', array[v_move.queue]) where found;
    return v_move;
end $$;

/* The open transactions from before this one that may have missed that a queue moves, oldest
 * first: those that have written here, and those with an older snapshot that could.  Not those
 * of other databases, and of logins that have no right in this schema. */
create or replace function rota._missing_move(horizon xid8)
    returns table (pid integer) language plpgsql stable as $$
declare
    -- Negative where a dump is from a server that had come further.
    c_age constant bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint
        - horizon::text::bigint;
begin
    -- Mostly all are over, and this costs less than to look at locks.
    if horizon > pg_snapshot_xmin(pg_current_snapshot()) is not true then return; end if;
    return query
    select x.pid from pg_locks as x left join pg_stat_activity as a on a.pid = x.pid
    where x.locktype = 'transactionid' and x.mode = 'ExclusiveLock' and x.granted
      and x.pid is distinct from pg_backend_pid()
      and age(x.transactionid) > c_age
      and (
        x.virtualtransaction = any((select rota._open_writers(array['rota.jobs',
            'rota.dependencies', 'rota.job_definitions',
            'rota.pipeline_stages']::regclass[]))::text[])
        or age(a.backend_xmin) > c_age
          and a.datname = current_database()
          and has_schema_privilege(a.usesysid, 'rota', 'usage')
      )
    order by age(x.transactionid) desc;
end $$;

/* Go on with the pass over all jobs: take some out, or note how far it is.  Return whether to
 * go on at once. */
create or replace function rota._look_on(move rota.queue_moves, max_jobs integer)
    returns boolean language plpgsql as $$
declare
    c_window constant integer := 10000;
    v_window record; v_is_over boolean; v_job_id bigint;
    v_taken integer := 0;
begin
    if move.horizon is null or exists (select from rota._missing_move(move.horizon)) then
        -- One that is restored may be of a server that had come further.
        update rota.queue_moves as m
        set horizon = least(m.horizon, pg_snapshot_xmax(pg_current_snapshot()))
        where m.move_id = move.move_id;
        return false;
    end if;
    select coalesce(array_agg(w.id) filter (where w.queue = move.queue), '{}') as ids,
        case when count(*) = c_window then max(w.id) end as last_id
    into v_window
    from (
        select j.id, j.queue from rota.jobs as j where j.id > move.after_id
        order by j.id limit c_window
    ) as w;
    begin
        v_taken := rota._take_out(move, v_window.ids, max_jobs)::integer;
    exception when others then
        -- Each by itself, and what is before it under its key.
        raise warning 'the move of queue % falls back to one job at a time: %', move.queue,
            sqlerrm;
        foreach v_job_id in array v_window.ids loop
            exit when v_taken >= max_jobs;
            begin
                v_taken := v_taken + rota._take_out(move, array[v_job_id], 1)::integer;
            exception when others then
                raise warning 'job % cannot move: %', v_job_id, sqlerrm;
            end;
        end loop;
    end;
    -- Where some were taken there may be more at the same place: it is looked at again.
    if v_taken > 0 then return true; end if;
    v_is_over := move.state = 'moving' and v_window.last_id is null and v_window.ids = '{}'
        and not move.has_found;
    update rota.queue_moves as m
    set state = case when v_is_over then 'settling' else m.state end,
        after_id = coalesce(v_window.last_id, 0),
        has_found = v_window.last_id is not null and (m.has_found or v_window.ids <> '{}')
    where m.move_id = move.move_id;
    return v_is_over or v_window.last_id is not null;
end $$;

/* Make rows of moved_jobs of those of these jobs that can go; return whether any could. */
create or replace function rota._take_out(
    move rota.queue_moves, job_ids bigint[], max_jobs integer
) returns boolean language plpgsql as $$
declare
    v_ids bigint[]; v_key text; v_gone bigint[]; v_keys text[]; v_types jsonb;
begin
    v_ids := array(
        select j.id from rota.jobs as j
        where j.id = any(_take_out.job_ids) and j.ordering_key is null and rota._may_go(j)
        order by j.id limit _take_out.max_jobs for update skip locked
    );
    for v_key in
        select k.ordering_key
        from (
            select j.ordering_key from rota.jobs as j
            where j.id = any(_take_out.job_ids) and j.ordering_key is not null
            group by j.ordering_key order by min(j.id)
        ) as k
        -- Those that cannot go, of which there may be very many, keep no others.
        where not exists (
                select from rota.halted_keys as h where h.ordering_key = k.ordering_key)
          and not exists (
              select from rota.jobs as r
              where r.ordering_key >= k.ordering_key and r.ordering_key <= k.ordering_key
                and r.status = 'running'
          )
        limit 200
    loop
        exit when cardinality(v_ids) >= max_jobs;
        v_ids := v_ids || rota._line_to_go(v_key, move.queue, max_jobs - cardinality(v_ids));
    end loop;
    if v_ids = '{}' then return false; end if;

    with gone as (
        delete from rota.jobs as j where j.id = any(v_ids)
        returning j.id, j.ordering_key, j.job_type, j.limit_key, to_jsonb(j) - '{own_lane,'
            'own_place,hold,opened_for,held_limits,locked_by,locked_until,overdue_at,'
            'cancel_requested_at,cancel_reason,progress_percent,progress_message}'::text[]
            -- Where it comes in, or back, it is in its line again.
            || case when j.ordering_key is null then '{}' else jsonb_build_object('status',
                'blocked', 'has_failed', j.status = 'failed', 'if_parent_dead',
                coalesce(j.if_parent_dead, 'cancel')) end as job
    ), kept as (
        insert into rota.moved_jobs as t (job_id, move_id, database, moved_at, job)
        select g.id, move.move_id, move.database, null, g.job || jsonb_build_object('effects', (
            select jsonb_agg(to_jsonb(f)) from rota.effects as f where f.job_id = g.id))
        from gone as g
    )
    select array_agg(g.id),
        array_agg(distinct g.ordering_key) filter (where g.ordering_key is not null),
        jsonb_agg(distinct jsonb_build_array(g.job_type, g.limit_key))
    into v_gone, v_keys, v_types from gone as g;
    -- A trigger may keep one here, which those behind it must not leave.
    if cardinality(v_gone) is distinct from cardinality(v_ids) then
        perform rota._raise_swallowed('the delete of a job');
    end if;
    if v_keys is not null then perform rota._add_checks('order', v_keys); end if;
    if exists (select from rota.limits) then
        perform rota._check_held_of(t.item ->> 0, t.item ->> 1)
        from jsonb_array_elements(v_types) as t (item);
    end if;
    perform rota._notify_results(v_gone);
    return true;
end $$;

/* The beginning of a line that can go: up to the first that is held, or of another queue.  One
 * that begins with a blocked job of another queue, as after a retry, waits for its head, which
 * does not run here any more if it is of this queue: then the head goes alone. */
create or replace function rota._line_to_go(ordering_key text, queue text, max_jobs integer)
    returns bigint[] language plpgsql as $$
declare
    v_head bigint[]; v_line bigint[];
begin
    v_head := array(
        select j.id from rota.jobs as j
        where j.ordering_key >= _line_to_go.ordering_key
          and j.ordering_key <= _line_to_go.ordering_key and j.status <> 'blocked'
    );
    v_line := array(
        select l.id
        from (
            select unnest(v_head) as id
            union all
            (select j.id from rota.jobs as j
            where j.ordering_key >= _line_to_go.ordering_key
              and j.ordering_key <= _line_to_go.ordering_key and j.status = 'blocked'
            order by j.ordering_key, j.id limit _line_to_go.max_jobs)
        ) as l
        order by l.id limit _line_to_go.max_jobs
    );
    if exists (
        select from rota.jobs as j
        where j.id = v_line[1] and j.status = 'blocked' and j.queue <> _line_to_go.queue
    ) then
        v_line := v_head;
    end if;
    v_line := rota._lock_beginning(queue, v_line);
    -- The head may run, and be behind a job of a lower id that came late.
    if exists (
        select from rota.jobs as j
        where j.ordering_key >= _line_to_go.ordering_key
          and j.ordering_key <= _line_to_go.ordering_key and j.status = 'running'
    ) or exists (
        select from rota.halted_keys as h where h.ordering_key = _line_to_go.ordering_key
    ) then
        return '{}'::bigint[];
    end if;
    return v_line;
end $$;

/* A job that did not arrive is here again: dead with that error, or where it was.  While it was
 * away its key was free, and another job may have taken it. */
create or replace function rota._come_back(move rota.queue_moves, job jsonb, ending jsonb)
    returns void language plpgsql as $$
declare
    v_job_id constant bigint := (job ->> 'id')::bigint;
    v_is_refused constant boolean := not rota._is_for_later(ending ->> 'error_code');
    v_now constant timestamptz := rota.now();
    v_token constant bigint := (job ->> 'lease_token')::bigint + 1;
    v_found bigint;
begin
    v_found := rota._insert_moved(jsonb_populate_record(null::rota.jobs, job || case
        when v_is_refused then jsonb_build_object('status', 'running', 'attempts',
            (job ->> 'attempts')::integer + 1, 'lease_token', v_token, 'locked_by',
            'rota queue move', 'locked_until', v_now + interval '1 minute', 'started_at', v_now,
            'idempotency_key', null)
        else '{}'
    end));
    if v_found is not null then
        insert into rota.moved_jobs (job_id, move_id, database, new_job_id)
        values (v_job_id, move.move_id, rota.database_number(), v_found);
        return;
    end if;

    if v_is_refused then
        perform rota.fail_job(v_job_id, v_token,
            coalesce(ending ->> 'message', 'the other database did not take it'),
            ending ->> 'error_code', fatal => true);
        update rota.finished_jobs as f
        set idempotency_key = _come_back.job ->> 'idempotency_key'
        where f.id = v_job_id;
    else
        perform rota._enter_moved(array[v_job_id],
            array(select v_job_id where job -> 'has_failed' = 'true'));
    end if;
end $$;
