"""The shape of a replayed set: every kind of damage is listed, sampling keeps every stratum.

The sets are tiny and written here; tests of the published shape are in `test_golden_synth.py`.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import load_json

from charrm.charactereval import read_trans
from charrm.errors import BadFile, InvalidSetting, UnknownRole
from charrm.protocol import METRICS, Row, compose
from golden import structure
from golden.structure import (
    Difference,
    ReplayRow,
    Shape,
    check_structure,
    length_class,
    load_set,
    stratified_sample,
)
from golden.upstream import PINS, RESULT_FILES, STAND_IN, FileDigest

MODELS = ("qwen_7b", "xverse_7b")
RESULTS = "results/generation_trans_qwen_7b.jsonl"
PROFILES = {role: {"姓名": role, "性格": "安静"} for role in ("阮砚秋", "沈鹤鸣", "路人")}
TESTS = [
    {"id": id_, "role": role, "novel_name": "盐灯镇纪事", "context": f"{role}：第{id_}句。"}
    for id_, role in ((30, "阮砚秋"), (10, "沈鹤鸣"), (20, "阮砚秋"), (40, "沈鹤鸣"))
]
ASKED = {"10": ["Fluency", "Empathy"], "20": ["Empathy"], "30": ["Behavior", "Fluency"]}
ID_TO_METRIC = {id_: [[en, METRICS[en]] for en in names] for id_, names in ASKED.items()}
SHAPE = Shape(MODELS, 4, 3, 3, 5, {"Fluency": 2, "Empathy": 2, "Behavior": 1})

Rows = list[dict[str, Any]]


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def result_rows(model: str, order: tuple[int, ...] = (30, 10, 20)) -> Rows:
    by_id = {test["id"]: test for test in TESTS}
    return [
        {**by_id[id_], "model_output": f"{model}答{id_}", "metric_en": en, "metric_zh": METRICS[en]}
        for id_ in order
        for en in ASKED[str(id_)]
    ]


@pytest.fixture
def small_set(tmp_path: Path) -> Path:
    write(tmp_path / "data" / "test_data.jsonl", TESTS)
    write(tmp_path / "data" / "character_profiles.json", PROFILES)
    write(tmp_path / "data" / "id2metric.jsonl", ID_TO_METRIC)
    for model in MODELS:
        write(tmp_path / f"results/generation_trans_{model}.jsonl", result_rows(model))
    return tmp_path


def edited(folder: Path, edit: Callable[[Rows], Any], file: str = RESULTS) -> list[Difference]:
    """Differences of the set after a change to one of its files."""
    rows = load_json(folder / file)
    edit(rows)
    write(folder / file, rows)
    return check_structure(folder, SHAPE)


def test_a_whole_set_has_no_differences(small_set: Path) -> None:
    assert check_structure(small_set, SHAPE) == []


def test_the_default_shape_is_the_published_one(small_set: Path) -> None:
    shape = Shape()
    assert shape.models == tuple(RESULT_FILES)
    assert sum(shape.rows_per_metric.values()) == shape.rows_per_file == 8032
    counts = {(d.field, d.expected) for d in check_structure(small_set)}
    assert counts == {("rows", "4564"), ("roles", "78"), ("ids", "4531"), ("pairs", "8032")}


def put(index: int, **fields: Any) -> Callable[[Rows], Any]:
    return lambda rows: rows[index].update(fields)


def swap(first: int, second: int) -> Callable[[Rows], Any]:
    def edit(rows: Rows) -> None:
        rows[first], rows[second] = rows[second], rows[first]

    return edit


DAMAGES: dict[str, tuple[Callable[[Rows], Any], list[tuple[int | None, str, str, str]]]] = {
    "null answer": (
        put(1, model_output=None),
        [(1, "model_output", "null", "a string")],
    ),
    "ERROR": (
        put(1, model_output="ERROR"),
        [(1, "model_output", '"ERROR"', "an answer; such rows are dropped")],
    ),
    "newline": (
        put(2, model_output="一句\n二句"),
        [
            (
                2,
                "model_output",
                "a newline at character 2",
                "only the text before the first newline",
            )
        ],
    ),
    "no answer": (
        lambda rows: rows[0].pop("model_output"),
        [(0, "model_output", "nothing", "a string")],
    ),
    "context": (put(0, context=7), [(0, "context", "7", "a string")]),
    "role of another row": (
        put(4, role="沈鹤鸣"),
        [(4, "role", '"沈鹤鸣"', '"阮砚秋", the role of id 20')],
    ),
    "unknown role": (
        put(4, role="无名"),
        [(4, "role", '"无名"', '"阮砚秋", the role of id 20')],
    ),
    "unknown id": (
        put(4, id=99),
        [
            (4, "id", "99", "an id of the test data"),
            (None, "id and metric_en", "no id 20 Empathy", "each pair once"),
        ],
    ),
    "id as text": (
        put(4, id="20"),
        [
            (4, "id", '"20"', "an id of the test data"),
            (None, "id and metric_en", "no id 20 Empathy", "each pair once"),
        ],
    ),
    "id without metrics": (
        put(4, id=40, role="沈鹤鸣"),
        [
            (4, "id and metric_en", "id 40 Empathy", "a pair of id2metric"),
            (None, "id and metric_en", "no id 20 Empathy", "each pair once"),
        ],
    ),
    "another metric": (
        put(4, metric_en="Fluency", metric_zh=METRICS["Fluency"]),
        [
            (None, "rows of Fluency", "3", "2"),
            (None, "rows of Empathy", "1", "2"),
            (4, "id and metric_en", "id 20 Fluency", "a pair of id2metric"),
            (None, "id and metric_en", "no id 20 Empathy", "each pair once"),
        ],
    ),
    "unknown metric": (
        put(4, metric_en="MBTI"),
        [
            (None, "rows of Empathy", "1", "2"),
            (4, "metric_en", '"MBTI"', f"one of {', '.join(METRICS)}"),
            (None, "id and metric_en", "no id 20 Empathy", "each pair once"),
        ],
    ),
    "metric as list": (
        put(4, metric_en=["Empathy"]),
        [
            (None, "rows of Empathy", "1", "2"),
            (4, "metric_en", "an array of 1", f"one of {', '.join(METRICS)}"),
            (None, "id and metric_en", "no id 20 Empathy", "each pair once"),
        ],
    ),
    "Chinese name of another metric": (
        put(4, metric_zh=METRICS["Fluency"]),
        [(4, "metric_zh", f'"{METRICS["Fluency"]}"', f"{METRICS['Empathy']}, as for Empathy")],
    ),
    "one row missing": (
        lambda rows: rows.pop(),
        [
            (None, "rows", "4", "5"),
            (None, "rows of Empathy", "1", "2"),
            (None, "id and metric_en", "no id 20 Empathy", "each pair once"),
        ],
    ),
    "one row twice": (
        lambda rows: rows.append(copy.deepcopy(rows[4])),
        [
            (None, "rows", "6", "5"),
            (None, "rows of Empathy", "3", "2"),
            (5, "id and metric_en", "id 20 Empathy as in row [4]", "each pair once"),
        ],
    ),
    "one row in the place of another": (
        lambda rows: rows.__setitem__(3, copy.deepcopy(rows[4])),
        [
            (4, "id and metric_en", "id 20 Empathy as in row [3]", "each pair once"),
            (None, "id and metric_en", "no id 10 Empathy", "each pair once"),
        ],
    ),
    "swapped rows": (
        swap(1, 4),
        [
            (1, "order", "id 20 Empathy", "id 30 Fluency"),
            (4, "order", "id 30 Fluency", "id 20 Empathy"),
        ],
    ),
    "swapped metrics of one id": (
        swap(0, 1),
        [
            (0, "order", "id 30 Fluency", "id 30 Behavior"),
            (1, "order", "id 30 Behavior", "id 30 Fluency"),
        ],
    ),
    "not an object": (
        lambda rows: rows.append(5),  # type: ignore[arg-type]
        [(None, "rows", "6", "5"), (5, "row", "5", "an object")],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_listed(small_set: Path, damage: str) -> None:
    edit, expected = DAMAGES[damage]
    differences = edited(small_set, edit)
    listed = [(d.row, d.field, d.found, d.expected) for d in differences]
    assert listed == expected
    assert {d.file for d in differences} == {RESULTS}
    assert all(str(d).startswith(RESULTS) and str(d).endswith(d.expected) for d in differences)


def test_the_order_of_id2metric_is_an_order_too(small_set: Path) -> None:
    for model in MODELS:
        rows = result_rows(model, order=(10, 20, 30))
        write(small_set / f"results/generation_trans_{model}.jsonl", rows)
    assert check_structure(small_set, SHAPE) == []
    write(small_set / RESULTS, result_rows("qwen_7b", order=(10, 30, 20)))
    assert {d.field for d in check_structure(small_set, SHAPE)} == {"order"}


def test_a_pinned_file_defines_its_own_order(
    small_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(small_set / RESULTS, result_rows("qwen_7b", order=(20, 30, 10)))
    assert check_structure(small_set, SHAPE) != []
    blob = FileDigest.of(small_set / RESULTS).git_blob_sha1
    pin = replace(structure._PINNED[RESULTS], git_blob_sha1=blob)
    monkeypatch.setitem(structure._PINNED, RESULTS, pin)
    assert check_structure(small_set, SHAPE) == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file"),
        ("", "empty file"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
        ('[{"id": 30,', "cut off"),
        ("{}", "expected one JSON array"),
    ],
)
def test_an_unreadable_result_file_is_listed(
    small_set: Path, content: str | None, text: str
) -> None:
    (small_set / RESULTS).unlink()
    if content is not None:
        (small_set / RESULTS).write_text(content, encoding="utf-8")
    (difference,) = check_structure(small_set, SHAPE)
    assert (difference.file, difference.row, difference.field) == (RESULTS, None, "file")
    assert text in difference.found


def test_repeated_keys_are_listed(small_set: Path) -> None:
    text = (small_set / RESULTS).read_text(encoding="utf-8")
    twice = text.replace('"id": 30', '"id": 30, "id": 30', 1)
    (small_set / RESULTS).write_text(twice, encoding="utf-8")
    (difference,) = check_structure(small_set, SHAPE)
    assert "more than once" in difference.found


def test_another_generation_file_is_listed(small_set: Path) -> None:
    write(small_set / "results/generation_trans_mine.jsonl", result_rows("mine"))
    write(small_set / "results/notes.json", [1])  # not a generation file
    (difference,) = check_structure(small_set, SHAPE)
    assert difference.file == "results/generation_trans_mine.jsonl"


@pytest.mark.parametrize(
    ("file", "edit", "expected"),
    [
        ("test_data.jsonl", lambda c: c.pop(), [("rows", "3", "4")]),
        ("test_data.jsonl", put(3, role="无名"), [("role", '"无名"', "a role with a profile")]),
        ("test_data.jsonl", put(0, id=31), [("id", "30", "an id of the test data")]),
        ("character_profiles.json", lambda c: c.pop("路人"), [("roles", "2", "3")]),
        ("id2metric.jsonl", lambda c: c.pop("20"), [("ids", "2", "3"), ("pairs", "4", "5")]),
        ("id2metric.jsonl", lambda c: c["10"].pop(), [("pairs", "4", "5")]),
    ],
)
def test_wrong_data_files_are_listed(
    small_set: Path,
    file: str,
    edit: Callable[[Rows], Any],
    expected: list[tuple[str, str, str]],
) -> None:
    differences = edited(small_set, edit, f"data/{file}")
    assert [(d.field, d.found, d.expected) for d in differences] == expected
    # an id asked for but not there is a fault of id2metric, whichever file was changed
    named = "id2metric.jsonl" if expected[0][0] == "id" else file
    assert {d.file for d in differences} == {f"data/{named}"}


def test_missing_data_files_are_listed(small_set: Path) -> None:
    (small_set / "data" / "id2metric.jsonl").unlink()
    fields = [d.field for d in check_structure(small_set, SHAPE)]
    assert fields == ["file", "ids", "pairs"]


def mark(folder: Path) -> None:
    digest = hashlib.sha256((folder / RESULTS).read_bytes()).hexdigest()
    write(folder / STAND_IN, {"files": {RESULTS: digest}})


def test_a_changed_file_of_a_stand_in_is_listed(small_set: Path) -> None:
    mark(small_set)
    assert check_structure(small_set, SHAPE) == []
    (difference,) = edited(small_set, put(0, model_output="另答"))
    assert (difference.file, difference.field) == (RESULTS, "sha256")
    (small_set / RESULTS).unlink()
    assert {d.field for d in check_structure(small_set, SHAPE)} == {"sha256", "file"}
    write(small_set / STAND_IN, {"files": 1})
    assert (STAND_IN, "files") in [(d.file, d.field) for d in check_structure(small_set, SHAPE)]


def test_a_set_is_loaded_in_slots(small_set: Path) -> None:
    replay = load_set(small_set)
    slots = [f"{model}/{position:05d}" for model in MODELS for position in range(5)]
    assert [row.slot for row in replay.rows] == slots
    first = replay.rows[0]
    assert (first.model, first.position, first.id) == ("qwen_7b", 0, 30)
    assert (first.role, first.metric_en) == ("阮砚秋", "Behavior")
    trans = read_trans(small_set / "results/generation_trans_xverse_7b.jsonl")
    for row, source in zip(replay.rows[5:], trans, strict=True):
        prompt = compose(row.row)
        assert prompt == compose(
            Row(PROFILES[source.role], None, source.context, source.model_output, source.metric.zh)
        )
    assert "答30" not in repr(first)  # no dataset text in a log


def test_the_digest_of_a_set_is_over_its_files(small_set: Path) -> None:
    replay = load_set(small_set)
    names = [
        "data/character_profiles.json",
        *(f"results/generation_trans_{m}.jsonl" for m in MODELS),
    ]
    lines = [
        f"{hashlib.sha256((small_set / name).read_bytes()).hexdigest()}  {name}\n" for name in names
    ]
    assert replay.digest == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert list(replay.files) == names
    assert load_set(small_set) == replay
    edited(small_set, put(0, model_output="另答"))
    assert load_set(small_set).digest != replay.digest


def test_a_stand_in_is_never_taken_for_the_published_set(
    small_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = load_set(small_set)
    assert (replay.is_standin, replay.is_published) == (False, False)
    # Declare the small files published: then they are, until one byte differs or a marker is there.
    names = list(replay.files)
    monkeypatch.setattr(structure, "RESULT_FILES", {m: RESULT_FILES[m] for m in MODELS})
    for name in names:
        digest = FileDigest.of(small_set / name)
        pin = next(pin for pin in PINS if pin.target == name)
        facts = {"sha256": digest.sha256, "bytes": digest.bytes}
        pin = replace(pin, git_blob_sha1=digest.git_blob_sha1, **facts)
        monkeypatch.setitem(structure._PINNED, name, pin)
    assert load_set(small_set).is_published
    mark(small_set)
    marked = load_set(small_set)
    assert (marked.is_standin, marked.is_published) == (True, False)
    assert marked.digest != replay.digest
    (small_set / STAND_IN).unlink()
    edited(small_set, put(0, model_output="另答"))
    assert not load_set(small_set).is_published


def test_a_set_without_rows_or_profiles_is_refused(small_set: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="generation_trans"):
        load_set(tmp_path / "absent")
    edited(small_set, put(0, model_output=None))
    with pytest.raises(BadFile, match="row \\[0\\]"):
        load_set(small_set)
    (small_set / RESULTS).unlink()
    assert len(load_set(small_set).rows) == 5
    write(small_set / "data" / "character_profiles.json", {"路人": PROFILES["路人"]})
    with pytest.raises(UnknownRole):
        load_set(small_set)


def test_a_file_that_changes_while_it_is_read_is_refused(
    small_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(path: Path) -> Any:
        rows = read_trans(path)
        path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")
        return rows

    monkeypatch.setattr(structure, "read_trans", changing)
    with pytest.raises(BadFile, match="changed while it was read"):
        load_set(small_set)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 0), (512, 0), (513, 1), (1024, 1), (1025, 2), (2048, 2), (4096, 3), (4097, 4), (9096, 4)],
)
def test_length_classes(tokens: int, expected: int) -> None:
    assert length_class(tokens) == expected


def population() -> tuple[list[ReplayRow], list[int]]:
    """Two models, 3 metrics, 10 roles; the two longest classes are rare."""
    rows, lengths = [], []
    for model in MODELS:
        for position in range(600):
            metric = ("Fluency", "Empathy", "Behavior")[position % 3]
            role = f"角色{position % 7 if position % 5 else position // 5 % 10}"
            slot = f"{model}/{position:05d}"
            rows.append(ReplayRow(slot, model, position, position, role, metric, Row()))
            rare = 3000 if position % 100 == 0 else 100 + position
            lengths.append(5000 if position == 599 else rare)
    return rows, lengths


def strata(rows: list[ReplayRow], of: dict[str, int]) -> dict[str, Counter[Any]]:
    return {
        "metric": Counter(row.metric_en for row in rows),
        "role": Counter(row.role for row in rows),
        "length": Counter(length_class(of[row.slot]) for row in rows),
        "model": Counter(row.model for row in rows),
    }


@pytest.mark.parametrize("n", [10, 11, 40, 300, 1199, 1200])
def test_a_sample_keeps_every_stratum(n: int) -> None:
    rows, lengths = population()
    of = {row.slot: length for row, length in zip(rows, lengths, strict=True)}
    sample = stratified_sample(rows, n, lengths)
    assert len({row.slot for row in sample}) == n
    assert sample == [row for row in rows if row in sample]  # in the order of the set
    kept, all_strata = strata(sample, of), strata(rows, of)
    assert {kind: c.keys() for kind, c in kept.items()} == {
        kind: c.keys() for kind, c in all_strata.items()
    }
    if 10 < n < 300:
        for kind in ("role", "metric", "model"):
            counts = kept[kind].values()
            assert max(counts) - min(counts) <= 2, kind
    if n == 40:  # two rows of the longest class exist, both are taken: even beats proportional
        assert kept["length"][4] == 2


def test_a_prefix_of_the_set_is_not_such_a_sample() -> None:
    rows, lengths = population()
    of = {row.slot: length for row, length in zip(rows, lengths, strict=True)}
    assert strata(rows[:40], of)["length"].keys() != strata(rows, of)["length"].keys()


def test_a_sample_depends_on_the_set_only() -> None:
    rows, lengths = population()
    sample = stratified_sample(rows, 40, lengths)
    assert stratified_sample(list(rows), 40, tuple(lengths)) == sample
    renamed = [replace(row, slot=f"other/{row.position:05d}{row.model}") for row in rows]
    other = stratified_sample(renamed, 40, lengths)
    assert {(r.model, r.position) for r in other} != {(r.model, r.position) for r in sample}


def test_a_sample_that_is_too_small_names_the_smallest() -> None:
    rows, lengths = population()
    with pytest.raises(InvalidSetting, match=r"found 9, expected at least 10.*role \(10\)"):
        stratified_sample(rows, 9, lengths)
    assert len(stratified_sample(rows, 10, lengths)) == 10
    for n in (0, 1201):
        with pytest.raises(InvalidSetting, match="expected 1 to 1200"):
            stratified_sample(rows, n, lengths)
    with pytest.raises(ValueError, match="shorter"):
        stratified_sample(rows, 40, lengths[1:])
