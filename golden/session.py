"""One replay from names to verdicts: open both sides, choose rows, run, judge."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from charrm.checkpoint import find_checkpoint
from charrm.errors import InvalidSetting, RowError
from charrm.scorer import Scorer
from golden.compare import compare
from golden.criteria import Criteria, Verdict, judge
from golden.official import OfficialSource
from golden.replay import Level, Run, replay
from golden.row_anchor import RowAnchorSource, blank_set
from golden.sides import Source
from golden.sources import EngineSource, ServerSource, SlowSource
from golden.structure import ReplayRow, ReplaySet, load_set, stratified_sample
from golden.upstream import ROW_LEVEL_ANCHOR


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    set_folder: Path
    run_folder: Path
    checkpoint: str
    reference: str
    level: Level
    models: Sequence[str]
    sample: int | None
    device: str
    criteria: Criteria
    url: str
    trust_checkpoint_code: bool


def run_session(request: Request) -> tuple[ReplaySet, list[Verdict]]:
    """Replay what was asked for and judge it. Raises CharrmError kinds."""
    if request.level == "tokens" and request.reference in ("server", "row-anchor"):
        raise InvalidSetting(
            f"level: {request.reference} does not tell tokens by themselves; use --level scores."
        )
    if request.reference == "row-anchor":
        replay_set = blank_set(request.set_folder / "data")
    else:
        replay_set = load_set(request.set_folder)
    scorer = Scorer.open(request.checkpoint, device=request.device)
    candidate = EngineSource(scorer)
    with closing(_reference(request, candidate)) as reference:
        rows: Sequence[ReplayRow] = of_models(replay_set, request.models)
        if request.sample is not None:
            rows = stratified_sample(rows, request.sample, _lengths(rows, candidate))
        tables = ["tokens"] if request.level == "tokens" else [request.reference]
        if _can_meet_the_paper(request, replay_set, scorer):
            tables.append("paper")
        run = Run(
            replay_set, rows, request.sample, request.level, candidate, reference,
            request.criteria, tables,
        )  # fmt: skip
        lines = replay(run, request.run_folder)
    return replay_set, judge(request.criteria, tables, compare(lines))


def of_models(replay_set: ReplaySet, models: Sequence[str]) -> list[ReplayRow]:
    """Return the rows of the named models, of all when none is named. Raises InvalidSetting."""
    known = sorted({row.model for row in replay_set.rows})
    unknown = sorted(set(models) - set(known))
    if unknown:
        raise InvalidSetting(f"model: found {', '.join(unknown)}, expected of {', '.join(known)}.")
    return [row for row in replay_set.rows if not models or row.model in models]


def _can_meet_the_paper(request: Request, replay_set: ReplaySet, scorer: Scorer) -> bool:
    """The paper's means are of all published rows, by the audited checkpoint, at score level."""
    audited = set(scorer.identity.audit.values()) <= {"matches", "absent"}
    complete = request.sample is None and request.level == "scores"
    return audited and complete and replay_set.is_published and request.reference != "row-anchor"


def _reference(request: Request, candidate: EngineSource) -> Source:
    if request.reference == "server":
        return ServerSource(request.url, candidate.identity())
    if request.reference == "row-anchor":
        return RowAnchorSource(request.set_folder / ROW_LEVEL_ANCHOR.target)
    folder = find_checkpoint(request.checkpoint).folder
    device = "cuda" if request.device == "auto" and torch.cuda.is_available() else request.device
    device = "cpu" if device == "auto" else device
    if request.reference == "official":
        return OfficialSource(
            folder,
            trust=request.trust_checkpoint_code,
            device=device,
            log=request.run_folder.with_suffix(".official.log"),
        )
    dtype = {"slow": torch.bfloat16, "fp32": torch.float32}[request.reference]
    return SlowSource(folder, dtype, device)


def _lengths(rows: Sequence[ReplayRow], candidate: EngineSource) -> list[int]:
    """Return token counts before truncation; a row that has none counts as empty."""

    def length(row: ReplayRow) -> int:
        try:
            side = candidate.tokenize(row)
        except RowError:
            return 0
        return (side.tokens or 0) + (side.dropped or 0)

    console = Console(stderr=True)
    shown = track(rows, "counting tokens", console=console, disable=not console.is_terminal)
    return [length(row) for row in shown]
