/*
 * upgrades/all.sql -- changes of the tables, in order, each run once.
 *
 * One step is three lines here and one file beside this one:
 *
 *     select not exists (select from rota.upgrade_log where id = 1) as todo \gset
 *     \if :todo
 *     \ir 0001_what_it_does.sql
 *     \endif
 *
 * The file ends with its own row for upgrade_log.  A fresh install creates the tables as they
 * are now and writes the rows of all steps.  There are no steps yet; the check below only
 * makes sure that the schema found is ours.
 */

do $$
begin
    if to_regclass('rota.upgrade_log') is null then
        raise exception using
            errcode = 'duplicate_schema',
            message = 'a schema rota exists, but rota is not installed in it',
            hint = 'Rename or drop that schema, then install again.';
    end if;
end;
$$;
