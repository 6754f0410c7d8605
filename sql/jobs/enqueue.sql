/*
 * jobs/enqueue.sql -- enqueue jobs.
 *
 * Enqueue is part of the caller's transaction: no worker sees the job before the commit.
 *
 * An idempotency key is unique among live jobs of a type, held by a unique index alone.  A live
 * job that has the key is found without its lock, so a claim, a heartbeat or a finish of it
 * that is not committed holds up no producer.  Only if another transaction is just inserting
 * the same key, the insert waits for its end: after its commit we return its job, after its
 * rollback ours goes in.  The job found may end between the two statements; hence the loops,
 * which turn only then.  In an isolation level above read committed, whose snapshot may show
 * what has ended, the insert finds out, and waits for the transaction that changes the job.
 *
 * enqueue_many() inserts in the order of the keys.  Two calls that share keys therefore wait
 * for each other in one direction only and cannot deadlock.  When a job that was found has
 * ended meanwhile, all that was inserted is given up and the whole done again: to insert one
 * more key while holding later ones would be the other direction.
 *
 * What each call costs is mostly the start of statements and expressions, which PostgreSQL
 * prepares anew in each transaction, and the settings of the function.  So enqueue() writes a
 * plain job, with no more than a type, a payload, a queue, a priority, a time, a number of
 * attempts and headers, by one statement, which asks in its condition whether anything is set
 * for it (base/configured.sql); only for others it asks what that is.  A job that may have to
 * wait is written once, with its final status; and as a row of jobs/insert.sql only where it
 * may find or change another one.  The planner's settings are left to the functions that look
 * for jobs.  And the first question of _notify() is repeated here: where no worker waits, that
 * saves the call.
 */

create or replace function rota.enqueue(
    job_type text, payload jsonb default '{}', queue text default 'default',
    run_at timestamptz default null, delay interval default null, priority integer default 0,
    max_attempts integer default null, lease interval default null, backoff jsonb default null,
    idempotency_key text default null, unique_for interval default null,
    on_conflict text default 'keep', updated_at timestamptz default null,
    max_wait interval default null, ordering_key text default null,
    skip_dead boolean default false, depends_on bigint[] default null,
    blocks bigint default null, if_parent_dead text default 'cancel',
    limit_key text default null, time_limit interval default null,
    expires_at timestamptz default null, headers jsonb default null,
    expires_after interval default null
) returns bigint language plpgsql security definer set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan as $$
-- The conflict target names a column that is also an argument.
#variable_conflict use_column
declare
    v_now constant timestamptz := rota.now();
    -- 0 for a plain job, up to 3 for one that is plain if these few of its values are sound.
    v_more integer := case
        when on_conflict = 'keep' and not skip_dead and if_parent_dead = 'cancel'
            then num_nonnulls(run_at, delay, max_attempts, headers) + 4 * num_nonnulls(lease,
                backoff, unique_for, updated_at, max_wait, ordering_key, depends_on, blocks,
                limit_key, time_limit, expires_at, expires_after)
        else 4
    end;
    v_may_wait boolean; v_is_confined boolean; v_has_settings boolean; v_takes_place boolean;
    v_status text := 'queued';
    v_max_attempts integer; v_lease interval; v_time_limit interval; v_run_at timestamptz;
    v_lane smallint; v_place timestamptz; v_hold text; v_new_id bigint; v_job_id bigint;
