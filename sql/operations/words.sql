/*
 * operations/words.sql -- how findings speak of times, errors, sessions and workers.
 *
 * What explain_job() and doctor() find is read by an engineer who knows Postgres and perhaps
 * not rota: so a session is named by its pid, role and application.  What the server hides from
 * an owner without pg_read_all_stats is left out.
 */

/* A length of time by its two largest units, such as 3 min 20 s. */
create or replace function rota._span(duration interval)
    returns text language sql immutable as $$
    select case when duration is not null then coalesce(
        string_agg(u.number::text || ' ' || u.unit, ' ' order by u.place), '0 s') end
    from (select abs(extract(epoch from duration))::bigint as seconds) as d
    cross join lateral (
        values (1, d.seconds / 86400, 'd', true), (2, d.seconds % 86400 / 3600, 'h', true),
            (3, d.seconds % 3600 / 60, 'min', d.seconds < 86400),
            (4, d.seconds % 60, 's', d.seconds < 3600)
    ) as u (place, number, unit, is_shown)
    where u.number > 0 and u.is_shown;
$$;

/* How long ago a time is, also one that a hand has made infinite: from that nothing can be
 * subtracted. */
create or replace function rota._ago(moment timestamptz)
    returns text language sql stable as $$
    select rota._span(rota.now() - case moment when 'infinity' then '9999-12-31'
        when '-infinity' then 'epoch' else moment end);
$$;

/* A time in the zone of the session, to the second. */
create or replace function rota._moment(moment timestamptz)
    returns text language sql stable as $$
    select to_char(moment, 'YYYY-MM-DD HH24:MI:SS TZ');
$$;

/* A foreign text as a terminal may show it: spaces are plain ones, and what would move the
 * cursor, change colours or turn the direction of writing is a question mark.  Of encodings
 * whose numbers are not those of Unicode, only what is in ASCII is meant by its number. */
create or replace function rota._printable(value text)
    returns text language sql stable as $$
    select case
        when getdatabaseencoding() ~ '^(UTF8|LATIN|ISO_8859)' then regexp_replace(
            regexp_replace(value, E'[\\u0009-\\u000d\\u0085\\u2028\\u2029]', ' ', 'g'),
            E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f]'
            || E'|[\\u202a-\\u202e\\u2066-\\u2069]', '?', 'g')
        else regexp_replace(regexp_replace(value, E'[\\u0009-\\u000d]', ' ', 'g'),
            E'[\\u0001-\\u001f\\u007f]', '?', 'g')
    end;
$$;

/* The same in one line, cut to a readable length. */
create or replace function rota._one_line(value text)
    returns text language sql immutable as $$
    select case when char_length(l.line) <= 200 then l.line
        else rota._cut(l.line, 197) || '...' end
    from regexp_replace(btrim(rota._printable(rota._cut(value, 2000))), '[[:space:]]+', ' ',
        'g') as l (line);
$$;

/* Characters of a text that _printable() would take away, as the escapes by which both JSON and
 * E'' strings write them. */
create or replace function rota._escaped(value text)
    returns text language sql immutable as $$
    select case when rota._printable(value) = value then value else (
        select string_agg(case when rota._printable(c.character) = c.character then c.character
            else E'\\u' || lpad(to_hex(ascii(c.character)), 4, '0') end, '' order by c.ordinal)
        from regexp_split_to_table(value, '') with ordinality as c (character, ordinal)
    ) end;
$$;

