"""Roles that are confined to some queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    grant,
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

Db = psycopg.Connection[Any]
FORBIDDEN = "42501"

pytestmark = [pytest.mark.own_session, pytest.mark.slow]


@pytest.fixture
def role(admin: Db, db: Db) -> Iterator[Callable[..., str]]:
    """Make roles that may work and enqueue, and are members of others."""
    made: list[str] = []

    def make(*, member_of: str | None = None, accesses: str = "worker producer") -> str:
        name = f"confined_{scalar(db, 'select current_database()')}_{len(made)}"[-63:]
        made.append(name)
        admin.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
        if member_of:
            give = sql.SQL("grant {} to {}")
            admin.execute(give.format(sql.Identifier(member_of), sql.Identifier(name)))
        for access in accesses.split():
            grant(db, access, name)
        return name

    yield make
    for name in reversed(made):
        db.execute(sql.SQL("drop owned by {}").format(sql.Identifier(name)))
        admin.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def session(connect: Callable[..., Db]) -> Callable[..., Db]:
    """A session that came as one role, and has perhaps set another."""

    def open_as(name: str, *, then: str | None = None) -> Db:
        connection = connect()
        connection.execute(sql.SQL("set session authorization {}").format(sql.Identifier(name)))
        if then:
            connection.execute(sql.SQL("set role {}").format(sql.Identifier(then)))
        return connection

    return open_as


def confined(db: Db, role: Callable[..., str], *queues: str, access: str = "worker") -> str:
    name = role()
    for queue in queues:
        assert value(db, "grant_queue", role=name, queue=queue, access=access)
    return name


def foreign(db: Db, queue: str = "b") -> Any:
    """A job that somebody else runs."""
    enqueue(db, queue=queue)
    (job,) = claim(db, queues=[queue], lease="1 hour")
    return job


def test_grant_queue_confines_a_worker_to_it(db, role, session):
    enqueue(db, queue="a"), enqueue(db, queue="b")
    worker = session(confined(db, role, "a"))

    assert len(claim(worker, queues=["a"])) == 1
    for queues in (["b"], ["a", "b"], ["default"]):
        with raises(FORBIDDEN):
            claim(worker, queues=queues)
        with raises(FORBIDDEN):
            call(worker, "finish_and_claim", worker="w", queues=queues)
        with raises(FORBIDDEN):
            call(worker, "wait_for_jobs", queues=queues)
    assert len(claim(db, queues=["b"])) == 1


@pytest.mark.parametrize(
    ("access", "function", "arguments"),
    [
        ("worker", "claim_jobs", {"worker": "w", "queues": ["b"]}),
        ("operator", "pause_all", {}),
        ("observer", "rising_failures", {}),
    ],
)
def test_what_a_refused_role_is_told_lets_it(db, role, session, access, function, arguments):
    name = role(accesses=access)
    value(db, "grant_queue", role=name, queue="a", access=access)
    refused_one = session(name)

    with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
        call(refused_one, function, **arguments)
    remedy = str(caught.value.diag.message_hint).rpartition(": ")[2].replace("ROLE", name)
    db.execute(remedy.encode())

    call(refused_one, function, **arguments)


def test_a_role_without_grants_works_in_all_queues(db, role, session):
    confined(db, role, "a")
    enqueue(db, queue="b")

    assert len(claim(session(role()), queues=["a", "b"])) == 1


@pytest.mark.parametrize("queues", [["b"], ["a", "b"]], ids=str)
@pytest.mark.parametrize("max_jobs", [1, 5])
def test_a_worker_that_has_a_hint_is_confined_at_once(db, role, session, max_jobs, queues):
    name = role()
    worker = session(name)
    for _ in range(3):
        enqueue(db, queue="b")
    assert claim(worker, queues=queues)

    value(db, "grant_queue", role=name, queue="a")

    with raises(FORBIDDEN):
        claim(worker, queues=queues, max_jobs=max_jobs)


ACTS = {
    "finish_job": {},
    "fail_job": {"error": "e"},
    "snooze_job": {"delay": "1 minute"},
    "heartbeat": {},
    "set_progress": {"percent": 5},
    "record_effect": {"scope": "s", "key": "k"},
    "complete_effect": {"scope": "s", "key": "k"},
    "withdraw_effect": {"scope": "s", "key": "k"},
}


@pytest.mark.parametrize("function", ACTS)
def test_a_job_of_another_queue_is_not_there_for_a_confined_worker(db, role, session, function):
    job = foreign(db)
    worker = session(confined(db, role, "a"))
    before = run(db, job.job_id)

    for token in (job.lease_token, job.lease_token + 1, 0):
        with raises("RT001"):
            call(worker, function, job_id=job.job_id, lease_token=token, **ACTS[function])

    assert run(db, job.job_id) == before


def test_a_confined_worker_ends_no_job_that_travels_for_others(db, role, session):
    value(db, "set_database_number", number=5)
    value(db, "enqueue_to", database=6, job_type="x")
    (job,) = call(db, "take_forwards", worker="w", database=6)
    worker = session(confined(db, role, "a"))
    of_job = {"job_ids": [job.job_id], "lease_tokens": [job.lease_token]}

    with raises("RT001"):
        call(worker, "end_forwards", **of_job, endings='[{"job_id": 1}]')


def test_calls_for_many_take_jobs_of_other_queues_for_lost(db, role, session):
    others, mine = foreign(db), foreign(db, "a")
    worker = session(confined(db, role, "a"))
    both = owners(others, mine)

    beats = call(worker, "heartbeat_jobs", **both)
    assert [beat.is_lost for beat in beats] == [True, False]
    ends = call(worker, "finish_jobs", **both)
    assert [end.outcome for end in ends] == ["lost", "finished"]
    for more in (
        {"outcome": "succeeded"},
        {"outcome": "failed", "error": "e"},
        {"outcome": "snoozed", "delay": 1},
        {"outcome": "released"},
    ):
        endings = [{**owner(others), **more}]
        told = call(worker, "end_jobs", endings=Jsonb(endings))
        assert {row.answer for row in told} == {"lost"}
    assert [row.is_released for row in call(worker, "release_jobs", **owners(others))] == [
        False
    ]
    (answer,) = call(worker, "finish_and_claim", worker="w", queues=["a"], **owners(others))
    assert answer.outcome == "lost"
    assert value(db, "finish_job", **owner(others)) == "finished"


def test_a_right_that_is_taken_back_opens_no_other_queue(db, role, session):
    name = confined(db, role, "a")
    worker = session(name)
    enqueue(db, queue="a"), enqueue(db, queue="b")

    assert value(db, "revoke_queue", role=name, queue="a")

    for queue in "ab":
        with raises(FORBIDDEN):
            claim(worker, queues=[queue])
    assert not value(db, "revoke_queue", role=name, queue="a")
    assert value(db, "grant_queue", role=name, queue="a")
    assert not value(db, "grant_queue", role=name, queue="a")
    assert len(claim(worker, queues=["a"])) == 1


def test_the_grants_of_a_role_that_is_gone_go_with_maintenance(db, admin, clock):
    stays, goes = (f"{name}_{scalar(db, 'select current_database()')}" for name in "ab")
    for name in (stays, goes):
        admin.execute(sql.SQL("create role {}").format(sql.Identifier(name)))
    try:
        call(db, "grant_queue", role=stays, queue="mail")
        call(db, "grant_queue", role=goes, queue="billing")
        call(db, "grant_queue", role=goes, queue="web", access="producer")
        admin.execute(sql.SQL("drop role {}").format(sql.Identifier(goes)))
        clock.advance("1 minute")
        one(db, "tick")

        assert rows(db, "select role::text, queue from rota.queue_grants") == [(stays, "mail")]
        assert rows(db, "select role::text from rota.configured_names") == [(stays,)]
    finally:
        admin.execute(sql.SQL("drop role {}").format(sql.Identifier(stays)))
    clock.advance("1 minute")
    one(db, "tick")

    assert rows(db, "select role from rota.queue_grants") == []
    told = "select evidence from rota.doctor() where evidence like '%grants%'"
    assert rows(db, told) == []


def test_a_star_is_all_queues(db, role, session):
    name = confined(db, role, "a", "*")
    enqueue(db, queue="b")

    assert len(claim(session(name), queues=["a", "b"])) == 1


USES = {
    "worker": lambda db, queue: claim(db, queues=[queue]),
    "producer": lambda db, queue: enqueue(db, queue=queue),
}
MANY = 40


@pytest.fixture(params=[0, MANY], ids=["few grants", "many grants"])
def others(db: Db, request: pytest.FixtureRequest) -> None:
    """Grants to a role of which nobody is a member, as many tenants have them."""
    for access in USES:
        for number in range(request.param):
            queue = f"of-{number}"
            call(db, "grant_queue", role="pg_signal_backend", queue=queue, access=access)


def each_access(test: Any) -> Any:
    return pytest.mark.parametrize("access", USES)(pytest.mark.usefixtures("others")(test))


@each_access
def test_who_is_a_member_of_no_confined_role_may_use_all_queues(db, role, session, access):
    confined(db, role, "a", access=access)

    USES[access](session(role(member_of=role())), "b")


@each_access
def test_members_of_members_are_confined_as_the_role_is(db, role, session, access):
    """Also by a membership that inherits nothing."""
    team = role(member_of=confined(db, role, "a", access=access))
    member = role(member_of=team)
    db.execute(f"alter role {member} noinherit")
    if db.info.server_version >= 160000:
        db.execute(f"grant {team} to {member} with inherit false, set false")

    USES[access](session(member), "a")
    with raises(FORBIDDEN):
        USES[access](session(member), "b")


@each_access
def test_who_owns_the_database_is_confined_as_owners_are(db, role, session, access):
    name = role()
    database = scalar(db, "select current_database()")
    before = scalar(db, "select datdba::regrole::text from pg_database where datname = %s",
        database)  # fmt: skip
    value(db, "grant_queue", role="pg_database_owner", queue="a", access=access)
    USES[access](session(name), "b")
    db.execute(f'alter database {database} owner to "{name}"')

    with raises(FORBIDDEN):
        USES[access](session(name), "b")
    with raises(FORBIDDEN):
        USES[access](session(role(member_of=name)), "b")
    db.execute(f'alter database {database} owner to "{before}"')


@pytest.mark.parametrize("access", USES)
def test_grants_to_very_many_roles_cost_others_nothing(db, role, session, access):
    db.execute(
        "select rota.grant_queue('pg_signal_backend', 'q' || n, a) from generate_series(1, 500)"
        " as n, unnest('{worker,producer}'::text[]) as a"
    )
    free = session(role())
    read = """
        select sum(pg_stat_get_xact_tuples_returned(t)) from unnest(
            '{rota.configured_names,rota.configured_names_pkey,rota.queue_grants}'::regclass[]
        ) as t
    """
    for _ in range(6):  # with any plan
        USES[access](free, "b")

    with free.transaction():
        before = scalar(free, read)
        USES[access](free, "b")
        assert scalar(free, read) - before < 100


@each_access
def test_members_are_confined_as_the_role_is(db, role, session, access):
    member = session(role(member_of=confined(db, role, "a", access=access)))

    USES[access](member, "a")
    with raises(FORBIDDEN):
        USES[access](member, "b")


@each_access
def test_nobody_sets_a_role_to_be_free(db, role, session, access):
    free = role()
    name = role(member_of=free)
    value(db, "grant_queue", role=name, queue="a", access=access)

    with raises(FORBIDDEN):
        USES[access](session(name, then=free), "b")


@each_access
def test_who_sets_a_confined_role_is_confined_by_it(db, role, session, access):
    team = confined(db, role, "a", access=access)
    gate = role(member_of=team)
    value(db, "grant_queue", role=gate, queue="b", access=access)

    with raises(FORBIDDEN):
        USES[access](session(gate, then=team), "b")
    USES[access](session(gate), "a")
    USES[access](session(gate), "b")


@each_access
def test_who_has_set_a_confined_role_stays_confined_when_he_may_not_set_it_any_more(
    db, role, session, access
):
    team = confined(db, role, "a", access=access)
    name = role(member_of=team)
    caller = session(name, then=team)
    db.execute(f"revoke {team} from {name}")

    with raises(FORBIDDEN):
        USES[access](caller, "b")


def test_a_superuser_is_a_member_of_all_and_confined_by_none(db, role):
    confined(db, role, "a")
    foreign(db)

    assert scalar(db, "select usesuper from pg_user where usename = session_user")
    enqueue(db, queue="b")
    assert len(claim(db, queues=["b"])) == 1


NEW = {
    "plain": {},
    "with a key": {"idempotency_key": "k"},
    "in order": {"ordering_key": "k"},
    "with a limit": {"limit_key": "k"},
    "later": {"delay": "1 hour"},
}


@pytest.mark.parametrize("kind", NEW)
def test_a_confined_producer_enqueues_to_its_queues_only(db, role, session, kind):
    producer = session(confined(db, role, "a", access="producer"))
    jobs = [{"job_type": "x", "queue": queue, **NEW[kind]} for queue in "ab"]

    with raises(FORBIDDEN):
        enqueue(producer, queue="b", **NEW[kind])
    with raises(FORBIDDEN):
        call(producer, "enqueue_many", jobs=psycopg.types.json.Jsonb(jobs))
    with raises(FORBIDDEN):
        enqueue(producer, **NEW[kind])
    assert scalar(db, "select count(*) from rota.jobs") == 0
    enqueue(producer, queue="a", **NEW[kind])
    enqueue(session(role()), queue="b")


def send(db: Db, **arguments: Any) -> Any:
    return value(db, "enqueue_to", **{"database": 6, "job_type": "x", **arguments})


def test_a_confined_producer_sends_jobs_to_its_queues_in_other_databases_only(
    db, role, session
):
    value(db, "set_database_number", number=5)
    producer = session(confined(db, role, "a", access="producer"))

    for database in (5, 6):
        with raises(FORBIDDEN):
            send(producer, database=database, queue="b")
    with refused("queue"):
        enqueue(producer, job_type="rota.forward", queue="forward:6", payload={"queue": "b"})
    sent = [
        send(producer, queue="a"),
        *(send(producer, queue="a", ordering_key="k") for _ in "12"),
    ]
    with db.transaction():
        taken = call(db, "take_forwards", worker="w", database=6)

    assert [job.job_id for job in taken] == sent
    with refused("queue"):
        call(db, "grant_queue", role=role(), queue="forward:6", access="producer")


def test_a_confined_producer_changes_no_job_of_another_queue_in_another_database(
    db, role, session
):
    """The forwarder that carries his job there may enqueue to all queues."""
    there = {queue: enqueue(db, queue=queue, idempotency_key=queue) for queue in "ab"}
    value(db, "set_database_number", number=5)
    producers = {
        "confined": session(confined(db, role, "a", access="producer")),
        "free": session(role()),
    }
    told = {}
    for who, producer in producers.items():
        for key in "ab":
            new = {"job_type": "x", "queue": "a", "idempotency_key": key}
            value(producer, "enqueue_to", database=6, on_conflict="replace", **new,
                payload={"of": who})  # fmt: skip
            (carried,) = call(db, "take_forwards", worker="w", database=6)
            # Pretend that this is the other one.
            jobs = {"jobs": f"[{carried.job}]", "enqueue_times": [carried.created_at]}
            (row,) = call(db, "receive_jobs", database=5, job_ids=[carried.job_id], **jobs)
            told[who, key] = row.job_id or row.error_code

    assert told == {
        ("confined", "a"): there["a"],
        ("confined", "b"): "22023",
        ("free", "a"): there["a"],
        ("free", "b"): there["b"],
    }


def test_a_confined_mover_moves_its_queues_only(db, role, session):
    """It would try again and again what it may not do, and tell others' names."""
    worker = session(confined(db, role, "a"))
    value(db, "set_database_number", number=5)
    moves = [value(db, "begin_queue_move", queue=queue, database=6) for queue in "ab"]

    assert [move.move_id for move in call(worker, "waiting_moves")] == moves[:1]
    assert [move.move_id for move in call(db, "waiting_moves")] == moves
    with raises("42501"):
        call(worker, "take_moves", move_id=moves[1])


