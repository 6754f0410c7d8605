"""Jobs of one ordering key run one at a time, in the order they came in."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    one,
    owner,
    pending,
    poison,
    raises,
    refused,
    rows,
    run,
    scalar,
    settle,
    value,
)


def ordered(db, key="a", **arguments):
    return enqueue(db, ordering_key=key, **arguments)


def claimed(db, **arguments):
    return [job.job_id for job in claim(db, max_jobs=10, **arguments)]


def finish(db, job):
    value(db, "finish_job", **owner(job))


def fail(db, job, **arguments):
    return one(db, "fail_job", **owner(job), error="no", **arguments)


def test_order_lets_one_job_of_a_key_run_at_a_time(db):
    first, second, third = (ordered(db) for _ in range(3))

    runs = []
    for _ in range(3):
        (job,) = claim(db, max_jobs=10)
        assert claimed(db) == []
        finish(db, job)
        runs.append(job.job_id)

    assert runs == [first, second, third]
    settle(db)
    assert pending(db) == []


def test_order_holds_across_job_types_queues_and_priorities(db):
    ids = [
        ordered(db, job_type="a", queue="a", priority=9),
        ordered(db, job_type="b", queue="b", priority=-9),
        ordered(db, job_type="c", queue="a", priority=0),
    ]

    runs = []
    for _ in ids:
        (job,) = claim(db, max_jobs=10, queues=["a", "b"])
        runs.append(job.job_id)
        finish(db, job)

    assert runs == ids


def test_order_leaves_other_keys_and_jobs_alone(db):
    a, _, b, free = ordered(db), ordered(db), ordered(db, "b"), enqueue(db)

    assert claimed(db) == [a, b, free]


def test_order_waits_for_the_time_of_its_first_job(db, clock):
    clock.set("2026-03-01 12:00+00")
    first, second = ordered(db, delay="1 hour"), ordered(db)

    assert claimed(db) == []
    clock.advance("1 hour")
    assert claimed(db) == [first]
    assert run(db, second).status == "blocked"


def test_order_waits_through_retries(db, clock):
    clock.set("2026-03-01 12:00+00")
    first, second = ordered(db), ordered(db)
    for _ in range(2):
        (job,) = claim(db)
        fail(db, job, retry_in="1 minute")
        assert claimed(db) == []
        clock.advance("1 minute")
    (job,) = claim(db)
    assert job.job_id == first
    call(db, "snooze_job", **owner(job), delay="1 minute")
    assert claimed(db) == []
    clock.advance("1 minute")

    (job,) = claim(db)
    finish(db, job)

    assert job.job_id == first
    assert claimed(db) == [second]


def test_order_waits_for_the_sweep_of_a_lost_job(db, clock):
    clock.set("2026-03-01 12:00+00")
    first, _ = ordered(db), ordered(db)
    claim(db)
    clock.advance("1 hour")

    assert claimed(db) == []
    assert one(db, "tick").jobs_swept == 1
    clock.advance("1 hour")
    assert claimed(db) == [first]


def test_order_stops_at_a_dead_job(db):
    first, second = ordered(db), ordered(db)
    (job,) = claim(db)
    fail(db, job, fatal=True)

    assert claimed(db) == []
    assert rows(db, "select ordering_key, job_id from rota.halted_keys") == [("a", first)]
    assert run(db, second).status == "blocked"


def test_retry_job_puts_a_dead_job_back_in_front(db):
    first, second = ordered(db), ordered(db)
    (job,) = claim(db)
    fail(db, job, fatal=True)

    assert value(db, "retry_job", job_id=first) == "queued"
    (job,) = claim(db, max_jobs=10)
    assert job.job_id == first
    finish(db, job)

    assert claimed(db) == [second]
    assert rows(db, "select * from rota.halted_keys") == []


def test_resume_ordering_key_goes_on_without_the_dead_job(db):
    first, second = ordered(db), ordered(db)
    (job,) = claim(db)
    fail(db, job, fatal=True)

    assert value(db, "resume_ordering_key", ordering_key="a") == first
    assert claimed(db) == [second]
    with raises("RT012"):
        call(db, "resume_ordering_key", ordering_key="a")


def test_resume_ordering_key_refuses_what_is_no_key(db):
    for key in (None, "", "x" * 256):
        with refused("ordering_key"):
            call(db, "resume_ordering_key", ordering_key=key)


def test_skip_dead_goes_on_by_itself(db):
    ordered(db, skip_dead=True)
    second = ordered(db)
    (job,) = claim(db)
    fail(db, job, fatal=True)

    assert claimed(db) == [second]


def test_cancel_job_lets_the_next_go_on(db):
    first, second, third = ordered(db), ordered(db), ordered(db)

    assert value(db, "cancel_job", job_id=second) == "cancelled"
    assert value(db, "cancel_job", job_id=first) == "cancelled"

    assert claimed(db) == [third]


def test_retry_job_of_an_old_job_waits_for_the_one_that_runs(db):
    first, second, third = (ordered(db) for _ in range(3))
    finish(db, claim(db)[0])
    (job,) = claim(db)

    assert value(db, "retry_job", job_id=first) == "blocked"
    assert claimed(db) == []
    finish(db, job)

    runs = []
    for _ in range(2):
        (job,) = claim(db)
        runs.append(job.job_id)
        finish(db, job)
    assert (runs, job.job_id) == ([first, third], third)
    assert run(db, second).status == "succeeded"


def test_retry_job_leaves_a_blocked_job_in_its_place(db):
    first, second = ordered(db), ordered(db)

    assert value(db, "retry_job", job_id=second) == "blocked"
    assert claimed(db) == [first]


def test_order_holds_for_a_batch(db):
    jobs = [{"job_type": "x", "ordering_key": key} for key in "abab"]
    ids = [row.job_id for row in call(db, "enqueue_many", jobs=Jsonb(jobs))]

    assert claimed(db) == ids[:2]
    settle(db)
    assert pending(db) == []


def test_a_key_takes_the_newer_payload_of_a_blocked_job(db):
    ordered(db)
    job_id = ordered(db, idempotency_key="k", payload={"v": 1})

    again = ordered(db, idempotency_key="k", payload={"v": 2}, on_conflict="replace")

    assert again == job_id
    assert (run(db, job_id).payload, run(db, job_id).status) == ({"v": 2}, "blocked")


def test_a_rerun_goes_to_the_end_of_its_line(db):
    ordered(db, idempotency_key="k")
    (job,) = claim(db)
    second = ordered(db)
    ordered(db, idempotency_key="k", on_conflict="rerun", payload={"v": 2})
    finish(db, job)

    (job,) = claim(db)
    assert job.job_id == second
    finish(db, job)
    (job,) = claim(db)
    assert job.payload == {"v": 2}


@pytest.mark.slow
def test_many_blocked_jobs_keep_no_other_waiting(db):
    db.execute(
        "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, ordering_key,"
        " skip_dead, status, run_at) select 'default', 'x', '{}', 0, 10, 'a', false, 'blocked',"
        " rota.now() from generate_series(1, 50000)"
    )
    other = enqueue(db)

    with db.transaction():
        before = scalar(db, "select pg_stat_get_xact_tuples_fetched('rota.jobs'::regclass)")
        assert claimed(db) == [other]
        after = scalar(db, "select pg_stat_get_xact_tuples_fetched('rota.jobs'::regclass)")
    assert after - before < 50


def test_the_first_job_of_a_key_needs_no_tick(db):
    first, second = ordered(db), ordered(db)

    assert [run(db, job_id).status for job_id in (first, second)] == ["queued", "blocked"]
    assert pending(db) == [("order", "a")]


def test_the_end_of_a_job_opens_the_next_without_a_tick(db):
    first, second = ordered(db), ordered(db)
    finish(db, claim(db)[0])

    assert [run(db, job_id).status for job_id in (first, second)] == ["succeeded", "queued"]


@pytest.mark.parametrize("by", ["raise exception 'poison'", "return null"])
def test_a_job_that_a_trigger_refuses_keeps_none_in_front_of_it(db, clock, by):
    clock.set("2026-03-01 12:00+00")
    head, bad = (enqueue(db, ordering_key="k") for _ in range(2))
    settle(db)
    poison(db, bad, by)

    (job,) = claim(db)
    assert value(db, "finish_job", **owner(job)) == "finished"

    assert job.job_id == head
    assert claim(db) == []
    db.execute("drop trigger poison on rota.jobs")
    clock.advance("10 seconds")
    settle(db)
    assert [job.job_id for job in claim(db)] == [bad]


def test_a_transaction_leaves_the_keys_beyond_its_locks_to_a_tick(db):
    ids = [
        row.job_id
        for row in call(
            db,
            "enqueue_many",
            jobs=Jsonb(
                [{"job_type": "x", "ordering_key": str(number)} for number in range(40)]
            ),
        )
    ]

    assert [job.job_id for job in claim(db, max_jobs=100)] == ids[:32]
    settle(db)
    assert [job.job_id for job in claim(db, max_jobs=100)] == ids[32:]


def test_a_producer_in_an_older_snapshot_leaves_its_job_to_a_tick(db, connect):
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read")
    old.execute("select 1 from rota.jobs")
    first = ordered(db)
    second = ordered(old)
    old.commit()

    assert claimed(db) == [first]
    settle(db)
    assert claimed(db) == []
    assert run(db, second).status == "blocked"


def test_a_job_of_a_halted_key_waits_for_the_dead_one(db):
    ordered(db)
    fail(db, claim(db)[0], fatal=True)
    late = ordered(db)
    settle(db)

    assert claimed(db) == []
    value(db, "resume_ordering_key", ordering_key="a")
    assert claimed(db) == [late]


def test_a_cancelled_job_that_waited_for_others_lets_the_line_go_on(db):
    parent = enqueue(db, queue="other")
    first = ordered(db, depends_on=[parent])
    second = ordered(db)
    settle(db)
    assert claimed(db) == []

    value(db, "cancel_job", job_id=first)
    assert claimed(db) == [second]


def test_enqueue_costs_the_same_behind_many(db):
    db.execute(
        "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, ordering_key,"
        " skip_dead, status, run_at) select 'default', 'x', '{}', 0, 10, 'a', false, 'blocked',"
        " rota.now() from generate_series(1, 20000)"
    )
    parent = enqueue(db, queue="other")

    for arguments in (
        {},
        {"depends_on": [parent]},
        {"idempotency_key": "k"},
        {"delay": "1 hour"},
    ):
        with db.transaction():
            before = scalar(db, "select pg_stat_get_xact_tuples_fetched('rota.jobs'::regclass)")
            ordered(db, **arguments)
            after = scalar(db, "select pg_stat_get_xact_tuples_fetched('rota.jobs'::regclass)")
        assert after - before < 50


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ordering_key", {"ordering_key": ""}),
        ("ordering_key", {"ordering_key": "x" * 256}),
        ("skip_dead", {"ordering_key": "a", "skip_dead": None}),
        ("skip_dead", {"skip_dead": True}),
    ],
)
def test_enqueue_refuses_a_bad_order(db, name, wrong):
    with refused(name):
        enqueue(db, **wrong)
    if None not in wrong.values():
        with refused(f"jobs[1].{name}"):
            call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", **wrong}]))
