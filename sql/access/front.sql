/*
 * access/front.sql -- one database that forwards calls to many.
 *
 * A front is a database without jobs.  It has functions with the names and arguments of those
 * that enqueue jobs or act on one job, and each forwards its call to one of many databases,
 * the shards, by PL/Proxy.  front_statements() generates it from the catalog of a shard, so the
 * front cannot differ from the functions themselves.
 *
 * Which shard.  An id contains the number of its database.  A key hashes to one of 1024 slots,
 * and each slot belongs to a shard; jobs without keys go to any.  Jobs that belong together
 * have one key, or a shard_key that alone decides, as an argument or among the headers.  The
 * front refuses keys of two slots, since they would part when a shard is added.
 *
 * When a slot goes to another shard, no job moves.  The slot remembers where it was: while a
 * key is live there, calls with that key go there, and all others go to the new shard.  Those
 * for a queue that moves from there go there too, and on to where their key may be.  No key is
 * live in two shards: a call holds the lock of its slot, shared, until its transaction ends; a
 * slot changes hands only while no call holds it; and calls with one key come one by one where
 * its slot was elsewhere before.
 *
 * The shard commits a call at once: it is not part of the caller's transaction in the front.
 * The time limit of each call is statement_timeout, and the front refuses calls without one.
 */

create or replace function rota.find_live_keys(jobs jsonb, moving boolean default false)
    returns integer[] language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
begin
    perform rota._check_json('jobs', jobs, 'array', 20000);
    perform rota._check_given('moving', moving is not null);
    return array(
        select j.place::integer
        from (
            select e.place, e.job ->> 'idempotency_key' as idempotency_key,
                e.job ->> 'ordering_key' as ordering_key,
                coalesce(e.job ->> 'queue', 'default') as queue,
                coalesce('pipeline ' || (e.job ->> 'pipeline'), e.job ->> 'job_type') as scope
            from jsonb_array_elements(find_live_keys.jobs) with ordinality as e (job, place)
        ) as j
        where case when find_live_keys.moving
            then coalesce(j.idempotency_key, j.ordering_key) is not null
              and rota._moves_away(j.queue)
            else rota._find_keyed(j.idempotency_key, j.scope) is not null
              -- Not by exists: to look for one key, the planner may read all.
              or (
                select k.expires_at from rota.idempotency_keys as k
                where k.idempotency_key = j.idempotency_key and k.key_scope = j.scope
                  and k.expires_at > rota.now()
            ) is not null or rota._key_head(j.ordering_key, 0) is not null
              or rota._first_blocked(j.ordering_key, 0) is not null
              or (
                select h.job_id from rota.halted_keys as h
                where h.ordering_key = j.ordering_key
            ) is not null
              -- In transit: what follows in its line must not be there before it.
              or j.ordering_key in (
                select t.job ->> 'ordering_key' from rota.moved_jobs as t
                where t.new_job_id is null
            ) or (j.idempotency_key, j.scope) in (
                select t.job ->> 'idempotency_key', t.job ->> 'job_type'
                from rota.moved_jobs as t where t.new_job_id is null
            )
        end
        order by j.place
    );
end $$;

comment on function rota.find_live_keys is
    'Which of up to 20000 jobs, given as to enqueue_many(), have an idempotency_key or '
    'ordering_key that is live in this database, in transit from it or still counts here, or '
    'if moving, that may be anywhere since their queue moves from here: their places, from 1; '
    'for a front; raises 22023.';

create or replace function rota.front_statements(
    databases jsonb, time_limit interval default '5 seconds'
) returns setof text language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_databases(databases);
    perform rota._check_interval('time_limit', time_limit, '100 milliseconds', '1 hour');
    return query select format('select rota_front.set_shards(%L, %L, %L);', databases,
        rota.version(), time_limit);
    return query select f.statement from rota._front_functions() as f (statement);
    return query select v.statement from rota._front_views(databases) as v (statement);
    return query select format('select rota_front.grant_again(%L);', (
        select jsonb_agg(jsonb_build_object('access', a.access, 'name', a.name))
        from rota._access() as a where a.kind in ('function', 'procedure')
    ));
end $$;

