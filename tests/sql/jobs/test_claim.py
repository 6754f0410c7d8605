"""Giving jobs to workers."""

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
    owners,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    value,
)
from sql.jobs.test_enqueue import BAD_NAMES

BAD_LEASES = ["0", "-1 s", "999 microseconds", "1 year", "2147483647 s", "178000000 years"]


def ids(jobs):
    return [job.job_id for job in jobs]


def test_claim_jobs_leases_a_job_to_the_worker(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db, "mail", payload={"a": 1}, priority=3, idempotency_key="k")

    (job,) = claim(db, worker="me")

    row = run(db, job_id)
    assert job.job_id == job_id
    assert (job.queue, job.job_type, job.payload, job.priority) == (
        "default",
        "mail",
        {"a": 1},
        3,
    )
    assert (job.attempt, job.max_attempts, job.idempotency_key) == (1, 10, "k")
    assert (job.run_at, job.created_at) == (now, now)
    assert job.locked_until == now + timedelta(minutes=1)
    assert job.locked_for == timedelta(minutes=1)
    assert (row.status, row.locked_by, row.attempts) == ("running", "me", 1)
    assert (row.lease_token, row.locked_until) == (job.lease_token, job.locked_until)
    assert (row.started_at, row.updated_at) == (now, now)


def test_claim_jobs_gives_a_job_only_once(db, connect):
    enqueue(db)

    assert len(claim(db, max_jobs=10)) == 1
    assert claim(connect(), max_jobs=10) == []


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        *(("worker", x) for x in (None, "", "w" * 256)),
        *(("max_jobs", x) for x in (None, 0, -1, 1001, 2**31 - 1, -(2**31))),
        *(("queues", x) for x in (None, [], ["q"] * 1001, [None], ["q", None])),
        *(("job_types", x) for x in ([], ["q"] * 1001, [None])),
    ],
    ids=lambda x: str(x)[:20],
)
def test_claim_jobs_refuses(db, argument, bad):
    with refused(argument):
        claim(db, **{argument: bad})


@pytest.mark.of_utf8
def test_claim_jobs_refuses_bad_names_and_leases(db):
    enqueue(db)

    for name in BAD_NAMES:
        with refused("queues"):
            claim(db, queues=["default", name])
        with refused("job_types"):
            claim(db, job_types=["x", name])
    for lease in BAD_LEASES + ["infinity"] * (db.info.server_version >= 170000):
        with refused("lease"):
            claim(db, lease=lease)

    assert len(claim(db, worker="é" * 255, max_jobs=1000)) == 1


def test_claim_jobs_takes_the_lease_of_job_then_argument_then_queue(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="q", lease="3 s")

    of_queue = running(db, queue="q")
    enqueue(db, queue="q")
    (of_second_queue,) = claim(db, queues=["p", "q"])
    enqueue(db, queue="q")
    (of_argument,) = claim(db, queues=["q"], lease="2 s")
    enqueue(db, queue="q", lease="1 s")
    (of_job,) = claim(db, queues=["q"], lease="2 s")

    for job, seconds in [(of_queue, 3), (of_second_queue, 3), (of_argument, 2), (of_job, 1)]:
        assert job.locked_for == timedelta(seconds=seconds)
        assert job.locked_until == now + timedelta(seconds=seconds)


@pytest.mark.parametrize("lease", [timedelta(milliseconds=1), timedelta(days=30)])
def test_claim_jobs_gives_a_lease_exactly(db, clock, lease):
    now = clock.set("2026-01-01 00:00+00")
    enqueue(db)

    (job,) = claim(db, lease=lease)

    assert job.locked_until == now + lease


