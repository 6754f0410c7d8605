"""Run the tests that concern the Python client on every Python that it supports.

    pythons.py [VERSION ...] [-- PYTEST-ARGUMENT ...]   # pythons.py 3.13 -- client -k tasks

Each is the command `python3.13` or the like, and gets an environment of its own in `.matrix/`.
Ends with one line per version, and with a failure if one failed or ran no test, or is not
there though it is named.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from matrix import CACHE, ROOT, read, run_pytest

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
ABOUT_PYTHON = [
    "client", "web", "faults/test_killed_workers.py", "contract/test_recipes.py",
    "--ignore=web/test_browser.py",
]  # fmt: skip


def find(version: str) -> str | None:
    """Return the command of a version, if there is one that runs; one of pyenv may not."""
    command = shutil.which(f"python{version}")
    if command is None or subprocess.run([command, "-c", ""], capture_output=True).returncode:
        return None
    return command


def run_tests(command: str, version: str, arguments: list[str]) -> tuple[bool, str]:
    """Run the tests; return whether all is well, and pytest's closing line."""
    home = CACHE / f"python{version}"
    make = [str(ROOT / "tests" / "venv.sh"), str(home), "demo,test,lint"]
    subprocess.run(make, env={**os.environ, "PYTHON": command}, check=True)
    # Some tests run `rota` by its name.
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    python = str(home / "bin" / "python")
    return run_pytest({**os.environ, "PATH": path}, arguments or ABOUT_PYTHON, python)


def main(arguments: list[str]) -> int:
    """Run the tests on each version, and tell how it went."""
    names, extra = read(arguments, __doc__, "VERSION", VERSIONS)
    results = {}
    for version in names or VERSIONS:
        command = find(version)
        print(f"\n--- Python {version}: {command}", flush=True)
        if command is not None:
            results[version] = run_tests(command, version, extra)
        elif names:
            results[version] = False, f"there is no python{version}"
    print("\nPython")
    for version, (is_well, closing) in results.items():
        print(f"{version:<8}{'ok' if is_well else 'FAILED':<8}{closing}")
    return 0 if results and all(is_well for is_well, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
