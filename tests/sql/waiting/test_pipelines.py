"""Jobs that pass through stages."""

from __future__ import annotations

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
    scalar,
    value,
)

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
    return one(db, "fail_job", **owner(job), error="no", is_fatal=True)


def stages(db, run_id):
    """Return the stages that a run has passed, and how."""
    found = rows(
        db,
        "select stage, status from rota.job_runs where first_job_id = %s order by id",
        run_id,
    )
    return [f"{row.stage} {row.status}" for row in found]


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
    assert first.job_id == run_id
    assert stages(db, run_id) == ["check succeeded", "charge succeeded", "ship succeeded"]
    assert claim(db) == []


def test_a_job_in_no_pipeline_has_no_stage(db):
    enqueue(db)

    job = take(db)

    assert (job.pipeline, job.stage, job.stage_input) == (None, None, None)
    assert run(db, job.job_id).first_job_id is None


def test_finish_job_makes_the_next_stage_in_its_own_transaction(order, connect):
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
    call(order, "retry_job", job_id=job.job_id, is_forced=True)
    if is_taken:
        take(order)

    with raises("RT002"):
        finish(order, job, next_stage="nowhere")


def test_finish_job_asked_again_makes_no_second_successor(order):
    run_id = start(order)
    job = take(order)
    finish(order, job, next_stage="ship")

    assert finish(order, job, next_stage="ship") == "already_finished"
    assert finish(order, job, next_stage="charge") == "already_finished"
    assert stages(order, run_id) == ["check succeeded", "ship queued"]


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
                "backoff": {"kind": "fixed", "base_seconds": 5},
            },
            {"stage": "c", "job_type": "c", "queue": "slow", "priority": -3, "max_attempts": 2},
        ],
    )  # fmt: skip
    start(db, priority=9)

    a = step(db)
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
    assert b.locked_for.total_seconds() == 300
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
    assert stages(order, run_id) == ["check succeeded", "charge succeeded", "ship queued"]


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


def test_a_stage_that_ends_well_in_spite_of_its_cancel_cancels_the_next(order):
    run_id = start(order)
    job = take(order)
    value(order, "cancel_job", job_id=run_id, reason="out of stock")

    assert finish(order, job, result={"n": 1}) == "finished"
    assert stages(order, run_id) == ["check succeeded", "charge cancelled"]
    assert claim(order) == []

    stopped = scalar(order, "select id from rota.job_runs where stage = 'charge'")
    assert run(order, stopped).cancel_reason == "out of stock"
    value(order, "retry_job", job_id=stopped)
    assert take(order).stage_input == {"n": 1}


def test_a_cancel_in_the_last_stage_comes_too_late(order):
    run_id = start(order, stage="ship")
    job = take(order)
    value(order, "cancel_job", job_id=run_id)

    assert finish(order, job) == "finished"
    assert stages(order, run_id) == ["ship succeeded"]


def test_retry_job_refuses_a_stage_of_a_run_that_is_under_way(order):
    run_id = start(order)
    step(order)
    before = everything(order)

    with raises("RT014"):
        value(order, "retry_job", job_id=run_id)

    assert everything(order) == before


def test_retry_job_of_a_stage_of_a_run_that_is_over_goes_through_the_rest_again(order):
    run_id = start(order)
    step(order)
    step(order, next_stage="end")

    assert value(order, "retry_job", job_id=run_id) == "queued"
    step(order)

    assert take(order).stage == "charge"


def test_start_pipeline_begins_at_a_stage_and_a_time(order, clock):
    clock.set("2026-03-01 12:00+00")
    start(order, stage="ship", delay="1 hour")
    assert claim(order) == []
    clock.advance("1 hour")

    assert take(order).stage == "ship"


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
    child = enqueue(order, job_type="child", after=[run_id])

    passed = [step(order).stage for _ in range(3)]
    last = take(order)

    assert passed == ["check", "charge", "ship"]
    assert last.job_id == child
    assert rows(order, "select * from rota.dependencies") == []


def test_a_child_waits_for_a_run_that_it_names_by_any_of_its_jobs(order):
    run_id = start(order)
    step(order)
    second = scalar(order, "select id from rota.jobs")
    children = {
        enqueue(order, job_type="child", after=[parent]) for parent in (run_id, second, run_id)
    }

    assert [step(order).stage for _ in range(2)] == ["charge", "ship"]
    assert {job.job_id for job in claim(order, max_jobs=10)} == children


def test_a_child_of_a_run_that_is_over_does_not_wait(order):
    run_id = start(order)
    step(order)
    step(order, next_stage="end")

    child = enqueue(order, after=[run_id])

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
            value(order, "cancel_job", job_id=scalar(order, "select max(id) from rota.jobs"))

    if is_before:
        stop()
    cancel, go, wait = (
        enqueue(order, after=[run_id], if_parent_dead=policy)
        for policy in ("cancel", "run", "wait")
    )
    if not is_before and how == "cancel":
        value(
            order,
            "cancel_job",
            job_id=scalar(order, "select id from rota.jobs where stage = 'charge'"),
        )
    elif not is_before:
        stop()

    assert [job.job_id for job in claim(order, max_jobs=10)] == [go]
    assert [run(order, job_id).status for job_id in (cancel, wait)] == ["cancelled", "blocked"]


