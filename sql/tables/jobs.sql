/*
 * tables/jobs.sql -- the live tables.
 *
 * jobs has only live jobs; the moment a job ends it moves to finished_jobs.  So jobs stays
 * small however long the history is, and every query about work to do is cheap.  A CHECK says
 * that every row is in a state in which some scan finds it, and that a running one has a
 * deadline: so none waits forever.  PostgreSQL parses each CHECK again for every statement
 * that writes, which costs as much as writing an index entry: so jobs has only this one, kept
 * short, and the functions check everything else as arguments.
 */

create table rota.jobs (
    id bigint generated always as identity primary key,
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
    if_parent_dead text collate "C",
    limit_key text collate "C",
    pipeline text collate "C",
    stage text collate "C",
    stage_input jsonb,
    stage_queued_at timestamptz,
    definition text collate "C",
    scheduled_for timestamptz,
    status text collate "C" not null,
    run_at timestamptz not null,
    own_lane smallint,
    own_place timestamptz,
    hold text collate "C",
    opened_for text collate "C",
    held_limits text[],
    attempts integer not null default 0,
    lease_token bigint not null default 0,
    locked_by text collate "C",
    locked_until timestamptz,
    overdue_at timestamptz,
    cancel_requested_at timestamptz,
    cancel_reason text,
    progress_percent numeric(5, 2),
    progress_message text,
    last_error text,
    error_type text collate "C",
    failed_at timestamptz,
    created_at timestamptz not null default rota.now(),
    updated_at timestamptz not null default rota.now(),
    started_at timestamptz,

    constraint jobs_status_check check (
        status = any (
            case when locked_until is null then '{blocked,queued,failed}'::text[]
                else '{running}' end
        )
    )
)
with (
    -- Room on each page: progress of a running job is then written without index entries.
    fillfactor = 85,
    -- Every job leaves dead rows behind however few rows live; the default, a fifth of the
    -- table, would let them pile up in front of the claim.  Vacuum by count, without naps.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 50000,
    autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);

-- What every claim walks: one lane after the other of its queues, each in order of place.
-- Lane and place are expressions: of generated columns the server would read the text again
-- in every statement that writes.
create index jobs_ready_idx on rota.jobs
    (queue, coalesce(own_lane, priority), coalesce(own_place, run_at), id)
    where hold is null and status in ('queued', 'failed');

-- Jobs that are kept out of their lanes: by a limit, or until their time has come.
create index jobs_hold_idx on rota.jobs
    (hold, queue, job_type, coalesce(own_lane, priority), coalesce(own_place, run_at), id)
    where hold is not null and hold <> 'time';
create index jobs_later_idx on rota.jobs (run_at, id) where hold = 'time';
-- How many were let in to take the free slots of a limit, and have not yet.
create index jobs_opened_for_idx on rota.jobs (opened_for, queue, job_type, id)
    where opened_for is not null;

-- The last place of each key of a queue, without a row of state that producers would share.
create index jobs_key_place_idx on rota.jobs (
    queue, coalesce(own_lane, priority), coalesce(limit_key, ''), coalesce(own_place, run_at)
)
    where own_place is not null and coalesce(hold, '') <> 'time'
      and status in ('queued', 'failed');

-- Two lists in one index, since each index costs every write: first the running jobs by the end
-- of their leases, then those that wait and expire.  Not "where status = 'running'": that is
-- said of single jobs everywhere, and a planner that knows of few running jobs would look for
-- the one by reading them all.
create index jobs_deadline_idx on rota.jobs (locked_until, expires_at)
    where locked_until is not null or expires_at is not null;

-- A key belongs to its job type, that of a run to its pipeline: its jobs are of many types.  No
-- job type has a space.
create unique index jobs_idempotency_key_idx
    on rota.jobs (idempotency_key, coalesce('pipeline ' || pipeline, job_type))
    where idempotency_key is not null;

