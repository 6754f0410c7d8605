"""Each end of a job is counted once, in its minute, whoever commits late."""

from __future__ import annotations

import math
import random
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    Db,
    call,
    claim,
    one,
    owner,
    refused,
    rows,
    running,
    scalar,
    settle,
    value,
)
from support.clock import Clock
from support.waiting import wait_until

pytestmark = pytest.mark.slow

NOON = "2026-01-12 12:00:00+00"
READ = (
    "select sum(pg_stat_get_xact_tuples_returned(indexrelid)) from pg_index"
    " where indrelid::regclass::text like 'rota.finished_jobs_done%'"
)


def counted(db: Db, step: str = "minute") -> dict[tuple[str, str, str], int]:
    """Return how many were counted by time, job type and outcome."""
    return {
        (row.at, row.job_type, row.outcome): row.total
        for row in rows(
            db,
            "select to_char(starts_at at time zone 'UTC', 'DD HH24:MI') as at, job_type,"
            " outcome, total from rota.job_stats where step = %s",
            step,
        )
    }


def totals(db: Db) -> dict[str, int]:
    """Return how many were counted by outcome, and see that no minute has more than it."""
    return dict(
        rows(
            db,
            "select outcome, sum(total)::integer from rota.job_stats where step = 'minute'"
            " group by 1",
        )
    )


def end(db: Db, status: str, **arguments: Any) -> int:
    """Run a job to this end; return its id."""
    job = running(db, **arguments)
    if status == "succeeded":
        one(db, "finish_job", **owner(job))
    else:
        if status == "cancelled":
            value(db, "cancel_job", job_id=job.job_id)
        one(db, "fail_job", **owner(job), error="e", fatal=True)
    return job.job_id


def look(db: Db, clock: Clock, after: str = "31 s") -> None:
    """Let the time pass after which a tick counts, and tick."""
    clock.advance(after)
    settle(db)


def test_ends_are_counted_by_minute_type_and_outcome(db, clock):
    clock.set(NOON)
    for status in ("succeeded", "dead", "cancelled"):
        end(db, status, job_type="a")
    job = running(db, job_type="b")
    one(db, "fail_job", **owner(job), error="e", retry_in="1 hour")
    clock.advance("1 minute")
    end(db, "succeeded", job_type="a")

    look(db, clock)

    assert counted(db) == {
        ("12 12:00", "a", "succeeded"): 1,
        ("12 12:00", "a", "dead"): 1,
        ("12 12:00", "a", "failed"): 1,
        ("12 12:00", "a", "cancelled"): 1,
        ("12 12:00", "b", "failed"): 1,
        ("12 12:01", "a", "succeeded"): 1,
    }


@pytest.mark.parametrize("how", ["succeeded", "failed"])
def test_no_attempt_has_waited_before_its_job_was_there(db, clock, how):
    clock.set(NOON)
    end(db, how, run_at="1970-01-02 00:00+00")

    look(db, clock)

    waits = rows(db, "select longest_wait from rota.job_stats where outcome = %s", how)
    assert [row.longest_wait for row in waits] == [timedelta()]


@pytest.mark.parametrize("is_restored", [False, True])
def test_no_attempt_takes_less_than_no_time_when_the_clock_is_set_back(db, clock, is_restored):
    clock.set(NOON)
    value(db, "enqueue", job_type="x", run_at="1970-01-02 00:00+00")
    clock.advance("-3 s")
    (job,) = claim(db)
    clock.advance("-3 s")
    one(db, "finish_job", **owner(job))
    if is_restored:
        value(db, "retry_job", job_id=job.job_id, force=True)

    look(db, clock)

    columns = "total_wait, longest_wait, total_run, longest_run"
    counted = rows(db, f"select {columns} from rota.job_stats where step = 'minute'")
    assert counted == [(timedelta(),) * 4]


def test_ends_are_counted_where_a_newer_version_has_added_a_column(db, clock):
    db.execute("alter table rota.job_stats add column if not exists of_newer text")
    clock.set(NOON)
    end(db, "succeeded")
    look(db, clock)
    look(db, clock)

    assert totals(db) == {"succeeded": 1}


