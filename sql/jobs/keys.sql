/*
 * jobs/keys.sql -- what an idempotency key can do beyond being unique.
 *
 * A key belongs to the job type, and that of a run to its pipeline: the same key of another
 * type is another job.  So no call ever changes the type of a job that it finds.
 *
 * Promises.  A key has at most one live job.  With unique_for it makes no new job for that
 * time, whatever became of the last one.  With on_conflict replace, the job that waits takes
 * the new payload, time and priority.  With rerun, so it does too, and if the job is running,
 * exactly one more run follows it, with the newest payload, and the two never overlap; an
 * update that is not newer than the last one seen is ignored.
 *
 * Held by two unique rows.  jobs_idempotency_key_idx is the key's live job.  The row of
 * idempotency_keys is the memory of a key that outlives its job: until when it is unique, and
 * which version was seen last.  Both are locked in this order, the job first, and many keys in
 * their order.  Only replace, which changes a waiting job, waits for an open claim of it.  No
 * subtransaction is opened and closed in between: a session that waits for one of its locks
 * would wait for the whole transaction, also after the lock was released.
 *
 * The rerun of a job that runs, or that another session has locked, is a row of reruns.  It
 * locks nothing, so a worker that ends the job or heartbeats never waits for its producer.  The
 * transaction that ends the job, or returns it to a waiting status, then looks for such rows;
 * one that is not committed by then it cannot see.  So each row leaves a check, which finds the
 * job running and unlocked, and then the end of the job is still to come and will see the row;
 * or it takes the row as a call that comes only now.
 *
 * A batch waits for a job that another session has locked only while it holds nothing itself,
 * since finish_jobs() and the like lock jobs in the order of their ids.
 */

/* enqueue() with a rule for a key, with a key and something to wait for, or with blocks. */
create or replace function rota._enqueue_special(
    new_job rota.jobs, unique_for interval, on_conflict text, updated_at timestamptz,
    max_wait interval, depends_on bigint[], blocks bigint
) returns bigint language plpgsql set enable_seqscan = off set jit = off as $$
declare
    v_job_id bigint; v_is_new boolean;
begin
    perform rota._check_key_rule('', new_job.idempotency_key, unique_for, on_conflict,
        updated_at, max_wait, new_job.expires_at);
    -- Who has named a stage is not told its queue.
    perform rota._check_queues('producer', array[new_job.queue],
        'stage ' || quote_literal(new_job.stage));

    select k.job_id, k.is_new into v_job_id, v_is_new
    from rota._enqueue_keyed(_enqueue_special.new_job, _enqueue_special.unique_for,
        _enqueue_special.on_conflict, _enqueue_special.updated_at, _enqueue_special.max_wait,
        true) as k;
    if not v_is_new and on_conflict <> 'keep' then
        perform rota._check_queues_of_jobs(array[v_job_id]);
    end if;
    if v_is_new or blocks is not null then
        perform rota._jobs_came_in(case when v_is_new then array[v_job_id] end,
            array(select v_job_id from unnest(_enqueue_special.depends_on)),
            case when v_is_new then depends_on end,
            case when blocks is not null then array[blocks] end, array[v_job_id],
            array[v_is_new], array['blocks']);
    end if;
    perform rota._notify_for(array[v_job_id]);
    return v_job_id;
end $$;

/* Find or insert the one job of a key, then ask the memory of the key, then change the job; or
 * ask for another run of the job, which a call before this in the batch has done too.  The job
 * may have ended since; the session that makes the next one waits for the memory, which we
 * hold.  Raises RTB00, which no caller sees, where another session has the job locked and it
 * may not wait. */
create or replace function rota._enqueue_keyed(
    new_job rota.jobs, unique_for interval, on_conflict text, updated_at timestamptz,
    max_wait interval, may_wait boolean, asked_job_id bigint default null,
    new_ids bigint[] default null, out job_id bigint, out is_new boolean,
    out is_requested boolean
) language plpgsql as $$
declare
    v_key constant text := new_job.idempotency_key;
    v_scope constant text := coalesce('pipeline ' || new_job.pipeline, new_job.job_type);
    v_is_versioned constant boolean := unique_for is not null or updated_at is not null;
    v_is_locked constant boolean := on_conflict = 'replace' or on_conflict = 'keep'
        and v_is_versioned and current_setting('transaction_isolation') <> 'read committed';
    -- It does not lock a running job, whose end would then wait for this transaction.  Only if
    -- the job was claimed while we waited for its lock, PostgreSQL keeps that.
    v_leaves_running constant boolean := on_conflict = 'replace'
        and current_setting('transaction_isolation') = 'read committed';
