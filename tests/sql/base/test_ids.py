"""Ids are given once: in many databases by their numbers, after a promotion by a leap."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from sql.helpers import call, enqueue, refused, scalar, value
from support.waiting import wait_until

LEAP = 2**30
ENQUEUES = {
    "enqueue": lambda db: enqueue(db),
    "with a key": lambda db: enqueue(db, idempotency_key="k", on_conflict="replace"),
    "in order": lambda db: enqueue(db, ordering_key="k"),
    "many": lambda db: call(db, "enqueue_many", jobs='[{"job_type": "x"}]')[0].job_id,
}


@pytest.mark.parametrize("number", [0, 1, 1023])
def test_set_database_number_puts_it_into_each_new_id(db, number):
    value(db, "set_database_number", number=17)
    before = enqueue(db)

    value(db, "set_database_number", number=number)
    ids = [make(db) for make in ENQUEUES.values()]

    assert ids == sorted(set(ids))
    assert ids[0] > before
    assert {value(db, "database_number_of", job_id=job_id) for job_id in ids} == {number}
    assert value(db, "database_number") == number


def test_set_database_number_again_changes_nothing(db):
    value(db, "set_database_number", number=5)
    first = enqueue(db)

    value(db, "set_database_number", number=5)

    assert enqueue(db) == first + 1024


@pytest.mark.parametrize("number", [-1, 1024, None])
def test_set_database_number_refuses_what_is_no_number(db, number):
    with refused("number"):
        value(db, "set_database_number", number=number)


@pytest.mark.own_session
def test_set_database_number_waits_for_those_that_enqueue(connect, db):
    """An id that an open transaction has drawn is not given again."""
    value(db, "set_database_number", number=5)
    producer, operator = connect(autocommit=False), connect()
    drawn = enqueue(producer)
    with ThreadPoolExecutor() as threads:
        setting = threads.submit(value, operator, "set_database_number", number=6)
        query = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        wait_until(lambda: scalar(db, query, operator.info.backend_pid))
        producer.commit()
        setting.result()

    assert enqueue(db) > drawn


@pytest.mark.slow
@pytest.mark.own_session
def test_producers_go_on_while_set_database_number_waits(connect):
    """A enqueues and stays open; the operator waits for it; B enqueues meanwhile."""
    a, operator, b = connect(autocommit=False), connect(), connect()
    b.execute("set statement_timeout = '1s'")
    before = value(b, "database_number")
    enqueue(a)

    with ThreadPoolExecutor() as threads:
        setting = threads.submit(value, operator, "set_database_number", number=6)
        ids = []
        try:
            while not setting.done():
                ids.append(enqueue(b))
        finally:
            a.rollback()

        with pytest.raises(psycopg.errors.LockNotAvailable, match="stays open") as caught:
            setting.result()
    assert f"pg_terminate_backend({a.info.backend_pid});" in caught.value.diag.message_hint
    assert len(ids) > 10
    assert value(b, "database_number") == before


@pytest.mark.slow
@pytest.mark.own_session
def test_a_forgotten_end_of_a_move_is_ended(connect, db):
    call(db, "set_database_number", number=5)
    mover = connect()
    mover.execute("begin")
    call(mover, "receive_moves", move_id=99, from_database=6, queue="q", jobs="[]",
        settle_above=9)  # fmt: skip
    db.execute("set statement_timeout = '20s'")

    enqueue(db)

    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        mover.execute("commit")


@pytest.mark.slow
@pytest.mark.own_session
def test_a_forgotten_set_database_number_is_ended(connect):
    """An operator sets a number and stays open; the server ends the session; B enqueues."""
    operator, b = connect(autocommit=False), connect()
    b.execute("set statement_timeout = '10s'")
    before = value(b, "database_number")
    value(operator, "set_database_number", number=6)

    enqueue(b)

    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        operator.commit()
    assert value(b, "database_number") == before


def pretend_promotion(db):
    """Let the ids before be given on another timeline than the server's."""
    scalar(db, "select setval('rota.id_timeline', 77)")


def test_an_installation_knows_the_timeline_of_its_server(db):
    assert scalar(db, "select last_value = rota._timeline() from rota.id_timeline")


@pytest.mark.own_session
@pytest.mark.parametrize("way", ENQUEUES)
@pytest.mark.parametrize("number", [None, 3])
def test_the_first_id_of_a_new_timeline_comes_after_a_leap(connect, db, clock, number, way):
    """It is the longer, the longer ago the last tick was that is known here."""
    clock.set("2026-01-12 09:00+00")
    db.execute(
        "update rota.maintenance set done_at = rota.now() - interval '10 s' where task = 'tick'"
    )
    if number is not None:
        value(db, "set_database_number", number=number)
    before = enqueue(db)
    step = enqueue(db) - before
    pretend_promotion(db)

    first = ENQUEUES[way](connect())
    second = enqueue(connect())

    assert first == before + 2 * step + (LEAP + 10 * (1 << 16)) * step
    assert second == first + step


@pytest.mark.own_session
def test_a_schedule_leaps_too(connect, db, clock):
    clock.set("2026-01-12 09:00+00")
    before = enqueue(db)
    call(db, "schedule_job", name="s", schedule="every 1 minute", job_type="x")
    pretend_promotion(db)

    clock.advance("1 minute")
    call(connect(), "tick")

    assert scalar(db, "select max(job_id) from rota.occurrences") > before + LEAP


@pytest.mark.own_session
def test_who_comes_first_on_a_new_timeline_holds_up_nobody(connect, db):
    """A draws an id after the leap and stays open; B gets the next; A rolls back."""
    pretend_promotion(db)
    a, b = connect(autocommit=False), connect()
    b.execute("set statement_timeout = '5s'")

    drawn = enqueue(a)
    other = enqueue(b)
    a.rollback()

    step = other - drawn
    assert 0 < step < LEAP
    assert enqueue(a) == other + step


@pytest.mark.own_session
def test_who_leaps_while_another_waits_for_that_does_not_hold_it_up(connect, db):
    """A and B both find a new timeline; one of them leaps, and stays open."""
    pretend_promotion(db)
    sessions = [connect(autocommit=False), connect(autocommit=False)]
    for session in sessions:
        session.execute("set statement_timeout = '10s'")
    before = connect(autocommit=False)
    before.execute("lock table rota.upgrade_log in share update exclusive mode")
    with ThreadPoolExecutor() as threads:
        drawn = [threads.submit(enqueue, session) for session in sessions]
        query = (
            "select count(*) = 2 from pg_locks"
            " where relation = 'rota.upgrade_log'::regclass and not granted"
        )
        wait_until(lambda: scalar(db, query))
        before.rollback()

        first, second = sorted(future.result() for future in drawn)

    assert first > LEAP
    assert second == first + 1
