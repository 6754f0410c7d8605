"""A day of a shop: a nightly clean-up, a report each Monday, an export right now.

DATABASE_URL=postgresql://localhost/shop python schedules.py
"""

import os
from datetime import date, timedelta
from zoneinfo import ZoneInfo

import psycopg

import rota

ZONE = ZoneInfo("Europe/Warsaw")  # where the team is

registry = rota.Registry()


def day_of(job: rota.Job) -> date:
    """Return the day that a job works for, however late it runs."""
    return (job.scheduled_for or job.run_at).astimezone(ZONE).date()


def week_before(day: date) -> date:
    """Return the Monday on which the last whole week before a day began."""
    return day - timedelta(days=day.weekday() + 7)


@registry.handler("clean_up")
def clean_up(job: rota.Job) -> None:
    """Delete what is too old on that day."""
    oldest = day_of(job) - timedelta(days=job.payload["keep_days"])
    print(f"clean up of {day_of(job)}: nothing before {oldest} is kept")


@registry.handler("plan_reports")
def plan_reports(job: rota.Job) -> None:
    """Plan a report of the week before for each user; the key lets each have one a week."""
    week_start_date = week_before(day_of(job))
    with job.transaction() as connection:
        rota.Client(connection).enqueue_many(
            [
                {
                    "job_type": "send_report",
                    "payload": {"user_id": user_id, "week_start_date": str(week_start_date)},
                    "idempotency_key": f"report:{user_id}:{week_start_date}",
                    "unique_for": timedelta(weeks=4),
                }
                for user_id in (7, 8)
            ]
        )


@registry.handler("send_report")
def send_report(job: rota.Job) -> None:
    """Send one report once, whatever happens to its job."""
    user_id, week = job.payload["user_id"], job.payload["week_start_date"]
    with job.effect("report", f"{user_id}:{week}") as effect:
        if effect.is_due:
            print(f"report for user {user_id}, week of {week}")


@registry.handler("export")
def export(job: rota.Job) -> None:
    """Export a range of days, which somebody waits for."""
    print(f"export from {job.payload['from']} to {job.payload['to']}")


def main() -> None:
    """Say what there shall be, as each deployment may; then run what is due."""
    database = os.environ.get("DATABASE_URL", "")
    with psycopg.connect(database, autocommit=True) as connection:
        client = rota.Client(connection)
        for name, schedule, job_type, payload in (
            ("clean_up", "0 2 * * *", "clean_up", {"keep_days": 30}),
            ("weekly_reports", "0 8 * * MON", "plan_reports", {}),
        ):
            change = client.schedule_job(name, schedule, job_type, payload, time_zone=ZONE.key)
            words = client.describe_schedule(schedule)
            print(f"{name} is {change.outcome}: {words} in {ZONE.key}")

        # One user has asked for it already: under the same key, so there will be one report.
        monday = client.next_run("0 8 * * MON", ZONE.key)
        if monday is None:
            raise RuntimeError("there are no more Mondays")
        week_start_date = week_before(monday.astimezone(ZONE).date())
        client.enqueue(
            "send_report",
            {"user_id": 7, "week_start_date": str(week_start_date)},
            run_at=monday,
            idempotency_key=f"report:7:{week_start_date}",
            unique_for=timedelta(weeks=4),
        )
        client.enqueue("export", {"from": "2026-01-01", "to": "2026-01-31"}, priority=-10)
        client.run_schedule_now("clean_up")  # not to wait for the night
        client.run_schedule_now("weekly_reports")
    rota.Worker(database, registry, concurrency=1).run(drain=True)


if __name__ == "__main__":
    main()
