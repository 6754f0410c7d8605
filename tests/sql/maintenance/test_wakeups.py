"""Who sleeps, who is rung, and what it costs where nobody does."""

from __future__ import annotations

import os

import psycopg
import pytest

from rota._embedded import EmbeddedPostgres, find_binaries
from sql.helpers import (
    Db,
    call,
    claim,
    enqueue,
    one,
    owner,
    owners,
    refused,
    rows,
    running,
    scalar,
    value,
)

NOTES = ""

pytestmark = pytest.mark.own_session


class Sleeper:
    """A session that waits at its doors and writes down who rang."""

    def __init__(self, db: Db, *queues: str, is_on_watch: bool = False) -> None:
        self.db = db
        self.queues = list(queues) or ["default"]
        self.doors = {
            door.queue: door
            for door in call(db, "wait_for_jobs", queues=self.queues, is_on_watch=is_on_watch)
        }
        self._heard: list[psycopg.Notify] = []
        db.add_notify_handler(self._heard.append)
        for door in self.doors.values():
            if door.channel is not None:
                db.execute(f'listen "{door.channel}"')  # type: ignore[arg-type]

    def heard(self) -> list[tuple[str, str]]:
        """Return the queue and the message of each ring since the last time."""
        for _ in range(2):
            self.db.execute("select")  # with its answer comes what was sent before
        names = {door.channel: queue for queue, door in self.doors.items()}
        found = [(names[n.channel], n.payload) for n in self._heard]
        self._heard.clear()
        return sorted(found)

    def rung(self) -> list[str]:
        return [queue for queue, _ in self.heard() if queue != NOTES]


def numbers(sleepers: list[Sleeper]) -> list[int]:
    """Return which of them were rung."""
    return [number for number, sleeper in enumerate(sleepers) if sleeper.rung()]


def test_wait_for_jobs_gives_the_lowest_free_door_of_each_queue(db, connect):
    first, second = Sleeper(db, "a"), Sleeper(connect(), "a", "b")

    assert {q: d.is_first for q, d in first.doors.items()} == {"": True, "a": True}
    assert {q: d.is_first for q, d in second.doors.items()} == {
        "": False, "a": False, "b": True
    }  # fmt: skip
    channels = [d.channel for s in (first, second) for d in s.doors.values()]
    assert len(set(channels)) == 5
    assert all(channel.startswith("rota_") for channel in channels)


def test_wait_for_jobs_again_moves_up_to_a_door_that_was_left(db, connect):
    first, second = Sleeper(connect()), Sleeper(connect())
    call(first.db, "stop_waiting")

    again = Sleeper(second.db)

    assert (second.doors["default"].is_first, again.doors["default"].is_first) == (False, True)
    assert scalar(db, "select count(*) from pg_locks where locktype = 'advisory'") == 4


def test_wait_for_jobs_has_sixteen_doors_and_no_seat_for_more(connect):
    sleepers = [Sleeper(connect()) for _ in range(18)]

    channels = [[d.channel for d in sleeper.doors.values()] for sleeper in sleepers]
    assert all(all(some) for some in channels[:16])
    assert channels[16:] == [[None, None], [None, None]]


def test_wait_for_jobs_is_sure_unless_a_writer_is_under_way(db, connect):
    reader = connect(autocommit=False)
    reader.execute("select 1")
    alone = Sleeper(db).doors["default"].is_sure
    writer = connect(autocommit=False)
    enqueue(writer)

    assert alone
    assert not Sleeper(db).doors["default"].is_sure
    writer.commit()
    assert Sleeper(db).doors["default"].is_sure


@pytest.mark.parametrize(
    ("arguments", "is_due"),
    [
        ({}, True),
        ({"priority": 7}, True),
        ({"delay": "1 h"}, False),
        ({"queue": "other"}, False),
        ({"limit_key": "k"}, True),
    ],
)
def test_wait_for_jobs_says_whether_anything_is_due(db, arguments, is_due):
    enqueue(db, delay="1 h", priority=-5)

    enqueue(db, **arguments)

    assert Sleeper(db).doors["default"].is_due is is_due


def test_wait_for_jobs_says_whether_a_tick_would_do_anything(db, clock):
    clock.set("2031-03-01 12:00+00")
    fresh = Sleeper(db).doors[NOTES].has_upkeep
    one(db, "tick")
    done = Sleeper(db).doors[NOTES].has_upkeep
    running(db)
    clock.advance("2 minutes")

    assert (fresh, done, Sleeper(db).doors[NOTES].has_upkeep) == (True, False, True)


