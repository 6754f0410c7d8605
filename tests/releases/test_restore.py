"""A dump of a live database, restored: nothing is lost, nothing is there twice."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from support.databases import pg_dump
from support.waiting import wait_until

Make = Callable[[Path | None], str]

LIFE = """
select rota.set_queue('mail', max_attempts => 3);
select rota.set_limit(job_type => 'pdf', max_running => 1);
select rota.schedule_job('nightly', '0 2 * * *', 'cleanup');
select rota.enqueue('send', queue => 'mail', delay => '1 hour');
select rota.enqueue('once', idempotency_key => 'k', unique_for => '100 years');
select rota.enqueue('pdf', limit_key => 'customer:1') from generate_series(1, 3);
select rota.enqueue('book', ordering_key => 'account:7') from generate_series(1, 3);
select rota.enqueue('bad', max_attempts => 1);
select rota.enqueue('held');
select rota.pause_type('pdf', reason => 'printer on fire');
"""


@pytest.fixture
def install_as_owner(
    psql: Any, sql_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Install once more, as the role that owns a restored schema."""

    def install(dsn: str) -> None:
        owner = "select nspowner::regrole from pg_namespace where nspname = 'rota'"
        role = psql(dsn, "-At", "-c", owner).stdout.strip()
        monkeypatch.setenv("PGOPTIONS", f"-c role={role}")
        psql(dsn, "-f", sql_dir / "install.sql")

    return install


@pytest.fixture
def live(make: Make, sql_dir: Path) -> str:
    """A database with jobs in every state."""
    dsn = make(sql_dir / "install.sql")
    with psycopg.connect(dsn, autocommit=True) as db:
        for statement in LIFE.strip().split(";\n"):
            db.execute(statement.encode())
        claim = "select job_id, lease_token from rota.claim_jobs('w', job_types => array[%s])"
        for job_type in ("once", "bad", "held"):
            job = db.execute(claim, (job_type,)).fetchone()
            assert job is not None
            if job_type == "once":
                db.execute("select rota.finish_job(%s, %s, '{}')", job)
            elif job_type == "bad":
                db.execute("select rota.fail_job(%s, %s, 'broken')", job)
    return dsn


