"""Retry budgets: how many retries of a queue may begin."""

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
    poison,
    refused,
    rows,
    run,
    running,
    scalar,
    settle,
    value,
)

pytestmark = pytest.mark.slow

MINUTE = timedelta(minutes=1)


def budget(db, per_minute=6, percent=0, queue="default"):
    value(
        db,
        "set_queue",
        queue=queue,
        retry_budget=Jsonb({"per_minute": per_minute, "percent": percent}),
    )


def fail(db, number, retry_in="0", **arguments):
    """Let so many new jobs fail; return their ids."""
    queue = arguments.get("queue", "default")
    ids = [enqueue(db, **arguments) for _ in range(number)]
    for _ in ids:
        (job,) = claim(db, queues=[queue])
        one(db, "fail_job", **owner(job), error="down", error_type="E", retry_in=retry_in)
    return ids


def let_in(db, queues=("default",)):
    """Tick, and return what can be claimed then."""
    settle(db)
    return [job.job_id for job in claim(db, queues=[*queues], max_jobs=100, lease="1 day")]


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ([1], "retry_budget"),
        ({}, "retry_budget"),
        ({"percent": 5}, "retry_budget"),
        ({"per_minute": 5, "burst": 1}, "retry_budget"),
        ({"per_minute": 0}, "retry_budget.per_minute"),
        ({"per_minute": "5"}, "retry_budget.per_minute"),
        ({"per_minute": None}, "retry_budget.per_minute"),
        ({"per_minute": 1.5}, "retry_budget.per_minute"),
        ({"per_minute": 1000001}, "retry_budget.per_minute"),
        ({"per_minute": 1e300}, "retry_budget.per_minute"),
        ({"per_minute": 1, "percent": -1}, "retry_budget.percent"),
        ({"per_minute": 1, "percent": 1001}, "retry_budget.percent"),
        ({"per_minute": 1, "percent": [5]}, "retry_budget.percent"),
    ],
)
def test_set_queue_refuses_a_bad_budget(db, given, argument):
    with refused(argument):
        call(db, "set_queue", queue="q", retry_budget=Jsonb(given))


def test_retries_begin_in_the_order_of_their_times_and_within_the_budget(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=12)
    ids = fail(db, 5, job_type="b") + fail(db, 5, job_type="a", priority=-3)

    assert claim(db, max_jobs=100) == []
    assert let_in(db) == ids[:2]
    assert let_in(db) == []
    clock.advance("5 s")
    assert let_in(db) == ids[2:3]
    clock.advance("1 hour")
    assert sorted(let_in(db)) == ids[3:5]
    for begun in range(5, 10):
        clock.advance("5 s")
        assert let_in(db) == [ids[begun]]


def test_first_attempts_and_other_queues_go_on(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=6)
    fail(db, 3)
    others = fail(db, 3, queue="q")
    first = enqueue(db)

    assert let_in(db, ("q",)) == others
    assert first in let_in(db)
    assert scalar(db, "select count(*) from rota.jobs where hold = 'retries default'") == 2


def test_first_attempts_earn_a_share_of_retries(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=1, percent=50)
    for _ in range(100):
        value(db, "finish_job", **owner(running(db)))
    fail(db, 22)

    # 1 a minute, and half of 122 first attempts: ten seconds' worth of these at once.
    assert len(let_in(db)) == 10
    clock.advance("30 s")
    assert len(let_in(db)) == 10
    clock.advance("45 s")
    assert len(let_in(db)) == 1


def test_first_attempts_of_stages_earn_retries_too(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=1, percent=50)
    value(db, "define_pipeline", pipeline="p", stages=Jsonb([{"stage": s} for s in "ab"]))
    for _ in range(50):
        value(db, "start_pipeline", pipeline="p")
    for _ in range(2):
        call(db, "finish_jobs", **owners(*claim(db, max_jobs=100)))
    fail(db, 22)

    # 1 a minute, and half of 122: those of both stages, each once, and those that failed.
    assert len(let_in(db)) == 10


