"""The place where a session begins to look for jobs: it saves time and decides nothing."""

from __future__ import annotations

import json
import random
from datetime import timedelta

import psycopg
import pytest

from sql.helpers import call, claim, enqueue, owners, rows, run, running, scalar, value

pytestmark = pytest.mark.slow

SECOND = timedelta(seconds=1)


def ids(jobs):
    return [job.job_id for job in jobs]


def micros(moment):
    return round(moment.timestamp() * 1_000_000)


def keep(db, name, numbers):
    db.execute("select rota._keep_scan_start(%s, %s)", (name, " ".join(map(str, numbers))))


def hint(db, *lanes, until, full, worker="w", queues="{default}", job_types="", of=None):
    """Leave a hint as a claim with these arguments would; a lane is (priority, run_at, id).

    It may be *of* those queues alone that are neither full nor paused.
    """
    called = f"claim '{worker}' {queues}  {job_types}"
    if of is not None:
        called = f"some {called} {of}"
    numbers = [until, full, *(number for lane in lanes for number in lane)]
    numbers = [n if isinstance(n, int) else micros(n) for n in numbers]
    keep(db, called, numbers)


def hidden(db, clock, *, until, **options):
    """Make two jobs and a hint that begins at the second one; return their ids."""
    now = clock.set("2026-01-01 00:00+00")
    first = enqueue(db, run_at=now - 2 * SECOND)
    second = enqueue(db, run_at=now - SECOND)
    hint(db, (0, now - SECOND, second), until=now + until, full=now + until, **options)
    return first, second


def test_claim_jobs_begins_where_the_hint_says(db, clock):
    first, second = hidden(db, clock, until=2 * SECOND)

    assert ids(claim(db)) == [second]
    assert ids(claim(db)) == []
    clock.advance(2 * SECOND)
    assert ids(claim(db)) == [first]


def test_claim_jobs_looks_at_all_when_the_hint_is_of_another_time(db, clock):
    for until in (61 * SECOND, 1000 * 365 * 86400 * SECOND, -SECOND):
        db.execute("truncate rota.jobs")
        first, second = hidden(db, clock, until=until)

        assert ids(claim(db)) == [first]
        assert ids(claim(db)) == [second]


@pytest.mark.parametrize(
    "options", [{"worker": "x"}, {"queues": "{other}"}, {"job_types": "{x}"}], ids=str
)
def test_claim_jobs_ignores_the_hint_of_another_call(db, clock, options):
    first, _ = hidden(db, clock, until=2 * SECOND, **options)

    assert ids(claim(db)) == [first]


GARBAGE = [
    "",
    "#",
    " ",
    "1 2 3 4 5",
    "1 2 3 4 5#6",
    "a b#c",
    "9223372036854775808 1#0",
    "null#null",
    "{1,2}#",
    "-1 -1 -1 -1 -1#-1",
    "\u00e4" * 10_000,
]


@pytest.mark.parametrize("text", GARBAGE, ids=[text[:20] for text in GARBAGE])
def test_claim_jobs_and_sweep_pass_over_a_hint_that_is_none(db, text):
    for kind in ("claim", "sweep", "due", "next"):
        for number in range(16):
            db.execute("select set_config(%s, %s, false)", (f"rota.scan_{kind}_{number}", text))
    job_ids = [enqueue(db) for _ in range(3)]

    jobs = claim(db, max_jobs=2) + claim(db)

    assert ids(jobs) == job_ids
    db.execute("update rota.jobs set locked_until = rota.now() - interval '1 s'")
    assert value(db, "sweep_stale_leases") == 3


