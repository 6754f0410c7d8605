"""All maintenance in one call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    Db,
    call,
    claim,
    enqueue,
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
from sql.maintenance.test_retention import AHEAD, end, partitions
from sql.maintenance.test_sweep import POISON
from support.waiting import wait_until

pytestmark = pytest.mark.slow


def test_tick_says_what_it_did(db, clock):
    clock.set("2031-03-01 12:00+00")
    running(db)
    clock.advance("1 hour")

    did = one(db, "tick")

    assert did.jobs_swept == 1
    assert (did.jobs_deleted, did.partitions_created) == (0, AHEAD)
    assert did.partitions_dropped > 0


def test_tick_refuses_a_transaction_that_is_read_only(db):
    db.execute("set default_transaction_read_only = on")

    with raises("25006", "tick()"):
        one(db, "tick")


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
    clock.advance("6 minutes")
    assert one(db, "tick").partitions_created == AHEAD


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
    assert (did.partitions_created, did.partitions_dropped) == (AHEAD, len(before) + 3)


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
        "create trigger broken before update on rota.maintenance"
        " for each row execute function public.broken();"
        "alter table rota.maintenance enable always trigger broken"
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

    assert (did.jobs_swept, did.partitions_created) == (1, AHEAD)
    assert run(db, poison.job_id).status == "running"
    assert run(db, job.job_id).status == "failed"


def test_tick_finds_nothing_to_do_on_an_empty_database(db):
    one(db, "tick")

    with db.transaction():
        did = one(db, "tick")

    assert not any(did)
    assert None not in did[:-1]
    assert rows(db, "select * from rota.jobs") == []
    assert enqueue(db) == nth(db, 1)


def test_tick_without_work_writes_nothing(db, clock):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    written = "select pg_current_xact_id_if_assigned()::text"

    for moment, is_recorded in [("9 s", False), ("2 s", True)]:
        clock.advance(moment)
        # As one string, so that tick() is alone as far as it can tell.
        cursor = db.execute(f"begin; select * from rota.tick(); {written}; commit")
        while cursor.nextset():
            if cursor.description and len(cursor.description) == 1:
                assert (cursor.fetchall() != [(None,)]) == is_recorded


def test_tick_is_recorded_with_its_time_and_caller(db, clock):
    now = clock.set("2031-03-01 12:00+00")
    health = "select last_tick_at, last_tick_by, lag from rota.ticker_health"
    ((at, by, lag),) = rows(db, health)
    assert (at, by) == (None, None)
    assert lag == now - scalar(db, "select applied_at from rota.upgrade_log where id = 0")

    db.execute("set application_name = 'the night watch'")
    one(db, "tick")
    clock.advance("9 s")
    one(db, "tick")

    assert rows(db, "select task, done_at, done_by from rota.maintenance order by 1") == [
        ("retention", now, "the night watch as postgres"),
        ("tick", now, "the night watch as postgres"),
        ("tick alone", now, "the night watch as postgres"),
    ]
    assert rows(db, health) == [(now, "the night watch as postgres", clock.now() - now)]


def test_tick_says_that_there_is_more(db, clock):
    clock.set("2031-03-01 12:00+00")
    jobs = psycopg.types.json.Jsonb([{"job_type": "x"}] * 1001)
    db.execute("select from rota.enqueue_many(%s)", (jobs,))
    claim(db, max_jobs=1000)
    claim(db, max_jobs=1)
    clock.advance("1 hour")

    first, second = one(db, "tick"), one(db, "tick")

    assert (first.jobs_swept, first.has_more) == (1000, True)
    assert (second.jobs_swept, second.has_more) == (1, False)


def hang(db: Db) -> None:
    """Send a tick and its begin as one string, and forget to commit: it keeps the lock."""
    db.execute("begin; select * from rota.tick()")


def test_tick_returns_at_once_while_another_runs(db, connect, clock):
    """A records a tick, begins another one and holds the lock; B ticks."""
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    hang(connect())
    job = running(db)
    clock.set("2031-03-01 12:00:09+00")
    db.execute("update rota.jobs set locked_until = rota.now() - interval '1 s'")

    did = one(db, "tick")

    assert did.was_skipped
    assert set(did[:-3]) == {0}
    assert run(db, job.job_id).status == "running"


def test_tick_works_without_the_lock_once_another_hangs(db, connect, clock):
    """A holds the lock and the row of the record, for ever; all others tick all the same."""
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    clock.advance("11 s")
    hung = connect()
    hang(hung)

    for _ in range(3):
        job = running(db, max_attempts=1)
        clock.advance("2 minutes")
        did = one(db, "tick")
        assert (did.was_skipped, did.jobs_swept) == (False, 1)
        assert run(db, job.job_id).status == "dead"


def test_tick_in_a_transaction_takes_no_lock(db, connect, clock):
    """A ticks inside a transaction that it keeps open; B is not told to wait for it."""
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    forgetful = connect(autocommit=False)
    forgetful.execute("select 1")
    job = running(db)
    clock.advance("29 s")
    db.execute("update rota.jobs set locked_until = rota.now() - interval '1 s'")

    one(forgetful, "tick")
    clock.advance("1 s")
    other = one(db, "tick")

    assert not other.was_skipped
    assert scalar(db, "select lag from rota.ticker_health").total_seconds() == 0
    forgetful.rollback()
    assert one(db, "tick").jobs_swept == 1
    assert run(db, job.job_id).status == "failed"


PARTS = {
    "jobs_swept": "sweep_stale_leases(integer)",
    "jobs_enqueued": "_enqueue_due_schedules(integer)",
    "checks_done": "_do_checks(integer)",
    "jobs_deleted": "_retain(boolean, boolean)",
}


@pytest.mark.parametrize("broken", PARTS)
def test_tick_does_the_rest_when_one_part_fails(db, clock, broken):
    clock.set("2031-03-01 12:00+00")
    warnings: list[str | None] = []
    db.add_notice_handler(lambda diagnostic: warnings.append(diagnostic.message_primary))
    job = running(db)
    db.execute(f"drop function rota.{PARTS[broken]}")
    clock.advance("1 hour")

    did = one(db, "tick")

    assert [part for part in PARTS if getattr(did, part) is None] == [broken]
    assert did.has_more is False
    assert did.jobs_swept == (None if broken == "jobs_swept" else 1)
    assert did.partitions_created == (None if broken == "jobs_deleted" else AHEAD)
    assert run(db, job.job_id).status == ("running" if broken == "jobs_swept" else "failed")
    assert [("tried again" in (warning or "")) for warning in warnings] == [True]


# As vacuum full and reindex have them, for long where they are large.
@pytest.mark.own_session
@pytest.mark.parametrize(
    "table",
    ["finished_jobs_done_default", "finished_jobs_dead", "job_errors_default", "stage_runs",
     "stats_progress", "restored_ends", "count_progress"],
)  # fmt: skip
def test_what_has_locked_a_table_of_the_history_holds_up_nothing_else(
    db, connect, clock, table
):
    end(db, "succeeded")
    value(db, "schedule_job", name="s", schedule="every 1 minute", job_type="t")
    value(db, "set_queue", queue="q", retry_budget=Jsonb({"per_minute": 60, "percent": 5}))
    failed = running(db, queue="q")
    one(db, "fail_job", **owner(failed), error="e", retry_in="10 s")
    running(db)
    clock.advance("1 minute 30 s")
    rewriter, fresh = connect(autocommit=False), connect()
    for session in (db, fresh):
        session.execute("set statement_timeout = '9s'")

    rewriter.execute(f"lock table rota.{table} in access exclusive mode")
    did = one(db, "tick")

    assert (did.jobs_swept, did.jobs_enqueued) == (1, 1)
    assert one(fresh, "wait_for_jobs", queues=["another"]).has_maintenance
    rewriter.rollback()
    clock.advance("11 s")
    one(db, "tick")
    assert scalar(db, "select hold is null from rota.jobs where id = %s", failed.job_id)
    counted = (
        "select sum(total) from rota.job_stats where (step, outcome) = ('minute', 'succeeded')"
    )
    assert scalar(db, counted) == 1


def test_tick_can_be_cancelled(db):
    db.execute(
        "create or replace function rota._enqueue_due_schedules(max_jobs integer)"
        " returns integer language plpgsql as $$ begin perform pg_sleep(60); return 0; end $$"
    )
    db.execute("set statement_timeout = '200ms'")

    with raises("57014"):
        one(db, "tick")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_tick_sweeps_under_every_isolation_level(db, clock, level):
    clock.set("2031-03-01 12:00+00")
    db.execute(f"set default_transaction_isolation = '{level}'")
    with db.transaction():
        db.execute("set transaction isolation level read committed")
        job = running(db)
    clock.advance("1 hour")

    did = one(db, "tick")

    assert did.jobs_swept == 1
    assert None not in did[:-1]
    assert run(db, job.job_id).status == "failed"


def add_definition(db: Db, name: str, delay: str) -> None:
    """Add a schedule that should have enqueued so long ago."""
    db.execute(
        "insert into rota.job_definitions (name, job_type, queue, payload, schedule,"
        " time_zone, priority, catch_up, catch_up_max, overlap, jitter, anchored_at,"
        " next_run_at) values (%s, 'x', 'default', '{}', '@daily', 'UTC', 0, 'one', 1,"
        " 'allow', '0', rota.now(), rota.now() - %s::interval)",
        (name, delay),
    )


def note_ticks(db: Db, answer: str = "0") -> None:
    """Let each tick do its parts and note its transaction; *answer* is what it enqueued.

    There is a schedule that stays due, so that there is more where it enqueued its bound.
    """
    add_definition(db, "due", "1 s")
    db.execute(
        f"""
        create table public.ticks (
            at timestamptz default clock_timestamp(),
            xid text default pg_current_xact_id()::text,
            isolation text default current_setting('transaction_isolation'),
            has_lock boolean
        );
        grant select, insert on public.ticks to public;
        create or replace function rota._has_maintenance(patient boolean default false)
            returns boolean language sql
        as 'select true';
        create or replace function rota._enqueue_due_schedules(max_jobs integer) returns integer
            language plpgsql security definer
        as $$
        begin
            insert into public.ticks (has_lock) select exists (
                select from pg_locks
                where pid = pg_backend_pid() and mode = 'ShareUpdateExclusiveLock'
            );
            return {answer};
        end $$;
        create or replace function rota._has_maintenance(patient boolean default false)
            returns boolean language plpgsql stable security definer
        as $$ begin return true; end $$;
        """  # type: ignore[arg-type]
    )


def test_tick_loop_ticks_at_each_multiple_until_the_time_is_over(db):
    note_ticks(db)
    db.execute("set default_transaction_isolation = 'serializable'")

    began_at = scalar(db, "select clock_timestamp()")
    db.execute("call rota.tick_loop('1 second', '200 milliseconds')")

    ticks = rows(db, "select * from public.ticks order by at")
    # On a busy machine some are left out.
    multiples = [(tick.at - began_at) // timedelta(milliseconds=200) for tick in ticks]
    assert multiples == sorted(set(multiples))
    assert len({tick.xid for tick in ticks}) == len(ticks) > 1
    assert {(tick.isolation, tick.has_lock) for tick in ticks} == {("read committed", True)}


def test_a_tick_that_lets_a_job_in_says_when_the_next_may_come(db, clock):
    start = clock.advance("0 s")
    call(db, "set_limit", job_type="mail", max_starts=6, per="1 minute", burst=1)
    for _ in range(3):
        enqueue(db, job_type="mail")
    assert len(claim(db, max_jobs=3)) == 1

    clock.set(start + timedelta(seconds=5))
    did = one(db, "tick")
    assert did.checks_done > 0
    assert timedelta(0) < did.look_again_in <= timedelta(seconds=10)
    assert one(db, "tick").look_again_in is None

    clock.set(start + timedelta(minutes=2))
    call(db, "schedule_job", name="often", schedule="*/20 * * * * *", job_type="report")
    clock.set(start + timedelta(minutes=3))
    did = one(db, "tick")
    assert did.jobs_enqueued == 1
    assert timedelta(0) < did.look_again_in <= timedelta(seconds=20)


def test_tick_loop_ticks_sooner_where_a_job_may_start(db, connect):
    call(db, "set_limit", job_type="mail", max_starts=10, burst=1)
    for _ in range(4):
        enqueue(db, job_type="mail")
    started = len(claim(db, max_jobs=4))
    ticking = connect()

    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(ticking.execute, "call rota.tick_loop('1 hour', '1 minute')")
        while started < 4 and not looping.done():
            started += len(claim(db))
        db.execute("select pg_cancel_backend(%s)", [ticking.info.backend_pid])
        with raises("57014"):
            looping.result(60)


def test_tick_loop_does_not_sleep_while_there_is_more(db):
    note_ticks(db, "case when (select count(*) from public.ticks) < 5 then 1000 else 0 end")

    # To sleep once would use up the time.
    db.execute("call rota.tick_loop('20 seconds', '1 minute')")

    assert scalar(db, "select count(*) from public.ticks") == 5


def test_tick_loop_ends_in_time_though_there_is_more(db):
    note_ticks(db, "1000")

    db.execute("set statement_timeout = '60s'")
    db.execute("call rota.tick_loop('2 seconds', '1 second')")

    assert scalar(db, "select count(*) from public.ticks") > 1


def test_tick_loop_ticks_once_however_short_it_is(db):
    note_ticks(db)

    db.execute("call rota.tick_loop('1 millisecond', '1 minute')")

    assert scalar(db, "select count(*) from public.ticks") == 1


def test_a_short_tick_loop_is_alone_in_whatever_way_it_is_sent(db):
    """A prepared statement goes in several messages, as in a transaction."""
    alone = "select done_at > '-infinity' from rota.maintenance where task = 'tick alone'"
    db.execute("update rota.maintenance set done_at = '-infinity' where task ~ '^tick'")
    db.execute("select from rota.tick()", prepare=True)
    assert not scalar(db, alone)
    db.execute("update rota.maintenance set done_at = '-infinity' where task ~ '^tick'")

    db.execute("call rota.tick_loop('1 ms')", prepare=True)

    assert scalar(db, alone)


def test_tick_loop_keeps_what_was_done_when_it_is_cancelled(db, connect):
    note_ticks(db)
    other = connect()

    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(db.execute, "call rota.tick_loop()")
        wait_until(lambda: scalar(other, "select count(*) from public.ticks"), "a tick")
        other.execute("select pg_cancel_backend(%s)", [db.info.backend_pid])
        with raises("57014"):
            looping.result()

    assert scalar(db, "select count(*) from public.ticks") > 0


def test_tick_loop_inside_a_transaction_does_nothing(db):
    note_ticks(db)
    with raises("2D000"), db.transaction():
        db.execute("call rota.tick_loop()")
    with raises("2D000"):
        db.execute("begin; call rota.tick_loop()")
    db.execute("rollback")

    assert rows(db, "select * from public.ticks") == []


def test_tick_loop_works_for_drivers_that_send_several_messages(db):
    note_ticks(db)

    db.execute("call rota.tick_loop(%s, %s)", ("3 milliseconds", "1 millisecond"))

    assert {tick.has_lock for tick in rows(db, "select * from public.ticks")} == {True}


def test_tick_of_drivers_that_send_several_messages_is_recorded_now_and_then(db, clock):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")

    lags = []
    for _ in range(5):
        clock.advance("9 s")
        db.execute("select * from rota.tick() where %s", (True,))
        lags.append(scalar(db, "select extract(epoch from lag)::int from rota.ticker_health"))

    assert lags == [9, 18, 27, 0, 9]


@pytest.mark.parametrize(
    ("name", "bad"),
    [(name, bad) for name in ("duration", "every") for bad in (None, "0", "-1 s", "1 month")]
    + [("every", "61 s"), ("duration", "1441 minutes"), ("every", "1 month -30 days")],
)
def test_tick_loop_refuses_what_it_cannot_do(db, name, bad):
    with refused(name):
        db.execute(f"call rota.tick_loop({name} => %s)", (bad,))


def test_ticker_health_counts_the_schedules_that_no_tick_has_dealt_with(db, clock):
    now = clock.set("2031-03-01 12:00+00")
    for name, delay in [("late", "10 minutes"), ("just now", "59 s"), ("later", "-1 s")]:
        add_definition(db, name, delay)

    (health,) = rows(db, "select * from rota.ticker_health")

    assert health.schedules_overdue == 1
    assert health.schedules_broken == 0
    assert health.oldest_overdue.total_seconds() == 600
    assert now == clock.now()


def test_ticker_health_counts_the_schedules_that_an_error_has_disabled(db):
    for name in ("broken", "sound", "paused"):
        call(db, "schedule_job", name=name, schedule="* * * * * *", job_type="x")
    call(db, "disable_schedule", name="paused")
    db.execute(
        "update rota.job_definitions set schedule = 'soon', next_run_at = rota.now()"
        " where name = 'broken'"
    )

    one(db, "tick")

    assert rows(db, "select schedules_broken from rota.ticker_health") == [(1,)]


@pytest.mark.parametrize(
    "change",
    [
        "locked_until = '-infinity' where status = 'running'",
        "expires_at = '-infinity' where hold is null and status = 'queued'",
        "run_at = '-infinity' where hold = 'time'",
    ],
)
def test_a_time_before_all_others_stops_no_tick(db, clock, change):
    clock.set("2026-01-01 00:00+00")
    job = running(db, queue="other", job_type="good")
    running(db)
    enqueue(db)
    call(db, "set_queue", queue="aged", ageing="1 hour")
    enqueue(db, queue="aged", delay="1 hour")
    found = db.execute(f"update rota.jobs set {change} and job_type = 'x'")
    assert found.rowcount == 1
    clock.advance("2 minutes")

    settle(db)

    assert run(db, job.job_id).status == "failed"
