"""What an idempotency key does beyond being unique among live jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import call, claim, enqueue, one, owner, raises, rows, run, scalar, value

KEY = {"idempotency_key": "k"}
RERUN = {**KEY, "on_conflict": "rerun"}
REPLACE = {**KEY, "on_conflict": "replace"}


def at(second: int) -> datetime:
    """Return a version: a moment of the thing that the job is about."""
    return datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)


@pytest.fixture(params=["read committed", "repeatable read"])
def enqueue_in(request):
    """Enqueue at this level: only in read committed a known key is found by a look before."""

    def enqueue_in(db, **arguments):
        with db.transaction():
            db.execute(f"set transaction isolation level {request.param}")
            return enqueue(db, **arguments)

    return enqueue_in


def live(db):
    """Return (id, status, version in the payload) of the key's live job, if there is one."""
    found = rows(db, "select id, status, payload from rota.jobs where idempotency_key = 'k'")
    return [(row.id, row.status, row.payload.get("v")) for row in found]


def finish(db, job):
    return value(db, "finish_job", **owner(job))


@pytest.mark.parametrize("end", ["release", "snooze", "fail"])
def test_enqueue_rerun_for_later_waits_until_then_also_if_this_try_does_not_finish(
    db, clock, end
):
    start = clock.set("2031-03-01 12:00+00")
    enqueue(db, **KEY, backoff={"kind": "fixed", "base_seconds": 1})
    (job,) = claim(db)
    enqueue(db, payload={"v": 2}, **RERUN, delay="1 hour")

    if end == "release":
        call(db, "release_jobs", job_ids=[job.job_id], lease_tokens=[job.lease_token])
    elif end == "snooze":
        assert value(db, "snooze_job", **owner(job), delay="1 s") == start + timedelta(hours=1)
    else:
        told = one(db, "fail_job", **owner(job), error="no")
        assert told.run_at == start + timedelta(hours=1)

    clock.advance("59 minutes")
    assert claim(db) == []
    clock.advance("2 minutes")
    assert [job.payload for job in claim(db)] == [{"v": 2}]


def test_enqueue_rerun_starts_a_finished_key_again(db):
    first = enqueue(db, payload={"v": 1}, **RERUN, updated_at=at(1))
    finish(db, *claim(db))

    second = enqueue(db, payload={"v": 2}, **RERUN, updated_at=at(2))

    assert second != first
    assert live(db) == [(second, "queued", 2)]
    assert run(db, first).status == "succeeded"


def test_enqueue_rerun_gives_a_waiting_job_the_newer_payload(db):
    job_id = enqueue(db, payload={"v": 1}, **RERUN)

    assert enqueue(db, payload={"v": 2}, priority=-3, **RERUN) == job_id

    assert live(db) == [(job_id, "queued", 2)]
    assert run(db, job_id).priority == -3
    assert [job.payload for job in claim(db, max_jobs=9)] == [{"v": 2}]


@pytest.mark.parametrize("ending", ["finish", "dead", "sweep"])
def test_enqueue_rerun_of_a_running_job_runs_it_exactly_once_more_with_the_newest(
    db, clock, ending
):
    clock.set("2026-01-01 00:00+00")
    first = enqueue(db, payload={"v": 1}, headers={"trace": "1"}, max_attempts=1, **RERUN)
    (job,) = claim(db)
    for version in (2, 3, 4):
        newer = {"payload": {"v": version}, "headers": {"trace": str(version)}}
        assert enqueue(db, **newer, **RERUN) == first
    assert live(db) == [(first, "running", 1)]
    assert claim(db, max_jobs=9) == []

    if ending == "finish":
        finish(db, job)
    elif ending == "dead":
        one(db, "fail_job", **owner(job), error="e")
    else:
        clock.advance("2 minutes")
        value(db, "sweep_stale_leases")

    (again,) = claim(db, max_jobs=9)
    assert (again.payload, again.attempt, again.idempotency_key) == ({"v": 4}, 1, "k")
    assert again.headers == {"trace": "4"}
    assert again.job_id != first
    finish(db, again)
    assert live(db) == []
    assert claim(db, max_jobs=9) == []


@pytest.mark.parametrize("ending", ["fail", "release", "snooze", "forced"])
def test_a_job_that_comes_back_takes_the_rerun_along(db, clock, ending):
    clock.set("2026-01-01 00:00+00")
    first = enqueue(db, payload={"v": 1}, headers={"trace": "1"}, **RERUN)
    one(db, "fail_job", **owner(claim(db)[0]), error="e", retry_in="0")
    (job,) = claim(db)
    enqueue(db, payload={"v": 2}, priority=5, **RERUN)

    if ending == "fail":
        one(db, "fail_job", **owner(job), error="e")
    elif ending == "release":
        call(db, "release_jobs", job_ids=[job.job_id], lease_tokens=[job.lease_token])
    elif ending == "snooze":
        value(db, "snooze_job", **owner(job), delay="1 s")
    else:
        value(db, "retry_job", job_id=first, force=True)

    clock.advance("1 hour")
    (again,) = claim(db, max_jobs=9)
    assert (again.job_id, again.payload, again.priority) == (first, {"v": 2}, 5)
    assert (again.headers, again.attempt) == (None, 1)
    finish(db, again)
    assert live(db) == []


