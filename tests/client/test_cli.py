"""The command line: what it prints, and what it returns."""

import argparse
import getpass
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import rota
from rota import Client, NotGrantedError, Registry, Worker
from rota.__main__ import main
from rota.cli.database import brief, figure
from rota.cli.jobs import STORY
from rota.cli.output import NAMES
from rota.cli.parser import make_parser
from rota.testing import EmbeddedPostgres, assert_enqueued
from support.clock import Clock
from support.mutation import mutate
from support.odd_rows import MOMENTS, add_odd_and_good
from support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _just_installed(db: psycopg.Connection[Any]) -> None:
    """A database in which nobody is late with the first tick, however long the tests run."""
    db.execute("update rota.upgrade_log set applied_at = clock_timestamp() where id = 0")


@pytest.fixture
def ask(
    dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Ask a question whose exit code is part of the answer; return it and what is printed."""
    monkeypatch.setenv("DATABASE_URL", dsn)

    def call(*words: str) -> tuple[int, str]:
        code = main(words)
        printed = capsys.readouterr()
        assert printed.err == ""
        return code, printed.out

    return call


def test_enqueue_and_job(run: Callable[..., str]) -> None:
    job_id = run(
        "enqueue", "send_mail", '{"user_id": 7}', "--delay", "1 hour", "--key", "k"
    ).strip()
    again = json.loads(run("enqueue", "send_mail", "--key", "k", "--json"))

    assert again == {"job_id": int(job_id), "is_new": False}
    job = json.loads(run("job", job_id, "--json"))
    assert job["payload"] == {"user_id": 7}
    assert job["status"] == "queued"
    assert "send_mail" in run("job", job_id)
    keys = ["--ordering-key", "o", "--limit-key", "l", "--key", "u", "--unique-for", "1 day"]
    limits = ["--time-limit", "30 s", "--expires-after", "1 hour"]
    other = run("enqueue", "other", *keys, *limits).strip()
    job = json.loads(run("job", other, "--json"))
    assert (job["ordering_key"], job["limit_key"]) == ("o", "l")
    assert job["time_limit"] is not None
    assert job["expires_at"] is not None
    (listed,) = json.loads(run("jobs", "--type", "other", "--json"))
    assert {name: job[name] for name in listed} == listed
    assert listed["idempotency_key"] == "u"
    run("cancel", other)
    assert run("enqueue", "other", *keys) == f"{other} (already exists)\n"


def test_a_long_error_is_not_told_whole_of_each_attempt(
    run: Callable[..., str], client: Client
) -> None:
    job_id = str(client.enqueue("a").job_id)
    for number in range(3):
        (job,) = client.claim_jobs("w")
        error = f"{number} {'x' * 2000}"
        client.fail_job(job.job_id, job.lease_token, error, retry_in=timedelta(0))

    shown, told = run("job", job_id), json.loads(run("job", job_id, "--json"))

    lines = [line for line in shown.splitlines() if " failed: " in line]
    assert [line[37:50] for line in lines] == [
        "failed: 0 xxx",
        "failed: 1 xxx",
        "failed: 2 xxx",
    ]
    assert all(line.endswith("x…") and len(line) < 350 for line in lines)
    assert [len(error["message"]) for error in told["errors"]] == [2002] * 3


def test_the_list_tells_why_jobs_were_cancelled(
    run: Callable[..., str], client: Client
) -> None:
    """One that failed before was not cancelled because of that."""
    client.enqueue("a", backoff={"kind": "fixed", "base_seconds": 60})
    (job,) = client.claim_jobs("w")
    client.fail_job(job.job_id, job.lease_token, "disk full", "OSError")
    assert run("jobs").splitlines()[1].endswith("OSError: disk full")

    client.cancel_job(job.job_id, "ordered twice")
    client.cancel_job(client.enqueue("b").job_id)

    assert [row["cancel_reason"] for row in json.loads(run("jobs", "--json"))] == [
        None,
        "ordered twice",
    ]
    head, without, cancelled = run("jobs").splitlines()
    assert cancelled.endswith("  ordered twice")
    assert "OSError" not in cancelled
    assert len(without) < head.index("error")


def test_lists_tell_the_year_of_what_is_far_away(run: Callable[..., str]) -> None:
    """A job for next year, perhaps by mistake, is not one for the coming days."""
    soon, far = (datetime.now(UTC) + timedelta(days=days) for days in (1, 366))
    for moment in (soon, far):
        run("enqueue", "a", "--run-at", moment.isoformat())
    run("schedule", "add", "leap", "0 0 29 2 *", "a", "--starts-at", f"{far.year + 1}-01-01")

    head, later, sooner = run("jobs").splitlines()

    assert "  when UTC " in head
    assert re.search(r"  20\d\d-\d\d-\d\d \d\d:\d\d:\d\d$", later)
    assert re.search(r"  \d\d-\d\d \d\d:\d\d:\d\d$", sooner)
    assert re.search(r"  20\d\d-02-29 00:00 \+0000 ", run("schedule", "list"))


def test_times_are_told_with_the_zone_of_the_session(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for moment in ("2031-07-01 12:00+00", "2032-01-01 12:00+00"):
        run("enqueue", "a", "--run-at", moment)
    monkeypatch.setenv("PGTZ", "Europe/Warsaw")

    head, winter, summer = run("jobs").splitlines()

    assert "  when CET " in head
    assert winter.endswith("  2032-01-01 13:00:00")
    assert summer.endswith("  2031-07-01 14:00:00 CEST")


def test_jobs_filters(run: Callable[..., str], client: Client) -> None:
    client.enqueue("a", queue="one")
    client.enqueue("b", queue="two")

    assert [job["job_type"] for job in json.loads(run("jobs", "--json"))] == ["b", "a"]
    assert [j["queue"] for j in json.loads(run("jobs", "--type", "a", "--json"))] == ["one"]
    assert len(json.loads(run("jobs", "--limit", "1", "--json"))) == 1
    assert run("jobs", "--status", "dead") == "(none)\n"
    run("schedule", "add", "nightly", "@daily", "c")
    job_id = int(run("schedule", "run", "nightly"))
    assert [j["id"] for j in json.loads(run("jobs", "--schedule", "nightly", "--json"))] == [
        job_id
    ]
    head, line = run("jobs", "--queue", "two").splitlines()
    assert head.index("job_type") == line.index("b ")


def test_retry_and_cancel(run: Callable[..., str], client: Client) -> None:
    job_id = str(client.enqueue("a").job_id)

    assert run("cancel", job_id, "--reason", "test") == f"job {job_id} is cancelled\n"
    assert run("retry", job_id) == f"job {job_id} is queued\n"
    client.claim_jobs("w")
    assert "heartbeat" in run("cancel", job_id)
    assert f"rota retry {job_id} --force" in run("retry", job_id, code=1)
    assert json.loads(run("retry", job_id, "--force", "--json"))["status"] == "queued"
    not_found = run("retry", "999999", code=1)
    assert not_found.startswith("rota: job 999999 not found (")
    assert run("cancel", "999999", code=1) == not_found
    assert run("job", "999999", code=1) == not_found
    (claim,) = client.claim_jobs("w")
    client.finish_job(claim.job_id, claim.lease_token)
    assert f"(To run it again: rota retry {job_id})" in run("cancel", job_id, code=1)


def test_status_and_tick(run: Callable[..., str], client: Client) -> None:
    client.enqueue("a", queue="mail")
    client.report_worker("w1", "host", 1, "0.2.0", ["mail"])

    status = json.loads(run("status", "--json"))

    assert status["version"] == rota.__version__
    assert [queue["queue"] for queue in status["queues"]] == ["mail"]
    assert [worker["worker"] for worker in status["workers"]] == ["w1"]
    assert "w1" in run("status")
    assert status["ticker"][0]["last_tick_at"] is None
    assert json.loads(run("tick", "--json"))["jobs_swept"] == 0
    (ticker,) = json.loads(run("status", "--json"))["ticker"]
    assert ticker["last_tick_by"] == "rota cli as postgres"


def test_status_and_top_tell_what_ended(
    run: Callable[..., str],
    ask: Callable[..., tuple[int, str]],
    client: Client,
    clock: Clock,
) -> None:
    clock.set("2026-03-27 12:00+00")
    client.enqueue_many([{"job_type": "send_mail", "queue": "mail"}] * 4)
    client.report_worker("w1", "host", 1, "0.2.0", ["mail"], concurrency=3)
    client.report_worker("w2", "host", 2, "0.2.0", ["other"])
    jobs = client.claim_jobs("w1", ["mail"], max_jobs=3)
    busy = run("top", "--once")
    for number, job in enumerate(jobs):
        clock.advance("1 second")
        if number:
            client.finish_job(job.job_id, job.lease_token)
        else:
            client.fail_job(
                job.job_id, job.lease_token, "mailbox full", retry_in=timedelta(hours=1)
            )
    clock.advance("58 seconds")
    run("tick")

    (hour,) = json.loads(ask("status", "--json")[1])["last_hour"]
    top = json.loads(run("top", "--json"))
    shown = run("top", "--once")

    assert (hour["attempts"], hour["failures"], hour["run_p95"]) == (3, 1, 3.0)
    assert "33.3 %" in ask("status")[1]
    assert [row["ready"] for row in top["queues"]] == [1]
    assert top["workers"][0]["worker"] == "w1"
    assert "ready 1, oldest 1 min 1 s; running 0; dead 0; 0.598 attempts a minute" in shown
    mail = next(line for line in shown.splitlines() if line.startswith("mail "))
    assert mail.split("  ")[-1].strip() == "3 s"
    assert [line.split()[:2] for line in busy.splitlines()[-2:]] == [["w1", "3/3"], ["w2", "0"]]
    assert [row["concurrency"] for row in top["workers"]] == [3, None]
    assert max(map(len, shown.splitlines())) <= 80


def test_figures_of_top_have_no_exponent() -> None:
    lengths = [timedelta(seconds=seconds) for seconds in (0.0123, 0.99981, 61.34)]

    assert [*map(brief, lengths)] == ["12.3 ms", "1000 ms", "61.3 s"]
    assert [*map(figure, (0.5, 999.4, 999.5, 123456.7))] == ["0.5", "999", "1000", "123457"]


def test_top_is_shown_until_q_is_pressed(dsn: str, db: psycopg.Connection[Any]) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "rota", "top", "-d", dsn, "--every", "0.05"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as process:
        seen = b""
        while seen.count(b"attempts a minute") < 2:
            seen += os.read(ours, 4096)
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name = 'rota cli'"
        )
        while b"attempts a minute" not in seen.partition(b"the database is lost")[2]:
            seen += os.read(ours, 4096)  # it has come back
        with db.transaction():
            db.execute("lock table rota.jobs")
            while b"another session has locked this" not in seen:
                seen += os.read(ours, 4096)
        while b"attempts a minute" not in seen.partition(b"another session has locked")[2]:
            seen += os.read(ours, 4096)
        os.write(ours, b"q")
        assert process.wait(10) == 0
    os.close(theirs)
    os.close(ours)


def test_what_watches_a_database_says_that_it_hangs(
    dsn: str,
    db: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`rota top` would go on to show what was, and a monitor learn nothing."""
    monkeypatch.setattr("rota.cli.database.PATIENCE", 0.5)
    program = "import sys; from rota.cli import database, main; database.PATIENCE = 0.5;"
    program += "main(['top', '--every', '0.05', '-d', sys.argv[1]])"
    hang = "perform pg_sleep(60) where current_setting('application_name') = 'rota cli';"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program, dsn],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as process:
        seen = b""
        while b"attempts a minute" not in seen:
            seen += os.read(ours, 4096)
        mutate(db, "now", "begin", f"begin {hang}")
        while b"the database is lost: no answer within 0.5 seconds" not in seen:
            seen += os.read(ours, 4096)
        os.write(ours, b"q")
        process.wait(10)
    os.close(theirs)
    os.close(ours)

    assert main(["doctor", "--check", "-d", dsn]) == 3
    assert capsys.readouterr().err == "rota: no answer within 0.5 seconds\n"


