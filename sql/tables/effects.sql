/*
 * tables/effects.sql -- the once-only ledger.
 *
 * One row says that something outside of the database, such as a mail, is about to happen or
 * has happened.  The primary key makes it happen once: of two sessions that want to write the
 * same row one succeeds, whatever jobs they run.  completed_at distinguishes the two states:
 * until it is set, only the holder of that lease knows whether the effect has happened.
 */

create table rota.effects (
    scope text collate "C" not null,
    key text collate "C" not null,
    job_id bigint not null,
    lease_token bigint not null,
    queue text collate "C",
    recorded_at timestamptz not null default rota.now(),
    completed_at timestamptz,
    expires_at timestamptz not null,
    result jsonb,

    constraint effects_pkey primary key (scope, key),
    constraint effects_scope_check check (octet_length(scope) between 1 and 63),
    constraint effects_key_check check (char_length(key) between 1 and 255),
    constraint effects_expires_at_check check (isfinite(expires_at)),
    constraint effects_result_check check (result is null or completed_at is not null)
);

create index effects_expires_at_idx on rota.effects (expires_at);
create index effects_job_id_idx on rota.effects (job_id);
create index effects_open_idx on rota.effects (recorded_at) where completed_at is null;

comment on table rota.effects is
    'Effects outside of the database that must happen once: recorded before, completed after.';
comment on column rota.effects.scope is 'What kind of effect; a name like that of a queue.';
comment on column rota.effects.lease_token is 'The lease that holds the row, with job_id.';
comment on column rota.effects.queue is
    'That of the job when it recorded the effect; null if that is unknown.';
comment on column rota.effects.completed_at is 'Null while the outcome is not known.';
