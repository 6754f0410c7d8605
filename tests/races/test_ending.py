"""One job, two that want to say how it ended: one outcome is accepted, the other is told."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from invariants import check_invariants
from races.harness import Pending, Session, call
from races.instrument import PAUSE, stopped
from support.clock import Clock
from support.mutation import mutate


class Claimed:
    """A running job, and the calls that speak for it."""

    def __init__(self, session: Session, **arguments: Any) -> None:
        session.fetch(*call("enqueue", job_type="t", **arguments))
        row = session.fetch(*call("claim_jobs", worker="w", lease="1 second"))[0]
        self.job_id, self.token = row[:2]
        self.ref = {"job_id": self.job_id, "lease_token": self.token}
        self.finish = call("finish_job", **self.ref)
        self.fail = call("fail_job", **self.ref, error="no luck")
        self.heartbeat = call("heartbeat", **self.ref)
        self.snooze = call("snooze_job", **self.ref, delay="1 hour")
        self.release = call("release_jobs", job_ids=[self.job_id], lease_tokens=[self.token])
        self.cancel = call("cancel_job", job_id=self.job_id)
        self.retry = call("retry_job", job_id=self.job_id)
        self.retry_forced = call("retry_job", job_id=self.job_id, force=True)


RETRY_AND_FINISH = """
do $$ begin
    perform rota.retry_job({});
    perform rota.finish_job(c.job_id, c.lease_token) from rota.claim_jobs('w') as c;
end $$"""
SWEEP = call("sweep_stale_leases")
TICK = call("tick")
SWEPT, DELETED, DROPPED = 1, 3, 10  # where a tick says so


@pytest.fixture
def job(a: Session, clock: Clock) -> Claimed:
    """A job whose lease is over though nobody has swept it."""
    clock.set("2026-03-01 12:00:00+00")
    job = Claimed(a)
    clock.advance("1 minute")
    return job


@pytest.fixture(autouse=True)
def _invariants(db: psycopg.Connection[Any]) -> Iterator[None]:
    yield
    check_invariants(db)


def status(session: Session) -> list[Any]:
    return session.fetch("select r.status, r.attempts from rota.job_runs as r")


def sqlstate(pending: Pending) -> str | None:
    with pytest.raises(psycopg.Error) as caught:
        pending.result()
    return caught.value.sqlstate


def test_sweep_passes_over_a_job_that_is_being_finished(
    a: Session, b: Session, job: Claimed
) -> None:
    """A finishes late and stays open; B sweeps and does not wait; A commits."""
    with a.transaction():
        assert a.fetch(*job.finish) == [("finished",)]
        assert b.fetch(*SWEEP) == [(0,)]

    assert status(b) == [("succeeded", 1)]


def test_finish_waits_for_an_open_sweep_and_is_refused(
    a: Session, b: Session, job: Claimed
) -> None:
    """A sweeps and stays open; B finishes and waits; A commits; B's lease is lost."""
    with a.transaction():
        assert a.fetch(*SWEEP) == [(1,)]
        pending = b.start(*job.finish)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT002"
    assert status(b) == [("failed", 1)]


def test_finish_stands_when_the_sweep_before_it_rolls_back(
    a: Session, b: Session, job: Claimed
) -> None:
    """A sweeps and stays open; B finishes and waits; A rolls back; B's finish counts."""
    with a.transaction() as transaction:
        a.fetch(*SWEEP)
        pending = b.start(*job.finish)
        pending.wait_blocked(by=a)
        raise psycopg.Rollback(transaction)

    assert pending.result() == [("finished",)]
    assert status(b) == [("succeeded", 1)]


def test_heartbeat_in_time_keeps_the_job_from_the_sweep(
    a: Session, b: Session, job: Claimed
) -> None:
    """A beats late and stays open; B sweeps, passing it over; A commits; B finds none."""
    with a.transaction():
        a.fetch(*job.heartbeat)
        assert b.fetch(*SWEEP) == [(0,)]

    assert b.fetch(*SWEEP) == [(0,)]
    assert status(b) == [("running", 1)]


def test_heartbeat_gives_a_full_lease_after_a_wait(
    a: Session, b: Session, job: Claimed, clock: Clock
) -> None:
    """A holds the row; B beats and waits for an hour; A commits; the lease begins then."""
    with a.transaction():
        a.fetch(*call("set_priority", job_id=job.job_id, priority=1))
        pending = b.start(*call("heartbeat", **job.ref, lease="1 minute"))
        pending.wait_blocked(by=a)
        now = clock.advance("1 hour")

    assert pending.result() == [(now + timedelta(minutes=1), False, False)]


