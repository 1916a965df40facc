"""Small helpers shared by the test modules; nothing here is a test."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYOUTS = ("safetensors shards", "pickle shards", "single safetensors", "single pickle")
SMALL_FILES = (
    "config.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def edit_json(path: Path, **changes: Any) -> None:
    """Set top-level fields of a JSON file; a value of `...` removes the field."""
    content = load_json(path) | changes
    kept = {name: value for name, value in content.items() if value is not ...}
    path.write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")


def anchor_sequence(length: int, vocab_size: int = 4000) -> list[int]:
    """Ids of a stored sequence, by the rule beside the stored numbers."""
    x, ids = length, []
    for _ in range(length - 1):
        x = (1103515245 * x + 12345) % 2**31
        ids.append(3 + x % (vocab_size - 3))
    return [*ids, 2]


def grid_steps(p: float, stored_p: float) -> float:
    """Distance of two numbers in steps of the bf16 grid (8 significant bits) at the stored one."""
    return abs(p - stored_p) / 2.0 ** (math.frexp(stored_p)[1] - 8)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder of safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def copy_small_files(source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in SMALL_FILES:
        shutil.copyfile(source / name, folder / name)  # not the read-only mode of the source
    return folder


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], layout: str) -> list[Path]:
    """Write tensors in one of `LAYOUTS`, named as transformers names them; return the shards."""
    stem, suffix = ("pytorch_model", "bin") if "pickle" in layout else ("model", "safetensors")
    if layout.startswith("single"):
        return [_save(folder / f"{stem}.{suffix}", tensors)]
    names = list(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    shards: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, half in enumerate(halves, start=1):
        path = folder / f"{stem}-{number:05d}-of-00002.{suffix}"
        shards.append(_save(path, {name: tensors[name] for name in half}))
        weight_map |= dict.fromkeys(half, path.name)
    total = sum(getattr(tensor, "nbytes", 0) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return shards


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    if path.suffix == ".bin":
        torch.save(dict(tensors), path)
    else:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    return path


def chat_prompt(profile: object, context: str, answer: str, metric_zh: str) -> str:
    """The template, written out a second time and apart from the product."""
    return (
        f"<RoleInfo>\n\n{profile}\n\n<Context>\n\n{context}"
        f"\n\n<Response>\n\n{answer}\n\n<Dimension>\n\n{metric_zh}"
    )
