"""Pictures of what went on over time, if matplotlib is there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.figures import Figure, Series


def draw(name: str, figures: Sequence[Figure], out: Path) -> list[str]:
    """Draw each plot of a workload into *out*; return the names of the files."""
    series = [figure for figure in figures if isinstance(figure, Series) and figure.points]
    if not series or find_spec("matplotlib") is None:
        return []
    images = []
    for title in dict.fromkeys(one.plot for one in series):
        image = f"{name}-{'-'.join(re.findall('[a-z0-9]+', title.lower()))}.png"
        _draw([one for one in series if one.plot == title], title, out / image)
        images.append(image)
    return images


def _draw(series: Sequence[Series], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), dpi=110)
    for one in series:
        x, y = zip(*one.points, strict=True)
        axes.plot(x, y, label=one.name, linewidth=1.4)
    axes.set(title=title, xlabel="seconds", ylabel=series[0].unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