def test_nothing_is_counted_twice_however_often_one_ticks(db, clock):
    clock.set(NOON)
    for _ in range(5):
        end(db, "succeeded")
        look(db, clock)
        look(db, clock)

    assert totals(db) == {"succeeded": 5}


def test_stages_of_a_pipeline_are_counted_each_and_once(db, clock):
    clock.set(NOON)
    value(
        db,
        "define_pipeline",
        pipeline="p",
        stages='[{"stage": "one", "job_type": "a"}, {"stage": "two", "job_type": "b"}]',
    )
    one(db, "start_pipeline", pipeline="p")
    for _ in range(2):
        (job,) = claim(db)
        one(db, "finish_job", **owner(job))

    look(db, clock)

    assert counted(db) == {
        ("12 12:00", "a", "succeeded"): 1,
        ("12 12:00", "b", "succeeded"): 1,
    }


def test_who_commits_late_is_counted_once_and_holds_nobody_up(db, connect, clock):
    """A transaction ends a job and goes on, while others end theirs and ticks go by."""
    clock.set(NOON)
    late, early = (running(db, job_type=name) for name in ("late", "early"))
    stranger = connect()
    with stranger.transaction():
        with stranger.transaction():  # a subtransaction has a number of its own
            one(stranger, "finish_job", **owner(late))
        one(db, "finish_job", **owner(early))
        for _ in range(4):
            look(db, clock)
            end(db, "succeeded", job_type="after")
        # While anybody is at it, all until the look before.
        assert totals(db) == {"succeeded": 3}
        assert counted(db)["12 12:00", "early", "succeeded"] == 1

    for _ in range(3):
        look(db, clock)

    assert totals(db) == {"succeeded": 6}
    assert counted(db)["12 12:00", "late", "succeeded"] == 1


def test_who_commits_between_a_look_and_the_next_is_counted_once(db, connect, clock):
    clock.set(NOON)
    job = running(db)
    stranger = connect()
    with stranger.transaction():
        one(stranger, "finish_job", **owner(job))
        look(db, clock)
        assert totals(db) == {}

    for _ in range(3):
        look(db, clock)

    assert totals(db) == {"succeeded": 1}


def test_a_tick_that_is_not_committed_stops_no_count(db, connect, clock):
    """It leaves the counts to ticks that are alone in their transactions."""
    clock.set("2026-01-01 00:00+00")
    settle(db)
    clock.advance("40 s")
    value(db, "finish_job", **owner(running(db)))
    other = connect(autocommit=False)
    other.execute("select")
    one(other, "tick")
    clock.advance("1 minute")
    settle(db)

    assert scalar(db, "select sum(total) from rota.job_stats where step = 'minute'") == 1


def test_who_rolls_back_late_is_not_counted(db, connect, clock):
    clock.set(NOON)
    job = running(db)
    stranger = connect()
    with stranger.transaction(force_rollback=True):
        one(stranger, "finish_job", **owner(job))
        for _ in range(3):
            look(db, clock)

    for _ in range(3):
        look(db, clock)

    assert "succeeded" not in totals(db)
    assert rows(db, "select from rota.late_xids") == []


def test_a_late_end_comes_to_hours_and_days_that_are_added_up(db, connect, clock):
    clock.set(NOON)
    late, early = (running(db, job_type=name) for name in ("late", "early"))
    stranger = connect()
    with stranger.transaction():
        one(stranger, "finish_job", **owner(late))
        one(db, "finish_job", **owner(early))
        for _ in range(3):
            look(db, clock)
        clock.advance("2 days")
        end(db, "succeeded", job_type="after")
        look(db, clock)
        look(db, clock)
        assert counted(db, "day") == {("12 00:00", "early", "succeeded"): 1}

    for _ in range(2):
        look(db, clock)

    assert counted(db, "hour") == {
        ("12 12:00", "early", "succeeded"): 1,
        ("12 12:00", "late", "succeeded"): 1,
    }
    assert counted(db, "day") == {
        ("12 00:00", "early", "succeeded"): 1,
        ("12 00:00", "late", "succeeded"): 1,
    }


