"""Each promise broken by hand: the checker must name it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.history import synthetic, tales_of_leases, tales_of_lives
from faults.history.checker import check
from faults.history.hand import BROKEN, Scroll, Tale
from faults.history.promise import ELSEWHERE, PROMISE

assert tales_of_leases
CHECK = Path(__file__).with_name("check.py")


@pytest.mark.parametrize(("promise", "tale"), BROKEN, ids=[tale.__name__ for _, tale in BROKEN])
def test_history_is_refused(tmp_path: Path, promise: str, tale: Tale) -> None:
    scroll = Scroll(tmp_path)
    tale(scroll)

    context = scroll.check()

    assert promise in context.broken, [str(each) for each in context.violations]


def test_each_promise_is_broken_by_a_tale() -> None:
    assert {promise for promise, _ in BROKEN} == {*PROMISE} - {*ELSEWHERE}


def test_command_tells_the_story_and_fails(tmp_path: Path) -> None:
    scroll = Scroll(tmp_path)
    tales_of_lives.a_grant_after_the_finish(scroll)
    scroll.check()

    done = subprocess.run([sys.executable, CHECK, tmp_path], capture_output=True, text=True)

    assert done.returncode == 1, done.stderr
    assert "I8: what has ended does not change without an operator: " in done.stdout
    assert done.stdout.index("enqueue -> ok") < done.stdout.index("finish token 100 -> ok")


def test_command_is_content_with_what_is_right(tmp_path: Path) -> None:
    synthetic.write(tmp_path, 500)

    done = subprocess.run([sys.executable, CHECK, tmp_path], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout
    assert "BROKEN" not in done.stdout


CHANGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a row that is gone": ("I4", "rows-*", {"table": None}),
    "a row with an attempt too many": ("I6", "rows-*", {"attempts": 4}),
    "a row with a lower token": ("I2", "rows-*", {"lease_token": 5}),
    "a grant before its time": ("I7", "calls-*", {"run_at": 1 << 60}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_long_history_with_one_wrong_line_is_refused(tmp_path: Path, change: str) -> None:
    promise, files, values = CHANGES[change]
    synthetic.write(tmp_path, 2000)
    path = sorted(tmp_path.glob(files))[0]

    path.write_text("\n".join(change_one(path.read_text().splitlines(), values)) + "\n")

    assert promise in check(tmp_path).broken


def change_one(lines: list[str], values: dict[str, Any]) -> list[str]:
    """Change the first line that has all of these names."""
    for number, text in enumerate(lines):
        line = json.loads(text)
        rows = line.get("rows") or [line.get("row")]
        if isinstance(rows[0], dict) and "table" in values and line.get("table"):
            return [*lines[:number], *lines[number + 1 :]]
        if (
            isinstance(rows[0], dict)
            and {*values} <= {*rows[0]}
            and line.get("table") != "job_errors"
        ):
            rows[0].update(values)
            lines[number] = json.dumps(line)
            return lines
    raise AssertionError(values)
