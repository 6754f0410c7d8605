/*
 * front.sql -- make this database a front of many, or update it.
 *
 *     psql -f sql/front.sql FRONT
 *     psql -XAtc "select rota.front_statements('[...]')" SHARD | psql FRONT
 *
 * Or `rota front make`, which does both.  This file has the parts that do not depend on the
 * functions of the shards: where a call goes (see access/front.sql), and how errors are passed
 * on.  They are in the schema rota_front, with the state of the front.  front_statements()
 * makes the schema rota, with the functions to call, and rota_all, with the views.
 */

\set ON_ERROR_STOP on

begin;
set local client_min_messages = warning;
set local lock_timeout = '5s';

-- Of two who make it at once the second waits here, and in set_shards().
do $$ begin perform pg_advisory_xact_lock(hashtextextended('rota.front', 0)); end $$;

create schema if not exists rota_front;
-- They stay when the front is made again: a call that is just looking for a function must not
-- find that its schema is gone.
create schema if not exists rota;
create schema if not exists rota_all;
revoke all on schema rota_front from public;
create extension if not exists plproxy;
create extension if not exists postgres_fdw;

create table if not exists rota_front.shards (
    number integer primary key,
    ordinal integer not null unique
);
create table if not exists rota_front.slots (
    slot integer primary key check (slot between 0 and 1023),
    number integer not null references rota_front.shards,
    earlier integer[] not null default '{}'
);
create table if not exists rota_front.grants (
    role name not null,
    access text not null check (access in ('producer', 'operator')),
    primary key (role, access)
);
create sequence if not exists rota_front.lock_seed;
create table if not exists rota_front.access (
    access text not null,
    name text not null,
    primary key (access, name)
);
comment on table rota_front.shards is 'The databases behind this front.';
comment on table rota_front.slots is
    'Which database the keys of a slot go to, unless they are live in an earlier one.';
comment on table rota_front.grants is 'Which role may do what through this front.';
comment on table rota_front.access is 'Which function is for whom, as in the shards.';
comment on sequence rota_front.lock_seed is
    'A random number, set once, without which no session can tell the locks of keys.';
do $$ begin
    perform setval('rota_front.lock_seed',
        1 + (hashtextextended(gen_random_uuid()::text, 0) & ((1::bigint << 60) - 1)))
    from rota_front.lock_seed as s where not s.is_called;
end $$;

/* Refuse a call, mostly for an argument.  A hint or detail that is empty is null for the
 * caller, as it would be of a shard. */
create or replace function rota_front.refuse(
    message text, hint text default '', code text default '22023', detail text default ''
) returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if detail <> '' and hint <> '' then
        raise exception using
            errcode = code, message = message, detail = detail, hint = hint;
    elsif detail <> '' then
        raise exception using errcode = code, message = message, detail = detail;
    elsif hint <> '' then
        raise exception using errcode = code, message = message, hint = hint;
    end if;
    raise exception using errcode = code, message = message;
end $$;

create or replace function rota_front.set_server(server name, wrapper name, options jsonb)
    returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_known constant text[] := (
        select coalesce(s.srvoptions, '{}') from pg_foreign_server as s where s.srvname = server
    );
begin
    execute format(case when v_known is null
        then 'create server %I foreign data wrapper %I options (%s)'
        else 'alter server %1$I options (%3$s)' end, server, wrapper, (
        select string_agg(format('%s%s %L', case
            when v_known is null then ''
            when exists (select from unnest(v_known) as k where k like o.key || '=%')
            then 'set ' else 'add ' end, o.key, o.value), ', ' order by o.key)
        from jsonb_each_text(options) as o
    ));
end $$;

create or replace function rota_front.check_database()
    returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if to_regclass('rota.jobs') is not null then
        perform rota_front.refuse('this database has a rota with jobs of its own',
            'A front is a database without jobs: create one for it.', '55000');
    elsif current_setting('server_version_num')::integer < 150000 then
        perform rota_front.refuse('a front needs PostgreSQL 15 or later', code => '0A000');
    end if;
