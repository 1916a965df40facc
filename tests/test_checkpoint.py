"""Opening a checkpoint: every layout gives the same bits, everything else is refused by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    LAYOUTS,
    SMALL_FILES,
    copy_small_files,
    edit_json,
    load_json,
    read_tensors,
    write_weights,
)
from safetensors.torch import load_file, save_file

from charrm import Scorer
from charrm.checkpoint import LoadedModel, find_checkpoint, load_model
from charrm.engines import Outcome
from charrm.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    IdentityMismatch,
)
from charrm.tokenizer import load_tokenizer

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
IDS = [5, 300, 7, 1999, 42] * 9 + [2]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors(demo_checkpoint: Path) -> Tensors:
    return read_tensors(demo_checkpoint)


@pytest.fixture
def build(tmp_path: Path, demo_checkpoint: Path, tensors: Tensors) -> Callable[..., Path]:
    """Build a folder of the demo's small files with these weights in this layout."""

    def build(layout: str = LAYOUTS[0], weights: Tensors | None = None) -> Path:
        folder = copy_small_files(demo_checkpoint, tmp_path / layout.replace(" ", "-"))
        write_weights(folder, tensors if weights is None else weights, layout)
        return folder

    return build


def load(folder: Path, dtype: torch.dtype = torch.bfloat16, cast: bool = False) -> LoadedModel:
    return load_model(find_checkpoint(folder), torch.device("cpu"), dtype, cast=cast)


def refusal(folder: Path, kind: type[CheckpointError], **kwargs: Any) -> str:
    """The message of the refusal to load a folder."""
    with pytest.raises(kind) as caught:
        load(folder, **kwargs)
    return str(caught.value)


def shards_of(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def score_hidden(scorer: Scorer, ids: list[int]) -> Outcome:
    [outcome] = scorer.engine.score_tokens([ids], keep_hidden=True)
    assert isinstance(outcome, Outcome), outcome
    return outcome


def test_every_layout_is_the_same_model(build: Callable[..., Path], tensors: Tensors) -> None:
    scorers = {layout: Scorer.open(build(layout), device="cpu") for layout in LAYOUTS}
    first = scorers[LAYOUTS[0]]
    found = score_hidden(first, IDS)
    for scorer in scorers.values():
        assert scorer.identity.content == first.identity.content
        other = score_hidden(scorer, IDS)
        assert other.hidden is not None
        assert found.hidden is not None
        assert torch.equal(other.hidden, found.hidden)
        assert (other.logit, other.p) == (found.logit, found.p)
    digests = {scorer.identity.digest for scorer in scorers.values()}
    assert len(digests) == len(LAYOUTS)  # the files differ, and the digest is over them

    # The control: one bit of one weight is another model.
    changed = {**tensors, "model.norm.weight": tensors["model.norm.weight"].clone()}
    changed["model.norm.weight"].view(torch.int16)[0] ^= 1
    one_bit_off = Scorer.open(build(LAYOUTS[0], changed), device="cpu")
    assert one_bit_off.identity.content != first.identity.content


def test_every_parameter_comes_from_the_checkpoint(
    build: Callable[..., Path], tensors: Tensors
) -> None:
    loaded = load(build())
    parameters = dict(loaded.model.state_dict())
    assert parameters.keys() == tensors.keys()
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, tensors[name]), name
    assert not loaded.model.training
    assert loaded.stored_dtype == "bfloat16"


@pytest.mark.parametrize("layout", ["pickle shards", "single pickle"])
def test_pickled_parameters_views_and_strides_are_read(
    build: Callable[..., Path], tensors: Tensors, layout: str
) -> None:
    """What `torch.save` may hold beside plain tensors, without changing a value."""
    odd = dict(tensors)
    odd["score.bias"] = torch.nn.Parameter(tensors["score.bias"])
    odd["score.weight"] = torch.cat([tensors["score.weight"]] * 2)[1:]  # a view with an offset
    name = "model.layers.0.self_attn.o_proj.weight"
    odd[name] = tensors[name].t().contiguous().t()  # column-major
    loaded = load(build(layout, odd))
    assert loaded.content_sha256 == load(build("safetensors shards")).content_sha256
    assert all(torch.equal(p, tensors[n]) for n, p in loaded.model.state_dict().items())
    assert all(p.is_contiguous() for p in loaded.model.parameters())


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_a_missing_shard_is_named(build: Callable[..., Path], layout: str) -> None:
    folder = build(layout)
    shard = shards_of(folder)[1]
    shard.unlink()
    assert shard.name in refusal(folder, CheckpointIncomplete)