def test_heartbeat_waits_for_an_open_sweep_and_is_refused(
    a: Session, b: Session, job: Claimed
) -> None:
    """A sweeps and stays open; B beats and waits; A commits; B is told to stop."""
    with a.transaction():
        a.fetch(*SWEEP)
        pending = b.start(*job.heartbeat)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT002"


def test_release_passes_over_an_open_sweep_and_gives_nothing_back(
    a: Session, b: Session, job: Claimed
) -> None:
    """A sweeps and stays open; B releases and is told to ask again; A commits; it is lost."""
    with a.transaction():
        a.fetch(*SWEEP)
        assert b.fetch(*job.release) == [(job.job_id, None)]

    assert b.fetch(*job.release) == [(job.job_id, False)]
    assert status(b) == [("failed", 1)]


def test_sweep_passes_over_a_job_that_is_being_released(
    a: Session, b: Session, job: Claimed
) -> None:
    """A releases and stays open; B sweeps and does not wait; A commits."""
    with a.transaction():
        a.fetch(*job.release)
        assert b.fetch(*SWEEP) == [(0,)]

    assert b.fetch(*SWEEP) == [(0,)]
    assert status(b) == [("queued", 0)]


def test_snooze_sees_a_cancel_that_came_while_it_waited(
    a: Session, b: Session, job: Claimed
) -> None:
    """A cancels and stays open; B snoozes and waits; A commits; the job ends cancelled."""
    with a.transaction():
        a.fetch(*job.cancel)
        pending = b.start(*job.snooze)
        pending.wait_blocked(by=a)

    assert pending.result() == [(None,)]
    assert status(b) == [("cancelled", 1)]


def test_cancel_waits_for_an_open_finish_and_is_refused(
    a: Session, b: Session, job: Claimed
) -> None:
    """A finishes and stays open; B cancels and waits; A commits; it ended otherwise."""
    with a.transaction():
        a.fetch(*job.finish)
        pending = b.start(*job.cancel)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT003"
    assert status(b) == [("succeeded", 1)]


def test_finish_counts_although_a_cancel_was_requested_first(
    a: Session, b: Session, job: Claimed
) -> None:
    """A asks for a cancel and stays open; B finishes and waits; A commits; the work is done."""
    with a.transaction():
        assert a.fetch(*job.cancel) == [("running",)]
        pending = b.start(*job.finish)
        pending.wait_blocked(by=a)

    assert pending.result() == [("finished",)]
    assert status(b) == [("succeeded", 1)]


def test_two_finishes_with_one_token_count_once(a: Session, b: Session, job: Claimed) -> None:
    """A finishes and stays open; B, the same worker again, waits; A commits."""
    with a.transaction():
        a.fetch(*job.finish)
        pending = b.start(*job.finish)
        pending.wait_blocked(by=a)

    assert pending.result() == [("already_finished",)]
    assert status(b) == [("succeeded", 1)]


def test_second_finish_counts_when_the_first_rolls_back(
    a: Session, b: Session, job: Claimed
) -> None:
    """A finishes and stays open; B finishes and waits; A rolls back."""
    with a.transaction() as transaction:
        a.fetch(*job.finish)
        pending = b.start(*job.finish)
        pending.wait_blocked(by=a)
        raise psycopg.Rollback(transaction)

    assert pending.result() == [("finished",)]


def test_fail_waits_for_an_open_finish_and_is_refused(
    a: Session, b: Session, job: Claimed
) -> None:
    """A finishes and stays open; B fails the job and waits; A commits; the success stands."""
    with a.transaction():
        a.fetch(*job.finish)
        pending = b.start(*job.fail)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT003"
    assert status(b) == [("succeeded", 1)]


def test_finish_waits_for_an_open_fail_and_is_refused(
    a: Session, b: Session, job: Claimed
) -> None:
    """A fails the job and stays open; B finishes and waits; A commits; the failure stands."""
    with a.transaction():
        a.fetch(*job.fail)
        pending = b.start(*job.finish)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT002"
    assert status(b) == [("failed", 1)]


def test_two_sweeps_at_once_fail_each_job_once(
    a: Session, b: Session, clock: Clock, db: psycopg.Connection[Any]
) -> None:
    """Twenty leases end; A sweeps half and stays open; B sweeps the rest; A commits."""
    clock.set("2026-03-01 12:00:00+00")
    for _ in range(20):
        Claimed(a)
    clock.advance("1 minute")

    with a.transaction():
        assert a.fetch(*call("sweep_stale_leases", max_jobs=10)) == [(10,)]
        assert b.fetch(*SWEEP) == [(10,)]

    assert b.fetch(*SWEEP) == [(0,)]
    assert set(status(b)) == {("failed", 1)}
    assert db.execute("select count(*) from rota.job_errors").fetchall() == [(20,)]


