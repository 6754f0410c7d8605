/*
 * upgrades/from_0_1_0/set_aside.sql -- the tables of 0.1.0 make room.
 *
 * Between 0.1.0 and 0.2.0 nearly every table has changed.  So this one upgrade has no steps:
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
begin
    select n.nspowner::regrole into v_owner from pg_namespace as n where n.nspname = 'rota';
    if v_owner <> to_regrole(quote_ident(current_user)) then
        raise exception using errcode = 'insufficient_privilege',
            message = format('rota belongs to role %s, and you are %I', v_owner, current_user),
            hint = format('Install as that role: PGOPTIONS="-c role=%s" psql -f install.sql',
                v_owner);
    end if;
end $$;

\ir ../refuse_others.sql

alter schema rota rename to rota_0_1_0;
