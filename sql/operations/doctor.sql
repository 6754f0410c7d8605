/*
 * operations/doctor.sql -- is anything wrong with this queue, or with the database under it?
 *
 * Each check looks for one kind of trouble that has stopped queues before, and says what it
 * found: how bad it is, the evidence, and the statement that mends it.  A check that finds
 * nothing says so in one row, so that silence cannot be taken for health; one that fails says
 * that, and stops no other.  A check that finds more than twenty tells how many more.  critical
 * means that work stands still or soon will, warning that it can wait for working hours.
 *
 * It only reads, waits a second for a table that a session has locked against readers, and
 * looks at a bounded number of rows of each table.
 */

create or replace function rota.doctor()
    returns table (severity text, finding text, evidence text, remedy text) language plpgsql
    stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
    set enable_bitmapscan = off set enable_sort = off set jit = off
    set lock_timeout = '1s' as $$
begin
    perform rota._check_sees_all('doctor()');
    return query select f.severity, f.finding, rota._printable(f.evidence), f.remedy
    from rota._findings() with ordinality as f (severity, finding, evidence, remedy, ordinal)
    order by array_position('{critical,warning,ok}'::text[], f.severity), f.ordinal;
end $$;

comment on function rota.doctor is
    'What is wrong with this queue and the database under it, the worst first: severity '
    '(critical, warning or ok), finding, evidence, and the statement that repairs it, or null; '
    'only reads, and waits for a locked table for a second.';

create or replace function rota._findings()
    returns table (severity text, finding text, evidence text, remedy text) language plpgsql
    stable as $$
declare
    v_check record; v_pid integer; v_told integer;
begin
    for v_check in
        select c.name, c.if_ok
        from (values
            ('locks', 'no session keeps the others from a table'),
            ('ticker', 'maintenance runs'),
            ('leases', 'no expired lease is left'),
            ('workers', 'every worker with jobs is connected'),
            ('running_jobs', 'no attempt exceeds its time limit, or takes unusually long'),
            ('job_types', 'every type with due jobs has a live worker'),
            ('forwards', 'jobs for other databases have a forwarder'),
            ('queues', 'nothing is paused, and no queue is late'),
            ('limits', 'every limit lets jobs run'),
            ('ordering_keys', 'no ordering key is halted'),
            ('failures', 'there are no more failures than usual'),
            ('statistics', 'all ended jobs are counted'),
            ('dead_jobs', 'no job died in the last hour, no type only expired, and none waits '
                'for a dead one'),
            ('effects', 'every effect is known to have happened or not'),
            ('schedules', 'no schedule is overdue, or disabled by an error'),
            ('horizon', 'nothing keeps vacuum from removing dead rows'),
            ('vacuum', 'all tables are vacuumed and analyzed'),
            ('indexes', 'no index is bloated'),
            ('partitions', 'rows have their partitions'),
            ('notifications', 'the notification queue is empty'),
            ('sequences', 'no sequence is near its end, or behind'),
            ('versions', 'all workers have the version of the database'),
            ('drift', 'everything is as installed'),
            ('standby', 'this is not a standby, and no commit waits for one')
        ) as c (name, if_ok)
    loop
        -- What the server counts for itself, and who is connected to it.
        if v_check.name in ('locks', 'workers', 'horizon', 'vacuum', 'notifications')
          and pg_is_in_recovery() then
            return query select 'ok', v_check.name, 'a standby cannot tell: ask the primary',
                null::text;
            continue;
        end if;
        begin
            return query execute format($f$
                with found as (
                    select e.*, count(*) over () as total,
                        row_number() over (
                            order by e.severity <> 'critical', e.ordinal) as place
                    from rota.%I() with ordinality as e (severity, evidence, remedy, ordinal)
                )
                select f.severity, $1, case when f.place <= 20 then f.evidence
                    else concat('and ', f.total - 20, ' more like these') end,
                    case when f.place <= 20 then f.remedy end
                from found as f where f.place <= 21 order by f.place
            $f$, '_examine_' || v_check.name) using v_check.name;
            if not found then
                return query select 'ok', v_check.name, v_check.if_ok, null::text;
            end if;
        exception
            when lock_not_available then
                -- The others of its table need not wait as long.
                perform set_config('lock_timeout', '10ms', true);
                v_pid := (
                    select a.pid from pg_locks as l
                    join pg_class as c on c.oid = l.relation
                      and c.relnamespace = 'rota'::regnamespace
                    join pg_database as d on d.oid = l.database
                      and d.datname = current_database()
                    join pg_stat_activity as a on a.pid = l.pid
                    where l.mode = 'AccessExclusiveLock'
                    order by l.granted desc, a.xact_start limit 1
                );
                return query select 'critical', v_check.name, case
                        when v_pid is null then 'a table that it reads was locked just now'
                        when v_pid = v_told
                            then format('pid %s has locked a table that it reads, too', v_pid)
                        else 'a table that it reads is locked by ' || rota._session_words(v_pid)
                    end, 'select pg_terminate_backend(' || v_pid::text || ');';
                v_told := v_pid;
            when others then
                return query
                select 'warning', v_check.name, 'this could not be examined: ' || sqlerrm,
                    null::text;
        end;
    end loop;
end $$;

/* On a standby not trouble, but what the reader has to know of all other rows.  On a primary,
 * whether commits wait for one.  Which sessions do is hidden from an owner who may not see
 * those of other roles, but not that no standby is connected. */
