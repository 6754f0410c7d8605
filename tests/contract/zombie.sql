-- A worker that lost its lease cannot end the job:  psql -d DATABASE -f zombie.sql
--
-- Worker A claims a job and falls asleep.  Its lease ends, the sweep takes the job back,
-- worker B claims it.  A wakes up and tries everything; each try must be refused and change
-- nothing.  Then B finishes.  The script prints a line for each check and stops at the first
-- one that fails.  The database must have rota and no jobs in the queue `zombie`.

\set ON_ERROR_STOP on
\pset format unaligned
\pset tuples_only on

create function pg_temp.verdict(what text, is_so boolean) returns text language plpgsql as $$
begin
    if is_so is not true then
        raise exception 'FAIL %', what;
    end if;
    return 'PASS ' || what;
end;
$$;

-- Run a call; it must be refused as a lost lease, and the job must be as it was.
create function pg_temp.refuses(who text, job_id bigint, call text) returns text
language plpgsql as $$
declare
    v_before text;
    v_after text;
    v_state text := 'accepted';
begin
    select r::text into v_before from rota.job_runs as r where r.id = refuses.job_id;
    begin
        execute 'select ' || refuses.call;
    exception
        when others then
            v_state := sqlstate;
    end;
    select r::text into v_after from rota.job_runs as r where r.id = refuses.job_id;
    return pg_temp.verdict(
        format('%s: %s is refused (%s)', refuses.who, split_part(refuses.call, '(', 1), v_state),
        v_state = 'RT002' and v_before = v_after);
end;
$$;

select rota.enqueue('charge_card', queue => 'zombie',
    backoff => '{"kind": "fixed", "base_seconds": 3600}') as job_id \gset

select lease_token as a from rota.claim_jobs('A', '{zombie}', lease => '1 millisecond') \gset
do $$ begin perform pg_sleep(0.01); end $$;
-- A tick sweeps what is stale anywhere; in a busy database others may be first.
select from rota.tick() \g /dev/null
select pg_temp.verdict('the lease of A has ended and the job waits for its retry',
    status = 'failed' and locked_by is null and error_type = 'lease_expired')
from rota.job_runs where id = :job_id;

select pg_temp.refuses('A, while nobody has the job', :job_id, format(call, :job_id, :a))
from (values ('rota.finish_job(%s, %s)'), ('rota.fail_job(%s, %s, ''no'')'),
    ('rota.heartbeat(%s, %s)'), ('rota.snooze_job(%s, %s, ''1 hour'')'),
    ('rota.set_progress(%s, %s, 50)')) as c (call);

-- The operator does not wait an hour; a lease of its own keeps B safe meanwhile.
select rota.retry_job(:job_id) \g /dev/null
select lease_token as b from rota.claim_jobs('B', '{zombie}', lease => '1 hour') \gset
select pg_temp.verdict('B has the job, under a greater token', :b > :a and locked_by = 'B')
from rota.job_runs where id = :job_id;

select pg_temp.refuses('A, while B runs the job', :job_id, format(call, :job_id, :a))
from (values ('rota.finish_job(%s, %s)'), ('rota.fail_job(%s, %s, ''no'')'),
    ('rota.heartbeat(%s, %s)'), ('rota.snooze_job(%s, %s, ''1 hour'')'),
    ('rota.set_progress(%s, %s, 50)')) as c (call);
select pg_temp.verdict('A, while B runs the job: finish_jobs says lost', outcome = 'lost')
from rota.finish_jobs(array[:job_id::bigint], array[:a::bigint]);
select pg_temp.verdict('A, while B runs the job: heartbeat_jobs says is_lost', is_lost)
from rota.heartbeat_jobs(array[:job_id::bigint], array[:a::bigint]);
select pg_temp.verdict('A, while B runs the job: release_jobs gives nothing back', not is_released)
from rota.release_jobs(array[:job_id::bigint], array[:a::bigint]);
select pg_temp.verdict('B still has the job', status = 'running' and locked_by = 'B'
    and lease_token = :b and attempts = 2)
from rota.job_runs where id = :job_id;

select pg_temp.verdict('B: finish_job is accepted',
    rota.finish_job(:job_id, :b, '{"by": "B"}') = 'finished');

select pg_temp.refuses('A, after the end', :job_id, format(call, :job_id, :a))
from (values ('rota.finish_job(%s, %s)'), ('rota.fail_job(%s, %s, ''no'')'),
    ('rota.heartbeat(%s, %s)'), ('rota.snooze_job(%s, %s, ''1 hour'')')) as c (call);
select pg_temp.verdict('the outcome is that of B, once',
    count(*) = 1 and min(status) = 'succeeded' and min(locked_by) = 'B'
    and min(result ->> 'by') = 'B')
from rota.job_runs where id = :job_id;