def test_a_confined_worker_receives_jobs_of_its_queues_only(db, role, session):
    value(db, "set_database_number", number=5)
    worker = session(confined(db, role, "a"))
    jobs = Jsonb([{"job_type": "x", "queue": queue} for queue in "bab"])

    told = call(worker, "receive_jobs", database=5, job_ids=[6, 7, 8],
        enqueue_times=[datetime(2026, 1, 12, tzinfo=UTC)] * 3, jobs=jobs)  # fmt: skip

    assert sorted((row.ordinal, row.error_code) for row in told) == [
        (1, FORBIDDEN), (2, None), (3, FORBIDDEN),
    ]  # fmt: skip
    assert scalar(db, "select string_agg(queue, ' ') from rota.jobs") == "a"


@pytest.mark.parametrize("change", ["replace", "rerun", "blocks"])
def test_a_confined_worker_changes_no_job_of_another_queue_by_what_it_receives(
    db, role, session, change
):
    """It may be confined as a worker alone, and enqueue to all queues."""
    value(db, "set_database_number", number=5)
    parent = enqueue(db, queue="b", run_at="2040-01-01+00")
    there = enqueue(db, queue="b", idempotency_key="k", payload={"n": 1}, depends_on=[parent])
    before = run(db, there)
    worker = session(confined(db, role, "a"))
    new = {"job_type": "x", "queue": "a", "payload": {"n": 2}}

    def receive(number: int, **more: Any) -> Any:
        jobs, at = Jsonb([{**new, **more}]), [datetime(2026, 1, 12, tzinfo=UTC)]
        return one(worker, "receive_jobs", database=5, job_ids=[number], enqueue_times=at,
            jobs=jobs)  # fmt: skip

    keyed = {"idempotency_key": "k", "on_conflict": change}
    told = receive(6, **({"blocks": there} if change == "blocks" else keyed))

    assert (told.job_id, told.error_code) == (None, FORBIDDEN)
    assert run(db, there) == before
    assert scalar(db, "select count(*) from rota.dependencies where job_id = %s", there) == 1
    assert receive(7, idempotency_key="k").job_id == there
    assert receive(8, idempotency_key="k", on_conflict="keep").job_id == there


