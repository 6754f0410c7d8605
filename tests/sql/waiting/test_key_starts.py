"""The search for the live jobs of an ordering key begins behind those that have ended."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import call, claim, one, rows, run, scalar, settle, value
from sql.waiting.test_order import claimed, finish, ordered

pytestmark = pytest.mark.slow

STARTS = "select first_id from rota.key_starts order by id"


@pytest.fixture
def begun(db, clock, holder):
    """The ids of 300 ended jobs of a key, and of one that runs and wrote its start."""
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    jobs = Jsonb([{"job_type": "x", "ordering_key": "a"}] * 300)
    ids = [job.job_id for job in call(db, "enqueue_many", jobs=jobs)]
    db.execute("update rota.jobs set status = 'queued'")
    for job in claim(db, max_jobs=1000):
        finish(db, job)
    db.execute("delete from rota.key_starts")  # which the last ends wrote
    ids.append(ordered(db))
    claim(db)
    clock.advance("10 s")
    return ids


def walked(db, what):
    """Return how many index entries of ordering keys the server walks in a call."""
    query = (
        "select sum(pg_stat_get_xact_tuples_returned(i.indexrelid)) from pg_index as i"
        " where i.indexrelid::regclass::text like 'rota.jobs_ordering_key%'"
    )
    with db.transaction():
        before = scalar(db, query)
        what()
        return scalar(db, query) - before


@pytest.fixture
def holder(connect):
    """A session that holds a snapshot, so that no index entry goes."""
    holder = connect()
    holder.execute("begin isolation level repeatable read")
    holder.execute("select from rota.jobs")
    return holder


def test_what_has_ended_costs_a_key_nothing_under_a_held_snapshot(db, begun, connect):
    other = connect()

    assert walked(other, lambda: ordered(other)) < 10
    value(other, "finish_job", job_id=begun[-1], lease_token=run(db, begun[-1]).lease_token)
    job = claim(other)[0]
    assert walked(other, lambda: finish(other, job)) < 10
    assert walked(other, lambda: ordered(other)) < 20
    assert rows(db, STARTS) == [(begun[-1],)]


def test_the_ends_of_a_key_that_is_never_idle_write_its_start(db, clock, holder):
    clock.set("2031-03-01 12:00+00")
    jobs = Jsonb([{"job_type": "x", "ordering_key": "a"}] * 250)
    ids = [job.job_id for job in call(db, "enqueue_many", jobs=jobs)]
    for _ in range(110):
        finish(db, *claim(db))
    (start,) = rows(db, STARTS)
    assert ids[95] < start.first_id < ids[110]
    clock.advance("1 s")
    job = claim(db)[0]
    assert walked(db, lambda: finish(db, job)) < 20

    for _ in range(110):
        finish(db, *claim(db))

    assert len(rows(db, STARTS)) == 2


def test_a_start_that_is_young_or_not_the_one_searched_from_is_not_raised(db, begun, clock):
    raise_it = "select rota._raise_start('a', %s, %s)"

    scalar(db, raise_it, begun[-1] + 10, 0)
    assert rows(db, STARTS) == [(begun[-1],)]
    scalar(db, raise_it, begun[-1] + 10, begun[-1])
    assert rows(db, STARTS) == [(begun[-1],), (begun[-1] + 10,)]
    scalar(db, raise_it, begun[-1] + 20, begun[-1] + 10)
    assert len(rows(db, STARTS)) == 2
    clock.advance("1 s")
    scalar(db, raise_it, begun[-1] + 20, begun[-1] + 10)
    assert len(rows(db, STARTS)) == 3


def test_a_job_that_comes_back_below_the_start_of_its_key_is_its_head(db, begun):
    finish_last(db, begun)
    assert value(db, "retry_job", job_id=begun[0]) == "queued"

    later = ordered(db)

    assert rows(db, STARTS) == [(begun[-1],), (0,)]
    assert claimed(db) == [begun[0]]
    assert run(db, later).status == "blocked"


def test_a_job_that_comes_back_behind_the_head_of_its_key_is_the_next(db, begun):
    later = ordered(db)
    assert value(db, "retry_job", job_id=begun[0]) == "blocked"
    finish_last(db, begun)

    assert claimed(db) == [begun[0]]
    assert run(db, later).status == "blocked"


def test_a_job_that_comes_late_below_the_start_of_its_key_is_its_head(db, begun):
    finish_last(db, begun)

    assert scalar(db, "select rota._may_be_head('a', %s)", begun[0])
    assert rows(db, STARTS) == [(begun[-1],), (0,)]


def test_a_job_that_is_a_moment_late_goes_before_those_that_come_later(db, begun, clock):
    finish_last(db, begun)
    scalar(db, "select rota._raise_start('a', %s, %s)", begun[-1] + 1, begun[-1])
    came_late(db, begun[-1])

    later = ordered(db)

    assert run(db, later).status == "blocked"
    settle(db)
    assert claimed(db) == [begun[-1]]


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_job_that_is_late_is_found_by_its_check(db, begun, clock, is_idle):
    if is_idle:
        finish_last(db, begun)
    came_late(db, begun[0])
    later = ordered(db)
    settle(db)
    clock.advance("1 s")
    settle(db)
    assert rows(db, STARTS)[1] == (0,)

    if not is_idle:
        finish_last(db, begun)

    assert claimed(db) == [later if is_idle else begun[0]]


def test_a_job_that_is_let_in_below_the_start_of_its_key_is_its_head(db, begun):
    came_late(db, begun[0])
    db.execute("update rota.key_starts set written_at = rota.now()")
    finish_last(db, begun)

    later = ordered(db)

    assert rows(db, STARTS) == [(begun[-1],), (0,)]
    assert claimed(db) == [begun[0]]
    assert run(db, later).status == "blocked"


def test_starts_go_after_an_hour_the_newest_last_and_under_the_lock(db, begun, connect, clock):
    clock.advance("50 minutes")
    finish_last(db, begun)
    value(db, "retry_job", job_id=begun[0])
    both = [(begun[-1],), (0,)]
    assert rows(db, STARTS) == both
    clock.advance("20 minutes")
    db.execute("update rota.maintenance set done_at = rota.now() where task = 'tick alone'")

    with connect(autocommit=False) as stranger:
        one(stranger, "tick")
        assert rows(stranger, STARTS) == both
    clock.advance("31 s")
    assert one(db, "tick").others_deleted == 1
    assert rows(db, STARTS) == [(0,)]
    clock.advance("1 hour")
    with connect(autocommit=False) as producer:
        producer.execute("select rota._try_lock('rota.order a')")
        one(db, "tick")
        assert rows(db, STARTS) == [(0,)]
    clock.advance("6 minutes")
    one(db, "tick")
    assert rows(db, STARTS) == []


def test_starts_go_also_where_no_tick_is_alone(db, begun, clock):
    finish_last(db, begun)
    assert rows(db, STARTS) == [(begun[-1],)]
    clock.advance("2 hours")

    db.execute("select * from rota.tick() where %s", (True,))

    assert rows(db, STARTS) == []


def finish_last(db, begun):
    token = run(db, begun[-1]).lease_token
    value(db, "finish_job", job_id=begun[-1], lease_token=token)


def came_late(db, job_id):
    """Let an ended job be one that has just been committed, behind others."""
    value(db, "retry_job", job_id=job_id)
    db.execute("update rota.jobs set status = 'blocked' where id = %s", (job_id,))
    db.execute("delete from rota.key_starts where first_id = 0")
    db.execute("select rota._add_checks('order', '{a}')")
