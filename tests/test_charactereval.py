"""The benchmark's files: what is read, what is refused, what is averaged, what is written.

Tests named `shared` need the published files (CHARRM_SHARED, default ../shared beside the
checkout) and are skipped without them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charrm import charactereval as ce
from charrm import files, protocol, published
from charrm.errors import (
    BadFile,
    BadRequest,
    InvalidRow,
    NotFinite,
    UnknownMetric,
    UnknownRole,
)
from charrm.protocol import DIMENSIONS, METRICS, Metric

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("CHARRM_SHARED", ROOT.parent / "shared"))
needs_shared = pytest.mark.skipif(
    not (SHARED / "charactereval").is_dir(), reason="the published files are not here"
)

FLUENCY = Metric("Fluency", METRICS["Fluency"])
EMPATHY = Metric("Empathy", METRICS["Empathy"])
NAN, INFINITY = float("nan"), float("inf")

Reader = Callable[[Path], Any]


def data_row(**changes: Any) -> dict[str, Any]:
    row = {"id": 7, "role": "阮砚秋", "novel_name": "盐灯镇纪事", "context": "甲：（笑）你好。"}
    return row | changes


def generation(**changes: Any) -> dict[str, Any]:
    return data_row(model_output="乙：好。") | changes


def trans(**changes: Any) -> dict[str, Any]:
    return generation(metric_en="Fluency", metric_zh=METRICS["Fluency"]) | changes


def without(row: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != field}


GOOD: dict[str, tuple[Reader, Any]] = {
    "profiles": (ce.read_profiles, {"阮砚秋": {"姓名": "阮砚秋", "爱好": ["听雨"]}}),
    "test_data": (ce.read_test_data, [data_row()]),
    "metrics": (ce.read_metrics, {"7": [["Fluency", METRICS["Fluency"]]]}),
    "generations": (ce.read_generations, [generation()]),
    "trans": (ce.read_trans, [trans()]),
}


def write(folder: Path, content: object) -> Path:
    path = folder / "input.jsonl"
    path.write_text(json.dumps(content), encoding="utf-8")  # lone surrogates become escapes
    return path


def refusal(read: Reader, path: Path) -> str:
    """Return the BadFile message, which always names the file and can always be printed."""
    with pytest.raises(BadFile) as caught:
        read(path)
    message = caught.value.message
    assert path.name in message
    message.encode("utf-8")
    return message


# Reading


@pytest.mark.parametrize("name", GOOD)
def test_a_good_file_is_read(name: str, tmp_path: Path) -> None:
    read, content = GOOD[name]
    assert len(read(write(tmp_path, content))) == 1


def test_rows_keep_extra_fields_and_key_order(tmp_path: Path) -> None:
    row = {"note": {"b": [1, 2.5, None], "a": True}, **trans(), "zz": "\u2028"}
    (read,) = ce.read_trans(write(tmp_path, [row]))
    assert list(read.fields.items()) == list(row.items())
    assert (read.id, read.role, read.metric) == (7, "阮砚秋", FLUENCY)


def test_profiles_render_as_the_official_script_renders_them(tmp_path: Path) -> None:
    content = {"甲": {"b": "it's\n", "a": {"x": "\u3000"}}}
    profile = ce.read_profiles(write(tmp_path, content))["甲"]
    assert type(profile) is dict
    assert str(profile) == str(content["甲"]) == "{'b': \"it's\\n\", 'a': {'x': '\\u3000'}}"


def test_metrics_are_read_as_pairs(tmp_path: Path) -> None:
    pairs = [list(EMPATHY), list(FLUENCY)]
    assert ce.read_metrics(write(tmp_path, {"7": pairs})) == {"7": [EMPATHY, FLUENCY]}


def test_results_are_frozen(tmp_path: Path) -> None:
    (row,) = ce.read_trans(write(tmp_path, [trans()]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.id = 8  # type: ignore[misc]


UTF8 = json.dumps([trans()], ensure_ascii=False)
NOT_A_DOCUMENT: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b" \n", ("empty file",)),
    "bom": (b"\xef\xbb\xbf" + UTF8.encode(), ("byte order mark", "json.load refuses it as well")),
    "utf-16": (UTF8.encode("utf-16"), ("UTF-16", "iconv")),
    "utf-16-be": (b"\xfe\xff" + UTF8.encode("utf-16-be"), ("UTF-16", "iconv")),
    "utf-16 unmarked": (json.dumps([trans()]).encode("utf-16-le"), ("NUL", "UTF-16")),
    "utf-32": (UTF8.encode("utf-32"), ("UTF-32",)),
    "gbk": (UTF8.encode("gbk"), ("GB18030", "iconv")),
    "latin-1": (b'["\xff"]', ("byte 0xff at offset 2", "expected UTF-8")),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 3458303\n",
        ("Git-LFS pointer", "git lfs pull"),
    ),
    "cut": (UTF8.encode()[:-2], ("cut off", "line 1 column")),
    "cut in a string": (UTF8.encode()[:30], ("cut off",)),
    "cut after a row": (UTF8.encode()[:-1], ("cut off",)),
    "cut in a character": ("[\n“".encode()[:-1], ("cut off inside a character",)),
    "json lines": (
        f"{json.dumps(trans())}\r\n{json.dumps(trans(id=8))}\n".encode(),
        ("JSON lines", "line 2 column 1", "one JSON array", "jq -s"),
    ),
    "one json line": (json.dumps(trans()).encode(), ("an object", "one JSON array", "[ ]")),
    "two documents": (b"[1] [2]", ("Extra data", "line 1 column 5")),
    "not json": (b"[\n  {'id': 7}\n]", ("not JSON", "line 2 column 4", "'id'")),
    "a web page": (b"<!DOCTYPE html>", ("not JSON", "DOCTYPE")),
    "a number": (b"3", ("found 3", "one JSON array")),
    "no rows": (b"[]", ("empty array",)),
    "long integer": (b'[{"id": ' + b"1" * 5000 + b"}]", ("number",)),
    "deep": (b"[" * 100_000 + b"]" * 100_000, ("nested",)),
}


@pytest.mark.parametrize("name", NOT_A_DOCUMENT)
def test_what_is_not_one_json_document_is_refused(name: str, tmp_path: Path) -> None:
    content, expected = NOT_A_DOCUMENT[name]
    path = tmp_path / "input.jsonl"
    path.write_bytes(content)
    message = refusal(ce.read_trans, path)
    assert [part for part in expected if part not in message] == [], message


def test_json_lines_of_objects_are_named_for_the_metrics_file_too(tmp_path: Path) -> None:
    path = tmp_path / "id2metric.jsonl"
    path.write_text('{"7": []}\n{"8": []}\n')
    assert "expected one JSON object" in refusal(ce.read_metrics, path)


@pytest.mark.parametrize("name", GOOD)
def test_every_reader_refuses_the_other_kind_of_document(name: str, tmp_path: Path) -> None:
    read, content = GOOD[name]
    other = {"7": 1} if isinstance(content, list) else [1]
    assert "expected one JSON" in refusal(read, write(tmp_path, other))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(ce.read_trans, tmp_path / "absent.json")
    assert "cannot be read" in refusal(ce.read_trans, tmp_path)


# (reader, content, parts of the message)
BAD_ROWS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "row is no object": ("test_data", [[1]], ("row [0]", "an array of 1", "an object")),
    "id missing": ("test_data", [without(data_row(), "id")], ("row [0], id", "nothing")),
    "id string": ("test_data", [data_row(id="7")], ('row [0] (id "7"), id', "an integer")),
    "id bool": ("test_data", [data_row(id=True)], ("id: found true", "an integer")),
    "id float": ("generations", [generation(id=7.0)], ("id: found 7.0", "an integer")),
    "id null": ("trans", [trans(id=None)], ("id: found null", "an integer")),
    "id repeated": ("generations", [generation(), generation()], ("row [1] (id 7), id", "row [0]")),
    "id surrogate": ("generations", [generation(id="\ud800")], ("\\ud800", "an integer")),
    "role null": ("test_data", [data_row(role=None)], ("row [0] (id 7), role", "null")),
    "role surrogate": ("trans", [trans(role="a\udfff")], ("role", "a\\udfff", "lone surrogate")),
    "novel_name missing": ("test_data", [without(data_row(), "novel_name")], ("novel_name",)),
    "context list": ("generations", [generation(context=["a"])], ("context", "an array of 1")),
    "context missing": ("trans", [without(trans(), "context")], ("context", "nothing")),
    "answer missing": (
        "generations",
        [data_row()],
        ("row [0] (id 7), model_output", "found nothing", "a string or null"),
    ),
    "answer number": ("generations", [generation(model_output=1)], ("model_output: found 1",)),
    "answer null after transform": (
        "trans",
        [trans(model_output=None)],
        ("model_output: found null", "expected a string"),
    ),
    "transformed already": ("generations", [trans()], ("row [0] (id 7)", "transformed already")),
    "metric unknown": ("trans", [trans(metric_en="fluency")], ("metric_en", "fluency", "Empathy")),
    "metric_zh unknown": ("trans", [trans(metric_zh="流利")], ("metric_zh", "流利", "共情度")),
    "metric_en chinese": ("trans", [trans(metric_en=FLUENCY.zh)], ("metric_en", "Fluency")),
    "metric missing": ("trans", [without(trans(), "metric_zh")], ("metric_zh: found nothing",)),
    "metric contradicts": (
        "trans",
        [trans(metric_zh=EMPATHY.zh)],
        ("row [0] (id 7), metric_zh", EMPATHY.zh, "metric_en Fluency", f"expected {FLUENCY.zh}"),
    ),
    "pair repeated": ("trans", [trans(), trans()], ("row [1] (id 7), id and metric_en", "row [0]")),
    "nan": ("trans", [trans(extra=NAN)], ("row [0] (id 7), extra: found nan", "finite")),
    "infinity": ("generations", [generation(a={"b": [1, -INFINITY]})], ("a.b[1]: found -inf",)),
    "metrics id": ("metrics", {"007": [list(FLUENCY)]}, ("entry [0] (007)", "integer id")),
    "metrics id minus": ("metrics", {"-0": [list(FLUENCY)]}, ("integer id",)),
    "metrics id surrogate": ("metrics", {"\ud800": [list(FLUENCY)]}, ("\\ud800", "integer id")),
    "metrics no list": ("metrics", {"7": "Fluency"}, ("entry [0] (7)", '"Fluency"')),
    "metrics none": ("metrics", {"7": []}, ("entry [0] (7)", "an array of 0")),
    "metrics pair": ("metrics", {"7": [["Fluency"]]}, ("pair [0]", "[metric_en, metric_zh]")),
    "metrics object": ("metrics", {"7": [[{}, 1]]}, ("metric_en: found an object", "metric_zh")),
    "metrics contradict": ("metrics", {"7": [["Fluency", EMPATHY.zh]]}, ("pair [0], metric_zh",)),
    "metrics repeated": ("metrics", {"7": [list(FLUENCY)] * 2}, ("pair [1]", "Fluency again")),
    "profile string": ("profiles", {"甲": "text"}, ("entry [0] (甲)", "an object")),
    "profile empty": ("profiles", {"甲": {}}, ("entry [0] (甲)", "an object of 0")),
    "profile nan": ("profiles", {"甲": {"年龄": NAN}}, ("甲.年龄: found nan",)),
    "profile role": ("profiles", {"\udc00": {"a": "b"}}, ("\\udc00", "lone surrogate")),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_by_place_and_field(name: str, tmp_path: Path) -> None:
    kind, content, expected = BAD_ROWS[name]
    message = refusal(GOOD[kind][0], write(tmp_path, content))
    assert [part for part in expected if part not in message] == [], message


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("metrics", '{"7": 1, "8": 0, "7": 2}', ('the file: found the key "7" more than once',)),
        ("profiles", '{"甲": {"a": "1", "a": "2"}}', ("甲: found the key", "more than once")),
        ("trans", '[{"id": 7, "role": "a", "role": "b"}]', ("row [0] (id 7): found the key",)),
        ("test_data", '[{"id": 7, "x": 1e999}]', ("x: found inf",)),
    ],
)
def test_what_json_load_passes_silently_is_refused(
    kind: str, text: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text(text, encoding="utf-8")
    message = refusal(GOOD[kind][0], path)
    assert [part for part in expected if part not in message] == [], message


def test_nesting_that_could_not_be_written_again_is_refused(tmp_path: Path) -> None:
    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth else 0

    deepest = files.MAX_DEPTH - 1  # the row itself is one level
    assert len(ce.read_trans(write(tmp_path, [trans(extra=nested(deepest))]))) == 1
    message = refusal(ce.read_trans, write(tmp_path, [trans(extra=nested(deepest + 1))]))
    assert "deeper than 100 levels" in message


def test_all_problems_are_reported_together_the_first_twenty_in_words(tmp_path: Path) -> None:
    rows = [data_row(id=i, role=None) for i in range(25)]
    message = refusal(ce.read_test_data, write(tmp_path, rows))
    assert "25 problems" in message
    assert message.count("found null") == 20
    assert "row [19] (id 19), role" in message
    assert message.endswith("and 5 more")

    one_row = [data_row(id="x", role=1, novel_name=2, context=3)]
    message = refusal(ce.read_test_data, write(tmp_path, one_row))
    assert "4 problems" in message
    assert "more" not in message


# Transform


def generations(tmp_path: Path, *answers: object) -> list[ce.Generation]:
    rows = [generation(id=i, model_output=answer) for i, answer in enumerate(answers)]
    return ce.read_generations(write(tmp_path, rows))


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("a\nb\nc", "a"),
        ("\nb", ""),
        ("", ""),
        (" a \t", " a \t"),
        ("a\r\nb", "a\r"),
        ("a\rb", "a\rb"),
        ("a\u2028b\u2029c\x85d\x0be", "a\u2028b\u2029c\x85d\x0be"),
        ("\u3000a\u3000\nb", "\u3000a\u3000"),
        ("ERROR ", "ERROR "),
        ("error", "error"),
        ("ERROR\nretry", "ERROR"),
    ],
)
def test_only_the_text_before_the_first_newline_is_kept(
    answer: str, kept: str, tmp_path: Path
) -> None:
    result = ce.transform(generations(tmp_path, answer), {"0": [FLUENCY]})
    assert [row.model_output for row in result.rows] == [kept]
    assert [row.fields["model_output"] for row in result.rows] == [kept]


def test_stripping_or_splitting_lines_would_give_other_text(tmp_path: Path) -> None:
    (row,) = ce.transform(generations(tmp_path, " a\r\u2028b \nc"), {"0": [FLUENCY]}).rows
    assert row.model_output == " a\r\u2028b "
    assert row.model_output not in (row.model_output.strip(), row.model_output.splitlines()[0])


def test_dropped_rows_are_listed_by_reason(tmp_path: Path) -> None:
    given = generations(tmp_path, "a", None, "ERROR", "b", "ERROR", None, "")
    metrics = {"0": [FLUENCY], "1": [FLUENCY], "2": [FLUENCY], "6": [EMPATHY, FLUENCY]}
    result = ce.transform(given, metrics)
    # 4 and 5 have no metrics either: the answer is looked at first
    assert result.dropped == {"null": (1, 5), "error": (2, 4), "no_metric": (3,)}
    assert [(row.id, row.metric) for row in result.rows] == [
        (0, FLUENCY),
        (6, EMPATHY),
        (6, FLUENCY),
    ]
    assert len(given) == len({row.id for row in result.rows}) + sum(
        map(len, result.dropped.values())
    )


def test_transform_writes_what_the_official_script_writes(tmp_path: Path) -> None:
    """The official loop, with the lookup and the null rule of the protocol, on the raw rows."""
    raw = [{"extra": [1], **generation(id=i)} for i in (3, 1, 2)]
    raw[0]["model_output"] = "x\ny"
    raw[1]["model_output"] = "ERROR"
    metrics = {"3": [EMPATHY, FLUENCY], "1": [FLUENCY], "2": [FLUENCY]}
    expected = []
    for row in json.loads(json.dumps(raw)):
        if row["model_output"] != "ERROR":
            row["model_output"] = row["model_output"].split("\n")[0]
            for en, zh in metrics[str(row["id"])]:
                row["metric_en"] = en
                row["metric_zh"] = zh
                expected.append(dict(row))
    result = ce.transform(ce.read_generations(write(tmp_path, raw)), metrics)
    assert [list(row.fields.items()) for row in result.rows] == [list(e.items()) for e in expected]

    text = ce.official_output(result.rows, [None] * len(result.rows)).text
    path = tmp_path / "trans.jsonl"
    path.write_text(text, encoding="utf-8")
    assert ce.read_trans(path) == list(result.rows)
    assert text == json.dumps(expected, ensure_ascii=False, indent=4)


def test_a_row_gets_its_roles_profile(tmp_path: Path) -> None:
    (row,) = ce.read_trans(write(tmp_path, [trans(context=" c ", model_output="a")]))
    profiles = {"阮砚秋": {"姓名": "阮砚秋"}}
    assert protocol.compose(ce.to_row(row, profiles)).text == (
        "<RoleInfo>\n\n{'姓名': '阮砚秋'}\n\n<Context>\n\n c \n\n<Response>\n\na"
        "\n\n<Dimension>\n\n对话流利度"
    )
    with pytest.raises(UnknownRole, match='row id 7, role: found "阮砚秋"'):
        ce.to_row(row, {"other": {}})


# Aggregate


def all_metrics(**changes: list[float | None]) -> list[tuple[str, float | None]]:
    values: dict[str, list[float | None]] = {name: [3.0] for name in METRICS}
    values |= changes
    return [(name, score) for name, scores in values.items() for score in scores]


def test_dimensions_are_unweighted_means_of_metric_means() -> None:
    scores = all_metrics(Fluency=[1.0, 1.0, 1.0, 2.0], Coherence=[5.0])
    result = ce.aggregate(scores)
    assert result.metrics["Fluency"].mean == 1.25
    assert result.metrics["Fluency"].count == 4
    dimension = result.dimensions["conversational_ability"]
    assert dimension == (1.25 + 5.0 + 3.0) / 3
    names = DIMENSIONS["conversational_ability"]
    rows = [score for name, score in scores if name in names and score is not None]
    assert sum(rows) / len(rows) == pytest.approx(13 / 6)  # the row-weighted control
    assert dimension != pytest.approx(sum(rows) / len(rows), abs=0.1)
    assert list(result.metrics) == list(METRICS)
    assert list(result.dimensions) == list(DIMENSIONS)


def test_scores_are_averaged_unrounded_and_exactly() -> None:
    scores = [1.1, 2.2, 3.3] * 1000
    mean = ce.aggregate(("Fluency", score) for score in scores).metrics["Fluency"].mean
    assert mean == math.fsum(scores) / 3000
    in_order = functools.reduce(operator.add, scores)  # sum() compensates since Python 3.12
    assert mean != in_order / 3000


def test_a_dimension_without_one_of_its_metrics_has_no_mean() -> None:
    scores = [pair for pair in all_metrics() if pair[0] != "Empathy"]
    result = ce.aggregate(scores)
    assert result.metrics["Empathy"] == ce.MetricMean(None, 0, 0, None, None)
    assert result.dimensions["role_playing_attractiveness"] is None
    assert result.dimensions["character_consistency"] == 3.0


def test_unresolved_rows_leave_the_mean_and_bound_it() -> None:
    result = ce.aggregate(all_metrics(Fluency=[2.0, None, 3.0, None], Empathy=[None]))
    assert result.metrics["Fluency"] == ce.MetricMean(2.5, 2, 2, low=7 / 4, high=15 / 4)
    assert result.metrics["Empathy"] == ce.MetricMean(None, 0, 1, low=1.0, high=5.0)
    assert result.metrics["Coherence"] == ce.MetricMean(3.0, 1, 0, low=3.0, high=3.0)
    assert result.dimensions["role_playing_attractiveness"] is None


BAD_SCORES = [
    (NAN, NotFinite),
    (INFINITY, NotFinite),
    (-INFINITY, NotFinite),
    (0.999, InvalidRow),
    (5.001, InvalidRow),
    (10**400, InvalidRow),
    ("3", InvalidRow),
    (True, InvalidRow),
]


@pytest.mark.parametrize(("score", "error"), BAD_SCORES, ids=lambda v: ascii(v)[:20])
def test_what_is_no_score_is_never_averaged_or_written(
    score: Any, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error, match="Fluency"):
        ce.aggregate([("Fluency", 3.0), ("Fluency", score)])
    with pytest.raises(error, match="row id 7, Fluency"):
        ce.official_output(ce.read_trans(write(tmp_path, [trans()])), [score])


def test_the_ends_of_the_scale_are_scores_and_unknown_metrics_are_not_averaged() -> None:
    assert ce.aggregate([("Fluency", 1), ("Fluency", 5.0)]).metrics["Fluency"].mean == 3.0
    with pytest.raises(UnknownMetric):
        ce.aggregate([("Overall", 3.0)])


# Output


def test_the_output_is_the_input_with_one_more_key_per_row(tmp_path: Path) -> None:
    raw = [
        {"first": None, **trans(), "last": {"a": [1.5, "\u2028"]}},
        trans(metric_en="Empathy", metric_zh=EMPATHY.zh),
        trans(id=8),
    ]
    rows = ce.read_trans(write(tmp_path, raw))
    output = ce.official_output(rows, [3.015625, None, 1])
    expected = [{**raw[0], "Fluency": 3.015625}, raw[1], {**raw[2], "Fluency": 1.0}]
    assert output.text == json.dumps(expected, ensure_ascii=False, indent=4)
    assert output.unresolved == 1
    assert output.text.startswith('[\n    {\n        "first": null,\n        "id": 7,')
    assert "阮砚秋" in output.text
    with pytest.raises(ValueError, match="zip"):
        ce.official_output(rows, [3.0])


def test_an_unresolved_row_loses_the_number_of_an_earlier_run(tmp_path: Path) -> None:
    rows = ce.read_trans(write(tmp_path, [trans(Fluency=4.0, Empathy=2.0)]))
    (unresolved,) = json.loads(ce.official_output(rows, [None]).text)
    assert unresolved == trans(Empathy=2.0)
    (scored,) = json.loads(ce.official_output(rows, [1.5]).text)
    assert scored == trans(Fluency=1.5, Empathy=2.0)


def test_a_lone_surrogate_in_a_field_does_not_lose_the_file(tmp_path: Path) -> None:
    raw = [trans(model_output="a\ud83d"), trans(id=8, model_output="😀")]
    output = ce.official_output(ce.read_trans(write(tmp_path, raw)), [None, 2.0])
    target = tmp_path / "evaluation.jsonl"
    files.write_atomically(target, output.text)
    assert '"a\\ud83d"' in target.read_text(encoding="utf-8")
    assert "😀" in target.read_text(encoding="utf-8")
    assert [row.model_output for row in ce.read_trans(target)] == ["a\ud83d", "😀"]


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    files.write_atomically(target, "一\r\n\u2028")
    assert target.read_bytes() == "一\r\n\u2028".encode()
    target.chmod(0o600)
    link = tmp_path / "link.json"
    link.symlink_to(target)
    files.write_atomically(link, "two")
    assert target.read_bytes() == b"two"
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "out.json"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """The system refuses the write for real: the process may not make files over 1,000 bytes."""
    target = tmp_path / "out.json"
    target.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(BadFile, match=r"out\.json: not written: .*as it was before"):
            files.write_atomically(target, "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    files.write_atomically(target, "x" * 2000)
    assert len(target.read_text()) == 2000


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_stops_midway_leaves_the_old_file(
    step: str, failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, step, fail)
    expected = BadFile if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        files.write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"U\+D800 at character 1"):
        files.write_atomically(tmp_path / "a", "x\ud800")
    with pytest.raises(BadFile, match="No such file"):
        files.write_atomically(tmp_path / "absent" / "a", "x")
    with pytest.raises(BadFile, match="not written"):
        files.write_atomically(tmp_path, "x")
    assert list(tmp_path.iterdir()) == []


# Published facts


def test_the_tables_averages_are_unweighted_means_of_its_metrics() -> None:
    weighted = 0
    for model, means in published.PUBLISHED.items():
        assert list(means.metrics) == list(METRICS)
        for dimension, names in DIMENSIONS.items():
            printed = means.dimensions[dimension]
            unweighted = sum(means.metrics[name] for name in names) / len(names)
            assert unweighted == pytest.approx(printed, abs=0.001), (model, dimension)
            counts = [published.ROWS_PER_METRIC[name] for name in names]
            products = [n * means.metrics[name] for n, name in zip(counts, names, strict=True)]
            weighted += abs(sum(products) / sum(counts) - printed) > 0.001
    assert weighted > 30  # of 45: the row-weighted mean does not reproduce the table
    assert len(published.PUBLISHED) == 15


def test_counts_agree_with_each_other() -> None:
    assert sum(published.ROWS_PER_METRIC.values()) == published.PAIRS
    assert published.IDS_WITH_METRICS + published.IDS_WITHOUT_METRICS == published.TEST_ROWS
    assert set(published.ROWS_PER_METRIC) == set(METRICS)


def test_our_means_are_set_beside_the_papers() -> None:
    paper = published.PUBLISHED["GPT-4"]
    scores = [(name, mean + 0.25) for name, mean in paper.metrics.items() if name != "Empathy"]
    result = published.compare_with_published(ce.aggregate(scores), "GPT-4")
    assert [line.name for line in result] == [*METRICS, *DIMENSIONS]
    by_name = {line.name: line for line in result}
    assert by_name["Fluency"] == published.Difference("Fluency", 3.582, 3.332, 3.582 - 3.332)
    assert by_name["Empathy"] == published.Difference("Empathy", None, 3.01, None)
    conversation = by_name["conversational_ability"]
    assert conversation.paper == 3.448
    assert conversation.difference == pytest.approx(0.25, abs=0.001)
    assert by_name["role_playing_attractiveness"].difference is None
    with pytest.raises(BadRequest, match=r"gpt-4.*expected one that the paper lists.*GPT-4"):
        published.compare_with_published(ce.aggregate([]), "gpt-4")


def test_no_torch_is_loaded() -> None:
    code = "import sys, charrm.published; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# The published files


@needs_shared
def test_shared_files_hold_the_stated_counts(tmp_path: Path) -> None:
    folder = SHARED / "charactereval"
    rows = ce.read_test_data(folder / "test_data.jsonl")
    profiles = ce.read_profiles(folder / "character_profiles.json")
    metrics = ce.read_metrics(folder / "id2metric.jsonl")
    assert len(rows) == published.TEST_ROWS == 4564
    assert len(profiles) == published.ROLES == 78
    assert len({row.role for row in rows}) == 77
    assert len(metrics) == published.IDS_WITH_METRICS == 4531
    assert sum(map(len, metrics.values())) == published.PAIRS == 8032
    per_metric = Counter(metric.en for pairs in metrics.values() for metric in pairs)
    assert per_metric == published.ROWS_PER_METRIC

    answered = [dict(row.fields) | {"model_output": ""} for row in rows]
    result = ce.transform(ce.read_generations(write(tmp_path, answered)), metrics)
    assert len(result.rows) == 8032
    assert {reason: len(ids) for reason, ids in result.dropped.items()} == {
        "null": 0,
        "error": 0,
        "no_metric": published.IDS_WITHOUT_METRICS,
    }
    assert published.IDS_WITHOUT_METRICS == 33
    assert all(ce.to_row(row, profiles).profile is profiles[row.role] for row in result.rows)
    with pytest.raises(BadFile):
        ce.read_metrics(folder / "test_data.jsonl")


@needs_shared
def test_shared_table_equals_the_embedded_one() -> None:
    table = json.loads((SHARED / "upstream/published_table.json").read_text(encoding="utf-8"))
    ours = {
        model: dict(means.metrics) | {f"avg_{n}": mean for n, mean in means.dimensions.items()}
        for model, means in published.PUBLISHED.items()
    }
    assert ours == {model: without(means, "mbti") for model, means in table["models"].items()}
    assert table["rows_per_metric"] == published.ROWS_PER_METRIC
    assert table["metric_zh"] == METRICS
    assert {name: tuple(names) for name, names in table["dimensions"].items()} == DIMENSIONS
