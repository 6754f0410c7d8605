/*
 * upgrades/all.sql -- changes of the tables, in order, each run once.
 *
 * One step is three lines here and one file beside this one:
 *
 *     select not exists (select from rota.upgrade_log where id = 1) as todo \gset
 *     \if :todo
 *     \ir 0001_what_it_does.sql
 *     \endif
 *
 * The file ends with its own row for upgrade_log.  A fresh install creates the tables as they
 * are now and writes the rows of all steps.  An object that differs from the manifest before
 * the steps still counts as different after them (operations/drift.sql): a step that repairs
 * it deletes its row of the manifest.
 *
 * After a downgrade the functions of the version before run over the new tables: a new column
 * may be null, the function of a new trigger calls none that is new, and a composite type never
 * changes: what differs gets another name.  A function that changes its arguments or its result
 * is dropped by a step; who was granted it is granted the new one (give_grants.sql).  There are
 * no steps yet.
 *
 * Before them the check below makes sure that the schema found is rota's and the installer's.
 * refuse_downgrade.sql refuses files older than the installed version, since only they know
 * that they are older.
 */

do $$
declare
    v_owner regrole;
    c_owner_of_tables constant regrole := (
        select c.relowner from pg_class as c
        where c.relnamespace = to_regnamespace('rota') and c.relname = 'upgrade_log'
    );
begin
    select n.nspowner::regrole into v_owner from pg_namespace as n where n.nspname = 'rota';
    if c_owner_of_tables is null then
        raise exception using errcode = 'duplicate_schema',
            message = 'a schema rota exists, but rota is not installed in it',
            hint = case when to_regnamespace('rota_front') is null
                then 'Rename or drop that schema, then install again.'
                else 'This is a front: install in the databases behind it, then run rota '
                    'front make.' end;
    elsif v_owner <> c_owner_of_tables then
        raise exception using errcode = 'insufficient_privilege',
            message = format('the schema rota belongs to role %s, and its tables to %s',
                v_owner, c_owner_of_tables),
            hint = format('Give it back: alter schema rota owner to %s.  All that a role owns '
                'gets another owner by: reassign owned by %1$s to ...', c_owner_of_tables);
    elsif v_owner <> to_regrole(quote_ident(current_user)) then
        -- What a superuser or a member would add runs with their rights, among tables whose
        -- triggers are another's.
        raise exception using errcode = 'insufficient_privilege',
            message = format('rota belongs to role %s, and you are %I', v_owner, current_user),
            hint = format('Install as that role: PGOPTIONS="-c role=%s" psql -f install.sql',
                v_owner);
    end if;
    -- An upgrade may have been interrupted before its last step, or another installer may be at
    -- it just now.  One of a stranger stays.
    if exists (
        select from pg_namespace as n where n.nspname = 'rota_0_1_0' and n.nspowner = v_owner
    ) then
        drop schema if exists rota_0_1_0 cascade;
    end if;
    perform set_config('rota.installed_version', rota.version(), true);
    -- Of our own roles the install knows the grants.
    perform set_config('rota.grants', jsonb_agg(to_jsonb(g))::text, true)
    from (
        select o.name, a.privilege_type as privilege, a.grantee::regrole as grantee,
            a.is_grantable
        from (
            select '', n.nspacl, n.nspowner from pg_namespace as n where n.nspname = 'rota'
            union all
            select p.proname, p.proacl, p.proowner from pg_proc as p
            where p.pronamespace = 'rota'::regnamespace
            union all
            select c.relname, c.relacl, c.relowner from pg_class as c
            where c.relnamespace = 'rota'::regnamespace
        ) as o (name, acl, owner)
        cross join lateral aclexplode(o.acl) as a
        where a.grantee not in (0, o.owner) and a.grantee <> all(array(
            select to_regrole('rota_' || n.access)::oid
            from unnest('{producer,worker,operator,observer}'::text[]) as n (access)
            where to_regrole('rota_' || n.access) is not null
        ))
    ) as g;
    perform rota._note_drift();
end $$;

/* To replace a view locks it until the commit.  Who reads several, as doctor() does, has one
 * and waits for the next; if that were the other way round for the install, the server would
 * end one of the two.  So the install takes the locks of all before any other, and where it
 * would wait for long it gives them back and tries again.  It keeps the first that doctor()
 * reads, before which that has none. */
do $$
declare
    v_views constant name[] := array(
        select v.viewname from pg_views as v where v.schemaname = 'rota'
        -- Those that others read come last: they begin with _.
        order by v.viewname <> 'ticker_health', v.viewname desc
    );
    v_view name; v_others record;
begin
    for v_try in 1..25 loop
        begin
            foreach v_view in array v_views loop
                execute format('alter view rota.%I owner to %I', v_view, current_user);
                exit when v_try = 1;
                perform set_config('lock_timeout', '400ms', true);
            end loop;
            exit when v_try > 1;
        exception
            when lock_not_available then
                if v_try in (1, 25) then
                    select string_agg(concat('pid ', l.pid, ' (' || nullif(a.application_name,
                            '') || ')'), ', ') as names,
                        string_agg(format('select pg_terminate_backend(%s);', l.pid), ' ')
                            as remedies
                    into v_others
                    from pg_locks as l
                    join pg_database as d on d.oid = l.database
                      and d.datname = current_database()
                    left join pg_stat_activity as a on a.pid = l.pid
                    where l.relation = format('rota.%I', v_view)::regclass
                      and l.granted and l.pid <> pg_backend_pid();
                    raise exception using errcode = 'lock_not_available',
                        message = format('another transaction has read rota.%I and stays '
                            'open%s', v_view, ': ' || v_others.names),
                        hint = concat('End it, or wait for it, then install again',
                            ': ' || v_others.remedies);
                end if;
                perform pg_sleep(0.02);
        end;
    end loop;
    perform set_config('lock_timeout', '5s', true);
end $$;