end $$;

/* Drop what set_shards() and front_statements() make, unless something of others needs it. */
create or replace function rota_front.drop_made()
    returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_drop text; v_others text;
begin
    for v_drop in
        select format('drop %s %s', m.kind, string_agg(m.name, ', '))
        from (
            select case c.relkind when 'v' then 'view' else 'foreign table' end,
                c.oid::regclass::text
            from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
            where n.nspname = 'rota_all' and c.relkind = 'v'
              or n.nspname ~ '^rota_[0-9]+$' and c.relkind = 'f'
            union all
            select 'routine', p.oid::regprocedure::text
            from pg_proc as p where p.pronamespace = to_regnamespace('rota')
        ) as m (kind, name)
        -- The views are of the foreign tables.
        group by m.kind order by m.kind desc
    loop
        execute v_drop;
    end loop;
exception when dependent_objects_still_exist then
    get stacked diagnostics v_others = pg_exception_detail;
    perform rota_front.refuse('these use what the front is made of, and would go with it: '
        || left(v_others, 500),
        'Nothing has changed.  Drop them first, and recreate them afterwards.',
        'dependent_objects_still_exist');
end $$;

create or replace function rota_front.set_shards(
    databases jsonb, version text, time_limit interval
) returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    c_milliseconds constant integer := extract(epoch from time_limit) * 1000;
    c_numbers constant integer[] := array(
        select (d ->> 'number')::integer from jsonb_array_elements(databases) as d);
    -- The kernel gives up where the machine of a shard is away.
    c_options constant jsonb := jsonb_build_object('connect_timeout', 2, 'application_name',
        'rota front', 'tcp_user_timeout', c_milliseconds);
    v_number integer;
begin
    perform pg_advisory_xact_lock(hashtextextended('rota.front', 0));
    perform rota_front.check_database();
    perform rota_front.drop_made();
    execute format('alter database %I set statement_timeout = %L', current_database(),
        c_milliseconds);
    if exists (select from rota_front.shards as s where s.number <> all(c_numbers)) then
        perform rota_front.refuse('databases must include each of the front',
            'A database cannot be removed: its keys are in it.');
    end if;
    insert into rota_front.shards (number, ordinal)
    select d.number, (select count(*) from rota_front.shards) - 1
        + row_number() over (order by d.number)
    from unnest(c_numbers) as d (number)
    where d.number not in (select s.number from rota_front.shards as s);
    -- PL/Proxy wants all of its partitions in one statement.
    perform rota_front.set_server('rota_shards', 'plproxy',
        '{"modular_mapping": "1"}' || (
            select jsonb_object_agg('p' || s.ordinal, (
                select string_agg(format('%s=''%s''', o.key,
                    regexp_replace(o.value, E'([\\\\''])', E'\\\\\\1', 'g')), ' '
                    order by o.key)
                from jsonb_each_text(d - 'number' || c_options) as o
            ))
            from jsonb_array_elements(databases) as d
            join rota_front.shards as s on s.number = (d ->> 'number')::integer
        ));
    for v_number in select s.number from rota_front.shards as s loop
        execute format('drop schema if exists rota_%s cascade', v_number);
        execute format('create schema rota_%s', v_number);
    end loop;
    perform rota_front.set_server('rota_' || (d ->> 'number'), 'postgres_fdw',
        d - 'number' || c_options || jsonb_build_object('updatable', false,
            'async_capable', true, 'options',
            coalesce(d ->> 'options', '-c statement_timeout=' || c_milliseconds)))
    from jsonb_array_elements(databases) as d;
    if not exists (select from rota_front.slots) then
        insert into rota_front.slots (slot, number)
        select g, (array(select s.number from rota_front.shards as s order by 1))[
            1 + g % (select count(*) from rota_front.shards)]
        from generate_series(0, 1023) as g;
    end if;
    execute format('create function rota.version() returns text language sql immutable as %L',
        format('select %L', version));