begin
    if current_setting('rota.ids_guarded', true)
      is distinct from 'rota.jobs_id_seq'::regclass::oid::text then
        perform rota._guard_ids();
    end if;
    -- Most jobs are plain, and nothing is set for them: all that they need is one statement.
    if v_more between 1 and 3 then
        if rota._has_sound_options(run_at, delay, max_attempts, headers) then
            v_run_at := coalesce(run_at, v_now + rota._exact(delay));
            v_more := 0;
        end if;
    end if;
    if v_more = 0 and idempotency_key is null then
        insert into rota.jobs as j (queue, job_type, payload, priority, max_attempts, headers,
            status, run_at, created_at, updated_at)
        select enqueue.queue, enqueue.job_type, enqueue.payload, enqueue.priority,
            coalesce(enqueue.max_attempts, 10), enqueue.headers, 'queued',
            coalesce(v_run_at, v_now), v_now, v_now
        where rota._is_sound(enqueue.job_type, enqueue.queue, enqueue.payload, enqueue.priority,
            null)
          -- With exists() the planner would read the list, and hope for an early row.
          and (
            select 1 from rota.configured_names as c
            where c.name
                = any(array['access producer', enqueue.queue, 'type ' || enqueue.job_type])
              and (c.name <> 'access producer' or rota._may_confine(c.role))
            order by c.name limit 1
          ) is null
        returning j.id into v_job_id;
        if v_job_id is not null then
            if rota._others_hold(1919907936, hashtext(queue)) then
                perform rota._notify(queue)
                where coalesce(v_run_at, v_now) < v_now + rota._soon();
            end if;
            return v_job_id;
        end if;
    end if;

    v_may_wait := num_nonnulls(ordering_key, depends_on) > 0;
    if v_more > 0
      or not rota._is_sound(job_type, queue, payload, priority, idempotency_key) then
        perform rota._check_new_job('', job_type, payload, queue, run_at, delay, priority,
            max_attempts, lease, backoff, idempotency_key, time_limit, expires_at, headers,
            expires_after);
        v_lease := rota._exact(lease);
        v_time_limit := rota._exact(time_limit);
        v_run_at := coalesce(run_at, v_now + rota._exact(delay));
        expires_at := coalesce(expires_at,
            coalesce(v_run_at, v_now) + rota._exact(expires_after));
        if (on_conflict, skip_dead, if_parent_dead) is distinct from ('keep', false, 'cancel')
          or num_nonnulls(unique_for, updated_at, max_wait, ordering_key, depends_on, blocks,
            limit_key) > 0 then
            perform rota._check_waits('', ordering_key, skip_dead, depends_on, blocks,
                if_parent_dead, limit_key);
            -- Whatever may find a job, or change one, takes another way; this one stays short.
            if on_conflict is distinct from 'keep' or v_may_wait and idempotency_key is not null
              or num_nonnulls(unique_for, updated_at, max_wait, blocks) > 0 then
                return rota._enqueue_special(
                    jsonb_populate_record(null::rota.jobs, jsonb_build_object(
                        'job_type', job_type, 'payload', payload, 'queue', queue,
                        'run_at', v_run_at, 'priority', priority, 'max_attempts', max_attempts,
                        'lease', lease, 'time_limit', time_limit, 'expires_at', expires_at,
                        'headers', headers, 'backoff', backoff, 'idempotency_key',
                        idempotency_key, 'ordering_key', ordering_key, 'skip_dead', skip_dead,
                        'if_parent_dead', if_parent_dead, 'limit_key', limit_key,
                        'created_at', v_now, 'status',
                        case when depends_on is not null then 'blocked' end)),
                    unique_for, on_conflict, updated_at, max_wait, depends_on, blocks);
            end if;
        end if;
    end if;

    select bool_or(rota._may_confine(c.role)) filter (where c.name = 'access producer'),
        bool_or(c.source in ('queues', 'job_types')),
        bool_or(rota._gives_place(c.source, c.name, enqueue.queue))
    into v_is_confined, v_has_settings, v_takes_place from rota.configured_names as c
    where c.name = any(array['access producer', enqueue.queue, 'type ' || enqueue.job_type]);
    if v_is_confined then perform rota._check_queues('producer', array[queue]); end if;
    if v_takes_place then
        perform rota._check_arrived(queue, coalesce(ordering_key, idempotency_key));
    end if;
    if idempotency_key is not null then
        v_job_id := rota._find_live(idempotency_key, job_type);
        if v_job_id is not null then return v_job_id; end if;
    end if;
    v_takes_place := coalesce(v_takes_place, false) or limit_key is not null;
    if v_has_settings then
        select q.max_attempts, coalesce(v_time_limit, t.time_limit),
            coalesce(enqueue.expires_at, coalesce(v_run_at, v_now)
                + coalesce(t.expires_after, q.expires_after)),
            v_takes_place or q.ageing is not null
        into v_max_attempts, v_time_limit, expires_at, v_takes_place
        from (select enqueue.queue, enqueue.job_type) as n
        left join rota.queues as q on q.queue = n.queue
        left join rota.job_types as t on t.job_type = n.job_type;
    end if;
    if v_takes_place or v_may_wait then
        v_new_id := nextval('rota.jobs_id_seq');
        select c.status, c.lane, c.place, c.hold into v_status, v_lane, v_place, v_hold
        from rota._job_comes_in(v_new_id, enqueue.ordering_key, enqueue.depends_on,
            enqueue.queue, enqueue.job_type, enqueue.limit_key, enqueue.priority,
            case when v_takes_place then coalesce(v_run_at, v_now) end) as c;
    end if;
    for v_try in 1..100 loop
        insert into rota.jobs as j (id, queue, job_type, payload, priority, max_attempts, lease,
            time_limit, expires_at, headers, backoff, idempotency_key, ordering_key, skip_dead,
            if_parent_dead, limit_key, status, run_at, own_lane, own_place, hold, created_at,
            updated_at)
        overriding system value
        values (coalesce(v_new_id, nextval('rota.jobs_id_seq')), enqueue.queue,
            enqueue.job_type, enqueue.payload, enqueue.priority,
            coalesce(enqueue.max_attempts, v_max_attempts, 10), v_lease, v_time_limit,
            enqueue.expires_at, enqueue.headers, enqueue.backoff, enqueue.idempotency_key,
            enqueue.ordering_key,
            case when enqueue.ordering_key is not null then enqueue.skip_dead end,
            case when v_may_wait then enqueue.if_parent_dead end, enqueue.limit_key, v_status,
            coalesce(v_run_at, v_now), v_lane, v_place, v_hold, v_now, v_now)
        on conflict (idempotency_key, coalesce('pipeline ' || pipeline, job_type))
            where idempotency_key is not null do nothing returning j.id into v_job_id;
        if v_job_id is null then
            v_job_id := rota._find_keyed(idempotency_key, job_type);
        end if;
        exit when v_job_id is not null or idempotency_key is null;
    end loop;
    if v_job_id is null then perform rota._raise_swallowed('the job'); end if;
    if v_status = 'queued' and rota._others_hold(1919907936, hashtext(queue)) then
        perform rota._notify(queue) where coalesce(v_run_at, v_now) < v_now + rota._soon();
    end if;
    return v_job_id;
