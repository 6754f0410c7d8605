"""Acts on all jobs that a filter finds, and what is kept of them."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from rota.client.listing import CONDITIONS
from sql.helpers import (
    call,
    claim,
    enqueue,
    grant,
    one,
    owner,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    settle,
    value,
)

pytestmark = pytest.mark.slow

HOUR = timedelta(hours=1)


def act(db, what, filter, arguments=None, **more):
    return one(db, "act_on_jobs", act=what, filter=filter, arguments=arguments or {}, **more)


def statuses(db, ids):
    return [run(db, job_id).status for job_id in ids]


def dead(db, *, error="boom", error_type="E", worker="w", **arguments):
    enqueue(db, **{"max_attempts": 1, **arguments})
    (job,) = claim(db, queues=[arguments.get("queue", "default")], worker=worker)
    one(db, "fail_job", **owner(job), error=error, error_type=error_type)
    return job.job_id


def log(db):
    return rows(db, "select * from rota.audit_log order by id")


def test_the_case_of_an_error_does_not_matter_in_turkish_or_english(turkish):
    """In Turkish i and I are two letters, and so are I and its small letter."""
    with psycopg.connect(turkish, autocommit=True) as db:
        english, local = dead(db, error="INVALID INPUT"), dead(db, error="IŞIK yok")

        for text, job_id in [("Invalid input", english), ("\u0131ş\u0131k YOK", local)]:
            found = act(db, "retry", {"error_text": text}, dry_run=True)
            assert [job["job_id"] for job in found.samples] == [job_id]
            listed = f"select id from rota.job_runs where {CONDITIONS['error_text']}"
            assert db.execute(listed, {"error_text": text}).fetchall() == [(job_id,)]


def test_a_filter_finds_by_each_of_its_keys(db, clock):
    clock.set("2026-01-01 00:00+00")
    old = dead(db, error="card 4711 declined")
    clock.advance("2 hours")
    others = {
        "queue": dead(db, queue="q"),
        "job_type": dead(db, job_type="mail"),
        "idempotency_key": dead(db, idempotency_key="k"),
        "ordering_key": dead(db, ordering_key="o", skip_dead=True),
        "limit_key": dead(db, limit_key="l"),
        "payload": dead(db, payload={"customer": {"id": 7, "name": "Ann"}}),
        "headers": dead(db, headers={"tenant": "acme"}),
        "worker": dead(db, worker="w2"),
        "error_type": dead(db, error_type=None),
        "error": dead(db),
        "error_text": dead(db, error="100% of the stock is gone"),
        "key": dead(db, limit_key="any"),
        "is_discarded": dead(db),
        "cancel_reason": dead(db),
        "is_due": dead(db),
    }
    for name in ("a", "b"):
        stages = [{"stage": f"pack_{name}", "job_type": "pack"}]
        db.execute("select rota.define_pipeline(%s, %s)", [name, Jsonb(stages)])
        started = value(db, "start_pipeline", pipeline=name, payload=Jsonb({}))
        (job,) = claim(db)
        assert job.job_id == started
        one(db, "fail_job", **owner(job), error="boom", error_type="E", fatal=True)
        others["stage"] = started
    act(db, "discard", {"ids": [others["is_discarded"]]})
    # What was asked to stop may still die.
    db.execute(
        "update rota.finished_jobs set cancel_reason = 'twice' where id = %s",
        [others["cancel_reason"]],
    )
    db.execute(
        "update rota.finished_jobs set run_at = rota.now() + interval '1 s' where id = %s",
        [others["is_due"]],
    )
    db.execute(
        "update rota.finished_jobs set last_error = null where id = %s", [others["error"]]
    )
    logged = len(log(db))
    filters = {
        "queue": "q",
        "job_type": "mail",
        "idempotency_key": "k",
        "ordering_key": "o",
        "limit_key": "l",
        "payload": {"customer": {"id": 7}},
        "headers": {"tenant": "acme"},
        "worker": "w2",
        "error_type": None,
        "error": None,
        "error_text": "0% OF THE",
        "key": "any",
        "stage": "pack_b",
        "is_discarded": True,
        "is_due": False,
        "cancel_reason": "twice",
    }

    for key, job_id in others.items():
        found = act(db, "retry", {key: filters[key]}, dry_run=True)
        assert [job["job_id"] for job in found.samples] == [job_id], key
    for filter_ in (
        {"older_than": "1 hour"},
        {"error": "card 12 declined"},
        {"error": "card N declined"},
        {"error": "E: card 12 declined"},
        {"error": "E: card N declined"},
        {"older_than": "1 hour", "is_discarded": False, "is_due": True},
        {"ids": [old]},
        {"error_text": "4711"},
        {"error_type": "E", "older_than": "01:00:00", "status": ["dead"]},
    ):
        assert act(db, "retry", filter_, dry_run=True).samples[0]["job_id"] == old
    assert act(db, "retry", {"newer_than": "1 hour"}, dry_run=True).matched == len(others) + 1
    assert act(db, "retry", {"all": True}, dry_run=True).matched == len(others) + 2
    for key, filters_ in {
        "key": [{"key": one_key} for one_key in ("k", "o", "l")],
        "payload": [{"payload": [{"customer": {"id": 7}}, {"customer": {"name": "Ann"}}]}],
        "headers": [{"headers": [{"tenant": "acme"}, {}]}],
    }.items():
        for filter_ in filters_:
            found = act(db, "retry", filter_, dry_run=True).samples
            name = {"k": "idempotency_key", "o": "ordering_key", "l": "limit_key"}.get(
                str(filter_.get("key")), key
            )
            assert [job["job_id"] for job in found] == [others[name]], filter_
    both = {"payload": [{"customer": {"id": 7}}, {"customer": {"id": 8}}]}
    assert act(db, "retry", both, dry_run=True).matched == 0
    assert len(log(db)) == logged


def test_a_dry_run_counts_and_changes_nothing(db):
    ids = [enqueue(db) for _ in range(12)]

    told = act(db, "cancel", {"queue": "default"}, dry_run=True)

    assert (told.matched, told.changed, told.conflicts, told.next_after_id) == (12, 0, [], None)
    assert [job["job_id"] for job in told.samples] == ids[:10]
    assert set(statuses(db, ids)) == {"queued"}


def test_calls_go_on_where_the_last_one_stopped(db):
    ids = [enqueue(db) for _ in range(7)]
    after, calls = 0, []

    while after is not None:
        told = act(db, "cancel", {"queue": "default"}, max_jobs=3, after_id=after)
        calls.append(told.changed)
        after = told.next_after_id

    assert calls == [3, 3, 1]
    assert set(statuses(db, ids)) == {"cancelled"}
    assert [row.jobs for row in log(db)] == [3, 3, 1]


def test_retry_runs_what_failed_again_and_keeps_what_was_the_payload(db):
    first = dead(db, payload={"cents": 5, "currency": "XXX"})
    second = dead(db, payload={"cents": 7})
    enqueue(db, max_attempts=3)
    failed = one(db, "fail_job", **owner(claim(db)[0]), error="e")
    value(db, "cancel_job", job_id=enqueue(db))

    told = act(
        db, "retry", {"queue": "default"}, {"merge": {"currency": "EUR"}, "max_attempts": 4}
    )

    assert (failed.status, told.changed, told.conflicts) == ("failed", 3, [])
    found = claim(db, max_jobs=10)
    assert {job.max_attempts for job in found} == {4}
    assert [run(db, job_id).payload for job_id in (first, second)] == [
        {"cents": 5, "currency": "EUR"},
        {"cents": 7, "currency": "EUR"},
    ]
    kept = rows(db, "select payload from rota.job_errors order by job_id")
    assert [row.payload for row in kept][:2] == [
        {"cents": 5, "currency": "XXX"},
        {"cents": 7},
    ]
    (row,) = [row for row in log(db) if row.filter]
    assert (row.act, row.jobs, row.before) == (
        "retry",
        3,
        {"dead": 2, "failed": 1, "max_attempts": {"1": 2, "3": 1}},
    )
    assert row.after == {"merge": {"currency": "EUR"}, "max_attempts": 4}


def test_retry_with_a_payload_tells_of_one_job_what_it_was(db):
    job_id = dead(db, payload={"cents": 5})

    act(db, "retry", {"ids": [job_id]}, {"payload": {"cents": 6}})

    assert run(db, job_id).payload == {"cents": 6}
    assert log(db)[-1].before == {"dead": 1, "payload": {"cents": 5}}


def test_conflicts_are_listed_and_stop_no_other(db, connect):
    taken = dead(db, idempotency_key="k")
    holder = enqueue(db, idempotency_key="k", queue="other")
    list_payload = dead(db)
    db.execute("update rota.finished_jobs set payload = '[1]' where id = %s", [list_payload])
    done = end(db)
    busy = running(db, queue="q").job_id
    locked, good = dead(db), dead(db)
    other = connect(autocommit=False)
    other.execute("select from rota.finished_jobs where id = %s for update", [locked])
    unknown = 10**15

    told = act(
        db,
        "retry",
        {"ids": [taken, list_payload, busy, locked, good, unknown, done]},
        {"merge": {"a": 1}},
    )

    reasons = {conflict["job_id"]: conflict["reason"] for conflict in told.conflicts}
    assert (told.matched, told.changed) == (6, 2)
    assert set(reasons) == {taken, list_payload, busy, locked, unknown}
    assert reasons[taken] == f"its idempotency_key is taken by job {holder}"
    assert "no object" in reasons[list_payload]
    assert reasons[busy] == "it is running: force takes it from its worker"
    assert reasons[unknown] == "not found"
    assert "locked" in reasons[locked]
    other.rollback()
    assert statuses(db, [good, done, taken]) == ["queued", "queued", "dead"]


def test_a_retry_looks_for_live_jobs_of_all_keys_by_one_plan(db):
    """Within an act each statement of a function that it calls for a job is planned again."""
    for number in range(3):
        dead(db, idempotency_key=f"k{number}")

    with db.transaction():
        db.execute("set local track_functions = 'all'")
        assert act(db, "retry", {"queue": "default"}, dry_run=True).matched == 3
        calls = scalar(
            db, "select pg_stat_get_xact_function_calls('rota._find_keyed'::regproc)"
        )

    assert not calls


@pytest.mark.parametrize("act_on", ["retry", "erase"])
def test_what_an_open_transaction_has_taken_keeps_the_job_and_no_other(db, connect, act_on):
    """A key that a producer has not committed, or a record that is of the jobs of both."""
    taken, good = dead(db, idempotency_key="k"), dead(db)
    beside = dead(db)
    act(db, "discard", {"ids": [taken, beside], "error": "boom"})
    other = connect(autocommit=False)
    enqueue(other, idempotency_key="k")
    act(other, "erase", {"ids": [beside]})
    db.execute("set statement_timeout = '20s'")

    told = act(db, act_on, {"ids": [taken, good]})

    assert (told.changed, [c["job_id"] for c in told.conflicts]) == (1, [taken])
    other.rollback()
    assert act(db, act_on, {"ids": [taken]}).changed == 1


def test_a_dry_run_tells_the_conflicts_that_the_real_one_would(db, connect):
    taken = dead(db, idempotency_key="k")
    enqueue(db, idempotency_key="k", queue="other")
    twins = [dead(db, idempotency_key="twin") for _ in range(2)]
    list_payload = dead(db)
    db.execute("update rota.finished_jobs set payload = '[1]' where id = %s", [list_payload])
    busy = running(db, queue="q").job_id
    locked, waiting, good = dead(db), enqueue(db, queue="w"), dead(db)
    other = connect(autocommit=False)
    other.execute("select from rota.finished_jobs where id = %s for update", [locked])
    other.execute("select from rota.jobs where id = %s for update", [waiting])
    ids = [taken, *twins, list_payload, busy, locked, waiting, good, 10**15]
    asked = (db, "retry", {"ids": ids}, {"merge": {"a": 1}})

    seen = act(*asked, dry_run=True)
    held = rows(
        db, "select mode from pg_locks where pid = pg_backend_pid() and mode like 'Row%'"
    )
    told = act(*asked)

    assert (seen.changed, seen.conflicts, held) == (0, told.conflicts, [])
    assert {conflict["job_id"] for conflict in seen.conflicts} == {*ids} - {good, twins[0]}


def test_a_dry_run_does_not_take_its_own_locks_for_those_of_others(connect):
    mine = connect(autocommit=False)
    job_id = enqueue(mine)
    mine.execute("select from rota.jobs where id = %s for update", [job_id])

    assert act(mine, "cancel", {"ids": [job_id]}, dry_run=True).conflicts == []


def test_a_dry_run_looks_for_conflicts_of_as_many_as_a_call_acts_on(db):
    ids = [running(db).job_id for _ in range(5)]

    told = act(db, "cancel", {"ids": [ids[-1] + 1, ids[1]]}, dry_run=True, max_jobs=1)
    moved = act(
        db,
        "move",
        {"ids": ids},
        {"queue": "b"},
        max_jobs=2,
        dry_run=True,
    )

    assert [conflict["reason"] for conflict in told.conflicts] == ["not found"]
    assert moved.matched == 5
    assert [conflict["job_id"] for conflict in moved.conflicts] == ids[:2]


def end(db):
    job = running(db)
    value(db, "finish_job", **owner(job), result=Jsonb({"a": 1}))
    return job.job_id


def test_a_locked_job_tells_who_has_locked_it(db, connect):
    first, second = enqueue(db), enqueue(db)
    other = connect(autocommit=False)
    other.execute("select from rota.jobs where id = %s for update", [first])

    told = act(db, "cancel", {"queue": "default"})

    (conflict,) = told.conflicts
    assert conflict["job_id"] == first
    assert conflict["pid"] == other.info.backend_pid
    assert run(db, second).status == "cancelled"


def test_two_dead_jobs_of_one_key_do_not_both_come_back(db):
    ids = [dead(db, idempotency_key="k") for _ in range(2)]
    other = dead(db)

    told = act(db, "retry", {"status": "dead"})

    assert told.changed == 2
    (conflict,) = told.conflicts
    assert conflict["job_id"] == ids[1]
    assert statuses(db, [*ids, other]) == ["queued", "dead", "queued"]


def test_retry_takes_halted_keys_and_parents_into_account(db):
    head = dead(db, ordering_key="k")
    second = enqueue(db, ordering_key="k")
    parent = dead(db)
    child = enqueue(db, depends_on=[parent], if_parent_dead="wait")

    assert act(db, "retry", {"status": "dead"}).changed == 2
    settle(db)

    assert statuses(db, [head, second, parent, child]) == [
        "queued",
        "blocked",
        "queued",
        "blocked",
    ]
    for _ in range(2):
        for job in claim(db, max_jobs=5):
            value(db, "finish_job", **owner(job))
        settle(db)
    assert statuses(db, [head, second, parent, child]) == ["succeeded"] * 4


def test_cancel_ends_what_waits_and_asks_what_runs(db):
    job = running(db)
    waiting = enqueue(db)

    told = act(db, "cancel", {"queue": "default"}, {"reason": "a wrong price"})

    assert told.changed == 2
    assert run(db, waiting).cancel_reason == "a wrong price"
    assert run(db, waiting).status == "cancelled"
    assert run(db, job.job_id).cancel_requested_at is not None


def test_discard_clears_the_alert_and_leaves_the_dead(db):
    job_id = dead(db)
    assert scalar(db, "select dead from rota.queue_stats") == 1

    assert act(db, "discard", {"queue": "default"}).changed == 1
    assert act(db, "discard", {"queue": "default"}).matched == 0

    assert run(db, job_id).status == "dead"
    assert sum(row.dead for row in rows(db, "select dead from rota.queue_stats")) == 0
    found = [row for row in call(db, "doctor") if row.finding == "dead_jobs"]
    assert [row.severity for row in found] == ["ok"]
    value(db, "retry_job", job_id=job_id)
    one(db, "fail_job", **owner(claim(db)[0]), error="again", fatal=True)
    assert scalar(db, "select dead from rota.queue_stats") == 1


def test_a_retry_keeps_the_time_that_is_still_to_come(db, clock):
    clock.set("2026-01-01 00:00+00")
    later = enqueue(db, delay="2 hours")
    sooner = enqueue(db, delay="1 minute")
    planned = [run(db, job_id).run_at for job_id in (later, sooner)]
    act(db, "cancel", {"ids": [later, sooner]})
    clock.advance("1 hour")

    told = act(db, "retry", {"ids": [later, sooner]}, {"keep_run_at": True})

    assert told.changed == 2
    assert run(db, later).run_at == planned[0]
    assert run(db, sooner).run_at == planned[1] + HOUR - timedelta(minutes=1)
    assert [job.job_id for job in claim(db, max_jobs=5)] == [sooner]
    # Also where the same call comes again, as of one who takes a cancel back twice.
    assert act(db, "retry", {"ids": [later]}, {"keep_run_at": True}).changed == 1
    assert run(db, later).run_at == planned[0]
    assert not claim(db, max_jobs=5)
    clock.advance("1 hour")
    assert [job.job_id for job in claim(db, max_jobs=5)] == [later]


@pytest.mark.parametrize("what", ["retry", "reschedule"])
def test_many_jobs_are_spread_over_a_time(db, clock, what):
    clock.set("2026-01-01 00:00+00")
    begin = clock.now() + (timedelta() if what == "retry" else HOUR)
    ids = [dead(db) if what == "retry" else enqueue(db) for _ in range(40)]
    later = enqueue(db, delay="1 day")
    planned = run(db, later).run_at
    arguments = {"spread": "10 minutes"}
    if what == "retry":
        act(db, what, {"ids": [later]}, arguments | {"keep_run_at": True})
        assert run(db, later).run_at == planned

    told = act(db, what, {"ids": ids}, arguments | ({"delay": "1 h"} if begin.hour else {}))

    assert told.changed == 40
    found = [run(db, job_id).run_at for job_id in ids]
    assert begin <= min(found) < begin + timedelta(minutes=3)
    assert begin + timedelta(minutes=7) < max(found) <= begin + timedelta(minutes=10)
    clock.set(begin + timedelta(minutes=5))
    settle(db)
    assert 5 < len(claim(db, max_jobs=50)) < 35


def test_a_retry_that_is_spread_carries_no_job_past_its_expiry(db, clock):
    clock.set("2026-01-01 00:00+00")
    ids = [dead(db, expires_after="5 minutes") for _ in range(20)]

    act(db, "retry", {"ids": ids}, {"spread": "10 minutes"})

    assert len(claim(db, max_jobs=20)) == 20


def test_a_retry_of_what_failed_keeps_no_time(db):
    job = running(db)
    one(db, "fail_job", **owner(job), error="e", retry_in="1 hour")

    assert act(db, "retry", {"ids": [job.job_id]}, {"keep_run_at": True}).changed == 1

    assert [found.job_id for found in claim(db)] == [job.job_id]


def test_a_forced_retry_takes_running_jobs_from_a_worker_that_is_gone(db):
    busy, other = running(db), enqueue(db)
    claim(db, worker="w2")
    failed = running(db)
    one(db, "fail_job", **owner(failed), error="e", retry_in="1 hour")

    told = act(db, "retry", {"worker": "w", "status": "running"}, {"force": True})

    assert (told.changed, told.conflicts) == (1, [])
    assert statuses(db, [busy.job_id, other, failed.job_id]) == ["queued", "running", "failed"]
    with raises("RT002"):
        value(db, "finish_job", **owner(busy))
    with refused("filter"):
        act(db, "retry", {"worker": "w", "status": "running"})
    assert act(db, "retry", {"all": True}, {"force": True}, dry_run=True).matched == 1


def test_reschedule_set_priority_and_move(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    ids = [enqueue(db) for _ in range(3)]

    act(db, "reschedule", {"ids": ids}, {"delay": "1 hour"})
    assert {run(db, job_id).run_at for job_id in ids} == {now + HOUR}
    act(db, "reschedule", {"ids": ids[:2]}, {"run_at": "2026-01-01 00:00+00"})
    act(db, "set_priority", {"ids": ids[1:2]}, {"priority": -3})
    act(db, "move", {"ids": ids[:2]}, {"queue": "other"})

    assert claim(db) == []
    assert [job.job_id for job in claim(db, queues=["other"], max_jobs=5)] == [ids[1], ids[0]]


def test_what_was_replaced_is_kept_with_its_numbers(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    ids = [enqueue(db, priority=n % 30, queue="ab"[n % 2]) for n in range(60)]
    one_id = enqueue(db, queue="c", priority=4)

    act(db, "set_priority", {"ids": [*ids, one_id]}, {"priority": 9})
    act(db, "move", {"ids": ids}, {"queue": "d"})
    act(db, "reschedule", {"ids": [one_id]}, {"delay": "1 hour"})
    act(db, "reschedule", {"ids": [ids[0], one_id]}, {"delay": "2 hours"})
    act(db, "move", {"ids": [one_id]}, {"queue": "d"})
    act(db, "set_priority", {"ids": [one_id]}, {"priority": 0})
    act(db, "retry", {"ids": [one_id]}, {"max_attempts": 2, "merge": {"a": 1}})

    many, moved, later, latest, moved_one, one_priority, retried = [
        row.before for row in log(db)
    ]
    assert len(many["priority"]) == 21
    assert (many["priority"]["4"], many["priority"]["(others)"]) == (3, 20)
    assert sum(many["priority"].values()) == 61
    assert many["priority_of"]["4"] == [ids[4], ids[34], one_id]
    assert len(many["priority_of"]) == 30
    assert moved == {
        "queued": 60,
        "queue": {"a": 30, "b": 30},
        "queue_of": {"a": ids[::2], "b": ids[1::2]},
    }
    assert later == {"queued": 1, "run_at": now.isoformat()}
    assert {*latest["run_at"]} == {"first", "last"}
    assert sorted(latest["run_at_of"].values()) == [[ids[0]], [one_id]]
    assert moved_one == {"queued": 1, "queue": "c"}
    assert one_priority == {"queued": 1, "priority": 9}
    assert retried == {"queued": 1, "max_attempts": 10, "payload": {}}


def test_a_retry_with_more_attempts_alone_keeps_the_payload(db):
    job_id = dead(db, payload={"n": 1})

    act(db, "retry", {"ids": [job_id]}, {"max_attempts": 5})

    again = run(db, job_id)
    assert (again.status, again.max_attempts, again.payload) == ("queued", 5, {"n": 1})
    assert log(db)[-1].before == {"dead": 1, "max_attempts": 1}
    assert scalar(db, "select payload from rota.job_errors") is None


@pytest.mark.parametrize(("values", "is_kept"), [(100, True), (101, False)])
def test_which_job_had_which_value_is_kept_of_up_to_a_hundred_values(db, values, is_kept):
    ids = [enqueue(db, priority=n) for n in range(values)]

    act(db, "set_priority", {"ids": ids}, {"priority": 500})

    before = log(db)[-1].before
    kept = {str(n): [job_id] for n, job_id in enumerate(ids)} if is_kept else None
    assert before.get("priority_of") == kept
    assert sum(before["priority"].values()) == values


def test_what_was_replaced_is_kept_where_the_jobs_are_done_one_by_one(db):
    ids = [dead(db, payload={"n": n}, queue="ab"[n]) for n in range(2)]
    db.execute(
        "create function public.no() returns trigger language plpgsql as "
        "$$ begin raise exception 'no'; end $$;"
        "create trigger no before insert on rota.jobs for each row "
        f"when (new.id = {ids[0]}) execute function public.no()"
    )

    enqueue(db)
    busy = claim(db)[0].job_id

    told = act(db, "retry", {"ids": [*ids, busy]}, {"payload": {"n": 5}, "max_attempts": 3})

    assert [conflict["job_id"] for conflict in told.conflicts] == [ids[0], busy]
    assert log(db)[-1].before == {"dead": 1, "max_attempts": 1, "payload": {"n": 1}}
    third = dead(db, payload={"n": 2})
    act(db, "retry", {"ids": [ids[0], ids[1], third]}, {"payload": {}, "max_attempts": 4})
    assert log(db)[-1].before == {"dead": 1, "queued": 1, "max_attempts": {"1": 1, "3": 1}}


def test_an_act_fails_as_a_whole_where_the_server_fails(db):
    """A disk that is full is no conflict of a job, and all the others find it full, too."""
    ids = [enqueue(db), enqueue(db)]
    db.execute(
        "create function public.no() returns trigger language plpgsql as $$ begin raise"
        " disk_full; end $$; create trigger no before update on rota.jobs for each row "
        f"when (new.id = {ids[1]}) execute function public.no()"
    )

    with raises("53100"):
        act(db, "set_priority", {"ids": ids}, {"priority": 5})

    assert {run(db, job_id).priority for job_id in ids} == {0}


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_job_on_its_way_to_another_database_does_not_move(db, dry_run):
    value(db, "set_database_number", number=5)
    carrier = value(db, "enqueue_to", database=6, job_type="x")
    other = enqueue(db)

    told = act(db, "move", {"all": True}, {"queue": "q"}, dry_run=dry_run)

    assert told.conflicts == [
        {"job_id": carrier, "reason": "it carries a job to another database"}
    ]
    assert run(db, carrier).queue == "forward:6"
    assert (run(db, other).queue, told.matched) == ("default" if dry_run else "q", 2)


def test_move_to_a_queue_that_ages_or_takes_turns_gives_a_place_there(db):
    value(db, "set_queue", queue="aging", ageing="1 minute")
    ids = [enqueue(db, limit_key="k") for _ in range(2)]

    act(db, "move", {"queue": "default"}, {"queue": "aging"})

    assert len(claim(db, queues=["aging"], max_jobs=5)) == len(ids)
    assert not [row for row in call(db, "verify") if row.violations]


def test_purge_deletes_ended_jobs_that_nobody_waits_for(db):
    done, lost = end(db), dead(db)
    parent = dead(db)
    enqueue(db, depends_on=[parent], if_parent_dead="wait")

    assert act(db, "purge", {"queue": "default"}).changed == 1
    told = act(db, "purge", {"status": ["dead"]})

    assert told.conflicts == [{"job_id": parent, "reason": "other jobs depend on it"}]
    assert rows(db, "select from rota.job_runs where id = any(%s)", [done, lost]) == []
    assert scalar(db, "select count(*) from rota.job_errors where job_id = %s", lost) == 0


def test_purge_says_what_keeps_a_dead_job_that_nobody_waits_for(db):
    parent, head = dead(db), dead(db, ordering_key="o")
    child = enqueue(db, depends_on=[parent])
    settle(db)
    assert run(db, child).status == "cancelled"

    told = act(db, "purge", {"status": ["dead"]})

    assert told.conflicts == [
        {"job_id": parent, "reason": "other jobs depend on it"},
        {"job_id": head, "reason": "its ordering key is halted by it"},
    ]
    act(db, "purge", {"ids": [child]})
    value(db, "resume_ordering_key", ordering_key="o")
    settle(db)
    assert act(db, "purge", {"status": ["dead"]}).changed == 2


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_purge_leaves_a_cancelled_parent_to_a_producer(db, connect, clock, level):
    clock.set("2026-03-01 12:00+00")
    parent = enqueue(db)
    value(db, "cancel_job", job_id=parent)
    clock.advance("1 hour")
    db.execute("select rota.tick()")
    producer, operator = connect(autocommit=False), connect(autocommit=False)
    operator.execute(f"set transaction isolation level {level}")
    operator.execute("select from rota.jobs")
    enqueue(producer, depends_on=[parent], if_parent_dead="wait")
    if level == "repeatable read":
        producer.commit()

    told = act(operator, "purge", {"ids": [parent]})

    assert told.changed == 0
    assert told.conflicts[0]["job_id"] == parent


def test_purge_leaves_a_parent_to_a_producer_that_is_not_committed(db, connect):
    parent, child = enqueue(db), connect(autocommit=False)
    (job,) = claim(db)
    waiting = enqueue(child, depends_on=[parent])
    value(db, "finish_job", **owner(job))

    told = act(db, "purge", {"queue": "default"})
    child.commit()
    settle(db)

    reason = "an open transaction may let jobs wait for it: try again"
    assert told.conflicts == [{"job_id": parent, "reason": reason}]
    assert [c.job_id for c in claim(db)] == [waiting]
    assert act(db, "purge", {"queue": "default"}).changed == 1


def test_erase_takes_away_what_is_known_of_somebody(db):
    ann = {"customer": {"id": 7, "name": "Ann"}}
    parts = {"headers": {"mail": "ann@x"}, "payload": ann, "limit_key": "ann"}
    finished = enqueue(db, **parts)
    value(db, "finish_job", **owner(claim(db)[0]), result=Jsonb({"to": "Ann"}))
    lost = dead(db, error="no such Ann", **parts)
    act(db, "retry", {"error_text": "such Ann"}, {"merge": {"again": "Ann"}})
    one(db, "fail_job", **owner(claim(db)[0]), error="Ann again", fatal=True)
    waiting = enqueue(db, idempotency_key="Ann", delay="1 hour", **parts)
    value(db, "cancel_job", job_id=waiting, reason="Ann left")
    act(db, "retry", {"idempotency_key": "Ann", "status": "cancelled"})
    act(db, "reschedule", {"key": "Ann"}, {"delay": "1 hour"})
    busy = running(db, **parts).job_id
    other = enqueue(db, payload={"customer": {"id": 8}})

    told = act(db, "erase", {"payload": {"customer": {"id": 7}}})

    assert told.changed == 3
    assert told.conflicts == [{"job_id": busy, "reason": "it is running"}]
    assert statuses(db, [finished, lost, waiting, other]) == [
        "succeeded",
        "dead",
        "cancelled",
        "queued",
    ]
    for table in ("finished_jobs", "job_errors", "audit_log"):
        text = scalar(db, f"select string_agg(t::text, ' ') from rota.{table} as t")
        assert "ann" not in text.lower(), (table, text)
        assert "7" not in str(log(db)[-1].filter)


@pytest.mark.parametrize(
    ("arguments", "payload"),
    [
        ({}, {"v": 2}),
        ({"payload": {"v": 3}}, {"v": 3}),
        ({"merge": {"w": 1}}, {"v": 2, "w": 1}),
    ],
)
def test_a_forced_retry_edits_what_was_to_run_next_and_keeps_its_place(
    db, clock, arguments, payload
):
    clock.set("2026-01-01 00:00+00")
    key = {"job_type": "t", "idempotency_key": "k", "on_conflict": "rerun"}
    job_id = enqueue(db, payload={"v": 1}, **key)
    (job,) = claim(db)
    clock.advance("10 s")
    enqueue(db, payload={"v": 2}, **key)

    told = act(db, "retry", {"ids": [job_id]}, {"force": True, **arguments})

    assert (told.changed, told.conflicts) == (1, [])
    assert (run(db, job_id).status, run(db, job_id).run_at) == ("queued", job.run_at)
    assert run(db, job_id).payload == payload


def test_what_was_erased_is_retried_with_another_payload_only(db):
    job_id = dead(db, payload={"name": "Ann"}, ordering_key="of Ann")
    loose = dead(db, ordering_key="of Ben", skip_dead=True)
    act(db, "erase", {"ids": [job_id, loose]})

    told = act(db, "retry", {"status": "dead"})
    assert told.changed == 0
    assert {row["reason"] for row in told.conflicts} == {
        "it was erased: without another payload it cannot run"
    }
    assert [run(db, each).ordering_key for each in (job_id, loose)] == ["of Ann", None]
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refusal:
        value(db, "retry_job", job_id=job_id)
    assert f"job_id {job_id} was erased" in str(refusal.value)
    remedy = (refusal.value.diag.message_hint or "").partition(": ")[2]
    assert call(db, "explain_job", job_id=loose)[0].remedy == (
        remedy.replace(f"[{job_id}]", f"[{loose}]") + ";"
    )
    db.execute(remedy.replace("{}", '{"name": "Eve"}').encode())
    assert claim(db)[0].payload == {"name": "Eve"}


def test_a_dependant_that_was_erased_does_not_come_back_with_its_parent(db):
    parent = dead(db)
    erased, kept = (enqueue(db, depends_on=[parent]) for _ in range(2))
    settle(db)
    act(db, "erase", {"ids": [erased]})

    value(db, "retry_with_dependants", job_id=parent)
    settle(db)

    assert (run(db, erased).status, run(db, kept).status) == ("cancelled", "blocked")


def test_a_retry_of_many_restores_what_was_cancelled_because_of_them(db):
    parents = [dead(db) for _ in range(2)]
    children = [enqueue(db, depends_on=[job_id]) for job_id in parents]
    grandchild = enqueue(db, depends_on=children[:1])
    by_hand = enqueue(db, depends_on=parents[:1])
    value(db, "cancel_job", job_id=by_hand)
    settle(db)
    assert {run(db, job_id).status for job_id in (*children, grandchild)} == {"cancelled"}

    assert act(db, "retry", {"ids": parents}, dry_run=True).dependants == 3
    assert act(db, "retry", {"ids": parents}).dependants == 3
    settle(db)
    assert {run(db, job_id).status for job_id in (*children, grandchild)} == {"cancelled"}
    told = act(db, "retry", {"ids": parents}, {"with_dependants": True})
    assert (told.changed, told.dependants) == (2, 3)
    settle(db)

    assert {run(db, job_id).status for job_id in (*children, grandchild)} == {"blocked"}
    assert run(db, by_hand).status == "cancelled"


@pytest.mark.parametrize("what", ["cancel", "erase"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_an_act_tells_how_many_are_cancelled_with_these(db, dry_run, what):
    parents = [running(db).job_id, enqueue(db)]
    child = enqueue(db, depends_on=parents)
    enqueue(db, depends_on=[child])
    for option in ("wait", "run"):
        enqueue(db, depends_on=parents, if_parent_dead=option)
    mine = enqueue(db, depends_on=parents)

    told = act(db, what, {"ids": [*parents, mine]}, dry_run=dry_run)

    assert (told.matched, told.dependants) == (3, 2)
    assert act(db, "discard", {"all": True}, dry_run=True).dependants == 0


def test_a_dependant_comes_back_for_the_time_that_it_was_planned_for(db, clock):
    clock.set("2026-01-01 00:00+00")
    parent = enqueue(db)
    child = enqueue(db, depends_on=[parent], delay="2 hours")
    planned = run(db, child).run_at
    act(db, "cancel", {"ids": [parent]})
    settle(db)

    act(db, "retry", {"ids": [parent]}, {"with_dependants": True})
    settle(db)
    value(db, "finish_job", **owner(claim(db)[0]))
    settle(db)

    assert (run(db, child).status, run(db, child).run_at) == ("queued", planned)
    assert claim(db) == []


def test_what_is_retried_itself_is_no_dependant_of_the_others(db):
    parent = dead(db)
    child, other = (enqueue(db, depends_on=[parent]) for _ in range(2))
    settle(db)

    for dry_run in (True, False):
        assert act(db, "retry", {"ids": [parent, child]}, dry_run=dry_run).dependants == 1
    assert [run(db, job_id).status for job_id in (child, other)] == ["blocked", "cancelled"]


def test_no_retry_of_many_walks_all_who_wait_for_one(db):
    """A million jobs may wait for one that died, and none of them is cancelled."""
    parent = dead(db)
    jobs = [{"job_type": "x", "depends_on": [parent], "if_parent_dead": "wait"}] * 6000
    call(db, "enqueue_many", jobs=Jsonb(jobs))
    read = "select sum(pg_stat_get_xact_tuples_returned(indexrelid)) from pg_index"
    read += " where indrelid = 'rota.dependencies'::regclass"

    with db.transaction():
        before = scalar(db, read)
        told = act(db, "retry", {"ids": [parent]})
        after = scalar(db, read)

    assert (told.changed, told.dependants) == (1, 0)
    assert after - before <= 2100


def test_a_run_that_was_erased_does_not_go_on(db):
    stages = [{"stage": "pay", "job_type": "a"}, {"stage": "ship", "job_type": "b"}]
    value(db, "define_pipeline", pipeline="order", stages=Jsonb(stages))
    job_id = value(db, "start_pipeline", pipeline="order")
    act(db, "erase", {"ids": [job_id]})

    with refused("job_id"):
        value(db, "restart_pipeline", job_id=job_id, stage="pay")


def test_singles_pauses_settings_and_schedules_are_in_the_log(db):
    db.execute("set rota.actor = 'ann'")
    job_id = enqueue(db, "mail")
    value(db, "set_priority", job_id=job_id, priority=3)
    value(db, "reschedule_job", job_id=job_id, delay="1 hour")
    value(db, "retry_job", job_id=job_id)
    value(db, "cancel_job", job_id=job_id, reason="wrong")
    value(db, "set_queue", queue="mail", max_attempts=3)
    value(db, "set_limit", queue="mail", max_running=3)
    value(db, "pause_type", job_type="mail", reason="down")
    value(db, "resume_type", job_type="mail")
    call(db, "schedule_job", name="s", schedule="@daily", job_type="mail")
    value(db, "unschedule_job", name="s")
    settle(db)

    found = log(db)

    assert {(row.role, row.actor) for row in found} == {("postgres", "ann")}
    assert [row.act for row in found] == [
        *("set_priority", "reschedule", "retry", "cancel"),
        *("set_queue", "set_limit", "pause", "resume", "schedule", "unschedule"),
    ]
    assert [row.job_ids for row in found[:4]] == [[job_id]] * 4
    assert (found[0].before, found[0].after) == ({"priority": 0}, {"priority": 3})
    assert found[2].before == {"status": "queued", "attempts": 0}
    assert found[4].after["max_attempts"] == 3
    assert found[7].before["reason"] == "down"
    assert found[7].after is None


def test_the_reset_of_a_limit_is_one_act(db):
    value(db, "set_limit", limit_key="c:1", max_running=3, weight=2)
    value(db, "set_limit", limit_key="c:1", reset=True)

    assert [
        (row.act, (row.before or {}).get("max_running"), (row.after or {}).get("weight"))
        for row in log(db)
    ] == [("set_limit", None, 2), ("set_limit", 3, None)]


def test_what_is_done_is_logged_only_if_it_is_committed(db):
    job_id = enqueue(db)
    db.execute("begin")
    act(db, "cancel", {"ids": [job_id]})
    db.execute("rollback")

    assert log(db) == []


def test_the_log_is_purged_after_a_year(db, clock):
    clock.set("2026-01-01 00:00+00")
    value(db, "set_queue", queue="q")
    clock.advance("367 days")
    value(db, "set_queue", queue="r")
    call(db, "tick")

    assert [row.filter for row in log(db)] == [{"queue": "r"}]


BAD = {
    "act": [{"act": None}, {"act": "explode"}],
    "filter": [
        {"filter": filter_}
        for filter_ in (
            None,
            Jsonb([]),
            {},
            {"queue": 1},
            {"colour": "red"},
            {"all": False},
            {"ids": []},
            {"ids": ["1"]},
            {"ids": [1.5]},
            {"ids": [[1]]},
            {"ids": [10**30]},
            {"ids": list(range(1, 1002))},
            {"status": "running"},
            {"status": 7},
            {"status": []},
            {"payload": "Ann"},
            {"payload": []},
            {"headers": [{}, "Ann"]},
            {"headers": [[{}]]},
            {"stage": None},
            {"queue": None},
            {"worker": 7},
            {"is_discarded": "yes"},
            {"is_due": None},
        )
    ],
    "filter.older_than": [
        {"filter": {"older_than": "soon"}},
        {"filter": {"older_than": "-1 h"}},
        {"filter": {"older_than": {"days": 30}}},
    ],
    "arguments": [
        {"arguments": None},
        {"arguments": {"colour": "red"}},
        {"arguments": {"payload": {}, "merge": {}}},
    ],
    "arguments.keep_run_at": [{"arguments": {"keep_run_at": bad}} for bad in ("yes", None)],
    "arguments.spread": [
        {"arguments": {"spread": bad}}
        for bad in ("soon", "-1 s", "101 years", None, {"days": 1})
    ],
    "arguments.with_dependants": [{"arguments": {"with_dependants": bad}} for bad in (1, None)],
    "arguments.force": [{"arguments": {"force": bad}} for bad in ("yes", None)],
    "arguments.merge": [{"arguments": {"merge": [1]}}],
    "arguments.payload": [
        {"arguments": {"payload": bad}} for bad in ({"x": "x" * 2**21}, [1], 5, None)
    ],
    "arguments.max_attempts": [
        {"arguments": {"max_attempts": bad}} for bad in (0, "many", None)
    ],
    "arguments.priority": [
        {"act": "set_priority", "arguments": arguments}
        for arguments in ({}, {"priority": 40000}, {"priority": "high"})
    ],
    "arguments.queue": [
        {"act": "move", "arguments": arguments}
        for arguments in ({}, {"queue": "no queue"}, {"queue": "forward:2"})
    ],
    "arguments.run_at": [
        {"act": "reschedule", "arguments": arguments}
        for arguments in ({}, {"run_at": "soon"}, {"run_at": "infinity"})
    ],
    "arguments.delay": [
        {"act": "reschedule", "arguments": {"delay": bad}} for bad in ("-1 s", {"hours": 2})
    ],
    "max_jobs": [{"max_jobs": bad} for bad in (None, 0, 1001)],
    "after_id": [{"after_id": None}],
    "dry_run": [{"dry_run": None}],
}


def test_act_on_jobs_refuses_every_bad_argument_by_name(db):
    good = {"act": "retry", "filter": {"queue": "q"}}
    for argument, calls in BAD.items():
        for bad in calls:
            given = {**good, **bad}
            given = {k: Jsonb(v) if k == "arguments" and v else v for k, v in given.items()}
            with refused(argument):
                call(db, "act_on_jobs", **given)


@pytest.mark.own_session
def test_who_is_confined_to_queues_acts_on_their_jobs_only(db, admin, connect):
    name = f"confined_operator_{scalar(db, 'select current_database()')}"
    admin.execute(f"create role {name} login")
    grant(db, "operator", name)
    value(db, "grant_queue", role=name, queue="mine", access="operator")
    mine, theirs = enqueue(db, queue="mine"), enqueue(db, queue="theirs")
    db.execute(f"set session authorization {name}")

    told = act(db, "set_priority", {"all": True}, {"priority": 5})
    assert [job["job_id"] for job in told.samples] == [mine]
    told = act(db, "cancel", {"ids": [theirs]})
    assert told.conflicts == [{"job_id": theirs, "is_missing": True, "reason": "not found"}]
    for function in ("cancel_job", "retry_job"):
        with raises("RT001"):
            value(db, function, job_id=theirs)
    for function, arguments in [
        ("pause_queue", {"queue": "theirs"}),
        ("pause_type", {"job_type": "x"}),
        ("pause_all", {}),
        ("set_queue", {"queue": "theirs"}),
        (
            "act_on_jobs",
            {"act": "move", "filter": {"all": True}, "arguments": {"queue": "theirs"}},
        ),
    ]:
        with raises("42501"):
            call(db, function, **arguments)
    value(db, "pause_queue", queue="mine")
    db.execute("reset session authorization")
    assert statuses(db, [mine, theirs]) == ["queued", "queued"]
    assert {row.role for row in log(db)} == {name}
    db.execute(f"drop owned by {name}")
    admin.execute(f"drop role {name}")


@pytest.mark.own_session
def test_an_operator_who_sees_other_queues_only_edits_what_he_acts_on(db, admin, connect):
    name = f"blind_operator_{scalar(db, 'select current_database()')}"
    admin.execute(f"create role {name} login")
    for access, queue in [("operator", "mine"), ("observer", "theirs")]:
        grant(db, access, name)
        value(db, "grant_queue", role=name, queue=queue, access=access)
    ended, theirs = (dead(db, payload={"n": 1}, queue=queue) for queue in ("mine", "theirs"))
    waits = dead(db, payload={"n": 2}, queue="mine", max_attempts=2)
    db.execute(f"set session authorization {name}")

    told = act(db, "retry", {"ids": [ended, waits, theirs]}, {"payload": {}})
    once_more = act(db, "retry", {"ids": [waits]}, {"payload": {"n": 3}})
    db.execute("reset session authorization")

    assert (told.changed, once_more.changed) == (2, 1)
    assert told.conflicts == [{"job_id": theirs, "is_missing": True, "reason": "not found"}]
    assert [*told.samples, *once_more.samples, *once_more.conflicts] == []
    kept = rows(db, "select payload from rota.job_errors where queue = 'mine' order by job_id")
    assert [row.payload for row in kept] == [{"n": 1}, {"n": 2}]
    assert [row.before.get("payload") for row in log(db)[-2:]] == [None, {}]
    db.execute(f"drop owned by {name}")
    admin.execute(f"drop role {name}")


@pytest.mark.parametrize("is_dry_run", [True, False])
def test_the_ended_jobs_of_a_small_queue_are_found_without_those_of_others(db, is_dry_run):
    """A call looks at 5000 rows; one that only counts at 50000, and for a moment."""
    db.execute(
        "insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,"
        " status, run_at, attempts, lease_token, created_at, updated_at, finished_at)"
        " select n, case when n %% %s = 0 then 'q' else 'other' end, 'x', '{}', 0, 1,"
        " 'succeeded', a, 1, n, a, a, a from generate_series(1, %s) as n"
        " cross join (select rota.now() - interval '2 days' as a) as s",
        [3_000, 60_000 if is_dry_run else 12_000],
    )

    wanted = {"queue": "q", "older_than": "1 day"}
    found = act(db, "purge", wanted, dry_run=is_dry_run)

    assert (found.matched, found.next_after_id) == (20 if is_dry_run else 4, None)
    assert found.changed == (0 if is_dry_run else 4)
    fresh = act(db, "purge", {"queue": "q", "newer_than": "1 day"}, dry_run=True)
    assert (fresh.matched, fresh.next_after_id) == (0, None)


@pytest.mark.parametrize("column", ["run_at", "started_at", "finished_at"])
def test_a_retry_of_many_is_stopped_by_no_infinite_time(db, column):
    ids = [dead(db) for _ in range(3)]
    db.execute(f"update rota.finished_jobs set {column} = 'infinity' where id = %s", [ids[1]])

    told = act(db, "retry", {"status": "dead"})

    assert (told.changed, told.conflicts) == (3, [])
    assert statuses(db, ids) == ["queued"] * 3
