/*
 * 60_pg_cron.sql -- let pg_cron be the heartbeat.  Optional: psql -v with_cron=1.
 *
 * pg_cron only wakes tick(), once a minute, which its oldest versions can do too.  Everything
 * worth knowing is in our tables: pg_cron forgets what it missed while it was down.  Nor does
 * it ever empty its own log, so a second entry keeps a day of ours.
 */

do $$
begin
    if to_regclass('cron.job') is null then
        raise exception using
            errcode = 'feature_not_supported',
            message = 'pg_cron is not installed in this database',
            hint = format(
                'As a superuser: create extension pg_cron.  If it lives in another database, '
                'run there: select cron.schedule_in_database(%L, %L, %L, %L).  Or leave it: '
                'every worker ticks.',
                'rota tick', '* * * * *', 'select rota.tick()', current_database());
    end if;

    perform cron.schedule('rota tick', '* * * * *', 'select rota.tick()');
    perform cron.schedule('rota tick log', '17 3 * * *',
        'delete from cron.job_run_details as d using cron.job as j '
        'where d.jobid = j.jobid and j.jobname like ''rota tick%'' '
        'and d.end_time < now() - interval ''1 day''');
end;
$$;
