"""Queues that move: each job is in one database, once and in order, and late callers are told.

A mover is played by its calls, so that it can end after each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from races.harness import Session
from races.instrument import GATE
from rota.testing.server import EmbeddedPostgres
from sql.helpers import (
    call,
    claim,
    enqueue,
    one,
    owner,
    poison,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    value,
)
from support.mutation import mutate
from support.waiting import wait_until

Db = psycopg.Connection[Any]
pytestmark = [pytest.mark.own_session, pytest.mark.slow]


@pytest.fixture
def there(admin: Db, template: str, server: EmbeddedPostgres, db: Db) -> Iterator[Db]:
    """Another database, of number 6, while this one has 5; its sequence is far behind."""
    admin.execute(f"create database moved template {template}".encode())
    with psycopg.connect(server.url("moved"), autocommit=True) as other:
        value(other, "set_database_number", number=6)
        value(db, "set_database_number", number=5)
        db.execute("select nextval('rota.jobs_id_seq') from generate_series(1, 1000)")
        yield other
    admin.execute("drop database moved with (force)")


def begin(db: Db, there: Db, queue: str = "q") -> int:
    move_id = value(db, "begin_queue_move", queue=queue, database=6)
    receive(there, move_id, queue=queue)
    return move_id  # type: ignore[no-any-return]


def receive(
    there: Db, move_id: int, jobs: str = "[]", settle_above: int | None = None, **others: Any
) -> list[Any]:
    arguments = {"from_database": 5, "queue": "q", "jobs": jobs, **others}
    return call(there, "receive_moves", move_id=move_id, settle_above=settle_above, **arguments)


def take_out(db: Db, move_id: int) -> None:
    """Take jobs out of the live table; the first call sees which transactions there are."""
    for _ in range(2):
        assert one(db, "take_moves", move_id=move_id).job_ids == []


def taken(db: Db, move_id: int) -> list[int]:
    """What the next transaction would send."""
    with db.transaction(force_rollback=True):
        return one(db, "take_moves", move_id=move_id).job_ids  # type: ignore[no-any-return]


def send(there: Db, move_id: int, batch: Any, **others: Any) -> list[dict[str, Any]]:
    received = receive(there, move_id, batch.jobs, batch.settle_above, **others)
    endings: list[dict[str, Any]] = [{} for _ in batch.job_ids]
    for row in received:
        endings[row.ordinal - 1] = row._asdict()
    return endings


def end(db: Db, move_id: int, job_ids: list[int], endings: list[dict[str, Any]]) -> None:
    value(db, "end_moves", move_id=move_id, job_ids=job_ids, endings=json.dumps(endings))


def step(db: Db, there: Db, move_id: int, **others: Any) -> Any:
    """What a mover does in one transaction; return what it has taken."""
    with db.transaction():
        batch = one(db, "take_moves", move_id=move_id)
        if batch.jobs is not None:
            end(db, move_id, batch.job_ids, send(there, move_id, batch, **others))
    return batch


def carry(db: Db, there: Db, move_id: int, **others: Any) -> str:
    """Carry all that can go, but settle nothing; return the state."""
    step(db, there, move_id, **others)  # sees which transactions there are
    for _ in range(50):
        if not step(db, there, move_id, **others).has_more or state(db) == "settling":
            return state(db)
    pytest.fail("there is always more to carry")


def state(db: Db) -> str:
    query = "select state from rota.queue_moves where queue = 'q'"
    return scalar(db, query)  # type: ignore[no-any-return]


def settle(db: Db, there: Db, move_id: int, **others: Any) -> None:
    carry(db, there, move_id, **others)
    step(db, there, move_id, **others)
    assert state(db) == state(there) == "settled"


def jobs(db: Db) -> list[tuple[Any, ...]]:
    query = "select id, job_type, status, attempts, lease_token from rota.jobs order by id"
    return [tuple(row) for row in rows(db, query)]


def test_jobs_keep_what_they_are(db, there):
    plain = enqueue(db, queue="q", payload={"a": 1}, priority=3, delay="1 hour",
        idempotency_key="k", limit_key="l", headers={"h": "v"}, lease="7 s")  # fmt: skip
    failed = enqueue(db, "y", queue="q", max_attempts=5)
    (job,) = claim(db, queues=["q"])
    value(db, "fail_job", job_id=job.job_id, lease_token=job.lease_token, error="no")
    columns = (
        "select id, job_type, payload, priority, run_at, idempotency_key, limit_key, headers,"
        " lease, max_attempts, attempts, lease_token, last_error, status, created_at"
        " from rota.jobs order by id"
    )
    before = rows(db, columns)

    settle(db, there, begin(db, there))

    assert [job.id for job in before] == [plain, failed]
    assert rows(there, columns) == before
    assert jobs(db) == []


@pytest.mark.parametrize("ordering_key", [None, "o"])
def test_a_job_goes_with_what_it_is_to_run_with(db, there, connect, ordering_key):
    job = {"queue": "q", "idempotency_key": "k", "ordering_key": ordering_key}
    job_id = enqueue(db, **job)
    with (other := connect()).transaction(force_rollback=True):
        claim(other, queues=["q"])
        assert enqueue(db, **job, on_conflict="rerun", payload={"v": 2}) == job_id

    move_id = begin(db, there)
    carry(db, there, move_id)
    one(db, "tick")
    settle(db, there, move_id)

    assert [row.payload for row in rows(there, "select payload from rota.jobs")] == [{"v": 2}]


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("ordering_keys", [[None] * 3, ["a", "b", "c"]])
def test_retries_wait_for_the_budget_there(db, there, ordering_keys, is_back):
    """Also of jobs that had not arrived at first, as the other database had no room."""
    for each in (db, there):
        value(each, "set_queue", queue="q", retry_budget={"per_minute": 1, "percent": 0})
    ids = [enqueue(db, queue="q", ordering_key=key) for key in ordering_keys]
    for job in claim(db, queues=["q"], max_jobs=3):
        failure = {"error": "no", "retry_in": "0 s"}
        value(db, "fail_job", job_id=job.job_id, lease_token=job.lease_token, **failure)
    retried = value(db, "retry_job", job_id=ids[0])

    move_id = begin(db, there)
    if is_back:
        take_out(db, move_id)
        with db.transaction():
            batch = one(db, "take_moves", move_id=move_id)
            end(db, move_id, batch.job_ids, [{"error_code": "55P03"}] * 3)
    settle(db, there, move_id)

    assert [job[2] for job in jobs(there)] == [retried, "failed", "failed"]
    assert [job.job_id for job in claim(there, queues=["q"], max_jobs=3)] == ids[:1]
    one(there, "tick")
    assert [job.job_id for job in claim(there, queues=["q"], max_jobs=3)] == ids[1:2]


def test_a_line_goes_in_order_behind_a_job_that_runs(db, there):
    line = [enqueue(db, queue="q", ordering_key="k") for _ in range(4)]
    (head,) = claim(db, queues=["q"])

    move_id = begin(db, there)
    assert carry(db, there, move_id) == "moving"
    assert jobs(there) == []
    value(db, "finish_job", job_id=head.job_id, lease_token=head.lease_token)
    settle(db, there, move_id)

    ran = []
    while found := claim(there, queues=["q"]):
        ran.append(found[0].job_id)
        value(there, "finish_job", job_id=ran[-1], lease_token=found[0].lease_token)
    assert ran == line[1:]


def test_the_head_of_a_line_goes_before_a_retried_job_of_another_queue(db, there):
    """That has a lower id and waits for the head, which does not run here any more."""
    retried = enqueue(db, queue="other", ordering_key="k", skip_dead=True)
    (job,) = claim(db, queues=["other"])
    fatal = {"error": "no", "fatal": True}
    value(db, "fail_job", job_id=job.job_id, lease_token=job.lease_token, **fatal)
    head, behind = (enqueue(db, queue="q", ordering_key="k") for _ in range(2))
    move_id = begin(db, there)
    assert value(db, "retry_job", job_id=retried) == "blocked"

    assert carry(db, there, move_id) == "moving"
    one(db, "tick")

    assert [job[0] for job in jobs(there)] == [head]
    assert call(db, "explain_job", job_id=behind)[0].reason == "behind_in_key"
    (job,) = claim(db, queues=["other"])
    value(db, "finish_job", job_id=job.job_id, lease_token=job.lease_token)
    settle(db, there, move_id)
    assert [job[0] for job in jobs(there)] == [head, behind]


def test_a_job_that_is_held_keeps_those_behind_it(connect, db, there):
    line = [enqueue(db, queue="q", ordering_key="k") for _ in range(4)]
    holder = connect(autocommit=False)
    move_id = begin(db, there)
    step(db, there, move_id)
    holder.execute("select from rota.jobs where id = %s for update", (line[2],))
    db.execute("set lock_timeout = '2s'")
    step(db, there, move_id)

    assert taken(db, move_id) == line[:2]


def test_it_waits_for_transactions_that_may_not_have_seen_it(connect, db, there):
    enqueue(db, queue="q")
    writer = connect(autocommit=False)
    enqueue(writer, queue="q")
    writer.execute("select")  # and it keeps no snapshot

    move_id = begin(db, there)

    assert carry(db, there, move_id) == "moving"
    assert one(db, "queue_move_status", queue="q").obstacle == (
        "transactions that began before it, the oldest of them that of pid "
        f"{writer.info.backend_pid}"
    )
    assert jobs(there) == []
    writer.commit()
    settle(db, there, move_id)
    assert len(jobs(there)) == 2


def test_queue_move_status_says_that_no_mover_runs(connect, db, there):
    def obstacle() -> Any:
        return one(db, "queue_move_status", queue="q").obstacle

    enqueue(db, queue="q")
    move_id = begin(db, there)
    assert obstacle() == "a mover: no live forwarder knows database 6"

    call(db, "report_worker", worker="f", host="h", pid=1, version=None, queues=["forward:6"])
    assert obstacle() is None
    call(db, "deregister_worker", worker="f")
    command = connect()
    command.execute("set application_name = 'rota mover'")
    assert obstacle() is None
    command.execute("reset application_name")
    assert obstacle() is not None

    settle(db, there, move_id)
    assert obstacle() is None


def test_it_waits_for_no_stranger(connect, db, there):
    """Strangers have a number and a snapshot: a login without rights, and one elsewhere."""
    enqueue(db, queue="q")
    here, elsewhere = connect(), there
    here.execute("set role pg_signal_backend")
    for stranger in (here, elsewhere):
        stranger.execute("begin; select pg_current_xact_id()")

    move_id = value(db, "begin_queue_move", queue="q", database=6)
    batches = [one(db, "take_moves", move_id=move_id) for _ in range(3)]

    assert len(batches[-1].job_ids) == 1


@pytest.mark.parametrize("has_written", [False, True])
def test_it_waits_for_an_older_snapshot_of_one_who_may_enqueue(connect, db, there, has_written):
    enqueue(db, queue="q")
    writer = connect(autocommit=False)
    writer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    writer.execute("select pg_current_xact_id()" if has_written else "select 1")

    move_id = value(db, "begin_queue_move", queue="q", database=6)
    batches = [one(db, "take_moves", move_id=move_id) for _ in range(3)]

    assert (batches[-1].job_ids == []) is has_written


def test_nothing_is_claimed_here_while_it_moves_and_producers_go_on(db, there):
    move_id = begin(db, there)
    enqueue(db, queue="q")
    call(db, "enqueue_many", jobs=json.dumps([{"job_type": "x", "queue": "q"}] * 2))

    assert claim(db, queues=["q"]) == []
    for act in ("resume_queue", "pause_queue"):
        with raises("RT016"):
            call(db, act, queue="q")
    carry(db, there, move_id)
    assert len(claim(there, queues=["q"], max_jobs=9)) == 3


def test_it_moves_while_everything_is_paused_in_both(db, there):
    """As after a backup was restored; jobs of enqueue_to() wait for the end of the pause."""
    enqueue(db, queue="q")
    value(db, "enqueue_to", database=6, job_type="x")
    for each in (db, there):
        value(each, "pause_all")

    settle(db, there, begin(db, there))

    assert len(jobs(there)) == 1
    assert call(db, "waiting_forwards") == []


def test_what_was_sent_and_not_ended_is_not_taken_twice(db, there):
    """The mover is killed after the other database has committed."""
    for key in (None, "k", "k"):
        enqueue(db, queue="q", ordering_key=key)
    move_id = begin(db, there)
    take_out(db, move_id)
    with db.transaction(force_rollback=True):
        batch = step(db, there, move_id)
    (job,) = claim(there, queues=["q"])
    value(there, "finish_job", job_id=job.job_id, lease_token=job.lease_token)

    settle(db, there, move_id)

    assert len(batch.job_ids) == 3
    assert len(jobs(there)) == 2
    assert scalar(there, "select count(*) from rota.finished_jobs") == 1


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_receive_moves_refuses_a_snapshot_that_may_lack_receipts(db, there, level):
    """What another session has just taken would be refused: dead here, and live there."""
    move_id = begin(db, there)
    there.execute(f"set default_transaction_isolation = '{level}'")

    with raises("RT009"):
        receive(there, move_id)


def retain(db: Db) -> int:
    """Let retention do its work as if a year had passed; return how many receipts are left."""
    db.execute("reset all")  # else it looks in an hour at most at what it had to keep
    db.execute("update rota.receipts set received_at = rota.now() - interval '1 year'")
    db.execute("update rota.moved_jobs set moved_at = rota.now() - interval '1 year'")
    for _ in range(10):  # on a busy machine a tick leaves some kinds to the next
        db.execute("update rota.maintenance set done_at = '-infinity'")
        one(db, "tick")
    return scalar(db, "select count(*) from rota.receipts where job_id > 0")  # type: ignore[no-any-return]


def test_what_was_sent_long_ago_and_not_ended_does_not_come_in_twice(db, there):
    job_id = enqueue(db, queue="q")
    move_id = begin(db, there)
    take_out(db, move_id)
    with db.transaction(force_rollback=True):
        step(db, there, move_id)
    (job,) = claim(there, queues=["q"])
    value(there, "finish_job", job_id=job_id, lease_token=job.lease_token)

    assert retain(there) == 1
    settle(db, there, move_id)

    assert jobs(there) == []
    assert retain(there) == 0


def test_a_job_that_came_long_ago_and_still_waits_moves_on(db, there):
    job_id = enqueue(db, queue="q", delay="1 year")
    settle(db, there, begin(db, there))
    for database in (db, there):
        value(database, "end_queue_move", queue="q")

    assert retain(there) == 1
    move_id = value(there, "begin_queue_move", queue="q", database=5)
    settle(there, db, move_id, from_database=6)

    assert [job[0] for job in jobs(db)] == [job_id]


def test_what_is_sent_is_not_in_the_live_table_any_more(db, there):
    """Else an operator could act on a row here whose job is there."""
    job_id = enqueue(db, queue="q")
    move_id = begin(db, there)
    take_out(db, move_id)
    with db.transaction(force_rollback=True):
        step(db, there, move_id)

    for act in ("cancel_job", "retry_job"):
        with pytest.raises(psycopg.Error) as raised:
            call(db, act, job_id=job_id)
        assert raised.value.sqlstate == "RT016"
        # That database may not know it yet.
        assert "queue_move_status()" in (raised.value.diag.message_hint or "")
    assert jobs(db) == []


def test_one_mover_at_a_time(connect, db, there):
    enqueue(db, queue="q")
    move_id = begin(db, there)
    take_out(db, move_id)
    other = connect(autocommit=False)

    assert len(one(other, "take_moves", move_id=move_id).job_ids) == 1
    assert call(db, "take_moves", move_id=move_id) == []
    with refused("move_id"):
        call(db, "end_moves", move_id=move_id, job_ids=[], endings="[]")


@pytest.mark.parametrize("is_undone", [False, True])
def test_two_who_begin_a_move_begin_one(connect, db, there, is_undone):
    """A begins it and stays open; B waits for A, and then finds its move or begins its own."""
    a, b = Session(connect(autocommit=False), db), Session(connect(), db)
    begin_it = "select rota.begin_queue_move('q', 6)"
    ((move_id,),) = a.fetch(begin_it)

    pending = b.start(begin_it)
    pending.wait_blocked(by=a)
    (a.connection.rollback if is_undone else a.connection.commit)()
    ((found,),) = pending.result()

    assert (found == move_id) is not is_undone
    assert rows(db, "select move_id from rota.queue_moves") == [(found,)]


@pytest.mark.parametrize(
    ("act", "write"),
    [
        ("schedule_job('s', 'every 1 hour', 't', queue => 'q')", "return query select d.outc"),
        (
            """define_pipeline('p', '[{"stage": "s", "queue": "q"}]')""",
            "perform rota._lock_pipeline(",
        ),
        ("start_pipeline('p')", "perform rota._check_new_job("),
        (
            "_enqueue_keyed(jsonb_populate_record(null::rota.jobs, jsonb_build_object('queue',"
            " 'q', 'job_type', 't', 'idempotency_key', 'k')), '1 h', 'keep', null, null, true)",
            "for v_try in 1..100 loop",
        ),
    ],
)
def test_what_cannot_go_is_refused_though_the_move_settles_while_it_is_made(
    connect, db, there, act, write
):
    """A has checked what it is given; a queue moves and settles; A writes."""
    define = """select rota.define_pipeline('p', '[{"stage": "s", "queue": "%s"}]')"""
    db.execute((define % "q").encode())
    a = Session(connect(), db)
    # Without a number, which race.pause() would give it.
    pause = f"perform pg_advisory_xact_lock({GATE}); {write}"
    mutate(db, act.partition("(")[0], write, pause)

    db.execute("select pg_advisory_lock(%s)", [GATE])
    pending = a.start(f"select from rota.{act}".encode())
    pending.wait_blocked()
    db.execute((define % "other").encode())
    settle(db, there, begin(db, there))
    db.execute("select pg_advisory_unlock(%s)", [GATE])

    with raises("RT016"):
        pending.result()


@pytest.mark.parametrize(
    "act", ["pause_queue('q', until => now() + '1 s')", "resume_queue('q')"]
)
def test_who_waited_for_a_move_does_not_end_its_pause(connect, db, there, act):
    """The queue is paused; A lets it move and stays open; B waits for A and is refused."""
    a, b = Session(connect(autocommit=False), db), Session(connect(), db)
    enqueue(db, queue="q")
    value(db, "pause_queue", queue="q")
    a.fetch("select rota.begin_queue_move('q', 6)")

    pending = b.start(f"select rota.{act}".encode())
    pending.wait_blocked(by=a)
    a.connection.commit()

    with raises("RT016"):
        pending.result()
    assert rows(db, "select queue, until from rota.pauses") == [("q", None)]


def test_the_sequence_is_raised_before_jobs_with_a_key_are_taken_there(db, there):
    last = [enqueue(db, queue="q", ordering_key="k") for _ in range(2)][-1]
    move_id = begin(db, there)
    carry(db, there, move_id)

    for arguments in ({"ordering_key": "k"}, {"idempotency_key": "k"}):
        with raises("RT016"):
            enqueue(there, queue="q", **arguments)
        with raises("RT016"):
            call(there, "enqueue_many", jobs=json.dumps(
                [{"job_type": "x", "queue": "q", **arguments}]))  # fmt: skip
    enqueue(there, queue="q")
    settle(db, there, move_id)

    assert enqueue(there, queue="q", ordering_key="k") > last
    assert scalar(there, "select rota.database_number()") == 6


def test_producers_there_go_on_while_the_move_waits_to_settle(connect, server, db, there):
    """A enqueues there and stays open; the mover waits for it; B enqueues there meanwhile."""
    move_id = begin(db, there)
    assert carry(db, there, move_id) == "settling"
    a, b = (psycopg.connect(server.url("moved"), autocommit=True) for _ in range(2))
    b.execute("set statement_timeout = '1s'")
    with a, b, ThreadPoolExecutor() as threads:
        with a.transaction(force_rollback=True):
            enqueue(a)
            settling = threads.submit(step, db, there, move_id)
            made = 0
            while not settling.done():
                enqueue(b)
                made += 1
        with pytest.raises(psycopg.errors.LockNotAvailable):
            settling.result()

    assert made > 10
    step(db, there, move_id)
    assert state(db) == state(there) == "settled"


def test_what_comes_late_goes_with_a_new_id(db, there):
    move_id = begin(db, there)
    settle(db, there, move_id)
    first = enqueue(there, queue="q", ordering_key="k")
    late = [enqueue(db, queue="q", ordering_key="k") for _ in range(2)]

    assert [row.move_id for row in call(db, "waiting_moves")] == [move_id]
    carry(db, there, move_id)

    there_ids = [job[0] for job in jobs(there)]
    acted = one(db, "act_on_jobs", act="cancel", filter=json.dumps({"ids": late[:1]}))
    assert acted.conflicts[0]["reason"] == f"in database 6 now, as job {there_ids[1]}"
    assert there_ids == sorted(there_ids)
    assert there_ids[0] == first
    assert {job_id & 1023 for job_id in there_ids} == {6}
    for job_id, new_id in zip(late, there_ids[1:], strict=True):
        with pytest.raises(psycopg.Error) as raised:
            call(db, "cancel_job", job_id=job_id)
        assert raised.value.diag.message_detail == f"6 {new_id}"


def test_what_travels_after_a_queue_waits_until_it_has_settled(db, there, clock):
    """Also where the other database has not heard of the move."""
    ahead = value(db, "enqueue_to", database=6, job_type="x", ordering_key="k")
    enqueue(db, queue="q", ordering_key="k")
    move_id = value(db, "begin_queue_move", queue="q", database=6)
    more = {"database": 6, "job_type": "x", "queue": "q"}
    line = [
        value(db, "enqueue_to", **more, ordering_key="k"),
        value(db, "enqueue_to", **{**more, "queue": "r"}, ordering_key="k"),
    ]
    key = value(db, "enqueue_to", **more, idempotency_key="k")
    free = value(db, "enqueue_to", **more)

    def forward():
        with db.transaction():
            taken = call(db, "take_forwards", worker="f", database=6)
            value(
                db, "end_forwards", job_ids=[job.job_id for job in taken],
                lease_tokens=[job.lease_token for job in taken],
                endings=json.dumps([{"job_id": 1} for _ in taken]),
            )  # fmt: skip
        return [job.job_id for job in taken]

    assert forward() == [ahead, free]
    assert forward() == []
    assert run(db, key).attempts == 0
    settle(db, there, move_id)
    clock.advance("1 s")
    assert forward() == [*line, key]


@pytest.mark.parametrize(
    ("waits_for", "options"),
    [
        pytest.param("time", {"delay": "30 days"}, id="time"),
        pytest.param("limit", {"delay": "0 s"}, id="limit"),
        pytest.param("limit", {}, id="limit, due at once"),
        pytest.param("limit", {"limit_key": "k"}, id="limit of a key, due at once"),
    ],
)
def test_what_comes_late_goes_whatever_it_would_wait_for_here(db, there, waits_for, options):
    if waits_for == "time":
        value(db, "set_queue", queue="q", ageing="1 hour")
    else:
        value(db, "set_limit", job_type="x", max_running=1)
        value(db, "set_limit", limit_key="k", max_running=0)
    settle(db, there, move_id := begin(db, there))
    for _ in range(3):
        enqueue(db)
    claim(db, max_jobs=3)

    batch = json.dumps([{"job_type": "x", "queue": "q", **options}] * 2)
    together = [row.job_id for row in call(db, "enqueue_many", jobs=batch)]
    assert [row.move_id for row in call(db, "waiting_moves")] == [move_id]
    carry(db, there, move_id)
    late = enqueue(db, queue="q", **options)
    assert [row.move_id for row in call(db, "waiting_moves")] == [move_id]
    brought = enqueue(db, job_type="x" if waits_for == "limit" else "y")
    wanted = json.dumps({"ids": [brought]})
    call(db, "act_on_jobs", act="move", filter=wanted, arguments='{"queue": "q"}')
    carry(db, there, move_id)

    assert len(jobs(there)) == 4
    for job_id in (late, *together, brought):
        assert told(db, job_id)[0] == "RT016"
    assert call(db, "waiting_moves") == []


def test_what_was_open_when_it_settled_goes_before_it_is_due(connect, db, there):
    value(db, "set_queue", queue="q", ageing="1 hour")
    move_id = begin(db, there)
    late = enqueue(other := connect(autocommit=False), queue="q", delay="30 days")
    settle(db, there, move_id)
    other.commit()

    assert [row.move_id for row in call(db, "waiting_moves")] == [move_id]
    carry(db, there, move_id)
    assert told(db, late)[0] == "RT016"


def test_a_key_that_has_a_live_job_there_leads_to_that_one(db, there):
    first = enqueue(db, queue="q", idempotency_key="k")
    move_id = begin(db, there)
    carry(db, there, move_id)
    second = enqueue(db, queue="q", idempotency_key="k")
    settle(db, there, move_id)

    assert [job[0] for job in jobs(there)] == [first]
    with pytest.raises(psycopg.Error) as raised:
        call(db, "cancel_job", job_id=second)
    assert raised.value.diag.message_detail == f"6 {first}"


def test_a_refused_job_is_dead_here_and_its_line_stays(db, there):
    there.execute("alter table rota.jobs add constraint no_y check (job_type <> 'y')")
    line = [enqueue(db, t, queue="q", ordering_key="k") for t in "xyx"]
    free = enqueue(db, queue="q")
    move_id = begin(db, there)

    assert carry(db, there, move_id) == "moving"

    assert [job[0] for job in jobs(there)] == [line[0], free]
    assert (run(db, line[1]).status, run(db, line[1]).error_type) == ("dead", "23514")
    assert "halted by job" in one(db, "queue_move_status", queue="q").obstacle
    there.execute("alter table rota.jobs drop constraint no_y")
    value(db, "retry_job", job_id=line[1])
    settle(db, there, move_id)
    assert [job[0] for job in jobs(there)] == [*line, free]


@pytest.mark.parametrize("is_for_good", [True, False])
def test_what_is_behind_a_job_that_came_back_is_not_sent_without_it(db, there, is_for_good):
    """Though it had been taken out with it, for a batch to come."""
    code = "check_violation" if is_for_good else "internal_error"
    there.execute(
        f"""create function fail() returns trigger language plpgsql
        as 'begin raise {code}; end'""".encode()
    )
    there.execute("""create trigger fail before insert on rota.jobs for each row
        when (new.job_type = 'y') execute function fail()""")
    line = [enqueue(db, t, queue="q", ordering_key="k") for t in "xyxx"]
    other = enqueue(db, queue="q", ordering_key="l")
    move_id = begin(db, there)
    take_out(db, move_id)

    for _ in range(len(line)):
        with db.transaction():
            batch = one(db, "take_moves", move_id=move_id, max_jobs=1)
            if batch.jobs is not None:
                end(db, move_id, batch.job_ids, send(there, move_id, batch))

    assert [job[0] for job in jobs(there)] == [line[0], other]
    there.execute("drop trigger fail on rota.jobs")
    if is_for_good:
        value(db, "retry_job", job_id=line[1])
    settle(db, there, move_id)
    assert [job[0] for job in jobs(there)] == [*line, other]


def swallow(db: Db) -> None:
    db.execute("""create function swallow() returns trigger language plpgsql
        as 'begin return null; end'""")
    db.execute("""create trigger swallow before insert on rota.jobs for each row
        when (new.job_type = 'y') execute function swallow()""")
    db.execute("set statement_timeout = '20s'")


READ_OF_JOBS = """
    select sum(pg_stat_get_xact_tuples_returned(t.oid))::bigint
    from pg_class as t left join pg_index as i on i.indexrelid = t.oid
    where 'rota.jobs'::regclass in (t.oid, i.indrelid)
