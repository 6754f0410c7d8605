/*
 * schedules/text.sql -- parse a schedule text.
 *
 * Five fields as Debian's cron reads them: minute, hour, day of month, month, weekday; or six,
 * with the second in front.  Each field becomes a set of bits, bit n for the value n, so that
 * the calendar is a matter of shifts.  What a month alone can resolve has bits beyond its
 * values: of the days 32 (L, the last) and 33 (LW, the last from Monday to Friday); of the
 * weekdays 7 * n + d for the nth weekday d of a month, with n = 6 for the last one.
 *
 * Two surprising rules of cron are kept.  Day of month and weekday must both match if one of
 * them begins with a star, else either is enough.  And a job whose minute and hour both begin
 * without one is of fixed time, which matters when clocks change.
 *
 * There are also `every 10 minutes`, counted from a fixed point, and `after 10 minutes`,
 * counted from the end of the last run.
 */

create or replace function rota._parse_schedule(schedule text)
    returns rota.parsed_schedule language plpgsql immutable as $$
declare
    v_length constant integer := char_length(schedule);
    v_words text[]; v_parsed rota.parsed_schedule;
begin
    if schedule is null then
        perform rota._refuse('schedule', 'must not be null');
    elsif v_length > 255 then
        perform rota._refuse_schedule(schedule, format('must be at most 255 characters, got %s',
            v_length));
    end if;

    v_words := rota._schedule_words(schedule);
    if v_words[1] in ('EVERY', 'AFTER') then
        return row(lower(v_words[1]), rota._parse_period(schedule, v_words), null, null, null,
            null, null, null, null, null)::rota.parsed_schedule;
    elsif cardinality(v_words) = 5 then
        v_words := array['0'] || v_words;
    elsif cardinality(v_words) <> 6 then
        perform rota._refuse_schedule(schedule, format(
            'expected five fields (minute hour day month weekday), six with seconds first, '
            '@daily and the like, "every 10 minutes" or "after 10 minutes", got words: %s',
            cardinality(v_words)));
    end if;

    v_parsed := row('cron', null, rota._parse_field(schedule, 'second', v_words[1]),
        rota._parse_field(schedule, 'minute', v_words[2]),
        rota._parse_field(schedule, 'hour', v_words[3]),
        rota._parse_field(schedule, 'day', v_words[4]),
        rota._parse_field(schedule, 'month', v_words[5]),
        rota._parse_field(schedule, 'weekday', v_words[6]),
        v_words[4] ^@ '*' or v_words[6] ^@ '*',
        not (v_words[2] ^@ '*' or v_words[3] ^@ '*'))::rota.parsed_schedule;
    if rota._next_day(v_parsed, '2000-01-01') is null then
        perform rota._refuse_schedule(schedule, 'names a day that none of its months has');
    end if;
    return v_parsed;
end $$;

create or replace function rota._refuse_schedule(schedule text, problem text)
    returns void language plpgsql immutable as $$
begin
    raise exception using errcode = 'RT006',
        message = format('schedule %L: %s',
            case when octet_length(schedule) <= 255 then schedule
                else rota._cut(schedule, 80) || '...' end,
            problem),
        hint = 'Such as 0 2 * * * (each day at 02:00), */5 * * * *, 0 9 * * MON-FRI, @daily, '
            'every 90 seconds, after 10 minutes.';
end $$;

/* In capitals, for names may be written either way; @daily and the like written out. */
create or replace function rota._schedule_words(schedule text)
    returns text[] language plpgsql immutable as $$
declare
    c_space constant text := E' \t\n\r\f\x0b';
    v_text constant text := upper(btrim(schedule, c_space) collate "C");
begin
    return regexp_split_to_array(
        case
            when v_text in ('@YEARLY', '@ANNUALLY') then '0 0 1 1 *'
            when v_text = '@MONTHLY' then '0 0 1 * *'
            when v_text = '@WEEKLY' then '0 0 * * 0'
            when v_text in ('@DAILY', '@MIDNIGHT') then '0 0 * * *'
            when v_text = '@HOURLY' then '0 * * * *'
            else v_text
        end,
        '[' || c_space || ']+');
end $$;

create or replace function rota._parse_period(schedule text, words text[])
    returns interval language plpgsql immutable as $$
declare
    v_match constant text[] := regexp_match(array_to_string(words[2:], ' '),
        '^(?:0*([1-9][0-9]{0,9}) )?(SECOND|MINUTE|HOUR|DAY|WEEK)S?$');
    v_seconds constant numeric := coalesce(v_match[1], '1')::numeric
        * extract(epoch from ('1 ' || v_match[2])::interval);