def test_a_prepared_transaction_is_counted_after_its_end(db, connect, clock):
    if scalar(db, "select current_setting('max_prepared_transactions')") == "0":
        pytest.skip("the server prepares no transactions")
    clock.set(NOON)
    job = running(db)
    stranger = connect()
    stranger.tpc_begin(stranger.xid(1, "g", "b"))
    one(stranger, "finish_job", **owner(job))
    stranger.tpc_prepare()
    for _ in range(3):
        look(db, clock)
    assert totals(db) == {}

    stranger.tpc_commit()
    for _ in range(3):
        look(db, clock)

    assert totals(db) == {"succeeded": 1}


def test_an_old_snapshot_of_others_changes_nothing(db, connect, clock):
    clock.set(NOON)
    reader = connect()
    with reader.transaction():
        reader.execute("set transaction isolation level repeatable read")
        reader.execute("select 1")
        end(db, "succeeded")
        look(db, clock)

        assert totals(db) == {"succeeded": 1}


def test_a_tick_in_an_old_snapshot_counts_nothing(db, clock):
    clock.set(NOON)
    end(db, "succeeded")
    clock.advance("1 hour")
    with db.transaction():
        db.execute("set transaction isolation level repeatable read")
        one(db, "tick")
        assert totals(db) == {}


@pytest.mark.parametrize("how", ["finish_job", "fail_job"])
@pytest.mark.parametrize(
    "change",
    [
        "run_at = 'infinity'",
        "created_at = 'infinity'",
        "started_at = 'infinity'",
        "started_at = '-infinity'",
        "job_type = (select string_agg(md5(n::text), '') from generate_series(1, 999) as n)",
    ],
)
def test_what_a_hand_wrote_into_one_row_stops_no_count(db, clock, how, change):
    clock.set("2026-01-01 00:00+00")
    jobs = [running(db), running(db)]
    db.execute(f"update rota.jobs set {change} where id = %s", [jobs[0].job_id])
    for job in jobs:
        value(db, how, **owner(job), **({"error": "x"} if how == "fail_job" else {}))
    clock.advance("1 minute")
    settle(db)

    assert scalar(db, "select sum(total) from rota.job_stats where step = 'minute'") == 2


def test_what_is_retried_before_it_was_counted_is_counted_once(db, clock):
    clock.set(NOON)
    job = end(db, "dead")
    value(db, "retry_job", job_id=job)

    look(db, clock)
    look(db, clock)

    assert totals(db) == {"dead": 1, "failed": 1}


def test_what_is_retried_after_it_was_counted_is_counted_once(db, clock):
    clock.set(NOON)
    job = end(db, "dead")
    look(db, clock)
    value(db, "retry_job", job_id=job)

    look(db, clock)

    assert totals(db) == {"dead": 1, "failed": 1}
    assert rows(db, "select from rota.restored_ends") == []


def test_what_is_purged_before_it_was_counted_is_counted_as_it_was(db, clock):
    clock.set(NOON)
    stages = [{"stage": "a", "job_type": "x"}]
    value(db, "define_pipeline", pipeline="p", stages=Jsonb(stages))
    value(db, "start_pipeline", pipeline="p")
    clock.advance("10 s")
    (job,) = claim(db)
    clock.advance("5 s")
    one(db, "finish_job", **owner(job))
    assert one(db, "act_on_jobs", act="purge", filter={"ids": [job.job_id]}).changed == 1

    look(db, clock)

    query = "select outcome, total_wait, total_run from rota.job_stats where step = 'minute'"
    assert rows(db, query) == [("succeeded", timedelta(seconds=10), timedelta(seconds=5))]


def test_retention_takes_nothing_that_is_not_counted(db, connect, clock):
    clock.set(NOON)
    value(db, "set_queue", queue="q", keep_finished="0")
    job = running(db, queue="q")
    stranger = connect()
    with stranger.transaction():
        one(stranger, "finish_job", **owner(job))
        for _ in range(3):
            look(db, clock)
    end(db, "succeeded", queue="q")

    for _ in range(3):
        look(db, clock)

    assert totals(db) == {"succeeded": 2}
    assert scalar(db, "select count(*) from rota.finished_jobs") == 0


