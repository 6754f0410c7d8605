/*
 * tables/first_run.sql -- what a new installation does once.
 *
 * The first partitions of the history, the timeline on which ids begin, and the trigger of
 * limits whose function is in waiting/limits.sql.
 *
 * If all tables of the database are published, as for logical replication, the server refuses
 * to change or delete rows without a replica identity: for tables without a key the whole row
 * serves.  It costs only if there is such a publication.  That of a partitioned table serves
 * where the rows of its partitions are published as its own.
 */

do $$
declare
    v_table regclass;
begin
    perform rota._create_partitions(true);
    for v_table in
        select c.oid::regclass from pg_class as c
        where c.relnamespace = 'rota'::regnamespace and c.relkind in ('r', 'p') and not exists (
            select from pg_index as i where i.indrelid = c.oid and i.indisprimary)
    loop
        execute format('alter table %s replica identity full', v_table);
    end loop;
    perform setval('rota.id_timeline', rota._timeline());
end $$;

create constraint trigger limits_counted after insert on rota.limits_to_count
    deferrable initially deferred for each row
    -- So set_limit() leaves one that may start before maintenance has counted.
    when (new.asked_xid = '18446744073709551615')
    execute function rota._look_again_at_commit();
