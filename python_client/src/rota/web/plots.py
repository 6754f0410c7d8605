"""Plots as pictures in the page itself: they need no script, and speak to a screen reader.

The scale and the times stand beside the picture as text, so that they are as large as the rest
of the page on every screen.  Each bar carries what it stands for as its title, and a table
under the plot has the same for those who cannot point.  With the picture comes what it was
drawn from: where a script runs, uPlot draws that in its place, to be read under the pointer and
zoomed.

A graph shows a job below those that it waits for and above those that wait for it, a few of
each, as links.  The lists beside the picture name more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from markupsafe import Markup

from .database import Row
from .show import WORDS, number, span

WIDTH, HEIGHT, BELOW = 400, 100, 8
OUTCOMES = ("succeeded", "failures", "dead")
TIMES = (("wait_p50", "wait_p95"), ("run_p50", "run_p95"))
STEPS = {
    "1h": ("minute", timedelta(minutes=1), 60, "%H:%M"),
    "1d": ("hour", timedelta(hours=1), 24, "%H:%M"),
    "7d": ("hour", timedelta(hours=1), 168, "%m-%d %H:%M"),
    "90d": ("day", timedelta(days=1), 90, "%Y-%m-%d"),
}
SCALE = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 10, 20, 30, 60, 120, 300,
    600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400,
)  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A picture, with the words beside it."""

    title: str
    picture: Markup
    data: str
    """What a script draws, as JSON."""
    scale: tuple[str, str, str]
    begin: datetime
    length: str
    kinds: Sequence[tuple[str, str]]
    heads: Sequence[str]
    rows: Sequence[tuple[datetime, Sequence[str]]]


