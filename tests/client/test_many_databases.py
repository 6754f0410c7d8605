"""One worker process, many databases: they share its places, and none waits for another."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from rota import AsyncJob, Job, Registry
from rota.cli import main, many
from rota.cli.output import PlainText
from rota.cli.worker import serve_health
from rota.testing.server import EmbeddedPostgres
from rota.worker import completer, executor, heartbeat, worker
from rota.worker.executor import Places, Share
from rota.worker.worker import Worker
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Make = Callable[[str], str]
JOBS = """\
from rota import Registry
registry = Registry()
registry.add('ok', lambda job: None)
"""


@pytest.fixture
def make(
    admin: psycopg.Connection[Any], template: str, server: EmbeddedPostgres
) -> Iterator[Make]:
    """Make a database by name; return its URL."""
    names: list[str] = []

    def create(name: str) -> str:
        names.append(name)
        admin.execute(f"create database {name} template {template}".encode())
        return server.url(name)

    yield create
    for name in names:
        admin.execute(f"drop database {name} with (force)".encode())


def enqueue(url: str, number: int, jobs: int) -> None:
    with psycopg.connect(url) as db:
        db.execute(
            "select rota.enqueue('x', jsonb_build_object('n', %s::int))"
            " from generate_series(1, %s)",
            (number, jobs),
        )


def waiting(url: str) -> int:
    with psycopg.connect(url) as db:
        row = db.execute("select count(*) from rota.jobs").fetchone()
    return int(row[0]) if row else 0


class Room:
    """Three shares of so many places, with what they use and want."""

    def __init__(self, total: int, *hungry: bool) -> None:
        self.places = places = Places(total)
        self.looks: list[int] = []
        self.shares = [Share(places) for _ in hungry]
        for number, (share, is_hungry) in enumerate(zip(self.shares, hungry, strict=True)):
            share.is_hungry = lambda is_hungry=is_hungry: is_hungry  # type: ignore[misc]
            share.look = lambda number=number: self.looks.append(number)  # type: ignore[misc]

    def use(self, *used: int) -> None:
        """Let so many handlers of each share run."""
        for share, count in zip(self.shares, used, strict=True):
            share.running = [None] * count


def test_floors_are_all_places_and_differ_by_one_at_most():
    room = Room(11, True, True, True)

    assert [share.floor for share in room.shares] == [4, 4, 3]


def test_a_share_takes_all_that_is_free_while_no_other_is_hungry():
    room = Room(6, True, False, False)

    assert room.shares[0].room() == 6


def test_those_that_are_hungry_have_equal_parts():
    room = Room(6, True, True, False)
    room.use(1, 0, 0)

    assert [share.room() for share in room.shares] == [2, 3, 2]


def test_a_floor_is_no_more_than_what_is_free():
    room = Room(6, True, True, False)
    room.use(6, 0, 0)

    assert [share.room() for share in room.shares] == [0, 0, 0]


def test_who_was_short_looks_once_in_a_turn_when_there_is_room():
    room = Room(6, True, True, False)
    room.use(6, 0, 0)
    room.shares[1].room()

    async def main() -> None:
        room.places.tell()
        await asyncio.sleep(0)
        assert room.looks == []

        room.use(5, 0, 0)
        room.places.tell()
        room.places.tell()
        await asyncio.sleep(0)
        assert room.looks == [1]

    asyncio.run(main())


def test_databases_that_report_take_turns_with_a_pause_between_any_two(monkeypatch):
    places = Places(6)
    monkeypatch.setattr("rota.worker.executor.PAUSE", 100.0)

    waits = [places.take_turn() for _ in range(4)]

    assert waits[0] == 0.0
    assert [round(wait, -2) for wait in waits[1:]] == [100.0, 200.0, 300.0]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


def run_together(
    urls: list[str],
    concurrency: int,
    handler: Callable[[Any], Awaitable[None] | None],
    meanwhile: Callable[[], Awaitable[None]],
    shared: Places | None = None,
    batch: int | None = None,
) -> None:
    """Run a worker for each database, with shared places, until *meanwhile* has ended."""

    async def main() -> None:
        registry = Registry()
        registry.add("x", handler)
        options: Any = {"batch": batch, "poll_interval": 0.2}
        options["places"] = shared or Places(concurrency)
        workers = [Worker(url, registry, **options) for url in urls]
        tasks = [asyncio.create_task(worker.run_async()) for worker in workers]
        try:
            await meanwhile()
        finally:
            for worker in workers:
                worker.stop()
            await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_long_backlog_leaves_the_others_their_floors(make, monkeypatch):
    """Of 6 places each of three has 2 as long as it has jobs, and then the long one has all.

    The jobs of the long one wait for the others to come, and then six begin before any of
    them ends: so nothing depends on how fast which database answers.
    """
    monkeypatch.setattr("rota.worker.fetcher.HUNGRY_FOR", 60.0)
    urls = [make(f"many{n}") for n in range(3)]
    for number, jobs in enumerate((120, 24, 24)):
        enqueue(urls[number], number, jobs)
    running, seen = [0, 0, 0], [[0, 0, 0]]
    done = [0, 0, 0]
    places, come, gates = Places(6), asyncio.Event(), [asyncio.Event()]

    async def handler(job: AsyncJob) -> None:
        number = job.payload["n"]
        running[number] += 1
        seen.append([*running])
        gate = gates[-1]
        if sum(running) == 6:
            gates.append(asyncio.Event())
            await come.wait()
            gate.set()
        await gate.wait()
        running[number] -= 1
        done[number] += 1
        if number and done[1] == done[2] == 24:
            ended.append([*done])

    ended: list[list[int]] = []

    async def watch() -> None:
        await until(lambda: all(share.is_hungry() for share in places.shares))
        come.set()
        await until(lambda: done == [120, 24, 24])

    run_together(urls, 6, handler, watch, places)

    assert max(sum(each) for each in seen) <= 6
    # Each third of the jobs, but for what the long one took while the others came.
    assert ended[0][0] <= 24 + 16
    assert max(each[0] for each in seen) == 6


def test_a_thread_leaves_its_place_to_another_database(make, monkeypatch):
    """Of two places one had all the others' jobs in hand when the second database got one."""
    monkeypatch.setattr("rota.worker.fetcher.HUNGRY_FOR", 60.0)
    urls = [make(f"many{n}") for n in (21, 22)]
    enqueue(urls[0], 0, 6)
    begun: list[int] = []
    gate = threading.Semaphore(0)

    def handler(job: Job) -> None:
        begun.append(job.payload["n"])
        assert gate.acquire(timeout=30)

    def is_claimed(url: str) -> bool:
        with psycopg.connect(url) as db:
            return bool(db.execute("select from rota.running_jobs").fetchall())

    async def watch() -> None:
        await until(lambda: len(begun) == 2)
        enqueue(urls[1], 1, 1)
        await until(lambda: is_claimed(urls[1]))
        gate.release()
        await until(lambda: len(begun) == 3)
        gate.release(6)
        await until(lambda: len(begun) == 7)

    run_together(urls, 2, handler, watch, batch=6)

    assert begun[:3] == [0, 0, 1]


