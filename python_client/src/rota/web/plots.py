"""Plots as pictures in the page itself: they need no script, and speak to a screen reader.

Each bar or dot carries what it stands for as its title.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

from markupsafe import Markup

from .database import Row
from .show import number, span
from .words import WORDS

WIDTH, HEIGHT, BOTTOM, TOP = 400, 140, 18, 8
OUTCOMES = ("succeeded", "failures", "dead")
TIMES = (("wait_p50", "wait_p95"), ("run_p50", "run_p95"))
STEPS = {
    "1h": ("minute", timedelta(minutes=1), 60, "%H:%M"),
    "1d": ("hour", timedelta(hours=1), 24, "%H:%M"),
    "7d": ("hour", timedelta(hours=1), 168, "%m-%d %H:%M"),
    "90d": ("day", timedelta(days=1), 90, "%Y-%m-%d"),
}


def ended(rows: Sequence[Row], since: str, now: datetime, marks: Sequence[Row]) -> Markup:
    """Return how many attempts ended in each step of time, and how."""
    frame = _Frame(since, now)
    most = max((sum(row[name] for name in OUTCOMES[:2]) for row in rows), default=0)
    top = _round(most)
    parts = [frame.lines(top, number(top)), frame.marks(marks)]
    for row in rows:
        if (x := frame.x(row["starts_at"])) is None:
            continue
        title = WORDS["plot_ended"].format(
            frame.told(row["starts_at"]), row["succeeded"], row["failures"], row["dead"]
        )
        bars, y = [], float(HEIGHT - BOTTOM)
        for name in OUTCOMES[:2]:
            if row[name]:
                high = max(row[name] / top * frame.height, 1)
                y -= high
                bars.append(_bar(name, x, y, frame.step, high))
        if row["dead"]:
            bars.append(_bar("dead", x, HEIGHT - BOTTOM + 2, frame.step, 3))
        parts.append(Markup("<g><title>{}</title>{}</g>").format(title, Markup("").join(bars)))
    return frame.picture(WORDS["plot_ended_title"], parts)


def times(
    rows: Sequence[Row], names: tuple[str, str], since: str, now: datetime, title: str
) -> Markup:
    """Return how long half and nineteen of twenty waited or ran at most, by step of time."""
    frame = _Frame(since, now)
    longest = max((_seconds(row[names[1]]) for row in rows), default=0.0)
    top = longest or 1.0
    parts = [frame.lines(top, span(timedelta(seconds=top)) if longest else "")]
    for name, kind in zip(names, ("half", "most"), strict=True):
        for row in rows:
            if (x := frame.x(row["starts_at"])) is None or row[name] is None:
                continue
            high = max(_seconds(row[name]) / top * frame.height, 1.5)
            told = WORDS["plot_times"].format(
                frame.told(row["starts_at"]), span(row[names[0]]), span(row[names[1]])
            )
            bar = _bar(kind, x, HEIGHT - BOTTOM - high, frame.step, high)
            parts.insert(1, Markup("<g><title>{}</title>{}</g>").format(told, bar))
    return frame.picture(title, parts)


class _Frame:
    """The time that a plot is about, and where in it something is."""

    def __init__(self, since: str, now: datetime) -> None:
        _, self._length, self._count, self._format = STEPS[since]
        seconds = self._length.total_seconds()
        last = math.floor(now.timestamp() / seconds) * seconds
        self._begin = last - seconds * (self._count - 1)
        self._now = now
        self.step = WIDTH / self._count
        self.height = HEIGHT - BOTTOM - TOP

    def x(self, moment: datetime) -> float | None:
        place = (moment.timestamp() - self._begin) / self._length.total_seconds()
        return place * self.step if 0 <= place < self._count else None

    def told(self, moment: datetime) -> str:
        return f"{moment:{self._format}} UTC"

    def lines(self, top: float, told: str) -> Markup:
        begin = datetime.fromtimestamp(self._begin, self._now.tzinfo)
        return Markup(
            '<path class="axis" d="M0 {0}.5H{1}M0 {2}.5H{1}"/>'
            '<text x="0" y="{3}">{4}</text><text x="{1}" y="{3}" class="end">{5}</text>'
            '<text x="{1}" y="{6}" class="end">{7}</text>'
        ).format(
            HEIGHT - BOTTOM, WIDTH, TOP, HEIGHT - 4, self.told(begin), WORDS["plot_now"],
            TOP + 11, told,
        )  # fmt: skip

    def marks(self, rows: Sequence[Row]) -> Markup:
        """Mark since when the workers of a version are there: that is a deploy."""
        return Markup("").join(
            Markup('<g class="mark"><title>{}</title><path d="M{:.1f} {}V{}"/></g>').format(
                WORDS["plot_deploy"].format(self.told(row["started_at"]), row["workers"]),
                x, TOP, HEIGHT - BOTTOM,
            )
            for row in rows
            if (x := self.x(row["started_at"])) is not None
        )  # fmt: skip

    def picture(self, title: str, parts: Sequence[Markup]) -> Markup:
        return Markup(
            '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
        ).format(WIDTH, HEIGHT, title, Markup("").join(parts))


def _bar(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    gap = 1 if width > 3 else 0
    return Markup(
        '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
    ).format(kind, x, y, width - gap, height)


def _round(most: float) -> float:
    """Return the next number that reads well."""
    if most <= 5:
        return 5
    size = 10 ** math.floor(math.log10(most))
    return next(int(size * part) for part in (1, 2, 5, 10) if size * part >= most)


def _seconds(length: timedelta | None) -> float:
    return length.total_seconds() if length is not None else 0.0
