/*
 * jobs/effects.sql -- do something outside of the database once.
 *
 * record_effect(), commit, do it, complete_effect().  What is promised:
 *
 * 1. Of all that record the same (scope, key) one is told true and holds the record, until it
 *    is withdrawn, purged or taken over.
 * 2. If the holder's lease is lost before it completes the record, it is unknown whether the
 *    effect happened.  Neither answer is right for every effect, so the next caller chooses:
 *    'skip' is told false, at most once; 'again' takes the record over, at least once.
 * 3. As long as the holder's lease is not lost, other jobs get neither answer, but RT010; the
 *    holder itself, should it ask again, chooses too.
 * 4. A lease that is lost, or does not hold the record, changes nothing.
 *
 * A person may know what became of an effect even if no worker does: that the mail is there, or
 * that the mail server has never seen it.  settle_effect() records that.
 *
 * Every call locks first the row of its own job, then that of the effect, and waits for no
 * third; so calls cannot deadlock.  Whether the holder's lease is held is only read: once it is
 * lost it stays so, because a token never comes back.
 */

create or replace function rota.record_effect(
    scope text, key text, job_id bigint, lease_token bigint, if_unknown text default 'skip',
    keep interval default '180 days'
) returns boolean language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_now constant timestamptz := rota.now();
    v_expires_at timestamptz; v_effect rota.effects;
begin
    perform rota._check_effect(scope, key);
    perform rota._check_job_ref(job_id, lease_token);
    perform rota._check_choice('if_unknown', if_unknown, '{skip,again}');
    perform rota._check_interval('keep', keep, '1 second', '100 years');
    v_expires_at := v_now + rota._exact(keep);
    if not rota._lock_lease(job_id, lease_token) then
        perform rota._raise_lost(job_id, lease_token);
    end if;

    for v_try in 1..100 loop
        insert into rota.effects (scope, key, job_id, lease_token, queue, recorded_at,
            expires_at)
        select record_effect.scope, record_effect.key, j.id, j.lease_token, j.queue, v_now,
            v_expires_at
        from rota.jobs as j where j.id = record_effect.job_id on conflict do nothing;
        if found then return true; end if;

        select e.* into v_effect from rota.effects as e
        where e.scope = record_effect.scope and e.key = record_effect.key for update;
        -- If it is not found, it was withdrawn or purged just now.
        exit when found;
    end loop;
    if v_effect.scope is null then perform rota._raise_swallowed('the effect'); end if;

    if v_effect.completed_at is null
      and (v_effect.job_id, v_effect.lease_token) <> (job_id, lease_token)
      and rota._is_leased(v_effect.job_id, v_effect.lease_token) then
        perform rota._raise_in_progress(v_effect);
    elsif v_effect.completed_at is not null or if_unknown = 'skip' then
        return false;
    end if;

    update rota.effects as e
    set job_id = j.id, lease_token = j.lease_token, queue = j.queue, recorded_at = v_now,
        expires_at = v_expires_at
    from rota.jobs as j
    where e.scope = record_effect.scope and e.key = record_effect.key
      and j.id = record_effect.job_id;
    return true;
end $$;

comment on function rota.record_effect is
    'Record that a running job is about to cause an effect and return true, or false if it '
    'must not: it is done, or its outcome is unknown and if_unknown is not again; raises RT002 '
    'if the lease is lost, RT010 if another job is causing it, RT001, RT003, 22023, 09000 if a '
    'trigger removes the row.';

create or replace function rota.complete_effect(
    scope text, key text, job_id bigint, lease_token bigint, result jsonb default null
) returns text language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
begin
    perform rota._check_size('result', result, '');
    -- Asked again, because the answer was lost.
    if rota._lock_record(scope, key, job_id, lease_token, may_be_completed => true) then
        return 'already_completed';
    end if;
    update rota.effects as e
    set completed_at = rota.now(), result = complete_effect.result
    where e.scope = complete_effect.scope and e.key = complete_effect.key;
    return 'completed';
end $$;

comment on function rota.complete_effect is
    'Record that an effect has happened and return completed, or already_completed if this '
    'token has reported it before; raises RT002 if the lease is lost, RT011 if it does not '
    'hold the record, RT001, RT003, 22023.';

create or replace function rota.withdraw_effect(
    scope text, key text, job_id bigint, lease_token bigint
) returns void language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
begin
    perform rota._lock_record(scope, key, job_id, lease_token, may_be_completed => false);
    delete from rota.effects as e
    where e.scope = withdraw_effect.scope and e.key = withdraw_effect.key;
end $$;

comment on function rota.withdraw_effect is
    'Withdraw the record of an effect that certainly did not happen; raises RT002 if the lease '
    'is lost, RT011 if it does not hold the record, RT001, RT003, 22023.';

