"""The replayed set: does it have the published shape, which rows does it hold, which to sample.

A set is a folder `<set>/data/*` with the three data files and `<set>/results/generation_trans_*`
with one transformed generation file per model; `STAND-IN.json` beside them marks answers that no
model wrote.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from charrm.charactereval import (
    FAILED_GENERATION,
    read_metrics,
    read_profiles,
    read_test_data,
    read_trans,
    to_row,
)
from charrm.errors import BadFile, InvalidSetting
from charrm.files import Problems, found, read_array, read_object
from charrm.protocol import METRICS, Row
from charrm.published import IDS_WITH_METRICS, PAIRS, ROLES, ROWS_PER_METRIC, TEST_ROWS
from golden.upstream import (
    ID_TO_METRIC,
    PINS,
    PROFILES,
    RESULT_FILES,
    STAND_IN,
    TEST_DATA,
    FileDigest,
)

LENGTH_EDGES = (512, 1024, 2048, 4096)
"""Last token count of each length class; one more class lies above."""

_PREFIX, _SUFFIX = "generation_trans_", ".jsonl"
_PINNED = {pin.target: pin for pin in PINS}
_T = TypeVar("_T")
_Stratum = tuple[str, str | int]  # kind, value
_Strata = tuple[_Stratum, _Stratum, _Stratum, _Stratum]  # one of each kind, the role first


@dataclass(frozen=True)
class Shape:
    """The counts that every set must have; the default is what was published."""

    models: tuple[str, ...] = tuple(RESULT_FILES)
    test_rows: int = TEST_ROWS
    roles: int = ROLES
    ids_with_metrics: int = IDS_WITH_METRICS
    rows_per_file: int = PAIRS
    rows_per_metric: Mapping[str, int] = field(default_factory=lambda: ROWS_PER_METRIC)


@dataclass(frozen=True)
class Difference:
    """One place where a set is not as it must be; `row` counts from 0 in the file's array.

    Answers and contexts are not quoted, save a few characters where the JSON itself is broken.
    """

    file: str
    row: int | None
    field: str
    found: str
    expected: str

    def __str__(self) -> str:
        where = self.file if self.row is None else f"{self.file}: row [{self.row}]"
        return f"{where}, {self.field}: found {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class ReplayRow:
    """One row to be replayed; `slot` is its name in every ledger and report: model/position."""

    slot: str
    model: str
    position: int
    id: int
    role: str
    metric_en: str
    row: Row = field(repr=False)


@dataclass(frozen=True)
class ReplaySet:
    """All rows of a set, by file name and then position.

    `files` maps each file that was read to its sha256; `digest` is the sha256 of these lines as
    `sha256sum` writes them, by name. `is_published` says that every file has its pinned digest; a
    set that is neither published nor a stand-in is somebody's own.
    """

    rows: tuple[ReplayRow, ...]
    files: Mapping[str, str]
    digest: str
    is_standin: bool
    is_published: bool


def check_structure(folder: Path, shape: Shape | None = None) -> list[Difference]:
    """Return every difference between a set and the published shape; none means that it holds.

    Checked: the counts of the data files; for each model one file with `rows_per_file` rows and
    the known count per metric; ids, roles and metrics known and belonging together; answers that
    are strings without newline and not "ERROR"; each (id, metric) of id2metric exactly once; in
    the order of the official transform (test data, then id2metric) or all in that of id2metric;
    no other generation file; for a stand-in the digests of its marker. The order of a file that
    has its pinned digest is right by definition. Broken files are listed, not raised. When the
    data files differ, only that is listed: the rows would be measured against something wrong.
    """
    return _Check(folder, shape or Shape()).run()


def load_set(folder: Path) -> ReplaySet:
    """Read the rows of a set, of every model whose file is there.

    Raises BadFile (no or unreadable files, a file that changes meanwhile) and UnknownRole. What
    `check_structure` finds beyond that is not refused here.
    """
    paths = sorted((folder / "results").glob(f"{_PREFIX}*{_SUFFIX}"))
    if not paths:
        raise BadFile(
            f"{folder}: found no results/{_PREFIX}*{_SUFFIX}, expected one for each model. "
            "Fetch the published set or make a stand-in."
        )
    digests: dict[str, FileDigest] = {}
    profiles = _read_settled(folder, PROFILES.target, read_profiles, digests)
    rows: list[ReplayRow] = []
    contexts: dict[str, str] = {}  # the same text once, not once for each row and model
    for path in paths:
        model = path.name[len(_PREFIX) : -len(_SUFFIX)]
        trans_rows = _read_settled(folder, f"results/{path.name}", read_trans, digests)
        for position, trans in enumerate(trans_rows):
            row = to_row(trans, profiles)
            assert row.context is not None
            context = contexts.setdefault(row.context, row.context)
            row = Row(row.profile, row.role, context, row.model_output, row.metric)
            slot = f"{model}/{position:05d}"
            rows.append(
                ReplayRow(slot, model, position, trans.id, trans.role, trans.metric.en, row)
            )
    is_standin = (folder / STAND_IN).exists()
    if is_standin:
        digests[STAND_IN] = FileDigest.of(folder / STAND_IN)
    lines = "".join(f"{digests[name].sha256}  {name}\n" for name in sorted(digests))
    needed = {PROFILES.target, *(pin.target for pin in RESULT_FILES.values())}
    return ReplaySet(
        rows=tuple(rows),
        files={name: digests[name].sha256 for name in sorted(digests)},
        digest=hashlib.sha256(lines.encode()).hexdigest(),
        is_standin=is_standin,
        is_published=digests.keys() == needed and all(map(_is_pinned, digests, digests.values())),
    )


def length_class(tokens: int) -> int:
    """Return the class of a token count: 0 up to 512, then 1,024, 2,048, 4,096, and 4 above."""
    return bisect_left(LENGTH_EDGES, tokens)


def stratified_sample(rows: Sequence[ReplayRow], n: int, lengths: Sequence[int]) -> list[ReplayRow]:
    """Choose `n` of `rows`, returned in their order: every metric, role, length class and model.

    `lengths` has one token count per row (before truncation, if truncated rows shall be a class
    of their own). Rows of one role, metric, length class and model form a cell, ordered by the
    sha256 of their slots, so that no random state takes part. While a stratum is not held yet, the
    next row comes from the rarest such stratum, there from a cell with most of them; afterwards
    from the role with the fewest rows chosen. Among equals that cell is taken whose strata are
    least filled: the sum over them of rows chosen times number of strata of that kind.

    Raises InvalidSetting when n exceeds the rows, or is too small to hold every stratum in this
    way; the message then says the smallest n.
    """
    cells: dict[_Strata, list[tuple[str, int]]] = {}
    for index, (row, tokens) in enumerate(zip(rows, lengths, strict=True)):
        strata: _Strata = (
            ("role", row.role),
            ("metric", row.metric_en),
            ("length class", length_class(tokens)),
            ("model", row.model),
        )
        order = hashlib.sha256(row.slot.encode()).hexdigest()
        cells.setdefault(strata, []).append((order, index))
    if not 0 < n <= len(rows):
        raise InvalidSetting(f"sample: found {n}, expected 1 to {len(rows)}, the rows of the set.")
    if n == len(rows):
        return list(rows)
    within: dict[_Stratum, set[_Strata]] = {}
    population: Counter[_Stratum] = Counter()
    for strata, members in cells.items():
        members.sort(reverse=True)
        for stratum in strata:
            within.setdefault(stratum, set()).add(strata)
            population[stratum] += len(members)
    kinds = Counter(kind for kind, _ in within)
    missing = set(within)
    filled = dict.fromkeys(within, 0)
    chosen: list[int] = []

    def fill(strata: _Strata) -> tuple[int, str]:
        return sum([filled[s] * kinds[s[0]] for s in strata]), cells[strata][-1][0]

    def take(strata: _Strata) -> None:
        chosen.append(cells[strata].pop()[1])
        missing.difference_update(strata)
        for stratum in strata:
            filled[stratum] += 1
            if not cells[strata]:
                within[stratum].remove(strata)

    while missing:
        rarest = min(missing, key=lambda stratum: (population[stratum], stratum))
        take(min(within[rarest], key=lambda cell: (-len(missing.intersection(cell)), *fill(cell))))
    if len(chosen) > n:
        raise InvalidSetting(
            f"sample: found {n}, expected at least {len(chosen)}, to hold every "
            + ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
            + "."
        )
    roles = [stratum for stratum in within if stratum[0] == "role"]
    while len(chosen) < n:
        role = min((role for role in roles if within[role]), key=filled.__getitem__)
        take(min(within[role], key=fill))
    return [rows[index] for index in sorted(chosen)]


def _is_pinned(name: str, digest: FileDigest) -> bool:
    return name in _PINNED and not _PINNED[name].differences(digest)


def _read_settled(
    folder: Path, name: str, read: Callable[[Path], _T], digests: dict[str, FileDigest]
) -> _T:
    """Read a file and note its digest; BadFile when the digest is another one afterwards."""
    before = FileDigest.of(folder / name)
    content = read(folder / name)
    if FileDigest.of(folder / name) != before:
        raise BadFile(f"{folder / name}: changed while it was read; let it settle, then retry.")
    digests[name] = before
    return content


class _Check:
    """Gathers the differences of one set."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self._folder = folder
        self._shape = shape
        self._found: list[Difference] = []
        self._role_of: dict[int, str] = {}
        self._pairs: list[tuple[int, str]] = []  # as the official transform orders them
        self._by_metrics: list[tuple[int, str]] = []  # as id2metric orders them

    def run(self) -> list[Difference]:
        self._check_data()
        data_differ = bool(self._found)
        self._check_marker()
        if data_differ:
            return self._found
        for model in self._shape.models:
            name = f"results/{_PREFIX}{model}{_SUFFIX}"
            rows = self._attempt(name, read_array)
            if rows is not None:
                self._check_results(name, rows)
        known = {f"{_PREFIX}{model}{_SUFFIX}" for model in self._shape.models}
        for path in sorted((self._folder / "results").glob(f"{_PREFIX}*{_SUFFIX}")):
            if path.name not in known:
                self._add(f"results/{path.name}", None, "file", "another model", "no such file")
        return self._found

    def _add(self, file: str, row: int | None, field: str, found: str, expected: str) -> None:
        self._found.append(Difference(file, row, field, found, expected))

    def _count(self, file: str, field: str, count: int, expected: int) -> None:
        if count != expected:
            self._add(file, None, field, str(count), str(expected))

    def _attempt(self, name: str, read: Callable[[Path], _T]) -> _T | None:
        try:
            return read(self._folder / name)
        except BadFile as error:
            self._add(name, None, "file", error.message, "a readable file")
            return None

    def _check_data(self) -> None:
        tests = self._attempt(TEST_DATA.target, read_test_data) or []
        metrics = self._attempt(ID_TO_METRIC.target, read_metrics) or {}
        profiles = self._attempt(PROFILES.target, read_profiles) or {}
        shape = self._shape
        self._count(TEST_DATA.target, "rows", len(tests), shape.test_rows)
        self._count(PROFILES.target, "roles", len(profiles), shape.roles)
        self._count(ID_TO_METRIC.target, "ids", len(metrics), shape.ids_with_metrics)
        for index, test in enumerate(tests):
            self._role_of[test.id] = test.role
            if test.role not in profiles:
                self._add(
                    TEST_DATA.target, index, "role", found(test.role), "a role with a profile"
                )
            self._pairs += [(test.id, metric.en) for metric in metrics.get(str(test.id), ())]
        for index, (key, asked) in enumerate(metrics.items()):
            if int(key) not in self._role_of:
                self._add(ID_TO_METRIC.target, index, "id", key, "an id of the test data")
            self._by_metrics += [(int(key), metric.en) for metric in asked]
        self._count(ID_TO_METRIC.target, "pairs", len(self._by_metrics), shape.rows_per_file)

    def _check_results(self, name: str, rows: list[Any]) -> None:
        shape = self._shape
        self._count(name, "rows", len(rows), shape.rows_per_file)
        counts = Counter(en for row in rows if isinstance(en := _get(row, "metric_en"), str))
        for metric in METRICS:
            expected = shape.rows_per_metric.get(metric, 0)
            self._count(name, f"rows of {metric}", counts[metric], expected)
        wanted = set(self._pairs)
        first: dict[tuple[int, str], int] = {}
        strays = Problems(name)
        for index, row in enumerate(rows):
            strays.add_strays(f"row [{index}]", row)
            pair = self._check_row(name, index, row)
            if pair is None:
                continue
            if pair not in wanted:
                self._add(name, index, "id and metric_en", _named(pair), "a pair of id2metric")
            elif pair in first:
                text = f"{_named(pair)} as in row [{first[pair]}]"
                self._add(name, index, "id and metric_en", text, "each pair once")
            else:
                first[pair] = index
        self._attempt(name, lambda _: strays.raise_any())
        for pair in self._pairs:
            if pair not in first:
                self._add(name, None, "id and metric_en", f"no {_named(pair)}", "each pair once")
        if len(first) == len(rows) == len(self._pairs):
            self._check_order(name, list(first))

    def _check_row(self, name: str, index: int, row: object) -> tuple[int, str] | None:
        """Check one row by itself; return its (id, metric_en) when both are known."""
        if not isinstance(row, dict):
            self._add(name, index, "row", found(row), "an object")
            return None
        id_, role, answer = (_get(row, key) for key in ("id", "role", "model_output"))
        known_id = type(id_) is int and id_ in self._role_of
        if not known_id:
            self._add(name, index, "id", _shown(id_), "an id of the test data")
        elif role != self._role_of[id_]:
            expected = f"{found(self._role_of[id_])}, the role of id {id_}"
            self._add(name, index, "role", _shown(role), expected)
        if not isinstance(_get(row, "context"), str):
            self._add(name, index, "context", _shown(_get(row, "context")), "a string")
        if not isinstance(answer, str):
            self._add(name, index, "model_output", _shown(answer), "a string")
        elif answer == FAILED_GENERATION:
            self._add(name, index, "model_output", '"ERROR"', "an answer; such rows are dropped")
        elif "\n" in answer:
            text = f"a newline at character {answer.index(chr(10))}"
            self._add(name, index, "model_output", text, "only the text before the first newline")
        en, zh = _get(row, "metric_en"), _get(row, "metric_zh")
        if not isinstance(en, str) or en not in METRICS:
            self._add(name, index, "metric_en", _shown(en), f"one of {', '.join(METRICS)}")
            return None
        if zh != METRICS[en]:
            self._add(name, index, "metric_zh", _shown(zh), f"{METRICS[en]}, as for {en}")
        return (id_, en) if known_id else None

    def _check_order(self, name: str, pairs: list[tuple[int, str]]) -> None:
        if pairs in (self._pairs, self._by_metrics):
            return
        if _is_pinned(name, FileDigest.of(self._folder / name)):
            return
        for index, (pair, expected) in enumerate(zip(pairs, self._pairs, strict=True)):
            if pair != expected:
                self._add(name, index, "order", _named(pair), _named(expected))

    def _check_marker(self) -> None:
        if not (self._folder / STAND_IN).exists():
            return
        files = (self._attempt(STAND_IN, read_object) or {}).get("files")
        if not isinstance(files, dict):
            self._add(STAND_IN, None, "files", _shown(files), "the digest of each file by name")
            return
        for name, expected in files.items():
            try:
                digest = FileDigest.of(self._folder / name).sha256
            except BadFile:
                digest = "no readable file"
            if digest != expected:
                self._add(name, None, "sha256", digest, f"{expected}, as {STAND_IN} says")


def _get(row: object, key: str) -> Any:
    """Return a field of a row that may be anything; `...` when it is not there."""
    return row.get(key, ...) if isinstance(row, dict) else ...


def _shown(value: object) -> str:
    return "nothing" if value is ... else found(value)


def _named(pair: tuple[int, str]) -> str:
    return f"id {pair[0]} {pair[1]}"