end $$;

comment on function rota.enqueue is
    'Add one job and return its id, or the id of the job that already has its idempotency_key, '
    'which on_conflict keeps, replaces or reruns; raises 22023 for a bad argument, RT001 for '
    'an unknown job in depends_on or blocks, RT013 if the job in blocks has started or another '
    'transaction has it locked, RT003 if it has ended, RT016 if it has a key and its queue is '
    'still coming here from another database, 09000 if a trigger removes the row.';

create or replace function rota.enqueue_many(jobs jsonb)
    returns table (ordinal integer, job_id bigint, is_new boolean) language plpgsql
    security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
    set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_read record; v_new_ids bigint[]; v_ids bigint[]; v_news boolean[];
begin
    v_ids := rota._insert_plain_jobs(jobs);
    if v_ids is not null then
        -- Each waiting worker holds this lock, and all of these jobs are due.
        if rota._others_hold(1919907936, hashtext('')) then
            perform rota._notify(q.queue, q.jobs)
            from (
                select coalesce(e.job ->> 'queue', 'default') as queue,
                    count(*)::integer as jobs
                from jsonb_array_elements(enqueue_many.jobs) as e (job) group by 1
            ) as q;
        end if;
        return query select i.ordinal::integer, i.id, true
        from unnest(v_ids) with ordinality as i (id, ordinal);
        return;
    end if;

    select r.new_jobs, r.has_keys, r.has_key_rules, r.may_wait into v_read
    from rota._read_jobs(enqueue_many.jobs) as r;
    perform rota._check_queues_of(jobs);
    v_new_ids := rota._new_ids(cardinality(v_read.new_jobs));

    -- Where no job has a key there is nothing to find, and no need of the subtransaction: a
    -- caller may make thousands of such calls in one transaction.
    if not v_read.has_keys then
        perform rota._insert_requested(v_read.new_jobs, v_new_ids);
        v_ids := v_new_ids;
    elsif v_read.has_key_rules then
        select m.job_ids, m.news into v_ids, v_news
        from rota._enqueue_many_keyed(v_read.new_jobs, v_new_ids, enqueue_many.jobs) as m;
    end if;
    for v_try in 1..100 loop
        exit when v_ids is not null;
        begin
            select rota._insert_requested(array_agg(n.job), array_agg(n.id)) into v_ids
            from (
                select j.job, j.id
                from (
                    select unnest(v_read.new_jobs) as job, unnest(v_new_ids) as id
                ) as j
                order by (j.job).idempotency_key, (j.job).job_type, j.id
            ) as n;
            if cardinality(v_ids) = cardinality(v_new_ids) then
                v_ids := v_new_ids;
            else
                v_ids := rota._find_jobs(v_read.new_jobs, v_new_ids);
            end if;
            if array_position(v_ids, null) is not null then raise no_data_found; end if;
        exception
            when no_data_found then
                v_ids := null;
        end;
    end loop;
    if v_ids is null then perform rota._raise_swallowed('one of the jobs'); end if;

    if v_news is null then
        v_news := array(select i.id = i.new_id from unnest(v_ids, v_new_ids) as i (id, new_id));
    end if;
    if v_read.may_wait then perform rota._link_jobs(jobs, v_ids, v_news); end if;
    perform rota._notify_for(v_ids);
    return query select i.ordinal::integer, i.id, i.is_new
    from unnest(v_ids, v_news) with ordinality as i (id, is_new, ordinal) order by i.ordinal;
