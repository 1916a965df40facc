"""Write a finished run's bundle: evidence, what follows from it, one page, and their digests.

The bundle holds slots, ids, metric names, digests and numbers; no role, context or answer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from charrm.errors import BadFile
from golden.bundle import (
    COMPARISON,
    EVIDENCE,
    PAGE,
    SELFTEST,
    SUMS,
    TIMES,
    Evidence,
    digest_bytes,
    read_evidence,
)
from golden.compare import Comparison, compare
from golden.criteria import Verdict, judge
from golden.page import overall, render
from golden.replay import dump


def write_report(run: Path, bundle: Path) -> Path:
    """Write the bundle of a complete run into a new folder; return the path of its page.

    Equal ledgers give equal bytes, apart from times.json, the page's `<time>` elements and the
    lines of both in SHA256SUMS. The folder appears whole or not at all.
    Raises BadFile: rows are missing, parts do not fit together, the folder exists or cannot be
    written.
    """
    if bundle.exists() and (not bundle.is_dir() or any(bundle.iterdir())):
        raise BadFile(f"{bundle}: exists already; remove it or name another folder.")
    try:
        bundle.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=bundle.parent, prefix=".bundle-") as temporary:
            folder = Path(temporary) / "bundle"  # with the usual permissions, unlike its parent
            folder.mkdir()
            _fill(run, folder)
            os.rename(folder, bundle)
    except OSError as error:
        raise BadFile(f"{bundle}: cannot be written: {error}. Nothing was left behind.") from None
    return bundle / PAGE


def derive(evidence: Evidence) -> dict[str, bytes]:
    """Return the files that follow from the evidence: comparison.json and report.html."""
    comparison = compare(evidence.lines)
    tables: list[str] = evidence.manifest["criteria_tables"]
    verdicts = {table: judge(evidence.criteria, [table], comparison) for table in tables}
    return {
        COMPARISON: _comparison(evidence, comparison, verdicts).encode(),
        PAGE: render(evidence, comparison, verdicts).encode(),
    }


def sums(folder: Path) -> str:
    """Return the lines of SHA256SUMS for the other files of a folder, as `sha256sum` writes."""
    names = sorted(path.name for path in folder.iterdir() if path.name != SUMS)
    return "".join(f"{digest_bytes((folder / name).read_bytes())}  {name}\n" for name in names)


def _fill(run: Path, folder: Path) -> None:
    for name in (*EVIDENCE, TIMES, SELFTEST):
        if (run / name).exists():
            shutil.copyfile(run / name, folder / name)
    evidence, problems = read_evidence(folder)  # of the copy: what is described is what is kept
    if problems or evidence is None:
        raise BadFile(f"{run}: not reported:\n  " + "\n  ".join(problems))
    for name, content in derive(evidence).items():
        (folder / name).write_bytes(content)
    (folder / SUMS).write_text(sums(folder), encoding="utf-8")


def _comparison(
    evidence: Evidence, comparison: Comparison, verdicts: Mapping[str, Sequence[Verdict]]
) -> str:
    """The digests tie every byte of the evidence to what was concluded from it."""
    every = [verdict for table in verdicts.values() for verdict in table]
    content = {
        "outcome": overall(every).value,
        "sha256": evidence.sha256,
        "verdicts": {table: [v.to_json() for v in judged] for table, judged in verdicts.items()},
        "comparison": comparison.to_json(),
    }
    return dump(content)
