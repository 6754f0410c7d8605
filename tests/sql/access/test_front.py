"""A front passes calls on to many databases, says what they say, and keeps a key in one."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import rota
from races.harness import Session
from rota.cli import main
from rota.schema import run_script
from rota.testing.server import EmbeddedPostgres
from sql.helpers import call, grant, rows, scalar, value
from support.pooler import pooled
from support.server import Server
from support.waiting import wait_until

_names = count(1)

pytestmark = [pytest.mark.own_session, pytest.mark.plain_session]


@pytest.fixture(scope="module", autouse=True)
def _plproxy(admin):
    found = admin.execute(
        "select count(*) from pg_available_extensions where name in ('plproxy', 'postgres_fdw')"
    ).fetchone()
    if found[0] < 2 or admin.info.server_version < 150000:
        pytest.skip("the server has no PL/Proxy, or is older than PostgreSQL 15")


@contextmanager
def raises(sqlstate, pattern=""):
    with pytest.raises(psycopg.Error) as caught:
        yield
    found = (caught.value.sqlstate, caught.value.diag.message_primary or "")
    assert found[0] == sqlstate, found
    assert re.search(pattern, found[1]), found


class Front:
    """Databases with rota, and a front of the first two."""

    def __init__(self, server, admin, template, folder, name, source="template1"):
        self._server, self._admin, self._template = server, admin, template
        self.folder = folder
        self._open: list[psycopg.Connection] = []
        self.names = {0: name}
        self.shards: dict[int, psycopg.Connection] = {}
        self.urls: dict[int, str] = {}
        self.url = self._copy(source, name)
        self.add(1, 2)
        self.db = self.connect()

    def _copy(self, source, name):
        self._admin.execute(
            sql.SQL("create database {} template {} strategy file_copy").format(
                sql.Identifier(name), sql.Identifier(source)
            )
        )
        return self._server.url(name)

    def add(self, *numbers):
        """Make databases with rota; make() lets the front have them."""
        for number in numbers:
            self.names[number] = f"{self.names[0]}_{number}"
            self.urls[number] = self._copy(self._template, self.names[number])
            shard = self.shards[number] = psycopg.connect(self.urls[number], autocommit=True)
            if value(shard, "database_number") != number:
                value(shard, "set_database_number", number=number)

    def connect(self) -> psycopg.Connection:
        connection = psycopg.connect(self.url, autocommit=True)
        self._open.append(connection)
        return connection

    def databases(self, *numbers):
        words = {number: conninfo_to_dict(self.urls[number]) for number in numbers}
        return [
            {"number": n, "host": w["host"], "port": w["port"], "dbname": w["dbname"]}
            for n, w in words.items()
        ]

    def make(self, *numbers, **arguments):
        self.add(*(number for number in numbers if number not in self.urls))
        statements = rows(
            self.shards[1], "select rota.front_statements(%s, %s)",
            json.dumps(self.databases(*numbers)), arguments.get("time_limit", "5 seconds"),
        )  # fmt: skip
        maker = self.connect()
        maker.execute("set statement_timeout = 0")
        run_script(maker, "front.sql", {})
        with maker.transaction():
            for (statement,) in statements:
                maker.execute(statement)
        password = conninfo_to_dict(self.url).get("password")
        for access in ("producer", "operator"):
            maker.execute(
                "select rota_front.set_role(current_user, %s, password => %s)",
                (access, password),
            )
        self.db = self.connect()  # with the time limit of the database

    def rebalance(self):
        while rows(self.db, "select * from rota_front.rebalance()")[0].remaining:
            pass

    def live(self, key):
        """The numbers of the databases in which a key has a live job."""
        return [
            number for number, shard in self.shards.items()
            if rows(
                shard, "select from rota.jobs where %s in (idempotency_key, ordering_key)", key
            )
        ]  # fmt: skip

    def leave(self):
        for connection in (*self._open, *self.shards.values()):
            connection.close()

    def close(self):
        self.leave()
        for each in self.names.values():
            self._admin.execute(
                sql.SQL("drop database {} with (force)").format(sql.Identifier(each))
            )


@pytest.fixture(scope="module")
def made_once(server, admin, template) -> Iterator[str]:
    """The database of a front, to copy: to make one takes ten times as long."""
    made = Front(server, admin, template, None, "front")
    made.make(1, 2)
    made.leave()
    admin.execute("create database front_made_once template front strategy file_copy")
    made.close()
    yield "front_made_once"
    admin.execute("drop database front_made_once with (force)")


@pytest.fixture
def front(server, admin, template, made_once, tmp_path) -> Iterator[Front]:
    made = Front(server, admin, template, tmp_path, "front", made_once)
    admin.execute("alter database front set statement_timeout = 5000")  # is not copied
    made.db = made.connect()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(server, admin, template, tmp_path_factory) -> Iterator[Front]:
    """A front for tests that add jobs of their own keys, and change nothing of the front."""
    folder = tmp_path_factory.mktemp("front")
    made = Front(server, admin, template, folder, "front_shared")
    made.make(1, 2)
    yield made
    made.close()


def key_of(front, number, prefix="k"):
    """A key whose slot belongs to this database."""
    text = "select number from rota_front.slots where slot = rota_front.slot_of(%s)"
    keys = (f"{prefix}{n}" for n in count())
    return next(key for key in keys if scalar(front.db, text, key) == number)


def give_slot_away(db, key):
    """Let the slot of a key of database 1 belong to database 2."""
    db.execute(
        "update rota_front.slots set number = 2, earlier = '{1}'"
        " where slot = rota_front.slot_of(%s)", [key],
    )  # fmt: skip


def cancelled_elsewhere(front):
    """A key that has gone to database 2, and the cancelled job that it left at database 1."""
    key = key_of(front, 1)
    old = value(front.db, "enqueue", job_type="x", idempotency_key=key)
    value(front.db, "cancel_job", job_id=old)
    give_slot_away(front.db, key)
    return key, old


def take_away(front, admin):
    """Let nobody reach database 2 any more."""
    front.shards[2].close()
    name = sql.Identifier(front.names[2])
    admin.execute(sql.SQL("alter database {} allow_connections false").format(name))
    admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s",
                  [front.names[2]])  # fmt: skip


def test_a_front_has_the_functions_of_its_shards_with_their_arguments(shared):
    text = """
        select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)
        from pg_proc as p where p.pronamespace = 'rota'::regnamespace and p.proname !~ '^_'"""
    there = {row[0]: row[1:] for row in rows(shared.db, text)}
    here = {row[0]: row[1:] for row in rows(shared.shards[1], text)}
    public = {
        row[0] for row in rows(
            shared.shards[1], "select name from rota._access() where kind <> 'view'"
        )
    }  # fmt: skip

    assert there.keys() == public
    for name, (arguments, result) in there.items():
        plain = arguments.removesuffix(", shard_key text DEFAULT NULL::text")
        assert (plain, result) == here[name], name
        is_routed = name in ("enqueue", "enqueue_many", "start_pipeline")
        assert (plain != arguments) is is_routed, name


def test_a_key_goes_to_one_database_and_an_id_names_it(shared):
    ids = {key: value(shared.db, "enqueue", job_type="x", idempotency_key=key)
           for key in (f"k{n}" for n in range(20))}  # fmt: skip

    again = {key: value(shared.db, "enqueue", job_type="x", idempotency_key=key) for key in ids}
    assert again == ids
    assert Counter(job_id & 1023 for job_id in ids.values()).keys() == {1, 2}
    for key, job_id in ids.items():
        assert shared.live(key) == [job_id & 1023]
        value(shared.db, "set_priority", job_id=job_id, priority=7)
        shard = shared.shards[job_id & 1023]
        assert scalar(shard, "select priority from rota.jobs where id = %s", job_id) == 7


def test_jobs_without_keys_go_to_all_databases_and_with_parents_to_theirs(shared):
    ids = [value(shared.db, "enqueue", job_type="x") for _ in range(40)]

    assert {job_id & 1023 for job_id in ids} == {1, 2}
    for job_id in ids[:5]:
        child = value(shared.db, "enqueue", job_type="x", depends_on=[job_id])
        assert child & 1023 == job_id & 1023
    others = [next(i for i in ids if i & 1023 == number) for number in (1, 2)]
    with raises("22023", "depends_on and blocks name jobs of databases"):
        call(shared.db, "enqueue", job_type="x", depends_on=others)
    with raises("22023", "and the keys belong to database 2"):
        call(shared.db, "enqueue", job_type="x", depends_on=others[:1],
             ordering_key=key_of(shared, 2))  # fmt: skip


def test_keys_of_two_slots_need_a_shard_key(shared):
    keys = {"idempotency_key": "a", "ordering_key": "b", "limit_key": "c"}

    with raises("22023", "shard_key must be given"):
        call(shared.db, "enqueue", job_type="x", **keys)

    one = value(shared.db, "enqueue", job_type="x", **keys, shard_key="customer 7")
    two = value(shared.db, "enqueue", job_type="x", ordering_key="d", idempotency_key="e",
                headers='{"shard_key": "customer 7"}')  # fmt: skip
    assert one & 1023 == two & 1023
    # The argument goes first.
    assert value(shared.db, "enqueue", job_type="x", **keys, shard_key="customer 7",
                 headers='{"shard_key": "8"}') == one  # fmt: skip


def test_a_batch_is_for_one_database(shared):
    jobs = [{"job_type": "x", "ordering_key": "first"}, {"job_type": "x"},
            {"job_type": "x", "ordering_key": "last"}]  # fmt: skip

    with raises("22023", r"jobs\[3\]"):
        call(shared.db, "enqueue_many", jobs=json.dumps(jobs))
    assert shared.live("first") == []

    added = call(shared.db, "enqueue_many", jobs=json.dumps(jobs), shard_key="s")
    assert len({row.job_id & 1023 for row in added}) == 1
    assert [row.ordinal for row in added] == [1, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        "select rota.enqueue(null)",
        "select rota.enqueue('x', priority => 99999)",
        "select rota.enqueue('x', depends_on => array[1024 * 1024 + 1])",
        "select * from rota.enqueue_many('{}')",
        "select * from rota.enqueue_many(null)",
        """select * from rota.enqueue_many('[{"job_type": "x",
            "depends_on": [99999999999999999999, -1]}]')""",
        """select * from rota.enqueue_many('[{"job_type": "x"}, {"job_type": "x", "lease": 1},
            {"job_type": ""}]')""",
        "select rota.start_pipeline('none')",
        "select rota.retry_job(1024 * 1024 + 1)",
        "select rota.cancel_job(1024 * 1024 + 1)",
        "select rota.set_priority(1024 * 1024 + 1, null)",
        "select rota.reschedule_job(1024 * 1024 + 1, delay => '-1 s')",
        "select * from rota.restart_pipeline(1024 * 1024 + 1, 'x')",
        "select * from rota.explain_job(1024 * 1024 + 1)",
        "select rota.describe_schedule('61 * * * *')",
    ],
)
def test_errors_are_those_of_the_shard(shared, text):
    told = []
    for connection in (shared.shards[1], shared.db):
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(text)
        diagnostics = caught.value.diag
        told.append((diagnostics.sqlstate, diagnostics.message_primary,
                     diagnostics.message_detail, diagnostics.message_hint))  # fmt: skip

    assert told[0] == told[1]