def test_claim_jobs_takes_the_time_limit_of_job_then_queue(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="q", time_limit="10 s")
    ids = [
        enqueue(db, queue=queue, time_limit=limit)
        for queue, limit in [
            ("q", None),
            ("q", "20 s"),
            ("default", "1 hour"),
            ("default", None),
        ]
    ]

    jobs = claim(db, queues=["q", "default"], max_jobs=4, lease="45 s")

    assert [job.job_id for job in jobs] == ids
    limits = [timedelta(seconds=seconds) for seconds in (10, 20, 3600)]
    assert [job.time_limit for job in jobs] == [*limits, None]
    seconds = [(job.locked_until - now).total_seconds() for job in jobs]
    assert seconds == [40, 45, 45, 45]
    assert [job.locked_for for job in jobs] == [job.locked_until - now for job in jobs]


def test_claim_jobs_hands_over_the_headers_in_each_attempt(db):
    said = {"traceparent": "00-1", "tenant": "7"}
    job = running(db, headers=said)
    one(db, "fail_job", **owner(job), error="no", retry_in="0")

    (again,) = claim(db)

    assert (job.headers, again.headers) == (said, said)
    value(db, "finish_job", **owner(again))
    assert run(db, job.job_id).headers == said
    assert claim(db) == []


def test_claim_jobs_gives_a_full_lease_late_in_a_transaction(db, connect, clock):
    clock.set("2026-01-01 00:00+00")
    enqueue(db)
    with connect(autocommit=False) as old:
        old.execute("select 1")
        now = clock.advance("1 hour")

        (job,) = claim(old, lease="10 s")

        assert job.locked_until == now + timedelta(seconds=10)


def test_now_is_the_wall_clock_and_not_the_start_of_the_transaction(db):
    with db.transaction():
        db.execute("select 1")
        is_later = scalar(db, "select rota.now() > statement_timestamp()")
        is_wall = scalar(db, "select clock_timestamp() - rota.now() < '1 s'")

    assert (is_later, is_wall) == (True, True)


