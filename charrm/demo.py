"""The demo: a tiny checkpoint in the published layout, six invented roles and thirty rows.

It shows and tests the product where nobody has the 26.5 GB of real weights. Every weight is an
integer taken from SHAKE-256 times a power of two, hence exact in bf16 and the same on every
machine; no floating-point random generator takes part.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import tempfile
from functools import partial
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch

__all__ = [
    "NOTICE",
    "build_demo_checkpoint",
    "demo_profiles",
    "demo_rows",
    "demo_tokenizer",
    "demo_weights",
]

NOTICE = "This demo checkpoint holds random weights: its scores mean nothing."

Layout = Literal["safetensors", "pickle", "single"]

SEED = 30
VOCAB, LAYERS, HIDDEN, HEADS, FEED_FORWARD = 2000, 2, 48, 3, 128
CONTEXT = 4096

_CONFIG: dict[str, Any] = {
    "architectures": ["BaichuanCharRM"],
    "model_type": "baichuan",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.2",
    "tokenizer_class": "BaichuanTokenizer",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FEED_FORWARD,
    "model_max_length": CONTEXT,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
}
_TOKENIZER_FILES = ("tokenizer.model", "special_tokens_map.json", "tokenizer_config.json")

_DATA = resources.files(__package__) / "demo_data"
_MANIFEST = "demo.json"
_KIND = "charrm-demo-checkpoint"
_SHARDED: dict[str, tuple[str, str]] = {
    "safetensors": ("model-{:05d}-of-00002.safetensors", "model.safetensors.index.json"),
    "pickle": ("pytorch_model-{:05d}-of-00002.bin", "pytorch_model.bin.index.json"),
}


def demo_profiles() -> dict[str, Any]:
    """The demo's profiles, role -> profile, shaped like `character_profiles.json`."""
    profiles: dict[str, Any] = json.loads(_text("profiles.json"))
    return profiles


def demo_rows() -> list[dict[str, Any]]:
    """Thirty rows shaped like a "trans" file: one element per (row, metric), all 12 metrics.

    In the data file a row may carry `context_repeat: {"line": str, "times": int}`: its context
    is then `context` followed by `times` copies of `line`, all joined by a newline. One row uses
    it to exceed 4,096 tokens. Returned rows no longer have that key.
    """
    rows: list[dict[str, Any]] = json.loads(_text("rows.json"))
    for row in rows:
        repeat = row.pop("context_repeat", None)
        if repeat is not None:
            row["context"] = "\n".join([row["context"], *[repeat["line"]] * repeat["times"]])
    return rows


def build_demo_checkpoint(
    folder: Path, *, layout: Layout = "safetensors", tokenizer: Path | None = None
) -> Path:
    """Write the demo checkpoint to `folder`, or reuse the one already there; returns `folder`.

    `layout` is two safetensors shards with an index, two pickle shards with an index, or a
    single `model.safetensors`. `tokenizer` is a folder whose tokenizer files are used instead of
    the demo's own, so that real tokens meet a small forward.

    The folder appears whole or not at all. It is reused when `demo.json` in it names exactly the
    files present, with their SHA-256, and the same builder, corpus, layout, tokenizer and library
    versions; otherwise a demo checkpoint is rebuilt.

    Raises FileExistsError when `folder` is anything else than absent, empty, or a demo
    checkpoint without foreign files; nothing is deleted then. Raises ValueError for an unknown
    layout.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(get_args(Layout))}")
    target = Path(folder).resolve()
    small = _demo_tokenizer_files if tokenizer is None else partial(_read_tokenizer, tokenizer)
    inputs = _inputs_digest(layout, None if tokenizer is None else small())
    if _is_current(target, inputs):
        return folder
    _refuse_foreign(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        # One level down, because the temporary folder itself is readable by its owner only.
        new = Path(beside) / "new"
        new.mkdir()
        _write(new, layout, small())
        (new / _MANIFEST).write_bytes(_manifest(new, inputs))
        _swap_in(new, target, Path(beside) / "old", inputs)
    return folder


def demo_weights(seed: int = SEED, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """The 18 bf16 tensors under their published names, in the order of the forward."""
    import torch

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        octets = hashlib.shake_256(f"{seed}/{name}".encode()).digest(math.prod(shape))
        return torch.frombuffer(bytearray(octets), dtype=torch.uint8).to(torch.int32).view(shape)

    def matrix(name: str, shape: tuple[int, ...], exponent: int) -> torch.Tensor:
        # Odd integers -255..255 fit the 8 significant bits of bf16; none is zero.
        return ((2 * draw(name, shape) - 255) * 2.0**exponent).to(torch.bfloat16)

    def norm(name: str) -> torch.Tensor:
        # 112/128 to 143/128: around one, exact in bf16.
        return ((draw(name, (HIDDEN,)) // 8 + 112) / 128).to(torch.bfloat16)

    # Exponents chosen so that p spreads over the demo rows; a uniform odd integer of 8 bits has
    # a standard deviation of 148, so -10 gives 0.14.
    weights = {"model.embed_tokens.weight": matrix("embed", (vocab, HIDDEN), -9)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": norm(f"{i}/input_norm"),
            f"{layer}.self_attn.W_pack.weight": matrix(f"{i}/qkv", (3 * HIDDEN, HIDDEN), -10),
            f"{layer}.self_attn.o_proj.weight": matrix(f"{i}/o", (HIDDEN, HIDDEN), -10),
            f"{layer}.post_attention_layernorm.weight": norm(f"{i}/post_norm"),
            f"{layer}.mlp.gate_proj.weight": matrix(f"{i}/gate", (FEED_FORWARD, HIDDEN), -10),
            f"{layer}.mlp.up_proj.weight": matrix(f"{i}/up", (FEED_FORWARD, HIDDEN), -10),
            f"{layer}.mlp.down_proj.weight": matrix(f"{i}/down", (HIDDEN, FEED_FORWARD), -11),
        }
    weights["model.norm.weight"] = norm("norm")
    weights["score.weight"] = matrix("score", (1, HIDDEN), -9)
    weights["score.bias"] = matrix("bias", (1,), -10)
    return weights


def demo_tokenizer() -> bytes:
    """A sentencepiece model trained on the demo corpus, with the traits of the published one.

    BPE with byte fallback, identity normalisation, no dummy prefix, white space kept, digits
    split, `<unk> <s> </s>` as ids 0, 1, 2, no padding piece, newline and tab as own pieces.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_text("corpus.txt").splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["\n", "\t"],
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def _write(folder: Path, layout: Layout, tokenizer_files: dict[str, bytes]) -> None:
    import torch
    from safetensors.torch import save
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_proto=tokenizer_files["tokenizer.model"])
    weights = demo_weights(vocab=pieces.get_piece_size())
    names = list(weights)
    shards = {"model.safetensors": names}
    if layout in _SHARDED:
        # As in the published shards, the cut falls inside a layer.
        pattern, index = _SHARDED[layout]
        half = len(names) // 2
        shards = {pattern.format(1): names[:half], pattern.format(2): names[half:]}
        total = sum(tensor.nbytes for tensor in weights.values())
        weight_map = {name: shard for shard, part in shards.items() for name in part}
        ordered = dict(sorted(weight_map.items()))
        (folder / index).write_bytes(
            _json_bytes({"metadata": {"total_size": total}, "weight_map": ordered})
        )
    for shard, part in shards.items():
        tensors = {name: weights[name] for name in part}
        if layout == "pickle":
            torch.save(tensors, folder / shard)
        else:
            # Not save_file: it makes files that only their owner can read.
            (folder / shard).write_bytes(save(tensors, metadata={"format": "pt"}))
    config = _CONFIG | {"vocab_size": pieces.get_piece_size()}
    for name, content in {**tokenizer_files, "config.json": _json_bytes(config)}.items():
        (folder / name).write_bytes(content)


