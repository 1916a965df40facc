"""`python -m bench.loading`: peak memory and time of opening a synthetic checkpoint.

The checkpoint has the published layout around layers sized to the asked total. Each layout is
opened in a fresh process; peak is the growth of its VmHWM (peak resident set, /proc/self/status)
over the resident set just before opening, so file pages that were mapped count as well.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from charrm.demo import build_demo_checkpoint
from charrm.model import CharRM, ModelConfig
from charrm.scorer import Scorer

LAYOUTS = ("safetensors shards", "safetensors file", "pickle shards", "pickle file")
HIDDEN, HEADS, FEED_FORWARD = 1280, 5, 3424  # the published proportions at a quarter of the width


def main(megabytes: Annotated[int, typer.Option(help="Size of the checkpoint.")] = 1024) -> None:
    """Measure every layout and print one JSON line last."""
    table = Table(box=box.SIMPLE)
    for name in ("layout", "checkpoint MB", "peak MB", "peak / checkpoint", "seconds"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    results = []
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            size = write_checkpoint(Path(folder) / "checkpoint", megabytes * 2**20, layout)
            measured = measure(Path(folder) / "checkpoint")
        results.append({"layout": layout, "bytes": size, **measured})
        ratio = measured["peak_bytes"] / size
        table.add_row(
            layout,
            f"{size / 1e6:.0f}",
            f"{measured['peak_bytes'] / 1e6:.0f}",
            f"{ratio:.3f}",
            f"{measured['seconds']:.1f}",
        )
    Console().print(table)
    print(json.dumps(results))


def write_checkpoint(folder: Path, size: int, layout: str) -> int:
    """Write a loadable checkpoint of about `size` bytes; return the bytes of its weights."""
    build_demo_checkpoint(folder.with_name("demo"))
    folder.mkdir()
    for path in folder.with_name("demo").iterdir():
        if path.suffix not in (".safetensors",) and "index" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    per_layer = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * FEED_FORWARD)
    config |= {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": max(2, size // per_layer),
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in CharRM(ModelConfig.from_file(folder / "config.json"))
            .state_dict()
            .items()
        }
    shards = 8 if layout.endswith("shards") else 1
    names = sorted(shapes)
    chunks = [names[i::shards] for i in range(shards)]
    stem, suffix = ("pytorch_model", "bin") if "pickle" in layout else ("model", "safetensors")
    weight_map: dict[str, str] = {}
    for number, chunk in enumerate(chunks, start=1):
        file = f"{stem}-{number:05d}-of-{shards:05d}.{suffix}" if shards > 1 else f"{stem}.{suffix}"
        tensors = {name: torch.full(shapes[name], 0.01, dtype=torch.bfloat16) for name in chunk}
        if suffix == "bin":
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(chunk, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sum(2 * math.prod(shape) for shape in shapes.values())


def measure(folder: Path) -> dict[str, float]:
    """Open the checkpoint in a fresh process; return its peak growth and seconds."""
    command = [sys.executable, "-m", "bench.loading", "--open", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def open_and_report(folder: str) -> None:
    """Run in the fresh process."""
    import time

    # A first small opening brings in every library, which is not part of loading.
    Scorer.open(Path(folder).with_name("demo"), device="cpu")
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present
    begin = time.perf_counter()
    Scorer.open(folder, device="cpu")
    seconds = time.perf_counter() - begin
    print(json.dumps({"peak_bytes": _status("VmHWM") - before, "seconds": round(seconds, 2)}))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--open"]:
        open_and_report(sys.argv[2])
    else:
        typer.run(main)