def test_a_tick_of_cron_does_not_wait_for_ever(
    dsn: str,
    db: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("rota.cli.database.LONGEST_TICK", 0.5)
    hang = "perform pg_sleep(60) where current_setting('application_name') = 'rota cli';"
    mutate(db, "now", "begin", f"begin {hang}")
    assert main(["tick", "-d", dsn]) == 1
    lost = "outcome unknown, the answer was lost: no answer within 0.5 seconds"
    assert lost in capsys.readouterr().err


def test_top_fits_the_terminal_with_the_worst_first(dsn: str, client: Client) -> None:
    client.enqueue("a", queue="worst")
    client.enqueue_many([{"job_type": "a", "queue": f"queue-{n:02}"} for n in range(15)])
    for n in range(12):
        client.report_worker(f"w{n}", "host", n, None, ["worst"])
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "rota", "top", "-d", dsn],
        stdin=theirs,
        stdout=theirs,
        env={**os.environ, "LINES": "24", "COLUMNS": "80"},
    ) as process:
        seen = b""
        while b"q quits" not in seen:
            seen += os.read(ours, 4096)
        os.write(ours, b"q")
        assert process.wait(10) == 0
    os.close(theirs)
    os.close(ours)

    screen = seen.decode().partition("\x1b[J")[2].splitlines()
    assert screen[0].startswith("rota in ")
    assert screen[-1].startswith("q quits")
    assert 20 <= len(screen) <= 24
    (first,) = [line for line in screen if line.startswith(("queue-", "worst"))][:1]
    assert first.startswith("worst ")


def test_status_shows_what_it_can_while_a_session_has_locked_a_table(
    ask: Callable[..., tuple[int, str]],
    client: Client,
    connect: Callable[..., psycopg.Connection[Any]],
) -> None:
    client.schedule_job("nightly", "0 2 * * *", "report")
    with connect(autocommit=False) as other:
        other.execute("lock table rota.jobs")

        code, shown = ask("status")

        pid = other.info.backend_pid
    assert code == 2
    assert shown.count(f"select pg_terminate_backend({pid});") == 1
    assert "queues\n(a session has locked a table that this reads)" in shown
    assert "ticker\nlast tick" in shown


