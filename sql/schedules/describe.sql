/*
 * schedules/describe.sql -- a schedule in words.
 *
 * The words are made from the sets of numbers and not from the text, so that all spellings of
 * a schedule read the same, and what reads the same has the same times.  The times of a day
 * are looked at together: if they are evenly spaced, their distance says more than a list.
 */

create or replace function rota.describe_schedule(schedule text)
    returns text language plpgsql immutable security definer
    set search_path = pg_catalog, pg_temp as $$
declare
    v_parsed constant rota.parsed_schedule := rota._parse_schedule(schedule);
    v_times text;
begin
    if v_parsed.kind = 'every' then
        return 'every ' || rota._describe_period(extract(epoch from v_parsed.period)::bigint)
            || ', counted from its start';
    elsif v_parsed.kind = 'after' then
        return regexp_replace(
            rota._describe_period(extract(epoch from v_parsed.period)::bigint), '^(?=[a-z])',
            '1 ') || ' after the last run has ended';
    end if;

    v_times := rota._describe_times(rota._bits(v_parsed.hours), rota._bits(v_parsed.minutes),
        rota._bits(v_parsed.seconds));
    return v_times || rota._describe_days(v_parsed, v_times);
end $$;

comment on function rota.describe_schedule is
    'Describe in English what a schedule text means; raises RT006, 22023.';

/* 5 minutes, or just minute where there is one. */
create or replace function rota._describe_period(seconds bigint)
    returns text language sql immutable as $$
    select case when seconds = u.length then u.name
        else concat(seconds / u.length, ' ', u.name, 's', u.note) end
    from (values (86400, 'day', ' of 24 hours'), (3600, 'hour', ''), (60, 'minute', ''),
        (1, 'second', '')) as u (length, name, note)
    -- One day is 24 hours.
    where seconds % u.length = 0 and (seconds > 86400 or u.length < 86400)
    order by u.length desc limit 1;
$$;

/* Evenly spaced: every 5 minutes from 09:00 to 17:55; few: at 09:00 and 17:30; else numbers. */
create or replace function rota._describe_times(
    hours integer[], minutes integer[], seconds integer[]
) returns text language plpgsql immutable as $$
declare
    v_format constant text := case seconds when '{0}' then 'HH24:MI' else 'HH24:MI:SS' end;
    v_starts constant integer[] := array(
        select 3600 * h + 60 * m
        from unnest(_describe_times.hours) as h, unnest(_describe_times.minutes) as m
        order by 1);
    v_count constant integer := cardinality(v_starts) * cardinality(seconds);
    v_first constant integer := v_starts[1] + seconds[1];
    v_last constant integer := v_starts[cardinality(v_starts)] + seconds[cardinality(seconds)];
    v_step constant integer := case
        when cardinality(seconds) = 1 then rota._step(v_starts)
        when cardinality(v_starts) = 1 or rota._step(v_starts) = 60 then rota._step(seconds)
    end;
begin
    if v_count > 3 and v_last - v_first = v_step * (v_count - 1) then
        if v_last + v_step - 86400 <> v_first then
            null;
        elsif v_first = 0 then
            return 'every ' || rota._describe_period(v_step);
        elsif v_step = 60 then
            return format('at second %s of every minute', v_first);
        elsif v_step = 3600 and v_first % 60 = 0 then
            return format('at minute %s of every hour', v_first / 60);
        end if;
        return format('every %s from %s to %s', rota._describe_period(v_step),
            to_char(make_interval(secs => v_first), v_format),
            to_char(make_interval(secs => v_last), v_format));
    elsif v_count <= 6 then
        return 'at ' || rota._describe_list(array(
            select to_char(make_interval(secs => t + s), v_format)
            from unnest(v_starts) as t, unnest(_describe_times.seconds) as s
            order by 1), 'and');
    end if;
    return rota._describe_numbers(hours, minutes, seconds);
end $$;

/* Such as every 15 minutes of the hours 9, 12 and 15. */
create or replace function rota._describe_numbers(
    hours integer[], minutes integer[], seconds integer[]
) returns text language plpgsql immutable as $$
declare
    v_each_minute constant boolean := cardinality(minutes) = 60;
    v_each_hour constant boolean := cardinality(hours) = 24;
    v_minutes constant text := case when v_each_minute then 'every minute'
        else rota._describe_values('minute', minutes) end;
begin
    return case when seconds = '{0}'
        then coalesce(rota._describe_share('minute', minutes), 'at ' || v_minutes)
        else coalesce(rota._describe_share('second', seconds),
            'at ' || rota._describe_values('second', seconds)) || ' of ' || v_minutes
    end || case
        when not v_each_hour then ' of the ' || rota._describe_values('hour', hours)
        when not v_each_minute then ' of every hour'
        else ''
    end;
end $$;

/* The same share of each whole, from its beginning: every minute, every 15 minutes. */
create or replace function rota._describe_share(unit text, numbers integer[])
    returns text language sql immutable as $$
    select 'every ' || case s.step when 1 then unit else format('%s %ss', s.step, unit) end
    from (select rota._step(numbers) as step) as s
    where numbers[1] = 0 and s.step * cardinality(numbers) = 60;
$$;

create or replace function rota._describe_values(unit text, numbers integer[])
    returns text language sql immutable as $$
    select unit
        || case cardinality(numbers) when 1 then ' ' else 's ' end
        || rota._describe_list(rota._describe_runs(numbers, null), 'and');
$$;

/* With a space in front; nothing if it is every day and *times* say so. */
create or replace function rota._describe_days(parsed rota.parsed_schedule, times text)
    returns text language plpgsql immutable as $$
