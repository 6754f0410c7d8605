/*
 * jobs/receive.sql -- jobs that come from another database.
 *
 * receive_jobs() enqueues what was sent here by enqueue_to(), receive_moves() takes the jobs
 * of a queue that moves here as they were (maintenance/moves.sql).  Each comes in together
 * with a receipt, by one transaction, which commits by itself.  So a forwarder or mover may be
 * killed at any moment: it sends again what it has no answer for, and nothing is taken twice.
 *
 * They come in all together or, if one of them cannot be taken, each by itself.
 */

create or replace function rota.receive_jobs(
    database integer, job_ids bigint[], enqueue_times timestamptz[], jobs jsonb
) returns table (ordinal integer, job_id bigint, error_code text, message text) language plpgsql
    security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
    set jit = off set plan_cache_mode = force_generic_plan set enable_bitmapscan = off
    set lock_timeout = '100ms' as $$
begin
    if receive_jobs.database is distinct from rota.database_number() then
        perform rota._refuse('database', format('must be %s, as here, got %s',
            coalesce(rota.database_number()::text, 'null'),
            coalesce(receive_jobs.database::text, 'null')));
    end if;
    perform rota._check_job_refs(receive_jobs.job_ids, receive_jobs.job_ids);
    if cardinality(receive_jobs.enqueue_times)
      is distinct from cardinality(receive_jobs.job_ids)
      or array_ndims(receive_jobs.enqueue_times) > 1
      or array_position(receive_jobs.enqueue_times, null) is not null then
        perform rota._refuse('enqueue_times', 'must be a plain list as long as job_ids');
    end if;
    if jsonb_typeof(receive_jobs.jobs) is distinct from 'array'
      or jsonb_array_length(receive_jobs.jobs) <> cardinality(receive_jobs.job_ids) then
        perform rota._refuse('jobs', 'must be an array as long as job_ids');
    end if;
    perform rota._refuse('job_ids', 'must not hold one twice')
    from unnest(receive_jobs.job_ids) as i (id) having count(distinct i.id) < count(*);
    perform rota._check_isolation('receive_jobs');
    perform rota._write_before_commit();

    return query select r.ordinal, r.job_id, r.error_code, r.message
    from rota._receive_each(null, receive_jobs.job_ids, receive_jobs.enqueue_times,
        receive_jobs.jobs) as r;
end $$;

comment on function rota.receive_jobs is
    'Enqueue jobs that were enqueued for this database in another, each once however often it '
    'is sent, and return by ordinal the job here or why it was refused, RT016 if it has a key '
    'and its queue is still coming here, 42501 if a right to its queue is missing, 55P03 if '
    'another transaction has its key; one behind a refused one of its ordering key has no row; '
    'raises 22023 if database is not the number of this one, RT009.';

create or replace function rota.receive_moves(
    move_id bigint, from_database integer, queue text, jobs jsonb,
    settle_above bigint default null
) returns table (ordinal integer, job_id bigint, error_code text, message text) language plpgsql
    security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
    set jit = off set enable_bitmapscan = off set lock_timeout = '100ms' as $$
declare
    v_move rota.queue_moves; v_jobs record;
