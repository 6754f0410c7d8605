"""What an open transaction keeps from others under a limit, and that no slot is ever lost."""

from __future__ import annotations

import random

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import call, claim, enqueue, one, owner, owners, rows, scalar, settle, value

pytestmark = pytest.mark.slow

RECOUNT = """
select l.limit_name, l.max_running, coalesce(p.slots, 0) as issued,
    coalesce(f.free, 0) as free, coalesce(h.held, 0) as held
from rota.limits as l
left join (
    select limit_name, sum(slots) as slots from rota.limit_parts group by 1
) as p using (limit_name)
left join (
    select limit_name, count(*) as free from rota.limit_slots group by 1
) as f using (limit_name)
left join (
    select n as limit_name, count(*) as held
    from rota.jobs, unnest(held_limits) as n where status = 'running' group by 1
) as h using (limit_name)
where l.max_running is not null
"""


def recount(db):
    """Check that the slots that are free and those that are held are those that were issued."""
    found = rows(db, RECOUNT)
    for limit in found:
        assert limit.free + limit.held == limit.issued, limit
    return found


def limit(db, **arguments):
    value(db, "set_limit", **arguments)
    call(db, "tick")


SUBJECTS = {
    "queue": ({"queue": "default"}, {}),
    "type": ({"job_type": "x"}, {}),
    "key": ({"limit_key": "k"}, {"limit_key": "k"}),
    "class": ({"limit_key": "c:*"}, {"limit_key": "c:1"}),
}


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("kind", SUBJECTS)
def test_an_open_claim_keeps_only_its_own_slot(db, connect, kind, is_fresh):
    subject, job = SUBJECTS[kind]
    limit(db, **subject, max_running=10)
    for _ in range(30):
        enqueue(db, **job)
    if not is_fresh:
        call(db, "finish_jobs", **owners(*claim(db, max_jobs=10)))
    db.execute("set lock_timeout = '5 s'")

    first = connect()
    with first.transaction():
        assert len(claim(first)) == 1
        assert len(claim(db, max_jobs=20)) == 9
        assert claim(db, max_jobs=20) == []
    recount(db)


@pytest.mark.parametrize("started", [0, 2])
@pytest.mark.parametrize("kind", SUBJECTS)
def test_a_limit_counts_what_started_while_its_transaction_was_open(db, connect, kind, started):
    """If nothing did, jobs start under it without a tick."""
    subject, job = SUBJECTS[kind]
    for _ in range(9):
        enqueue(db, **job)

    with connect().transaction() as setter:
        value(setter.connection, "set_limit", **subject, max_running=2)
        for _ in range(started):  # by sessions that cannot know of the limit
            assert len(claim(connect())) == 1

    assert len(claim(db, max_jobs=9)) == 2 - started
    settle(db)
    assert claim(db, max_jobs=9) == []
    recount(db)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_an_open_end_keeps_only_its_own_slot(db, connect, kind):
    subject, job = SUBJECTS[kind]
    limit(db, **subject, max_running=3)
    for _ in range(9):
        enqueue(db, **job)
    jobs = claim(db, max_jobs=3)

    first = connect()
    with first.transaction():
        value(first, "finish_job", **owner(jobs[0]))
        value(db, "finish_job", **owner(jobs[1]))
        call(db, "tick")
        assert len(claim(db, max_jobs=3)) == 1
        value(db, "finish_job", **owner(jobs[2]))
        call(db, "tick")
        assert len(claim(db, max_jobs=3)) == 1
    # A session that has begun its scans behind what was committed late finds it in a moment.
    other = connect()
    call(other, "tick")
    assert len(claim(other, max_jobs=3)) == 1
    recount(db)


