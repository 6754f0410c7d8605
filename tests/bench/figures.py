"""What a workload gives back: ratios, readings and series, which report.py and plots.py show.

Machines are shared and noisy, so a figure is never one number: it keeps what each round gave,
and a ratio is taken between two things that were measured in the same run, in turns.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ours by theirs; *goal* is the least it shall be, or with *is_cost* the most."""

    number: int
    name: str
    unit: str
    ours: list[float]
    theirs: list[float]
    yardstick: str
    goal: float
    is_cost: bool = False
    note: str = ""

    @property
    def value(self) -> float:
        """The ratio of the medians."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def is_reached(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.goal if self.is_cost else self.value >= self.goal


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A value by itself: a latency, a size.  Without a *goal* it is only for information."""

    number: int
    name: str
    unit: str
    values: list[float]
    goal: float | None = None
    is_cost: bool = True
    note: str = ""

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def is_reached(self) -> bool:
        """Whether the goal is reached, if there is one."""
        if self.goal is None:
            return True
        return self.value <= self.goal if self.is_cost else self.value >= self.goal


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points over time (seconds) for a plot; series of one *plot* share its axes."""

    plot: str
    name: str
    unit: str
    points: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """What could not be measured, and why: it is said and not dropped."""

    number: int
    name: str
    reason: str


Figure = Ratio | Reading | Series | Missing


def spread(values: list[float]) -> float:
    """Return half the distance between the quartiles, as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle if middle else 0.0
