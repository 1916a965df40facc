"""The report's page: what is said, in which order; how it looks is in the template.

It names rows by slot and id and never quotes what they hold.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from charrm.identity import AUDITED_HUB, AUDITED_REVISION
from charrm.protocol import DIMENSIONS, METRICS
from charrm.published import SOURCE
from golden import plots
from golden.bundle import SELFTEST, Evidence, digest_bytes, is_digest
from golden.compare import WORST_ROWS, Comparison, MetricMeans
from golden.criteria import Outcome, Verdict
from golden.upstream import PAPER_NAMES

_TEMPLATES = Path(__file__).with_name("templates")
_TEMPLATE = "report.html.j2"
_LISTED = 100  # unresolved rows on the page; comparison.json has them all

REFERENCES = {
    "slow": "an independent forward pass (slow)",
    "official": "the checkpoint’s own code (official)",
    "fp32": "the same model in float32 (fp32)",
    "server": "a running server (server)",
    "row-anchor": "public scores of the official prompts (row-anchor)",
}
CRITERIA = {
    "unresolved_rows": "rows without a comparison",
    "ids_unequal": "rows whose token ids differ",
    "tokens_unequal": "rows whose token count differs",
    "hidden_unequal": "rows whose last hidden state differs in any bit",
    "logit_unequal": "rows whose logit differs",
    "p_unequal": "rows whose p differs",
    "score_unequal": "rows whose score differs",
    "steps_max": "largest difference of p, in steps of the bf16 grid",
    "score_difference_max": "largest difference of a score",
    "score_difference_mean": "mean difference of scores, without sign",
    "metric_mean_difference_max": "largest difference of a model’s mean of a metric",
    "paper_cell_difference_max": "largest difference from a cell of the paper’s table",
}
RESPECTS = {
    "ids": "token ids, by their sha256",
    "tokens": "token count",
    "hidden": "last hidden state, by the sha256 of its bits",
    "logit": "logit",
    "p": "p",
    "score": "score",
}


def renderer() -> str:
    """Name what a page's bytes depend on beside the evidence: this code and who draws the plots."""
    sources = [Path(__file__), Path(plots.__file__), _TEMPLATES / _TEMPLATE]
    code = digest_bytes(b"".join(path.read_bytes() for path in sources))
    return f"charrm golden report {code[:16]}, {plots.version()}"


def overall(verdicts: Sequence[Verdict]) -> Outcome:
    """Return FAIL before UNKNOWN before PASS; MEASURED when there was no limit at all."""
    outcomes = {verdict.outcome for verdict in verdicts}
    order = (Outcome.FAIL, Outcome.UNKNOWN, Outcome.PASS)
    return next((outcome for outcome in order if outcome in outcomes), Outcome.MEASURED)


def render(
    evidence: Evidence, comparison: Comparison, verdicts: Mapping[str, Sequence[Verdict]]
) -> str:
    """Return the page; `verdicts` are by table of the criteria file.

    The same arguments give the same text, up to the versions that `renderer` names.
    """
    manifest = evidence.manifest
    scored = [line for line in evidence.lines if line["candidate"] and line["reference"]]
    outcome = overall([verdict for table in verdicts.values() for verdict in table])
    return _environment().get_template(_TEMPLATE).render(
        renderer=renderer(),
        evidence=evidence,
        manifest=manifest,
        comparison=comparison,
        outcome=outcome.value,
        sentence=_sentence(manifest, verdicts, outcome),
        notes=list(_notes(evidence, comparison)),
        verdicts=verdicts,
        criteria=CRITERIA,
        respects=RESPECTS,
        scored=len(scored),
        figures=_figures(comparison, scored),
        bars=_bars(comparison),
        means=_means(comparison),
        paper=_paper(comparison),
        paper_source=SOURCE,
        paper_names=PAPER_NAMES,
        worst_rows=WORST_ROWS,
        unresolved=_unresolved(evidence, comparison),
        unresolved_kinds=_unresolved_kinds(comparison),
        identity=_identity(manifest),
        selftest=_selftest(evidence),
    )  # fmt: skip


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": lambda value: f"{value:,}",
        "number": _number,
        "mean": lambda value: "–" if value is None else f"{value:.3f}",
        "signed": _signed,
        "exact": _exact,
        "duration": _duration,
        "moment": _moment,
        "plural": _plural,
    }
    return environment


