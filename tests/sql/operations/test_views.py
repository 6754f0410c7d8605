"""What people and dashboards read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from sql.helpers import claim, enqueue, one, owner, rows, running, settle, value
from sql.maintenance.test_retention import end

COLUMNS = {
    "job_runs": "id queue job_type payload priority run_at status attempts max_attempts"
    " locked_by locked_until lease_token idempotency_key progress_percent progress_message"
    " cancel_requested_at cancel_reason last_error error_type failed_at created_at updated_at"
    " started_at finished_at result ordering_key limit_key pipeline stage"
    " stage_input definition scheduled_for",
    "queue_stats": "queue is_paused ready scheduled retrying running blocked dead"
    " oldest_ready_age next_run_at counted_at",
    "running_jobs": "id queue job_type attempts max_attempts locked_by started_at running_for"
    " locked_until updated_at progress_percent progress_message cancel_requested_at"
    " cancel_reason",
    "stale_jobs": "id queue job_type attempts max_attempts locked_by started_at locked_until"
    " updated_at is_lease_over",
    "dead_jobs": "id queue job_type payload attempts max_attempts last_error error_type"
    " locked_by created_at failed_at finished_at",
    "error_groups": "queue job_type error_type message failures jobs first_failed_at"
    " last_failed_at last_job_id",
    "hourly_stats": "hour queue job_type succeeded dead cancelled total_duration"
    " average_duration longest_duration",
    "limit_stats": "limit_name max_running running waiting max_starts per burst next_start_at",
    "unknown_effects": "scope key recorded_at expires_at job_id job_type status",
    "worker_health": "worker host pid version queues job_types concurrency started_at"
    " last_seen_at silent_for is_live",
    "ticker_health": "last_tick_at last_tick_by lag schedules_overdue oldest_overdue"
    " schedules_broken",
}


def test_views_have_their_columns_in_this_order_first(db):
    """A view may gain columns at its end; those before are promised."""
    for view, columns in COLUMNS.items():
        with db.cursor() as cursor:
            cursor.execute(f"select * from rota.{view}")
            found = [column.name for column in cursor.description]
        assert found[: len(columns.split())] == columns.split()


def test_views_are_all_tested_here(db):
    found = rows(
        db,
        "select relname::text from pg_class where relkind = 'v'"
        " and relnamespace = 'rota'::regnamespace and left(relname, 1) <> '_'",
    )

    assert {name for (name,) in found} == {*COLUMNS}


def test_job_runs_has_every_job_once(db):
    live = [enqueue(db), running(db, queue="q").job_id]
    ended = [end(db, status, queue="e") for status in ("succeeded", "dead", "cancelled")]

    found = rows(db, "select id, status, finished_at is null as live from rota.job_runs")

    assert sorted(found) == [
        (live[0], "queued", True),
        (live[1], "running", True),
        (ended[0], "succeeded", False),
        (ended[1], "dead", False),
        (ended[2], "cancelled", False),
    ]


def test_queue_stats_can_be_read_with_jobs_that_a_hand_has_put_at_the_ends_of_time(db, clock):
    clock.set("2026-01-01 00:00+00")
    for moment in ("-infinity", "infinity"):
        db.execute("update rota.jobs set run_at = %s where id = %s", (moment, enqueue(db)))
    enqueue(db, delay="0")
    clock.advance("1 min")

    (stats,) = rows(db, "select * from rota.queue_stats")

    assert (stats.ready, stats.oldest_ready_age) == (2, timedelta(minutes=1))
    assert (stats.scheduled, stats.next_run_at) == (1, None)


def test_queue_stats_counts_each_state_of_each_queue(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    end(db, "dead", queue="q")
    failed, due, _ = (running(db, queue="q") for _ in range(3))
    one(db, "fail_job", **owner(failed), error="e", retry_in="10 s")
    one(db, "fail_job", **owner(due), error="e", retry_in="0")
    for _ in range(2):
        enqueue(db, queue="q", run_at=now - timedelta(hours=1))
    for _ in range(3):
        enqueue(db, queue="q", delay="20 s")
    claimed = claim(db, queues=["q"])
    blocked = enqueue(db, queue="q")
    db.execute("update rota.jobs set status = 'blocked' where id = %s", (blocked,))
    value(db, "set_queue", queue="empty")
    value(db, "pause_queue", queue="empty")
    end(db, "succeeded", queue="ended")

    stats = {row.queue: row for row in rows(db, "select * from rota.queue_stats")}

    assert len(claimed) == 1
    assert set(stats) == {"q", "empty"}
    q, empty = stats["q"], stats["empty"]
    counts = (q.ready, q.scheduled, q.retrying, q.running, q.blocked, q.dead)
    assert counts == (1 + 1, 3, 1, 1 + 1, 1, 1)
    assert (q.is_paused, empty.is_paused) == (False, True)
    assert q.oldest_ready_age == timedelta(hours=1)
    assert q.next_run_at == now + timedelta(seconds=10)
    assert empty[2:8] == (0, 0, 0, 0, 0, 0)
    assert (empty.oldest_ready_age, empty.next_run_at) == (None, None)


def test_running_jobs_shows_progress_and_age(db, clock):
    clock.set("2026-01-01 00:00+00")
    job = running(db, job_type="mail")
    enqueue(db)
    clock.advance("30 s")
    value(db, "set_progress", **owner(job), percent=40, message="half")

    (row,) = rows(db, "select * from rota.running_jobs")

    assert (row.id, row.job_type, row.locked_by) == (job.job_id, "mail", "w")
    assert (row.running_for, row.locked_until) == (timedelta(seconds=30), job.locked_until)
    assert (row.progress_percent, row.progress_message) == (40, "half")


def test_stale_jobs_shows_ended_leases_and_silence(db, clock):
    clock.set("2026-01-01 00:00+00")
    over = running(db, lease="1 minute")
    silent = running(db, lease="1 day")
    alive = running(db, lease="1 day")
    clock.advance("61 minutes")
    one(db, "heartbeat", **owner(alive))

    found = rows(db, "select id, is_lease_over from rota.stale_jobs order by id")

    assert found == [(over.job_id, True), (silent.job_id, False)]


def test_dead_jobs_shows_what_was_given_up(db):
    end(db, "succeeded")
    end(db, "cancelled")
    dead = end(db, "dead", queue="q")

    (row,) = rows(db, "select * from rota.dead_jobs")

    assert (row.id, row.queue, row.last_error, row.locked_by) == (dead, "q", "e", "w")
    value(db, "retry_job", job_id=dead)
    assert rows(db, "select * from rota.dead_jobs") == []


def test_error_groups_counts_failures_by_text(db, clock):
    first = clock.set("2026-01-01 00:00+00")
    twice = running(db)
    one(db, "fail_job", **owner(twice), error="a", error_type="T", retry_in="0")
    last = clock.advance("1 s")
    (again,) = claim(db)
    one(db, "fail_job", **owner(again), error="a", error_type="T", fatal=True)
    other = running(db)
    one(db, "fail_job", **owner(other), error="a", error_type="T", fatal=True)
    one(db, "fail_job", **owner(running(db)), error="b", fatal=True)

    found = rows(db, "select * from rota.error_groups order by failures desc")

    assert found[0] == ("default", "x", "T", "a", 3, 2, first, last, other.job_id)
    assert (found[1].message, found[1].error_type, found[1].failures) == ("b", None, 1)
    assert len(found) == 2


@pytest.mark.slow
def test_hourly_stats_sums_up_what_ended(db, clock):
    db.execute("set timezone = 'UTC'")

    def finish(minute: int, seconds: int) -> None:
        clock.set(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute))
        job = running(db)
        clock.advance(timedelta(seconds=seconds))
        value(db, "finish_job", **owner(job))

    finish(10, 2)
    finish(20, 4)
    clock.set("2026-01-01 00:30+00")
    end(db, "dead")
    end(db, "cancelled")
    value(db, "cancel_job", job_id=enqueue(db, queue="never started"[:5]))
    put_off = running(db, queue="put_off")
    value(db, "snooze_job", **owner(put_off), delay="1 h")
    clock.advance(timedelta(minutes=10))
    value(db, "cancel_job", job_id=put_off.job_id)
    finish(70, 9)
    clock.advance("31 s")
    settle(db)

    found = rows(db, "select * from rota.hourly_stats order by hour, queue")

    hour = datetime(2026, 1, 1, tzinfo=UTC)
    seconds = [timedelta(seconds=n) for n in range(10)]
    assert found == [
        (hour, "default", "x", 2, 1, 1, seconds[6], seconds[6] / 4, seconds[4]),
        (hour, "never", "x", 0, 0, 1, None, None, None),
        (hour, "put_off", "x", 0, 0, 1, None, None, None),
        (hour + timedelta(hours=1), "default", "x", 1, 0, 0, *[seconds[9]] * 3),
    ]


def test_hourly_stats_are_of_24_hours_where_a_day_has_25(db, clock):
    """At the end of summer time a day of the session's zone is an hour longer."""
    db.execute("set timezone = 'America/New_York'")
    clock.set("2026-11-01 05:30+00")
    value(db, "finish_job", **owner(running(db)))
    clock.advance("1 minute")
    settle(db)
    for after, hours in (("23 hours 20 minutes", 1), ("10 minutes", 0)):
        clock.advance(after)
        settle(db)
        assert len(rows(db, "select from rota.hourly_stats")) == hours


