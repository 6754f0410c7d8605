/*
 * access/grants.sql -- who may do what.
 *
 * One list, _access(), says which kind of access needs which function or view.  All functions
 * run with the owner's rights, so execute is all that a role needs; no table is granted to any
 * role.  `create or replace` keeps old grants, so each install takes everything away from
 * public and from our roles, and grants it again from the list.
 *
 * Where the roles cannot be created, grant_statements() prints the same list for any role.
 */

create or replace function rota._access()
    returns table (access text, kind text, name text) language sql immutable as $$
select 'producer', 'function', f.name
from unnest(
    '{enqueue,enqueue_many,enqueue_to,start_pipeline,wait_for_result,find_live_keys}'::text[]
) as f (name)
union all
select 'worker', 'function', f.name
from unnest(
    '{claim_jobs,finish_job,finish_jobs,finish_and_claim,end_jobs,fail_job,snooze_job,'
    'release_jobs,heartbeat,heartbeat_jobs,set_progress,record_effect,complete_effect,'
    'withdraw_effect,effect_result,report_worker,deregister_worker,wait_for_jobs,stop_waiting,'
    'untaken_jobs,sweep_stale_leases,tick,waiting_forwards,take_forwards,end_forwards,'
    'receive_jobs,waiting_moves,open_arrival,pick_moves,take_moves,receive_moves,end_moves,'
    'settle_arrival,confirm_arrival}'::text[]) as f (name)
union all
select 'operator', 'function', f.name
from unnest(
    '{retry_job,retry_with_dependants,cancel_job,set_priority,reschedule_job,pause_queue,'
    'resume_queue,pause_type,resume_type,pause_all,resume_all,set_queue,set_type,set_limit,'
    'resume_ordering_key,define_pipeline,drop_pipeline,restart_pipeline,schedule_job,'
    'unschedule_job,enable_schedule,disable_schedule,run_schedule_now,tick,start_ticker,'
    'stop_ticker,sweep_stale_leases,settle_effect,act_on_jobs,set_archive,set_retry_rule,'
    'set_breaker,'
    'plan_queue_move,queue_move_facts,receive_plan,begin_queue_move,end_queue_move,'
    'queue_move_status,grant_statements}'::text[]) as f (name)
union all
select a.access, 'procedure', 'tick_loop' from unnest('{worker,operator}'::text[]) as a (access)
union all
select 'observer', 'view', v.name
from unnest(
    '{job_runs,queue_stats,running_jobs,stale_jobs,dead_jobs,error_groups,hourly_stats,'
    'workers,worker_starts,queues,job_types,pauses,job_errors,effects,dependencies,'
    'halted_keys,pipeline_stages,stage_runs,audit_log,limits,retry_rules,breakers,'
    'retry_budgets,job_definitions,occurrences,queue_grants,queue_moves,moved_jobs,'
    'limit_stats,unknown_effects,ticker_health}'::text[]) as v (name)
union all
select 'observer', 'function', f.name
from unnest(
    '{explain_job,doctor,verify,fold_error,job_stats,job_counts,rising_failures,'
    'visible_queues}'::text[]) as f (name)
union all
-- The views compute ages with now(), as the calling role.
select a.access, 'function', f.name
from unnest('{producer,worker,observer}'::text[]) as a (access)
cross join unnest(
    '{version,now,next_run,upcoming_runs,describe_schedule,database_number,'
    'database_number_of}'::text[]) as f (name)
$$;

create or replace function rota.grant_statements(access text, role name)
    returns setof text language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp as $$
begin
    perform rota._check_choice('access', access, '{producer,worker,operator,observer}');
    if role is null or to_regrole(quote_ident(role)) is null then
        perform rota._refuse('role', format('%L does not exist', role));
    end if;

    return query select format('grant usage on schema rota to %I;', grant_statements.role);
    return query select format('grant select on rota.%I to %I;', a.name, grant_statements.role)
    from rota._access() as a
    where a.kind = 'view'
      and (a.access = grant_statements.access
        or (a.access = 'observer' and grant_statements.access = 'operator'));
    return query select format('grant execute on %s %s to %I;', a.kind, p.oid::regprocedure,
        grant_statements.role)
    from rota._access() as a
    join pg_proc as p on p.proname = a.name and p.pronamespace = 'rota'::regnamespace
    where a.kind in ('function', 'procedure')
      and (a.access = grant_statements.access
        or (a.access = 'observer' and grant_statements.access = 'operator'));
end $$;

comment on function rota.grant_statements is
    'The grants that a role needs to be a producer, worker, operator or observer, to be run by '
    'the owner of the schema; raises 22023.';

do $$
declare
    v_role text;
    v_type regtype;
    v_grant text;
begin
    revoke all on schema rota from public;
    revoke all on all tables in schema rota from public;
    revoke all on all sequences in schema rota from public;
    revoke all on all routines in schema rota from public;
    -- A column of the type of a row of ours would keep an upgrade from changing the table.
    for v_type in
        select t.oid::regtype from pg_type as t
        where t.typnamespace = 'rota'::regnamespace and t.typelem = 0
    loop
        execute format('revoke all on type %s from public', v_type);
    end loop;

    foreach v_role in array array['producer', 'worker', 'operator', 'observer'] loop
        continue when to_regrole('rota_' || v_role) is null;
        execute format('revoke all on all tables in schema rota from %I', 'rota_' || v_role);
        execute format('revoke all on all sequences in schema rota from %I', 'rota_' || v_role);
        execute format('revoke all on all routines in schema rota from %I', 'rota_' || v_role);
        for v_grant in
            select g from rota.grant_statements(v_role, ('rota_' || v_role)::name) as g
        loop
            execute v_grant;
        end loop;
    end loop;
end $$;
