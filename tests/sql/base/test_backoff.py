"""How long a failed job waits."""

from __future__ import annotations

from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import claim, enqueue, one, owner, refused, rows, running, scalar, value

KINDS = ["fixed", "linear", "exponential", "quadratic"]
ATTEMPTS = [0, 1, 2, 3, 9, 10, 29, 30, 31, 43, 44, 61, 62, 63, 64, 1000, 2**30, 2**31 - 1]

GRID = """
    from unnest(%s::text[]) as k (kind)
    cross join unnest('{0.001,1,60,86400,31536000}'::numeric[]) as b (base)
    cross join unnest('{0.001,1,1800,86400,31536000}'::numeric[]) as c (cap)
    cross join unnest('{0,0.2,0.9}'::numeric[]) as j (jitter)
    cross join unnest(%s::integer[]) as a (attempt)
    cross join lateral rota._backoff(
        jsonb_build_object('kind', k.kind, 'base_seconds', b.base, 'cap_seconds', c.cap,
            'jitter', j.jitter),
        a.attempt) as d (delay)
"""

GARBAGE = [
    {},
    {"kind": None},
    {"kind": "nonsense"},
    {"kind": 5},
    {"kind": ["list"]},
    {"kind": {"kind": "list"}},
    {"base_seconds": 1e300},
    {"base_seconds": -1e300, "cap_seconds": 1e300},
    {"base_seconds": 0, "cap_seconds": 0, "jitter": 0},
    {"base_seconds": 1e-300},
    {"base_seconds": "NaN", "cap_seconds": "Infinity", "jitter": "-Infinity"},
    {"base_seconds": None, "cap_seconds": None, "jitter": None},
    {"base_seconds": [1], "cap_seconds": {"a": 1}, "jitter": True},
    {"jitter": 1e300},
    {"jitter": -1e300},
    {"kind": "fixed", "cap_seconds": -5},
    {"kind": "quadratic", "base_seconds": 1e300, "cap_seconds": 1e300, "jitter": 1e300},
    {"kind": "list"},
    {"kind": "list", "delay_seconds": None},
    {"kind": "list", "delay_seconds": []},
    {"kind": "list", "delay_seconds": 5},
    {"kind": "list", "delay_seconds": "5"},
    {"kind": "list", "delay_seconds": {"0": 5}},
    {"kind": "list", "delay_seconds": [None, "x", [], {}, -1, 1e300]},
    {"kind": "list", "delay_seconds": [[1, 2]], "cap_seconds": "x"},
    {"kind": "list", "delay_seconds": [0], "cap_seconds": 0, "jitter": 9},
]


def delay(db, policy, attempt):
    return scalar(
        db,
        "select rota._backoff(%s, %s)",
        Jsonb(policy) if policy is not None else None,
        attempt,
    )


def test_backoff_is_above_zero_and_never_above_its_cap(db):
    found = rows(
        db,
        "select count(*), count(*) filter (where not (d.delay > '0'"
        " and extract(epoch from d.delay) <= c.cap)) as bad" + GRID,
        KINDS,
        ATTEMPTS,
    )

    assert found == [(4 * 5 * 5 * 3 * len(ATTEMPTS), 0)]


def test_backoff_never_gets_shorter_without_jitter(db):
    found = rows(
        db,
        "select count(*) filter (where g.delay < g.previous) as shorter,"
        " count(*) filter (where g.delay > g.previous) > 100 as grows from ("
        "select d.delay, lag(d.delay) over ("
        "partition by k.kind, b.base, c.cap order by a.attempt) as previous"
        + GRID
        + "where j.jitter = 0) as g",
        KINDS,
        ATTEMPTS,
    )

    assert found == [(0, True)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"kind": "fixed", "base_seconds": 60}, [60, 60, 60, 60]),
        ({"kind": "linear", "base_seconds": 300}, [300, 600, 900, 1200]),
        ({"kind": "quadratic", "base_seconds": 10}, [10, 40, 90, 160]),
        ({"kind": "exponential"}, [60, 120, 240, 480]),
        ({"kind": "exponential", "cap_seconds": 200}, [60, 120, 200, 200]),
        ({"kind": "list", "delay_seconds": [60, 300, 1800]}, [60, 300, 1800, 1800]),
        ({"kind": "list", "delay_seconds": [60, 300], "cap_seconds": 90}, [60, 90, 90, 90]),
    ],
)
def test_backoff_follows_its_rule(db, policy, expected):
    delays = [delay(db, {**policy, "jitter": 0}, n) for n in (1, 2, 3, 4)]

    assert delays == [timedelta(seconds=s) for s in expected]


def test_backoff_caps_at_a_day_unless_told(db):
    assert delay(db, {"kind": "exponential", "jitter": 0}, 1000) == timedelta(days=1)