def test_handlers_without_jobs_that_have_the_places_of_all_let_the_worker_leave(
    make, monkeypatch
):
    """Of neither database all places are theirs, but none is left for another job."""
    monkeypatch.setattr(executor, "MAX_USELESS", 2.0)
    urls = [make(f"many{n}") for n in (23, 24)]
    registry, places, started = Registry(), Places(2), threading.Semaphore(0)
    is_over, has_ended = threading.Event(), []

    @registry.handler("x")
    def hangs(_job: Job) -> None:
        started.release()
        is_over.wait(60)

    for url in urls:
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("select rota.enqueue('x', lease => '1.5 s')")
    workers = [Worker(url, registry, places=places, poll_interval=0.2) for url in urls]
    thread = threading.Thread(target=lambda: has_ended.append(worker.run_together(workers)))
    thread.start()
    for _ in urls:
        assert started.acquire(timeout=30)
    for url in urls:
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("select rota.pause_queue('default', 'no second run')")
            db.execute("select rota.retry_job(id, force => true) from rota.jobs")

    thread.join(20)
    for each in workers:
        each.stop(now=True)
    thread.join(30)
    is_over.set()

    assert all(each.is_retiring for each in workers)
    assert has_ended == [False]


def test_a_database_that_comes_later_is_worked_for_and_costs_the_others_nothing(make, server):
    there, away = make("many3"), server.url("many4")
    enqueue(there, 3, 5)
    done: list[int] = []

    async def handler(job: AsyncJob) -> None:
        done.append(job.payload["n"])

    async def watch() -> None:
        await until(lambda: done == [3] * 5)
        make("many4")
        enqueue(away, 4, 2)
        await until(lambda: len(done) == 7)

    run_together([there, away], 4, handler, watch)

    assert done[5:] == [4, 4]


