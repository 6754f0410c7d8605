"""All games in small, and that they play every function that writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import psycopg
import pytest

from races.bench import Bench
from races.game import choose
from races.games import GAMES, pairs_of_functions
from races.instrument import instrument
from races.world import WORLD

SEED = 20261122
WRITING = """
    select p.proname
    from pg_proc as p
    where p.pronamespace = 'rota'::regnamespace
      and p.proname !~ '^_'
      and p.provolatile = 'v'
      and p.prorettype <> 'trigger'::regtype
"""
# Where there is no pg_cron; with it they write to its tables alone.
NOT_HERE = {"start ticker"}
# Where no queue is moved.
NOT_HERE |= {
    *("end move", "end moves", "take moves", "receive moves"),
}
Connect = Callable[..., psycopg.Connection[Any]]


def test_every_function_that_writes_meets_every_other_in_the_world(
    db: psycopg.Connection[Any],
) -> None:
    """A new function needs a line in world.py, and one in the game of what it touches."""
    writing = {name for (name,) in db.execute(WRITING)}

    played = pairs_of_functions((WORLD, a, b) for _, a, b in choose(0, None, WORLD))

    assert played >= {frozenset(pair) for pair in combinations_with_replacement(writing, 2)}
    assert len(played) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lines", "runs", "ledger", "world"])
def test_no_two_operations_at_once_break_anything(connect: Connect, name: str) -> None:
    """A is stopped before one of its statements, or at its end; B does all of its own."""
    # To make a state takes longer than to play in it.
    states = [*GAMES[name].states.items()][1:4]
    game = replace(GAMES[name], states=dict(states), max_stops=1)
    instrument(connect())

    with closing(Bench(connect, game)) as bench:
        runs = [run for pair in choose(SEED, 4, game) for run in bench.play_pair(*pair)]

    found = [run for run in runs if run.problems]
    assert ["\n".join([str(run), *run.problems]) for run in found] == []
    assert len(runs) > 6


@pytest.mark.slow
@pytest.mark.long
def test_each_operation_of_the_world_succeeds_in_one_of_its_states(connect: Connect) -> None:
    refused = set()
    instrument(connect())
    with closing(Bench(connect, WORLD)) as bench:
        for name in WORLD.operations:
            answers = (bench.play_in_turn(state, ("a", name)).a for state in WORLD.states)
            if not any(answer.startswith(("[", "null")) for answer in answers):
                refused.add(name)

    assert refused <= NOT_HERE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "state", "first", "second"),
    [
        ("runs", "running", "restart", "fail for good"),
        ("runs", "dead", "start after", "restart"),
        ("runs", "dead", "retry", "restart from b"),
        ("runs", "dead", "restart from b", "retry"),
        ("runs", "none", "drop", "drop"),
        ("world", "a run is dead", "resume key", "restart pipeline"),
        ("pairs", "waiting", "enqueue many mixed", "enqueue rerun"),
        ("pairs", "running", "enqueue rerun", "finish"),
        *[
            pytest.param(*fault, marks=pytest.mark.long)
            for fault in (
                ("lines", "dead", "checks", "retry"),
                ("lines", "succeeded", "checks", "enqueue before second"),
                ("world", "a run is under way", "tick alone", "finish"),
            )
        ],
    ],
)
def test_a_fault_that_was_mended_does_not_come_back(
    connect: Connect, name: str, state: str, first: str, second: str
) -> None:
    instrument(connect())

    states = {state: GAMES[name].states[state]}
    game = replace(GAMES[name], states=states, max_stops=1000)

    with closing(Bench(connect, game)) as bench:
        runs = list(bench.play_pair(state, first, second))

    assert ["\n".join([str(run), *run.problems]) for run in runs if run.problems] == []