def test_each_call_needs_a_time_limit_and_read_committed(shared):
    with shared.db.transaction():
        shared.db.execute("set local statement_timeout = 0")
        for function, arguments in (
            ("enqueue", {"job_type": "x"}), ("enqueue_to", {"job_type": "x", "database": 1}),
            ("cancel_job", {"job_id": 1025}), ("next_run", {"schedule": "@daily"}),
        ):  # fmt: skip
            with raises("55000", "statement_timeout"), shared.db.transaction():
                value(shared.db, function, **arguments)
    with shared.db.transaction():
        shared.db.execute("set transaction isolation level repeatable read")
        with raises("RT009"), shared.db.transaction():
            value(shared.db, "cancel_job", job_id=1025)


def test_what_goes_to_no_single_database_is_refused(shared):
    for text in (
        "select * from rota.claim_jobs('w')", "select rota.finish_job(1025, 1)",
        "select * from rota.tick()", "call rota.tick_loop()", "select rota.pause_all()",
        "select * from rota.act_on_jobs('retry', '{}')", "select rota.set_queue('q')",
        "select rota.retry_with_dependants(1025)",
        "select rota.set_limit(limit_key => 'account 7', max_running => 5)",
    ):  # fmt: skip
        with raises("0A000", "is not available in a front"):
            shared.db.execute(text)
    with raises("RT001", "job 5 not found"):
        value(shared.db, "retry_job", job_id=5)
    with raises("22023", "job_id"):
        value(shared.db, "retry_job", job_id=None)
    with raises("22023", "database must be the number of a database of this front, got 9"):
        value(shared.db, "enqueue_to", database=9, job_type="x")


def test_a_call_is_a_commit_of_its_own(shared):
    with shared.db.transaction(force_rollback=True):
        job_id = value(shared.db, "enqueue_to", database=2, job_type="x")

    assert rows(shared.shards[2], "select from rota.jobs where id = %s", job_id)


