"""`python -m bench.equality`: eager and tree over thousands of real prompts, every bit compared.

Made for machines on which the official order takes hours: eager rows are computed one by one in
single-threaded processes and kept in a ledger, so that a killed run goes on where it was. The tree
then computes all rows with one thread and again with two.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import charrm.engines.eager
import charrm.model
from bench.workload import PRESETS, SEED, BenchRow, random_model, read_rows, short_and_spread
from charrm.engines import Outcome
from charrm.engines.classes import probe_classes
from charrm.engines.eager import EagerEngine
from charrm.engines.tree import TreeEngine
from charrm.errors import BadFile, RowError
from charrm.ledger import Ledger
from charrm.runtime import apply_settings

CPU = torch.device("cpu")


def main(
    folder: Annotated[Path, typer.Argument(help="A set, as `golden fetch` or `synth` leaves it.")],
    run: Annotated[Path, typer.Argument(help="Folder of the run; an interrupted one goes on.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder with the tokenizer files.")],
    preset: Annotated[str, typer.Option(help="tiny, mid or 13b.")] = "mid",
    rows: Annotated[int, typer.Option(help="Distinct rows; the shortest of many roles.")] = 2000,
    spread: Annotated[int, typer.Option(help="How many of them spread over all lengths.")] = 40,
    processes: Annotated[int, typer.Option(help="Of the eager part.")] = 2,
    eager_only: Annotated[bool, typer.Option(help="Stop before the tree.")] = False,
) -> None:
    """Compare hidden state, logit and p of every row; one JSON line last, exit 1 if any differs."""
    run.mkdir(parents=True, exist_ok=True)
    chosen = _rows(folder, run, tokenizer, rows, spread)
    _check_manifest(run, preset)
    eager = _eager(run / "eager.jsonl", chosen, preset, processes)
    if eager_only:
        return
    result: dict[str, Any] = {
        "preset": preset,
        "rows": len(chosen),
        "roles": len({row.role for row in chosen}),
        "shortest": min(len(row.ids) for row in chosen),
        "longest": max(len(row.ids) for row in chosen),
        "tokens": sum(len(row.ids) for row in chosen),
    }
    failed = False
    for threads in (1, 2):
        torch.set_num_threads(threads)
        apply_settings()
        model = random_model(PRESETS[preset], CPU)
        engine = TreeEngine(model, probe_classes(model, CPU))
        different = []
        for outcome, row in _tree(engine, chosen, f"tree, {threads} threads"):
            if _bits(outcome) != {k: eager[row.slot][k] for k in ("hidden", "logit", "p")}:
                different.append(row.slot)
        result[f"different_tree_{threads}_threads"] = different
        failed = failed or bool(different)
    # The eager numbers above came from single threads; a sample of them again with two.
    engine_two = EagerEngine(random_model(PRESETS[preset], CPU))
    sample = sorted(chosen, key=lambda row: len(row.ids))[:: max(1, len(chosen) // 40)]
    different = []
    for row in track(sample, "eager, 2 threads"):
        [outcome] = engine_two.score_tokens([row.ids], keep_hidden=True)
        if _bits(outcome) != {k: eager[row.slot][k] for k in ("hidden", "logit", "p")}:
            different.append(row.slot)
    result |= {"eager_2_threads_rows": len(sample), "different_eager_2_threads": different}
    print(json.dumps(result))
    raise typer.Exit(1 if failed or different else 0)


def _rows(folder: Path, run: Path, tokenizer: Path, count: int, spread: int) -> list[BenchRow]:
    """The chosen rows, in an order in which any beginning holds every kind of row."""
    kept = run / "rows.json"
    if not kept.exists():
        found = short_and_spread(read_rows(folder, tokenizer, lambda _, __: True), count, spread)
        found.sort(key=lambda row: hashlib.sha256(row.slot.encode()).digest())
        kept.write_text(json.dumps([vars(row) for row in found]), encoding="utf-8")
    return [BenchRow(**row) for row in json.loads(kept.read_text(encoding="utf-8"))]


def _check_manifest(run: Path, preset: str) -> None:
    """Refuse to mix runs: what decides the eager numbers must be as it was."""
    sources = [charrm.model.__file__, charrm.engines.eager.__file__]
    manifest = {
        "preset": preset,
        "seed": SEED,
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "forward": [hashlib.sha256(Path(s).read_bytes()).hexdigest() for s in sources],
    }
    path = run / "manifest.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != manifest:
        raise BadFile(f"{path}: the run was started with another preset, torch or forward.")
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
    engine: TreeEngine, rows: Sequence[BenchRow], label: str
) -> Iterable[tuple[Outcome | RowError, BenchRow]]:
    by_role: dict[str, list[BenchRow]] = {}
    for row in rows:
        by_role.setdefault(row.role, []).append(row)
    for group in track(list(by_role.values()), label):
        outcomes = engine.score_tokens([row.ids for row in group], keep_hidden=True)
        yield from zip(outcomes, group, strict=True)


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


if __name__ == "__main__":
    typer.run(main)
