/*
 * waiting/order.sql -- one at a time, in order.
 *
 * The live jobs of an ordering key are blocked but for one, the head, and a unique index holds
 * that.  The head is the job with the lowest id, where a stage of a run stands in the place of
 * the first; it stays the head while it waits for its time or for a retry, and runs like any
 * other job.  So however many jobs stand behind it, claims do not see them.  When it ends, the
 * next becomes the head.
 *
 * A dead head holds its key: retry_job() puts it back at the head, resume_key() lets the others
 * go on without it.  With skip_dead they do so at once.
 */

/* Make the first job of a key its head, if it has none; false if that is locked just now. */
create or replace function rota._check_order(ordering_key text)
    returns boolean
    language plpgsql
as $$
declare
    v_job_id bigint;
    v_status text;
begin
    select j.id, j.status
    into v_job_id, v_status
    from rota.jobs as j
    where j.ordering_key = _check_order.ordering_key
    order by coalesce(j.first_job_id, j.id)
    limit 1;
    if not found or v_status <> 'blocked' or rota._has_parents(v_job_id) then
        return true;
    end if;

    select j.status
    into v_status
    from rota.jobs as j
    where j.id = v_job_id
    for update skip locked;
    if not found then
        return false;
    -- Asked again: until it was locked, somebody may have made it wait for a job.
    elsif v_status = 'blocked' and not rota._has_parents(v_job_id)
      and rota._is_free_key(_check_order.ordering_key, v_job_id) then
        perform rota._unblock(v_job_id);
    end if;
    return true;
end;
$$;

/*
 * Whether a key has no head, alive or dead, and nothing in front of a job.  Asked when that is
 * locked: one that was the head until then has left its row in stuck_keys by now, or is back.
 */
create or replace function rota._is_free_key(ordering_key text, job_id bigint)
    returns boolean
    language plpgsql
    stable
as $$
begin
    return not exists (
        select from rota.stuck_keys as s where s.ordering_key = _is_free_key.ordering_key
    ) and not exists (
        select
        from rota.jobs as j
        where j.ordering_key = _is_free_key.ordering_key
          and j.status <> 'blocked'
    ) and not exists (
        select
        from rota.jobs as j
        join rota.jobs as e on e.ordering_key = j.ordering_key
          and coalesce(e.first_job_id, e.id) < coalesce(j.first_job_id, j.id)
        where j.id = _is_free_key.job_id
    );
end;
$$;

create or replace function rota._unblock(job_id bigint)
    returns void
    language plpgsql
as $$
begin
    update rota.jobs as j
    set status = 'queued',
        updated_at = rota.now()
    where j.id = _unblock.job_id
      and j.status = 'blocked';
    perform rota._enter_lanes(array[_unblock.job_id]);
    perform rota._ring_for(array[_unblock.job_id]);
end;
$$;

create or replace function rota.resume_key(ordering_key text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    v_job_id bigint;
begin
    perform rota._check_text('ordering_key', resume_key.ordering_key, 255);

    delete from rota.stuck_keys as s
    where s.ordering_key = resume_key.ordering_key
    returning s.job_id into v_job_id;
    if not found then
        raise exception using
            errcode = 'RT012',
            message = format('ordering key %L is not stuck', resume_key.ordering_key),
            hint = 'rota.stuck_keys lists the keys whose next job is dead.';
    end if;

    perform rota._add_checks('order', array[resume_key.ordering_key]);
    return v_job_id;
end;
$$;

comment on function rota.resume_key(text) is
    'Let the jobs behind the dead one of an ordering key go on without it and return its id; '
    'raises RT012 if the key is not stuck, 22023.';

create or replace function rota._unstick(job_id bigint, ordering_key text)
    returns void
    language plpgsql
as $$
begin
    delete from rota.stuck_keys as s
    where s.ordering_key = _unstick.ordering_key
      and s.job_id = _unstick.job_id;
    perform rota._add_checks('order', array[_unstick.ordering_key]);
end;
$$;