begin
    is_requested := false;
    new_job.run_at := case when new_job.run_at is not null then least(new_job.run_at,
        coalesce(new_job.created_at, rota.now()) + rota._exact(max_wait)) end;
    if v_is_versioned and current_setting('transaction_isolation') = 'read committed' then
        -- Most calls with a known key end here, and lock and write nothing.
        select k.job_id into job_id from rota.idempotency_keys as k
        where k.idempotency_key = v_key and k.key_scope = v_scope
          and (_enqueue_keyed.unique_for is not null and k.unique_until > rota.now()
            or k.source_updated_at >= _enqueue_keyed.updated_at);
        if found then
            job_id := coalesce(rota._find_live(v_key, v_scope), job_id);
            is_new := false;
            return;
        end if;
    end if;
    for v_try in 1..100 loop
        is_new := false;
        if v_leaves_running then
            select case when j.status = 'running' then j.id end into job_id
            from rota.jobs as j
            where j.idempotency_key = v_key
              and coalesce('pipeline ' || j.pipeline, j.job_type) = v_scope;
            if job_id is not null then return; end if;
        end if;
        if v_is_locked then
            job_id := rota._lock_keyed(v_key, v_scope, not v_leaves_running, may_wait);
            if job_id is null and not may_wait
              and rota._find_keyed(v_key, v_scope) is not null then
                raise exception using errcode = 'RTB00', message = v_key, detail = v_scope;
            end if;
        elsif on_conflict = 'rerun' then
            job_id := case when asked_job_id is null
                then rota._lock_keyed(v_key, v_scope, false, false) end;
            is_requested := job_id is null;
            if is_requested then
                job_id := coalesce(asked_job_id, rota._find_keyed(v_key, v_scope));
            end if;
        end if;
        exit when job_id is not null;
        new_ids := coalesce(new_ids, rota._new_ids(1));
        job_id := (rota._insert_requested(array[new_job], new_ids))[1];
        is_new := job_id is not null;
        is_requested := is_requested and not is_new;
        exit when is_new;
        if not v_is_locked then job_id := rota._find_keyed(v_key, v_scope); end if;
        exit when job_id is not null;
    end loop;
    if job_id is null then perform rota._raise_swallowed('the job'); end if;

    if v_is_versioned and not rota._hold_key(v_key, v_scope, job_id, new_job.queue,
        unique_for, updated_at) then
        if is_new then
            -- The key is still unique, or has seen this version: as if we had not come.
            delete from rota.jobs as j where j.id = _enqueue_keyed.job_id and j.lease_token = 0;
            is_new := false;
            select k.job_id into job_id from rota.idempotency_keys as k
            where k.idempotency_key = v_key and k.key_scope = v_scope;
        end if;
    elsif on_conflict = 'keep' then
        null;
    elsif is_requested then
        -- Since the first call for this run, of which each tells the next.
        new_job.created_at := coalesce((
            select (r.job ->> 'created_at')::timestamptz from rota.reruns as r
            where r.job_id = _enqueue_keyed.job_id and r.seen is null
            order by r.id desc limit 1
        ), new_job.created_at, rota.now());
        insert into rota.reruns (job_id, run_at, job, max_wait)
        values (_enqueue_keyed.job_id, least(coalesce(new_job.run_at, rota.now()),
                new_job.created_at + rota._exact(_enqueue_keyed.max_wait)),
            to_jsonb(_enqueue_keyed.new_job)
                || jsonb_build_object('payload', coalesce(new_job.payload, '{}')),
            _enqueue_keyed.max_wait);
        perform rota._add_checks('rerun', array[job_id::text]);
    else
        -- Whatever was to follow is older than this, also what was to follow a job before.
        perform from rota._take_reruns(array(
            select r.job_id from rota.reruns as r
            where r.idempotency_key = v_key and r.job_type = v_scope
        ));
        -- So is what a tick has locked, which a check finds by the snapshot; that may not show
        -- what this transaction itself has asked for, and has just taken.
        insert into rota.reruns (job_id, run_at, job, seen)
        select r.job_id, r.run_at, jsonb_build_object('idempotency_key', v_key,
            'job_type', v_scope), pg_current_snapshot()
        from rota.reruns as r
        where r.idempotency_key = v_key and r.job_type = v_scope and r.seen is null limit 1;
        if not is_new then
            perform rota._update_keyed(job_id, new_job, on_conflict = 'rerun', max_wait);
        end if;
    end if;
    -- After the write, for which a move waits that begins later.
    if (v_is_versioned or on_conflict <> 'keep') and exists (select from rota.queue_moves) then
        perform rota._check_stays(new_job.queue, 'a rule for a key');
    end if;