begin
    perform rota._check_given('move_id', move_id is not null);
    -- The negative number is that of its end.
    perform rota._refuse('move_id', format('must be that of a move, got %s', move_id))
    where move_id < 1;
    perform rota._check_number('from_database', from_database, 0, 1023);
    perform rota._check_name('queue', queue);
    -- It says what becomes of ids and effects, which are those of all queues.
    perform rota._check_queues('worker', '{*}');
    if from_database is not distinct
      from coalesce(rota.database_number(), from_database) then
        perform rota._refuse('from_database',
            'must be another database, and this one have a number');
    end if;
    if jsonb_typeof(jobs) is distinct from 'array' or jsonb_array_length(jobs) > 1000 then
        perform rota._refuse('jobs', 'must be an array of up to 1000 jobs of take_moves()');
    elsif settle_above not between 0 and 9007199254740991 then
        -- The ids go on from there, and must not come near their end.
        perform rota._refuse('settle_above',
            format('must be 0 to 9007199254740991, got %s', settle_above));
    end if;
    if jsonb_path_exists(jobs, '$[*].version ? (@ != $v)',
        jsonb_build_object('v', rota.version())) then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('rota is %s in the other database, and %s here',
                jobs #>> '{0,version}', rota.version()),
            hint = 'Jobs move between databases of one version: install it in both.';
    end if;
    perform rota._refuse('jobs', format('are for another database than %s',
        rota.database_number()))
    where jsonb_path_exists(jobs, '$[*].database ? (@ != $n)',
        jsonb_build_object('n', rota.database_number()));
    -- Else what is sent for the second time does not see the receipts of the first, and is
    -- refused as if its id were another job's.
    perform rota._check_isolation('receive_moves');
    perform rota._write_before_commit();
    insert into rota.queue_moves as m (move_id, queue, direction, database)
    values (receive_moves.move_id, receive_moves.queue, 'in', receive_moves.from_database)
    on conflict do nothing;
    perform rota._refuse('move_id', format('is of a move that has ended here; if database %s '
        'still has it, go on with settle_above => 0', from_database))
    where found and settle_above is null and exists (
        select from rota.receipts as r
        where r.source_job_id = 0 and r.move_id = - receive_moves.move_id);
    -- Who sends the same at the same time waits here, and then finds its receipts.
    select m.* into v_move from rota.queue_moves as m where m.queue = receive_moves.queue
    for update;
    perform rota._refuse('move_id', 'is that of another queue') where v_move.move_id is null;
    if (v_move.move_id, v_move.direction, v_move.database)
      <> (receive_moves.move_id, 'in', receive_moves.from_database) then
        perform rota._refuse('queue', format('%s has another move %s database %s', queue,
            case v_move.direction when 'out' then 'to' else 'from' end, v_move.database));
    end if;
    if settle_above is not null and v_move.state <> 'settled' then
        perform rota._raise_ids(settle_above);
        update rota.queue_moves as m set state = 'settled' where m.move_id = v_move.move_id
        returning m.* into v_move;
    end if;

    begin
        select coalesce(array_agg((e.job ->> 'id')::bigint order by e.n), '{}') as ids,
            coalesce(array_agg((e.job ->> 'created_at')::timestamptz order by e.n), '{}')
                as times
        into v_jobs from jsonb_array_elements(receive_moves.jobs) with ordinality as e (job, n);
    exception when data_exception then
        perform rota._refuse('jobs', 'must be an array of up to 1000 jobs of take_moves()');
    end;
    return query select r.ordinal, r.job_id, r.error_code, r.message
    from rota._receive_each(v_move, v_jobs.ids, v_jobs.times, receive_moves.jobs) as r;
end $$;

comment on function rota.receive_moves is
    'Take jobs of take_moves(), each once however often it is sent, and return by ordinal the '
    'job here or why it was refused, and no row for one behind a refused one of its ordering '
    'key; until settle_above, the last id that a job has kept, is given, jobs keep their ids, '
    'and the queue takes no other jobs with a key; waits up to 5 seconds for transactions that '
    'have enqueued; raises 22023, RT009, 42501, 55000 if rota has another version there, '
    '55P03.';

/* Let the commit wait for the disk also where the owner has given that up: the other database
 * forgets what it is told has arrived. */
create or replace function rota._write_before_commit()
    returns void language plpgsql as $$
begin
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'on', true);
    end if;
end $$;

/* Take jobs that are sent here, of a queue that moves here or of none, each once; none that is
 * behind a refused one of its ordering key. */
create or replace function rota._receive_each(
    move rota.queue_moves, job_ids bigint[], created_at timestamptz[], jobs jsonb
) returns table (ordinal integer, job_id bigint, error_code text, message text)
    language plpgsql as $$
#variable_conflict use_column
declare
    v_new record; v_key text; v_job record;
    v_halted text[] := '{}'::text[];
begin
    select r.error_code, r.message into v_new
    from rota._receive(move, _receive_each.job_ids, _receive_each.created_at,
        _receive_each.jobs) as r;
    if v_new.error_code is not null then
        for v_job in
            select i.id, i.created_at, i.job, i.n
            from rows from (unnest(_receive_each.job_ids, _receive_each.created_at),
                jsonb_array_elements(_receive_each.jobs)) with ordinality
                as i (id, created_at, job, n) order by i.n
        loop
            v_key := v_job.job ->> 'ordering_key';
            continue when v_key = any(v_halted);
            select r.error_code, r.message into v_new
            from rota._receive(move, array[v_job.id], array[v_job.created_at],
                jsonb_build_array(v_job.job)) as r;
            continue when v_new.error_code is null;
            -- Each wait for a key that is just taken holds up all the others.
            if v_new.error_code = '55P03' then
                perform set_config('lock_timeout', '5ms', true);
            end if;
            v_halted := v_halted || v_key;
            return query select v_job.n::integer, null::bigint, v_new.error_code, v_new.message;
        end loop;
    end if;
    return query select i.n::integer, r.job_id, null::text, null::text
    from unnest(_receive_each.job_ids, _receive_each.created_at) with ordinality
        as i (id, created_at, n)
    -- With a limit no planner reads all receipts for it.
    cross join lateral (
        select c.job_id from rota.receipts as c
        where c.source_job_id = i.id and c.source_created_at = i.created_at
          and c.move_id = coalesce(move.move_id, 0) limit 1
    ) as r;
