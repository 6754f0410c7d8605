/*
 * maintenance/retention.sql -- partitions ahead, and purging behind.
 *
 * Nothing is kept for ever unless an operator asks for it.  Ended jobs and failed attempts lie
 * in partitions, of which one that lies wholly behind the longest keep of any queue is dropped.
 * All else is deleted row by row, in the order in which it expires: jobs of queues that keep
 * less, dead jobs, idempotency keys, effects, occurrences, and rows without a partition.  A job
 * that others wait for stays, as one that was cancelled and may be retried, and so does its
 * partition; and so does what is not counted yet (maintenance/statistics.sql).
 *
 * A call deletes up to 1000 rows of each kind, and begins with no further kind or queue after
 * 100 ms.  If some are left the next tick goes on at once, else retention looks every ten
 * seconds.  Kinds and queues are taken in any order, so that none starves behind another.  Each
 * scan begins where the last one of its kind ended (base/scan_start.sql); a row behind that
 * place is found an hour later at the latest.
 *
 * Making and dropping a partition locks the parent for a moment.  So that finishing jobs never
 * queue up behind that, it waits no longer than a tenth of a second, and is done only when
 * tick() is alone in its transaction.  Where no tick is ever alone, rows go to the default
 * partition; from there, and from a partition that should have been dropped a day ago, they are
 * deleted one by one.
 *
 * What cannot be deleted or dropped, as by a view of a user on one partition, stays with a
 * warning and stops nothing else.  Rows that others hold are skipped.
 */

/* How many rows of each kind were deleted, and whether there are more. */
create or replace function rota._retain(
    is_alone boolean, is_busy boolean, out deleted jsonb, out partitions_created integer,
    out partitions_dropped integer, out has_more boolean
) language plpgsql set max_parallel_workers_per_gather = 0 set enable_hashjoin = off
    set enable_mergejoin = off set lock_timeout = '100ms' as $$
declare
    c_kinds constant text[] := array[
        'jobs', 'stage_runs', 'dependencies', 'errors', 'keys', 'effects', 'occurrences',
        'limits', 'workers', 'stats', 'cron_runs', 'receipts', 'moved_jobs', 'audit',
        'key_starts', 'lane_starts'
    ];
    c_max_rows constant integer := 1000;
    v_now constant timestamptz := rota.now();
    v_is_due constant boolean := rota._record_tick(is_alone, is_busy);
    c_had_more constant boolean := exists (
        select from rota.maintenance as m where m.task = 'retention' and m.has_more);
    v_kind text; v_rows integer;
    v_did boolean := false;
begin
    deleted := (select jsonb_object_agg(k.kind, 0) from unnest(c_kinds) as k (kind));
    partitions_created := 0;
    partitions_dropped := 0;
    has_more := false;
    if not (v_is_due or c_had_more) then return; end if;

    for v_kind in select k.kind from unnest(c_kinds) as k (kind) order by random() loop
        if rota.now() - v_now > interval '100 ms' then
            -- Nothing says that more is due where only looking took so long, at many queues.
            has_more := has_more or c_had_more or v_did;
            exit;
        end if;
        -- It takes locks for which producers do not wait, and which a short transaction has.
        continue when v_kind = 'key_starts' and rota._leaves_to_others();
        begin
            v_rows := rota._purge(v_kind, c_max_rows);
            if v_rows >= c_max_rows then
                -- One more says whether there are more.
                v_rows := v_rows + rota._purge(v_kind, 1);
                has_more := has_more or v_rows > c_max_rows;
            end if;
            v_did := v_did or v_rows > 0;
        exception when others then
            raise warning 'retention of % failed, to be tried again: %', v_kind, sqlerrm;
            continue;
        end;
        deleted := deleted || jsonb_build_object(v_kind, v_rows);
    end loop;

    -- Last, because of its locks, and at a pace of its own.
    if is_alone and v_is_due then
        begin
            partitions_created := rota._create_partitions();
            partitions_dropped := rota._drop_partitions();
            v_did := v_did or greatest(partitions_created, partitions_dropped) > 0;
        exception when others then
            raise warning 'partitions failed, to be tried again: %', sqlerrm;
        end;
    end if;

    -- A row that another tick holds is left to that one.
    update rota.maintenance as m
    set done_at = case when v_did then v_now else m.done_at end, done_by = t.done_by,
        has_more = _retain.has_more
    from rota.maintenance as t
    where t.task = 'tick' and m.task = any(array(
        select r.task from rota.maintenance as r
        where r.task = 'retention' and (r.has_more <> _retain.has_more
            or v_did and r.done_at not between v_now - interval '10 seconds' and v_now)
        for update skip locked
    ));
