"""Jobs that pass through stages."""

from __future__ import annotations

from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    everything,
    one,
    owner,
    owners,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    settle,
    value,
)

pytestmark = pytest.mark.slow

ORDER = [
    {"stage": "check", "job_type": "check_order"},
    {"stage": "charge", "job_type": "charge_card"},
    {"stage": "ship", "job_type": "ship_order"},
]


def define(db, stages=ORDER, pipeline="order"):
    call(db, "define_pipeline", pipeline=pipeline, stages=Jsonb(stages))


def start(db, **arguments):
    return value(db, "start_pipeline", **{"pipeline": "order", **arguments})


def take(db, **arguments):
    """Claim the one job that is due."""
    (job,) = claim(db, max_jobs=10, **arguments)
    return job


def finish(db, job, **arguments):
    if not isinstance(arguments.get("result"), dict | None):
        arguments["result"] = Jsonb(arguments["result"])
    return value(db, "finish_job", **owner(job), **arguments)


def step(db, **arguments):
    """Run the one job that is due, and return it."""
    job = take(db)
    finish(db, job, **arguments)
    return job


def die(db, job):
    return one(db, "fail_job", **owner(job), error="no", fatal=True)


def stages(db, job_id):
    """Return the stages that a job has left, and how, and the one that it is in."""
    left = rows(
        db,
        "select stage, status from rota.stage_runs where job_id = %s order by lease_token",
        job_id,
    )
    now = rows(db, "select stage, status from rota.jobs where id = %s", job_id)
    return [f"{row.stage} {row.status}" for row in (*left, *now)]


@pytest.fixture
def order(db):
    define(db)
    return db


def test_finish_job_takes_a_run_through_its_stages_in_order(order):
    db = order
    run_id = start(db, payload={"order": 7})

    first = step(db, result={"total": 30})
    second = step(db, result={"receipt": "r-1"})
    third = step(db)

    assert [(j.pipeline, j.stage, j.job_type, j.attempt) for j in (first, second, third)] == [
        ("order", "check", "check_order", 1),
        ("order", "charge", "charge_card", 1),
        ("order", "ship", "ship_order", 1),
    ]
    assert [job.payload for job in (first, second, third)] == [{"order": 7}] * 3
    assert [job.stage_input for job in (first, second, third)] == [
        None,
        {"total": 30},
        {"receipt": "r-1"},
    ]
    assert [job.job_id for job in (first, second, third)] == [run_id] * 3
    assert first.lease_token < second.lease_token < third.lease_token
    assert stages(db, run_id) == ["check succeeded", "charge succeeded", "ship succeeded"]
    assert run(db, run_id).status == "succeeded"
    assert claim(db) == []


def test_stage_runs_keeps_what_became_of_each_stage(order, clock):
    clock.set("2026-03-01 12:00+00")
    job_id = start(order, payload={"order": 7})
    clock.advance("1 minute")
    value(order, "fail_job", **owner(take(order)), error="no", retry_in="1 minute")
    clock.advance("1 minute")
    checked = take(order, worker="w2")
    clock.advance("1 minute")
    finish(order, checked, result={"total": 30})
    clock.advance("1 minute")
    charged = take(order)
    clock.advance("1 minute")
    finish(order, charged, next_stage="end", result="r-1")

    passed = rows(
        order,
        "select s.*, s.queued_at - '2026-03-01 12:00+00' as waits, s.started_at - s.queued_at"
        " as waited, s.finished_at - s.started_at as ran from rota.stage_runs as s"
        " order by lease_token",
    )
    assert [(row.job_id, row.lease_token) for row in passed] == [
        (job_id, checked.lease_token),
        (job_id, charged.lease_token),
    ]
    assert [(r.pipeline, r.stage, r.status, r.queue, r.job_type) for r in passed] == [
        ("order", "check", "succeeded", "default", "check_order"),
        ("order", "charge", "succeeded", "default", "charge_card"),
    ]
    assert [(r.attempts, r.worker, r.stage_input, r.result) for r in passed] == [
        (2, "w2", None, {"total": 30}),
        (1, "w", {"total": 30}, "r-1"),
    ]
    assert [[t.total_seconds() / 60 for t in (r.waits, r.waited, r.ran)] for r in passed] == [
        [0, 2, 1],
        [3, 1, 1],
    ]
    ended = run(order, job_id)
    assert (ended.status, ended.stage, ended.result) == ("succeeded", "charge", "r-1")
    assert (ended.stage_input, ended.payload) == ({"total": 30}, {"order": 7})


def test_a_job_enters_a_stage_as_if_it_were_new(order, clock):
    clock.set("2026-03-01 12:00+00")
    job_id = start(order)
    value(order, "fail_job", **owner(take(order)), error="no", retry_in="1 minute")
    clock.advance("2 minutes")
    job = take(order)
    call(order, "set_progress", **owner(job), percent=50, message="half")
    clock.advance("1 second")
    finish(order, job)

    now = run(order, job_id)
    assert (now.status, now.attempts, now.run_at) == ("queued", 0, now.updated_at)
    assert {
        now.locked_by, now.locked_until, now.started_at, now.progress_percent,
        now.progress_message, now.last_error, now.error_type, now.failed_at,
    } == {None}  # fmt: skip
    assert now.lease_token > job.lease_token
    assert now.created_at < now.run_at


def test_stage_runs_knows_of_stages_that_died_or_were_cancelled(order):
    job_id = start(order)
    value(order, "cancel_job", job_id=job_id)
    value(order, "retry_job", job_id=job_id)
    die(order, take(order))
    value(order, "retry_job", job_id=job_id)
    value(order, "fail_job", **owner(take(order)), error="no")
    value(order, "cancel_job", job_id=job_id)
    value(order, "retry_job", job_id=job_id)
    step(order)
    value(order, "cancel_job", job_id=job_id)

    assert stages(order, job_id) == [
        "check cancelled",
        "check dead",
        "check cancelled",
        "check succeeded",
        "charge cancelled",
    ]
    assert [bool(row.worker) for row in rows(
        order, "select worker from rota.stage_runs order by lease_token"
    )] == [False, True, False, True, False]  # fmt: skip


