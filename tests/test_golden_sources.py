"""The sides of a comparison: library, slow reference, server and the public row-level scores.

Tests that read the shared material find it through CHARRM_SHARED and are skipped without it.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openpyxl
import pytest
import torch
from fakes import FakeEngine, fake_scorer
from helpers import edit_json, load_json
from sentencepiece import SentencePieceProcessor
from starlette.testclient import TestClient

from charrm.engines import Outcome
from charrm.errors import (
    BadFile,
    CharrmError,
    CheckpointCorrupt,
    CheckpointIncomplete,
    EngineFailed,
    IdentityMismatch,
    InvalidRow,
    MissingDependency,
    NotFinite,
    OutOfMemory,
    Overloaded,
    RowError,
    ShuttingDown,
    Starting,
    TextNotEncodable,
    UnexpectedAnswer,
    UnknownMetric,
    Unreachable,
)
from charrm.scorer import Scorer
from golden.reference import encode
from golden.row_anchor import COLUMNS, RowAnchorSource, blank_set, exact_score
from golden.selftest import selftest_rows
from golden.sides import input_text
from golden.sources import CheckpointDigests, EngineSource, ServerSource, SlowSource
from golden.structure import ReplayRow
from golden.upstream import ROW_LEVEL_ANCHOR, Pin
from server.app import create_app
from server.dispatch import Dispatch
from server.settings import Settings

ROWS = selftest_rows()


def changed(row: ReplayRow, **fields: Any) -> ReplayRow:
    return replace(row, row=replace(row.row, **fields))


@pytest.fixture(scope="module")
def scorer(demo_checkpoint: Path) -> Scorer:
    return Scorer.open(demo_checkpoint, device="cpu")


@pytest.fixture(scope="module")
def engine(scorer: Scorer) -> EngineSource:
    return EngineSource(scorer)


@pytest.fixture(scope="module")
def slow(demo_checkpoint: Path) -> SlowSource:
    return SlowSource(demo_checkpoint)


def test_library_and_slow_reference_agree_to_the_bit(
    engine: EngineSource, slow: SlowSource
) -> None:
    assert (engine.name, slow.name) == ("eager", "slow")
    for row in ROWS:
        side = engine.score(row)
        assert side == slow.score(row)
        assert None not in vars(side).values()
        tokens = engine.tokenize(row)
        assert tokens == slow.tokenize(row)
        assert (tokens.ids, tokens.tokens, tokens.score) == (side.ids, side.tokens, None)


def test_control_the_rows_differ(engine: EngineSource) -> None:
    sides = [engine.score(row) for row in ROWS]
    assert len({side.hidden for side in sides}) == len({side.ids for side in sides}) == len(ROWS)
    assert len({side.p for side in sides}) > 1


def test_float32_is_near_and_has_other_bits(demo_checkpoint: Path, slow: SlowSource) -> None:
    fp32 = SlowSource(demo_checkpoint, torch.float32)
    assert fp32.name == "fp32"
    assert fp32.identity()["dtype"] == "float32"
    side, bf16 = fp32.score(ROWS[0]), slow.score(ROWS[0])
    assert (side.ids, side.tokens) == (bf16.ids, bf16.tokens)
    assert side.hidden != bf16.hidden
    assert side.p is not None
    assert 0 < abs(side.p - float(str(bf16.p))) < 0.5


def test_dropped_tokens_are_counted(engine: EngineSource, slow: SlowSource) -> None:
    for repeats in (3, 700, 3000):
        row = changed(ROWS[0], context="船几时开？\n" * repeats)
        side = engine.tokenize(row)
        assert side == slow.tokenize(row)
        assert (side.tokens == 4096) == bool(side.dropped) == (repeats > 3)


def test_a_lone_surrogate_is_the_rows_error(engine: EngineSource, slow: SlowSource) -> None:
    for source in (engine, slow):
        for method in (source.tokenize, source.score):
            with pytest.raises(TextNotEncodable, match="lone surrogate"):
                method(changed(ROWS[0], model_output="\udc80"))


def test_an_unknown_metric_is_the_rows_error(engine: EngineSource) -> None:
    with pytest.raises(UnknownMetric):
        engine.tokenize(changed(ROWS[0], metric="Charm"))


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome(float("nan"), 0.0), NotFinite),
        (Outcome(1.0, float("inf")), NotFinite),
        (Outcome(1.5, 0.0), NotFinite),
        (OutOfMemory("planted"), OutOfMemory),
        (ZeroDivisionError("planted"), EngineFailed),
        (Unreachable("planted"), Unreachable),
    ],
)
def test_what_the_engine_gives_is_a_score_or_an_error(
    demo_checkpoint: Path, outcome: Any, error: type[CharrmError]
) -> None:
    def script(ids: Sequence[int]) -> Any:
        if isinstance(outcome, Exception) and not isinstance(outcome, RowError):
            raise outcome
        return outcome

    source = EngineSource(fake_scorer(demo_checkpoint, FakeEngine(script)))
    with pytest.raises(error):
        source.score(ROWS[0])
    assert EngineSource(fake_scorer(demo_checkpoint)).score(ROWS[0]).score is not None


def test_identities_are_json_and_hold_no_place(
    engine: EngineSource, slow: SlowSource, scorer: Scorer, demo_checkpoint: Path
) -> None:
    for source in (engine, slow):
        identity = source.identity()
        assert identity == json.loads(json.dumps(identity))
        assert str(demo_checkpoint) not in json.dumps(identity)
    assert engine.identity()["digest"] == scorer.identity.digest
    shared = engine.identity()["files"]
    assert slow.identity()["files"] == shared
    assert slow.identity()["threads"] == torch.get_num_threads()


def test_the_slow_reference_refuses_what_it_cannot_read(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointIncomplete, match="no file of a checkpoint"):
        SlowSource(tmp_path)
    for name, error in (
        ("tokenizer.model", CheckpointIncomplete),
        ("config.json", CheckpointIncomplete),
        ("model-00001-of-00002.safetensors", CheckpointIncomplete),
    ):
        folder = Path(shutil.copytree(demo_checkpoint, tmp_path / name))
        (folder / name).unlink()
        with pytest.raises(error, match=name):
            SlowSource(folder)
        (folder / name).write_bytes(b"version https://git-lfs")
        with pytest.raises(CheckpointCorrupt):
            SlowSource(folder)


def test_a_vocabulary_too_small_fails_the_row(demo_checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(demo_checkpoint, tmp_path / "small"))
    shard = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:100].clone()
    save_file(tensors, shard)
    edit_json(folder / "config.json", vocab_size=100)
    with pytest.raises(EngineFailed, match="outside the vocabulary of 100"):
        SlowSource(folder).score(ROWS[0])


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.model", "notes.json"):
        (tmp_path / name).write_text("{}")
    digests = CheckpointDigests.of(tmp_path)
    assert digests.by_name.keys() == {"config.json", "tokenizer.model"}
    digests.check_unchanged()
    (tmp_path / "tokenizer.model").write_text("{} ")
    with pytest.raises(IdentityMismatch, match=r"tokenizer\.model"):
        digests.check_unchanged()
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(IdentityMismatch, match=r"tokenizer\.model"):
        digests.check_unchanged()


# The server: the real application around the same scorer, or planted answers.


@pytest.fixture(scope="module")
def transport(scorer: Scorer) -> Iterator[httpx.MockTransport]:
    dispatch = Dispatch(lambda: scorer, 100)
    with TestClient(create_app(Settings(model="demo"), dispatch)) as client:
        while client.get("/health/ready").status_code != 200:
            assert dispatch.failure is None

        def forward(request: httpx.Request) -> httpx.Response:
            answer = client.request(request.method, request.url.path, content=request.content)
            return httpx.Response(answer.status_code, content=answer.content)

        yield httpx.MockTransport(forward)


def planted(
    engine: EngineSource, answer: Callable[[int], httpx.Response], **options: Any
) -> ServerSource:
    """A server with the candidate's identity; `answer` gets the number of the score request."""
    count = iter(range(1000))

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/identity":
            return httpx.Response(200, json=engine.identity())
        return answer(next(count))

    options = {"transport": httpx.MockTransport(handler), "pauses": (0.0, 0.0), **options}
    return ServerSource("http://test", engine.identity(), **options)


