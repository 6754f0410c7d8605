"""Jobs that wait for jobs."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    one,
    owner,
    owners,
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

pytestmark = pytest.mark.slow


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
        one(db, "fail_job", **owner(job), error="no", fatal=True)


def status(db, job_id):
    return run(db, job_id).status


def test_a_job_waits_for_all_its_parents(db):
    a, b = enqueue(db), enqueue(db)
    child = enqueue(db, depends_on=[a, b])

    assert status(db, child) == "blocked"
    end(db, b)
    assert claimed(db) == [a]
    assert status(db, child) == "blocked"


def test_a_job_starts_when_the_last_parent_has_ended(db):
    a, b = enqueue(db), enqueue(db)
    child = enqueue(db, depends_on=[a, b, a])
    end(db, a)
    end(db, b)

    assert claimed(db) == [child]
    assert rows(db, "select * from rota.dependencies") == []
    settle(db)
    assert pending(db) == []


def test_a_job_without_parents_left_starts_at_once(db):
    a = enqueue(db)
    end(db, a)

    assert claimed(db) == []
    jobs = [enqueue(db, depends_on=[a]), enqueue(db, depends_on=[])]
    assert claimed(db) == jobs
    assert pending(db) == []


def test_a_job_keeps_its_time_behind_its_parents(db, clock):
    clock.set("2026-03-01 12:00+00")
    a = enqueue(db)
    child = enqueue(db, depends_on=[a], delay="1 hour")
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
        enqueue(db, depends_on=[a], if_parent_dead=policy)
        for policy in ("cancel", "run", "wait")
    )
    if not is_before:
        end(db, a, how)

    settle(db)

    assert claimed(db) == [go]
    assert [status(db, job_id) for job_id in (cancel, wait)] == ["cancelled", "blocked"]
    is_dead = "is dead" if how == "fail" else "was cancelled"
    assert run(db, cancel).cancel_reason == f"parent {a} {is_dead}"
    assert rows(db, "select parent_id, job_id from rota.dependencies order by 2") == [
        (a, cancel),
        (a, wait),
    ]


def test_a_child_that_waits_goes_on_when_its_parent_succeeds_after_all(db):
    a = enqueue(db)
    child = enqueue(db, depends_on=[a], if_parent_dead="wait")
    end(db, a, "fail")
    settle(db)
    assert claimed(db) == []

    value(db, "retry_job", job_id=a)
    end(db, a)

    assert claimed(db) == [child]


def test_a_cancel_goes_down_the_whole_line(db):
    ids = [enqueue(db)]
    for _ in range(50):
        ids.append(enqueue(db, depends_on=[ids[-1]]))
    end(db, ids[0], "fail")

    settle(db)

    assert {status(db, job_id) for job_id in ids[1:]} == {"cancelled"}
    assert pending(db) == []


def test_the_edges_of_a_cancelled_child_go_with_it(db):
    a, b = enqueue(db), enqueue(db)
    child = enqueue(db, depends_on=[a, b])
    value(db, "cancel_job", job_id=child)
    end(db, a)
    end(db, b, "fail")
    settle(db)

    assert rows(db, "select parent_id, job_id from rota.dependencies") == [(b, child)]
    assert scalar(db, "select rota._purge_dependencies(10)") == 0
    db.execute("delete from rota.finished_jobs where id = %s", [child])
    assert scalar(db, "select rota._purge_dependencies(10)") == 1
    assert rows(db, "select * from rota.dependencies") == []


def test_edges_are_purged_in_chunks(db):
    db.execute(
        "insert into rota.dependencies select n, 999999 from generate_series(1, 30) as n"
    )
    live = enqueue(db, depends_on=[enqueue(db)])

    assert [scalar(db, "select rota._purge_dependencies(20)") for _ in range(3)] == [20, 10, 0]
    assert rows(db, "select job_id from rota.dependencies") == [(live,)]


def test_a_retried_fan_in_waits_again_for_its_parents(db):
    parts = [enqueue(db, job_type="part") for _ in range(3)]
    done = enqueue(db, job_type="done", depends_on=parts)
    end(db, parts[0])
    for part in parts[1:]:
        end(db, part, "fail")
    settle(db)
    assert status(db, done) == "cancelled"

    assert value(db, "retry_job", job_id=done) == "blocked"
    settle(db)
    assert claimed(db) == []
    for part in parts[1:]:
        assert value(db, "retry_job", job_id=part) == "queued"
    for part in parts[1:]:
        assert status(db, done) == "blocked"
        end(db, part)

    assert claimed(db) == [done]


def test_retry_job_brings_back_what_was_cancelled_with_it(db):
    parent = enqueue(db)
    children = [enqueue(db, depends_on=[parent]) for _ in range(3)]
    grandchild = enqueue(db, depends_on=[children[0]])
    by_hand = enqueue(db, depends_on=[parent])
    value(db, "cancel_job", job_id=by_hand)
    taken = enqueue(db, depends_on=[parent], idempotency_key="k")
    end(db, parent, "fail")
    settle(db)
    newer = enqueue(db, idempotency_key="k", queue="other")

    # The taken one is counted: its key may be free by the time it comes back.
    assert value(db, "retry_with_dependants", job_id=parent) == 6
    settle(db)

    assert {status(db, job_id) for job_id in (*children, grandchild)} == {"blocked"}
    assert [status(db, job_id) for job_id in (by_hand, taken)] == ["cancelled"] * 2
    assert status(db, newer) == "queued"
    end(db, parent)
    assert claimed(db) == children


def test_a_dependant_that_cannot_come_back_keeps_no_other(db, connect):
    parent = enqueue(db)
    locked, free = (enqueue(db, depends_on=[parent]) for _ in range(2))
    erased = enqueue(db, depends_on=[parent], payload={"erased": True})
    end(db, parent, "fail")
    settle(db)
    operator = connect(autocommit=False)
    value(operator, "retry_job", job_id=locked)
    value(db, "retry_with_dependants", job_id=parent)

    settle(db)

    assert status(db, free) == "blocked"
    operator.rollback()
    db.execute("update rota.pending_checks set due_at = '-infinity'")
    settle(db)
    assert status(db, locked) == "blocked"
    assert (status(db, erased), pending(db)) == ("cancelled", [])


def test_a_tick_waits_for_few_dependants(db, connect):
    """Others have the keys of all, and have not committed: the tick may not wait for each."""
    keys = [{"job_type": "x", "idempotency_key": f"k{n}"} for n in range(10)]
    parent = enqueue(db)
    children = [enqueue(db, depends_on=[parent], **key) for key in keys]
    end(db, parent, "fail")
    settle(db)
    producer = connect(autocommit=False)
    for key in keys:
        enqueue(producer, **key)
    value(db, "retry_with_dependants", job_id=parent)

    scalar(db, "select rota._do_checks(1000)")

    assert len(rows(db, "select from rota.pending_checks where deferrals > 0")) < 5
    producer.rollback()
    db.execute("update rota.pending_checks set due_at = '-infinity'")
    settle(db)
    assert {status(db, job_id) for job_id in children} == {"blocked"}


def test_retry_job_leaves_what_was_cancelled_with_it(db):
    parent = enqueue(db)
    child = enqueue(db, depends_on=[parent])
    end(db, parent, "fail")
    settle(db)

    value(db, "retry_job", job_id=parent)
    settle(db)

    assert status(db, child) == "cancelled"
    assert value(db, "retry_with_dependants", job_id=parent) == 2
    settle(db)
    assert status(db, child) == "blocked"
    assert value(db, "retry_with_dependants", job_id=parent) == 1
    acts = rows(
        db, "select act, after from rota.audit_log where act like 'retry_%%' order by id"
    )
    assert [row.after["dependants"] for row in acts] == [1, 0]


def test_retry_with_dependants_leaves_what_an_operator_has_cancelled(db):
    parent = enqueue(db)
    child = enqueue(db, depends_on=[parent])
    value(db, "cancel_job", job_id=child, reason=f"parent {parent} is the wrong one")
    end(db, parent, "cancel")
    settle(db)

    assert value(db, "retry_with_dependants", job_id=parent) == 1
    settle(db)
    assert status(db, child) == "cancelled"


def test_retry_with_dependants_is_refused_as_retry_job_is(db):
    with refused("job_id"):
        value(db, "retry_with_dependants", job_id=None)
    with refused("force"):
        value(db, "retry_with_dependants", job_id=enqueue(db), force=None)
    with raises("RT001"):
        value(db, "retry_with_dependants", job_id=10**12)


def test_no_more_dependants_are_counted_than_a_thousand(db):
    parent = enqueue(db)
    jobs = [{"job_type": "t", "depends_on": [parent]} for _ in range(1100)]
    call(db, "enqueue_many", jobs=Jsonb(jobs))
    end(db, parent, "fail")
    settle(db)

    assert value(db, "retry_with_dependants", job_id=parent) == 1001
    settle(db)
    assert scalar(db, "select count(*) from rota.jobs where status = 'blocked'") == 1100


@pytest.mark.parametrize("how", ["finish", "fail", "cancel"])
def test_a_parent_of_many_tells_them_in_chunks(db, how):
    parent = enqueue(db)
    jobs = [{"job_type": "x", "depends_on": [parent]}] * 2500
    ids = [row.job_id for row in call(db, "enqueue_many", jobs=Jsonb(jobs))]
    settle(db)
    end(db, parent, how)

    assert pending(db) == [("parent", str(parent))]
    settle(db)
    states = rows(db, "select distinct status from rota.job_runs where id = any(%s)", ids)
    assert states == [("queued" if how == "finish" else "cancelled",)]


def test_a_parent_of_few_opens_them_at_once(db):
    parent = enqueue(db)
    ids = [enqueue(db, depends_on=[parent]) for _ in range(20)]
    end(db, parent)

    assert {status(db, job_id) for job_id in ids} == {"queued"}


@pytest.mark.parametrize("by", ["raise exception 'poison'", "return null"])
def test_a_child_that_a_trigger_refuses_keeps_no_parent_and_no_sibling(db, clock, by):
    clock.set("2026-03-01 12:00+00")
    parent = enqueue(db)
    first, bad, last = (enqueue(db, depends_on=[parent]) for _ in range(3))
    settle(db)
    poison(db, bad, by)

    end(db, parent)

    assert claimed(db) == [first, last]
    assert status(db, bad) == "blocked"
    db.execute("drop trigger poison on rota.jobs")
    clock.advance("10 seconds")
    settle(db)
    assert claimed(db) == [bad]
    assert pending(db) == []


def test_a_child_that_a_trigger_refuses_to_cancel_keeps_no_sibling(db, clock):
    clock.set("2026-03-01 12:00+00")
    parent = enqueue(db)
    first, bad, last = (enqueue(db, depends_on=[parent]) for _ in range(3))
    settle(db)
    poison(db, bad)
    end(db, parent, "fail")

    settle(db)
    clock.advance("1 second")
    settle(db)

    assert [status(db, job) for job in (first, bad, last)] == [
        "cancelled",
        "blocked",
        "cancelled",
    ]
    db.execute("drop trigger poison on rota.jobs")
    clock.advance("10 seconds")
    settle(db)
    assert status(db, bad) == "cancelled"


def test_fan_in_starts_after_the_last_child(db):
    parent = enqueue(db, job_type="split")
    done = enqueue(db, job_type="done", depends_on=[parent])
    (job,) = claim(db)
    batches = [
        [{"job_type": "part", "blocks": done} for _ in range(3)],
        [{"job_type": "part", "blocks": done, "idempotency_key": key} for key in "aba"],
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


def test_blocks_binds_the_live_job_of_a_key_too(db):
    done = enqueue(db, depends_on=[enqueue(db, queue="other")])
    part = enqueue(db, idempotency_key="k", queue="parts")

    assert enqueue(db, idempotency_key="k", blocks=done, queue="parts") == part
    end_other = claim(db, queues=["other"])[0]
    value(db, "finish_job", **owner(end_other))

    assert claimed(db) == []
    value(db, "finish_job", **owner(claim(db, queues=["parts"])[0]))
    assert claimed(db) == [done]


def test_blocks_refuses_a_job_that_is_not_blocked(db):
    waiting = enqueue(db)
    with raises("RT013"):
        enqueue(db, blocks=waiting)
    with raises("RT001"):
        enqueue(db, blocks=12345)
    end(db, waiting)
    with raises("RT003"):
        enqueue(db, blocks=waiting)
    assert claimed(db) == []


def test_blocks_of_a_job_that_another_transaction_has_locked_may_be_tried_again(db, connect):
    waiting = enqueue(db, depends_on=[enqueue(db)])
    operator = connect()
    operator.autocommit = False
    value(operator, "cancel_job", job_id=waiting)

    with pytest.raises(psycopg.Error) as caught:
        enqueue(db, blocks=waiting)
    assert caught.value.sqlstate == "RT013"
    assert "again" in str(caught.value.diag.message_hint)

    operator.rollback()
    enqueue(db, blocks=waiting)


@pytest.mark.parametrize("with_it", [{"depends_on": []}, {"ordering_key": "k"}])
def test_blocks_goes_with_nothing_that_waits(db, with_it):
    waiting = enqueue(db, depends_on=[enqueue(db)])
    job = {"job_type": "x", "blocks": waiting, **with_it}

    with pytest.raises(psycopg.Error) as caught:
        enqueue(db, **job)
    assert caught.value.sqlstate == "22023"
    assert "pipeline" in str(caught.value.diag.message_hint)
    with refused("jobs[2].blocks"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x"}, job]))


def test_blocks_refuses_the_job_itself(db):
    waiting = enqueue(db, depends_on=[enqueue(db)], idempotency_key="e")

    with refused("blocks"):
        enqueue(db, blocks=waiting, idempotency_key="e")
    with refused("jobs[1].blocks"):
        job = {"job_type": "x", "blocks": waiting, "idempotency_key": "e"}
        call(db, "enqueue_many", jobs=Jsonb([job]))


@pytest.mark.parametrize("waits", ["parent", {"ordering_key": "k"}, "dead", "cancelled"])
def test_blocks_refuses_a_job_found_by_its_key_that_waits_or_failed(db, waits):
    first = enqueue(db)
    last = enqueue(db, depends_on=[first])
    if waits == "parent":
        waits = {"depends_on": [first]}
    arguments = waits if isinstance(waits, dict) else {"unique_for": "1 hour"}
    found = enqueue(db, idempotency_key="e", queue="other", **arguments)
    if waits == "dead":
        (job,) = claim(db, queues=["other"])
        one(db, "fail_job", **owner(job), error="no", fatal=True)
    elif waits == "cancelled":
        value(db, "cancel_job", job_id=found)
    again = {"idempotency_key": "e", "blocks": last}
    if not isinstance(waits, dict):
        again["unique_for"] = "1 hour"

    with refused("blocks"):
        enqueue(db, **again)
    with refused("jobs[1].blocks"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", **again}]))


def test_blocks_needs_no_wait_for_a_part_that_succeeded(db):
    first = enqueue(db)
    last = enqueue(db, depends_on=[first])
    arguments = {"idempotency_key": "e", "unique_for": "1 hour", "queue": "other"}
    part = enqueue(db, **arguments)
    value(db, "finish_job", **owner(claim(db, queues=["other"])[0]))

    assert enqueue(db, **arguments, blocks=last) == part
    end(db, first)
    settle(db)
    assert claimed(db) == [last]


def test_a_retry_of_a_cancelled_child_waits_for_its_dead_parent(db):
    a = enqueue(db)
    child = enqueue(db, depends_on=[a], if_parent_dead="wait", ordering_key="k")
    end(db, a, "fail")
    settle(db)
    value(db, "cancel_job", job_id=child)

    assert value(db, "retry_job", job_id=child) == "blocked"
    value(db, "retry_job", job_id=a)
    end(db, a)
    assert claimed(db) == [child]


def test_a_retry_of_a_cancelled_child_waits_for_no_parent_that_is_not_kept(db, clock):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    clock.set("2026-01-02 23:59:59+00")
    a, b = enqueue(db), enqueue(db, queue="other")
    child = enqueue(db, depends_on=[a, b])
    value(db, "cancel_job", job_id=a)
    clock.set("2026-01-03 00:00+00")
    settle(db)
    assert run(db, child).status == "cancelled"
    clock.set("2026-01-10 00:00+00")
    settle(db)
    assert rows(db, "select from rota.job_runs where id = %s", a) == []

    assert value(db, "retry_job", job_id=child) == "blocked"
    settle(db)
    assert run(db, child).status == "blocked"
    value(db, "finish_job", **owner(claim(db, queues=["other"])[0]))
    assert claimed(db) == [child]


def test_a_job_that_this_very_call_makes_is_unknown_to_it(db):
    """A producer can guess the ids that come next, and two jobs would wait for each other."""
    first = enqueue(db)
    step = enqueue(db) - first

    for places in ([1, None], [2, None], [None, 1], [2, 1]):
        last = enqueue(db)
        jobs = [
            {"job_type": "x", "depends_on": [last + place * step] if place else []}
            for place in places
        ]
        with raises("RT001"):
            call(db, "enqueue_many", jobs=Jsonb(jobs))
    last = enqueue(db)
    with raises("RT001"):
        enqueue(db, depends_on=[last + step], idempotency_key="k")


def test_a_job_may_depend_on_one_that_moved_here_with_a_higher_id(db, unnumbered):
    """The ids given here are above it only when its whole queue has come."""
    first = enqueue(db)
    db.execute("alter sequence rota.jobs_id_seq restart with 100000")
    moved = enqueue(db)
    db.execute(f"alter sequence rota.jobs_id_seq restart with {first + 1}")

    child = enqueue(db, depends_on=[moved], idempotency_key="k")
    assert child < moved
    end(db, moved)
    assert claimed(db) == [first, child]


def test_depends_on_raises_for_a_job_that_is_not_there(db):
    a = enqueue(db)

    with raises("RT001"):
        enqueue(db, depends_on=[a, 99999])
    with raises("RT001"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", "depends_on": [99999]}]))
    assert claimed(db) == [a]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("depends_on", {"depends_on": [None]}),
        ("depends_on", {"depends_on": [1] * 10001}),
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
    with refused("jobs[1].depends_on"):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", "depends_on": wrong}]))


def test_enqueue_refuses_null_as_policy(db):
    with refused("if_parent_dead"):
        enqueue(db, if_parent_dead=None)


def test_a_job_waits_for_its_parents_and_for_its_turn(db):
    a = enqueue(db)
    first = enqueue(db, depends_on=[a], ordering_key="k")
    second = enqueue(db, ordering_key="k")
    settle(db)
    assert claimed(db) == [a]
    assert [status(db, job_id) for job_id in (first, second)] == ["blocked", "blocked"]


def test_a_job_takes_its_turn_after_its_parents(db):
    a = enqueue(db)
    first = enqueue(db, depends_on=[a], ordering_key="k")
    second = enqueue(db, ordering_key="k")
    end(db, a)

    (job,) = claim(db, max_jobs=10)
    value(db, "finish_job", **owner(job))

    assert job.job_id == first
    assert claimed(db) == [second]


@pytest.mark.parametrize("first", ["finish", "fail", "wait"])
def test_a_job_whose_many_parents_ended_unseen_is_looked_at_in_parts(db, connect, first):
    """Enqueue a child of 1200 -- the parents end, which do not see it -- commit -- tick.

    The parts are of 500, the newest first, so all depends on the last.
    """
    parents = [
        row.job_id for row in call(db, "enqueue_many", jobs=Jsonb([{"job_type": "p"}] * 1200))
    ]
    producer = connect(autocommit=False)
    child = enqueue(producer, depends_on=parents)
    (oldest,) = claim(db)
    for _ in range(2):
        call(db, "finish_jobs", **owners(*claim(db, max_jobs=1000)))
    if first != "wait":
        ended = {"error": "no", "fatal": True} if first == "fail" else {}
        call(db, f"{first}_job", **owner(oldest), **ended)

    producer.commit()
    settle(db)

    assert oldest.job_id == parents[0]
    if first == "wait":
        assert status(db, child) == "blocked"
        assert rows(db, "select parent_id from rota.dependencies") == [(parents[0],)]
        value(db, "finish_job", **owner(oldest))
        settle(db)
    assert status(db, child) == ("cancelled" if first == "fail" else "queued")
    # One that is cancelled would wait again after a retry.
    left = rows(db, "select min(parent_id) from rota.dependencies")
    assert left == [(parents[0] if first == "fail" else None,)]
    assert pending(db) == []


def test_a_parent_that_ends_in_an_older_snapshot_frees_its_children(db, connect):
    """REPEATABLE READ: the child comes in after the snapshot that the parent ends in."""
    parent = enqueue(db)
    (job,) = claim(db)
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read")
    old.execute("select 1 from rota.jobs")
    child = enqueue(db, depends_on=[parent])

    value(old, "finish_job", **owner(job))
    settle(db)
    assert claimed(db) == []
    old.commit()

    settle(db)
    assert claimed(db) == [child]
