/*
 * waiting/dependencies.sql -- jobs that wait for jobs.
 *
 * dependencies has a row, an edge, for each parent that a job waits for.  When the parent
 * succeeds the edge goes; a job is free when it has none left.  If the parent is dead or was
 * cancelled, the child's if_parent_dead decides: it is cancelled and keeps its edges, so that
 * a retry waits again; or the edge goes; or it waits on for a retry of the parent.
 *
 * No cycle can exist.  A job waits for older ones: those in `depends_on` have to be there, and
 * so do those in front of it under its ordering key.  Only by `blocks` an older job waits for a
 * newer one; but that one has neither `depends_on` nor an ordering key and is not blocked: it
 * waits for nothing, and no way leads through it.
 *
 * No job is forgotten, although no session locks a parent.  One that comes in leaves a check,
 * and after the commit each of its parents has either ended, or its end is still to come and
 * will see the edge.  A parent that ends takes away its edges and then looks at each child: if
 * that has another edge whose parent's end is still to come, that end will look again, later;
 * if that end is under way too, neither may see what the other does, and a check is left; with
 * no edge, the child is opened, or where it is locked, or a trigger refuses it, a check is
 * left.
 *
 * A producer with `blocks` keeps the child from being opened until it commits, by a lock on its
 * row: a session that would open it leaves a check and continues, and after the commit sees the
 * edge.  Only acts on that very job wait for the producer.
 *
 * A parent with many children tells them by a check, in chunks.
 */

/* Let each job in *blocks* wait for the part at its place, and open none before the commit. */
create or replace function rota._block_children(
    blocks bigint[], parts bigint[], are_new boolean[], arguments text[]
) returns void language plpgsql as $$
declare
    v_held bigint[]; v_job_id bigint; v_status text;
begin
    perform rota._raise_not_found(min(o.id))
    from unnest(rota._jobs_outside_grants(blocks, 'producer')) as o (id)
    having min(o.id) is not null;
    perform rota._check_parts(blocks, parts, arguments);
    v_held := array(
        select j.id from rota.jobs as j
        where j.id = any(_block_children.blocks) and j.status = 'blocked'
        for key share skip locked
    );
    select b.id into v_job_id from unnest(_block_children.blocks) as b (id)
    where b.id not in (select unnest(v_held)) limit 1;
    if found then
        select j.status into v_status from rota.jobs as j where j.id = v_job_id;
        if not found then perform rota._raise_not_live(v_job_id); end if;
        raise exception using errcode = 'RT013',
            message = format(case v_status
                when 'blocked' then 'job %s is just being started, ended or changed'
                else 'job %s is %s and waits for no more jobs' end, v_job_id, v_status),
            hint = case v_status
                when 'blocked' then 'Try again when that transaction has ended.'
                else 'Name in `blocks` a job that is blocked: enqueue that one with '
                    '`depends_on`, for example on the job that enqueues the others.' end;
    end if;

    insert into rota.dependencies as d (parent_id, job_id)
    select distinct p.parent_id, b.id
    from unnest(_block_children.blocks, _block_children.parts) as b (id, part)
    join rota._parent_statuses(_block_children.parts) as p on p.parent_id = b.part
    where p.status <> 'succeeded' order by 1, 2 on conflict do nothing;
    -- A part that was found may end before this is committed.
    perform rota._add_checks('job', array(
        select b.id::text || ' all'
        from unnest(_block_children.blocks, _block_children.are_new) as b (id, is_new)
        where not b.is_new));
end $$;

/* Refuse parts, found by their keys, that wait for anything themselves or did not succeed: no
 * new one does. */
create or replace function rota._check_parts(blocks bigint[], parts bigint[], arguments text[])
    returns void language plpgsql as $$
declare
    -- By themselves: the planner may join the two lists by comparing each with each.
    c_bad_ids constant bigint[] := array(
        select e.parent_id from rota._parent_statuses(_check_parts.parts) as e
        where e.status in ('blocked', 'dead', 'cancelled')
           or e.ordering_key is not null and e.status <> 'succeeded'
    );
    v_part record;
