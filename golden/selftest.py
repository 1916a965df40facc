"""Planted faults: each must end red, or a green report of this code would prove nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from charrm.demo import build_demo_checkpoint, demo_profiles, demo_rows
from charrm.errors import BadFile
from charrm.files import read_object, write_atomically
from charrm.identity import cache_folder, digest_json
from charrm.protocol import METRICS, Row
from charrm.runtime import environment, library_versions, parse_device
from charrm.scorer import Scorer
from golden.compare import compare
from golden.criteria import exit_code, judge, read_criteria
from golden.reference import Fault, SlowReference
from golden.replay import dump, golden_code, replay_row
from golden.sides import Side, Source, digest_hidden, digest_ids, input_text
from golden.sources import EngineSource, SlowSource
from golden.structure import ReplayRow

FORWARD_FAULTS = (
    Fault.RELATIVE_BIAS,
    Fault.LEFT_PADDING,
    Fault.FLOAT32_HEAD,
    Fault.MISSING_EOS,
    Fault.FLOAT32_BIAS,
    Fault.NORM_WEIGHT_BEFORE_CAST,
)
TEXT_FAULTS = {
    "CHANGED_CHARACTER": "the first character of the context is another one",
    "WRONG_METRIC_NAME": "the input text names the metric in English",
    "PROFILE_AS_JSON": "the profile is rendered as JSON, not as the official repr",
    "SWAPPED_ROWS": "every two neighbouring rows have changed places",
}


def run_selftest(folder: Path) -> dict[str, Any]:
    """Compare each planted fault with the slow reference on demo rows, and no fault with it too.

    Returns `date`, `digest` (over everything but the date), `ok`, and the outcome per fault: red
    when the criteria fail as they must. `folder` keeps the demo checkpoint.
    """
    checkpoint = build_demo_checkpoint(folder)
    rows = selftest_rows()
    reference = _Remembering(SlowSource(checkpoint))
    model = SlowReference.open(checkpoint)
    faults: list[tuple[str, str, Source]] = [
        (
            "NONE",
            "the library as it is; must be green",
            EngineSource(Scorer.open(checkpoint, device="cpu")),
        )
    ]
    faults += [(f.name, f.value, FaultySource(model, rows, f)) for f in FORWARD_FAULTS]
    faults += [(n, text, FaultySource(model, rows, n)) for n, text in TEXT_FAULTS.items()]
    results = [_outcome(name, what, source, reference, rows) for name, what, source in faults]
    content = {
        "ok": all(r["outcome"] == ("green" if r["fault"] == "NONE" else "red") for r in results),
        "faults": results,
        "code_sha256": golden_code(),
        "criteria_sha256": read_criteria().digest,
        "versions": library_versions(),
        "environment": environment(parse_device("cpu")),
    }
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "digest": digest_json(content), **content}


def selftest_rows() -> list[ReplayRow]:
    """Return the shortest demo rows, of different contexts, so that a selftest takes seconds."""
    profiles = demo_profiles()
    by_id = {row["id"]: row for row in reversed(demo_rows())}
    shortest = sorted(by_id.values(), key=lambda row: len(str(row)))[:6]
    return [
        ReplayRow(
            slot=f"demo/{position:05d}",
            model="demo",
            position=position,
            id=row["id"],
            role=row["role"],
            metric_en=row["metric_en"],
            row=Row(
                profile=profiles[row["role"]],
                context=row["context"],
                model_output=row["model_output"],
                metric=row["metric_en"],
            ),
        )
        for position, row in enumerate(shortest)
    ]


def remember_selftest(result: dict[str, Any]) -> Path:
    """Keep the result where reports look for it."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump(result))
    return path


def last_selftest() -> dict[str, Any] | None:
    """Return the last kept result if it is of this very code, else None."""
    try:
        result = read_object(_path())
    except BadFile:
        return None
    content = {k: v for k, v in result.items() if k not in ("date", "digest")}
    valid = result.get("digest") == digest_json(content) and result.get("ok") is True
    return result if valid and result.get("code_sha256") == golden_code() else None


class FaultySource:
    """The slow reference with one fault planted in its forward, its ids or its text."""

    def __init__(self, model: SlowReference, rows: Sequence[ReplayRow], fault: Fault | str) -> None:
        self.name = fault.name if isinstance(fault, Fault) else fault
        self._model = model
        self._rows = rows
        self._fault = fault if isinstance(fault, Fault) else None

    def identity(self) -> dict[str, Any]:
        return {"fault": self.name}

    def tokenize(self, row: ReplayRow) -> Side:
        ids = self._model.ids(self._text(row), self._fault)
        return Side(digest_ids(ids), len(ids), 0)

    def score(self, row: ReplayRow) -> Side:
        ids = self._model.ids(self._text(row), self._fault)
        out = self._model.forward(ids, self._fault)
        hidden = digest_hidden(out.hidden)
        return Side(digest_ids(ids), len(ids), 0, hidden, out.logit, out.p, out.score)

    def close(self) -> None:
        pass

    def _text(self, row: ReplayRow) -> str:
        if self.name == "SWAPPED_ROWS":
            return input_text(self._rows[row.position ^ 1])
        if self.name == "PROFILE_AS_JSON":
            profile = json.dumps(row.row.profile, ensure_ascii=False)
            return input_text(replace(row, row=replace(row.row, profile=profile)))
        text = input_text(row)
        if self.name == "CHANGED_CHARACTER":
            header = "<Context>\n\n"
            at = text.index(header) + len(header)
            return text[:at] + ("你" if text[at] != "你" else "我") + text[at + 1 :]
        if self.name == "WRONG_METRIC_NAME":
            return text.removesuffix(METRICS[row.metric_en]) + row.metric_en
        return text


class _Remembering:
    """A reference that computes each row once for all faults."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self.identity = source.identity
        self.tokenize = source.tokenize
        self.close = source.close
        self._compute = source.score
        self._known: dict[str, Side] = {}

    def score(self, row: ReplayRow) -> Side:
        if row.slot not in self._known:
            self._known[row.slot] = self._compute(row)
        return self._known[row.slot]


def _outcome(
    name: str, what: str, source: Source, reference: Source, rows: Sequence[ReplayRow]
) -> dict[str, Any]:
    lines = [{"slot": row.slot, **replay_row(row, "scores", source, reference)} for row in rows]
    comparison = compare(lines)
    verdicts = judge(read_criteria(), ["slow"], comparison)
    failed = [verdict.criterion for verdict in verdicts if verdict.outcome.value == "FAIL"]
    code = exit_code(verdicts)
    outcome = {0: "green", 1: "red"}.get(code, "unknown")
    return {"fault": name, "what": what, "outcome": outcome, "rows": len(rows), "failed": failed}


def _path() -> Path:
    return cache_folder() / "golden-selftest.json"
