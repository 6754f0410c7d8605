"""All upkeep in one call."""

from __future__ import annotations

from sql.helpers import call, claim, enqueue, one, owner, rows, run, running, scalar, value
from sql.test_50_sweep import POISON
from sql.test_52_retention import end, partitions


def test_tick_says_what_it_did(db, clock):
    clock.set("2031-03-01 12:00+00")
    running(db)
    clock.advance("1 hour")

    did = one(db, "tick")

    assert did.jobs_swept == 1
    assert (did.jobs_deleted, did.partitions_created) == (0, 8)
    assert did.partitions_dropped > 0


def test_tick_is_all_that_a_failed_job_needs(db, clock):
    clock.set("2026-01-01 00:00+00")
    running(db)
    clock.advance("2 minutes")

    one(db, "tick")
    clock.advance("2 minutes")

    assert [job.attempt for job in claim(db)] == [2]


def test_tick_makes_and_drops_nothing_inside_a_transaction(db, clock):
    clock.set("2031-03-01 12:00+00")
    before = partitions(db)

    with db.transaction():
        db.execute("select 1")
        did = one(db, "tick")

    assert (did.partitions_created, did.partitions_dropped) == (0, 0)
    assert partitions(db) == before
    clock.advance("11 s")
    assert one(db, "tick").partitions_created == 8


def test_tick_does_not_wait_for_a_reader_and_works_next_time(db, connect, clock):
    end(db, "succeeded")
    clock.set("2031-03-01 12:00+00")
    before = partitions(db)
    reader = connect(autocommit=False)
    reader.execute("select count(*) from rota.job_runs")
    db.execute("set statement_timeout = '5s'")

    job = running(db)
    clock.advance("2 minutes")
    did = one(db, "tick")

    assert (did.jobs_swept, did.partitions_created, did.partitions_dropped) == (1, 0, 0)
    assert partitions(db) == before
    assert run(db, job.job_id).status == "failed"
    reader.rollback()
    clock.advance("11 s")
    did = one(db, "tick")
    assert (did.partitions_created, did.partitions_dropped) == (8, len(before))


def test_tick_lets_jobs_finish_while_a_reader_holds_the_history(db, connect, clock):
    end(db, "succeeded")
    clock.set("2031-03-01 12:00+00")
    job = running(db)
    reader = connect(autocommit=False)
    reader.execute("select count(*) from rota.job_runs")
    one(db, "tick")

    db.execute("set lock_timeout = '1s'")
    assert value(db, "finish_job", **owner(job)) == "finished"


def test_tick_keeps_the_sweep_when_retention_fails(db, clock):
    clock.set("2031-03-01 12:00+00")
    job = running(db)
    db.execute(
        "create function public.broken() returns trigger language plpgsql as"
        " $$ begin raise exception 'broken'; end; $$;"
        "create trigger broken before update on rota.upkeep"
        " for each row execute function public.broken();"
    )
    clock.advance("1 hour")

    did = one(db, "tick")

    assert did.jobs_swept == 1
    assert run(db, job.job_id).status == "failed"


def test_tick_does_the_rest_when_a_job_cannot_be_swept(db, clock):
    clock.set("2031-03-01 12:00+00")
    poison, job = running(db), running(db)
    db.execute(POISON.format(poison.job_id))
    clock.advance("1 hour")

    did = one(db, "tick")

    assert (did.jobs_swept, did.partitions_created) == (1, 8)
    assert run(db, poison.job_id).status == "running"
    assert run(db, job.job_id).status == "failed"


def test_tick_finds_nothing_to_do_on_an_empty_database(db):
    one(db, "tick")

    with db.transaction():
        assert call(db, "tick") == [(0, 0, 0, 0, 0)]
        assert scalar(db, "select pg_current_xact_id_if_assigned()::text") is None
    assert rows(db, "select * from rota.jobs") == []
    assert enqueue(db) == 1
