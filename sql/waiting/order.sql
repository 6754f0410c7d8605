/*
 * waiting/order.sql -- jobs of one ordering key run one at a time, in order.
 *
 * The live jobs of a key are blocked but for one, the head, which waits for its time, runs and
 * is tried again like any other job; so claims do not see the jobs behind it, however many
 * there are.  A dead head halts its key by a row in halted_keys: retry_job() makes the job the
 * head again, resume_ordering_key() lets the others go on.  With skip_dead they go on at once.
 *
 * Who opens the next.  The transaction that ends the head makes the blocked job with the lowest
 * id the head, unless another session has locked that job.  A producer that finds no live job
 * of the key makes its own job the head.  All else is left to a check, which maintenance does.
 *
 * No two transactions make a head of one key.  The one that ends a head, or takes away the row
 * in halted_keys, needs no lock, because the others see the old head or that row until it
 * commits, and leave the key alone.  Every other session first tries the advisory lock of the
 * key, never waits for it, keeps it to the commit, and looks with a younger snapshot.
 *
 * No job is forgotten.  One that comes in behind others leaves a check.  After the commit
 * maintenance finds a head whose end is still to come, and that will see the job; or a head
 * whose end is under way, and looks again later; or none, and opens the key.
 *
 * All of them begin their search where the live jobs of the key begin (waiting/key_starts.sql):
 * while vacuum is held up, the index entries of all that have ended are in front.
 */

/* Open the first job of a key, if that has no head; false if it is not to be known now. */
create or replace function rota._check_order(ordering_key text)
    returns boolean language plpgsql set enable_seqscan = off set enable_bitmapscan = off
    set enable_sort = off as $$
declare
    v_head_id constant bigint := rota._key_head(ordering_key, rota._key_start(ordering_key));
begin
    -- Without the lock of the key, which is only needed to open it.
    if v_head_id is not null then return rota._still_to_end(array[v_head_id]) <> '{}'; end if;
    return rota._open_head(ordering_key, null, 1000);
end $$;

/* The head of a key, from this id on; from the newest down, for what has ended is below. */
create or replace function rota._key_head(ordering_key text, first_id bigint)
    returns bigint language plpgsql stable as $$
begin
    return (
        select j.id from rota.jobs as j
        where j.ordering_key = _key_head.ordering_key and - j.id <= - _key_head.first_id
          and j.status <> 'blocked' order by - j.id limit 1
    );
end $$;

/* Make the first job of a key its head, if the key has none; false where it has to be checked
 * again, because another session is at it.  The transaction that has just ended the head, of
 * that id, owns its place; any other takes the lock of the key for it, at most so many. */
create or replace function rota._open_head(
    ordering_key text, ended_id bigint, max_locks integer
) returns boolean language plpgsql set enable_seqscan = off set enable_bitmapscan = off
    set enable_sort = off as $$
declare
    c_index constant oid := 'rota.jobs_ordering_key_idx'::regclass::oid;
    v_start bigint; v_walked bigint; v_job_id bigint; v_is_halted boolean; v_parent_id bigint;
begin
    if ended_id is null and not rota._try_lock_key(ordering_key, max_locks) then
        return false;
    end if;

    -- Of one snapshot: a head below the start comes with another start, and a dead head goes
    -- with a row in halted_keys, which goes with the next head.
    select k.start, rota._key_head(_open_head.ordering_key,
        coalesce(_open_head.ended_id, k.start)), exists (
            select from rota.halted_keys as s where s.ordering_key = _open_head.ordering_key
        )
    into v_start, v_job_id, v_is_halted
    from rota._key_start(_open_head.ordering_key) as k (start);
    if v_job_id is not null then return rota._still_to_end(array[v_job_id]) <> '{}'; end if;
    if v_is_halted then return true; end if;
    v_walked := pg_stat_get_xact_tuples_returned(c_index);
    v_job_id := rota._first_blocked(ordering_key, rota._settled_start(ordering_key, v_start));
    if pg_stat_get_xact_tuples_returned(c_index) - v_walked > 100
      and (ended_id is null or rota._try_lock_key(ordering_key, max_locks)) then
        perform rota._raise_start(ordering_key, coalesce(v_job_id, ended_id), v_start);
    end if;
    if v_job_id is null then return true; end if;

    v_parent_id := rota._newest_parent(v_job_id);
    if v_parent_id is null then
        if rota._open_each(array[v_job_id]) <> '{}' then return true; end if;
        v_parent_id := rota._newest_parent(v_job_id);
    end if;
    if v_parent_id is null then return false; end if;
    -- The end of its last parent looks at the key, if that is not under way.
    if rota._still_to_end(array[v_parent_id]) = '{}' then
        perform rota._add_checks('job', array[v_job_id::text]);
    end if;
    return true;
end $$;

/* Let blocked jobs, which the caller has locked, start when they are due; returns which. */
create or replace function rota._open_jobs(job_ids bigint[])
    returns bigint[] language plpgsql as $$
declare
    v_opened bigint[]; v_keys text[];