begin
    if c_bad_ids = '{}' then return; end if;
    select p.id, p.argument, e.status, p.id = p.blocks as is_itself into v_part
    from unnest(_check_parts.blocks, _check_parts.parts, _check_parts.arguments)
        with ordinality as p (blocks, id, argument, ordinal)
    join rota._parent_statuses(c_bad_ids) as e on e.parent_id = p.id order by p.ordinal limit 1;
    raise exception using errcode = 'invalid_parameter_value',
        message = case
            when v_part.is_itself
            then format('%s must not be the job itself, got %s', v_part.argument, v_part.id)
            else format('%s cannot be given with the idempotency_key of job %s, which %s',
                v_part.argument, v_part.id, case
                    when v_part.status = 'blocked' then 'waits for others'
                    when v_part.status in ('dead', 'cancelled')
                        then 'ended as ' || v_part.status
                    else 'has an ordering key' end)
        end,
        hint = 'A part waits for nothing; use a pipeline for one with several steps.';
end $$;

/* How parents are or ended, all of one snapshot; null for one that is in neither table. */
create or replace function rota._parent_statuses(parent_ids bigint[])
    returns table (parent_id bigint, status text, ordering_key text) language plpgsql stable
    set enable_seqscan = off set enable_bitmapscan = off as $$
begin
    return query
    select p.id, coalesce(j.status, f.status), coalesce(j.ordering_key, f.ordering_key)
    from (select distinct u.id from unnest(_parent_statuses.parent_ids) as u (id)) as p
    left join rota.jobs as j on j.id = p.id
    left join lateral (
        select h.status, h.ordering_key from rota.finished_jobs as h
        -- Null for a live one, for which no partition is then read.
        where h.id = case when j.id is null then p.id end
    ) as f on true;
end $$;

/* These jobs, without runs that go on, have ended: tell those that wait for them. */
create or replace function rota._parents_ended(parent_ids bigint[], status text)
    returns void language plpgsql as $$
declare
    v_few bigint[]; v_many bigint[]; v_children bigint[];
begin
    -- This snapshot may be older than an edge, which then does not keep the parent.
    if current_setting('transaction_isolation') <> 'read committed' then
        perform rota._add_checks('parent', array(
            select format('%s 0 %s', p.id, _parents_ended.status)
            from unnest(_parents_ended.parent_ids) as p (id)));
        return;
    end if;

    select array_agg(p.id) filter (where n.edges <= 20 and _parents_ended.status = 'succeeded'),
        array_agg(p.id) filter (where n.edges > 20 or _parents_ended.status <> 'succeeded')
    into v_few, v_many from unnest(_parents_ended.parent_ids) as p (id)
    cross join lateral (
        select count(*) as edges
        from (select from rota.dependencies as d where d.parent_id = p.id limit 21) as d
    ) as n
    where n.edges > 0;
    if v_few is not null then
        with gone as (
            delete from rota.dependencies as d
            where d.ctid = any(array(
                select e.ctid from rota.dependencies as e
                where e.parent_id = any(v_few) for update skip locked
            ))
            returning d.job_id
        )
        select coalesce(array_agg(distinct g.job_id), '{}') into v_children from gone as g;
        perform rota._add_checks('job', rota._open_children(v_children)::text[]);
        -- Edges that another session has locked.
        v_many := v_many || array(
            select distinct d.parent_id from rota.dependencies as d
            where d.parent_id = any(v_few)
        );
    end if;
    perform rota._add_checks('parent', v_many::text[]);
end $$;

/* Open those that wait for nothing any more; returns those that are to be checked again. */
create or replace function rota._open_children(job_ids bigint[])
    returns bigint[] language plpgsql as $$
declare
    v_ids bigint[]; v_keys text[]; v_parents bigint[]; v_free bigint[]; v_doubtful bigint[];
    v_key text;