def test_wait_for_jobs_takes_no_transaction_id_and_writes_nothing(db):
    with db.transaction():
        call(db, "wait_for_jobs")
        call(db, "wait_for_jobs", is_on_watch=True)
        call(db, "stop_waiting")
        call(db, "ring_others", job_types=["x"])

        assert scalar(db, "select pg_current_xact_id_if_assigned()") is None


def test_an_idle_tick_claim_and_heartbeat_take_no_transaction_id(db):
    one(db, "tick")
    one(db, "tick")
    for query in (
        "select from rota.tick()",
        "select from rota.claim_jobs('w', '{default,other}', 10)",
        "select from rota.heartbeat_jobs('{}', '{}')",
    ):
        done = db.execute(
            f"{query}; select pg_current_xact_id_if_assigned()"  # type: ignore[arg-type]
        )
        while done.nextset():
            pass
        assert done.fetchall() == [(None,)], query


def test_a_tick_is_recorded_every_five_minutes_while_nothing_happens(db, clock):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    lags = []
    for _ in range(14):
        clock.advance("30 s")
        db.execute("select from rota.tick()", prepare=False)
        lags.append(scalar(db, "select extract(epoch from lag)::int from rota.ticker_health"))

    assert lags == [0, 0, 30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 0, 30]


def test_a_tick_is_recorded_soon_after_something_happened(db, clock):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    clock.advance("2 minutes")
    one(db, "tick")
    running(db)
    clock.advance("2 minutes")

    assert one(db, "tick").jobs_swept == 1
    assert scalar(db, "select lag from rota.ticker_health").total_seconds() == 0


def test_enqueue_rings_one_of_those_who_sleep(db, connect):
    sleepers = [Sleeper(connect()) for _ in range(3)]
    other = Sleeper(connect(), "other")

    enqueue(db)
    enqueue(db)

    assert numbers(sleepers) == [0]
    assert other.heard() == []


def test_enqueue_rings_at_the_commit_and_once_for_a_transaction(db, connect):
    sleeper = Sleeper(connect())
    writer = connect(autocommit=False)
    for _ in range(10):
        enqueue(writer)

    early = sleeper.rung()
    writer.commit()

    assert (early, sleeper.rung()) == ([], ["default"])


def test_enqueue_rings_nobody_where_nobody_sleeps(db, connect):
    sleeper = Sleeper(connect())
    call(sleeper.db, "stop_waiting")

    enqueue(db)

    assert sleeper.heard() == []
    assert rows(db, "select from pg_locks where locktype = 'advisory'") == []


def test_enqueue_leaves_no_lock_behind(db, connect):
    Sleeper(connect())
    watcher = Sleeper(connect(), is_on_watch=True)
    held = "select pid, objid, mode from pg_locks where locktype = 'advisory' order by 1, 2, 3"
    before = rows(db, held)

    enqueue(db)
    call(watcher.db, "ring_others", job_types=["y"])
    call(db, "enqueue_many", jobs=psycopg.types.json.Jsonb([{"job_type": "x"}] * 3))

    assert rows(db, held) == before


@pytest.mark.parametrize(
    ("arguments", "is_rung"),
    [
        ({"delay": "1 minute"}, False),
        ({"run_at": "2126-01-01"}, False),
        ({"delay": "0"}, True),
        ({"run_at": "2020-01-01"}, True),
        ({"idempotency_key": "k", "on_conflict": "replace"}, True),
        ({"idempotency_key": "k", "on_conflict": "replace", "delay": "1 h"}, False),
        ({"limit_key": "k"}, True),
    ],
)
def test_enqueue_rings_for_what_is_due(db, connect, arguments, is_rung):
    sleeper = Sleeper(connect())

    enqueue(db, **arguments)

    assert bool(sleeper.rung()) is is_rung


def test_enqueue_many_rings_as_many_as_there_are_due_jobs(db, connect):
    sleepers = [Sleeper(connect(), "a") for _ in range(5)] + [Sleeper(connect(), "b")]
    jobs = [{"job_type": "x", "queue": "a"}] * 3
    jobs += [{"job_type": "x", "queue": "a", "delay": "1 h"}] * 2

    call(db, "enqueue_many", jobs=psycopg.types.json.Jsonb(jobs))

    assert numbers(sleepers) == [0, 1, 2]


def test_nobody_is_rung_while_somebody_is_on_watch(db, connect):
    sleeper, watcher = Sleeper(connect()), Sleeper(connect(), is_on_watch=True)
    second = Sleeper(connect(), is_on_watch=True)

    enqueue(db)

    assert watcher.doors["default"].has_watch
    assert not second.doors["default"].has_watch
    assert numbers([sleeper, watcher, second]) == []
    call(watcher.db, "wait_for_jobs")
    enqueue(db)
    assert numbers([sleeper, watcher, second]) == [0]


