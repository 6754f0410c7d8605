/*
 * base/backoff.sql -- how long a failed job waits before its next try.
 *
 * A rule is a small object, kept with the job or with its queue:
 *
 *     {"kind": "fixed",       "base_seconds": 60}                           1m 1m 1m
 *     {"kind": "linear",      "base_seconds": 300}                          5m 10m 15m
 *     {"kind": "exponential", "base_seconds": 60, "cap_seconds": 1800}      1m 2m 4m ... 30m
 *     {"kind": "quadratic",   "base_seconds": 10}                           10s 40s 90s
 *     {"kind": "list",        "delay_seconds": [60, 300, 1800, 7200]}       the last repeats
 *
 * "jitter" (default 0.2) spreads each delay by that share in both directions, so that jobs
 * that failed together are not retried together.  "cap_seconds" (default a day) is a true
 * maximum: the middle of the spread is held below it, rather than half of the jobs cut to it.
 *
 * _check_backoff() is strict, because a person reads its answer.  _backoff() accepts anything
 * and always returns a delay, because a job that fails must be able to.  It works on numbers
 * and makes an interval last: an interval of 2^44 seconds is silently negative.
 */

create or replace function rota._backoff(policy jsonb, attempt integer)
    returns interval language plpgsql volatile as $$
declare
    v_kind constant text := coalesce(policy ->> 'kind', 'exponential');
    v_base constant float8 := rota._bounded(policy -> 'base_seconds', 60, 0.001, 31536000);
    v_cap constant float8 := rota._bounded(policy -> 'cap_seconds',
        case when policy is null then 1800 else 86400 end, 0.001, 31536000);
    v_jitter constant float8 := rota._bounded(policy -> 'jitter', 0.2, 0, 0.9);
    v_attempt constant float8 := greatest(attempt, 1)::float8;
    v_delay float8;
begin
    v_delay := case v_kind
        when 'fixed' then v_base
        when 'linear' then v_base * v_attempt
        when 'quadratic' then v_base * v_attempt * v_attempt
        when 'list' then rota._bounded(
            policy -> 'delay_seconds' -> (least(v_attempt::bigint,
                case jsonb_typeof(policy -> 'delay_seconds')
                    when 'array' then jsonb_array_length(policy -> 'delay_seconds') else 1 end
            )::integer - 1), v_base, 0.001, 31536000)
        else v_base * power(2, least(v_attempt - 1, 62))
    end;

    if v_kind <> 'list' or policy ? 'cap_seconds' then
        v_delay := least(v_delay, v_cap / (1 + v_jitter));
    end if;
    return make_interval(secs => v_delay * (1 + v_jitter * (2 * random() - 1)));
end $$;

/* A JSON number within bounds; anything else is the fallback. */
create or replace function rota._bounded(value jsonb, fallback float8, low float8, high float8)
    returns float8 language plpgsql immutable as $$
begin
    if jsonb_typeof(_bounded.value) is distinct from 'number' then return fallback; end if;
    -- Rounded, since a float8 can be too coarse even for a number within bounds: 1e-400.
    return round(least(greatest(value::numeric, low::numeric), high::numeric), 9)::float8;
end $$;

create or replace function rota._check_backoff(argument text, backoff jsonb)
    returns void language plpgsql as $$
declare
    v_problem text;
begin
    if backoff is null then return; end if;
    v_problem := case
        when jsonb_typeof(backoff) <> 'object'
            then 'must be an object such as {"kind": "fixed", "base_seconds": 60}'
        when (backoff ->> 'kind' in ('fixed', 'linear', 'exponential', 'quadratic', 'list'))
            is not true then 'needs a kind: fixed, linear, exponential, quadratic or list'
        when (backoff ->> 'kind' = 'list') <> (backoff ? 'delay_seconds')
            then 'needs delay_seconds for the kind list, and only for it'
        else coalesce((
            select coalesce('needs ' || e.key || ' to be ' || k.what,
                format('has an unknown key %L', rota._cut(e.key, 80)))
            from jsonb_each(_check_backoff.backoff) as e
            left join (values
                ('{kind}'::text[], '', '$'::jsonpath),
                ('{base_seconds,cap_seconds}', '0.001 to 31536000 (a year)',
                    'strict $ ? (@.type() == "number" && @ >= 0.001 && @ <= 31536000)'),
                ('{jitter}', '0 to 0.9',
                    'strict $ ? (@.type() == "number" && @ >= 0 && @ <= 0.9)'),
                ('{delay_seconds}', 'a list of 1 to 100 numbers, 0.001 to 31536000',
                    'strict $ ? (@.type() == "array" && @.size() >= 1 && @.size() <= 100 && '
                    '!exists (@[*] ? (@.type() <> "number" || @ < 0.001 || @ > 31536000)))')
            ) as k (keys, what, good) on e.key = any(k.keys)
            where jsonb_path_exists(e.value, k.good) is not true limit 1
        ), case
            when (backoff ->> 'cap_seconds')::numeric < (backoff ->> 'base_seconds')::numeric
                then 'has a cap_seconds below its base_seconds' end)
    end;
    if v_problem is not null then perform rota._refuse(argument, v_problem); end if;
end $$;