def refusal(kind: str, status: int = 503) -> httpx.Response:
    return httpx.Response(status, json={"error": {"kind": kind, "message": "planted"}})


def scored(scorer: Scorer, **changes: Any) -> dict[str, Any]:
    (result,) = scorer.score([ROWS[0].row])
    content = result.to_json() | changes
    return {name: value for name, value in content.items() if name not in ("index", "ok")}


def test_the_server_answers_with_the_bits_of_the_library(
    engine: EngineSource, transport: httpx.MockTransport
) -> None:
    source = ServerSource("http://test", engine.identity(), transport=transport)
    assert source.identity() == engine.identity()
    for row in ROWS[:3]:
        assert source.score(row) == replace(engine.score(row), ids=None, hidden=None)
    assert set(vars(source.tokenize(ROWS[0])).values()) == {None}
    with pytest.raises(TextNotEncodable):
        source.score(changed(ROWS[0], context="\ud800"))
    source.close()


def test_a_server_with_another_model_is_refused(
    engine: EngineSource, transport: httpx.MockTransport
) -> None:
    own = engine.identity()
    others: list[tuple[str, dict[str, Any]]] = [
        ("weights_sha256", own | {"weights_sha256": "0" * 64}),
        ("tokenizer.model", own | {"files": own["files"] | {"tokenizer.model": "0" * 64}}),
        ("special_tokens_map.json", own | {"files": {}}),
    ]
    for name, candidate in others:
        found = own.get(name) or own["files"][name]
        with pytest.raises(IdentityMismatch, match=f"{name}: found {found}, expected (0+|None)$"):
            ServerSource("http://test", candidate, transport=transport)
        source = ServerSource("http://test", candidate, any_model=True, transport=transport)
        assert source.identity()["digest"] == own["digest"]
        source.close()


