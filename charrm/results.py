"""What a row ends as: a score with its evidence, or a typed error. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from charrm.errors import RowError, UnexpectedAnswer, error_from_kind


@dataclass(frozen=True)
class ScoredRow:
    """A score with the evidence of how it was made."""

    index: int
    score: float  # p * 4 + 1, unrounded
    p: float
    logit: float
    protocol: str
    engine: str
    identity: str  # digest; `Scorer.identity` or GET /v1/identity tells what is behind it
    tokens: int  # scored, with the appended </s>
    tokens_dropped: int
    truncated: bool
    sections_lost: dict[str, float]  # section -> fraction of its characters cut off in front
    metric_en: str
    metric_zh: str
    flags: list[str]
    ok: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True)
class FailedRow:
    """A row without a score, and why."""

    index: int
    error: RowError
    ok: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the failure as JSON-ready values."""
        error = {"kind": self.error.kind, "message": self.error.message}
        return {"index": self.index, "ok": False, "error": error}


Result = ScoredRow | FailedRow


def result_from_json(value: Mapping[str, Any]) -> Result:
    """Read back what `to_json` wrote. Raises UnexpectedAnswer for anything else."""
    names = {f.name for f in fields(ScoredRow)}
    if value.get("ok") is True and value.keys() == names:
        return ScoredRow(**value)
    error = value.get("error")
    failed = value.get("ok") is False and value.keys() == {"index", "ok", "error"}
    if failed and isinstance(error, dict) and error.keys() == {"kind", "message"}:
        known = error_from_kind(error["kind"], error["message"])
        if not isinstance(known, RowError):
            known = RowError(f"{error['kind']}: {error['message']}")
        return FailedRow(value["index"], known)
    raise UnexpectedAnswer(f"expected a result, found an object with {sorted(value)}.")
