"""Why a job does not run: each reason, and that its remedy works."""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    last_tick,
    nth,
    one,
    owner,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    settle,
    value,
)
from support.waiting import wait_until

pytestmark = pytest.mark.slow

ME = {"worker": "w", "host": "h", "pid": 7, "version": "1.0", "queues": ["default"]}


@pytest.fixture(autouse=True)
def _ticked(db):
    """A worker is there and somebody ticks, so that a test sees its own reason only."""
    settle(db)
    call(db, "report_worker", **ME)


def explain(db, job_id):
    found = call(db, "explain_job", job_id=job_id)
    assert [row.ordinal for row in found] == [*range(1, len(found) + 1)]
    return found


def first(db, job_id):
    return explain(db, job_id)[0]


def reasons(db, job_id):
    return [row.reason for row in explain(db, job_id)]


def cure(db, job_id):
    """Run the first remedy as it stands, and the maintenance that follows."""
    db.execute(first(db, job_id).remedy)
    settle(db)


@contextmanager
def owner_sees_sessions(db):
    """Let the owner of rota see what the sessions of all roles do."""
    role = scalar(db, "select nspowner::regrole::text from pg_namespace where nspname = 'rota'")
    db.execute(f"grant pg_read_all_stats to {role}")
    yield
    db.execute(f"revoke pg_read_all_stats from {role}")


def die(db, error="bad currency", **arguments):
    job = running(db, **arguments)
    one(db, "fail_job", **owner(job), error=error, error_type="ValueError", fatal=True)
    return job.job_id


def test_a_job_that_nothing_keeps_is_next(db):
    job_id = enqueue(db)

    (row,) = explain(db, job_id)

    assert (row.reason, row.remedy) == ("next", None)
    assert row.explanation.startswith("it is next in its queue")


def test_a_job_that_no_free_worker_takes_leads_to_the_log_of_one(db, clock):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    job_id = enqueue(db)
    clock.advance("90 s")
    none_has = "but none has for 1 min 30 s: if rota top shows one that is not busy, its log"

    (row,) = explain(db, job_id)

    assert row.reason == "next"
    assert f"a worker with a free place will claim it, {none_has} says why" in row.explanation
    call(db, "set_limit", queue="default", max_running=0)
    assert none_has not in explain(db, job_id)[-1].explanation
    call(db, "set_limit", queue="default", max_running=1)
    call(db, "deregister_worker", worker="w")
    assert none_has not in explain(db, job_id)[-1].explanation


def test_a_job_that_was_just_taken_back_was_not_passed_over(db, clock):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    job_id = running(db).job_id
    clock.advance("90 s")
    db.execute("select rota.retry_job(%s, force => true)", (job_id,))

    assert "none has" not in explain(db, job_id)[-1].explanation

    clock.advance("61 s")
    assert "none has for 1 min 1 s" in explain(db, job_id)[-1].explanation


def test_a_job_that_has_expired_says_so_and_a_retry_lets_it_run(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db, expires_at=now + timedelta(hours=1))
    clock.advance("61 minutes")
    assert claim(db) == []

    row = first(db, job_id)

    assert row.reason == "expired"
    assert "it expired 1 min ago" in row.explanation
    cure(db, job_id)
    assert "expired" not in reasons(db, job_id)
    assert [job.job_id for job in claim(db)] == [job_id]


def test_a_job_for_later_says_when(db, clock):
    clock.set("2026-01-01 00:00+00")
    db.execute("set timezone = 'UTC'")
    job_id = enqueue(db, delay="2 hours")

    row = first(db, job_id)

    assert row.reason == "not_due"
    assert "another 2 h, until 2026-01-01 02:00:00 UTC" in row.explanation
    cure(db, job_id)
    assert reasons(db, job_id) == ["next"]


def test_a_job_that_a_hand_has_put_off_for_ever_is_explained(db):
    job_id = enqueue(db)
    db.execute("update rota.jobs set run_at = 'infinity'")

    assert "until 9999-01-01" in first(db, job_id).explanation
    cure(db, job_id)
    assert reasons(db, job_id) == ["next"]


@pytest.mark.parametrize("moment", ["infinity", "-infinity"])
def test_times_that_a_hand_has_made_infinite_are_explained(db, moment):
    ids = [enqueue(db, queue="later"), running(db).job_id, running(db, queue="q").job_id]
    for fatal in (True, False):
        ids.append((job := running(db, queue="q")).job_id)
        one(db, "fail_job", **owner(job), error="e", fatal=fatal)
    for column in (
        *("expires_at", "started_at", "updated_at", "locked_until", "overdue_at"),
        *("cancel_requested_at", "failed_at"),
    ):
        db.execute(
            f"update rota.jobs set {column} = '{moment}'"
            f" where '{column}' <> 'locked_until' or status = 'running'"
        )
        for job_id in ids:
            assert first(db, job_id).explanation
    db.execute(f"update rota.finished_jobs set started_at = '{moment}'")
    db.execute(f"update rota.finished_jobs set finished_at = '{moment}'")
    db.execute(f"update rota.job_errors set started_at = '{moment}'")
    db.execute(f"update rota.job_errors set failed_at = '{moment}'")

    assert None not in [row.explanation for row in call(db, "explain_job", job_id=ids[3])]


def test_a_job_that_expires_before_its_time_says_so(db, clock):
    clock.set("2026-01-01 00:00+00")
    db.execute("set timezone = 'UTC'")
    failed, later = (enqueue(db, expires_after="1 hour") for _ in range(2))
    one(db, "fail_job", **owner(claim(db)[0]), error="no route", retry_in="2 hours")
    value(db, "reschedule_job", job_id=later, delay="2 hours")

    for job_id, reason in ((failed, "retry"), (later, "not_due")):
        row = first(db, job_id)
        assert row.reason == reason
        assert row.explanation.endswith(
            "2026-01-01 02:00:00 UTC; but it expires before that, at 2026-01-01 01:00:00 UTC"
        )
        cure(db, job_id)
        assert reasons(db, job_id)[0] in {"next", "behind_in_lane"}