end $$;

comment on function rota.enqueue_many is
    'Add up to 10000 jobs, given as objects whose keys are the arguments of enqueue(), and '
    'return one row for each in the same order; raises 22023 for a bad job, naming it, RT001, '
    'RT013, RT003, RT016, 09000.';

/* Insert a batch of jobs that have no more than a type, a payload, a queue and a priority, if
 * all is right with them and no setting gives any a place or holds it; returns their ids in the
 * order given, or null if one is not such a job and none went in.  No row of a job is made up
 * for them, and without an idempotency key an insert need not look for another. */
create or replace function rota._insert_plain_jobs(jobs jsonb)
    returns bigint[] language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    v_are_plain boolean := false;
    v_have_settings boolean := false;
    v_ids bigint[];
begin
    if jsonb_typeof(_insert_plain_jobs.jobs) = 'array'
      and jsonb_array_length(jobs) <= 10000 then
        select bool_and((jsonb_typeof(e.job) = 'object'
            and e.job - '{job_type,payload,queue,priority}'::text[] = '{}'
            and coalesce(e.job ->> 'priority', '0') ~ '^-?[0-9]{1,4}$'
            and rota._is_sound(e.job ->> 'job_type', coalesce(e.job ->> 'queue', 'default'),
                coalesce(e.job -> 'payload', '{}'), 0, null)) is true)
        into v_are_plain from jsonb_array_elements(_insert_plain_jobs.jobs) as e (job);
    end if;
    if v_are_plain and exists (select from rota.configured_names) then
        -- As in enqueue(): what is set may have to do with the place of a job, or not.
        select coalesce(bool_or(c.source in ('queues', 'job_types')), false),
            bool_or(rota._gives_place(c.source, c.name, k.queue) or exists (
                select from rota.queues as q where q.queue = k.queue and q.ageing is not null
            )) is not true
        into v_have_settings, v_are_plain
        from (
            select distinct coalesce(e.job ->> 'queue', 'default') as queue,
                e.job ->> 'job_type' as job_type
            from jsonb_array_elements(_insert_plain_jobs.jobs) as e (job)
        ) as k
        join rota.configured_names as c on c.name = any(array[k.queue, 'type ' || k.job_type]);
    end if;
    if v_are_plain is not true then return null; end if;

    perform rota._check_queues_of(jobs) where exists (
        select from rota.configured_names as c
        where c.name = 'access producer' and rota._may_confine(c.role)
    );
    perform rota._guard_ids();
    with added as (
        insert into rota.jobs (queue, job_type, payload, priority, max_attempts, time_limit,
            expires_at, status, run_at, created_at, updated_at)
        select n.queue, n.job_type, n.payload, n.priority,
            coalesce(case when v_have_settings then (
                select q.max_attempts from rota.queues as q where q.queue = n.queue) end, 10),
            case when v_have_settings then (
                select t.time_limit from rota.job_types as t where t.job_type = n.job_type) end,
            case when v_have_settings
                then rota._default_expiry(n.job_type, n.queue, v_now) end,
            'queued', v_now, v_now, v_now
        from (
            select coalesce(e.job ->> 'queue', 'default') as queue,
                e.job ->> 'job_type' as job_type, coalesce(e.job -> 'payload', '{}') as payload,
                coalesce(e.job ->> 'priority', '0')::smallint as priority
            from jsonb_array_elements(_insert_plain_jobs.jobs) as e (job)
        ) as n
        returning id
    )
    -- Ids are drawn in the order of the rows.
    select coalesce(array_agg(a.id), '{}') into v_ids from added as a;
    if cardinality(v_ids) < jsonb_array_length(jobs) then
        perform rota._raise_swallowed('one of the jobs');
    end if;
    return v_ids;
