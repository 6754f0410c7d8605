/*
 * 54_first_run.sql -- what a new installation does once: its first partitions.
 */

do $$ begin perform rota._create_partitions(); end $$;
