/*
 * base/counted.sql -- until when ended jobs are in the statistics.
 *
 * Maintenance counts ended jobs in the history (maintenance/statistics.sql).  Retention and
 * retry_job(), which take rows out of the history, check here which rows are counted.
 */

create or replace function rota._counted_until()
    returns timestamptz language plpgsql stable as $$
begin return (select p.complete_until from rota.stats_progress as p); end;
$$;