def test_first_attempts_earn_as_many_retries_where_they_are_not_kept(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=1, percent=100)
    value(db, "set_queue", queue="default", keep_finished="0")
    for _ in range(19):
        settle(db)
        for _ in range(5):
            value(db, "finish_job", **owner(running(db)))
        clock.advance("5 s")
    assert scalar(db, "select count(*) from rota.finished_jobs") < 30
    fail(db, 22)

    # 1 a minute, and all of 60 and 22 first attempts: ten seconds' worth of these at once.
    assert len(let_in(db)) in range(11, 17)


@pytest.mark.parametrize("how", ["finish_job", "fail_job"])
def test_attempts_of_a_time_that_is_still_to_come_again_earn_no_retries(db, clock, how):
    clock.set("2026-02-01 00:00+00")
    budget(db, per_minute=6, percent=100)
    for _ in range(40):
        given = {"error": "e", "fatal": True} if how == "fail_job" else {}
        call(db, how, **owner(running(db)), **given)
    clock.set("2026-01-01 00:00+00")
    fail(db, 4)

    assert len(let_in(db)) == 1
    clock.advance("10 s")
    assert len(let_in(db)) == 1


def test_a_retry_that_is_not_due_costs_and_gets_nothing(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=6)
    late, soon = fail(db, 1, "10 minutes") + fail(db, 1, "1 minute")
    before = rows(db, "select xmin, tokens from rota.retry_budgets")

    assert let_in(db) == []
    assert rows(db, "select xmin, tokens from rota.retry_budgets") == before
    told = one(db, "wait_for_jobs", queues=["default"])
    assert told.look_again_in <= MINUTE
    clock.set(now + MINUTE)
    assert let_in(db) == [soon]
    clock.set(now + 10 * MINUTE)
    assert let_in(db) == [late]


def test_a_budget_that_is_taken_away_lets_all_in(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=1)
    ids = fail(db, 5)
    assert len(let_in(db)) == 1

    value(db, "set_queue", queue="default", reset=True)
    assert let_in(db) == ids[1:]
    fail(db, 1)
    assert len(claim(db)) == 1


def test_a_failure_that_did_not_see_the_end_of_the_budget_is_let_in(db, clock, connect):
    clock.set("2026-01-01 00:00+00")
    budget(db)
    job = running(db)
    other = connect(autocommit=False)
    one(other, "fail_job", **owner(job), error="e", retry_in="0")
    value(db, "set_queue", queue="default", reset=True)
    settle(db)
    other.commit()

    assert let_in(db) == [job.job_id]
    assert {row.violations for row in call(db, "verify")} == {0}


@pytest.mark.own_session
def test_a_retry_that_another_session_has_locked_keeps_no_others(db, clock, connect):
    clock.set("2026-03-01 12:00+00")
    budget(db)
    first, second = fail(db, 2)
    with connect(autocommit=False) as other:
        other.execute("select from rota.jobs where id = %s for update", [first])

        assert let_in(db) == [second]

    clock.advance(MINUTE)
    assert let_in(db) == [first]


def test_of_very_many_types_the_one_with_the_oldest_retry_begins(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db)
    oldest = fail(db, 1, job_type="z")
    clock.advance("1 s")
    for number in range(100):
        fail(db, 1, job_type=f"a{number}")

    assert let_in(db) == oldest


def test_two_ticks_at_once_let_in_as_many_as_one(db, clock, connect):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=18)
    ids = fail(db, 9)
    other = connect(autocommit=False)
    call(other, "tick")

    settle(db)
    assert claim(db, max_jobs=100) == []
    other.commit()
    assert let_in(db) == ids[:3]


def test_a_tick_that_stays_open_keeps_no_retries_of_others(db, clock, connect):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    budget(db, per_minute=60)
    first, *others = fail(db, 12)
    with connect(autocommit=False) as other:
        call(other, "tick")

        assert let_in(db) == [first, *others[:9]]
        clock.advance("2 s")
        assert let_in(db) == others[9:]


def test_retries_begin_also_where_no_tick_is_alone_for_a_while(db, clock, connect):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    budget(db, per_minute=60)
    ids = fail(db, 2)
    other = connect(autocommit=False)
    call(other, "tick")
    other.commit()
    assert claim(db) == []
    clock.advance("4 s")
    call(other, "tick")
    other.commit()

    assert [job.job_id for job in claim(db, max_jobs=9)] == ids


