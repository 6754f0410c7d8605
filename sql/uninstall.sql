/*
 * uninstall.sql -- remove rota and everything in it: jobs, history, settings.
 *
 *     psql -f sql/uninstall.sql
 *
 * The pg_cron entry and its log go first, because they live outside the schema.  The roles
 * stay: they belong to the whole cluster, and another database may use them.  If other objects
 * use tables or functions of rota, they would go with them, so then nothing is done; nor if the
 * schema has tables that the install did not make.
 */

\set ON_ERROR_STOP on

begin;
set local client_min_messages = warning;
set local lock_timeout = '5s';
set local search_path = pg_catalog, pg_temp;
-- Time limits of a role or database are for its applications, as pg_restore has it.
do $$ begin
    perform set_config(s.name, '0', true) from pg_settings as s
    where s.name in ('statement_timeout', 'transaction_timeout');
end $$;

do $$
declare
    v_others text; v_moves text;
begin
    if exists (
        select from pg_extension as e join pg_namespace as n on n.nspname = 'cron'
        -- Before it had this table, its entries had no names.
        join pg_class as c on c.relnamespace = n.oid and c.relname = 'job_run_details'
        where e.extname = 'pg_cron'
          and has_schema_privilege(n.oid, 'usage')
    ) then
        perform cron.unschedule(j.jobid) from cron.job as j
        where j.jobname = 'rota tick'
          and j.database = current_database();
        delete from cron.job_run_details as d
        where d.command like 'call rota.tick_loop(%'
          and d.database = current_database();
    end if;

    if to_regnamespace('rota') is not null and not exists (
        select from pg_class as c
        where c.relnamespace = to_regnamespace('rota') and c.relname = 'upgrade_log'
    ) then
        raise exception using errcode = 'duplicate_schema',
            message = 'a schema rota exists, but rota is not installed in it',
            hint = 'Nothing was removed.';
    end if;
    if to_regclass('rota.manifest') is not null then
        select string_agg(quote_ident(c.relname), ', ' order by c.relname),
            string_agg(format('alter table rota.%I set schema public;', c.relname), ' ')
        into v_others, v_moves from pg_class as c
        where c.relnamespace = to_regnamespace('rota') and c.relkind in ('r', 'p', 'f', 'm')
          and not c.relispartition and c.relname !~ '_[0-9]{8}$'
          -- A copy without data has none.
          and exists (select from rota.manifest)
          and not exists (
            select from rota.manifest as m
            where m.kind = 'table' and m.name = quote_ident(c.relname)
              and m.definition is not null
        );
    end if;
    if v_others is not null then
        raise exception using errcode = 'dependent_objects_still_exist',
            message = concat('these in schema rota are not of the install: ', v_others),
            hint = concat('Nothing was removed.  Drop them, or move them: ', v_moves);
    end if;
    -- An upgrade may have been interrupted before its last step.  One of a stranger stays.
    if exists (
        select from pg_namespace as o
        join pg_namespace as n on n.nspname = 'rota' and n.nspowner = o.nspowner
        where o.nspname = 'rota_0_1_0'
    ) then
        drop schema rota_0_1_0 cascade;
    end if;
end $$;

\ir upgrades/refuse_others.sql

do $$
begin
    drop schema if exists rota cascade;
exception when lock_not_available then
    raise exception using errcode = 'lock_not_available',
        message = concat('other transactions use rota and stay open', (
            select ': ' || string_agg(concat('pid ', l.pid, ' ('
                || nullif(a.application_name, '') || ')'), ', ')
            from (
                select distinct l.pid from pg_locks as l
                join pg_database as d on d.oid = l.database and d.datname = current_database()
                join pg_class as c on c.oid = l.relation
                  and c.relnamespace = to_regnamespace('rota')
                where l.granted and l.pid <> pg_backend_pid()
            ) as l
            left join pg_stat_activity as a on a.pid = l.pid
        )),
        hint = 'Nothing was removed.  Stop the workers, and end these or wait for them.';
end $$;

-- Nothing depends on what stands in the body of a function.
do $$
declare
    v_callers constant text := (
        select string_agg(p.oid::regprocedure::text, ', ' order by p.oid) from pg_proc as p
        where p.prosrc ~ E'\\mrota[.]\\w' and p.pronamespace <> 'pg_catalog'::regnamespace
    );
begin
    if v_callers is not null then
        raise warning 'rota is removed, and these functions still name it: %', v_callers;
    end if;
end $$;
commit;