def test_two_ticks_at_once_do_not_wait_for_each_other(
    a: Session, b: Session, job: Claimed
) -> None:
    """A ticks and stays open; B ticks and does not wait; A commits; the job failed once."""
    with a.transaction():
        assert a.fetch(*TICK)[0][SWEPT] == 1
        assert b.fetch(*TICK)[0][SWEPT] == 0

    assert status(b) == [("failed", 1)]


def test_two_retries_of_a_dead_job_bring_it_back_once(
    a: Session, b: Session, job: Claimed
) -> None:
    """The job is dead; A retries it and stays open; B retries it and waits; A commits."""
    a.fetch(*call("fail_job", **job.ref, error="x", fatal=True))

    with a.transaction():
        assert a.fetch(*job.retry) == [("queued",)]
        pending = b.start(*job.retry)
        pending.wait_blocked(by=a)

    assert pending.result() == [("queued",)]
    assert status(b) == [("queued", 0)]
    assert len(b.fetch(*call("claim_jobs", worker="w", max_jobs=10))) == 1


def test_a_retry_records_the_end_that_it_took_back(
    a: Session, b: Session, db: psycopg.Connection[Any], job: Claimed
) -> None:
    """A has read that the job is dead; B retries and finishes it; A goes on."""
    a.fetch(*call("fail_job", **job.ref, error="x", fatal=True))
    db.execute(PAUSE)
    restore = "if rota._restore_jobs("
    mutate(db, "retry_job", restore, f"perform race.pause(''); {restore}")

    with stopped(db, a, *job.retry) as pending:
        again = b.start(RETRY_AND_FINISH.format(job.job_id).encode(), ())
        again.wait_settled()
    assert pending.result() == [("queued",)]
    again.result()

    audited = db.execute("select a.before ->> 'status' from rota.audit_log as a order by a.id")
    assert audited.fetchall() == [("dead",), ("queued",)]


def test_two_retries_of_a_live_job_leave_one(a: Session, b: Session, job: Claimed) -> None:
    """The job waits for its next try; A retries it and stays open; B waits; A commits."""
    a.fetch(*job.fail)

    with a.transaction():
        a.fetch(*job.retry)
        pending = b.start(*job.retry)
        pending.wait_blocked(by=a)

    assert pending.result() == [("queued",)]
    assert status(b) == [("queued", 1)]
    assert len(b.fetch(*call("claim_jobs", worker="w", max_jobs=10))) == 1


def test_retry_waits_for_an_open_sweep_and_takes_what_it_left(
    a: Session, b: Session, job: Claimed
) -> None:
    """A sweeps and stays open; B retries and waits; A commits; B finds the job failed."""
    with a.transaction():
        a.fetch(*SWEEP)
        pending = b.start(*job.retry)
        pending.wait_blocked(by=a)

    assert pending.result() == [("queued",)]
    assert status(b) == [("queued", 1)]


def test_sweep_passes_over_a_job_that_is_taken_from_its_worker(
    a: Session, b: Session, job: Claimed
) -> None:
    """A retries by force and stays open; B sweeps without waiting; A commits; B is refused."""
    with a.transaction():
        a.fetch(*job.retry_forced)
        assert b.fetch(*SWEEP) == [(0,)]

    assert sqlstate(b.start(*job.finish)) == "RT002"
    assert status(b) == [("queued", 1)]


def test_retry_of_a_dead_job_waits_for_the_same_key_and_is_refused(
    a: Session, b: Session, clock: Clock
) -> None:
    """A enqueues the dead job's key and stays open; B retries it and waits; A commits."""
    dead = Claimed(a, idempotency_key="k")
    a.fetch(*call("fail_job", **dead.ref, error="x", fatal=True))

    with a.transaction():
        a.fetch(*call("enqueue", job_type="t", idempotency_key="k"))
        pending = b.start(*dead.retry)
        pending.wait_blocked(by=a)

    assert sqlstate(pending) == "RT007"
    assert sorted(row[0] for row in status(b)) == ["dead", "queued"]


