"""What is asked of a standby: everything that only reads, with the answers of the primary."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

import rota
from rota.testing.server import memory
from rota.web import app
from support.server import Server
from support.waiting import wait_until
from web.conftest import serving


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    """A primary with jobs in several states, and a standby that has all of it."""
    folder = Path(tempfile.mkdtemp(dir=memory()))
    folder.chmod(0o755)
    (folder / "primary").mkdir()
    primary = Server.create(folder / "primary")
    try:
        with psycopg.connect(primary.url(), autocommit=True) as db:
            db.execute("select rota.enqueue('send', delay => '1 hour')")
            db.execute("select rota.enqueue('add', ordering_key => 'k')")
            db.execute("select rota.enqueue('add', ordering_key => 'k')")
            db.execute("select rota.pause_queue('default', 'migration')")
            db.execute("select rota.report_worker('w', 'h', 1, '0.2.0', '{default}', '{send}')")
            db.execute("select rota.tick()")
        standby = primary.copy(folder / "standby")
        try:
            wait_for(primary, standby)
            yield primary, standby
        finally:
            standby.destroy()
    finally:
        primary.destroy()
        shutil.rmtree(folder)


def wait_for(primary: Server, standby: Server) -> None:
    with (
        psycopg.connect(primary.url()) as db,
        psycopg.connect(standby.url(), autocommit=True) as copy,
    ):
        row = db.execute("select pg_current_wal_insert_lsn()").fetchone()
        has_come = "select pg_last_wal_replay_lsn() >= %s"
        wait_until(lambda: copy.execute(has_come, row).fetchone() == (True,), "the standby")


def test_every_view_and_question_answers_on_a_standby(pair: tuple[Server, Server]) -> None:
    primary, standby = pair
    with (
        psycopg.connect(primary.url(), autocommit=True) as db,
        psycopg.connect(standby.url(), autocommit=True) as copy,
    ):
        names = [
            name for name, in db.execute(
                "select name from rota._access() where access = 'observer' and kind = 'view'"
            )
        ]  # fmt: skip
        assert len(names) > 20
        for name in names:
            query = f"select count(*) from rota.{name}".encode()
            assert copy.execute(query).fetchone() == db.execute(query).fetchone(), name


def test_what_is_asked_of_a_standby_is_answered_as_by_the_primary(
    pair: tuple[Server, Server],
) -> None:
    primary, standby = pair
    blind = {"workers", "horizon", "vacuum", "notifications"}
    with (
        psycopg.connect(primary.url(), autocommit=True) as db,
        psycopg.connect(standby.url(), autocommit=True) as copy,
    ):
        for job in db.execute("select id from rota.jobs order by id").fetchall():
            reasons = b"select reason, remedy from rota.explain_job(%s)"
            found = copy.execute(reasons, job).fetchall()
            assert found[-1] == ("standby", None)
            # Whether a worker is connected is not to be seen.
            known = {row for row in db.execute(reasons, job) if row[0] != "no_worker"}
            assert {row for row in found[:-1] if row[0] != "no_worker"} == known
        query = b"select finding, severity, evidence from rota.doctor()"
        here = {row[0]: row[1:] for row in copy.execute(query)}
        there = {row[0]: row[1:] for row in db.execute(query)}
        assert here.keys() == there.keys()
        for finding in here.keys() - blind - {"standby"}:
            assert here[finding][0] == there[finding][0], finding
        for finding in blind:
            assert here[finding][1] == "a standby cannot tell: ask the primary"
        assert here["standby"][1].startswith("this is a standby")
        promises = b"select promise, examined, violations from rota.verify()"
        assert copy.execute(promises).fetchall() == db.execute(promises).fetchall()
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            copy.execute("select rota.enqueue('a')")


def test_a_result_is_waited_for_on_a_standby_without_a_lock(
    pair: tuple[Server, Server],
) -> None:
    primary, standby = pair
    with (
        psycopg.connect(primary.url(), autocommit=True) as db,
        psycopg.connect(standby.url(), autocommit=True) as copy,
    ):
        row = db.execute("select rota.enqueue('add', delay => '1 day')").fetchone()
        assert row is not None
        wait_for(primary, standby)
        copy.execute("select rota.wait_for_result(%s)", row)
        locks = copy.execute("select count(*) from pg_locks where locktype = 'advisory'")
        assert locks.fetchone() == (0,)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(rota.Client(copy).wait_for_result, row[0], timeout=60)
            db.execute("select rota.cancel_job(%s)", row)
            assert waiting.result().status == "cancelled"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["status"], 0, "default"),
        (["doctor", "--all"], 1, "this is a standby"),
        (["explain", "1"], 0, "seen on a standby"),
        (["jobs"], 0, "send"),
    ],
)
def test_the_command_line_reads_a_standby(
    pair: tuple[Server, Server], words: list[str], code: int, told: str
) -> None:
    command = [sys.executable, "-m", "rota", *words, "-d", pair[1].url()]

    done = subprocess.run(command, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (code, "")
    assert told in done.stdout


def test_the_page_of_a_standby_shows_all_and_acts_on_nothing(
    pair: tuple[Server, Server],
) -> None:
    _, standby = pair
    page = app(standby.url(), allow_acts=True, observer_role=None, operator_role=None)
    with serving(page) as address, httpx.Client(base_url=address, timeout=30) as http:
        for path in ("/", "/jobs", "/jobs/1", "/errors", "/schedules", "/workers", "/waiting"):
            shown = http.get(path)
            assert shown.status_code == 200
            assert "standby, read only" in shown.text
            assert 'role="alert"' not in shown.text
            assert "/act/" not in shown.text
        assert http.get("/act/cancel_job?job_id=1").status_code == 403


def critical(db: psycopg.Connection[Any], finding: str) -> str | None:
    """Return what is told as critical by a check, or nothing."""
    row = db.execute(
        "select evidence from rota.doctor() where severity = 'critical' and finding = %s",
        (finding,),
    ).fetchone()
    return row[0] if row else None


def test_doctor_tells_that_commits_wait_for_a_standby(
    pair: tuple[Server, Server],
) -> None:
    """The one that is connected has another name than the one that is asked for."""
    primary, _ = pair
    with (
        psycopg.connect(primary.url(), autocommit=True) as db,
        psycopg.connect(primary.url(), autocommit=True) as producer,
        ThreadPoolExecutor(1) as pool,
    ):
        producer.execute("select 1")
        primary.configure(synchronous_standby_names="away")
        enqueued = pool.submit(producer.execute, "select rota.enqueue('send', delay => '1 h')")
        try:
            wait_until(lambda: critical(db, "standby"), "doctor to tell")
            told = critical(db, "standby")
            waiting = db.execute(
                "select rota._session_words(pid) from pg_stat_activity"
                " where wait_event = 'SyncRep'"
            ).fetchone()
        finally:
            primary.configure(synchronous_standby_names="")
        assert enqueued.result().fetchone() is not None
        assert told is not None
        assert told.startswith("commits wait for a synchronous standby, the first for ")
        assert "synchronous_standby_names is away" in told
        assert waiting is not None
        assert "waits for a synchronous standby" in waiting[0]
        assert critical(db, "standby") is None


def test_doctor_tells_that_no_standby_is_there_to_commit() -> None:
    """Also an owner that may not see the sessions of others."""
    folder = Path(tempfile.mkdtemp(dir=memory()))
    folder.chmod(0o755)
    alone = Server.create(folder)
    try:
        with psycopg.connect(alone.url(), autocommit=True) as db:
            assert critical(db, "standby") is None
            alone.configure(synchronous_standby_names="*")
            told = critical(db, "standby")
        assert told is not None
        assert told.startswith(
            "no standby is connected, and commits wait for a synchronous one"
        )
    finally:
        alone.destroy()
