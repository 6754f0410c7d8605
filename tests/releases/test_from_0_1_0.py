"""The way from 0.1.0: what comes out is a fresh install, and nothing is lost on it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from support.databases import pg_dump
from support.waiting import wait_until

from .conftest import HERE

# What an application did with 0.1.0, by its functions: each call in a transaction of its own.
LIFE = """
select rota.set_queue('mail', max_attempts => 3, keep_dead => '30 days');
select rota.pause_queue('mail', 'provider down');
select rota.set_limit(job_type => 'pdf', max_running => 1);
select rota.set_limit(limit_key => 'customer:*', max_running => 2);
select rota.schedule_job('nightly', '0 2 * * *', 'cleanup', time_zone => 'Europe/Berlin');
select rota.schedule_job('poll', 'every 10 minutes', 'poll');
select rota.define_pipeline('order', '[{"stage": "pay", "job_type": "pay"},
    {"stage": "ship", "job_type": "ship", "queue": "ship"}]');
select rota.enqueue('send', '{"n": 1}', queue => 'mail', delay => '1 hour');
select rota.enqueue('charge', '{"n": 2}', idempotency_key => 'charge:1',
    unique_for => '100 years');
select rota.enqueue('pdf', limit_key => 'customer:' || n % 3) from generate_series(1, 6) as n;
select rota.enqueue('pdf') from generate_series(1, 3) as n;
select rota.enqueue('book', ordering_key => 'account:7') from generate_series(1, 3) as n;
select rota.enqueue('part', queue => 'parts') from generate_series(1, 2) as n;
select rota.enqueue('merge', after => array(
    select j.id from rota.jobs as j where j.job_type = 'part'));
select rota.start_pipeline('order', '{"order": 1}', idempotency_key => 'order:1');
select rota.start_pipeline('order', '{"order": 2}');
select rota.enqueue('bad', max_attempts => 1);
select rota.enqueue('good');
select rota.enqueue('held', idempotency_key => 'held:1');
"""


def claim(db: psycopg.Connection[Any], job_type: str, number: int = 1) -> list[Any]:
    return db.execute(
        "select * from rota.claim_jobs('w', '{default,ship,parts}', %s, lease => '1 hour',"
        " job_types => %s)",
        (number, [job_type]),
    ).fetchall()


def live(dsn: str) -> None:
    """Let an application live in a database of 0.1.0 for a while."""
    with psycopg.connect(dsn, autocommit=True) as db:
        for statement in LIFE.split(";\n"):
            if statement.strip():
                db.execute(statement.encode())
        for job_type, outcome in (("charge", "finish"), ("good", "finish"), ("bad", "fail")):
            (job,) = claim(db, job_type)
            if outcome == "finish":
                db.execute("select rota.finish_job(%s, %s, '{\"ok\": 1}')", job[:2])
            else:
                db.execute("select rota.fail_job(%s, %s, 'broken', 'Broken')", job[:2])
        (first, second) = claim(db, "pay", 2)
        db.execute("select rota.finish_job(%s, %s, '{\"paid\": 1}')", first[:2])
        db.execute("select rota.record_effect('mail', 'k', %s, %s)", second[:2])
        assert len(claim(db, "part")) == 1
        claim(db, "held")
        db.execute(
            "select rota.enqueue('held', '{\"n\": 2}', idempotency_key => 'held:1',"
            " on_conflict => 'rerun')"
        )


def rows(db: psycopg.Connection[Any], query: str) -> list[Any]:
    return db.execute(query.encode()).fetchall()


STORY = """
select coalesce(to_jsonb(j) ->> 'first_job_id', j.id::text)::bigint as id, j.queue, j.job_type,
    j.payload, j.status, j.run_at, j.attempts, j.locked_by, j.locked_until, j.last_error,
    j.idempotency_key, j.ordering_key, j.limit_key, j.pipeline, j.stage, j.stage_input,
    j.created_at