end $$;

/* Read and check the objects of a batch: as rows of jobs, for those keys that are columns, and
 * whether any has an idempotency key, or a rule for it, or may wait for other jobs. */
create or replace function rota._read_jobs(
    jobs jsonb, out new_jobs rota.jobs[], out has_keys boolean, out has_key_rules boolean,
    out may_wait boolean
) language plpgsql as $$
declare
    c_plain constant text[] := array['job_type', 'payload', 'queue', 'run_at', 'priority',
        'max_attempts', 'lease', 'backoff', 'idempotency_key', 'time_limit', 'expires_at',
        'headers'];
    c_others constant text[] := array['delay', 'unique_for', 'on_conflict', 'updated_at',
        'max_wait', 'ordering_key', 'skip_dead', 'depends_on', 'blocks', 'if_parent_dead',
        'limit_key', 'expires_after'];
    v_now constant timestamptz := rota.now();
    v_has_others boolean; v_read record; v_more record; v_rule record; v_job record;
begin
    perform rota._check_json('jobs', jobs, 'array', 10000);
    v_has_others := exists (
        select from jsonb_array_elements(_read_jobs.jobs) as e (job)
        where case jsonb_typeof(e.job) when 'object' then e.job - c_plain <> '{}' else true end
    );
    if v_has_others then perform rota._check_keys_of('jobs', jobs, c_plain || c_others); end if;

    -- Nothing is written in this block, so it costs no transaction id.
    begin
        select coalesce(array_agg(n), '{}') as new_jobs,
            count(n.idempotency_key) > 0 as has_keys,
            bool_and(rota._is_sound(n.job_type, coalesce(n.queue, 'default'),
                coalesce(n.payload, '{}'), coalesce(n.priority, 0::smallint), n.idempotency_key)
                and rota._has_sound_options(n.run_at, null, n.max_attempts, n.headers)
                and num_nonnulls(n.lease, n.backoff, n.time_limit, n.expires_at) = 0)
                as are_sound
        into v_read
        from jsonb_populate_recordset(null::rota.jobs, _read_jobs.jobs) as n;
        new_jobs := v_read.new_jobs;
        has_keys := v_read.has_keys;
        if v_read.are_sound and not v_has_others then return; end if;
        perform rota._check_durations('jobs[%s].', _read_jobs.jobs);

        -- Most jobs need none of these calls, each of which costs more than their questions.
        select bool_or(num_nonnulls(r.delay, r.depends_on, r.expires_after) > 0) as has_more,
            bool_or(num_nonnulls(n.ordering_key, r.depends_on, r.blocks) > 0) as may_wait,
            count(case when (v_read.are_sound and r.expires_after is null
                and rota._has_sound_options(n.run_at, r.delay, null, null)) is not true then
                rota._check_new_job(format('jobs[%s].', n.ordinality), n.job_type,
                    coalesce(n.payload, '{}'), coalesce(n.queue, 'default'), n.run_at, r.delay,
                    coalesce(n.priority, 0::smallint), n.max_attempts, n.lease, n.backoff,
                    n.idempotency_key, n.time_limit, n.expires_at, n.headers, r.expires_after)
            end),
            count(case when r.on_conflict <> 'keep'
                or num_nonnulls(r.unique_for, r.updated_at, r.max_wait) > 0 then
                rota._check_key_rule(format('jobs[%s].', n.ordinality), n.idempotency_key,
                    r.unique_for, r.on_conflict, r.updated_at, r.max_wait,
                    coalesce(n.expires_at, v_now + r.expires_after))
            end) > 0 as has_key_rules,
            count(case when n.limit_key like '%:*'
                or octet_length(n.limit_key) not between 1 and 255
                or octet_length(n.ordering_key) not between 1 and 255
                or num_nonnulls(n.skip_dead, r.depends_on, r.blocks, n.if_parent_dead) > 0 then
                rota._check_waits(format('jobs[%s].', n.ordinality), n.ordering_key,
                    coalesce(n.skip_dead, false), r.depends_on, r.blocks,
                    coalesce(n.if_parent_dead, 'cancel'), n.limit_key)
            end)
        into v_more
        from unnest(new_jobs) with ordinality as n
        join rota._rules_of(_read_jobs.jobs) as r on r.ordinal = n.ordinality;
        has_key_rules := v_more.has_key_rules;
        may_wait := v_more.may_wait;
    exception
        -- An unknown time zone is an invalid_parameter_value too, so all texts are tried first.
        when data_exception or program_limit_exceeded then
            perform rota._check_values_of('jobs', jobs);
            raise;
    end;
    if v_more.has_more is not true then return; end if;
    for v_rule in
        select r.ordinal, rota._exact(r.delay) as delay, r.depends_on,
            rota._exact(r.expires_after) as expires_after
        from rota._rules_of(_read_jobs.jobs) as r
        where num_nonnulls(r.delay, r.depends_on, r.expires_after) > 0
    loop
        v_job := new_jobs[v_rule.ordinal];
        if v_rule.delay is not null then
            -- Of one instant, or the pause would not be exactly the delay.
            v_job.run_at := v_now + v_rule.delay;
            v_job.created_at := v_now;
        end if;
        if v_rule.expires_after is not null then
            v_job.expires_at := coalesce(v_job.run_at, v_now) + v_rule.expires_after;
        end if;
        if v_rule.depends_on is not null then v_job.status := 'blocked'; end if;
        new_jobs[v_rule.ordinal] := v_job;
    end loop;
