/*
 * waiting/dependencies.sql -- jobs that wait for jobs.
 *
 * A job is free when it has no row in dependencies left.  The row of a parent that ended well
 * is deleted in the transaction that ends it; that of one that is dead or was cancelled stays
 * and says so, and the job's if_parent_dead decides.
 *
 * To become a dependant one locks the parent's row against its end.  So either the parent ends
 * later and finds the new row, or it has ended and its outcome is known.
 *
 * Fan-in is the same seen from the other end: a new job names in `before` the blocked job that
 * has to wait for it as well.  If the new one waits for something itself, that could close a
 * circle, in which nothing ever starts.  Such calls come one after the other, because neither
 * of two open transactions sees the half circle of the other.
 *
 * Who waits for a job of a pipeline waits for the run, under the id of its first job: until a
 * stage ends and no other follows.
 */

/* What a job that was just enqueued, or found by its key, waits for, and what waits for it. */
create or replace function rota._link_job(
    job_id bigint,
    is_new boolean,
    after bigint[],
    before bigint
)
    returns void
    language plpgsql
as $$
begin
    if _link_job.before = _link_job.job_id then
        perform rota._refuse('before', format(
            'must not be the job itself, got %s', _link_job.before));
    elsif _link_job.before is not null then
        perform rota._hold_blocked(array[_link_job.before]);
        perform rota._depend(array[_link_job.before], array[_link_job.job_id]);
    end if;
    if _link_job.is_new then
        perform rota._depend(
            array(select _link_job.job_id from unnest(_link_job.after)), _link_job.after);
        perform rota._note_new(array[_link_job.job_id]);
    end if;
    if _link_job.before is not null then
        perform rota._check_no_circle(
            array[_link_job.before], array[_link_job.job_id], array['before']);
    end if;
end;
$$;

/* The same for a batch. */
create or replace function rota._link_jobs(jobs jsonb, job_ids bigint[], news boolean[])
    returns void
    language plpgsql
as $$
declare
    v_before bigint[];
    v_before_child bigint[];
    v_before_names text[];
    v_after bigint[];
    v_after_child bigint[];
begin
    select
        array_agg(n.before), array_agg(_link_jobs.job_ids[n.ordinal]),
        array_agg(format('jobs[%s].before', n.ordinal))
    into v_before, v_before_child, v_before_names
    from rota._new_jobs(_link_jobs.jobs) as n
    where n.before is not null;
    select array_agg(p.id), array_agg(_link_jobs.job_ids[n.ordinal])
    into v_after, v_after_child
    from rota._new_jobs(_link_jobs.jobs) as n
    cross join unnest(n.after) as p (id)
    where _link_jobs.news[n.ordinal];

    if v_before is not null then
        perform rota._refuse(b.name, format('must not be the job itself, got %s', b.before))
        from unnest(v_before, v_before_child, v_before_names) as b (before, job_id, name)
        where b.before = b.job_id;
        perform rota._hold_blocked(v_before);
        perform rota._depend(v_before, v_before_child);
    end if;
    perform rota._depend(v_after_child, v_after);
    if v_before is not null then
        perform rota._check_no_circle(v_before, v_before_child, v_before_names);
    end if;
    perform rota._note_new(array(
        select i.id
        from unnest(_link_jobs.job_ids, _link_jobs.news) as i (id, is_new)
        where i.is_new
    ));
end;
$$;

/* Lock the jobs that are to wait for more, so that they cannot start meanwhile. */
create or replace function rota._hold_blocked(job_ids bigint[])
    returns void
    language plpgsql
as $$
declare
    v_held bigint[];
    v_job_id bigint;
    v_status text;
begin
    v_held := array(
        select j.id
        from rota.jobs as j
        where j.id = any(_hold_blocked.job_ids)
          and j.status = 'blocked'
        order by j.id
        for share
    );
    perform rota._check_queues_of_jobs(v_held);
    select i.id
    into v_job_id
    from unnest(_hold_blocked.job_ids) as i (id)
    left join unnest(v_held) as h (id) on h.id = i.id
    where h.id is null
    limit 1;
    if not found then
        return;
    end if;

    select j.status into v_status from rota.jobs as j where j.id = v_job_id;
    if not found then
        perform rota._raise_not_live(v_job_id);
    end if;
    raise exception using
        errcode = 'RT013',
        message = format('job %s is %s and waits for no more jobs', v_job_id, v_status),
        hint = 'Name in `before` a job that is blocked; enqueue that with `after`, for example '
            'after the job that enqueues the others.';
end;
$$;

/* Wait for all others that may close a circle, before anything else is locked. */
create or replace function rota._lock_links()
    returns void
    language plpgsql
as $$
begin
    perform pg_advisory_xact_lock(hashtextextended('rota.links', 0));
end;
$$;

/* The same for a batch, if it has such jobs. */
create or replace function rota._lock_links_of(jobs jsonb)
    returns void
    language plpgsql
