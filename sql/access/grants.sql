/*
 * access/grants.sql -- who may do what.
 *
 * One list, _access(), says which kind of access needs which function, view or table.  All
 * public functions run with the owner's rights, so execute is all that a caller needs.
 * Observers may also select from views and from some tables (access/visible_rows.sql); no role
 * may write to one.  `create or replace` keeps old grants, so each install takes everything
 * away from public and from our roles, and grants it again from the list.  It also takes it
 * away from those to whom the owner gives what it makes (base/default_privileges.sql).
 *
 * Where the roles cannot be created, grant_statements() returns the same grants for any role.
 */

create or replace function rota._access()
    returns table (access text, kind text, name text) language sql immutable as $$
select a.access, l.kind, n.name
from (values
    ('{producer}', 'function', '{enqueue,enqueue_many,enqueue_to,start_pipeline,'
        'wait_for_result,find_live_keys}'),
    ('{worker}', 'function', '{claim_jobs,finish_job,finish_jobs,finish_and_claim,end_jobs,'
        'fail_job,snooze_job,release_jobs,heartbeat,heartbeat_jobs,set_progress,record_effect,'
        'complete_effect,withdraw_effect,effect_result,report_worker,deregister_worker,'
        'wait_for_jobs,stop_waiting,untaken_jobs,waiting_forwards,take_forwards,end_forwards,'
        'receive_jobs,waiting_moves,take_moves,receive_moves,end_moves}'),
    ('{worker,operator}', 'function', '{tick,sweep_stale_leases}'),
    ('{worker,operator}', 'procedure', '{tick_loop}'),
    ('{operator}', 'function', '{retry_job,retry_with_dependants,cancel_job,set_priority,'
        'reschedule_job,pause_queue,resume_queue,pause_type,resume_type,pause_all,resume_all,'
        'set_queue,set_type,set_limit,resume_ordering_key,define_pipeline,drop_pipeline,'
        'restart_pipeline,schedule_job,unschedule_job,enable_schedule,disable_schedule,'
        'run_schedule_now,start_ticker,stop_ticker,settle_effect,act_on_jobs,set_archive,'
        'set_retry_rule,set_breaker,plan_queue_move,queue_move_facts,receive_plan,'
        'begin_queue_move,end_queue_move,queue_move_status,grant_statements}'),
    ('{observer}', 'view', '{job_runs,queue_stats,running_jobs,stale_jobs,dead_jobs,'
        'error_groups,hourly_stats,workers,worker_starts,queues,job_types,pauses,job_errors,'
        'effects,dependencies,halted_keys,pipeline_stages,stage_runs,audit_log,limits,'
        'retry_rules,breakers,breaker_states,retry_budgets,job_definitions,occurrences,'
        'queue_grants,queue_moves,moved_jobs,limit_stats,unknown_effects,worker_health,'
        'ticker_health}'),
    ('{observer}', 'function', '{explain_job,doctor,verify,fold_error,job_stats,job_counts,'
        'rising_failures,visible_queues,sees_all_queues}'),
    -- The views compute ages with now(), as the calling role.
    ('{producer,worker,observer}', 'function', '{version,now,next_run,upcoming_runs,'
        'describe_schedule,database_number,database_number_of}')
) as l (accesses, kind, names)
cross join unnest(l.accesses::text[]) as a (access)
cross join unnest(l.names::text[]) as n (name)
$$;

create or replace function rota.grant_statements(access text, role name)
    returns setof text language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_grant(role, '*', access);
    return query select format('grant %s to %I;', g.what, grant_statements.role)
    from (
        select 'usage on schema rota' as what, grant_statements.access
        union all
        select case a.kind when 'view' then format('select on rota.%I', a.name)
            else format('execute on %s %s', a.kind, p.oid::regprocedure) end, a.access
        from rota._access() as a
        left join pg_proc as p on a.kind <> 'view' and p.proname = a.name
          and p.pronamespace = 'rota'::regnamespace
    ) as g
    where g.access = grant_statements.access
       or g.access = 'observer' and grant_statements.access = 'operator';
end $$;

comment on function rota.grant_statements is
    'The grants that a role needs to be a producer, worker, operator or observer, for the '
    'owner of the schema to run; raises 22023.';

do $$
declare
    v_statement text;
begin
    for v_statement in
        select format('revoke all on %s rota from %I cascade', w.what, r.role)
        from (
            select r.role
            from unnest('{public,rota_producer,rota_worker,rota_operator,rota_observer}'
                ::text[]) as r (role)
            where r.role = 'public' or to_regrole(r.role) is not null
            union
            -- An upgrade then gives them what they had (upgrades/give_grants.sql).
            select rota._default_grantees()
        ) as r
        cross join unnest('{all tables in schema,all sequences in schema,'
            'all routines in schema,schema}'::text[]) as w (what)
        union all
        -- A column of the type of a row of ours would keep an upgrade from changing the table.
        select format('revoke all on type %s from public', t.oid::regtype) from pg_type as t
        where t.typnamespace = 'rota'::regnamespace and t.typelem = 0
        union all
        select g.statement from unnest('{producer,worker,operator,observer}'::text[]) as a
        cross join lateral rota.grant_statements(a, ('rota_' || a)::name) as g (statement)
        where to_regrole('rota_' || a) is not null
    loop
        execute v_statement;
    end loop;
end $$;