comment on function rota.front_statements is
    'The statements that make a database a front of many, or update it: databases is an array '
    'of objects with number, host, port and dbname, and time_limit ends each call; a superuser '
    'of PostgreSQL 15 or later with plproxy runs them; raises 22023.';

create or replace function rota._check_databases(databases jsonb)
    returns void language plpgsql as $$
begin
    if jsonb_typeof(databases) is distinct from 'array' or databases = '[]' then
        perform rota._refuse('databases', 'must be an array of objects with number, host, port '
            'and dbname');
    end if;
    perform rota._refuse(format('databases[%s]', d.place - 1), 'must have a number from 0 to '
        '1023 and a dbname, and may have host, hostaddr, port, sslmode, target_session_attrs '
        'and options')
    from jsonb_array_elements(_check_databases.databases) with ordinality as d (one, place)
    where jsonb_typeof(d.one) <> 'object'
      or jsonb_typeof(d.one -> 'number') is distinct from 'number'
      or (d.one ->> 'number') !~ '^[0-9]{1,4}$' or (d.one ->> 'number')::integer > 1023
      or coalesce(d.one ->> 'dbname', '') = ''
      or exists (
        select from jsonb_each(d.one) as k
        where k.key <> all('{number,host,hostaddr,port,dbname,sslmode,target_session_attrs,'
            'options}')
          or jsonb_typeof(k.value) not in ('string', 'number')
    ) limit 1;
    perform rota._refuse('databases', 'must have different numbers')
    from jsonb_array_elements(_check_databases.databases) as d
    having count(distinct d ->> 'number') < count(*);
end $$;

/* The functions of a front, each as those of this database are declared. */
create or replace function rota._front_functions()
    returns setof text language plpgsql stable as $$
declare
    -- Of the functions that are made.
    c_pinned constant text := 'set ' || 'search_path = pg_catalog, pg_temp';
    v_function record; v_route text; v_call text;