def test_the_log_says_which_of_the_databases_is_lost(make, admin, caplog):
    caplog.set_level(logging.INFO, "rota")
    urls = [make(name) for name in ("many7", "many8")]

    async def watch() -> None:
        end = (
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            " where application_name = 'rota fetcher' and datname = 'many8'"
        )

        def is_told(what: str) -> bool:
            return any(what in line for line in caplog.messages)

        await until(lambda: is_told("started database=many8"))  # before that it is no outage
        await until(lambda: admin.execute(end).fetchone()[0])
        await until(lambda: is_told("is back"))

    run_together(urls, 2, lambda job: None, watch)

    lost = [line for line in caplog.messages if "is lost" in line]
    assert lost
    assert all("/many8 is lost" in line for line in lost)


def test_the_log_says_which_of_the_databases_sends_no_notification(make, admin, caplog):
    caplog.set_level(logging.INFO, "rota")
    urls = [make(name) for name in ("many70", "many80")]

    async def watch() -> None:
        end = (
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            " where application_name = 'rota notifier' and datname = 'many80'"
        )
        await until(lambda: admin.execute(end).fetchone()[0])
        await until(lambda: any("are on again" in line for line in caplog.messages))

    run_together(urls, 2, lambda job: None, watch)

    told = [line for line in caplog.messages if line.startswith("notifications")]
    assert [re.findall(r"/many80 are o(?:ff|n again)", line) for line in told] == [
        ["/many80 are off"],
        ["/many80 are on again"],
    ]


def _two_with_jobs_for_both(make: Make, first: int) -> list[str]:
    urls = [make(f"many{n}") for n in (first, first + 1)]
    for number, url in enumerate(urls, first):
        with psycopg.connect(url) as db:
            db.execute("select rota.set_database_number(%s)", (number,))
            jobs = "select rota.enqueue_to(n, 'ok') from generate_series(%s::int, %s) as n"
            db.execute(jobs, (first, first + 1))
    return urls


def test_rota_worker_works_for_all_of_a_file_and_carries_between_them(make, tmp_path):
    urls = _two_with_jobs_for_both(make, 5)
    file = tmp_path / "databases"
    file.write_text("# none yet\n")
    none = rota("status", "--databases", str(file))
    assert none.returncode == 2
    assert "names no database" in none.stderr
    file.write_text("# all of them\n" + "\n".join(urls) + "\n")
    (tmp_path / "jobs.py").write_text(JOBS)
    command = [
        sys.executable,
        "-m",
        "rota",
        "worker",
        "jobs:registry",
        "--databases",
        str(file),
    ]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as worker:
        try:
            wait_until(lambda: all(waiting(url) == 0 for url in urls), "the end of all jobs")
        finally:
            worker.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                worker.wait(10)

        assert worker.returncode == 0
    counts = []
    for url in urls:
        with psycopg.connect(url) as db:
            counts += (
                db.execute(
                    "select count(*) from rota.finished_jobs where job_type = 'ok'"
                ).fetchone()
                or ()
            )
    assert counts == [2, 2]


def test_a_worker_that_is_idle_has_two_connections_to_each_database(make, tmp_path, admin):
    """It is told of jobs that are to travel as quickly as of its own."""
    urls = [make(f"many{n}") for n in (11, 12)]
    for number, url in enumerate(urls, 11):
        with psycopg.connect(url) as db:
            db.execute("select rota.set_database_number(%s)", (number,))
    (tmp_path / "jobs.py").write_text(JOBS)
    both = [word for url in urls for word in ("--database", url)]
    command = [sys.executable, "-m", "rota", "worker", "jobs:registry", *both]
    query = (
        "select datname::text, count(*)::int from pg_stat_activity"
        " where datname in ('many11', 'many12') and pid <> pg_backend_pid() group by 1"
    )
    with subprocess.Popen([*command, "--poll-interval", "20"], cwd=tmp_path) as worker:
        try:
            with psycopg.connect(urls[0], autocommit=True) as db:
                known = "select count(*)::int from rota.workers"
                wait_until(lambda: db.execute(known).fetchone() == (2,))
            wait_until(
                lambda: dict(admin.execute(query).fetchall()) == {"many11": 2, "many12": 2},
                seconds=30,
            )
            began = time.monotonic()
            with psycopg.connect(urls[0], autocommit=True) as db:
                db.execute("select rota.enqueue_to(12, 'ok')")
            wait_until(lambda: finished(urls[1]) == 1)
            took = [time.monotonic() - began]
            # Also where the next comes when the last has hardly gone.
            with psycopg.connect(urls[0], autocommit=True) as db:
                for _ in range(20):
                    db.execute("select rota.enqueue_to(12, 'ok')")
                    time.sleep(0.15)
            began = time.monotonic()
            wait_until(lambda: finished(urls[1]) == 21)
            took.append(time.monotonic() - began)
        finally:
            worker.send_signal(signal.SIGTERM)

    assert max(took) < 10


