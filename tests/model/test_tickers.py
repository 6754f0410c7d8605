"""tickers.py in small, and whether it would notice a guard that is missing."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest

from model import tickers
from races.instrument import mutate, some_of

pytestmark = pytest.mark.own_session
LOCK = "for update skip locked"
MUTANTS: dict[str, tuple[list[tuple[str, str, str]], str]] = {
    "a window that is not looked at": (
        [("_plan_occurrences", "if first < v_since", "if false")],
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
        [("_plan_next", "v_ended_at, null", "rota.now(), null")],
        "",
    ),
}
FORGET = "drop schema rota_test cascade; " + "; ".join(
    f"delete from rota.{table}"
    for table in ("job_definitions", "occurrences", "jobs", "finished_jobs", "pending_checks")
)


@pytest.mark.slow
def test_tickers_enqueue_what_the_rules_say_and_nothing_twice(dsn: str) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)  # noqa: T201

    problems, counts = tickers.play(dsn, rounds=7, seed=seed)

    assert problems[:3] == []
    assert counts["duplicates"] == counts["missing"] == 0
    assert counts["enqueued"] > 2_500


@pytest.mark.slow
@pytest.mark.parametrize("mutant", some_of(MUTANTS, every=3))
def test_a_guard_that_is_missing_is_found(
    dsn: str, db: psycopg.Connection[Any], mutant: str
) -> None:
    mutations, change = MUTANTS[mutant]
    for function, old, new in mutations:
        mutate(db, function, old, new)
    db.execute(change or "select")

    # On a busy machine the moment that shows it may not come in so few rounds.
    for seed in range(1, 9):
        problems, counts = tickers.play(dsn, 12, seed, processes=4, stops=("3 minutes",))
        if problems or counts["duplicates"]:
            return
        db.execute(FORGET)
    pytest.fail(f"nobody noticed {mutant}")
