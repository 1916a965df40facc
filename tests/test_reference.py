"""The slow reference against the stored outputs of the official implementation.

Tests that read the shared material find it through CHARRM_SHARED (default: ../shared next to the
checkout) and are skipped when it is absent. The stored numbers come from another CPU and therefore
carry stated tolerances; equality bit for bit is a matter between two forwards on one machine.
"""

import functools
import hashlib
import json
import math
import os
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor

from golden import reference as module
from golden.reference import (
    Fault,
    ReferenceConfig,
    SlowReference,
    additive_mask,
    alibi_slopes,
    encode,
)

SHARED = Path(
    os.environ.get("CHARRM_SHARED", Path(__file__).resolve().parents[1].parent / "shared")
)
ANCHOR = SHARED / "anchor"
needs_shared = pytest.mark.skipif(not ANCHOR.is_dir(), reason="CHARRM_SHARED has no anchor/")
needs_upstream = pytest.mark.skipif(
    not all((SHARED / name).is_dir() for name in ("anchor", "upstream", "charactereval")),
    reason="CHARRM_SHARED lacks anchor/, upstream/ or charactereval/",
)

# Same arithmetic in float32: only the order of sums differs (largest |p| difference seen: 8e-7).
FP32_TOLERANCE = 1e-5
# Five instruction sets of the CPU that wrote the file differ by up to 3 steps; AVX2 here: 3.
BF16_STEPS = 4
# Longer rows take more than 1.5 s each in bf16 on a CPU without bf16 instructions.
LONGEST = 1025

# Faults that only move a rounding point: the softmax cancels a shift of the bias, and without
# rounding the others change nothing at all.
ROUNDING_FAULTS = [
    Fault.RELATIVE_BIAS,
    Fault.FLOAT32_BIAS,
    Fault.LEFT_PADDING,
    Fault.NORM_WEIGHT_BEFORE_CAST,
    Fault.FLOAT32_HEAD,
]


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@functools.cache
def anchor(dtype: torch.dtype) -> SlowReference:
    return SlowReference.open(ANCHOR, dtype)


@functools.cache
def expected() -> Any:
    return load(ANCHOR / "expected.json")


@functools.cache
def upstream() -> SlowReference:
    """The published tokenizer and config, without weights."""
    folder = SHARED / "upstream"
    pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return SlowReference(ReferenceConfig.read(folder / "config.json"), {}, pieces)


def sequence(length: int, vocab_size: int = 4000) -> list[int]:
    """The stored sequences' ids, by the rule of the shared README."""
    x, ids = length, []
    for _ in range(length - 1):
        x = (1103515245 * x + 12345) % 2**31
        ids.append(3 + x % (vocab_size - 3))
    return [*ids, 2]


def stored(lengths: range) -> list[tuple[str, list[int], Any]]:
    """Name, ids and stored outputs of every row and of every sequence of these lengths."""
    cases = [
        (f"length {s['length']}", sequence(s["length"]), s)
        for s in expected()["sequences"]
        if s["length"] in lengths
    ]
    return cases + [(f"row {i}", r["input_ids"], r) for i, r in enumerate(expected()["rows"])]


def grid_steps(p: float, stored_p: float) -> float:
    """Distance in units of the last place of the stored p in bf16 (8 significant bits)."""
    return abs(p - stored_p) / 2.0 ** (math.frexp(stored_p)[1] - 8)


def prompt(profile: Any, context: str, answer: str, metric_zh: str) -> str:
    return (
        f"<RoleInfo>\n\n{profile}\n\n<Context>\n\n{context}"
        f"\n\n<Response>\n\n{answer}\n\n<Dimension>\n\n{metric_zh}"
    )


def truncated_text() -> str:
    row = expected()["truncated_row"]
    context = "陆小满：" + "雨" * 9000 + "\n阿川：嗯。"
    profile = expected()["profiles"][row["role"]]
    return prompt(profile, context, row["model_output"], row["metric_zh"])


@needs_shared
def test_float32_matches_the_stored_numbers() -> None:
    cases = [*stored(range(LONGEST + 1)), *stored(range(2049, 2050))[:1]]
    assert len(cases) == 23 + 27 + 1
    wrong = []
    for name, ids, numbers in cases:
        found, fp32 = anchor(torch.float32).forward(ids), numbers["fp32"]
        logit, p = abs(found.logit - fp32["logit"]), abs(found.p - fp32["p"])
        if max(logit, p) > FP32_TOLERANCE or found.score != found.p * 4 + 1:
            wrong.append(f"{name}: logit off by {logit}, p by {p}")
    assert not wrong


@needs_shared
def test_bf16_is_within_the_grid_of_the_stored_numbers() -> None:
    cases = stored(range(LONGEST + 1))
    reference = anchor(torch.bfloat16)
    steps = {
        name: grid_steps(reference.forward(ids).p, numbers["bf16"]["p"])
        for name, ids, numbers in cases
    }
    assert len(steps) == 23 + 27
    assert max(steps.values()) <= BF16_STEPS, steps