@pytest.mark.parametrize("state", ["queued", "running", "finished"])
@pytest.mark.parametrize("seconds", [3, 4])
def test_enqueue_rerun_ignores_a_version_that_is_not_newer(db, enqueue_in, state, seconds):
    first = enqueue(db, payload={"v": 4}, **RERUN, updated_at=at(4))
    jobs = claim(db) if state != "queued" else []
    if state == "finished":
        finish(db, *jobs)

    assert enqueue_in(db, payload={"v": seconds}, **RERUN, updated_at=at(seconds)) == first

    if jobs and state == "running":
        finish(db, *jobs)
    assert live(db) == ([(first, "queued", 4)] if state == "queued" else [])


@pytest.mark.parametrize("is_asked_later", [True, False])
def test_cancel_takes_the_rerun_with_it_but_not_one_asked_for_later(db, is_asked_later):
    enqueue(db, payload={"v": 1}, **RERUN)
    (job,) = claim(db)
    enqueue(db, payload={"v": 2}, **RERUN)
    value(db, "cancel_job", job_id=job.job_id)
    if is_asked_later:
        enqueue(db, payload={"v": 3}, **RERUN)

    one(db, "fail_job", **owner(job), error="stopped")

    left = [(status, version) for _, status, version in live(db)]
    assert left == ([("queued", 3)] if is_asked_later else [])


def test_finish_repeated_after_a_rerun_is_answered_as_done(db):
    enqueue(db, **RERUN)
    (job,) = claim(db)
    enqueue(db, payload={"v": 2}, **RERUN)

    assert [finish(db, job), finish(db, job)] == ["finished", "already_finished"]

    assert scalar(db, "select count(*) from rota.jobs") == 1


def test_enqueue_replace_changes_a_waiting_job_and_leaves_a_running_one(db, clock, enqueue_in):
    now = clock.set("2026-01-01 00:00+00")
    first = enqueue(db, payload={"v": 1}, delay="1 hour", **REPLACE)

    assert enqueue_in(db, payload={"v": 2}, priority=7, **REPLACE) == first
    (job,) = claim(db)
    assert enqueue_in(db, payload={"v": 3}, **REPLACE) == first

    assert (job.payload, job.priority, job.run_at) == ({"v": 2}, 7, now)
    finish(db, job)
    assert live(db) == []


def test_enqueue_replace_gives_a_failed_job_its_new_time(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db, **REPLACE)
    one(db, "fail_job", **owner(*claim(db)), error="e", retry_in="1 hour")

    enqueue(db, payload={"v": 2}, **REPLACE)
    at_once = run(db, job_id)
    enqueue(db, payload={"v": 3}, delay="1 minute", **REPLACE)

    assert (at_once.payload, at_once.run_at) == ({"v": 2}, now)
    assert run(db, job_id).run_at - now == timedelta(minutes=1)


def test_enqueue_rerun_keeps_the_backoff_of_a_failed_job_unless_a_time_is_given(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db, **RERUN)
    one(db, "fail_job", **owner(*claim(db)), error="e", retry_in="1 hour")

    enqueue(db, payload={"v": 2}, **RERUN)
    kept = run(db, job_id)
    enqueue(db, payload={"v": 3}, delay="1 minute", **RERUN)

    assert (kept.payload, kept.run_at - now) == ({"v": 2}, timedelta(hours=1))
    assert run(db, job_id).run_at - now == timedelta(minutes=1)


@pytest.mark.parametrize(
    "rules",
    [
        {"on_conflict": "replace"},
        {"on_conflict": "rerun", "updated_at": "2026-01-01 00:00+00"},
        {"unique_for": "1 day"},
    ],
)
@pytest.mark.parametrize("is_batch", [False, True])
def test_a_key_of_another_type_is_another_job(db, rules, is_batch):
    def put(job_type, **payload):
        job = {"job_type": job_type, "idempotency_key": "42", "payload": payload, **rules}
        if is_batch:
            (row,) = call(db, "enqueue_many", jobs=Jsonb([job]))
            return row.job_id
        return enqueue(db, **job)

    receipt = put("send_receipt", of="receipt")
    revenue = put("book_revenue", of="revenue")
    again = put("send_receipt", of="receipt, again")

    assert again == receipt != revenue
    assert run(db, revenue).payload == {"of": "revenue"}
    assert [run(db, job).job_type for job in (receipt, revenue)] == [
        "send_receipt",
        "book_revenue",
    ]


