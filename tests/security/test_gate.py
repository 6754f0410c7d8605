"""The SQL and the client are read for holes, and so is what the client depends on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

TESTS = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def run_gate(tree: Path) -> subprocess.CompletedProcess[str]:
    """Let it read another tree; this one it reads with `make lint`."""
    return subprocess.run(
        [TESTS / "security" / "gate.sh", tree],
        env={**os.environ, "BIN": str(BIN)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_every_hole_is_told(tmp_path: Path) -> None:
    for part in ("sql/base/clock.sql", "sql/access/grants.sql", "sql/flatten.awk",
        "sql/uninstall.sql", "sql/install.sql", "python_client/src/rota/job.py"):  # fmt: skip
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TESTS.parent / part, tmp_path / part)
    manifest = tmp_path / "sql/install.sql"
    others = r"(?m)^ *\\ir (?!base/clock|access/grants).*\n"
    manifest.write_text(re.sub(others, "", manifest.read_text()))
    clock, grants = (
        tmp_path / "sql" / part for part in ("base/clock.sql", "access/grants.sql")
    )
    path = "set search_path = pg_catalog, pg_temp"
    assert path in clock.read_text()
    clock.write_text(clock.read_text().replace(path, ""))
    with grants.open("a") as file:
        file.write("create table if not exists t ();")
    with (tmp_path / "python_client/src/rota/job.py").open("a") as file:
        file.write("\neval(input())\n")

    done = run_gate(tmp_path)

    assert done.returncode != 0
    assert [hole for hole in ("PS003", "PS012", "B307") if hole not in done.stdout] == []


def audit(*releases: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, TESTS / "security" / "audit.py", *releases],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2 and "AUDIT NOT MADE" in done.stderr:
        pytest.skip("PyPI did not answer, so nothing is known: `make audit`")
    return done


def test_what_the_client_depends_on_has_no_known_holes() -> None:
    done = audit()

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_hole_of_a_dependency_is_told() -> None:
    done = audit("pycrypto==2.6.1")

    assert done.returncode == 1, done.stdout + done.stderr
    assert "PYSEC-2018-97, mended in no version" in done.stdout


class Index(BaseHTTPRequestHandler):
    """Knows one project by its newest release 2.0, and has no page of any release."""

    def do_GET(self) -> None:
        is_known = self.path == "/pypi/known/json"
        self.send_response(200 if is_known else 404)
        self.end_headers()
        if is_known:
            self.wfile.write(b'{"info": {"version": "2.0"}}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("release", "status"), [("known/2.0", 200), ("known/1.9", 404), ("unknown/2.0", 404)]
)
def test_the_page_of_a_project_speaks_only_for_its_newest_release(
    release: str, status: int
) -> None:
    # It starts a process of pip, and each worker imports this file.
    from security.audit import Pages

    with HTTPServer(("127.0.0.1", 0), Index) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        answer = Pages().get(f"http://127.0.0.1:{server.server_port}/pypi/{release}/json")
        server.shutdown()

    assert answer.status_code == status


def test_an_audit_without_an_answer_does_not_pass(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, TESTS / "security" / "audit.py"],
        env={**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "psycopg 3" in done.stdout
    assert "AUDIT NOT MADE" in done.stderr


def test_the_audit_is_of_each_extra_that_a_user_may_choose() -> None:
    # Not imported here, for the same reason.
    from security.audit import installed

    of_extras = {"psycopg-pool", "starlette", "uvicorn", "jinja2", "opentelemetry-api"}
    of_extras |= {"prometheus-client", "rich", "shtab"}
    assert of_extras <= installed().keys()
    assert "ruff" not in installed()
