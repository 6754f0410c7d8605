/*
 * operations/drift.sql -- what differs from what was installed.
 *
 * An index that was dropped at night, a function that was patched, a right that was granted to
 * public: nothing fails, and weeks later the queue is slow, or open.  So each install keeps a
 * manifest of what it made, in the words of the catalog.  What differs from it is named with
 * the statement that mends it.
 *
 * The same applies to the rights that the install grants to the four roles.  What the owner
 * has granted by hand, to these or to other roles, is the owner's business, except rights of
 * public and rights to what is private.
 *
 * Outside of the schema, only a foreign key to the live jobs is named, since it keeps them from
 * their end.
 *
 * An upgrade must not record a difference as if the install had made it.  So it notes what
 * differs before it begins, and keeps those rows of the manifest as they are.
 */

/* What has an owner and rights, but for types. */
create or replace function rota._owned()
    returns table (
        kind text, name text, short_name text, owner oid, acl aclitem[], default_acl aclitem[]
    ) language sql stable as $$
    select case when p.prokind = 'p' then 'procedure' else 'function' end as kind,
        p.oid::regprocedure::text as name, p.proname::text as short_name, p.proowner as owner,
        p.proacl as acl, acldefault('f', p.proowner) as default_acl
    from pg_proc as p where p.pronamespace = 'rota'::regnamespace
    union all
    select case when c.relkind = 'S' then 'sequence' else 'table' end,
        c.oid::regclass::text, c.relname::text, c.relowner,
        -- A right to a column is taken back with that to its table.
        nullif(c.relacl || array(
            select i from pg_attribute as a cross join unnest(a.attacl) as i
            where a.attrelid = c.oid
        ), '{}'),
        acldefault(case when c.relkind = 'S' then 's' else 'r' end::"char", c.relowner)
    from pg_class as c
    where c.relnamespace = 'rota'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')
    union all
    select 'schema', 'rota', '', n.nspowner, n.nspacl, acldefault('n', n.nspowner)
    from pg_namespace as n where n.nspname = 'rota';
$$;

/* All that is in the schema but partitions by time, in the words of the catalog, which writes
 * them by these settings: a session may have others than that of the install. */
