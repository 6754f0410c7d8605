"""What the README says about ticking, tried as it is written."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
BINDIR = Path(os.path.normpath(sys.executable)).parent


def block(language: str, document: str = "README.md") -> str:
    """Return the one block of a document in this language."""
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S
    )
    return str(found)


def here(text: str, dsn: str) -> str:
    """Return the text with the database and the programs of this test."""
    return text.replace("postgresql:///shop", dsn).replace("/srv/shop/venv/bin", str(BINDIR))


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command meanwhile, in a process group of its own."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def wait_for_ticks(db: psycopg.Connection[Any], who: str) -> None:
    """Return when two ticks were recorded by a session of this name."""
    fresh = "select from rota.ticker_health where lag < '10 s' and last_tick_by like %s"
    for _ in range(2):
        db.execute("update rota.maintenance set done_at = '-infinity'")
        wait_until(lambda: db.execute(fresh, (f"{who} as %",)).rowcount, f"a tick by {who}")


@pytest.fixture
def unit(dsn: str, tmp_path: Path) -> Path:
    path = tmp_path / "rota-tick.service"
    path.write_text(here(block("ini"), dsn))
    return path


@pytest.mark.parametrize("document", ["README.md", "python_client/docs/deploying.md"])
def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path, dsn: str, document: str) -> None:
    unit.write_text(here(block("ini", document), dsn))
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd-analyze")
    home = {**os.environ, "XDG_RUNTIME_DIR": str(unit.parent)}

    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=home)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.slow
def test_command_of_the_unit_ticks_until_it_is_stopped(
    unit: Path, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    service = parser["Service"]
    name, _, value = service["Environment"].partition("=")

    # As systemd does: no shell, and next to nothing in the environment.
    command = shlex.split(service["ExecStart"])
    log = (tmp_path / "log").open("wb")
    with log, running(command, env={name: value}, stderr=log) as process:
        wait_for_ticks(db, "rota tick")

        process.terminate()
        ended = process.wait(10)

    assert ended == 0


@pytest.mark.slow
def test_line_of_the_crontab_ticks(dsn: str, db: psycopg.Connection[Any]) -> None:
    found = re.fullmatch(r"(?P<when>(?:\S+ ){5})(?P<command>.+)\n", block("crontab"))
    assert found
    assert found["when"] == "* * * * * "
    assert "%" not in found["command"]  # which cron would take for a new line

    # As cron does it.
    with running(["/bin/sh", "-c", here(found["command"], dsn)], env={"PATH": "/usr/bin:/bin"}):
        wait_for_ticks(db, "psql")