@pytest.mark.parametrize(
    ("are_ready", "code"), [([True, True], 200), ([False, True], 200), ([False, False], 503)]
)
def test_a_worker_is_ready_while_it_reaches_one_of_its_databases(are_ready, code, caplog):
    """So that one which is down holds up no deployment for the others."""
    caplog.set_level(logging.INFO, "rota")
    workers: Any = [SimpleNamespace(is_ready=is_ready) for is_ready in are_ready]

    async def ask() -> bytes:
        async with serve_health("127.0.0.1", 0, workers):
            port = int(re.findall(r":([0-9]+)/ready", caplog.text)[-1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\n\r\n")
            answer = await reader.readline()
            writer.close()
            return answer

    assert asyncio.run(ask()).split()[1] == str(code).encode()


def test_a_worker_at_work_is_told_of_jobs_that_travel_by_its_one_notifier(make, tmp_path):
    urls = [make(f"many{n}") for n in (15, 16)]
    for number, url in enumerate(urls, 15):
        with psycopg.connect(url) as db:
            db.execute("select rota.set_database_number(%s)", (number,))
    (tmp_path / "jobs.py").write_text(
        JOBS + "import time\nregistry.add('slow', lambda job: time.sleep(60))\n"
    )
    both = [word for url in urls for word in ("--database", url)]
    command = [sys.executable, "-m", "rota", "worker", "jobs:registry", *both]
    options = ["--concurrency", "2", "--batch", "1", "--poll-interval", "8", "--no-tick"]
    options += ["--grace-period", "0"]
    with (
        subprocess.Popen([*command, *options], cwd=tmp_path) as worker,
        psycopg.connect(urls[0], autocommit=True) as db,
    ):
        try:
            known = "select count(*)::int from rota.workers"
            wait_until(lambda: db.execute(known).fetchone() == (2,))
            db.execute("select rota.enqueue('slow') from generate_series(1, 4)")
            running = "select count(*) > 1 from rota.running_jobs"
            wait_until(lambda: db.execute(running).fetchone() == (True,))
            # It has begun to wait for nothing but what travels.
            waits = """
                select array_agg(q.queue order by 1)
                from unnest('{default,forward:16}'::text[]) as q (queue)
                where exists (
                    select from pg_locks as l join pg_database as d on d.oid = l.database
                    where d.datname = current_database() and l.locktype = 'advisory'
                      and l.classid = 1919907936
                      and l.objid::bigint::bit(32)::integer = hashtext(q.queue)
                )
            """
            wait_until(lambda: db.execute(waits).fetchone() == (["forward:16"],))
            for jobs in range(1, 4):
                began = time.monotonic()
                db.execute("select rota.enqueue_to(16, 'ok')")
                wait_until(lambda: waiting(urls[1]) == jobs)  # noqa: B023 - no place is free
                assert time.monotonic() - began < 4
            notifiers = db.execute(
                "select count(*)::int from pg_stat_activity where datname = current_database()"
                " and application_name = 'rota notifier'"
            ).fetchone()
        finally:
            worker.send_signal(signal.SIGTERM)

    assert notifiers == (1,)


def test_a_worker_with_nothing_more_to_do_has_two_connections_again(
    db, background, client, monkeypatch
):
    """Those of ends, heartbeats and handlers are for jobs only."""
    for module in (completer, heartbeat):
        monkeypatch.setattr(module, "IDLE_TIMEOUT", 0.5)
    query = """select array_agg(application_name order by 1) from pg_stat_activity
        where datname = current_database() and application_name like 'rota %'"""
    registry = Registry()
    seen = []

    def open_names():
        return db.execute(query).fetchone()[0]

    @registry.handler("ok")
    def ok(job):
        with job.transaction() as connection:
            connection.execute("select 1")
        wait_until(lambda: "rota heartbeat" in open_names(), "a heartbeat")
        seen.append(job.job_id)

    background(registry)
    for _ in range(2):
        seen.clear()
        client.enqueue("ok", lease=timedelta(seconds=1))
        wait_until(lambda: seen)
        assert "rota job" in open_names()
        wait_until(lambda: open_names() == ["rota fetcher", "rota notifier"])


def test_a_worker_that_only_polls_carries_too(make, tmp_path):
    urls = _two_with_jobs_for_both(make, 13)
    (tmp_path / "jobs.py").write_text(JOBS)
    both = [word for url in urls for word in ("--database", url)]
    command = [sys.executable, "-m", "rota", "worker", "jobs:registry", *both, "--no-listen"]
    listening = "select count(*)::int from pg_stat_activity where application_name = %s"
    with subprocess.Popen([*command, "--poll-interval", "0.1"], cwd=tmp_path) as worker:
        try:
            for jobs in (2, 3):
                wait_until(lambda: [*map(arrived, urls)] == [jobs] * 2)  # noqa: B023
                for number, url in zip((14, 13), urls, strict=True):
                    with psycopg.connect(url, autocommit=True) as db:
                        found = db.execute(listening, ["rota notifier"]).fetchone()
                        db.execute("select rota.enqueue_to(%s, 'ok')", (number,))
                    assert found == (0,)
        finally:
            worker.send_signal(signal.SIGTERM)


def arrived(url: str) -> int:
    """How many jobs have run here, without those that only travelled on."""
    with psycopg.connect(url) as db:
        row = db.execute(
            "select count(*)::int from rota.finished_jobs where job_type = 'ok'"
        ).fetchone()
    return int(row[0]) if row else 0


def finished(url: str) -> int:
    with psycopg.connect(url) as db:
        row = db.execute("select count(*)::int from rota.finished_jobs").fetchone()
    return int(row[0]) if row else 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--database", "a", "--database", "a"], "named twice"),
        (["--database", "a", "--database", "b", "--concurrency", "1"], "too few"),
    ],
)
def test_rota_worker_refuses_what_cannot_be_meant(words, problem, tmp_path):
    (tmp_path / "jobs.py").write_text(JOBS)
    command = [sys.executable, "-m", "rota", "worker", "jobs:registry", *words]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert problem in done.stderr