def test_enqueue_debounces_up_to_max_wait(db, clock):
    start = clock.set("2026-01-01 00:00+00")

    for _ in range(5):
        job_id = enqueue(db, delay="10 s", max_wait="25 s", **REPLACE)
        clock.advance("8 s")

    assert run(db, job_id).run_at - start == timedelta(seconds=25)
    assert scalar(db, "select count(*) from rota.job_runs") == 1


@pytest.mark.parametrize("function", ["enqueue", "enqueue_many"])
def test_enqueue_waits_no_longer_than_max_wait_after_a_first_and_only_call(db, clock, function):
    start = clock.set("2026-01-01 00:00+00")
    job = {"job_type": "t", **REPLACE, "delay": "1 hour", "max_wait": "25 s"}

    if function == "enqueue":
        call(db, "enqueue", **job)
    else:
        call(db, "enqueue_many", jobs=Jsonb([job]))

    assert scalar(db, "select run_at from rota.jobs") - start == timedelta(seconds=25)


@pytest.mark.parametrize("end", ["fail", "snooze"])
@pytest.mark.parametrize("rule", [REPLACE, RERUN])
def test_enqueue_debounces_a_job_anew_after_an_attempt(db, clock, rule, end):
    """The service is down, and calls come all the time: each retried the job at once."""
    clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db, **KEY)
    clock.advance("1 hour")
    (job,) = claim(db)
    if end == "fail":
        clock.advance("5 s")
        call(db, "fail_job", **owner(job), error="down")
    else:
        value(db, "snooze_job", **owner(job), delay="1 hour")
    ended = clock.now()

    waits = []
    for _ in range(4):
        enqueue(db, **rule, delay="10 s", max_wait="25 s")
        waits.append((run(db, job_id).run_at - ended).total_seconds())
        clock.advance("6 s")

    assert waits == [10, 16, 22, 25]


def test_enqueue_debounces_the_run_that_is_to_follow_up_to_max_wait(db, clock):
    clock.set("2026-01-01 00:00+00")
    enqueue(db, **KEY)
    (job,) = claim(db)
    clock.advance("1 hour")
    first = clock.now()
    for _ in range(5):
        enqueue(db, delay="10 s", max_wait="25 s", **RERUN)
        clock.advance("8 s")

    finish(db, job)

    assert scalar(db, "select run_at from rota.jobs") - first == timedelta(seconds=25)


@pytest.mark.parametrize("ending", ["finish", "cancel"])
def test_enqueue_unique_for_makes_no_other_job_in_that_time(db, clock, enqueue_in, ending):
    clock.set("2026-01-01 00:00+00")
    first = enqueue(db, unique_for="1 hour", **KEY)
    if ending == "finish":
        finish(db, *claim(db))
    else:
        value(db, "cancel_job", job_id=first)

    clock.advance("59 minutes")
    assert enqueue_in(db, unique_for="1 hour", **KEY) == first
    clock.advance("2 minutes")
    second = enqueue_in(db, unique_for="1 hour", **KEY)

    assert second != first
    assert live(db) == [(second, "queued", None)]


@pytest.mark.parametrize(
    "rule", [{"unique_for": "1 hour"}, {"on_conflict": "rerun", "updated_at": at(4)}]
)
@pytest.mark.parametrize("state", ["queued", "running", "finished"])
def test_a_call_that_makes_nothing_new_writes_nothing(db, rule, state):
    first = enqueue(db, **rule, **KEY)
    jobs = claim(db) if state != "queued" else []
    if state == "finished":
        finish(db, *jobs)

    with db.transaction():
        assert enqueue(db, **rule, **KEY) == first
        assert scalar(db, "select pg_current_xact_id_if_assigned()") is None


def test_a_key_that_is_unique_for_a_time_finds_the_job_that_is_there(db):
    first = enqueue(db, unique_for="1 hour", **KEY)
    value(db, "cancel_job", job_id=first)
    second = enqueue(db, **KEY)

    assert enqueue(db, unique_for="1 hour", **KEY) == second != first


def test_enqueue_unique_for_a_day_is_24_hours_in_every_zone(db, clock):
    db.execute("set TimeZone = 'Europe/Warsaw'")
    clock.set("2026-03-28 12:00+01")
    first = enqueue(db, unique_for="1 day", **KEY)
    finish(db, *claim(db))

    clock.advance("23 hours 59 minutes")
    assert enqueue(db, unique_for="1 day", **KEY) == first
    clock.advance("2 minutes")
    assert enqueue(db, unique_for="1 day", **KEY) != first


