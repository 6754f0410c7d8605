"""Schedules by the client, and what a job knows of the one that made it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import rota
from rota import Client, ScheduleChange, UpcomingRun
from support.clock import Clock


def test_schedule_job_passes_every_argument(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    starts_at = datetime(2030, 1, 1, tzinfo=UTC)

    change = client.schedule_job(
        "report",
        "every 10 minutes",
        "send_report",
        {"to": "board"},
        queue="mail",
        time_zone="Asia/Tokyo",
        priority=-3,
        max_attempts=2,
        lease=timedelta(seconds=90),
        backoff={"kind": "fixed"},
        catch_up="all",
        catch_up_window=timedelta(hours=3),
        catch_up_max=7,
        overlap="skip",
        jitter=timedelta(seconds=30),
        starts_at=starts_at,
        ends_at=starts_at + timedelta(days=1),
    )

    assert change == ScheduleChange(outcome="created", next_run_at=starts_at)
    row = db.execute(
        "select schedule, job_type, payload, queue, time_zone, priority, max_attempts, lease,"
        " backoff, catch_up, catch_up_window, catch_up_max, overlap, jitter, starts_at,"
        " ends_at - starts_at from rota.job_definitions"
    ).fetchone()
    assert row == (
        "every 10 minutes", "send_report", {"to": "board"}, "mail", "Asia/Tokyo", -3, 2,
        timedelta(seconds=90), {"kind": "fixed"}, "all", timedelta(hours=3), 7, "skip",
        timedelta(seconds=30), starts_at, timedelta(days=1),
    )  # fmt: skip


def test_schedule_calls_return_what_sql_returns(client: Client, clock: Clock) -> None:
    clock.set("2026-03-28 12:00+00")
    at_three = datetime(2026, 3, 29, 1, tzinfo=UTC)

    client.schedule_job("a", "30 2 * * *", "a", time_zone="Europe/Warsaw")

    assert client.schedule_job(
        "a", "30 2 * * *", "a", time_zone="Europe/Warsaw"
    ) == ScheduleChange(outcome="unchanged", next_run_at=at_three)
    assert client.disable_schedule("a") is None  # type: ignore[func-returns-value]
    assert client.enable_schedule("a") == at_three
    job_id = client.run_schedule_now("a")
    (job,) = client.claim_jobs("w")
    assert (job.job_id, job.definition) == (job_id, "a")
    assert job.scheduled_for == datetime(2026, 3, 28, 12, tzinfo=UTC)
    assert client.next_run("0 2 * * *") == datetime(2026, 3, 29, 2, tzinfo=UTC)
    assert client.next_run("0 0 1 1 *", "UTC", datetime(9998, 6, 1, tzinfo=UTC)) is None
    (run,) = client.upcoming_runs(name="a", max_runs=1)
    assert run == UpcomingRun(
        run_at=at_three,
        local_time=datetime(2026, 3, 29, 3),
        utc_offset=timedelta(hours=2),
        clock_change="moved",
    )
    assert client.describe_schedule("@daily") == "at 00:00 every day"
    client.unschedule_job("a")
    assert client.tick().jobs_swept == 0


def test_schedule_errors_have_classes(client: Client) -> None:
    calls: list[tuple[Callable[[], Any], type[rota.RotaError]]] = [
        (lambda: client.schedule_job("a", "tomorrow", "a"), rota.BadScheduleError),
        (lambda: client.describe_schedule("0 0 31 2 *"), rota.BadScheduleError),
        (lambda: client.unschedule_job("a"), rota.UnknownScheduleError),
        (lambda: client.upcoming_runs(name="a"), rota.UnknownScheduleError),
        (lambda: client.next_run("@daily", "Mars/Base"), rota.InvalidArgumentError),
        (lambda: client.next_run("@daily", after=datetime(2026, 1, 1)), ValueError),  # type: ignore[list-item]
    ]

    for call, error in calls:
        with pytest.raises(error):
            call()


def test_job_knows_its_schedule_and_its_time(
    client: Client, drain: Callable[..., None], clock: Clock
) -> None:
    clock.set("2026-01-01 00:00+00")
    client.schedule_job("nightly", "0 2 * * *", "clean_up")
    client.enqueue("clean_up")
    clock.set("2026-01-02 05:00+00")
    client.tick()
    seen = []
    registry = rota.Registry()
    registry.handler("clean_up")(lambda job: seen.append((job.definition, job.scheduled_for)))

    drain(registry, concurrency=1)

    assert sorted(seen, key=str) == [
        ("nightly", datetime(2026, 1, 2, 2, tzinfo=UTC)),
        (None, None),
    ]
