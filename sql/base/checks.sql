/*
 * base/checks.sql -- how a bad argument is refused.
 *
 * Every public function looks at its arguments before it touches a row, and refuses with
 * SQLSTATE 22023 and a message that begins with the argument's name.  null for a required
 * argument is an error and never means "everything".
 */

create or replace function rota._refuse(argument text, problem text)
    returns void language plpgsql as $$
begin
    raise exception using
        errcode = 'invalid_parameter_value', message = format('%s %s', argument, problem);
end $$;

create or replace function rota._check_given(argument text, is_given boolean)
    returns void language plpgsql as $$
begin if not is_given then perform rota._refuse(argument, 'must not be null'); end if; end;
$$;

create or replace function rota._check_number(
    argument text, value integer, lowest integer, highest integer,
    may_be_null boolean default false
) returns void language plpgsql as $$
begin
    if (value between lowest and highest or value is null and may_be_null) is not true then
        perform rota._refuse(argument, format('must be %s to %s, got %s', lowest, highest,
            coalesce(value::text, 'null')));
    end if;
end $$;

/* One of some words; *choices* are in the order in which the message names them. */
create or replace function rota._check_choice(argument text, value text, choices text[])
    returns void language plpgsql as $$
begin
    if (value = any(choices)) is not true then
        perform rota._refuse(argument, format('must be %s or %s, got %L',
            array_to_string(trim_array(choices, 1), ', '), choices[cardinality(choices)],
            rota._cut(value, 80)));
    end if;
end $$;

create or replace function rota._check_name(argument text, name text)
    returns void language plpgsql as $$
begin
    if (name ~ '^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}$') is not true then
        perform rota._refuse(argument, format('must be 1 to 63 of the characters A-Z a-z 0-9 '
            '_ . : / - and begin with a letter or digit, got %L', rota._cut(name, 80)));
    end if;
end $$;

/* The name of a queue for a job that nobody has made for another database. */
create or replace function rota._check_job_queue(argument text, queue text)
    returns void language plpgsql as $$
begin
    perform rota._check_name(argument, queue);
    -- No worker claims from these, and a forwarder would carry what nobody has checked.
    if queue ^@ 'forward:' then
        perform rota._refuse(argument, format('must not begin with forward:, got %L; '
            'enqueue_to() enqueues in another database', queue));
    end if;
end $$;

create or replace function rota._check_names(argument text, names text[])
    returns void language plpgsql as $$
begin
    if names is null or cardinality(names) not between 1 and 1000 then
        perform rota._refuse(argument, format('must be 1 to 1000 names, got %s',
            coalesce(cardinality(names)::text, 'null')));
    elsif array_ndims(names) > 1 or array_lower(names, 1) <> 1 then
        perform rota._refuse(argument, 'must be a plain list of names');
    end if;
    -- A call costs more than the pattern.
    perform rota._check_name(_check_names.argument, n.name)
    from unnest(_check_names.names) as n (name)
    where (n.name ~ '^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}$') is not true;
end $$;

create or replace function rota._check_text(argument text, value text, longest integer)
    returns void language plpgsql as $$
begin
    -- The bytes first: there can be megabytes, and characters have to be counted.
    if (octet_length(value) <= 4 * longest
        and char_length(value) between 1 and longest) is not true then
        perform rota._refuse(argument, format('must be 1 to %s characters, got %s', longest,
            coalesce(char_length(value)::text, 'null')));
    end if;
end $$;

/* A JSON value of this type; an array of up to so many. */
create or replace function rota._check_json(
    argument text, value jsonb, type text, longest integer default null
) returns void language plpgsql as $$
begin
    if jsonb_typeof(value) is distinct from type then
        perform rota._refuse(argument, format('must be an %s, got %s', type,
            coalesce(jsonb_typeof(value), 'null')));
    elsif longest is not null and jsonb_array_length(value) > longest then
        perform rota._refuse(argument, format('must be at most %s, got %s', longest,
            jsonb_array_length(value)));
    end if;
end $$;

/* A payload or a result, by the length of its text.  That is at least a quarter of the binary
 * form, as in [0, 0]; so what is far too long need not be made a text to be refused. */
create or replace function rota._check_size(argument text, value jsonb, advice text)
    returns void language plpgsql as $$
