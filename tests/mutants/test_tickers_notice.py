"""Functions without one of their guards: what tickers made must not be what was planned."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from model import tickers
from support.mutation import Mutation, is_noticed, some_of

LOCK = "for update skip locked"
MUTANTS: dict[str, tuple[list[Mutation], str]] = {
    "a window that is not looked at": (
        [("_plan_due", "if v_first < v_since", "if false")],
        "",
    ),
    "schedules that nobody holds": (
        [("_enqueue_due_schedules", LOCK, ""), ("_enqueue_one_by_one", LOCK, "")],
        "",
    ),
    "a planned time that is not unique": (
        [
            ("_enqueue_due_schedules", LOCK, ""),
            ("_enqueue_one_by_one", LOCK, ""),
            ("_enqueue_due", "on conflict do nothing", ""),
        ],
        "alter table rota.occurrences drop constraint occurrences_pkey",
    ),
    "a live job that is not looked at": (
        [("_live_definitions", "d.overlap = 'skip'", "false")],
        "",
    ),
    "a time that is planned from now": (
        [
            (
                "_plan_next",
                "when definition.last_job_id is not null then coalesce((",
                "when true then rota.now() when false then coalesce((",
            )
        ],
        "",
    ),
}
# The clock goes last: it times what the deletes leave in the log of operators.
FORGET = (
    "; ".join(
        f"delete from rota.{table}"
        for table in (
            "job_definitions",
            "occurrences",
            "jobs",
            "finished_jobs",
            "pending_checks",
        )
    )
    + "; drop schema rota_test cascade"
)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", some_of(MUTANTS, every=len(MUTANTS)))
def test_a_guard_that_is_missing_is_found(
    dsn: str, db: psycopg.Connection[Any], mutant: str
) -> None:
    mutations, change = MUTANTS[mutant]
    db.execute(change or "select")

    def look(seed: int) -> bool:
        problems, counts = tickers.play(dsn, 5, seed, processes=4, stops=("3 minutes",))
        return bool(problems or counts["duplicates"])

    assert is_noticed(db, mutations, look, tries=20, forget=FORGET)