def test_an_open_enqueue_of_a_full_limit_holds_up_nobody(db, connect):
    limit(db, limit_key="c:*", max_running=1)
    enqueue(db, limit_key="c:1")
    (job,) = claim(db)
    first = connect()
    with first.transaction():
        enqueue(first, limit_key="c:1")
        enqueue(first, limit_key="c:1")
        mine = enqueue(db, limit_key="c:1")
        enqueue(db, limit_key="c:2")
        value(db, "finish_job", **owner(job))
        call(db, "tick")
        found = claim(db, max_jobs=5)
        assert len(found) == 2
        assert mine in [job.job_id for job in found]
    recount(db)


def test_a_job_that_came_in_beside_an_end_is_opened_by_its_check(db, connect, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_running=1)
    enqueue(db)
    (job,) = claim(db, lease="1 day")
    first, second = connect(), connect()
    with first.transaction():
        enqueue(first), enqueue(first)
        with second.transaction():
            value(second, "finish_job", **owner(job))
    found = []
    for _ in range(5):
        clock.advance("1 s")
        call(db, "tick")
        found += claim(db, lease="1 day")

    assert len(found) == 1
    recount(db)


def test_a_held_job_is_opened_when_the_one_before_it_was_cancelled_or_moved(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, limit_key="k", max_running=1)
    first, second, third, fourth = (enqueue(db, limit_key="k") for _ in range(4))
    (job,) = claim(db)
    assert job.job_id == first
    assert claim(db) == []

    value(db, "finish_job", **owner(job))
    value(db, "cancel_job", job_id=second)
    call(db, "tick")
    value(db, "reschedule_job", job_id=third, delay="1 hour")
    call(db, "tick")
    call(db, "tick")

    assert [job.job_id for job in claim(db)] == [fourth]


def test_two_limits_give_back_what_only_one_of_them_had_room_for(db):
    limit(db, limit_key="k", max_running=5)
    limit(db, job_type="x", max_running=1)
    enqueue(db, limit_key="k"), enqueue(db, limit_key="k")
    other = enqueue(db, "y", limit_key="k")

    found = [job.job_id for job in claim(db, max_jobs=5)]

    assert len(found) == 2
    assert other in found
    recount(db)


@pytest.mark.parametrize(("before", "after"), [(10, 4), (4, 10), (100, 7), (3, 300), (9, 0)])
def test_no_more_than_the_new_setting_start_after_a_change(db, clock, before, after):
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_running=before)
    db.execute("select rota.enqueue('x') from generate_series(1, 320)")
    for _ in range(3):
        call(db, "tick")
    jobs = claim(db, max_jobs=6, lease="1 day")
    limit(db, job_type="x", max_running=after)
    running = len(jobs)

    for _ in range(30):
        clock.advance("1 s")
        call(db, "tick")
        if jobs:
            value(db, "finish_job", **owner(jobs.pop()))
            running -= 1
        found = claim(db, max_jobs=100, lease="1 day")
        running += len(found)
        assert not found or running <= after
        recount(db)

    assert running == after


WAYS_OUT = [
    lambda db, job: value(db, "finish_job", **owner(job)),
    lambda db, job: one(db, "fail_job", **owner(job), error="e", retry_in="0"),
    lambda db, job: call(db, "release_jobs", **owners(job)),
    lambda db, job: value(db, "snooze_job", **owner(job), delay="0"),
    lambda db, job: value(db, "retry_job", job_id=job.job_id, force=True),
]


