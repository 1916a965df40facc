"""The official reference: checkpoint code runs checked, elsewhere, and to the same bits.

The code that stands in for the published files lies in official_standin/ and is the tests' own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import copy_small_files, load_json, read_tensors, write_weights

from charrm.charactereval import TransRow, to_row
from charrm.demo import demo_profiles, demo_rows
from charrm.errors import (
    CharrmError,
    CheckpointError,
    CheckpointIncomplete,
    IdentityMismatch,
    NotFinite,
    RowError,
    TextNotEncodable,
)
from charrm.protocol import find_metric
from charrm.scorer import Scorer
from golden import official as module
from golden.official import AUDITED_CODE, TRUST_FLAG, CheckpointCode, OfficialSource
from golden.official_worker import Official
from golden.selftest import selftest_rows
from golden.sources import EngineSource, SlowSource
from golden.structure import ReplayRow

STANDIN = Path(__file__).parent / "official_standin"
ROWS = selftest_rows()
# Executed when the modeling file is imported, and a try to disturb the answers.
MARKER = """
import os, sys
with open({path!r}, "a") as marker:
    marker.write(f"{{os.getpid()}}\\n")
print("printed by the checkpoint")
os.write(1, b"written by the checkpoint\\n")
os.system("echo echoed by the checkpoint")
sys.stdin.read()
"""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def with_code(folder: Path, **changes: str) -> Path:
    """Add the stand-in's code to a folder; a change replaces the source of a module."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in AUDITED_CODE:
        shutil.copyfile(STANDIN / name, folder / name)
    for name, source in changes.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return folder


def copied(checkpoint: Path, folder: Path) -> Path:
    return with_code(Path(shutil.copytree(checkpoint, folder)))


