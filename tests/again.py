"""Run alone, three times, what failed beside others; exit with 0 if it passes each time.

A machine that stands still for a while makes one test of thousands fail.  Such a test is named
as unsteady, and does not stop the rest.  One that fails again does, and so do more than three.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAILED = HERE / ".pytest_cache/v/cache/lastfailed"
MOST = 3
ROUNDS = 3


def main() -> int:
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        return 1
    for number in range(1, ROUNDS + 1):
        print(f"\nAlone, {number} of {ROUNDS}: {', '.join(failed)}", flush=True)
        words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed]
        if subprocess.run(words, cwd=HERE, check=False).returncode:
            return 1
    print(f"UNSTEADY: failed beside others, passed {ROUNDS} times alone: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
