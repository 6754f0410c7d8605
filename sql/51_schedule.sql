/*
 * 51_schedule.sql -- to come.
 */

create or replace function rota._raise_no_schedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'RT005',
        message = format('schedule %L not found', left(_raise_no_schedule.name, 80));
end;
$$;
