/*
 * upgrades/from_0_1_0/set_aside.sql -- the tables of 0.1.0 make room.
 *
 * Between 0.1.0 and 0.2.0 nearly every table has changed.  So this one upgrade goes no steps:
 * the old schema takes another name, the install makes everything anew, carry_over.sql brings
 * the rows, and the old schema goes.  What comes out is a fresh install, to the last column.
 *
 * It is one transaction, so a kill at any point leaves 0.1.0 as it was.  Old clients work on the
 * old tables meanwhile, which they still find by their name, and wait only while the last changes
 * are carried (switch_over.sql).  The old schema is dropped afterwards, when nobody is left in it.
 *
 * What belongs to others and hangs on the old schema would go with it; so then nothing is done.
 */

do $$
declare
    v_owner regrole;
    v_others text;
begin
    select n.nspowner::regrole into v_owner from pg_namespace as n where n.nspname = 'rota';
    if v_owner <> to_regrole(quote_ident(current_user)) then
        raise exception using errcode = 'insufficient_privilege',
            message = format('rota belongs to role %s, and you are %I', v_owner, current_user),
            hint = format('Install as that role: PGOPTIONS="-c role=%s" psql -f install.sql',
                v_owner);
    end if;

    with ours as (
        select 'pg_class'::regclass as classid, c.oid, c.relnamespace as home
        from pg_class as c where c.relnamespace = 'rota'::regnamespace
        union all
        select 'pg_proc'::regclass, p.oid, p.pronamespace
        from pg_proc as p where p.pronamespace = 'rota'::regnamespace
        union all
        select 'pg_type'::regclass, t.oid, t.typnamespace
        from pg_type as t where t.typnamespace = 'rota'::regnamespace
    ), theirs as (
        select d.classid, d.objid from pg_depend as d
        join ours as o on o.classid = d.refclassid and o.oid = d.refobjid
        where d.deptype in ('n', 'a')
    )
    select string_agg(distinct i.identity, ', ') into v_others from theirs as t
    cross join lateral pg_identify_object(t.classid, t.objid, 0) as i
    where i.identity !~ '(^|[ "])rota\.' and i.schema is distinct from 'rota'
      and not exists (select from ours as o where o.classid = t.classid and o.oid = t.objid);
    if v_others is not null then
        raise exception using errcode = 'dependent_objects_still_exist',
            message = format('these use tables or functions of rota 0.1.0, which are made anew: '
                '%s', left(v_others, 500)),
            hint = 'Drop them, install, and create them again.';
    end if;

    alter schema rota rename to rota_0_1_0;
end $$;