def test_retention_and_finish_never_wait_for_each_other(
    a: Session, b: Session, clock: Clock
) -> None:
    """A finishes and stays open; B deletes and drops old days in a tick; A commits.

    B may give its partitions up for this time, but it neither waits long nor takes A's job.
    """
    clock.set("2026-03-01 12:00:00+00")
    b.fetch(*TICK)
    a.fetch(*Claimed(a).finish)
    clock.set("2026-03-20 12:00:00+00")
    late = Claimed(a)

    with a.transaction():
        a.fetch(*late.finish)
        pending = b.start(*TICK)
        assert pending.result(timeout=5)[0][SWEPT] == 0

    clock.advance("6 minutes")
    assert b.fetch(*TICK)[0][DROPPED] > 0
    assert status(b) == [("succeeded", 1)]


def test_finish_waits_only_for_a_moment_behind_partitions(
    a: Session, b: Session, clock: Clock
) -> None:
    """A reads the history and stays open; B's tick drops nothing; B's finish is through."""
    clock.set("2026-03-01 12:00:00+00")
    b.fetch(*TICK)
    a.fetch(*Claimed(a).finish)
    clock.set("2026-03-20 12:00:00+00")
    late = Claimed(b)

    with a.transaction():
        a.fetch("select count(*) from rota.finished_jobs")
        tick = b.start(*TICK)
        tick.result(timeout=5)
        assert b.fetch(*late.finish) == [("finished",)]


def test_retry_of_an_old_job_and_retention_take_it_once(
    a: Session, b: Session, clock: Clock
) -> None:
    """A retries a job that is old enough to go and stays open; B's tick passes it over."""
    clock.set("2026-03-01 12:00:00+00")
    a.fetch(*call("set_queue", queue="default", keep_dead="1 day"))
    dead = Claimed(a)
    a.fetch(*call("fail_job", **dead.ref, error="x", fatal=True))
    clock.set("2026-03-20 12:00:00+00")

    with a.transaction():
        a.fetch(*dead.retry)
        assert b.fetch(*TICK)[0][DELETED] == 0

    assert status(b) == [("queued", 0)]


@pytest.mark.parametrize(
    ("query", "answers"),
    [
        ("select f.outcome from rota.finish_jobs(%s, %s) as f", ["busy", "finished"]),
        ("select h.is_lost from rota.heartbeat_jobs(%s, %s) as h", [False, False]),
        ("select r.is_released from rota.release_jobs(%s, %s) as r", [None, True]),
        *(
            (
                "select e.answer from rota.end_jobs((select jsonb_agg(jsonb_build_object("
                f"'job_id', j.id, 'lease_token', j.token, 'outcome', {more}) order by j.id)"
                " from unnest(%s::bigint[], %s::bigint[]) as j (id, token))) as e",
                ["busy", answer],
            )
            for more, answer in (
                ("'succeeded'", "finished"),
                ("'failed', 'error', 'e'", "failed"),
                ("'snoozed', 'delay', '1 hour'", "snoozed"),
                ("'released'", "released"),
            )
        ),
    ],
)
def test_batch_is_in_no_circle_with_who_waits_for_its_rows(
    a: Session, b: Session, query: str, answers: list[Any]
) -> None:
    """A has a job, B has another and waits for that of A; A asks for both, and is told."""
    first, second = Claimed(a), Claimed(a)
    jobs = [first.job_id, second.job_id], [first.token, second.token]
    # Either session of a deadlock may be the one that detects it.
    a.fetch("set deadlock_timeout = '1ms'")
    hold = "select from rota.jobs where id = %s for update"
    with b.transaction():
        b.fetch(hold, [first.job_id])
        with a.transaction():
            a.fetch(hold, [second.job_id])
            pending = b.start(hold, [second.job_id])
            pending.wait_blocked(by=a)
            told = a.fetch(query.encode(), jobs)

        assert [answer for (answer,) in told] == answers
        pending.result()


def test_batch_tries_again_what_is_held_for_a_moment(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A has a row for a moment; B finishes it and another, and mostly gets both."""
    asleep = "select from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
    for _ in range(100):
        jobs = [Claimed(b), Claimed(b)]
        ids, tokens = [job.job_id for job in jobs], [job.token for job in jobs]
        with a.transaction():
            a.fetch("select from rota.jobs where id = %s for update", ids[:1])
            pending = b.start(*call("finish_jobs", job_ids=ids, lease_tokens=tokens))
            while not pending.is_done and not db.execute(asleep, [b.pid]).rowcount:
                pass
        told = [row[1] for row in pending.result()]
        assert told[1] == "finished"
        if told[0] == "finished":
            return
    pytest.fail("what was held for a moment was never tried again")
