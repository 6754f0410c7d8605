"""Put one mutant to the tests, in a copy of the tree that is thrown away after it.

The tests find the SQL beside their own folder and the client on the PYTHONPATH, which goes
before the installed one: so what they see is the copy and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".mutants"
TIME_LIMIT = 3600.0
"""Seconds that one run of tests may take."""
ENDED = re.compile(r"^(FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)
BEGUN = re.compile(r"^[\w/]+\.py::\w+", re.MULTILINE)
HUNG = "+ Timeout +"
NO_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", ".mutants", ".matrix", ".bench", ".*_cache", "dist"
)
TORN_DOWN = "ERROR at teardown of"

_under_way: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a mutant: ``killed``, ``SURVIVED``, or ``BROKEN``, which proves nothing."""

    mutant: Mutant
    outcome: str
    test: str
    reason: str
    seconds: float

    @property
    def function(self) -> str:
        """The test that killed it, whatever its parameters were."""
        return self.test.partition("[")[0]


def try_mutant(mutant: Mutant, is_thorough: bool, first: str | None = None) -> Verdict:
    """Run the test *first*; if it lives, those that should kill it; and if it lives, the rest.

    Unless *is_thorough*, go no further than the first of these that there is.
    """
    began_at = time.monotonic()
    with tree() as copy:
        for edit in mutant.edits:
            edit.apply(copy)
        verdict = run_tests(copy, [first], mutant.name) if first else ("SURVIVED", "", "")
        if verdict[0] == "SURVIVED" and (is_thorough or not first):
            verdict = run_tests(copy, mutant.killers, mutant.name)
        if verdict[0] == "SURVIVED" and is_thorough:
            # Those of this room would kill any mutant: their lists do not fit any more.
            others = [f"--ignore={path}" for path in ("mutants", *mutant.killers)]
            verdict = run_tests(copy, others, f"{mutant.name}.rest")
    return Verdict(mutant, *verdict, time.monotonic() - began_at)


@contextlib.contextmanager
def tree() -> Iterator[Path]:
    """Copy the sources."""
    with tempfile.TemporaryDirectory(prefix="rota-mutant-", ignore_cleanup_errors=True) as name:
        # The server, which runs as another user, has its data beside the sources.
        Path(name).chmod(0o711)
        Path(name, "tmp").mkdir()
        yield Path(shutil.copytree(ROOT, Path(name, "rota"), ignore=NO_SOURCES, symlinks=True))


def run_tests(copy: Path, arguments: Sequence[str], log: str) -> tuple[str, str, str]:
    """Run tests of the copy until one fails; return outcome, test and reason."""
    LOGS.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=short"]
    with (LOGS / f"{log}.log").open("w+") as output:
        process = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", *arguments],
            cwd=copy / "tests",
            env=environment(copy),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _under_way.add(process)
        try:
            code = process.wait(TIME_LIMIT)
        finally:
            _under_way.discard(process)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return judge(code, output.read())


def stop_all() -> None:
    """End all runs of tests; each then looks as if its test had broken."""
    for process in [*_under_way]:
        os.killpg(process.pid, signal.SIGKILL)


def environment(copy: Path) -> dict[str, str]:
    """Return what makes everything that a test starts use the copy."""
    return {
        **os.environ,
        "PYTHONPATH": str(copy / "python_client" / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(copy.parent / "tmp"),
    }


def judge(code: int, told: str) -> tuple[str, str, str]:
    """Read what pytest told: outcome, test and reason.

    Only a test that fails kills, or what is looked at when it is over.  One that cannot begin
    says that the mutant is no program.
    """
    if code == 0:
        return "SURVIVED", "", ""
    if HUNG in told:
        begun = BEGUN.findall(told)
        return "killed", begun[-1] if begun else "?", "hung"
    ended = sorted(ENDED.findall(told), key=lambda found: found[0] != "FAILED")
    if not ended:
        return "BROKEN", "", f"pytest ended with {code}: {told.strip().splitlines()[-1:]}"
    word, test, reason = ended[0]
    return "killed" if word == "FAILED" or TORN_DOWN in told else "BROKEN", test, reason


def is_tested(copy: Path) -> bool:
    """Return whether a test of the copy would import the client of the copy."""
    command = [sys.executable, "-c", "import rota; print(rota.__file__)"]
    found = subprocess.check_output(command, cwd=copy / "tests", env=environment(copy))
    return Path(found.decode().strip()).is_relative_to(copy)
