-- The life of one job, told with psql alone:  psql -d DATABASE -f tour.sql
-- The database must have rota (psql -f sql/install.sql) and no jobs in the queue `tour`.

\set ON_ERROR_STOP on
\pset footer off

\echo A web request asks for a mail, twice; the key makes it one job.
select rota.enqueue('send_mail', '{"user_id": 7}', queue => 'tour', max_attempts => 3,
    idempotency_key => 'welcome_mail:7') as job_id \gset
select rota.enqueue('send_mail', '{"user_id": 7}', queue => 'tour', max_attempts => 3,
    idempotency_key => 'welcome_mail:7') = :job_id as is_the_same_job;

\echo A worker claims it and gets a lease with a token.
select * from rota.claim_jobs('worker-1', '{tour}', lease => '30 seconds') \gset
select :'job_type' as job_type, :'payload' as payload, :attempt as attempt,
    :max_attempts as max_attempts, :'locked_for' as locked_for;
select status, attempts, locked_by, locked_until > rota.now() as is_locked
from rota.job_runs where id = :job_id;

\echo It needs longer, and says so.
select locked_until > rota.now() + interval '1 minute' as has_more_time, is_cancel_requested
from rota.heartbeat(:job_id, :lease_token, '2 minutes');

\echo The mail server is down: the attempt fails and waits for its next one.
select status, run_at > rota.now() as is_later
from rota.fail_job(:job_id, :lease_token, 'connection refused', 'ConnectionError');
select count(*) as claimable from rota.claim_jobs('worker-2', '{tour}');

\echo An operator knows that it is up again, and does not wait.
select rota.reschedule_job(:job_id, delay => '0') <= rota.now() as is_due;

\echo Another worker claims it, under a new token, and finishes it.
\set old_token :lease_token
select * from rota.claim_jobs('worker-2', '{tour}') \gset
select :attempt as attempt, :lease_token > :old_token as token_has_grown;
select rota.finish_job(:job_id, :lease_token, '{"message_id": "m-1"}');
select rota.finish_job(:job_id, :lease_token, '{"message_id": "m-1"}') as asked_again;

\echo What is left: one row of history, and one error.
select job_type, status, attempts, locked_by, last_error, result,
    finished_at >= started_at as has_duration
from rota.job_runs where id = :job_id;
select attempt, worker, error_type, message from rota.job_errors where job_id = :job_id;
select count(*) as live_jobs from rota.jobs where queue = 'tour';