def test_a_server_without_an_identity_is_refused(engine: EngineSource) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={}))
    with pytest.raises(IdentityMismatch, match="weights_sha256: found None"):
        ServerSource("http://test", {}, transport=transport)


def test_an_overloaded_server_is_asked_again(engine: EngineSource, scorer: Scorer) -> None:
    asked: list[int] = []

    def answer(number: int) -> httpx.Response:
        asked.append(number)
        good = httpx.Response(200, json=scored(scorer))
        return refusal("overloaded", 429) if number < 2 else good

    assert planted(engine, answer).score(ROWS[0]).score == engine.score(ROWS[0]).score
    assert asked == [0, 1, 2]


def test_an_overloaded_server_is_not_asked_for_ever(engine: EngineSource) -> None:
    asked: list[int] = []

    def answer(number: int) -> httpx.Response:
        asked.append(number)
        return refusal("overloaded", 429)

    with pytest.raises(Overloaded):
        planted(engine, answer).score(ROWS[0])
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("error", [Starting, ShuttingDown])
def test_a_server_that_cannot_answer_ends_the_run(
    engine: EngineSource, error: type[CharrmError]
) -> None:
    source = planted(engine, lambda _: refusal(error.kind))
    with pytest.raises(error) as raised:
        source.score(ROWS[0])
    assert not isinstance(raised.value, RowError)


def test_an_unreachable_server_ends_the_run(engine: EngineSource) -> None:
    def fail(_: object) -> httpx.Response:
        raise httpx.ConnectError("planted")

    with pytest.raises(Unreachable):
        planted(engine, fail).score(ROWS[0])
    with pytest.raises(Unreachable):
        ServerSource("http://test", engine.identity(), transport=httpx.MockTransport(fail))


def test_a_server_that_was_replaced_ends_the_run(engine: EngineSource, scorer: Scorer) -> None:
    source = planted(engine, lambda _: httpx.Response(200, json=scored(scorer, identity="ab")))
    with pytest.raises(IdentityMismatch, match="scored by ab, expected"):
        source.score(ROWS[0])


@pytest.mark.parametrize(
    "changes",
    [{"p": "0.5"}, {"logit": 1}, {"score": None}, {"tokens": 1.0}, {"tokens_dropped": True},
     {"score": float("nan")}, {"metric_en": "Empathy"}],
    ids=str,
)  # fmt: skip
def test_an_answer_of_the_wrong_form_is_no_number(
    engine: EngineSource, scorer: Scorer, changes: dict[str, Any]
) -> None:
    content = json.dumps(scored(scorer, **changes))
    source = planted(engine, lambda _: httpx.Response(200, text=content))
    with pytest.raises(UnexpectedAnswer, match=ROWS[0].slot):
        source.score(ROWS[0])