def test_a_job_in_no_pipeline_leaves_no_stage(db):
    for _ in range(3):
        enqueue(db)
    good, bad, stopped = claim(db, max_jobs=3)
    finish(db, good)
    die(db, bad)
    value(db, "cancel_job", job_id=stopped.job_id)
    one(db, "fail_job", **owner(stopped), error="no")

    assert rows(db, "select * from rota.stage_runs") == []


def test_a_job_in_no_pipeline_has_no_stage(db):
    enqueue(db)

    job = take(db)

    assert (job.pipeline, job.stage, job.stage_input) == (None, None, None)
    assert scalar(db, "select stage_queued_at is null from rota.jobs")


def test_finish_job_enters_the_next_stage_in_its_own_transaction(order, connect):
    db = order
    run_id = start(db)
    job = take(db)
    mine = connect(autocommit=False)

    value(mine, "finish_job", **owner(job))
    assert stages(db, run_id) == ["check running"]
    mine.rollback()
    assert stages(db, run_id) == ["check running"]
    value(mine, "finish_job", **owner(job))
    mine.commit()

    assert stages(db, run_id) == ["check succeeded", "charge queued"]


def test_finish_job_goes_to_a_named_stage(order):
    run_id = start(order)

    step(order, next_stage="ship")

    assert stages(order, run_id) == ["check succeeded", "ship queued"]


def test_finish_job_goes_back_to_a_stage(order):
    run_id = start(order)
    step(order, result=1)
    step(order, result=2, next_stage="check")

    again = step(order, result=3)

    assert (again.stage, again.stage_input) == ("check", 2)
    assert stages(order, run_id)[2:] == ["check succeeded", "charge queued"]


def test_finish_job_ends_the_run_early(order):
    run_id = start(order)

    step(order, next_stage="end")

    assert stages(order, run_id) == ["check succeeded"]
    assert claim(order) == []


@pytest.mark.parametrize("next_stage", ["nowhere", "End", "", "x" * 100])
def test_finish_job_refuses_an_unknown_stage(order, next_stage):
    start(order)
    job = take(order)
    before = everything(order)

    with refused("next_stage"):
        finish(order, job, next_stage=next_stage)

    assert everything(order) == before
    assert finish(order, job) == "finished"


@pytest.mark.parametrize("next_stage", ["check", "end"])
def test_finish_job_refuses_a_stage_for_a_job_in_no_pipeline(order, next_stage):
    enqueue(order)
    job = take(order)

    with refused("next_stage"):
        finish(order, job, next_stage=next_stage)

    assert run(order, job.job_id).status == "running"


def test_finish_job_refuses_a_stage_of_another_pipeline(order):
    define(order, [{"stage": "only", "job_type": "x"}], "other")
    start(order)

    with refused("next_stage"):
        step(order, next_stage="only")


@pytest.mark.parametrize("is_taken", [False, True])
def test_finish_job_says_of_a_lost_job_that_it_is_lost_whatever_the_stage(order, is_taken):
    start(order)
    job = take(order)
    call(order, "retry_job", job_id=job.job_id, force=True)
    if is_taken:
        take(order)

    with raises("RT002"):
        finish(order, job, next_stage="nowhere")


def test_finish_job_asked_again_does_not_move_the_job_again(order):
    run_id = start(order)
    job = take(order)
    finish(order, job, next_stage="ship")

    for _ in range(2):
        assert finish(order, job, next_stage="ship") == "already_finished"
        assert finish(order, job, next_stage="charge") == "already_finished"
        (again,) = call(order, "finish_jobs", **owners(job))
        assert again.outcome == "already_finished"
        assert stages(order, run_id)[0] == "check succeeded"
        assert scalar(order, "select stage from rota.job_runs") == "ship"
        if shipped := claim(order):
            finish(order, shipped[0])
    assert finish(order, job) == "already_finished"


@pytest.mark.parametrize("state", ["queued", "running", "ended"])
def test_a_lease_of_an_earlier_stage_is_lost(order, state):
    start(order)
    job = take(order)
    finish(order, job)
    if state != "queued":
        second = take(order)
    if state == "ended":
        finish(order, second, next_stage="end")
    before = everything(order)

    for function, arguments in {
        "heartbeat": {},
        "fail_job": {"error": "no"},
        "snooze_job": {"delay": "1 minute"},
        "set_progress": {"percent": 1},
    }.items():
        with raises("RT002"):
            one(order, function, **owner(job), **arguments)
    assert not one(order, "release_jobs", **owners(job)).is_released
    assert one(order, "heartbeat_jobs", **owners(job)).is_lost
    assert everything(order) == before


def test_a_lease_that_was_lost_in_an_earlier_stage_does_not_finish(order):
    job_id = start(order)
    old = take(order)
    value(order, "retry_job", job_id=job_id, force=True)
    finish(order, take(order))

    with raises("RT002"):
        finish(order, old)
    assert one(order, "finish_jobs", **owners(old)).outcome == "lost"
    assert stages(order, job_id) == ["check succeeded", "charge queued"]


def test_finish_jobs_takes_many_runs_on(order):
    ids = [start(order, payload={"n": n}) for n in range(5)]
    plain = enqueue(order)
    jobs = claim(order, max_jobs=10)

    done = call(
        order,
        "finish_jobs",
        **owners(*jobs),
        results=Jsonb([{"n": n} for n in range(6)]),
        next_stages=[None, "ship", "end", "charge", None, None],
    )

    assert [row.outcome for row in done] == ["finished"] * 6
    assert [stages(order, run_id)[1:] for run_id in ids] == [
        ["charge queued"],
        ["ship queued"],
        [],
        ["charge queued"],
        ["charge queued"],
    ]
    assert [job.stage_input == job.payload for job in claim(order, max_jobs=10)] == [True] * 4
    assert run(order, plain).status == "succeeded"


