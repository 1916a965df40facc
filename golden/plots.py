"""The report's plots, as SVG elements that take their colours from the page they stand in.

Every plot is drawn from counts, so that its size does not grow with the number of rows.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from charrm.errors import MissingDependency

try:
    import matplotlib
    import matplotlib.style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MultipleLocator
except ImportError as error:
    raise MissingDependency(f"matplotlib: {error}; install the extra '.[golden]'.") from error

Line = Mapping[str, Any]
Cell = tuple[float, float, bool]  # x, y, do the sides differ there

_WIDTH, _HEIGHT = 400, 280  # points; a phone shows them at about this size
_MAX_CELLS = 1200  # a grid of 1/8 over all scores is just below
_STYLE = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.linewidth": 0.8,
    "path.simplify": False,
}
# Colours that no plot uses otherwise, each replaced by a variable of the page's style sheet.
_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--rule)",
    "#040404": "var(--equal)",
    "#050505": "var(--differs)",
}
_INK, _MUTED, _RULE, _EQUAL, _DIFFERS = _COLOURS
# Rows at one place: up to how many are drawn with a marker of which diameter in points.
_MARKERS = ((1, 2.5), (4, 3.5), (16, 5.0), (64, 7.0), (256, 9.5), (math.inf, 12.5))

_PROLOG = re.compile(r"^.*?(?=<svg )", re.DOTALL)
_SHARED_STYLE = re.compile(r"\s*<defs>\s*<style.*?</defs>", re.DOTALL)
_NAMES = re.compile(r' (?:xmlns(?::\w+)?="[^"]*"|id="[A-Za-z.\d]+_\d+"|version="1.1")')
_SIZE = re.compile(r' (?:width|height)="[\d.]+pt"')
_FONT = re.compile(r" font-family: [^;\"]*;")
_UNTURNED = re.compile(r' transform="rotate\(-?0 [^"]*"')
_GEOMETRY = re.compile(r'(?<= )(?:d|x|y|transform)="[^"]*"')
_DECIMALS = re.compile(r"-?\d+\.\d+")
_GAP = re.compile(r"\s*\n\s*")


def version() -> str:
    """Return what the drawings depend on beside this code."""
    return f"matplotlib {matplotlib.__version__}"


def step_histogram(counts: Mapping[str, int]) -> str:
    """Draw rows by grid steps of p, or by whatever classes the counts are named for."""
    with _plot("steps") as (figure, axes):
        axes.set_position((0.16, 0.08, 0.83, 0.88))
        top = max([*counts.values(), 1])
        for x, (name, count) in enumerate(counts.items()):
            if count:
                colour = _EQUAL if name == "0" else _DIFFERS
                axes.bar(x, count - 0.5, bottom=0.5, width=0.72, color=colour, linewidth=0)
                axes.annotate(
                    f"{count:,}", (x, count), (0, 3), textcoords="offset points", ha="center",
                    color=_INK, fontsize=9,
                )  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(0.5, top * 2.5)
        axes.set_xlim(-0.6, len(counts) - 0.4)
        axes.set_xticks(range(len(counts)), list(counts))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else ""))
        axes.minorticks_off()
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("rows, log scale", color=_MUTED)
        return _svg(figure, "Histogram of rows by difference")


def score_scatter(lines: Sequence[Line]) -> tuple[str, str]:
    """Draw the candidate's score over the reference's; also return how points were merged."""
    points = [
        (line["reference"]["score"], line["candidate"]["score"], differs(line)) for line in lines
    ]
    cells, (step, _) = _merge(points, 1 / 64, 1 / 64)
    values = [value for x, y, _ in cells for value in (x, y)]
    low, high = min(values), max(values)
    pad = max((high - low) * 0.06, 0.02)
    with _plot("scatter") as (figure, axes):
        axes.set_position((0.13, 0.14, 0.84, 0.82))
        axes.plot(
            (low - pad, high + pad), (low - pad, high + pad), color=_MUTED, linewidth=0.7, zorder=1
        )
        _draw_cells(axes, cells)
        axes.set_xlim(low - pad, high + pad)
        axes.set_ylim(low - pad, high + pad)
        axes.set_xlabel("score of the reference", color=_MUTED)
        axes.set_ylabel("score of the candidate", color=_MUTED)
        return _svg(figure, "Scores of the candidate over scores of the reference"), f"{step:g}"


def length_plot(lines: Sequence[Line]) -> str:
    """Draw candidate minus reference over the token count."""
    points = []
    for line in lines:
        tokens = line["tokens"]["candidate"] or line["tokens"]["reference"]
        if tokens is not None:
            difference = line["candidate"]["score"] - line["reference"]["score"]
            points.append((float(tokens), difference, differs(line)))
    largest = max([abs(y) for _, y, _ in points], default=0.0) or 0.01
    cells, _ = _merge(points, 16.0, largest / 32)
    with _plot("length") as (figure, axes):
        axes.set_position((0.17, 0.14, 0.8, 0.82))
        axes.axhline(0, color=_MUTED, linewidth=0.7, zorder=1)
        _draw_cells(axes, cells)
        axes.set_xlim(0, max([x for x, _, _ in cells], default=1.0) * 1.04)
        axes.set_ylim(-largest * 1.15, largest * 1.15)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.set_xlabel("tokens", color=_MUTED)
        axes.set_ylabel("candidate − reference, score", color=_MUTED)
        return _svg(figure, "Difference of scores over the number of tokens")


def metric_bars(model: str, means: Sequence[tuple[str, float, float | None, float, float]]) -> str:
    """Draw a model's means: name, mean, mean to compare with, lower and upper bound of the mean."""
    with _plot(f"metrics {model}") as (figure, axes):
        axes.set_position((0.31, 0.08, 0.6, 0.91))
        for y, (_, mean, other, low, high) in enumerate(means):
            axes.barh(y, mean - 1, left=1, height=0.62, color=_EQUAL, linewidth=0, alpha=0.75)
            if low < high:
                axes.plot((low, high), (y, y), color=_INK, linewidth=1.0, marker="|", markersize=5)
            if other is not None:
                axes.plot((other, other), (y - 0.44, y + 0.44), color=_DIFFERS, linewidth=2.0)
            axes.annotate(
                f"{mean:.3f}", (1, y), (1.02, y), xycoords=axes.get_yaxis_transform(),
                textcoords=axes.get_yaxis_transform(), va="center", color=_MUTED, fontsize=9,
            )  # fmt: skip
        axes.set_xlim(1, 5)
        axes.set_ylim(len(means) - 0.4, -0.6)
        axes.xaxis.set_major_locator(MultipleLocator(1))
        axes.set_yticks(range(len(means)), [mean[0].replace("_", " ") for mean in means])
        axes.tick_params(axis="y", length=0, labelcolor=_INK)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        return _svg(figure, "Means per metric")