@pytest.mark.parametrize("queues", [["default"], ["default", "other"]], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_claim_jobs_gives_every_job_once_with_any_well_formed_hint(db, clock, seed, queues):
    chance = random.Random(seed)
    now = clock.set("2026-01-01 00:00+00")
    job_ids = [
        enqueue(
            db,
            queue=chance.choice(queues),
            priority=chance.randint(-1, 1),
            run_at=now - chance.randint(0, 9) * SECOND,
        )
        for _ in range(30)
    ]
    taken = []
    while len(taken) < len(job_ids):
        lanes = [
            (p, now - chance.randint(-3, 12) * SECOND, chance.choice([0, 5, 20, 2**62]))
            for p in sorted(chance.sample(range(-3, 4), chance.randint(0, 4)))
        ]
        until = now + chance.choice([-1, 0, 1, 50]) * SECOND
        full = now + chance.choice([-1, 0, 1, 50]) * SECOND
        hint(db, *lanes, until=until, full=full, queues=f"{{{','.join(queues)}}}")
        taken += ids(claim(db, queues=queues, max_jobs=chance.choice([1, 2, 7])))
        clock.advance(chance.choice([0, 1, 30]) * SECOND)
        now = clock.now()

    assert sorted(taken) == sorted(job_ids)


def test_claim_jobs_sees_a_more_urgent_lane_at_once(db, clock):
    _, second = hidden(db, clock, until=2 * SECOND)
    urgent = enqueue(db, priority=-5)

    assert ids(claim(db)) == [urgent]
    assert ids(claim(db)) == [second]


def test_claim_jobs_goes_on_to_the_next_lanes(db, clock):
    first, second = hidden(db, clock, until=2 * SECOND)
    later = [enqueue(db, priority=3), enqueue(db, priority=7)]

    assert ids(claim(db, max_jobs=10)) == [second, *later]
    clock.advance(2 * SECOND)
    assert ids(claim(db, max_jobs=10)) == [first]


def test_claim_jobs_finds_the_lane_when_that_of_the_hint_is_empty(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    hint(db, (-3, now - SECOND, 1), (5, now, 7), until=now + SECOND, full=now + SECOND)
    job_id = enqueue(db, priority=9)

    assert ids(claim(db)) == [job_id]


@pytest.mark.parametrize(
    "setting",
    [
        "select rota.pause_queue('default')",
        "select rota.set_limit(queue => 'default', max_running => 0)",
    ],
)
@pytest.mark.parametrize("is_fair", [False, True])
def test_claim_jobs_keeps_to_what_is_set_whatever_the_hint_says(db, clock, setting, is_fair):
    hidden(db, clock, until=2 * SECOND)
    make_fair(db, is_fair)
    db.execute(setting)

    assert claim(db) == []


def make_fair(db, is_fair):
    if is_fair:
        enqueue(db, limit_key="k", priority=9)
    assert scalar(db, "select count(*) from rota.fair_queues") == is_fair


@pytest.mark.parametrize("is_fair", [False, True])
def test_claim_jobs_takes_the_lease_of_the_queue_whatever_the_hint_says(db, clock, is_fair):
    hidden(db, clock, until=2 * SECOND)
    make_fair(db, is_fair)
    db.execute("select rota.set_queue('default', lease => '7 min')")

    (job,) = claim(db)

    assert job.locked_for == 420 * SECOND


def test_claim_jobs_gives_jobs_of_keys_their_turn_whatever_the_hint_says(db, clock):
    hidden(db, clock, until=2 * SECOND)
    keyed = enqueue(db, limit_key="k", run_at=clock.now() - 3 * SECOND)
    clock.advance(2 * SECOND)

    assert keyed in ids(claim(db, max_jobs=3))


def test_claim_jobs_checks_its_arguments_whatever_the_hint_says(db, clock):
    hidden(db, clock, until=2 * SECOND)

    for bad in (0, -1, 1001, None):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="max_jobs"):
            claim(db, max_jobs=bad)
    db.execute("begin isolation level repeatable read")
    with pytest.raises(psycopg.Error) as caught:
        claim(db)
    assert caught.value.sqlstate == "RT009"
    db.execute("rollback")


OTHER = {
    "nothing": "select",
    "paused": "select rota.pause_queue('other')",
    "type paused": "select rota.pause_type('x', queue => 'other')",
    "full": "select rota.set_limit(queue => 'other', max_running => 0)",
    "ageing": "select rota.set_queue('other', ageing => '1 hour'),"
    " rota.enqueue('x', queue => 'other', priority => 5)",
    "fair": "select rota.enqueue('x', queue => 'other', limit_key => 'k')"
    " from generate_series(1, 3)",
    "lease": "select rota.set_queue('other', lease => '7 min')",
    "expired": "update rota.jobs set expires_at = run_at where queue = 'other'",
    "urgent": "update rota.jobs set priority = -1 where queue = 'other'",
    "not urgent": "update rota.jobs set priority = 1 where queue = 'other'",
    "later": "update rota.jobs set run_at = run_at + interval '1 hour' where queue = 'other'",
    "of another type": "update rota.jobs set job_type = 'y' where queue = 'other'",
}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("max_jobs", [1, 2, 5])
@pytest.mark.parametrize("is_from_start", [False, True])
def test_a_claim_of_two_queues_gives_the_same_with_a_hint(
    db, connect, clock, name, max_jobs, is_from_start
):
    now = clock.set("2026-01-01 00:00+00")
    place = 0 if is_from_start else now - 9 * SECOND
    hint(db, (0, place, 0), until=now + SECOND, full=now + SECOND,
        queues="{default,other}", job_types="{x}")  # fmt: skip
    for _ in range(2):
        enqueue(db, run_at=now)
    enqueue(db, queue="other", run_at=now - SECOND)
    if not is_from_start:
        enqueue(db, queue="other", priority=5, run_at=now - SECOND)
    db.execute(OTHER[name])
    without = connect()
    arguments = {"queues": ["default", "other"], "job_types": ["x"], "max_jobs": max_jobs}

    without.execute("begin")
    expected = [(job.job_id, job.locked_for) for job in claim(without, **arguments)]
    without.execute("rollback")

    assert [(job.job_id, job.locked_for) for job in claim(db, **arguments)] == expected


@pytest.mark.parametrize(
    "setting",
    [
        "select rota.pause_queue('other')",
        "select rota.set_limit(queue => 'other', max_running => 0)",
    ],
)
@pytest.mark.parametrize("max_jobs", [1, 5])
def test_a_claim_of_two_queues_one_of_which_is_closed_has_a_hint_of_its_own(
    db, clock, setting, max_jobs
):
    now = clock.set("2026-01-01 00:00+00")
    jobs = [enqueue(db, run_at=now - n * SECOND) for n in (3, 2, 1)]
    enqueue(db, queue="other", run_at=now - SECOND)
    db.execute(setting)
    for of, job_id in ((None, jobs[2]), ("{default}", jobs[1])):
        run_at = scalar(db, "select run_at from rota.jobs where id = %s", job_id)
        hint(db, (0, run_at, job_id), until=now + SECOND, full=now + SECOND,
            queues="{default,other}", of=of)  # fmt: skip

    claimed = ids(claim(db, queues=["default", "other"], max_jobs=max_jobs))

    assert claimed == jobs[1:][:max_jobs]
    clock.advance(2 * SECOND)
    assert jobs[0] in ids(claim(db, queues=["default", "other"], max_jobs=max_jobs))


def test_a_claim_of_two_queues_begins_where_the_hint_says(db, clock):
    for max_jobs in (1, 2):
        db.execute("truncate rota.jobs")
        first, second = hidden(db, clock, until=2 * SECOND, queues="{default,other}")
        both = {"queues": ["default", "other"]}
        third = enqueue(db, queue="other", run_at=clock.now())

        assert ids(claim(db, **both, max_jobs=max_jobs)) == [second, third][:max_jobs]
        clock.advance(2 * SECOND)
        assert first in ids(claim(db, **both))


@pytest.mark.parametrize("max_jobs", [1, 2, 5])
def test_claim_jobs_with_a_hint_takes_only_its_types_and_what_is_due(db, clock, max_jobs):
    # Where the hint leads to as many as were asked for, nobody looks again.
    now = clock.set("2026-01-01 00:00+00")
    enqueue(db, "y", run_at=now - 2 * SECOND)
    mine = enqueue(db, "x", run_at=now - SECOND)
    enqueue(db, "x", run_at=now + SECOND)
    hint(
        db, (0, now - 3 * SECOND, 0),
        until=now + SECOND, full=now + SECOND, job_types="{x}",
    )  # fmt: skip

    assert ids(claim(db, job_types=["x"], max_jobs=max_jobs)) == [mine]


def walk(db, worker="w"):
    """Claim a job of type x; return its id, or None, and how many entries were read for it."""
    read = "select pg_stat_get_xact_tuples_returned('rota.jobs_ready_idx'::regclass)"
    with db.transaction():
        before = scalar(db, read)
        found = ids(claim(db, worker=worker, job_types=["x"]))
        return found[0] if found else None, scalar(db, read) - before


def test_claim_jobs_walks_past_jobs_of_other_types_once_and_not_at_each_claim(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    enqueue_many(db, 3000, "y")
    mine = [enqueue(db, "x", run_at=now) for _ in range(3)]

    found, walks = zip(*[walk(db) for _ in range(4)], strict=True)

    assert found == (*mine, None)
    assert walks[0] > 3000
    # Also where none of the type is left; the next full scan is due after 20 us for each.
    assert max(walks[1:]) < 20
    clock.advance("59 ms")
    assert walk(db)[1] < 20
    clock.advance("2 ms")
    assert walk(db)[1] >= 3000


@pytest.fixture
def scanned(db, connect, clock):
    """Two sessions behind 12,000 jobs of another type, of which the first has walked past all.

    Both claim as different workers, and there are two jobs for them.
    """
    now = clock.set("2026-01-01 00:00+00")
    enqueue_many(db, 12_000, "y")
    mine = [enqueue(db, "x", run_at=now) for _ in range(2)]
    other = connect()
    assert walk(db)[0] == mine[0]
    job_id, walked = walk(other, "other")
    assert job_id == mine[1]
    return other, walked


def test_a_session_walks_far_for_all_that_claim_alike(db, scanned, clock):
    other, walked = scanned
    assert walked < 50

    clock.advance(2 * SECOND)

    assert walk(db)[1] > 12_000
    assert walk(other, "other")[1] < 50


def test_what_came_late_is_found_by_all_once_one_has_found_it(db, scanned, clock):
    other, _ = scanned
    clock.advance(2 * SECOND)
    late = [enqueue(db, "x", run_at=clock.now() - 3 * SECOND) for _ in range(2)]

    assert walk(other, "other")[0] == late[0]
    assert walk(db)[0] == late[1]


def test_a_session_that_has_walked_far_and_does_not_commit_keeps_no_job_from_others(
    db, scanned, clock
):
    other, _ = scanned
    clock.advance(2 * SECOND)
    with other.transaction():
        assert walk(other, "other")[1] > 12_000
        late = enqueue(db, "x", run_at=clock.now() - 3 * SECOND)
        assert walk(db) == (None, pytest.approx(0, abs=50))

        clock.advance(5 * SECOND)

        assert walk(db)[0] == late


def test_what_is_let_in_behind_the_last_job_is_found_after_a_look_that_found_none(db, clock):
    """Jobs that waited for others, or a limit, come one by one into a lane that was empty."""
    now = clock.set("2026-01-01 00:00+00")
    enqueue_many(db, 12_000, "y")
    enqueue(db, "x")
    assert walk(db)[0]
    clock.advance("200 ms")
    enqueue_many(db, 200, "y")
    assert walk(db) == (None, pytest.approx(200, abs=50))

    let_in = enqueue(db, "x", run_at=now + timedelta(milliseconds=1))

    assert walk(db) == (let_in, pytest.approx(0, abs=50))


def test_what_a_limit_lets_in_is_found_where_claims_begin(db, clock):
    """Under a held snapshot, with others behind it that are claimed all the time."""
    now = clock.set("2026-01-01 00:00+00")
    call(db, "set_limit", job_type="x", max_running=1)
    call(db, "tick")
    plain = enqueue(db, job_type="p", run_at=now - SECOND)
    jobs = [enqueue(db, run_at=now - 9 * SECOND) for _ in range(3)]
    (job,) = claim(db)
    hint(db, (0, now - SECOND, plain), until=now + 2 * SECOND, full=now + 2 * SECOND)
    kind = {"queue": "default", "job_type": "x", "lane": 0, "place": "-infinity", "open_id": 0}
    memory = json.dumps({"full_scan_at": micros(now + 2 * SECOND), "kinds": [kind]})
    db.execute("select rota._keep_scan_start('held type x', %s)", (memory,))
    keep(db, "lane 0 default", (micros(now + 2 * SECOND), micros(now - SECOND)))

    call(db, "finish_job", job_id=job.job_id, lease_token=job.lease_token)

    assert sorted([job.job_id, *ids(claim(db, max_jobs=5))]) == [plain, *jobs[:2]]
    assert run(db, jobs[1]).run_at == now - 9 * SECOND


@pytest.mark.parametrize("many_dead", [False, True])
@pytest.mark.parametrize("ageing", [None, "1 hour"])
def test_what_limits_let_in_together_begins_in_its_order(db, clock, many_dead, ageing):
    """It is claimed one by one, after other ends that let some in, in the same session."""
    now = clock.set("2026-01-01 00:00+00")
    call(db, "set_queue", queue="default", ageing=ageing)
    call(db, "set_limit", job_type="x", max_running=3)
    call(db, "tick")
    given = [{"priority": -n} if ageing else {"run_at": now - n * SECOND} for n in range(1, 13)]
    wanted = [enqueue(db, **its) for its in given][::-1]
    started = []
    for _ in range(4):
        clock.advance("1 ms")
        jobs = [job for _ in range(3) for job in claim(db)]
        started += ids(jobs)
        if many_dead:
            keep(db, "lane 0 default", (micros(now + 2 * SECOND), micros(now)))
        call(db, "finish_jobs", **owners(*jobs))
        moved = rows(db, "select own_place from rota.jobs where own_place >= %s", (now,))
        assert many_dead or moved == []

    assert started[3:] == [job_id for job_id in wanted if job_id not in started[:3]]


@pytest.mark.parametrize("back", [10, 50])
def test_a_clock_that_was_set_back_keeps_no_job_waiting(db, scanned, clock, back):
    other, _ = scanned
    clock.advance(-back * SECOND)
    new = [enqueue(db, "x") for _ in range(2)]

    assert [walk(other, "other")[0], walk(db)[0]] == new


def test_a_forgotten_claim_keeps_no_job_waiting_for_a_clock_that_was_set_back(
    db, scanned, connect, clock
):
    other, _ = scanned
    clock.advance(-3600 * SECOND)
    new = [enqueue(db, "x") for _ in range(3)]
    with other.transaction():
        assert walk(other, "other")[0] == new[0]

        assert walk(db)[0] == new[1]
        assert walk(connect(), "third")[0] == new[2]


@pytest.mark.parametrize("behind", ["jobs of another type", "told jobs of another type"])
def test_what_came_late_is_found_though_full_scans_end_in_a_lower_lane(db, clock, behind):
    """Each full scan finds enough in the first lane, and never looks at the second."""
    clock.set("2026-01-01 00:00+00")
    enqueue_many(db, 12_000 if "told" in behind else 3_000, "y")
    enqueue(db, "x", priority=5)
    assert walk(db)[0]
    late = enqueue(db, "x", priority=5, run_at=clock.now() - SECOND)

    found = []
    for _ in range(3):
        clock.advance(2 * SECOND)
        urgent = enqueue(db, "x")
        assert walk(db)[0] == urgent
        enqueue(db, "x", priority=5)
        found.append(walk(db)[0])

    assert late in found


def test_a_queue_that_was_full_is_claimed_from_where_its_jobs_are(db, clock):
    """While queue a is full, claims from a and b find where the jobs of b begin."""
    clock.set("2026-01-01 00:00+00")
    call(db, "set_limit", queue="a", max_running=1)
    call(db, "tick")
    enqueue_many(db, 3000, "y")
    db.execute("update rota.jobs set queue = 'b'")
    job_ids = [enqueue(db, "x", queue="a", run_at=clock.now() - SECOND) for _ in range(6)]
    for _ in range(20):
        enqueue(db, "x", queue="b")

    found = []
    for _ in range(6):
        clock.advance("1 ms")
        jobs = claim(db, queues=["a", "b"], job_types=["x"], max_jobs=2)
        jobs += claim(db, queues=["a", "b"], job_types=["x"])
        found += [job.job_id for job in jobs if job.queue == "a"]
        call(db, "finish_jobs", **owners(*jobs))

    assert found == job_ids


def test_what_is_committed_a_moment_late_is_found_at_once(db, scanned, connect, clock):
    late = connect()
    late.execute("begin")
    late_id = enqueue(late, "x")
    clock.advance(0.1 * SECOND)
    newer = enqueue(db, "x")
    assert walk(db)[0] == newer
    late.execute("commit")

    assert walk(db) == (late_id, pytest.approx(0, abs=50))


def test_claim_jobs_with_a_hint_passes_over_what_an_open_claim_holds(db, connect, clock):
    now = clock.set("2026-01-01 00:00+00")
    first, second = (enqueue(db, run_at=now - n * SECOND) for n in (2, 1))
    hint(db, (0, now - 3 * SECOND, 0), until=now + SECOND, full=now + SECOND)
    db.execute("set lock_timeout = '10s'")
    other = connect(autocommit=False)

    assert ids(claim(other)) == [first]
    assert ids(claim(db)) == [second]


def test_claim_jobs_takes_no_hint_for_a_check_of_its_arguments(db):
    claim(db, worker="w")

    for worker, queues in [("w {default}", None), (None, ["default"]), ("w", ["a b"])]:
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            claim(db, worker=worker, queues=queues)


def test_claim_jobs_keeps_no_hint_of_a_transaction_that_was_rolled_back(db, connect):
    job_ids = [enqueue(db) for _ in range(2)]
    db.execute("begin")
    claim(db, max_jobs=2)
    db.execute("rollback")

    assert ids(claim(db, max_jobs=2)) == job_ids


def test_claim_jobs_finds_what_was_committed_late_or_moved(db, connect, clock):
    now = clock.set("2026-01-01 00:00+00")
    late = connect()
    late.execute("begin")
    late_id = enqueue(late)
    clock.advance(SECOND)
    enqueue(db)
    (job,) = claim(db)
    hint(db, (0, now + SECOND, job.job_id), until=now + 3 * SECOND, full=now + 3 * SECOND)
    late.execute("commit")

    clock.advance(2 * SECOND)

    assert ids(claim(db)) == [late_id]


@pytest.mark.parametrize("queues", [["default"], ["default", "other"]])
def test_claim_jobs_does_not_walk_what_is_gone_under_a_held_snapshot(
    db, connect, clock, queues
):
    now = clock.set("2026-01-01 00:00+00")
    holder = connect()
    holder.execute("begin isolation level repeatable read")
    holder.execute("select 1 from rota.jobs").fetchall()
    db.execute("alter table rota.jobs set (autovacuum_enabled = false)")
    insert = """
        insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status, run_at)
        select (%s::text[])[1 + n %% %s], 'x', '{}', 0, 10, 'queued', rota.now()
        from generate_series(1, 30000) as g (n)
    """
    db.execute(insert, (queues, len(queues)))
    for _ in range(29):
        jobs = claim(db, queues=queues, max_jobs=1000)
        call(db, "finish_jobs", **owners(*jobs))
    # The clock stands still, so no look takes time: say that the last one took a while.
    place = (0, now, jobs[-1].job_id)
    hint(db, place, until=now + SECOND, full=now + SECOND, queues=f"{{{','.join(queues)}}}")
    touched = []
    for _ in range(20):
        touched.append(pages_of_claim(db, queues))

    clock.advance(SECOND)
    full = pages_of_claim(db, queues)

    # A look from the start of the lane sees a hundred pages of entries that are gone.
    assert max(touched) < full - 100
    holder.execute("rollback")


def test_claim_jobs_brings_its_place_up_to_date_though_a_full_look_is_not_due(db, connect):
    """A full scan that walked much keeps the next away, and meanwhile many jobs go by."""
    holder = connect()
    holder.execute("begin isolation level repeatable read")
    holder.execute("select 1 from rota.jobs").fetchall()
    db.execute("alter table rota.jobs set (autovacuum_enabled = false)")
    enqueue_many(db, 3000)
    for _ in range(2):
        call(db, "finish_jobs", **owners(*claim(db, max_jobs=1000)))
    db.execute("discard all")

    claim(db, max_jobs=10)

    until, full, _lane, place = scalar(
        db, "select string_to_array(rota._scan_start($$claim 'w' {default}  $$), ' ')::bigint[]"
    )[:4]
    assert full - until > 20_000
    assert place > 0
    holder.execute("rollback")


def test_claim_jobs_with_fewer_jobs_than_places_returns_them_all(db, clock):
    clock.set("2026-01-01 00:00+00")
    enqueue_many(db, 3)
    (first,) = claim(db)
    first_lane = enqueue(db)

    both_looks = ids(claim(db, max_jobs=10)) + ids(claim(db, max_jobs=10))

    assert len({first.job_id, *both_looks}) == 4
    assert first_lane in both_looks


@pytest.mark.parametrize("queues", [["default"], ["default", "other"]], ids=str)
@pytest.mark.parametrize("priority", [-1, 1])
def test_claim_jobs_with_fewer_jobs_than_places_looks_into_other_lanes(
    db, clock, priority, queues
):
    clock.set("2026-01-01 00:00+00")
    enqueue_many(db, 3)
    claim(db, max_jobs=2, queues=queues)
    other = enqueue(db, priority=priority, queue=queues[-1])

    assert other in ids(claim(db, max_jobs=10, queues=queues))


def enqueue_many(db, jobs, job_type="x"):
    db.execute(
        "insert into rota.jobs"
        " (queue, job_type, payload, priority, max_attempts, status, run_at)"
        " select 'default', %s, '{}', 0, 10, 'queued', rota.now() from generate_series(1, %s)",
        (job_type, jobs),
    )


def pages_of_claim(db, queues):
    """How many pages a claim of one job touches."""
    ((plan,),) = db.execute(
        "explain (analyze, buffers, format json)"
        f" select from rota.claim_jobs('w', array[{', '.join(map(repr, queues))}])"
    )
    top = plan[0]["Plan"]
    assert top["Actual Rows"] == 1
    return top["Shared Hit Blocks"] + top["Shared Read Blocks"]


def test_sweep_finds_a_lease_behind_its_hint_in_time(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    old = running(db, lease=SECOND)
    clock.advance(5 * SECOND)
    now = clock.now()
    keep(db, "sweep", [micros(now + 2 * SECOND), micros(now), 10_000])
    fresh = running(db, lease=SECOND)
    clock.advance(1.5 * SECOND)

    assert value(db, "sweep_stale_leases") == 1
    assert run(db, fresh.job_id).status == "failed"
    clock.advance(SECOND)
    assert value(db, "sweep_stale_leases") == 1
    assert run(db, old.job_id).status == "failed"


@pytest.mark.parametrize("ahead", [61 * SECOND, -SECOND])
def test_sweep_begins_anew_when_its_hint_is_of_another_time(db, clock, ahead):
    clock.set("2026-01-01 00:00+00")
    running(db, lease=SECOND)
    clock.advance(5 * SECOND)
    now = clock.now()
    keep(db, "sweep", [micros(now + ahead), micros(now), 10_000])

    assert value(db, "sweep_stale_leases") == 1


def test_hints_are_few_however_many_ways_a_session_claims(db):
    for n in range(100):
        claim(db, worker=f"w{n}")

    kept = rows(
        db,
        "select current_setting('rota.scan_claim_' || n, true) from generate_series(0, 40) n",
    )
    assert sum(1 for (text,) in kept if text) <= 16
