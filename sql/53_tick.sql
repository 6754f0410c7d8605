/*
 * 53_tick.sql -- all the upkeep there is, in one call.
 *
 * Call it from anywhere, as anybody, as often as you like: every worker does between polls,
 * pg_cron may once a minute, a person may from psql.  Each call does a bounded amount, two at
 * once do not disturb each other, and nothing but this is needed to recover from anything.
 *
 * Recovery comes first, and an error in the housekeeping after it does not undo it.
 */

create or replace function rota.tick()
    returns table (
        jobs_fired integer,
        jobs_swept integer,
        rechecks_done integer,
        jobs_deleted integer,
        partitions_created integer,
        partitions_dropped integer
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    jobs_fired := rota._fire_schedules(1000);
    jobs_swept := rota.sweep_stale_leases();
    rechecks_done := rota._recheck(1000);

    begin
        select r.jobs_deleted, r.partitions_created, r.partitions_dropped
        into jobs_deleted, partitions_created, partitions_dropped
        from rota._retain() as r;
    exception
        when others then
            raise warning 'retention failed and will be tried again: %', sqlerrm;
    end;

    return next;
end;
$$;

comment on function rota.tick() is
    'Sweep leases that ended, look again at jobs that wait for others, make partitions ahead '
    'and forget old jobs, a bounded amount per call, and return what was done.';
