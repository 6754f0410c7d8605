/*
 * access/roles.sql -- the four roles.  Optional: psql -v with_roles=1, by a role that may
 * create roles.
 *
 * They cannot log in: grant them to the roles that do.  Producer, worker and observer are
 * siblings; an operator is an observer who may also act.  Roles belong to the whole cluster,
 * so existing ones are used as they are.
 */

do $$
begin
    if to_regrole('rota_producer') is null then create role rota_producer nologin; end if;
    if to_regrole('rota_worker') is null then create role rota_worker nologin; end if;
    if to_regrole('rota_operator') is null then create role rota_operator nologin; end if;
    if to_regrole('rota_observer') is null then create role rota_observer nologin; end if;
end $$;