begin
    select array_agg(j.id), array_agg(j.ordering_key), array_agg(rota._newest_parent(j.id))
    into v_ids, v_keys, v_parents from rota.jobs as j
    where j.id = any(_open_children.job_ids) and j.status = 'blocked';
    if v_ids is null then return '{}'::bigint[]; end if;

    v_free := rota._still_to_end(array_remove(v_parents, null));
    v_doubtful := array(
        select c.id from unnest(v_ids, v_parents) as c (id, parent_id)
        where c.parent_id is not null and c.parent_id not in (select unnest(v_free))
    );
    for v_key in
        select distinct c.ordering_key
        from unnest(v_parents, v_keys) as c (parent_id, ordering_key)
        where c.parent_id is null and c.ordering_key is not null
    loop
        if not rota._check_order(v_key) then
            perform rota._add_checks('order', array[v_key]);
        end if;
    end loop;

    v_free := array(
        select c.id from unnest(v_ids, v_keys, v_parents) as c (id, ordering_key, parent_id)
        where num_nonnulls(c.ordering_key, c.parent_id) = 0
    );
    return v_doubtful
        || array(select unnest(v_free) except select unnest(rota._open_each(v_free)));
end $$;

/* Look at what a job waits for, from the newest parent on: 'id' as far as one that is still to
 * end, 'id all' and then 'id below' at all of them.  False if that is not to be known now. */
create or replace function rota._check_job(subject text)
    returns boolean language plpgsql as $$
declare
    c_id constant bigint := split_part(subject, ' ', 1)::bigint;
    c_from constant text := split_part(subject, ' ', 2);
    v_rule text; v_parents bigint[]; v_live bigint[]; v_done bigint[]; v_dead bigint;
    v_left bigint[];
begin
    select coalesce(j.if_parent_dead, 'cancel') into v_rule from rota.jobs as j
    where j.id = c_id and j.status = 'blocked';
    if not found then return true; end if;

    v_parents := array(
        select d.parent_id from rota.dependencies as d
        where d.job_id = c_id and d.parent_id
            < coalesce(nullif(nullif(c_from, ''), 'all')::bigint, 9223372036854775807)
        order by d.parent_id desc limit 500
    );
    select coalesce(array_agg(s.parent_id order by s.parent_id desc)
            filter (where s.status in ('blocked', 'queued', 'running', 'failed')), '{}'),
        -- One that is not kept any more cannot be retried, so none waits for that.
        array_agg(s.parent_id) filter (where s.status = 'succeeded'
            or v_rule = 'run' and s.is_bad or v_rule = 'wait' and s.status is null),
        min(s.parent_id) filter (where v_rule = 'cancel' and s.is_bad),
        coalesce(array_agg(s.parent_id) filter (where v_rule = 'wait'
            and s.status in ('dead', 'cancelled')), '{}')
    into v_live, v_done, v_dead, v_left
    from (
        select p.parent_id, p.status,
            -- A job that is not kept any more has none.
            coalesce(p.status in ('dead', 'cancelled'), true) as is_bad
        from rota._parent_statuses(v_parents) as p
    ) as s;
    if c_from = '' then v_live := v_live[1:1]; end if;

    if v_dead is not null then return rota._cancel_children(array[c_id], v_dead) = '{}'; end if;
    delete from rota.dependencies as d
    where d.ctid = any(array(
        select e.ctid from rota.dependencies as e
        where e.job_id = c_id and e.parent_id = any(v_done) for update skip locked
    ));

    if v_live <> '{}' and cardinality(rota._still_to_end(v_live)) < cardinality(v_live) then
        return false;
    -- A purge that has one locked may not have seen the edge; one that comes later does.
    elsif v_left <> '{}' and cardinality(array(
        select f.id from rota.finished_jobs as f
        where f.id = any(v_left) for key share skip locked
    )) < cardinality(v_left) then
        return false;
    elsif v_live <> '{}' and c_from = '' then
        return true;
    elsif cardinality(v_parents) = 500 then
        perform rota._add_checks('job', array[format('%s %s', c_id, v_parents[500])]);
        return true;
    elsif v_live <> '{}' or v_left <> '{}' then
        return true;
    elsif rota._open_children(array[c_id]) = '{}' then
        return true;
    elsif c_from in ('', 'all') then
        return false;
    end if;
    perform rota._add_checks('job', array[c_id::text], rota.now() + interval '50 ms');
    return true;
end $$;

/* Tell the children of an ended parent, 'id' and then 'id after', a chunk at a time.  Behind
 * that stands how it ended, where it may not be kept. */
create or replace function rota._check_parent(subject text)
    returns boolean language plpgsql as $$
