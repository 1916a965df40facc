"""`python -m server.demo`: the whole way in one command, on weights that mean nothing.

Builds the demo checkpoint, starts the server on loopback, scores the demo rows over HTTP, prints
the results by metric and the identity, and stops the server.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from charrm.charactereval import aggregate
from charrm.client import Client
from charrm.demo import NOTICE, build_demo_checkpoint, demo_profiles, demo_rows
from charrm.errors import CharrmError, Starting, Unreachable
from charrm.protocol import METRICS
from charrm.results import FailedRow, Result, ScoredRow

START_SECONDS = 120.0


def main(
    folder: Annotated[Path, typer.Option(help="Where the demo checkpoint is kept.")] = Path(
        ".demo/checkpoint"
    ),
) -> None:
    """Score the demo rows on a server started for it, and print what a user gets."""
    console = Console()
    console.print(NOTICE, style="bold yellow")
    build_demo_checkpoint(folder)
    profiles = demo_profiles()
    rows = demo_rows()
    with ServerProcess(folder) as server, Client(server.url) as client:
        console.print(f"server: {server.url} (python -m server --model {folder})")
        results = client.score_batch(
            {
                "profile": profiles[row["role"]],
                "context": row["context"],
                "model_output": row["model_output"],
                "metric": row["metric_zh"],
            }
            for row in rows
        )
        identity = client.identity()
    console.print(results_table(rows, results))
    console.print(means_table(rows, results))
    console.print(identity_table(identity))
    console.print(NOTICE, style="bold yellow")
    failed = [result for result in results if isinstance(result, FailedRow)]
    for result in failed:
        console.print(f"row {rows[result.index]['id']}: {result.error.message}", style="red")
    raise typer.Exit(1 if failed else 0)


class ServerProcess:
    """A server on a free loopback port, from entering until leaving the block."""

    def __init__(self, model: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "server", "--model", str(model)]
        self._command += ["--port", str(port)]

    def __enter__(self) -> ServerProcess:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def terminate(self) -> None:
        """Ask the server to stop, as a service manager does."""
        self._process.terminate()

    def __exit__(self, *_: object) -> None:
        self.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _wait_until_ready(self) -> None:
        with Client(self.url) as client:
            for _ in range(int(START_SECONDS)):
                try:
                    return client.wait_until_ready(seconds=1.0)
                except (Starting, Unreachable):
                    if self._process.poll() is not None:
                        break
        self._log.seek(0)
        raise CharrmError(f"the server did not become ready:\n{self._log.read()}")


def results_table(rows: list[dict[str, Any]], results: list[Result]) -> Table:
    """One line per row, grouped by metric."""
    title = "demo rows (random weights: the numbers mean nothing)"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1))
    table.add_column("metric", no_wrap=True)
    for name in ("row", "score", "p", "tokens", "cut off"):
        table.add_column(name, justify="right", no_wrap=True)
    scored = [result for result in results if isinstance(result, ScoredRow)]
    for r in sorted(scored, key=lambda r: list(METRICS).index(r.metric_en)):
        row = str(rows[r.index]["id"])
        cut = str(r.tokens_dropped or "")
        table.add_row(r.metric_en, row, repr(r.score), repr(r.p), str(r.tokens), cut)
    return table


def means_table(rows: list[dict[str, Any]], results: list[Result]) -> Table:
    """Mean per metric over unrounded scores; failed rows are counted, never averaged."""
    scores = [(row["metric_en"], r.score if isinstance(r, ScoredRow) else None)
              for row, r in zip(rows, results, strict=True)]  # fmt: skip
    table = Table(title="means per metric", box=box.SIMPLE)
    table.add_column("metric", no_wrap=True)
    for name in ("rows", "mean", "failed"):
        table.add_column(name, justify="right")
    for name, metric in aggregate(scores).metrics.items():
        mean = "" if metric.mean is None else f"{metric.mean:.3f}"
        table.add_row(f"{name} {METRICS[name]}", str(metric.count), mean, str(metric.unresolved))
    return table


def identity_table(identity: dict[str, Any]) -> Table:
    """The parts of the identity a reader asks for first."""
    table = Table(title="identity", show_header=False, box=box.SIMPLE)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in ("digest", "protocol", "engine", "device", "dtype", "weights_sha256"):
        table.add_row(name, str(identity[name]))
    for name, verdict in identity["audit"].items():
        table.add_row(name, f"{verdict} (against the audited release)")
    for name, version in identity["versions"].items():
        table.add_row(name, version)
    for name in ("cpu_capability", "threads", "numeric_fingerprint"):
        table.add_row(name, str(identity["environment"][name]))
    return table


if __name__ == "__main__":
    typer.run(main)
