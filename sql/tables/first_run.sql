/*
 * tables/first_run.sql -- what a new installation does once.
 *
 * The first partitions of the history, and the timeline on which ids begin.
 *
 * Where all tables of the database are published, as for a stream of its changes, the server
 * refuses to change or delete rows that nothing identifies: of those without a key it is all of
 * them.  It costs only where such a stream is written.
 */

do $$
declare
    v_table regclass;
begin
    perform rota._create_partitions(true);
    for v_table in
        select c.oid::regclass from pg_class as c
        where c.relnamespace = 'rota'::regnamespace and c.relkind = 'r' and not exists (
            select from pg_index as i where i.indrelid = c.oid and i.indisprimary)
    loop
        execute format('alter table %s replica identity full', v_table);
    end loop;
    perform setval('rota.id_timeline', rota._timeline());
end $$;
