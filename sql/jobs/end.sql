/*
 * jobs/end.sql -- many jobs end, each in its own way, in one call.
 *
 * A worker reports with end_jobs() whatever its handlers came to: succeeded, failed, snoozed
 * or released.  Each ending is answered by itself, and none keeps another from being stored:
 *
 *   busy      Another session has the row locked.  The call never waits for it; report again.
 *   lost      The lease is gone, and another worker runs or has ended the job.
 *   refused   The ending was tried and undone; message tells why.  Its arguments are wrong
 *             (error_code 22023), or a trigger or a constraint of the database objects.
 *
 * All endings are stored together first, which costs least.  Only if that raises an error are
 * they stored in two halves, each a subtransaction, and so on down to the one that is refused:
 * one of 1,000 costs 20 subtransactions.  A full disk, or the like, ends the call.  For rows
 * that are locked all together wait up to 200 ms.
 *
 * Where all end alike, finish_jobs() and release_jobs() are faster; both raise, and refuse
 * none.
 */

create or replace function rota.end_jobs(endings jsonb)
    returns table (
        job_id bigint, lease_token bigint, answer text, run_at timestamptz, error_code text,
        message text
    ) language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off as $$
begin
    perform rota._check_json('endings', endings, 'array', 1000);
    return query select e.* from rota._end_each(end_jobs.endings) as e;
end $$;

comment on function rota.end_jobs is
    'End up to 1000 running jobs, each an object of job_id, lease_token, outcome (succeeded, '
    'failed, snoozed or released) and the arguments of finish_job(), fail_job() or '
    'snooze_job(), and answer each in the order given: finished, already_finished, failed, '
    'dead, cancelled, snoozed, released, lost, busy or refused; raises 22023.';

/* The answers to endings, of which none keeps another from being stored. */
create or replace function rota._end_each(
    endings jsonb, until timestamptz default rota.now() + interval '200 ms'
) returns table (
        job_id bigint, lease_token bigint, answer text, run_at timestamptz, error_code text,
        message text
    ) language plpgsql as $$
declare
    c_count constant integer := jsonb_array_length(endings);
    v_problem text;
begin
    begin
        return query select e.job_id, e.lease_token, e.answer, e.run_at, null, null
        from rota._end_together(_end_each.endings, until) as e;
        return;
    exception
        when others then
            error_code := sqlstate;
            message := sqlerrm;
    end;
    if rota._is_no_fault_of_a_row(error_code) then
        raise exception using errcode = error_code, message = message;
    elsif error_code = '54000' then
        -- So a value is refused that is too large; and all, where no transaction gets an id.
        perform pg_current_xact_id();
    end if;

    if c_count = 1 then
        -- A report has to be recognized by its worker also where it is not one.
        job_id := rota._to_bigint(endings -> 0 ->> 'job_id');
        lease_token := rota._to_bigint(endings -> 0 ->> 'lease_token');
        if error_code ~ '^22' and jsonb_typeof(endings -> 0) = 'object' then
            v_problem := (
                select v.key || ' ' || v.problem
                from (
                    select e.key, rota._cast_problem(e.key, e.value) as problem
                    from jsonb_each(_end_each.endings -> 0) as e
                ) as v
                where v.problem is not null limit 1
            );
            if v_problem is not null then
                error_code := '22023';
                message := v_problem;
            end if;
        end if;
        answer := case when error_code in ('40P01', '55P03') then 'busy' else 'refused' end;
        return next;
        return;
    end if;
    for v_half in 0..1 loop
        return query select e.*
        from rota._end_each((
            select jsonb_agg(a.ending order by a.ordinal)
            from jsonb_array_elements(_end_each.endings) with ordinality as a (ending, ordinal)
            where (a.ordinal > c_count / 2)::integer = v_half
        ), until) as e;
    end loop;
end $$;

/* A text as a number, or null. */
create or replace function rota._to_bigint(value text)
    returns bigint language plpgsql immutable as $$
begin return case when value ~ '^-?[0-9]{1,18}$' then value::bigint end; end;
$$;

/* The answers to endings that are all stored or, if one raises an error, none. */
create or replace function rota._end_together(endings jsonb, until timestamptz)
    returns table (job_id bigint, lease_token bigint, answer text, run_at timestamptz)
    language plpgsql as $$
#variable_conflict use_column
declare
    v_ids bigint[]; v_tokens bigint[]; v_outcomes text[]; v_results jsonb; v_stages text[];
    v_errors text[]; v_error_types text[]; v_stacks text[]; v_retry_ins interval[];
    v_fatals boolean[]; v_run_ats timestamptz[]; v_answers text[]; v_held bigint[];
    v_failed bigint[]; v_returned bigint[];