@pytest.mark.slow
def test_enqueue_unique_for_a_century_outlives_retention(db, clock):
    clock.set("2026-01-01 00:00+00")
    first = enqueue(db, unique_for="100 years", **KEY)
    finish(db, *claim(db))

    for _ in range(3):
        clock.advance("200 days")
        one(db, "tick")

    assert scalar(db, "select count(*) from rota.job_runs") == 0
    assert enqueue(db, unique_for="100 years", **KEY) == first


def test_tick_purges_keys_that_mean_nothing_any_more(db, clock):
    clock.set("2026-01-01 00:00+00")
    enqueue(db, unique_for="1 day", idempotency_key="a")
    enqueue(db, on_conflict="rerun", updated_at=at(1), idempotency_key="b")
    enqueue(db, unique_for="1 year", idempotency_key="c")

    clock.advance("91 days")
    one(db, "tick")

    left = rows(db, "select idempotency_key from rota.idempotency_keys")
    assert [row.idempotency_key for row in left] == ["c"]


@pytest.mark.parametrize("rule", [{"on_conflict": "replace"}, {"unique_for": 60}])
def test_enqueue_many_keeps_the_order_of_a_batch_with_rules(db, rule):
    line = {"ordering_key": "line"}
    jobs = [
        {"job_type": "y", **line},
        {"job_type": "x", "idempotency_key": "b", **rule, **line},
        {"job_type": "x", "idempotency_key": "a", **line},
        {"job_type": "x", **line},
    ]

    ids = [row.job_id for row in call(db, "enqueue_many", jobs=Jsonb(jobs))]

    assert ids == sorted(ids)
    assert [run(db, job_id).status for job_id in ids] == ["queued", *["blocked"] * 3]


def test_enqueue_many_answers_each_rule_in_input_order(db):
    taken = enqueue(db, unique_for="1 day", idempotency_key="taken")
    jobs = [
        {
            "job_type": "x",
            "idempotency_key": "z",
            "on_conflict": "replace",
            "payload": {"v": 1},
        },
        {"job_type": "plain"},
        {"job_type": "x", "idempotency_key": "taken", "unique_for": 60},
        {
            "job_type": "x",
            "idempotency_key": "z",
            "on_conflict": "replace",
            "payload": {"v": 2},
        },
        {"job_type": "x", "idempotency_key": "a", "on_conflict": "rerun"},
    ]

    found = call(db, "enqueue_many", jobs=Jsonb(jobs))

    assert [row.ordinal for row in found] == [1, 2, 3, 4, 5]
    assert [row.is_new for row in found] == [True, True, False, False, True]
    assert found[2].job_id == taken
    assert found[0].job_id == found[3].job_id
    assert run(db, found[0].job_id).payload == {"v": 2}


BAD = [
    ({"on_conflict": None, **KEY}, "on_conflict"),
    ({"on_conflict": "sometimes", **KEY}, "on_conflict"),
    ({"on_conflict": "rerun"}, "idempotency_key"),
    ({"unique_for": "1 day"}, "idempotency_key"),
    ({"unique_for": "0", **KEY}, "unique_for"),
    ({"unique_for": "-1 s", **KEY}, "unique_for"),
    ({"unique_for": "101 years", **KEY}, "unique_for"),
    ({"unique_for": "1 day", **REPLACE}, "unique_for"),
    ({"updated_at": "infinity", **RERUN}, "updated_at"),
    ({"updated_at": "2026-01-01", **REPLACE}, "updated_at"),
    ({"updated_at": "2026-01-01", **KEY}, "updated_at"),
    ({"max_wait": "1 s", **KEY}, "max_wait"),
    ({"max_wait": "-1 s", **REPLACE}, "max_wait"),
]


@pytest.mark.parametrize(("arguments", "name"), BAD)
def test_enqueue_refuses_rules_that_make_no_sense(db, arguments, name):
    with raises("22023", name):
        enqueue(db, **arguments)
    with raises("22023", f"jobs[2].{name}"):
        jobs = [{"job_type": "x"}, {"job_type": "x", **arguments}]
        if arguments.get("on_conflict", "") is None:
            jobs[1]["on_conflict"] = "None"  # JSON null means the default
        call(db, "enqueue_many", jobs=Jsonb(jobs))

    assert scalar(db, "select count(*) from rota.jobs") == 0


def test_a_key_stays_unique_for_its_time_whatever_version_comes(db):
    first = enqueue(db, idempotency_key="k", unique_for="1 day")
    finish(db, claim(db)[0])
    again = enqueue(
        db, idempotency_key="k", on_conflict="rerun", updated_at="2026-01-01 00:00+00"
    )
    finish(db, claim(db)[0])

    third = enqueue(db, idempotency_key="k", unique_for="1 day")

    assert (first != again, third) == (True, again)