declare
    v_size constant text := case
        when pg_column_size(value) > 5242880
        then pg_size_pretty(pg_column_size(value)::bigint) || ' in binary form'
        when octet_length(value::text) > 1048576
        then format('%s bytes', octet_length(value::text))
    end;
begin
    if v_size is not null then
        perform rota._refuse(argument,
            format('must be at most 1 MiB, got %s%s', v_size, advice));
    end if;
end $$;

/* An object of texts, as the headers of HTTP are; what is longer belongs into the payload. */
create or replace function rota._check_headers(argument text, headers jsonb)
    returns void language plpgsql as $$
begin
    if headers is null then
        return;
    elsif jsonb_typeof(headers) <> 'object'
      or jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string")') then
        perform rota._refuse(argument, 'must be a JSON object whose values are texts');
    elsif octet_length(headers::text) > 8192 then
        perform rota._refuse(argument, format('must be at most 8 KiB, got %s bytes',
            octet_length(headers::text)));
    end if;
end $$;

/* A duration; between the bounds of leases and time limits, unless others are given. */
create or replace function rota._check_interval(
    argument text, value interval, shortest interval default '1 millisecond',
    longest interval default '30 days', may_be_null boolean default false
) returns void language plpgsql as $$
begin
    -- By their seconds: as an interval a year has 360 days.  An infinite one has no seconds.
    if (value is null and may_be_null or value >= shortest and value <= 2 * longest
        and rota._exact(value) between rota._exact(shortest) and rota._exact(longest)
      ) is not true then
        perform rota._refuse(argument, format('must be %s to %s, got %s', shortest, longest,
            coalesce(value::text, 'null')));
    end if;
end $$;

/* A duration as seconds.  A day of an interval has 23 hours when the session's time zone says
 * so, and '1 month -29 days' is a positive interval that ends in the past in February. */
create or replace function rota._exact(duration interval)
    returns interval language plpgsql immutable as $$
begin return make_interval(secs => extract(epoch from _exact.duration)::float8); end;
$$;

/* Whether jobs have triggers of their database, which may refuse a change of one.  Only then is
 * it worth a subtransaction, which takes a transaction id of its own. */
create or replace function rota._has_triggers()
    returns boolean language plpgsql stable as $$
begin
    return exists (
        select from pg_trigger as t
        where t.tgrelid = 'rota.jobs'::regclass and not t.tgisinternal
    );
end $$;

/* Refuse a snapshot that is older than the locks that the caller takes. */
create or replace function rota._check_isolation(name text)
    returns void language plpgsql as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'RT009',
            message = format('%s needs the isolation level read committed, not %s', name,
                current_setting('transaction_isolation')),
            hint = 'Begin the transaction with "isolation level read committed".';
    end if;
end $$;

create or replace function rota._check_run_at(argument text, run_at timestamptz)
    returns void language plpgsql as $$
begin
    if (run_at between '1970-01-01 00:00+00' and '9999-01-01 00:00+00') is not true then
        perform rota._refuse(argument, format('must be a time from 1970 to 9998, got %s',
            coalesce(run_at::text, 'null')));
    end if;
end $$;

create or replace function rota._check_priority(argument text, priority integer)
    returns void language plpgsql as $$
begin perform rota._check_number(argument, priority, -32768, 32767); end;
$$;

/* What a new job may have to wait for; *prefix* says which of many it is. */
create or replace function rota._check_waits(
    prefix text, ordering_key text, skip_dead boolean, depends_on bigint[], blocks bigint,
    if_parent_dead text, limit_key text
) returns void language plpgsql as $$
begin
    if ordering_key is not null then
        perform rota._check_text(prefix || 'ordering_key', ordering_key, 255);
    end if;
    if skip_dead is null then
        perform rota._refuse(prefix || 'skip_dead', 'must not be null');
    elsif skip_dead and ordering_key is null then
        perform rota._refuse(prefix || 'skip_dead', 'goes with ordering_key only');
    elsif array_ndims(depends_on) > 1
      or array_position(depends_on, null) is not null or cardinality(depends_on) > 10000 then
        perform rota._refuse(prefix || 'depends_on',
            'must be a plain list of at most 10000 ids');
    end if;
    -- Else a cycle of jobs that wait for each other could be closed.
    if blocks is not null and num_nonnulls(depends_on, ordering_key) > 0 then
        raise exception using errcode = 'invalid_parameter_value',
            message = prefix || 'blocks must not be given with depends_on or ordering_key',
            hint = 'Use a pipeline for a part with several steps: start_pipeline() has blocks.';
    end if;
    if if_parent_dead is distinct from 'cancel' then
        perform rota._check_choice(prefix || 'if_parent_dead', if_parent_dead,
            '{cancel,run,wait}');
    end if;
    if limit_key is not null then
        perform rota._check_text(prefix || 'limit_key', limit_key, 255);
        if limit_key like '%:*' then
            perform rota._refuse(prefix || 'limit_key', 'must not end with :*, as classes do');
        end if;
    end if;