def test_stop_waiting_hands_over_to_the_next_sleeper(connect):
    sleepers = [Sleeper(connect()) for _ in range(3)]

    call(sleepers[0].db, "stop_waiting")

    assert numbers(sleepers) == [1]
    assert Sleeper(sleepers[1].db).doors["default"].is_first


def test_a_sleeper_that_dies_is_not_rung(db, connect):
    sleepers = [Sleeper(connect()) for _ in range(2)]
    pid = sleepers[0].db.info.backend_pid
    scalar(db, "select pg_terminate_backend(%s, 5000)", pid)

    enqueue(db)

    assert sleepers[1].rung() == ["default"]


def test_ring_others_rings_for_types_that_the_caller_does_not_take(db, connect):
    sleepers = [Sleeper(connect()) for _ in range(3)]
    enqueue(db, "x", priority=3)
    for sleeper in sleepers:
        sleeper.heard()

    mine = value(sleepers[0].db, "ring_others", job_types=["x"])
    none = numbers(sleepers)
    enqueue(db, "y", priority=7)
    for sleeper in sleepers:
        sleeper.heard()

    assert (mine, none) == (False, [])
    assert value(sleepers[0].db, "ring_others", job_types=["x"])
    assert [sleeper.heard() for sleeper in sleepers] == [
        [], [("default", "other")], [("default", "other")]
    ]  # fmt: skip
    assert not value(sleepers[0].db, "ring_others")


def test_ring_others_knows_what_stands_in_lines(db, connect):
    enqueue(db, "y", limit_key="k")
    enqueue(db, "y", limit_key="later", queue="other", delay="1 h")
    call(db, "tick")

    assert value(db, "ring_others", job_types=["x"])
    assert not value(db, "ring_others", job_types=["y"])
    assert not value(db, "ring_others", queues=["other"], job_types=["x"])


def test_ring_others_knows_only_what_is_due(db, connect):
    enqueue(db, "y", delay="1 h")
    enqueue(db, "y", queue="other")

    assert not value(db, "ring_others", job_types=["x"])


def test_what_is_due_soon_rings_one_however_many_jobs_it_is(db, connect):
    sleepers = [Sleeper(connect()) for _ in range(3)]
    enqueue(db, delay="5 s")
    late = numbers(sleepers)
    jobs = [{"job_type": "x", "delay": "1 s"}] * 5
    call(db, "enqueue_many", jobs=psycopg.types.json.Jsonb(jobs))

    assert (late, numbers(sleepers)) == ([], [0])


RINGING = {
    "enqueue for soon": "select rota.enqueue('x', delay => '1 s')",
    "enqueue many for soon": (
        """select rota.enqueue_many('[{{"job_type": "x", "delay": "1 s"}}]')"""
    ),
    "snooze a little": "select rota.snooze_job({running}, {token}, '1 s')",
    "fail with a short backoff": (
        "select from rota.fail_job({running}, {token}, error => 'e', retry_in => '1 s')"
    ),
    "retry a dead job": "select rota.retry_job({dead})",
    "retry a waiting job": "select rota.retry_job({delayed})",
    "reschedule": "select rota.reschedule_job({delayed}, delay => '0')",
    "resume a queue": "select rota.resume_queue('default')",
    "release": "select from rota.release_jobs('{{{running}}}', '{{{token}}}')",
    "snooze": "select rota.snooze_job({running}, {token}, '0')",
    "run a schedule": "select rota.run_schedule_now('s')",
    "fire": "update rota.job_definitions set next_run_at = '2020-01-01'; select rota.tick()",
}


@pytest.mark.parametrize("what", RINGING)
def test_whatever_makes_a_job_due_rings(db, connect, what):
    dead = running(db)
    call(db, "fail_job", **owner(dead), error="e", is_fatal=True)
    delayed = enqueue(db, delay="1 h")
    job = running(db)
    call(db, "schedule_job", name="s", schedule="every 1 hour", job_type="x")
    one(db, "tick")
    if what == "resume a queue":
        call(db, "pause_queue", queue="default")
    sleeper = Sleeper(connect())

    db.execute(
        RINGING[what].format(
            dead=dead.job_id, delayed=delayed, running=job.job_id, token=job.lease_token
        )
    )

    assert sleeper.rung() == ["default"]


