/*
 * maintenance/breakers.sql -- pause what fails all the time, and try again.
 *
 * A breaker is closed, and then all jobs of its type and queue may run; it opens when too much
 * fails, which is a pause of the type; and when pause_for is over it is half open: of the jobs
 * that the pause holds a few are let through.  If enough of those succeed it closes; if one
 * fails it opens again, for twice as long, up to 16 times pause_for.
 *
 * Each tick looks at each breaker and counts what is in the tables of errors and ended jobs, a
 * bounded number of the newest rows; where these do not reach back far enough, the statistics
 * tell what succeeded.  No claim and no end of a job takes part, so no session waits for a
 * breaker, and a breaker opens up to a tick late.  While an operator who changes the same pause
 * has not committed, the breaker stays as it is, and each tick waits a tenth of a second for
 * it.
 *
 * An attempt counts for the state in which it began.  So the last failures of before a pause
 * cannot open what has just closed, nor decide about those that try.
 *
 * Where an operator resumes the type, the breaker closes, and where one pauses it, the breaker
 * leaves that pause alone.  Operators write breakers, and only ticks write breaker_states
 * (README.md, Decisions).  One that is set anew after a reset is another breaker; the next tick
 * ends the pause of the old one.
 *
 * A retry rule with pause_for (jobs/retries.sql) has no states: the type is paused until so
 * long after its last such failure.
 */

create or replace function rota._check_breakers()
    returns void language plpgsql set lock_timeout = '100ms' as $$
declare
    c_now constant timestamptz := rota.now();
    -- Read once for all: a closed one opens only by failures among these.
    c_failing constant text[] := array(
        select distinct e.queue || ' ' || e.job_type
        from (
            select r.queue, r.job_type from rota.job_errors as r
            where r.failed_at >= (
                select min(s.counts_from) from rota.breaker_states as s
                where s.retry_at is null
            )
              and r.failed_at <= c_now
            order by r.failed_at desc limit 5000
        ) as e
    );
    v_state rota.breaker_states;
begin
    if current_setting('transaction_isolation') <> 'read committed' then return; end if;
    for v_state in
        select s.* from rota.breaker_states as s
        left join rota.breakers as b on b.tag = s.tag
        where b.tag is null or s.retry_at is not null or s.updated_at > c_now
          or s.queue || ' ' || s.job_type = any(c_failing)
        order by s.job_type, s.queue, b.tag is not null
    loop
        begin
            perform rota._check_breaker(v_state);
        exception
            when lock_not_available then null;
            when others then
                raise warning 'breaker of % in queue % failed and will be tried again: %',
                    v_state.job_type, v_state.queue, sqlerrm;
        end;
    end loop;
end $$;

/* Change the state of a breaker if it is time to, or let jobs through. */
create or replace function rota._check_breaker(state rota.breaker_states)
    returns void language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    c_name constant text := rota._pause_name(state.queue, state.job_type);
    c_breaker constant rota.breakers := (
        select b from rota.breakers as b where b.tag = state.tag);
    v_set_by text; v_trying integer; v_failed record; v_succeeded integer;
begin
    v_set_by := (
        select p.set_by from rota.pauses as p
        where p.pause_name = c_name and (p.until is null or p.until > v_now)
    );
    if c_breaker.tag is null then
        -- It was removed, perhaps while another tick was opening it.
        if rota._set_breaker_state(state, null, null, 0) then
            delete from rota.breaker_states as s where s.tag = state.tag;
            perform rota._resume(state.queue, state.job_type, 'breaker')
            where state.retry_at is not null and v_set_by = 'breaker';
        end if;
    elsif state.retry_at is not null and v_set_by is distinct from 'breaker' then
        perform rota._set_breaker_state(state, null, null, 0);
    elsif state.updated_at > v_now then
        -- The clock was set back, and what it waits for may be far off.
        perform rota._set_breaker_state(state,
            case when state.retry_at is not null then v_now end, null, state.times_opened);
    elsif state.retry_at is null then
        if v_set_by is null then
            perform rota._open_breaker(c_breaker, state,
                rota._breaker_reason(c_breaker, state));
        end if;
    elsif state.probed_at is null then
        -- What another session had locked when it opened.
        perform rota._hold_probes(c_breaker);
        if state.retry_at <= v_now
          and rota._set_breaker_state(state, state.retry_at, v_now, state.times_opened) then
            perform rota._let_probes(c_breaker, c_breaker.probes);
        end if;
    else
        -- What another tick has let through just now is not seen yet.
        perform from rota.breaker_states as s where s.tag = state.tag for update skip locked;
        if not found then return; end if;
        -- Before those that have ended: one that ends meanwhile counts twice, and not as none.
        v_trying := (
            select count(*)::integer
            from (
                select from rota.jobs as j
                where j.opened_for = 'try ' || c_name and j.queue = c_breaker.queue
                  and j.job_type = c_breaker.job_type
                -- In place of one that another session keeps, the next may try.
                limit 100 for update skip locked
            ) as w
        ) + (
            select count(*)::integer from rota.jobs as j
            where j.status = 'running' and j.locked_until is not null
              and j.job_type = c_breaker.job_type and j.queue = c_breaker.queue
              and j.started_at >= state.probed_at
        );
        v_failed := rota._breaker_failures(c_breaker, state.probed_at, 1);
        v_succeeded := rota._probe_successes(c_breaker, state.probed_at);
        if v_failed.failures > 0 then
            perform rota._open_breaker(c_breaker, state,
                'what was let through to try failed with ' || v_failed.last);
        elsif v_succeeded < c_breaker.probes then
            perform rota._let_probes(c_breaker, c_breaker.probes - v_succeeded - v_trying);
        elsif rota._set_breaker_state(state, null, null, 0) then
            -- An operator may just have taken over the pause.
            perform rota._resume(state.queue, state.job_type, 'breaker');
        end if;
    end if;
