"""What is played: operations, states, and what may become of two operations at once."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CALLED = re.compile(r"\brota\.([a-z]\w*)\(")


@dataclass(frozen=True)
class Game:
    """Operations that are played against each other in states, and how they may answer.

    The outcome of two must be that of one after the other, in either order.  More is allowed
    only to what stands in one of the other fields.  `%(job_id)s` and `%(token)s` are those of
    the first job of a state, `%(second_id)s`, `%(second_token)s` and so on those of the next.
    """

    operations: dict[str, str]
    states: dict[str, list[str]]
    # The answers of those that lock with `skip locked`, where they passed over the job.
    passed_over: Mapping[str, list[Any] | str] = field(default_factory=dict)
    # The operations that leave to a check what they ask of a job that somebody holds.
    later: frozenset[str] = frozenset()
    # The operations that do two things, which others may come between.
    halves: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # What is done in the end, before one looks; what was put off is due by the last of it.
    settle: tuple[str, ...] = ()
    # The operations that are several, with what of them may have been done before the other.
    fronts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # What a tick may have done between the two, as it would have a moment later.
    seams: tuple[str, ...] = ()
    # What only fronts, seams and halves speak of.
    parts: dict[str, str] = field(default_factory=dict)
    # Operations that take what they can of many, and why no order tells what that is.  Of a
    # pair with one of them all is looked at but the outcome.
    loose: dict[str, str] = field(default_factory=dict)
    # What A does without a transaction around it, because it asks whether it is alone.
    outside: frozenset[str] = frozenset()
    # Of an operation that comes by more places, each pair takes so many, by the seed.
    max_stops: int = 1000
    # Tables that only tell who looked, and when.
    ignored: frozenset[str] = frozenset(
        {"upgrade_log", "pending_checks", "key_starts", "lane_starts"}
    )
    # Words of warnings that a state is made for.
    warnings: tuple[str, ...] = ()
    # What must not be there in the end: a query of a rule and an id.
    left_over: str = ""
    # Who both of them are, if the queues in which they may work are a part of it.
    role: str = ""

    @property
    def queries(self) -> Mapping[str, str]:
        return {**self.parts, **self.operations}

    def functions(self, name: str) -> set[str]:
        """Return the public functions that an operation calls."""
        return set(CALLED.findall(self.operations[name]))


def choose(seed: int, count: int | None, game: Game) -> list[tuple[str, str, str]]:
    """Return pairs in their states, all or so many, in an order that the seed decides.

    Each pair comes in one of its states before any comes in a second one.
    """
    chance = random.Random(seed)
    rounds: list[list[tuple[str, str, str]]] = [[] for _ in game.states]
    for first in game.operations:
        for second in game.operations:
            states = chance.sample([*game.states], len(game.states))
            for each, state in zip(rounds, states, strict=True):
                each.append((state, first, second))
    for each in rounds:
        chance.shuffle(each)
    return [pair for each in rounds for pair in each][:count]
