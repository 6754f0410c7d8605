/*
 * tables/waiting.sql -- what a job waits for besides its time.
 *
 * dependencies: a row for each job that another one waits for.  It is deleted when the parent
 * succeeds; a child without rows is free, and there is no counter that could be wrong.
 *
 * Transactions only ever add rows to key_starts, lane_starts and pending_checks, and so never
 * wait for each other (waiting/key_starts.sql, jobs/claim.sql, base/pending.sql).
 */

create table rota.dependencies (
    parent_id bigint not null,
    job_id bigint not null,

    constraint dependencies_pkey primary key (parent_id, job_id),
    constraint dependencies_job_id_check check (job_id <> parent_id)
);

create index dependencies_job_id_idx on rota.dependencies (job_id, parent_id);

-- One parent may have all the children there are, or one child all the parents: with statistics
-- of that, each end of another job would read all edges to find that it has none.
alter table rota.dependencies alter column parent_id set statistics 0,
    alter column job_id set statistics 0;

comment on table rota.dependencies is
    'Jobs that a job waits for and that have not succeeded; kept for a retry as long as '
    'the job.';
comment on column rota.dependencies.job_id is 'The job that waits, or waited when it ended.';

create table rota.halted_keys (
    ordering_key text collate "C" primary key,
    job_id bigint not null,
    halted_since timestamptz not null default rota.now()
);

comment on table rota.halted_keys is
    'Ordering keys that wait for an operator to retry their dead job or to resume the key.';

create table rota.key_starts (
    id bigint generated always as identity,
    ordering_key text collate "C" not null,
    first_id bigint not null,
    written_at timestamptz not null default rota.now(),

    constraint key_starts_pkey primary key (ordering_key, id)
);

create index key_starts_written_at_idx on rota.key_starts (written_at);

comment on table rota.key_starts is
    'From which id on to search the live jobs of an ordering key; the newest row counts.';
comment on column rota.key_starts.first_id is
    'The key had no live job with a lower id, and has not had a head with one since.';

create table rota.lane_starts (
    id bigint generated always as identity,
    call bigint not null,
    start bigint[] not null,
    written_at timestamptz not null default rota.now(),

    constraint lane_starts_pkey primary key (call, id)
);

create index lane_starts_written_at_idx on rota.lane_starts (written_at);

comment on table rota.lane_starts is
    'Where claims begin their scans, as found by one that had to walk far; the newest row '
    'counts.';
comment on column rota.lane_starts.call is 'A hash of the queues and job types of the claims.';
comment on column rota.lane_starts.start is
    'As each session remembers it: the time of the next full scan, and of each lane its first '
    'place and id; only speed depends on it.';

-- What _begin_scan() tells of a scan, for _end_scan() (base/scan_start.sql).
create type rota.scan as (
    name text,
    index regclass,
    max_pause interval,
    begun_at timestamptz,
    start bigint,
    walked bigint
);

comment on type rota.scan is 'A scan that begins where the last one of its name ended.';

create table rota.pending_checks (
    id bigint generated always as identity primary key,
    kind text collate "C" not null,
    subject text collate "C" not null,
    due_at timestamptz not null default '-infinity',
    deferrals integer not null default 0,
    made_by xid8 not null default pg_current_xact_id(),
    updated_at timestamptz not null default rota.now(),

    constraint pending_checks_kind_check
        check (kind in ('order', 'job', 'parent', 'retry', 'limit', 'slots', 'class', 'queue',
            'schedule', 'pause', 'error', 'rerun'))
)
with (
    -- Every check leaves a dead row, however few wait.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

create index pending_checks_due_at_idx on rota.pending_checks (due_at, id);
-- What was deferred by a clock that has stepped back since.
create index pending_checks_updated_at_idx on rota.pending_checks (updated_at)
    where due_at > '-infinity';

comment on table rota.pending_checks is
    'What maintenance has to check, because a transaction could not see what another one did.';
comment on column rota.pending_checks.subject is
    'By kind: an ordering key, the id of a job or parent, or the name of a limit, a schedule '
    'or a pause, or error type, job type and queue of a failure; behind an id the position '
    'that the check has come to.';
comment on column rota.pending_checks.due_at is 'The smallest value means at once.';
comment on column rota.pending_checks.deferrals is
    'How often it could not be decided and was deferred.';
comment on column rota.pending_checks.made_by is
    'The transaction that wrote it or deferred it first, which does not do it.';
