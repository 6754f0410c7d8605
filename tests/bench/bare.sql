/*
 * bare.sql -- the yardstick: a queue of five lines, as articles show it, twice.
 *
 * bare is the text-book form.  One table holds what waits, what runs and what is done, with an
 * index that begins with the status; a claim picks ids in a subquery of its update; the end of
 * a task is a second update, and its row stays.  The other form, lean, is the best that five
 * lines can be: the index holds only what waits, the ids go through an array, so that the
 * planner need not guess how many there are and its plan can be kept, and the end is a delete.
 *
 * Neither has a lease, a retry, a check of an argument or a history worth the name.
 */

create schema bare;

create table bare.tasks (
    id bigint generated always as identity primary key,
    task_type text not null,
    payload jsonb not null,
    status text not null default 'new',
    priority integer not null default 0,
    run_at timestamptz not null default clock_timestamp(),
    created timestamptz not null default clock_timestamp(),
    updated timestamptz not null default clock_timestamp(),
    begin_time timestamptz,
    end_time timestamptz,
    error_text text
);

create table bare.lean_tasks (like bare.tasks including all);

create index tasks_status_idx on bare.tasks (status, priority, run_at);
create index lean_tasks_new_idx on bare.lean_tasks (priority, run_at) where status = 'new';

create function bare.enqueue_task(task_type text, payload jsonb)
    returns bigint
    language plpgsql
as $$
declare
    v_id bigint;
begin
    insert into bare.tasks (task_type, payload)
    values (enqueue_task.task_type, enqueue_task.payload)
    returning id into v_id;
    return v_id;
end;
$$;

create function bare.enqueue_tasks(tasks jsonb)
    returns setof bigint
    language plpgsql
as $$
begin
    return query
    insert into bare.tasks (task_type, payload)
    select n.task_type, n.payload
    from jsonb_to_recordset(enqueue_tasks.tasks) as n (task_type text, payload jsonb)
    returning id;
end;
$$;

create function bare.claim_tasks(max_tasks integer)
    returns table (task_id bigint, task_type text, payload jsonb)
    language plpgsql
as $$
begin
    return query
    update bare.tasks as t
    set status = 'running', begin_time = clock_timestamp(), updated = clock_timestamp()
    where t.id in (
        select w.id
        from bare.tasks as w
        where w.status = 'new'
          and w.run_at <= now()
        order by w.priority, w.run_at
        limit claim_tasks.max_tasks
        for update skip locked
    )
    returning t.id, t.task_type, t.payload;
end;
$$;

create function bare.finish_tasks(task_ids bigint[])
    returns setof bigint
    language plpgsql
as $$
begin
    return query
    update bare.tasks as t
    set status = 'done', end_time = clock_timestamp(), updated = clock_timestamp()
    where t.id = any(finish_tasks.task_ids)
    returning t.id;
end;
$$;

create function bare.finish_task(task_id bigint)
    returns void
    language plpgsql
as $$
begin
    update bare.tasks as t
    set status = 'done', end_time = clock_timestamp(), updated = clock_timestamp()
    where t.id = finish_task.task_id;
end;
$$;

create function bare.lean_claim_tasks(max_tasks integer)
    returns table (task_id bigint, task_type text, payload jsonb)
    language plpgsql
    set plan_cache_mode = force_generic_plan
as $$
begin
    return query
    update bare.lean_tasks as t
    set status = 'running', begin_time = clock_timestamp(), updated = clock_timestamp()
    where t.id = any(array(
        select w.id
        from bare.lean_tasks as w
        where w.status = 'new'
          and w.run_at <= now()
        order by w.priority, w.run_at
        limit lean_claim_tasks.max_tasks
        for update skip locked
    ))
    returning t.id, t.task_type, t.payload;
end;
$$;

create function bare.lean_finish_tasks(task_ids bigint[])
    returns setof bigint
    language plpgsql
as $$
begin
    return query
    delete from bare.lean_tasks as t
    where t.id = any(lean_finish_tasks.task_ids)
    returning t.id;
end;
$$;

create function bare.lean_finish_task(task_id bigint)
    returns void
    language plpgsql
as $$
begin
    delete from bare.lean_tasks as t where t.id = lean_finish_task.task_id;
end;
$$;
