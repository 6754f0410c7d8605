"""Which workers are idle, which are notified, and what it costs where none is idle."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from rota.testing import EmbeddedPostgres, find_binaries
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
)
from support.waiting import wait_until

ANY = ""

pytestmark = [pytest.mark.slow, pytest.mark.own_session]


class WaitingWorker:
    """A session that waits for jobs and writes down what notified it."""

    def __init__(self, db: Db, *queues: str, **arguments: Any) -> None:
        self.db = db
        self.arguments = {
            "queues": list(queues) or ["default"], "poll_interval": "1 hour", **arguments
        }  # fmt: skip
        self.names = {
            scalar(db, "select to_hex(hashtext(%s))", name) if name else "maintenance": name
            for name in (ANY, *self.arguments["queues"])
        }
        self.channels: list[str] = []
        self._heard: list[psycopg.Notify] = []
        db.add_notify_handler(self._heard.append)
        self.wait()

    def wait(self, **arguments: Any) -> Any:
        """Wait as a client does: listen to the channels, and claim if told to."""
        self.arguments |= arguments
        answer = one(self.db, "wait_for_jobs", **self.arguments)
        for channel in self.channels:
            if channel not in answer.channels:
                self.db.execute(f"unlisten {channel}")  # type: ignore[arg-type]
        for channel in answer.channels:
            self.db.execute(f"listen {channel}")  # type: ignore[arg-type]
        self.channels = answer.channels
        return answer

    def slots(self) -> dict[str, int]:
        """Return the number of the listen slot in each queue."""
        parts = [channel.split("_") for channel in self.channels]
        return {self.names[key]: int(slot) for _, key, slot in parts}

    def heard(self) -> list[str]:
        """Return the queue of each notification since the last time."""
        for _ in range(2):
            self.db.execute("select")  # with its answer comes what was sent before
        found = [self.names[n.channel.split("_")[1]] for n in self._heard]
        self._heard.clear()
        return sorted(found)

    def notified(self) -> list[str]:
        return [queue for queue in self.heard() if queue != ANY]


def locks(db: Db) -> int:
    return scalar(  # type: ignore[no-any-return]
        db,
        "select count(*) from pg_locks where locktype = 'advisory' and pid = %s",
        db.info.backend_pid,
    )


def settle(db: Db) -> None:
    """Wait until no transaction is under way that has an id, as an autovacuum may be."""
    while scalar(db, "select age(pg_snapshot_xmin(pg_current_snapshot())::xid)"):
        db.execute("select pg_sleep(0.01)")
    forget_slow_look(db)


def forget_slow_look(db: Db, until: int = 0) -> None:
    """Let the next look not wait because the last took long, or wait until then."""
    db.execute(
        """
        select set_config('rota.waiting',
            regexp_replace(w, '[0-9]+$', '') || case when %(until)s = 0 then 0 else (
                extract(epoch from rota.now()) * 1000000)::bigint + %(until)s end, false)
        from current_setting('rota.waiting', true) as w
        where w <> ''
        """,
        {"until": until},
    )


def look(db: Db, *queues: str, **arguments: Any) -> float:
    """Return the seconds until it has to look again, of a session that waits for long."""
    arguments = {"poll_interval": "1 hour", "queues": list(queues) or ["default"], **arguments}
    for _ in range(2):
        answer = one(db, "wait_for_jobs", **arguments)
        for channel in answer.channels:
            db.execute(f"listen {channel}")  # type: ignore[arg-type]
    settle(db)
    return one(db, "wait_for_jobs", **arguments).look_again_in.total_seconds()  # type: ignore[no-any-return]


def numbers(workers: list[WaitingWorker]) -> list[int]:
    """Return which of them were notified."""
    return [number for number, worker in enumerate(workers) if worker.notified()]


def test_wait_for_jobs_gives_the_lowest_free_slot_of_each_queue(db, connect):
    first, second = WaitingWorker(db, "a"), WaitingWorker(connect(), "a", "b")

    assert first.slots() == {ANY: 0, "a": 0}
    assert second.slots() == {ANY: 1, "a": 1, "b": 0}
    assert len({*first.channels, *second.channels}) == 5
    assert all(channel.startswith("rota_") for channel in first.channels)


def test_wait_for_jobs_again_moves_up_to_a_slot_that_was_left(db, connect):
    first, second = WaitingWorker(connect()), WaitingWorker(connect())
    one(first.db, "stop_waiting")

    before = second.slots()
    second.wait()

    assert (before["default"], second.slots()["default"]) == (1, 0)
    assert (locks(first.db), locks(second.db)) == (0, 4)


def test_wait_for_jobs_for_other_queues_leaves_those_of_before(db, connect):
    worker = WaitingWorker(connect(), "a", "b")
    worker.wait(queues=["b"])

    enqueue(db, queue="a")
    enqueue(db, queue="b")

    assert worker.heard() == ["b"]
    assert locks(worker.db) == 4


def test_wait_for_jobs_has_sixteen_slots_and_one_for_all_others(db, connect):
    workers = [WaitingWorker(connect()) for _ in range(19)]
    told = []

    for jobs in (1, 20):
        call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x"}] * jobs))
        told.append(numbers(workers))
    for number in (18, *range(16)):
        one(workers[number].db, "stop_waiting")
        told.append(numbers(workers))

    assert [worker.slots()["default"] for worker in workers] == [*range(16), 16, 16, 16]
    assert [ANY in worker.slots() for worker in workers] == [True] * 16 + [False] * 3
    assert told[:3] == [[0], list(range(16)), []]
    assert told[3:] == [[number] for number in range(1, 16)] + [[16, 17, 18]]


def test_those_who_share_a_slot_are_notified_where_nobody_else_waits(db, connect):
    others = connect()
    take_all_slots(others)
    workers = [WaitingWorker(connect(), job_types=["x"]) for _ in range(2)]
    others.execute("select pg_advisory_unlock_all()")

    enqueue(db, "y")
    told = numbers(workers)
    take_all_slots(others)
    workers[0].wait()

    assert told == [0, 1]
    assert numbers(workers) == []  # they tell nobody of a job of another type
    others.execute("select pg_advisory_unlock_all()")
    workers[0].wait()
    assert workers[0].slots() == {ANY: 0, "default": 0}
    assert (locks(workers[0].db), locks(workers[1].db)) == (4, 3)


def test_who_shares_a_slot_does_so_in_ten_queues_at_most(connect):
    queues = [f"q{n}" for n in range(12)]
    first = WaitingWorker(connect(), *queues)
    first.db.execute(
        "select pg_advisory_lock(1919907938 + s, hashtext(q)) "
        "from generate_series(1, 15) as s, unnest(%s::text[]) as q",
        [["", *queues]],
    )

    second = WaitingWorker(connect(), *queues)
    second.wait()
    settle(second.db)
    # It is not notified of jobs of the others, and so polls as often as who holds a slot.
    assert 9 * 3600 <= second.wait().look_again_in.total_seconds() <= 10 * 3600
    assert second.slots() == dict.fromkeys(queues[:10], 16)
    assert locks(second.db) == 1 + 2 * 10


def take_all_slots(db: Db) -> None:
    """Hold all listen slots of the queue default and of all queues."""
    db.execute(
        "select pg_advisory_lock(1919907938 + s, hashtext(q)) "
        "from generate_series(0, 15) as s, unnest(array['', 'default']) as q"
    )


def test_a_worker_that_had_no_slot_is_notified_once_it_has_one(db, connect):
    others, worker = connect(), WaitingWorker(connect())
    one(worker.db, "stop_waiting")
    take_all_slots(others)
    before = worker.wait().channels
    one(worker.db, "stop_waiting")
    others.execute("select pg_advisory_unlock_all()")

    worker.wait()
    enqueue(db)

    assert [channel[-3:] for channel in before] == ["_16"]
    assert worker.heard() == ["default"]
    assert locks(worker.db) == 4


@pytest.mark.parametrize("stops", [True, False])
def test_a_worker_gives_up_the_slot_that_a_rollback_left(connect, stops):
    others, worker = connect(), connect()
    take_all_slots(others)
    worker = WaitingWorker(worker)
    others.execute("select pg_advisory_unlock_all()")
    worker.db.execute("begin")
    one(worker.db, "wait_for_jobs")
    worker.db.execute("rollback")
    worker.wait()

    if stops:
        one(worker.db, "stop_waiting")
        assert locks(worker.db) == 0
    else:
        for _ in range(2):
            worker.wait(queues=["other"])
        assert WaitingWorker(others).slots()["default"] == 0


def test_a_worker_without_a_slot_does_not_read_the_locks_of_all_sessions(db, connect):
    take_all_slots(connect())
    worker = WaitingWorker(db)
    db.execute("select pg_advisory_unlock_all()")

    worker.wait()

    assert locks(db) == 0  # else it had found that its idle lock is gone


def test_wait_for_jobs_leaves_the_locks_of_the_application_alone(db):
    db.execute("select pg_advisory_lock(7), pg_advisory_lock(7, 8)")

    worker = WaitingWorker(db)
    one(db, "stop_waiting")
    one(db, "stop_waiting")

    assert locks(db) == 2
    worker.wait()
    assert locks(db) == 6


def test_a_stranger_that_keeps_the_idle_locks_keeps_no_worker_waiting(db, connect):
    stranger, session = connect(), connect()
    stranger.execute(
        "select pg_advisory_lock(1919907936, hashtext(q))"
        " from unnest(array['default', '']) as q"
    )
    session.execute("set statement_timeout = '20s'")

    worker = WaitingWorker(session)

    stranger.execute("select pg_advisory_unlock_all()")
    worker.wait()
    enqueue(db)
    assert worker.heard() == ["default"]


def test_wait_for_jobs_finds_the_locks_that_a_rollback_left(db):
    db.execute("begin")
    one(db, "wait_for_jobs")
    db.execute("rollback")

    WaitingWorker(db)
    one(db, "stop_waiting")

    assert locks(db) == 0


def test_wait_for_jobs_asks_for_a_claim_after_the_channels_were_listened_to(db):
    first = one(db, "wait_for_jobs", poll_interval="1 hour")
    for channel in first.channels:
        db.execute(f"listen {channel}")
    settle(db)
    second = one(db, "wait_for_jobs", poll_interval="1 hour")

    assert first.look_again_in.total_seconds() == 0
    assert 2700 <= second.look_again_in.total_seconds() <= 3600


def test_wait_for_jobs_lets_who_never_listens_poll(db):
    """As behind a pooler, where the session that listens is another."""
    waits = []
    for _ in range(3):
        waits.append(one(db, "wait_for_jobs", poll_interval="1 hour").look_again_in)
        settle(db)

    assert [wait.total_seconds() > 2000 for wait in waits] == [False, True, True]


def test_wait_for_jobs_asks_for_a_claim_after_a_change_if_anything_is_due(db):
    WaitingWorker(db)
    waits = []
    for _ in range(2):
        one(db, "stop_waiting")
        waits.append(one(db, "wait_for_jobs", poll_interval="1 hour").look_again_in)
        enqueue(db)

    assert waits[0].total_seconds() >= 2700
    assert waits[1].total_seconds() == 0


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
def test_wait_for_jobs_knows_whether_anything_is_due(db, arguments, is_due):
    enqueue(db, delay="1 h", priority=-5)
    WaitingWorker(db)
    one(db, "stop_waiting")

    enqueue(db, **arguments)

    again = one(db, "wait_for_jobs", poll_interval="10 s").look_again_in
    assert (again.total_seconds() == 0) is is_due


def test_wait_for_jobs_looks_again_while_a_writer_of_before_is_under_way(db, connect):
    """Its job may come without a notification, and between the last claim and the next wait."""
    reader = connect(autocommit=False)
    reader.execute("select 1")
    writer = connect(autocommit=False)
    enqueue(writer)
    began_at = time.monotonic()
    worker = WaitingWorker(db)
    later = connect(autocommit=False)
    enqueue(later)
    forget_slow_look(db)

    waits = [worker.wait().look_again_in.total_seconds()]
    longest = 3 * (time.monotonic() - began_at)
    db.execute("select pg_sleep(0.1)")
    forget_slow_look(db)
    waits.append(worker.wait().look_again_in.total_seconds())
    writer.rollback()
    older = "select pg_snapshot_xmin(pg_current_snapshot()) < %s::text::xid8"
    while scalar(db, older, scalar(later, "select pg_current_xact_id()::text")):
        pass
    forget_slow_look(db)
    waits.append(worker.wait().look_again_in.total_seconds())

    assert 0 <= waits[0] <= longest
    assert 0.3 <= waits[1] <= 3 * (time.monotonic() - began_at)
    assert waits[2] == 0
    # An analyze that the server has just begun by itself writes, too, and is soon over.
    wait_until(lambda: worker.wait().look_again_in.total_seconds() > 2000)


def test_only_the_first_of_a_queue_polls_as_often_as_it_was_told(connect):
    workers = [WaitingWorker(connect(), poll_interval="10 s") for _ in range(18)]

    waits = []
    for worker in workers:
        worker.wait()
        settle(worker.db)
        waits.append(worker.wait().look_again_in.total_seconds())

    assert 7.4 <= waits[0] <= 10
    assert all(29 <= wait <= 40 for wait in waits[1:4])
    assert [wait for wait in waits[4:16] if not 75 <= wait <= 100] == []
    assert [wait for wait in waits[16:] if not 225 <= wait <= 300] == []


@pytest.mark.parametrize(
    ("arguments", "is_due"),
    [
        ({}, True),
        ({"priority": 7}, True),
        ({"delay": "1 h"}, False),
        ({"queue": "other"}, False),
        ({"queue": "paused"}, False),
    ],
)
def test_a_look_without_a_claim_sees_all_that_is_due(db, arguments, is_due):
    """The call before has seen the job, or could not, and no claim was made since."""
    enqueue(db, queue="paused", delay="1 h")
    call(db, "pause_queue", queue="paused")
    enqueue(db, delay="1 h", priority=-5)
    enqueue(db, **arguments)
    queues = ("default", "paused")

    assert look(db, *queues) > 2000
    waits = [look(db, *queues, claimed=False) for _ in range(2)]

    assert [wait == 0 for wait in waits] == [is_due] * 2


def test_a_look_without_a_claim_asks_for_one_where_it_would_take_long(db):
    look(db)
    forget_slow_look(db, 20_000_000)

    assert one(db, "wait_for_jobs", claimed=False).look_again_in.total_seconds() == 0


def test_a_look_without_a_claim_asks_for_one_where_there_are_many_lanes(db):
    for priority in range(11):
        enqueue(db, delay="1 h", priority=priority)

    assert look(db, claimed=False) == 0


def test_the_first_worker_is_asked_to_tick_where_it_asks_seldom(db, connect, clock):
    clock.set("2031-03-01 12:00+00")
    call(db, "tick")
    first, second = WaitingWorker(connect()), WaitingWorker(connect())

    assert [s.wait(poll_interval="1 s").has_maintenance for s in (first, second)] == [False] * 2
    assert [s.wait(poll_interval="2 s").has_maintenance for s in (first, second)] == [
        True,
        False,
    ]
    polls = [s.wait(poll_interval="1 s", active=True) for s in (second, first)]
    assert [poll.has_maintenance for poll in polls] == [True, False]


def test_wait_for_jobs_says_whether_a_tick_would_do_anything(db, connect, clock):
    first = WaitingWorker(connect())
    clock.set("2031-03-01 12:00+00")
    worker = WaitingWorker(connect())
    fresh = worker.wait().has_maintenance
    one(db, "tick")
    done = worker.wait().has_maintenance
    running(db)
    clock.advance("2 minutes")

    assert (fresh, done, worker.wait().has_maintenance) == (True, False, True)
    assert first.wait().has_maintenance


def test_those_behind_the_first_worker_ask_seldom_whether_to_tick(db, connect, clock):
    clock.set("2031-03-01 12:00+00")
    call(db, "tick")
    first, *others = (WaitingWorker(connect(), poll_interval="1 s") for _ in range(3))
    before = [s.wait().has_maintenance for s in (first, *others)]
    running(db, lease="1 s")
    answers = []
    for _ in range(4):
        clock.advance("2 seconds")
        answers.append([s.wait().has_maintenance for s in (first, *others)])

    assert before == [False] * 3
    assert answers == [
        [True, False, False],
        [True, True, False],
        [True, True, False],
        [True, True, True],
    ]


def test_who_becomes_the_first_asks_at_once_whether_to_tick(connect, clock):
    clock.set("2031-03-01 12:00+00")
    workers = [WaitingWorker(connect(), poll_interval="1 s") for _ in range(5)]
    call(workers[0].db, "tick")
    assert [worker.wait().has_maintenance for worker in workers] == [False] * 5
    running(workers[0].db, lease="1 s")
    clock.advance("2 seconds")
    assert not workers[4].wait().has_maintenance

    for worker in workers[:4]:
        worker.db.close()

    wait_until(lambda: workers[4].wait().has_maintenance)


def test_a_worker_behind_the_first_asks_when_a_job_may_be_let_in(db, connect, clock):
    clock.set("2031-03-01 12:00+00")
    call(db, "tick")
    WaitingWorker(connect(), "other")
    worker = WaitingWorker(connect(), poll_interval="1 s")
    before = worker.wait().has_maintenance
    enqueue(db, limit_key="k", delay="1 s")
    clock.advance("1100 ms")
    due = worker.wait()

    assert (before, due.has_maintenance) == (False, True)
    assert due.look_again_in.total_seconds() == 0


def test_what_can_wait_is_looked_for_each_five_seconds(db, connect, clock):
    clock.set("2031-03-01 12:00+00")
    call(db, "tick")
    clock.advance("20 seconds")
    call(db, "tick")
    worker = WaitingWorker(connect(), poll_interval="1 s")
    before = worker.wait().has_maintenance
    call(db, "finish_job", **owner(running(db)))
    answers = []
    for _ in range(3):
        clock.advance("2 seconds")
        answers.append(worker.wait().has_maintenance)

    assert not before
    assert answers == [False, False, True]  # what ended is to be counted
    assert one(db, "tick").has_more is False


def test_wait_for_jobs_takes_no_transaction_id_and_writes_nothing(db):
    with db.transaction():
        call(db, "wait_for_jobs")
        call(db, "wait_for_jobs", active=True, job_types=["x"])
        call(db, "stop_waiting")

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


def test_enqueue_notifies_one_idle_worker(db, connect):
    workers = [WaitingWorker(connect()) for _ in range(3)]
    other = WaitingWorker(connect(), "other")

    enqueue(db)
    enqueue(db)

    assert numbers(workers) == [0]
    assert other.heard() == []


def test_enqueue_notifies_at_the_commit_and_once_for_a_transaction(db, connect):
    worker = WaitingWorker(connect())
    writer = connect(autocommit=False)
    for _ in range(10):
        enqueue(writer)

    early = worker.notified()
    writer.commit()

    assert (early, worker.notified()) == ([], ["default"])


def test_enqueue_notifies_nobody_where_no_worker_waits(db, connect):
    worker = WaitingWorker(connect())
    one(worker.db, "stop_waiting")
    worker.heard()

    enqueue(db)

    assert worker.heard() == []
    assert (locks(db), locks(worker.db)) == (0, 0)


def test_enqueue_leaves_no_lock_behind(db, connect):
    WaitingWorker(connect())
    poller = WaitingWorker(connect(), active=True)
    held = "select pid, objid, mode from pg_locks where locktype = 'advisory' order by 1, 2, 3"
    before = rows(db, held)

    enqueue(db)
    poller.wait(job_types=["y"])
    call(db, "enqueue_many", jobs=psycopg.types.json.Jsonb([{"job_type": "x"}] * 3))

    assert rows(db, held) == before


@pytest.mark.parametrize(
    ("arguments", "is_notified"),
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
def test_enqueue_notifies_for_what_is_due(db, connect, arguments, is_notified):
    worker = WaitingWorker(connect())

    enqueue(db, **arguments)

    assert bool(worker.notified()) is is_notified


def test_enqueue_many_notifies_as_many_as_there_are_due_jobs(db, connect):
    workers = [WaitingWorker(connect(), "a") for _ in range(5)] + [
        WaitingWorker(connect(), "b")
    ]
    jobs = [{"job_type": "x", "queue": "a"}] * 3
    jobs += [{"job_type": "x", "queue": "a", "delay": "1 h"}] * 2

    call(db, "enqueue_many", jobs=psycopg.types.json.Jsonb(jobs))

    assert numbers(workers) == [0, 1, 2]


def test_nobody_is_notified_while_one_polls_actively(db, connect):
    worker, poller = WaitingWorker(connect()), WaitingWorker(connect())
    answer = poller.wait(active=True)
    second = WaitingWorker(connect(), active=True)

    enqueue(db)

    assert answer.is_active
    assert answer.channels == []
    assert answer.look_again_in.total_seconds() <= 0.01
    assert not second.wait().is_active
    assert numbers([worker, poller, second]) == []
    poller.wait(active=False)
    enqueue(db)
    assert numbers([worker, poller, second]) == [0]


def test_an_active_poller_that_waits_again_looks_for_what_came_before(db, connect):
    poller = WaitingWorker(connect())
    poller.wait(active=True)
    enqueue(db)

    assert poller.wait(active=False).look_again_in.total_seconds() == 0
    assert locks(poller.db) == 4


def test_stop_waiting_hands_over_to_the_next_worker(connect):
    workers = [WaitingWorker(connect()) for _ in range(3)]

    one(workers[0].db, "stop_waiting")

    assert numbers(workers) == [1]
    workers[1].wait()
    assert workers[1].slots()["default"] == 0


def test_the_next_worker_finds_the_job_whose_producer_had_found_another(db, connect):
    """A producer looks; the holder of the slot leaves, the next moves up; it commits."""
    workers = [WaitingWorker(connect()) for _ in range(2)]
    writer = connect(autocommit=False)
    enqueue(writer)
    one(workers[0].db, "stop_waiting")
    woken = numbers(workers)

    waits = [workers[1].wait().look_again_in.total_seconds() for _ in range(2)]
    writer.commit()

    assert woken == [1]
    assert workers[1].slots()["default"] == 0
    assert waits[0] == 0
    assert waits[1] < 1


def test_a_worker_that_dies_is_not_notified(db, connect):
    workers = [WaitingWorker(connect()) for _ in range(2)]
    pid = workers[0].db.info.backend_pid
    scalar(db, "select pg_terminate_backend(%s, 5000)", pid)

    enqueue(db)

    assert workers[1].notified() == ["default"]


def test_wait_for_jobs_notifies_the_next_slot_of_a_job_of_another_type(db, connect):
    workers = [WaitingWorker(connect(), job_types=["x"]) for _ in range(4)]
    enqueue(db, "x", priority=3)
    for worker in workers:
        worker.heard()

    told = []
    for job_type in ("x", "y"):
        enqueue(db, job_type, priority=7)
        for worker in workers:
            worker.heard()
        for worker in (workers[1], workers[3]):
            worker.wait()
        told.append(numbers(workers))

    assert told == [[], [2]]
    workers[2].wait(job_types=None)
    assert numbers(workers) == []


def test_an_active_poller_notifies_the_first_of_a_job_of_another_type(db, connect):
    poller = WaitingWorker(connect(), job_types=["x"])
    poller.wait(active=True)
    workers = [WaitingWorker(connect()) for _ in range(2)]

    enqueue(db, "y")
    before = numbers(workers)
    poller.wait()

    assert (before, numbers(workers)) == ([], [0])


@pytest.mark.parametrize(
    ("arguments", "is_passed_on"),
    [
        ({"limit_key": "k"}, True),
        ({"limit_key": "k", "queue": "other"}, False),
        ({"delay": "1 h"}, False),
        ({"limit_key": "later", "delay": "1 h"}, False),
        ({"queue": "other"}, False),
    ],
)
def test_wait_for_jobs_passes_on_only_what_is_due_here(db, connect, arguments, is_passed_on):
    workers = [WaitingWorker(connect(), job_types=["x"]) for _ in range(2)]
    enqueue(db, "y", **arguments)
    call(db, "tick")
    for worker in workers:
        worker.heard()

    workers[0].wait()

    assert bool(workers[1].notified()) is is_passed_on


def test_wait_for_jobs_looks_no_further_than_at_the_first_job_of_another_type(db):
    rows(db, "select from rota.enqueue_many(%s)", Jsonb([{"job_type": "y"}] * 1000))
    call(db, "wait_for_jobs", job_types=["x"])
    read = "select pg_stat_get_xact_tuples_returned('rota.jobs_ready_idx'::regclass)"

    with db.transaction():
        before = scalar(db, read)
        call(db, "wait_for_jobs", job_types=["x"])
        was_read = scalar(db, read) - before

    assert 1 <= was_read <= 20


def test_what_is_due_soon_notifies_one_however_many_jobs_it_is(db, connect):
    workers = [WaitingWorker(connect()) for _ in range(3)]
    enqueue(db, delay="5 s")
    late = numbers(workers)
    jobs = [{"job_type": "x", "delay": "1 s"}] * 5
    call(db, "enqueue_many", jobs=psycopg.types.json.Jsonb(jobs))

    assert (late, numbers(workers)) == ([], [0])


NOTIFYING = {
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
    "tick": "update rota.job_definitions set next_run_at = '2020-01-01'; select rota.tick()",
}


@pytest.mark.parametrize("what", NOTIFYING)
def test_whatever_makes_a_job_due_notifies(db, connect, what):
    dead = running(db)
    call(db, "fail_job", **owner(dead), error="e", fatal=True)
    delayed = enqueue(db, delay="1 h")
    job = running(db)
    call(db, "schedule_job", name="s", schedule="every 1 hour", job_type="x")
    one(db, "tick")
    if what == "resume a queue":
        call(db, "pause_queue", queue="default")
    worker = WaitingWorker(connect())

    db.execute(
        NOTIFYING[what].format(
            dead=dead.job_id, delayed=delayed, running=job.job_id, token=job.lease_token
        )
    )

    assert worker.notified() == ["default"]


def test_the_end_of_a_job_notifies_for_the_next_of_its_key(db, connect):
    enqueue(db, ordering_key="k")
    enqueue(db, ordering_key="k", queue="far")
    (job,) = claim(db)
    near, far = WaitingWorker(connect()), WaitingWorker(connect(), "far")

    call(db, "finish_job", **owner(job))

    assert near.notified() == []
    assert far.notified() == ["far"]


def test_the_end_of_a_job_notifies_for_those_that_wait_for_it(db, connect):
    job = running(db)
    enqueue(db, queue="far", depends_on=[job.job_id])
    one(db, "tick")
    worker = WaitingWorker(connect(), "far")

    call(db, "finish_jobs", **owners(job))

    assert worker.notified() == ["far"]


def test_the_end_of_a_stage_notifies_for_the_next(db, connect):
    stages = [{"stage": s, "queue": q, "job_type": "x"} for s, q in ("an", "bf")]
    call(db, "define_pipeline", pipeline="p", stages=psycopg.types.json.Jsonb(stages))
    worker = WaitingWorker(connect(), "n", "f")
    call(db, "start_pipeline", pipeline="p")
    begun = worker.notified()
    (job,) = claim(db, queues=["n"])

    call(db, "finish_job", **owner(job))

    assert (begun, worker.notified()) == (["n"], ["f"])


def test_a_rerun_notifies_when_the_job_before_it_has_ended(db, connect):
    again = {"idempotency_key": "k", "on_conflict": "rerun"}
    job = running(db, **again)
    enqueue(db, **again)
    worker = WaitingWorker(connect())

    call(db, "finish_job", **owner(job))

    assert worker.notified() == ["default"]


def test_the_end_of_a_move_before_a_job_has_left_notifies(db, connect, unnumbered):
    call(db, "set_database_number", number=5)
    enqueue(db)
    call(db, "begin_queue_move", queue="default", database=6)
    worker = WaitingWorker(connect())

    call(db, "end_queue_move", queue="default")

    assert worker.notified() == ["default"]


def test_a_place_under_a_limit_notifies(db, connect):
    call(db, "set_limit", job_type="x", max_running=1)
    enqueue(db)
    enqueue(db)
    (job,) = claim(db, max_jobs=2)
    worker = WaitingWorker(connect())

    call(db, "finish_job", **owner(job))

    assert worker.notified() == ["default"]


def test_enqueue_says_nothing_where_wakeups_are_off(db, connect):
    worker = WaitingWorker(connect())
    with db.transaction():
        db.execute("set local rota.wakeups = off")
        enqueue(db)

    assert worker.heard() == []


ENDED_BY_AN_OPERATOR = {
    "cancel": "select rota.cancel_job({id})",
    "cancel many": "select from rota.act_on_jobs('cancel', '{{\"ids\": [{id}, {waiting}]}}')",
    "retry": "select rota.retry_job({id}, force => true)",
    "retry many": """select from rota.act_on_jobs(
        'retry', '{{"status": ["running", "queued"]}}', '{{"force": true}}')""",
}


@pytest.mark.parametrize("act", ENDED_BY_AN_OPERATOR)
def test_the_worker_of_a_running_job_is_told_what_an_operator_does(db, connect, act):
    listener, heard = connect(), []
    listener.add_notify_handler(lambda notify: heard.append(notify.payload))
    listener.execute("listen rota_running_jobs")
    job, waiting = running(db), enqueue(db)
    db.execute(f"select rota.cancel_job({enqueue(db)})")
    db.execute(f"select rota.retry_job({enqueue(db, delay='1 h')})")

    with db.transaction():
        db.execute("set local rota.wakeups = off")
        db.execute(f"select rota.cancel_job({job.job_id})")
    db.execute(ENDED_BY_AN_OPERATOR[act].format(id=job.job_id, waiting=waiting))

    for _ in range(2):
        listener.execute("select")
    assert heard == [str(job.job_id)]


def test_very_many_running_jobs_are_told_in_messages_that_are_short_enough(db, connect):
    listener, heard = connect(), []
    listener.add_notify_handler(lambda notify: heard.append(notify.payload))
    listener.execute("listen rota_running_jobs")
    db.execute("alter sequence rota.jobs_id_seq restart with 9000000000000000000")
    rows(db, "select from rota.enqueue_many(%s)", Jsonb([{"job_type": "x"}] * 1000))
    ids = [job.job_id for job in claim(db, max_jobs=1000)]

    db.execute("select from rota.act_on_jobs('cancel', '{\"status\": \"running\"}')")

    for _ in range(2):
        listener.execute("select")
    assert sorted(int(n) for text in heard for n in text.split()) == ids
    assert max(map(len, heard)) < 8000


def test_wait_for_jobs_refuses_every_bad_argument_by_name(db):
    for bad in (None, [], ["a", None], ["-"], [""], [["a"]]):
        with refused("queues"):
            call(db, "wait_for_jobs", queues=bad)
    for bad in ([], ["a", None]):
        with refused("job_types"):
            call(db, "wait_for_jobs", job_types=bad)
    for bad in (None, "0", "-1 s", "61 min"):
        with refused("poll_interval"):
            call(db, "wait_for_jobs", poll_interval=bad)
    for flag in ("active", "claimed"):
        with refused(flag):
            call(db, "wait_for_jobs", **{flag: None})


def test_wait_for_jobs_takes_the_first_hundred_queues(db):
    queues = [f"q{number}" for number in range(300)]

    assert len(one(db, "wait_for_jobs", queues=queues).channels) == 101
    one(db, "stop_waiting")
    assert locks(db) == 0


def test_nothing_is_due_in_an_empty_queue_nor_what_was_refused_or_is_late(db):
    waits = [look(db)]
    enqueue(db)
    enqueue(db, delay="61 min")
    enqueue(db, delay="5 s", queue="other")
    waits.append(look(db))

    assert all(wait > 2000 for wait in waits)


def test_what_is_due_next_is_the_first_of_all_priorities_and_queues(db):
    for queue, priority, seconds in (("a", 1, 40), ("a", 5, 20), ("b", 9, 30), ("c", 1, 10)):
        enqueue(db, queue=queue, priority=priority, delay=f"{seconds} s")
        enqueue(db, queue=queue, priority=priority)

    waits = [look(db, *queues) for queues in ("a", "b", "ab", "ba")]

    assert waits == pytest.approx([20, 30, 20, 20], abs=5)


def test_a_retry_is_due_next(db):
    enqueue(db, backoff=psycopg.types.json.Jsonb({"kind": "fixed", "base_seconds": 20}))
    (job,) = claim(db)
    call(db, "fail_job", **owner(job), error="e")

    assert look(db) == pytest.approx(20, abs=5)


@pytest.mark.parametrize("bound", [{"queue": "default"}, {"job_type": "x"}, {"limit_key": "k"}])
def test_the_next_start_at_a_rate_is_due_next(db, clock, bound):
    clock.set("2026-01-12 10:00:01+00")  # not where one cell of the rate ends
    call(db, "set_limit", **bound, max_starts=3, per="1 minute")
    for _ in range(2):
        enqueue(db, "x", limit_key="k")
    assert len(claim(db)) == 1
    for _ in range(3):
        assert claim(db) == []
        call(db, "tick")

    assert 0 < look(db) <= 20


def test_a_later_job_of_a_line_is_due_next_in_its_queue(db):
    enqueue(db, limit_key="k", delay="20 s")
    for _ in range(2):
        call(db, "tick")

    assert look(db) == pytest.approx(20, abs=5)
    assert look(db, "other") > 2000


def test_the_time_of_a_schedule_is_due_next_in_its_queue(db):
    call(db, "schedule_job", name="s", schedule="every 1 day", job_type="x")
    call(db, "schedule_job", name="t", schedule="every 20 seconds", job_type="x")

    assert look(db) == pytest.approx(20, abs=5)
    assert look(db, "other") > 2000


@pytest.mark.parametrize("bound", [None, {"queue": "default"}, {"limit_key": "k"}])
def test_what_came_due_since_the_call_before_is_told_once(db, clock, bound):
    clock.set("2026-01-12 10:00+00")
    if bound is None:
        enqueue(db, delay="2 s")
    else:
        call(db, "set_limit", **bound, max_starts=1, per="2 s")
        for _ in range(2):
            enqueue(db, limit_key="k")
        assert len(claim(db)) == 1
    look(db)
    clock.advance(timedelta(seconds=3))

    settle(db)
    waits = [
        one(db, "wait_for_jobs", poll_interval="1 hour").look_again_in.total_seconds()
        for _ in range(2)
    ]

    assert waits[0] == 0
    assert waits[1] > 2000


def test_what_comes_due_all_the_time_is_looked_for_every_ten_milliseconds(db, clock):
    clock.set("2026-01-12 10:00+00")
    for n in range(3):
        enqueue(db, delay=f"{10 + n} ms")
    look(db)
    clock.advance(timedelta(milliseconds=1))
    first = one(db, "wait_for_jobs", poll_interval="1 hour").look_again_in

    assert first.total_seconds() == 0.009
    clock.advance(timedelta(milliseconds=9))
    second = one(db, "wait_for_jobs", poll_interval="1 hour").look_again_in
    assert second.total_seconds() == 0.001
    clock.advance(timedelta(milliseconds=1))
    third = one(db, "wait_for_jobs", poll_interval="1 hour").look_again_in
    assert third.total_seconds() == 0.009


def test_where_a_look_takes_long_the_next_is_later(db):
    enqueue(db, delay="5 s")
    look(db)
    told = []
    for until in (20_000_000, 0):
        forget_slow_look(db, until)
        told.append(one(db, "wait_for_jobs", poll_interval="1 hour").look_again_in)

    assert [wait.total_seconds() for wait in told] == pytest.approx([20, 5], abs=3)


@pytest.mark.parametrize("garbage", ["", "x", "1 2 3", "1 2 3 4 5", "9" * 30, "-1 0 0 0"])
def test_wait_for_jobs_takes_a_setting_that_is_not_its_own_for_none(db, garbage):
    look(db)
    db.execute("select set_config('rota.waiting', %s, false)", [garbage])

    assert look(db) > 2000


def test_nothing_is_due_next_in_a_paused_queue(db):
    enqueue(db, delay="20 s")
    enqueue(db)
    call(db, "pause_queue", queue="default")

    assert look(db) > 2000


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
        worker = WaitingWorker(sleeping)

        enqueue(db)
        heard = worker.notified()
        fill(filler, 0.5)
        enqueue(db)
        quiet = worker.notified()
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            fill(filler, 2.0)
        enqueue(db)

        assert (heard, quiet) == (["default"], [])
        assert scalar(db, "select count(*) from rota.jobs") == 3
        for connection in connections:
            connection.close()


def test_claim_that_turned_many_away_has_somebody_look_again(db, connect):
    """Else what can start behind them would wait for the next poll."""
    for _ in range(105):
        enqueue(db, "x")
    other = enqueue(db, "y")
    call(db, "set_limit", job_type="x", max_running=0)
    call(db, "tick")
    worker = WaitingWorker(connect())
    worker.heard()

    assert claim(db) == []
    assert worker.notified() == ["default"]
    assert [job.job_id for job in claim(db)] == [other]
    assert worker.notified() == []
