/*
 * upgrades/refuse_downgrade.sql -- no older functions over newer tables.
 *
 * The functions of an older version may not know a column, or a rule, that jobs already rely
 * on.  To go back anyway, a caller says so, and gets the older functions over the unchanged
 * tables: steps only ever add to tables, and none is undone.
 */

do $$
declare
    c_installed constant text := nullif(current_setting('rota.installed_version', true), '');
begin
    if array(select n[1]::integer from regexp_matches(c_installed, '[0-9]+', 'g') as n)
      > array(select n[1]::integer from regexp_matches(rota.version(), '[0-9]+', 'g') as n) then
        raise exception using errcode = 'feature_not_supported',
            message = format('%I has rota %s, and this is the older %s', current_database(),
                c_installed, rota.version()),
            hint = format('Install from a checkout of %s or newer.  To go back anyway: '
                '--force, or psql -v allow_downgrade=1.', c_installed);
    end if;
end $$;
