"""Certificates: issued only for equal bits, and refused for anything that could change one."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import load_json, read_tensors, write_weights
from torch import Tensor
from typer.testing import CliRunner

from charrm import METRICS, Row, Scorer
from charrm import certify as certifying
from charrm.certificate import Certificate, bound_to, find_certificate, read_certificate
from charrm.certify import adversarial_rows, certify, choose_sample, demo_sample, sample_of
from charrm.cli import app
from charrm.engines import TreeSettings, classes, tree
from charrm.errors import BadFile, InvalidSetting, NotCertified, NotEnoughMemory
from charrm.files import write_atomically
from charrm.results import ScoredRow
from server.opening import open_scorer
from server.settings import Settings

SETTINGS = TreeSettings(pack_tokens=2000, attention_bytes=1 << 26)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """The same procedure over shorter rows and fewer cases of the probe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifying, "MAX_TOKENS", 400)
        patch.setattr(classes, "LENGTHS", (17, 33, 63, 257, 1023, 1025, 2049))
        patch.setattr(classes, "ROW_COUNTS", (1, 4, 16, 33, 257, 1025))
        patch.setattr(classes, "SOFTMAX_ELEMENTS", 1 << 18)
        yield


@pytest.fixture(scope="module")
def eager(demo_checkpoint: Path) -> Scorer:
    return Scorer.open(demo_checkpoint, device="cpu")


@pytest.fixture(scope="module")
def short_sample(eager: Scorer) -> list[list[int]]:
    return [ids for ids in demo_sample(eager, 400) if len(ids) < 500][:66]


@pytest.fixture(scope="module")
def certificate(eager: Scorer, short_sample: list[list[int]]) -> Certificate:
    seen: list[certifying.Progress] = []
    issued = certify(eager, short_sample, SETTINGS, report=seen.append)
    assert (seen[-1].part, seen[-1].done, seen[-1].total) == ("sample, official order", 66, 66)
    return issued