# The public row-level scores.


GOOD = [
    [10, 0, 10, 5320, "甲", "Accuracy", 2.6015625],
    [10, 0, 10, 5320, "甲", "Empathy", 3],
    [10, 0, 10, 10042, "乙", "Humanlikeness", 1.5],
]


def workbook(path: Path, rows: Sequence[Sequence[Any]], header: Sequence[Any] = COLUMNS) -> Pin:
    """Write a spreadsheet with a sheet before the one that counts; return its pin."""
    book = openpyxl.Workbook()
    book.active.append(["notes"])
    sheet = book.create_sheet("scores")
    sheet.append(list(header))
    for row in rows:
        sheet.append(list(row))
    book.save(path)
    return replace(ROW_LEVEL_ANCHOR, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def anchor(tmp_path: Path, rows: Sequence[Sequence[Any]], **options: Any) -> RowAnchorSource:
    path = tmp_path / "blank.xlsx"
    pin = workbook(path, rows, **options)
    return RowAnchorSource(path, pin=pin, rows=len(rows))


def blank(id_: int, metric: str, answer: str = "") -> ReplayRow:
    row = changed(ROWS[0], model_output=answer, metric=metric)
    return replace(row, id=id_, metric_en=metric)


def test_row_anchor_tells_scores_by_id_and_metric(tmp_path: Path) -> None:
    source = anchor(tmp_path, GOOD)
    side = source.score(blank(5320, "Accuracy"))
    assert side.score == 2.6015625
    assert set(vars(replace(side, score=None)).values()) == {None}
    assert source.score(blank(5320, "Empathy")).score == 3.0
    assert source.tokenize(blank(5320, "Accuracy")).tokens is None
    pin = hashlib.sha256((tmp_path / "blank.xlsx").read_bytes()).hexdigest()
    expected = {"name": "row-anchor", "sha256": pin, "scores": 2, "restored": 0}
    assert source.identity() == expected


def test_row_anchor_has_no_score_for_other_rows(tmp_path: Path) -> None:
    source = anchor(tmp_path, GOOD)
    others = (
        blank(10042, "Humanlikeness"),  # the extra row is not official
        blank(5321, "Accuracy"),
        blank(5320, "Fluency"),
        blank(5320, "Accuracy", "你好"),
    )
    for row in others:
        with pytest.raises(InvalidRow, match=row.slot):
            source.score(row)


def test_row_anchor_is_read_only_when_its_digest_is_the_pinned_one(tmp_path: Path) -> None:
    path = tmp_path / "blank.xlsx"
    pin = workbook(path, GOOD)
    with pytest.raises(BadFile, match=f"found sha256 {pin.sha256}, expected 953449b48a0160d3"):
        RowAnchorSource(path)
    with pytest.raises(BadFile, match="cannot be read"):
        RowAnchorSource(tmp_path / "absent.xlsx")
    path.write_bytes(b"PK\x03\x04 no archive")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(BadFile, match="not an xlsx file"):
        RowAnchorSource(path, pin=replace(pin, sha256=digest))


@pytest.mark.parametrize(
    ("column", "value"),
    [("id", "5320"), ("id", 5320.5), ("id", True), ("id", None), ("metric_en", "Charm"),
     ("metric_en", None), ("score", "3.0"), ("score", 5.5), ("score", 0.99), ("score", None),
     ("score", True)],
)  # fmt: skip
def test_row_anchor_refuses_a_cell_of_the_wrong_type(
    tmp_path: Path, column: str, value: object
) -> None:
    rows = [list(row) for row in GOOD]
    rows[1][COLUMNS.index(column)] = value
    with pytest.raises(BadFile, match=f"sheet row 3, {column}: found {value!r}"):
        anchor(tmp_path, rows)


def test_row_anchor_refuses_other_shapes(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="found 5320 Accuracy again"):
        anchor(tmp_path, [GOOD[0], GOOD[0]])
    others = (COLUMNS[1:], ("index", *COLUMNS), (*COLUMNS, "more"), (*COLUMNS[:-1], "points"))
    for header in others:
        with pytest.raises(BadFile, match="expected one with the columns"):
            anchor(tmp_path, GOOD, header=header)
    path = tmp_path / "short.xlsx"
    pin = workbook(path, GOOD)
    with pytest.raises(BadFile, match="found 3 rows, expected 8033"):
        RowAnchorSource(path, pin=pin)


def test_row_anchor_without_openpyxl_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "blank.xlsx"
    pin = workbook(path, GOOD)
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "openpyxl":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"'\.\[golden\]'"):
        RowAnchorSource(path, pin=pin, rows=len(GOOD))


