"""The ledger: one line per slot, and what a killed process leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from charrm.errors import BadFile
from charrm.ledger import Ledger, read_ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append("a/0", {"p": 0.1, "text": "一"})
        ledger.append("a/1", {"p": None})
    return path


def test_lines_come_back_in_order(path: Path) -> None:
    assert read_ledger(path) == [
        {"slot": "a/0", "p": 0.1, "text": "一"},
        {"slot": "a/1", "p": None},
    ]


def test_a_slot_is_accepted_once(path: Path) -> None:
    with Ledger(path) as ledger, pytest.raises(ValueError, match="a/0 already"):
        ledger.append("a/0", {"p": 0.2})
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    with pytest.raises(BadFile, match="line 3: slot a/0 appears twice"):
        Ledger(path)


def test_every_cut_loses_at_most_the_row_in_flight(path: Path) -> None:
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        if cut not in (0, first):
            with pytest.raises(BadFile, match=r"cut off"):
                read_ledger(path)
        with Ledger(path) as ledger:
            assert list(ledger.entries) == (["a/0"] if cut >= first else [])
            if not ledger.entries:
                ledger.append("a/0", {"p": 0.1, "text": "一"})
            ledger.append("a/1", {"p": None})
        assert path.read_bytes() == whole


@pytest.mark.parametrize("line", ["{", "[1]", '{"p": 1}', '{"slot": 3}', "\xff", ""])
def test_damage_before_the_end_is_refused(path: Path, line: str) -> None:
    content = path.read_bytes()
    path.write_bytes(line.encode("latin-1") + b"\n" + content)
    for opening in (Ledger, read_ledger):
        with pytest.raises(BadFile, match="line 1"):
            opening(path)


def test_what_is_no_number_is_refused(path: Path) -> None:
    before = path.read_bytes()
    with Ledger(path) as ledger, pytest.raises(ValueError, match="not JSON compliant"):
        ledger.append("a/2", {"p": float("nan")})
    assert path.read_bytes() == before


def test_a_full_disk_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    with Ledger(path) as ledger:
        real = ledger._file

        class Full:
            spent = False

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def write(self, line: bytes) -> int:
                if self.spent:
                    raise OSError(28, "No space left on device")
                self.spent = True
                return real.write(line[:7])

        monkeypatch.setattr(ledger, "_file", Full())
        with pytest.raises(BadFile, match="No space left"):
            ledger.append("a/2", {"p": 0.5})
        monkeypatch.setattr(ledger, "_file", real)
        assert "a/2" not in ledger.entries
        assert path.read_bytes() == before
        ledger.append("a/2", {"p": 0.5})
    assert [json.loads(line)["slot"] for line in path.read_text().splitlines()] == [
        "a/0", "a/1", "a/2",
    ]  # fmt: skip
