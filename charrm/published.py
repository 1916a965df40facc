"""What was published about CharacterEval: the paper's table, and the counts of its data files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from charrm.charactereval import Aggregate
from charrm.errors import BadRequest
from charrm.protocol import DIMENSIONS, METRICS

SOURCE = (
    "CharacterEval paper (arXiv 2401.01275), table of detailed results; printed to 3 decimals, "
    "transcribed by eye"
)

TEST_ROWS = 4564
IDS_WITH_METRICS = 4531
IDS_WITHOUT_METRICS = 33
PAIRS = 8032
ROLES = 78
ROWS_PER_METRIC: dict[str, int] = {
    "Empathy": 744,
    "Diversity": 737,
    "Communication_skills": 734,
    "Utterance": 724,
    "Humanlikeness": 724,
    "Behavior": 720,
    "Accuracy": 718,
    "Consistency": 715,
    "Exposure": 714,
    "Coherence": 708,
    "Hallucination": 486,
    "Fluency": 308,
}

# Per dimension, in the order of DIMENSIONS: the means of its metrics, then their printed average.
# The personality back-testing column is left out: this model does not score it.
_TABLE: dict[str, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]] = {
    "ChatGLM3-6B": (
        (3.269, 3.647, 3.283, 3.399),
        (2.016, 2.792, 2.704, 2.455, 2.812, 2.556),
        (3.064, 2.932, 1.969, 2.993, 2.739),
    ),
    "XVERSE-7B": (
        (3.393, 3.752, 3.518, 3.554),
        (1.834, 2.774, 2.763, 2.564, 2.887, 2.564),
        (3.395, 2.743, 2.013, 2.936, 2.772),
    ),
    "Baichuan2-7B": (
        (3.551, 3.894, 3.827, 3.757),
        (1.813, 2.849, 2.929, 2.83, 3.081, 2.7),
        (3.67, 2.728, 2.115, 2.984, 2.874),
    ),
    "Qwen-7B": (
        (3.187, 3.564, 3.229, 3.327),
        (1.956, 2.728, 2.633, 2.605, 2.78, 2.54),
        (3.036, 2.791, 2.052, 2.838, 2.679),
    ),
    "InternLM-7B": (
        (3.527, 3.823, 3.744, 3.698),
        (1.782, 2.8, 2.781, 2.719, 3.016, 2.62),
        (3.546, 2.622, 2.07, 2.897, 2.784),
    ),
    "XVERSE-13B": (
        (3.444, 3.811, 3.559, 3.605),
        (1.977, 2.828, 2.862, 2.579, 2.915, 2.632),
        (3.319, 2.939, 2.045, 3.018, 2.83),
    ),
    "Baichuan2-13B": (
        (3.596, 3.924, 3.864, 3.795),
        (1.802, 2.869, 2.946, 2.808, 3.081, 2.701),
        (3.7, 2.703, 2.136, 3.021, 2.89),
    ),
    "Qwen-14B": (
        (3.351, 3.765, 3.51, 3.542),
        (1.988, 2.8, 2.811, 2.744, 2.9, 2.649),
        (3.354, 2.871, 2.237, 2.97, 2.858),
    ),
    "InternLM-20B": (
        (3.576, 3.943, 3.717, 3.745),
        (1.945, 2.916, 2.92, 2.753, 3.041, 2.715),
        (3.582, 2.885, 2.132, 3.047, 2.911),
    ),
    "CharacterGLM": (
        (3.414, 3.717, 3.737, 3.623),
        (1.64, 2.819, 2.738, 2.301, 2.969, 2.493),
        (3.738, 2.265, 1.966, 2.812, 2.695),
    ),
    "Xingchen": (
        (3.378, 3.807, 3.754, 3.646),
        (1.636, 2.768, 2.743, 2.772, 3.055, 2.595),
        (3.757, 2.272, 2.1, 2.799, 2.732),
    ),
    "MiniMax": (
        (3.609, 3.932, 3.811, 3.784),
        (1.835, 2.91, 2.944, 2.774, 3.125, 2.718),
        (3.768, 2.672, 2.15, 3.017, 2.902),
    ),
    "BC-NPC-Turbo": (
        (3.578, 3.898, 3.916, 3.798),
        (1.802, 2.964, 2.993, 2.91, 3.151, 2.764),
        (3.836, 2.643, 2.336, 2.971, 2.946),
    ),
    "GPT-3.5": (
        (2.629, 2.917, 2.7, 2.749),
        (1.716, 2.339, 2.212, 1.921, 2.316, 2.101),
        (2.565, 2.422, 1.66, 2.526, 2.293),
    ),
    "GPT-4": (
        (3.332, 3.669, 3.343, 3.448),
        (2.25, 2.855, 2.785, 2.721, 2.873, 2.697),
        (3.143, 3.184, 2.153, 3.01, 2.873),
    ),
}


@dataclass(frozen=True)
class PublishedMeans:
    """One model's line of the paper's table."""

    metrics: Mapping[str, float]
    dimensions: Mapping[str, float]


@dataclass(frozen=True)
class Difference:
    """Our mean of a metric or dimension beside the paper's; `difference` is ours minus paper's.

    `ours` and `difference` are None where the aggregate holds no mean.
    """

    name: str
    ours: float | None
    paper: float
    difference: float | None


def _published(blocks: tuple[tuple[float, ...], ...]) -> PublishedMeans:
    metrics: dict[str, float] = {}
    dimensions = {}
    for (dimension, names), (*means, average) in zip(DIMENSIONS.items(), blocks, strict=True):
        metrics |= zip(names, means, strict=True)
        dimensions[dimension] = average
    return PublishedMeans(metrics, dimensions)


PUBLISHED: dict[str, PublishedMeans] = {name: _published(row) for name, row in _TABLE.items()}


def compare_with_published(aggregate: Aggregate, model_name: str) -> tuple[Difference, ...]:
    """Set an aggregate beside the paper's line of `model_name`: 12 metrics, then 3 dimensions.

    Raises BadRequest for a model that the paper does not list.
    """
    if model_name not in PUBLISHED:
        raise BadRequest(
            f"model: found {model_name!a}, expected one that the paper lists: "
            f"{', '.join(PUBLISHED)}."
        )
    paper = PUBLISHED[model_name]
    metrics = (_differ(name, aggregate.metrics[name].mean, paper.metrics[name]) for name in METRICS)
    dimensions = (
        _differ(name, aggregate.dimensions[name], paper.dimensions[name]) for name in DIMENSIONS
    )
    return (*metrics, *dimensions)


def _differ(name: str, ours: float | None, paper: float) -> Difference:
    return Difference(name, ours, paper, None if ours is None else ours - paper)