end $$;

/* Whether a tick is to be recorded: unless one was lately.  Lately is five minutes where there
 * was nothing to do for a minute, so that an idle database is not written to.  A tick that is
 * not alone may hold the row for long, and so leaves it to others longer. */
create or replace function rota._is_tick_due(is_alone boolean, is_busy boolean)
    returns boolean language plpgsql stable as $$
declare
    v_now constant timestamptz := rota.now();
    v_is_idle constant boolean := not is_busy and not exists (
        select from rota.maintenance as u
        where u.task = 'retention' and u.done_at between v_now - interval '1 minute' and v_now
    );
    v_since constant timestamptz := v_now - case
        when v_is_idle and is_alone then interval '5 minutes'
        when v_is_idle then '5.5 minutes'
        when is_alone then '10 seconds'
        else '30 seconds'
    end;
begin
    return not exists (
        select from rota.maintenance as u
        where u.task = 'tick' and u.done_at between v_since and v_now
    );
end $$;

/* Record a tick if that is due, and return whether it was.  A row that another session holds
 * stays as it is, and the tick is due. */
create or replace function rota._record_tick(is_alone boolean, is_busy boolean)
    returns boolean language plpgsql as $$
begin
    if not rota._is_tick_due(is_alone, is_busy) then return false; end if;
    -- A leap of ids needs to know the tick before.
    perform rota._guard_ids();
    update rota.maintenance as u
    set done_at = rota.now(),
        done_by = format('%s as %s',
            -- A background worker has no name of an application, but a type.
            coalesce(nullif(current_setting('application_name'), ''), (
                select a.backend_type from pg_stat_activity as a where a.pid = pg_backend_pid()
            )),
            session_user)
    where u.task = any(array(
        select f.task from rota.maintenance as f
        where f.task = 'tick' or f.task = 'tick alone' and _record_tick.is_alone
          or f.task = 'retention' and _record_tick.is_busy
        for update skip locked
    ));
    return true;
end $$;

/* Delete up to so many rows of one kind, and return how many. */
create or replace function rota._purge(kind text, max_rows integer)
    returns integer language plpgsql as $$
declare
    v_now constant timestamptz := rota.now();
    v_rows record;
    v_deleted integer := 0;
