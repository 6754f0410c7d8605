/*
 * schedules/next.sql -- when a schedule is due next.
 *
 * The wall clock of the zone decides.  Twice a year it is moved, and then:
 *
 *   - a job of fixed time (neither its minute nor its hour begins with a star) whose time is
 *     skipped runs at the first instant after the gap, and one whose time occurs twice runs the
 *     first time only: such a job runs once on every day that it names;
 *   - any other follows the clock: it skips a skipped time, and runs twice at one that occurs
 *     twice.
 *
 * `every` counts seconds from its anchor and ignores the wall clock.
 *
 * Nothing here reads the TimeZone of the session, and nothing depends on an earlier run: each
 * answer follows from the text, the zone and one instant.  Only seconds are added to an
 * instant, since a day of an interval is a day in the session's zone.
 */

create or replace function rota.next_run(
    schedule text, time_zone text default 'UTC', after timestamptz default null,
    starts_at timestamptz default null
) returns timestamptz language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp as $$
declare
    v_after constant timestamptz := coalesce(after, rota.now());
begin
    perform rota._check_time_zone(time_zone);
    perform rota._check_run_at('after', v_after);
    if starts_at is not null then perform rota._check_run_at('starts_at', starts_at); end if;
    return rota._next_occurrence(rota._parse_schedule(schedule), time_zone,
        greatest(v_after, starts_at - interval '1 microsecond'), coalesce(starts_at, v_after));
end $$;

comment on function rota.next_run is
    'The first time later than after (now) that a schedule text names in a time zone, not '
    'before starts_at, from which "every" counts; null if there is none in 100 years or before '
    'the year 9999; raises RT006, 22023.';

create or replace function rota.upcoming_runs(
    schedule text default null, time_zone text default 'UTC', after timestamptz default null,
    max_runs integer default 10, name text default null
) returns table (
        run_at timestamptz, local_time timestamp without time zone, utc_offset interval,
        clock_change text
    ) language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_after constant timestamptz := coalesce(after, rota.now());
    v_definition rota.job_definitions; v_parsed rota.parsed_schedule;
begin
    perform rota._check_number('max_runs', max_runs, 1, 1000);
    if num_nonnulls(schedule, name) <> 1 then
        perform rota._refuse('schedule', 'or name must be given, and not both');
    end if;
    perform rota._check_run_at('after', v_after);

    if name is null then
        perform rota._check_time_zone(time_zone);
        v_definition := jsonb_populate_record(v_definition, jsonb_build_object('schedule',
            schedule, 'time_zone', time_zone, 'anchored_at', v_after));
    else
        select d.* into v_definition from rota.job_definitions as d
        where d.name = upcoming_runs.name;
        if not found or v_definition.queue <> all(rota._allowed_queues('observer')) then
            perform rota._raise_no_schedule(name);
        end if;
    end if;

    v_parsed := rota._parse_schedule(v_definition.schedule);
    run_at := greatest(v_after, v_definition.starts_at - interval '1 microsecond');
    -- A run of an `after` schedule is planned when the one before it has ended.
    if v_parsed.kind = 'after' and v_definition.is_enabled
      and v_definition.next_run_at is null then
        return;
    end if;
    for i in 1..upcoming_runs.max_runs loop
        -- What is planned decides, as where the clock was ahead; and a run of an `after`
        -- schedule does not pass: what is due waits for a tick.
        run_at := coalesce(
            case when upcoming_runs.after is null and v_definition.next_run_at > run_at
                or v_parsed.kind = 'after'
                and (v_definition.next_run_at > run_at or upcoming_runs.after is null)
                then v_definition.next_run_at end,
            rota._next_occurrence(v_parsed, v_definition.time_zone, greatest(run_at, v_after),
                v_definition.anchored_at));
        exit when run_at is null or run_at > v_definition.ends_at;
        local_time := run_at at time zone v_definition.time_zone;
        utc_offset := local_time - (run_at at time zone 'UTC');
        clock_change := rota._clock_note(v_parsed, v_definition.time_zone, run_at);
        return next;
        exit when v_parsed.kind = 'after';
    end loop;
end $$;

comment on function rota.upcoming_runs is
    'The next max_runs times later than after (now) of a schedule text, or of the schedule of '
    'that name, with the local time and whether it was moved out of a gap or occurs twice; '
    'raises RT005, RT006, 22023.';

/* Null, moved (its time is skipped that day), or first or second of a time that comes twice. */
create or replace function rota._clock_note(
    parsed rota.parsed_schedule, time_zone text, run_at timestamptz
) returns text language plpgsql stable as $$
declare
    v_wall constant timestamp without time zone := run_at at time zone time_zone;
