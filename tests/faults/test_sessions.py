"""Sessions that die between two statements, and sessions that hold what they can."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.rows import dict_row

from invariants import check_invariants
from races.harness import call
from rota.testing import EmbeddedPostgres
from support.clock import Clock
from support.databases import Psql
from support.waiting import wait_until

pytestmark = pytest.mark.own_session

Connect = Callable[..., psycopg.Connection[Any]]


@pytest.fixture(autouse=True)
def _invariants(db: psycopg.Connection[Any]) -> Iterator[None]:
    yield
    check_invariants(db)


def terminate(db: psycopg.Connection[Any], victim: psycopg.Connection[Any]) -> None:
    """End a session from outside and return when it has gone."""
    pid = victim.info.backend_pid
    db.execute("select pg_terminate_backend(%s)", (pid,))
    gone = "select from pg_stat_activity where pid = %s"
    wait_until(lambda: not db.execute(gone, (pid,)).rowcount, "the end of the session")


def runs(db: psycopg.Connection[Any]) -> list[Any]:
    return db.execute("select status, attempts from rota.job_runs order by id").fetchall()


def swept(db: psycopg.Connection[Any], function: str) -> int:
    """Call a function that sweeps; return how many jobs it took back."""
    with db.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(*call(function)).fetchone() or {}
    count: int = row.get("jobs_swept", row.get("sweep_stale_leases"))
    return count


def test_claim_of_a_session_that_dies_before_its_commit_never_was(
    db: psycopg.Connection[Any], connect: Connect
) -> None:
    db.execute(*call("enqueue", job_type="t"))
    victim = connect(autocommit=False)
    victim.execute(*call("claim_jobs", worker="victim"))

    terminate(db, victim)

    assert runs(db) == [("queued", 0)]
    assert len(db.execute(*call("claim_jobs", worker="w")).fetchall()) == 1


@pytest.mark.parametrize("ending", ["finish_job", "fail_job", "snooze_job", "release_jobs"])
def test_ending_of_a_session_that_dies_before_its_commit_never_was(
    db: psycopg.Connection[Any], connect: Connect, clock: Clock, ending: str
) -> None:
    clock.set("2026-03-01 12:00:00+00")
    db.execute(*call("enqueue", job_type="t"))
    victim = connect(autocommit=False)
    job_id, token = victim.execute(*call("claim_jobs", worker="victim")).fetchall()[0][:2]
    victim.commit()
    arguments: dict[str, Any] = {"job_id": job_id, "lease_token": token}
    extra: dict[str, dict[str, Any]] = {
        "fail_job": {"error": "no luck"},
        "snooze_job": {"delay": "1 hour"},
    }
    if ending == "release_jobs":
        arguments = {"job_ids": [job_id], "lease_tokens": [token]}
    victim.execute(*call(ending, **arguments, **extra.get(ending, {})))

    terminate(db, victim)

    assert runs(db) == [("running", 1)]
    clock.advance("2 minutes")
    assert swept(db, "tick") == 1
    assert runs(db) == [("failed", 1)]


@pytest.mark.parametrize("sweeping", ["tick", "sweep_stale_leases"])
def test_sweep_whose_session_dies_is_done_by_the_next(
    db: psycopg.Connection[Any], connect: Connect, clock: Clock, sweeping: str
) -> None:
    clock.set("2026-03-01 12:00:00+00")
    for _ in range(5):
        db.execute(*call("enqueue", job_type="t"))
    db.execute(*call("claim_jobs", worker="w", max_jobs=5))
    clock.advance("2 minutes")
    victim = connect(autocommit=False)
    assert swept(victim, sweeping) == 5

    terminate(db, victim)

    assert runs(db) == [("running", 1)] * 5
    assert swept(connect(), "tick") == 5
    assert runs(db) == [("failed", 1)] * 5


def test_advisory_locks_of_others_stop_nothing(
    db: psycopg.Connection[Any], connect: Connect, clock: Clock
) -> None:
    """Another session holds thousands of advisory locks, our own name's among them."""
    clock.set("2026-03-01 12:00:00+00")
    words = ["rota", "default", "tick", "sweep", "claim", "jobs", "w", "rota.install"]
    words += ["rota.tick", "rota.sweep", "rota.jobs", "rota.queues", "retention", "maintenance"]
    holder = connect()
    holder.execute(
        "select pg_advisory_lock(i), pg_advisory_lock(i, 0), pg_advisory_lock(0, i) "
        "from generate_series(-100, 900) as i"
    )
    holder.execute(
        "select pg_advisory_lock(hashtext(w)), pg_advisory_lock(hashtextextended(w, 0)), "
        "pg_advisory_lock(hashtext('rota'), hashtext(w)) from unnest(%s::text[]) as w",
        (words,),
    )
    holder.execute(
        "select pg_advisory_lock(c.oid::integer), pg_advisory_lock(0, c.oid::integer) "
        "from pg_class as c where c.relnamespace = 'rota'::regnamespace"
    )

    for connection in (db, connect()):
        connection.execute("set lock_timeout = '1s'")
        connection.execute(*call("enqueue", job_type="t"))
        connection.execute(*call("claim_jobs", worker="w"))
        clock.advance("2 minutes")
        assert swept(connection, "tick") == 1

    assert runs(db) == [("failed", 1)] * 2


