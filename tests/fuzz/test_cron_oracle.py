"""A little of the fuzzing of schedules, with every run of the tests."""

from __future__ import annotations

import pytest

from fuzz import cron_oracle, schedule_texts
from fuzz.cron_oracle import HELPERS

# Thousands of calls, each of which would be compiled.
pytestmark = pytest.mark.plain_session


@pytest.mark.slow
def test_next_run_agrees_with_the_oracle(db, dsn):
    db.execute(HELPERS)

    counts, wrong = cron_oracle.play(dsn, 500, 1)

    assert counts["compared"] == 500
    assert wrong == []


@pytest.mark.slow
def test_texts_are_accepted_as_by_the_oracle(db, dsn):
    db.execute(HELPERS)

    counts, wrong, _ = schedule_texts.play(dsn, 2000, 1)

    assert counts["strings"] == 2000
    assert wrong == []