create or replace function rota.settle_effect(
    scope text, key text, outcome text, result jsonb default null
) returns bigint language plpgsql security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
    v_effect rota.effects;
begin
    perform rota._check_effect(scope, key);
    perform rota._check_choice('outcome', outcome, '{done,again}');
    perform rota._check_size('result', result, '');
    perform rota._refuse('result', 'goes with the outcome done only')
    where outcome = 'again' and settle_effect.result is not null;

    select e.* into v_effect from rota.effects as e
    where e.scope = settle_effect.scope and e.key = settle_effect.key
      and e.completed_at is null for update;
    if not found or rota._is_own_effect(v_effect, 'operator') is not true then
        raise exception using errcode = 'RT011',
            message = format('effect %s %L has no open record', scope, key),
            hint = 'rota.unknown_effects lists those that can be settled.';
    elsif rota._is_leased(v_effect.job_id, v_effect.lease_token) then
        perform rota._raise_in_progress(v_effect);
    end if;
    -- Where that job is now nobody would know of it.
    perform rota._raise_moved(v_effect.job_id);

    delete from rota.effects as e
    where outcome = 'again' and e.scope = settle_effect.scope and e.key = settle_effect.key;
    update rota.effects as e
    set completed_at = rota.now(), result = settle_effect.result
    where outcome = 'done' and e.scope = settle_effect.scope and e.key = settle_effect.key;
    perform rota._audit('settle_effect', jsonb_build_object('scope', scope, 'key', key), null,
        jsonb_build_object('job_id', v_effect.job_id), jsonb_build_object('outcome', outcome));
    return v_effect.job_id;
end $$;

comment on function rota.settle_effect is
    'Record that an effect whose outcome is unknown is done, with its result, or let the next '
    'job that records it repeat it, and return the id of the job that had recorded it; raises '
    'RT010 if that job is still causing it, RT011 if no record is open, RT016 if that job has '
    'moved to another database, 22023.';

create or replace function rota.effect_result(scope text, key text)
    returns table (is_done boolean, result jsonb) language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
    set plan_cache_mode = force_generic_plan as $$
begin
    perform rota._check_effect(scope, key);
    return query select e.completed_at is not null,
        case when rota._is_own_effect(e, 'worker') then e.result end
    from rota.effects as e
    where e.scope = effect_result.scope and e.key = effect_result.key;
end $$;

comment on function rota.effect_result is
    'Return whether a recorded effect is done, and with what result, null if the caller may '
    'not work in its queue; no row if there is no record; raises 22023.';

/* Whether an effect was recorded in a queue in which the caller may do this, or its job is
 * there now. */
create or replace function rota._is_own_effect(effect rota.effects, access text)
    returns boolean language plpgsql stable as $$
begin
    return effect.queue = any(rota._allowed_queues(access))
      or rota._jobs_outside_grants(array[effect.job_id], access) = '{}';
end $$;

create or replace function rota._check_effect(scope text, key text)
    returns void language plpgsql as $$
begin
    perform rota._check_name('scope', scope);
    perform rota._check_text('key', key, 255);
end $$;

create or replace function rota._raise_in_progress(effect rota.effects)
    returns void language plpgsql as $$
begin
    raise exception using errcode = 'RT010',
        message = format('effect %s %L is in progress: job %s has recorded it and still runs',
            effect.scope, effect.key, effect.job_id),
        hint = 'Try again when that job has ended.';
end $$;

/* Lock the lease of a caller, and return whether the record that it has made is completed;
 * refuse one that has none, or whose lease is lost while the record is open.  As long as the
 * lease is locked nobody else changes an open record of it. */
create or replace function rota._lock_record(
    scope text, key text, job_id bigint, lease_token bigint, may_be_completed boolean
) returns boolean language plpgsql as $$
declare
    v_is_leased boolean; v_is_completed boolean;
begin
    perform rota._check_effect(scope, key);
    perform rota._check_job_ref(job_id, lease_token);
    v_is_leased := rota._lock_lease(job_id, lease_token);
    v_is_completed := (
        select e.completed_at is not null from rota.effects as e
        where e.scope = _lock_record.scope
          and e.key = _lock_record.key and e.job_id = _lock_record.job_id
          and e.lease_token = _lock_record.lease_token
    );
    if v_is_completed and may_be_completed then
        return true;
    elsif not v_is_leased then
        perform rota._raise_lost(job_id, lease_token);
    elsif v_is_completed is not false then
        raise exception using errcode = 'RT011',
            message = format('effect %s %L has no open record of job %s', scope, key, job_id),
            hint = 'Only the caller to which record_effect() returned true may continue; a '
                'record ends when it is completed or withdrawn.';
    end if;
    return false;
end $$;
