"""All games, and which functions they play."""

from __future__ import annotations

from collections.abc import Iterable

from races.game import Game
from races.ledger import LEDGER
from races.lines import LINES
from races.pairs import KEYS
from races.runs import RUNS
from races.schedules import SCHEDULES
from races.world import WORLD

GAMES = {
    "pairs": KEYS,
    "schedules": SCHEDULES,
    "lines": LINES,
    "runs": RUNS,
    "ledger": LEDGER,
    "world": WORLD,
}


def pairs_of_functions(played: Iterable[tuple[Game, str, str]]) -> set[frozenset[str]]:
    """Return which functions have met in these pairs of operations; one may meet itself."""
    return {
        frozenset({f, g})
        for game, first, second in played
        for f in game.functions(first)
        for g in game.functions(second)
    }