create or replace function rota._objects()
    returns table (kind text, name text, definition text) language sql stable
    set timezone = 'UTC' set datestyle = 'ISO' set intervalstyle = 'postgres'
    set quote_all_identifiers = off as $$
    with relations as (
        select c.oid, quote_ident(c.relname) as name, c.relkind, c.relispartition,
            c.relpersistence, c.reloptions, c.relrowsecurity, (
                select concat(i.inhparent::regclass, ' ', pg_get_expr(c.relpartbound, c.oid))
                from pg_inherits as i where i.inhrelid = c.oid
            ) as part_of
        from pg_class as c
        where c.relnamespace = 'rota'::regnamespace and c.relkind in ('r', 'p', 'v')
          and c.relname !~ '_[0-9]{8}$'
    )
    select 'table', r.name, jsonb_build_object('logged', r.relpersistence = 'p',
        'row security', r.relrowsecurity, 'part of', r.part_of, 'options',
        array_to_string(array(select o from unnest(r.reloptions) as o order by 1), ', '))::text
    from relations as r where r.relkind in ('r', 'p')
    union all
    select 'policy', format('%I.%I', p.tablename, p.policyname), concat_ws(' ',
        'as ' || p.permissive, 'for ' || p.cmd, 'to ' || array_to_string(p.roles, ', '),
        'using (' || p.qual || ')', 'with check (' || p.with_check || ')')
    from pg_policies as p where p.schemaname = 'rota'
    union all
    select 'column', format('%s.%I', r.name, a.attname), jsonb_strip_nulls(jsonb_build_object(
            'type', format_type(a.atttypid, a.atttypmod), 'not null', a.attnotnull,
            'collation', (select l.collname from pg_collation as l
                where l.oid = a.attcollation and l.collname <> 'default'),
            'default', case when a.attidentity = '' and a.attgenerated = ''
                then pg_get_expr(d.adbin, d.adrelid) end,
            'generated', case
                when a.attidentity <> '' then 'always as identity'
                when a.attgenerated <> ''
                    then format('always as (%s) stored', pg_get_expr(d.adbin, d.adrelid))
            end))::text
    from relations as r
    join pg_attribute as a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
    left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where r.relkind in ('r', 'p') and not r.relispartition
    union all
    select 'index', quote_ident(c.relname), pg_get_indexdef(i.indexrelid)
        || case when i.indisvalid then '' else ' (invalid)' end
    from relations as r join pg_index as i on i.indrelid = r.oid
    join pg_class as c on c.oid = i.indexrelid and not c.relispartition
    where not exists (select from pg_constraint as k where k.conindid = i.indexrelid)
    union all
    -- Pretty, since a restored dump nests it otherwise.
    select 'constraint', format('%s.%I', r.name, k.conname), pg_get_constraintdef(k.oid, true)
    from relations as r join pg_constraint as k on k.conrelid = r.oid
    where k.contype in ('c', 'u', 'p', 'f', 'x') and k.conislocal
    union all
    select 'trigger', format('%s.%I', r.name, t.tgname), pg_get_triggerdef(t.oid)
        || case when t.tgenabled = 'O' then '' else ' (not enabled)' end
    from relations as r join pg_trigger as t on t.tgrelid = r.oid
    where not t.tgisinternal and t.tgparentid = 0
    union all
    -- Each major version of the server writes views in its own words.
    select 'view', r.name, concat(current_setting('server_version_num')::integer / 10000, ' ',
        md5(concat(pg_get_viewdef(r.oid), r.reloptions)))
    from relations as r where r.relkind = 'v'
    union all
    select case when p.prokind = 'p' then 'procedure' else 'function' end,
        format('%I(%s)', p.proname, pg_get_function_identity_arguments(p.oid)),
        md5(concat_ws(' ', p.prosrc, pg_get_function_arguments(p.oid),
            pg_get_function_result(p.oid), p.provolatile, p.prosecdef, p.proconfig, l.lanname))
    from pg_proc as p join pg_language as l on l.oid = p.prolang
    where p.pronamespace = 'rota'::regnamespace
    union all
    select 'grant', format('%s on %s %s to %s', lower(a.privilege_type collate "C"), o.kind,
        o.name, a.grantee::regrole), ''
    from rota._owned() as o cross join lateral aclexplode(o.acl) as a
    where a.grantee = any(array(
        select to_regrole('rota_' || n.access)::oid
        from unnest('{producer,worker,operator,observer}'::text[]) as n (access)
    ));
$$;

/* What differs from the manifest: as it should be, null if it should not be; and as it is.  A
 * copy without data has no manifest, and then nothing can be told.  After a change of the
 * server's major version, views are compared again after the next install. */
create or replace function rota._differences()
    returns table (kind text, name text, expected text, actual text) language sql stable as $$
    select coalesce(m.kind, o.kind), coalesce(m.name, o.name), m.definition, o.definition
    from (select i.* from rota.manifest as i where i.definition is not null) as m
    full join rota._objects() as o on o.kind = m.kind and o.name = m.name
    where o.definition is distinct from m.definition
      and exists (select from rota.manifest)
      and (m.kind = 'view'
        and split_part(m.definition, ' ', 1) <> split_part(o.definition, ' ', 1)) is not true
      -- Restored where our roles are not.
      and not (m.kind is not distinct from 'grant' and o.kind is null
        and to_regrole(substring(m.name from '[^ ]+$')) is null);
$$;

/* Before an upgrade: note what is out of order.  Code is replayed whole, and so is in order. */
create or replace function rota._note_drift()
    returns void language plpgsql as $$
begin
    update rota.manifest as m set is_drifted = false where m.is_drifted;
    insert into rota.manifest as m (kind, name, is_drifted)
    select d.kind, d.name, true from rota._differences() as d
    where d.expected is null or d.kind not in ('view', 'function', 'procedure', 'grant')
    on conflict on constraint manifest_pkey do update
    set is_drifted = true;