end $$;

/* Take those that have no receipt, or none and say why.  What may pass for all of them is
 * raised: nothing is refused for it. */
create or replace function rota._receive(
    move rota.queue_moves, job_ids bigint[], created_at timestamptz[], jobs jsonb,
    out error_code text, out message text
) language plpgsql as $$
declare
    v_move_id constant bigint := coalesce(move.move_id, 0);
    v_ids bigint[]; v_created_at timestamptz[]; v_jobs jsonb; v_new_ids bigint[]; v_table text;
begin
    loop
        select array_agg(i.id order by i.n), array_agg(i.created_at order by i.n),
            jsonb_agg(i.job order by i.n)
        into v_ids, v_created_at, v_jobs
        from rows from (unnest(_receive.job_ids, _receive.created_at),
            jsonb_array_elements(_receive.jobs)) with ordinality as i (id, created_at, job, n)
        where (
            select r.job_id from rota.receipts as r
            where r.source_job_id = i.id and r.source_created_at = i.created_at
              and r.move_id = v_move_id
        ) is null;
        if v_ids is null then return; end if;
        begin
            perform rota._check_queues_of(v_jobs, 'worker');
            v_new_ids := case when v_move_id > 0 then rota._take_in(move, v_jobs)
                else array(
                    select m.job_id
                    from rota.enqueue_many((
                        select jsonb_agg(e.job - 'only_queues' order by e.n)
                        from jsonb_array_elements(v_jobs) with ordinality as e (job, n)
                    )) as m
                    order by m.ordinal
                ) end;
            perform rota._refuse('on_conflict', 'must be keep, since the key is that of a job '
                'of a queue to which the producer may not enqueue')
            from jsonb_array_elements(v_jobs) with ordinality as e (job, n)
            join rota.jobs as j on j.id = v_new_ids[e.n]
            where e.job ? 'only_queues' and not e.job -> 'only_queues' ? j.queue limit 1;
            -- enqueue_many() asks for the right to enqueue, and not for that to work.
            perform rota._check_queues('worker', array(
                select j.queue from jsonb_array_elements(v_jobs) with ordinality as e (job, n)
                join rota.jobs as j on j.id = any(array[(e.job ->> 'blocks')::bigint,
                    case when e.job ->> 'on_conflict' <> 'keep' then v_new_ids[e.n] end])
            )) where rota._allowed_queues('worker') is not null;
            insert into rota.receipts as r (move_id, source_job_id, source_created_at, job_id)
            select v_move_id, i.id, i.created_at, i.new_id
            from unnest(v_ids, v_created_at, v_new_ids) as i (id, created_at, new_id);
            return;
        exception when others then
            get stacked diagnostics v_table = table_name;
            -- Sent by two at once; the other one's receipts are to be seen now.
            continue when sqlstate = '23505' and v_table = 'receipts' and exists (
                select from rota.receipts as r where r.source_job_id = any(v_ids));
            if sqlstate = '23505' and v_table = 'receipts'
              or left(sqlstate, 2) = any('{08,25,40,53,57,58}')
              or sqlstate = '42501' and v_move_id > 0 then
                raise;
            elsif sqlstate = '54000' then
                -- So a value is refused that is too large; and all, where no transaction
                -- gets an id.
                perform pg_current_xact_id();
            end if;
            error_code := sqlstate;
            message := regexp_replace(sqlerrm, '^jobs[[]1[]][. ]?', '');
            return;
        end;
    end loop;
end $$;

/* Whether a job that was refused for this is sent again later, and what is behind it in other
 * lanes goes on: its queue moves here, a right is missing, another transaction has its key or
 * locks a table, or a trigger failed in a way that may pass. */
create or replace function rota._is_for_later(error_code text)
    returns boolean language sql immutable as $$
select error_code in ('RT016', '42501') or left(error_code, 2) in ('55', 'XX')
$$;

/* Insert jobs of a queue that moves here, as they were, or those that come late with new ids;
 * return of each the job here. */
create or replace function rota._take_in(move rota.queue_moves, jobs jsonb)
    returns bigint[] language plpgsql as $$
declare
    v_new_ids constant bigint[] := case
        when move.state = 'settled' then rota._new_ids(jsonb_array_length(jobs)) end;
    v_ids bigint[] := '{}'::bigint[];
    v_inserted bigint[] := '{}'::bigint[];
    v_failed bigint[] := '{}'::bigint[];
    v_found bigint; v_job record;