def test_a_day_that_nobody_ticked_is_counted_before_it_is_dropped(db, clock):
    clock.set(NOON)
    for _ in range(3):
        end(db, "succeeded")
        clock.advance("7 hours")
    clock.advance("100 days")

    settle(db)

    assert scalar(db, "select count(*) from rota.finished_jobs") == 0
    assert counted(db, "day") == {
        ("12 00:00", "x", "succeeded"): 2,
        ("13 00:00", "x", "succeeded"): 1,
    }


@pytest.mark.parametrize(
    ("times", "by_day"),
    [
        # In Warsaw there are 23 and 25 hours from the first of these midnights to the second.
        (["03-29 00:10", "03-29 00:40", "03-29 10:00"], {"29": 3}),
        (["10-25 23:30", "10-26 00:30"], {"25": 1, "26": 1}),
    ],
)
def test_days_are_those_of_utc_in_whatever_zone_a_session_is(db, clock, times, by_day):
    db.execute("set timezone = 'Europe/Warsaw'")
    for time in times:
        clock.set(f"2026-{time}+00")
        end(db, "succeeded")
    look(db, clock, "26 hours")

    days = {(f"{day} 00:00", "x", "succeeded"): total for day, total in by_day.items()}
    assert counted(db, "day") == days
    # From within the day, so that its minutes and hours tell, and not the day.
    (row,) = call(db, "job_stats", since=f"2026-{times[1]}+00", step="total")
    assert row.succeeded == len(times) - 1


def test_days_outlive_minutes_and_hours(db, clock):
    clock.set(NOON)
    end(db, "succeeded")
    look(db, clock, "91 days")
    look(db, clock)

    assert (counted(db), counted(db, "hour")) == ({}, {})
    assert counted(db, "day") == {("12 00:00", "x", "succeeded"): 1}
    (day,) = call(db, "job_stats", since=NOON, step="day")
    assert (day.succeeded, day.attempts) == (1, 1)


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_percentiles_are_within_five_per_cent(db, clock, spread):
    clock.set(NOON)
    draw = random.Random(7)
    times = [math.exp(draw.gauss(3, spread)) / 1000 for _ in range(1000)]
    with db.cursor() as cursor:
        cursor.executemany(
            "insert into rota.finished_jobs (id, queue, job_type, payload, priority,"
            " max_attempts, status, run_at, attempts, lease_token, locked_by, created_at,"
            " updated_at, started_at, finished_at) select %s, 'default', 'x', '{}', 0, 1,"
            " 'succeeded', rota.now() - 2 * t, 1, 1, 'w', rota.now() - 2 * t, rota.now(),"
            " rota.now() - t, rota.now() from make_interval(secs => %s) as t",
            list(enumerate(times)),
        )

    look(db, clock)
    (row,) = call(db, "job_stats", step="minute")

    times.sort()
    for name in ("run", "wait"):
        for share in (50, 95, 99):
            told = getattr(row, f"{name}_p{share}").total_seconds()
            assert told == pytest.approx(times[share * 10 - 1], rel=0.05)
        assert getattr(row, f"longest_{name}").total_seconds() == pytest.approx(times[-1])
        average = getattr(row, f"average_{name}").total_seconds()
        assert average == pytest.approx(sum(times) / 1000, rel=1e-3)


def test_job_stats_adds_up_the_same_from_all_steps(db, clock):
    clock.set("2026-01-11 05:00:30+00")
    ended = []
    for minutes in (0, 17, 55, 400, 1000, 1441, 1463, 1500):
        clock.set("2026-01-11 05:00:30+00")
        ended.append(clock.advance(f"{minutes} minutes"))
        end(db, "succeeded", job_type=f"t{minutes % 2}")
        settle(db)
    look(db, clock)
    for step, since in product(
        ("minute", "hour", "day", "total"), ("2026-01-12 12:20+00", "2026-01-11 05:00+00")
    ):
        asked = scalar(db, "select %s::timestamptz", since)
        length = {"hour": "1 hour", "day": "1 day"}.get(step, "1 minute")
        begin = scalar(db, "select date_bin(%s::interval, %s, 'epoch')", length, asked)

        found = call(db, "job_stats", since=since, step=step, group_by=[])

        assert sum(row.succeeded for row in found) == sum(at >= begin for at in ended), step
        by_type = call(
            db, "job_stats", since=since, step=step, job_types=["t1"], group_by=["queue"]
        )
        assert {(row.queue, row.job_type) for row in by_type} <= {("default", None)}, step