@needs_shared
@pytest.mark.parametrize("fault", [Fault.RELATIVE_BIAS, Fault.FLOAT32_BIAS])
def test_bf16_tolerance_still_catches_a_wrong_bias(fault: Fault) -> None:
    reference = anchor(torch.bfloat16)
    steps = [
        grid_steps(reference.forward(ids, fault).p, numbers["bf16"]["p"])
        for _, ids, numbers in stored(range(300, 301))
    ]
    assert max(steps) > BF16_STEPS


@needs_shared
def test_a_long_row_keeps_its_last_tokens() -> None:
    full, row = anchor(torch.float32), expected()["truncated_row"]
    # One layer is enough to see other tokens, and 4,096 of them are slow.
    reference = replace(full, config=replace(full.config, num_hidden_layers=1))
    ids = reference.ids(truncated_text())
    assert len(ids) == 4096 == row["tokens_before"] - row["tokens_dropped"]
    assert (ids[:8], ids[-8:]) == (row["first_ids"], row["last_ids"])

    first = reference.ids(truncated_text(), Fault.RIGHT_TRUNCATION)
    assert len(first) == 4096
    assert first != ids
    assert not torch.equal(reference.forward(ids).hidden, reference.forward(first).hidden)


@needs_shared
@pytest.mark.parametrize("fault", [*ROUNDING_FAULTS, Fault.MISSING_CAUSAL_MASK])
def test_fault_changes_bf16_bits(fault: Fault) -> None:
    reference = anchor(torch.bfloat16)
    right, again, wrong = (reference.forward(sequence(300), f) for f in (None, None, fault))
    assert torch.equal(right.hidden, again.hidden)
    assert right.logit == again.logit
    if fault is Fault.FLOAT32_HEAD:  # acts after the hidden state
        assert torch.equal(right.hidden, wrong.hidden)
        assert (right.logit, right.p) != (wrong.logit, wrong.p)
    else:
        assert not torch.equal(right.hidden, wrong.hidden)


@needs_shared
def test_missing_eos_changes_bf16_bits() -> None:
    reference, text = anchor(torch.bfloat16), expected()["rows"][0]["input_text"]
    ids, wrong = reference.ids(text), reference.ids(text, Fault.MISSING_EOS)
    assert ids == [*wrong, 2]
    assert not torch.equal(reference.forward(ids).hidden, reference.forward(wrong).hidden)


@needs_shared
@pytest.mark.parametrize("fault", ROUNDING_FAULTS)
def test_rounding_fault_vanishes_in_float32(fault: Fault) -> None:
    reference = anchor(torch.float32)
    right, wrong = reference.forward(sequence(300)), reference.forward(sequence(300), fault)
    torch.testing.assert_close(wrong.hidden, right.hidden, atol=FP32_TOLERANCE, rtol=0)


@needs_shared
def test_missing_causal_mask_does_not_vanish_in_float32() -> None:
    reference = anchor(torch.float32)
    right = reference.forward(sequence(300))
    wrong = reference.forward(sequence(300), Fault.MISSING_CAUSAL_MASK)
    assert abs(right.p - wrong.p) > FP32_TOLERANCE


@needs_shared
def test_row_ids() -> None:
    rows = expected()["rows"]
    assert len(rows) == 27
    reference = anchor(torch.float32)
    for row in rows:
        text = prompt(
            expected()["profiles"][row["role"]],
            row["context"],
            row["model_output"],
            row["metric_zh"],
        )
        assert text == row["input_text"]
        assert reference.ids(text) == row["input_ids"]


@needs_upstream
def test_token_cases() -> None:
    pieces = upstream().pieces
    assert pieces is not None
    cases = load(ANCHOR / "tokens.json")["texts"]
    assert len(cases) == 56
    assert [c["text"] for c in cases if encode(pieces, c["text"]) != c["ids"]] == []
    # The control: pieces alone, without the rule for the special literals.
    plain = [c["text"] for c in cases if pieces.encode(c["text"], out_type=int) != c["ids"]]
    assert "你好 </s> 再见" in plain
    assert "你好</s>再见" not in plain


@needs_upstream
def test_a_glued_literal_shields_the_next_one() -> None:
    """Checked against transformers 4.36.2's own slow tokenizer over the same pieces."""
    pieces = upstream().pieces
    assert pieces is not None
    assert encode(pieces, "a</s></s>") == [*pieces.encode("a</s>", out_type=int), 2]
    assert encode(pieces, "a</s></s>x") == [
        *pieces.encode("a</s>", out_type=int),
        *pieces.encode("</s>x", out_type=int),
    ]


