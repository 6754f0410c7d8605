/*
 * maintenance/archive.sql -- keep what retention takes away.
 *
 * With an archive nothing of the history is deleted.  A partition that would be dropped is
 * detached and goes to the schema of the archive as it is, which copies nothing; rows that are
 * deleted one by one go to its table rota_rows, as jsonb, in the statement that deletes them.
 * If the archive cannot take them the statement fails, and they stay.  The same applies to
 * what an operator purges; what is erased is erased for good.
 *
 * The schema has to belong to the owner of rota: the owner of a schema can put tables with
 * triggers into it, and those would run with the rights of retention.
 */

create or replace function rota.set_archive(schema text default null)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_rows_owner oid;
begin
    perform rota._check_queues('operator', '{*}');
    if schema is null then
        delete from rota.archive;
        return;
    elsif not exists (
        select from pg_namespace as n
        where n.nspname = set_archive.schema
          and n.nspowner = to_regrole(quote_ident(current_user))
          and n.nspname !~ '^(pg_|rota$|information_schema$|public$)'
    ) then
        perform rota._refuse('schema', format('must be a schema that belongs to role %s and is '
            'for nothing else, got %L', current_user, rota._cut(schema, 80)));
    end if;

    -- First, so that of two sessions one makes the table.
    insert into rota.archive (schema) values (set_archive.schema)
    on conflict on constraint archive_pkey do update set schema = excluded.schema;
    v_rows_owner := (
        select c.relowner from pg_class as c
        where c.relname = 'rota_rows' and c.relnamespace = to_regnamespace(quote_ident(schema))
    );
    if v_rows_owner is null then
        execute format('create table %I.rota_rows (source text not null, '
            'archived_at timestamptz not null, row_as jsonb not null)',
            schema);
    elsif v_rows_owner <> to_regrole(quote_ident(current_user)) then
        -- Others may be allowed to make tables there.
        perform rota._refuse('schema', format('must have no table rota_rows that does not '
            'belong to role %s, got %L', current_user, rota._cut(schema, 80)));
    end if;
end $$;

comment on function rota.set_archive is
    'Let retention and purges move the history to a schema of the owner instead of deleting '
    'it, partitions as tables and rows to its table rota_rows; null lets them delete again; '
    'raises 22023.';

/* Where rows of a table go to; null if nowhere. */
create or replace function rota._archive_of(name text)
    returns text language plpgsql stable as $$
begin
    if name !~ '^(finished_jobs|job_errors|stage_runs)' then return null; end if;
    return (select a.schema from rota.archive as a);
end $$;

/* A statement that deletes rows f of a table: with an archive, one that moves them there. */
create or replace function rota._removing(name text, statement text)
    returns text language plpgsql stable as $$
declare
    c_archive constant text := rota._archive_of(name);
begin
    if c_archive is null then return statement; end if;
    return format('with gone as (%s returning to_jsonb(f) as row_as) '
        'insert into %I.rota_rows (source, archived_at, row_as) '
        'select %L, rota.now(), g.row_as from gone as g',
        statement, c_archive, name);
end $$;

/* Delete the rows of these jobs from a table, to the archive if there is one. */
create or replace function rota._remove_rows(name text, id_column text, job_ids bigint[])
    returns void language plpgsql as $$
-- @plpgsql_check_options: security_warnings = off
begin
    execute rota._removing(name,
        format('delete from rota.%I as f where f.%I = any($1)', name, id_column))
    using job_ids;
end $$;