def test_the_hour_and_day_that_go_on_are_added_up_to_where_they_have_come(db, clock):
    clock.set("2026-01-12 13:58:00+00")
    for after in ("1 minute", "2 minutes", "5 minutes", "3 minutes", "1 minute"):
        clock.advance(after)
        end(db, "succeeded")
        look(db, clock)
    # At 13:59, 14:01, 14:07, 14:10 and 14:12, and counted until 14:12.
    assert counted(db, "hour") == {
        ("12 13:00", "x", "succeeded"): 1,
        ("12 14:00", "x", "succeeded"): 2,
    }
    assert counted(db, "day") == {("12 00:00", "x", "succeeded"): 1}

    def told(step: str, until: str | None = None) -> list[int]:
        found = call(db, "job_stats", since="2026-01-12 13:00+00", until=until, step=step)
        return [row.succeeded for row in found]

    assert told("hour") == [1, 4]
    assert told("day") == told("total") == [5]
    # Within the beginning that is added up, the minutes tell; also of the day, the hours.
    assert told("hour", "2026-01-12 14:05+00") == [1, 1]
    assert told("total", "2026-01-12 14:05+00") == [2]
    assert told("day", "2026-01-12 13:30+00") == []
    assert told("day", "2026-01-12 14:08+00") == [3]


def test_without_a_time_a_span_is_the_last_of_its_kind(db, clock):
    """An hour by minute and in total, a day by hour, a month by day."""
    clock.set("2026-01-12 12:00:30+00")
    for before in ("31 days", "29 days", "25 hours", "23 hours", "61 minutes", "59 minutes"):
        clock.set("2026-01-12 12:00:30+00")
        clock.advance(f"-{before}")
        end(db, "succeeded")
    clock.set("2026-01-12 12:00:30+00")
    settle(db)

    def told(**arguments: Any) -> int:
        found = call(db, "job_stats", group_by=[], **arguments)
        return sum(row.succeeded for row in found)

    assert told(step="minute") == told(step="total") == 1
    assert told() == told(step="hour") == 3
    assert told(step="day") == 5
    assert told(until="2026-01-12 11:00:30+00") == 3


def test_percentiles_of_many_groups_are_each_of_its_own(db, clock):
    clock.set(NOON)
    for seconds in (1, 2, 100):
        for queue in ("p", "q"):
            job = running(db, queue=queue, lease="1 hour")
            clock.advance(f"{seconds if queue == 'p' else 10 * seconds} s")
            one(db, "finish_job", **owner(job))
    end(db, "cancelled", queue="r")
    job = running(db, queue="p", lease="1 hour")
    clock.advance("100 s")
    one(db, "fail_job", **owner(job), error="e", fatal=True)
    look(db, clock)

    found = {row.queue: row for row in call(db, "job_stats", step="day", group_by=["queue"])}

    def seconds(row: Any, name: str) -> float | None:
        value = getattr(row, name)
        return None if value is None else value.total_seconds()

    assert seconds(found["p"], "run_p50") == pytest.approx(2, rel=0.05)
    assert seconds(found["q"], "run_p50") == pytest.approx(20, rel=0.05)
    assert seconds(found["p"], "run_p99") == pytest.approx(100, rel=0.05)
    assert seconds(found["q"], "run_p99") == pytest.approx(1000, rel=0.05)
    assert seconds(found["p"], "average_run") == pytest.approx(203 / 4)
    assert (found["p"].attempts, found["p"].failures, found["p"].dead) == (4, 1, 1)
    assert (found["r"].cancelled, found["r"].attempts, found["r"].run_p50) == (1, 0, None)


