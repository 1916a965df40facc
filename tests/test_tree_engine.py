"""The tree engine against the reference engine, bit for bit, on rows that share in every way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from charrm import Row, Scorer
from charrm.demo import demo_rows
from charrm.engines import Outcome, TreeSettings, tree
from charrm.engines.classes import NumericClasses, environment_facts, probe_classes
from charrm.engines.eager import EagerEngine
from charrm.engines.tree import TreeEngine
from charrm.errors import EngineFailed, InvalidSetting, NotCertified, OutOfMemory, RowError
from charrm.model import CharRM, DecoderLayer, ModelConfig

CPU = torch.device("cpu")
VOCAB = 300
Rows = list[list[int]]


def random_model(layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> CharRM:
    """Weights large enough that every part moves the bits of the result."""
    hidden = heads * head_dim
    config = ModelConfig(VOCAB, hidden, layers, heads, 2 * hidden, 1e-6, "silu", 4096)
    generator = torch.Generator().manual_seed(7)
    model = CharRM(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.14 * noise)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def model() -> CharRM:
    return random_model(2, 3, 16, torch.bfloat16)


@pytest.fixture(scope="module")
def one_layer() -> CharRM:
    return random_model(1, 2, 16, torch.bfloat16)


@pytest.fixture(scope="module")
def classes(model: CharRM) -> NumericClasses:
    return probe_classes(model, CPU)


def documented(classes: NumericClasses) -> NumericClasses:
    """The classes of the machine described in the documentation; stricter, so exact here too."""
    return replace(classes, softmax_tail=32, width_edges=(1024,), min_length=32, min_rows=16)


def ids(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def related_rows() -> Rows:
    """Identical rows, prefixes of others, one token apart, and lengths around every edge."""
    base = ids(0, 300)
    rows = [base[:n] for n in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 290)]
    rows += [base[:128], base[:128], base, base]
    rows += [[*base[:n], 2] for n in (0, 30, 95, 96, 128, 200, 255, 256, 257, 299)]
    rows += [[*base[:n], 5, *base[n + 1 : 200]] for n in (0, 60, 128, 198, 199)]
    rows += [base[:150] + ids(seed, 10 + 7 * seed) + [2] for seed in range(1, 9)]
    rows += [base[:150] + ids(1, 12) + ids(seed, 5) for seed in range(20, 25)]
    return rows


def compute(engine: EagerEngine | TreeEngine, rows: Sequence[Sequence[int]]) -> list[Outcome]:
    found = engine.score_tokens(rows, keep_hidden=True)
    assert all(isinstance(outcome, Outcome) for outcome in found), found
    return [outcome for outcome in found if isinstance(outcome, Outcome)]


def differing(found: list[Outcome], expected: list[Outcome]) -> list[int]:
    assert len(found) == len(expected)
    return [i for i, pair in enumerate(zip(found, expected, strict=True)) if not same_bits(*pair)]


def same_bits(found: Outcome, expected: Outcome) -> bool:
    assert found.hidden is not None
    assert expected.hidden is not None
    assert found.hidden.dtype == expected.hidden.dtype
    numbers = (found.logit, found.p) == (expected.logit, expected.p)
    return numbers and torch.equal(found.hidden, expected.hidden)


@pytest.fixture(scope="module")
def expected(model: CharRM) -> list[Outcome]:
    return compute(EagerEngine(model), related_rows())


@pytest.mark.parametrize("pack_tokens", [1, 200, 700, 16384])
@pytest.mark.parametrize("which", ["measured", "documented"])
def test_related_rows_keep_their_bits(
    model: CharRM, classes: NumericClasses, expected: list[Outcome], pack_tokens: int, which: str
) -> None:
    used = classes if which == "measured" else documented(classes)
    engine = TreeEngine(model, used, TreeSettings(pack_tokens=pack_tokens))
    assert differing(compute(engine, related_rows()), expected) == []
    assert len({outcome.p for outcome in expected}) > 10


@pytest.mark.parametrize("query_chunk", [1, 7, 100])
def test_chunks_and_a_small_attention_keep_the_bits(
    model: CharRM, classes: NumericClasses, expected: list[Outcome], query_chunk: int
) -> None:
    engine = TreeEngine(
        model, classes, TreeSettings(query_chunk=query_chunk, attention_bytes=3_000_000)
    )
    assert differing(compute(engine, related_rows()), expected) == []


def test_linears_and_mlps_see_blocks(
    model: CharRM,
    classes: NumericClasses,
    expected: list[Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each entry once per layer, in even blocks within the setting."""
    rows = [row for row in related_rows() if len(row) >= classes.min_length]
    want = [expected[related_rows().index(row)] for row in rows]
    engine = TreeEngine(model, classes, TreeSettings(block_tokens=100))
    layer = model.model.layers[0]
    assert isinstance(layer, DecoderLayer)
    for module in (layer.self_attn.W_pack, layer.self_attn.o_proj, layer.mlp):
        seen: list[int] = []

        def spy(x: Tensor, seen: list[int] = seen, run: Any = module.forward) -> Any:
            seen.append(x.shape[1])
            return run(x)

        monkeypatch.setattr(module, "forward", spy)
        assert differing(compute(engine, rows), want) == []
        assert 50 <= min(seen) <= max(seen) <= 100
        assert sum(seen) == engine.plan(rows).unique_tokens


