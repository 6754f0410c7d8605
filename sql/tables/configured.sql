/*
 * tables/configured.sql -- the names that have settings.
 *
 * See base/configured.sql.  A grant is only revoked; maintenance deletes those of a role that
 * is gone, with their names.
 */

create table rota.configured_names (
    name text collate "C" not null,
    source text collate "C" not null,
    role regrole,

    constraint configured_names_pkey primary key (name, source)
);

-- All pauses of types have one name: with statistics of that, each enqueue would read them all.
alter table rota.configured_names alter column name set statistics 0;

comment on table rota.configured_names is
    'Queues, job types and accesses that a setting, a limit, a pause or a grant is for, and '
    'queues with fair shares.';
comment on column rota.configured_names.name is
    'A queue, or the word type or access, a space and a name.';
comment on column rota.configured_names.source is
    'The table of the setting; with the name of a pause, with the role and queue of a grant.';
comment on column rota.configured_names.role is 'The role that a grant confines, else null.';

create trigger queues_configured after insert or delete on rota.queues
    for each row execute function rota._list_configured();
create trigger job_types_configured after insert or delete on rota.job_types
    for each row execute function rota._list_configured();
create trigger limits_configured after insert or delete on rota.limits
    for each row execute function rota._list_configured();
create trigger fair_queues_configured after insert or delete on rota.fair_queues
    for each row execute function rota._list_configured();
create trigger pauses_configured after insert or delete on rota.pauses
    for each row execute function rota._list_configured();
create trigger queue_moves_configured after insert or delete on rota.queue_moves
    for each row execute function rota._list_configured();
create trigger queue_grants_configured after insert on rota.queue_grants
    for each row execute function rota._list_configured();