begin
    perform rota._check_ending(a.ending)
    from jsonb_array_elements(_end_together.endings) as a (ending)
    -- Most are a success with nothing else to be checked.
    where case when jsonb_typeof(a.ending) = 'object' then
        a.ending ->> 'outcome' = 'succeeded'
        and a.ending - '{job_id,lease_token,outcome}'::text[] = '{}'
        and a.ending ->> 'job_id' is not null and a.ending ->> 'lease_token' is not null
    end is not true;
    select array_agg(e.job_id order by e.n), array_agg(e.lease_token order by e.n),
        array_agg(e.outcome order by e.n),
        case when count(nullif(e.result, 'null')) > 0 then jsonb_agg(e.result order by e.n) end,
        case when count(e.next_stage) > 0 then array_agg(e.next_stage order by e.n) end,
        array_agg(e.error order by e.n), array_agg(e.error_type order by e.n),
        array_agg(e.stack order by e.n), array_agg(e.retry_in order by e.n),
        array_agg(coalesce(e.fatal, false) order by e.n),
        array_agg(rota.now() + rota._exact(e.delay) order by e.n)
    into v_ids, v_tokens, v_outcomes, v_results, v_stages, v_errors, v_error_types, v_stacks,
        v_retry_ins, v_fatals, v_run_ats
    from rows from (
        jsonb_to_recordset(_end_together.endings) as (job_id bigint, lease_token bigint,
            outcome text, result jsonb, next_stage text, error text, error_type text,
            stack text, retry_in interval, fatal boolean, delay interval)
    ) with ordinality as e (job_id, lease_token, outcome, result, next_stage, error, error_type,
        stack, retry_in, fatal, delay, n);

    -- A list that holds null for the jobs that end otherwise keeps its places.
    if 'succeeded' = any(v_outcomes) then
        v_answers := rota._finish_running(
            array(
                select case when t.outcome = 'succeeded' then t.job_id end
                from unnest(v_ids, v_outcomes) with ordinality as t (job_id, outcome, n)
                order by t.n
            ),
            v_tokens, v_results, v_stages, until);
    end if;
    if 'succeeded' = all(v_outcomes) then
        return query select t.job_id, t.lease_token, t.answer, null::timestamptz
        from unnest(v_ids, v_tokens, v_answers) as t (job_id, lease_token, answer);
        return;
    end if;

    -- All are locked before the first is changed: none waits for a row while it holds others.
    v_held := rota._hold_jobs(
        array(
            select case when t.outcome <> 'succeeded' then t.newest_id end
            from unnest(v_outcomes, rota._newest_refs(v_ids, v_tokens))
                with ordinality as t (outcome, newest_id, n) order by t.n
        ),
        v_tokens, until);
    select array_agg(case when t.outcome = 'failed' then t.held_id end order by t.n),
        array_agg(case when t.outcome in ('snoozed', 'released') then t.held_id end
            order by t.n)
    into v_failed, v_returned
    from unnest(v_outcomes, v_held) with ordinality as t (outcome, held_id, n);
    return query select t.job_id, t.lease_token,
        coalesce(
            case when t.outcome = 'succeeded' then t.answer end, f.status, b.status,
            case when g.next_run_at = 'infinity' then 'cancelled'
                when g.job_id is not null then t.outcome
                -- What is held was given twice, and has ended as told in the other place.
                when t.held_id is null and rota._is_running(t.job_id, t.lease_token)
                    then 'busy' else 'lost' end),
        coalesce(f.run_at, b.run_at, nullif(g.next_run_at, 'infinity'))
    from unnest(v_ids, v_tokens, v_outcomes, v_errors, v_answers, v_held, v_failed, v_returned)
        with ordinality
        as t (job_id, lease_token, outcome, error, answer, held_id, failed_id, returned_id, n)
    left join rota._fail_running(v_failed, v_tokens, v_errors, v_error_types, v_stacks,
        v_retry_ins, v_fatals) as f on f.job_id = t.failed_id
    left join rota._give_back(v_returned, v_tokens, v_run_ats) as g on g.job_id = t.returned_id
    left join lateral rota._failed_before(
        case when t.outcome = 'failed' and f.job_id is null
            and rota._jobs_outside_grants(array[t.job_id]) = '{}' then t.job_id end,
        t.lease_token, t.error) as b (status, run_at) on true order by t.n;
end $$;

create or replace function rota._check_ending(ending jsonb)
    returns void language plpgsql as $$
declare
    v_outcome constant text := case jsonb_typeof(ending)
        when 'object' then ending ->> 'outcome' end;
    v_keys constant text[] := case v_outcome
        when 'succeeded' then '{job_id,lease_token,outcome,result,next_stage}'::text[]
        when 'failed' then '{job_id,lease_token,outcome,error,error_type,stack,retry_in,fatal}'
        when 'snoozed' then '{job_id,lease_token,outcome,delay}'
        when 'released' then '{job_id,lease_token,outcome}'
    end;
begin
    if jsonb_typeof(ending) is distinct from 'object' then
        perform rota._refuse('ending', 'must be an object');
    elsif v_keys is null then
        perform rota._refuse('outcome', 'must be succeeded, failed, snoozed or released, got '
            || coalesce(quote_literal(rota._cut(v_outcome, 80)), 'null'));
    end if;
    perform rota._refuse(rota._cut(k.key, 80), format('does not go with outcome %s', v_outcome))
    from jsonb_object_keys(jsonb_strip_nulls(ending - v_keys)) as k (key) limit 1;
    perform rota._check_durations('', jsonb_build_array(ending))
    where ending ?| '{retry_in,delay}';
    perform rota._check_given('job_id', ending ->> 'job_id' is not null);
    perform rota._check_given('lease_token', ending ->> 'lease_token' is not null);
    if v_outcome = 'succeeded' then
        perform rota._check_size('result', ending -> 'result', '');
        if ending ->> 'next_stage' is not null then
            perform rota._check_next_stage('next_stage', (ending ->> 'job_id')::bigint,
                (ending ->> 'lease_token')::bigint, ending ->> 'next_stage');
        end if;
    elsif v_outcome = 'failed' then
        perform rota._check_given('error', ending ->> 'error' is not null);
        perform rota._check_interval('retry_in', (ending ->> 'retry_in')::interval, '0',
            '1 year', true);
    elsif v_outcome = 'snoozed' then
        perform rota._check_interval('delay', (ending ->> 'delay')::interval, '0', '100 years');
    end if;
end $$;