begin
    case kind
        when 'dependencies' then return rota._purge_dependencies(max_rows);
        when 'errors' then return rota._purge_partitions('job_errors', max_rows);
        -- A record whose lease is held is still needed.
        when 'effects' then return rota._purge_rows('effects', 'expires_at', v_now, max_rows,
            'f.completed_at is not null or not rota._is_leased(f.job_id, f.lease_token)');
        -- Until the queue has settled what is known to be here may be sent again; what still
        -- waits may move on.
        when 'receipts' then return rota._purge_rows('receipts', 'received_at',
            v_now - interval '30 days', max_rows, 'not exists (select from rota.queue_moves '
                'as m where m.move_id = f.move_id and m.state <> ''settled'') and not '
                '(f.move_id > 0 and exists (select from rota.jobs as j '
                'where j.id = f.job_id))');
        when 'limits' then return rota._purge_limits(max_rows, not rota._leaves_to_others());
        when 'cron_runs' then return rota._purge_cron_runs(max_rows);
        when 'key_starts' then return rota._purge_key_starts(max_rows);
        when 'workers' then v_deleted := rota._purge_grants();
        else null;
    end case;
    for v_rows in
        select k.*
        from (
            select r.name, r.time_column, v_now - r.keep as before, case r.name
                -- Without it what that job has left open here would be of unknown outcome.
                when 'moved_jobs' then 'not exists (select from rota.effects as e '
                    'where e.job_id = f.job_id and e.completed_at is null)'
                else 'true' end as condition, null as subject
            from (values
                ('keys', 'idempotency_keys', 'expires_at', interval '0'),
                -- last_run_at stands for planned times that were dealt with.
                ('occurrences', 'occurrences', 'recorded_at', '90 days'),
                ('workers', 'workers', 'last_seen_at', '1 day'),
                ('workers', 'worker_starts', 'started_at', '90 days'),
                ('moved_jobs', 'moved_jobs', 'moved_at', '90 days'),
                ('audit', 'audit_log', 'acted_at', '1 year'),
                ('lane_starts', 'lane_starts', 'written_at', '1 hour')
            ) as r (kind, name, time_column, keep) where r.kind = _purge.kind
            union all
            -- As old as ended jobs may get in any queue of their pipeline: so of one job the
            -- oldest go first, and its latest result is the one left.
            select 'stage_runs', 'finished_at', least(v_now - max(coalesce(q.keep_finished,
                '7 days')), rota._counted_until()), 'f.pipeline = $4', p.pipeline
            from rota.pipeline_stages as p left join rota.queues as q on q.queue = p.queue
            where _purge.kind = 'stage_runs' group by p.pipeline
            union all
            -- Minutes and hours when they are added up.
            select 'job_stats', 'starts_at', least(v_now - s.keep, s.added_until),
                'f.step = $4', s.step
            from rota.stats_progress as p
            cross join lateral (
                values ('minute', interval '2 days', p.hours_until),
                    ('hour', interval '30 days', p.days_until),
                    ('day', interval '400 days', null)
            ) as s (step, keep, added_until)
            where _purge.kind = 'stats'
            union all
            select e.name, 'finished_at', e.before, e.condition, e.queue
            from rota._ended_to_purge() as e where _purge.kind = 'jobs'
        ) as k
        -- Of very many pipelines or queues each call takes others.
        order by random()
    loop
        if kind <> 'jobs' or rota._has_ended(v_rows.name, v_rows.subject, v_rows.before) then
            v_deleted := v_deleted + rota._purge_rows(v_rows.name, v_rows.time_column,
                v_rows.before, max_rows - v_deleted, v_rows.condition, v_rows.subject);
        end if;
        exit when v_deleted >= max_rows or rota.now() - v_now > interval '100 ms';
    end loop;
    if kind = 'jobs' and v_deleted < max_rows then
        return v_deleted + rota._purge_partitions('finished_jobs_done', max_rows - v_deleted);
    end if;
    return v_deleted;
end $$;

/* Delete the grants of roles that are gone: a dump has their numbers, which are those of other
 * roles where it is restored. */
create or replace function rota._purge_grants()
    returns integer language plpgsql as $$
declare
    v_roles regrole[];
begin
    with gone as (
        delete from rota.queue_grants as g
        where not exists (select from pg_roles as r where r.oid = g.role) returning g.role
    )
    select array_agg(g.role) into v_roles from gone as g;
    if v_roles is null then return 0; end if;
    delete from rota.configured_names as c where c.role = any(v_roles);
    -- Or the grants would seem to have been left out by a restore.
    delete from rota.maintenance as m
    where m.task = 'grants' and not exists (select from rota.queue_grants);
    return cardinality(v_roles);
end $$;

/* Delete the oldest rows of a table whose time is before this and for which the condition
 * holds, from where the last scan of this table and subject got to; returns how many.  The
 * condition may name the subject as $4, and is asked again of the locked rows: another
 * transaction may just have changed what it is about, such as the lease of an effect.  Rows
 * that cannot be deleted keep no others: the next scan begins behind them. */
create or replace function rota._purge_rows(
    name text, time_column text, before timestamptz, max_rows integer,
    condition text default 'true', subject text default null
) returns integer language plpgsql as $$
-- A condition is not what a caller sends.
-- @plpgsql_check_options: security_warnings = off
declare
    c_scan constant rota.scan := rota._begin_scan(
        name || coalesce(' ' || hashtext(subject)::text, ''), max_pause => '1 hour');
    -- Rows of several partitions may lie at the same ctid.
    v_key constant text := case name when 'finished_jobs_done' then 'id' else 'ctid' end;
    c_delete constant text := rota._removing(name, format(
        'delete from rota.%1$I as f where f.%3$I = any($1::%5$s[]) '
        'and f.%2$I between $2 and $3 and (%4$s)',
        name, time_column, v_key, condition,
        case v_key when 'id' then 'bigint' else 'tid' end));
    v_keys text[]; v_first timestamptz; v_last timestamptz;
