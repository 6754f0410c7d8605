/*
 * tables/first_run.sql -- what a new installation does once.
 *
 * The first partitions, and the triggers: to make one again would wait for everybody who is
 * writing to the table.  Jobs without a key and a limit pass them by their conditions.  They
 * fire always, since without them a job of a limit is not found.
 */

do $$
begin
    perform rota._create_partitions(true);
end $$;

create trigger on_insert after insert on rota.jobs
    for each row
    when (new.bucket is not null)
    execute function rota._on_job_change();
create trigger on_update after update of status, run_at, priority, bucket on rota.jobs
    for each row
    when (new.bucket is not null or old.is_limited)
    execute function rota._on_job_change();
create trigger on_delete after delete on rota.jobs
    for each row
    when (old.is_limited)
    execute function rota._on_job_change();
alter table rota.jobs
    enable always trigger on_insert,
    enable always trigger on_update,
    enable always trigger on_delete;
