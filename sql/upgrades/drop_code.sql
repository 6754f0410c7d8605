/*
 * upgrades/drop_code.sql -- drop the functions and views, which the files then create.
 *
 * `create or replace` refuses a function whose result, names or defaults have changed, and a
 * view that loses a column.  A version has a step for each of its own changes, but cannot know
 * those of newer ones.  So before it goes over a newer one all code goes, and the policies that
 * read views, but for what the triggers of tables call and what others have built on it.  Not
 * before an upgrade: a call that had just looked up a function would fail.
 */

do $$
declare
    v_drop text;
begin
    for v_drop in
        select format('drop policy %I on %s', p.polname, p.polrelid::regclass)
        from pg_policy as p join pg_class as c on c.oid = p.polrelid
        where c.relnamespace = 'rota'::regnamespace and p.polname = 'visible_rows'
          and exists (
            select from pg_depend as d join pg_class as v on v.oid = d.refobjid
            where d.classid = 'pg_policy'::regclass and d.objid = p.oid
              and d.refclassid = 'pg_class'::regclass and v.relkind = 'v'
          )
        union all
        select 'drop view ' || string_agg('rota.' || m.name, ', ') from rota.manifest as m
        where m.kind = 'view' and to_regclass('rota.' || m.name) is not null
        having count(*) > 0
        union all
        select format('drop routine %s', p.oid::regprocedure) from pg_proc as p
        where p.pronamespace = 'rota'::regnamespace and exists (
            select from rota.manifest as m
            where m.kind in ('function', 'procedure') and m.definition is not null
              and split_part(m.name, '(', 1) = quote_ident(p.proname)
        )
    loop
        begin
            execute v_drop;
        exception
            when dependent_objects_still_exist then null;
        end;
    end loop;
end $$;
