"""Whether the weights fit and where they go, with faked devices and a faked cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import anchor_sequence, load_json

from charrm import placement
from charrm.checkpoint import find_checkpoint, load_model
from charrm.engines import Outcome
from charrm.engines.eager import EagerEngine
from charrm.errors import NotEnoughMemory
from charrm.model import CharRM, ModelConfig
from charrm.placement import (
    Placement,
    free_bytes,
    join_devices,
    plan_placement,
    split_over,
    workspace_bytes,
)

BF16 = torch.bfloat16
CPU = torch.device("cpu")
GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


def meta_model(layers: int = 4) -> CharRM:
    config = ModelConfig(1000, 64, layers, 2, 128, 1e-6, "silu", 4096)
    with torch.device("meta"):
        return CharRM(config).to(BF16)


def weight_bytes(model: CharRM) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def fake_free(monkeypatch: pytest.MonkeyPatch, free: dict[torch.device, int]) -> None:
    monkeypatch.setattr(placement, "free_bytes", free.__getitem__)
    monkeypatch.setattr(placement, "_all_gpus", lambda: GPUS)


def test_the_published_model_needs_what_its_files_hold(shared: Path) -> None:
    config = ModelConfig.from_file(shared / "upstream" / "config.json")
    with torch.device("meta"):
        model = CharRM(config).to(BF16)
    manifest = load_json(shared / "upstream" / "manifest.json")
    assert weight_bytes(model) == manifest["model"]["weights"]["total_size_bytes"]


def test_the_workspace_counts_attention_and_feed_forward() -> None:
    config = meta_model().config
    scores, inner = 2 * 4096 * 4096, 4096 * 128
    assert workspace_bytes(config, BF16) == (3 * scores + 4 * inner) * 2
    assert workspace_bytes(config, torch.float32) == 2 * workspace_bytes(config, BF16)


@pytest.mark.parametrize("device", [CPU, GPUS[1]])
def test_the_last_byte_decides(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta_model()
    needed = weight_bytes(model) + workspace_bytes(model.config, BF16)
    fake_free(monkeypatch, {device: needed})
    assert plan_placement(model, device, BF16).devices == {"": device}
    fake_free(monkeypatch, {device: needed - 1})
    with pytest.raises(NotEnoughMemory):
        plan_placement(model, device, BF16)


def test_the_refusal_names_needed_free_and_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta_model()
    fake_free(monkeypatch, {CPU: 2**26})
    with pytest.raises(NotEnoughMemory) as caught:
        plan_placement(model, CPU, BF16)
    needed = (weight_bytes(model) + workspace_bytes(model.config, BF16)) / 2**30
    for part in (f"needs {needed:.2f} GiB", "cpu: 0.06 GiB", "--device"):
        assert part in str(caught.value)


def test_nothing_is_read_before_the_preflight(
    demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_free(monkeypatch, {CPU: 1000})
    monkeypatch.setattr("charrm.checkpoint._read_shard", lambda _: pytest.fail("read a shard"))
    with pytest.raises(NotEnoughMemory):
        load_model(find_checkpoint(demo_checkpoint), CPU, BF16, cast=False)


def test_whole_layers_are_split_over_devices() -> None:
    model = meta_model()
    workspace = workspace_bytes(model.config, BF16)
    layer = weight_bytes(meta_model(5)) - weight_bytes(meta_model(4))
    # The embedding, two layers and a bit on the first; accelerate keeps room for one more layer.
    first = model.model.embed_tokens.weight.numel() * 2 + 3 * layer + layer // 2
    free = dict(zip(GPUS, (workspace + first, workspace + weight_bytes(model)), strict=True))
    split = split_over(model, free, workspace)
    assert split is not None
    assert set(split.devices.values()) == set(GPUS)
    used = {name: split.device_of(name) for name in model.state_dict()}
    assert used["model.embed_tokens.weight"] == GPUS[0]
    assert used["score.bias"] == GPUS[1]
    for number in range(4):
        devices = {d for name, d in used.items() if name.startswith(f"model.layers.{number}.")}
        assert len(devices) == 1
    held = sum(t.numel() * 2 for n, t in model.state_dict().items() if used[n] == GPUS[0])
    assert held <= first


def test_a_model_too_large_for_all_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta_model()
    workspace = workspace_bytes(model.config, BF16)
    few = dict.fromkeys(GPUS, workspace + weight_bytes(model) // 4)
    assert split_over(model, few, workspace) is None
    fake_free(monkeypatch, {**few, torch.device("cuda"): workspace})
    with pytest.raises(NotEnoughMemory, match=r"cuda:0: .* GiB, cuda:1: .* GiB"):
        plan_placement(model, torch.device("cuda"), BF16)
    enough = dict.fromkeys(GPUS, workspace + weight_bytes(model))
    fake_free(monkeypatch, {**enough, torch.device("cuda"): workspace})
    split = plan_placement(model, torch.device("cuda"), BF16)
    assert set(split.devices.values()) <= set(GPUS)
    fake_free(monkeypatch, {**enough, GPUS[0]: workspace})
    with pytest.raises(NotEnoughMemory):  # a named device is not replaced by others
        plan_placement(model, GPUS[0], BF16)


def test_a_split_model_gives_the_same_bits(demo_checkpoint: Path) -> None:
    """Two parts that are both the CPU: what the hooks carry must arrive unchanged."""
    files = find_checkpoint(demo_checkpoint)
    whole = EagerEngine(load_model(files, CPU, BF16, cast=False).model)
    model = load_model(files, CPU, BF16, cast=False).model
    parts = {
        name: CPU
        for name in (
            "model.embed_tokens",
            "model.layers.0",
            "model.layers.1",
            "model.norm",
            "score",
        )
    }
    split = EagerEngine(join_devices(model, Placement(parts)))
    hooked = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    assert {"model.layers.0", "model.layers.1", "score"} <= set(hooked)
    for length in (1, 33, 200):
        ids = anchor_sequence(length, vocab_size=2000)
        [a], [b] = (engine.score_tokens([ids], keep_hidden=True) for engine in (whole, split))
        assert isinstance(a, Outcome)
        assert isinstance(b, Outcome)
        assert a.hidden is not None
        assert b.hidden is not None
        assert torch.equal(a.hidden, b.hidden)
        assert (a.logit, a.p) == (b.logit, b.p)


def test_the_longest_prefix_names_the_device() -> None:
    devices = {"model.layers.1": GPUS[0], "model.layers.1.mlp": GPUS[1], "model": CPU, "score": CPU}
    where = Placement(devices)
    assert where.device_of("model.layers.1.self_attn.W_pack.weight") == GPUS[0]
    assert where.device_of("model.layers.1.mlp.up_proj.weight") == GPUS[1]
    assert where.device_of("model.layers.10.mlp.up_proj.weight") == CPU
    assert Placement({"": CPU}).device_of("score.bias") == CPU


def fake_cgroup(folder: Path, limit: str, used: int, reclaimable: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\nactive_file 7\n")
    return folder


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("1000000", 1_000_000 - 400_000 + 50_000), ("max", 2**40), (str(2**60), 2**40)],
)
def test_the_limit_of_the_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    class Memory:
        available = 2**40

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    monkeypatch.setattr(placement, "_CGROUP", fake_cgroup(tmp_path, limit, 400_000, 50_000))
    assert free_bytes(CPU) == expected
    monkeypatch.setattr(placement, "_CGROUP", tmp_path / "absent")
    assert free_bytes(CPU) == 2**40
