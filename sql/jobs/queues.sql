/*
 * jobs/queues.sql -- settings of a queue and of a job type; which queues have ready jobs.
 *
 * A queue needs no row: it exists as soon as a producer enqueues to it, with the defaults.  A
 * row holds what differs.  What is set for a type is written to its jobs as they come in, and
 * goes before what is set for their queue.
 */

create or replace function rota.set_queue(
    queue text, lease interval default null, max_attempts integer default null,
    backoff jsonb default null, keep_finished interval default null,
    keep_dead interval default null, ageing interval default null,
    time_limit interval default null, retry_budget jsonb default null,
    expires_after interval default null, reset boolean default false
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_name('queue', queue);
    perform rota._check_queues('operator', array[queue]);
    perform rota._check_interval('lease', lease, may_be_null => true);
    perform rota._check_interval('time_limit', time_limit, may_be_null => true);
    perform rota._refuse('max_attempts', format('must be at least 1, got %s', max_attempts))
    where max_attempts < 1;
    perform rota._check_backoff('backoff', backoff);
    perform rota._check_interval('keep_finished', keep_finished, '0', '100 years', true);
    perform rota._check_interval('keep_dead', keep_dead, '0', '100 years', true);
    perform rota._check_interval('ageing', ageing, '1 second', '30 days', true);
    perform rota._check_interval('expires_after', expires_after, '1 millisecond', '100 years',
        true);
    if jsonb_typeof(retry_budget) <> 'object' or not retry_budget ? 'per_minute'
      or retry_budget - '{per_minute,percent}'::text[] <> '{}' then
        perform rota._refuse('retry_budget',
            'must be an object with per_minute, and perhaps percent');
    end if;
    perform rota._refuse('retry_budget.' || b.key, format(
        'must be a whole number of %s to %s, got %s', r.lowest, r.highest,
        rota._cut(b.value::text, 80)))
    from jsonb_each(set_queue.retry_budget) as b
    join (values ('per_minute', 1, 1000000), ('percent', 0, 1000)) as r (key, lowest, highest)
        on r.key = b.key
    where not jsonb_path_exists(b.value, 'strict $ ? (@.type() == "number"
        && @ >= $lowest && @ <= $highest && @.floor() == @)', to_jsonb(r))
    order by r.lowest desc limit 1;
    perform rota._check_given('reset', reset is not null);

    insert into rota.queues as q (queue, lease, max_attempts, backoff, keep_finished, keep_dead,
        ageing, time_limit, retry_budget, expires_after)
    values (set_queue.queue, rota._exact(set_queue.lease), set_queue.max_attempts,
        set_queue.backoff, rota._exact(set_queue.keep_finished),
        rota._exact(set_queue.keep_dead), rota._exact(set_queue.ageing),
        rota._exact(set_queue.time_limit), '{"percent": 0}' || set_queue.retry_budget,
        rota._exact(set_queue.expires_after))
    on conflict on constraint queues_pkey do update
    set lease = coalesce(excluded.lease, case when not reset then q.lease end),
        max_attempts = coalesce(excluded.max_attempts,
            case when not reset then q.max_attempts end),
        backoff = coalesce(excluded.backoff, case when not reset then q.backoff end),
        keep_finished = coalesce(excluded.keep_finished,
            case when not reset then q.keep_finished end),
        keep_dead = coalesce(excluded.keep_dead, case when not reset then q.keep_dead end),
        ageing = coalesce(excluded.ageing, case when not reset then q.ageing end),
        time_limit = coalesce(excluded.time_limit, case when not reset then q.time_limit end),
        retry_budget = coalesce(excluded.retry_budget,
            case when not reset then q.retry_budget end),
        expires_after = coalesce(excluded.expires_after,
            case when not reset then q.expires_after end),
        updated_at = rota.now();
    insert into rota.retry_budgets (queue)
    select set_queue.queue where set_queue.retry_budget is not null on conflict do nothing;
    -- Jobs that wait take the places that the new setting gives them.
    perform rota._add_checks('queue', array[queue]) where ageing is not null or reset;
end $$;

comment on function rota.set_queue is
    'Change settings of a queue: null leaves one unchanged, reset restores the defaults of the '
    'others; raises 22023 for a bad argument.';

create or replace function rota.set_type(
    job_type text, time_limit interval default null, expires_after interval default null,
    reset boolean default false
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_name('job_type', job_type);
    perform rota._check_queues('operator', '{*}');
    perform rota._check_interval('time_limit', time_limit, may_be_null => true);
    perform rota._check_interval('expires_after', expires_after, '1 millisecond', '100 years',
        true);
    perform rota._check_given('reset', reset is not null);
    if num_nonnulls(time_limit, expires_after) = 0 then
        perform rota._refuse('time_limit', 'or expires_after or reset must be given')
        where not reset;
        -- Without a row no session looks for one.
        delete from rota.job_types as t where t.job_type = set_type.job_type;
        return;
    end if;

    insert into rota.job_types as t (job_type, time_limit, expires_after)
    values (set_type.job_type, rota._exact(set_type.time_limit),
        rota._exact(set_type.expires_after))
    on conflict on constraint job_types_pkey do update
    set time_limit = coalesce(excluded.time_limit, case when not reset then t.time_limit end),
        expires_after = coalesce(excluded.expires_after,
            case when not reset then t.expires_after end),
        updated_at = rota.now();
end $$;

comment on function rota.set_type is
    'Change the defaults of new jobs of a job_type, which override those of their queue: null '
    'leaves one unchanged, reset removes the others; raises 22023 for a bad argument.';

/* Until when a new job may start, by what is set for its type or queue; null means for ever. */
create or replace function rota._default_expiry(job_type text, queue text, run_at timestamptz)
    returns timestamptz language plpgsql stable as $$
begin
    return run_at + coalesce(
        (select t.expires_after from rota.job_types as t
            where t.job_type = _default_expiry.job_type),
        (select q.expires_after from rota.queues as q where q.queue = _default_expiry.queue));
end $$;

/* The queues between these that have jobs which may start; of very many not all. */
create or replace function rota._ready_queues(above text default '', until text default '~')
    returns text[] language plpgsql stable as $$
begin
    return array(
        with recursive queues as (
            select _ready_queues.above collate "C" as queue
            union all
            select n.queue from queues as q
            cross join lateral (
                select j.queue from rota.jobs as j
                where j.queue > q.queue and j.queue <= _ready_queues.until
                  and j.hold is null and j.status in ('queued', 'failed')
                order by j.queue limit 1
            ) as n
        )
        select r.queue from queues as r where r.queue <> _ready_queues.above limit 1024
    );
end $$;