def audit_as_found(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make the three files of a folder the audited ones."""
    monkeypatch.setattr(module, "AUDITED_CODE", {n: sha256(folder / n) for n in AUDITED_CODE})


@pytest.fixture(scope="module")
def folder(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copied(demo_checkpoint, tmp_path_factory.mktemp("official") / "checkpoint")
    with (folder / "modeling_baichuan.py").open("a", encoding="utf-8") as modeling:
        modeling.write(MARKER.format(path=str(folder.parent / "marker")))
    return folder


@pytest.fixture(scope="module")
def official(folder: Path) -> Iterator[OfficialSource]:
    source = OfficialSource(folder, trust=True, log=folder.parent / "logs" / "log")
    yield source
    source.close()


@pytest.fixture(scope="module")
def slow(folder: Path) -> SlowSource:
    return SlowSource(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> EngineSource:
    return EngineSource(Scorer.open(folder, device="cpu"))


def changed(row: ReplayRow, **fields: Any) -> ReplayRow:
    return replace(row, row=replace(row.row, **fields))


def test_the_audited_digests_are_those_of_the_release(shared: Path) -> None:
    files = load_json(shared / "upstream" / "manifest.json")["model"]["files"]
    published = {name: facts["sha256"] for name, facts in files.items() if name.endswith(".py")}
    assert published == AUDITED_CODE


def test_unknown_code_is_refused_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    other = with_code(tmp_path / "other", modeling_baichuan="raise SystemExit")
    for refused in (folder, other):
        with pytest.raises(IdentityMismatch) as error:
            OfficialSource(refused)
        for name, expected in AUDITED_CODE.items():
            assert f"{name}: found {sha256(refused / name)}, expected {expected}" in str(
                error.value
            )
        assert TRUST_FLAG in str(error.value)


def test_one_changed_file_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_code(tmp_path)
    audit_as_found(monkeypatch, folder)
    assert CheckpointCode.read(folder, trust=False).is_audited
    with (folder / "tokenization_baichuan.py").open("a") as file:
        file.write("\n")
    with pytest.raises(IdentityMismatch, match=r"tokenization_baichuan\.py: found") as error:
        CheckpointCode.read(folder, trust=False)
    assert "modeling_baichuan.py" not in str(error.value)
    assert not CheckpointCode.read(folder, trust=True).is_audited


def test_missing_code_is_named(demo_checkpoint: Path) -> None:
    with pytest.raises(CheckpointIncomplete, match=r"missing .*modeling_baichuan\.py"):
        OfficialSource(demo_checkpoint, trust=True)


def test_hidden_logit_p_and_score_are_bit_equal(
    official: OfficialSource, slow: SlowSource, engine: EngineSource
) -> None:
    sides = [official.score(row) for row in ROWS]
    assert sides == [slow.score(row) for row in ROWS]
    assert sides == [engine.score(row) for row in ROWS]
    assert all(None not in vars(side).values() for side in sides)
    assert len({side.hidden for side in sides}) == len(ROWS)


def test_control_one_changed_character_is_noticed(
    official: OfficialSource, slow: SlowSource
) -> None:
    row = changed(ROWS[0], context="你" + str(ROWS[0].row.context))
    found, other = official.score(row), slow.score(ROWS[0])
    assert found == slow.score(row)
    assert found.ids != other.ids
    assert found.hidden != other.hidden


def test_tokens_agree_where_the_rules_are_odd(
    official: OfficialSource, slow: SlowSource, engine: EngineSource
) -> None:
    contexts = [
        "",
        " ",
        "你好</s>再见",
        "你好 </s> 再见",
        "<s></s> <unk>\u3000\r\n",
        "𠮷\U0001f600",
    ]
    rows = [changed(ROWS[1], context=context) for context in contexts]
    sides = [official.tokenize(row) for row in rows]
    assert sides == [slow.tokenize(row) for row in rows] == [engine.tokenize(row) for row in rows]
    assert len({side.ids for side in sides}) == len(rows)
    assert all(side.score is None for side in sides)


def test_a_long_row_keeps_its_last_tokens(
    official: OfficialSource, slow: SlowSource, engine: EngineSource
) -> None:
    longest = max(demo_rows(), key=lambda row: len(row["context"]))
    trans = TransRow(0, longest["role"], longest["context"], longest["model_output"],
                     find_metric(longest["metric_en"]), {})  # fmt: skip
    row = replace(ROWS[0], metric_en=trans.metric.en, row=to_row(trans, demo_profiles()))
    side = official.tokenize(row)
    assert side == slow.tokenize(row) == engine.tokenize(row)
    assert side.tokens == 4096
    assert side.dropped is not None
    assert side.dropped > 0


def test_a_row_that_fails_leaves_the_others(official: OfficialSource, slow: SlowSource) -> None:
    with pytest.raises(TextNotEncodable, match=r"U\+D800"):
        official.score(changed(ROWS[0], context="a\ud800"))
    assert official.score(ROWS[0]) == slow.score(ROWS[0])


def test_the_code_ran_in_another_process_only(folder: Path, official: OfficialSource) -> None:
    lines = (folder.parent / "marker").read_text().split()
    assert lines == [str(official._worker._process.pid)]
    assert str(os.getpid()) not in lines
    assert not [name for name in sys.modules if "baichuan" in name or "BaichuanCharRM" in name]


def test_what_the_code_prints_goes_to_the_log(folder: Path, official: OfficialSource) -> None:
    log = (folder.parent / "logs" / "log").read_text()
    for what in ("printed", "written", "echoed"):
        assert f"{what} by the checkpoint" in log


def test_identity_says_what_ran(folder: Path, official: OfficialSource) -> None:
    identity = official.identity()
    assert identity == json.loads(json.dumps(identity))
    assert identity["code"] == {name: sha256(folder / name) for name in AUDITED_CODE}
    assert identity["code_status"] == "trusted by the user, not audited"
    assert identity["files"]["tokenizer.model"] == sha256(folder / "tokenizer.model")
    assert {"model-00001-of-00002.safetensors", "config.json"} <= identity["files"].keys()
    assert (identity["dtype"], identity["missing_tensors"]) == ("bfloat16", [])
    assert identity["torch"] == torch.__version__
    assert str(folder.parent) not in json.dumps(identity)


# What follows needs no weights: the code fails or is refused while it is imported.


def start(folder: Path, *, trust: bool = False) -> OfficialSource:
    (folder / "config.json").write_text("{}")
    return OfficialSource(folder, trust=trust)


def failing(folder: Path, statement: str, **others: str) -> Path:
    code = {"modeling_baichuan": statement, "tokenization_baichuan": "", **others}
    return with_code(folder, **code)


def test_a_file_that_changes_after_the_check_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = failing(tmp_path, "raise ValueError('the checked bytes')")
    read = CheckpointCode.read

    def read_then_change(folder: Path, trust: bool) -> CheckpointCode:
        code = read(folder, trust)
        (folder / "modeling_baichuan.py").write_text("raise ValueError('the other bytes')")
        return code

    audit_as_found(monkeypatch, folder)
    monkeypatch.setattr(CheckpointCode, "read", read_then_change)
    with pytest.raises(CheckpointError, match="ValueError: the checked bytes"):
        start(folder)
    # The control: the changed file would have run, had it been read.
    with pytest.raises(CheckpointError, match="ValueError: the other bytes"):
        start(folder, trust=True)


WAYS_TO_IMPORT = {
    "relative": "from .extra import VALUE",
    "swallowed": "try:\n    from .extra import VALUE\nexcept ImportError:\n    pass",
    "path": "import sys; sys.path.insert(0, {folder!r}); import extra",
    "exec": "exec(open({folder!r} + '/extra.py').read())",
    "pathlib": "import io, pathlib as p; exec(io.FileIO(p.Path({folder!r}, 'extra.py')).read())",
    "runpy": "import runpy; runpy.run_path({folder!r} + '/extra.py')",
}


@pytest.mark.parametrize("way", WAYS_TO_IMPORT)
def test_another_file_is_refused_without_trust(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = WAYS_TO_IMPORT[way].format(folder=str(tmp_path))
    marker = tmp_path / "marker"
    extra = f"open({str(marker)!r}, 'w').close(); VALUE = 1"
    folder = failing(tmp_path, statement, extra=extra)
    audit_as_found(monkeypatch, folder)
    with pytest.raises(IdentityMismatch) as error:
        start(folder)
    assert f"extra.py: found {sha256(folder / 'extra.py')}, expected" in str(error.value)
    assert TRUST_FLAG in str(error.value)
    assert not marker.exists()


def test_another_file_is_imported_with_trust(tmp_path: Path) -> None:
    folder = failing(
        tmp_path, "from .extra import VALUE; raise ValueError(VALUE)", extra="VALUE = 'of extra'"
    )
    with pytest.raises(CheckpointError, match="ValueError: of extra"):
        start(folder, trust=True)


def test_a_file_that_does_not_exist_is_an_ordinary_import_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = (
        "try:\n    import BaichuanCharRM.extra\nexcept ImportError:\n    raise ValueError('ok')"
    )
    folder = failing(tmp_path, statement)
    audit_as_found(monkeypatch, folder)
    with pytest.raises(CheckpointError, match="ValueError: ok"):
        start(folder)


def test_the_network_is_refused(tmp_path: Path) -> None:
    statement = "import socket; socket.create_connection(('127.0.0.1', 9))"
    with pytest.raises(CheckpointError, match=r"PermissionError: .*without a network"):
        start(failing(tmp_path, statement), trust=True)


def test_a_crash_tells_its_status_and_the_end_of_stderr(tmp_path: Path) -> None:
    statement = "import os, sys; print('last words', file=sys.stderr, flush=True); os._exit(7)"
    with pytest.raises(CharrmError, match=r"exit status 7.*\n.*last words") as error:
        start(failing(tmp_path, statement), trust=True)
    assert not isinstance(error.value, RowError)


def test_weights_that_are_not_in_the_checkpoint_are_refused(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    tensors = read_tensors(demo_checkpoint)
    del tensors["score.bias"]
    folder = with_code(copy_small_files(demo_checkpoint, tmp_path))
    write_weights(folder, tensors, "single safetensors")
    with pytest.raises(CheckpointError, match=r"hence random: score\.bias"):
        OfficialSource(folder, trust=True)


def test_a_result_that_is_not_finite_is_the_rows_error(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    tensors = read_tensors(demo_checkpoint)
    tensors["score.bias"] = torch.full((1,), float("nan"), dtype=torch.bfloat16)
    folder = with_code(copy_small_files(demo_checkpoint, tmp_path))
    write_weights(folder, tensors, "pickle shards")
    source = OfficialSource(folder, trust=True)
    for side in (source, SlowSource(folder), EngineSource(Scorer.open(folder, device="cpu"))):
        with pytest.raises(NotFinite, match="nan"):
            side.score(ROWS[0])
        assert side.tokenize(ROWS[0]).tokens

    # A harness that is killed takes its worker along.
    process = source._worker._process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0
    source.close()


@pytest.mark.parametrize("positions", ["all", "last", "only"])
def test_the_hook_takes_the_last_position(positions: str) -> None:
    states = torch.arange(12, dtype=torch.bfloat16).view(1, 3, 4)
    last = {"all": states, "last": states[:, -1:], "only": states[:, -1]}[positions]
    official = object.__new__(Official)
    official.torch = torch
    for args, kwargs in (((last,), {}), ((), {"input": last})):
        official._on_head(None, args, kwargs, last.sum(-1, keepdim=True))
        expected = states[0, -1].view(torch.uint8).numpy().tobytes().hex()
        assert official.head == (expected, 8.0 + 9 + 10 + 11)


# What follows replaces the worker by a few lines that break the wire.

WORKER = """
import json, os, sys, time
first = json.loads(sys.stdin.readline())
print(json.dumps({{"n": 1, "about": {{}}}}), flush=True)
sys.stderr.write("what it said last"); sys.stderr.flush()
n = json.loads(sys.stdin.readline())["n"]
good = {{"n": n, "ids": [5, 2], "dropped": 0, "hidden": "00", "logit": 0.0, "p": 0.5, "score": 3.0}}
{misbehave}
sys.stdin.read()
"""
GOOD = "print(json.dumps(good), flush=True)"
MISBEHAVIOUR = {
    "crash": ("os._exit(3)", "ended"),
    "silence": ("time.sleep(60)", "gave no answer within 0.5 s"),
    "garbage": ("print('garbage', flush=True)", "sent b'garbage"),
    "no end": ("print('[' * 3_000_000, flush=True)", "sent b'[[["),
    "number": (GOOD.replace("good", "good | {'n': n + 1}"), "which is no answer"),
    "NaN": (GOOD.replace("good", "good | {'p': float('nan')}"), "which is no answer"),
    "type": (GOOD.replace("good", "good | {'p': '0.5'}"), "expected"),
    "missing": ("del good['logit']; " + GOOD, "expected"),
    "kind": ("print(json.dumps({'n': n, 'error': {'kind': 'x', 'message': 'y'}}), flush=True)",
             "x: y"),
}  # fmt: skip


@pytest.fixture
def fake(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(misbehave: str) -> OfficialSource:
        worker = tmp_path / "worker.py"
        worker.write_text(WORKER.format(misbehave=misbehave))
        monkeypatch.setattr(module, "WORKER", worker)
        return OfficialSource(folder, trust=True, row_timeout=0.5 if "sleep" in misbehave else 30)

    return start


def test_control_a_good_answer_is_taken(fake: Any) -> None:
    source = fake(GOOD)
    side = source.score(ROWS[0])
    assert (side.tokens, side.logit, side.p, side.score) == (2, 0.0, 0.5, 3.0)
    assert side.hidden == hashlib.sha256(b"\0").hexdigest()
    source.close()
    source.close()


@pytest.mark.parametrize("what", MISBEHAVIOUR)
def test_a_broken_worker_ends_the_run(fake: Any, what: str) -> None:
    misbehave, expected = MISBEHAVIOUR[what]
    source = fake(misbehave)
    with pytest.raises(CharrmError) as error:
        source.score(ROWS[0])
    assert not isinstance(error.value, RowError)
    assert expected in str(error.value)
    if what != "kind":
        assert "what it said last" in str(error.value)
    assert source._worker._process.returncode is not None
    with pytest.raises(CharrmError, match="ended"):
        source.score(ROWS[0])
