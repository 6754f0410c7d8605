/*
 * base/configured.sql -- whether anything is set for a queue, a job type or for roles.
 *
 * Most jobs are plain: no setting exists for their queue and their type.  Settings are in six
 * tables (queues, job_types, limits, fair_queues, pauses, queue_grants), and reading all of
 * them costs more than writing a job.  So triggers of these tables keep a list of the names
 * that have settings, and a call reads the tables only for names in that list.
 *
 * The name of a grant comes with its role, so that the calls of all who are not members of it
 * skip the name (base/queue_rights.sql).  Where there are very many, asking that of each role
 * would take longer than the rest of a call: so from the 16th grant of an access on one name
 * without a role stands for all that come.
 *
 * A transaction that sees the setting sees the name in the list, since one transaction writes
 * both.  The list stays short, so it does no harm if a plan reads it whole; enqueue(), which is
 * called the most, never does.
 */

/* Trigger of a table of settings.  A queue stands in the list by its name, and has no space in
 * it; a job type and an access have a word and a space before theirs, and what is paused in all
 * queues is an access too: that to work.  No call asks for a limit
 * of a key, of which there may be very many: a job says itself that it has a key. */
create or replace function rota._list_configured()
    returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
declare
    v_row constant jsonb := to_jsonb(case when tg_op = 'DELETE' then old else new end);
    v_name constant text := case tg_table_name
        when 'job_types' then 'type ' || (v_row ->> 'job_type')
        when 'queue_grants' then 'access ' || (v_row ->> 'access')
        when 'pauses' then coalesce(v_row ->> 'queue', 'access worker')
        else coalesce(v_row ->> 'queue', v_row ->> 'limit_name')
    end;
    -- Pauses and grants share a name with others of their table.  Each has a row of its own in
    -- the list, so that two that are set at once do not wait for each other.
    v_source constant text := concat_ws(' ', tg_table_name, v_row ->> 'pause_name',
        (v_row ->> 'role') || ' ' || (v_row ->> 'queue'));
begin
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
