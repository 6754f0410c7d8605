/*
 * base/encoding.sql -- texts of others, in whatever encoding the database has.
 *
 * A database of encoding SQL_ASCII stores any bytes.  But the server refuses to send bytes
 * that are not UTF-8 to a client that reads UTF-8: after one such payload no such worker could
 * claim from the queue.  So in such a database, and in no other, each table has a trigger that
 * refuses these bytes, and no text is cut within a character.
 */

/* The beginning of a text. */
create or replace function rota._cut(value text, longest integer)
    returns text language sql stable as $$
select case
    when getdatabaseencoding() <> 'SQL_ASCII' or octet_length(value) <= longest
        then left(value, longest)
    -- Without its last character if that has several bytes, of which some may be missing.
    else regexp_replace(left(value, longest), E'[\\xc2-\\xf4][\\x80-\\xbf]{0,3}$', '')
end;
$$;

create or replace function rota._check_bytes()
    returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
begin
    perform convert_to(new::text, 'UTF8');
    return new;
end $$;

/* Have them checked in all tables that hold texts. */
create or replace function rota._guard_texts()
    returns void language plpgsql as $$
declare
    v_table regclass;
begin
    for v_table in
        select c.oid::regclass from pg_class as c
        where c.relnamespace = 'rota'::regnamespace and c.relkind in ('r', 'p')
          and not c.relispartition and getdatabaseencoding() = 'SQL_ASCII' and exists (
            select from pg_attribute as a
            where a.attrelid = c.oid
              and a.atttypid = any('{text,text[],jsonb}'::regtype[])
        ) and not exists (
            select from pg_trigger as t where t.tgrelid = c.oid and t.tgname = 'check_bytes'
        )
    loop
        execute format('create trigger check_bytes before insert or update on %s '
            'for each row execute function rota._check_bytes()', v_table);
    end loop;
end $$;
