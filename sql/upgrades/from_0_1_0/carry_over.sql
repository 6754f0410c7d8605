/*
 * upgrades/from_0_1_0/carry_over.sql -- the rows of 0.1.0 come into the new tables.
 *
 * A job keeps its id, its attempts and its lease, so its worker may finish it.  Three things
 * differ from 0.1.0.
 *
 * A run of a pipeline was a job for each stage, and is one job now, with the id of the first;
 * the stages that it has left are rows of stage_runs.  So a lease in a later stage, which names
 * the id of that stage, is lost, and its job runs again when it has ended.
 *
 * An idempotency key belongs to a job type, and did not.  A key whose job is not kept any more
 * goes to every type that is known here: better refused once too often than run twice.
 *
 * Places in lanes, free slots of limits and what waits for what are found anew: each is left as
 * a check for maintenance, which the next ticks do.
 *
 * Old clients write to the old tables meanwhile.  So a first pass carries everything, and each
 * pass after it what has changed since the one before began: the rows that a transaction wrote
 * which was not over then, and those that are gone.  They are carried anew, also where a pass
 * had them already.  The last pass runs while no session can write (switch_over.sql).  What a
 * pass reads by several statements need not be of one moment: the next one mends it.
 *
 * The functions stand in the old schema, and go with it.
 */

-- Compiling the expressions would take longer than to copy.
set local jit = off;

/* The transaction before which all are over: what they wrote, the next statement sees. */
create function rota_0_1_0._begin_pass() returns xid language plpgsql as $$
begin
    -- This transaction is open itself, and not in the list.
    return coalesce((
        select x.xid from pg_snapshot_xip(pg_current_snapshot()) as x (xid) order by x.xid limit 1
    ), pg_snapshot_xmax(pg_current_snapshot()))::xid;
end $$;

/* Whether a row was written since; of one that is frozen that is sometimes said wrongly. */
create function rota_0_1_0._is_since(written_by xid, since xid)
    returns boolean language sql stable as $$
select age(written_by) <= age(since)
$$;

-- What has the same key on both sides, but is called otherwise now: the old rows as they would be
-- now, and which transaction wrote them.
create view rota_0_1_0._pauses as
select q.xmin as written_by, rota._pause_name(q.queue, null) as pause_name, q.queue,
    q.paused_at, q.paused_by, q.pause_reason as reason
from rota_0_1_0.queues as q where q.is_paused;
create view rota_0_1_0._occurrences as
select f.xmin as written_by, f.definition, f.scheduled_for,
    case f.outcome when 'fired' then 'enqueued' else f.outcome end as outcome, f.job_id,
    f.fired_at as recorded_at
from rota_0_1_0.fires as f;
create view rota_0_1_0._effects as
select e.xmin as written_by, e.*, e.kept_until as expires_at, coalesce(
        (select j.queue from rota_0_1_0.jobs as j where j.id = e.job_id),
        (select f.queue from rota_0_1_0.finished_jobs as f where f.id = e.job_id limit 1)
    ) as queue
from rota_0_1_0.effects as e;
create view rota_0_1_0._dependencies as
select case when age(d.xmin) < age(j.xmin) then d.xmin else j.xmin end as written_by,
    d.parent_id, coalesce(j.first_job_id, j.id) as job_id
from rota_0_1_0.dependencies as d join rota_0_1_0.jobs as j on j.id = d.job_id
where j.status = 'blocked';
create view rota_0_1_0._halted_keys as
select s.xmin as written_by, s.ordering_key, coalesce(f.first_job_id, s.job_id) as job_id,
    s.stuck_since as halted_since
from rota_0_1_0.stuck_keys as s
left join lateral (
    select h.first_job_id from rota_0_1_0.finished_jobs as h where h.id = s.job_id limit 1
) as f on true;
create view rota_0_1_0._job_errors as
select e.xmin as written_by, coalesce(j.first_job_id, f.first_job_id, e.job_id) as job_id,
    e.lease_token, e.attempt, e.queue, e.job_type, e.worker, e.started_at, e.failed_at,
    e.error_type, e.message, e.stack
from rota_0_1_0.job_errors as e
left join rota_0_1_0.jobs as j on j.id = e.job_id and j.first_job_id is not null
left join rota_0_1_0.finished_jobs as f on f.id = e.job_id and f.first_job_id is not null;

/* The columns that a relation of then and a table of now both have, but for these. */
create function rota_0_1_0._columns(source text, target text, others text[] default '{}')
    returns text language sql stable as $$
    select string_agg(quote_ident(n.attname), ', ' order by n.attnum) from pg_attribute as n
    join pg_attribute as o on o.attname = n.attname and o.attnum > 0
      and o.attrelid = format('rota_0_1_0.%I', source)::regclass
    where n.attrelid = format('rota.%I', target)::regclass and n.attnum > 0
      and n.attgenerated = '' and n.attname <> all(others)
