"""Observers that are confined to some queues: what they see, and what they do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from sql.helpers import (
    call,
    claim,
    enqueue,
    grant,
    one,
    owner,
    raises,
    rows,
    scalar,
    settle,
    value,
)

Db = psycopg.Connection[Any]

pytestmark = [pytest.mark.own_session, pytest.mark.slow]


@pytest.fixture
def observers(admin: Db, db: Db, connect: Callable[..., Db]) -> Iterator[tuple[Db, Db]]:
    """One who is confined to the queue a, and one who is confined to none."""
    database = scalar(db, "select current_database()")
    names = [f"{kind}_{database}"[:63] for kind in ("confined", "free")]
    sessions = []
    for name in names:
        admin.execute(sql.SQL("create role {}").format(sql.Identifier(name)))
        grant(db, "observer", name)
        session = connect()
        session.execute(sql.SQL("set session authorization {}").format(sql.Identifier(name)))
        sessions.append(session)
    value(db, "grant_queue", role=names[0], queue="a", access="observer")
    yield sessions[0], sessions[1]
    for name in names:
        db.execute(sql.SQL("drop owned by {}").format(sql.Identifier(name)))
        admin.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


def fill(db: Db) -> dict[str, list[int]]:
    """Leave the same in the queues a and b, and return the ids of their jobs."""
    ids: dict[str, list[int]] = {}
    # So that no other number is one of them.
    db.execute("select setval(pg_get_serial_sequence('rota.jobs', 'id'), 42420000)")
    for queue in "ab":
        value(db, "set_queue", queue=queue, lease="1 minute")
        value(db, "pause_type", job_type=f"type_{queue}", queue=queue)
        value(db, "set_limit", queue=queue, max_running=5)
        worker = {"worker": f"w{queue}", "host": "h", "pid": 1, "version": "1"}
        value(db, "report_worker", **worker, queues=[queue])
        one(
            db, "schedule_job", name=queue, schedule="every 1 second", job_type="s", queue=queue
        )
        one(db, "run_schedule_now", name=queue)
        call(db, "define_pipeline", pipeline=f"p{queue}", stages=STAGES % queue)
        parent = enqueue(db, "dies", queue=queue, ordering_key=f"k{queue}")
        enqueue(db, "waits", queue=queue, depends_on=[parent], if_parent_dead="wait")
        enqueue(db, "stays", queue=queue)
        for job in claim(db, queues=[queue], max_jobs=3):
            if job.job_type == "dies":
                one(db, "fail_job", **owner(job), error="secret", fatal=True)
            elif job.job_type == "stays":
                value(db, "record_effect", **owner(job), scope="mail", key=queue)
                value(db, "release_jobs", job_ids=[job.job_id], lease_tokens=[job.lease_token])
        value(db, "set_type", job_type=f"type_{queue}", time_limit="1 minute")
        # Of a queue that has moved: the move, and a job.
        move_id = 7000001 + "ab".index(queue)
        db.execute(
            "insert into rota.queue_moves (move_id, queue, direction, database, state)"
            " values (%s, %s, 'in', 6, 'settled')",
            [move_id, queue],
        )
        db.execute(
            "insert into rota.moved_jobs (job_id, move_id, database, new_job_id)"
            " values (%(id)s, %(id)s, 6, %(id)s)",
            {"id": move_id},
        )
        ids[queue] = [
            row[0] for row in rows(db, "select id from rota.job_runs where queue = %s", queue)
        ]
    value(db, "cancel_job", job_id=ids["a"][0])
    db.execute("select rota.tick()")
    return ids


STAGES = '[{"stage": "one", "job_type": "x", "queue": "%s"}]'
READ = (
    "select name from rota._access() where access = 'observer' and kind = 'view' order by name"
)
# What is about the whole database, or has no row of the other queue above.
OF_ALL = {"ticker_health"}


def test_a_confined_observer_sees_his_queues_only(db: Db, observers: tuple[Db, Db]) -> None:
    confined, free = observers
    ids = fill(db)
    named = {"b", "wb", "pb", "kb", "type_b", "queue b", "7000002", *map(str, ids["b"])}

    for (name,) in rows(db, READ):
        query = f"select v from (select to_jsonb(x) as v from rota.{name} as x) as v"
        seen = [row[0] for row in rows(confined, query)]
        texts = {str(text) for row in seen for text in flat(row)}
        assert not texts & named, name
        # He sees no more than there is, and whoever is confined to nothing sees all.
        assert len(seen) <= scalar(db, f"select count(*) from rota.{name}")
        assert scalar(free, f"select count(*) from rota.{name}") == scalar(
            db, f"select count(*) from rota.{name}"
        )
    assert {row[0] for row in rows(confined, "select queue from rota.job_runs")} == {"a"}
    assert rows(confined, "select queue from rota.queue_stats") == [("a",)]
    assert rows(confined, "select queue from rota.job_errors") == [("a",)]
    assert rows(confined, "select ordering_key from rota.halted_keys") == [("ka",)]
    assert rows(confined, "select move_id from rota.moved_jobs") == [(7000001,)]
    assert scalar(confined, "select count(*) from rota.dependencies") == 1
    assert scalar(confined, "select count(*) from rota.occurrences") >= 1
    assert {row[0] for row in rows(confined, "select queue from rota.job_counts()")} == {"a"}


def test_what_a_confined_observer_asks_of_rows_is_not_asked_of_others(
    db: Db, observers: tuple[Db, Db]
) -> None:
    """A function of his own that is said to cost nothing, and tells each row it is given."""
    confined, _ = observers
    ids = fill(db)
    named = {"b", "wb", "pb", "kb", "type_b", "queue b", "7000002", *map(str, ids["b"])}
    confined.execute("""
        create function pg_temp.tell(x anyelement) returns boolean language plpgsql
        cost 0.0000001 as $$ begin raise notice '%', to_jsonb(x); return true; end $$
    """)
    told: list[str] = []
    confined.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))

    for (name,) in rows(db, READ):
        confined.execute(
            f"select count(*) from rota.{name} as x where pg_temp.tell(x)".encode()
        )
        texts = {str(text) for row in told for text in flat(json.loads(row))}
        assert not texts & named, name
    assert {"a", *map(str, ids["a"])} <= {
        str(text) for row in told for text in flat(json.loads(row))
    }


@pytest.mark.parametrize("view", ["job_runs", "dead_jobs"])
def test_the_planner_shows_a_confined_observer_no_samples_of_other_queues(
    db: Db, observers: tuple[Db, Db], view: str
) -> None:
    """It calls the operators of a query on what ANALYZE has kept of a column."""
    for queue in "ab":
        for number in range(20):
            enqueue(db, queue=queue, payload={"of": f"{queue}{number}"})
    for job in claim(db, queues=["a", "b"], max_jobs=30):
        one(db, "fail_job", **owner(job), error=f"error {job.queue}", fatal=True)
    db.execute("analyze")
    told: list[str] = []
    for observer in observers:
        observer.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
        for kind in ("text", "jsonb"):
            observer.execute(f"""
                create function pg_temp.tell({kind}, {kind}) returns boolean language plpgsql
                as $$ begin raise notice '%', $1; return true; end $$;
                create operator pg_temp.<<< (function = pg_temp.tell, leftarg = {kind},
                    rightarg = {kind}, restrict = matchingsel)
            """)
    confined, free = observers
    queries = [
        f"explain select from {among} on x.{column} operator(pg_temp.<<<) {value}"
        for column, value in {"payload": "'1'", "last_error": "''", "queue": "''"}.items()
        for among in (f"(select) as o join rota.{view} as x",
                      f"(select) as o left join rota.{view} as x")
    ]  # fmt: skip

    for query in queries:
        confined.execute(query)

    assert told == []
    for query in queries:
        free.execute(query)
    assert {"error b", '{"of": "b1"}'} <= set(told)  # or the question proves nothing


@pytest.mark.parametrize("right", ["bypassrls", "member"])
def test_a_role_that_dumps_the_database_needs_more_than_to_read_all(
    db: Db, admin: Db, connect: Callable[..., Db], right: str
) -> None:
    """As pg_dump, it would rather fail than leave out rows."""
    backup = f"backup_{scalar(db, 'select current_database()')}"
    (owned_by,) = rows(db, "select nspowner::regrole from pg_namespace where nspname = 'rota'")[
        0
    ]
    admin.execute(f"create role {backup}; grant pg_read_all_data to {backup}")
    session = connect()
    session.execute(f"set session authorization {backup}; set row_security = off")
    tables = rows(
        db,
        "select oid::regclass::text from pg_class"
        " where relnamespace = 'rota'::regnamespace and relkind = 'r'",
    )
    try:
        with raises("42501"):
            session.execute("select from rota.queues")
        admin.execute(
            f"alter role {backup} bypassrls"
            if right == "bypassrls"
            else f"grant {owned_by} to {backup}"
        )
        for (table,) in tables:
            session.execute(f"select from {table}")
    finally:
        session.close()
        admin.execute(f"drop role {backup}")


def test_a_plan_that_is_used_again_shows_what_may_be_seen_now(
    db: Db, observers: tuple[Db, Db]
) -> None:
    confined, free = observers
    for queue in "aab":
        enqueue(db, queue=queue)
        (job,) = claim(db, queues=[queue])
        one(db, "fail_job", **owner(job), error="e", fatal=True)
    for observer in observers:
        for view in ("job_runs", "dead_jobs"):
            observer.execute(f"prepare of_{view} as select count(*) from rota.{view}")

    def counted(observer: Db) -> list[int]:
        return [scalar(observer, f"execute of_{view}") for view in ("job_runs", "dead_jobs")]

    assert (counted(confined), counted(free)) == ([2, 2], [3, 3])
    names = [scalar(observer, "select session_user") for observer in observers]
    value(db, "grant_queue", role=names[0], queue="*", access="observer")
    value(db, "grant_queue", role=names[1], queue="b", access="observer")
    assert (counted(confined), counted(free)) == ([3, 3], [1, 1])
    value(db, "revoke_queue", role=names[0], queue="*", access="observer")
    assert counted(confined) == [2, 2]


def flat(value: Any) -> Iterator[Any]:
    """Tell the plain values of JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from flat(inner)
    else:
        yield value


