/*
 * waiting/pending.sql -- look again at what may go on now.
 *
 * What a job waits for is decided in one place and at one time: here, with the row of the job
 * locked, by what is committed.  A note is written by whoever changes something, and taken away
 * by somebody who has looked once that is committed; so the last change is always looked at
 * after it, and no job is forgotten.  Looking once too often does nothing.
 *
 * A transaction that claims after it has changed something looks at its own notes too, and
 * leaves them: of two open ones neither sees what the other does, and if each took away its
 * notes nobody would look when both are done.
 *
 * Nobody waits here.  What somebody else has locked is looked at a moment later; and one note
 * that cannot be dealt with does not stop the others.
 */

/* Note what new jobs may have to be looked at for. */
create or replace function rota._note_new(job_ids bigint[])
    returns void
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
begin
    insert into rota.rechecks (due_at, kind, subject)
    select distinct rota.now(), n.kind, n.subject
    from rota.jobs as j
    cross join lateral (
        values
            ('order', j.ordering_key),
            ('job', case when j.ordering_key is null or rota._has_parents(j.id)
                then j.id::text end)
    ) as n (kind, subject)
    where j.id = any(_note_new.job_ids)
      and j.status = 'blocked'
      and n.subject is not null;
    if found then
        perform rota._notify('');
    end if;
end;
$$;

create or replace function rota._recheck(max_notes integer)
    returns integer
    language plpgsql
    set enable_seqscan = off
    set jit = off
    set plan_cache_mode = force_generic_plan
    set lock_timeout = '100ms'
as $$
declare
    v_taken integer;
    v_notes integer := 0;
begin
    -- An older snapshot does not show what is committed by now.
    if current_setting('transaction_isolation') <> 'read committed' then
        return 0;
    end if;

    -- What is done may lead to new notes.
    loop
        begin
            v_taken := rota._take_notes(_recheck.max_notes - v_notes, false);
        exception
            when others then
                v_taken := rota._take_notes(_recheck.max_notes - v_notes, true);
        end;
        v_notes := v_notes + v_taken;
        exit when v_taken = 0 or v_notes >= _recheck.max_notes;
    end loop;
    return v_notes;
end;
$$;

create or replace function rota._take_notes(max_notes integer, is_one_by_one boolean)
    returns integer
    language plpgsql
as $$
declare
    v_me constant xid8 := pg_current_xact_id_if_assigned();
    v_note record;
    v_notes integer := 0;
begin
    for v_note in
        with due as (
            select r.ctid as place, r.kind, r.subject
            from rota.rechecks as r
            where r.due_at <= rota.now()
              and (not r.is_seen or r.made_by is distinct from v_me)
            order by r.due_at, r.id
            limit _take_notes.max_notes
            for update skip locked
        )
        select d.kind, d.subject, array_agg(d.place) as places
        from due as d
        group by d.kind, d.subject
        order by d.kind, d.subject
    loop
        if not _take_notes.is_one_by_one then
            perform rota._take_note(v_note.kind, v_note.subject, v_note.places);
        else
            begin
                perform rota._take_note(v_note.kind, v_note.subject, v_note.places);
            exception
                when lock_not_available or unique_violation then
                    perform rota._put_off(v_note.places, interval '50 milliseconds');
                when others then
                    raise warning 'recheck of % % failed and will be tried again: %',
                        v_note.kind, v_note.subject, sqlerrm;
                    perform rota._put_off(v_note.places, interval '10 seconds');
            end;
        end if;
        v_notes := v_notes + cardinality(v_note.places);
    end loop;

    return v_notes;
end;
$$;

create or replace function rota._take_note(kind text, subject text, places tid[])
    returns void
    language plpgsql
as $$
declare
    v_is_settled boolean := true;
begin
    case _take_note.kind
        when 'order' then
            v_is_settled := rota._recheck_order(_take_note.subject);
        when 'job' then
            v_is_settled := rota._recheck_job(_take_note.subject::bigint);
        when 'parent' then
            perform rota._recheck_parent(
                split_part(_take_note.subject, ' ', 1)::bigint,
                split_part(_take_note.subject, ' ', 2));
        when 'bucket' then
            v_is_settled := rota._recheck_bucket(_take_note.subject);
        when 'limit' then
            -- First, since it may lead to the same note for later.
            perform rota._put_away(_take_note.places);
            if not rota._recheck_limit(_take_note.subject) then
                perform rota._note_later(
                    'limit', _take_note.subject, rota.now() + interval '50 milliseconds');
            end if;
        when 'schedule' then
            v_is_settled := rota._recheck_schedule(_take_note.subject);
    end case;

    if _take_note.kind = 'limit' then
        return;
    elsif v_is_settled then
        perform rota._put_away(_take_note.places);
    else
        perform rota._put_off(_take_note.places, interval '50 milliseconds');
    end if;
end;
$$;

/* Delete notes that have been looked at; those of this transaction stay for the next look. */
create or replace function rota._put_away(places tid[])
    returns void
    language plpgsql
as $$
declare
    v_me constant xid8 := pg_current_xact_id();
    v_deleted integer;
begin
    delete from rota.rechecks as r
    where r.ctid = any(_put_away.places)
      and r.made_by <> v_me;
    get diagnostics v_deleted = row_count;
    if v_deleted < cardinality(_put_away.places) then
        update rota.rechecks as r
        set is_seen = true
        where r.ctid = any(_put_away.places)
          and r.made_by = v_me;
    end if;
end;
$$;

create or replace function rota._put_off(places tid[], delay interval)
    returns void
    language plpgsql
as $$
begin
    update rota.rechecks as r
    set due_at = rota.now() + _put_off.delay
    where r.ctid = any(_put_off.places);
end;
$$;
