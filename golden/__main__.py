"""`python -m golden`: fetch the published rows, replay them, and prove or refute every score."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from charrm.cli import run as run_commands
from golden.criteria import DEFAULT, Outcome, Verdict, exit_code, read_criteria
from golden.structure import check_structure

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)


class ReferenceName(str, Enum):
    """What the library is compared with."""

    slow = "slow"
    official = "official"
    fp32 = "fp32"
    server = "server"
    row_anchor = "row-anchor"


class Level(str, Enum):
    """How far rows are compared."""

    tokens = "tokens"
    scores = "scores"


SetFolder = Annotated[Path, typer.Argument(help="A set, as `fetch` or `synth` leaves it.")]


@app.command()
def fetch(
    target: Annotated[Path, typer.Argument(help="Folder of the set.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Local folder with the files; no network.")
    ] = None,
) -> None:
    """Download the published rows at their pinned commits and verify every digest."""
    from golden.upstream import fetch as fetch_files

    for fetched in fetch_files(target, source, console=err):
        out.print(str(fetched), markup=False)


@app.command()
def synth(
    data: Annotated[Path, typer.Argument(help="Folder with the benchmark's three data files.")],
    target: Annotated[Path, typer.Argument(help="Folder of the stand-in set.")],
) -> None:
    """Write a stand-in set of the published shape: five files, 40,160 rows, answers drawn from the
    contexts. Everything made with it says that it is a stand-in."""
    from golden.synth import synthesise

    for name, sha256 in synthesise(data, target).items():
        out.print(f"{sha256}  {name}")


@app.command()
def check(folder: SetFolder) -> None:
    """Compare a set with the published shape: counts, ids, roles, metrics, answers."""
    differences = check_structure(folder)
    for difference in differences:
        out.print(str(difference), markup=False)
    out.print(f"{folder}: {len(differences)} differences from the published shape")
    raise typer.Exit(1 if differences else 0)


@app.command()
def replay(
    folder: SetFolder,
    run: Annotated[Path, typer.Argument(help="Folder of the run; an interrupted one goes on.")],
    checkpoint: Annotated[str, typer.Option(help="Folder in the published layout, or a hub id.")],
    reference: Annotated[
        ReferenceName,
        typer.Option(
            help="slow: an independent forward. official: the checkpoint's own code, in its own "
            "process. fp32: how far bf16 is from float32, a measurement. server: a running "
            "endpoint. row-anchor: public scores of the official prompts with empty answers."
        ),
    ] = ReferenceName.slow,
    level: Annotated[
        Level, typer.Option(help="tokens: ids and truncation only. scores: everything.")
    ] = Level.scores,
    model: Annotated[
        list[str] | None, typer.Option(help="Only this model's file; may be repeated.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Only so many rows; every metric, role and length class is kept."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    criteria: Annotated[Path, typer.Option(help="Limits; fixed when the run starts.")] = DEFAULT,
    url: Annotated[str, typer.Option(help="Of the server reference.")] = "http://127.0.0.1:8000",
    trust_checkpoint_code: Annotated[
        bool,
        typer.Option(
            "--trust-checkpoint-code",
            help="Let the official reference run code that is not the audited one.",
        ),
    ] = False,
) -> None:
    """Replay a set row by row and compare. Killed at any point, it goes on where it was.

    Exit status: 0 all criteria pass, 1 one fails, 3 none fails but one is unknown, 2 an error.
    """
    from golden.session import Request, run_session

    request = Request(
        folder, run, checkpoint, reference.value, level.value, model or [], sample, device,
        read_criteria(criteria), url, trust_checkpoint_code,
    )  # fmt: skip
    replay_set, verdicts = run_session(request)
    out.print(_verdict_table(verdicts))
    if replay_set.is_standin:
        out.print("STAND-IN: the answers of this set were written by no model.", style="bold")
    raise typer.Exit(exit_code(verdicts))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    bundle: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
) -> None:
    """Write the bundle: one HTML page, JSON, ledger and digests. It holds no dataset text."""
    from charrm.files import write_atomically
    from golden.replay import dump
    from golden.report import write_report
    from golden.selftest import last_selftest

    known = last_selftest()
    if known is not None:
        write_atomically(run / "selftest.json", dump(known))
    page = write_report(run, bundle)
    out.print(f"{page}")


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="Folder that `report` wrote.")],
    set_folder: Annotated[
        Path | None, typer.Option("--set", help="Check the digests of this set too.")
    ] = None,
) -> None:
    """Recompute every digest and aggregate of a bundle from its ledger; fail on any change."""
    from golden.verify import verify_bundle

    problems = verify_bundle(bundle, set_folder)
    for problem in problems:
        out.print(problem, markup=False)
    out.print(f"{bundle}: " + ("holds" if not problems else f"{len(problems)} problems"))
    raise typer.Exit(1 if problems else 0)


@app.command()
def selftest(
    folder: Annotated[Path, typer.Option(help="Keeps the demo checkpoint.")] = Path(
        ".demo/checkpoint"
    ),
) -> None:
    """Plant faults and see every one end red. Reports name the last selftest of their code."""
    from golden.selftest import remember_selftest, run_selftest

    result = run_selftest(folder)
    table = Table(box=box.SIMPLE)
    for name in ("fault", "outcome", "what"):
        table.add_column(name)
    for fault in result["faults"]:
        table.add_row(fault["fault"], fault["outcome"], fault["what"])
    out.print(table)
    if not result["ok"]:
        err.print("selftest FAILED: a planted fault was not noticed", style="bold red")
        raise typer.Exit(1)
    out.print(f"kept in {remember_selftest(result)}, digest {result['digest']}")


def _verdict_table(verdicts: list[Verdict]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("criterion", "limit", "measured", "verdict", "reason"):
        table.add_column(name, justify="right" if name in ("limit", "measured") else "left")
    styles = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.UNKNOWN: "yellow"}
    for verdict in verdicts:
        limit, measured = (
            "" if value is None else f"{value:g}" for value in (verdict.limit, verdict.measured)
        )
        style = styles.get(verdict.outcome, "")
        table.add_row(
            verdict.criterion, limit, measured, f"[{style}]{verdict.outcome.value}[/]"
            if style else verdict.outcome.value, verdict.reason,
        )  # fmt: skip
    return table


def main() -> None:
    """Run the command; a charrm error becomes its message and exit status 2."""
    run_commands(app)


if __name__ == "__main__":
    main()
