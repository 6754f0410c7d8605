/*
 * base/notify.sql -- wake waiting workers, and no other session.
 *
 * NOTIFY takes a lock of the whole cluster at each commit, so it is sent only while a worker
 * waits.  A waiting worker shows that by advisory locks of its session: it writes no row, and
 * the locks of a worker that dies disappear with it.  A queue has four kinds of locks:
 *
 *   idle lock       Every waiting worker holds it shared.  A transaction that makes a job
 *                   claimable tries to take it alone: if that succeeds no worker waits, and
 *                   that was all it cost.
 *   listen slot     One of 16, each with a channel.  The holder listens to that channel.  The
 *                   lowest slot that is held is notified first: one job wakes one worker.
 *   shared slot     Of all who find no other, with one channel.  They are woken together when
 *                   no other slot has a holder, as when those have found more than they take.
 *   active poller   Held by one worker that does not wait but claims every few milliseconds,
 *                   because jobs come all the time.  While it is held none is notified.
 *
 * The queue without a name stands for all of them: a pending check notifies any worker.
 * A session that waits for the result of a job holds two more, of all such and of the job.
 * What an operator does to a running job is rare, and told to all who listen to one channel.
 *
 * A lock held by mistake costs one NOTIFY too many; if a lock is lost, a job waits for the next
 * poll.  maintenance/wakeups.sql is the workers' side.
 */

/* Notify up to max_slots waiting workers of a queue, by name or key, unless one polls. */
create or replace function rota._notify(
    queue text, max_slots integer default 1, key integer default null
) returns void language plpgsql as $$
declare
    c_key constant integer := coalesce(key, hashtext(queue));
begin
    -- Nothing can come between the two halves of such a line, so no lock is left behind.
    if not (pg_try_advisory_lock(1919907936, c_key) and pg_advisory_unlock(1919907936, c_key))
      and pg_try_advisory_lock_shared(1919907937, c_key)
      and pg_advisory_unlock_shared(1919907937, c_key) then
        perform rota._notify_slots(c_key, max_slots);
    end if;
end $$;

/* Notify the holders of the lowest listen slots of a queue, of those above one number; where
 * there is none, all who share the last slot. */
create or replace function rota._notify_slots(
    key integer, max_slots integer, above integer default -1
) returns void language plpgsql as $$
declare
    v_notified integer := 0;
begin
    -- Where the queue of messages is full a commit would fail; and a transaction that has
    -- notified cannot be prepared, so one that prepares says so.  Workers poll anyway.
    if pg_notification_queue_usage() > 0.5 or current_setting('rota.wakeups', true) = 'off' then
        return;
    end if;

    for v_slot in above + 1..15 loop
        continue when pg_try_advisory_lock_shared(1919907938 + v_slot, key)
          and pg_advisory_unlock_shared(1919907938 + v_slot, key);
        perform pg_notify(rota._channel(key, v_slot), '');
        v_notified := v_notified + 1;
        exit when v_notified >= max_slots;
    end loop;
    if v_notified = 0 and above < 16
      and not (pg_try_advisory_lock(1919907954, key)
        and pg_advisory_unlock(1919907954, key)) then
        perform pg_notify(rota._channel(key, 16), '');
    end if;
end $$;

/* Whether another session has a lock, which this tries to take alone.  Volatile, as what it
 * calls, so that it is inlined. */
create or replace function rota._others_hold(class integer, key integer)
    returns boolean language sql as $$
select not (pg_try_advisory_lock(class, key) and pg_advisory_unlock(class, key))
$$;

/* Notify for jobs that may be claimable now: as many workers as there are such jobs. */
create or replace function rota._notify_for(job_ids bigint[])
    returns void language plpgsql set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    c_waiting constant text[] := '{queued,failed}'::text[];
begin
    -- Each waiting worker holds the idle lock of the empty name.
    if not rota._others_hold(1919907936, hashtext('')) then return; end if;
    perform rota._notify(d.queue, d.jobs)
    from (
        select j.queue,
            greatest(1, count(*) filter (where j.run_at <= rota.now()))::integer as jobs
        from rota.jobs as j
        where j.id = any(_notify_for.job_ids)
          and j.status = any(c_waiting) and j.run_at < rota.now() + rota._soon()
        group by j.queue
    ) as d;
end $$;

/* A poll sees in time what is due later than this, as polls are a second apart. */
create or replace function rota._soon()
    returns interval language plpgsql immutable as $$
begin return interval '2 seconds'; end;
$$;

/* Notify the sessions that wait for the results of these jobs, which have ended. */
create or replace function rota._notify_results(job_ids bigint[])
    returns void language plpgsql as $$
begin
    if pg_notification_queue_usage() > 0.5 or current_setting('rota.wakeups', true) = 'off' then
        return;
    end if;
    perform pg_notify(rota._result_channel(i.id), '') from unnest(job_ids) as i (id)
    where rota._others_hold(1919907971, hashint8(i.id));
end $$;

/* Let the workers of these running jobs send their heartbeats at once: a cancel was requested,
 * or the lease is taken away. */
create or replace function rota._notify_holders(job_ids bigint[])
    returns void language plpgsql as $$
begin
    if pg_notification_queue_usage() > 0.5 or current_setting('rota.wakeups', true) = 'off' then
        return;
    end if;
    -- A message has less than 8000 bytes.
    perform pg_notify('rota_running_jobs', string_agg(n.id::text, ' '))
    from unnest(job_ids) with ordinality as n (id, ordinal) group by n.ordinal / 300;
end $$;

create or replace function rota._result_channel(job_id bigint)
    returns text language plpgsql immutable as $$
begin return 'rota_result_' || job_id::text; end;
$$;

/* Take a lock of the session that others share; false if one keeps it to itself.  Each session
 * that looks has it for a moment; but anybody who may connect can lock it, and for ever. */
create or replace function rota._share_lock(class integer, key integer)
    returns boolean language plpgsql as $$
begin
    for v_try in 1..5 loop
        if pg_try_advisory_lock_shared(class, key) then return true; end if;
        perform pg_sleep(0.001);
    end loop;
    return false;
end $$;

/* The channel of a listen slot, which needs no quotes. */
create or replace function rota._channel(key integer, slot integer)
    returns text language plpgsql immutable as $$
begin
    return format('rota_%s_%s',
        case when key = hashtext('') then 'maintenance' else to_hex(key) end, slot);
end $$;
