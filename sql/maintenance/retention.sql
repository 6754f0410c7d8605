/*
 * maintenance/retention.sql -- partitions ahead, and forgetting behind.
 *
 * Nothing is kept for ever unless somebody asks for it.  The horizon is the longest keep of
 * any queue; a day that lies wholly behind it is dropped as one partition.  Only queues that
 * keep less than the horizon, dead jobs, and days without a partition are deleted row by row,
 * a few thousand a call.
 *
 * Records of effects carry the end of their time themselves.
 *
 * Making and dropping a partition locks the parent for a moment.  It waits for that lock no
 * longer than a tenth of a second, so that finishing jobs never queue up behind it; what does
 * not succeed now will at a later tick.  And it is done only when tick() is alone in its
 * transaction: a forgotten transaction must not hold such a lock.  (Several statements sent as
 * one string are one transaction that cannot be told from one statement: send tick() alone.)
 *
 * Each step is a subtransaction of its own, and so is each queue and each partition.  A view
 * that somebody has made on one partition, or a row that cannot be deleted, stays with a
 * warning, and everything else goes its way.
 */

create or replace function rota._retain(is_alone boolean, is_busy boolean)
    returns table (
        jobs_deleted integer,
        partitions_created integer,
        partitions_dropped integer
    )
    language plpgsql
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set lock_timeout = '100ms'
as $$
declare
    v_now constant timestamptz := rota.now();
    v_step text;
    v_others integer := 0;
begin
    jobs_deleted := 0;
    partitions_created := 0;
    partitions_dropped := 0;

    -- At most once in ten seconds, and by one caller at a time.
    if not rota._record_tick(_retain.is_alone, _retain.is_busy) then
        return next;
        return;
    end if;

    foreach v_step in array array[
        'jobs', 'errors', 'keys', 'effects', 'fires', 'limits', 'workers', 'pg_cron',
        'partitions'
    ] loop
        begin
            if v_step = 'jobs' then
                jobs_deleted := rota._delete_old_jobs(5000);
            elsif v_step = 'errors' then
                v_others := v_others + rota._delete_old_errors(5000);
            elsif v_step = 'keys' then
                v_others := v_others + rota._forget_keys(5000);
            elsif v_step = 'effects' then
                v_others := v_others + rota._forget_effects(5000);
            elsif v_step = 'fires' then
                v_others := v_others + rota._forget_fires(5000);
            elsif v_step = 'limits' then
                perform rota._forget_limits(5000);
            elsif v_step = 'workers' then
                delete from rota.workers as w where w.last_seen_at < v_now - interval '1 day';
            elsif v_step = 'pg_cron' then
                perform rota._forget_cron_runs(10000);
            elsif _retain.is_alone then
                partitions_created := rota._create_partitions();
                partitions_dropped := rota._drop_partitions();
            end if;
        exception
            when others then
                raise warning 'retention of % failed, to be tried again: %', v_step, sqlerrm;
        end;
    end loop;

    if greatest(jobs_deleted, v_others, partitions_created, partitions_dropped) > 0 then
        -- There may be more.
        update rota.upkeep as u
        set done_at = v_now,
            done_by = t.done_by
        from rota.upkeep as t
        where u.task = 'retention'
          and t.task = 'tick';
    end if;
    return next;
end;
$$;

/* How long the queue that keeps longest keeps what ended well. */
create or replace function rota._horizon()
    returns interval
    language plpgsql
    stable
as $$
begin
    return greatest('7 days', (select max(q.keep_finished) from rota.queues as q));
end;
$$;

/* Delete up to max_rows rows that no partition drop will take soon enough. */
create or replace function rota._delete_old_jobs(max_rows integer)
    returns integer
    language plpgsql
as $$
declare
    v_now constant timestamptz := rota.now();
    v_oldest constant timestamptz := v_now - rota._horizon();
    v_statuses text[];
    v_queue text;
    v_before timestamptz;
    v_ids bigint[];
    v_deleted integer := 0;
