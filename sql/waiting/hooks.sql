/*
 * waiting/hooks.sql -- where jobs/ tells that jobs came in, and that they ended.
 *
 * These are the ways through which jobs/ reaches what waits: it knows nothing of lines,
 * parents and schedules, and all that depends on a job coming or going begins here.
 */

/*
 * Hook of jobs/: these have ended, without runs that go on; *jobs* are the rows, as they were,
 * of those that lead to something.
 */
create or replace function rota._jobs_ended(
    job_ids bigint[], jobs jsonb, old_status text, new_status text
)
    returns void language plpgsql as $$
begin
    if _jobs_ended.jobs is not null then
        perform rota._leave_lines(
            _jobs_ended.jobs, _jobs_ended.old_status, _jobs_ended.new_status);
        -- What follows the last job of a schedule is planned by its end.
        perform rota._add_checks('schedule', array(
            select e.definition
            from jsonb_populate_recordset(null::rota.jobs, _jobs_ended.jobs) as e
            join rota.job_definitions as d on d.name = e.definition
            where d.last_job_id = e.id
              -- An older snapshot does not show who has come to wait for it.
              and (d.next_run_at is null
                or current_setting('transaction_isolation') <> 'read committed')
        ));
    end if;
    perform rota._parents_ended(_jobs_ended.job_ids, _jobs_ended.new_status);
end;
$$;