end $$;
comment on function rota_front.set_shards is
    'Say which databases are behind this front; front_statements() calls it.';

create or replace function rota_front.set_role(
    role name, access text, shard_role name default null, password text default null
) returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_server name;
    v_options text := format('user %L', coalesce(shard_role, role));
    v_known text[];
begin
    if to_regrole(quote_ident(role)) is null or role = 'public' then
        perform rota_front.refuse(format('role must be one that exists, got %L', role));
    elsif access is null or access not in ('producer', 'operator') then
        perform rota_front.refuse('access must be producer or operator');
    end if;
    -- Whoever makes a front again need not give the passwords again.
    v_known := (
        select m.umoptions from pg_user_mapping as m
        join pg_foreign_server as s on s.oid = m.umserver and s.srvname = 'rota_shards'
        where m.umuser = to_regrole(quote_ident(role))
    );
    if format('user=%s', coalesce(shard_role, role)) = any(v_known) then
        password := coalesce(password, (
            select substr(o, 10) from unnest(v_known) as o where o like 'password=%'));
    end if;
    if password is not null then
        v_options := v_options || format(', password %L', password);
    end if;
    for v_server in
        select s.srvname from pg_foreign_server as s
        where s.srvname = 'rota_shards' or s.srvname in (
            select format('rota_%s', h.number) from rota_front.shards as h)
    loop
        execute format('drop user mapping if exists for %I server %I', role, v_server);
        execute format('create user mapping for %I server %I options (%s)', role, v_server,
            v_options);
    end loop;
    insert into rota_front.grants values (role, access) on conflict do nothing;
    perform rota_front.grant_to(role, access);
end $$;
comment on function rota_front.set_role is
    'Let a role of the front enqueue (producer) or act on jobs and read (operator), as the '
    'role of that name in each shard, or as shard_role; without a password the one that it '
    'has stays; raises 22023.';

/* A role needs usage of the server for its calls, and so could map itself to any role of the
 * shards; PL/Proxy, unlike postgres_fdw, logs in there also without a password. */
create or replace function rota_front.check_mapping()
    returns event_trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    c_is_superuser constant boolean := (
        select r.rolsuper from pg_roles as r where r.rolname = current_user
    );
begin
    if not c_is_superuser and exists (
        select from pg_event_trigger_ddl_commands() as c
        join pg_user_mappings as m on m.umid = c.objid and m.srvname = 'rota_shards'
        where c.classid = 'pg_user_mapping'::regclass
    ) then
        raise exception using
            errcode = '42501', message = 'only a superuser maps roles in a front',
            hint = 'select rota_front.set_role(...);';
    end if;
end $$;
do $$ begin
    if not exists (
        select from pg_event_trigger as t where t.evtname = 'rota_front_check_mapping'
    ) then
        create event trigger rota_front_check_mapping on ddl_command_end
            when tag in ('CREATE USER MAPPING', 'ALTER USER MAPPING')
            execute function rota_front.check_mapping();
    end if;
end $$;

create or replace function rota_front.grant_to(role name, access text)
    returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_names text[]; v_function regprocedure; v_schema name;
