"""Jobs that wait for jobs."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import call, claim, enqueue, one, owner, raises, refused, rows, run, value


def claimed(db, **arguments):
    return [job.job_id for job in claim(db, max_jobs=10, **arguments)]


def end(db, job_id, how="finish"):
    """Bring a waiting job to its end."""
    if how == "cancel":
        value(db, "cancel_job", job_id=job_id)
        return
    jobs = {job.job_id: job for job in claim(db, max_jobs=10)}
    job = jobs.pop(job_id)
    if jobs:
        call(
            db,
            "release_jobs",
            job_ids=[*jobs],
            lease_tokens=[other.lease_token for other in jobs.values()],
        )
    if how == "finish":
        value(db, "finish_job", **owner(job))
    else:
        one(db, "fail_job", **owner(job), error="no", is_fatal=True)


def status(db, job_id):
    return run(db, job_id).status


def test_a_job_waits_for_all_its_parents(db):
    a, b = enqueue(db), enqueue(db)
    child = enqueue(db, after=[a, b])

    assert status(db, child) == "blocked"
    end(db, b)
    assert claimed(db) == [a]
    assert status(db, child) == "blocked"


def test_a_job_starts_when_the_last_parent_has_ended(db):
    a, b = enqueue(db), enqueue(db)
    child = enqueue(db, after=[a, b, a])
    end(db, a)
    end(db, b)

    assert claimed(db) == [child]
    assert rows(db, "select * from rota.dependencies") == []
    assert rows(db, "select * from rota.rechecks") == []


def test_a_job_without_parents_left_starts_at_once(db):
    a = enqueue(db)
    end(db, a)

    assert claimed(db) == []
    jobs = [enqueue(db, after=[a]), enqueue(db, after=[])]
    assert claimed(db) == jobs


def test_a_job_keeps_its_time_behind_its_parents(db, clock):
    clock.set("2026-03-01 12:00+00")
    a = enqueue(db)
    child = enqueue(db, after=[a], delay="1 hour")
    end(db, a)

    assert claimed(db) == []
    clock.advance("1 hour")
    assert claimed(db) == [child]


@pytest.mark.parametrize("how", ["fail", "cancel"])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_dead_parent_cancels_runs_or_keeps_its_children(db, how, is_before):
    a = enqueue(db, queue="default")
    if is_before:
        end(db, a, how)
    cancel, go, wait = (
        enqueue(db, after=[a], if_parent_dead=policy) for policy in ("cancel", "run", "wait")
    )
    if not is_before:
        end(db, a, how)

    assert claimed(db) == [go]
    assert [status(db, job_id) for job_id in (cancel, wait)] == ["cancelled", "blocked"]
    assert "dead or was cancelled" in run(db, cancel).cancel_reason
    assert rows(db, "select parent_id, job_id, is_failed from rota.dependencies") == [
        (a, wait, True)
    ]


def test_a_child_that_waits_goes_on_when_its_parent_succeeds_after_all(db):
    a = enqueue(db)
    child = enqueue(db, after=[a], if_parent_dead="wait")
    end(db, a, "fail")
    assert claimed(db) == []

    value(db, "retry_job", job_id=a)
    end(db, a)

    assert claimed(db) == [child]


def test_a_cancel_goes_down_the_whole_line(db):
    ids = [enqueue(db)]
    for _ in range(50):
        ids.append(enqueue(db, after=[ids[-1]]))
    end(db, ids[0], "fail")

    one(db, "tick")

    assert {status(db, job_id) for job_id in ids[1:]} == {"cancelled"}
    assert rows(db, "select * from rota.dependencies") == []
    one(db, "tick")  # its own notes stay for another
    assert rows(db, "select * from rota.rechecks") == []


def test_a_cancelled_child_leaves_nothing_behind(db):
    a, b = enqueue(db), enqueue(db)
    child = enqueue(db, after=[a, b])
    value(db, "cancel_job", job_id=child)
    end(db, a)
    end(db, b, "fail")

    one(db, "tick")

    assert status(db, child) == "cancelled"
    assert rows(db, "select * from rota.dependencies") == []


def test_fan_in_starts_after_the_last_child(db):
    parent = enqueue(db, job_type="split")
    done = enqueue(db, job_type="done", after=[parent])
    (job,) = claim(db)
    batches = [
        [{"job_type": "part", "before": done} for _ in range(3)],
        [{"job_type": "part", "before": done, "idempotency_key": key} for key in "aba"],
    ]
    children = [
        row.job_id for jobs in batches for row in call(db, "enqueue_many", jobs=Jsonb(jobs))
    ]
    value(db, "finish_job", **owner(job))

    ended = []
    while jobs := claim(db):
        ended.append(jobs[0].job_id)
        value(db, "finish_job", **owner(jobs[0]))

    assert ended == [*dict.fromkeys(children), done]


def test_before_binds_the_live_job_of_a_key_too(db):
    done = enqueue(db, after=[enqueue(db, queue="other")])
    part = enqueue(db, idempotency_key="k", queue="parts")

    assert enqueue(db, idempotency_key="k", before=done, queue="parts") == part
    end_other = claim(db, queues=["other"])[0]
    value(db, "finish_job", **owner(end_other))

    assert claimed(db) == []
    value(db, "finish_job", **owner(claim(db, queues=["parts"])[0]))
    assert claimed(db) == [done]


def test_before_refuses_a_job_that_is_not_blocked(db):
    waiting = enqueue(db)
    with raises("RT013"):
        enqueue(db, before=waiting)
    with raises("RT001"):
        enqueue(db, before=12345)
    end(db, waiting)
    with raises("RT003"):
        enqueue(db, before=waiting)
    assert claimed(db) == []


def test_before_refuses_a_circle(db):
    a = enqueue(db)
    b = enqueue(db, after=[a])
    c = enqueue(db, after=[b])

    with refused("before"):
        enqueue(db, before=b, after=[c])
    with refused("jobs[1].before"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", "before": b, "after": [a, c]}]))


def test_before_minds_no_parents_of_a_job_that_has_ended(db):
    parent = enqueue(db, queue="later")
    waiting = enqueue(db, after=[parent])
    cancelled = enqueue(db, after=[waiting])
    value(db, "cancel_job", job_id=cancelled)

    child = enqueue(db, after=[cancelled], before=waiting, if_parent_dead="wait")

    assert child > cancelled


def test_before_names_the_job_of_a_batch_that_closes_a_circle(db):
    a = enqueue(db)
    b = enqueue(db, after=[a])
    c = enqueue(db, after=[b])
    jobs = [{"before": b}, {"before": b, "after": [a]}, {"before": b, "after": [c]}]

    with refused("jobs[3].before"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", **job} for job in jobs]))


def test_before_refuses_the_job_itself(db):
    waiting = enqueue(db, after=[enqueue(db)], idempotency_key="e")

    with refused("before"):
        enqueue(db, before=waiting, idempotency_key="e")
    with refused("jobs[1].before"):
        job = {"job_type": "x", "before": waiting, "idempotency_key": "e"}
        call(db, "enqueue_many", jobs=Jsonb([job]))


def test_before_refuses_a_circle_within_a_batch(db):
    a = enqueue(db)
    one_last, other_last = enqueue(db, after=[a]), enqueue(db, after=[a])
    jobs = [
        {"job_type": "x", "before": one_last, "after": [other_last]},
        {"job_type": "x", "before": other_last, "after": [one_last]},
    ]

    with refused("jobs[1].before"):
        call(db, "enqueue_many", jobs=Jsonb(jobs))


@pytest.mark.parametrize("function", ["enqueue", "enqueue_many"])
def test_before_refuses_a_circle_over_the_line_of_a_key(db, function):
    first = enqueue(db, after=[enqueue(db)], ordering_key="k")
    enqueue(db, ordering_key="k")
    behind = enqueue(db, ordering_key="other", after=[enqueue(db, ordering_key="k")])

    for job in (
        {"ordering_key": "k", "before": first},
        {"after": [behind], "before": first},
        {"ordering_key": "other", "before": first},
    ):
        with refused("before" if function == "enqueue" else "jobs[1].before"):
            if function == "enqueue":
                enqueue(db, **job)
            else:
                call(db, function, jobs=Jsonb([{"job_type": "x", **job}]))
    assert enqueue(db, ordering_key="k", before=behind)


def test_before_refuses_a_circle_over_a_job_found_by_its_key(db):
    last = enqueue(db, after=[enqueue(db)])
    enqueue(db, after=[last], idempotency_key="e")

    with refused("before"):
        enqueue(db, before=last, idempotency_key="e")


def test_a_cancelled_child_of_a_dead_parent_leaves_nothing_behind(db):
    a = enqueue(db)
    child = enqueue(db, after=[a], if_parent_dead="wait", ordering_key="k")
    end(db, a, "fail")
    one(db, "tick")
    value(db, "cancel_job", job_id=child)

    one(db, "tick")
    assert rows(db, "select * from rota.dependencies") == []
    value(db, "retry_job", job_id=child)
    assert claimed(db) == [child]


def test_after_raises_for_a_job_that_is_not_there(db):
    a = enqueue(db)

    with raises("RT001"):
        enqueue(db, after=[a, 99999])
    with raises("RT001"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", "after": [99999]}]))
    assert claimed(db) == [a]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("after", {"after": [None]}),
        ("after", {"after": [1] * 10001}),
        ("if_parent_dead", {"if_parent_dead": "explode"}),
    ],
)
def test_enqueue_refuses_bad_parents(db, name, wrong):
    with refused(name):
        enqueue(db, **wrong)
    with refused(f"jobs[1].{name}"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", **wrong}]))


@pytest.mark.parametrize("wrong", ["x", ["x"], {"a": 1}, [1.5], [[1], [2, 3]], [[[[[[[1]]]]]]]])
def test_enqueue_many_refuses_what_is_no_list_of_ids(db, wrong):
    with refused("jobs[1].after"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", "after": wrong}]))


def test_enqueue_refuses_null_as_policy(db):
    with refused("if_parent_dead"):
        enqueue(db, if_parent_dead=None)


def test_a_job_waits_for_its_parents_and_for_its_turn(db):
    a = enqueue(db)
    first = enqueue(db, after=[a], ordering_key="k")
    second = enqueue(db, ordering_key="k")
    assert claimed(db) == [a]
    assert [status(db, job_id) for job_id in (first, second)] == ["blocked", "blocked"]


def test_a_job_takes_its_turn_after_its_parents(db):
    a = enqueue(db)
    first = enqueue(db, after=[a], ordering_key="k")
    second = enqueue(db, ordering_key="k")
    end(db, a)

    (job,) = claim(db, max_jobs=10)
    value(db, "finish_job", **owner(job))

    assert job.job_id == first
    assert claimed(db) == [second]


def test_a_parent_that_ends_in_an_older_snapshot_frees_its_children(db, connect):
    """REPEATABLE READ: the child comes in after the snapshot that the parent ends in."""
    parent = enqueue(db)
    (job,) = claim(db)
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read")
    old.execute("select 1 from rota.jobs")
    child = enqueue(db, after=[parent])

    value(old, "finish_job", **owner(job))
    assert claimed(db) == []
    old.commit()

    assert claimed(db) == [child]