end $$;

/* Refuse what is no object of a list, and what has another key than these. */
create or replace function rota._check_keys_of(argument text, list jsonb, keys text[])
    returns void language plpgsql as $$
begin
    perform rota._refuse(format('%s[%s]', argument, e.ordinal),
        case jsonb_typeof(e.item)
            when 'object' then format('has an unknown key %L', (
                select rota._cut(k.key, 80)
                from jsonb_object_keys(e.item - _check_keys_of.keys) as k (key) limit 1
            ))
            else 'must be an object'
        end)
    from jsonb_array_elements(_check_keys_of.list) with ordinality as e (item, ordinal)
    where case jsonb_typeof(e.item)
        when 'object' then e.item - _check_keys_of.keys <> '{}' else true end limit 1;
end $$;

/* Refuse the first value in the objects of a list that is none for the argument of its key. */
create or replace function rota._check_values_of(argument text, list jsonb)
    returns void language plpgsql as $$
begin
    perform rota._refuse(format('%s[%s].%s', argument, f.ordinal, f.key), f.problem)
    from (
        select e.ordinal, k.key, rota._cast_problem(k.key, k.value) as problem
        from jsonb_array_elements(_check_values_of.list) with ordinality as e (item, ordinal)
        cross join jsonb_each(e.item) as k
    ) as f
    where f.problem is not null limit 1;
