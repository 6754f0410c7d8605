"""schedules.py in small, and a deploy of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

from races.bench import Bench
from races.game import choose
from races.harness import Session, call
from races.instrument import instrument
from races.schedules import SCHEDULES
from support.clock import Clock
from support.mutation import mutate

SEED = 20260328
Connect = Callable[..., psycopg.Connection[Any]]


@pytest.fixture
def bench(connect: Connect) -> Iterator[Bench]:
    instrument(connect())
    with closing(Bench(connect, SCHEDULES)) as bench:
        yield bench


@pytest.mark.slow
def test_any_two_operations_are_like_one_after_the_other_wherever_one_is_stopped(
    bench: Bench,
) -> None:
    """A is stopped before each of its statements in turn; B does all of its own meanwhile."""
    runs = [run for pair in choose(SEED, 12, SCHEDULES) for run in bench.play_pair(*pair)]

    assert ["\n".join([str(run), *run.problems]) for run in runs if run.problems] == []
    assert len(runs) > 40


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_check_waits_for_the_open_end_of_the_job_that_a_schedule_follows(
    a: Session, b: Session, db: psycopg.Connection[Any], clock: Clock, is_guarded: bool
) -> None:
    """A ends the job and stays open; B ticks, and then does the check of that; A commits."""
    clock.set("2026-03-01 11:00:00+00")
    for step in SCHEDULES.states["after, due, its job retried"]:
        clock.advance("1 minute")
        db.execute(step.encode())
    clock.set("2026-03-01 12:00:00+00")
    if not is_guarded:
        mutate(db, "_check_schedule", "elsif exists (", "elsif false and exists (")

    with a.transaction():
        a.fetch("select rota.finish_job(j.id, j.lease_token) from rota.jobs as j")
        b.fetch("select rota._enqueue_due_schedules(1000)")
        b.fetch("select rota._do_checks(1000)")
    clock.advance("1 second")
    b.fetch("select rota._do_checks(1000)")

    planned = db.execute("select next_run_at is not null from rota.job_definitions").fetchone()
    assert planned == (is_guarded,)


def test_a_deploy_of_eight_puts_one_schedule_in(
    session: Callable[[], Session], db: psycopg.Connection[Any], clock: Clock
) -> None:
    """Eight sessions say the same at once, again and again; then each says something else."""
    clock.set("2026-03-01 12:00:00+00")
    sessions = [session() for _ in range(8)]
    same = call("schedule_job", name="s", schedule="0 * * * *", job_type="x")

    for _ in range(10):
        db.execute("delete from rota.job_definitions")
        with ThreadPoolExecutor(8) as threads:
            answers = [*threads.map(lambda each: each.fetch(*same)[0][0], sessions)]
        assert sorted(answers) == ["created", *["unchanged"] * 7]

    with ThreadPoolExecutor(8) as threads:
        answers = [
            *threads.map(
                lambda n: sessions[n].fetch(
                    *call("schedule_job", name="s", schedule=f"{n} * * * *", job_type="x")
                )[0][0],
                range(1, 8),
            )
        ]
    assert answers == ["changed"] * 7
    assert db.execute("select count(*) from rota.job_definitions").fetchone() == (1,)


def test_schedule_job_waits_for_nobody_when_all_is_as_it_says(
    a: Session, b: Session, clock: Clock
) -> None:
    """A enqueues for the schedule and stays open; B says again what is so."""
    clock.set("2026-03-01 12:00:00+00")
    same = call("schedule_job", name="s", schedule="0 * * * *", job_type="x")
    a.fetch(*same)
    clock.advance("1 hour")

    with a.transaction():
        a.fetch("select rota._enqueue_due_schedules(10)")
        answer = b.start(*same).result(timeout=5)

    assert answer[0][0] == "unchanged"


@pytest.mark.own_session
@pytest.mark.parametrize("makes_it", [True, False])
def test_a_schedule_that_goes_to_another_queue_is_not_taken_from_there(
    a: Session, b: Session, db: psycopg.Connection[Any], clock: Clock, makes_it: bool
) -> None:
    """A gives a schedule to another queue and stays open; B, kept from that, changes it."""
    clock.set("2026-03-01 12:00:00+00")
    there = call("schedule_job", name="s", schedule="@daily", job_type="x", queue="theirs")
    changed = call("schedule_job", name="s", schedule="@hourly", job_type="y", queue="mine")
    if not makes_it:
        a.fetch(*call("schedule_job", name="s", schedule="@daily", job_type="x", queue="mine"))
    name = f"confined_{db.info.dbname}"[:63]
    db.execute(f'create role "{name}"')
    for (statement,) in a.fetch("select rota.grant_statements('operator', %s)", [name]):
        db.execute(statement)
    b.fetch("select rota.grant_queue(%s, 'mine', 'operator')", [name])
    b.fetch(f'set session authorization "{name}"')

    with a.transaction():
        a.fetch(*there)
        pending = b.start(*changed)
        pending.wait_blocked(by=a)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        pending.result()

    assert db.execute("select queue, job_type from rota.job_definitions").fetchall() == [
        ("theirs", "x")
    ]
    db.execute(f'drop owned by "{name}"')
    db.execute(f'drop role "{name}"')


def test_a_tick_that_stays_open_keeps_nothing_from_others(
    a: Session, b: Session, clock: Clock
) -> None:
    """A enqueues for one schedule and stays open; B for the others, then that one too."""
    clock.set("2026-03-01 12:00:00+00")
    for name in "sat":
        a.fetch(*call("schedule_job", name=name, schedule="0 * * * *", job_type="x"))
    clock.advance("1 hour")

    a.fetch("begin")
    assert a.fetch("select rota._enqueue_due_schedules(1)") == [(1,)]
    meanwhile = b.start("select rota._enqueue_due_schedules(1000)").result(timeout=5)
    a.fetch("rollback")

    assert meanwhile == [(2,)]
    assert b.fetch("select rota._enqueue_due_schedules(1000)") == [(1,)]


def test_a_forgotten_tick_keeps_no_schedule_from_others(
    a: Session, b: Session, clock: Clock
) -> None:
    """One that is not alone in its transaction leaves them for 3 s to those that are."""
    clock.set("2026-03-01 12:00:00+00")
    a.fetch(*call("schedule_job", name="s", schedule="* * * * *", job_type="x"))
    for jobs, (seconds, ticker) in enumerate(((60, b), (64, a)), 1):
        clock.advance(f"{seconds} seconds")
        b.fetch("update rota.maintenance set done_at = rota.now() where task = 'tick alone'")
        with a.transaction():
            a.fetch("select 1")
            a.fetch("select from rota.tick()")
            b.fetch("select from rota.tick()")
            assert ticker.fetch("select count(*) from rota.jobs") == [(jobs,)]