def test_a_confined_worker_takes_in_no_queue_that_moves(db, role, session):
    """The jobs of a move bring ids and effects along, and raise the ids of all."""
    value(db, "set_database_number", number=5)
    name = confined(db, role, "a")
    worker = session(name)
    move = {"move_id": 99, "from_database": 6, "queue": "a", "jobs": "[]", "settle_above": 9}

    with raises(FORBIDDEN):
        call(worker, "receive_moves", **move)

    value(db, "grant_queue", role=name, queue="*")
    assert call(worker, "receive_moves", **move) == []


def test_a_confined_worker_is_told_of_moves_of_its_queues_only(db, role, session):
    value(db, "set_database_number", number=5)
    for queue in "ab":
        enqueue(db, queue=queue)
        value(db, "begin_queue_move", queue=queue, database=6)

    moves = call(session(confined(db, role, "a")), "waiting_moves")

    assert [move.queue for move in moves] == ["a"]
    assert len(call(db, "waiting_moves")) == 2


@pytest.mark.parametrize("on_conflict", ["replace", "rerun"])
def test_a_confined_producer_changes_no_job_of_another_queue_by_its_key(
    db, role, session, on_conflict
):
    there = enqueue(db, queue="b", idempotency_key="k", payload={"n": 1})
    producer = session(confined(db, role, "a", access="producer"))
    before = run(db, there)
    new = {"queue": "a", "idempotency_key": "k", "payload": {"n": 2}}

    one = {"job_type": "x", "on_conflict": on_conflict, **new}
    many = {"jobs": psycopg.types.json.Jsonb([one])}
    for function, arguments in (("enqueue", one), ("enqueue_many", many)):
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
            call(producer, function, **arguments)
        # The name of the queue is not told.
        message = "no right to enqueue to the queue of the job with this idempotency_key"
        assert caught.value.diag.message_primary == message
        assert "'QUEUE'" in str(caught.value.diag.message_hint)

    assert run(db, there) == before
    assert enqueue(producer, **new) == there


