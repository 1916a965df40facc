"""`python -m bench.equality`: eager and tree over thousands of real prompts, every bit compared.

Made for machines on which the official order takes hours: eager rows are computed one by one in
single-threaded processes and kept in a ledger, so that a killed run goes on where it was. The tree
then computes all rows with one thread and again with two.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import charrm.engines.eager
import charrm.model
from bench.workload import PRESETS, SEED, BenchRow, random_model, read_rows, short_and_spread
from charrm.cli import run as run_commands
from charrm.engines import Outcome, TreeSettings, classes, plan, tree
from charrm.engines.classes import probe_classes
from charrm.engines.eager import EagerEngine
from charrm.engines.tree import TreeEngine
from charrm.errors import BadFile, RowError
from charrm.ledger import Ledger
from charrm.runtime import apply_settings

CPU = torch.device("cpu")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Part(str, Enum):
    """What can be computed apart; the comparison needs both."""

    eager = "eager"
    tree = "tree"


@app.command()
def equality(
    folder: Annotated[Path, typer.Argument(help="A set, as `golden fetch` or `synth` leaves it.")],
    run: Annotated[Path, typer.Argument(help="Folder of the run; an interrupted one goes on.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder with the tokenizer files.")],
    preset: Annotated[str, typer.Option(help="tiny, mid or 13b.")] = "mid",
    rows: Annotated[int, typer.Option(help="Distinct rows; the shortest of many roles.")] = 2000,
    spread: Annotated[int, typer.Option(help="How many of them spread over all lengths.")] = 40,
    processes: Annotated[int, typer.Option(help="Of the eager part.")] = 2,
    only: Annotated[Part | None, typer.Option(help="Compute one part and stop.")] = None,
) -> None:
    """Compare hidden state, logit and p of every row; one JSON line last, exit 1 if any differs."""
    run.mkdir(parents=True, exist_ok=True)
    chosen = _rows(folder, run, tokenizer, rows, spread)
    trees: dict[int, dict[str, dict[str, Any]]] = {}
    if only in (None, Part.eager):
        _check_manifest(run / "manifest.json", preset, [charrm.model, charrm.engines.eager])
        eager = _eager(run / "eager.jsonl", chosen, preset, processes)
    if only in (None, Part.tree):
        modules = [charrm.model, charrm.engines.eager, tree, plan, classes]
        _check_manifest(run / "manifest-tree.json", preset, modules, **asdict(TreeSettings()))
        trees = {n: _tree(run / f"tree-{n}.jsonl", chosen, preset, n) for n in (1, 2)}
    if only is not None:
        return
    # The eager rows came from single threads; a sample of them again with two.
    again = _eager_sample(chosen, preset)
    result: dict[str, Any] = {
        "preset": preset,
        "rows": len(chosen),
        "roles": len({row.role for row in chosen}),
        "shortest": min(len(row.ids) for row in chosen),
        "longest": max(len(row.ids) for row in chosen),
        "tokens": sum(len(row.ids) for row in chosen),
        "eager_2_threads_rows": len(again),
    }
    different = {f"tree_{n}_threads": _different(found, eager) for n, found in trees.items()}
    different["eager_2_threads"] = _different(again, eager)
    print(json.dumps(result | {"different": different}))
    raise typer.Exit(1 if any(different.values()) else 0)


def _different(found: dict[str, dict[str, Any]], eager: dict[str, dict[str, Any]]) -> list[str]:
    names = ("hidden", "logit", "p")
    return [slot for slot, bits in found.items() if any(bits[n] != eager[slot][n] for n in names)]


def _rows(folder: Path, run: Path, tokenizer: Path, count: int, spread: int) -> list[BenchRow]:
    """The chosen rows, in an order in which any beginning holds every kind of row."""
    kept = run / "rows.json"
    if not kept.exists():
        found = short_and_spread(read_rows(folder, tokenizer, lambda _, __: True), count, spread)
        found.sort(key=lambda row: hashlib.sha256(row.slot.encode()).digest())
        kept.write_text(json.dumps([vars(row) for row in found]), encoding="utf-8")
    return [BenchRow(**row) for row in json.loads(kept.read_text(encoding="utf-8"))]


def _check_manifest(
    path: Path, preset: str, modules: Sequence[ModuleType], **settings: int
) -> None:
    """Refuse to mix runs: what decides the numbers must be as it was."""
    sources = [Path(str(module.__file__)) for module in modules]
    manifest = {
        "preset": preset,
        "seed": SEED,
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "forward": [hashlib.sha256(path.read_bytes()).hexdigest() for path in sources],
        **settings,
    }
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != manifest:
        raise BadFile(f"{path}: the run was started with another preset, torch or code.")
    path.write_text(json.dumps(manifest), encoding="utf-8")


def _eager(
    path: Path, rows: Sequence[BenchRow], preset: str, processes: int
) -> dict[str, dict[str, Any]]:
    with Ledger(path) as ledger:
        todo = [row for row in rows if row.slot not in ledger.entries]
        if todo:
            context = multiprocessing.get_context("spawn")
            with context.Pool(processes, _start_worker, (preset,)) as pool:
                done = pool.imap_unordered(_eager_row, todo)
                for slot, bits in track(done, "eager", total=len(todo)):
                    ledger.append(slot, bits)
        return dict(ledger.entries)


def _start_worker(preset: str) -> None:
    global _worker
    torch.set_num_threads(1)
    apply_settings()
    _worker = EagerEngine(random_model(PRESETS[preset], CPU))


def _eager_row(row: BenchRow) -> tuple[str, dict[str, Any]]:
    [outcome] = _worker.score_tokens([row.ids], keep_hidden=True)
    return row.slot, {**_bits(outcome), "tokens": len(row.ids), "role": row.role}


_worker: EagerEngine


def _tree(
    path: Path, rows: Sequence[BenchRow], preset: str, threads: int
) -> dict[str, dict[str, Any]]:
    """All rows by role, so that a killed run loses one role."""
    by_role: dict[str, list[BenchRow]] = {}
    with Ledger(path) as ledger:
        for row in rows:
            if row.slot not in ledger.entries:
                by_role.setdefault(row.role, []).append(row)
        if by_role:
            torch.set_num_threads(threads)
            apply_settings()
            model = random_model(PRESETS[preset], CPU)
            engine = TreeEngine(model, probe_classes(model, CPU))
            for group in track(list(by_role.values()), f"tree, {threads} threads"):
                outcomes = engine.score_tokens([row.ids for row in group], keep_hidden=True)
                for outcome, row in zip(outcomes, group, strict=True):
                    ledger.append(row.slot, _bits(outcome))
        return dict(ledger.entries)


def _eager_sample(rows: Sequence[BenchRow], preset: str) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(2)
    engine = EagerEngine(random_model(PRESETS[preset], CPU))
    sample = sorted(rows, key=lambda row: len(row.ids))[:: max(1, len(rows) // 40)]
    found = {}
    for row in track(sample, "eager, 2 threads"):
        [outcome] = engine.score_tokens([row.ids], keep_hidden=True)
        found[row.slot] = _bits(outcome)
    return found


def _bits(outcome: Outcome | RowError) -> dict[str, Any]:
    if isinstance(outcome, RowError):
        raise outcome
    assert outcome.hidden is not None
    octets = outcome.hidden.contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "hidden": hashlib.sha256(octets).hexdigest(),
        "logit": outcome.logit,
        "p": outcome.p,
    }


def main() -> None:
    """Run the command; a charrm error becomes its message and exit status 2."""
    run_commands(app)


if __name__ == "__main__":
    main()
