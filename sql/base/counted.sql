/*
 * base/counted.sql -- until when ended jobs are counted, and since when they are kept.
 *
 * Maintenance counts ended jobs in the history (maintenance/statistics.sql).  Retention and
 * retry_job(), which take rows out of the history, check here which rows are counted.  What
 * looks at recent ends checks here how far back the history has all of a queue.
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