begin
    execute format('select array_agg(o.key), min(o.moment), max(o.moment) from ('
        'select f.%3$I::text as key, f.%2$I as moment from rota.%1$I as f '
        'where f.%2$I < $1 and f.%2$I >= $2 and (%4$s) '
        'order by f.%2$I limit $3 for update skip locked) as o',
        name, time_column, v_key, condition)
    into v_keys, v_first, v_last
    using before, rota._from_micros(c_scan.start), max_rows, subject;
    perform rota._end_scan(c_scan, rota._micros(coalesce(v_last, before)));
    return rota._delete_rows(name, c_delete, v_keys, v_first, v_last, subject);
end $$;

/* Delete the locked rows of these keys by a statement; those that cannot be deleted keep none
 * of the others.  Returns how many. */
create or replace function rota._delete_rows(
    name text, statement text, keys text[], since timestamptz default null,
    until timestamptz default null, subject text default null
) returns integer language plpgsql as $$
-- A statement is not what a caller sends, and plpgsql_check does not see that it deletes.
-- @plpgsql_check_options: security_warnings = off, performance_warnings = off
declare
    c_now constant timestamptz := rota.now();
    v_key text; v_rows integer;
    v_deleted integer := 0;
    v_failed integer := 0;
begin
    if keys is null then return 0; end if;
    begin
        execute statement using keys, since, until, subject;
        get diagnostics v_deleted = row_count;
    exception when others then
        foreach v_key in array keys loop
            exit when rota.now() - c_now > interval '1 second';
            begin
                execute statement using array[v_key], since, until, subject;
                get diagnostics v_rows = row_count;
                v_deleted := v_deleted + v_rows;
            exception when others then
                v_failed := v_failed + 1;
                if v_failed < 10 then
                    raise warning 'a row of % stays for now: %', name, sqlerrm;
                end if;
            end;
        end loop;
    end;
    return v_deleted;
end $$;

/* How long the queue that keeps longest keeps what ended well. */
create or replace function rota._horizon()
    returns interval language plpgsql stable as $$
begin return greatest('7 days', (select max(q.keep_finished) from rota.queues as q)); end;
$$;

/* Ended jobs that no partition drop will take soon enough: of queues that keep less than the
 * longest, dead ones, and those of all queues without a keep_dead, for which null stands. */
create or replace function rota._ended_to_purge()
    returns table (name text, before timestamptz, condition text, queue text)
    language plpgsql as $$
declare
    c_horizon constant interval := rota._horizon();
    c_now constant timestamptz := rota.now();
    c_counted_until constant timestamptz := rota._counted_until();
begin
    return query select k.name, least(c_now - k.keep, c_counted_until),
        case when k.queue is not null then 'f.queue = $4'
            else 'not exists (select from rota.queues as q '
                'where q.queue = f.queue and q.keep_dead is not null)' end
        || case k.name when 'finished_jobs_dead' then ' and not exists (select from '
            'rota.halted_keys as s where s.ordering_key = f.ordering_key and '
            's.job_id = f.id)' else '' end
        -- Other jobs may wait for one: for a dead one until it is retried, and for any if they
        -- were enqueued under an older snapshot.
        || ' and not exists (select from rota.dependencies as d where d.parent_id = f.id)',
        k.queue
    from (
        select 'finished_jobs_done' as name, q.queue, q.keep_finished as keep
        from rota.queues as q where q.keep_finished < c_horizon
        union all
        select 'finished_jobs_dead', q.queue, q.keep_dead from rota.queues as q
        where q.keep_dead is not null
        union all
        select 'finished_jobs_dead', null, interval '90 days'
        union all
        select 'finished_jobs_done', h.queue, interval '7 days'
        from rota._default_queues(c_now - interval '7 days', c_now - c_horizon) as h (queue)
        where c_horizon > interval '7 days'
    ) as k;
end $$;

/* Queues without a keep_finished of their own that may have jobs which ended before this.
 * There may be very many, so a call looks at up to 1000 of each day, from where the last call
 * of this session got to: first on that day and the one before it, where such jobs mostly are.
 */
create or replace function rota._default_queues(before timestamptz, oldest timestamptz)
    returns setof text language plpgsql as $$