def _number(value: float | None) -> str:
    """Counts as they are, other numbers to six digits; a dash for what was not measured."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _exact(value: float, sign: bool = False) -> str:
    return f"{value:{'+' if sign and value else ''}.9g}".replace("-", "−")


def _signed(value: float | None) -> str:
    """A bare 0 says exactly equal; 0.000 with a sign says less than half of the last digit."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:+.3f}".replace("-", "−")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _moment(text: str) -> str:
    """Show an ISO time in UTC to the minute; anything else as it is."""
    try:
        moment = datetime.fromisoformat(text).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return text
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _sentence(
    manifest: Mapping[str, Any], verdicts: Mapping[str, Sequence[Verdict]], outcome: Outcome
) -> str:
    every = [verdict for table in verdicts.values() for verdict in table]
    free = sum(verdict.outcome is Outcome.MEASURED for verdict in every)
    hits = sum(verdict.outcome is outcome for verdict in every)
    limits = _plural(len(every) - free, "limit")
    conclusion = {
        Outcome.PASS: f"{limits}, {'it holds' if hits == 1 else 'all hold'}",
        Outcome.FAIL: f"{hits} of {limits} exceeded",
        Outcome.UNKNOWN: f"no limit is exceeded, but {hits} of {limits} could not be judged on "
        "every row",
        Outcome.MEASURED: "no limit was set",
    }[outcome]
    if free:
        conclusion += f"; {_plural(free, 'value')} measured without a limit"
    told = manifest["candidate"]
    details = [str(told[name]) for name in ("engine", "dtype", "device") if name in told]
    candidate = "charrm" + (f" ({', '.join(details)})" if details else "")
    reference = REFERENCES.get(manifest["reference"], manifest["reference"])
    rows = _plural(manifest["rows"], "row")
    facts = manifest["set"]
    of = (
        "a stand-in set" if facts["is_standin"]
        else "the official prompts with an empty answer" if manifest["reference"] == "row-anchor"
        else "the published set" if facts["is_published"]
        else "a set of one’s own"
    )  # fmt: skip
    return f"{candidate} compared with {reference} on {rows} of {of}: {conclusion}."