@pytest.mark.slow
def test_a_live_key_stays_where_it_is_when_a_database_is_added(front):
    keys = [f"k{n}" for n in range(60)]
    ids = {key: value(front.db, "enqueue", job_type="x", idempotency_key=key) for key in keys}
    lines = {key: value(front.db, "enqueue", job_type="x", ordering_key=f"o{key}")
             for key in keys}  # fmt: skip
    front.make(1, 2, 3)
    front.rebalance()

    shares = rows(
        front.db, "select number, count(*) from rota_front.slots group by 1 order by 1"
    )
    assert [row.count for row in shares] == [342, 341, 341]
    for key in keys:
        assert value(front.db, "enqueue", job_type="x", idempotency_key=key) == ids[key]
        behind = value(front.db, "enqueue", job_type="x", ordering_key=f"o{key}")
        assert behind & 1023 == lines[key] & 1023

    for shard in front.shards.values():
        shard.execute("select rota.cancel_job(id) from rota.jobs order by id")
    later = [value(front.db, "enqueue", job_type="x", idempotency_key=key) for key in keys]
    assert Counter(job_id & 1023 for job_id in later).keys() == {1, 2, 3}


@pytest.mark.slow
def test_a_key_that_is_unique_for_a_time_stays_too(front):
    key = "k"
    job_id = value(front.db, "enqueue", job_type="x", idempotency_key=key, unique_for="1 day")
    shard = front.shards[job_id & 1023]
    value(shard, "cancel_job", job_id=job_id)
    front.db.execute("update rota_front.slots set number = 3 - number, earlier = array[number]")

    assert value(front.db, "enqueue", job_type="x", idempotency_key=key, unique_for="1 day") \
        == job_id  # fmt: skip


@pytest.mark.slow
def test_a_slot_changes_hands_while_no_call_holds_it(front):
    key = key_of(front, 1)
    front.make(1, 2, 3)
    other = front.connect()
    with other.transaction():
        value(other, "enqueue", job_type="x", idempotency_key=key)
        for _ in range(30):
            (answer,) = rows(front.db, "select * from rota_front.rebalance(1024)")
        held = scalar(front.db, """select number from rota_front.slots
            where slot = rota_front.slot_of(%s)""", key)  # fmt: skip
        assert held == 1
        # All others have theirs; this one is among those left, if it was to go.
        assert (answer.switched, answer.remaining) in ((0, 0), (0, 1))
    front.rebalance()


@pytest.mark.slow
def test_a_login_without_rights_holds_up_no_call(front):
    """Any login can take any advisory lock of which it knows the key, and keep it."""
    key = key_of(front, 1)
    old = value(front.db, "enqueue", job_type="x", idempotency_key=key)
    front.make(1, 2, 3)
    front.db.execute("update rota_front.slots set earlier = array[1], number = 3")
    ended = value(front.db, "enqueue", job_type="x", idempotency_key="k")
    value(front.db, "cancel_job", job_id=ended)
    with front.connect() as stranger, front.connect() as caller:
        stranger.execute("set role pg_signal_backend")
        stranger.execute(
            "select pg_advisory_lock(1919907972, n) from generate_series(0, 1023) n"
        )
        stranger.execute(
            "select pg_advisory_lock(hashtextextended(k, n)) from unnest(%s::text[]) as k,"
            " generate_series(0, 1) as n",
            [[key, "k", "new"]],
        )
        caller.execute("set statement_timeout = '5s'")

        assert value(caller, "enqueue", job_type="x", idempotency_key=key) == old
        assert value(caller, "enqueue", job_type="x", idempotency_key="new") & 1023 == 3
        value(caller, "retry_job", job_id=ended)


@pytest.mark.slow
def test_a_slot_stays_where_a_call_holds_it_whose_lock_a_stranger_had(front):
    key = key_of(front, 1)
    front.make(1, 2, 3)
    front.db.execute("set statement_timeout = '5s'")
    with front.connect() as stranger, front.connect() as caller, caller.transaction():
        stranger.execute(
            "select pg_advisory_lock(1919907972, n) from generate_series(0, 1023) n"
        )
        value(caller, "enqueue", job_type="x", idempotency_key=key)
        stranger.execute("select pg_advisory_unlock_all()")

        for _ in range(30):
            rows(front.db, "select * from rota_front.rebalance(1024)")

        slot = "select number from rota_front.slots where slot = rota_front.slot_of(%s)"
        assert scalar(front.db, slot, key) == 1
    front.rebalance()


@pytest.mark.slow
def test_a_call_waits_while_its_slot_changes_hands(front):
    """A hands slots over and stays open; B calls, and waits for A; A commits."""
    front.make(1, 2, 3)
    with front.connect() as first, front.connect() as second:
        a, b = Session(first, front.db), Session(second, front.db)
        with a.transaction():
            a.fetch("select rota_front.rebalance(1024)")
            key = scalar(first, """select k from generate_series(1, 1000) as n
                cross join concat('k', n) as k join rota_front.slots as s
                    on s.slot = rota_front.slot_of(k) and s.number = 3 limit 1""")  # fmt: skip
            pending = b.start("select rota.enqueue('x', idempotency_key => %s)", [key])
            pending.wait_blocked(by=a)
        ((job_id,),) = pending.result()

    assert job_id & 1023 == 3


@pytest.mark.slow
def test_no_key_is_live_twice_while_databases_are_added(front):
    """Six producers on fifty keys, whose jobs end all the time, while slots change hands."""
    seen = []
    is_over = threading.Event()

    def produce(seed):
        with front.connect() as connection:
            while not is_over.is_set():
                seed = (seed * 1103515245 + 12345) % 2**31
                seen.append(
                    value(connection, "enqueue", job_type="x", idempotency_key=f"k{seed % 50}")
                )

    def finish(number):
        with psycopg.connect(front.urls[number], autocommit=True) as connection:
            while not is_over.is_set():
                connection.execute(
                    "select rota.cancel_job(id) from rota.jobs where random() < 0.3 order by id"
                )

    front.add(3)
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(produce, seed) for seed in range(6)]
        running += [pool.submit(finish, number) for number in front.urls]
        try:
            wait_until(lambda: len(seen) > 200)
            front.make(1, 2, 3)
            front.rebalance()
            wait_until(lambda: sum(job_id & 1023 == 3 for job_id in seen[-500:]) > 50)
        finally:
            is_over.set()
        for each in running:
            each.result()

    kept = {row[0] for shard in front.shards.values()
            for row in rows(shard, "select id from rota.job_runs")}  # fmt: skip
    assert {job_id & 1023 for job_id in seen} == {1, 2, 3}
    assert set(seen) <= kept
    spans = [
        row
        for shard in front.shards.values()
        for row in rows(shard, """select id & 1023 as number, idempotency_key as key,
            created_at, coalesce(finished_at, now() + interval '1 day') as ended_at
            from rota.job_runs""")
    ]  # fmt: skip
    for one in (row for row in spans if row.number == 3):
        for other in (row for row in spans if row.number != 3 and row.key == one.key):
            assert other.ended_at <= one.created_at or one.ended_at <= other.created_at