begin
    for v_statuses, v_queue, v_before in
        select r.statuses, r.queue, v_now - r.keep from rota._rows_to_delete() as r
    loop
        begin
            v_ids := array(
                select f.id
                from rota.finished_jobs as f
                where f.status = any(v_statuses)
                  and f.queue = v_queue
                  and f.finished_at < v_before
                  and not rota._is_waited_for(f.id, f.first_job_id)
                order by f.finished_at
                limit _delete_old_jobs.max_rows - v_deleted
                for update skip locked
            );
            delete from rota.finished_jobs as f
            where f.id = any(v_ids)
              and f.status = any(v_statuses)
              and f.finished_at < v_before;
            v_deleted := v_deleted + cardinality(v_ids);
        exception
            when others then
                raise warning 'old jobs of queue % stay for now: %', v_queue, sqlerrm;
        end;
        exit when v_deleted >= _delete_old_jobs.max_rows;
    end loop;

    -- The default partition is never dropped.
    v_ids := array(
        select f.id
        from rota.finished_jobs_done_default as f
        where f.finished_at < v_oldest
        limit _delete_old_jobs.max_rows - v_deleted
        for update skip locked
    );
    delete from rota.finished_jobs_done_default as f
    where f.id = any(v_ids)
      and f.finished_at < v_oldest;
    return v_deleted + cardinality(v_ids);
end;
$$;

/* Whether somebody waits for an ended job, or its run: for its retry, if it is dead. */
create or replace function rota._is_waited_for(job_id bigint, first_job_id bigint)
    returns boolean
    language plpgsql
    stable
as $$
begin
    return exists (
        select
        from rota.dependencies as d
        where d.parent_id in (_is_waited_for.job_id, _is_waited_for.first_job_id)
    ) or exists (
        select from rota.stuck_keys as s where s.job_id = _is_waited_for.job_id
    );
end;
$$;

create or replace function rota._delete_old_errors(max_rows integer)
    returns integer
    language plpgsql
as $$
declare
    v_deleted integer;
begin
    delete from rota.job_errors as e
    where (e.job_id, e.lease_token) in (
        select o.job_id, o.lease_token
        from rota.job_errors as o
        where o.failed_at < rota.now() - greatest(
            '90 days', (select max(q.keep_dead) from rota.queues as q))
        order by o.failed_at
        limit _delete_old_errors.max_rows
        for update skip locked
    );
    get diagnostics v_deleted = row_count;
    return v_deleted;
end;
$$;

create or replace function rota._forget_keys(max_rows integer)
    returns integer
    language plpgsql
as $$
declare
    v_deleted integer;
begin
    delete from rota.idempotency_keys as k
    where (k.idempotency_key, k.key_scope) in (
        select o.idempotency_key, o.key_scope
        from rota.idempotency_keys as o
        where o.kept_until < rota.now()
        order by o.kept_until
        limit _forget_keys.max_rows
        for update skip locked
    );
    get diagnostics v_deleted = row_count;
    return v_deleted;
end;
$$;

/* Delete up to max_rows records of effects; one whose lease is held is still needed. */
create or replace function rota._forget_effects(max_rows integer)
    returns integer
    language plpgsql
as $$
declare
    v_old tid[];
    v_deleted integer;
begin
    v_old := array(
        select e.ctid
        from rota.effects as e
        where e.kept_until < rota.now()
          and (e.completed_at is not null or not rota._is_leased(e.job_id, e.lease_token))
        order by e.kept_until
        limit _forget_effects.max_rows
        for update skip locked
    );
    -- Asked again when it is locked: a new lease may just have taken it over.
    delete from rota.effects as e
    where e.ctid = any(v_old)
      and (e.completed_at is not null or not rota._is_leased(e.job_id, e.lease_token));
    get diagnostics v_deleted = row_count;
    return v_deleted;
end;
$$;

/* Which queues have history, and how long each keeps it; a loose scan, one probe a queue. */
create or replace function rota._rows_to_delete()
    returns table (statuses text[], queue text, keep interval)
    language plpgsql
    stable