declare
    c_id constant bigint := split_part(subject, ' ', 1)::bigint;
    c_after constant bigint := coalesce(nullif(split_part(subject, ' ', 2), '')::bigint, 0);
    c_status constant text := (
        select coalesce(s.status, nullif(split_part(_check_parent.subject, ' ', 3), ''), 'gone')
        from rota._parent_statuses(array[c_id]) as s);
    c_chunk constant integer := case when c_status = 'succeeded' then 1000 else 200 end;
    v_seen bigint[]; v_freed bigint[]; v_cancelled bigint[];
    v_doubtful bigint[] := '{}'::bigint[];
begin
    -- It was retried: its next end tells.
    if c_status in ('blocked', 'queued', 'running', 'failed') then return true; end if;

    v_seen := array(
        select d.job_id from rota.dependencies as d
        where d.parent_id = c_id and d.job_id > c_after order by d.job_id limit c_chunk
    );
    -- By the edges of those that have ended a retry of this job may still have to find them.
    select array_agg(s.id) filter (where c_status = 'succeeded' and j.id is not null
            or j.if_parent_dead = 'run'),
        array_agg(s.id) filter (where c_status <> 'succeeded' and j.status = 'blocked'
            and coalesce(j.if_parent_dead, 'cancel') = 'cancel')
    into v_freed, v_cancelled from unnest(v_seen) as s (id)
    left join lateral (select i.* from rota.jobs as i where i.id = s.id limit 1) as j on true;
    if v_cancelled is not null then
        begin
            v_doubtful := rota._cancel_children(v_cancelled, c_id);
        exception when others then
            if rota._is_no_fault_of_a_row(sqlstate) then raise; end if;
            -- Each by itself, then: a trigger may refuse one of them.
            v_doubtful := v_cancelled;
        end;
    end if;
    if v_freed is not null then
        with gone as (
            delete from rota.dependencies as d
            where d.ctid = any(array(
                select e.ctid from rota.dependencies as e
                where e.parent_id = c_id and e.job_id = any(v_freed) for update skip locked
            ))
            returning d.job_id
        )
        select coalesce(array_agg(g.job_id), '{}') into v_cancelled from gone as g;
        v_doubtful := v_doubtful || rota._open_children(v_cancelled)
            || array(select unnest(v_freed) except select unnest(v_cancelled));
    end if;
    perform rota._add_checks('job', v_doubtful::text[], rota.now() + interval '50 ms');
    if cardinality(v_seen) = c_chunk then
        perform rota._add_checks('parent',
            array[format('%s %s %s', c_id, v_seen[c_chunk], c_status)]);
    end if;
    return true;
end $$;

/* Cancel blocked jobs because of a parent that did not succeed; returns those that another
 * session has locked, or all if the parent was retried.  Their edges stay for a retry. */
create or replace function rota._cancel_children(job_ids bigint[], parent_id bigint)
    returns bigint[] language plpgsql as $$
declare
    v_ids bigint[]; v_tokens bigint[]; v_status text;
begin
    v_ids := array(
        select b.id from rota.jobs as b
        where b.id = any(_cancel_children.job_ids) and b.status = 'blocked'
          -- One that an operator has brought back since it was found waits for good.
          and coalesce(b.if_parent_dead, 'cancel') = 'cancel'
        for update skip locked
    );
    -- By a snapshot that is younger than the locks: where it does not show a retry of the
    -- parent, the check of that retry finds the locks, or what has become of the jobs.
    v_status := (
        select s.status from rota._parent_statuses(array[_cancel_children.parent_id]) as s);
    with held as (
        update rota.jobs as j
        set cancel_reason = (rota._parent_reasons(_cancel_children.parent_id))[
            case v_status when 'dead' then 1 when 'cancelled' then 2 else 3 end]
        where j.id = any(v_ids)
          and coalesce(v_status, 'dead') in ('dead', 'cancelled') returning j.id, j.lease_token
    )
    select array_agg(h.id), array_agg(h.lease_token) into v_ids, v_tokens from held as h;
    perform rota._end_jobs(v_ids, v_tokens, 'blocked', 'cancelled');
    return array(
        select j.id from rota.jobs as j
        where j.id = any(_cancel_children.job_ids) and j.status = 'blocked'
    );
end $$;

/* The reasons by which a job was cancelled because of this one, whole: an operator may give one
 * that begins like them. */