@pytest.mark.parametrize("how", ["--drain", "--once"])
def test_a_database_that_is_away_keeps_no_run_from_its_end(make, monkeypatch, capsys, how):
    registry = Registry()
    registry.add("x", lambda job: None)
    monkeypatch.setitem(sys.modules, "shop", SimpleNamespace(registry=registry))
    monkeypatch.setattr("rota.cli.worker.set_up_log", lambda *_: None)
    url = make("many15")
    enqueue(url, 15, 2)
    away = "postgresql://127.0.0.1:1/away"

    code = main(["worker", "shop", how, "--database", away, "--database", url])

    assert code == 1
    assert "port 1 failed" in capsys.readouterr().err
    assert waiting(url) == 0


def test_a_worker_reads_the_list_of_its_databases_from_a_pipe(make, monkeypatch):
    """As of `--databases <(...)`, which can be read only once."""
    registry = Registry()
    registry.add("x", lambda job: None)
    monkeypatch.setitem(sys.modules, "shop", SimpleNamespace(registry=registry))
    monkeypatch.setattr("rota.cli.worker.set_up_log", lambda *_: None)
    urls = [make(f"many{number}") for number in (36, 37)]
    for number, url in zip((36, 37), urls, strict=True):
        enqueue(url, number, 2)
    reader, writer = os.pipe()
    os.write(writer, "\n".join(urls).encode())
    os.close(writer)

    code = main(["worker", "shop", "--drain", "--databases", f"/dev/fd/{reader}"])

    os.close(reader)
    assert code == 0
    assert [waiting(url) for url in urls] == [0, 0]


def rota(*words: str, stdin: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rota", *words]
    return subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False)


def test_a_command_tells_of_each_database_and_fails_if_one_does(make, server):
    url = make("many7")
    enqueue(url, 7, 3)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("select rota.tick()")

    done = rota("status", "--database", server.url("many8"), "--database", url)

    assert done.returncode == 1
    assert "many7" in done.stdout
    assert 'database "many8" does not exist' in done.stderr
    assert "1 of 2 databases" in done.stderr