create or replace function rota._examine_standby()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select case when s.behind > interval '5 minutes' then 'warning' else 'ok' end,
        format('this is a standby%s: its remedies are for the primary',
            ', ' || rota._span(s.behind) || ' behind or idle'),
        null::text
    from (select rota.now() - pg_last_xact_replay_timestamp() as behind) as s
    where pg_is_in_recovery()
    union all
    select 'critical', format('%s (synchronous_standby_names is %s): what has written hangs, '
            'such as enqueues and claims. Start the standby again, or wait for none, and a '
            'promotion may lose what is committed: alter system set '
            'synchronous_standby_names = ''''; select pg_reload_conf();', case
                when w.has_standby then 'commits wait for a synchronous standby, the first for '
                    || rota._ago(w.since)
                else 'no standby is connected, and commits wait for a synchronous one' end,
            w.names),
        null
    from (
        select current_setting('synchronous_standby_names') as names, (
                select min(a.query_start) from pg_stat_activity as a
                where a.wait_event = 'SyncRep' and a.datname = current_database()
            ) as since,
            exists (select from pg_stat_replication) as has_standby
    ) as w
    where w.names <> '' and not pg_is_in_recovery()
      and (w.since < rota.now() - interval '5 seconds' or not w.has_standby
        and current_setting('synchronous_commit') not in ('local', 'off'));
$$;

/* A lock that stops all who write to a table, or read it too, and for which others wait: a
 * session that changes the table has it, or waits for it behind an open transaction.  One that
 * waits may be of any role with a right in the schema: that to the table is asked for later. */
create or replace function rota._examine_locks()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    with locks as materialized (
        select l.pid, c.relname, l.relation, l.mode, l.granted, l.waitstart from pg_locks as l
        join pg_class as c on c.oid = l.relation
          and c.relnamespace = 'rota'::regnamespace
        where l.locktype = 'relation' and l.database = (
            select d.oid from pg_database as d where d.datname = current_database())
    )
    select 'critical', format('%s %s the %s of rota.%s, and %s %s for it, the first for %s',
            rota._session_words(l.pid),
            case when l.granted then 'has' else 'itself waits for' end, l.mode, l.relname,
            count(*), case count(*) when 1 then 'other waits' else 'others wait' end,
            rota._ago(min(w.waitstart))),
        format('select pg_terminate_backend(%s);', l.pid)
    from locks as l
    join locks as w on w.relation = l.relation and w.pid <> l.pid and not w.granted
      and w.waitstart < rota.now() - interval '1 second'
      and (l.granted or l.waitstart < w.waitstart)
    where l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
        'AccessExclusiveLock')
    group by l.pid, l.granted, l.mode, l.relname, l.relation order by count(*) desc;
$$;

create or replace function rota._examine_ticker()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'critical', format('no tick has run %s: expired leases are not swept, schedules '
            'make no jobs, and jobs that wait for others keep waiting. Start a worker or rota '
            'tick --loop%s',
            case when t.last_tick_at is not null then 'for ' || rota._span(t.lag)
                else format('since the install, %s ago', rota._span(t.lag)) end,
            coalesce('; ' || rota._cron_trouble(), case
                when to_regnamespace('cron') is not null
                then ', or let pg_cron tick with select rota.start_ticker()' end)),
        'select * from rota.tick();'
    from rota.ticker_health as t
    -- While there is nothing to do, a tick is recorded every five.
    where t.lag > interval '6 minutes'
    union all
    -- As some providers set it when the disk is nearly full.
    select 'critical', format('%s lets its sessions only read (default_transaction_read_only): '
            'enqueues, claims and ticks fail. Find out why before you change it; sessions '
            'keep the setting until they reconnect', case s.source
                when 'database' then 'this database' when 'user' then 'role ' || session_user
                else 'the ' || s.source end),
        'begin read write; alter ' || case s.source
            when 'database' then format('database %I', current_database())
            when 'user' then format('role %I', session_user) end
            || ' reset default_transaction_read_only; commit;'
    from pg_settings as s
    where s.name = 'default_transaction_read_only' and s.setting = 'on'
      and s.source <> all('{client,session,default}') and not pg_is_in_recovery();
$$;

/* That pg_cron is to tick, but does not, and why; null if it has no entry for that. */
create or replace function rota._cron_trouble()
    returns text language plpgsql stable as $$
begin
    if not rota._has_cron() then return null; end if;
    return (
        select 'pg_cron is to tick, but ' || case
            when l.status = 'failed' then format('its last run failed: %s', l.return_message)
            else format('it %s. If pg_stat_activity shows a superuser no pg_cron launcher, '
                'restart the server; else see its log, and cron.max_running_jobs',
                coalesce('last began ' || rota._ago(l.start_time) || ' ago',
                    'has logged no run'))
            end
        from cron.job as j left join lateral (
            select d.status, d.return_message, d.start_time from cron.job_run_details as d
            where d.jobid = j.jobid order by d.runid desc limit 1
        ) as l on true
        where j.jobname = 'rota tick' and j.username = current_user and j.active
          and j.database = current_database()
    );
end $$;

create or replace function rota._examine_leases()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'critical', format('%s without a sign of life and not taken back, though the '
            'first lease ended %s ago: job %s of %s', rota._jobs_words(count(*), 1000),
            rota._ago(min(s.locked_until)), (array_agg(s.id order by s.locked_until))[1],
            (array_agg(s.locked_by order by s.locked_until))[1]),
        'select rota.sweep_stale_leases();'
    from (
        select j.id, j.locked_by, j.locked_until from rota.jobs as j
        where j.status = 'running' and j.locked_until < rota.now() - interval '10 seconds'
        order by j.locked_until limit 1000
    ) as s
    having count(*) > 0;
$$;

create or replace function rota._examine_workers()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    (select 'warning', format('worker %s (pid %s on %s) is no longer connected, but holds %s '
            'until %s', w.worker, w.pid, w.host,
            case h.jobs when 1 then '1 job' else h.jobs::text || ' jobs' end
                || case when h.cancels > 0
                    then format(', %s of them to be cancelled,', h.cancels) else '' end,
            rota._moment(h.locked_until)),
        case when h.cancels = 0
            then rota._retry_all(jsonb_build_object('worker', w.worker, 'status', 'running'),
                '{"force": true}', h.jobs, exists (select from rota.jobs as j offset 4999))
            when h.jobs > h.cancels
                then format('select rota.retry_job(r.id, force => true) from rota.running_jobs '
                    'as r where r.locked_by = %s and r.cancel_requested_at is null;',
                    rota._literal(w.worker))
            else format('select * from rota.explain_job(%s);', h.job_id) end
    from (
        select r.locked_by, count(*) as jobs, count(r.cancel_requested_at) as cancels,
            max(r.locked_until) as locked_until, min(r.id) as job_id
        from (
            select j.id, j.locked_by, j.locked_until, j.cancel_requested_at from rota.jobs as j
            where j.status = 'running' and j.locked_until is not null
            order by j.locked_until limit 10000
        ) as r
        group by r.locked_by
    ) as h
    join rota._workers as w on w.worker = h.locked_by
    where not w.is_live
    order by h.jobs desc, w.worker limit 20)
    union all
    -- Of a worker that hangs the row expires, and each live one waits in one session.
    select 'warning', format('%s for jobs, but only %s live: a worker that hangs, or waits '
            'through a pool, is notified in place of others, whose jobs then start up to half '
            'a minute late. Let each report, and wait on a connection of its own (pid %s)',
            case cardinality(l.pids) when 1 then '1 session waits'
                else format('%s sessions wait', cardinality(l.pids)) end,
            case n.workers when 1 then '1 worker is'
                else format('%s workers are', n.workers) end,
            array_to_string(l.pids[1:10], ', ')),
        null
    from rota._waiting_pids() as l (pids)
    cross join (select count(*) as workers from rota._workers as w where w.is_live) as n
    where cardinality(l.pids) > n.workers;
$$;

/* A worker that lives keeps its job by heartbeats, also where the handler hangs.  Of each type
 * of a queue the attempt that has run longest tells; of very many types not all are asked. */
create or replace function rota._examine_running_jobs()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'warning', format('job %s of type %s in queue %s, on %s: %s', r.id, r.job_type,
            r.queue, r.locked_by, h.words),
        rota._take_statement(r.id, r.cancel_requested_at, r.cancel_reason)
    from (
        select f.*
        from (
            select distinct on (a.queue, a.job_type, a.is_overdue) a.*
            from (
                select j.id, j.queue, j.job_type, j.locked_by, j.started_at, j.overdue_at,
                    j.locked_until, j.cancel_requested_at, j.cancel_reason,
                    coalesce(j.overdue_at < n.now, false) as is_overdue, n.now
                from rota.jobs as j cross join (select rota.now() as now offset 0) as n
                where j.status = 'running' and j.locked_until is not null
                order by j.locked_until limit 10000
            ) as a
            where a.is_overdue or a.started_at < a.now - interval '5 minutes'
            order by a.queue, a.job_type, a.is_overdue, a.started_at
        ) as f
        order by f.started_at limit 50
    ) as r
    cross join lateral (
        select coalesce(rota._overdue_words(r.overdue_at, r.locked_until),
            rota._hung_words(r.queue, r.job_type, r.started_at)) as words
    ) as h
    where h.words is not null order by r.started_at limit 10;
$$;

/* The queues whose jobs have been due longest, as these were counted lately: of very many there
 * is mostly nothing to tell.  While nothing ticks, which is told, job_counts() would count by
 * itself: then they are those of the last count, and the first ones. */
create or replace function rota._late_queues()
    returns text[] language plpgsql stable as $$
declare
    c_max constant integer := 1024;
begin
    if rota._are_many('rota.jobs') and not exists (
        select from rota.count_progress as p
        where p.round > 0 and p.counted_at > rota.now() - interval '5 minutes'
    ) then
        return array(
            select c.queue from rota.counted_jobs as c
            where c.is_due and c.status in ('queued', 'failed')
            group by c.queue order by min(c.first_run_at) limit c_max
        ) || rota._ready_queues();
    end if;
    return array(
        select c.queue from rota.job_counts() as c
        where c.is_due and c.status in ('queued', 'failed')
        group by c.queue order by min(c.first_run_at) limit c_max
    );
end $$;

/* The first due jobs of each lane of these queues, 500 of each of the 200 lanes whose first has
 * been due longest. */
create or replace function rota._due_sample(queues text[])
    returns table (queue text, id bigint, job_type text, due_since timestamptz)
    language plpgsql stable as $$
declare
    c_now constant timestamptz := rota.now();
begin
    return query
    with recursive lanes as (
        -- Below the first that there may be.
        select distinct n.queue, -32769::bigint as lane
        from unnest(_due_sample.queues) as n (queue)
        union all
        select l.queue, rota._next_lane(array[l.queue], l.lane, null) from lanes as l
        where l.lane is not null
    )
    select l.queue, d.id, d.job_type, coalesce(d.due_since, d.created_at)
    from (
        select f.queue, f.lane from lanes as f
        cross join lateral (
            select coalesce(j.own_place, j.run_at) as place from rota.jobs as j
            where j.queue = f.queue and coalesce(j.own_lane, j.priority) = f.lane
              and j.hold is null and j.status in ('queued', 'failed')
              and coalesce(j.own_place, j.run_at) <= c_now
            order by coalesce(j.own_place, j.run_at), j.id limit 1
        ) as n
        order by n.place limit 200
    ) as l
    cross join lateral (
        select j.id, j.job_type, j.created_at, rota._due_since(j) as due_since
        from rota.jobs as j
        where j.queue = l.queue and coalesce(j.own_lane, j.priority) = l.lane
          and j.hold is null and j.status in ('queued', 'failed')
          and coalesce(j.own_place, j.run_at) <= c_now and j.run_at <= c_now
        order by coalesce(j.own_place, j.run_at), j.id limit 500
    ) as d;
end $$;

/* The first job of each lane in these queues that waits for a limit, of the first 1000 lanes of
 * all queues. */
create or replace function rota._limited_sample(queues text[])
    returns table (queue text, id bigint, job_type text, due_since timestamptz)
    language sql stable as $$
    with recursive lanes as (
        select p.kind as hold, '' collate "C" as queue, '' collate "C" as job_type,
            0::smallint as lane, null::bigint as id
        from unnest('{"key ","type "}'::text[] collate "C") as p (kind)
        union all
        select n.* from lanes as l
        cross join lateral (
            select j.hold, j.queue, j.job_type, coalesce(j.own_lane, j.priority), j.id
            from rota.jobs as j
            where (j.hold, j.queue, j.job_type, coalesce(j.own_lane, j.priority))
                > (l.hold, l.queue, l.job_type, l.lane)
              and j.hold < split_part(l.hold, ' ', 1) || '!' and j.hold <> 'time'
            order by j.hold, j.queue, j.job_type, coalesce(j.own_lane, j.priority),
                coalesce(j.own_place, j.run_at), j.id limit 1
        ) as n
    )
    select j.queue, j.id, j.job_type, coalesce(rota._due_since(j), j.created_at)
    from (select * from lanes as l limit 1000) as f
    -- Not a join, which a plan made on an empty table begins with all jobs.
    cross join lateral (select i.* from rota.jobs as i where i.id = f.id limit 1) as j
    where j.queue = any(_limited_sample.queues) and j.run_at <= rota.now()
      -- One that lets nothing run is told by itself.
      and not exists (select from rota._bound(f.hold) as b where b.max_running = 0);
$$;

create or replace function rota.untaken_jobs(queues text[])
    returns table (
        queue text, job_type text, due_jobs bigint, due_since timestamptz, job_id bigint
    ) language plpgsql stable security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
    set jit = off as $$
begin
    perform rota._check_names('queues', queues);
    perform rota._check_queues('worker', queues);

    return query select u.queue, u.job_type, u.due_jobs, u.due_since, u.job_id
    from rota._untaken_jobs(untaken_jobs.queues) as u;
end $$;

comment on function rota.untaken_jobs is
    'Up to 20 types that no live worker takes, that are not paused and that have had due jobs '
    'in these queues for ten seconds, the longest waiting first: how many of the first 500 of '
    'each lane, since when, and one of them; raises 22023, 42501.';

create or replace function rota._untaken_jobs(queues text[])
    returns table (
        queue text, job_type text, due_jobs bigint, due_since timestamptz, job_id bigint
    ) language sql stable as $$
    select t.queue, t.job_type, t.due_jobs, t.due_since, t.job_id
    from (
        select d.queue, d.job_type, count(*) as due_jobs, min(d.due_since) as due_since,
            min(d.id) as job_id
        from rota._due_sample(_untaken_jobs.queues) as d group by d.queue, d.job_type
    ) as t
    -- It may have come this moment, and a worker just before it.
    where t.due_since < rota.now() - interval '10 seconds' and not exists (
        select from rota._workers as w
        where w.is_live and t.queue = any(w.queues)
          and (w.job_types is null or t.job_type = any(w.job_types))
    ) and not rota._is_paused(t.queue, rota.now(), t.job_type)
    order by t.due_since limit 20;
$$;

create or replace function rota._examine_job_types()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    with types as materialized (
        select u.*, case when u.due_since < rota.now() - interval '5 minutes' then 'critical'
                else 'warning' end as severity,
            rota._ago(u.due_since) as due_for,
            format('select * from rota.explain_job(%s);', u.job_id) as remedy
        from rota._untaken_jobs(rota._late_queues()) as u
        where u.queue !~ '^forward:[0-9]+$' and not exists (
            -- Which is told by itself.
            select from rota.limits as l where l.queue = u.queue and l.max_running = 0
        )
    ), workers as (
        select count(*) as live from rota._workers as l
        where l.is_live and l.queues[1] !~ '^forward:[0-9]+$'
    )
    (select t.severity, format('no worker is running, but jobs of %s are due, the first for '
            '%s, such as job %s. Start one for each queue: rota worker MODULE:REGISTRY '
            '--queue %s', (
                select rota._list(array_agg(o.job_type || ' in queue ' || o.queue
                    order by o.due_since))
                from types as o
            ), t.due_for, t.job_id, t.queue),
        t.remedy
    from types as t cross join workers as w where w.live = 0 order by t.due_since limit 1)
    union all
    select t.severity, format('no live worker takes %s in queue %s: %s due there, the first '
            'for %s, such as job %s. Start a worker with a handler for %s and --queue %s',
            t.job_type, t.queue, rota._jobs_words(t.due_jobs, 500), t.due_for, t.job_id,
            t.job_type, t.queue),
        t.remedy
    from types as t cross join workers as w where w.live > 0;
$$;

create or replace function rota._examine_forwards()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    with untaken as materialized (
        select t.* from rota._untaken_jobs(rota._ready_queues('forward:', 'forward:9999')) as t
        where t.queue ~ '^forward:[0-9]+$'
    )
    select case when t.due_since < rota.now() - interval '5 minutes' then 'critical'
            else 'warning' end,
        format('%s: %s waiting, the first for %s, such as job %s',
            rota._forwarder_words(t.queue), rota._jobs_words(t.due_jobs, 500),
            rota._ago(t.due_since), t.job_id),
        format('select * from rota.explain_job(%s);', t.job_id)
    from untaken as t
    union all
    select 'warning', format('database %s has not taken job %s for %s: the log of the '
            'forwarder says why', substr(q.queue, 9), j.id, rota._ago(j.created_at)), null
    from unnest(rota._ready_queues('forward:', 'forward:9999')) as q (queue)
    cross join lateral (
        select f.id, f.created_at
        from (
            select o.id, o.created_at, o.run_at from rota.jobs as o
            where o.queue = q.queue and o.hold is null and o.status in ('queued', 'failed')
            limit 1000
        ) as f
        -- What was refused is due a little later each time; what was not received stays due.
        where f.run_at > f.created_at + interval '5 minutes'
          or f.run_at < rota.now() - interval '5 minutes'
        order by f.created_at limit 1
    ) as j
    where q.queue ~ '^forward:[0-9]+$' and not rota._is_paused(q.queue, rota.now())
      and not exists (select from untaken as t where t.queue = q.queue);
$$;

create or replace function rota._examine_queues()
    returns table (severity text, evidence text, remedy text) language plpgsql stable as $$
declare
    c_now constant timestamptz := rota.now();
    c_late constant text[] := rota._late_queues();
begin
    return query select 'warning', w.words, w.remedy
    from rota.pauses as p cross join lateral rota._pause_finding(p) as w
    where p.until is null or p.until > c_now
    order by p.paused_at limit 1000;

    -- Those that were due when they came in, or were put back; not those with a delay of their
    -- own, which is not kept.
    return query
    select 'critical', format('%s enqueued or failed while the clock of the server was ahead, '
            'such as job %s, and %s due only when it shows %s again', case count(*)
                when 1 then '1 job was' else count(*)::text || ' jobs were' end, max(a.id),
            case count(*) when 1 then 'is' else 'are' end, rota._moment(max(a.run_at))),
        'select * from rota.act_on_jobs(''reschedule'', jsonb_build_object(''ids'', array('
            'select r.id from rota.job_runs as r where r.status = ''queued'' '
            'and r.run_at > rota.now() and (r.run_at <= r.created_at '
            'or r.run_at between r.updated_at - interval ''1 s'' and r.updated_at) '
            'or r.status = ''failed'' and r.failed_at > rota.now() limit 1000)), '
            '''{"delay": "0"}'');'
    from (
        select j.id, j.run_at, j.created_at, j.updated_at, j.failed_at, j.status
        from rota.jobs as j order by j.id desc limit 1000
    ) as a
    where a.status = 'queued' and a.run_at > c_now + interval '1 minute'
      and (a.run_at <= a.created_at
        or a.run_at between a.updated_at - interval '1 s' and a.updated_at)
      or a.status = 'failed' and a.failed_at > c_now + interval '1 minute'
    having count(*) > 0;

    return query
    select 'warning', format('queue %s has been coming from database %s for %s, and refuses '
            'jobs with a key here until it has settled: continue the move there', m.queue,
            m.database, rota._ago(m.started_at)),
        format('select * from rota.queue_move_status(%L);', m.queue)
    from rota.queue_moves as m where m.direction = 'in' and m.state = 'moving'
    order by m.started_at limit 1000;

    return query
    select 'warning', format('retries of queue %s wait for its retry budget: the first, job '
            '%s, has been due for %s, and %s may begin per minute', b.queue, j.id,
            rota._ago(j.run_at), round(s.per_minute::numeric, 1)),
        format('select rota.set_queue(%L, retry_budget => ''{"per_minute": %s, "percent": '
            '%s}'');', b.queue,
            least(2 * (q.retry_budget ->> 'per_minute')::numeric, 1000000),
            least(2 * (q.retry_budget ->> 'percent')::numeric, 1000))
    from rota._held_budgets() as b join rota.queues as q on q.queue = b.queue
    cross join lateral unnest(rota._first_retries(b.queue, 1)) as f (id)
    cross join lateral (select i.* from rota.jobs as i where i.id = f.id limit 1) as j
    cross join lateral rota._budget_state(b) as s
    where j.run_at < c_now - interval '10 seconds' and q.retry_budget is not null
    order by j.run_at limit 1000;

    -- What is paused is told above, and what no worker or forwarder takes of the type.
    return query
    with live as materialized (
        select w.queues, w.job_types from rota._workers as w where w.is_live
    ), late as (
        select o.*
        from (
            select distinct on (t.queue) t.*
            from (
                select distinct on (d.queue, d.job_type) d.*
                from (
                    select s.* from rota._due_sample(c_late) as s
                    union all
                    select s.* from rota._limited_sample(c_late) as s
                ) as d
                order by d.queue, d.job_type, d.due_since, d.id
            ) as t
            where t.due_since < c_now - interval '5 minutes'
              and t.queue !~ '^forward:[0-9]+$'
              and not rota._is_paused(t.queue, c_now, t.job_type) and exists (
                select from live as l
                where t.queue = any(l.queues)
                  and (l.job_types is null or t.job_type = any(l.job_types))
            )
            order by t.queue, t.due_since, t.id
        ) as o
        order by o.due_since
    )
    select 'warning', format('queue %s is late: job %s, the oldest of the first in line, has '
            'been due for %s. The first reason: %s', o.queue, o.id, rota._ago(o.due_since),
            e.explanation),
        coalesce(e.remedy, format('select * from rota.explain_job(%s);', o.id))
    from late as o
    cross join lateral (
        select x.explanation, x.remedy from rota.explain_job(o.id) as x
        where x.ordinal = 1
    ) as e
    order by o.due_since limit 20;