def test_finish_jobs_moves_a_run_on_once_if_a_job_is_named_twice(order):
    run_id = start(order)
    job = take(order)

    done = call(order, "finish_jobs", **owners(job, job), next_stages=["ship", "ship"])

    assert {row.outcome for row in done} == {"finished"}
    assert stages(order, run_id) == ["check succeeded", "ship queued"]


@pytest.mark.parametrize(
    ("name", "next_stages"),
    [
        ("next_stages[2]", [None, "nowhere"]),
        ("next_stages[1]", ["check", None]),
        ("next_stages", ["ship"]),
        ("next_stages", []),
        ("next_stages", [["ship", "ship"]]),
    ],
)
def test_finish_jobs_refuses_bad_stages(order, name, next_stages):
    enqueue(order)
    start(order)
    jobs = claim(order, max_jobs=10)
    before = everything(order)

    with refused(name):
        call(order, "finish_jobs", **owners(*jobs), next_stages=next_stages)

    assert everything(order) == before


def test_a_stage_brings_its_own_settings(db):
    call(db, "set_queue", queue="slow", max_attempts=7)
    define(
        db,
        [
            {"stage": "a", "job_type": "a", "priority": 3},
            {
                "stage": "b", "job_type": "b", "queue": "slow", "lease": "5 minutes",
                "time_limit": "2 minutes", "backoff": {"kind": "fixed", "base_seconds": 5},
            },
            {"stage": "c", "job_type": "c", "queue": "slow", "priority": -3, "max_attempts": 2},
        ],
    )  # fmt: skip
    job_id = start(db, priority=9)

    a = step(db)
    assert run(db, job_id).queue == "slow"
    (b,) = claim(db, queues=["slow"])
    failed = one(db, "fail_job", **owner(b), error="no")
    assert failed.status == "failed"
    value(db, "retry_job", job_id=b.job_id)
    (b,) = claim(db, queues=["slow"])
    call(db, "set_priority", job_id=b.job_id, priority=8)
    value(db, "finish_job", **owner(b))
    (c,) = claim(db, queues=["slow"])

    assert (a.priority, a.max_attempts) == (3, 10)
    assert (b.priority, b.max_attempts, b.attempt) == (3, 7, 2)
    assert b.locked_for.total_seconds() == 150
    assert [job.time_limit for job in (a, b, c)] == [None, timedelta(minutes=2), None]
    assert (c.priority, c.max_attempts, c.attempt) == (-3, 2, 1)


def test_the_priority_of_a_run_goes_with_it(order):
    start(order, priority=5)
    job = take(order)
    call(order, "set_priority", job_id=job.job_id, priority=-2)
    finish(order, job)

    assert take(order).priority == -2


def test_a_worker_takes_the_jobs_of_one_stage(order):
    for _ in range(3):
        start(order)
    step_one = claim(order, max_jobs=2, job_types=["check_order"])
    call(order, "finish_jobs", **owners(*step_one))

    jobs = claim(order, max_jobs=10, job_types=["charge_card"])

    assert [job.stage for job in jobs] == ["charge", "charge"]


def test_a_dead_stage_ends_the_run_and_retry_job_goes_on_there(order):
    run_id = start(order)
    step(order, result={"n": 1})
    die(order, take(order))
    assert claim(order) == []

    job_id = scalar(order, "select id from rota.dead_jobs")
    assert value(order, "retry_job", job_id=job_id) == "queued"
    job = step(order, result={"n": 2})

    assert (job.stage, job.stage_input, job.attempt) == ("charge", {"n": 1}, 1)
    assert stages(order, run_id) == [
        "check succeeded",
        "charge dead",
        "charge succeeded",
        "ship queued",
    ]


def test_a_failed_stage_keeps_its_input_for_the_next_try(order, clock):
    clock.set("2026-03-01 12:00+00")
    start(order)
    step(order, result={"n": 1})
    one(order, "fail_job", **owner(take(order)), error="no", retry_in="1 minute")
    clock.advance("1 minute")

    again = take(order)

    assert (again.stage, again.stage_input, again.attempt) == ("charge", {"n": 1}, 2)


def test_a_cancelled_stage_ends_the_run(order):
    run_id = start(order)
    assert value(order, "cancel_job", job_id=run_id) == "cancelled"

    assert claim(order) == []
    assert stages(order, run_id) == ["check cancelled"]


def test_a_job_whose_cancel_was_requested_enters_no_further_stage(order):
    run_id = start(order, idempotency_key="k")
    job = take(order)
    child = enqueue(order, job_type="child", depends_on=[run_id])
    value(order, "cancel_job", job_id=run_id, reason="out of stock")

    assert finish(order, job, result={"n": 1}) == "finished"
    assert finish(order, job, result={"n": 1}) == "already_finished"
    assert one(order, "finish_jobs", **owners(job)).outcome == "already_finished"
    assert stages(order, run_id) == ["check succeeded"]
    settle(order)
    assert claim(order) == []

    stopped = run(order, run_id)
    assert (stopped.status, stopped.stage, stopped.result) == ("cancelled", "check", None)
    assert stopped.cancel_reason == "out of stock"
    assert run(order, child).status == "cancelled"
    with raises("RT003"):
        one(order, "fail_job", **owner(job), error="no")
    value(order, "restart_pipeline", job_id=run_id, stage="charge")
    assert take(order).stage_input == {"n": 1}