@pytest.mark.parametrize("by", ["raise exception 'poison'", "return null"])
def test_a_retry_that_cannot_be_let_in_keeps_no_others(db, clock, by):
    clock.set("2026-01-01 00:00+00")
    budget(db, queue="a", per_minute=6)
    budget(db, queue="b")
    first, second = fail(db, 2, queue="a")
    (third,) = fail(db, 1, queue="b")
    poison(db, first, by)

    assert let_in(db, ("a", "b")) == [second, third]


def test_an_operator_and_a_cancel_go_past_the_budget(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=1)
    _, second, third, fourth = fail(db, 4)
    assert len(let_in(db)) == 1

    value(db, "retry_job", job_id=second)
    value(db, "cancel_job", job_id=third)
    one(db, "act_on_jobs", act="move", filter={"ids": [fourth]}, arguments={"queue": "q"})
    assert let_in(db) == [second]
    assert run(db, third).status == "cancelled"
    assert let_in(db, ("q",)) == [fourth]


def test_a_retry_keeps_its_limits_turns_and_order(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_limit", limit_key="k", max_running=1)
    budget(db, per_minute=600)
    head = enqueue(db, ordering_key="o")
    tail = enqueue(db, ordering_key="o")
    (job,) = claim(db)
    one(db, "fail_job", **owner(job), error="e", retry_in="0")
    limited = [enqueue(db, limit_key="k") for _ in range(3)]
    (job,) = claim(db)
    one(db, "fail_job", **owner(job), error="e", retry_in="0")

    begun = let_in(db)
    assert head in begun
    assert tail not in begun
    assert len({*begun} & {*limited}) == 1
    assert {row.violations for row in call(db, "verify")} == {0}


def test_while_the_queue_is_paused_no_token_is_spent(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=6)
    (job_id,) = fail(db, 1)
    value(db, "pause_queue", queue="default")
    settle(db)
    assert scalar(db, "select tokens from rota.retry_budgets") == 1000000

    value(db, "resume_queue", queue="default")
    assert let_in(db) == [job_id]


def test_while_the_queue_is_paused_retries_ask_for_no_tick(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db)
    fail(db, 1)
    value(db, "pause_queue", queue="default")
    settle(db)

    assert not scalar(db, "select rota._has_maintenance()")


@pytest.mark.parametrize("queue", [None, "default"])
def test_while_their_type_is_paused_retries_spend_nothing(db, clock, queue):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=12)
    first, second, *_ = fail(db, 9, job_type="t")
    others = fail(db, 2)
    value(db, "pause_type", job_type="t", queue=queue, until=clock.now() + MINUTE)

    assert let_in(db) == others
    clock.advance("59 s")
    assert let_in(db) == []
    clock.advance("1 s")
    assert let_in(db) == [first, second]
    assert let_in(db) == []


def test_explain_counts_no_retries_of_a_paused_type(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=1)
    fail(db, 9, job_type="t")
    (job_id,) = fail(db, 1)
    assert call(db, "explain_job", job_id=job_id)[0].reason == "retry_budget"

    value(db, "pause_type", job_type="t")

    assert call(db, "explain_job", job_id=job_id)[0].reason == "needs_tick"
    assert let_in(db) == [job_id]


def test_a_breaker_tries_a_retry_where_all_wait_for_the_budget(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=6)
    value(db, "set_breaker", job_type="t", max_failures=1, pause_for="30 s")
    first, *_ = fail(db, 3, job_type="t")
    assert let_in(db) == []

    clock.advance("31 s")
    settle(db)
    (probe,) = claim(db, max_jobs=9)
    assert probe.job_id == first
    clock.advance("1 s")
    value(db, "finish_job", **owner(probe))
    settle(db)
    settle(db)

    assert scalar(db, "select count(*) from rota.pauses") == 0
    assert len(let_in(db)) == 1