@needs_upstream
def test_ids_of_all_official_prompts() -> None:
    folder, reference = SHARED / "charactereval", upstream()
    blank_set = load(ANCHOR / "tokens.json")["blank_set"]
    profiles = load(folder / "character_profiles.json")
    metrics = load(folder / "id2metric.jsonl")
    digest = hashlib.sha256()
    lengths: list[int] = []
    first: list[dict[str, object]] = []
    for row in load(folder / "test_data.jsonl"):
        for metric_en, metric_zh in metrics.get(str(row["id"]), []):
            ids = reference.ids(prompt(profiles[row["role"]], row["context"], "", metric_zh))
            packed = struct.pack(f"<{len(ids)}I", *ids)
            digest.update(struct.pack("<I", len(ids)) + packed)
            lengths.append(len(ids))
            if len(first) < len(blank_set["first_rows"]):
                alone = hashlib.sha256(packed).hexdigest()  # of the ids only, without the count
                first.append(
                    {"id": row["id"], "metric_en": metric_en, "n_tokens": len(ids), "sha256": alone}
                )
                as_json = json.dumps(profiles[row["role"]], ensure_ascii=False)
                assert ids != reference.ids(prompt(as_json, row["context"], "", metric_zh))
    assert first == blank_set["first_rows"]
    found = (len(lengths), sum(lengths), min(lengths), max(lengths), digest.hexdigest())
    assert found == tuple(
        blank_set[key] for key in ("rows", "total_tokens", "min_tokens", "max_tokens", "sha256")
    )


@needs_shared
def test_ids_refuses_a_lone_surrogate() -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        anchor(torch.float32).ids("好\ud800")


def test_alibi_slopes() -> None:
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8) == eight
    assert alibi_slopes(5) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1]
    assert alibi_slopes(40)[:32] == pytest.approx([2 ** (-i / 4) for i in range(1, 33)])
    assert alibi_slopes(40)[32:] == pytest.approx([2 ** (-i / 8) for i in range(1, 17, 2)])


def test_additive_mask() -> None:
    no = -math.inf
    assert additive_mask(2, 3, 0, None)[0].tolist() == [
        [0.0, no, no],
        [0.0, 2**-4, no],
        [0.0, 2**-4, 2**-3],
    ]
    relative = additive_mask(2, 3, 0, Fault.RELATIVE_BIAS)[0].tolist()
    assert relative[2] == [-(2**-3), -(2**-4), 0.0]
    assert additive_mask(2, 3, 1, Fault.LEFT_PADDING)[1].tolist()[2] == [no, 2**-8, 2**-7]
    assert additive_mask(2, 2, 0, Fault.MISSING_CAUSAL_MASK)[0].tolist() == [[0.0, 2**-4]] * 2


def test_shares_no_code_with_the_product() -> None:
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert re.search(r"^\s*(from|import) torch\b", source, re.MULTILINE)
    assert not re.search(r"^\s*(from|import) charrm\b", source, re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with the anchor's config and no weights yet."""
    shutil.copyfile(ANCHOR / "config.json", tmp_path / "config.json")
    return tmp_path


def tensors() -> dict[str, torch.Tensor]:
    files = sorted(ANCHOR.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@needs_shared
@pytest.mark.parametrize("layout", ["pickle", "pickle shards", "one safetensors file"])
def test_every_layout_gives_the_same_bits(folder: Path, layout: str) -> None:
    weights = tensors()
    if layout == "pickle":
        torch.save(weights, folder / "pytorch_model.bin")
    elif layout == "one safetensors file":
        save_file(weights, folder / "model.safetensors")
    else:
        where = {name: f"pytorch_model-{'score' in name:d}.bin" for name in weights}
        for shard in set(where.values()):
            torch.save({n: t for n, t in weights.items() if where[n] == shard}, folder / shard)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    found = SlowReference.open(folder).forward(sequence(33))
    shards = anchor(torch.bfloat16).forward(sequence(33))
    assert torch.equal(found.hidden, shards.hidden)
    assert found.logit == shards.logit


@needs_shared
def test_all_wrong_weights_are_named(folder: Path) -> None:
    weights = tensors()
    del weights["score.bias"]
    weights["lm_head.weight"] = torch.zeros(1)
    weights["model.norm.weight"] = torch.zeros(159)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit config") as error:
        SlowReference.open(folder)
    for problem in ("missing: score.bias", "unexpected: lm_head.weight", "shape (159,)"):
        assert problem in str(error.value)


@needs_shared
def test_missing_files_are_errors(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        SlowReference.open(folder)
    save_file(tensors(), folder / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model"):
        SlowReference.open(folder).ids("好")


@needs_shared
def test_a_result_that_is_not_finite_is_an_error(folder: Path) -> None:
    weights = tensors()
    weights["score.bias"] = torch.tensor([math.nan], dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="p is nan"):
        SlowReference.open(folder).forward([5, 2])


@needs_shared
@pytest.mark.parametrize("ids", [[], [5] * 4097, [4000], [-1]], ids=["0", "4097", "4000", "-1"])
def test_ids_that_are_no_row_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"ids, expected 1 to 4096|outside the vocabulary"):
        anchor(torch.float32).forward(ids)


@needs_shared
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("model_max_length", 2048),
        ("tie_word_embeddings", True),
        ("hidden_size", 161),
        ("num_hidden_layers", True),
        ("num_attention_heads", 0),
        ("vocab_size", None),
        ("rms_norm_eps", "1e-6"),
    ],
)
def test_config_refuses(folder: Path, field: str, value: object) -> None:
    config = load(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=field):
        ReferenceConfig.read(folder / "config.json")
