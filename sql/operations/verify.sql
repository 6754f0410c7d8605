/*
 * operations/verify.sql -- do the promises hold, on this database, now?
 *
 * Each promise that can be checked on rows is counted again from the rows: not by the code
 * that keeps it, but by a query that would find where it was broken.  All are of one snapshot,
 * so what is under way does not look like a violation; it takes no lock that delays other
 * sessions; and each looks at the newest rows, as many as are asked for.
 */

create or replace function rota.verify(max_rows integer default 10000)
    returns table (promise text, examined bigint, violations bigint, example text)
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
    set jit = off as $$
begin
    perform rota._check_sees_all('verify()');
    perform rota._check_number('max_rows', max_rows, 1, 1000000);

    return query
    with live as materialized (
        select i.id, i.status, i.job_type, i.pipeline, i.idempotency_key, i.ordering_key,
            i.attempts, i.max_attempts, i.if_parent_dead
        from rota.jobs as i order by i.id desc limit verify.max_rows
    ), ended as materialized (
        select i.id, i.definition, i.scheduled_for, i.attempts, i.max_attempts
        from rota.finished_jobs as i order by i.id desc limit verify.max_rows
    ),
    -- What is issued of a limit is free or held, and no more is held than may run.
    limits as materialized (
        select n.limit_name, coalesce(h.held, 0) as held,
            (select sum(p.slots) from rota.limit_parts as p
            where p.limit_name = n.limit_name) as issued,
            (select count(*) from rota.limit_slots as f
            where f.limit_name = n.limit_name) as free
        from (
            select p.limit_name from rota.limit_parts as p group by p.limit_name
            order by p.limit_name limit verify.max_rows
        ) as n
        left join (
            select u.limit_name, count(*) as held from rota.jobs as j
            cross join lateral unnest(j.held_limits) as u (limit_name)
            where j.status = 'running' and j.locked_until is not null group by u.limit_name
        ) as h on h.limit_name = n.limit_name
    )
    -- Of what was examined, null is what keeps the promise.
    select p.promise, cardinality(p.found)::bigint, cardinality(b.broken)::bigint, b.broken[1]
    from (values ('a job is live or has ended, and never both', array(
        select case when exists (select from rota.finished_jobs as f where f.id = j.id)
            then format('job %s is %s, and has ended', j.id, j.status) end
        from live as j
    )), ('a job ends once', array(
        select case when count(*) > 1 then format('job %s ended %s times', f.id, count(*)) end
        from ended as f group by f.id
    )), ('a running job has a worker, a lease of at most 30 days, and did not start before its '
        'time', array(
        select case
                when j.locked_by is null
                  or j.locked_until > rota.now() + interval '30 days 1 second'
                  or j.started_at < j.run_at - interval '1 second'
                then format('job %s, due at %s, runs since %s on %s until %s', j.id, j.run_at,
                    j.started_at, j.locked_by, j.locked_until)
            end
        from rota.jobs as j where j.status = 'running' and j.locked_until is not null
        order by j.locked_until desc limit verify.max_rows
    )), ('a planned time of a schedule makes at most one job', array(
        select case when o.job_id <> j.id
            then format('jobs %s and %s stand for %s of schedule %s', j.id, o.job_id,
                j.scheduled_for, j.definition) end
        from (
            (select i.id, i.definition, i.scheduled_for from rota.jobs as i
            where i.definition is not null order by i.id desc limit verify.max_rows)
            union all
            select r.id, r.definition, r.scheduled_for from ended as r
            where r.definition is not null
        ) as j
        left join rota.occurrences as o
          on o.definition = j.definition and o.scheduled_for = j.scheduled_for
    )), ('a job has at most max_attempts attempts', array(
        select case when a.attempts > a.max_attempts
            then format('job %s had %s of %s', a.id, a.attempts, a.max_attempts) end
        from (
            select i.id, i.attempts, i.max_attempts from live as i
            union all
            select i.id, i.attempts, i.max_attempts from ended as i
        ) as a
    )), ('the lease tokens of a job grow, and an attempt fails once', array(
        select case
                when e.lease_token > coalesce(j.lease_token, f.lease_token)
                then format('job %s has token %s, and failed with %s', e.job_id,
                    coalesce(j.lease_token, f.lease_token), e.lease_token)
                when e.is_repeated
                then format('job %s failed twice with token %s', e.job_id, e.lease_token)
            end
        from (
            select n.job_id, n.lease_token,
                count(*) over (partition by n.job_id, n.lease_token) > 1 as is_repeated
            from (
                select i.job_id, i.lease_token from rota.job_errors as i
                order by i.failed_at desc limit verify.max_rows
            ) as n
        ) as e
        left join rota.jobs as j on j.id = e.job_id
        left join lateral (
            select i.lease_token from rota.finished_jobs as i
            where i.id = e.job_id and j.id is null limit 1
        ) as f on true
    )), ('an idempotency key has at most one live job of its type', array(
        select case when count(*) > 1
            then format('key %L of %s has jobs %s and %s', k.idempotency_key, k.scope,
                min(k.id), max(k.id)) end
        from (
            select i.id, i.idempotency_key,
                coalesce('pipeline ' || i.pipeline, i.job_type) as scope
            from live as i
        ) as k
        where k.idempotency_key is not null group by k.idempotency_key, k.scope
    )), ('a rerun of a job is found by the end of the job or by a check', array(
        select case when j.id is null and r.job_id::text not in (
                select c.subject from rota.pending_checks as c where c.kind = 'rerun')
            then format('job %s has a rerun, but does not run, and no check is pending',
                r.job_id) end
        from (select i.job_id from rota.reruns as i order by i.id desc limit verify.max_rows)
            as r
        left join rota.jobs as j on j.id = r.job_id and j.status = 'running'
    )), ('jobs of an ordering key run one at a time', array(
        select case when count(*) > 1
            then format('neither of jobs %s and %s of key %L is blocked', min(k.id), max(k.id),
                k.ordering_key) end
        from (
            select i.id, i.ordering_key from rota.jobs as i
            where i.ordering_key is not null and i.status <> 'blocked'
            order by i.ordering_key, i.id limit verify.max_rows
        ) as k
        group by k.ordering_key
    )), ('a halted key is halted by a job that is not live', array(
        select case when j.id is not null
            then format('key %L is halted by job %s, which is %s', h.ordering_key, j.id,
                j.status) end
        from (
            select i.ordering_key, i.job_id from rota.halted_keys as i limit verify.max_rows
        ) as h
        left join rota.jobs as j on j.id = h.job_id
    -- A job that waits for something is found by the transaction that ends that, or by a
    -- check.  A key or a limit whose check is still to be done is not judged.
    )), ('a blocked job waits for something that will end', array(
        select case when not exists (
                select from rota.dependencies as d where d.job_id = b.id
                  and (exists (select from rota.jobs as p where p.id = d.parent_id)
                    -- What waits for a retry, by an operator, knows whose.
                    or b.if_parent_dead = 'wait' and exists (
                        select from rota.finished_jobs as p
                        where p.id = d.parent_id and p.status <> 'succeeded'))
            ) and (b.ordering_key is null or not exists (
                select from rota.jobs as o
                where o.ordering_key >= b.ordering_key and o.ordering_key <= b.ordering_key
                  and o.status <> 'blocked'
            ) and not exists (
                select from rota.jobs as o
                where o.ordering_key >= b.ordering_key and o.ordering_key <= b.ordering_key
                  and o.status = 'blocked' and o.id < b.id
            ) and not exists (
                select from rota.halted_keys as h where h.ordering_key = b.ordering_key
            )) and not exists (
                select from rota.pending_checks as c
                where c.kind in ('job', 'parent', 'retry')
                  or c.kind = 'order' and c.subject = b.ordering_key
            )
            then format('job %s waits for nothing, and no check is pending', b.id) end
        from live as b where b.status = 'blocked'
    )), ('a held job waits for a limit, pause or budget that exists', array(
        select case when num_nonnulls(l.max_running, l.max_starts) = 0 and h.hold <> 'expired'
              and not exists (
                select from rota.pauses as p where h.hold = 'pause ' || p.pause_name
            ) and not exists (
                select from rota.retry_budgets as b where h.hold = 'retries ' || b.queue
            ) and not exists (
                select from rota.pending_checks as c
                where c.kind = 'pause' and h.hold = 'pause ' || c.subject or c.kind = 'class'
                  or c.kind in ('limit', 'slots')
                  and (c.subject = h.hold or c.subject like '%:*')
            )
            then format('job %s waits for %s, which is not set', h.id, h.hold) end
        from (
            select i.id, i.hold from rota.jobs as i
            where i.hold is not null and i.hold <> 'time' order by i.hold limit verify.max_rows
        ) as h
        cross join lateral rota._bound(h.hold) as l
    )), ('the slots of a limit are free or held', array(
        select case when l.issued <> l.free + l.held
            then format('of limit %s %s slots are issued, %s free and %s held',
                l.limit_name, l.issued, l.free, l.held) end
        from limits as l
    )), ('no more jobs run under a limit than it allows', array(
        select case when b.max_running < l.held and rota._is_issued_for(b)
            then format('%s jobs run under limit %s, which allows %s', l.held, l.limit_name,
                b.max_running) end
        from limits as l cross join lateral rota._bound(l.limit_name) as b
    ))) as p (promise, found)
    cross join lateral (select array_remove(p.found, null) as broken) as b;
end $$;

comment on function rota.verify is
    'Recount the promises on the newest max_rows rows of each kind: the promise, how many rows '
    'were examined, how many break it, and one of them; takes no lock that delays other '
    'sessions; raises 22023.';