def test_finish_jobs_tells_each_job_of_a_batch_from_the_others(order):
    """One goes on, one is in its last stage, one was to be cancelled, one is in none."""
    ids = [start(order), start(order, stage="ship"), start(order), enqueue(order)]
    jobs = claim(order, max_jobs=10)
    start(order)
    lost = take(order)
    value(order, "retry_job", job_id=lost.job_id, force=True)
    value(order, "cancel_job", job_id=ids[2])
    jobs.insert(1, lost)

    done = call(order, "finish_jobs", **owners(*jobs), results=Jsonb([1, 2, 3, 4, 5]))

    outcomes = {row.job_id: row.outcome for row in done}
    assert outcomes == {**dict.fromkeys(ids, "finished"), lost.job_id: "lost"}
    assert [run(order, job_id).status for job_id in ids] == [
        "queued",
        "succeeded",
        "cancelled",
        "succeeded",
    ]
    results = {job.job_id: n for n, job in enumerate(jobs, 1)}
    assert run(order, ids[0]).stage_input == results[ids[0]]
    assert run(order, ids[1]).result == results[ids[1]]
    assert dict(rows(order, "select job_id, result from rota.stage_runs")) == {
        job_id: results[job_id] for job_id in ids[:3]
    }


def test_a_cancel_in_the_last_stage_comes_too_late(order):
    run_id = start(order, stage="ship")
    job = take(order)
    value(order, "cancel_job", job_id=run_id)

    assert finish(order, job) == "finished"
    assert stages(order, run_id) == ["ship succeeded"]


def test_retry_job_of_a_job_that_waits_in_a_later_stage_leaves_it_there(order):
    run_id = start(order)
    step(order)

    assert value(order, "retry_job", job_id=run_id) == "queued"
    assert stages(order, run_id) == ["check succeeded", "charge queued"]


def test_retry_job_of_a_run_that_is_over_repeats_its_last_stage(order):
    run_id = start(order)
    step(order, result=1)
    step(order, result=2, next_stage="end")

    assert value(order, "retry_job", job_id=run_id) == "queued"
    again = step(order)

    assert (again.stage, again.stage_input) == ("charge", 1)
    assert take(order).stage == "ship"


def test_start_pipeline_begins_at_a_stage_and_a_time(order, clock):
    clock.set("2026-03-01 12:00+00")
    start(order, stage="ship", delay="1 hour")
    assert claim(order) == []
    clock.advance("1 hour")

    assert take(order).stage == "ship"


def test_headers_and_the_end_of_a_run_go_with_it_through_its_stages(order, clock):
    now = clock.set("2026-03-01 12:00+00")
    job_id = start(order, headers={"tenant": "7"}, expires_at=now + timedelta(hours=1))

    assert [step(order).headers for _ in range(2)] == [{"tenant": "7"}] * 2
    clock.advance("1 hour")
    assert claim(order) == []
    settle(order)

    assert stages(order, job_id)[-1].endswith("cancelled")
    assert (run(order, job_id).status, run(order, job_id).error_type) == (
        "cancelled",
        "expired",
    )


def test_start_pipeline_keeps_the_key_for_the_whole_run(order):
    first = start(order, idempotency_key="order:7")
    assert start(order, idempotency_key="order:7") == first

    for stage in ("check", "charge", "ship"):
        job = take(order)
        assert job.stage == stage
        assert job.idempotency_key == "order:7"
        assert start(order, idempotency_key="order:7") == job.job_id
        # The key belongs to the pipeline, whichever type of job the run is at.
        later = {"idempotency_key": "order:7", "delay": "1 hour"}
        assert enqueue(order, job.job_type, **later) not in (first, job.job_id)
        finish(order, job)

    assert start(order, idempotency_key="order:7") > job.job_id


def test_start_pipeline_keeps_the_key_for_a_time(order, clock):
    clock.set("2026-03-01 12:00+00")
    first = start(order, idempotency_key="k", unique_for="1 day")
    step(order, next_stage="end")

    assert start(order, idempotency_key="k", unique_for="1 day") == first
    clock.advance("1 day")
    assert start(order, idempotency_key="k", unique_for="1 day") != first


@pytest.mark.parametrize("on_conflict", ["keep", "replace", "rerun"])
def test_enqueue_does_not_find_a_run_by_its_key(order, on_conflict):
    run_id = start(order, idempotency_key="k")
    job_type = scalar(order, "select job_type from rota.jobs where id = %s", run_id)
    rules = {"idempotency_key": "k", "on_conflict": on_conflict, "payload": {"a": 1}}

    first = enqueue(order, job_type, **rules)
    (second,) = call(order, "enqueue_many", jobs=Jsonb([{"job_type": "order", **rules}]))

    assert len({run_id, first, second.job_id}) == 3
    assert scalar(order, "select payload from rota.jobs where id = %s", run_id) != {"a": 1}


def test_a_child_waits_for_the_whole_run(order):
    run_id = start(order)
    child = enqueue(order, job_type="child", depends_on=[run_id])

    passed = [step(order).stage for _ in range(3)]
    last = take(order)

    assert passed == ["check", "charge", "ship"]
    assert last.job_id == child
    assert rows(order, "select * from rota.dependencies") == []


def test_a_child_of_a_run_that_is_over_does_not_wait(order):
    run_id = start(order)
    step(order)
    step(order, next_stage="end")

    child = enqueue(order, depends_on=[run_id])

    assert take(order).job_id == child


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("how", ["die", "cancel"])
def test_a_run_that_stops_cancels_runs_or_keeps_its_children(order, how, is_before):
    run_id = start(order)
    step(order)

    def stop():
        if how == "die":
            die(order, take(order, job_types=["charge_card"]))
        else:
            value(order, "cancel_job", job_id=run_id)

    if is_before:
        stop()
    cancel, go, wait = (
        enqueue(order, depends_on=[run_id], if_parent_dead=policy)
        for policy in ("cancel", "run", "wait")
    )
    if not is_before and how == "cancel":
        value(order, "cancel_job", job_id=run_id)
    elif not is_before:
        stop()
    settle(order)

    assert [job.job_id for job in claim(order, max_jobs=10)] == [go]
    assert [run(order, job_id).status for job_id in (cancel, wait)] == ["cancelled", "blocked"]