def differs(line: Line) -> bool:
    """Say whether any value that both sides tell is another one."""
    candidate, reference = line["candidate"], line["reference"]
    return any(
        candidate[name] != reference[name]
        for name in ("hidden", "logit", "p", "score")
        if candidate[name] is not None and reference[name] is not None
    )


def _merge(
    points: Sequence[Cell], x_step: float, y_step: float
) -> tuple[Counter[Cell], tuple[float, float]]:
    """Count points on a grid, doubling its steps until few enough places are left."""
    while True:
        cells = Counter(
            (round(x / x_step) * x_step, round(y / y_step) * y_step, other)
            for x, y, other in points
        )
        if len(cells) <= _MAX_CELLS:
            return cells, (x_step, y_step)
        x_step, y_step = 2 * x_step, 2 * y_step


def _draw_cells(axes: Axes, cells: Mapping[Cell, int]) -> None:
    """Draw each place as a marker by its number of rows; hollow where the sides differ."""
    filled: dict[str, Any] = {
        "markerfacecolor": _EQUAL,
        "markeredgewidth": 0.0,
        "alpha": 0.65,
        "zorder": 2,
    }
    hollow: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": _DIFFERS, "zorder": 3}
    scale = 2 if len(cells) < 50 else 1  # a handful of dots must be seen
    for other, style in ((False, filled), (True, hollow)):
        fewer: float = 0
        for most, diameter in _MARKERS:
            at = [(x, y) for (x, y, o), n in cells.items() if o is other and fewer < n <= most]
            fewer = most
            if at:
                x, y = zip(*at, strict=True)
                axes.plot(x, y, linestyle="none", marker="o", markersize=diameter * scale, **style)


@contextmanager
def _plot(name: str) -> Iterator[tuple[Figure, Axes]]:
    """Set up one plot; the user's own matplotlib settings play no part."""
    with matplotlib.style.context(["default", {**_STYLE, "svg.hashsalt": name}]):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
        axes = figure.add_axes((0.1, 0.1, 0.8, 0.8), facecolor="none")
        figure.patch.set_visible(False)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_MUTED)
        axes.tick_params(color=_MUTED, labelcolor=_MUTED, width=0.8, length=3)
        axes.grid(color=_RULE, linewidth=0.7)
        axes.set_axisbelow(True)
        yield figure, axes


def _svg(figure: Figure, label: str) -> str:
    """Return the figure as an SVG element for an HTML page: no names, no own fonts or colours."""
    stream = io.StringIO()
    figure.savefig(
        stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    text = _PROLOG.sub("", stream.getvalue())
    for pattern in (_SHARED_STYLE, _NAMES, _SIZE, _FONT, _UNTURNED):
        text = pattern.sub("", text)
    text = _GEOMETRY.sub(lambda match: _DECIMALS.sub(_rounded, match.group()), text)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, variable)
    text = text.replace("xlink:href", "href")
    text = text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return _GAP.sub("\n", text).strip()


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match.group()):.1f}".removesuffix(".0")
