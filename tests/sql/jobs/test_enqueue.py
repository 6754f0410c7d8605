"""Putting jobs in."""

from __future__ import annotations

import random
from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    one,
    owner,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    swallow,
    value,
)

MIB = 1048576
MEGABYTE = {"blob": "a" * 1_000_000}
TOO_MUCH = {"blob": "a" * MIB}
KEY_10_KB = "k" * 10240

GOOD_NAMES = ["a", "Z", "0", "a" * 47, "b" * 57, "c" * 63, "app/mail:v1.2-x_y"]
BAD_NAMES = [
    None,
    "",
    "c" * 64,
    "x" * 10240,
    "_a",
    "-a",
    "a b",
    "a ",
    " a",
    "a\n",
    "é",
    "a" * 62 + "é",
    "a" * 61 + "é",
    "q" * 15 + "🦀" * 12,
    "a;drop table x",
    'a"b',
    "a'b",
    "a%s",
    "$1",
]

# One bad value of one argument, and the name that the refusal begins with.
BAD = [
    *(("job_type", name) for name in BAD_NAMES),
    *(("queue", name) for name in [*BAD_NAMES, "forward:2", "forward:mail"]),
    ("payload", None),
    *(("payload", Jsonb(x)) for x in ([], "text", 5, True, None, TOO_MUCH)),
    *(("run_at", x) for x in ("infinity", "-infinity")),
    *(("delay", x) for x in ("-1 microsecond", "-1 day", "101 years", "178000000 years")),
    *(("priority", x) for x in (None, 32768, -32769, 2**31 - 1, -(2**31))),
    *(("max_attempts", x) for x in (0, -1, -(2**31))),
    *(("lease", x) for x in ("0", "-1 s", "999 microseconds", "1 year", "100 years")),
    *(("lease", x) for x in (timedelta(seconds=2**31 - 1), timedelta(days=30, seconds=1))),
    *(("idempotency_key", x) for x in ("", "k" * 256, KEY_10_KB)),
    *(("time_limit", x) for x in ("0", "-1 s", "999 microseconds", "31 days")),
    *(("headers", Jsonb(x)) for x in ([], "text", {"a": 1}, {"a": None}, {"a": {}})),
    *(("headers", Jsonb(x)) for x in ({"a": ["b"]}, {"a": "b" * 8192})),
    *(("expires_at", x) for x in ("infinity", "-infinity", "1969-12-31")),
    *(("expires_after", x) for x in ("0", "-1 s", "999 microseconds", "101 years")),
]


def test_enqueue_returns_the_id_of_a_job_with_every_default(db, clock):
    now = clock.set("2026-01-01 00:00+00")

    job = run(db, enqueue(db, "mail"))

    assert (job.queue, job.job_type, job.payload, job.priority) == ("default", "mail", {}, 0)
    assert (job.status, job.attempts, job.max_attempts, job.lease_token) == ("queued", 0, 10, 0)
    assert (job.run_at, job.created_at, job.updated_at) == (now, now, now)
    assert (job.idempotency_key, job.started_at, job.locked_by) == (None, None, None)


@pytest.mark.of_utf8
def test_enqueue_keeps_what_it_is_given(db, clock):
    now = clock.set("2026-01-01 00:00+00")

    job_id = enqueue(
        db,
        "mail",
        payload={"to": "a", "deep": [{"n": 1.5}, None, "\u2028🦀"]},
        queue="q/1",
        run_at=now + timedelta(days=1),
        priority=-7,
        max_attempts=2**31 - 1,
        lease="5 minutes",
        backoff={"kind": "fixed"},
        idempotency_key=" K🦀 ",
        time_limit="1 hour",
        expires_at=now + timedelta(days=2),
        headers={"a": "🦀", "": ""},
    )

    (job,) = rows(db, "select * from rota.jobs where id = %s", job_id)
    assert job.payload == {"to": "a", "deep": [{"n": 1.5}, None, "\u2028🦀"]}
    assert (job.queue, job.priority, job.max_attempts) == ("q/1", -7, 2**31 - 1)
    assert (job.run_at, job.lease) == (now + timedelta(days=1), timedelta(minutes=5))
    assert (job.backoff, job.idempotency_key) == ({"kind": "fixed"}, " K🦀 ")
    assert (job.time_limit, job.expires_at) == (timedelta(hours=1), now + timedelta(days=2))
    assert job.headers == {"a": "🦀", "": ""}


