/*
 * tables/rows.sql -- the rows in which maintenance keeps its state, and the list of settings.
 *
 * A copy of only the schema, as `pg_dump --schema-only` makes it, has none of them, and a
 * restore on a server without a role that a row names leaves out the whole table; so each
 * install creates the missing ones.
 */

insert into rota.upgrade_log (id, name) values (0, 'fresh install') on conflict do nothing;
-- To insert a row that is there would wait for a transaction that has ticked.
insert into rota.maintenance (task, done_at)
select n.task, n.done_at
from (
    values ('retention', timestamptz '-infinity'), ('tick', '-infinity'),
        ('tick alone', rota.now())
) as n (task, done_at)
where not exists (select from rota.maintenance as m where m.task = n.task)
on conflict do nothing;
insert into rota.maintenance (task, done_at)
select 'grants', rota.now()
where exists (select from rota.queue_grants)
  and not exists (select from rota.maintenance as m where m.task = 'grants');
insert into rota.stats_progress (counted_until, complete_until, sampled_at)
select 'epoch', 'epoch', 'epoch' where not exists (select from rota.stats_progress);
insert into rota.count_progress (round)
select 0 where not exists (select from rota.count_progress);
do $$ begin
    perform setval('rota.lock_seed',
        1 + (hashtextextended(gen_random_uuid()::text, 0) & ((1::bigint << 60) - 1)))
    from rota.lock_seed as s where not s.is_called;
end $$;
-- As the trigger does: a sixteenth grant stands for the others, or calls would read them all.
insert into rota.configured_names (name, source, role)
select u.name, u.source, case when u.number <= 15 then u.role end
from (
    select n.*, row_number() over (partition by n.name, n.role is null) as number
    from rota._unlisted() as n
) as u
where u.role is null or u.number <= 16 on conflict do nothing;