"""


def test_a_line_is_looked_at_no_further_than_it_can_go(db):
    """However many wait behind its beginning, and before its head, as after a late retry."""
    first = enqueue(db, queue="q", ordering_key="k")
    db.execute(
        "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, ordering_key,"
        " skip_dead, if_parent_dead, status, run_at) select 'q', 'x', '{}', 0, 10, 'k', false,"
        " 'cancel', 'blocked', rota.now() from generate_series(1, 20000)"
    )
    db.execute(
        "update rota.jobs set status = case when id = %s then 'blocked' else 'queued' end"
        " where id in (%s, (select max(id) from rota.jobs))",
        (first, first),
    )
    db.execute("analyze rota.jobs")
    with db.transaction():
        before = scalar(db, READ_OF_JOBS)
        line = scalar(db, "select rota._line_to_go('k', 'q', 10)")
        read = scalar(db, READ_OF_JOBS) - before

    assert (len(line), line[0]) == (10, first)
    assert read < 2000


def test_a_line_that_came_back_goes_before_what_came_meanwhile(db, there):
    line = [enqueue(db, queue="q", ordering_key="k") for _ in range(3)]
    move_id = begin(db, there)
    take_out(db, move_id)
    line.append(enqueue(db, queue="q", ordering_key="k"))
    with db.transaction():
        batch = one(db, "take_moves", move_id=move_id)
        end(db, move_id, batch.job_ids, [{"error_code": "55P03"}, {}, {}])

    arrived = []
    for _ in range(20):
        with db.transaction():
            batch = one(db, "take_moves", move_id=move_id, max_jobs=1)
            end(db, move_id, batch.job_ids, send(there, move_id, batch) if batch.jobs else [])
        arrived += batch.job_ids
    assert arrived == line


def test_a_job_that_a_trigger_swallows_there_is_dead_here(db, there):
    swallow(there)
    ids = [enqueue(db, t, queue="q") for t in "xyx"]

    settle(db, there, begin(db, there))

    assert [job[0] for job in jobs(there)] == [ids[0], ids[2]]
    assert (run(db, ids[1]).status, run(db, ids[1]).error_type) == ("dead", "09000")


def test_a_job_that_a_trigger_swallows_here_stays_on_its_way(db, there):
    there.execute("alter table rota.jobs add constraint no_y check (job_type <> 'y')")
    job_id = enqueue(db, "y", queue="q")
    move_id = begin(db, there)
    take_out(db, move_id)
    swallow(db)

    with pytest.raises(psycopg.errors.TriggeredActionException):
        step(db, there, move_id)

    db.execute("drop trigger swallow on rota.jobs")
    step(db, there, move_id)
    assert run(db, job_id).status == "dead"


def test_a_key_that_was_taken_while_its_job_was_away_stops_no_move(db, there):
    there.execute("alter table rota.jobs add constraint no_y check (job_type <> 'y')")
    refused_id = enqueue(db, "y", queue="q", ordering_key="k", idempotency_key="first")
    behind_id = enqueue(db, queue="q", ordering_key="k", idempotency_key="second")
    move_id = begin(db, there)
    take_out(db, move_id)
    assert taken(db, move_id) == [refused_id, behind_id]
    again = [enqueue(db, "y", queue="q", idempotency_key="first")]
    again.append(enqueue(db, queue="q", idempotency_key="second"))

    step(db, there, move_id)

    assert [job[0] for job in jobs(db)] == again
    dead = run(db, refused_id)
    assert (dead.status, dead.error_type, dead.idempotency_key) == ("dead", "23514", "first")
    # The one that came back to a job with its key leads to that, wherever it goes.
    with pytest.raises(psycopg.Error) as raised:
        call(db, "cancel_job", job_id=behind_id)
    assert (raised.value.sqlstate, raised.value.diag.message_detail) == (
        "RT016",
        f"5 {again[1]}",
    )
    assert scalar(db, "select count(*) from rota.moved_jobs where job is not null") == 0
    carry(db, there, move_id)
    assert [job[0] for job in jobs(there)] == [again[1]]


def test_a_key_that_a_transaction_there_has_just_taken_holds_up_no_other(server, db, there):
    there.execute("set statement_timeout = '5s'")
    value(db, "set_limit", limit_key="c:*", max_running=1)
    kept = [enqueue(db, queue="q", idempotency_key="k", limit_key="c:a")]
    kept += [enqueue(db, queue="q", ordering_key="o", idempotency_key="l"),
        enqueue(db, queue="q", ordering_key="o")]  # fmt: skip
    free = [enqueue(db, queue="q") for _ in range(2)]
    before = jobs(db)
    move_id = begin(db, there)
    take_out(db, move_id)
    with psycopg.connect(server.url("moved")) as stranger:
        for key in "kl":
            enqueue(stranger, queue="other", idempotency_key=key)

        assert carry(db, there, move_id) == "moving"

        assert [job[0] for job in jobs(there)] == free
        assert jobs(db) == [job for job in before if job[0] in kept]
        assert rows(db, "select * from rota.verify() where violations > 0") == []
        stranger.rollback()
    settle(db, there, move_id)

    assert [job[0] for job in jobs(there)] == [*kept, *free]
    assert jobs(there) == before


@pytest.mark.parametrize("by", ["raise exception 'poison'", "return null"])
def test_a_job_that_cannot_be_taken_out_keeps_no_other_here(db, there, by):
    ids = [enqueue(db, queue="q") for _ in range(3)]
    poison(db, ids[1], by, "delete")
    line = [enqueue(db, queue="q", ordering_key="k") for _ in range(3)]

    move_id = begin(db, there)
    assert carry(db, there, move_id) == "moving"

    assert [job[0] for job in jobs(there)] == [ids[0], ids[2], *line]
    db.execute("drop trigger poison on rota.jobs")
    settle(db, there, move_id)
    assert [job[0] for job in jobs(there)] == [*ids, *line]


@pytest.mark.parametrize("by", ["raise exception 'poison'", "return null"])
def test_a_job_that_cannot_be_taken_out_keeps_those_behind_it_alone(db, there, by):
    line = [enqueue(db, queue="q", ordering_key="k") for _ in range(3)]
    poison(db, line[1], by, "delete")

    move_id = begin(db, there)
    assert carry(db, there, move_id) == "moving"

    assert [job[0] for job in jobs(there)] == line[:1]
    db.execute("drop trigger poison on rota.jobs")
    settle(db, there, move_id)
    assert [job[0] for job in jobs(there)] == line


@pytest.mark.parametrize("is_halted", [True, False])
def test_keys_that_cannot_go_keep_no_other_key_here(db, there, is_halted):
    """There are more of them than keys that are taken out in a call."""
    for n in range(201):
        enqueue(db, queue="q", ordering_key=f"h{n}", max_attempts=1)
        enqueue(db, queue="q", ordering_key=f"h{n}")
    running = claim(db, queues=["q"], max_jobs=1000)
    free = enqueue(db, queue="q", ordering_key="free")
    move_id = begin(db, there)
    for job in running if is_halted else ():
        value(db, "fail_job", job_id=job.job_id, lease_token=job.lease_token, error="no")

    carry(db, there, move_id)

    assert [job[0] for job in jobs(there)] == [free]


def test_nothing_moves_between_two_versions(db, there):
    """A column that one of them lacks would be lost, or be null in the other."""
    job_id = enqueue(db, queue="q")
    move_id = begin(db, there)
    here = scalar(db, "select rota.version()")
    version = "create or replace function rota.version() returns text immutable language sql as"
    there.execute(f"{version} $$ select '9.9.9' $$".encode())

    with raises("55000"):
        carry(db, there, move_id)

    there.execute(f"{version} $$ select '{here}' $$".encode())
    settle(db, there, move_id)
    assert [job[0] for job in jobs(there)] == [job_id]


def test_no_job_goes_to_a_database_that_has_another_number_by_now(db, there):
    """As a copy behind an address that was that of the other one."""
    job_id = enqueue(db, queue="q")
    move_id = begin(db, there)
    value(there, "set_database_number", number=7)

    with refused("jobs"):
        carry(db, there, move_id)

    value(there, "set_database_number", number=6)
    settle(db, there, move_id)
    assert [job[0] for job in jobs(there)] == [job_id]


def test_a_trigger_that_fails_for_now_kills_no_job(db, there):
    there.execute("""create function fail() returns trigger language plpgsql
        as 'begin raise internal_error; end'""")
    there.execute("""create trigger fail before insert on rota.jobs for each row
        when (new.job_type = 'y') execute function fail()""")
    ids = [enqueue(db, t, queue="q") for t in "xyx"]
    move_id = begin(db, there)

    assert carry(db, there, move_id) == "moving"

    assert [job[0] for job in jobs(there)] == [ids[0], ids[2]]
    assert [job[:3] for job in jobs(db)] == [(ids[1], "y", "queued")]
    there.execute("drop trigger fail on rota.jobs")
    settle(db, there, move_id)
    assert [job[0] for job in jobs(there)] == ids


@pytest.mark.parametrize("last_id", [-1, 2**53, 2**63 - 1])
def test_no_mover_uses_up_the_ids(db, there, last_id):
    move_id = begin(db, there)

    with refused("settle_above"):
        receive(there, move_id, settle_above=last_id)

    assert enqueue(there) < 2**53


FORGED = {"job_type": "z", "queue": "q", "payload": {}, "priority": 0, "max_attempts": 1,
    "status": "queued", "run_at": "2026-01-01", "attempts": 0, "lease_token": 0,
    "created_at": "2026-01-01"}  # fmt: skip


def forge(there: Db, move_id: int = 99, **others: Any) -> Any:
    (told,) = receive(there, move_id, json.dumps([{**FORGED, **others}]))
    return told


def test_no_mover_takes_an_id_that_is_still_to_be_given(db, there):
    last = enqueue(there)
    for job_id in (last + 1024, 0, -5, 2**53):
        assert forge(there, id=job_id).error_code == "55000"
    assert forge(there, id=last + 1).error_code is None
    assert enqueue(there) == last + 1024


def test_a_database_that_was_restored_takes_its_ids_back_once_it_gives_others(
    server, db, there
):
    last = enqueue(there)
    scalar(there, "select setval('rota.id_timeline', 2147483647)")
    assert forge(there, id=last + 1024).error_code == "55000"
    with psycopg.connect(server.url("moved"), autocommit=True) as producer:
        assert enqueue(producer) > last + 2**40

    assert forge(there, id=last + 1024).job_id == last + 1024


def test_no_mover_brings_what_no_queue_can_move(db, there):
    """Of a pipeline it would go on to a queue in which the mover has no right."""
    columns = {"pipeline": "p", "stage": "s", "definition": "d", "held_limits": ["queue r"]}
    forge(there, id=5, **columns)
    assert forge(there, id=1029, status="running", locked_until="2099-01-01").error_code

    found = rows(there, f"select {', '.join(columns)} from rota.jobs")

    assert [tuple(row) for row in found] == [(None,) * len(columns)]


def test_no_mover_takes_the_open_effects_of_a_job_that_is_here(db, there):
    job = running(there, queue="r")
    effect = {"scope": "mail", "key": "1", "job_id": job.job_id}
    value(there, "record_effect", lease_token=job.lease_token, **effect)
    receive(there, 99, settle_above=1)

    forge(there, id=job.job_id)
    (record,) = rows(there, "select to_jsonb(e) as effect from rota.effects as e")
    forge(there, id=1029, effects=[record.effect])

    value(there, "complete_effect", lease_token=job.lease_token, **effect)


def test_effects_go_with_their_job(db, there):
    enqueue(db, queue="q")
    (job,) = claim(db, queues=["q"])
    owner = {"job_id": job.job_id, "lease_token": job.lease_token}
    one(db, "record_effect", scope="mail", key="1", **owner)
    value(db, "complete_effect", scope="mail", key="1", **owner)
    value(db, "fail_job", **owner, error="no", retry_in="0")

    settle(db, there, begin(db, there))

    (again,) = claim(there, queues=["q"])
    assert not value(
        there, "record_effect", scope="mail", key="1", job_id=again.job_id,
        lease_token=again.lease_token,
    )  # fmt: skip


def come_back(db: Db, there: Db) -> None:
    """Let the queue that has gone to the other database move here again."""
    for database in (db, there):
        value(database, "end_queue_move", queue="q")
    move_id = value(there, "begin_queue_move", queue="q", database=5)
    settle(there, db, move_id, from_database=6)


def test_effects_that_were_open_come_back_as_they_are_by_then(db, there):
    """What was done there is not done again, and what was withdrawn there is not lost."""
    enqueue(db, queue="q")
    (job,) = claim(db, queues=["q"])
    owner = {"job_id": job.job_id, "lease_token": job.lease_token}
    for key in "12":
        one(db, "record_effect", scope="mail", key=key, **owner)
    value(db, "fail_job", **owner, error="no", retry_in="0")
    settle(db, there, begin(db, there))
    (job,) = claim(there, queues=["q"])
    owner = {"job_id": job.job_id, "lease_token": job.lease_token}
    for key in "12":
        assert value(there, "record_effect", scope="mail", key=key, **owner, if_unknown="again")
    value(there, "complete_effect", scope="mail", key="1", **owner)
    value(there, "withdraw_effect", scope="mail", key="2", **owner)
    value(there, "fail_job", **owner, error="no", retry_in="0")
    come_back(db, there)

    (job,) = claim(db, queues=["q"])

    owner = {"job_id": job.job_id, "lease_token": job.lease_token}
    assert not value(db, "record_effect", scope="mail", key="1", **owner, if_unknown="again")
    assert value(db, "record_effect", scope="mail", key="2", **owner, if_unknown="skip")


def test_effects_of_a_job_that_came_late_go_on_with_it(db, there):
    """It has another id since, also where it comes back."""
    job_id = enqueue(db, queue="q", max_attempts=1)
    (job,) = claim(db, queues=["q"])
    owner = {"job_id": job_id, "lease_token": job.lease_token}
    for key in "12":
        one(db, "record_effect", scope="mail", key=key, **owner)
    value(db, "fail_job", **owner, error="no")
    move_id = begin(db, there)
    settle(db, there, move_id)
    value(db, "retry_job", job_id=job_id)
    carry(db, there, move_id)
    (job,) = claim(there, queues=["q"])
    owner = {"job_id": job.job_id, "lease_token": job.lease_token}
    one(there, "record_effect", scope="mail", key="1", **owner, if_unknown="again")
    value(there, "complete_effect", scope="mail", key="1", **owner)
    value(there, "release_jobs", job_ids=[job.job_id], lease_tokens=[job.lease_token])

    come_back(db, there)

    (again,) = claim(db, queues=["q"])
    assert again.job_id == job.job_id != job_id
    assert [row.job_id for row in rows(there, "select job_id from rota.effects")] == [
        job.job_id
    ] * 2
    owner = {"job_id": again.job_id, "lease_token": again.lease_token}
    assert not value(db, "record_effect", scope="mail", key="1", **owner, if_unknown="again")
    unknown = rows(db, "select key, job_id, status from rota.unknown_effects")
    assert unknown == [("2", job.job_id, "running")]


def test_an_effect_of_a_job_that_went_is_settled_where_it_is(db, there):
    job = running(db, queue="q")
    effect = {"scope": "s", "key": "k"}
    lease = {"job_id": job.job_id, "lease_token": job.lease_token}
    value(db, "record_effect", **effect, **lease)
    value(db, "snooze_job", **lease, delay="0")
    move_id = begin(db, there)
    take_out(db, move_id)
    with raises("RT016"):
        value(db, "settle_effect", **effect, outcome="again")
    settle(db, there, move_id)

    with raises("RT016"):
        value(db, "settle_effect", **effect, outcome="done")

    assert value(there, "settle_effect", **effect, outcome="done") == job.job_id


def test_an_effect_of_a_job_that_went_is_not_unknown_here(db, there):
    job = running(db, queue="q")
    owner = {"job_id": job.job_id, "lease_token": job.lease_token}
    one(db, "record_effect", scope="mail", key="1", **owner)
    value(db, "fail_job", **owner, error="no", retry_in="0")

    settle(db, there, begin(db, there))

    unknown = "select count(*) from rota.unknown_effects"
    examined = "select count(*) from rota._examine_effects()"
    for query in (unknown, examined):
        assert [scalar(database, query) for database in (db, there)] == [0, 1]
    retain(db)
    assert scalar(db, unknown) == 0
    db.execute("delete from rota.effects")
    retain(db)
    assert scalar(db, "select count(*) from rota.moved_jobs") == 0


REFUSED = {
    "dependencies": """select rota.enqueue('c',
        depends_on => array[rota.enqueue('p', queue => 'q')])""",
    "pipelines": """select rota.define_pipeline('p',
        '[{"stage": "a", "job_type": "x", "queue": "q"}]')""",
    "schedules": "select rota.schedule_job('s', 'every 1 hour', 'x', queue => 'q')",
    "ordering_keys": """select rota.enqueue('x', queue => q, ordering_key => 'k')
        from unnest('{q,r}'::text[]) as q""",
    "idempotency_keys": """select rota.enqueue('x', queue => 'q', idempotency_key => 'k',
        unique_for => '1 hour')""",
    "ids": """insert into rota.jobs (id, queue, job_type, payload, priority, max_attempts,
        status, run_at) overriding system value values (7, 'q', 'x', '{}', 0, 1, 'queued',
        now())""",
}


@pytest.mark.parametrize("rule", ["unique_for", "updated_at", "unique_for, then updated_at"])
def test_a_key_that_outlives_its_job_is_told_before_also_when_that_is_purged(
    db, there, clock, rule
):
    key = {"queue": "q", "idempotency_key": "k"}
    if "unique_for" in rule:
        enqueue(db, **key, unique_for="1 hour")
    if "updated_at" in rule:
        enqueue(db, **key, on_conflict="rerun", updated_at=clock.now())
    value(db, "finish_job", **owner(claim(db, queues=["q"])[0]))
    db.execute("delete from rota.finished_jobs")  # as retention would
    clock.advance("2 hours" if "updated_at" in rule else "59 minutes")

    found = call(db, "plan_queue_move", queue="q", database=6)

    assert [row.finding for row in found] == ["idempotency_keys"]
    assert call(db, "plan_queue_move", queue="r", database=6) == []
    clock.advance("91 days")
    assert call(db, "plan_queue_move", queue="q", database=6) == []


@pytest.mark.parametrize("finding", REFUSED)
def test_what_cannot_move_is_told_by_name_before(db, there, finding):
    db.execute(REFUSED[finding].encode())

    found = call(db, "plan_queue_move", queue="q", database=6)

    assert {row.finding for row in found} == {finding}
    with refused("queue"):
        begin(db, there)
    assert rows(db, "select from rota.queue_moves") == []


def test_a_queue_of_a_dropped_pipeline_moves_once_its_runs_are_over(db, there):
    stages = [
        {"stage": "a", "job_type": "x", "queue": "r"},
        {"stage": "b", "job_type": "x", "queue": "q"},
    ]
    value(db, "define_pipeline", pipeline="p", stages=json.dumps(stages))
    value(db, "start_pipeline", pipeline="p")

    def found():
        return [
            (row.finding, row.remedy)
            for row in call(db, "plan_queue_move", queue="q", database=6)
        ]

    ((_, remedy),) = found()
    db.execute(remedy)
    assert found() == [("pipelines", None)]
    (job,) = claim(db, queues=["r"])
    end = {"job_id": job.job_id, "lease_token": job.lease_token, "next_stage": "end"}
    value(db, "finish_job", **end)
    assert found() == []
    settle(db, there, begin(db, there))


def test_a_halted_key_is_told_before(db, there):
    enqueue(db, queue="q", ordering_key="k", max_attempts=1)
    (job,) = claim(db, queues=["q"])
    value(db, "fail_job", job_id=job.job_id, lease_token=job.lease_token, error="no")

    found = call(db, "plan_queue_move", queue="q", database=6)

    assert [row.finding for row in found] == ["ordering_keys"]


def test_what_is_missing_there_is_told_before(db, there):
    value(db, "set_limit", queue="q", max_running=3)
    value(db, "set_queue", queue="q", lease="7 s")
    facts = value(db, "queue_move_facts", queue="q")

    found = {
        row.finding: row.severity for row in call(there, "receive_plan", queue="q", facts=facts)
    }
    value(there, "set_limit", queue="q", max_running=1)
    value(there, "set_queue", queue="q", lease="7 s")

    assert found == {"limits": "refused", "settings": "info"}
    assert call(there, "receive_plan", queue="q", facts=facts) == []
    assert call(db, "plan_queue_move", queue="q", database=6) == []


def test_a_limit_of_a_key_is_that_of_its_class_there(db, there):
    for database in (db, there):
        value(database, "set_limit", limit_key="shop:*", max_running=3)
    enqueue(db, queue="q", limit_key="shop:7")
    facts = value(db, "queue_move_facts", queue="q")

    assert call(there, "receive_plan", queue="q", facts=facts) == []
    value(there, "set_limit", limit_key="shop:7", weight=2)
    (found,) = call(there, "receive_plan", queue="q", facts=facts)
    assert found.evidence == "limit key shop:7 is not set in the other database"


def test_what_is_set_for_a_queue_and_its_types_is_told_before(db, there):
    def told() -> list[str]:
        facts = value(db, "queue_move_facts", queue="q")
        return [row.finding for row in call(there, "receive_plan", queue="q", facts=facts)]

    enqueue(db, queue="q")
    rule = {"error_type": "E", "retry_in": "1 hour"}
    for function, arguments in [
        ("set_queue", {"queue": "q", "retry_budget": {"per_minute": 5}}),
        ("set_retry_rule", {"queue": "q", **rule}),
        ("set_retry_rule", {"job_type": "x", **rule}),
        ("set_retry_rule", rule),
        ("set_breaker", {"queue": "q", "job_type": "x", "max_failures": 5}),
        ("set_type", {"job_type": "x", "time_limit": "1 hour"}),
    ]:
        value(db, function, **arguments)
        assert told() == ["settings"]
        value(there, function, **arguments)
        assert told() == []
    value(db, "set_type", job_type="y", time_limit="1 hour")
    value(db, "set_retry_rule", job_type="y", **rule)
    assert told() == []


PAUSES = {
    "queue q": ("pause_queue", {"queue": "q"}),
    "type x": ("pause_type", {"job_type": "x"}),
    "type y of q": ("pause_type", {"job_type": "y", "queue": "q"}),
    "all": ("pause_all", {}),
}


@pytest.mark.parametrize("name", PAUSES)
def test_what_an_operator_has_paused_does_not_go_where_it_would_run(db, there, name):
    function, arguments = PAUSES[name]
    for each in (db, there):
        value(each, "set_queue", queue="q")
    enqueue(db, queue="q", job_type="x")
    value(db, "pause_type", job_type="other")
    value(db, function, **arguments)
    facts = value(db, "queue_move_facts", queue="q")

    (found,) = call(there, "receive_plan", queue="q", facts=facts)
    value(there, function, **arguments)

    assert (found.severity, found.finding) == ("refused", "pauses")
    assert found.evidence.startswith(f"{name} is paused by an operator")
    assert call(there, "receive_plan", queue="q", facts=facts) == []
    there.execute("update rota.pauses set set_by = 'breaker'")  # which ends by itself
    assert call(there, "receive_plan", queue="q", facts=facts) == [found]


def test_a_database_that_takes_no_writes_is_told_before(db, there):
    facts = value(db, "queue_move_facts", queue="q")
    there.execute("set default_transaction_read_only = on")

    (found,) = call(there, "receive_plan", queue="q", facts=facts)
    (other,) = call(there, "plan_queue_move", queue="q", database=5)

    for each in (found, other):
        assert (each.severity, each.finding) == ("refused", "read_only")


def test_a_queue_that_is_resumed_there_while_it_moves_goes_on_moving(db, there):
    enqueue(db, queue="q")
    value(db, "pause_queue", queue="q")
    value(db, "begin_queue_move", queue="q", database=6)

    facts = value(db, "queue_move_facts", queue="q")

    assert facts["pauses"] == ["queue q"]
    assert call(there, "receive_plan", queue="q", facts=facts) == []


def test_a_move_that_is_not_ended_there_is_told_before(db, there):
    settle(db, there, begin(db, there))
    facts = value(db, "queue_move_facts", queue="q")
    assert call(there, "receive_plan", queue="q", facts=facts) == []
    value(db, "end_queue_move", queue="q")
    facts = value(db, "queue_move_facts", queue="q")

    (found,) = call(there, "receive_plan", queue="q", facts=facts)
    there.execute(found.remedy)

    assert (found.severity, found.finding) == ("refused", "move")
    assert call(there, "receive_plan", queue="q", facts=facts) == []


LATER = {
    "schedule_job": {"name": "s", "schedule": "every 1 hour", "job_type": "x", "queue": "q"},
    "define_pipeline": {
        "pipeline": "p",
        "stages": '[{"stage": "a", "job_type": "x", "queue": "q"}]',
    },
    "enqueue": {"job_type": "x", "queue": "q", "idempotency_key": "k", "unique_for": "1 hour"},
}


@pytest.mark.parametrize("function", LATER)
def test_what_cannot_move_is_refused_while_it_moves(db, there, function):
    begin(db, there)

    with raises("RT016"):
        call(db, function, **LATER[function])


def test_no_job_comes_to_wait_for_one_that_moves(db, there):
    parent = enqueue(db, queue="q")
    move_id = begin(db, there)

    with raises("RT016"):
        enqueue(db, depends_on=[parent])
    carry(db, there, move_id)
    with raises("RT016"):
        enqueue(db, depends_on=[parent])


def brought(db: Db, act: str, job_id: int) -> Any:
    given = '{"queue": "q"}' if act == "move" else "{}"
    wanted = json.dumps({"ids": [job_id]})
    return one(db, "act_on_jobs", act=act, filter=wanted, arguments=given)


def test_what_cannot_go_is_not_brought_to_a_queue_that_moves(db, there):
    """It would run nowhere, and the move would never end."""
    call(db, "schedule_job", name="s", schedule="@yearly", job_type="x", queue="q")
    value(db, "run_schedule_now", name="s")
    (job,) = claim(db, queues=["q"])
    value(db, "fail_job", job_id=job.job_id, lease_token=job.lease_token, error="no",
        fatal=True)  # fmt: skip
    call(db, "schedule_job", name="s", schedule="@yearly", job_type="x", queue="r")
    of_schedule = value(db, "run_schedule_now", name="s")
    parent = enqueue(db, queue="r")
    child = enqueue(db, queue="r", depends_on=[parent])
    free = enqueue(db, queue="r")
    move_id = begin(db, there)

    with raises("RT016"):
        call(db, "retry_job", job_id=job.job_id)
    for job_id in (of_schedule, parent, child):
        report = brought(db, "move", job_id)
        assert (report.changed, len(report.conflicts)) == (0, 1)
    assert brought(db, "move", free).changed == 1
    settle(db, there, move_id)
    assert [job[0] for job in jobs(there)] == [free]


def test_a_job_whose_dependant_has_ended_goes_and_is_not_waited_for_again(db, there):
    job = running(db, queue="q")
    parent = job.job_id
    child = enqueue(db, queue="r", depends_on=[parent])
    value(db, "fail_job", job_id=parent, lease_token=job.lease_token, error="no", fatal=True)
    call(db, "tick")
    assert run(db, child).status == "cancelled"
    value(db, "retry_job", job_id=parent)
    move_id = begin(db, there)

    with raises("RT016"):
        call(db, "retry_job", job_id=child)
    settle(db, there, move_id)

    assert [job[0] for job in jobs(there)] == [parent]
    for database in (db, there):
        value(database, "end_queue_move", queue="q")
    with raises("RT016"):
        call(db, "retry_job", job_id=child)


def test_a_dead_job_that_is_waited_for_is_told_before(db, there):
    parent = enqueue(db, queue="q")
    enqueue(db, queue="r", depends_on=[parent], if_parent_dead="wait")
    (job,) = claim(db, queues=["q"])
    value(db, "fail_job", job_id=parent, lease_token=job.lease_token, error="no", fatal=True)

    assert [row.finding for row in call(db, "plan_queue_move", queue="q", database=6)] == [
        "dependencies"
    ]


def test_what_came_in_without_seeing_the_move_is_told(connect, db, there):
    with connect() as other, other.transaction():
        parent = enqueue(other, queue="q")
        child = enqueue(other, queue="q", depends_on=[parent])
        move_id = begin(db, there)
    assert carry(db, there, move_id) == "moving"

    waits = one(db, "queue_move_status", queue="q").obstacle
    value(db, "cancel_job", job_id=child)
    settle(db, there, move_id)

    assert waits == f"job {parent}, for which job {child} waits"
    assert [job[0] for job in jobs(there)] == [parent]


def test_no_job_with_a_key_is_brought_to_a_queue_that_comes(db, there):
    job_id = enqueue(there, queue="r", ordering_key="k")
    settled = begin(db, there)
    assert brought(there, "move", job_id).changed == 0
    settle(db, there, settled)

    assert brought(there, "move", job_id).changed == 1


def test_a_move_ends_when_nothing_is_left(db, there):
    enqueue(db, queue="q")
    (runs,) = claim(db, queues=["q"])
    job_id = enqueue(db, queue="q")
    move_id = begin(db, there)
    assert carry(db, there, move_id) == "moving"
    for database in (db, there):
        with raises("RT016"):
            call(database, "end_queue_move", queue="q")
    value(db, "finish_job", job_id=runs.job_id, lease_token=runs.lease_token)
    settle(db, there, move_id)

    for database in (db, there):
        value(database, "end_queue_move", queue="q")
        with raises("RT004"):
            call(database, "end_queue_move", queue="q")

    enqueue(db, queue="q")
    assert len(claim(db, queues=["q"])) == 1
    with raises("RT016"):
        call(db, "explain_job", job_id=job_id)


@pytest.mark.parametrize("has_jobs", [True, False])
def test_a_late_call_of_a_mover_begins_no_move_that_has_ended(db, there, has_jobs):
    """Keys of the queue would be refused from then on; a source that was restored goes on."""
    settle(db, there, move_id := begin(db, there))
    if has_jobs:
        value(there, "end_queue_move", queue="q")
        enqueue(db, queue="q")
        carry(db, there, move_id)
        assert (jobs(db), len(jobs(there))) == ([], 1)
    for database in (db, there):
        value(database, "end_queue_move", queue="q")

    with refused("move_id"):
        receive(there, move_id)
    enqueue(there, queue="q", idempotency_key="k")

    receive(there, move_id, settle_above=0)
    assert receive(there, move_id) == []


def test_a_move_can_be_called_off_until_the_first_job_leaves(db, there):
    job_id = enqueue(db, queue="q")
    move_id = begin(db, there)
    step(db, there, move_id)
    for database in (db, there):
        value(database, "end_queue_move", queue="q")
    assert [job.job_id for job in claim(db, queues=["q"])] == [job_id]
    with refused("move_id"):  # a late call of a mover that died begins it again no more
        receive(there, move_id)
    enqueue(db, queue="q")
    move_id = begin(db, there)
    take_out(db, move_id)

    with raises("RT016"):
        call(db, "end_queue_move", queue="q")


def test_jobs_have_their_places_after_the_move_is_called_off(db, there):
    value(db, "set_queue", queue="q", ageing="1 hour")
    while rows(db, "select from rota.pending_checks"):
        one(db, "tick")
    value(db, "begin_queue_move", queue="q", database=6)
    ids = [enqueue(db, queue="q", priority=priority) for priority in (9, 0)]
    later = enqueue(db, queue="q", delay="30 days")

    value(db, "end_queue_move", queue="q")
    one(db, "tick")

    places = "select id, own_place - run_at as place, hold from rota.jobs order by id"
    assert rows(db, places) == [
        (ids[0], timedelta(hours=9), None),
        (ids[1], timedelta(0), None),
        (later, None, "time"),
    ]


@pytest.mark.parametrize("hours", [None, 1])
def test_an_operators_pause_is_there_after_the_move_is_called_off(db, there, hours):
    enqueue(db, queue="q")
    until = None if hours is None else f"{hours} hours"
    db.execute(
        "select rota.pause_queue('q', 'mine', until => rota.now() + %s::interval)", (until,)
    )
    begin(db, there)
    pauses = "select set_by, reason, until from rota.pauses where queue = 'q'"
    assert rows(db, pauses) == [("operator", "mine", None)]

    value(db, "end_queue_move", queue="q")

    assert rows(db, pauses) == [("operator", "mine", None)]


@pytest.mark.parametrize("function", ["take_moves", "end_queue_move"])
def test_what_ends_a_move_is_not_done_in_an_older_snapshot(connect, db, there, function):
    """It would not see a job that is on its way, or one with a key that is to go before."""
    move_id = begin(db, there)
    if function == "end_queue_move":
        settle(db, there, move_id)
    old = connect()
    old.execute("set default_transaction_isolation = 'repeatable read'")
    arguments = {"move_id": move_id} if function == "take_moves" else {"queue": "q"}

    with raises("RT009"), old.transaction():
        old.execute("select 1 from rota.jobs")
        enqueue(db, queue="q", ordering_key="k")
        if function == "end_queue_move":
            call(db, "take_moves", move_id=move_id)
        call(old, function, **arguments)


def test_no_late_job_leaves_while_the_move_is_being_ended(connect, db, there):
    """It would be on its way without a move, so that no mover would send it."""
    settle(db, there, move_id := begin(db, there))
    operator = connect(autocommit=False)
    value(operator, "end_queue_move", queue="q")

    late = enqueue(db, queue="q")
    found = call(db, "take_moves", move_id=move_id)
    operator.commit()

    assert found == []
    assert [job.job_id for job in claim(db, queues=["q"])] == [late]


def test_what_is_to_be_erased_does_not_escape_on_its_way(db, there):
    ids = [enqueue(db, queue="q", payload={"user": user, "n": 1}) for user in (7, 8, 7)]
    take_out(db, move_id := begin(db, there))
    assert taken(db, move_id) == ids
    asked = {"act": "erase", "filter": {"payload": {"user": 7}}}

    for dry_run in (True, False):
        told = call(db, "act_on_jobs", **asked, dry_run=dry_run)
        assert [(row.matched, row.conflicts) for row in told] == [
            (0, [
                {"job_id": n, "is_missing": True, "reason": "on its way to database 6"}
                for n in (ids[0], ids[2])
            ])
        ]  # fmt: skip
    settle(db, there, move_id)
    assert [row.matched for row in call(there, "act_on_jobs", **asked)] == [2]
    assert [row.conflicts for row in call(db, "act_on_jobs", **asked)] == [[]]


def test_a_queue_that_comes_back_loses_no_job(db, there):
    """Its first arrival is no receipt for the second."""
    job_id = enqueue(db, queue="q")
    settle(db, there, begin(db, there))
    for database in (db, there):
        value(database, "end_queue_move", queue="q")
    for n, (source, target) in enumerate([(there, db), (db, there)]):
        source_number, number = (6, 5) if n == 0 else (5, 6)
        move_id = value(source, "begin_queue_move", queue="q", database=number)
        settle(source, target, move_id, from_database=source_number)
        assert [job[0] for job in jobs(target)] == [job_id]
        for database in (db, there):
            value(database, "end_queue_move", queue="q")


def told(db: Db, job_id: int) -> tuple[str | None, str | None]:
    """The SQLSTATE and detail for a caller who asks for a job."""
    with pytest.raises(psycopg.Error) as raised:
        call(db, "cancel_job", job_id=job_id)
    return raised.value.sqlstate, raised.value.diag.message_detail


def test_a_job_that_came_back_and_is_gone_is_not_said_to_be_elsewhere(db, there, clock):
    """Each of the two databases would lead to the other one."""
    job_id = enqueue(db, queue="q")
    settle(db, there, begin(db, there))
    come_back(db, there)
    assert told(there, job_id) == ("RT016", f"5 {job_id}")

    (job,) = claim(db, queues=["q"])
    value(db, "finish_job", job_id=job_id, lease_token=job.lease_token)
    assert told(db, job_id)[0] == "RT003"
    clock.advance("8 days 1 hour")
    call(db, "tick")
    clock.advance("11 s")
    call(db, "tick")

    assert told(db, job_id) == ("RT001", None)


@pytest.mark.parametrize("is_purged", [False, True])
def test_a_source_that_was_restored_brings_back_no_job_that_had_arrived(db, there, is_purged):
    """Neither what runs or has ended there, nor what came late and has another id there."""
    ids = [enqueue(db, queue="q") for _ in range(2)]
    first = begin(db, there)
    settle(db, there, first)
    late = enqueue(db, queue="q")
    backup = rows(db, "select to_jsonb(j) from rota.jobs as j where j.id = %s", late)
    carry(db, there, first)
    (ended, runs) = claim(there, queues=["q"], max_jobs=2)
    value(there, "finish_job", job_id=ended.job_id, lease_token=ended.lease_token)
    effect = {"scope": "mail", "key": "1", "job_id": runs.job_id}
    value(there, "record_effect", lease_token=runs.lease_token, **effect)
    if is_purged:
        assert one(there, "act_on_jobs", act="purge", filter='{"all": true}').changed == 1
    arrived = jobs(there)
    db.execute("""with gone as (delete from rota.moved_jobs returning job_id)
        insert into rota.jobs overriding system value select (jsonb_populate_record(
            null::rota.jobs, %s || jsonb_build_object('id', source_job_id, 'created_at',
            source_created_at))).*
        from gone join jsonb_to_recordset(%s) as r (
            source_job_id bigint, source_created_at timestamptz) on source_job_id = job_id""",
        (json.dumps(backup[0][0]), json.dumps([row[0] for row in rows(there,
        "select to_jsonb(r) from rota.receipts as r")])))  # fmt: skip
    db.execute("delete from rota.queue_moves")
    new = enqueue(db, queue="q")
    assert [job[0] for job in jobs(db)] == [*ids, late, new]
    value(there, "end_queue_move", queue="q")

    again = begin(db, there)
    settle(db, there, again)

    assert [job for job in jobs(there) if job[0] != new] == arrived
    assert len(jobs(there)) == 3
    assert rows(there, "select * from rota.verify() where violations > 0") == []
    assert rows(there, "select key from rota.effects") == [("1",)]
    assert told(db, ids[0]) == ("RT016", f"6 {ids[0]}")
    assert told(db, late) == ("RT016", f"6 {arrived[-1][0]}")


def test_a_move_that_its_source_has_forgotten_can_be_ended(db, there):
    """It was restored from a backup of before the move, which had not settled."""
    runs = running(db, queue="q")
    gone = enqueue(db, queue="q")
    backup = rows(db, "select to_jsonb(j) from rota.jobs as j where j.id = %s", gone)
    assert carry(db, there, begin(db, there)) == "moving"
    assert [job[0] for job in jobs(there)] == [gone]
    db.execute("delete from rota.moved_jobs")
    db.execute("delete from rota.queue_moves")
    db.execute(
        "insert into rota.jobs overriding system value"
        " select (jsonb_populate_record(null::rota.jobs, %s)).*",
        [json.dumps(backup[0][0])],
    )
    value(db, "finish_job", job_id=runs.job_id, lease_token=runs.lease_token)
    facts = value(db, "queue_move_facts", queue="q")
    (found,) = call(there, "receive_plan", queue="q", facts=facts)
    with pytest.raises(psycopg.Error, match="still moves from database 5") as refusal:
        there.execute(found.remedy)

    there.execute(refusal.value.diag.message_hint.partition("first: ")[2])
    there.execute(found.remedy)
    settle(db, there, begin(db, there))

    assert [job[0] for job in jobs(there)] == [gone]
    assert jobs(db) == []


def test_a_mover_that_ends_between_the_two_settlements_is_followed_by_another(db, there):
    enqueue(db, queue="q", ordering_key="k")
    move_id = begin(db, there)

    assert carry(db, there, move_id) == "settling"
    for has_settled_there in (False, True):
        if has_settled_there:
            with db.transaction(force_rollback=True):
                step(db, there, move_id)
            assert state(there) == "settled"
        assert [row.move_id for row in call(db, "waiting_moves")] == [move_id]
        with raises("RT016"):
            call(db, "end_queue_move", queue="q")
    step(db, there, move_id)
    assert state(db) == state(there) == "settled"
    assert call(db, "waiting_moves") == []


def test_what_comes_before_the_other_database_settles_stays_behind_its_line(db, there):
    """Its new id would be a low one there until that has raised its sequence."""
    line = [enqueue(db, queue="q", ordering_key="k") for _ in range(2)]
    move_id = begin(db, there)
    assert carry(db, there, move_id) == "settling"
    enqueue(db, queue="q", ordering_key="k")

    carry(db, there, move_id)

    ids = [job[0] for job in jobs(there)]
    assert (ids[:2], len(ids)) == (line, 3)


def test_a_move_that_begins_is_written_before_it_is_told(db, there):
    """Else a crash may forget it, and not what has arrived there."""
    with db.transaction():
        db.execute("set local synchronous_commit = off")
        value(db, "begin_queue_move", queue="q", database=6)

        assert scalar(db, "show synchronous_commit") == "on"


def test_begin_is_the_same_again(db, there):
    assert begin(db, there) == begin(db, there)
    with refused("queue"):
        call(db, "begin_queue_move", queue="q", database=7)
    with refused("queue"):
        receive(there, 99)


def test_a_move_under_way_goes_on_whatever_comes_of_its_keys(db, there):
    job = running(db, queue="q", ordering_key="k", max_attempts=1)
    move_id = begin(db, there)
    value(db, "fail_job", job_id=job.job_id, lease_token=job.lease_token, error="no")
    assert call(db, "plan_queue_move", queue="q", database=6) == []
    enqueue(db, queue="q", ordering_key="k")
    for queue in "rq":
        enqueue(db, queue=queue, ordering_key="o")

    found = call(db, "plan_queue_move", queue="q", database=6)

    assert [(row.severity, row.finding) for row in found] == [("info", "ordering_keys")] * 2
    assert value(db, "begin_queue_move", queue="q", database=6) == move_id


def test_a_move_under_way_goes_on_whatever_limit_is_set(db, there):
    begin(db, there)
    value(db, "set_limit", queue="q", max_running=3)

    facts = value(db, "queue_move_facts", queue="q")
    (found,) = call(there, "receive_plan", queue="q", facts=facts)

    assert (found.severity, found.finding) == ("info", "limits")


def test_what_a_late_job_waits_for_is_told(db, there):
    settle(db, there, begin(db, there))
    job = running(db, queue="r", ordering_key="k", max_attempts=1)
    enqueue(db, queue="q", ordering_key="k")

    behind = one(db, "queue_move_status", queue="q").obstacle
    value(db, "fail_job", job_id=job.job_id, lease_token=job.lease_token, error="no")
    halted = one(db, "queue_move_status", queue="q").obstacle

    assert behind == f"ordering key 'k', behind job {job.job_id} of queue r"
    assert halted == f"ordering key 'k', halted by job {job.job_id}"


def test_bad_arguments_are_refused_by_name(db, there):
    move_id = begin(db, there)
    of_no_move = ('[{"id": "x"}]', '[{"id": 1.5}]', '[{"id": 1, "created_at": "soon"}]')
    bad_jobs = [{"jobs": jobs} for jobs in ("{}", *of_no_move)]
    numbers = [{"move_id": number} for number in (None, 0, -(2**63))]
    for bad in (*numbers, {"from_database": 6}, {"queue": ""}, *bad_jobs):
        with refused(next(iter(bad))):
            receive(there, **{"move_id": move_id, **bad})
    with refused("jobs"):
        receive(there, move_id, json.dumps([{}] * 1001))
    for name, value_ in (("move_id", 1), ("max_jobs", 0), ("max_bytes", 0)):
        with refused(name):
            call(db, "take_moves", **{"move_id": move_id, name: value_})
    for endings in ("{}", "[{}]"):
        with refused("endings"):
            call(db, "end_moves", move_id=move_id, job_ids=[], endings=endings)
    for facts in ("[]", "{}", "null", None):
        with refused("facts"):
            call(there, "receive_plan", queue="q", facts=facts)
    with refused("database"):
        call(db, "plan_queue_move", queue="q", database=1024)


def test_no_call_at_the_wrong_database_settles_a_move(db, there):
    enqueue(db, queue="q", ordering_key="line")
    move_id = begin(db, there)
    wrong = {"move_id": move_id, "settle_above": 0}

    for database, bad in ((db, {"from_database": 6}), (there, {"from_database": 7})):
        with refused("queue"):
            receive(database, **wrong, **bad)
    with refused("move_id"):
        receive(there, **wrong, queue="r")

    assert rows(db, "select state from rota.queue_moves") == [("moving",)]
    assert rows(there, "select state from rota.queue_moves") == [("moving",)]


def test_what_the_target_makes_by_itself_comes_while_the_queue_does(db, there):
    for name, every in [("s", "1 second"), ("t", "1 hour")]:
        call(there, "schedule_job", name=name, schedule=f"every {every}", job_type="z",
            queue="q", overlap="queue")  # fmt: skip
    job = running(there, queue="q", idempotency_key="k")
    enqueue(there, queue="q", idempotency_key="k", on_conflict="rerun")
    begin(db, there)

    value(there, "finish_job", job_id=job.job_id, lease_token=job.lease_token)
    value(there, "run_schedule_now", name="t")
    wait_until(lambda: one(there, "tick").jobs_enqueued, "a job of the schedule")

    made = rows(
        there, "select coalesce(definition, idempotency_key) from rota.jobs order by id"
    )
    assert [name for (name,) in made] == ["k", "t", "s"]
    with raises("RT016"):
        enqueue(there, queue="q", idempotency_key="other")
    with raises("RT016"):
        call(
            there, "enqueue_many", jobs='[{"job_type": "x", "queue": "q", "ordering_key": "o"}]'
        )
