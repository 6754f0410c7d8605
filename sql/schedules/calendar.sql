/*
 * schedules/calendar.sql -- the next time that a wall clock shows what a schedule names.
 *
 * There are no zones here: a wall clock shows a timestamp without one, and every day has 24
 * hours.  The search looks for a matching day in matching months, and in it for the next
 * matching time.  The cost grows with the days searched and never with the minutes between.
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
    v_first date := date_trunc('month', day::timestamp without time zone)::date;
    v_skipped integer := _next_day.day - v_first;
    v_length integer; v_weekday integer; v_is_day boolean; v_is_weekday boolean;
    -- Months have 28 forms, by length and first weekday, and each comes about in 40 years.
    c_until constant date := least('9999-01-01', v_first + interval '41 years')::date;
begin
    while v_first < c_until loop
        v_length := (v_first + interval '1 month')::date - v_first;
        for v_day in v_skipped + 1 ..v_length loop
            exit when parsed.months >> extract(month from v_first)::integer & 1 = 0;
            v_weekday := extract(dow from v_first + v_day - 1)::integer;
            v_is_day := parsed.days >> v_day & 1 = 1
                or parsed.days >> 32 & 1 = 1 and v_day = v_length
                or parsed.days >> 33 & 1 = 1 and v_weekday between 1 and 5
                  and (v_day = v_length or v_weekday = 5 and v_day + 3 > v_length);
            v_is_weekday := parsed.weekdays >> v_weekday & 1 = 1
                or parsed.weekdays >> 7 * ((v_day + 6) / 7) + v_weekday & 1 = 1
                or parsed.weekdays >> 42 + v_weekday & 1 = 1 and v_day + 7 > v_length;
            if v_is_day and v_is_weekday
              or not parsed.is_both and (v_is_day or v_is_weekday) then
                return v_first + v_day - 1;
            end if;
        end loop;
        v_first := v_first + v_length;
        v_skipped := 0;
    end loop;
    return null;
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
