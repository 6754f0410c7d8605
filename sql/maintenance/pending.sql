/*
 * maintenance/pending.sql -- do the checks that others have left (base/pending.sql).
 *
 * Only maintenance reads this table, and no claim or enqueue.  (The end of a job asks whether a
 * check of its limit is due within a second, before it leaves one more.)  A transaction leaves
 * its own checks alone, because what they are about may be just what it does not see yet.
 *
 * Nothing here waits.  Rows are locked with skip locked; a check that cannot be decided now is
 * deferred, a little longer each time; one that fails is deferred with a warning and stops no
 * other.  Some let a thousand jobs in, so a call begins with no further check of a kind after
 * 0.3 s; and of the first 20,000 it takes as many of each kind.  So no other kind waits for the
 * rest, and those that were due at a time do not wait for those that are due at once.
 *
 * Checks are due at once, and then in the order of their ids, or at a time.  That of a limit
 * which an operator has set has a negative id, and so is in front of all.  A session scans
 * both from where its last scan found the first one (base/scan_start.sql).  A check that was
 * written at a time that is still to come was deferred before the clock stepped back, and is
 * due; but not that of a pause, which ends at a time and not after one.
 */

/* Do up to twice so many due checks, each of them short; returns how many were looked at. */
create or replace function rota._do_checks(max_checks integer)
    returns integer language plpgsql set lock_timeout = '100ms' as $$
declare
    v_seen integer := max_checks;
    v_due bigint[]; v_ids bigint[]; v_until timestamptz; v_check rota.pending_checks;
begin
    loop
        v_due := rota._due_checks(v_seen);
        v_ids := array(
            select c.id from rota.pending_checks as c where c.id = any(v_due)
            limit 2 * _do_checks.max_checks for update skip locked
        );
        -- A tick that is not committed may hold the first ones for long.
        exit when cardinality(v_ids) >= max_checks or cardinality(v_due) < v_seen
          or v_seen >= 16 * max_checks;
        v_seen := 4 * v_seen;
    end loop;
    if v_ids = '{}' then return 0; end if;
    begin
        return rota._do_these_checks(v_ids);
    exception when others then
        v_seen := 0;
        v_until := rota.now() + interval '1 second';
        for v_check in select c.* from rota.pending_checks as c where c.id = any(v_ids) loop
            exit when rota.now() > v_until;
            v_seen := v_seen + 1;
            begin
                perform rota._do_these_checks(array[v_check.id]);
            exception when others then
                raise warning 'check of % % failed and will be tried again: %', v_check.kind,
                    v_check.subject, sqlerrm;
                update rota.pending_checks as c
                set due_at = rota.now() + interval '10 seconds',
                    deferrals = least(c.deferrals, 1000) + 1, updated_at = rota.now()
                where c.id = v_check.id;
            end;
        end loop;
        return v_seen;
    end;
end $$;

/* Whether a call is alone in its transaction, or in a procedure that has committed since its
 * call.  What comes in several messages, as many drivers send a statement, cannot be told from
 * a transaction and is taken for one. */
create or replace function rota._is_alone()
    returns boolean language plpgsql stable as $$
begin return transaction_timestamp() >= statement_timestamp(); end;
$$;

/* Whether this transaction, which may hold what it takes for long, leaves limits, budgets,
 * breakers, schedules, counts and the locks of ordering keys to ticks that are alone in their
 * transactions: there was one lately. */
create or replace function rota._leaves_to_others(within interval default '6 minutes')
    returns boolean language plpgsql stable as $$
declare
    c_now constant timestamptz := rota.now();
begin
    return not rota._is_alone() and exists (
        select from rota.maintenance as u
        where u.task = 'tick alone' and u.done_at between c_now - within and c_now
    );
end $$;

/* The first due checks of each kind that may be done, of other transactions and perhaps of this
 * one, by its session or, if it only *asks*, by any.  A transaction that leaves limits to
 * others takes those that have been due for three seconds. */
create or replace function rota._due_checks(
    max_checks integer, with_own boolean default false, asks boolean default false
) returns bigint[] language plpgsql as $$
declare
    v_me constant xid8 := case when not with_own then pg_current_xact_id_if_assigned() end;
    v_now constant timestamptz := rota.now();
    v_left_since constant timestamptz := case
        when not asks and rota._leaves_to_others() then v_now - interval '3 seconds' end;
    v_scan rota.scan := rota._begin_scan('checks', 'rota.pending_checks_due_at_idx');
    -- Before the scan: what comes in during it stands behind it.
    c_last_id constant bigint := (select s.last_value from rota.pending_checks_id_seq as s);
    v_ids bigint[]; v_timed_ids bigint[];