def test_a_child_that_waits_goes_on_after_a_run_that_was_taken_up_again(order):
    run_id = start(order)
    step(order)
    die(order, take(order))
    child = enqueue(order, after=[run_id], if_parent_dead="wait")

    value(order, "rerun_from", job_id=run_id, stage="charge")
    assert [step(order).stage for _ in range(2)] == ["charge", "ship"]

    assert take(order).job_id == child


def test_start_pipeline_waits_for_jobs_and_before_a_job(order):
    parent = enqueue(order, queue="other")
    run_id = start(order, after=[parent])
    child = enqueue(order, after=[run_id])
    second = start(order, before=child)

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
        child = enqueue(order, job_type="child", after=[run_id])
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
        passed.append((run(order, job.job_id).first_job_id, job.stage))
        finish(order, job)

    assert passed == [
        (run_id, stage) for run_id in (first, second) for stage in ("check", "charge", "ship")
    ]
    assert scalar(order, "select count(*) from rota.rechecks where due_at > rota.now()") == 0


@pytest.mark.parametrize("how", ["retry_job", "rerun_from"])
def test_a_dead_stage_holds_its_ordering_key_until_its_run_goes_on(order, how):
    first = start(order, ordering_key="k")
    start(order, ordering_key="k")
    step(order)
    job = take(order)
    die(order, job)
    assert claim(order) == []

    if how == "retry_job":
        assert value(order, how, job_id=job.job_id) == "queued"
    else:
        value(order, how, job_id=job.job_id, stage="charge")

    passed = [step(order) for _ in range(3)]
    assert [job.stage for job in passed] == ["charge", "ship", "check"]
    assert run(order, passed[1].job_id).first_job_id == first
    assert rows(order, "select * from rota.stuck_keys") == []


def test_rerun_from_takes_the_place_of_its_run_before_those_that_came_later(order):
    first = start(order, ordering_key="k")
    value(order, "cancel_job", job_id=first)
    second = start(order, ordering_key="k")
    again = value(order, "rerun_from", job_id=first, stage="ship")
    assert run(order, again).status == "blocked"

    passed = [step(order).job_id for _ in range(4)]

    assert passed[0] == again
    assert passed[1] == second


@pytest.mark.parametrize("again", ["retry_job", "rerun_from"])
def test_a_run_that_goes_on_does_not_stand_behind_those_that_wait_for_it(order, again):
    run_id = start(order, ordering_key="k")
    child = enqueue(
        order, queue="default", ordering_key="k", after=[run_id], if_parent_dead="wait"
    )
    step(order)
    job = take(order)
    die(order, job)
    value(order, "resume_key", ordering_key="k")

    if again == "retry_job":
        value(order, "retry_job", job_id=job.job_id)
    else:
        value(order, "rerun_from", job_id=run_id, stage="charge")

    assert [step(order).stage for _ in range(2)] == ["charge", "ship"]
    assert take(order).job_id == child


def test_before_sees_a_circle_over_the_run_of_a_parent(order):
    run_id = start(order, ordering_key="k")
    waiting = enqueue(order, ordering_key="o", after=[enqueue(order, queue="later")])
    step(order)
    line = start(order, ordering_key="o", after=[run_id])

    with refused("before"):
        enqueue(order, after=[line], before=waiting)


@pytest.mark.parametrize("is_first", [True, False])
def test_before_sees_a_circle_over_the_run_of_a_later_stage(order, is_first):
    """Whether the run is named by its first job or by the one that is blocked."""
    run_id = start(order, ordering_key="k")
    value(order, "cancel_job", job_id=run_id)
    start(order, ordering_key="k")
    stage = value(order, "rerun_from", job_id=run_id, stage="ship")
    assert run(order, stage).status == "blocked"

    with refused("before"):
        enqueue(order, after=[run_id if is_first else stage], before=stage)


def test_the_limit_key_of_a_run_goes_with_it(order):
    start(order, limit_key="customer:1")
    step(order)

    assert scalar(order, "select limit_key from rota.jobs") == "customer:1"


@pytest.mark.parametrize(
    ("stage", "stage_input"), [("check", None), ("charge", "c1"), ("ship", "c2")]
)
def test_rerun_from_goes_on_with_the_latest_result_before_the_stage(order, stage, stage_input):
    run_id = start(order, payload={"order": 7}, idempotency_key="k")
    step(order, result="c1")
    step(order, result="c2")
    die(order, take(order))

    job_id = value(order, "rerun_from", job_id=run_id, stage=stage)
    job = take(order)

    assert (job.job_id, job.stage, job.stage_input) == (job_id, stage, stage_input)
    assert (job.payload, job.idempotency_key) == ({"order": 7}, "k")
    assert run(order, job_id).first_job_id == run_id


