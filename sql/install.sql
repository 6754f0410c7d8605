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

-- tables/: what is stored.  Made once, and changed by upgrades/ only.
\if :fresh
\ir tables/schema.sql
\ir base/clock.sql
\ir tables/jobs.sql
\ir tables/history.sql
\ir tables/effects.sql
\ir tables/waiting.sql
\ir tables/limits.sql
\ir tables/pipelines.sql
\ir tables/schedules.sql
\ir tables/access.sql
\ir tables/manifest.sql
\ir base/configured.sql
\ir tables/configured.sql
\else
\ir upgrades/all.sql
\ir base/clock.sql
\ir base/configured.sql
\endif

-- base/: what every other folder uses.
\ir base/version.sql
\ir base/queue_rights.sql
\ir base/checks.sql
\ir base/backoff.sql
\ir base/notify.sql
\ir base/pending.sql
\ir base/scan_start.sql

-- jobs/: from enqueue to the end of a job.
\ir jobs/insert.sql
\ir jobs/keys.sql
\ir jobs/enqueue.sql
\ir jobs/claim.sql
\ir jobs/finish.sql
\ir jobs/lease.sql
\ir jobs/fail.sql
\ir jobs/end.sql
\ir jobs/control.sql
\ir jobs/queues.sql
\ir jobs/workers.sql
\ir jobs/effects.sql
\ir jobs/round_trip.sql

-- waiting/: jobs that wait for more than their time.
\ir waiting/hooks.sql
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

-- maintenance/: what has to be done from time to time, by whoever ticks.
\ir maintenance/pending.sql
\ir maintenance/sweep.sql
\ir maintenance/expiry.sql
\ir maintenance/retention.sql
\ir maintenance/tick.sql
\ir maintenance/wakeups.sql
\ir maintenance/pg_cron.sql
\if :fresh
\ir tables/first_run.sql
\endif

-- operations/: what people and dashboards read.
\ir operations/views.sql
\ir operations/words.sql
\ir operations/explain.sql
\ir operations/drift.sql
\ir operations/doctor.sql
\ir operations/verify.sql

-- access/: who may do what.
\ir access/queue_grants.sql
\if :{?with_roles}
\ir access/roles.sql
\endif
\ir access/grants.sql
do $$ begin perform rota._keep_manifest(); end $$;
\if :{?with_cron}
do $$ begin perform rota.start_ticker(); end $$;
\endif

commit;
