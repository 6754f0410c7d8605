/*
 * tables/first_run.sql -- what a new installation does once.
 *
 * The first partitions of the history, and the timeline on which ids begin.
 */

do $$
begin
    perform rota._create_partitions(true);
    perform setval('rota.id_timeline', rota._timeline());
end $$;
