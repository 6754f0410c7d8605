/*
 * jobs/retries.sql -- what failures of a kind lead to.
 *
 * A retry rule is asked for by _fail_running() when a job fails with an error of that type:
 * the rule of its job type and queue goes before those for all.  A job without rules pays for
 * one look at an empty table.  A rule that pauses the type leaves a check: maintenance writes
 * the pause (maintenance/breakers.sql), so that jobs that fail do not wait for each other.
 *
 * A retry budget holds what failed in a queue until maintenance/budgets.sql lets it in.
 *
 * A breaker pauses a job type of a queue when too much of it fails.  It costs claims and ends
 * nothing: maintenance counts what is written anyhow (maintenance/breakers.sql).
 *
 * The state of a budget or breaker is a row of another table, which only maintenance writes: a
 * transaction that changes a setting and stays open keeps nothing as it is.
 */

create or replace function rota.set_retry_rule(
    error_type text, job_type text default null, queue text default null,
    retry_in interval default null, fatal boolean default false,
    pause_for interval default null, reset boolean default false
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    c_job_type constant text := coalesce(job_type, '*');
    c_queue constant text := coalesce(queue, '*');
begin
    perform rota._check_queues('operator', array[c_queue]);
    perform rota._check_text('error_type', error_type, 200);
    if job_type is not null then perform rota._check_name('job_type', job_type); end if;
    if queue is not null then perform rota._check_name('queue', queue); end if;
    perform rota._check_interval('retry_in', retry_in, '0', '1 year', true);
    perform rota._check_given('fatal', fatal is not null);
    perform rota._check_interval('pause_for', pause_for, '1 second', '30 days', true);
    perform rota._check_given('reset', reset is not null);
    perform rota._refuse('retry_in', 'or fatal or reset must be given, and only one')
    where (set_retry_rule.retry_in is not null)::integer + fatal::integer + reset::integer > 1
      or reset and set_retry_rule.pause_for is not null;
    perform rota._refuse('retry_in', 'or fatal or pause_for or reset must be given')
    where num_nonnulls(set_retry_rule.retry_in, set_retry_rule.pause_for) = 0
      and not (fatal or reset);

    delete from rota.retry_rules as r
    where reset and r.error_type = set_retry_rule.error_type and r.job_type = c_job_type
      and r.queue = c_queue;
    insert into rota.retry_rules (error_type, job_type, queue, retry_in, is_fatal, pause_for)
    select set_retry_rule.error_type, c_job_type, c_queue, rota._exact(set_retry_rule.retry_in),
        set_retry_rule.fatal, rota._exact(set_retry_rule.pause_for)
    where not reset
    on conflict on constraint retry_rules_pkey do update
    set retry_in = excluded.retry_in, is_fatal = excluded.is_fatal,
        pause_for = excluded.pause_for, updated_at = rota.now();
end $$;

comment on function rota.set_retry_rule is
    'Set what failures with this error_type cause, for a job_type, a queue or all: a retry '
    'after retry_in unless the worker asks for another time, or, if fatal, none; and a pause '
    'of the job type for pause_for; reset removes the rule; raises 22023.';

/* What is set for errors of this type; null if nothing is. */
create or replace function rota._retry_rule(error_type text, job_type text, queue text)
    returns rota.retry_rules language plpgsql stable as $$
begin
    return (
        select r from rota.retry_rules as r
        where r.error_type = _retry_rule.error_type
          and r.job_type in (_retry_rule.job_type, '*') and r.queue in (_retry_rule.queue, '*')
        order by r.job_type = '*', r.queue = '*' limit 1
    );
end $$;

/* Hold those of these failed jobs whose queue has a retry budget; returns the others. */
create or replace function rota._hold_retries(job_ids bigint[])
    returns bigint[] language plpgsql as $$
declare
    v_held bigint[];
begin
    with held as (
        update rota.jobs as j
        set hold = 'retries ' || j.queue, own_lane = null, own_place = null
        from rota.queues as q
        where j.id = any(_hold_retries.job_ids) and j.status = any('{failed}'::text[])
          and q.queue = j.queue and q.retry_budget is not null returning j.id
    )
    select array_agg(h.id) into v_held from held as h;
    return array(select i.id from unnest(_hold_retries.job_ids) as i (id)
        where (i.id = any(v_held)) is not true);
end $$;

create or replace function rota.set_breaker(
    job_type text, queue text default 'default', max_failures integer default null,
    failed_percent integer default null, min_attempts integer default 20,
    span interval default '1 minute', error_type text default null,
    pause_for interval default '30 seconds', probes integer default 1,
    reset boolean default false
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_tag uuid;
begin
    perform rota._check_name('job_type', job_type);
    perform rota._check_name('queue', queue);
    perform rota._check_queues('operator', array[queue]);
    perform rota._check_number('max_failures', max_failures, 1, 1000, true);
    perform rota._check_number('failed_percent', failed_percent, 1, 100, true);
    perform rota._check_number('min_attempts', min_attempts, 1, 1000);
    perform rota._check_interval('span', span, '1 second', '1 hour');
    perform rota._check_text('error_type', error_type, 200) where error_type is not null;
    perform rota._check_interval('pause_for', pause_for, '1 second', '1 day');
    perform rota._check_number('probes', probes, 1, 100);
    perform rota._check_given('reset', reset is not null);
    perform rota._refuse('max_failures', 'or failed_percent or reset must be given')
    where reset = (num_nonnulls(set_breaker.max_failures, set_breaker.failed_percent) > 0);

    if reset then
        delete from rota.breakers as b
        where b.job_type = set_breaker.job_type and b.queue = set_breaker.queue;
        return;
    end if;
    insert into rota.breakers as b (job_type, queue, max_failures, failed_percent, min_attempts,
        span, error_type, pause_for, probes)
    values (set_breaker.job_type, set_breaker.queue, set_breaker.max_failures,
        set_breaker.failed_percent, set_breaker.min_attempts, rota._exact(set_breaker.span),
        set_breaker.error_type, rota._exact(set_breaker.pause_for), set_breaker.probes)
    on conflict on constraint breakers_pkey do update
    set max_failures = excluded.max_failures, failed_percent = excluded.failed_percent,
        min_attempts = excluded.min_attempts, span = excluded.span,
        error_type = excluded.error_type, pause_for = excluded.pause_for,
        probes = excluded.probes, updated_at = rota.now() returning b.tag into v_tag;
    insert into rota.breaker_states (tag, job_type, queue)
    values (v_tag, set_breaker.job_type, set_breaker.queue) on conflict do nothing;
end $$;

comment on function rota.set_breaker is
    'Let a job_type of a queue be paused for pause_for after max_failures in a row, or when '
    'failed_percent of at least min_attempts in a span failed, and then let that many probes '
    'run before all jobs may run again; error_type counts only such errors; reset removes the '
    'breaker; raises 22023.';
