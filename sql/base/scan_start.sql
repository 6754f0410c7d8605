/*
 * base/scan_start.sql -- begin a scan where the last one found something.
 *
 * While somebody holds an old snapshot (a report, a dump, a forgotten transaction) vacuum
 * cannot remove what is done, and the dead index entries of all rows that went by stay in front
 * of the first live one.  So a session remembers where that was, and the next scan begins
 * there.  A row before that place, whose transaction committed late or that somebody moved, is
 * found by a full scan; those take at most a twentieth of the time.  Nothing but speed rests on
 * what is remembered: it may be lost, wrong, or another's, as behind a pooler.
 *
 * The first word of a name says what is scanned and has sixteen settings of its own, so that
 * one kind of scan never drives out the memory of another.
 */

/* What was remembered under this name; null if nothing was. */
create or replace function rota._scan_start(name text)
    returns text language plpgsql stable as $$
declare
    v_text constant text := current_setting(rota._scan_setting(_scan_start.name), true);
    v_length constant integer := strpos(v_text, '#');
begin
    if v_length > 0
      and left(v_text, v_length - 1) = hashtext(substr(v_text, v_length + 1) || name)::text then
        return substr(v_text, v_length + 1);
    end if;
    return null;
end;
$$;

/* A hash over name and start goes with it, so that what is another's is not taken for ours. */
create or replace function rota._keep_scan_start(name text, start text)
    returns void language plpgsql as $$
begin
    perform set_config(
        rota._scan_setting(_keep_scan_start.name),
        format('%s#%s', hashtext(_keep_scan_start.start || _keep_scan_start.name),
            _keep_scan_start.start),
        false);
end;
$$;

create or replace function rota._scan_setting(name text)
    returns text language sql immutable as $$
    select 'rota.scan_' || split_part(name, ' ', 1) || '_' || (hashtext(name) & 15);
$$;

/*
 * When the next full scan is due, in microseconds, after one that began at that time: later the
 * longer it took, so that they take a twentieth of the time, but never later than after 2 s.
 */
create or replace function rota._next_full_scan(began_at timestamptz)
    returns bigint language plpgsql stable as $$
declare
    v_cost constant numeric := extract(epoch from rota.now() - began_at);
begin
    return ((extract(epoch from began_at) + least(21 * v_cost, 2)) * 1000000)::bigint;
end;
$$;

/* Whether that time has come; one too far ahead is of a clock that went back. */
create or replace function rota._is_full_scan_due(full_scan_at bigint)
    returns boolean language plpgsql stable as $$
declare
    v_now constant bigint := (extract(epoch from rota.now()) * 1000000)::bigint;
begin
    return (full_scan_at > v_now and full_scan_at <= v_now + 60000000) is not true;
end;
$$;
