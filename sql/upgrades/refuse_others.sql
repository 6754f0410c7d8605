/*
 * upgrades/refuse_others.sql -- refuse to drop objects of others with the schema rota.
 *
 * Dropping a schema silently drops all objects that depend on it: a view for a dashboard, the
 * default of a column, a trigger.  So their owners have to remove them first.
 */

do $$
declare
    v_others text;
begin
    with ours as (
        select 'pg_class'::regclass as classid, c.oid
        from pg_class as c where c.relnamespace = to_regnamespace('rota')
        union all
        select 'pg_proc'::regclass, p.oid
        from pg_proc as p where p.pronamespace = to_regnamespace('rota')
        union all
        select 'pg_type'::regclass, t.oid
        from pg_type as t where t.typnamespace = to_regnamespace('rota')
    ), theirs as (
        -- A view depends by its rule.
        select
            case when r.oid is null then d.classid else 'pg_class'::regclass end as classid,
            coalesce(r.ev_class, d.objid) as objid
        from pg_depend as d
        join ours as o on o.classid = d.refclassid and o.oid = d.refobjid
        left join pg_rewrite as r on r.oid = d.objid and r.rulename = '_RETURN'
            and d.classid = 'pg_rewrite'::regclass
        where d.deptype in ('n', 'a')
    )
    select string_agg(distinct i.type || ' ' || i.identity, ', ') into v_others
    from theirs as t
    cross join lateral pg_identify_object(t.classid, t.objid, 0) as i
    where i.identity !~ '(^|[ "])rota[.]' and i.schema is distinct from 'rota'
      and not exists (select from ours as o where o.classid = t.classid and o.oid = t.objid);
    if v_others is not null then
        raise exception using errcode = 'dependent_objects_still_exist',
            message = format('these use tables or functions of rota, and would go with '
                'them: %s', left(v_others, 500)),
            hint = 'Nothing has changed.  Drop them first, and recreate them after an upgrade.';
    end if;
end $$;
