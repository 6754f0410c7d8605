"""Retry rules by the type of the error, and breakers."""

from __future__ import annotations

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
    poison,
    refused,
    rows,
    run,
    running,
    scalar,
    settle,
    value,
)

SECOND = timedelta(seconds=1)
STATE = "select times_opened, retry_at, probed_at from rota.breaker_states"


def fail(db, job, error_type="SMTPError", **arguments):
    return one(
        db, "fail_job", **owner(job), error="no route", error_type=error_type, **arguments
    )


def fail_all(db, number):
    for _ in range(number):
        (job,) = claim(db, job_types=["mail"])
        fail(db, job)


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({}, "retry_in"),
        ({"retry_in": "1 s", "fatal": True}, "retry_in"),
        ({"retry_in": "-1 s"}, "retry_in"),
        ({"retry_in": "2 years"}, "retry_in"),
        ({"fatal": None}, "fatal"),
        ({"reset": None, "fatal": True}, "reset"),
        ({"fatal": True, "error_type": None}, "error_type"),
        ({"fatal": True, "error_type": ""}, "error_type"),
        ({"fatal": True, "error_type": "x" * 201}, "error_type"),
        ({"fatal": True, "job_type": "*"}, "job_type"),
        ({"fatal": True, "queue": "a b"}, "queue"),
        ({"pause_for": "0"}, "pause_for"),
        ({"pause_for": "31 days"}, "pause_for"),
        ({"pause_for": "1 s", "reset": True}, "retry_in"),
    ],
)
def test_set_retry_rule_refuses_bad_arguments(db, given, argument):
    with refused(argument):
        call(db, "set_retry_rule", **{"error_type": "E", **given})


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({}, "max_failures"),
        ({"reset": True, "max_failures": 3}, "max_failures"),
        ({"max_failures": 0}, "max_failures"),
        ({"failed_percent": 101}, "failed_percent"),
        ({"max_failures": 1, "min_attempts": None}, "min_attempts"),
        ({"max_failures": 1, "span": "0"}, "span"),
        ({"max_failures": 1, "span": None}, "span"),
        ({"max_failures": 1, "pause_for": "2 days"}, "pause_for"),
        ({"max_failures": 1, "probes": 0}, "probes"),
        ({"max_failures": 1, "error_type": ""}, "error_type"),
        ({"max_failures": 1, "reset": None}, "reset"),
        ({"max_failures": 1, "queue": None}, "queue"),
        ({"max_failures": 1, "job_type": None}, "job_type"),
    ],
)
def test_set_breaker_refuses_bad_arguments(db, given, argument):
    with refused(argument):
        call(db, "set_breaker", **{"job_type": "mail", **given})