begin
    execute format('grant usage on schema rota, rota_front to %I', role);
    execute format('grant usage on foreign server rota_shards to %I', role);
    execute format('grant select on rota_front.shards, rota_front.slots to %I', role);
    v_names := array(
        select f.name from rota_front.access as f
        where f.access = grant_to.access
          or f.access = 'observer' and grant_to.access = 'operator'
    );
    for v_function in
        select p.oid from pg_proc as p
        where p.pronamespace = 'rota'::regnamespace
          and regexp_replace(p.proname, '^_ask_', '') = any(v_names)
          or p.pronamespace = 'rota_front'::regnamespace
          and p.proname = any(case grant_to.access
            when 'producer' then '{refuse,check_call,slot_of,shard_of_number,shard_of_job,'
                'shard_for,lock_slot,lock_keys,follow_keys,ask_live_keys,raise_of_shard}'
            else '{refuse,check_call,shard_of_number,shard_of_job,lock_keys,check_return,'
                'ask_live_keys,ask_keys,ask_each,raise_of_shard,version_of}' end::name[])
    loop
        execute format('grant execute on routine %s to %I', v_function, role);
    end loop;
    for v_schema in
        select 'rota_all' where grant_to.access = 'operator'
        union all
        select format('rota_%s', s.number) from rota_front.shards as s
        where grant_to.access = 'operator'
    loop
        execute format('grant usage on schema %I to %I', v_schema, role);
        execute format('grant select on all tables in schema %I to %I', v_schema, role);
    end loop;
end $$;

create or replace function rota_front.grant_again(access jsonb)
    returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    revoke all on all routines in schema rota from public;
    revoke all on all routines in schema rota_front from public;
    delete from rota_front.access;
    insert into rota_front.access (access, name)
    select a.access, a.name
    from jsonb_to_recordset(grant_again.access) as a (access text, name text);
    delete from rota_front.grants as g where to_regrole(quote_ident(g.role)) is null;
    -- A role goes to a database that came later as it goes to the others.
    perform rota_front.set_role(g.role, g.access, substr(o.option, 6)::name)
    from rota_front.grants as g
    join pg_user_mapping as m on m.umuser = to_regrole(quote_ident(g.role))
    join pg_foreign_server as s on s.oid = m.umserver and s.srvname = 'rota_shards'
    cross join lateral unnest(m.umoptions) as o (option) where o.option like 'user=%';
end $$;

/* A queue has gone from one of them to another, and with it keys of the first one's slots. */
create or replace function rota_front.follow_move(source integer, target integer)
    returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if num_nulls(source, target) > 0 then
        perform rota_front.refuse(case when source is null then 'source' else 'target' end
            || ' must not be null');
    end if;
    update rota_front.slots as s set earlier = s.earlier || follow_move.target
    where follow_move.source = any(s.earlier || s.number)
      and follow_move.target <> all(s.earlier || s.number)
      and exists (select from rota_front.shards as h where h.number = follow_move.target);
end $$;
comment on function rota_front.follow_move is
    'Look for the keys of a database also in that to which a queue of it has moved; raises '
    '22023.';

/* Give slots to databases that have fewer than others; never waits for a call. */
create or replace function rota_front.rebalance(max_slots integer default 64)
    returns table (switched integer, remaining integer) language plpgsql
    set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    v_slot record;
begin
    if (max_slots >= 0) is not true then
        perform rota_front.refuse(concat('max_slots must be at least 0, got ',
            coalesce(max_slots::text, 'null')));
    end if;
    switched := 0;
    remaining := 0;
    for v_slot in
        with lacking as (
            -- Fewer than none of a database that has some to spare.
            select h.number, 1024 / count(*) over ()
                + (h.ordinal < 1024 % count(*) over ())::integer - (
                    select count(*) from rota_front.slots as s where s.number = h.number
                ) as slots
            from rota_front.shards as h
        )
        select g.slot, t.number
        from (
            select s.slot, row_number() over (order by s.place, s.slot) as place
            from (
                select o.slot, o.number,
                    row_number() over (partition by o.number order by o.slot) as place
                from rota_front.slots as o
            ) as s
            join lacking as l on l.number = s.number where s.place <= -l.slots
        ) as g
        join (
            select l.number, row_number() over (order by n, l.number) as place
            from lacking as l cross join lateral generate_series(1, l.slots) as n
        ) as t on t.place = g.place
        order by g.place
    loop
        if switched >= max_slots
          or not pg_try_advisory_xact_lock(1919907972, v_slot.slot) then
            remaining := remaining + 1;
            continue;
        end if;
        update rota_front.slots as s
        set number = v_slot.number,
            earlier = array_remove(s.earlier || s.number, v_slot.number)
        where s.slot = any(array(
            select f.slot from rota_front.slots as f where f.slot = v_slot.slot
            for update skip locked
        ));
        switched := switched + found::integer;
        remaining := remaining + (not found)::integer;
    end loop;
    return next;