def test_job_stats_refuses_what_it_does_not_know(db):
    with refused("step"):
        call(db, "job_stats", step="week")
    with refused("group_by"):
        call(db, "job_stats", group_by=["worker"])


def test_a_tick_counts_a_bounded_stretch_and_says_that_there_is_more(db, clock):
    clock.set(NOON)
    db.execute(
        "insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,"
        " status, run_at, attempts, lease_token, locked_by, created_at, updated_at,"
        " started_at, finished_at) select i, 'q', 'x', '{}', 0, 1, 'succeeded', t, 1, 1, 'w',"
        " t, t, t, t from generate_series(1, 60000) as i"
        " cross join lateral (select rota.now() - i * interval '10 ms' as t) as m"
    )
    # A clock that stands still would let a tick go on for ever.
    db.execute("delete from rota_test.clock")
    db.execute(
        "update rota.finished_jobs set finished_at = finished_at - ('2026-01-12 12:00+00'"
        "::timestamptz - clock_timestamp())"
    )

    did = one(db, "tick")
    first = totals(db)["succeeded"]
    settle(db)

    assert did.has_more
    assert first < 60000
    assert totals(db) == {"succeeded": 60000}


@pytest.mark.own_session
def test_a_tick_does_not_look_through_many_queues_each_time(db):
    db.execute(
        "insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,"
        " status, run_at, attempts, lease_token, created_at, updated_at, finished_at)"
        " select n, 'q' || n, 'x', '{}', 0, 1, 'cancelled', t, 0, 0, t, t, t"
        " from generate_series(1, 1000) as n, rota.now() as t"
    )
    settle(db)

    def looks() -> int:
        """Return how many entries of the history a tick reads that finds nothing."""
        with db.transaction():
            db.execute("update rota.stats_progress set sampled_at = '2026-01-01'")
            for _ in range(2):
                before = scalar(db, READ)
                assert scalar(db, "select rota._has_uncounted()") is False
            return int(scalar(db, READ)) - int(before)

    assert totals(db) == {"cancelled": 1000}
    assert looks() == 0

    # Nor does it look away for long.
    value(db, "cancel_job", job_id=value(db, "enqueue", job_type="x"))

    def is_counted() -> bool:
        db.execute("update rota.stats_progress set sampled_at = '2026-01-01'")
        one(db, "tick")
        return totals(db) == {"cancelled": 1001}

    wait_until(is_counted, "what ended is not counted")


def test_counting_never_waits_for_a_lock(db, connect, clock):
    """Another tick hangs in its transaction; this one leaves the counting to it."""
    clock.set(NOON)
    end(db, "succeeded")
    stranger = connect()
    with stranger.transaction():
        stranger.execute("select from rota.stats_progress for update")
        look(db, clock)
        assert totals(db) == {}

    look(db, clock)
    assert totals(db) == {"succeeded": 1}


def test_job_stats_of_a_queue_reads_no_rows_of_the_others(db):
    """A day of 500 queues has 12000 rows of hours, on some 300 pages."""
    db.execute(
        "insert into rota.job_stats (step, starts_at, queue, job_type, outcome, total,"
        " total_wait, wait_buckets, wait_counts, total_run, run_buckets, run_counts)"
        " select 'hour', date_bin('1 hour', rota.now(), 'epoch') - h * interval '1 hour',"
        " 'q' || q, 'x', 'succeeded', 1, '0', '{}', '{}', '0', '{}', '{}'"
        " from generate_series(1, 24) as h, generate_series(1, 500) as q"
    )
    db.execute(
        "update rota.stats_progress set hours_until = date_bin('1 hour', rota.now(), 'epoch'),"
        " days_until = date_bin('1 day', rota.now(), 'epoch')"
    )
    question = "select sum(succeeded) from rota.job_stats(queues => %s)"
    for _ in range(3):
        assert rows(db, question, [["q7", "q8"]]) == [(48,)]

    ((plan,),) = rows(db, f"explain (analyze, buffers, format json) {question}", [["q7", "q8"]])

    # Two queues at 24 hours, each by a way of three pages through the index.
    assert plan[0]["Plan"]["Shared Hit Blocks"] < 24 * 2 * 4