end $$;

/* Lock the live job of a key, if it waits or running ones are wanted too; null if there is
 * none, or where another session has it locked and the caller may not wait. */
create or replace function rota._lock_keyed(
    idempotency_key text, key_scope text, also_running boolean, may_wait boolean
) returns bigint language plpgsql as $$
declare
    v_job_id bigint;
begin
    if may_wait then
        select j.id into v_job_id from rota.jobs as j
        where j.idempotency_key = _lock_keyed.idempotency_key
          and coalesce('pipeline ' || j.pipeline, j.job_type) = _lock_keyed.key_scope
          and (j.status <> 'running' or _lock_keyed.also_running)
        for update;
    else
        select j.id into v_job_id from rota.jobs as j
        where j.idempotency_key = _lock_keyed.idempotency_key
          and coalesce('pipeline ' || j.pipeline, j.job_type) = _lock_keyed.key_scope
          and (j.status <> 'running' or _lock_keyed.also_running)
        for update skip locked;
    end if;
    return v_job_id;
end $$;

/* Take the key for a new event; false if it is still unique, or has seen this version. */
create or replace function rota._hold_key(
    idempotency_key text, key_scope text, job_id bigint, queue text, unique_for interval,
    updated_at timestamptz
) returns boolean language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    v_unique_until constant timestamptz := v_now + rota._exact(unique_for);
begin
    insert into rota.idempotency_keys as k (idempotency_key, key_scope, job_id, queue,
        unique_until, source_updated_at, expires_at)
    values (_hold_key.idempotency_key, _hold_key.key_scope, _hold_key.job_id, _hold_key.queue,
        v_unique_until, _hold_key.updated_at,
        coalesce(v_unique_until, v_now + interval '90 days'))
    on conflict on constraint idempotency_keys_pkey do update
    set job_id = excluded.job_id, queue = excluded.queue,
        unique_until = coalesce(excluded.unique_until, k.unique_until),
        source_updated_at = coalesce(excluded.source_updated_at, k.source_updated_at),
        expires_at = greatest(excluded.expires_at, k.expires_at)
    where (excluded.unique_until is null or coalesce(k.unique_until, '-infinity') <= v_now)
      and (excluded.source_updated_at is null
        or coalesce(k.source_updated_at, '-infinity') < excluded.source_updated_at);
    return found;
end $$;

/* Give the waiting job of the key, which the caller has locked, what is new.  A failed job has
 * all attempts; a rerun without a time keeps its backoff, and waits for the retry budget.  What
 * was asked for before its last attempt was in that: so max_wait counts from there, or each
 * call would retry it at once. */
create or replace function rota._update_keyed(
    job_id bigint, new_job rota.jobs, is_rerun boolean, max_wait interval
) returns void language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    v_run_at constant timestamptz := coalesce(new_job.run_at, v_now);
begin
    update rota.jobs as j
    set payload = coalesce(new_job.payload, '{}'),
        priority = coalesce(new_job.priority, 0::smallint), headers = new_job.headers,
        expires_at = coalesce(
            new_job.expires_at, rota._default_expiry(j.job_type, j.queue, v_run_at)),
        run_at = case
            when j.status = 'failed' and _update_keyed.is_rerun and new_job.run_at is null
                then j.run_at
            else least(v_run_at, greatest(j.created_at, j.started_at, j.failed_at)
                + rota._exact(_update_keyed.max_wait))
        end,
        attempts = 0, updated_at = v_now
    where j.id = _update_keyed.job_id and j.status <> 'running';
    perform rota._enter_lanes(array[j.id]) from rota.jobs as j
    where j.id = _update_keyed.job_id
      and not (_update_keyed.is_rerun and new_job.run_at is null
        and coalesce(j.hold, '') like 'retries %');
end $$;

