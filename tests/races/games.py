"""All games, what is known of their outcomes, and which functions they play."""

from __future__ import annotations

import re
from collections.abc import Iterable

from races.bench import Run
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

# Known faults of the functions, as patterns of what is told of a run; none of them loses work.
KNOWN = {
    # Somebody looks again, without a lock, for what stood in his way, and it is gone.
    r"A rerun.*is at \[_raise_taken: .*\+ A: \"RT007\"": "the refusal names the wrong reason",
    # It is told that it resumed the key, which a rerun or another has done before it.
    r"A resume key,.*is at \[_unstick: delete.*\n- A: \"RT012\"": "another resumed the key",
    r"resume key, B resume key ": "another resumed the key",
    # Both have looked before one of them was done.
    r"A drop[^\n]*, B drop": "the second drop is not refused",
    # Who comes to depend on a run just when it is retried or rerun sees it as it was.
    r"(start|enqueue) after.*got \(\+\) and expected \(-\)\n\+ dependencies: "
    r"\{\"is_failed\": true[^\n]*\n- dependencies: \{\"is_failed\": false[^\n]*(\n-- or|$)":
        "is_failed stays until the parent ends",
    # A partition for today, which is made when there was no tick for a week.
    r"got unexpected 23514: new row for relation \"finished_jobs_done_default\"":
        "an end that meets the making of today's partition is refused",
}  # fmt: skip


def known_reason(run: Run) -> str | None:
    """Return why the problems of a run are none that would be news; None if they are."""
    told = "\n".join([str(run), *run.problems])
    for pattern, reason in KNOWN.items():
        if re.search(pattern, told, re.DOTALL):
            return reason
    return None


def pairs_of_functions(played: Iterable[tuple[Game, str, str]]) -> set[frozenset[str]]:
    """Return which functions have met in these pairs of operations; one may meet itself."""
    return {
        frozenset({f, g})
        for game, first, second in played
        for f in game.functions(first)
        for g in game.functions(second)
    }
