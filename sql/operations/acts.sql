/*
 * operations/acts.sql -- do one thing to all jobs that a filter finds.
 *
 * A call looks at a bounded number of rows in the order of their ids, acts on at most max_jobs
 * of them and returns the id that it has reached; a caller that passes it as after_id goes on
 * there, until it is null.  So each call is a short transaction that holds few rows, and a job
 * that an act has moved is not met again.  A call that only counts also ends after some
 * hundredths of a second: a page waits for its answer.
 *
 * Nothing that keeps an act from one job stops the others.  A row that another session has
 * locked, a status that the act is not for, a key that a live job has: each is a conflict in
 * the answer.  An unforeseen error makes the call process its jobs one by one, and so does a
 * wait for a producer that has not committed the key, or for another session that has changed
 * the same record.
 */

create or replace function rota.act_on_jobs(
    act text, filter jsonb, arguments jsonb default '{}', max_jobs integer default 1000,
    after_id bigint default 0, dry_run boolean default false
) returns table (
        matched integer, changed integer, conflicts jsonb, samples jsonb, next_after_id bigint,
        dependants integer
    ) language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off
    set plan_cache_mode = force_custom_plan as $$
declare
    c_window constant integer := case when dry_run then 2500 else 1000 end;
    c_max_looked constant integer := case when dry_run then 50000 else 5000 end;
    c_began_at constant timestamptz := clock_timestamp();
    v_arguments jsonb; v_filter jsonb;
    v_ids bigint[] := '{}'::bigint[];
    v_found record; v_one record; v_id bigint;
    v_looked integer := 0;
    v_done bigint[] := '{}'::bigint[];
    v_before jsonb := '[]'::jsonb;
begin
    v_arguments := rota._check_act(act, arguments);
    v_filter := rota._check_filter(act, filter, v_arguments);
    perform rota._check_number('max_jobs', max_jobs, 1, 1000);
    perform rota._check_given('after_id', after_id is not null);
    perform rota._check_given('dry_run', dry_run is not null);

    next_after_id := after_id;
    while next_after_id is not null and v_looked < c_max_looked
      and case when dry_run then v_looked = 0
          or clock_timestamp() < c_began_at + interval '40 ms'
        else cardinality(v_ids) < max_jobs end loop
        select f.ids, f.last_id, f.looked into v_found
        from rota._matching_jobs(v_filter, act, next_after_id, c_window) as f;
        v_looked := v_looked + v_found.looked;
        v_ids := v_ids || v_found.ids;
        next_after_id := case when v_found.looked >= c_window then v_found.last_id end;
    end loop;
    if cardinality(v_ids) > max_jobs and not dry_run then
        v_ids := v_ids[:max_jobs];
        next_after_id := v_ids[max_jobs];
    end if;
    matched := cardinality(v_ids);
    samples := (
        select coalesce(jsonb_agg(jsonb_build_object('job_id', r.id, 'queue', r.queue,
            'job_type', r.job_type, 'status', r.status,
            'last_error', rota._cut(r.last_error, 200),
            'created_at', r.created_at) order by r.id), '[]')
        from rota.job_runs as r where r.id = any(v_ids[:10])
    );
    conflicts := rota._missing_jobs(act, v_filter, after_id);
    dependants := case when act in ('retry', 'cancel', 'erase') then (
        -- One may wait for several of these.
        select count(distinct d.job_id)::integer
        from rota._dependants(v_ids[:max_jobs],
            case act when 'retry' then 'cancelled' else 'blocked' end, 1000) as d
        where d.job_id <> all(v_ids)
    ) else 0 end;
    if dry_run then
        changed := 0;
        conflicts := conflicts || (
            select s.conflicts
            from rota._sort_out(act, v_ids[:max_jobs], v_arguments, null) as s
        );
        return next;
        return;
    end if;

    begin
        select d.done, act_on_jobs.conflicts || d.conflicts, d.before
        into v_done, conflicts, v_before from rota._act(act, v_ids, v_arguments, v_filter) as d;
    exception when others then
        if rota._is_no_fault_of_a_row(sqlstate) then raise; end if;
        foreach v_id in array v_ids loop
            begin
                select d.done, d.conflicts, d.before into v_one
                from rota._act(act, array[v_id], v_arguments, v_filter) as d;
                v_done := v_done || v_one.done;
                v_before := v_before || v_one.before;
                conflicts := conflicts || v_one.conflicts;
            exception when others then
                conflicts := conflicts || jsonb_build_object('job_id', v_id, 'reason', sqlerrm);
            end;
        end loop;
    end;
    changed := cardinality(v_done);
    if v_arguments @> '{"with_dependants": true}' then
        dependants := rota._retry_dependants(v_done);
    end if;
    if changed > 0 then
        perform rota._audit(act, case when act = 'erase'
                -- Not of whom.
                then jsonb_build_object('keys', array(select jsonb_object_keys(filter)))
                else filter end,
            v_done, rota._before_of(v_before, v_done), nullif(v_arguments, '{}'));
    end if;
    return next;
