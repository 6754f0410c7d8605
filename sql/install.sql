/*
 * install.sql -- install rota, or bring an installed one up to date.
 *
 *     psql -f sql/install.sql                       into the database of your libpq defaults
 *     psql -v with_roles=1 -f sql/install.sql       also creates the four roles
 *     psql -v with_cron=1 -f sql/install.sql        also calls rota.start_ticker()
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

-- Of two installers at once the second waits here, and then finds the schema.
do $$ begin perform pg_advisory_xact_lock(hashtextextended('rota.install', 0)); end $$;
select to_regnamespace('rota') is null as fresh \gset

\if :fresh
\ir 10_schema.sql
\ir 30_clock.sql
\ir 20_tables.sql
\ir 21_finished_jobs.sql
\ir 22_effects.sql
\ir 23_waiting.sql
\ir 24_limits.sql
\ir 25_pipelines.sql
\ir 26_job_definitions.sql
\ir 27_queue_grants.sql
\else
\ir upgrades/all.sql
\ir 30_clock.sql
\endif

\ir 31_version.sql
\ir 32_checks.sql
\ir 33_backoff.sql
\ir 34_schedule_text.sql
\ir 35_calendar.sql
\ir 36_time_zones.sql
\ir 37_next_run.sql
\ir 38_describe.sql
\ir 39_buckets.sql
\ir 40_enqueue.sql
\ir 41_claim.sql
\ir 42_finish.sql
\ir 43_heartbeat.sql
\ir 44_control.sql
\ir 45_fail.sql
\ir 46_queues.sql
\ir 47_workers.sql
\ir 48_effects.sql
\ir 49_keys.sql
\ir 50_sweep.sql
\ir 51_schedule.sql
\ir 52_retention.sql
\ir 53_tick.sql
\ir 55_rechecks.sql
\ir 56_order.sql
\ir 57_dependencies.sql
\ir 58_limits.sql
\ir 59_pipelines.sql
\if :fresh
\ir 54_first_run.sql
\endif
\ir 60_pg_cron.sql
\ir 61_fire.sql
\ir 62_wakeups.sql
\ir 63_round_trip.sql
\ir 64_queue_grants.sql
\ir 65_next_due.sql
\ir 70_views.sql
\if :{?with_roles}
\ir 80_roles.sql
\endif
\ir 90_grants.sql
\if :{?with_cron}
do $$ begin perform rota.start_ticker(); end $$;
\endif

commit;