@pytest.fixture
def tool(server: Any) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run pg_dump or pg_restore as the superuser of a database."""

    def run(name: str, dsn: str, *options: str | Path, stdin: bytes | None = None) -> Any:
        url = server.url(conninfo_to_dict(dsn)["dbname"])
        program = pg_dump(url) if name == "pg_dump" else name
        return subprocess.run(
            [program, "-d", url, *map(str, options)], input=stdin, capture_output=True
        )

    return run


def data(tool: Any, dsn: str) -> list[bytes]:
    lines = tool("pg_dump", dsn, "--data-only").stdout.splitlines()
    return sorted(x for x in lines if not x.startswith((b"\\restrict", b"\\unrestrict")))


@pytest.mark.slow
def test_a_dump_that_is_restored_twice_doubles_nothing(
    live: str, make: Make, tool: Any, tmp_path: Path
) -> None:
    dump = tmp_path / "rota.dump"
    assert tool("pg_dump", live, "-Fc", "-f", dump).returncode == 0
    copy = make(None)

    first = tool("pg_restore", copy, "-1", dump)
    assert (first.returncode, data(tool, copy)) == (0, data(tool, live))
    again = tool("pg_restore", copy, "-1", dump)
    assert (again.returncode, data(tool, copy)) == (1, data(tool, live))
    over = tool("pg_restore", copy, "-1", "--clean", "--if-exists", dump)
    assert (over.returncode, data(tool, copy)) == (0, data(tool, live))

    with psycopg.connect(copy, autocommit=True) as db:
        assert db.execute("select * from rota.verify() where violations > 0").fetchall() == []
        assert (
            db.execute(
                "select * from rota.doctor() where finding = 'drift' and severity <> 'ok'"
            ).fetchall()
            == []
        )
        # Keys hold on both sides of the dump, and whoever ran a job may say so here too.
        row = db.execute(
            "select rota.enqueue('once', idempotency_key => 'k', unique_for => '1 day') ="
            " any (select id from rota.finished_jobs)"
        ).fetchone()
        assert row == (True,)
        held = db.execute("select id, lease_token from rota.jobs where job_type = 'held'")
        assert db.execute("select rota.finish_job(%s, %s)", held.fetchone()) is not None


@pytest.mark.parametrize(("number", "ticks"), [(None, False), (3, True)])
def test_a_restored_database_gives_no_id_that_was_given_since_the_dump(
    live: str, make: Make, tool: Any, tmp_path: Path, number: int | None, ticks: bool
) -> None:
    """Callers may know it, also from a copy before this one, of which a session has stayed."""
    with psycopg.connect(live, autocommit=True) as db:
        if number is not None:
            db.execute("select rota.set_database_number(%s)", (number,))
        db.execute("update rota.maintenance set done_at = now() - interval '1 h'")
        ((dumped,),) = db.execute("select rota.enqueue('before')").fetchall()
        assert tool("pg_dump", live, "-Fc", "-f", tmp_path / "rota.dump").returncode == 0
        since = db.execute("select max(rota.enqueue('since')) from generate_series(1, 5)")
        ((last,),) = since.fetchall()
    step = 1 if number is None else 1024
    copy = make(None)
    again = ["-1", "--clean", "--if-exists"]

    with psycopg.connect(copy, autocommit=True) as stays:
        for options in (["-1"], again):
            assert tool("pg_restore", copy, *options, tmp_path / "rota.dump").returncode == 0
            if ticks:
                stays.execute("select rota.tick()")
            ((first,),) = stays.execute("select rota.enqueue('after')").fetchall()
            with psycopg.connect(copy, autocommit=True) as other:
                ((second,),) = other.execute("select rota.enqueue('after')").fetchall()

            assert first > max(last, dumped + step * ((1 << 30) + 3600 * (1 << 16)))
            assert second == first + step
            last = second


def test_a_dump_under_load_is_of_one_moment(
    live: str, make: Make, tool: Any, tmp_path: Path
) -> None:
    """Jobs come in and end while it is made: each is there once, live or ended."""
    stop = threading.Event()
    moved = threading.Event()

    def work() -> None:
        with psycopg.connect(live, autocommit=True) as db:
            while not stop.is_set():
                db.execute("select rota.enqueue('a') from generate_series(1, 5)")
                db.execute(
                    "with c as materialized (select array_agg(job_id) as i,"
                    " array_agg(lease_token) as t from rota.claim_jobs('w', max_jobs => 4,"
                    " job_types => '{a}')) select rota.finish_jobs(c.i, c.t) from c"
                )
                moved.set()

    thread = threading.Thread(target=work)
    thread.start()
    moved.wait(30)
    try:
        dumped = tool("pg_dump", live, "-Fc", "-f", tmp_path / "rota.dump")
    finally:
        stop.set()
        thread.join()
    copy = make(None)
    restored = tool("pg_restore", copy, "-1", tmp_path / "rota.dump")

    assert (dumped.returncode, restored.returncode) == (0, 0)
    with psycopg.connect(copy) as db:
        row = db.execute(
            "select count(*) > 10, count(*) = count(distinct id) from rota.job_runs"
        ).fetchone()
        assert db.execute("select * from rota.verify() where violations > 0").fetchall() == []
    assert row == (True, True)


def test_a_copy_of_production_does_nothing_before_it_is_resumed(
    live: str, make: Make, tool: Any
) -> None:
    """The pause is part of the restoring transaction, so that no worker comes in between."""
    script = tool("pg_dump", live).stdout + b"\nselect rota.pause_all('a copy');\n"
    copy = make(None)

    restored = tool("psql", copy, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", stdin=script)

    assert restored.returncode == 0, restored.stderr
    with psycopg.connect(copy, autocommit=True) as db:
        db.execute("select rota.enqueue('book')")
        assert db.execute("select * from rota.claim_jobs('w')").fetchall() == []
        db.execute("select rota.resume_all()")
        claimed = db.execute("select job_type from rota.claim_jobs('w', max_jobs => 9)")
        assert {job_type for (job_type,) in claimed} == {"book"}


def test_a_copy_of_the_schema_alone_says_that_it_needs_the_install(
    live: str, make: Make, tool: Any, psql: Any, install_as_owner: Callable[[str], None]
) -> None:
    copy = make(None)
    schema = tool("pg_dump", live, "--schema-only").stdout
    assert tool("psql", copy, "-X", "-q", "-v", "ON_ERROR_STOP=1", stdin=schema).returncode == 0
    drift = "select evidence, remedy from rota.doctor() where finding = 'drift'"

    with psycopg.connect(copy, autocommit=True) as db:
        told = db.execute(drift).fetchall()
        install_as_owner(copy)
        db.execute("select rota.tick()")
        ticked = db.execute(
            "select last_tick_at is not null, (select sampled_at > 'epoch' from"
            " rota.stats_progress), (select count(*) from rota.count_progress)"
            " from rota.ticker_health"
        ).fetchall()

        assert len(told) == 1
        assert "copy without data" in told[0][0]
        assert told[0][1] is None
        assert db.execute(drift).fetchall() == [("everything is as installed", None)]
        assert ticked == [(True, True, 1)]


def test_settings_are_in_force_after_an_install_where_a_restore_left_out_their_list(
    live: str, make: Make, tool: Any, admin: psycopg.Connection[Any], tmp_path: Path,
    install_as_owner: Callable[[str], None],
) -> None:  # fmt: skip
    """The list names a role that the other server has not, and so it has none of the rows."""
    admin.execute("create role billing")
    try:
        with psycopg.connect(live, autocommit=True) as db:
            for statement in (
                "select rota.grant_queue('billing', 'bills')",
                "select rota.set_type('book', time_limit => '1 hour')",
                "select rota.pause_queue('mail')",
            ):
                db.execute(statement.encode())
        assert tool("pg_dump", live, "-Fc", "-f", tmp_path / "rota.dump").returncode == 0
    finally:
        admin.execute("drop role billing")
    copy = make(None)
    restored = tool("pg_restore", copy, tmp_path / "rota.dump")
    assert b'COPY failed for table "configured_names"' in restored.stderr
    drift = "select severity, evidence from rota.doctor() where finding = 'drift'"

    with psycopg.connect(copy, autocommit=True) as db:
        ((severity, evidence), (_, grants)) = db.execute(drift).fetchall()
        db.execute(grants.partition("if none is to be confined here: ")[2])
        install_as_owner(copy)
        listed = db.execute("select name from rota.configured_names order by 1").fetchall()

        assert severity == "critical"
        assert evidence.startswith("calls ignore 6 settings, e.g. in fair_queues of default, ")
        assert {name for (name,) in listed} == {
            "access worker", "default", "mail", "type book", "type pdf",
        }  # fmt: skip
        assert db.execute(drift).fetchall() == [("ok", "everything is as installed")]


def test_grants_that_a_restore_left_out_are_told(
    live: str, make: Make, tool: Any, admin: psycopg.Connection[Any], tmp_path: Path,
    install_as_owner: Callable[[str], None],
) -> None:  # fmt: skip
    """One of their roles is missing, and so all are: the other role may use every queue."""
    for role in ("billing", "shop"):
        admin.execute(f"create role {role}".encode())
    try:
        with psycopg.connect(live, autocommit=True) as db:
            db.execute("select rota.grant_queue('billing', 'bills')")
            db.execute("select rota.grant_queue('shop', 'orders')")
        assert tool("pg_dump", live, "-Fc", "-f", tmp_path / "rota.dump").returncode == 0
        admin.execute("drop role billing")
        copy = make(None)
        restored = tool("pg_restore", copy, tmp_path / "rota.dump")
        assert b'COPY failed for table "queue_grants"' in restored.stderr
        install_as_owner(copy)
        drift = "select severity, evidence from rota.doctor() where finding = 'drift'"

        with psycopg.connect(copy, autocommit=True) as db:
            ((severity, evidence),) = db.execute(drift).fetchall()
            db.execute("select rota.grant_queue('shop', 'orders')")

            assert severity == "critical"
            assert evidence.startswith("the grants of queues are missing, ")
            assert db.execute(drift).fetchall() == [("ok", "everything is as installed")]
    finally:
        admin.execute("drop role if exists billing, shop")


def test_data_that_is_restored_over_an_install_leaves_maintenance_working(
    live: str, make: Make, tool: Any, sql_dir: Path, tmp_path: Path
) -> None:
    """Some tables refuse theirs; those of one row have one."""
    copy = make(sql_dir / "install.sql")
    dump = tmp_path / "rota.dump"
    assert tool("pg_dump", live, "-Fc", "-f", dump).returncode == 0
    tool("pg_restore", copy, "--data-only", "--disable-triggers", dump)

    with psycopg.connect(copy, autocommit=True) as db:
        warnings: list[str | None] = []
        db.add_notice_handler(lambda told: warnings.append(told.message_primary))
        db.execute("update rota.maintenance set done_at = '-infinity'")
        db.execute("update rota.stats_progress set sampled_at = 'epoch'")
        db.execute("select rota.tick()")
        assert db.execute("select count(*) from rota.job_runs").fetchone() != (0,)
    assert warnings == []


@pytest.mark.parametrize("options", [[], ["--data-only"]])
def test_settings_that_are_restored_over_an_install_are_all_there(
    live: str, make: Make, tool: Any, sql_dir: Path, tmp_path: Path, options: list[str]
) -> None:
    """Each is audited while the log is full and its sequence has not been restored yet."""
    tables = ("queues", "job_types", "limits", "pauses", "job_definitions", "retry_rules",
              "breakers", "pipeline_stages", "configured_names")  # fmt: skip
    rows = " union all ".join(
        f"select '{table}', to_jsonb(t) - 'updated_at' from rota.{table} as t"
        for table in tables
    )
    with psycopg.connect(live, autocommit=True) as db:
        for statement in (
            "select rota.set_type('book', time_limit => '1 hour')",
            "select rota.set_retry_rule('Boom', 'book', fatal => true)",
            "select rota.set_breaker('book', max_failures => 3)",
            """select rota.define_pipeline('p', '[{"stage": "a"}]')""",
        ):
            db.execute(statement.encode())
        settings = sorted(map(str, db.execute(rows.encode()).fetchall()))
    assert tool("pg_dump", live, "-Fc", "-f", tmp_path / "rota.dump").returncode == 0
    copy = make(sql_dir / "install.sql")
    tool("pg_restore", copy, *options, tmp_path / "rota.dump")

    with psycopg.connect(copy, autocommit=True) as db:
        assert sorted(map(str, db.execute(rows.encode()).fetchall())) == settings
        # An operator can act, too.
        db.execute("select rota.resume_type('pdf')")
        db.execute("select rota.pause_queue('mail')")


def test_what_waits_for_transactions_goes_on_where_their_numbers_are_lower(
    live: str, make: Make, tool: Any, tmp_path: Path
) -> None:
    """A new server counts them from the start."""
    with psycopg.connect(live, autocommit=True) as db:
        db.execute("select rota.tick()")
        db.execute("select rota.set_queue('mail', ageing => '1 minute')")
        db.execute("select rota.set_limit(job_type => 'book', max_running => 1)")
        db.execute("select rota.set_database_number(5)")
        db.execute("select rota.enqueue('goes', queue => 'leaves')")
        db.execute("select rota.take_moves(rota.begin_queue_move('leaves', 6))")
        with db.transaction(), psycopg.connect(live, autocommit=True) as other:
            db.execute("select pg_current_xact_id()")
            for _ in range(3):
                other.execute("select rota.tick()")
        db.execute(
            "update rota.pending_checks set made_by = '1099511627776' where deferrals > 0"
        )
        db.execute(
            "update rota.limits_to_count set asked_xid = '1099511627776'"
            " where asked_xid is not null"
        )
        db.execute("update rota.queue_moves set horizon = '1099511627776'")
        waits = db.execute("select distinct kind from rota.pending_checks where deferrals > 0")
        assert {kind for (kind,) in waits} >= {"limit", "queue"}
    tool("pg_dump", live, "-Fc", "-f", tmp_path / "rota.dump")
    copy = make(None)
    assert tool("pg_restore", copy, "-1", tmp_path / "rota.dump").returncode == 0

    with psycopg.connect(copy, autocommit=True) as db, psycopg.connect(copy) as producer:

        def goes_on() -> bool:
            producer.commit()
            db.execute("select rota.tick()")
            # There always is one, but a new one each time.
            producer.execute("select rota.enqueue('stays')")
            db.execute("select rota.take_moves(move_id) from rota.queue_moves")
            row = db.execute(
                "select not exists (select from rota.pending_checks where kind = 'queue')"
                " and not exists (select from rota.limits_to_count)"
                " and exists (select from rota.moved_jobs)"
            ).fetchone()
            return row == (True,)

        wait_until(goes_on, "something waits for ever")
