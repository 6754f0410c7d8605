"""The list of mutants fits the product, and a mutant is killed by nothing but a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from mutants import (
    test_histories_notice,
    test_model_notices,
    test_storms_notice,
    test_tickers_notice,
)
from mutants.everything import ALL, BY_NAME, problems
from mutants.mutant import Edit, Mutant, mutant, sql
from mutants.trial import ROOT, is_tested, judge, tree, try_mutant
from mutants.verdicts import last_killers
from support.mutation import FUNCTIONS, in_sql

FAIL = "sql/jobs/test_fail.py::test_fail_job_gives_up_after_the_last_attempt"
LEASES = (
    "client/test_leases.py::"
    "test_a_heartbeat_extends_from_when_it_was_sent_and_only_what_was_not_locked"
)
HARMLESS = mutant(
    "harmless",
    "Nothing.",
    FAIL,
    sql(
        "jobs/fail",
        "v_job.attempts >= v_job.max_attempts",
        "not v_job.attempts < v_job.max_attempts",
    ),
)


def test_every_mutant_can_be_made_of_the_product() -> None:
    assert problems(ROOT) == []
    assert len(ALL) >= 100


@pytest.mark.parametrize(
    "mutants",
    [
        pytest.param(module.MUTANTS, id=module.__name__.split("_")[1])
        for module in (
            test_model_notices,
            test_histories_notice,
            test_storms_notice,
            test_tickers_notice,
        )
    ],
)
def test_every_function_can_be_made_without_its_guard(
    db: psycopg.Connection[Any], mutants: dict[str, Any]
) -> None:
    """Most of these are played by `make prove` alone."""
    product = {name: body for name, body, *_ in db.execute(FUNCTIONS)}
    stale = []
    for name, told in mutants.items():
        bodies = dict(product)
        parts = [told] if isinstance(told, list) else told
        for function, old, new in next(part for part in parts if isinstance(part, list)):
            before, *after = re.split(in_sql(old), bodies[function])
            if len(after) != 1:
                stale.append(f"{name}: {function} has {len(after)} times {old!r}")
            bodies[function] = new.join([before, *after])

    assert stale == []


@pytest.mark.parametrize(
    "text",
    [
        "where j.id = 1\n  and exists (\n    select from a\n  )\nfor update",
        "where j.id = 1 and exists (select from a) for update",
    ],
)
def test_a_piece_of_sql_is_found_however_its_lines_are_broken(
    text: str, tmp_path: Path
) -> None:
    part = tmp_path / "sql/part.sql"
    part.parent.mkdir()
    part.write_text(f"-- Why.\n{text}\n")

    sql("part", "    and exists (select\n from a)\n", "\n").apply(tmp_path)

    assert part.read_text().split("\n", 1)[0] == "-- Why."
    assert " ".join(part.read_text().split()) == "-- Why. where j.id = 1 for update"
    assert sql("part", "whe re", "").problem(tmp_path)


def test_readme_tells_of_each_mutant_which_test_killed_it() -> None:
    assert [*last_killers(ROOT / "tests")] == [mutant.name for mutant in ALL]


@pytest.mark.slow
def test_a_copy_is_what_its_tests_see() -> None:
    with tree() as copy:
        assert is_tested(copy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "test", "outcome"),
    [
        (BY_NAME["one-attempt-more"], FAIL, "killed"),
        pytest.param(
            BY_NAME["lease-counted-from-the-answer"], LEASES, "killed", marks=pytest.mark.long
        ),
        (HARMLESS, None, "SURVIVED"),
    ],
)
def test_a_mutant_is_killed_and_what_is_none_survives(
    mutant: Mutant, test: str | None, outcome: str
) -> None:
    verdict = try_mutant(mutant, False, test)

    assert (verdict.outcome, verdict.function) == (outcome, test or "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a guard\n", None),
        ("no such\n", "part.sql has 0 times 'guard'"),
        ("guard, guard\n", "part.sql has 2 times 'guard'"),
    ],
)
def test_edit_says_when_its_text_is_not_there_once(
    tmp_path: Path, text: str, problem: str | None
) -> None:
    part = tmp_path / "part.sql"
    part.write_text(text)
    edit = Edit("part.sql", "guard", "hole")

    assert edit.problem(tmp_path) == problem
    if problem is None:
        edit.apply(tmp_path)
        assert part.read_text() == "a hole\n"
    else:
        with pytest.raises(ValueError, match="times"):
            edit.apply(tmp_path)


@pytest.mark.parametrize(
    ("code", "told", "expected"),
    [
        (0, "3 passed", ("SURVIVED", "", "")),
        (
            1,
            "FAILED sql/test_a.py::test_b[x y] - assert 1 == 2",
            ("killed", "sql/test_a.py::test_b[x y]", "assert 1 == 2"),
        ),
        (1, "FAILED sql/test_a.py::test_b", ("killed", "sql/test_a.py::test_b", "")),
        (
            1,
            "sql/test_a.py::test_a PASSED\nsql/test_a.py::test_b \n++++ Timeout ++++\n",
            ("killed", "sql/test_a.py::test_b", "hung"),
        ),
        (
            1,
            "ERROR sql/test_a.py::test_b - psql: syntax error",
            ("BROKEN", "sql/test_a.py::test_b", "psql: syntax error"),
        ),
        (
            1,
            "_ ERROR at teardown of test_b _\nERROR sql/test_a.py::test_b - assert []",
            ("killed", "sql/test_a.py::test_b", "assert []"),
        ),
        (
            1,
            "ERROR sql/test_a.py::test_c - assert []\nFAILED sql/test_a.py::test_b - no",
            ("killed", "sql/test_a.py::test_b", "no"),
        ),
        (4, "no such file", ("BROKEN", "", "pytest ended with 4: ['no such file']")),
    ],
)
def test_judge_takes_only_a_failed_test_for_a_kill(
    code: int, told: str, expected: tuple[str, str, str]
) -> None:
    assert judge(code, told) == expected