end $$;

/* Whether this transaction wrote a row.  A savepoint has a number of its own, a little later
 * than that of its transaction.  What is older by more than two thousand million transactions
 * seems to be later, too, but by very much. */
create or replace function rota._is_written_here(row_xmin xid)
    returns boolean language sql volatile as $$
    select age(row_xmin)::bigint - age(pg_current_xact_id()::xid) between -1000000 and 0;
$$;

/* Drop the functions of the version before that this one has not: all that the manifest lists
 * and this transaction has not written.  What others have put into the schema stays, and so
 * do the functions of a newer version's triggers, which a downgrade leaves on its tables. */
create or replace function rota._drop_leftovers()
    returns void language plpgsql set quote_all_identifiers = off as $$
declare
    v_function record;
begin
    for v_function in
        select p.oid::regprocedure as function from rota.manifest as m
        join pg_proc as p on p.pronamespace = 'rota'::regnamespace
          and m.name = format('%I(%s)', p.proname, pg_get_function_identity_arguments(p.oid))
        where m.kind in ('function', 'procedure') and m.definition is not null
          and not rota._is_written_here(p.xmin)
          and not exists (select from pg_trigger as t where t.tgfoid = p.oid)
    loop
        execute format('drop routine %s', v_function.function);
    end loop;
end $$;

/* After an install: what is there is what belongs there, but for what was out of order. */
create or replace function rota._keep_manifest()
    returns void language plpgsql as $$
begin
    with objects as materialized (
        select o.kind, o.name, o.definition from rota._objects() as o),
    gone as (
        delete from rota.manifest as m
        where not m.is_drifted and not exists (
            select from objects as o where o.kind = m.kind and o.name = m.name
        )
    )
    insert into rota.manifest as m (kind, name, definition)
    select o.kind, o.name, o.definition from objects as o
    on conflict on constraint manifest_pkey do update
    set definition = excluded.definition
    where not m.is_drifted and m.definition is distinct from excluded.definition;
end $$;

/* What is otherwise than installed, in objects and rights, and the statement that mends it.  A
 * dump that is restored without its rights lacks hundreds, which the install gives again: these
 * are one row. */
