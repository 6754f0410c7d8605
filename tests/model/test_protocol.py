"""The lease protocol in small, and whether each of its guards is needed."""

from __future__ import annotations

import pytest

from model.exploring import explore, pack, unpack
from model.protocol import GUARDS, IDLE, Job, Protocol, State


@pytest.mark.slow
def test_nothing_that_can_happen_to_a_job_breaks_a_promise() -> None:
    explored = explore(Protocol(jobs=1), depth=99)

    assert (explored.problem, explored.trace) == ("", ())
    assert explored.is_complete
    assert explored.states > 90_000


@pytest.mark.slow
def test_nothing_that_can_soon_happen_to_two_jobs_breaks_a_promise() -> None:
    explored = explore(Protocol(), depth=8)

    assert (explored.problem, explored.trace) == ("", ())
    assert explored.states > 10_000


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_a_promise_is_broken_in_a_few_events(guard: str) -> None:
    explored = explore(Protocol(jobs=1, broken=frozenset({guard})), depth=12)

    print(*explored.trace, explored.problem, sep="\n")  # noqa: T201
    assert explored.problem
    assert len(explored.trace) == explored.depth - 1 < 8


def test_states_that_differ_in_names_only_are_the_same() -> None:
    first, second = Job(token=1, claims=1, highest=1), Job(status=1, token=2, owner=1)
    here = State(3, 0, 1, (first, second), ((1, 2, 1), IDLE), (second, first), 0)
    there = State(3, 1, 1, (second, first), ((0, 2, 1), IDLE), (first, second), 0)

    assert pack(here) == pack(there)
    assert unpack(pack(here), jobs=2, workers=2) in (here, there)
