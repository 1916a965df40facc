"""The stand-in set: same bytes everywhere, the published shape, never without its marker.

Tests that use the fixture `shared` make the whole set and are skipped without the material.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from helpers import load_json

from charrm.charactereval import read_trans
from charrm.errors import BadFile
from charrm.files import write_atomically
from charrm.protocol import METRICS
from golden import synth
from golden.structure import Shape, check_structure, length_class, load_set, stratified_sample
from golden.synth import NOTICE, SEED, synthesise
from golden.upstream import DATA_FILES, PINS, RESULT_FILES, STAND_IN

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("阮砚秋", "沈鹤鸣")
NAMES = list(METRICS)
IDS = range(100, 400)
SHAPE = Shape(
    test_rows=301,
    roles=2,
    ids_with_metrics=300,
    rows_per_file=600,
    rows_per_metric=dict.fromkeys(NAMES, 50),
)

# sha256 over the result files made from `data` below with the default seed, once, by Python 3.11.
EXPECTED = "2c0cba5666b6ab3ac483ead24377bb96c0dd11b949cb02cf04cf633d6ed3f313"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """301 invented test rows, one of them without metrics; two metrics for each other row."""
    tests = [
        {
            "id": id_,
            "role": ROLES[id_ % 2],
            "novel_name": "盐灯镇纪事",
            "context": "\n".join(
                f"{speaker}：（{id_}）第{id_ * 7 % 13}盏灯又灭了，{'快走' * (id_ % 4)}。"
                for speaker in (*ROLES, "路人")
            ),
        }
        for id_ in (*reversed(IDS), 7)
    ]
    asked = {str(id_): (NAMES[id_ % 12], NAMES[(id_ + 5) % 12]) for id_ in IDS}
    contents = (
        tests,
        {role: {"姓名": role} for role in ROLES},
        {id_: [[en, METRICS[en]] for en in names] for id_, names in asked.items()},
    )
    folder = tmp_path / "source"
    folder.mkdir()
    for pin, content in zip(DATA_FILES, contents, strict=True):
        text = json.dumps(content, ensure_ascii=False)
        (folder / Path(pin.target).name).write_text(text, encoding="utf-8")
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def results_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for pin in RESULT_FILES.values():
        digest.update((folder / pin.target).read_bytes())
    return digest.hexdigest()


def test_the_set_has_the_shape_of_the_published_one(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "set"
    digests = synthesise(data, target)
    contents = bytes_of(target)
    wanted = {pin.target for pin in PINS if not pin.target.startswith("anchor/")} | {STAND_IN}
    assert contents.keys() == digests.keys() == wanted
    assert {name: hashlib.sha256(c).hexdigest() for name, c in contents.items()} == digests
    for pin in DATA_FILES:
        assert contents[pin.target] == (data / Path(pin.target).name).read_bytes()
    assert check_structure(target, SHAPE) == []
    tests = {row["id"]: row for row in load_json(data / "test_data.jsonl")}
    for pin in RESULT_FILES.values():
        rows = load_json(target / pin.target)
        assert contents[pin.target].decode() == json.dumps(rows, ensure_ascii=False, indent=4)
        fields = ["id", "role", "novel_name", "context", "model_output", "metric_en", "metric_zh"]
        assert {tuple(row) for row in rows} == {tuple(fields)}
        assert all(row.items() >= tests[row["id"]].items() for row in rows)
        answers: dict[int, set[str]] = defaultdict(set)
        for row in rows:
            answers[row["id"]].add(row["model_output"])
        assert {len(texts) for texts in answers.values()} == {1}  # one answer, several metrics


def test_equal_seeds_give_equal_bytes_and_others_do_not(data: Path, tmp_path: Path) -> None:
    first = synthesise(data, tmp_path / "a")
    assert synthesise(data, tmp_path / "b") == first
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    other = synthesise(data, tmp_path / "c", seed=SEED + 1)
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {pin.target for pin in RESULT_FILES.values()} | {STAND_IN}
    assert len({first[pin.target] for pin in RESULT_FILES.values()}) == 5  # models differ


def test_the_bytes_are_those_of_every_machine(data: Path, tmp_path: Path) -> None:
    synthesise(data, tmp_path / "set")
    assert results_digest(tmp_path / "set") == EXPECTED
    synthesise(data, tmp_path / "set", seed=SEED + 1)
    assert results_digest(tmp_path / "set") != EXPECTED


def test_hash_randomisation_does_not_reach_the_bytes(data: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from golden.synth import synthesise; "
    code += "synthesise(Path(sys.argv[1]), Path(sys.argv[2])); assert 'torch' not in sys.modules"
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code, data, tmp_path / seed],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
        )
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")


def test_the_marker_says_what_the_set_is(data: Path, tmp_path: Path) -> None:
    digests = synthesise(data, tmp_path / "set", seed=5)
    marker = load_json(tmp_path / "set" / STAND_IN)
    assert marker["notice"] == NOTICE
    assert marker["seed"] == 5
    assert marker["rule"] == synth.RULE
    assert marker["files"] == {n: d for n, d in digests.items() if n != STAND_IN}
    assert load_set(tmp_path / "set").is_standin
    (tmp_path / "set" / STAND_IN).unlink()
    assert not load_set(tmp_path / "set").is_standin


def test_no_part_of_a_set_is_without_its_marker(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def failing(path: Any, text: str) -> None:
        if len(written) == 5:
            raise BadFile("No space left on device")
        write_atomically(path, text)
        written.append(Path(path).name)

    monkeypatch.setattr(synth, "write_atomically", failing)
    with pytest.raises(BadFile, match="No space left"):
        synthesise(data, tmp_path / "set")
    assert written[0] == STAND_IN
    left = {d.file for d in check_structure(tmp_path / "set", SHAPE)}
    assert left == {pin.target for pin in list(RESULT_FILES.values())[1:]}
    monkeypatch.undo()
    synthesise(data, tmp_path / "set")  # again, over what is left
    assert check_structure(tmp_path / "set", SHAPE) == []


def test_published_files_are_not_overwritten(data: Path, tmp_path: Path) -> None:
    precious = tmp_path / "set" / RESULT_FILES["qwen_7b"].target
    precious.parent.mkdir(parents=True)
    precious.write_text("precious", encoding="utf-8")
    with pytest.raises(BadFile, match=r"generation_trans_qwen_7b\.jsonl without STAND-IN"):
        synthesise(data, tmp_path / "set")
    assert list(bytes_of(tmp_path / "set").values()) == [b"precious"]


def test_data_that_cannot_be_used_is_refused(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "set"
    with pytest.raises(BadFile, match=r"found no test_data\.jsonl"):
        synthesise(tmp_path / "absent", target)
    profiles = data / "character_profiles.json"
    text = profiles.read_text(encoding="utf-8")
    profiles.write_text(text.replace(ROLES[0], "无名"), encoding="utf-8")
    with pytest.raises(BadFile, match=f"1 roles without a profile, such as {ROLES[0]}"):
        synthesise(data, target)
    profiles.write_text(text[:-1], encoding="utf-8")
    with pytest.raises(BadFile, match="cut off"):
        synthesise(data, target)
    profiles.write_text(text, encoding="utf-8")
    tests = load_json(data / "test_data.jsonl")
    silent = json.dumps([{**row, "context": f"{row['role']}：\n "} for row in tests])
    (data / "test_data.jsonl").write_text(silent, encoding="utf-8")
    with pytest.raises(BadFile, match="found no utterance"):
        synthesise(data, target)
    assert not target.exists()
    (target.parent / "file").write_bytes(b"")
    (data / "test_data.jsonl").write_text(json.dumps(tests), encoding="utf-8")
    with pytest.raises(BadFile, match="cannot be made"):
        synthesise(data, target.parent / "file" / "set")


def test_a_data_folder_of_a_set_serves_as_well(data: Path, tmp_path: Path) -> None:
    first = synthesise(data, tmp_path / "a")
    assert synthesise(tmp_path / "a", tmp_path / "b") == first


def test_at_full_size(shared: Path, tmp_path: Path) -> None:
    """All 40,160 rows: structure, prefixes, blanks, lengths, origin of the answers, a sample."""
    synthesise(shared / "charactereval", tmp_path)
    assert check_structure(tmp_path) == []
    replay = load_set(tmp_path)
    assert len(replay.rows) == 40_160
    assert (replay.is_standin, replay.is_published) == (True, False)
    utterances = set()
    for test in load_json(shared / "charactereval" / "test_data.jsonl"):
        utterances |= {line.partition("：")[2] for line in test["context"].split("\n")}
    by_model = defaultdict(list)
    for row in replay.rows:
        by_model[row.model].append(row)
    assert list(by_model) == list(RESULT_FILES)
    for rows in by_model.values():
        answers = [row.row.model_output or "" for row in rows]
        bare = [a.strip() for a in answers]
        prefixed = [a.startswith(f"{row.role}：") for a, row in zip(bare, rows, strict=True)]
        assert 0.92 <= sum(prefixed) / len(rows) <= 0.98
        assert 40 <= sum(a != b for a, b in zip(answers, bare, strict=True)) <= 400
        assert 1 <= sum(not a for a in answers) <= 100
        assert max(map(len, answers)) > 4_000
        texts = [b.partition("：")[2] if p else b for b, p in zip(bare, prefixed, strict=True)]
        drawn = sum(text in utterances for text in texts)
        assert drawn > 0.6 * len(rows)  # the answers of one utterance, whole
        assert len(set(texts)) > 3_000
    # characters stand for tokens here: strata, not their edges, are what is looked at
    lengths = [
        len(str(row.row.profile)) + len(row.row.context or "") + len(row.row.model_output or "")
        for row in replay.rows
    ]
    sample = stratified_sample(replay.rows, 400, lengths)
    kept = Counter(row.role for row in sample)
    assert (len(sample), len(kept), max(kept.values()) - min(kept.values())) == (400, 77, 1)
    of = {row.slot: length for row, length in zip(replay.rows, lengths, strict=True)}
    assert {length_class(of[row.slot]) for row in sample} == set(map(length_class, lengths))
    # a control: one answer of one row changed
    path = tmp_path / RESULT_FILES["qwen_7b"].target
    rows = load_json(path)
    rows[17]["model_output"] += "\n"
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=4), encoding="utf-8")
    listed = [(d.file, d.row, d.field) for d in check_structure(tmp_path)]
    assert listed == [
        (RESULT_FILES["qwen_7b"].target, None, "sha256"),
        (RESULT_FILES["qwen_7b"].target, 17, "model_output"),
    ]
    assert len(read_trans(path)) == 8032