def ended(rows: Sequence[Row], since: str, now: datetime, marks: Sequence[Row]) -> Plot:
    """Return how many attempts ended in each step of time, and how."""
    frame = _Frame(since, now)
    shown = [row for row in rows if frame.x(row["starts_at"]) is not None]
    top = _round(max((sum(row[name] for name in OUTCOMES[:2]) for row in shown), default=0))
    parts = [frame.lines()]
    for row in shown:
        x = frame.x(row["starts_at"]) or 0.0
        title = WORDS["plot_ended"].format(row["succeeded"], row["failures"], row["dead"])
        bars, y = [], float(HEIGHT)
        for name in OUTCOMES[:2]:
            if row[name]:
                high = max(row[name] / top * HEIGHT, 1)
                y -= high
                bars.append(_bar(name, x, y, frame.step, high))
        if row["dead"]:
            bars.append(_bar("dead", x, HEIGHT + 3, frame.step, 4))
        parts.append(frame.titled(row["starts_at"], title, bars))
    parts.append(frame.marks(marks))
    total = {name: number(sum(row[name] for row in shown)) for name in OUTCOMES}
    heads = [WORDS[f"legend_{name}"] for name in ("succeeded", "failed", "dead")]
    return Plot(
        title=WORDS["plots_title"],
        picture=frame.picture(WORDS["plot_ended_title"], parts),
        data=frame.data("stacked", shown, dict(zip(OUTCOMES, heads, strict=True)), marks),
        scale=(number(top), number(top / 2 if top % 2 else top // 2), "0"),
        begin=frame.begin,
        length=since,
        kinds=[
            ("succeeded", total["succeeded"]), ("failed", total["failures"]),
            ("dead", total["dead"]), *([("deploy", "")] if marks else []),
        ],
        heads=heads,
        rows=[
            (row["starts_at"], [number(row[name]) for name in OUTCOMES])
            for row in reversed(shown)
        ],
    )  # fmt: skip


def times(
    rows: Sequence[Row],
    total: Row,
    names: tuple[str, str],
    since: str,
    now: datetime,
    title: str,
    marks: Sequence[Row],
) -> Plot:
    """Return how long half and nineteen of twenty waited or ran at most, by step of time.

    *total* has the same of the whole time: steps do not add up to it.
    """
    frame = _Frame(since, now)
    shown = [row for row in rows if frame.x(row["starts_at"]) is not None]
    longest = max((_seconds(row[names[1]]) for row in shown), default=0.0)
    top = next((one for one in SCALE if one >= longest), math.ceil(longest / 86400) * 86400.0)
    parts = [frame.lines()]
    for row in shown:
        bars = [
            _bar(kind, frame.x(row["starts_at"]) or 0.0, HEIGHT - high, frame.step, high)
            for name, kind in ((names[1], "most"), (names[0], "half"))
            if row[name] is not None
            for high in [max(_seconds(row[name]) / top * HEIGHT, 1.5)]
        ]
        told = WORDS["plot_times"].format(span(row[names[0]]), span(row[names[1]]))
        if bars:
            parts.append(frame.titled(row["starts_at"], told, bars))
    parts.append(frame.marks(marks))
    heads = [WORDS["legend_half"], WORDS["legend_most"]]
    return Plot(
        title=title,
        picture=frame.picture(title, parts),
        data=frame.data("times", shown, dict(zip(names, heads, strict=True)), marks),
        scale=(span(timedelta(seconds=top)), span(timedelta(seconds=top / 2)), "0"),
        begin=frame.begin,
        length=since,
        kinds=[
            (kind, span(total.get(name)))
            for name, kind in zip(names, ("half", "most"), strict=True)
        ]
        + ([("deploy", "")] if marks else []),
        heads=heads,
        rows=[
            (row["starts_at"], [span(row[name]) for name in names])
            for row in reversed(shown)
            if row[names[1]] is not None
        ],
    )


class _Frame:
    """The time that a plot is about, and where in it something is."""

    def __init__(self, since: str, now: datetime) -> None:
        _, self._length, self._count, self._format = STEPS[since]
        seconds = self._length.total_seconds()
        last = math.floor(now.timestamp() / seconds) * seconds
        self._begin = last - seconds * (self._count - 1)
        self.begin = datetime.fromtimestamp(self._begin, now.tzinfo)
        self.step = WIDTH / self._count

    def x(self, moment: datetime) -> float | None:
        place = (moment.timestamp() - self._begin) / self._length.total_seconds()
        return place * self.step if 0 <= place < self._count else None

    def data(
        self, kind: str, rows: Sequence[Row], names: Mapping[str, str], marks: Sequence[Row]
    ) -> str:
        """Return for each step of time what there was in it, for a script to draw."""
        found = {row["starts_at"].timestamp(): row for row in rows}
        step = self._length.total_seconds()
        at = [self._begin + step * place for place in range(self._count)]
        told = {
            "kind": kind,
            "begin": self._begin,
            "step": step,
            "names": list(names.values()),
            "values": [[_number(found.get(x, {}).get(name)) for x in at] for name in names],
            "marks": [
                (row["started_at"].timestamp(), _deploy(row))
                for row in marks
                if self.x(row["started_at"]) is not None
            ],
        }
        return json.dumps(told, separators=(",", ":"))

    def titled(self, moment: datetime, text: str, parts: Sequence[Markup]) -> Markup:
        """Return parts with a title that begins with a time, which a script may tell again."""
        return Markup('<g><title data-at="{}">{} UTC: {}</title>{}</g>').format(
            moment.isoformat(), f"{moment:{self._format}}", text, Markup("").join(parts)
        )

    def lines(self) -> Markup:
        return Markup('<path class="axis" d="M0 0H{0}M0 {1}H{0}M0 {2}H{0}"/>').format(
            WIDTH, HEIGHT / 2, HEIGHT
        )

    def marks(self, rows: Sequence[Row]) -> Markup:
        """Mark since when the workers of a version are there: that is a deploy."""
        return Markup("").join(
            self.titled(
                row["started_at"],
                _deploy(row),
                [Markup('<path class="mark" d="M{0:.1f} 0V{1}"/>').format(x, HEIGHT)],
            )
            for row in rows
            if (x := self.x(row["started_at"])) is not None
        )

    def picture(self, title: str, parts: Sequence[Markup]) -> Markup:
        return Markup(
            '<svg class="plot" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img"'
            ' aria-label="{}">{}</svg>'
        ).format(WIDTH, HEIGHT + BELOW, title, Markup("").join(parts))


def _bar(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    gap = 1 if width > 3 else 0
    return Markup(
        '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
    ).format(kind, x, y, width - gap, height)


def _deploy(row: Row) -> str:
    return WORDS["plot_deploy"].format(row["workers"], row["versions"] or "?")


def _number(value: timedelta | int | None) -> float | None:
    return round(value.total_seconds(), 3) if isinstance(value, timedelta) else value


def _round(most: float) -> int:
    """Return the next number that reads well."""
    if most <= 4:
        return 4
    size = 10 ** math.floor(math.log10(most))
    return next(int(size * part) for part in (1, 2, 4, 10) if size * part >= most)


def _seconds(length: timedelta | None) -> float:
    return length.total_seconds() if length is not None else 0.0


COLUMNS, MOST = 3, 6
BOX_WIDTH, BOX_HEIGHT, GAP, BETWEEN = 116, 46, 8, 30
LETTERS = 15


def dependencies(
    job: Row, parents: Sequence[Row], children: Sequence[Row], base: str
) -> Markup:
    """Return a job between those that it waits for and those that wait for it."""
    width = COLUMNS * (BOX_WIDTH + GAP) - GAP
    above, y = _rows(parents[:MOST], 0)
    job_at = ((width - BOX_WIDTH) / 2, y + (BETWEEN if above else 0))
    below, end = _rows(children[:MOST], job_at[1] + BOX_HEIGHT + BETWEEN)
    lines = [
        *(_line(x, at + BOX_HEIGHT, *job_at) for x, at in above),
        *(_line(job_at[0], job_at[1] + BOX_HEIGHT, x, at) for x, at in below),
    ]
    boxes = [
        *(_box(row, at, base) for row, at in zip(parents, above, strict=False)),
        _box(job, job_at, None),
        *(_box(row, at, base) for row, at in zip(children, below, strict=False)),
    ]
    height = end if below else job_at[1] + BOX_HEIGHT
    return Markup(
        '<svg class="jobs-graph" viewBox="-1 -1 {} {}" role="group" aria-label="{}">{}{}</svg>'
    ).format(
        width + 2, height + 2, WORDS["graph_title"], Markup("").join(lines),
        Markup("").join(boxes),
    )  # fmt: skip


def _rows(rows: Sequence[Row], top: float) -> tuple[list[tuple[float, float]], float]:
    """Return where the boxes stand, rows of them in the middle, and where the last row ends."""
    places = []
    for first in range(0, len(rows), COLUMNS):
        count = min(COLUMNS, len(rows) - first)
        left = (COLUMNS - count) * (BOX_WIDTH + GAP) / 2
        y = top + first // COLUMNS * (BOX_HEIGHT + GAP)
        places += [(left + n * (BOX_WIDTH + GAP), y) for n in range(count)]
    return places, (places[-1][1] + BOX_HEIGHT if places else top)


def _line(x: float, y: float, to_x: float, to_y: float) -> Markup:
    half = BOX_WIDTH / 2
    return Markup(
        '<path d="M{:.0f} {:.0f}C{:.0f} {:.0f} {:.0f} {:.0f} {:.0f} {:.0f}"/>'
    ).format(
        x + half, y, x + half, (y + to_y) / 2, to_x + half, (y + to_y) / 2, to_x + half, to_y
    )


def _box(row: Row, at: tuple[float, float], base: str | None) -> Markup:
    """Return a job as a box, with a link to it where it is another one."""
    job_type, status = row["job_type"] or "", row["status"] or "gone"
    name = WORDS["graph_job"].format(row["id"], job_type, WORDS[status])
    short = job_type if len(job_type) <= LETTERS else f"{job_type[: LETTERS - 1]}…"
    box = Markup(
        '<g class="{}"><rect x="{:.0f}" y="{:.0f}" width="{}" height="{}"'
        ' rx="7"/><text aria-hidden="true" x="{:.0f}" y="{:.0f}">{}</text>'
        '<text class="type" aria-hidden="true" x="{:.0f}" y="{:.0f}">{}</text></g>'
    ).format(
        status if base is not None else f"{status} here", at[0], at[1], BOX_WIDTH, BOX_HEIGHT,
        at[0] + 9, at[1] + 19, f"#{row['id']}", at[0] + 9, at[1] + 36, short,
    )  # fmt: skip
    if base is None:
        return box
    return Markup('<a href="{}/jobs/{}"><title>{}</title>{}</a>').format(
        base, row["id"], name, box
    )