$$;

/* Carry the rows of a table that were written since, or all; which are gone is of no interest
 * where only retention deletes. */
create function rota_0_1_0._carry_rows(name text, since xid)
    returns void language plpgsql as $$
declare
    c_has_view constant boolean := to_regclass('rota_0_1_0._' || name) is not null;
    c_source constant text := case when c_has_view then '_' else '' end || name;
    c_written_by constant text := case when c_has_view then 'written_by' else 'xmin' end;
    c_same constant text := coalesce((
        select string_agg(format('n.%1$I = o.%1$I', a.attname), ' and ')
        from pg_index as i
        join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = any(i.indkey)
        where i.indrelid = format('rota.%I', _carry_rows.name)::regclass and i.indisprimary
    ), 'n.job_id = o.job_id and n.lease_token = o.lease_token and n.failed_at = o.failed_at '
        'and n.job_type = o.job_type');
begin
    if since is not null then
        execute format(
            'delete from rota.%I as n using rota_0_1_0.%I as o '
            'where rota_0_1_0._is_since(o.%I, $1) and %s', name, c_source, c_written_by, c_same)
        using since;
    end if;
    if since is not null and name not in ('occurrences', 'job_errors') then
        execute format(
            'delete from rota.%I as n where not exists ('
            'select from rota_0_1_0.%I as o where %s)', name, c_source, c_same);
    end if;
    execute format(
        'insert into rota.%I (%s) select %2$s from rota_0_1_0.%I as o '
        'where $1 is null or rota_0_1_0._is_since(o.%I, $1) '
        'on conflict do nothing', name, rota_0_1_0._columns(c_source, name), c_source,
        c_written_by)
    using since;
end $$;

/* Carry these jobs, or all.  The stages before of a run have had leases of their own. */
create function rota_0_1_0._carry_jobs(ids bigint[])
    returns void language plpgsql set plan_cache_mode = force_custom_plan
    set enable_seqscan = on as $$
declare
    v_indexes text[]; v_index text;
begin
    perform set_config('enable_seqscan', (ids is null)::text, true);
    if ids is null then
        -- Rows first and then their indexes is half the time.
        select array_agg(pg_get_indexdef(i.indexrelid)),
            string_agg(i.indexrelid::regclass::text, ', ')
        into v_indexes, v_index from pg_index as i
        where i.indrelid = 'rota.jobs'::regclass and not i.indisprimary;
        execute 'drop index ' || v_index;
    end if;
    delete from rota.jobs as n where n.id = any(ids);
    delete from rota.finished_jobs as n where n.id = any(ids);
    delete from rota.stage_runs as n where n.job_id = any(ids);
    delete from rota.reruns as n where n.job_id = any(ids);

    execute format(
        'insert into rota.jobs (id, lease_token, stage_queued_at, %1$s) '
        'overriding system value '
        'select coalesce(j.first_job_id, j.id), case '
        'when j.first_job_id <> j.id then j.lease_token + 1 + ('
        'select count(*) from rota_0_1_0.finished_jobs as f '
        'where f.first_job_id = j.first_job_id) else j.lease_token end, '
        'case when j.pipeline is not null then j.created_at end, %1$s '
        'from rota_0_1_0.jobs as j '
        'where $1 is null or j.id = any($1) or j.first_job_id = any($1) '
        'on conflict do nothing',
        rota_0_1_0._columns('jobs', 'jobs', '{id,lease_token,stage_queued_at}')) using ids;
    foreach v_index in array coalesce(v_indexes, '{}') loop
        execute v_index;
    end loop;

    insert into rota.reruns (job_id, run_at, job)
    select coalesce(j.first_job_id, j.id), j.rerun_run_at,
        jsonb_build_object('job_type', j.job_type, 'queue', j.queue, 'idempotency_key',
            j.idempotency_key, 'payload', j.rerun_payload, 'priority', j.rerun_priority,
            'run_at', j.rerun_run_at)
    from rota_0_1_0.jobs as j
    where j.rerun_payload is not null
      and (_carry_jobs.ids is null or j.id = any(_carry_jobs.ids)
        or j.first_job_id = any(_carry_jobs.ids));

    -- Of a run its last stage, and none while it goes on.
    execute format(
        'insert into rota.finished_jobs (id, lease_token, %1$s) '
        'select coalesce(f.first_job_id, f.id), case '
        'when f.first_job_id is not null then f.lease_token + 1 + ('
        'select count(*) from rota_0_1_0.finished_jobs as s '
        'where s.first_job_id = f.first_job_id) else f.lease_token end, %1$s '
        'from rota_0_1_0.finished_jobs as f '
        'where ($1 is null or f.id = any($1) or f.first_job_id = any($1)) '
        'and (f.first_job_id is null or not exists ('
        'select from rota_0_1_0.jobs as j where j.first_job_id = f.first_job_id) '
        'and not exists (select from rota_0_1_0.finished_jobs as s '
        'where s.first_job_id = f.first_job_id and s.id > f.id))',
        rota_0_1_0._columns('finished_jobs', 'finished_jobs', '{id,lease_token}')) using ids;

    insert into rota.stage_runs (job_id, lease_token, pipeline, stage, status, queue, job_type,
        attempts, worker, queued_at, started_at, finished_at, stage_input, result)
    select f.first_job_id, row_number() over (partition by f.first_job_id order by f.id),
        f.pipeline, f.stage, f.status, f.queue, f.job_type, f.attempts, f.locked_by,
        f.created_at, f.started_at, f.finished_at, f.stage_input, f.result
    from rota_0_1_0.finished_jobs as f
    where f.first_job_id is not null and (ids is null or f.first_job_id = any(ids));
