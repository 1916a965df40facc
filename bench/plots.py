"""The plot of `bench.offline`: what each engine's speed costs in score."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from charrm.errors import MissingDependency
from charrm.files import write_atomically

try:
    import matplotlib
    import matplotlib.style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator
except ImportError as error:
    raise MissingDependency(f"matplotlib: {error}; install the extra '.[bench]'.") from error

_WIDTH, _HEIGHT = 430, 300  # points, of one panel
_MARGINS = (48, 44, 12, 30)  # left, bottom, right, top
_FONT = 10.0
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "offline",
    "font.family": "sans-serif",
    "font.size": _FONT,
}
# Okabe and Ito's colours, told apart by every kind of eye; the shape says it again.
_LOOKS = (("#000000", "o"), ("#0072B2", "D"), ("#009E73", "s"), ("#D55E00", "^"),
          ("#CC79A7", "v"), ("#E69F00", "P"))  # fmt: skip
_GREY = "#595959"


class Point(NamedTuple):
    """One engine: how many times eager's speed, mean and largest |difference| in score."""

    engine: str
    ratio: float
    mean: float
    largest: float


class Panel(NamedTuple):
    title: str
    points: Sequence[Point]


def write_plot(path: Path, panels: Sequence[Panel]) -> None:
    """Draw one panel per workload as SVG; equal numbers give equal bytes. Raises OSError."""
    names = list(dict.fromkeys(point.engine for panel in panels for point in panel.points))
    points = [point for panel in panels for point in panel.points]
    ratios = [point.ratio for point in points]
    low, high = min(ratios) / 1.35, max(ratios) * 1.35
    top = 1.25 * max([point.largest for point in points] + [0.1])
    with matplotlib.style.context(["default", _STYLE]):
        width = _WIDTH * len(panels)
        figure = Figure(figsize=(width / 72, _HEIGHT / 72), facecolor="white")
        left, bottom, right, above = _MARGINS
        inner = (_WIDTH - left - right, _HEIGHT - bottom - above)
        for number, panel in enumerate(panels):
            corner = ((number * _WIDTH + left) / width, bottom / _HEIGHT)
            axes = figure.add_axes((*corner, inner[0] / width, inner[1] / _HEIGHT))
            axes.set_xscale("log")
            axes.set_xlim(low, high)
            axes.set_ylim(-0.05 * top, top)
            _frame(axes, panel.title)
            _draw(axes, panel.points, names, inner)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date")))
    write_atomically(path, stream.getvalue())


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=_FONT, loc="left")
    axes.set_xlabel("times the speed of eager, log scale", color=_GREY)
    axes.set_ylabel("|difference| in score: mean, largest", color=_GREY)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.minorticks_off()
    axes.grid(color="#e0e0e0", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(color=_GREY, labelcolor=_GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GREY)


def _draw(
    axes: Axes, points: Sequence[Point], names: Sequence[str], size: tuple[float, float]
) -> None:
    """Mean filled and largest hollow, joined; each name beside its largest, moved until free."""

    def place(ratio: float, difference: float) -> tuple[float, float]:
        x, y = axes.transLimits.transform(axes.transScale.transform((ratio, difference)))
        return float(x) * size[0], float(y) * size[1]

    taken = []  # boxes in points: left, bottom, right, top
    for point in points:
        colour, marker = _LOOKS[names.index(point.engine) % len(_LOOKS)]
        both = (point.ratio, point.ratio), (point.mean, point.largest)
        axes.plot(*both, color=colour, linewidth=1.2, zorder=2)
        for difference, face in ((point.largest, "white"), (point.mean, colour)):
            axes.plot(point.ratio, difference, color=colour, marker=marker, markersize=7,
                      markerfacecolor=face, zorder=3, clip_on=False)  # fmt: skip
        x, low = place(point.ratio, point.mean)
        taken.append((x - 5, low - 5, x + 5, place(point.ratio, point.largest)[1] + 5))
    for point in sorted(points, key=lambda point: (point.largest, point.ratio)):
        x, y = place(point.ratio, point.largest)
        wide = 0.66 * _FONT * len(point.engine)
        # The nearest free place; straight above is the nearest of all.
        shifts = sorted(
            ((dx, dy) for dx in range(-120, 121, 4) for dy in (*range(7, 120, 3), -19, -7)),
            key=lambda shift: (abs(shift[0]) + abs(shift[1] - 7), shift),
        )
        lefts = ((x + dx - wide / 2, y + dy) for dx, dy in shifts)
        boxes = [(left, low, left + wide, low + _FONT + 2) for left, low in lefts]
        inside = [box for box in boxes if box[0] >= 0 and box[2] <= size[0]]
        free = (box for box in inside if not any(_meet(box, other) for other in taken))
        box = next(free, inside[0])
        taken.append(box)
        axes.annotate(
            point.engine, (point.ratio, point.largest), (box[0] + wide / 2 - x, box[1] - y),
            textcoords="offset points", ha="center", va="bottom", zorder=4, annotation_clip=False,
            color=_LOOKS[names.index(point.engine) % len(_LOOKS)][0],
            arrowprops={"arrowstyle": "-", "color": _GREY, "linewidth": 0.6}
            if abs(box[0] + wide / 2 - x) + abs(box[1] - y - 7) > 12 else None,
        )  # fmt: skip


Box = tuple[float, float, float, float]


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
