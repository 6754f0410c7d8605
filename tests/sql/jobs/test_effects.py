"""The once-only ledger: who is told to go on, who is not, and who is refused."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    Db,
    call,
    claim,
    enqueue,
    one,
    owner,
    raises,
    refused,
    rows,
    running,
    scalar,
    swallow,
    value,
)

MAIL = {"scope": "mail", "key": "report:7"}


def record(db: Db, job, **arguments) -> bool:
    return value(db, "record_effect", **{**MAIL, **owner(job), **arguments})


def complete(db: Db, job, **arguments) -> str:
    return value(db, "complete_effect", **{**MAIL, **owner(job), **arguments})


def withdraw(db: Db, job, **arguments) -> None:
    one(db, "withdraw_effect", **{**MAIL, **owner(job), **arguments})


def known(db: Db, **arguments) -> list[tuple[bool, object]]:
    return [tuple(row) for row in call(db, "effect_result", **{**MAIL, **arguments})]


def ledger(db: Db) -> list:
    return rows(db, "select * from rota.effects order by scope, key")


def die(db: Db, clock, job):
    """Let the worker of a job die, and another claim it; return the new claim."""
    clock.advance("2 minutes")
    assert value(db, "sweep_stale_leases") == 1
    clock.advance("1 hour")
    (again,) = claim(db, worker="w2")
    assert again.job_id == job.job_id
    return again


def test_record_effect_is_true_once(db):
    job = running(db)

    assert known(db) == []
    assert record(db, job) is True
    assert record(db, job) is False
    assert known(db) == [(False, None)]

    assert complete(db, job, result=Jsonb({"id": 5})) == "completed"
    assert record(db, job) is False
    assert record(db, job, if_unknown="again") is False
    assert known(db) == [(True, {"id": 5})]


def test_record_effect_lets_the_holder_choose_too(db):
    job = running(db)
    record(db, job)

    assert record(db, job, if_unknown="skip") is False
    assert record(db, job, if_unknown="again") is True


@pytest.mark.of_utf8
def test_record_effect_tells_scopes_and_keys_apart(db):
    job = running(db)

    assert record(db, job)
    assert record(db, job, key="Report:7")
    assert record(db, job, key="report:7 ")
    assert record(db, job, scope="Mail")
    assert record(db, job, key="\N{SNOWMAN}" * 255)
    assert len(ledger(db)) == 5


def test_record_effect_stores_who_and_how_long(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    job = running(db)

    record(db, job, key="a", keep="1 day")
    record(db, job, key="b")

    kept = rows(db, "select job_id, lease_token, recorded_at, completed_at from rota.effects")
    assert [tuple(row) for row in kept] == [(job.job_id, job.lease_token, now, None)] * 2
    assert scalar(
        db,
        "select array_agg(expires_at - recorded_at order by key) = '{1 day,180 days}'"
        " from rota.effects",
    )


def test_complete_effect_is_answered_again_and_keeps_the_first_result(db, clock):
    job = running(db)
    record(db, job)

    assert complete(db, job, result=Jsonb(1)) == "completed"
    assert complete(db, job, result=Jsonb(2)) == "already_completed"
    value(db, "finish_job", **owner(job))
    assert complete(db, job) == "already_completed"
    assert known(db) == [(True, 1)]


def test_a_completed_effect_is_done_for_every_later_job(db):
    job = running(db)
    record(db, job)
    complete(db, job)
    value(db, "finish_job", **owner(job))
    other = running(db)

    assert record(db, other) is False
    assert record(db, other, if_unknown="again") is False


def test_withdraw_effect_frees_the_key(db):
    job, other = running(db), running(db)
    record(db, job)

    withdraw(db, job)

    assert known(db) == []
    assert record(db, other) is True
    with raises("RT011"):
        withdraw(db, job)


def test_an_unknown_effect_is_skipped_unless_told_otherwise(db, clock):
    job = running(db)
    record(db, job)
    before = ledger(db)

    again = die(db, clock, job)

    assert record(db, again) is False
    assert record(db, again, if_unknown="skip") is False
    assert ledger(db) == before


def test_an_unknown_effect_is_taken_over_to_do_it_again(db, clock):
    job = running(db)
    record(db, job, keep="1 day")
    again = die(db, clock, job)

    assert record(db, again, if_unknown="again", keep="2 days") is True

    (row,) = ledger(db)
    assert (row.lease_token, row.recorded_at) == (again.lease_token, clock.now())
    assert (row.expires_at - row.recorded_at).days == 2
    assert complete(db, again) == "completed"


def test_an_unknown_effect_is_taken_over_by_another_job(db, clock):
    job = running(db, max_attempts=1)
    record(db, job)
    clock.advance("2 minutes")
    value(db, "sweep_stale_leases")
    other = running(db)

    assert record(db, other) is False
    assert record(db, other, if_unknown="again") is True
    assert complete(db, other) == "completed"


@pytest.mark.parametrize("if_unknown", ["skip", "again"])
def test_an_effect_that_another_job_holds_is_in_progress(db, clock, if_unknown):
    job, other = running(db), running(db)
    record(db, job)
    before = ledger(db)

    with raises("RT010"):
        record(db, other, if_unknown=if_unknown)
    clock.advance("59 s")
    one(db, "heartbeat", **owner(other))
    clock.advance("2 s")  # the lease is over, and still nobody has taken it
    with raises("RT010"):
        record(db, other, if_unknown=if_unknown)
    assert ledger(db) == before

    value(db, "sweep_stale_leases")
    assert record(db, other, if_unknown=if_unknown) is (if_unknown == "again")


def test_jobs_of_one_claim_are_told_apart(db):
    """They have the same lease token, because they were claimed at the same moment."""
    enqueue(db)
    enqueue(db)
    job, other = claim(db, max_jobs=2)
    assert job.lease_token == other.lease_token
    record(db, job)

    with raises("RT010"):
        record(db, other, if_unknown="again")
    with raises("RT011"):
        complete(db, other)
    with raises("RT011"):
        withdraw(db, other)


LOSSES = {
    "swept": lambda db, clock, job: (
        clock.advance("2 minutes"),
        value(db, "sweep_stale_leases"),
    ),
    "claimed again": die,
    "snoozed": lambda db, clock, job: value(db, "snooze_job", **owner(job), delay="1 s"),
    "failed": lambda db, clock, job: one(db, "fail_job", **owner(job), error="e"),
    "forced": lambda db, clock, job: value(db, "retry_job", job_id=job.job_id, force=True),
}
CALLS = {"record": record, "complete": complete, "withdraw": withdraw}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_lost_lease_changes_nothing(db, clock, loss, is_recorded):
    job = running(db)
    if is_recorded:
        record(db, job)
    before = ledger(db)
    LOSSES[loss](db, clock, job)

    for act in CALLS.values():
        with raises("RT002"):
            act(db, job)
        assert ledger(db) == before


@pytest.mark.parametrize("name", CALLS)
def test_a_lease_that_was_taken_over_changes_nothing(db, clock, name):
    job = running(db)
    record(db, job)
    again = die(db, clock, job)
    record(db, again, if_unknown="again")
    before = ledger(db)

    with raises("RT002"):
        CALLS[name](db, job)

    assert ledger(db) == before


@pytest.mark.parametrize("name", CALLS)
def test_an_ended_job_changes_nothing(db, name):
    job = running(db)
    record(db, job)
    value(db, "finish_job", **owner(job))
    before = ledger(db)

    with raises("RT003"):
        CALLS[name](db, job)

    assert ledger(db) == before


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_job_is_not_found(db, name):
    job = running(db)

    with raises("RT001"):
        CALLS[name](db, job, job_id=999)


@pytest.mark.parametrize("name", ["complete", "withdraw"])
def test_who_was_told_false_does_not_hold_the_record(db, clock, name):
    job = running(db)
    with raises("RT011"):
        CALLS[name](db, job)
    record(db, job)
    again = die(db, clock, job)
    assert record(db, again) is False
    before = ledger(db)

    with raises("RT011"):
        CALLS[name](db, again)

    assert ledger(db) == before


def test_a_completed_effect_is_not_withdrawn(db):
    job = running(db)
    record(db, job)
    complete(db, job)

    with raises("RT011"):
        withdraw(db, job)

    assert known(db) == [(True, None)]


def test_complete_effect_goes_with_the_transaction_of_finish_job(db):
    job = running(db)
    record(db, job)

    with db.transaction(force_rollback=True):
        complete(db, job)
        value(db, "finish_job", **owner(job))
    assert known(db) == [(False, None)]

    with db.transaction():
        complete(db, job)
        value(db, "finish_job", **owner(job))
    assert known(db) == [(True, None)]


BAD = [
    ("scope", None),
    ("scope", ""),
    ("scope", "a b"),
    ("scope", "x" * 64),
    ("key", None),
    ("key", ""),
    ("key", "x" * 256),
    ("job_id", None),
    ("lease_token", None),
]


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_refused(db, name):
    job = running(db)

    for argument, bad in BAD:
        with refused(argument):
            CALLS[name](db, job, **{argument: bad})


@pytest.mark.parametrize(("argument", "bad"), [b for b in BAD if b[0] in MAIL])
def test_effect_result_refuses_bad_arguments(db, argument, bad):
    with refused(argument):
        known(db, **{argument: bad})


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("if_unknown", None),
        ("if_unknown", "retry"),
        ("keep", None),
        ("keep", "0"),
        ("keep", "-1 day"),
        ("keep", "101 years"),
    ],
)
def test_record_effect_refuses_bad_arguments(db, argument, bad):
    job = running(db)

    with refused(argument):
        record(db, job, **{argument: bad})

    assert ledger(db) == []


def test_complete_effect_refuses_a_result_that_is_too_long(db):
    job = running(db)
    record(db, job)
    noise = scalar(
        db, "select string_agg(md5(n::text), '') from generate_series(1, 33000) as n"
    )

    with refused("result"):
        complete(db, job, result=Jsonb(noise))

    assert known(db) == [(False, None)]


@pytest.mark.parametrize(
    "change",
    [
        "scope = ''",
        "key = ''",
        "expires_at = 'infinity'",
        "result = '1'",
    ],
)
def test_the_table_refuses_what_no_function_writes(db, change):
    record(db, running(db))

    with pytest.raises(psycopg.errors.CheckViolation):
        db.execute(f"update rota.effects set {change}")


def test_retention_purges_records_after_their_time(db, clock):
    job = running(db, lease="30 days")
    for key in ("short", "long", "held"):
        record(db, job, key=key, keep="2 days" if key == "long" else "1 day")
    for key in ("short", "long"):
        complete(db, job, key=key)

    clock.advance("23 hours")
    one(db, "tick")
    assert [row.key for row in ledger(db)] == ["held", "long", "short"]

    clock.advance("2 hours")
    one(db, "tick")
    assert [row.key for row in ledger(db)] == ["held", "long"]
    assert record(db, job, key="short") is True

    value(db, "finish_job", **owner(job))
    clock.advance("11 s")
    one(db, "tick")
    assert [row.key for row in ledger(db)] == ["long", "short"]


def test_retention_purges_a_bounded_number_by_the_index(db):
    db.execute(
        "insert into rota.effects (scope, key, job_id, lease_token, expires_at)"
        " select 's', n::text, 1, 1, rota.now() - interval '1 s'"
        " from generate_series(1, 2500) as n"
    )

    deleted: list[int] = []
    for _ in range(100):  # on a busy machine a tick leaves some kinds to the next
        db.execute("update rota.maintenance set done_at = '-infinity' where task = 'tick'")
        deleted.append(one(db, "tick").effects_deleted)
        if sum(deleted) == 2500:
            break
    assert [number for number in deleted if number] == [1001, 1001, 498]
    assert ledger(db) == []


def test_observers_and_nobody_else_reads_the_ledger_and_nobody_writes_it(db):
    granted = rows(db, "select access from rota._access() where name = 'effects'")

    assert [row.access for row in granted] == ["observer"]


def unknown(db: Db, scope="mail", key="report:7"):
    """Leave an effect unknown, of a job that has ended; return that."""
    job = running(db)
    record(db, job, scope=scope, key=key)
    one(db, "finish_job", **owner(job))
    return job


def settle(db: Db, outcome: str, **arguments) -> int:
    return value(db, "settle_effect", **{**MAIL, "outcome": outcome, **arguments})


def test_settle_effect_says_that_an_unknown_one_is_done(db):
    job = unknown(db)

    assert settle(db, "done", result=Jsonb({"id": 5})) == job.job_id

    assert known(db) == [(True, {"id": 5})]
    assert not record(db, running(db), if_unknown="again")
    assert rows(db, "select completed_at is not null from rota.effects") == [(True,)]


def test_settle_effect_lets_an_unknown_one_be_done_again(db):
    job = unknown(db)

    assert settle(db, "again") == job.job_id

    assert known(db) == []
    assert record(db, running(db))


@pytest.mark.parametrize("outcome", ["done", "again"])
def test_settle_effect_leaves_what_is_known_or_not_there(db, outcome):
    with raises("RT011"):
        settle(db, outcome)
    job = running(db)
    record(db, job)
    with raises("RT010"):
        settle(db, outcome)
    complete(db, job)
    before = ledger(db)
    with raises("RT011"):
        settle(db, outcome)
    one(db, "finish_job", **owner(job))
    with raises("RT011"):
        settle(db, outcome)

    assert ledger(db) == before


def test_settle_effect_may_come_as_soon_as_the_lease_is_taken_back(db, clock):
    job = running(db)
    record(db, job)
    clock.advance("2 minutes")
    with raises("RT010"):
        settle(db, "done")
    value(db, "sweep_stale_leases")

    settle(db, "again")

    with raises("RT002"):
        complete(db, job)
    assert known(db) == []


@pytest.mark.parametrize(
    ("argument", "bad"),
    [("scope", None), ("key", ""), ("outcome", "maybe"), ("outcome", None)],
)
def test_settle_effect_refuses_bad_arguments(db, argument, bad):
    unknown(db)

    with refused(argument):
        settle(db, **{"outcome": "done", argument: bad})


def test_settle_effect_takes_no_result_of_what_is_to_be_done_again(db):
    unknown(db)

    with refused("result"):
        settle(db, "again", result=Jsonb(5))


def test_unknown_effects_are_those_that_no_lease_holds(db):
    ended = unknown(db)
    unknown(db, key="done")
    settle(db, "done", key="done")
    record(db, running(db), key="in progress")

    seen = rows(db, "select scope, key, job_id, job_type, status from rota.unknown_effects")

    assert seen == [("mail", "report:7", ended.job_id, "x", "succeeded")]


def test_record_effect_refuses_a_record_that_a_trigger_swallows(db):
    """Else it would look for the record without end."""
    job = running(db)
    swallow(db, "effects")

    with raises("09000"):
        record(db, job)
