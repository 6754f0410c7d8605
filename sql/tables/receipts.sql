/*
 * tables/receipts.sql -- which jobs of other databases have arrived.
 *
 * The transaction that takes the job writes the row, so a forwarder that does not know that
 * the job arrived, and sends it again, does no harm.  An id alone does not identify it: a
 * source that was restored from a dump reuses ids, and a job may come back with its queue.
 */

create table rota.receipts (
    move_id bigint not null,
    source_job_id bigint not null,
    source_created_at timestamptz not null,
    job_id bigint not null,
    received_at timestamptz not null default rota.now(),

    constraint receipts_pkey primary key (source_job_id, source_created_at, move_id)
);

create index receipts_received_at_idx on rota.receipts (received_at);
create index receipts_move_id_idx on rota.receipts (move_id, job_id) where move_id > 0;

comment on table rota.receipts is
    'Jobs that other databases have sent here, for 30 days at least, and until their queue has '
    'settled and those that came with it have ended.';
comment on column rota.receipts.move_id is
    'That of queue_moves with which it came, 0 for a job of enqueue_to(), negative for its '
    'own end.';
comment on column rota.receipts.source_job_id is
    'The job there, or the job that carried it; 0 for a move that has settled and ended.';
comment on column rota.receipts.source_created_at is 'When that was enqueued.';
comment on column rota.receipts.job_id is 'The job here.';
