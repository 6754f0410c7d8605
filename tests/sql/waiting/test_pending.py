"""Checks that are left for maintenance."""

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
    rows,
    run,
    scalar,
    settle,
    value,
)
from support.clock import now_is

pytestmark = pytest.mark.slow


def leave(db, kind, subject, due_at="-infinity"):
    db.execute(
        "insert into rota.pending_checks (kind, subject, due_at) values (%s, %s, %s)",
        [kind, subject, due_at],
    )


def test_a_check_that_is_left_while_a_tick_looks_waits_for_its_time(db):
    """It was written after the tick had read the clock, and committed before it looked."""
    db.execute("create sequence public.calls; grant usage on sequence public.calls to public")
    leave(db, "order", "later", "2026-03-01 13:00+00")
    db.execute("update rota.pending_checks set updated_at = '2026-03-01 12:00:01+00'")
    db.execute(
        now_is(
            "'2026-03-01 12:00+00'::timestamptz"
            " + 2 * (nextval('public.calls') - 1) * interval '1 s'"
        )
    )

    assert scalar(db, "select rota._due_checks(10)") == []


def test_a_tick_does_what_is_due(db, clock):
    clock.set("2026-03-01 12:00+00")
    leave(db, "order", "now")
    leave(db, "order", "later", "2026-03-01 12:01+00")

    assert one(db, "tick").checks_done == 1
    assert pending(db) == [("order", "later")]
    clock.advance("1 minute")
    assert one(db, "tick").checks_done == 1
    assert pending(db) == []


def test_a_check_that_has_failed_as_often_as_can_be_counted_stops_no_other(db):
    leave(db, "job", "no number")
    db.execute("update rota.pending_checks set deferrals = 2147483647")
    leave(db, "order", "now")

    call(db, "tick")

    assert pending(db) == [("job", "no number")]


def test_claims_never_look_at_checks(db):
    enqueue(db, ordering_key="k")
    enqueue(db, ordering_key="k")

    claim(db, max_jobs=10)

    assert pending(db) == [("order", "k")]


def test_a_job_that_cannot_be_let_in_at_its_time_keeps_no_other_and_no_check(db, clock):
    clock.set("2026-03-01 12:00+00")
    bad, good = (enqueue(db, limit_key="k", delay="1 hour") for _ in range(2))
    poison(db, bad)
    leave(db, "order", "k")
    clock.advance("1 hour")

    for _ in range(3):
        one(db, "tick")

    assert ("order", "k") not in pending(db)
    assert [job.job_id for job in claim(db, max_jobs=10)] == [good]


def test_a_job_that_a_trigger_keeps_as_it_is_at_its_time_is_no_reason_to_tick_again(db, clock):
    clock.set("2026-03-01 12:00+00")
    job_id = enqueue(db, limit_key="k", delay="1 hour")
    settle(db)
    poison(db, job_id, by="return null")
    clock.advance("1 hour")

    tick = one(db, "tick")

    assert (tick.checks_done, tick.has_more) == (0, False)


def test_one_bad_check_keeps_no_other_waiting(db, clock):
    clock.set("2026-03-01 12:00+00")
    leave(db, "job", "poison")
    leave(db, "order", "k")
    notices = []
    db.add_notice_handler(lambda notice: notices.append(notice.message_primary))

    settle(db)

    assert pending(db) == [("job", "poison")]
    assert any("check of job poison failed" in notice for notice in notices)
    assert one(db, "tick").checks_done == 0
    clock.advance("10 seconds")
    assert one(db, "tick").checks_done == 1


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_tick_begins_with_no_further_check_of_a_kind_after_a_while(db, is_bad):
    """Each check may let a thousand jobs in, which is not to be one transaction of minutes."""
    parents = [enqueue(db) for _ in range(6)]
    for parent in parents:
        enqueue(db, depends_on=[parent], if_parent_dead="run", queue="behind")
    settle(db)
    for job in claim(db, max_jobs=6):
        one(db, "fail_job", **owner(job), error="e", fatal=True)
    if is_bad:
        db.execute("insert into rota.pending_checks (kind, subject) values ('job', 'none')")
    db.execute("""
        create function public.slow() returns trigger language plpgsql as $$
        begin perform pg_sleep(0.4); return new; end $$;
        create trigger slow before update on rota.jobs
            for each row execute function public.slow();
    """)

    db.execute("insert into rota.pending_checks (kind, subject) values ('schedule', 'gone')")

    report = one(db, "tick")
    assert report.has_more
    assert 0 < report.checks_done < 6
    let_in = len(claim(db, queues=["behind"], max_jobs=9))
    assert 0 < let_in < 6
    if not is_bad:
        assert ("schedule", "gone") not in pending(db)
    settle(db)
    db.execute("drop trigger slow on rota.jobs")
    assert len(claim(db, queues=["behind"], max_jobs=9)) == 6 - let_in