def test_a_child_that_waits_goes_on_after_a_run_that_was_taken_up_again(order):
    run_id = start(order)
    step(order)
    die(order, take(order))
    child = enqueue(order, depends_on=[run_id], if_parent_dead="wait")

    value(order, "restart_pipeline", job_id=run_id, stage="charge")
    assert [step(order).stage for _ in range(2)] == ["charge", "ship"]

    assert take(order).job_id == child


def test_start_pipeline_waits_for_jobs_and_before_a_job(order):
    parent = enqueue(order, queue="other")
    run_id = start(order, depends_on=[parent])
    child = enqueue(order, depends_on=[run_id])
    second = start(order, blocks=child)

    passed = []
    while jobs := claim(order):
        passed.append((jobs[0].job_id == child, jobs[0].stage))
        finish(order, jobs[0])
    assert passed == [(False, stage) for stage in ("check", "charge", "ship")]
    assert stages(order, second) == ["check succeeded", "charge succeeded", "ship succeeded"]

    value(order, "finish_job", **owner(claim(order, queues=["other"])[0]))
    passed = [step(order).job_id for _ in range(4)]
    assert passed[0] == run_id
    assert passed[3] == child


def test_a_stage_that_ends_in_an_older_snapshot_frees_no_child_too_early(order, connect):
    """REPEATABLE READ: the child comes in after the snapshot that the stages end in."""
    run_id = start(order)
    for stage in ("check", "charge", "ship"):
        job = take(order)
        assert job.stage == stage
        old = connect(autocommit=False)
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1 from rota.jobs")
        child = enqueue(order, job_type="child", depends_on=[run_id])
        value(old, "finish_job", **owner(job))
        old.commit()
        one(order, "tick")
        if stage != "ship":
            assert run(order, child).status == "blocked"

    assert len(claim(order, max_jobs=10, job_types=["child"])) == 3


def test_a_run_holds_its_ordering_key_until_it_is_over(order):
    first = start(order, ordering_key="customer:1")
    second = start(order, ordering_key="customer:1")

    passed = []
    while jobs := claim(order, max_jobs=10):
        (job,) = jobs
        passed.append((job.job_id, job.stage))
        finish(order, job)

    assert passed == [
        (run_id, stage) for run_id in (first, second) for stage in ("check", "charge", "ship")
    ]
    deferred = "select count(*) from rota.pending_checks where due_at > rota.now()"
    assert scalar(order, deferred) == 0


@pytest.mark.parametrize("how", ["retry_job", "restart_pipeline"])
def test_a_dead_stage_holds_its_ordering_key_until_its_run_goes_on(order, how):
    first = start(order, ordering_key="k")
    start(order, ordering_key="k")
    step(order)
    job = take(order)
    die(order, job)
    assert claim(order) == []

    if how == "retry_job":
        assert value(order, how, job_id=first) == "queued"
    else:
        assert value(order, how, job_id=first, stage="charge") == first

    passed = [step(order) for _ in range(3)]
    assert [job.stage for job in passed] == ["charge", "ship", "check"]
    assert [job.job_id == first for job in passed] == [True, True, False]
    assert rows(order, "select * from rota.halted_keys") == []


def test_restart_pipeline_takes_the_place_of_its_run_before_those_that_came_later(order):
    head, first = (start(order, ordering_key="k") for _ in range(2))
    value(order, "cancel_job", job_id=first)
    second = start(order, ordering_key="k")
    assert value(order, "restart_pipeline", job_id=first, stage="ship") == first
    assert run(order, first).status == "blocked"

    passed = [step(order).job_id for _ in range(7)]

    assert passed == [head, head, head, first, second, second, second]


@pytest.mark.parametrize("again", ["retry_job", "restart_pipeline"])
def test_a_run_that_goes_on_does_not_stand_behind_those_that_wait_for_it(order, again):
    run_id = start(order, ordering_key="k")
    child = enqueue(
        order, queue="default", ordering_key="k", depends_on=[run_id], if_parent_dead="wait"
    )
    step(order)
    job = take(order)
    die(order, job)
    value(order, "resume_ordering_key", ordering_key="k")

    if again == "retry_job":
        value(order, "retry_job", job_id=job.job_id)
    else:
        value(order, "restart_pipeline", job_id=run_id, stage="charge")

    assert [step(order).stage for _ in range(2)] == ["charge", "ship"]
    assert take(order).job_id == child


def test_the_limit_key_of_a_run_goes_with_it(order):
    start(order, limit_key="customer:1")
    step(order)

    assert scalar(order, "select limit_key from rota.jobs") == "customer:1"


@pytest.mark.parametrize(
    ("stage", "stage_input"), [("check", None), ("charge", "c1"), ("ship", "c2")]
)
def test_restart_pipeline_goes_on_with_the_latest_result_before_the_stage(
    order, stage, stage_input
):
    run_id = start(order, payload={"order": 7}, idempotency_key="k")
    step(order, result="c1")
    step(order, result="c2")
    die(order, take(order))

    job_id = value(order, "restart_pipeline", job_id=run_id, stage=stage)
    job = take(order)

    assert (job.job_id, job.stage, job.stage_input) == (run_id, stage, stage_input)
    assert (job.payload, job.idempotency_key) == ({"order": 7}, "k")
    assert job_id == run_id
    assert rows(order, "select * from rota.finished_jobs") == []