end $$;

comment on function rota.act_on_jobs is
    'Retry, cancel, discard, reschedule, set_priority, move, purge or erase the jobs that '
    'match a filter and come after an id, up to max_jobs of them; with dry_run only count them '
    'and report the conflicts of the first max_jobs, without a lock; returns how many matched '
    'and how many were changed, which were not and why, the first ten, the id to continue '
    'after, null at the end, and up to 1000 dependants: of a retry the others that were '
    'cancelled because of these, and stay so unless with_dependants is true, of a cancel or '
    'erase those that are cancelled with these; raises 22023.';

/* Of each act the arguments that it takes, the statuses that jobs may have, and those that are
 * looked for without a word of the caller, where these are not the same. */
create or replace function rota._acts()
    returns table (act text, takes text[], statuses text[], by_default text[])
    language sql immutable as $$
    select a.act, a.takes::text[], a.statuses::text[], a.by_default::text[]
    from (values ('retry',
            '{payload,merge,max_attempts,force,keep_run_at,spread,with_dependants}',
            '{failed,dead,queued,blocked,cancelled,succeeded,running}', '{failed,dead}'),
        ('cancel', '{reason}', '{blocked,queued,failed,running}', null),
        ('discard', '{}', '{dead}', null),
        ('reschedule', '{run_at,delay,spread}', '{blocked,queued,failed}', null),
        ('set_priority', '{priority}', '{blocked,queued,failed,running}', null),
        ('move', '{queue}', '{blocked,queued,failed}', null),
        ('purge', '{}', '{succeeded,cancelled,dead}', '{succeeded,cancelled}'),
        -- Who wants something erased hears of what runs.
        ('erase', '{}', '{blocked,queued,failed,succeeded,dead,cancelled}',
            '{blocked,queued,failed,running,succeeded,dead,cancelled}')
    ) as a (act, takes, statuses, by_default);
$$;

create or replace function rota._act_statuses(act text, arguments jsonb)
    returns text[] language sql immutable as $$
    select case when a.act = 'retry' and not arguments @> '{"force": true}'
        then array_remove(a.statuses, 'running') else a.statuses end
    from rota._acts() as a where a.act = _act_statuses.act;
$$;

create or replace function rota._check_act(act text, arguments jsonb)
    returns jsonb language plpgsql as $$
begin
    perform rota._check_choice('act', act, array(select a.act from rota._acts() as a));
    perform rota._check_json('arguments', arguments, 'object');
    perform rota._refuse('arguments', format('has %L, which %s does not take%s', k.name, a.act,
        coalesce(': it takes ' || nullif(array_to_string(a.takes, ', '), ''), '')))
    from rota._acts() as a cross join jsonb_object_keys(_check_act.arguments) as k (name)
    where a.act = _check_act.act and k.name <> all(a.takes) limit 1;
    if arguments ?& '{payload,merge}'::text[] then
        perform rota._refuse('arguments', 'must have payload or merge, and not both');
    end if;
    perform rota._refuse('arguments.' || k.name, k.problem)
    from (values ('payload', 'object', 'must be a JSON object'),
        ('merge', 'object', 'must be an object, whose values replace those of the payload'),
        ('force', 'boolean', 'must be true or false'),
        ('keep_run_at', 'boolean', 'must be true or false'),
        ('with_dependants', 'boolean', 'must be true or false')) as k (name, type, problem)
    where jsonb_typeof(_check_act.arguments -> k.name) <> k.type limit 1;
    perform rota._check_size('arguments.' || g.key, g.value, '')
    from jsonb_each(_check_act.arguments) as g where g.key in ('payload', 'merge');
    perform rota._check_reads('arguments.' || k.name, _check_act.arguments -> k.name, k.must_be)
    from (values ('max_attempts', 'a whole number'), ('priority', 'a whole number'),
        ('run_at', 'a time'), ('delay', 'a length of time'), ('spread', 'a length of time'))
        as k (name, must_be)
    where _check_act.arguments ? k.name;
    if arguments ? 'spread' then
        perform rota._check_interval('arguments.spread', (arguments ->> 'spread')::interval,
            '0', '100 years');
    end if;
    if arguments ? 'max_attempts' then
        perform rota._check_number('arguments.max_attempts',
            (arguments ->> 'max_attempts')::integer, 1, 2147483647);
    end if;
    if act = 'set_priority' then
        perform rota._check_priority('arguments.priority',
            (arguments ->> 'priority')::integer);
    elsif act = 'move' then
        perform rota._check_job_queue('arguments.queue', arguments ->> 'queue');
        perform rota._check_queues('operator', array[arguments ->> 'queue']);
    elsif act = 'reschedule' then
        if arguments ? 'run_at' = arguments ? 'delay' then
            perform rota._refuse('arguments.run_at', 'or delay must be given, and not both');
        elsif arguments ? 'delay' then
            perform rota._check_interval('arguments.delay',
                (arguments ->> 'delay')::interval, '0', '100 years');
        else
            perform rota._check_run_at('arguments.run_at',
                (arguments ->> 'run_at')::timestamptz);
        end if;
        -- The same moment for all jobs of all calls that give one, and for each call its own.
        arguments := arguments - 'delay' || jsonb_build_object('run_at', coalesce(
            (arguments ->> 'run_at')::timestamptz,
            rota.now() + rota._exact((arguments ->> 'delay')::interval)));
        perform rota._check_run_at('arguments.spread', (arguments ->> 'run_at')::timestamptz
            + (arguments ->> 'spread')::interval)
        where _check_act.arguments ? 'spread';
    end if;
    return arguments;
