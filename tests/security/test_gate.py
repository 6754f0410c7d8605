"""The SQL and the client are read for holes, and so is what the client depends on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def run(script: str, *arguments: Path, bin_: Path = BIN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TESTS / script, *arguments],
        env={**os.environ, "BIN": str(bin_)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_is_to_be_said_of_the_sql_and_the_client() -> None:
    done = run("security/gate.sh")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Errors: 0 Warnings: 0 Unknown: 0") == 3


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("sql/30_clock.sql", "set search_path = pg_catalog, pg_temp", "", "PS003"),
        ("sql/90_grants.sql", "", "create table if not exists t ();", "PS012"),
        ("python_client/src/rota/_job.py", "", "\neval(input())\n", "B307"),
    ],
)
def test_a_hole_is_told(tmp_path: Path, file: str, old: str, new: str, told: str) -> None:
    for part in ("sql", "python_client/src"):
        shutil.copytree(TESTS.parent / part, tmp_path / part)
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(text.replace(old, new) if old else text + new)

    done = run("security/gate.sh", tmp_path)

    assert done.returncode != 0
    assert told in done.stdout


def test_what_the_client_depends_on_has_no_known_holes() -> None:
    done = run("audit.sh")

    if done.returncode == 2:
        pytest.skip("the index of PyPI did not answer, so nothing is known: `make audit`")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("told", "code", "expected"),
    [
        ("No known vulnerabilities found", 0, 0),
        ("Found 2 known vulnerabilities in 1 package", 1, 1),
        ("Dependency not found on PyPI", 1, 2),
    ],
)
def test_audit_passes_only_if_it_was_made_and_found_nothing(
    tmp_path: Path, told: str, code: int, expected: int
) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "pip-audit").write_text(f"#!/bin/sh\necho '{told}'\nexit {code}\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)

    done = run("audit.sh", bin_=tmp_path)

    assert done.returncode == expected, done.stdout + done.stderr
    assert "psycopg==" in done.stdout
    assert told in done.stdout
