"""Find a checkpoint and read it strictly: every tensor accounted for, or nothing is opened.

Layouts: safetensors or pickle, sharded with an index or a single file, as transformers writes
them. Files are taken by name from a folder; no Auto class and no code of the checkpoint is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from charrm.errors import CheckpointCorrupt, CheckpointIncomplete, IdentityMismatch
from charrm.identity import AUDITED_HUB, AUDITED_REVISION
from charrm.model import CharRM, ModelConfig
from charrm.placement import Placement, join_devices, plan_placement
from charrm.tokenizer import TOKENIZER_FILES

_LAYOUTS = (  # transformers prefers safetensors too
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_LFS_HEAD = b"version https://git-lfs"


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one checkpoint, found but not yet read; `stats` guards against changes."""

    folder: Path
    source: str
    shards: dict[Path, frozenset[str] | None]  # tensor names by the index; None: a single file
    stats: dict[Path, tuple[int, int]]  # every file: size, mtime_ns

    def check_unchanged(self) -> None:
        """Raise IdentityMismatch if a file changed since it was found."""
        changed = [str(p) for p, stat in self.stats.items() if _stat(p) != stat]
        if changed:
            raise IdentityMismatch(
                f"changed while the checkpoint was read: {', '.join(changed)}. Open it again once "
                "nothing writes to the folder."
            )


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode with every parameter read from the checkpoint."""

    model: CharRM
    content_sha256: str  # over names, stored dtypes, shapes and bytes; the same for every layout
    stored_dtype: str
    placement: Placement


def find_checkpoint(source: str | Path, revision: str | None = None) -> CheckpointFiles:
    """Find a checkpoint folder, or download a hub id such as `morecry/BaichuanCharRM`.

    `revision` belongs to a hub id; the audited repository defaults to the audited revision.
    Raises CheckpointIncomplete (files missing), CheckpointCorrupt (not what their names say).
    """
    folder = Path(os.path.expanduser(source))
    if not folder.is_dir():
        if not _HUB_ID.fullmatch(str(source)) or folder.exists():
            raise CheckpointIncomplete(
                f"{source}: no such folder, and not a hub id of the form owner/name."
            )
        folder = _download(str(source), revision)
    elif revision is not None:
        raise CheckpointIncomplete(f"{source}: a local folder has no revision; drop {revision!r}.")

    small = [folder / name for name in ("config.json", *TOKENIZER_FILES)]
    missing = [path.name for path in small if not path.is_file()]
    index, shards = _find_weights(folder)
    if not shards:
        missing.append("weights (" + ", ".join(name for pair in _LAYOUTS for name in pair) + ")")
    missing += [path.name for path in shards if not path.is_file()]
    if missing:
        raise CheckpointIncomplete(f"{folder}: missing {', '.join(missing)}.")
    paths = [*small, *([index] if index else []), *shards]
    pointers = [path.name for path in paths if _is_lfs_pointer(path)]
    if pointers:
        raise CheckpointCorrupt(
            f"{folder}: Git-LFS pointers instead of content: {', '.join(pointers)}. "
            "Run 'git lfs pull' in the folder or download the files themselves."
        )
    return CheckpointFiles(folder, str(source), shards, {path: _stat(path) for path in paths})


def load_model(
    files: CheckpointFiles, device: torch.device, dtype: torch.dtype, *, cast: bool
) -> LoadedModel:
    """Read the weights shard by shard onto a model that holds nothing until then.

    `cast=False` refuses weights stored in another dtype than `dtype`. Needs the model's size plus
    the largest shard (pickle) or tensor (safetensors) in host memory.
    Raises CheckpointIncomplete, CheckpointCorrupt, NotEnoughMemory, IdentityMismatch.
    """
    config = ModelConfig.from_file(files.folder / "config.json")
    with torch.device("meta"):
        model = CharRM(config).to(dtype)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    dtypes = _check_headers(files, expected)
    stored = "+".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    if dtypes != {dtype} and not cast:
        wanted = str(dtype).removeprefix("torch.")
        raise CheckpointCorrupt(
            f"{files.folder}: weights are stored as {stored}, expected {wanted} only. "
            f"Pass dtype={wanted!r} (--dtype {wanted}) to cast them on purpose."
        )
    placement = plan_placement(model, device, dtype)

    digests: dict[str, str] = {}
    total = sum(files.stats[shard][0] for shard in files.shards)
    with _progress() as progress:
        task = progress.add_task("reading weights", total=total)
        for shard in files.shards:
            for name, tensor in _read_shard(shard):
                if tuple(tensor.shape) != expected.get(name):
                    raise IdentityMismatch(f"{shard}: {name} changed after its header was read.")
                digests[name] = _tensor_digest(name, tensor)
                _assign(model, name, tensor.to(placement.device_of(name), dtype))
                progress.advance(task, tensor.nbytes)
    files.check_unchanged()
    content = hashlib.sha256("".join(f"{digests[n]}\n" for n in sorted(digests)).encode())
    return LoadedModel(
        join_devices(model.eval(), placement), content.hexdigest(), stored, placement
    )


def _find_weights(folder: Path) -> tuple[Path | None, dict[Path, frozenset[str] | None]]:
    for index, single in ((folder / a, folder / b) for a, b in _LAYOUTS):
        if index.is_file() and single.is_file():
            raise CheckpointCorrupt(
                f"{folder}: holds both {index.name} and {single.name}; they may differ. Remove one."
            )
        if index.is_file():
            return index, _read_index(index)
        if single.is_file():
            return None, {single: None}
    return None, {}


def _read_index(path: Path) -> dict[Path, frozenset[str] | None]:
    if _is_lfs_pointer(path):
        raise CheckpointCorrupt(f"{path}: a Git-LFS pointer instead of the index.")
    try:
        weight_map: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = {name: {t for t, s in weight_map.items() if s == name}
                  for name in sorted(set(weight_map.values()))}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path}: not a weight index: {error!r}") from None
    for name in shards:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointCorrupt(f"{path}: shard name {name!r} is not a plain file name.")
    return {path.parent / name: frozenset(tensors) for name, tensors in shards.items()}


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    if revision is None:
        if hub_id != AUDITED_HUB:
            raise CheckpointIncomplete(
                f"{hub_id}: no such folder here. As a hub id it needs a revision (a commit); only "
                f"{AUDITED_HUB} has a default."
            )
        revision = AUDITED_REVISION
    patterns = ["config.json", *TOKENIZER_FILES]
    patterns += ["*.safetensors", "*.safetensors.index.json"]
    patterns += ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except Exception as error:  # network, authentication and disk errors of many libraries
        raise CheckpointIncomplete(
            f"{hub_id} at {revision}: cannot be downloaded ({error}). Without a network, copy the "
            "repository's files into a folder and pass the folder."
        ) from error


def _read_shard(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a shard in its own host memory, one at a time."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as shard:
                names = list(shard.keys())
            for name in names:
                # Reopened per tensor: pages of the mapping leave memory with it.
                with safe_open(path, framework="pt") as shard:
                    tensor = shard.get_tensor(name).clone()
                yield name, tensor
        else:
            content = _load_pickle(path, headers_only=False)
            for name in list(content):
                tensor = content.pop(name).detach()
                if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
                    # A shared storage would stay in memory whole; other strides, other kernels.
                    tensor = tensor.clone(memory_format=torch.contiguous_format)
                yield name, tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointCorrupt(f"{path}: truncated or not safetensors: {error}") from None


def _load_pickle(path: Path, *, headers_only: bool) -> dict[str, Tensor]:
    """Return the named tensors of a pickle; `headers_only` reads no values where it can."""
    meta = headers_only and zipfile.is_zipfile(path)  # torch's older format has to be read whole
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch comments on old storage types
            content = torch.load(
                path, map_location="meta" if meta else "cpu", weights_only=True, mmap=meta
            )
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise CheckpointCorrupt(
            f"{path}: refused, since it holds more than tensors or is damaged: {reason}"
        ) from None
    except Exception as error:  # a damaged pickle can make the reader fail in any way
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise CheckpointCorrupt(f"{path}: truncated or not a torch file: {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointCorrupt(f"{path}: found {type(content).__name__}, expected named tensors.")
    for name, tensor in content.items():
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not plain:
            found = f"{name!r}: {type(tensor).__name__}"
            raise CheckpointCorrupt(f"{path}: found {found}, expected only plain tensors.")
    return content


def _read_headers(path: Path) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Yield name, shape and dtype of every tensor of a shard, without its values."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    header = shard.get_slice(name)
                    shape = tuple(header.get_shape())
                    values = header[:0] if shape else shard.get_tensor(name)
                    yield name, shape, values.dtype
        except (SafetensorError, OSError) as error:
            raise CheckpointCorrupt(f"{path}: truncated or not safetensors: {error}") from None
    else:
        for name, tensor in _load_pickle(path, headers_only=True).items():
            yield name, tuple(tensor.shape), tensor.dtype


def _check_headers(
    files: CheckpointFiles, expected: dict[str, tuple[int, ...]]
) -> set[torch.dtype]:
    """Account for every tensor before any weight is read; return the stored dtypes.

    Raises CheckpointIncomplete naming everything that is wrong.
    """
    problems: list[str] = []
    place: dict[str, str] = {}
    dtypes: set[torch.dtype] = set()
    for shard, names in files.shards.items():
        for name, shape, dtype in _read_headers(shard):
            if name in place:
                problem = f"{name} is already in {place[name]}"
            elif name not in expected:
                problem = f"unexpected tensor {name}"
            elif shape != expected[name]:
                problem = f"{name} has shape {list(shape)}, expected {list(expected[name])}"
            elif not dtype.is_floating_point:
                problem = f"{name} is {dtype}, expected floating point"
            elif names is not None and name not in names:
                problem = f"{name} is not placed in this shard by the index"
            else:
                problem = ""
                dtypes.add(dtype)
            if problem:
                problems.append(f"{shard.name}: {problem}")
            place.setdefault(name, shard.name)
    indexed = frozenset[str]().union(*(names or () for names in files.shards.values()))
    for name in sorted((indexed | expected.keys()) - place.keys()):
        problems.append(
            f"missing tensor {name}" if name in expected else f"unexpected tensor {name} (index)"
        )
    if problems:
        raise CheckpointIncomplete(
            f"{files.folder}: {len(problems)} tensors are wrong:\n  " + "\n  ".join(problems)
        )
    return dtypes


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))


def _tensor_digest(name: str, tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_HEAD)) == _LFS_HEAD
    except OSError as error:
        raise CheckpointCorrupt(f"{path}: cannot be read: {error.strerror}.") from None


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return stat.st_size, stat.st_mtime_ns