end $$;

/* Change the state, unless another tick has done so just now. */
create or replace function rota._set_breaker_state(
    state rota.breaker_states, retry_at timestamptz, probed_at timestamptz, times_opened integer
) returns boolean language plpgsql as $$
begin
    update rota.breaker_states as s
    set retry_at = _set_breaker_state.retry_at, probed_at = _set_breaker_state.probed_at,
        times_opened = _set_breaker_state.times_opened,
        counts_from = case when _set_breaker_state.retry_at is null then rota.now()
            else s.counts_from end,
        updated_at = rota.now()
    where s.ctid = any(array(
        select o.ctid from rota.breaker_states as o
        where o.tag = state.tag and o.updated_at = state.updated_at
        for update skip locked
    ));
    return found;
end $$;

/* If there is a reason, pause the type until a few may try; what was let through and has not
 * started waits again. */
create or replace function rota._open_breaker(
    breaker rota.breakers, state rota.breaker_states, reason text
) returns void language plpgsql as $$
declare
    c_retry_at constant timestamptz := rota.now()
        + breaker.pause_for * power(2, least(state.times_opened, 4));
begin
    if reason is null
      or not rota._set_breaker_state(state, c_retry_at, null, state.times_opened + 1) then
        return;
    end if;
    perform rota._pause(breaker.queue, breaker.job_type, format('%s; it tries again at %s UTC',
        reason, to_char(c_retry_at at time zone 'UTC', 'HH24:MI:SS')), null, 'breaker');
    perform rota._hold_probes(breaker);
end $$;

/* Hold again what was let through and has not started. */
create or replace function rota._hold_probes(breaker rota.breakers)
    returns void language plpgsql as $$
declare
    c_name constant text := rota._pause_name(breaker.queue, breaker.job_type);
begin
    update rota.jobs as j
    set hold = 'pause ' || c_name, opened_for = null
    where j.id = any(array(
        select w.id from rota.jobs as w
        where w.opened_for = 'try ' || c_name and w.queue = breaker.queue
          and w.job_type = breaker.job_type and w.status in ('queued', 'failed')
        for update skip locked
    ));
    -- The pause may just have ended.
    perform rota._add_checks('pause', array[c_name]) where found;
end $$;

/* Let so many of the first jobs that a pause holds into their lanes, past it; or, if it holds
 * fewer, of the retries that wait for the budget of the queue. */
create or replace function rota._let_probes(breaker rota.breakers, probes integer)
    returns void language plpgsql as $$
declare
    c_name constant text := rota._pause_name(breaker.queue, breaker.job_type);
    v_hold text;
    v_ids bigint[] := '{}'::bigint[];
begin
    foreach v_hold in array array['pause ' || c_name, 'retries ' || breaker.queue] loop
        exit when cardinality(v_ids) >= probes;
        v_ids := v_ids || array(
            select j.id from rota.jobs as j
            where j.hold = v_hold and j.hold <> 'time'
              and j.queue = breaker.queue and j.job_type = breaker.job_type
              and j.status in ('queued', 'failed') and j.run_at <= rota.now()
            order by coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at), j.id
            limit _let_probes.probes - cardinality(v_ids) for update skip locked
        );
    end loop;
    perform rota._notify_for(rota._open_for('try ' || c_name, v_ids, null, null))
    where v_ids <> '{}';
