"""The one accepted end of a job, and everybody who comes too late."""

from __future__ import annotations

import psycopg
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
    value,
)

# What a worker may say of a job, and how each says that it came too late.
WORKER_CALLS = {
    "finish_job": lambda db, job: value(db, "finish_job", **owner(job), result=Jsonb("zombie")),
    "finish_jobs": lambda db, job: one(db, "finish_jobs", **owners(job)).outcome,
    "fail_job": lambda db, job: one(db, "fail_job", **owner(job), error="zombie").status,
    "fatal": lambda db, job: (
        one(db, "fail_job", **owner(job), error="zombie", fatal=True).status
    ),
    "snooze_job": lambda db, job: value(db, "snooze_job", **owner(job), delay="1 s"),
    "release_jobs": lambda db, job: one(db, "release_jobs", **owners(job)).is_released,
    "heartbeat": lambda db, job: one(db, "heartbeat", **owner(job), lease="1 day"),
    "heartbeat_jobs": lambda db, job: (
        one(db, "heartbeat_jobs", **owners(job), lease="1 day").is_lost
    ),
    "set_progress": lambda db, job: value(
        db, "set_progress", **owner(job), percent=50, message="zombie"
    ),
}
SET_BASED = {"finish_jobs": "lost", "release_jobs": False, "heartbeat_jobs": True}


def told(db, name, job):
    """Return what a worker's call answers, or its SQLSTATE."""
    try:
        return WORKER_CALLS[name](db, job)
    except psycopg.Error as error:
        return error.sqlstate


def succeed(db, job):
    value(db, "finish_job", **owner(job), result=Jsonb({"n": 1}))


def die(db, job):
    one(db, "fail_job", **owner(job), error="e", fatal=True)


def be_cancelled(db, job):
    value(db, "cancel_job", job_id=job.job_id)
    one(db, "fail_job", **owner(job), error="e")


ENDS = {"succeeded": succeed, "dead": die, "cancelled": be_cancelled}


def test_finish_job_moves_the_job_to_the_history(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, job_type="mail", payload={"a": 1}, priority=2, idempotency_key="k")
    clock.advance("5 s")
    value(db, "set_progress", **owner(job), percent=40, message="half")
    later = clock.advance("5 s")

    assert value(db, "finish_job", **owner(job), result=Jsonb({"n": 1})) == "finished"

    row = run(db, job.job_id)
    assert scalar(db, "select count(*) from rota.jobs") == 0
    assert (row.status, row.result, row.finished_at) == ("succeeded", {"n": 1}, later)
    assert (row.job_type, row.payload, row.priority) == ("mail", {"a": 1}, 2)
    assert (row.created_at, row.started_at, row.updated_at) == (now, now, later)
    assert (row.locked_by, row.lease_token, row.attempts) == ("w", job.lease_token, 1)
    assert (row.progress_percent, row.progress_message) == (40, "half")
    assert (row.idempotency_key, row.locked_until) == ("k", None)


def test_finish_job_again_with_the_same_token_is_already_finished(db):
    job = running(db)
    value(db, "finish_job", **owner(job), result=Jsonb(1))
    before = everything(db)

    assert value(db, "finish_job", **owner(job), result=Jsonb(2)) == "already_finished"
    assert one(db, "finish_jobs", **owners(job)).outcome == "already_finished"
    assert everything(db) == before


@pytest.mark.parametrize(
    "result",
    [
        *(None, {}, [], "", "\x01", 1.5, True, {"a": [None]}),
        pytest.param("é\u2028🦀", marks=pytest.mark.of_utf8),
    ],
)
def test_finish_job_keeps_any_result(db, result):
    first, second = running(db), running(db)

    value(db, "finish_job", **owner(first), result=Jsonb(result))
    call(db, "finish_jobs", **owners(second), results=Jsonb([result]))

    assert run(db, first.job_id).result == result
    assert run(db, second.job_id).result == result


