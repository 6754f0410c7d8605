/*
 * base/ids.sql -- ids of jobs that are given once, in many databases and after a promotion or a
 * restore.
 *
 * The lower ten bits of an id are the number of the database that gave it, where that has one:
 * its sequence then goes in steps of 1024.  So ids of many databases never collide, and each
 * shows where its job was enqueued.  The sequence alone keeps the number.
 *
 * A promoted standby, or a database that was restored from a dump, may lack the last ids that
 * were given to jobs that workers or callers know.  So on a new timeline, or in a new copy,
 * the sequence skips more ids than can have been lost before it gives the first one.  A
 * session stays on one timeline from its first write on, so each checks once for each sequence.
 * A copy of the disk, or of a template database, cannot be told from its original.
 *
 * A sequence keeps the timeline of the last skip, since no rollback undoes that, and the skip
 * releases its lock at once: the first session after a promotion may leave its transaction
 * open, and delays no other one.
 *
 * A number, and a queue that has come here, need a lock that producers wait for.  Both wait for
 * it in turns of 100 ms, between which producers continue.  An operator that has it and forgets
 * to commit holds up the producers for a second: then the server ends the session.
 */

create or replace function rota.set_database_number(number integer)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_number('number', number, 0, 1023);
    if number = rota.database_number() then return; end if;
    perform rota._raise_ids(0, number);
end $$;

comment on function rota.set_database_number is
    'Give this database its own number, 0 to 1023, which becomes the lower ten bits of each '
    'new id, after waiting at most 5 seconds for open transactions that have enqueued; '
    'producers wait for the commit, and a transaction that is then idle for a second is ended; '
    'raises 22023, 55P03.';

/* Let all ids from now on be above that one, of whatever database it is, and have that number
 * of a database, which is kept as where the sequence starts. */
create or replace function rota._raise_ids(above_id bigint, number integer default null)
    returns void language plpgsql set lock_timeout = '100ms' as $$
declare
    c_attempts constant integer := 25;
    v_first bigint;
begin
    for v_attempt in 1..c_attempts loop
        begin
            -- Its lock waits for those that have drawn an id, and lets no other draw.
            alter sequence rota.jobs_id_seq increment by 1024;
            exit;
        exception when lock_not_available then
            if v_attempt = c_attempts then
                raise exception using errcode = 'lock_not_available',
                    message = 'a transaction that has enqueued jobs stays open',
                    hint = concat('End it, and try again', ': ' || (
                        select string_agg(coalesce(
                            'rollback prepared ' || quote_literal(p.gid) || ';',
                            format('select pg_terminate_backend(%s);', l.pid)), ' ')
                        from pg_locks as l
                        join pg_database as d on d.oid = l.database
                          and d.datname = current_database()
                        left join pg_locks as x on l.pid is null and x.pid is null
                          and x.virtualtransaction = l.virtualtransaction
                        left join pg_prepared_xacts as p on p.transaction = x.transactionid
                        where l.relation = 'rota.jobs_id_seq'::regclass and l.granted
                          and num_nonnulls(l.pid, p.gid) > 0
                    ));
            end if;
            perform pg_sleep(0.1);
        end;
    end loop;
    perform set_config('idle_in_transaction_session_timeout', '1s', true);
    select (greatest(s.last_value, _raise_ids.above_id) / 1024 + 1) * 1024
        + coalesce(_raise_ids.number, rota.database_number()) into v_first
    from rota.jobs_id_seq as s;
    execute format('alter sequence rota.jobs_id_seq start with %1$s restart with %1$s',
        v_first);
end $$;

create or replace function rota.database_number()
    returns integer language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp as $$
begin
    return (
        select (s.seqstart & 1023)::integer from pg_sequence as s
        where s.seqrelid = 'rota.jobs_id_seq'::regclass and s.seqincrement = 1024
    );
end $$;

comment on function rota.database_number is 'The number of this database, null if it has none.';

create or replace function rota.database_number_of(job_id bigint)
    returns integer language plpgsql immutable security definer
    set search_path = pg_catalog, pg_temp as $$
begin return (job_id & 1023)::integer; end;
$$;

comment on function rota.database_number_of is
    'The number of the database in which a job was enqueued; meaningless for a job enqueued '
    'before its database had a number.';

/* Draw ids for new jobs, in ascending order. */
create or replace function rota._new_ids(max_ids integer)
    returns bigint[] language plpgsql as $$
begin
    perform rota._guard_ids();
    return array(select nextval('rota.jobs_id_seq') from generate_series(1, max_ids));
end $$;

/* What has to come before the first id that a session draws. */
create or replace function rota._guard_ids()
    returns void language plpgsql as $$
declare
    -- Another one where a dump was restored over this while sessions stayed.
    c_sequence constant text := 'rota.jobs_id_seq'::regclass::oid::text;
    v_timeline integer;
begin
    -- In recovery the draw itself is refused, by the error that callers know.
    if current_setting('rota.ids_guarded', true) = c_sequence or pg_is_in_recovery() then
        return;
    end if;
    v_timeline := rota._timeline();
    if (select t.last_value from rota.id_timeline as t) <> v_timeline then
        perform rota._leap(v_timeline);
    end if;
    perform set_config('rota.ids_guarded', c_sequence, false);
end $$;

/* A number that is another one after a promotion, which the name of a file of the log begins
 * with, and after a restore from a dump, which makes new tables or is on another server. */
create or replace function rota._timeline()
    returns integer language plpgsql as $$
declare
    v_server bigint;
begin
    begin
        select s.system_identifier into v_server from pg_control_system() as s;
    exception when insufficient_privilege then
        null;
    end;
    return 1 + (hashtextextended(concat_ws(' ',
        left(pg_walfile_name(pg_current_wal_insert_lsn()), 8), v_server,
        'rota.jobs_id_seq'::regclass::oid), 0) & 536870911)::integer;
end $$;

/* Leap over 2^30 ids and 2^16 for each second since the last tick that this copy knows, unless
 * another session has done it for this timeline.  So it lands above those of an earlier copy
 * of the same backup, if fewer were given per second.  The lock is that of a table of ours
 * (base/locks.sql). */
create or replace function rota._leap(timeline integer)
    returns void language plpgsql as $$
begin
    lock table rota.upgrade_log in share update exclusive mode;
    if (select t.last_value from rota.id_timeline as t) <> _leap.timeline then
        perform setval('rota.jobs_id_seq',
            s.last_value + rota._id_step() * ((1::bigint << 30) + coalesce((
                select trunc((1 << 16) * extract(epoch from greatest('0',
                    least('10 years', rota.now() - coalesce(nullif(u.done_at, '-infinity'), (
                        select i.applied_at from rota.upgrade_log as i where i.id = 0
                    ))))))::bigint
                from rota.maintenance as u where u.task = 'tick'
            ), 0)))
        from rota.jobs_id_seq as s;
        perform setval('rota.id_timeline', _leap.timeline);
    end if;
    -- Undone is the lock alone.
    raise exception using errcode = 'RTB02';
exception
    when sqlstate 'RTB02' then null;
end $$;

/* How far two ids are apart that are drawn one after the other. */
create or replace function rota._id_step()
    returns bigint language plpgsql stable as $$
begin
    return (
        select s.seqincrement from pg_sequence as s
        where s.seqrelid = 'rota.jobs_id_seq'::regclass
    );
end $$;