def test_questions_about_a_job_of_another_queue_find_none(
    db: Db, observers: tuple[Db, Db]
) -> None:
    confined, free = observers
    mine, others = enqueue(db, queue="a"), enqueue(db, queue="b")

    assert call(confined, "explain_job", job_id=mine)
    assert call(free, "explain_job", job_id=others)
    with raises("RT001"):
        call(confined, "explain_job", job_id=others)


def test_a_job_of_another_queue_for_which_one_waits_is_told_without_its_error(
    db: Db, observers: tuple[Db, Db]
) -> None:
    confined, free = observers
    parent = enqueue(db, "dies", queue="b", ordering_key="k", idempotency_key="i")
    waits = enqueue(db, "waits", queue="a", depends_on=[parent], if_parent_dead="wait")
    behind = enqueue(db, "behind", queue="a", ordering_key="k")
    (job,) = claim(db, queues=["b"])
    one(db, "fail_job", **owner(job), error="secret", fatal=True)
    again = enqueue(db, "dies", queue="b", idempotency_key="i")

    enqueue(db, "hidden", queue="b", ordering_key="l")
    after = enqueue(db, "behind", queue="a", ordering_key="l")
    assert "hidden" not in str(call(confined, "explain_job", job_id=after))
    assert "hidden" in str(call(free, "explain_job", job_id=after))
    for job_id in (waits, behind):
        told = str(call(confined, "explain_job", job_id=job_id))
        assert f"job {parent}" in told
        assert "dead" in told
        assert "secret" not in told
        assert f"job {again}" not in told
        free_told = str(call(free, "explain_job", job_id=job_id))
        assert "secret" in free_told
        assert f"taken by job {again}" in free_told