begin
    for v_function in
        select p.oid, p.proname::text as name, p.prokind, p.proretset,
            format_type(p.prorettype, null) as result_type,
            pg_get_function_arguments(p.oid) as arguments,
            pg_get_function_result(p.oid) as result,
            a.names, a.private, a.named, a.passed, a.access
        from (
            select x.name, array_agg(x.access) as access
            from rota._access() as x where x.kind in ('function', 'procedure') group by 1
        ) as x
        join pg_proc as p on p.proname = x.name and p.pronamespace = 'rota'::regnamespace
        cross join lateral (
            select coalesce(array_agg(n.name), '{}') as names, x.access,
                coalesce(string_agg(format('a%s %s', n.place, format_type(n.type, null)), ', '
                    order by n.place), '') as private,
                coalesce(string_agg(format('%s => a%s', n.name, n.place), ', '
                    order by n.place), '') as named,
                coalesce(string_agg(format(', %s.%s', p.proname, n.name), ''
                    order by n.place), '') as passed
            from unnest(p.proargnames, p.proargtypes::oid[]) with ordinality
                as n (name, type, place)
            where n.place <= p.pronargs
        ) as a
        where p.proname <> 'version' order by p.proname
    loop
        v_route := case
            when v_function.name = 'enqueue_many'
            then 'rota_front.shard_for(v_shard, jobs, shard_key)'
            when v_function.name = 'enqueue_to'
            then 'rota_front.shard_of_number(''database'', database)'
            when v_function.access && '{producer}' and v_function.names && '{idempotency_key}'
            then format('rota_front.shard_for(v_shard, jsonb_build_array(jsonb_build_object('
                '%s)), shard_key)', (
                select string_agg(format('%L, %s.%s', n, v_function.name, n), ', ')
                from unnest(v_function.names) as n
                where n in ('job_type', 'queue', 'pipeline', 'idempotency_key', 'ordering_key',
                    'limit_key', 'depends_on', 'blocks', 'headers')
            ))
            when v_function.names[1] = 'job_id'
              -- Which keys come back with the dependants the front cannot know.
              and v_function.name not in ('wait_for_result', 'retry_with_dependants')
              and not v_function.access && '{worker}'
            then 'coalesce(v_shard, rota_front.shard_of_job(job_id))'
            when v_function.name in ('next_run', 'upcoming_runs', 'describe_schedule',
                'database_number_of', 'fold_error', 'now')
            then '(select min(s.ordinal) from rota_front.shards as s)'
        end;
        if v_route is null then
            return query select format($f$
    create %1$s rota.%2$s(%3$s)%4$s language plpgsql
    %5$s as $body$
begin
    raise exception using errcode = '0A000', message = '%2$s() is not available in a front',
        hint = 'Connect to the databases behind it; rota takes --databases FILE.';
end;
$body$;$f$,
                case v_function.prokind when 'p' then 'procedure' else 'function' end,
                v_function.name, v_function.arguments,
                case when v_function.prokind = 'f'
                    then E'\n    returns ' || v_function.result else '' end, c_pinned);
            continue;
        end if;

        return query select format($f$
    create function rota._ask_%1$s(shard integer%2$s)
    returns %3$s language plproxy as $body$
    cluster 'rota_shards';
    run on shard;
    select %4$srota.%1$s(%5$s);
$body$;$f$,
            v_function.name, case when v_function.private <> '' then ', ' end
                || v_function.private,
            case when v_function.result_type = 'void' then 'text' else v_function.result end,
            case when v_function.proretset then '* from ' else '' end, v_function.named
        );
        v_call := format('rota._ask_%s(v_shard%s)', v_function.name, v_function.passed);
        return query select format($f$
    create function rota.%1$s(%2$s%3$s)
    returns %4$s language plpgsql
    %8$s as $body$
declare
    v_shard integer; v_state text; v_message text; v_detail text; v_hint text;
begin
    perform rota_front.check_call();
    -- Each move of its queue leads to the next database, and none back.
    for v_try in 1..100 loop
        begin
            v_shard := %5$s;%6$s
            %7$s
        exception when others then
            get stacked diagnostics v_state = returned_sqlstate, v_message = message_text,
                v_detail = pg_exception_detail, v_hint = pg_exception_hint;
            v_shard := rota_front.raise_of_shard(v_state, v_message, v_detail, v_hint);
        end;
    end loop;
    raise exception using
        errcode = 'RT016', message = 'the databases that the job has left form a cycle',
        hint = 'Search each of them.';
end;
$body$;$f$,
            v_function.name, v_function.arguments,
            case when v_route like '%shard_key)' then ', shard_key text default null'
                else '' end,
            v_function.result, v_route,
            case when v_function.name in ('retry_job', 'restart_pipeline')
                then E'\n            perform rota_front.check_return(v_shard, job_id);'
                else '' end,
            case
                when v_function.proretset
                then format('return query select * from %s; return;', v_call)
                when v_function.result_type = 'void' then format('perform %s; return;', v_call)
                else format('return %s;', v_call)
            end, c_pinned);
    end loop;
end $$;

/* What observers read, of each shard and of all of them, as the views of this database are. */
create or replace function rota._front_views(databases jsonb)
    returns setof text language plpgsql stable as $$
declare
    v_view record;
begin
    for v_view in
        select c.relname as name, string_agg(concat(quote_ident(a.attname), ' ',
            format_type(a.atttypid, a.atttypmod),
            -- As there, or what a shard has sorted would not be in order here.
            case a.attcollation when '"C"'::regcollation then ' collate "C"' end
        ), ', ' order by a.attnum) as columns
        from rota._access() as x
        join pg_class as c on c.relname = x.name and c.relnamespace = 'rota'::regnamespace
        join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
        where x.kind = 'view' group by c.relname order by c.relname
    loop
        return query select format('create foreign table rota_%s.%I (%s) server rota_%1$s '
            'options (schema_name ''rota'');', d ->> 'number', v_view.name, v_view.columns)
        from jsonb_array_elements(databases) as d;
        return query
        select format('create view rota_all.%I with (security_invoker = true) as %s;',
            v_view.name, string_agg(format('select %s as shard, v.* from rota_%1$s.%I as v',
                d ->> 'number', v_view.name), ' union all ' order by d ->> 'number'))
        from jsonb_array_elements(databases) as d;
    end loop;
end $$;