def _read_tokenizer(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in _TOKENIZER_FILES}


def _demo_tokenizer_files() -> dict[str, bytes]:
    def token(content: str) -> dict[str, Any]:
        flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": True}
        return {"content": content, **flags}

    specials = {
        "bos_token": token("<s>"),
        "eos_token": token("</s>"),
        "pad_token": token("<unk>"),
        "unk_token": token("<unk>"),
    }
    return {
        "tokenizer.model": demo_tokenizer(),
        "special_tokens_map.json": _json_bytes(specials),
        "tokenizer_config.json": _json_bytes(
            {
                "add_bos_token": False,
                "add_eos_token": False,
                **{name: {"__type": "AddedToken", **fields} for name, fields in specials.items()},
                "clean_up_tokenization_spaces": False,
                "model_max_length": CONTEXT,
                "sp_model_kwargs": {},
                "tokenizer_class": "BaichuanTokenizer",
            }
        ),
    }


def _inputs_digest(layout: Layout, tokenizer_files: dict[str, bytes] | None) -> str:
    versions = [metadata.version(name) for name in ("torch", "safetensors", "sentencepiece")]
    builder = (resources.files(__package__) / "demo.py").read_text(encoding="utf-8")
    given = [_sha256(content) for content in (tokenizer_files or {}).values()]
    parts = [builder, _text("corpus.txt"), layout, *versions, *given]
    return _sha256(json.dumps(parts).encode())


def _manifest(folder: Path, inputs: str) -> bytes:
    """What `demo.json` must hold for the files now in `folder`."""
    files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST)
    content = {
        "kind": _KIND,
        "notice": NOTICE,
        "inputs": inputs,
        "files": {path.name: _sha256(path.read_bytes()) for path in files},
    }
    return _json_bytes(content)


def _is_current(folder: Path, inputs: str) -> bool:
    try:
        # The inputs first: only a folder this builder finished is read in full.
        found = (folder / _MANIFEST).read_bytes()
        return inputs.encode() in found and found == _manifest(folder, inputs)
    except OSError:
        return False


def _refuse_foreign(folder: Path) -> None:
    """Raise FileExistsError unless `folder` may be replaced without losing anyone's files."""
    if not folder.exists():
        return
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        ours = {_MANIFEST, *manifest["files"]} if manifest["kind"] == _KIND else set()
    except (OSError, ValueError, TypeError, KeyError):
        ours = set()
    foreign = sorted(present - ours)
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise FileExistsError(
            f"{folder} holds files that the demo did not write ({shown}). Nothing was changed; "
            "name another folder, or remove this one yourself."
        )


def _swap_in(new: Path, folder: Path, old: Path, inputs: str) -> None:
    """Rename `new` to `folder`, putting what stood there to `old`."""
    _refuse_foreign(folder)
    try:
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except OSError:
        # Another process may have built the same checkpoint meanwhile; then its copy serves.
        if not _is_current(folder, inputs):
            raise


def _text(name: str) -> str:
    return (_DATA / name).read_text(encoding="utf-8")


def _json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode("utf-8")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
