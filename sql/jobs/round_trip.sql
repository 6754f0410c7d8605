/*
 * jobs/round_trip.sql -- report, keep and claim in one call.
 *
 * A worker that finishes a job asks for the next one anyway.  In one call both are one round
 * trip and, what counts for more, one commit: a job singly then costs one flush to disk and not
 * two.  Nothing new is decided here: the call is finish_jobs(), end_jobs(), heartbeat_jobs()
 * and claim_jobs(), in this order, in one transaction.  Jobs that have simply succeeded go as
 * two lists, which costs less than endings that are objects.
 *
 * What went as requested has no row in the answer.  So most calls return new jobs and nothing
 * else.
 */

create or replace function rota.finish_and_claim(
    worker text, job_ids bigint[] default '{}', lease_tokens bigint[] default '{}',
    results jsonb default null, next_stages text[] default null, endings jsonb default null,
    kept_job_ids bigint[] default '{}', kept_lease_tokens bigint[] default '{}',
    queues text[] default '{default}', max_jobs integer default 1, lease interval default null,
    job_types text[] default null
) returns table (
        outcome text, job_id bigint, lease_token bigint, queue text, job_type text,
        payload jsonb, priority smallint, attempt integer, max_attempts integer,
        run_at timestamptz, locked_until timestamptz, locked_for interval, idempotency_key text,
        created_at timestamptz, pipeline text, stage text, stage_input jsonb, definition text,
        scheduled_for timestamptz, time_limit interval, headers jsonb
    ) language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off as $$
declare
    v_answers text[];
begin
    if (job_ids = '{}' and lease_tokens = '{}' and results is null
        and next_stages is null) is not true then
        v_answers := rota._finish_listed(job_ids, lease_tokens, results, next_stages);
        if v_answers && '{lost,busy}' then
            for outcome, job_id, lease_token in
                select f.answer, f.job_id, f.lease_token
                from unnest(v_answers, finish_and_claim.job_ids, finish_and_claim.lease_tokens)
                    as f (answer, job_id, lease_token)
                where f.answer in ('lost', 'busy')
            loop return next; end loop;
        end if;
    end if;
    if endings is not null then
        for outcome, job_id, lease_token in
            select e.answer, e.job_id, e.lease_token
            from rota.end_jobs(finish_and_claim.endings) as e
            where e.answer
                not in ('finished', 'already_finished', 'failed', 'snoozed', 'released')
        loop return next; end loop;
    end if;
    if (kept_job_ids = '{}' and kept_lease_tokens = '{}') is not true then
        perform rota._check_job_refs(kept_job_ids, kept_lease_tokens, 'kept_');
        for outcome, job_id, lease_token, locked_until in
            select
                case when h.is_lost then 'lost' when h.locked_until is null then 'busy'
                    when h.is_cancel_requested then 'cancel_requested' else 'overdue' end,
                h.job_id, finish_and_claim.kept_lease_tokens[h.ordinal], h.locked_until
            from rota.heartbeat_jobs(finish_and_claim.kept_job_ids,
                finish_and_claim.kept_lease_tokens, finish_and_claim.lease) with ordinality
                as h (job_id, locked_until, is_lost, is_cancel_requested, is_overdue, ordinal)
            where h.is_lost or h.locked_until is null or h.is_cancel_requested or h.is_overdue
        loop return next; end loop;
    end if;
    return query
    select 'claimed', c.job_id, c.lease_token, c.queue, c.job_type, c.payload, c.priority,
        c.attempt, c.max_attempts, c.run_at, c.locked_until, c.locked_for, c.idempotency_key,
        c.created_at, c.pipeline, c.stage, c.stage_input, c.definition, c.scheduled_for,
        c.time_limit, c.headers
    from rota.claim_jobs(finish_and_claim.worker, finish_and_claim.queues,
        finish_and_claim.max_jobs, finish_and_claim.lease, finish_and_claim.job_types) as c;
end $$;

comment on function rota.finish_and_claim is
    'Finish jobs, end others as end_jobs() does, extend the leases of kept ones and claim new '
    'ones in one round trip: rows of claim_jobs() with outcome claimed, and one for each job '
    'that is dead, cancelled, refused, lost, busy (report again) or, of the kept ones, '
    'cancel_requested or overdue; raises 22023 or RT009.';
