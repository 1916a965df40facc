"""What `bench.gpu` concludes: the published rows by the time measured, and a table to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from bench.gpu_probe import Line
from bench.measure import attention_flops, linear_flops
from bench.workload import PRESETS

if TYPE_CHECKING:
    from bench.gpu import Run

PUBLISHED_ROWS, PUBLISHED_MEAN = 40_160, 800  # rows of five models, and their tokens on average


def extrapolate(run: Run) -> bool:
    """The published rows by the time per token measured here."""
    measured, config = run.summary.get("compare", {}), PRESETS[run.preset]
    tokens = PUBLISHED_ROWS * PUBLISHED_MEAN
    assumptions = [
        f"{PUBLISHED_ROWS} rows of {PUBLISHED_MEAN} tokens on average, {run.token_ratio:g} "
        "times the tokens of their prefix tree",
        f"preset {run.preset} on {run.summary['run']['device']}, random weights and ids",
        "time grows with the tokens, as if the lengths were those measured here; the quadratic "
        "part of attention is not scaled apart",
        "TFLOP/s count the linears and attention's two products with all padding, not the head; "
        "the floors are the linears alone at the matmul speed of the step facts",
        "tree: packs as full, and attention as batched, as for the rows here",
        "no time for reading, tokenizing, loading and certification",
    ]
    result: dict[str, Any] = {"tokens": tokens, "assumptions": assumptions}
    best = run.summary.get("facts", {}).get("matmul_tflops")
    if best:
        floor = linear_flops(config, tokens) / best / 1e12
        result |= {"floor_loop_seconds": floor, "floor_tree_seconds": floor / run.token_ratio}
    if measured.get("eager_tokens"):
        seconds, seen = measured["eager_seconds"], measured["eager_tokens"]
        result |= {
            "loop_seconds": seconds / seen * tokens,
            "loop_tflops": (
                linear_flops(config, seen) + attention_flops(config, measured["eager_pairs"])
            )
            / seconds
            / 1e12,
            "mean_tokens_here": seen / measured["eager_rows"],
        }
    if "tree_seconds" in measured:
        seconds, seen = measured["tree_seconds"][-1], measured["unique_tokens"]
        flops = measured["flops"]
        result |= {
            "tree_seconds": seconds / seen * tokens / run.token_ratio,
            "tree_tflops": (flops["tree_linears"] + flops["tree_attention"]) / seconds / 1e12,
            "token_ratio_here": measured["token_ratio"],
            "tree_equal_here": f"{measured.get('equal', 0)} of {measured.get('compared', 0)}",
        }
    else:
        reasons = (measured.get(name) for name in ("not_certified", "tree_error"))
        result["no_tree"] = next(filter(None, reasons), "it did not run")
    run.keep(**result)
    return True


def table(run: Run) -> Table:
    """Steps, and the numbers to look at first."""
    on_gpu = run.device.type == "cuda"
    title = f"{run.preset} on {run.summary['run']['device']}"
    out = Table(box=box.SIMPLE, title=title if on_gpu else f"{title}: no GPU was measured")
    for name in ("step", "status", "seconds", "found"):
        out.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for status in run.summary["steps"]:
        name = status["name"]
        found = list(highlights(run.summary.get(name, {})))
        found += [status["error"]] if "error" in status else []
        seconds = f"{status['seconds']:.1f}" if "seconds" in status else ""
        out.add_row(name, status["status"], seconds, "\n".join(found))
    return out


def brief(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary with the number of classes of a family in place of their members."""
    probed = summary.get("probe", {})
    families = {
        name: {k: v for k, v in family.items() if k not in ("summary", "in_none_of_these")}
        | {"classes": class_count(family)}
        for name, family in probed.get("families", {}).items()
    }
    return summary | ({"probe": probed | {"families": families}} if probed else {})


def class_count(family: Line) -> int:
    return len(family["classes"]) + ("in_none_of_these" in family)


def highlights(found: Line) -> Iterator[str]:
    for name, family in found.get("families", {}).items():
        yield (
            f"{name}: {family['equal']} of {family['cases']} as the canonical run, "
            f"{class_count(family)} classes"
            + "".join(f", {k}: {family[k]}" for k in ("cut", "error") if k in family)
        )
    for key, value in found.items():
        if isinstance(value, float):
            yield f"{key}: {value:,.4g}"
        elif isinstance(value, int) or key in ("not_certified", "tree_error", "no_tree"):
            yield f"{key}: {value}"
