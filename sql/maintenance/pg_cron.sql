/*
 * maintenance/pg_cron.sql -- let pg_cron tick.
 *
 * pg_cron only wakes the ticker, and forgets what it missed while it was down.  What it runs is
 * always tick_loop(), which ticks again at once while there is more to do.  From 1.5 on pg_cron
 * counts in seconds, and a call is one tick; older ones know minutes only, and a call ticks for
 * a minute.  The entry is one of the owner of rota.
 *
 * The extension may be missing, so whatever touches it is dynamic.  It never empties its log
 * of runs; retention deletes ours after a day.
 */

create or replace function rota.start_ticker(every interval default '1 second')
    returns text language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_version constant text := rota._cron_version();
    v_schedule text; v_command text;
    v_is_served boolean := false;
begin
    perform rota._check_queues('operator', '{*}');
    select e.schedule, e.command into v_schedule, v_command
    from rota._cron_entry(v_version, start_ticker.every) as e;
    perform rota._check_cron(v_schedule, v_command);
    perform rota._lock_ticker();

    -- Scheduling again keeps an entry as active as it is, and where it was: under an earlier
    -- name of this database, or in the server from which this was restored.
    perform cron.unschedule(j.jobid) from cron.job as j
    where j.jobname = 'rota tick' and j.username = current_user
      and not (j.active and j.database = current_database()
        and j.nodeport = current_setting('port')::integer);
    -- An entry is always for the database that pg_cron serves, and no other is ever read.
    begin
        perform cron.schedule('rota tick', v_schedule, v_command);
        v_is_served := exists (
            select from cron.job as j
            where j.jobname = 'rota tick' and j.username = current_user
              and j.database = current_database()
        );
    exception when invalid_catalog_name then null;
    end;
    if not v_is_served then
        raise exception using
            errcode = 'feature_not_supported',
            message = format('pg_cron serves another database than %s, where its extension is',
                current_database()),
            hint = format('As a superuser: alter system set cron.database_name = %L, and '
                'restart the server', current_database());
    end if;
    insert into rota.maintenance (task, done_at) values ('pg_cron', rota.now())
    on conflict (task) do nothing;
    perform rota._audit('start_ticker', null, null, null,
        jsonb_build_object('schedule', v_schedule, 'command', v_command));
    return format('pg_cron %s runs "%s" at "%s" as %s', v_version, v_command, v_schedule,
        current_user);
end $$;

comment on function rota.start_ticker is
    'Let pg_cron tick, every 1 to 59 whole seconds or minutes, and return what was set up; '
    'raises 22023, 0A000.';

create or replace function rota.stop_ticker()
    returns boolean language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_queues('operator', '{*}');
    if not rota._has_cron() then return false; end if;
    perform rota._lock_ticker();
    perform cron.unschedule(j.jobid) from cron.job as j
    where j.jobname = 'rota tick' and j.username = current_user;
    if not found then return false; end if;
    perform rota._audit('stop_ticker', null);
    return true;
end $$;

comment on function rota.stop_ticker is
    'Remove what start_ticker() set up in pg_cron, and return whether there was anything.';

/* Wait for one that starts or stops it: pg_cron fails on an entry that is just going.  The row
 * is for that alone: ticks have others, and an advisory lock any login could keep. */
create or replace function rota._lock_ticker()
    returns void language plpgsql as $$
begin
    insert into rota.maintenance (task, done_at) values ('ticker', rota.now())
    on conflict (task) do nothing;
    perform from rota.maintenance as u where u.task = 'ticker' for update;
end $$;

/* Whether pg_cron is in this database, with names and a log, for the owner of rota to use. */
create or replace function rota._has_cron()
    returns boolean language sql stable as $$
    select exists (
        select from pg_extension as e join pg_namespace as n on n.nspname = 'cron'
        join pg_class as c on c.relnamespace = n.oid and c.relname = 'job_run_details'
        where e.extname = 'pg_cron' and has_schema_privilege(n.oid, 'usage')
    );
$$;

/* The version of the pg_cron of this database, else of the one that could be there. */
create or replace function rota._cron_version()
    returns text language sql stable as $$
    select coalesce((select e.extversion from pg_extension as e where e.extname = 'pg_cron'),
        (select a.default_version from pg_available_extensions as a where a.name = 'pg_cron'));
$$;

/* What to tell a pg_cron of this version, such as 1.4-1, to make it tick so often. */
create or replace function rota._cron_entry(version text, every interval)
    returns table (schedule text, command text) language plpgsql immutable as $$
declare
    v_version constant integer[] :=
        string_to_array(substring(_cron_entry.version from '^[0-9]+[.][0-9]+'), '.')::integer[];
    v_every constant numeric := extract(epoch from _cron_entry.every);
