/*
 * base/default_privileges.sql -- to whom the owner gives what it makes.
 *
 * An owner whose default privileges are meant for the tables of applications would open those
 * of rota to the same roles.  An installation takes that away again (access/grants.sql), and
 * retention from each partition (maintenance/retention.sql); what is meant for the schema of
 * rota stays.
 */

create or replace function rota._default_grantees()
    returns setof name language sql stable as $$
    select distinct r.rolname
    from pg_default_acl as d
    cross join lateral aclexplode(d.defaclacl) as a
    join pg_roles as r on r.oid = a.grantee
    where d.defaclrole = to_regrole(quote_ident(current_user)) and d.defaclnamespace = 0
      and r.oid <> d.defaclrole
$$;