def test_a_retry_tells_the_error_and_the_next_attempt(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    one(db, "fail_job", **owner(job), error="no\nroute", error_type="OSError", retry_in="5 min")

    row = first(db, job.job_id)

    assert row.reason == "retry"
    assert "attempt 1 of 10" in row.explanation
    assert "OSError: no route" in row.explanation
    assert "the next begins in 5 min" in row.explanation
    cure(db, job.job_id)
    assert reasons(db, job.job_id) == ["next"]


def test_a_retry_rule_is_named_that_a_failure_met(db, clock):
    """Not one that is set later, nor where the worker asked for another time."""
    clock.set("2026-01-12 12:00+00")
    value(db, "set_retry_rule", error_type="E", retry_in="7 days")
    failed, asked, dead, last, fatal = (running(db, max_attempts=n) for n in (3, 3, 3, 1, 3))
    one(db, "fail_job", **owner(failed), error="bad", error_type="E")
    one(db, "fail_job", **owner(asked), error="bad", error_type="E", retry_in="1 hour")
    clock.advance("1 s")
    one(db, "fail_job", **owner(fatal), error="bad", error_type="E", fatal=True)
    clock.advance("1 s")
    value(db, "set_retry_rule", error_type="E", fatal=True)
    clock.advance("1 s")
    one(db, "fail_job", **owner(dead), error="bad", error_type="E")
    one(db, "fail_job", **owner(last), error="bad", error_type="E")
    clock.advance("1 s")

    said = [first(db, job.job_id).explanation for job in (failed, asked, dead, last, fatal)]

    assert "with E: bad; the next begins in 6 d 23 h" in said[0]
    assert "with E: bad; the next begins in 59 min" in said[1]
    assert "with E: bad; a retry rule for that error lets no attempt follow" in said[2]
    assert not any("rule" in text for text in said[:2] + said[3:])

    value(db, "set_retry_rule", error_type="E", retry_in="7 days")
    again = running(db)
    one(db, "fail_job", **owner(again), error="bad", error_type="E")
    assert (
        "with E: bad; by a retry rule for that error the next begins in 7 d, at"
        in first(db, again.job_id).explanation
    )


def test_a_rerun_that_waits_for_the_retry_has_had_no_attempt(db):
    job = running(db, idempotency_key="k")
    one(db, "fail_job", **owner(job), error="bad")
    enqueue(db, idempotency_key="k", on_conflict="rerun", payload={"v": 2})

    told = first(db, job.job_id).explanation

    assert told.startswith(
        "the last attempt before its rerun failed 0 s ago with bad; the next"
    )


def test_the_next_job_tells_that_all_places_are_taken(db):
    call(db, "report_worker", **ME, concurrency=1)
    held = running(db)
    job_id = enqueue(db)

    def told():
        row = first(db, job_id)
        assert row.reason == "next"
        return row.explanation

    assert "will claim it, but its workers are full (places: 1)" in told()
    call(db, "report_worker", **{**ME, "worker": "w2"}, concurrency=2)
    assert "but" not in told()
    for _ in range(2):
        enqueue(db, priority=-1)
        claim(db, worker="w2")
    assert "will claim it, but its workers are full (places: 3)" in told()
    call(db, "report_worker", **{**ME, "worker": "w3"})
    assert "but" not in told()
    call(db, "report_worker", **{**ME, "worker": "w3"}, job_types=["other"], concurrency=9)
    assert "full (places: 3)" in told()
    value(db, "finish_job", **owner(held))
    assert "but" not in told()


def test_a_paused_queue_tells_who_and_why(db):
    job_id = enqueue(db)
    value(db, "pause_queue", queue="default", reason="the bank is down")

    row = first(db, job_id)

    assert row.reason == "queue_paused"
    assert "by role postgres" in row.explanation
    assert "the bank is down" in row.explanation
    cure(db, job_id)
    assert reasons(db, job_id) == ["next"]


@pytest.mark.own_session
def test_a_locked_row_names_the_session_that_holds_it(db, connect):
    job_id = enqueue(db)
    other = connect(autocommit=False, application_name="a forgotten console")
    pid = other.info.backend_pid
    other.execute("select from rota.jobs where id = %s for update", (job_id,))

    row = first(db, job_id)

    # The owner may not see what other roles do.
    assert row.reason == "row_locked"
    assert f"by pid {pid} (role postgres, application a forgotten console);" in row.explanation
    assert row.remedy == f"select pg_terminate_backend({pid});"
    with owner_sees_sessions(db):
        assert "idle in transaction for" in first(db, job_id).explanation
    db.execute(row.remedy)
    wait_until(lambda: reasons(db, job_id) == ["next"], "the end of the session")


@pytest.mark.own_session
def test_a_row_that_several_share_names_one_of_them(db, connect):
    job_id = enqueue(db)
    others = [connect(autocommit=False) for _ in range(2)]
    for other in others:
        other.execute("select from rota.jobs where id = %s for key share", (job_id,))

    row = first(db, job_id)

    assert row.reason == "row_locked"
    assert any(f"({other.info.backend_pid})" in row.remedy for other in others)


@pytest.mark.own_session
def test_a_lock_that_is_gone_is_not_told(db, connect):
    """The mark of a lock stays on the row after its transaction."""
    job_id = enqueue(db)
    with connect(autocommit=False) as other:
        other.execute("select from rota.jobs where id = %s for update", (job_id,))
    assert scalar(db, "select xmax::text from rota.jobs") != "0"

    assert reasons(db, job_id) == ["next"]


def test_a_full_limit_names_the_jobs_that_fill_it(db):
    value(db, "set_limit", job_type="x", max_running=1)
    settle(db)
    holder = running(db)
    job_id = enqueue(db)

    row = first(db, job_id)

    assert row.reason == "limit_full"
    assert f"1 may run at once, running: {holder.job_id} (w)" in row.explanation
    cure(db, job_id)
    assert [job.job_id for job in claim(db)] == [job_id]


@pytest.mark.own_session
@pytest.mark.parametrize(
    "subject", [{"queue": "default"}, {"job_type": "x"}, {"limit_key": "k"}]
)
def test_a_limit_that_an_open_claim_fills_names_its_session(db, connect, subject):
    value(db, "set_limit", **subject, max_running=2)
    settle(db)
    # One each: two that hold slots, and one that looked for a slot and left.
    jobs = [enqueue(db, limit_key="k") for _ in range(3)]
    other = connect(autocommit=False)
    assert len(claim(other, max_jobs=2)) == 2
    assert claim(db) == []

    row = first(db, jobs[2])

    assert row.reason == "limit_full"
    assert f"what is free is locked by pid {other.info.backend_pid} " in row.explanation
    db.execute(row.remedy)
    wait_until(lambda: reasons(db, jobs[0]) == ["next"], "the end of the session")
    settle(db)
    assert first(db, jobs[2]).reason != "limit_full"


@pytest.mark.own_session
def test_a_limit_of_which_an_open_claim_leaves_a_slot_is_not_full(db, connect):
    value(db, "set_limit", job_type="x", max_running=2)
    settle(db)
    job_ids = [enqueue(db) for _ in range(2)]
    assert len(claim(connect(autocommit=False))) == 1

    assert "limit_full" not in reasons(db, job_ids[1])


@pytest.mark.own_session
@pytest.mark.parametrize(
    "subject", [{"queue": "default"}, {"job_type": "x"}, {"limit_key": "c:*"}]
)
def test_a_full_limit_names_jobs_whose_rows_do_not_say_that_they_count(db, connect, subject):
    """They ran before the limit was set, and no tick could lock them since."""
    holder = running(db, limit_key="c:1")
    other = connect(autocommit=False)
    other.execute("select from rota.jobs where id = %s for update", (holder.job_id,))
    value(db, "set_limit", **subject, max_running=1)
    settle(db)
    assert scalar(db, "select sum(slots) from rota.limit_parts where part = -2") == -1
    job_id = enqueue(db, limit_key="c:1")

    row = first(db, job_id)

    assert row.reason == "limit_full"
    assert row.explanation.endswith(f"1 may run at once, running: {holder.job_id} (w)")


def test_a_limit_that_many_fill_names_five_and_counts_the_others(db):
    value(db, "set_limit", job_type="x", max_running=7)
    settle(db)
    held = [running(db).job_id for _ in range(7)]
    job_id = enqueue(db)

    names = ", ".join(f"{holder} (w)" for holder in held[:5])
    assert first(db, job_id).explanation.endswith(f"running: {names} and 2 more")


def test_a_full_limit_of_a_class_is_raised_for_the_key_alone(db):
    others = {"max_starts": 60, "per": "2 hours", "burst": 9, "weight": 3}
    value(db, "set_limit", limit_key="c:*", max_running=1, **others)
    settle(db)
    running(db, limit_key="c:1")
    job_id = enqueue(db, limit_key="c:1")

    assert first(db, job_id).reason == "limit_full"
    cure(db, job_id)
    assert [job.job_id for job in claim(db)] == [job_id]
    # Its row goes before that of the class, so the rest of that is in it.
    assert rows(
        db,
        "select max_running, max_starts, per::text, burst, weight from rota.limits"
        " order by max_running",
    ) == [(1, 60, "02:00:00", 9, 3), (2, 60, "02:00:00", 9, 3)]


def test_the_rate_of_a_class_is_raised_for_the_key_in_the_same_time(db):
    value(db, "set_limit", limit_key="c:*", max_running=5, max_starts=1, per="1 hour")
    settle(db)
    running(db, limit_key="c:1")
    job_id = enqueue(db, limit_key="c:1")

    row = first(db, job_id)
    assert row.reason == "rate"
    db.execute(row.remedy)

    assert rows(
        db,
        "select max_running, max_starts, per::text from rota.limits order by max_starts",
    ) == [(5, 1, "01:00:00"), (5, 2, "01:00:00")]


def test_a_limit_that_was_raised_is_full_until_a_tick(db):
    value(db, "set_limit", job_type="x", max_running=1)
    settle(db)
    running(db)
    job_id = enqueue(db)
    assert claim(db) == []
    row = first(db, job_id)
    assert row.reason == "limit_full"
    db.execute(row.remedy)

    row = first(db, job_id)

    assert (row.reason, row.remedy) == ("needs_tick", "select * from rota.tick();")
    assert row.explanation.startswith("limit type x was changed 0 s ago, to 2 at once: nothing")
    cure(db, job_id)
    assert reasons(db, job_id) == ["next"]
    assert [job.job_id for job in claim(db)] == [job_id]


def test_a_limit_that_was_lowered_is_full_while_more_run(db):
    """No tick helps before as many have ended, so none is the remedy."""
    value(db, "set_limit", job_type="x", max_running=3)
    settle(db)
    held = [running(db).job_id for _ in range(3)]
    value(db, "set_limit", job_type="x", max_running=2)
    settle(db)
    job_id = enqueue(db)

    row = first(db, job_id)

    assert row.reason == "limit_full"
    names = ", ".join(f"{holder} (w)" for holder in held)
    assert row.explanation == f"limit type x is full: 2 may run at once, running: {names}"
    cure(db, job_id)
    assert [job.job_id for job in claim(db)] == [job_id]


@pytest.mark.parametrize(
    ("limit", "room"),
    [({"max_running": 2}, 2), ({"max_starts": 100, "per": "10 s", "burst": 2}, 100)],
)
def test_a_job_behind_those_that_were_let_in_needs_no_tick(db, clock, limit, room):
    """They have no worker: that keeps it waiting, though its limit has room."""
    clock.set("2026-01-01 00:00+00")
    value(db, "deregister_worker", worker="w")
    value(db, "set_limit", job_type="x", **limit)
    settle(db)
    job_ids = [enqueue(db) for _ in range(room + 4)]
    assert first(db, job_ids[-1]).reason == "needs_tick"

    settle(db)

    assert scalar(db, "select count(*) from rota.jobs where hold is null") == room + 2
    assert reasons(db, job_ids[-1]) == ["no_worker", "behind_in_limit"]
    with db.transaction(force_rollback=True):
        claim(db, max_jobs=1000)  # whose mark stays on them
    assert reasons(db, job_ids[-1]) == ["no_worker", "behind_in_limit"]


def test_a_job_that_the_end_of_others_lets_in_needs_no_tick(db):
    """A tick looks once, and passes over a job that a session has locked just then."""
    value(db, "set_limit", job_type="x", max_running=2)
    settle(db)
    in_lane = [enqueue(db) for _ in range(3)]
    settle(db)
    job_id = enqueue(db)
    assert first(db, job_id).reason == "needs_tick"

    db.execute("delete from rota.pending_checks")

    assert reasons(db, job_id) == ["behind_in_limit"]
    for job in claim(db, max_jobs=2):
        end_of(db, job)
    assert [job.job_id for job in claim(db, max_jobs=2)] == [in_lane[-1], job_id]


def test_a_raised_limit_of_a_class_needs_no_tick_before_a_claim(db):
    """A tick issues places for the keys that have held jobs, and a claim holds them."""
    value(db, "set_limit", limit_key="c:*", max_running=1)
    settle(db)
    end_of(db, running(db, limit_key="c:1"))
    value(db, "set_limit", limit_key="c:*", max_running=2)
    settle(db)
    job_id = enqueue(db, limit_key="c:1")

    assert reasons(db, job_id) == ["next"]
    assert claim(db) == []
    assert first(db, job_id).reason == "needs_tick"
    cure(db, job_id)
    assert [job.job_id for job in claim(db)] == [job_id]


def test_a_rate_says_when_ticks_let_in_the_next(db, clock):
    """That is a whole span after the last was let in, which may be longer than it has to be."""
    clock.set("2026-01-01 00:00+00")
    db.execute("set timezone = 'UTC'")
    value(db, "set_limit", job_type="x", max_starts=1, per="10 s")
    settle(db)
    running(db)
    job_ids = [enqueue(db), enqueue(db)]
    assert claim(db, max_jobs=10) == []
    clock.advance("18 s")
    settle(db)
    assert [job.job_id for job in claim(db, max_jobs=10)] == job_ids[:1]
    clock.advance("4 s")
    settle(db)

    row = first(db, job_ids[1])

    assert row.reason == "rate"
    assert row.explanation.endswith("the next is in 6 s, at 2026-01-01 00:00:28 UTC")
    clock.advance("6 s")
    assert first(db, job_ids[1]).reason == "needs_tick"
    settle(db)
    assert [job.job_id for job in claim(db)] == job_ids[1:]


def test_a_rate_says_when_the_next_may_start(db, clock):
    clock.set("2026-01-01 00:00:30+00")
    value(db, "set_limit", job_type="x", max_starts=1, per="1 hour")
    settle(db)
    running(db)
    job_id = enqueue(db)

    row = first(db, job_id)

    assert row.reason == "rate"
    assert "1 start per 1 h: the next is in 59 min 30 s" in row.explanation
    cure(db, job_id)
    assert [job.job_id for job in claim(db)] == [job_id]


def test_a_job_that_a_breaker_lets_through_to_try_is_not_paused(db):
    value(db, "set_breaker", job_type="x", max_failures=1, pause_for="1 s")
    failed, tried = running(db), enqueue(db)
    one(db, "fail_job", **owner(failed), error="e")
    settle(db)
    assert claim(db) == []
    assert first(db, tried).reason == "type_paused"
    db.execute("update rota.breaker_states set retry_at = rota.now() - interval '1 s'")
    settle(db)

    assert reasons(db, tried) == ["next"]
    value(db, "pause_type", job_type="x", queue="default")
    assert first(db, tried).reason == "type_paused"


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_job_that_moves_to_another_database_is_for_no_worker_here(db, is_paused):
    value(db, "set_database_number", number=5)
    value(db, "set_limit", job_type="x", max_running=0)
    settle(db)
    job_id = enqueue(db, queue="q")
    if is_paused:
        value(db, "pause_queue", queue="q")
    value(db, "begin_queue_move", queue="q", database=6)

    (row,) = explain(db, job_id)

    assert row.reason == "queue_paused"
    assert row.remedy == "select * from rota.queue_move_status('q');"


def test_a_job_that_was_held_by_what_is_over_needs_a_tick(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "pause_type", job_type="x", until=now + timedelta(minutes=1))
    value(db, "set_limit", job_type="y", max_running=1)
    settle(db)
    paused = enqueue(db)
    holder = running(db, job_type="y")
    limited = enqueue(db, "y")
    assert claim(db, max_jobs=2) == []
    assert first(db, paused).reason == "type_paused"
    assert first(db, limited).reason == "limit_full"
    clock.advance("61 s")
    # As an end that did not see the held job leaves it.
    db.execute("update rota.jobs set hold = null where id = %s", (limited,))
    value(db, "finish_job", **owner(holder))
    db.execute("update rota.jobs set hold = 'type y' where id = %s", (limited,))

    for job_id, words in (
        (paused, "the pause that held it has ended: the next tick makes it ready"),
        (
            limited,
            "it waits for limit type y, which has free capacity: the next tick, or the end of",
        ),
    ):
        row = first(db, job_id)
        assert (row.reason, row.remedy) == ("needs_tick", "select * from rota.tick();")
        assert row.explanation.startswith(words)
    cure(db, paused)
    assert first(db, paused).reason == "next"
    assert {job.job_id for job in claim(db, max_jobs=2)} == {paused, limited}


def test_a_limit_that_was_just_set_says_that_it_is_counted_first(db):
    running(db)
    job_id = enqueue(db)
    value(db, "set_limit", job_type="x", max_running=2)
    # As long as the limit does not know of the running one.
    assert rows(db, "select asked_xid from rota.limits_to_count") == [(None,)]

    assert first(db, job_id).reason == "limit_new"
    cure(db, job_id)
    assert reasons(db, job_id) == ["next"]


@pytest.mark.parametrize("rule", ["wait", "run", "cancel", None])
def test_what_a_job_waited_for_was_deleted_by_hand(db, rule):
    if rule:
        gone = enqueue(db)
        job_id = enqueue(db, depends_on=[gone], if_parent_dead=rule)
    else:
        gone, job_id = enqueue(db, ordering_key="k"), enqueue(db, ordering_key="k")
    settle(db)
    db.execute("delete from rota.jobs where id = %s", (gone,))
    settle(db)

    row = first(db, job_id)

    if rule:
        assert row.reason == "waits_for_job"
        assert f"job {gone} (which is gone: once this one is retried, a" in row.explanation
    else:
        assert row.reason == "waits_for_nothing"
    cure(db, job_id)
    if rule == "cancel":
        assert first(db, job_id).reason == "cancelled"
        cure(db, job_id)
    assert [job.job_id for job in claim(db)] == [job_id]


def test_a_dead_parent_is_named_before_those_that_go_on(db):
    dead, alive = die(db), enqueue(db)
    job_id = enqueue(db, depends_on=[alive, dead], if_parent_dead="wait")
    settle(db)

    found = explain(db, job_id)

    assert [row.reason for row in found] == ["waits_for_job"] * 2
    assert f"waits for job {dead} (dead: ValueError: bad currency)" in found[0].explanation
    assert "one of 2 that have not succeeded" in found[0].explanation
    assert f"waits for job {alive} (x, queued)" in found[1].explanation
    cure(db, job_id)
    assert scalar(db, "select status from rota.jobs where id = %s", dead) == "queued"


def test_a_job_that_was_cancelled_with_its_parent_comes_back_with_it(db):
    parent = running(db)
    job_id = enqueue(db, depends_on=[parent.job_id])
    one(db, "fail_job", **owner(parent), error="e", fatal=True)
    settle(db)

    assert first(db, job_id).reason == "cancelled"
    cure(db, job_id)
    assert reasons(db, job_id) == ["waits_for_job"]


@pytest.mark.parametrize("source", ["explain_job", "doctor"])
def test_a_dead_job_comes_back_with_those_that_were_cancelled_because_of_it(db, source):
    job = running(db)
    child = enqueue(db, depends_on=[job.job_id])
    last = enqueue(db, depends_on=[child])
    one(db, "fail_job", **owner(job), error="bad", fatal=True)
    settle(db)

    found = (
        first(db, job.job_id)
        if source == "explain_job"
        else next(row for row in call(db, "doctor") if row.finding == "dead_jobs")
    )

    db.execute(found.remedy)
    settle(db)
    assert [run(db, job_id).status for job_id in (job.job_id, child, last)] == [
        *("queued", "blocked", "blocked")
    ]


def test_a_job_that_was_cancelled_comes_back_whatever_its_parent_is(db):
    """Its parent runs again, or a live job has the key of that."""
    dead = die(db, idempotency_key="k")
    first_child, second_child = (enqueue(db, depends_on=[dead]) for _ in range(2))
    settle(db)
    holder = enqueue(db, idempotency_key="k", delay="1 hour")

    cure(db, first_child)

    assert run(db, holder).status == "cancelled"
    assert reasons(db, first_child) == reasons(db, second_child) == ["waits_for_job"]
    for job_id in (second_child, first_child):
        value(db, "cancel_job", job_id=job_id)
    # As after the parent died again, and was retried alone.
    third_child = enqueue(db, depends_on=[dead])
    (job,) = claim(db)
    one(db, "fail_job", **owner(job), error="e", fatal=True)
    settle(db)
    value(db, "retry_job", job_id=dead)
    claim(db)
    cure(db, third_child)
    assert reasons(db, third_child) == ["waits_for_job"]


def test_a_job_that_was_cancelled_by_itself_comes_back_by_itself(db, clock):
    """Its parents had nothing to do with it: the one planned for later keeps its time."""
    clock.set("2026-01-01 00:00+00")
    parent = enqueue(db, delay="1 hour")
    by_hand = enqueue(db, depends_on=[parent])
    value(db, "cancel_job", job_id=by_hand, reason=f"parent {parent} is late")
    dead = die(db)
    of_dead = enqueue(db, depends_on=[dead], if_parent_dead="wait")
    value(db, "cancel_job", job_id=of_dead, reason=f"parent {dead} is wrong")
    expired = enqueue(db, depends_on=[parent], expires_after="1 s")
    clock.advance("2 s")
    settle(db)

    for job_id in (by_hand, of_dead, expired):
        assert first(db, job_id).remedy == f"select rota.retry_job({job_id});"
        cure(db, job_id)
        assert reasons(db, job_id) == ["waits_for_job"]
    assert reasons(db, parent)[0] == "not_due"


def test_of_two_parents_the_one_that_died_is_retried(db):
    dead, other = running(db), enqueue(db, delay="1 hour")
    job_id = enqueue(db, depends_on=[dead.job_id, other])
    one(db, "fail_job", **owner(dead), error="e", fatal=True)
    settle(db)

    assert first(db, job_id).remedy == f"select rota.retry_with_dependants({dead.job_id});"
    cure(db, job_id)
    assert reasons(db, job_id) == ["waits_for_job"] * 2


def test_a_halted_key_names_the_dead_job_and_both_ways_on(db):
    dead = die(db, ordering_key="k'1")
    job_id = enqueue(db, ordering_key="k'1")
    settle(db)

    retry, go_on = explain(db, job_id)

    assert (retry.reason, go_on.reason) == ("key_halted", "key_halted")
    assert f"job {dead}, which is dead: ValueError: bad currency" in retry.explanation
    assert retry.remedy == f"select rota.retry_job({dead});"
    db.execute(go_on.remedy)
    settle(db)
    assert reasons(db, job_id) == ["next"]


def test_a_job_behind_one_that_is_not_committed_says_what_it_may_wait_for(db, connect):
    other = connect(autocommit=False)
    head = enqueue(other, ordering_key="k")
    job_id = enqueue(db, ordering_key="k")
    settle(db)

    row = first(db, job_id)

    assert (row.reason, "a transaction that is still open" in row.explanation) == (
        "needs_tick",
        True,
    )
    other.commit()
    settle(db)
    assert (reasons(db, head), reasons(db, job_id)) == (["next"], ["behind_in_key"])


def test_a_job_behind_others_of_its_key_names_the_first(db):
    head = running(db, ordering_key="k")
    enqueue(db, ordering_key="k")
    job_id = enqueue(db, ordering_key="k")
    settle(db)

    row = first(db, job_id)

    assert row.reason == "behind_in_key"
    assert "2 jobs are before it" in row.explanation
    assert f"job {head.job_id} (x, running)" in row.explanation


def test_no_worker_at_the_queue(db):
    job_id = enqueue(db, queue="mail")

    row = first(db, job_id)

    assert row.reason == "no_worker"
    assert row.explanation.startswith("no live worker takes jobs of queue mail. Start one")


def test_no_worker_for_the_type(db):
    call(db, "report_worker", **{**ME, "job_types": ["a", "b"]})
    call(db, "report_worker", **{**ME, "worker": "w2", "job_types": ["a"]})
    job_id = enqueue(db, "charge")

    row = first(db, job_id)

    assert row.reason == "no_worker"
    assert "type charge (2 on queue default take others: w, w2)" in row.explanation
    call(db, "report_worker", **{**ME, "worker": "w2", "job_types": ["charge"]})
    assert reasons(db, job_id) == ["next"]


@pytest.mark.own_session
def test_a_worker_whose_session_is_gone_counts_no_more(db, connect):
    job_id = enqueue(db, queue="mail")
    other = connect()
    session = other.info.backend_pid
    me = {**ME, "worker": "w2", "queues": ["mail"], "backend_pid": session}
    call(other, "report_worker", **me)
    assert reasons(db, job_id) == ["next"]
    (job,) = claim(db, worker="w2", queues=["mail"])
    assert first(db, job_id).reason == "running"

    db.execute("select pg_terminate_backend(%s, 10000)", (session,))

    row = first(db, job_id)
    assert row.reason == "worker_gone"
    db.execute(row.remedy)
    assert "; w2 did, last seen" in first(db, job_id).explanation
    assert job.job_id == job_id


def test_a_place_in_the_lane_is_counted_and_timed(db, clock):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    db.execute("set timezone = 'UTC'")
    for _ in range(4):
        value(db, "finish_job", **owner(running(db)))
        clock.advance("30 s")
    enqueue(db, priority=-1)
    enqueue(db, priority=1)
    enqueue(db, delay="1 hour")
    enqueue(db)
    job_id = enqueue(db)

    (row,) = explain(db, job_id)

    assert row.reason == "behind_in_lane"
    assert "2 jobs are before it in queue default" in row.explanation
    assert row.explanation.endswith(
        "; 4 ended in the last 2 min: at that rate it starts in about 1 min,"
        " at 2026-01-01 00:03:00 UTC"
    )


def test_a_place_is_timed_by_the_stages_that_end_in_its_queue(db, clock):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    stages = [{"stage": "a", "queue": "q"}, {"stage": "b", "queue": "last"}]
    value(db, "define_pipeline", pipeline="p", stages=Jsonb(stages))
    runs = [value(db, "start_pipeline", pipeline="p") for _ in range(6)]
    for _ in range(4):
        (job,) = claim(db, queues=["q"])
        value(db, "finish_job", **owner(job))
        clock.advance("30 s")

    *_, row = explain(db, runs[5])

    assert "; 4 ended in the last 2 min: at that rate" in row.explanation


def test_of_a_queue_that_keeps_nothing_it_is_not_told_that_nothing_ended(db, clock):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    enqueue(db)
    job_id = enqueue(db)
    nothing = "; no job of queue default ended in the last ten minutes"
    assert nothing in first(db, job_id).explanation

    value(db, "set_queue", queue="default", keep_finished="0")

    assert nothing not in first(db, job_id).explanation


def test_a_place_among_those_that_wait_for_a_limit_is_counted_and_timed(db, clock):
    clock.set("2026-01-01 00:00+00")
    db.execute("set timezone = 'UTC'")
    value(db, "set_limit", job_type="x", max_running=1)
    settle(db)
    holder = running(db, lease="1 hour")
    held = [enqueue(db), enqueue(db, priority=-1), enqueue(db)]
    enqueue(db, queue="other")
    claim(db, queues=["default", "other"], max_jobs=10)
    waiting = "select id from rota.jobs where hold = 'type x' and queue = 'default' order by id"
    assert [row.id for row in rows(db, waiting)] == held

    full, place = explain(db, held[2])

    assert full.reason == "limit_full"
    assert (place.reason, place.remedy) == ("behind_in_limit", None)
    assert place.explanation == (
        "2 jobs are before it in queue default, waiting for limit type x; no job under it"
        " ended in the last ten minutes"
    )
    clock.advance("90 s")
    call(db, "report_worker", **ME)
    end_of(db, running(db, job_type="y"))
    end_of(db, holder)
    clock.advance("30 s")
    (job,) = claim(db)
    assert job.job_id == held[1]
    # The first of the others is open, and the last waits behind it.
    last = explain(db, held[2])
    assert [row.reason for row in last] == ["limit_full", "behind_in_limit"]
    assert last[1].explanation == (
        "1 job is before it in queue default, waiting for limit type x; 1 ended in the last"
        " 30 s: at that rate it starts in about 30 s, at 2026-01-01 00:02:30 UTC"
    )


def test_a_place_is_counted_however_many_other_queues_wait_for_the_limit(db):
    value(db, "set_limit", limit_key="k", max_running=1)
    settle(db)
    for number in range(21):
        enqueue(db, queue=f"q{number}", limit_key="k")
    *_, last = [enqueue(db, queue="z", limit_key="k") for _ in range(2)]
    db.execute("update rota.jobs set hold = 'key k'")

    *_, place = explain(db, last)

    assert place.explanation.startswith(
        "1 job is before it in queue z, waiting for limit key k"
    )


def end_of(db, job):
    value(db, "finish_job", **owner(job))


def test_a_job_of_a_fair_queue_whose_time_has_come_needs_a_tick(db, clock):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    job_id = enqueue(db, limit_key="c:1", delay="1 hour")
    clock.advance("3 hours")
    call(db, "report_worker", **ME)

    found = explain(db, job_id)

    assert [row.reason for row in found] == ["needs_tick", "no_tick"]
    assert "due for 2 h" in found[0].explanation
    assert "no tick has run for 3 h" in found[1].explanation
    cure(db, job_id)
    assert reasons(db, job_id) == ["next"]


def test_a_running_job_tells_who_has_it_and_how_far_it_is(db, clock):
    clock.set("2026-01-01 00:00+00")
    settle(db)
    job = running(db, lease="5 min")
    clock.advance("90 s")
    value(db, "set_progress", **owner(job), percent=40, message="half")
    clock.advance("30 s")

    (row,) = explain(db, job.job_id)

    assert row.reason == "running"
    assert "w has had it for 2 min, in attempt 1 of 10" in row.explanation
    assert "last sign of life was 30 s ago, its lease expires in 3 min" in row.explanation
    assert "40.00 % done: half" in row.explanation


def test_a_running_job_tells_its_time_limit(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="default", time_limit="1 min")
    own, queues = running(db, time_limit="3 min"), running(db)
    clock.advance("50 s")

    # One that is set now is for those that are claimed from now on.
    value(db, "set_queue", queue="default", time_limit="1 hour")
    assert "; its time limit expires in 2 min 10 s" in first(db, own.job_id).explanation
    assert "; its time limit expires in 10 s" in first(db, queues.job_id).explanation
    db.execute("update rota.jobs set locked_until = rota.now() + interval '1 hour'")
    clock.advance("20 s")
    assert "its time limit expired 10 s ago" in first(db, queues.job_id).explanation


def test_a_stage_that_runs_as_long_as_others_of_its_type_does_not_hang(db, clock):
    clock.set("2026-01-01 00:00+00")
    stages = [{"stage": "a"}, {"stage": "b", "queue": "last"}]
    value(db, "define_pipeline", pipeline="p", stages=Jsonb(stages))
    for is_first in (True, False):
        value(db, "start_pipeline", pipeline="p")
        (job,) = claim(db, lease="1 day")
        clock.advance("90 min")
        settle(db)
        assert ("hung" in reasons(db, job.job_id)) == is_first
        value(db, "finish_job", **owner(job))


def test_a_job_that_runs_much_longer_than_others_of_its_type(db, clock):
    clock.set("2026-01-01 00:00+00")
    usual = running(db)
    clock.advance("40 s")
    value(db, "finish_job", **owner(usual))
    job, other = running(db, lease="1 day"), running(db, job_type="y", lease="1 day")
    clock.advance("399 s")
    settle(db)
    assert reasons(db, job.job_id) == ["running"]
    clock.advance("2 s")

    assert reasons(db, job.job_id) == ["hung", "running"]
    assert first(db, job.job_id).explanation == (
        "it has run for 6 min 41 s, and the longest of its type took 40 s: its handler may hang"
    )
    (found,) = [row for row in call(db, "doctor") if row.finding == "running_jobs"]
    assert found.evidence.startswith(
        f"job {job.job_id} of type x in queue default, on w: it has"
    )
    assert reasons(db, other.job_id) == ["running"]
    clock.advance("1 hour")
    settle(db)
    assert "none of its type has ended lately" in first(db, other.job_id).explanation
    cure(db, job.job_id)
    assert [again.job_id for again in claim(db)] == [job.job_id]


def test_a_running_job_that_was_asked_to_stop(db):
    job = running(db)
    value(db, "cancel_job", job_id=job.job_id, reason="wrong file")

    found = explain(db, job.job_id)

    assert [row.reason for row in found] == ["running", "cancel_requested"]
    assert "wrong file" in found[1].explanation
    db.execute(found[1].remedy)
    row = first(db, job.job_id)
    assert (row.reason, row.explanation) == (
        "cancelled",
        "it was cancelled 0 s ago, because wrong file",
    )
    with raises("RT002"):
        value(db, "finish_job", **owner(job))


def test_a_job_that_does_not_stop_is_taken_back_to_be_cancelled(db, clock):
    job = running(db, time_limit="10 s")
    value(db, "cancel_job", job_id=job.job_id, reason="wrong file")
    clock.advance("20 s")

    assert first(db, job.job_id).reason == "overdue"

    cure(db, job.job_id)
    assert first(db, job.job_id).explanation == "it was cancelled 0 s ago, because wrong file"


def test_a_rerun_that_was_asked_for_after_a_cancel_runs_once_the_job_is_taken_back(db):
    job = running(db, idempotency_key="k", payload={"v": 1})
    value(db, "cancel_job", job_id=job.job_id)
    enqueue(db, idempotency_key="k", on_conflict="rerun", payload={"v": 2})

    found = explain(db, job.job_id)[1]

    assert (found.reason, "lets the rerun begin" in found.explanation) == (
        "cancel_requested",
        True,
    )
    db.execute(found.remedy)
    assert [again.payload for again in claim(db)] == [{"v": 2}]


@pytest.mark.parametrize("is_running", [False, True])
def test_an_ended_job_whose_key_is_taken_names_the_one_that_has_it(db, is_running):
    key = "k'\x1b[31m"
    dead = die(db, idempotency_key=key)
    holder = enqueue(db, idempotency_key=key)
    if is_running:
        claim(db)

    row = first(db, dead)

    status = "running" if is_running else "queued"
    assert (
        f"; its idempotency key is taken by job {holder} ({status}), so it" in row.explanation
    )
    if is_running:
        assert row.remedy == f"select * from rota.explain_job({holder});"
    else:
        cure(db, dead)
        assert reasons(db, dead) == ["next"]
        assert first(db, holder).explanation.startswith(
            f"it was cancelled 0 s ago, because job {dead} is retried in its place; its"
        )


def test_a_dependant_whose_key_is_taken_comes_back_by_itself(db):
    parent = running(db)
    job_id = enqueue(db, depends_on=[parent.job_id], idempotency_key="k")
    one(db, "fail_job", **owner(parent), error="bad", fatal=True)
    settle(db)
    other = enqueue(db, idempotency_key="k")

    assert f"taken by job {other} (queued)" in first(db, job_id).explanation

    cure(db, job_id)
    assert (run(db, job_id).status, run(db, other).status) == ("blocked", "cancelled")
    assert first(db, job_id).remedy == f"select rota.retry_job({parent.job_id});"


def test_a_dead_parent_and_the_head_of_a_key_whose_key_is_taken(db):
    dead = die(db, ordering_key="o", idempotency_key="k")
    waits = enqueue(db, depends_on=[dead], if_parent_dead="wait")
    behind = enqueue(db, ordering_key="o")
    holder = enqueue(db, idempotency_key="k", delay="1 hour")
    settle(db)

    for job_id in (waits, behind):
        row = first(db, job_id)
        assert f"its idempotency key is taken by job {holder} (queued)" in row.explanation
    db.execute(row.remedy)
    settle(db)
    for job_id, reason in ((waits, "waits_for_job"), (behind, "behind_in_key")):
        row = first(db, job_id)
        assert row.reason == reason
        assert f"job {dead} (x, queued)" in row.explanation


@pytest.mark.of_utf8
def test_texts_of_others_cannot_move_the_cursor(db):
    job = running(db, ordering_key="o\x9b2J")
    evil = "a\x1b]0;b\x07c\u202e\u061cd\x85e\nf"
    one(db, "fail_job", **owner(job), error=evil, error_type="E\x1b[2J", fatal=True)
    behind = enqueue(db, ordering_key="o\x9b2J")
    settle(db)

    found = explain(db, job.job_id) + explain(db, behind)

    assert all(row.explanation.isprintable() for row in found)
    assert "failed with E?[2J: a?]0;b?c??d e f" in found[0].explanation
    assert all((row.remedy or "").isprintable() for row in found)
    (go_on,) = [row for row in found if "resume_ordering_key" in (row.remedy or "")]
    db.execute(go_on.remedy)
    settle(db)
    assert reasons(db, behind) == ["next"]


def test_an_error_without_a_text_and_a_type_says_so(db):
    for words in ((None, None), ("", ""), (None, " \n")):
        assert scalar(db, "select rota._error_words(%s, %s)", *words) == "no text"
    assert scalar(db, "select rota._error_words('E', null)") == "E"


def test_nobody_ticks(db, clock):
    job_id = enqueue(db)
    assert reasons(db, job_id) == ["next"]
    clock.set(last_tick(db))
    clock.advance("7 minutes")
    call(db, "report_worker", **ME)

    found = explain(db, job_id)

    assert [row.reason for row in found] == ["next", "no_tick"]
    assert found[1].explanation.startswith("no tick has run for 7 min: jobs that wait")
    db.execute(found[1].remedy)
    assert reasons(db, job_id) == ["next"]


def test_a_lease_that_is_over_is_swept_by_the_remedy(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db, lease="1 min")
    clock.advance("3 min")

    row = first(db, job.job_id)

    assert row.reason == "lease_over"
    assert "expired 2 min ago" in row.explanation
    cure(db, job.job_id)
    assert first(db, job.job_id).reason == "retry"


def test_a_dead_job_tells_its_attempts_from_the_last(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    clock.advance("2 s")
    one(db, "fail_job", **owner(job), error="first", retry_in="0")
    (again,) = claim(db)
    clock.advance("3 s")
    one(db, "fail_job", **owner(again), error="last", error_type="E", fatal=True)

    dead, last, before = explain(db, job.job_id)

    assert (dead.reason, dead.remedy) == ("dead", f"select rota.retry_job({job.job_id});")
    assert "attempt 2 of 10, 0 s ago, failed with E: last" in dead.explanation
    assert last.explanation == "attempt 2 by w ended 0 s ago, after 3 s, with E: last"
    assert before.explanation == "attempt 1 by w ended 3 s ago, after 2 s, with first"


def test_what_succeeded_or_was_cancelled(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    clock.advance(timedelta(seconds=2))
    value(db, "finish_job", **owner(job))
    cancelled = enqueue(db)
    value(db, "cancel_job", job_id=cancelled, reason="wrong file")

    (good,) = explain(db, job.job_id)
    (bad,) = explain(db, cancelled)

    assert good.explanation == "it succeeded 0 s ago in attempt 1 of 10, after 2 s, by w"
    assert bad.explanation == "it was cancelled 0 s ago, because wrong file"
    assert (good.remedy, bad.remedy) == (None, f"select rota.retry_job({cancelled});")


def test_the_reference_has_each_reason_and_each_finding(db, sql_dir):
    code = (sql_dir / "operations" / "explain.sql").read_text()
    table = set(re.findall(r"`(\w+)`", "".join(
        line.split("|")[1] for line in (sql_dir / "README.md").read_text().splitlines()
        if line.startswith("| `")
    )))  # fmt: skip

    assert set(re.findall(r"select '([a-z_]+)'", code)) <= table
    assert {row.finding for row in call(db, "doctor")} <= table


def test_explain_job_waits_for_a_locked_table_no_longer_than_a_second(db, connect):
    job_id = enqueue(db)
    other = connect()
    other.autocommit = False
    other.execute("lock table rota.jobs in access exclusive mode")

    with raises("55P03"):
        explain(db, job_id)

    other.rollback()
    assert reasons(db, job_id) == ["next"]


def test_explain_job_refuses_what_it_cannot_answer(db):
    with refused("job_id"):
        value(db, "explain_job", job_id=None)
    with raises("RT001"):
        value(db, "explain_job", job_id=999)


def test_explain_job_writes_nothing_whatever_the_job_is(db):
    """So it works on a standby."""
    value(db, "set_limit", job_type="x", max_running=1, max_starts=5)
    settle(db)
    running(db)
    enqueue(db)
    die(db, job_type="y", ordering_key="k")
    enqueue(db, ordering_key="k")
    enqueue(db, depends_on=[nth(db, 1)])
    db.execute("set default_transaction_read_only = on")

    for (job_id,) in rows(db, "select id from rota.job_runs"):
        assert explain(db, job_id)


def test_a_place_under_a_limit_is_counted_without_those_behind_it(db):
    value(db, "set_limit", job_type="x", max_running=1)
    settle(db)
    running(db, lease="1 hour")
    db.execute("select rota.enqueue('x') from generate_series(1, 3000)")
    claim(db, max_jobs=1000)
    claim(db, max_jobs=1000)
    held = rows(db, "select id from rota.jobs where hold = 'type x' order by id limit 6")
    walked = "select pg_stat_get_xact_tuples_returned('rota.jobs_hold_idx'::regclass)"

    with db.transaction():
        before = scalar(db, walked)
        place = explain(db, held[5].id)[-1]
        entries = scalar(db, walked) - before

    assert (
        "5 jobs are before it in queue default, waiting for limit type x" in place.explanation
    )
    assert 0 < entries < 500
