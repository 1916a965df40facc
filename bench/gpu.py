"""`python -m bench.gpu OUT`: what one large GPU gives in ten minutes, without network or files.

Random weights of the published sizes and random rows of the published shape; no transformers. Every
step appends lines to OUT/results.jsonl as it goes, so that a run that is cut off still counts. The
same code runs in miniature on a CPU (`--preset tiny --device cpu --rows 12 --minutes 1`), where
its numbers say nothing about a GPU.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
import typer
from rich.console import Console
from torch.nn.functional import linear

import charrm
from bench.gpu_probe import Line, Probe, synchronize
from bench.gpu_summary import brief, extrapolate, table
from bench.measure import (
    Shape,
    Workload,
    describe,
    sample_indices,
)
from bench.workload import PRESETS, SEED, random_model, shaped_rows
from charrm.cli import TREE, AttentionMib, BlockTokens, PackTokens
from charrm.cli import run as run_commands
from charrm.engines import Outcome, TreeSettings
from charrm.engines.classes import probe_classes
from charrm.engines.eager import EagerEngine
from charrm.engines.tree import TreeEngine
from charrm.errors import NotCertified, NotFinite, RowError
from charrm.files import write_atomically
from charrm.model import CharRM
from charrm.protocol import MAX_TOKENS, score_from_p
from charrm.runtime import apply_settings, describe_device, environment, parse_device

LARGEST = {"tiny": 256, "mid": 1024, "13b": MAX_TOKENS}
CASE_LENGTHS = 32  # so many lengths of the rows are added to the probe's own
WORST = 20  # different rows that the summary names
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "CUDA_LAUNCH_BLOCKING",
             "CUDA_MODULE_LOADING", "DISABLE_ADDMM_CUDA_LT", "NVIDIA_TF32_OVERRIDE",
             "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_TUNABLEOP_ENABLED", "TORCH_BLAS_PREFER_CUBLASLT",
             "TORCH_CUBLASLT_UNIFIED_WORKSPACE")  # fmt: skip
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
err = Console(stderr=True, soft_wrap=True)


@dataclass
class Run:
    """The options, and what the steps leave for those after them and for the summary."""

    results: BinaryIO  # unbuffered
    device: torch.device
    preset: str
    largest: int
    rows: list[list[int]]
    settings: TreeSettings
    token_ratio: float
    step: str = "run"
    deadline: float = 0.0
    model: CharRM | None = None
    summary: dict[str, Any] = field(default_factory=dict)

    def write(self, line: Line) -> None:
        """Append a JSON line; it is on the disk when this returns."""
        data = json.dumps({"step": self.step, **line}, allow_nan=False).encode() + b"\n"
        while data:
            data = data[self.results.write(data) :]
        os.fsync(self.results.fileno())

    def keep(self, **found: Any) -> None:
        """Write a line and put it into the summary."""
        self.write(found)
        self.summary.setdefault(self.step, {}).update(found)

    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def the_model(self) -> CharRM:
        if self.model is None:
            raise RuntimeError("no model: the step weights did not end")
        return self.model


@app.command()
def gpu(
    out: Annotated[Path, typer.Argument(help="Folder of the results; a used one is refused.")],
    preset: Annotated[str, typer.Option(help=f"Random model: {', '.join(PRESETS)}.")] = "13b",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="Of official length, eager against tree.")] = 300,
    minutes: Annotated[
        float, typer.Option(min=0, help="Of the whole run; what is left then is skipped.")
    ] = 9.0,
    largest: Annotated[
        int | None,
        typer.Option(min=64, max=MAX_TOKENS, help="Longest row and attention width; the linears "
                     "see 8 times as many rows. Default: 4096 for 13b, less for the small ones."),
    ] = None,
    pack_tokens: PackTokens = TREE.pack_tokens,
    attention_mib: AttentionMib = TREE.attention_bytes >> 20,
    block_tokens: BlockTokens = TREE.block_tokens,
    token_ratio: Annotated[
        float, typer.Option(help="Of the published rows, tokens over those of their tree.")
    ] = 24.7,
) -> None:  # fmt: skip
    """Facts, weights, a probe of the kernels, eager against tree, an extrapolation.

    Lines in OUT/results.jsonl, OUT/summary.json, a table, and last the summary in one JSON line,
    with the members of the probe's classes counted instead of listed. Exit status 1 when a
    row of tree differs from eager in any bit or a step failed; a cut-off alone is none of these.
    """
    begin = time.monotonic()
    if preset not in PRESETS:
        raise typer.BadParameter(f"found {preset!r}, expected of: {', '.join(PRESETS)}.")
    place, longest = parse_device(device), largest or LARGEST[preset]
    apply_settings()
    out.mkdir(parents=True, exist_ok=True)
    try:
        results = (out / "results.jsonl").open("xb", buffering=0)
    except FileExistsError:
        raise typer.BadParameter(f"{out / 'results.jsonl'} exists; name a new folder.") from None
    settings = TreeSettings(pack_tokens, attention_mib << 20, block_tokens)
    ids = official_rows(PRESETS[preset].vocab_size, rows, longest)
    run = Run(results, place, preset, longest, ids, settings, token_ratio)
    with results:
        run.keep(device=describe_device(place), preset=preset, rows=rows, largest=longest,
                 minutes=minutes, charrm=charrm.__version__, seed=SEED,
                 **asdict(settings))  # fmt: skip
        statuses = run.summary["steps"] = run_steps(run, begin, 60 * minutes)
    run.summary["seconds"] = round(time.monotonic() - begin, 2)
    text = json.dumps(run.summary, allow_nan=False)
    write_atomically(out / "summary.json", text + "\n")
    Console(width=None if sys.stdout.isatty() else 132).print(table(run))
    print(json.dumps(brief(run.summary), allow_nan=False))
    compared = run.summary.get("compare", {})
    different = compared.get("compared", 0) - compared.get("equal", 0)
    if different or any(status["status"] == "failed" for status in statuses):
        err.print(f"{different} rows differ; see {out / 'results.jsonl'}.", style="bold red")
        raise typer.Exit(1)


def official_rows(vocab: int, count: int, longest: int) -> list[list[int]]:
    """Rows in an order of which any beginning holds all lengths, about evenly."""
    dialogues = -(-count // 6)
    contexts = min(10, dialogues)
    roles = -(-dialogues // contexts)
    rows = shaped_rows(vocab, roles=roles, contexts=contexts, scale=longest / MAX_TOKENS)
    rows = [ids[-longest:] for ids in rows[:count]]
    ordered = sorted(rows, key=lambda ids: (len(ids), ids))
    places = sorted(range(len(rows)), key=lambda i: f"{i:020b}"[::-1])  # van der Corput
    return [ordered[i] for i in places]


def run_steps(run: Run, begin: float, seconds: float) -> list[Line]:
    """Run every step until its share of the time has passed; a failing one stops only itself."""
    statuses = []
    for run.step, share, step in STEPS:
        run.deadline = begin + share * seconds
        started = time.monotonic()
        status: Line = {"name": run.step, "status": "skipped: time"}
        if started < begin + seconds:
            run.write({"status": "started"})
            err.print(f"{started - begin:6.1f} s  {run.step}", highlight=False)
            try:
                status["status"] = "done" if step(run) else "cut: time"
            except Exception as error:
                status |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            status["seconds"] = round(time.monotonic() - started, 2)
            free_memory(run.device)
        run.write({k: v for k, v in status.items() if k != "name"})
        statuses.append(status)
    return statuses


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # after some errors every call fails
            torch.cuda.empty_cache()


def facts(run: Run) -> bool:
    """Versions, settings, and what the device gives at best."""
    device, size = run.device, 2 * run.largest
    run.keep(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        python=sys.version.split()[0],
        libraries={
            name: d.version
            for d in distributions()
            if (name := str(d.metadata["Name"] or "")).startswith(("nvidia-cublas", "triton"))
        },
        variables={name: os.environ.get(name) for name in VARIABLES},
        allow_bf16_reduced_precision_reduction=(
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        allow_split_k=getattr(  # None before torch had it
            torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k", None
        ),
        preferred_blas_library=str(torch.backends.cuda.preferred_blas_library()),
    )
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        run.keep(
            memory_bytes=found.total_memory,
            free_bytes=torch.cuda.mem_get_info(device)[0],
            multiprocessors=found.multi_processor_count,
            capability=f"{found.major}.{found.minor}",
            nvidia_smi=nvidia_smi(),
        )
    with torch.inference_mode():
        a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in "ab")
        seconds = timed(lambda: linear(a, b), device, run.late)
        run.keep(matmul_size=size, matmul_tflops=2 * size**3 / seconds / 1e12)
        source = torch.empty(32 * size**2, dtype=torch.uint8, device=device).fill_(1)
        target = torch.empty_like(source)
        seconds = timed(lambda: target.copy_(source), device, run.late)
        run.keep(copy_bytes=len(source), bandwidth_gb_per_s=2 * len(source) / seconds / 1e9)
    run.keep(environment=environment(device))
    return True


def nvidia_smi() -> str | None:
    """Driver, clocks and power limit in words; None without the program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    wanted = "driver_version,name,memory.total,clocks.max.sm,clocks.sm,power.limit"
    command = [program, f"--query-gpu={wanted}", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    return f"{wanted}: {ended.stdout.strip() or ended.stderr.strip()}"


def timed(work: Callable[[], object], device: torch.device, late: Callable[[], bool]) -> float:
    """Median seconds of up to ten calls, after one that is not counted."""
    work()
    seconds = []
    for _ in range(10):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        if late() or sum(seconds) > 2:
            break
    return sorted(seconds)[len(seconds) // 2]


def weights(run: Run) -> bool:
    """Random weights drawn on the device."""
    begin = time.perf_counter()
    run.model = random_model(PRESETS[run.preset], run.device)
    synchronize(run.device)
    size = sum(weight.nbytes for weight in run.model.state_dict().values())
    run.keep(seconds=time.perf_counter() - begin, bytes=size, dtype="bfloat16")
    return True


def probe(run: Run) -> bool:
    """Which shapes of which operation give the same bits; see `bench.gpu_probe`."""
    lengths = sorted({len(ids) for ids in run.rows})
    chosen = [lengths[i] for i in sample_indices(len(lengths), CASE_LENGTHS)]
    prober = Probe(run.the_model(), run.device, run.largest, chosen)
    families: dict[str, Line] = {}
    run.keep(official_lengths=sorted(prober.official))
    run.summary[run.step]["families"] = families

    def emit(line: Line) -> None:
        run.write(line)
        if line.get("summary"):
            families[line.pop("family")] = line

    return prober.run(emit, run.late)


def compare(run: Run) -> bool:
    """Every row through the tree, then one by one in the official order while there is time."""
    rows, eager = run.rows, EagerEngine(run.the_model())
    tree = open_tree(run)
    found = tree_outcomes(run, tree) if tree else None
    eager.score_tokens(rows[:1])  # what loads lazily is not timed
    lines = []
    for index, ids in enumerate(rows):
        if run.late():
            break
        begin = time.perf_counter()
        [outcome] = eager.score_tokens([ids], keep_hidden=True)  # read to the host: synchronous
        line: Line = {"row": index, "length": len(ids), "eager_s": time.perf_counter() - begin}
        other = found[index] if found else None
        failures = {"eager": outcome, "tree": other}.items()
        line |= {f"{name}_error": str(x) for name, x in failures if isinstance(x, RowError)}
        if isinstance(outcome, Outcome) and isinstance(other, Outcome):
            try:
                differences = row_difference(outcome, other)
                line |= {"equal": not differences, "p": outcome.p, **differences}
            except NotFinite as error:
                line["compare_error"] = error.message
        run.write(line)
        lines.append(line)
    failed = [line for line in lines if any(name.endswith("_error") for name in line)]
    different = [line for line in lines if line.get("equal") is False]
    run.keep(
        rows=len(rows),
        eager_rows=len(lines),
        eager_tokens=sum(line["length"] for line in lines),
        eager_pairs=sum(line["length"] ** 2 for line in lines),
        eager_seconds=sum(line["eager_s"] for line in lines),
        rows_skipped_time=len(rows) - len(lines),
        failed_rows=len(failed),
        compared=sum("equal" in line for line in lines),
        equal=sum(line.get("equal", False) for line in lines),
        largest_difference={
            name: max((line[name] for line in different), default=0.0)
            for name in ("hidden", "logit", "p", "score")
        },
        lengths_of_different=sorted(line["length"] for line in different),
        different=different[:WORST],
    )
    if failed:
        raise RuntimeError(f"{len(failed)} rows have no outcome, the first: {failed[0]}")
    if "tree_error" in run.summary[run.step]:
        raise RuntimeError(f"the tree failed: {run.summary[run.step]['tree_error']}")
    return len(lines) == len(rows)


def open_tree(run: Run) -> TreeEngine | None:
    """Probe the numeric classes and open the engine; None, with the reason written, where nothing
    may be shared or the probe fails: eager's time is worth having all the same."""
    model = run.the_model()
    begin = time.perf_counter()
    try:
        classes = probe_classes(model, run.device)
        run.keep(classes=asdict(classes), probe_seconds=time.perf_counter() - begin)
        return TreeEngine(model, classes, run.settings)
    except NotCertified as error:
        run.keep(not_certified=error.message, probe_seconds=time.perf_counter() - begin)
    except Exception as error:
        run.keep(tree_error=f"{type(error).__name__}: {error}")
    return None


def tree_outcomes(run: Run, tree: TreeEngine) -> list[Outcome | RowError] | None:
    """All rows through the tree; None, with the error written, when it fails as a whole."""
    begin, seconds = time.perf_counter(), []
    try:
        plan = tree.plan(run.rows)
        run.keep(
            token_ratio=plan.token_ratio,
            total_tokens=plan.total_tokens,
            unique_tokens=plan.unique_tokens,
            packs=len(plan.packs),
            plan_seconds=time.perf_counter() - begin,
        )
        workload = Workload.build(Shape(1, 0, 0), run.rows, 0)
        plan = tree.plan(workload.rows)  # describe counts the pairs of rows in this order
        sizes = describe(workload, plan, {run.preset: PRESETS[run.preset]})
        run.keep(flops=sizes["flops"][run.preset])
        for _ in range(2):  # once for what loads lazily and for warm allocations
            begin = time.perf_counter()
            outcomes = tree.score_tokens(run.rows, keep_hidden=True)
            seconds.append(time.perf_counter() - begin)
            run.keep(tree_seconds=seconds)
            if run.late():
                break
        return outcomes
    except Exception as error:
        run.keep(tree_error=f"{type(error).__name__}: {error}")
        return None


def row_difference(one: Outcome, other: Outcome) -> dict[str, float]:
    """Largest differences by field; empty when hidden state, logit and p are equal. Raises
    NotFinite."""
    assert one.hidden is not None
    assert other.hidden is not None
    hidden = float((one.hidden.double() - other.hidden.double()).abs().max())
    found = {"hidden": hidden, "logit": abs(one.logit - other.logit), "p": abs(one.p - other.p),
             "score": abs(score_from_p(one.p) - score_from_p(other.p))}  # fmt: skip
    if not all(map(math.isfinite, found.values())):
        raise NotFinite(f"a row's hidden state or logit is not finite: {found}")
    return {} if one.same_bits(other) else found


Step = Callable[[Run], bool]  # whether it ended; False when its time was up
# With the part of the whole time at which each must stop; what one leaves, the next ones have.
STEPS: tuple[tuple[str, float, Step], ...] = (
    ("facts", 0.1, facts),
    ("weights", 0.2, weights),
    ("probe", 0.6, probe),
    ("compare", 0.97, compare),
    ("extrapolate", 1.0, extrapolate),
)


def main() -> None:
    """Run the command; a charrm error becomes its message and exit status 2."""
    run_commands(app)


if __name__ == "__main__":
    main()