declare
    c_max_queues constant integer := 1000;
    c_before constant timestamp without time zone := before at time zone 'UTC';
    c_partition constant regclass :=
        to_regclass('rota.finished_jobs_done_' || to_char(c_before, 'YYYYMMDD'));
    v_below text := rota._scan_start('queues');
    v_day timestamptz; v_found text[]; v_next text;
    v_looked_at integer := 0;
    v_queues text[] := '{}'::text[];
begin
    if v_below is null and c_partition is not null then
        -- A session that does not remember a queue begins with that of any row of the day.
        execute format('select f.queue from %s as f where f.ctid >= $1 limit 1', c_partition)
        into v_below using format('(%s,0)', floor(random() * pg_relation_size(c_partition)
            / current_setting('block_size')::integer))::tid;
    end if;
    v_below := coalesce(v_below, '~');
    for v_day in
        select d.day at time zone 'UTC'
        from generate_series(date_trunc('day', c_before),
            (oldest at time zone 'UTC') - interval '1 day', interval '-1 day') as d (day)
        order by d.day < c_before - interval '2 days', random()
    loop
        exit when v_looked_at > 2 * c_max_queues;
        v_found := array(
            select h.queue from rota._history_queues(v_day, v_day + interval '24 hours',
                v_below, c_max_queues) as h (queue));
        v_next := greatest(v_next, v_found[c_max_queues]);
        v_found := v_found || array(
            select h.queue from rota._history_queues(v_day, v_day + interval '24 hours',
                max_queues => c_max_queues - cardinality(v_found)) as h (queue)
            where v_below < '~' and h.queue > v_below
        );
        v_looked_at := v_looked_at + greatest(cardinality(v_found), 10);
        v_queues := v_queues || v_found;
    end loop;
    perform rota._keep_scan_start('queues', coalesce(v_next, '~'));
    return query select distinct u.queue from unnest(v_queues) as u (queue)
    left join rota.queues as q on q.queue = u.queue where q.keep_finished is null;
end $$;

/* The queues of which jobs ended well or were cancelled in a time of whole days of UTC, from
 * this one down, by a loose scan with one probe for each: of its newest row, since that is
 * seldom one that was deleted. */
create or replace function rota._history_queues(
    since timestamptz, until timestamptz, below text default '~',
    max_queues integer default null
) returns setof text language plpgsql stable as $$
begin
    return query
    with recursive found (queue, number) as (
        (select f.queue, 1 from rota.finished_jobs_done as f
        where f.queue <= _history_queues.below
          and f.finished_at >= _history_queues.since and f.finished_at < _history_queues.until
        order by f.queue desc, f.finished_at desc limit 1)
        union all
        select n.queue, o.number + 1 from found as o
        cross join lateral (
            select f.queue from rota.finished_jobs_done as f
            where f.queue < o.queue and f.finished_at >= _history_queues.since
              and f.finished_at < _history_queues.until
            order by f.queue desc, f.finished_at desc limit 1
        ) as n
        where (o.number < _history_queues.max_queues) is not false
    )
    select o.queue from found as o limit _history_queues.max_queues;
end $$;

/* Whether jobs of a queue ended before this, behind those that the last scan of _purge_rows()
 * has seen.  To ask takes a tenth of what it takes to find that there is nothing to delete. */
create or replace function rota._has_ended(name text, queue text, before timestamptz)
    returns boolean language plpgsql as $$
declare
    c_scan constant rota.scan := rota._begin_scan(name || ' ' || hashtext(queue)::text,
        max_pause => '1 hour');
    c_since constant timestamptz := rota._from_micros(c_scan.start);
begin
    if queue is null or exists (
        select from rota.finished_jobs_dead as f
        where _has_ended.name = 'finished_jobs_dead' and f.queue = _has_ended.queue
          and f.finished_at >= c_since and f.finished_at < before
    ) or exists (
        select from rota.finished_jobs_done as f
        where _has_ended.name = 'finished_jobs_done' and f.queue = _has_ended.queue
          and f.finished_at >= c_since and f.finished_at < before
    ) then
        return true;
    end if;
    perform rota._end_scan(c_scan, rota._micros(before));
    return false;
end $$;

/* What is partitioned by time: by so many days, with so many partitions ahead, the time before
 * which it is purged, and which rows f of that time are: no job that others wait for. */
