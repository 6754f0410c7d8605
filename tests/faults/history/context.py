"""What the rules know besides the story of one job, and what they found and looked at."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from faults.history.promise import Violation

# Server and clients read one clock by different ways.
TOLERANCE = 10_000  # microseconds
Problem = tuple[str, str]
Problems = Iterator[Problem]


@dataclass(slots=True)
class Unknown:
    """What calls without an answer may have made, that no row's story tells."""

    claims: Counter[str] = field(default_factory=Counter)
    """By worker, how many jobs."""
    jobs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By job type and key, how many."""
    runs: int = 0
    """Pipelines that were started, or schedules that were run by hand."""


@dataclass(slots=True)
class Context:
    """One history as a whole."""

    general: frozenset[str] = frozenset()
    """Errors that any call may meet."""
    stories: int = 3
    last_dump: int = 0
    is_drained: bool = False
    skew: int = 0
    dumped_at: int = 0
    tables: set[str] = field(default_factory=set)
    """What the last dump holds."""
    calm: dict[str, Any] | None = None
    queues: dict[str, dict[str, Any]] = field(default_factory=dict)
    documented: dict[str, set[str]] = field(default_factory=dict)
    unknown: Unknown = field(default_factory=Unknown)
    hidden_claims: Counter[str] = field(default_factory=Counter)
    hidden_jobs: Counter[tuple[str, str]] = field(default_factory=Counter)
    changed_keys: set[str] = field(default_factory=set)
    """Keys that somebody used with on_conflict replace or rerun."""
    arrived: Mapping[int, int] = field(default_factory=dict)
    """Jobs that came late from another database, and since when they have been here."""
    has_producers: bool = False
    """Whether any enqueue was recorded at all."""
    looked: Counter[str] = field(default_factory=Counter)
    """How often each promise was put to the test."""
    violations: list[Violation] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    recount: defaultdict[str, Counter[Any]] = field(
        default_factory=lambda: defaultdict(Counter)
    )

    def wall(self, moment: int) -> int:
        """Return a time of the calls as one of the database."""
        return moment // 1000 + self.skew
