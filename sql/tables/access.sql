/*
 * tables/access.sql -- the queues to which a role is confined.
 *
 * A role that is named here for an access has that access only in these queues, and so has
 * every member of it.  A revoked right stays as a row: otherwise revoking the last one would
 * open all queues.
 */

create table rota.queue_grants (
    role regrole not null,
    access text collate "C" not null,
    queue text collate "C" not null,
    granted_at timestamptz not null,
    revoked_at timestamptz,

    constraint queue_grants_pkey primary key (role, access, queue),
    constraint queue_grants_access_check
        check (access in ('producer', 'worker', 'operator', 'observer'))
);

comment on table rota.queue_grants is
    'The queues in which a role may enqueue (producer), work (worker), act on jobs (operator) '
    'or see them (observer); a role without a row may in all.';
comment on column rota.queue_grants.queue is 'A queue, or * for all of them.';
comment on column rota.queue_grants.revoked_at is
    'Since when the right is revoked; the role stays confined to its other queues.';
