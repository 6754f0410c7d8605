"""How the figures are shown: a table for the terminal, Markdown for RESULTS.md, JSON for both.

A ratio stands beside the spread of its two sides; a difference that is smaller than these is
none.  What missed its goal is said as loudly as what reached it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figure, Missing, Ratio, Reading, Series, spread

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Ratio, Reading, Series, Missing)
}
HEADINGS = ("no.", "what", "rota", "yardstick", "ratio", "goal", "", "spread")


def dump(results: dict[str, Any], path: Path) -> None:
    """Write all results to a file, so that it is whole at every moment."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    draft.replace(path)


def to_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return figures as plain data, every round's values included."""
    return [{"kind": type(figure).__name__, **dataclasses.asdict(figure)} for figure in figures]


def from_json(data: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return what `to_json` was given."""
    found: list[Figure] = []
    for fields in data:
        values = {name: value for name, value in fields.items() if name != "kind"}
        if "points" in values:
            values["points"] = [(x, y) for x, y in values["points"]]
        found.append(KINDS[fields["kind"]](**values))
    return found


def row(figure: Ratio | Reading | Missing) -> tuple[str, ...]:
    """Return the cells of one figure, under HEADINGS."""
    number = str(figure.number)
    if isinstance(figure, Missing):
        return (number, figure.name, "", "", "", "", "MISSING", figure.reason)
    if isinstance(figure, Reading):
        goal = "" if figure.goal is None else bound(figure.goal, figure.is_cost)
        verdict = "" if figure.goal is None else say(figure.is_reached)
        value, wide = f"{short(figure.value)} {figure.unit}", percent(figure.values)
        return (number, figure.name, value, "", "", goal, verdict, wide)
    ours, theirs = middle(figure.ours), middle(figure.theirs)
    return (
        number,
        figure.name,
        f"{ours} {figure.unit}",
        f"{theirs} {figure.yardstick}",
        f"{figure.value:.2f}",
        bound(figure.goal, figure.is_cost),
        say(figure.is_reached),
        f"{percent(figure.ours)} {percent(figure.theirs)}",
    )


def text(figures: Sequence[Figure]) -> str:
    """Return a table for a terminal."""
    rows = [row(figure) for figure in figures if not isinstance(figure, Series)]
    widths = (
        [max(len(cells[n]) for cells in rows) for n in range(len(HEADINGS))] if rows else []
    )
    lines = []
    for cells in rows:
        padded = [
            cell.ljust(width) if n in (1, 6, 7) else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def markdown(figures: Sequence[Figure]) -> str:
    """Return a table for RESULTS.md, and the notes under it."""
    rows = [row(figure) for figure in figures if not isinstance(figure, Series)]
    lines = ["| " + " | ".join(HEADINGS) + " |"]
    lines.append("|--:|---|--:|--:|--:|--:|---|---|")
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows
    ]
    notes: dict[str, list[str]] = {}
    for figure in figures:
        if isinstance(figure, Ratio | Reading) and figure.note:
            notes.setdefault(figure.note, []).append(figure.name)
    if notes:
        lines.append("")
    for note, names in notes.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"- {names[0]}{more}: {note}")
    return "\n".join(lines) + "\n"


def short(value: float) -> str:
    """Return a number with three digits that mean something."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def middle(values: Sequence[float]) -> str:
    return short(Reading(number=0, name="", unit="", values=list(values)).value)


def percent(values: Sequence[float]) -> str:
    return f"±{100 * spread(list(values)):.0f}%" if len(values) > 1 else ""


def bound(goal: float, is_cost: bool) -> str:
    return f"{'≤' if is_cost else '≥'} {goal:g}"


def say(is_reached: bool) -> str:
    return "reached" if is_reached else "MISSED"