create or replace function rota._examine_drift()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    with differences as (select d.* from rota._differences() as d),
    found (is_replayed, severity, evidence, remedy) as materialized (
        (select d.kind = 'grant',
            case when d.expected is null then 'warning' else 'critical' end,
            format('%s %s %s', d.kind, d.name, case
                when d.expected is null then 'is not part of the install'
                when d.actual is null then 'is missing' || case
                    when d.kind in ('view', 'function', 'procedure')
                        then ': run the install again, which repairs it'
                    when d.kind = 'table' then ': bring it back from a backup'
                    else ''
                end
                when d.kind in ('view', 'function', 'procedure')
                    then 'was changed: run the install again, which repairs it'
                when d.kind in ('table', 'column') then 'was changed: ' || (
                    select string_agg(format('%s is %s, and should be %s', c.part,
                        rota._one_line(coalesce(nullif(c.actual, ''), 'nothing')),
                        rota._one_line(coalesce(nullif(c.expected, ''), 'nothing'))),
                        '; ' order by c.part)
                    from rota._changed_parts(d.expected, d.actual) as c
                )
                else format('was changed: it is %s, and should be %s',
                    rota._one_line(d.actual), rota._one_line(d.expected))
            end),
            rota._mending(d.kind, d.name, d.expected, d.actual)
        from differences as d
        -- What is said of a table is said of its parts.
        where not exists (
            select from differences as t
            where t.kind in ('table', 'view')
              and case
                when num_nulls(t.expected, t.actual) > 0 then d.name like t.name || '.%'
                -- Its columns and indexes are not its parent's any more.
                when t.kind = 'table' and t.expected::jsonb -> 'part of'
                    <> t.actual::jsonb -> 'part of'
                then d.name like t.name || '.%'
                  or d.kind = 'index' and d.expected is null and d.name ^@ (t.name || '_')
              end
        )
          and (d.kind <> 'grant' or d.expected is not null)
        order by 2, d.kind, d.name)
        union all
        (select w.remedy like 'revoke % from public;', 'critical', w.evidence, w.remedy
        from rota._wrong_rights() as w order by 3)
    ),
    replayed as (
        select count(*) as rights, min(f.evidence) as such from found as f where f.is_replayed
    )
    select 'critical', format('%s rights are not as installed, as after a restore without '
        'rights: run the install again, which repairs them, e.g. %s', r.rights, r.such), null
    from replayed as r where r.rights > 20
    union all
    select 'critical', 'this is a copy without data, in which nothing is purged or counted: '
        'run the install again, which repairs it', null
    where not exists (select from rota.manifest)
    union all
    select 'critical', format('calls ignore %s settings, e.g. in %s, which are not in their '
        'list, as after a restore: run the install again, which repairs it', count(*),
        min(u.source || ' of ' || u.name)), null
    from rota._unlisted() as u having count(*) > 0
    union all
    select 'critical', 'the grants of queues are missing, as after a restore on a server '
        'without one of their roles, which leaves out all: who was confined to some queues may '
        'use every one. Restore in one transaction, with all roles, or grant them again; or, '
        'if none is to be confined here: delete from rota.maintenance where task = ''grants'';',
        null
    where exists (select from rota.maintenance as m where m.task = 'grants')
      and not exists (select from rota.queue_grants)
    union all
    select 'critical', format('constraint %I of %s refers to rota.jobs, which a job leaves '
            'when it ends, so %s', k.conname, k.conrelid::regclass, case k.confdeltype
            when 'c' then 'its rows are deleted then'
            else 'a job that it names cannot end, and runs again'
        end),
        format('alter table %s drop constraint %I;', k.conrelid::regclass, k.conname)
    from pg_constraint as k
    -- What is set to null or a default keeps nothing.
    where k.confrelid = to_regclass('rota.jobs') and k.confdeltype in ('a', 'r', 'c')
      and k.conparentid = 0
    union all
    select f.severity, f.evidence, f.remedy from found as f cross join replayed as r
    where r.rights <= 20 or not f.is_replayed;
$$;

/* What differs in the definitions of a table or column; of its options those that do. */
create or replace function rota._changed_parts(expected text, actual text)
    returns table (part text, expected text, actual text) language sql immutable as $$
    select coalesce(e.key, a.key),
        case e.key when 'options' then rota._without(e.value, a.value) else e.value end,
        case a.key when 'options' then rota._without(a.value, e.value) else a.value end
    from jsonb_each_text(_changed_parts.expected::jsonb) as e
    full join jsonb_each_text(_changed_parts.actual::jsonb) as a on a.key = e.key
    where e.value is distinct from a.value;
$$;

create or replace function rota._without(options text, others text)
    returns text language sql immutable as $$
    select coalesce(string_agg(o, ', '), '') from unnest(string_to_array(options, ', ')) as o
    where o <> all(string_to_array(others, ', '));
$$;

/* The statement that makes an object again what it was; null where the install does that. */
create or replace function rota._mending(kind text, name text, expected text, actual text)
    returns text language plpgsql immutable as $$