/* Take what was to follow these jobs, which the caller has locked or ended, and return the
 * newest of each, unless it was overtaken.  What another session has locked stays, so does what
 * was to follow an earlier job of the key, and what an older snapshot may not show: a check
 * comes back to it.  A row with the snapshot of this transaction tells it what was there by
 * now, and so was overtaken. */
create or replace function rota._take_reruns(job_ids bigint[])
    returns setof rota.reruns language plpgsql rows 1 as $$
declare
    v_newest rota.reruns[]; v_seen pg_snapshot;
begin
    if not rota._may_have_reruns(job_ids) then return; end if;
    with taken as (
        delete from rota.reruns as r
        where r.id = any(array(
            select n.id from rota.reruns as n
            where n.job_id = any(_take_reruns.job_ids) and n.seen is null
            -- By no index of ids, or those of all jobs were read.
            order by n.id + 0 desc limit 10000 for update skip locked
        ))
        returning r as rerun
    )
    select array_agg(n.rerun), pg_current_snapshot() into v_newest, v_seen
    from (
        select distinct on ((t.rerun).job_id) t.rerun from taken as t
        where not rota._is_overtaken(t.rerun) order by (t.rerun).job_id, (t.rerun).id desc
    ) as n;
    insert into rota.reruns (job_id, run_at, job, seen)
    select n.job_id, n.run_at, jsonb_build_object('idempotency_key', n.idempotency_key,
        'job_type', n.job_type), v_seen
    from unnest(v_newest) as n
    where exists (
        select from rota.reruns as r
        where r.idempotency_key = n.idempotency_key and r.job_type = n.job_type
          and r.seen is null and r.id < n.id and pg_visible_in_snapshot(r.made_by, v_seen)
    );
    perform rota._add_checks('rerun', array(
        select i.id::text from unnest(_take_reruns.job_ids) as i (id)
        where current_setting('transaction_isolation') <> 'read committed'
          or exists (select from rota.reruns as r where r.job_id = i.id)));
    return query select n.* from unnest(v_newest) as n;
end $$;

/* Whether a run was asked for after one of these jobs, as far as this transaction can tell. */
create or replace function rota._may_have_reruns(job_ids bigint[])
    returns boolean language plpgsql stable as $$
begin
    return exists (select from rota.reruns as r where r.job_id = any(_may_have_reruns.job_ids))
      or current_setting('transaction_isolation') <> 'read committed';
end $$;

/* Whether a newer call of the key has overtaken a run that is to follow. */
create or replace function rota._is_overtaken(rerun rota.reruns)
    returns boolean language plpgsql stable as $$
begin
    return exists (
        select from rota.reruns as m
        where m.idempotency_key = rerun.idempotency_key and m.job_type = rerun.job_type
          and m.seen is not null and m.id > rerun.id
          and pg_visible_in_snapshot(rerun.made_by, m.seen)
    );
end $$;

/* Of these jobs, which the caller returns to a waiting status, the next attempt is also the
 * run that was asked for while they ran: with its payload, headers and priority, at its time
 * unless they are to run at once, and all attempts.  Returns the ids of those for which there
 * was one. */
create or replace function rota._begin_rerun(
    job_ids bigint[], keeps_run_at boolean default false
) returns bigint[] language plpgsql as $$
declare
    v_ids bigint[];
begin
    with begun as (
        update rota.jobs as j
        set attempts = 0, payload = r.job -> 'payload',
            headers = nullif(r.job -> 'headers', 'null'),
            priority = coalesce((r.job ->> 'priority')::smallint, 0::smallint),
            run_at = greatest(j.run_at, case when not keeps_run_at then r.run_at end),
            expires_at = rota._default_expiry(j.job_type, j.queue, r.run_at)
        from rota._take_reruns(_begin_rerun.job_ids) as r
        where j.id = r.job_id returning j.id
    )
    select coalesce(array_agg(b.id), '{}') into v_ids from begun as b;
    return v_ids;
end $$;

/* The runs that were to follow jobs that have just ended: as these were, with the payload,
 * headers, priority and time of the newest call.  None of them is of a pipeline, whose keys no
 * enqueue() finds. */
create or replace function rota._follow_up(job_ids bigint[])
    returns void language plpgsql as $$