def _notes(evidence: Evidence, comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield label and text of what a reader must know before the numbers."""
    manifest = evidence.manifest
    facts, told = manifest["set"], manifest["candidate"]
    if facts["is_standin"]:
        yield (
            "STAND-IN",
            "The answers of this set were written by no model. The comparison is real; the scores "
            "say nothing about any model, nor beside the paper’s.",
        )
    elif not facts["is_published"]:
        yield "OWN SET", "The files are not those that were published, as their digests show."
    if manifest["level"] == "tokens":
        yield "TOKENS ONLY", "Ids and token counts were compared. No score was computed."
    if manifest["sample"] is not None:
        yield (
            "SAMPLE",
            f"{manifest['rows']:,} rows were chosen so that every metric, role and length class "
            "is held; the others were not looked at.",
        )
    if told.get("is_protocol") is False:
        dtype = told.get("dtype", "another dtype")
        yield (
            "NOT THE PROTOCOL",
            f"The candidate computed in {dtype}; official scores are those of bfloat16.",
        )
    yield from _audit_notes(told.get("audit"))
    if comparison.unresolved:
        yield (
            "UNRESOLVED",
            f"{len(comparison.unresolved):,} of {comparison.rows:,} rows have no comparison. They "
            "stay in every denominator; means are given with bounds.",
        )


def _audit_notes(audit: object) -> Iterator[tuple[str, str]]:
    release = f"{AUDITED_HUB} at revision {AUDITED_REVISION[:10]}"
    if not isinstance(audit, dict) or not audit:
        yield (
            "NOT AUDITED",
            f"The candidate does not tell whether its files are those of {release}.",
        )
        return
    other = [name for name, state in audit.items() if state not in ("matches", "absent")]
    absent = [name for name, state in audit.items() if state == "absent"]
    if other:
        yield "NOT THE AUDITED RELEASE", f"Other files than {release}: {', '.join(other)}."
    elif absent:
        yield "NOT FULLY AUDITED", f"Absent beside {release}: {', '.join(absent)}."


def _figures(comparison: Comparison, scored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not scored:
        return []
    counts, unit = comparison.steps_histogram, "steps of the bf16 grid at the reference’s p"
    if not any(counts.values()):
        counts, unit = _score_classes(scored), "score, up to the named value"
    scatter, cell = plots.score_scatter(scored)
    key = "Filled: all values equal. Hollow: a value differs. Larger: more rows."
    return [
        {
            "title": "Differences",
            "svg": Markup(plots.step_histogram(counts)),
            "text": f"Rows by difference in {unit}. 0 is exactly equal.",
        },
        {
            "title": "Scores",
            "svg": Markup(scatter),
            "text": f"{key} Points are merged on a grid of {cell}.",
        },
        {"title": "Length", "svg": Markup(plots.length_plot(scored)), "text": key},
    ]


def _score_classes(scored: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Rows by |difference of scores|, where the reference tells no p to take steps of."""
    edges = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    names = [f"{edge:g}" for edge in edges]
    counts = dict.fromkeys([*names, ">1"], 0)
    for line in scored:
        difference = abs(line["candidate"]["score"] - line["reference"]["score"])
        fits = (name for edge, name in zip(edges, names, strict=True) if difference <= edge)
        counts[next(fits, ">1")] += 1
    return counts


def _bars(comparison: Comparison) -> list[dict[str, Any]]:
    """One plot per model: its means, beside the paper's where the paper has the model."""
    bars = []
    for model, metrics in comparison.models.items():
        cells = {cell["name"]: cell["paper"] for cell in comparison.paper.get(model, ())}
        means = [
            (name, m.candidate, cells[name] if cells else m.reference, m.low, m.high)
            for name, m in metrics.items()
            if m.candidate is not None and m.low is not None and m.high is not None
        ]
        if means:
            svg = Markup(plots.metric_bars(model, means))
            bars.append({"model": model, "svg": svg, "paper": bool(cells)})
    return bars


def _means(comparison: Comparison) -> list[dict[str, Any]]:
    """One table per model, after one over all models where there are several."""
    tables: dict[str, Mapping[str, MetricMeans]] = dict(comparison.models)
    if len(tables) > 1:
        tables = {"All models": comparison.metrics, **tables}
    return [
        {
            "title": title,
            "metrics": {name: m for name, m in metrics.items() if m.rows},
            "bounds": any(m.unresolved for m in metrics.values()),
            "dimensions": comparison.dimensions.get(title, {}),
        }
        for title, metrics in tables.items()
    ]


def _paper(comparison: Comparison) -> list[dict[str, Any]]:
    """Rows of the side-by-side table: a metric or a dimension's average, a cell per model."""
    models = comparison.paper
    if not any(cell["ours"] is not None for cells in models.values() for cell in cells):
        return []
    by_name = {model: {cell["name"]: cell for cell in cells} for model, cells in models.items()}
    names = [name for dimension, metrics in DIMENSIONS.items() for name in (*metrics, dimension)]
    assert set(names) == {*METRICS, *DIMENSIONS}
    return [
        {"name": name, "average": name in DIMENSIONS, "cells": [by_name[m][name] for m in models]}
        for name in names
    ]


def _unresolved(evidence: Evidence, comparison: Comparison) -> list[dict[str, Any]]:
    wanted = {entry["slot"] for entry in comparison.unresolved[:_LISTED]}
    return [line for line in evidence.lines if line["slot"] in wanted]


def _unresolved_kinds(comparison: Comparison) -> list[tuple[str, str, int]]:
    kinds = Counter((e["error"]["side"], e["error"]["kind"]) for e in comparison.unresolved)
    return [(side, kind, count) for (side, kind), count in sorted(kinds.items())]


def _identity(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Both identities side by side: a group per field, a row per value in it."""
    sides = [manifest["candidate"], manifest["reference_identity"]]
    groups = []
    for field in dict.fromkeys([*sides[0], *sides[1]]):
        flat = [dict(_flatten(side[field])) if field in side else {} for side in sides]
        rows = [
            {
                "name": name,
                "values": [_shown(side[name]) if name in side else None for side in flat],
            }
            for name in dict.fromkeys([*flat[0], *flat[1]])
        ]
        groups.append({"name": field, "rows": rows})
    return sorted(groups, key=lambda group: [row["name"] for row in group["rows"]] != [""])


def _flatten(value: object, path: str = "") -> list[tuple[str, object]]:
    if not isinstance(value, dict):
        return [(path, value)]
    dot = "." if path else ""
    return [pair for key, inner in value.items() for pair in _flatten(inner, f"{path}{dot}{key}")]


def _shown(value: object) -> dict[str, str]:
    """Digests are cut for the eye, whole in the title and in manifest.json."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return {"text": f"{text[:16]}…" if is_digest(text) else text, "whole": text}


def _selftest(evidence: Evidence) -> dict[str, Any] | None:
    """The last selftest, if it is of the code that made this run."""
    selftest = evidence.selftest
    if selftest is None or selftest["code_sha256"] != evidence.manifest["code_sha256"]:
        return None
    planted = [fault for fault in selftest["faults"] if fault["fault"] != "NONE"]
    missed = [fault["fault"] for fault in planted if fault["outcome"] != "red"]
    missed += [
        "no fault at all, which ended " + fault["outcome"]
        for fault in selftest["faults"]
        if fault["fault"] == "NONE" and fault["outcome"] != "green"
    ]
    return {**selftest, "planted": planted, "missed": missed, "file": SELFTEST}