declare
    -- Of a table, and of what is in it; each is quoted if it has to be.
    c_names constant text[] := regexp_match(name,
        '^("(?:[^"]|"")+"|[^".]+)(?:[.](.+))?$');
    c_table constant text := 'rota.' || c_names[1];
    c_part constant text := c_names[2];
    c_drop constant text := case
        when kind = 'table' then format('alter table %s set schema public;', c_table)
        when kind in ('column', 'constraint')
            then format('alter table %s drop %s %s;', c_table, kind, c_part)
        when kind in ('trigger', 'policy')
            then format('drop %s %s on %s;', kind, c_part, c_table)
        -- It may be an aggregate.
        when kind in ('function', 'procedure') then format('drop routine rota.%s;', name)
        else format('drop %s %s;', kind, c_table)
    end;
    c_make constant text := case kind
        when 'column' then (
            select format('alter table %s add column %s;', c_table, concat_ws(' ', c_part,
                e ->> 'type', 'collate ' || quote_ident(e ->> 'collation'),
                'generated ' || (e ->> 'generated'), 'default ' || (e ->> 'default'),
                case when (e ->> 'not null')::boolean then 'not null' end))
            from (select expected::jsonb as e) as c
        )
        when 'constraint' then format('alter table %s add constraint %s %s;', c_table, c_part,
            expected)
        when 'trigger' then expected || ';'
        when 'policy' then format('create policy %s on %s %s;', c_part, c_table, expected)
        when 'grant' then format('grant %s;', name)
        -- Of a parent: with that of each partition, which cannot be made while others write.
        -- One that was changed is dropped and created in one transaction: no session works
        -- without it.
        when 'index' then case
            when expected like '% ON ONLY %' then replace(expected, ' ON ONLY ', ' ON ')
            when actual is null then regexp_replace(expected, ' INDEX ', ' INDEX CONCURRENTLY ')
            else expected
        end || ';'
    end;
begin
    return case
        when expected is null then c_drop
        when kind in ('view', 'function', 'procedure') then null
        when actual is null then c_make
        when kind in ('table', 'column') then (
            -- Of each part, the type first.
            select string_agg('alter table ' || case c.part
                    when 'part of'
                    then regexp_replace(c.expected, ' ',
                        format(' attach partition %s ', c_table))
                    when 'logged' then c_table || ' set logged'
                    when 'row security' then format('%s %s row level security', c_table,
                        case c.expected when 'true' then 'enable' else 'disable' end)
                    when 'options' then format('%s %s', c_table, concat_ws(', ',
                        'reset (' || regexp_replace(nullif(c.actual, ''), '=[^,]*', '', 'g')
                            || ')',
                        'set (' || nullif(c.expected, '') || ')'))
                    when 'not null' then format('%s alter %s %s not null', c_table, c_part,
                        case c.expected when 'true' then 'set' else 'drop' end)
                    when 'default' then format('%s alter %s %s', c_table, c_part,
                        coalesce('set default ' || c.expected, 'drop default'))
                    else format('%s alter %s type %s', c_table, c_part, concat_ws(' ',
                        _mending.expected::jsonb ->> 'type',
                        'collate ' || quote_ident(_mending.expected::jsonb ->> 'collation')))
                end || ';', ' ' order by c.part <> 'type')
            from rota._changed_parts(_mending.expected, _mending.actual) as c
        )
        else c_drop || ' ' || c_make
    end;
end $$;

/* Rights and owners that make rota open to others, or keep its roles from their work. */
create or replace function rota._wrong_rights()
    returns table (evidence text, remedy text) language sql stable as $$
    with ours as (select n.nspowner as owner from pg_namespace as n where n.nspname = 'rota')
    select format('%s %s belongs to role %s, and the schema to %s', o.kind, o.name,
            o.owner::regrole, s.owner::regrole),
        format('alter %s %s owner to %s;', o.kind, o.name, s.owner::regrole)
    -- A sequence of ours goes with its table.
    from rota._owned() as o cross join ours as s
    where o.owner <> s.owner and o.kind <> 'sequence'
    union all
    select format('%s on %s %s is granted to %s', p.privilege, o.kind, o.name,
            case when a.grantee = 0 then 'everybody' else a.grantee::regrole::text end),
        format('revoke %s on %s %s from %s;', p.privilege, o.kind, o.name,
            case when a.grantee = 0 then 'public' else a.grantee::regrole::text end)
    from rota._owned() as o cross join ours as s
    cross join lateral aclexplode(coalesce(o.acl, o.default_acl)) as a
    cross join lateral (select lower(a.privilege_type collate "C")) as p (privilege)
    where a.grantee not in (s.owner, o.owner)
      and (a.grantee = 0
        or o.kind in ('function', 'procedure') and o.short_name ^@ '_'
        or o.kind in ('table', 'sequence') and a.privilege_type <> 'SELECT');
$$;
