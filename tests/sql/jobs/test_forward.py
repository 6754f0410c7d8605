"""Jobs that travel: made here, taken, received there once, and ended as they were received."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from sql.helpers import call, enqueue, one, raises, refused, rows, run, scalar, settle, value
from support.waiting import wait_until

pytestmark = pytest.mark.slow

NOW = datetime(2026, 1, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _numbered(db):
    value(db, "set_database_number", number=5)


def send(db, **arguments):
    return value(db, "enqueue_to", **{"database": 6, "job_type": "x", **arguments})


def take(db, max_jobs=100, **arguments):
    return call(db, "take_forwards", worker="w", database=6, max_jobs=max_jobs, **arguments)


def end(db, taken, endings):
    ids = [job.job_id for job in taken]
    tokens = [job.lease_token for job in taken]
    value(db, "end_forwards", job_ids=ids, lease_tokens=tokens, endings=json.dumps(endings))


def arrived(taken):
    return [{"job_id": number} for number, _ in enumerate(taken, 1)]


def receive(db, *jobs, first=1006, database=5, day=12):
    """Receive jobs here, as if they had been sent by another database on that day."""
    ids = [first + 1024 * n for n in range(len(jobs))]
    times = [datetime(2026, 1, day, tzinfo=UTC)] * len(jobs)
    return call(
        db, "receive_jobs", database=database, job_ids=ids, enqueue_times=times,
        jobs=json.dumps(jobs),
    )  # fmt: skip


def test_enqueue_to_makes_a_job_that_carries_all_that_was_given(db):
    job_id = send(db, queue="q", payload={"a": 1}, priority=3, idempotency_key="k",
        max_attempts=2, limit_key="l", headers={"h": "v"})  # fmt: skip

    with db.transaction():
        (taken,) = take(db)

    assert run(db, job_id).queue == "forward:6"
    assert taken.job_id == job_id
    assert json.loads(taken.job) == {
        "job_type": "x", "queue": "q", "payload": {"a": 1}, "priority": 3,
        "idempotency_key": "k", "max_attempts": 2, "limit_key": "l", "headers": {"h": "v"},
    }  # fmt: skip


def test_erase_finds_what_carries_or_has_carried_a_payload(db):
    of_ann = {"payload": json.dumps({"name": "Ann"})}
    sent = send(db, **of_ann)
    with db.transaction():
        taken = take(db)
        end(db, taken, arrived(taken))
    waiting = send(db, **of_ann)
    other = send(db, payload=json.dumps({"name": "Ben"}))

    erased = one(db, "act_on_jobs", act="erase", filter='{"payload": {"name": "Ann"}}')

    assert erased.changed == 2
    assert [run(db, job_id).payload for job_id in (sent, waiting)] == [{"erased": True}] * 2
    assert run(db, waiting).status == "cancelled"
    assert run(db, other).payload["payload"] == {"name": "Ben"}


def test_enqueue_to_this_database_is_enqueue(db):
    job_id = send(db, database=5, queue="q")

    assert (run(db, job_id).queue, run(db, job_id).job_type) == ("q", "x")


def test_enqueue_to_refuses_what_the_other_database_would(db):
    for argument, bad in [
        *(("database", -1), ("database", 1024), ("database", None), ("job_type", "")),
        *(("priority", 10**6), ("delay", "-1 s"), ("skip_dead", True), ("on_conflict", "no")),
        ("queue", "forward:7"),
    ]:
        with refused(argument):
            send(db, **{argument: bad})


def test_enqueue_to_needs_a_number_here(db):
    db.execute("alter sequence rota.jobs_id_seq increment by 1")

    with raises("RT015"):
        send(db)


def test_jobs_that_travel_are_claimed_by_forwarders_alone(db):
    send(db)
    send(db, ordering_key="k")

    for job_types in (None, ["rota.forward"]):
        for queues in (["forward:6"], ["q", "forward:6"]):
            with refused("queues"):
                call(db, "claim_jobs", worker="w", queues=queues, job_types=job_types)
    assert len(take(db)) == 2
    with refused("queues"):
        call(db, "claim_jobs", worker="w", queues=["forward:6"])


def test_take_forwards_takes_no_more_bytes_than_told_but_one_job(db):
    ids = [send(db, payload={"text": "x" * 300}) for _ in range(4)]
    line = [send(db, ordering_key="k", payload={"text": "x" * 300}) for _ in range(3)]
    taken = []
    for max_bytes in (1, 1000, 2000):
        with db.transaction():
            batch = take(db, max_bytes=max_bytes)
            end(db, batch, arrived(batch))
        settle(db)
        taken.append([job.job_id for job in batch])

    assert taken == [ids[:1], ids[1:3], [ids[3], *line]]
    assert scalar(db, "select count(*) from rota.jobs") == 0


def test_what_is_left_for_its_bytes_is_as_it_was(db):
    ids = [send(db) for _ in range(3)]
    take(db, max_bytes=1)

    assert {(run(db, job_id).status, run(db, job_id).attempts) for job_id in ids[1:]} == {
        ("queued", 0)
    }


def test_take_forwards_refuses_bad_arguments(db):
    for argument, bad in [("database", 1024), ("max_jobs", 0), ("max_bytes", 0)]:
        with refused(argument):
            call(db, "take_forwards", **{"worker": "w", "database": 6, argument: bad})


def test_waiting_forwards_leaves_out_what_is_paused(db):
    send(db, database=6)
    send(db, database=700)
    value(db, "pause_queue", queue="forward:6")

    assert [row[0] for row in call(db, "waiting_forwards")] == [700]


@pytest.mark.parametrize("known", [None, ["forward:7"], ["forward:6"]])
def test_it_is_told_that_no_forwarder_knows_a_database(db, clock, known):
    clock.set("2026-01-12 09:00+00")
    job_id = send(db)
    clock.advance("1 minute")
    if known:
        call(db, "report_worker", worker="f", host="h", pid=1, version="0.2.0", queues=known,
            job_types=["rota.forward"])  # fmt: skip

    reasons = {row.reason: row.explanation for row in call(db, "explain_job", job_id=job_id)}
    found = {row.finding: row.evidence for row in call(db, "doctor") if row.severity != "ok"}

    assert "no_worker" not in reasons
    assert "job_types" not in found
    assert ("waits_for_forwarder" in reasons) == (known != ["forward:6"])
    assert ("forwards" in found) == (known != ["forward:6"])
    if known == ["forward:7"]:
        assert "but know only the databases 7" in found["forwards"]
        assert "1 job is waiting, the first for" in found["forwards"]


def test_it_is_told_that_a_database_does_not_take_a_job(db, clock):
    """It is always due in a moment, so no queue is late."""
    job_id = send(db)
    for minutes, findings in [(1, []), (6, ["forwards"])]:
        clock.advance(f"{minutes} minutes")
        with db.transaction():
            taken = take(db)
            end(db, taken, [{"job_id": None, "error_code": "XX000", "message": "no"}])

        found = [row for row in call(db, "doctor") if row.finding in ("forwards", "queues")]

        assert [row.finding for row in found if row.severity != "ok"] == findings
    (told,) = [row.evidence for row in found if row.finding == "forwards"]
    assert f"database 6 has not taken job {job_id} for" in told


def test_it_is_told_that_a_database_is_away(db, clock):
    """Its jobs stay as they are, and no worker would help."""
    job_id = send(db)
    clock.advance("6 minutes")
    call(db, "report_worker", worker="f", host="h", pid=1, version="0.2.0",
        queues=["forward:6"], job_types=["rota.forward"])  # fmt: skip

    reasons = {row.reason: row.explanation for row in call(db, "explain_job", job_id=job_id)}
    found = {row.finding: row.evidence for row in call(db, "doctor") if row.severity != "ok"}

    assert "a forwarder will carry it, or its log" in reasons["next"]
    assert "queues" not in found
    assert found["forwards"].startswith(f"database 6 has not taken job {job_id} for 6 min")


def test_waiting_forwards_names_databases_with_jobs_that_wait(db):
    send(db, database=6)
    send(db, database=700)
    enqueue(db, queue="forwards")
    db.execute("""insert into rota.jobs (queue, job_type, status, payload, run_at, max_attempts,
            priority)
        select 'forward:' || name, 'x', 'queued', '{}', rota.now(), 1, 0
        from unnest('{mail,99999999999}'::text[]) as name""")

    assert [row[0] for row in call(db, "waiting_forwards")] == [6, 700]


def test_a_delay_counts_from_the_enqueue(db, clock):
    clock.set("2026-01-12 09:00+00")
    send(db, delay="1 hour")

    (taken,) = take(db)

    assert json.loads(taken.job)["run_at"] == "2026-01-12T10:00:00+00:00"


def test_end_forwards_ends_each_as_it_was_received(db):
    good, bad = send(db), send(db)

    with db.transaction():
        taken = take(db)
        end(db, taken, [{"job_id": 77}, {"error_code": "22023", "message": "queue is no"}])

    assert (run(db, good).status, run(db, good).result) == ("succeeded", {"job_id": 77})
    assert (run(db, bad).status, run(db, bad).error_type) == ("dead", "22023")
    assert run(db, bad).last_error == "queue is no"


def test_a_line_is_taken_together_and_in_order(db):
    ids = [send(db, ordering_key="k") for _ in range(7)]
    other = send(db, ordering_key="l")

    with db.transaction():
        taken = take(db, 6)
        end(db, taken, arrived(taken))
    settle(db)
    with db.transaction():
        rest = take(db, 6)
        end(db, rest, arrived(rest))

    assert [job.job_id for job in taken] == [*ids[:3], other]
    assert [job.job_id for job in rest] == ids[3:]
    assert {run(db, job_id).status for job_id in [*ids, other]} == {"succeeded"}


def test_explain_job_says_where_a_job_has_arrived(db):
    ids = [send(db, ordering_key="k") for _ in range(2)]
    with db.transaction():
        taken = take(db)
        end(db, taken, [{"job_id": 7}, {"job_id": 8}])

    told = [one(db, "explain_job", job_id=job_id).explanation for job_id in ids]

    assert [re.sub(r"[0-9]+ s ago", "N s ago", words) for words in told] == [
        f"it arrived in database 6 N s ago, where it is job {there}" for there in (7, 8)
    ]


def test_a_rollback_leaves_a_line_as_it_was(db):
    ids = [send(db, ordering_key="k") for _ in range(3)]
    with db.transaction(force_rollback=True):
        taken = take(db)
        end(db, taken, arrived(taken))

    assert [job.job_id for job in take(db)] == ids
    assert [run(db, job_id).status for job_id in ids] == ["running", "blocked", "blocked"]


def test_a_refused_job_halts_its_line_and_those_before_it_have_arrived(db):
    ids = [send(db, ordering_key="k") for _ in range(3)]
    refusal = {"error_code": "22023", "message": "no"}

    with db.transaction():
        end(db, take(db), [{"job_id": 1}, refusal, {}])
    with db.transaction():
        end(db, take(db), [refusal, {}])
    settle(db)

    assert [run(db, job_id).status for job_id in ids] == ["succeeded", "dead", "blocked"]
    assert take(db) == []


@pytest.mark.own_session
def test_a_job_that_somebody_holds_is_not_taken_nor_what_is_behind_it(connect, db):
    ids = [send(db, ordering_key="k") for _ in range(4)]
    holder = connect(autocommit=False)
    holder.execute("select from rota.jobs where id = %s for update", (ids[2],))

    assert [job.job_id for job in take(db)] == ids[:2]


def test_end_forwards_refuses_who_lost_a_lease(db):
    send(db)
    taken = take(db)
    call(db, "release_jobs", job_ids=[taken[0].job_id], lease_tokens=[taken[0].lease_token])

    with raises("RT002"):
        end(db, taken, arrived(taken))


def test_end_forwards_ends_no_job_that_does_not_travel(db):
    first, second = (enqueue(db, ordering_key="k") for _ in range(2))
    (running,) = call(db, "claim_jobs", worker="w")
    stay = "select id, status from rota.jobs order by id"

    with raises("RT002"):
        call(db, "end_forwards", job_ids=[second], lease_tokens=[0],
            endings=json.dumps([{"job_id": 1}]))  # fmt: skip
    with raises("RT002"):
        end(db, [running], [{"job_id": 1}])
    end(db, [running], [{"error_code": "22023"}])

    assert [tuple(row) for row in rows(db, stay)] == [(first, "running"), (second, "blocked")]


def test_receive_jobs_enqueues_each_once(db):
    jobs = [{"job_type": "a", "queue": "q"}, {"job_type": "b", "idempotency_key": "k"}]

    first = receive(db, *jobs)
    again = receive(db, *jobs, {"job_type": "c"})

    assert [row.job_id for row in again[:2]] == [row.job_id for row in first]
    assert [r.job_type for r in rows(db, "select job_type from rota.jobs order by id")] == [
        *"abc"
    ]


def test_a_line_arrives_in_order_whatever_its_keys_do(db):
    line = {"ordering_key": "k", "queue": "q"}
    key = {"idempotency_key": "once", "on_conflict": "replace"}
    jobs = [{"job_type": "y", **line}, {"job_type": "x", **key, **line}]

    received = receive(db, *jobs, {"job_type": "x", **line})

    ids = [row.job_id for row in received]
    assert ids == sorted(ids)


def test_a_restored_source_that_gives_ids_again_loses_nothing(db):
    """The dump is of before the job: the next job there gets its id, at another time."""
    (before,) = receive(db, {"job_type": "a"}, day=12)

    (after,) = receive(db, {"job_type": "b"}, day=13)

    assert after.job_id != before.job_id
    assert [r.job_type for r in rows(db, "select job_type from rota.jobs order by id")] == [
        *"ab"
    ]


def test_receive_jobs_refuses_a_bad_one_alone_and_takes_nothing_behind_it(db):
    line = {"job_type": "x", "ordering_key": "k"}

    received = receive(db, line, {**line, "priority": 10**6}, line, {"job_type": "y"})

    assert [row.ordinal for row in received if row.job_id] == [1, 4]
    (bad,) = [row for row in received if row.error_code]
    assert (bad.ordinal, bad.error_code) == (2, "22023")
    assert bad.message.startswith("priority")
    assert scalar(db, "select count(*) from rota.jobs") == 2


def test_receive_jobs_names_an_unknown_key_without_a_place_in_a_list(db):
    (bad,) = receive(db, {"job_type": "x", "zzz": 1})

    assert bad.message == "has an unknown key 'zzz'"


def test_receive_jobs_refuses_what_is_for_another_database(db):
    with refused("database"):
        receive(db, {"job_type": "x"}, database=6)


def test_receive_jobs_refuses_what_does_not_fit_together(db):
    with refused("jobs"):
        call(db, "receive_jobs", database=5, job_ids=[1], enqueue_times=[NOW], jobs="[]")
    with refused("job_ids"):
        call(db, "receive_jobs", database=5, job_ids=[1, 1], enqueue_times=[NOW] * 2,
            jobs="[{}, {}]")  # fmt: skip
    for times in ([], [None], [NOW, NOW], [[NOW]]):
        with refused("enqueue_times"):
            call(db, "receive_jobs", database=5, job_ids=[1], enqueue_times=times,
                jobs="[{}]")  # fmt: skip


def test_receive_jobs_refuses_a_job_that_breaks_a_unique_index_of_others(db):
    """It never passes, and would keep all others back."""
    db.execute("create unique index on rota.jobs ((payload ->> 'order')) where queue = 'q'")
    job = {"job_type": "x", "queue": "q", "payload": {"order": 1}}
    receive(db, job)

    bad, good = sorted(receive(db, job, {"job_type": "y"}, first=99), key=lambda r: r.ordinal)

    assert (bad.error_code, good.error_code) == ("23505", None)


def test_receive_jobs_tells_of_each_job_for_which_a_right_is_missing(db):
    """A right can be given, and the jobs go then; the others go before."""
    db.execute(
        "create function pg_temp.fail() returns trigger language plpgsql as"
        " $$begin raise insufficient_privilege; end$$;"
        " create trigger fail before insert on rota.jobs for each row"
        " when (new.queue = 'theirs') execute function pg_temp.fail()"
    )

    told = receive(
        db, {"job_type": "x", "queue": "theirs", "ordering_key": "k"},
        {"job_type": "x", "queue": "theirs", "ordering_key": "k"}, {"job_type": "x"},
    )  # fmt: skip

    assert sorted((row.ordinal, row.error_code) for row in told) == [(1, "42501"), (3, None)]


def test_receive_jobs_raises_what_may_pass(db):
    """A full disk says nothing about the jobs."""
    db.execute(
        "create function pg_temp.fail() returns trigger language plpgsql as"
        " $$begin raise disk_full; end$$;"
        " create trigger fail before insert on rota.jobs execute function pg_temp.fail()"
    )

    with raises("53100"):
        receive(db, {"job_type": "x"})

    assert scalar(db, "select count(*) from rota.receipts") == 0


def test_a_job_whose_key_another_transaction_has_holds_up_no_other(connect, db):
    keyed = {"job_type": "x", "idempotency_key": "k"}
    batch = [{**keyed, "ordering_key": "o"}, {"job_type": "behind", "ordering_key": "o"},
             {"job_type": "free"}]  # fmt: skip
    stranger = connect(autocommit=False)
    call(stranger, "enqueue", **keyed)
    db.execute("set statement_timeout = '5s'")

    first = receive(db, *batch)
    stranger.rollback()
    second = receive(db, *batch)

    assert [(row.ordinal, row.error_code) for row in first] == [(1, "55P03"), (3, None)]
    assert [(row.ordinal, row.error_code) for row in second] == [(n, None) for n in (1, 2, 3)]


@pytest.mark.parametrize("keys", [["k"] * 9, [f"k{n}" for n in range(9)]], ids=["one", "nine"])
def test_jobs_whose_keys_another_transaction_has_wait_once_for_it(connect, db, keys):
    db.execute("alter function rota.receive_jobs set lock_timeout = '1s'")
    batch = [{"job_type": "x", "idempotency_key": key} for key in keys]
    stranger = connect(autocommit=False)
    for each in batch:
        call(stranger, "enqueue", **each)
    db.execute("set statement_timeout = '5s'")

    told = receive(db, *batch, {"job_type": "x", "idempotency_key": "l"})

    assert [row.error_code for row in sorted(told)] == ["55P03"] * 9 + [None]


@pytest.mark.own_session
def test_two_that_receive_the_same_job_enqueue_it_once(connect, db):
    """A receives and stays open; B receives the same and waits; A commits: B enqueues none."""
    db.execute("alter function rota.receive_jobs set lock_timeout = '30s'")
    a, b = connect(autocommit=False), connect()
    (mine,) = receive(a, {"job_type": "x"})
    with ThreadPoolExecutor() as threads:
        other = threads.submit(receive, b, {"job_type": "x"}, {"job_type": "y"})
        query = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        wait_until(lambda: scalar(db, query, b.info.backend_pid))
        a.commit()
        received = other.result()

    assert received[0].job_id == mine.job_id
    assert scalar(db, "select count(*) from rota.jobs") == 2


@pytest.mark.own_session
def test_receive_jobs_refuses_a_snapshot_that_may_lack_receipts(connect, db):
    """What another session has just taken would be in the way of its own receipt."""
    old = connect()
    old.execute("set default_transaction_isolation = 'repeatable read'")

    with raises("RT009"), old.transaction():
        old.execute("select 1 from rota.jobs")
        receive(db, {"job_type": "x"})
        receive(old, {"job_type": "x"})


def test_a_receiver_reads_no_receipts_of_others(db):
    """The plan was made when there were none."""
    receive(db, {"job_type": "x"})
    db.execute(
        "insert into rota.receipts (move_id, source_job_id, source_created_at, job_id)"
        " select 0, n, now(), n from generate_series(10000, 13000) as n"
    )

    with db.transaction():
        receive(db, {"job_type": "x"}, first=2006)
        index = "rota.receipts_pkey"
        read = scalar(db, f"select pg_stat_get_xact_tuples_returned('{index}'::regclass)")

    assert read < 10


def test_receipts_go_after_thirty_days(db, clock):
    clock.set("2026-01-12 09:00+00")
    receive(db, {"job_type": "x"})

    clock.advance("30 days 1 minute")
    settle(db)
    one(db, "tick")

    assert scalar(db, "select count(*) from rota.receipts") == 0


def test_only_what_has_a_key_waits_for_a_queue_that_is_still_coming(db):
    """Its line waits behind it; all else of the batch arrives, and each once."""
    move_id = 6 + 1024
    move = {"move_id": move_id, "from_database": 6, "queue": "q", "jobs": "[]"}
    call(db, "receive_moves", **move)
    keyed = {"job_type": "keyed", "queue": "q", "ordering_key": "k"}
    batch = [keyed, {"job_type": "free", "queue": "q"}, {"job_type": "other"},
             {"job_type": "behind", "ordering_key": "k"}]  # fmt: skip

    first = receive(db, *batch, database=5)
    call(db, "receive_moves", **move, settle_above=1)
    second = receive(db, *batch, database=5)

    assert [(row.ordinal, row.job_id is None, row.error_code) for row in first] == [
        (1, True, "RT016"), (2, False, None), (3, False, None),
    ]  # fmt: skip
    assert [(row.ordinal, row.error_code) for row in second] == [
        (n, None) for n in (1, 2, 3, 4)
    ]
    assert [row.job_type for row in rows(db, "select job_type from rota.jobs order by id")] == [
        "free", "other", "keyed", "behind",
    ]  # fmt: skip


@pytest.mark.parametrize("code", ["RT016", "42501", "55P03", "55000", "XX000"])
def test_a_job_that_cannot_be_taken_yet_is_sent_again_later(db, clock, code):
    """It is not dead, uses no attempt, keeps its line, and holds up nothing else."""
    line = [send(db, ordering_key="k") for _ in range(2)]
    free = send(db)
    coming = {"job_id": None, "error_code": code, "message": "not yet"}
    with db.transaction():
        taken = take(db)
        told = {line[0]: coming, free: {"job_id": 9}}
        end(db, taken, [told.get(job.job_id, {}) for job in taken])

    assert run(db, free).status == "succeeded"
    assert (run(db, line[0]).status, run(db, line[0]).attempts) == ("queued", 0)
    assert run(db, line[1]).status == "blocked"
    assert take(db) == []
    clock.advance("1 s")
    with db.transaction():
        again = take(db)
        end(db, again, arrived(again))
    assert [job.job_id for job in again] == line
    assert [run(db, job_id).status for job_id in line] == ["succeeded"] * 2


def test_a_job_whose_queue_comes_for_long_is_sent_seldom(db, clock):
    job_id = send(db)
    clock.advance("1 day")
    with db.transaction():
        taken = take(db)
        end(db, taken, [{"job_id": None, "error_code": "RT016", "message": "still coming"}])
    clock.advance("29 s")
    assert take(db) == []
    clock.advance("1 s")

    assert [job.job_id for job in take(db)] == [job_id]
