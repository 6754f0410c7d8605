"""Check a recorded history: python tests/faults/history/check.py DIR

Prints how much there was, how often each promise was put to the test, and, for what is broken,
the whole story of the job.  Exits 1 if anything is.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from faults.history.checker import check, summary  # noqa: E402
from faults.history.promise import Violation  # noqa: E402


def main() -> int:
    """Check, and print."""
    parser = argparse.ArgumentParser(
        description="Check a recorded history against the promise."
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    if not any(folder.glob("calls-*.ndjson")):
        parser.error(f"{folder} holds no calls-*.ndjson")
    context = check(folder)
    for line in summary(context):
        print(line)
    stories: dict[str, list[Violation]] = {}
    for violation in context.violations:
        stories.setdefault(violation.subject, []).append(violation)
    for subject, violations in stories.items():
        print(f"\n{subject}")
        for violation in violations:
            print(f"  {violation}")
        if violations[0].story:
            print(violations[0].story)
    return 1 if context.broken else 0


if __name__ == "__main__":
    sys.exit(main())