end $$;
comment on function rota_front.rebalance is
    'Give each database its share of the slots, at most max_slots in this transaction: how '
    'many changed hands, and how many still have to, since calls use them or there are more; '
    'raises 22023.';

/* A shard that is away, or too slow, is a row with its problem, and the others are read.  One
 * that stands still ends the whole call with statement_timeout: ask for one at a time then. */
create or replace function rota_front.ask_each(
    view_name text, filter jsonb default '{}', number integer default null,
    max_rows integer default 1000
) returns table (shard integer, problem text, found jsonb) language plpgsql stable
    set search_path = pg_catalog, pg_temp as $$
declare
    v_number integer; v_where text;
begin
    if to_regclass('rota_all.' || quote_ident(view_name)) is null then
        perform rota_front.refuse(
            format('view_name must be a view of observers, got %L', view_name));
    elsif jsonb_typeof(filter) is distinct from 'object' then
        perform rota_front.refuse('filter must be an object');
    elsif (max_rows >= 0) is not true then
        perform rota_front.refuse(concat('max_rows must be at least 0, got ',
            coalesce(max_rows::text, 'null')));
    elsif ask_each.number is not null then
        perform rota_front.shard_of_number('number', ask_each.number);
    end if;
    select coalesce(string_agg(format(case when f.value is null then 'v.%I is null'
        else 'v.%I = %L' end, f.key, f.value), ' and '), 'true')
    into v_where from jsonb_each_text(filter) as f;
    for v_number in
        select s.number from rota_front.shards as s
        where s.number = coalesce(ask_each.number, s.number) order by s.number
    loop
        begin
            return query execute format('select %s, null::text, to_jsonb(v) from rota_%1$s.%I '
                'as v where %s limit %s', v_number, view_name, v_where, max_rows);
        exception when others then
            return query select v_number, sqlerrm, null::jsonb;
        end;
    end loop;
end $$;
comment on function rota_front.ask_each is
    'Rows of a view of observers from each database behind this front, or from one: those '
    'whose columns are as in filter, max_rows of each; a database that cannot be asked is a '
    'row with its problem; raises 22023.';

/* Refuse a call that nothing would end, or that might not see who has a slot by now. */
create or replace function rota_front.check_call()
    returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if current_setting('statement_timeout') = '0' then
        perform rota_front.refuse('a front needs a time limit: statement_timeout is 0',
            'alter database ... set statement_timeout = ''5s''', '55000');
    elsif current_setting('transaction_isolation') <> 'read committed' then
        perform rota_front.refuse('a front needs the isolation level read committed',
            'A call is committed by its shard at once, whatever the transaction sees.',
            'RT009');
    end if;
end $$;

create or replace function rota_front.slot_of(key text)
    returns integer language sql immutable set search_path = pg_catalog, pg_temp
as $$ select (hashtextextended(key, 0) & 1023)::integer $$;

create or replace function rota_front.shard_of_number(argument text, number integer)
    returns integer language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    v_ordinal integer;
begin
    select s.ordinal into v_ordinal from rota_front.shards as s
    where s.number = shard_of_number.number;
    if not found then
        perform rota_front.refuse(format('%s must be the number of a database of this front, '
            'got %s', argument, coalesce(number::text, 'null')));
    end if;
    return v_ordinal;
end $$;

create or replace function rota_front.shard_of_job(job_id bigint)
    returns integer language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_ordinal integer;