def test_a_confined_producer_makes_no_job_of_another_queue_wait(db, role, session):
    first = enqueue(db, queue="b", run_at="2040-01-01+00")
    last = enqueue(db, queue="b", depends_on=[first])
    producer = session(confined(db, role, "a", access="producer"))

    # Nor is he told how it stands.
    for job_id in (last, first, 10**15):
        with raises("RT001"):
            enqueue(producer, queue="a", blocks=job_id)
    parent = enqueue(db, queue="a", run_at="2040-01-01+00")
    assert enqueue(producer, queue="a", blocks=enqueue(db, queue="a", depends_on=[parent]))


def test_a_confined_producer_starts_pipelines_in_its_queues_only(db, role, session):
    for queue in "ab":
        stages = psycopg.types.json.Jsonb([{"stage": "s", "job_type": "x", "queue": queue}])
        call(db, "define_pipeline", pipeline=queue, stages=stages)
    producer = session(confined(db, role, "a", access="producer"))

    assert value(producer, "start_pipeline", pipeline="a")
    with raises(FORBIDDEN, "no right to enqueue to the queue of stage"):
        value(producer, "start_pipeline", pipeline="b")


def test_the_maintenance_of_a_confined_worker_is_for_all_queues(db, clock, role, session):
    clock.set("2026-01-01 00:00+00")
    job = running(db, queue="b", lease="1 minute")
    worker = session(confined(db, role, "a"))
    clock.advance("1 hour")

    call(worker, "tick")

    assert run(db, job.job_id).status == "failed"