as $$
begin
    if jsonb_path_exists(_lock_links_of.jobs, '$[*] ? (exists(@.before)
        && (exists(@.after) || exists(@.idempotency_key) || exists(@.ordering_key)))') then
        perform rota._lock_links();
    elsif jsonb_path_exists(_lock_links_of.jobs,
        '$[*] ? (exists(@.after) && exists(@.ordering_key))') then
        perform rota._share_links();
    end if;
end;
$$;

/* Let those wait for us: we go into a line, and come after others. */
create or replace function rota._share_links()
    returns void
    language plpgsql
as $$
begin
    perform pg_advisory_xact_lock_shared(hashtextextended('rota.links', 0));
end;
$$;

/*
 * Refuse that one of *before* waits for a job that waits, perhaps over others, for it: for its
 * parents, and for who is in front of it in the line of its ordering key.
 */
create or replace function rota._check_no_circle(
    before bigint[],
    job_ids bigint[],
    arguments text[]
)
    returns void
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_before bigint;
begin
    -- A run goes by the id of its first job, and what it waits for by that of its live one.
    with recursive ancestors (before, its_run, run) as (
        select
            b.before,
            coalesce(w.first_job_id, b.before),
            coalesce(n.first_job_id, b.job_id)
        from unnest(_check_no_circle.before, _check_no_circle.job_ids) as b (before, job_id)
        left join rota.jobs as w on w.id = b.before
        left join rota.jobs as n on n.id = b.job_id
        union
        select a.before, a.its_run, p.run
        from ancestors as a
        -- Of one that has ended rows may be left, but it waits for nothing.
        join rota.jobs as j on j.id = coalesce(
            (select r.id from rota.jobs as r where r.first_job_id = a.run), a.run)
        cross join lateral (
            select d.parent_id as run
            from rota.dependencies as d
            where d.job_id = j.id
            union all (
                select coalesce(e.first_job_id, e.id)
                from rota.jobs as e
                where e.ordering_key = j.ordering_key
                  and coalesce(e.first_job_id, e.id) < a.run
                order by coalesce(e.first_job_id, e.id) desc
                limit 1
            )
        ) as p
        where a.run <> a.its_run
    )
    select a.before into v_before from ancestors as a where a.run = a.its_run limit 1;
    if not found then
        return;
    elsif cardinality(_check_no_circle.before) = 1 then
        perform rota._refuse(_check_no_circle.arguments[1], format(
            'must not be a job that this one waits for, got %s', v_before));
    end if;
    -- Of several, which is it?
    for v_place in 1..cardinality(_check_no_circle.before) loop
        perform rota._check_no_circle(
            _check_no_circle.before[v_place:v_place],
            _check_no_circle.job_ids[v_place:v_place],
            _check_no_circle.arguments[v_place:v_place]);
    end loop;
end;
$$;

/* Let each of job_ids wait for the one of parent_ids at the same place. */
create or replace function rota._depend(job_ids bigint[], parent_ids bigint[])
    returns void
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_live bigint[];
    v_runs bigint[];
begin
    if _depend.parent_ids is null or cardinality(_depend.parent_ids) = 0 then
        return;
    end if;
    with held as (
        select j.id, j.first_job_id
        from rota.jobs as j
        where j.id = any(_depend.parent_ids)
        order by j.id
        for key share
    )
    select array_agg(h.id), array_agg(coalesce(h.first_job_id, h.id))
    into v_live, v_runs
    from held as h;
    -- Of those that are not live the outcome is known, and has no other.
    insert into rota.dependencies (parent_id, job_id, is_failed)
    select distinct coalesce(l.run_id, e.parent_id), p.job_id, coalesce(e.is_failed, false)
    from unnest(_depend.parent_ids, _depend.job_ids) as p (id, job_id)
    left join unnest(v_live, v_runs) as l (id, run_id) on l.id = p.id
    left join lateral rota._ended_parent(case when l.id is null then p.id end) as e on true
    where coalesce(l.run_id, e.parent_id) is not null
    order by 1, 2
    on conflict do nothing;
end;
$$;

/*
 * What there is to wait for of a job that has ended: nothing if it did its work, itself if it
 * is dead or was cancelled, and its run if that goes on; raises RT001 if there is no such job.
 * Nothing for null.
 */
create or replace function rota._ended_parent(job_id bigint)
    returns table (parent_id bigint, is_failed boolean)
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    v_status text;
    v_first_job_id bigint;
begin
    if _ended_parent.job_id is null then
        return;
    end if;

    select f.status, f.first_job_id
    into v_status, v_first_job_id
    from rota.finished_jobs as f
    where f.id = _ended_parent.job_id;
    if not found then
        -- It may have been retried since we looked for it in jobs.
        select 'live', j.first_job_id
        into v_status, v_first_job_id
        from rota.jobs as j
        where j.id = _ended_parent.job_id
        for key share;
    end if;
    if v_first_job_id is not null then
        v_status := rota._hold_run(v_first_job_id);
    end if;
    if v_status is null then
        perform rota._raise_not_found(_ended_parent.job_id);
    elsif v_status <> 'succeeded' then
        parent_id := coalesce(v_first_job_id, _ended_parent.job_id);
        is_failed := v_status <> 'live';
        return next;
    end if;
