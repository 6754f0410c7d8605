/*
 * access/visible_rows.sql -- which rows of a table an observer sees who is confined to queues.
 *
 * Observers read some tables themselves.  Each of these has one policy: all rows for a role
 * that is confined to nothing, and else those of his queues; what is of no queue he does not
 * see.  The owner, as whom all functions and views run, is not asked; the views ask
 * visible_queues() themselves (operations/views.sql).
 */

do $$
declare
    v_table record;
begin
    for v_table in
        select t.name, t.sees
        from (
            values
                ('job_errors', 'queue = any(v.queues)'),
                ('stage_runs', 'queue = any(v.queues)'),
                ('queues', 'queue = any(v.queues)'),
                ('pipeline_stages', 'queue = any(v.queues)'),
                ('job_definitions', 'queue = any(v.queues)'),
                ('pauses', 'queue is null or queue = any(v.queues)'),
                ('limits', 'queue = any(v.queues)'),
                ('retry_rules', $q$queue in ('', '*') or queue = any(v.queues)$q$),
                ('retry_budgets', 'queue = any(v.queues)'),
                ('breakers', $q$queue in ('', '*') or queue = any(v.queues)$q$),
                ('workers', 'queues && v.queues'),
                ('worker_starts', 'false'),
                ('occurrences',
                    'exists (select from rota.job_definitions as d where d.name = definition)'),
                ('dependencies',
                    'exists (select from rota.job_runs as r where r.id = job_id)'),
                ('halted_keys',
                    'exists (select from rota.job_runs as r where r.id = job_id)'),
                ('effects', 'exists (select from rota.job_runs as r where r.id = job_id)'),
                ('audit_log', 'false'),
                ('queue_grants', 'false')
        ) as t (name, sees)
        where not exists (
            select from pg_policy as p
            where p.polrelid = ('rota.' || t.name)::regclass and p.polname = 'visible_rows'
        )
    loop
        execute format('create policy visible_rows on rota.%I for select using ('
            '(select rota.visible_queues()) is null or %s)', v_table.name,
            replace(v_table.sees, 'v.queues', '(select rota.visible_queues())::text[]'));
        execute format('alter table rota.%I enable row level security', v_table.name);
    end loop;
end;
$$;
