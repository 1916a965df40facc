"""Device, dtype and torch settings that decide bits, each with its reason, and their state here."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from typing import Any

import torch
from torch.nn import functional as F

import charrm
from charrm.errors import InvalidSetting

PROTOCOL_DTYPE = torch.bfloat16
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# The official script ran with torch's defaults; the settings below pin those that decide bits, so
# that an environment or an embedding program cannot change a score unnoticed.
SETTINGS: dict[str, tuple[Any, str]] = {
    "deterministic_algorithms": (
        False,
        "no operation of the forward has a nondeterministic kernel; the switch would ask cuBLAS "
        "for another workspace than the official run had",
    ),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (
        True,
        "torch's default; decides about split-K in cuBLAS and so about bits",
    ),
    "float32_matmul_precision": (
        "highest",
        "float32 is a measurement; TF32 or bf16 products would not be float32",
    ),
    "mkldnn.enabled": (True, "torch's default; decides which CPU library multiplies bf16"),
}


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype; raises InvalidSetting for anything but bfloat16 and float32."""
    if name not in _DTYPES:
        raise InvalidSetting(f"dtype: found {name!r}, expected one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def parse_device(name: str) -> torch.device:
    """Return the device; `auto` is CUDA when there is one. Raises InvalidSetting."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidSetting(
            f"device: found {name!r}, expected auto, cpu, cuda or cuda:N."
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidSetting(f"device: found {name!r}, expected auto, cpu, cuda or cuda:N.")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        raise InvalidSetting(f"device: found {name!r}, but this machine has {count} CUDA devices.")
    return device


def apply_settings() -> None:
    """Set what decides bits, as listed in `SETTINGS`."""
    torch.use_deterministic_algorithms(SETTINGS["deterministic_algorithms"][0])
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = SETTINGS[
        "cuda.matmul.allow_bf16_reduced_precision_reduction"
    ][0]
    torch.set_float32_matmul_precision(SETTINGS["float32_matmul_precision"][0])
    torch.backends.mkldnn.enabled = SETTINGS["mkldnn.enabled"][0]


def describe_device(device: torch.device) -> str:
    """Return the device with its hardware name."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({_cpu_name()})"


def environment(device: torch.device) -> dict[str, Any]:
    """Return what else can change bits on this machine."""
    return {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "settings": {name: value for name, (value, _) in SETTINGS.items()},
        "numeric_fingerprint": numeric_fingerprint(device),
    }


def library_versions() -> dict[str, str]:
    """Return the versions of everything between a row and its score."""
    names = ("transformers", "sentencepiece", "accelerate", "safetensors")
    own = {"charrm": charrm.__version__, "torch": torch.__version__}
    return own | {name: version(name) for name in names}


def numeric_fingerprint(device: torch.device) -> str:
    """Return a short digest of fixed bf16 operations computed here.

    Two machines with other kernels usually differ in it; equal fingerprints promise nothing.
    """
    digest = hashlib.sha256()
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        for rows, inner, columns in ((33, 96, 64), (40, 1040, 128)):
            a, b = (_integers(n, inner).to(device) for n in (rows, columns))
            product = F.linear(a, b)
            weights = F.softmax(product * 0.25, dim=-1)
            back = torch.matmul(weights, b)
            for value in (product, weights, back, F.silu(back), torch.sigmoid(back)):
                digest.update(value.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _integers(rows: int, columns: int) -> torch.Tensor:
    """Fixed numbers in [-1, 1), exact in bf16, from integer arithmetic alone."""
    index = torch.arange(rows * columns, dtype=torch.int64)
    values = (index * 1103515245 + 12345) % 2**31 % 251 - 125
    return (values.to(torch.float32) / 128).to(torch.bfloat16).view(rows, columns)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