def test_backoff_is_by_default_one_minute_doubled_up_to_half_an_hour(db):
    for attempt in range(1, 11):
        middle = min(60 * 2 ** (attempt - 1), 1800 / 1.2)

        shortest, longest, different = rows(
            db,
            "select extract(epoch from min(d)) as shortest,"
            " extract(epoch from max(d)) as longest, count(distinct d) as different"
            " from generate_series(1, 500) as g, lateral rota._backoff(null, %s + 0 * g) as d",
            attempt,
        )[0]

        assert 0.8 * middle <= shortest < 0.9 * middle
        assert 1.1 * middle < longest <= min(1.2 * middle, 1800)
        assert different > 400


def test_backoff_makes_a_delay_of_anything(db):
    no_objects = [5, "x", [], [1e300], True]
    for policy in [None, *no_objects, *GARBAGE]:
        for attempt in [None, -(2**31), -1, *ATTEMPTS]:
            assert timedelta(0) < delay(db, policy, attempt) <= timedelta(days=365 * 1.9)


def test_a_jitter_finer_than_any_float_is_none(db):
    """Python has no such number, so it comes as text."""
    policy = '{"kind": "fixed", "base_seconds": 60, "jitter": 1e-400}'
    job_id = scalar(db, "select rota.enqueue('t', backoff => %s::jsonb)", policy)
    (job,) = claim(db)
    failed = one(db, "fail_job", job_id=job_id, lease_token=job.lease_token, error="x")

    assert failed.run_at - scalar(db, "select rota.now()") <= timedelta(seconds=60)
    assert scalar(db, "select rota._backoff(%s::jsonb, 1)", policy) == timedelta(seconds=60)


def test_fail_job_ends_an_attempt_under_any_rule(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    enqueue(db, queue="innocent")
    for policy in GARBAGE:
        job_id = enqueue(db, max_attempts=2**31 - 1)
        db.execute(
            "update rota.jobs set backoff = %s, attempts = 2147483645 where id = %s",
            (Jsonb(policy), job_id),
        )
        (job,) = claim(db)

        failed = one(db, "fail_job", **owner(job), error="e")

        assert failed.status == "failed"
        assert now < failed.run_at
    assert len(claim(db, queues=["innocent"])) == 1


def test_fail_job_takes_the_rule_of_the_job_before_that_of_the_queue(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    fixed = {"kind": "fixed", "jitter": 0}
    value(db, "set_queue", queue="q", backoff={**fixed, "base_seconds": 7})

    of_queue = one(db, "fail_job", **owner(running(db, queue="q")), error="e")
    of_job = one(
        db,
        "fail_job",
        **owner(running(db, queue="q", backoff={**fixed, "base_seconds": 9})),
        error="e",
    )

    assert of_queue.run_at == now + timedelta(seconds=7)
    assert of_job.run_at == now + timedelta(seconds=9)


BAD = [
    [],
    5,
    "fixed",
    True,
    None,
    {},
    {"kind": None},
    {"kind": "Fixed"},
    {"kind": "random"},
    {"kind": "fixed", "seconds": 5},
    {"kind": "fixed", "base_seconds": 0},
    {"kind": "fixed", "base_seconds": -1},
    {"kind": "fixed", "base_seconds": "60"},
    {"kind": "fixed", "base_seconds": None},
    {"kind": "fixed", "base_seconds": 31536001},
    {"kind": "fixed", "base_seconds": 1e300},
    {"kind": "fixed", "cap_seconds": 0},
    {"kind": "fixed", "cap_seconds": 1e300},
    {"kind": "fixed", "base_seconds": 60, "cap_seconds": 59},
    {"kind": "fixed", "jitter": -0.1},
    {"kind": "fixed", "jitter": 0.91},
    {"kind": "fixed", "jitter": "x"},
    {"kind": "fixed", "delay_seconds": [1]},
    {"kind": "list"},
    {"kind": "list", "delay_seconds": []},
    {"kind": "list", "delay_seconds": 5},
    {"kind": "list", "delay_seconds": [1, None]},
    {"kind": "list", "delay_seconds": [0]},
    {"kind": "list", "delay_seconds": [[1]]},
    {"kind": "list", "delay_seconds": [1] * 101},
]

GOOD = [
    {"kind": "fixed", "base_seconds": 0.001},
    {"kind": "linear", "base_seconds": 31536000, "cap_seconds": 31536000},
    {"kind": "exponential", "jitter": 0.9},
    {"kind": "quadratic", "jitter": 0},
    {"kind": "list", "delay_seconds": [1] * 100, "cap_seconds": 0.001},
]


def test_check_backoff_refuses_what_makes_no_sense(db):
    for policy in BAD:
        with refused("backoff"):
            enqueue(db, backoff=Jsonb(policy))
        with refused("backoff"):
            value(db, "set_queue", queue="q", backoff=Jsonb(policy))
        if policy is not None:
            with refused("jobs[1].backoff"):
                value(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", "backoff": policy}]))

    assert scalar(db, "select count(*) from rota.jobs") == 0


def test_check_backoff_accepts_its_limits(db):
    for policy in GOOD:
        job_id = enqueue(db, backoff=policy)

        assert scalar(db, "select backoff from rota.jobs where id = %s", job_id) == policy
