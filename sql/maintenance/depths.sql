/*
 * maintenance/depths.sql -- how many jobs there are, by queue, type and status.
 *
 * If these numbers were counters, each call that changes a job would have to write one, and
 * all calls of a queue the same one.  Counting is cheap while jobs are few: up to 400 pages
 * job_counts() reads the table itself, in a few milliseconds.  Where there are many jobs,
 * maintenance counts them in rounds, 4000 pages a tick, and job_counts() reads the last
 * complete round.  A job that moves meanwhile may be counted twice or not at all; the number
 * is good to what changed while the round took.  A round begins 30 seconds after the one
 * before, or at its end.  While nothing ticks no round ends: if the last one is five minutes
 * old, job_counts() counts up to 40,000 pages itself, in about half a second, and before the
 * first one any number, since there is nothing else to tell.
 */

create or replace function rota.job_counts()
    returns table (
        queue text, job_type text, status text, is_due boolean, jobs bigint,
        first_run_at timestamptz, counted_at timestamptz
    ) language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    c_now constant timestamptz := rota.now();
    c_visible constant text[] := rota._allowed_queues('observer');
    v_round bigint; v_counted_at timestamptz; v_live_are_many boolean; v_dead_are_many boolean;
begin
    select p.round, p.counted_at, rota._are_many('rota.jobs'),
        rota._are_many('rota.finished_jobs_dead')
    into v_round, v_counted_at, v_live_are_many, v_dead_are_many
    from rota.count_progress as p
    where p.round > 0
      and (p.counted_at > c_now - interval '5 minutes'
        or pg_relation_size('rota.jobs') + pg_relation_size('rota.finished_jobs_dead')
            > 40000 * 8192);
    return query
    select c.queue, c.job_type, c.status, c.is_due, c.jobs, c.first_run_at, v_counted_at
    from rota.counted_jobs as c
    where c.round = v_round
      and case c.status when 'dead' then v_dead_are_many else v_live_are_many end
      and (c_visible is null or c.queue = any(c_visible));
    if v_live_are_many is not true then
        return query select j.queue, j.job_type, j.status, j.run_at <= c_now, count(*),
            min(rota._due_since(j)), c_now
        from rota.jobs as j where c_visible is null or j.queue = any(c_visible)
        group by 1, 2, 3, 4;
    end if;
    if v_dead_are_many is not true then
        return query select f.queue, f.job_type, 'dead', true, count(*), min(f.run_at), c_now
        from rota.finished_jobs_dead as f
        where f.discarded_at is null and (c_visible is null or f.queue = any(c_visible))
        group by 1, 2;
    end if;
end $$;

comment on function rota.job_counts is
    'The number of live and dead jobs by queue, job type, status and whether they are due, and '
    'their first run_at, or when the last job that it depended on ended: those of now, or of a '
    'table with more than 400 pages those of counted_at, about a minute ago.';

/* Since when a job is due: from its run_at on, or since the jobs that it depends on have ended.
 * Behind others of its ordering key it is late from its run_at on.  Null for one that was put
 * before all others, or off for ever, by hand. */
create or replace function rota._due_since(job rota.jobs)
    returns timestamptz language sql immutable as $$
select nullif(nullif(greatest(job.run_at, case
    when job.if_parent_dead is not null and job.ordering_key is null and job.status = 'queued'
        then job.updated_at end), '-infinity'), 'infinity')
$$;

/* Whether a table is too large to be read for an answer. */
create or replace function rota._are_many(name text)
    returns boolean language plpgsql stable as $$
begin return pg_relation_size(name::regclass) > 400 * 8192; end;
$$;

/* Whether a tick has to go on with a round, or to begin one. */
create or replace function rota._has_count_due()
    returns boolean language plpgsql stable as $$
begin
    return (rota._are_many('rota.jobs') or rota._are_many('rota.finished_jobs_dead'))
      and (
        select p.began_at is not null
            or p.counted_at not between rota.now() - interval '30 seconds' and rota.now()
        from rota.count_progress as p
    );
end $$;

create or replace function rota._count_jobs(max_pages integer)
    returns void language plpgsql set lock_timeout = '100ms' as $$
declare
    c_now constant timestamptz := rota.now();
    c_pages constant bigint := pg_relation_size('rota.jobs'::regclass)
        / current_setting('block_size')::bigint;
    c_dead_pages constant bigint := pg_relation_size('rota.finished_jobs_dead'::regclass)
        / current_setting('block_size')::bigint;
    v_round bigint; v_from bigint; v_to bigint;
begin
    if not rota._has_count_due() or rota._leaves_to_others() then return; end if;
    select p.round + 1, p.pages_done into v_round, v_from
    from rota.count_progress as p for update skip locked;
    if v_round is null then return; end if;

    v_to := v_from + max_pages;
    insert into rota.counted_jobs as c (round, queue, job_type, status, is_due, jobs,
        first_run_at)
    select v_round, i.queue, i.job_type, i.status, i.is_due, count(*), min(i.run_at)
    from (
        select j.queue, j.job_type, j.status, j.run_at <= c_now as is_due,
            rota._due_since(j) as run_at
        from rota.jobs as j
        where j.ctid >= format('(%s,0)', least(v_from, c_pages))::tid
          and j.ctid < format('(%s,0)', least(v_to, c_pages))::tid
        union all
        select f.queue, f.job_type, 'dead', true, f.run_at from rota.finished_jobs_dead as f
        where f.ctid >= format('(%s,0)', greatest(v_from - c_pages, 0))::tid
          and f.ctid < format('(%s,0)', greatest(v_to - c_pages, 0))::tid
          and f.discarded_at is null
    ) as i
    group by 2, 3, 4, 5
    on conflict on constraint counted_jobs_pkey do update
    set jobs = c.jobs + excluded.jobs,
        first_run_at = least(c.first_run_at, excluded.first_run_at);

    if v_to < c_pages + c_dead_pages then
        update rota.count_progress as p
        set began_at = coalesce(p.began_at, c_now), pages_done = v_to;
        return;
    end if;
    delete from rota.counted_jobs as c where c.round < v_round;
    update rota.count_progress as p
    set round = v_round, counted_at = coalesce(p.began_at, c_now), began_at = null,
        pages_done = 0;
end $$;