@pytest.fixture
def kept(certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The certificate where it is looked for."""
    monkeypatch.setenv("CHARRM_CACHE", str(tmp_path / "cache"))
    return certificate.write()


def test_what_was_compared(certificate: Certificate, short_sample: list[list[int]]) -> None:
    rows = certificate.measured["rows"]
    assert rows["sample"] == len(short_sample) == 66
    assert {"around an edge", "identical", "one token apart", "full length"} < rows.keys()
    found = certificate.measured["sample"]
    assert (found["shortest"], found["longest"]) == (
        min(map(len, short_sample)),
        max(map(len, short_sample)),
    )
    assert found["token_ratio"] > 2
    seconds = certificate.measured["seconds"]
    assert seconds["all"] > seconds["eager"] + seconds["tree"] + seconds["probe"]


def test_break_even(certificate: Certificate) -> None:
    measured = certificate.measured
    rows, saved = measured["break_even_rows"], measured["saved_seconds_per_row"]
    assert rows is None or (rows - 1) * saved < measured["seconds"]["all"] <= rows * saved
    slow = replace(certificate, measured={**measured, "break_even_rows": None})
    assert "never" in slow.summary()[1]
    assert (
        "paid back after 7 rows"
        in replace(certificate, measured={**measured, "break_even_rows": 7}).summary()[1]
    )


def test_a_certified_tree_serves_the_official_numbers(
    demo_checkpoint: Path, eager: Scorer, kept: Path, certificate: Certificate
) -> None:
    scorer = Scorer.open(demo_checkpoint, device="cpu", engine="tree", settings=SETTINGS)
    assert scorer.identity.engine == "tree"
    assert scorer.identity.certificate == certificate.digest
    assert scorer.identity.engine_settings["pack_tokens"] == 2000
    assert scorer.identity.digest != eager.identity.digest
    assert scorer.identity.content == eager.identity.content
    rows = [Row({"a": 1}, context="雾。" * n, model_output="好", metric="Empathy") for n in (3, 30)]
    for found, expected in zip(scorer.score(rows), eager.score(rows), strict=True):
        assert isinstance(found, ScoredRow)
        assert isinstance(expected, ScoredRow)
        assert (found.score, found.p, found.logit) == (expected.score, expected.p, expected.logit)
        assert (found.engine, found.identity) == ("tree", scorer.identity.digest)


def test_no_certificate_no_tree(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARRM_CACHE", str(tmp_path))
    with pytest.raises(NotCertified, match=r"no certificate here .*charrm certify") as caught:
        Scorer.open(demo_checkpoint, device="cpu", engine="tree")
    assert caught.value.kind == "not_certified"


def other_weights(folder: Path, _: pytest.MonkeyPatch) -> None:
    tensors = read_tensors(folder)
    tensors["score.bias"] = tensors["score.bias"] + 0.5
    for path in folder.glob("model*"):
        path.unlink()
    write_weights(folder, tensors, "single safetensors")


def other_torch(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "2.99.0")


def other_threads(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "get_num_threads", lambda: 77)


def edited_code(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("charrm.scorer.code_digest", lambda: "0" * 64)


def other_kernels(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("charrm.runtime.numeric_fingerprint", lambda _: "0" * 16)


def other_tokenizer_settings(folder: Path, _: pytest.MonkeyPatch) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "settings", "reason"),
    [
        (other_weights, SETTINGS, "weights_sha256 was"),
        (other_torch, SETTINGS, r"versions.torch was .*, is 2.99.0"),
        (other_threads, SETTINGS, r"environment.threads was \d+, is 77"),
        (edited_code, SETTINGS, "code_sha256 was"),
        (other_kernels, SETTINGS, "numeric_fingerprint was"),
        (other_tokenizer_settings, SETTINGS, "content was"),
        (lambda *_: None, replace(SETTINGS, pack_tokens=2001), "pack_tokens was 2000, is 2001"),
        (lambda *_: None, replace(SETTINGS, query_chunk=255), "query_chunk was 128, is 255"),
    ],
    ids=["weights", "torch", "threads", "code", "kernels", "tokenizer", "pack", "chunk"],
)
@pytest.mark.parametrize("named", [False, True], ids=["looked for", "named"])
def test_anything_else_is_refused(
    demo_checkpoint: Path,
    kept: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], None],
    settings: TreeSettings,
    reason: str,
    named: bool,
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(demo_checkpoint, folder)
    with monkeypatch.context() as patch:
        change(folder, patch)
        with pytest.raises(NotCertified, match=reason):
            Scorer.open(
                folder, device="cpu", engine="tree", settings=settings,
                certificate=kept if named else None,
            )  # fmt: skip


def test_another_layout_of_the_same_model_is_accepted(
    demo_checkpoint: Path, kept: Path, tmp_path: Path
) -> None:
    """The control of the refusals: nothing that decides a bit has changed."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(demo_checkpoint, folder)
    tensors = read_tensors(folder)
    for path in folder.glob("model*"):
        path.unlink()
    write_weights(folder, tensors, "single pickle")
    scorer = Scorer.open(folder, device="cpu", engine="tree", settings=SETTINGS)
    assert scorer.engine.name == "tree"


def test_a_thread_count_changed_later_costs_no_wrong_number(
    eager: Scorer, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row({"a": 1}, context="雾。", model_output="好", metric="Empathy")
    for scorer in (eager, eager.with_tree(SETTINGS)):
        with monkeypatch.context() as patch:
            other_threads(kept, patch)
            [result] = scorer.score([row])
            assert not result.ok
            assert "77 threads" in result.error.message
        [result] = scorer.score([row])
        assert result.ok


def shifted_bias(*args: Any) -> Tensor:
    bias: Tensor = ORIGINAL_BIAS(*args)
    return bias + 0.25


ORIGINAL_BIAS = tree.alibi_bias


def test_a_tree_with_other_bits_gets_none(
    eager: Scorer, short_sample: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "alibi_bias", shifted_bias)
    with pytest.raises(NotCertified, match="differ in hidden state, logit or p"):
        certify(eager, short_sample, SETTINGS)


def test_a_single_wrong_bit_in_one_order_is_enough(
    eager: Scorer, short_sample: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, one order, only the hidden state: logit and p stay as they are."""
    run = tree.TreeEngine.score_tokens
    calls = 0

    def once(self: tree.TreeEngine, rows: Any, *, keep_hidden: bool = False) -> Any:
        nonlocal calls
        calls += 1
        found = run(self, rows, keep_hidden=keep_hidden)
        if calls == 3:
            hidden = found[0].hidden.clone()
            hidden[0] = torch.nextafter(hidden[0], torch.tensor(9.0, dtype=hidden.dtype))
            found[0] = replace(found[0], hidden=hidden)
        return found

    monkeypatch.setattr(tree.TreeEngine, "score_tokens", once)
    with pytest.raises(NotCertified, match="in another order and company, 1 differ"):
        certify(eager, short_sample, SETTINGS)


def test_too_little_time_is_no_certificate(eager: Scorer, short_sample: list[list[int]]) -> None:
    with pytest.raises(NotCertified, match=r"0 minutes were enough for 0 .* needs 64"):
        certify(eager, short_sample, SETTINGS, minutes=0)
    with pytest.raises(NotCertified, match="63 of the sample's 63 rows; a certificate needs 64"):
        certify(eager, short_sample[:63], SETTINGS)


def test_adversarial_rows_meet_every_edge() -> None:
    found = classes.NumericClasses(
        32, (1000,), 1, 32, 2048, True, True, True, "0", "d", "c", 1, "bfloat16"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifying, "MAX_TOKENS", 4096)
        cases = list(adversarial_rows(2000, found))
    assert all(0 <= i < 2000 for case in cases for i in case.ids)
    lengths = {len(case.ids) for case in cases}
    assert {999, 1000, 1001, 1023, 1024, 1025, 2047, 2048, 2049, 31, 32, 33, 4096} <= lengths
    by_family: dict[str, list[list[int]]] = {}
    for case in cases:
        by_family.setdefault(case.family, []).append(case.ids)
    one, two = by_family["identical"]
    assert one == two
    assert all(one[: len(ids)] == ids for ids in by_family["prefix of others"])
    for ids in by_family["one token apart"]:
        assert sum(a != b for a, b in zip(ids, one, strict=True)) == 1


def test_demo_sample(eager: Scorer) -> None:
    rows = demo_sample(eager, 100)
    assert len(rows) == 100
    assert rows == demo_sample(eager, 100)
    assert max(map(len, rows)) > 2 * min(map(len, rows))


def test_sample_of_files() -> None:
    rows = [[i] * (1 + i % 50) for i in range(500)]
    found = sample_of(rows, 60)
    assert len(found) == 60
    assert len({tuple(row) for row in found}) == 60
    lengths = {len(row) for row in found}
    assert min(lengths) <= 2
    assert max(lengths) >= 49
    assert len(lengths) > 20
    assert sample_of(rows, 1000) == rows
    assert sample_of(rows[:1], 1) == rows[:1]


def test_rows_of_files_need_profiles(eager: Scorer, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="--profiles"):
        choose_sample(eager, [tmp_path / "rows.jsonl"], None, 10)
    profiles = tmp_path / "profiles.json"
    profiles.write_text(json.dumps({"阿岚": {"性格": "话少"}}), encoding="utf-8")
    row = {"id": 1, "role": "阿岚", "novel_name": "x", "context": "阿岚：雾。",
           "model_output": "好", "metric_en": "Empathy",
           "metric_zh": METRICS["Empathy"]}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(
        json.dumps([row | {"id": i} for i in range(3)]), encoding="utf-8"
    )
    found = choose_sample(eager, [tmp_path / "rows.jsonl"], profiles, 2)
    expected = Row({"性格": "话少"}, context="阿岚：雾。", model_output="好", metric="Empathy")
    assert found == [eager.tokenize(expected).ids] * 2


@pytest.mark.parametrize(
    "damage",
    [
        {"digest": "0" * 64},
        {"kind": "charrm certificate 0"},
        {"issued": "1999"},
        {"bound": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_changed_certificate_is_refused(kept: Path, damage: dict[str, Any]) -> None:
    bound = read_certificate(kept).bound
    write_atomically(kept, json.dumps(load_json(kept) | damage))
    for path in (None, kept):
        with pytest.raises(BadFile, match="certify again"):
            find_certificate(bound, path)


def test_a_cut_off_certificate_is_refused(kept: Path, certificate: Certificate) -> None:
    kept.write_bytes(kept.read_bytes()[:-100])
    with pytest.raises(BadFile):
        find_certificate(certificate.bound)


def test_the_bound_leaves_out_only_what_cannot_matter(eager: Scorer) -> None:
    bound = bound_to(eager.identity, SETTINGS)
    left_out = {"source", "files", "stored_dtype", "audit", "is_protocol", "digest",
                "engine_settings", "certificate"}  # fmt: skip
    assert eager.identity.to_json().keys() - bound.keys() == left_out


def test_a_tree_that_does_not_fit_is_refused_beforehand(
    eager: Scorer, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charrm.placement.free_bytes", lambda _: 1000)
    with pytest.raises(NotEnoughMemory, match="--pack-tokens"):
        eager.with_tree(SETTINGS)


def test_only_known_engines(demo_checkpoint: Path, eager: Scorer, kept: Path) -> None:
    with pytest.raises(InvalidSetting, match="found 'fast', expected eager or tree"):
        Scorer.open(demo_checkpoint, device="cpu", engine="fast")
    served = eager.with_tree(SETTINGS)
    for call in (served.with_tree, lambda: certify(served, [[1]], SETTINGS)):
        with pytest.raises(InvalidSetting, match="tree"):
            call()


def test_the_command(
    demo_checkpoint: Path,
    certificate: Certificate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Options reach `certify`, and what it returns is written and shown."""
    given: dict[str, Any] = {}

    def issue(scorer: Scorer, sample: list[list[int]], settings: TreeSettings, **more: Any) -> Any:
        given.update(more, rows=len(sample), settings=settings)
        return certificate

    monkeypatch.setattr(certifying, "certify", issue)
    arguments = ["certify", "--model", str(demo_checkpoint), "--device", "cpu", "--sample", "65",
                 "--minutes", "0.5", "--pack-tokens", "77", "--attention-mib", "9",
                 "--output", str(tmp_path / "c.json")]  # fmt: skip
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert (given["rows"], given["minutes"]) == (65, 0.5)
    assert given["settings"] == TreeSettings(77, 9 << 20)
    assert read_certificate(tmp_path / "c.json") == certificate
    assert certificate.digest in done.output
    assert "token ratio" in done.output


def test_the_server_certifies_before_it_is_ready(
    demo_checkpoint: Path,
    eager: Scorer,
    short_sample: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CHARRM_CACHE", str(tmp_path))
    monkeypatch.setattr("server.opening.choose_sample", lambda *_: short_sample)
    settings = Settings(str(demo_checkpoint), device="cpu", engine="tree", tree=SETTINGS)
    with pytest.raises(NotCertified, match="--certify"):
        open_scorer(settings)
    caplog.set_level(logging.INFO, "uvicorn.error")
    first = open_scorer(replace(settings, certify=True))
    assert "certified: " in caplog.text
    second = open_scorer(settings)  # what the first start left is enough for the next
    assert first.identity.digest == second.identity.digest
    assert first.identity.certificate
