"""Engines side by side: what is run, how time and memory are taken, how rows are compared."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress

from charrm.engines import Engine, Outcome
from charrm.engines.plan import Plan
from charrm.errors import RowError
from charrm.model import ModelConfig
from charrm.protocol import score_from_p

FORMULA = (
    "FLOPs = layers x (2 (4 H^2 + 3 H F) tokens + 4 H pairs). Loop: every token, pairs = sum of "
    "L^2. Tree: unique tokens, pairs = queries x keys of its groups, padding counted."
)
Rows = list[list[int]]
Advance = Callable[[str, Rows], None]


class Shape(NamedTuple):
    """Generating models, roles, and test ids of a role; 0 is all of a set."""

    models: int
    roles: int
    contexts: int


@dataclass(frozen=True)
class Workload:
    """The rows of one comparison, sorted by length, and the indices of those that all engines but
    the tree run."""

    shape: Shape
    rows: Rows
    indices: list[int]

    @classmethod
    def build(cls, shape: Shape, rows: Rows, sample: int) -> Workload:
        """Take a systematic sample of `sample` rows over the lengths; 0 is every row."""
        ordered = sorted(rows, key=lambda ids: (len(ids), ids))
        return cls(shape, ordered, sample_indices(len(rows), sample))

    @property
    def sample(self) -> Rows:
        return [self.rows[i] for i in self.indices]


def sample_indices(count: int, wanted: int) -> list[int]:
    """The middle of each of `wanted` equal parts of 0 .. count - 1; all of them for 0."""
    wanted = min(wanted or count, count)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def linear_flops(config: ModelConfig, tokens: int) -> int:
    """Multiplications and additions of W_pack, o_proj and the MLP; the head is left out."""
    weights = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    return 2 * config.num_hidden_layers * weights * tokens


def attention_flops(config: ModelConfig, pairs: int) -> int:
    """Those of `q k^T` and `P v` for so many pairs of a query and a key, all heads."""
    return 4 * config.num_hidden_layers * config.hidden_size * pairs


def describe(workload: Workload, plan: Plan | None, configs: Mapping[str, ModelConfig]) -> Any:
    """Sizes, the sample, and the FLOPs of the official loop and of the tree by config."""
    rows, indices = workload.rows, workload.indices
    lengths = [len(ids) for ids in rows]
    tokens, pairs = sum(lengths), sum(n * n for n in lengths)
    # How well the sample, scaled by the number of rows, stands for all of them.
    scaled = len(rows) / len(indices)
    entry: dict[str, Any] = {
        **workload.shape._asdict(),
        "rows": len(rows),
        "shortest": lengths[0],
        "longest": lengths[-1],
        "total_tokens": tokens,
        "sample": {
            "rows": len(indices),
            "tokens_scaled": round(sum(lengths[i] for i in indices) * scaled / tokens, 4),
            "pairs_scaled": round(sum(lengths[i] ** 2 for i in indices) * scaled / pairs, 4),
        },
        "flops": {},
    }
    if plan:
        shared_pairs = sum(
            len(group.items) * group.queries * group.width
            for pack in plan.packs
            for group in pack.groups
        ) + sum(lengths[i] ** 2 for i in plan.alone)
        entry |= {
            "unique_tokens": plan.unique_tokens,
            "token_ratio": plan.token_ratio,
            "packs": len(plan.packs),
            "rows_alone": len(plan.alone),
        }
    for name, config in configs.items():
        loop = linear_flops(config, tokens), attention_flops(config, pairs)
        flops: dict[str, float] = {"loop_linears": loop[0], "loop_attention": loop[1]}
        if plan:
            tree = linear_flops(config, plan.unique_tokens), attention_flops(config, shared_pairs)
            ratio = sum(loop) / sum(tree)
            flops |= {"tree_linears": tree[0], "tree_attention": tree[1], "loop_over_tree": ratio}
        entry["flops"][name] = flops
    return entry


@dataclass(frozen=True)
class Run:
    """One engine over one workload, once."""

    seconds: float  # of all rows; scaled up where only the sample ran
    rows_per_second: float
    ratio: float  # eager's seconds over these
    peak_bytes: int | None
    equal: int  # rows of the sample whose hidden state, logit and p are eager's
    mean_difference: float  # of |score - eager's score|
    max_difference: float


def interleave(
    engines: Mapping[str, Engine],
    workloads: Sequence[Workload],
    repeats: int,
    device: torch.device,
    progress: Progress,
) -> list[list[dict[str, Run]]]:
    """Run every workload with every engine, all of that `repeats` times; by workload and repeat.

    Raises the RowError of any row: a run with a failed row has no speed.
    """

    def tokens(rows: Rows, name: str) -> int:
        return sum(map(len, rows)) // (8 if name == "tree" else 1)  # about its ratio, for the bar

    total = sum(
        tokens(w.rows if name == "tree" else w.sample, name) for w in workloads for name in engines
    )
    task = progress.add_task("warming up", total=repeats * total)
    for name, engine in engines.items():
        middle = workloads[0].rows[len(workloads[0].rows) // 2]
        _checked(name, [middle], engine.score_tokens([middle], keep_hidden=True))
    runs: list[list[dict[str, Run]]] = [[] for _ in workloads]
    for repeat in range(repeats):
        for number, workload in enumerate(workloads):
            where = f"repeat {repeat + 1}/{repeats}, workload {number + 1}/{len(workloads)}"

            def advance(name: str, rows: Rows, where: str = where) -> None:
                text = f"{where}, {name}"
                progress.update(task, description=text, advance=tokens(rows, name))

            runs[number].append(_run_once(engines, workload, device, advance))
    return runs


class _Timed(NamedTuple):
    seconds: float
    peak_bytes: int | None
    outcomes: list[Outcome]


def _run_once(
    engines: Mapping[str, Engine], workload: Workload, device: torch.device, advance: Advance
) -> dict[str, Run]:
    """Half of eager's rows, the others, the other half: a drift of the machine cancels."""
    rows, sample, indices = workload.rows, workload.sample, workload.indices
    scale = len(rows) / len(sample)
    before = _timed("eager", engines["eager"], sample[0::2], device, advance)
    timed = {
        name: _timed(name, engine, rows if name == "tree" else sample, device, advance)
        for name, engine in engines.items()
        if name != "eager"
    }
    after = _timed("eager", engines["eager"], sample[1::2], device, advance)
    pairs = zip_longest(before.outcomes, after.outcomes)
    reference = [outcome for outcome in chain.from_iterable(pairs) if outcome is not None]
    peaks = [peak for peak in (before.peak_bytes, after.peak_bytes) if peak is not None]
    eager = _Timed(before.seconds + after.seconds, max(peaks, default=None), reference)
    runs = {}
    for name, (seconds, peak, outcomes) in ({"eager": eager} | timed).items():
        if name == "tree":
            outcomes = [outcomes[i] for i in indices]
        else:
            seconds *= scale
        ratio = eager.seconds * scale / seconds
        compared = compare(reference, outcomes)
        runs[name] = Run(seconds, len(rows) / seconds, ratio, peak, *compared)
    return runs