def test_finish_job_refuses_bad_arguments(db):
    job = running(db)

    for argument in ("job_id", "lease_token"):
        with refused(argument):
            value(db, "finish_job", **{**owner(job), argument: None})
    with refused("result"):
        value(db, "finish_job", **owner(job), result=Jsonb("a" * 1048576))
    with raises("RT001"):
        value(db, "finish_job", job_id=10**15, lease_token=1)
    with raises("RT002"):
        value(db, "finish_job", job_id=job.job_id, lease_token=0)

    assert value(db, "finish_job", **owner(job), result=Jsonb("a" * 1_000_000)) == "finished"


def test_finish_job_never_ends_a_job_that_is_not_running(db):
    job_id = enqueue(db)

    with raises("RT002"):
        value(db, "finish_job", job_id=job_id, lease_token=0)

    assert run(db, job_id).status == "queued"


@pytest.mark.parametrize("status", ENDS)
def test_finish_job_and_all_others_leave_an_ended_job_as_it_is(db, clock, status):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    ENDS[status](db, job)
    before = everything(db)
    clock.advance("1 hour")

    answers = {name: told(db, name, job) for name in WORKER_CALLS}

    ended = "already_finished" if status == "succeeded" else None
    # A failure reported after a cancel is one that the cancel has dealt with.
    told_before = dict.fromkeys(["fail_job", "fatal"], "cancelled")
    assert answers == {
        **dict.fromkeys(WORKER_CALLS, "RT003"),
        **(told_before if status == "cancelled" else {}),
        **SET_BASED,
        "finish_job": ended or "RT003",
        "finish_jobs": ended or "lost",
    }
    for sqlstate, function, arguments in [
        ("RT003", "set_priority", {"priority": 5}),
        ("RT003", "reschedule_job", {"delay": "1 s"}),
    ]:
        with raises(sqlstate):
            value(db, function, job_id=job.job_id, **arguments)
    if status == "cancelled":
        assert value(db, "cancel_job", job_id=job.job_id) == "cancelled"
    else:
        with raises("RT003"):
            value(db, "cancel_job", job_id=job.job_id)
    call(db, "tick")
    assert value(db, "sweep_stale_leases") == 0
    assert claim(db) == []
    assert everything(db) == before


def lose_to_sweep(db, clock, job):
    clock.advance("2 minutes")
    assert value(db, "sweep_stale_leases") == 1


def lose_to_another(db, clock, job):
    lose_to_sweep(db, clock, job)
    clock.advance("1 hour")
    assert len(claim(db)) == 1  # under the same worker's name


def lose_to_another_that_shall_stop(db, clock, job):
    lose_to_another(db, clock, job)
    value(db, "cancel_job", job_id=job.job_id)


def lose_by_force_and_cancel(db, clock, job):
    value(db, "retry_job", job_id=job.job_id, force=True)
    assert value(db, "cancel_job", job_id=job.job_id) == "cancelled"


def lose_to_another_after_release(db, clock, job):
    call(db, "release_jobs", **owners(job))
    assert len(claim(db)) == 1  # at the same moment of a stopped clock


def lose_by_another_that_finished(db, clock, job):
    lose_to_sweep(db, clock, job)
    clock.advance("1 hour")
    succeed(db, claim(db)[0])


def lose_by_retry(db, clock, job):
    succeed(db, job)
    value(db, "retry_job", job_id=job.job_id)


def lose_by_retry_and_claim(db, clock, job):
    lose_by_retry(db, clock, job)
    assert len(claim(db)) == 1


