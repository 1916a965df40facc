"""The CharacterEval benchmark's files: read, transform into scored rows, aggregate, write.

Each file is one JSON document, also those named .jsonl. The rules are those of the official
scripts `transform_format.py` (transform), `run_char_rm.py` (output file) and `compute_score.py`
(means per metric); dimension means are those of the paper's table. Standard library only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charrm.errors import InvalidRow, NotFinite, UnknownRole
from charrm.files import Problems, StrPath, found, read_array, read_object, shown
from charrm.protocol import DIMENSIONS, METRICS, Metric, Row, find_metric

FAILED_GENERATION = "ERROR"
"""The `model_output` that marks a failed generation; such rows are dropped, never scored."""

_DECIMAL_ID = re.compile(r"0|-?[1-9][0-9]*")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class TestRow:
    """One row of the test data; `fields` is the whole object of the file, in its key order."""

    __test__ = False  # the name makes pytest look for tests in it

    id: int
    role: str
    novel_name: str
    context: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Generation:
    """One row of a generation file; `fields` is the whole object, also what charrm does not use."""

    id: int
    role: str
    context: str
    model_output: str | None
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class TransRow:
    """One (row, metric) to be scored; `fields` is the whole object as the output carries it on."""

    id: int
    role: str
    context: str
    model_output: str
    metric: Metric
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Transformed:
    """Rows to score, in file order, and the ids left out by reason: null, error, no_metric."""

    rows: tuple[TransRow, ...]
    dropped: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class OfficialOutput:
    """Text of the official output file, and how many of its rows hold no score."""

    text: str
    unresolved: int


@dataclass(frozen=True)
class MetricMean:
    """Mean of the scored rows of one metric.

    `low` and `high` are the mean if every unresolved row had scored 1, or 5. All three are None
    where there is nothing to take a mean of.
    """

    mean: float | None
    count: int
    unresolved: int
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Aggregate:
    """All twelve metrics, and the dimensions; None for a dimension that lacks a metric's mean."""

    metrics: Mapping[str, MetricMean]
    dimensions: Mapping[str, float | None]


def read_profiles(path: StrPath) -> dict[str, dict[str, Any]]:
    """Read `character_profiles.json`: role -> profile, key order kept. Raises BadFile."""
    problems = Problems(path)
    profiles = {}
    for where, role, profile in _entries(path, problems):
        if _LONE_SURROGATE.search(role):
            problems.add(where, f"found the role {found(role)} with a lone surrogate")
        if not isinstance(profile, dict) or not profile:
            problems.add(where, f"found {found(profile)}, expected an object with the profile")
        profiles[role] = profile
    problems.raise_any()
    return profiles


def read_test_data(path: StrPath) -> list[TestRow]:
    """Read `test_data.jsonl`: rows of id, role, novel_name and context. Raises BadFile."""
    problems = Problems(path)
    checks = {"id": _integer, "role": _name, "novel_name": _text, "context": _text}
    rows = [
        TestRow(row["id"], row["role"], row["novel_name"], row["context"], row)
        for _, row in _rows(path, problems, checks, unique=("id",))
    ]
    problems.raise_any()
    return rows


def read_metrics(path: StrPath) -> dict[str, list[Metric]]:
    """Read `id2metric.jsonl`: id in decimal -> metrics asked of that row. Raises BadFile."""
    problems = Problems(path)
    metrics: dict[str, list[Metric]] = {}
    for where, key, pairs in _entries(path, problems):
        if not _DECIMAL_ID.fullmatch(key):
            problems.add(where, "expected an integer id as str(id) writes it")
        if not isinstance(pairs, list) or not pairs:
            problems.add(where, f"found {found(pairs)}, expected [[metric_en, metric_zh], ...]")
            continue
        metrics[key] = []
        for index, pair in enumerate(pairs):
            at = f"{where}, pair [{index}]"
            if not isinstance(pair, list) or len(pair) != 2:
                problems.add(at, f"found {found(pair)}, expected [metric_en, metric_zh]")
                continue
            metric = _metric(at, pair[0], pair[1], problems)
            if metric in metrics[key]:
                problems.add(at, f"found {metric.en} again, expected each metric once")
            elif metric is not None:
                metrics[key].append(metric)
    problems.raise_any()
    return metrics