create or replace function rota._partitioned()
    returns table (
        name text, time_column text, days integer, ahead integer, before timestamptz,
        condition text
    ) language sql stable as $$
    select t.name, t.time_column, t.days, t.ahead,
        least(rota.now() - t.keep, rota._counted_until()), t.condition
    from (values
        ('finished_jobs_done', 'finished_at', 1, 7, rota._horizon(),
            'not exists (select from rota.dependencies as d where d.parent_id = f.id)'),
        ('job_errors', 'failed_at', 7, 2, greatest(interval '90 days',
            (select max(q.keep_dead) from rota.queues as q)), 'true')
    ) as t (name, time_column, days, ahead, keep, condition);
$$;

/* The partitions of a table that lie wholly before this day, oldest first. */
create or replace function rota._old_partitions(parent text, days integer, before date)
    returns setof regclass language sql stable as $$
    select c.oid::regclass from pg_inherits as i join pg_class as c on c.oid = i.inhrelid
    where i.inhparent = format('rota.%I', _old_partitions.parent)::regclass
      and c.relname ~ ('^' || _old_partitions.parent || '_[0-9]{8}$')
      and c.relname <= format('%s_%s', _old_partitions.parent,
        to_char(_old_partitions.before - _old_partitions.days, 'YYYYMMDD'))
    order by c.relname;
$$;

/* Delete rows of a partitioned table that are in the default partition, which is never dropped,
 * or in one that should have been dropped a day ago. */
create or replace function rota._purge_partitions(parent text, max_rows integer)
    returns integer language plpgsql as $$
declare
    v_table record; v_partition regclass; v_deleted integer;
begin
    select t.* into v_table from rota._partitioned() as t
    where t.name = _purge_partitions.parent;
    v_deleted := rota._purge_rows(parent || '_default', v_table.time_column, v_table.before,
        max_rows, v_table.condition);

    for v_partition in
        select o.partition
        from rota._old_partitions(_purge_partitions.parent, v_table.days,
            (v_table.before at time zone 'UTC')::date - 1) as o (partition)
    loop
        exit when v_deleted >= max_rows;
        begin
            v_deleted := v_deleted + rota._purge_partition(v_partition, max_rows - v_deleted,
                v_table.condition);
        exception when others then
            raise warning 'rows of % stay for now: %', v_partition, sqlerrm;
        end;
    end loop;
    return v_deleted;
end $$;

/* Delete rows of a partition for which the condition holds, as they lie in it; what is
 * remembered is the number of a page. */
create or replace function rota._purge_partition(
    partition regclass, max_rows integer, condition text
) returns integer language plpgsql as $$
-- @plpgsql_check_options: security_warnings = off
declare
    c_scan constant rota.scan := rota._begin_scan('partition ' || partition::oid::text,
        max_pause => '1 hour');
    c_name constant text := (
        select c.relname::text from pg_class as c where c.oid = _purge_partition.partition);
    v_keys text[]; v_page bigint;
begin
    execute format(
        'select array_agg(o.key), coalesce(max((o.key::point)[0]::bigint), $1) from ('
        'select f.ctid::text as key from %s as f '
        'where f.ctid >= format(''(%%s,0)'', $1)::tid and %s '
        'limit $2 for update skip locked) as o', partition, condition)
    into v_keys, v_page using coalesce(c_scan.start, 0), max_rows;
    perform rota._end_scan(c_scan, v_page);
    return rota._delete_rows(c_name, rota._removing(c_name, format(
        'delete from %s as f where f.ctid = any($1::tid[]) and %s', partition, condition)),
        v_keys);
end $$;

/* Partitions for the next days and weeks, and for the current ones only in a new installation:
 * a job that ends meanwhile may be on its way to the default partition.  Returns how many. */
create or replace function rota._create_partitions(with_current boolean default false)
    returns integer language plpgsql as $$
declare
    v_today constant date := ((rota.now() + '1 minute') at time zone 'UTC')::date;
    v_table record; v_first date; v_is_large boolean;
    v_created integer := 0;
