/*
 * schedules/zones.sql -- from the wall clock of a zone to instants, exact where clocks change.
 *
 * `at time zone` knows the wall time of any instant.  In the other direction it has to guess
 * twice a year: a skipped wall time has no instant, one that occurs twice has two, and its
 * guesses are not cron's.  So these functions find the change itself, by bisection.
 *
 * Since 1970 no clock was moved by more than a day, and none twice within a week.
 */

/* The first instant after *after* and up to *until* with a new offset; null if none. */
create or replace function rota._clock_change(
    time_zone text, after timestamptz, until timestamptz
) returns timestamptz language plpgsql stable as $$
declare
    v_offset constant interval := (after at time zone time_zone) - (after at time zone 'UTC');
    v_before integer := 0;
    v_since integer := extract(epoch from _clock_change.until - _clock_change.after)::integer;
    v_middle integer;
    v_instant timestamptz := until;
begin
    if (v_instant at time zone time_zone) - (v_instant at time zone 'UTC') = v_offset then
        return null;
    end if;
    while v_since - v_before > 1 loop
        v_middle := (v_before + v_since) / 2;
        v_instant := after + make_interval(secs => v_middle);
        if (v_instant at time zone time_zone) - (v_instant at time zone 'UTC') = v_offset then
            v_before := v_middle;
        else
            v_since := v_middle;
        end if;
    end loop;
    return after + make_interval(secs => v_since);
end $$;

/* The first instant at which the wall clock shows *wall*, or more because it skipped it. */
create or replace function rota._first_instant(time_zone text, wall timestamp without time zone)
    returns timestamptz language plpgsql stable as $$
declare
    v_instant constant timestamptz := wall at time zone time_zone;
    v_change constant timestamptz := rota._clock_change(time_zone,
        v_instant - interval '26 hours', v_instant + interval '26 hours');
    v_before timestamptz;
begin
    if v_change is null then return v_instant; end if;
    v_before := v_change - interval '1 second'
        + rota._exact(wall - ((v_change - interval '1 second') at time zone time_zone));
    if v_before < v_change then return v_before; end if;
    return greatest(v_change,
        v_change + rota._exact(wall - (v_change at time zone time_zone)));
end $$;

/* Only names of the IANA database, which have rules for all time.  Postgres also takes
 * abbreviations, which are fixed offsets, and texts such as FOO+3, which mean something else
 * than they seem to; those two have no slash, or a digit.  Nor those that count leap seconds,
 * which no clock on a wall does. */
create or replace function rota._check_time_zone(time_zone text)
    returns void language plpgsql stable as $$
begin
    if time_zone in ('UTC', 'GMT') then
        return;
    -- No name is so long, and the pattern takes its time on a text that is.
    elsif octet_length(time_zone) <= 63
      and time_zone ~ '^([A-Za-z_-]+(/[A-Za-z_-]+){0,2}|Etc/GMT([+-][0-9]|[+]1[0-2]|-1[0-4]))$'
      and time_zone collate "C" !~* '^(localtime|factory|posixrules|(posix|right)/.*)$'
      and (position('/' in time_zone) > 0 or not exists (
        select from pg_timezone_abbrevs as a
        where a.abbrev = upper(_check_time_zone.time_zone collate "C")
    )) then
        begin
            perform rota.now() at time zone time_zone;
            return;
        exception when invalid_parameter_value then
            null;
        end;
    end if;

    perform rota._refuse('time_zone', format('must be a name such as Europe/Warsaw or UTC, '
        'got %s', coalesce(quote_literal(rota._cut(time_zone, 80)), 'null')));
end $$;