def read_generations(path: StrPath) -> list[Generation]:
    """Read a generation file: test rows plus `model_output`, a string or null. Raises BadFile."""
    problems = Problems(path)
    checks = {"id": _integer, "role": _name, "context": _text, "model_output": _text_or_null}
    rows = []
    for where, row in _rows(path, problems, checks, unique=("id",)):
        if "metric_en" in row or "metric_zh" in row:
            problems.add(where, "found a metric: the file is transformed already, read it as such")
        rows.append(Generation(row["id"], row["role"], row["context"], row["model_output"], row))
    problems.raise_any()
    return rows


def read_trans(path: StrPath) -> list[TransRow]:
    """Read a transformed generation file: one element per (row, metric). Raises BadFile."""
    problems = Problems(path)
    checks = {"id": _integer, "role": _name, "context": _text, "model_output": _text}
    checks |= {"metric_en": _text, "metric_zh": _text}
    rows = []
    for where, row in _rows(path, problems, checks, unique=("id", "metric_en")):
        metric = _metric(where, row["metric_en"], row["metric_zh"], problems)
        if metric is not None:
            head = row["id"], row["role"], row["context"], row["model_output"]
            rows.append(TransRow(*head, metric, row))
    problems.raise_any()
    return rows


def transform(
    generations: Iterable[Generation], metrics: Mapping[str, Sequence[Metric]]
) -> Transformed:
    """Make one row per (generation, metric), in file order, as the official script does.

    First null and exactly "ERROR" are dropped, then only the text before the first "\\n" is kept
    (nothing is stripped; the empty string is scored), then `str(id)` is looked up.
    """
    rows = []
    dropped: dict[str, list[int]] = {"null": [], "error": [], "no_metric": []}
    for generation in generations:
        pairs = metrics.get(str(generation.id))
        if generation.model_output is None:
            dropped["null"].append(generation.id)
        elif generation.model_output == FAILED_GENERATION:
            dropped["error"].append(generation.id)
        elif not pairs:
            dropped["no_metric"].append(generation.id)
        else:
            answer = generation.model_output.split("\n", 1)[0]
            for metric in pairs:
                fields = {"model_output": answer, "metric_en": metric.en, "metric_zh": metric.zh}
                fields = {**generation.fields, **fields}
                head = generation.id, generation.role, generation.context
                rows.append(TransRow(*head, answer, metric, fields))
    return Transformed(tuple(rows), {reason: tuple(ids) for reason, ids in dropped.items()})