begin
    -- One that this database has not given yet would be in the way of an enqueue.
    select (e.job ->> 'id')::bigint as id into v_job
    from jsonb_array_elements(_take_in.jobs) as e (job), rota.jobs_id_seq as s
    where (e.job ->> 'id')::bigint not between 1 and case
        when (e.job ->> 'id')::bigint & 1023 = rota.database_number() then s.last_value
        else 9007199254740991
    end limit 1;
    if found then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('database %s has not given the id %s, which a job has that comes '
                'to it', rota.database_number(), v_job.id),
            hint = 'If it was restored, let its ids begin above those that it has given since: '
                'select setval(''rota.id_timeline'', 2147483647);';
    end if;
    for v_job in
        select (e.job ->> 'id')::bigint as id, v.new_id, e.job -> 'effects' as effects,
            e.job -> 'has_failed' = 'true' as has_failed,
            -- Without what no job has that can move.
            jsonb_populate_record(null::rota.jobs, e.job
                - '{own_lane,own_place,hold,opened_for,held_limits,locked_by,locked_until,'
                    'pipeline,stage,stage_input,definition,scheduled_for}'::text[]
                || jsonb_build_object('id', v.new_id, 'queue', move.queue, 'updated_at',
                    rota.now())) as job
        from jsonb_array_elements(_take_in.jobs) with ordinality as e (job, n)
        cross join lateral (
            select coalesce(v_new_ids[e.n], (e.job ->> 'id')::bigint) as new_id) as v
        order by e.n
    loop
        -- The database that it left was restored from a backup, and has it again.
        v_found := (
            select r.job_id from rota.receipts as r
            where r.source_job_id = v_job.id and r.source_created_at = (v_job.job).created_at
              and r.move_id > 0
              -- And has not left since, or it may come back.
              and not exists (select from rota.moved_jobs as t where t.job_id = r.job_id)
            limit 1
        );
        if v_found is not null then
            v_ids := v_ids || v_found;
            continue;
        end if;
        v_found := rota._insert_moved(v_job.job);
        v_ids := v_ids || coalesce(v_found, v_job.new_id);
        if v_found is null then v_inserted := v_inserted || v_job.new_id; end if;
        if v_job.has_failed then v_failed := v_failed || v_job.new_id; end if;
        -- What it left open, when it was here before, has gone on where it was since.
        delete from rota.effects as f
        where f.job_id = v_job.id and f.completed_at is null
          and exists (select from rota.moved_jobs as t where t.job_id = f.job_id);
        -- By the id that it has here, or they would stay when it moves on.
        insert into rota.effects as f
        select n.* from jsonb_array_elements(
            case jsonb_typeof(v_job.effects) when 'array' then v_job.effects else '[]' end)
            as e (effect)
        cross join lateral jsonb_populate_record(null::rota.effects, e.effect
            || jsonb_build_object('job_id', coalesce(v_found, v_job.new_id))) as n
        on conflict on constraint effects_pkey do update
        set job_id = excluded.job_id, lease_token = excluded.lease_token,
            queue = excluded.queue, recorded_at = excluded.recorded_at,
            completed_at = excluded.completed_at, expires_at = excluded.expires_at,
            result = excluded.result
        -- What was left open under the id that the job had here before it came late there.
        where f.completed_at is null
          and exists (select from rota.moved_jobs as t where t.job_id = f.job_id);
    end loop;
    -- What came back is not elsewhere any more: two databases would lead in a circle.
    delete from rota.moved_jobs as t where t.job_id = any(v_inserted);
    perform rota._enter_moved(v_inserted, v_failed);
    perform rota._hold_retries(v_inserted);
    perform rota._notify_for(v_inserted);
    return v_ids;
end $$;

/* Jobs that moved, or have come back, begin to wait here.  The head of a line comes in blocked,
 * and if it had failed it still waits for its retry. */
create or replace function rota._enter_moved(job_ids bigint[], failed_ids bigint[])
    returns void language plpgsql as $$
begin
    perform rota._enter_lanes(job_ids);
    perform rota._jobs_came_in(job_ids);
    update rota.jobs as j
    set status = 'failed' where j.id = any(_enter_moved.failed_ids) and j.status = 'queued';
end $$;

/* Insert a job that moves, or return the one that has its key, as enqueue() tells who comes
 * second. */
create or replace function rota._insert_moved(job rota.jobs)
    returns bigint language plpgsql as $$
declare
    v_found bigint;
begin
    for v_try in 1..10 loop
        insert into rota.jobs overriding system value select job.*
        on conflict (idempotency_key, coalesce('pipeline ' || pipeline, job_type))
            where idempotency_key is not null do nothing;
        if found then return null; end if;
        v_found := rota._find_keyed(job.idempotency_key, job.job_type);
        exit when v_found is not null;
    end loop;
    if v_found is null then perform rota._raise_swallowed('the job'); end if;
    return v_found;
end $$;