def test_worker_health_tells_who_is_silent_or_no_longer_connected(db, clock):
    """A worker is live if it has reported within six minutes and its session is connected."""
    clock.set("2026-01-01 00:00+00")
    report = "select rota.report_worker(%s, 'host', 1, '1.0', '{a}')"
    db.execute(report, ["silent"])
    clock.advance("6 min")
    db.execute(report, ["live"])
    db.execute(report, ["gone"])
    db.execute("update rota.workers set backend_pid = 0 where worker = 'gone'")

    found = rows(
        db, "select worker, silent_for, is_live from rota.worker_health order by worker"
    )

    silence = timedelta(minutes=6)
    assert found == [
        ("gone", timedelta(0), False), ("live", timedelta(0), True), ("silent", silence, False)
    ]  # fmt: skip


def test_error_groups_read_the_newest_failures_alone(db):
    db.execute(
        "insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker,"
        " started_at, failed_at, message)"
        " select n, n, 1, 'q' || n % 1000, 'x', 'w', a, a, 'boom'"
        " from generate_series(1, 30000) as n cross join lateral (select rota.now()"
        " - n * interval '1 minute' as a) as s"
    )
    db.execute("analyze rota.job_errors")

    ((plan,),) = rows(db, "explain (analyze, format json) select * from rota.error_groups")

    nodes, read = [plan[0]["Plan"]], 0
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if node.get("Relation Name", "").startswith("job_errors"):
            read += node["Actual Rows"]
    # One more of each of fifteen weeks.
    assert 2000 <= read <= 2020


@pytest.mark.parametrize("moment", ["infinity", "-infinity"])
def test_an_infinite_time_hides_no_other_row(db, moment):
    jobs = [running(db), running(db)]
    for worker in ("v", "w"):
        value(db, "report_worker", worker=worker, host="h", pid=1, version=None, queues=["q"])
    db.execute(f"update rota.jobs set started_at = '{moment}' where id = %s", [jobs[0].job_id])
    db.execute(f"update rota.workers set last_seen_at = '{moment}' where worker = 'v'")

    found = rows(db, "select id, abs(extract(days from running_for)) from rota.running_jobs")
    workers = rows(db, "select worker, silent_for > '1000 days' from rota.worker_health")

    assert [days > 1000 for _, days in sorted(found)] == [True, False]
    assert sorted(workers) == [("v", moment == "-infinity"), ("w", False)]