def test_enqueue_counts_a_delay_from_the_clock_and_not_from_the_transaction(db, connect, clock):
    clock.set("2026-01-01 00:00+00")
    with connect(autocommit=False) as old:
        old.execute("select 1")
        now = clock.advance("1 hour")

        first = run(old, enqueue(old, delay="10 s"))
        (row,) = call(old, "enqueue_many", jobs=Jsonb([{"job_type": "x", "delay": 10}]))

        assert first.run_at == now + timedelta(seconds=10)
        assert run(old, row.job_id).run_at == now + timedelta(seconds=10)


def test_enqueue_takes_the_attempts_of_the_queue(db):
    value(db, "set_queue", queue="q", max_attempts=3)

    assert run(db, enqueue(db, queue="q")).max_attempts == 3
    assert run(db, enqueue(db, queue="q", max_attempts=4)).max_attempts == 4
    (row,) = call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", "queue": "q"}]))
    assert run(db, row.job_id).max_attempts == 3


def test_enqueue_accepts_names_up_to_their_limit(db):
    for name in GOOD_NAMES:
        job = run(db, enqueue(db, name, queue=name))
        (claimed,) = claim(db, queues=[name], job_types=[name])

        assert (job.queue, job.job_type) == (name, name)
        assert claimed.job_id == job.id


@pytest.mark.of_utf8
def test_enqueue_refuses_every_bad_argument_by_name(db):
    for argument, bad in BAD:
        with refused(argument):
            enqueue(db, **{"job_type": "x", argument: bad})

    assert scalar(db, "select count(*) from rota.jobs") == 0


def test_enqueue_refuses_both_delay_and_run_at(db):
    with refused("delay"):
        enqueue(db, run_at="2026-01-01", delay="1 s")


def test_enqueue_refuses_an_infinite_interval(db):
    if db.info.server_version < 170000:
        with raises("22007"):
            enqueue(db, delay="infinity")
        return
    for argument in ("delay", "lease"):
        for bad in ("infinity", "-infinity"):
            with refused(argument):
                enqueue(db, **{argument: bad})


def test_enqueue_refuses_times_that_some_language_has_not(db):
    for bad in ("0044-03-15 BC", "0001-01-01", "1969-12-31", "9999-12-31", "infinity"):
        with refused("run_at"):
            enqueue(db, run_at=bad)
        with refused("jobs[1].run_at"):
            call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", "run_at": bad}]))


def test_enqueue_refuses_a_lease_of_few_seconds_that_looks_long(db):
    for bad in ("1 year -330 days", "-1 year 361 days"):
        with refused("lease"):
            enqueue(db, lease=bad)
        with refused("lease"):
            claim(db, lease=bad)


def test_enqueue_measures_a_payload_from_a_compressed_column(db):
    db.execute(
        "create table public.big as select jsonb_build_object('a', repeat('x', 5000000)) as p"
    )

    with refused("payload"):
        rows(db, "select rota.enqueue('x', p) from public.big")


@pytest.mark.of_utf8
def test_enqueue_accepts_every_limit(db):
    for arguments in [
        {"delay": "0"},
        {"delay": "100 years"},
        {"lease": "1 millisecond"},
        {"lease": "30 days"},
        {"priority": -32768},
        {"priority": 32767},
        {"max_attempts": 1},
        {"idempotency_key": "🦀" * 255},
        {"payload": MEGABYTE},
        {"run_at": "1970-01-02"},
        {"run_at": "9998-12-31"},
        {"time_limit": "1 millisecond"},
        {"time_limit": "30 days"},
        {"expires_at": "9998-12-31"},
        {"headers": {}},
        {"headers": {"a": "b" * 8182}},
    ]:
        assert enqueue(db, **arguments) > 0


