"""The brake: of a queue, of a job type, of everything."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sql.helpers import (
    call,
    claim,
    enqueue,
    one,
    owner,
    pending,
    poison,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    settle,
    value,
)
from sql.jobs.test_enqueue import BAD_NAMES

HOUR = timedelta(hours=1)
HOLDS = "select id, hold from rota.jobs where hold is not null order by id"


def ids(jobs):
    return [job.job_id for job in jobs]


def test_pause_queue_stops_claims_and_nothing_else(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, queue="q")
    waiting = enqueue(db, queue="q")

    value(db, "pause_queue", queue="q", reason="r" * 2000)

    (row,) = rows(db, "select * from rota.pauses")
    assert (row.queue, row.job_type, row.set_by) == ("q", None, "operator")
    assert (row.paused_at, row.paused_by, row.until) == (now, "postgres", None)
    assert row.reason == "r" * 1000
    assert claim(db, queues=["q"]) == []
    assert enqueue(db, queue="q") > waiting
    assert value(db, "finish_job", **owner(job)) == "finished"
    assert claim(db, queues=["q", "default"]) == []


def test_pause_queue_keeps_who_paused_first(db, clock):
    first = clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="q")
    value(db, "pause_queue", queue="q", reason="a")
    clock.advance("1 hour")

    value(db, "pause_queue", queue="q", until=first + 3 * HOUR)
    (row,) = rows(db, "select * from rota.pauses")
    assert (row.paused_at, row.reason, row.until) == (first, "a", first + 3 * HOUR)
    value(db, "pause_queue", queue="q", reason="b")
    assert rows(db, "select reason, until from rota.pauses") == [("b", None)]


def test_resume_queue_lets_jobs_be_claimed_again(db):
    job_id = enqueue(db, queue="q")
    value(db, "pause_queue", queue="q", reason="r")

    assert value(db, "resume_queue", queue="q")
    assert not value(db, "resume_queue", queue="q")

    assert rows(db, "select from rota.pauses") == []
    assert ids(claim(db, queues=["q"])) == [job_id]


def test_a_queue_that_is_empty_at_the_moment_can_be_paused(db):
    report = {"worker": "w", "host": "h", "pid": 1, "version": "0.2.0"}
    value(db, "report_worker", **report, queues=["default"])

    call(db, "pause_queue", queue="default")

    enqueue(db)
    assert claim(db) == []


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("set_limit", {"queue": "q", "max_running": 1}),
        ("schedule_job", {"name": "s", "schedule": "@daily", "job_type": "x", "queue": "q"}),
        ("define_pipeline", {"pipeline": "p", "stages": '[{"stage": "a", "queue": "q"}]'}),
    ],
)
def test_a_queue_can_be_paused_before_its_first_job(db, function, arguments):
    call(db, function, **arguments)

    value(db, "pause_queue", queue="q")


def test_a_queue_whose_jobs_have_all_ended_can_be_paused(db):
    value(db, "cancel_job", job_id=enqueue(db))

    call(db, "pause_queue", queue="default")

    enqueue(db)
    assert claim(db) == []


@pytest.mark.of_utf8
@pytest.mark.parametrize("function", ["pause_queue", "resume_queue"])
def test_pause_queue_and_resume_queue_refuse_unknown_and_bad_names(db, function):
    job_id = enqueue(db, queue="known")

    for name in BAD_NAMES:
        with refused("queue"):
            value(db, function, queue=name)
    with raises("RT004"):
        value(db, function, queue="knwon")

    value(db, function, queue="known")
    assert run(db, job_id).status == "queued"


def test_pause_queue_reads_no_jobs_of_others_to_know_a_queue_that_a_worker_names(db):
    db.execute("select rota.enqueue('x') from generate_series(1, 20)")
    value(db, "report_worker", worker="w", host="h", pid=1, version="1", queues=["q"])

    with db.transaction():
        value(db, "pause_queue", queue="q")
        read = scalar(db, "select pg_stat_get_xact_tuples_returned('rota.jobs'::regclass)")

    assert read == 0


@pytest.mark.of_utf8
def test_pauses_of_types_refuse_bad_arguments_by_name(db):
    for function in ("pause_type", "resume_type"):
        for name in BAD_NAMES:
            with refused("job_type"):
                value(db, function, job_type=name)
        with refused("queue"):
            value(db, function, job_type="x", queue="no queue")
        with raises("RT004"):
            value(db, function, job_type="x", queue="knwon")
    enqueue(db)
    for function, argument in [
        ("pause_all", {}),
        ("pause_type", {"job_type": "x"}),
        ("pause_queue", {"queue": "default"}),
    ]:
        for until in ("infinity", "1969-01-01", "now", "2020-01-01"):
            with refused("until"):
                value(db, function, **argument, until=until)

    assert rows(db, "select from rota.pauses") == []


@pytest.mark.parametrize("hint", [False, True])
def test_pause_type_stops_that_type_and_nothing_else(db, hint):
    if hint:
        enqueue(db, "a")
        assert len(claim(db)) == 1
    mail = [enqueue(db, "mail") for _ in range(3)]
    others = [enqueue(db, "report"), enqueue(db, "mail", queue="q")]

    value(db, "pause_type", job_type="mail", queue="default", reason="the bank is down")

    assert ids(claim(db)) == [others[0]]
    assert claim(db) == []
    assert ids(claim(db, queues=["q"])) == [others[1]]
    assert rows(db, HOLDS) == [(job_id, "pause type mail of default") for job_id in mail]
    value(db, "resume_type", job_type="mail", queue="default")
    settle(db)
    assert ids(claim(db, max_jobs=5)) == mail


def test_pause_type_without_a_queue_is_of_all_queues(db):
    value(db, "pause_type", job_type="mail")
    enqueue(db, "mail")
    enqueue(db, "mail", queue="q")
    other = enqueue(db, "report", queue="q")

    assert ids(claim(db, queues=["default", "q"], max_jobs=5)) == [other]
    assert ids(claim(db, queues=["default", "q"], max_jobs=5)) == []


def test_pause_all_stops_all_and_resume_all_leaves_single_pauses(db):
    job_ids = [enqueue(db, "mail"), enqueue(db, "report", queue="q")]
    value(db, "pause_queue", queue="q")

    value(db, "pause_all", reason="restored")
    assert claim(db, queues=["default", "q"], max_jobs=5) == []
    value(db, "resume_all")

    assert ids(claim(db, queues=["default", "q"], max_jobs=5)) == job_ids[:1]


def test_a_pause_that_has_ended_counts_as_none_without_a_tick(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job_ids = [enqueue(db), enqueue(db, queue="q"), enqueue(db, "mail", queue="r")]
    value(db, "pause_queue", queue="q", until=now + HOUR)
    value(db, "pause_type", job_type="mail", until=now + HOUR)
    value(db, "pause_all", until=now + HOUR)
    everything = {"queues": ["default", "q", "r"], "max_jobs": 5}

    assert claim(db, **everything) == []
    clock.advance(HOUR)

    assert ids(claim(db, **everything)) == job_ids
    assert scalar(db, "select count(*) from rota.pauses") == 3
    stats = rows(db, "select queue, is_paused from rota.queue_stats order by 1")
    assert [tuple(row) for row in stats] == [("default", False), ("q", False), ("r", False)]
    settle(db)
    assert scalar(db, "select count(*) from rota.pauses") == 0
    value(db, "pause_all", reason="again")
    assert rows(db, "select paused_at, reason from rota.pauses") == [(now + HOUR, "again")]


def test_what_a_pause_has_held_comes_back_by_itself_at_its_end(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "pause_type", job_type="mail", until=now + HOUR)
    job_ids = [enqueue(db, "mail") for _ in range(2)]
    assert claim(db) == []
    settle(db)
    assert len(rows(db, HOLDS)) == 2

    clock.advance(HOUR)
    settle(db)

    assert ids(claim(db, max_jobs=5)) == job_ids


def test_a_pause_that_was_being_changed_at_its_end_is_deleted_later(db, connect, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "pause_all", until=now + timedelta(minutes=1))
    operator = connect(autocommit=False)
    value(operator, "resume_all")
    clock.advance("2 minutes")
    call(db, "tick")

    operator.rollback()
    clock.advance("1 minute")
    call(db, "tick")

    assert rows(db, "select pause_name from rota.pauses") == []


def test_a_claim_that_does_not_see_the_end_of_a_pause_holds_no_job_for_ever(db, connect):
    value(db, "pause_type", job_type="mail")
    job_id = enqueue(db, "mail")
    late = connect(autocommit=False)

    assert claim(late) == []
    value(db, "resume_type", job_type="mail")
    settle(db)
    late.commit()
    settle(db)

    assert ids(claim(db)) == [job_id]


def test_a_claim_meets_a_bounded_number_of_jobs_of_a_paused_type(db):
    db.execute("select rota.enqueue('mail') from generate_series(1, 1000)")
    other = enqueue(db, "report")
    value(db, "pause_type", job_type="mail")

    assert claim(db) == []
    held = len(rows(db, HOLDS))
    assert 100 < held < 400
    found = [claim(db) for _ in range(1000 // held + 1)]
    assert [ids(jobs) for jobs in found if jobs] == [[other]]
    value(db, "resume_type", job_type="mail")
    settle(db)
    assert rows(db, HOLDS) == []
    assert len(claim(db, max_jobs=1000)) == 1000


def test_a_slot_that_was_meant_for_a_job_of_a_paused_type_goes_to_another(db):
    value(db, "set_limit", limit_key="k", max_running=1)
    settle(db)
    first, second, third = (
        enqueue(db, job_type, limit_key="k") for job_type in ("report", "mail", "report")
    )
    (job,) = claim(db, max_jobs=5)
    assert job.job_id == first
    value(db, "finish_job", **owner(job))
    value(db, "pause_type", job_type="mail")

    found = ids(claim(db))
    settle(db)
    found += ids(claim(db))

    assert found == [third]
    assert run(db, second).status == "queued"


def test_jobs_go_from_a_pause_to_the_limit_that_is_full(db):
    """Let into their lane, they would be for the next claims to walk past."""
    value(db, "set_limit", limit_key="k", max_running=3)
    settle(db)
    waiting = [enqueue(db, "mail", limit_key="k") for _ in range(3)]
    value(db, "pause_type", job_type="mail")
    assert claim(db) == []
    value(db, "set_limit", limit_key="k", max_running=1)
    settle(db)
    assert rows(db, HOLDS) == [(job_id, "pause type mail") for job_id in waiting]

    value(db, "resume_type", job_type="mail")
    settle(db)

    assert rows(db, HOLDS) == [(waiting[2], "key k")]  # all but as many as it lets in soon


def test_a_breaker_leaves_the_pause_of_an_operator_alone(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    pause = "select rota._pause(null, 'mail', %s, %s, 'breaker')"
    shown = "select set_by, reason, until from rota.pauses"
    rows(db, pause, "9 of 10 failed", now + HOUR)
    assert rows(db, shown) == [("breaker", "9 of 10 failed", now + HOUR)]
    rows(db, pause, "10 of 10 failed", now + 2 * HOUR)
    assert rows(db, shown) == [("breaker", "10 of 10 failed", now + 2 * HOUR)]

    value(db, "pause_type", job_type="mail")
    rows(db, pause, "again", now + HOUR)

    # Not the reason of the breaker, which says when it tries again.
    assert rows(db, shown) == [("operator", None, None)]


@pytest.mark.slow
def test_explain_and_doctor_tell_what_is_paused_and_how_to_resume_it(db):
    job_id = enqueue(db, "mail")
    value(db, "pause_type", job_type="mail", queue="default", reason="the bank is down")
    value(db, "pause_type", job_type="mail", until="9998-01-01 00:00+00")
    value(db, "pause_queue", queue="default")
    value(db, "pause_all", reason="restored")
    assert claim(db) == []

    for reason in ("all_paused", "queue_paused", "type_paused", "type_paused"):
        told = call(db, "explain_job", job_id=job_id)[0]
        assert told.reason == reason
        assert "by role postgres" in told.explanation
        found = [row for row in call(db, "doctor") if row.finding == "queues"]
        assert told.remedy in {row.remedy for row in found}
        db.execute(told.remedy)

    assert call(db, "explain_job", job_id=job_id)[0].reason in ("no_worker", "needs_tick")
    assert not [row for row in call(db, "doctor") if "paused:" in row.evidence]
    assert not [row for row in call(db, "verify") if row.violations]


def test_what_a_pause_has_held_comes_back_where_its_row_is_deleted_by_hand(db):
    job_id = enqueue(db)
    value(db, "pause_type", job_type="x")
    assert claim(db) == []
    settle(db)

    db.execute("delete from rota.pauses")
    settle(db)

    assert ids(claim(db)) == [job_id]


def test_a_job_that_cannot_be_let_in_after_a_pause_keeps_no_other(db):
    jobs = [enqueue(db, "mail") for _ in range(3)]
    value(db, "pause_type", job_type="mail")
    assert claim(db) == []
    poison(db, jobs[1])

    value(db, "resume_type", job_type="mail")
    settle(db)

    assert ids(claim(db, max_jobs=10)) == [jobs[0], jobs[2]]
    assert pending(db) == [("pause", "type mail")]


def test_a_job_that_a_trigger_keeps_as_it_is_after_a_pause_is_asked_for_later(db, clock):
    """Without an error; else the same thousand would be let in again and again."""
    clock.set("2026-01-01 12:00+00")
    jobs = [enqueue(db, "mail") for _ in range(2)]
    value(db, "pause_type", job_type="mail")
    assert claim(db) == []
    poison(db, jobs[0], by="return null")

    value(db, "resume_type", job_type="mail")
    for _ in range(3):
        one(db, "tick")

    assert ids(claim(db, max_jobs=10)) == [jobs[1]]
    assert pending(db) == [("pause", "type mail")]
    assert scalar(db, "select due_at > rota.now() from rota.pending_checks")


def test_a_pause_ends_at_its_time_though_the_clock_was_set_back(db, clock):
    now = clock.set("2026-01-01 12:00+00")
    job = enqueue(db)
    value(db, "pause_type", job_type="x", until=now + HOUR)
    assert claim(db) == []
    settle(db)

    clock.advance(-HOUR)
    settle(db)
    clock.advance(3 * HOUR)
    settle(db)

    assert ids(claim(db)) == [job]