def test_very_many_checks_of_one_kind_keep_no_other_waiting(db, clock):
    clock.set("2026-03-01 12:00+00")
    db.execute(
        "insert into rota.pending_checks (kind, subject)"
        " select 'order', 'k' || n from generate_series(1, 5000) as n"
    )
    leave(db, "schedule", "gone")
    leave(db, "pause", "type gone", "2026-03-01 11:59+00")

    one(db, "tick")

    assert {kind for kind, _ in pending(db)} == {"order"}


def test_a_check_that_leaves_another_of_itself_comes_after_those_that_were_left(db):
    """As a pause that is over does as long as there is more to let in."""
    jobs = [{"job_type": "a"}] * 1001 + [{"job_type": "b", "queue": "behind"}]
    call(db, "enqueue_many", jobs=Jsonb(jobs))
    db.execute("update rota.jobs set hold = 'pause type ' || job_type")
    leave(db, "pause", "type a")
    leave(db, "pause", "type b")
    db.execute("""
        create function public.slow() returns trigger language plpgsql as
            'begin perform pg_sleep(0.35); return null; end';
        create trigger slow after update on rota.jobs execute function public.slow();
    """)

    assert one(db, "tick").checks_done == 1
    one(db, "tick")

    assert len(claim(db, queues=["behind"])) == 1


def test_a_transaction_leaves_its_own_checks_to_others(db):
    settle(db)
    with db.transaction():
        leave(db, "order", "k")
        ticks = [one(db, "tick") for _ in range(2)]

    assert [tick.checks_done for tick in ticks] == [0, 0]
    assert ticks[-1].has_more is False
    assert pending(db) == [("order", "k")]
    settle(db)
    assert pending(db) == []


@pytest.mark.own_session
@pytest.mark.parametrize("checks", [1000, 999])
def test_checks_that_a_forgotten_tick_holds_keep_no_others(db, connect, checks):
    db.execute(
        "insert into rota.pending_checks (kind, subject)"
        " select 'job', 1000000 + n || ' all' from generate_series(1, %s) as n",
        [checks],
    )
    stranger = connect(autocommit=False)
    assert 0 < one(stranger, "tick").checks_done <= checks  # within its time
    children = [enqueue(db, depends_on=[enqueue(db)]) for _ in range(5)]
    assert len(children) == 5

    assert one(db, "tick").checks_done == 5
    # What it cannot do now is not to be asked for again at once.
    tick = one(db, "tick")
    assert (tick.checks_done, tick.has_more) == (0, False)


def test_checks_of_one_subject_are_one_look(db):
    first = enqueue(db, ordering_key="k")
    for _ in range(30):
        enqueue(db, ordering_key="k")
    assert pending(db) == [("order", "k")] * 30

    assert one(db, "tick").checks_done == 30
    assert run(db, first).status == "queued"


def test_a_check_that_cannot_be_decided_is_deferred_ever_longer(db, connect, clock):
    clock.set("2026-03-01 12:00+00")
    parent = enqueue(db)
    (job,) = claim(db)
    other = connect(autocommit=False)
    value(other, "finish_job", **owner(job))
    child = enqueue(db, depends_on=[parent])

    waited = []
    for _ in range(9):
        one(db, "tick")
        ((due_in,),) = rows(
            db, "select due_at - rota.now() from rota.pending_checks where kind = 'job'"
        )
        waited.append(due_in.total_seconds())
        clock.advance(due_in)
    assert waited == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 6.4]

    other.commit()
    settle(db)
    assert run(db, child).status == "queued"


def test_checks_stay_few_that_wait_for_a_forgotten_enqueue(db, connect, clock):
    clock.set("2026-03-01 12:00+00")
    stranger = connect(autocommit=False)
    first = enqueue(stranger, ordering_key="k")
    for _ in range(10):
        enqueue(db, ordering_key="k")
        one(db, "tick")
        clock.advance("100 milliseconds")
    assert pending(db) == [("order", "k")]

    stranger.commit()
    clock.advance("10 seconds")
    settle(db)
    assert pending(db) == []
    assert [job.job_id for job in claim(db, max_jobs=10)] == [first]


def _of_limits(db):
    """What is left to check, without the first fair queue, which waits for strangers too."""
    return [check for check in pending(db) if check[0] != "queue"]