def test_enqueue_returns_the_live_job_of_the_same_key(db):
    first = enqueue(db, "one", idempotency_key="k")

    assert enqueue(db, "one", queue="other", idempotency_key="k") == first
    (job,) = claim(db)
    assert enqueue(db, "one", idempotency_key="k") == first
    one(db, "fail_job", **owner(job), error="e")
    assert enqueue(db, "one", idempotency_key="k") == first
    assert enqueue(db, "two", idempotency_key="k") != first
    assert (run(db, first).job_type, run(db, first).status) == ("one", "failed")


def test_enqueue_makes_a_new_job_when_the_one_of_the_key_has_ended(db):
    job = running(db, idempotency_key="k")
    value(db, "finish_job", **owner(job))

    assert enqueue(db, idempotency_key="k") > job.job_id


@pytest.mark.of_utf8
def test_enqueue_tells_keys_apart_by_every_character(db):
    keys = ["k", "K", "k ", " k", "{}", "[]", "null", "é", "e\u0301", "0", "00"]

    ids = [enqueue(db, idempotency_key=key) for key in [*keys, None, None]]

    assert len(set(ids)) == len(keys) + 2


def test_enqueue_is_undone_with_the_transaction(db):
    with db.transaction(force_rollback=True):
        enqueue(db, idempotency_key="k")

    assert scalar(db, "select count(*) from rota.jobs") == 0
    assert run(db, enqueue(db, idempotency_key="k")).status == "queued"


def many(db, jobs):
    return call(db, "enqueue_many", jobs=Jsonb(jobs))


def test_enqueue_many_answers_in_order_and_knows_what_is_new(db):
    there = enqueue(db, idempotency_key="there")

    answers = many(
        db,
        [
            {"job_type": "a", "idempotency_key": "z"},
            {"job_type": "b"},
            {"job_type": "x", "idempotency_key": "there"},
            {"job_type": "d", "idempotency_key": "a"},
            {"job_type": "a", "idempotency_key": "z"},
            {"job_type": "e", "idempotency_key": "z"},
            {"job_type": "f"},
        ],
    )

    assert [row.ordinal for row in answers] == [1, 2, 3, 4, 5, 6, 7]
    assert [row.is_new for row in answers] == [True, True, False, True, False, True, True]
    assert answers[2].job_id == there
    assert answers[4].job_id == answers[0].job_id
    types = [run(db, row.job_id).job_type for row in answers]
    assert types == ["a", "b", "x", "d", "a", "e", "f"]


@pytest.mark.parametrize(
    ("setting", "max_attempts"),
    [
        ("set_queue('other', max_attempts => 3)", 10),
        ("set_queue('q', max_attempts => 3)", 3),
        ("set_limit(job_type => 'other', max_running => 1)", 10),
        ("set_limit(job_type => 'mail', max_running => 1)", 10),
        ("set_queue('q', ageing => '1 minute')", 10),
        ("set_queue('q', expires_after => '1 hour')", 10),
        ("set_type('mail', time_limit => '1 minute', expires_after => '1 minute')", 10),
        ("enqueue('mail', queue => 'q', limit_key => 'a')", 10),
    ],
)
def test_a_plain_batch_heeds_what_is_set_for_its_queue_and_type(db, setting, max_attempts):
    db.execute(f"select rota.{setting}")
    plain = {"job_type": "mail", "queue": "q", "payload": {"a": 1}, "priority": -3}

    answers = many(db, [plain, {"job_type": "third"}, plain])

    assert [(row.ordinal, row.is_new) for row in answers] == [(1, True), (2, True), (3, True)]
    singly = enqueue(db, **plain)
    assert run(db, singly).max_attempts == max_attempts
    same = """
        select j.status, j.priority, j.max_attempts, j.own_lane,
            j.own_place is null as is_in_order, j.time_limit,
            j.expires_at - j.run_at as expires_after, j.payload
        from rota.jobs as j where j.id = %s
    """
    for answer in (answers[0], answers[2]):
        assert rows(db, same, answer.job_id) == rows(db, same, singly)


