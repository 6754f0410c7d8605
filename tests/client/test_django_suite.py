"""Django's own tests of Tasks on rota, with django-tasks and, on a newer Python, Django 6."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rota

pytestmark = [pytest.mark.slow, pytest.mark.own_session]

SUITE = Path(__file__).parent / "django_suite/run_suite.py"
SOURCE = Path(rota.__file__).parents[1]
PLACE = Path(tempfile.gettempdir()) / f"rota-tests-django6-{os.getuid()}"
PACKAGES = ["django>=6.0,<6.1", "psycopg[binary]>=3.2"]
NEWER = ["python3.12", "python3.13", "python3.14", "python3"]


def run_suite(python: str | Path, dsn: str) -> dict[str, Any]:
    own = ("PYTEST_", "COV_", "PGOPTIONS", "DJANGO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    done = subprocess.run(
        [python, SUITE],
        env={**kept, "DATABASE_URL": dsn, "PYTHONPATH": str(SOURCE)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["failed"] == {}, "\n".join(map(shorten, told["failed"].values()))
    return told


def shorten(text: str) -> str:
    return "\n".join(line[:300] for line in text.splitlines())


def pythons() -> Iterator[Path]:
    """Find each that can run Django 6, on the path or of pyenv."""
    on_path = [Path(place) for place in os.get_exec_path()]
    of_pyenv = sorted((Path.home() / ".pyenv/versions").glob("*/bin"))
    for directory in [*on_path, *of_pyenv]:
        for python in (directory / name for name in NEWER):
            check = "import sys, venv; sys.exit(sys.version_info < (3, 12))"
            if (
                python.exists()
                and not subprocess.run(
                    [python, "-c", check], check=False, capture_output=True
                ).returncode
            ):
                yield python


@pytest.fixture(scope="module")
def python_with_django_6() -> Path:
    """Make an environment for it, which later runs find again."""
    chosen = next(pythons(), None)
    if chosen is None:
        pytest.skip("no Python 3.12 or newer, on the path or of pyenv, to run Django 6")
    python, made = PLACE / "bin/python", PLACE / "made.json"
    wanted = json.dumps([str(chosen), *PACKAGES])
    if not made.exists() or made.read_text() != wanted:
        # Without a pip of its own, and compiling only what is imported: that takes longest.
        subprocess.run([chosen, "-m", "venv", "--clear", "--without-pip", PLACE], check=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-compile"]
        pip += ["--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, *PACKAGES], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the package index does not give Django 6: {done.stderr[-500:]}")
        made.write_text(wanted)
    return python


def test_djangos_own_tests_pass_with_django_tasks(dsn: str) -> None:
    told = run_suite(sys.executable, dsn)

    assert told["django"].startswith("5.")
    assert (told["ran"], told["left_out"]) == (64, 7)


def test_djangos_own_tests_pass_with_django_6(dsn: str, python_with_django_6: Path) -> None:
    told = run_suite(python_with_django_6, dsn)

    assert told["django"].startswith("6.")
    assert (told["ran"], told["left_out"]) == (64, 7)