def to_row(trans_row: TransRow, profiles: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return the row as the scorer takes it, with its role's profile. Raises UnknownRole."""
    if trans_row.role not in profiles:
        raise UnknownRole(
            f"row id {trans_row.id}, role: found {found(trans_row.role)}, expected one of the "
            f"{len(profiles)} roles of the profiles file. Check that the files belong together."
        )
    return Row(
        profile=profiles[trans_row.role],
        context=trans_row.context,
        model_output=trans_row.model_output,
        metric=trans_row.metric.en,
    )


def aggregate(scores: Iterable[tuple[str, float | None]]) -> Aggregate:
    """Average (metric, unrounded score) pairs; a score of None is an unresolved row.

    Per metric the arithmetic mean of its scores, per dimension the unweighted mean of its metrics'
    means. The paper has no overall score, so none is made.
    Raises UnknownMetric, NotFinite, InvalidRow (not a number from 1 to 5).
    """
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    unresolved = dict.fromkeys(METRICS, 0)
    for name, score in scores:
        metric = find_metric(name).en
        if score is None:
            unresolved[metric] += 1
        else:
            values[metric].append(_checked(metric, score))
    metrics = {name: _mean(values[name], unresolved[name]) for name in METRICS}
    dimensions = {}
    for dimension, names in DIMENSIONS.items():
        means = [mean for name in names if (mean := metrics[name].mean) is not None]
        complete = len(means) == len(names)
        dimensions[dimension] = math.fsum(means) / len(means) if complete else None
    return Aggregate(metrics, dimensions)


def official_output(rows: Sequence[TransRow], scores: Sequence[float | None]) -> OfficialOutput:
    """Return the official script's output file: every row with its score under its metric_en.

    `scores` has one entry per row; None is an unresolved row, which gets no key. A lone surrogate
    in a field is written as its JSON escape, where the official script could not write the file.
    Raises NotFinite, InvalidRow (not a number from 1 to 5), ValueError (other length).
    """
    records = []
    for row, score in zip(rows, scores, strict=True):
        record = dict(row.fields)
        if score is None:
            record.pop(row.metric.en, None)  # the number of an earlier run is not this run's
        else:
            record[row.metric.en] = _checked(f"row id {row.id}, {row.metric.en}", score)
        records.append(record)
    text = json.dumps(records, ensure_ascii=False, indent=4, allow_nan=False)
    text = _LONE_SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return OfficialOutput(text, sum(score is None for score in scores))


def _mean(values: list[float], unresolved: int) -> MetricMean:
    total, count = math.fsum(values), len(values)
    everything = count + unresolved
    return MetricMean(
        mean=total / count if count else None,
        count=count,
        unresolved=unresolved,
        low=(total + 1 * unresolved) / everything if everything else None,
        high=(total + 5 * unresolved) / everything if everything else None,
    )


def _checked(where: str, score: object) -> float:
    if not isinstance(score, float | int) or isinstance(score, bool):
        raise InvalidRow(f"{where}: found the score {score!r}, expected a number from 1 to 5.")
    if isinstance(score, float) and not math.isfinite(score):
        raise NotFinite(f"{where}: found the score {score}; pass None for a row without a score.")
    if not 1 <= score <= 5:
        raise InvalidRow(f"{where}: found the score {score}, expected p * 4 + 1, from 1 to 5.")
    return float(score)


def _metric(where: str, en: object, zh: object, problems: Problems) -> Metric | None:
    """Return the metric when both names are known and agree; note the problem otherwise."""
    unknown = False
    for field, value, known in (
        ("metric_en", en, tuple(METRICS)),
        ("metric_zh", zh, tuple(METRICS.values())),
    ):
        if value not in known:
            unknown = True
            problems.add(
                f"{where}, {field}", f"found {found(value)}, expected one of {', '.join(known)}"
            )
    if unknown:
        return None
    metric = Metric(str(en), str(zh))
    if METRICS[metric.en] == metric.zh:
        return metric
    problems.add(
        f"{where}, metric_zh",
        f"found {metric.zh} beside metric_en {metric.en}, expected {METRICS[metric.en]}",
    )
    return None


def _integer(value: object) -> str | None:
    return None if type(value) is int else "an integer"


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else "a string"


def _text_or_null(value: object) -> str | None:
    return None if value is None or isinstance(value, str) else "a string or null"


def _name(value: object) -> str | None:
    good = isinstance(value, str) and not _LONE_SURROGATE.search(value)
    return None if good else "a string without lone surrogates"


def _rows(
    path: StrPath,
    problems: Problems,
    checks: Mapping[str, Callable[[object], str | None]],
    unique: tuple[str, ...],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of an array of objects whose fields pass; note problems of the others.

    A check returns what it expected, or None. `unique` names the fields that no two rows share.
    """
    first: dict[tuple[object, ...], int] = {}
    for index, row in enumerate(read_array(path)):
        where = f"row [{index}]"
        if not isinstance(row, dict):
            problems.add(where, f"found {found(row)}, expected an object")
            continue
        if "id" in row:
            where += f" (id {found(row['id'])})"
        problems.add_strays(where, row)
        bad = set()
        for field, check in checks.items():
            expected = check(row.get(field, ...))
            if expected is not None:
                bad.add(field)
                what = found(row[field]) if field in row else "nothing"
                problems.add(f"{where}, {field}", f"found {what}, expected {expected}")
        if bad.isdisjoint(unique):
            key = tuple(row[field] for field in unique)
            earlier = first.setdefault(key, index)
            if earlier != index:
                text = f"found the same as in row [{earlier}], expected it once"
                problems.add(f"{where}, {' and '.join(unique)}", text)
        if not bad:
            yield where, row


def _entries(path: StrPath, problems: Problems) -> Iterator[tuple[str, str, Any]]:
    """Yield (where, key, value) of an object, noting repeated keys and stray values."""
    document = read_object(path)
    problems.add_strays("the file", document)
    for index, (key, value) in enumerate(document.items()):
        yield f"entry [{index}] ({shown(key)})", key, value
