"""How many jobs run at once or start in a time, and whose turn it is."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
    pending,
    poison,
    refused,
    rows,
    run,
    scalar,
    settle,
    value,
)
from support.waiting import wait_until

pytestmark = pytest.mark.slow


def limit(db, **arguments):
    value(db, "set_limit", **arguments)


def settled_limit(db, **arguments):
    """Set a limit, and wait until no tick counts any more what ran before."""
    limit(db, **arguments)

    def is_counted():
        settle(db)
        return not rows(db, "select from rota.limits_to_count")

    wait_until(is_counted, "what ran before is still counted")


def keyed(db, key, count=1, **arguments):
    return [enqueue(db, limit_key=key, **arguments) for _ in range(count)]


def take(db, max_jobs=10, **arguments):
    call(db, "tick")
    return claim(db, max_jobs=max_jobs, **arguments)


def ids(jobs):
    return [job.job_id for job in jobs]


def keys(db, jobs):
    return [run(db, job.job_id).limit_key for job in jobs]


def finish(db, *jobs):
    for job in jobs:
        value(db, "finish_job", **owner(job))


def settle_all(db, clock):
    """Do also what is put off."""
    while pending(db):
        clock.advance("10 s")
        settle(db)


def test_set_limit_holds_for_a_job_type(db):
    limit(db, job_type="charge", max_running=2)
    charges = [enqueue(db, "charge", queue=queue) for queue in ("a", "b", "a", "b")]
    mail = enqueue(db, "mail", queue="a")

    first = take(db, queues=["a", "b"])
    second = take(db, queues=["a", "b"])
    finish(db, first[0])
    third = take(db, queues=["a", "b"])

    assert set(ids(first)) == {charges[0], charges[1], mail}
    assert second == []
    assert ids(third) == [charges[2]]


def test_set_limit_holds_for_a_key_in_all_queues(db):
    limit(db, limit_key="shop", max_running=1)
    first, second = keyed(db, "shop", queue="a") + keyed(db, "shop", queue="b")
    keyed(db, "other", 3, queue="a")

    jobs = take(db, queues=["a", "b"])

    assert len(jobs) == 4
    assert first in ids(jobs)
    assert second not in ids(jobs)


def test_set_limit_holds_for_each_key_of_a_class(db):
    limit(db, limit_key="customer:*", max_running=2)
    limit(db, limit_key="customer:7", max_running=1)
    for key in ("customer:7", "customer:8", "customer:9", "customer", "shop:1"):
        keyed(db, key, 3)

    found = Counter(keys(db, take(db, max_jobs=100)))

    assert found == {
        "customer:7": 1,
        "customer:8": 2,
        "customer:9": 2,
        "customer": 3,
        "shop:1": 3,
    }


def test_set_limit_holds_for_a_queue_and_leaves_the_others_their_order(db):
    limit(db, queue="narrow", max_running=2)
    order = [
        enqueue(db, queue=queue) for queue in ("narrow", "wide", "narrow", "narrow", "wide")
    ]

    jobs = take(db, queues=["narrow", "wide"], max_jobs=3)
    more = take(db, queues=["narrow", "wide"], max_jobs=3)
    finish(db, jobs[0])
    last = take(db, queues=["narrow", "wide"], max_jobs=3)

    assert ids(jobs) == order[:3]
    assert ids(more) == [order[4]]
    assert ids(last) == [order[3]]


def test_set_limit_counts_what_is_taken_by_one_claim(db):
    limit(db, queue="default", max_running=5)
    limit(db, job_type="charge", max_running=3)
    limit(db, limit_key="k:*", max_running=2)
    for n in range(5):
        keyed(db, f"k:{n}", 3, job_type="charge")
        keyed(db, f"k:{n}", 3, job_type="mail", priority=5)

    jobs = take(db, max_jobs=100)

    assert Counter(job.job_type for job in jobs) == {"charge": 3, "mail": 2}


WAYS_OUT = {
    "finish": lambda db, job: value(db, "finish_job", **owner(job)),
    "finish many": lambda db, job: call(db, "finish_jobs", **owners(job)),
    "fail": lambda db, job: one(db, "fail_job", **owner(job), error="e"),
    "die": lambda db, job: one(db, "fail_job", **owner(job), error="e", fatal=True),
    "snooze": lambda db, job: value(db, "snooze_job", **owner(job), delay="1 h"),
    "release": lambda db, job: call(db, "release_jobs", **owners(job)),
    "take away": lambda db, job: value(db, "retry_job", job_id=job.job_id, force=True),
    "cancel": lambda db, job: (
        value(db, "cancel_job", job_id=job.job_id),
        one(db, "fail_job", **owner(job), error="e"),
    ),
    "vanish": lambda db, job: (
        one(db, "heartbeat", **owner(job), lease="1 ms"),
        scalar(db, "select pg_sleep(0.002) is null"),
        call(db, "tick"),
    ),
}


@pytest.mark.parametrize("kind", ["queue", "job_type", "limit_key"])
def test_set_limit_gives_the_slot_back_by_every_way_out(db, kind):
    limit(db, **{kind: {"queue": "default", "job_type": "x"}.get(kind, "k")}, max_running=1)
    keyed(db, "k", len(WAYS_OUT) + 1)

    for way, go in WAYS_OUT.items():
        (job,) = take(db)
        assert take(db) == [], way
        go(db, job)

    assert len(take(db)) == 1
    assert take(db) == []
    assert scalar(db, "select count(*) from rota.limit_slots") == 0


def test_set_limit_frees_the_slot_of_a_dead_worker_with_its_lease(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_running=1)
    enqueue(db)
    waiting = enqueue(db)
    take(db, lease="1 minute")

    clock.advance("59 s")
    call(db, "tick")
    early = take(db)
    clock.advance("2 s")
    call(db, "tick")

    assert early == []
    assert ids(take(db)) == [waiting]


def test_set_limit_rolled_back_end_keeps_the_slot(db):
    limit(db, job_type="x", max_running=1)
    enqueue(db), enqueue(db)
    (job,) = take(db)

    with db.transaction(force_rollback=True):
        finish(db, job)

    assert take(db) == []


def test_set_limit_counts_what_runs_already_and_holds_what_waits(db):
    for _ in range(4):
        enqueue(db, "charge")
    started = take(db, max_jobs=2)

    limit(db, job_type="charge", max_running=3)

    more = take(db)
    assert len(more) == 1
    finish(db, started[0])
    assert len(take(db)) == 1
    assert take(db) == []


def test_set_limit_resets_nothing_where_nothing_is_set(db):
    settled_limit(db, limit_key="c:*", max_running=3)
    acts = rows(db, "select act from rota.audit_log")

    limit(db, limit_key="c:1", reset=True)

    assert pending(db) == []
    assert rows(db, "select act from rota.audit_log") == acts
    (job_id,) = keyed(db, "c:1")
    assert ids(claim(db)) == [job_id]


def test_set_limit_of_a_class_counts_few_keys_at_a_time(db):
    """Each key takes locks, for which the server has no room if a class has very many."""
    jobs = [{"job_type": "x", "limit_key": f"c:{number}"} for number in range(700)]
    call(db, "enqueue_many", jobs=Jsonb(jobs))
    assert len(claim(db, max_jobs=1000)) == 700
    limit(db, limit_key="c:*", max_running=1)

    with db.transaction():
        db.execute("select rota._check_limit('key c:*', false)")
        held = "locktype = 'advisory' and pid = pg_backend_pid()"
        assert scalar(db, f"select count(*) from pg_locks where {held}") <= 1000
    assert rows(db, "select asked_xid from rota.limits_to_count") == [(None,)]
    settled_limit(db, limit_key="c:*", max_running=1)

    keyed(db, "c:0")
    keyed(db, "c:699")
    (new,) = keyed(db, "c:700")
    assert ids(take(db)) == [new]


def test_set_limit_of_a_class_looks_at_few_held_keys_at_a_time(db):
    db.execute(
        "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status,"
        " run_at, limit_key, hold) select 'a', 'x', '{}', 0, 1, 'queued', rota.now(),"
        " 'shop:' || n, 'key shop:' || n from generate_series(1, 1100) as n"
    )
    limit(db, limit_key="shop:*", max_starts=1000)

    db.execute("select rota._do_checks(1000)")

    assert Counter(kind for kind, _ in pending(db)) == {"limit": 1001, "class": 1}
    settle(db)
    assert rows(db, "select from rota.jobs where hold is not null") == []
    assert pending(db) == []


def test_set_limit_can_be_raised_lowered_and_removed(db):
    limit(db, job_type="x", max_running=1)
    for _ in range(9):
        enqueue(db)

    found = [len(take(db))]
    for arguments in (
        {"max_running": 3},
        {"max_running": 2},
        {"max_starts": 5},
        {"reset": True},
    ):
        limit(db, job_type="x", **arguments)
        found.append(len(take(db)))

    assert found == [1, 2, 0, 0, 6]
    assert rows(db, "select * from rota.limits") == []


def test_set_limit_of_nothing_stops_a_class(db):
    limit(db, limit_key="a:*", max_running=0)
    keyed(db, "a:1", 2)
    keyed(db, "b:1", 2)

    assert keys(db, take(db)) == ["b:1", "b:1"]
    limit(db, limit_key="a:*", reset=True)
    assert keys(db, take(db)) == ["a:1", "a:1"]


@pytest.mark.parametrize("by", [{"job_type": "x"}, {"limit_key": "c:1"}, {"queue": "q"}])
def test_set_limit_again_finds_the_slots_that_were_lost_by_hand(db, by):
    settled_limit(db, **by, max_running=3)
    jobs = keyed(db, "c:1", 8, queue="q")
    assert len(take(db, queues=["q"])) == 3
    db.execute("delete from rota.jobs where id = any(%s)", (jobs[:2],))
    assert take(db, queues=["q"]) == []
    told = call(db, "explain_job", job_id=jobs[-1])[0]
    assert (told.reason, "The others were lost" in told.explanation) == ("limit_full", True)

    db.execute(told.remedy)
    settle(db)

    assert len(take(db, queues=["q"])) == 2
    assert [row for row in call(db, "verify") if row.violations] == []


def test_set_limit_again_takes_back_slots_that_were_doubled_by_hand(db):
    settled_limit(db, job_type="x", max_running=3)
    for _ in range(8):
        enqueue(db, "x")
    db.execute("insert into rota.limit_slots (limit_name) values ('type x'), ('type x')")
    assert len(take(db, 4)) == 4

    limit(db, job_type="x", max_running=3)
    settle(db)

    assert take(db) == []
    assert [row for row in call(db, "verify") if row.violations] == []


def test_claim_gives_back_the_slots_of_jobs_that_a_trigger_keeps(db):
    settled_limit(db, queue="q", max_running=2)
    kept = [enqueue(db, "kept", queue="q") for _ in range(2)]
    db.execute(
        "create function public.keep() returns trigger language plpgsql as"
        " $$ begin return null; end $$"
    )
    db.execute(
        "create trigger keep before update on rota.jobs for each row"
        " when (old.job_type = 'kept') execute function public.keep()"
    )
    assert take(db, queues=["q"]) == []
    assert take(db, queues=["q"]) == []

    db.execute("drop trigger keep on rota.jobs")

    assert ids(take(db, queues=["q"])) == kept


@pytest.mark.parametrize("by", ["raise exception 'poison'", "return null"])
def test_a_held_job_that_a_trigger_refuses_keeps_no_other_out(db, by):
    settled_limit(db, limit_key="k", max_running=1)
    first, bad, good = keyed(db, "k", 3)
    (job,) = claim(db, max_jobs=3)
    claim(db)
    settle(db)
    assert rows(db, "select id from rota.jobs where hold = 'key k' order by id") == [
        (bad,),
        (good,),
    ]
    poison(db, bad, by)

    assert value(db, "finish_job", **owner(job)) == "finished"

    assert job.job_id == first
    assert ids(claim(db)) == [good]


def test_set_limit_leaves_what_is_not_given_as_it_is(db):
    limit(db, limit_key="a", max_running=3, weight=2)
    limit(db, limit_key="a", max_starts=10, per="1 minute", burst=4)

    (row,) = rows(db, "select max_running, max_starts, per, burst, weight from rota.limits")
    assert row == (3, 10, timedelta(minutes=1), 4, 2)

    limit(db, limit_key="a", weight=5, reset=True)
    (row,) = rows(db, "select max_running, max_starts, per, burst, weight from rota.limits")
    assert row == (None, None, None, None, 5)


def test_what_comes_in_is_held_where_enough_of_its_type_wait(db):
    settled_limit(db, job_type="x", max_running=1)

    for count in range(3):
        enqueue(db)
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x"}]))
        held = scalar(db, "select count(*) from rota.jobs where hold = 'type x'")
        assert held == 2 * count + 1


def test_set_limit_holds_jobs_that_came_in_without_knowing_of_it(db):
    """A transaction that enqueued while the limit was being set may not have seen it."""
    for _ in range(3):
        enqueue(db)
    limit(db, job_type="x", max_running=1)

    found = [len(take(db)) for _ in range(3)]

    assert found == [1, 0, 0]
    assert scalar(db, "select count(*) from rota.jobs where hold = 'type x'") == 2


def test_rate_spreads_starts_evenly(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_starts=4, per="1 s")
    for _ in range(10):
        enqueue(db)

    found = []
    for _ in range(20):
        found.append(len(take(db)))
        clock.advance("50 ms")

    assert found == [1, 0, 0, 0, 0] * 4


@pytest.mark.parametrize("bound", [{"job_type": "x"}, {"queue": "default"}])
@pytest.mark.parametrize(("rate", "most"), [(20, 2), (100, 10)])
def test_rate_without_a_burst_is_reached_by_ten_ticks_a_second(db, clock, bound, rate, most):
    clock.set("2026-01-12 10:00+00")
    limit(db, **bound, max_starts=rate)
    scalar(db, "select count(*) from rota.enqueue_many(%s)", Jsonb([{"job_type": "x"}] * 300))

    found = []
    for _ in range(20):
        found.append(len(take(db, max_jobs=1000)))
        clock.advance("100 ms")

    assert found == [most] * 20
    assert rows(db, "select burst from rota.limit_stats") == [(most,)]


def test_rate_lets_a_burst_start_after_a_rest(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, limit_key="k", max_starts=2, per="1 s", burst=4)
    keyed(db, "k", 20)

    found = []
    for step in ("0 s", "499 ms", "1 ms", "1 s", "1 hour"):
        clock.advance(step)
        found.append(len(take(db)))

    assert found == [4, 0, 1, 2, 4]


@pytest.mark.parametrize("max_jobs", [1, 3, 100])
def test_rate_is_never_exceeded_in_any_window(db, clock, max_jobs):
    start = clock.set("2026-01-12 10:00+00")
    limit(db, queue="default", max_starts=7, per="1 s", burst=3)
    for _ in range(60):
        enqueue(db)

    starts = []
    for _ in range(150):
        now = clock.advance("37 ms")
        starts += [now - start] * len(take(db, max_jobs=max_jobs))

    second = timedelta(seconds=1)
    windows = [sum(t <= u < t + second for u in starts) for t in starts]
    assert max(windows) <= 7 + 3
    assert len(starts) >= 0.9 * 7 * 150 * 0.037


@pytest.mark.parametrize("burst", [1, 3])
def test_rate_goes_on_when_the_clock_was_set_back(db, clock, burst):
    clock.set("2026-01-12 10:00+00")
    limit(db, queue="default", max_starts=1, per="1 s", burst=burst)
    for _ in range(20):
        enqueue(db, run_at="2026-01-12 08:00+00")
    take(db)
    clock.set("2026-01-12 09:00+00")

    wait = scalar(db, "select next_start_at - rota.now() from rota.limit_stats")
    found = []
    for _ in range(6):
        found.append(len(take(db)))
        clock.advance("500 ms")

    assert wait == timedelta(0)
    assert found == [burst, 0, 1, 0, 1, 0]


def test_rate_lets_held_jobs_in_when_the_clock_was_set_back(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, limit_key="k:*", max_starts=1, per="1 s")
    keyed(db, "k:1", 9, run_at="2026-01-12 08:00+00")
    for _ in range(3):
        take(db)
        call(db, "tick")
    clock.set("2026-01-12 09:00+00")

    found = []
    for _ in range(4):
        call(db, "tick")
        found.append(len(take(db)))
        clock.advance("1 s")

    assert found == [1, 1, 1, 1]


@pytest.mark.parametrize("subject", [{"job_type": "x"}, {"limit_key": "k"}])
def test_a_limit_lets_held_jobs_in_when_the_clock_was_set_back(db, clock, subject):
    """Those that it had let in before are not due for years, and keep no other out."""
    clock.set("2030-01-01 00:00+00")
    value(db, "set_limit", **subject, max_running=1)
    settle(db)
    key = {"limit_key": "k"} if "limit_key" in subject else {}
    for _ in range(3):
        enqueue(db, **key)
    (job,) = claim(db, max_jobs=3)
    value(db, "finish_job", **owner(job))
    clock.set("2026-01-01 00:00+00")

    new = [enqueue(db, **key) for _ in range(2)]

    for job_id in new:
        clock.advance("10 s")
        settle(db)
        (job,) = claim(db)
        value(db, "finish_job", **owner(job))
        assert job.job_id == job_id


def test_what_runs_counts_for_the_class_when_its_own_limit_is_gone(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, limit_key="k:*", max_running=1)
    limit(db, limit_key="k:1", max_starts=1000)
    keyed(db, "k:1", 2)
    assert len(take(db, max_jobs=1)) == 1

    call(db, "set_limit", limit_key="k:1", reset=True)
    call(db, "tick")

    assert take(db) == []


def test_a_job_of_a_key_is_found_when_its_time_comes_again(db, clock):
    """It was due before the clock was set back, so the check for its time is gone."""
    clock.set("2026-01-12 10:00+00")
    keyed(db, "k:1", 1)
    call(db, "tick")
    clock.set("2026-01-12 09:59+00")
    assert [len(take(db)) for _ in range(3)] == [0, 0, 0]

    clock.set("2026-01-12 10:00+00")

    assert len(take(db)) == 1


def test_rate_goes_on_at_once_when_it_is_made_faster(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_starts=1, per="1 day")
    for _ in range(5):
        enqueue(db)
    take(db)
    limit(db, job_type="x", per="1 s")

    found = []
    for _ in range(4):
        clock.advance("500 ms")
        call(db, "tick")
        found.append(len(take(db)))

    assert found == [1, 0, 1, 0]


def test_rate_gives_the_refused_their_time_instead_of_polling_them(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_starts=1, per="1 minute")
    for _ in range(3):
        clock.advance("10 s")
        call(db, "tick")
    for _ in range(3):
        enqueue(db)
    for _ in range(3):
        take(db)

    holds = rows(db, "select hold, count(*) from rota.jobs group by 1 order by 1")
    checks = rows(db, "select subject, due_at - rota.now() from rota.pending_checks")

    assert holds == [("type x", 2), (None, 1)]
    assert checks == [("type x", timedelta(seconds=30))]


@pytest.mark.parametrize(
    "by", [{"max_running": 1}, {"max_starts": 1, "per": timedelta(hours=1)}]
)
def test_what_a_full_limit_refuses_is_for_the_next_of_the_same_claim(db, by):
    """The jobs in front of it have another limit, under which none of them can start."""
    for _ in range(5):
        enqueue(db, "full", limit_key="k")
    (job_id,) = keyed(db, "k", job_type="free")
    limit(db, job_type="full", max_running=0)
    limit(db, limit_key="k", **by)

    assert ids(claim(db, max_jobs=10)) == [job_id]
    held = "select hold, count(*) from rota.jobs where status = 'queued' group by hold"
    assert rows(db, held) == [("type full", 5)]


def test_a_rate_counts_no_job_that_another_rate_has_refused(db, clock):
    clock.set("2026-01-01")
    limit(db, job_type="x", max_starts=5, per="1 minute", burst=5)
    limit(db, queue="default", max_starts=6, per="1 minute")
    value(db, "tick")
    for _ in range(5):
        enqueue(db, job_type="x")
    started = []

    for _ in range(5):
        started.append(len(claim(db, max_jobs=10)))
        clock.advance("10 s")
        value(db, "tick")

    assert started == [1, 1, 1, 1, 1]
    assert scalar(db, "select sum(starts) from rota.limit_starts where limit_name ~ 'x'") == 5


def test_rate_and_a_limit_of_what_runs_hold_together(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, limit_key="k", max_running=2, max_starts=1, per="1 s")
    keyed(db, "k", 5)

    jobs, found = [], []
    for _ in range(4):
        jobs += take(db)
        found.append(len(jobs))
        clock.advance("1 s")
    finish(db, *jobs)
    found.append(len(take(db)))

    assert found == [1, 2, 2, 2, 1]


def test_claim_gives_the_keys_of_a_queue_their_turns(db):
    keyed(db, "big", 50)
    keyed(db, "small", 3)
    keyed(db, "tiny", 1)

    call(db, "tick")

    order = [keys(db, take(db, max_jobs=1))[0] for _ in range(9)]

    turns = ["big", "small", "tiny"], ["big", "small"], ["big", "small"], ["big", "big"]
    assert order == [key for turn in turns for key in turn]


@pytest.mark.parametrize("max_jobs", [1, 2, 7, 60])
def test_claim_shares_by_weight(db, max_jobs):
    limit(db, limit_key="a", weight=3)
    limit(db, limit_key="b:*", weight=2)
    for key in ("a", "b:1", "c"):
        keyed(db, key, 60)
    call(db, "tick")

    found: Counter[str] = Counter()
    for _ in range(60 // max_jobs):
        found.update(keys(db, take(db, max_jobs=max_jobs)))

    total = found.total()
    assert total >= 56
    for key, weight in (("a", 3), ("b:1", 2), ("c", 1)):
        assert abs(found[key] - total * weight / 6) <= 4, found


def test_claim_lets_a_key_that_is_alone_fill_the_batch(db):
    keyed(db, "a", 30)

    assert len(take(db, max_jobs=25)) == 25
    assert len(take(db, max_jobs=25)) == 5


def test_claim_orders_plain_jobs_and_keys_by_age(db):
    order = [
        enqueue(db),
        *keyed(db, "a"),
        enqueue(db),
        *keyed(db, "b"),
        enqueue(db),
    ]

    assert ids(take(db, max_jobs=2)) == order[:2]
    assert ids(take(db, max_jobs=10)) == order[2:]


def test_claim_puts_priority_before_turns(db):
    (low,) = keyed(db, "a", priority=5)
    (high,) = keyed(db, "a", priority=-5)
    (other,) = keyed(db, "b", priority=0)
    plain = enqueue(db, priority=1)

    assert [take(db, max_jobs=1)[0].job_id for _ in range(4)] == [high, other, plain, low]


def test_claim_takes_its_types_out_of_the_line_of_a_key(db):
    keyed(db, "a", 3, job_type="other")
    (wanted,) = keyed(db, "a", priority=9)
    limit(db, job_type="other", max_running=5)

    assert ids(take(db, job_types=["x"])) == [wanted]
    assert len(take(db, job_types=["other"])) == 3


def test_claim_leaves_a_paused_queue_held_and_others_going(db):
    limit(db, job_type="x", max_running=1)
    for queue in ("a", "b"):
        for _ in range(2):
            enqueue(db, queue=queue)
    (job,) = take(db, queues=["a", "b"])
    value(db, "pause_queue", queue="a")

    finish(db, job)

    (job,) = take(db, queues=["a", "b"])
    assert job.queue == "b"
    finish(db, job)
    (job,) = take(db, queues=["a", "b"])
    assert job.queue == "b"
    finish(db, job)
    assert take(db, queues=["a", "b"]) == []
    value(db, "resume_queue", queue="a")
    assert len(take(db, queues=["a", "b"])) == 1


def test_claim_passes_a_slot_on_that_the_first_in_line_cannot_use(db):
    limit(db, job_type="charge", max_running=2)
    limit(db, limit_key="a", max_running=1)
    keyed(db, "a", 3, job_type="charge")
    keyed(db, "b", 3, job_type="charge")

    done = []
    for _ in range(12):
        jobs = take(db, max_jobs=1)
        done += jobs
        if len(done) % 2 == 0:
            finish(db, *done[-2:])
        if len(done) == 6:
            break

    assert len(done) == 6


def test_a_claim_of_one_job_walks_past_those_of_a_full_limit_in_few_steps(db):
    for job_type in (["x"] * 60 + ["y"]) * 2:
        enqueue(db, job_type)
    settled_limit(db, job_type="x", max_running=1)
    assert len(take(db, max_jobs=1)) == 1

    with db.transaction():
        db.execute("set local track_functions = 'all'")
        found = [job.job_type for job in claim(db)]
        steps = scalar(
            db, "select pg_stat_get_xact_function_calls('rota._admit_jobs'::regproc)"
        )

    assert found == ["y"]
    assert steps <= 8
    held = rows(db, "select distinct job_type, hold from rota.jobs where hold is not null")
    assert held == [("x", "type x")]


def test_a_claim_of_many_keys_takes_few_of_the_locks_of_the_server(db, connect):
    limit(db, limit_key="k:*", max_running=3, max_starts=9, per="1 s", burst=5)
    settle(db)
    jobs = [{"job_type": "x", "limit_key": f"k:{number}"} for number in range(500)]
    call(db, "enqueue_many", jobs=json.dumps(jobs))
    claims = [connect(autocommit=False) for _ in range(2)]

    taken = [len(claim(one_of, max_jobs=400)) for one_of in claims]

    assert taken == [200, 200]
    locks = "select count(*) from pg_locks where locktype = 'advisory'"
    assert scalar(db, f"{locks} and pid <> pg_backend_pid()") <= 2 * (2 * 200 + 1)


def test_claim_finds_every_job_that_comes_into_a_line(db, clock):
    clock.set("2026-01-12 10:00+00")
    a = keyed(db, "a", delay="1 h", idempotency_key="a")[0]
    b = keyed(db, "b", run_at="2026-01-12 12:00+00")[0]
    c = keyed(db, "c", delay="1 h")[0]
    assert take(db) == []

    enqueue(db, limit_key="a", idempotency_key="a", on_conflict="replace", delay="0")
    value(db, "reschedule_job", job_id=b, delay="1 minute")
    value(db, "retry_job", job_id=c)
    first = take(db, lease="1 hour")
    clock.advance("61 s")
    second = take(db)
    third_id = ids(first)[0]
    one(db, "fail_job", **owner(first[0]), error="e", retry_in="10 s")
    clock.advance("11 s")
    third = take(db)
    one(db, "fail_job", **owner(first[1]), error="e", fatal=True)
    value(db, "retry_job", job_id=first[1].job_id)
    fourth = take(db)

    assert sorted(ids(first)) == [a, c]
    assert ids(second) == [b]
    assert ids(third) == [third_id]
    assert ids(fourth) == [first[1].job_id]


def test_claim_finds_a_rerun_and_what_was_blocked(db):
    limit(db, limit_key="k", max_running=1)
    arguments = {"limit_key": "k", "idempotency_key": "i", "on_conflict": "rerun"}
    enqueue(db, **arguments)
    (job,) = take(db)
    enqueue(db, **arguments)
    child = enqueue(db, limit_key="k", depends_on=[job.job_id])
    ordered = [enqueue(db, limit_key="k", ordering_key="o") for _ in range(2)]

    done = []
    for _ in range(4):
        finish(db, job)
        (job,) = take(db)
        done.append(job.job_id)

    assert set(done) > {child, *ordered}
    assert take(db) == []


def test_claim_finds_the_keys_of_a_batch(db):
    batch = [{"job_type": "x", "limit_key": f"k{n % 3}"} for n in range(30)]

    call(db, "enqueue_many", jobs=Jsonb(batch))

    assert len(take(db, max_jobs=30)) == 30


def test_set_priority_moves_a_job_in_its_line(db):
    first, second = keyed(db, "a", 2)
    plain = enqueue(db, priority=-1)
    value(db, "set_priority", job_id=second, priority=-2)

    assert [take(db, max_jobs=1)[0].job_id for _ in range(3)] == [second, plain, first]


def test_ageing_lets_low_priority_overtake(db, clock):
    clock.set("2026-01-12 10:00+00")
    value(db, "set_queue", queue="default", ageing="1 minute")
    old = enqueue(db, priority=10)
    clock.advance("9 minutes 30 s")
    fresh = [enqueue(db) for _ in range(2)]

    first = take(db, max_jobs=1)
    clock.advance("31 s")
    enqueue(db)
    second = take(db, max_jobs=2)

    assert ids(first) == [fresh[0]]
    assert set(ids(second)) == {old, fresh[1]}


@pytest.mark.parametrize("options", [{}, {"limit_key": "k"}, {"delay": "0 s"}])
def test_a_new_job_of_a_queue_that_ages_has_its_place_at_once(db, clock, options):
    clock.set("2026-01-12 10:00+00")
    value(db, "set_queue", queue="default", ageing="1 minute")
    value(db, "set_limit", queue="default", max_running=5)

    job_id = enqueue(db, priority=10, **options)

    place = "select own_lane, own_place - run_at from rota.jobs where id = %s"
    assert rows(db, place, job_id) == [(0, timedelta(minutes=10))]


def test_ageing_never_starves_under_a_steady_stream(db, clock):
    clock.set("2026-01-12 10:00+00")
    value(db, "set_queue", queue="default", ageing="10 s")
    low = enqueue(db, priority=5)
    low_key = keyed(db, "k", priority=5)[0]

    taken = []
    for _ in range(30):
        enqueue(db)
        enqueue(db)
        taken += ids(take(db, max_jobs=2))
        clock.advance("2 s")

    assert {low, low_key} <= set(taken)


def test_ageing_is_off_without_a_setting_and_can_be_reset(db, clock):
    clock.set("2026-01-12 10:00+00")
    value(db, "set_queue", queue="default", ageing="1 s")
    value(db, "set_queue", queue="default", reset=True)
    enqueue(db, priority=1)
    clock.advance("1 day")
    high = enqueue(db)

    assert ids(take(db, max_jobs=1)) == [high]


@pytest.mark.parametrize("max_jobs", [1, 3, 50])
def test_ageing_gives_everything_in_the_order_of_effective_priority(db, clock, max_jobs):
    clock.set("2026-01-12 10:00+00")
    value(db, "set_queue", queue="default", ageing="10 s")
    expected = []
    for n in range(40):
        priority, age = (n * 7) % 5, (n * 13) % 60
        clock.set("2026-01-12 10:00+00")
        job_id = enqueue(db, priority=priority, run_at=clock.now() - timedelta(seconds=age))
        expected.append((priority - age // 10, -age, job_id))
    levels = {job_id: level for level, _, job_id in expected}

    taken = []
    while jobs := take(db, max_jobs=max_jobs):
        taken += sorted(levels[job_id] for job_id in ids(jobs))

    assert taken == sorted(levels.values())


def test_limit_stats_show_each_limit_in_use(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_running=2)
    limit(db, limit_key="k:*", max_starts=1, per="1 minute")
    keyed(db, "k:1", 2)
    enqueue(db)
    take(db)

    found = rows(
        db,
        "select limit_name, max_running, running, waiting, next_start_at - rota.now() as next"
        " from rota.limit_stats order by 1",
    )

    assert found == [
        ("key k:1", None, 1, 1, timedelta(minutes=1)),
        ("type x", 2, 2, 1, None),
    ]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("queue", {}),
        ("queue", {"queue": "a", "job_type": "b"}),
        ("queue", {"queue": " a"}),
        ("job_type", {"job_type": ""}),
        ("limit_key", {"limit_key": ""}),
        ("limit_key", {"limit_key": "x" * 256}),
        ("limit_key", {"limit_key": "eu:customer:*", "max_running": 1}),
        ("limit_key", {"limit_key": "::*", "weight": 1}),
        ("max_running", {"queue": "a", "max_running": -1}),
        ("max_starts", {"queue": "a", "max_starts": 0}),
        ("per", {"queue": "a", "max_starts": 1, "per": "0"}),
        ("per", {"queue": "a", "max_starts": 1, "per": "2 years"}),
        ("burst", {"queue": "a", "max_starts": 1, "burst": 0}),
        ("weight", {"limit_key": "a", "weight": 0}),
        ("weight", {"queue": "a", "weight": 1}),
        ("limit_key", {"limit_key": "customer*", "max_running": 1}),
        ("max_running", {"job_type": "x"}),
        ("reset", {"queue": "a", "reset": None}),
    ],
)
def test_set_limit_names_the_bad_argument(db, name, arguments):
    with refused(name):
        limit(db, **arguments)

    assert rows(db, "select * from rota.limits") == []


SLOW = {"max_starts": 1, "per": "366 days", "burst": 101}


@pytest.mark.parametrize("given", [[*SLOW], *([name] for name in SLOW)])
def test_set_limit_refuses_a_burst_of_more_than_a_century(db, given):
    """Whether it is given at once, or comes of what is there and what is given."""
    rest = {name: SLOW[name] for name in SLOW if name not in given}
    limit(db, job_type="x", max_running=1, **rest)
    before = rows(db, "select * from rota.limits")

    with refused("burst"):
        limit(db, job_type="x", **{name: SLOW[name] for name in given})

    assert rows(db, "select * from rota.limits") == before


def test_set_limit_of_the_longest_burst_stops_no_claim(db):
    limit(db, job_type="x", **{**SLOW, "burst": 100})
    jobs = [enqueue(db), enqueue(db, "y")]

    assert sorted(ids(take(db))) == jobs
    assert len(rows(db, "select * from rota.limit_stats")) == 1


def test_set_limit_with_reset_asks_only_for_what_is_given(db):
    limit(db, job_type="x", **{**SLOW, "per": None})

    limit(db, job_type="x", per="366 days", max_starts=1, reset=True)

    assert rows(db, "select burst from rota.limits") == [(None,)]


def test_enqueue_refuses_the_name_of_a_class_as_a_key(db):
    with refused("limit_key"):
        keyed(db, "customer:*")


@pytest.mark.parametrize("ageing", ["0", "999 ms", "31 days"])
def test_set_queue_names_a_bad_ageing(db, ageing):
    with refused("ageing"):
        value(db, "set_queue", queue="a", ageing=ageing)


def test_tick_purges_the_slots_of_limits_out_of_use(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, limit_key="k:*", max_running=5, max_starts=100)
    keyed(db, "k:1"), keyed(db, "k:2")
    first, _ = take(db, lease="1 day")
    finish(db, first)

    clock.advance("2 hours")
    call(db, "tick")

    assert rows(db, "select distinct limit_name from rota.limit_parts") == [("key k:2",)]
    assert rows(db, "select distinct limit_name from rota.limit_slots") == []
    assert rows(db, "select * from rota.limit_starts") == []


@pytest.mark.parametrize("change", [{"max_running": 5}, {"reset": True}])
def test_set_limit_of_a_class_lets_in_a_key_that_was_held_before_its_commit(
    db, connect, change
):
    limit(db, limit_key="c:*", max_running=0)
    other = connect()
    with other.transaction():
        limit(other, limit_key="c:*", **change)
        (job_id,) = keyed(db, "c:1")
        # Held under the limit of before, and its check is done under that, too.
        assert take(db) == take(db) == []

    assert ids(take(db) + take(db)) == [job_id]


@pytest.mark.parametrize(
    "subject",
    [{"queue": "default"}, {"job_type": "x"}, {"limit_key": "k"}, {"limit_key": "c:*"}],
)
def test_set_limit_holds_beside_a_claim_that_counts_what_ran_and_is_not_committed(
    db, connect, subject
):
    key = subject.get("limit_key", "k").replace("*", "1")
    keyed(db, key, 3)
    take(db, max_jobs=1)
    limit(db, **subject, max_running=1)
    first, second = connect(), connect()
    with first.transaction():
        take(first, queues=["elsewhere"])

        assert take(second) == []


def test_set_limit_holds_while_older_checks_come_first(db):
    plain = [enqueue(db) for _ in range(3)]
    assert ids(take(db, max_jobs=1)) == plain[:1]
    for number in range(30):
        keyed(db, f"k{number}", queue="elsewhere")
    limit(db, job_type="x", max_running=1)

    assert take(db, max_jobs=1) == []


@pytest.mark.parametrize("arguments", [{"max_running": 3}, {"reset": True}])
def test_set_limit_takes_effect_before_the_checks_that_are_due_already(db, arguments):
    limit(db, job_type="x", max_running=1)
    for _ in range(9):
        enqueue(db)
    assert len(take(db)) == 1
    settle(db)
    db.execute(
        "insert into rota.pending_checks (kind, subject)"
        " select 'limit', 'key k' || n from generate_series(1, 1000) as n"
    )

    value(db, "set_limit", job_type="x", **arguments)
    one(db, "tick")

    assert claim(db, max_jobs=10) != []


def test_set_limit_and_a_claim_in_one_transaction_wait_for_those_who_do_not_know_yet(
    db, connect, clock
):
    clock.set("2026-01-12 10:00+00")
    keyed(db, "k", 2, lease="1 hour")
    call(db, "tick")
    setting, unknowing = connect(), connect()
    with unknowing.transaction():
        with setting.transaction():
            limit(setting, limit_key="k", max_running=1)
            take(setting, queues=["elsewhere"])
            assert len(take(unknowing, max_jobs=1)) == 1
        for _ in range(10):
            clock.advance("1 s")
            call(db, "tick")
    for _ in range(20):
        clock.advance("1 s")
        call(db, "tick")

    assert take(db) == []


def test_claim_finds_lower_priorities_behind_many_keys_of_other_types(db):
    for number in range(80):
        enqueue(db, "other", limit_key=f"k{number}")
    wanted = [enqueue(db, priority=1), enqueue(db, priority=2, limit_key="mine")]
    assert ids(take(db, job_types=["x"]) + take(db, job_types=["x"])) == wanted


@pytest.mark.parametrize(
    ("ageing", "run_at"),
    [("1 hour", "1970-01-01 00:00+00"), ("30 days", "2026-01-11 10:00+00")],
)
def test_ageing_of_two_queues_is_far_apart_and_stops_no_claim(db, clock, ageing, run_at):
    clock.set("2026-01-12 10:00+00")
    value(db, "set_queue", queue="a", ageing="1 second")
    value(db, "set_queue", queue="b", ageing=ageing)
    wanted = [enqueue(db, queue="a", run_at=run_at), enqueue(db, queue="b")]

    assert ids(take(db, queues=["a", "b"])) == wanted


def test_set_limit_sends_jobs_of_a_transaction_that_did_not_know_of_it_to_their_line(
    db, connect, clock
):
    clock.set("2026-01-12 10:00+00")
    other = connect()
    with other.transaction():
        jobs = [enqueue(other) for _ in range(5)]
        limit(db, job_type="x", max_running=10)
    for _ in range(20):
        clock.advance("1 s")
        call(db, "tick")

    assert ids(take(db)) == jobs


def test_limit_stats_show_no_limit_of_a_key_that_has_only_a_weight(db):
    limit(db, limit_key="c:*", max_running=2)
    limit(db, limit_key="c:8", weight=3)
    keyed(db, "c:8", 5)

    assert len(take(db)) == 5
    assert rows(db, "select from rota.limit_stats where limit_name = 'key c:8'") == []


@pytest.mark.parametrize("change", [{"max_running": 5}, {"reset": True}])
def test_a_key_with_nothing_behind_its_colon_is_of_its_class(db, clock, change):
    clock.set("2026-01-12 10:00+00")
    limit(db, limit_key="a:*", max_running=0)
    jobs = keyed(db, "a:")
    assert take(db) == []
    settle_all(db, clock)

    limit(db, limit_key="a:*", **change)
    clock.advance("10 s")
    settle(db)

    assert ids(take(db)) == jobs


def test_a_job_that_was_held_after_the_snapshot_of_an_end_gets_its_slot(db, connect, clock):
    """No check waits for a transaction that has a snapshot and no id yet."""
    clock.set("2026-01-12 10:00+00")
    limit(db, job_type="x", max_running=1)
    settle(db)
    enqueue(db, lease="1 day")
    (running,) = take(db)
    ending = connect(autocommit=False)
    ending.execute("set transaction isolation level repeatable read")
    ending.execute("select from rota.jobs")
    held = enqueue(db)
    assert take(db) == []
    settle_all(db, clock)

    finish(ending, running)
    ending.commit()
    settle(db)

    assert ids(take(db)) == [held]


def test_an_end_of_an_old_snapshot_does_not_fail_by_what_others_have_taken_since(db, connect):
    limit(db, job_type="x", max_running=2)
    settle(db)
    for _ in range(5):
        enqueue(db, lease="1 day")
    first, second = take(db)
    ending = connect(autocommit=False)
    ending.execute("set transaction isolation level repeatable read")
    ending.execute("select from rota.jobs")
    finish(db, first)
    assert len(claim(db, max_jobs=10)) == 1

    finish(ending, second)
    ending.commit()

    assert len(take(db)) == 1


def test_a_change_of_a_class_that_is_rolled_back_leaves_it_counted(db, connect):
    keyed(db, "c:1", 3)
    (first,) = claim(db)
    limit(db, limit_key="c:*", max_running=2)
    other = connect(autocommit=False)
    limit(other, limit_key="c:*", max_running=1)
    settle(db)
    other.rollback()

    wait_until(lambda: take(db), "the limit that lets one more run")
    assert take(db) == []
    value(db, "finish_job", **owner(first))
    assert len(take(db)) == 1


def test_set_limit_of_an_old_snapshot_counts_what_began_since(db, connect, clock):
    clock.set("2026-01-12 10:00+00")
    keyed(db, "k", 2, lease="1 day")
    setting = connect(autocommit=False)
    setting.execute("set transaction isolation level repeatable read")
    setting.execute("select from rota.jobs")
    assert len(take(db, max_jobs=1)) == 1

    limit(setting, limit_key="k", max_running=1)
    setting.commit()

    assert claim(db) == []


def test_a_slot_goes_to_the_type_that_has_a_worker_however_many_have_none(db, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, limit_key="k", max_running=1)
    settle(db)
    enqueue(db, "first", limit_key="k", lease="1 day")
    (running,) = take(db)
    for number in range(50):
        enqueue(db, f"idle-{number // 2:02}", limit_key="k")
    last = enqueue(db, "worked-at", limit_key="k")
    assert take(db, max_jobs=100) == []
    settle_all(db, clock)

    finish(db, running)
    settle_all(db, clock)

    assert ids(take(db, job_types=["worked-at"])) == [last]


def test_a_full_queue_costs_a_claim_of_others_nothing_under_a_held_snapshot(db, connect, clock):
    clock.set("2026-01-12 10:00+00")
    limit(db, queue="other", max_running=1)
    settle(db)
    connect(autocommit=False).execute("set transaction isolation level repeatable read; select")
    for _ in range(300):
        enqueue(db, queue="other")
        finish(db, *claim(db, queues=["other"]))
    for queue in ("other", "other", "default"):
        enqueue(db, queue=queue)
    claim(db, queues=["other"], lease="1 day")
    read = "select pg_stat_get_xact_tuples_returned('rota.limit_slots_pkey'::regclass)"

    with db.transaction():
        before = scalar(db, read)
        (job,) = claim(db, queues=["default", "other"])

        assert scalar(db, read) - before < 20
    assert job.queue == "default"


@pytest.mark.parametrize("queues", [["default"], ["default", "other"]])
def test_a_session_that_finds_a_queue_full_walks_its_dead_slots_once(
    db, connect, clock, queues
):
    clock.set("2026-01-12 10:00+00")
    limit(db, queue="default", max_running=1)
    settle(db)
    connect(autocommit=False).execute("set transaction isolation level repeatable read; select")
    for _ in range(300):
        enqueue(db)
        finish(db, *claim(db))
    for queue in ("default", "default", "other"):
        enqueue(db, queue=queue)
    (running,) = claim(db, lease="1 day")
    fresh = connect()
    read = "select pg_stat_get_xact_tuples_returned('rota.limit_slots_pkey'::regclass)"
    claim(fresh, queues=queues)

    with fresh.transaction():
        before = scalar(fresh, read)
        assert claim(fresh, queues=queues) == []
        assert scalar(fresh, read) - before < 20

    finish(db, running)
    assert [job.queue for job in claim(fresh, queues=queues)] == ["default"]


@pytest.mark.parametrize(
    "subject", [{"queue": "default"}, {"job_type": "x"}, {"limit_key": "k"}], ids=str
)
def test_a_limit_that_was_lowered_lets_in_a_second_after_enough_have_ended(db, clock, subject):
    clock.set("2026-01-12 10:00+00")
    limit(db, **subject, max_running=6)
    settle_all(db, clock)
    for _ in range(8):
        enqueue(db, "x", limit_key="k")
    *ending, _last = take(db, lease="1 day")
    limit(db, **subject, max_running=2)
    for _ in range(60):
        clock.advance("0.5 s")
        call(db, "tick")

    finish(db, *ending)
    clock.advance("1.1 s")
    settle(db)

    assert len(ending) == 5
    assert len(take(db)) == 1


def _stopped(db, connect):
    """Let a session's next claim wait between its snapshot and the id of its transaction."""
    db.execute(
        """
        do $$
        begin
            execute replace(
                pg_get_functiondef('rota.claim_jobs'::regproc),
                'and j.run_at <= v_now',
                'and j.run_at <= v_now'
                    ' and (select pg_advisory_xact_lock_shared(4711)) is not null');
        end $$
        """
    )
    stop = connect()
    stop.execute("select pg_advisory_lock(4711)")
    return stop


@pytest.mark.parametrize("subject", [{"queue": "default"}, {"job_type": "x"}])
def test_set_limit_counts_a_claim_that_had_its_snapshot_before(db, connect, clock, subject):
    clock.set("2026-01-12 10:00+00")
    for _ in range(3):
        enqueue(db, lease="1 day")
    worker = connect(autocommit=False)
    (warm,) = claim(worker)
    finish(worker, warm)
    worker.commit()
    stop = _stopped(db, connect)

    with ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(claim, worker)
        waits = "select cardinality(pg_blocking_pids(%s)) > 0"
        wait_until(lambda: scalar(db, waits, worker.info.backend_pid))
        limit(db, **subject, max_running=1)
        settle(db)
        stop.execute("select pg_advisory_unlock(4711)")
        claimed = claiming.result()
    for _ in range(3):
        clock.advance("10 s")
        settle(db)
    worker.commit()
    clock.advance("10 s")

    assert len(claimed) + len(take(connect())) <= 1