begin
    if v_seconds is null or v_seconds > 3155760000 then
        perform rota._refuse_schedule(schedule, format(
            '%L must be a whole number of seconds, minutes, hours, days (of 24 hours) or '
            'weeks, at most 100 years', lower(array_to_string(words[2:], ' ') collate "C")));
    end if;
    return make_interval(secs => v_seconds::float8);
end $$;

create or replace function rota._parse_field(schedule text, field text, value text)
    returns bigint language plpgsql immutable as $$
declare
    v_term text; v_bits bigint;
    v_set bigint := 0::bigint;
begin
    foreach v_term in array string_to_array(value, ',') loop
        v_bits := case
            when field = 'day' and v_term = 'L' then 1::bigint << 32
            when field = 'day' and v_term = 'LW' then 1::bigint << 33
            when field = 'weekday' and v_term ~ '[#L]' then rota._parse_nth_weekday(v_term)
            else rota._parse_range(field, v_term)
        end;
        if v_bits is null then
            perform rota._refuse_schedule(schedule, format(
                '%s %L is not *, %s, a range such as 1-5, a step such as */2 or 1-5/2, '
                'or a list of these with commas', field, v_term, case
                    when field in ('second', 'minute') then '0 to 59'
                    when field = 'hour' then '0 to 23'
                    when field = 'day' then '1 to 31, L or LW'
                    when field = 'month' then '1 to 12, JAN to DEC'
                    else '0 to 7, SUN to SAT, 5L or MON#2'
                end));
        end if;
        v_set := v_set | v_bits;
    end loop;
    return v_set;
end $$;

-- A star, 5, 1-5, a step of a star or a range, or 5/15, which is 5-59/15; null if it is none.
create or replace function rota._parse_range(field text, term text)
    returns bigint language plpgsql immutable as $$
declare
    v_parts constant text[] := regexp_match(term,
        '^(?:([*])|([0-9A-Z]+)(?:-([0-9A-Z]+))?)(?:/([0-9]+))?$');
    v_low constant integer := (field in ('day', 'month'))::integer;
    v_high constant integer := case field
        when 'hour' then 23 when 'day' then 31 when 'month' then 12 when 'weekday' then 7
        else 59
    end;
    v_step constant integer := nullif(left(ltrim(v_parts[4], '0'), 4), '')::integer;
    v_from integer := v_low;
    v_to integer := v_high;
    v_set bigint := 0::bigint;
begin
    if v_parts is null or (v_parts[4] is not null and v_step is null) then
        return null;
    elsif v_parts[1] is null then
        v_from := rota._parse_value(field, v_parts[2]);
        if v_parts[3] is not null then
            v_to := rota._parse_value(field, v_parts[3]);
        elsif v_parts[4] is null then
            v_to := v_from;
        end if;
    end if;
    if (v_low <= v_from and v_from <= v_to and v_to <= v_high) is not true then
        return null;
    end if;

    for v_value in v_from..v_to by coalesce(v_step, 1) loop
        v_set := v_set | (1::bigint << v_value);
    end loop;
    -- Sunday has two numbers.
    if field = 'weekday' then v_set := (v_set | (v_set >> 7)) & 127; end if;
    return v_set;
end $$;

/* The number of a number or name, null if it is none; it may lie outside of the field. */
create or replace function rota._parse_value(field text, value text)
    returns integer language plpgsql immutable as $$
begin
    return case
        when value ~ '^0*[0-9]{1,2}$' then right(value, 2)::integer
        when field = 'month'
        then array_position('{JAN,FEB,MAR,APR,MAY,JUN,JUL,AUG,SEP,OCT,NOV,DEC}', value)
        when field = 'weekday' then array_position('{SUN,MON,TUE,WED,THU,FRI,SAT}', value) - 1
    end;
end $$;

/* `MON#2`, `1#2`, or `5L`, the last Friday; null if it is none. */
create or replace function rota._parse_nth_weekday(term text)
    returns bigint language plpgsql immutable as $$
declare
    v_parts constant text[] := regexp_match(term, '^(?:([0-9]+)L|([0-9]+|[A-Z]+)#0*([1-5]))$');
    v_weekday constant integer := rota._parse_value('weekday',
        coalesce(v_parts[1], v_parts[2]));
begin
    return case when v_weekday <= 7 then 1::bigint << 7 * coalesce(v_parts[3], '6')::integer
        + v_weekday % 7 end;
end $$;