begin
    for v_table in select t.* from rota._partitioned() as t loop
        -- Weeks begin on Monday.
        v_first := case v_table.days when 7 then date_trunc('week', v_today)::date
            else v_today end;
        continue when not exists (
            select from generate_series(1 - with_current::integer, v_table.ahead) as n
            where to_regclass('rota.' || v_table.name
                || to_char(v_first + n * v_table.days, '_YYYYMMDD')) is null
        );
        -- Attaching a partition reads the default one under a lock that endings wait for.
        execute format('select count(*) > 100000 from (select from rota.%I as f limit 100001) '
            'as f', v_table.name || '_default') into v_is_large;
        if v_is_large then
            raise warning 'partitions are made again when %_default is small', v_table.name;
            continue;
        end if;

        for v_number in 1 - with_current::integer..v_table.ahead loop
            begin
                v_created := v_created + rota._create_partition(v_table.name,
                    v_table.time_column, v_first + v_number * v_table.days, v_table.days);
            exception
                when lock_not_available then return v_created;
                when others then
                    raise warning 'a partition of % cannot be made now: %', v_table.name,
                        sqlerrm;
            end;
        end loop;
    end loop;
    return v_created;
end $$;

create or replace function rota._create_partition(
    parent text, time_column text, day date, days integer
) returns integer language plpgsql as $$
-- It makes a table, which plpgsql_check does not see in a dynamic statement.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_name constant text := parent || to_char(day, '_YYYYMMDD');
    -- As texts that are the same in every session.
    v_from constant text := to_char(day, 'YYYY-MM-DD 00:00:00+00');
    v_to constant text := to_char(day + days, 'YYYY-MM-DD 00:00:00+00');
    v_is_there boolean := to_regclass('rota.' || v_name) is not null;
    v_role name;
begin
    -- Rows that came before their partition stay in the default one; so do their days.
    if not v_is_there then
        execute format(
            'select exists (select from rota.%I as f where f.%2$I >= $1 and f.%2$I < $2)',
            parent || '_default', time_column)
        into v_is_there using v_from::timestamptz, v_to::timestamptz;
    end if;
    if v_is_there then return 0; end if;

    execute format('create table rota.%1$I (like rota.%2$I including constraints);'
        'alter table rota.%1$I replica identity full;'
        'alter table rota.%2$I attach partition rota.%1$I for values from (%3$L) to (%4$L);'
        'comment on table rota.%1$I is %5$L;'
        'revoke all on table rota.%1$I from public;'
        'revoke all on type rota.%1$I from public', v_name, parent, v_from, v_to,
        format('Rows of %s whose %s lies in these days.', parent, time_column));
    for v_role in select rota._default_grantees()
    loop
        execute format('revoke all on table rota.%I from %I', v_name, v_role);
    end loop;
    return 1;
end $$;

/* Drop partitions that lie wholly behind what is kept, or archive them; returns how many.  One
 * stays with a job for which a live one waits, as for the retry of one that was cancelled. */
create or replace function rota._drop_partitions()
    returns integer language plpgsql as $$
-- It drops a table, which plpgsql_check does not see in a dynamic statement.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_archive constant text := rota._archive_of('finished_jobs');
    v_parent text; v_partition regclass;
    v_is_waited_for boolean := false;
    v_dropped integer := 0;
begin
    for v_parent, v_partition in
        select t.name, p.partition from rota._partitioned() as t
        cross join lateral rota._old_partitions(t.name, t.days,
            (t.before at time zone 'UTC')::date) as p (partition)
    loop
        exit when v_dropped >= 20;
        begin
            -- Not in the query, which would ask it of the partitions that stay, too.  The edges
            -- of newer parents, of which there may be very many, are not looked at.
            if v_parent = 'finished_jobs_done' then
                execute format('select exists (select from rota.dependencies as d '
                    'join rota.jobs as j on j.id = d.job_id '
                    'join %1$s as f on f.id = d.parent_id '
                    'where d.parent_id between (select min(i.id) from %1$s as i) '
                    'and (select max(i.id) from %1$s as i))', v_partition)
                into v_is_waited_for;
                continue when v_is_waited_for;
            end if;
            if v_archive is null then
                execute format('drop table %s', v_partition);
            else
                execute format('alter table rota.%I detach partition %s', v_parent,
                    v_partition);
                execute format('alter table %s set schema %I', v_partition, v_archive);
            end if;
            v_dropped := v_dropped + 1;
        exception
            when lock_not_available then return v_dropped;
            when others then
                raise warning 'partition % stays for now: %', v_partition, sqlerrm;
        end;
    end loop;
    return v_dropped;
end $$;
