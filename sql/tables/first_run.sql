/*
 * tables/first_run.sql -- what a new installation does once.
 *
 * The first partitions of the history.
 */

do $$
begin
    perform rota._create_partition((rota.now() at time zone 'UTC')::date);
    perform rota._create_partitions();
end $$;
