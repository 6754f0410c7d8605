/*
 * access/queue_grants.sql -- confine a role to some queues.
 *
 * The grants of the schema say what a role may call (access/grants.sql), these in which queues.
 * base/queue_rights.sql checks them.
 */

create or replace function rota.grant_queue(role name, queue text, access text default 'worker')
    returns boolean language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    perform rota._check_grant(role, queue, access);
    if access = 'producer' and queue ~ '^forward:[0-9]+$' then
        perform rota._refuse('queue', format('must not be %s, which would carry jobs of all '
            'queues: enqueue_to() asks for the right to the queue there', queue));
    end if;

    -- A restore without one of the roles leaves out the grants of all: then this tells of them.
    insert into rota.maintenance (task, done_at)
    select 'grants', rota.now()
    where not exists (select from rota.maintenance as m where m.task = 'grants')
    on conflict do nothing;
    insert into rota.queue_grants as g (role, access, queue, granted_at)
    values (to_regrole(quote_ident(grant_queue.role)), grant_queue.access, grant_queue.queue,
        rota.now())
    on conflict on constraint queue_grants_pkey do update
    set granted_at = rota.now(), revoked_at = null where g.revoked_at is not null;
    return found;
end $$;

comment on function rota.grant_queue is
    'Grant a role a queue to work in, or with the access producer to enqueue to, operator to '
    'act on, observer to see, and confine it to granted queues from then on; * is all queues; '
    'false if it already has the grant; only for the owner; raises 22023.';

create or replace function rota.revoke_queue(
    role name, queue text, access text default 'worker'
) returns boolean language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_grant(role, queue, access);

    update rota.queue_grants as g
    set revoked_at = rota.now()
    where g.role = to_regrole(quote_ident(revoke_queue.role))
      and g.access = revoke_queue.access and g.queue = revoke_queue.queue
      and g.revoked_at is null;
    return found;
end $$;

comment on function rota.revoke_queue is
    'Revoke what grant_queue() granted: the role stays confined to its other queues, even if '
    'there are none; false if there was nothing to revoke; only for the owner; raises 22023.';

create or replace function rota._check_grant(role name, queue text, access text)
    returns void language plpgsql as $$
begin
    if to_regrole(quote_ident(role)) is null then
        perform rota._refuse('role', format('%L does not exist', role));
    end if;
    perform rota._check_choice('access', access, '{producer,worker,operator,observer}');
    if _check_grant.queue is distinct from '*' then
        perform rota._check_name('queue', queue);
    end if;
end $$;
