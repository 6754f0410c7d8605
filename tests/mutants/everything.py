"""All mutants, and whether the list still fits the product."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mutants.claiming import CLAIMS
from mutants.endings import ENDINGS
from mutants.fence import FENCE
from mutants.maintenance import MAINTENANCE
from mutants.mutant import Mutant
from mutants.once import ONCE
from mutants.page import PAGE
from mutants.worker import WORKER

ALL: tuple[Mutant, ...] = (*FENCE, *CLAIMS, *ENDINGS, *ONCE, *MAINTENANCE, *WORKER, *PAGE)
BY_NAME = {mutant.name: mutant for mutant in ALL}


def problems(root: Path) -> list[str]:
    """Say what keeps mutants from being made of the tree at *root*, or from being killed."""
    found = [
        f"{name}: named twice" for name, n in Counter(m.name for m in ALL).items() if n > 1
    ]
    for mutant in ALL:
        for edit in mutant.edits:
            if problem := edit.problem(root):
                found.append(f"{mutant.name}: {problem}")
        for killer in mutant.killers:
            if not (root / "tests" / killer).is_file():
                found.append(f"{mutant.name}: there is no tests/{killer}")
        if not mutant.killers:
            found.append(f"{mutant.name}: nobody is expected to kill it")
    return found
