"""The applications in examples/: their own tests pass, and one command starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psycopg
import pytest
from psycopg import sql

import rota
from rota.testing import EmbeddedPostgres

SOURCE = Path(rota.__file__).parents[1]
EXAMPLES = SOURCE.parent / "examples"

_numbers = count(1)
pytestmark = [pytest.mark.own_session, pytest.mark.slow]


@pytest.fixture
def environment(server: EmbeddedPostgres, admin: psycopg.Connection[Any]) -> dict[str, str]:
    """What an application is told, with a database that is empty."""
    name = f"shop{next(_numbers)}"
    admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    own = ("PYTEST_", "COV_", "PGOPTIONS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**kept, "PYTHONPATH": str(SOURCE), "DATABASE_URL": server.url(name)}


@pytest.mark.parametrize(
    ("app", "command"),
    [
        ("fastapi_app", ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rota-url"]),
        ("django_app", ["manage.py", "test"]),
    ],
)
def test_the_tests_of_an_application_pass(
    app: str, command: list[str], environment: dict[str, str]
) -> None:
    address = [environment["DATABASE_URL"]] if command[-1] == "--rota-url" else []

    done = subprocess.run(
        [sys.executable, *command, *address],
        cwd=EXAMPLES / app,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout or "Ran 5 tests" in done.stderr


def test_the_migration_of_django_leaves_a_database_alone_that_is_no_postgresql(
    environment: dict[str, str], tmp_path: Path
) -> None:
    files = "{'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}"
    (tmp_path / "two.py").write_text(f"from settings import *\nDATABASES['files'] = {files}\n")
    path = os.pathsep.join([environment["PYTHONPATH"], str(tmp_path), "."])

    done = subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--database", "files"],
        cwd=EXAMPLES / "django_app",
        env={**environment, "PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "two"},
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("app", ["fastapi_app", "django_app"])
def test_one_command_starts_an_application(
    app: str, environment: dict[str, str], tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(
            [sys.executable, "start.py", app],
            cwd=EXAMPLES,
            env={**environment, "PORT": str(port)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        base = f"http://127.0.0.1:{port}/orders"
        order = {"email": "ada@example.org", "total": 25}
        number = ask(started, base, json.dumps(order).encode())["id"]
        while not ask(started, f"{base}/{number}")["has_receipt"]:
            time.sleep(0.1)
    finally:
        started.terminate()
        code = started.wait(timeout=60)

    told = (tmp_path / "log").read_text()
    assert code == 0, told
    assert "send_receipt" in told


def ask(started: subprocess.Popen[bytes], url: str, body: bytes | None = None) -> Any:
    """Ask until there is an answer."""
    while True:
        assert started.poll() is None
        request = Request(url, body, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=10) as answer:
                return json.load(answer)
        except URLError as error:
            if "refused" not in str(error):
                raise
            time.sleep(0.1)