def _timed(name: str, engine: Engine, rows: Rows, device: torch.device, advance: Advance) -> _Timed:
    step = len(rows) if name == "tree" else engine.rows_per_call
    outcomes: list[Outcome] = []
    memory = Memory(device)
    begin = time.perf_counter()
    for start in range(0, len(rows), max(step, 1)):
        part = rows[start : start + step]
        outcomes += _checked(name, part, engine.score_tokens(part, keep_hidden=True))
        advance(name, part)
    # Every outcome was read to the host, so nothing is left running on a GPU.
    return _Timed(time.perf_counter() - begin, memory.growth(), outcomes)


def _checked(name: str, rows: Rows, outcomes: Sequence[Outcome | RowError]) -> list[Outcome]:
    found = []
    for ids, outcome in zip(rows, outcomes, strict=True):
        if isinstance(outcome, RowError):
            raise type(outcome)(f"{name}, a row of {len(ids)} tokens: {outcome.message}")
        score_from_p(outcome.p)  # raises NotFinite
        found.append(outcome)
    return found


class Memory:
    """Peak of the process's resident set, or of a GPU's allocations, over the level at start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: int | None = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        try:
            # What the C library keeps of earlier runs would hide what this one needs.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present
            self.before = _status("VmRSS")
        except (OSError, AttributeError, ValueError):
            pass  # not Linux, or not glibc, or not allowed

    def growth(self) -> int | None:
        """Bytes, or None where they cannot be known."""
        if self.before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(0, _status("VmHWM") - self.before)


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    line = next((line for line in text.splitlines() if line.startswith(field + ":")), "")
    return int(line.split()[1]) * 1024 if line else int("")


def compare(reference: Sequence[Outcome], outcomes: Sequence[Outcome]) -> tuple[int, float, float]:
    """Count rows equal in hidden state, logit and p; mean and largest |difference| in score.

    A hidden state of another dtype is compared with eager's cast to it, which bf16 to float32
    keeps exactly.
    """
    equal = 0
    differences = []
    for one, other in zip(reference, outcomes, strict=True):
        assert one.hidden is not None
        assert other.hidden is not None
        equal += replace(one, hidden=one.hidden.to(other.hidden.dtype)).same_bits(other)
        differences.append(abs(score_from_p(one.p) - score_from_p(other.p)))
    return equal, statistics.fmean(differences), max(differences)


def summarise(runs: Sequence[Mapping[str, Run]], token_ratio: float | None) -> dict[str, Any]:
    """By engine: [median, min, max] over the repeats of speed and ratio, and the worst of the
    rest; every repeat is kept."""
    summary: dict[str, Any] = {}
    for name in runs[0]:
        own = [run[name] for run in runs]
        ratio = _spread([run.ratio for run in own])
        peaks = [run.peak_bytes for run in own if run.peak_bytes is not None]
        summary[name] = {
            "rows_per_second": _spread([run.rows_per_second for run in own]),
            "ratio": ratio,
            "peak_bytes": max(peaks, default=None),
            "equal": min(run.equal for run in own),
            "mean_difference": max(run.mean_difference for run in own),
            "max_difference": max(run.max_difference for run in own),
            "repeats": [asdict(run) for run in own],
        }
        if name == "tree" and token_ratio:
            summary[name]["ratio_over_token_ratio"] = ratio[0] / token_ratio
    return summary


def _spread(values: Sequence[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]