-- In which order the jobs of a key run, and which one is at it.  A unique index would compare
-- each new entry with those of all heads that were there while a session holds an old snapshot.
-- By an expression, so that no planner takes the primary key for the newest of a key.
create index jobs_ordering_key_idx on rota.jobs (ordering_key, id)
    where ordering_key is not null and status = 'blocked';
create index jobs_ordering_key_head_idx on rota.jobs (ordering_key, (- id))
    where ordering_key is not null and status <> 'blocked';

-- Whether a schedule has a live job.
create index jobs_definition_idx on rota.jobs (definition) where definition is not null;

comment on table rota.jobs is
    'Live jobs: blocked, queued, running, or failed and waiting for a retry.';
comment on column rota.jobs.priority is 'Lower runs first.';
comment on column rota.jobs.run_at is
    'Not before this time; for a failed job its next attempt.';
comment on column rota.jobs.lease is 'Length of a lease of this job; null means the queue''s.';
comment on column rota.jobs.time_limit is 'Of an attempt; null means the queue''s.';
comment on column rota.jobs.expires_at is 'No attempt begins then or later; null means never.';
comment on column rota.jobs.headers is
    'Texts that stay with the job through all attempts, such as a trace; null means none.';
comment on column rota.jobs.backoff is 'Retry rule of this job; null means the queue''s.';
comment on column rota.jobs.idempotency_key is
    'Unique among live jobs of one type, or runs of one pipeline; null means no key.';
comment on column rota.jobs.ordering_key is
    'Jobs of one key run one at a time, in the order of their ids; null means no key.';
comment on column rota.jobs.skip_dead is 'Whether its key continues if this job is dead.';
comment on column rota.jobs.if_parent_dead is
    'What happens to the job if a job that it waits for is dead: cancel, run or wait.';
comment on column rota.jobs.limit_key is
    'Jobs of one key share a limit, and the keys of a queue its workers; null means no key.';
comment on column rota.jobs.own_lane is 'Null where the lane is the priority.';
comment on column rota.jobs.own_place is 'Null where the place in the lane is run_at.';
comment on column rota.jobs.hold is
    'Why a waiting job is held outside of its lane: the name of a full limit, pause and the '
    'name of one, retries and its queue, time, or expired; else null.';
comment on column rota.jobs.opened_for is
    'The limit that let the waiting job into its lane to take a free slot; else null.';
comment on column rota.jobs.held_limits is 'The limits of which the running job holds a slot.';
comment on column rota.jobs.stage_input is 'Result of the previous stage.';
comment on column rota.jobs.definition is 'The schedule that made the job; null for others.';
comment on column rota.jobs.scheduled_for is
    'The planned time of its schedule that the job is for.';
comment on column rota.jobs.attempts is 'Claims so far that were not given back.';
comment on column rota.jobs.lease_token is
    'The fence: grows with each claim for the whole life of the job, and never goes back.';
comment on column rota.jobs.overdue_at is 'When its time limit expires; null if it has none.';
comment on column rota.jobs.last_error is 'Text of the last failure, at most 1000 characters.';

create table rota.idempotency_keys (
    idempotency_key text collate "C" not null,
    key_scope text collate "C" not null,
    job_id bigint,
    queue text collate "C",
    unique_until timestamptz,
    source_updated_at timestamptz,
    expires_at timestamptz not null,

    constraint idempotency_keys_pkey primary key (idempotency_key, key_scope),
    constraint idempotency_keys_idempotency_key_check
        check (char_length(idempotency_key) between 1 and 255),
    constraint idempotency_keys_expires_at_check
        check (isfinite(expires_at) and coalesce(unique_until, expires_at) <= expires_at)
);

create index idempotency_keys_expires_at_idx on rota.idempotency_keys (expires_at);

comment on table rota.idempotency_keys is
    'Keys that outlive their job: unique for a time, or versioned.';
comment on column rota.idempotency_keys.key_scope is
    'The job type that the key belongs to, or the word pipeline, a space and its name.';