end $$;

/* Carry the keys that were written since, or all; one whose job is unknown to each type. */
create function rota_0_1_0._carry_keys(since xid)
    returns void language plpgsql set plan_cache_mode = force_custom_plan as $$
begin
    if since is not null then
        delete from rota.idempotency_keys as n
        where not exists (
            select from rota_0_1_0.idempotency_keys as o
            where o.idempotency_key = n.idempotency_key
        );
        delete from rota.idempotency_keys as n using rota_0_1_0.idempotency_keys as o
        where o.idempotency_key = n.idempotency_key
          and rota_0_1_0._is_since(o.xmin, _carry_keys.since);
    end if;
    with kept as (
        select k.idempotency_key, k.unique_until, k.source_updated_at, k.kept_until,
            coalesce(j.first_job_id, f.first_job_id, k.job_id) as job_id,
            coalesce('pipeline ' || coalesce(j.pipeline, f.pipeline), j.job_type, f.job_type)
                as key_scope, coalesce(j.queue, f.queue) as queue
        from rota_0_1_0.idempotency_keys as k left join rota_0_1_0.jobs as j on j.id = k.job_id
        left join lateral (
            select h.queue, h.job_type, h.pipeline, h.first_job_id
            from rota_0_1_0.finished_jobs as h where h.id = k.job_id limit 1
        ) as f on true
        where _carry_keys.since is null or rota_0_1_0._is_since(k.xmin, _carry_keys.since)
    ), scopes (key_scope) as (
        select l.job_type from rota_0_1_0.jobs as l
        where exists (select from kept as n where n.key_scope is null)
        union
        select f.job_type from rota_0_1_0.finished_jobs as f
        where exists (select from kept as n where n.key_scope is null)
        union
        select d.job_type from rota_0_1_0.job_definitions as d
        union
        select 'pipeline ' || p.pipeline from rota_0_1_0.pipeline_stages as p
        union
        select k.key_scope from kept as k where k.key_scope is not null
    )
    insert into rota.idempotency_keys (idempotency_key, key_scope, job_id, queue, unique_until,
        source_updated_at, expires_at)
    select k.idempotency_key, s.key_scope, k.job_id, k.queue, k.unique_until,
        k.source_updated_at, k.kept_until
    from kept as k join scopes as s on s.key_scope = coalesce(k.key_scope, s.key_scope)
    on conflict do nothing;
end $$;

/* Leave checks of what these jobs wait for, or all, and give places to those of limit keys. */
create function rota_0_1_0._settle_jobs(ids bigint[])
    returns void language plpgsql set plan_cache_mode = force_custom_plan as $$
declare
    v_ids bigint[];
    v_after bigint := 0;
begin
    perform rota._add_checks('job', array(
        select format('%s all', j.id) from rota.jobs as j
        where (_settle_jobs.ids is null or j.id = any(_settle_jobs.ids))
          and j.status = 'blocked'
          and (j.ordering_key is null
            or exists (select from rota.dependencies as d where d.job_id = j.id))
    ));
    perform rota._add_checks('rerun', array(
        select distinct r.job_id::text from rota.reruns as r
        where _settle_jobs.ids is null or r.job_id = any(_settle_jobs.ids)
    ));
    perform rota._add_checks('order', array(
        select distinct j.ordering_key from rota.jobs as j
        where (_settle_jobs.ids is null or j.id = any(_settle_jobs.ids))
          and j.ordering_key is not null and j.status = 'blocked'
    ));
    -- Jobs of keys take turns, which gives their queues places.
    loop
        v_ids := array(
            select j.id from rota.jobs as j
            where j.id > v_after and (_settle_jobs.ids is null or j.id = any(_settle_jobs.ids))
              and j.limit_key is not null and j.status in ('queued', 'failed')
            order by j.id limit 5000
        );
        exit when v_ids = '{}';
        v_after := v_ids[cardinality(v_ids)];
        perform rota._place_jobs(v_ids);
    end loop;
