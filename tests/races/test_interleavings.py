"""pairs.py in small: a few of its pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from races.bench import Bench
from races.game import choose
from races.instrument import instrument
from races.pairs import KEYS, OPERATIONS, STATES

SEED = 20260301
Connect = Callable[..., psycopg.Connection[Any]]


@pytest.fixture
def bench(connect: Connect) -> Iterator[Bench]:
    instrument(connect())
    with closing(Bench(connect, KEYS)) as bench:
        yield bench


@pytest.mark.slow
@pytest.mark.parametrize("has_hint", [False, True])
def test_any_two_operations_are_like_one_after_the_other_wherever_one_is_stopped(
    bench: Bench, has_hint: bool
) -> None:
    """A is stopped before each of its statements in turn; B does all of its own meanwhile."""
    bench.has_hint = has_hint
    runs = [run for pair in choose(SEED, 4, KEYS) for run in bench.play_pair(*pair)]

    assert ["\n".join([str(run), *run.problems]) for run in runs if run.problems] == []
    assert len(runs) > 15


@pytest.mark.slow
def test_pauses_leave_what_the_operations_do_as_it_was(connect: Connect) -> None:
    states = list(STATES)[::24]  # to make one takes longer than to play in it
    with closing(Bench(connect, KEYS)) as bench:
        before = [bench.play_in_turn(s, ("a", name)) for s in states for name in OPERATIONS]
        instrument(connect())
        bench.forget()

        after = [bench.play_in_turn(s, ("a", name)) for s in states for name in OPERATIONS]

    assert after == before