end $$;

create or replace function rota._examine_limits()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'warning', format('limit %s has let nothing run since %s', l.limit_name,
            rota._moment(l.updated_at)),
        rota._limit_statement(l, l.limit_key, 'max_running', 1)
    from rota.limits as l where l.max_running = 0 order by l.limit_name limit 1000;
$$;

/* Those that are not shown are only counted. */
create or replace function rota._examine_ordering_keys()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    with halted as (
        select i.ordering_key, row_number() over (order by i.halted_since) as place
        from (
            select k.ordering_key, k.halted_since from rota.halted_keys as k limit 1000
        ) as i
    )
    select 'warning', w.words || case
            when w.remedy not like 'select rota.resume_ordering_key(%'
                then '; resume_ordering_key() lets the jobs behind it run without it'
            else ''
        end, w.remedy
    from halted as h
    left join rota._halt_words(array(
        select s.ordering_key from halted as s where s.place <= 20
    )) as w on w.ordering_key = h.ordering_key
    order by h.place;
$$;

create or replace function rota._examine_failures()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'warning', format('failures of type %s in queue %s rise: %s of %s attempts in the '
            'last 10 minutes, usually %s%s', r.job_type, r.queue, r.failures, r.attempts,
            trim_scale(r.usual_failures), e.words),
        -- Not error_groups, in which those of others may be the newest.
        format('select job_id, failed_at, error_type, message from rota.job_errors where '
            'queue = %L and job_type = %L order by failed_at desc limit 20;', r.queue,
            r.job_type)
    from rota.rising_failures() as r
    left join lateral (
        select format('; the last of job %s with %s', f.job_id,
            rota._error_words(f.error_type, f.message)) as words
        from rota.job_errors as f
        where f.queue = r.queue and f.job_type = r.job_type order by f.failed_at desc limit 1
    ) as e on true;
