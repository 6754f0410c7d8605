/*
 * base/configured.sql -- whether anything is set for a queue, a job type or for roles.
 *
 * Most jobs are plain: no setting exists for their queue and their type.  Settings are in seven
 * tables (queues, job_types, limits, fair_queues, pauses, queue_moves, queue_grants), and
 * reading all of them costs more than writing a job.  So triggers of these tables keep a list
 * of the names that have settings, and a call reads the tables only for names in that list.
 *
 * The name of a grant comes with its role, so that the calls of all who are not members of it
 * skip the name (base/queue_rights.sql).  To ask that of very many roles would take longer than
 * the rest of a call: so from the 16th grant of an access on one name without a role stands for
 * all that come.
 *
 * One transaction writes the setting and the name, so whoever sees one sees both.
 */

/* How a setting stands in the list: a queue by its name, which has no space in it; a job type
 * and an access with a word and a space before theirs; and what is paused in all queues as the
 * access to work.  No call asks for a limit of a key: a job says itself that it has one. */
create or replace function rota._listed_as(table_name text, setting jsonb)
    returns table (name text, source text) language sql stable as $$
    select case table_name
            when 'job_types' then 'type ' || (setting ->> 'job_type')
            when 'queue_grants' then 'access ' || (setting ->> 'access')
            when 'pauses' then coalesce(setting ->> 'queue', 'access worker')
            else coalesce(setting ->> 'queue', setting ->> 'limit_name')
        end,
        -- Pauses and grants share a name with others of their table.  Each has a row of its own
        -- in the list, so that two that are set at once do not wait for each other.
        concat_ws(' ', table_name, setting ->> 'pause_name',
            (setting ->> 'role') || ' ' || (setting ->> 'queue'));
$$;

/* Whether a setting of that name may give a new job of this queue a place by its key, let it
 * wait for a limit of its type, or send it elsewhere.  A limit of the queue itself holds no new
 * job; ageing stands in the settings of the queue. */
create or replace function rota._gives_place(source text, name text, queue text)
    returns boolean language sql immutable as $$
select source in ('fair_queues', 'queue_moves') or source = 'limits' and name <> queue
$$;

/* The settings that the list lacks, because a restore has left it out. */
create or replace function rota._unlisted()
    returns table (name text, source text, role regrole) language sql stable as $$
    select n.name, n.source, (s.setting ->> 'role')::regrole
    from (
        select 'queues' as table_name, to_jsonb(q) as setting from rota.queues as q
        union all select 'job_types', to_jsonb(t) from rota.job_types as t
        union all select 'limits', to_jsonb(l) from rota.limits as l where l.limit_key is null
        union all select 'fair_queues', to_jsonb(f) from rota.fair_queues as f
        union all select 'pauses', to_jsonb(p) from rota.pauses as p
        union all select 'queue_moves', to_jsonb(m) from rota.queue_moves as m
        union all select 'queue_grants', to_jsonb(g) from rota.queue_grants as g
    ) as s
    cross join lateral rota._listed_as(s.table_name, s.setting) as n
    where not exists (
        select from rota.configured_names as c where c.name = n.name and c.source = n.source
    )
      -- One name may stand for all grants, and the source may have the former name of a role.
      and not (s.table_name = 'queue_grants' and exists (
        select from rota.configured_names as c
        where c.name = n.name and c.source ^@ 'queue_grants '
          and (c.role is null or c.role = (s.setting ->> 'role')::regrole)
      ));
$$;

/* Trigger of a table of settings. */
create or replace function rota._list_configured()
    returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
declare
    v_row constant jsonb := to_jsonb(case when tg_op = 'DELETE' then old else new end);
    v_name text; v_source text;
begin
    select l.name, l.source into v_name, v_source
    from rota._listed_as(tg_table_name, v_row) as l;
    if v_name like 'key %' then
        return null;
    elsif tg_op = 'DELETE' then
        delete from rota.configured_names as c
        where c.name = v_name and c.source = v_source;
        -- What it held is let in, also where somebody deletes the row by hand.
        if tg_table_name = 'pauses'
          and ((v_row ->> 'until')::timestamptz <= rota.now()) is not true then
            perform rota._add_checks('pause', array[v_row ->> 'pause_name']);
        end if;
    else
        insert into rota.configured_names (name, source, role)
        select v_name, v_source,
            case when g.listed < 15 then (v_row ->> 'role')::regrole end
        from (
            select count(*) as listed, coalesce(bool_or(c.role is null), false) as are_many
            from rota.configured_names as c
            -- Not of a pause, which will end.
            where c.name = v_name and tg_table_name = 'queue_grants'
              and c.source ^@ 'queue_grants '
        ) as g
        where not g.are_many on conflict do nothing;
    end if;
    return null;
end $$;