declare
    c_months constant text[] := '{January,February,March,April,May,June,July,August,'
        'September,October,November,December}'::text[];
    c_days constant bigint := 4294967294;  -- 1 to 31
    v_months constant integer[] := rota._bits(parsed.months);
    v_in constant text := rota._describe_list(rota._describe_runs(v_months, c_months), 'and');
    v_of constant text := ' of ' || case cardinality(v_months)
        when 1 then v_in else 'the month' end;
    v_is_any_day constant boolean := parsed.days & c_days = c_days;
    v_is_any_weekday constant boolean := parsed.weekdays & 127 = 127;
    v_days text;
begin
    if v_is_any_day and v_is_any_weekday
      or not parsed.is_both and (v_is_any_day or v_is_any_weekday) then
        v_days := case when times ~ ':|the hour' then ' every day' else '' end;
    elsif v_is_any_day then
        v_days := ' ' || rota._describe_weekdays(parsed.weekdays, case
            when parsed.weekdays & 127 = 0 then v_of else ' of the month' end);
    elsif v_is_any_weekday and parsed.days & ~c_days = 0 and cardinality(v_months) = 1 then
        return format(' on %s %s', rota._describe_list(
            rota._describe_runs(rota._bits(parsed.days), null), 'and'), v_in);
    elsif v_is_any_weekday then
        v_days := ' ' || rota._describe_month_days(parsed.days, 'on ', 'and') || v_of;
    elsif parsed.is_both then
        v_days := format(' %s, if it is %s of the month',
            rota._describe_weekdays(parsed.weekdays, ' of the month'),
            rota._describe_month_days(parsed.days, '', 'or'));
    else
        v_days := format(' %s of the month or %s',
            rota._describe_month_days(parsed.days, 'on ', 'and'),
            rota._describe_weekdays(parsed.weekdays, ' of the month'));
    end if;

    return v_days || case
        when cardinality(v_months) = 12 then ''
        when cardinality(v_months) = 1 and right(v_days, length(v_of)) = v_of then ''
        when v_days like '% of the month%' then ', in ' || v_in
        else ' in ' || v_in
    end;
end $$;

/* On days 1 and 15 and on the last day; or without the prefix, day 1, 15 or the last day. */
create or replace function rota._describe_month_days(days bigint, prefix text, conjunction text)
    returns text language sql immutable as $$
    select array_to_string(array[
        prefix || case when conjunction = 'and' and cardinality(d.each) > 1
            then 'days ' else 'day ' end
            || rota._describe_list(rota._describe_runs(d.each, null), conjunction),
        prefix || case days >> 32 & 1 when 1 then 'the last day' end,
        prefix || case days >> 33 & 1 when 1 then 'the last working day (Monday to Friday)' end
    ], format(' %s ', conjunction))
    from (select rota._bits(days & 4294967294) as each) as d;
$$;

/* On Monday to Friday and on the last Sunday of the month. */
create or replace function rota._describe_weekdays(weekdays bigint, of_month text)
    returns text language plpgsql immutable as $$
declare
    c_names constant text[] := '{Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,'
        'Sunday}'::text[];
    c_nths constant text[] := '{first,second,third,fourth,fifth,last}'::text[];
begin
    return array_to_string(array[
        'on ' || rota._describe_list(rota._describe_runs(array(
            select d from generate_series(1, 7) as d
            where _describe_weekdays.weekdays >> d % 7 & 1 = 1), c_names), 'and'),
        'on ' || rota._describe_list(array(
            select format('the %s %s', rota._describe_list(n.nths, 'and'), c_names[d])
            from generate_series(1, 7) as d
            cross join lateral (
                select array_agg(c_nths[n] order by n) as nths from generate_series(1, 6) as n
                where _describe_weekdays.weekdays >> 7 * n + d % 7 & 1 = 1
            ) as n
            where _describe_weekdays.weekdays >> d % 7 & 1 = 0 and n.nths is not null
        ), 'and') || of_month
    ], ' and ');
end $$;

/* Ascending numbers as items, three and more that follow each other as one: 1 to 5. */
create or replace function rota._describe_runs(numbers integer[], names text[])
    returns text[] language sql immutable as $$
    select array_agg(coalesce(names[i.low], i.low::text) || case when i.high > i.low
        then ' to ' || coalesce(names[i.high], i.high::text) else '' end order by i.low)
    from (
        select min(r.number) as low, max(r.number) as high
        from (
            select n.*, count(*) over (partition by n.run) as length
            from (
                select u as number, u - row_number() over (order by u) as run
                from unnest(numbers) as u
            ) as n
        ) as r
        group by r.run, case when r.length < 3 then r.number end
    ) as i;
$$;

/* Null if it is empty. */
create or replace function rota._describe_list(items text[], conjunction text)
    returns text language sql immutable as $$
    select coalesce(array_to_string(nullif(items[:cardinality(items) - 1], '{}'), ', ')
        || format(' %s ', conjunction), '') || items[cardinality(items)];
$$;

create or replace function rota._bits(bits bigint)
    returns integer[] language sql immutable as $$
    select array(
        select n from generate_series(0, 62) as n where _bits.bits >> n & 1 = 1 order by n);
$$;

/* The distance of evenly spaced numbers; null if there is one number, or none such. */
create or replace function rota._step(numbers integer[])
    returns integer language sql immutable as $$
    select numbers[2] - numbers[1]
    where numbers = array(select generate_series(numbers[1], numbers[cardinality(numbers)],
        numbers[2] - numbers[1]));
$$;
