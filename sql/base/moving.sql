/*
 * base/moving.sql -- whether a queue moves, and where a job went.
 *
 * Called only if the queue has settings (base/configured.sql) or a job is not here.
 */

/* Refuse to make, in a queue that moves from here or has moved, what cannot go with it. */
create or replace function rota._check_stays(queue text, what text)
    returns void language plpgsql as $$
declare
    v_database integer;
begin
    select m.database into v_database from rota.queue_moves as m
    where m.queue = _check_stays.queue and m.direction = 'out';
    if not found then return; end if;
    raise exception using errcode = 'RT016',
        message = format('queue %s moves to database %s, and cannot have %s here', queue,
            v_database, what),
        detail = v_database::text, hint = 'Call the other database.';
end $$;

/* Refuse a job with a key in a queue that is just coming here: older ones are still to come. */
create or replace function rota._check_arrived(queue text, key text)
    returns void language plpgsql as $$
declare
    v_database integer;
begin
    if key is null then return; end if;
    select m.database into v_database from rota.queue_moves as m
    where m.queue = _check_arrived.queue and m.direction = 'in' and m.state = 'moving';
    if not found then return; end if;
    raise exception using errcode = 'RT016',
        message = format('queue %s is still coming from database %s', queue, v_database),
        detail = v_database::text,
        hint = 'Until it has settled, enqueue jobs with a key there: they are carried too.';
end $$;

/* Whether a queue moves, or has moved, to another database.  Its jobs wait for a mover alone,
 * which looks for late ones in the lanes: no time and no limit holds them here. */
create or replace function rota._moves_away(queue text)
    returns boolean language plpgsql stable as $$
begin
    return exists (
        select from rota.queue_moves as m
        where m.queue = _moves_away.queue and m.direction = 'out'
    );
end $$;

/* Whether a waiting job can leave: nothing here depends on it, it depends on nothing, and no
 * rerun of its key is still to be given to it by a check. */
create or replace function rota._may_go(job rota.jobs)
    returns boolean language plpgsql stable as $$
begin
    return job.status <> 'running' and num_nonnulls(job.pipeline, job.definition) = 0
        and not exists (
            select from rota.dependencies as d join rota.jobs as j on j.id = d.job_id
            where d.parent_id = job.id
        )
        and not (job.status = 'blocked'
            and exists (select from rota.dependencies as d where d.job_id = job.id))
        and not exists (
            select from rota.reruns as r
            where r.idempotency_key = job.idempotency_key and r.job_type = job.job_type
        );
end $$;

/* Refuse jobs that an operator brings to a queue, or back: those that would wait for one that
 * leaves or has left; in a queue that leaves those that cannot go with it, and would stay for
 * ever; in one that comes those that would be before others of their key. */
create or replace function rota._check_brought(job_ids bigint[])
    returns void language plpgsql as $$
begin
    -- Where nothing has moved, a job of a million parents is none to ask of each of them.
    if exists (select from rota.moved_jobs) then
        perform rota._raise_moved(d.parent_id) from rota.dependencies as d
        where d.job_id = any(_check_brought.job_ids)
          and exists (select from rota.moved_jobs as t where t.job_id = d.parent_id)
          and not exists (select from rota.jobs as p where p.id = d.parent_id);
    end if;
    if not exists (select from rota.queue_moves) then return; end if;
    perform rota._check_stays(p.queue, 'a job that others wait for')
    from rota.dependencies as d join rota.jobs as p on p.id = d.parent_id
    where d.job_id = any(_check_brought.job_ids);
    perform rota._check_stays(j.queue, 'a job of a schedule or pipeline, or that waits for '
        'another or is waited for,')
    from rota.jobs as j where j.id = any(_check_brought.job_ids) and not rota._may_go(j);
    perform rota._check_arrived(j.queue, coalesce(j.ordering_key, j.idempotency_key))
    from rota.jobs as j where j.id = any(_check_brought.job_ids);
end $$;

/* For a job that is not here: tell where it went, if it did. */
create or replace function rota._raise_moved(job_id bigint)
    returns void language plpgsql as $$
declare
    v_moved record;
begin
    select t.database, t.new_job_id into v_moved from rota.moved_jobs as t
    where t.job_id = _raise_moved.job_id;
    if not found then return; end if;
    raise exception using errcode = 'RT016',
        message = case
            when v_moved.new_job_id is null
                then format('job %s is on its way to database %s', job_id, v_moved.database)
            else format('job %s is in database %s now, as job %s', job_id, v_moved.database,
                v_moved.new_job_id)
        end,
        detail = concat_ws(' ', v_moved.database, v_moved.new_job_id),
        hint = case
            when v_moved.new_job_id is null
                then 'A mover brings it there; queue_move_status() says what that waits for.'
            else 'Its queue has moved: call that database.'
        end;
end $$;
