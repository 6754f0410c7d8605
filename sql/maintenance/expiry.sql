/*
 * maintenance/expiry.sql -- end the jobs that have waited beyond expires_at.
 *
 * No attempt begins at expires_at or later: a claim passes over a job that has expired, and
 * takes it out of its lane (jobs/claim.sql).  Here it ends, as cancelled and with error_type
 * expired: its producer said that it is useless from then on, so no operator has to look at it,
 * as at a dead one.  That is so for every job that waits, also for its retry, for others or for
 * a limit; one that runs may come to its end.
 *
 * Each call ends a bounded number, as a sweep does (maintenance/sweep.sql), and goes past rows
 * that others have locked.  The scan begins where the last one ended (base/scan_start.sql).
 */

create or replace function rota._expire_jobs(max_jobs integer)
    returns integer language plpgsql set enable_seqscan = off set jit = off
    set plan_cache_mode = force_generic_plan set enable_bitmapscan = off
    set enable_sort = off as $$
begin
    return case when rota._has_expired() then rota._end_late('expiry', max_jobs) else 0 end;
end $$;

/* Whether a job waits that has expired; remembers where the first one is. */
create or replace function rota._has_expired()
    returns boolean language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    v_start constant bigint := rota._scan_from('expired', v_now);
    c_index constant oid := 'rota.jobs_deadline_idx'::regclass::oid;
    v_walked constant bigint := pg_stat_get_xact_tuples_returned(c_index);
    v_first timestamptz;
begin
    select j.expires_at into v_first from rota.jobs as j
    where j.locked_until is null and j.expires_at <= v_now
      and j.expires_at >= rota._from_micros(v_start)
    order by j.locked_until, j.expires_at limit 1;
    perform rota._keep_scan_from('expired', v_now, v_start is null, c_index, v_walked,
        rota._micros(coalesce(v_first, v_now)));
    return v_first is not null;
end $$;