begin
    if v_every between 1 and 59 and v_every = trunc(v_every) then
        if v_version >= array[1, 5] then
            schedule := trunc(v_every)::text || ' seconds';
            command := format('call rota.tick_loop(%L, %1$L)', schedule);
        else
            schedule := '* * * * *';
            command := format('call rota.tick_loop(%L, %L)', '60 seconds',
                trunc(v_every)::text || ' seconds');
        end if;
    elsif v_every between 60 and 3540 and mod(v_every, 60) = 0 then
        -- The first tick, and more of them as long as there is more to do.
        schedule := concat_ws('/', '*', nullif(div(v_every, 60), 1)) || ' * * * *';
        command := format('call rota.tick_loop(%L, %L)', '30 seconds', '1 minute');
    else
        perform rota._refuse('every', format(
            'must be 1 to 59 seconds or minutes, and whole ones, got %s',
            coalesce(every::text, 'null')));
    end if;
    return next;
end $$;

/* Raises 0A000, with the remedy, if pg_cron cannot do it here. */
create or replace function rota._check_cron(schedule text, command text)
    returns void language plpgsql stable as $$
declare
    c_is_created constant boolean := exists (
        select from pg_extension as e where e.extname = 'pg_cron');
    c_database constant text := rota._cron_database();
    c_here constant text := format('As a superuser in this database: create extension pg_cron; '
        'grant usage on schema cron to %I;', current_user);
    c_there constant text := format(
        'as a superuser: select cron.schedule_in_database(%L, %L, %L, %L, %L);',
        'rota tick ' || current_database(), schedule, command, current_database(),
        current_user);
    v_problem text; v_remedy text;
begin
    select p.problem, p.remedy into v_problem, v_remedy
    from (values
        (true, not has_schema_privilege(to_regnamespace('cron'), 'usage'),
            format('role %s may not use pg_cron', current_user),
            format('As a superuser: grant usage on schema cron to %I;', current_user)),
        (true, not rota._has_cron(),
            format('pg_cron %s is too old: its entries have no names', rota._cron_version()),
            'As a superuser in this database: alter extension pg_cron update;'),
        (true, not (select r.rolcanlogin from pg_roles as r where r.rolname = current_user),
            format('pg_cron would have to log in as %s', current_user),
            format('As a superuser: alter role %I login;', current_user)),
        (false, c_database is null, 'pg_cron is not installed',
            format('Nothing needs it: every worker ticks, and so does "rota tick --loop". '
                'To have it, install its package, set shared_preload_libraries = '
                '''pg_cron'' and cron.database_name = %L, and restart the server. ',
                current_database()) || c_here),
        (false, c_database = '', 'pg_cron is not in this database',
            'Where it is, a superuser is told by: show cron.database_name. '
            'If that is another database, run there, ' || c_there || ' ' || c_here),
        (false, c_database = current_database(),
            'the extension pg_cron is not created in this database', c_here),
        (false, true, format('pg_cron is in database %s', c_database),
            'Run there, ' || c_there)
    ) as p (if_created, is_so, problem, remedy)
    where p.if_created = c_is_created and p.is_so limit 1;
    if found then
        raise exception using
            errcode = 'feature_not_supported', message = v_problem, hint = v_remedy;
    end if;
end $$;

/* Which database pg_cron is loaded for: null if it is not, empty if that may not be known. */
create or replace function rota._cron_database()
    returns text language plpgsql stable as $$
begin
    return current_setting('cron.database_name', true);
exception when insufficient_privilege then
    return '';
end $$;

/* Delete what pg_cron has logged about our runs that ended a day ago; looks once an hour. */
create or replace function rota._purge_cron_runs(max_rows integer)
    returns integer
    language plpgsql
    set enable_seqscan = on
    -- The log of others grows as it likes: an older plan may be one for a few rows.
    set plan_cache_mode = force_custom_plan as $$
declare
    v_now constant timestamptz := rota.now();
    v_deleted integer;
begin
    perform from rota.maintenance as u
    where u.task = 'pg_cron' and u.done_at not between v_now - interval '1 hour' and v_now
    for update skip locked;
    if not found or not rota._has_cron() then return 0; end if;

    delete from cron.job_run_details as d
    where d.runid = any(array(
        select o.runid from cron.job_run_details as o
        where o.database = current_database()
          and o.username = current_user and o.command like 'call rota.tick_loop(%'
          and coalesce(o.end_time, o.start_time) < v_now - interval '1 day'
        limit _purge_cron_runs.max_rows
    ));
    get diagnostics v_deleted = row_count;
    if v_deleted < max_rows then
        update rota.maintenance as u set done_at = v_now where u.task = 'pg_cron';
    end if;
    return v_deleted;
end $$;