def test_databases_are_told_apart_by_their_services(capsys):
    words = [word for name in "ab" for word in ("--database", f"service=no_such_{name}")]

    assert main(["status", *words]) == 1

    told = capsys.readouterr()
    assert "== no_such_a: no answer\n== no_such_b: no answer" in told.out
    assert "2 of 2 databases: no_such_a, no_such_b" in told.err


def test_json_of_many_databases_is_one_document(make, server):
    url = make("many13")
    enqueue(url, 7, 3)
    both = ["--database", server.url("many14"), "--database", url]

    done = rota("jobs", "--json", *both)
    audited = rota("audit", "--json", "--database", url, "--database", make("many15"))

    assert done.returncode == 1
    away, there = json.loads(done.stdout)
    assert (away["exit_code"], away["answer"]) == (1, None)
    assert (there["exit_code"], len(there["answer"])) == (0, 3)
    assert there["database"].endswith("/many13")
    assert audited.returncode == 0, audited.stderr
    assert [each["answer"] for each in json.loads(audited.stdout)] == [[], []]


@pytest.fixture
def frozen() -> Iterator[list[str]]:
    """Return the URLs of two servers that hang up once both are asked, and not before."""
    both = threading.Barrier(2)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)
        ]

        def serve(server: socket.socket) -> None:
            with suppress(OSError, threading.BrokenBarrierError):
                while True:
                    with server.accept()[0]:
                        both.wait()

        threads = [threading.Thread(target=serve, args=(each,)) for each in servers]
        for thread in threads:
            thread.start()
        yield [
            f"postgresql://x@127.0.0.1:{each.getsockname()[1]}/x?connect_timeout=100"
            for each in servers
        ]
        both.abort()
        for server in servers:
            server.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def named(*urls: str) -> list[str]:
    return [word for url in urls for word in ("--database", url)]


def test_all_are_asked_at_once_and_told_in_their_order(make, frozen):
    url = make("many16")
    enqueue(url, 7, 1)

    done = rota("jobs", *named(frozen[0], url, frozen[1]))

    heads = [line for line in done.stdout.splitlines() if line.startswith("==")]
    assert [head.endswith(": no answer") for head in heads] == [True, False, True]
    assert heads[1].endswith("/many16")
    assert " x " in done.stdout
    assert "incomplete: no answer from 2 of 3 databases" in done.stderr
    assert done.returncode == 1


def test_a_move_asks_all_for_their_numbers_at_once(make, frozen, capsys):
    words = ["queue", "move", "q", "--to", "7", *named(*frozen, make("many35"))]

    assert main(words) == 1

    assert capsys.readouterr().err.count("closed the connection") == 2


def test_json_names_those_without_an_answer(make, frozen):
    done = rota("schedule", "list", "--json", *named(make("many17"), *frozen))

    there, *away = json.loads(done.stdout)
    assert done.returncode == 1
    assert (there["answer"], there["error"]) == ([], None)
    assert [each["answer"] for each in away] == [None, None]
    assert all("closed the connection" in each["error"] for each in away)


def test_an_act_reaches_all_first_and_leaves_out_those_that_are_away(make, frozen):
    url = make("many18")
    enqueue(url, 7, 2)

    done = rota("cancel", "--queue", "default", "--yes", *named(*frozen, url))

    assert done.returncode == 1
    assert done.stdout.count(": no answer") == 2
    assert waiting(url) == 0


def test_schedules_from_a_pipe_go_to_all_databases(make, capsys):
    urls = [make(name) for name in ("many38", "many39")]
    reader, writer = os.pipe()
    os.write(writer, b"0 2 * * * clean_up\n")
    os.close(writer)

    code = main(["schedule", "import", f"/dev/fd/{reader}", *named(*urls)])

    os.close(reader)
    assert code == 0
    assert capsys.readouterr().out.count("1 created, 0 changed, 0 unchanged") == 2


def test_the_doctor_tells_of_a_number_that_two_databases_have(make, capsys):
    urls = [make(name) for name in ("many27", "many28", "many29")]
    for url, number in zip(urls, (7, 8, 7), strict=True):
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("update rota.upgrade_log set applied_at = clock_timestamp()")
            db.execute("select rota.set_database_number(%s)", (number,))

    assert main(["doctor", *named(*urls)]) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert "/many27 and " in told
    assert "/many29 have the same number 7" in told
    assert main(["doctor", *named(*urls[:2])]) == 0
    assert capsys.readouterr().err == ""