def test_the_end_of_a_job_rings_for_the_next_of_its_key(db, connect):
    enqueue(db, ordering_key="k")
    enqueue(db, ordering_key="k", queue="far")
    (job,) = claim(db)
    near, far = Sleeper(connect()), Sleeper(connect(), "far")

    call(db, "finish_job", **owner(job))

    assert near.heard() == []
    assert far.rung() == ["far"]


def test_the_end_of_a_job_rings_for_those_that_wait_for_it(db, connect):
    job = running(db)
    enqueue(db, queue="far", after=[job.job_id])
    one(db, "tick")
    sleeper = Sleeper(connect(), "far")

    call(db, "finish_jobs", **owners(job))

    assert sleeper.rung() == ["far"]


def test_the_end_of_a_stage_rings_for_the_next(db, connect):
    stages = [{"stage": s, "queue": q, "job_type": "x"} for s, q in ("an", "bf")]
    call(db, "define_pipeline", pipeline="p", stages=psycopg.types.json.Jsonb(stages))
    sleeper = Sleeper(connect(), "n", "f")
    call(db, "start_pipeline", pipeline="p")
    begun = sleeper.rung()
    (job,) = claim(db, queues=["n"])

    call(db, "finish_job", **owner(job))

    assert (begun, sleeper.rung()) == (["n"], ["f"])


def test_a_rerun_rings_when_the_job_before_it_has_ended(db, connect):
    again = {"idempotency_key": "k", "on_conflict": "rerun"}
    job = running(db, **again)
    enqueue(db, **again)
    sleeper = Sleeper(connect())

    call(db, "finish_job", **owner(job))

    assert sleeper.rung() == ["default"]


def test_a_place_under_a_limit_rings(db, connect):
    call(db, "set_limit", job_type="x", max_running=1)
    enqueue(db)
    enqueue(db)
    (job,) = claim(db, max_jobs=2)
    sleeper = Sleeper(connect())

    call(db, "finish_job", **owner(job))

    assert (NOTES, "") in sleeper.heard()


def test_enqueue_says_nothing_where_wakeups_are_off(db, connect):
    sleeper = Sleeper(connect())
    with db.transaction():
        db.execute("set local rota.wakeups = off")
        enqueue(db)

    assert sleeper.heard() == []


def test_wait_for_jobs_refuses_every_bad_argument_by_name(db):
    for function in ("wait_for_jobs", "stop_waiting", "ring_others", "next_due_in"):
        for bad in (None, [], ["a", None], ["-"], [""], [["a"]]):
            with refused("queues"):
                call(db, function, queues=bad, **(
                    {"job_types": ["x"]} if function == "ring_others" else {}
                ))  # fmt: skip
    with refused("is_on_watch"):
        call(db, "wait_for_jobs", is_on_watch=None)
    with refused("job_types"):
        call(db, "ring_others", job_types=[])


def test_wait_for_jobs_takes_the_first_hundred_queues(db):
    queues = [f"q{number}" for number in range(300)]

    assert len(call(db, "wait_for_jobs", queues=queues)) == 101
    call(db, "stop_waiting", queues=queues)


def fill(db: Db, share: float) -> None:
    """Fill the queue of messages to more than *share*, or until the server refuses."""
    while scalar(db, "select pg_notification_queue_usage()") <= share:
        db.execute("select pg_notify('spam', repeat('x', 7900))")


def test_enqueue_commits_though_somebody_has_filled_the_queue_of_messages(admin, psql, sql_dir):
    """A session listens and idles in a transaction, so no message is ever forgotten."""
    if admin.info.server_version < 170000:
        pytest.skip("the queue of this server holds 8 GB")
    bindir, _ = find_binaries(os.environ.get("ROTA_PG_BINDIR"))
    settings = ["max_notify_queue_pages=64"]
    with EmbeddedPostgres(bindir=bindir, settings=settings) as server:
        psql(server.url("postgres"), "-f", sql_dir / "install.sql")
        connections = [psycopg.connect(server.url("postgres"), autocommit=True) for _ in "1234"]
        idler, filler, sleeping, db = connections
        idler.execute("listen spam")
        idler.execute("begin")
        idler.execute("select 1")
        sleeper = Sleeper(sleeping)

        enqueue(db)
        heard = sleeper.rung()
        fill(filler, 0.5)
        enqueue(db)
        quiet = sleeper.rung()
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            fill(filler, 2.0)
        enqueue(db)

        assert (heard, quiet) == (["default"], [])
        assert scalar(db, "select count(*) from rota.jobs") == 3
        for connection in connections:
            connection.close()
