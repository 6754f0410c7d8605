/*
 * tables/first_run.sql -- what a new installation does once.
 *
 * The first partitions of the history.
 */

do $$
begin
    perform rota._create_partitions(true);
end $$;