/* A text as SQL that may be shown on a terminal, and pasted from it. */
create or replace function rota._literal(value text)
    returns text language sql immutable as $$
    select case when rota._printable(value) is not distinct from value then quote_literal(value)
        else format('E''%s''', rota._escaped(replace(
            replace(value, E'\\', E'\\\\'), '''', '''''')))
    end;
$$;

/* That no forwarder carries the jobs of this queue, and whether one ever did. */
create or replace function rota._forwarder_words(queue text)
    returns text language sql stable as $$
    select format('no live forwarder carries jobs to database %s; %s. Run rota forward, or '
        'rota worker, with this database and that one', substr(queue, 9), coalesce(
            (select format('%s did, last seen %s ago', w.worker, rota._ago(w.last_seen_at))
            from rota.workers as w where _forwarder_words.queue = any(w.queues)
            order by w.last_seen_at desc limit 1),
            (select format('forwarders are running, but know only the databases %s',
                string_agg(distinct substr(q.queue, 9), ', '))
            from rota._workers as l cross join unnest(l.queues) as q (queue)
            where l.is_live and q.queue ~ '^forward:[0-9]+$' having count(*) > 0),
            'no forwarder here ever knew a database with that number'));
$$;

/* What is paused, and the statement that ends it. */
create or replace function rota._pause_finding(pause rota.pauses)
    returns table (words text, remedy text) language sql stable as $$
    select format('%s paused by %s %s ago%s%s',
        case
            when pause.job_type is not null then format('type %s%s was', pause.job_type,
                coalesce(' in queue ' || pause.queue, ''))
            else coalesce('queue ' || pause.queue || ' was', 'all queues were')
        end,
        case pause.set_by
            when 'breaker' then 'its breaker'
            when 'rule' then 'a retry rule'
            when 'move' then 'the move of its queue'
            else 'role ' || pause.paused_by
        end,
        rota._ago(pause.paused_at),
        coalesce(', because ' || rota._one_line(pause.reason), ', without a reason'),
        coalesce(', for another ' || rota._span(case when isfinite(pause.until)
            then pause.until - rota.now() end), '')),
    case
        when pause.job_type is not null then format('select rota.resume_type(%L%s);',
            pause.job_type, coalesce(', queue => ' || quote_literal(pause.queue), ''))
        -- Who has paused it before the move cannot resume it here.
        when rota._moves_away(pause.queue)
            then format('select * from rota.queue_move_status(%L);', pause.queue)
        when pause.queue is not null then format('select rota.resume_queue(%L);', pause.queue)
        else 'select rota.resume_all();'
    end;
$$;

/* The statement that changes a setting of a limit.  That of a class is for each key of it, so a
 * key gets one of its own, and keeps the rest of what was set for the class. */
create or replace function rota._limit_statement(
    bound rota.limits, limit_key text, setting text, value integer
) returns text language sql stable as $$
    select format('select rota.set_limit(%s, %s => %s%s);', case
            when bound.queue is not null then format('queue => %L', bound.queue)
            when bound.job_type is not null then format('job_type => %L', bound.job_type)
            else 'limit_key => ' || rota._literal(limit_key)
        end, setting, value, (
            select string_agg(format(', %s => %L', s.key, s.value), '' order by s.key)
            from jsonb_each_text(to_jsonb(bound)) as s
            where s.key in ('max_running', 'max_starts', 'per', 'burst', 'weight')
              and s.key <> setting and s.value is not null
              and bound.limit_key <> _limit_statement.limit_key
        ));
$$;

/* How many jobs there are, where they were counted up to so many. */
create or replace function rota._jobs_words(jobs bigint, counted_to bigint)
    returns text language sql immutable as $$
    select format('%s%s %s', case when jobs >= counted_to then 'at least ' end, jobs,
        case jobs when 1 then 'job is' else 'jobs are' end);
$$;

create or replace function rota._error_words(error_type text, error text)
    returns text language sql immutable as $$
    select coalesce(nullif(concat_ws(': ', nullif(rota._one_line(error_type), ''),
        nullif(rota._one_line(error), '')), ''), 'no text');
$$;

/* An ended job, if the caller sees it.  By a plan that is kept: there may be a hundred
 * partitions, and to plan takes longer than to look. */
create or replace function rota._visible_end(job_id bigint)
    returns rota.finished_jobs language plpgsql stable as $$
declare
    c_visible constant text[] := rota._allowed_queues('observer');
    v_ended rota.finished_jobs;
begin
    select f.* into v_ended from rota.finished_jobs as f
    where f.id = _visible_end.job_id and (c_visible is null or f.queue = any(c_visible))
    limit 1;
    return v_ended;
end $$;

/* The live job that has the idempotency key of an ended one; null where none has it, or the
 * caller does not see the ended one. */
create or replace function rota._key_holder(ended_id bigint)
    returns bigint language sql stable as $$
    select rota._find_keyed(f.idempotency_key, coalesce('pipeline ' || f.pipeline, f.job_type))
    from rota._visible_end(ended_id) as f;
$$;

/* That a live job has the key of an ended one, and what follows; null where none has it. */
create or replace function rota._key_words(ended_id bigint)
    returns text language sql stable as $$
    select format('its idempotency key is taken by job %s (%s), so it can only be retried '
        '%s', j.id, j.status, case j.status when 'running' then 'when that one has ended'
            else 'in place of that one, which the remedy cancels' end)
    from rota.jobs as j where j.id = rota._key_holder(ended_id);
$$;

/* The statement that runs an ended job again, with those that were cancelled because of it.
 * Where a live job has its key, that one is cancelled in the same statement; a running one has
 * to be waited for.  One that was erased gets another payload. */
create or replace function rota._retry_statement(
    ended_id bigint, with_dependants boolean default false
) returns text language sql stable as $$
    select case
        when h.id is null
          and rota._payload_type((rota._visible_end(ended_id)).payload) = 'erased'
            then format('select * from rota.act_on_jobs(''retry'', ''{"ids": [%s]}'', '
                '''{"payload": {}}'');', ended_id)
        when h.id is null then c.call || ';'
        when h.status = 'running' then format('select * from rota.explain_job(%s);', h.id)
        else format('with freed as materialized (select rota.cancel_job(%s, %L)) '
            '%s from freed;', h.id, format('job %s is retried in its place', ended_id), c.call)
    end
    from (
        select rota._key_holder(ended_id) as id, format('select rota.%s(%s)', case
            when with_dependants or exists (
                select from (
                    select d.job_id from rota.dependencies as d
                    where d.parent_id = _retry_statement.ended_id limit 1000
                ) as d
                where not exists (select from rota.jobs as j where j.id = d.job_id)
            ) then 'retry_with_dependants' else 'retry_job' end, ended_id)
    ) as c (holder, call)
    left join rota.jobs as h on h.id = c.holder;
$$;

/* The statement that takes a running job from its worker: to run again, or if its cancel was
 * requested, to end; but a rerun that was asked for since is to run. */
create or replace function rota._take_statement(
    job_id bigint, cancel_requested_at timestamptz, cancel_reason text
) returns text language sql stable as $$
    select case
        when cancel_requested_at is null
          or exists (select from rota.reruns as r
            where r.job_id = _take_statement.job_id and r.seen is null)
            then c.call || ';'
        else format('with taken as materialized (%s) select rota.cancel_job(%s%s) from taken;',
            c.call, job_id, coalesce(', ' || rota._literal(cancel_reason), '')) end
    from (select format('select rota.retry_job(%s, force => true)', job_id)) as c (call);
$$;

/* That ordering keys are halted, by which jobs, and the statements that let theirs go on. */
create or replace function rota._halt_words(ordering_keys text[])
    returns table (ordering_key text, words text, remedy text) language plpgsql stable as $$
begin
    return query
    select h.ordering_key, format('ordering key %L has been halted for %s by job %s, which %s',
            h.ordering_key, rota._ago(h.halted_since), h.job_id, case
                when f.id is null
                    then 'retention has removed: the jobs behind it can only continue without '
                        'it'
                else 'is dead: ' || rota._error_words(f.error_type, f.last_error)
                    || coalesce('; ' || rota._key_words(f.id), '')
            end),
        case
            when f.id is not null then rota._retry_statement(f.id)
            else format('select rota.resume_ordering_key(%s);', rota._literal(h.ordering_key))
        end
    from rota.halted_keys as h
    left join lateral (
        -- Of a job of another queue a confined observer does not see the error.
        select i.id, r.error_type, r.last_error from rota.finished_jobs_dead as i
        cross join rota._visible_end(i.id) as r where i.id = h.job_id limit 1
    ) as f on true
    where h.ordering_key = any(_halt_words.ordering_keys);
end $$;

/* At most five of these, and how many more there are. */
create or replace function rota._list(names text[])
    returns text language sql immutable as $$
    select array_to_string(names[:5], ', ') || case
        when cardinality(names) > 5 then format(' and %s more', cardinality(names) - 5)
        else ''
    end;
$$;

/* Who a process of the server is; says that it is gone where it is; null for null. */
create or replace function rota._session_words(pid integer)
    returns text language sql stable as $$
    select coalesce((
        select format('pid %s (%s)', a.pid, concat_ws(', ', 'role ' || a.usename,
            'application ' || nullif(a.application_name, ''),
            case when a.backend_type not in ('client backend', 'parallel worker')
                then a.backend_type end,
            a.state || ' for ' || rota._span(n.now - coalesce(a.state_change, a.xact_start)),
            'transaction open for ' || rota._span(n.now - a.xact_start),
            case when a.wait_event = 'SyncRep' then 'waits for a synchronous standby' end))
        from pg_stat_get_activity(_session_words.pid) as g
        join pg_stat_activity as a on a.pid = g.pid cross join (select rota.now() as now) as n
        where _session_words.pid is not null
    ), 'pid ' || pid::text || ', which has just disconnected');
$$;

/* That an attempt is over its time limit; null if it is not. */
create or replace function rota._overdue_words(overdue_at timestamptz, locked_until timestamptz)
    returns text language sql stable as $$
    select format('its time limit expired %s ago, its worker has been told to stop it, and it '
        'is taken back in %s at the latest', rota._ago(overdue_at),
        rota._span(greatest(rota._elapsed(n.now, locked_until), '0')))
    from (select rota.now() as now) as n where overdue_at < n.now;
$$;

/* That an attempt takes ten times as long as the longest of the last thousand of its queue that
 * were of its type, and at least five minutes; null if it does not.  Where there was none to
 * compare with, an hour is long. */
create or replace function rota._hung_words(queue text, job_type text, started_at timestamptz)
    returns text language sql stable as $$
    select format('it has run for %s, %s: its handler may hang', rota._span(r.runs_for),
        coalesce('and the longest of its type took ' || rota._span(l.longest),
            'and none of its type has ended lately'))
    from (select rota._elapsed(_hung_words.started_at, rota.now()) as runs_for) as r
    cross join lateral (
        select max(rota._elapsed(e.started_at, e.finished_at)) as longest
        from rota._newest_ends(_hung_words.queue, rota.now() - interval '7 days', 1000) as e
        where e.is_end and e.job_type = _hung_words.job_type
    ) as l
    where r.runs_for >= interval '5 minutes'
      and r.runs_for > coalesce(10 * l.longest, interval '1 hour');
$$;

/* The process, or the prepared transaction, that holds the lock on the row of a live job, told
 * by its xmax, and the statement that ends it; no row where no session does.  To try the lock
 * would tell that it is held, and keep others from the row meanwhile.  Where several hold it,
 * xmax is a number of the set. */
create or replace function rota._row_holder(row_xmax xid)
    returns table (pid integer, words text, remedy text) language plpgsql stable as $$
declare
    v_holders xid[] := array[row_xmax];
begin
    if row_xmax = '0'::xid then return; end if;
    begin
        v_holders := v_holders || array(
            select m.xid from pg_get_multixact_members(_row_holder.row_xmax) as m);
    exception when others then
        null;  -- It is no number of a set.
    end;
    return query
    select l.pid, coalesce('the prepared transaction ' || quote_literal(rota._printable(p.gid)),
            rota._session_words(l.pid)),
        coalesce('rollback prepared ' || rota._literal(p.gid) || ';',
            format('select pg_terminate_backend(%s);', l.pid))
    from pg_locks as l
    left join pg_prepared_xacts as p on p.transaction = l.transactionid
    where l.locktype = 'transactionid' and l.granted and l.transactionid = any(v_holders)
      and l.virtualtransaction = any(array(
        select t.virtualtransaction from pg_locks as t
        where t.relation = 'rota.jobs'::regclass and t.locktype = 'relation'
          and t.database = (select d.oid from pg_database as d
            where d.datname = current_database())
          and t.mode in ('RowShareLock', 'RowExclusiveLock')
    ))
    order by l.transactionid <> _row_holder.row_xmax limit 1;
end $$;
