/*
 * jobs/workers.sql -- who is there.
 *
 * A worker reports itself so that people can see it.  Recovery never looks here: a lease ends
 * by the clock, whether or not anybody knows whose it was.
 */

create or replace function rota.report_worker(
    worker text,
    host text,
    pid integer,
    version text,
    queues text[]
)
    returns void language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_text('worker', worker, 255);
    perform rota._check_names('queues', queues);

    insert into rota.workers as w (worker, host, pid, version, queues)
    values (report_worker.worker, left(report_worker.host, 255), report_worker.pid,
        left(report_worker.version, 255), report_worker.queues)
    on conflict on constraint workers_pkey do update
    set host = excluded.host,
        pid = excluded.pid, version = excluded.version, queues = excluded.queues,
        started_at = case
            when (w.host, w.pid) is distinct from (excluded.host, excluded.pid)
                then excluded.started_at else w.started_at
        end,
        last_seen_at = excluded.last_seen_at;
end;
$$;

comment on function rota.report_worker is
    'Say that a worker is there, for people who look at rota.workers; raises 22023.';

create or replace function rota.deregister_worker(worker text)
    returns void language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform rota._check_text('worker', worker, 255);
    delete from rota.workers as w where w.worker = deregister_worker.worker;
end;
$$;

comment on function rota.deregister_worker is
    'Say that a worker has left; its leases are not touched; raises 22023.';