def test_scores_cut_to_the_digits_of_a_spreadsheet_are_restored(tmp_path: Path) -> None:
    """Every bf16 p from 2**-20 to 1, through 15 and 16 digits."""
    every = range(0x3580, 0x3F81)
    ps = [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in every]
    scores = [p * 4 + 1 for p in ps]
    cut = [float(f"{score:.15g}") for score in scores]
    assert cut != scores  # the control: without restoring they are unequal
    assert [exact_score(score) for score in cut] == scores
    assert [exact_score(float(f"{score:.16g}")) for score in scores] == scores
    assert [exact_score(score) for score in scores] == scores
    assert (exact_score(1), exact_score(5)) == (1.0, 5.0)
    assert exact_score(2.601) == 2.601  # of no bf16 p: left alone

    odd = next(i for i, score in enumerate(scores) if cut[i] != score)
    source = anchor(tmp_path, [[0, 0, 0, 7, "甲", "Fluency", cut[odd]]])
    assert source.score(blank(7, "Fluency")).score == scores[odd] != cut[odd]
    assert source.identity()["restored"] == 1


def data_folder(folder: Path) -> Path:
    def test_row(id_: int) -> dict[str, Any]:
        return {"id": id_, "role": "甲", "novel_name": "n", "context": f"c{id_}", "more": 1}

    def pairs(*names: str) -> list[list[str]]:
        known = {"Fluency": "对话流利度", "Empathy": "共情度"}
        return [[name, known[name]] for name in names]

    contents = {
        "test_data.jsonl": [test_row(id_) for id_ in (9, 3, 5)],
        "character_profiles.json": {"甲": {"姓名": "甲"}},
        "id2metric.jsonl": {"3": pairs("Empathy", "Fluency"), "9": pairs("Fluency")},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def test_blank_set_is_every_pair_in_the_order_of_the_test_data(tmp_path: Path) -> None:
    folder = data_folder(tmp_path)
    blank = blank_set(folder)
    assert [(row.slot, row.id, row.metric_en) for row in blank.rows] == [
        ("blank/00000", 9, "Fluency"),
        ("blank/00001", 3, "Empathy"),
        ("blank/00002", 3, "Fluency"),
    ]
    for row in blank.rows:
        assert (row.model, row.row.model_output) == ("blank", "")
        assert row.row.context == f"c{row.id}"
        assert row.row.profile == {"姓名": "甲"}
    assert list(blank.files) == sorted(
        ["data/character_profiles.json", "data/id2metric.jsonl", "data/test_data.jsonl"]
    )
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in blank.files.items())
    assert blank.digest == hashlib.sha256(lines.encode()).hexdigest()
    assert (blank.is_standin, blank.is_published) == (False, False)

    edit_json(folder / "character_profiles.json", 甲={"姓名": "乙"})
    assert blank_set(folder).digest != blank.digest
    (folder / "id2metric.jsonl").unlink()
    with pytest.raises(BadFile, match="id2metric"):
        blank_set(folder)


def test_blank_set_of_the_published_data(shared: Path) -> None:
    blank = blank_set(shared / "charactereval")
    assert len(blank.rows) == 8032
    assert blank.is_published
    stored = load_json(shared / "anchor" / "tokens.json")["blank_set"]["first_rows"]
    pieces = SentencePieceProcessor(model_file=str(shared / "upstream" / "tokenizer.model"))
    for row, expected in zip(blank.rows, stored, strict=False):
        ids = [*encode(pieces, input_text(row)), 2]
        digest = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
        assert (row.id, row.metric_en, len(ids)) == (
            expected["id"], expected["metric_en"], expected["n_tokens"],
        )  # fmt: skip
        assert digest == expected["sha256"]
