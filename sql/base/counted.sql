/*
 * base/counted.sql -- until when all that ended is in the statistics.
 *
 * Maintenance counts what ended from the history (maintenance/statistics.sql).  Retention and
 * retry_job(), which take rows out of the history, ask here which rows are counted.
 */

create or replace function rota._counted_until()
    returns timestamptz language plpgsql stable as $$
begin return (select p.complete_until from rota.stats_progress as p); end;
$$;
