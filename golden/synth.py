"""A stand-in for the published generation files: same names, shape and counts, answers by no model.

It lets everything be exercised at full size by whoever has only the three data files. Scores on it
say nothing about any model, so the set carries a marker file and every report of it says so. All
choices come from SHAKE-256, so the bytes are the same on every machine and Python version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from charrm.charactereval import (
    FAILED_GENERATION,
    Generation,
    TestRow,
    read_metrics,
    read_profiles,
    read_test_data,
    transform,
)
from charrm.errors import BadFile
from charrm.files import write_atomically
from golden.upstream import DATA_FILES, ID_TO_METRIC, PROFILES, RESULT_FILES, STAND_IN, TEST_DATA

SEED = 20240102
NOTICE = (
    "STAND-IN: these answers are lines of the test data's own contexts; no model wrote them, and "
    "scores on them say nothing about any model."
)
RULE = (
    "for each model and test row, by SHAKE-256 of seed/model/id: 2 of 1,000 answers are empty and "
    "1 is very long (1,500 to 8,000 characters), the others join 1 to 6 utterances (70 % one, 20 % "
    "two), each of the row's role (70 %) or of anybody; then the model's share gets 'role：' in "
    "front, and 20 of 1,000 a blank before, behind, or a U+3000 before; the official transform "
    "makes the rows"
)

# Of 1,000 answers; the published files lie between 920 and 980.
_PREFIXED = {
    "baichuan_7b": 970,
    "chatglm3_6b": 930,
    "internlm_7b": 950,
    "qwen_7b": 940,
    "xverse_7b": 960,
}
_BLANKS = ((" ", ""), ("", " "), ("\u3000", ""))


def synthesise(data_folder: Path, target: Path, *, seed: int = SEED) -> dict[str, str]:
    """Write a stand-in set to `target` from the three data files; return file name -> sha256.

    `data_folder` holds the three files, or a `data` folder with them. They are copied to
    `<target>/data`, the five result files written to `<target>/results`, and `STAND-IN.json` says
    what the set is, with seed, rule and digests. The marker is written first, so that no part of
    the set is ever without it. Equal data and seed give equal bytes.

    Raises BadFile: a data file is missing or broken, its roles have no profile, `target` holds
    result files without the marker (they might be the published ones), or the disk is full.
    """
    sources = {pin.target: _find(data_folder, Path(pin.target).name) for pin in DATA_FILES}
    _refuse_real_set(target)
    tests = read_test_data(sources[TEST_DATA.target])
    metrics = read_metrics(sources[ID_TO_METRIC.target])
    profiles = read_profiles(sources[PROFILES.target])
    strange = sorted({test.role for test in tests} - profiles.keys())
    if strange:
        raise BadFile(
            f"{sources[TEST_DATA.target]}: found {len(strange)} roles without a profile, such as "
            f"{strange[0]}; the data files do not belong together."
        )
    files = {name: path.read_bytes().decode("utf-8") for name, path in sources.items()}
    lines = _Lines.of(tests)
    for model, pin in RESULT_FILES.items():
        generations = (_generate(test, model, seed, lines) for test in tests)
        rows = [row.fields for row in transform(generations, metrics).rows]
        files[pin.target] = json.dumps(rows, ensure_ascii=False, indent=4)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    marker = {"notice": NOTICE, "seed": seed, "rule": RULE, "files": digests}
    files = {STAND_IN: json.dumps(marker, ensure_ascii=False, indent=1) + "\n", **files}
    for name, text in files.items():
        _write(target / name, text)
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}


@dataclass(frozen=True)
class _Lines:
    """The utterances of all contexts, without their speakers: all of them, and by speaker."""

    all: Sequence[str]
    by_speaker: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, tests: Sequence[TestRow]) -> _Lines:
        everything: list[str] = []
        by_speaker: dict[str, list[str]] = {}
        for test in tests:
            for line in test.context.split("\n"):
                speaker, colon, text = line.partition("：")
                if not colon:
                    speaker, text = "", line
                if text.strip():
                    everything.append(text)
                    by_speaker.setdefault(speaker, []).append(text)
        if not everything:
            raise BadFile("test data: found no utterance in any context to draw answers from.")
        return cls(everything, by_speaker)


class _Draws:
    """Integers from a SHAKE-256 stream; `below` is even enough: 64 bits against small limits."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._stream = b""
        self._at = 0

    def below(self, limit: int) -> int:
        if self._at == len(self._stream):
            self._stream = hashlib.shake_256(self._key).digest(2 * len(self._stream) or 256)
        self._at += 8
        return int.from_bytes(self._stream[self._at - 8 : self._at], "big") % limit


def _generate(test: TestRow, model: str, seed: int, lines: _Lines) -> Generation:
    answer = _answer(test.role, _Draws(f"{seed}/{model}/{test.id}"), _PREFIXED[model], lines)
    assert "\n" not in answer
    assert answer != FAILED_GENERATION
    fields = {**test.fields, "model_output": answer}
    return Generation(test.id, test.role, test.context, answer, fields)


def _answer(role: str, draws: _Draws, prefixed: int, lines: _Lines) -> str:
    own = lines.by_speaker.get(role, lines.all)

    def utterance() -> str:
        pool = own if draws.below(10) < 7 else lines.all
        return pool[draws.below(len(pool))]

    kind = draws.below(1000)
    if kind < 2:
        return ""
    if kind < 3:
        length = 1500 + draws.below(6500)
        text = ""
        while len(text) < length:
            text += utterance()
    else:
        tenths = draws.below(10)
        count = 1 if tenths < 7 else 2 if tenths < 9 else 3 + draws.below(4)
        text = "".join(utterance() for _ in range(count))
    if draws.below(1000) < prefixed:
        text = f"{role}：{text}"
    if draws.below(1000) < 20:
        before, behind = _BLANKS[draws.below(len(_BLANKS))]
        text = before + text + behind
    return text


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / "data" / name):
        if path.is_file():
            return path
    raise BadFile(f"{folder}: found no {name} there or in its data folder; fetch or copy it.")


def _refuse_real_set(target: Path) -> None:
    if (target / STAND_IN).exists():
        return
    for pin in RESULT_FILES.values():
        if (target / pin.target).exists():
            raise BadFile(
                f"{target}: holds {pin.target} without {STAND_IN}, so it may be the published one; "
                "write the stand-in to another folder."
            )


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(f"{path.parent}: cannot be made: {error.strerror or error}.") from error
    write_atomically(path, text)
