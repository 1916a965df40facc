"""The reference `row-anchor`: the only public row-level scores, of official prompts with an empty
answer, and the rows to compare them with.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from charrm.charactereval import TransRow, read_metrics, read_profiles, read_test_data, to_row
from charrm.errors import BadFile, InvalidRow, MissingDependency
from charrm.files import Problems
from charrm.protocol import METRICS
from golden.sides import Side
from golden.structure import ReplayRow, ReplaySet
from golden.upstream import (
    DATA_FILES,
    ID_TO_METRIC,
    PROFILES,
    ROW_LEVEL_ANCHOR,
    TEST_DATA,
    FileDigest,
    Pin,
)

COLUMNS = (
    "context_length",
    "model_output_length",
    "total_length",
    "id",
    "role",
    "metric_en",
    "score",
)
ROWS = 8033
EXTRA_ROW = (10042, "Humanlikeness")
"""The one row of the file that id2metric does not ask for."""


class RowAnchorSource:
    """Scores by (id, metric), as somebody measured them elsewhere; it tells nothing else.

    `pin` and `rows` say which file it must be. Raises BadFile, MissingDependency.
    """

    name = "row-anchor"

    def __init__(self, path: Path, *, pin: Pin = ROW_LEVEL_ANCHOR, rows: int = ROWS) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadFile(
                f"{path}: cannot be read: {error.strerror}. `golden fetch` brings it."
            ) from error
        self._sha256 = hashlib.sha256(content).hexdigest()
        if self._sha256 != pin.sha256:
            raise BadFile(
                f"{path}: found sha256 {self._sha256}, expected {pin.sha256}. Fetch it again."
            )
        self._scores, self._restored = _read(path, content, rows)

    def identity(self) -> dict[str, Any]:
        """Return the file's digest, and how many scores were restored to their last bits."""
        return {
            "name": self.name,
            "sha256": self._sha256,
            "scores": len(self._scores),
            "restored": self._restored,
        }

    def tokenize(self, row: ReplayRow) -> Side:
        """Return nothing: the file counts characters only."""
        return Side()

    def score(self, row: ReplayRow) -> Side:
        """Return the score. Raises InvalidRow for a row that is not of the blank set."""
        score = self._scores.get((row.id, row.metric_en))
        if score is None or row.row.model_output != "":
            raise InvalidRow(
                f"slot {row.slot}: the row-level anchor has scores of the official (id, metric) "
                "pairs with an empty answer only."
            )
        return Side(score=score)

    def close(self) -> None:
        """Nothing to release."""


def blank_set(data_folder: Path) -> ReplaySet:
    """Return all official (id, metric) pairs with an empty answer, as the model "blank".

    In the order of test_data, then id2metric; `data_folder` holds the three data files.
    Raises BadFile, UnknownRole.
    """
    paths = {pin: data_folder / Path(pin.target).name for pin in DATA_FILES}
    digests = {pin: FileDigest.of(path) for pin, path in paths.items()}
    profiles = read_profiles(paths[PROFILES])
    metrics = read_metrics(paths[ID_TO_METRIC])
    asked = [
        TransRow(test.id, test.role, test.context, "", metric, {})
        for test in read_test_data(paths[TEST_DATA])
        for metric in metrics.get(str(test.id), ())
    ]
    changed = [str(paths[pin]) for pin in paths if FileDigest.of(paths[pin]) != digests[pin]]
    if changed:
        raise BadFile(f"{', '.join(changed)}: changed while being read; let it settle, then retry.")
    files = {pin.target: digests[pin].sha256 for pin in sorted(digests, key=lambda p: p.target)}
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in files.items())
    return ReplaySet(
        rows=tuple(
            ReplayRow(
                slot=f"blank/{position:05d}",
                model="blank",
                position=position,
                id=trans.id,
                role=trans.role,
                metric_en=trans.metric.en,
                row=to_row(trans, profiles),
            )
            for position, trans in enumerate(asked)
        ),
        files=files,
        digest=hashlib.sha256(lines.encode()).hexdigest(),
        is_standin=False,
        is_published=not any(pin.differences(digest) for pin, digest in digests.items()),
    )


def _read(path: Path, content: bytes, rows: int) -> tuple[dict[tuple[int, str], float], int]:
    problems = Problems(path)
    scores: dict[tuple[int, str], float] = {}
    restored = count = 0
    for count, values in enumerate(_cells(path, content), start=1):
        fields: dict[str, Any] = dict.fromkeys(COLUMNS)
        fields |= zip(COLUMNS, values, strict=False)  # an empty last cell may be left out
        id_, metric, score = fields["id"], fields["metric_en"], fields["score"]
        where = f"sheet row {count + 1}"
        if type(id_) is not int:
            problems.add(f"{where}, id", f"found {id_!r}, expected an integer")
        elif metric not in METRICS:
            problems.add(f"{where}, metric_en", f"found {metric!r}, expected one of the twelve")
        elif type(score) not in (int, float) or not 1 <= score <= 5:
            problems.add(f"{where}, score", f"found {score!r}, expected a number from 1 to 5")
        elif (id_, metric) in scores:
            problems.add(where, f"found {id_} {metric} again, expected each pair once")
        else:
            scores[id_, metric] = exact_score(score)
            restored += scores[id_, metric] != score
    if count != rows:
        problems.add("the sheet", f"found {count} rows, expected {rows}")
    problems.raise_any()
    scores.pop(EXTRA_ROW, None)
    return scores, restored


def exact_score(score: float) -> float:
    """Return p * 4 + 1 of the bf16 p that a score in 15 or 16 decimal digits stands for.

    Spreadsheets cut doubles to that; a score that no bf16 p explains is returned as it is.
    """
    (bits,) = struct.unpack("<I", struct.pack("<f", (score - 1) / 4))
    near = [struct.unpack("<f", struct.pack("<I", (bits >> 16) + n << 16))[0] for n in (0, 1)]
    exact = min((p * 4 + 1 for p in near), key=lambda value: abs(value - score))
    return exact if math.isclose(exact, score, rel_tol=0, abs_tol=1e-14) else float(score)


def _cells(path: Path, content: bytes) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the sheet with the known columns, without its header."""
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise MissingDependency(
            "openpyxl: found none; the row-level anchor is a spreadsheet. Install the extra "
            "'.[golden]'."
        ) from None
    try:
        book = load_workbook(io.BytesIO(content), read_only=True, data_only=True)
    except Exception as error:  # of zipfile, of XML, or its own
        raise BadFile(f"{path}: not an xlsx file: {type(error).__name__}: {error}") from error
    try:
        headers = []
        for sheet in book.worksheets:
            sheet.reset_dimensions()  # a wrong size in the file would cut rows off
            header, *rows = list(sheet.iter_rows(values_only=True)) or [()]
            if header == COLUMNS:
                yield from (row for row in rows if any(cell is not None for cell in row))
                return
            headers.append(f"{sheet.title}: {header}")
    finally:
        book.close()
    raise BadFile(f"{path}: found the sheets {headers}, expected one with the columns {COLUMNS}.")