begin
    -- An older snapshot does not show what is committed by now.
    if current_setting('transaction_isolation') <> 'read committed' then
        return '{}'::bigint[];
    end if;
    v_ids := array(
        select f.id
        from (
            select d.id, row_number() over (partition by d.kind order by d.id) as place
            from (
                select c.id, c.kind from rota.pending_checks as c
                where c.due_at <= '-infinity'
                  and c.id >= coalesce(v_scan.start, '-9223372036854775808')
                  and c.made_by is distinct from v_me
                  and (v_left_since is null or c.kind not in ('limit', 'slots')
                    or c.updated_at < v_left_since)
                order by c.due_at, c.id limit least(20 * _due_checks.max_checks, 20000)
            ) as d
        ) as f
        -- Many of one kind keep no other out.
        order by f.place, f.id limit _due_checks.max_checks
    );
    perform rota._end_scan(v_scan, coalesce(v_ids[1], c_last_id));
    if cardinality(v_ids) >= max_checks and max_checks < 10 then return v_ids; end if;

    v_scan := rota._begin_scan('timed', 'rota.pending_checks_due_at_idx');
    v_timed_ids := array(
        select c.id from rota.pending_checks as c
        where c.due_at > '-infinity'
          and c.due_at >= rota._from_micros(v_scan.start) and c.due_at <= v_now
          and c.made_by is distinct from v_me
          and (v_left_since is null or c.kind not in ('limit', 'slots')
            or c.due_at < v_left_since)
        order by c.due_at, c.id limit greatest(
            _due_checks.max_checks / 10, _due_checks.max_checks - cardinality(v_ids))
    );
    v_ids := v_ids || array(
        select c.id from rota.pending_checks as c where c.due_at > '-infinity'
          -- By the clock as it is now: others may have left some since this call began.
          and c.updated_at > rota.now() and c.made_by is distinct from v_me
          and (c.kind <> 'pause' or c.deferrals > 0)
          and (v_left_since is null or c.kind not in ('limit', 'slots'))
        limit 100
    );
    perform rota._end_scan(v_scan, rota._micros(coalesce(
        (select c.due_at from rota.pending_checks as c where c.id = v_timed_ids[1]), v_now))
        - 10000);
    return v_ids || v_timed_ids;
end $$;

/* Do checks that this transaction has locked, and return of how many that was their turn; those
 * of one subject are one. */
create or replace function rota._do_these_checks(check_ids bigint[])
    returns integer language plpgsql as $$
declare
    v_kind text; v_until timestamptz; v_check record;
    v_done bigint[] := '{}'::bigint[];
    v_deferred bigint[] := '{}'::bigint[];
begin
    for v_check in
        select c.kind, c.subject, array_agg(c.id order by c.deferrals, c.id) as ids
        from rota.pending_checks as c
        where c.id = any(_do_these_checks.check_ids) group by c.kind, c.subject
        -- One that has left another check of itself comes after those that were left.
        order by c.kind, min(c.id)
    loop
        if v_check.kind is distinct from v_kind then
            v_kind := v_check.kind;
            v_until := rota.now() + interval '300 milliseconds';
        end if;
        continue when rota.now() > v_until;
        if rota._do_check(v_check.kind, v_check.subject) then
            v_done := v_done || v_check.ids;
        else
            -- One of a subject is enough, however many come while it cannot be decided.
            v_deferred := v_deferred || v_check.ids[1];
            v_done := v_done || v_check.ids[2:];
        end if;
    end loop;

    delete from rota.pending_checks as c where c.id = any(v_done);
    -- As long again as it has waited, so that what takes long is asked rarely.
    update rota.pending_checks as c
    set due_at = rota.now() + interval '50 milliseconds' * power(2, least(c.deferrals, 7)),
        deferrals = c.deferrals + 1, updated_at = rota.now(),
        -- One that is restored may be of a server that had come further.
        made_by = case when c.deferrals = 0 then pg_current_xact_id()
            else least(c.made_by, pg_current_xact_id()) end
    where c.id = any(v_deferred);
    return cardinality(v_done) + cardinality(v_deferred);
end $$;

/* Look at one subject; false if it cannot be decided now. */
create or replace function rota._do_check(kind text, subject text)
    returns boolean language plpgsql as $$
begin
    case kind
        when 'limit' then return rota._check_limit(subject, false);
        when 'slots' then return rota._check_limit(subject, true);
        when 'class' then return rota._check_class(subject);
        when 'order' then
            -- Then also below the start, for what came before the head was seen.
            return case when rota._check_order(subject)
                then rota._has_none_below_start(subject) else false end;
        when 'queue' then return rota._check_queue(subject);
        when 'pause' then return rota._check_pause(subject);
        when 'error' then return rota._check_error(subject);
        when 'job' then return rota._check_job(subject);
        when 'parent' then return rota._check_parent(subject);
        when 'retry' then return rota._check_retry(subject);
        when 'schedule' then return rota._check_schedule(subject);
        when 'rerun' then return rota._check_reruns(subject::bigint);
        else raise exception 'no such kind of check: %', kind;
    end case;
end $$;
