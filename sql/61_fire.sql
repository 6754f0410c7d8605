/*
 * 61_fire.sql -- make the jobs whose time has come.
 */

create or replace function rota._fire_schedules(max_jobs integer)
    returns integer
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return 0;
end;
$$;

create or replace function rota._recheck_schedule(name text)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return true;
end;
$$;
