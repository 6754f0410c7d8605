"""An attempt that did not work, or not yet."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sql.helpers import (
    call,
    claim,
    enqueue,
    everything,
    grant,
    one,
    owner,
    owners,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    value,
)

# One of each kind of character that PostgreSQL can hold in a text.
EVERY_CLASS = "".join(
    map(
        chr,
        [
            *range(1, 0x300),  # controls, Latin
            *(0x0301, 0x05D0, 0x0627, 0x0E01, 0x1100, 0x200B, 0x200D, 0x2028, 0x202E, 0x20AC),
            *(0x3042, 0x4E00, 0xAC00, 0xD7FF, 0xE000, 0xF8FF, 0xFB01, 0xFE0F, 0xFEFF, 0xFFFD),
            *(0xFFFE, 0xFFFF, 0x10000, 0x1F980, 0x2F800, 0xE0001, 0xF0000, 0x10FFFF),
        ],
    )
)


def test_fail_job_plans_the_next_try(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, job_type="mail")

    failed = one(db, "fail_job", **owner(job), error="no", error_type="Oops", stack="s")

    row = run(db, job.job_id)
    assert failed.status == row.status == "failed"
    assert now + timedelta(seconds=48) <= failed.run_at == row.run_at
    assert failed.run_at <= now + timedelta(seconds=72)
    assert (row.attempts, row.locked_by, row.locked_until) == (1, None, None)
    assert (row.last_error, row.error_type, row.failed_at) == ("no", "Oops", now)
    (error,) = rows(db, "select * from rota.job_errors")
    assert (error.job_id, error.attempt, error.worker) == (job.job_id, 1, "w")
    assert (error.queue, error.job_type) == ("default", "mail")
    assert (error.message, error.error_type, error.stack) == ("no", "Oops", "s")
    assert (error.started_at, error.failed_at) == (now, now)
    assert error.lease_token == job.lease_token


def test_fail_job_is_claimed_again_when_its_time_has_come(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    failed = one(db, "fail_job", **owner(job), error="e")

    clock.set(failed.run_at - timedelta(microseconds=1))
    assert claim(db) == []
    clock.set(failed.run_at)
    assert [again.attempt for again in claim(db)] == [2]


def test_fail_job_counts_retry_in_from_the_clock_and_not_from_the_transaction(
    db, connect, clock
):
    clock.set("2026-01-01 00:00+00")
    jobs = [running(db), running(db)]
    with connect(autocommit=False) as old:
        old.execute("select 1")
        later = clock.advance("1 hour") + timedelta(seconds=10)

        failed = one(old, "fail_job", **owner(jobs[0]), error="e", retry_in="10 s")
        snoozed = value(old, "snooze_job", **owner(jobs[1]), delay="10 s")

        assert failed.run_at == snoozed == later


def test_fail_job_gives_up_after_the_last_attempt(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, max_attempts=1)

    assert one(db, "fail_job", **owner(job), error="e", retry_in="1 s") == ("dead", None)

    row = run(db, job.job_id)
    assert (row.status, row.finished_at, row.last_error) == ("dead", now, "e")
    assert (row.locked_by, row.attempts) == ("w", 1)


def test_fail_job_gives_up_at_once_when_fatal(db):
    job = running(db)

    dead = one(db, "fail_job", **owner(job), error="e", retry_in="1 s", fatal=True)

    assert dead == ("dead", None)
    assert run(db, job.job_id).status == "dead"


@pytest.mark.parametrize("arguments", [{}, {"fatal": True}, {"retry_in": "5 s"}], ids=str)
def test_fail_job_told_twice_answers_the_same(db, clock, arguments):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    error = "e" * 20_000
    first = one(db, "fail_job", **owner(job), error=error, **arguments)
    before = everything(db)
    clock.advance("1 minute")

    assert one(db, "fail_job", **owner(job), error=error, **arguments) == first
    with raises("RT003" if first.status == "dead" else "RT002"):
        one(db, "fail_job", **owner(job), error="another", **arguments)
    assert everything(db) == before


def test_fail_job_told_twice_after_a_cancel_answers_the_same(db):
    job = running(db)
    value(db, "cancel_job", job_id=job.job_id)

    for _ in range(2):
        assert one(db, "fail_job", **owner(job), error="e") == ("cancelled", None)


@pytest.mark.own_session
def test_fail_job_told_twice_answers_a_worker_that_sees_other_queues_only(db, admin):
    name = f"blind_worker_{scalar(db, 'select current_database()')}"
    admin.execute(f"create role {name} login")
    for access, queue in [("worker", "default"), ("observer", "theirs")]:
        grant(db, access, name)
        value(db, "grant_queue", role=name, queue=queue, access=access)
    job = running(db)
    db.execute(f"set session authorization {name}")

    first, second = (one(db, "fail_job", **owner(job), error="e") for _ in range(2))
    db.execute("reset session authorization")

    assert first == second
    db.execute(f"drop owned by {name}")
    admin.execute(f"drop role {name}")


def test_fail_job_told_twice_does_not_answer_for_a_later_attempt(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    one(db, "fail_job", **owner(job), error="e")
    clock.advance("1 hour")
    (later,) = claim(db)
    one(db, "fail_job", **owner(later), error="e")

    with raises("RT002"):
        one(db, "fail_job", **owner(job), error="e")


def test_fail_job_refuses_every_bad_argument_by_name(db):
    job = running(db)
    before = everything(db)

    for argument, bad in [
        ("job_id", None),
        ("lease_token", None),
        ("error", None),
        ("fatal", None),
        *(("retry_in", x) for x in ("-1 microsecond", "366 days", "100 years")),
        *(("retry_in", x) for x in ["infinity"] * (db.info.server_version >= 170000)),
    ]:
        with refused(argument):
            one(db, "fail_job", **{**owner(job), "error": "e", argument: bad})
    with raises("RT001"):
        one(db, "fail_job", job_id=10**15, lease_token=1, error="e")

    assert everything(db) == before


@pytest.mark.of_utf8
@pytest.mark.slow
def test_fail_job_cuts_texts_to_their_sizes(db):
    job = running(db)
    huge = "🦀" * 5_000_000  # 20 MB

    one(db, "fail_job", **owner(job), error=huge, error_type="t" * 999, stack=huge)

    (error,) = rows(db, "select * from rota.job_errors")
    assert (error.message, error.stack) == (huge[:10_000], huge[:20_000])
    row = run(db, job.job_id)
    assert (row.last_error, row.error_type) == (huge[:1000], "t" * 200)


@pytest.mark.of_utf8
def test_fail_job_takes_every_character_of_a_text(db):
    job = running(db)

    one(db, "fail_job", **owner(job), error=EVERY_CLASS, error_type=EVERY_CLASS[:200])

    (error,) = rows(db, "select * from rota.job_errors")
    assert (error.message, error.error_type) == (EVERY_CLASS, EVERY_CLASS[:200])
    job = running(db, payload={EVERY_CLASS: EVERY_CLASS}, idempotency_key=EVERY_CLASS[:255])
    assert value(db, "finish_job", **owner(job), result={"r": EVERY_CLASS}) == "finished"
    row = run(db, job.job_id)
    assert (row.payload, row.result) == ({EVERY_CLASS: EVERY_CLASS}, {"r": EVERY_CLASS})


def test_fail_job_takes_an_empty_error(db):
    assert one(db, "fail_job", **owner(running(db)), error="").status == "failed"


def test_snooze_job_uses_no_attempt(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, max_attempts=1)

    assert value(db, "snooze_job", **owner(job), delay="1 hour") == now + timedelta(hours=1)

    row = run(db, job.job_id)
    assert (row.status, row.attempts, row.run_at) == ("queued", 0, now + timedelta(hours=1))
    assert (row.locked_by, row.locked_until) == (None, None)
    assert claim(db) == []
    clock.advance("1 hour")
    (again,) = claim(db)
    assert again.attempt == 1
    assert again.lease_token > job.lease_token


def test_snooze_job_may_go_on_for_ever(db, clock):
    clock.set("2026-01-01 00:00+00")
    enqueue(db, max_attempts=1)

    for _ in range(50):
        (job,) = claim(db)
        assert job.attempt == 1
        value(db, "snooze_job", **owner(job), delay="0")


@pytest.mark.parametrize("delay", [None, "-1 s", "101 years"])
def test_snooze_job_refuses_the_delay(db, delay):
    job = running(db)

    with refused("delay"):
        value(db, "snooze_job", **owner(job), delay=delay)

    assert run(db, job.job_id).status == "running"


def test_snooze_job_refuses_null_and_unknown_jobs(db):
    for argument in ("job_id", "lease_token"):
        with refused(argument):
            value(
                db, "snooze_job", **{"job_id": 1, "lease_token": 1, argument: None}, delay="0"
            )
    with raises("RT001"):
        value(db, "snooze_job", job_id=1, lease_token=1, delay="0")


def test_release_jobs_gives_back_at_once_without_an_attempt(db, clock):
    early = clock.set("2026-01-01 00:00+00")
    jobs = [running(db, max_attempts=1) for _ in range(3)]
    clock.advance("10 s")

    answers = call(db, "release_jobs", **owners(*reversed(jobs)))

    assert answers == [(job.job_id, True) for job in reversed(jobs)]
    for job in jobs:
        row = run(db, job.job_id)
        assert (row.status, row.attempts, row.run_at) == ("queued", 0, early)
    again = claim(db, max_jobs=3)
    assert [job.attempt for job in again] == [1, 1, 1]
    for old, new in zip(jobs, again, strict=True):
        assert new.lease_token > old.lease_token


def test_release_jobs_gives_back_only_what_is_held(db):
    mine, lost, cancelled = running(db), running(db), running(db)
    one(db, "fail_job", **owner(lost), error="e")
    value(db, "cancel_job", job_id=cancelled.job_id)

    answers = call(db, "release_jobs", **owners(lost, cancelled, mine))

    assert [row.is_released for row in answers] == [False, True, True]
    assert run(db, cancelled.job_id).status == "cancelled"
    assert run(db, lost.job_id).status == "failed"


def test_release_jobs_gives_back_the_pair_that_holds_the_job(db):
    for order in (1, -1):
        old = running(db)
        call(db, "release_jobs", **owners(old))
        (new,) = claim(db)

        answers = call(db, "release_jobs", **owners(*[old, new][::order]))

        assert [row.is_released for row in answers] == [False, True][::order]
        assert run(db, new.job_id).attempts == 0
        value(db, "cancel_job", job_id=new.job_id)


def test_release_jobs_of_nothing_is_nothing(db):
    assert call(db, "release_jobs", job_ids=[], lease_tokens=[]) == []
    assert scalar(db, "select count(*) from rota.jobs") == 0


def test_release_jobs_goes_past_a_row_that_is_locked_and_says_so(db, connect):
    jobs = [running(db), running(db)]
    other = connect()

    with other.transaction():
        other.execute("select from rota.jobs where id = %s for update", [jobs[0].job_id])
        told = [row.is_released for row in call(db, "release_jobs", **owners(*jobs))]
    again = [row.is_released for row in call(db, "release_jobs", **owners(*jobs))]

    assert (told, again) == ([None, True], [True, False])
