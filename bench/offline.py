"""`python -m bench.offline`: engines side by side over the same rows, in one interleaved run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import charrm
from bench.controls import CONTROLS
from bench.measure import FORMULA, Rows, Shape, Workload, describe, interleave, summarise
from bench.workload import PRESETS, SEED, random_model, read_rows, result_files, shaped_rows
from charrm.charactereval import read_trans
from charrm.cli import TREE, AttentionMib, BlockTokens, PackTokens
from charrm.cli import run as run_commands
from charrm.engines import Engine, TreeSettings
from charrm.engines.classes import probe_classes
from charrm.engines.eager import EagerEngine
from charrm.engines.tree import TreeEngine
from charrm.model import CharRM
from charrm.runtime import apply_settings, describe_device, environment, parse_device

if TYPE_CHECKING:
    from bench.plots import Panel

ENGINES = ("eager", "tree", *CONTROLS)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
err = Console(stderr=True, soft_wrap=True)


@app.command()
def offline(
    preset: Annotated[str, typer.Option(help=f"Random model: {', '.join(PRESETS)}.")] = "tiny",
    engines: Annotated[
        str, typer.Option(help="Which, with commas; eager always runs.")
    ] = ",".join(ENGINES),
    set_folder: Annotated[
        Path | None,
        typer.Option("--set", help="A set, as `golden fetch` or `synth` leaves it; with "
                     "--tokenizer. Without it, random ids that share prefixes like its rows."),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with the tokenizer files.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Only this generating model of the set; repeatable.")
    ] = None,
    models: Annotated[
        list[int] | None,
        typer.Option(help="Rows of how many generating models, the first by name. Repeat it for "
                     "several workloads in one run: --models 1 --models 5. Default: those of "
                     "--model, or 1."),
    ] = None,
    roles: Annotated[
        list[int] | None,
        typer.Option(help="How many roles, the first by name (which says nothing of their "
                     "length). Once for all workloads, or once for each in the same order. "
                     "Default: all of a set, which is 0, otherwise 2."),
    ] = None,
    contexts: Annotated[
        list[int] | None,
        typer.Option(help="At most how many test ids of a role, the first of the file. Once or "
                     "for each workload. Default: as for --roles."),
    ] = None,
    scale: Annotated[
        float, typer.Option(min=0.01, help="Without --set: factor on lengths of about 800.")
    ] = 1.0,
    sample: Annotated[
        int,
        typer.Option(min=0, help="All engines but tree run only so many rows, spread evenly over "
                     "the lengths, and their time is scaled up. 0: all rows."),
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything runs.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="torch's on the CPU. Default: its own choice.")
    ] = None,
    pack_tokens: PackTokens = TREE.pack_tokens,
    attention_mib: AttentionMib = TREE.attention_bytes >> 20,
    block_tokens: BlockTokens = TREE.block_tokens,
    plot: Annotated[Path | None, typer.Option(help="SVG of speed and differences.")] = None,
) -> None:  # fmt: skip
    """Speed, memory and scores of every engine on the same rows, compared with eager.

    Engines: eager (the official order, row by row), tree (shared prefixes), and for comparison
    only padded (batches of 8), sdpa (fused attention), relative (ALiBi by distance, in float32,
    as vLLM and flash-attn have it) and fp32 (float32 weights).

    Each repeat runs all workloads with all engines, half of eager's rows before the others and
    half after. Tables first, one JSON line last. Exit status 1 when a row of tree differs from
    eager in any bit, 2 when there is no result.
    """
    _known("--preset", [preset], list(PRESETS))
    names = _names(engines)
    shapes = _shapes(models, roles, contexts, model or [], set_folder is not None)
    if plot:
        from bench.plots import write_plot  # says what is missing before hours have passed
    place = parse_device(device)
    if threads:
        torch.set_num_threads(threads)
    apply_settings()
    if set_folder:
        found = set_rows(set_folder, tokenizer, model or [], shapes)
    else:
        vocab = PRESETS[preset].vocab_size
        found = [(shape, shaped_rows(vocab, **shape._asdict(), scale=scale)) for shape in shapes]
    workloads = [Workload.build(shape, rows, sample) for shape, rows in found]
    _check_ids(preset, workloads)

    begin = time.perf_counter()
    settings = TreeSettings(pack_tokens, attention_mib << 20, block_tokens)
    made = make_engines(names, random_model(PRESETS[preset], place), place, settings)
    setup = time.perf_counter() - begin
    console = Console(width=None if sys.stdout.isatty() else 132)
    tree = made.get("tree")
    configs = {name: PRESETS[name] for name in (preset, "13b")}
    entries = []
    for workload in workloads:
        plan = tree.plan(workload.rows) if isinstance(tree, TreeEngine) else None
        entries.append(describe(workload, plan, configs))
        console.print(_title(entries[-1]), style="bold")
        console.print(_ceiling_table(entries[-1]))
    console.print(FORMULA, style="dim")
    with Progress(console=err, transient=True) as progress:
        runs = interleave(made, workloads, repeats, place, progress)
    for entry, repeated in zip(entries, runs, strict=True):
        entry["engines"] = summarise(repeated, entry.get("token_ratio"))
        console.print(_title(entry), style="bold")
        console.print(_sample_note(entry))
        console.print(_engine_table(entry))
    if plot:
        write_plot(plot, [_panel(entry) for entry in entries])
    result = {
        "preset": preset,
        "config": asdict(PRESETS[preset]),
        "seed": SEED,
        "rows_from": set_folder.name if set_folder else f"shaped_rows(scale={scale:g})",
        "model": model,
        "repeats": repeats,
        **asdict(settings),
        "charrm": charrm.__version__,
        "torch": str(torch.__version__),
        "device": describe_device(place),
        "environment": environment(place),
        "setup_seconds": round(setup, 2),
        "workloads": entries,
    }
    print(json.dumps(result, allow_nan=False))
    wrong = sum(e["sample"]["rows"] - e["engines"].get("tree", e["engines"]["eager"])["equal"]
                for e in entries)  # fmt: skip
    if wrong:
        err.print(f"{wrong} rows of tree differ from eager.", style="bold red")
        raise typer.Exit(1)


def _names(engines: str) -> list[str]:
    names = [name.strip() for name in engines.split(",")]
    _known("--engines", names, ENGINES)
    return [name for name in ENGINES if name in names or name == "eager"]


def _known(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"found {', '.join(map(repr, unknown))}, expected of: {', '.join(known)}.",
            param_hint=option,
        )


def _shapes(
    models: list[int] | None,
    roles: list[int] | None,
    contexts: list[int] | None,
    named: Sequence[str],
    has_set: bool,
) -> list[Shape]:
    models = models or [len(named) or 1]
    columns = [models]
    least = 0 if has_set else 1
    for option, values in (("--roles", roles), ("--contexts", contexts)):
        values = values or [0 if has_set else 2]
        if len(values) not in (1, len(models)):
            raise typer.BadParameter(
                f"found {len(values)} for {len(models)} workloads (--models), expected one for "
                "all or one for each.", param_hint=option,
            )  # fmt: skip
        columns.append(values * (len(models) // len(values)))
    if min(min(values) for values in columns[1:]) < least or min(models) < 1:
        raise typer.BadParameter(
            f"expected at least 1 model, {least} roles and {least} contexts.",
            param_hint="--models, --roles, --contexts",
        )
    if named and not has_set:
        raise typer.BadParameter("names files of a set: give --set.", param_hint="--model")
    return [Shape(*values) for values in zip(*columns, strict=True)]


def set_rows(
    folder: Path, tokenizer: Path | None, named: Sequence[str], shapes: Sequence[Shape]
) -> list[tuple[Shape, Rows]]:
    """Choose the rows of each shape by their names and tokenize each once.

    Raises typer.BadParameter for what the set does not have, and what `read_rows` raises.
    """
    if tokenizer is None:
        raise typer.BadParameter(
            "a set holds text: give the folder with the tokenizer files.",
            param_hint="--tokenizer",
        )
    files = result_files(folder)
    _known("--model", named, list(files))
    pool = [name for name in files if not named or name in named]
    tests: dict[str, dict[str, None]] = {}  # test ids of each role, in the order of the file
    for row in read_trans(files[pool[0]]):
        tests.setdefault(row.role, {})[str(row.fields["id"])] = None
    most = Shape(max(s.models for s in shapes), max(s.roles for s in shapes), 0)
    if most.models > len(pool) or most.roles > len(tests):
        raise typer.BadParameter(
            f"asked for {most.models} models and {most.roles} roles, found {len(pool)} and "
            f"{len(tests)}.", param_hint="--models, --roles",
        )  # fmt: skip
    chosen = []
    for shape in shapes:
        kept_roles = sorted(tests)[: shape.roles or None]
        kept = {(r, test) for r in kept_roles for test in [*tests[r]][: shape.contexts or None]}
        shown = Shape(shape.models, len(kept_roles), shape.contexts)
        chosen.append((shown, set(pool[: shape.models]), kept))
    of_any = {(name, role) for _, names, kept in chosen for name in names for role, _ in kept}
    tests_of_any = {test for *_, kept in chosen for _, test in kept}
    rows = read_rows(folder, tokenizer, lambda *of: of in of_any, tests_of_any)
    return [
        (shape, [row.ids for row in rows
                 if row.slot.partition("/")[0] in names and (row.role, row.test_id) in kept])
        for shape, names, kept in chosen
    ]  # fmt: skip


def make_engines(
    names: Sequence[str], model: CharRM, device: torch.device, settings: TreeSettings
) -> dict[str, Engine]:
    """Open engines by name, in this order; `settings` are the tree's. Raises NotCertified where the
    machine allows no sharing, InvalidSetting for settings that are too small."""
    made: dict[str, Engine] = {}
    for name in names:
        if name == "eager":
            made[name] = EagerEngine(model)
        elif name == "tree":
            made[name] = TreeEngine(model, probe_classes(model, device), settings)
        else:
            made[name] = CONTROLS[name](model)
    return made


def _check_ids(preset: str, workloads: Sequence[Workload]) -> None:
    highest = max(max(ids) for workload in workloads for ids in workload.rows)
    if highest >= PRESETS[preset].vocab_size:
        raise typer.BadParameter(
            f"{preset} knows {PRESETS[preset].vocab_size} ids and the rows have {highest}; take "
            "mid or 13b.", param_hint="--preset",
        )  # fmt: skip


def _title(entry: dict[str, Any]) -> str:
    contexts = f", contexts per role {entry['contexts']}" if entry["contexts"] else ""
    models, roles = (
        f"{entry[name]} {name if entry[name] > 1 else name[:-1]}" for name in ("models", "roles")
    )
    return f"{models}, {roles}{contexts}: {entry['rows']:,} rows"


def _ceiling_table(entry: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("ceiling", "official loop", "tree", "ratio"):
        table.add_column(name, justify="left" if name == "ceiling" else "right")
    unique, ratio = entry.get("unique_tokens"), entry.get("token_ratio")
    table.add_row("tokens", f"{entry['total_tokens']:,}", f"{unique:,}" if ratio else "-",
                  f"{ratio:.2f}" if ratio else "-")  # fmt: skip
    for config, flops in entry["flops"].items():
        cells = []
        for side in ("loop", "tree"):
            parts = [flops.get(f"{side}_{part}") for part in ("linears", "attention")]
            cells.append("-" if None in parts else
                         f"{sum(parts) / 1e9:,.1f} ({parts[0] / 1e9:,.1f} linears)")  # fmt: skip
        ratio = flops.get("loop_over_tree")
        table.add_row(f"GFLOPs, {config}", *cells, f"{ratio:.2f}" if ratio else "-")
    return table


def _sample_note(entry: dict[str, Any]) -> str:
    sample, rows = entry["sample"], entry["rows"]
    if sample["rows"] == rows:
        return f"Every engine ran all rows, of {entry['shortest']} to {entry['longest']} tokens."
    return (
        f"All engines but tree ran {sample['rows']} rows, from the middles of "
        f"{sample['rows']} equal parts of the rows by length; their time is multiplied by "
        f"{rows / sample['rows']:.4g}. So scaled, the sample has {sample['tokens_scaled']:.1%} of "
        f"the tokens and {sample['pairs_scaled']:.1%} of the attention pairs. Rows, differences "
        "and, but for tree, peaks are the sample's."
    )


def _engine_table(entry: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("engine", "rows/s", "times eager", "of token ratio", "peak MiB", "equal rows",
                 "mean diff", "max diff"):  # fmt: skip
        table.add_column(name, justify="left" if name == "engine" else "right")
    for name, found in entry["engines"].items():
        share, peak = found.get("ratio_over_token_ratio"), found["peak_bytes"]
        table.add_row(
            name,
            _spread(found["rows_per_second"]),
            _spread(found["ratio"]) if name != "eager" else "1",
            f"{share:.2f}" if share else "",
            "-" if peak is None else f"{peak / 2**20:,.0f}",
            f"{found['equal']}/{entry['sample']['rows']}",
            f"{found['mean_difference']:.4f}",
            f"{found['max_difference']:.4f}",
        )
    return table


def _spread(values: Sequence[float]) -> str:
    median, low, high = (f"{value:.3g}" for value in values)
    return f"{median} ({low}..{high})"


def _panel(entry: dict[str, Any]) -> Panel:
    from bench.plots import Panel, Point

    found = entry["engines"].items()
    points = [Point(n, e["ratio"][0], e["mean_difference"], e["max_difference"]) for n, e in found]
    return Panel(_title(entry), points)


def main() -> None:
    """Run the command; a charrm error becomes its message and exit status 2."""
    run_commands(app)


if __name__ == "__main__":
    main()
