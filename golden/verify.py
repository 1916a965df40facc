"""Check a bundle: recompute every digest, aggregate and the page from the ledger.

A change of any file is found, also when SHA256SUMS was written again. What cannot be found is a
bundle invented as a whole: it is not signed, and only replaying rows tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from charrm.errors import CharrmError
from charrm.files import found
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
from golden.page import renderer
from golden.report import derive
from golden.row_anchor import blank_set
from golden.structure import load_set

_REQUIRED = {*EVIDENCE, TIMES, COMPARISON, PAGE, SUMS}
_SUM = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")
_DRAWING = re.compile(rb"<svg .*?</svg>", re.DOTALL)
_RENDERER = re.compile(rb'<meta name="generator" content="([^"]*)">')


def verify_bundle(bundle: Path, set_folder: Path | None = None) -> list[str]:
    """Return every problem of a bundle; none means that it holds.

    With `set_folder` the digests of that set, and the id and metric of each row, must be those of
    the bundle too. Raises nothing for what is wrong with the bundle or the set.
    """
    if not bundle.is_dir():
        return [f"{bundle}: no folder"]
    problems = list(_check_files(bundle))
    problems += _check_sums(bundle)
    evidence, broken = read_evidence(bundle)
    problems += broken
    if evidence is None:
        problems.append(f"{COMPARISON}, {PAGE}: not recomputed, the evidence is broken")
        return problems
    problems += _check_derived(bundle, evidence)
    if set_folder is not None:
        problems += _check_set(set_folder, evidence)
    return problems


def _check_files(bundle: Path) -> Iterator[str]:
    there = {path.name: path for path in bundle.iterdir()}
    for name in sorted(_REQUIRED - there.keys()):
        yield f"{name}: missing"
    for name, path in sorted(there.items()):
        if name not in _REQUIRED | {SELFTEST}:
            yield f"{found(name)}: belongs to no bundle"
        elif path.is_symlink() or not path.is_file():
            yield f"{name}: not a plain file"


def _check_sums(bundle: Path) -> Iterator[str]:
    try:
        text = (bundle / SUMS).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        yield f"{SUMS}: cannot be read: {error}"
        return
    names = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _SUM.fullmatch(line)
        if match is None:
            yield f"{SUMS}: line {number}: found {found(line)}, expected a sha256 and a name"
            continue
        names.append(match[2])
        path = bundle / match[2]
        if not path.is_file():
            yield f"{SUMS}: line {number}: {found(match[2])} is not there"
        elif (digest := digest_bytes(path.read_bytes())) != match[1]:
            yield f"{match[2]}: sha256: found {digest}, expected {match[1]}, as {SUMS} says"
    there = sorted(path.name for path in bundle.iterdir() if path.name != SUMS)
    if names != there:
        yield f"{SUMS}: found {', '.join(names)}, expected one line each for {', '.join(there)}"


def _check_derived(bundle: Path, evidence: Evidence) -> Iterator[str]:
    """The page holds the bundle's own times, so that it must be equal to the byte."""
    try:
        derived = derive(evidence)
    except CharrmError as error:
        yield f"{COMPARISON}, {PAGE}: cannot be recomputed: {error.message}"
        return
    for name, expected in derived.items():
        if not (bundle / name).is_file():
            continue
        content = (bundle / name).read_bytes()
        if content == expected:
            continue
        yield f"{name}: not what follows from the ledger{_why(content, expected, name)}"


def _why(content: bytes, expected: bytes, name: str) -> str:
    """Say where two pages differ, and whether other software drew them."""
    if name != PAGE:
        pairs = zip_longest(content.splitlines(), expected.splitlines())
        at = next((n for n, (here, there) in enumerate(pairs, 1) if here != there), None)
        return "" if at is None else f"; the first difference is in line {at}"
    same_words = _DRAWING.sub(b"", content) == _DRAWING.sub(b"", expected)
    where = "; only plots differ" if same_words else ""
    match = _RENDERER.search(content)
    made_by = match[1].decode("utf-8", "replace") if match else "nothing that says its name"
    if made_by != renderer():
        where += f"; it was made by {made_by}, compare with the same versions: here {renderer()}"
    return where


def _check_set(folder: Path, evidence: Evidence) -> Iterator[str]:
    facts: dict[str, Any] = evidence.manifest["set"]
    try:
        row_anchor = evidence.manifest["reference"] == "row-anchor"
        replay_set = blank_set(folder / "data") if row_anchor else load_set(folder)
    except CharrmError as error:
        yield f"{folder}: cannot be read as a set: {error.message}"
        return
    for name in sorted(facts["files"].keys() | replay_set.files.keys()):
        here, there = replay_set.files.get(name, "nothing"), facts["files"].get(name, "nothing")
        if here != there:
            yield f"{folder / name}: sha256: found {here}, expected {there}, as in the bundle"
    for name in ("digest", "is_standin", "is_published"):
        if getattr(replay_set, name) != facts[name]:
            here = getattr(replay_set, name)
            yield f"{folder}: {name}: found {here}, expected {facts[name]}, as in the bundle"
    known = {row.slot: (row.id, row.metric_en) for row in replay_set.rows}
    for line in evidence.lines:
        if known.get(line["slot"]) != (line["id"], line["metric"]):
            yield (
                f"ledger.jsonl: {line['slot']}: found id {line['id']} {line['metric']}, expected "
                f"{known.get(line['slot'], 'no such row')}, as in {folder}"
            )
