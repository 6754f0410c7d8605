"""Schedules are put in, changed and stopped."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from sql.helpers import (
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
    scalar,
    swallow,
    value,
)

pytestmark = pytest.mark.slow

NOON = "2026-03-02 12:00:00+00"  # a Monday


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def schedule(db, name="s", text="0 * * * *", job_type="x", **arguments):
    """Schedule a job, each hour unless told otherwise; return what was answered."""
    return one(db, "schedule_job", name=name, schedule=text, job_type=job_type, **arguments)


def definition(db, name="s"):
    (row,) = rows(db, "select * from rota.job_definitions where name = %s", name)
    return row


def place(db, name="s"):
    """Return where the row of a definition is: another place means that it was written."""
    return scalar(
        db, "select ctid::text || ' ' || xmin from rota.job_definitions where name = %s", name
    )


def jobs(db, name="s"):
    """Return the planned times that a definition has jobs for."""
    return [
        row.scheduled_for
        for row in rows(
            db,
            "select scheduled_for from rota.job_runs where definition = %s order by id",
            name,
        )
    ]


def finish(db, name="s"):
    """Run the one job of a definition that is due."""
    (job,) = claim(db, max_jobs=10)
    assert job.definition == name
    value(db, "finish_job", **owner(job))
    return job


@pytest.fixture
def noon(db, clock):
    """The database at noon."""
    clock.set(NOON)
    return db


def test_schedule_job_creates_a_definition_and_returns_its_first_time(noon):
    answer = schedule(
        noon,
        payload={"a": 1},
        queue="q",
        priority=3,
        max_attempts=4,
        lease="5 minutes",
        time_limit="1 hour",
        source="shop",
        headers={"tenant": "7"},
        backoff={"kind": "fixed"},
        catch_up="all",
        catch_up_window="1 day",
        catch_up_max=7,
        overlap="queue",
        jitter="10 s",
        ends_at="2027-01-01 00:00+00",
        time_zone="Europe/Warsaw",
    )

    assert answer == ("created", at("2026-03-02 13:00"))
    found = definition(noon)
    assert (found.job_type, found.payload, found.queue, found.priority) == (
        "x",
        {"a": 1},
        "q",
        3,
    )
    assert (found.max_attempts, found.lease) == (4, timedelta(minutes=5))
    assert (found.time_limit, found.source) == (timedelta(hours=1), "shop")
    assert (found.backoff, found.headers) == ({"kind": "fixed"}, {"tenant": "7"})
    assert (found.catch_up, found.catch_up_window) == ("all", timedelta(days=1))
    assert (found.catch_up_max, found.overlap, found.jitter) == (
        7,
        "queue",
        timedelta(seconds=10),
    )
    assert (found.schedule, found.time_zone) == ("0 * * * *", "Europe/Warsaw")
    assert (found.starts_at, found.ends_at) == (None, at("2027-01-01"))
    assert found.anchored_at == found.created_at == found.updated_at == at("2026-03-02 12:00")
    assert (found.is_enabled, found.last_run_at, found.last_job_id) == (True, None, None)


def test_schedule_job_writes_nothing_when_all_is_as_it_says(noon, clock):
    every_day = {"payload": {"a": 1}, "lease": "1 day", "jitter": "1 minute"}
    schedule(noon, **every_day)
    before = place(noon)
    clock.advance("1 day")

    answer = schedule(noon, **{**every_day, "lease": "24 hours", "jitter": "60 s"})

    assert answer == ("unchanged", at("2026-03-02 13:00"))
    assert place(noon) == before
    with noon.transaction():
        schedule(noon, **every_day)
        assert scalar(noon, "select pg_current_xact_id_if_assigned()::text") is None


CHANGES = {
    "text": "30 * * * *",
    "job_type": "y",
    "payload": {"b": 2},
    "queue": "r",
    "time_zone": "Asia/Kolkata",
    "priority": 1,
    "max_attempts": 2,
    "lease": "1 s",
    "time_limit": "1 s",
    "headers": {"tenant": "8"},
    "backoff": {"kind": "linear"},
    "catch_up": "skip",
    "catch_up_window": "1 hour",
    "catch_up_max": 5,
    "overlap": "skip",
    "jitter": "1 s",
    "starts_at": "2026-03-03 00:00+00",
    "ends_at": "2026-03-04 00:00+00",
}


@pytest.mark.parametrize("argument", CHANGES)
def test_schedule_job_sees_a_change_of_each_argument(noon, argument):
    schedule(noon)

    assert schedule(noon, **{argument: CHANGES[argument]}).outcome == "changed"
    assert schedule(noon, **{argument: CHANGES[argument]}).outcome == "unchanged"
    assert schedule(noon).outcome == "changed"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"text": "30 * * * *"}, "12:30"),
        ({"time_zone": "Asia/Kolkata"}, "12:30"),
        ({"starts_at": "2026-03-02 15:30+00"}, "16:00"),
        ({"starts_at": "2026-03-02 16:00+00"}, "16:00"),
        ({"starts_at": "2020-01-01 00:00+00"}, "13:00"),
        ({"ends_at": "2026-03-02 13:00+00"}, "13:00"),
        ({"ends_at": "2026-03-02 12:59+00"}, None),
    ],
)
def test_schedule_job_plans_anew_when_its_times_change(noon, change, expected):
    schedule(noon)

    answer = schedule(noon, **change)

    assert answer.next_run_at == (expected and at(f"2026-03-02 {expected}"))


def test_schedule_job_keeps_the_next_time_when_the_payload_changes(noon, clock):
    schedule(noon, text="every 7 minutes")
    clock.advance("10 minutes")
    one(noon, "tick")
    clock.advance("2 minutes")

    answer = schedule(noon, text="every 7 minutes", payload={"b": 2})

    assert answer == ("changed", at("2026-03-02 12:14"))
    assert definition(noon).anchored_at == at("2026-03-02 12:00")


def test_schedule_job_enqueues_what_was_due_before_a_change_as_it_was(noon, clock):
    schedule(noon, payload={"v": 1})
    clock.advance("1 hour 10 minutes")

    answer = schedule(noon, text="0 2 * * *", payload={"v": 2})

    assert answer == ("changed", at("2026-03-03 02:00"))
    assert jobs(noon) == [at("2026-03-02 13:00")]
    assert run(noon, nth(noon, 1)).payload == {"v": 1}
    assert definition(noon).last_run_at == at("2026-03-02 13:00")


def test_schedule_job_never_plans_what_was_dealt_with(noon, clock):
    schedule(noon)
    clock.advance("1 hour")
    one(noon, "tick")
    clock.set(NOON)

    answer = schedule(noon, text="0,30 * * * *")

    assert answer.next_run_at == at("2026-03-02 13:30")


def test_schedule_job_counts_every_from_its_first_call_or_starts_at(noon, clock):
    first = schedule(noon, "a", "every 7 minutes")
    clock.advance("1 minute")
    second = schedule(noon, "b", "every 7 minutes", starts_at="2026-03-02 11:59+00")
    third = schedule(noon, "c", "every 7 minutes", starts_at="2026-03-02 12:30+00")
    again = schedule(noon, "a", "every 8 minutes")
    moved = schedule(noon, "c", "every 7 minutes")

    assert first.next_run_at == at("2026-03-02 12:07")
    assert second.next_run_at == at("2026-03-02 12:06")
    assert third.next_run_at == at("2026-03-02 12:30")
    assert again.next_run_at == at("2026-03-02 12:09")
    assert moved.next_run_at == at("2026-03-02 12:08")  # from now on


def test_schedule_job_after_runs_at_once_or_at_its_start(noon):
    assert schedule(noon, "a", "after 5 minutes").next_run_at == at("2026-03-02 12:00")
    later = schedule(noon, "b", "after 5 minutes", starts_at="2026-03-02 13:00+00")
    assert later.next_run_at == at("2026-03-02 13:00")
    earlier = schedule(noon, "c", "after 5 minutes", starts_at="2026-03-02 11:00+00")
    assert earlier.next_run_at == at("2026-03-02 12:00")

    assert one(noon, "tick").jobs_enqueued == 2


def test_schedule_job_plans_after_anew_from_the_end_of_the_last_job(noon, clock):
    schedule(noon, text="after 5 minutes")
    one(noon, "tick")
    assert schedule(noon, text="after 8 minutes") == ("changed", None)
    clock.advance("1 minute")
    finish(noon)
    one(noon, "tick")
    assert definition(noon).next_run_at == at("2026-03-02 12:09")

    clock.advance("1 minute")

    assert schedule(noon, text="after 10 minutes").next_run_at == at("2026-03-02 12:11")
    assert schedule(noon, text="after 30 seconds").next_run_at == at("2026-03-02 12:02")


def test_schedule_job_may_turn_one_kind_into_another(noon, clock):
    schedule(noon)
    clock.advance("1 hour")
    one(noon, "tick")

    assert schedule(noon, text="after 5 minutes").next_run_at is None
    assert schedule(noon, text="every 5 minutes").next_run_at == at("2026-03-02 13:05")
    assert schedule(noon, text="after 5 minutes").next_run_at is None
    finish(noon)
    one(noon, "tick")
    assert definition(noon).next_run_at == at("2026-03-02 13:05")


def test_schedule_job_leaves_a_disabled_one_disabled(noon, clock):
    schedule(noon)
    call(noon, "disable_schedule", name="s")
    clock.advance("2 hours")

    answer = schedule(noon, text="30 * * * *")

    assert answer == ("changed", None)
    assert definition(noon).disabled_by == noon.info.user
    assert one(noon, "tick").jobs_enqueued == 0


def test_schedule_job_enables_what_an_error_has_disabled(noon, clock):
    schedule(noon)
    noon.execute("update rota.job_definitions set schedule = 'no schedule'")
    clock.advance("1 hour")
    one(noon, "tick")
    assert not definition(noon).is_enabled

    answer = schedule(noon, text="30 * * * *")

    assert answer == ("changed", at("2026-03-02 13:30"))
    found = definition(noon)
    assert (found.is_enabled, found.disabled_at, found.last_error) == (True, None, None)


def test_schedule_job_mends_what_cannot_be_enqueued_before_its_change(noon, clock):
    schedule(noon)
    noon.execute("update rota.job_definitions set schedule = 'no schedule'")
    clock.advance("1 hour")

    answer = schedule(noon)

    assert answer == ("changed", at("2026-03-02 14:00"))
    assert definition(noon).is_enabled


def test_schedule_job_mends_what_a_trigger_has_refused(noon, clock):
    schedule(noon, job_type="poison")
    noon.execute("""
        create function refuse() returns trigger language plpgsql as $$
        begin raise exception 'no poison'; end $$;
        create trigger refuse before insert on rota.jobs
            for each row when (new.job_type = 'poison') execute function refuse()""")
    clock.advance("1 hour")
    assert one(noon, "tick").jobs_enqueued == 0

    assert schedule(noon, job_type="cure").outcome == "changed"

    assert one(noon, "tick").jobs_enqueued == 1
    assert rows(noon, "select job_type, scheduled_for from rota.jobs") == [
        ("cure", at("2026-03-02 13:00"))
    ]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("name", {"name": None}),
        ("name", {"name": ""}),
        ("name", {"name": "no spaces"}),
        ("name", {"name": "x" * 64}),
        ("job_type", {"job_type": None}),
        ("job_type", {"job_type": "no spaces"}),
        ("payload", {"payload": None}),
        ("queue", {"queue": ""}),
        ("queue", {"queue": "forward:2"}),
        ("time_zone", {"time_zone": None}),
        ("time_zone", {"time_zone": "Mars/Olympus"}),
        ("time_zone", {"time_zone": "CET+3"}),
        ("priority", {"priority": 40000}),
        ("max_attempts", {"max_attempts": 0}),
        ("lease", {"lease": "0"}),
        ("time_limit", {"time_limit": "0"}),
        ("headers", {"headers": {"tenant": 7}}),
        ("source", {"source": "no spaces"}),
        ("backoff", {"backoff": {"kind": "none"}}),
        ("catch_up", {"catch_up": None}),
        ("catch_up", {"catch_up": "some"}),
        ("catch_up_window", {"catch_up_window": "0.9 s"}),
        ("catch_up_window", {"catch_up_window": "101 years"}),
        ("catch_up_max", {"catch_up_max": None}),
        ("catch_up_max", {"catch_up_max": 0}),
        ("catch_up_max", {"catch_up_max": 1001}),
        ("overlap", {"overlap": None}),
        ("overlap", {"overlap": "never"}),
        ("jitter", {"jitter": None}),
        ("jitter", {"jitter": "-1 s"}),
        ("jitter", {"jitter": "25 hours"}),
        ("starts_at", {"starts_at": "infinity"}),
        ("ends_at", {"ends_at": "1969-01-01 00:00+00"}),
        ("ends_at", {"starts_at": "2026-01-01 00:00+00", "ends_at": "2026-01-01 00:00+00"}),
        ("schedule", {"text": None}),
    ],
)
def test_schedule_job_refuses_a_bad_argument(db, name, bad):
    with refused(name):
        schedule(db, **bad)

    assert rows(db, "select * from rota.job_definitions") == []


def test_schedule_job_refuses_a_bad_schedule(db):
    for text in ("", "soon", "61 * * * *", "0 0 30 2 *", "every 0 seconds", "after"):
        with raises("RT006", "schedule"):
            schedule(db, text=text)


def test_schedule_job_refuses_a_time_that_the_clocks_always_skip(db):
    text = "*/20 2 25-31 3 */7"  # the last Sunday of March

    with raises("RT006", "schedule"):
        schedule(db, text=text, time_zone="Europe/Warsaw")
    assert schedule(db, text=text, time_zone="UTC").outcome == "created"


def test_schedule_job_takes_the_bounds_of_its_arguments(noon):
    schedule(noon, "x" * 63, catch_up_max=1, catch_up_window="1 s", jitter="0")
    schedule(noon, "y", catch_up_max=1000, catch_up_window="100 years", jitter="1 day")


def test_schedule_job_is_part_of_its_transaction(noon, connect):
    mine = connect(autocommit=False)
    schedule(mine)
    mine.rollback()

    assert rows(noon, "select * from rota.job_definitions") == []


def test_unschedule_job_forgets_the_definition_and_leaves_its_jobs(noon, clock):
    schedule(noon)
    clock.advance("1 hour")
    one(noon, "tick")

    call(noon, "unschedule_job", name="s")

    clock.advance("1 hour")
    assert one(noon, "tick").jobs_enqueued == 0
    assert jobs(noon) == [at("2026-03-02 13:00")]
    finish(noon)


def test_a_planned_time_has_no_second_job_under_a_new_definition_of_the_name(noon, clock):
    schedule(noon)
    clock.advance("1 hour")
    one(noon, "tick")
    call(noon, "unschedule_job", name="s")
    clock.set(NOON)
    schedule(noon)

    clock.advance("1 hour 30 minutes")
    assert one(noon, "tick").jobs_enqueued == 0
    clock.advance("1 hour")
    assert one(noon, "tick").jobs_enqueued == 1

    assert jobs(noon) == [at("2026-03-02 13:00"), at("2026-03-02 14:00")]


def test_disable_schedule_says_who_and_makes_no_more_jobs(noon, clock):
    schedule(noon)

    call(noon, "disable_schedule", name="s")

    found = definition(noon)
    assert (found.is_enabled, found.next_run_at) == (False, None)
    assert (found.disabled_at, found.disabled_by) == (at("2026-03-02 12:00"), noon.info.user)
    before = place(noon)
    clock.advance("3 hours")
    call(noon, "disable_schedule", name="s")
    assert place(noon) == before
    assert one(noon, "tick").jobs_enqueued == 0


def test_enable_schedule_goes_on_from_now(noon, clock):
    schedule(noon, catch_up="all")
    call(noon, "disable_schedule", name="s")
    clock.advance("3 hours 10 minutes")

    assert value(noon, "enable_schedule", name="s") == at("2026-03-02 16:00")

    assert one(noon, "tick").jobs_enqueued == 0
    found = definition(noon)
    assert (found.is_enabled, found.disabled_at, found.disabled_by) == (True, None, None)


def test_enable_schedule_leaves_an_enabled_one_and_what_is_due(noon, clock):
    schedule(noon)
    before = place(noon)
    clock.advance("3 hours")

    assert value(noon, "enable_schedule", name="s") == at("2026-03-02 13:00")

    assert place(noon) == before


def test_enable_schedule_never_plans_what_was_dealt_with(noon, clock):
    schedule(noon)
    clock.advance("1 hour")
    one(noon, "tick")
    call(noon, "disable_schedule", name="s")
    clock.set(NOON)

    assert value(noon, "enable_schedule", name="s") == at("2026-03-02 14:00")


def test_enable_schedule_of_after_waits_for_a_live_job(noon, clock):
    schedule(noon, text="after 5 minutes")
    one(noon, "tick")
    call(noon, "disable_schedule", name="s")

    assert value(noon, "enable_schedule", name="s") is None

    clock.advance("1 minute")
    finish(noon)
    one(noon, "tick")
    assert definition(noon).next_run_at == at("2026-03-02 12:06")


def test_enable_schedule_of_after_goes_on_from_the_end_of_its_last_job(noon, clock):
    schedule(noon, text="after 5 minutes")
    one(noon, "tick")
    call(noon, "disable_schedule", name="s")
    finish(noon)
    one(noon, "tick")
    assert definition(noon).next_run_at is None
    clock.advance("2 minutes")

    assert value(noon, "enable_schedule", name="s") == at("2026-03-02 12:05")
    call(noon, "disable_schedule", name="s")
    clock.advance("10 minutes")
    assert value(noon, "enable_schedule", name="s") == at("2026-03-02 12:12")


def test_run_schedule_now_makes_a_job_beside_the_planned_ones(noon, clock):
    schedule(noon, payload={"a": 1}, jitter="1 day", priority=2)
    clock.advance("10 minutes")

    job_id = value(noon, "run_schedule_now", name="s")

    job = run(noon, job_id)
    assert (job.definition, job.payload, job.priority) == ("s", {"a": 1}, 2)
    assert job.scheduled_for == job.run_at == job.created_at == at("2026-03-02 12:10")
    found = definition(noon)
    assert (found.next_run_at, found.last_run_at) == (at("2026-03-02 13:00"), None)
    assert found.last_job_id == job_id
    made = "select definition, scheduled_for, outcome, job_id from rota.occurrences"
    assert rows(noon, made) == [("s", at("2026-03-02 12:10"), "enqueued", job_id)]


def test_run_schedule_now_never_takes_a_planned_time(noon, clock):
    schedule(noon)
    clock.advance("1 hour")

    value(noon, "run_schedule_now", name="s")
    value(noon, "run_schedule_now", name="s")
    one(noon, "tick")

    micro = timedelta(microseconds=1)
    planned = at("2026-03-02 13:00")
    assert jobs(noon) == [planned + micro, planned + 2 * micro, planned]


def test_run_schedule_now_works_on_a_disabled_one(noon):
    schedule(noon)
    call(noon, "disable_schedule", name="s")

    value(noon, "run_schedule_now", name="s")

    assert len(claim(noon)) == 1
    assert definition(noon).next_run_at is None


@pytest.mark.parametrize("how", [{"overlap": "skip"}, {"text": "after 5 minutes"}])
def test_run_schedule_now_refuses_a_second_live_job_where_there_may_be_one(noon, how):
    schedule(noon, **how)
    value(noon, "run_schedule_now", name="s")

    with raises("RT014", "schedule"):
        value(noon, "run_schedule_now", name="s")

    finish(noon)
    value(noon, "run_schedule_now", name="s")


def test_run_schedule_now_queues_where_that_is_the_rule(noon):
    schedule(noon, overlap="queue")
    first, second = (value(noon, "run_schedule_now", name="s") for _ in "ab")

    assert [job.job_id for job in claim(noon, max_jobs=10)] == [first]
    assert run(noon, second).status == "blocked"


def test_run_schedule_now_puts_after_off_until_its_end(noon, clock):
    schedule(noon, text="after 5 minutes", starts_at="2026-03-02 12:10+00")

    value(noon, "run_schedule_now", name="s")

    assert definition(noon).next_run_at is None
    clock.advance("12 minutes")
    assert one(noon, "tick").jobs_enqueued == 0
    finish(noon)
    one(noon, "tick")
    assert definition(noon).next_run_at == at("2026-03-02 12:17")


@pytest.mark.parametrize(
    ("name", "sqlstate", "begin"),
    [(name, "RT005", "schedule") for name in ("s", "", "%", "x" * 1000)]
    + [(None, "22023", "name")],
)
@pytest.mark.parametrize(
    "function",
    ["unschedule_job", "enable_schedule", "disable_schedule", "run_schedule_now"],
)
def test_what_is_done_to_no_schedule_is_refused(db, function, name, sqlstate, begin):
    with raises(sqlstate, begin):
        call(db, function, name=name)


def test_claim_jobs_tells_the_definition_and_its_time(noon, clock):
    schedule(noon)
    enqueue(noon)
    clock.advance("1 hour")
    one(noon, "tick")

    told = [(job.definition, job.scheduled_for) for job in claim(noon, max_jobs=5)]

    assert told == [(None, None), ("s", at("2026-03-02 13:00"))]


def test_job_definitions_refuse_a_row_that_breaks_a_rule(noon):
    schedule(noon)
    for broken in (
        "catch_up = 'none'",
        "overlap = 'none'",
        "is_enabled = false",
        "disabled_at = now()",
        "last_run_at = next_run_at",
        "next_run_at = 'infinity'",
    ):
        with pytest.raises(psycopg.errors.CheckViolation):
            noon.execute(f"update rota.job_definitions set {broken}")


def test_schedule_job_takes_no_schedule_of_another_source(noon):
    schedule(noon, source="shop")
    before = definition(noon)

    with refused("source"):
        schedule(noon, text="30 * * * *", source="crm")
    assert definition(noon) == before
    schedule(noon, text="30 * * * *")
    assert (definition(noon).schedule, definition(noon).source) == ("30 * * * *", "shop")


def test_schedule_job_refuses_a_schedule_that_a_trigger_swallows(db):
    """Else it would look for who has the name without end."""
    swallow(db, "job_definitions")

    with raises("09000"):
        schedule(db)