@pytest.mark.slow
def test_a_job_that_ended_does_not_come_back_beside_a_live_one(front, capsys):
    key, old = cancelled_elsewhere(front)
    new = value(front.db, "enqueue", job_type="x", idempotency_key=key)

    assert (old & 1023, new & 1023) == (1, 2)
    with raises("RT007", "is live in another database"):
        value(front.db, "retry_job", job_id=old)
    value(front.db, "cancel_job", job_id=new)
    assert main(["retry", str(old), "-d", front.url]) == 0
    assert capsys.readouterr().out == f"job {old} is queued\n"
    assert value(front.db, "enqueue", job_type="x", idempotency_key=key) == old


@pytest.mark.slow
def test_a_key_that_comes_back_while_its_slot_changes_hands_is_in_one_database(front):
    key = key_of(front, 1)
    old = value(front.db, "enqueue", job_type="x", idempotency_key=key)
    value(front.db, "cancel_job", job_id=old)
    waits = "select from pg_stat_activity where wait_event_type = 'Lock' and datname = %s"
    other, watch = front.connect(), front.shards[2]
    with ThreadPoolExecutor(2) as pool:
        with front.shards[1].transaction():
            front.shards[1].execute("select from rota.finished_jobs for update")
            retried = pool.submit(value, front.db, "retry_job", job_id=old)
            wait_until(lambda: rows(watch, waits, front.names[1]), "the retry at its shard")
            give_slot_away(other, key)
            found = pool.submit(value, other, "enqueue", job_type="x", idempotency_key=key)
            wait_until(lambda: found.done() or rows(watch, waits, front.names[0]))
        assert (retried.result(), found.result()) == ("queued", old)
    assert front.live(key) == [1]


@pytest.mark.slow
def test_a_run_that_ended_does_not_come_back_beside_a_live_one(front):
    for number in (1, 2):
        stages = '[{"stage": "a", "job_type": "x"}]'
        value(front.shards[number], "define_pipeline", pipeline="p", stages=stages)
    key = key_of(front, 1)
    old = value(front.db, "start_pipeline", pipeline="p", idempotency_key=key)
    value(front.db, "cancel_job", job_id=old)
    give_slot_away(front.db, key)
    new = value(front.db, "start_pipeline", pipeline="p", idempotency_key=key)

    assert (old & 1023, new & 1023) == (1, 2)
    with raises("RT007", "is live in another database"):
        value(front.db, "retry_job", job_id=old)
    with raises("RT007", "is live in another database"):
        value(front.db, "restart_pipeline", job_id=old, stage="a")


def test_a_job_is_shown_and_explained_through_a_front(shared, capsys):
    first = value(shared.db, "enqueue", job_type="x")
    job_id = value(shared.db, "enqueue", job_type="y", depends_on=[first])

    assert main(["explain", str(job_id), "-d", shared.url]) == 0
    told = capsys.readouterr().out
    assert f"job {job_id}, y in queue default, is blocked\n" in told
    assert "waits_for_job" in told
    assert main(["job", str(job_id), "-d", shared.url]) == 0
    assert re.search(rf"depends on\njob_id +job_type .*\n{first} +x ", capsys.readouterr().out)
    assert main(["jobs", "-d", shared.url]) == 1
    assert "name the databases behind it: --databases FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_that_has_moved_is_acted_on_where_it_is(front):
    job_id = value(front.db, "enqueue_to", database=1, job_type="x", queue="q")
    file = front.folder / "databases"
    file.write_text(f"{front.urls[1]}\n{front.urls[2]}\n")
    assert (
        main(["queue", "move", "q", "--from", "1", "--to", "2", "--databases", str(file)]) == 0
    )

    value(front.db, "set_priority", job_id=job_id, priority=5)

    assert job_id & 1023 == 1
    text = "select priority from rota.jobs where id = %s"
    assert scalar(front.shards[2], text, job_id) == 5


@pytest.mark.slow
def test_a_job_that_has_moved_and_ended_does_not_come_back_beside_a_live_one(front):
    key = key_of(front, 1)
    old = value(front.db, "enqueue", job_type="x", queue="q", idempotency_key=key)
    file = front.folder / "databases"
    file.write_text("\n".join(front.urls[number] for number in (1, 2)))
    assert main(["queue", "move", "q", "--to", "2", "--databases", str(file)]) == 0
    value(front.db, "cancel_job", job_id=old)
    front.db.execute("update rota_front.slots set earlier = '{2}' where number = 1")
    new = value(front.db, "enqueue", job_type="x", idempotency_key=key)

    assert new & 1023 == 1
    with raises("RT007", "is live in another database"):
        value(front.db, "retry_job", job_id=old)
    assert front.live(key) == [1]


@pytest.mark.slow
def test_a_key_whose_queue_has_moved_is_not_doubled_when_a_database_is_added(front):
    """The database that the queue has left carries on what its keys get."""
    key = key_of(front, 1)
    jobs = [{"job_type": "x", "queue": "q", "idempotency_key": key, "ordering_key": key}]
    value(front.db, "enqueue", **jobs[0])
    file = front.folder / "databases"
    file.write_text(f"{front.urls[1]}\n{front.urls[2]}\n")
    move = ["queue", "move", "q", "--from", "1", "--to", "2", "--databases", str(file)]
    assert main(move) == 0
    front.make(1, 2, 3)
    front.db.execute(
        "update rota_front.slots set number = 3, earlier = '{1}'"
        " where slot = rota_front.slot_of(%s)", [key],
    )  # fmt: skip

    again = value(front.db, "enqueue", **jobs[0])
    # Of a key that nobody sees the job may be between two of the questions.
    unseen = value(front.db, "enqueue", job_type="y", queue="q", idempotency_key=key)
    assert main(move) == 0
    call(front.db, "enqueue_many", jobs=json.dumps(jobs))
    assert main(move) == 0

    assert again & 1023 == unseen & 1023 == 1
    assert front.live(key) == [2]
    there = rows(front.shards[2], "select job_type from rota.jobs where queue = 'q' order by 1")
    assert there == [("x",), ("y",)]
    asked = json.dumps([*jobs, {**jobs[0], "queue": "r"}, {"job_type": "x", "queue": "q"}])
    assert value(front.shards[1], "find_live_keys", jobs=asked, moving=True) == [1]
    assert value(front.shards[1], "find_live_keys", jobs=asked) == []


@pytest.mark.slow
def test_a_job_with_a_key_does_not_follow_its_parent_that_has_moved(front):
    """Its key belongs to another database, where it may be live."""
    key = key_of(front, 1)
    parent = value(front.db, "enqueue_to", database=1, job_type="x", queue="q")
    file = front.folder / "databases"
    file.write_text(f"{front.urls[1]}\n{front.urls[2]}\n")
    move = ["queue", "move", "q", "--from", "1", "--to", "2", "--databases", str(file)]
    assert main(move) == 0

    child = {"job_type": "y", "depends_on": [parent]}
    plain = value(front.db, "enqueue", **child)
    for function, arguments in (
        ("enqueue", child | {"idempotency_key": key}),
        ("enqueue_many", {"jobs": json.dumps([child | {"ordering_key": key}])}),
    ):
        with raises("22023", "jobs of database 2, and the keys belong to database 1"):
            call(front.db, function, **arguments)
    value(front.db, "enqueue", job_type="y", idempotency_key=key)

    assert plain & 1023 == 2
    assert front.live(key) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "earlier"), [(2, 1), (1, 2)])