def test_grant_queue_and_revoke_queue_are_for_the_owner_alone(db, role, session):
    anybody = session(role(accesses="worker producer operator observer"))

    for function in ("grant_queue", "revoke_queue"):
        with raises(FORBIDDEN):
            call(anybody, function, role="postgres", queue="a")


@pytest.mark.parametrize("function", ["grant_queue", "revoke_queue"])
def test_grant_queue_and_revoke_queue_refuse_every_bad_argument_by_name(db, role, function):
    name = role()
    for bad in (None, "", "nobody here", "public"):
        with refused("role"):
            call(db, function, role=bad, queue="a")
    for bad in (None, "", "a b", "**"):
        with refused("queue"):
            call(db, function, role=name, queue=bad)
    for bad in (None, "", "reader", "Worker"):
        with refused("access"):
            call(db, function, role=name, queue="a", access=bad)


STAGES = '[{{"stage": "one", "job_type": "x", "queue": "{}"}}]'
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    # What is about queue b or about all, and the same about queue a.
    "schedule_job": (
        {"name": "n", "schedule": "@daily", "job_type": "x", "queue": "b"},
        {"name": "n", "schedule": "@daily", "job_type": "x", "queue": "a"},
    ),
    "set_limit": ({"queue": "b", "max_running": 1}, {"queue": "a", "max_running": 1}),
    "define_pipeline": (
        {"pipeline": "p", "stages": STAGES.format("b")},
        {"pipeline": "p", "stages": STAGES.format("a")},
    ),
    "set_retry_rule": (
        {"error_type": "E", "queue": "b", "fatal": True},
        {"error_type": "E", "queue": "a", "fatal": True},
    ),
    "set_breaker": (
        {"job_type": "x", "queue": "b", "max_failures": 3},
        {"job_type": "x", "queue": "a", "max_failures": 3},
    ),
    "set_archive": ({}, None),
    "stop_ticker": ({}, None),
    "queue_move_status": ({"queue": "b"}, {"queue": "a"}),
}