def test_a_database_that_stops_in_an_answer_is_not_waited_for(make, monkeypatch, capsys):
    urls = [make("many23"), make("many24")]
    enqueue(urls[1], 7, 1)
    monkeypatch.setattr(many, "LONGEST", 0.5)
    with psycopg.connect(urls[0]) as db:
        db.execute("lock table rota.jobs")

        code = main(["jobs", *named(*urls)])

    out, errors = capsys.readouterr()
    assert code == 1
    assert "/many23: no answer" in out
    assert " x " in out
    assert "incomplete: no answer from 1 of 2 databases" in errors


def test_a_job_is_not_looked_for_where_a_session_has_all_locked(make, monkeypatch, capsys):
    urls = [make("many33"), make("many34")]
    monkeypatch.setattr(many, "LONGEST", 20.0)
    with psycopg.connect(urls[0], application_name="a migration") as db:
        db.execute("lock table rota.jobs")

        assert main(["explain", "7", *named(*urls)]) == 1

    said = capsys.readouterr().err
    assert "/many33 (another session has locked this: the oldest that writes there is " in said
    assert "application a migration" in said


def test_a_database_that_does_not_tell_its_number_is_not_waited_for(make, monkeypatch, capsys):
    urls = [make("many31"), make("many32")]
    with psycopg.connect(urls[0], autocommit=True) as db:
        db.execute("update rota.upgrade_log set applied_at = clock_timestamp()")
        db.execute("""create or replace function rota.database_number() returns integer
            language sql as $$
                select 7 from pg_sleep(1e9 * (current_query() !~ 'doctor')::integer)
            $$""")
    monkeypatch.setattr(many, "LONGEST", 5.0)

    code = main(["doctor", *named(*urls)])

    out, errors = capsys.readouterr()
    assert "/many31: no answer" not in out
    assert "/many31 does not tell its number" in errors
    assert code != 0


def test_a_database_that_stops_in_an_act_keeps_no_other_from_it(make, monkeypatch, capsys):
    urls = [make("many25"), make("many26")]
    for url in urls:
        enqueue(url, 7, 1)
    monkeypatch.setattr(many, "LONGEST", 0.5)  # sooner than the wait for a lock ends
    with psycopg.connect(urls[0]) as db:
        db.execute("lock table rota.pauses")

        code = main(["pause", "default", *named(*urls)])

    out, errors = capsys.readouterr()
    assert code == 1
    assert "/many25: no answer" in out
    assert "queue default is paused" in out
    assert "incomplete: no answer from 1 of 2 databases" in errors
    with psycopg.connect(urls[1]) as db:
        assert db.execute("select queue from rota.pauses").fetchall() == [("default",)]


@pytest.mark.parametrize("kind", [PlainText, many.Divided])
def test_a_stream_that_is_collected_leaves_what_is_below_alone(kind):
    below = io.StringIO()
    stream = kind(below)
    below.close()

    stream.close()  # from Python 3.13 on what the collector's call raises is told


def test_an_act_whose_answer_was_lost_is_told_as_unknown(make):
    urls = [make("many19"), make("many20")]
    for url in urls:
        enqueue(url, 7, 1)
    with psycopg.connect(urls[0], autocommit=True) as db:
        # The session dies while it commits, as with a server that is killed then.  Since 18 a
        # trigger runs with the rights of what fired it, which cannot end a superuser's session.
        db.execute(
            "create function die() returns trigger language plpgsql security definer as $$"
            " begin perform pg_terminate_backend(pg_backend_pid(), 1000); return null; end $$"
        )
        db.execute(
            "create constraint trigger die after update on rota.jobs deferrable"
            " initially deferred for each row execute function die()"
        )
    words = ("priority", "--to", "7", "--queue", "default", "--yes", *named(*urls))

    done = rota(*words)
    told = rota(*words, "--json")
    alone = rota("priority", "--to", "8", "--queue", "default", "--yes", "-d", urls[0])

    assert done.returncode == told.returncode == alone.returncode == 1
    assert "/many19: outcome unknown" in done.stdout
    assert "outcome unknown on 1 of 2 databases" in done.stderr
    assert "1 job given priority 7" in done.stdout
    lost, there = json.loads(told.stdout)
    assert (lost["outcome"], lost["answer"]) == ("unknown", None)
    assert "outcome" not in there
    assert "outcome unknown" in alone.stderr


