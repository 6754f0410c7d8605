/*
 * upgrades/from_0_1_0/switch_over.sql -- from the tables of 0.1.0 to the new ones.
 *
 * Passes go on until they find little.  Then every old table is locked against writes, for the
 * last pass alone: calls of old clients that write wait for it and for the commit.  They go on
 * in the old functions then, but find the tables by their names, so no row comes where nobody
 * reads any more: what does not fit the new tables is an error.
 *
 * The locks are taken together or not at all, time and again: two that wait for each other
 * would be a deadlock, since calls write to the tables in any order.
 */

do $$
declare
    c_passes constant integer := 4;
    c_few constant integer := 500;
    v_since xid := current_setting('rota.carried_before')::xid;
    v_next xid; v_table regclass;
    v_tries integer := 0;
begin
    set local lock_timeout = '200ms';
    for v_pass in 1..c_passes loop
        v_next := rota_0_1_0._begin_pass();
        exit when rota_0_1_0._carry(v_since) < c_few;
        v_since := v_next;
    end loop;

    loop
        begin
            -- Nearly every call writes to this one first.
            lock table rota_0_1_0.jobs in share row exclusive mode;
            for v_table in
                select c.oid::regclass from pg_class as c
                where c.relnamespace = 'rota_0_1_0'::regnamespace and c.relkind in ('r', 'p')
            loop
                execute format('lock table %s in share row exclusive mode nowait', v_table);
            end loop;
            exit;
        exception when lock_not_available then
            v_tries := v_tries + 1;
            if v_tries >= 200 then
                raise exception using errcode = 'lock_not_available',
                    message = 'other transactions hold the tables of rota for too long',
                    hint = 'Nothing has changed.  Keep no transaction that calls rota '
                        'open, or stop the workers, and try again.';
            end if;
            perform pg_sleep(0.02);
        end;
        if v_tries % 20 = 0 then
            v_next := rota_0_1_0._begin_pass();
            perform rota_0_1_0._carry(v_since);
            v_since := v_next;
        end if;
    end loop;

    perform rota_0_1_0._carry(v_since);
    if (select count(*) from rota.jobs) <> (select count(*) from rota_0_1_0.jobs) then
        -- What has ended and is not kept there any more, of which no row tells.
        delete from rota.jobs as n
        where not exists (
            select from rota_0_1_0.jobs as o where coalesce(o.first_job_id, o.id) = n.id);
        delete from rota.reruns as r
        where not exists (select from rota.jobs as j where j.id = r.job_id);
    end if;
    if (select count(*) from rota.jobs) <> (select count(*) from rota_0_1_0.jobs) then
        raise exception 'the jobs of 0.1.0 and those carried over are not the same';
    end if;
    delete from rota.maintenance as m using rota_0_1_0.upkeep as u where u.task = m.task;
    insert into rota.maintenance (task, done_at, done_by)
    select u.task, u.done_at, u.done_by from rota_0_1_0.upkeep as u;
    perform rota._add_checks('schedule', array(
        select d.name from rota.job_definitions as d where d.kind = 'after'));
    insert into rota.limits_to_count (limit_name) select l.limit_name from rota.limits as l;
    perform rota._add_checks('limit', array(select l.limit_name from rota.limits as l));
    perform rota._add_checks('queue', array(
        select q.queue from rota.queues as q where q.ageing is not null));
    -- A call that waits may have drawn ids there just now, which it will use here.
    perform setval('rota.jobs_id_seq', s.last_value + 10000) from rota_0_1_0.jobs_id_seq as s;
    -- Nobody has set anew what was carried over.
    delete from rota.audit_log;
    update rota.upgrade_log as u set name = 'carried over from 0.1.0' where u.id = 0;
end $$;