def test_enqueue_many_is_enqueue_for_each_element(db, clock):
    clock.set("2026-01-01 00:00+00")
    each = {
        "job_type": "mail",
        "payload": {"a": [1, None]},
        "queue": "q",
        "run_at": "2027-01-01T00:00:00+00:00",
        "priority": 5,
        "max_attempts": 7,
        "lease": "90 s",
        "backoff": {"kind": "fixed"},
        "time_limit": "45 s",
        "expires_at": "2028-01-01T00:00:00+00:00",
        "headers": {"traceparent": "00-1", "tenant": "7"},
    }

    singly = enqueue(db, **each)
    (row,) = many(db, [each])

    same = "select to_jsonb(j) - 'id' as job from rota.jobs as j where j.id = %s"
    assert rows(db, same, row.job_id) == rows(db, same, singly)


def test_enqueue_many_reads_null_as_left_out_and_a_number_as_seconds(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    optional = ["payload", "queue", "run_at", "priority", "max_attempts", "lease", "backoff"]
    optional += ["time_limit", "expires_at", "headers", "expires_after"]

    answers = many(
        db,
        [
            {"job_type": "x", **dict.fromkeys([*optional, "delay", "idempotency_key"])},
            {"job_type": "x", "delay": 1.5, "lease": 90},
            {"job_type": "x", "delay": "2 minutes", "lease": "1:00"},
        ],
    )

    first, second, third = (
        rows(db, "select * from rota.jobs where id = %s", row.job_id)[0] for row in answers
    )
    assert (first.payload, first.queue, first.run_at, first.priority) == ({}, "default", now, 0)
    assert (first.max_attempts, first.lease, first.backoff) == (10, None, None)
    assert (second.run_at, second.lease) == (
        now + timedelta(seconds=1.5),
        timedelta(seconds=90),
    )
    assert (third.run_at, third.lease) == (now + timedelta(minutes=2), timedelta(hours=1))


@pytest.mark.slow
def test_enqueue_many_takes_ten_thousand_and_no_more(db):
    keys = [f"k{n % 9000}" for n in range(10_000)]
    random.Random(4).shuffle(keys)
    jobs = [{"job_type": "x", "idempotency_key": key} for key in keys]

    with refused("jobs"):
        many(db, [*jobs, {"job_type": "x"}])
    answers = many(db, jobs)

    first = {}
    for key, row in zip(keys, answers, strict=True):
        assert row.is_new == (key not in first)
        assert row.job_id == first.setdefault(key, row.job_id)
    assert [row.ordinal for row in answers] == list(range(1, 10_001))
    assert scalar(db, "select count(*) from rota.jobs") == 9000


def test_enqueue_many_of_nothing_is_nothing(db):
    assert many(db, []) == []


@pytest.mark.parametrize(
    ("function", "arguments", "told"),
    [
        ("enqueue", {"job_type": "x", "payload": Jsonb("{}")}, "payload must .* got string"),
        ("enqueue", {"job_type": "x", "payload": Jsonb([])}, "payload must .* got array"),
        ("enqueue", {"job_type": "x", "payload": None}, "payload must .* got null"),
        ("enqueue_many", {"jobs": Jsonb("[]")}, "jobs must .* got string"),
        ("end_jobs", {"endings": Jsonb("[]")}, "endings must .* got string"),
        ("act_on_jobs", {"act": "retry", "filter": Jsonb("{}")}, "filter must .* got string"),
        (
            "act_on_jobs",
            {"act": "retry", "filter": Jsonb({"all": True}), "arguments": Jsonb("{}")},
            "arguments must .* got string",
        ),
    ],
)
def test_json_of_another_kind_is_named(db, function, arguments, told):
    """As that which a driver encodes that the caller has already encoded."""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=told):
        call(db, function, **arguments)


@pytest.mark.parametrize("jobs", [None, {}, "x", 5, True], ids=repr)
def test_enqueue_many_refuses_what_is_no_array(db, jobs):
    with refused("jobs"):
        many(db, jobs)


def test_enqueue_many_refuses_null(db):
    with refused("jobs"):
        call(db, "enqueue_many", jobs=None)


