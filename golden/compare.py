"""The only comparator: ledger lines in, counts, differences and means out. Loads no torch.

A line is what `replay` wrote for one row: ids, and for each side `hidden` (digest of its bits, null
where a side does not tell), `logit`, `p`, `score`; or the error that left the row unresolved.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from charrm.charactereval import Aggregate, aggregate
from charrm.protocol import METRICS
from charrm.published import compare_with_published
from golden.upstream import PAPER_NAMES

Line = Mapping[str, Any]
WORST_ROWS = 20


@dataclass(frozen=True)
class Equality:
    """How many rows could be compared in one respect, and how many of them differ."""

    measured: int
    unequal: int


@dataclass(frozen=True)
class MetricMeans:
    """One metric of one model: means of both sides over its resolved rows.

    `low` and `high` are the candidate's mean with every unresolved row counted as 1 and as 5.
    """

    rows: int
    unresolved: int
    candidate: float | None
    reference: float | None
    difference: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """Everything that is reported about a run, computed from its ledger alone."""

    rows: int
    unresolved: list[dict[str, Any]]  # slot and error of every row without a comparison
    equality: dict[str, Equality]  # ids, tokens, hidden, logit, p, score
    steps_max: float | None
    steps_mean: float | None
    steps_histogram: dict[str, int]  # bf16 grid steps of p: "0", "1", ... "8", ">8"
    score_difference_max: float | None
    score_difference_mean: float | None
    metrics: dict[str, MetricMeans]  # over all models
    models: dict[str, dict[str, MetricMeans]]
    dimensions: dict[str, dict[str, float | None]]  # model -> dimension -> candidate's mean
    paper: dict[str, list[dict[str, Any]]]  # model -> name, ours, paper, difference
    worst: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready values."""
        return asdict(self)


def compare(lines: Sequence[Line]) -> Comparison:
    """Compare both sides of every line. Raises charrm errors for scores that are none."""
    pairs = [line for line in lines if _both_scored(line)]
    steps = [grid_steps(line["candidate"]["p"], line["reference"]["p"])
             for line in pairs if line["reference"]["p"] is not None]  # fmt: skip
    differences = [abs(_difference(line)) for line in pairs]
    models = sorted({model_of(line) for line in lines})
    by_model = {m: [line for line in lines if model_of(line) == m] for m in models}
    aggregates = {m: aggregate(_scores(by_model[m], "candidate")) for m in models}
    return Comparison(
        rows=len(lines),
        unresolved=[
            {"slot": line["slot"], "error": line["error"]} for line in lines if line["error"]
        ],
        equality={
            "ids": _equality(lines, lambda line, side: line["ids"][side]),
            "tokens": _equality(lines, lambda line, side: line["tokens"][side]),
            **{name: _equality(lines, _value_of(name))
               for name in ("hidden", "logit", "p", "score")},
        },
        steps_max=max(steps, default=None),
        steps_mean=_mean(steps),
        steps_histogram=_histogram(steps),
        score_difference_max=max(differences, default=None),
        score_difference_mean=_mean(differences),
        metrics=_metric_means(lines),
        models={m: _metric_means(by_model[m]) for m in models},
        dimensions={m: dict(aggregates[m].dimensions) for m in models},
        paper={m: _paper(m, aggregates[m]) for m in models if m in PAPER_NAMES},
        worst=_worst(pairs),
    )  # fmt: skip


def model_of(line: Line) -> str:
    """Return the model of a line: its slot without the position."""
    return str(line["slot"]).rpartition("/")[0]


def grid_steps(p: float, reference: float) -> float:
    """Return |p - reference| in steps of the bf16 grid (8 significant bits) at the reference."""
    return abs(p - reference) / 2.0 ** (math.frexp(reference)[1] - 8)


def measured_values(comparison: Comparison) -> dict[str, float | None]:
    """Return every quantity a criterion may limit; None where nothing could be measured."""
    values: dict[str, float | None] = {"unresolved_rows": len(comparison.unresolved)}
    for name, equality in comparison.equality.items():
        values[f"{name}_unequal"] = equality.unequal if equality.measured else None
    values["steps_max"] = comparison.steps_max
    values["score_difference_max"] = comparison.score_difference_max
    values["score_difference_mean"] = comparison.score_difference_mean
    means = [m for metrics in comparison.models.values() for m in metrics.values()]
    mean_differences = [abs(m.difference) for m in means if m.difference is not None]
    values["metric_mean_difference_max"] = max(mean_differences, default=None)
    cells = [cell["difference"] for cells in comparison.paper.values() for cell in cells]
    complete = bool(cells) and None not in cells
    values["paper_cell_difference_max"] = max(map(abs, cells)) if complete else None
    return values


def _both_scored(line: Line) -> bool:
    return bool(line["candidate"]) and bool(line["reference"])


def _difference(line: Line) -> float:
    return float(line["candidate"]["score"]) - float(line["reference"]["score"])


def _value_of(name: str) -> Callable[[Line, str], Any]:
    return lambda line, side: line[side][name] if line[side] else None


def _equality(lines: Iterable[Line], value: Callable[[Line, str], Any]) -> Equality:
    pairs = [(value(line, "candidate"), value(line, "reference")) for line in lines]
    measured = [(a, b) for a, b in pairs if a is not None and b is not None]
    return Equality(len(measured), sum(a != b for a, b in measured))


def _scores(lines: Iterable[Line], side: str) -> list[tuple[str, float | None]]:
    return [(line["metric"], line[side]["score"] if _both_scored(line) else None)
            for line in lines]  # fmt: skip


def _metric_means(lines: Sequence[Line]) -> dict[str, MetricMeans]:
    candidate = aggregate(_scores(lines, "candidate")).metrics
    reference = aggregate(_scores(lines, "reference")).metrics
    return {
        name: MetricMeans(
            rows=candidate[name].count + candidate[name].unresolved,
            unresolved=candidate[name].unresolved,
            candidate=candidate[name].mean,
            reference=reference[name].mean,
            difference=_minus(candidate[name].mean, reference[name].mean),
            low=candidate[name].low,
            high=candidate[name].high,
        )
        for name in METRICS
    }


def _paper(model: str, ours: Aggregate) -> list[dict[str, Any]]:
    """The model's row of the paper's table beside ours: twelve metrics and three averages."""
    return [asdict(cell) for cell in compare_with_published(ours, PAPER_NAMES[model])]


def _worst(pairs: Sequence[Line]) -> list[dict[str, Any]]:
    """The rows that differ most, then those whose bits differ though their scores agree."""

    def severity(line: Line) -> tuple[float, bool, str]:
        differs = any(
            line["candidate"][name] != line["reference"][name]
            for name in ("hidden", "logit", "p")
            if line["reference"][name] is not None
        )
        return (-abs(_difference(line)), not differs, line["slot"])

    return [
        {
            "slot": line["slot"],
            "id": line["id"],
            "metric": line["metric"],
            "tokens": line["tokens"]["candidate"],
            "candidate": line["candidate"]["score"],
            "reference": line["reference"]["score"],
            "difference": _difference(line),
        }
        for line in sorted(pairs, key=severity)[:WORST_ROWS]
        if severity(line)[:2] != (0.0, True)
    ]


def _histogram(steps: Sequence[float]) -> dict[str, int]:
    counts = Counter(str(math.ceil(s)) if s <= 8 else ">8" for s in steps)
    return {name: counts[name] for name in [*map(str, range(9)), ">8"]}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