begin
    with opened as (
        update rota.jobs as j
        set status = 'queued', updated_at = rota.now()
        where j.id = any(_open_jobs.job_ids) and j.status = 'blocked'
        returning j.id, j.ordering_key
    )
    select coalesce(array_agg(o.id), '{}'), array_agg(o.ordering_key)
        filter (where o.ordering_key is not null and o.id < rota._key_start(o.ordering_key))
    into v_opened, v_keys from opened as o;
    if v_keys is not null then
        perform rota._reset_start(k.key) from unnest(v_keys) as k (key);
    end if;
    perform rota._enter_lanes(v_opened);
    perform rota._notify_for(v_opened);
    return v_opened;
end $$;

/* Open those of these jobs that are blocked, wait for no parent, and are not locked by another
 * session; returns which. */
create or replace function rota._open_free(job_ids bigint[])
    returns bigint[] language plpgsql as $$
declare
    c_held constant bigint[] := array(
        select j.id from rota.jobs as j
        where j.id = any(_open_free.job_ids) and j.status = 'blocked' for update skip locked
    );
begin
    -- The session that lets a job wait for more has it locked: asked again, it is certain.
    return rota._open_jobs(array(
        select h.id from unnest(c_held) as h (id) where rota._newest_parent(h.id) is null
    ));
end $$;

/* The same, but one that a trigger refuses keeps no other, nor the job whose end opens it. */
create or replace function rota._open_each(job_ids bigint[])
    returns bigint[] language plpgsql as $$
begin
    if job_ids = '{}' then return job_ids; end if;
    if not rota._has_triggers() then return rota._open_free(job_ids); end if;
    begin
        return rota._open_free(job_ids);
    exception when others then
        if rota._is_no_fault_of_a_row(sqlstate) then raise; end if;
        if cardinality(job_ids) = 1 then
            raise warning 'job % cannot be opened and will be tried again: %', job_ids[1],
                sqlerrm;
            return '{}'::bigint[];
        end if;
    end;
    return array(
        select unnest(rota._open_each(array[i.id])) from unnest(_open_each.job_ids) as i (id)
    );
end $$;

/* New blocked jobs: make those heads whose keys have no other job, leave a check for others.
 * One that had halted its key gives its place to the first job of the key, mostly itself. */
create or replace function rota._enter_keys(job_ids bigint[], may_have_halted boolean)
    returns void language plpgsql as $$
declare
    v_key text; v_job_id bigint;
    v_halted jsonb := '{}'::jsonb;
    v_heads bigint[] := '{}'::bigint[];
    v_behind text[] := '{}'::text[];
begin
    if may_have_halted then
        with resumed as (
            delete from rota.halted_keys as s using rota.jobs as j
            where j.id = any(_enter_keys.job_ids)
              and s.ordering_key = j.ordering_key and s.job_id = j.id
            returning s.ordering_key, s.job_id
        )
        select coalesce(jsonb_object_agg(r.ordering_key, r.job_id), '{}') into v_halted
        from resumed as r;
    end if;
    for v_key, v_job_id in
        select j.ordering_key, min(j.id) from rota.jobs as j
        where j.id = any(_enter_keys.job_ids) group by j.ordering_key order by min(j.id)
    loop
        if v_halted ? v_key and current_setting('transaction_isolation') = 'read committed' then
            continue when rota._open_head(v_key, (v_halted ->> v_key)::bigint, 32);
        elsif rota._newest_parent(v_job_id) is null and rota._may_be_head(v_key, v_job_id) then
            v_heads := v_heads || v_job_id;
            continue;
        end if;
        v_behind := v_behind || v_key;
    end loop;

    if v_heads <> '{}' then perform rota._open_jobs(v_heads); end if;
    if v_behind <> '{}' then perform rota._add_checks('order', v_behind); end if;
end $$;

/* Whether this job may become the head of its key, which no other session makes then. */
create or replace function rota._may_be_head(ordering_key text, job_id bigint)
    returns boolean language plpgsql set enable_seqscan = off set enable_bitmapscan = off
    set enable_sort = off as $$
declare
    c_heads constant oid := 'rota.jobs_ordering_key_head_idx'::regclass::oid;
    c_blocked constant oid := 'rota.jobs_ordering_key_idx'::regclass::oid;
    c_walked constant bigint := pg_stat_get_xact_tuples_returned(c_heads)
        + pg_stat_get_xact_tuples_returned(c_blocked);
    v_start bigint := rota._key_start(ordering_key);
    v_is_idle boolean;
    c_comes_back constant boolean := job_id < v_start;
begin
    if c_comes_back then
        -- Behind others, too, it is to be in the sight of those who end heads.
        perform rota._reset_start(ordering_key);
        v_start := 0;
    end if;
    if not (rota._is_key_idle(ordering_key, job_id, v_start)
        and rota._try_lock_key(ordering_key, 32)) then
        return false;
    end if;
    -- Asked again, with one snapshot that is younger than the lock.
    select k.start, rota._is_key_idle(_may_be_head.ordering_key, _may_be_head.job_id, k.start)
    into v_start, v_is_idle from rota._key_start(_may_be_head.ordering_key) as k (start);
    if not v_is_idle then return false; end if;
    if job_id < v_start then
        perform rota._reset_start(ordering_key);
    elsif pg_stat_get_xact_tuples_returned(c_heads)
        + pg_stat_get_xact_tuples_returned(c_blocked) - c_walked > 200
      and not c_comes_back then
        perform rota._raise_start(ordering_key, job_id, v_start);
    end if;
    return true;
