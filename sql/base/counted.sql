/*
 * base/counted.sql -- which ended jobs are counted, which are kept, and the newest of them.
 *
 * Maintenance counts ended jobs in the history (maintenance/statistics.sql).  Retention and
 * retry_job(), which take rows out of the history, check here which rows are counted.  What
 * looks at recent ends finds them here, and how far back the history has all of a queue.
 */

create or replace function rota._counted_until()
    returns timestamptz language plpgsql stable as $$
begin return (select p.complete_until from rota.stats_progress as p); end;
$$;

/* Since when all that ended well in a queue is in the history: what had ended before, and is
 * counted, may be purged. */
create or replace function rota._kept_since(queue text)
    returns timestamptz language plpgsql stable as $$
begin
    return least((select p.counted_until from rota.stats_progress as p),
        rota.now() - coalesce((
            select q.keep_finished from rota.queues as q where q.queue = _kept_since.queue
        ), '7 days'));
end $$;

/* What ended last in a queue since a time, up to so many jobs and, of each pipeline that has a
 * stage there, so many stages: an end is a job that is of no pipeline, or a stage of the queue.
 * The others are told too, since they are among so many.  None of a time that is still to come
 * again. */
create or replace function rota._newest_ends(queue text, since timestamptz, max_rows integer)
    returns table (
        pipeline text, is_end boolean, job_type text, limit_key text, status text,
        attempts integer, started_at timestamptz, finished_at timestamptz
    ) language sql stable as $$
    (
        select null, f.pipeline is null, f.job_type, f.limit_key, f.status, f.attempts,
            f.started_at, f.finished_at
        from rota.finished_jobs as f
        where f.queue = _newest_ends.queue and f.finished_at >= _newest_ends.since
          and f.finished_at <= (select rota.now())
        order by f.finished_at desc limit max_rows
    )
    union all
    select p.pipeline, s.queue = _newest_ends.queue, s.job_type, null, s.status, s.attempts,
        s.started_at, s.finished_at
    from (
        select distinct g.pipeline from rota.pipeline_stages as g
        where g.queue = _newest_ends.queue
    ) as p
    cross join lateral (
        select r.queue, r.job_type, r.status, r.attempts, r.started_at, r.finished_at
        from rota.stage_runs as r
        where r.pipeline = p.pipeline and r.finished_at >= _newest_ends.since
          and r.finished_at <= (select rota.now())
        order by r.finished_at desc limit max_rows
    ) as s
$$;
