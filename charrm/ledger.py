"""Append-only results: one JSON line per slot, written so that a killed process loses one row.

A line counts once its newline is on disk. What a killed process left of a line is cut off when the
ledger is opened again; anything else that is wrong is refused, never repaired.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from charrm.errors import BadFile


class Ledger:
    """Results by slot, in the order they were accepted. Use as a context manager to append."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; raises BadFile for a damaged line or a second line of a slot."""
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        whole = _whole_lines(path)
        for number, line in enumerate(whole.splitlines(), start=1):
            entry = _parse(path, number, line)
            if entry["slot"] in self.entries:
                raise BadFile(f"{path}: line {number}: slot {entry['slot']} appears twice.")
            self.entries[entry["slot"]] = entry
        self._file = path.open("ab", buffering=0)  # nothing may wait in memory to be written later
        self._file.truncate(len(whole))

    def append(self, slot: str, content: Mapping[str, Any]) -> None:
        """Accept the result of a slot that has none yet. Raises BadFile (disk full), ValueError."""
        if slot in self.entries:
            raise ValueError(f"slot {slot} already holds a result")
        entry = {"slot": slot, **content}
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
        at = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), at)
            raise BadFile(
                f"{self.path}: cannot be written: {error}. The run can go on later."
            ) from None
        self.entries[slot] = entry

    def close(self) -> None:
        """Force what was accepted to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Read a finished ledger without touching it. Raises BadFile, also for a cut-off last line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error}.") from None
    if content and not content.endswith(b"\n"):
        raise BadFile(f"{path}: the last line is cut off; continue the run before reading it.")
    return [_parse(path, number, line) for number, line in enumerate(content.splitlines(), 1)]


def _whole_lines(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    return content[: content.rfind(b"\n") + 1]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry: Any = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise BadFile(f"{path}: line {number} is not JSON: {error}.") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("slot"), str):
        raise BadFile(f"{path}: line {number} is not a result with a slot.")
    return entry