@pytest.mark.parametrize("function", SETTINGS)
def test_a_confined_operator_sets_what_is_of_his_queues_only(db, role, session, function):
    name = role(accesses="operator")
    value(db, "grant_queue", role=name, queue="a", access="operator")
    operator = session(name)
    others, own = SETTINGS[function]

    with raises(FORBIDDEN):
        call(operator, function, **others)
    if own is not None:
        call(operator, function, **own)
    call(db, function, **others)


def test_a_confined_operator_takes_no_runs_out_of_another_queue(db, role, session):
    """A pipeline that was dropped leaves runs, which go on by the names of its stages."""
    name = role(accesses="operator")
    value(db, "grant_queue", role=name, queue="a", access="operator")
    operator = session(name)
    define(db, first="b", last="b")
    run_id = value(db, "start_pipeline", pipeline="p", payload={"card": 4111})
    value(db, "drop_pipeline", pipeline="p")

    for function, more in {"define_pipeline": {"stages": stages(last="a")},
                           "drop_pipeline": {}}.items():  # fmt: skip
        with raises(FORBIDDEN):
            call(operator, function, pipeline="p", **more)

    (job,) = claim(db, queues=["b"])
    value(db, "finish_job", **owner(job))
    assert [job.job_id for job in claim(db, queues=["b"])] == [run_id]