begin
    if job_id is null then perform rota_front.refuse('job_id must not be null'); end if;
    select s.ordinal into v_ordinal from rota_front.shards as s where s.number = job_id & 1023;
    if not found then
        perform rota_front.refuse(format('job %s not found', job_id), format('Its id names '
            'database %s, which this front does not have.', job_id & 1023), 'RT001');
    end if;
    return v_ordinal;
end $$;

/* The shard for some jobs, which are all to be in one: where a key of theirs is live, else
 * where their slot belongs, or to which those have moved that they wait for. */
create or replace function rota_front.shard_for(moved_to integer, jobs jsonb, shard_key text)
    returns integer language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_numbers integer[]; v_keys text[]; v_slots integer[]; v_slot rota_front.slots;
    v_number integer; v_place integer;
begin
    if jsonb_typeof(jobs) is distinct from 'array' then
        -- Any shard can say what is wrong with it.
        return (select min(s.ordinal) from rota_front.shards as s);
    end if;
    v_numbers := array(
        select s.number from rota_front.shards as s where s.ordinal = moved_to
        union
        select ((n #>> '{}')::numeric::bigint & 1023)::integer
        from (
            select jsonb_path_query(jobs, 'lax $[*].depends_on[*] ? (@.type() == "number")')
            union all
            select jsonb_path_query(jobs, 'lax $[*].blocks ? (@.type() == "number")')
        ) as i (n)
        -- Any shard can say what is wrong with the others.
        where moved_to is null and (n #>> '{}')::numeric between 1 and 9223372036854775807
    );
    if cardinality(v_numbers) > 1 then
        perform rota_front.refuse('depends_on and blocks name jobs of databases '
            || array_to_string(v_numbers, ', '),
            'Jobs that wait for each other have to be in one database.');
    end if;
    with keys as (
        select j.place, k.key,
            coalesce(shard_for.shard_key, j.job #>> '{headers,shard_key}', k.key) as slot_key
        from jsonb_array_elements(jobs) with ordinality as j (job, place)
        cross join lateral (
            values (j.job ->> 'idempotency_key'), (j.job ->> 'ordering_key'),
                (j.job ->> 'limit_key')
        ) as k (key)
    ), slots as (
        select k.place, rota_front.slot_of(k.slot_key) as slot from keys as k
        where k.slot_key is not null
    )
    select array(select distinct k.key from keys as k where k.key is not null),
        coalesce(array_agg(distinct s.slot), '{}'), min(s.place) filter (where s.slot <> (
            select f.slot from slots as f order by f.place limit 1))
    into v_keys, v_slots, v_place from slots as s;
    if cardinality(v_slots) > 1 then
        perform rota_front.refuse(case when jsonb_array_length(jobs) > 1
                then format('jobs[%s]: its keys are in another slot than those before it',
                    v_place)
                else 'shard_key must be given: the keys of this job are in different slots' end,
            'Give all jobs of these keys the same shard_key, such as the customer.');
    elsif v_slots = '{}' then
        if v_numbers <> '{}' then
            return rota_front.shard_of_number('depends_on', v_numbers[1]);
        end if;
        return (
            select s.ordinal from rota_front.shards as s order by s.ordinal
            offset floor(random() * (select count(*) from rota_front.shards))::integer limit 1
        );
    end if;

    if not pg_try_advisory_xact_lock_shared(1919907972, v_slots[1]) then
        perform rota_front.lock_slot(v_slots[1]);
    end if;
    select s.* into v_slot from rota_front.slots as s where s.slot = v_slots[1];
    v_number := v_slot.number;
    if v_slot.earlier <> '{}' and v_keys <> '{}' then
        v_number := rota_front.follow_keys(jobs, v_keys, v_slot);
    end if;
    if v_numbers[1] <> v_number then
        perform rota_front.refuse(format('depends_on and blocks name jobs of database %s, and '
            'the keys belong to database %s', v_numbers[1], v_number),
            'Give all of them the same shard_key.');
    end if;
    return rota_front.shard_of_number('shard_key', v_number);
end $$;

/* Lock a slot whose lock another session has: one that hands it over, for which this waits, and
 * which has locked the row too; or any login, for none needs a right to that lock. */
create or replace function rota_front.lock_slot(slot integer)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform from rota_front.slots as s where s.slot = lock_slot.slot for share;
end $$;

/* Lock keys, by numbers that no login can know, until the transaction ends. */
create or replace function rota_front.lock_keys(keys text[])
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform pg_advisory_xact_lock(k.lock)
    from (
        select distinct hashtextextended(k, s.last_value) as lock
        from unnest(keys) as k cross join rota_front.lock_seed as s order by 1
    ) as k;
end $$;

/* Where keys are live whose slot was elsewhere before, with their locks. */
create or replace function rota_front.follow_keys(
    jobs jsonb, keys text[], slot rota_front.slots
) returns integer language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_number integer; v_answer record; v_moves_from integer; v_found integer;
    v_asked jsonb; v_places integer[];
    v_live integer[] := '{}'; v_leaving integer[] := '{}';
begin
    perform rota_front.lock_keys(keys);
    -- Each key by itself: of the two of a job one may move and the other not.
    select coalesce(jsonb_agg(a.key), '[]'), array_agg(a.place) into v_asked, v_places
    from (
        select k.key, min(j.place) as place
        from jsonb_array_elements(jobs) with ordinality as j (job, place)
        cross join lateral (
            select jsonb_build_object('idempotency_key', j.job -> 'idempotency_key',
                'job_type', j.job -> 'job_type', 'pipeline', j.job -> 'pipeline',
                'queue', j.job -> 'queue') as key
            where j.job ->> 'idempotency_key' is not null
            union all
            select jsonb_build_object('ordering_key', j.job -> 'ordering_key',
                'queue', j.job -> 'queue')
            where j.job ->> 'ordering_key' is not null
        ) as k
        group by k.key
    ) as a;
    foreach v_number in array slot.earlier || slot.number loop
        select a.live, a.may_be_live into v_answer
        from rota_front.ask_live_keys(
            rota_front.shard_of_number('jobs', v_number), v_asked) as a;
        if v_answer.may_be_live <> '{}' then
            v_moves_from := v_number;
            -- What has arrived where this front does not look for it is reached from here.
            v_answer.live := v_answer.live || array(
                select k.place
                from rota_front.shards as s
                cross join rota_front.ask_live_keys(s.ordinal, v_asked) as a
                cross join unnest(a.live) as k (place)
                where s.number <> all(slot.earlier || slot.number)
                  and k.place = any(v_answer.may_be_live)
            );
        end if;
        -- A line that moves is in both: what comes goes behind it, from where it leaves.
        continue when v_answer.live <@ v_leaving;
        v_leaving := array(
            select unnest(v_answer.live) intersect select unnest(v_answer.may_be_live));
        if not v_live <@ v_leaving then
            perform rota_front.refuse(format('jobs[%s] and jobs[%s]: their keys are live in '
                'different databases', v_places[v_live[1]], v_places[v_answer.live[1]]),
                'Enqueue them one by one, and what has both once the older jobs have ended.');
        end if;
        v_found := v_number;
        v_live := v_answer.live;
    end loop;
    -- A key of a queue that moves is where that goes, or on its way, where nobody sees it.
    return coalesce(v_found, v_moves_from, slot.number);
end $$;

create or replace function rota_front.ask_live_keys(
    shard integer, jobs jsonb, out live integer[], out may_be_live integer[]
) language plproxy as $$
    cluster 'rota_shards';
    run on shard;
    select rota.find_live_keys(jobs) as live,
        rota.find_live_keys(jobs, moving => true) as may_be_live;
$$;

create or replace function rota_front.version_of(number integer)
    returns text language plproxy as $$
    cluster 'rota_shards';
    run on rota_front.shard_of_number('number', number);
    select case when rota.database_number() = number then rota.version() else 'its number is '
        || coalesce(rota.database_number()::text, 'null') end;
$$;
comment on function rota_front.version_of is
    'The version of a database behind this front, which it answers itself, or the number that '
    'it has in place of that one, as a copy of another; raises 22023.';

create or replace function rota_front.ask_keys(shard integer, asked bigint)
    returns setof jsonb language plproxy as $$
    cluster 'rota_shards';
    run on shard;
    select jsonb_build_object('job_type', r.job_type, 'pipeline', r.pipeline,
        'idempotency_key', r.idempotency_key, 'ordering_key', r.ordering_key)
    from rota.job_runs as r
    where r.id = asked and coalesce(r.idempotency_key, r.ordering_key) is not null
      and r.status in ('succeeded', 'dead', 'cancelled');
$$;

/* A job that has ended comes back only where none of its keys is live in another shard. */
create or replace function rota_front.check_return(shard integer, job_id bigint)
    returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_job jsonb; v_other integer;
begin
    select k into v_job from rota_front.ask_keys(shard, job_id) as k;
    if not found then return; end if;
    perform rota_front.lock_keys(array_remove(
        array[v_job ->> 'idempotency_key', v_job ->> 'ordering_key'], null));
    -- If a slot changes hands from now on, calls with the key come after this one.
    if not exists (select from rota_front.slots as s where s.earlier <> '{}') then
        return;
    end if;
    for v_other in select s.ordinal from rota_front.shards as s where s.ordinal <> shard loop
        if (rota_front.ask_live_keys(v_other, jsonb_build_array(v_job))).live <> '{}' then
            perform rota_front.refuse(
                format('job %s: a key of it is live in another database', job_id),
                'Wait until the other job has ended, or cancel it.', 'RT007');
        end if;
    end loop;
end $$;

/* Say an error of a shard as the shard has said it; a job that has moved is asked for there. */
create or replace function rota_front.raise_of_shard(
    state text, message text, detail text, hint text
) returns integer language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    -- The word after REMOTE is that for an error in the language of the shard.
    v_message constant text := regexp_replace(message,
        E'^rota(?:_front)?[.]_?ask_\\w+[(]\\d+[)]: [[][^]]*[]] REMOTE [^:]+: ', '');
    v_detail constant text := regexp_replace(detail, '^Remote detail: ', '');
    v_hint constant text := regexp_replace(hint, '^Remote hint: ', '');
begin
    -- Under the same id, mostly; what came in behind its queue has another one there.
    if state = 'RT016' and v_message ~ E'^job ([0-9]+) .* as job \\1$' and exists (
        select from rota_front.shards as s
        where s.number = split_part(v_detail, ' ', 1)::integer
    ) then
        return rota_front.shard_of_number('job_id', split_part(v_detail, ' ', 1)::integer);
    end if;
    if state in ('08P01', 'XX000')
      and v_message ~ 'query[ _]timeout|server login has been failing' then
        -- So a pooler ends the call, which stands in front of the shard.
        perform rota_front.refuse('a database behind this front does not answer in time',
            'The call may have been done there anyway.', '57014');
    elsif state = 'XX000' and v_message ~ 'PQconnectPoll: ' then
        -- As for a caller of the shard itself, whose driver would not have reached it.
        perform rota_front.refuse('a database behind this front cannot be reached: '
            || rtrim(regexp_replace(v_message, '^.*PQconnectPoll: ', ''), E'\n'),
            code => '08001');
    elsif state = 'XX000' and v_message ~ E'[]] PQ\\w+: ' then
        perform rota_front.refuse('the connection to a database behind this front was lost: '
            || regexp_replace(v_message, E'^.*?[]] PQ\\w+: ([^\n]*).*$', E'\\1'),
            'The call may have been done there anyway.', '08006');
    end if;
    perform rota_front.refuse(v_message, v_hint, state, v_detail);
end $$;

-- Nothing of this is left in a database that cannot be one.
do $$ begin perform rota_front.check_database(); end $$;

commit;