begin
    perform rota._notify_for(rota._insert_jobs(
        array_agg(jsonb_populate_record(null::rota.jobs, to_jsonb(f) || jsonb_build_object(
            'payload', r.job -> 'payload', 'headers', r.job -> 'headers', 'priority',
            r.job -> 'priority', 'run_at', r.run_at, 'status', null, 'definition', null,
            'scheduled_for', null, 'last_error', null, 'error_type', null, 'failed_at', null,
            'created_at', null, 'expires_at', null)) order by f.idempotency_key, f.job_type),
        rota._new_ids(count(*)::integer)))
    from rota._take_reruns(_follow_up.job_ids) as r
    cross join lateral (
        select h.* from rota.finished_jobs as h where h.id = r.job_id limit 1
    ) as f
    having count(*) > 0;
end $$;

/* Do what is left to do for the runs that are to follow a job; false if a session has locked
 * what it is about. */
create or replace function rota._check_reruns(job_id bigint)
    returns boolean language plpgsql as $$
declare
    v_rerun rota.reruns; v_job record; v_new_job rota.jobs; v_next_id bigint; v_ids bigint[];
begin
    select j.status, j.xmax <> '0'::xid and j.xmax <> j.xmin as may_be_locked into v_job
    from rota.jobs as j where j.id = _check_reruns.job_id;
    if v_job.status = 'running' and v_job.may_be_locked then
        return false;
    elsif v_job.status <> 'running' then
        perform from rota.jobs as j
        where j.id = _check_reruns.job_id and j.status <> 'running' for update skip locked;
        if not found then return false; end if;
    end if;
    select r.* into v_rerun from rota.reruns as r where r.job_id = _check_reruns.job_id
    limit 1;
    if not found then return true; end if;
    -- Only the newest of the key counts.  One snapshot tells: if the job ends just now, the run
    -- of what is newest here begins after the commit of what is deleted.
    with asked as materialized (
        select r.id, rota._is_overtaken(r) as is_overtaken from rota.reruns as r
        where r.idempotency_key = v_rerun.idempotency_key and r.job_type = v_rerun.job_type
          and r.seen is null
    ), passed as (
        delete from rota.reruns as r
        where r.id = any(array(
            select n.id from rota.reruns as n
            where n.id = any(array(
                select a.id from asked as a
                where a.is_overtaken
                  or a.id < (select max(l.id) from asked as l where not l.is_overtaken)
                limit 10000
            ))
            for update skip locked
        ))
    )
    delete from rota.reruns as r
    where r.idempotency_key = v_rerun.idempotency_key and r.job_type = v_rerun.job_type
      and r.seen is not null and not exists (select from asked as a where a.is_overtaken);
    if v_job.status = 'running' then return true; end if;

    select r.* into v_rerun from rota.reruns as r where r.job_id = _check_reruns.job_id
    order by r.id desc limit 1;
    if not found then return true; end if;
    perform from rota.reruns as r where r.id = v_rerun.id for update skip locked;
    if not found or v_rerun.seen is not null or exists (
        select from rota.reruns as r
        where r.idempotency_key = v_rerun.idempotency_key and r.job_type = v_rerun.job_type
          and r.id < v_rerun.id
    ) then
        return false;
    end if;
    v_new_job := jsonb_populate_record(null::rota.jobs,
        v_rerun.job || '{"created_at": null, "status": null}');
    if v_job.status is not null then
        v_ids := array[job_id];
        perform rota._update_keyed(job_id, v_new_job, true, v_rerun.max_wait);
    else
        v_next_id := rota._find_keyed(v_new_job.idempotency_key, v_new_job.job_type);
        if v_next_id is not null then
            -- The key has another job by now, which this run is to follow.
            update rota.reruns as r set job_id = v_next_id where r.id = v_rerun.id;
            perform rota._add_checks('rerun', array[v_next_id::text]);
            return true;
        end if;
        v_ids := rota._insert_at_once(v_new_job);
        if v_ids = '{}' then return false; end if;
        -- Asked while this job has the key, so that no newer one can come and go meanwhile.
        if rota._is_overtaken(v_rerun) then
            delete from rota.jobs as j where j.id = any(v_ids) and j.lease_token = 0;
        else
            perform rota._jobs_came_in(v_ids);
        end if;
    end if;
    delete from rota.reruns as r where r.id = v_rerun.id;
    perform rota._notify_for(v_ids);
    return not exists (select from rota.reruns as r where r.job_id = _check_reruns.job_id);
end $$;

/* Insert a job, unless another transaction is just inserting one of its key: this one may hold
 * other keys, and does not take them in order. */