def test_a_rerun_waits_for_the_budget_like_the_retry_that_it_becomes(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=6)
    asked = {"idempotency_key": "a", "on_conflict": "rerun"}
    first, second = fail(db, 1)[0], fail(db, 1, **asked)[0]

    assert enqueue(db, payload=Jsonb({"n": 2}), **asked) == second

    assert let_in(db) == [first]
    assert let_in(db) == []
    clock.advance("10 s")
    assert let_in(db) == [second]
    assert run(db, second).payload == {"n": 2}


def test_a_thousand_kinds_do_not_keep_the_first_ones(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=600)
    ids = [fail(db, 1, job_type=f"t{n:03}")[0] for n in range(120)]

    begun = let_in(db)
    assert len(begun) == 100
    assert begun == ids[:100]
    clock.advance("1 minute")
    assert let_in(db) == ids[100:]


def test_kinds_whose_retries_are_for_later_do_not_keep_one_that_is_due(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=600)
    for number in range(110):
        fail(db, 1, "1 hour", job_type=f"t{number:03}")
    (due,) = fail(db, 1, job_type="z")

    assert let_in(db) == [due]


@pytest.mark.parametrize("priority", [100, -100])
def test_a_queue_that_comes_to_age_leaves_its_held_retries_where_they_are(db, clock, priority):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=6)
    first, second = fail(db, 2, "1 minute", priority=priority)
    value(db, "set_queue", queue="default", ageing="1 hour")
    for _ in range(5):
        settle(db)
        clock.advance("5 s")

    assert let_in(db) == []
    clock.advance("1 minute")
    assert let_in(db) == [first]
    assert let_in(db) == []
    clock.advance("10 s")
    assert let_in(db) == [second]


def test_a_tick_looks_at_no_budget_whose_queue_has_no_retries(db):
    for number in range(50):
        budget(db, queue=f"q{number}")
    fail(db, 1, "1 hour", queue="q7")
    scans = "select pg_stat_get_xact_numscans('rota.jobs_hold_idx'::regclass)"

    with db.transaction():
        before = scalar(db, scans)
        db.execute("select rota._has_maintenance(), rota._spend_budgets()")
        made = scalar(db, scans) - before

    assert 0 < made < 20


def test_a_pause_is_told_before_the_budget_that_no_tick_spends_meanwhile(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=6)
    (job_id,) = fail(db, 1)
    value(db, "pause_queue", queue="default")
    clock.advance("10 s")
    assert let_in(db) == []

    told = [row.reason for row in call(db, "explain_job", job_id=job_id)]

    assert told[:2] == ["queue_paused", "needs_tick"]
    value(db, "set_queue", queue="default", reset=True)
    db.execute("update rota.jobs set expires_at = rota.now()")
    told = [row.reason for row in call(db, "explain_job", job_id=job_id)]
    assert told[:2] == ["expired", "queue_paused"]
    assert "needs_tick" not in told


def test_explain_doctor_and_the_log_tell_of_a_budget(db, clock):
    clock.set("2026-01-01 00:00+00")
    budget(db, per_minute=6, percent=10)
    first, _, last = fail(db, 3)
    assert call(db, "explain_job", job_id=first)[0].reason == "needs_tick"
    assert let_in(db) == [first]
    clock.advance("20 s")
    db.execute("update rota.retry_budgets set filled_at = rota.now()")

    told = call(db, "explain_job", job_id=last)[0]
    assert told.reason == "retry_budget"
    assert "has been due for 20 s" in told.explanation
    assert (
        "it allows 6.3 retries per minute (6, and 10 % of first attempts)" in told.explanation
    )
    (found,) = [row for row in call(db, "doctor") if row.finding == "queues"]
    assert found.severity == "warning"
    assert "retries of queue default wait for its retry budget" in found.evidence
    db.execute(found.remedy)
    logged = rows(db, "select act, after from rota.audit_log order by id")
    assert [(row.act, row.after["retry_budget"]) for row in logged] == [
        ("set_queue", {"per_minute": 6, "percent": 10}),
        ("set_queue", {"per_minute": 12, "percent": 20}),
    ]
    db.execute(told.remedy)
    assert [job.job_id for job in claim(db)] == [last]
