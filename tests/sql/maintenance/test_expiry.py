"""Jobs that are of no use any more after a time."""

from __future__ import annotations

from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    one,
    owner,
    owners,
    refused,
    rows,
    run,
    running,
    scalar,
    settle,
    value,
)

pytestmark = pytest.mark.slow

HOUR = timedelta(hours=1)
EXPIRED = """
    insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status, run_at,
        expires_at)
    select 'default', 'x', '{}', 0, 10, 'queued', rota.now() - interval '1 hour',
        rota.now() - make_interval(secs => n)
    from generate_series(%s::integer, %s) as g (n)
"""
ENDED = ("cancelled", "expired")


def state(db, job_id):
    row = run(db, job_id)
    return row.status, row.error_type


@pytest.mark.usefixtures("utc")
def test_no_attempt_begins_when_a_job_has_expired(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db, expires_at=now + HOUR)
    other = enqueue(db)
    clock.advance("1 hour")

    assert [job.job_id for job in claim(db, max_jobs=10)] == [other]

    assert state(db, job_id) == ("queued", None)
    assert one(db, "tick").jobs_expired == 1
    row = run(db, job_id)
    assert state(db, job_id) == ENDED
    assert (row.attempts, row.finished_at) == (0, clock.now())
    assert row.cancel_reason.startswith("expired at 2026-01-01 01:00")