create or replace function rota._insert_at_once(new_job rota.jobs)
    returns bigint[] language plpgsql set lock_timeout = '1ms' as $$
begin
    return rota._insert_jobs(array[new_job], rota._new_ids(1));
exception when lock_not_available then
    return '{}'::bigint[];
end $$;

/* enqueue_many() for a batch with rules for its keys, which are locked in their order; the ids
 * are in that of the batch, as lines of ordering keys are. */
create or replace function rota._enqueue_many_keyed(
    new_jobs rota.jobs[], new_ids bigint[], jobs jsonb, out job_ids bigint[], out news boolean[]
) language plpgsql as $$
declare
    v_new record; v_last record; v_scope text;
begin
    loop
        -- A record that was never set has no fields to ask for.
        select null::text as key, null::text as key_scope, null::bigint as asked into v_last;
        begin
            for v_new in
                select r.*, n.idempotency_key as key, n.job_type as key_scope
                from rota._rules_of(_enqueue_many_keyed.jobs) as r
                join unnest(_enqueue_many_keyed.new_jobs) with ordinality as n
                    on n.ordinality = r.ordinal
                order by n.idempotency_key, n.job_type, r.ordinal
            loop
                select k.job_id, k.is_new, case when k.is_requested then k.job_id end as asked,
                    v_new.key, v_new.key_scope
                into v_last
                from rota._enqueue_keyed(_enqueue_many_keyed.new_jobs[v_new.ordinal],
                    v_new.unique_for, v_new.on_conflict, v_new.updated_at, v_new.max_wait,
                    false, case when (v_new.key, v_new.key_scope) = (v_last.key,
                        v_last.key_scope) then v_last.asked end,
                    array[_enqueue_many_keyed.new_ids[v_new.ordinal]]) as k;
                job_ids[v_new.ordinal] := v_last.job_id;
                news[v_new.ordinal] := v_last.is_new;
            end loop;
            exit;
        exception
            when sqlstate 'RTB00' then
                get stacked diagnostics v_scope = pg_exception_detail;
                -- Wait until no session has it locked, and release it again.
                begin
                    perform rota._lock_keyed(sqlerrm, v_scope, true, true);
                    raise no_data_found;
                exception
                    when no_data_found then null;
                end;
        end;
    end loop;

    -- A key is one for all queues, so it may have found a job of any.
    perform rota._check_queues_of_jobs(array(
        select _enqueue_many_keyed.job_ids[r.ordinal]
        from rota._rules_of(_enqueue_many_keyed.jobs) as r
        where r.on_conflict <> 'keep' and not _enqueue_many_keyed.news[r.ordinal]
    ));
end $$;

create or replace function rota._check_key_rule(
    prefix text, idempotency_key text, unique_for interval, on_conflict text,
    updated_at timestamptz, max_wait interval, expires_at timestamptz
) returns void language plpgsql as $$
begin
    if on_conflict = 'keep' and num_nonnulls(unique_for, updated_at, max_wait) = 0 then
        return;
    end if;
    perform rota._check_choice(prefix || 'on_conflict', on_conflict, '{keep,replace,rerun}');
    if idempotency_key is null then
        perform rota._refuse(prefix || 'idempotency_key',
            'is needed for on_conflict, unique_for, updated_at and max_wait');
    end if;
    if num_nonnulls(unique_for, max_wait) > 0 then
        perform rota._check_interval(prefix || 'unique_for', unique_for, '1 millisecond',
            '100 years', true);
        perform rota._check_interval(prefix || 'max_wait', max_wait, '0', '100 years', true);
    end if;
    if updated_at is not null then
        perform rota._check_run_at(prefix || 'updated_at', updated_at);
    end if;
    if unique_for is not null and on_conflict <> 'keep' then
        perform rota._refuse(prefix || 'unique_for', 'goes with on_conflict keep only');
    elsif updated_at is not null and on_conflict <> 'rerun' then
        perform rota._refuse(prefix || 'updated_at', 'goes with on_conflict rerun only');
    elsif expires_at is not null and on_conflict = 'rerun' then
        -- The run that follows a running one tells of something else, which may not expire.
        perform rota._refuse(prefix || 'expires_at',
            'and expires_after go with on_conflict keep or replace only');
    elsif max_wait is not null and on_conflict = 'keep' then
        perform rota._refuse(prefix || 'max_wait',
            'goes with on_conflict replace or rerun only');
    end if;
end $$;
