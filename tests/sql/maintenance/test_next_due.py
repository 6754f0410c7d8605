"""When something comes due of which nobody will ring."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from sql.helpers import Db, call, claim, enqueue, owner, refused, scalar, value


def next_due_in(db: Db, *queues: str) -> float | None:
    """Return the seconds, however long the last question took."""
    db.execute("select set_config('rota.scan_next_' || (hashtext('next') & 15), '', false)")
    due_in = value(db, "next_due_in", queues=list(queues) or ["default"])
    return due_in and due_in.total_seconds()


def test_nothing_is_due_in_an_empty_queue_nor_what_is_due_already_or_late(db):
    assert next_due_in(db) is None
    enqueue(db)
    enqueue(db, delay="61 s")
    enqueue(db, delay="5 s", queue="other")

    assert next_due_in(db) is None


def test_what_is_due_next_is_the_first_of_all_priorities_and_queues(db):
    for queue, priority, seconds in (("a", 1, 40), ("a", 5, 20), ("b", 9, 30), ("c", 1, 10)):
        enqueue(db, queue=queue, priority=priority, delay=f"{seconds} s")
        enqueue(db, queue=queue, priority=priority)

    due_in = [next_due_in(db, *queues) for queues in ("a", "b", "ab", "ba")]

    assert due_in == pytest.approx([20, 30, 20, 20], abs=5)


def test_a_retry_is_due_next(db):
    enqueue(db, backoff=psycopg.types.json.Jsonb({"kind": "fixed", "base_seconds": 20}))
    (job,) = claim(db)
    call(db, "fail_job", **owner(job), error="e")

    assert next_due_in(db) == pytest.approx(20, abs=5)


@pytest.mark.parametrize("bound", [{"queue": "default"}, {"job_type": "x"}, {"limit_key": "k"}])
def test_the_next_start_at_a_rate_is_due_next(db, bound):
    call(db, "set_limit", **bound, max_starts=3, per="1 minute")
    for _ in range(2):
        enqueue(db, "x", limit_key="k")
    assert len(claim(db)) == 1
    for _ in range(3):
        assert claim(db) == []
        call(db, "tick")

    assert 0 < next_due_in(db) <= 20


def test_a_later_job_of_a_line_is_due_next_in_its_queue(db):
    enqueue(db, limit_key="k", delay="20 s")
    for _ in range(2):
        call(db, "tick")

    assert next_due_in(db) == pytest.approx(20, abs=5)
    assert next_due_in(db, "other") is None


@pytest.mark.parametrize("bound", [None, {"queue": "default"}, {"limit_key": "k"}])
def test_what_came_due_since_the_look_is_told(db, clock, bound):
    clock.set("2026-01-12 10:00+00")
    if bound is None:
        enqueue(db, delay="2 s")
    else:
        call(db, "set_limit", **bound, max_starts=1, per="2 s")
        for _ in range(2):
            enqueue(db, limit_key="k")
        assert len(claim(db)) == 1
        assert claim(db) == []
        call(db, "tick")
    clock.advance(timedelta(seconds=3))

    due_in = [value(db, "next_due_in", since=f"{n} s") for n in (0, 0.9, 1.1)]

    assert due_in == [None, None, timedelta(0)]


def test_where_a_look_takes_long_the_next_is_later(db):
    enqueue(db, delay="5 s")
    db.execute(
        """
        select rota._keep_scan_start(
            'next', (extract(epoch from rota.now() + '20 s') * 1000000)::bigint::text)
        """
    )

    told = value(db, "next_due_in").total_seconds()

    assert [told, next_due_in(db)] == pytest.approx([20, 5], abs=3)


@pytest.mark.parametrize("since", [None, "-1 s", "61 min"])
def test_next_due_in_names_a_bad_argument(db, since):
    with refused("since"):
        call(db, "next_due_in", since=since)


def test_nothing_is_due_next_in_a_paused_queue(db):
    enqueue(db, delay="20 s")
    call(db, "pause_queue", queue="default")

    assert next_due_in(db) is None