@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_missing_small_file_is_named(build: Callable[..., Path], name: str) -> None:
    folder = build()
    (folder / name).unlink()
    assert name in refusal(folder, CheckpointIncomplete)


def test_a_folder_without_weights_says_what_was_looked_for(
    tmp_path: Path, demo_checkpoint: Path
) -> None:
    message = refusal(copy_small_files(demo_checkpoint, tmp_path / "c"), CheckpointIncomplete)
    assert "model.safetensors" in message
    assert "pytorch_model.bin.index.json" in message


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_a_truncated_shard_is_named(build: Callable[..., Path], layout: str, kept: float) -> None:
    folder = build(layout)
    shard = shards_of(folder)[-1]
    shard.write_bytes(shard.read_bytes()[: int(shard.stat().st_size * kept)])
    message = refusal(folder, CheckpointCorrupt)
    assert str(shard) in message


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("content", [b"\x00" * 64, b"{}", b"<html>not found</html>", b"\x80\x04N."])
def test_a_shard_that_is_something_else_is_named(
    build: Callable[..., Path], layout: str, content: bytes
) -> None:
    folder = build(layout)
    shard = shards_of(folder)[0]
    shard.write_bytes(content)
    assert str(shard) in refusal(folder, CheckpointCorrupt)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_wrong_tensors_are_reported_at_once(
    build: Callable[..., Path], tensors: Tensors, layout: str
) -> None:
    wrong = dict(tensors)
    del wrong["score.bias"], wrong["model.layers.0.self_attn.W_pack.weight"]
    wrong["lm_head.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    wrong["model.layers.7.input_layernorm.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    wrong["model.norm.weight"] = torch.zeros(47, dtype=torch.bfloat16)
    message = refusal(build(layout, wrong), CheckpointIncomplete)
    for part in (
        "5 tensors are wrong",
        "missing tensor score.bias",
        "missing tensor model.layers.0.self_attn.W_pack.weight",
        "unexpected tensor lm_head.weight",
        "unexpected tensor model.layers.7.input_layernorm.weight",
        "model.norm.weight has shape [47], expected [48]",
    ):
        assert part in message


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_a_duplicate_is_reported_with_the_others(
    build: Callable[..., Path], tensors: Tensors, layout: str
) -> None:
    """A tensor in two shards is ambiguous even when the index places it in one of them."""
    folder = build(layout, {n: t for n, t in tensors.items() if n != "score.bias"})
    first, second = shards_of(folder)
    tensor_files = second.suffix == ".safetensors"
    read, write = (load_file, save_file) if tensor_files else (torch.load, torch.save)
    name = "model.embed_tokens.weight"
    write({**read(second), name: read(first)[name]}, second)
    message = refusal(folder, CheckpointIncomplete)
    assert f"{second.name}: {name} is already in {first.name}" in message
    assert "missing tensor score.bias" in message
    assert "2 tensors are wrong" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_integer_weights_are_refused(
    build: Callable[..., Path], tensors: Tensors, layout: str
) -> None:
    wrong = {**tensors, "score.weight": torch.zeros(1, 48, dtype=torch.int8)}
    message = refusal(build(layout, wrong), CheckpointIncomplete, cast=True)
    assert "score.weight is torch.int8" in message


@pytest.mark.parametrize("name", [*SMALL_FILES, "index", "shard"])
def test_a_git_lfs_pointer_is_named(build: Callable[..., Path], name: str) -> None:
    folder = build()
    special = {"index": folder / "model.safetensors.index.json", "shard": shards_of(folder)[0]}
    path = special.get(name, folder / name)
    path.write_text(LFS_POINTER)
    message = refusal(folder, CheckpointCorrupt)
    assert "Git-LFS" in message
    assert path.name in message


class WritesAFile:
    """Unpickling this object runs `os.mkdir`."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("layout", ["pickle shards", "single pickle"])
def test_a_foreign_pickled_object_is_refused_and_never_runs(
    build: Callable[..., Path], tensors: Tensors, layout: str, tmp_path: Path
) -> None:
    target = tmp_path / "written by the checkpoint"
    folder = build(layout, {**tensors, "score.bias": WritesAFile(target)})
    shard = shards_of(folder)[-1]
    assert str(shard) in refusal(folder, CheckpointCorrupt)
    assert not target.exists()
    torch.load(shard, weights_only=False)  # the control: an unguarded reader does run it
    assert target.is_dir()


@pytest.mark.parametrize("content", [[1, 2], {"score.bias": 3}, {"score.bias": [1.0]}])
def test_a_pickle_without_named_tensors_is_refused(
    build: Callable[..., Path], content: object
) -> None:
    folder = build("single pickle")
    torch.save(content, folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in refusal(folder, CheckpointCorrupt)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.bin", "..", ".", "", 3, None]
)
def test_an_index_cannot_leave_the_folder(build: Callable[..., Path], shard: object) -> None:
    folder = build()
    index = folder / "model.safetensors.index.json"
    weight_map = load_json(index)["weight_map"]
    edit_json(index, weight_map=dict.fromkeys(weight_map, shard))
    assert index.name in refusal(folder, CheckpointCorrupt)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', "\ufffd", "null"])
def test_an_index_of_another_form_is_refused(build: Callable[..., Path], text: str) -> None:
    folder = build()
    index = folder / "model.safetensors.index.json"
    index.write_text(text, encoding="utf-8")
    assert index.name in refusal(folder, CheckpointCorrupt)


def test_another_stored_dtype_is_cast_only_when_asked(
    build: Callable[..., Path], tensors: Tensors
) -> None:
    folder = build(LAYOUTS[0], {name: tensor.float() for name, tensor in tensors.items()})
    with pytest.raises(CheckpointCorrupt, match="stored as float32, expected bfloat16") as caught:
        Scorer.open(folder, device="cpu")
    assert "dtype='bfloat16'" in str(caught.value)
    scorer = Scorer.open(folder, device="cpu", dtype="bfloat16")
    assert scorer.identity.stored_dtype == "float32"
    stored = Scorer.open(build("single safetensors"), device="cpu")
    assert score_hidden(scorer, IDS).p == score_hidden(stored, IDS).p
    assert scorer.identity.content != stored.identity.content


def test_one_float32_tensor_among_bfloat16_is_refused(
    build: Callable[..., Path], tensors: Tensors
) -> None:
    mixed = {**tensors, "score.bias": tensors["score.bias"].float()}
    assert "bfloat16+float32" in refusal(build(LAYOUTS[0], mixed), CheckpointCorrupt)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "shard"])
def test_a_file_that_changes_while_it_is_read_is_noticed(
    build: Callable[..., Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build()
    path = shards_of(folder)[0] if name == "shard" else folder / name

    def touch_then_load(where: Path) -> Any:
        tokenizer = load_tokenizer(where)
        os.utime(path, ns=(1, 1))
        return tokenizer

    monkeypatch.setattr("charrm.scorer.load_tokenizer", touch_then_load)
    with pytest.raises(IdentityMismatch, match=path.name):
        Scorer.open(folder, device="cpu")


def test_code_in_the_folder_never_runs(build: Callable[..., Path], tmp_path: Path) -> None:
    folder = build()
    marker = tmp_path / "ran"
    for name in ("modeling_baichuan", "tokenization_baichuan", "configuration_baichuan"):
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit\n")
    auto_map = {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]}
    edit_json(folder / "tokenizer_config.json", auto_map=auto_map)
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_baichuan.BaichuanRM"})
    Scorer.open(folder, device="cpu")
    assert not marker.exists()
    assert not [name for name in sys.modules if "_baichuan" in name]


def test_two_forms_of_the_same_weights_are_refused(build: Callable[..., Path]) -> None:
    folder = build(LAYOUTS[0])
    assert load(folder).stored_dtype == "bfloat16"
    write_weights(folder, read_tensors(folder), "single safetensors")
    assert "model.safetensors.index.json and model.safetensors" in refusal(
        folder, CheckpointCorrupt
    )


def test_settings_are_not_guessed_from_broken_json(build: Callable[..., Path]) -> None:
    folder = build()
    (folder / "config.json").write_text(json.dumps([1]))
    assert "expected an object" in refusal(folder, CheckpointCorrupt)