end $$;

/* Check a job of the caller; one in a queue that the caller may not use does not exist. */
create or replace function rota._check_own_job(job_id bigint, access text default 'operator')
    returns void language plpgsql as $$
begin
    perform rota._check_given('job_id', job_id is not null);
    if rota._jobs_outside_grants(array[job_id], access) <> '{}' then
        perform rota._raise_not_found(job_id);
    end if;
end $$;

/* A job and its lease token, as a worker names them: a job of a queue that is not granted to it
 * does not exist for it. */
create or replace function rota._check_job_ref(job_id bigint, lease_token bigint)
    returns void language plpgsql as $$
begin
    perform rota._check_own_job(job_id, 'worker');
    if lease_token is null then perform rota._refuse('lease_token', 'must not be null'); end if;
end $$;

create or replace function rota._check_job_refs(
    job_ids bigint[], lease_tokens bigint[], prefix text default ''
) returns void language plpgsql as $$
begin
    if array_ndims(job_ids) > 1 or array_ndims(lease_tokens) > 1 or array_lower(job_ids, 1) <> 1
      or array_lower(lease_tokens, 1) <> 1 then
        perform rota._refuse(prefix || 'job_ids',
            format('and %slease_tokens must be plain lists', prefix));
    elsif job_ids is null or array_position(job_ids, null) is not null then
        perform rota._refuse(prefix || 'job_ids', 'must not be null or hold a null');
    elsif lease_tokens is null or array_position(lease_tokens, null) is not null then
        perform rota._refuse(prefix || 'lease_tokens', 'must not be null or hold a null');
    elsif cardinality(job_ids) > 1000 then
        perform rota._refuse(prefix || 'job_ids',
            format('must be at most 1000, got %s', cardinality(job_ids)));
    elsif cardinality(job_ids) <> cardinality(lease_tokens) then
        perform rota._refuse(prefix || 'lease_tokens', format('must be as many as %sjob_ids '
            '(%s), got %s', prefix, cardinality(job_ids), cardinality(lease_tokens)));
    end if;
end $$;

/* The ids of the leases that may be alive, null for the others, in the order given.  A worker
 * can hold an old and a new lease of one job and report both together; only that counts which
 * the job has, and else the newest, which may be in the making.  A worker that is confined to
 * other queues has none. */
create or replace function rota._newest_refs(job_ids bigint[], lease_tokens bigint[])
    returns bigint[] language plpgsql stable as $$
declare
    v_outside constant bigint[] := rota._jobs_outside_grants(job_ids);
begin
    return array(
        select
            case rank() over (
                partition by r.job_id order by
                    r.lease_token = (
                        select j.lease_token from rota.jobs as j where j.id = r.job_id
                    ) desc nulls last,
                    r.lease_token desc
            ) when 1 then nullif(r.job_id, v_outside[array_position(v_outside, r.job_id)])
            end
        from unnest(_newest_refs.job_ids, _newest_refs.lease_tokens)
            with ordinality as r (job_id, lease_token, ordinal) order by r.ordinal
    );
end $$;

/* Lock those running jobs of a batch that no other session has locked; returns the ids in the
 * order given, null where it could not be.  A row that another session locks for long, as an
 * operator who forgets to commit a cancel does, must not hold up the others of its worker.  But
 * a claim that came upon the row while it was being claimed holds it only until its commit: so
 * those that are held are tried again, for 20 ms, but not later than until.
 *
 * Tried, and not waited for: a session that waits while it holds others can be part of a cycle.
 * An order of the locks would not help, because a claim is in no order, and `skip locked` does
 * wait: if what it would pass over ends in that very moment, for the next session that has
 * locked the row. */
