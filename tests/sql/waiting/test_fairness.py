"""The place of a job in its lane, where keys have fair shares."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from sql.helpers import (
    Db,
    call,
    claim,
    enqueue,
    owner,
    owners,
    pending,
    rows,
    scalar,
    settle,
    value,
)

pytestmark = pytest.mark.slow


def places(db: Db) -> dict[int, datetime]:
    return {row.id: row.own_place for row in rows(db, "select id, own_place from rota.jobs")}


def release(db: Db, jobs: list[Any]) -> None:
    call(db, "release_jobs", **owners(*jobs))


def end_together(db: Db, jobs: list[Any], outcome: str = "released") -> None:
    more = {"delay": "0"} if outcome == "snoozed" else {}
    call(db, "end_jobs", endings=json.dumps(
        [{**owner(job), "outcome": outcome, **more} for job in jobs]))  # fmt: skip


@pytest.mark.parametrize("give_back", [release, end_together])
def test_jobs_given_back_together_are_each_where_they_were(db, give_back):
    for key in "aabcaabd":
        enqueue(db, limit_key=key)
    before = places(db)

    give_back(db, claim(db, max_jobs=4))

    assert places(db) == before


def test_heads_of_ordering_keys_given_back_keep_their_turns(db):
    """The one that had to wait for its key has the lower id, and the later place."""
    enqueue(db, limit_key="x")
    line = [enqueue(db, ordering_key="k") for _ in range(2)]
    other = enqueue(db, ordering_key="l")
    while (job := claim(db)[0]).job_id != line[0]:
        value(db, "finish_job", **owner(job))
    value(db, "finish_job", **owner(job))
    before = places(db)
    assert before[other] < before[line[1]]

    release(db, claim(db, max_jobs=2)[::-1])

    assert places(db) == before


def test_a_claim_takes_jobs_of_places_that_are_still_to_come(db, clock):
    """Those of one key are microseconds apart, however many came at once."""
    clock.set("2026-01-01 00:00+00")
    enqueue(db, limit_key="k")
    others = [enqueue(db) for _ in range(3)]
    claim(db)

    assert [job.job_id for job in claim(db, max_jobs=10)] == others


def test_a_job_that_is_given_back_is_not_behind_the_backlog_of_its_key(db):
    first, *_ = [enqueue(db, limit_key="large") for _ in range(20)]
    (job,) = claim(db)

    release(db, [job])

    assert claim(db)[0].job_id == job.job_id == first


def test_a_job_that_comes_back_later_is_behind_its_key(db):
    first, second = (enqueue(db, limit_key="a") for _ in range(2))

    end_together(db, claim(db), "snoozed")

    assert [job.job_id for job in claim(db, max_jobs=2)] == [second, first]


@pytest.mark.parametrize("by", ["set_priority", "act"])
def test_a_job_that_is_given_back_to_another_lane_has_a_place_of_that(db, by):
    enqueue(db, limit_key="a")
    (job,) = claim(db)
    before = places(db)[job.job_id]
    enqueue(db, limit_key="b", priority=1)
    last = [enqueue(db, limit_key="a", priority=1) for _ in range(3)][-1]
    if by == "act":
        one = {"ids": [job.job_id]}
        call(db, "act_on_jobs", act="set_priority", filter=one, arguments={"priority": 1})
    else:
        value(db, "set_priority", job_id=job.job_id, priority=1)

    release(db, [job])

    now = places(db)
    assert now[job.job_id] > now[last] > before


def _aged(db, **arguments):
    return enqueue(db, priority=100, **arguments)


def _hold_by_pause(db):
    value(db, "pause_type", job_type="x")
    assert claim(db) == []


def _hold_by_limit(db):
    call(db, "set_limit", job_type="x", max_running=0)
    settle(db)
    assert claim(db) == []


@pytest.mark.parametrize(
    ("hold", "let_go"),
    [
        (_hold_by_pause, lambda db: value(db, "resume_type", job_type="x")),
        (_hold_by_limit, lambda db: call(db, "set_limit", job_type="x", max_running=5)),
    ],
)
def test_a_held_job_is_where_it_belongs_when_its_queue_ages_no_more(db, clock, hold, let_go):
    clock.set("2026-03-01 12:00+00")
    value(db, "set_queue", queue="default", ageing="1 day")
    job = _aged(db)
    hold(db)

    value(db, "set_queue", queue="default", reset=True)
    _maintain(db, clock)
    let_go(db)
    _maintain(db, clock)

    assert [c.job_id for c in claim(db)] == [job]


def test_a_job_stands_behind_no_aged_one_of_its_key_when_its_queue_ages_no_more(db, clock):
    """Their places may be years ahead, where no claim looks."""
    clock.set("2026-03-01 12:00+00")
    value(db, "set_queue", queue="default", ageing="1 day")
    aged = _aged(db, limit_key="k")
    value(db, "set_queue", queue="default", reset=True)
    new = enqueue(db, limit_key="k")
    _maintain(db, clock)
    late = enqueue(db, limit_key="k")

    assert [c.job_id for c in claim(db, max_jobs=5)] == [new, late, aged]


def test_jobs_of_open_transactions_are_where_they_belong_too(db, connect, clock):
    """One was not to be seen yet, the other was locked, again and again."""
    clock.set("2026-03-01 12:00+00")
    value(db, "set_queue", queue="default", ageing="1 day")
    locked = _aged(db)
    producer, claimer = connect(autocommit=False), connect(autocommit=False)
    unseen = _aged(producer)
    assert len(claim(claimer)) == 1
    value(db, "set_queue", queue="default", reset=True)
    _maintain(db, clock)

    producer.commit()
    claimer.rollback()
    canceller = connect(autocommit=False)
    value(canceller, "cancel_job", job_id=locked)
    _maintain(db, clock)
    canceller.rollback()
    _maintain(db, clock)

    assert {c.job_id for c in claim(db, max_jobs=5)} == {locked, unseen}
    assert pending(db) == []


def test_a_stranger_keeps_no_job_where_it_aged(db, connect, clock):
    """One was not to be seen yet, the other was locked, when the queue was looked at."""
    clock.set("2026-03-01 12:00+00")
    value(db, "set_queue", queue="default", ageing="1 day")
    locked = _aged(db)
    producer, claimer, stranger = (connect(autocommit=False) for _ in range(3))
    unseen = _aged(producer)
    assert len(claim(claimer)) == 1
    enqueue(stranger, queue="other")
    value(db, "set_queue", queue="default", reset=True)
    settle(db)

    producer.commit()
    claimer.rollback()
    _maintain(db, clock)

    assert {c.job_id for c in claim(db, max_jobs=5)} == {locked, unseen}


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_first_key_comes_in_beside_the_first_key_of_another_session(db, connect, level):
    """The older snapshot does not show that the queue has fair shares by now."""
    producer = connect(autocommit=False)
    producer.execute(f"set transaction isolation level {level}".encode())
    rows(producer, "select 1")
    enqueue(db, limit_key="a")

    enqueue(producer, limit_key="b")
    call(producer, "enqueue_many", jobs=json.dumps([{"job_type": "x", "limit_key": "c"}]))
    producer.commit()

    assert len(claim(db, max_jobs=5)) == 3


def test_an_older_snapshot_gives_no_job_the_place_of_before_for_long(db, connect, clock):
    """In it a queue ages as it did when its transaction began."""
    clock.set("2026-03-01 12:00+00")
    value(db, "set_queue", queue="default", ageing="1 day")
    producer = connect(autocommit=False)
    producer.execute("set transaction isolation level repeatable read")
    rows(producer, "select * from rota.jobs")
    value(db, "set_queue", queue="default", reset=True)
    _maintain(db, clock)

    late = enqueue(producer, priority=5)
    producer.commit()
    _maintain(db, clock)

    assert [c.job_id for c in claim(db)] == [late]
    assert pending(db) == []


@pytest.mark.parametrize("is_batch", [False, True])
def test_job_for_later_takes_its_turn_when_it_is_due(db, clock, is_batch):
    clock.set("2026-03-01 12:00+00")
    for _ in range(9):
        enqueue(db, limit_key="a")
    later = {"job_type": "noop", "limit_key": "b", "delay": "1 minute"}
    if is_batch:
        call(db, "enqueue_many", jobs=json.dumps([later]))
    else:
        enqueue(db, **later)
    clock.advance("61 s")
    settle(db)

    taken = [job.job_id for job in claim(db, max_jobs=2)]

    assert scalar(db, "select id from rota.jobs where limit_key = 'b'") in taken


def test_another_ageing_moves_the_jobs_that_wait(db, clock):
    clock.set("2026-03-01 12:00+00")
    value(db, "set_queue", queue="default", ageing="30 days")
    old = _aged(db)
    value(db, "set_queue", queue="default", ageing="1 second")
    _maintain(db, clock)
    enqueue(db, priority=200)

    assert [c.job_id for c in claim(db)] == [old]


def _maintain(db, clock):
    for _ in range(8):
        clock.advance("5 seconds")
        settle(db)


def written(db: Db) -> list[int]:
    return list(*rows(
        db,
        "select pg_stat_get_xact_tuples_inserted('rota.jobs'::regclass),"
        " pg_stat_get_xact_tuples_updated('rota.jobs'::regclass)",
    ))  # fmt: skip


def test_a_batch_of_a_queue_that_ages_has_the_places_of_its_priorities(db):
    value(db, "set_queue", queue="ages", ageing="1 minute")
    jobs = [{"job_type": "t", "queue": "ages", "priority": n} for n in (10, -3)]

    call(db, "enqueue_many", jobs=json.dumps(jobs))

    assert rows(
        db, "select own_lane, extract(epoch from own_place - run_at) from rota.jobs order by id"
    ) == [(0, 600), (0, -180)]


@pytest.mark.parametrize("kind", [{"limit_key": "k"}, {"job_type": "few"}, {"queue": "ages"}])
def test_a_batch_is_written_once_with_its_places(db, kind):
    enqueue(db, limit_key="other")
    value(db, "set_limit", job_type="few", max_running=2)
    value(db, "set_queue", queue="ages", ageing="1 minute")
    settle(db)

    with db.transaction():
        inserted, updated = written(db)
        call(db, "enqueue_many", jobs=json.dumps([{"job_type": "t"} | kind] * 5))
        now = written(db)

    assert now == [inserted + 5, updated]


def test_a_job_of_a_batch_that_is_there_takes_the_place_of_no_other(db):
    value(db, "set_limit", limit_key="k", max_running=1)
    settle(db)
    keyed = {"job_type": "t", "limit_key": "k", "idempotency_key": "a"}
    call(db, "enqueue_many", jobs=json.dumps([keyed]))
    claim(db)

    found, new = call(db, "enqueue_many", jobs=json.dumps(
        [keyed, keyed | {"idempotency_key": "b"}]))  # fmt: skip

    assert (found.is_new, new.is_new) == (False, True)
    held = rows(db, "select id from rota.jobs where hold is not null")
    assert held == []


@pytest.mark.parametrize("key", ["a", None])
def test_a_key_of_a_batch_has_one_share_for_all_its_types(db, key):
    enqueue(db, limit_key="z", priority=9)
    many = [{"job_type": f"t{n % 3}", "limit_key": key} for n in range(9)]
    few = [{"job_type": "x", "limit_key": "b"}] * 9
    batch = [job for pair in zip(many, few, strict=True) for job in pair]

    call(db, "enqueue_many", jobs=json.dumps(batch))
    call(db, "enqueue_many", jobs=json.dumps(batch))

    taken = [job.job_type for job in claim(db, max_jobs=24)]
    assert taken.count("x") == 12


def test_the_kinds_of_a_batch_share_what_their_limit_leaves(db):
    value(db, "set_limit", job_type="few", max_running=3)
    settle(db)

    call(db, "enqueue_many", jobs=json.dumps(
        [{"job_type": "few", "priority": n % 2} for n in range(8)]))  # fmt: skip

    assert rows(
        db, "select priority, hold, count(*) from rota.jobs group by 1, 2 order by 1, 2"
    ) == [(0, "type few", 1), (0, None, 3), (1, "type few", 4)]
