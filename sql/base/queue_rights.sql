/*
 * base/queue_rights.sql -- whether the caller may use a queue.
 *
 * grant_queue() (access/queue_grants.sql) confines a role to some queues.  A call first
 * checks whether its caller is confined at all, and looks at queues of jobs only if so.  For
 * that it asks of a few grants whether the caller is a member of their roles, and where there
 * are many, for the grants of the roles of which the caller is a member.
 *
 * A function that runs with its owner's rights does not see who called it as current_user.
 * The caller is the role set by `set role`, else the session user.  A caller can set only a
 * role that it is a member of; but the role of all workers is one too, so a caller that sets
 * an unconfined role is still confined as its session user is.
 *
 * For a confined worker a job of another queue does not exist: RT001.  Its tick() works for
 * all queues, since recovery must not depend on which workers are running.
 */

/* Whether a grant to this role, if it is one, can confine the caller: that of a role of which
 * the session user is not a member cannot, unless a role is set, which may have been revoked
 * since.  The planner puts the expression into the statement, so a grant costs other roles
 * next to nothing. */
create or replace function rota._may_confine(role regrole)
    returns boolean language sql stable as $$
select role is null or pg_has_role(session_user, role::oid, 'member')
    or current_setting('role') <> 'none'
$$;

/* The queues in which the caller may do this; null for all.  These are the queues granted to
 * the role that is set, itself or as a member of others, or, if it never was granted any, those
 * of the session user.  A superuser is a member of every role, and confined by none. */
create or replace function rota._allowed_queues(access text)
    returns text[] language plpgsql stable set enable_seqscan = off as $$
declare
    c_owners constant oid := 'pg_database_owner'::regrole::oid;
    v_role name; v_roles oid[]; v_queues text[];
begin
    if not exists (
        select from rota.configured_names as c
        where c.name = 'access ' || _allowed_queues.access and rota._may_confine(c.role)
    ) then
        return null;
    end if;
    foreach v_role in array
        array_remove(array[nullif(current_setting('role'), 'none')::name, session_user], null)
    loop
        -- Those of which it is a member, as pg_has_role() has it.
        v_roles := array(
            with recursive found (id) as (
                select quote_ident(v_role)::regrole::oid
                union
                select m.roleid from found as f join pg_auth_members as m on m.member = f.id
            )
            select f.id from found as f
        ) || case when pg_has_role(v_role, c_owners, 'member') then c_owners end;
        select case when count(*) > 0
            then coalesce(array_agg(g.queue) filter (where g.revoked_at is null), '{}') end
        into v_queues from rota.queue_grants as g
        where g.role = any(v_roles) and g.access = _allowed_queues.access;
        exit when v_queues is not null and not exists (
            select from pg_roles as r where r.rolname = v_role and r.rolsuper
        );
        v_queues := null;
    end loop;
    return case when '*' <> all(v_queues) then v_queues end;
end $$;

create or replace function rota.visible_queues()
    returns text[] language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp as $$
begin return rota._allowed_queues('observer'); end;
$$;

comment on function rota.visible_queues is
    'The queues whose jobs the caller may see, those granted by grant_queue() for an observer; '
    'null for all.';

/* Whether these are all, asked by the planner, and so said to be immutable: a view leaves open
 * tables out of the plan for a confined role (README.md, Decisions, Views with a gate).  A plan
 * may outlive the answer: the view asks visible_queues() as well. */
create or replace function rota.sees_all_queues()
    returns boolean language plpgsql immutable security definer
    set search_path = pg_catalog, pg_temp as $$
begin return rota._allowed_queues('observer') is null; end;
$$;

comment on function rota.sees_all_queues is
    'Whether the caller may see the jobs of all queues, as of the time a query is planned; '
    'visible_queues() tells which, and is asked when it runs.';

/* Refuse calls about jobs of all queues to a role that may not see all. */
create or replace function rota._check_sees_all(what text)
    returns void language plpgsql stable as $$
begin
    if rota._allowed_queues('observer') is null then return; end if;
    raise exception using errcode = 'insufficient_privilege',
        message = format('no right to %s, which concerns all queues', what),
        hint = 'The owner of the schema lets a role see all: '
            'select rota.grant_queue(''ROLE'', ''*'', ''observer'');';
end $$;

/* Refuse queues in which the caller may not do this.  A caller that has named a schedule, say,
 * and not its queue, passes it as *what*: the message then does not tell the queue. */
create or replace function rota._check_queues(
    access text, queues text[], what text default null
) returns void language plpgsql as $$
declare
    v_allowed constant text[] := rota._allowed_queues(access);
    v_queue text;
begin
    if v_allowed is null then return; end if;
    select q.queue into v_queue from unnest(_check_queues.queues) as q (queue)
    where q.queue <> all(v_allowed) limit 1;
    if found then
        raise exception using errcode = 'insufficient_privilege',
            message = format('no right to %s %s',
                case access when 'worker' then 'work in' when 'operator' then 'act on'
                    when 'observer' then 'see' else 'enqueue to' end,
                coalesce('the queue of ' || what, 'queue ' || v_queue)),
            hint = format('Name a queue that is granted to the role, or let the owner of the '
                'schema run: select rota.grant_queue(''ROLE'', %L, %L);',
                case when what is null then v_queue else 'QUEUE' end, access);
    end if;
end $$;

/* The same for jobs in the form of enqueue_many(). */
create or replace function rota._check_queues_of(jobs jsonb, access text default 'producer')
    returns void language plpgsql as $$
begin
    if rota._allowed_queues(access) is not null then
        perform rota._check_queues(access, array(
            select distinct coalesce(j.job ->> 'queue', 'default')
            from jsonb_array_elements(_check_queues_of.jobs) as j (job)
        ));
    end if;
end $$;

/* The same for jobs that are there. */
create or replace function rota._check_queues_of_jobs(job_ids bigint[])
    returns void language plpgsql as $$
begin
    if rota._allowed_queues('producer') is not null then
        perform rota._check_queues('producer', array(
            select distinct j.queue from rota.jobs as j
            where j.id = any(_check_queues_of_jobs.job_ids)
        ), 'the job with this idempotency_key');
    end if;
end $$;

/* Of these jobs those that are not known to be of queues in which the caller may do this. */
create or replace function rota._jobs_outside_grants(
    job_ids bigint[], access text default 'worker'
) returns bigint[] language plpgsql stable set enable_seqscan = off as $$
declare
    v_allowed constant text[] := rota._allowed_queues(access);
begin
    if v_allowed is null then return '{}'::bigint[]; end if;
    return array(
        select i.id from unnest(_jobs_outside_grants.job_ids) as i (id)
        where i.id is not null and not exists (
            select from rota.jobs as j where j.id = i.id and j.queue = any(v_allowed)
        ) and not exists (
            select from rota.finished_jobs as f where f.id = i.id and f.queue = any(v_allowed)
        )
    );
end $$;
