/*
 * install.sql -- install or upgrade rota.
 *
 *     psql -f sql/install.sql                       into the database of your libpq defaults
 *     psql -v with_roles=1 -f sql/install.sql       also creates the four roles
 *     psql -v with_cron=1 -f sql/install.sql        also calls rota.start_ticker()
 *     psql -v allow_downgrade=1 -f sql/install.sql  even if a newer version is installed
 *     psql -v database_number=7 -f sql/install.sql  also calls rota.set_database_number(7)
 *
 * This file is the table of contents: read the parts in this order.  Tables are created
 * once and changed by upgrades/; functions, views and grants are replayed whole every time,
 * so the tree always shows the code that runs.  All of it is one transaction: if any part
 * fails, nothing has happened and psql exits with 3.
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
-- A part may name functions of a later one.
set local check_function_bodies = off;
-- Named, the tablespace that a database has by default is refused for partitioned tables.
do $$ begin
    perform set_config('default_tablespace', '', true)
    from pg_database as d join pg_tablespace as t on t.oid = d.dattablespace
    where d.datname = current_database()
      and t.spcname = current_setting('default_tablespace');
end $$;

-- Of installers at once, as of an application whose processes all begin with it, one goes on,
-- and the others wait here and then find the schema.
do $$
declare
    c_lock constant bigint := hashtextextended('rota.install', 0);
begin
    if not pg_try_advisory_xact_lock(c_lock) then
        raise warning 'waiting for another session, which is installing rota in this database';
        perform set_config('lock_timeout', '1min', true);
        perform pg_advisory_xact_lock(c_lock);
        perform set_config('lock_timeout', '5s', true);
    end if;
exception when lock_not_available then
    raise exception using errcode = 'lock_not_available',
        message = 'another session is installing rota in this database',
        hint = concat('Install again when it has ended', (
            select format(', or end it: select pg_terminate_backend(%s);', l.pid)
            from pg_locks as l join pg_database as d on d.oid = l.database
            where d.datname = current_database() and l.locktype = 'advisory' and l.granted
              and l.objsubid = 1 and (l.classid::bigint << 32 | l.objid::bigint) = c_lock
        ));
end $$;
-- Version 0.1.0 is made anew, and its rows are carried over.
select 'upkeep' in (select tablename from pg_tables where schemaname = 'rota') as is_first \gset
\if :is_first
\ir upgrades/from_0_1_0/set_aside.sql
\endif
select to_regnamespace('rota') is null as fresh \gset
\if :{?allow_downgrade}
\else
\set allow_downgrade off
\endif

-- tables/: what is stored.  Made once, and changed by upgrades/ only.
\if :fresh
\ir tables/schema.sql
\ir base/clock.sql
\ir tables/jobs.sql
\ir tables/history.sql
\ir tables/effects.sql
\ir tables/receipts.sql
\ir tables/moves.sql
\ir tables/waiting.sql
\ir tables/limits.sql
\ir tables/pipelines.sql
\ir tables/schedules.sql
\ir tables/archive.sql
\ir tables/retries.sql
\ir tables/access.sql
\ir tables/manifest.sql
\ir base/configured.sql
\ir tables/configured.sql
\ir tables/statistics.sql
\ir base/encoding.sql
\ir base/audit.sql
\ir tables/audit.sql
\else
\ir upgrades/all.sql
\if :allow_downgrade
\ir upgrades/drop_code.sql
\endif
\ir base/clock.sql
\ir base/configured.sql
\endif
\ir tables/rows.sql

-- base/: what every other folder uses.
\ir base/version.sql
\if :allow_downgrade
\else
\ir upgrades/refuse_downgrade.sql
\endif
\ir base/queue_rights.sql
\ir base/moving.sql
\ir base/encoding.sql
\ir base/checks.sql
\ir base/ids.sql
\ir base/locks.sql
\ir base/backoff.sql
\ir base/notify.sql
\ir base/pending.sql
\ir base/audit.sql
\ir base/scan_start.sql
\ir base/counted.sql
\ir base/default_privileges.sql

-- jobs/: from enqueue to the end of a job.
\ir jobs/insert.sql
\ir jobs/keys.sql
\ir jobs/enqueue.sql
\ir jobs/slots.sql
\ir jobs/claim.sql
\ir jobs/finish.sql
\ir jobs/lease.sql
\ir jobs/retries.sql
\ir jobs/fail.sql
\ir jobs/end.sql
\ir jobs/control.sql
\ir jobs/queues.sql
\ir jobs/pauses.sql
\ir jobs/workers.sql
\ir jobs/effects.sql
\ir jobs/results.sql
\ir jobs/round_trip.sql
\ir jobs/forward.sql
\ir jobs/receive.sql

-- waiting/: jobs that wait for more than their time.
\ir waiting/hooks.sql
\ir waiting/key_starts.sql
\ir waiting/order.sql
\ir waiting/dependencies.sql
\ir waiting/limits.sql
\ir waiting/fairness.sql
\ir waiting/pipelines.sql

-- schedules/: jobs that are made again and again.
\ir schedules/text.sql
\ir schedules/calendar.sql
\ir schedules/zones.sql
\ir schedules/next.sql
\ir schedules/describe.sql
\ir schedules/definitions.sql
\ir schedules/occurrences.sql

-- maintenance/: what has to be done from time to time, by the session that ticks.
\ir maintenance/pending.sql
\ir maintenance/sweep.sql
\ir maintenance/moves.sql
\ir maintenance/breakers.sql
\ir maintenance/budgets.sql
\ir maintenance/archive.sql
\ir maintenance/statistics.sql
\ir maintenance/retention.sql
\ir maintenance/depths.sql
\ir maintenance/tick.sql
\ir maintenance/wakeups.sql
\ir maintenance/pg_cron.sql
\if :fresh
\ir tables/first_run.sql
\endif

-- operations/: what people and dashboards read.
\ir operations/statistics.sql
\ir operations/views.sql
\ir operations/words.sql
\ir operations/acts.sql
\ir operations/explain.sql
\ir operations/drift.sql
\ir operations/doctor.sql
\ir operations/verify.sql

do $$ begin perform rota._drop_leftovers(); end $$;

-- access/: who may do what.
\ir access/queue_grants.sql
\if :{?with_roles}
\if :with_roles
\ir access/roles.sql
\endif
\endif
\ir access/front.sql
\ir access/grants.sql
\ir access/visible_rows.sql
\if :fresh
\else
\ir upgrades/give_grants.sql
\endif
\if :is_first
\ir upgrades/from_0_1_0/carry_over.sql
\endif
do $$ begin perform rota._guard_texts(); perform rota._keep_manifest(); end $$;
\if :is_first
\ir upgrades/from_0_1_0/switch_over.sql
\endif
\if :{?database_number}
select rota.set_database_number(:database_number) as done \gset
\endif
\if :{?with_cron}
\if :with_cron
do $$ begin perform rota.start_ticker(); end $$;
\endif
\endif

commit;

\if :is_first
-- Calls that still read there finish first.  Another installer may have dropped it.
begin;
set local client_min_messages = warning;
set local lock_timeout = '1min';
do $$ begin
    perform set_config(s.name, '0', true) from pg_settings as s
    where s.name in ('statement_timeout', 'transaction_timeout');
end $$;
drop schema if exists rota_0_1_0 cascade;
commit;
\endif
