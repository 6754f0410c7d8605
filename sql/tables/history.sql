/*
 * tables/history.sql -- the history.
 *
 * A job that has ended moves here and never changes again, except by retry_job().  Most jobs
 * end well and are kept for days: they are in partitions of one day each, so that purging a
 * day is one drop and not a million deletes.  Dead jobs are few and are kept for months: in
 * the same partitions, each day would have to stay for a few rows.  So the partitions are by
 * status first, then by day.
 *
 * Failed attempts are all kept for months, so they are in partitions of one week: a query by
 * job reads fourteen of them and not a hundred, each of which it has to lock.
 *
 * tick() makes partitions ahead.  If there was no tick, rows go to the default partition: a
 * missing partition never causes an error.
 */

create table rota.finished_jobs (
    id bigint not null,
    queue text collate "C" not null,
    job_type text collate "C" not null,
    payload jsonb not null,
    priority smallint not null,
    max_attempts integer not null,
    lease interval,
    time_limit interval,
    expires_at timestamptz,
    headers jsonb,
    backoff jsonb,
    idempotency_key text collate "C",
    ordering_key text collate "C",
    skip_dead boolean,
    limit_key text collate "C",
    pipeline text collate "C",
    stage text collate "C",
    stage_input jsonb,
    definition text collate "C",
    scheduled_for timestamptz,
    status text collate "C" not null,
    run_at timestamptz not null,
    attempts integer not null,
    lease_token bigint not null,
    locked_by text collate "C",
    cancel_requested_at timestamptz,
    cancel_reason text,
    progress_percent numeric(5, 2),
    progress_message text,
    last_error text,
    error_type text collate "C",
    failed_at timestamptz,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    started_at timestamptz,
    finished_at timestamptz not null,
    result jsonb,
    discarded_at timestamptz,
    ended_by xid not null default pg_current_xact_id()::xid
)
partition by list (status);

create table rota.finished_jobs_done partition of rota.finished_jobs
    for values in ('succeeded', 'cancelled')
    partition by range (finished_at);

create table rota.finished_jobs_done_default partition of rota.finished_jobs_done default;

create table rota.finished_jobs_dead partition of rota.finished_jobs
    for values in ('dead');

-- Not unique: a unique index of a partitioned table would need status and finished_at in it.
-- That a job ends once is held by its one row in jobs.
create index finished_jobs_id_idx on rota.finished_jobs (id);
create index finished_jobs_queue_idx on rota.finished_jobs (queue, finished_at);
create index finished_jobs_done_default_finished_at_idx
    on rota.finished_jobs_done_default (finished_at);
create index finished_jobs_dead_finished_at_idx on rota.finished_jobs_dead (finished_at);

comment on table rota.finished_jobs is
    'Jobs that have ended: succeeded, dead or cancelled, until retention drops them.';
comment on column rota.finished_jobs.result is 'What finish_job() was given.';
comment on column rota.finished_jobs.ended_by is
    'The transaction that wrote the row, by which the statistics find rows that commit late.';
comment on column rota.finished_jobs.discarded_at is
    'When an operator discarded this dead job, so that nothing reports it any longer.';
comment on table rota.finished_jobs_done is 'Succeeded and cancelled jobs, a partition a day.';
comment on table rota.finished_jobs_done_default is 'Where a day has no partition.';
comment on table rota.finished_jobs_dead is 'Dead jobs.';

create table rota.job_errors (
    job_id bigint not null,
    lease_token bigint not null,
    attempt integer not null,
    queue text collate "C" not null,
    job_type text collate "C" not null,
    worker text collate "C" not null,
    started_at timestamptz not null,
    failed_at timestamptz not null,
    error_type text collate "C",
    message text not null,
    stack text,
    run_at timestamptz,
    ended_by xid not null default pg_current_xact_id()::xid,
    payload jsonb,

    constraint job_errors_message_check check (char_length(message) <= 10000),
    constraint job_errors_stack_check check (char_length(stack) <= 20000)
)
partition by range (failed_at);

create table rota.job_errors_default partition of rota.job_errors default;

-- Not unique for the same reason: an attempt fails once because its row in jobs changes once.
create index job_errors_job_id_idx on rota.job_errors (job_id, lease_token);
create index job_errors_failed_at_idx on rota.job_errors (failed_at);

comment on table rota.job_errors is 'One row per failed attempt, a partition a week.';
comment on column rota.job_errors.run_at is 'The time from which the attempt could begin.';
comment on column rota.job_errors.payload is
    'The payload of the attempt, if it was changed since; else null.';
comment on table rota.job_errors_default is 'Where a week has no partition.';
