/*
 * waiting/fairness.sql -- the place of a job in its lane.
 *
 * A claim walks lanes in order of place, and knows nothing of ageing or fair shares: the place
 * is given when the job comes in.  A plain job has none of its own; there the place is run_at.
 *
 * Ageing: all jobs of the queue are in lane 0, at run_at + priority * ageing.  Of two jobs the
 * one with the lower effective priority (priority - waited / ageing) has the lower sum at any
 * time, because both grow old at one rate.  Keys have no shares there.
 *
 * Fair shares (start-time fair queueing): a job with a limit_key goes to the place of the
 * first job of the lane, or a microsecond behind the last job of its key if that is later;
 * `weight` jobs of a key share a place.  So the time of a lane goes on with what is claimed of
 * it, and a new key does not wait behind the backlog of another.  In such a queue the jobs
 * without a key count as one more key.  No session holds a lock or a row of state: two
 * producers that do not see each other may give out the same places, which is a little unfair
 * and nothing else.
 *
 * A job that is given back before it has begun, at its time and priority, is where it was: its
 * key may have a million behind it.
 *
 * A job with a place of its own is not in the lane before it is due: hold is 'time', and
 * maintenance lets it in.  One whose limit is known to be full is held at once, so that a
 * million jobs of one customer never stand in front of others.
 *
 * A new priority moves a waiting job.  A new ageing moves all those of the queue, by
 * maintenance and in steps: until then they are claimed, only not in the new order.  A new
 * weight applies to the jobs that come in after it.
 */

/* Give waiting jobs their places, unless they keep theirs, and hold those that have to wait. */
create or replace function rota._place_jobs(job_ids bigint[], keep_places boolean default false)
    returns void language plpgsql as $$
declare
    c_waiting constant text[] := '{queued,failed}'::text[];
    v_jobs rota.jobs[]; v_ids bigint[]; v_opened_for text[];
begin
    select array_agg(j), array_agg(j.id),
        array_agg(j.opened_for) filter (where j.opened_for is not null)
    into v_jobs, v_ids, v_opened_for from rota.jobs as j
    where j.id = any(_place_jobs.job_ids) and j.status = any(c_waiting);
    v_jobs := rota._give_places(v_jobs, v_ids, rota.now(), keep_places);
    update rota.jobs as j
    set hold = p.hold, opened_for = null, own_lane = p.own_lane, own_place = p.own_place
    from unnest(v_jobs) as p
    where j.id = any(v_ids) and j.id = p.id and (j.hold, j.opened_for, j.own_lane, j.own_place)
        is distinct from (p.hold, null, p.own_lane, p.own_place);
    -- The slots that these were let in for may be for others.
    if v_opened_for is not null then perform rota._add_checks('limit', v_opened_for); end if;
end $$;

/* How many of new jobs of one kind may enter their lane, which begins there: as many as could
 * start at once under this limit, less those that wait there already, and none where it has
 * held others.  The ids are those of all that are new, the lowest first. */
create or replace function rota._room_in_lane(
    limit_name text, max_running integer, queue text, job_type text, limit_key text,
    lane integer, first_place timestamptz, job_ids bigint[]
) returns integer language plpgsql as $$
declare
    v_free integer := least(max_running, 100);
begin
    if v_free > 0 is not true or rota._had_held(limit_name) then
        return 0;
    elsif limit_name like 'key %' then
        v_free := v_free - (
            select count(*)::integer
            from (
                select from rota.jobs as j
                where j.queue = _room_in_lane.queue
                  and coalesce(j.own_lane, j.priority) = _room_in_lane.lane
                  and coalesce(j.limit_key, '') = _room_in_lane.limit_key
                  and j.own_place is not null and coalesce(j.hold, '') <> 'time'
                  and j.hold is null and j.status in ('queued', 'failed')
                  and coalesce(j.own_place, j.run_at) >= _room_in_lane.first_place
                  and j.id <> all(_room_in_lane.job_ids)
                order by coalesce(j.own_place, j.run_at) desc limit v_free
            ) as o
        );
    else
        v_free := v_free - (
            select count(*)::integer from rota.jobs as j
            where j.id between job_ids[1] - 1000 * rota._id_step() and job_ids[1] - 1
              and j.job_type = _room_in_lane.job_type
              and j.status = any('{queued,failed}'::text[]) and coalesce(j.hold, '') = ''
        );
    end if;
    return greatest(v_free, 0);
end $$;

/* Whether a limit has held jobs, or had when that was found out at some expense. */
create or replace function rota._had_held(limit_name text)
    returns boolean language plpgsql as $$
