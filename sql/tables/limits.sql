/*
 * tables/limits.sql -- limits, and their free capacity.
 *
 * limit_slots: a row for each free slot of a limit in use, such as 'key customer:8' of the
 * class customer:*.  How claims and ends use them is told in jobs/slots.sql.
 *
 * limits_to_count: a row for each time that a limit was set, until maintenance has counted what
 * runs.  set_limit() only adds one, so while it stays open nobody waits for it.
 *
 * limit_parts: which parts of the capacity of a limit have been issued as slots.  The slots of
 * all parts are the free ones and those that running jobs hold (jobs.held_limits); so the sum
 * can be checked at any time.  Parts from 0 on are issued by claims, of keys with a class and
 * of limits above 10,000.  Part -1 is what set_limit() and maintenance have issued or taken
 * back.  Part -2 is negative: slots in use by jobs whose rows do not show it yet.
 */

create table rota.limits (
    limit_name text collate "C" primary key,
    queue text collate "C",
    job_type text collate "C",
    limit_key text collate "C",
    max_running integer,
    max_starts integer,
    per interval,
    burst integer,
    weight integer,
    created_at timestamptz not null default rota.now(),
    updated_at timestamptz not null default rota.now(),

    constraint limits_subject_check check (num_nonnulls(queue, job_type, limit_key) = 1
        and limit_name = coalesce('queue ' || queue, 'type ' || job_type, 'key ' || limit_key)),
    constraint limits_max_running_check check (max_running between 0 and 1000000),
    constraint limits_max_starts_check check (max_starts between 1 and 1000000),
    constraint limits_per_check check (per between interval '1 millisecond' and '366 days'),
    constraint limits_burst_check check (burst between 1 and 10000),
    constraint limits_weight_check check (weight between 1 and 1000)
);

create unique index limits_queue_idx on rota.limits (queue) where queue is not null;
create unique index limits_job_type_idx on rota.limits (job_type) where job_type is not null;

comment on table rota.limits is 'How many jobs may run at once or start per period, as set.';
comment on column rota.limits.limit_key is
    'A key, or customer:* (no other colon) for each key that begins with customer: and has no '
    'row of its own.';
comment on column rota.limits.max_running is 'Null means no limit.';
comment on column rota.limits.max_starts is 'Starts in the time per; null means no limit.';
comment on column rota.limits.per is 'Null means 1 second.';
comment on column rota.limits.burst is
    'How many may start at once after a rest; null means what the rate starts in 100 ms, or 1.';
comment on column rota.limits.weight is
    'The share of the key among the keys of its queue; null means 1.';

create table rota.limits_to_count (
    limit_name text collate "C" not null,
    asked_xid xid8
);

create index limits_to_count_limit_name_idx on rota.limits_to_count (limit_name);

comment on table rota.limits_to_count is
    'Limits that were set, until what ran before is counted.';
comment on column rota.limits_to_count.asked_xid is
    'Transactions before this one may not know of the limit; while it is null nothing starts.';

create table rota.limit_slots (
    limit_name text collate "C" not null,
    version bigint generated always as identity,

    constraint limit_slots_pkey primary key (limit_name, version)
)
with (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

comment on table rota.limit_slots is 'The free slots of the limits in use.';

create table rota.limit_parts (
    limit_name text collate "C" not null,
    part integer not null,
    max_running integer not null,
    slots integer not null,
    checked_at timestamptz not null default rota.now(),

    constraint limit_parts_pkey primary key (limit_name, part)
);

create index limit_parts_max_running_idx on rota.limit_parts (limit_name, max_running);
create index limit_parts_checked_at_idx on rota.limit_parts (checked_at);

comment on table rota.limit_parts is 'The parts of each limit that are issued as slots.';
comment on column rota.limit_parts.max_running is
    'The setting that the slots are for; another than that of the limit means that they have '
    'to be adjusted, and nothing starts before.';
comment on column rota.limit_parts.slots is
    'Free ones and those in use; only the sum over the parts of a limit says something.';

create table rota.limit_starts (
    limit_name text collate "C" not null,
    cell bigint not null,
    starts integer not null,
    purge_at timestamptz not null
)
with (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

create index limit_starts_cell_idx on rota.limit_starts (limit_name, cell);
create index limit_starts_purge_at_idx on rota.limit_starts (purge_at);

comment on table rota.limit_starts is 'How many started in each span of time under a rate.';
comment on column rota.limit_starts.cell is
    'Number of the span, counted from 1970 in lengths that follow from the rate.';

create table rota.fair_queues (
    queue text collate "C" primary key
);

comment on table rota.fair_queues is 'Queues whose keys have fair shares.';

-- Whether there is a check for later is asked before one is added.
create index pending_checks_subject_idx on rota.pending_checks (kind, subject, due_at)
    where kind = any ('{limit,queue,slots}') and due_at > '-infinity';