@pytest.mark.parametrize("seed", range(4))
def test_recount_after_anything(db, seed):
    chance = random.Random(seed)
    value(db, "set_limit", limit_key="c:*", max_running=3)
    value(db, "set_limit", job_type="x", max_running=4, max_starts=1000)
    value(db, "set_limit", queue="q", max_running=5)
    mine = []
    for _ in range(150):
        act = chance.choice(["enqueue"] * 3 + ["claim"] * 3 + ["end"] * 3 + ["tick", "limit"])
        if act == "enqueue":
            enqueue(
                db,
                chance.choice("xy"),
                queue=chance.choice(["q", "default"]),
                limit_key=chance.choice([None, "c:1", "c:2"]),
            )
        elif act == "claim":
            mine += claim(db, queues=["q", "default"], max_jobs=chance.choice([1, 3, 10]))
        elif act == "end" and mine:
            job = mine.pop(chance.randrange(len(mine)))
            chance.choice(WAYS_OUT)(db, job)
        elif act == "limit":
            value(db, "set_limit", job_type="x", max_running=chance.randrange(1, 7))
        else:
            call(db, "tick")
        held = scalar(
            db,
            "select coalesce(max(n), 0) from (select count(*) as n from rota.jobs"
            " where status = 'running' and limit_key is not null group by limit_key) as k",
        )
        assert held <= 3

    for job in mine:
        value(db, "finish_job", **owner(job))
    for _ in range(300):
        call(db, "tick")
        jobs = claim(db, queues=["q", "default"], max_jobs=10)
        call(db, "finish_jobs", **owners(*jobs)) if jobs else None
        if not scalar(db, "select count(*) from rota.jobs"):
            break
        db.execute("select pg_sleep(0.02)")
    assert rows(db, "select id, queue, job_type, limit_key, hold from rota.jobs") == []
    recount(db)


def open_jobs(db):
    return scalar(db, "select count(*) from rota.jobs where hold is null and status = 'queued'")


@pytest.mark.parametrize("kind", ["type", "key", "class"])
@pytest.mark.parametrize("max_running", [1, 3, 150])
def test_checks_open_no_more_than_can_start(db, kind, max_running):
    subject, job = SUBJECTS[kind]
    limit(db, **subject, max_running=max_running)
    for _ in range(3):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", **job}] * 200))
        while one(db, "tick").has_more:
            pass

    # Those that came in while there was room are not counted among them.
    assert open_jobs(db) <= max_running + min(max_running, 100)

    other = enqueue(db, "other")
    started = 0
    while jobs := claim(db, max_jobs=50):
        started += len(jobs)
        if other in [job.job_id for job in jobs]:
            break
        while one(db, "tick").has_more:
            pass
    assert other in [job.job_id for job in jobs]
    assert started <= max_running + 1
    recount(db)


def test_new_jobs_of_many_keys_do_not_stand_in_front_of_others(db):
    limit(db, limit_key="c:*", max_running=1)
    scalar(
        db,
        "select count(rota.enqueue('x', limit_key => 'c:' || n % 1500))"
        " from generate_series(1, 4500) as n",
    )

    assert open_jobs(db) == 1500


def test_a_slot_goes_to_another_if_the_job_that_it_was_for_is_held_again(db):
    limit(db, job_type="x", max_running=1)
    limit(db, limit_key="k", max_running=1)
    first = enqueue(db, "x")
    (running,) = claim(db)
    last = enqueue(db, "x")
    keyed = enqueue(db, "x", limit_key="k", priority=-1)
    assert claim(db) == []
    call(db, "tick")
    value(db, "finish_job", **owner(running))
    assert scalar(db, "select opened_for from rota.jobs where id = %s", keyed) == "type x"

    # Now its key is in use.
    enqueue(db, "y", limit_key="k")
    assert len(claim(db, job_types=["y"])) == 1
    assert [running.job_id, claim(db)] == [first, []]
    call(db, "tick")

    assert [job.job_id for job in claim(db)] == [last]


@pytest.mark.parametrize("is_act", [True, False])
def test_a_slot_goes_to_another_if_the_job_takes_another_place(db, clock, is_act):
    """Beside one whose own key is full, the slot that it was let in for is free again."""
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_running=1)
    enqueue(db, "x")
    (running,) = claim(db)
    keyed = enqueue(db, "x", limit_key="k")
    last = enqueue(db, "x")
    assert claim(db) == []
    call(db, "tick")
    value(db, "finish_job", **owner(running))
    assert scalar(db, "select opened_for from rota.jobs where id = %s", keyed) == "type x"
    limit(db, limit_key="k", max_running=0)
    # Until no check is left.
    for _ in range(5):
        clock.advance("5 s")
        call(db, "tick")
    assert rows(db, "select * from rota.pending_checks") == []

    if is_act:
        call(db, "act_on_jobs", act="move", filter={"ids": [keyed]}, arguments={"queue": "q"})
    else:
        value(db, "set_priority", job_id=keyed, priority=5)
    call(db, "tick")

    assert scalar(db, "select hold from rota.jobs where id = %s", keyed) == "key k"
    assert [job.job_id for job in claim(db, queues=["default", "q"])] == [last]