def elements():
    """Bad elements, and the name in the refusal of each."""
    for bad in (None, 5, "x", [], [{}]):
        yield bad, "jobs[2]"
    for key in ("id", "status", "Queue", "queue ", "", "payload_", "attempts", "lease_token"):
        yield {"job_type": "x", key: 1}, "jobs[2]"
    yield {}, "jobs[2].job_type"
    for argument, bad in BAD:
        plain = bad.obj if isinstance(bad, Jsonb) else bad
        if isinstance(plain, timedelta):
            plain = plain.total_seconds()
        if plain is None and argument != "job_type":
            continue  # left out
        yield {"job_type": "x", argument: plain}, f"jobs[2].{argument}"
    for argument, bad in [
        ("run_at", "soon"),
        ("run_at", "2026-13-01"),
        ("run_at", "2026-01-01 00:00 Mars/Phobos"),
        ("run_at", "999999-01-01"),
        ("run_at", 5),
        ("run_at", {}),
        ("delay", "soon"),
        ("delay", "999999999999 years"),
        ("delay", []),
        ("lease", {"a": 1}),
        *(
            (key, bad)
            for key in ("delay", "lease", "time_limit", "expires_after")
            for bad in ({"minutes": 5}, [5])
        ),
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", 1e10),
        ("priority", [1]),
        ("max_attempts", "ten"),
        ("max_attempts", 2**31),
        ("max_attempts", True),
        ("backoff", "fixed"),
        ("backoff", []),
        ("payload", "{}"),
    ]:
        yield {"job_type": "x", argument: bad}, f"jobs[2].{argument}"


@pytest.mark.of_utf8
def test_enqueue_many_names_the_bad_element_and_inserts_nothing(db):
    for bad, name in elements():
        with refused(name):
            many(db, [{"job_type": "good"}, bad, {"job_type": "good"}])

    assert scalar(db, "select count(*) from rota.jobs") == 0


def test_enqueue_many_takes_a_payload_of_a_megabyte(db):
    (row,) = many(db, [{"job_type": "x", "payload": MEGABYTE}])

    assert run(db, row.job_id).payload == MEGABYTE


def test_enqueue_many_works_under_every_isolation_level(db):
    for level in psycopg.IsolationLevel:
        db.isolation_level = level

        with db.transaction():
            assert len(many(db, [{"job_type": "x", "idempotency_key": level.name}] * 2)) == 2
            assert enqueue(db, idempotency_key=level.name) > 0


def test_enqueue_counts_durations_in_seconds_whatever_the_calendar_says(db, clock):
    db.execute("set time zone 'Europe/Berlin'")
    clock.set("2026-03-28 12:00+00")  # the day before the clocks go forward

    db.execute("select rota.enqueue('t', delay => '1 day', lease => '1 day')")
    db.execute("select rota.enqueue('t', delay => '1 month -29 days')")
    with refused("expires_at"):
        enqueue(db, delay="1 day", expires_at="2026-03-29 11:30+00")

    found = rows(db, "select run_at - created_at, lease from rota.jobs order by id")
    assert found == [(timedelta(hours=24), timedelta(hours=24)), (timedelta(days=1), None)]


def test_enqueue_many_tells_no_long_value_whole(db):
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "t", "delay": [1] * 100_000}]))

    assert len(str(caught.value.diag.message_primary)) < 300


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"ordering_key": "k"},
        {"idempotency_key": "k"},
        {"idempotency_key": "k", "on_conflict": "replace"},
    ],
)
def test_a_job_that_a_trigger_swallows_is_refused(db, given):
    """Else the caller has the id of a job that is not there, or waits without end."""
    dead = running(db, job_type="y")
    call(db, "fail_job", **owner(dead), error="e", fatal=True)
    swallow(db, "jobs", "new.job_type = 'y'")
    jobs = [{"job_type": "x"}, {"job_type": "y", **given}, {"job_type": "x"}]

    with raises("09000"):
        enqueue(db, "y", **given)
    with raises("09000"):
        many(db, jobs)
    with raises("09000"):
        many(db, [{**jobs[0], "idempotency_key": "other"}, *jobs])
    with raises("09000"):
        call(db, "retry_job", job_id=dead.job_id)
    assert run(db, dead.job_id).status == "dead"
    assert scalar(db, "select count(*) from rota.jobs") == 0