def test_a_rule_says_when_a_failure_of_its_type_is_tried_again(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_retry_rule", error_type="Throttled", retry_in="10 minutes")

    assert fail(db, running(db), "Throttled").run_at == now + timedelta(minutes=10)
    assert fail(db, running(db), "Throttled", retry_in="5 s").run_at == now + 5 * SECOND
    assert fail(db, running(db), "Other").run_at < now + timedelta(minutes=2)
    assert fail(db, running(db), None).run_at < now + timedelta(minutes=2)

    value(db, "set_retry_rule", error_type="Throttled", reset=True)
    assert fail(db, running(db), "Throttled").run_at < now + timedelta(minutes=2)


def test_a_fatal_rule_ends_the_job_at_its_first_failure(db):
    value(db, "set_retry_rule", error_type="BadAddress", fatal=True)
    job = running(db, job_type="mail")

    assert fail(db, job, "BadAddress").status == "dead"
    ended = call(
        db,
        "end_jobs",
        endings=_json([{**owner(running(db)), "outcome": "failed", "error": "x",
                        "error_type": "BadAddress"}]),
    )  # fmt: skip
    assert ended[0].answer == "dead"


def test_a_rule_for_leases_that_end_holds_from_the_first_on(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_retry_rule", error_type="lease_expired", job_type="mail", retry_in="1 hour")
    mail, other = running(db, job_type="mail"), running(db, job_type="other")
    over = clock.advance("2 minutes")

    settle(db)

    assert run(db, mail.job_id).run_at == over + timedelta(hours=1)
    assert run(db, other.job_id).run_at < over + 2 * SECOND


def test_the_rule_of_the_type_and_the_queue_goes_before_that_for_all(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    for minutes, whose in enumerate(
        ({}, {"queue": "q"}, {"job_type": "mail"}, {"job_type": "mail", "queue": "q"}), 1
    ):
        value(db, "set_retry_rule", error_type="E", retry_in=f"{minutes} minutes", **whose)

    for minutes, job in enumerate(
        (
            running(db, job_type="x"),
            running(db, job_type="x", queue="q"),
            running(db, job_type="mail"),
            running(db, job_type="mail", queue="q"),
        ),
        1,
    ):
        assert fail(db, job, "E").run_at == now + timedelta(minutes=minutes)


PAUSES = "select queue, job_type, set_by, until from rota.pauses"


def test_a_rule_pauses_the_type_for_so_long_after_its_last_failure(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_retry_rule", error_type="Quota", pause_for="10 minutes")
    late = running(db, job_type="mail", lease="1 hour")
    assert fail(db, running(db, job_type="mail"), "Quota").status == "failed"
    enqueue(db, "mail", queue="q")
    enqueue(db, "other")
    clock.advance("1 minute")
    settle(db)
    assert rows(db, PAUSES) == [(None, "mail", "rule", now + timedelta(minutes=10))]
    assert claim(db, queues=["q"]) == []
    assert [job.job_type for job in claim(db, max_jobs=5)] == ["other"]
    clock.advance("3 minutes")
    fail(db, late, "Quota")
    settle(db)
    assert rows(db, PAUSES) == [(None, "mail", "rule", now + timedelta(minutes=14))]

    clock.advance("10 minutes")
    settle(db)
    assert rows(db, PAUSES) == []
    freed = claim(db, queues=["default", "q"], job_types=["mail"], max_jobs=5)
    assert sorted(job.queue for job in freed) == ["default", "default", "q"]


def test_a_rule_pauses_for_no_failure_of_a_time_that_is_still_to_come_again(db, clock):
    clock.set("2026-02-01 00:00+00")
    value(db, "set_retry_rule", error_type="Quota", pause_for="10 minutes")
    fail(db, running(db, job_type="mail"), "Quota")
    settle(db)
    now = clock.set("2026-01-01 00:00+00")
    value(db, "resume_type", job_type="mail")

    fail(db, running(db, job_type="mail"), "Quota")
    settle(db)

    assert rows(db, PAUSES) == [(None, "mail", "rule", now + timedelta(minutes=10))]


def test_a_rule_of_a_queue_pauses_there_and_tells_what_else_becomes_of_the_job(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_retry_rule", error_type="Quota", queue="q", pause_for="1 hour", fatal=True)
    enqueue(db, "mail")

    assert fail(db, running(db, job_type="mail", queue="q"), "Quota").status == "dead"
    settle(db)

    assert rows(db, PAUSES) == [("q", "mail", "rule", now + timedelta(hours=1))]
    assert len(claim(db)) == 1
    value(
        db, "set_retry_rule", error_type="Quota", queue="q", pause_for="1 hour", retry_in="5 s"
    )
    (row,) = rows(db, "select retry_in, is_fatal, pause_for from rota.retry_rules")
    assert row == (5 * SECOND, False, timedelta(hours=1))


def test_a_rule_leaves_the_pauses_of_others_as_they_are(db):
    value(db, "set_retry_rule", error_type="Quota", queue="default", pause_for="1 hour")
    value(db, "set_retry_rule", error_type="Quota", queue="q", pause_for="1 hour")
    value(db, "set_breaker", job_type="mail", queue="q", max_failures=1, pause_for="1 minute")
    jobs = [running(db, job_type="mail", queue=queue) for queue in ("default", "q", "q")]
    value(db, "pause_type", job_type="mail", queue="default", reason="mine")
    fail(db, jobs[1], "Other")
    settle(db)
    fail(db, running(db, job_type="mail2", queue="q"), "Quota")
    fail(db, jobs[0], "Quota")
    fail(db, jobs[2], "Quota")
    settle(db)

    assert sorted(row[:3] for row in rows(db, PAUSES)) == [
        ("default", "mail", "operator"),
        ("q", "mail", "breaker"),
        ("q", "mail2", "rule"),
    ]


def test_a_pause_that_maintenance_comes_too_late_for_is_none(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_retry_rule", error_type="Quota", pause_for="1 minute")
    fail(db, running(db, job_type="mail"), "Quota")
    clock.advance("1 minute")
    settle(db)

    assert rows(db, PAUSES) == []
    value(db, "set_retry_rule", error_type="Quota", job_type="gone", fatal=True)
    fail(db, running(db, job_type="gone", queue="q"), "Quota")
    fail(db, running(db, job_type="mail", queue="q"), "Quota")
    value(db, "set_retry_rule", error_type="Quota", reset=True)
    settle(db)
    assert rows(db, PAUSES) == []


def test_who_fails_waits_for_no_operator_and_no_other_who_fails(db, connect):
    value(db, "set_retry_rule", error_type="Quota", pause_for="1 hour")
    first, second = running(db, job_type="mail"), running(db, job_type="mail")
    open_pause, open_fail = connect(autocommit=False), connect(autocommit=False)
    value(open_pause, "pause_type", job_type="mail")
    fail(open_fail, first, "Quota")

    db.execute("set lock_timeout = '1s'")
    assert fail(db, second, "Quota").status == "failed"
    warnings = []
    db.add_notice_handler(warnings.append)
    one(db, "tick")
    assert (rows(db, PAUSES), warnings) == ([], [])
    open_pause.rollback()
    open_fail.rollback()
    db.execute("update rota.pending_checks set due_at = '-infinity'")
    settle(db)
    assert [row.set_by for row in rows(db, PAUSES)] == ["rule"]


def test_explain_and_doctor_tell_of_the_pause_of_a_rule(db):
    value(db, "set_retry_rule", error_type="Quota", job_type="mail", pause_for="1 hour")
    job = running(db, job_type="mail")
    waiting = enqueue(db, "mail")
    fail(db, job, "Quota")
    settle(db)

    told = call(db, "explain_job", job_id=waiting)[0]
    assert told.reason == "type_paused"
    assert "by a retry rule" in told.explanation
    assert f"job {job.job_id} failed with Quota" in told.explanation
    assert "for another 59 min" in told.explanation or "for another 1 h" in told.explanation
    found = [row for row in call(db, "doctor") if row.finding == "queues"]
    assert "a retry rule" in found[0].evidence
    db.execute(found[0].remedy)
    settle(db)
    assert claim(db)[0].job_id == waiting


@pytest.mark.slow
def test_a_breaker_opens_after_failures_in_a_row_and_tries_again_by_itself(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_breaker", job_type="mail", max_failures=3, pause_for="30 s")
    for _ in range(9):
        enqueue(db, "mail")
    other = enqueue(db, "other")
    fail_all(db, 2)
    settle(db)
    assert scalar(db, "select count(*) from rota.pauses") == 0

    fail_all(db, 1)
    settle(db)

    (pause,) = rows(db, "select * from rota.pauses")
    failed = scalar(db, "select job_id from rota.job_errors order by failed_at desc limit 1")
    assert (pause.job_type, pause.queue, pause.set_by) == ("mail", "default", "breaker")
    assert pause.reason == (
        f"3 attempts in a row failed, the last with SMTPError (job {failed});"
        " it tries again at 00:00:30 UTC"
    )
    assert rows(db, STATE) == [(1, now + 30 * SECOND, None)]
    assert [job.job_id for job in claim(db, max_jobs=9)] == [other]

    # Half open: one may try, fails, and the pause is twice as long.
    clock.advance("31 s")
    settle(db)
    (probe,) = claim(db, max_jobs=9)
    settle(db)
    assert claim(db, max_jobs=9) == []
    clock.advance("1 s")
    fail(db, probe)
    settle(db)
    assert rows(db, STATE) == [(2, now + (32 + 60) * SECOND, None)]

    # And again: this one succeeds, and all may run.
    clock.advance("61 s")
    settle(db)
    (probe,) = claim(db, max_jobs=9)
    clock.advance("1 s")
    value(db, "finish_job", **owner(probe))
    settle(db)
    settle(db)
    assert rows(db, STATE) == [(0, None, None)]
    assert scalar(db, "select count(*) from rota.pauses") == 0
    assert len(claim(db, max_jobs=9)) > 1


def test_a_breaker_waits_for_no_time_of_a_clock_that_was_set_back(db, clock):
    clock.set("2026-01-01 12:00+00")
    value(db, "set_breaker", job_type="mail", max_failures=1)
    for _ in range(3):
        enqueue(db, "mail", run_at="2026-01-01 00:00+00")
    fail(db, claim(db)[0], retry_in="1 day")
    settle(db)
    assert claim(db) == []

    # Open: it tries again, and closes.
    clock.set("2026-01-01 11:00+00")
    for _ in range(2):
        one(db, "tick")
    (probe,) = claim(db, max_jobs=9)
    value(db, "finish_job", **owner(probe))
    settle(db)
    assert rows(db, STATE) == [(0, None, None)]

    # Closed: what fails from now on counts.
    clock.set("2026-01-01 10:00+00")
    one(db, "tick")
    fail_all(db, 1)
    settle(db)
    assert len(rows(db, "select from rota.pauses")) == 1


def test_a_success_in_between_keeps_a_breaker_closed(db):
    value(db, "set_breaker", job_type="mail", max_failures=2)
    fail(db, running(db, job_type="mail"))
    value(db, "finish_job", **owner(running(db, job_type="mail")))
    fail(db, running(db, job_type="mail"))

    settle(db)

    assert scalar(db, "select count(*) from rota.pauses") == 0


def test_a_breaker_counts_its_own_type_queue_and_error_only(db):
    value(db, "set_breaker", job_type="mail", max_failures=1, error_type="SMTPError")
    fail(db, running(db, job_type="other"))
    fail(db, running(db, job_type="mail", queue="q"))
    fail(db, running(db, job_type="mail"), "Typo")
    settle(db)
    assert scalar(db, "select count(*) from rota.pauses") == 0

    fail(db, running(db, job_type="mail"))
    settle(db)
    assert scalar(db, "select pause_name from rota.pauses") == "type mail of default"


def test_a_breaker_opens_at_a_share_of_failures(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_breaker", job_type="mail", failed_percent=50, min_attempts=4)
    for outcome in ("fail", "finish", "fail"):
        job = running(db, job_type="mail")
        if outcome == "fail":
            fail(db, job)
        else:
            value(db, "finish_job", **owner(job))
    settle(db)
    assert scalar(db, "select count(*) from rota.pauses") == 0

    value(db, "finish_job", **owner(running(db, job_type="mail")))
    settle(db)
    assert "2 of 4 attempts failed" in scalar(db, "select reason from rota.pauses")


@pytest.mark.parametrize("fails", ["x", "x..x..x..", "xxx"], ids=["one", "some", "all"])
@pytest.mark.parametrize("given", [{"max_failures": 3}, {"failed_percent": 50}], ids=str)
def test_a_breaker_sees_what_succeeds_in_a_queue_that_is_busy_with_others(
    db, clock, given, fails
):
    """Of what ended only the newest rows are read, and those of the type are not among them."""
    clock.set("2026-01-01 00:00+00")
    value(db, "set_breaker", job_type="mail", min_attempts=3, **given)
    for outcome in fails:
        clock.advance("1 s")
        job = running(db, job_type="mail")
        if outcome == "x":
            fail(db, job)
        else:
            value(db, "finish_job", **owner(job))
    clock.advance("1 s")
    call(db, "enqueue_many", jobs=Jsonb([{"job_type": "other"}] * 5000))
    for _ in range(5):
        call(db, "finish_jobs", **owners(*claim(db, job_types=["other"], max_jobs=1000)))

    settle(db)
    before = scalar(db, "select count(*) from rota.pauses")
    for _ in range(2):
        clock.advance("11 s")
        settle(db)

    assert (before, scalar(db, "select count(*) from rota.pauses")) == (0, fails == "xxx")


def test_a_breaker_closes_in_a_queue_that_is_busy_with_others(db, clock):
    """One job of the type succeeds after the other, and many of others in between."""
    clock.set("2026-01-01 00:00+00")
    value(db, "set_breaker", job_type="mail", max_failures=1, probes=3)
    fail(db, running(db, job_type="mail"), fatal=True)
    settle(db)
    clock.advance("31 s")

    for _ in range(7):
        enqueue(db, "mail")
        claim(db, job_types=["mail"])
        settle(db)
        (probe,) = claim(db, job_types=["mail"])
        value(db, "finish_job", **owner(probe))
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "other"}] * 5000))
        for _ in range(5):
            call(db, "finish_jobs", **owners(*claim(db, job_types=["other"], max_jobs=1000)))
        clock.advance("20 s")
    settle(db)
    one(db, "tick")

    assert rows(db, STATE) == [(0, None, None)]
    assert scalar(db, "select count(*) from rota.pauses") == 0


@pytest.mark.parametrize(
    ("given", "opens_after"), [({"max_failures": 3}, 12), ({"failed_percent": 60}, 15)], ids=str
)
def test_a_breaker_sees_what_succeeded_and_is_kept_no_longer(db, clock, given, opens_after):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="default", keep_finished="0")
    value(db, "set_breaker", job_type="mail", min_attempts=3, span="1 hour", **given)

    ended = 0
    for outcome in "x..x..x..xxxxxx":
        ended += 1
        job = running(db, job_type="mail")
        if outcome == "x":
            fail(db, job, fatal=True)
        else:
            value(db, "finish_job", **owner(job))
        for _ in range(2):
            clock.advance("30 s")
            settle(db)
        if scalar(db, "select count(*) from rota.pauses"):
            break

    assert ended == opens_after


def test_a_breaker_closes_where_what_succeeded_is_kept_no_longer(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="default", keep_finished="0")
    value(db, "set_breaker", job_type="mail", max_failures=1, probes=3)
    fail(db, running(db, job_type="mail"), fatal=True)
    settle(db)
    for _ in range(9):
        enqueue(db, "mail")
    assert claim(db) == []

    for _ in range(6):
        clock.advance("31 s")
        settle(db)
        for probe in claim(db):
            value(db, "finish_job", **owner(probe))

    assert rows(db, STATE) == [(0, None, None)]


def test_what_began_before_the_pause_decides_nothing_afterwards(db, clock):
    """Half open, an attempt of before fails: only what was let through to try counts."""
    clock.set("2026-01-01 00:00+00")
    value(db, "set_breaker", job_type="mail", max_failures=1)
    old, older = (running(db, job_type="mail", lease="1 hour") for _ in range(2))
    enqueue(db, "mail")
    fail(db, running(db, job_type="mail", priority=-1))
    settle(db)
    assert claim(db) == []
    clock.advance("31 s")
    settle(db)
    (probe,) = claim(db)

    fail(db, old)
    settle(db)
    assert rows(db, STATE)[0][2] is not None

    clock.advance("1 s")
    value(db, "finish_job", **owner(probe))
    settle(db)
    fail(db, older)
    settle(db)
    assert rows(db, STATE) == [(0, None, None)]


def test_an_operator_has_the_last_word_over_a_breaker(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_breaker", job_type="mail", max_failures=1)
    fail(db, running(db, job_type="mail"))
    settle(db)
    value(db, "resume_type", job_type="mail", queue="default")
    settle(db)
    assert rows(db, STATE) == [(0, None, None)]
    assert scalar(db, "select count(*) from rota.pauses") == 0

    clock.advance("1 s")
    fail(db, running(db, job_type="mail"))
    settle(db)
    value(db, "pause_type", job_type="mail", queue="default", reason="mine")
    clock.advance("1 hour")
    settle(db)
    assert rows(db, STATE) == [(0, None, None)]
    assert rows(db, "select set_by, until from rota.pauses") == [("operator", None)]


def test_a_breaker_leaves_a_type_closed_that_an_operator_has_paused(db):
    value(db, "set_breaker", job_type="mail", max_failures=1)
    job = running(db, job_type="mail")
    value(db, "pause_type", job_type="mail", queue="default", reason="mine")

    fail(db, job)
    settle(db)

    assert rows(db, STATE) == [(0, None, None)]
    assert rows(db, "select set_by, reason, until from rota.pauses") == [
        ("operator", "mine", None)
    ]


def open_breaker_until_now(db, **arguments):
    """Fail one of five jobs; the next tick lets some of the others through."""
    given = {"job_type": "mail", "max_failures": 1, "pause_for": "1 s", **arguments}
    value(db, "set_breaker", **given)
    for _ in range(5):
        enqueue(db, "mail")
    fail_all(db, 1)
    settle(db)
    assert claim(db) == []
    db.execute("update rota.breaker_states set retry_at = rota.now() - interval '1 s'")


def lock_a_probe(db, connect):
    """Let a stranger lock the job that a breaker lets through; return his session."""
    settle(db)
    (kept,) = rows(db, "select id from rota.jobs where opened_for is not null")
    stranger = connect(autocommit=False)
    value(stranger, "set_priority", job_id=kept.id, priority=1)
    settle(db)
    return stranger


def test_what_a_breaker_lets_through_stops_at_the_pause_of_an_operator(db):
    open_breaker_until_now(db, probes=3)
    settle(db)

    value(db, "pause_type", job_type="mail", queue="default")

    assert claim(db, max_jobs=5) == []


def test_a_stranger_who_locks_what_a_breaker_lets_through_keeps_nothing_else(db, connect):
    open_breaker_until_now(db)
    lock_a_probe(db, connect)

    (job,) = claim(db, max_jobs=5)
    value(db, "finish_job", **owner(job))
    settle(db)
    settle(db)

    assert len(claim(db, max_jobs=5)) == 2


def test_what_a_stranger_had_locked_when_a_breaker_opened_again_waits(db, connect):
    open_breaker_until_now(db)
    stranger = lock_a_probe(db, connect)
    fail_all(db, 1)
    settle(db)
    assert scalar(db, "select times_opened from rota.breaker_states") == 2

    stranger.rollback()
    settle(db)

    assert claim(db, max_jobs=5) == []


def test_set_breaker_reset_ends_its_pause(db):
    value(db, "set_breaker", job_type="mail", max_failures=1)
    fail(db, running(db, job_type="mail"))
    settle(db)

    value(db, "set_breaker", job_type="mail", reset=True)
    one(db, "tick")

    for table in ("pauses", "breakers", "breaker_states"):
        assert scalar(db, f"select count(*) from rota.{table}") == 0


def test_explain_and_doctor_tell_of_an_open_breaker(db):
    value(db, "set_breaker", job_type="mail", max_failures=1)
    fail(db, running(db, job_type="mail"))
    waiting = enqueue(db, "mail")
    settle(db)

    told = one_reason(db, waiting)
    assert told.reason == "type_paused"
    assert "by its breaker" in told.explanation
    assert "1 attempt failed, with SMTPError" in told.explanation
    found = [row for row in call(db, "doctor") if row.finding == "queues"]
    assert "by its breaker" in found[0].evidence
    db.execute(found[0].remedy)
    assert one_reason(db, waiting).reason != "type_paused"


def one_reason(db, job_id):
    return call(db, "explain_job", job_id=job_id)[0]


@pytest.mark.parametrize("has_probed", [False, True])
def test_two_ticks_at_once_let_through_as_many_as_one(db, connect, has_probed):
    """Both find the breaker half open; the one that is second changes nothing."""
    open_breaker_until_now(db)
    if has_probed:
        db.execute("update rota.breaker_states set probed_at = rota.now()")
    a, b = connect(autocommit=False), connect(autocommit=False)
    a.execute("select rota._check_breakers()")
    b.execute("select rota._check_breakers()")
    a.commit()
    b.commit()

    assert len(claim(db, max_jobs=5)) == 1


def test_a_breaker_that_fails_stops_no_other(db, clock):
    clock.set("2026-01-01 00:00+00")
    for job_type in ("mail", "other"):
        value(db, "set_breaker", job_type=job_type, max_failures=1)
        fail(db, running(db, job_type=job_type), retry_in="1 day")
    waiting = [enqueue(db, "mail"), enqueue(db, "other")]
    settle(db)
    assert claim(db, max_jobs=9) == []
    poison(db, waiting[0])
    clock.advance("31 s")

    for _ in range(3):
        one(db, "tick")

    assert [job.job_id for job in claim(db, max_jobs=9)] == waiting[1:]


def test_a_tick_reads_the_failures_once_for_all_breakers(db):
    for number in range(30):
        value(db, "set_breaker", job_type="x", queue=f"q{number}", max_failures=3)
    db.execute(
        "insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker,"
        " started_at, failed_at, message)"
        " select n, 1, 1, 'other', 'x', 'w', t, t, 'e'"
        " from generate_series(1, 300) as n, rota.now() as t"
    )
    read = (
        "select sum(pg_stat_get_xact_tuples_returned(indexrelid))::integer from pg_index"
        " where indrelid::regclass::text like 'rota.job_errors%'"
    )

    with db.transaction():
        before = scalar(db, read)
        db.execute("select rota._check_breakers()")
        made = scalar(db, read) - before

    assert 300 <= made < 1000


def test_a_tick_waits_for_no_operator_who_is_about_to_pause_what_a_breaker_has(db, connect):
    for job_type in ("mail", "other"):
        value(db, "set_breaker", job_type=job_type, max_failures=1)
        fail(db, running(db, job_type=job_type))
    operator = connect(autocommit=False)
    value(operator, "pause_type", job_type="mail", queue="default")
    db.execute("set statement_timeout = '5s'")

    settle(db)

    assert [pause.job_type for pause in rows(db, "select * from rota.pauses")] == ["other"]
    operator.rollback()
    settle(db)
    assert scalar(db, "select count(*) from rota.pauses where set_by = 'breaker'") == 2


def _json(value):
    from psycopg.types.json import Jsonb

    return Jsonb(value)
