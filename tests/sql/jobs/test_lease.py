"""Keeping a job alive."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest

from sql.helpers import (
    call,
    claim,
    enqueue,
    one,
    owner,
    owners,
    poison,
    raises,
    refused,
    run,
    running,
    value,
)
from sql.jobs.test_claim import BAD_LEASES


def test_heartbeat_moves_the_end_of_the_lease(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    now = clock.advance("50 s")

    beat = one(db, "heartbeat", **owner(job))

    assert beat == (now + timedelta(minutes=1), False, False)
    row = run(db, job.job_id)
    assert (row.locked_until, row.updated_at) == (now + timedelta(minutes=1), now)
    assert (row.lease_token, row.attempts) == (job.lease_token, 1)


def test_heartbeat_takes_the_lease_of_argument_then_job_then_queue(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="q", lease="3 s")
    of_queue, of_job = running(db, queue="q"), running(db, queue="q", lease="2 s")

    for job, lease, seconds in [
        (of_queue, None, 3),
        (of_queue, "1 s", 1),
        (of_job, None, 2),
        (of_job, "1 s", 1),
    ]:
        until = now + timedelta(seconds=seconds)
        assert one(db, "heartbeat", **owner(job), lease=lease).locked_until == until
        assert one(db, "heartbeat_jobs", **owners(job), lease=lease).locked_until == until


def test_heartbeat_gives_a_full_lease_late_in_a_transaction(db, connect, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    with connect(autocommit=False) as old:
        old.execute("select 1")
        until = clock.advance("1 hour") + timedelta(minutes=1)

        assert one(old, "heartbeat_jobs", **owners(job)).locked_until == until
        assert one(old, "heartbeat", **owner(job)).locked_until == until


def test_heartbeat_keeps_a_job_whose_lease_is_over_but_not_swept(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    now = clock.advance("1 hour")

    assert one(db, "heartbeat", **owner(job)).locked_until == now + timedelta(minutes=1)
    assert value(db, "sweep_stale_leases") == 0


def test_heartbeat_tells_of_a_cancel(db):
    job = running(db)
    value(db, "cancel_job", job_id=job.job_id)

    assert one(db, "heartbeat", **owner(job)).is_cancel_requested is True
    assert one(db, "heartbeat_jobs", **owners(job)).is_cancel_requested is True


@pytest.mark.parametrize("lease", BAD_LEASES)
def test_heartbeat_refuses_the_lease(db, lease):
    job = running(db)

    with refused("lease"):
        one(db, "heartbeat", **owner(job), lease=lease)
    with refused("lease"):
        one(db, "heartbeat_jobs", **owners(job), lease=lease)

    assert run(db, job.job_id).locked_until == job.locked_until


def test_heartbeat_refuses_null_and_unknown_jobs(db):
    for function, rest in [("heartbeat", {}), ("set_progress", {"percent": 1})]:
        with refused("job_id"):
            call(db, function, job_id=None, lease_token=1, **rest)
        with refused("lease_token"):
            call(db, function, job_id=1, lease_token=None, **rest)
        with raises("RT001"):
            call(db, function, job_id=1, lease_token=1, **rest)


def test_heartbeat_jobs_answers_each_in_the_order_given(db, clock):
    until = clock.set("2026-01-01 00:00+00") + timedelta(seconds=9)
    mine, lost, cancelled = running(db), running(db), running(db)
    call(db, "release_jobs", **owners(lost))
    value(db, "cancel_job", job_id=cancelled.job_id)

    answers = call(db, "heartbeat_jobs", **owners(cancelled, lost, mine), lease="9 s")

    assert answers == [
        (cancelled.job_id, until, False, True, False),
        (lost.job_id, None, True, False, False),
        (mine.job_id, until, False, False, False),
    ]


@pytest.mark.parametrize("function", ["heartbeat", "heartbeat_jobs"])
def test_heartbeat_extends_no_lease_beyond_the_time_limit(db, clock, function):
    began_at = clock.set("2026-01-01 00:00+00")
    job = running(db, time_limit="90 s")
    of = owner(job) if function == "heartbeat" else owners(job)
    most = began_at + timedelta(seconds=120)
    assert job.locked_until == began_at + timedelta(seconds=60)

    for seconds, lease, until, is_overdue in [
        (10, None, began_at + timedelta(seconds=70), False),
        (50, "5 s", began_at + timedelta(seconds=55), False),
        (89, None, most, False),
        (90, "1 hour", most, True),
        (125, None, most, True),
    ]:
        clock.set(began_at + timedelta(seconds=seconds))
        beat = one(db, function, **of, lease=lease)
        assert (beat.locked_until, beat.is_overdue) == (until, is_overdue)


def test_heartbeat_jobs_keeps_the_pair_that_holds_the_job(db):
    old = running(db)
    call(db, "release_jobs", **owners(old))
    (new,) = claim(db)

    for pair, lost in [((old, new), [True, False]), ((new, old), [False, True])]:
        answers = call(db, "heartbeat_jobs", **owners(*pair))
        assert [row.is_lost for row in answers] == lost


def test_set_progress_notes_percent_and_message(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    now = clock.advance("5 s")

    value(db, "set_progress", **owner(job), percent=Decimal("33.333"), message="m" * 2000)

    row = run(db, job.job_id)
    assert (row.progress_percent, row.progress_message) == (Decimal("33.33"), "m" * 1000)
    assert (row.updated_at, row.locked_until) == (now, job.locked_until)


@pytest.mark.parametrize("percent", [None, -1, "100.01", "NaN", "Infinity", "1e300"])
def test_set_progress_refuses(db, percent):
    job = running(db)

    with refused("percent"):
        value(db, "set_progress", **owner(job), percent=percent)


@pytest.mark.parametrize("percent", [0, 100, 50.5, Decimal("99.5"), "99.999", "1e-300"])
def test_set_progress_accepts(db, percent):
    job = running(db)

    value(db, "set_progress", **owner(job), percent=percent)

    assert 0 <= run(db, job.job_id).progress_percent <= 100


def test_set_progress_of_a_job_that_waits_is_refused(db):
    with raises("RT002"):
        value(db, "set_progress", job_id=enqueue(db), lease_token=0, percent=1)


def test_heartbeat_jobs_extends_the_leases_beside_one_that_a_trigger_refuses(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    jobs = [running(db) for _ in range(4)]
    poison(db, jobs[1].job_id)

    beats = call(db, "heartbeat_jobs", **owners(*jobs), lease="5 minutes")

    until = now + timedelta(minutes=5)
    assert [beat.job_id for beat in beats] == [job.job_id for job in jobs]
    assert [beat.locked_until for beat in beats] == [until, None, until, until]
    assert [run(db, job.job_id).locked_until == until for job in jobs] == [
        True, False, True, True
    ]  # fmt: skip
    assert not any(beat.is_lost for beat in beats)


def test_heartbeat_of_a_lost_lease_waits_for_no_other_session(db, connect):
    """Its worker is to stop at once, and not when the job's next claim is committed."""
    job = running(db)
    call(db, "release_jobs", **owners(job))
    db.execute("set lock_timeout = '5s'")
    other = connect()

    with other.transaction():
        claim(other)
        with raises("RT002"):
            one(db, "heartbeat", **owner(job))


def test_heartbeat_jobs_goes_past_a_row_that_is_locked(db, connect, clock):
    clock.set("2026-01-01 00:00+00")
    jobs = [running(db), running(db)]
    other = connect()

    with other.transaction():
        other.execute("select from rota.jobs where id = %s for update", [jobs[0].job_id])
        now = clock.advance("30 s")
        first, second = call(db, "heartbeat_jobs", **owners(*jobs))

    assert (first.is_lost, first.locked_until) == (False, None)
    assert (second.is_lost, second.locked_until) == (False, now + timedelta(minutes=1))
