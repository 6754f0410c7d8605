"""The storms in small."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest

from model import storm
from mutants.pieces import ALL_START
from support.mutation import mutate

# Its triggers know who changes what by a setting of the session.
pytestmark = pytest.mark.own_session


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature", ["keys", "rerun", "effects", "order", "dependencies", "limits", "fairness"]
)
def test_what_many_processes_do_at_random_is_explained_by_the_model(
    dsn: str, feature: str
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)  # noqa: T201

    found, history = storm.play(dsn, feature, steps=300, seed=seed, processes=4)

    assert [f"{each}\n{history.story(each.key)}" for each in found[:1]] == []
    assert len(history.changes) > 100


@pytest.mark.slow
def test_order_holds_though_producers_look_for_heads_from_the_starts_of_their_keys(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    for function, old, new in ALL_START:
        mutate(db, function, old, new)
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)  # noqa: T201

    found, history = storm.play(dsn, "order", steps=450, seed=seed, processes=4)

    assert [f"{each}\n{history.story(each.key)}" for each in found[:1]] == []
    starts = db.execute("select count(*) from rota.key_starts").fetchone()
    assert starts is not None
    assert starts[0] > 12
