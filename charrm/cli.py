"""`charrm`: commands of the library. Heavy parts load only when a command needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from charrm.certificate import Certificate
from charrm.engines import TreeSettings
from charrm.errors import CharrmError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)

TREE = TreeSettings()
# Options that the server has as well.
Revision = Annotated[
    str | None,
    typer.Option(envvar="CHARRM_REVISION", help="Commit of a hub id; the audited by default."),
]
Sample = Annotated[int, typer.Option(min=64, help="Rows to compare, at most.")]
Minutes = Annotated[
    float, typer.Option(min=0, help="Stop the sample after so long; 64 rows are the least.")
]
PackTokens = Annotated[
    int,
    typer.Option(
        envvar="CHARRM_PACK_TOKENS", min=1, help="Tree engine: unique tokens computed together."
    ),
]
AttentionMib = Annotated[
    int,
    typer.Option(
        envvar="CHARRM_ATTENTION_MIB", min=1, help="Tree engine: MiB for attention at a time."
    ),
]
BlockTokens = Annotated[
    int,
    typer.Option(
        envvar="CHARRM_BLOCK_TOKENS", min=32, help="Tree engine: tokens that a linear sees at once."
    ),
]


@app.callback()
def charrm() -> None:
    """The exact BaichuanCharRM score, with proof of how it was made."""


@app.command()
def certify(
    model: Annotated[
        str, typer.Option(envvar="CHARRM_MODEL", help="Folder in the published layout, or a hub id")
    ],
    revision: Revision = None,
    device: Annotated[
        str, typer.Option(envvar="CHARRM_DEVICE", help="auto, cpu, cuda or cuda:N.")
    ] = "auto",
    rows: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of rows as the benchmark's transform writes it (generation_trans_*.jsonl); "
            "may be repeated. By default rows made of the demo's texts."
        ),
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option(envvar="CHARRM_PROFILES", help="character_profiles.json.")
    ] = None,
    sample: Sample = 512,
    minutes: Minutes = 10.0,
    pack_tokens: PackTokens = TREE.pack_tokens,
    attention_mib: AttentionMib = TREE.attention_bytes >> 20,
    block_tokens: BlockTokens = TREE.block_tokens,
    output: Annotated[
        Path | None, typer.Option(help="Where to write; by default where the server looks.")
    ] = None,
) -> None:
    """Prove the tree engine on this machine and leave a certificate.

    Every row is computed in the official order, then with shared prefixes in several orders and
    companies. Hidden state, logit and p must be equal bit for bit; one difference, and there is no
    certificate. It holds for this model, code, machine, thread count and these settings only.

    Exit status: 0 certified, 2 refused or an error.
    """
    from charrm.certify import certify as issue
    from charrm.certify import choose_sample, show_progress
    from charrm.scorer import Scorer

    settings = TreeSettings(pack_tokens, attention_mib << 20, block_tokens)
    scorer = Scorer.open(model, revision=revision, device=device)
    chosen = choose_sample(scorer, rows or [], profiles, sample)
    with show_progress() as report:
        certificate = issue(scorer, chosen, settings, minutes=minutes, report=report)
    path = certificate.write(output)
    out.print(_families(certificate))
    for line in certificate.summary():
        out.print(line, markup=False)
    out.print(f"certificate {certificate.digest}\n{path}", markup=False)


def _families(certificate: Certificate) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("rows")
    table.add_column("compared, all bits equal", justify="right")
    for family, count in certificate.measured["rows"].items():
        table.add_row(family, str(count))
    return table


def run(commands: typer.Typer) -> None:
    """Run any room's commands; a charrm error becomes its message and exit status 2."""
    try:
        commands()
    except CharrmError as error:
        err.print(f"{error.kind}: {error.message}", style="red", markup=False)
        sys.exit(2)


def main() -> None:
    """The `charrm` command."""
    run(app)


if __name__ == "__main__":
    main()
