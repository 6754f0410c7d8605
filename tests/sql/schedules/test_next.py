"""When a schedule is due next, above all where clocks are moved."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from sql.helpers import call, claim, owner, raises, refused, scalar, value


def runs(read_only_db, schedule, time_zone, after, count):
    """The next *count* runs, in UTC."""
    found = call(
        read_only_db,
        "upcoming_runs",
        schedule=schedule,
        time_zone=time_zone,
        after=after,
        max_runs=count,
    )
    return [f"{run.run_at.astimezone(UTC):%m-%d %H:%M}" for run in found]


# Found with the zone's rules and a pencil.
BY_HAND = {
    "fixed, skipped: Warsaw goes from 02:00 to 03:00": (
        "30 2 * * *", "Europe/Warsaw", "2026-03-28 12:00+00",
        ["03-29 01:00", "03-30 00:30"],
    ),
    "fixed, at the very end of the gap": (
        "0 3 * * *", "Europe/Warsaw", "2026-03-28 12:00+00",
        ["03-29 01:00", "03-30 01:00"],
    ),
    "fixed, several in one gap run once": (
        "0,15,45 2,3 * * *", "Europe/Warsaw", "2026-03-29 00:00+00",
        ["03-29 01:00", "03-29 01:15", "03-29 01:45", "03-30 00:00"],
    ),
    "fixed, twice: Warsaw shows 02:30 twice": (
        "30 2 * * *", "Europe/Warsaw", "2026-10-24 12:00+00",
        ["10-25 00:30", "10-26 01:30"],
    ),
    "fixed, asked between the first and the second time": (
        "45 2 * * *", "Europe/Warsaw", "2026-10-25 01:10+00",
        ["10-26 01:45"],
    ),
    "shown, skipped: every ten minutes jumps with the clock": (
        "*/20 * * * *", "America/New_York", "2026-03-08 06:30+00",
        ["03-08 06:40", "03-08 07:00", "03-08 07:20"],
    ),
    "shown, skipped: a star as minute, hour two does not exist": (
        "* 2 * * *", "America/New_York", "2026-03-08 05:00+00",
        ["03-09 06:00", "03-09 06:01"],
    ),
    "shown, twice: the hour comes twice": (
        "*/30 * * * *", "America/New_York", "2026-11-01 05:00+00",
        ["11-01 05:30", "11-01 06:00", "11-01 06:30", "11-01 07:00"],
    ),
    "shown, twice: both halves of a named hour": (
        "*/30 1 * * *", "America/New_York", "2026-11-01 04:30+00",
        ["11-01 05:00", "11-01 05:30", "11-01 06:00", "11-01 06:30", "11-02 06:00"],
    ),
    "half an hour: Lord Howe shows 01:30 to 02:00 twice": (
        "45 1 * * *", "Australia/Lord_Howe", "2026-04-04 12:00+00",
        ["04-04 14:45", "04-05 15:15"],
    ),
    "half an hour, skipped: Lord Howe goes from 02:00 to 02:30": (
        "15 2 * * *", "Australia/Lord_Howe", "2026-10-03 12:00+00",
        ["10-03 15:30", "10-04 15:15"],
    ),
    "midnight skipped: Havana goes from 00:00 to 01:00": (
        "@daily", "America/Havana", "2026-03-07 12:00+00",
        ["03-08 05:00", "03-09 04:00"],
    ),
    "midnight twice: Havana goes from 01:00 to 00:00": (
        "@daily", "America/Havana", "2026-10-31 12:00+00",
        ["11-01 04:00", "11-02 05:00"],
    ),
    "two hours at once: Troll goes from 01:00 to 03:00": (
        "30 1,2 * * *", "Antarctica/Troll", "2026-03-28 12:00+00",
        ["03-29 01:00", "03-29 23:30", "03-30 00:30"],
    ),
    "a whole day skipped: Apia had no 2011-12-30": (
        "0 12 * * *", "Pacific/Apia", "2011-12-29 00:00+00",
        ["12-29 22:00", "12-30 10:00", "12-30 22:00"],
    ),
    "winter time in summer: Dublin": (
        "30 1 * * *", "Europe/Dublin", "2026-03-28 12:00+00",
        ["03-29 01:00", "03-30 00:30"],
    ),
    "a sixth field changes nothing": (
        "0 30 2 * * *", "Europe/Warsaw", "2026-03-28 12:00+00",
        ["03-29 01:00", "03-30 00:30"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_clocks_that_are_moved(read_only_db, case):
    schedule, time_zone, after, expected = BY_HAND[case]

    assert runs(read_only_db, schedule, time_zone, after, len(expected)) == expected


@pytest.mark.slow
def test_the_time_zone_of_the_session_and_its_formats_do_not_matter(read_only_db):
    schedules = [case[:2] for case in BY_HAND.values()]
    # The next is days away, and the clocks of other zones are moved meanwhile.
    schedules += [("*/20 9-10 * * MON-FRI", "UTC"), ("* 9 */3 * *", "America/Havana")]

    def found():
        return [
            scalar(
                read_only_db,
                "select array_agg(extract(epoch from r.run_at) order by r.run_at)"
                " from rota.upcoming_runs(%s, %s, '2026-01-01 00:00+00', 400) as r",
                schedule,
                time_zone,
            )
            for schedule, time_zone in schedules
        ]

    expected = found()
    for setting in (
        "timezone = 'America/New_York'",
        "timezone = 'Australia/Lord_Howe'",
        "timezone = 'Pacific/Apia'",
        "timezone = 'Europe/Warsaw'",
        "timezone = '<-03:17>+03:17'",
        "datestyle = 'German, DMY'",
        "intervalstyle = 'sql_standard'",
        "extra_float_digits = 0",
        "plan_cache_mode = force_generic_plan",
    ):
        read_only_db.execute(f"set {setting}")
        assert found() == expected, setting


@pytest.mark.parametrize(
    ("schedule", "after", "expected"),
    [
        ("*/10 * * * * *", "2026-01-01 00:00:00", "2026-01-01 00:00:10"),
        ("*/10 * * * * *", "2026-01-01 00:00:09.999999", "2026-01-01 00:00:10"),
        ("*/10 * * * * *", "2026-01-01 00:00:10.000001", "2026-01-01 00:00:20"),
        ("59 59 23 31 12 *", "2026-12-31 23:59:58", "2026-12-31 23:59:59"),
        ("59 59 23 31 12 *", "2026-12-31 23:59:59", "2027-12-31 23:59:59"),
        ("0 0 29 2 *", "2096-03-01 00:00", "2104-02-29 00:00"),
        ("0 0 * 2 MON#5", "2072-03-01 00:00", "2112-02-29 00:00"),
        ("0 0 L 2 *", "2026-02-01 00:00", "2026-02-28 00:00"),
        ("0 0 L 2 *", "2028-02-01 00:00", "2028-02-29 00:00"),
        ("0 0 LW * *", "2026-05-01 00:00", "2026-05-29 00:00"),
        ("0 0 LW * *", "2026-02-01 00:00", "2026-02-27 00:00"),
        ("0 0 LW * *", "2026-07-01 00:00", "2026-07-31 00:00"),
        ("0 0 * * 5L", "2026-05-01 00:00", "2026-05-29 00:00"),
        ("0 0 * * 1#5", "2026-01-01 00:00", "2026-03-30 00:00"),
        ("0 0 * * MON#2", "2026-06-01 00:00", "2026-06-08 00:00"),
        ("0 0 * * 0L,3#1", "2026-06-01 00:00", "2026-06-03 00:00"),
        ("after 10 minutes", "2026-01-01 00:00:00.5", "2026-01-01 00:10:00.5"),
        ("every 90 seconds", "2026-01-01 00:00:00.5", "2026-01-01 00:01:30.5"),
    ],
)
def test_next_run(read_only_db, schedule, after, expected):
    found = value(read_only_db, "next_run", schedule=schedule, after=f"{after}+00")

    assert found == datetime.fromisoformat(f"{expected}+00:00")


def test_next_run_is_later_than_now_unless_told_otherwise(db, clock):
    clock.set("2026-03-01 12:00+00")

    assert value(db, "next_run", schedule="@hourly") == clock.now() + timedelta(hours=1)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("2026-01-01 00:00", "2026-02-01 00:00:07"),
        ("2026-02-01 00:00:06.999", "2026-02-01 00:00:07"),
        ("2026-02-01 00:00:07", "2026-02-01 00:01:37"),
        ("2026-02-01 00:01:36", "2026-02-01 00:01:37"),
        ("2026-07-01 00:00:00", "2026-07-01 00:00:07"),
    ],
)
def test_every_counts_from_starts_at_and_sees_no_clock(read_only_db, after, expected):
    found = value(
        read_only_db,
        "next_run",
        schedule="every 90 seconds",
        time_zone="Europe/Warsaw",
        after=f"{after}+00",
        starts_at="2026-02-01 00:00:07+00",
    )

    assert found == datetime.fromisoformat(f"{expected}+00:00")


def test_next_run_does_not_come_before_starts_at_but_may_be_it(read_only_db):
    found = value(
        read_only_db,
        "next_run",
        schedule="@daily",
        after="2026-01-01 12:00+00",
        starts_at="2026-03-01 00:00+00",
    )

    assert found == datetime(2026, 3, 1, tzinfo=UTC)


def test_next_run_ends_before_the_year_9999(read_only_db):
    assert (
        value(read_only_db, "next_run", schedule="@yearly", after="9997-06-01 00:00+00").year
        == 9998
    )
    assert (
        value(read_only_db, "next_run", schedule="@yearly", after="9998-06-01 00:00+00") is None
    )
    assert (
        value(
            read_only_db, "next_run", schedule="every 36525 days", after="9998-06-01 00:00+00"
        )
        is None
    )


def test_next_run_is_null_for_a_time_that_is_always_skipped(read_only_db):
    """The clock of Warsaw is put forward at 02:00 on each last Sunday of March."""
    skipped = {"schedule": "*/20 2 25-31 3 */7", "after": "2026-01-01 00:00+00"}

    assert value(read_only_db, "next_run", **skipped, time_zone="Europe/Warsaw") is None
    assert value(read_only_db, "next_run", **skipped, time_zone="UTC") is not None


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("after", "infinity"),
        ("after", "-infinity"),
        ("after", "1969-12-31 00:00+00"),
        ("after", "9999-06-01 00:00+00"),
        ("starts_at", "infinity"),
        ("starts_at", "0001-01-01 00:00+00"),
    ],
)
def test_next_run_refuses_times_that_are_none(read_only_db, argument, bad):
    with refused(argument):
        call(read_only_db, "next_run", schedule="@daily", **{argument: bad})


@pytest.mark.parametrize("max_runs", [None, 0, -1, 1001])
def test_upcoming_runs_refuses_a_bad_number(read_only_db, max_runs):
    with refused("max_runs"):
        call(read_only_db, "upcoming_runs", schedule="@daily", max_runs=max_runs)


def test_upcoming_runs_wants_a_text_or_a_name(read_only_db):
    with refused("schedule"):
        call(read_only_db, "upcoming_runs")
    with refused("schedule"):
        call(read_only_db, "upcoming_runs", schedule="@daily", name="nightly")
    with raises("RT005", "schedule"):
        call(read_only_db, "upcoming_runs", name="nightly")


def test_upcoming_runs_says_what_the_clock_did(read_only_db):
    def notes(schedule, after):
        found = call(
            read_only_db,
            "upcoming_runs",
            schedule=schedule,
            time_zone="Europe/Warsaw",
            after=after,
            max_runs=4,
        )
        return [
            (f"{r.local_time:%H:%M}", r.utc_offset.seconds // 3600, r.clock_change)
            for r in found
        ]

    assert notes("30 2 * * *", "2026-03-27 12:00+00") == [
        ("02:30", 1, None), ("03:00", 2, "moved"), ("02:30", 2, None), ("02:30", 2, None)
    ]  # fmt: skip
    assert notes("30 2 * * *", "2026-10-23 12:00+00") == [
        ("02:30", 2, None), ("02:30", 2, "first"), ("02:30", 1, None), ("02:30", 1, None)
    ]  # fmt: skip
    assert notes("*/30 * * * *", "2026-10-25 00:10+00") == [
        ("02:30", 2, "first"), ("02:00", 1, "second"), ("02:30", 1, "second"),
        ("03:00", 1, None),
    ]  # fmt: skip


def test_upcoming_runs_of_an_after_schedule_begin_with_one_that_is_due(db, clock):
    clock.set("2026-03-27 12:00+00")
    call(db, "schedule_job", name="poll", schedule="after 10 minutes", job_type="poll")
    clock.advance("1 minute")

    found = call(db, "upcoming_runs", name="poll")
    later = call(db, "upcoming_runs", name="poll", after="2026-03-27 12:01+00")

    assert [run.local_time.strftime("%H:%M") for run in (*found, *later)] == ["12:00", "12:11"]


def test_upcoming_runs_of_an_after_schedule_are_none_while_its_job_has_not_ended(db, clock):
    clock.set("2026-03-27 12:00+00")
    call(db, "schedule_job", name="poll", schedule="after 10 minutes", job_type="poll")
    call(db, "tick")
    (job,) = claim(db)

    assert call(db, "upcoming_runs", name="poll") == []

    value(db, "finish_job", **owner(job))
    call(db, "tick")
    (run,) = call(db, "upcoming_runs", name="poll")
    assert run.local_time.strftime("%H:%M") == "12:10"


def test_upcoming_runs_begin_with_the_one_that_is_planned(db, clock):
    """The clock was ahead when a tick planned it."""
    clock.set("2026-03-27 12:00+00")
    call(db, "schedule_job", name="s", schedule="0 * * * *", job_type="x")
    clock.set("2026-03-27 20:30+00")
    call(db, "tick")
    clock.set("2026-03-27 12:10+00")

    found = call(db, "upcoming_runs", name="s", max_runs=2)
    asked = call(db, "upcoming_runs", name="s", after="2026-03-27 12:10+00", max_runs=1)

    assert [run.local_time.hour for run in (*found, *asked)] == [21, 22, 13]
    for hour, jobs_enqueued in ((13, 0), (21, 1), (22, 1)):
        clock.set(f"2026-03-27 {hour}:00+00")
        assert value(db, "tick") == jobs_enqueued


def test_of_an_after_text_only_the_first_run_can_be_known(read_only_db):
    after = "2026-03-27 12:00+00"

    (run,) = call(read_only_db, "upcoming_runs", schedule="after 10 minutes", after=after)

    assert run.local_time.strftime("%H:%M") == "12:10"


@pytest.mark.slow
def test_upcoming_runs_are_each_the_next_of_the_one_before(read_only_db):
    for schedule, time_zone, after, _ in BY_HAND.values():
        found = call(
            read_only_db, "upcoming_runs", schedule=schedule, time_zone=time_zone, after=after,
            max_runs=50,
        )  # fmt: skip
        for one, other in pairwise(run.run_at for run in found):
            following = value(
                read_only_db, "next_run", schedule=schedule, time_zone=time_zone, after=one
            )
            assert one < other == following


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    ["*/7 * * * *", "@yearly", "* * * * * *", "*/5 0-3 0 * * *", "30 2 * * *",
     "every 35 seconds", "0 0 29 2 *", "0-9 1-2 * * 0"],
)  # fmt: skip
@pytest.mark.parametrize(
    "until", ["2026-10-25 01:10:03", "2026-03-29 05:00", "2026-07-01 13:00"]
)
def test_occurrences_until_are_the_newest_of_all(read_only_db, schedule, until):
    """Against a walk through all of them."""
    until = datetime.fromisoformat(f"{until}+00:00")
    for back in (
        timedelta(seconds=90),
        timedelta(hours=3),
        timedelta(days=3),
        timedelta(days=9999),
    ):
        walked = call(
            read_only_db, "upcoming_runs", schedule=schedule, time_zone="Europe/Warsaw",
            after=until - back, max_runs=1000,
        )  # fmt: skip
        due = [run.run_at for run in walked if run.run_at <= until]
        if not due or len(due) == 1000:
            continue
        for count in (1, 7, 1000):
            newest = scalar(
                read_only_db,
                "select rota._occurrences_until("
                " rota._parse_schedule(%s), 'Europe/Warsaw', %s, %s, %s, %s)",
                schedule,
                until - back,
                due[0],
                until,
                count,
            )
            assert newest == due[-count:]
