/*
 * base/clock.sql -- the one clock.
 *
 * Every time that rota writes or compares comes from rota.now(), so the clocks of
 * workers and web servers never decide anything.  It is the wall clock and not the start of
 * the transaction: a lease taken at the end of a long transaction must not already be expired.
 *
 * It is declared stable although the wall clock moves: then `run_at <= rota.now()` is an
 * index condition.  A statement that needs one instant for all its rows reads it once.
 */

create or replace function rota.now()
    returns timestamptz language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp as $$
begin return clock_timestamp(); end;
$$;

comment on function rota.now is
    'The wall clock of the database, the only clock that rota reads.';

/* How long it is from one time to another; null where a hand has written one to which no clock
 * comes, such as infinity: nothing can be subtracted from it. */
create or replace function rota._elapsed(since timestamptz, until timestamptz)
    returns interval language sql stable as $$
select case when since between '1900-01-01' and '9999-12-31'
    and until between '1900-01-01' and '9999-12-31' then until - since end
$$;
