/*
 * upgrades/give_grants.sql -- give roles again what they were granted before.
 *
 * `create or replace` keeps the grants, but not where a function has other arguments, or is
 * made anew.  And access/grants.sql has taken all from the roles to which the owner gives what
 * it makes, or they would get what is new.
 */

do $$
declare
    v_grant text;
begin
    for v_grant in
        select format('grant %s on %s to %s%s', k.privilege, o.object, k.grantee,
            case when k.is_grantable then ' with grant option' end)
        from jsonb_to_recordset(nullif(current_setting('rota.grants', true), '')::jsonb)
            as k (name text, privilege text, grantee regrole, is_grantable boolean)
        cross join lateral (
            select 'routine ' || p.oid::regprocedure, p.proacl from pg_proc as p
            where p.pronamespace = 'rota'::regnamespace and p.proname = k.name
              and k.privilege = 'EXECUTE'
            union all
            select format('%s rota.%I',
                    case c.relkind when 'S' then 'sequence' else 'table' end, c.relname),
                c.relacl
            from pg_class as c
            where c.relnamespace = 'rota'::regnamespace and c.relname = k.name
              and k.privilege <> 'EXECUTE'
            union all
            select 'schema rota', n.nspacl from pg_namespace as n
            where n.nspname = 'rota' and k.name = ''
        ) as o (object, acl)
        where not exists (
            select from aclexplode(o.acl) as a
            where a.grantee = k.grantee::oid and a.privilege_type = k.privilege
        )
    loop
        execute v_grant;
    end loop;
end $$;
