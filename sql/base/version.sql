/*
 * base/version.sql -- the version of the installed code.
 *
 * A literal in a function that each install replays: it cannot be lost by a dump, and it
 * cannot disagree with the code next to it.  Which changes of tables ran is in upgrade_log.
 */

create or replace function rota.version()
    returns text language sql immutable security definer
    set search_path = pg_catalog, pg_temp as $$
select '0.2.0'
$$;

comment on function rota.version is 'The version of the installed functions, such as 0.2.0.';