comment on column rota.idempotency_keys.queue is
    'Where it was last used; null if that was in version 0.1.0, and its job is gone.';
comment on column rota.idempotency_keys.unique_until is
    'Until then the key makes no new job; null for a key that is only versioned.';
comment on column rota.idempotency_keys.source_updated_at is 'Newest version seen; or null.';

create table rota.reruns (
    id bigint generated always as identity primary key,
    job_id bigint not null,
    run_at timestamptz not null,
    job jsonb not null,
    max_wait interval,
    made_by xid8 not null default pg_current_xact_id(),
    seen pg_snapshot,
    idempotency_key text collate "C" not null
        generated always as (job ->> 'idempotency_key') stored,
    job_type text collate "C" not null generated always as (job ->> 'job_type') stored
);

create index reruns_job_id_idx on rota.reruns (job_id, id);
create index reruns_idempotency_key_idx on rota.reruns (idempotency_key, job_type, id);
create index reruns_seen_idx on rota.reruns (idempotency_key, job_type) where seen is not null;

-- All may be of one job: with statistics of that, each end of another would read them all.
alter table rota.reruns alter column job_id set statistics 0,
    alter column idempotency_key set statistics 0, alter column job_type set statistics 0;

comment on table rota.reruns is
    'Runs that are to follow those that were under way when a producer asked for them.';
comment on column rota.reruns.job_id is 'The job of the key at that time.';
comment on column rota.reruns.job is
    'What the producer enqueued, as a row of jobs; only the key where seen is not null.';
comment on column rota.reruns.seen is
    'Of those of the key before this row, all that this snapshot shows were locked, and '
    'overtaken by a newer one that was taken, or by a newer call.';

-- No row: a sequence keeps its value also where the transaction that sets it rolls back.
create sequence rota.id_timeline as integer;

comment on sequence rota.id_timeline is
    'The timeline of the server, and the copy of this database, in which ids were given last.';

create sequence rota.lock_seed;

comment on sequence rota.lock_seed is
    'A random number, set once, without which no session can tell the keys of advisory locks.';

create table rota.queues (
    queue text collate "C" primary key,
    lease interval,
    time_limit interval,
    max_attempts integer,
    backoff jsonb,
    keep_finished interval,
    keep_dead interval,
    ageing interval,
    retry_budget jsonb,
    expires_after interval,
    created_at timestamptz not null default rota.now(),
    updated_at timestamptz not null default rota.now(),

    constraint queues_queue_check check (octet_length(queue) between 1 and 63),
    constraint queues_lease_check check (lease between '1 millisecond' and '30 days'),
    constraint queues_time_limit_check check (time_limit between '1 millisecond' and '30 days'),
    constraint queues_max_attempts_check check (max_attempts >= 1),
    constraint queues_backoff_check check (jsonb_typeof(backoff) = 'object'),
    constraint queues_keep_finished_check check (keep_finished between '0' and '36525 days'),
    constraint queues_keep_dead_check check (keep_dead between '0' and '36525 days'),
    constraint queues_ageing_check check (ageing between '1 second' and '30 days'),
    constraint queues_retry_budget_check
        check (retry_budget ?& '{per_minute,percent}'::text[]),
    constraint queues_expires_after_check
        check (expires_after between interval '1 millisecond' and interval '36525 days')
);

comment on table rota.queues is
    'Settings of queues that differ from the defaults; a queue needs no row to be used.';
comment on column rota.queues.lease is 'Null means 1 minute.';
comment on column rota.queues.time_limit is 'For jobs without their own; null means none.';
comment on column rota.queues.max_attempts is 'Null means 10.';
comment on column rota.queues.backoff is 'Null means exponential, 1 to 30 minutes.';
comment on column rota.queues.keep_finished is
    'How long succeeded and cancelled jobs are kept; null means 7 days.';
comment on column rota.queues.keep_dead is 'How long dead jobs are kept; null means 90 days.';
comment on column rota.queues.ageing is
    'A waiting job gains one priority each time this has passed; null means never.';
