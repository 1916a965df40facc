"""Where the weights go, and whether they fit, decided before anything is read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from charrm.errors import NotEnoughMemory
from charrm.model import CharRM, ModelConfig
from charrm.protocol import MAX_TOKENS

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Placement:
    """Device of every module, by name prefix; `{"": device}` when one device holds all."""

    devices: dict[str, torch.device]

    def device_of(self, name: str) -> torch.device:
        """Return the device of a tensor or module: that of its longest listed prefix."""
        prefix = name
        while prefix not in self.devices:
            prefix = prefix.rpartition(".")[0]
        return self.devices[prefix]


def plan_placement(model: CharRM, device: torch.device, dtype: torch.dtype) -> Placement:
    """Place a meta-initialised model on `device`, or over all GPUs when `cuda` alone is too small.

    Raises NotEnoughMemory with needed and free bytes per device and the options.
    """
    weights = sum(p.numel() * dtype.itemsize for p in model.parameters())
    needed = weights + workspace_bytes(model.config, dtype)
    free = {device: free_bytes(device)}
    if needed <= free[device]:
        return Placement({"": device})
    if device == torch.device("cuda"):
        free = {d: free_bytes(d) for d in _all_gpus()}
        split = split_over(model, free, workspace_bytes(model.config, dtype))
        if split is not None:
            return split
    found = ", ".join(f"{d}: {_gib(n)}" for d, n in free.items())
    raise NotEnoughMemory(
        f"the model needs {_gib(needed)} ({_gib(weights)} of weights, the rest for one row of "
        f"{MAX_TOKENS} tokens); free: {found}. Options: free memory on the device, choose another "
        "with --device, or use --device cuda on a machine whose GPUs hold it together."
    )


def split_over(model: CharRM, free: dict[torch.device, int], workspace: int) -> Placement | None:
    """Split whole layers over devices with accelerate; None when they do not fit together."""
    from accelerate import infer_auto_device_map

    budget = {i: max(0, n - workspace) for i, n in enumerate(free.values())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate comments on layers that do not fit
        plan = infer_auto_device_map(
            model, max_memory=budget, no_split_module_classes=["DecoderLayer"]
        )
    devices = list(free)
    if not all(isinstance(index, int) for index in plan.values()):
        return None  # accelerate fell back to host memory or disk
    return Placement({name: devices[index] for name, index in plan.items()})


def join_devices(model: CharRM, placement: Placement) -> CharRM:
    """Attach accelerate's hooks that carry the hidden states from device to device."""
    if "" in placement.devices:
        return model
    from accelerate import dispatch_model

    joined: nn.Module = dispatch_model(
        model, {name: str(d) for name, d in placement.devices.items()}, force_hooks=True
    )
    assert isinstance(joined, CharRM)
    return joined


def workspace_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Estimate the peak bytes beside the weights for one row of 4,096 tokens.

    Three (A, L, L) tensors live at the softmax; the feed-forward holds four of (L, F).
    """
    attention = 3 * config.num_attention_heads * MAX_TOKENS**2
    return (attention + 4 * MAX_TOKENS * config.intermediate_size) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device; for the host the smaller of system and cgroup limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup v2 limit
        return free
    return min(free, limit - used + int(stat["inactive_file"]))  # page cache can be reclaimed


def check_free(device: torch.device, needed: int) -> None:
    """Raise NotEnoughMemory unless a device has room for the tree engine's largest pack."""
    free = free_bytes(device)
    if needed > free:
        raise NotEnoughMemory(
            f"{device}: the tree engine may need {_gib(needed)} beside the weights, {_gib(free)} "
            "are free. Make packs or their attention smaller (--pack-tokens, --attention-mib), or "
            "use the eager engine."
        )


def _all_gpus() -> list[torch.device]:
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
