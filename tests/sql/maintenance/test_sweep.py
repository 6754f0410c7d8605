"""Taking back what a worker left behind."""

from __future__ import annotations

from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    everything,
    one,
    owner,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    value,
)

# Running rows of another worker, made without its ten thousand calls.
RUNNING = """
    insert into rota.jobs (
        queue, job_type, payload, priority, max_attempts, status, run_at, attempts,
        lease_token, locked_by, locked_until, started_at
    )
    select 'default', 'x', '{}', 0, 10, 'running', rota.now(), 1, n, 'w',
        rota.now() + make_interval(secs => n), rota.now()
    from generate_series(%s::integer, %s) as g (n)
    order by n desc
"""

POISON = """
    create function public.poison() returns trigger language plpgsql as $$
    begin
        if old.id = {} then
            raise exception 'poison';
        end if;
        return coalesce(new, old);
    end;
    $$;
    create trigger poison before update or delete on rota.jobs
        for each row execute function public.poison();
    alter table rota.jobs enable always trigger poison;
"""


@pytest.mark.parametrize("column", ["overdue_at", "started_at"])
def test_sweep_stale_leases_takes_back_a_job_with_an_infinite_time(db, clock, column):
    clock.set("2026-01-01 00:00+00")
    running(db, time_limit="10 s")
    db.execute(f"update rota.jobs set {column} = '-infinity'")
    clock.advance("2 minutes")

    assert value(db, "sweep_stale_leases") == 1
    assert scalar(db, "select error_type from rota.jobs") == "time_limit"


def test_sweep_stale_leases_takes_back_a_job_that_is_over_its_time_limit(db, clock):
    began_at = clock.set("2026-01-01 00:00+00")
    backoff = {"kind": "fixed", "base_seconds": 300, "jitter": 0}
    job = running(db, time_limit="10 s", backoff=backoff)
    assert job.locked_until == began_at + timedelta(seconds=40)
    for _ in range(4):  # a worker that lives, with a handler that hangs
        clock.advance("10 s")
        one(db, "heartbeat", **owner(job))
    assert value(db, "sweep_stale_leases") == 0
    now = clock.advance("1 microsecond")

    assert value(db, "sweep_stale_leases") == 1

    row = run(db, job.job_id)
    assert (row.status, row.attempts, row.error_type) == ("failed", 1, "time_limit")
    assert row.last_error == "time limit: worker 'w' did not end the job within 00:00:10"
    assert row.run_at == now + timedelta(minutes=5)
    with raises("RT002"):
        one(db, "heartbeat", **owner(job))


def test_sweep_stale_leases_says_that_the_lease_ended_before_the_time_limit(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db, time_limit="90 s")
    clock.set(job.locked_until)
    clock.advance("1 microsecond")

    assert value(db, "sweep_stale_leases") == 1

    assert run(db, job.job_id).error_type == "lease_expired"


def test_a_time_limit_begins_anew_with_each_attempt(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db, time_limit="10 s")
    clock.advance("1 hour")
    value(db, "sweep_stale_leases")
    clock.advance("1 hour")

    (again,) = claim(db)

    assert again.job_id == job.job_id
    assert one(db, "heartbeat", **owner(again)).is_overdue is False