begin
    return case
        when parsed.kind <> 'cron' or rota._clock_change(time_zone,
            run_at - interval '26 hours', run_at + interval '26 hours') is null then null
        when rota._next_wall(parsed, v_wall) <> v_wall then 'moved'
        when rota._first_instant(time_zone, v_wall) <> run_at then 'second'
        -- The clock shows once more what it shows then.
        when (rota._clock_change(time_zone, run_at, run_at + interval '26 hours')
            at time zone time_zone) <= v_wall then 'first'
    end;
end $$;

/* The first time later than *after*. */
create or replace function rota._next_occurrence(
    parsed rota.parsed_schedule, time_zone text, after timestamptz, anchored_at timestamptz
) returns timestamptz language plpgsql stable as $$
declare
    v_time timestamptz;
begin
    v_time := case
        when parsed.kind = 'after' then after + parsed.period
        when parsed.kind = 'every' and anchored_at > after then anchored_at
        when parsed.kind = 'every' then anchored_at + parsed.period * (1 + floor(
            extract(epoch from _next_occurrence.after - anchored_at)
            / extract(epoch from parsed.period))::float8)
        when parsed.is_fixed then rota._next_fixed(parsed, time_zone, after)
        else rota._next_shown(parsed, time_zone, after)
    end;
    -- What a tick does must come to an end, whatever it finds in a zone's file.
    if v_time <= after then
        perform rota._refuse('time_zone', format('%L has clocks that go wrong', time_zone));
    end if;
    return case when v_time < '9999-01-01 00:00+00' then v_time end;
end $$;

/* Of jobs of fixed time: once for each wall time named, and not before the clock is there. */
create or replace function rota._next_fixed(
    parsed rota.parsed_schedule, time_zone text, after timestamptz
) returns timestamptz language plpgsql stable as $$
declare
    v_wall timestamp without time zone := interval '1 second'
        + date_trunc('second', after at time zone time_zone);
    v_change constant timestamptz := rota._clock_change(time_zone, after - interval '26 hours',
        after);
begin
    -- What the clock has shown before it was put back is over.
    if v_change is not null then
        v_wall := greatest(v_wall, interval '1 second'
            + date_trunc('second', (v_change - interval '1 second') at time zone time_zone));
    end if;
    return rota._first_instant(time_zone, rota._next_wall(parsed, v_wall));
end $$;

/* Of the others: whenever the wall clock shows what is named. */
create or replace function rota._next_shown(
    parsed rota.parsed_schedule, time_zone text, after timestamptz
) returns timestamptz language plpgsql stable as $$
declare
    v_from timestamptz := date_trunc('second', after) + interval '1 second';
    v_last constant timestamp without time zone :=
        (after at time zone 'UTC') + interval '100 years';
    v_wall timestamp without time zone; v_next timestamp without time zone;
    v_instant timestamptz; v_change timestamptz;
begin
    loop
        v_wall := v_from at time zone time_zone;
        v_next := rota._next_wall(parsed, v_wall);
        -- What is named in a gap alone, as 02:30 on the last Sunday of March, never comes.
        exit when (v_next < v_last) is not true;
        if v_next > v_wall + interval '4 days' then
            -- Nothing is named before, so go near it; there the clock may differ.
            v_change := rota._clock_change(time_zone, v_from, v_from + interval '26 hours');
            v_from := coalesce(v_change, (v_next - interval '2 days') at time zone time_zone);
            continue;
        end if;

        v_instant := v_from + rota._exact(v_next - v_wall);
        v_change := rota._clock_change(time_zone, v_from, v_from + interval '120 hours');
        if v_change is null or v_instant < v_change then return v_instant; end if;
        v_from := v_change;
    end loop;
    return null;
end $$;

/* The newest *max_times* times from *first*, which is one, to *until*, the oldest in front:
 * those of the later half of that time, and then as many of the earlier as are still wanted. */
create or replace function rota._occurrences_until(
    parsed rota.parsed_schedule, time_zone text, anchored_at timestamptz, first timestamptz,
    until timestamptz, max_times integer
) returns timestamptz[] language plpgsql stable as $$
declare
    c_middle constant timestamptz := first + (until - first) / 2;
    v_times timestamptz[] := array[]::timestamptz[];
begin
    if max_times < 1 or (first <= until) is not true then
        return v_times;
    elsif (rota._next_occurrence(parsed, time_zone, first, anchored_at) <= until) is not true
    then
        return array[first];
    end if;
    v_times := rota._occurrences_until(parsed, time_zone, anchored_at,
        rota._next_occurrence(parsed, time_zone, c_middle, anchored_at), until, max_times);
    return rota._occurrences_until(parsed, time_zone, anchored_at, first, c_middle,
        max_times - cardinality(v_times)) || v_times;
end $$;

create or replace function rota._raise_no_schedule(name text)
    returns void language plpgsql as $$
begin
    perform rota._check_given('name', name is not null);
    raise exception using
        errcode = 'RT005', message = format('schedule %L not found', rota._cut(name, 80)),
        hint = 'rota.job_definitions lists all of them.';
end $$;
