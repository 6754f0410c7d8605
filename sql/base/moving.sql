/*
 * base/moving.sql -- whether a queue moves, and where a job went.
 *
 * Asked only where something is set for the queue (base/configured.sql) or a job is not here.
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
        hint = 'Until it has settled, enqueue jobs with a key there: they come too.';
end $$;

/* For a job that is not here: tell where it went, if it did. */
create or replace function rota._raise_moved(job_id bigint)
    returns void language plpgsql as $$
declare
    v_moved record;
begin
    select m.database, m.new_job_id into v_moved
    from (
        select o.job_id, m.database, null::bigint as new_job_id from rota.outgoing_jobs as o
        join rota.queue_moves as m on m.move_id = o.move_id
        union all
        select t.job_id, t.database, t.new_job_id from rota.moved_jobs as t
    ) as m
    where m.job_id = _raise_moved.job_id limit 1;
    if not found then return; end if;
    raise exception using errcode = 'RT016',
        message = case
            when v_moved.new_job_id is null
                then format('job %s is on its way to database %s', job_id, v_moved.database)
            else format('job %s is in database %s now, as job %s', job_id, v_moved.database,
                v_moved.new_job_id)
        end,
        detail = concat_ws(' ', v_moved.database, v_moved.new_job_id),
        hint = 'Its queue has moved: call that database.';
end $$;