def test_a_line_takes_jobs_while_it_moves_between_two_databases_of_its_slot(
    front, number, earlier
):
    """Its first job is there and the next one is still here when another comes."""
    key = key_of(front, 1)

    def send(n):
        line = {"job_type": "x", "queue": "q", "ordering_key": key}
        return value(front.db, "enqueue", **line, payload={"n": n})

    source, target = front.shards[1], front.shards[2]
    for n in range(2):
        send(n)
    move_id = value(source, "begin_queue_move", queue="q", database=2)
    while not rows(target, "select from rota.jobs"):
        with source.transaction():
            ((job_ids, jobs, *_),) = call(source, "take_moves", move_id=move_id, max_jobs=1)
            received = call(target, "receive_moves", move_id=move_id, from_database=1,
                queue="q", jobs=jobs or "[]")  # fmt: skip
            endings = json.dumps([row._asdict() for row in received])
            call(source, "end_moves", move_id=move_id, job_ids=job_ids, endings=endings)
    front.db.execute("update rota_front.slots set number = %s, earlier = array[%s::int]",
        [number, earlier])  # fmt: skip
    assert front.live(key) == [1, 2]

    send(2)

    file = front.folder / "databases"
    file.write_text(f"{front.urls[1]}\n{front.urls[2]}\n")
    move = ["queue", "move", "q", "--from", "1", "--to", "2", "--databases", str(file)]
    assert main(move) == 0
    there = rows(target, "select payload -> 'n' as n from rota.jobs order by id")
    assert [row.n for row in there] == [0, 1, 2]


@pytest.mark.slow
def test_a_line_takes_no_job_ahead_of_one_that_is_on_its_way(front):
    """The last job of it here is neither here nor there, and the first one is there."""
    key = key_of(front, 1)
    line = {"job_type": "x", "queue": "q", "ordering_key": key}
    source, target = front.shards[1], front.shards[2]
    value(front.db, "enqueue", **line, payload={"n": 0})
    file = front.folder / "databases"
    file.write_text(f"{front.urls[1]}\n{front.urls[2]}\n")
    move = ["queue", "move", "q", "--from", "1", "--to", "2", "--databases", str(file)]
    assert main(move) == 0
    belongs = {"headers": {"shard_key": key}}
    value(front.db, "enqueue", **line, payload={"n": 1}, idempotency_key="once", **belongs)
    move_id = scalar(source, "select move_id from rota.queue_moves")
    call(source, "take_moves", move_id=move_id)
    assert front.live(key) == [2]
    front.db.execute("update rota_front.slots set earlier = '{2}'")

    value(front.db, "enqueue", **line, payload={"n": 2})

    asked = [{"job_type": t, "queue": "q", "idempotency_key": "once"} for t in "xy"]
    assert value(source, "find_live_keys", jobs=json.dumps(asked)) == [1]
    assert main(move) == 0
    there = rows(target, "select payload -> 'n' as n from rota.jobs order by id")
    assert [row.n for row in there] == [0, 1, 2]


def test_a_key_that_leaves_and_a_line_that_stays_elsewhere_are_refused_together(front):
    """Of the two keys of a job only one is of the queue that moves."""
    key = key_of(front, 1)
    belongs = {"headers": {"shard_key": key}}
    job = {"job_type": "x", "queue": "q", "idempotency_key": key, **belongs}
    here = value(front.shards[1], "enqueue", **job)
    value(front.shards[2], "enqueue", job_type="x", queue="r", ordering_key="line")
    value(front.shards[1], "begin_queue_move", queue="q", database=2)
    front.db.execute("update rota_front.slots set number = 2, earlier = '{1}'")

    assert value(front.db, "enqueue", **job) == here
    with raises("22023", re.escape("jobs[1] and jobs[1]: their keys are live in different")):
        value(front.db, "enqueue", **job | {"ordering_key": "line"})
    jobs = [{"job_type": "y", **belongs}, {"job_type": "x", "ordering_key": "line", **belongs}]
    with raises("22023", re.escape("jobs[3] and jobs[2]: their keys are live in different")):
        call(front.db, "enqueue_many", jobs=json.dumps([*jobs, job]))
    value(front.db, "enqueue", job_type="x", limit_key="l", **belongs)


@pytest.mark.slow
def test_a_key_that_has_moved_to_where_its_front_does_not_look_is_not_doubled(front):
    """The database of the other key of a job lets it in, as nobody has it there."""
    key = key_of(front, 1)
    belongs = {"headers": {"shard_key": key}}
    job = {"job_type": "x", "queue": "q", "idempotency_key": key, **belongs}
    front.make(1, 2, 3)
    value(front.db, "enqueue", **job)
    file = front.folder / "databases"
    file.write_text(f"{front.urls[1]}\n{front.urls[3]}\n")
    move = ["queue", "move", "q", "--from", "1", "--to", "3", "--databases", str(file)]
    assert main(move) == 0
    value(front.shards[2], "enqueue", job_type="x", ordering_key="line")
    front.db.execute("update rota_front.slots set number = 2, earlier = '{1}'")

    with raises("22023", "their keys are live in different"):
        value(front.db, "enqueue", **job | {"ordering_key": "line"})
    again = value(front.db, "enqueue", **job)

    assert main(move) == 0
    assert (again & 1023, front.live(key)) == (1, [3])


@pytest.mark.slow
def test_a_move_can_be_ended_when_the_front_was_made_again(front, capsys):
    key = key_of(front, 1)
    line = {"job_type": "x", "ordering_key": key}
    value(front.db, "enqueue", **line, queue="q")
    file = front.folder / "databases"
    file.write_text(f"{front.urls[1]}\n{front.urls[2]}\n")
    both = ["--databases", str(file)]
    move = ["queue", "move", "q", "--from", "1", "--to", "2", *both]

    assert main(move) == 0
    assert main(["front", "make", "--front", front.url, *both]) == 0
    assert main([*move, "--end"]) == 0
    for queue in "qr":
        value(front.db, "enqueue", **line, queue=queue)

    assert front.live(key) == [2]