def test_a_command_for_one_database_refuses_several(make):
    url = make("many21")

    settled = rota("effects", *named(url, url), "settle", "a", "b", "--done")
    live = rota("top", *named(url, url))

    assert (settled.returncode, live.returncode) == (2, 2)
    assert "takes one database" in settled.stderr
    assert "--once or --json" in live.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["install"],
        ["uninstall", "--yes"],
        ["enqueue", "x"],
        ["schedule", "sync", "m:r"],
        ["effects", "-d", "one", "settle", "a", "b", "--done"],
    ],
)
@pytest.mark.parametrize("option", ["--database", "-d", "-d before the command"])
def test_no_database_that_was_named_is_left_out_unsaid(words, option, capsys):
    named = [*words, option, "one", option, "two"]
    if option.startswith("-d "):
        named = ["-d", "one", *words, "-d", "two"]
    with pytest.raises(SystemExit) as ended:
        main(named)

    assert ended.value.code == 2
    assert "takes one database" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "worker m:r", "tick"])
def test_one_database_and_several_do_not_go_together(command, capsys):
    assert main([*command.split(), "-d", "one", "--database", "two"]) == 2
    assert "-d names the only database" in capsys.readouterr().err


def test_schedules_are_switched_and_removed_in_each_database(make):
    urls = [make(f"many{n}") for n in (30, 31)]
    for url in urls:
        with psycopg.connect(url) as db:
            db.execute("select rota.schedule_job('s', '@daily', 'x')")

    off = rota("schedule", "disable", "s", *named(*urls))
    gone = rota("schedule", "remove", "s", "--yes", "--json", *named(*urls))

    assert (off.returncode, off.stdout.count("is disabled")) == (0, 2)
    assert [each["answer"]["outcome"] for each in json.loads(gone.stdout)] == ["removed"] * 2


def test_a_question_is_seen_and_is_no_part_of_the_document(make):
    urls = [make(f"many{n}") for n in (32, 33)]
    for url in urls:
        enqueue(url, 0, 1)
    terminal, given = os.openpty()
    os.write(terminal, b"y\ny\n")

    done = rota("cancel", "--queue", "default", "--json", *named(*urls), stdin=given)

    assert [each["answer"]["changed"] for each in json.loads(done.stdout)] == [1, 1]
    assert done.stderr.count("cancel 1 job? [y/N]") == 2
    for end in (terminal, given):
        os.close(end)


def test_an_act_by_id_does_not_wait_for_a_database_that_is_away(make, frozen):
    url = make("many22")
    with psycopg.connect(url) as db:
        db.execute("select rota.set_database_number(22)")
    enqueue(url, 7, 1)
    with psycopg.connect(url) as db:
        ((job_id,),) = db.execute("select id from rota.jobs").fetchall()

    done = rota("explain", str(job_id), *named(frozen[0], url))
    unknown = rota("explain", str(job_id + 1024), *named("postgresql://x@127.0.0.1:1/x", url))

    assert done.returncode == 0, done.stderr
    assert unknown.returncode == 1
    assert "is in none of the databases that answered" in unknown.stderr


def test_an_act_by_id_finds_its_database_by_the_id(make):
    urls = [make(f"many{n}") for n in (9, 10)]
    for number, url in enumerate(urls, 9):
        with psycopg.connect(url) as db:
            db.execute("select rota.set_database_number(%s)", (number,))
        enqueue(url, number, 1)
    with psycopg.connect(urls[1]) as db:
        ((job_id,),) = db.execute("select id from rota.jobs").fetchall()
    both = [word for url in urls for word in ("--database", url)]

    done = rota("cancel", str(job_id), *both)
    unknown = rota("cancel", str(job_id + 10240), *both)
    with psycopg.connect(urls[0]) as db:
        ((leaving_id,),) = db.execute("select id from rota.jobs").fetchall()
        db.execute(
            "insert into rota.moved_jobs (job_id, move_id, database, new_job_id)"
            " select id, 1, 9, 77 from rota.jobs"
        )
        db.execute("delete from rota.jobs")
    left = rota("explain", str(leaving_id), *both)

    assert done.returncode == 0, done.stderr
    assert [waiting(url) for url in urls] == [0, 0]
    assert left.returncode == 1
    assert f"job {leaving_id} is in database 9 now, as job 77" in left.stderr
    assert unknown.returncode == 1
    assert "in none of the databases" in unknown.stderr
