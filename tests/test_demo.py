"""The demo: the same bytes everywhere, rebuilt when touched, and no foreign file is ever lost."""

from __future__ import annotations

import hashlib
import json
import math
from importlib import resources
from pathlib import Path
from typing import get_args

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file

from charrm import demo

# SHA-256 over name, shape and bf16 bytes of every tensor in name order. It depends on the seed,
# the sizes and SHAKE-256 only, on no library version and no machine.
WEIGHTS_SHA256 = "b06aebf7d3c8c158cd898613df213d01ff7172ad8bb5e745452fcffdec789638"

METRICS = {
    "Fluency": "对话流利度",
    "Coherence": "对话连贯性",
    "Consistency": "对话一致性",
    "Exposure": "知识曝光度",
    "Accuracy": "知识准确率",
    "Hallucination": "知识幻觉性",
    "Behavior": "行为一致性",
    "Utterance": "言语一致性",
    "Humanlikeness": "类人程度",
    "Communication_skills": "交流技巧",
    "Diversity": "表现多样性",
    "Empathy": "共情度",
}


def weights_sha256(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        assert tensor.dtype == torch.bfloat16, name
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, through its index where it has one."""
    if not (index := list(folder.glob("*.index.json"))):
        return load_file(folder / "model.safetensors")
    weight_map: dict[str, str] = json.loads(index[0].read_text())["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        part = torch.load(path, weights_only=True) if path.suffix == ".bin" else load_file(path)
        assert set(part) == {name for name, where in weight_map.items() if where == shard}
        tensors |= part
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def processor() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=demo.demo_tokenizer())


def input_text(row: dict[str, object]) -> str:
    return (
        f"<RoleInfo>\n\n{demo.demo_profiles()[str(row['role'])]}\n\n<Context>\n\n{row['context']}"
        f"\n\n<Response>\n\n{row['model_output']}\n\n<Dimension>\n\n{row['metric_zh']}"
    )


@pytest.mark.parametrize("layout", get_args(demo.Layout))
def test_two_builds_give_the_same_bytes(tmp_path: Path, layout: demo.Layout) -> None:
    one = demo.build_demo_checkpoint(tmp_path / "one", layout=layout)
    two = demo.build_demo_checkpoint(tmp_path / "two", layout=layout)
    assert contents(one) == contents(two)
    assert len({path.stat().st_mode for path in one.iterdir()}) == 1, "some file is not shared"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_weights_equal_the_recorded_digest() -> None:
    assert weights_sha256(demo.demo_weights()) == WEIGHTS_SHA256
    # Control: the digest sees another seed, and one changed bit.
    assert weights_sha256(demo.demo_weights(demo.SEED + 1)) != WEIGHTS_SHA256
    changed = demo.demo_weights()
    changed["score.bias"].view(torch.int16)[0] ^= 1
    assert weights_sha256(changed) != WEIGHTS_SHA256


def test_weights_are_not_degenerate() -> None:
    weights = demo.demo_weights()
    for name, tensor in weights.items():
        values = tensor.flatten().tolist()
        assert all(math.isfinite(value) and value != 0 for value in values), name
        if "norm" in name:
            assert 0.875 <= min(values) < 1 < max(values) < 1.125, name


def test_three_layouts_hold_equal_tensors(tmp_path: Path) -> None:
    expected = demo.demo_weights()
    for layout in get_args(demo.Layout):
        found = load(demo.build_demo_checkpoint(tmp_path / layout, layout=layout))
        assert set(found) == set(expected)
        unequal = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not unequal, f"{layout}: {unequal}"
        assert weights_sha256(found) == WEIGHTS_SHA256


def test_config_and_index_describe_the_tensors(tmp_path: Path) -> None:
    folder = demo.build_demo_checkpoint(tmp_path / "demo")
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weights = load(folder)
    assert config["architectures"] == ["BaichuanCharRM"]
    assert config["torch_dtype"] == "bfloat16"
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    assert hidden % config["num_attention_heads"] == 0
    assert tuple(weights["model.embed_tokens.weight"].shape) == (config["vocab_size"], hidden)
    assert tuple(weights["score.weight"].shape) == (1, hidden)
    assert tuple(weights["score.bias"].shape) == (1,)
    for i in range(layers):
        layer = f"model.layers.{i}"
        assert tuple(weights[f"{layer}.self_attn.W_pack.weight"].shape) == (3 * hidden, hidden)
        down = weights[f"{layer}.mlp.down_proj.weight"]
        assert tuple(down.shape) == (hidden, config["intermediate_size"])
    assert len(weights) == 7 * layers + 4
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert processor().get_piece_size() == config["vocab_size"]


def test_a_finished_folder_is_reused_and_a_changed_byte_rebuilds_it(tmp_path: Path) -> None:
    folder = demo.build_demo_checkpoint(tmp_path / "demo")
    good = contents(folder)
    inode = folder.stat().st_ino
    demo.build_demo_checkpoint(folder)
    assert folder.stat().st_ino == inode, "an unchanged folder was built again"

    for name, data in good.items():
        # The last byte of each file, `demo.json` (whose last byte is a newline) included.
        (folder / name).write_bytes(
            data[:-1] + bytes([data[-1] ^ 1 if name != "demo.json" else 32])
        )
        assert contents(folder) != good
        demo.build_demo_checkpoint(folder)
        assert contents(folder) == good, name
    (folder / "tokenizer.model").unlink()
    demo.build_demo_checkpoint(folder)
    assert contents(folder) == good


def test_another_layout_replaces_the_folder(tmp_path: Path) -> None:
    folder = demo.build_demo_checkpoint(tmp_path / "demo")
    demo.build_demo_checkpoint(folder, layout="single")
    assert not list(folder.glob("*.index.json"))
    assert weights_sha256(load(folder)) == WEIGHTS_SHA256
    with pytest.raises(ValueError, match="expected one of safetensors, pickle, single"):
        demo.build_demo_checkpoint(folder, layout="gguf")  # type: ignore[arg-type]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    assert "config.json" in contents(demo.build_demo_checkpoint(tmp_path / "demo"))


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{}", "model.safetensors": "weights"},
        {"demo.json": "[]"},
        {"demo.json": '{"kind": "something else", "files": {}}'},
        {"demo.json": '{"kind": "charrm-demo-checkpoint"}'},
        {"demo.json": '{"kind": "charrm-demo-checkpoint", "files": {}}', "notes.txt": "mine"},
    ],
)
def test_a_foreign_folder_is_refused_untouched(tmp_path: Path, files: dict[str, str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    before = contents(folder)
    with pytest.raises(FileExistsError, match="did not write"):
        demo.build_demo_checkpoint(folder)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_or_an_added_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="did not write"):
        demo.build_demo_checkpoint(tmp_path / "file")
    folder = demo.build_demo_checkpoint(tmp_path / "demo")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        demo.build_demo_checkpoint(folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bytes:
        raise OSError(28, "No space left on device")

    folder = demo.build_demo_checkpoint(tmp_path / "demo", layout="single")
    before = contents(folder)
    monkeypatch.setattr(demo, "demo_tokenizer", fail)
    for name in ("demo", "new"):
        with pytest.raises(OSError, match="No space left"):
            demo.build_demo_checkpoint(tmp_path / name, layout="pickle")
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert contents(folder) == before


def test_tokenizer_round_trips_and_has_the_published_traits() -> None:
    tokenizer = processor()
    assert [tokenizer.id_to_piece(i) for i in range(3)] == ["<unk>", "<s>", "</s>"]
    assert tokenizer.pad_id() == -1
    corpus = (resources.files("charrm") / "demo_data/corpus.txt").read_text(encoding="utf-8")
    texts = [*corpus.split("\n"), corpus, "  a\t\n b  ", "龘🎵\u2028\r", "\u3000全角\u3000"]
    texts += [input_text(row) for row in demo.demo_rows()]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_id() not in ids
    pieces = tokenizer.encode("a1234", out_type=str)
    assert pieces == ["a", "1", "2", "3", "4"], "dummy prefix added or digits not split"


def test_rows_cover_metrics_roles_and_cases() -> None:
    rows, profiles = demo.demo_rows(), demo.demo_profiles()
    assert len(rows) == 30
    keys = ["id", "role", "novel_name", "context", "model_output", "metric_en", "metric_zh"]
    assert all(list(row) == keys for row in rows)
    assert {row["metric_en"]: row["metric_zh"] for row in rows} == METRICS
    assert all(METRICS[row["metric_en"]] == row["metric_zh"] for row in rows)
    assert {row["role"] for row in rows} == set(profiles)
    # An id stands for one context and one answer; no (id, metric) pair occurs twice.
    texts = {(row["id"], row["role"], row["context"], row["model_output"]) for row in rows}
    assert len({row["id"] for row in rows}) == len(texts) < len(rows)
    assert len({(row["id"], row["metric_en"]) for row in rows}) == len(rows)
    assert [row["model_output"] for row in rows].count("") == 1
    assert not [row["id"] for row in rows if "\n" in row["model_output"]]
    written = json.dumps(profiles, ensure_ascii=False)
    assert all(mark in written for mark in ("'", r"\"", r"\n", "\u3000", "true", "null", "0.87"))


def test_exactly_one_row_is_longer_than_the_model() -> None:
    tokenizer = processor()
    lengths = [len(tokenizer.encode(input_text(row))) + 1 for row in demo.demo_rows()]
    long = [length for length in lengths if length > 700]
    assert len(long) == 1
    assert long[0] > demo.CONTEXT
    assert min(lengths) >= 100


def test_another_tokenizer_meets_the_same_body(shared: Path, tmp_path: Path) -> None:
    folder = demo.build_demo_checkpoint(tmp_path / "c", tokenizer=shared / "upstream")
    model = (folder / "tokenizer.model").read_bytes()
    assert model == (shared / "upstream" / "tokenizer.model").read_bytes()
    weights, own = load(folder), demo.demo_weights()
    assert weights["model.embed_tokens.weight"].shape[0] == 125_696
    for name in own.keys() - {"model.embed_tokens.weight"}:
        assert torch.equal(weights[name], own[name]), name
    before = (folder / "demo.json").stat().st_ino
    demo.build_demo_checkpoint(folder, tokenizer=shared / "upstream")
    assert (folder / "demo.json").stat().st_ino == before  # reused
    demo.build_demo_checkpoint(folder)
    assert load(folder)["model.embed_tokens.weight"].shape[0] == demo.VOCAB