@pytest.mark.slow
def test_a_job_is_acted_on_however_often_it_has_moved(front):
    """Each database that it left leads to the next one, and none back."""
    front.make(1, 2, 3, 4)
    job_id = value(front.db, "enqueue_to", database=1, job_type="x", queue="q")
    file = front.folder / "databases"
    file.write_text("".join(f"{url}\n" for url in front.urls.values()))
    for n, (source, target) in enumerate(pairwise((1, 2, 1, 2, 3, 4))):
        words = ["queue", "move", "q", "--from", str(source), "--to", str(target)]
        for more in ([], ["--end"]):
            assert main([*words, "--databases", str(file), *more]) == 0

        value(front.db, "set_priority", job_id=job_id, priority=n + 1)

        text = "select priority from rota.jobs where id = %s"
        assert scalar(front.shards[target], text, job_id) == n + 1


@pytest.mark.slow
def test_a_job_that_two_databases_say_is_in_the_other_one_is_refused(front):
    """A call that did nothing must not look as if it had."""
    for number, shard in front.shards.items():
        other = {1: 2}.get(number, 1)
        shard.execute("insert into rota.moved_jobs values (%s, 1, %s, %s)", (1025, other, 1025))
    front.db.execute("set statement_timeout = '60s'")  # each way round is a new connection

    for function in ("cancel_job", "set_priority"):
        more = {"priority": 1} if function == "set_priority" else {}
        with raises("RT016", "form a cycle"):
            value(front.db, function, job_id=1025, **more)


@pytest.mark.slow
def test_a_role_is_the_same_role_at_the_shards(front, admin):
    front.add(3)
    name = f"shop{next(_names)}"
    admin.execute(sql.SQL("create role {} login password 's'").format(sql.Identifier(name)))
    try:
        for shard in front.shards.values():
            grant(shard, "producer", name)
        url = make_conninfo(front.url, user=name, password="s")
        with psycopg.connect(url, autocommit=True) as before, raises("42501"):
            before.execute("select rota.enqueue('x')")
        front.db.execute("select rota_front.set_role(%s, 'producer', password => 's')", [name])

        with psycopg.connect(url, autocommit=True) as shop:
            job_id = value(shop, "enqueue", job_type="x")
            for text in (
                f"select rota.cancel_job({job_id})", "select from rota_all.job_runs",
                "select * from rota_front.ask_each('job_runs')",
                "update rota_front.slots set number = 1",
                "select rota_front.set_role(current_user, 'operator')",
                # The shards may let this machine in without a password.
                "alter user mapping for current_user server rota_shards"
                " options (set user 'postgres')",
            ):  # fmt: skip
                with raises("42501"):
                    shop.execute(text)
            shop.execute("drop user mapping for current_user server rota_shards")
            with raises("42501"):
                shop.execute(
                    "create user mapping for current_user server rota_shards"
                    " options (user 'postgres')"
                )
        front.db.execute("select rota_front.set_role(%s, 'producer', password => 's')", [name])
        mappings = scalar(
            front.db, "select count(*) from pg_user_mappings where usename = 'public'"
        )
        assert mappings == 0
        # What the shard does not allow is not allowed through the front.
        front.db.execute("select rota_front.set_role(%s, 'operator', password => 's')", [name])
        with psycopg.connect(url, autocommit=True) as shop, raises("42501"):
            value(shop, "cancel_job", job_id=job_id)
        front.make(1, 2, 3)
        with psycopg.connect(url, autocommit=True) as shop:
            assert value(shop, "enqueue_to", database=3, job_type="x") & 1023 == 3
            # Who makes a front again need not tell the passwords again.
            front.db.execute("select rota_front.set_role(%s, 'producer')", [name])
            value(shop, "enqueue", job_type="x")
    finally:
        for connection in (front.db, *front.shards.values()):
            connection.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(name)))
        admin.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


def test_bad_roles_are_refused_by_name(shared):
    for role, access in (
        (None, "producer"),
        ("nobody_at_all", "producer"),
        ("public", "producer"),
    ):
        with raises("22023", "role"):
            shared.db.execute("select rota_front.set_role(%s, %s)", (role, access))
    with raises("22023", "access"):
        shared.db.execute("select rota_front.set_role(current_user, 'worker')")


def test_views_read_all_and_push_filters_down(shared):
    ids = [value(shared.db, "enqueue_to", database=n, job_type=f"view{n}") for n in (1, 2, 2)]

    found = rows(shared.db, """select shard, id from rota_all.job_runs
        where job_type in ('view1', 'view2') order by id""")  # fmt: skip
    assert sorted((row.id & 1023, row.id) for row in found) == sorted(
        (row.shard, row.id) for row in found
    )
    assert {row.id for row in found} == set(ids)
    plan = "\n".join(
        row[0] for row in rows(shared.db, """explain (verbose, costs off)
            select id from rota_all.job_runs where queue = 'q' and job_type = 'view1'""")
    )  # fmt: skip
    assert plan.count("Remote SQL") == 2
    assert plan.count("job_type = 'view1'") == 2


@pytest.mark.slow
def test_a_database_that_is_away_is_named_and_the_others_read(front, admin):
    for number in (1, 2):
        value(front.db, "enqueue_to", database=number, job_type="x")
    take_away(front, admin)

    found = rows(front.db, """select shard, problem, found ->> 'job_type' as job_type
        from rota_front.ask_each('job_runs', '{"job_type": "x"}')""")  # fmt: skip
    assert [(row.shard, row.job_type) for row in found] == [(1, "x"), (2, None)]
    assert found[1].problem
    assert value(front.db, "enqueue_to", database=1, job_type="x") & 1023 == 1
    with raises("08001", "cannot be reached"):
        value(front.connect(), "enqueue_to", database=2, job_type="x")
    for text, found in (('{"last_error": null}', 2), ('{"last_error": "no"}', 0)):
        query = "select from rota_front.ask_each('job_runs', %s, 1)"
        assert len(rows(front.db, query, text)) == found
    with raises("22023", "view_name"):
        front.db.execute("select * from rota_front.ask_each('jobs; drop')")
    with raises("22023", "number must be the number of a database of this front, got 9"):
        front.db.execute("select * from rota_front.ask_each('job_runs', number => 9)")
    for arguments, name in (
        ("ask_each(null)", "view_name"),
        ("ask_each('job_runs', null)", "filter"),
        ("ask_each('job_runs', '[]')", "filter"),
        ("ask_each('job_runs', max_rows => null)", "max_rows"),
        ("ask_each('job_runs', max_rows => -1)", "max_rows"),
        ("rebalance(null)", "max_slots"),
        ("rebalance(-1)", "max_slots"),
        ("follow_move(null, 1)", "source"),
        ("follow_move(1, null)", "target"),
    ):
        with raises("22023", name):
            front.db.execute(f"select * from rota_front.{arguments}")


@pytest.mark.slow
def test_a_key_that_cannot_be_looked_for_says_that_its_database_is_away(front, admin):
    key, old = cancelled_elsewhere(front)
    take_away(front, admin)

    for function, arguments in (
        ("enqueue", {"job_type": "x", "idempotency_key": key}), ("retry_job", {"job_id": old})
    ):  # fmt: skip
        with raises("08001", "^a database behind this front cannot be reached"):
            value(front.connect(), function, **arguments)


