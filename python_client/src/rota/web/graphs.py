"""Which jobs a job waits for and which wait for it, as a picture of links that needs no script.

The jobs that it waits for stand above it and those that wait for it below, a few of each; the
lists beside the picture name more.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from .database import Row
from .show import WORDS

COLUMNS, MOST = 3, 6
WIDTH, HEIGHT, GAP, BETWEEN = 116, 46, 8, 30
LETTERS = 15


def dependencies(
    job: Row, parents: Sequence[Row], children: Sequence[Row], base: str
) -> Markup:
    """Return a job between those that it waits for and those that wait for it."""
    width = COLUMNS * (WIDTH + GAP) - GAP
    above, y = _rows(parents[:MOST], 0)
    job_at = ((width - WIDTH) / 2, y + (BETWEEN if above else 0))
    below, end = _rows(children[:MOST], job_at[1] + HEIGHT + BETWEEN)
    lines = [
        *(_line(x, at + HEIGHT, *_top(job_at)) for x, at in above),
        *(_line(*_bottom(job_at), x, at) for x, at in below),
    ]
    boxes = [
        *(_box(row, at, base) for row, at in zip(parents, above, strict=False)),
        _box(job, job_at, None),
        *(_box(row, at, base) for row, at in zip(children, below, strict=False)),
    ]
    height = end if below else job_at[1] + HEIGHT
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
        left = (COLUMNS - count) * (WIDTH + GAP) / 2
        y = top + first // COLUMNS * (HEIGHT + GAP)
        places += [(left + n * (WIDTH + GAP), y) for n in range(count)]
    return places, (places[-1][1] + HEIGHT if places else top)


def _top(at: tuple[float, float]) -> tuple[float, float]:
    return at[0], at[1]


def _bottom(at: tuple[float, float]) -> tuple[float, float]:
    return at[0], at[1] + HEIGHT


def _line(x: float, y: float, to_x: float, to_y: float) -> Markup:
    half = WIDTH / 2
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
        status if base is not None else f"{status} here", at[0], at[1], WIDTH, HEIGHT,
        at[0] + 9, at[1] + 19, f"#{row['id']}", at[0] + 9, at[1] + 36, short,
    )  # fmt: skip
    if base is None:
        return box
    return Markup('<a href="{}/jobs/{}"><title>{}</title>{}</a>').format(
        base, row["id"], name, box
    )
