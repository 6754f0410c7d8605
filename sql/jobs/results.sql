/*
 * jobs/results.sql -- wait for the result of a job.
 *
 * A session that waits holds two shared advisory locks, one for all such sessions and one for
 * its job; the transaction that ends a job tries the first, and only if that is held the
 * second (base/notify.sql).  So an end that no session waits for costs one try of a lock.
 *
 * What a client does, on a direct connection: call wait_for_result(), LISTEN to its channel,
 * call again, since the job may have ended in between, and then after each notification.  An
 * end that looked for the locks before they were there, and commits after the second call,
 * notifies no session: so the client also calls again by itself, now and then.  Once the job
 * has ended the locks are given up; a client that waits no longer calls with active => false.
 */

create or replace function rota.wait_for_result(job_id bigint, active boolean default true)
    returns table (
        channel text, is_ended boolean, status text, result jsonb, error_type text,
        last_error text, progress_percent double precision, progress_message text
    ) language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off as $$
declare
    v_holds boolean; v_is_known boolean;
begin
    perform rota._check_given('active', active is not null);
    perform rota._check_own_job(job_id, 'producer');

    v_holds := exists (
        select from pg_locks as l
        where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.objsubid = 2
          and l.classid::bigint = 1919907971
          and l.objid::bigint::bit(32)::integer = hashint8(wait_for_result.job_id)
    );
    -- Once for each job that the session waits for.  On a standby none would see them.
    if active and not v_holds and not pg_is_in_recovery() then
        v_holds := rota._share_lock(1919907970, 0);
        if v_holds and not rota._share_lock(1919907971, hashint8(job_id)) then
            perform pg_advisory_unlock_shared(1919907970, 0);
            v_holds := false;
        end if;
    end if;
    channel := rota._result_channel(job_id);
    select f.id is not null, coalesce(f.status, j.status), f.result, f.error_type, f.last_error,
        coalesce(f.progress_percent, j.progress_percent)::double precision,
        coalesce(f.progress_message, j.progress_message), num_nonnulls(f.id, j.id) > 0
    into is_ended, status, result, error_type, last_error, progress_percent, progress_message,
        v_is_known
    from (select wait_for_result.job_id as id) as asked
    left join lateral (
        select i.id, i.status, i.result, i.error_type, i.last_error, i.progress_percent,
            i.progress_message
        from rota.finished_jobs as i where i.id = asked.id limit 1
    ) as f on true
    left join rota.jobs as j on j.id = asked.id;
    if v_holds and (is_ended or not active or not v_is_known) then
        perform pg_advisory_unlock_shared(1919907971, hashint8(job_id));
        perform pg_advisory_unlock_shared(1919907970, 0);
    end if;
    if not v_is_known then perform rota._raise_not_found(job_id); end if;
    return next;
end $$;

comment on function rota.wait_for_result is
    'Return whether a job has ended, how, and with what result, or else its progress; the '
    'transaction that ends it notifies the channel, unless this session has called again with '
    'active => false, or after the end; raises RT001, 22023.';