def test_a_database_with_jobs_becomes_no_front(db):
    with raises("55000", "a rota with jobs of its own"):
        run_script(db, "front.sql", {})
    db.rollback()
    assert scalar(db, "select count(*) from rota.jobs") == 0
    assert scalar(db, "select to_regnamespace('rota_front')") is None
    assert rows(db, "select from pg_extension where extname = 'plproxy'") == []


def test_a_front_that_got_jobs_of_its_own_is_not_made_again(front):
    front.db.execute("create table rota.jobs ()")
    with raises("55000", "a rota with jobs of its own"):
        front.db.execute("select rota_front.set_shards('[]', '1', '5 seconds')")


def test_what_is_no_front_is_told_how_to_become_one(server, admin, capsys):
    url = server.url(admin.info.dbname)

    assert main(["front", "status", "--front", url]) == 1
    assert "rota front make" in capsys.readouterr().err


def test_what_a_front_lacks_is_no_reason_to_install_there(shared, capsys):
    assert main(["jobs", "-d", shared.url]) == 1
    assert "a front has no tables, so name the databases" in capsys.readouterr().err
    assert main(["install", "-d", shared.url]) == 1
    assert "This is a front: install in the databases behind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("08P01", "query timeout"),
        ("08P01", "query_timeout"),
        ("08P01", "server login has been failing, try again later (server_login_retry)"),
        ("XX000", "server closed the connection: query_timeout"),
    ],
)
def test_a_pooler_that_gives_up_is_a_database_that_does_not_answer(shared, state, message):
    call = "select rota_front.raise_of_shard(%s, %s, '', '')"
    with raises("57014", "does not answer in time"):
        shared.db.execute(
            call, (state, f"rota._ask_enqueue(3): [shop] REMOTE FATAL: {message}")
        )


@pytest.mark.of_utf8
def test_errors_are_those_of_the_shard_in_whatever_language_it_says_error(shared):
    """As the collation of the front is C, not all of these are letters there."""
    for word in ("ERROR", "FEHLER", "ОШИБКА", "错误"):
        said = f"rota._ask_enqueue(25): [shop] REMOTE {word}: queue must be: x"
        with raises("22023", "^queue must be: x$"):
            scalar(shared.db, "select rota_front.raise_of_shard('22023', %s, '', '')", said)


def test_a_database_is_not_taken_away(shared):
    with pytest.raises(psycopg.Error) as caught:
        shared.make(1)
    assert caught.value.sqlstate == "22023"
    assert value(shared.connect(), "enqueue_to", database=2, job_type="x")


def test_front_statements_refuses_every_bad_argument_by_name(db):
    good = {"number": 1, "dbname": "shop"}
    for bad in (None, {}, [], [1], [{"number": 1}], [{"dbname": "x"}],
                [{**good, "number": 1024}], [{**good, "number": "1"}],
                [{**good, "number": -1}], [{**good, "password": "x"}], [good, good],
                [{**good, "dbname": ""}], [{**good, "host": ["a"]}],
                [{**good, "port": None}]):  # fmt: skip
        with raises("22023", "databases"):
            call(db, "front_statements", databases=None if bad is None else json.dumps(bad))
    with raises("22023", "time_limit"):
        call(db, "front_statements", databases=json.dumps([good]), time_limit="0 s")


def test_find_live_keys_tells_which_jobs_have_keys_that_are_live(db):
    value(db, "enqueue", job_type="x", idempotency_key="a")
    value(db, "enqueue", job_type="x", ordering_key="o")
    jobs = [
        {"job_type": "x", "idempotency_key": "a"}, {"job_type": "y", "idempotency_key": "a"},
        {"job_type": "y", "ordering_key": "o"}, {"job_type": "x"},
    ]  # fmt: skip

    assert value(db, "find_live_keys", jobs=json.dumps(jobs)) == [1, 3]

    for _ in range(2):
        (job,) = call(db, "claim_jobs", worker="w")
        lease = {"job_id": job.job_id, "lease_token": job.lease_token}
        call(db, "fail_job", **lease, error="e", fatal=True)
    # The key of the first is free, the line of the second is halted.
    assert value(db, "find_live_keys", jobs=json.dumps(jobs)) == [3]
    for bad in (None, "{}", json.dumps([{}] * 20001)):
        with raises("22023", "jobs"):
            value(db, "find_live_keys", jobs=bad)
    with raises("22023", "moving"):
        value(db, "find_live_keys", jobs="[]", moving=None)


def test_the_python_client_enqueues_through_a_front(shared):
    client = rota.Client(shared.db)
    job = client.enqueue("x", {"a": 1}, idempotency_key="python", ordering_key="o",
                         headers={"shard_key": "s"})  # fmt: skip

    assert job.is_new
    assert client.cancel_job(job.job_id) == "cancelled"


@pytest.mark.slow
def test_the_command_makes_a_front_and_tells_of_it(front, tmp_path, capsys):
    front.add(3, 4)
    file = tmp_path / "databases"
    file.write_text("\n".join(front.urls.values()))
    words = ["front", "make", "--front", front.url, "--databases", str(file)]

    assert main([*words, "--dry-run"]) == 0
    assert "create function rota.enqueue(" in capsys.readouterr().out
    assert main(words) == 0
    assert "a front of 4 databases" in capsys.readouterr().out
    assert main(["front", "status", "--front", front.url, "--json"]) == 0
    shards = json.loads(capsys.readouterr().out)
    assert [(row["database"], row["slots"]) for row in shards] == [(n, 256) for n in front.urls]
    assert main([*words, "--role", "x=worker"]) == 2
    assert "ROLE=producer" in capsys.readouterr().err
    (tmp_path / "words").write_text("shop:secret\nann secret\n")
    assert main([*words, "--passwords", str(tmp_path / "words")]) == 2
    assert "line 2 of" in capsys.readouterr().err
    front.shards[4].execute("alter sequence rota.jobs_id_seq start with 2051")
    assert main(["front", "status", "--front", front.url]) == 1
    assert "its number is 3" in capsys.readouterr().out
    front.shards[4].execute("alter sequence rota.jobs_id_seq start with 2052")
    mapping = "user mapping for current_user server rota_shards"
    front.db.execute("alter " + mapping + " options (set password 'of another')")
    assert main(["front", "status", "--front", front.url]) == 1
    assert 'FATAL: password authentication failed for user "' in (
        " ".join(capsys.readouterr().out.split())
    )
    front.db.execute("drop " + mapping)
    assert main(words) == 1
    assert "does not reach database 1" in capsys.readouterr().out
    front.shards[3].execute("""create or replace function rota.version() returns text
        language sql as $$ select '9.9.9' $$""")  # fmt: skip
    assert main(words) == 1
    assert "different versions" in capsys.readouterr().err
    assert main(["front", "status", "--front", front.url]) == 1


