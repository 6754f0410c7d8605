"""Jobs that travel: each arrives once and in order, whoever is killed or cannot be reached."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from faults.forward_kill import ask, forwarding, play, wait_until_carried
from rota.cli import main
from rota.client.connecting import connect_async
from rota.forwarding import PATIENCE, Forwarder
from rota.testing.server import EmbeddedPostgres
from support.server import free_port
from support.supervisor import Command, running
from support.waiting import wait_until


@pytest.fixture
def urls(
    admin: psycopg.Connection[Any], template: str, server: EmbeddedPostgres
) -> Iterator[list[str]]:
    """Two databases, with the numbers 1 and 2."""
    names = ["travel1", "travel2"]
    for number, name in enumerate(names, 1):
        admin.execute(f"create database {name} template {template}".encode())
        with psycopg.connect(server.url(name)) as db:
            db.execute("select rota.set_database_number(%s)", (number,))
    yield [server.url(name) for name in names]
    for name in names:
        admin.execute(f"drop database {name} with (force)".encode())


def test_jobs_arrive_once_and_in_order_however_often_forwarders_are_killed(urls):
    count = play(urls, jobs=400, kills=8, seed=7, pause=0.4)

    assert count.committed > 200
    assert count.rolled_back > 80
    assert +count.problems == {}


def test_a_job_that_is_refused_there_is_dead_here_with_that_error(urls):
    with psycopg.connect(urls[1]) as there:
        there.execute("alter table rota.jobs add constraint no_y check (job_type <> 'y')")
    with psycopg.connect(urls[0], autocommit=True) as here, forwarding(urls):
        here.execute("select rota.enqueue_to(2, x) from unnest('{x,y,z}'::text[]) as x")
        wait_until_carried(urls[0])

        dead = here.execute("select error_type, last_error from rota.dead_jobs").fetchall()
    with psycopg.connect(urls[1]) as there:
        arrived = ask(there, "select array_agg(job_type order by id) from rota.jobs")

    assert [code for code, _ in dead] == ["23514"]
    assert "no_y" in dead[0][1]
    assert arrived == ["x", "z"]


def test_a_text_that_the_other_encoding_lacks_stops_no_other(admin, server, urls):
    admin.execute("create database travel3 template template0 encoding 'LATIN1' locale 'C'")
    url = server.url("travel3")
    assert main(["install", "-d", url]) == 0
    with psycopg.connect(urls[0], autocommit=True) as here, psycopg.connect(url) as there:
        there.execute("select rota.set_database_number(3)")
        there.commit()
        for text in ("a", "\N{SNOWMAN}", "b"):
            here.execute("select rota.enqueue_to(3, 'x', payload => %s)", [Jsonb({"t": text})])
            here.execute("select rota.enqueue('y', %s, queue => 'q')", [Jsonb({"t": text})])
        with forwarding([urls[0], url]):
            here.execute("select rota.begin_queue_move('q', 3)")
            wait_until(lambda: ask(here, "select state from rota.queue_moves") == "settled")
            wait_until_carried(urls[0])

        dead = here.execute("select error_type, queue from rota.dead_jobs").fetchall()
        arrived = "select job_type, payload ->> 't' from rota.jobs order by 1, id"
        texts = there.execute(arrived).fetchall()
    admin.execute("drop database travel3 with (force)")

    assert sorted(dead) == [("22P05", "forward:3"), ("22P05", "q")]
    assert texts == [("x", "a"), ("x", "b"), ("y", "a"), ("y", "b")]


def test_a_database_that_is_not_there_holds_up_no_other(urls):
    away = make_conninfo(urls[1], port=free_port())
    with psycopg.connect(urls[0], autocommit=True) as here, forwarding([away, *urls]):
        here.execute("select rota.enqueue_to(2, 'x'), rota.enqueue_to(3, 'x')")

        wait_until(lambda: ask(here, "select count(*) from rota.jobs") == 1)
        waiting = ask(here, "select queue from rota.jobs")

    assert waiting == "forward:3"


def test_jobs_arrive_though_it_takes_long_to_connect(urls, monkeypatch):
    """As where the first of several hosts is dead: it is tried for ten seconds each time."""
    monkeypatch.setattr("rota.forwarding.RECEIVE_TIMEOUT", 0.5)

    async def connect(conninfo: str, name: str, seconds: float) -> psycopg.AsyncConnection[Any]:
        await asyncio.sleep(0.7 if name == "rota receiver" else 0)
        return await connect_async(conninfo, name, seconds)

    monkeypatch.setattr("rota.worker.connection.connect_async", connect)
    with psycopg.connect(urls[0], autocommit=True) as here:
        here.execute("select rota.enqueue_to(2, 'x')")
        arrival = asyncio.to_thread(
            wait_until, lambda: ask(here, "select count(*) from rota.jobs") == 0
        )
        asyncio.run(Forwarder(urls).run_until(arrival))


def test_a_forwarder_ticks_where_no_worker_does(urls):
    with psycopg.connect(urls[1], autocommit=True) as db, forwarding(urls):
        db.execute("select rota.schedule_job('s', 'every 1 second', 'x')")

        wait_until(lambda: ask(db, "select count(*) from rota.jobs where job_type = 'x'"))


def transactions(url: str, seconds: float) -> int:
    """How many transactions there are in a database in so many seconds."""
    query = "select pg_stat_clear_snapshot()::text, xact_commit + xact_rollback"
    query += " from pg_stat_database where datname = current_database()"
    with psycopg.connect(url, autocommit=True) as db:
        counts = []
        for _ in range(2):
            time.sleep(seconds)  # the server counts what is a second old
            row = db.execute(query.encode()).fetchone()
            counts.append(row[1] if row else 0)
    return counts[1] - counts[0]


@pytest.mark.parametrize("reason", ["away", "paused"])
def test_where_nothing_can_go_a_forwarder_looks_as_if_there_was_nothing(urls, reason):
    with psycopg.connect(urls[0], autocommit=True) as here, forwarding(urls):
        wait_until(lambda: ask(here, "select count(*) from rota.workers") == 1)
        if reason == "away":
            with psycopg.connect(urls[1], autocommit=True) as there:
                there.execute("drop function rota.receive_jobs")
            here.execute("select rota.enqueue_to(2, 'x')")
        else:
            here.execute("select rota.pause_queue('forward:2') from rota.enqueue_to(2, 'x')")

        looks = transactions(urls[0], 4.0)

    assert looks < 60


def test_a_database_that_gets_another_number_is_found_by_it(urls):
    with psycopg.connect(urls[0], autocommit=True) as here, forwarding(urls):
        here.execute("select rota.enqueue_to(2, 'x')")
        wait_until_carried(urls[0])
        with psycopg.connect(urls[1], autocommit=True) as there:
            there.execute("select rota.set_database_number(9)")
        here.execute("select rota.enqueue_to(2, 'y'), rota.enqueue_to(9, 'z')")

        wait_until(lambda: ask(here, "select count(*) from rota.jobs") == 1)

        assert ask(here, "select queue from rota.jobs") == "forward:2"


def test_the_log_says_why_a_job_stays_whose_queue_leaves_there(urls, tmp_path):
    """A rule for a key cannot go with a queue that moves; until the move is ended it waits."""
    log = tmp_path / "log"
    (tmp_path / "databases").write_text("\n".join(urls))
    command = [sys.executable, "-m", "rota", "forward", "--databases", tmp_path / "databases"]
    rule = "queue => 'q', idempotency_key => 'k', on_conflict => 'rerun'"
    with psycopg.connect(urls[1], autocommit=True) as there:
        there.execute("select rota.begin_queue_move('q', 7)")
        with psycopg.connect(urls[0], autocommit=True) as here:
            here.execute(f"select rota.enqueue_to(2, 'x', {rule})".encode())
            with running(lambda: Command(command, None, {}, log)):
                wait_until(lambda: "stay for now" in log.read_text())
                here.execute("select rota.reschedule_job(id, delay => '0') from rota.jobs")
                here.execute("select rota.enqueue_to(2, 'x')")
                wait_until(lambda: ask(there, "select count(*) from rota.jobs") == 1)
                there.execute("select rota.end_queue_move('q')")
                wait_until_carried(urls[0])

    told = [line for line in log.read_text().splitlines() if "stay for now" in line]
    assert len(told) == 1
    assert "1 jobs for database 2 stay for now: queue q moves to database 7" in told[0]


def test_nothing_is_carried_to_a_number_that_two_databases_have(admin, server, urls, tmp_path):
    copy, log = "travel_copy", tmp_path / "log"
    admin.execute(f"create database {copy} template travel2".encode())
    both = [urls[1], server.url(copy)]
    (tmp_path / "databases").write_text("\n".join([both[1], *urls]))
    command = [sys.executable, "-m", "rota", "forward", "--databases", tmp_path / "databases"]
    with psycopg.connect(urls[0], autocommit=True) as here:
        here.execute("select rota.enqueue_to(2, 'x') from generate_series(1, 20)")
        with running(lambda: Command(command, None, {}, log)):
            wait_until(lambda: "the same number" in log.read_text())
            time.sleep(PATIENCE + 1.0)  # it would have carried by then
            arrived = [count_jobs(url) for url in both]
            waiting = ask(here, "select count(*) from rota.jobs")
            with psycopg.connect(both[1], autocommit=True) as there:
                there.execute("select rota.set_database_number(3)")
            wait_until_carried(urls[0])
    after = [count_jobs(url) for url in both]
    admin.execute(f"drop database {copy} with (force)".encode())

    assert (arrived, waiting, after) == ([0, 0], 20, [20, 0])
    told = [line for line in log.read_text().splitlines() if "the same number 2" in line]
    assert len(told) == 1
    assert "/travel2 " in told[0]
    assert "/travel_copy " in told[0]
    assert "or only one of the two is named, if one is a standby" in told[0]


def count_jobs(url: str) -> Any:
    """How many live jobs there are in a database."""
    with psycopg.connect(url) as db:
        return ask(db, "select count(*) from rota.jobs")