declare
    c_scan constant rota.scan := rota._begin_scan('waiting ' || limit_name,
        'rota.jobs_hold_idx', '1 minute');
    v_has_held boolean;
begin
    if c_scan.start is not null then return c_scan.start = 1; end if;
    v_has_held := (
        select j.hold from rota.jobs as j
        where j.hold = _had_held.limit_name
          and j.hold <> 'time' and j.status in ('queued', 'failed')
        order by j.queue, j.job_type limit 1
    ) is not null;
    perform rota._end_scan(c_scan, v_has_held::integer,
        -- Else, at worst, a job is held until the next tick, or found and held by a claim.
        max_pause => case when v_has_held then interval '2 seconds' end);
    return v_has_held;
end $$;

/* The last place that jobs of a key have in a lane that begins there, apart from these, and how
 * many of them have it, up to the weight of the key; if there are none, the lane's first.  Only
 * of those places that claims walk to: behind them are jobs that still have the place of an
 * ageing that the queue had. */
create or replace function rota._last_of_key(
    queue text, limit_key text, lane integer, first_place timestamptz, weight integer,
    job_ids bigint[], out place timestamptz, out jobs integer
) language plpgsql stable as $$
declare
    c_key constant text := coalesce(limit_key, '');
    -- As _open_queues() has it.
    v_end constant timestamptz := rota.now() + interval '1 minute';
begin
    select l.place, count(*)::integer into place, jobs
    from (
        select coalesce(j.own_place, j.run_at) as place from rota.jobs as j
        where j.queue = _last_of_key.queue
          and coalesce(j.own_lane, j.priority) = _last_of_key.lane
          and coalesce(j.limit_key, '') = c_key and j.own_place is not null
          and coalesce(j.hold, '') <> 'time' and j.status in ('queued', 'failed')
          and coalesce(j.own_place, j.run_at) >= _last_of_key.first_place
          and coalesce(j.own_place, j.run_at) <= v_end and j.id <> all(_last_of_key.job_ids)
        order by coalesce(j.own_place, j.run_at) desc limit _last_of_key.weight
    ) as l
    group by l.place order by l.place desc limit 1;
    place := coalesce(place, first_place);
    jobs := coalesce(jobs, 0);
end $$;

/* Jobs of keys wait in a queue: from now on all its jobs have places. */
create or replace function rota._note_fair_queue(queue text)
    returns void language plpgsql as $$
begin
    if exists (select from rota.fair_queues as f where f.queue = _note_fair_queue.queue)
      or not rota._try_lock('rota.fair ' || queue) then
        return;
    end if;
    begin
        -- With the lock no other session is about to write it, so this does not wait.
        insert into rota.fair_queues (queue) values (_note_fair_queue.queue)
        on conflict do nothing;
    exception when serialization_failure then
        return;  -- another session has, since an older snapshot
    end;
    perform rota._add_checks('queue', array[queue]);
end $$;

/* The place of the first job of a lane, or now if it is empty. */
create or replace function rota._first_place(queue text, lane integer)
    returns timestamptz language plpgsql as $$
declare
    c_scan constant rota.scan := rota._begin_scan(format('lane %s %s', lane, queue),
        'rota.jobs_ready_idx', '1 minute');
    v_place timestamptz;
begin
    v_place := least(c_scan.begun_at, (
        select coalesce(j.own_place, j.run_at) from rota.jobs as j
        where j.queue = _first_place.queue
          and coalesce(j.own_lane, j.priority) = _first_place.lane and j.hold is null
          and j.status in ('queued', 'failed')
          and coalesce(j.own_place, j.run_at) >= rota._from_micros(c_scan.start)
        order by coalesce(j.own_place, j.run_at) limit 1
    ));
    -- Asked here too, where it costs no call.
    if c_scan.start is not null
      or pg_stat_get_xact_tuples_returned(c_scan.index) - c_scan.walked >= 200 then
        perform rota._end_scan(c_scan, rota._micros(v_place));
    end if;
    return v_place;
end $$;

/* The same where dead index entries pile up in front of it, which this session then remembers;
 * else null. */
create or replace function rota._place_behind_dead(queue text, lane integer)
    returns timestamptz language plpgsql as $$
declare
    v_place constant timestamptz := rota._first_place(queue, lane);
begin
    return case
        when (rota._begin_scan(format('lane %s %s', lane, queue), null, '1 minute')).start
            is not null then v_place
    end;
end $$;