def test_the_doctor_tells_once_who_has_locked_what_many_checks_read(
    ask: Callable[..., tuple[int, str]], connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    with connect(autocommit=False) as other:
        other.execute("lock table rota.jobs")

        code, shown = ask("doctor")

        pid = other.info.backend_pid
    assert code == 2
    assert shown.count(f"a table that it reads is locked by pid {pid} (role") == 1
    assert shown.count(f"pid {pid} has locked a table that it reads, too\n") > 5
    assert shown.count(f"select pg_terminate_backend({pid});") == 1


def test_status_says_that_nobody_ticks(
    ask: Callable[..., tuple[int, str]], clock: Clock
) -> None:
    clock.set("2026-03-27 12:00+00")
    ask("tick")
    clock.advance("5 minutes")
    fresh = ask("status")
    clock.advance("3 minutes")
    late = ask("status")

    assert fresh[0] == 2  # the clock of a test is not part of the install
    assert "no tick has run" not in fresh[1]
    assert late[0] == 2
    assert "\ncritical  no tick has run for 8 min: " in late[1]
    assert "select * from rota.tick();" in late[1]
    assert max(map(len, late[1].splitlines())) <= 80


def test_status_names_the_schedules_that_an_error_disabled(
    run: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    for name in ("broken", "stopped"):
        run("schedule", "add", name, "@daily", "a")
        run("schedule", "disable", name)
    before = run("status")
    db.execute(
        "update rota.job_definitions set disabled_by = null, last_error = 'no such zone'"
        " where name = 'broken'"
    )

    shown = run("status").partition("schedules disabled by an error\n")[2].splitlines()

    assert "disabled by an error" not in before
    assert shown[0].split() == ["name", "disabled_at", "last_error"]
    assert shown[1].startswith("broken  ")
    assert shown[1].endswith("  no such zone")


def test_status_shows_who_paused_a_queue(run: Callable[..., str], client: Client) -> None:
    client.enqueue("a", queue="mail")

    assert "queue mail is paused" in run("pause", "mail", "--reason", "the server moves")

    assert "the server moves" in run("status")
    (paused,) = json.loads(run("status", "--json"))["paused"]
    assert paused["queue"] == "mail"
    assert paused["paused_by"]
    assert paused["paused_at"]
    resumed = json.loads(run("resume", "mail", "--json"))
    assert resumed == {"queue": "mail", "was_paused": True, "is_paused": False}
    assert json.loads(run("status", "--json"))["paused"] == []
    assert "make it known with set_queue()" in run("pause", "nowhere", code=1)


def test_status_shows_due_jobs_by_type(run: Callable[..., str], client: Client) -> None:
    client.enqueue_many([{"job_type": "hello"}] * 2)
    client.enqueue("x", queue="mail")
    client.enqueue("later", delay=timedelta(hours=1))
    client.report_worker("w1", "host", 1, "0.2.0", ["mail"])
    client.report_worker("w2", "host", 2, "0.2.0", ["default"], ["other"])

    due = json.loads(run("status", "--json"))["due_jobs"]

    assert [(row["job_type"], row["due"], row["workers_of_type"]) for row in due] == [
        ("hello", 2, 0),
        ("x", 1, 1),
    ]


def test_status_of_many_queues_shows_the_worst(
    ask: Callable[..., tuple[int, str]], client: Client, db: psycopg.Connection[Any]
) -> None:
    client.enqueue_many([{"job_type": "a", "queue": f"q{n}"} for n in range(30)])
    db.execute("update rota.jobs set run_at = run_at - interval '1 hour' where queue = 'q7'")

    _, shown = ask("status")

    told = shown.splitlines()
    queues = told[told.index("queues") + 2 :]
    assert queues[0].startswith("q7 ")
    assert queues[20] == "the worst of 30; all: rota status --json"
    client.pause_queue("q7")
    _, shown = ask("top", "--once")
    assert shown.splitlines()[4].startswith("q7 (paused)  1 ")
    assert shown.splitlines()[24] == "and 10 more"


def test_status_and_top_leave_nothing_out_of_their_json_and_numbers(
    ask: Callable[..., tuple[int, str]], client: Client, clock: Clock
) -> None:
    clock.set("2026-03-27 12:00+00")
    client.enqueue_many([{"job_type": f"t{n}"} for n in range(25) for _ in "12"])
    claims = client.claim_jobs("w", max_jobs=50)
    for job in claims[::2]:
        client.finish_job(job.job_id, job.lease_token)
    left = claims[1::2]
    client.release_jobs([job.job_id for job in left], [job.lease_token for job in left])
    for number in range(12):
        client.report_worker(f"w{number}", "host", number, "0.2.0", ["default"])
    clock.advance("70 seconds")
    ask("tick")

    status = json.loads(ask("status", "--json")[1])
    told = ask("status")[1].splitlines()

    assert len(status["due_jobs"]) == 25
    assert len(status["last_hour"]) == 25
    for part in ("due jobs", "last hour"):
        place = told.index(part) + 22
        assert told[place] == "the worst of 25; all: rota status --json"
    shown = ask("top", "--once")[1]
    assert "; workers 12 " in " ".join(shown.split())
    assert re.findall("^and .*", shown, re.MULTILINE) == ["and 15 more", "and 2 more"]
    top = json.loads(ask("top", "--json")[1])
    assert (len(top["workers"]), len(top["job_types"])) == (12, 25)


def test_what_another_command_is_told_is_not_cut(
    run: Callable[..., str], client: Client
) -> None:
    name, key = "n" * 63, "invoice:" + "k" * 100
    client.schedule_job(name, "@daily", "a")
    client.enqueue("a")
    (claim,) = client.claim_jobs("w")
    client.record_effect("mail", key, claim.job_id, claim.lease_token)
    client.fail_job(claim.job_id, claim.lease_token, "half of it was sent")

    assert f"{name}  " in run("schedule", "list")
    assert f"mail   {key}  " in run("effects")


def test_a_value_that_fills_many_screens_is_cut(
    run: Callable[..., str], client: Client
) -> None:
    job_id = str(client.enqueue("a", {"text": "b" * 100000}).job_id)

    assert len(run("job", job_id)) < 4000
    assert len(run("job", job_id, "--json")) > 100000


@pytest.mark.parametrize(("silence", "count"), [("5 minutes", 1), ("7 minutes", 0)])
def test_status_counts_a_worker_that_is_idle(
    run: Callable[..., str],
    client: Client,
    db: psycopg.Connection[Any],
    silence: str,
    count: int,
) -> None:
    client.enqueue("x")
    client.report_worker("w1", "host", 1, "0.2.0", ["default"])
    db.execute("update rota.workers set last_seen_at = rota.now() - %s::interval", [silence])

    (due,) = json.loads(run("status", "--json"))["due_jobs"]

    assert due["workers_of_type"] == count


def test_status_tells_workers_that_are_gone(
    run: Callable[..., str], dsn: str, client: Client
) -> None:
    """One that was killed has not said so, but its session has ended."""
    client.enqueue("x")
    client.report_worker("here", "host", 1, "0.2.0", ["default"])
    with psycopg.connect(dsn, autocommit=True) as killed:
        for number in range(21):
            Client(killed).report_worker(
                f"killed{number}", "host", 2, "0.2.0", ["default"],
                backend_pid=killed.info.backend_pid,
            )  # fmt: skip
        assert "gone" not in run("status")

    def shown() -> str:
        return run("status")

    wait_until(lambda: "gone" in shown(), "its session ends")
    lines = {line.split()[0]: line for line in shown().splitlines() if line}
    assert "gone" not in lines["here"]
    assert "0.2.0    gone, " in lines["killed20"]
    assert json.loads(run("status", "--json"))["due_jobs"][0]["workers_of_type"] == 1
    assert "killed" not in run("top", "--once")


def test_status_says_which_worker_takes_no_more_jobs(
    run: Callable[..., str], client: Client
) -> None:
    client.report_worker("leaving", "host", 1, "0.2.0", ["default"], [])

    (line,) = (line for line in run("status").splitlines() if line.startswith("leaving"))
    assert line.endswith("default  none: it is stopping")


def test_status_says_how_old_its_numbers_are(
    run: Callable[..., str], client: Client, db: psycopg.Connection[Any]
) -> None:
    """Where there are very many jobs, ticks count them."""
    client.enqueue("x")
    assert "counted" not in run("status") + run("top", "--once")
    client.enqueue_many([{"job_type": "x", "payload": {"a": "a" * 1000}}] * 5000)
    while client.tick().has_more:
        pass
    db.execute("update rota.count_progress set counted_at = counted_at - interval '20 s'")

    assert "s ago: the table of jobs is large" in run("status")
    assert re.search("^rota in .*, counted 2[0-9] s ago$", run("top", "--once"), re.MULTILINE)


def test_observer_may_ask_for_the_status(
    dsn: str, db: psycopg.Connection[Any], run: Callable[..., str], client: Client
) -> None:
    role = f"watcher_{db.info.dbname}"
    db.execute(sql.SQL("create role {} login password 'w'").format(sql.Identifier(role)))
    for statement in client.grant_statements("observer", role):
        db.execute(statement.encode())
    try:
        url = make_conninfo(dsn, user=role, password="w")
        shown = run("status", "-d", url)
        assert rota.__version__ in shown
        assert "last tick" in shown
        client.enqueue("x", queue="mine")
        client.grant_queue(role, "mine", "observer")
        shown = run("status", "-d", url)
        assert "untold  no right to doctor(), which concerns all queues" in shown
        assert "mine   1" in shown
        told = json.loads(run("status", "--json", "-d", url))
        assert (told["verdict"], told["findings"]) == (None, None)
    finally:
        db.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(role)))


@pytest.mark.parametrize(
    ("words", "access"),
    [(["jobs"], "observer"), (["schedule", "add", "a", "every 5 s", "a"], "operator")],
    ids=["jobs", "schedule add"],
)
def test_a_role_without_rights_is_told_what_gives_them(
    dsn: str,
    db: psycopg.Connection[Any],
    run: Callable[..., str],
    words: list[str],
    access: str,
) -> None:
    role = f"stranger_{db.info.dbname}"
    db.execute(sql.SQL("create role {} login password 'w'").format(sql.Identifier(role)))
    try:
        told = run(*words, "-d", make_conninfo(dsn, user=role, password="w"), code=1)
    finally:
        db.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))

    assert "permission denied for schema rota" in told
    assert f"select rota.grant_statements('{access}', 'ROLE') returns" in told


def test_a_database_without_rota_is_no_front(
    db: psycopg.Connection[Any], run: Callable[..., str]
) -> None:
    db.execute("alter schema rota rename to elsewhere")

    told = run("status", code=1)

    assert told == (
        'rota: schema "rota" does not exist '
        "(Is rota installed in this database? Try: rota install)\n"
    )