end $$;

/* Whether a key is not halted and has no head, nor a job in front of this one. */
create or replace function rota._is_key_idle(ordering_key text, job_id bigint, start bigint)
    returns boolean language plpgsql stable as $$
begin
    return not exists (
        select from rota.halted_keys as s where s.ordering_key = _is_key_idle.ordering_key
    ) and rota._key_head(ordering_key, start) is null and coalesce(
        rota._first_blocked(ordering_key, rota._settled_start(ordering_key, start)) >= job_id,
        true);
end $$;

/* Jobs ended, given as rows: a dead head halts its key, behind others the next is the head. */
create or replace function rota._leave_keys(jobs jsonb, old_status text, new_status text)
    returns void language plpgsql as $$
declare
    v_key text; v_job_id bigint;
    v_behind text[] := '{}'::text[];
begin
    insert into rota.halted_keys (ordering_key, job_id, halted_since)
    select e.ordering_key, e.id, rota.now()
    from jsonb_to_recordset(_leave_keys.jobs)
        as e (id bigint, ordering_key text, skip_dead boolean)
    where _leave_keys.new_status = 'dead' and not e.skip_dead on conflict do nothing;

    for v_key, v_job_id in
        select e.ordering_key, max(e.id)
        from jsonb_to_recordset(_leave_keys.jobs)
            as e (id bigint, ordering_key text, skip_dead boolean)
        where e.ordering_key is not null and (_leave_keys.new_status <> 'dead' or e.skip_dead)
        group by e.ordering_key
    loop
        -- An older snapshot does not show which is next.
        if current_setting('transaction_isolation') <> 'read committed'
          or not (case old_status when 'blocked' then rota._check_order(v_key)
            else rota._open_head(v_key, v_job_id, 32) end) then
            v_behind := v_behind || v_key;
        end if;
    end loop;
    if v_behind <> '{}' then perform rota._add_checks('order', v_behind); end if;
end $$;

create or replace function rota.resume_ordering_key(ordering_key text)
    returns bigint language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_job_id bigint;
begin
    perform rota._check_text('ordering_key', ordering_key, 255);
    delete from rota.halted_keys as s
    where s.ordering_key = resume_ordering_key.ordering_key
      and rota._jobs_outside_grants(array[s.job_id], 'operator') = '{}'
    returning s.job_id into v_job_id;
    if not found then
        raise exception using
            errcode = 'RT012', message = format('ordering key %L is not halted', ordering_key),
            hint = 'rota.halted_keys lists the keys whose next job is dead.';
    end if;

    if current_setting('transaction_isolation') = 'read committed' then
        perform rota._open_head(ordering_key, v_job_id, 32);
    end if;
    -- A job that came in meanwhile saw that the key was halted.
    perform rota._add_checks('order', array[ordering_key]);
    perform rota._audit('resume_ordering_key',
        jsonb_build_object('ordering_key', ordering_key), array[v_job_id]);
    return v_job_id;
end $$;

comment on function rota.resume_ordering_key is
    'Let the jobs behind the dead job of an ordering key run without it and return its id; '
    'raises RT012 if the key is not halted, 22023.';

/* From the end of the index: parents end in about the order of ids, dead entries are first. */
create or replace function rota._newest_parent(job_id bigint)
    returns bigint language plpgsql stable as $$
begin
    return (
        select d.parent_id from rota.dependencies as d where d.job_id = _newest_parent.job_id
        order by d.parent_id desc limit 1
    );
end $$;

/* The live jobs that no session is ending: one that does so later looks for what waits for them
 * with a snapshot that sees all that is committed now.  A job that carries the mark of a lock
 * is locked for a moment, until the end of this function. */
create or replace function rota._still_to_end(job_ids bigint[])
    returns bigint[] language plpgsql set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_free bigint[]; v_marked bigint[]; v_held bigint;
begin
    select coalesce(array_agg(j.id) filter (where j.xmax = '0'::xid or j.xmax = j.xmin), '{}'),
        coalesce(array_agg(j.id) filter (where j.xmax <> '0'::xid and j.xmax <> j.xmin), '{}')
    into v_free, v_marked from rota.jobs as j where j.id = any(_still_to_end.job_ids);
    if v_marked <> '{}' then
        begin
            for v_held in
                select j.id from rota.jobs as j where j.id = any(v_marked)
                for key share skip locked
            loop
                v_free := v_free || v_held;
            end loop;
            raise exception using errcode = 'RTB01';
        exception
            when sqlstate 'RTB01' then null;
        end;
    end if;
    return v_free;
end $$;
