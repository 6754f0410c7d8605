"""tickers.py in small."""

from __future__ import annotations

import random

import pytest

from model import tickers

pytestmark = pytest.mark.own_session


@pytest.mark.slow
def test_tickers_enqueue_what_the_rules_say_and_nothing_twice(dsn: str) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)  # noqa: T201

    problems, counts = tickers.play(dsn, rounds=3, seed=seed)

    assert problems[:3] == []
    assert counts["duplicates"] == counts["missing"] == 0
    assert counts["enqueued"] > 900