def test_a_worker_without_rights_is_told_what_gives_those_of_a_worker(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    role = f"stranger_{db.info.dbname}"
    db.execute(sql.SQL("create role {} login password 'w'").format(sql.Identifier(role)))
    registry = Registry()
    registry.handler("a")(print)
    worker = Worker(make_conninfo(dsn, user=role, password="w"), registry)
    try:
        with pytest.raises(NotGrantedError, match=r"grant_statements\('worker', 'ROLE'\)"):
            worker.run(drain=True)
    finally:
        db.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


@pytest.mark.parametrize("password", ["ge@heim", "ge/heim", "@heim", "heim/"])
def test_a_password_that_is_not_encoded_is_no_host(
    run: Callable[..., str], password: str
) -> None:
    told = run("status", "-d", f"postgresql://shop:{password}@localhost:1/shop", code=2)

    assert "a password has %40 for @ and %2F for /" in told
    assert "heim" not in told


def test_database_may_be_a_bare_name(
    dsn: str, db: psycopg.Connection[Any], run: Callable[..., str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("PGHOST", db.info.host)
    monkeypatch.setenv("PGPORT", str(db.info.port))
    monkeypatch.setenv("PGUSER", db.info.user)
    monkeypatch.setenv("PGPASSWORD", db.info.password)

    assert db.info.dbname in run("status", "-d", db.info.dbname)


def test_uninstall(
    dsn: str, db: psycopg.Connection[Any], run: Callable[..., str], client: Client
) -> None:
    name = db.info.dbname

    assert "--yes" in run("uninstall", code=2)
    assert run("uninstall", "--yes") == f"rota is removed from {name}\n"
    assert run("uninstall", "--yes", code=1) == f"rota: rota is not installed in {name}\n"


@pytest.mark.own_session
@pytest.mark.usefixtures("trap_in_public")
def test_the_commands_run_nothing_that_somebody_has_put_into_public(
    ask: Callable[..., tuple[int, str]],
) -> None:
    """Of two operators of one name that fits better which takes what it is given as it is."""
    assert json.loads(ask("status", "--json")[1])["last_hour"]


def test_times_are_read_in_whatever_style_the_database_writes_them(
    run: Callable[..., str], client: Client, db: psycopg.Connection[Any], dsn: str
) -> None:
    for setting in ("datestyle = 'German, DMY'", "intervalstyle = 'sql_standard'"):
        db.execute(f"alter database {db.info.dbname} set {setting}")  # type: ignore[arg-type]
    client.schedule_job("nightly", "0 2 * * *", "a", jitter=timedelta(minutes=5))
    job_id = client.enqueue("a", {}, idempotency_key="k").job_id
    client.fail_job(job_id, client.claim_jobs("w")[0].lease_token, "broken")

    assert "nightly" in run("schedule", "list")
    for command in ("status", "jobs", "errors", "audit", "limits", "tick"):
        assert run(command)
    assert run("top", "--once")
    assert "broken" in run("job", str(job_id))
    assert assert_enqueued(dsn, "a", status="failed")


@pytest.mark.parametrize("logging", ["", "logging.config.dictConfig({'version': 1})"])
def test_worker_command(
    dsn: str, client: Client, db: psycopg.Connection[Any], tmp_path: Path, logging: str
) -> None:
    (tmp_path / "my_jobs.py").write_text(
        "import logging.config, rota\n"
        f"{logging}\n"
        "registry = rota.Registry()\n"
        "@registry.handler('a')\n"
        "def a(job): return job.payload\n"
    )
    client.enqueue("a", {"n": 1})

    command = [sys.executable, "-m", "rota", "worker", "my_jobs:registry", "--drain"]
    done = subprocess.run(
        [*command, "-d", dsn, "--log-format", "json", "--log-level", "INFO"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines if "event" in line] == ["claimed", "succeeded"]
    assert db.execute("select result from rota.finished_jobs").fetchone() == ({"n": 1},)


def test_a_worker_logs_an_await_that_a_handler_forgot(
    dsn: str, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "my_jobs.py").write_text(
        "import rota\n"
        "registry = rota.Registry()\n"
        "@registry.handler('a')\n"
        "async def a(job): job.set_progress(50)\n"
    )
    client.enqueue("a")

    command = [sys.executable, "-m", "rota", "worker", "my_jobs:registry", "--drain"]
    done = subprocess.run(
        [*command, "-d", dsn, "--log-format", "json"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )

    lines = [json.loads(line) for line in done.stderr.splitlines()]
    (told,) = [line["message"] for line in lines if line["logger"] == "py.warnings"]
    assert re.search(r"my_jobs\.py:4: .*set_progress' was never awaited", told)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such.module:registry", "(Run it where `import no_such` works, or set PYTHONPATH)"),
        ("shop/jobs:registry", "(Name a module, not a file, as in an import statement: "),
        ("./jobs:registry", "(Name a module, not a file, as in an import statement: "),
        ("jobs.py", "(Name a module, not a file, as in an import statement: "),
        ("json:registry", "rota: json has no attribute registry\n"),
        ("json", "rota: json has no attribute registry\n"),
        ("json:dumps", "rota: json:dumps is not a rota.Registry\n"),
        ("client.sample_handlers:empty", "rota: the registry has no handler\n"),
        (
            "client.sample_handlers:app",
            "(Name the registry: client.sample_handlers:registry or ",
        ),
        ("client.sample_handlers.empty", "(Name the registry: client.sample_handlers:empty)\n"),
    ],
)
def test_worker_needs_a_registry(run: Callable[..., str], spec: str, message: str) -> None:
    assert message in run("worker", spec, code=2)


def test_worker_without_django_tasks_says_how_to_go_without(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "django.tasks", None)
    monkeypatch.setitem(sys.modules, "django_tasks", None)
    for name in ("jobs", "tasks"):
        monkeypatch.delitem(sys.modules, f"rota.contrib.django.{name}", raising=False)

    told = run("worker", "rota.contrib.django.jobs:registry", code=2)

    assert "(Name a registry, --registry shop.jobs:registry; only Tasks need" in told


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--concurrency", "0", "concurrency must be at least 1, got 0"),
        ("--batch", "1001", "batch must be 1 to 1000, got 1001"),
        ("--lease", "0", "lease in seconds must be 0.001 to 2592000, got 0.0"),
        ("--lease", "-1", "lease must be a timedelta or seconds >= 0, got -1.0"),
        ("--lease", "inf", "lease must be a timedelta or seconds >= 0, got inf"),
        ("--grace-period", "-1", "grace_period must be at least 0, got -1.0"),
        ("--tick-interval", "0", "tick_interval must be at least 0.001, got 0.0"),
        ("--poll-interval", "nan", "poll_interval must be at least 0.001, got nan"),
        ("--queue", "a b", "queue must be 1 to 63 of the characters"),
        ("--queue", "mail,slow", "--queue names one queue: repeat it, instead of 'mail,slow'"),
        ("--name", "", "the length of name must be 1 to 255, got 0"),
    ],
)
def test_worker_settings_out_of_range(
    run: Callable[..., str], option: str, value: str, message: str
) -> None:
    error = run(
        "worker", "client.sample_handlers:registry", option, value, "-d", "port=1", code=2
    )

    assert error.startswith(f"rota: {message}")


@pytest.mark.parametrize(
    ("module", "line"), [("misspelt", "registry = rota.Registri()"), ("ends", "sys.exit(0)")]
)
def test_worker_says_where_the_handlers_fail_to_load(
    run: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    line: str,
) -> None:
    (tmp_path / f"{module}.py").write_text(f"import rota, sys\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert f"{module}.py:2" in run("worker", f"{module}:registry", code=2)


def test_the_log_of_a_worker_shows_how_the_handlers_fail_to_load(
    run: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What raises may be a library, and what is wrong the line that calls it."""
    (tmp_path / "refused.py").write_text(
        "import rota\nregistry = rota.Registry()\nregistry.task()(lambda: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    run("worker", "refused:registry", code=2)

    assert 'refused.py", line 3' in caplog.text
    caplog.clear()
    run("worker", "no_such_module:registry", code=2)
    assert not caplog.text


def test_used_wrongly(run: Callable[..., str]) -> None:
    assert "not JSON" in run("enqueue", "a", "{", code=2)
    assert run("enqueue", "", code=2).startswith("rota: job_type must be ")
    for words in (["no_such_command"], ["jobs", "--status", "ded"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jobs", "--limit", "0"], "argument --limit: must be 1 to 2147483647, got 0"),
        (["errors", "--limit", "-1"], "argument --limit: must be 1 to 2147483647, got -1"),
        (["audit", "--limit", "x"], "argument --limit: must be a whole number, got 'x'"),
        (["effects", "--limit", "0"], "argument --limit: must be 1 to"),
        (["limits", "--limit", "1.5"], "argument --limit: must be a whole number, got '1.5'"),
        (["cancel", "--all", "--limit", "0"], "argument --limit: must be 1 to"),
        (["job", "9223372036854775808"], "argument job_id: must be 1 to 9223372036854775807"),
        (["retry", "0"], "argument ID: must be 1 to"),
        (["top", "--every", "nan"], "argument --every: must be 0.001 to 86400 seconds"),
        (["enqueue", "a", "--priority", "40000"], "argument --priority: must be -32768 to"),
        (["jobs", "--older-than", "soon"], "--older-than: invalid input syntax for type int"),
        (["jobs", "--older-than", ""], "--older-than: invalid input syntax for type interval"),
        (["retry", "--all", "--older-than", "soon"], "--older-than must be a length of time"),
        (["errors", "--since", "often"], "--since: invalid input syntax for type interval"),
        (["audit", "--since", "often"], "--since: invalid input syntax for type interval"),
        (["enqueue", "a", "--delay", "soon"], "--delay is not valid: invalid input syntax"),
        (["enqueue", "a", "--run-at", "soon"], "--run-at is not valid: invalid input syntax"),
        (["enqueue", "a", "--queue", "a b"], "--queue must be 1 to 63 of the characters"),
        (["enqueue", "a", "--unique-for", "1 day"], "--unique-for needs a --key"),
        (
            ["enqueue", "a", "--delay", "1 s", "--run-at", "tomorrow"],
            "argument --run-at: not allowed with argument --delay",
        ),
        (["reschedule", "--all", "--delay", "-1 s"], "--delay must be"),
        (["move", "1", "--to", "a b"], "--to must be 1 to 63 of the characters"),
        (["pause", "mail", "--for", "long"], "--for: invalid input syntax for type interval"),
        (["pause", "mail", "--until", "1"], "--until: invalid input syntax for type timestamp"),
        (["pause", "mail", "--until=-infinity"], "--until: time out of range"),
        (["pause", "mail", "--for", "1000000 years"], "--for: timestamp out of range"),
        (["audit", "--since", "1000000 years"], "--since: timestamp out of range"),
        (
            ["jobs", "--older-than", "1 day", "--newer-than", "1000000 years"],
            "--older-than or --newer-than: timestamp out of range",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_exit_code_2_and_named_by_its_option(
    dsn: str,
    db: psycopg.Connection[Any],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    for more in ([], ["--json"]):
        try:
            code = main([*words, *more, "-d", dsn])
        except SystemExit as exit_:
            code = exit_.code
        *_, said = capsys.readouterr().err.splitlines()
        assert code == 2
        if more:
            assert json.loads(said)["error"].startswith(message)
            assert json.loads(said)["exit_code"] == 2
        else:
            assert said.startswith(f"rota: {message}")


def test_errors_are_json_where_the_answer_is(
    run: Callable[..., str], dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", "999", "--json", "-d", dsn]) == 1
    assert json.loads(capsys.readouterr().err) == {
        "error": "job 999 not found",
        "hint": "It never existed, retention has removed it, or its queue is not granted to"
        " the role.",
        "exit_code": 1,
    }
    assert main(["doctor", "--check", "--json", "-d", "port=1"]) == 3
    assert json.loads(capsys.readouterr().err)["exit_code"] == 3


@pytest.mark.parametrize("command", ["doctor", "verify"])
def test_who_could_not_ask_says_so_by_3(
    command: str, dsn: str, capsys: pytest.CaptureFixture[str], db: psycopg.Connection[Any]
) -> None:
    assert main([command, "-d", "port=1"]) == 3
    assert main([command, "-d", "postgres//x"]) == 3
    with pytest.raises(SystemExit) as caught:
        main([command, "--colour", "red"])
    assert caught.value.code == 3
    db.execute("drop schema rota cascade")
    assert main([command, "-d", dsn]) == 3


def test_verify_of_too_many_rows_could_not_ask(run: Callable[..., str]) -> None:
    assert "--max-rows must be" in run("verify", "--max-rows", "2000000000", code=3)


def test_install_and_uninstall_answer_in_json(
    run: Callable[..., str], db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = db.execute(
        "select nspowner::regrole::text from pg_namespace where nspname = 'rota'"
    ).fetchone()
    assert owner is not None
    monkeypatch.setenv("PGOPTIONS", f"-c role={owner[0]}")
    said = {"database": db.info.dbname, "version": rota.__version__}
    assert json.loads(run("install", "--json")) == said
    assert "create" in json.loads(run("install", "--dry-run", "--json"))["sql"]
    assert json.loads(run("uninstall", "--yes", "--json")) == said | {"version": None}


def test_doctor_answers_a_monitor_in_json(
    ask: Callable[..., tuple[int, str]], client: Client
) -> None:
    client.tick()
    code, line = ask("doctor", "--check", "--json")
    assert (code, json.loads(line)["severity"], json.loads(line)["wrong"]) == (0, "ok", 0)
    client.enqueue("a", queue="mail")
    client.pause_queue("mail")
    code, line = ask("doctor", "--check", "--json")
    found = json.loads(line)
    assert (code, found["severity"], found["finding"]) == (1, "warning", "queues")
    assert found["remedy"] == "select rota.resume_queue('mail');"


@pytest.mark.parametrize("mode", ["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["jobs", "--help"], ["jobs"]])
def test_what_cannot_be_written_is_a_failure_and_said_once(
    dsn: str, mode: str, words: list[str]
) -> None:
    environment = {**os.environ, "DATABASE_URL": dsn, "PYTHONUNBUFFERED": "1"}
    if mode == "buffered":
        del environment["PYTHONUNBUFFERED"]
    command = [sys.executable, "-m", "rota", *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
        )
    assert done.stderr == "rota: [Errno 28] No space left on device\n"
    assert done.returncode == 1

    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [
    ["jobs", "--error", "\udcff"], ["jobs", "--queue", "\udcff"],
    ["schedule", "show", "\udcff"], ["enqueue", "\udcff"],
], ids=ascii)  # fmt: skip
def test_bytes_that_are_no_text_are_wrong_usage(
    run: Callable[..., str], words: list[str]
) -> None:
    run(*words, code=2)


EVIL = (
    "a\x1b[2J\x1b]0;b\x07\nrota; all is well\rc\u202e\u061cd\x9b1m\u2028e\u200b\u200d\ufeff\xad"
)


@pytest.mark.parametrize("words", [
    ["jobs"], ["errors"], ["doctor"], ["explain", "1"], ["job", "1"], ["audit"], ["status"],
    ["retry", "--all", "--dry-run"], ["retry", "--all", "--yes"], ["top", "--once"],
    ["effects"], ["limits"],
], ids=" ".join)  # fmt: skip
def test_texts_of_jobs_cannot_command_the_terminal(
    client: Client,
    db: psycopg.Connection[Any],
    dsn: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.tick()
    client.set_limit(limit_key=f"{EVIL}:*", max_running=0)
    client.enqueue("x", {"text": EVIL}, ordering_key=EVIL, idempotency_key=EVIL)
    (claim,) = client.claim_jobs(EVIL)
    client.record_effect("mail", EVIL, claim.job_id, claim.lease_token)
    client.fail_job(
        claim.job_id, claim.lease_token, EVIL, error_type=EVIL, stack=EVIL, fatal=True
    )
    client.enqueue("x", limit_key=f"{EVIL}:1", ordering_key=f"{EVIL}2", idempotency_key=EVIL)
    client.pause_queue("default", EVIL)
    db.execute("select rota.cancel_job(%s, %s)", [client.enqueue("y").job_id, EVIL])

    main([*words, "-d", dsn])
    shown = capsys.readouterr()

    assert not any(line.startswith("rota; all is well") for line in shown.out.splitlines())
    assert (shown.out + shown.err).replace("\n", "").isprintable()


def test_lists_keep_their_columns_where_letters_are_two_columns_wide(
    run: Callable[..., str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wide(text: str) -> int:
        return sum(1 + (east_asian_width(letter) in "FW") for letter in text)

    for key in ("\u9867\u5ba2:\u4e00", "k:2"):
        client.set_limit(limit_key=key, max_running=7)
    client.enqueue("a", max_attempts=1)
    (claim,) = client.claim_jobs("w")
    client.fail_job(claim.job_id, claim.lease_token, "\u4f4f\u6240\u304c\u306a\u3044" * 40)

    limits = [line for line in run("limits").splitlines() if "0/7" in line]
    assert [wide(line.partition("0/7")[0]) for line in limits] == [13, 13]
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert columns - 2 < max(map(wide, run("jobs").splitlines())) <= columns
        said = [line for line in run("explain", "1").splitlines() if "select" not in line]
        assert columns - 2 < max(map(wide, said)) <= columns
        assert "".join(said).replace(" ", "").count("\u4f4f\u6240\u304c\u306a\u3044") >= 20


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_what_the_terminal_has_no_letter_for_is_shown_as_an_escape(
    dsn: str, client: Client, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.enqueue("a", ordering_key="\u0141\u00f3d\u017a", max_attempts=1)
    (claim,) = client.claim_jobs("w")
    client.fail_job(claim.job_id, claim.lease_token, "\u0142" * 200)

    for words in (["jobs"], ["job", str(claim.job_id)]):
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([*words, "-d", dsn]) == 0
        stream.flush()
        assert b"\\u0142" in written.getvalue()
    with pytest.raises(SystemExit):
        main(["--help"])


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_json_that_is_too_deep_is_said_in_one_line(
    dsn: str, client: Client, db: psycopg.Connection[Any],
    capsys: pytest.CaptureFixture[str], more: list[str],
) -> None:  # fmt: skip
    deep = '{"a":' * 12000 + "1" + "}" * 12000  # as deep as the server stores it
    try:
        json.loads(deep)
    except RecursionError:
        pass
    else:
        pytest.skip("this Python reads what is as deep")
    job_id = db.execute("select rota.enqueue('a', %s::jsonb)", [deep]).fetchall()[0][0]

    for words, code in (
        (["jobs", "--payload", deep], 2),
        (["enqueue", "a", deep], 2),
        (["retry", str(job_id), "--set", f"a={deep}"], 2),
    ):
        assert main([*words, *more, "-d", dsn]) == code
        (said,) = capsys.readouterr().err.splitlines()
        assert "deep" in said
        assert len(said) < 200
    assert main(["job", str(job_id), *more, "-d", dsn]) == 0  # of which all else can be read
    assert "RecursionError: " in capsys.readouterr().out


def test_a_time_limit_of_less_than_a_second_is_not_shown_as_none(
    run: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    db.execute("select rota.enqueue('a', time_limit => '300 ms')")

    assert re.search(r"^time_limit +300 ms$", run("job", "1"), re.M)


def test_a_number_that_python_does_not_read_hides_nothing(
    run: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    number = "9" * 5000
    payload = f'{{"n": {number}, "m": 17}}'
    ((job_id,),) = db.execute("select rota.enqueue('a', %s::jsonb)", [payload]).fetchall()
    db.execute("select rota.act_on_jobs('cancel', jsonb_build_object('payload', %s::jsonb))",
        [payload])  # fmt: skip

    assert json.loads(run("job", str(job_id), "--json"))["payload"] == {"n": number, "m": 17}
    (act,) = json.loads(run("audit", "--json"))
    assert act["filter"]["payload"]["n"] == number
    assert "cancel" in run("audit")


def test_who_acts_where_nothing_may_be_written_is_told_what_may_be_the_reason(
    run: Callable[..., str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.enqueue("a")
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_read_only=on")

    for words in (["retry", "1"], ["pause", "default"], ["enqueue", "a"], ["tick"]):
        told = run(*words, code=1)
        assert "primary" in told
        assert "default_transaction_read_only" in told


def test_long_names_are_cut_before_the_numbers_beside_them(
    run: Callable[..., str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = [f"tenant-{n}.invoices-of-the-european-customers" for n in (1, 2)]
    queues.append("tenant-1.invoices-of-the-european-partners")
    job_type = "send_invoice_reminder_emails_to_customers"
    for queue in queues:
        client.enqueue(job_type, queue=queue, max_attempts=1)
        (claim,) = client.claim_jobs("w", [queue])
        client.fail_job(claim.job_id, claim.lease_token, "the mail server is away")
        client.enqueue(job_type, queue=queue)
    client.tick()  # which counts them

    lists = {
        "jobs": r"id +status +queue +job_type +tries +when UTC +error$",
        "status": r"queue +job_type +attempts +failed +died +wait p95 +run p95$",
        "top --once": r"job type +queue +a min +failed +wait p95 +run p95$",
        f"retry --type {job_type} --dry-run": r"job_id +status +queue +job_type +last_error$",
    }
    monkeypatch.setenv("COLUMNS", "80")
    for words, head in lists.items():
        table = re.split(f"^{head}", run(*words.split()), flags=re.M)[1].split("\n\n")[0]
        lines = [line for line in table.splitlines() if "\u2026" in line]
        assert max(map(len, lines)) <= 80
        assert len({re.findall(r"\btenant\S+", line)[0] for line in lines}) == 3
    client.report_worker("web-1:4711:9f3c2a", "web-1", 1, None, queues, [job_type])
    assert re.search("^worker +version +seen +queues +job types$", run("status"), re.M)
    monkeypatch.setenv("COLUMNS", "200")
    for words in lists:
        assert all(name in run(*words.split()) for name in (*queues, job_type))


def test_lists_are_whole_in_a_pipe_and_else_as_wide_as_the_screen(
    run: Callable[..., str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "the mail server of the shop is away, and so is the one that stands in for it"
    client.enqueue("a", max_attempts=1)
    (claim,) = client.claim_jobs("w")
    client.fail_job(claim.job_id, claim.lease_token, error)

    monkeypatch.delenv("COLUMNS", raising=False)
    assert run("jobs").splitlines()[1].endswith(error)
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        line = run("jobs").splitlines()[1]
        assert (len(line), line[-1]) == (columns, "\u2026")
    monkeypatch.setenv("COLUMNS", "200")
    assert run("jobs").splitlines()[1].endswith(error)


# A page, a script for the shell, and a play for a person are no answers.
WITHOUT_JSON = {"rota web", "rota completion"}


def test_every_command_answers_in_json() -> None:
    def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
        groups = [
            action for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        ]  # fmt: skip
        for group in groups:
            for command in group.choices.values():
                yield from commands(command)
        if not any(group.required for group in groups):
            yield parser

    lacking = {
        command.prog for command in commands(make_parser())
        if "--json" not in command._option_string_actions
    }  # fmt: skip
    assert lacking == WITHOUT_JSON


@pytest.mark.parametrize("words", [[], ["schedule"], ["front"], ["queue"]])
def test_who_names_no_command_is_told_which_there_are(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)

    told = capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    assert told.startswith(capsys.readouterr().out)
    assert told.splitlines()[-1].startswith("rota: the following arguments are required: ")


@pytest.mark.parametrize("columns", ["80"])
def test_every_help_fits_on_80_columns(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    seen = 0

    def check(parser: argparse.ArgumentParser) -> None:
        nonlocal seen
        seen += 1
        wide = [line for line in parser.format_help().splitlines() if len(line) > 80]
        assert wide == [], parser.prog
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    check(each)

    check(make_parser())
    assert seen > 40


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cret@127.0.0.1:1/db",
        "postgres//me:s3cret@x",
        "password=s3cret port=1 =",
    ],
)
def test_errors_show_no_password(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "-d", url]) in (1, 2)

    printed = capsys.readouterr()
    assert "s3cret" not in printed.out + printed.err
    assert printed.err.count("\n") == 1


def test_missing_schema_has_a_hint(
    dsn: str, db: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    db.execute("drop schema rota cascade")

    assert main(["status", "-d", dsn]) == 1
    assert "rota install" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rota {rota.__version__}\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "exit codes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["worker", "--help"])
    assert "SIGTERM (default: 20.0)" in " ".join(capsys.readouterr().out.split())


def test_a_command_works_where_nobody_reads_its_output(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python does if it is closed

    assert main(["status", "-d", dsn]) == 0


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-"])
def test_commands_do_the_same_where_a_standard_file_is_closed(
    dsn: str, client: Client, db: psycopg.Connection[Any], closed: str
) -> None:
    client.enqueue_many([{"job_type": "a", "delay": 60}] * 1200)
    words = (["top"], ["pause", "default"], ["retry", "--status", "queued", "--yes"])
    for command in words:
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "rota", *command],
            env={**os.environ, "DATABASE_URL": dsn},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        assert bool(done.stdout) == (closed != "1>&-")
    left = "select count(*) from rota.jobs where run_at > rota.now()"
    assert db.execute(left).fetchone() == (0,)


def test_help_has_no_escapes_where_python_would_colour_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal

    for words in (["--help"], ["worker", "--help"], ["worker", "--nonsense"]):
        with pytest.raises(SystemExit):
            main(words)
        printed = capsys.readouterr()
        assert "usage: rota " in printed.out + printed.err


@pytest.mark.parametrize(
    ("words", "lock"),
    [
        (["retry", "ID"], "select from rota.jobs for update"),
        (["cancel", "ID"], "select from rota.jobs for update"),
        (["pause", "default"], "select from rota.pauses for update"),
        (["enqueue", "a", "--key", "k"], None),
        (["top", "--once"], "lock table rota.jobs in access exclusive mode"),
        (["jobs"], "lock table rota.jobs in access exclusive mode"),
        (["job", "ID"], "lock table rota.jobs in access exclusive mode"),
        (["errors"], "lock table rota.job_errors in access exclusive mode"),
        (["audit"], "lock table rota.audit_log in access exclusive mode"),
        (["pause", "default", "--dry-run"], "lock table rota.jobs in access exclusive mode"),
        (["limits"], "lock table rota.jobs in access exclusive mode"),
        (["schedule", "list"], "lock table rota.jobs in access exclusive mode"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_does_not_wait_for_a_lock_for_long(
    run: Callable[..., str],
    client: Client,
    db: psycopg.Connection[Any],
    connect: Callable[..., psycopg.Connection[Any]],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    lock: Any,
) -> None:
    """Another session holds the row, or has just enqueued a job with the same key."""
    monkeypatch.setattr("rota.cli.output.LOCK_TIMEOUT", "set local lock_timeout = '200ms'")
    job_id = str(client.enqueue("a").job_id)
    db.execute("select rota.pause_queue('default')")
    with connect(autocommit=False) as other:
        if lock:
            other.execute(lock)
        else:
            Client(other).enqueue("a", idempotency_key="k")

        error = run(*(job_id if word == "ID" else word for word in words), code=1)
        other_pid = other.info.backend_pid
        other.rollback()

    if words[0] in ("retry", "cancel"):
        assert error.startswith(f"rota: job {job_id} is locked by pid ")
        assert f"pid {other_pid} (role postgres" in error
        assert f"or end that session: select pg_terminate_backend({other_pid});" in error
    else:
        assert error.startswith("rota: another session has locked this: the oldest")
        assert f"pid {other_pid} (role postgres" in error
    assert "(Nothing was done. Try again, or end that session" in error
    assert db.execute("select count(*) from rota.jobs").fetchone() == (1,)


def test_a_command_names_who_waits_to_change_a_table(
    run: Callable[..., str], client: Client, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    """A migration waits behind a reader, and a producer, which began before it, behind that."""
    client.enqueue("a")
    with connect(autocommit=False) as reader, connect(autocommit=False) as producer:
        reader.execute("select from rota.jobs")
        producer.execute("select from rota.set_queue('default', lease => '1 minute')")
        with connect(autocommit=False) as migration, ThreadPoolExecutor() as threads:
            change = threads.submit(migration.execute, "lock table rota.jobs")
            wait_until(lambda: _waits(reader, migration), "the migration waits")
            enqueued = threads.submit(Client(producer).enqueue, "a")
            wait_until(lambda: _waits(reader, producer), "the producer waits")

            error = run("jobs", code=1)

            pid = migration.info.backend_pid
            reader.execute("select pg_terminate_backend(%s)", [pid])
            with pytest.raises(psycopg.errors.AdminShutdown):
                change.result()
            assert enqueued.result().is_new
    assert f"the oldest that writes there is pid {pid} (role postgres" in error


def test_a_command_names_no_session_of_another_database(
    run: Callable[..., str],
    connect: Callable[..., psycopg.Connection[Any]],
    admin: psycopg.Connection[Any],
    server: EmbeddedPostgres,
    template: str,
) -> None:
    """Its tables have the same numbers in a copy."""
    admin.execute(f"create database twin template {template}".encode())
    try:
        with psycopg.connect(server.url("twin")) as stranger:
            stranger.execute("lock table rota.jobs")
            with connect(autocommit=False) as own:
                own.execute("lock table rota.jobs")

                error = run("jobs", code=1)

                assert f"the oldest that writes there is pid {own.info.backend_pid} " in error
    finally:
        admin.execute("drop database twin with (force)")


def _waits(db: psycopg.Connection[Any], session: psycopg.Connection[Any]) -> bool:
    pid = session.info.backend_pid
    found = db.execute("select from pg_locks where pid = %s and not granted", [pid])
    return bool(found.fetchall())


def test_the_database_may_stand_before_the_command(
    dsn: str, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("DATABASE_URL", "port=1")

    assert main(["-d", dsn.replace("postgresql://", "postgresql+psycopg://"), "jobs"]) == 0
    assert main(["jobs", "-d", dsn]) == 0


def test_who_names_no_database_is_told_how_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGPORT", "1")

    for _ in range(2):
        assert main(["jobs"]) == 1
        assert "(Name the database: -d " in capsys.readouterr().err
        monkeypatch.setenv("DATABASE_URL", "")  # as of a variable that is not there
    for words in (["jobs", "--database"], ["front", "status", "--front"]):
        assert main([*words, "dbname=x"]) == 1
        assert "Name the database" not in capsys.readouterr().err


def test_effects_lists_what_nobody_knows(run: Callable[..., str], client: Client) -> None:
    client.enqueue_many([{"job_type": "send"}] * 3)
    done, failed, running = client.claim_jobs("w", max_jobs=3)
    for job, key in ((done, "a"), (failed, "b"), (running, "c")):
        client.record_effect("mail", key, job.job_id, job.lease_token)
    client.complete_effect("mail", "a", done.job_id, done.lease_token)
    client.finish_job(done.job_id, done.lease_token)
    assert run("effects") == "(none)\n"

    client.fail_job(failed.job_id, failed.lease_token, "half of it was sent")

    (row,) = json.loads(run("effects", "--json"))
    assert (row["scope"], row["key"], row["job_id"]) == ("mail", "b", failed.job_id)
    assert (row["job_type"], row["status"]) == ("send", "failed")


def test_explain_says_what_decides_and_what_helps(
    run: Callable[..., str], client: Client
) -> None:
    job_id = client.enqueue("charge", queue="billing").job_id
    client.pause_queue("billing", reason="the bank is down, and will be until tomorrow noon")

    shown = run("explain", str(job_id))

    head, empty, first, second, remedy, *_ = shown.splitlines()
    assert head == f"job {job_id}, charge in queue billing, is queued"
    assert empty == ""
    assert first.startswith("queue_paused  queue billing was paused by role postgres")
    assert second.startswith("              ")
    assert remedy.strip() == "select rota.resume_queue('billing');"
    assert max(map(len, shown.splitlines())) <= 80
    found = json.loads(run("explain", str(job_id), "--json"))
    assert [row["reason"] for row in found] == ["queue_paused", "no_worker", "next"]
    assert run("explain", "999999", code=1).startswith("rota: job 999999 not found (")


def test_doctor_tells_the_worst_first_and_by_its_exit_code(
    ask: Callable[..., tuple[int, str]], client: Client, clock: Clock
) -> None:
    client.tick()
    client.enqueue("a", queue="mail")
    client.pause_queue("mail")
    clock.advance("1 hour")

    code, shown = ask("doctor")
    check, line = ask("doctor", "--check")

    assert (code, check) == (2, 2)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0].startswith("critical ticker no tick has run for 1 h: expired")
    assert "select * from rota.tick();" in lines
    assert any(line.startswith("warning queues queue mail was paused") for line in lines)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.endswith(" checks found nothing\n")
    assert line.startswith("CRITICAL ticker: no tick has run for 1 h: expired")
    wrong = json.loads(ask("doctor", "--check", "--json")[1])["wrong"]
    assert line.endswith(f"; other findings: {wrong - 1}\n")
    assert line.count("\n") == 1
    assert "ok sequences" in ask("doctor", "--all")[1]
    first, *_ = json.loads(ask("doctor", "--json")[1])
    assert (first["severity"], first["finding"]) == ("critical", "ticker")


def test_status_tells_the_worst_first(
    ask: Callable[..., tuple[int, str]], client: Client, clock: Clock
) -> None:
    client.tick()
    client.enqueue("a", queue="mail")
    (claim,) = client.claim_jobs("w", ["mail"])
    client.finish_job(claim.job_id, claim.lease_token)
    client.pause_queue("mail")
    client.pause_type("a")
    clock.advance("1 hour")  # so a tick is lacking, and what it would have counted

    _, shown = ask("status")

    severities = re.findall("^(critical|warning) ", shown, re.M)
    found = [row["severity"] for row in json.loads(ask("doctor", "--json")[1])]
    assert severities == [severity for severity in found if severity != "ok"][:3]


def test_doctor_of_a_sound_database_returns_0(
    ask: Callable[..., tuple[int, str]], client: Client
) -> None:
    client.tick()

    assert ask("doctor") == (0, "24 of 24 checks found nothing\n")
    assert ask("doctor", "--check") == (0, "OK all is well\n")
    client.enqueue("a", queue="mail")
    client.pause_queue("mail")
    code, line = ask("doctor", "--check")
    assert (code, line[:37]) == (1, "WARNING queues: queue mail was paused")


def test_doctor_that_cannot_ask_returns_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--check", "-d", "port=1"]) == 3
    assert capsys.readouterr().err.startswith("rota: ")


def test_verify_tells_which_promise_is_broken(
    ask: Callable[..., tuple[int, str]], client: Client, db: psycopg.Connection[Any]
) -> None:
    job_id = client.enqueue("a").job_id
    code, shown = ask("verify")
    assert code == 0
    assert shown.startswith(
        "kept  a job is live or has ended, and never both: 0 of 1 violate it\n"
    )

    db.execute("update rota.jobs set attempts = 99")

    code, shown = ask("verify", "--max-rows", "5")
    assert code == 1
    assert (
        "BROKEN a job has at most max_attempts attempts: 1 of 1 violate it,"
        f" such as: job {job_id} had" in " ".join(shown.split())
    )
    assert sum(row["violations"] for row in json.loads(ask("verify", "--json")[1])) == 1


def test_jobs_are_found_by_whatever_is_known_of_them(
    run: Callable[..., str], client: Client, db: psycopg.Connection[Any]
) -> None:
    wanted = client.enqueue("a", {"user": {"id": 7}, "n": 1}, idempotency_key="k").job_id
    second = client.enqueue("a", {"user": {"id": 8}}, ordering_key="o").job_id
    third = client.enqueue("a").job_id
    (claim,) = client.claim_jobs("w")
    client.fail_job(claim.job_id, claim.lease_token, "Disk Full at 7", error_type="OSError")
    db.execute(
        "update rota.jobs set created_at = created_at - interval '2 hours' where id = %s",
        [wanted],
    )

    def found(*words: str) -> list[int]:
        return [job["id"] for job in json.loads(run("jobs", *words, "--json"))]

    assert found("--payload", '{"user": {"id": 7}}') == [wanted]
    assert found("--key", "k") == found("--error", "Disk Full at 8") == [wanted]
    assert found("--error", "OSError: Disk Full at 8") == [wanted]
    assert found("--error-type", "OSError") == found("--older-than", "1 hour") == [wanted]
    assert found("--ordering-key", "o") == [second]
    assert found("--status", "failed", "--status", "blocked") == [wanted]
    assert found("--newer-than", "1 hour") == [third, second]
    assert found("--before", str(third), "--limit", "1") == [second]
    assert "not JSON" in run("jobs", "--payload", "{", code=2)
    shown = run("jobs", "--limit", "2")
    assert shown.endswith(f"for more: --before {second}\n")
    assert "OSError: Disk Full at 7" in run("jobs", "--status", "failed")


def test_jobs_that_are_hard_to_find_are_not_looked_for_for_ever(
    run: Callable[..., str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.cli.jobs.PATIENCE", "set statement_timeout = '1ms'")
    client.enqueue_many([{"job_type": "a"}] * 5000)

    assert "--before ID" in run("jobs", "--error", "nowhere", code=1)


def test_job_tells_its_story(run: Callable[..., str], client: Client) -> None:
    parent = client.enqueue("load").job_id
    child = client.enqueue("report", depends_on=[parent], if_parent_dead="wait").job_id
    (first,) = client.claim_jobs("w")
    client.fail_job(
        parent, first.lease_token, "no\nroute", error_type="OSError", retry_in=timedelta(0)
    )
    (again,) = client.claim_jobs("w2")
    client.fail_job(parent, again.lease_token, "gone", stack="Traceback ...", fatal=True)
    run("discard", str(parent), "--yes")

    shown = run("job", str(parent))

    assert shown.startswith(
        f"job {parent}, load in queue default, is dead\n\ndead  it is dead:"
    )
    story = shown.partition("history\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split("  ", 1)[1] for line in story] == [
        "enqueued",
        "attempt 1 began on w",
        "attempt 1 failed: OSError: no route",
        "attempt 2 began on w2",
        "attempt 2 failed: gone",
        "dead",
        f"discard by {getpass.getuser()}",
    ]
    assert f"{child}  " in shown.partition("dependants\n")[2]
    assert shown.endswith("\n  Traceback ...\n")
    told = json.loads(run("job", str(child), "--json"))
    assert [row["job_id"] for row in told["depends_on"]] == [parent]
    assert told["reasons"][0]["reason"] == "waits_for_job"


@pytest.mark.parametrize("name", STORY)
def test_the_story_of_a_job_reads_no_other_jobs(
    db: psycopg.Connection[Any], client: Client, name: str
) -> None:
    db.execute("""
        insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,
            status, run_at, attempts, lease_token, created_at, updated_at, finished_at)
        select n, 'q', 'x', '{}', 0, 1, 'succeeded', now(), 1, n, now(), now(), now()
        from generate_series(-20000, -1) as n
    """)
    parents = [client.enqueue("load").job_id for _ in range(2)]
    child = client.enqueue("report", depends_on=parents).job_id
    client.enqueue("mail", depends_on=[child])
    db.execute("analyze rota.finished_jobs")

    query = sql.SQL("explain (analyze, buffers, format json) " + STORY[name])
    ((plan,),) = db.execute(query.format(views=sql.Identifier("rota")), [child]).fetchall()

    top = plan[0]["Plan"]
    assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 100


def test_errors_are_listed_by_kind(run: Callable[..., str], client: Client) -> None:
    client.enqueue_many([{"job_type": "load"}] * 3)
    for number, claim in enumerate(client.claim_jobs("w", max_jobs=3)):
        text = f"row {number} of 'file {number}'" if number < 2 else "disk full"
        client.fail_job(claim.job_id, claim.lease_token, text, error_type="E")

    most, least = json.loads(run("errors", "--json"))

    assert (most["failures"], most["jobs"], most["message"]) == (2, 2, "row N of '...'")
    assert least["message"] == "disk full"
    assert most["last_message"] == "row 1 of 'file 1'"
    shown = " ".join(run("errors", "--type", "load").split())
    assert "E: row N of '...' (load in queue default, 2 jobs, last " in shown
    assert f"such as job {most['last_job_id']}: row 1 of 'file 1')" in shown
    assert "E: disk full (load in queue default, 1 job, last " in shown
    assert f"such as job {least['last_job_id']})" in shown
    assert run("errors", "--queue", "other") == "(none)\n"


def test_an_error_in_many_queues_is_one_line(run: Callable[..., str], client: Client) -> None:
    queues = ["of-a", "of-b"]
    for queue in queues:
        client.enqueue("load", queue=queue)
        (claim,) = client.claim_jobs("w", [queue])
        client.fail_job(claim.job_id, claim.lease_token, "disk full")

    (group,) = json.loads(run("errors", "--json"))
    assert (group["jobs"], group["queues"]) == (2, queues)
    assert "disk full (load in 2 queues, 2 jobs" in " ".join(run("errors").split())
    assert "(load in queue of-b, 1 job" in " ".join(run("errors", "--queue", "of-b").split())


def test_audit_shows_whole_what_an_undo_needs(
    run: Callable[..., str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    reason = "the mail provider is down until the größere Störung of this night has ended"
    client.enqueue_many([{"job_type": "send_mail", "queue": "mail"}] * 2)
    assert run("audit") == "(none)\n"
    run("cancel", "--type", "send_mail", "--queue", "mail", "--reason", reason, "--yes")

    lines = run("audit").splitlines()

    assert max(map(len, lines)) <= 80
    told = " ".join(line[20:] for line in lines)
    assert told.startswith(f"cancel by {getpass.getuser()}, 2 jobs: {{")
    assert '"job_type": "send_mail"' in told
    assert f'-> {{"reason": "{reason}"}}' in told


def test_limits_tell_how_many_wait(run: Callable[..., str], client: Client) -> None:
    client.set_limit(job_type="a", max_running=2)
    client.tick()
    client.enqueue_many([{"job_type": "a"}] * 3)
    client.claim_jobs("w")

    (limit,) = json.loads(run("limits", "--json"))

    assert (limit["limit_name"], limit["running"], limit["waiting"]) == ("type a", 1, 2)
    assert "type a  1/2      2" in run("limits")


def test_limits_tell_a_rate_and_when_they_leave_out_any(
    run: Callable[..., str], client: Client
) -> None:
    client.set_limit(job_type="a", max_starts=2, per=timedelta(hours=1), burst=1)
    client.set_limit(job_type="b", max_starts=5, per=timedelta(milliseconds=50))
    client.tick()
    client.enqueue_many([{"job_type": "a"}] * 2)
    client.claim_jobs("w", max_jobs=2)

    most, least = run("limits").splitlines()[1:]

    assert re.match(r"type a  1/-      1 +2 in 1 h    \d\d-\d\d \d\d:\d\d:\d\d UTC$", most), (
        most
    )
    assert re.match(r"type b  0/-      0 +5 in 50 ms *$", least), least
    few = run("limits", "--limit", "1").splitlines()
    assert [few[1].split()[:2], few[2:]] == [["type", "a"], ["there may be more: --limit"]]


@pytest.mark.parametrize("words", ["errors", "effects", "audit", "limits", "schedule list"])
def test_a_list_says_when_it_may_leave_something_out(
    run: Callable[..., str], client: Client, words: str
) -> None:
    for name in ("a", "b"):
        client.enqueue(name, limit_key=name, max_attempts=1)
        client.set_limit(limit_key=name, max_running=1)
        client.schedule_job(name, "@daily", name)
        client.tick()
        (claim,) = client.claim_jobs("w")
        client.record_effect("mail", name, claim.job_id, claim.lease_token)
        client.fail_job(claim.job_id, claim.lease_token, name)

    assert "\nthere may be more: --limit\n" in run(*words.split(), "--limit", "1")
    assert "there may be more" not in run(*words.split())


def test_a_job_says_that_more_wait_for_it(run: Callable[..., str], client: Client) -> None:
    parent = client.enqueue("a").job_id
    client.enqueue_many([{"job_type": "b", "depends_on": [parent]}] * 99)
    assert "the first 100" not in run("job", str(parent))
    client.enqueue_many([{"job_type": "b", "depends_on": [parent]}] * 2)

    assert "\nthe first 100; all: rota.dependencies\n" in run("job", str(parent))


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_python_cannot_hold_hides_no_row_beside_it(
    ask: Callable[..., tuple[int, str]], db: psycopg.Connection[Any], moment: str
) -> None:
    waiting = add_odd_and_good(db, moment)

    for words in (
        "jobs",
        "errors",
        "effects",
        "schedule list",
        "audit",
        "status",
        "top --once",
    ):
        for more in ([], ["--json"]):
            code, printed = ask(*words.split(), *more)
            assert code == 0 or words == "status"  # of which the doctor decides
            assert "good" in printed or (words == "audit" and str(waiting) in printed)