/* Give jobs of a queue their places anew, from one id on, a few thousand at a time; the subject
 * is the queue, the id that the last step has come to, and the pass.  After the first pass it
 * waits until all transactions are over that may not have known the new setting, and begins
 * again now and then.  A second pass follows, another as long as a session has one of the jobs
 * locked, which may come back, and one when no snapshot is left from before the setting. */
create or replace function rota._check_queue(subject text)
    returns boolean language plpgsql as $$
declare
    c_queue constant text := split_part(subject, ' ', 1);
    c_after constant bigint := coalesce(nullif(split_part(subject, ' ', 2), ''), '0')::bigint;
    c_ageing constant interval := (
        select q.ageing from rota.queues as q where q.queue = c_queue);
    c_is_fair constant boolean := exists (
        select from rota.fair_queues as f where f.queue = c_queue);
    c_waiting constant text[] := '{queued,failed}'::text[];
    -- Asked before the first step: what commits later may be behind this pass.
    c_are_older constant boolean := c_after = 0 and exists (
        select from rota.queues as q
        join pg_stat_activity as a on age(a.backend_xmin) >= age(q.xmin)
        where q.queue = c_queue and a.datname = current_database()
    );
    v_pass text := split_part(subject, ' ', 3);
    v_ids bigint[]; v_wanted bigint[]; v_locked bigint[]; v_holds text[];
begin
    if v_pass = 'wait' then
        if rota._has_outlasted_others('queue', subject) then
            perform rota._add_checks('queue', array[c_queue || ' 0 second']);
            return true;
        end if;
        -- What others commit or leave meanwhile does not wait for one that stays open: after
        -- six seconds it begins again.
        perform rota._add_checks('queue', array[c_queue]) from rota.pending_checks as c
        where c.kind = 'queue' and c.subject = _check_queue.subject and c.due_at > '-infinity'
          and c.deferrals >= 7;
        return found;
    elsif v_pass = 'older' and c_after = 0 then
        if c_are_older then return false; end if;
        v_pass := 'second';
    elsif v_pass = 'second' and c_are_older then
        v_pass := 'older';
    end if;

    v_ids := array(
        select j.id from rota.jobs as j where j.id > c_after order by j.id limit 5000
    );
    v_wanted := array(
        select j.id from rota.jobs as j
        where j.id = any(v_ids) and j.queue = c_queue and j.status = any(c_waiting)
          -- A retry has its place when the budget lets it in.
          and coalesce(j.hold, '') not like 'retries %' and case
            when c_ageing is null then j.own_lane = 0 or c_is_fair
                and j.own_place is null and j.hold is null and j.run_at > rota.now()
            when j.run_at > rota.now() then coalesce(j.hold, '') <> 'time'
            else (j.own_lane, j.own_place) is distinct from
                (0::smallint, j.run_at + j.priority * c_ageing)
          end
    );
    v_locked := array(
        select j.id from rota.jobs as j
        where j.id = any(v_wanted) and j.status = any(c_waiting) and j.queue = c_queue
        for update skip locked
    );
    with held as (
        update rota.jobs as j
        set own_lane = case when c_ageing is not null then 0 end,
            own_place = case
                when c_ageing is not null then j.run_at + j.priority * c_ageing
                when c_is_fair or j.limit_key is not null then j.run_at
            end
        -- Else the planner may read all that is held, to find these.
        where j.id = any(v_locked) and coalesce(j.hold, 'time') <> 'time' returning j.hold
    )
    select array_agg(distinct h.hold) into v_holds from held as h
    where h.hold like 'key %' or h.hold like 'type %';
    perform rota._add_checks('limit', v_holds);
    perform rota._place_jobs(array(
        select j.id from rota.jobs as j
        where j.id = any(v_locked) and coalesce(j.hold, 'time') = 'time'
    ));
    if v_pass <> '' and cardinality(v_locked) < cardinality(v_wanted) then
        v_pass := 'missed';
    end if;
    -- Fewer are the last: those that come in later know the setting.
    if cardinality(v_ids) = 5000 then
        perform rota._add_checks('queue',
            array[rtrim(format('%s %s %s', c_queue, v_ids[5000], v_pass))]);
    elsif v_pass = '' then
        perform rota._add_checks('queue', array[c_queue || ' 0 wait']);
    elsif v_pass = 'missed' then
        perform rota._add_checks('queue', array[c_queue || ' 0 second'],
            rota.now() + interval '5 seconds');
    elsif v_pass = 'older' then
        perform rota._add_checks('queue', array[c_queue || ' 0 older']);
    end if;
    return true;
end $$;
