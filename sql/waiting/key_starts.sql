/*
 * waiting/key_starts.sql -- where the search for the live jobs of an ordering key begins.
 *
 * While a session holds an old snapshot (a report, a dump, a forgotten transaction) the index
 * entries of all jobs that have ended stay in front of the live ones.  A session that has
 * walked many of them writes to key_starts which job was the first behind them, and the next
 * search of any session begins there.  A key without a row is searched from its first entry.
 *
 * The newest row of a key counts, and is one of two.  A session writes a higher id than before
 * under the lock of the key, and only if it has searched from the row that still counts.  Any
 * session may write a 0, from which all is searched again, without a lock: all such say the
 * same.
 *
 * No head is missed: a transaction that makes a head below the start of its key, of a job that
 * came late or back, writes a 0 as well, so each session that sees the head sees the 0.  None
 * writes a higher id meanwhile: sessions that make heads do so, one after the other.
 *
 * No blocked job is missed: one that comes back below the start writes a 0 as well.  One that
 * does not see that it is below is of a transaction that was late, and has left a check.
 * Maintenance searches below the start, and writes a 0 if it finds one.  It does so under the
 * lock of the key, and when no end is under way, so that all who write higher ids later have
 * seen the job.  A transaction that is late by less than a second need not wait for that: rows
 * that are younger are not used for blocked jobs.
 */

/* From which id on the head of a key is looked for, or was so long ago; 0 for most keys. */
create or replace function rota._key_start(ordering_key text, ago interval default '0')
    returns bigint language plpgsql stable as $$
begin
    return coalesce((
        select s.first_id from rota.key_starts as s
        where s.ordering_key = _key_start.ordering_key
          and (_key_start.ago = '0' or s.written_at <= rota.now() - _key_start.ago)
        order by s.ordering_key desc, s.id desc limit 1
    ), 0);
end $$;

/* From which id on blocked jobs of a key are looked for, if heads are from this one on. */
create or replace function rota._settled_start(ordering_key text, start bigint)
    returns bigint language plpgsql stable as $$
begin
    return case when start > 0 then least(start, rota._key_start(ordering_key, '1 second'))
        else start end;
end $$;

/* The blocked job of a key with the lowest id, looked for from this one on. */
create or replace function rota._first_blocked(ordering_key text, first_id bigint)
    returns bigint language plpgsql stable as $$
begin
    return (
        -- By a range of one key, so that no planner walks the primary key.
        select j.id from rota.jobs as j
        where (j.ordering_key, j.id) >= (_first_blocked.ordering_key, _first_blocked.first_id)
          and j.ordering_key <= _first_blocked.ordering_key and j.status = 'blocked'
        order by j.ordering_key, j.id limit 1
    );
end $$;

/* Write that a key has no live job with a lower id than this, after a search that began at the
 * start that was told; not if that has changed or is young.  The caller has locked the key. */
create or replace function rota._raise_start(
    ordering_key text, first_id bigint, searched_from bigint
) returns void language plpgsql as $$
begin
    if first_id > searched_from
      and rota._settled_start(ordering_key, searched_from) = searched_from
      and rota._key_start(ordering_key) = searched_from then
        insert into rota.key_starts (ordering_key, first_id)
        values (_raise_start.ordering_key, _raise_start.first_id);
    end if;
end $$;

/* Let all search a key from its first entry again, as soon as this is committed. */
create or replace function rota._reset_start(ordering_key text)
    returns void language plpgsql as $$
begin
    insert into rota.key_starts (ordering_key, first_id)
    values (_reset_start.ordering_key, 0);
end $$;

/* Whether a key has no blocked job below its start.  If it has one, a 0 is written, and false
 * is returned as where that is not to be known now: the key is to be looked at again.  A search
 * takes longer the more have ended, and is so rare that all take a twentieth of the time. */
create or replace function rota._has_none_below_start(ordering_key text)
    returns boolean language plpgsql as $$
declare
    c_scan constant rota.scan := rota._begin_scan('late ' || ordering_key,
        'rota.jobs_ordering_key_idx', '1 minute');
    v_start constant bigint := rota._key_start(ordering_key);
    v_job_id bigint;
begin
    if v_start = 0 then return true; end if;
    if c_scan.start is not null then return false; end if;
    v_job_id := rota._first_blocked(ordering_key, 0);
    perform rota._end_scan(c_scan, v_start);
    if coalesce(v_job_id >= v_start, true) then return true; end if;
    if rota._try_lock_key(ordering_key, 1000) then
        perform rota._reset_start(ordering_key);
    end if;
    return false;
end $$;

/* Delete up to so many old rows of key_starts, under the locks of their keys: of each key the
 * oldest, up to one, so that the newest that stays is the one that counts. */
create or replace function rota._purge_key_starts(max_rows integer)
    returns integer language plpgsql as $$
declare
    v_key text; v_last_id bigint; v_rows integer;
    v_deleted integer := 0;
begin
    for v_key, v_last_id in
        select o.ordering_key, max(o.id)
        from (
            select s.ordering_key, s.id from rota.key_starts as s
            where s.written_at < rota.now() - interval '1 hour'
            order by s.written_at limit _purge_key_starts.max_rows
        ) as o
        group by o.ordering_key
    loop
        continue when not rota._try_lock_key(v_key, 1000);
        delete from rota.key_starts as s where s.ordering_key = v_key and s.id <= v_last_id;
        get diagnostics v_rows = row_count;
        v_deleted := v_deleted + v_rows;
    end loop;
    return v_deleted;
end $$;

/* Try to lock a key until the end of this transaction; never waits.  A transaction takes no
 * more of them than the server keeps room for, and leaves the other keys to checks.  False too
 * where no statement can see what was committed before the lock. */
create or replace function rota._try_lock_key(ordering_key text, max_locks integer)
    returns boolean language plpgsql as $$
declare
    c_held constant text := current_setting('rota.locked_keys', true);
    c_count constant integer := coalesce(substring(c_held from '^[0-9]{1,6}$'), '0')::integer;
begin
    if c_count >= max_locks or current_setting('transaction_isolation') <> 'read committed'
      or not rota._try_lock('rota.order ' || ordering_key) then
        return false;
    end if;
    perform set_config('rota.locked_keys', (c_count + 1)::text, true);
    return true;
end $$;
