"""Replay rows through a candidate and a reference into a ledger that survives being killed.

A run is a folder: `manifest.json` and `criteria.toml` are fixed before the first row,
`ledger.jsonl` grows by one line per row in the order of the rows, `times.json` holds what may
differ between two equal runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from charrm.errors import BadFile, IdentityMismatch, RowError
from charrm.files import read_object, write_atomically
from charrm.identity import code_digest
from charrm.ledger import Ledger
from golden.criteria import Criteria
from golden.sides import Side, Source
from golden.structure import ReplayRow, ReplaySet

FORMAT = "charrm-golden/1"
Level = Literal["tokens", "scores"]
_TIMES_EVERY_SECONDS = 10.0
_REFERENCE_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")


@dataclass(frozen=True)
class Run:
    """What is replayed: chosen rows of a set, both sides, and the criteria to judge them by."""

    replay_set: ReplaySet
    rows: Sequence[ReplayRow]
    sample: int | None  # asked for; None: every row
    level: Level
    candidate: Source
    reference: Source
    criteria: Criteria
    tables: list[str]

    def manifest(self) -> dict[str, Any]:
        """Return everything that must be the same for a run to be continued."""
        slots = "\n".join(row.slot for row in self.rows)
        return {
            "format": FORMAT,
            "level": self.level,
            "reference": self.reference.name,
            "candidate": self.candidate.identity(),
            "reference_identity": self.reference.identity(),
            "set": {
                "digest": self.replay_set.digest,
                "files": dict(self.replay_set.files),
                "is_standin": self.replay_set.is_standin,
                "is_published": self.replay_set.is_published,
            },
            "rows": len(self.rows),
            "rows_sha256": hashlib.sha256(slots.encode()).hexdigest(),
            "sample": self.sample,
            "criteria_sha256": self.criteria.digest,
            "criteria_tables": self.tables,
            "code_sha256": golden_code(),
        }


def golden_code() -> dict[str, str]:
    """Return the digests of the code that computes and of the code that compares."""
    return {"charrm": code_digest(), "golden": code_digest(Path(__file__).parent)}


def replay(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Start or continue a run; return its ledger lines once every row has one.

    Raises IdentityMismatch when the folder holds a run of something else, BadFile when it is
    damaged or another process works in it, and what a source raises beyond RowError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _only_process(folder):
        _start_or_continue(run, folder)
        with Ledger(folder / "ledger.jsonl") as ledger:
            slots = [row.slot for row in run.rows]
            if list(ledger.entries) != slots[: len(ledger.entries)]:
                raise BadFile(f"{ledger.path}: its rows are not the first rows of this run.")
            _fill(run, ledger, _Times(folder / "times.json"))
            return [ledger.entries[slot] for slot in slots]


def _fill(run: Run, ledger: Ledger, times: _Times) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(text_format="{task.percentage:>3.0f}%", show_speed=True),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    done = len(ledger.entries)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        description = f"{run.level} against {run.reference.name}"
        task = progress.add_task(description, total=len(run.rows), completed=done)
        for row in run.rows[done:]:
            ledger.append(row.slot, replay_row(row, run.level, run.candidate, run.reference))
            progress.advance(task)
            times.tick()
    times.finish()


def replay_row(
    row: ReplayRow, level: Level, candidate: Source, reference: Source
) -> dict[str, Any]:
    """Return one row's ledger line, without its slot; a side's RowError becomes its error.

    Both sides compute at the same time, each in a thread of its own.
    """

    def ask(source: Source) -> Side | RowError:
        try:
            return source.score(row) if level == "scores" else source.tokenize(row)
        except RowError as failure:
            return failure

    other = _REFERENCE_THREAD.submit(ask, reference)
    answers = {"candidate": ask(candidate), "reference": other.result()}
    error = None
    sides: dict[str, Side | None] = {}
    for name, answer in answers.items():
        sides[name] = answer if isinstance(answer, Side) else None
        if isinstance(answer, RowError) and error is None:
            error = {"side": name, "kind": answer.kind, "message": answer.message}

    def both(field: str) -> dict[str, Any]:
        return {n: None if side is None else getattr(side, field) for n, side in sides.items()}

    def values(side: Side | None) -> dict[str, Any] | None:
        if side is None or side.score is None:
            return None
        return {"hidden": side.hidden, "logit": side.logit, "p": side.p, "score": side.score}

    return {
        "id": row.id,
        "metric": row.metric_en,
        "ids": both("ids"),
        "tokens": both("tokens"),
        "dropped": both("dropped"),
        "candidate": values(sides["candidate"]),
        "reference": values(sides["reference"]),
        "error": error,
    }


def _start_or_continue(run: Run, folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(json.dumps(run.manifest()))
    if path.exists():
        differences = list(_differences("", read_object(path), manifest))
        if differences:
            raise IdentityMismatch(
                f"{folder}: holds a run of something else:\n  " + "\n  ".join(differences) + "\n"
                "Continue it as it was started, or use another folder."
            )
        return
    if (folder / "ledger.jsonl").exists():
        raise BadFile(f"{folder}: has a ledger but no manifest.json; use another folder.")
    write_atomically(folder / "criteria.toml", run.criteria.text)
    write_atomically(path, dump(manifest))


def dump(content: object) -> str:
    """Return JSON as it is written into run folders and bundles."""
    return json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _differences(path: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from _differences(f"{path}.{key}" if path else key, before.get(key), now.get(key))
    elif before != now:
        yield f"{path}: started with {before!r}, now {now!r}"


@contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadFile(f"{folder}: another process replays into this folder.") from None
        yield


class _Times:
    """Wall-clock facts of a run over all its sessions, kept apart from what must be equal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        before = read_object(path) if path.exists() else {}
        self._started = before.get("started") or _now()
        self._seconds_before = float(before.get("seconds") or 0.0)
        self._sessions = int(before.get("sessions") or 0) + 1
        self._rows_before = int(before.get("rows") or 0)
        self._rows = 0
        self._begin = self._last_write = time.monotonic()

    def tick(self) -> None:
        """Count a row; write now and then, so that a killed session leaves most of its time."""
        self._rows += 1
        if time.monotonic() - self._last_write > _TIMES_EVERY_SECONDS:
            self._write(finished=None)

    def finish(self) -> None:
        """Write the last state."""
        self._write(finished=_now())

    def _write(self, finished: str | None) -> None:
        self._last_write = time.monotonic()
        seconds = self._seconds_before + self._last_write - self._begin
        rows = self._rows_before + self._rows
        content = {
            "started": self._started,
            "finished": finished,
            "seconds": round(seconds, 3),
            "rows": rows,
            "rows_per_second": round(rows / seconds, 3) if seconds else None,
            "sessions": self._sessions,
        }
        write_atomically(self._path, dump(content))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