def test_checks_of_a_full_limit_stay_few_while_a_stranger_is_in_a_transaction(
    db, connect, clock
):
    clock.set("2026-03-01 12:00+00")
    call(db, "set_limit", limit_key="k", max_running=1)
    settle(db)
    stranger = connect(autocommit=False)
    stranger.execute("select pg_current_xact_id()")
    enqueue(db, limit_key="k", lease="1 day")
    (running,) = claim(db)
    for _ in range(10):
        enqueue(db, limit_key="k")
        assert claim(db) == []
        clock.advance("3 seconds")
        one(db, "tick")
    settle(db)
    assert sorted(_of_limits(db)) == [("limit", "key k"), ("slots", "key k")]

    stranger.rollback()
    for _ in range(4):
        clock.advance("10 seconds")
        settle(db)
    assert pending(db) == []
    call(db, "finish_job", **owner(running))
    assert len(claim(db)) == 1


def test_a_slot_that_comes_back_unseen_after_the_check_of_an_earlier_job_is_given_on(
    db, connect, clock
):
    clock.set("2026-03-01 12:00+00")
    call(db, "set_limit", limit_key="k", max_running=1)
    settle(db)
    ending = connect(autocommit=False)
    enqueue(db, limit_key="k", lease="1 day")
    (running,) = claim(db)
    earlier = enqueue(db, limit_key="k")
    assert claim(db) == []
    for _ in range(2):
        clock.advance("3 seconds")
        one(db, "tick")
    assert _of_limits(db) == [("slots", "key k")]
    call(db, "cancel_job", job_id=earlier)
    call(ending, "finish_job", **owner(running))
    held = enqueue(db, limit_key="k")
    assert claim(db) == []
    for _ in range(2):
        clock.advance("3 seconds")
        one(db, "tick")
    ending.commit()
    clock.advance("10 seconds")
    one(db, "tick")

    assert [job.job_id for job in claim(db)] == [held]


def test_a_slot_that_comes_back_unseen_is_given_on_though_others_wait_for_long(
    db, connect, clock
):
    clock.set("2026-03-01 12:00+00")
    call(db, "set_limit", limit_key="k", max_running=1)
    settle(db)
    stranger, ending = connect(autocommit=False), connect(autocommit=False)
    stranger.execute("select pg_current_xact_id()")
    enqueue(db, limit_key="k", lease="1 day")
    (running,) = claim(db)
    call(ending, "finish_job", **owner(running))
    held = enqueue(db, limit_key="k")
    assert claim(db) == []
    for _ in range(3):
        clock.advance("3 seconds")
        one(db, "tick")
    ending.commit()
    clock.advance("10 seconds")
    one(db, "tick")

    assert [job.job_id for job in claim(db)] == [held]


def test_a_clock_that_is_set_back_hides_no_check(db, connect, clock):
    clock.set("2026-03-01 12:00+00")
    parent = enqueue(db)
    (job,) = claim(db)
    other = connect(autocommit=False)
    value(other, "finish_job", **owner(job))
    child = enqueue(db, depends_on=[parent])
    one(db, "tick")
    other.commit()

    clock.set("2026-03-01 11:00+00")
    one(db, "tick")
    assert run(db, child).status == "queued"
    second = enqueue(db, depends_on=[child])
    call(db, "cancel_job", job_id=child)
    settle(db)
    assert run(db, second).status == "cancelled"


def test_done_checks_cost_nothing_under_a_held_snapshot(db, connect):
    holder = connect(autocommit=False)
    holder.execute("set transaction isolation level repeatable read")
    holder.execute("select 1 from rota.jobs")
    for _ in range(6):
        db.execute(
            "insert into rota.pending_checks (kind, subject)"
            " select 'order', 'k' || n from generate_series(1, 1000) as n"
        )
        settle(db)
    walked = (
        "select pg_stat_get_xact_tuples_returned('rota.pending_checks_due_at_idx'::regclass)"
    )

    counts = []
    for _ in range(5):
        with db.transaction():
            before = scalar(db, walked)
            scalar(db, "select rota._do_checks(1000)")
            counts.append(scalar(db, walked) - before)
    holder.rollback()

    assert min(counts) < 100


def test_a_session_that_only_asks_is_told_of_what_it_would_leave_to_others(db):
    call(db, "set_limit", job_type="x", max_starts=1, per="1 day")
    call(db, "tick")
    db.execute("update rota.maintenance set done_at = rota.now() where task = 'tick alone'")
    for _ in range(2):
        enqueue(db, "x")
        claim(db)
    db.execute("delete from rota.pending_checks where kind <> 'limit'")

    in_many_messages = (
        "select rota._due_checks(1, true) <> '{}' as does,"
        " rota._due_checks(1, true, %s) <> '{}' as asks"
    )
    assert rows(db, in_many_messages, True) == [(False, True)]
