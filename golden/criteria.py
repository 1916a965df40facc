"""Criteria and verdicts: limits read before a run, PASS, FAIL or UNKNOWN after it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from charrm.errors import BadFile
from golden.compare import Comparison, measured_values

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT = Path(__file__).with_name("criteria.toml")
CRITERIA = frozenset(
    {
        "unresolved_rows",
        *(f"{name}_unequal" for name in ("ids", "tokens", "hidden", "logit", "p", "score")),
        "steps_max",
        "score_difference_max",
        "score_difference_mean",
        "metric_mean_difference_max",
        "paper_cell_difference_max",
    }
)


class Outcome(Enum):
    """PASS within the limit, FAIL over it, UNKNOWN not measured on every row it is about."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"
    MEASURED = "MEASURED"  # reported without a limit


@dataclass(frozen=True)
class Verdict:
    """One criterion, its limit, what was measured, and what follows."""

    criterion: str
    limit: float | None
    measured: float | None
    outcome: Outcome
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON-ready values."""
        return asdict(self) | {"outcome": self.outcome.value}


@dataclass(frozen=True)
class Criteria:
    """The text of a criteria file, and its tables of limits."""

    text: str
    tables: Mapping[str, Mapping[str, float | None]]  # None: measured without a limit

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


def read_criteria(path: Path = DEFAULT) -> Criteria:
    """Read and check a criteria file. Raises BadFile naming table and key."""
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be read as TOML: {error}.") from None
    return Criteria(text, {name: _table(path, name, table) for name, table in content.items()})


def judge(criteria: Criteria, tables: list[str], comparison: Comparison) -> list[Verdict]:
    """Judge a comparison by the criteria of the named tables; every criterion gets a verdict.

    Raises BadFile when a table is missing.
    """
    values = measured_values(comparison)
    verdicts = []
    for table in tables:
        if table not in criteria.tables:
            raise BadFile(f"criteria: no table [{table}], found {', '.join(criteria.tables)}.")
        for name, limit in criteria.tables[table].items():
            verdicts.append(_judge_one(name, limit, values[name], comparison))
    return verdicts


def exit_code(verdicts: list[Verdict]) -> int:
    """Return 0 when all pass, 1 when any fails, 3 when none fails but some are unknown."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return 1 if Outcome.FAIL in outcomes else 3 if Outcome.UNKNOWN in outcomes else 0


def _judge_one(
    name: str, limit: float | None, value: float | None, comparison: Comparison
) -> Verdict:
    resolved = comparison.rows - len(comparison.unresolved)
    measured = _rows_measured(name, comparison)
    if limit is None:
        return Verdict(name, None, value, Outcome.MEASURED, f"{measured} rows, no limit")
    if value is None or comparison.rows == 0:
        return Verdict(name, limit, None, Outcome.UNKNOWN, "not measured")
    if value > limit:
        return Verdict(name, limit, value, Outcome.FAIL, "over the limit")
    if name != "unresolved_rows" and measured < comparison.rows:
        reason = f"measured on {measured} of {comparison.rows} rows"
        if resolved < comparison.rows:
            reason += f", {comparison.rows - resolved} are unresolved"
        return Verdict(name, limit, value, Outcome.UNKNOWN, reason)
    return Verdict(name, limit, value, Outcome.PASS, f"{comparison.rows} rows")


def _rows_measured(name: str, comparison: Comparison) -> int:
    """Return on how many rows a criterion's value rests."""
    equality = comparison.equality
    if name.endswith("_unequal"):
        return equality[name.removesuffix("_unequal")].measured
    return comparison.rows if name == "unresolved_rows" else equality["score"].measured


def _table(path: Path, name: str, table: object) -> dict[str, float | None]:
    if not isinstance(table, dict):
        raise BadFile(f"{path}: {name} is not a table of limits.")
    measure = table.get("measure", [])
    limits = {key: value for key, value in table.items() if key != "measure"}
    if not isinstance(measure, list) or not all(isinstance(key, str) for key in measure):
        raise BadFile(f"{path}: [{name}] measure: expected an array of names.")
    unknown = {*measure, *limits} - CRITERIA
    if unknown or set(measure) & limits.keys():
        wrong = ", ".join(sorted(unknown or set(measure) & limits.keys()))
        raise BadFile(
            f"{path}: [{name}] {wrong}: expected each once, of {', '.join(sorted(CRITERIA))}."
        )
    for key, value in limits.items():
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise BadFile(f"{path}: [{name}] {key} is {value!r}, expected a number from 0 up.")
    return {**limits, **dict.fromkeys(measure)}