create or replace function rota._parent_reasons(parent_id bigint)
    returns text[] language sql immutable as $$
select array[
    format('parent %s is dead', parent_id), format('parent %s was cancelled', parent_id),
    format('parent %s is not kept any more', parent_id)
]
$$;

/* Have those children of a job brought back that were cancelled because of it, 'id after', a
 * chunk at a time; or bring one back, 'id child one', and have its own.  One whose idempotency
 * key is taken, or that was erased, stays as it is.  False where a session has it locked. */
create or replace function rota._check_retry(subject text)
    returns boolean language plpgsql as $$
declare
    c_id constant bigint := split_part(subject, ' ', 1)::bigint;
    c_at constant bigint := split_part(subject, ' ', 2)::bigint;
    c_chunk constant integer := 200;
    v_seen bigint[];
begin
    if split_part(subject, ' ', 3) <> 'one' then
        v_seen := array(
            select d.job_id from rota.dependencies as d
            where d.parent_id = c_id and d.job_id > c_at order by d.job_id limit c_chunk
        );
        perform rota._add_checks('retry', array[format('%s %s one', c_id, s.id)])
        from (
            select f.id from rota.finished_jobs as f
            where f.id = any(v_seen) and f.status = 'cancelled'
              and f.cancel_reason = any(rota._parent_reasons(c_id))
            union all
            -- What may just be cancelled for what was before the retry.
            select j.id from rota.jobs as j
            where j.id = any(v_seen) and j.status = 'blocked'
              and j.xmax <> '0'::xid and j.xmax <> j.xmin
            order by 1
        ) as s;
        if cardinality(v_seen) = c_chunk then
            perform rota._add_checks('retry', array[format('%s %s', c_id, v_seen[c_chunk])]);
        end if;
        return true;
    elsif exists (select from rota.jobs as j where j.id = c_at and j.status = 'blocked') then
        return rota._still_to_end(array[c_at]) <> '{}';
    end if;
    begin
        -- It may have come back since, and have ended in another way.
        perform from rota.finished_jobs as f
        where f.id = c_at and f.status = 'cancelled'
          and f.cancel_reason = any(rota._parent_reasons(c_id))
        for update nowait;
        if found then
            -- It has not run: a time that it was planned for is still to come.
            perform rota._restore_jobs(array[c_at], keeps_run_at => true);
            -- At once: its own end takes its edges along.
            perform rota._check_retry(format('%s 0', c_at));
        end if;
    exception
        when sqlstate 'RT007' or sqlstate 'RT014' or sqlstate 'RT016'
          or invalid_parameter_value then null;
        when lock_not_available then return false;
    end;
    return true;
end $$;

create or replace function rota.retry_with_dependants(
    job_id bigint, force boolean default false
) returns integer language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_dependants integer;
begin
    perform rota.retry_job(job_id, force);
    v_dependants := rota._retry_dependants(array[job_id]);
    perform rota._audit('retry_with_dependants', null, array[job_id], null,
        jsonb_build_object('dependants', v_dependants));
    return 1 + v_dependants;
end $$;

comment on function rota.retry_with_dependants is
    'Run a job again as retry_job() does, let maintenance restore the jobs that were cancelled '
    'because of it, and their dependants, and return the number of jobs, this one and up to '
    '1000 others; those whose idempotency_key is taken stay cancelled; raises RT001, RT007, '
    'RT008, RT016, 22023.';

/* Have the jobs restored that were cancelled because of these, and return how many these are,
 * 1000 at most; all come back. */
create or replace function rota._retry_dependants(job_ids bigint[])
    returns integer language plpgsql as $$
declare
    v_dependants constant text[] := array(
        select format('%s %s one', d.parent_id, d.job_id)
        from rota._dependants(job_ids, 'cancelled', 1000) as d
    );
begin
    -- Each by its id: a job that succeeds before maintenance comes takes its edges along.
    perform rota._add_checks('retry', array[s.subject])
    from unnest(v_dependants || array(
        select format('%s 0', i.id) from unnest(_retry_dependants.job_ids) as i (id)
        where exists (select from rota.dependencies as d where d.parent_id = i.id)
    )) as s (subject);
    return cardinality(v_dependants);
end $$;