create or replace function rota._hold_jobs(
    job_ids bigint[], lease_tokens bigint[], until timestamptz default 'infinity'
) returns bigint[] language plpgsql as $$
declare
    v_held bigint[] := '{}'::bigint[];
begin
    for v_try in 1..11 loop
        v_held := v_held || array(
            select j.id from rota.jobs as j
            where j.id = any(_hold_jobs.job_ids) and j.lease_token
                = _hold_jobs.lease_tokens[array_position(_hold_jobs.job_ids, j.id)]
              and j.status = 'running' and j.id <> all(v_held) for update skip locked
        );
        exit when v_try = 11 or rota.now() > until or not exists (
            select from unnest(_hold_jobs.job_ids, _hold_jobs.lease_tokens) as i (id, token)
            where i.id <> all(v_held) and rota._is_leased(i.id, i.token)
        );
        perform pg_sleep(0.002);
    end loop;
    return array(
        select h.id from unnest(_hold_jobs.job_ids) with ordinality as i (id, ordinal)
        left join unnest(v_held) as h (id) on h.id = i.id order by i.ordinal
    );
end $$;

/* Whether an error is of the server, the session or the snapshot, as a full disk: then no one
 * of many rows is to blame, and to try them by themselves would help none. */
create or replace function rota._is_no_fault_of_a_row(error_code text)
    returns boolean language sql immutable as $$
select error_code ~ '^(25|40001|53|57|58|XX)'
$$;

/* Whether a job runs under this token; a lease that is over but not taken back is held. */
create or replace function rota._is_leased(job_id bigint, lease_token bigint)
    returns boolean language plpgsql stable as $$
begin
    return exists (
        select from rota.jobs as j
        where j.id = _is_leased.job_id
          and j.lease_token = _is_leased.lease_token and j.status = 'running'
    );
end $$;

/* The same, and it stays so until the end of the transaction. */
create or replace function rota._lock_lease(job_id bigint, lease_token bigint)
    returns boolean language plpgsql as $$
begin
    perform from rota.jobs as j
    where j.id = _lock_lease.job_id
      and j.lease_token = _lock_lease.lease_token and j.status = 'running' for update;
    return found;
end $$;

/* Whether it does for a worker, who may be kept from its queue. */
create or replace function rota._is_running(job_id bigint, lease_token bigint)
    returns boolean language plpgsql stable as $$
begin
    return rota._is_leased(job_id, lease_token)
        and rota._jobs_outside_grants(array[job_id]) = '{}';
end $$;

/* The answer to a caller whose (job_id, lease_token) matched no running job.  A job that ended
 * under this very token is RT003; any other was claimed again or given back, and is RT002. */
create or replace function rota._raise_lost(job_id bigint, lease_token bigint)
    returns void language plpgsql as $$
declare
    v_status text; v_lease_token bigint;
begin
    perform rota._check_job_ref(job_id, lease_token);
    select r.status, r.lease_token into v_status, v_lease_token
    from (
        select j.status, j.lease_token from rota.jobs as j where j.id = _raise_lost.job_id
        union all
        select f.status, f.lease_token from rota.finished_jobs as f
        where f.id = _raise_lost.job_id
    ) as r
    limit 1;

    if v_status is null then
        perform rota._raise_not_found(job_id);
    elsif v_lease_token = lease_token and v_status in ('succeeded', 'dead', 'cancelled') then
        raise exception using
            errcode = 'RT003', message = format('job %s already ended as %s', job_id, v_status),
            hint = 'Its outcome stands; retry_job() runs it again.';
    else
        raise exception using errcode = 'RT002',
            message = format('job %s: lease %s is lost, the job is now %s', job_id, lease_token,
                v_status),
            hint = 'Stop working on it and roll back: the lease ended or was given back.';
    end if;
end $$;

create or replace function rota._raise_not_found(job_id bigint)
    returns void language plpgsql as $$
begin
    perform rota._raise_moved(job_id);
    raise exception using errcode = 'RT001', message = format('job %s not found', job_id),
        hint = 'It never existed, retention has removed it, or its queue is not granted to '
            'the role.';
end $$;
