"""Replay: whole, killed, continued, refused; and the selftest's planted faults."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from charrm.demo import demo_profiles, demo_rows
from charrm.errors import BadFile, IdentityMismatch, NotFinite, Unreachable
from charrm.ledger import read_ledger
from golden.criteria import read_criteria
from golden.replay import Run, replay
from golden.report import write_report
from golden.selftest import FORWARD_FAULTS, TEXT_FAULTS, last_selftest, remember_selftest
from golden.selftest import run_selftest as selftest
from golden.sides import Side
from golden.structure import ReplayRow, ReplaySet, load_set
from golden.verify import verify_bundle

ROWS = 16


class Counting:
    """A source without weights: values follow from the slot alone."""

    def __init__(self, name: str, script: Callable[[ReplayRow], Side] | None = None) -> None:
        self.name = name
        self.asked: list[str] = []
        self.content = "1"
        self._script = script

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "content": self.content}

    def tokenize(self, row: ReplayRow) -> Side:
        self.asked.append(row.slot)
        return Side(ids="a" * 64, tokens=9, dropped=0)

    def score(self, row: ReplayRow) -> Side:
        self.asked.append(row.slot)
        if self._script:
            return self._script(row)
        p = (row.position + 1) / 64
        return Side("a" * 64, 9, 0, "b" * 64, -1.0, p, p * 4 + 1)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def demo_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of the demo's rows but the long one, as one model's generation file."""
    folder = tmp_path_factory.mktemp("set")
    rows = [row for row in demo_rows() if row["id"] != 1012][:ROWS]
    for name, content in {
        "data/character_profiles.json": demo_profiles(),
        "results/generation_trans_demo.jsonl": rows,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def replay_set(demo_set: Path) -> ReplaySet:
    return load_set(demo_set)


def make(
    replay_set: ReplaySet, candidate: Counting | None = None, reference: Counting | None = None
) -> Run:
    return Run(
        replay_set=replay_set,
        rows=replay_set.rows,
        sample=None,
        level="scores",
        candidate=candidate or Counting("eager"),
        reference=reference or Counting("slow"),
        criteria=read_criteria(),
        tables=["slow"],
    )


def test_every_row_has_one_line_in_order(replay_set: ReplaySet, tmp_path: Path) -> None:
    lines = replay(make(replay_set), tmp_path)
    assert [line["slot"] for line in lines] == [row.slot for row in replay_set.rows]
    assert read_ledger(tmp_path / "ledger.jsonl") == lines
    times = json.loads((tmp_path / "times.json").read_text())
    assert (times["rows"], times["sessions"]) == (ROWS, 1)


def test_a_run_goes_on_where_it_was(replay_set: ReplaySet, tmp_path: Path) -> None:
    def stops(row: ReplayRow) -> Side:
        if row.position == 5:
            raise Unreachable("planted")
        return Counting("slow").score(row)

    with pytest.raises(Unreachable):
        replay(make(replay_set, reference=Counting("slow", stops)), tmp_path / "run")
    assert len(read_ledger(tmp_path / "run" / "ledger.jsonl")) == 5
    candidate = Counting("eager")
    replay(make(replay_set, candidate), tmp_path / "run")
    assert candidate.asked == [row.slot for row in replay_set.rows[5:]]
    replay(make(replay_set), tmp_path / "whole")
    for name in ("manifest.json", "criteria.toml", "ledger.jsonl"):
        continued = (tmp_path / "run" / name).read_bytes()
        assert continued == (tmp_path / "whole" / name).read_bytes()


def test_a_row_that_fails_stays_in_the_denominator(replay_set: ReplaySet, tmp_path: Path) -> None:
    def fails(row: ReplayRow) -> Side:
        if row.position == 2:
            raise NotFinite("planted")
        return Counting("slow").score(row)

    lines = replay(make(replay_set, reference=Counting("slow", fails)), tmp_path)
    assert len(lines) == ROWS
    assert lines[2]["error"] == {"side": "reference", "kind": "not_finite", "message": "planted"}
    assert lines[2]["reference"] is None
    assert [line["error"] for line in lines].count(None) == ROWS - 1


@pytest.mark.parametrize("change", ["candidate", "reference", "set", "criteria", "rows", "level"])
def test_another_run_is_refused_and_named(
    replay_set: ReplaySet, tmp_path: Path, change: str
) -> None:
    replay(make(replay_set), tmp_path)
    other = make(replay_set)
    if change in ("candidate", "reference"):
        getattr(other, change).content = "2"
    elif change == "set":
        other = replace(other, replay_set=replace(replay_set, digest="0" * 64))
    elif change == "criteria":
        criteria = read_criteria()
        other = replace(other, criteria=replace(criteria, text=criteria.text + "\n"))
    elif change == "rows":
        other = replace(other, rows=replay_set.rows[::-1])
    else:
        other = replace(other, level="tokens")
    named = {
        "candidate": "candidate.content: started with '1', now '2'",
        "reference": "reference_identity.content",
        "set": "set.digest",
        "criteria": "criteria_sha256",
        "rows": "rows_sha256",
        "level": "level: started with 'scores', now 'tokens'",
    }
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(IdentityMismatch, match=named[change]):
        replay(other, tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_other_code_is_refused(
    replay_set: ReplaySet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(make(replay_set), tmp_path)
    monkeypatch.setattr("golden.replay.golden_code", lambda: {"charrm": "0", "golden": "0"})
    with pytest.raises(IdentityMismatch, match=r"code_sha256\.charrm"):
        replay(make(replay_set), tmp_path)


def test_two_processes_do_not_share_a_run(replay_set: ReplaySet, tmp_path: Path) -> None:
    def nested(row: ReplayRow) -> Side:
        with pytest.raises(BadFile, match="another process"):
            replay(make(replay_set), tmp_path)
        return Counting("slow").score(row)

    assert len(replay(make(replay_set, reference=Counting("slow", nested)), tmp_path)) == ROWS


def test_lines_of_other_rows_are_refused(replay_set: ReplaySet, tmp_path: Path) -> None:
    replay(make(replay_set), tmp_path)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    with pytest.raises(BadFile, match="not the first rows"):
        replay(make(replay_set), tmp_path)


def command(demo_set: Path, run: Path, checkpoint: Path) -> Sequence[str]:
    arguments = ["replay", str(demo_set), str(run), "--checkpoint", str(checkpoint)]
    return [sys.executable, "-m", "golden", *arguments, "--device", "cpu"]


def test_killed_runs_end_in_the_same_bundle(
    demo_set: Path, demo_checkpoint: Path, tmp_path: Path
) -> None:
    """SIGKILL at two points of the real command; the bundle equals that of a run left alone."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for lines in (3, 11):
        process = subprocess.Popen(command(demo_set, killed, demo_checkpoint))
        while process.poll() is None and _lines(killed) < lines:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with (killed / "ledger.jsonl").open("ab") as ledger:
        ledger.write(b'{"slot": "demo/000')  # what a kill inside a write leaves
    for run in (killed, whole):
        done = subprocess.run(command(demo_set, run, demo_checkpoint), capture_output=True)
        assert done.returncode == 0, done.stderr
        assert b"PASS" in done.stdout
        write_report(run, run.with_suffix(".bundle"))
        assert verify_bundle(run.with_suffix(".bundle"), demo_set) == []
    timed = {"times.json", "report.html", "SHA256SUMS"}
    ours, theirs = (
        {p.name: p.read_bytes() for p in run.with_suffix(".bundle").iterdir()}
        for run in (killed, whole)
    )
    assert ours.keys() == theirs.keys() > timed
    assert {n for n in ours if ours[n] != theirs[n]} <= timed
    # The set is part of what is verified: one character in it is noticed.
    changed = tmp_path / "changed"
    shutil.copytree(demo_set, changed)
    results = changed / "results" / "generation_trans_demo.jsonl"
    results.write_text(results.read_text(encoding="utf-8").replace("，", "。", 1), encoding="utf-8")
    assert verify_bundle(whole.with_suffix(".bundle"), changed)


def _lines(run: Path) -> int:
    path = run / "ledger.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_every_planted_fault_ends_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARRM_CACHE", str(tmp_path))
    result = selftest(tmp_path / "checkpoint")
    outcomes = {fault["fault"]: fault["outcome"] for fault in result["faults"]}
    planted = {*(fault.name for fault in FORWARD_FAULTS), *TEXT_FAULTS}
    assert outcomes == {"NONE": "green", **dict.fromkeys(planted, "red")}
    assert len(planted) == 10
    assert last_selftest() is None
    path = remember_selftest(result)
    assert last_selftest() == result
    path.write_text(path.read_text().replace('"red"', '"green"', 1))
    assert last_selftest() is None  # edited
    remember_selftest(result)
    monkeypatch.setattr("golden.selftest.golden_code", lambda: {"charrm": "0", "golden": "0"})
    assert last_selftest() is None  # of other code