comment on column rota.queues.retry_budget is
    'How many retries may begin: per_minute, and percent of the first attempts that ended in '
    'the last minute; null means any number.';
comment on column rota.queues.expires_after is
    'How long after its time a new job without its own expiry may start; null means forever.';

create table rota.job_types (
    job_type text collate "C" not null,
    time_limit interval,
    expires_after interval,
    updated_at timestamptz not null default rota.now(),

    constraint job_types_pkey primary key (job_type),
    constraint job_types_time_limit_check
        check (time_limit between interval '1 millisecond' and interval '30 days'),
    constraint job_types_expires_after_check
        check (expires_after between interval '1 millisecond' and interval '36525 days')
);

comment on table rota.job_types is
    'Defaults of new jobs of a type, which override those of their queue.';
comment on column rota.job_types.time_limit is 'Null means that of the queue.';
comment on column rota.job_types.expires_after is 'Null means that of the queue.';

create table rota.pauses (
    pause_name text collate "C" primary key,
    queue text collate "C",
    job_type text collate "C",
    set_by text collate "C" not null default 'operator',
    paused_at timestamptz not null default rota.now(),
    paused_by text not null default session_user,
    reason text,
    until timestamptz,

    constraint pauses_set_by_check check (set_by in ('operator', 'breaker', 'rule', 'move'))
);

-- So that a claim asks by index for pauses of its types, whatever is known of the table.
create index pauses_job_type_idx on rota.pauses (job_type) where job_type is not null;

comment on table rota.pauses is
    'What is paused: a queue, a job type, in one queue or in all, or everything.';
comment on column rota.pauses.queue is 'Null means all queues.';
comment on column rota.pauses.job_type is 'Null means all types.';
comment on column rota.pauses.set_by is
    'Who paused it: an operator, a breaker because too many jobs failed, a retry rule, or the '
    'move of the queue.';
comment on column rota.pauses.until is 'When the pause ends; null means when it is resumed.';

create table rota.workers (
    worker text collate "C" primary key,
    host text,
    pid integer,
    version text collate "C",
    queues text[] not null,
    job_types text[],
    concurrency integer,
    backend_pid integer,
    started_at timestamptz not null default rota.now(),
    last_seen_at timestamptz not null default rota.now(),

    constraint workers_worker_check check (char_length(worker) between 1 and 255)
);

comment on table rota.workers is
    'Workers and when they were last seen, for people to read; no decision depends on it.';
comment on column rota.workers.job_types is
    'What it takes: null means all types, and an empty array that it is stopping.';
comment on column rota.workers.concurrency is
    'How many jobs it runs at a time; null if it has not reported that.';
comment on column rota.workers.backend_pid is
    'The server process by which it reported, if that is its own: if it is gone, so is the '
    'worker, unless it is reconnecting.';

-- A worker that leaves takes its row along; when workers came, deploys are told by these.
create table rota.worker_starts (
    started_at timestamptz,
    version text collate "C",
    workers integer not null,

    constraint worker_starts_pkey primary key (started_at, version)
);

comment on table rota.worker_starts is
    'How many workers of a version started in which five minutes; kept for 90 days.';

create table rota.maintenance (
    task text collate "C" primary key,
    done_at timestamptz not null,
    done_by text,
    has_more boolean not null default false
);

comment on table rota.maintenance is
    'When each part of the maintenance was last done or, for retention, last found something '
    'to do, and by whom.';
comment on column rota.maintenance.task is
    'A part of the maintenance; or grants, which tells that roles were confined to queues, '
    'also where a restore has left out their grants.';
comment on column rota.maintenance.has_more is
    'For retention: it reached its limit, and the next tick continues at once.';

create table rota.upgrade_log (
    id integer primary key,
    name text collate "C" not null,
    applied_at timestamptz not null default rota.now()
);

comment on table rota.upgrade_log is 'Which changes of the tables ran, and when.';
