/*
 * tables/moves.sql -- queues that move to another database.
 *
 * See maintenance/moves.sql.  A moving job is in one of these places at a time: a row of jobs
 * here, a row of moved_jobs here, a row of jobs there; and while it is sent it may be in the
 * last two, of which workers only ever claim the one there.
 */

create table rota.queue_moves (
    move_id bigint primary key,
    queue text collate "C" not null,
    direction text collate "C" not null,
    database integer not null,
    state text collate "C" not null default 'moving',
    after_id bigint not null default 0,
    has_found boolean not null default false,
    horizon xid8,
    started_at timestamptz not null default rota.now(),

    constraint queue_moves_queue_key unique (queue),
    constraint queue_moves_direction_check check (direction in ('out', 'in')),
    constraint queue_moves_database_check check (database between 0 and 1023),
    constraint queue_moves_state_check check (state in ('moving', 'settling', 'settled'))
);

comment on table rota.queue_moves is 'Queues that move, or have moved, from here or to here.';
comment on column rota.queue_moves.move_id is 'An id of the database that the queue leaves.';
comment on column rota.queue_moves.state is
    'Settling once none of its jobs were left: later jobs move with a new id; settled when the '
    'other database knows it.';
comment on column rota.queue_moves.has_found is 'Whether this pass has found any job.';
comment on column rota.queue_moves.horizon is
    'The first transaction that cannot have missed that the queue moves.';

create table rota.moved_jobs (
    job_id bigint primary key,
    move_id bigint not null,
    database integer not null,
    new_job_id bigint,
    moved_at timestamptz default rota.now(),
    job jsonb
);

create index moved_jobs_moved_at_idx on rota.moved_jobs (moved_at);
create index moved_jobs_on_their_way_idx on rota.moved_jobs (move_id, job_id)
    where new_job_id is null;

comment on table rota.moved_jobs is
    'Where jobs move, and where they have moved, for 90 days and as long as they have open '
    'effects here, or until they return.';
comment on column rota.moved_jobs.new_job_id is
    'The job there, usually with the same id; null until it is known to be there.';
comment on column rota.moved_jobs.job is
    'While it is in transit, its former row of jobs, with its effects.';