HOUR = "floor(extract(epoch from rota.now()) / 3600)::integer"
# The names of locks that were advisory ones, or are by keys that no login can know; what is
# done before; and what has to go on then, and returns a row.
STRANGERS: dict[str, tuple[LiteralString, LiteralString, LiteralString]] = {
    "the first id of a promotion": (
        "'rota.ids'",
        "select setval('rota.id_timeline', 77)",
        "select rota.enqueue('x')",
    ),
    "a pipeline": (
        "'rota.pipeline p'",
        "select",
        """select rota.define_pipeline('p', '[{"stage": "a", "job_type": "x"}]')""",
    ),
    "a tick": (
        "'rota.tick'",
        "select rota.tick()",
        "select from rota.tick() as t where not t.was_skipped",
    ),
    "a move that begins": (
        "'rota.move q'",
        "select rota.set_database_number(5)",
        "select rota.begin_queue_move('q', 6)",
    ),
    "a mover": (
        "'rota.mover ' || m.move_id from rota.queue_moves as m",
        "select rota.set_database_number(5); select rota.begin_queue_move('q', 6)",
        "select m.* from rota.waiting_moves() as w"
        " cross join lateral rota.take_moves(w.move_id) as m",
    ),
    "a move that ends": (
        "'rota.mover ' || m.move_id from rota.queue_moves as m",
        "select rota.set_database_number(5); select rota.begin_queue_move('q', 6)",
        "select rota.end_queue_move('q')",
    ),
    "the first job of an ordering key": (
        "'rota.order k'",
        "select",
        "select rota.enqueue('x', ordering_key => 'k'); select from rota.claim_jobs('w')",
    ),
    "the starts of a rate": (
        f"concat('rota.cell ', {HOUR} + n, ' type x') from generate_series(-1, 1) as n",
        "select rota.set_limit(job_type => 'x', max_starts => 1, per => '1 hour');"
        " select rota.tick(); select rota.enqueue('x')",
        "select from rota.claim_jobs('w')",
    ),
    "the slots of a class": (
        "concat('rota.part ', n, ' key c:1') from generate_series(-1, 9) as n",
        "select rota.set_limit(limit_key => 'c:*', max_running => 9);"
        " select rota.tick(); select rota.enqueue('x', limit_key => 'c:1')",
        "select from rota.claim_jobs('w')",
    ),
    "the slots of a limit that changes": (
        "'rota.part -1 type x'",
        "select rota.set_limit(job_type => 'x', max_running => 1); select rota.tick();"
        " select rota.set_limit(job_type => 'x', max_running => 2)",
        "select rota.tick(); select rota.enqueue('x'); select from rota.claim_jobs('w')",
    ),
    "the first key of a queue": (
        "'rota.fair default'",
        "select",
        "select rota.enqueue('x', limit_key => 'c:1'); select from rota.fair_queues",
    ),
}


@pytest.mark.parametrize("held_up", STRANGERS)
def test_a_login_without_rights_holds_up_no_call(
    db: psycopg.Connection[Any], connect: Connect, held_up: str
) -> None:
    """Any login can take any advisory lock of which it knows the key, and keep it."""
    names, before, calls = STRANGERS[held_up]
    stranger, caller = connect(), connect()
    caller.execute(before)
    locked = caller.execute(f"select array(select {names})").fetchone()  # type: ignore[arg-type]
    stranger.execute("set role pg_signal_backend")
    stranger.execute(
        "select pg_advisory_lock(hashtextextended(n, 0)) from unnest(%s::text[]) as n", locked
    )
    caller.execute("set statement_timeout = '5s'")

    found = [caller.execute(query).rowcount for query in calls.split(";")]  # type: ignore[arg-type]

    assert found[-1] == 1