from rota.jobs as j order by 1
"""


def upgrade(psql: Any, dsn: str, sql_dir: Path) -> None:
    psql(dsn, "-v", "ON_ERROR_STOP=1", "-f", sql_dir / "install.sql")


def dump(server: Any, dsn: str, *options: str) -> list[str]:
    url = server.url(conninfo_to_dict(dsn)["dbname"])
    lines = subprocess.check_output([pg_dump(url), *options, url], text=True).splitlines()
    return [line for line in lines if not line.startswith(("\\restrict", "\\unrestrict"))]


@pytest.mark.slow
def test_an_upgrade_is_a_fresh_install_with_the_rows_of_before(
    old: str, make: Callable[[Path | None], str], psql: Any, sql_dir: Path, server: Any,
    admin: psycopg.Connection[Any],
) -> None:  # fmt: skip
    live(old)
    admin.execute("create role by_hand")
    with psycopg.connect(old, autocommit=True) as db:
        db.execute("grant usage on schema rota to by_hand")
        db.execute(
            "grant execute on all functions in schema rota to by_hand;"
            "revoke execute on function rota.tick from by_hand;"
            "grant select on rota.dead_jobs, rota.jobs to by_hand"
        )
        before = rows(db, STORY)
        old_keys = rows(db, "select idempotency_key, job_id from rota.idempotency_keys")
        schedules = rows(db, "select name, next_run_at from rota.job_definitions order by 1")

    upgrade(psql, old, sql_dir)

    with psycopg.connect(old, autocommit=True) as db:
        granted = {
            name for name, in rows(
                db, "select proname from pg_proc where pronamespace = 'rota'::regnamespace"
                " and has_function_privilege('by_hand', oid, 'execute')",
            )
        }  # fmt: skip
        assert rows(
            db,
            "select has_table_privilege('by_hand', 'rota.dead_jobs', 'select'),"
            " has_table_privilege('by_hand', 'rota.effects', 'select')",
        ) == [(True, False)]
    with psycopg.connect(server.url(conninfo_to_dict(old)["dbname"])) as db:
        db.execute("set role by_hand")
        assert rows(db, "select count(*) from rota.dead_jobs") == [(1,)]
    assert "finish_job" in granted
    assert not {name for name in granted if name.startswith("_") or name == "tick"}
    with psycopg.connect(server.url(conninfo_to_dict(old)["dbname"])) as db:
        db.execute("drop owned by by_hand")
    admin.execute("drop role by_hand")
    fresh = make(sql_dir / "install.sql")
    assert dump(server, old, "--schema-only") == dump(server, fresh, "--schema-only")

    with psycopg.connect(old, autocommit=True) as db:
        assert rows(db, STORY) == before
        assert rows(db, "select name, next_run_at from rota.job_definitions order by 1") == (
            schedules
        )
        assert rows(
            db,
            "select job_type, status, result, error_type from rota.finished_jobs order by 1",
        ) == [
            ("bad", "dead", None, "Broken"),
            ("charge", "succeeded", {"ok": 1}, None),
            ("good", "succeeded", {"ok": 1}, None),
        ]
        assert rows(db, "select message from rota.job_errors") == [("broken",)]
        assert rows(
            db, "select idempotency_key, job_id, key_scope from rota.idempotency_keys"
        ) == [(*key, "charge") for key in old_keys]
        assert rows(db, "select stage, status, result from rota.stage_runs") == [
            ("pay", "succeeded", {"paid": 1})
        ]
        assert rows(db, "select scope, key, queue from rota.effects") == [
            ("mail", "k", "default")
        ]
        assert rows(db, "select queue, max_attempts from rota.queues") == [("mail", 3)]
        assert rows(db, "select queue, reason from rota.pauses") == [("mail", "provider down")]


def test_what_waited_in_0_1_0_goes_on(old: str, psql: Any, sql_dir: Path) -> None:
    """Everything is worked off under the new rules, in order, within limits, and once."""
    live(old)
    upgrade(psql, old, sql_dir)
    most = 0
    done: list[tuple[int, str]] = []
    with psycopg.connect(old, autocommit=True) as db:
        db.execute("select rota.resume_queue('mail')")
        # Whoever ran them before is told the outcome that it reports.
        for job in rows(
            db, "select id, lease_token, job_type from rota.jobs where status = 'running'"
        ):
            db.execute("select rota.finish_job(%s, %s)", job[:2])
            done.append((job[0], job[2]))
        again = rows(
            db,
            "select rota.enqueue('charge', idempotency_key => 'charge:1',"
            " unique_for => '1 day')",
        )
        assert again == rows(db, "select id from rota.finished_jobs where job_type = 'charge'")
        for _ in range(60):
            db.execute("select rota.tick()")
            jobs = rows(
                db, "select job_id, lease_token, job_type from rota.claim_jobs('w', "
                "'{default,ship,parts,mail}', 50)",
            )  # fmt: skip
            most = max(most, sum(job[2] == "pdf" for job in jobs))
            for job in jobs:
                db.execute("select rota.finish_job(%s, %s)", job[:2])
                done.append((job[0], job[2]))
        assert rows(db, "select job_type, status from rota.jobs") == [("send", "queued")]
        assert rows(db, "select * from rota.verify() where violations > 0") == []
    assert most in (1, 2)
    books = [job_id for job_id, job_type in done if job_type == "book"]
    assert (len(books), books) == (3, sorted(books))
    kinds = sorted(job_type for _, job_type in done)
    assert (kinds.count("merge"), kinds.count("held")) == (1, 2)
    assert kinds.count("ship") == 2


def test_an_upgrade_leaves_what_others_have_built_on_0_1_0(
    old: str, psql: Any, sql_dir: Path, server: Any
) -> None:
    with psycopg.connect(old, autocommit=True) as db:
        db.execute("create schema shop create view mine as select id from rota.job_runs")
    before = dump(server, old)

    done = psql(old, "-f", sql_dir / "install.sql", check=False)

    assert done.returncode == 3
    assert "these use tables or functions of rota, and would go with them" in done.stderr
    assert "shop.mine" in done.stderr
    assert dump(server, old) == before


@pytest.mark.slow
def test_0_1_0_does_not_go_over_what_is_newer(
    make: Callable[[Path | None], str], psql: Any, sql_dir: Path, server: Any
) -> None:
    new = make(sql_dir / "install.sql")
    before = dump(server, new)

    done = psql(new, "-v", "ON_ERROR_STOP=1", "-f", HERE / "0.1.0.sql", check=False)

    assert done.returncode == 3
    assert dump(server, new) == before


class OldClients:
    """Producers and workers of 0.1.0, which send what its client sends."""

    def __init__(self, dsn: str, producers: int = 2, workers: int = 2) -> None:
        self.dsn = dsn
        self.added: list[int] = []
        self.finished: list[int] = []
        self.errors: list[str] = []
        self.waits: list[float] = []
        self._stop = threading.Event()
        steps = [self._produce] * producers + [self._work] * workers
        self.threads = [threading.Thread(target=self._repeat, args=(step,)) for step in steps]
        for thread in self.threads:
            thread.start()

    def __enter__(self) -> OldClients:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self.threads:
            thread.join()

    def wait_for(self, finished: int, added: int = 0) -> None:
        """Wait until so many more jobs have been finished and added."""
        goal = len(self.finished) + finished, len(self.added) + added
        wait_until(
            lambda: len(self.finished) >= goal[0] and len(self.added) >= goal[1], "work", 60
        )

    def check(self) -> None:
        """What each was told stands, and each met the upgrade with one call at most."""
        assert len(set(self.added)) == len(self.added)
        assert len(set(self.finished)) == len(self.finished)
        with psycopg.connect(self.dsn, autocommit=True) as db:
            known = dict(rows(db, "select id, status from rota.job_runs"))
            assert rows(db, "select * from rota.verify() where violations > 0") == []
        assert set(self.added) <= known.keys()
        assert {known[job_id] for job_id in self.finished} == {"succeeded"}
        assert len(self.errors) <= len(self.threads), self.errors

    def _repeat(self, step: Callable[[psycopg.Connection[Any]], None]) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True) as db:
                    while not self._stop.is_set():
                        step(db)
            except psycopg.Error as error:
                self.errors.append(str(error))

    def _call(self, db: psycopg.Connection[Any], query: LiteralString, *values: Any) -> Any:
        begin = time.monotonic()
        try:
            return db.execute(query, values).fetchall()
        finally:
            self.waits.append(time.monotonic() - begin)

    def _produce(self, db: psycopg.Connection[Any]) -> None:
        (row,) = self._call(
            db, "select enqueue from rota.enqueue(job_type => 'a', payload => '{}')"
        )
        batch = self._call(
            db, "select job_id from rota.enqueue_many(%s)",
            '[{"job_type": "a"}, {"job_type": "a"}]',
        )  # fmt: skip
        self.added += [row[0], *(job_id for (job_id,) in batch)]

    def _work(self, db: psycopg.Connection[Any]) -> None:
        for job in self._call(
            db, "select job_id, lease_token from rota.claim_jobs("
            "worker => %s, queues => '{default}', max_jobs => 5)", str(threading.get_ident()),
        ):  # fmt: skip
            self._call(
                db, "select finish_job from rota.finish_job("
                "job_id => %s, lease_token => %s)", *job,
            )  # fmt: skip
            self.finished.append(job[0])
        # Not counted with the others: it takes as long as it has to do.
        db.execute("select jobs_swept from rota.tick()")


@pytest.mark.slow
def test_nothing_is_lost_with_old_clients_at_work(old: str, psql: Any, sql_dir: Path) -> None:
    """Old producers and workers go on through the upgrade, and send what 0.1.0 sends.

    What one is told stands: an id that was returned is there, a job that was finished has
    succeeded once.  What the new functions refuse is an error, never a silent loss.
    """
    with OldClients(old) as clients:
        clients.wait_for(finished=200)
        upgrade(psql, old, sql_dir)
        clients.wait_for(finished=200, added=100)
    clients.check()


# What happens to each kind of row while the upgrade is under way.
CHANGES = """
select rota.finish_job(j.id, j.lease_token) from rota.jobs as j
    where j.job_type = 'part' and j.status = 'running';