def test_a_confined_operator_restarts_a_run_in_its_queues_only(db, role, session):
    name = role(accesses="operator")
    value(db, "grant_queue", role=name, queue="a", access="operator")
    define(db, first="b", last="a")
    run_id = value(db, "start_pipeline", pipeline="p")
    for queue in "ba":
        (job,) = claim(db, queues=[queue])
        value(db, "finish_job", **owner(job))
    before = run(db, run_id)
    operator = session(name)

    with raises(FORBIDDEN, "no right to act on the queue of stage"):
        call(operator, "restart_pipeline", job_id=run_id, stage="first")

    assert run(db, run_id) == before
    assert value(operator, "restart_pipeline", job_id=run_id, stage="last") == run_id


def stages(**queues: str) -> Jsonb:
    return Jsonb([{"stage": s, "job_type": s, "queue": queue} for s, queue in queues.items()])


def define(db: Db, **queues: str) -> None:
    call(db, "define_pipeline", pipeline="p", stages=stages(**queues))


def test_a_limit_of_a_type_or_key_is_for_an_operator_of_all_queues(db, role, session):
    name = role(accesses="operator")
    value(db, "grant_queue", role=name, queue="a", access="operator")
    operator = session(name)

    for about in ({"job_type": "x"}, {"limit_key": "k"}):
        with raises(FORBIDDEN):
            call(operator, "set_limit", **about, max_running=1)
    value(db, "grant_queue", role=name, queue="*", access="operator")
    call(operator, "set_limit", job_type="x", max_running=1)


def test_the_result_of_an_effect_is_not_told_to_a_worker_of_another_queue(db, role, session):
    name = role()
    value(db, "grant_queue", role=name, queue="a")
    for queue in "ab":
        enqueue(db, queue=queue)
        (job,) = claim(db, queues=[queue])
        value(db, "record_effect", **owner(job), scope="mail", key=queue)
        value(db, "complete_effect", **owner(job), scope="mail", key=queue, result=Jsonb(7))

    worker = session(name)

    def told() -> dict[str, Any]:
        return {key: one(worker, "effect_result", scope="mail", key=key) for key in "ab"}

    assert told() == {"a": (True, 7), "b": (True, None)}
    # A record is kept for longer than its job, and tells the same to who works there.
    db.execute("delete from rota.jobs")
    assert told() == {"a": (True, 7), "b": (True, None)}


def test_a_confined_worker_speaks_for_workers_of_its_queues_only(db, role, session):
    """What is said of workers is what explain_job() and doctor() tell of their queues."""
    about = {"host": "h", "pid": 1, "version": "1"}
    for name, queues in {"b": ["b"], "ab": ["a", "b"], "a": ["a"]}.items():
        value(db, "report_worker", worker=name, queues=queues, **about)
    before = rows(db, "select * from rota.workers where worker = 'b'")
    worker = session(confined(db, role, "a"))

    for name, queues in {"b": ["a"], "new": ["b"], "a": ["a", "b"]}.items():
        with raises(FORBIDDEN):
            value(worker, "report_worker", worker=name, queues=queues, **about)
    with raises(FORBIDDEN):
        value(worker, "deregister_worker", worker="b")

    assert rows(db, "select * from rota.workers where worker = 'b'") == before
    for name in ("a", "ab", "mine"):
        value(worker, "report_worker", worker=name, queues=["a"], **about)
        value(worker, "deregister_worker", worker=name)
    assert rows(db, "select worker from rota.workers") == [("b",)]


