/*
 * schedules/calendar.sql -- the next time that a wall clock shows what a schedule names.
 *
 * There are no zones here: a wall clock shows a timestamp without one, and every day has 24
 * hours.  The search turns a month into the set of its matching days, and a day into the next
 * matching time.  The cost grows with the months searched and never with the minutes between;
 * 40 years contain every form of every month, so the search ends.
 */

/* The first match at or after *wall*, which is a whole second; null beyond the year 9998. */
create or replace function rota._next_wall(
    parsed rota.parsed_schedule, wall timestamp without time zone
) returns timestamp without time zone language plpgsql immutable as $$
declare
    v_today constant date := wall::date;
    v_second integer := rota._next_second(parsed,
        extract(epoch from _next_wall.wall - v_today)::integer);
    v_day constant date := rota._next_day(parsed,
        case when v_second is null then v_today + 1 else v_today end);
begin
    if v_second is null or v_day > v_today then
        v_second := rota._next_second(parsed, 0);
    end if;
    return v_day + make_interval(secs => v_second);
end $$;

/* The first matching day at or after *day*. */
create or replace function rota._next_day(parsed rota.parsed_schedule, day date)
    returns date language plpgsql immutable as $$
declare
    v_year integer := extract(year from _next_day.day)::integer;
    v_month integer := extract(month from _next_day.day)::integer;
    v_skipped integer := extract(day from _next_day.day)::integer;
    v_first date; v_days bigint;
    -- Months have 28 forms, by length and first weekday, and each comes about in 40 years.
    c_until constant integer := least(9999, v_year + 41);
begin
    while v_year < c_until loop
        if parsed.months >> v_month & 1 = 1 then
            v_first := make_date(v_year, v_month, 1);
            v_days := rota._days_of_month(parsed, extract(dow from v_first)::integer,
                (v_first + interval '1 month')::date - v_first);
            v_days := v_days >> v_skipped << v_skipped;
            if v_days <> 0 then return v_first + rota._lowest_bit(v_days) - 1; end if;
        end if;
        if parsed.months >> v_month + 1 = 0 then
            v_year := v_year + 1;
            v_month := 0;
        end if;
        v_month := rota._lowest_bit(parsed.months >> v_month + 1 << v_month + 1);
        v_skipped := 0;
    end loop;
    return null;
end $$;

/* The days that match in a month that begins on weekday *first* (0 is Sunday). */
create or replace function rota._days_of_month(
    parsed rota.parsed_schedule, first integer, length integer
) returns bigint language plpgsql immutable as $$
declare
    c_each_week constant bigint := 270549121::bigint;  -- bits 0, 7, 14, 21, 28
    v_month constant bigint := (2::bigint << length) - 2;
    v_last constant integer := (first + length - 1) % 7;
    v_days bigint := parsed.days & v_month;
    v_weekdays bigint := 0::bigint;
    v_day integer;
begin
    if parsed.days >> 32 & 1 = 1 then v_days := v_days | (1::bigint << length); end if;
    if parsed.days >> 33 & 1 = 1 then
        v_days := v_days | (1::bigint
            << length - case v_last when 0 then 2 when 6 then 1 else 0 end);
    end if;

    for v_weekday in 0..6 loop
        exit when parsed.weekdays = 0;
        v_day := 1 + (v_weekday - first + 7) % 7;
        if parsed.weekdays >> v_weekday & 1 = 1 then
            v_weekdays := v_weekdays | (c_each_week << v_day);
        end if;
        continue when parsed.weekdays < 128;
        for v_nth in 1..5 loop
            if parsed.weekdays >> 7 * v_nth + v_weekday & 1 = 1 then
                v_weekdays := v_weekdays | (1::bigint << v_day + 7 * (v_nth - 1));
            end if;
        end loop;
        if parsed.weekdays >> 42 + v_weekday & 1 = 1 then
            v_weekdays := v_weekdays | (1::bigint
                << v_day + case when v_day + 28 <= length then 28 else 21 end);
        end if;
    end loop;

    if parsed.is_both then return v_days & v_weekdays & v_month; end if;
    return (v_days | v_weekdays) & v_month;
end $$;

/* The same within a day, in seconds since its begin; null if none is left. */
create or replace function rota._next_second(parsed rota.parsed_schedule, second integer)
    returns integer language plpgsql immutable as $$
declare
    v_hour integer := second / 3600;
    v_minute integer := second / 60 % 60;
    v_second integer := second % 60;
begin
    if parsed.hours >> v_hour & 1 = 1 then
        if parsed.minutes >> v_minute & 1 = 1 and parsed.seconds >> v_second <> 0 then
            return 3600 * v_hour + 60 * v_minute
                + rota._lowest_bit(parsed.seconds >> v_second << v_second);
        elsif parsed.minutes >> v_minute + 1 <> 0 then
            return 3600 * v_hour
                + 60 * rota._lowest_bit(parsed.minutes >> v_minute + 1 << v_minute + 1)
                + rota._lowest_bit(parsed.seconds);
        end if;
    end if;
    if parsed.hours >> v_hour + 1 = 0 then return null; end if;
    return 3600 * rota._lowest_bit(parsed.hours >> v_hour + 1 << v_hour + 1)
        + 60 * rota._lowest_bit(parsed.minutes) + rota._lowest_bit(parsed.seconds);
end $$;

/* A logarithm of a power of two is exact enough to round. */
create or replace function rota._lowest_bit(bits bigint)
    returns integer language plpgsql immutable as $$
begin return round(ln((bits & -bits)::float8) / ln(2::float8))::integer; end;
$$;