select rota.finish_job(c.job_id, c.lease_token) from rota.claim_jobs('w', '{parts}', 1) as c;
select rota.finish_job(c.job_id, c.lease_token) from rota.claim_jobs('w', '{ship}', 1) as c;
select rota.withdraw_effect('mail', 'k', e.job_id, e.lease_token) from rota.effects as e;
select rota.fail_job(j.id, j.lease_token, 'no money', 'Poor') from rota.jobs as j
    where j.job_type = 'pay' and j.status = 'running';
select rota.fail_job(c.job_id, c.lease_token, 'torn', 'Torn')
    from rota.claim_jobs('w', '{default}', 1, job_types => '{book}') as c;
select rota.retry_job(f.id) from rota.finished_jobs as f where f.job_type = 'bad';
select rota.reschedule_job(j.id, delay => '2 hours') from rota.jobs as j
    where j.job_type = 'send';
select rota.cancel_job(min(j.id)) from rota.jobs as j where j.job_type = 'pdf';
select rota.enqueue('pdf', limit_key => 'customer:9') from generate_series(1, 3);
select rota.enqueue('charge', idempotency_key => 'charge:2', unique_for => '1 year');
select rota.enqueue('late', after => array[max(j.id)]) from rota.jobs as j;
select rota.set_queue('mail', max_attempts => 9);
select rota.resume_queue('mail');
select rota.set_queue('ship', max_attempts => 4);
select rota.pause_queue('ship', 'no truck');
select rota.set_limit(job_type => 'pdf', max_running => 5);
select rota.schedule_job('poll', 'every 20 minutes', 'poll');
select rota.unschedule_job('nightly');
delete from rota.jobs as j where j.job_type = 'held';
select rota.tick();
"""


def everything(db: psycopg.Connection[Any]) -> dict[str, list[Any]]:
    """All rows but what they tell of the transaction that carried them."""
    tables = rows(
        db, "select c.relname from pg_class as c where c.relnamespace = 'rota'::regnamespace"
        " and c.relkind in ('r', 'p') and not c.relispartition and c.relname not in"
        " ('manifest', 'upgrade_log', 'stats_progress', 'count_progress', 'pending_checks')",
    )  # fmt: skip
    found = {
        name: rows(
            db, "select to_jsonb(t) - '{ended_by,own_place,hold}'::text[]"
            f" from rota.{name} as t order by to_jsonb(t)::text",
        )
        for name, in tables
    }  # fmt: skip
    # Of the install itself.
    db.execute("delete from rota.maintenance where task = 'tick alone'")
    found["maintenance"] = rows(db, "select * from rota.maintenance order by task")
    found["pending_checks"] = rows(
        db, "select distinct kind, subject from rota.pending_checks order by 1, 2"
    )
    return found


def test_what_changes_during_the_upgrade_is_carried_too(
    old: str, make: Callable[[Path | None], str], psql: Any, sql_dir: Path, server: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    """It is the same as if the upgrade had begun when all of it was over."""
    live(old)
    name = conninfo_to_dict(old)["dbname"]
    program = pg_dump(server.url(name))
    with psycopg.connect(old) as holder:
        holder.execute("lock table rota.jobs in row exclusive mode")
        thread = threading.Thread(target=upgrade, args=(psql, old, sql_dir))
        thread.start()
        with psycopg.connect(old, autocommit=True) as db:
            # All has been carried by now, and only the writers are in the way.
            wait_until(
                lambda: rows(
                    db, "select from pg_locks"
                    " where not granted and mode = 'ShareRowExclusiveLock'",
                ), "the last lock",
            )  # fmt: skip
            for statement in CHANGES.split(";\n"):
                if statement.strip():
                    db.execute(statement.encode())
        subprocess.run([program, "-Fc", "-f", tmp_path / "dump", server.url(name)], check=True)
    thread.join()
    copy = make(None)
    subprocess.run(
        ["pg_restore", "-d", server.url(conninfo_to_dict(copy)["dbname"]), tmp_path / "dump"],
        check=True,
    )
    upgrade(psql, copy, sql_dir)

    with psycopg.connect(server.url(name)) as db:
        carried = everything(db)
        assert rows(db, "select from rota.jobs where job_type = 'held'") == []
        assert rows(db, "select * from rota.verify() where violations > 0") == []
    with psycopg.connect(server.url(conninfo_to_dict(copy)["dbname"])) as db:
        expected = everything(db)
    # Checks that were left by a pass before may ask once more than has to be.
    assert set(carried.pop("pending_checks")) >= set(expected.pop("pending_checks"))
    for table, there in expected.items():
        assert carried[table] == there, table


# Where the connection breaks: behind the line of install.sql that begins so.
KILLS = [
    "\\ir upgrades/from_0_1_0/set_aside.sql\n\\endif\n",
    "\\ir tables/jobs.sql\n",
    "\\ir upgrades/from_0_1_0/carry_over.sql\n\\endif\n",
    "\\ir upgrades/from_0_1_0/switch_over.sql\n\\endif\n",
]


def killed_behind(lines: str, sql_dir: Path, folder: Path) -> Path:
    install = shutil.copytree(sql_dir, folder / "sql") / "install.sql"
    text = install.read_text()
    assert text.count(lines) == 1
    install.write_text(
        text.replace(lines, f"{lines}select pg_terminate_backend(pg_backend_pid());\n")
    )
    return install


@pytest.mark.long
@pytest.mark.parametrize("lines", KILLS, ids=lambda lines: lines.split()[1])
def test_an_upgrade_that_is_killed_leaves_0_1_0_as_it_was(
    lines: str, old: str, psql: Any, sql_dir: Path, server: Any, tmp_path: Path
) -> None:
    live(old)
    before = dump(server, old)

    done = psql(old, "-f", killed_behind(lines, sql_dir, tmp_path), check=False)

    assert done.returncode != 0
    assert dump(server, old) == before


@pytest.mark.long
def test_an_upgrade_that_is_killed_behind_its_commit_is_ended_by_the_next_install(
    old: str, make: Callable[[Path | None], str], psql: Any, sql_dir: Path, server: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    live(old)

    done = psql(old, "-f", killed_behind("\ncommit;\n\n", sql_dir, tmp_path), check=False)

    assert done.returncode != 0
    with psycopg.connect(old) as db:
        assert rows(db, "select to_regnamespace('rota_0_1_0') is not null") == [(True,)]
        jobs = rows(db, STORY)
    upgrade(psql, old, sql_dir)
    fresh = make(sql_dir / "install.sql")
    assert dump(server, old, "--schema-only") == dump(server, fresh, "--schema-only")
    with psycopg.connect(old) as db:
        assert rows(db, STORY) == jobs


@pytest.mark.long
def test_an_uninstall_leaves_nothing_of_an_upgrade_that_was_killed_behind_its_commit(
    old: str, psql: Any, sql_dir: Path, tmp_path: Path
) -> None:
    psql(old, "-f", killed_behind("\ncommit;\n\n", sql_dir, tmp_path), check=False)

    psql(old, "-f", sql_dir / "uninstall.sql")

    with psycopg.connect(old) as db:
        assert rows(db, "select nspname from pg_namespace where nspname ~ '^rota'") == []


@pytest.mark.long
def test_upgrades_at_once_take_turns(old: str, sql_dir: Path) -> None:
    """The first drops the old schema while the next, which finds it too, begins."""
    live(old)
    command = ["psql", "-X", "-q", "-d", old, "-f", str(sql_dir / "install.sql")]

    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [(process.communicate()[1], process.returncode) for process in running]

    assert [code for _, code in ended] == [0] * 3
    told = [line for errors, _ in ended for line in errors.splitlines()]
    assert all("waiting for another session" in line for line in told)
    with psycopg.connect(old) as db:
        assert rows(db, "select to_regnamespace('rota_0_1_0') is null") == [(True,)]


@pytest.mark.long
def test_how_long_calls_wait_for_the_upgrade(old: str, psql: Any, sql_dir: Path) -> None:
    """With half a million live jobs and as many ended: prints how long a call waits."""
    columns = "queue, job_type, payload, priority, max_attempts, status, run_at, created_at"
    values = "%s, 'a', '{}', 0, 10, %s, now(), now()"
    with psycopg.connect(old, autocommit=True) as db:
        db.execute(
            f"insert into rota.jobs ({columns})"
            f" select {values} from generate_series(1, 500000)", ("later", "queued"),
        )  # fmt: skip
        db.execute(
            f"insert into rota.finished_jobs ({columns}, id, attempts, lease_token, updated_at,"
            f" finished_at) select {values}, n, 1, 1, now(), now()"
            " from generate_series(100000001, 100500000) as n", ("old", "succeeded"),
        )  # fmt: skip
        db.execute("vacuum analyze rota.jobs, rota.finished_jobs")
    with OldClients(old, producers=1, workers=1) as clients:
        clients.wait_for(finished=100)
        began, calls = time.monotonic(), len(clients.waits)
        upgrade(psql, old, sql_dir)
        took, calls = time.monotonic() - began, len(clients.waits) - calls
        clients.wait_for(finished=20)

    sys.stderr.write(
        f"\nupgrade of 1,000,000 rows: {took:.1f} s, in which old clients made {calls} calls,"
        f" of which the longest took {max(clients.waits):.2f} s\n"
    )
    with psycopg.connect(old) as db:
        assert rows(
            db, "select count(*) filter (where queue = 'later'),"
            " count(*) filter (where queue = 'old') from rota.job_runs",
        ) == [(500000, 500000)]  # fmt: skip
    clients.check()
    assert max(clients.waits) <= 1