def test_an_attempt_may_begin_until_then_and_come_to_its_end(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = enqueue(db, expires_at=now + HOUR)
    clock.set(now + HOUR - timedelta(microseconds=1))
    (job,) = claim(db)
    clock.advance("2 hours")
    one(db, "heartbeat", **owner(job))

    assert one(db, "tick").jobs_expired == 0
    assert value(db, "finish_job", **owner(job)) == "finished"
    assert run(db, job.job_id).expires_at == now + HOUR


@pytest.mark.parametrize("max_jobs", [1, 7, 1000])
@pytest.mark.parametrize("queues", [["default"], ["default", "q"]])
def test_a_claim_takes_the_expired_jobs_that_it_meets_out_of_the_lane(db, max_jobs, queues):
    db.execute(EXPIRED, [1, 450])
    live = [enqueue(db), enqueue(db, queue=queues[-1])]

    claims = []
    for _ in range(6):
        claims += claim(db, max_jobs=max_jobs, queues=queues)

    assert [job.job_id for job in claims] == live
    assert scalar(db, "select count(*) from rota.jobs where hold = 'expired'") == 450
    settle(db)
    assert scalar(db, "select count(*) from rota.job_runs where error_type = 'expired'") == 450


def test_a_claim_leaves_expired_jobs_to_others_when_it_has_met_a_hundred(db):
    db.execute(EXPIRED, [1, 5000])
    live = enqueue(db)

    assert claim(db) == []

    assert scalar(db, "select count(*) from rota.jobs where hold = 'expired'") <= 300
    settle(db)
    assert [job.job_id for job in claim(db)] == [live]


def test_an_expired_job_is_passed_over_where_the_first_place_is_remembered(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    ids = [enqueue(db, expires_at=now + HOUR if n == 3 else None) for n in range(6)]
    assert [claim(db)[0].job_id for _ in range(3)] == ids[:3]
    clock.advance("1 hour")

    assert [claim(db)[0].job_id for _ in range(2)] == ids[4:]


def test_a_retry_does_not_begin_when_the_job_has_expired(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, expires_at=now + HOUR)
    one(db, "fail_job", **owner(job), error="no", error_type="SmtpError", retry_in="3 hours")
    clock.advance("1 hour")

    assert one(db, "tick").jobs_expired == 1

    assert state(db, job.job_id) == ENDED
    assert run(db, job.job_id).last_error == "no"


def test_jobs_that_wait_for_others_expire_and_their_dependants_are_told(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    parent = enqueue(db)
    waiting = enqueue(db, depends_on=[parent], expires_at=now + HOUR)
    children = [
        enqueue(db, depends_on=[waiting], if_parent_dead=rule) for rule in ("cancel", "run")
    ]
    line = [enqueue(db, ordering_key="k", expires_at=now + HOUR), enqueue(db, ordering_key="k")]
    clock.advance("1 hour")
    settle(db)

    assert [state(db, job_id) for job_id in (waiting, line[0])] == [ENDED, ENDED]
    statuses = [run(db, job_id).status for job_id in (*children, line[1])]
    assert statuses == ["cancelled", "queued", "queued"]


def test_a_key_is_free_and_a_run_is_over_when_its_job_has_expired(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    keyed = enqueue(db, idempotency_key="k", expires_at=now + HOUR)
    value(db, "define_pipeline", pipeline="p", stages=Jsonb([{"stage": "s", "job_type": "x"}]))
    in_stage = value(db, "start_pipeline", pipeline="p")
    db.execute("update rota.jobs set expires_at = %s where id = %s", [now + HOUR, in_stage])
    clock.advance("1 hour")
    settle(db)

    assert [state(db, job_id) for job_id in (keyed, in_stage)] == [ENDED, ENDED]
    assert enqueue(db, idempotency_key="k") > in_stage


def test_a_slot_that_was_meant_for_an_expired_job_goes_to_another(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_limit", job_type="x", max_running=1)
    first = running(db)
    second, third = enqueue(db, expires_at=now + HOUR), enqueue(db)
    assert claim(db) == []
    value(db, "finish_job", **owner(first))
    clock.advance("1 hour")
    settle(db)

    assert [job.job_id for job in claim(db)] == [third]
    assert state(db, second) == ENDED


def test_retry_job_of_an_expired_one_lets_it_run(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    ended, waiting = (enqueue(db, expires_at=now + HOUR) for _ in range(2))
    clock.advance("1 hour")
    db.execute(
        "update rota.jobs set expires_at = expires_at + '1 hour' where id = %s", [waiting]
    )
    settle(db)
    clock.advance("1 hour")

    for job_id in (ended, waiting):
        assert value(db, "retry_job", job_id=job_id) == "queued"
        assert run(db, job_id).expires_at is None
    assert {job.job_id for job in claim(db, max_jobs=2)} == {ended, waiting}


def test_retry_job_keeps_what_is_still_to_come(db, clock):
    until = clock.set("2026-01-01 00:00+00") + HOUR
    job = running(db, expires_at=until)
    one(db, "fail_job", **owner(job), error="no", fatal=True)

    value(db, "retry_job", job_id=job.job_id)

    assert run(db, job.job_id).expires_at == until


def test_one_job_that_cannot_be_ended_keeps_no_other(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    ids = [enqueue(db, expires_at=now + HOUR) for _ in range(3)]
    db.execute(f"""
        create function public.poison() returns trigger language plpgsql as $$
        begin
            if old.id = {ids[1]} then raise exception 'poison'; end if;
            return old;
        end $$;
        create trigger poison before delete on rota.jobs
            for each row execute function public.poison();
    """)
    clock.advance("1 hour")

    assert one(db, "tick").jobs_expired == 2

    assert [state(db, job_id) for job_id in ids] == [ENDED, ("queued", None), ENDED]
    assert claim(db) == []


def test_as_many_as_a_tick_ends_that_cannot_be_ended_keep_no_other(db):
    db.execute(EXPIRED, [2, 1001])
    db.execute("update rota.jobs set job_type = 'bad'")
    db.execute("""
        create function public.poison() returns trigger language plpgsql as $$
        begin
            if old.job_type = 'bad' then raise exception 'poison'; end if;
            return old;
        end $$;
        create trigger poison before delete on rota.jobs
            for each row execute function public.poison();
    """)
    db.execute(EXPIRED, [1, 1])

    ticks = [one(db, "tick")]
    while ticks[-1].has_more and len(ticks) < 5:  # another part had no time left
        ticks.append(one(db, "tick"))

    assert [tick.jobs_expired for tick in ticks] == [1] + [0] * (len(ticks) - 1)
    assert not ticks[-1].has_more
    assert scalar(db, "select count(*) from rota.jobs where job_type <> 'bad'") == 0


def test_expiry_goes_past_rows_that_others_have_locked(db, connect, clock):
    now = clock.set("2026-01-01 00:00+00")
    ids = [enqueue(db, expires_at=now + HOUR) for _ in range(2)]
    clock.advance("1 hour")
    with connect(autocommit=False) as other:
        other.execute("select from rota.jobs where id = %s for update", [ids[0]])

        assert one(db, "tick").jobs_expired == 1

    assert [state(db, job_id) for job_id in ids] == [("queued", None), ENDED]
    assert one(db, "tick").jobs_expired == 1


def test_each_tick_ends_a_bounded_number_and_says_that_there_is_more(db):
    db.execute(EXPIRED, [1, 1001])

    first, second = one(db, "tick"), one(db, "tick")

    assert (first.jobs_expired, first.has_more) == (1000, True)
    assert (second.jobs_expired, second.has_more) == (1, False)


def test_those_that_expired_first_end_first(db):
    db.execute(EXPIRED, [1, 1500])

    one(db, "tick")

    found = rows(
        db,
        "select max(f.expires_at) < min(j.expires_at) as is_so"
        " from rota.finished_jobs as f cross join rota.jobs as j",
    )
    assert found == [(True,)]


def test_a_new_event_of_a_key_brings_its_own_end_and_headers(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    said = {"idempotency_key": "k", "on_conflict": "replace"}
    job_id = enqueue(db, **said, expires_at=now + HOUR, headers={"n": "1"})

    enqueue(db, **said, expires_at=now + 2 * HOUR, headers={"n": "2"})
    assert (run(db, job_id).expires_at, run(db, job_id).headers) == (now + 2 * HOUR, {"n": "2"})
    enqueue(db, **said)
    assert (run(db, job_id).expires_at, run(db, job_id).headers) == (None, None)


def test_the_run_that_follows_another_does_not_expire_with_it(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, idempotency_key="k", expires_at=now + HOUR, headers={"n": "1"})
    enqueue(db, idempotency_key="k", on_conflict="rerun", headers={"n": "2"})
    clock.advance("2 hours")
    value(db, "finish_job", **owner(job))

    (again,) = claim(db)

    assert again.headers == {"n": "2"}
    assert run(db, again.job_id).expires_at is None


@pytest.mark.parametrize("ending", ["fail", "snooze", "forced"])
def test_a_job_that_comes_back_as_the_run_that_follows_does_not_expire_as_it_was(
    db, clock, ending
):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, idempotency_key="k", expires_at=now + HOUR)
    enqueue(db, idempotency_key="k", on_conflict="rerun", payload={"v": 2})

    if ending == "fail":
        one(db, "fail_job", **owner(job), error="e", retry_in="2 hours")
    elif ending == "snooze":
        value(db, "snooze_job", **owner(job), delay="2 hours")
    else:
        value(db, "retry_job", job_id=job.job_id, force=True)

    clock.advance("2 hours")
    settle(db)
    (again,) = claim(db)
    assert (again.job_id, again.payload) == (job.job_id, {"v": 2})


@pytest.mark.parametrize("ending", ["fail", "release"])
def test_the_run_that_follows_in_the_same_job_expires_by_when_it_was_asked_for(
    db, clock, ending
):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="default", expires_after="1 hour")
    job = running(db, idempotency_key="k")
    clock.advance("50 minutes")
    enqueue(db, idempotency_key="k", on_conflict="rerun")
    clock.advance("50 minutes")

    if ending == "fail":
        one(db, "fail_job", **owner(job), error="e", retry_in="0")
    else:
        call(db, "release_jobs", **owners(job))

    settle(db)
    (again,) = claim(db)
    assert run(db, again.job_id).expires_at == now + timedelta(minutes=110)


def test_enqueue_refuses_an_end_before_the_start_and_one_with_rerun(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    keyed = {"idempotency_key": "k", "on_conflict": "rerun"}
    for bad in [
        {"expires_at": now + HOUR, "run_at": now + HOUR},
        {"expires_at": now + HOUR, "delay": "1 hour"},
        {"expires_at": "0044-03-15 BC"},
        {"expires_at": "infinity"},
        {"expires_at": now + HOUR, **keyed},
        {"expires_after": "1 hour", **keyed},
    ]:
        with refused("expires_at"):
            enqueue(db, **bad)
        plain = {key: str(value) for key, value in bad.items()}
        with refused("jobs[1].expires_at"):
            call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", **plain}]))

    assert state(db, enqueue(db, expires_at=now - HOUR)) == ("queued", None)
    settle(db)
    assert claim(db) == []