def test_restart_pipeline_gives_a_stage_what_it_was_given_if_that_was_later(order):
    run_id = start(order)
    step(order, result="c1")
    step(order, result="g1", next_stage="check")
    step(order, result="c2", next_stage="ship")
    die(order, take(order))

    value(order, "restart_pipeline", job_id=run_id, stage="charge")
    assert run(order, run_id).stage_input == "c2"
    value(order, "cancel_job", job_id=run_id)
    value(order, "restart_pipeline", job_id=run_id, stage="check")
    assert run(order, run_id).stage_input == "g1"


def test_restart_pipeline_gives_the_job_what_the_stage_says(db):
    call(db, "set_queue", queue="slow", max_attempts=7)
    define(
        db,
        [
            {"stage": "a", "job_type": "a", "lease": "5 minutes", "max_attempts": 1},
            {"stage": "b", "job_type": "b", "queue": "slow", "priority": 4},
        ],
    )
    job_id = start(db, priority=9, limit_key="customer:1")
    die(db, take(db))

    value(db, "restart_pipeline", job_id=job_id, stage="b")

    (job,) = claim(db, queues=["slow"])
    assert (job.job_id, job.stage, job.job_type, job.priority) == (job_id, "b", "b", 4)
    assert (job.attempt, job.max_attempts) == (1, 7)
    assert job.locked_for.total_seconds() == 60
    assert run(db, job_id).last_error is None
    assert run(db, job_id).limit_key == "customer:1"


def test_restart_pipeline_brings_a_run_back_that_had_ended_well(order):
    run_id = start(order)
    for result in (1, 2, 3):
        step(order, result=result)

    assert value(order, "restart_pipeline", job_id=run_id, stage="ship") == run_id

    again = step(order)
    assert (again.stage, again.stage_input) == ("ship", 2)
    assert stages(order, run_id)[2:] == ["ship succeeded"] * 2


def test_restart_pipeline_takes_the_result_of_a_stage_that_was_run_again(order):
    run_id = start(order)
    step(order, result="old")
    step(order)
    step(order)
    value(order, "restart_pipeline", job_id=run_id, stage="check")
    step(order, result="new", next_stage="end")

    value(order, "restart_pipeline", job_id=run_id, stage="charge")

    assert take(order).stage_input == "new"


def test_restart_pipeline_skips_a_stage_that_is_dead(order):
    run_id = start(order)
    die(order, take(order))

    value(order, "restart_pipeline", job_id=run_id, stage="ship")

    assert take(order).stage_input is None
    assert scalar(order, "select stage_input is null from rota.jobs")


def test_restart_pipeline_knows_that_a_run_had_no_result(order, clock):
    """It began at a later stage, and was cancelled before anybody took it."""
    clock.set("2026-03-01 12:00+00")
    run_id = start(order, stage="charge")
    for stage in ("ship", "charge", "ship"):
        clock.advance("1 minute")
        value(order, "cancel_job", job_id=run_id)
        clock.advance("1 minute")
        value(order, "restart_pipeline", job_id=run_id, stage=stage)
        assert run(order, run_id).stage_input is None


def test_restart_pipeline_refuses_a_run_that_is_under_way(order):
    run_id = start(order)
    with raises("RT014"):
        value(order, "restart_pipeline", job_id=run_id, stage="check")
    step(order)
    with raises("RT014"):
        value(order, "restart_pipeline", job_id=run_id, stage="check")
    take(order)
    with raises("RT014"):
        value(order, "restart_pipeline", job_id=run_id, stage="check")


def test_restart_pipeline_refuses_when_its_key_is_taken(order):
    run_id = start(order, idempotency_key="k")
    value(order, "cancel_job", job_id=run_id)
    start(order, idempotency_key="k")

    with raises("RT007"):
        value(order, "restart_pipeline", job_id=run_id, stage="check")


def test_restart_pipeline_says_what_retention_has_removed(order, clock):
    clock.set("2026-03-01 12:00+00")
    run_id = start(order)
    clock.advance("1 minute")
    step(order, result="c1")
    die(order, take(order))
    order.execute("delete from rota.stage_runs where stage = 'check'")

    # It knows what the stage was given that it ended in.
    value(order, "restart_pipeline", job_id=run_id, stage="charge")
    assert run(order, run_id).stage_input == "c1"
    clock.advance("1 minute")
    value(order, "cancel_job", job_id=run_id)
    value(order, "restart_pipeline", job_id=run_id, stage="check")
    value(order, "cancel_job", job_id=run_id)
    with raises("RT001"):
        order.execute("delete from rota.stage_runs where stage = 'charge'")
        value(order, "restart_pipeline", job_id=run_id, stage="ship")
    assert value(order, "restart_pipeline", job_id=run_id, stage="check") == run_id


def test_restart_pipeline_refuses_while_retention_has_left_the_job_alone(order, clock):
    clock.set("2026-03-01 12:00+00")
    run_id = start(order)
    clock.advance("1 minute")
    step(order, result="c1")
    die(order, take(order))
    clock.advance("8 days")

    one(order, "tick")

    assert rows(order, "select * from rota.stage_runs") == []
    with raises("RT001"):
        value(order, "restart_pipeline", job_id=run_id, stage="ship")
    assert value(order, "retry_job", job_id=run_id) == "queued"
    assert take(order).stage_input == "c1"


def test_restart_pipeline_refuses_what_is_no_run(order):
    plain = enqueue(order)

    with refused("job_id"):
        value(order, "restart_pipeline", job_id=plain, stage="check")
    with refused("job_id"):
        value(order, "restart_pipeline", job_id=None, stage="check")
    with raises("RT001"):
        value(order, "restart_pipeline", job_id=9999, stage="check")
    value(order, "cancel_job", job_id=plain)
    with refused("job_id"):
        value(order, "restart_pipeline", job_id=plain, stage="check")


