/*
 * tables/limits.sql -- limits, and the lines behind them.
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
