/*
 * base/scan_start.sql -- begin a scan where the last one found something.
 *
 * While a session holds an old snapshot (a report, a dump, a forgotten transaction) vacuum
 * cannot remove dead rows, and the dead index entries of all past rows stay in front of the
 * first live one.  So a session remembers where that was, and the next scan begins there.  A
 * full scan, from the start of the index, finds a row before that place, whose transaction
 * committed late or that was moved by hand: after 2 seconds at the latest, and so that full
 * scans take at most a twentieth of the time.  That is reckoned by the index entries that a
 * scan walked, since a clock continues while a busy machine does something else.  Only speed
 * depends on what is remembered: it may be lost, wrong, or another session's, as behind a
 * pooler.
 *
 * The first word of a name says what is scanned and has sixteen settings of its own, so that
 * one kind of scan never drives out the memory of another.
 */

/* What was remembered under this name; null if nothing was.  The planner puts the body into the
 * expression of the caller, which takes half the time of a call. */
create or replace function rota._scan_start(name text)
    returns text language sql stable as $$
    select case
        when split_part(current_setting(rota._scan_setting(name), true), '#', 2)
            = hashtext(split_part(current_setting(rota._scan_setting(name), true), '#', 1)
                || name)::text
            then split_part(current_setting(rota._scan_setting(name), true), '#', 1)
    end;
$$;

/* A hash over start and name goes with it, so that what is another's is not taken for ours. */
create or replace function rota._keep_scan_start(name text, start text)
    returns void language plpgsql as $$
begin
    perform set_config(rota._scan_setting(name),
        format('%s#%s', start, hashtext(start || name)), false);
end $$;

-- The cast makes the body immutable: else it is not inlined, and planned again in each call.
create or replace function rota._scan_setting(name text)
    returns text language sql immutable as $$
    select 'rota.scan_' || split_part(name, ' ', 1) || '_' || (hashtext(name) & 15)::text;
$$;

/* Whether the time of the next full scan, in microseconds, has come; one too far ahead is of a
 * clock that went back. */
create or replace function rota._is_full_scan_due(
    full_scan_at bigint, moment timestamptz, max_pause interval default '3 seconds'
) returns boolean language sql stable as $$
    select (full_scan_at > extract(epoch from moment) * 1000000
        and full_scan_at <= extract(epoch from moment + max_pause) * 1000000) is not true
$$;

/* A time as the number that a scan remembers; null is the first time of all, and stands for one
 * that only a hand has written, such as -infinity, too. */
create or replace function rota._micros(moment timestamptz)
    returns bigint language sql stable as $$
select case when moment between 'epoch' and '9999-12-31'
    then (extract(epoch from moment) * 1000000)::bigint end
$$;

create or replace function rota._from_micros(micros bigint)
    returns timestamptz language sql stable as $$
select coalesce('epoch'::timestamptz + micros * interval '1 microsecond', '-infinity')
$$;

/* Begin a scan that remembers a number beside the time of its next full scan: an id, a version,
 * a time by _micros().  Its start is null, and it is a full one, if that time has come, or
 * nothing is remembered, or it *is_full*.  What it walks are entries of the index, or without
 * one microseconds. */
create or replace function rota._begin_scan(
    name text, index regclass default null, max_pause interval default '2 seconds',
    is_full boolean default false
) returns rota.scan language plpgsql stable as $$
declare
    c_now constant timestamptz := rota.now();
    c_start constant bigint[] := string_to_array(rota._scan_start(name), ' ')::bigint[];
begin
    return row(name, index, max_pause, c_now,
        case when not is_full and not rota._is_full_scan_due(c_start[1], c_now,
            greatest(max_pause, '3 seconds')) then c_start[2] end,
        coalesce(pg_stat_get_xact_tuples_returned(index),
            (extract(epoch from c_now) * 1000000)::bigint))::rota.scan;
end $$;

/* Remember where the next scan begins.  Where a full one walks few the next is full again. */
create or replace function rota._end_scan(
    scan rota.scan, start bigint, max_pause interval default null
) returns void language plpgsql as $$
declare
    v_start bigint[]; v_walked bigint;
begin
    if scan.start is null then
        v_walked := coalesce(pg_stat_get_xact_tuples_returned(scan.index),
            (extract(epoch from rota.now()) * 1000000)::bigint) - scan.walked;
        if v_walked < 200 then return; end if;
        -- To walk an entry takes about a microsecond.
        v_start := array[(extract(epoch from scan.begun_at) * 1000000)::bigint
            + least(20 * v_walked,
                extract(epoch from coalesce(max_pause, scan.max_pause)) * 1000000)::bigint];
    elsif scan.start = start then
        return;
    else
        v_start := string_to_array(rota._scan_start(scan.name), ' ')::bigint[];
    end if;
    v_start[2] := start;
    perform rota._keep_scan_start(scan.name, array_to_string(v_start, ' '));
end $$;