end $$;

/* Why a closed breaker has to open; null if it need not. */
create or replace function rota._breaker_reason(
    breaker rota.breakers, state rota.breaker_states
) returns text language plpgsql stable as $$
declare
    v_ends record;
begin
    if breaker.max_failures is not null then
        v_ends := rota._breaker_ends(breaker, state.counts_from, breaker.max_failures, true);
        if v_ends.failures >= breaker.max_failures and v_ends.successes = 0 then
            return format(case v_ends.failures when 1 then '%s attempt failed, with %s'
                else '%s attempts in a row failed, the last with %s' end, v_ends.failures,
                v_ends.last);
        end if;
    end if;
    if breaker.failed_percent is not null then
        v_ends := rota._breaker_ends(breaker,
            greatest(state.counts_from, rota.now() - breaker.span), 10000, false);
        if v_ends.failures > 0
          and v_ends.failures + v_ends.successes >= breaker.min_attempts
          and v_ends.failures * 100
            >= breaker.failed_percent * (v_ends.failures + v_ends.successes) then
            return format('%s of %s attempts failed, the last with %s', v_ends.failures,
                v_ends.failures + v_ends.successes, v_ends.last);
        end if;
    end if;
    return null;
end $$;

/* The newest failures since a time, and the successes since then or, where *consecutive* ones
 * are asked for, since the first of these.  Where the successes may not be among the newest
 * rows of the queue, the statistics tell of them, and failures count as far as those go: else
 * the few that fail would seem to be all there are. */
create or replace function rota._breaker_ends(
    breaker rota.breakers, since timestamptz, max_failures integer, consecutive boolean,
    out failures integer, out successes integer, out last text
) language plpgsql stable as $$
declare
    v_failed record; v_from timestamptz;
begin
    v_failed := rota._breaker_failures(breaker, since, max_failures);
    v_from := case when consecutive then v_failed.since else since end;
    successes := 0;
    if v_failed.failures > 0 and not (consecutive and v_failed.failures < max_failures) then
        successes := rota._breaker_successes(breaker, since, v_from,
            case when consecutive then 1 else 10000 end);
        if rota._may_miss_ends(breaker, v_from) then
            v_failed := rota._breaker_failures(breaker, since, max_failures,
                (select p.counted_until from rota.stats_progress as p));
            v_from := case when consecutive then v_failed.since else since end;
            successes := greatest(successes, rota._counted_successes(breaker, v_from,
                case when consecutive then 1 end));
        end if;
    end if;
    failures := v_failed.failures;
    last := v_failed.last;
end $$;

/* How many of those that try have succeeded, up to as many as it takes.  The statistics do not
 * tell when an attempt began: they count from the next minute on. */
create or replace function rota._probe_successes(breaker rota.breakers, probed_at timestamptz)
    returns integer language plpgsql stable as $$
declare
    v_successes integer := rota._breaker_successes(breaker, probed_at, probed_at,
        breaker.probes);
begin
    if v_successes < breaker.probes and rota._may_miss_ends(breaker, probed_at) then
        v_successes := greatest(v_successes, rota._counted_successes(breaker,
            date_bin('1 minute', probed_at, 'epoch') + interval '1 minute', breaker.probes));
    end if;
    return v_successes;
end $$;

/* How many attempts have succeeded since a time, as far as the statistics go: of the minute in
 * which it lies a part.  Minute by minute, the latest first, until there are so many. */
create or replace function rota._counted_successes(
    breaker rota.breakers, since timestamptz, enough integer
) returns integer language plpgsql stable as $$
declare
    c_until constant timestamptz := (select p.counted_until from rota.stats_progress as p);
begin
    return coalesce((
        select ceil(sum(n.part))
        from (
            select c.total * extract(epoch from m.until - greatest(since, m.minute))
                / extract(epoch from m.until - m.minute) as part
            from (
                select g.minute, least(g.minute + interval '1 minute', c_until) as until
                from generate_series(date_bin('1 minute', c_until, 'epoch'),
                    greatest(since, c_until - interval '2 days') - interval '1 minute',
                    interval '-1 minute') as g (minute)
            ) as m
            cross join lateral (
                select s.total from rota.job_stats as s
                where s.step = 'minute' and s.starts_at = m.minute
                  and s.queue = breaker.queue and s.job_type = breaker.job_type
                  and s.outcome = 'succeeded' offset 0
            ) as c
            where m.until > greatest(since, m.minute)
            limit _counted_successes.enough
        ) as n
    ), 0)::integer;