$$;

create or replace function rota._examine_statistics()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'warning', format('the statistics are %s behind, and retention keeps uncounted jobs '
            'until a tick counts them', rota._ago(p.counted_until)),
        'select * from rota.tick();'
    from rota.stats_progress as p
    where p.counted_until between 'epoch'::timestamptz + interval '1 day'
        and rota.now() - interval '10 minutes'
      and rota._first_uncounted(p.counted_until) < rota.now() - interval '10 minutes'
    union all
    select 'warning', format('within the last %s a transaction has ended jobs, or let '
            'some wait for others, and is still open: that counts once it commits, and until '
            'then retention keeps the jobs that have ended since', rota._ago(min(l.since))),
        'select pid, usename, application_name, xact_start from pg_stat_activity '
        'where backend_xid = any(array(select xid from rota.late_xids)) order by xact_start;'
    from rota.late_xids as l where l.until is null
    having min(l.since) < rota.now() - interval '5 minutes'
    union all
    -- From this minute on all is counted anew: what ended ahead when the clock comes there.
    select 'warning', format('no job that ends is counted, and rising_failures() is blind, '
            'until the clock of the server shows %s again, as it did before',
            rota._moment(p.counted_until)),
        'with clock as (select rota.now() as shows), ahead as (delete from rota.job_stats as s '
            'using clock as c where s.starts_at >= date_bin((''1 '' || s.step)::interval, '
            'c.shows, ''epoch'')) '
            'update rota.stats_progress as p set counted_until = m.began, '
            'complete_until = m.began, sampled_at = m.began, '
            'hours_until = least(p.hours_until, date_bin(''1 hour'', c.shows, ''epoch'')), '
            'days_until = least(p.days_until, date_bin(''1 day'', c.shows, ''epoch'')) '
            'from clock as c cross join lateral (select date_bin(''1 minute'', c.shows, '
            '''epoch'') - interval ''1 us'' as began) as m;'
    from rota.stats_progress as p where p.counted_until > rota.now() + interval '1 minute';
$$;

/* The newest dead jobs, by their errors; of many the groups are those of the newest 5000.  Then
 * those that died before, for as long as others wait for them.  And types whose jobs all
 * expired, as when no worker was there in time: that some expire beside others may be meant. */
create or replace function rota._examine_dead_jobs()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    (select case when g.jobs >= 1000 then 'critical' else 'warning' end,
        case when g.place <= 20 then format('%s%s of type %s in queue %s died in the last hour '
            'with %s, the last %s ago, such as job %s%s',
            case when g.examined >= 5000 then 'at least ' else '' end,
            case g.jobs when 1 then '1 job' else g.jobs::text || ' jobs' end, g.job_type,
            g.queue, rota._error_words(g.error_type, coalesce(g.only_error, g.message)),
            rota._ago(g.last_at), g.job_id, case when g.error_type =
                'lease_expired' then '. It may have killed its workers, and would again: find '
                'out before you retry it'
                when g.jobs = 1 then '; ' || rota._key_words(g.job_id) end) end,
        case when g.place > 20 then null
            when g.error_type = 'lease_expired'
                then format('select * from rota.explain_job(%s);', g.job_id)
            when g.jobs = 1 then rota._retry_statement(g.job_id)
            else rota._retry_all(jsonb_build_object('queue', g.queue, 'job_type', g.job_type,
                'status', 'dead', 'is_discarded', false, 'error_type', g.error_type,
                'error', g.message, 'newer_than', '1 hour'), g.arguments, g.jobs,
                exists (select from rota.finished_jobs_dead as f offset 4999)) end
    from (
        select d.queue, d.job_type, d.error_type, rota.fold_error(d.last_error) as message,
            case when count(*) = 1 then min(d.last_error) end as only_error,
            count(*) as jobs, max(d.finished_at) as last_at, max(d.id) as job_id,
            rota._retry_arguments(array_agg(d.id)) as arguments,
            sum(count(*)) over () as examined,
            row_number() over (order by count(*) desc, max(d.finished_at) desc) as place
        from (
            select f.id, f.queue, f.job_type, f.error_type, f.last_error, f.finished_at
            from rota.finished_jobs_dead as f
            where f.finished_at > rota.now() - interval '1 hour' and f.discarded_at is null
            order by f.finished_at desc limit 5000
        ) as d
        group by 1, 2, 3, 4
    ) as g
    order by g.place)
    union all
    -- With if_parent_dead => 'wait', nothing else tells of them once the hour is over.
    (select 'warning', format('%s waiting for a retry of job %s of type %s in queue %s, which '
            'died %s ago with %s', rota._jobs_words(c.jobs, 1000), d.id, d.job_type, d.queue,
            rota._ago(d.finished_at), rota._error_words(d.error_type, d.last_error)),
        rota._retry_statement(d.id)
    from (
        select f.id, f.queue, f.job_type, f.error_type, f.last_error, f.finished_at
        from rota.finished_jobs_dead as f
        where f.finished_at <= rota.now() - interval '1 hour'
        order by f.finished_at desc limit 5000
    ) as d
    cross join lateral (
        select count(*) as jobs
        from (
            select from rota.dependencies as e
            join rota.jobs as j on j.id = e.job_id and j.status = 'blocked'
            where e.parent_id = d.id limit 1000
        ) as b
    ) as c
    where c.jobs > 0 order by d.finished_at desc limit 1000)
    union all
    (select 'warning', format('no job of type %s in queue %s succeeded in the last hour, and '
            '%s expired, %s of them before a worker began them, the last %s ago, such as job '
            '%s. If they are still of use, retry them', t.job_type, t.queue,
            case when e.jobs = 5000 then 'at least 5000' else e.jobs::text end, e.not_begun,
            rota._ago(e.last_at), e.job_id),
        rota._retry_all(jsonb_build_object('queue', t.queue, 'job_type', t.job_type,
            'status', 'cancelled', 'error_type', 'expired', 'newer_than', '1 hour'),
            e.arguments, e.jobs, exists (select from rota.finished_jobs_done as f offset 4999))
    from (
        select s.queue, s.job_type from rota.job_stats as s
        where s.step = 'minute' and s.starts_at > rota.now() - interval '1 hour'
          and s.outcome in ('succeeded', 'cancelled')
        group by s.queue, s.job_type having bool_and(s.outcome = 'cancelled')
        order by sum(s.total) desc limit 20
    ) as t
    cross join lateral (
        select count(*) as jobs, count(*) filter (where n.attempts = 0) as not_begun,
            max(n.finished_at) as last_at, max(n.id) as job_id,
            rota._retry_arguments(array_agg(n.id)) as arguments
        from (
            select f.id, f.job_type, f.error_type, f.attempts, f.finished_at
            from rota.finished_jobs_done as f
            where f.queue = t.queue and f.finished_at > rota.now() - interval '1 hour'
            order by f.finished_at desc limit 5000
        ) as n
        where n.job_type = t.job_type and n.error_type = 'expired'
    ) as e
    where e.jobs > 0 order by e.jobs desc);
$$;

/* How to retry ended jobs: many not all at once, which what they call may not bear; and with
 * those that were cancelled because of them, if there are any. */
create or replace function rota._retry_arguments(ended_ids bigint[])
    returns jsonb language sql stable as $$
    select jsonb_strip_nulls(jsonb_build_object(
        'spread', case when cardinality(ended_ids) >= 1000 then '10 minutes' end,
        'with_dependants', nullif(
            exists (select from rota._dependants(ended_ids, 'cancelled', 1000)), false)));
$$;

/* The statement that retries all jobs of a filter: one call, if that acts on all of them, in a
 * table that is not too large to be looked at as a whole; else call by call.  Where there are
 * many, each call is a transaction of its own, as claims need it; so it wants none around it.
 */
create or replace function rota._retry_all(
    filter jsonb, arguments jsonb, jobs bigint, is_large boolean
) returns text language plpgsql stable as $$
declare
    c_call constant text := format('rota.act_on_jobs(''retry'', %s%s',
        quote_literal(rota._escaped(filter::text)),
        case when arguments <> '{}' then ', ' || quote_literal(arguments::text) else '' end);
    c_body constant text := format('declare v_after_id bigint := 0; begin '
        'while v_after_id is not null loop select a.next_after_id into v_after_id from %s, '
        'after_id => v_after_id) as a;%s end loop; end', c_call,
        case when jobs >= 1000 then ' commit;' else '' end);
begin
    return case when jobs < 1000 and not is_large then format('select * from %s);', c_call)
        when position('$do$' in c_body) > 0 then format('do %L;', c_body)
        else format('do $do$ %s $do$;', c_body) end;
end $$;

create or replace function rota._examine_effects()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'warning', format('it is unknown whether %s happened, the newest of them %s %s of '
            'job %s: check, and record it with settle_effect()',
            case count(*) when 1 then '1 effect' else count(*)::text || ' effects' end,
            (array_agg(u.scope order by u.recorded_at desc))[1],
            (array_agg(u.key order by u.recorded_at desc))[1],
            (array_agg(u.job_id order by u.recorded_at desc))[1]),
        'select * from rota.unknown_effects order by recorded_at desc limit 20;'
    from (
        select e.scope, e.key, e.job_id, e.lease_token, e.recorded_at from rota.effects as e
        where e.completed_at is null order by e.recorded_at desc limit 1000
    ) as u
    -- While its lease runs, the job that has recorded it is still at it.
    where not rota._is_leased(u.job_id, u.lease_token)
      and not exists (select from rota.moved_jobs as t where t.job_id = u.job_id)
    having count(*) > 0;
$$;

create or replace function rota._examine_schedules()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    (select 'critical', format('schedule %s should have made a job %s ago%s', d.name,
            rota._ago(d.next_run_at), case when t.last_tick_at > d.next_run_at then ''
                else ', and no tick has run since. Start a worker or rota tick --loop' end),
        'select * from rota.tick();'
    from rota.job_definitions as d cross join rota.ticker_health as t
    where d.next_run_at < rota.now() - interval '1 minute'
    order by d.next_run_at limit 1000)
    union all
    -- A planned time is dealt with once, whatever the clock says later; and what was planned
    -- while it was ahead comes late.
    (select 'critical', format('schedules make no job until the clock of the server shows %s '
            'again, as it did before: %s of them, such as %s',
            rota._moment(max(case when d.last_run_at > rota.now() then d.last_run_at
                else d.next_run_at end)), count(*), min(d.name)),
        'delete from rota.occurrences where scheduled_for > rota.now() '
            'and outcome <> ''enqueued''; '
            'update rota.job_definitions as d set last_run_at = null, updated_at = rota.now(), '
            'anchored_at = coalesce(d.starts_at, least(d.anchored_at, rota.now())), '
            'next_run_at = (select n.n from rota.next_run(d.schedule, d.time_zone, '
            'starts_at => coalesce(d.starts_at, '
            'case d.kind when ''every'' then least(d.anchored_at, rota.now()) end)) '
            'as n (n) where d.is_enabled '
            'and (d.next_run_at is not null or d.kind <> ''after'') '
            'and n.n <= coalesce(d.ends_at, ''infinity'')) '
            'where d.last_run_at > rota.now() or d.updated_at > rota.now() '
            'or exists (select from rota.finished_jobs as f where f.id = d.last_job_id '
            'and f.finished_at between rota.now() and d.next_run_at);'
    from rota.job_definitions as d
    -- Asked once, and not for each of very many.
    cross join (select rota.now() + interval '1 minute' as soon offset 0) as n
    where d.is_enabled and (
        d.last_run_at > n.soon
        or d.updated_at > n.soon and d.next_run_at > n.soon - interval '1 minute'
        or d.kind = 'after' and d.next_run_at > n.soon and exists (
            select from rota.finished_jobs as f where f.id = d.last_job_id
              and f.finished_at between n.soon and d.next_run_at
        )) having count(*) > 0)
    union all
    -- An update of the server or of tzdata may have changed the rules since it was planned.
    -- Those come first that run next.
    (select case when w.error is not null then 'critical' else 'warning' end,
        case when w.error is not null
            then format('schedule %s will make no job%s: %s. Correct it with schedule_job() or '
                'rota schedule add %s', d.name, ' at ' || rota._moment(d.next_run_at),
                rota._one_line(w.error), d.name)
            else format('schedule %s is planned for %s, but by the present rules of %s it is '
                'due at %s', d.name, rota._moment(d.next_run_at), d.time_zone,
                rota._moment(w.planned))
        end,
        case when w.error is null
            then format('select rota.disable_schedule(%s); select rota.enable_schedule(%1$s);',
                rota._literal(d.name)) end
    from (
        select e.* from rota.job_definitions as e
        where e.next_run_at is not null order by e.next_run_at limit 100
    ) as d
    cross join rota._schedule_plan(d) as w
    where w.error is not null or d.kind = 'cron' and w.planned <> d.next_run_at
      and d.next_run_at > rota.now() + interval '1 minute' and d.updated_at <= rota.now()
    order by d.next_run_at)
    union all
    (select 'warning', format('schedule %s was disabled %s ago by an error: %s%s', d.name,
            rota._ago(d.disabled_at), rota._one_line(d.last_error),
            '. Correct it with schedule_job() or rota schedule add ' || case
                when w.error is not null then d.name end),
        case when w.error is null
            then format('select rota.enable_schedule(%s);', rota._literal(d.name)) end
    from rota.job_definitions as d
    cross join rota._schedule_plan(d) as w
    where not d.is_enabled and d.disabled_by is null
    order by d.disabled_at limit 1000)
    union all
    -- A job that was deleted by hand never ends.
    (select 'warning', format('schedule %s makes no job until job %s ends, which is gone',
            d.name, d.last_job_id),
        format('select rota.disable_schedule(%s); select rota.enable_schedule(%1$s);',
            rota._literal(d.name))
    from (
        select e.* from rota.job_definitions as e
        where e.is_enabled and e.kind = 'after' and e.next_run_at is null
          and e.last_job_id is not null
          and not exists (select from rota.jobs as j where j.id = e.last_job_id)
          and not exists (
            select from rota.pending_checks as c
            where c.kind = 'schedule' and c.subject = e.name
          )
        limit 1000
    ) as d
    where exists (select from rota._schedule_plan(d) as w where w.planned is not null)
    order by d.name);
$$;

/* When a schedule would be planned now, or what a tick will stumble over. */
create or replace function rota._schedule_plan(
    definition rota.job_definitions, out planned timestamptz, out error text
) language plpgsql stable as $$
begin
    planned := rota._plan_next(definition, rota.now());
exception when others then
    error := sqlerrm;
end $$;

/* Who keeps vacuum from removing what ended: a transaction, a standby, a slot or a prepared
 * transaction that is older than the dead rows.  Since when is hidden from an owner who may not
 * see other roles' sessions; then the number of transactions since tells. */
create or replace function rota._examine_horizon()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select case when h.open_for > interval '1 hour' or h.xids > 10000000 then 'critical'
            else 'warning' end,
        format('%s holds a snapshot, %s transactions old; %s dead rows of rota''s tables '
            'cannot be removed meanwhile, and claims have to walk past them', h.who, h.xids, (
                select sum(pg_stat_get_dead_tuples(c.oid)) from pg_class as c
                where c.relnamespace = 'rota'::regnamespace and c.relkind = 'r'
            )), h.remedy
    from (
        select format(case a.backend_type when 'walsender'
            then 'a query on the standby of %s, which you have to end there,'
            else '%s' end, rota._session_words(a.pid)) as who,
            case when a.backend_type is distinct from 'walsender'
                then format('select pg_terminate_backend(%s);', a.pid) end as remedy,
            rota.now() - a.xact_start as open_for,
            greatest(age(a.backend_xmin), age(a.backend_xid)) as xids
        from pg_stat_activity as a
        where a.pid <> pg_backend_pid() and num_nonnulls(a.backend_xmin, a.backend_xid) > 0
          and a.backend_type is distinct from 'autovacuum worker'
          and coalesce(a.datname, current_database()) = current_database()
        union all
        select format('prepared transaction %L of %s', p.gid, p.owner),
            'rollback prepared ' || rota._literal(p.gid) || ';', rota.now() - p.prepared,
            age(p.transaction)
        from pg_prepared_xacts as p where p.database = current_database()
        union all
        select format('replication slot %s, %s,', s.slot_name,
                case when s.active then 'which a standby reads, where you have to end a query'
                    else 'which no client reads' end),
            case when not s.active
                then format('select pg_drop_replication_slot(%L);', s.slot_name) end,
            null, age(s.xmin)
        from pg_replication_slots as s where s.xmin is not null
    ) as h
    where coalesce(h.open_for > interval '5 minutes', h.xids >= 100000)
    order by h.xids desc limit 10;
$$;

/* Vacuum gives the pages of an index back to the index and not to the disk, and pages with a
 * few entries stay.  Vacuum has counted both, the entries and the pages they are in. */
create or replace function rota._examine_indexes()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'warning', format('index %s takes %s for about %s entries: scans of it read many '
            'useless pages', i.name, pg_size_pretty(i.bytes), i.entries),
        format('reindex index concurrently %s;', i.name)
    from (
        select x.indexrelid::regclass::text as name, c.reltuples::bigint as entries,
            c.relpages * current_setting('block_size')::bigint as bytes
        from pg_index as x join pg_class as t on t.oid = x.indrelid
        join pg_class as c on c.oid = x.indexrelid
        where t.relnamespace = 'rota'::regnamespace and c.relkind = 'i'
    ) as i
    where i.bytes > 32 * 1024 * 1024 and i.entries >= 0
      -- An entry takes about 40 to 400 bytes; half of each page may be free in good order.
      and i.bytes > 1000 * i.entries
    order by i.bytes desc limit 10;
$$;

create or replace function rota._examine_vacuum()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    (select 'critical', format('%s is off, so no table is vacuumed: tables and indexes grow '
            'with every job, and claims become slower with every job%s', s.name, case
            when s.source = 'command line' then '. The command line of the server turns it '
                'off: remove it there'
            when n.step = 2 then '. The server reads the setting with this statement'
            else ''
        end),
        case
            when s.source = 'command line' then null
            when n.step = 1 then format('alter system set %I = on;', s.name)
            else 'select pg_reload_conf();'
        end
    from pg_settings as s cross join generate_series(1, 2) as n (step)
    where s.name in ('autovacuum', 'track_counts') and s.setting = 'off'
      and (n.step = 1 or s.source <> 'command line')
    order by s.name, n.step)
    union all
    -- Of any database.  From here on vacuum hurries (vacuum_failsafe_age).
    (select 'critical', format('database %s is %s %s behind: vacuum has not frozen its rows, '
            'and near 2^31 the server refuses whatever writes. End what horizon tells of, and '
            'what else is as old in pg_prepared_xacts or pg_replication_slots, there also as '
            'catalog_xmin; then a superuser vacuums all of %1$s',
            d.datname, a.age, a.what),
        case when d.datname = current_database() then 'vacuum;' end
    from pg_database as d
    cross join lateral (
        values ('transactions', age(d.datfrozenxid)), ('multixacts', mxid_age(d.datminmxid))
    ) as a (what, age)
    where a.age > 1600000000 order by a.age desc, d.datname <> current_database())
    union all
    (with tables as (
        select c.oid::regclass::text as name, pg_stat_get_dead_tuples(c.oid) as dead,
            pg_stat_get_live_tuples(c.oid) as live,
            pg_stat_get_mod_since_analyze(c.oid) as changed,
            greatest(pg_stat_get_last_vacuum_time(c.oid),
                pg_stat_get_last_autovacuum_time(c.oid)) as vacuumed_at,
            greatest(pg_stat_get_last_analyze_time(c.oid),
                pg_stat_get_last_autoanalyze_time(c.oid)) as analyzed_at,
            -- An act on very many jobs leaves as much, and the next round takes it away.
            rota.now() - interval '5 minutes' as late
        from pg_class as c where c.relnamespace = 'rota'::regnamespace and c.relkind = 'r'
    )
    (select 'warning', format('table %s has %s dead rows and %s live ones, and was %s',
            t.name, t.dead, t.live,
            coalesce('vacuumed ' || rota._ago(t.vacuumed_at) || ' ago', 'never vacuumed')),
        format('vacuum (analyze) %s;', t.name)
    from tables as t
    where t.dead > 50000 + t.live and t.vacuumed_at >= t.late is not true
    order by t.dead desc limit 5)
    union all
    (select 'warning', format('statistics of table %s are stale: %s rows changed since '
            'they were taken, and %s are live', t.name, t.changed, t.live),
        format('analyze %s;', t.name)
    from tables as t
    where t.changed > 100000 + 2 * t.live and t.analyzed_at >= t.late is not true
    order by t.changed desc limit 5));
$$;

/* Of a partition that was detached by hand, the days go to the default partition, from where
 * the remedy takes them into it. */
create or replace function rota._examine_partitions()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'warning', format('rows are in %s, because the partition of their time was not '
            'made in time: they are purged one by one. Call tick() in a transaction of its '
            'own', d.name),
        'select * from rota.tick();'
    from (
        select 'rota.finished_jobs_done_default' as name
        where exists (select from rota.finished_jobs_done_default)
        union all
        select 'rota.job_errors_default' where exists (select from rota.job_errors_default)
    ) as d
    union all
    select 'warning', format('old rows are not purged, because the archive has lost its table '
            '%I.rota_rows', a.schema),
        format('create schema if not exists %I authorization %I; '
            'select rota.set_archive(%L);', a.schema, current_user, a.schema)
    from rota.archive as a where to_regclass(format('%I.rota_rows', a.schema)) is null
    union all
    -- One that keeps years has a thousand, and a look-up by id locks each with its indexes.
    select 'warning', format('to look up a job by its id takes %s locks, for the history has '
            '%s tables, and the server has room for %s: transactions of %s sessions at once '
            'fill it, and others fail with out of shared memory. Raise '
            'max_locks_per_transaction, which needs a restart, or keep finished jobs for less '
            'time and archive them',
            h.locks, h.tables, h.room, h.room / h.locks),
        format('alter system set max_locks_per_transaction = %s;',
            ceil(20.0 * h.locks / h.sessions))
    from (
        select count(*) as locks, count(distinct t.relid) as tables, l.sessions,
            l.sessions * current_setting('max_locks_per_transaction')::bigint as room
        from (
            select current_setting('max_connections')::bigint
                + current_setting('max_prepared_transactions')::bigint as sessions
        ) as l
        cross join pg_partition_tree('rota.finished_jobs') as t
        cross join lateral (
            select t.relid as id
            union all
            select x.indexrelid from pg_index as x where x.indrelid = t.relid
        ) as r
        group by l.sessions
    ) as h
    where 20 * h.locks > h.room
    union all
    select 'critical', format('table rota.%s is detached: its rows are not in the history, and '
            'are never purged', d.name),
        format('do $do$ begin %s lock table rota.%2$I in access exclusive mode; '
            'with late as (delete from rota.%3$I as f where f.%4$I >= %5$L and f.%4$I < %6$L '
            'returning f.*) insert into rota.%7$I select l.* from late as l; '
            'alter table rota.%2$I attach partition rota.%7$I for values from (%5$L) to '
            '(%6$L); end $do$;', d.finalize, d.parent, d.parent || '_default', d.time_column,
            to_char(d.day, 'YYYY-MM-DD 00:00:00+00'),
            to_char(d.day + d.days, 'YYYY-MM-DD 00:00:00+00'), d.name)
    from (
        select c.relname as name, p.name as parent, p.time_column, p.days,
            to_date(right(c.relname, 8), 'YYYYMMDD') as day,
            (
                select format('alter table rota.%I detach partition rota.%I finalize;', p.name,
                    c.relname)
                from pg_inherits as i where i.inhrelid = c.oid
            ) as finalize
        from rota._partitioned() as p
        join pg_class as c on c.relname ~ ('^' || p.name || '_[0-9]{8}$')
        where c.relnamespace = 'rota'::regnamespace and c.relkind = 'r'
          and not exists (
            select from pg_inherits as i
            where i.inhrelid = c.oid and not i.inhdetachpending
          )
    ) as d;
$$;

/* Healthy listeners read at once, so that the queue of the whole server is all but empty. */
create or replace function rota._examine_notifications()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select case when u.usage > 0.25 then 'critical' else 'warning' end,
        format('the notification queue is %s %% full: a listening session does not read, for '
            'example because it is in a long transaction. From 50 %% on rota notifies '
            'nobody and workers only poll, and at 100 %% commits that notify fail. %s',
            round(u.usage::numeric * 100, 1),
            coalesce('The oldest transaction is that of ' || rota._session_words(u.pid),
                'A superuser finds the oldest transaction in pg_stat_activity')),
        'select pg_terminate_backend(' || u.pid::text || ');'
    from (
        select pg_notification_queue_usage() as usage, (
            select a.pid from pg_stat_activity as a
            where a.xact_start is not null and a.pid <> pg_backend_pid()
            order by a.xact_start limit 1
        ) as pid
    ) as u
    where u.usage > 0.01;
$$;

/* Behind its rows is a sequence that a logical replication, or a restore of single tables, has
 * left out: then ids are given for the second time.  Those of other databases do not count. */
create or replace function rota._examine_sequences()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'critical', format('sequence rota.%s is at %s of %s', s.sequencename, s.last_value,
        s.max_value), null::text
    from pg_sequences as s
    where s.schemaname = 'rota' and s.last_value > s.max_value / 2
    union all
    select 'critical', format('sequence rota.%s is behind, at %s, but %s is already taken: '
            'the next row fails, or gets the id of another', t.name, t.last_value, t.taken),
        format('select setval(%L, %s);', 'rota.' || t.name, t.last_value
            + ceil((t.taken - t.last_value)::numeric / t.step) * t.step)
    from (
        select 'jobs_id_seq' as name, rota._id_step() as step,
            q.last_value - case when q.is_called then 0 else rota._id_step() end as last_value,
            (
                select max(i.id)
                from (
                    (select j.id from rota.jobs as j order by j.id desc limit 1000)
                    union all
                    (select f.id from rota.finished_jobs as f order by f.id desc limit 1000)
                ) as i
                where coalesce(rota.database_number() = rota.database_number_of(i.id), true)
            ) as taken
        from rota.jobs_id_seq as q
        union all
        select q.sequencename, 1, coalesce(q.last_value, 0), case q.sequencename
            when 'pending_checks_id_seq' then (select max(c.id) from rota.pending_checks as c)
            when 'key_starts_id_seq' then (select max(k.id) from rota.key_starts as k)
            when 'lane_starts_id_seq' then (select max(l.id) from rota.lane_starts as l)
            when 'reruns_id_seq' then (select max(r.id) from rota.reruns as r)
            -- There may be very many, and those of a copy are nearly all above it.
            when 'limit_slots_version_seq' then (
                select max(f.version)
                from (select s.version from rota.limit_slots as s limit 100000) as f)
        end
        from pg_sequences as q where q.schemaname = 'rota'
    ) as t
    where t.taken > t.last_value;
$$;

create or replace function rota._examine_versions()
    returns table (severity text, evidence text, remedy text) language sql stable as $$
    select 'warning', format('worker %s (pid %s on %s) has version %s, and the database '
        '%s: %s', w.worker, w.pid, w.host, w.version, rota.version(), case
            when w.version !~ '^[0-9]{1,9}([.][0-9]{1,9})*$'
                then 'upgrade the older of the two'
            when string_to_array(w.version, '.')::integer[]
                < string_to_array(rota.version(), '.')::integer[]
                then format('install the package rota %s where it runs, and restart it',
                    rota.version())
            else 'upgrade the database, with rota install of the newer package'
        end), null::text
    from rota._workers as w
    where w.is_live and w.version <> rota.version()  -- null in other languages
    order by w.worker limit 20;
$$;
