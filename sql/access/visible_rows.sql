/*
 * access/visible_rows.sql -- which rows of a table a confined observer sees.
 *
 * Observers read some tables directly.  Each of these has one policy: an unconfined role sees
 * all rows, a confined one those of its queues, but no rows that belong to no queue.  The
 * policy does not apply to the owner, as whom all functions and views run; the views call
 * visible_queues() themselves (operations/views.sql).
 */

do $$
declare
    v_table record;
begin
    for v_table in
        select n.name, t.sees
        from (
            values
                ('{job_errors,stage_runs,queues,pipeline_stages,job_definitions,limits,'
                    'retry_budgets,queue_moves,effects}', 'queue = any(v.queues)'),
                ('{moved_jobs}', 'exists (select from rota.queue_moves as m '
                    'where m.move_id = moved_jobs.move_id)'),
                ('{retry_rules,breakers,breaker_states}',
                    $q$queue in ('', '*') or queue = any(v.queues)$q$),
                ('{pauses}', 'queue is null or queue = any(v.queues)'),
                ('{workers}', 'queues && v.queues'),
                ('{occurrences}',
                    'exists (select from rota.job_definitions as d where d.name = definition)'),
                ('{dependencies,halted_keys}',
                    'exists (select from rota.job_runs as r where r.id = job_id)'),
                ('{worker_starts,audit_log,queue_grants,job_types}', 'false')
        ) as t (names, sees)
        cross join unnest(t.names::text[]) as n (name)
        where not exists (
            select from pg_policy as p
            where p.polrelid = ('rota.' || n.name)::regclass and p.polname = 'visible_rows'
        )
    loop
        execute format('create policy visible_rows on rota.%I for select using ('
            '(select rota.visible_queues()) is null or %s)', v_table.name,
            replace(v_table.sees, 'v.queues', '(select rota.visible_queues())::text[]'));
        execute format('alter table rota.%I enable row level security', v_table.name);
    end loop;
end $$;