def test_a_record_that_is_taken_over_is_of_the_queue_of_its_new_job(db, role, session):
    for queue in "ba":
        enqueue(db, queue=queue)
        (job,) = claim(db, queues=[queue])
        effect = {**owner(job), "scope": "mail", "key": "k"}
        assert value(db, "record_effect", **effect, if_unknown="again")
        if queue == "b":
            one(db, "fail_job", **owner(job), error="e", fatal=True)
    value(db, "complete_effect", **effect, result=Jsonb(7))
    db.execute("delete from rota.jobs")

    worker = session(confined(db, role, "a"))

    assert one(worker, "effect_result", scope="mail", key="k") == (True, 7)


def test_what_retention_has_removed_is_not_there_for_a_confined_operator(db, role, session):
    name = role(accesses="operator")
    value(db, "grant_queue", role=name, queue="a", access="operator")
    operator = session(name)
    for queue in "ab":
        enqueue(db, queue=queue, ordering_key=queue)
        (job,) = claim(db, queues=[queue])
        value(db, "record_effect", **owner(job), scope="mail", key=queue)
        one(db, "fail_job", **owner(job), error="e", fatal=True)
    db.execute("delete from rota.finished_jobs")

    with raises("RT011"):
        value(operator, "settle_effect", scope="mail", key="b", outcome="done")
    with raises("RT012"):
        value(operator, "resume_ordering_key", ordering_key="b")

    assert value(operator, "settle_effect", scope="mail", key="a", outcome="done")
    assert value(db, "resume_ordering_key", ordering_key="b")


def test_what_is_of_another_queue_is_not_there_for_a_confined_operator(db, role, session):
    name = role(accesses="operator")
    value(db, "grant_queue", role=name, queue="a", access="operator")
    operator = session(name)
    one(db, "schedule_job", name="s", schedule="@daily", job_type="x", queue="b")
    call(db, "define_pipeline", pipeline="p", stages=STAGES.format("b"))
    value(db, "start_pipeline", pipeline="p")
    enqueue(db, "dies", queue="b", ordering_key="k")
    for job in claim(db, queues=["b"], max_jobs=2):
        if job.job_type == "dies":
            value(db, "record_effect", **owner(job), scope="mail", key="1")
        one(db, "fail_job", **owner(job), error="e", fatal=True)
        if job.job_type == "x":
            run_id = job.job_id

    for function in (
        "unschedule_job",
        "enable_schedule",
        "disable_schedule",
        "run_schedule_now",
    ):
        with raises("RT005"):
            call(operator, function, name="s")
    mine = {"name": "s", "schedule": "@daily", "job_type": "x", "queue": "a"}
    for function, arguments, named in (
        ("schedule_job", mine, "schedule 's'"),
        ("drop_pipeline", {"pipeline": "p"}, "pipeline 'p'"),
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
            call(operator, function, **arguments)
        # The name of the queue is not told.
        assert caught.value.diag.message_primary == f"no right to act on the queue of {named}"
        assert "'QUEUE'" in str(caught.value.diag.message_hint)
    with raises(FORBIDDEN):
        call(operator, "start_ticker")
    with raises("RT001"):
        call(operator, "restart_pipeline", job_id=run_id, stage="one")
    with raises("RT012"):
        call(operator, "resume_ordering_key", ordering_key="k")
    with raises("RT011"):
        call(operator, "settle_effect", scope="mail", key="1", outcome="done")
    value(db, "settle_effect", scope="mail", key="1", outcome="done")
    value(db, "resume_ordering_key", ordering_key="k")