@pytest.mark.slow
def test_a_front_that_is_read_in_an_open_transaction_is_not_made_again(front, tmp_path, capsys):
    file = tmp_path / "databases"
    file.write_text("\n".join(front.urls[number] for number in (1, 2)))
    with front.db.transaction():
        front.db.execute("select count(*) from rota_all.queue_stats")
        assert main(["front", "make", "--front", front.url, "--databases", str(file)]) == 1
        assert "another session has the views of" in capsys.readouterr().err
    assert scalar(front.db, "select count(*) from rota_all.queue_stats") == 0


@pytest.mark.slow
def test_who_makes_a_front_waits_for_another_who_does(front, admin, tmp_path, capsys):
    """Or they would change the same rows of the catalog, and one would fail."""
    file = tmp_path / "databases"
    file.write_text("\n".join(front.urls[number] for number in (1, 2)))
    words = ["front", "make", "--front", front.url, "--databases", str(file)]
    waits = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
    with ThreadPoolExecutor(1) as pool:
        with front.db.transaction(force_rollback=True):
            front.db.execute(
                "select rota_front.set_shards(%s, '1', '5s')",
                [json.dumps(front.databases(1, 2))],
            )
            making = pool.submit(main, words)
            wait_until(lambda: scalar(admin, waits) == 1, "it does not wait")
        assert making.result() == 0
        with front.db.transaction(force_rollback=True):
            front.db.execute("select pg_advisory_xact_lock(hashtextextended('rota.front', 0))")
            assert main(words) == 1
    assert "or makes it too" in capsys.readouterr().err


@pytest.mark.slow
def test_a_database_that_cannot_be_behind_a_front_is_named(front, server, capsys):
    words = ["front", "make", "--front", front.url, "--database", front.urls[1]]

    assert main([*words, "--database", server.url("postgres")]) == 1
    assert '/postgres: schema "rota" does not exist' in capsys.readouterr().err


@pytest.mark.slow
def test_a_front_is_not_made_again_over_what_others_have_built_on_it(front):
    for text in (
        "create view dash as select shard from rota_all.job_runs",
        "create table mine (job_id bigint default rota.enqueue('x'))",
        "create view single as select queue from rota_1.queue_stats",
    ):
        with front.db.transaction(force_rollback=True):
            front.db.execute(text)
            with raises("2BP01", r"these use what the front is made of.*\b(dash|mine|single)"):
                front.db.execute("select rota_front.set_shards('[]', '1', '5 seconds')")


@pytest.mark.slow
def test_a_front_is_made_of_services_which_only_this_machine_knows(
    front, tmp_path, monkeypatch, capsys
):
    front.add(3, 4)
    words = {number: conninfo_to_dict(url) for number, url in front.urls.items()}
    lines = [
        line for number, word in words.items()
        for line in (f"[shop{number}]", *(f"{key}={value}" for key, value in word.items()))
    ]  # fmt: skip
    (tmp_path / "services").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    named = [word for n in front.urls for word in ("--database", f"service=shop{n}")]

    assert main(["front", "make", "--front", front.url, *named]) == 0
    assert "a front of 4 databases" in capsys.readouterr().out


@pytest.mark.slow
def test_a_call_that_takes_too_long_ends_at_the_time_limit(front):
    front.make(1, 2, time_limit="1 second")
    assert value(front.db, "enqueue_to", database=2, job_type="x")
    with front.shards[2].transaction():
        front.shards[2].execute("lock table rota.jobs in exclusive mode")
        began = time.monotonic()
        with raises("57014"):
            value(front.db, "enqueue_to", database=2, job_type="x")
        assert 1 <= time.monotonic() - began < 1.5
        assert value(front.db, "enqueue_to", database=1, job_type="x") & 1023 == 1


@pytest.mark.slow
def test_a_frozen_server_behind_a_pooler_ends_a_call_at_its_time_limit(front):
    """PL/Proxy asks a frozen server to cancel, and waits for its answer; a pooler does not."""
    with EmbeddedPostgres(settings=["max_connections=20"]) as far, ExitStack() as stack:
        with psycopg.connect(far.url("postgres"), autocommit=True) as admin:
            admin.execute("create database shop")
            # A role has one password for all databases behind a front.
            password = conninfo_to_dict(front.url)["password"]
            admin.execute(
                sql.SQL("alter role postgres password {}").format(sql.Literal(password))
            )
        url = far.url("shop").replace(conninfo_to_dict(far.url("shop"))["password"], password)
        shard = stack.enter_context(psycopg.connect(url, autocommit=True))
        rota.install(shard)
        value(shard, "set_database_number", number=3)
        limits = "query_timeout = 1\nserver_connect_timeout = 1\n"
        front.urls[3] = stack.enter_context(pooled(url, limits))
        front.make(1, 2, 3, time_limit="10 seconds")
        assert value(front.db, "enqueue_to", database=3, job_type="x") & 1023 == 3
        backend = scalar(shard, "select pg_backend_pid()")
        status = Path(f"/proc/{backend}/stat").read_text()
        postmaster = int(status.rpartition(")")[2].split()[1])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        frozen = [postmaster, *map(int, children)]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with raises("57014", "does not answer in time"):
                value(front.db, "enqueue_to", database=3, job_type="x")
            assert time.monotonic() - began < 1.5
            assert value(front.db, "enqueue_to", database=1, job_type="x") & 1023 == 1
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_connection_that_a_database_has_lost_is_told_as_that(server, admin):
    """As after a failover: a caller that tries again finds the server that is there."""
    home = Path(tempfile.mkdtemp())
    home.chmod(0o755)
    shard = Server.create(home)
    name = f"front{next(_names)}"
    admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    try:
        words = conninfo_to_dict(shard.url())
        one = {"number": 1, "host": words["host"], "port": words["port"], "dbname": "jobs"}
        with psycopg.connect(shard.url(), autocommit=True) as there:
            value(there, "set_database_number", number=1)
            made = rows(there, "select rota.front_statements(%s)", json.dumps([one]))
        with psycopg.connect(server.url(name), autocommit=True) as maker:
            run_script(maker, "front.sql", {})
            for (statement,) in made:
                maker.execute(statement)
            maker.execute(
                "select rota_front.set_role(current_user, 'producer', password => %s)",
                [words["password"]],
            )
        with psycopg.connect(server.url(name), autocommit=True) as db:
            value(db, "enqueue", job_type="x")
            shard.stop(signal.SIGQUIT)
            shard.start()

            with raises("08006", "^the connection to a database behind this front was lost: "):
                value(db, "enqueue", job_type="x")
            value(db, "enqueue", job_type="x")
    finally:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
        shard.destroy()