def test_jobs_that_no_worker_takes_do_not_come_into_their_lane_one_by_one(db):
    """Each end lets in as many of each queue as slots are free, those before them counted."""
    limit(db, job_type="x", max_running=2)
    call(db, "tick")
    for queue in ("default", "idle"):
        for _ in range(20):
            enqueue(db, queue=queue)
    jobs = claim(db, max_jobs=2)
    assert len(jobs) == 2
    call(db, "tick")

    for _ in range(10):
        value(db, "finish_job", **owner(jobs.pop(0)))
        jobs += claim(db, max_jobs=1)

    assert len(jobs) == 2
    opened = "select count(*) from rota.jobs where queue = 'idle' and opened_for is not null"
    assert scalar(db, opened) <= 2


def _let_in_and_locked(db, connect, clock):
    """Let one of five held jobs in, and lock it; return the session that has."""
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_running=1)
    for _ in range(6):
        enqueue(db)
    (running,) = claim(db, lease="1 hour")
    # Until no check is left.
    _quiet(db, clock)
    value(db, "finish_job", **owner(running))
    (kept,) = rows(db, "select id from rota.jobs where opened_for is not null")
    stranger = connect(autocommit=False)
    value(stranger, "set_priority", job_id=kept.id, priority=-1)
    return stranger


def test_a_tick_gives_the_slot_of_a_locked_job_to_another(db, connect, clock):
    _let_in_and_locked(db, connect, clock)
    assert claim(db) == []

    _quiet(db, clock)

    assert len(claim(db, max_jobs=5)) == 1


def test_an_end_gives_the_slot_of_a_long_locked_job_to_another(db, connect, clock):
    _let_in_and_locked(db, connect, clock)
    _quiet(db, clock)
    (job,) = claim(db, lease="1 hour")
    for _ in range(1000):
        db.execute("select pg_current_xact_id()")

    value(db, "finish_job", **owner(job))

    assert len(claim(db, max_jobs=5)) == 1


def test_ticks_are_asked_for_while_a_job_is_locked_and_not_by_the_mark_that_stays(
    db, connect, clock
):
    stranger = _let_in_and_locked(db, connect, clock)
    _quiet(db, clock)
    assert scalar(db, "select rota._has_maintenance()") is True

    stranger.rollback()
    _quiet(db, clock)

    assert scalar(db, "select rota._has_maintenance()") is False
    assert len(claim(db, max_jobs=5)) == 1


def test_a_tick_of_an_older_snapshot_does_not_meet_a_lock_that_was_committed(
    db, connect, clock
):
    stranger = _let_in_and_locked(db, connect, clock)
    late = connect(autocommit=False)
    late.execute("set transaction isolation level repeatable read")
    late.execute("select from rota.jobs")
    stranger.commit()

    assert scalar(late, "select rota._kept_limits('ask')") == []


def test_no_job_is_let_in_for_the_slot_of_an_open_claim(db, connect, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_running=1)
    for _ in range(3):
        enqueue(db)
    claimer = connect(autocommit=False)
    (job,) = claim(claimer)
    assert claim(db) == []

    _quiet(db, clock)
    let_in = scalar(db, "select count(*) from rota.jobs where opened_for is not null")
    claimer.rollback()
    value(db, "cancel_job", job_id=job.job_id)
    _quiet(db, clock)

    assert let_in == 0
    assert len(claim(db, max_jobs=5)) == 1


def _quiet(db, clock):
    for _ in range(8):
        clock.advance("5 s")
        settle(db)