end $$;

/* Whether _breaker_successes() may not find all that ended since a time: more jobs of the
 * queue, or of a pipeline with such a stage, have ended than it reads, or those that are
 * counted are not kept for so long. */
create or replace function rota._may_miss_ends(breaker rota.breakers, since timestamptz)
    returns boolean language plpgsql stable as $$
begin
    return since < rota._kept_since(breaker.queue) or exists (
        select from rota.finished_jobs as f
        where f.queue = breaker.queue and f.finished_at >= since
          and f.finished_at <= (select rota.now())
        offset 4999
    ) or exists (
        select from rota.pipeline_stages as p
        cross join lateral (
            select from rota.stage_runs as s
            where s.pipeline = p.pipeline and s.finished_at >= since
              and s.finished_at <= (select rota.now())
            offset 4999 limit 1
        ) as s
        where p.queue = breaker.queue and p.job_type = breaker.job_type
    );
end $$;

/* The newest failures of attempts that began since then, among the newest 5000 of all until a
 * time; none of a time that is still to come again. */
create or replace function rota._breaker_failures(
    breaker rota.breakers, begun_since timestamptz, max_failures integer,
    until timestamptz default null, out failures integer, out since timestamptz, out last text
) language plpgsql stable as $$
begin
    select count(*)::integer, min(n.failed_at),
        -- Not its message: the log of pauses outlives the errors, and is not erased with them.
        (array_agg(format('%s (job %s)', coalesce(n.error_type, 'an error'), n.job_id)
            order by n.failed_at desc))[1]
    into failures, since, last
    from (
        select e.failed_at, e.error_type, e.job_id
        from (
            select r.failed_at, r.started_at, r.job_type, r.queue, r.error_type, r.job_id
            from rota.job_errors as r
            where r.failed_at >= begun_since
              and r.failed_at <= (select least(_breaker_failures.until, rota.now()))
            order by r.failed_at desc limit 5000
        ) as e
        where e.job_type = breaker.job_type and e.queue = breaker.queue
          and e.started_at >= begun_since
          and (breaker.error_type is null or e.error_type = breaker.error_type)
        order by e.failed_at desc limit _breaker_failures.max_failures
    ) as n;
end $$;

/* How many attempts that began since one time have succeeded since another, up to so many,
 * among the newest 5000 of the queue. */
create or replace function rota._breaker_successes(
    breaker rota.breakers, begun_since timestamptz, ended_since timestamptz,
    max_successes integer
) returns integer language plpgsql stable as $$
begin
    return (
        select count(*)::integer
        from (
            select from rota._newest_ends(breaker.queue, ended_since, 5000) as e
            where e.is_end and e.job_type = breaker.job_type and e.status = 'succeeded'
              and e.started_at >= begun_since
            limit _breaker_successes.max_successes
        ) as s
    );
end $$;

/* Jobs failed with errors of a type, and a retry rule pauses for them: until so long after the
 * last of the newest 5000 failures that is of these.  The subject is an array of error type,
 * job type and queue.  A pause that is there for another reason stays as it is. */
create or replace function rota._check_error(subject text)
    returns boolean language plpgsql as $$
declare
    c_names constant jsonb := subject::jsonb;
    c_now constant timestamptz := rota.now();
    c_rule constant rota.retry_rules := rota._retry_rule(c_names ->> 0, c_names ->> 1,
        c_names ->> 2);
    v_failed record;
begin
    if c_rule.pause_for is null then return true; end if;
    select e.failed_at, e.job_id into v_failed
    from (
        select r.failed_at, r.job_id, r.job_type, r.queue, r.error_type
        from rota.job_errors as r
        where r.failed_at > c_now - c_rule.pause_for and r.failed_at <= c_now
        order by r.failed_at desc limit 5000
    ) as e
    where e.error_type = c_names ->> 0 and e.job_type = c_names ->> 1
      and e.queue = c_names ->> 2
    order by e.failed_at desc limit 1;
    if found then
        perform rota._pause(nullif(c_rule.queue, '*'), c_names ->> 1,
            -- Not its message: the log of pauses outlives the errors.
            format('job %s failed with %s', v_failed.job_id, c_names ->> 0),
            v_failed.failed_at + c_rule.pause_for, 'rule');
    end if;
    return true;
exception
    -- An operator is about to change the pause.
    when lock_not_available then return false;
end $$;