end $$;

/* Refuse an object or an array as a duration: in {"minutes": 5} Postgres reads 5 seconds. */
create or replace function rota._check_durations(form text, list jsonb)
    returns void language plpgsql as $$
begin
    perform rota._refuse(format(form, e.ordinal) || k.key,
        'must be a number of seconds or a text such as "5 minutes", got '
        || jsonb_typeof(e.item -> k.key))
    from jsonb_array_elements(_check_durations.list) with ordinality as e (item, ordinal)
    cross join unnest('{delay,lease,unique_for,max_wait,time_limit,expires_after,'
        'retry_in}'::text[]) as k (key)
    -- Most have neither: this costs half as much as to look at each key.
    where concat(e.item -> 'delay', e.item -> 'lease', e.item -> 'unique_for',
            e.item -> 'max_wait', e.item -> 'time_limit', e.item -> 'expires_after',
            e.item -> 'retry_in') ~ '[[{]'
      and jsonb_typeof(e.item -> k.key) in ('object', 'array') limit 1;
end $$;

/* What new jobs of a batch, or jobs found by their keys, wait for, and what waits for them. */
create or replace function rota._link_jobs(jobs jsonb, job_ids bigint[], news boolean[])
    returns void language plpgsql as $$
declare
    v_blocks bigint[]; v_parts bigint[]; v_are_new boolean[]; v_names text[];
    v_parents bigint[]; v_children bigint[];
begin
    select array_agg(n.blocks), array_agg(_link_jobs.job_ids[n.ordinal]),
        array_agg(_link_jobs.news[n.ordinal]), array_agg(format('jobs[%s].blocks', n.ordinal))
    into v_blocks, v_parts, v_are_new, v_names from rota._rules_of(_link_jobs.jobs) as n
    where n.blocks is not null;
    select array_agg(p.id), array_agg(_link_jobs.job_ids[n.ordinal]) into v_parents, v_children
    from rota._rules_of(_link_jobs.jobs) as n cross join unnest(n.depends_on) as p (id)
    where _link_jobs.news[n.ordinal];
    perform rota._jobs_came_in(
        array(select i.id from unnest(_link_jobs.job_ids, _link_jobs.news) as i (id, is_new)
            where i.is_new),
        v_children, v_parents, v_blocks, v_parts, v_are_new, v_names);
end $$;

/* Why this is no value of the type of an argument, or of a key of end_jobs(); else null. */
create or replace function rota._cast_problem(argument text, value jsonb)
    returns text language plpgsql stable as $$
declare
    c_job constant jsonb := jsonb_build_object(argument, value);
