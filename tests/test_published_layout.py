"""The published small files with weights in a reduced size: loads offline, by name, with no code.

The small files are the real ones; only the sizes in `config.json` are reduced, and the shards and
their index carry the published names.
"""

from __future__ import annotations

import json
import math
import re
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from helpers import copy_small_files, edit_json, load_json

from charrm import METRICS, Row, ScoredRow, Scorer
from charrm.checkpoint import find_checkpoint
from charrm.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete
from charrm.identity import AUDITED_HUB, AUDITED_REVISION
from charrm.model import CharRM, ModelConfig
from charrm.tokenizer import TOKENIZER_FILES, load_tokenizer

SIZES = {
    "hidden_size": 80,
    "num_attention_heads": 5,
    "num_hidden_layers": 3,
    "intermediate_size": 112,
}
PUBLISHED_LAYERS = (0, 20, 39)  # one of each published shard stands for layers 0, 1, 2
AUTO_CLASSES = ("AutoConfig", "AutoTokenizer", "AutoModel", "AutoModelForCausalLM")


def published_weight_map(shared: Path) -> dict[str, str]:
    """The published index, cut down to three layers."""
    published = load_json(shared / "upstream" / "pytorch_model.bin.index.json")["weight_map"]
    weight_map = {}
    for name, shard in published.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None:
            weight_map[name] = shard
        elif int(layer[1]) in PUBLISHED_LAYERS:
            number = PUBLISHED_LAYERS.index(int(layer[1]))
            weight_map[f"model.layers.{number}.{name[layer.end() :]}"] = shard
    return weight_map


@pytest.fixture(scope="module")
def published(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    copy_small_files(shared / "upstream", folder)
    edit_json(folder / "config.json", **SIZES)
    weight_map = published_weight_map(shared)
    with torch.device("meta"):
        shapes = CharRM(ModelConfig.from_file(folder / "config.json")).state_dict()
    generator = torch.Generator().manual_seed(1)
    for shard in sorted(set(weight_map.values())):
        content = {}
        for name in (n for n, s in weight_map.items() if s == shard):
            drawn = torch.randn(shapes[name].shape, generator=generator)
            content[name] = (1 + 0.1 * drawn if "norm" in name else 0.1 * drawn).bfloat16()
        torch.save(content, folder / shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket and none of transformers' ways from a folder to a class."""

    import transformers  # not above: its import warns unless the product's is first

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("not allowed here")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in AUTO_CLASSES:
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", refuse)
    dynamic = transformers.dynamic_module_utils
    monkeypatch.setattr(dynamic, "get_class_from_dynamic_module", refuse)


def first_official_row(shared: Path) -> Row:
    folder = shared / "charactereval"
    row = load_json(folder / "test_data.jsonl")[0]
    profile = load_json(folder / "character_profiles.json")[row["role"]]
    return Row(profile=profile, context=row["context"], model_output="好。", metric="Accuracy")


def test_the_reduced_index_has_every_published_shard_and_name(shared: Path) -> None:
    weight_map = published_weight_map(shared)
    assert sorted(set(weight_map.values())) == [
        f"pytorch_model-0000{number}-of-00003.bin" for number in (1, 2, 3)
    ]
    assert len(weight_map) == 3 * 7 + 4


@pytest.mark.usefixtures("offline")
def test_a_real_prompt_is_scored_offline(published: Path, shared: Path) -> None:
    scorer = Scorer.open(published, device="cpu")
    [result] = scorer.score([first_official_row(shared)])
    assert isinstance(result, ScoredRow), result
    assert result.protocol == "charrm/1"
    assert (result.metric_en, result.metric_zh) == ("Accuracy", METRICS["Accuracy"])
    assert result.score == result.p * 4 + 1
    assert result.tokens > 145  # no official prompt is shorter
    assert scorer.identity.audit == {
        "config.json": "differs",
        "tokenizer_config.json": "matches",
        "special_tokens_map.json": "matches",
        "tokenizer.model": "matches",
        "pytorch_model.bin.index.json": "differs",
    }


@pytest.mark.usefixtures("offline")
def test_the_blockade_works(published: Path) -> None:
    """The control: what the product must not use would have been noticed."""
    with pytest.raises(AssertionError, match="not allowed here"):
        socket.create_connection(("localhost", 9))
    import transformers

    with pytest.raises(AssertionError, match="not allowed here"):
        transformers.AutoTokenizer.from_pretrained(str(published))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"你好": 7}),
        ("tokenizer.json", {"added_tokens": [{"id": 7, "content": "你好"}]}),
    ],
)
def test_files_that_add_tokens_are_refused(
    published: Path, tmp_path: Path, name: str, content: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would let them change tokens, and no digest would account for it."""
    folder = copy_small_files(published, tmp_path)
    before = load_tokenizer(folder).encode_text("你好再见")
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointCorrupt, match=re.escape(name)):
        load_tokenizer(folder)
    monkeypatch.setattr("charrm.tokenizer.UNWANTED_FILES", ())
    assert load_tokenizer(folder).encode_text("你好再见") != before  # the control


class FakeHub:
    """Stands in for `snapshot_download` and records how it was called."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, repo_id: str, **kwargs: Any) -> str:
        self.calls.append((repo_id, kwargs))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_the_hub_id_defaults_to_the_audited_revision(
    demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(demo_checkpoint)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    files = find_checkpoint(AUDITED_HUB)
    assert files.folder == demo_checkpoint
    find_checkpoint(AUDITED_HUB, "abc")
    assert [(name, kwargs["revision"]) for name, kwargs in hub.calls] == [
        ("morecry/BaichuanCharRM", AUDITED_REVISION),
        ("morecry/BaichuanCharRM", "abc"),
    ]
    patterns = hub.calls[0][1]["allow_patterns"]
    assert {"config.json", *TOKENIZER_FILES} <= set(patterns)
    assert not [pattern for pattern in patterns if Path("modeling_baichuan.py").match(pattern)]


def test_another_hub_id_needs_a_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(AssertionError("must not be asked"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    with pytest.raises(CheckpointIncomplete, match=r"no such folder here\. .* needs a revision"):
        find_checkpoint("someone/else")
    assert hub.calls == []


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", FakeHub(OSError("no route")))
    with pytest.raises(CheckpointIncomplete) as caught:
        find_checkpoint(AUDITED_HUB)
    for part in (AUDITED_HUB, AUDITED_REVISION, "no route", "pass the folder"):
        assert part in str(caught.value)


@pytest.mark.parametrize("source", ["no such folder", "a/b/c", "~/no/such", "", "config.json"])
def test_neither_a_folder_nor_a_hub_id(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointIncomplete):
        find_checkpoint(source)


def test_a_local_folder_has_no_revision(demo_checkpoint: Path) -> None:
    with pytest.raises(CheckpointIncomplete, match="a local folder has no revision"):
        find_checkpoint(demo_checkpoint, AUDITED_REVISION)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_max_length": 2048}, "model_max_length is 2048"),
        ({"hidden_size": 49}, "hidden_size % num_attention_heads"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": 0}, "at least 1"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is a small positive number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is a small positive number"),
        ({"intermediate_size": ...}, "intermediate_size is missing"),
    ],
)
def test_a_config_of_another_model_is_refused(
    demo_checkpoint: Path, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    path = copy_small_files(demo_checkpoint, tmp_path) / "config.json"
    assert ModelConfig.from_file(path).hidden_size == 48  # the control
    edit_json(path, **changes)
    with pytest.raises(CheckpointError, match=re.escape(found)) as caught:
        ModelConfig.from_file(path)
    assert str(path) in str(caught.value)