end $$;

/* One pass: all, or what has changed since; returns how many jobs that were. */
create function rota_0_1_0._carry(since xid) returns integer language plpgsql as $$
declare
    -- By the ids that they have here.
    c_changed constant bigint[] := case when since is not null then array(
        select coalesce(j.first_job_id, j.id) from rota_0_1_0.jobs as j
        where rota_0_1_0._is_since(j.xmin, _carry.since)
        union
        select coalesce(f.first_job_id, f.id) from rota_0_1_0.finished_jobs as f
        where rota_0_1_0._is_since(f.xmin, _carry.since)
    ) end;
begin
    -- Settings first: triggers list what they are for.
    perform rota_0_1_0._carry_rows(t.name, since)
    from unnest('{queues,pauses,limits,queue_grants,workers,pipeline_stages,job_definitions,'
        'occurrences,effects}'::text[]) as t (name);
    perform rota_0_1_0._carry_jobs(c_changed);
    perform rota_0_1_0._carry_rows(t.name, since)
    from unnest('{job_errors,dependencies,halted_keys}'::text[]) as t (name);
    perform rota_0_1_0._carry_keys(since);
    perform rota_0_1_0._settle_jobs(c_changed);
    return cardinality(c_changed);
end $$;

do $$
declare
    c_since constant xid := rota_0_1_0._begin_pass();
    v_part record;
begin
    -- Keys, one by one where they are few and the history is long.
    analyze rota_0_1_0.idempotency_keys;
    -- The days and weeks of what is kept have their partitions.
    for v_part in
        select distinct 'finished_jobs_done' as parent, 'finished_at' as time_column, 1 as days,
            (f.finished_at at time zone 'UTC')::date as day
        from rota_0_1_0.finished_jobs_done as f
        union
        select distinct 'job_errors', 'failed_at', 7,
            date_trunc('week', e.failed_at at time zone 'UTC')::date
        from rota_0_1_0.job_errors as e
    loop
        perform rota._create_partition(v_part.parent, v_part.time_column, v_part.day,
            v_part.days);
    end loop;
    perform rota_0_1_0._carry(null);
    analyze rota.jobs, rota.finished_jobs, rota.effects, rota.dependencies,
        rota.idempotency_keys;
    perform set_config('rota.carried_before', c_since::text, true);
end $$;

-- What the owner has granted by hand, to roles that are not rota's.
do $$
declare
    v_grant text;
begin
    for v_grant in
        select format('grant %s on %s %s to %s%s', a.privilege_type, n.kind, n.name,
            case when a.grantee = 0 then 'public' else a.grantee::regrole::text end,
            case when a.is_grantable then ' with grant option' else '' end)
        from (
            select case when p.prokind = 'p' then 'procedure' else 'function' end as kind,
                p.oid::regprocedure::text as name, o.proacl as acl, o.proowner as owner
            from pg_proc as o
            join pg_proc as p on p.proname = o.proname
              and p.pronamespace = 'rota'::regnamespace
            where o.pronamespace = 'rota_0_1_0'::regnamespace and not o.proname ^@ '_'
            union all
            select 'table', r.oid::regclass::text, c.relacl, c.relowner from pg_class as c
            join pg_class as r on r.relnamespace = 'rota'::regnamespace
              and r.relname = case c.relname when 'fires' then 'occurrences'
                when 'stuck_keys' then 'halted_keys' else c.relname end
            where c.relnamespace = 'rota_0_1_0'::regnamespace and c.relkind in ('r', 'p', 'v')
            union all
            select 'schema', 'rota', s.nspacl, s.nspowner
            from pg_namespace as s where s.nspname = 'rota_0_1_0'
        ) as n
        cross join lateral aclexplode(n.acl) as a
        where a.grantee <> n.owner and a.grantee <> 0
          and a.grantee::regrole::text not in (
            'rota_producer', 'rota_worker', 'rota_operator', 'rota_observer')
        union
        -- Who reads views asks these, which 0.1.0 did not have.
        select distinct format('grant execute on function %s to %s', p.oid::regprocedure,
            a.grantee::regrole)
        from pg_class as c cross join lateral aclexplode(c.relacl) as a
        join pg_proc as p on p.pronamespace = 'rota'::regnamespace
          and p.proname in ('visible_queues', 'sees_all_queues')
        where c.relnamespace = 'rota_0_1_0'::regnamespace and c.relkind in ('r', 'p', 'v')
          and a.privilege_type = 'SELECT' and a.grantee <> c.relowner and a.grantee <> 0
        order by 1
    loop
        execute v_grant;
    end loop;
end $$;