@pytest.mark.parametrize(
    "limit", [{"job_type": "x"}, {"limit_key": "c:1"}, {"limit_key": "c:*"}]
)
def test_who_fills_a_limit_in_another_queue_is_not_told(
    db: Db, observers: tuple[Db, Db], limit: dict[str, str]
) -> None:
    confined, free = observers
    value(db, "set_limit", **limit, max_running=2)
    settle(db)
    for queue in "ba":
        enqueue(db, queue=queue, limit_key="c:1")
    (others,), (mine,) = (claim(db, queues=[q], worker=f"worker_{q}") for q in "ba")
    waits = enqueue(db, queue="a", limit_key="c:1")

    told = call(confined, "explain_job", job_id=waits)[0]
    assert told.reason == "limit_full"
    assert told.explanation.endswith(f"running: one of another queue, {mine.job_id} (worker_a)")
    assert f"{others.job_id} (worker_b)" in str(call(free, "explain_job", job_id=waits))


def test_times_of_a_schedule_of_another_queue_are_not_told(
    db: Db, observers: tuple[Db, Db]
) -> None:
    confined, free = observers
    for queue in "ab":
        one(db, "schedule_job", name=queue, schedule="@daily", job_type="s", queue=queue)

    assert call(confined, "upcoming_runs", name="a", max_runs=1)
    assert call(free, "upcoming_runs", name="b", max_runs=1)
    with raises("RT005"):
        call(confined, "upcoming_runs", name="b")


@pytest.mark.parametrize("function", ["doctor", "verify", "rising_failures"])
def test_questions_about_all_queues_are_refused(
    observers: tuple[Db, Db], function: str
) -> None:
    confined, free = observers

    call(free, function)
    with raises("42501"):
        call(confined, function)


def test_visible_queues_are_those_that_were_granted(db: Db, observers: tuple[Db, Db]) -> None:
    confined, free = observers

    assert scalar(confined, "select rota.visible_queues()") == ["a"]
    assert scalar(free, "select rota.visible_queues()") is None
    assert scalar(db, "select rota.visible_queues()") is None
    sees_all = [scalar(who, "select rota.sees_all_queues()") for who in (confined, free, db)]
    assert sees_all == [False, True, True]
