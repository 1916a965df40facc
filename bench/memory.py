"""`python -m bench.memory`: the tree engine's peak memory against its bound, by pack size.

Peak is the growth of VmHWM (peak resident set) in a fresh process over one full pack, so that what
an earlier pack left in the allocator cannot hide it. One layer is enough: the tensors of a layer
are gone before the next one starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.measure import Memory
from bench.workload import PRESETS, random_model, shaped_rows
from charrm.engines import TreeSettings
from charrm.engines.classes import probe_classes
from charrm.engines.tree import TreeEngine
from charrm.runtime import apply_settings

CPU = torch.device("cpu")


def main(
    preset: Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}; one layer of it.")] = "mid",
    pack_tokens: Annotated[
        list[int] | None, typer.Option(help="May be repeated. Default: 4096, 16384 and 32768.")
    ] = None,
    attention_mib: Annotated[int, typer.Option(help="MiB for attention at a time.")] = 1024,
) -> None:
    """Measure each pack size in its own process; one JSON line last, exit 1 if any is above."""
    table = Table(box=box.SIMPLE)
    for name in ("pack tokens", "tokens of the pack", "bound MiB", "peak MiB", "peak / bound"):
        table.add_column(name, justify="right")
    results = []
    for size in pack_tokens or [4096, 16384, 32768]:
        command = [sys.executable, "-m", "bench.memory", "--measure", preset, str(size),
                   str(attention_mib)]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        results.append(result)
        bound, peak = result["bound_bytes"], result["peak_bytes"]
        table.add_row(
            str(size),
            str(result["tokens"]),
            f"{bound / 2**20:.0f}",
            f"{peak / 2**20:.0f}",
            f"{peak / bound:.2f}",
        )
    Console().print(table)
    print(json.dumps(results))
    raise typer.Exit(int(any(r["peak_bytes"] > r["bound_bytes"] for r in results)))


def measure(preset: str, pack_tokens: int, attention_mib: int) -> dict[str, int]:
    """Run one pack, as full as rows of the published shape fill it, in this process."""
    apply_settings()
    config = replace(PRESETS[preset], num_hidden_layers=1)
    model = random_model(config, CPU)
    settings = TreeSettings(pack_tokens, attention_mib << 20)
    engine = TreeEngine(model, probe_classes(model, CPU), settings)
    roles = 1 + pack_tokens // 1000
    rows = shaped_rows(config.vocab_size, roles=roles, contexts=3, metrics=3)
    pack = max(engine.plan(rows).packs, key=lambda pack: len(pack.tokens))
    chosen = [rows[i] for row in pack.rows for i in row.indices]
    engine.score_tokens([chosen[0][-40:]])  # what every forward needs once
    memory = Memory(CPU)
    engine.score_tokens(chosen)
    peak = memory.growth()
    if peak is None:
        raise RuntimeError("VmHWM cannot be read or reset here.")
    return {
        "pack_tokens": pack_tokens,
        "tokens": len(pack.tokens),
        "bound_bytes": engine.workspace_bytes(),
        "peak_bytes": peak,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
    else:
        typer.run(main)