end;
$$;

/* These jobs have ended: tell those that wait for them. */
create or replace function rota._settle_parents(parent_ids bigint[], status text)
    returns void
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        -- This snapshot may be older than a row that waits for us.
        perform rota._add_checks('parent', array(
            select format('%s %s', p.id, _settle_parents.status)
            from unnest(_settle_parents.parent_ids) as p (id)));
        return;
    end if;
    with freed as (
        delete from rota.dependencies as d
        where d.parent_id = any(_settle_parents.parent_ids)
          and _settle_parents.status = 'succeeded'
        returning d.job_id
    ),
    failed as (
        update rota.dependencies as d
        set is_failed = true
        where d.parent_id = any(_settle_parents.parent_ids)
          and _settle_parents.status <> 'succeeded'
        returning d.job_id
    )
    insert into rota.pending_checks (kind, subject)
    select distinct 'job', c.job_id::text
    from (select f.job_id from freed as f union all select f.job_id from failed as f) as c;
    perform rota._ring('');
end;
$$;

/* This job, or run, had ended so; it may be live again, or forgotten. */
create or replace function rota._check_parent(subject text)
    returns boolean
    language plpgsql
as $$
declare
    c_job_id constant bigint := split_part(_check_parent.subject, ' ', 1)::bigint;
    c_status constant text := split_part(_check_parent.subject, ' ', 2);
    v_status text;
begin
    perform rota._settle_parents(array[f.id], f.status)
    from rota.finished_jobs as f
    where f.id = c_job_id
      and f.first_job_id is null;

    if not found and not exists (
        select from rota.jobs as j where j.id = c_job_id and j.pipeline is null
    ) then
        v_status := coalesce(
            rota._run_status(c_job_id), c_status);
        -- What is live tells at its end.
        if v_status <> 'live' then
            perform rota._settle_parents(array[c_job_id], v_status);
        end if;
    end if;
    return true;
end;
$$;

/* Free a job that waits for nothing more; false if it is locked just now. */
create or replace function rota._check_job(subject text)
    returns boolean
    language plpgsql
as $$
declare
    c_job_id constant bigint := _check_job.subject::bigint;
    v_job rota.jobs;
begin
    select j.*
    into v_job
    from rota.jobs as j
    where j.id = c_job_id
    for update skip locked;
    if not found and exists (select from rota.jobs as j where j.id = c_job_id) then
        return false;
    elsif not found then
        perform rota._forget_parents(c_job_id);
        return true;
    elsif v_job.status <> 'blocked' then
        return true;
    end if;

    if coalesce(v_job.if_parent_dead, 'cancel') <> 'wait' then
        if rota._forget_failed(v_job.id)
          and v_job.if_parent_dead is distinct from 'run' then
            perform rota._cancel(v_job.id, v_job.lease_token, 'blocked',
                'a job that it waited for is dead or was cancelled');
            return true;
        end if;
    end if;
    if rota._has_parents(v_job.id) then
        return true;
    elsif v_job.ordering_key is not null then
        return rota._check_order(v_job.ordering_key);
    end if;
    perform rota._unblock(v_job.id);
    return true;
end;
$$;

/*
 * From the end of the index: parents end in about the order of their ids, and the entries at
 * the beginning are those of the dead.
 */
create or replace function rota._has_parents(job_id bigint)
    returns boolean
    language plpgsql
    stable
as $$
begin
    return (
        select d.parent_id
        from rota.dependencies as d
        where d.job_id = _has_parents.job_id
        order by d.parent_id desc
        limit 1
    ) is not null;
end;
$$;

/* Take away the rows of a job's parents that are still dead; whether there were any. */
create or replace function rota._forget_failed(job_id bigint)
    returns boolean
    language plpgsql
as $$
begin
    delete from rota.dependencies as d
    where d.ctid = any(array(
        select f.ctid
        from rota.dependencies as f
        where f.job_id = _forget_failed.job_id
          and f.is_failed
          -- Who brought a parent back may not have seen this row yet.
          and (select j.id from rota.jobs as j where j.id = f.parent_id) is null
          and (select j.id from rota.jobs as j where j.first_job_id = f.parent_id) is null
        for update skip locked
    ));
    return found;
end;
$$;

/* Take away the rows of a job that has ended, but for those that its parents just end. */
create or replace function rota._forget_parents(job_id bigint)
    returns void
    language plpgsql
as $$
begin
    delete from rota.dependencies as d
    where d.ctid = any(array(
        select f.ctid
        from rota.dependencies as f
        where f.job_id = _forget_parents.job_id
        for update skip locked
    ));
end;
$$;