/* The jobs that were cancelled because of these, and because of those; or those blocked ones
 * that are to be cancelled if these are.  So many at most, and found among twice as many
 * dependants: a job may have a million. */
create or replace function rota._dependants(job_ids bigint[], status text, max_jobs integer)
    returns table (parent_id bigint, job_id bigint) language plpgsql stable
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
begin
    return query
    with recursive dependants (parent_id, id, is_one) as (
        select null::bigint, i.id, true from unnest(_dependants.job_ids) as i (id)
        union
        select p.id, d.job_id, case _dependants.status
            when 'cancelled' then exists (
                select from rota.finished_jobs as f
                where f.id = d.job_id and f.status = 'cancelled'
                  and f.cancel_reason = any(rota._parent_reasons(p.id))
            )
            else exists (
                select from rota.jobs as j
                where j.id = d.job_id and j.status = 'blocked'
                  and coalesce(j.if_parent_dead, 'cancel') = 'cancel'
            ) end
        from dependants as p
        -- Not pulled up, so that the planner cannot read all edges for a join.
        cross join lateral (
            select e.job_id from rota.dependencies as e where e.parent_id = p.id offset 0
        ) as d
        where p.is_one
    )
    -- The recursion goes on only as far as it is asked.
    select s.parent_id, s.id
    from (
        select p.parent_id, p.id, p.is_one from dependants as p
        limit cardinality(_dependants.job_ids) + 2 * _dependants.max_jobs
    ) as s
    where s.is_one and s.parent_id is not null limit _dependants.max_jobs;
end $$;

/* Delete up to max_rows edges of jobs that neither live nor are kept, and return how many.  A
 * call looks at a part of all, and goes on where the last of its session ended. */
create or replace function rota._purge_dependencies(max_rows integer)
    returns integer language plpgsql set enable_seqscan = off set enable_bitmapscan = off
    set enable_sort = off as $$
declare
    c_jobs constant integer := 2000;
    v_after bigint := coalesce(rota._scan_start('edges')::bigint, 0);
    v_seen bigint[]; v_gone bigint[];
    v_deleted integer := 0;
begin
    v_seen := array(
        with recursive waiting (job_id, number) as (
            select v_after, 0
            union all
            select (
                select d.job_id from rota.dependencies as d where d.job_id > w.job_id
                order by d.job_id limit 1
            ), w.number + 1
            from waiting as w where w.job_id is not null and w.number < c_jobs
        )
        select w.job_id from waiting as w where w.job_id is not null and w.number > 0
    );
    v_gone := array(
        select s.parent_id from rota._parent_statuses(v_seen) as s where s.status is null
    );
    if v_gone <> '{}' then
        delete from rota.dependencies as d
        where d.ctid = any(array(
            select e.ctid from rota.dependencies as e where e.job_id = any(v_gone)
            limit _purge_dependencies.max_rows for update skip locked
        ));
        get diagnostics v_deleted = row_count;
    end if;
    if v_deleted < max_rows then
        perform rota._keep_scan_start('edges', coalesce(v_seen[c_jobs], 0)::text);
    end if;
    return v_deleted;
end $$;

/* Of the jobs that new ones are to wait for, those that have not succeeded; refused is one that
 * is unknown, or whose queue moves to another database.  What ends after this is kept by
 * retention until this transaction is over, since it sees the lock. */
create or replace function rota._parents_to_come(parent_ids bigint[])
    returns bigint[] language plpgsql as $$
declare
    v_parents bigint[]; v_unknown bigint;
begin
    -- From here on the move waits for this transaction, if it began without being seen.
    perform pg_current_xact_id();
    lock table rota.dependencies in row exclusive mode;
    if exists (select from rota.queue_moves) then
        perform rota._check_stays(j.queue, 'a job that others wait for')
        from rota.jobs as j where j.id = any(_parents_to_come.parent_ids);
    end if;
    -- At once: who looks again may find that retention has removed a dead one.
    select array_agg(p.parent_id order by p.parent_id) filter (where p.status <> 'succeeded'),
        min(p.parent_id) filter (where p.status is null)
    into v_parents, v_unknown from rota._parent_statuses(_parents_to_come.parent_ids) as p;
    if v_unknown is not null then perform rota._raise_not_found(v_unknown); end if;
    return v_parents;
end $$;
