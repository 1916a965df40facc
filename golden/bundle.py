"""What a finished run and a bundle hold, and when their parts fit together.

Both are read the same way: `report` refuses what `verify` would list.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from charrm.errors import BadFile
from charrm.files import Problems, found, read_object
from charrm.identity import digest_json
from charrm.ledger import read_ledger
from charrm.protocol import METRICS
from golden.criteria import Criteria, read_criteria
from golden.replay import FORMAT

MANIFEST, CRITERIA, LEDGER = "manifest.json", "criteria.toml", "ledger.jsonl"
TIMES, SELFTEST = "times.json", "selftest.json"
COMPARISON, PAGE, SUMS = "comparison.json", "report.html", "SHA256SUMS"
EVIDENCE = (MANIFEST, CRITERIA, LEDGER)
MAX_TOKENS = 4096

_SIDES = ("candidate", "reference")
_LINE = {"slot", "id", "metric", "ids", "tokens", "dropped", "candidate", "reference", "error"}
_VALUES = {"hidden", "logit", "p", "score"}
_SLOT = re.compile(r"[^\x00-\x1f]+/\d{5,}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_T = TypeVar("_T")
_LISTED = 20  # problems of one kind of place; a wrong ledger tends to be wrong in every line


@dataclass(frozen=True)
class Evidence:
    """A complete run whose parts fit together; `sha256` is of the files in EVIDENCE, by name."""

    manifest: dict[str, Any]
    criteria: Criteria
    lines: list[dict[str, Any]]
    times: dict[str, Any]
    selftest: dict[str, Any] | None
    sha256: dict[str, str]


def read_evidence(folder: Path) -> tuple[Evidence | None, list[str]]:
    """Read a run or bundle folder; return it, or None when it is too wrong, and every problem.

    Raises nothing: files that are missing or broken are problems too. None is returned whenever
    comparing and judging could not be trusted to work.
    """
    problems: list[str] = []

    def attempt(
        name: str, read: Callable[[Path], _T], check: Callable[[_T], Iterable[str]]
    ) -> _T | None:
        try:
            content = read(folder / name)
        except BadFile as error:
            wrong = [error.message.removeprefix(f"{folder}/")]
        except RecursionError:
            wrong = [f"{name}: nested too deeply to be read"]
        else:
            wrong = list(check(content))
        problems.extend(wrong)
        return None if wrong else content

    manifest = attempt(MANIFEST, _read_strictly, _check_manifest)
    criteria = attempt(CRITERIA, read_criteria, lambda _: ())
    lines = attempt(LEDGER, read_ledger, lambda _: ())
    times = attempt(TIMES, _read_strictly, _check_times)
    has_selftest = (folder / SELFTEST).exists()
    selftest = attempt(SELFTEST, _read_strictly, _check_selftest) if has_selftest else None
    usable = selftest is not None or not has_selftest
    if manifest is not None and criteria is not None:
        problems += _check_criteria(manifest, criteria)
        usable &= all(table in criteria.tables for table in manifest["criteria_tables"])
    if manifest is not None and lines is not None:
        problems += _check_rows(manifest, lines)
        broken = _check_lines(manifest, lines)
        usable &= not broken
        problems += broken[:_LISTED]
        if len(broken) > _LISTED:
            problems.append(f"{LEDGER}: {len(broken) - _LISTED} more problems in its lines")
    if manifest is None or criteria is None or lines is None or times is None or not usable:
        return None, problems
    sha256 = {name: digest_bytes((folder / name).read_bytes()) for name in EVIDENCE}
    return Evidence(manifest, criteria, lines, times, selftest, sha256), problems


def digest_bytes(content: bytes) -> str:
    """Return the sha256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def is_digest(value: object) -> bool:
    """Say whether a value is a sha256 in hexadecimal."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _read_strictly(path: Path) -> dict[str, Any]:
    content = read_object(path)
    problems = Problems(path)
    problems.add_strays("", content)
    problems.raise_any()
    if not _is_text(json.dumps(content, ensure_ascii=False)):
        raise BadFile(f"{path}: found a lone surrogate, which has no UTF-8 form.")
    return content


def _check_fields(file: str, content: dict[str, Any], fields: dict[str, Any]) -> Iterator[str]:
    """Compare types; a bool is no number."""
    for name, kinds in fields.items():
        value = content.get(name)
        wrong_bool = isinstance(value, bool) and kinds is not bool
        if name not in content or not isinstance(value, kinds) or wrong_bool:
            seen = found(value) if name in content else "nothing"
            names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
            yield f"{file}: {name}: found {seen}, expected {' or '.join(names)}"


def _check_manifest(manifest: dict[str, Any]) -> list[str]:
    none = type(None)
    top = {
        "format": str, "level": str, "reference": str, "candidate": dict,
        "reference_identity": dict, "set": dict, "rows": int, "rows_sha256": str,
        "sample": (int, none), "criteria_sha256": str, "criteria_tables": list,
        "code_sha256": dict,
    }  # fmt: skip
    problems = list(_check_fields(MANIFEST, manifest, top))
    if not problems:
        inner = {"digest": str, "files": dict, "is_standin": bool, "is_published": bool}
        problems += _check_fields(f"{MANIFEST}: set", manifest["set"], inner)
    if problems:
        return problems
    for name, expected in (("format", (FORMAT,)), ("level", ("tokens", "scores"))):
        if manifest[name] not in expected:
            seen = found(manifest[name])
            problems.append(f"{MANIFEST}: {name}: found {seen}, expected {' or '.join(expected)}")
    if manifest["set"]["is_standin"] and manifest["set"]["is_published"]:
        problems.append(f"{MANIFEST}: set: found a stand-in that is the published set too")
    if not all(isinstance(table, str) for table in manifest["criteria_tables"]):
        problems.append(f"{MANIFEST}: criteria_tables: expected names of tables")
    return problems


def _check_times(times: dict[str, Any]) -> Iterator[str]:
    none = type(None)
    fields = {
        "started": str, "finished": (str, none), "seconds": (int, float),
        "rows_per_second": (int, float, none), "sessions": int,
    }  # fmt: skip
    return _check_fields(TIMES, times, fields)


def _check_selftest(selftest: dict[str, Any]) -> Iterator[str]:
    fields = {"date": str, "digest": str, "faults": list, "code_sha256": dict}
    wrong = list(_check_fields(SELFTEST, selftest, fields))
    yield from wrong
    if wrong:
        return
    for fault in selftest["faults"]:
        names = ("fault", "outcome")
        if not isinstance(fault, dict) or not all(isinstance(fault.get(n), str) for n in names):
            yield f"{SELFTEST}: faults: found {found(fault)}, expected a fault and its outcome"
    content = {name: v for name, v in selftest.items() if name not in ("date", "digest")}
    if selftest["digest"] != digest_json(content):
        yield f"{SELFTEST}: digest: found {selftest['digest']}, expected {digest_json(content)}"


def _check_criteria(manifest: dict[str, Any], criteria: Criteria) -> Iterator[str]:
    fixed = manifest["criteria_sha256"]
    if criteria.digest != fixed:
        yield f"{CRITERIA}: sha256: found {criteria.digest}, expected {fixed}, as {MANIFEST} says"
    for table in manifest["criteria_tables"]:
        if table not in criteria.tables:
            yield f"{CRITERIA}: found no table [{table}], expected it, as {MANIFEST} says"


def _check_rows(manifest: dict[str, Any], lines: list[dict[str, Any]]) -> Iterator[str]:
    """The ledger has one line for each row of the run, in the order of the rows."""
    rows, slots = manifest["rows"], [line["slot"] for line in lines]
    missing = rows - len(set(slots))
    if missing > 0:
        yield (
            f"{LEDGER}: {missing} of {rows} rows are missing; continue the run until every row "
            "has its line"
        )
    elif missing < 0:
        yield f"{LEDGER}: found {len(set(slots))} rows, expected {rows}"
    seen: set[str] = set()
    for number, slot in enumerate(slots, 1):
        if slot in seen:
            yield f"{LEDGER}: line {number}: slot {found(slot)} appears twice"
        seen.add(slot)
    digest = digest_bytes("\n".join(slots).encode("utf-8", "backslashreplace"))
    if missing == 0 and digest != manifest["rows_sha256"]:
        yield (
            f"{LEDGER}: sha256 of its slots: found {digest}, expected {manifest['rows_sha256']}, "
            f"as {MANIFEST} says"
        )


def _check_lines(manifest: dict[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    return [
        f"{LEDGER}: line {number} ({found(line['slot'])}): {problem}"
        for number, line in enumerate(lines, 1)
        for problem in _check_line(line, manifest["level"])
    ]


def _check_line(line: dict[str, Any], level: str) -> Iterator[str]:
    """Yield what one line contradicts; text that belongs into no ledger would be a field here."""
    if line.keys() != _LINE:
        yield f"found the fields {', '.join(sorted(line))}, expected {', '.join(sorted(_LINE))}"
        return
    if not _SLOT.fullmatch(line["slot"]) or not _is_text(line["slot"]):
        yield "slot: expected model/position"
    if type(line["id"]) is not int:
        yield f"id: found {found(line['id'])}, expected an integer"
    if not isinstance(line["metric"], str) or line["metric"] not in METRICS:
        yield f"metric: found {found(line['metric'])}, expected one of {', '.join(METRICS)}"
    yield from _check_pair(line, "ids", is_digest, "a sha256")
    yield from _check_pair(line, "tokens", _is_count(1, MAX_TOKENS), f"1 to {MAX_TOKENS}")
    yield from _check_pair(line, "dropped", _is_count(0, math.inf), "a count")
    for side in _SIDES:
        if line[side] is not None:
            yield from (f"{side}: {problem}" for problem in _check_side(line[side]))
    error = line["error"]
    if error is not None:
        if not isinstance(error, dict) or error.keys() != {"side", "kind", "message"}:
            yield f"error: found {found(error)}, expected side, kind and message"
            return
        if not all(isinstance(text, str) and _is_text(text) for text in error.values()):
            yield "error: expected three texts"
            return
        if error["side"] not in _SIDES:
            yield f"error: side: found {found(error['side'])}, expected {' or '.join(_SIDES)}"
        elif line[error["side"]] is not None:
            yield f"found an error and values of the {error['side']}, expected one of them"
    scored = [side for side in _SIDES if line[side] is not None]
    if level == "tokens" and scored:
        yield f"found values of the {scored[0]}, expected none in a run of level tokens"
    if level == "scores" and (error is None) != (len(scored) == len(_SIDES)):
        what = "no error" if error is None else "an error"
        yield f"found {what} and {len(scored)} sides, expected an error or both sides"


def _check_pair(
    line: dict[str, Any], field: str, holds: Callable[[object], bool], expected: str
) -> Iterator[str]:
    pair = line[field]
    if not isinstance(pair, dict) or pair.keys() != set(_SIDES):
        yield f"{field}: found {found(pair)}, expected one value for each side"
        return
    for side in _SIDES:
        if pair[side] is not None and not holds(pair[side]):
            yield f"{field}: {side}: found {found(pair[side])}, expected {expected}"


def _check_side(side: object) -> Iterator[str]:
    if not isinstance(side, dict) or side.keys() != _VALUES:
        yield f"found {found(side)}, expected {', '.join(sorted(_VALUES))}"
        return
    hidden, logit, p, score = (side[name] for name in ("hidden", "logit", "p", "score"))
    if hidden is not None and not is_digest(hidden):
        yield f"hidden: found {found(hidden)}, expected a sha256"
    if logit is not None and not _is_number(logit):
        yield f"logit: found {found(logit)}, expected a finite number"
    if not _is_number(score) or not 1 <= score <= 5:
        yield f"score: found {found(score)}, expected a number from 1 to 5"
    elif p is not None and (not _is_number(p) or not 0 <= p <= 1):
        yield f"p: found {found(p)}, expected a number from 0 to 1"
    elif p is not None and score != p * 4 + 1:
        yield f"score: found {score}, expected p * 4 + 1, which is {p * 4 + 1}"


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) is int and abs(value) < 2**53


def _is_count(low: int, high: float) -> Callable[[object], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_text(text: str) -> bool:
    """Say whether a text has a UTF-8 form: JSON can escape a lone surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