def test_no_other_function_takes_an_advisory_lock(
    db: psycopg.Connection[Any],
) -> None:
    takers = db.execute(
        "select p.proname from pg_proc as p "
        "where p.pronamespace = 'rota'::regnamespace and p.prosrc ~* 'advisory' order by 1"
    ).fetchall()

    assert {name for (name,) in takers} == {
        "_try_lock",
        "_others_hold",
        "report_worker",
        "_notify",
        "_notify_slots",
        "_share_lock",
        "_take_listen_slots",
        "_held_locks",
        "_give_up",
        "wait_for_result",
        "_waiting_pids",
    }


def test_no_call_changes_how_its_transaction_is_committed(
    db: psycopg.Connection[Any],
) -> None:
    """An answer is on the disk, and wherever else its caller has asked for, once committed."""
    with db.transaction():
        db.execute("set local synchronous_commit = remote_apply")
        for _ in range(4):
            db.execute(*call("enqueue", job_type="t"))
        claims = db.execute(*call("claim_jobs", worker="w", max_jobs=4)).fetchall()
        refs = [{"job_id": row[0], "lease_token": row[1]} for row in claims]
        for ref in refs:
            db.execute(*call("heartbeat", **ref))
        db.execute(*call("finish_job", **refs[0]))
        db.execute(*call("fail_job", **refs[1], error="no luck"))
        db.execute(*call("snooze_job", **refs[2], delay="1 hour"))
        db.execute(*call("cancel_job", job_id=refs[3]["job_id"]))
        db.execute(*call("tick"))

        assert db.execute("show synchronous_commit").fetchall() == [("remote_apply",)]


@pytest.mark.slow
def test_nothing_that_was_answered_is_lost_in_a_crash_of_the_server(
    psql: Psql, sql_dir: Path, tmp_path: Path
) -> None:
    """kill -9 of a backend in the middle of a finish: the server throws all sessions out."""
    with EmbeddedPostgres() as server:
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            connection.execute("create database crash")
        url = server.url("crash")
        psql(url, "-f", sql_dir / "install.sql")
        victim, other = (psycopg.connect(url, autocommit=True) for _ in range(2))
        for _ in range(10):
            victim.execute(*call("enqueue", job_type="t"))
        claims = victim.execute(*call("claim_jobs", worker="w", max_jobs=10)).fetchall()
        refs = [{"job_id": row[0], "lease_token": row[1]} for row in claims]
        victim.execute(*call("finish_job", **refs[0]))
        victim.execute("begin")
        victim.execute(*call("finish_job", **refs[1]))

        os.kill(victim.info.backend_pid, signal.SIGKILL)

        with pytest.raises(psycopg.OperationalError):
            wait_until(lambda: other.execute("select 1") is None, "the crash")
        victim.close()
        other.close()
        with wait_until(lambda: _connected(url), "the recovery") as again:
            assert runs(again) == [("succeeded", 1)] + [("running", 1)] * 9
            answers = [again.execute(*call("finish_job", **ref)).fetchone() for ref in refs]
            check_invariants(again)

    assert answers == [("already_finished",)] + [("finished",)] * 9


@pytest.mark.slow
def test_a_server_that_fell_down_sweeps_nothing_before_its_workers_come_back(
    psql: Psql, sql_dir: Path
) -> None:
    """kill -9 of a backend: the server comes back under a postmaster that started long ago."""
    with EmbeddedPostgres() as server:
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            connection.execute("create database crash")
        url = server.url("crash")
        psql(url, "-f", sql_dir / "install.sql")
        with psycopg.connect(url, autocommit=True) as victim:
            victim.execute(
                "select pg_sleep_until(pg_postmaster_start_time() + interval '3 seconds')"
            )
            victim.execute(*call("enqueue", job_type="t"))
            (job,) = victim.execute(
                *call("claim_jobs", worker="w", lease="1 millisecond")
            ).fetchall()
            os.kill(victim.info.backend_pid, signal.SIGKILL)
            with pytest.raises(psycopg.OperationalError):
                wait_until(lambda: victim.execute("select 1") is None, "the crash")

        with wait_until(lambda: _connected(url), "the recovery") as again:
            swept = again.execute(*call("sweep_stale_leases")).fetchall()
            ref = {"job_id": job[0], "lease_token": job[1]}
            answer = again.execute(*call("finish_job", **ref)).fetchone()

    assert (swept, answer) == ([(0,)], ("finished",))


def _connected(url: str) -> psycopg.Connection[Any] | None:
    try:
        return psycopg.connect(url, autocommit=True)
    except psycopg.OperationalError:
        return None