def test_keys_reach_the_product_in_the_official_layout(
    model: CharRM, classes: NumericClasses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else matmul copies k^T and sums in another order: a few scores of 100,000 change."""
    matmul, seen = torch.matmul, []

    def spy(a: Tensor, b: Tensor) -> Tensor:
        if b.shape[-1] != model.config.head_dim:  # q k^T
            seen.append((len(b), b.transpose(2, 3).is_contiguous()))
        return matmul(a, b)

    monkeypatch.setattr(torch, "matmul", spy)
    compute(TreeEngine(model, classes), related_rows())
    several = [contiguous for items, contiguous in seen if items > 1]
    assert several
    assert all(several)


def test_order_and_company_change_nothing(
    model: CharRM, classes: NumericClasses, expected: list[Outcome]
) -> None:
    rows = related_rows()
    engine = TreeEngine(model, classes)
    order = random.Random(3).sample(range(len(rows)), len(rows))
    shuffled = compute(engine, [rows[i] for i in order])
    assert differing(shuffled, [expected[i] for i in order]) == []
    alone = [compute(engine, [row])[0] for row in rows[::4]]
    assert differing(alone, expected[::4]) == []


def test_long_rows_on_both_sides_of_the_edges(one_layer: CharRM) -> None:
    base = ids(1, 2100)
    rows = [base[:n] for n in (992, 1023, 1024, 1025, 1056, 2048, 2049)]
    rows += [base[:1000] + ids(seed, 40) for seed in range(2, 5)]
    want = compute(EagerEngine(one_layer), rows)
    measured = probe_classes(one_layer, CPU)
    for used in (measured, documented(measured)):
        assert differing(compute(TreeEngine(one_layer, used), rows), want) == []


def test_demo_rows(demo_checkpoint: Path) -> None:
    scorer = Scorer.open(demo_checkpoint, device="cpu")
    rows = [
        scorer.tokenize(
            Row(
                row["role"] and {"name": row["role"]},
                context=row["context"],
                model_output=row["model_output"],
                metric=row["metric_en"],
            )
        ).ids
        for row in demo_rows()
        if len(row["context"]) < 2000
    ]
    assert len(rows) > 20
    loaded = scorer.engine.model  # type: ignore[attr-defined]
    engine = TreeEngine(loaded, probe_classes(loaded, CPU))
    assert engine.plan(rows).token_ratio > 1
    assert differing(compute(engine, rows), compute(scorer.engine, rows)) == []  # type: ignore[arg-type]


def test_float32_rows_agree_closely(classes: NumericClasses) -> None:
    """In float32 only the order of sums may differ; a wrong key or position would show at once."""
    wide = random_model(2, 3, 16, torch.float32)
    rows = related_rows()
    found, want = compute(TreeEngine(wide, classes), rows), compute(EagerEngine(wide), rows)
    assert max(abs(a.logit - b.logit) for a, b in zip(found, want, strict=True)) < 1e-4


def relative_bias(heads: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    from charrm.model import alibi_slopes

    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float32, device=device)
    positions = torch.arange(length, dtype=torch.float32, device=device)
    return (slopes[:, None] * (positions - 300)).to(dtype)


def test_control_another_bias_is_noticed(
    model: CharRM,
    classes: NumericClasses,
    expected: list[Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same function in exact arithmetic, rounded elsewhere."""
    monkeypatch.setattr(tree, "alibi_bias", relative_bias)
    found = compute(TreeEngine(model, classes), related_rows())
    assert len(differing(found, expected)) > len(expected) / 2
    assert max(abs(a.p - b.p) for a, b in zip(found, expected, strict=True)) < 0.5


def test_control_a_missing_mask_is_noticed(
    model: CharRM,
    classes: NumericClasses,
    expected: list[Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One key too many, for the queries of runs longer than one token."""
    indices = tree._Batch.indices

    def leaky(batch: tree._Batch) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, hidden = indices(batch)
        return queries, keys, hidden.roll(1, -1)

    monkeypatch.setattr(tree._Batch, "indices", leaky)
    found = compute(TreeEngine(model, classes), related_rows())
    assert len(differing(found, expected)) > len(expected) / 2


def test_a_failing_row_costs_no_other(
    model: CharRM,
    classes: NumericClasses,
    expected: list[Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = related_rows()
    poison = 40
    engine = TreeEngine(model, classes)
    run = engine._run
    for raised, kind in (
        (RuntimeError("shapes"), EngineFailed),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (MemoryError(), OutOfMemory),
    ):

        def failing(pack: tree.Pack, keep: bool, error: Exception = raised) -> list[Outcome]:
            if any(row.length == len(rows[poison]) for row in pack.rows):
                raise error
            return run(pack, keep)

        monkeypatch.setattr(engine, "_run", failing)
        found = engine.score_tokens(rows, keep_hidden=True)
        failed = {i for i, row in enumerate(rows) if len(row) == len(rows[poison])}
        assert 0 < len(failed) < 5
        assert {i for i, outcome in enumerate(found) if type(outcome) is kind} == failed
        kept = [i for i in range(len(rows)) if i not in failed]
        good = [outcome for outcome in found if isinstance(outcome, Outcome)]
        assert differing(good, [expected[i] for i in kept]) == []


def test_bad_ids_are_errors_of_their_row(model: CharRM, classes: NumericClasses) -> None:
    rows: Rows = [ids(0, 40), [], [VOCAB], [-1, 5], [5] * 4097, ids(0, 41)]
    found = TreeEngine(model, classes).score_tokens(rows, keep_hidden=True)
    assert [isinstance(outcome, RowError) for outcome in found] == [False, *[True] * 4, False]
    good = [outcome for outcome in found if isinstance(outcome, Outcome)]
    assert differing(good, compute(EagerEngine(model), [rows[0], rows[-1]])) == []
    assert TreeEngine(model, classes).score_tokens([]) == []


def test_settings_that_cannot_work_are_refused(model: CharRM, classes: NumericClasses) -> None:
    for settings in ({"attention_bytes": 1000}, {"query_chunk": 0}, {"pack_tokens": 0},
                     {"block_tokens": 31}):  # fmt: skip
        with pytest.raises(InvalidSetting):
            TreeEngine(model, classes, TreeSettings(**settings))
    with pytest.raises(NotCertified):
        TreeEngine(model, replace(classes, linear_rows_invariant=False))


def test_the_model_stays_as_it_is(model: CharRM, classes: NumericClasses) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.float16):
        [outcome] = compute(TreeEngine(model, classes), [ids(0, 64)])
    assert outcome.hidden is not None
    assert outcome.hidden.dtype == torch.bfloat16
    assert outcome.hidden.is_inference()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_attention_stays_within_its_bound(model: CharRM, classes: NumericClasses) -> None:
    """The sizes of what `_attend` builds, group by group, against the setting."""
    heads, hidden = model.config.num_attention_heads, model.config.hidden_size
    for limit in (3_000_000, 1 << 30):
        engine = TreeEngine(model, classes, TreeSettings(attention_bytes=limit))
        [pack] = engine.plan([row for row in related_rows() if len(row) > 60]).packs
        largest = 0
        for group in pack.groups:
            items, queries, width = len(group.items), group.queries, group.width
            scores = 2 * items * heads * queries * width
            gathered = 2 * items * hidden * (2 * width + queries)
            largest = max(largest, 2 * scores + items * queries * width + 2 * gathered)
            assert largest <= limit
        assert largest > 1_000_000
    assert engine.workspace_bytes() > engine.settings.attention_bytes


def test_the_environment_is_this_one(model: CharRM, classes: NumericClasses) -> None:
    facts = environment_facts(model, CPU)
    assert {name: getattr(classes, name) for name in facts} == facts