end $$;

/* Refuse what cannot be read as what it must be; it names its argument. */
create or replace function rota._check_reads(argument text, value jsonb, must_be text)
    returns void language plpgsql as $$
begin
    -- In {"days": 30} Postgres reads an interval of 30 seconds.
    if jsonb_typeof(value) in ('object', 'array') then raise data_exception; end if;
    case must_be
        when 'a whole number' then perform (value #>> '{}')::integer;
        when 'a time' then perform (value #>> '{}')::timestamptz;
        when 'a length of time' then perform (value #>> '{}')::interval;
    end case;
exception when data_exception then
    perform rota._refuse(argument, format('must be %s, got %s', must_be, case must_be
        when 'a whole number' then rota._cut(value::text, 80)
        else quote_literal(rota._cut(value #>> '{}', 80))
    end));
end $$;

/* A filter, checked, and with the statuses that are looked for.  If it names none, a retry is
 * of what failed, or was cancelled where the reason is given, a purge of what is not dead, and
 * any other act of all that it can be done to; but a caller that gives ids means these, and is
 * told of each why it was not possible. */
create or replace function rota._check_filter(act text, filter jsonb, arguments jsonb)
    returns jsonb language plpgsql as $$
declare
    c_texts constant text[] := '{queue,job_type,error,error_text,error_type,cancel_reason,key,'
        'idempotency_key,ordering_key,limit_key,definition,pipeline,stage,worker}'::text[];
    c_statuses constant text[] := rota._act_statuses(act, arguments);
    v_statuses constant text[] := case jsonb_typeof(filter -> 'status')
        when 'string' then array[filter ->> 'status']
        when 'array' then array(
            select jsonb_array_elements_text(_check_filter.filter -> 'status'))
    end;
begin
    perform rota._check_json('filter', filter, 'object');
    if filter = '{}' then
        perform rota._refuse('filter', 'must say which jobs: name ids, queue, job_type, status '
            'or another of its keys, or {"all": true}');
    elsif filter ? 'status'
      and (v_statuses <@ c_statuses and v_statuses <> '{}') is not true then
        perform rota._refuse('filter', format('must have as status one or more of %s, which '
            'are those that %s is for, got %s%s', array_to_string(c_statuses, ', '), act,
            filter -> 'status', case when act = 'retry' and 'running' = any(v_statuses)
                then ', which takes force: true' end));
    end if;
    perform rota._refuse('filter', coalesce(format('must have ' || k.what, e.key),
        format('has the unknown key %L: it may have ids, status, payload, headers, '
            'older_than, newer_than, is_due, is_discarded, %s or all', e.key,
            array_to_string(c_texts, ', '))))
    from jsonb_each(_check_filter.filter) as e
    left join (values
        (c_texts, 'a text as %s', '$ ? (@.type() == "string")'),
        ('{is_due,is_discarded}', 'true or false as %s', '$ ? (@.type() == "boolean")'),
        ('{ids}', 'a list of 1 to 1000 whole numbers as %s',
            '$ ? (@.type() == "array" && @.size() >= 1 && @.size() <= 1000 && !exists (@[*] ? '
            '(@.type() <> "number" || @ < 1 || @ > 9223372036854775807 || @.floor() <> @)))'),
        ('{payload,headers}',
            'an object as %s, which that of the job contains, or a list of them',
            '$ ? (@.type() == "object" || @.type() == "array" && @.size() >= 1 '
            '&& !exists (@[*] ? (@.type() <> "object")))'),
        ('{status,older_than,newer_than}', '', '$'),
        ('{all}', null, '$ ? (@ == true)')
    ) as k (keys, what, good) on e.key = any(k.keys)
    where jsonb_path_exists(e.value, ('strict ' || k.good)::jsonpath) is not true
      -- Of what failed without one.
      and not (e.key in ('error', 'error_type') and e.value = 'null')
    limit 1;
    perform rota._check_reads('filter.' || e.key, e.value, 'a length of time'),
        rota._check_interval('filter.' || e.key, (e.value #>> '{}')::interval, '0', '100 years')
    from jsonb_each(_check_filter.filter) as e where e.key in ('older_than', 'newer_than');
    return filter || jsonb_build_object('status', coalesce(v_statuses, case
        when filter ? 'ids'
            then '{blocked,queued,failed,running,succeeded,dead,cancelled}'::text[]
        when act = 'retry' and filter ? 'cancel_reason' then '{failed,dead,cancelled}'
        else coalesce((select a.by_default from rota._acts() as a
            where a.act = _check_filter.act), c_statuses)
    end));
end $$;

/* The jobs that a filter finds among so many behind an id, how many were looked at, and the
 * last of them.  Each table is left alone whose statuses are not wanted. */
create or replace function rota._matching_jobs(
    filter jsonb, act text, after_id bigint, max_rows integer, out ids bigint[],
    out last_id bigint, out looked integer
) language plpgsql stable as $$
declare
    c_allowed constant text[] := rota._allowed_queues('operator');
    c_statuses constant text[] := array(
        select jsonb_array_elements_text(_matching_jobs.filter -> 'status'));
    -- All that a table has are looked at, so that a rare one ends no window late.
    c_parts constant text[] := array(
        select unnest(p.statuses)
        from (values ('{blocked,queued,failed,running}'::text[]), ('{dead}'),
            ('{succeeded,cancelled}')) as p (statuses)
        where p.statuses && c_statuses
    );
    c_ids constant bigint[] := case when filter ? 'ids' then array(
        select jsonb_array_elements_text(_matching_jobs.filter -> 'ids')::numeric::bigint) end;
    c_error constant text := rota.fold_error(filter ->> 'error');
    -- In Turkish the small letter of I is another one than i, but an error may be in English.
    c_error_text constant text := lower(filter ->> 'error_text');
    c_ascii_error_text constant text := lower(filter ->> 'error_text' collate "C");
    -- What has to be the same; of an error type that may be null.
    c_same constant jsonb := (
        select jsonb_object_agg(e.key, e.value) from jsonb_each(_matching_jobs.filter) as e
        where e.key in ('error_type', 'cancel_reason', 'idempotency_key', 'ordering_key',
            'limit_key', 'definition', 'pipeline', 'stage', 'worker')
    );
    c_payload constant jsonb[] := array(
        select jsonb_path_query(_matching_jobs.filter, '$.payload[*]'));
    c_headers constant jsonb[] := array(
        select jsonb_path_query(_matching_jobs.filter, '$.headers[*]'));
    c_before constant timestamptz := rota.now() - (filter ->> 'older_than')::interval;
    c_since constant timestamptz := rota.now() - (filter ->> 'newer_than')::interval;
    c_from constant timestamptz := coalesce(c_since, '-infinity');
    c_to constant timestamptz := coalesce(c_before, 'infinity');
    v_are_few boolean := filter ? 'queue' and 'queued' <> all(c_parts)
        and not filter ? 'ids';
begin
    v_are_few := v_are_few and (
        select count(*) <= 10000
        from (
            select from rota.finished_jobs as f
            where f.queue = filter ->> 'queue' and f.finished_at > c_from
              and f.finished_at <= c_to and f.status = any(c_parts)
            limit 10001
        ) as a
    );
    select coalesce(array_agg(w.id order by w.id) filter (where w.status = any(c_statuses)
            and (c_allowed is null or w.queue = any(c_allowed))
            and (not filter ? 'queue' or w.queue = filter ->> 'queue')
            and (not filter ? 'job_type' or w.job_type = filter ->> 'job_type')
            and (not filter ? 'key'
                or filter ->> 'key' in (w.idempotency_key, w.ordering_key, w.limit_key))
            and (c_same is null or jsonb_build_object('error_type', w.error_type,
                'cancel_reason', w.cancel_reason, 'idempotency_key', w.idempotency_key,
                'ordering_key', w.ordering_key, 'limit_key', w.limit_key,
                'definition', w.definition, 'pipeline', w.pipeline, 'stage', w.stage,
                'worker', w.locked_by) @> c_same)
            and (not filter ? 'is_due'
                or (w.run_at <= rota.now()) = (filter ->> 'is_due')::boolean)
            and (not filter ? 'is_discarded'
                or (w.discarded_at is not null) = (filter ->> 'is_discarded')::boolean)
            and (c_before is null or w.since <= c_before)
            and (c_since is null or w.since > c_since)
            and (act <> 'discard' or w.discarded_at is null)
            -- What carries a job to another database has a copy of its payload.
            and (w.payload @> all(c_payload) or act = 'erase' and w.job_type = 'rota.forward'
                and w.payload -> 'payload' @> all(c_payload))
            and (c_headers = '{}' or w.headers @> all(c_headers))
            and (c_error_text is null or strpos(lower(w.last_error), c_error_text) > 0
                or strpos(lower(w.last_error collate "C"), c_ascii_error_text) > 0)
            -- What is folded already may fold once more; every screen shows the type in front.
            and (c_error is null
                or rota.fold_error(w.last_error) in (c_error, filter ->> 'error')
                or rota.fold_error(w.error_type || ': ' || w.last_error)
                    in (c_error, filter ->> 'error'))
            and (c_error is not null or not filter ? 'error' or w.last_error is null)), '{}'),
        max(w.id), count(*)::integer
    into ids, last_id, looked
    from (
        select r.*, coalesce(r.finished_at, r.created_at) as since from rota._runs as r
        where r.id > _matching_jobs.after_id and (c_ids is null or r.id = any(c_ids))
          and r.status = any(c_parts)
          and ('queued' = any(c_parts) or r.finished_at is not null)
          and (not v_are_few or r.queue = filter ->> 'queue'
            and r.finished_at > c_from and r.finished_at <= c_to)
        -- By no index of ids, or those of all queues were read.
        order by case when v_are_few then r.id + 0 else r.id end limit max_rows
    ) as w;
end $$;

/* Those of the ids that a filter names of which there is no job, told by the first call; and
 * what is to be erased by its payload, and would escape while it is on its way. */
create or replace function rota._missing_jobs(act text, filter jsonb, after_id bigint)
    returns jsonb language sql stable as $$
    select coalesce(jsonb_agg(jsonb_build_object('job_id', i.id, 'is_missing', true, 'reason',
        coalesce((
            select format(case when t.new_job_id is null then 'on its way to database %s'
                else 'in database %s now, as job %s' end, t.database, t.new_job_id)
            from rota.moved_jobs as t where t.job_id = i.id
        ), 'not found')) order by i.id), '[]')
    from (
        select f::numeric::bigint as id
        from jsonb_path_query(_missing_jobs.filter, '$.ids[*]') as f where after_id = 0
        union
        select t.job_id from rota.moved_jobs as t
        where t.new_job_id is null and act = 'erase' and filter ? 'payload' and after_id = 0
          and t.job -> 'payload'
            @> all(array(select jsonb_path_query(_missing_jobs.filter, '$.payload[*]')))
          and (t.job ->> 'queue' = any(rota._allowed_queues('operator'))) is not false
    ) as i
    cross join (select rota._allowed_queues('operator') as queues) as a
    where not exists (
        select from rota._runs as r
        where r.id = i.id and (a.queues is null or r.queue = any(a.queues))
    );
$$;

/* Act on these jobs: which it was done to, what they were before, and why not to the others. */
create or replace function rota._act(
    act text, job_ids bigint[], arguments jsonb, filter jsonb, out done bigint[],
    out conflicts jsonb, out before jsonb
) language plpgsql set lock_timeout = '50ms' as $$
declare
    c_keeps_run_at constant boolean := arguments @> '{"keep_run_at": true}';
    v_payload jsonb;
begin
    select s.done, s.conflicts, s.before into done, conflicts, before
    from rota._sort_out(act, job_ids, arguments, filter) as s;
    if done = '{}' then return; end if;

    case act
        when 'retry' then
            v_payload := rota._edit_jobs(done, arguments);
            if v_payload is not null then
                before := jsonb_set(before, '{0,payload}', v_payload);
            end if;
            perform rota._requeue(j.id, c_keeps_run_at)
            from rota.jobs as j where j.id = any(done);
            perform rota._restore_jobs(done, c_keeps_run_at);
            if arguments ? 'spread' then
                perform rota._change_jobs(array(
                        select j.id from rota.jobs as j
                        where j.id = any(done) and j.run_at <= rota.now()
                          -- One that would expire meanwhile begins at once.
                          and (j.expires_at
                            <= rota.now() + (arguments ->> 'spread')::interval) is not true
                    ), rota.now(), spread => (arguments ->> 'spread')::interval);
            end if;
        when 'cancel' then perform rota._cancel_jobs(done, arguments ->> 'reason');
        when 'discard' then
            update rota.finished_jobs_dead as f
            set discarded_at = rota.now() where f.id = any(done);
        when 'reschedule', 'set_priority', 'move' then
            perform rota._change_jobs(done, (arguments ->> 'run_at')::timestamptz,
                (arguments ->> 'priority')::integer, arguments ->> 'queue',
                (arguments ->> 'spread')::interval);
        when 'purge' then
            -- What was not counted yet still will be (maintenance/statistics.sql).
            insert into rota.restored_ends (queue, job_type, status, waited, ran, finished_at,
                ended_by)
            select e.queue, e.job_type, e.outcome, e.waited, e.ran, e.ended_at, e.ended_by
            from rota._ends as e
            where e.job_id = any(done) and e.ended_at > rota._counted_until();
            perform rota._remove_rows('job_errors', 'job_id', done),
                rota._remove_rows('stage_runs', 'job_id', done),
                rota._remove_rows('finished_jobs', 'id', done);
            -- So that what these depended on can be purged, too.  Only if there is any: nobody
            -- else purges while a transaction is open that may have added a dependant.
            if exists (select from rota.dependencies as d where d.job_id = any(done)) then
                delete from rota.dependencies as d where d.job_id = any(done);
            end if;
        when 'erase' then perform rota._erase_jobs(done);
    end case;
end $$;

/* To which of these jobs an act can be done, what they are before it, and why it cannot be done
 * to the others, such as those that another session has locked, or that the filter does not
 * find once they are locked.  A dry run has no filter and locks none: it reads once which
 * transactions hold rows; it does not see a row that several hold together. */
create or replace function rota._sort_out(
    act text, job_ids bigint[], arguments jsonb, filter jsonb, out done bigint[],
    out conflicts jsonb, out before jsonb
) language plpgsql as $$
declare
    v_holders xid[] := '{}'::xid[];
    v_ids bigint[] := job_ids;
    -- What the act replaces by a value that is the same for all.
    c_replaced constant text := coalesce((
        select k.name from jsonb_object_keys(_sort_out.arguments) as k (name)
        where k.name in ('queue', 'priority', 'run_at', 'max_attempts')), 'status');
    c_statuses constant text[] := rota._act_statuses(act, arguments);
    c_counted_until constant timestamptz := rota._counted_until();
    -- Before it is asked who waits: what is over by now is seen then.
    c_is_open constant boolean := act = 'purge'
        and rota._open_writers(array['rota.dependencies'::regclass]) <> '{}';
begin
    if filter is null then
        v_holders := array(
            select l.transactionid from pg_locks as l
            where l.locktype = 'transactionid' and l.granted
              and l.pid is distinct from pg_backend_pid()
        );
    else
        v_ids := array(
            select j.id from rota.jobs as j where j.id = any(_sort_out.job_ids)
            for update skip locked
        ) || array(
            select f.id from rota.finished_jobs as f where f.id = any(_sort_out.job_ids)
            for update skip locked
        );
        -- What was found may be in another queue by now, or have succeeded.
        v_ids := (
            select m.ids from rota._matching_jobs(_sort_out.filter
                || jsonb_build_object('ids', v_ids), act, 0, cardinality(v_ids)) as m
        );
    end if;
    with known as (
        select l.*, min(l.id) over (partition by l.key, l.key_scope) as first_of_key
        from (
            select j.id, j.status, j.job_type, j.queue, j.priority, j.run_at, j.max_attempts,
                jsonb_typeof(coalesce(r.payload, j.payload)) as payload_type,
                null::text as key, null::text as key_scope, null::timestamptz as ended_at
            from rota.jobs as j
            left join lateral (
                select n.job -> 'payload' as payload from rota.reruns as n
                where n.job_id = j.id order by n.id desc limit 1
            ) as r on j.idempotency_key is not null
            where j.id = any(v_ids) and j.xmax <> all(v_holders)
            union all
            select f.id, f.status, null, null, null, null, f.max_attempts,
                rota._payload_type(f.payload), f.idempotency_key,
                coalesce('pipeline ' || f.pipeline, f.job_type), f.finished_at
            from rota.finished_jobs as f where f.id = any(v_ids) and f.xmax <> all(v_holders)
        ) as l
    ), judged as materialized (
        select i.id, jsonb_strip_nulls(jsonb_build_object('status', k.status, c_replaced,
                to_jsonb(k) -> c_replaced)) as before, h.pid, case
                when h.words is not null then 'locked by ' || h.words
                when k.id is null then 'locked, or not what the filter finds by now'
                when k.status <> all(c_statuses) then concat('it is ', k.status, case
                    when act = 'retry' then ': force takes it from its worker' end)
                -- No worker knows what to do with it, and no act could move it back.
                when act = 'move' and k.job_type = 'rota.forward'
                    then 'it carries a job to another database'
                when act = 'retry' and arguments ? 'merge' and k.payload_type <> 'object'
                    then 'its payload is no object to merge with'
                when act = 'retry' and k.payload_type = 'erased' and not arguments ? 'payload'
                    then 'it was erased: without another payload it cannot run'
                when act = 'retry' and k.key is not null
                    then 'its idempotency_key is taken by job '
                        -- As _find_keyed() has it, which here would be planned for each.
                        || coalesce((select max(j.id) from rota.jobs as j
                                where j.idempotency_key = k.key and coalesce(
                                    'pipeline ' || j.pipeline, j.job_type) = k.key_scope),
                            nullif(k.first_of_key, i.id))::text
                when act = 'purge'
                  and exists (select from rota.dependencies as d where d.parent_id = i.id)
                    then 'other jobs depend on it'
                when act = 'purge'
                  and exists (select from rota.halted_keys as s where s.job_id = i.id)
                    then 'its ordering key is halted by it'
                when act = 'purge'
                  and current_setting('transaction_isolation') <> 'read committed'
                    then 'other jobs may wait for it: purge it in read committed'
                when c_is_open
                  and (k.status <> 'succeeded' or k.ended_at >= c_counted_until)
                    then 'an open transaction may let jobs wait for it: try again'
            end as reason
        from unnest(_sort_out.job_ids) as i (id)
        left join known as k on k.id = i.id
        left join lateral (
            select r.pid, r.words from rota.jobs as l cross join rota._row_holder(l.xmax) as r
            where k.id is null and l.id = i.id and r.pid is distinct from pg_backend_pid()
            limit 1
        ) as h on true
    )
    select coalesce(array_agg(j.id order by j.id) filter (where j.reason is null), '{}'),
        coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object('job_id', j.id, 'reason',
            j.reason, 'pid', j.pid)) order by j.id) filter (where j.reason is not null), '[]'),
        coalesce(jsonb_agg(j.before order by j.id) filter (where j.reason is null), '[]')
    into done, conflicts, before from judged as j;
end $$;

/* What the record keeps of jobs as they were: how many had which status; and of what was
 * replaced, of one job the value, of many how many had which of the 20 most frequent, of times
 * the first and the last; of up to 100 values also which job had which, for taking it back. */
create or replace function rota._before_of(jobs jsonb, job_ids bigint[])
    returns jsonb language plpgsql stable as $$
declare
    c_statuses constant jsonb := (
        select jsonb_object_agg(s.status, s.jobs)
        from (
            select b.job ->> 'status' as status, count(*) as jobs
            from jsonb_array_elements(_before_of.jobs) as b (job) group by 1
        ) as s
    );
    c_replaced constant text := (
        select k.name from jsonb_object_keys(_before_of.jobs -> 0) as k (name)
        where k.name not in ('status', 'payload')
    );
begin
    if jsonb_array_length(jobs) = 1 then
        return c_statuses || (jobs -> 0) - 'status';
    elsif c_replaced is null then
        return c_statuses;
    end if;
    return c_statuses || (
        with kinds as (
            select b.job ->> c_replaced as value, count(*) as jobs,
                jsonb_agg(_before_of.job_ids[b.place] order by b.place) as ids,
                row_number() over (order by count(*) desc, b.job ->> c_replaced) as place
            from jsonb_array_elements(_before_of.jobs) with ordinality as b (job, place)
            group by 1
        ), frequent as (
            select case when k.place <= 20 then k.value else '(others)' end as value,
                sum(k.jobs) as jobs
            from kinds as k where c_replaced <> 'run_at' group by 1
        )
        select jsonb_build_object(c_replaced, coalesce(
                (select jsonb_object_agg(f.value, f.jobs) from frequent as f),
                jsonb_build_object(
                    'first', min(k.value::timestamptz) filter (where c_replaced = 'run_at'),
                    'last', max(k.value::timestamptz) filter (where c_replaced = 'run_at'))))
            || case when c_replaced <> 'max_attempts' and count(*) between 2 and 100
                then jsonb_build_object(c_replaced || '_of', jsonb_object_agg(k.value, k.ids))
                else '{}' end
        from kinds as k
    );
end $$;

/* Change payload and max_attempts before a retry.  The attempts that failed keep the payload
 * that they had; that of a single job is also returned, if it is not large. */
create or replace function rota._edit_jobs(job_ids bigint[], arguments jsonb)
    returns jsonb language plpgsql as $$
declare
    v_payload jsonb;
begin
    if not arguments ?| '{payload,merge,max_attempts}'::text[] then return null; end if;
    if arguments ?| '{payload,merge}'::text[] then
        with runs as materialized (
            select r.id, r.payload from rota._runs as r where r.id = any(_edit_jobs.job_ids)
        ),
        kept as (
            update rota.job_errors as e
            set payload = r.payload from runs as r
            where e.job_id = any(_edit_jobs.job_ids) and r.id = e.job_id and e.payload is null
        )
        select r.payload into v_payload from runs as r
        where cardinality(_edit_jobs.job_ids) = 1 and octet_length(r.payload::text) <= 65536;
    end if;
    perform rota._begin_rerun(array(
        select j.id from rota.jobs as j where j.id = any(_edit_jobs.job_ids)),
        keeps_run_at => true);
    update rota.jobs as j
    set max_attempts = coalesce((_edit_jobs.arguments ->> 'max_attempts')::integer,
            j.max_attempts),
        payload = coalesce(_edit_jobs.arguments -> 'payload',
            j.payload || (_edit_jobs.arguments -> 'merge'), j.payload)
    where j.id = any(_edit_jobs.job_ids);
    update rota.finished_jobs as f
    set max_attempts = coalesce((_edit_jobs.arguments ->> 'max_attempts')::integer,
            f.max_attempts),
        payload = coalesce(_edit_jobs.arguments -> 'payload',
            f.payload || (_edit_jobs.arguments -> 'merge'), f.payload)
    where f.id = any(_edit_jobs.job_ids);
    return v_payload;
end $$;

/* Erase personal data from jobs: payload, result, headers, keys, and the texts of errors and
 * acts.  A job that waits cannot run without its payload, so it is cancelled first. */
create or replace function rota._erase_jobs(job_ids bigint[])
    returns void language plpgsql
    -- The index on the jobs of a record knows no other kind of scan.
    set enable_bitmapscan = on as $$
declare
    -- What filters and arguments of acts may say of somebody.
    c_texts constant text[] := '{payload,merge,headers,reason,error,error_text,key,'
        'idempotency_key,ordering_key,limit_key}'::text[];
begin
    -- A run that is to follow one that has ended is another job.
    perform rota._cancel_jobs(array(
        select j.id from rota.jobs as j where j.id = any(_erase_jobs.job_ids)), 'erased');
    update rota.finished_jobs as f
    set payload = '{"erased": true}', result = null, headers = null, stage_input = null,
        idempotency_key = null, limit_key = null, progress_message = null,
        -- One that is halted goes on by its key.
        ordering_key = case when exists (
            select from rota.halted_keys as h where h.job_id = f.id) then f.ordering_key end,
        last_error = case when f.last_error is not null then 'erased' end,
        cancel_reason = case when f.cancel_reason is not null then 'erased' end,
        discarded_at = coalesce(f.discarded_at,
            case when f.status = 'dead' then rota.now() end),
        updated_at = rota.now()
    where f.id = any(_erase_jobs.job_ids);
    update rota.job_errors as e
    set message = 'erased', stack = null, payload = null
    where e.job_id = any(_erase_jobs.job_ids);
    update rota.stage_runs as r
    set stage_input = null, result = null where r.job_id = any(_erase_jobs.job_ids);
    update rota.effects as e set result = null where e.job_id = any(_erase_jobs.job_ids);
    update rota.audit_log as a
    set before = a.before - 'payload', after = a.after - c_texts, filter = a.filter - c_texts
    where a.job_ids && _erase_jobs.job_ids
      and (a.before ? 'payload' or a.after ?| c_texts or a.filter ?| c_texts);
end $$;
