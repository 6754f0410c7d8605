"""Schedules that are due make their jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import psycopg
import pytest

from sql.helpers import call, claim, nth, one, owner, rows, run, scalar, value
from sql.schedules.test_definitions import at, definition, finish, jobs, schedule
from support.clock import now_is

pytestmark = pytest.mark.slow

NOON = "2026-03-02 12:00:00+00"
POISON = """
    create function public.poison() returns trigger language plpgsql as $$
    begin
        if new.job_type = 'poison' then
            raise exception using errcode = '{}', message = 'no poison';
        end if;
        return new;
    end;
    $$;
    create trigger poison before insert on rota.jobs
        for each row execute function public.poison();
    alter table rota.jobs enable always trigger poison;
"""


def occurrences(db, name="s"):
    """Return what became of the planned times of a definition, in their order."""
    return [
        f"{row.scheduled_for.astimezone(UTC):%H:%M:%S} {row.outcome}"
        for row in rows(
            db,
            "select scheduled_for, outcome from rota.occurrences"
            " where definition = %s order by 1",
            name,
        )
    ]


def tick(db):
    """Return how many jobs a tick made."""
    return one(db, "tick").jobs_enqueued


@pytest.fixture
def noon(db, clock):
    """The database at noon."""
    clock.set(NOON)
    return db


def test_tick_makes_the_job_of_a_planned_time_once(noon, clock):
    schedule(noon, payload={"a": 1}, queue="q", priority=3, lease="5 minutes", time_limit="1 h",
             max_attempts=4, backoff={"kind": "fixed"}, headers={"tenant": "7"})  # fmt: skip
    assert tick(noon) == 0
    clock.set("2026-03-02 13:00:00+00")

    assert [tick(noon), tick(noon)] == [1, 0]

    (job,) = claim(noon, queues=["q"], max_jobs=10)
    assert (job.job_type, job.payload, job.priority) == ("x", {"a": 1}, 3)
    assert (job.max_attempts, job.locked_for) == (4, timedelta(minutes=5))
    assert (job.time_limit, job.headers) == (timedelta(hours=1), {"tenant": "7"})
    assert (job.definition, job.scheduled_for) == ("s", at("2026-03-02 13:00"))
    assert job.run_at == job.created_at == at("2026-03-02 13:00")
    found = definition(noon)
    assert (found.last_run_at, found.last_job_id) == (job.scheduled_for, job.job_id)
    assert found.next_run_at == at("2026-03-02 14:00")
    assert occurrences(noon) == ["13:00:00 enqueued"]


def test_tick_makes_no_job_before_its_time(noon, clock):
    schedule(noon)
    clock.set("2026-03-02 12:59:59.999999+00")

    assert tick(noon) == 0


def test_tick_gives_jobs_what_their_queue_and_the_limits_say(noon, clock):
    schedule(noon, queue="q")
    call(noon, "set_queue", queue="q", max_attempts=3)
    call(noon, "set_limit", job_type="x", max_running=1)
    clock.advance("3 hours")
    schedule(noon, "t", "every 1 hour", queue="q", catch_up="all")
    tick(noon)
    clock.advance("3 hours")

    assert tick(noon) == 4

    (job,) = claim(noon, queues=["q"], max_jobs=10)
    assert job.max_attempts == 3


def test_tick_is_late_and_one_makes_the_newest(noon, clock):
    schedule(noon)
    clock.advance("4 hours 30 minutes")

    assert tick(noon) == 1

    assert occurrences(noon) == ["13:00:00 missed", "16:00:00 enqueued"]
    assert jobs(noon) == [at("2026-03-02 16:00")]
    assert run(noon, nth(noon, 1)).run_at == at("2026-03-02 16:00")
    found = definition(noon)
    assert found.last_run_at == at("2026-03-02 16:00")
    assert found.next_run_at == at("2026-03-02 17:00")


@pytest.mark.parametrize(
    ("late", "expected"),
    [("10 minutes", ["13:00:00 enqueued"]), ("10 minutes 1 s", ["13:00:00 missed"])],
)
def test_tick_is_too_late_for_the_window_of_one(noon, clock, late, expected):
    schedule(noon, catch_up_window="10 minutes")
    clock.set("2026-03-02 13:00:00+00")
    clock.advance(late)

    tick(noon)

    assert occurrences(noon) == expected
    assert definition(noon).next_run_at == at("2026-03-02 14:00")


@pytest.mark.parametrize(
    ("text", "late", "expected"),
    [
        ("0 * * * *", "1 hour 1 minute", ["13:00:00 enqueued"]),
        ("0 * * * *", "1 hour 61 seconds", ["13:00:00 missed"]),
        ("0 * * * *", "3 hours 5 s", ["13:00:00 missed", "15:00:00 enqueued"]),
        ("0 * * * *", "3 hours 5 minutes", ["13:00:00 missed"]),
        ("* * * * * *", "3 s", ["12:00:01 missed", "12:00:03 enqueued"]),
        ("* * * * * *", "3 days", ["12:00:01 missed", "12:00:00 enqueued"]),
    ],
)
def test_tick_is_late_and_skip_makes_only_what_is_fresh(noon, clock, text, late, expected):
    schedule(noon, text=text, catch_up="skip")
    clock.advance(late)

    tick(noon)

    assert sorted(occurrences(noon)) == sorted(expected)


def test_tick_is_late_and_all_makes_every_one(noon, clock):
    schedule(noon, catch_up="all")
    clock.advance("5 hours")

    assert tick(noon) == 5

    assert occurrences(noon) == [f"{hour}:00:00 enqueued" for hour in range(13, 18)]
    assert jobs(noon) == [at(f"2026-03-02 {hour}:00") for hour in range(13, 18)]
    assert definition(noon).next_run_at == at("2026-03-02 18:00")


def test_tick_is_late_and_all_makes_the_newest_of_its_count_and_window(noon, clock):
    schedule(noon, "count", catch_up="all", catch_up_max=2)
    schedule(noon, "window", catch_up="all", catch_up_window="90 minutes")
    schedule(noon, "both", catch_up="all", catch_up_max=3, catch_up_window="1 hour")
    schedule(noon, "none", "30 * * * *", catch_up="all", catch_up_window="1 minute")
    clock.advance("5 hours")

    assert tick(noon) == 6

    assert occurrences(noon, "count") == [
        "13:00:00 missed",
        "16:00:00 enqueued",
        "17:00:00 enqueued",
    ]
    assert occurrences(noon, "window") == [
        "13:00:00 missed",
        "16:00:00 enqueued",
        "17:00:00 enqueued",
    ]
    assert occurrences(noon, "both") == [
        "13:00:00 missed",
        "16:00:00 enqueued",
        "17:00:00 enqueued",
    ]
    assert occurrences(noon, "none") == ["12:30:00 missed"]
    assert definition(noon, "none").last_run_at == at("2026-03-02 12:30")


def test_tick_enqueues_nothing_beyond_the_end(noon, clock):
    for catch_up in ("skip", "one", "all"):
        schedule(noon, catch_up, catch_up=catch_up, ends_at="2026-03-02 14:30+00",
                 catch_up_window="1 day")  # fmt: skip
    clock.advance("1 day")

    tick(noon)

    assert (
        occurrences(noon, "skip")
        == occurrences(noon, "one")
        == ["13:00:00 missed", "14:00:00 enqueued"]
    )
    assert occurrences(noon, "all") == ["13:00:00 enqueued", "14:00:00 enqueued"]
    assert definition(noon, "all").next_run_at is None
    assert definition(noon, "all").is_enabled
    clock.advance("1 day")
    assert tick(noon) == 0


def test_tick_enqueues_at_the_very_end(noon, clock):
    schedule(noon, ends_at="2026-03-02 13:00+00")
    clock.advance("2 hours")

    assert tick(noon) == 1

    assert jobs(noon) == [at("2026-03-02 13:00")]


def test_tick_goes_by_the_clock_of_the_zone(db, clock):
    clock.set("2026-03-27 12:00:00+00")
    schedule(db, text="30 2 * * *", time_zone="Europe/Warsaw", catch_up="all")
    clock.advance("5 days")

    tick(db)

    assert jobs(db) == [
        at("2026-03-28 01:30"),
        at("2026-03-29 01:00"),  # 02:30 does not exist on that day
        at("2026-03-30 00:30"),
        at("2026-03-31 00:30"),
        at("2026-04-01 00:30"),
    ]


def test_tick_enqueues_nothing_twice_when_the_clock_goes_back(noon, clock):
    schedule(noon, text="every 1 second", catch_up="all")
    clock.advance("10 s")
    assert tick(noon) == 10

    for back in ("1 s", "5 s", "1 day"):
        clock.set("2026-03-02 12:00:10+00")
        clock.advance(f"-{back}")
        assert tick(noon) == 0
    clock.set("2026-03-02 12:00:11+00")

    assert tick(noon) == 1
    assert len(set(jobs(noon))) == len(jobs(noon)) == 11


def test_tick_makes_no_job_for_a_time_that_has_one(noon, clock):
    """Whatever writes the definition: the row in occurrences decides."""
    schedule(noon, catch_up="all")
    clock.advance("2 hours")
    tick(noon)
    noon.execute(
        "update rota.job_definitions"
        " set last_run_at = null, next_run_at = '2026-03-02 13:00+00'"
    )
    clock.advance("1 hour")

    assert tick(noon) == 1

    assert jobs(noon) == [at(f"2026-03-02 {hour}:00") for hour in (13, 14, 15)]


def test_tick_skips_where_the_last_job_is_live(noon, clock):
    schedule(noon, overlap="skip")
    clock.advance("1 hour")
    assert tick(noon) == 1
    first = definition(noon).last_job_id

    for expected in ("queued", "running", "failed"):
        assert run(noon, first).status == expected
        clock.advance("1 hour")
        assert tick(noon) == 0
        if expected == "queued":
            (job,) = claim(noon, lease="1 day")
        elif expected == "running":
            call(noon, "fail_job", **owner(job), error="no", retry_in="1 day")
    call(noon, "cancel_job", job_id=first)
    clock.advance("1 hour")

    assert tick(noon) == 1
    assert occurrences(noon) == [
        "13:00:00 enqueued",
        "14:00:00 skipped",
        "15:00:00 skipped",
        "16:00:00 skipped",
        "17:00:00 enqueued",
    ]


def test_tick_with_skip_makes_one_of_several_that_are_late(noon, clock):
    schedule(noon, overlap="skip", catch_up="all")
    clock.advance("3 hours")

    assert tick(noon) == 1

    assert occurrences(noon) == ["13:00:00 enqueued", "14:00:00 skipped", "15:00:00 skipped"]


def test_tick_with_queue_lets_jobs_run_one_after_the_other(noon, clock):
    schedule(noon, overlap="queue", catch_up="all", max_attempts=1)
    clock.advance("3 hours")
    assert tick(noon) == 3

    ran = []
    for _ in range(3):
        (job,) = claim(noon, max_jobs=10)
        ran.append(job.scheduled_for)
        assert claim(noon, max_jobs=10) == []
        call(noon, "fail_job", **owner(job), error="the next one runs all the same")

    assert ran == [at("2026-03-02 13:00"), at("2026-03-02 14:00"), at("2026-03-02 15:00")]


def test_tick_with_allow_makes_jobs_beside_live_ones(noon, clock):
    schedule(noon)
    for _ in range(3):
        clock.advance("1 hour")
        assert tick(noon) == 1

    assert len(claim(noon, max_jobs=10)) == 3


def test_jitter_puts_the_start_off_and_not_the_planned_time(noon, clock):
    schedule(noon, text="* * * * * *", catch_up="all", catch_up_max=1000, jitter="10 minutes")
    clock.advance("1000 s")
    tick(noon)

    found = rows(noon, "select run_at - scheduled_for as late from rota.jobs")

    late = [row.late for row in found]
    assert len(late) == 1000
    assert timedelta(0) <= min(late) < timedelta(minutes=1)
    assert timedelta(minutes=9) < max(late) <= timedelta(minutes=10)


def test_after_is_planned_when_the_last_job_has_ended(noon, clock):
    schedule(noon, text="after 10 minutes")
    assert tick(noon) == 1
    assert definition(noon).next_run_at is None
    clock.advance("7 minutes")
    finish(noon)
    clock.advance("1 minute")
    assert tick(noon) == 0
    assert definition(noon).next_run_at == at("2026-03-02 12:17")

    clock.set("2026-03-02 12:17+00")
    assert tick(noon) == 1

    assert jobs(noon) == [at("2026-03-02 12:00"), at("2026-03-02 12:17")]


@pytest.mark.parametrize("end", ["dead", "cancelled", "swept"])
def test_after_is_planned_however_the_last_job_ends(noon, clock, end):
    schedule(noon, text="after 10 minutes", max_attempts=1)
    tick(noon)
    if end == "cancelled":
        call(noon, "cancel_job", job_id=nth(noon, 1))
    else:
        (job,) = claim(noon, lease="1 minute")
        clock.advance("2 minutes")
        if end == "dead":
            call(noon, "fail_job", **owner(job), error="no")
    tick(noon)
    ended = run(noon, nth(noon, 1)).finished_at
    tick(noon)

    assert definition(noon).next_run_at == ended + timedelta(minutes=10)


def test_after_is_late_and_enqueues_all_the_same(noon, clock):
    schedule(noon, text="after 10 minutes", catch_up="skip")
    tick(noon)
    finish(noon)
    clock.advance("2 hours")

    tick(noon)
    tick(noon)

    assert jobs(noon) == [at("2026-03-02 12:00"), at("2026-03-02 12:10")]
    assert definition(noon).next_run_at is None


def test_after_waits_for_a_job_that_was_retried(noon, clock):
    schedule(noon, text="after 10 minutes")
    tick(noon)
    finish(noon)
    tick(noon)
    value(noon, "retry_job", job_id=nth(noon, 1))
    clock.advance("10 minutes")

    assert tick(noon) == 0

    assert occurrences(noon) == ["12:00:00 enqueued", "12:10:00 skipped"]
    assert definition(noon).next_run_at is None
    clock.advance("5 minutes")
    finish(noon)
    tick(noon)
    assert definition(noon).next_run_at == at("2026-03-02 12:25")


def test_after_goes_on_when_its_time_has_a_job_already(noon, clock):
    schedule(noon, text="after 10 minutes")
    noon.execute(
        "insert into rota.occurrences"
        " values ('s', '2026-03-02 12:00+00', 'missed', null, now())"
    )

    assert tick(noon) == 0

    assert definition(noon).next_run_at == at("2026-03-02 12:10")


def test_after_ends_at_its_end(noon, clock):
    schedule(noon, text="after 10 minutes", ends_at="2026-03-02 12:15+00")
    tick(noon)
    clock.advance("6 minutes")
    finish(noon)
    tick(noon)

    assert definition(noon).next_run_at is None
    assert scalar(noon, "select count(*) from rota.pending_checks") == 0


def test_after_that_never_begins_is_left_alone(noon):
    schedule(noon, text="after 5 minutes", ends_at="2026-01-01 00:00+00")
    schedule(noon, text="after 6 minutes", ends_at="2026-01-01 00:00+00")

    tick(noon)

    assert definition(noon).next_run_at is None
    assert scalar(noon, "select count(*) from rota.pending_checks") == 0


def test_after_never_goes_back_with_the_clock(noon, clock):
    schedule(noon, text="after 10 minutes")
    tick(noon)
    clock.advance("-1 day")
    claim_later = claim(noon)
    assert claim_later == []
    call(noon, "cancel_job", job_id=nth(noon, 1))
    tick(noon)

    assert definition(noon).next_run_at == at("2026-03-02 12:00") + timedelta(microseconds=1)


@pytest.mark.parametrize("fault", ["schedule = 'nonsense'", "time_zone = 'Mars/Olympus'"])
def test_a_bad_definition_is_disabled_and_the_others_go_on(noon, clock, fault):
    for name in ("a", "bad", "c"):
        schedule(noon, name)
    noon.execute(f"update rota.job_definitions set {fault} where name = 'bad'")
    clock.advance("1 hour")

    assert tick(noon) == 2

    found = definition(noon, "bad")
    assert (found.is_enabled, found.disabled_by, found.next_run_at) == (False, None, None)
    assert found.disabled_at == at("2026-03-02 13:00")
    assert "nonsense" in found.last_error or "Mars" in found.last_error
    assert definition(noon, "a").next_run_at == at("2026-03-02 14:00")
    clock.advance("1 hour")
    assert tick(noon) == 2


def test_a_definition_whose_jobs_are_refused_is_disabled(noon, clock):
    schedule(noon, job_type="poison")
    schedule(noon, "good")
    noon.execute(POISON.format("23514"))
    clock.advance("1 hour")

    assert tick(noon) == 1

    assert definition(noon).last_error == "no poison"
    assert occurrences(noon) == []


@pytest.mark.parametrize("code", ["55P03", "40001", "40P01", "53200", "57014", "XX000"])
def test_a_definition_is_tried_again_when_its_data_are_not_at_fault(noon, clock, code):
    schedule(noon, job_type="poison", catch_up="all")
    schedule(noon, "good")
    noon.execute(POISON.format(code))
    clock.advance("1 hour")

    if code == "57014":
        with pytest.raises(psycopg.errors.QueryCanceled):
            tick(noon)
    else:
        assert tick(noon) == 1

    assert definition(noon).is_enabled
    noon.execute("drop trigger poison on rota.jobs")
    clock.advance("1 hour")
    assert tick(noon) == 3
    assert jobs(noon) == [at("2026-03-02 13:00"), at("2026-03-02 14:00")]


def test_a_definition_that_cannot_even_be_disabled_stops_nobody(noon, clock):
    for name in ("a", "bad", "c"):
        schedule(noon, name)
    noon.execute("update rota.job_definitions set schedule = 'nonsense' where name = 'bad'")
    noon.execute(
        "alter table rota.job_definitions add constraint no_way check (last_error is null)"
    )
    clock.advance("1 hour")

    assert tick(noon) == 2

    assert definition(noon, "bad").is_enabled


@pytest.mark.slow
def test_bad_definitions_do_not_fill_the_tick(noon, clock):
    schedule(noon)
    noon.execute(POISON.format("55P03"))
    noon.execute(
        "select rota.schedule_job('bad' || n, '0 * * * *', 'poison')"
        " from generate_series(1, 1200) as g (n)"
    )
    noon.execute("update rota.job_definitions set next_run_at = next_run_at - interval '1 s'"
                 " where name <> 's'")  # fmt: skip
    clock.advance("1 hour")

    assert tick(noon) == 1


@pytest.mark.slow
def test_tick_enqueues_a_bounded_number_the_oldest_first(noon, clock):
    noon.execute(
        "select rota.schedule_job('d' || n, 'every 1 hour', 'x',"
        " starts_at => rota.now() + n * interval '1 ms')"
        " from generate_series(1, 2500) as g (n)"
    )
    clock.advance("10 minutes")

    enqueued = [tick(noon)]
    latest = scalar(noon, "select max(scheduled_for) from rota.jobs")
    enqueued += [tick(noon) for _ in range(3)]

    assert enqueued == [1000, 1000, 500, 0]
    assert latest == at("2026-03-02 12:00") + timedelta(seconds=1)
    assert scalar(noon, "select count(distinct definition) from rota.jobs") == 2500


@pytest.mark.slow
def test_tick_enqueues_a_bounded_number_of_what_all_have_missed(noon, clock):
    noon.execute(
        "select rota.schedule_job('d' || n, '* * * * *', 'x', catch_up => 'all',"
        " catch_up_max => 300) from generate_series(1, 10) as g (n)"
    )
    clock.advance("1 day")

    enqueued = [tick(noon) for _ in range(5)]

    assert enqueued == [1200, 1200, 600, 0, 0]
    assert scalar(noon, "select count(*) from rota.occurrences where outcome = 'missed'") == 10
    assert scalar(
        noon, "select count(distinct (definition, scheduled_for)) from rota.jobs"
    ) == 3000  # fmt: skip


@pytest.mark.slow
def test_tick_goes_on_where_definitions_make_no_job(noon, clock):
    noon.execute(
        "select rota.schedule_job('d' || n, '0 * * * *', 'x', catch_up => 'skip')"
        " from generate_series(1, 1500) as g (n)"
    )
    schedule(noon, text="1 * * * *")
    clock.advance("1 hour 30 minutes")

    assert tick(noon) == 1


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_tick_enqueues_at_every_isolation_level(noon, clock, level):
    schedule(noon)
    clock.advance("1 hour")
    noon.execute(f"set default_transaction_isolation = '{level}'")

    assert tick(noon) == 1


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_tick_with_an_old_snapshot_disables_nothing(noon, connect, clock, level):
    schedule(noon)
    schedule(noon, "t")
    clock.advance("1 hour")
    old = connect(autocommit=False)
    old.execute(f"set transaction isolation level {level}")
    old.execute("select count(*) from rota.jobs")
    schedule(noon, payload={"a": 1}, overlap="skip")
    clock.advance("1 hour")

    assert tick(old) == 1
    old.commit()
    assert tick(noon) == 1

    assert definition(noon).is_enabled
    assert occurrences(noon) == ["13:00:00 enqueued", "14:00:00 skipped"]
    assert occurrences(noon, "t") == ["13:00:00 enqueued", "14:00:00 enqueued"]


@pytest.fixture
def advanced(noon, connect):
    """Definitions that have been advanced two thousand times under a held snapshot."""
    holder = connect(autocommit=False)
    holder.execute("set transaction isolation level repeatable read")
    holder.execute("select count(*) from rota.jobs")
    schedule(noon)
    schedule(noon, "late")
    for second in range(1000):
        noon.execute(
            "update rota.job_definitions set next_run_at = '2026-03-01'::timestamptz"
            f" + interval '{second} s'"
        )
    noon.execute("update rota.job_definitions set next_run_at = '2027-01-01'")
    with noon.transaction():
        tick(noon)  # it walks past all of them and remembers where they end
    return noon


def test_past_times_cost_nothing_under_a_held_snapshot(advanced):
    index = "'rota.job_definitions_next_run_at_idx'::regclass"
    walked = f"select pg_stat_get_xact_tuples_returned({index})"
    with advanced.transaction():
        before = scalar(advanced, walked)
        tick(advanced)
        assert scalar(advanced, walked) - before < 100


def test_a_time_before_the_remembered_one_is_found_soon(advanced, clock):
    advanced.execute(
        "update rota.job_definitions set next_run_at = '2026-03-01' where name = 'late'"
    )
    clock.advance("3 seconds")

    assert tick(advanced) == 1
    assert occurrences(advanced, "late") != []


def test_after_is_planned_by_an_end_with_an_old_snapshot(noon, connect, clock):
    """The end sees the time that is planned still; the tick has taken it away meanwhile."""
    schedule(noon, text="after 10 minutes")
    tick(noon)
    finish(noon)
    tick(noon)
    value(noon, "retry_job", job_id=nth(noon, 1))
    (job,) = claim(noon, lease="1 day")
    worker = connect(autocommit=False)
    worker.execute("set transaction isolation level repeatable read")
    worker.execute("select count(*) from rota.jobs")
    clock.advance("10 minutes")
    tick(noon)
    tick(noon)
    assert definition(noon).next_run_at is None

    value(worker, "finish_job", **owner(job))
    worker.commit()
    tick(noon)

    assert definition(noon).next_run_at is not None


def test_retention_forgets_planned_times_and_last_run_at_stands_for_them(noon, clock):
    schedule(noon)
    clock.advance("1 hour")
    tick(noon)
    clock.advance("89 days")
    tick(noon)
    assert "13:00:00 enqueued" in occurrences(noon)
    clock.advance("2 days")
    tick(noon)

    clock.advance("11 s")
    tick(noon)

    kept = rows(
        noon,
        "select recorded_at from rota.occurrences where scheduled_for < '2026-03-02 13:30+00'",
    )
    assert kept == []
    clock.set("2026-03-02 12:30+00")
    assert tick(noon) == 0


def test_tick_with_nothing_due_writes_nothing(noon):
    schedule(noon)
    tick(noon)

    with noon.transaction():
        tick(noon)
        assert scalar(noon, "select pg_current_xact_id_if_assigned()::text") is None


def test_jobs_of_schedules_keep_their_time_through_their_life(noon, clock):
    schedule(noon)
    clock.advance("1 hour")
    tick(noon)
    finish(noon)
    value(noon, "retry_job", job_id=nth(noon, 1))

    (job,) = claim(noon)

    assert (job.definition, job.scheduled_for) == ("s", at("2026-03-02 13:00"))
    assert run(noon, nth(noon, 1)).scheduled_for == datetime(2026, 3, 2, 13, tzinfo=UTC)


def test_tick_looks_no_further_back_than_the_window(noon, clock):
    """A day of seconds would be searched for the sake of a second of it."""
    schedule(
        noon, text="* * * * * *", catch_up="all", catch_up_max=1000, catch_up_window="1 second"
    )
    now = clock.advance("1 day")

    one(noon, "tick")

    assert jobs(noon) == [now - timedelta(seconds=1), now]
    assert occurrences(noon) == ["12:00:01 missed", "11:59:59 enqueued", "12:00:00 enqueued"]
    assert definition(noon).next_run_at == now + timedelta(seconds=1)


def test_tick_disables_a_schedule_whose_zone_is_gone(noon, clock):
    schedule(noon, "good")
    schedule(noon, "bad")
    noon.execute(
        "update rota.job_definitions set time_zone = 'Mars/Olympus' where name = 'bad'"
    )
    clock.advance("1 hour")

    one(noon, "tick")

    assert len(jobs(noon, "good")) == 1
    assert not definition(noon, "bad").is_enabled
    assert "Mars/Olympus" in definition(noon, "bad").last_error


def test_tick_skips_where_any_job_of_the_schedule_is_live(noon, clock):
    """Also one that an operator has retried, or that was made under the name before."""
    schedule(noon, overlap="skip", max_attempts=1)
    clock.advance("1 hour")
    one(noon, "tick")
    call(noon, "unschedule_job", name="s")
    schedule(noon, overlap="skip", max_attempts=1)
    clock.advance("1 hour")

    one(noon, "tick")

    assert len(jobs(noon)) == 1
    assert occurrences(noon) == ["13:00:00 enqueued", "14:00:00 skipped"]


def test_tick_disables_a_schedule_whose_zone_counts_leap_seconds(noon, clock):
    """There the next time could be the one before, for ever; not all servers have them."""
    schedule(noon, "good")
    schedule(noon, "bad")
    noon.execute("update rota.job_definitions set time_zone = 'right/UTC' where name = 'bad'")
    clock.advance("1 hour")

    one(noon, "tick")
    clock.advance("1 hour")
    one(noon, "tick")

    assert len(jobs(noon, "good")) == 2


def test_no_time_is_lost_that_passes_while_its_schedule_changes(db):
    """A clock on which a second passes each time that anybody looks at it."""
    db.execute("create sequence public.seconds; grant usage on public.seconds to public")
    db.execute(
        now_is(
            "'2026-03-02 12:00+00'::timestamptz + nextval('public.seconds') * '1 s'::interval"
        )
    )
    for text in ("* * * * * *", "*/1 * * * * *", "0-59 * * * * *"):
        schedule(db, "s", text, catch_up="all", catch_up_max=1000)
        tick(db)

    times = [
        row[0] for row in rows(db, "select scheduled_for from rota.occurrences order by 1")
    ]
    assert len(times) > 20
    assert {later - time for time, later in pairwise(times)} == {timedelta(seconds=1)}