def test_retention_keeps_stages_as_long_as_any_queue_of_their_pipeline_keeps_jobs(db, clock):
    clock.set("2026-03-01 12:00+00")
    define(db, [{"stage": "a", "job_type": "a"}, {"stage": "b", "job_type": "b"}], "usual")
    short = [
        {"stage": "a", "job_type": "a", "queue": "minutes"},
        {"stage": "b", "job_type": "b", "queue": "hours"},
    ]
    define(db, short, "short")
    call(db, "set_queue", queue="minutes", keep_finished="1 minute")
    call(db, "set_queue", queue="hours", keep_finished="2 hours")
    for pipeline in ("usual", "short"):
        for _ in range(3):
            value(db, "cancel_job", job_id=start(db, pipeline=pipeline))

    def kept():
        one(db, "tick")
        query = "select pipeline, count(*) from rota.stage_runs group by 1 order by 1 desc"
        return dict(rows(db, query))

    assert kept() == {"usual": 3, "short": 3}
    clock.advance("119 minutes")
    assert kept() == {"usual": 3, "short": 3}
    clock.advance("6 minutes")
    assert kept() == {"usual": 3}
    clock.advance("7 days")
    assert kept() == {}


def test_purge_stage_runs_deletes_no_more_than_it_may(order, clock):
    clock.set("2026-03-01 12:00+00")
    for _ in range(5):
        value(order, "cancel_job", job_id=start(order))
        clock.advance("1 minute")
    clock.advance("8 days")
    order.execute("update rota.stats_progress set complete_until = rota.now()")

    purge = "select rota._purge('stage_runs', 2)"
    assert [scalar(order, purge) for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("stage", [None, "nowhere", "end", ""])
def test_restart_pipeline_refuses_an_unknown_stage(order, stage):
    run_id = start(order)
    value(order, "cancel_job", job_id=run_id)

    with refused("stage"):
        value(order, "restart_pipeline", job_id=run_id, stage=stage)


def test_define_pipeline_can_be_said_again(order):
    define(order)

    assert rows(
        order, "select stage, ordinal, next_stage from rota.pipeline_stages order by ordinal"
    ) == [("check", 1, "charge"), ("charge", 2, "ship"), ("ship", 3, None)]


def test_a_stage_has_the_job_type_of_its_name_unless_it_says_another(db):
    define(db, [{"stage": "check"}, {"stage": "ship", "job_type": "ship_order"}])

    found = rows(db, "select stage, job_type from rota.pipeline_stages order by ordinal")

    assert found == [("check", "check"), ("ship", "ship_order")]


def test_define_pipeline_changes_where_runs_under_way_go(order):
    start(order)
    job = take(order)
    define(order, [ORDER[0], {"stage": "pack", "job_type": "pack"}, ORDER[2], ORDER[1]])
    finish(order, job)

    assert [step(order).stage for _ in range(3)] == ["pack", "ship", "charge"]
    assert claim(order) == []


def test_define_pipeline_leads_a_run_out_of_a_stage_that_is_left_out(order):
    run_id = start(order)
    step(order)
    define(order, [ORDER[2], ORDER[0]])

    assert [step(order).stage for _ in range(3)] == ["charge", "ship", "check"]
    assert claim(order) == []
    with refused("stage"):
        start(order, stage="charge")
    with refused("stage"):
        value(order, "restart_pipeline", job_id=run_id, stage="charge")


def test_define_pipeline_leads_runs_out_over_several_changes(db):
    letters = [{"stage": stage, "job_type": stage} for stage in "abcdef"]
    define(db, letters)
    for stage in "abcdef":
        start(db, stage=stage, payload={"from": stage})
    define(db, [*letters[2:4], letters[5]])
    define(db, [letters[5], letters[3]])

    ways = dict(rows(db, "select stage, next_stage from rota.pipeline_stages"))
    assert ways == {"a": "d", "b": "d", "c": "d", "d": None, "e": "f", "f": "d"}
    while jobs := claim(db, max_jobs=10):
        call(db, "finish_jobs", **owners(*jobs))
    assert scalar(db, "select count(*) from rota.finished_jobs where stage = 'd'") == 6


def test_define_pipeline_leaves_out_a_thousand_stages_at_once(db):
    """From each a run goes on, and none of them is reached by way of all the others."""
    define(db, [{"stage": f"old{number}"} for number in range(1000)])
    db.execute("set statement_timeout = '20s'")

    define(db, [{"stage": f"new{number}"} for number in range(999)] + [{"stage": "old999"}])

    left_out = "select next_stage, count(*) from rota.pipeline_stages where ordinal is null"
    assert rows(db, f"{left_out} group by 1") == [("old999", 999)]


def test_finish_job_refuses_a_stage_that_is_left_out(order):
    start(order)
    job = take(order)
    define(order, [ORDER[0], ORDER[2]])

    with refused("next_stage"):
        finish(order, job, next_stage="charge")
    finish(order, job)
    assert take(order).stage == "ship"


def test_drop_pipeline_lets_runs_go_to_their_end(order):
    run_id = start(order)
    step(order)

    call(order, "drop_pipeline", pipeline="order")

    with refused("pipeline"):
        start(order)
    with refused("pipeline"):
        call(order, "drop_pipeline", pipeline="order")
    assert [step(order).stage for _ in range(2)] == ["charge", "ship"]
    assert stages(order, run_id) == ["check succeeded", "charge succeeded", "ship succeeded"]
    with refused("job_id"):
        value(order, "restart_pipeline", job_id=run_id, stage="check")
    define(order)
    assert start(order) > run_id


def test_drop_pipeline_lets_runs_go_to_a_stage_by_its_name(order):
    run_id = start(order)
    job = take(order)
    call(order, "drop_pipeline", pipeline="order")

    with refused("next_stage"):
        finish(order, job, next_stage="nowhere")
    finish(order, job, next_stage="ship")
    assert step(order).stage == "ship"
    assert stages(order, run_id) == ["check succeeded", "ship succeeded"]


def test_a_job_whose_stage_is_nowhere_ends_its_run(order):
    """Nothing of rota deletes a stage, but somebody may restore a part of a dump."""
    run_id = start(order)
    job = take(order)
    order.execute("delete from rota.pipeline_stages where stage = 'check'")

    assert finish(order, job) == "finished"
    assert stages(order, run_id) == ["check succeeded"]


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("stages", None),
        ("stages", []),
        ("stages", {"stage": "a", "job_type": "a"}),
        ("stages", "a"),
        ("stages", [{"stage": f"s{n}", "job_type": "a"} for n in range(1001)]),
        ("stages[2]", [ORDER[0], "ship"]),
        ("stages[1]", [{"stage": "a", "job_type": "a", "color": "red"}]),
        ("stages[1].stage", [{"job_type": "a"}]),
        ("stages[1].stage", [{"stage": None, "job_type": "a"}]),
        ("stages[1].stage", [{"stage": "a b", "job_type": "a"}]),
        ("stages[1].stage", [{"stage": "end", "job_type": "a"}]),
        ("stages[3].stage", [ORDER[0], ORDER[1], ORDER[0]]),
        ("stages[1].job_type", [{"stage": "a", "job_type": ""}]),
        ("stages[2].queue", [ORDER[0], {"stage": "a", "job_type": "a", "queue": "-"}]),
        ("stages[1].queue", [{"stage": "a", "job_type": "a", "queue": "forward:2"}]),
        ("stages[1].priority", [{"stage": "a", "job_type": "a", "priority": 99999}]),
        ("stages[1].priority", [{"stage": "a", "job_type": "a", "priority": "high"}]),
        ("stages[1].max_attempts", [{"stage": "a", "job_type": "a", "max_attempts": 0}]),
        ("stages[1].lease", [{"stage": "a", "job_type": "a", "lease": "long"}]),
        ("stages[1].lease", [{"stage": "a", "job_type": "a", "lease": "-1 s"}]),
        ("stages[1].lease", [{"stage": "a", "job_type": "a", "lease": {"minutes": 5}}]),
        ("stages[1].backoff", [{"stage": "a", "job_type": "a", "backoff": {"kind": "x"}}]),
        ("stages[1].backoff", [{"stage": "a", "job_type": "a", "backoff": 5}]),
    ],
)
def test_define_pipeline_refuses_bad_stages(order, name, stages):
    before = rows(order, "select * from rota.pipeline_stages order by ordinal")

    with refused(name):
        call(
            order,
            "define_pipeline",
            pipeline="order",
            stages=None if stages is None else Jsonb(stages),
        )

    assert rows(order, "select * from rota.pipeline_stages order by ordinal") == before