as $$
begin
    return query
    with recursive trees (statuses) as (
        values ('{dead}'::text[]), ('{succeeded,cancelled}')
    ),
    found (statuses, queue) as (
        select t.statuses, (
            select f.queue
            from rota.finished_jobs as f
            where f.status = any(t.statuses)
            order by f.queue
            limit 1
        )
        from trees as t
        union all
        select n.statuses, (
            select f.queue
            from rota.finished_jobs as f
            where f.status = any(n.statuses)
              and f.queue > n.queue
            order by f.queue
            limit 1
        )
        from found as n
        where n.queue is not null
    )
    select
        n.statuses, n.queue,
        case
            when n.statuses = '{dead}' then coalesce(q.keep_dead, '90 days')
            else coalesce(q.keep_finished, '7 days')
        end
    from found as n
    left join rota.queues as q on q.queue = n.queue
    where n.queue is not null
      and (n.statuses = '{dead}' or coalesce(q.keep_finished, '7 days') < rota._horizon());
end;
$$;

/*
 * One partition for each of the next days; returns how many were made.  Not for a day that has
 * begun or is just about to: a job that ends meanwhile may be on its way to the default one.
 */
create or replace function rota._create_partitions()
    returns integer
    language plpgsql
as $$
declare
    v_today constant date := ((rota.now() + '1 minute') at time zone 'UTC')::date;
    v_created integer := 0;
begin
    -- Attaching a partition reads the default one under a lock that endings wait for.
    if (
        select count(*) > 100000
        from (select from rota.finished_jobs_done_default as f limit 100001) as f
    ) then
        raise warning 'partitions are made again when finished_jobs_done_default is small';
        return 0;
    end if;

    for v_day in 1..7 loop
        v_created := v_created + rota._create_partition(v_today + v_day);
    end loop;
    return v_created;
exception
    when lock_not_available then
        return 0;
end;
$$;

/* The partition of a day; returns how many were made. */
create or replace function rota._create_partition(day date)
    returns integer
    language plpgsql
as $$
-- It makes a table, which plpgsql_check does not see in a dynamic statement.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_name constant text := 'finished_jobs_done_' || to_char(_create_partition.day, 'YYYYMMDD');
    -- As texts that are the same in every session.
    v_from constant text := to_char(_create_partition.day, 'YYYY-MM-DD 00:00:00+00');
    v_to constant text := to_char(_create_partition.day + 1, 'YYYY-MM-DD 00:00:00+00');
begin
    -- Rows that came before their partition stay in the default one; so does their day.
    if to_regclass('rota.' || v_name) is not null or exists (
        select
        from rota.finished_jobs_done_default as f
        where f.finished_at >= v_from::timestamptz
          and f.finished_at < v_to::timestamptz
    ) then
        return 0;
    end if;
    -- The owner may give what he makes to everybody, and has not meant this.
    execute format(
        'create table rota.%1$I (like rota.finished_jobs_done including constraints);'
        'alter table rota.finished_jobs_done attach partition rota.%1$I '
        'for values from (%2$L) to (%3$L);'
        'comment on table rota.%1$I is %4$L;'
        'revoke all on table rota.%1$I from public;'
        'revoke all on type rota.%1$I from public',
        v_name, v_from, v_to, 'Succeeded and cancelled jobs of one day.');
    return 1;
end;
$$;

/* Drop the days that lie wholly behind the horizon; returns how many. */
create or replace function rota._drop_partitions()
    returns integer
    language plpgsql
as $$
-- It drops a table, which plpgsql_check does not see in a dynamic statement.
-- @plpgsql_check_options: performance_warnings = off
declare
    v_last constant date := ((rota.now() - rota._horizon()) at time zone 'UTC')::date - 1;
    v_partition regclass;
    v_dropped integer := 0;
begin
    for v_partition in
        select i.inhrelid::regclass
        from pg_inherits as i
        join pg_class as c on c.oid = i.inhrelid
        where i.inhparent = 'rota.finished_jobs_done'::regclass
          and c.relname ~ '^finished_jobs_done_[0-9]{8}$'
          and c.relname <= 'finished_jobs_done_' || to_char(v_last, 'YYYYMMDD')
        order by c.relname
        limit 10
    loop
        begin
            execute format('drop table %s', v_partition);
            v_dropped := v_dropped + 1;
        exception
            when lock_not_available then
                return v_dropped;
            when others then
                raise warning 'partition % stays for now: %', v_partition, sqlerrm;
        end;
    end loop;

    return v_dropped;
end;
$$;
