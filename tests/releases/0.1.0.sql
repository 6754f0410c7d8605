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


begin;
set local client_min_messages = warning;
set local lock_timeout = '5s';
set local search_path = pg_catalog, pg_temp;

-- Of two installers at once the second waits here, and then finds the schema.
do $$ begin perform pg_advisory_xact_lock(hashtextextended('rota.install', 0)); end $$;

/*
 * 10_schema.sql -- the one schema that holds everything.
 *
 * A plain create: if somebody made a schema of this name beforehand, the install must stop
 * rather than put functions that run with the owner's rights among foreign objects.
 */

create schema rota;

comment on schema rota is
    'Background jobs: call the functions, read the views, leave the tables alone.';
/*
 * 30_clock.sql -- the one clock.
 *
 * Every time that rota writes or compares comes from rota.now(), so no clock of a worker or
 * a web server ever decides anything.  It is the wall clock and not the start of the
 * transaction: a lease taken at the end of a long transaction must not be born expired.
 *
 * It is declared stable although the wall clock moves: then `run_at <= rota.now()` is an
 * index condition.  A statement that needs one instant for all its rows reads it once.
 */

create or replace function rota.now()
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return clock_timestamp();
end;
$$;

comment on function rota.now() is
    'The wall clock of the database, the only clock that rota reads.';
/*
 * 20_tables.sql -- the live tables.
 *
 * jobs holds only what is still to be done; the moment a job ends it moves to finished_jobs.
 * So jobs stays small however long the history is, and every question about work to do is
 * cheap.  That every row is in a state in which somebody looks for it, and a running one has a
 * deadline, is a CHECK: so none is stuck for ever.  PostgreSQL reads the text of each CHECK
 * again for every statement that writes, which costs as much as the write of an index entry: so
 * jobs has this one, and all else is left to the functions, which take it as an argument.
 */

create table rota.jobs (
    id bigint generated always as identity primary key,
    queue text not null,
    job_type text not null,
    payload jsonb not null,
    priority smallint not null,
    max_attempts integer not null,
    lease interval,
    backoff jsonb,
    idempotency_key text,
    ordering_key text,
    skip_dead boolean,
    if_parent_dead text,
    limit_key text,
    bucket text collate "C",
    is_limited boolean not null default false,
    pipeline text,
    stage text,
    stage_input jsonb,
    first_job_id bigint,
    definition text,
    scheduled_for timestamptz,
    status text not null,
    run_at timestamptz not null,
    attempts integer not null default 0,
    lease_token bigint not null default 0,
    locked_by text,
    locked_until timestamptz,
    cancel_requested_at timestamptz,
    cancel_reason text,
    rerun_payload jsonb,
    rerun_run_at timestamptz,
    rerun_priority smallint,
    progress_percent numeric(5, 2),
    progress_message text,
    last_error text,
    error_type text,
    failed_at timestamptz,
    created_at timestamptz not null default rota.now(),
    updated_at timestamptz not null default rota.now(),
    started_at timestamptz,

    constraint jobs_status_check check (
        status in ('blocked', 'queued', 'failed') and locked_until is null
        or status = 'running' and locked_until is not null
    )
)
with (
    -- Room on each page: progress of a running job is then written without index entries.
    fillfactor = 85,
    -- Every job leaves dead rows behind however few rows live; the default, a fifth of the
    -- table, would let them pile up in front of the claim.  Vacuum by count, without naps.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 50000,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);

-- The line in front of each worker: one lane is one (queue, priority), in order of run_at.
create index jobs_ready_idx on rota.jobs (queue, priority, run_at, id)
    where bucket is null and status in ('queued', 'failed');

-- The same rows as "where status = 'running'".  But that is said of single jobs everywhere, and
-- a planner that knows of few running jobs would look for the one by reading them all.
create index jobs_lease_idx on rota.jobs (locked_until)
    where locked_until is not null;

create unique index jobs_idempotency_key_idx on rota.jobs (idempotency_key)
    where idempotency_key is not null;

-- In which order the jobs of a key run, and that no two of them are at it.
create index jobs_ordering_key_idx on rota.jobs (ordering_key, coalesce(first_job_id, id))
    where ordering_key is not null;
create unique index jobs_ordering_key_head_idx on rota.jobs (ordering_key)
    where ordering_key is not null and status <> 'blocked';

-- A run of a pipeline is in one stage at a time.
create unique index jobs_first_job_id_idx on rota.jobs (first_job_id)
    where first_job_id is not null;

-- Whether a schedule has a live job.
create index jobs_definition_idx on rota.jobs (definition)
    where definition is not null;

comment on table rota.jobs is
    'Live jobs: blocked, queued, running, or failed and waiting for a retry.';
comment on column rota.jobs.priority is 'Lower runs first.';
comment on column rota.jobs.run_at is 'Not before this time; for a failed job its next try.';
comment on column rota.jobs.max_attempts is 'After so many attempts a failure is final.';
comment on column rota.jobs.lease is 'Length of a lease of this job; null means the queue''s.';
comment on column rota.jobs.backoff is 'Retry rule of this job; null means the queue''s.';
comment on column rota.jobs.idempotency_key is 'Unique among live jobs; null means no key.';
comment on column rota.jobs.ordering_key is
    'Jobs of one key run one at a time, in the order of their ids; null means no key.';
comment on column rota.jobs.skip_dead is 'Whether its key goes on if this job is dead.';
comment on column rota.jobs.if_parent_dead is
    'What becomes of the job if one that it waits for is dead: cancel, run or wait.';
comment on column rota.jobs.limit_key is
    'Jobs of one key share a limit, and the keys of a queue take turns; null means no key.';
comment on column rota.jobs.bucket is
    'The line that the job waits in, by limit_key and limited type; null is the common line.';
comment on column rota.jobs.is_limited is 'Whether the running job counts for a limit.';
comment on column rota.jobs.stage_input is 'Result of the stage before this one.';
comment on column rota.jobs.first_job_id is 'The job of the first stage of this run.';
comment on column rota.jobs.definition is 'The schedule that made the job; null for others.';
comment on column rota.jobs.scheduled_for is 'The planned time that the job stands for.';
comment on column rota.jobs.attempts is 'Claims so far that were not given back.';
comment on column rota.jobs.lease_token is
    'The fence: grows with each claim for the whole life of the job, and never goes back.';
comment on column rota.jobs.locked_by is 'The worker that runs the job; null unless running.';
comment on column rota.jobs.locked_until is 'End of the lease; null unless running.';
comment on column rota.jobs.cancel_requested_at is
    'When an operator asked the worker to stop; null unless running.';
comment on column rota.jobs.rerun_payload is
    'Payload of the run that follows this one; null if none was asked for.';
comment on column rota.jobs.last_error is 'Text of the last failure, at most 1000 characters.';
comment on column rota.jobs.started_at is 'Begin of the latest attempt.';

create table rota.idempotency_keys (
    idempotency_key text primary key,
    job_id bigint,
    unique_until timestamptz,
    source_updated_at timestamptz,
    kept_until timestamptz not null,

    constraint idempotency_keys_idempotency_key_check
        check (char_length(idempotency_key) between 1 and 255),
    constraint idempotency_keys_kept_until_check
        check (isfinite(kept_until) and coalesce(unique_until, kept_until) <= kept_until)
);

create index idempotency_keys_kept_until_idx on rota.idempotency_keys (kept_until);

comment on table rota.idempotency_keys is
    'Keys that mean something beyond the life of their job: unique for a time, or versioned.';
comment on column rota.idempotency_keys.job_id is 'The job that the key led to last.';
comment on column rota.idempotency_keys.unique_until is
    'Until then the key makes no new job; null for a key that is only versioned.';
comment on column rota.idempotency_keys.source_updated_at is
    'Newest version seen of what the job is about; null if none was given.';

create table rota.job_errors (
    job_id bigint not null,
    lease_token bigint not null,
    attempt integer not null,
    queue text not null,
    job_type text not null,
    worker text not null,
    started_at timestamptz not null,
    failed_at timestamptz not null,
    error_type text,
    message text not null,
    stack text,

    constraint job_errors_pkey primary key (job_id, lease_token),
    constraint job_errors_message_check check (char_length(message) <= 10000),
    constraint job_errors_stack_check check (char_length(stack) <= 20000)
);

create index job_errors_failed_at_idx on rota.job_errors (failed_at);

comment on table rota.job_errors is 'One row per failed attempt.';
comment on column rota.job_errors.message is 'Full text of the error, cut to 10000 characters.';
comment on column rota.job_errors.stack is 'Stack trace, cut to 20000 characters.';

create table rota.queues (
    queue text primary key,
    is_paused boolean not null default false,
    paused_at timestamptz,
    paused_by text,
    pause_reason text,
    lease interval,
    max_attempts integer,
    backoff jsonb,
    keep_finished interval,
    keep_dead interval,
    ageing interval,
    created_at timestamptz not null default rota.now(),
    updated_at timestamptz not null default rota.now(),

    constraint queues_queue_check check (octet_length(queue) between 1 and 63),
    constraint queues_paused_check check (is_paused = (paused_at is not null)),
    constraint queues_lease_check
        check (lease between interval '1 millisecond' and interval '30 days'),
    constraint queues_max_attempts_check check (max_attempts >= 1),
    constraint queues_backoff_check check (jsonb_typeof(backoff) = 'object'),
    constraint queues_keep_finished_check
        check (keep_finished between interval '0' and interval '100 years'),
    constraint queues_keep_dead_check
        check (keep_dead between interval '0' and interval '100 years'),
    constraint queues_ageing_check
        check (ageing between interval '1 second' and interval '30 days')
);

comment on table rota.queues is
    'Settings of queues that differ from the defaults; a queue needs no row to be used.';
comment on column rota.queues.paused_by is 'The database role that paused the queue.';
comment on column rota.queues.lease is 'Null means 1 minute.';
comment on column rota.queues.max_attempts is 'Null means 10.';
comment on column rota.queues.backoff is 'Null means exponential, 1 to 30 minutes.';
comment on column rota.queues.keep_finished is
    'How long succeeded and cancelled jobs are kept; null means 7 days.';
comment on column rota.queues.keep_dead is 'How long dead jobs are kept; null means 90 days.';
comment on column rota.queues.ageing is
    'A waiting job gains one priority each time this has passed; null means never.';

create table rota.workers (
    worker text primary key,
    host text,
    pid integer,
    version text,
    queues text[] not null,
    started_at timestamptz not null default rota.now(),
    last_seen_at timestamptz not null default rota.now(),

    constraint workers_worker_check check (char_length(worker) between 1 and 255)
);

comment on table rota.workers is
    'Who works here, for people to look at; nothing is ever decided by it.';

create table rota.upkeep (
    task text primary key,
    done_at timestamptz not null,
    done_by text
);

comment on table rota.upkeep is
    'When each part of the upkeep was last done or, for retention, last found something to do, '
    'and by whom.';

create table rota.upgrade_log (
    id integer primary key,
    name text not null,
    applied_at timestamptz not null default rota.now()
);

comment on table rota.upgrade_log is 'Which changes of the tables ran, and when.';

insert into rota.upgrade_log (id, name) values (0, 'fresh install');
insert into rota.upkeep (task, done_at)
values ('retention', '-infinity'), ('tick', '-infinity');
/*
 * 21_finished_jobs.sql -- the history.
 *
 * A job that has ended moves here and never changes again, except by retry_job().  What ends
 * well is most of it and is kept for days: it lies in partitions of one day each, so that
 * forgetting a day is one drop and not a million deletes.  What died is little and is kept for
 * months: were it in the same partitions, each day would have to stay for the sake of a few
 * rows.  So status comes first, and the day within it.
 *
 * tick() makes partitions ahead.  If nobody called it, rows go to the default partition: a
 * missing partition never refuses one.
 */

create table rota.finished_jobs (
    id bigint not null,
    queue text not null,
    job_type text not null,
    payload jsonb not null,
    priority smallint not null,
    max_attempts integer not null,
    lease interval,
    backoff jsonb,
    idempotency_key text,
    ordering_key text,
    skip_dead boolean,
    limit_key text,
    pipeline text,
    stage text,
    stage_input jsonb,
    first_job_id bigint,
    definition text,
    scheduled_for timestamptz,
    status text not null,
    run_at timestamptz not null,
    attempts integer not null,
    lease_token bigint not null,
    locked_by text,
    cancel_requested_at timestamptz,
    cancel_reason text,
    progress_percent numeric(5, 2),
    progress_message text,
    last_error text,
    error_type text,
    failed_at timestamptz,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    started_at timestamptz,
    finished_at timestamptz not null,
    result jsonb
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
create index finished_jobs_first_job_id_idx on rota.finished_jobs (first_job_id)
    where first_job_id is not null;
create index finished_jobs_queue_idx on rota.finished_jobs (queue, finished_at);
create index finished_jobs_done_default_finished_at_idx
    on rota.finished_jobs_done_default (finished_at);
create index finished_jobs_dead_finished_at_idx on rota.finished_jobs_dead (finished_at);

comment on table rota.finished_jobs is
    'Jobs that have ended: succeeded, dead or cancelled, until retention drops them.';
comment on column rota.finished_jobs.locked_by is 'The worker of the last attempt.';
comment on column rota.finished_jobs.result is 'What finish_job() was given.';
comment on table rota.finished_jobs_done is 'Succeeded and cancelled jobs, a partition a day.';
comment on table rota.finished_jobs_done_default is 'Where a day has no partition.';
comment on table rota.finished_jobs_dead is 'Dead jobs.';
/*
 * 22_effects.sql -- the once-only ledger.
 *
 * One row says that something outside of the database, such as a mail, is about to happen or
 * has happened.  The primary key is what makes it once: of two that want to write the same row
 * one does, whatever jobs they run.  completed_at tells the two states apart: until it is set,
 * nobody but the lease that holds the row knows whether the effect has happened.
 */

create table rota.effects (
    scope text not null,
    key text not null,
    job_id bigint not null,
    lease_token bigint not null,
    recorded_at timestamptz not null default rota.now(),
    completed_at timestamptz,
    kept_until timestamptz not null,
    result jsonb,

    constraint effects_pkey primary key (scope, key),
    constraint effects_scope_check check (octet_length(scope) between 1 and 63),
    constraint effects_key_check check (char_length(key) between 1 and 255),
    constraint effects_kept_until_check check (isfinite(kept_until)),
    constraint effects_result_check check (result is null or completed_at is not null)
);

create index effects_kept_until_idx on rota.effects (kept_until);

comment on table rota.effects is
    'What must happen once outside of the database: a row before it, completed after it.';
comment on column rota.effects.scope is 'What kind of effect; a name like that of a queue.';
comment on column rota.effects.key is 'Which one; unique in its scope.';
comment on column rota.effects.lease_token is 'The lease that holds the row, with job_id.';
comment on column rota.effects.completed_at is 'Null while the outcome is not known.';
comment on column rota.effects.kept_until is 'Retention deletes the row after this.';
/*
 * 23_waiting.sql -- what a job waits for besides its time.
 *
 * dependencies: a row for each job that another one waits for.  It goes when the parent ends
 * well; whether a child is free is then a question of whether it has a row left, and no counter
 * can be wrong.  Of a pipeline one waits for a whole run, and names it by its first job: so the
 * row has nothing to follow while the run goes from stage to stage.
 *
 * stuck_keys: an ordering key whose next job is dead.  Without the row the jobs behind go on.
 *
 * rechecks: notes that something may go on now.  Whoever makes that possible (a job ends, a job
 * comes in) only adds a note, in its own transaction; it waits for nobody and locks nothing of
 * others.  Claims and ticks take the notes and look again, at what is committed by then.
 */

create table rota.dependencies (
    parent_id bigint not null,
    job_id bigint not null,
    is_failed boolean not null default false,

    constraint dependencies_pkey primary key (parent_id, job_id),
    constraint dependencies_job_id_check check (job_id <> parent_id)
);

create index dependencies_job_id_idx on rota.dependencies (job_id, parent_id);
-- A job may wait for a million others, and is looked at each time that some of them end.
create index dependencies_failed_idx on rota.dependencies (job_id) where is_failed;

comment on table rota.dependencies is 'Which job waits for which; no row once that is over.';
comment on column rota.dependencies.parent_id is
    'The job that has to end first; the first job of a run stands for the whole run.';
comment on column rota.dependencies.job_id is 'The job that waits.';
comment on column rota.dependencies.is_failed is
    'The parent is dead or was cancelled, and counts as such unless it is live again.';

create table rota.stuck_keys (
    ordering_key text primary key,
    job_id bigint not null,
    stuck_since timestamptz not null default rota.now()
);

comment on table rota.stuck_keys is
    'Ordering keys that wait for somebody to retry their dead job, or to resume the key.';

create table rota.rechecks (
    id bigint generated always as identity,
    due_at timestamptz not null,
    kind text not null,
    subject text not null,
    made_by xid8 not null default pg_current_xact_id(),
    is_seen boolean not null default false,

    constraint rechecks_pkey primary key (due_at, id),
    constraint rechecks_kind_check
        check (kind in ('job', 'order', 'parent', 'bucket', 'limit', 'schedule'))
)
with (
    -- Notes that were taken lie in front of those that are due.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

comment on table rota.rechecks is
    'Notes that something may go on now; taken away by another who has looked.';
comment on column rota.rechecks.subject is
    'A job''s id (of a parent with how it ended), an ordering key, a bucket, a limit or a '
    'schedule''s name, by kind.';
comment on column rota.rechecks.made_by is
    'The transaction that wrote it; it cannot take its own note away.';
comment on column rota.rechecks.is_seen is 'The transaction that wrote it has looked already.';
/*
 * 24_limits.sql -- limits, and the lines behind them.
 *
 * limits: what an operator has set.
 *
 * limit_states: a row for each limit in use, such as 'key customer:8' of the class customer:*.
 * Whoever gives out jobs under a limit holds its row, and looks at the rest only then.  It can
 * be thrown away when nobody holds it.
 *
 * slots: which running jobs count for which limit.  A row counts only as long as its job runs,
 * so the jobs themselves are the truth, and a slot is free with the lease that held it.
 *
 * buckets: a row for each line that has due jobs, one for each queue, limited job type and
 * limit_key.  Jobs with a bucket stand in an index of their own; the common line of the queue
 * does not see them, and a claim finds out whose turn it is from these rows alone.  A bucket
 * whose limit is reached is parked: no claim looks at it until its limit has room.
 */

create table rota.limits (
    limit_name text collate "C" primary key,
    queue text,
    job_type text,
    limit_key text,
    max_running integer,
    max_starts integer,
    per interval,
    burst integer,
    weight integer,
    created_at timestamptz not null default rota.now(),
    updated_at timestamptz not null default rota.now(),
    is_settled boolean not null default false,
    settled_xid xid8,

    constraint limits_subject_check
        check (
            num_nonnulls(queue, job_type, limit_key) = 1
            and limit_name
                = coalesce('queue ' || queue, 'type ' || job_type, 'key ' || limit_key)
        ),
    constraint limits_max_running_check check (max_running between 0 and 1000000),
    constraint limits_max_starts_check check (max_starts between 1 and 1000000),
    constraint limits_per_check check (per between interval '1 millisecond' and '366 days'),
    constraint limits_burst_check check (burst between 1 and 10000),
    constraint limits_weight_check check (weight between 1 and 1000)
);

create unique index limits_queue_idx on rota.limits (queue) where queue is not null;
create unique index limits_job_type_idx on rota.limits (job_type) where job_type is not null;

comment on table rota.limits is 'How much may run at once or start in a time, as set.';
comment on column rota.limits.limit_key is
    'A key, or customer:* (no other colon) for each key that begins with customer: and has no '
    'row of its own.';
comment on column rota.limits.max_running is 'Null means no limit.';
comment on column rota.limits.max_starts is 'Starts in the time per; null means no limit.';
comment on column rota.limits.per is 'Null means 1 second.';
comment on column rota.limits.burst is 'How many may start at once after a rest; null means 1.';
comment on column rota.limits.weight is 'Jobs of the key in each of its turns; null means 1.';
comment on column rota.limits.is_settled is
    'Whether all that ran before the limit was set is counted by now.';
comment on column rota.limits.settled_xid is
    'Transactions before this one may not know of the limit; null until somebody has looked.';

create table rota.limit_states (
    limit_name text collate "C" primary key,
    used_until timestamptz not null
)
with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

create index limit_states_used_until_idx on rota.limit_states (used_until);

comment on table rota.limit_states is
    'The limits in use; held by whoever starts jobs under one.';
comment on column rota.limit_states.used_until is
    'When the starts so far are paid for at the rate of the limit.';

create table rota.slots (
    limit_name text collate "C" not null,
    job_id bigint not null,

    constraint slots_pkey primary key (limit_name, job_id)
)
with (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

create index slots_job_id_idx on rota.slots (job_id);

comment on table rota.slots is 'Which running jobs count for which limit.';

create table rota.buckets (
    queue text not null,
    bucket text collate "C" not null,
    priority smallint not null,
    run_at timestamptz not null,
    turn_at timestamptz not null,
    starts integer not null default 0,
    waits_for text collate "C",

    constraint buckets_pkey primary key (queue, bucket)
)
with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

create index buckets_turn_idx on rota.buckets (queue, priority, turn_at)
    where waits_for is null;
create index buckets_waits_for_idx on rota.buckets (waits_for, queue, priority, turn_at)
    where waits_for is not null;

comment on table rota.buckets is 'Lines of due jobs, by limited job type and limit_key.';
comment on column rota.buckets.bucket is 'The limited job type or nothing, |, the key.';
comment on column rota.buckets.priority is 'Of the first job.';
comment on column rota.buckets.run_at is 'Of the first job.';
comment on column rota.buckets.turn_at is
    'Its place among the buckets: when it had its last turn.';
comment on column rota.buckets.starts is 'Jobs started in this turn.';
comment on column rota.buckets.waits_for is
    'The limit it is parked at; null while it takes turns.';

-- The line of each bucket.
create index jobs_bucket_idx on rota.jobs (queue, bucket, priority, run_at, id)
    where bucket is not null and status in ('queued', 'failed');

-- Whether there is such a note is asked before it is written.
create index rechecks_subject_idx on rota.rechecks (subject, due_at, id)
    where kind in ('bucket', 'limit');
/*
 * 25_pipelines.sql -- the stages of pipelines.
 *
 * A row is never deleted.  A stage that a new definition leaves out is retired: no run enters
 * it any more, but the runs that are in it still find here where they go on to.  So a pipeline
 * can be defined anew at any moment, and no run is lost by it or has to be waited for.
 */

create table rota.pipeline_stages (
    pipeline text not null,
    stage text not null,
    ordinal integer,
    next_stage text,
    job_type text not null,
    queue text not null,
    priority smallint,
    max_attempts integer,
    lease interval,
    backoff jsonb,

    constraint pipeline_stages_pkey primary key (pipeline, stage),
    constraint pipeline_stages_ordinal_key unique (pipeline, ordinal),
    constraint pipeline_stages_stage_check
        check (octet_length(stage) between 1 and 63 and stage <> 'end')
);

comment on table rota.pipeline_stages is 'The stages of each pipeline, in their order.';
comment on column rota.pipeline_stages.ordinal is
    'Place in the order, from 1; null for a stage that is not part of the pipeline any more.';
comment on column rota.pipeline_stages.next_stage is
    'Where a job goes on to unless it says otherwise; null after the last stage.';
comment on column rota.pipeline_stages.priority is
    'Null means that of the stage before, and for the first that of start_pipeline().';
comment on column rota.pipeline_stages.max_attempts is 'Null means the queue''s.';
comment on column rota.pipeline_stages.lease is 'Null means the queue''s.';
comment on column rota.pipeline_stages.backoff is 'Null means the queue''s.';
/*
 * 26_job_definitions.sql -- schedules: which jobs there shall be, and when.
 *
 * A definition is a row, with the time of its next run in it.  Nothing but this row decides
 * what is due: whoever ticks, however late and however often, finds the same.
 *
 * fires: one row for each planned time that was dealt with.  Its key is the promise that a
 * planned time makes at most one job, whatever the clock does and whoever ticks; and it says
 * what became of a planned time that made none.  Rows go with retention, and then last_run_at,
 * which never goes back, stands for them.
 */

create table rota.job_definitions (
    name text primary key,
    job_type text not null,
    queue text not null,
    payload jsonb not null,
    schedule text not null,
    kind text not null generated always as (
        coalesce(
            lower(substring(schedule, '(?i)^[[:space:]]*(every|after)(?![[:alnum:]_])')),
            'cron')
    ) stored,
    time_zone text not null,
    priority smallint not null,
    max_attempts integer,
    lease interval,
    backoff jsonb,
    catch_up text not null,
    catch_up_window interval,
    catch_up_max integer not null,
    overlap text not null,
    jitter interval not null,
    starts_at timestamptz,
    ends_at timestamptz,
    is_enabled boolean not null default true,
    disabled_at timestamptz,
    disabled_by text,
    last_error text,
    anchored_at timestamptz not null,
    next_run_at timestamptz,
    last_run_at timestamptz,
    last_job_id bigint,
    created_at timestamptz not null default rota.now(),
    updated_at timestamptz not null default rota.now(),

    constraint job_definitions_catch_up_check
        check (catch_up in ('skip', 'one', 'all')),
    constraint job_definitions_catch_up_max_check
        check (catch_up_max between 1 and 1000),
    constraint job_definitions_overlap_check
        check (overlap in ('allow', 'skip', 'queue')),
    constraint job_definitions_is_enabled_check
        check (is_enabled = (disabled_at is null) and (is_enabled or next_run_at is null)),
    constraint job_definitions_next_run_at_check
        check (isfinite(next_run_at) and next_run_at > coalesce(last_run_at, '-infinity'))
);

create index job_definitions_next_run_at_idx on rota.job_definitions (next_run_at)
    where next_run_at is not null;

comment on table rota.job_definitions is
    'Schedules: jobs that are made again and again, with the time of the next.';
comment on column rota.job_definitions.kind is
    'What its times are counted from: cron (a wall clock), every (an anchor) or after (the end '
    'of the last job).';
comment on column rota.job_definitions.max_attempts is 'Null means the queue''s.';
comment on column rota.job_definitions.lease is 'Null means the queue''s.';
comment on column rota.job_definitions.backoff is 'Null means the queue''s.';
comment on column rota.job_definitions.catch_up is
    'What becomes of planned times that nobody ticked for: skip, one or all.';
comment on column rota.job_definitions.catch_up_window is
    'Planned times longer ago make no job; null means 1 minute for skip, else no limit.';
comment on column rota.job_definitions.catch_up_max is
    'With all, at most so many jobs at once, the newest.';
comment on column rota.job_definitions.overlap is
    'While the last job is live: allow another, skip it, or queue it behind.';
comment on column rota.job_definitions.jitter is
    'Each job may start up to so much later than planned.';
comment on column rota.job_definitions.disabled_by is
    'The database role that disabled it; null if an error did, which is in last_error.';
comment on column rota.job_definitions.anchored_at is
    'What "every" counts from: starts_at, or when this schedule was given.';
comment on column rota.job_definitions.next_run_at is
    'The next planned time; null while disabled, after ends_at, or until the last job ends.';
comment on column rota.job_definitions.last_run_at is
    'The latest planned time that was dealt with; never goes back.';
comment on column rota.job_definitions.last_job_id is 'The job that was made last.';

create table rota.fires (
    definition text not null,
    scheduled_for timestamptz not null,
    outcome text not null,
    job_id bigint,
    fired_at timestamptz not null,

    constraint fires_pkey primary key (definition, scheduled_for),
    constraint fires_outcome_check
        check (
            outcome in ('fired', 'skipped', 'missed')
            and (outcome = 'fired') = (job_id is not null)
        )
);

create index fires_fired_at_idx on rota.fires (fired_at);

comment on table rota.fires is
    'Planned times that were dealt with: at most one job for each, for ever.';
comment on column rota.fires.outcome is
    'fired: a job was made; skipped: the last one was live; missed: the first of those that '
    'came too late for catch_up.';

-- What _parse_schedule() makes of a text.  A field is a set of bits, one for each value.
create type rota.parsed_schedule as (
    kind text,
    period interval,
    seconds bigint,
    minutes bigint,
    hours bigint,
    days bigint,
    months bigint,
    weekdays bigint,
    is_both boolean,
    is_fixed boolean
);

comment on type rota.parsed_schedule is 'A schedule text as sets of numbers.';
/*
 * 27_queue_grants.sql -- the queues to which a role is confined.
 *
 * A role that is named here for an access has that access in these queues only, and so has
 * everybody who is a member of it.  A right that is taken back stays as a row: otherwise the
 * last one taken back would open all queues.
 */

create table rota.queue_grants (
    role regrole not null,
    access text collate "C" not null,
    queue text collate "C" not null,
    granted_at timestamptz not null,
    revoked_at timestamptz,

    constraint queue_grants_pkey primary key (role, access, queue),
    constraint queue_grants_access_check check (access in ('producer', 'worker'))
);

comment on table rota.queue_grants is
    'The queues in which a role may enqueue (producer) or work (worker); a role without a row '
    'may in all.';
comment on column rota.queue_grants.queue is 'A queue, or * for all of them.';
comment on column rota.queue_grants.revoked_at is
    'Since when the right is taken back; the role stays confined to its other queues.';

/*
 * 31_version.sql -- the version of the installed code.
 *
 * A literal in a function that each install replays: it cannot be lost by a dump, and it
 * cannot disagree with the code beside it.  Which changes of tables ran is in upgrade_log.
 */

create or replace function rota.version()
    returns text
    language sql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
select '0.1.0'
$$;

comment on function rota.version() is
    'The version of the installed functions, such as 0.1.0.';
/*
 * 32_checks.sql -- how a bad argument is refused.
 *
 * Every public function looks at its arguments before it touches a row, and refuses with
 * SQLSTATE 22023 and a message that begins with the argument's name.  null for a required
 * argument is an error and never means "everything".
 */

create or replace function rota._refuse(argument text, problem text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'invalid_parameter_value',
        message = format('%s %s', _refuse.argument, _refuse.problem);
end;
$$;

create or replace function rota._check_name(argument text, name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_name.name ~ '^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}$' then
        return;
    end if;

    perform rota._refuse(_check_name.argument, format(
        'must be 1 to 63 of the characters A-Z a-z 0-9 _ . : / - and begin with a letter or '
        'digit, got %L', left(_check_name.name, 80)));
end;
$$;

create or replace function rota._check_names(argument text, names text[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_names.names is null
      or cardinality(_check_names.names) not between 1 and 1000 then
        perform rota._refuse(_check_names.argument, format('must be 1 to 1000 names, got %s',
            coalesce(cardinality(_check_names.names)::text, 'null')));
    elsif array_ndims(_check_names.names) > 1 or array_lower(_check_names.names, 1) <> 1 then
        perform rota._refuse(_check_names.argument, 'must be a plain list of names');
    end if;
    -- A call costs more than the pattern.
    perform rota._check_name(_check_names.argument, n.name)
    from unnest(_check_names.names) as n (name)
    where (n.name ~ '^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}$') is not true;
end;
$$;

create or replace function rota._check_text(argument text, value text, longest integer)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    -- The bytes first: there can be megabytes, and characters have to be counted.
    if octet_length(_check_text.value) <= 4 * _check_text.longest
      and char_length(_check_text.value) between 1 and _check_text.longest then
        return;
    end if;

    perform rota._refuse(_check_text.argument, format('must be 1 to %s characters, got %s',
        _check_text.longest, coalesce(char_length(_check_text.value)::text, 'null')));
end;
$$;

/*
 * A payload or a result, by the length of its text.  That is at least a quarter of the binary
 * form, as in [0, 0]; so what is far too long need not be made a text to be refused.
 */
create or replace function rota._check_size(argument text, value jsonb, advice text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_size constant text := case
        when pg_column_size(_check_size.value) > 5242880
        then pg_size_pretty(pg_column_size(_check_size.value)::bigint) || ' in binary form'
        when octet_length(_check_size.value::text) > 1048576
        then octet_length(_check_size.value::text) || ' bytes'
    end;
begin
    if v_size is not null then
        perform rota._refuse(_check_size.argument, format(
            'must be at most 1 MiB, got %s%s', v_size, _check_size.advice));
    end if;
end;
$$;

create or replace function rota._check_interval(
    argument text,
    value interval,
    shortest interval,
    longest interval
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    -- Twice: an infinite one has no seconds, and the seconds of '1 year -330 days' are few.
    if _check_interval.value >= _check_interval.shortest
      and _check_interval.value <= _check_interval.longest
      and rota._exact(_check_interval.value)
        between rota._exact(_check_interval.shortest)
        and rota._exact(_check_interval.longest) then
        return;
    end if;

    perform rota._refuse(_check_interval.argument, format('must be %s to %s, got %s',
        _check_interval.shortest, _check_interval.longest,
        coalesce(_check_interval.value::text, 'null')));
end;
$$;

/*
 * A duration as seconds.  A day of an interval has 23 hours when the session's time zone says
 * so, and '1 month -29 days' is a positive interval that ends in the past in February.
 */
create or replace function rota._exact(duration interval)
    returns interval
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return make_interval(secs => extract(epoch from _exact.duration)::float8);
end;
$$;

create or replace function rota._check_lease(argument text, lease interval)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_lease.lease is not null then
        perform rota._check_interval(
            _check_lease.argument, _check_lease.lease, '1 millisecond', '30 days');
    end if;
end;
$$;

create or replace function rota._check_run_at(argument text, run_at timestamptz)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_run_at.run_at between '1970-01-01 00:00+00' and '9999-01-01 00:00+00' then
        return;
    end if;

    perform rota._refuse(_check_run_at.argument, format(
        'must be a time from 1970 to 9998, got %s',
        coalesce(_check_run_at.run_at::text, 'null')));
end;
$$;

create or replace function rota._check_priority(argument text, priority integer)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_priority.priority is null
      or _check_priority.priority not between -32768 and 32767 then
        perform rota._refuse(_check_priority.argument, format('must be -32768 to 32767, got %s',
            coalesce(_check_priority.priority::text, 'null')));
    end if;
end;
$$;

/* What a new job may have to wait for; *prefix* says which of many it is. */
create or replace function rota._check_waits(
    prefix text,
    ordering_key text,
    skip_dead boolean,
    after bigint[],
    if_parent_dead text,
    limit_key text
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_waits.ordering_key is not null then
        perform rota._check_text(
            _check_waits.prefix || 'ordering_key', _check_waits.ordering_key, 255);
    end if;
    if _check_waits.skip_dead is null then
        perform rota._refuse(_check_waits.prefix || 'skip_dead', 'must not be null');
    elsif _check_waits.skip_dead and _check_waits.ordering_key is null then
        perform rota._refuse(_check_waits.prefix || 'skip_dead', 'goes with ordering_key only');
    end if;
    if _check_waits.after is not null then
        if array_ndims(_check_waits.after) > 1
          or array_position(_check_waits.after, null) is not null
          or cardinality(_check_waits.after) > 10000 then
            perform rota._refuse(
                _check_waits.prefix || 'after', 'must be a plain list of at most 10000 ids');
        end if;
    end if;
    if _check_waits.if_parent_dead is null
      or _check_waits.if_parent_dead not in ('cancel', 'run', 'wait') then
        perform rota._refuse(_check_waits.prefix || 'if_parent_dead', format(
            'must be cancel, run or wait, got %L', left(_check_waits.if_parent_dead, 80)));
    end if;
    if _check_waits.limit_key is not null then
        perform rota._check_text(
            _check_waits.prefix || 'limit_key', _check_waits.limit_key, 255);
        if _check_waits.limit_key like '%:*' then
            perform rota._refuse(
                _check_waits.prefix || 'limit_key', 'must not end with :*, as classes do');
        end if;
    end if;
end;
$$;

create or replace function rota._check_job_id(job_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_job_id.job_id is null then
        perform rota._refuse('job_id', 'must not be null');
    end if;
end;
$$;

/* The job of a worker, which is not there if it is in a queue that he is kept from. */
create or replace function rota._check_job_ref(job_id bigint, lease_token bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_job_id(_check_job_ref.job_id);
    if _check_job_ref.lease_token is null then
        perform rota._refuse('lease_token', 'must not be null');
    elsif rota._foreign_jobs(array[_check_job_ref.job_id]) <> '{}' then
        perform rota._raise_not_found(_check_job_ref.job_id);
    end if;
end;
$$;

create or replace function rota._check_job_refs(
    job_ids bigint[],
    lease_tokens bigint[],
    prefix text default ''
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if array_ndims(_check_job_refs.job_ids) > 1
      or array_ndims(_check_job_refs.lease_tokens) > 1
      or array_lower(_check_job_refs.job_ids, 1) <> 1
      or array_lower(_check_job_refs.lease_tokens, 1) <> 1 then
        perform rota._refuse(
            _check_job_refs.prefix || 'job_ids', format(
                'and %slease_tokens must be plain lists', _check_job_refs.prefix));
    elsif _check_job_refs.job_ids is null
      or array_position(_check_job_refs.job_ids, null) is not null then
        perform rota._refuse(
            _check_job_refs.prefix || 'job_ids', 'must not be null or hold a null');
    elsif _check_job_refs.lease_tokens is null
      or array_position(_check_job_refs.lease_tokens, null) is not null then
        perform rota._refuse(
            _check_job_refs.prefix || 'lease_tokens', 'must not be null or hold a null');
    elsif cardinality(_check_job_refs.job_ids) > 1000 then
        perform rota._refuse(
            _check_job_refs.prefix || 'job_ids', format(
                'must be at most 1000, got %s', cardinality(_check_job_refs.job_ids)));
    elsif cardinality(_check_job_refs.job_ids) <> cardinality(_check_job_refs.lease_tokens) then
        perform rota._refuse(
            _check_job_refs.prefix || 'lease_tokens', format(
                'must be as many as %sjob_ids (%s), got %s', _check_job_refs.prefix,
                cardinality(_check_job_refs.job_ids),
                cardinality(_check_job_refs.lease_tokens)));
    end if;
end;
$$;

/*
 * The ids of the leases that may be alive, null for the others, in the order given.  A worker
 * can hold an old and a new lease of one job and report both together; only that counts which
 * the job has, and else the newest, which may just be in the making.  None is alive for who may
 * not work there.
 */
create or replace function rota._newest_refs(job_ids bigint[], lease_tokens bigint[])
    returns bigint[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_foreign constant bigint[] := rota._foreign_jobs(_newest_refs.job_ids);
begin
    return array(
        select
            case rank() over (
                partition by r.job_id
                order by
                    r.lease_token = (
                        select j.lease_token
                        from rota.jobs as j
                        where j.id = r.job_id
                    ) desc nulls last,
                    r.lease_token desc
            )
                when 1 then nullif(r.job_id, v_foreign[array_position(v_foreign, r.job_id)])
            end
        from unnest(_newest_refs.job_ids, _newest_refs.lease_tokens)
            with ordinality as r (job_id, lease_token, ordinal)
        order by r.ordinal
    );
end;
$$;

/*
 * Lock those running jobs of a batch that nobody else has locked; returns the ids in the order
 * given, null where it could not be.  A row that somebody holds for long, as an operator who
 * forgets to commit a cancel does, must not hold up the others of its worker.  But a claim that
 * came upon the row while it was being claimed holds it too, and only until its commit: so
 * those that are held are tried again, for 20 ms.
 *
 * Tried, and not waited for: who waits while he holds others can be part of a circle, and on a
 * machine that is slow enough the server breaks it before the wait is over.  An order of the
 * locks would not help, because a claim is in no order, and `skip locked` does wait, though
 * seldom: if the transaction that it would pass over ends in that very moment, it waits for
 * whoever has locked the row after that.
 */
create or replace function rota._hold_jobs(job_ids bigint[], lease_tokens bigint[])
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_held bigint[] := '{}'::bigint[];
begin
    for v_try in 1..11 loop
        v_held := v_held || array(
            select j.id
            from rota.jobs as j
            where j.id = any(_hold_jobs.job_ids)
              and j.lease_token
                = _hold_jobs.lease_tokens[array_position(_hold_jobs.job_ids, j.id)]
              and j.status = 'running'
              and j.id <> all(v_held)
            for update skip locked
        );
        exit when v_try = 11 or not exists (
            select
            from rota.jobs as j
            where j.id = any(_hold_jobs.job_ids)
              and j.lease_token
                = _hold_jobs.lease_tokens[array_position(_hold_jobs.job_ids, j.id)]
              and j.status = 'running'
              and j.id <> all(v_held)
        );
        perform pg_sleep(0.002);
    end loop;
    return array(
        select h.id
        from unnest(_hold_jobs.job_ids) with ordinality as i (id, ordinal)
        left join unnest(v_held) as h (id) on h.id = i.id
        order by i.ordinal
    );
end;
$$;

create or replace function rota._is_running(job_id bigint, lease_token bigint)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select
        from rota.jobs as j
        where j.id = _is_running.job_id
          and j.lease_token = _is_running.lease_token
          and j.status = 'running'
          and (
            not exists (select from rota.queue_grants)
            or rota._foreign_jobs(array[j.id]) = '{}'
          )
    );
end;
$$;

/*
 * The answer to a caller whose (job_id, lease_token) matched no running job.  A job that
 * ended under this very token is RT003; anything else was claimed by somebody else or given
 * back since, and is RT002.
 */
create or replace function rota._raise_lost(job_id bigint, lease_token bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_status text;
    v_lease_token bigint;
begin
    perform rota._check_job_ref(_raise_lost.job_id, _raise_lost.lease_token);
    select r.status, r.lease_token
    into v_status, v_lease_token
    from (
        select j.status, j.lease_token from rota.jobs as j where j.id = _raise_lost.job_id
        union all
        select f.status, f.lease_token
        from rota.finished_jobs as f
        where f.id = _raise_lost.job_id
    ) as r
    limit 1;

    if v_status is null then
        perform rota._raise_not_found(_raise_lost.job_id);
    elsif v_lease_token = _raise_lost.lease_token
      and v_status in ('succeeded', 'dead', 'cancelled') then
        raise exception using
            errcode = 'RT003',
            message = format('job %s already ended as %s', _raise_lost.job_id, v_status),
            hint = 'Its outcome stands; retry_job() runs it again.';
    else
        raise exception using
            errcode = 'RT002',
            message = format('job %s: lease %s is lost, the job is now %s',
                _raise_lost.job_id, _raise_lost.lease_token, v_status),
            hint = 'Stop working on it and roll back: the lease ended or was given back.';
    end if;
end;
$$;

create or replace function rota._raise_not_found(job_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'RT001',
        message = format('job %s not found', _raise_not_found.job_id),
        hint = 'It never existed, or retention has removed it.';
end;
$$;
/*
 * 33_backoff.sql -- how long a failed job waits before its next try.
 *
 * A rule is a small object, kept with the job or with its queue:
 *
 *     {"kind": "fixed",       "base_seconds": 60}                           1m 1m 1m
 *     {"kind": "linear",      "base_seconds": 300}                          5m 10m 15m
 *     {"kind": "exponential", "base_seconds": 60, "cap_seconds": 1800}      1m 2m 4m ... 30m
 *     {"kind": "quadratic",   "base_seconds": 10}                           10s 40s 90s
 *     {"kind": "list",        "delay_seconds": [60, 300, 1800, 7200]}       the last repeats
 *
 * "jitter" (default 0.2) spreads each delay by so much to both sides, so that jobs which
 * failed together do not come back together.  "cap_seconds" (default a day) is a true
 * maximum: the middle of the spread is held below it, rather than half of the jobs cut to it.
 *
 * _check_backoff() is strict, because a person reads its answer.  _backoff() accepts anything
 * and always returns a delay, because a job that fails must be able to.  It works on numbers
 * and makes an interval last: an interval of 2^44 seconds is silently negative.
 */

create or replace function rota._backoff(policy jsonb, attempt integer)
    returns interval
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_kind constant text := coalesce(_backoff.policy ->> 'kind', 'exponential');
    v_base constant float8 := rota._bounded(
        _backoff.policy -> 'base_seconds', 60, 0.001, 31536000);
    v_cap constant float8 := rota._bounded(
        _backoff.policy -> 'cap_seconds',
        case when _backoff.policy is null then 1800 else 86400 end,
        0.001,
        31536000);
    v_jitter constant float8 := rota._bounded(_backoff.policy -> 'jitter', 0.2, 0, 0.9);
    v_attempt constant float8 := greatest(_backoff.attempt, 1)::float8;
    v_delay float8;
begin
    v_delay := case v_kind
        when 'fixed' then v_base
        when 'linear' then v_base * v_attempt
        when 'quadratic' then v_base * v_attempt * v_attempt
        when 'list' then rota._bounded(
            _backoff.policy -> 'delay_seconds' -> (least(
                v_attempt::bigint,
                case jsonb_typeof(_backoff.policy -> 'delay_seconds')
                    when 'array' then jsonb_array_length(_backoff.policy -> 'delay_seconds')
                    else 1
                end
            )::integer - 1),
            v_base, 0.001, 31536000)
        else v_base * power(2, least(v_attempt - 1, 62))
    end;

    if v_kind <> 'list' or _backoff.policy ? 'cap_seconds' then
        v_delay := least(v_delay, v_cap / (1 + v_jitter));
    end if;
    return make_interval(secs => v_delay * (1 + v_jitter * (2 * random() - 1)));
end;
$$;

/* A JSON number within bounds; anything else is the fallback. */
create or replace function rota._bounded(value jsonb, fallback float8, low float8, high float8)
    returns float8
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if jsonb_typeof(_bounded.value) is distinct from 'number' then
        return _bounded.fallback;
    end if;
    -- Rounded, since a float8 can be too coarse even for a number within bounds: 1e-400.
    return round(least(
        greatest(_bounded.value::numeric, _bounded.low::numeric), _bounded.high::numeric
    ), 9)::float8;
end;
$$;

create or replace function rota._check_backoff(argument text, backoff jsonb)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_key text;
    v_value jsonb;
    v_problem text;
begin
    if _check_backoff.backoff is null then
        return;
    end if;

    if jsonb_typeof(_check_backoff.backoff) <> 'object' then
        v_problem := 'must be an object such as {"kind": "fixed", "base_seconds": 60}';
    elsif _check_backoff.backoff ->> 'kind' is null or _check_backoff.backoff ->> 'kind'
      not in ('fixed', 'linear', 'exponential', 'quadratic', 'list') then
        v_problem := 'needs a kind: fixed, linear, exponential, quadratic or list';
    elsif (_check_backoff.backoff ->> 'kind' = 'list')
      <> (_check_backoff.backoff ? 'delay_seconds') then
        v_problem := 'needs delay_seconds for the kind list, and only for it';
    end if;

    for v_key, v_value in
        select e.key, e.value
        from jsonb_each(_check_backoff.backoff) as e
        where v_problem is null
          and e.key <> 'kind'
    loop
        v_problem := rota._backoff_problem(v_key, v_value);
        exit when v_problem is not null;
    end loop;

    if v_problem is null
      and rota._bounded(_check_backoff.backoff -> 'cap_seconds', 31536000, 0, 31536000)
        < rota._bounded(_check_backoff.backoff -> 'base_seconds', 0, 0, 31536000) then
        v_problem := 'has a cap_seconds below its base_seconds';
    end if;

    if v_problem is not null then
        perform rota._refuse(_check_backoff.argument, v_problem);
    end if;
end;
$$;

create or replace function rota._backoff_problem(key text, value jsonb)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _backoff_problem.key = 'delay_seconds' then
        if jsonb_typeof(_backoff_problem.value) <> 'array'
          or jsonb_array_length(_backoff_problem.value) not between 1 and 100 then
            return 'needs delay_seconds to be a list of 1 to 100 numbers';
        end if;
        return (
            select rota._backoff_problem('base_seconds', e.value)
            from jsonb_array_elements(_backoff_problem.value) as e (value)
            where rota._backoff_problem('base_seconds', e.value) is not null
            limit 1
        );
    elsif _backoff_problem.key not in ('base_seconds', 'cap_seconds', 'jitter') then
        return format('has an unknown key %L', left(_backoff_problem.key, 80));
    elsif jsonb_typeof(_backoff_problem.value) <> 'number' then
        return format('needs %s to be a number', _backoff_problem.key);
    elsif _backoff_problem.key = 'jitter' then
        if _backoff_problem.value::numeric not between 0 and 0.9 then
            return 'needs jitter to be 0 to 0.9';
        end if;
    elsif _backoff_problem.value::numeric not between 0.001 and 31536000 then
        return 'needs its seconds to be 0.001 to 31536000 (a year)';
    end if;
    return null;
end;
$$;
/*
 * 34_schedule_text.sql -- read a schedule text.
 *
 * Five fields as Debian's cron reads them: minute, hour, day of month, month, weekday; or six,
 * with the second in front.  Each field becomes a set of bits, bit n for the value n, so that
 * the calendar is a matter of shifts.  What a month alone can resolve has bits beyond its
 * values: of the days 32 (L, the last) and 33 (LW, the last from Monday to Friday); of the
 * weekdays 7 * n + d for the nth weekday d of a month, with n = 6 for the last one.
 *
 * Two rules of cron are not what one would guess, and are kept.  Day of month and weekday must
 * both match if one of them begins with a star, else either is enough.  And a job whose minute
 * and hour both begin without one is of fixed time, which matters when clocks change.
 *
 * Besides there are `every 10 minutes`, counted from a fixed point, and `after 10 minutes`,
 * counted from the end of the last run.
 */

create or replace function rota._parse_schedule(schedule text)
    returns rota.parsed_schedule
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_length constant integer := char_length(_parse_schedule.schedule);
    v_words text[];
    v_parsed rota.parsed_schedule;
begin
    if _parse_schedule.schedule is null then
        perform rota._refuse('schedule', 'must not be null');
    elsif v_length > 255 then
        perform rota._refuse_schedule(_parse_schedule.schedule, format(
            'must be at most 255 characters, got %s', v_length));
    end if;

    v_words := rota._schedule_words(_parse_schedule.schedule);
    if v_words[1] in ('EVERY', 'AFTER') then
        return row(
            lower(v_words[1]), rota._parse_period(_parse_schedule.schedule, v_words),
            null, null, null, null, null, null, null, null)::rota.parsed_schedule;
    elsif cardinality(v_words) = 5 then
        v_words := array['0'] || v_words;
    elsif cardinality(v_words) <> 6 then
        perform rota._refuse_schedule(_parse_schedule.schedule, format(
            'expected five fields (minute hour day month weekday), six with seconds first, '
            '@daily and the like, "every 10 minutes" or "after 10 minutes", got words: %s',
            cardinality(v_words)));
    end if;

    v_parsed := row(
        'cron', null,
        rota._parse_field(_parse_schedule.schedule, 'second', v_words[1]),
        rota._parse_field(_parse_schedule.schedule, 'minute', v_words[2]),
        rota._parse_field(_parse_schedule.schedule, 'hour', v_words[3]),
        rota._parse_field(_parse_schedule.schedule, 'day', v_words[4]),
        rota._parse_field(_parse_schedule.schedule, 'month', v_words[5]),
        rota._parse_field(_parse_schedule.schedule, 'weekday', v_words[6]),
        v_words[4] ^@ '*' or v_words[6] ^@ '*',
        not (v_words[2] ^@ '*' or v_words[3] ^@ '*'))::rota.parsed_schedule;
    if not rota._is_possible(v_parsed) then
        perform rota._refuse_schedule(
            _parse_schedule.schedule, 'names a day that no month of it ever has');
    end if;
    return v_parsed;
end;
$$;

create or replace function rota._refuse_schedule(schedule text, problem text)
    returns void
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'RT006',
        message = format('schedule %L: %s',
            case
                when octet_length(_refuse_schedule.schedule) <= 255
                then _refuse_schedule.schedule
                else left(_refuse_schedule.schedule, 80) || '...'
            end,
            _refuse_schedule.problem),
        hint = 'Such as 0 2 * * * (each day at 02:00), */5 * * * *, 0 9 * * MON-FRI, @daily, '
            'every 90 seconds, after 10 minutes.';
end;
$$;

/* In capitals, for names may be written either way; @daily and the like written out. */
create or replace function rota._schedule_words(schedule text)
    returns text[]
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_space constant text := E' \t\n\r\f\x0b';
    v_text constant text := upper(btrim(_schedule_words.schedule, c_space) collate "C");
begin
    return regexp_split_to_array(
        case v_text
            when '@YEARLY' then '0 0 1 1 *'
            when '@ANNUALLY' then '0 0 1 1 *'
            when '@MONTHLY' then '0 0 1 * *'
            when '@WEEKLY' then '0 0 * * 0'
            when '@DAILY' then '0 0 * * *'
            when '@MIDNIGHT' then '0 0 * * *'
            when '@HOURLY' then '0 * * * *'
            else v_text
        end,
        '[' || c_space || ']+');
end;
$$;

create or replace function rota._parse_period(schedule text, words text[])
    returns interval
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_match constant text[] := regexp_match(
        array_to_string(_parse_period.words[2:], ' '),
        '^(?:0*([1-9][0-9]{0,9}) )?(SECOND|MINUTE|HOUR|DAY|WEEK)S?$');
    v_seconds constant numeric := coalesce(v_match[1], '1')::numeric
        * case v_match[2]
            when 'SECOND' then 1
            when 'MINUTE' then 60
            when 'HOUR' then 3600
            when 'DAY' then 86400
            when 'WEEK' then 604800
        end;
begin
    if v_seconds is null or v_seconds > 3155760000 then
        perform rota._refuse_schedule(_parse_period.schedule, format(
            '%L must be a whole number of seconds, minutes, hours, days (of 24 hours) or '
            'weeks, at most 100 years', lower(array_to_string(_parse_period.words[2:], ' '))));
    end if;
    return make_interval(secs => v_seconds::float8);
end;
$$;

create or replace function rota._parse_field(schedule text, field text, value text)
    returns bigint
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_term text;
    v_bits bigint;
    v_set bigint := 0::bigint;
begin
    foreach v_term in array string_to_array(_parse_field.value, ',') loop
        v_bits := case
            when _parse_field.field = 'day' and v_term = 'L' then 1::bigint << 32
            when _parse_field.field = 'day' and v_term = 'LW' then 1::bigint << 33
            when _parse_field.field = 'weekday' and v_term ~ '[#L]'
                then rota._parse_nth_weekday(v_term)
            else rota._parse_range(_parse_field.field, v_term)
        end;
        if v_bits is null then
            perform rota._refuse_schedule(_parse_field.schedule, format(
                '%s %L is not *, %s, a range such as 1-5, a step such as */2 or 1-5/2, '
                'or a list of these with commas', _parse_field.field, v_term, case
                    when _parse_field.field in ('second', 'minute') then '0 to 59'
                    when _parse_field.field = 'hour' then '0 to 23'
                    when _parse_field.field = 'day' then '1 to 31, L or LW'
                    when _parse_field.field = 'month' then '1 to 12, JAN to DEC'
                    else '0 to 7, SUN to SAT, 5L or MON#2'
                end));
        end if;
        v_set := v_set | v_bits;
    end loop;
    return v_set;
end;
$$;

-- A star, 5, 1-5, a step of a star or a range, or 5/15, which is 5-59/15; null if it is none.
create or replace function rota._parse_range(field text, term text)
    returns bigint
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_parts constant text[] := regexp_match(
        _parse_range.term, '^(?:([*])|([0-9A-Z]+)(?:-([0-9A-Z]+))?)(?:/([0-9]+))?$');
    v_low constant integer := (_parse_range.field in ('day', 'month'))::integer;
    v_high constant integer := case _parse_range.field
        when 'hour' then 23 when 'day' then 31 when 'month' then 12 when 'weekday' then 7
        else 59
    end;
    v_step constant integer := nullif(left(ltrim(v_parts[4], '0'), 4), '')::integer;
    v_from integer := v_low;
    v_to integer := v_high;
    v_set bigint := 0::bigint;
begin
    if v_parts is null or (v_parts[4] is not null and v_step is null) then
        return null;
    elsif v_parts[1] is null then
        v_from := rota._parse_value(_parse_range.field, v_parts[2]);
        if v_parts[3] is not null then
            v_to := rota._parse_value(_parse_range.field, v_parts[3]);
        elsif v_parts[4] is null then
            v_to := v_from;
        end if;
    end if;
    if (v_low <= v_from and v_from <= v_to and v_to <= v_high) is not true then
        return null;
    end if;

    for v_value in v_from..v_to by coalesce(v_step, 1) loop
        v_set := v_set | (1::bigint << v_value);
    end loop;
    -- Sunday has two numbers.
    if _parse_range.field = 'weekday' then
        v_set := (v_set | (v_set >> 7)) & 127;
    end if;
    return v_set;
end;
$$;

/* The number of a number or name, null if it is none; it may lie outside of the field. */
create or replace function rota._parse_value(field text, value text)
    returns integer
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _parse_value.value ~ '^0*[0-9]{1,2}$' then
        return right(_parse_value.value, 2)::integer;
    elsif _parse_value.field = 'month' then
        return array_position(
            '{JAN,FEB,MAR,APR,MAY,JUN,JUL,AUG,SEP,OCT,NOV,DEC}', _parse_value.value);
    elsif _parse_value.field = 'weekday' then
        return array_position('{SUN,MON,TUE,WED,THU,FRI,SAT}', _parse_value.value) - 1;
    end if;
    return null;
end;
$$;

/* `MON#2`, `1#2`, or `5L`, the last Friday; null if it is none. */
create or replace function rota._parse_nth_weekday(term text)
    returns bigint
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_parts constant text[] := regexp_match(
        _parse_nth_weekday.term, '^(?:([0-9]+)L|([0-9]+|[A-Z]+)#0*([1-5]))$');
    v_weekday constant integer := rota._parse_value(
        'weekday', coalesce(v_parts[1], v_parts[2]));
begin
    return case
        when v_weekday <= 7 then 1::bigint << 7 * coalesce(v_parts[3], '6')::integer
            + v_weekday % 7
    end;
end;
$$;

/* Months have 28 forms, by length and first weekday, and each comes about in 40 years. */
create or replace function rota._is_possible(parsed rota.parsed_schedule)
    returns boolean
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    for v_month in 1..12 loop
        continue when parsed.months >> v_month & 1 = 0;
        for v_length in 28..31 loop
            continue when v_length <> all(case
                when v_month = 2 then '{28,29}'
                when v_month in (4, 6, 9, 11) then '{30}'
                else '{31}'
            end::integer[]);
            for v_first in 0..6 loop
                if rota._days_of_month(parsed, v_first, v_length) <> 0 then
                    return true;
                end if;
            end loop;
        end loop;
    end loop;
    return false;
end;
$$;
/*
 * 35_calendar.sql -- the next time that a wall clock shows what a schedule names.
 *
 * Here are no zones: what a clock on the wall shows is a timestamp without one, and every day
 * has 24 hours.  A month is turned into the set of its days that match, the day into the next
 * time in it.  The cost goes with the months looked at and never with the minutes in between;
 * and 40 years hold every form of every month, so the search has an end.
 */

/* The first match at or after *wall*, which is a whole second; null beyond the year 9998. */
create or replace function rota._next_wall(
    parsed rota.parsed_schedule,
    wall timestamp without time zone
)
    returns timestamp without time zone
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_today constant date := _next_wall.wall::date;
    v_second integer := rota._next_second(
        parsed, extract(epoch from _next_wall.wall - v_today)::integer);
    v_day constant date := rota._next_day(
        parsed, case when v_second is null then v_today + 1 else v_today end);
begin
    if v_second is null or v_day > v_today then
        v_second := rota._next_second(parsed, 0);
    end if;
    return v_day + make_interval(secs => v_second);
end;
$$;

/* The first matching day at or after *day*. */
create or replace function rota._next_day(parsed rota.parsed_schedule, day date)
    returns date
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_year integer := extract(year from _next_day.day)::integer;
    v_month integer := extract(month from _next_day.day)::integer;
    v_skipped integer := extract(day from _next_day.day)::integer;
    v_first date;
    v_days bigint;
begin
    while v_year < 9999 loop
        if parsed.months >> v_month & 1 = 1 then
            v_first := make_date(v_year, v_month, 1);
            v_days := rota._days_of_month(
                parsed, extract(dow from v_first)::integer,
                (v_first + interval '1 month')::date - v_first);
            v_days := v_days >> v_skipped << v_skipped;
            if v_days <> 0 then
                return v_first + rota._lowest_bit(v_days) - 1;
            end if;
        end if;
        if parsed.months >> v_month + 1 = 0 then
            v_year := v_year + 1;
            v_month := 0;
        end if;
        v_month := rota._lowest_bit(parsed.months >> v_month + 1 << v_month + 1);
        v_skipped := 0;
    end loop;
    return null;
end;
$$;

/* The days that match in a month that begins on weekday *first* (0 is Sunday). */
create or replace function rota._days_of_month(
    parsed rota.parsed_schedule,
    first integer,
    length integer
)
    returns bigint
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_each_week constant bigint := 270549121::bigint;  -- bits 0, 7, 14, 21, 28
    v_month constant bigint := (2::bigint << length) - 2;
    v_last constant integer := (_days_of_month.first + length - 1) % 7;
    v_days bigint := parsed.days & v_month;
    v_weekdays bigint := 0::bigint;
    v_day integer;
begin
    if parsed.days >> 32 & 1 = 1 then
        v_days := v_days | (1::bigint << length);
    end if;
    if parsed.days >> 33 & 1 = 1 then
        v_days := v_days | (1::bigint
            << length - case v_last when 0 then 2 when 6 then 1 else 0 end);
    end if;

    for v_weekday in 0..6 loop
        exit when parsed.weekdays = 0;
        v_day := 1 + (v_weekday - _days_of_month.first + 7) % 7;
        if parsed.weekdays >> v_weekday & 1 = 1 then
            v_weekdays := v_weekdays | (c_each_week << v_day);
        end if;
        continue when parsed.weekdays < 128;
        for v_nth in 1..5 loop
            if parsed.weekdays >> 7 * v_nth + v_weekday & 1 = 1 then
                v_weekdays := v_weekdays | (1::bigint << v_day + 7 * (v_nth - 1));
            end if;
        end loop;
        if parsed.weekdays >> 42 + v_weekday & 1 = 1 then
            v_weekdays := v_weekdays | (1::bigint
                << v_day + case when v_day + 28 <= length then 28 else 21 end);
        end if;
    end loop;

    if parsed.is_both then
        return v_days & v_weekdays & v_month;
    end if;
    return (v_days | v_weekdays) & v_month;
end;
$$;

/* The same within a day, in seconds since its begin; null if none is left. */
create or replace function rota._next_second(parsed rota.parsed_schedule, second integer)
    returns integer
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_hour integer := _next_second.second / 3600;
    v_minute integer := _next_second.second / 60 % 60;
    v_second integer := _next_second.second % 60;
begin
    if parsed.hours >> v_hour & 1 = 1 then
        if parsed.minutes >> v_minute & 1 = 1 and parsed.seconds >> v_second <> 0 then
            return 3600 * v_hour + 60 * v_minute
                + rota._lowest_bit(parsed.seconds >> v_second << v_second);
        elsif parsed.minutes >> v_minute + 1 <> 0 then
            return 3600 * v_hour
                + 60 * rota._lowest_bit(parsed.minutes >> v_minute + 1 << v_minute + 1)
                + rota._lowest_bit(parsed.seconds);
        end if;
    end if;
    if parsed.hours >> v_hour + 1 = 0 then
        return null;
    end if;
    return 3600 * rota._lowest_bit(parsed.hours >> v_hour + 1 << v_hour + 1)
        + 60 * rota._lowest_bit(parsed.minutes) + rota._lowest_bit(parsed.seconds);
end;
$$;

/* A logarithm of a power of two is exact enough to round. */
create or replace function rota._lowest_bit(bits bigint)
    returns integer
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return round(
        ln((_lowest_bit.bits & -_lowest_bit.bits)::float8) / ln(2::float8))::integer;
end;
$$;
/*
 * 36_time_zones.sql -- from the wall clock of a zone to instants, exact where clocks change.
 *
 * `at time zone` knows what any instant looks like on the wall, and for that it is used.  The
 * other way it has to guess twice a year: a wall time that is skipped has no instant, one that
 * comes twice has two, and its guesses are not cron's.  So the change itself is looked for, by
 * halving, and what is asked for is measured against it.
 *
 * Since 1970 no clock was moved by more than a day, and none twice within a week.
 */

/* The first instant after *after* and up to *until* with a new offset; null if none. */
create or replace function rota._clock_change(
    time_zone text,
    after timestamptz,
    until timestamptz
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_offset constant interval := (_clock_change.after at time zone time_zone)
        - (_clock_change.after at time zone 'UTC');
    v_before integer := 0;
    v_since integer := extract(
        epoch from _clock_change.until - _clock_change.after)::integer;
    v_middle integer;
    v_instant timestamptz := _clock_change.until;
begin
    if (v_instant at time zone time_zone) - (v_instant at time zone 'UTC') = v_offset then
        return null;
    end if;
    while v_since - v_before > 1 loop
        v_middle := (v_before + v_since) / 2;
        v_instant := _clock_change.after + make_interval(secs => v_middle);
        if (v_instant at time zone time_zone) - (v_instant at time zone 'UTC') = v_offset then
            v_before := v_middle;
        else
            v_since := v_middle;
        end if;
    end loop;
    return _clock_change.after + make_interval(secs => v_since);
end;
$$;

/* The first instant at which the wall clock shows *wall*, or more because it skipped it. */
create or replace function rota._first_instant(
    time_zone text,
    wall timestamp without time zone
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_instant constant timestamptz := _first_instant.wall at time zone time_zone;
    v_change constant timestamptz := rota._clock_change(
        time_zone, v_instant - interval '26 hours', v_instant + interval '26 hours');
    v_before timestamptz;
begin
    if v_change is null then
        return v_instant;
    end if;
    v_before := v_change - interval '1 second'
        + (_first_instant.wall - ((v_change - interval '1 second') at time zone time_zone));
    if v_before < v_change then
        return v_before;
    end if;
    return greatest(
        v_change, v_change + (_first_instant.wall - (v_change at time zone time_zone)));
end;
$$;

/*
 * Only names of the IANA database, which have rules for all time.  Postgres also takes
 * abbreviations, which are fixed offsets and come first, and texts such as FOO+3, which mean
 * something else than they seem to; those two have no slash, or a digit.  Nor those that count
 * leap seconds, which no clock on a wall does.
 */
create or replace function rota._check_time_zone(argument text, time_zone text)
    returns void
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_time_zone.time_zone in ('UTC', 'GMT') then
        return;
    -- No name is so long, and the pattern takes its time on a text that is.
    elsif octet_length(_check_time_zone.time_zone) <= 63
      and _check_time_zone.time_zone
        ~ '^([A-Za-z_-]+(/[A-Za-z_-]+){0,2}|Etc/GMT([+-][0-9]|[+]1[0-2]|-1[0-4]))$'
      and _check_time_zone.time_zone !~* '^(localtime|factory|posixrules|(posix|right)/.*)$'
      and (
        position('/' in _check_time_zone.time_zone) > 0
        or not exists (
            select
            from pg_timezone_abbrevs as a
            where a.abbrev = upper(_check_time_zone.time_zone)
        )
      ) then
        begin
            perform rota.now() at time zone _check_time_zone.time_zone;
            return;
        exception
            when invalid_parameter_value then
                null;
        end;
    end if;

    perform rota._refuse(_check_time_zone.argument, format(
        'must be a name such as Europe/Warsaw or UTC, got %s',
        coalesce(quote_literal(left(_check_time_zone.time_zone, 80)), 'null')));
end;
$$;
/*
 * 37_next_run.sql -- when a schedule is due next.
 *
 * The wall clock of the zone decides.  Twice a year it is moved, and then:
 *
 *   - a job of fixed time (neither its minute nor its hour begins with a star) whose time is
 *     skipped runs at the first instant after the gap, and one whose time comes twice runs the
 *     first time only: such a job runs once on every day that it names;
 *   - any other follows the clock: what is skipped is skipped, what comes twice runs twice.
 *
 * `every` counts seconds from its anchor and sees no clock at all.
 *
 * Nothing here reads the TimeZone of the session, and nothing counts on a fire before: each
 * answer is found from the text, the zone and one instant.
 */

create or replace function rota.next_run(
    schedule text,
    time_zone text default 'UTC',
    after timestamptz default null,
    starts_at timestamptz default null
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_after constant timestamptz := coalesce(next_run.after, rota.now());
begin
    perform rota._check_time_zone('time_zone', next_run.time_zone);
    perform rota._check_run_at('after', v_after);
    if next_run.starts_at is not null then
        perform rota._check_run_at('starts_at', next_run.starts_at);
    end if;
    return rota._next_fire(
        rota._parse_schedule(next_run.schedule), next_run.time_zone,
        greatest(v_after, next_run.starts_at - interval '1 microsecond'),
        coalesce(next_run.starts_at, v_after));
end;
$$;

comment on function rota.next_run(text, text, timestamptz, timestamptz) is
    'The first time later than after (now) that a schedule text names in a time zone, not '
    'before starts_at, from which "every" counts; null if there is none in 100 years or before '
    'the year 9999; raises RT006, 22023.';

create or replace function rota.upcoming_runs(
    schedule text default null,
    time_zone text default 'UTC',
    after timestamptz default null,
    max_runs integer default 10,
    name text default null
)
    returns table (
        run_at timestamptz,
        local_time timestamp without time zone,
        utc_offset interval,
        clock_change text
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_after constant timestamptz := coalesce(upcoming_runs.after, rota.now());
    v_definition rota.job_definitions;
    v_parsed rota.parsed_schedule;
begin
    if upcoming_runs.max_runs is null or upcoming_runs.max_runs not between 1 and 1000 then
        perform rota._refuse('max_runs', format('must be 1 to 1000, got %s',
            coalesce(upcoming_runs.max_runs::text, 'null')));
    elsif num_nonnulls(upcoming_runs.schedule, upcoming_runs.name) <> 1 then
        perform rota._refuse('schedule', 'or name must be given, and not both');
    end if;
    perform rota._check_run_at('after', v_after);

    if upcoming_runs.name is null then
        perform rota._check_time_zone('time_zone', upcoming_runs.time_zone);
        v_definition := jsonb_populate_record(v_definition, jsonb_build_object(
            'schedule', upcoming_runs.schedule, 'time_zone', upcoming_runs.time_zone,
            'anchored_at', v_after));
    else
        select d.* into v_definition
        from rota.job_definitions as d
        where d.name = upcoming_runs.name;
        if not found then
            perform rota._raise_no_schedule(upcoming_runs.name);
        end if;
    end if;

    v_parsed := rota._parse_schedule(v_definition.schedule);
    run_at := greatest(v_after, v_definition.starts_at - interval '1 microsecond');
    for i in 1..upcoming_runs.max_runs loop
        -- Of those planned by the end of the last one only the first can be known.
        run_at := coalesce(
            case
                when i = 1 and v_parsed.kind = 'after'
                and v_definition.next_run_at > run_at then v_definition.next_run_at
            end,
            rota._next_fire(
                v_parsed, v_definition.time_zone, run_at, v_definition.anchored_at));
        exit when run_at is null or run_at > v_definition.ends_at;
        local_time := run_at at time zone v_definition.time_zone;
        utc_offset := local_time - (run_at at time zone 'UTC');
        clock_change := rota._clock_note(v_parsed, v_definition.time_zone, run_at);
        return next;
    end loop;
end;
$$;

comment on function rota.upcoming_runs(text, text, timestamptz, integer, text) is
    'The next max_runs times later than after (now) of a schedule text, or of the schedule of '
    'that name, with the local time and whether that was moved out of a gap or comes twice; '
    'raises RT005, RT006, 22023.';

/* Null, moved (its time is skipped that day), or first or second of a time that comes twice. */
create or replace function rota._clock_note(
    parsed rota.parsed_schedule,
    time_zone text,
    run_at timestamptz
)
    returns text
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_wall constant timestamp without time zone := run_at at time zone time_zone;
begin
    if parsed.kind <> 'cron' or rota._clock_change(
        time_zone, run_at - interval '26 hours', run_at + interval '26 hours') is null then
        return null;
    elsif rota._next_wall(parsed, v_wall) <> v_wall then
        return 'moved';
    elsif rota._first_instant(time_zone, v_wall) <> run_at then
        return 'second';
    elsif rota._comes_again(time_zone, run_at) then
        return 'first';
    end if;
    return null;
end;
$$;

/* Whether the wall clock shows once more what it shows at *instant*. */
create or replace function rota._comes_again(time_zone text, instant timestamptz)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_change constant timestamptz := rota._clock_change(
        time_zone, instant, instant + interval '26 hours');
begin
    return v_change is not null
        and (v_change at time zone time_zone) <= (instant at time zone time_zone);
end;
$$;

/* The first time later than *after*. */
create or replace function rota._next_fire(
    parsed rota.parsed_schedule,
    time_zone text,
    after timestamptz,
    anchored_at timestamptz
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_fire timestamptz;
begin
    if parsed.kind = 'after' then
        v_fire := _next_fire.after + parsed.period;
    elsif parsed.kind = 'every' and anchored_at > _next_fire.after then
        v_fire := anchored_at;
    elsif parsed.kind = 'every' then
        v_fire := anchored_at + parsed.period * (1 + floor(
            extract(epoch from _next_fire.after - anchored_at)
            / extract(epoch from parsed.period))::float8);
    elsif parsed.is_fixed then
        v_fire := rota._next_fixed(parsed, time_zone, _next_fire.after);
    else
        v_fire := rota._next_shown(parsed, time_zone, _next_fire.after);
    end if;
    -- What a tick does must come to an end, whatever it finds in a zone's file.
    if v_fire <= _next_fire.after then
        perform rota._refuse('time_zone', format('%L has clocks that go wrong', time_zone));
    end if;
    return case when v_fire < '9999-01-01 00:00+00' then v_fire end;
end;
$$;

/* Of jobs of fixed time: once for each wall time named, and not before the clock is there. */
create or replace function rota._next_fixed(
    parsed rota.parsed_schedule,
    time_zone text,
    after timestamptz
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_wall timestamp without time zone := interval '1 second'
        + date_trunc('second', _next_fixed.after at time zone time_zone);
    v_change constant timestamptz := rota._clock_change(
        time_zone, _next_fixed.after - interval '26 hours', _next_fixed.after);
begin
    -- What the clock has shown before it was put back is over.
    if v_change is not null then
        v_wall := greatest(v_wall, interval '1 second'
            + date_trunc('second', (v_change - interval '1 second') at time zone time_zone));
    end if;
    return rota._first_instant(time_zone, rota._next_wall(parsed, v_wall));
end;
$$;

/* Of the others: whenever the wall clock shows what is named. */
create or replace function rota._next_shown(
    parsed rota.parsed_schedule,
    time_zone text,
    after timestamptz
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_from timestamptz := date_trunc('second', _next_shown.after) + interval '1 second';
    v_last constant timestamp without time zone :=
        (_next_shown.after at time zone 'UTC') + interval '100 years';
    v_wall timestamp without time zone;
    v_next timestamp without time zone;
    v_change timestamptz;
begin
    loop
        v_wall := v_from at time zone time_zone;
        v_next := rota._next_wall(parsed, v_wall);
        -- What is named in a gap alone, as 02:30 on the last Sunday of March, never comes.
        exit when (v_next < v_last) is not true;
        if v_next > v_wall + interval '4 days' then
            -- Nothing is named before, so go near it; there the clock may differ.
            v_change := rota._clock_change(time_zone, v_from, v_from + interval '26 hours');
            v_from := coalesce(
                v_change, (v_next - interval '2 days') at time zone time_zone);
            continue;
        end if;

        v_change := rota._clock_change(time_zone, v_from, v_from + interval '5 days');
        if v_change is null or v_from + (v_next - v_wall) < v_change then
            return v_from + (v_next - v_wall);
        end if;
        v_from := v_change;
    end loop;
    return null;
end;
$$;

/* The newest *max_fires* times from *first*, which is one, to *until*, the oldest in front. */
create or replace function rota._fires_until(
    parsed rota.parsed_schedule,
    time_zone text,
    anchored_at timestamptz,
    first timestamptz,
    until timestamptz,
    max_fires integer
)
    returns timestamptz[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_fires timestamptz[] := array[]::timestamptz[];
    v_until timestamptz := _fires_until.until;
    v_back interval := interval '1 second';
    v_fire timestamptz;
begin
    while v_until >= _fires_until.first
      and cardinality(v_fires) < _fires_until.max_fires loop
        v_fire := rota._last_fire(
            parsed, time_zone, anchored_at, _fires_until.first, v_until, v_back);
        v_back := greatest(v_until - v_fire, interval '1 second');
        v_fires := v_fire || v_fires;
        v_until := v_fire - interval '1 microsecond';
    end loop;
    return v_fires;
end;
$$;

/*
 * The last time from *first*, which is one, to *until*.  The search is for the point behind
 * which nothing more comes: first in growing steps, the first as long as the guess *back*, then
 * by halving.
 */
create or replace function rota._last_fire(
    parsed rota.parsed_schedule,
    time_zone text,
    anchored_at timestamptz,
    first timestamptz,
    until timestamptz,
    back interval
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_low timestamptz := _last_fire.until - back;
    v_high timestamptz := _last_fire.until;
    v_back interval := back;
    v_fire timestamptz;
    v_next timestamptz;
begin
    loop
        if v_low < _last_fire.first then
            v_fire := _last_fire.first;
        else
            v_fire := rota._next_fire(parsed, time_zone, v_low, anchored_at);
        end if;
        exit when v_fire <= _last_fire.until;
        v_high := v_low;
        v_back := v_back * 2;
        v_low := v_low - v_back;
    end loop;

    -- v_fire is one, and nothing comes after v_high.
    loop
        v_next := rota._next_fire(parsed, time_zone, v_fire, anchored_at);
        exit when v_next is null or v_next > _last_fire.until;
        v_fire := v_next;
        v_low := v_fire + (v_high - v_fire) / 2;
        v_next := rota._next_fire(parsed, time_zone, v_low, anchored_at);
        if v_next <= _last_fire.until then
            v_fire := v_next;
        else
            v_high := v_low;
        end if;
    end loop;
    return v_fire;
end;
$$;
/*
 * 38_describe.sql -- a schedule in words.
 *
 * The words are made from the sets of numbers and not from the text, so that all spellings of
 * a schedule read the same, and what reads the same has the same times.  The times of a day
 * are looked at together: if they are evenly spaced, their distance says more than a list.
 */

create or replace function rota.describe_schedule(schedule text)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_parsed constant rota.parsed_schedule := rota._parse_schedule(describe_schedule.schedule);
    v_times text;
begin
    if v_parsed.kind = 'every' then
        return 'every ' || rota._describe_period(extract(epoch from v_parsed.period)::bigint)
            || ', counted from its start';
    elsif v_parsed.kind = 'after' then
        return regexp_replace(
            rota._describe_period(extract(epoch from v_parsed.period)::bigint),
            '^(?=[a-z])', '1 ') || ' after the last run has ended';
    end if;

    v_times := rota._describe_times(
        rota._bits(v_parsed.hours), rota._bits(v_parsed.minutes), rota._bits(v_parsed.seconds));
    return v_times || rota._describe_days(v_parsed, v_times);
end;
$$;

comment on function rota.describe_schedule(text) is
    'Say in English what a schedule text means; raises RT006, 22023.';

/* 5 minutes, or just minute where there is one. */
create or replace function rota._describe_period(seconds bigint)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_unit constant bigint := case
        when _describe_period.seconds % 86400 = 0 and _describe_period.seconds > 86400
            then 86400
        when _describe_period.seconds % 3600 = 0 then 3600
        when _describe_period.seconds % 60 = 0 then 60
        else 1
    end::bigint;
    v_name constant text := case v_unit
        when 86400 then 'day' when 3600 then 'hour' when 60 then 'minute' else 'second' end;
begin
    return case
        when _describe_period.seconds = v_unit then v_name
        else format('%s %ss', _describe_period.seconds / v_unit, v_name)
    end || case v_unit when 86400 then ' of 24 hours' else '' end;
end;
$$;

/* Evenly spaced: every 5 minutes from 09:00 to 17:55; few: at 09:00 and 17:30; else numbers. */
create or replace function rota._describe_times(
    hours integer[],
    minutes integer[],
    seconds integer[]
)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_format constant text := case _describe_times.seconds
        when '{0}' then 'HH24:MI' else 'HH24:MI:SS' end;
    v_starts constant integer[] := array(
        select 3600 * h + 60 * m
        from unnest(_describe_times.hours) as h, unnest(_describe_times.minutes) as m
        order by 1);
    v_count constant integer := cardinality(v_starts) * cardinality(_describe_times.seconds);
    v_first constant integer := v_starts[1] + _describe_times.seconds[1];
    v_last constant integer := v_starts[cardinality(v_starts)]
        + _describe_times.seconds[cardinality(_describe_times.seconds)];
    v_step constant integer := case
        when cardinality(_describe_times.seconds) = 1 then rota._step(v_starts)
        when cardinality(v_starts) = 1 or rota._step(v_starts) = 60
            then rota._step(_describe_times.seconds)
    end;
begin
    if v_count > 3 and v_last - v_first = v_step * (v_count - 1) then
        if v_last + v_step - 86400 <> v_first then
            null;
        elsif v_first = 0 then
            return 'every ' || rota._describe_period(v_step);
        elsif v_step = 60 then
            return format('at second %s of every minute', v_first);
        elsif v_step = 3600 and v_first % 60 = 0 then
            return format('at minute %s of every hour', v_first / 60);
        end if;
        return format('every %s from %s to %s', rota._describe_period(v_step),
            to_char(make_interval(secs => v_first), v_format),
            to_char(make_interval(secs => v_last), v_format));
    elsif v_count <= 6 then
        return 'at ' || rota._describe_list(array(
            select to_char(make_interval(secs => t + s), v_format)
            from unnest(v_starts) as t, unnest(_describe_times.seconds) as s
            order by 1), 'and');
    end if;
    return rota._describe_numbers(
        _describe_times.hours, _describe_times.minutes, _describe_times.seconds);
end;
$$;

/* Such as every 15 minutes of the hours 9, 12 and 15. */
create or replace function rota._describe_numbers(
    hours integer[],
    minutes integer[],
    seconds integer[]
)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_each_minute constant boolean := cardinality(_describe_numbers.minutes) = 60;
    v_each_hour constant boolean := cardinality(_describe_numbers.hours) = 24;
    v_minutes constant text := case
        when v_each_minute then 'every minute'
        else rota._describe_values('minute', _describe_numbers.minutes)
    end;
    v_text text;
begin
    if _describe_numbers.seconds = '{0}' then
        v_text := coalesce(rota._describe_share('minute', _describe_numbers.minutes),
            'at ' || v_minutes);
    else
        v_text := coalesce(rota._describe_share('second', _describe_numbers.seconds),
            'at ' || rota._describe_values('second', _describe_numbers.seconds))
            || ' of ' || v_minutes;
    end if;
    return v_text || case
        when not v_each_hour
        then ' of the ' || rota._describe_values('hour', _describe_numbers.hours)
        when not v_each_minute then ' of every hour'
        else ''
    end;
end;
$$;

/* The same share of each whole, from its beginning: every minute, every 15 minutes. */
create or replace function rota._describe_share(unit text, numbers integer[])
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_step constant integer := rota._step(_describe_share.numbers);
begin
    if _describe_share.numbers[1] = 0
      and v_step * cardinality(_describe_share.numbers) = 60 then
        return 'every ' || case v_step when 1 then '' else v_step || ' ' end
            || _describe_share.unit || case v_step when 1 then '' else 's' end;
    end if;
    return null;
end;
$$;

create or replace function rota._describe_values(unit text, numbers integer[])
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return _describe_values.unit
        || case cardinality(_describe_values.numbers) when 1 then ' ' else 's ' end
        || rota._describe_list(rota._describe_runs(_describe_values.numbers, null), 'and');
end;
$$;

/* With a space in front; nothing if it is every day and *times* say so. */
create or replace function rota._describe_days(parsed rota.parsed_schedule, times text)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_months constant text[] := '{January,February,March,April,May,June,July,August,'
        'September,October,November,December}'::text[];
    c_days constant bigint := 4294967294;  -- 1 to 31
    v_months constant integer[] := rota._bits(parsed.months);
    v_in constant text := rota._describe_list(rota._describe_runs(v_months, c_months), 'and');
    v_of constant text := ' of ' || case cardinality(v_months)
        when 1 then v_in else 'the month' end;
    v_is_any_day constant boolean := parsed.days & c_days = c_days;
    v_is_any_weekday constant boolean := parsed.weekdays & 127 = 127;
    v_days text;
begin
    if v_is_any_day and v_is_any_weekday
      or not parsed.is_both and (v_is_any_day or v_is_any_weekday) then
        v_days := case when _describe_days.times ~ ':|the hour' then ' every day' else '' end;
    elsif v_is_any_day then
        v_days := ' ' || rota._describe_weekdays(parsed.weekdays, case
            when parsed.weekdays & 127 = 0 then v_of else ' of the month' end);
    elsif v_is_any_weekday and parsed.days & ~c_days = 0 and cardinality(v_months) = 1 then
        return format(' on %s %s', rota._describe_list(
            rota._describe_runs(rota._bits(parsed.days), null), 'and'), v_in);
    elsif v_is_any_weekday then
        v_days := ' ' || rota._describe_month_days(parsed.days, 'on ', 'and') || v_of;
    elsif parsed.is_both then
        v_days := format(' %s, if it is %s of the month',
            rota._describe_weekdays(parsed.weekdays, ' of the month'),
            rota._describe_month_days(parsed.days, '', 'or'));
    else
        v_days := format(' %s of the month or %s',
            rota._describe_month_days(parsed.days, 'on ', 'and'),
            rota._describe_weekdays(parsed.weekdays, ' of the month'));
    end if;

    return v_days || case
        when cardinality(v_months) = 12 then ''
        when cardinality(v_months) = 1 and right(v_days, length(v_of)) = v_of then ''
        when v_days like '% of the month%' then ', in ' || v_in
        else ' in ' || v_in
    end;
end;
$$;

/* On days 1 and 15 and on the last day; or without the prefix, day 1, 15 or the last day. */
create or replace function rota._describe_month_days(
    days bigint,
    prefix text,
    conjunction text
)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_days constant integer[] := rota._bits(_describe_month_days.days & 4294967294);
begin
    return array_to_string(array[
        _describe_month_days.prefix
            || case when conjunction = 'and' and cardinality(v_days) > 1
                then 'days ' else 'day ' end
            || rota._describe_list(rota._describe_runs(v_days, null), conjunction),
        _describe_month_days.prefix
            || case _describe_month_days.days >> 32 & 1 when 1 then 'the last day' end,
        _describe_month_days.prefix || case _describe_month_days.days >> 33 & 1
            when 1 then 'the last working day (Monday to Friday)' end
    ], format(' %s ', conjunction));
end;
$$;

/* On Monday to Friday and on the last Sunday of the month. */
create or replace function rota._describe_weekdays(weekdays bigint, of_month text)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_names constant text[] := '{Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,'
        'Sunday}'::text[];
    c_nths constant text[] := '{first,second,third,fourth,fifth,last}'::text[];
    v_weekdays integer[] := '{}'::integer[];
    v_items text[] := '{}'::text[];
    v_nths integer[];
begin
    for v_weekday in 1..7 loop
        v_nths := array(
            select n
            from generate_series(1, 6) as n
            where _describe_weekdays.weekdays >> 7 * n + v_weekday % 7 & 1 = 1
            order by n);
        if _describe_weekdays.weekdays >> v_weekday % 7 & 1 = 1 then
            v_weekdays := v_weekdays || v_weekday;
        elsif v_nths <> '{}' then
            v_items := v_items || format('the %s %s',
                rota._describe_list(array(select c_nths[n] from unnest(v_nths) as n), 'and'),
                c_names[v_weekday]);
        end if;
    end loop;

    return array_to_string(array[
        'on ' || rota._describe_list(rota._describe_runs(v_weekdays, c_names), 'and'),
        'on ' || rota._describe_list(v_items, 'and') || _describe_weekdays.of_month
    ], ' and ');
end;
$$;

/* Ascending numbers as items, three and more that follow each other as one: 1 to 5. */
create or replace function rota._describe_runs(numbers integer[], names text[])
    returns text[]
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_items text[] := '{}'::text[];
    v_first integer;
    v_number integer;
begin
    foreach v_number in array _describe_runs.numbers loop
        if v_number - 1 <> all(_describe_runs.numbers) then
            v_first := v_number;
        end if;
        continue when v_number + 1 = any(_describe_runs.numbers);
        v_items := v_items || case
            when v_number - v_first < 2
            then array(
                select coalesce(_describe_runs.names[n], n::text)
                from generate_series(v_first, v_number) as n)
            else array[format('%s to %s',
                coalesce(_describe_runs.names[v_first], v_first::text),
                coalesce(_describe_runs.names[v_number], v_number::text))]
        end;
    end loop;
    return v_items;
end;
$$;

/* Null if it is empty. */
create or replace function rota._describe_list(items text[], conjunction text)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_last constant integer := cardinality(_describe_list.items);
begin
    return case
        when v_last > 1
        then array_to_string(_describe_list.items[:v_last - 1], ', ')
            || format(' %s ', _describe_list.conjunction) || _describe_list.items[v_last]
        else _describe_list.items[1]
    end;
end;
$$;

create or replace function rota._bits(bits bigint)
    returns integer[]
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return array(
        select n from generate_series(0, 62) as n where _bits.bits >> n & 1 = 1 order by n);
end;
$$;

/* The distance of evenly spaced numbers; null if there is one number, or none such. */
create or replace function rota._step(numbers integer[])
    returns integer
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_step constant integer := _step.numbers[2] - _step.numbers[1];
begin
    return case
        when _step.numbers = array(select generate_series(
            _step.numbers[1], _step.numbers[cardinality(_step.numbers)], v_step))
        then v_step
    end;
end;
$$;
/*
 * 39_buckets.sql -- whose turn it is.
 *
 * The claim of queues with limits, tenants or ageing.  It walks the levels from the lowest up:
 * the level of a job is its priority, less one for each `ageing` of its queue that it waited.
 * Within a level jobs of the common line and of the buckets go by age, and the buckets of a
 * queue take turns: each has `weight` starts and goes behind the others.  Only the buckets that
 * are served are looked at, so a claim costs the same however many there are, and however many
 * jobs wait in them.
 *
 * A limit is held while jobs are started under it: its row in limit_states is locked first,
 * and what runs is counted after that.  So two claims never both take the last slot.  Where it
 * is reached the bucket is parked.  Whoever frees a slot leaves a note, and so does whoever
 * parks: of the two the one that commits last has its note read after both, and the reader
 * sees the free slot and the parked bucket.  A bucket that is taken away as empty, and a job
 * that comes in meanwhile, find each other in the same way.
 *
 * A claim takes what nobody has locked.  Only one that would go away with nothing looks again
 * and waits, 50 ms for each: eight workers of one bucket pass it on to each other, and a
 * transaction that somebody forgot holds up nobody.
 */

/*
 * Lock due jobs of queues that may have limits, buckets or ageing.  It also returns the queues
 * that the caller may go on with as if there was nothing of the kind.
 */
create or replace function rota._lock_shared(
    queues text[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns table (ids bigint[], open_queues text[])
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_open record;
    v_ids bigint[];
begin
    ids := '{}';
    select o.open_queues as queues, o.rooms, o.ageings
    into v_open
    from rota._open_queues(_lock_shared.queues) as o;
    if array_remove(v_open.rooms, null) = '{}' and array_remove(v_open.ageings, null) = '{}'
      and not exists (
        select
        from rota.buckets as b
        where b.queue = any(v_open.queues)
          and b.waits_for is null
    ) then
        open_queues := v_open.queues;
        return next;
        return;
    end if;

    v_ids := rota._walk_levels(
        v_open.queues, v_open.rooms, v_open.ageings, _lock_shared.max_jobs,
        _lock_shared.job_types, _lock_shared.due, false);
    if v_ids is null then
        v_ids := rota._walk_levels(
            v_open.queues, v_open.rooms, v_open.ageings, _lock_shared.max_jobs,
            _lock_shared.job_types, _lock_shared.due, true);
    end if;

    perform rota._use_rate(
        l.limit_name, l.max_starts, l.per, l.burst,
        (
            select count(*)
            from rota.jobs as j
            where j.id = any(v_ids)
              and j.id <> all((select rota._strays(v_ids))::bigint[])
              and j.queue = l.queue
        )::integer)
    from rota.limits as l
    where l.queue = any(v_open.queues)
      and l.max_starts is not null;
    ids := coalesce(v_ids, '{}');
    open_queues := '{}';
    return next;
end;
$$;

/*
 * The queues that have room, how much (null is unlimited), and how their jobs age.  Limited
 * ones are held from here on, in the order of their names.
 */
create or replace function rota._open_queues(queues text[])
    returns table (open_queues text[], rooms integer[], ageings interval[])
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_limit record;
    v_room integer;
begin
    select
        coalesce(array_agg(c.queue), '{}'), coalesce(array_agg(null::integer), '{}'),
        coalesce(array_agg(q.ageing), '{}')
    into open_queues, rooms, ageings
    from unnest(_open_queues.queues) as c (queue)
    left join rota.queues as q on q.queue = c.queue
    where not exists (select from rota.limits as l where l.queue = c.queue);

    for v_limit in
        select l.limit_name, l.queue, l.max_running, l.max_starts, l.per, l.burst, q.ageing
        from unnest(_open_queues.queues) as c (queue)
        join rota.limits as l on l.queue = c.queue
        left join rota.queues as q on q.queue = c.queue
        order by l.limit_name
    loop
        -- Without the lock first: a queue that is full is left out without waiting for anybody.
        for v_is_held in 0..1 loop
            v_room := (
                select r.room
                from rota._room(
                    v_limit.limit_name, v_limit.max_running, v_limit.max_starts, v_limit.per,
                    v_limit.burst, '{}') as r
            );
            exit when v_room <= 0 or v_is_held = 1;
            if not rota._hold_limit(v_limit.limit_name, true) then
                v_room := 0;
                exit;
            end if;
        end loop;
        continue when v_room <= 0;
        open_queues := open_queues || v_limit.queue;
        rooms := rooms || v_room;
        ageings := ageings || v_limit.ageing;
    end loop;
    return next;
end;
$$;

/* Ids of locked jobs; null if there are none, but somebody holds a bucket that has some. */
create or replace function rota._walk_levels(
    queues text[],
    rooms integer[],
    ageings interval[],
    max_jobs integer,
    job_types text[],
    due timestamptz,
    may_wait boolean
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_level bigint;
    v_lanes record;
    v_round record;
    v_ids bigint[] := '{}'::bigint[];
    v_seen text[] := '{}'::text[];
    v_is_busy boolean := false;
begin
    while cardinality(v_ids) < _walk_levels.max_jobs loop
        v_level := rota._next_level(
            _walk_levels.queues, _walk_levels.ageings, _walk_levels.due, v_level);
        exit when v_level is null;

        -- Each round gives every bucket of its list a turn.
        loop
            select array_agg(l.queue) as queues, array_agg(l.priority) as priorities,
                array_agg(l.until) as untils, array_agg(l.room) as rooms
            into v_lanes
            from rota._level_lanes(
                _walk_levels.queues, _walk_levels.rooms, _walk_levels.ageings, v_level,
                _walk_levels.due, v_ids) as l;
            exit when v_lanes.queues is null;
            select r.new_ids, r.new_seen, r.is_busy, r.is_last
            into v_round
            from rota._take_round(
                v_lanes.queues, v_lanes.priorities, v_lanes.untils, v_lanes.rooms,
                _walk_levels.max_jobs - cardinality(v_ids), _walk_levels.job_types,
                _walk_levels.due, _walk_levels.may_wait and not v_is_busy, v_ids, v_seen) as r;
            v_ids := v_ids || v_round.new_ids;
            v_seen := v_seen || v_round.new_seen;
            v_is_busy := v_is_busy or v_round.is_busy;
            exit when v_round.is_last or cardinality(v_ids) >= _walk_levels.max_jobs;
        end loop;
        -- Not before something is found: all seen so far may be of types that go to others.
        exit when cardinality(v_ids) > 0
          and cardinality(v_seen) > _walk_levels.max_jobs + 50;
    end loop;

    if cardinality(v_ids) = 0 and v_is_busy and not _walk_levels.may_wait then
        return null;
    end if;
    return v_ids;
end;
$$;

/* The lowest level above that one, or of all, that any lane has due jobs of. */
create or replace function rota._next_level(
    queues text[],
    ageings interval[],
    due timestamptz,
    after_level bigint
)
    returns bigint
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_level bigint;
    v_aged bigint;
    v_after constant integer := least(
        greatest(coalesce(_next_level.after_level, -32769), -32769), 32768)::integer;
begin
    select min(least(
        (
            select j.priority
            from rota.jobs as j
            where j.queue = c.queue
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.priority > v_after
            order by j.priority
            limit 1
        ),
        (
            select b.priority
            from rota.buckets as b
            where b.queue = c.queue
              and b.waits_for is null
              and b.priority > v_after
            order by b.priority
            limit 1
        )
    ))::bigint
    into v_level
    from unnest(_next_level.queues, _next_level.ageings) as c (queue, ageing)
    where c.ageing is null;

    if array_remove(_next_level.ageings, null) <> '{}' then
        select min(greatest(
            rota._level(p.priority, least(p.run_at, p.turn_at), c.ageing, _next_level.due),
            _next_level.after_level + 1))
        into v_aged
        from unnest(_next_level.queues, _next_level.ageings) as c (queue, ageing)
        cross join lateral rota._aged_lanes(
            c.queue, c.ageing, _next_level.due, _next_level.after_level) as p
        where c.ageing is not null;
    end if;
    return least(v_level, v_aged);
end;
$$;

create or replace function rota._level(
    priority integer,
    since timestamptz,
    ageing interval,
    due timestamptz
)
    returns bigint
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return _level.priority - case
        when _level.ageing is null or _level.since > _level.due then 0
        else floor(extract(epoch from _level.due - _level.since)
            / extract(epoch from _level.ageing))::bigint
    end;
end;
$$;

/* How long a job must have waited to be of that level; '-infinity' before any level. */
create or replace function rota._waiting_since(
    priority integer,
    level bigint,
    ageing interval,
    due timestamptz
)
    returns timestamptz
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return case
        when _waiting_since.level is null then '-infinity'
        -- Levels are of all queues, and those of one that ages fast are far apart for another.
        when (_waiting_since.priority - _waiting_since.level)
            * extract(epoch from _waiting_since.ageing)
            > extract(epoch from _waiting_since.due - timestamptz '1900-01-01 00:00+00')
        then '-infinity'
        else _waiting_since.due - (_waiting_since.priority - _waiting_since.level)::integer
            * _waiting_since.ageing
    end;
end;
$$;

/* The priorities in use in a queue that ages, and since when the first of each waits. */
create or replace function rota._aged_lanes(
    queue text,
    ageing interval,
    due timestamptz,
    after_level bigint
)
    returns table (priority integer, run_at timestamptz, turn_at timestamptz)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_since timestamptz;
begin
    priority := -32769;
    loop
        priority := least(
            (
                select j.priority
                from rota.jobs as j
                where j.queue = _aged_lanes.queue
                  and j.bucket is null
                  and j.status in ('queued', 'failed')
                  and j.priority > _aged_lanes.priority
                order by j.priority
                limit 1
            ),
            (
                select b.priority
                from rota.buckets as b
                where b.queue = _aged_lanes.queue
                  and b.waits_for is null
                  and b.priority > _aged_lanes.priority
                order by b.priority
                limit 1
            )
        )::integer;
        exit when priority is null;

        v_since := rota._waiting_since(
            priority, _aged_lanes.after_level, _aged_lanes.ageing, _aged_lanes.due);
        run_at := (
            select j.run_at
            from rota.jobs as j
            where j.queue = _aged_lanes.queue
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.priority = _aged_lanes.priority
              and j.run_at > v_since
              and j.run_at <= _aged_lanes.due
            order by j.run_at
            limit 1
        );
        turn_at := (
            select b.turn_at
            from rota.buckets as b
            where b.queue = _aged_lanes.queue
              and b.waits_for is null
              and b.priority = _aged_lanes.priority
              and b.turn_at > v_since
            order by b.turn_at
            limit 1
        );
        if run_at is not null or turn_at is not null then
            return next;
        end if;
    end loop;
end;
$$;

/* The lanes with jobs of a level, until when these came, and the room of the queue. */
create or replace function rota._level_lanes(
    queues text[],
    rooms integer[],
    ageings interval[],
    level bigint,
    due timestamptz,
    ids bigint[]
)
    returns table (queue text, priority integer, until timestamptz, room integer)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return query
    select c.queue, p.priority, p.until, c.room - c.taken
    from (
        select
            q.queue, q.room, q.ageing,
            case when q.room is not null then (
                select count(*)
                from rota.jobs as j
                where j.id = any(_level_lanes.ids)
                  and j.queue = q.queue
            ) end::integer as taken
        from unnest(_level_lanes.queues, _level_lanes.rooms, _level_lanes.ageings)
            as q (queue, room, ageing)
    ) as c
    cross join lateral (
        select _level_lanes.level::integer as priority, timestamptz 'infinity' as until
        where c.ageing is null
          and _level_lanes.level between -32768 and 32767
        union all
        select
            a.priority,
            case
                when a.priority = _level_lanes.level then timestamptz 'infinity'
                else rota._waiting_since(
                    a.priority, _level_lanes.level, c.ageing, _level_lanes.due)
            end
        from rota._aged_lanes(c.queue, c.ageing, _level_lanes.due, null) as a
        where c.ageing is not null
          and a.priority >= _level_lanes.level
    ) as p
    where c.room is null
       or c.room > c.taken;
end;
$$;

/*
 * One turn for each of the next buckets, and before it the jobs of the common lanes that are
 * older.  Of k buckets each has its weight as often as half of the jobs wanted allow: so a
 * large batch needs few rounds and is still shared fairly.
 */
create or replace function rota._take_round(
    queues text[],
    priorities integer[],
    untils timestamptz[],
    rooms integer[],
    max_jobs integer,
    job_types text[],
    due timestamptz,
    may_wait boolean,
    ids bigint[],
    seen text[]
)
    returns table (new_ids bigint[], new_seen text[], is_busy boolean, is_last boolean)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Where a queue has only some room it is asked for anew after whatever was taken.
    c_has_rooms constant boolean := array_remove(_take_round.rooms, null) <> '{}';
    v_turns record;
    v_count integer;
    v_share integer := _take_round.max_jobs;
    v_common_at timestamptz;
    v_taken bigint[];
begin
    new_ids := '{}';
    new_seen := '{}';
    is_busy := false;
    select array_agg(b.queue) as queues, array_agg(b.bucket) as buckets,
        array_agg(b.run_at) as times, array_agg(b.room) as rooms, array_agg(b.place) as places
    into v_turns
    from rota._next_buckets(
        _take_round.queues, _take_round.priorities, _take_round.untils, _take_round.rooms,
        least(_take_round.max_jobs, 100), _take_round.job_types, _take_round.seen) as b;
    v_count := coalesce(cardinality(v_turns.queues), 0);
    is_last := v_count = 0;
    if v_count > 1 then
        v_share := greatest(1, _take_round.max_jobs / (2 * v_count));
    end if;

    for v_turn in 1..v_count + 1 loop
        exit when v_turn > v_count and not is_last;
        if v_common_at is null then
            v_common_at := rota._common_head(
                _take_round.queues, _take_round.priorities, _take_round.untils,
                _take_round.due, _take_round.ids || new_ids);
        end if;
        if is_last or v_common_at <= v_turns.times[v_turn] then
            v_taken := rota._lock_common(
                _take_round.queues, _take_round.priorities, _take_round.untils,
                _take_round.rooms, least(v_turns.times[v_turn], _take_round.due),
                _take_round.max_jobs - cardinality(new_ids), _take_round.job_types,
                _take_round.ids || new_ids);
            new_ids := new_ids || v_taken;
            v_common_at := null;
            is_last := is_last and not (c_has_rooms and cardinality(v_taken) > 0);
            exit when c_has_rooms and cardinality(v_taken) > 0;
        end if;
        exit when is_last or cardinality(new_ids) >= _take_round.max_jobs;

        v_taken := rota._serve(
            v_turns.queues[v_turn], v_turns.buckets[v_turn], v_count, v_share,
            least(_take_round.max_jobs - cardinality(new_ids), v_turns.rooms[v_turn]),
            _take_round.job_types, _take_round.due,
            _take_round.may_wait and not is_busy
                and cardinality(_take_round.ids || new_ids) = 0,
            _take_round.ids || new_ids);
        is_busy := is_busy or v_taken is null;
        if coalesce(cardinality(v_taken), 0) = 0 then
            new_seen := new_seen || v_turns.places[v_turn];
        end if;
        new_ids := new_ids || coalesce(v_taken, '{}');
        exit when cardinality(new_ids) >= _take_round.max_jobs
          or c_has_rooms and cardinality(new_ids) > 0;
    end loop;
    return next;
end;
$$;

/* The buckets of these lanes whose turn comes next, but for those that were seen already. */
create or replace function rota._next_buckets(
    queues text[],
    priorities integer[],
    untils timestamptz[],
    rooms integer[],
    max_buckets integer,
    job_types text[],
    seen text[]
)
    returns table (queue text, bucket text, run_at timestamptz, room integer, place text)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return query
    select n.queue, n.bucket, n.run_at, n.room, n.place
    from (
        select c.queue, t.bucket, t.run_at, t.turn_at, c.room,
            format('%s %s %s', c.queue, c.priority, t.bucket) as place
        from unnest(
            _next_buckets.queues, _next_buckets.priorities, _next_buckets.untils,
            _next_buckets.rooms) as c (queue, priority, until, room)
        cross join lateral (
            select b.bucket, b.run_at, b.turn_at
            from rota.buckets as b
            where b.queue = c.queue
              and b.priority = c.priority
              and b.waits_for is null
              and b.turn_at <= c.until
              -- Who gave the line of a limited type a turn and took nothing would ring another.
              and (_next_buckets.job_types is null or b.bucket like '|%'
                or split_part(b.bucket, '|', 1) = any(_next_buckets.job_types))
              and format('%s %s %s', b.queue, b.priority, b.bucket) <> all(_next_buckets.seen)
            order by b.turn_at
            limit _next_buckets.max_buckets
        ) as t
    ) as n
    order by n.turn_at, n.bucket
    limit _next_buckets.max_buckets;
end;
$$;

/* When the first due job of these common lanes was due. */
create or replace function rota._common_head(
    queues text[],
    priorities integer[],
    untils timestamptz[],
    due timestamptz,
    ids bigint[]
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return coalesce((
        select min(l.run_at)
        from unnest(_common_head.queues, _common_head.priorities, _common_head.untils)
            as c (queue, priority, until)
        cross join lateral (
            select j.run_at
            from rota.jobs as j
            where j.queue = c.queue
              and j.priority = c.priority
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.run_at <= least(c.until, _common_head.due)
              and j.id <> all(_common_head.ids)
            order by j.run_at, j.id
            limit 1
        ) as l
    ), 'infinity');
end;
$$;

/* Lock the first jobs of these common lanes, of each queue as many as it has room. */
create or replace function rota._lock_common(
    queues text[],
    priorities integer[],
    untils timestamptz[],
    rooms integer[],
    until timestamptz,
    max_jobs integer,
    job_types text[],
    ids bigint[]
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_window constant integer := _lock_common.max_jobs + 20;
    c_waiting constant text[] := '{queued,failed}'::text[];
    v_after_run_at timestamptz := timestamptz '-infinity';
    v_after_id bigint := 0::bigint;
    v_candidates bigint[];
    v_ids bigint[] := '{}'::bigint[];
begin
    if cardinality(_lock_common.queues) = 1 then
        return rota._lock_line(
            _lock_common.queues[1], _lock_common.priorities[1],
            least(_lock_common.untils[1], _lock_common.until),
            least(_lock_common.max_jobs, _lock_common.rooms[1]), _lock_common.job_types,
            _lock_common.ids);
    end if;
    loop
        v_candidates := array(
            select m.id
            from unnest(
                _lock_common.queues, _lock_common.priorities, _lock_common.untils)
                as c (queue, priority, until)
            cross join lateral (
                select j.id, j.run_at
                from rota.jobs as j
                where j.queue = c.queue
                  and j.priority = c.priority
                  and j.bucket is null
                  and j.status in ('queued', 'failed')
                  and j.run_at <= least(c.until, _lock_common.until)
                  and (j.run_at, j.id) > (v_after_run_at, v_after_id)
                  and (_lock_common.job_types is null
                    or j.job_type = any(_lock_common.job_types))
                  and j.id <> all(_lock_common.ids)
                order by j.run_at, j.id
                limit v_window
            ) as m
            order by m.run_at, m.id
            limit v_window
        );
        v_ids := v_ids || array(
            select j.id
            from rota.jobs as j
            where j.id = any(v_candidates)
              and j.status = any(c_waiting)
              and j.run_at <= _lock_common.until
            order by j.run_at, j.id
            limit _lock_common.max_jobs - cardinality(v_ids)
            for update skip locked
        );
        exit when cardinality(v_ids) = _lock_common.max_jobs
          or cardinality(v_candidates) < v_window;

        v_after_id := v_candidates[v_window];
        select j.run_at into v_after_run_at from rota.jobs as j where j.id = v_after_id;
        exit when not found;
    end loop;
    return rota._within_room(v_ids, _lock_common.queues, _lock_common.rooms);
end;
$$;

create or replace function rota._lock_line(
    queue text,
    priority integer,
    until timestamptz,
    max_jobs integer,
    job_types text[],
    ids bigint[]
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
begin
    return array(
        select j.id
        from rota.jobs as j
        where j.queue = _lock_line.queue
          and j.priority = _lock_line.priority
          and j.bucket is null
          and j.status in ('queued', 'failed')
          and j.run_at <= _lock_line.until
          and (_lock_line.job_types is null or j.job_type = any(_lock_line.job_types))
          and j.id <> all(_lock_line.ids)
        order by j.run_at, j.id
        limit _lock_line.max_jobs
        for update skip locked
    );
end;
$$;

/* Of these jobs the first of each queue, as many as it has room; the others stay waiting. */
create or replace function rota._within_room(ids bigint[], queues text[], rooms integer[])
    returns bigint[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if array_remove(_within_room.rooms, null) = '{}' then
        return _within_room.ids;
    end if;
    return array(
        select r.id
        from (
            select j.id, j.run_at, c.room,
                row_number() over (partition by j.queue order by j.run_at, j.id) as place
            from rota.jobs as j
            join (
                select u.queue, min(u.room) as room
                from unnest(_within_room.queues, _within_room.rooms) as u (queue, room)
                group by u.queue
            ) as c on c.queue = j.queue
            where j.id = any(_within_room.ids)
        ) as r
        where r.room is null
           or r.place <= r.room
        order by r.run_at, r.id
    );
end;
$$;

/*
 * Start jobs of one bucket; null if somebody has it or its limit locked, and nothing if it has
 * none to give now: then it is parked, or behind the others, or gone.
 */
create or replace function rota._serve(
    queue text,
    bucket text,
    buckets integer,
    share integer,
    max_jobs integer,
    job_types text[],
    due timestamptz,
    may_wait boolean,
    ids bigint[]
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_type constant text := nullif(split_part(_serve.bucket, '|', 1), '');
    v_priority integer;
    v_starts integer;
    v_limit record;
    v_room record;
    v_weight integer := 1;
    v_wanted integer := _serve.max_jobs;
    v_taken bigint[] := '{}'::bigint[];
begin
    if not rota._hold_bucket(_serve.queue, _serve.bucket, _serve.may_wait) then
        return null;
    end if;
    -- Not "is null": for that the planner may walk the whole line of turns to find the bucket.
    select b.priority::integer, b.starts
    into v_priority, v_starts
    from rota.buckets as b
    where b.queue = _serve.queue
      and b.bucket = _serve.bucket
      and coalesce(b.waits_for, '') = '';
    if not found then
        return v_taken;
    end if;

    if c_type is null or _serve.job_types is null or c_type = any(_serve.job_types) then
        for v_limit in select * from rota._limits_of(_serve.bucket) loop
            v_weight := coalesce(v_limit.weight, v_weight);
            continue when v_limit.max_running is null and v_limit.max_starts is null;
            if not rota._hold_limit(v_limit.limit_name, _serve.may_wait) then
                return null;
            end if;
            select r.room
            into v_room
            from rota._room(
                v_limit.limit_name, v_limit.max_running, v_limit.max_starts, v_limit.per,
                v_limit.burst, _serve.ids) as r;
            if v_room.room <= 0 then
                perform rota._park(_serve.queue, _serve.bucket, v_limit.limit_name);
                return v_taken;
            end if;
            -- Buckets of one type share its room, and not the first takes all.
            v_wanted := least(v_wanted, case
                when _serve.buckets = 1 or v_limit.limit_name like 'key %'
                then v_room.room
                else greatest(1, v_room.room / (2 * _serve.buckets))
            end);
        end loop;
        v_wanted := least(v_wanted, greatest(1, _serve.share * v_weight - v_starts));
        v_taken := rota._lock_bucket(
            _serve.queue, _serve.bucket, v_priority, v_wanted, _serve.job_types, _serve.due,
            _serve.ids);
        perform rota._use_rate(
            l.limit_name, l.max_starts, l.per, l.burst,
            cardinality(v_taken) - cardinality(rota._strays(v_taken)))
        from rota._limits_of(_serve.bucket) as l
        where l.max_starts is not null;
    end if;
    perform rota._end_turn(
        _serve.queue, _serve.bucket, cardinality(v_taken), v_weight, _serve.due,
        _serve.ids || v_taken);
    if c_type is not null and cardinality(v_taken) = 0 then
        perform rota._note('limit', 'type ' || c_type, rota.now());
    end if;
    return v_taken;
end;
$$;

/* Lock a bucket; true also if it is gone. */
create or replace function rota._hold_bucket(queue text, bucket text, may_wait boolean)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform
    from rota.buckets as b
    where b.queue = _hold_bucket.queue
      and b.bucket = _hold_bucket.bucket
    for update skip locked;
    if found then
        return true;
    elsif not exists (
        select
        from rota.buckets as b
        where b.queue = _hold_bucket.queue
          and b.bucket = _hold_bucket.bucket
    ) then
        return true;
    end if;
    return _hold_bucket.may_wait
        and rota._wait_for_bucket(_hold_bucket.queue, _hold_bucket.bucket);
end;
$$;

create or replace function rota._wait_for_bucket(queue text, bucket text)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set lock_timeout = '50ms'
as $$
begin
    perform
    from rota.buckets as b
    where b.queue = _wait_for_bucket.queue
      and b.bucket = _wait_for_bucket.bucket
    for update;
    return true;
exception
    when lock_not_available then
        return false;
end;
$$;

/* Lock the first due jobs of a bucket; for a worker of some types, of whatever priority. */
create or replace function rota._lock_bucket(
    queue text,
    bucket text,
    priority integer,
    max_jobs integer,
    job_types text[],
    due timestamptz,
    ids bigint[]
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_taken bigint[];
begin
    v_taken := array(
        select j.id
        from rota.jobs as j
        where j.queue = _lock_bucket.queue
          and j.bucket = _lock_bucket.bucket
          and j.priority = _lock_bucket.priority
          and j.status in ('queued', 'failed')
          and j.run_at <= _lock_bucket.due
          and (_lock_bucket.job_types is null or j.job_type = any(_lock_bucket.job_types))
          and j.id <> all(_lock_bucket.ids)
        order by j.run_at, j.id
        limit _lock_bucket.max_jobs
        for update skip locked
    );
    if cardinality(v_taken) > 0 or _lock_bucket.job_types is null then
        return v_taken;
    end if;
    return array(
        select j.id
        from rota.jobs as j
        where j.queue = _lock_bucket.queue
          and j.bucket = _lock_bucket.bucket
          and j.status in ('queued', 'failed')
          and j.run_at <= _lock_bucket.due
          and j.job_type = any(_lock_bucket.job_types)
          and j.id <> all(_lock_bucket.ids)
        order by j.priority, j.run_at, j.id
        limit _lock_bucket.max_jobs
        for update skip locked
    );
end;
$$;

/* Write down what is the first job of a bucket now, and its place; or that it has none. */
create or replace function rota._end_turn(
    queue text,
    bucket text,
    starts integer,
    weight integer,
    due timestamptz,
    ids bigint[]
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_priority integer;
    v_run_at timestamptz;
begin
    select h.priority, h.run_at
    into v_priority, v_run_at
    from rota._bucket_head(_end_turn.queue, _end_turn.bucket, _end_turn.due, _end_turn.ids)
        as h;
    if v_priority is null then
        delete from rota.buckets as b
        where b.queue = _end_turn.queue
          and b.bucket = _end_turn.bucket;
        -- For a job that came in since the look, and found the bucket there.
        perform rota._note(
            'bucket', format('%s %s', _end_turn.queue, _end_turn.bucket), rota.now());
        return;
    end if;

    update rota.buckets as b
    set priority = v_priority,
        run_at = v_run_at,
        turn_at = case
            when _end_turn.starts > 0 and b.starts + _end_turn.starts < _end_turn.weight
            then b.turn_at
            else greatest(rota.now(), b.turn_at + interval '1 microsecond')
        end,
        starts = case
            when b.starts + _end_turn.starts < _end_turn.weight
            then b.starts + _end_turn.starts
            else 0
        end
    where b.queue = _end_turn.queue
      and b.bucket = _end_turn.bucket;
end;
$$;

/* The first due job of a bucket that is none of these; if none is due, when one will be. */
create or replace function rota._bucket_head(
    queue text,
    bucket text,
    due timestamptz,
    ids bigint[]
)
    returns table (priority integer, run_at timestamptz, next_run_at timestamptz)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_ageing constant interval := (
        select q.ageing from rota.queues as q where q.queue = _bucket_head.queue);
    v_priority integer := -32769;
    v_run_at timestamptz;
    v_level bigint;
begin
    loop
        select j.priority::integer, j.run_at
        into v_priority, v_run_at
        from rota.jobs as j
        where j.queue = _bucket_head.queue
          and j.bucket = _bucket_head.bucket
          and j.status in ('queued', 'failed')
          and j.priority > v_priority
          and j.id <> all(_bucket_head.ids)
        order by j.priority, j.run_at, j.id
        limit 1;
        exit when not found;
        next_run_at := least(next_run_at, v_run_at);
        if v_run_at <= _bucket_head.due and coalesce(
            rota._level(v_priority, v_run_at, c_ageing, _bucket_head.due) < v_level, true) then
            v_level := rota._level(v_priority, v_run_at, c_ageing, _bucket_head.due);
            priority := v_priority;
            run_at := v_run_at;
            exit when c_ageing is null;
        end if;
    end loop;
    return next;
end;
$$;
/*
 * 40_enqueue.sql -- put a job in.
 *
 * Enqueue is part of the caller's transaction: rolled back means no job, and no worker sees
 * it before the commit.
 *
 * An idempotency key is unique among live jobs, held by a unique index and nothing else.  If
 * another transaction is just inserting the same key, the insert waits for its end: after its
 * commit we return its job, after its rollback ours goes in.  The job found may end between
 * the two statements; hence the loops, which turn only then.
 *
 * enqueue_many() inserts in the order of the keys.  Two calls that share keys therefore wait
 * for each other in one direction only and cannot deadlock.  When a job that was found has
 * ended meanwhile, all that was inserted is given up and the whole done again: to insert one
 * more key while holding later ones would be the other direction.
 *
 * Last of all a due job asks whether a worker sleeps.  The question of _ring() (62_wakeups.sql)
 * stands here once more, because where nobody is to be rung it then costs no call.
 */

create or replace function rota.enqueue(
    job_type text,
    payload jsonb default '{}',
    queue text default 'default',
    run_at timestamptz default null,
    delay interval default null,
    priority integer default 0,
    max_attempts integer default null,
    lease interval default null,
    backoff jsonb default null,
    idempotency_key text default null,
    unique_for interval default null,
    on_conflict text default 'keep',
    updated_at timestamptz default null,
    max_wait interval default null,
    ordering_key text default null,
    skip_dead boolean default false,
    after bigint[] default null,
    before bigint default null,
    if_parent_dead text default 'cancel',
    limit_key text default null
)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
-- The conflict target names a column that is also an argument.
#variable_conflict use_column
declare
    v_now constant timestamptz := rota.now();
    v_job_id bigint;
begin
    -- Most jobs have no more than this, and one expression costs less than the checks' calls.
    if (enqueue.job_type || ' ' || enqueue.queue
            ~ '^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62} [A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}$'
        and jsonb_typeof(enqueue.payload) = 'object'
        and pg_column_size(enqueue.payload) <= 5242880
        and octet_length(enqueue.payload::text) <= 1048576
        and enqueue.priority between -32768 and 32767
        and num_nonnulls(enqueue.run_at, enqueue.delay, enqueue.max_attempts, enqueue.lease,
            enqueue.backoff, enqueue.idempotency_key) = 0) is not true then
        perform rota._check_new_job(
            '', enqueue.job_type, enqueue.payload, enqueue.queue, enqueue.run_at,
            enqueue.delay, enqueue.priority, enqueue.max_attempts, enqueue.lease,
            enqueue.backoff, enqueue.idempotency_key);
    end if;
    -- Whatever else is said of the job takes another way; this one stays as short as it can be.
    if (enqueue.on_conflict, enqueue.skip_dead, enqueue.if_parent_dead)
      is distinct from ('keep', false, 'cancel') or num_nonnulls(
        enqueue.unique_for, enqueue.updated_at, enqueue.max_wait, enqueue.ordering_key,
        enqueue.after, enqueue.before, enqueue.limit_key) > 0 then
        perform rota._check_waits('', enqueue.ordering_key, enqueue.skip_dead, enqueue.after,
            enqueue.if_parent_dead, enqueue.limit_key);
        return rota._enqueue_special(rota._new_job(enqueue.job_type, enqueue.payload,
                enqueue.queue, enqueue.run_at, enqueue.delay, enqueue.priority,
                enqueue.max_attempts, enqueue.lease, enqueue.backoff, enqueue.idempotency_key,
                enqueue.ordering_key, enqueue.skip_dead, enqueue.after, enqueue.if_parent_dead,
                enqueue.limit_key), enqueue.unique_for, enqueue.on_conflict, enqueue.updated_at,
            enqueue.max_wait, enqueue.run_at is not null or enqueue.delay is not null,
            enqueue.after, enqueue.before);
    end if;
    loop
        insert into rota.jobs as j (
            queue, job_type, payload, priority, max_attempts, lease, backoff,
            idempotency_key, bucket, status, run_at, created_at, updated_at
        ) values (
            case when exists (select from rota.queue_grants)
                then rota._checked_queue(enqueue.queue) else enqueue.queue end,
            enqueue.job_type, enqueue.payload, enqueue.priority,
            coalesce(enqueue.max_attempts, (
                select q.max_attempts from rota.queues as q where q.queue = enqueue.queue), 10),
            case when enqueue.lease is not null then rota._exact(enqueue.lease) end,
            enqueue.backoff, enqueue.idempotency_key, (
                select l.job_type || '|' from rota.limits as l
                where l.job_type = enqueue.job_type), 'queued',
            case when enqueue.delay is not null then v_now + rota._exact(enqueue.delay)
                else coalesce(enqueue.run_at, v_now) end, v_now, v_now
        )
        on conflict (idempotency_key) where idempotency_key is not null do nothing
        returning j.id into v_job_id;
        exit when found;
        select j.id into v_job_id from rota.jobs as j
        where j.idempotency_key = enqueue.idempotency_key;
        exit when found;
    end loop;
    if coalesce(enqueue.run_at, v_now + enqueue.delay, v_now) < v_now + rota._soon()
      and not (pg_try_advisory_lock(1919907936, hashtext(enqueue.queue))
        and pg_advisory_unlock(1919907936, hashtext(enqueue.queue)))
      and pg_try_advisory_lock_shared(1919907937, hashtext(enqueue.queue))
      and pg_advisory_unlock_shared(1919907937, hashtext(enqueue.queue)) then
        perform rota._ring_doors(enqueue.queue, 1, '');
    end if;
    return v_job_id;
end;
$$;

comment on function rota.enqueue(
    text, jsonb, text, timestamptz, interval, integer, integer, interval, jsonb, text,
    interval, text, timestamptz, interval, text, boolean, bigint[], bigint, text, text) is
    'Add one job and return its id, or the id of the job that has its idempotency_key already, '
    'with which on_conflict does keep, replace or rerun; raises 22023 for a bad argument, '
    'RT001 for an unknown job in after or before, RT013 if before has started, RT003 if it '
    'has ended.';

create or replace function rota.enqueue_many(jobs jsonb)
    returns table (ordinal integer, job_id bigint, is_new boolean)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_has_waits boolean;
    v_new_ids bigint[];
    v_ids bigint[];
    v_news boolean[];
begin
    if rota._are_plain_jobs(enqueue_many.jobs) then
        perform rota._check_queues_of(enqueue_many.jobs);
        return query
        select i.ordinal::integer, i.id, true
        from unnest(rota._insert_plain_jobs(enqueue_many.jobs))
            with ordinality as i (id, ordinal);
        perform rota._ring_for_new(enqueue_many.jobs);
        return;
    end if;

    perform rota._check_new_jobs(enqueue_many.jobs);
    perform rota._check_queues_of(enqueue_many.jobs);
    v_has_waits := jsonb_path_exists(enqueue_many.jobs,
        '$[*] ? (exists(@.ordering_key) || exists(@.after) || exists(@.before)
            || exists(@.limit_key))');
    if v_has_waits then
        perform rota._lock_links_of(enqueue_many.jobs);
    end if;
    v_new_ids := array(
        select nextval('rota.jobs_id_seq')
        from generate_series(1, jsonb_array_length(enqueue_many.jobs))
    );

    -- Where no job has a key there is nothing to find, and no need of the subtransaction: a
    -- caller may make thousands of such calls in one transaction.
    if not jsonb_path_exists(enqueue_many.jobs, '$[*].idempotency_key ? (@ != null)') then
        perform rota._insert_jobs(enqueue_many.jobs, v_new_ids);
        v_ids := v_new_ids;
    end if;
    if jsonb_path_exists(enqueue_many.jobs, '$[*] ? (exists(@.unique_for)
        || exists(@.on_conflict) || exists(@.updated_at) || exists(@.max_wait))') then
        select array_agg(m.job_id order by m.ordinal), array_agg(m.is_new order by m.ordinal)
        into v_ids, v_news
        from rota._enqueue_many_keyed(enqueue_many.jobs) as m;
    end if;
    while v_ids is null loop
        begin
            perform rota._insert_jobs(enqueue_many.jobs, v_new_ids);
            v_ids := rota._find_jobs(enqueue_many.jobs, v_new_ids);
            if array_position(v_ids, null) is not null then
                raise no_data_found;
            end if;
        exception
            when no_data_found then
                v_ids := null;
        end;
    end loop;

    if v_news is null then
        v_news := array(
            select i.id = i.new_id
            from unnest(v_ids, v_new_ids) with ordinality as i (id, new_id, ordinal)
            order by i.ordinal
        );
    end if;
    if v_has_waits then
        perform rota._link_jobs(enqueue_many.jobs, v_ids, v_news);
    end if;
    perform rota._ring_for_new(enqueue_many.jobs);
    return query
    select i.ordinal::integer, i.id, i.is_new
    from unnest(v_ids, v_news) with ordinality as i (id, is_new, ordinal)
    order by i.ordinal;
end;
$$;

comment on function rota.enqueue_many(jsonb) is
    'Add up to 10000 jobs, given as objects whose keys are the arguments of enqueue(), and '
    'return one row for each in the same order; raises 22023 for a bad one, naming it, RT001, '
    'RT013, RT003.';

/*
 * Whether all have a type, and at most a payload, a queue and a priority besides, and none is
 * wrong: then they need no keys looked up, and nobody to say which of them is wrong.
 */
create or replace function rota._are_plain_jobs(jobs jsonb)
    returns boolean
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if jsonb_typeof(_are_plain_jobs.jobs) is distinct from 'array'
      or jsonb_array_length(_are_plain_jobs.jobs) > 10000 then
        return false;
    end if;
    return coalesce(bool_and((
        jsonb_typeof(j.job) = 'object'
        and j.job - '{job_type,payload,queue,priority}'::text[] = '{}'
        and (j.job ->> 'job_type') || ' ' || coalesce(j.job ->> 'queue', 'default')
            ~ '^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62} [A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}$'
        and coalesce(jsonb_typeof(j.job -> 'payload'), 'object') = 'object'
        and octet_length(j.job::text) <= 1048576
        and coalesce(j.job ->> 'priority', '0') ~ '^-?[0-9]{1,4}$'
    ) is true), false)
    from jsonb_array_elements(_are_plain_jobs.jobs) as j (job);
end;
$$;

/* Insert plain jobs; returns their ids in the order given. */
create or replace function rota._insert_plain_jobs(jobs jsonb)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_has_settings constant boolean := exists (select from rota.queues);
    v_has_limits constant boolean := exists (select from rota.limits);
    v_ids bigint[];
begin
    with added as (
        insert into rota.jobs (
            queue, job_type, payload, priority, max_attempts, bucket, status, run_at,
            created_at, updated_at
        )
        select
            coalesce(j.job ->> 'queue', 'default'), j.job ->> 'job_type',
            coalesce(j.job -> 'payload', '{}'),
            coalesce((j.job ->> 'priority')::smallint, 0::smallint),
            coalesce(
                case when v_has_settings then (
                    select q.max_attempts
                    from rota.queues as q
                    where q.queue = coalesce(j.job ->> 'queue', 'default')
                ) end, 10),
            case when v_has_limits then (
                select l.job_type || '|'
                from rota.limits as l
                where l.job_type = j.job ->> 'job_type'
            ) end,
            'queued', v_now, v_now, v_now
        from jsonb_array_elements(_insert_plain_jobs.jobs) as j (job)
        returning id
    )
    -- Ids are drawn in the order of the rows.
    select array_agg(a.id) into v_ids from added as a;
    return v_ids;
end;
$$;

/* Insert what is not there, in the order of the keys. */
create or replace function rota._insert_jobs(jobs jsonb, new_ids bigint[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_now constant timestamptz := rota.now();
begin
    insert into rota.jobs (
        id, queue, job_type, payload, priority, max_attempts, lease, backoff,
        idempotency_key, ordering_key, skip_dead, if_parent_dead, limit_key, bucket, status,
        run_at, created_at, updated_at
    )
    overriding system value
    select
        _insert_jobs.new_ids[n.ordinal], n.queue, n.job_type, n.payload, n.priority,
        coalesce(n.max_attempts, q.max_attempts, 10), rota._exact(n.lease), n.backoff,
        n.idempotency_key, n.ordering_key,
        case when n.ordering_key is not null then n.skip_dead end,
        case
            when n.ordering_key is not null or n.after is not null then n.if_parent_dead
        end,
        n.limit_key,
        case
            when l.job_type is not null or n.limit_key is not null
            then format('%s|%s', l.job_type, n.limit_key)
        end,
        case when n.ordering_key is null and n.after is null then 'queued' else 'blocked' end,
        coalesce(n.run_at, v_now + rota._exact(n.delay), v_now), v_now, v_now
    from rota._new_jobs(_insert_jobs.jobs) as n
    left join rota.queues as q on q.queue = n.queue
    left join rota.limits as l on l.job_type = n.job_type
    order by n.idempotency_key, n.ordinal
    on conflict (idempotency_key) where idempotency_key is not null do nothing;
end;
$$;

/* The ids of the jobs now there, null where the one that was found has ended just now. */
create or replace function rota._find_jobs(jobs jsonb, new_ids bigint[])
    returns bigint[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return array(
        -- The newest: an older snapshot may have the one that has ended, too.
        select distinct on (n.ordinal)
            case
                when n.idempotency_key is null then _find_jobs.new_ids[n.ordinal]
                else j.id
            end
        from rota._new_jobs(_find_jobs.jobs) as n
        left join rota.jobs as j on j.idempotency_key = n.idempotency_key
        order by n.ordinal, j.id desc
    );
end;
$$;

/* The objects as typed rows, defaults filled in. */
create or replace function rota._new_jobs(jobs jsonb)
    returns table (
        ordinal bigint,
        job_type text,
        payload jsonb,
        queue text,
        run_at timestamptz,
        delay interval,
        priority integer,
        max_attempts integer,
        lease interval,
        backoff jsonb,
        idempotency_key text,
        unique_for interval,
        on_conflict text,
        updated_at timestamptz,
        max_wait interval,
        ordering_key text,
        skip_dead boolean,
        after bigint[],
        before bigint,
        if_parent_dead text,
        limit_key text
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return query
    select
        n.ordinal, n.job_type,
        case when jsonb_typeof(n.payload) = 'null' then '{}' else coalesce(n.payload, '{}') end,
        coalesce(n.queue, 'default'), n.run_at, n.delay, coalesce(n.priority, 0),
        n.max_attempts, n.lease, nullif(n.backoff, 'null'), n.idempotency_key,
        n.unique_for, coalesce(n.on_conflict, 'keep'), n.updated_at, n.max_wait,
        n.ordering_key, coalesce(n.skip_dead, false), n.after, n.before,
        coalesce(n.if_parent_dead, 'cancel'), n.limit_key
    from rows from (
        jsonb_to_recordset(_new_jobs.jobs) as (
            job_type text, payload jsonb, queue text, run_at timestamptz, delay interval,
            priority integer, max_attempts integer, lease interval, backoff jsonb,
            idempotency_key text, unique_for interval, on_conflict text, updated_at timestamptz,
            max_wait interval, ordering_key text, skip_dead boolean, after bigint[],
            before bigint, if_parent_dead text, limit_key text
        )
    ) with ordinality as n (
        job_type, payload, queue, run_at, delay, priority, max_attempts, lease, backoff,
        idempotency_key, unique_for, on_conflict, updated_at, max_wait, ordering_key,
        skip_dead, after, before, if_parent_dead, limit_key, ordinal
    );
end;
$$;

create or replace function rota._check_new_jobs(jobs jsonb)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_keys constant text[] := array[
        'job_type', 'payload', 'queue', 'run_at', 'delay', 'priority', 'max_attempts',
        'lease', 'backoff', 'idempotency_key', 'unique_for', 'on_conflict', 'updated_at',
        'max_wait', 'ordering_key', 'skip_dead', 'after', 'before', 'if_parent_dead',
        'limit_key'];
    v_ordinal bigint;
    v_job jsonb;
begin
    if jsonb_typeof(_check_new_jobs.jobs) is distinct from 'array' then
        perform rota._refuse('jobs', 'must be an array of objects');
    elsif jsonb_array_length(_check_new_jobs.jobs) > 10000 then
        perform rota._refuse('jobs', format('must be at most 10000, got %s',
            jsonb_array_length(_check_new_jobs.jobs)));
    end if;

    for v_ordinal, v_job in
        select e.ordinal, e.job
        from jsonb_array_elements(_check_new_jobs.jobs) with ordinality as e (job, ordinal)
        where case jsonb_typeof(e.job) when 'object' then e.job - c_keys <> '{}' else true end
        limit 1
    loop
        perform rota._refuse(format('jobs[%s]', v_ordinal), coalesce(
            (
                select format('has an unknown key %L', left(k.key, 80))
                from jsonb_each(
                    case jsonb_typeof(v_job) when 'object' then v_job - c_keys end) as k
                limit 1
            ),
            'must be an object'));
    end loop;

    -- Nothing is written in this block, so it costs no transaction id.
    begin
        perform rota._check_new_job(
            format('jobs[%s].', n.ordinal), n.job_type, n.payload, n.queue, n.run_at, n.delay,
            n.priority, n.max_attempts, n.lease, n.backoff, n.idempotency_key),
            rota._check_key_rule(
                format('jobs[%s].', n.ordinal), n.idempotency_key, n.unique_for, n.on_conflict,
                n.updated_at, n.max_wait),
            rota._check_waits(
                format('jobs[%s].', n.ordinal), n.ordering_key, n.skip_dead, n.after,
                n.if_parent_dead, n.limit_key)
        from rota._new_jobs(_check_new_jobs.jobs) as n;
    exception
        -- An unknown time zone is an invalid_parameter_value too, so no error is let through
        -- before all texts are known to be values.
        when data_exception or program_limit_exceeded then
            perform rota._refuse(format('jobs[%s].%s', f.ordinal, f.key), f.problem)
            from (
                select e.ordinal, k.key, rota._cast_problem(k.key, k.value) as problem
                from jsonb_array_elements(_check_new_jobs.jobs)
                    with ordinality as e (job, ordinal)
                cross join jsonb_each(e.job) as k
            ) as f
            where f.problem is not null
            limit 1;
            raise;
    end;
end;
$$;

/* Why this is no value of the argument's type; null if it is one. */
create or replace function rota._cast_problem(argument text, value jsonb)
    returns text
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_text constant text := _cast_problem.value #>> '{}';
begin
    case _cast_problem.argument
        when 'run_at', 'updated_at' then perform v_text::timestamptz;
        when 'delay', 'lease', 'unique_for', 'max_wait' then perform v_text::interval;
        when 'priority', 'max_attempts' then perform v_text::integer;
        when 'before' then perform v_text::bigint;
        when 'skip_dead' then perform v_text::boolean;
        when 'after' then
            perform n.after
            from rota._new_jobs(jsonb_build_array(jsonb_build_object(
                'after', _cast_problem.value))) as n;
        else null;
    end case;
    return null;
exception
    when data_exception or program_limit_exceeded then
        return format('is not valid: %s', left(sqlerrm, 200));
end;
$$;

/* The rules for one new job; *prefix* says which of many it is. */
create or replace function rota._check_new_job(
    prefix text,
    job_type text,
    payload jsonb,
    queue text,
    run_at timestamptz,
    delay interval,
    priority integer,
    max_attempts integer,
    lease interval,
    backoff jsonb,
    idempotency_key text
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_name(_check_new_job.prefix || 'job_type', _check_new_job.job_type);
    if jsonb_typeof(_check_new_job.payload) is distinct from 'object' then
        perform rota._refuse(_check_new_job.prefix || 'payload', 'must be a JSON object');
    end if;
    perform rota._check_size(_check_new_job.prefix || 'payload', _check_new_job.payload,
        '; keep the blob elsewhere and send its id');
    perform rota._check_name(_check_new_job.prefix || 'queue', _check_new_job.queue);
    if _check_new_job.run_at is not null then
        perform rota._check_run_at(_check_new_job.prefix || 'run_at', _check_new_job.run_at);
    end if;
    if _check_new_job.delay is not null then
        perform rota._check_interval(
            _check_new_job.prefix || 'delay', _check_new_job.delay, '0', '100 years');
        if _check_new_job.run_at is not null then
            perform rota._refuse(
                _check_new_job.prefix || 'delay', 'and run_at must not both be given');
        end if;
    end if;
    perform rota._check_priority(_check_new_job.prefix || 'priority', _check_new_job.priority);
    if _check_new_job.max_attempts < 1 then
        perform rota._refuse(_check_new_job.prefix || 'max_attempts',
            format('must be at least 1, got %s', _check_new_job.max_attempts));
    end if;
    perform rota._check_lease(_check_new_job.prefix || 'lease', _check_new_job.lease);
    perform rota._check_backoff(_check_new_job.prefix || 'backoff', _check_new_job.backoff);
    if _check_new_job.idempotency_key is not null then
        perform rota._check_text(
            _check_new_job.prefix || 'idempotency_key', _check_new_job.idempotency_key, 255);
    end if;
end;
$$;
/*
 * 41_claim.sql -- give jobs to a worker.
 *
 * A claim locks due rows with `for update skip locked`, so that two workers never wait for
 * each other and never get the same job, and marks them running in the same transaction.  The
 * attempt is counted here and not when a failure is reported: a job that kills its worker
 * reports nothing, and must still come to its end.
 *
 * The order is priority, run_at, id.  The index jobs_ready_idx is a set of lanes, one for each
 * (queue, priority), each in order of run_at.  A claim walks the priorities from the lowest
 * number up, and within one takes only the due beginning of each lane.  So a million jobs for
 * next month in front of a lane cost nothing: it never looks behind the first that is not due.
 *
 * The lane hint.  While somebody holds an old snapshot (a report, a dump, a forgotten
 * transaction) vacuum cannot remove what is done, and the index entries of all jobs that went
 * by stay in front of the lane.  So a session remembers where the first job of each lane was
 * and begins there the next time.  A job behind that place -- its transaction committed late,
 * somebody moved it -- is found by a full look from the start of the lane.  Full looks take at
 * most a twentieth of the time: after one that took 5 ms the next comes 100 ms later.  A
 * million old entries take 0.1 s to walk, so even behind them nothing is found later than after
 * 2 s, and sooner the more workers there are.  Where a full look meets few old entries, every
 * look is one.  A new lane is seen at once.  Nothing but speed rests on the hint: it may be
 * lost, wrong, or another's.
 *
 * The lease token is the clock in microseconds, or one more than the job's last token if that
 * is greater.  So it grows with every claim of the job, also when the clock steps back, and a
 * database restored from an old dump does not hand out a token for the second time.  After a
 * restore that rests on the clock alone: if it then steps back, to before claims that the dump
 * does not know, one of their tokens can be given to the same job again.
 *
 * The planner is told to stay on the indexes: this statement is planned once per session, often
 * on an empty table, and has to be right a million jobs later.
 */

create or replace function rota.claim_jobs(
    worker text,
    queues text[] default '{default}',
    max_jobs integer default 1,
    lease interval default null,
    job_types text[] default null
)
    returns table (
        job_id bigint,
        lease_token bigint,
        queue text,
        job_type text,
        payload jsonb,
        priority smallint,
        attempt integer,
        max_attempts integer,
        run_at timestamptz,
        locked_until timestamptz,
        locked_for interval,
        idempotency_key text,
        created_at timestamptz,
        pipeline text,
        stage text,
        stage_input jsonb,
        definition text,
        scheduled_for timestamptz
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
    set enable_sort = off
as $$
declare
    v_now constant timestamptz := rota.now();
    v_call constant text := format('%L %s %s %s',
        claim_jobs.worker, claim_jobs.queues, claim_jobs.lease, claim_jobs.job_types);
    v_hint constant bigint[] := rota._hint(v_call);
    v_rows tid[] := rota._lock_head(
        v_hint, claim_jobs.queues, claim_jobs.max_jobs, claim_jobs.job_types, v_now);
    v_lease interval;
    v_has_settings boolean := false;
    v_limited_ids bigint[] := '{}'::bigint[];
begin
    if cardinality(v_rows) < claim_jobs.max_jobs is not false and (
        -- All that is due, if the look was from the start of the only lane.
        v_rows <> '{}' and v_hint[4] = 0 and not exists (
            select
            from rota.jobs as j
            where j.queue = claim_jobs.queues[1]
              and j.priority > v_hint[3]::integer
              and j.bucket is null
              and j.status in ('queued', 'failed')
        )
    ) is not true then
        if v_hint is null or claim_jobs.max_jobs between 1 and 1000 is not true
          or current_setting('transaction_isolation') <> 'read committed' then
            perform rota._check_claim(
                claim_jobs.worker, claim_jobs.queues, claim_jobs.max_jobs, claim_jobs.lease,
                claim_jobs.job_types);
        end if;
        select d.locked_rows, d.limited_ids, d.has_settings
        into v_rows, v_limited_ids, v_has_settings
        from rota._lock_due(
            v_call, v_hint, claim_jobs.queues, claim_jobs.max_jobs, claim_jobs.job_types,
            v_now) as d;
        if v_rows = '{}' then
            return;
        end if;
    end if;
    if claim_jobs.lease is not null then
        v_lease := rota._exact(claim_jobs.lease);
    end if;

    return query
    with claimed as (
        update rota.jobs as j
        set status = 'running',
            -- No number or lease that somebody wrote by hand may stop the jobs beside it.
            attempts = least(j.attempts, 2147483646) + 1,
            lease_token = greatest(
                least(j.lease_token, 9223372036854775806) + 1,
                (extract(epoch from v_now) * 1000000)::bigint),
            locked_by = claim_jobs.worker,
            locked_until = v_now + greatest('1 ms', least('30 days', coalesce(
                j.lease, v_lease,
                case when v_has_settings then (
                    select q.lease from rota.queues as q where q.queue = j.queue) end,
                '1 minute'))),
            is_limited = j.id = any(v_limited_ids),
            progress_percent = null,
            progress_message = null,
            started_at = v_now,
            updated_at = v_now
        where j.ctid = any(v_rows)
        returning
            j.id, j.lease_token, j.queue, j.job_type, j.payload, j.priority, j.attempts,
            j.max_attempts, j.run_at, j.locked_until, j.idempotency_key, j.created_at,
            j.pipeline, j.stage, j.stage_input, j.definition, j.scheduled_for
    )
    select
        c.id, c.lease_token, c.queue, c.job_type, c.payload, c.priority, c.attempts,
        c.max_attempts, c.run_at, c.locked_until, c.locked_until - v_now, c.idempotency_key,
        c.created_at, c.pipeline, c.stage, c.stage_input, c.definition, c.scheduled_for
    from claimed as c
    order by c.priority, c.run_at, c.id;
end;
$$;

comment on function rota.claim_jobs(text, text[], integer, interval, text[]) is
    'Lease up to max_jobs due jobs of these queues to a worker, by priority, run_at and id; '
    'a lease lasts as the job says, else the argument, else the queue; raises 22023 or RT009.';

/*
 * The rows of the first due jobs from the hint on, locked.  Null if there is no fresh hint for
 * this very call, and none or too few where more has to be looked at: another lane, a limit, a
 * paused queue, jobs whose turn has to be found.  What is in this one statement is all that
 * most claims need.
 */
create or replace function rota._lock_head(
    hint bigint[],
    queues text[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns tid[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
declare
    c_due constant bigint := (extract(epoch from _lock_head.due) * 1000000)::bigint;
    v_queue constant text := _lock_head.queues[1];
begin
    if (
        _lock_head.hint[1] > c_due and _lock_head.hint[1] <= c_due + 60000000
        and cardinality(_lock_head.hint) >= 5
        and cardinality(_lock_head.queues) = 1
        and _lock_head.max_jobs between 1 and 1000
        and current_setting('transaction_isolation') = 'read committed'
    ) is not true then
        return null;
    end if;
    return array(
        select j.ctid
        from rota.jobs as j
        where j.queue = v_queue
          and j.priority = _lock_head.hint[3]::integer
          and j.bucket is null
          and j.status in ('queued', 'failed')
          and j.run_at <= _lock_head.due
          and (j.run_at, j.id) >= (
            case
                when _lock_head.hint[4] = 0 then timestamptz '-infinity'
                else 'epoch'::timestamptz + _lock_head.hint[4] * interval '1 microsecond'
            end, _lock_head.hint[5])
          and (_lock_head.job_types is null or j.job_type = any(_lock_head.job_types))
          and not exists (select from rota.limits)
          and not exists (select from rota.queue_grants)
          and not exists (select from rota.rechecks as r where r.due_at <= _lock_head.due)
          and not exists (
            select
            from rota.queues as q
            where q.queue = v_queue
              and (q.is_paused or q.ageing is not null or q.lease is not null)
          )
          and not exists (
            select from rota.buckets as b where b.queue = v_queue and b.waits_for is null)
          and not exists (
            select
            from rota.jobs as u
            where u.queue = v_queue
              and u.priority < _lock_head.hint[3]::integer
              and u.bucket is null
              and u.status in ('queued', 'failed')
          )
        order by j.run_at, j.id
        limit _lock_head.max_jobs
        for update of j skip locked
    );
end;
$$;

/*
 * The hint of this session for such a call: when it ends and when a full look is due, in
 * microseconds; then the priority, run_at and id of the first job of each lane.  A hash over
 * it and the call goes with it, so that another's, or what is no hint, is not taken for ours.
 */
create or replace function rota._hint(call text)
    returns bigint[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_text constant text := current_setting('rota.hint_' || case
        when _hint.call in ('sweep', 'due') then _hint.call
        else (hashtext(_hint.call) & 15)::text
    end, true);
    v_hint constant text := split_part(v_text, '#', 1);
begin
    if split_part(v_text, '#', 2) = hashtext(v_hint || _hint.call)::text then
        return string_to_array(v_hint, ' ')::bigint[];
    end if;
    return null;
end;
$$;

create or replace function rota._keep_hint(call text, hint bigint[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_hint constant text := array_to_string(_keep_hint.hint, ' ');
begin
    -- Sixteen settings for all ways to claim, and one for each of the other hints.
    perform set_config(
        'rota.hint_' || case
            when _keep_hint.call in ('sweep', 'due') then _keep_hint.call
            else (hashtext(_keep_hint.call) & 15)::text
        end,
        format('%s#%s', v_hint, hashtext(v_hint || _keep_hint.call)), false);
end;
$$;

/*
 * Lock due jobs, and say which of them count for a limit.  Where nothing is set for these
 * queues and no key waits for its turn, only the common lanes are walked.
 */
create or replace function rota._lock_due(
    call text,
    hint bigint[],
    queues text[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns table (locked_rows tid[], limited_ids bigint[], has_settings boolean)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_queues text[] := _lock_due.queues;
    v_has_grants boolean;
    v_has_notes boolean;
    v_has_limits boolean;
    v_has_buckets boolean;
    v_ids bigint[] := '{}'::bigint[];
begin
    -- One statement, because each costs as much as a job that is claimed.
    select
        exists (select from rota.queue_grants),
        exists (select from rota.limits),
        exists (select from rota.rechecks as r where r.due_at <= _lock_due.due),
        exists (select from rota.queues as q where q.queue = any(_lock_due.queues)),
        exists (
            select
            from rota.buckets as b
            where b.queue = any(_lock_due.queues)
              and b.waits_for is null
        )
    into v_has_grants, v_has_limits, v_has_notes, has_settings, v_has_buckets;
    if v_has_grants then
        perform rota._check_queues('worker', _lock_due.queues);
    end if;
    limited_ids := '{}'::bigint[];
    if v_has_notes then
        perform rota._recheck(_lock_due.max_jobs + 20);
    end if;
    if v_has_limits or v_has_notes or has_settings or v_has_buckets then
        v_queues := array(
            select distinct c.queue
            from unnest(_lock_due.queues) as c (queue)
            left join rota.queues as q on q.queue = c.queue
            where q.is_paused is not true
        );
        select s.ids, s.open_queues
        into v_ids, v_queues
        from rota._lock_shared(
            v_queues, _lock_due.max_jobs, _lock_due.job_types, _lock_due.due) as s;
    end if;
    if cardinality(v_queues) > 0 and cardinality(v_ids) < _lock_due.max_jobs then
        v_ids := v_ids || rota._lock_lanes(
            _lock_due.call, _lock_due.hint, v_queues,
            _lock_due.max_jobs - cardinality(v_ids), _lock_due.job_types, _lock_due.due);
    end if;
    if v_has_limits then
        select l.kept_ids, l.limited_ids
        into v_ids, limited_ids
        from rota._apply_limits(v_ids) as l;
    end if;
    -- By number: an update of rows that are locked needs no index to find them.
    locked_rows := array(select j.ctid from rota.jobs as j where j.id = any(v_ids));
    return next;
end;
$$;

/*
 * Walk the lanes from the lowest priority number up, until there are enough.  The place of the
 * first job of each is remembered; where a look from the start of a lane found none, all that
 * is older than a tenth of a second.
 */
create or replace function rota._lock_lanes(
    call text,
    hint bigint[],
    queues text[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_due constant bigint := (extract(epoch from _lock_lanes.due) * 1000000)::bigint;
    v_hint bigint[] := coalesce(_lock_lanes.hint, '{0,0}'::bigint[]);
    -- A time too far ahead is of a clock that went back.
    v_is_full constant boolean := (
        v_hint[2] > c_due and v_hint[2] <= c_due + 60000000) is not true;
    v_next integer := 3;
    v_from bigint[] := '{-32769}'::bigint[];
    v_taken bigint[];
    v_seen bigint[] := '{}'::bigint[];
    v_used bigint[] := '{}'::bigint[];
    v_ids bigint[] := '{}'::bigint[];
    v_cost bigint;
    c_index constant oid := 'rota.jobs_ready_idx'::regclass::oid;
    v_walked bigint := pg_stat_get_xact_tuples_returned(c_index);
begin
    while cardinality(v_ids) < _lock_lanes.max_jobs loop
        v_from := array[rota._next_lane(_lock_lanes.queues, v_from[1], v_hint[v_next]), 0, 0];
        exit when v_from[1] is null;
        if v_from[1] = v_hint[v_next] then
            if not v_is_full then
                v_from := v_hint[v_next:v_next + 2];
            end if;
            v_next := v_next + 3;
        end if;

        v_taken := rota._lock_lane(
            _lock_lanes.queues, v_from, _lock_lanes.max_jobs - cardinality(v_ids),
            _lock_lanes.job_types, _lock_lanes.due);
        if cardinality(v_taken) > 1 then
            if v_is_full or v_from[2] > 0 then
                v_from := v_from[1] || v_taken[:2];
            end if;
            v_ids := v_ids || v_taken[2:];
            v_used := v_used || array[v_from[1], 0, 0];
        elsif v_is_full then
            v_from := array[v_from[1], c_due - 100000, 0];
        end if;
        v_seen := v_seen || v_from;
    end loop;

    -- Full looks that take long are rare.  Beside them the places are brought up to date often,
    -- and where each look is a full one, only what is in front has to be counted now and then.
    v_cost := (extract(epoch from rota.now() - _lock_lanes.due) * 1000000)::bigint;
    v_hint[1] := c_due + least(21 * v_cost, 20000);
    if v_is_full then
        v_hint[2] := c_due + least(21 * v_cost, 60000000);
        v_walked := pg_stat_get_xact_tuples_returned(c_index) - v_walked;
        if v_walked < 500
          + 2 * cardinality(_lock_lanes.queues) * (_lock_lanes.max_jobs + 20) then
            v_seen := v_used;
            v_hint[1] := c_due + 1000000;
        end if;
    end if;
    perform rota._keep_hint(
        _lock_lanes.call, v_hint[:2] || v_seen[:24] || v_hint[v_next:26]);
    return v_ids;
end;
$$;

/*
 * The lowest priority number in use above this one, as far as the known one, without a look at
 * the known lane itself.
 */
create or replace function rota._next_lane(
    queues text[],
    priority bigint,
    known bigint
)
    returns bigint
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_after constant integer := _next_lane.priority::integer;
    v_before constant integer := coalesce(_next_lane.known, 32768)::integer;
begin
    return coalesce((
        select min(l.priority)
        from unnest(_next_lane.queues) as c (queue)
        cross join lateral (
            select j.priority
            from rota.jobs as j
            where j.queue = c.queue
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.priority > v_after
              and j.priority < v_before
            order by j.priority
            limit 1
        ) as l
    ), _next_lane.known);
end;
$$;

/*
 * Lock the first due jobs of one lane, or of one priority of several queues, that nobody else
 * holds: from (priority, run_at in microseconds, id) on.  Returns the run_at of the first of
 * them, and then the ids.
 */
create or replace function rota._lock_lane(
    queues text[],
    first bigint[],
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_queue constant text := _lock_lane.queues[1];
    c_priority constant integer := _lock_lane.first[1]::integer;
    c_run_at constant timestamptz := case
        when _lock_lane.first[2] = 0 then timestamptz '-infinity'
        else 'epoch'::timestamptz + _lock_lane.first[2] * interval '1 microsecond'
    end;
    c_id constant bigint := _lock_lane.first[3];
    v_run_at timestamptz;
    v_ids bigint[];
begin
    if cardinality(_lock_lane.queues) = 1 then
        select array_agg(l.id), min(l.run_at)
        into v_ids, v_run_at
        from (
            select j.id, j.run_at
            from rota.jobs as j
            where j.queue = c_queue
              and j.priority = c_priority
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.run_at <= _lock_lane.due
              and (j.run_at, j.id) >= (c_run_at, c_id)
              and (_lock_lane.job_types is null or j.job_type = any(_lock_lane.job_types))
            order by j.run_at, j.id
            limit _lock_lane.max_jobs
            for update skip locked
        ) as l;
    else
        select m.ids, m.run_at
        into v_ids, v_run_at
        from rota._lock_merged(
            _lock_lane.queues, c_priority, c_run_at, c_id, _lock_lane.max_jobs,
            _lock_lane.job_types, _lock_lane.due) as m;
    end if;
    return (extract(epoch from greatest(v_run_at, 'epoch')) * 1000000)::bigint || v_ids;
end;
$$;

/*
 * The same for several queues of one priority, in one order over all of them.  No index has
 * that order, and locking the head of each lane would take jobs that are then not claimed away
 * from other workers.  So the lanes are merged first and locked after, window by window until
 * there are enough.
 */
create or replace function rota._lock_merged(
    queues text[],
    priority integer,
    after_run_at timestamptz,
    after_id bigint,
    max_jobs integer,
    job_types text[],
    due timestamptz
)
    returns table (ids bigint[], run_at timestamptz)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
-- It locks rows, which plpgsql_check does not see in an array.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_window constant integer := _lock_merged.max_jobs + 20;
    -- A variable: with literals the planner may take jobs_ready_idx where the ids are known,
    -- and read the whole line of a priority to find them.
    c_waiting constant text[] := '{queued,failed}'::text[];
    v_after_run_at timestamptz := _lock_merged.after_run_at;
    v_after_id bigint := _lock_merged.after_id - 1;
    v_candidates bigint[];
begin
    ids := '{}';
    loop
        v_candidates := array(
            select m.id
            from unnest(_lock_merged.queues) as c (queue)
            cross join lateral (
                select j.id, j.run_at
                from rota.jobs as j
                where j.queue = c.queue
                  and j.priority = _lock_merged.priority
                  and j.bucket is null
                  and j.status in ('queued', 'failed')
                  and j.run_at <= _lock_merged.due
                  and (j.run_at, j.id) > (v_after_run_at, v_after_id)
                  and (_lock_merged.job_types is null
                    or j.job_type = any(_lock_merged.job_types))
                order by j.run_at, j.id
                limit v_window
            ) as m
            order by m.run_at, m.id
            limit v_window
        );
        ids := ids || array(
            select j.id
            from rota.jobs as j
            where j.id = any(v_candidates)
              and j.priority = _lock_merged.priority
              and j.status = any(c_waiting)
              and j.run_at <= _lock_merged.due
            order by j.run_at, j.id
            limit _lock_merged.max_jobs - cardinality(ids)
            for update skip locked
        );
        exit when cardinality(ids) = _lock_merged.max_jobs
          or cardinality(v_candidates) < v_window;

        v_after_id := v_candidates[v_window];
        select j.run_at into v_after_run_at from rota.jobs as j where j.id = v_after_id;
        exit when not found;
    end loop;

    if cardinality(ids) = 0 then
        ids := null;
    end if;
    select j.run_at into run_at from rota.jobs as j where j.id = ids[1];
    return next;
end;
$$;

create or replace function rota._check_claim(
    worker text,
    queues text[],
    max_jobs integer,
    lease interval,
    job_types text[]
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_text('worker', _check_claim.worker, 255);
    if _check_claim.max_jobs is null or _check_claim.max_jobs not between 1 and 1000 then
        perform rota._refuse('max_jobs', format('must be 1 to 1000, got %s',
            coalesce(_check_claim.max_jobs::text, 'null')));
    end if;
    perform rota._check_names('queues', _check_claim.queues);
    if _check_claim.lease is not null then
        perform rota._check_lease('lease', _check_claim.lease);
    end if;
    if _check_claim.job_types is not null then
        perform rota._check_names('job_types', _check_claim.job_types);
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using
            errcode = 'RT009',
            message = format('claim_jobs needs the isolation level read committed, not %s',
                current_setting('transaction_isolation')),
            hint = 'Begin the transaction with "isolation level read committed"; at a higher '
                'level every second claim would fail.';
    end if;
end;
$$;
/*
 * 42_finish.sql -- a job did its work.
 *
 * Every way out of the live table is one statement in _end_jobs(): it deletes the row and
 * writes it to the history.  The deleted row is the proof that the job was there, with this
 * token and in this state; so of two that want to end a job exactly one does, and what the
 * other had written in its transaction rolls back with the error it gets.
 *
 * A worker whose answer was lost asks again with the same token and is told
 * already_finished.
 *
 * What a job leads to is made in the same transaction: a run that was asked for meanwhile, the
 * next stage of its pipeline, a note for those that wait for it.
 */

create or replace function rota.finish_job(
    job_id bigint,
    lease_token bigint,
    result jsonb default null,
    next_stage text default null
)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
declare
    v_ended bigint[];
begin
    if finish_job.job_id is null or finish_job.lease_token is null
      or finish_job.result is not null then
        perform rota._check_job_ref(finish_job.job_id, finish_job.lease_token);
        perform rota._check_size('result', finish_job.result, '');
    end if;
    if finish_job.next_stage is not null then
        perform rota._check_next_stage(
            'next_stage', finish_job.job_id, finish_job.lease_token, finish_job.next_stage);
    end if;

    v_ended := rota._end_jobs(
        array[finish_job.job_id], array[finish_job.lease_token], 'running', 'succeeded',
        case when finish_job.result is not null then jsonb_build_array(finish_job.result) end,
        array[finish_job.next_stage]);
    if cardinality(v_ended) = 1 then
        return 'finished';
    elsif not rota._is_finished(finish_job.job_id, finish_job.lease_token) then
        perform rota._raise_lost(finish_job.job_id, finish_job.lease_token);
    end if;
    return 'already_finished';
end;
$$;

comment on function rota.finish_job(bigint, bigint, jsonb, text) is
    'End a running job as succeeded and return finished, or already_finished if this token '
    'did so before; its run of a pipeline goes on to next_stage, to the next in order if that '
    'is null, to none if it is end; raises RT002 if the lease is lost, RT003 if it ended '
    'otherwise, RT001, 22023.';

create or replace function rota.finish_jobs(
    job_ids bigint[],
    lease_tokens bigint[],
    results jsonb default null,
    next_stages text[] default null
)
    returns table (job_id bigint, outcome text)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
declare
    v_hasty bigint[];
    v_newest bigint[];
    v_ended bigint[];
begin
    perform rota._check_job_refs(finish_jobs.job_ids, finish_jobs.lease_tokens);
    perform rota._check_results(finish_jobs.results, cardinality(finish_jobs.job_ids));
    if finish_jobs.next_stages is not null then
        perform rota._check_next_stages(
            finish_jobs.job_ids, finish_jobs.lease_tokens, finish_jobs.next_stages);
    end if;

    v_hasty := rota._end_jobs(
        finish_jobs.job_ids, finish_jobs.lease_tokens, 'running', 'succeeded',
        finish_jobs.results, finish_jobs.next_stages, true);
    if cardinality(v_hasty) = cardinality(finish_jobs.job_ids) then
        return query
        select i.job_id, 'finished' from unnest(finish_jobs.job_ids) as i (job_id);
        return;
    end if;

    -- Some are not ours any more, or locked by somebody, or were.
    v_newest := rota._newest_refs(finish_jobs.job_ids, finish_jobs.lease_tokens);
    v_ended := rota._end_jobs(
        rota._hold_jobs(v_newest, finish_jobs.lease_tokens), finish_jobs.lease_tokens,
        'running', 'succeeded', finish_jobs.results, finish_jobs.next_stages);
    return query
    select
        t.job_id,
        case
            when h.job_id is not null and t.lease_token = t.first_token then 'finished'
            when e.job_id is not null then 'finished'
            when rota._is_running(t.job_id, t.lease_token) then 'busy'
            when rota._is_finished(t.job_id, t.lease_token) then 'already_finished'
            else 'lost'
        end
    from (
        select
            i.*,
            first_value(i.lease_token)
                over (partition by i.job_id order by i.ordinal) as first_token
        from unnest(finish_jobs.job_ids, finish_jobs.lease_tokens, v_newest)
            with ordinality as i (job_id, lease_token, newest_id, ordinal)
    ) as t
    -- Of a job that was given twice, the first token is the one that was tried in haste.
    left join unnest(v_hasty) as h (job_id) on h.job_id = t.job_id
    left join unnest(v_ended) as e (job_id) on e.job_id = t.newest_id
    order by t.ordinal;
end;
$$;

comment on function rota.finish_jobs(bigint[], bigint[], jsonb, text[]) is
    'End up to 1000 running jobs as succeeded and return finished, already_finished, lost, or '
    'busy (another session has the row locked, ask again) for each in the order given; results '
    'and next_stages are as long as job_ids; raises 22023.';

/*
 * Move jobs from old_status to new_status and into the history; returns the ids moved.
 *
 * An index scan for `= any` goes in the order of the key, so two batches that share jobs lock
 * them in the same order and cannot deadlock; any other kind of scan would not.
 * The pair (id, token) is matched by position, which keeps the statement free of joins whose
 * cost the planner could misjudge.
 *
 * In haste it goes past rows that somebody may have locked: a mark of whoever locked a row last
 * is left in its xmax, and that of its own claim is none.
 */
create or replace function rota._end_jobs(
    job_ids bigint[],
    lease_tokens bigint[],
    old_status text,
    new_status text,
    results jsonb default null,
    next_stages text[] default null,
    is_hasty boolean default false
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_now constant timestamptz := rota.now();
    -- All of one claim, mostly.
    v_token constant bigint := case when _end_jobs.lease_tokens[1]
        = all(_end_jobs.lease_tokens) then _end_jobs.lease_tokens[1] end;
    v_ended bigint[];
    v_over bigint[];
    v_leading jsonb;
begin
    with ended as (
        delete from rota.jobs as j
        where j.id = any(_end_jobs.job_ids)
          and j.lease_token = coalesce(
            v_token, _end_jobs.lease_tokens[array_position(_end_jobs.job_ids, j.id)])
          and j.status = _end_jobs.old_status
          and (not _end_jobs.is_hasty or j.xmax = '0'::xid or j.xmax = j.xmin)
          -- Only a worker succeeds; other ends may be of a sweep, which is for all queues.
          and (_end_jobs.new_status <> 'succeeded' or not exists (select from rota.queue_grants)
            or coalesce(j.queue = any((select rota._allowed_queues('worker'))::text[]), true))
        returning
            j.id, j.queue, j.job_type, j.payload, j.priority, j.max_attempts, j.lease,
            j.backoff, j.idempotency_key, j.ordering_key, j.skip_dead, j.limit_key, j.pipeline,
            j.stage, j.stage_input, j.first_job_id, j.definition, j.scheduled_for, j.run_at,
            j.attempts, j.lease_token, j.locked_by, j.cancel_requested_at, j.cancel_reason,
            j.progress_percent, j.progress_message, j.last_error, j.error_type, j.failed_at,
            j.created_at, j.started_at, j.rerun_payload, j.rerun_run_at, j.rerun_priority
    ),
    archived as (
        insert into rota.finished_jobs (
            id, queue, job_type, payload, priority, max_attempts, lease,
            backoff, idempotency_key, ordering_key, skip_dead, limit_key,
            pipeline, stage, stage_input, first_job_id, definition,
            scheduled_for, run_at, attempts, lease_token, locked_by,
            cancel_requested_at, cancel_reason, progress_percent, progress_message,
            last_error, error_type, failed_at, created_at, started_at,
            status, updated_at, finished_at, result
        )
        select
            e.id, e.queue, e.job_type, e.payload, e.priority, e.max_attempts, e.lease,
            e.backoff, e.idempotency_key, e.ordering_key, e.skip_dead, e.limit_key,
            e.pipeline, e.stage, e.stage_input, e.first_job_id, e.definition,
            e.scheduled_for, e.run_at, e.attempts, e.lease_token, e.locked_by,
            e.cancel_requested_at, e.cancel_reason, e.progress_percent, e.progress_message,
            e.last_error, e.error_type, e.failed_at, e.created_at, e.started_at,
            _end_jobs.new_status, v_now, v_now,
            case when _end_jobs.results is not null then nullif(
                _end_jobs.results -> (array_position(_end_jobs.job_ids, e.id) - 1), 'null') end
        from ended as e
    )
    select
        coalesce(array_agg(e.id), '{}'),
        -- Of what may be large only what goes on: a jsonb holds 256 MB.
        jsonb_agg(to_jsonb(e) - array['stage_input', case when e.pipeline is null
            then 'payload' end]) filter (where num_nonnulls(
            e.rerun_payload, e.ordering_key, e.pipeline, e.definition) > 0)
    into v_ended, v_leading
    from ended as e;

    v_over := v_ended;
    if v_leading is not null then
        perform rota._follow_up(v_leading, _end_jobs.new_status);
        v_over := rota._advance_runs(
            v_leading, v_ended, _end_jobs.new_status, _end_jobs.job_ids, _end_jobs.results,
            _end_jobs.next_stages);
    end if;

    -- A statement of its own: it sees those that came to wait while we waited for the rows.
    if current_setting('transaction_isolation') <> 'read committed' or exists (
        select from rota.dependencies as d where d.parent_id = any(v_over)
    ) then
        perform rota._settle_parents(v_over, _end_jobs.new_status);
    end if;
    return v_ended;
end;
$$;

/* What ended jobs lead to, given as rows of jobs: a run after them, a turn for the next. */
create or replace function rota._follow_up(jobs jsonb, status text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
begin
    -- Somebody asked for another run meanwhile; it begins where this one ends.
    insert into rota.jobs (
        queue, job_type, payload, priority, max_attempts, lease, backoff,
        idempotency_key, ordering_key, skip_dead, limit_key, bucket, lease_token,
        status, run_at, created_at, updated_at
    )
    select
        e.queue, e.job_type, e.rerun_payload, e.rerun_priority, e.max_attempts, e.lease,
        e.backoff, e.idempotency_key, e.ordering_key, e.skip_dead, e.limit_key,
        rota._bucket(e.job_type, e.limit_key), e.lease_token,
        case when e.ordering_key is null then 'queued' else 'blocked' end,
        e.rerun_run_at, v_now, v_now
    from jsonb_populate_recordset(null::rota.jobs, _follow_up.jobs) as e
    where e.rerun_payload is not null;
    perform rota._ring(e.queue)
    from jsonb_populate_recordset(null::rota.jobs, _follow_up.jobs) as e
    where e.rerun_payload is not null
      and e.rerun_run_at <= v_now;

    insert into rota.stuck_keys (ordering_key, job_id, stuck_since)
    select e.ordering_key, e.id, v_now
    from jsonb_populate_recordset(null::rota.jobs, _follow_up.jobs) as e
    where _follow_up.status = 'dead'
      and not e.skip_dead
    on conflict do nothing;

    insert into rota.rechecks (due_at, kind, subject)
    select v_now, 'order', e.ordering_key
    from jsonb_populate_recordset(null::rota.jobs, _follow_up.jobs) as e
    where e.ordering_key is not null;

    -- What follows its last run is planned by the end of that.
    insert into rota.rechecks (due_at, kind, subject)
    select v_now, 'schedule', e.definition
    from jsonb_populate_recordset(null::rota.jobs, _follow_up.jobs) as e
    join rota.job_definitions as d on d.name = e.definition
    where d.last_job_id = e.id
      -- An older snapshot does not show who has come to wait for it.
      and (d.next_run_at is null
        or current_setting('transaction_isolation') <> 'read committed');
    perform rota._ring('');
end;
$$;

create or replace function rota._is_finished(job_id bigint, lease_token bigint)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select
        from rota.finished_jobs as f
        where f.id = _is_finished.job_id
          and f.lease_token = _is_finished.lease_token
          and f.status = 'succeeded'
    );
end;
$$;

create or replace function rota._check_results(results jsonb, expected integer)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_results.results is null then
        return;
    elsif jsonb_typeof(_check_results.results) <> 'array'
      or jsonb_array_length(_check_results.results) <> _check_results.expected then
        perform rota._refuse('results', format(
            'must be an array as long as job_ids (%s)', _check_results.expected));
    end if;
    perform rota._check_size(format('results[%s]', r.ordinal), r.result, '')
    from jsonb_array_elements(_check_results.results) with ordinality as r (result, ordinal);
end;
$$;
/*
 * 43_heartbeat.sql -- keep a claimed job alive, and say how far it is.
 *
 * A claim is a lease: the worker owns the job until jobs.locked_until, and
 * sweep_stale_leases() takes back whatever runs past it.  A handler that needs longer moves
 * the deadline with a heartbeat, every quarter to half a lease.
 *
 * The lease token is the fence.  Every claim draws a new one and it never goes back, so a
 * worker that was given up for dead and wakes up late matches no row: it is told to stop, and
 * cannot take the job back from its new owner.
 *
 * The heartbeat is also how a worker learns that somebody wants the job cancelled.
 */

create or replace function rota.heartbeat(
    job_id bigint,
    lease_token bigint,
    lease interval default null
)
    returns table (locked_until timestamptz, is_cancel_requested boolean)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_now timestamptz;
    v_lease interval;
begin
    perform rota._check_job_ref(heartbeat.job_id, heartbeat.lease_token);
    perform rota._check_lease('lease', heartbeat.lease);
    v_lease := rota._exact(heartbeat.lease);

    -- The lease begins after the wait for whoever has the row locked.
    perform from rota.jobs as j where j.id = heartbeat.job_id for update;
    v_now := rota.now();
    return query
    update rota.jobs as j
    set locked_until = v_now + greatest('1 ms', least('30 days', coalesce(
            v_lease, j.lease, rota._queue_lease(j.queue)))),
        updated_at = v_now
    where j.id = heartbeat.job_id
      and j.lease_token = heartbeat.lease_token
      and j.status = 'running'
    returning j.locked_until, j.cancel_requested_at is not null;

    if not found then
        perform rota._raise_lost(heartbeat.job_id, heartbeat.lease_token);
    end if;
end;
$$;

comment on function rota.heartbeat(bigint, bigint, interval) is
    'Extend the lease of a running job, by the argument, else as the job says, else its queue, '
    'and tell whether a cancel was requested; raises RT002 if the lease is lost, RT001, RT003.';

create or replace function rota.heartbeat_jobs(
    job_ids bigint[],
    lease_tokens bigint[],
    lease interval default null
)
    returns table (
        job_id bigint,
        locked_until timestamptz,
        is_lost boolean,
        is_cancel_requested boolean
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
declare
    v_now constant timestamptz := rota.now();
    v_lease interval;
    v_ids bigint[];
begin
    perform rota._check_job_refs(heartbeat_jobs.job_ids, heartbeat_jobs.lease_tokens);
    perform rota._check_lease('lease', heartbeat_jobs.lease);
    v_lease := rota._exact(heartbeat_jobs.lease);
    v_ids := rota._hold_jobs(
        rota._newest_refs(heartbeat_jobs.job_ids, heartbeat_jobs.lease_tokens),
        heartbeat_jobs.lease_tokens);

    return query
    with beaten as (
        update rota.jobs as j
        -- A lease that somebody wrote by hand must not stop those of the other jobs.
        set locked_until = v_now + greatest('1 ms', least('30 days', coalesce(
                v_lease, j.lease, rota._queue_lease(j.queue)))),
            updated_at = v_now
        where j.id = any(v_ids)
          and j.lease_token = heartbeat_jobs.lease_tokens[array_position(v_ids, j.id)]
          and j.status = 'running'
        returning j.id, j.lease_token, j.locked_until, j.cancel_requested_at
    )
    select
        t.job_id, b.locked_until,
        b.id is null and not rota._is_running(t.job_id, t.lease_token),
        b.cancel_requested_at is not null
    from unnest(heartbeat_jobs.job_ids, heartbeat_jobs.lease_tokens)
        with ordinality as t (job_id, lease_token, ordinal)
    left join beaten as b on b.id = t.job_id and b.lease_token = t.lease_token
    order by t.ordinal;
end;
$$;

comment on function rota.heartbeat_jobs(bigint[], bigint[], interval) is
    'heartbeat() for up to 1000 jobs, one row for each in the order given: is_lost where the '
    'lease is lost, locked_until null where another session has the row locked just now; '
    'raises 22023 for a bad argument.';

/* The length of a lease where neither job nor caller says one. */
create or replace function rota._queue_lease(queue text)
    returns interval
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return coalesce(
        (select q.lease from rota.queues as q where q.queue = _queue_lease.queue),
        '1 minute');
end;
$$;

create or replace function rota.set_progress(
    job_id bigint,
    lease_token bigint,
    percent numeric,
    message text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
begin
    perform rota._check_job_ref(set_progress.job_id, set_progress.lease_token);
    if set_progress.percent is null or not set_progress.percent between 0 and 100 then
        perform rota._refuse('percent', format('must be 0 to 100, got %s',
            coalesce(left(set_progress.percent::text, 80), 'null')));
    end if;

    update rota.jobs as j
    set progress_percent = set_progress.percent,
        progress_message = left(set_progress.message, 1000),
        updated_at = rota.now()
    where j.id = set_progress.job_id
      and j.lease_token = set_progress.lease_token
      and j.status = 'running';

    if not found then
        perform rota._raise_lost(set_progress.job_id, set_progress.lease_token);
    end if;
end;
$$;

comment on function rota.set_progress(bigint, bigint, numeric, text) is
    'Note how far a running job is, in percent and in words (cut to 1000 characters); raises '
    'RT002 if the lease is lost, RT001, RT003, 22023.';
/*
 * 44_control.sql -- what an operator does to one job.
 *
 * Each of these locks the job's row first, so it happens wholly before or wholly after a
 * claim, a finish or a sweep of the same job, and says what it found.  A job that moves
 * between jobs and finished_jobs while we look is looked for again.
 *
 * Nobody can stop a worker from outside.  cancel_job() therefore ends a waiting job at once,
 * but of a running one it only asks; the worker learns of it at its next heartbeat.
 */

create or replace function rota.retry_job(job_id bigint, is_forced boolean default false)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_status text;
begin
    perform rota._check_job_id(retry_job.job_id);
    if retry_job.is_forced is null then
        perform rota._refuse('is_forced', 'must not be null');
    end if;

    for v_round in 1..3 loop
        select j.status
        into v_status
        from rota.jobs as j
        where j.id = retry_job.job_id
        for update;

        if found then
            if v_status = 'running' and not retry_job.is_forced then
                perform rota._raise_running(retry_job.job_id);
            end if;
            return rota._requeue(retry_job.job_id);
        end if;
        v_status := rota._revive(retry_job.job_id);
        exit when v_status is not null;
        if v_round = 3 then
            perform rota._raise_not_found(retry_job.job_id);
        end if;
    end loop;

    return v_status;
end;
$$;

comment on function rota.retry_job(bigint, boolean) is
    'Run a job again now and return queued, or blocked if it has to wait for others: a waiting '
    'one at once, an ended one with all its attempts, a running one only if forced (its worker '
    'loses the lease); raises RT001, RT007 if its idempotency_key is taken, RT008 if it is '
    'running, RT014 if its run of a pipeline is in another job.';

/* A live job, back to the head of its lane; whoever ran it has lost the lease. */
create or replace function rota._requeue(job_id bigint)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_status text;
begin
    update rota.jobs as j
    set status = case when j.status = 'blocked' then 'blocked' else 'queued' end,
        run_at = least(j.run_at, rota.now()),
        attempts = least(j.attempts, j.max_attempts - 1),
        payload = coalesce(j.rerun_payload, j.payload),
        priority = coalesce(j.rerun_priority, j.priority),
        rerun_payload = null,
        rerun_run_at = null,
        rerun_priority = null,
        lease_token = j.lease_token + (j.status = 'running')::integer,
        locked_by = null,
        locked_until = null,
        cancel_requested_at = null,
        cancel_reason = null,
        updated_at = rota.now()
    where j.id = _requeue.job_id
    returning j.status into v_status;
    perform rota._ring_for(array[_requeue.job_id]);
    return v_status;
end;
$$;

/*
 * An ended job, back to life with its id and its token; null if there is none.  Its id is lower
 * than those of the jobs that came after it under its ordering key, so it is the next of them.
 * A later stage of a pipeline is not, and takes the place that its dead job has kept.
 */
create or replace function rota._revive(job_id bigint)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_key text;
    v_ordering_key text;
    v_first_job_id bigint;
    v_found boolean;
    v_status text;
begin
    with ended as (
        delete from rota.finished_jobs as f
        where f.id = _revive.job_id
        returning
            f.id, f.queue, f.job_type, f.payload, f.priority, f.max_attempts, f.lease,
            f.backoff, f.idempotency_key, f.ordering_key, f.skip_dead, f.limit_key,
            f.pipeline, f.stage, f.stage_input, f.first_job_id, f.definition, f.scheduled_for,
            f.lease_token, f.last_error, f.error_type, f.failed_at, f.created_at
    ),
    kept_place as (
        delete from rota.stuck_keys as s
        using ended as e
        where s.ordering_key = e.ordering_key
          and s.job_id = e.id
          and e.pipeline is not null
        returning s.job_id
    ),
    revived as (
        insert into rota.jobs as j (
            id, queue, job_type, payload, priority, max_attempts, lease,
            backoff, idempotency_key, ordering_key, skip_dead, limit_key, bucket,
            pipeline, stage, stage_input, first_job_id, definition, scheduled_for, lease_token,
            last_error, error_type, failed_at, created_at,
            status, run_at, updated_at
        )
        overriding system value
        select
            e.id, e.queue, e.job_type, e.payload, e.priority, e.max_attempts, e.lease,
            e.backoff, e.idempotency_key, e.ordering_key, e.skip_dead, e.limit_key,
            rota._bucket(e.job_type, e.limit_key),
            e.pipeline, e.stage, e.stage_input, e.first_job_id, e.definition, e.scheduled_for,
            e.lease_token,
            e.last_error, e.error_type, e.failed_at, e.created_at,
            case when e.ordering_key is null or k.job_id = e.id then 'queued'
                else 'blocked' end, v_now, v_now
        from ended as e
        left join kept_place as k on k.job_id = e.id
        on conflict do nothing
        returning j.id, j.status
    )
    select e.idempotency_key, e.ordering_key, e.first_job_id, true, r.status
    into v_key, v_ordering_key, v_first_job_id, v_found, v_status
    from ended as e
    left join revived as r on r.id = e.id;

    if v_found and v_status is null then
        perform rota._raise_taken(_revive.job_id, v_key, v_first_job_id);
    end if;
    if v_ordering_key is not null then
        perform rota._unstick(_revive.job_id, v_ordering_key);
    end if;
    perform rota._forget_parents(_revive.job_id);
    update rota.dependencies as d
    set is_failed = false
    where d.parent_id = coalesce(v_first_job_id, _revive.job_id);
    perform rota._ring_for(array[_revive.job_id]);
    return v_status;
end;
$$;

/* Why an ended job, or its run, cannot come back: something of it is live. */
create or replace function rota._raise_taken(
    job_id bigint,
    idempotency_key text,
    first_job_id bigint
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_run_job bigint;
    v_key_job bigint;
begin
    v_run_job := (
        select j.id from rota.jobs as j where j.first_job_id = _raise_taken.first_job_id
    );
    v_key_job := (
        select j.id from rota.jobs as j where j.idempotency_key = _raise_taken.idempotency_key
    );
    -- What was in the way a moment ago may have ended since.  A run brings its key along.
    if v_run_job is null and (v_key_job is not null or _raise_taken.first_job_id is null) then
        raise exception using
            errcode = 'RT007',
            message = format('job %s: its idempotency_key %L is taken by %s',
                _raise_taken.job_id, _raise_taken.idempotency_key,
                coalesce('job ' || v_key_job, 'a job that has just ended')),
            hint = 'Wait for that job, or cancel it first.';
    end if;
    raise exception using
        errcode = 'RT014',
        message = format('job %s: its run of the pipeline is under way, in %s',
            _raise_taken.job_id, coalesce('job ' || v_run_job, 'a job that has just ended')),
        hint = 'Wait for the end of that job, or cancel it first.';
end;
$$;

create or replace function rota.cancel_job(job_id bigint, reason text default null)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
declare
    v_status text;
    v_lease_token bigint;
begin
    perform rota._check_job_id(cancel_job.job_id);

    for v_round in 1..3 loop
        select j.status, j.lease_token
        into v_status, v_lease_token
        from rota.jobs as j
        where j.id = cancel_job.job_id
        for update;

        if found then
            return rota._cancel(cancel_job.job_id, v_lease_token, v_status, cancel_job.reason);
        end if;

        select f.status
        into v_status
        from rota.finished_jobs as f
        where f.id = cancel_job.job_id;
        exit when v_status = 'cancelled';
        if found or v_round = 3 then
            perform rota._raise_not_live(cancel_job.job_id);
        end if;
    end loop;

    return 'cancelled';
end;
$$;

comment on function rota.cancel_job(bigint, text) is
    'Cancel a waiting job and return cancelled, or ask for the cancel of a running one and '
    'return running; raises RT001 if there is no such job, RT003 if it ended otherwise.';

create or replace function rota._cancel(
    job_id bigint,
    lease_token bigint,
    status text,
    reason text
)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    update rota.jobs as j
    set cancel_requested_at = case
            when j.status = 'running' then coalesce(j.cancel_requested_at, rota.now())
        end,
        cancel_reason = coalesce(left(_cancel.reason, 1000), j.cancel_reason),
        -- What was asked for before the cancel is cancelled with it.
        rerun_payload = null,
        rerun_run_at = null,
        rerun_priority = null,
        updated_at = case when j.status = 'running' then j.updated_at else rota.now() end
    where j.id = _cancel.job_id
      and j.lease_token = _cancel.lease_token;

    if _cancel.status = 'running' then
        return 'running';
    end if;

    perform rota._end_jobs(
        array[_cancel.job_id], array[_cancel.lease_token], _cancel.status, 'cancelled');
    if _cancel.status = 'blocked' then
        -- The rows of what it waited for are taken away with the next look.
        insert into rota.rechecks (due_at, kind, subject)
        values (rota.now(), 'job', _cancel.job_id::text);
        perform rota._ring('');
    end if;
    return 'cancelled';
end;
$$;

create or replace function rota.set_priority(job_id bigint, priority integer)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
begin
    perform rota._check_job_id(set_priority.job_id);
    perform rota._check_priority('priority', set_priority.priority);

    update rota.jobs as j
    set priority = set_priority.priority,
        updated_at = rota.now()
    where j.id = set_priority.job_id;

    if not found then
        perform rota._raise_not_live(set_priority.job_id);
    end if;
end;
$$;

comment on function rota.set_priority(bigint, integer) is
    'Change the priority of a live job, for a running one that of its retries; raises RT001 if '
    'there is no such job, RT003 if it has ended, 22023.';

create or replace function rota.reschedule_job(
    job_id bigint,
    run_at timestamptz default null,
    delay interval default null
)
    returns timestamptz
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_status text;
    v_run_at timestamptz;
begin
    perform rota._check_job_id(reschedule_job.job_id);
    if (reschedule_job.run_at is null) = (reschedule_job.delay is null) then
        perform rota._refuse('run_at', 'or delay must be given, and not both');
    elsif reschedule_job.delay is not null then
        perform rota._check_interval('delay', reschedule_job.delay, '0', '100 years');
    else
        perform rota._check_run_at('run_at', reschedule_job.run_at);
    end if;

    select j.status
    into v_status
    from rota.jobs as j
    where j.id = reschedule_job.job_id
    for update;
    if not found then
        perform rota._raise_not_live(reschedule_job.job_id);
    elsif v_status = 'running' then
        perform rota._raise_running(reschedule_job.job_id);
    end if;

    update rota.jobs as j
    set run_at = coalesce(
            reschedule_job.run_at, rota.now() + rota._exact(reschedule_job.delay)),
        updated_at = rota.now()
    where j.id = reschedule_job.job_id
    returning j.run_at into v_run_at;
    perform rota._ring_for(array[reschedule_job.job_id]);
    return v_run_at;
end;
$$;

comment on function rota.reschedule_job(bigint, timestamptz, interval) is
    'Move the next try of a waiting job and return its time; raises RT001 if there is no such '
    'job, RT003 if it has ended, RT008 if it is running, 22023.';

create or replace function rota._raise_running(job_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'RT008',
        message = format('job %s is running', _raise_running.job_id),
        hint = 'Wait for its end, or take it away from its worker with '
            'retry_job(..., is_forced => true).';
end;
$$;

/* For a job that is not in the live table: it has ended, or it does not exist. */
create or replace function rota._raise_not_live(job_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_status text;
begin
    select f.status
    into v_status
    from rota.finished_jobs as f
    where f.id = _raise_not_live.job_id;
    if not found then
        -- Retried since we looked for it in jobs: then it had ended when we did.
        select 'succeeded, dead or cancelled, and was retried since'
        into v_status
        from rota.jobs as j
        where j.id = _raise_not_live.job_id;
    end if;
    if not found then
        perform rota._raise_not_found(_raise_not_live.job_id);
    end if;
    raise exception using
        errcode = 'RT003',
        message = format('job %s already ended as %s', _raise_not_live.job_id, v_status),
        hint = 'retry_job() runs it again.';
end;
$$;
/*
 * 45_fail.sql -- a job did not do its work, or not yet.
 *
 * fail: the attempt counts; the job waits for its next try, or is dead after the last one.
 * snooze and release: the attempt is given back, because nothing went wrong.
 *
 * _fail_running() is the only place where it is decided what a failure leads to.  fail_job()
 * and the sweep both go through it, so a job whose worker vanished is treated exactly like one
 * whose worker reported an error.  No way leads past max_attempts, also not retry_in.
 *
 * A job whose cancel was requested is not tried again: it ends as cancelled, and what its
 * worker reported then is no failure that anybody has to look at.
 */

create or replace function rota.fail_job(
    job_id bigint,
    lease_token bigint,
    error text,
    error_type text default null,
    stack text default null,
    retry_in interval default null,
    is_fatal boolean default false
)
    returns table (status text, run_at timestamptz)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
declare
    v_job rota.jobs;
begin
    perform rota._check_job_ref(fail_job.job_id, fail_job.lease_token);
    if fail_job.error is null then
        perform rota._refuse('error', 'must not be null');
    elsif fail_job.is_fatal is null then
        perform rota._refuse('is_fatal', 'must not be null');
    elsif fail_job.retry_in is not null then
        perform rota._check_interval('retry_in', fail_job.retry_in, '0', '1 year');
    end if;

    select j.*
    into v_job
    from rota.jobs as j
    where j.id = fail_job.job_id
      and j.lease_token = fail_job.lease_token
      and j.status = 'running'
    for update;

    if found then
        return query
        select f.status, f.run_at
        from rota._fail_running(
            v_job, fail_job.error, fail_job.error_type, fail_job.stack, fail_job.retry_in,
            fail_job.is_fatal) as f;
        return;
    end if;

    -- The same report again, because its answer was lost.
    return query
    select r.status, case when r.status = 'failed' then r.run_at end
    from rota.job_runs as r
    where r.id = fail_job.job_id
      and r.lease_token = fail_job.lease_token
      and r.status in ('failed', 'dead', 'cancelled')
      and (r.status = 'cancelled' and r.cancel_requested_at is not null or exists (
        select
        from rota.job_errors as e
        where e.job_id = fail_job.job_id
          and e.lease_token = fail_job.lease_token
          and e.message = left(fail_job.error, 10000)
      ));
    if not found then
        perform rota._raise_lost(fail_job.job_id, fail_job.lease_token);
    end if;
end;
$$;

comment on function rota.fail_job(bigint, bigint, text, text, text, interval, boolean) is
    'Report a failed attempt and return failed with the next run_at, or dead or cancelled '
    'with null; error is cut to 10000 characters and stack to 20000; raises RT002 if the lease '
    'is lost, RT001, RT003, 22023.';

create or replace function rota._fail_running(
    job rota.jobs,
    error text,
    error_type text,
    stack text,
    retry_in interval,
    is_fatal boolean
)
    returns table (status text, run_at timestamptz)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_error_type constant text := left(_fail_running.error_type, 200);
    v_is_rerun boolean;
begin
    status := case
        when job.cancel_requested_at is not null then 'cancelled'
        when _fail_running.is_fatal or job.attempts >= job.max_attempts then 'dead'
        else 'failed'
    end;
    v_is_rerun := status = 'failed' and job.rerun_payload is not null;
    if status = 'failed' then
        run_at := v_now + coalesce(
            rota._exact(_fail_running.retry_in),
            rota._backoff(
                coalesce(
                    job.backoff,
                    (select q.backoff from rota.queues as q where q.queue = job.queue)),
                job.attempts));
        if v_is_rerun then
            run_at := greatest(run_at, job.rerun_run_at);
        end if;
    end if;

    if status = 'cancelled' then
        perform rota._end_jobs(array[job.id], array[job.lease_token], 'running', status);
        return next;
        return;
    end if;

    insert into rota.job_errors (
        job_id, lease_token, attempt, queue, job_type, worker, started_at, failed_at,
        error_type, message, stack
    )
    values (
        job.id, job.lease_token, job.attempts, job.queue, job.job_type,
        coalesce(job.locked_by, ''), coalesce(job.started_at, v_now), v_now, v_error_type,
        left(_fail_running.error, 10000), left(_fail_running.stack, 20000)
    )
    on conflict do nothing;

    update rota.jobs as j
    set status = case when _fail_running.status = 'failed' then 'failed' else j.status end,
        run_at = coalesce(_fail_running.run_at, j.run_at),
        -- The next try is also the run that somebody asked for meanwhile.
        attempts = case when v_is_rerun then 0 else j.attempts end,
        payload = case when v_is_rerun then j.rerun_payload else j.payload end,
        priority = case when v_is_rerun then j.rerun_priority else j.priority end,
        rerun_payload = case when not v_is_rerun then j.rerun_payload end,
        rerun_run_at = case when not v_is_rerun then j.rerun_run_at end,
        rerun_priority = case when not v_is_rerun then j.rerun_priority end,
        locked_by = case when _fail_running.status <> 'failed' then j.locked_by end,
        locked_until = case when _fail_running.status <> 'failed' then j.locked_until end,
        last_error = left(_fail_running.error, 1000),
        error_type = v_error_type,
        failed_at = v_now,
        updated_at = v_now
    where j.id = job.id
      and j.lease_token = job.lease_token
      and j.status = 'running';

    if status <> 'failed' then
        perform rota._end_jobs(array[job.id], array[job.lease_token], 'running', status);
    elsif run_at < v_now + rota._soon() then
        perform rota._ring_for(array[job.id]);
    end if;
    return next;
end;
$$;

create or replace function rota.snooze_job(job_id bigint, lease_token bigint, delay interval)
    returns timestamptz
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
declare
    v_run_at timestamptz;
begin
    perform rota._check_job_ref(snooze_job.job_id, snooze_job.lease_token);
    perform rota._check_interval('delay', snooze_job.delay, '0', '100 years');

    v_run_at := (
        select g.next_run_at
        from rota._give_back(
            array[snooze_job.job_id], array[snooze_job.lease_token],
            rota.now() + rota._exact(snooze_job.delay)) as g
    );
    if v_run_at is null then
        perform rota._raise_lost(snooze_job.job_id, snooze_job.lease_token);
    end if;
    return nullif(v_run_at, 'infinity');
end;
$$;

comment on function rota.snooze_job(bigint, bigint, interval) is
    'Put a running job off without burning the attempt and return when it runs, or null if it '
    'was cancelled by request; raises RT002 if the lease is lost, RT001, RT003, 22023.';

create or replace function rota.release_jobs(job_ids bigint[], lease_tokens bigint[])
    returns table (job_id bigint, is_released boolean)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
declare
    v_ids bigint[];
begin
    perform rota._check_job_refs(release_jobs.job_ids, release_jobs.lease_tokens);
    v_ids := rota._hold_jobs(
        rota._newest_refs(release_jobs.job_ids, release_jobs.lease_tokens),
        release_jobs.lease_tokens);

    return query
    select
        t.job_id,
        case
            when g.next_run_at is not null then true
            when not rota._is_running(t.job_id, t.lease_token) then false
        end
    from unnest(release_jobs.job_ids, release_jobs.lease_tokens, v_ids)
        with ordinality as t (job_id, lease_token, held_id, ordinal)
    left join rota._give_back(v_ids, release_jobs.lease_tokens, null) as g
      on g.job_id = t.held_id
    order by t.ordinal;
end;
$$;

comment on function rota.release_jobs(bigint[], bigint[]) is
    'Give up to 1000 running jobs back unburnt, to be claimed by anybody at once; one row for '
    'each in the order given: is_released is false where the lease is lost, null where another '
    'session has the row locked just now, ask again; raises 22023.';

/*
 * Running jobs back to queued with their attempt returned; one row for each that was ours.
 * run_at null leaves the time as it is.  One whose cancel was requested ends instead, and is
 * answered with infinity.  Of several jobs each is already locked: nobody waits for a row while
 * he holds others.
 */
create or replace function rota._give_back(
    job_ids bigint[],
    lease_tokens bigint[],
    run_at timestamptz
)
    returns table (job_id bigint, next_run_at timestamptz)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_cancelled_ids bigint[];
    v_cancelled_tokens bigint[];
begin
    -- Each is locked before it is looked at: the planner moves a condition on a subquery into
    -- it, in front of the lock, but not on a CTE.
    with held as (
        select j.id, j.lease_token, j.cancel_requested_at
        from rota.jobs as j
        where j.id = any(_give_back.job_ids)
          and j.lease_token = _give_back.lease_tokens[array_position(_give_back.job_ids, j.id)]
          and j.status = 'running'
        for update
    )
    select array_agg(h.id), array_agg(h.lease_token)
    into v_cancelled_ids, v_cancelled_tokens
    from held as h
    where h.cancel_requested_at is not null;

    return query
    select e.job_id, timestamptz 'infinity'
    from unnest(
        rota._end_jobs(v_cancelled_ids, v_cancelled_tokens, 'running', 'cancelled')
    ) as e (job_id);

    return query
    update rota.jobs as j
    set status = 'queued',
        run_at = greatest(coalesce(_give_back.run_at, j.run_at), j.rerun_run_at),
        attempts = j.attempts - 1,
        payload = coalesce(j.rerun_payload, j.payload),
        priority = coalesce(j.rerun_priority, j.priority),
        rerun_payload = null,
        rerun_run_at = null,
        rerun_priority = null,
        locked_by = null,
        locked_until = null,
        updated_at = rota.now()
    where j.id = any(_give_back.job_ids)
      and j.lease_token = _give_back.lease_tokens[array_position(_give_back.job_ids, j.id)]
      and j.status = 'running'
    returning j.id, j.run_at;
    perform rota._ring_for(_give_back.job_ids);
end;
$$;
/*
 * 46_queues.sql -- settings of a queue, and the brake.
 *
 * A queue needs no row: it exists as soon as somebody enqueues to it, with the defaults.  A
 * row holds what differs.  Pausing stops claims only: jobs still come in, and running ones go
 * on to their end.
 */

create or replace function rota.set_queue(
    queue text,
    lease interval default null,
    max_attempts integer default null,
    backoff jsonb default null,
    keep_finished interval default null,
    keep_dead interval default null,
    ageing interval default null,
    is_reset boolean default false
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_name('queue', set_queue.queue);
    perform rota._check_lease('lease', set_queue.lease);
    if set_queue.max_attempts < 1 then
        perform rota._refuse('max_attempts',
            format('must be at least 1, got %s', set_queue.max_attempts));
    end if;
    perform rota._check_backoff('backoff', set_queue.backoff);
    if set_queue.keep_finished is not null then
        perform rota._check_interval(
            'keep_finished', set_queue.keep_finished, '0', '100 years');
    end if;
    if set_queue.keep_dead is not null then
        perform rota._check_interval('keep_dead', set_queue.keep_dead, '0', '100 years');
    end if;
    if set_queue.ageing is not null then
        perform rota._check_interval('ageing', set_queue.ageing, '1 second', '30 days');
    end if;
    if set_queue.is_reset is null then
        perform rota._refuse('is_reset', 'must not be null');
    end if;

    insert into rota.queues as q (
        queue, lease, max_attempts, backoff, keep_finished, keep_dead, ageing
    )
    values (
        set_queue.queue, rota._exact(set_queue.lease), set_queue.max_attempts,
        set_queue.backoff, set_queue.keep_finished, set_queue.keep_dead,
        rota._exact(set_queue.ageing)
    )
    on conflict on constraint queues_pkey do update
    set lease = coalesce(excluded.lease, case when not is_reset then q.lease end),
        max_attempts = coalesce(
            excluded.max_attempts, case when not is_reset then q.max_attempts end),
        backoff = coalesce(excluded.backoff, case when not is_reset then q.backoff end),
        keep_finished = coalesce(
            excluded.keep_finished, case when not is_reset then q.keep_finished end),
        keep_dead = coalesce(excluded.keep_dead, case when not is_reset then q.keep_dead end),
        ageing = coalesce(excluded.ageing, case when not is_reset then q.ageing end),
        updated_at = rota.now();
end;
$$;

comment on function rota.set_queue(
    text, interval, integer, jsonb, interval, interval, interval, boolean) is
    'Change settings of a queue: null leaves one as it is, is_reset puts the others back to '
    'their defaults; raises 22023 for a bad argument.';

create or replace function rota.pause_queue(queue text, reason text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_known_queue(pause_queue.queue);

    insert into rota.queues as q (queue, is_paused, paused_at, paused_by, pause_reason)
    values (
        pause_queue.queue, true, rota.now(), session_user, left(pause_queue.reason, 1000)
    )
    on conflict on constraint queues_pkey do update
    set is_paused = true,
        paused_at = coalesce(q.paused_at, excluded.paused_at),
        paused_by = coalesce(q.paused_by, excluded.paused_by),
        pause_reason = coalesce(excluded.pause_reason, q.pause_reason),
        updated_at = rota.now();
end;
$$;

comment on function rota.pause_queue(text, text) is
    'Stop claims from a queue until resume_queue(), noting who and why; raises RT004 if it '
    'has neither settings nor jobs.';

create or replace function rota.resume_queue(queue text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_known_queue(resume_queue.queue);

    update rota.queues as q
    set is_paused = false,
        paused_at = null,
        paused_by = null,
        pause_reason = null,
        updated_at = rota.now()
    where q.queue = resume_queue.queue
      and q.is_paused;
    perform rota._ring(resume_queue.queue);
end;
$$;

comment on function rota.resume_queue(text) is
    'Let jobs of a queue be claimed again; raises RT004 if it has neither settings nor jobs.';

/* A typing error in the name of a queue, at the moment one wants to stop it, must not pass. */
create or replace function rota._check_known_queue(queue text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_name('queue', _check_known_queue.queue);
    if exists (select from rota.queues as q where q.queue = _check_known_queue.queue)
      or exists (select from rota.jobs as j where j.queue = _check_known_queue.queue) then
        return;
    end if;

    raise exception using
        errcode = 'RT004',
        message = format('queue %s is unknown: it has no settings and no jobs',
            _check_known_queue.queue),
        hint = 'Check its name in rota.queue_stats, or make it known with set_queue().';
end;
$$;
/*
 * 47_workers.sql -- who is there.
 *
 * A worker reports itself so that people can see it.  Recovery never looks here: a lease ends
 * by the clock, whether or not anybody knows whose it was.
 */

create or replace function rota.report_worker(
    worker text,
    host text,
    pid integer,
    version text,
    queues text[]
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_text('worker', report_worker.worker, 255);
    perform rota._check_names('queues', report_worker.queues);

    insert into rota.workers as w (worker, host, pid, version, queues)
    values (
        report_worker.worker, left(report_worker.host, 255), report_worker.pid,
        left(report_worker.version, 255), report_worker.queues
    )
    on conflict on constraint workers_pkey do update
    set host = excluded.host,
        pid = excluded.pid,
        version = excluded.version,
        queues = excluded.queues,
        started_at = case
            when (w.host, w.pid) is distinct from (excluded.host, excluded.pid)
                then excluded.started_at
            else w.started_at
        end,
        last_seen_at = excluded.last_seen_at;
end;
$$;

comment on function rota.report_worker(text, text, integer, text, text[]) is
    'Say that a worker is there, for people who look at rota.workers; raises 22023.';

create or replace function rota.forget_worker(worker text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_text('worker', forget_worker.worker, 255);
    delete from rota.workers as w where w.worker = forget_worker.worker;
end;
$$;

comment on function rota.forget_worker(text) is
    'Say that a worker has left; its leases are not touched; raises 22023.';
/*
 * 48_effects.sql -- do something outside of the database once.
 *
 * record_effect(), commit, do it, complete_effect().  What is promised:
 *
 * 1. Of all that record the same (scope, key) one is told true and holds the record, until it
 *    is withdrawn, forgotten or taken over.
 * 2. If the holder's lease is lost before it completes the record, nobody can know whether the
 *    effect happened.  Neither answer is right for every effect, so who comes next chooses:
 *    'skip' is told false, at most once; 'again' takes the record over, at least once.
 * 3. As long as the holder's lease is not lost, other jobs get neither answer, but RT010; the
 *    holder itself, should it ask again, chooses too.
 * 4. A lease that is lost, or does not hold the record, changes nothing.
 *
 * Every call locks first the row of its own job, then that of the effect, and waits for no
 * third; so calls cannot deadlock.  Whether the holder's lease is held is only read: once it is
 * lost it stays so, because a token never comes back.
 */

create or replace function rota.record_effect(
    scope text,
    key text,
    job_id bigint,
    lease_token bigint,
    if_unknown text default 'skip',
    keep interval default '180 days'
)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_now constant timestamptz := rota.now();
    v_kept_until timestamptz;
    v_effect rota.effects;
begin
    perform rota._check_effect(record_effect.scope, record_effect.key);
    perform rota._check_job_ref(record_effect.job_id, record_effect.lease_token);
    if record_effect.if_unknown is null
      or record_effect.if_unknown not in ('skip', 'again') then
        perform rota._refuse('if_unknown', format(
            'must be skip or again, got %L', left(record_effect.if_unknown, 80)));
    end if;
    perform rota._check_interval('keep', record_effect.keep, '1 second', '100 years');
    v_kept_until := v_now + rota._exact(record_effect.keep);

    if not rota._lock_lease(record_effect.job_id, record_effect.lease_token) then
        perform rota._raise_lost(record_effect.job_id, record_effect.lease_token);
    end if;

    loop
        insert into rota.effects (scope, key, job_id, lease_token, recorded_at, kept_until)
        values (
            record_effect.scope, record_effect.key, record_effect.job_id,
            record_effect.lease_token, v_now, v_kept_until
        )
        on conflict do nothing;
        if found then
            return true;
        end if;

        select e.*
        into v_effect
        from rota.effects as e
        where e.scope = record_effect.scope
          and e.key = record_effect.key
        for update;
        -- If it is not found, it was withdrawn or forgotten just now.
        exit when found;
    end loop;

    if v_effect.completed_at is not null then
        return false;
    elsif (v_effect.job_id, v_effect.lease_token)
      <> (record_effect.job_id, record_effect.lease_token)
      and rota._is_leased(v_effect.job_id, v_effect.lease_token) then
        perform rota._raise_in_progress(v_effect);
    elsif record_effect.if_unknown = 'skip' then
        return false;
    end if;

    update rota.effects as e
    set job_id = record_effect.job_id,
        lease_token = record_effect.lease_token,
        recorded_at = v_now,
        kept_until = v_kept_until
    where e.scope = record_effect.scope
      and e.key = record_effect.key;
    return true;
end;
$$;

comment on function rota.record_effect(text, text, bigint, bigint, text, interval) is
    'Record that a running job is about to cause an effect and return true, or false if it '
    'is not to: it is done, or its outcome unknown and if_unknown not again; raises RT002 if '
    'the lease is lost, RT010 if another job is at it, RT001, RT003, 22023.';

create or replace function rota.complete_effect(
    scope text,
    key text,
    job_id bigint,
    lease_token bigint,
    result jsonb default null
)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_is_leased boolean;
begin
    perform rota._check_effect(complete_effect.scope, complete_effect.key);
    perform rota._check_job_ref(complete_effect.job_id, complete_effect.lease_token);
    perform rota._check_size('result', complete_effect.result, '');

    v_is_leased := rota._lock_lease(complete_effect.job_id, complete_effect.lease_token);
    update rota.effects as e
    set completed_at = rota.now(),
        result = complete_effect.result
    where e.scope = complete_effect.scope
      and e.key = complete_effect.key
      and e.job_id = complete_effect.job_id
      and e.lease_token = complete_effect.lease_token
      and e.completed_at is null
      and v_is_leased;
    if found then
        return 'completed';
    end if;

    -- Asked again, because the answer was lost.
    perform
    from rota.effects as e
    where e.scope = complete_effect.scope
      and e.key = complete_effect.key
      and e.job_id = complete_effect.job_id
      and e.lease_token = complete_effect.lease_token
      and e.completed_at is not null;
    if not found then
        perform rota._raise_not_held(
            complete_effect.scope, complete_effect.key, complete_effect.job_id,
            complete_effect.lease_token, v_is_leased);
    end if;
    return 'already_completed';
end;
$$;

comment on function rota.complete_effect(text, text, bigint, bigint, jsonb) is
    'Say that an effect has happened and return completed, or already_completed if this token '
    'said so before; raises RT002 if the lease is lost, RT011 if it does not hold the record, '
    'RT001, RT003, 22023.';

create or replace function rota.withdraw_effect(
    scope text,
    key text,
    job_id bigint,
    lease_token bigint
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_is_leased boolean;
begin
    perform rota._check_effect(withdraw_effect.scope, withdraw_effect.key);
    perform rota._check_job_ref(withdraw_effect.job_id, withdraw_effect.lease_token);

    v_is_leased := rota._lock_lease(withdraw_effect.job_id, withdraw_effect.lease_token);
    delete from rota.effects as e
    where e.scope = withdraw_effect.scope
      and e.key = withdraw_effect.key
      and e.job_id = withdraw_effect.job_id
      and e.lease_token = withdraw_effect.lease_token
      and e.completed_at is null
      and v_is_leased;
    if not found then
        perform rota._raise_not_held(
            withdraw_effect.scope, withdraw_effect.key, withdraw_effect.job_id,
            withdraw_effect.lease_token, v_is_leased);
    end if;
end;
$$;

comment on function rota.withdraw_effect(text, text, bigint, bigint) is
    'Take back the record of an effect that certainly did not happen; raises RT002 if the '
    'lease is lost, RT011 if it does not hold the record, RT001, RT003, 22023.';

create or replace function rota.effect_result(scope text, key text)
    returns table (is_done boolean, result jsonb)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
begin
    perform rota._check_effect(effect_result.scope, effect_result.key);

    return query
    select e.completed_at is not null, e.result
    from rota.effects as e
    where e.scope = effect_result.scope
      and e.key = effect_result.key;
end;
$$;

comment on function rota.effect_result(text, text) is
    'Return whether a recorded effect is done, and with what result; no row if there is no '
    'record; raises 22023.';

create or replace function rota._check_effect(scope text, key text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_name('scope', _check_effect.scope);
    perform rota._check_text('key', _check_effect.key, 255);
end;
$$;

/* Whether a job runs under this token; a lease that is over but not taken back is held. */
create or replace function rota._is_leased(job_id bigint, lease_token bigint)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select
        from rota.jobs as j
        where j.id = _is_leased.job_id
          and j.lease_token = _is_leased.lease_token
          and j.status = 'running'
    );
end;
$$;

/* The same, and it stays so until the end of the transaction. */
create or replace function rota._lock_lease(job_id bigint, lease_token bigint)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform
    from rota.jobs as j
    where j.id = _lock_lease.job_id
      and j.lease_token = _lock_lease.lease_token
      and j.status = 'running'
    for update;
    return found;
end;
$$;

create or replace function rota._raise_in_progress(effect rota.effects)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'RT010',
        message = format('effect %s %L is in progress: job %s has recorded it and still runs',
            effect.scope, effect.key, effect.job_id),
        hint = 'Try again when that job has ended.';
end;
$$;

create or replace function rota._raise_not_held(
    scope text,
    key text,
    job_id bigint,
    lease_token bigint,
    is_leased boolean
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if not _raise_not_held.is_leased then
        perform rota._raise_lost(_raise_not_held.job_id, _raise_not_held.lease_token);
    end if;
    raise exception using
        errcode = 'RT011',
        message = format('effect %s %L has no open record of job %s', _raise_not_held.scope,
            _raise_not_held.key, _raise_not_held.job_id),
        hint = 'Only who was told true by record_effect() may go on; a record ends when it is '
            'completed or withdrawn.';
end;
$$;
/*
 * 49_keys.sql -- what an idempotency key can do beyond being unique.
 *
 * Promises.  A key has at most one live job.  With unique_for it makes no new job for that
 * time, whatever became of the last one.  With on_conflict replace, the job that waits takes
 * the new payload, time and priority.  With rerun, so it does too, and if the job is running,
 * exactly one more run follows it, with the newest payload, and the two never overlap; an
 * update that is not newer than the last one seen is ignored.
 *
 * Held by two unique rows.  jobs_idempotency_key_idx is the key's live job.  The row of
 * idempotency_keys is the memory of a key that outlives its job: until when it is unique, and
 * which version was seen last.  Both are locked in this order, the job first, and many keys in
 * their order.  No subtransaction is opened and closed in between: who waits for a lock that
 * it took would wait for the whole transaction, also after the lock was given back.
 *
 * The rerun of a running job waits in the job's own row, so whoever ends the job finds it there
 * under the row's lock: nothing can come between.  _end_jobs() makes a new job of it in the
 * statement that ends the old one.
 *
 * A batch waits for a job that somebody else has locked only while it holds nothing itself,
 * since finish_jobs() and the like lock jobs in the order of their ids.
 */

/* A new row of jobs with its defaults; the id comes with the insert, the checks before. */
create or replace function rota._new_job(
    job_type text,
    payload jsonb,
    queue text,
    run_at timestamptz,
    delay interval,
    priority integer,
    max_attempts integer,
    lease interval,
    backoff jsonb,
    idempotency_key text,
    ordering_key text,
    skip_dead boolean,
    after bigint[],
    if_parent_dead text,
    limit_key text
)
    returns rota.jobs
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
begin
    return jsonb_populate_record(null::rota.jobs, jsonb_build_object(
        'job_type', _new_job.job_type,
        'payload', _new_job.payload,
        'queue', _new_job.queue,
        'created_at', v_now,
        'run_at', coalesce(_new_job.run_at, v_now + rota._exact(_new_job.delay), v_now),
        'priority', _new_job.priority,
        'max_attempts', coalesce(
            _new_job.max_attempts,
            (select q.max_attempts from rota.queues as q where q.queue = _new_job.queue),
            10),
        'lease', rota._exact(_new_job.lease),
        'backoff', _new_job.backoff,
        'idempotency_key', _new_job.idempotency_key,
        'ordering_key', _new_job.ordering_key,
        'skip_dead', case when _new_job.ordering_key is not null then _new_job.skip_dead end,
        'if_parent_dead', case
            when _new_job.ordering_key is not null or _new_job.after is not null
            then _new_job.if_parent_dead
        end,
        'limit_key', _new_job.limit_key,
        'status', case
            when _new_job.ordering_key is null and _new_job.after is null then 'queued'
            else 'blocked'
        end));
end;
$$;

/* enqueue() for a job with a rule for its key, or with something that it waits for. */
create or replace function rota._enqueue_special(
    job rota.jobs,
    unique_for interval,
    on_conflict text,
    updated_at timestamptz,
    max_wait interval,
    has_time boolean,
    after bigint[],
    before bigint
)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_job_id bigint;
    v_is_new boolean;
begin
    perform rota._check_key_rule(
        '', job.idempotency_key, _enqueue_special.unique_for, _enqueue_special.on_conflict,
        _enqueue_special.updated_at, _enqueue_special.max_wait);
    perform rota._check_queues('producer', array[job.queue]);

    if _enqueue_special.before is not null
      and num_nonnulls(_enqueue_special.after, job.idempotency_key, job.ordering_key) > 0 then
        perform rota._lock_links();
    elsif _enqueue_special.after is not null and job.ordering_key is not null then
        perform rota._share_links();
    end if;
    select k.job_id, k.is_new
    into v_job_id, v_is_new
    from rota._enqueue_keyed(
        job, _enqueue_special.unique_for, _enqueue_special.on_conflict,
        _enqueue_special.updated_at, _enqueue_special.max_wait, _enqueue_special.has_time,
        true, '') as k;
    if not v_is_new and _enqueue_special.on_conflict <> 'keep' then
        perform rota._check_queues_of_jobs(array[v_job_id]);
    end if;
    perform rota._link_job(
        v_job_id, v_is_new, _enqueue_special.after, _enqueue_special.before);
    perform rota._ring_for(array[v_job_id]);
    return v_job_id;
end;
$$;

/*
 * Find or insert the one job of a key, then ask the memory of the key, then change the job;
 * *prefix* says which of many it is.
 */
create or replace function rota._enqueue_keyed(
    job rota.jobs,
    unique_for interval,
    on_conflict text,
    updated_at timestamptz,
    max_wait interval,
    has_time boolean,
    may_wait boolean,
    prefix text
)
    returns table (job_id bigint, is_new boolean)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_is_versioned constant boolean :=
        _enqueue_keyed.unique_for is not null or _enqueue_keyed.updated_at is not null;
begin
    loop
        if v_is_versioned or _enqueue_keyed.on_conflict <> 'keep' then
            job_id := rota._lock_keyed(job.idempotency_key, _enqueue_keyed.may_wait);
            is_new := false;
            exit when job_id is not null;
        end if;
        job_id := rota._insert_job(job);
        is_new := true;
        exit when job_id is not null;
        if not v_is_versioned and _enqueue_keyed.on_conflict = 'keep' then
            select j.id
            into job_id
            from rota.jobs as j
            where j.idempotency_key = job.idempotency_key;
            is_new := false;
            exit when found;
        end if;
    end loop;

    if v_is_versioned and not rota._hold_key(
        job.idempotency_key, job_id, _enqueue_keyed.unique_for, _enqueue_keyed.updated_at) then
        if is_new then
            -- The key is still unique, or has seen this version: as if we had not come.
            delete from rota.jobs as j where j.id = _enqueue_keyed.job_id and j.lease_token = 0;
            is_new := false;
            select k.job_id
            into job_id
            from rota.idempotency_keys as k
            where k.idempotency_key = job.idempotency_key;
        end if;
    elsif not is_new and _enqueue_keyed.on_conflict <> 'keep' then
        perform rota._update_keyed(
            job_id, job, _enqueue_keyed.on_conflict = 'rerun', _enqueue_keyed.max_wait,
            _enqueue_keyed.has_time, _enqueue_keyed.prefix);
    end if;
    return next;
end;
$$;

/*
 * Lock the live job of a key; null if there is none.  Raises RTB00, which nobody sees, where
 * somebody else has it locked and it may not wait.
 */
create or replace function rota._lock_keyed(idempotency_key text, may_wait boolean)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_job_id bigint;
begin
    if _lock_keyed.may_wait then
        select j.id
        into v_job_id
        from rota.jobs as j
        where j.idempotency_key = _lock_keyed.idempotency_key
        for update;
        return v_job_id;
    end if;

    select j.id
    into v_job_id
    from rota.jobs as j
    where j.idempotency_key = _lock_keyed.idempotency_key
    for update skip locked;
    if not found and exists (
        select from rota.jobs as j where j.idempotency_key = _lock_keyed.idempotency_key
    ) then
        raise exception using errcode = 'RTB00', message = _lock_keyed.idempotency_key;
    end if;
    return v_job_id;
end;
$$;

/* Take the key for a new event; false if it is still unique, or has seen this version. */
create or replace function rota._hold_key(
    idempotency_key text,
    job_id bigint,
    unique_for interval,
    updated_at timestamptz
)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_unique_until constant timestamptz := v_now + rota._exact(_hold_key.unique_for);
begin
    insert into rota.idempotency_keys as k (
        idempotency_key, job_id, unique_until, source_updated_at, kept_until
    )
    values (
        _hold_key.idempotency_key, _hold_key.job_id, v_unique_until, _hold_key.updated_at,
        coalesce(v_unique_until, v_now + interval '90 days')
    )
    on conflict on constraint idempotency_keys_pkey do update
    set job_id = excluded.job_id,
        unique_until = coalesce(excluded.unique_until, k.unique_until),
        source_updated_at = coalesce(excluded.source_updated_at, k.source_updated_at),
        kept_until = greatest(excluded.kept_until, k.kept_until)
    where (excluded.unique_until is null or coalesce(k.unique_until, '-infinity') <= v_now)
      and (
        excluded.source_updated_at is null
        or coalesce(k.source_updated_at, '-infinity') < excluded.source_updated_at
      );
    return found;
end;
$$;

/* Null if its key, or its run of a pipeline, has a live job. */
create or replace function rota._insert_job(job rota.jobs)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_new_id constant bigint := nextval('rota.jobs_id_seq');
    v_job_id bigint;
begin
    insert into rota.jobs as j (
        id, queue, job_type, payload, priority, max_attempts, lease, backoff,
        idempotency_key, ordering_key, skip_dead, if_parent_dead, limit_key, bucket, pipeline,
        stage, stage_input, first_job_id, status, run_at, created_at, updated_at
    )
    overriding system value
    values (
        v_new_id, job.queue, job.job_type, job.payload, job.priority, job.max_attempts,
        job.lease, job.backoff, job.idempotency_key, job.ordering_key, job.skip_dead,
        job.if_parent_dead, job.limit_key, rota._bucket(job.job_type, job.limit_key),
        job.pipeline, job.stage, job.stage_input,
        case when job.pipeline is not null then coalesce(job.first_job_id, v_new_id) end,
        job.status, job.run_at, job.created_at, job.created_at
    )
    on conflict do nothing
    returning j.id into v_job_id;
    return v_job_id;
end;
$$;

/*
 * Give the job of the key, which the caller has locked, what is new, or note it as the run that
 * follows this one.  A failed job has all its attempts for it, and keeps its backoff unless a
 * time was given.
 */
create or replace function rota._update_keyed(
    job_id bigint,
    job rota.jobs,
    is_rerun boolean,
    max_wait interval,
    has_time boolean,
    prefix text
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    update rota.jobs as j
    set payload = case when j.status = 'running' then j.payload else job.payload end,
        priority = case when j.status = 'running' then j.priority else job.priority end,
        run_at = case
            when j.status = 'running' then j.run_at
            when j.status = 'failed' and not _update_keyed.has_time then j.run_at
            else least(job.run_at, j.created_at + rota._exact(_update_keyed.max_wait))
        end,
        rerun_payload = case when j.status = 'running' then job.payload end,
        rerun_run_at = case when j.status = 'running' then job.run_at end,
        rerun_priority = case when j.status = 'running' then job.priority end,
        attempts = case when j.status = 'running' then j.attempts else 0 end,
        updated_at = case when j.status = 'running' then j.updated_at else job.created_at end
    where j.id = _update_keyed.job_id
      and (j.status <> 'running' or _update_keyed.is_rerun)
      and j.pipeline is null;
    if not found and exists (
        select
        from rota.jobs as j
        where j.id = _update_keyed.job_id
          and j.pipeline is not null
    ) then
        perform rota._refuse(_update_keyed.prefix || 'on_conflict', format(
            'must be keep, because a pipeline runs under the idempotency key %L',
            job.idempotency_key));
    end if;
end;
$$;

/* Wait until nobody has the live job of a key locked, and let go of it again. */
create or replace function rota._wait_for_key(idempotency_key text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform
    from rota.jobs as j
    where j.idempotency_key = _wait_for_key.idempotency_key
    for update;
    raise no_data_found;
exception
    when no_data_found then
        null;
end;
$$;

/* enqueue_many() for a batch with rules for its keys. */
create or replace function rota._enqueue_many_keyed(jobs jsonb)
    returns table (ordinal integer, job_id bigint, is_new boolean)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids bigint[];
    v_news boolean[];
    v_is_done boolean := false;
    v_new record;
begin
    while not v_is_done loop
        begin
            for v_new in
                select n.*, k.job_id, k.is_new
                from (
                    select m.*
                    from rota._new_jobs(_enqueue_many_keyed.jobs) as m
                    order by m.idempotency_key, m.ordinal
                ) as n
                cross join lateral rota._enqueue_keyed(
                    rota._new_job(
                        n.job_type, n.payload, n.queue, n.run_at, n.delay, n.priority,
                        n.max_attempts, n.lease, n.backoff, n.idempotency_key, n.ordering_key,
                        n.skip_dead, n.after, n.if_parent_dead, n.limit_key),
                    n.unique_for, n.on_conflict, n.updated_at, n.max_wait,
                    n.run_at is not null or n.delay is not null, false,
                    format('jobs[%s].', n.ordinal)) as k
            loop
                v_ids[v_new.ordinal] := v_new.job_id;
                v_news[v_new.ordinal] := v_new.is_new;
            end loop;
            v_is_done := true;
        exception
            when sqlstate 'RTB00' then
                perform rota._wait_for_key(sqlerrm);
        end;
    end loop;

    -- A key is one in all queues, so it may have found a job of any.
    perform rota._check_queues_of_jobs(array(
        select v_ids[n.ordinal]
        from rota._new_jobs(_enqueue_many_keyed.jobs) as n
        where n.on_conflict <> 'keep'
          and not v_news[n.ordinal]
    ));
    return query
    select o.ordinal, v_ids[o.ordinal], v_news[o.ordinal]
    from generate_series(1, cardinality(v_ids)) as o (ordinal);
end;
$$;

create or replace function rota._check_key_rule(
    prefix text,
    idempotency_key text,
    unique_for interval,
    on_conflict text,
    updated_at timestamptz,
    max_wait interval
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_is_plain constant boolean := _check_key_rule.on_conflict is not distinct from 'keep'
        and _check_key_rule.unique_for is null and _check_key_rule.updated_at is null
        and _check_key_rule.max_wait is null;
begin
    if v_is_plain then
        return;
    elsif _check_key_rule.on_conflict is null
      or _check_key_rule.on_conflict not in ('keep', 'replace', 'rerun') then
        perform rota._refuse(_check_key_rule.prefix || 'on_conflict', format(
            'must be keep, replace or rerun, got %L', left(_check_key_rule.on_conflict, 80)));
    elsif _check_key_rule.idempotency_key is null then
        perform rota._refuse(_check_key_rule.prefix || 'idempotency_key',
            'is needed for on_conflict, unique_for, updated_at and max_wait');
    end if;
    if _check_key_rule.unique_for is not null then
        perform rota._check_interval(_check_key_rule.prefix || 'unique_for',
            _check_key_rule.unique_for, '1 millisecond', '100 years');
        if _check_key_rule.on_conflict <> 'keep' then
            perform rota._refuse(
                _check_key_rule.prefix || 'unique_for', 'goes with on_conflict keep only');
        end if;
    end if;
    if _check_key_rule.updated_at is not null then
        perform rota._check_run_at(
            _check_key_rule.prefix || 'updated_at', _check_key_rule.updated_at);
        if _check_key_rule.on_conflict <> 'rerun' then
            perform rota._refuse(
                _check_key_rule.prefix || 'updated_at', 'goes with on_conflict rerun only');
        end if;
    end if;
    if _check_key_rule.max_wait is not null then
        perform rota._check_interval(_check_key_rule.prefix || 'max_wait',
            _check_key_rule.max_wait, '0', '100 years');
        if _check_key_rule.on_conflict = 'keep' then
            perform rota._refuse(_check_key_rule.prefix || 'max_wait',
                'goes with on_conflict replace or rerun only');
        end if;
    end if;
end;
$$;
/*
 * 50_sweep.sql -- take back the jobs of workers that vanished.
 *
 * A running job whose lease has ended is treated as one whose attempt failed.  No leader does
 * this and no daemon: anybody may call it at any time, each call does a bounded amount, and
 * rows that somebody else holds (a heartbeat, a finish, another sweep) are skipped.
 *
 * One row that cannot be swept must not keep the others.  All are first tried together; if
 * that fails they are tried one by one, each in its own subtransaction, and the bad one stays
 * with a warning; up to ten times as many are looked at, so that bad ones do not fill the call.
 *
 * While somebody holds an old snapshot, the index entries of all leases that ended well stay in
 * front.  So a session remembers until when it has swept and begins there, as claims do (see
 * there): looks from the very start take at most a twentieth of the time.
 */

create or replace function rota.sweep_stale_leases(max_jobs integer default 1000)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
    set enable_sort = off
as $$
begin
    if sweep_stale_leases.max_jobs is null
      or sweep_stale_leases.max_jobs not between 1 and 10000 then
        perform rota._refuse('max_jobs', format('must be 1 to 10000, got %s',
            coalesce(sweep_stale_leases.max_jobs::text, 'null')));
    end if;

    begin
        return rota._sweep(sweep_stale_leases.max_jobs, false);
    exception
        when others then
            raise warning 'sweep falls back to one job at a time: %', sqlerrm;
            return rota._sweep(sweep_stale_leases.max_jobs, true);
    end;
end;
$$;

comment on function rota.sweep_stale_leases(integer) is
    'Fail up to max_jobs running jobs whose lease has ended, with error_type lease_expired, '
    'and return how many; raises 22023.';

create or replace function rota._sweep(max_jobs integer, is_one_by_one boolean)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_since constant timestamptz := rota._swept_until(v_now, _sweep.is_one_by_one);
    v_walked constant bigint :=
        pg_stat_get_xact_tuples_returned('rota.jobs_lease_idx'::regclass::oid);
    v_job rota.jobs;
    v_swept integer := 0;
begin
    for v_job in
        select j.*
        from rota.jobs as j
        where j.status = 'running'
          and j.locked_until < v_now
          and j.locked_until >= v_since
        order by j.locked_until
        limit _sweep.max_jobs * case when _sweep.is_one_by_one then 10 else 1 end
        for update skip locked
    loop
        exit when v_swept = _sweep.max_jobs;
        if not _sweep.is_one_by_one then
            perform rota._sweep_one(v_job);
            v_swept := v_swept + 1;
            continue;
        end if;

        begin
            perform rota._sweep_one(v_job);
            v_swept := v_swept + 1;
        exception
            when others then
                raise warning 'job % cannot be swept: %', v_job.id, sqlerrm;
        end;
    end loop;

    if v_swept < _sweep.max_jobs and not _sweep.is_one_by_one then
        perform rota._keep_sweep(v_now, not isfinite(v_since), v_walked);
    end if;
    return v_swept;
end;
$$;

/*
 * Whether a lease has ended; true without a look when one from the start would take long, and
 * is due: then the sweep does it.
 */
create or replace function rota._has_stale_leases()
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_since timestamptz := timestamptz '-infinity';
begin
    if (rota._hint('sweep'))[3] > 5000 then
        v_since := rota._swept_until(v_now, false);
        if not isfinite(v_since) then
            return true;
        end if;
    end if;
    return exists (
        select
        from rota.jobs as j
        where j.status = 'running'
          and j.locked_until < v_now
          and j.locked_until >= v_since
    );
end;
$$;

/* Before that no lease is looked for; '-infinity' when it is time for a look from the start. */
create or replace function rota._swept_until(moment timestamptz, is_careful boolean)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_hint constant bigint[] := rota._hint('sweep');
    v_moment constant bigint := (extract(epoch from _swept_until.moment) * 1000000)::bigint;
begin
    if _swept_until.is_careful or (
        v_hint[1] > v_moment and v_hint[1] <= v_moment + 60000000
        and v_hint[2] <= v_moment and v_hint[3] > 5000) is not true then
        return timestamptz '-infinity';
    end if;
    return 'epoch'::timestamptz + v_hint[2] * interval '1 microsecond' - interval '10 ms';
end;
$$;

/* The hint: when a look from the start is due, until when was swept, what the last walked. */
create or replace function rota._keep_sweep(
    moment timestamptz,
    was_full boolean,
    walked bigint
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_hint bigint[] := rota._hint('sweep');
begin
    if _keep_sweep.was_full then
        v_hint[1] := (extract(epoch from _keep_sweep.moment + least(
            21 * (rota.now() - _keep_sweep.moment), interval '1 minute')) * 1000000)::bigint;
        v_hint[3] := pg_stat_get_xact_tuples_returned('rota.jobs_lease_idx'::regclass::oid)
            - _keep_sweep.walked;
    end if;
    v_hint[2] := (extract(epoch from _keep_sweep.moment) * 1000000)::bigint;
    perform rota._keep_hint('sweep', v_hint);
end;
$$;

create or replace function rota._sweep_one(job rota.jobs)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._fail_running(
        job,
        format('lease expired: %s neither finished the job nor sent a heartbeat before %s',
            job.locked_by, job.locked_until),
        'lease_expired', null, null, false);
end;
$$;
/*
 * 51_schedule.sql -- put a schedule in, change it, stop it.
 *
 * A definition says what there shall be, so schedule_job() is given all of it and may be called
 * by every deploy and by many at once: what is so already is not written again.
 *
 * All that changes a definition holds its row, and so does who fires it.  So a change comes
 * wholly before or wholly after a fire.  What was due before it is fired first, as it was: a
 * tick that is late loses nothing by it.
 *
 * Of `after 10 minutes` the end of the last job decides.  While that is live nothing is
 * planned; whoever leaves it so writes a note, since the job may be about to end.
 */

create or replace function rota.schedule_job(
    name text,
    schedule text,
    job_type text,
    payload jsonb default '{}',
    queue text default 'default',
    time_zone text default 'UTC',
    priority integer default 0,
    max_attempts integer default null,
    lease interval default null,
    backoff jsonb default null,
    catch_up text default 'one',
    catch_up_window interval default null,
    catch_up_max integer default 100,
    overlap text default 'allow',
    jitter interval default '0',
    starts_at timestamptz default null,
    ends_at timestamptz default null
)
    returns table (outcome text, next_run_at timestamptz)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_name('name', schedule_job.name);
    perform rota._check_new_job(
        '', schedule_job.job_type, schedule_job.payload, schedule_job.queue, null, null,
        schedule_job.priority, schedule_job.max_attempts, schedule_job.lease,
        schedule_job.backoff, null);
    if rota.next_run(schedule_job.schedule, schedule_job.time_zone) is null then
        perform rota._refuse_schedule(schedule_job.schedule, format(
            'names only times that the clocks of %s always skip', schedule_job.time_zone));
    end if;
    perform rota._check_policies(
        schedule_job.catch_up, schedule_job.catch_up_window, schedule_job.catch_up_max,
        schedule_job.overlap, schedule_job.jitter, schedule_job.starts_at,
        schedule_job.ends_at);

    return query
    select d.outcome, d.next_run_at
    from rota._put_definition(jsonb_populate_record(
        null::rota.job_definitions,
        jsonb_build_object(
            'name', schedule_job.name,
            'job_type', schedule_job.job_type,
            'queue', schedule_job.queue,
            'payload', schedule_job.payload,
            'schedule', schedule_job.schedule,
            'time_zone', schedule_job.time_zone,
            'priority', schedule_job.priority,
            'max_attempts', schedule_job.max_attempts,
            'lease', rota._exact(schedule_job.lease),
            'backoff', schedule_job.backoff,
            'catch_up', schedule_job.catch_up,
            'catch_up_window', rota._exact(schedule_job.catch_up_window),
            'catch_up_max', schedule_job.catch_up_max,
            'overlap', schedule_job.overlap,
            'jitter', rota._exact(schedule_job.jitter),
            'starts_at', schedule_job.starts_at,
            'ends_at', schedule_job.ends_at))) as d;
end;
$$;

comment on function rota.schedule_job(
    text, text, text, jsonb, text, text, integer, integer, interval, jsonb, text, interval,
    integer, text, interval, timestamptz, timestamptz) is
    'Have a job made at each time that a schedule names, or change what was scheduled under '
    'this name, and return created, changed or unchanged, and the time of the next; raises '
    'RT006 for a bad schedule, 22023.';

create or replace function rota._check_policies(
    catch_up text,
    catch_up_window interval,
    catch_up_max integer,
    overlap text,
    jitter interval,
    starts_at timestamptz,
    ends_at timestamptz
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if (_check_policies.catch_up in ('skip', 'one', 'all')) is not true then
        perform rota._refuse('catch_up', format(
            'must be skip, one or all, got %L', left(_check_policies.catch_up, 80)));
    elsif (_check_policies.catch_up_max between 1 and 1000) is not true then
        perform rota._refuse('catch_up_max', format('must be 1 to 1000, got %s',
            coalesce(_check_policies.catch_up_max::text, 'null')));
    elsif (_check_policies.overlap in ('allow', 'skip', 'queue')) is not true then
        perform rota._refuse('overlap', format(
            'must be allow, skip or queue, got %L', left(_check_policies.overlap, 80)));
    end if;
    if _check_policies.catch_up_window is not null then
        perform rota._check_interval(
            'catch_up_window', _check_policies.catch_up_window, '1 second', '100 years');
    end if;
    perform rota._check_interval('jitter', _check_policies.jitter, '0', '1 day');

    if _check_policies.starts_at is not null then
        perform rota._check_run_at('starts_at', _check_policies.starts_at);
    end if;
    if _check_policies.ends_at is not null then
        perform rota._check_run_at('ends_at', _check_policies.ends_at);
        if _check_policies.ends_at <= _check_policies.starts_at then
            perform rota._refuse('ends_at', 'must be later than starts_at');
        end if;
    end if;
end;
$$;

create or replace function rota._put_definition(new rota.job_definitions)
    returns table (outcome text, next_run_at timestamptz)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_old rota.job_definitions;
begin
    loop
        -- What is so already is neither written nor waited for.
        select d.* into v_old from rota.job_definitions as d where d.name = new.name;
        if not found then
            new := jsonb_populate_record(new, jsonb_build_object(
                'anchored_at', coalesce(new.starts_at, v_now)));
            outcome := 'created';
            next_run_at := rota._plan_next(new, v_now);
            exit when rota._insert_definition(new, next_run_at, v_now);
        elsif rota._is_same(v_old, new) then
            outcome := 'unchanged';
            next_run_at := v_old.next_run_at;
            exit;
        end if;

        select d.* into v_old from rota.job_definitions as d where d.name = new.name for update;
        if found and not rota._is_same(v_old, new) then
            outcome := 'changed';
            next_run_at := rota._change_definition(new, rota._fire_late(v_old), rota.now());
            exit;
        end if;
    end loop;
    return next;
end;
$$;

/* Whether two definitions say the same. */
create or replace function rota._is_same(old rota.job_definitions, new rota.job_definitions)
    returns boolean
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        old.job_type, old.queue, old.payload, old.schedule, old.time_zone, old.priority,
        old.max_attempts, old.lease, old.backoff, old.catch_up, old.catch_up_window,
        old.catch_up_max, old.overlap, old.jitter, old.starts_at, old.ends_at
    ) is not distinct from (
        new.job_type, new.queue, new.payload, new.schedule, new.time_zone, new.priority,
        new.max_attempts, new.lease, new.backoff, new.catch_up, new.catch_up_window,
        new.catch_up_max, new.overlap, new.jitter, new.starts_at, new.ends_at
    );
end;
$$;

/* False if somebody else has the name. */
create or replace function rota._insert_definition(
    new rota.job_definitions,
    next_run_at timestamptz,
    created_at timestamptz
)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    insert into rota.job_definitions (
        name, job_type, queue, payload, schedule, time_zone, priority, max_attempts, lease,
        backoff, catch_up, catch_up_window, catch_up_max, overlap, jitter, starts_at, ends_at,
        anchored_at, next_run_at, created_at, updated_at
    )
    values (
        new.name, new.job_type, new.queue, new.payload, new.schedule, new.time_zone,
        new.priority, new.max_attempts, new.lease, new.backoff, new.catch_up,
        new.catch_up_window, new.catch_up_max, new.overlap, new.jitter, new.starts_at,
        new.ends_at, new.anchored_at, _insert_definition.next_run_at,
        _insert_definition.created_at, _insert_definition.created_at
    )
    on conflict do nothing;
    return found;
end;
$$;

/* Make the definition *old*, whose row the caller holds, say what *new* says. */
create or replace function rota._change_definition(
    new rota.job_definitions,
    old rota.job_definitions,
    changed_at timestamptz
)
    returns timestamptz
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_has_new_times constant boolean :=
        (new.schedule, new.time_zone, new.starts_at, new.ends_at)
            is distinct from (old.schedule, old.time_zone, old.starts_at, old.ends_at);
    -- What an error has disabled is mended by a change; what a person has is not.
    v_is_enabled constant boolean := old.is_enabled or old.disabled_by is null;
    v_next_run_at timestamptz := old.next_run_at;
begin
    new := jsonb_populate_record(new, jsonb_build_object(
        'anchored_at', coalesce(
            new.starts_at,
            case
                when new.schedule = old.schedule and old.starts_at is null
                then old.anchored_at else changed_at
            end),
        'last_run_at', old.last_run_at,
        'last_job_id', old.last_job_id));
    if v_is_enabled and (v_has_new_times or not old.is_enabled) then
        v_next_run_at := rota._plan_next(new, changed_at);
    end if;

    update rota.job_definitions as d
    set job_type = new.job_type, queue = new.queue, payload = new.payload,
        schedule = new.schedule, time_zone = new.time_zone, priority = new.priority,
        max_attempts = new.max_attempts, lease = new.lease, backoff = new.backoff,
        catch_up = new.catch_up, catch_up_window = new.catch_up_window,
        catch_up_max = new.catch_up_max, overlap = new.overlap, jitter = new.jitter,
        starts_at = new.starts_at, ends_at = new.ends_at, anchored_at = new.anchored_at,
        next_run_at = v_next_run_at,
        is_enabled = v_is_enabled,
        disabled_at = case when not v_is_enabled then old.disabled_at end,
        disabled_by = case when not v_is_enabled then old.disabled_by end,
        last_error = case when not v_is_enabled then old.last_error end,
        updated_at = changed_at
    where d.name = old.name;
    if v_is_enabled and v_next_run_at is null then
        perform rota._note_schedule(new.name);
    end if;
    return v_next_run_at;
end;
$$;

/*
 * The first planned time later than *after* and than all that was dealt with; null after the
 * end.  Of `after 10 minutes` it may be *after* itself, and is null while the last job is live.
 */
create or replace function rota._plan_next(
    definition rota.job_definitions,
    after timestamptz
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_parsed constant rota.parsed_schedule := rota._parse_schedule(definition.schedule);
    v_ended_at timestamptz;
    v_next timestamptz;
begin
    if v_parsed.kind = 'after' and definition.last_job_id is not null then
        v_ended_at := rota._ended_at(definition.last_job_id);
        if v_ended_at is null then
            return null;
        end if;
    end if;

    if v_parsed.kind <> 'after' then
        v_next := rota._next_fire(
            v_parsed, definition.time_zone, greatest(
                _plan_next.after, definition.last_run_at,
                definition.starts_at - interval '1 microsecond'),
            definition.anchored_at);
    else
        v_next := greatest(
            _plan_next.after, definition.starts_at,
            definition.last_run_at + interval '1 microsecond',
            rota._next_fire(v_parsed, definition.time_zone, v_ended_at, null));
    end if;
    return case when v_next > definition.ends_at then null else v_next end;
end;
$$;

create or replace function rota._is_live(job_id bigint)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (select from rota.jobs as j where j.id = _is_live.job_id);
end;
$$;

/* When a job ended; null while it is live, now if its end is forgotten. */
create or replace function rota._ended_at(job_id bigint)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
begin
    -- Stable, so that both looks see the same: it may be retried in between.
    if rota._is_live(_ended_at.job_id) then
        return null;
    end if;
    return coalesce((
        select max(f.finished_at)
        from rota.finished_jobs as f
        where f.id = _ended_at.job_id
    ), rota.now());
end;
$$;

/*
 * A definition that is left without a next time has its last job looked at again: it may have
 * been about to end, and then it did not know that somebody waits for that.
 */
create or replace function rota._note_schedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    insert into rota.rechecks (due_at, kind, subject)
    values (rota.now(), 'schedule', _note_schedule.name);
end;
$$;

create or replace function rota.unschedule_job(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    delete from rota.job_definitions as d where d.name = unschedule_job.name;
    if not found then
        perform rota._raise_no_schedule(unschedule_job.name);
    end if;
end;
$$;

comment on function rota.unschedule_job(text) is
    'Forget a schedule; the jobs that it has made stay; raises RT005, 22023.';

create or replace function rota.enable_schedule(name text)
    returns timestamptz
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_definition rota.job_definitions;
    v_next_run_at timestamptz;
begin
    v_definition := rota._hold_definition(enable_schedule.name);
    if v_definition.is_enabled then
        return v_definition.next_run_at;
    end if;

    v_next_run_at := rota._plan_next(v_definition, rota.now());
    update rota.job_definitions as d
    set is_enabled = true,
        disabled_at = null,
        disabled_by = null,
        last_error = null,
        next_run_at = v_next_run_at,
        updated_at = rota.now()
    where d.name = enable_schedule.name;
    if v_next_run_at is null then
        perform rota._note_schedule(enable_schedule.name);
    end if;
    return v_next_run_at;
end;
$$;

comment on function rota.enable_schedule(text) is
    'Let a disabled schedule make jobs again and return the time of the next, which is later '
    'than now: what was missed is not made up; raises RT005, RT006 if its text cannot be read '
    'any more, 22023.';

create or replace function rota.disable_schedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._hold_definition(disable_schedule.name);
    update rota.job_definitions as d
    set is_enabled = false,
        disabled_at = coalesce(d.disabled_at, rota.now()),
        disabled_by = session_user,
        next_run_at = null,
        updated_at = rota.now()
    where d.name = disable_schedule.name
      and d.disabled_by is null;
end;
$$;

comment on function rota.disable_schedule(text) is
    'Let a schedule make no more jobs until enable_schedule(); raises RT005, 22023.';

create or replace function rota._hold_definition(name text)
    returns rota.job_definitions
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_definition rota.job_definitions;
begin
    select d.*
    into v_definition
    from rota.job_definitions as d
    where d.name = _hold_definition.name
    for update;
    if not found then
        perform rota._raise_no_schedule(_hold_definition.name);
    end if;
    return v_definition;
end;
$$;

create or replace function rota._raise_no_schedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _raise_no_schedule.name is null then
        perform rota._refuse('name', 'must not be null');
    end if;
    raise exception using
        errcode = 'RT005',
        message = format('schedule %L not found', left(_raise_no_schedule.name, 80)),
        hint = 'rota.job_definitions lists all that there are.';
end;
$$;

create or replace function rota.run_schedule_now(name text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_definition rota.job_definitions;
    v_parsed rota.parsed_schedule;
    v_fire timestamptz;
    v_job_id bigint;
begin
    v_definition := rota._hold_definition(run_schedule_now.name);
    v_parsed := rota._parse_schedule(v_definition.schedule);
    if rota._live_definitions(array[v_definition.name]) <> '{}' then
        raise exception using
            errcode = 'RT014',
            message = format('schedule %L: a run of it is under way, in job %s',
                v_definition.name, (
                    select max(j.id) from rota.jobs as j
                    where j.definition = v_definition.name)),
            hint = 'Wait for the end of that job, or cancel it first.';
    end if;

    v_fire := rota._free_time(v_definition, v_parsed);
    v_job_id := nextval('rota.jobs_id_seq');
    insert into rota.fires (definition, scheduled_for, outcome, job_id, fired_at)
    values (v_definition.name, v_fire, 'fired', v_job_id, rota.now());
    perform rota._make_jobs(
        array[v_definition.name], array[v_fire], array[v_job_id], true, rota.now());
    update rota.job_definitions as d
    set last_job_id = v_job_id,
        next_run_at = case when v_parsed.kind <> 'after' then d.next_run_at end
    where d.name = v_definition.name;
    return v_job_id;
end;
$$;

comment on function rota.run_schedule_now(text) is
    'Make a job of a schedule now, also of a disabled one, beside those at its times, and '
    'return its id; raises RT014 if one is live and no two may be, RT005, RT006 if its text '
    'cannot be read any more, 22023.';

/* Now, or the first moment after it that is not a planned time and has no job yet. */
create or replace function rota._free_time(
    definition rota.job_definitions,
    parsed rota.parsed_schedule
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_free timestamptz := rota.now();
begin
    while exists (
        select
        from rota.fires as f
        where f.definition = definition.name
          and f.scheduled_for = v_free
    ) or (parsed.kind <> 'after' and v_free is not distinct from rota._next_fire(
        parsed, definition.time_zone, v_free - interval '1 microsecond', definition.anchored_at)
    ) or v_free is not distinct from definition.next_run_at loop
        v_free := v_free + interval '1 microsecond';
    end loop;
    return v_free;
end;
$$;
/*
 * 52_retention.sql -- partitions ahead, and forgetting behind.
 *
 * Nothing is kept for ever unless somebody asks for it.  The horizon is the longest keep of
 * any queue; a day that lies wholly behind it is dropped as one partition.  Only queues that
 * keep less than the horizon, dead jobs, and days without a partition are deleted row by row,
 * a few thousand a call.
 *
 * Records of effects carry the end of their time themselves.
 *
 * Making and dropping a partition locks the parent for a moment.  It waits for that lock no
 * longer than a tenth of a second, so that finishing jobs never queue up behind it; what does
 * not succeed now will at a later tick.  And it is done only when tick() is alone in its
 * transaction: a forgotten transaction must not hold such a lock.  (Several statements sent as
 * one string are one transaction that cannot be told from one statement: send tick() alone.)
 *
 * Each step is a subtransaction of its own, and so is each queue and each partition.  A view
 * that somebody has made on one partition, or a row that cannot be deleted, stays with a
 * warning, and everything else goes its way.
 */

create or replace function rota._retain(is_alone boolean, is_busy boolean)
    returns table (
        jobs_deleted integer,
        partitions_created integer,
        partitions_dropped integer
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set lock_timeout = '100ms'
as $$
declare
    v_now constant timestamptz := rota.now();
    v_step text;
    v_others integer := 0;
begin
    jobs_deleted := 0;
    partitions_created := 0;
    partitions_dropped := 0;

    -- At most once in ten seconds, and by one caller at a time.
    if not rota._record_tick(_retain.is_alone, _retain.is_busy) then
        return next;
        return;
    end if;

    foreach v_step in array array[
        'jobs', 'errors', 'keys', 'effects', 'fires', 'limits', 'workers', 'pg_cron',
        'partitions'
    ] loop
        begin
            if v_step = 'jobs' then
                jobs_deleted := rota._delete_old_jobs(5000);
            elsif v_step = 'errors' then
                v_others := v_others + rota._delete_old_errors(5000);
            elsif v_step = 'keys' then
                v_others := v_others + rota._forget_keys(5000);
            elsif v_step = 'effects' then
                v_others := v_others + rota._forget_effects(5000);
            elsif v_step = 'fires' then
                v_others := v_others + rota._forget_fires(5000);
            elsif v_step = 'limits' then
                perform rota._forget_limits(5000);
            elsif v_step = 'workers' then
                delete from rota.workers as w where w.last_seen_at < v_now - interval '1 day';
            elsif v_step = 'pg_cron' then
                perform rota._forget_cron_runs(10000);
            elsif _retain.is_alone then
                partitions_created := rota._create_partitions();
                partitions_dropped := rota._drop_partitions();
            end if;
        exception
            when others then
                raise warning 'retention of % failed, to be tried again: %', v_step, sqlerrm;
        end;
    end loop;

    if greatest(jobs_deleted, v_others, partitions_created, partitions_dropped) > 0 then
        -- There may be more.
        update rota.upkeep as u
        set done_at = v_now,
            done_by = t.done_by
        from rota.upkeep as t
        where u.task = 'retention'
          and t.task = 'tick';
    end if;
    return next;
end;
$$;

/* How long the queue that keeps longest keeps what ended well. */
create or replace function rota._horizon()
    returns interval
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return greatest('7 days', (select max(q.keep_finished) from rota.queues as q));
end;
$$;

/* Delete up to max_rows rows that no partition drop will take soon enough. */
create or replace function rota._delete_old_jobs(max_rows integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_oldest constant timestamptz := v_now - rota._horizon();
    v_statuses text[];
    v_queue text;
    v_before timestamptz;
    v_ids bigint[];
    v_deleted integer := 0;
begin
    for v_statuses, v_queue, v_before in
        select r.statuses, r.queue, v_now - r.keep from rota._rows_to_delete() as r
    loop
        begin
            v_ids := array(
                select f.id
                from rota.finished_jobs as f
                where f.status = any(v_statuses)
                  and f.queue = v_queue
                  and f.finished_at < v_before
                  and not rota._is_waited_for(f.id, f.first_job_id)
                order by f.finished_at
                limit _delete_old_jobs.max_rows - v_deleted
                for update skip locked
            );
            delete from rota.finished_jobs as f
            where f.id = any(v_ids)
              and f.status = any(v_statuses)
              and f.finished_at < v_before;
            v_deleted := v_deleted + cardinality(v_ids);
        exception
            when others then
                raise warning 'old jobs of queue % stay for now: %', v_queue, sqlerrm;
        end;
        exit when v_deleted >= _delete_old_jobs.max_rows;
    end loop;

    -- The default partition is never dropped.
    v_ids := array(
        select f.id
        from rota.finished_jobs_done_default as f
        where f.finished_at < v_oldest
        limit _delete_old_jobs.max_rows - v_deleted
        for update skip locked
    );
    delete from rota.finished_jobs_done_default as f
    where f.id = any(v_ids)
      and f.finished_at < v_oldest;
    return v_deleted + cardinality(v_ids);
end;
$$;

/* Whether somebody waits for an ended job, or its run: for its retry, if it is dead. */
create or replace function rota._is_waited_for(job_id bigint, first_job_id bigint)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select
        from rota.dependencies as d
        where d.parent_id in (_is_waited_for.job_id, _is_waited_for.first_job_id)
    ) or exists (
        select from rota.stuck_keys as s where s.job_id = _is_waited_for.job_id
    );
end;
$$;

create or replace function rota._delete_old_errors(max_rows integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_deleted integer;
begin
    delete from rota.job_errors as e
    where (e.job_id, e.lease_token) in (
        select o.job_id, o.lease_token
        from rota.job_errors as o
        where o.failed_at < rota.now() - greatest(
            '90 days', (select max(q.keep_dead) from rota.queues as q))
        order by o.failed_at
        limit _delete_old_errors.max_rows
        for update skip locked
    );
    get diagnostics v_deleted = row_count;
    return v_deleted;
end;
$$;

create or replace function rota._forget_keys(max_rows integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_deleted integer;
begin
    delete from rota.idempotency_keys as k
    where k.idempotency_key in (
        select o.idempotency_key
        from rota.idempotency_keys as o
        where o.kept_until < rota.now()
        order by o.kept_until
        limit _forget_keys.max_rows
        for update skip locked
    );
    get diagnostics v_deleted = row_count;
    return v_deleted;
end;
$$;

/* Delete up to max_rows records of effects; one whose lease is held is still needed. */
create or replace function rota._forget_effects(max_rows integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_old tid[];
    v_deleted integer;
begin
    v_old := array(
        select e.ctid
        from rota.effects as e
        where e.kept_until < rota.now()
          and (e.completed_at is not null or not rota._is_leased(e.job_id, e.lease_token))
        order by e.kept_until
        limit _forget_effects.max_rows
        for update skip locked
    );
    -- Asked again when it is locked: a new lease may just have taken it over.
    delete from rota.effects as e
    where e.ctid = any(v_old)
      and (e.completed_at is not null or not rota._is_leased(e.job_id, e.lease_token));
    get diagnostics v_deleted = row_count;
    return v_deleted;
end;
$$;

/* Which queues have history, and how long each keeps it; a loose scan, one probe a queue. */
create or replace function rota._rows_to_delete()
    returns table (statuses text[], queue text, keep interval)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return query
    with recursive trees (statuses) as (
        values ('{dead}'::text[]), ('{succeeded,cancelled}')
    ),
    found (statuses, queue) as (
        select t.statuses, (
            select f.queue
            from rota.finished_jobs as f
            where f.status = any(t.statuses)
            order by f.queue
            limit 1
        )
        from trees as t
        union all
        select n.statuses, (
            select f.queue
            from rota.finished_jobs as f
            where f.status = any(n.statuses)
              and f.queue > n.queue
            order by f.queue
            limit 1
        )
        from found as n
        where n.queue is not null
    )
    select
        n.statuses, n.queue,
        case
            when n.statuses = '{dead}' then coalesce(q.keep_dead, '90 days')
            else coalesce(q.keep_finished, '7 days')
        end
    from found as n
    left join rota.queues as q on q.queue = n.queue
    where n.queue is not null
      and (n.statuses = '{dead}' or coalesce(q.keep_finished, '7 days') < rota._horizon());
end;
$$;

/*
 * One partition for each of the next days; returns how many were made.  Not for a day that has
 * begun or is just about to: a job that ends meanwhile may be on its way to the default one.
 */
create or replace function rota._create_partitions()
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_today constant date := ((rota.now() + '1 minute') at time zone 'UTC')::date;
    v_created integer := 0;
begin
    -- Attaching a partition reads the default one under a lock that endings wait for.
    if (
        select count(*) > 100000
        from (select from rota.finished_jobs_done_default as f limit 100001) as f
    ) then
        raise warning 'partitions are made again when finished_jobs_done_default is small';
        return 0;
    end if;

    for v_day in 1..7 loop
        v_created := v_created + rota._create_partition(v_today + v_day);
    end loop;
    return v_created;
exception
    when lock_not_available then
        return 0;
end;
$$;

/* The partition of a day; returns how many were made. */
create or replace function rota._create_partition(day date)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
-- It makes a table, which plpgsql_check does not see in a dynamic statement.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_name constant text := 'finished_jobs_done_' || to_char(_create_partition.day, 'YYYYMMDD');
    -- As texts that are the same in every session.
    v_from constant text := to_char(_create_partition.day, 'YYYY-MM-DD 00:00:00+00');
    v_to constant text := to_char(_create_partition.day + 1, 'YYYY-MM-DD 00:00:00+00');
begin
    -- Rows that came before their partition stay in the default one; so does their day.
    if to_regclass('rota.' || v_name) is not null or exists (
        select
        from rota.finished_jobs_done_default as f
        where f.finished_at >= v_from::timestamptz
          and f.finished_at < v_to::timestamptz
    ) then
        return 0;
    end if;
    -- The owner may give what he makes to everybody, and has not meant this.
    execute format(
        'create table rota.%1$I (like rota.finished_jobs_done including constraints);'
        'alter table rota.finished_jobs_done attach partition rota.%1$I '
        'for values from (%2$L) to (%3$L);'
        'comment on table rota.%1$I is %4$L;'
        'revoke all on table rota.%1$I from public;'
        'revoke all on type rota.%1$I from public',
        v_name, v_from, v_to, 'Succeeded and cancelled jobs of one day.');
    return 1;
end;
$$;

/* Drop the days that lie wholly behind the horizon; returns how many. */
create or replace function rota._drop_partitions()
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
-- It drops a table, which plpgsql_check does not see in a dynamic statement.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_last constant date := ((rota.now() - rota._horizon()) at time zone 'UTC')::date - 1;
    v_partition regclass;
    v_dropped integer := 0;
begin
    for v_partition in
        select i.inhrelid::regclass
        from pg_inherits as i
        join pg_class as c on c.oid = i.inhrelid
        where i.inhparent = 'rota.finished_jobs_done'::regclass
          and c.relname ~ '^finished_jobs_done_[0-9]{8}$'
          and c.relname <= 'finished_jobs_done_' || to_char(v_last, 'YYYYMMDD')
        order by c.relname
        limit 10
    loop
        begin
            execute format('drop table %s', v_partition);
            v_dropped := v_dropped + 1;
        exception
            when lock_not_available then
                return v_dropped;
            when others then
                raise warning 'partition % stays for now: %', v_partition, sqlerrm;
        end;
    end loop;

    return v_dropped;
end;
$$;
/*
 * 53_tick.sql -- all the upkeep there is, in one call.
 *
 * Call it from anywhere, as anybody, as often as you like: every worker does between polls,
 * pg_cron may, a person may from psql.  Each call does a bounded amount, and nothing but this
 * is needed to recover from anything.
 *
 * Two ticks at once do not disturb each other: each part skips rows that the other holds.  But
 * they would look at the same things, so one that finds another in hand returns at once.  The
 * lock for that must never become a leader.  It lasts as long as the transaction, so tick()
 * takes it only when it is alone there; and if no tick was recorded for ten seconds, whoever
 * has the lock hangs, and the others work without it.
 *
 * Recovery comes first.  Each part is a subtransaction of its own: what fails in one leaves a
 * warning, and undoes and stops nothing else.
 */

create or replace function rota.tick()
    returns table (
        jobs_fired integer,
        jobs_swept integer,
        rechecks_done integer,
        jobs_deleted integer,
        partitions_created integer,
        partitions_dropped integer,
        was_busy boolean,
        has_more boolean
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Or in a procedure that has committed since its call.  What comes in several messages, as
    -- many drivers send a statement, cannot be told from a transaction and is taken for one.
    v_is_alone constant boolean := transaction_timestamp() >= statement_timestamp();
begin
    was_busy := v_is_alone
        and not pg_try_advisory_xact_lock(hashtextextended('rota.tick', 0))
        and rota._was_ticked();
    if was_busy then
        jobs_fired := 0;
        jobs_swept := 0;
        rechecks_done := 0;
        jobs_deleted := 0;
        partitions_created := 0;
        partitions_dropped := 0;
        has_more := false;
        return next;
        return;
    end if;
    if not rota._has_upkeep() then
        return query select 0, 0, 0, 0, 0, 0, false, false;
        return;
    end if;

    begin
        jobs_swept := rota.sweep_stale_leases(1000);
    exception
        when others then
            raise warning 'the sweep failed and will be tried again: %', sqlerrm;
    end;
    begin
        jobs_fired := rota._fire_schedules(1000);
    exception
        when others then
            raise warning 'firing failed and will be tried again: %', sqlerrm;
    end;
    begin
        rechecks_done := rota._recheck(1000);
    exception
        when others then
            raise warning 'rechecks failed and will be tried again: %', sqlerrm;
    end;
    begin
        select r.jobs_deleted, r.partitions_created, r.partitions_dropped
        into jobs_deleted, partitions_created, partitions_dropped
        from rota._retain(v_is_alone,
            num_nulls(jobs_swept, jobs_fired, rechecks_done) > 0
            or greatest(jobs_swept, jobs_fired, rechecks_done) > 0) as r;
    exception
        when others then
            raise warning 'retention failed and will be tried again: %', sqlerrm;
    end;

    -- Retention keeps a pace of its own.
    has_more := greatest(jobs_swept, jobs_fired, rechecks_done) >= 1000;
    return next;
end;
$$;

comment on function rota.tick() is
    'Sweep leases that ended, fire schedules, look again at jobs that wait for others, make '
    'partitions ahead and forget what is old, a bounded amount per call, and return what was '
    'done; does nothing while another tick is in hand.';

/*
 * Whether there is anything to do: most ticks find nothing, and to ask first costs a third of
 * looking at each part.
 */
create or replace function rota._has_upkeep()
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
declare
    v_now constant timestamptz := rota.now();
begin
    return rota._has_stale_leases() or exists (
        select from rota.job_definitions as d where d.next_run_at <= v_now
    ) or exists (
        select from rota.rechecks as r where r.due_at <= v_now
    ) or exists (
        select
        from rota.upkeep as u
        join rota.upkeep as r on r.task = 'retention'
        where u.task = 'tick'
          and u.done_at not between v_now - case
              when r.done_at between v_now - interval '1 minute' and v_now
              then interval '10 seconds'
              else '5 minutes'
          end and v_now
    );
end;
$$;

/* Whether a tick was recorded in the last ten seconds; where nothing happens none is. */
create or replace function rota._was_ticked()
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
begin
    return exists (
        select
        from rota.upkeep as u
        where u.task = 'tick'
          and u.done_at between v_now - interval '10 seconds' and v_now
    );
end;
$$;

/*
 * Record a tick, unless one was recorded lately; returns whether it did.  Lately is five
 * minutes where there was nothing to do for a minute, so that an idle database is not written
 * to.  Who is not alone in his transaction may hold the row for long, and so leaves it to
 * others somewhat longer.
 */
create or replace function rota._record_tick(is_alone boolean, is_busy boolean)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_is_idle constant boolean := not _record_tick.is_busy and not exists (
        select
        from rota.upkeep as u
        where u.task = 'retention'
          and u.done_at between v_now - interval '1 minute' and v_now
    );
    v_since constant timestamptz := v_now - case
        when v_is_idle and _record_tick.is_alone then interval '5 minutes'
        when v_is_idle then '5.5 minutes'
        when _record_tick.is_alone then '10 seconds'
        else '30 seconds'
    end;
begin
    perform
    from rota.upkeep as u
    where u.task = 'tick'
      and u.done_at not between v_since and v_now
    for update skip locked;
    if not found then
        return false;
    end if;

    update rota.upkeep as u
    set
        done_at = v_now,
        done_by = format('%s as %s',
            -- A background worker has no name of an application, but a type.
            coalesce(nullif(current_setting('application_name'), ''), (
                select a.backend_type
                from pg_stat_activity as a
                where a.pid = pg_backend_pid()
            )),
            session_user)
    where u.task = 'tick' or u.task = 'retention' and _record_tick.is_busy;
    return true;
end;
$$;

/*
 * A function or procedure with a setting of its own cannot commit, so this one runs as whoever
 * calls it and on his search_path, which must decide nothing: each transaction begins by
 * setting it.  Each sleeps first and then ticks, so that no lock is held asleep.
 */
create or replace procedure rota.tick_loop(
    duration interval default '55 seconds',
    every interval default '1 second'
)
    language plpgsql
as $$
declare
    v_seconds numeric;
    v_every numeric;
    -- Written out, because the path is set by the first statement only.
    v_began_at pg_catalog.timestamptz;
    v_due numeric := 0.0;
    v_passed numeric := 0.0;
    v_has_more boolean;
begin
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    v_seconds := extract(epoch from tick_loop.duration);
    v_every := extract(epoch from tick_loop.every);
    if v_seconds is null or v_seconds not between 0.001 and 86400 then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('duration must be 1 millisecond to 1 day, got %s',
                coalesce(tick_loop.duration::text, 'null'));
    elsif v_every is null or v_every not between 0.001 and 60 then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('every must be 1 millisecond to 1 minute, got %s',
                coalesce(tick_loop.every::text, 'null'));
    end if;

    v_began_at := clock_timestamp();
    loop
        commit;
        set transaction isolation level read committed;
        perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
        -- Not longer than that, should the clock step back.
        perform pg_sleep(least(v_due - v_passed, v_every));
        v_has_more := (select t.has_more from rota.tick() as t);
        v_passed := extract(epoch from clock_timestamp() - v_began_at);
        if not v_has_more then
            v_due := (floor(v_passed / v_every) + 1) * v_every;
        end if;
        exit when greatest(v_due, v_passed) >= v_seconds;
    end loop;
end;
$$;

comment on procedure rota.tick_loop(interval, interval) is
    'Tick, commit and sleep until the next multiple of every, or not at all while there is '
    'more to do, for the duration; raises 22023, 2D000.';
/*
 * 55_rechecks.sql -- look again at what may go on now.
 *
 * What a job waits for is decided in one place and at one time: here, with the row of the job
 * locked, by what is committed.  A note is written by whoever changes something, and taken away
 * by somebody who has looked once that is committed; so the last change is always looked at
 * after it, and no job is forgotten.  Looking once too often does nothing.
 *
 * A transaction that claims after it has changed something looks at its own notes too, and
 * leaves them: of two open ones neither sees what the other does, and if each took away its
 * notes nobody would look when both are done.
 *
 * Nobody waits here.  What somebody else has locked is looked at a moment later; and one note
 * that cannot be dealt with does not stop the others.
 */

/* Note what new jobs may have to be looked at for. */
create or replace function rota._note_new(job_ids bigint[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
begin
    insert into rota.rechecks (due_at, kind, subject)
    select distinct rota.now(), n.kind, n.subject
    from rota.jobs as j
    cross join lateral (
        values
            ('order', j.ordering_key),
            ('job', case when j.ordering_key is null or rota._has_parents(j.id)
                then j.id::text end)
    ) as n (kind, subject)
    where j.id = any(_note_new.job_ids)
      and j.status = 'blocked'
      and n.subject is not null;
    if found then
        perform rota._ring('');
    end if;
end;
$$;

create or replace function rota._recheck(max_notes integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set lock_timeout = '100ms'
as $$
declare
    v_taken integer;
    v_notes integer := 0;
begin
    -- An older snapshot does not show what is committed by now.
    if current_setting('transaction_isolation') <> 'read committed' then
        return 0;
    end if;

    -- What is done may lead to new notes.
    loop
        begin
            v_taken := rota._take_notes(_recheck.max_notes - v_notes, false);
        exception
            when others then
                v_taken := rota._take_notes(_recheck.max_notes - v_notes, true);
        end;
        v_notes := v_notes + v_taken;
        exit when v_taken = 0 or v_notes >= _recheck.max_notes;
    end loop;
    return v_notes;
end;
$$;

create or replace function rota._take_notes(max_notes integer, is_one_by_one boolean)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_me constant xid8 := pg_current_xact_id_if_assigned();
    v_note record;
    v_notes integer := 0;
begin
    for v_note in
        with due as (
            select r.ctid as place, r.kind, r.subject
            from rota.rechecks as r
            where r.due_at <= rota.now()
              and (not r.is_seen or r.made_by is distinct from v_me)
            order by r.due_at, r.id
            limit _take_notes.max_notes
            for update skip locked
        )
        select d.kind, d.subject, array_agg(d.place) as places
        from due as d
        group by d.kind, d.subject
        order by d.kind, d.subject
    loop
        if not _take_notes.is_one_by_one then
            perform rota._take_note(v_note.kind, v_note.subject, v_note.places);
        else
            begin
                perform rota._take_note(v_note.kind, v_note.subject, v_note.places);
            exception
                when lock_not_available or unique_violation then
                    perform rota._put_off(v_note.places, interval '50 milliseconds');
                when others then
                    raise warning 'recheck of % % failed and will be tried again: %',
                        v_note.kind, v_note.subject, sqlerrm;
                    perform rota._put_off(v_note.places, interval '10 seconds');
            end;
        end if;
        v_notes := v_notes + cardinality(v_note.places);
    end loop;

    return v_notes;
end;
$$;

create or replace function rota._take_note(kind text, subject text, places tid[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_is_settled boolean := true;
begin
    case _take_note.kind
        when 'order' then
            v_is_settled := rota._recheck_order(_take_note.subject);
        when 'job' then
            v_is_settled := rota._recheck_job(_take_note.subject::bigint);
        when 'parent' then
            perform rota._recheck_parent(
                split_part(_take_note.subject, ' ', 1)::bigint,
                split_part(_take_note.subject, ' ', 2));
        when 'bucket' then
            v_is_settled := rota._recheck_bucket(_take_note.subject);
        when 'limit' then
            -- First, since it may lead to the same note for later.
            perform rota._put_away(_take_note.places);
            if not rota._recheck_limit(_take_note.subject) then
                perform rota._note_later(
                    'limit', _take_note.subject, rota.now() + interval '50 milliseconds');
            end if;
        when 'schedule' then
            v_is_settled := rota._recheck_schedule(_take_note.subject);
    end case;

    if _take_note.kind = 'limit' then
        return;
    elsif v_is_settled then
        perform rota._put_away(_take_note.places);
    else
        perform rota._put_off(_take_note.places, interval '50 milliseconds');
    end if;
end;
$$;

/* Delete notes that have been looked at; those of this transaction stay for the next look. */
create or replace function rota._put_away(places tid[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_me constant xid8 := pg_current_xact_id();
    v_deleted integer;
begin
    delete from rota.rechecks as r
    where r.ctid = any(_put_away.places)
      and r.made_by <> v_me;
    get diagnostics v_deleted = row_count;
    if v_deleted < cardinality(_put_away.places) then
        update rota.rechecks as r
        set is_seen = true
        where r.ctid = any(_put_away.places)
          and r.made_by = v_me;
    end if;
end;
$$;

create or replace function rota._put_off(places tid[], delay interval)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    update rota.rechecks as r
    set due_at = rota.now() + _put_off.delay
    where r.ctid = any(_put_off.places);
end;
$$;
/*
 * 56_order.sql -- one at a time, in order.
 *
 * The live jobs of an ordering key are blocked but for one, the head, and a unique index holds
 * that.  The head is the job with the lowest id, where a stage of a run stands in the place of
 * the first; it stays the head while it waits for its time or for a retry, and runs like any
 * other job.  So however many jobs stand behind it, claims do not see them.  When it ends, the
 * next becomes the head.
 *
 * A dead head holds its key: retry_job() puts it back at the head, resume_key() lets the others
 * go on without it.  With skip_dead they do so at once.
 */

/* Make the first job of a key its head, if it has none; false if that is locked just now. */
create or replace function rota._recheck_order(ordering_key text)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_job_id bigint;
    v_status text;
begin
    select j.id, j.status
    into v_job_id, v_status
    from rota.jobs as j
    where j.ordering_key = _recheck_order.ordering_key
    order by coalesce(j.first_job_id, j.id)
    limit 1;
    if not found or v_status <> 'blocked' or rota._has_parents(v_job_id) then
        return true;
    end if;

    select j.status
    into v_status
    from rota.jobs as j
    where j.id = v_job_id
    for update skip locked;
    if not found then
        return false;
    -- Asked again: until it was locked, somebody may have made it wait for a job.
    elsif v_status = 'blocked' and not rota._has_parents(v_job_id)
      and rota._is_free_key(_recheck_order.ordering_key, v_job_id) then
        perform rota._unblock(v_job_id);
    end if;
    return true;
end;
$$;

/*
 * Whether a key has no head, alive or dead, and nothing in front of a job.  Asked when that is
 * locked: one that was the head until then has left its row in stuck_keys by now, or is back.
 */
create or replace function rota._is_free_key(ordering_key text, job_id bigint)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return not exists (
        select from rota.stuck_keys as s where s.ordering_key = _is_free_key.ordering_key
    ) and not exists (
        select
        from rota.jobs as j
        where j.ordering_key = _is_free_key.ordering_key
          and j.status <> 'blocked'
    ) and not exists (
        select
        from rota.jobs as j
        join rota.jobs as e on e.ordering_key = j.ordering_key
          and coalesce(e.first_job_id, e.id) < coalesce(j.first_job_id, j.id)
        where j.id = _is_free_key.job_id
    );
end;
$$;

create or replace function rota._unblock(job_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    update rota.jobs as j
    set status = 'queued',
        updated_at = rota.now()
    where j.id = _unblock.job_id
      and j.status = 'blocked';
    perform rota._ring_for(array[_unblock.job_id]);
end;
$$;

create or replace function rota.resume_key(ordering_key text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_job_id bigint;
begin
    perform rota._check_text('ordering_key', resume_key.ordering_key, 255);

    delete from rota.stuck_keys as s
    where s.ordering_key = resume_key.ordering_key
    returning s.job_id into v_job_id;
    if not found then
        raise exception using
            errcode = 'RT012',
            message = format('ordering key %L is not stuck', resume_key.ordering_key),
            hint = 'rota.stuck_keys lists the keys whose next job is dead.';
    end if;

    insert into rota.rechecks (due_at, kind, subject)
    values (rota.now(), 'order', resume_key.ordering_key);
    perform rota._ring('');
    return v_job_id;
end;
$$;

comment on function rota.resume_key(text) is
    'Let the jobs behind the dead one of an ordering key go on without it and return its id; '
    'raises RT012 if the key is not stuck, 22023.';

create or replace function rota._unstick(job_id bigint, ordering_key text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    delete from rota.stuck_keys as s
    where s.ordering_key = _unstick.ordering_key
      and s.job_id = _unstick.job_id;
    insert into rota.rechecks (due_at, kind, subject)
    values (rota.now(), 'order', _unstick.ordering_key);
    perform rota._ring('');
end;
$$;
/*
 * 57_dependencies.sql -- jobs that wait for jobs.
 *
 * A job is free when it has no row in dependencies left.  The row of a parent that ended well
 * is deleted in the transaction that ends it; that of one that is dead or was cancelled stays
 * and says so, and the job's if_parent_dead decides.
 *
 * To become a dependant one locks the parent's row against its end.  So either the parent ends
 * later and finds the new row, or it has ended and its outcome is known.
 *
 * Fan-in is the same seen from the other end: a new job names in `before` the blocked job that
 * has to wait for it as well.  If the new one waits for something itself, that could close a
 * circle, in which nothing ever starts.  Such calls come one after the other, because neither
 * of two open transactions sees the half circle of the other.
 *
 * Who waits for a job of a pipeline waits for the run, under the id of its first job: until a
 * stage ends and no other follows.
 */

/* What a job that was just enqueued, or found by its key, waits for, and what waits for it. */
create or replace function rota._link_job(
    job_id bigint,
    is_new boolean,
    after bigint[],
    before bigint
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _link_job.before = _link_job.job_id then
        perform rota._refuse('before', format(
            'must not be the job itself, got %s', _link_job.before));
    elsif _link_job.before is not null then
        perform rota._hold_blocked(array[_link_job.before]);
        perform rota._depend(array[_link_job.before], array[_link_job.job_id]);
    end if;
    if _link_job.is_new then
        perform rota._depend(
            array(select _link_job.job_id from unnest(_link_job.after)), _link_job.after);
        perform rota._note_new(array[_link_job.job_id]);
    end if;
    if _link_job.before is not null then
        perform rota._check_no_circle(
            array[_link_job.before], array[_link_job.job_id], array['before']);
    end if;
end;
$$;

/* The same for a batch. */
create or replace function rota._link_jobs(jobs jsonb, job_ids bigint[], news boolean[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_before bigint[];
    v_before_child bigint[];
    v_before_names text[];
    v_after bigint[];
    v_after_child bigint[];
begin
    select
        array_agg(n.before), array_agg(_link_jobs.job_ids[n.ordinal]),
        array_agg(format('jobs[%s].before', n.ordinal))
    into v_before, v_before_child, v_before_names
    from rota._new_jobs(_link_jobs.jobs) as n
    where n.before is not null;
    select array_agg(p.id), array_agg(_link_jobs.job_ids[n.ordinal])
    into v_after, v_after_child
    from rota._new_jobs(_link_jobs.jobs) as n
    cross join unnest(n.after) as p (id)
    where _link_jobs.news[n.ordinal];

    if v_before is not null then
        perform rota._refuse(b.name, format('must not be the job itself, got %s', b.before))
        from unnest(v_before, v_before_child, v_before_names) as b (before, job_id, name)
        where b.before = b.job_id;
        perform rota._hold_blocked(v_before);
        perform rota._depend(v_before, v_before_child);
    end if;
    perform rota._depend(v_after_child, v_after);
    if v_before is not null then
        perform rota._check_no_circle(v_before, v_before_child, v_before_names);
    end if;
    perform rota._note_new(array(
        select i.id
        from unnest(_link_jobs.job_ids, _link_jobs.news) as i (id, is_new)
        where i.is_new
    ));
end;
$$;

/* Lock the jobs that are to wait for more, so that they cannot start meanwhile. */
create or replace function rota._hold_blocked(job_ids bigint[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_held bigint[];
    v_job_id bigint;
    v_status text;
begin
    v_held := array(
        select j.id
        from rota.jobs as j
        where j.id = any(_hold_blocked.job_ids)
          and j.status = 'blocked'
        order by j.id
        for share
    );
    perform rota._check_queues_of_jobs(v_held);
    select i.id
    into v_job_id
    from unnest(_hold_blocked.job_ids) as i (id)
    left join unnest(v_held) as h (id) on h.id = i.id
    where h.id is null
    limit 1;
    if not found then
        return;
    end if;

    select j.status into v_status from rota.jobs as j where j.id = v_job_id;
    if not found then
        perform rota._raise_not_live(v_job_id);
    end if;
    raise exception using
        errcode = 'RT013',
        message = format('job %s is %s and waits for no more jobs', v_job_id, v_status),
        hint = 'Name in `before` a job that is blocked; enqueue that with `after`, for example '
            'after the job that enqueues the others.';
end;
$$;

/* Wait for all others that may close a circle, before anything else is locked. */
create or replace function rota._lock_links()
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_xact_lock(hashtextextended('rota.links', 0));
end;
$$;

/* The same for a batch, if it has such jobs. */
create or replace function rota._lock_links_of(jobs jsonb)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if jsonb_path_exists(_lock_links_of.jobs, '$[*] ? (exists(@.before)
        && (exists(@.after) || exists(@.idempotency_key) || exists(@.ordering_key)))') then
        perform rota._lock_links();
    elsif jsonb_path_exists(_lock_links_of.jobs,
        '$[*] ? (exists(@.after) && exists(@.ordering_key))') then
        perform rota._share_links();
    end if;
end;
$$;

/* Let those wait for us: we go into a line, and come after others. */
create or replace function rota._share_links()
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_xact_lock_shared(hashtextextended('rota.links', 0));
end;
$$;

/*
 * Refuse that one of *before* waits for a job that waits, perhaps over others, for it: for its
 * parents, and for who is in front of it in the line of its ordering key.
 */
create or replace function rota._check_no_circle(
    before bigint[],
    job_ids bigint[],
    arguments text[]
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_before bigint;
begin
    -- A run goes by the id of its first job, and what it waits for by that of its live one.
    with recursive ancestors (before, its_run, run) as (
        select
            b.before,
            coalesce(w.first_job_id, b.before),
            coalesce(n.first_job_id, b.job_id)
        from unnest(_check_no_circle.before, _check_no_circle.job_ids) as b (before, job_id)
        left join rota.jobs as w on w.id = b.before
        left join rota.jobs as n on n.id = b.job_id
        union
        select a.before, a.its_run, p.run
        from ancestors as a
        -- Of one that has ended rows may be left, but it waits for nothing.
        join rota.jobs as j on j.id = coalesce(
            (select r.id from rota.jobs as r where r.first_job_id = a.run), a.run)
        cross join lateral (
            select d.parent_id as run
            from rota.dependencies as d
            where d.job_id = j.id
            union all (
                select coalesce(e.first_job_id, e.id)
                from rota.jobs as e
                where e.ordering_key = j.ordering_key
                  and coalesce(e.first_job_id, e.id) < a.run
                order by coalesce(e.first_job_id, e.id) desc
                limit 1
            )
        ) as p
        where a.run <> a.its_run
    )
    select a.before into v_before from ancestors as a where a.run = a.its_run limit 1;
    if not found then
        return;
    elsif cardinality(_check_no_circle.before) = 1 then
        perform rota._refuse(_check_no_circle.arguments[1], format(
            'must not be a job that this one waits for, got %s', v_before));
    end if;
    -- Of several, which is it?
    for v_place in 1..cardinality(_check_no_circle.before) loop
        perform rota._check_no_circle(
            _check_no_circle.before[v_place:v_place],
            _check_no_circle.job_ids[v_place:v_place],
            _check_no_circle.arguments[v_place:v_place]);
    end loop;
end;
$$;

/* Let each of job_ids wait for the one of parent_ids at the same place. */
create or replace function rota._depend(job_ids bigint[], parent_ids bigint[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_live bigint[];
    v_runs bigint[];
begin
    if _depend.parent_ids is null or cardinality(_depend.parent_ids) = 0 then
        return;
    end if;
    with held as (
        select j.id, j.first_job_id
        from rota.jobs as j
        where j.id = any(_depend.parent_ids)
        order by j.id
        for key share
    )
    select array_agg(h.id), array_agg(coalesce(h.first_job_id, h.id))
    into v_live, v_runs
    from held as h;
    -- Of those that are not live the outcome is known, and has no other.
    insert into rota.dependencies (parent_id, job_id, is_failed)
    select distinct coalesce(l.run_id, e.parent_id), p.job_id, coalesce(e.is_failed, false)
    from unnest(_depend.parent_ids, _depend.job_ids) as p (id, job_id)
    left join unnest(v_live, v_runs) as l (id, run_id) on l.id = p.id
    left join lateral rota._ended_parent(case when l.id is null then p.id end) as e on true
    where coalesce(l.run_id, e.parent_id) is not null
    order by 1, 2
    on conflict do nothing;
end;
$$;

/*
 * What there is to wait for of a job that has ended: nothing if it did its work, itself if it
 * is dead or was cancelled, and its run if that goes on; raises RT001 if there is no such job.
 * Nothing for null.
 */
create or replace function rota._ended_parent(job_id bigint)
    returns table (parent_id bigint, is_failed boolean)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_status text;
    v_first_job_id bigint;
begin
    if _ended_parent.job_id is null then
        return;
    end if;

    select f.status, f.first_job_id
    into v_status, v_first_job_id
    from rota.finished_jobs as f
    where f.id = _ended_parent.job_id;
    if not found then
        -- It may have been retried since we looked for it in jobs.
        select 'live', j.first_job_id
        into v_status, v_first_job_id
        from rota.jobs as j
        where j.id = _ended_parent.job_id
        for key share;
    end if;
    if v_first_job_id is not null then
        v_status := rota._hold_run(v_first_job_id);
    end if;
    if v_status is null then
        perform rota._raise_not_found(_ended_parent.job_id);
    elsif v_status <> 'succeeded' then
        parent_id := coalesce(v_first_job_id, _ended_parent.job_id);
        is_failed := v_status <> 'live';
        return next;
    end if;
end;
$$;

/* These jobs have ended: tell those that wait for them. */
create or replace function rota._settle_parents(parent_ids bigint[], status text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        -- This snapshot may be older than a row that waits for us.
        insert into rota.rechecks (due_at, kind, subject)
        select rota.now(), 'parent', format('%s %s', p.id, _settle_parents.status)
        from unnest(_settle_parents.parent_ids) as p (id);
        perform rota._ring('');
        return;
    end if;
    with freed as (
        delete from rota.dependencies as d
        where d.parent_id = any(_settle_parents.parent_ids)
          and _settle_parents.status = 'succeeded'
        returning d.job_id
    ),
    failed as (
        update rota.dependencies as d
        set is_failed = true
        where d.parent_id = any(_settle_parents.parent_ids)
          and _settle_parents.status <> 'succeeded'
        returning d.job_id
    )
    insert into rota.rechecks (due_at, kind, subject)
    select distinct rota.now(), 'job', c.job_id::text
    from (select f.job_id from freed as f union all select f.job_id from failed as f) as c;
    perform rota._ring('');
end;
$$;

/* This job, or run, had ended so; it may be live again, or forgotten. */
create or replace function rota._recheck_parent(job_id bigint, status text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_status text;
begin
    perform rota._settle_parents(array[f.id], f.status)
    from rota.finished_jobs as f
    where f.id = _recheck_parent.job_id
      and f.first_job_id is null;

    if not found and not exists (
        select from rota.jobs as j where j.id = _recheck_parent.job_id and j.pipeline is null
    ) then
        v_status := coalesce(
            rota._run_status(_recheck_parent.job_id), _recheck_parent.status);
        -- What is live tells at its end.
        if v_status <> 'live' then
            perform rota._settle_parents(array[_recheck_parent.job_id], v_status);
        end if;
    end if;
end;
$$;

/* Free a job that waits for nothing more; false if it is locked just now. */
create or replace function rota._recheck_job(job_id bigint)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_job rota.jobs;
begin
    select j.*
    into v_job
    from rota.jobs as j
    where j.id = _recheck_job.job_id
    for update skip locked;
    if not found and exists (select from rota.jobs as j where j.id = _recheck_job.job_id) then
        return false;
    elsif not found then
        perform rota._forget_parents(_recheck_job.job_id);
        return true;
    elsif v_job.status <> 'blocked' then
        return true;
    end if;

    if coalesce(v_job.if_parent_dead, 'cancel') <> 'wait' then
        if rota._forget_failed(v_job.id)
          and v_job.if_parent_dead is distinct from 'run' then
            perform rota._cancel(v_job.id, v_job.lease_token, 'blocked',
                'a job that it waited for is dead or was cancelled');
            return true;
        end if;
    end if;
    if rota._has_parents(v_job.id) then
        return true;
    elsif v_job.ordering_key is not null then
        return rota._recheck_order(v_job.ordering_key);
    end if;
    perform rota._unblock(v_job.id);
    return true;
end;
$$;

/*
 * From the end of the index: parents end in about the order of their ids, and the entries at
 * the beginning are those of the dead.
 */
create or replace function rota._has_parents(job_id bigint)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select d.parent_id
        from rota.dependencies as d
        where d.job_id = _has_parents.job_id
        order by d.parent_id desc
        limit 1
    ) is not null;
end;
$$;

/* Take away the rows of a job's parents that are still dead; whether there were any. */
create or replace function rota._forget_failed(job_id bigint)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    delete from rota.dependencies as d
    where d.ctid = any(array(
        select f.ctid
        from rota.dependencies as f
        where f.job_id = _forget_failed.job_id
          and f.is_failed
          -- Who brought a parent back may not have seen this row yet.
          and (select j.id from rota.jobs as j where j.id = f.parent_id) is null
          and (select j.id from rota.jobs as j where j.first_job_id = f.parent_id) is null
        for update skip locked
    ));
    return found;
end;
$$;

/* Take away the rows of a job that has ended, but for those that its parents just end. */
create or replace function rota._forget_parents(job_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    delete from rota.dependencies as d
    where d.ctid = any(array(
        select f.ctid
        from rota.dependencies as f
        where f.job_id = _forget_parents.job_id
        for update skip locked
    ));
end;
$$;
/*
 * 58_limits.sql -- how much may run, and who is told when there is room.
 *
 * A running job holds a slot of each limit that it counts for.  A trigger gives the slots back
 * in the transaction in which the job stops running, by whichever way: finish, fail, release,
 * sweep, force.  It leaves a note for the limit, and one for the bucket of each job that begins
 * to wait in one.  So no way out of running, and none into a line, can forget it; plain jobs
 * pay for a look at two columns.
 *
 * A note of a limit wakes as many of its buckets as it has room, in each queue, since nobody
 * may be working on one of them.  A bucket that was woken and cannot start anything for another
 * reason passes the note on.  What was woken in vain is parked again by the claim that sees it.
 *
 * Who is held up by a rate is parked as well, with a note for the time of the next start.  The
 * rate is one time per limit: when the starts so far are paid for, at one start in per /
 * max_starts.  A start is free if that time is less than burst starts ahead.
 *
 * A limit that is set while jobs run does not know of the claims under way.  So it is looked at
 * again for some seconds, until every transaction that was there then has ended.
 */

create or replace function rota.set_limit(
    queue text default null,
    job_type text default null,
    limit_key text default null,
    max_running integer default null,
    max_starts integer default null,
    per interval default null,
    burst integer default null,
    weight integer default null,
    is_reset boolean default false
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_limit_name constant text := coalesce(
        'queue ' || set_limit.queue, 'type ' || set_limit.job_type,
        'key ' || set_limit.limit_key);
    v_limit rota.limits;
begin
    perform rota._check_limit(
        set_limit.queue, set_limit.job_type, set_limit.limit_key, set_limit.max_running,
        set_limit.max_starts, set_limit.per, set_limit.burst, set_limit.weight,
        set_limit.is_reset);

    insert into rota.limits as l (
        limit_name, queue, job_type, limit_key, max_running, max_starts, per, burst, weight
    )
    values (
        v_limit_name, set_limit.queue, set_limit.job_type, set_limit.limit_key,
        set_limit.max_running, set_limit.max_starts, rota._exact(set_limit.per),
        set_limit.burst, set_limit.weight
    )
    on conflict on constraint limits_pkey do update
    set max_running = coalesce(
            excluded.max_running, case when not is_reset then l.max_running end),
        max_starts = coalesce(
            excluded.max_starts, case when not is_reset then l.max_starts end),
        per = coalesce(excluded.per, case when not is_reset then l.per end),
        burst = coalesce(excluded.burst, case when not is_reset then l.burst end),
        weight = coalesce(excluded.weight, case when not is_reset then l.weight end),
        updated_at = rota.now(),
        is_settled = false,
        settled_xid = null
    returning l.*
    into v_limit;
    perform rota._check_burst(v_limit);

    delete from rota.limits as l
    where l.limit_name = v_limit_name
      and num_nonnulls(l.max_running, l.max_starts, l.weight) = 0;
    if found then
        perform rota._unsettle_class(set_limit.limit_key);
    elsif set_limit.job_type is not null then
        perform rota._fill_buckets(set_limit.job_type);
    end if;
    perform rota._note('limit', v_limit_name, rota.now());
    if set_limit.limit_key like '%:*' then
        perform rota._recheck_class(v_limit_name);
    end if;
end;
$$;

comment on function rota.set_limit(
    text, text, text, integer, integer, interval, integer, integer, boolean) is
    'Limit how many jobs of a queue, job_type or limit_key run at once or start in a time: '
    'null leaves a setting as it is, is_reset takes the others away, and the limit with the '
    'last of them; raises 22023.';

create or replace function rota._check_limit(
    queue text,
    job_type text,
    limit_key text,
    max_running integer,
    max_starts integer,
    per interval,
    burst integer,
    weight integer,
    is_reset boolean
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if num_nonnulls(_check_limit.queue, _check_limit.job_type, _check_limit.limit_key) <> 1 then
        perform rota._refuse('queue', 'or job_type or limit_key must be given, and only one');
    elsif _check_limit.queue is not null then
        perform rota._check_name('queue', _check_limit.queue);
    elsif _check_limit.job_type is not null then
        perform rota._check_name('job_type', _check_limit.job_type);
    else
        perform rota._check_text('limit_key', _check_limit.limit_key, 255);
        if _check_limit.limit_key like '%:%:*' then
            perform rota._refuse('limit_key', format(
                'with :* is a class, all keys with the same text before their first colon, so '
                'it must have no other colon, got %L', left(_check_limit.limit_key, 80)));
        end if;
    end if;
    if _check_limit.max_running not between 0 and 1000000 then
        perform rota._refuse('max_running', format(
            'must be 0 to 1000000, got %s', _check_limit.max_running));
    elsif _check_limit.max_starts not between 1 and 1000000 then
        perform rota._refuse('max_starts', format(
            'must be 1 to 1000000, got %s', _check_limit.max_starts));
    elsif _check_limit.burst not between 1 and 10000 then
        perform rota._refuse('burst', format(
            'must be 1 to 10000, got %s', _check_limit.burst));
    elsif _check_limit.weight not between 1 and 1000 then
        perform rota._refuse('weight', format(
            'must be 1 to 1000, got %s', _check_limit.weight));
    elsif _check_limit.weight is not null and _check_limit.limit_key is null then
        perform rota._refuse('weight', 'goes with limit_key only');
    elsif _check_limit.is_reset is null then
        perform rota._refuse('is_reset', 'must not be null');
    end if;
    if _check_limit.per is not null then
        perform rota._check_interval('per', _check_limit.per, '1 millisecond', '366 days');
    end if;
end;
$$;

/* No time may be out of range.  What was set before counts too, so this looks at the row. */
create or replace function rota._check_burst(bound rota.limits)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_gap constant interval := rota._gap(bound.max_starts, bound.per);
    c_most constant bigint := 1 + floor(
        extract(epoch from interval '100 years') / extract(epoch from c_gap))::bigint;
begin
    if bound.burst > c_most then
        perform rota._refuse('burst', format(
            'must be 1 to %s at one start in %s, got %s', c_most, c_gap, bound.burst));
    end if;
end;
$$;

/* Put the jobs of a type that is limited now into its buckets; claims see to the rest. */
create or replace function rota._fill_buckets(job_type text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    update rota.jobs as j
    set bucket = rota._bucket(j.job_type, j.limit_key)
    where j.id = any(array(
        select w.id
        from rota.jobs as w
        where w.job_type = _fill_buckets.job_type
          and w.status <> 'running'
          and coalesce(w.bucket, '|') like '|%'
        for update skip locked
    ));
end;
$$;

/* The line that a job stands in; null is the common line. */
create or replace function rota._bucket(job_type text, limit_key text)
    returns text
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_type constant text := (
        select l.job_type from rota.limits as l where l.job_type = _bucket.job_type);
begin
    if v_type is not null or _bucket.limit_key is not null then
        return format('%s|%s', v_type, _bucket.limit_key);
    end if;
    return null;
end;
$$;

/* The limits of the jobs of a bucket; that of the key goes first. */
create or replace function rota._limits_of(bucket text)
    returns table (
        limit_name text,
        max_running integer,
        max_starts integer,
        per interval,
        burst integer,
        weight integer
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_type constant text := split_part(_limits_of.bucket, '|', 1);
    c_key constant text := substr(_limits_of.bucket, length(c_type) + 2);
begin
    if c_key <> '' then
        return query
        select 'key ' || c_key, l.max_running, l.max_starts, l.per, l.burst, l.weight
        from rota.limits as l
        where l.limit_name = any(rota._key_limits(c_key))
        order by l.limit_key = c_key desc
        limit 1;
    end if;
    if c_type <> '' then
        return query
        select l.limit_name, l.max_running, l.max_starts, l.per, l.burst, l.weight
        from rota.limits as l
        where l.limit_name = 'type ' || c_type;
    end if;
end;
$$;

/* The names of the limits that may be meant for a key: its own and that of its class. */
create or replace function rota._key_limits(limit_key text)
    returns text[]
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return array[
        'key ' || _key_limits.limit_key,
        'key ' || substring(_key_limits.limit_key, '^[^:]*:') || '*'
    ];
end;
$$;

/* Lock a limit in use; false if somebody else has it. */
create or replace function rota._hold_limit(limit_name text, may_wait boolean)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform
    from rota.limit_states as s
    where s.limit_name = _hold_limit.limit_name
    for update skip locked;
    if found then
        return true;
    elsif not _hold_limit.may_wait and exists (
        select from rota.limit_states as s where s.limit_name = _hold_limit.limit_name
    ) then
        return false;
    end if;
    return rota._wait_for_limit(_hold_limit.limit_name);
end;
$$;

create or replace function rota._wait_for_limit(limit_name text)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set lock_timeout = '50ms'
as $$
begin
    insert into rota.limit_states (limit_name, used_until)
    values (_wait_for_limit.limit_name, rota.now())
    on conflict do nothing;
    perform
    from rota.limit_states as s
    where s.limit_name = _wait_for_limit.limit_name
    for update;
    return found;
exception
    when lock_not_available then
        return false;
end;
$$;

/*
 * How many may start now under a limit that is held, besides those of ids; with none for its
 * rate, when the next may.
 */
create or replace function rota._room(
    limit_name text,
    max_running integer,
    max_starts integer,
    per interval,
    burst integer,
    ids bigint[]
)
    returns table (room integer, next_start_at timestamptz)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_gap interval;
    v_paid_at timestamptz;
begin
    room := 1000000;
    if _room.max_running is not null then
        room := _room.max_running - rota._count_running(
            _room.limit_name, _room.max_running, _room.ids);
    end if;
    if _room.max_starts is null then
        return next;
        return;
    end if;

    v_gap := rota._gap(_room.max_starts, _room.per);
    v_paid_at := greatest(
        v_now - (coalesce(_room.burst, 1) - 1) * v_gap,
        rota._paid_at(_room.limit_name, v_gap, _room.burst));
    if v_paid_at > v_now then
        room := 0;
        next_start_at := v_paid_at;
    else
        room := least(
            room,
            1 + floor(extract(epoch from v_now - v_paid_at) / extract(epoch from v_gap))
        )::integer;
    end if;
    return next;
end;
$$;

/* The time from one start to the next at this rate, in whole microseconds. */
create or replace function rota._gap(max_starts integer, per interval)
    returns interval
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return ceil(extract(epoch from coalesce(_gap.per, '1 second')) * 1000000 / _gap.max_starts)
        ::float8 * interval '1 microsecond';
end;
$$;

/*
 * At this rate no start is paid for later than a burst from now.  A time that is later came of
 * a clock that was set back, or of a slower rate: then one start is free, and more follow at
 * the rate.
 */
create or replace function rota._used_until(
    used_until timestamptz,
    gap interval,
    burst integer
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_burst constant integer := coalesce(_used_until.burst, 1);
begin
    if _used_until.used_until > rota.now() + c_burst * _used_until.gap then
        return rota.now() + (c_burst - 1) * _used_until.gap;
    end if;
    return _used_until.used_until;
end;
$$;

/* When the next start is free, which may be long ago; null if there was none. */
create or replace function rota._paid_at(limit_name text, gap interval, burst integer)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select rota._used_until(s.used_until, _paid_at.gap, _paid_at.burst)
            - (coalesce(_paid_at.burst, 1) - 1) * _paid_at.gap
        from rota.limit_states as s
        where s.limit_name = _paid_at.limit_name
    );
end;
$$;

create or replace function rota._use_rate(
    limit_name text,
    max_starts integer,
    per interval,
    burst integer,
    starts integer
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_gap constant interval := rota._gap(_use_rate.max_starts, _use_rate.per);
begin
    update rota.limit_states as s
    set used_until = greatest(
            rota._used_until(s.used_until, c_gap, _use_rate.burst), rota.now())
        + _use_rate.starts * c_gap
    where s.limit_name = _use_rate.limit_name
      and _use_rate.starts > 0;
end;
$$;

/* What runs under a limit, up to that many, and those of ids that will. */
create or replace function rota._count_running(
    limit_name text,
    max_running integer,
    ids bigint[]
)
    returns integer
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_kind constant text := split_part(_count_running.limit_name, ' ', 1);
    c_subject constant text := substr(_count_running.limit_name, length(c_kind) + 2);
    v_running integer;
begin
    -- Each by its id: the planner must not think of reading the jobs in the order of theirs.
    v_running := (
        select count(*)::integer
        from (
            select
            from rota.slots as s
            where s.limit_name = _count_running.limit_name
              and (select j.status from rota.jobs as j where j.id = s.job_id) = 'running'
            limit _count_running.max_running
        ) as r
    );
    -- Asked here, as a call for each key would cost.
    if v_running < _count_running.max_running and exists (
        select
        from rota.limits as l
        where l.limit_name in (
            _count_running.limit_name,
            substring(_count_running.limit_name, '^key [^:]*:') || '*')
          and not l.is_settled
          and (l.settled_xid is null or l.updated_at > rota.now() - interval '10 seconds')
    ) then
        v_running := v_running
            + rota._count_unseen(_count_running.limit_name, c_kind, c_subject);
    end if;
    if cardinality(_count_running.ids) > 0 then
        v_running := v_running + (
            select count(*)::integer
            from rota.jobs as j
            where j.id = any(_count_running.ids)
              and case c_kind
                when 'queue' then j.queue
                when 'type' then j.job_type
                else j.limit_key
              end = c_subject
        );
    end if;
    return v_running;
end;
$$;

/*
 * What runs without a slot that can be seen.  Under a limit that was set a moment ago nobody
 * has looked at it, or who does has not committed.  What a transaction from before claims later
 * than that is counted by the looks that follow.
 */
create or replace function rota._count_unseen(limit_name text, kind text, subject text)
    returns integer
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select count(*)::integer
        from rota.jobs as j
        where j.status = 'running'
          and j.locked_until is not null
          and case _count_unseen.kind
            when 'queue' then j.queue
            when 'type' then j.job_type
            else j.limit_key
          end = _count_unseen.subject
          and (
            select s.job_id
            from rota.slots as s
            where s.limit_name = _count_unseen.limit_name
              and s.job_id = j.id
          ) is null
    );
end;
$$;

/*
 * Nothing of this bucket, nor of any other of its type in the queue if it is the type that is
 * limited, can start before there is room.  The note looks at what is so after the parking.
 */
create or replace function rota._park(queue text, bucket text, limit_name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_type constant text := split_part(_park.bucket, '|', 1);
begin
    -- Not "is null": for that the planner may walk the whole line of turns to find a bucket.
    if _park.limit_name = 'type ' || c_type then
        update rota.buckets as b
        set waits_for = _park.limit_name
        where b.queue = _park.queue
          and b.bucket = any(array(
            select w.bucket
            from rota.buckets as w
            where w.queue = _park.queue
              and w.bucket >= c_type || '|'
              and w.bucket < c_type || '}'
              and coalesce(w.waits_for, '') = ''
            limit 1000
            for update skip locked
          ));
    elsif c_type <> '' then
        perform rota._note('limit', 'type ' || c_type, rota.now());
    end if;
    update rota.buckets as b
    set waits_for = _park.limit_name
    where b.queue = _park.queue
      and b.bucket = _park.bucket
      and coalesce(b.waits_for, '') = '';
    perform rota._note('limit', _park.limit_name, rota.now());
end;
$$;

/* Add a note, unless this transaction has just written the same. */
create or replace function rota._note(kind text, subject text, due_at timestamptz)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    insert into rota.rechecks (due_at, kind, subject)
    select _note.due_at, _note.kind, _note.subject
    where (
        select r.kind = _note.kind and r.made_by = pg_current_xact_id() and not r.is_seen
          and (r.kind = 'limit' or r.due_at = _note.due_at)
        from rota.rechecks as r
        where r.kind in ('bucket', 'limit')
          and r.subject = _note.subject
          and r.due_at <= _note.due_at
        order by r.due_at desc, r.id desc
        limit 1
    ) is not true;
    if found and _note.due_at <= rota.now() then
        perform rota._ring('');
    end if;
end;
$$;

/* Have a limit or a bucket looked at again at that time at the latest. */
create or replace function rota._note_later(kind text, subject text, due_at timestamptz)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    insert into rota.rechecks (due_at, kind, subject)
    select _note_later.due_at, _note_later.kind, _note_later.subject
    where not exists (
        select
        from rota.rechecks as r
        where r.kind in ('bucket', 'limit')
          and r.kind = _note_later.kind
          and r.subject = _note_later.subject
          and not r.is_seen
          and r.due_at > rota.now()
          and r.due_at <= _note_later.due_at
    );
end;
$$;

/*
 * These jobs are going to run, but for strays, which go to the right line.  The others take
 * their slots.
 */
create or replace function rota._apply_limits(ids bigint[])
    returns table (kept_ids bigint[], limited_ids bigint[])
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_queues constant text[] := array(
        select l.queue from rota.limits as l where l.queue is not null);
    c_strays constant bigint[] := rota._strays(_apply_limits.ids);
    v_is_counted boolean;
begin
    select bool_or(j.bucket is not null or j.queue = any(c_queues))
    into v_is_counted
    from rota.jobs as j
    where j.id = any(_apply_limits.ids);

    kept_ids := _apply_limits.ids;
    limited_ids := '{}';
    if c_strays <> '{}' then
        update rota.jobs as j
        set bucket = rota._bucket(j.job_type, j.limit_key)
        where j.id = any(c_strays);
        kept_ids := array(
            select i.id from unnest(kept_ids) as i (id) where i.id <> all(c_strays));
    end if;
    if v_is_counted then
        limited_ids := rota._take_slots(kept_ids);
    end if;
    return next;
end;
$$;

/* Those that came into a line without the limit of their type; they do not start there. */
create or replace function rota._strays(ids bigint[])
    returns bigint[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_types constant text[] := array(
        select l.job_type from rota.limits as l where l.job_type is not null);
begin
    if c_types = '{}' then
        return '{}'::bigint[];
    end if;
    return array(
        select j.id
        from rota.jobs as j
        where j.id = any(_strays.ids)
          and j.job_type = any(c_types)
          and coalesce(j.bucket, '|') like '|%'
    );
end;
$$;

/* Take the slots of jobs that are going to run; returns those that count for a limit. */
create or replace function rota._take_slots(ids bigint[])
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_jobs record;
    v_limited bigint[];
begin
    select array_agg(j.id) as ids, array_agg(j.queue) as queues, array_agg(j.bucket) as buckets
    into v_jobs
    from rota.jobs as j
    where j.id = any(_take_slots.ids);

    with counted as (
        select j.id, b.limit_name
        from (
            select d.bucket, l.limit_name
            from (select distinct u.bucket from unnest(v_jobs.buckets) as u (bucket)) as d
            cross join lateral rota._limits_of(d.bucket) as l
            where l.max_running is not null
        ) as b
        join unnest(v_jobs.ids, v_jobs.buckets) as j (id, bucket) on j.bucket = b.bucket
        union all
        select j.id, l.limit_name
        from unnest(v_jobs.ids, v_jobs.queues) as j (id, queue)
        join rota.limits as l on l.queue = j.queue
        where l.max_running is not null
    ),
    taken as (
        insert into rota.slots (limit_name, job_id)
        select c.limit_name, c.id
        from counted as c
        on conflict do nothing
    )
    select coalesce(array_agg(distinct c.id), '{}')
    into v_limited
    from counted as c;
    return v_limited;
end;
$$;

/*
 * The trigger of changes of jobs: they come into a line, or stop running.  It fires also where
 * session_replication_role is replica.  But rows of logical replication, which are no statement
 * of anybody, come with their notes and slots.
 */
create or replace function rota._on_job_change()
    returns trigger
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('session_replication_role') = 'replica' and current_query() is null then
        return null;
    end if;
    if tg_op <> 'INSERT' and old.is_limited and old.status = 'running'
      and (tg_op = 'DELETE' or new.status <> 'running') then
        perform rota._free_slots(old.id);
    end if;
    if tg_op <> 'DELETE' and new.bucket is not null and new.status in ('queued', 'failed')
      and (tg_op = 'INSERT' or (old.status in ('queued', 'failed'), old.run_at, old.priority,
        old.bucket) is distinct from (true, new.run_at, new.priority, new.bucket)) then
        perform rota._note('bucket', format('%s %s', new.queue, new.bucket), new.run_at);
    end if;
    return null;
end;
$$;

create or replace function rota._free_slots(job_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_limit_name text;
begin
    for v_limit_name in
        delete from rota.slots as s
        where s.job_id = _free_slots.job_id
        returning s.limit_name
    loop
        -- A queue is asked for its room by each claim.
        continue when v_limit_name like 'queue %';
        perform rota._note('limit', v_limit_name, rota.now());
    end loop;
end;
$$;

/*
 * A bucket has a job that is due now: it takes turns from now on.  False if it is locked and
 * its priority has to change.  One that is there may be about to go; but whoever takes it away
 * leaves a note, so it is looked at again.
 */
create or replace function rota._recheck_bucket(subject text)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_queue constant text := split_part(_recheck_bucket.subject, ' ', 1);
    c_bucket constant text := substr(_recheck_bucket.subject, length(c_queue) + 2);
    c_ageing constant interval := (
        select q.ageing from rota.queues as q where q.queue = c_queue);
    v_known integer;
    v_priority integer;
    v_run_at timestamptz;
    v_next_run_at timestamptz;
begin
    select h.priority, h.run_at, h.next_run_at
    into v_priority, v_run_at, v_next_run_at
    from rota._bucket_head(c_queue, c_bucket, rota.now(), '{}') as h;
    if v_priority is null then
        -- Each job left a note for its time, but the clock may have been set back since.
        if v_next_run_at is not null then
            perform rota._note_later('bucket', _recheck_bucket.subject, v_next_run_at);
        end if;
        return true;
    end if;

    select b.priority::integer
    into v_known
    from rota.buckets as b
    where b.queue = c_queue
      and b.bucket = c_bucket;
    if not found then
        insert into rota.buckets (queue, bucket, priority, run_at, turn_at)
        values (c_queue, c_bucket, v_priority, v_run_at, v_run_at)
        on conflict do nothing;
        if not found then
            return false;
        end if;
        perform rota._ring(c_queue);
        return true;
    elsif v_known <= v_priority and c_ageing is null then
        return true;
    end if;

    perform
    from rota.buckets as b
    where b.queue = c_queue
      and b.bucket = c_bucket
    for update skip locked;
    if not found then
        return false;
    end if;
    update rota.buckets as b
    set priority = v_priority,
        run_at = v_run_at
    where b.queue = c_queue
      and b.bucket = c_bucket;
    return true;
end;
$$;

/* A limit may have room: wake the buckets that can use it; false if one of them is locked. */
create or replace function rota._recheck_limit(limit_name text)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_is_type constant boolean := _recheck_limit.limit_name like 'type %';
    v_limit record;
    v_room record;
    v_is_new boolean;
    v_is_done boolean := true;
begin
    v_is_new := not exists (
        select
        from rota.limits as l
        where l.limit_name = _recheck_limit.limit_name
          and l.settled_xid is not null
    );
    perform rota._settle_limit(_recheck_limit.limit_name);
    if _recheck_limit.limit_name like '%:*' and v_is_new then
        -- Until it was committed, others looked at keys of the class under the limit before it.
        perform rota._recheck_class(_recheck_limit.limit_name);
    end if;
    if _recheck_limit.limit_name like 'queue %' or _recheck_limit.limit_name like '%:*' then
        return true;
    end if;

    select l.max_running, l.max_starts, l.per, l.burst
    into v_limit
    from rota._limits_of(case
        when c_is_type then substr(_recheck_limit.limit_name, 6) || '|'
        else '|' || substr(_recheck_limit.limit_name, 5)
    end) as l;
    select r.room, r.next_start_at
    into v_room
    from rota._room(
        _recheck_limit.limit_name, v_limit.max_running, v_limit.max_starts, v_limit.per,
        v_limit.burst, '{}') as r;
    if v_room.room > 0 then
        -- A key has few buckets, one for each queue and limited type, and nobody knows which
        -- of them the workers that are there can serve.
        v_is_done := rota._wake(
            _recheck_limit.limit_name,
            case when c_is_type then least(v_room.room, 1000) else 1000 end);
    end if;
    -- Without a rate those who free a slot leave the next note.
    if v_room.room >= 1000
      or v_limit.max_starts is not null and (
        v_room.room > 0 or v_room.next_start_at is not null
    ) then
        perform rota._note_later(
            'limit',
            _recheck_limit.limit_name,
            coalesce(
                v_room.next_start_at,
                rota.now() + coalesce(
                    rota._gap(v_limit.max_starts, v_limit.per), interval '1 millisecond')))
        where exists (
            select from rota.buckets as b where b.waits_for = _recheck_limit.limit_name);
    end if;
    return v_is_done;
end;
$$;

/*
 * Let up to max_buckets that are parked at a limit take turns again, in each queue; false if
 * there are too few that nobody has locked.
 */
create or replace function rota._wake(limit_name text, max_buckets integer)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_queue text := '';
    v_buckets text[];
    v_is_done boolean := true;
begin
    loop
        v_queue := (
            select b.queue
            from rota.buckets as b
            where b.waits_for = _wake.limit_name
              and b.queue > v_queue
            order by b.queue
            limit 1
        );
        exit when v_queue is null;
        v_buckets := array(
            select b.bucket
            from rota.buckets as b
            where b.waits_for = _wake.limit_name
              and b.queue = v_queue
            order by b.priority, b.turn_at
            limit _wake.max_buckets
            for update skip locked
        );
        update rota.buckets as b
        set waits_for = null
        where b.queue = v_queue
          and b.bucket = any(v_buckets);
        perform rota._ring(v_queue);
        v_is_done := v_is_done and (
            cardinality(v_buckets) = _wake.max_buckets or not exists (
                select
                from rota.buckets as b
                where b.waits_for = _wake.limit_name
                  and b.queue = v_queue
            ));
    end loop;
    return v_is_done;
end;
$$;

/* The limit of a class changed: have every key of it looked at that is parked. */
create or replace function rota._recheck_class(limit_name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_prefix constant text := left(_recheck_class.limit_name, -1);
begin
    perform rota._note('limit', w.waits_for, rota.now())
    from (
        select distinct b.waits_for
        from rota.buckets as b
        where b.waits_for >= c_prefix
          and b.waits_for < left(c_prefix, -1) || ';'
    ) as w;
end;
$$;

/* A key has no limit of its own any more: what runs counts for that of its class. */
create or replace function rota._unsettle_class(limit_key text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_class text;
begin
    update rota.limits as l
    set updated_at = rota.now(),
        is_settled = false,
        settled_xid = null
    where l.limit_name = any(rota._key_limits(_unsettle_class.limit_key))
    returning l.limit_name into v_class;
    if found then
        perform rota._note('limit', v_class, rota.now());
    end if;
end;
$$;

/* Let what runs already count for a limit that was set just now, and ask for another look. */
create or replace function rota._settle_limit(limit_name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_limit rota.limits;
    v_age interval;
    v_is_over boolean;
    v_is_settled boolean;
begin
    select l.*
    into v_limit
    from rota.limits as l
    where l.limit_name = _settle_limit.limit_name
      and not l.is_settled
    for update skip locked;
    if not found then
        return;
    end if;

    v_age := rota.now() - v_limit.updated_at;
    -- Asked before the count: one that ends in between is not in it.
    v_is_over := v_age > '5 seconds' and coalesce(
        v_limit.settled_xid <= pg_snapshot_xmin(pg_current_snapshot()), false);
    perform rota._count_started(v_limit);
    if v_is_over and v_limit.job_type is not null then
        -- Those that did not know of the limit have put their jobs into the common line.
        perform rota._fill_buckets(v_limit.job_type);
    end if;
    v_is_settled := v_is_over and cardinality(rota._uncounted(v_limit)) = 0;
    update rota.limits as l
    set settled_xid = coalesce(
            -- A snapshot alone does not know of those that began after the last that ended.
            l.settled_xid,
            -- Until the limit is committed, others go on beginning without it.
            case when not exists (
                select
                from rota.rechecks as r
                where r.kind = 'limit'
                  and r.subject = l.limit_name
                  and r.made_by = pg_current_xact_id()
            ) then greatest(pg_current_xact_id(), pg_snapshot_xmax(pg_current_snapshot())) end),
        is_settled = v_is_settled
    where l.limit_name = v_limit.limit_name;
    if not v_is_settled then
        perform rota._note_later(
            'limit',
            v_limit.limit_name,
            rota.now() + case
                when v_is_over then '1 second'
                else greatest('1 second', v_age / 2)
            end);
    end if;
end;
$$;

create or replace function rota._count_started(bound rota.limits)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids bigint[] := rota._uncounted(bound);
begin
    -- Those that count already are left alone: a lock would hold up their end.
    v_ids := array(
        select j.id
        from rota.jobs as j
        where j.id = any(v_ids)
          and j.status = 'running'
        for update skip locked
    );
    update rota.jobs as j
    set is_limited = true,
        bucket = rota._bucket(j.job_type, j.limit_key)
    where j.id = any(v_ids);
    perform rota._take_slots(v_ids);
end;
$$;

/* What runs without a slot of this limit, though it counts for it. */
create or replace function rota._uncounted(bound rota.limits)
    returns bigint[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return array(
        select j.id
        from rota.jobs as j
        where j.status = 'running'
          and j.locked_until is not null
          and (j.queue = bound.queue or j.job_type = bound.job_type
            or j.limit_key = bound.limit_key
            or bound.limit_key like '%:*'
              and bound.limit_name = any(rota._key_limits(j.limit_key))
              and not exists (
                select from rota.limits as l where l.limit_name = 'key ' || j.limit_key
              ))
          and bound.max_running is not null
          and (
            select s.job_id
            from rota.slots as s
            where s.limit_name = case
                when bound.limit_key is not null then 'key ' || j.limit_key
                else bound.limit_name
              end
              and s.job_id = j.id
          ) is null
    );
end;
$$;

/* Forget what no limit needs any more: states out of use, slots whose job is gone. */
create or replace function rota._forget_limits(max_rows integer)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    delete from rota.limit_states as s
    where s.limit_name = any(array(
        select u.limit_name
        from rota.limit_states as u
        where u.used_until < rota.now() - interval '1 hour'
        order by u.used_until
        limit _forget_limits.max_rows
        for update skip locked
    ));
    delete from rota.slots as s
    where not exists (select from rota.jobs as j where j.id = s.job_id);
    -- A note that is further ahead than the next start can be: the clock was set back.
    update rota.rechecks as r
    set due_at = rota.now()
    where r.ctid = any(array(
        select f.ctid
        from rota.rechecks as f
        cross join lateral rota._limits_of(case
            when f.subject like 'type %' then substr(f.subject, 6) || '|'
            else '|' || substr(f.subject, 5)
        end) as l
        where f.kind = 'limit'
          and f.due_at > rota.now() + interval '10 seconds'
          and f.due_at > rota.now() + rota._gap(l.max_starts, l.per)
          and l.limit_name = f.subject
        limit _forget_limits.max_rows
        for update of f skip locked
    ));
end;
$$;
/*
 * 59_pipelines.sql -- jobs that pass through stages.
 *
 * Each stage of a run is a job of its own: with a job type, retries, a place in the history.
 * It has the payload of the run and the result of the stage before.  The job of the next stage
 * is made in the transaction that ends this one, so the run is never in two stages and never
 * in none; a unique index on first_job_id holds the first, and that _end_jobs() is the only way
 * out holds the second.  What the run owns (its idempotency key, the place at the head of its
 * ordering key) goes over from job to job without a gap.
 *
 * A stage that is dead or cancelled is the end of its run, until somebody retries it or lets
 * the run go on from another.  If its cancel was requested and it succeeds all the same, then
 * it is the next stage that is cancelled.
 */

create or replace function rota.define_pipeline(pipeline text, stages jsonb)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_stages text[];
begin
    perform rota._check_name('pipeline', define_pipeline.pipeline);
    perform rota._check_stages(define_pipeline.stages);
    v_stages := array(
        select s.stage from rota._stages(define_pipeline.stages) as s order by s.ordinal
    );

    -- Two at once would make one of both.  Whoever starts or finishes a job only reads.
    lock table rota.pipeline_stages in share row exclusive mode;
    perform rota._retire_stages(define_pipeline.pipeline, v_stages);
    insert into rota.pipeline_stages as p (
        pipeline, stage, ordinal, next_stage, job_type, queue, priority, max_attempts, lease,
        backoff
    )
    select
        define_pipeline.pipeline, s.stage, s.ordinal, v_stages[s.ordinal + 1], s.job_type,
        s.queue, s.priority, s.max_attempts, rota._exact(s.lease), s.backoff
    from rota._stages(define_pipeline.stages) as s
    on conflict on constraint pipeline_stages_pkey do update
    set ordinal = excluded.ordinal,
        next_stage = excluded.next_stage,
        job_type = excluded.job_type,
        queue = excluded.queue,
        priority = excluded.priority,
        max_attempts = excluded.max_attempts,
        lease = excluded.lease,
        backoff = excluded.backoff;
end;
$$;

comment on function rota.define_pipeline(text, jsonb) is
    'Set the stages of a pipeline, given as objects in their order; runs under way go on by '
    'the names of their stages, from one that is left out to the next that is still there; '
    'raises 22023 for a bad stage, naming it.';

/* Take a pipeline apart, and let the stages that do not come again lead to those that do. */
create or replace function rota._retire_stages(pipeline text, stages text[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    with recursive ways (stage, next_stage) as (
        select p.stage, p.next_stage
        from rota.pipeline_stages as p
        where p.pipeline = _retire_stages.pipeline
        union
        select w.stage, p.next_stage
        from ways as w
        join rota.pipeline_stages as p on p.pipeline = _retire_stages.pipeline
          and p.stage = w.next_stage
        where w.next_stage <> all(_retire_stages.stages)
    )
    update rota.pipeline_stages as p
    set ordinal = null,
        next_stage = (
            select w.next_stage
            from ways as w
            where w.stage = p.stage
              and w.next_stage = any(_retire_stages.stages)
        )
    where p.pipeline = _retire_stages.pipeline;
end;
$$;

create or replace function rota.drop_pipeline(pipeline text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_pipeline(drop_pipeline.pipeline);

    update rota.pipeline_stages as p
    set ordinal = null
    where p.pipeline = drop_pipeline.pipeline
      and p.ordinal is not null;
    if not found then
        -- Another who drops it was done just now.
        perform rota._check_pipeline(drop_pipeline.pipeline);
    end if;
end;
$$;

comment on function rota.drop_pipeline(text) is
    'Let no more runs of a pipeline begin; those under way go on to their end; raises 22023 if '
    'it is not defined.';

create or replace function rota.start_pipeline(
    pipeline text,
    payload jsonb default '{}',
    stage text default null,
    run_at timestamptz default null,
    delay interval default null,
    priority integer default 0,
    idempotency_key text default null,
    unique_for interval default null,
    ordering_key text default null,
    skip_dead boolean default false,
    after bigint[] default null,
    before bigint default null,
    if_parent_dead text default 'cancel',
    limit_key text default null
)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_stage rota.pipeline_stages;
    v_job rota.jobs;
begin
    v_stage := rota._pipeline_stage(start_pipeline.pipeline, start_pipeline.stage);
    perform rota._check_priority('priority', start_pipeline.priority);
    perform rota._check_new_job(
        '', v_stage.job_type, start_pipeline.payload, v_stage.queue, start_pipeline.run_at,
        start_pipeline.delay, start_pipeline.priority, null, null, null,
        start_pipeline.idempotency_key);
    perform rota._check_waits(
        '', start_pipeline.ordering_key, start_pipeline.skip_dead, start_pipeline.after,
        start_pipeline.if_parent_dead, start_pipeline.limit_key);

    v_job := rota._new_job(
        v_stage.job_type, start_pipeline.payload, v_stage.queue, start_pipeline.run_at,
        start_pipeline.delay, coalesce(v_stage.priority, start_pipeline.priority),
        v_stage.max_attempts, v_stage.lease, v_stage.backoff, start_pipeline.idempotency_key,
        start_pipeline.ordering_key, start_pipeline.skip_dead, start_pipeline.after,
        start_pipeline.if_parent_dead, start_pipeline.limit_key);
    return rota._enqueue_special(
        jsonb_populate_record(v_job, jsonb_build_object(
            'pipeline', v_stage.pipeline, 'stage', v_stage.stage)),
        start_pipeline.unique_for, 'keep', null, null, false, start_pipeline.after,
        start_pipeline.before);
end;
$$;

comment on function rota.start_pipeline(
    text, jsonb, text, timestamptz, interval, integer, text, interval, text, boolean, bigint[],
    bigint, text, text) is
    'Begin a run of a pipeline and return the id of its first job, or of the job that has its '
    'idempotency_key already, in whatever stage; raises 22023 for a bad argument, RT001 for an '
    'unknown job in after or before, RT013 if before has started, RT003 if it has ended.';

/*
 * Let the runs of ended jobs, given as rows of jobs, go on.  Returns what is over by that: of
 * the ended ids those in no pipeline, and the runs for which nothing follows.
 */
create or replace function rota._advance_runs(
    jobs jsonb,
    ended_ids bigint[],
    status text,
    job_ids bigint[],
    results jsonb,
    next_stages text[]
)
    returns bigint[]
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
    v_new_ids bigint[];
    v_runs bigint[];
begin
    if not jsonb_path_exists(_advance_runs.jobs, '$[*].pipeline ? (@ != null)') then
        return _advance_runs.ended_ids;
    end if;

    with entered as (
        -- The keys are those of the rows just deleted here, so this waits for nobody.
        insert into rota.jobs as j (
            queue, job_type, payload, priority, max_attempts, lease, backoff,
            idempotency_key, ordering_key, skip_dead, limit_key, bucket, pipeline, stage,
            stage_input, first_job_id, status, run_at, created_at, updated_at
        )
        select
            n.queue, n.job_type, e.payload, coalesce(n.priority, e.priority),
            coalesce(n.max_attempts, q.max_attempts, 10), n.lease, n.backoff,
            e.idempotency_key, e.ordering_key, e.skip_dead, e.limit_key,
            rota._bucket(n.job_type, e.limit_key), e.pipeline, n.stage,
            nullif(_advance_runs.results -> (i.place - 1), 'null'), e.first_job_id, 'queued',
            v_now, v_now, v_now
        from jsonb_populate_recordset(null::rota.jobs, _advance_runs.jobs) as e
        cross join lateral (
            select array_position(_advance_runs.job_ids, e.id) as place
        ) as i
        left join rota.pipeline_stages as s on s.pipeline = e.pipeline and s.stage = e.stage
        join rota.pipeline_stages as n on n.pipeline = e.pipeline
          and n.stage = coalesce(_advance_runs.next_stages[i.place], s.next_stage)
        left join rota.queues as q on q.queue = n.queue
        where _advance_runs.status = 'succeeded'
        order by e.id
        returning j.id, j.first_job_id
    )
    select coalesce(array_agg(e.id), '{}'), coalesce(array_agg(e.first_job_id), '{}')
    into v_new_ids, v_runs
    from entered as e;
    perform rota._ring_for(v_new_ids);

    perform rota._cancel(n.id, 0, 'queued', e.cancel_reason)
    from jsonb_populate_recordset(null::rota.jobs, _advance_runs.jobs) as e
    join unnest(v_new_ids, v_runs) as n (id, first_job_id) on n.first_job_id = e.first_job_id
    where e.cancel_requested_at is not null;

    return array(
        select coalesce(e.first_job_id, i.id)
        from unnest(_advance_runs.ended_ids) as i (id)
        left join jsonb_populate_recordset(null::rota.jobs, _advance_runs.jobs) as e
          on e.id = i.id
        where e.first_job_id is null
           or e.first_job_id <> all(v_runs)
    );
end;
$$;

create or replace function rota.rerun_from(job_id bigint, stage text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    v_old rota.jobs;
    v_stage rota.pipeline_stages;
    v_job rota.jobs;
    v_job_id bigint;
    v_has_place boolean;
begin
    perform rota._check_job_id(rerun_from.job_id);
    perform rota._check_name('stage', rerun_from.stage);
    v_old := rota._ended_stage(rerun_from.job_id);
    v_stage := rota._pipeline_stage(v_old.pipeline, rerun_from.stage);

    v_job := rota._new_job(
        v_stage.job_type, v_old.payload, v_stage.queue, null, null,
        coalesce(v_stage.priority, v_old.priority), v_stage.max_attempts, v_stage.lease,
        v_stage.backoff, v_old.idempotency_key, v_old.ordering_key, v_old.skip_dead, null, null,
        v_old.limit_key);
    v_has_place := rota._take_place(v_old.ordering_key, v_old.first_job_id);
    v_job_id := rota._insert_job(jsonb_populate_record(v_job, jsonb_build_object(
        'pipeline', v_stage.pipeline,
        'stage', v_stage.stage,
        'stage_input', rota._stage_input(v_old.id, v_old.first_job_id, v_stage),
        'first_job_id', v_old.first_job_id,
        'status', case when v_has_place then 'queued' else v_job.status end)));
    if v_job_id is null then
        perform rota._raise_taken(v_old.id, v_old.idempotency_key, v_old.first_job_id);
    end if;
    update rota.dependencies as d
    set is_failed = false
    where d.parent_id = v_old.first_job_id;
    perform rota._note_new(array[v_job_id]);
    perform rota._ring_for(array[v_job_id]);
    return v_job_id;
end;
$$;

comment on function rota.rerun_from(bigint, text) is
    'Let the run that an ended job belongs to go on from a stage and return the id of the new '
    'job, which gets the latest result of a stage before it; raises RT001 if the job or that '
    'result is not there any more, RT014 if the run is under way, RT007 if its idempotency_key '
    'is taken, 22023.';

/* Whether a run takes the place at the head of its ordering key that its dead job has kept. */
create or replace function rota._take_place(ordering_key text, first_job_id bigint)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    delete from rota.stuck_keys as s
    where s.ordering_key = _take_place.ordering_key
      and s.job_id in (
        select f.id
        from rota.finished_jobs as f
        where f.first_job_id = _take_place.first_job_id
      );
    return found;
end;
$$;

/* A job of a run that is over; raises RT014 if it is under way. */
create or replace function rota._ended_stage(job_id bigint)
    returns rota.jobs
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_job rota.jobs;
begin
    -- A job that ends or comes back while we look is looked for again.
    for v_round in 1..3 loop
        select j.* into v_job from rota.jobs as j where j.id = _ended_stage.job_id;
        exit when found;
        v_job := (
            select jsonb_populate_record(null::rota.jobs, to_jsonb(f))
            from rota.finished_jobs as f
            where f.id = _ended_stage.job_id
        );
        exit when v_job.id is not null;
    end loop;
    if v_job.id is null then
        perform rota._raise_not_found(_ended_stage.job_id);
    end if;

    if v_job.pipeline is null then
        perform rota._refuse('job_id', format(
            'must be a job of a pipeline, and job %s is in none', _ended_stage.job_id));
    elsif not rota._is_defined(v_job.pipeline) then
        perform rota._refuse('job_id', format(
            'must be a job of a pipeline that is defined, and %L is not', v_job.pipeline));
    elsif exists (select from rota.jobs as j where j.first_job_id = v_job.first_job_id) then
        perform rota._raise_taken(v_job.id, v_job.idempotency_key, v_job.first_job_id);
    end if;
    return v_job;
end;
$$;

/*
 * What a stage is given if its run goes on from there: the latest result of a stage before it,
 * or what it was given itself if that was later.
 */
create or replace function rota._stage_input(
    job_id bigint,
    first_job_id bigint,
    stage rota.pipeline_stages
)
    returns jsonb
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_input jsonb;
begin
    select case when f.stage = stage.stage then f.stage_input else f.result end
    into v_input
    from rota.finished_jobs as f
    left join rota.pipeline_stages as p on p.pipeline = f.pipeline and p.stage = f.stage
    where f.first_job_id = _stage_input.first_job_id
      and (f.stage = stage.stage or f.status = 'succeeded' and p.ordinal < stage.ordinal)
    order by
        case when f.stage = stage.stage then f.created_at else f.finished_at end desc,
        f.id desc
    limit 1;

    -- Without the first job nobody knows what else is missing.
    if not found and stage.ordinal > 1 and not exists (
        select from rota.finished_jobs as f where f.id = _stage_input.first_job_id
    ) then
        if rota._run_status(_stage_input.first_job_id) = 'live' then
            -- It was retried just now.
            perform rota._raise_taken(_stage_input.job_id, null, _stage_input.first_job_id);
        end if;
        raise exception using
            errcode = 'RT001',
            message = format('job %s: no result of a stage before %L is left of its run',
                _stage_input.job_id, stage.stage),
            hint = 'Retention has removed it; let the run go on from its first stage.';
    end if;
    return v_input;
end;
$$;

/* What became of a run: live, or the status of the job that was its last. */
create or replace function rota._run_status(first_job_id bigint)
    returns text
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
begin
    if exists (
        select from rota.jobs as j where j.first_job_id = _run_status.first_job_id
    ) then
        return 'live';
    end if;
    return (
        select f.status
        from rota.finished_jobs as f
        where f.first_job_id = _run_status.first_job_id
        order by f.finished_at desc, f.id desc
        limit 1
    );
end;
$$;

/* The same, and a run that is live does not end before we do; null if it is forgotten. */
create or replace function rota._hold_run(first_job_id bigint)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_status text;
begin
    loop
        v_status := rota._run_status(_hold_run.first_job_id);
        exit when v_status is distinct from 'live';
        perform
        from rota.jobs as j
        where j.first_job_id = _hold_run.first_job_id
        for key share;
        -- Or its job has ended while we waited for it, and another may follow.
        exit when found;
    end loop;
    return v_status;
end;
$$;

/* One stage of a pipeline by its name, or the first. */
create or replace function rota._pipeline_stage(pipeline text, stage text)
    returns rota.pipeline_stages
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_stage rota.pipeline_stages;
begin
    perform rota._check_pipeline(_pipeline_stage.pipeline);
    select p.*
    into v_stage
    from rota.pipeline_stages as p
    where p.pipeline = _pipeline_stage.pipeline
      and case
        when _pipeline_stage.stage is null then p.ordinal = 1
        else p.ordinal is not null and p.stage = _pipeline_stage.stage
      end;
    if not found then
        perform rota._refuse('stage', format('must be a stage of the pipeline %L, got %L',
            _pipeline_stage.pipeline, left(_pipeline_stage.stage, 80)));
    end if;
    return v_stage;
end;
$$;

create or replace function rota._check_pipeline(pipeline text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_name('pipeline', _check_pipeline.pipeline);
    if not rota._is_defined(_check_pipeline.pipeline) then
        perform rota._refuse('pipeline', format('%L is not defined', _check_pipeline.pipeline));
    end if;
end;
$$;

create or replace function rota._is_defined(pipeline text)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select
        from rota.pipeline_stages as p
        where p.pipeline = _is_defined.pipeline
          and p.ordinal is not null
    );
end;
$$;

/* Whether a running job may go on to a stage; one that is lost is told so by its finish. */
create or replace function rota._check_next_stage(
    argument text,
    job_id bigint,
    lease_token bigint,
    next_stage text
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_pipeline text;
begin
    select j.pipeline
    into v_pipeline
    from rota.jobs as j
    where j.id = _check_next_stage.job_id
      and j.lease_token = _check_next_stage.lease_token
      and j.status = 'running';
    if not found then
        return;
    elsif v_pipeline is null then
        perform rota._refuse(_check_next_stage.argument, format(
            'goes with a job of a pipeline only, and job %s is in none',
            _check_next_stage.job_id));
    elsif _check_next_stage.next_stage <> 'end' and not exists (
        select
        from rota.pipeline_stages as p
        where p.pipeline = v_pipeline
          and p.stage = _check_next_stage.next_stage
          and p.ordinal is not null
    ) then
        perform rota._refuse(_check_next_stage.argument, format(
            'must be end or a stage of the pipeline %L, got %L', v_pipeline,
            left(_check_next_stage.next_stage, 80)));
    end if;
end;
$$;

create or replace function rota._check_next_stages(
    job_ids bigint[],
    lease_tokens bigint[],
    next_stages text[]
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if array_ndims(_check_next_stages.next_stages) > 1
      or array_lower(_check_next_stages.next_stages, 1) <> 1
      or cardinality(_check_next_stages.next_stages)
        <> cardinality(_check_next_stages.job_ids) then
        perform rota._refuse('next_stages', format(
            'must be a plain list as long as job_ids (%s)',
            cardinality(_check_next_stages.job_ids)));
    end if;
    perform rota._check_next_stage(
        format('next_stages[%s]', n.ordinal), n.job_id, n.lease_token, n.next_stage)
    from unnest(
        _check_next_stages.job_ids, _check_next_stages.lease_tokens,
        _check_next_stages.next_stages
    ) with ordinality as n (job_id, lease_token, next_stage, ordinal)
    where n.next_stage is not null;
end;
$$;

/* The objects as typed rows. */
create or replace function rota._stages(stages jsonb)
    returns table (
        ordinal bigint,
        stage text,
        job_type text,
        queue text,
        priority integer,
        max_attempts integer,
        lease interval,
        backoff jsonb
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return query
    select
        s.ordinal, s.stage, s.job_type, coalesce(s.queue, 'default'), s.priority,
        s.max_attempts, s.lease, nullif(s.backoff, 'null')
    from rows from (
        jsonb_to_recordset(_stages.stages) as (
            stage text, job_type text, queue text, priority integer, max_attempts integer,
            lease interval, backoff jsonb
        )
    ) with ordinality as s (
        stage, job_type, queue, priority, max_attempts, lease, backoff, ordinal
    );
end;
$$;

create or replace function rota._check_stages(stages jsonb)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_keys constant text[] := array[
        'stage', 'job_type', 'queue', 'priority', 'max_attempts', 'lease', 'backoff'];
begin
    if jsonb_typeof(_check_stages.stages) is distinct from 'array'
      or jsonb_array_length(_check_stages.stages) not between 1 and 1000 then
        perform rota._refuse('stages', 'must be an array of 1 to 1000 objects');
    end if;
    perform case jsonb_typeof(e.stage)
        when 'object' then rota._refuse(
            format('stages[%s]', e.ordinal), format('has an unknown key %L', (
                select left(k.key, 80) from jsonb_each(e.stage - c_keys) as k limit 1)))
        else rota._refuse(format('stages[%s]', e.ordinal), 'must be an object')
    end
    from jsonb_array_elements(_check_stages.stages) with ordinality as e (stage, ordinal)
    where case jsonb_typeof(e.stage) when 'object' then e.stage - c_keys <> '{}' else true end;

    begin
        perform rota._check_stage(format('stages[%s].', s.ordinal), s.stage),
            rota._check_new_job(
                format('stages[%s].', s.ordinal), s.job_type, '{}', s.queue, null, null,
                coalesce(s.priority, 0), s.max_attempts, s.lease, s.backoff, null)
        from rota._stages(_check_stages.stages) as s;
    exception
        when data_exception then
            perform rota._refuse(format('stages[%s].%s', f.ordinal, f.key), f.problem)
            from (
                select e.ordinal, k.key, rota._cast_problem(k.key, k.value) as problem
                from jsonb_array_elements(_check_stages.stages)
                    with ordinality as e (stage, ordinal)
                cross join jsonb_each(e.stage) as k
            ) as f
            where f.problem is not null
            limit 1;
            raise;
    end;

    perform rota._refuse(
        format('stages[%s].stage', max(s.ordinal)), format('%L is there twice', s.stage))
    from rota._stages(_check_stages.stages) as s
    group by s.stage
    having count(*) > 1;
end;
$$;

create or replace function rota._check_stage(prefix text, stage text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_name(_check_stage.prefix || 'stage', _check_stage.stage);
    if _check_stage.stage = 'end' then
        perform rota._refuse(_check_stage.prefix || 'stage',
            'must not be end, which as a next_stage means none');
    end if;
end;
$$;
/*
 * 54_first_run.sql -- what a new installation does once.
 *
 * The first partitions, and the triggers: to make one again would wait for everybody who is
 * writing to the table.  Jobs without a key and a limit pass them by their conditions.  They
 * fire always, since without them a job of a limit is not found.
 */

do $$
begin
    perform rota._create_partition((rota.now() at time zone 'UTC')::date);
    perform rota._create_partitions();
end $$;

create trigger on_insert after insert on rota.jobs
    for each row
    when (new.bucket is not null)
    execute function rota._on_job_change();
create trigger on_update after update of status, run_at, priority, bucket on rota.jobs
    for each row
    when (new.bucket is not null or old.is_limited)
    execute function rota._on_job_change();
create trigger on_delete after delete on rota.jobs
    for each row
    when (old.is_limited)
    execute function rota._on_job_change();
alter table rota.jobs
    enable always trigger on_insert,
    enable always trigger on_update,
    enable always trigger on_delete;
/*
 * 60_pg_cron.sql -- let pg_cron be the heartbeat.
 *
 * pg_cron only wakes the ticker.  Everything worth knowing is in our tables, since pg_cron
 * forgets what it missed while it was down.  What it runs is always tick_loop(), which ticks
 * again at once while there is more to do.  From 1.5 on pg_cron counts in seconds, and a call
 * is one tick; older ones know minutes only, and a call ticks for a minute.  The entry is one
 * of the owner of rota.
 *
 * The extension may be missing, so whatever touches it is dynamic.  It never empties its log
 * of runs; retention forgets ours after a day.
 */

create or replace function rota.start_ticker(every interval default '1 second')
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_version constant text := rota._cron_version();
    v_schedule text;
    v_command text;
begin
    select e.schedule, e.command
    into v_schedule, v_command
    from rota._cron_entry(v_version, start_ticker.every) as e;
    perform rota._check_cron(v_schedule, v_command);
    perform rota._lock_ticker();

    -- Scheduling again keeps an entry as active as it is.
    perform cron.unschedule(j.jobid)
    from cron.job as j
    where j.jobname = 'rota tick'
      and j.username = current_user
      and not j.active;
    perform cron.schedule('rota tick', v_schedule, v_command);
    insert into rota.upkeep (task, done_at)
    values ('pg_cron', rota.now())
    on conflict (task) do nothing;
    return format('pg_cron %s runs "%s" at "%s" as %s',
        v_version, v_command, v_schedule, current_user);
end;
$$;

comment on function rota.start_ticker(interval) is
    'Let pg_cron tick, every 1 to 59 whole seconds or minutes, and say what was set up; raises '
    '22023, 0A000.';

create or replace function rota.stop_ticker()
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_is_stopped boolean := false;
begin
    if rota._has_cron() then
        perform rota._lock_ticker();
        perform cron.unschedule(j.jobid)
        from cron.job as j
        where j.jobname in ('rota tick', 'rota tick log')
          and j.database = current_database()
          and j.username = current_user;
        v_is_stopped := found;
    end if;
    return v_is_stopped;
end;
$$;

comment on function rota.stop_ticker() is
    'Take away what start_ticker() set up in pg_cron, and return whether there was anything.';

/* Wait for another who starts or stops: pg_cron fails on an entry that is just going. */
create or replace function rota._lock_ticker()
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_xact_lock(hashtextextended('rota.ticker', 0));
end;
$$;

/* Whether pg_cron is in this database, with names and a log, for the owner of rota to use. */
create or replace function rota._has_cron()
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select
        from pg_extension as e
        join pg_namespace as n on n.nspname = 'cron'
        join pg_class as c on c.relnamespace = n.oid and c.relname = 'job_run_details'
        where e.extname = 'pg_cron'
          and has_schema_privilege(n.oid, 'usage')
    );
end;
$$;

/* The version of the pg_cron of this database, else of the one that could be there. */
create or replace function rota._cron_version()
    returns text
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return coalesce(
        (select e.extversion from pg_extension as e where e.extname = 'pg_cron'),
        (select a.default_version from pg_available_extensions as a where a.name = 'pg_cron')
    );
end;
$$;

/* What to tell a pg_cron of this version, such as 1.4-1, to make it tick so often. */
create or replace function rota._cron_entry(version text, every interval)
    returns table (schedule text, command text)
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    c_with_seconds constant integer[] := array[1, 5];
    v_version constant integer[] :=
        string_to_array(substring(_cron_entry.version from '^[0-9]+[.][0-9]+'), '.')::integer[];
    v_every constant numeric := extract(epoch from _cron_entry.every);
begin
    if v_every between 1 and 59 and v_every = trunc(v_every) then
        if v_version >= c_with_seconds then
            schedule := trunc(v_every) || ' seconds';
            command := format('call rota.tick_loop(%L, %1$L)', schedule);
        else
            schedule := '* * * * *';
            command := format('call rota.tick_loop(%L, %L)',
                '60 seconds', trunc(v_every) || ' seconds');
        end if;
    elsif v_every between 60 and 3540 and mod(v_every, 60) = 0 then
        -- The first tick, and more of them as long as there is more to do.
        schedule := concat_ws('/', '*', nullif(div(v_every, 60), 1)) || ' * * * *';
        command := format('call rota.tick_loop(%L, %L)', '30 seconds', '1 minute');
    else
        perform rota._refuse('every', format(
            'must be 1 to 59 seconds or minutes, and whole ones, got %s',
            coalesce(_cron_entry.every::text, 'null')));
    end if;
    return next;
end;
$$;

/* Raises 0A000, with the remedy, if pg_cron cannot do it here. */
create or replace function rota._check_cron(schedule text, command text)
    returns void
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_problem text;
    v_remedy text;
    v_here constant text := format(
        'As a superuser in this database: create extension pg_cron; '
        'grant usage on schema cron to %I;', current_user);
    v_there constant text := format(
        'as a superuser: select cron.schedule_in_database(%L, %L, %L, %L, %L);',
        'rota tick ' || current_database(), _check_cron.schedule, _check_cron.command,
        current_database(), current_user);
    v_database text;
begin
    if exists (select from pg_extension as e where e.extname = 'pg_cron') then
        if not has_schema_privilege('cron', 'usage') then
            v_problem := format('role %s may not use pg_cron', current_user);
            v_remedy := format(
                'As a superuser: grant usage on schema cron to %I;', current_user);
        elsif not rota._has_cron() then
            v_problem := format('pg_cron %s is too old: its entries have no names',
                rota._cron_version());
            v_remedy := 'As a superuser in this database: alter extension pg_cron update;';
        elsif not (select r.rolcanlogin from pg_roles as r where r.rolname = current_user) then
            v_problem := format('pg_cron would have to log in as %s', current_user);
            v_remedy := format('As a superuser: alter role %I login;', current_user);
        end if;
    else
        v_database := rota._cron_database();
        if v_database is null then
            v_problem := 'pg_cron is not installed';
            v_remedy := format('Nothing needs it: every worker ticks, and so does "rota tick '
                '--loop". To have it, install its package, set shared_preload_libraries = '
                '''pg_cron'' and cron.database_name = %L, and restart the server. ',
                current_database()) || v_here;
        elsif v_database = '' then
            v_problem := 'pg_cron is not in this database';
            v_remedy := 'Where it is, a superuser is told by: show cron.database_name. '
                'If that is another database, run there, ' || v_there || ' ' || v_here;
        elsif v_database = current_database() then
            v_problem := 'the extension pg_cron is not created in this database';
            v_remedy := v_here;
        else
            v_problem := format('pg_cron is in database %s', v_database);
            v_remedy := 'Run there, ' || v_there;
        end if;
    end if;

    if v_problem is not null then
        raise exception using
            errcode = 'feature_not_supported', message = v_problem, hint = v_remedy;
    end if;
end;
$$;

/* Which database pg_cron is loaded for: null if it is not, empty if that may not be known. */
create or replace function rota._cron_database()
    returns text
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return current_setting('cron.database_name', true);
exception
    when insufficient_privilege then
        return '';
end;
$$;

/* Delete what pg_cron has logged about our runs that ended a day ago; looks once an hour. */
create or replace function rota._forget_cron_runs(max_rows integer)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = on
    -- The log of others grows as it likes: an older plan may be one for a few rows.
    set plan_cache_mode = force_custom_plan
as $$
declare
    v_now constant timestamptz := rota.now();
    v_deleted bigint;
begin
    perform
    from rota.upkeep as u
    where u.task = 'pg_cron'
      and u.done_at not between v_now - interval '1 hour' and v_now
    for update skip locked;
    if not found or not rota._has_cron() then
        return;
    end if;

    delete from cron.job_run_details as d
    where d.runid = any(array(
        select o.runid
        from cron.job_run_details as o
        where o.database = current_database()
          and o.username = current_user
          and o.command like 'call rota.tick_loop(%'
          and coalesce(o.end_time, o.start_time) < v_now - interval '1 day'
        limit _forget_cron_runs.max_rows
    ));
    get diagnostics v_deleted = row_count;
    if v_deleted < _forget_cron_runs.max_rows then
        update rota.upkeep as u set done_at = v_now where u.task = 'pg_cron';
    end if;
end;
$$;
/*
 * 61_fire.sql -- make the jobs whose time has come.
 *
 * A tick locks definitions that are due and that nobody else holds, makes what each of them
 * is due, and moves it on to its next planned time, all in one transaction.  So any number of
 * ticks may run at once.  That a planned time makes at most one job rests on none of this: it
 * has one row in fires, and the job is made only by who inserted that.
 *
 * A late tick sees all planned times that have passed since the last one.  What becomes of them
 * is in catch_up alone, so two databases that were late alike do the same.
 *
 * Many definitions have the same few times.  These are found out once for each batch, and the
 * rows of a batch are written together.  If that fails, the definitions are tried one by one;
 * one that cannot be fired for what it says is disabled, with the error in it, and any other
 * stays due.
 */

create or replace function rota._fire_schedules(max_jobs integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
    set enable_sort = off
as $$
declare
    v_now constant timestamptz := rota.now();
    v_names text[];
    v_fired integer := 0;
begin
    -- Some are dealt with and make no job; of such ten batches are enough for a call.
    for v_batch in 1..10 loop
        exit when v_fired >= _fire_schedules.max_jobs or not exists (
            select from rota.job_definitions as d where d.next_run_at <= v_now
        );
        begin
            v_names := array(
                select d.name
                from rota.job_definitions as d
                where d.next_run_at <= v_now
                order by d.next_run_at
                limit _fire_schedules.max_jobs - v_fired
                for update skip locked
            );
            exit when v_names = '{}';
            v_fired := v_fired + rota._fire(
                v_names, v_now, _fire_schedules.max_jobs - v_fired);
        exception
            when others then
                raise warning 'schedules are fired one by one: %', sqlerrm;
                return v_fired + rota._fire_one_by_one(
                    v_now, _fire_schedules.max_jobs - v_fired);
        end;
    end loop;
    return v_fired;
end;
$$;

create or replace function rota._fire_one_by_one(due timestamptz, max_jobs integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_name text;
    v_fired integer := 0;
begin
    -- More than are wanted: those that stay due must not fill the call.
    for v_name in
        select d.name
        from rota.job_definitions as d
        where d.next_run_at <= _fire_one_by_one.due
        order by d.next_run_at
        limit 10 * _fire_one_by_one.max_jobs
    loop
        exit when v_fired >= _fire_one_by_one.max_jobs;
        -- The lock outlasts an error: what is disabled for it is still what could not be fired.
        begin
            perform
            from rota.job_definitions as d
            where d.name = v_name
              and d.next_run_at <= _fire_one_by_one.due
            for update skip locked;
            continue when not found;
            begin
                v_fired := v_fired + rota._fire(array[v_name], _fire_one_by_one.due, 1);
            exception
                when others then
                    perform rota._put_aside(v_name, sqlstate, sqlerrm);
            end;
        exception
            when others then
                raise warning 'schedule % stays due: %', v_name, sqlerrm;
        end;
    end loop;
    return v_fired;
end;
$$;

/*
 * Disable a definition that can never be fired, and that the caller holds; anything but its
 * data may be better soon.
 */
create or replace function rota._put_aside(name text, code text, problem text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if left(_put_aside.code, 2) not in ('22', '23', '42', '54', 'RT') then
        raise warning 'schedule % could not be fired and will be tried again: %',
            _put_aside.name, _put_aside.problem;
        return;
    end if;

    update rota.job_definitions as d
    set is_enabled = false,
        disabled_at = rota.now(),
        disabled_by = null,
        last_error = left(_put_aside.problem, 1000),
        next_run_at = null
    where d.name = _put_aside.name;
    raise warning 'schedule % is disabled: %', _put_aside.name, _put_aside.problem;
end;
$$;

/* Fire a definition that is about to change, if it is due, and return what it is then. */
create or replace function rota._fire_late(definition rota.job_definitions)
    returns rota.job_definitions
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_now constant timestamptz := rota.now();
begin
    if (definition.next_run_at <= v_now) is not true then
        return definition;
    end if;

    begin
        perform rota._fire(array[definition.name], v_now, 1);
    exception
        when others then
            if left(sqlstate, 2) not in ('22', '23', '42', '54', 'RT') then
                raise;
            end if;
            perform rota._put_aside(definition.name, sqlstate, sqlerrm);
    end;
    select d.* into definition from rota.job_definitions as d where d.name = definition.name;
    return definition;
end;
$$;

/*
 * Fire definitions that are due and that the caller holds: all of them, or the oldest until
 * that makes so many jobs, of which the last may have more.  Returns how many jobs it made.
 *
 * Steps from array to array, because the planner would have to guess at the size of anything
 * else.
 */
create or replace function rota._fire(names text[], due timestamptz, max_jobs integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
declare
    v_names text[];
    v_times timestamptz[];
    v_outcomes text[];
    v_lasts timestamptz[];
    v_nexts timestamptz[];
    v_made_names text[];
    v_made_times timestamptz[];
    v_made_ids bigint[];
begin
    select
        array_agg(p.name), array_agg(p.scheduled_for), array_agg(p.outcome),
        array_agg(p.last_run_at), array_agg(p.next_run_at)
    into v_names, v_times, v_outcomes, v_lasts, v_nexts
    from (
        select w.name, w.scheduled_for, w.outcome, w.last_run_at, w.next_run_at
        from rota._plan_due(_fire.names, _fire.due, _fire.max_jobs) as w
        order by w.scheduled_for, w.name
    ) as p;

    with new_fires as (
        insert into rota.fires as f (definition, scheduled_for, outcome, job_id, fired_at)
        select
            p.name, p.scheduled_for, p.outcome,
            case when p.outcome = 'fired' then nextval('rota.jobs_id_seq') end, _fire.due
        from unnest(v_names, v_times, v_outcomes) as p (name, scheduled_for, outcome)
        on conflict do nothing
        returning f.definition, f.scheduled_for, f.job_id
    )
    select
        coalesce(array_agg(n.definition), '{}'), array_agg(n.scheduled_for),
        array_agg(n.job_id)
    into v_made_names, v_made_times, v_made_ids
    from new_fires as n
    where n.job_id is not null;

    perform rota._make_jobs(v_made_names, v_made_times, v_made_ids, false, _fire.due);
    perform rota._move_on(v_names, v_lasts, v_nexts, v_made_names, v_made_ids);
    return cardinality(v_made_names);
end;
$$;

/* A row for each planned time that is dealt with, of as many definitions as _fire() takes. */
create or replace function rota._plan_due(names text[], due timestamptz, max_jobs integer)
    returns table (
        name text,
        scheduled_for timestamptz,
        outcome text,
        last_run_at timestamptz,
        next_run_at timestamptz
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_live constant text[] := rota._live_definitions(_plan_due.names);
    v_group record;
    v_plan record;
    v_taken text[];
    v_planned integer := 0;
begin
    for v_group in
        select
            d.schedule, d.time_zone, d.next_run_at, d.ends_at, d.catch_up, d.catch_up_window,
            d.catch_up_max, d.overlap,
            -- Nothing else has its times counted from there.
            case when d.kind = 'every' then d.anchored_at end as anchored_at,
            d.name = any(v_live) as is_live,
            d.kind = 'after' as is_after,
            array_agg(d.name) as names
        from rota.job_definitions as d
        where d.name = any(_plan_due.names)
        group by 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
        order by d.next_run_at
    loop
        select p.fires, p.last_run_at, p.next_run_at
        into v_plan
        from rota._plan_fires(
            v_group.schedule, v_group.time_zone, v_group.anchored_at, v_group.next_run_at,
            v_group.ends_at, v_group.catch_up, v_group.catch_up_window, v_group.catch_up_max,
            _plan_due.due) as p;
        v_taken := v_group.names[:greatest(
            1, (_plan_due.max_jobs - v_planned) / greatest(1, cardinality(v_plan.fires)))];
        return query
        select
            n.name, o.scheduled_for, o.outcome, v_plan.last_run_at,
            case when not (v_group.is_live and v_group.is_after) then v_plan.next_run_at end
        from unnest(v_taken) as n (name)
        cross join rota._outcomes(
            v_group.next_run_at, v_plan.fires, v_group.overlap, v_group.is_live) as o;
        v_planned := v_planned + cardinality(v_taken) * cardinality(v_plan.fires);
        exit when v_planned >= _plan_due.max_jobs;
    end loop;
end;
$$;

/* Those with a live job, of definitions to which that matters; to `after` only the last one. */
create or replace function rota._live_definitions(names text[])
    returns text[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return array(
        select j.definition
        from rota.jobs as j
        where j.definition is not null
          and j.definition = any(array(
            select d.name
            from rota.job_definitions as d
            where d.name = any(_live_definitions.names)
              and d.overlap = 'skip'
              and d.kind <> 'after'
        ))
        union
        select j.definition
        from rota.jobs as j
        where j.id = any(array(
            select d.last_job_id
            from rota.job_definitions as d
            where d.name = any(_live_definitions.names)
              and d.kind = 'after'
        ))
    );
end;
$$;

/*
 * The planned times that shall have a job, the last of all until now, and the next.
 *
 * skip and one are the same but for how late the newest time may be.  What is planned by the
 * end of the job before has but one time, which cannot be missed, only come later.
 */
create or replace function rota._plan_fires(
    schedule text,
    time_zone text,
    anchored_at timestamptz,
    first timestamptz,
    ends_at timestamptz,
    catch_up text,
    catch_up_window interval,
    catch_up_max integer,
    due timestamptz
)
    returns table (fires timestamptz[], last_run_at timestamptz, next_run_at timestamptz)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_parsed constant rota.parsed_schedule := rota._parse_schedule(_plan_fires.schedule);
    v_until constant timestamptz := least(_plan_fires.due, _plan_fires.ends_at);
    v_since constant timestamptz := _plan_fires.due - coalesce(
        _plan_fires.catch_up_window, case when catch_up = 'skip' then interval '1 minute' end);
    v_first timestamptz := first;
    v_next timestamptz;
begin
    fires := array[first];
    if v_parsed.kind = 'after' then
        v_next := rota._next_fire(v_parsed, time_zone, due, null);
    else
        -- What lies before the window is not even looked for: it may be a lot.
        if first < v_since then
            v_first := rota._next_fire(
                v_parsed, time_zone, v_since - interval '1 microsecond', anchored_at);
        end if;
        fires := array[]::timestamptz[];
        v_next := v_first;
        if v_first <= v_until then
            fires := array[v_first];
            v_next := rota._next_fire(v_parsed, time_zone, v_first, anchored_at);
        end if;
        if v_next <= v_until then
            fires := rota._fires_until(
                v_parsed, time_zone, anchored_at, v_first, v_until,
                case when catch_up = 'all' then catch_up_max else 1 end);
        end if;
        if v_next <= due then
            v_next := rota._next_fire(v_parsed, time_zone, due, anchored_at);
        end if;
    end if;

    last_run_at := coalesce(fires[cardinality(fires)], first);
    next_run_at := case when v_next > ends_at then null else v_next end;
    return next;
end;
$$;

/* What becomes of each of the times; of those that were missed the first stands for all. */
create or replace function rota._outcomes(
    first timestamptz,
    fires timestamptz[],
    overlap text,
    is_live boolean
)
    returns table (scheduled_for timestamptz, outcome text)
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if _outcomes.first <> all(_outcomes.fires) then
        scheduled_for := _outcomes.first;
        outcome := 'missed';
        return next;
    end if;
    for v_number in 1..cardinality(_outcomes.fires) loop
        scheduled_for := _outcomes.fires[v_number];
        -- The first of several that are late is live when it is the turn of the second.
        outcome := case
            when _outcomes.is_live then 'skipped'
            when _outcomes.overlap = 'skip' and v_number > 1 then 'skipped'
            else 'fired'
        end;
        return next;
    end loop;
end;
$$;

/* Put in the jobs of planned times that are theirs already. */
create or replace function rota._make_jobs(
    names text[],
    times timestamptz[],
    ids bigint[],
    is_manual boolean,
    made_at timestamptz
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_blocked bigint[];
begin
    with new_jobs as (
        insert into rota.jobs as j (
            id, queue, job_type, payload, priority, max_attempts, lease, backoff,
            ordering_key, skip_dead, if_parent_dead, bucket, definition, scheduled_for,
            status, run_at, created_at, updated_at
        )
        overriding system value
        select
            m.id, d.queue, d.job_type, d.payload, d.priority,
            coalesce(d.max_attempts, q.max_attempts, 10), d.lease, d.backoff,
            case when d.overlap = 'queue' then 'schedule:' || d.name end,
            case when d.overlap = 'queue' then true end,
            case when d.overlap = 'queue' then 'cancel' end,
            l.job_type || '|', d.name, m.scheduled_for,
            case when d.overlap = 'queue' then 'blocked' else 'queued' end,
            case
                when _make_jobs.is_manual then _make_jobs.made_at
                else m.scheduled_for + random() * d.jitter
            end,
            _make_jobs.made_at, _make_jobs.made_at
        from unnest(_make_jobs.names, _make_jobs.times, _make_jobs.ids)
            as m (name, scheduled_for, id)
        join rota.job_definitions as d on d.name = m.name
        left join rota.queues as q on q.queue = d.queue
        left join rota.limits as l on l.job_type = d.job_type
        returning j.id, j.status
    )
    select array_agg(n.id) into v_blocked from new_jobs as n where n.status = 'blocked';

    if v_blocked is not null then
        perform rota._note_new(v_blocked);
    end if;
    perform rota._ring_for(_make_jobs.ids);
end;
$$;

/* Write into the definitions what was dealt with, and what is next. */
create or replace function rota._move_on(
    names text[],
    lasts timestamptz[],
    nexts timestamptz[],
    made_names text[],
    made_ids bigint[]
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    with moved as (
        update rota.job_definitions as d
        set last_run_at = u.last_run_at,
            last_job_id = coalesce(u.job_id, d.last_job_id),
            next_run_at = case
                when u.job_id is null or d.kind <> 'after' then u.next_run_at
            end
        from (
            select
                p.name, max(p.last_run_at) as last_run_at, max(p.next_run_at) as next_run_at,
                max(p.job_id) as job_id
            from (
                select n.name, n.last_run_at, n.next_run_at, null::bigint as job_id
                from unnest(_move_on.names, _move_on.lasts, _move_on.nexts)
                    as n (name, last_run_at, next_run_at)
                union all
                select m.name, null, null, m.job_id
                from unnest(_move_on.made_names, _move_on.made_ids) as m (name, job_id)
            ) as p
            group by p.name
        ) as u
        where d.name = u.name
        returning d.name, d.kind, d.next_run_at, u.job_id
    )
    -- A last job that was live may be about to end without knowing that this waits for it.
    insert into rota.rechecks (due_at, kind, subject)
    select rota.now(), 'schedule', m.name
    from moved as m
    where m.next_run_at is null
      and m.job_id is null
      and m.kind = 'after';
end;
$$;

/*
 * Plan what follows the last job of a definition, if it has ended; false if that is not to be
 * known just now.  A live one is locked for a moment: whoever ends it later finds that its end
 * is waited for.
 */
create or replace function rota._recheck_schedule(name text)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_definition rota.job_definitions;
    v_next_run_at timestamptz;
begin
    select d.*
    into v_definition
    from rota.job_definitions as d
    where d.name = _recheck_schedule.name
    for update skip locked;
    if not found then
        return not exists (
            select from rota.job_definitions as d where d.name = _recheck_schedule.name
        );
    elsif not v_definition.is_enabled or v_definition.next_run_at is not null
      or v_definition.last_job_id is null or v_definition.kind <> 'after' then
        return true;
    end if;

    perform
    from rota.jobs as j
    where j.id = v_definition.last_job_id
    for key share skip locked;
    if found then
        return true;
    elsif rota._is_live(v_definition.last_job_id) then
        return false;
    end if;
    v_next_run_at := rota._plan_next(v_definition, '-infinity');
    update rota.job_definitions as d
    set next_run_at = v_next_run_at
    where d.name = v_definition.name;
    return true;
end;
$$;

/* Delete up to max_rows planned times; last_run_at stands for them. */
create or replace function rota._forget_fires(max_rows integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_deleted integer;
begin
    delete from rota.fires as f
    where (f.definition, f.scheduled_for) in (
        select o.definition, o.scheduled_for
        from rota.fires as o
        where o.fired_at < rota.now() - interval '90 days'
        order by o.fired_at
        limit _forget_fires.max_rows
        for update skip locked
    );
    get diagnostics v_deleted = row_count;
    return v_deleted;
end;
$$;
/*
 * 62_wakeups.sql -- wake workers that sleep, and nobody else.
 *
 * NOTIFY takes a lock of the whole cluster at each commit, so it is sent only when somebody
 * sleeps.  Who sleeps is told by advisory locks that the connection of a sleeping worker holds:
 * no row is written, and a worker that dies vanishes by itself.  A queue has three kinds:
 *
 *   the bell    held shared by everybody who sleeps.  Whoever brings a job tries to lock it
 *               alone: if that succeeds nobody sleeps, and that was all it costs.
 *   the doors   16, each held by one sleeper, who listens to the channel of his door.  The
 *               lowest that is held is rung: one job wakes one worker.
 *   the watch   held by one worker who does not sleep but looks again every few milliseconds,
 *               because jobs come all the time.  While it is held nobody is rung.
 *
 * The queue without a name stands for notes: whoever leaves one rings any worker of any queue,
 * since each of them deals with all notes before it claims.
 *
 * These are the only locks of sessions in rota, and nothing is right or wrong by them.  Held by
 * mistake, one costs a NOTIFY too many; lost, a job waits for the next poll.  Workers poll in
 * any case.
 *
 * Of a job whose transaction asked before the worker came to the door and commits after the
 * worker has looked, nobody hears.  Such a transaction has an id by then, so a worker at whose
 * coming none was under way has missed nothing; otherwise is_sure is false, and it looks again
 * soon.
 */

create or replace function rota.wait_for_jobs(
    queues text[] default '{default}',
    is_on_watch boolean default false
)
    returns table (
        queue text,
        channel text,
        is_first boolean,
        has_watch boolean,
        is_sure boolean,
        is_due boolean,
        has_upkeep boolean
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_queues text[];
    v_doors integer[] := '{}'::integer[];
    v_watches boolean[] := '{}'::boolean[];
begin
    perform rota._check_names('queues', wait_for_jobs.queues);
    perform rota._check_queues('worker', wait_for_jobs.queues);
    if wait_for_jobs.is_on_watch is null then
        perform rota._refuse('is_on_watch', 'must not be null');
    end if;
    -- What a session can lock is limited, and so each queue costs the others something.
    v_queues := array[''] || wait_for_jobs.queues[1:100];

    perform pg_advisory_unlock_all();
    -- Also where all doors of the notes are taken.
    perform pg_advisory_lock_shared(1919907936, hashtext(''));
    for v_place in 1..cardinality(v_queues) loop
        v_doors[v_place] := rota._take_door(v_queues[v_place]);
        v_watches[v_place] := v_doors[v_place] is not null and wait_for_jobs.is_on_watch
            and pg_try_advisory_lock(1919907937, hashtext(v_queues[v_place]));
    end loop;

    -- The next id is the oldest that is not over: so there is no writer at all.  A transaction
    -- asks for the next id once, hence after all locks.
    is_sure := age(pg_snapshot_xmin(pg_current_snapshot())::xid) = 0;
    is_due := rota._is_any_due(wait_for_jobs.queues, null);
    has_upkeep := rota._has_upkeep();
    return query
    select
        d.queue, case when d.door is not null then rota._channel(d.queue, d.door) end,
        d.door is not distinct from 0, d.has_watch, is_sure, is_due, has_upkeep
    from unnest(v_queues, v_doors, v_watches) as d (queue, door, has_watch);
end;
$$;

comment on function rota.wait_for_jobs(text[], boolean) is
    'Take a door of each of these queues, and of the one of notes whose name is empty, instead '
    'of those that this session had: listen to the channels and then claim, unless it listened '
    'before and nothing is_due; has_watch says that nobody is rung while this worker looks '
    'every few milliseconds; channel is null where all doors are taken; raises 22023.';

/* Take the lowest free door of a queue, and then be among those who may be rung. */
create or replace function rota._take_door(queue text)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_key constant integer := hashtext(_take_door.queue);
begin
    for v_door in 0..15 loop
        if pg_try_advisory_lock(1919907938 + v_door, v_key) then
            perform pg_advisory_lock_shared(1919907936, v_key);
            return v_door;
        end if;
    end loop;
    return null;
end;
$$;

create or replace function rota.stop_waiting(queues text[] default '{default}')
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_names('queues', stop_waiting.queues);
    perform rota._check_queues('worker', stop_waiting.queues);

    perform pg_advisory_unlock_all();
    perform rota._ring(q.queue)
    from unnest(array[''] || stop_waiting.queues[1:100]) as q (queue);
end;
$$;

comment on function rota.stop_waiting(text[]) is
    'Give back all doors of this session because its worker is full, and ring the next sleeper '
    'of these queues; raises 22023.';

/*
 * Workers of one queue may take different job types, and who is rung or on watch may not be the
 * one who takes the job.  The message keeps those who are rung by this from passing it on.
 */
create or replace function rota.ring_others(
    queues text[] default '{default}',
    job_types text[] default null
)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_names('queues', ring_others.queues);
    perform rota._check_queues('worker', ring_others.queues);
    if ring_others.job_types is null then
        return false;
    end if;
    perform rota._check_names('job_types', ring_others.job_types);

    if not rota._is_any_due(ring_others.queues, ring_others.job_types) then
        return false;
    end if;
    perform rota._ring_doors(q.queue, 16, 'other')
    from unnest(ring_others.queues[1:100]) as q (queue);
    return true;
end;
$$;

comment on function rota.ring_others(text[], text[]) is
    'Ring all other sleepers of these queues, with the message other, if a job of another type '
    'than these is due, and return whether one is; raises 22023.';

/*
 * Whether these queues have a due job of other types than these; or, with null, anything that a
 * claim may have to do.  True also where a queue has more priorities than are looked at.
 */
create or replace function rota._is_any_due(queues text[], job_types text[])
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
    set enable_sort = off
as $$
declare
    v_now constant timestamptz := rota.now();
    v_queue text;
    v_priority integer;
begin
    -- Under a held snapshot a look takes long, and a claim knows better where to begin.
    if _is_any_due.job_types is null
      and (rota._hint('due'))[1] > extract(epoch from v_now) * 1000000 then
        return true;
    end if;
    if _is_any_due.job_types is null and (
        exists (select from rota.rechecks as r where r.due_at <= v_now)
        or exists (
            select
            from rota.buckets as b
            where b.queue = any(_is_any_due.queues)
              and b.waits_for is null
        )
    ) then
        return true;
    end if;

    if rota._is_any_in_line(_is_any_due.queues, _is_any_due.job_types, v_now) then
        return true;
    end if;

    foreach v_queue in array _is_any_due.queues loop
        v_priority := -32769;
        for v_lane in 1..11 loop
            select j.priority::integer
            into v_priority
            from rota.jobs as j
            where j.queue = v_queue
              and j.bucket is null
              and j.status in ('queued', 'failed')
              and j.priority > v_priority
            order by j.priority
            limit 1;
            exit when not found;
            if v_lane = 11 or exists (
                select
                from rota.jobs as j
                where j.queue = v_queue
                  and j.priority = v_priority
                  and j.bucket is null
                  and j.status in ('queued', 'failed')
                  and j.run_at <= v_now
                  and (_is_any_due.job_types is null
                    or j.job_type <> all(_is_any_due.job_types))
            ) then
                return true;
            end if;
        end loop;
    end loop;
    if rota.now() - v_now > interval '5 ms' then
        perform rota._keep_hint('due', array[
            (extract(epoch from v_now + interval '1 minute') * 1000000)::bigint]);
    end if;
    return false;
end;
$$;

/* Whether lines have a due job of other types than these; asked of the first jobs of some. */
create or replace function rota._is_any_in_line(
    queues text[],
    job_types text[],
    due timestamptz
)
    returns boolean
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select
        from (
            select b.queue, b.bucket
            from rota.buckets as b
            where b.queue = any(_is_any_in_line.queues)
              and b.waits_for is null
            limit 100
        ) as l
        cross join lateral (
            select j.job_type
            from rota.jobs as j
            where j.queue = l.queue
              and j.bucket = l.bucket
              and j.status in ('queued', 'failed')
              and j.run_at <= _is_any_in_line.due
            limit 10
        ) as d
        where d.job_type <> all(_is_any_in_line.job_types)
    );
end;
$$;

/* Ring up to max_doors sleepers of a queue, if there are any and nobody is on watch. */
create or replace function rota._ring(queue text, max_doors integer default 1)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_key constant integer := hashtext(_ring.queue);
begin
    -- Nothing can come between the two halves of such a line, so no lock is left behind.
    if not (pg_try_advisory_lock(1919907936, v_key)
        and pg_advisory_unlock(1919907936, v_key))
      and pg_try_advisory_lock_shared(1919907937, v_key)
      and pg_advisory_unlock_shared(1919907937, v_key) then
        perform rota._ring_doors(_ring.queue, _ring.max_doors, '');
    end if;
end;
$$;

create or replace function rota._ring_doors(queue text, max_doors integer, message text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_key constant integer := hashtext(_ring_doors.queue);
    v_rung integer := 0;
begin
    -- Where somebody else has filled it a commit would fail; and a transaction that has
    -- notified cannot be prepared, so who prepares them says so.  Workers poll in any case.
    if pg_notification_queue_usage() > 0.5 or current_setting('rota.wakeups', true) = 'off' then
        return;
    end if;

    for v_door in 0..15 loop
        continue when pg_try_advisory_lock_shared(1919907938 + v_door, v_key)
          and pg_advisory_unlock_shared(1919907938 + v_door, v_key);
        perform pg_notify(rota._channel(_ring_doors.queue, v_door), _ring_doors.message);
        v_rung := v_rung + 1;
        exit when v_rung >= _ring_doors.max_doors;
    end loop;
end;
$$;

/* Ring for jobs that may be claimable now: as many sleepers as there are such jobs. */
create or replace function rota._ring_for(job_ids bigint[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    c_waiting constant text[] := '{queued,failed}'::text[];
begin
    -- The empty name is that of all who sleep.
    if pg_try_advisory_lock(1919907936, hashtext(''))
      and pg_advisory_unlock(1919907936, hashtext('')) then
        return;
    end if;

    perform rota._ring(d.queue, d.jobs)
    from (
        select
            j.queue,
            greatest(1, count(*) filter (where j.run_at <= rota.now()))::integer as jobs
        from rota.jobs as j
        where j.id = any(_ring_for.job_ids)
          and j.status = any(c_waiting)
          and j.run_at < rota.now() + rota._soon()
        group by j.queue
    ) as d;
end;
$$;

/* The same for new jobs in the form of enqueue_many(), without looking them up. */
create or replace function rota._ring_for_new(jobs jsonb)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_try_advisory_lock(1919907936, hashtext(''))
      and pg_advisory_unlock(1919907936, hashtext('')) then
        return;
    end if;

    perform rota._ring(d.queue, d.jobs)
    from (
        select
            coalesce(n.job ->> 'queue', 'default') as queue,
            greatest(1, count(*) filter (where n.job ->> 'delay' is null))::integer as jobs
        from jsonb_array_elements(_ring_for_new.jobs) as n (job)
        where coalesce((n.job ->> 'delay')::interval < rota._soon(), true)
          and coalesce((n.job ->> 'run_at')::timestamptz < rota.now() + rota._soon(), true)
        group by 1
    ) as d;
end;
$$;

/* What is due later than this is seen by a poll in time, as polls are a second apart. */
create or replace function rota._soon()
    returns interval
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return interval '2 seconds';
end;
$$;

/* The channel of a door. */
create or replace function rota._channel(queue text, door integer)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return format('rota_%s_%s', to_hex(hashtext(_channel.queue)), _channel.door);
end;
$$;
/*
 * 63_round_trip.sql -- report, keep and claim in one call.
 *
 * A worker that finishes a job asks for the next one anyway.  In one call both are one round
 * trip and, what counts for more, one commit: a job singly then costs one flush to disk and not
 * two.  Nothing new is decided here: the call is finish_jobs(), heartbeat_jobs() and
 * claim_jobs(), in this order, in one transaction.
 *
 * What went as asked is not told.  So most calls return new jobs and nothing else.
 */

create or replace function rota.finish_and_claim(
    worker text,
    job_ids bigint[] default '{}',
    lease_tokens bigint[] default '{}',
    results jsonb default null,
    next_stages text[] default null,
    kept_job_ids bigint[] default '{}',
    kept_lease_tokens bigint[] default '{}',
    queues text[] default '{default}',
    max_jobs integer default 1,
    lease interval default null,
    job_types text[] default null
)
    returns table (
        outcome text,
        job_id bigint,
        lease_token bigint,
        queue text,
        job_type text,
        payload jsonb,
        priority smallint,
        attempt integer,
        max_attempts integer,
        run_at timestamptz,
        locked_until timestamptz,
        locked_for interval,
        idempotency_key text,
        created_at timestamptz,
        pipeline text,
        stage text,
        stage_input jsonb,
        definition text,
        scheduled_for timestamptz
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if (finish_and_claim.job_ids = '{}' and finish_and_claim.lease_tokens = '{}'
        and finish_and_claim.results is null
        and finish_and_claim.next_stages is null) is not true then
        return query
        select
            f.outcome, f.job_id, t.lease_token, null, null, null::jsonb, null::smallint,
            null::integer, null::integer, null::timestamptz, null::timestamptz,
            null::interval, null, null::timestamptz, null, null, null::jsonb, null,
            null::timestamptz
        from rota.finish_jobs(
            finish_and_claim.job_ids, finish_and_claim.lease_tokens, finish_and_claim.results,
            finish_and_claim.next_stages) with ordinality as f (job_id, outcome, ordinal)
        join unnest(finish_and_claim.lease_tokens)
            with ordinality as t (lease_token, ordinal) on t.ordinal = f.ordinal
        where f.outcome in ('lost', 'busy');
    end if;
    if (finish_and_claim.kept_job_ids = '{}'
        and finish_and_claim.kept_lease_tokens = '{}') is not true then
        perform rota._check_job_refs(
            finish_and_claim.kept_job_ids, finish_and_claim.kept_lease_tokens, 'kept_');
        return query
        select
            case when h.is_lost then 'lost' when h.locked_until is null then 'busy'
                else 'cancel_requested' end,
            h.job_id, t.lease_token, null, null, null::jsonb, null::smallint,
            null::integer, null::integer, null::timestamptz, h.locked_until,
            null::interval, null, null::timestamptz, null, null, null::jsonb, null,
            null::timestamptz
        from rota.heartbeat_jobs(
            finish_and_claim.kept_job_ids, finish_and_claim.kept_lease_tokens,
            finish_and_claim.lease) with ordinality
            as h (job_id, locked_until, is_lost, is_cancel_requested, ordinal)
        join unnest(finish_and_claim.kept_lease_tokens)
            with ordinality as t (lease_token, ordinal) on t.ordinal = h.ordinal
        where h.is_lost or h.locked_until is null or h.is_cancel_requested;
    end if;
    return query
    select
        'claimed', c.job_id, c.lease_token, c.queue, c.job_type, c.payload, c.priority,
        c.attempt, c.max_attempts, c.run_at, c.locked_until, c.locked_for, c.idempotency_key,
        c.created_at, c.pipeline, c.stage, c.stage_input, c.definition, c.scheduled_for
    from rota.claim_jobs(
        finish_and_claim.worker, finish_and_claim.queues, finish_and_claim.max_jobs,
        finish_and_claim.lease, finish_and_claim.job_types) as c;
end;
$$;

comment on function rota.finish_and_claim(
    text, bigint[], bigint[], jsonb, text[], bigint[], bigint[], text[], integer, interval,
    text[]) is
    'Finish jobs, extend the leases of kept ones and claim new ones in one round trip: rows of '
    'claim_jobs() with outcome claimed, and one for each job that is lost, busy (ask again) '
    'or, of the kept ones, cancel_requested; raises 22023 or RT009.';
/*
 * 64_queue_grants.sql -- confine a role to some queues.
 *
 * The grants of the schema say what a role may call (90_grants.sql), these in which queues.
 * Nothing is asked as long as the table is empty: whoever is fast asks first of all whether it
 * is, in a statement that he makes anyway.
 *
 * A function that runs with its owner's rights does not see who called it as current_user.
 * The caller is the role that he has set, and else the one that he came as.  He can set only a
 * role that he is a member of; but that of all workers is one too, so who sets a role that is
 * confined to nothing is still confined as the one that he came as.
 *
 * A job of another queue is for a confined worker not there: RT001.  The upkeep that his tick()
 * does is for all queues, since recovery must not depend on who is there.
 */

create or replace function rota.grant_queue(
    role name,
    queue text,
    access text default 'worker'
)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform rota._check_queue_grant(grant_queue.role, grant_queue.queue, grant_queue.access);

    insert into rota.queue_grants as g (role, access, queue, granted_at)
    values (
        to_regrole(quote_ident(grant_queue.role)), grant_queue.access, grant_queue.queue,
        rota.now()
    )
    on conflict on constraint queue_grants_pkey do update
    set granted_at = rota.now(),
        revoked_at = null
    where g.revoked_at is not null;
    return found;
end;
$$;

comment on function rota.grant_queue(name, text, text) is
    'Let a role work in a queue, or enqueue to it with the access producer, and from then on '
    'in no queue that was not granted; * is all queues; false if it may already; for the owner '
    'alone; raises 22023.';

create or replace function rota.revoke_queue(
    role name,
    queue text,
    access text default 'worker'
)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_queue_grant(revoke_queue.role, revoke_queue.queue, revoke_queue.access);

    update rota.queue_grants as g
    set revoked_at = rota.now()
    where g.role = to_regrole(quote_ident(revoke_queue.role))
      and g.access = revoke_queue.access
      and g.queue = revoke_queue.queue
      and g.revoked_at is null;
    return found;
end;
$$;

comment on function rota.revoke_queue(name, text, text) is
    'Take back what grant_queue() gave: the role stays confined to its other queues, also if '
    'there is none; false if there was nothing to take; for the owner alone; raises 22023.';

create or replace function rota._check_queue_grant(role name, queue text, access text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regrole(quote_ident(_check_queue_grant.role)) is null then
        perform rota._refuse('role', format('%L does not exist', _check_queue_grant.role));
    elsif _check_queue_grant.access is null
      or _check_queue_grant.access not in ('producer', 'worker') then
        perform rota._refuse('access', format(
            'must be producer or worker, got %L', left(_check_queue_grant.access, 80)));
    elsif _check_queue_grant.queue is distinct from '*' then
        perform rota._check_name('queue', _check_queue_grant.queue);
    end if;
end;
$$;

/* The queues in which whoever calls may do this; null for all. */
create or replace function rota._allowed_queues(access text)
    returns text[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_role constant name := nullif(current_setting('role'), 'none')::name;
    v_queues text[];
begin
    if v_role is not null then
        v_queues := rota._granted_queues(v_role, _allowed_queues.access);
    end if;
    if v_queues is null then
        v_queues := rota._granted_queues(session_user, _allowed_queues.access);
    end if;
    return case when '*' <> all(v_queues) then v_queues end;
end;
$$;

/* The queues that a role was granted, itself or as a member of others; null if it never was. */
create or replace function rota._granted_queues(role name, access text)
    returns text[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select case
            when count(*) > 0
            then coalesce(array_agg(g.queue) filter (where g.revoked_at is null), '{}')
        end
        from rota.queue_grants as g
        join pg_roles as r on r.oid = g.role
        join pg_roles as me on me.rolname = _granted_queues.role and not me.rolsuper
        where g.access = _granted_queues.access
          and pg_has_role(me.oid, r.oid, 'member')
    );
end;
$$;

/* Refuse queues in which whoever calls may not do this. */
create or replace function rota._check_queues(access text, queues text[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_allowed text[];
    v_queue text;
begin
    if not exists (select from rota.queue_grants) then
        return;
    end if;
    v_allowed := rota._allowed_queues(_check_queues.access);
    select q.queue into v_queue
    from unnest(_check_queues.queues) as q (queue)
    where q.queue <> all(v_allowed)
    limit 1;
    if found then
        raise exception using
            errcode = 'insufficient_privilege',
            message = format('no right to %s queue %s',
                case _check_queues.access when 'worker' then 'work in' else 'enqueue to' end,
                v_queue),
            hint = 'This role is confined to the queues that grant_queue() gave it; name them.';
    end if;
end;
$$;

/* Refuse a queue to whoever may not enqueue to it, as part of a statement. */
create or replace function rota._checked_queue(queue text)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_queues('producer', array[_checked_queue.queue]);
    return _checked_queue.queue;
end;
$$;

/* The same for new jobs in the form of enqueue_many(). */
create or replace function rota._check_queues_of(jobs jsonb)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if exists (select from rota.queue_grants) then
        perform rota._check_queues('producer', array(
            select distinct coalesce(j.job ->> 'queue', 'default')
            from jsonb_array_elements(_check_queues_of.jobs) as j (job)
        ));
    end if;
end;
$$;

/* The same for jobs that are there. */
create or replace function rota._check_queues_of_jobs(job_ids bigint[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
begin
    if exists (select from rota.queue_grants) then
        perform rota._check_queues('producer', array(
            select distinct j.queue
            from rota.jobs as j
            where j.id = any(_check_queues_of_jobs.job_ids)
        ));
    end if;
end;
$$;

/* Of these jobs those that are of queues in which whoever calls may not work. */
create or replace function rota._foreign_jobs(job_ids bigint[])
    returns bigint[]
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
declare
    v_allowed text[];
begin
    if not exists (select from rota.queue_grants) then
        return '{}'::bigint[];
    end if;
    v_allowed := rota._allowed_queues('worker');
    return array(
        select j.id
        from rota.jobs as j
        where j.id = any(_foreign_jobs.job_ids)
          and j.queue <> all(v_allowed)
        union all
        select f.id
        from rota.finished_jobs as f
        where f.id = any(_foreign_jobs.job_ids)
          and f.queue <> all(v_allowed)
    );
end;
$$;
/*
 * 65_next_due.sql -- when a worker that sleeps has to look again.
 *
 * Nobody rings when a time comes: of a retry, of a later run_at, of the next start at a rate.
 * So a worker that sleeps asks for it, and looks again then and not only at the next poll.
 * What has come due since its last look it has to look for at once.  Who is asleep when
 * something new is due before the next poll is rung for it, and asks again.
 *
 * What is in a line counts by its note, or by its rate while it takes turns.  Each queue is
 * asked about by its own workers, so none has to be awake for another.
 */

create or replace function rota.next_due_in(
    queues text[] default '{default}',
    since interval default '0'
)
    returns interval
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
    set enable_sort = off
as $$
declare
    v_now constant timestamptz := rota.now();
    v_slow_until constant timestamptz := 'epoch'::timestamptz
        + (rota._hint('next'))[1] * interval '1 microsecond';
    v_since timestamptz;
    v_next timestamptz := v_now + interval '1 minute';
begin
    perform rota._check_names('queues', next_due_in.queues);
    perform rota._check_queues('worker', next_due_in.queues);
    perform rota._check_interval('since', next_due_in.since, '0', '1 hour');
    -- Under a held snapshot a look takes long, and is worth it now and then.
    if v_slow_until > v_now and v_slow_until <= v_next then
        return v_slow_until - v_now;
    end if;

    v_since := v_now - next_due_in.since;
    v_next := least(
        v_next,
        rota._next_note_at(next_due_in.queues, v_since),
        rota._next_start_at(next_due_in.queues, v_since));
    v_next := least(v_next, (
        select min(rota._next_run_at(c.queue, v_since, v_next))
        from unnest(next_due_in.queues[1:100]) as c (queue)
        left join rota.queues as q on q.queue = c.queue
        where q.is_paused is not true
    ));

    if rota.now() - v_now > interval '5 ms' then
        perform rota._keep_hint('next', array[(extract(epoch from
            v_now + least(20 * (rota.now() - v_now), '1 minute')) * 1000000)::bigint]);
    end if;
    return case when v_next < v_now + interval '1 minute'
        then greatest(v_next - v_now, '0') end;
end;
$$;

comment on function rota.next_due_in(text[], interval) is
    'Return how long it is until something comes due in these queues, a job or the next start '
    'at a rate, and 0 if something has since the caller looked, since ago; null if that is a '
    'minute or more; where a look takes long, when to ask again; raises 22023.';

/* The next look at a line of these queues, because of a later job or of a rate. */
create or replace function rota._next_note_at(queues text[], since timestamptz)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select min(n.due_at)
        from (
            select r.due_at, r.kind, r.subject
            from rota.rechecks as r
            where r.due_at > _next_note_at.since
            order by r.due_at, r.id
            limit 100
        ) as n
        where n.kind = 'bucket' and split_part(n.subject, ' ', 1) = any(_next_note_at.queues)
           or n.kind = 'limit' and exists (
            select
            from rota.buckets as b
            where b.waits_for = n.subject
              and b.queue = any(_next_note_at.queues)
        )
    );
end;
$$;

/* The next start at a rate of these queues, or of their lines that are not parked. */
create or replace function rota._next_start_at(queues text[], since timestamptz)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select min(p.paid_at)
        from (
            select l.limit_name, l.max_starts, l.per, l.burst
            from rota.limits as l
            where l.queue = any(_next_start_at.queues)
            union
            select l.limit_name, l.max_starts, l.per, l.burst
            from (
                select b.bucket
                from rota.buckets as b
                where b.queue = any(_next_start_at.queues)
                  and b.waits_for is null
                limit 20
            ) as w
            cross join lateral rota._limits_of(w.bucket) as l
        ) as r
        cross join lateral rota._paid_at(
            r.limit_name, rota._gap(r.max_starts, r.per), r.burst) as p (paid_at)
        where p.paid_at > _next_start_at.since
    );
end;
$$;

/* The first run_at between these times in the common line of a queue. */
create or replace function rota._next_run_at(
    queue text,
    after timestamptz,
    before timestamptz
)
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_priority bigint := -32769::bigint;
    v_run_at timestamptz;
    v_first timestamptz;
begin
    for v_lane in 1..10 loop
        v_priority := rota._next_lane(array[_next_run_at.queue], v_priority, null);
        exit when v_priority is null;
        select min(j.run_at)
        into v_run_at
        from rota.jobs as j
        where j.queue = _next_run_at.queue
          and j.priority = v_priority
          and j.bucket is null
          and j.status in ('queued', 'failed')
          and j.run_at > _next_run_at.after
          and j.run_at < _next_run_at.before;
        v_first := least(v_first, v_run_at);
    end loop;
    return v_first;
end;
$$;
/*
 * 70_views.sql -- what people and dashboards read.
 *
 * The columns of a view are an interface and those of a table are not.  Replacing a view can
 * only add columns at its end; an upgrade that needs more drops the view first.
 */

create or replace view rota.job_runs as
select
    j.id, j.queue, j.job_type, j.payload, j.priority, j.run_at, j.status, j.attempts,
    j.max_attempts, j.locked_by, j.locked_until, j.lease_token, j.idempotency_key,
    j.progress_percent, j.progress_message, j.cancel_requested_at, j.cancel_reason,
    j.last_error, j.error_type, j.failed_at, j.created_at, j.updated_at, j.started_at,
    null::timestamptz as finished_at, null::jsonb as result,
    j.ordering_key, j.limit_key, j.pipeline, j.stage, j.first_job_id, j.stage_input,
    j.definition, j.scheduled_for
from rota.jobs as j
union all
select
    f.id, f.queue, f.job_type, f.payload, f.priority, f.run_at, f.status, f.attempts,
    f.max_attempts, f.locked_by, null::timestamptz, f.lease_token, f.idempotency_key,
    f.progress_percent, f.progress_message, f.cancel_requested_at, f.cancel_reason,
    f.last_error, f.error_type, f.failed_at, f.created_at, f.updated_at, f.started_at,
    f.finished_at, f.result,
    f.ordering_key, f.limit_key, f.pipeline, f.stage, f.first_job_id, f.stage_input,
    f.definition, f.scheduled_for
from rota.finished_jobs as f;

comment on view rota.job_runs is 'Every job, live or ended, one row each, in one shape.';

create or replace view rota.queue_stats as
select
    n.queue,
    coalesce(q.is_paused, false) as is_paused,
    coalesce(l.ready, 0) as ready,
    coalesce(l.scheduled, 0) as scheduled,
    coalesce(l.retrying, 0) as retrying,
    coalesce(l.running, 0) as running,
    coalesce(l.blocked, 0) as blocked,
    coalesce(d.dead, 0) as dead,
    rota.now() - l.oldest_ready_at as oldest_ready_age,
    l.next_run_at
from (
    select q.queue from rota.queues as q
    union
    select j.queue from rota.jobs as j
    union
    select f.queue from rota.finished_jobs_dead as f
) as n
left join rota.queues as q on q.queue = n.queue
left join (
    select
        j.queue,
        count(*) filter (where j.status in ('queued', 'failed') and j.is_due) as ready,
        count(*) filter (where j.status = 'queued' and not j.is_due) as scheduled,
        count(*) filter (where j.status = 'failed' and not j.is_due) as retrying,
        count(*) filter (where j.status = 'running') as running,
        count(*) filter (where j.status = 'blocked') as blocked,
        min(j.run_at) filter (where j.status in ('queued', 'failed') and j.is_due)
            as oldest_ready_at,
        min(j.run_at) filter (where j.status in ('queued', 'failed') and not j.is_due)
            as next_run_at
    from (
        select i.queue, i.status, i.run_at, i.run_at <= n.now as is_due
        from rota.jobs as i
        cross join (select rota.now() as now) as n
    ) as j
    group by j.queue
) as l on l.queue = n.queue
left join (
    select f.queue, count(*) as dead from rota.finished_jobs_dead as f group by f.queue
) as d on d.queue = n.queue;

comment on view rota.queue_stats is
    'One row per queue: how many jobs are ready, scheduled for later, waiting for a retry, '
    'running, blocked or dead, and how long the oldest ready one has waited.';

create or replace view rota.running_jobs as
select
    j.id, j.queue, j.job_type, j.attempts, j.max_attempts, j.locked_by, j.started_at,
    rota.now() - j.started_at as running_for, j.locked_until, j.updated_at,
    j.progress_percent, j.progress_message, j.cancel_requested_at, j.cancel_reason
from rota.jobs as j
where j.status = 'running'
  and j.locked_until is not null;

comment on view rota.running_jobs is 'Jobs that a worker holds now, with their progress.';

create or replace view rota.stale_jobs as
select
    j.id, j.queue, j.job_type, j.attempts, j.max_attempts, j.locked_by, j.started_at,
    j.locked_until, j.updated_at, j.locked_until < rota.now() as is_lease_over
from rota.jobs as j
where j.status = 'running'
  and j.locked_until is not null
  and (j.locked_until < rota.now() or j.updated_at < rota.now() - interval '1 hour');

comment on view rota.stale_jobs is
    'Running jobs to look at: the lease is over and nobody swept yet, or there was no sign of '
    'life for an hour.';

create or replace view rota.dead_jobs as
select
    f.id, f.queue, f.job_type, f.payload, f.attempts, f.max_attempts, f.last_error,
    f.error_type, f.locked_by, f.created_at, f.failed_at, f.finished_at
from rota.finished_jobs_dead as f;

comment on view rota.dead_jobs is
    'Jobs that were given up; retry_job(id) gives one all its attempts again.';

create or replace view rota.error_groups as
select
    e.queue, e.job_type, e.error_type, left(e.message, 1000) as message,
    count(*) as failures,
    count(distinct e.job_id) as jobs,
    min(e.failed_at) as first_failed_at,
    max(e.failed_at) as last_failed_at,
    max(e.job_id) as last_job_id
from rota.job_errors as e
group by 1, 2, 3, 4;

comment on view rota.error_groups is 'Failed attempts grouped by the text of the error.';

create or replace view rota.hourly_stats as
select
    date_trunc('hour', f.finished_at) as hour, f.queue, f.job_type,
    count(*) filter (where f.status = 'succeeded') as succeeded,
    count(*) filter (where f.status = 'dead') as dead,
    count(*) filter (where f.status = 'cancelled') as cancelled,
    sum(d.duration) as total_duration,
    avg(d.duration) as average_duration,
    max(d.duration) as longest_duration
from rota.finished_jobs as f
cross join lateral (
    -- Nobody holds a job that is cancelled while it waits for its next try.
    select case when f.locked_by is not null then f.finished_at - f.started_at end as duration
) as d
group by 1, 2, 3;

comment on view rota.hourly_stats is
    'Ended jobs by hour of the session''s time zone, queue and job type; durations are of the '
    'attempts that ended them.';

create or replace view rota.limit_stats as
select
    n.limit_name, l.max_running, coalesce(w.running, 0) as running,
    coalesce(w.waiting, 0) as waiting,
    l.max_starts, coalesce(l.per, '1 second') as per, coalesce(l.burst, 1) as burst,
    case when l.max_starts is not null then greatest(
        rota.now(),
        -- As _used_until() has it.  The microsecond is for a gap that was rounded up.
        case when t.used_until <= rota.now() + coalesce(l.burst, 1)
            * (coalesce(l.per, '1 second') / l.max_starts + interval '1 microsecond')
        then t.used_until
            - (coalesce(l.burst, 1) - 1) * coalesce(l.per, '1 second') / l.max_starts
        end)
    end as next_start_at
from (
    select l.limit_name
    from rota.limits as l
    where l.limit_key is null
      or l.limit_key !~ ':[*]$'
    union
    select t.limit_name from rota.limit_states as t
    union
    select s.limit_name from rota.slots as s
) as n
cross join lateral (
    select l.max_running, l.max_starts, l.per, l.burst
    from rota.limits as l
    where l.limit_name in (
        n.limit_name, substring(n.limit_name, '^key [^:]*:') || '*')
    order by l.limit_name = n.limit_name desc
    limit 1
) as l
left join rota.limit_states as t on t.limit_name = n.limit_name
left join (
    select
        k.limit_name,
        count(*) filter (where j.status = 'running') as running,
        count(*) filter (where j.status <> 'running') as waiting
    from rota.jobs as j
    cross join lateral (
        values ('queue ' || j.queue), ('type ' || j.job_type), ('key ' || j.limit_key)
    ) as k (limit_name)
    where j.status = 'running'
       or j.status in ('queued', 'failed') and j.run_at <= rota.now()
    group by 1
) as w on w.limit_name = n.limit_name
-- Not before the row is chosen: a key with a weight of its own has no other limit.
where num_nonnulls(l.max_running, l.max_starts) > 0;

comment on view rota.limit_stats is
    'One row per limit in use: how many jobs run under it, how many due ones wait for whatever '
    'reason, and when the next may start at its rate.';

create or replace view rota.ticker_health as
select
    nullif(u.done_at, '-infinity') as last_tick_at,
    u.done_by as last_tick_by,
    n.now - coalesce(nullif(u.done_at, '-infinity'), i.applied_at) as lag,
    d.schedules_overdue,
    n.now - d.next_run_at as oldest_overdue,
    b.schedules_broken
from rota.upkeep as u
join rota.upgrade_log as i on i.id = 0
cross join (select rota.now() as now) as n
cross join lateral (
    select count(*) as schedules_overdue, min(o.next_run_at) as next_run_at
    from rota.job_definitions as o
    where o.next_run_at < n.now - interval '1 minute'
) as d
cross join lateral (
    select count(*) as schedules_broken
    from rota.job_definitions as o
    where not o.is_enabled and o.disabled_by is null
) as b
where u.task = 'tick';

comment on view rota.ticker_health is
    'The last tick that was recorded, by whom and how long ago, how many schedules should have '
    'fired more than a minute ago, and how many an error has disabled.';
comment on column rota.ticker_health.lag is
    'Ticks are recorded every 10 seconds, or 5 minutes while they find nothing to do; before '
    'the first, the time since the installation.';
/*
 * 90_grants.sql -- who may do what.
 *
 * One list, _access(), says which kind of access needs which function or view.  All functions
 * run with the owner's rights, so execute is all that anybody needs; no table is granted to
 * anybody.  `create or replace` keeps old grants, so each install takes everything away from
 * public and from our roles, and grants it again from the list.
 *
 * Where the roles cannot be created, grant_statements() prints the same list for any role.
 */

create or replace function rota._access()
    returns table (access text, kind text, name text)
    language sql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
values
    ('producer', 'function', 'enqueue'),
    ('producer', 'function', 'enqueue_many'),
    ('producer', 'function', 'start_pipeline'),
    ('worker', 'procedure', 'tick_loop'),
    ('observer', 'view', 'job_runs'),
    ('observer', 'view', 'queue_stats'),
    ('observer', 'view', 'running_jobs'),
    ('observer', 'view', 'stale_jobs'),
    ('observer', 'view', 'dead_jobs'),
    ('observer', 'view', 'error_groups'),
    ('observer', 'view', 'hourly_stats'),
    ('observer', 'view', 'workers'),
    ('observer', 'view', 'queues'),
    ('observer', 'view', 'job_errors'),
    ('observer', 'view', 'effects'),
    ('observer', 'view', 'dependencies'),
    ('observer', 'view', 'stuck_keys'),
    ('observer', 'view', 'pipeline_stages'),
    ('observer', 'view', 'limits'),
    ('observer', 'view', 'job_definitions'),
    ('observer', 'view', 'fires'),
    ('observer', 'view', 'queue_grants'),
    ('observer', 'view', 'limit_stats'),
    ('observer', 'view', 'ticker_health'),
    ('operator', 'function', 'retry_job'),
    ('operator', 'function', 'cancel_job'),
    ('operator', 'function', 'set_priority'),
    ('operator', 'function', 'reschedule_job'),
    ('operator', 'function', 'pause_queue'),
    ('operator', 'function', 'resume_queue'),
    ('operator', 'function', 'set_queue'),
    ('operator', 'function', 'set_limit'),
    ('operator', 'function', 'resume_key'),
    ('operator', 'function', 'define_pipeline'),
    ('operator', 'function', 'drop_pipeline'),
    ('operator', 'function', 'rerun_from'),
    ('operator', 'function', 'schedule_job'),
    ('operator', 'function', 'unschedule_job'),
    ('operator', 'function', 'enable_schedule'),
    ('operator', 'function', 'disable_schedule'),
    ('operator', 'function', 'run_schedule_now'),
    ('operator', 'function', 'tick'),
    ('operator', 'procedure', 'tick_loop'),
    ('operator', 'function', 'start_ticker'),
    ('operator', 'function', 'stop_ticker'),
    ('operator', 'function', 'sweep_stale_leases'),
    ('operator', 'function', 'grant_statements')
union all
select 'worker', 'function', f.name
from unnest(
    '{claim_jobs,finish_job,finish_jobs,finish_and_claim,fail_job,snooze_job,release_jobs,'
    'heartbeat,'
    'heartbeat_jobs,set_progress,record_effect,complete_effect,withdraw_effect,effect_result,'
    'report_worker,forget_worker,wait_for_jobs,stop_waiting,ring_others,next_due_in,'
    'sweep_stale_leases,tick}'::text[]) as f (name)
union all
-- The views compute ages with now(), as whoever asks.
select a.access, 'function', f.name
from unnest('{producer,worker,observer}'::text[]) as a (access)
cross join unnest(
    '{version,now,next_run,upcoming_runs,describe_schedule}'::text[]) as f (name)
$$;

create or replace function rota.grant_statements(access text, role name)
    returns setof text
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if grant_statements.access is null or grant_statements.access
      not in ('producer', 'worker', 'operator', 'observer') then
        perform rota._refuse('access', format(
            'must be producer, worker, operator or observer, got %L',
            left(grant_statements.access, 80)));
    elsif grant_statements.role is null
      or to_regrole(quote_ident(grant_statements.role)) is null then
        perform rota._refuse('role', format('%L does not exist', grant_statements.role));
    end if;

    return query
    select format('grant usage on schema rota to %I;', grant_statements.role);
    return query
    select format('grant select on rota.%I to %I;', a.name, grant_statements.role)
    from rota._access() as a
    where a.kind = 'view'
      and (a.access = grant_statements.access
        or (a.access = 'observer' and grant_statements.access = 'operator'));
    return query
    select format(
        'grant execute on %s %s to %I;', a.kind, p.oid::regprocedure, grant_statements.role)
    from rota._access() as a
    join pg_proc as p on p.proname = a.name and p.pronamespace = 'rota'::regnamespace
    where a.kind in ('function', 'procedure')
      and (a.access = grant_statements.access
        or (a.access = 'observer' and grant_statements.access = 'operator'));
end;
$$;

comment on function rota.grant_statements(text, name) is
    'The grants that a role needs to be a producer, worker, operator or observer, to be run by '
    'the owner of the schema; raises 22023.';

do $$
declare
    v_role text;
    v_type regtype;
    v_grant text;
begin
    revoke all on schema rota from public;
    revoke all on all tables in schema rota from public;
    revoke all on all sequences in schema rota from public;
    revoke all on all routines in schema rota from public;
    -- A column of the type of a row of ours would keep an upgrade from changing the table.
    for v_type in
        select t.oid::regtype
        from pg_type as t
        where t.typnamespace = 'rota'::regnamespace
          and t.typelem = 0
    loop
        execute format('revoke all on type %s from public', v_type);
    end loop;

    foreach v_role in array array['producer', 'worker', 'operator', 'observer'] loop
        continue when to_regrole('rota_' || v_role) is null;
        execute format('revoke all on all tables in schema rota from %I', 'rota_' || v_role);
        execute format('revoke all on all sequences in schema rota from %I', 'rota_' || v_role);
        execute format('revoke all on all routines in schema rota from %I', 'rota_' || v_role);
        for v_grant in
            select g from rota.grant_statements(v_role, ('rota_' || v_role)::name) as g
        loop
            execute v_grant;
        end loop;
    end loop;
end;
$$;

commit;
