/*
 * tables/waiting.sql -- what a job waits for besides its time.
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
        check (kind in ('job', 'order', 'parent', 'limit', 'schedule'))
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
    'A job''s id (of a parent with how it ended), an ordering key, a limit or a '
    'schedule''s name, by kind.';
comment on column rota.rechecks.made_by is
    'The transaction that wrote it; it cannot take its own note away.';
comment on column rota.rechecks.is_seen is 'The transaction that wrote it has looked already.';