def test_rerun_from_takes_the_result_of_a_stage_that_was_run_again(order):
    run_id = start(order)
    step(order, result="old")
    step(order)
    step(order)
    value(order, "rerun_from", job_id=run_id, stage="check")
    step(order, result="new", next_stage="end")

    value(order, "rerun_from", job_id=run_id, stage="charge")

    assert take(order).stage_input == "new"


def test_rerun_from_skips_a_stage_that_is_dead(order):
    run_id = start(order)
    die(order, take(order))

    value(order, "rerun_from", job_id=run_id, stage="ship")

    assert take(order).stage_input is None
    assert scalar(order, "select stage_input is null from rota.jobs")


def test_rerun_from_refuses_a_run_that_is_under_way(order):
    run_id = start(order)
    with raises("RT014"):
        value(order, "rerun_from", job_id=run_id, stage="check")
    step(order)
    with raises("RT014"):
        value(order, "rerun_from", job_id=run_id, stage="check")
    take(order)
    with raises("RT014"):
        value(order, "rerun_from", job_id=run_id, stage="check")


def test_rerun_from_refuses_when_its_key_is_taken(order):
    run_id = start(order, idempotency_key="k")
    value(order, "cancel_job", job_id=run_id)
    start(order, idempotency_key="k")

    with raises("RT007"):
        value(order, "rerun_from", job_id=run_id, stage="check")


def test_rerun_from_says_what_retention_has_removed(order):
    run_id = start(order)
    step(order, result="c1")
    job = take(order)
    die(order, job)
    order.execute("delete from rota.finished_jobs where id = %s", [run_id])

    # It knows what it was given itself.
    again = value(order, "rerun_from", job_id=job.job_id, stage="charge")
    assert run(order, again).stage_input == "c1"
    value(order, "cancel_job", job_id=again)
    with raises("RT001"):
        value(order, "rerun_from", job_id=run_id, stage="check")
    order.execute("delete from rota.finished_jobs where id = %s", [again])
    order.execute("update rota.finished_jobs set stage = 'ship'")
    with raises("RT001"):
        value(order, "rerun_from", job_id=job.job_id, stage="charge")
    assert value(order, "rerun_from", job_id=job.job_id, stage="check") > again


def test_rerun_from_refuses_what_is_no_run(order):
    plain = enqueue(order)

    with refused("job_id"):
        value(order, "rerun_from", job_id=plain, stage="check")
    with refused("job_id"):
        value(order, "rerun_from", job_id=None, stage="check")
    with raises("RT001"):
        value(order, "rerun_from", job_id=9999, stage="check")
    value(order, "cancel_job", job_id=plain)
    with refused("job_id"):
        value(order, "rerun_from", job_id=plain, stage="check")


@pytest.mark.parametrize("stage", [None, "nowhere", "end", ""])
def test_rerun_from_refuses_an_unknown_stage(order, stage):
    run_id = start(order)
    value(order, "cancel_job", job_id=run_id)

    with refused("stage"):
        value(order, "rerun_from", job_id=run_id, stage=stage)


def test_define_pipeline_can_be_said_again(order):
    define(order)

    assert rows(
        order, "select stage, ordinal, next_stage from rota.pipeline_stages order by ordinal"
    ) == [("check", 1, "charge"), ("charge", 2, "ship"), ("ship", 3, None)]


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
        value(order, "rerun_from", job_id=run_id, stage="charge")


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
        value(order, "rerun_from", job_id=run_id, stage="check")
    define(order)
    assert start(order) > run_id


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
        ("stages[1].job_type", [{"stage": "a"}]),
        ("stages[1].job_type", [{"stage": "a", "job_type": ""}]),
        ("stages[2].queue", [ORDER[0], {"stage": "a", "job_type": "a", "queue": "-"}]),
        ("stages[1].priority", [{"stage": "a", "job_type": "a", "priority": 99999}]),
        ("stages[1].priority", [{"stage": "a", "job_type": "a", "priority": "high"}]),
        ("stages[1].max_attempts", [{"stage": "a", "job_type": "a", "max_attempts": 0}]),
        ("stages[1].lease", [{"stage": "a", "job_type": "a", "lease": "long"}]),
        ("stages[1].lease", [{"stage": "a", "job_type": "a", "lease": "-1 s"}]),
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
        ("after", {"after": [None]}),
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
        start(order, after=[9999])
    with raises("RT013"):
        start(order, before=enqueue(order))


def test_a_run_is_in_one_stage_at_a_time(order):
    run_id = start(order)

    with raises("23505"):
        order.execute(
            "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status,"
            " run_at, pipeline, stage, first_job_id) values ('q', 't', '{}', 0, 1, 'queued',"
            " now(), 'order', 'ship', %s)",
            [run_id],
        )


def test_rerun_from_takes_the_result_of_a_stage_that_was_retried(order):
    start(order)
    checked = step(order, result="old")
    charged = take(order)
    die(order, charged)
    value(order, "retry_job", job_id=checked.job_id)
    step(order, result="new", next_stage="end")

    value(order, "rerun_from", job_id=charged.job_id, stage="charge")

    assert take(order).stage_input == "new"