@pytest.mark.parametrize("pipeline", [None, "", "a b"])
def test_define_pipeline_refuses_a_bad_name(db, pipeline):
    with refused("pipeline"):
        define(db, pipeline=pipeline)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("pipeline", {"pipeline": None}),
        ("pipeline", {"pipeline": "nowhere"}),
        ("stage", {"stage": "nowhere"}),
        ("stage", {"stage": "end"}),
        ("payload", {"payload": None}),
        ("run_at", {"run_at": "infinity"}),
        ("delay", {"delay": "-1 s"}),
        ("priority", {"priority": None}),
        ("priority", {"priority": 99999}),
        ("idempotency_key", {"idempotency_key": ""}),
        ("idempotency_key", {"unique_for": "1 day"}),
        ("unique_for", {"unique_for": "0", "idempotency_key": "k"}),
        ("ordering_key", {"ordering_key": ""}),
        ("skip_dead", {"skip_dead": True}),
        ("depends_on", {"depends_on": [None]}),
        ("if_parent_dead", {"if_parent_dead": "explode"}),
        ("limit_key", {"limit_key": ""}),
    ],
)
def test_start_pipeline_refuses_bad_arguments(order, name, wrong):
    with refused(name):
        start(order, **wrong)

    assert rows(order, "select * from rota.jobs") == []


def test_start_pipeline_raises_for_jobs_that_are_not_there(order):
    with raises("RT001"):
        start(order, depends_on=[9999])
    with raises("RT013"):
        start(order, blocks=enqueue(order))


def test_restart_pipeline_takes_the_result_of_a_stage_that_was_retried(order):
    run_id = start(order)
    step(order, result="old", next_stage="end")
    value(order, "retry_job", job_id=run_id)
    step(order, result="new", next_stage="end")

    value(order, "restart_pipeline", job_id=run_id, stage="charge")

    assert take(order).stage_input == "new"


def test_large_inputs_and_results_go_along(order):
    """Of a batch they are more than a jsonb can hold."""
    large = {"text": "x" * 1_000_000}
    for _ in range(3):
        start(order, payload=large)
    jobs = claim(order, max_jobs=10)
    call(order, "finish_jobs", **owners(*jobs), results=Jsonb([large] * 3))
    for job in jobs:
        value(order, "cancel_job", job_id=job.job_id)

    query = "select stage_input = %s from rota.stage_runs where stage = 'charge'"
    assert rows(order, query, Jsonb(large)) == [(True,)] * 3


def test_definitions_do_not_wait_for_those_of_other_pipelines(order, connect):
    mine = connect(autocommit=False)
    define(mine)
    order.execute("set statement_timeout = '5s'")

    define(order, pipeline="other")
    start(order)
    step(order)
    call(order, "drop_pipeline", pipeline="other")
    mine.rollback()


def test_a_job_whose_stage_a_hand_has_left_out_ends_like_those_beside_it(db):
    jobs = [running(db) for _ in range(2)]
    db.execute("update rota.jobs set pipeline = 'p' where id = %s", [jobs[0].job_id])

    ends = call(db, "finish_jobs", **owners(*jobs))

    assert [end.outcome for end in ends] == ["finished", "finished"]
    assert rows(db, "select stage, status from rota.stage_runs") == [("", "succeeded")]