def test_sweep_stale_leases_fails_the_attempt(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    clock.set(job.locked_until)
    assert value(db, "sweep_stale_leases") == 0
    now = clock.advance("1 microsecond")

    assert value(db, "sweep_stale_leases") == 1

    row = run(db, job.job_id)
    assert (row.status, row.attempts, row.error_type) == ("failed", 1, "lease_expired")
    assert (row.failed_at, row.locked_by) == (now, None)
    assert timedelta(seconds=0.8) <= row.run_at - now <= timedelta(seconds=1.2)
    (error,) = rows(db, "select * from rota.job_errors")
    assert (error.worker, error.error_type, error.attempt) == ("w", "lease_expired", 1)
    assert "worker 'w' neither finished" in error.message


def test_leases_that_end_are_one_error_whoever_held_them(db, clock):
    """The names of workers that are killed differ by each start."""
    for worker in ("vm:1:a8ee92", "vm:2:c7b30c"):
        enqueue(db)
        claim(db, worker=worker)
    clock.advance("2 minutes")

    assert value(db, "sweep_stale_leases") == 2

    (group,) = rows(db, "select * from rota.error_groups")
    assert (group.error_type, group.jobs) == ("lease_expired", 2)


def test_sweep_waits_for_the_backoff_where_a_lease_ends_twice_in_a_row(db, clock):
    """The first may be the fault of the machine; what kills its workers again dies."""
    clock.set("2026-01-01 00:00+00")
    job = running(db, max_attempts=4)
    pauses = []
    for attempt in range(1, 5):
        now = clock.advance("2 minutes")
        assert value(db, "sweep_stale_leases") == 1
        row = run(db, job.job_id)
        pauses.append((row.run_at - now).total_seconds())
        if attempt < 4:
            clock.set(row.run_at)
            assert [claimed.attempt for claimed in claim(db)] == [attempt + 1]

    assert 0.8 <= pauses[0] <= 1.2
    assert pauses[1:3] == pytest.approx([120, 240], rel=0.2)
    assert (row.status, row.attempts) == ("dead", 4)


def test_sweep_tries_soon_again_after_another_kind_of_failure(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    pauses = []
    for is_lost in (True, False, True):
        now = clock.advance("2 minutes") if is_lost else clock.now()
        if is_lost:
            value(db, "sweep_stale_leases")
        else:
            one(db, "fail_job", **owner(job), error="e", error_type="E")
        run_at = run(db, job.job_id).run_at
        pauses.append((run_at - now).total_seconds())
        clock.set(run_at)
        (job,) = claim(db)

    assert [pause <= 1.5 for pause in pauses] == [True, False, True]


def test_sweep_waits_no_longer_than_the_backoff_of_the_job(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db, backoff=Jsonb({"kind": "fixed", "base_seconds": 0.01, "jitter": 0}))
    now = clock.advance("2 minutes")

    value(db, "sweep_stale_leases")

    assert (run(db, job.job_id).run_at - now).total_seconds() == 0.01


def test_sweep_stale_leases_twice_gives_one_outcome(db, clock):
    clock.set("2026-01-01 00:00+00")
    running(db)
    clock.advance("1 hour")
    assert value(db, "sweep_stale_leases") == 1
    before = everything(db)

    assert value(db, "sweep_stale_leases") == 0
    assert everything(db) == before


def test_sweep_stale_leases_ends_a_job_without_attempts_left(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db, max_attempts=1)
    clock.advance("1 hour")

    value(db, "sweep_stale_leases")

    assert run(db, job.job_id).status == "dead"


def test_sweep_stale_leases_ends_a_job_whose_cancel_was_requested(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db)
    value(db, "cancel_job", job_id=job.job_id, reason="r")
    clock.advance("1 hour")

    value(db, "sweep_stale_leases")

    row = run(db, job.job_id)
    assert (row.status, row.cancel_reason) == ("cancelled", "r")


def test_sweep_stale_leases_leaves_each_job_its_own_lease(db, clock):
    clock.set("2026-01-01 00:00+00")
    long, short = running(db, lease="1 hour"), running(db, lease="4 minutes")
    clock.advance("5 minutes")

    assert value(db, "sweep_stale_leases") == 1

    assert run(db, long.job_id).status == "running"
    assert run(db, short.job_id).status == "failed"


@pytest.mark.slow
def test_sweep_stale_leases_finds_one_among_ten_thousand(db, clock):
    clock.set("2026-01-01 00:00+00")
    db.execute(RUNNING, (1, 10_001))
    db.execute(
        "update rota.jobs set locked_until = rota.now() - interval '1 s'"
        " where id = (select max(id) from rota.jobs)"
    )

    assert value(db, "sweep_stale_leases", max_jobs=1) == 1

    swept = rows(db, "select id from rota.jobs where status = 'failed'")
    assert swept == rows(db, "select max(id) from rota.jobs")


@pytest.mark.slow
def test_sweep_stale_leases_does_a_bounded_amount_oldest_first(db, clock):
    clock.set("2026-01-01 00:00+00")
    db.execute(RUNNING, (1, 1500))
    clock.advance("1 hour")

    assert value(db, "sweep_stale_leases", max_jobs=10) == 10
    failed = rows(db, "select lease_token from rota.jobs where status = 'failed' order by 1")
    assert [token for (token,) in failed] == list(range(1, 11))
    assert value(db, "sweep_stale_leases") == 1000
    assert value(db, "sweep_stale_leases") == 490


@pytest.mark.parametrize("max_jobs", [None, 0, -1, 10_001, 2**31 - 1])
def test_sweep_stale_leases_refuses(db, max_jobs):
    with refused("max_jobs"):
        value(db, "sweep_stale_leases", max_jobs=max_jobs)


def test_sweep_stale_leases_passes_over_rows_that_others_hold(db, connect, clock):
    clock.set("2026-01-01 00:00+00")
    held, free = running(db), running(db)
    clock.advance("1 hour")
    other = connect(autocommit=False)
    one(other, "heartbeat", **owner(held))

    assert value(db, "sweep_stale_leases") == 1

    other.commit()
    assert run(db, held.job_id).status == "running"
    assert run(db, free.job_id).status == "failed"


def test_sweep_stale_leases_leaves_only_the_job_that_cannot_be_swept(db, clock):
    clock.set("2026-01-01 00:00+00")
    jobs = [running(db) for _ in range(5)]
    poison = jobs[1].job_id
    db.execute(POISON.format(poison))
    clock.advance("1 hour")

    assert value(db, "sweep_stale_leases") == 4

    for job in jobs:
        row = run(db, job.job_id)
        assert row.status == ("running" if job.job_id == poison else "failed")
    assert value(db, "sweep_stale_leases") == 0
    enqueue(db, queue="q")
    (other,) = claim(db, queues=["q"])
    assert one(db, "fail_job", **owner(other), error="e").status == "failed"
    db.execute("drop trigger poison on rota.jobs")
    assert value(db, "sweep_stale_leases") == 1


def test_sweep_stale_leases_takes_a_job_with_any_rule(db, clock):
    clock.set("2026-01-01 00:00+00")
    for policy in [{"base_seconds": 1e300}, {"kind": [1]}, {"kind": "list"}, {"jitter": "x"}]:
        job = running(db)
        db.execute(
            "update rota.jobs set backoff = %s where id = %s", (Jsonb(policy), job.job_id)
        )
    clock.advance("1 hour")

    assert value(db, "sweep_stale_leases") == 4
    assert scalar(db, "select count(*) from rota.jobs where status = 'failed'") == 4


def test_sweep_stale_leases_makes_up_for_a_worker_that_nobody_knows(db, clock):
    clock.set("2026-01-01 00:00+00")
    call(db, "report_worker", worker="w", host="h", pid=1, version="1", queues=["default"])
    job = running(db)
    db.execute("truncate rota.workers")
    clock.advance("2 minutes")

    assert one(db, "tick").jobs_swept == 1
    assert run(db, job.job_id).status == "failed"


@pytest.mark.parametrize("time_limit", [None, "20 s"])
def test_a_lease_goes_back_with_the_clock(db, clock, time_limit):
    """Of a job whose worker died while the clock of the server was days ahead."""
    clock.set("2026-01-13 12:00+00")
    one(db, "tick")
    job = running(db, lease="1 minute", time_limit=time_limit)
    clock.advance("10 s")
    call(db, "set_progress", **owner(job), percent=50.0)
    now = clock.set("2026-01-10 12:00+00")
    one(db, "tick")

    left = timedelta(seconds=40 if time_limit else 50)
    row = run(db, job.job_id)
    assert (row.status, row.locked_until) == ("running", now + left)
    assert row.started_at == now - timedelta(seconds=10)
    clock.advance(left)
    assert one(db, "tick").jobs_swept == 0
    clock.advance("1 microsecond")
    assert one(db, "tick").jobs_swept == 1
    assert run(db, job.job_id).error_type == ("time_limit" if time_limit else "lease_expired")


def test_a_lease_that_began_before_the_clock_was_ahead_keeps_its_start(db, clock):
    began_at = clock.set("2026-01-10 12:00+00")
    one(db, "tick")
    job = running(db, time_limit="10 days")
    clock.set("2026-01-13 12:00+00")
    one(db, "heartbeat", **owner(job))
    one(db, "tick")
    clock.set("2026-01-10 12:01+00")
    one(db, "tick")

    row = run(db, job.job_id)
    overdue_at = scalar(db, "select overdue_at from rota.jobs")
    assert (row.started_at, overdue_at) == (began_at, began_at + timedelta(days=10))
    assert row.locked_until == began_at + timedelta(minutes=2)


def test_a_time_limit_goes_back_with_the_clock_of_a_worker_that_lives(db, clock):
    clock.set("2026-01-13 12:00+00")
    one(db, "tick")
    job = running(db, time_limit="20 s")
    now = clock.set("2026-01-10 12:00+00")
    one(db, "heartbeat", **owner(job))
    one(db, "tick")

    assert run(db, job.job_id).started_at == now
    assert scalar(db, "select overdue_at from rota.jobs") == now + timedelta(seconds=20)
