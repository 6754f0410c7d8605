/*
 * jobs/workers.sql -- which workers are alive.
 *
 * A worker reports itself so that people can see it.  Recovery never looks here: a lease ends
 * by the clock, whether or not its worker is known.
 */

create or replace function rota.report_worker(
    worker text, host text, pid integer, version text, queues text[],
    job_types text[] default null, concurrency integer default null,
    backend_pid integer default null
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_text('worker', worker, 255);
    -- It would call functions that are not there any more.
    if version ~ '^0[.]1[.]' then
        raise exception using errcode = 'feature_not_supported',
            message = format('the worker has rota %s, and this database needs 0.2.0 or newer',
                version),
            hint = 'Install the Python client of a checkout of this version.';
    end if;
    perform rota._check_names('queues', queues);
    perform rota._check_queues('worker', queues);
    perform rota._check_own_worker(worker);
    -- One that leaves takes none.
    if job_types <> '{}' then perform rota._check_names('job_types', job_types); end if;
    perform rota._check_number('concurrency', concurrency, 1, 2147483647, true);

    if not exists (
        select from rota.workers as w
        where w.worker = report_worker.worker
          and (w.host, w.pid) is not distinct from (rota._cut(report_worker.host, 255),
            report_worker.pid)
    ) then
        -- One that starts beside a report that is not committed has a row of its own.
        insert into rota.worker_starts as s (started_at, version, workers)
        values (
            case when pg_try_advisory_xact_lock(1919907963, 0)
                then date_bin('5 minutes', rota.now(), 'epoch') else rota.now() end,
            coalesce(rota._cut(report_worker.version, 255), ''), 1)
        on conflict on constraint worker_starts_pkey do update set workers = s.workers + 1;
    end if;
    insert into rota.workers as w (worker, host, pid, version, queues, job_types, concurrency,
        backend_pid)
    values (report_worker.worker, rota._cut(report_worker.host, 255), report_worker.pid,
        rota._cut(report_worker.version, 255), report_worker.queues, report_worker.job_types,
        report_worker.concurrency,
        -- A pooler has told the driver another number, and ends its sessions when it likes.
        case when report_worker.backend_pid = pg_backend_pid() then pg_backend_pid() end)
    on conflict on constraint workers_pkey do update
    set host = excluded.host, pid = excluded.pid, version = excluded.version,
        queues = excluded.queues, job_types = excluded.job_types,
        concurrency = excluded.concurrency, backend_pid = excluded.backend_pid,
        started_at = case when (w.host, w.pid) is distinct from (excluded.host, excluded.pid)
            then excluded.started_at else w.started_at end,
        last_seen_at = excluded.last_seen_at;
end $$;

comment on function rota.report_worker is
    'Record that a worker is alive, which job_types it takes (an empty array: it is stopping) '
    'and how many jobs at a time, for explain_job() and for readers of rota.worker_health; '
    'version is that of the Python client, null in another language; backend_pid, the server '
    'process of its connection as its driver knows it, shows at once when the worker is gone, '
    'except behind a pooler; raises 22023, 42501, and 0A000 for a version of the client that '
    'this database does not work with.';

create or replace function rota.deregister_worker(worker text)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_text('worker', worker, 255);
    perform rota._check_own_worker(worker);
    delete from rota.workers as w where w.worker = deregister_worker.worker;
end $$;

comment on function rota.deregister_worker is
    'Record that a worker has left; its leases stay as they are; raises 22023, 42501.';

/* Refuse to speak for a worker that takes none of the queues in which the caller may work. */
create or replace function rota._check_own_worker(worker text)
    returns void language plpgsql as $$
begin
    if exists (
        select from rota.workers as w
        where w.worker = _check_own_worker.worker
          and not w.queues && rota._allowed_queues('worker')
    ) then
        raise exception using errcode = 'insufficient_privilege',
            message = format('no right to speak for worker %L, which takes other queues',
                worker),
            hint = 'This role is confined to the queues that grant_queue() granted.';
    end if;
end $$;