begin
    if argument = 'priority' and (value #>> '{}')::integer not between -32768 and 32767 then
        return format('must be -32768 to 32767, got %s', value #>> '{}');
    end if;
    perform jsonb_populate_record(null::rota.jobs, c_job);
    perform r.ordinal from rota._rules_of(jsonb_build_array(c_job)) as r;
    perform e.job_id
    from jsonb_to_record(c_job) as e (job_id bigint, retry_in interval, fatal boolean);
    return null;
exception
    when data_exception or program_limit_exceeded then
        return format('is not valid: %s', rota._cut(sqlerrm, 200));
end $$;

/* Whether a job that has no more than this breaks no rule, as most do.  An expression that is
 * put into the caller's costs less than the calls that tell which rule is broken.  Counted
 * repeats would make the match of the pattern ten times as long. */
create or replace function rota._is_sound(
    job_type text, queue text, payload jsonb, priority integer, idempotency_key text
) returns boolean language sql stable as $$
select (
    job_type || ' ' || queue ~ '^[A-Za-z0-9][A-Za-z0-9_.:/-]* [A-Za-z0-9][A-Za-z0-9_.:/-]*$'
    and octet_length(job_type) <= 63 and octet_length(queue) <= 63
    and not queue ^@ 'forward:'
    and jsonb_typeof(payload) = 'object' and pg_column_size(payload) <= 5242880
    and octet_length(payload::text) <= 1048576 and priority between -32768 and 32767
    and coalesce(octet_length(idempotency_key) between 1 and 255, true)
) is true
$$;

/* Whether these break no rule either; not sure of a delay of more than 95 years. */
create or replace function rota._has_sound_options(
    run_at timestamptz, delay interval, max_attempts integer, headers jsonb
) returns boolean language sql stable as $$
select coalesce(max_attempts, 1) > 0 and num_nonnulls(run_at, delay) <= 1 and coalesce(
    run_at between '1970-01-01 00:00+00' and '9999-01-01 00:00+00',
    delay >= '0' and extract(epoch from delay) between 0 and 3000000000, true)
    and coalesce(jsonb_typeof(headers) = 'object' and octet_length(headers::text) <= 8192
        and not jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string")'), true)
$$;

/* The rules for one new job; *prefix* says which of many it is. */
create or replace function rota._check_new_job(
    prefix text, job_type text, payload jsonb, queue text, run_at timestamptz, delay interval,
    priority integer, max_attempts integer, lease interval, backoff jsonb, idempotency_key text,
    time_limit interval default null, expires_at timestamptz default null,
    headers jsonb default null, expires_after interval default null
) returns void language plpgsql as $$
begin
    if not rota._is_sound(job_type, queue, payload, priority, idempotency_key) then
        perform rota._check_name(prefix || 'job_type', job_type);
        if jsonb_typeof(_check_new_job.payload) is distinct from 'object' then
            -- A text where an object was meant has been encoded twice, as some drivers do.
            perform rota._refuse(prefix || 'payload', 'must be a JSON object, got '
                || coalesce(jsonb_typeof(payload), 'null'));
        end if;
        perform rota._check_size(prefix || 'payload', payload,
            '; keep the blob elsewhere and send its id');
        perform rota._check_job_queue(prefix || 'queue', queue);
        perform rota._check_priority(prefix || 'priority', priority);
        if idempotency_key is not null then
            perform rota._check_text(prefix || 'idempotency_key', idempotency_key, 255);
        end if;
    end if;
    if run_at is not null then perform rota._check_run_at(prefix || 'run_at', run_at); end if;
    if delay is not null then
        perform rota._check_interval(prefix || 'delay', delay, '0', '100 years');
        if run_at is not null then
            perform rota._refuse(prefix || 'delay', 'and run_at must not both be given');
        end if;
    end if;
    if max_attempts < 1 then
        perform rota._refuse(prefix || 'max_attempts',
            format('must be at least 1, got %s', max_attempts));
    end if;
    perform rota._check_interval(prefix || 'lease', lease, may_be_null => true);
    perform rota._check_backoff(prefix || 'backoff', backoff);
    if num_nonnulls(time_limit, expires_at, headers, expires_after) = 0 then return; end if;
    if expires_after is not null then
        perform rota._check_interval(prefix || 'expires_after', expires_after, '1 millisecond',
            '100 years');
        if expires_at is not null then
            perform rota._refuse(prefix || 'expires_after',
                'and expires_at must not both be given');
        end if;
    end if;
    perform rota._check_interval(prefix || 'time_limit', time_limit, may_be_null => true);
    if expires_at is not null then
        perform rota._check_run_at(prefix || 'expires_at', expires_at);
        if expires_at <= coalesce(run_at, rota.now() + rota._exact(delay)) then
            perform rota._refuse(prefix || 'expires_at', 'must be later than run_at or delay');
        end if;
    end if;
    perform rota._check_headers(prefix || 'headers', headers);
end $$;
