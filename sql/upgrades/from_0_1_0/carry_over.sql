/*
 * upgrades/from_0_1_0/carry_over.sql -- the rows of 0.1.0 come into the new tables.
 *
 * A job keeps its id, its attempts and its lease: who runs it may finish it.  Three things are
 * said otherwise than in 0.1.0.
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
 */

-- Compiling the expressions would take longer than to copy.
set local jit = off;

do $$
declare
    v_indexes text[];
    v_index text;
    v_part record;
    v_ids bigint[];
    v_after bigint := 0;
begin
    -- Settings first: triggers list what they are for.
    insert into rota.queues (queue, lease, max_attempts, backoff, keep_finished, keep_dead,
        ageing, created_at, updated_at)
    select q.queue, q.lease, q.max_attempts, q.backoff, q.keep_finished, q.keep_dead, q.ageing,
        q.created_at, q.updated_at
    from rota_0_1_0.queues as q;
    insert into rota.pauses (pause_name, queue, paused_at, paused_by, reason)
    select rota._pause_name(q.queue, null), q.queue, q.paused_at, q.paused_by, q.pause_reason
    from rota_0_1_0.queues as q where q.is_paused;
    insert into rota.limits (limit_name, queue, job_type, limit_key, max_running, max_starts,
        per, burst, weight, created_at, updated_at, is_settled, settled_xid)
    select l.limit_name, l.queue, l.job_type, l.limit_key, l.max_running, l.max_starts, l.per,
        l.burst, l.weight, l.created_at, l.updated_at, false, '18446744073709551615'
    from rota_0_1_0.limits as l;
    insert into rota.queue_grants (role, access, queue, granted_at, revoked_at)
    select g.role, g.access, g.queue, g.granted_at, g.revoked_at
    from rota_0_1_0.queue_grants as g;
    insert into rota.workers (worker, host, pid, version, queues, started_at, last_seen_at)
    select w.worker, w.host, w.pid, w.version, w.queues, w.started_at, w.last_seen_at
    from rota_0_1_0.workers as w;
    insert into rota.pipeline_stages (pipeline, stage, ordinal, next_stage, job_type, queue,
        priority, max_attempts, lease, backoff)
    select p.pipeline, p.stage, p.ordinal, p.next_stage, p.job_type, p.queue, p.priority,
        p.max_attempts, p.lease, p.backoff
    from rota_0_1_0.pipeline_stages as p;
    insert into rota.job_definitions (name, job_type, queue, payload, schedule, time_zone,
        priority, max_attempts, lease, backoff, catch_up, catch_up_window, catch_up_max,
        overlap, jitter, starts_at, ends_at, is_enabled, disabled_at, disabled_by, last_error,
        anchored_at, next_run_at, last_run_at, last_job_id, created_at, updated_at)
    select d.name, d.job_type, d.queue, d.payload, d.schedule, d.time_zone, d.priority,
        d.max_attempts, d.lease, d.backoff, d.catch_up, d.catch_up_window, d.catch_up_max,
        d.overlap, d.jitter, d.starts_at, d.ends_at, d.is_enabled, d.disabled_at,
        d.disabled_by, d.last_error, d.anchored_at, d.next_run_at, d.last_run_at,
        d.last_job_id, d.created_at, d.updated_at
    from rota_0_1_0.job_definitions as d;
    insert into rota.occurrences (definition, scheduled_for, outcome, job_id, recorded_at)
    select f.definition, f.scheduled_for,
        case f.outcome when 'fired' then 'enqueued' else f.outcome end, f.job_id, f.fired_at
    from rota_0_1_0.fires as f;
    insert into rota.effects (scope, key, job_id, lease_token, recorded_at, completed_at,
        expires_at, result)
    select e.scope, e.key, e.job_id, e.lease_token, e.recorded_at, e.completed_at,
        e.kept_until, e.result
    from rota_0_1_0.effects as e;
    update rota.maintenance as m
    set done_at = u.done_at, done_by = u.done_by
    from rota_0_1_0.upkeep as u where u.task = m.task;
    insert into rota.maintenance (task, done_at, done_by)
    select u.task, u.done_at, u.done_by from rota_0_1_0.upkeep as u on conflict do nothing;

    -- Rows first and then their indexes is half the time.
    v_indexes := array(
        select pg_get_indexdef(i.indexrelid) from pg_index as i
        where i.indrelid = 'rota.jobs'::regclass and not i.indisprimary
    );
    for v_index in
        select i.indexrelid::regclass from pg_index as i
        where i.indrelid = 'rota.jobs'::regclass and not i.indisprimary
    loop
        execute format('drop index %s', v_index);
    end loop;

    -- Live jobs.  The stages before of a run have had leases of their own.
    insert into rota.jobs (id, queue, job_type, payload, priority, max_attempts, lease, backoff,
        idempotency_key, ordering_key, skip_dead, if_parent_dead, limit_key, pipeline, stage,
        stage_input, stage_queued_at, definition, scheduled_for, status, run_at, attempts,
        lease_token, locked_by, locked_until, cancel_requested_at, cancel_reason, rerun_payload,
        rerun_run_at, rerun_priority, progress_percent, progress_message, last_error,
        error_type, failed_at, created_at, updated_at, started_at)
    overriding system value
    select coalesce(j.first_job_id, j.id), j.queue, j.job_type, j.payload, j.priority,
        j.max_attempts, j.lease, j.backoff, j.idempotency_key, j.ordering_key, j.skip_dead,
        j.if_parent_dead, j.limit_key, j.pipeline, j.stage, j.stage_input,
        case when j.pipeline is not null then j.created_at end, j.definition, j.scheduled_for,
        j.status, j.run_at, j.attempts,
        case
            when j.first_job_id <> j.id then j.lease_token + 1 + (
                select count(*) from rota_0_1_0.finished_jobs as f
                where f.first_job_id = j.first_job_id
            )
            else j.lease_token
        end,
        j.locked_by, j.locked_until, j.cancel_requested_at, j.cancel_reason, j.rerun_payload,
        j.rerun_run_at, j.rerun_priority, j.progress_percent, j.progress_message, j.last_error,
        j.error_type, j.failed_at, j.created_at, j.updated_at, j.started_at
    from rota_0_1_0.jobs as j;
    foreach v_index in array v_indexes loop
        execute v_index;
    end loop;

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
    insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts, lease,
        backoff, idempotency_key, ordering_key, skip_dead, limit_key, pipeline, stage,
        stage_input, definition, scheduled_for, status, run_at, attempts, lease_token,
        locked_by, cancel_requested_at, cancel_reason, progress_percent, progress_message,
        last_error, error_type, failed_at, created_at, updated_at, started_at, finished_at,
        result)
    select coalesce(f.first_job_id, f.id), f.queue, f.job_type, f.payload, f.priority,
        f.max_attempts, f.lease, f.backoff, f.idempotency_key, f.ordering_key, f.skip_dead,
        f.limit_key, f.pipeline, f.stage, f.stage_input, f.definition, f.scheduled_for,
        f.status, f.run_at, f.attempts,
        case
            when f.first_job_id is not null then f.lease_token + 1 + (
                select count(*) from rota_0_1_0.finished_jobs as s
                where s.first_job_id = f.first_job_id
            )
            else f.lease_token
        end,
        f.locked_by, f.cancel_requested_at, f.cancel_reason, f.progress_percent,
        f.progress_message, f.last_error, f.error_type, f.failed_at, f.created_at, f.updated_at,
        f.started_at, f.finished_at, f.result
    from rota_0_1_0.finished_jobs as f
    -- Of a run its last stage, and none while it goes on.
    where f.first_job_id is null
       or not exists (
            select from rota_0_1_0.jobs as j where j.first_job_id = f.first_job_id
        )
        and not exists (
            select from rota_0_1_0.finished_jobs as s
            where s.first_job_id = f.first_job_id and s.id > f.id
        );
    insert into rota.stage_runs (job_id, lease_token, pipeline, stage, status, queue, job_type,
        attempts, worker, queued_at, started_at, finished_at, stage_input, result)
    select f.first_job_id, row_number() over (partition by f.first_job_id order by f.id),
        f.pipeline, f.stage, f.status, f.queue, f.job_type, f.attempts, f.locked_by,
        f.created_at, f.started_at, f.finished_at, f.stage_input, f.result
    from rota_0_1_0.finished_jobs as f where f.first_job_id is not null;
    insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker,
        started_at, failed_at, error_type, message, stack)
    select coalesce(f.first_job_id, j.first_job_id, e.job_id), e.lease_token, e.attempt,
        e.queue, e.job_type, e.worker, e.started_at, e.failed_at, e.error_type, e.message,
        e.stack
    from rota_0_1_0.job_errors as e
    left join (
        select r.id, r.first_job_id from rota_0_1_0.finished_jobs as r
        where r.first_job_id is not null
    ) as f on f.id = e.job_id
    left join rota_0_1_0.jobs as j on j.id = e.job_id and j.first_job_id is not null;

    -- What jobs wait for.
    insert into rota.dependencies (parent_id, job_id)
    select d.parent_id, coalesce(j.first_job_id, j.id)
    from rota_0_1_0.dependencies as d join rota_0_1_0.jobs as j on j.id = d.job_id
    where j.status = 'blocked';
    perform rota._add_checks('job', array(
        select distinct format('%s all', d.job_id) from rota.dependencies as d));
    insert into rota.halted_keys (ordering_key, job_id, halted_since)
    select s.ordering_key, coalesce(f.first_job_id, s.job_id), s.stuck_since
    from rota_0_1_0.stuck_keys as s
    left join rota_0_1_0.finished_jobs as f on f.id = s.job_id;
    perform rota._add_checks('order', array(
        select distinct j.ordering_key from rota.jobs as j
        where j.ordering_key is not null and j.status = 'blocked'));
    perform rota._add_checks('schedule', array(
        select d.name from rota.job_definitions as d where d.kind = 'after'));
    perform rota._add_checks('limit', array(select l.limit_name from rota.limits as l));
    perform rota._add_checks('queue', array(
        select q.queue from rota.queues as q where q.ageing is not null));

    -- Keys, one by one where they are few and the history is long.
    analyze rota_0_1_0.idempotency_keys;
    with kept as (
        select k.idempotency_key, k.unique_until, k.source_updated_at, k.kept_until,
            coalesce(j.first_job_id, f.first_job_id, k.job_id) as job_id,
            coalesce('pipeline ' || coalesce(j.pipeline, f.pipeline), j.job_type, f.job_type)
                as key_scope
        from rota_0_1_0.idempotency_keys as k
        left join rota_0_1_0.jobs as j on j.id = k.job_id
        left join lateral (
            select h.job_type, h.pipeline, h.first_job_id from rota_0_1_0.finished_jobs as h
            where h.id = k.job_id limit 1
        ) as f on true
    ), scopes (key_scope) as (
        select l.job_type from rota_0_1_0.jobs as l
        union
        select f.job_type from rota_0_1_0.finished_jobs as f
        union
        select d.job_type from rota_0_1_0.job_definitions as d
        union
        select 'pipeline ' || p.pipeline from rota_0_1_0.pipeline_stages as p
    )
    insert into rota.idempotency_keys (idempotency_key, key_scope, job_id, unique_until,
        source_updated_at, expires_at)
    select k.idempotency_key, s.key_scope, k.job_id, k.unique_until, k.source_updated_at,
        k.kept_until
    from kept as k join scopes as s on s.key_scope = coalesce(k.key_scope, s.key_scope);

    -- Jobs of keys take turns, which gives their queues places.
    loop
        v_ids := array(
            select j.id from rota.jobs as j
            where j.id > v_after and j.limit_key is not null
              and j.status in ('queued', 'failed')
            order by j.id limit 5000
        );
        exit when v_ids = '{}';
        v_after := v_ids[cardinality(v_ids)];
        perform rota._place_jobs(v_ids);
    end loop;

    perform setval('rota.jobs_id_seq', s.last_value, s.is_called)
    from rota_0_1_0.jobs_id_seq as s;
    -- Nobody has set anew what was carried over.
    delete from rota.audit_log;
    update rota.upgrade_log as u set name = 'carried over from 0.1.0' where u.id = 0;
end;
$$;

-- What the owner has granted by hand, to roles that are not rota's.
do $$
declare
    v_grant text;
begin
    for v_grant in
        select format('grant %s on %s %s to %s%s', lower(a.privilege_type), n.kind, n.name,
            case when a.grantee = 0 then 'public' else a.grantee::regrole::text end,
            case when a.is_grantable then ' with grant option' else '' end)
        from (
            select case when p.prokind = 'p' then 'procedure' else 'function' end as kind,
                p.oid::regprocedure::text as name, o.proacl as acl, o.proowner as owner
            from pg_proc as o
            join pg_proc as p on p.proname = o.proname
              and p.pronamespace = 'rota'::regnamespace
            where o.pronamespace = 'rota_0_1_0'::regnamespace and o.proname not like '\_%'
            union all
            select 'table', r.oid::regclass::text, c.relacl, c.relowner
            from pg_class as c
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
        order by 1
    loop
        execute v_grant;
    end loop;
end;
$$;

analyze rota.jobs;