def test_claim_jobs_goes_by_priority_then_time_then_id(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    late = enqueue(db, run_at=now - timedelta(seconds=1))
    early = enqueue(db, run_at=now - timedelta(seconds=2))
    urgent = enqueue(db, priority=-1)
    twin = enqueue(db, run_at=now - timedelta(seconds=1))
    lazy = enqueue(db, priority=1, run_at=now - timedelta(days=1))

    assert ids(claim(db, max_jobs=2)) == [urgent, early]
    assert ids(claim(db, max_jobs=9)) == [late, twin, lazy]


@pytest.mark.own_session
@pytest.mark.parametrize("method", ["nestloop", "hashjoin", "mergejoin", "sort"])
def test_claim_jobs_keeps_the_order_whatever_the_session_tells_the_planner(db, method):
    """Its rows lie in the table the other way round."""
    jobs = [enqueue(db, run_at=f"2026-01-01 00:{n:02}+00") for n in range(9, 0, -1)]
    db.execute("analyze rota.jobs")
    db.execute(f"set enable_{method} = off")

    assert ids(claim(db, max_jobs=9)) == jobs[::-1]


def test_claim_jobs_goes_by_priority_over_queues_that_have_no_lane_in_common(db):
    lazy = enqueue(db, queue="a", priority=5)
    urgent = enqueue(db, queue="b", priority=0)

    assert ids(claim(db, queues=["a", "b"])) == [urgent]
    assert ids(claim(db, queues=["a", "b"])) == [lazy]


@pytest.mark.parametrize("seed", range(4))
def test_claim_jobs_has_one_order_over_all_queues(db, clock, seed):
    rng = random.Random(seed)
    now = clock.set("2026-01-01 00:00+00")
    queues = [f"q{n}" for n in range(rng.choice([1, 2, 5]))]
    jobs = [
        {
            "job_type": rng.choice("ab"),
            "queue": rng.choice([*queues, "paused", "other"]),
            "priority": rng.choice([-32768, -1, 0, 0, 0, 32767]),
            "run_at": (now + timedelta(seconds=rng.randint(-20, 5))).isoformat(),
        }
        for _ in range(400)
    ]
    answers = call(db, "enqueue_many", jobs=Jsonb(jobs))
    value(db, "pause_queue", queue="paused")
    wanted = [
        (job["priority"], job["run_at"], row.job_id)
        for job, row in zip(jobs, answers, strict=True)
        if job["queue"] in queues
        and job["run_at"] <= now.isoformat()
        and (seed % 2 == 0 or job["job_type"] == "a")
    ]
    arguments = {
        "queues": [*queues, "paused", queues[0], "empty"],
        "job_types": None if seed % 2 == 0 else ["a", "c"],
    }

    claimed = []
    while batch := claim(db, max_jobs=rng.randint(1, 30), **arguments):
        claimed += ids(batch)

    assert claimed == [job_id for _, _, job_id in sorted(wanted)]
    assert len(claimed) > 40


def test_claim_jobs_passes_over_more_locked_rows_than_its_window(db, connect):
    jobs = [{"job_type": "x", "queue": "ab"[n % 2], "run_at": "2026-01-01"} for n in range(150)]
    first = ids(call(db, "enqueue_many", jobs=Jsonb(jobs)))
    other = connect(autocommit=False)
    other.execute("select from rota.jobs where id < %s for update", (first[120],))

    assert ids(claim(db, queues=["a", "b"])) == [first[120]]
    assert ids(claim(db, queues=["b"])) == [first[121]]
    assert ids(claim(db, queues=["a", "b"], max_jobs=1000)) == first[122:]


def test_claim_jobs_sees_a_priority_that_was_changed(db):
    first, second = enqueue(db), enqueue(db)
    value(db, "set_priority", job_id=second, priority=-5)

    assert ids(claim(db)) == [second]
    value(db, "set_priority", job_id=first, priority=32767)
    assert ids(claim(db)) == [first]


def test_claim_jobs_waits_for_run_at_to_the_microsecond(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    enqueue(db, delay="1 hour")

    clock.set(now + timedelta(hours=1, microseconds=-1))
    assert claim(db) == []
    clock.set(now + timedelta(hours=1))
    assert len(claim(db)) == 1


@pytest.mark.slow
def test_claim_jobs_finds_the_next_job_after_a_thousand_empty_calls(db):
    for _ in range(1000):
        assert claim(db, queues=["a", "b"]) == []
    enqueue(db, queue="b")

    assert len(claim(db, queues=["a", "b"])) == 1


def test_claim_jobs_on_an_empty_queue_writes_nothing(db):
    with db.transaction():
        claim(db)
        assert scalar(db, "select pg_current_xact_id_if_assigned()::text") is None


@pytest.mark.parametrize("known", [0, 1, 100])
@pytest.mark.parametrize("queues", [["a"], ["a", "b"]], ids=["lane", "lanes"])
@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
def test_claim_jobs_of_one_claims_one_under_stale_statistics(db, known, queues, mode):
    fill = (
        "insert into rota.jobs"
        " (queue, job_type, payload, priority, max_attempts, status, run_at)"
        " select 'a', 'x', '{}', 0, 10, 'queued', '2026-01-01' from generate_series(1, %s)"
    )
    db.execute("alter table rota.jobs set (autovacuum_enabled = false)")
    db.execute(fill, (known,))
    db.execute("analyze rota.jobs")
    db.execute(fill, (3000,))
    db.execute(f"set plan_cache_mode = {mode}")

    for n in range(1, 8):
        assert len(claim(db, queues=queues)) == 1
        assert scalar(db, "select count(*) from rota.jobs where status = 'running'") == n
    assert len(claim(db, queues=queues, max_jobs=100)) == 100
    assert scalar(db, "select count(*) from rota.jobs where status = 'running'") == 107


@pytest.mark.parametrize(
    "level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE]
)
def test_claim_jobs_refuses_an_isolation_level_that_cannot_work(db, level):
    enqueue(db)
    db.isolation_level = level

    with raises("RT009"), db.transaction():
        claim(db)

    db.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    with db.transaction():
        assert len(claim(db)) == 1


def test_claim_jobs_forgets_the_progress_of_the_attempt_before(db):
    job = running(db)
    value(db, "set_progress", **owner(job), percent=50, message="half")
    call(db, "release_jobs", **owners(job))

    (job,) = claim(db)

    row = run(db, job.job_id)
    assert (row.progress_percent, row.progress_message) == (None, None)


def test_claim_jobs_leaves_no_lock_behind(db):
    for _ in range(100):
        enqueue(db)
    for job in claim(db, max_jobs=100):
        value(db, "finish_job", **owner(job))
    call(db, "tick")

    assert rows(db, "select * from pg_locks where locktype = 'advisory'") == []


def test_claim_jobs_draws_a_greater_token_when_the_clock_steps_back(db, clock):
    clock.set("2030-01-01 00:00+00")
    job = running(db)
    call(db, "release_jobs", **owners(job))
    clock.set("2020-01-01 00:00+00")
    db.execute("update rota.jobs set run_at = '2020-01-01 00:00+00'")

    (again,) = claim(db)

    assert again.lease_token == job.lease_token + 1


STEPS = {
    "claim": 6,
    "fail": 3,
    "retry_in": 2,
    "snooze": 2,
    "release": 2,
    "sweep": 3,
    "finish": 1,
    "fatal": 1,
    "retry_job": 2,
    "cancel": 1,
    "heartbeat": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_claim_jobs_counts_attempts_and_tokens_whatever_happens(db, clock, seed):
    """Walk one job at random: attempts stay in bounds, each claim's token is greater."""
    rng = random.Random(seed)
    clock.set("2026-01-01 00:00+00")
    max_attempts = rng.choice([1, 2, 3])
    job_id = enqueue(db, max_attempts=max_attempts, idempotency_key="k")
    tokens, claims = [0], 0

    for _ in range(150):
        step = rng.choices(list(STEPS), list(STEPS.values()))[0]
        clock.advance(timedelta(seconds=rng.choice([0, 1, 90, 4000])))
        before = run(db, job_id)
        mine = {"job_id": job_id, "lease_token": tokens[-1]}
        try:
            match step:
                case "claim":
                    for job in claim(db):
                        assert job.lease_token > tokens[-1]
                        assert job.lease_token > before.lease_token
                        assert job.attempt == before.attempts + 1 <= max_attempts
                        tokens.append(job.lease_token)
                        claims += 1
                case "fail":
                    one(db, "fail_job", **mine, error=f"e{rng.random()}")
                case "retry_in":
                    one(db, "fail_job", **mine, error=f"e{rng.random()}", retry_in="0")
                case "fatal":
                    one(db, "fail_job", **mine, error=f"e{rng.random()}", fatal=True)
                case "snooze":
                    value(db, "snooze_job", **mine, delay="1 s")
                case "release":
                    call(db, "release_jobs", job_ids=[job_id], lease_tokens=[tokens[-1]])
                case "sweep":
                    clock.advance("2 minutes")
                    value(db, "sweep_stale_leases")
                case "finish":
                    value(db, "finish_job", **mine)
                case "retry_job":
                    value(db, "retry_job", job_id=job_id, force=True)
                case "cancel":
                    value(db, "cancel_job", job_id=job_id)
                case "heartbeat":
                    one(db, "heartbeat", **mine)
        except psycopg.Error as error:
            if error.sqlstate not in ("RT002", "RT003"):
                raise
        after = run(db, job_id)
        assert 0 <= after.attempts <= max_attempts
        assert after.lease_token >= before.lease_token
        assert after.status == "running" or after.attempts < max_attempts or after.finished_at
        if step in ("snooze", "release") and before.status == "running" != after.status:
            assert after.attempts == before.attempts - (after.status == "queued")

    assert claims >= 5
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("max_attempts", [1, 2, 10])
def test_claim_jobs_runs_a_job_that_kills_its_worker_max_attempts_times(
    db, clock, max_attempts
):
    clock.set("2026-01-01 00:00+00")
    job_id = enqueue(db, max_attempts=max_attempts)
    attempts = []

    for _ in range(max_attempts + 5):
        attempts += [job.attempt for job in claim(db)]
        clock.advance("1 day")
        value(db, "sweep_stale_leases")
        clock.advance("1 day")

    assert attempts == list(range(1, max_attempts + 1))
    assert run(db, job_id).status == "dead"
    errors = rows(db, "select * from rota.job_errors order by attempt")
    assert [e.error_type for e in errors] == ["lease_expired"] * max_attempts


def test_claim_jobs_runs_no_further_attempt_through_retry_in(db, clock):
    clock.set("2026-01-01 00:00+00")
    enqueue(db, max_attempts=3)
    outcomes = []

    while batch := claim(db):
        outcomes.append(one(db, "fail_job", **owner(batch[0]), error="e", retry_in="0").status)

    assert outcomes == ["failed", "failed", "dead"]


@pytest.mark.parametrize(
    "change",
    [
        "attempts = 2147483647",
        "lease_token = 9223372036854775807",
        "lease = '178000000 years'",
        "lease = '-178000000 years'",
        "time_limit = '178000000 years'",
        "time_limit = '-178000000 years'",
        "run_at = '-infinity'",
        "run_at = '4713-01-01 BC'",
    ],
)
def test_claim_jobs_gives_the_others_whatever_somebody_wrote_into_a_row(db, change):
    job_ids = [enqueue(db) for _ in range(3)]
    db.execute(f"update rota.jobs set {change} where id = %s", (job_ids[0],))

    # Not all columns: Python has no such years.
    query = "select job_id, lease_token from rota.claim_jobs('w', max_jobs => %s)"
    jobs = [*rows(db, query, 1), *rows(db, query, 5)]
    kept = call(db, "heartbeat_jobs", **owners(*jobs[1:]))
    call(db, "heartbeat_jobs", **owners(*jobs))

    assert set(ids(jobs)) == set(job_ids)
    assert [job.is_lost for job in kept] == [False, False]


@pytest.mark.parametrize("queues", [["q", "q"], ["q", "other", "q", "q"]])
def test_claim_jobs_keeps_to_a_limit_when_a_queue_is_named_twice(db, queues):
    call(db, "set_limit", queue="q", max_running=2)
    for _ in range(6):
        enqueue(db, queue="q")

    assert len(claim(db, queues=queues, max_jobs=5)) == 2
    assert claim(db, queues=queues, max_jobs=5) == []


@pytest.mark.parametrize("max_jobs", [1, 7, 300])
@pytest.mark.parametrize(
    "kinds",
    [["expired"], ["paused"], ["full"], ["expired", "paused", "stopped", "full"]],
    ids="-".join,
)
def test_claim_jobs_turns_a_bounded_number_away(db, max_jobs, kinds):
    """At most max_jobs + 100, whatever is wrong with them."""
    call(db, "set_limit", job_type="full", max_running=0)
    call(db, "tick")
    db.execute(
        "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status,"
        " run_at, expires_at) select 'default', k.kind, '{}', 0, 10, 'queued',"
        " rota.now() - interval '1 hour', case k.kind when 'expired' then rota.now() end"
        " from generate_series(1, 1500), unnest(%s::text[]) as k (kind)",
        (kinds,),
    )
    call(db, "pause_type", job_type="paused")
    call(db, "pause_type", job_type="stopped")
    left = "select count(*) from rota.jobs where hold is not null"

    counts = []
    for _ in range(3):
        assert claim(db, max_jobs=max_jobs) == []
        counts.append(scalar(db, left))

    assert counts == [(max_jobs + 100) * n for n in (1, 2, 3)]
