/*
 * base/audit.sql -- keep a record of each act of an operator.
 *
 * Settings are in tables whose triggers write the record, so no function that changes a
 * setting can forget it.  A function that acts on jobs writes one row for all the jobs of a
 * call.
 */

create or replace function rota._audit(
    act text, filter jsonb, job_ids bigint[] default null, before jsonb default null,
    after jsonb default null
) returns void language plpgsql as $$
declare
    v_id bigint;
begin
    -- It may be taken: a restore gives the log its rows, then settings theirs, and at last the
    -- sequence its value.  No setting may be refused for that.
    loop
        v_id := nextval('rota.audit_log_id_seq');
        exit when not exists (select from rota.audit_log as a where a.id = v_id);
    end loop;
    insert into rota.audit_log (id, act, filter, jobs, job_ids, before, after)
    overriding system value
    values (v_id, _audit.act, _audit.filter, cardinality(_audit.job_ids), _audit.job_ids,
        _audit.before, _audit.after);
end $$;

/* Trigger of a table of settings, with the name of the act and, if that is another, of the one
 * that removes a row; a pause that maintenance removes was over before. */
create or replace function rota._audit_setting()
    returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
declare
    v_before constant jsonb := case when tg_op <> 'INSERT' then to_jsonb(old) end;
    v_after constant jsonb := case when tg_op <> 'DELETE' then to_jsonb(new) end;
    c_row constant jsonb := coalesce(v_after, v_before);
begin
    if tg_table_name = 'pauses' and v_after is null
      and (v_before ->> 'until')::timestamptz <= rota.now()
      -- A deployment may set all again as it is.
      or v_before - 'updated_at' = v_after - 'updated_at' then
        return null;
    end if;
    perform rota._audit(coalesce(case when v_after is null then tg_argv[1] end, tg_argv[0]),
        jsonb_strip_nulls(jsonb_build_object('name', c_row -> 'name', 'queue', c_row -> 'queue',
            'job_type', c_row -> 'job_type', 'limit_key', c_row -> 'limit_key')),
        null, rota._without_nulls(v_before), rota._without_nulls(v_after));
    return null;
end $$;

/* Without the columns that are null; what is null in a payload stays. */
create or replace function rota._without_nulls(setting jsonb)
    returns jsonb language sql immutable as $$
    select jsonb_object_agg(e.key, e.value) from jsonb_each(setting) as e
    where e.value <> 'null';
$$;