LOSSES = {
    "sweep": lose_to_sweep,
    "another": lose_to_another,
    "another_that_shall_stop": lose_to_another_that_shall_stop,
    "release": lambda db, clock, job: call(db, "release_jobs", **owners(job)),
    "release_and_another": lose_to_another_after_release,
    "snooze": lambda db, clock, job: value(db, "snooze_job", **owner(job), delay="1 s"),
    "fail": lambda db, clock, job: one(db, "fail_job", **owner(job), error="e"),
    "force": lambda db, clock, job: value(db, "retry_job", job_id=job.job_id, force=True),
    "force_and_cancel": lose_by_force_and_cancel,
    "another_finished": lose_by_another_that_finished,
    "retry": lose_by_retry,
    "retry_and_claim": lose_by_retry_and_claim,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_finish_job_and_all_others_refuse_a_worker_that_lost_its_lease(db, clock, loss):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    LOSSES[loss](db, clock, job)
    before = everything(db)

    answers = {name: told(db, name, job) for name in WORKER_CALLS}

    assert answers == {**dict.fromkeys(WORKER_CALLS, "RT002"), **SET_BASED}
    assert everything(db) == before


def test_finish_job_of_a_lost_lease_rolls_the_business_back(db, connect, clock):
    clock.set("2026-01-01 00:00+00")
    db.execute("create table public.invoices (id bigint)")
    job = running(db)
    lose_to_another(db, clock, job)

    with raises("RT002"), connect(autocommit=False) as late:
        late.execute("insert into public.invoices values (1)")
        value(late, "finish_job", **owner(job))

    assert scalar(db, "select count(*) from public.invoices") == 0


def test_finish_job_and_the_business_commit_together(db, connect):
    db.execute("create table public.invoices (id bigint)")
    job = running(db)

    with connect(autocommit=False) as mine:
        mine.execute("insert into public.invoices values (1)")
        value(mine, "finish_job", **owner(job))
        assert run(db, job.job_id).status == "running"

    assert run(db, job.job_id).status == "succeeded"
    assert scalar(db, "select count(*) from public.invoices") == 1


def test_finish_jobs_answers_each_in_the_order_given(db, clock):
    clock.set("2026-01-01 00:00+00")
    done, mine, lost, other = (running(db) for _ in range(4))
    value(db, "finish_job", **owner(done))
    call(db, "release_jobs", **owners(lost))

    answers = call(
        db,
        "finish_jobs",
        job_ids=[other.job_id, lost.job_id, 10**15, done.job_id, mine.job_id],
        lease_tokens=[
            other.lease_token,
            lost.lease_token,
            1,
            done.lease_token,
            mine.lease_token,
        ],
        results=Jsonb(["other", "lost", 1, "done", None]),
    )

    assert answers == [
        (other.job_id, "finished"),
        (lost.job_id, "lost"),
        (10**15, "lost"),
        (done.job_id, "already_finished"),
        (mine.job_id, "finished"),
    ]
    assert run(db, other.job_id).result == "other"
    assert run(db, mine.job_id).result is None
    assert run(db, lost.job_id).status == "queued"


def test_finish_jobs_of_one_job_twice_accepts_only_the_pair_that_holds_it(db):
    for is_old_first in (True, False):
        old = running(db)
        call(db, "release_jobs", **owners(old))
        (new,) = claim(db)
        pairs = [(old, "lost"), (new, "finished")]
        pairs = pairs if is_old_first else pairs[::-1]

        answers = call(
            db,
            "finish_jobs",
            **owners(*(job for job, _ in pairs)),
            results=Jsonb([outcome for _, outcome in pairs]),
        )

        assert [row.outcome for row in answers] == [outcome for _, outcome in pairs]
        assert run(db, new.job_id).result == "finished"


@pytest.mark.parametrize("is_real_first", [True, False])
def test_finish_jobs_tells_no_token_of_a_claim_that_was_rolled_back_that_it_finished(
    db, is_real_first
):
    """Its worker was granted the job again meanwhile, and reports both in one batch."""
    job = running(db)
    tokens = [(job.lease_token, "finished"), (job.lease_token + 1, "lost")]
    tokens = tokens if is_real_first else tokens[::-1]

    told = call(
        db,
        "finish_jobs",
        job_ids=[job.job_id] * 2,
        lease_tokens=[token for token, _ in tokens],
    )

    assert [row.outcome for row in told] == [outcome for _, outcome in tokens]


def test_finish_jobs_ends_jobs_in_the_order_of_their_ids_whatever_was_given(db):
    """So two batches that share jobs lock them in the same order."""
    jobs = [running(db) for _ in range(5)]
    given = [jobs[n] for n in (3, 1, 4, 0, 2)]
    for job in given:  # that is their order in the table, too
        db.execute("update rota.jobs set updated_at = rota.now() where id = %s", (job.job_id,))

    call(db, "finish_jobs", **owners(*given))

    ended = rows(db, "select id from rota.finished_jobs order by ctid")
    assert [row.id for row in ended] == [job.job_id for job in jobs]


def test_finish_jobs_takes_a_thousand_and_no_more(db):
    call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x"}] * 1000))
    jobs = claim(db, max_jobs=1000)

    with refused("job_ids"):
        call(db, "finish_jobs", **owners(*jobs, jobs[0]))
    answers = call(db, "finish_jobs", **owners(*reversed(jobs)))

    assert [row.job_id for row in answers] == [job.job_id for job in reversed(jobs)]
    assert {row.outcome for row in answers} == {"finished"}
    assert call(db, "finish_jobs", job_ids=[], lease_tokens=[]) == []


BAD_REFS = [
    ("job_ids", {"job_ids": None, "lease_tokens": [1]}),
    ("job_ids", {"job_ids": [None], "lease_tokens": [1]}),
    ("lease_tokens", {"job_ids": [1], "lease_tokens": None}),
    ("lease_tokens", {"job_ids": [1], "lease_tokens": [None]}),
    ("lease_tokens", {"job_ids": [1, 2], "lease_tokens": [1]}),
    ("lease_tokens", {"job_ids": [1], "lease_tokens": []}),
    ("job_ids", {"job_ids": [1] * 1001, "lease_tokens": [1] * 1001}),
    ("job_ids", {"job_ids": [[1, 2]], "lease_tokens": [[1, 2]]}),
    ("job_ids", {"job_ids": "[0:0]={1}", "lease_tokens": [1]}),
    ("job_ids", {"job_ids": [1], "lease_tokens": "[2:2]={1}"}),
    ("job_ids", {"job_ids": "[0:0]={1}", "lease_tokens": "[0:0]={1}"}),
]


@pytest.mark.parametrize("function", ["finish_jobs", "release_jobs", "heartbeat_jobs"])
def test_finish_jobs_and_its_like_refuse_lists_that_do_not_fit(db, function):
    for name, arguments in BAD_REFS:
        with refused(name):
            call(db, function, **arguments)


@pytest.mark.parametrize("results", [{}, 5, "x", [], [1, 2]], ids=repr)
def test_finish_jobs_refuses_results_that_do_not_fit(db, results):
    job = running(db)

    with refused("results"):
        call(db, "finish_jobs", **owners(job), results=Jsonb(results))

    assert run(db, job.job_id).status == "running"


def test_finish_jobs_names_the_result_that_is_too_large(db):
    first, second = running(db), running(db)

    with refused("results[2]"):
        call(db, "finish_jobs", **owners(first, second), results=Jsonb([1, "a" * 1048576]))

    assert rows(db, "select distinct status from rota.job_runs") == [("running",)]


def test_finish_jobs_goes_past_a_row_that_is_locked_and_says_so(db, connect):
    jobs = [running(db), running(db)]
    other = connect()

    with other.transaction():
        other.execute("select from rota.jobs where id = %s for update", [jobs[0].job_id])
        told = [row.outcome for row in call(db, "finish_jobs", **owners(*jobs))]
    again = [row.outcome for row in call(db, "finish_jobs", **owners(*jobs))]

    assert (told, again) == (["busy", "finished"], ["finished", "already_finished"])


@pytest.mark.long
def test_finish_jobs_takes_more_ordered_jobs_than_one_jsonb_could_hold(db):
    db.execute(
        """
        select rota.enqueue(
            'x', jsonb_build_object('x', repeat('x', 1000000)), ordering_key => 'k' || n)
        from generate_series(1, 280) as n
        """
    )
    db.execute("select rota.tick()")
    db.execute(
        """
        create temp table held as
        select c.job_id, c.lease_token from rota.claim_jobs('w', max_jobs => 280) as c
        """
    )

    ended = db.execute(
        """
        select count(*)
        from rota.finish_jobs(
            (select array_agg(job_id) from held), (select array_agg(lease_token) from held))
        where outcome = 'finished'
        """
    ).fetchone()

    assert ended == (280,)
