"""`bench.equality` and `bench.memory`: small runs, and controls that must fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from bench import equality, memory
from bench.workload import BenchRow, shaped_rows, short_and_spread
from charrm.engines import classes
from charrm.errors import BadFile


@pytest.fixture(autouse=True)
def quick_probe() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classes, "LENGTHS", (17, 33, 63, 257, 1025))
        patch.setattr(classes, "ROW_COUNTS", (1, 16, 33, 257))
        patch.setattr(classes, "SOFTMAX_ELEMENTS", 1 << 18)
        yield
    torch.set_num_threads(threads)


def bench_rows() -> list[BenchRow]:
    rows = shaped_rows(4000, roles=2, contexts=2, metrics=2, scale=0.15)
    return [BenchRow(f"m/{i}", f"role {i // 4}", "1", ids) for i, ids in enumerate(rows)]


def run(folder: Path, *options: str) -> Result:
    arguments = ["no-set", str(folder), "--tokenizer", "none", "--preset", "tiny",
                 "--processes", "1", *options]  # fmt: skip
    return CliRunner().invoke(equality.app, arguments)


def edit_line(path: Path, **changes: Any) -> None:
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(first) | changes) + "\n" + "".join(rest))


def test_equality_from_start_to_end(tmp_path: Path) -> None:
    rows = bench_rows()
    (tmp_path / "rows.json").write_text(json.dumps([vars(row) for row in rows]))
    assert run(tmp_path, "--only", "eager").exit_code == 0
    ledger = tmp_path / "eager.jsonl"
    whole = ledger.read_text()
    # Killed in the middle of a line: that row is computed again, to the same bytes.
    ledger.write_text(whole[:-30])
    done = run(tmp_path)
    assert done.exit_code == 0, done.output
    assert sorted(ledger.read_text().splitlines()) == sorted(whole.splitlines())
    result = json.loads(done.output.splitlines()[-1])
    assert (result["rows"], result["roles"]) == (8, 2)
    assert result["different"] == {
        "tree_1_threads": [], "tree_2_threads": [], "eager_2_threads": []
    }  # fmt: skip

    slot = json.loads(whole.splitlines()[0])["slot"]
    edit_line(ledger, hidden="0" * 64)
    done = run(tmp_path)
    assert done.exit_code == 1
    assert slot in json.loads(done.output.splitlines()[-1])["different"]["tree_1_threads"]

    edit = json.loads((tmp_path / "manifest.json").read_text()) | {"torch": "0"}
    (tmp_path / "manifest.json").write_text(json.dumps(edit))
    refused = run(tmp_path)
    assert isinstance(refused.exception, BadFile)
    assert "another preset, torch or code" in str(refused.exception)


def test_rows_are_short_and_spread() -> None:
    rows = [BenchRow(f"m/{n}", f"role {n % 30}", "1", [n] * n) for n in range(1, 1000)]
    found = short_and_spread([*rows, rows[0]], 300, 20)
    lengths = sorted(len(row.ids) for row in found)
    assert len({row.slot for row in found}) == 300
    assert (lengths[0], lengths[-1]) == (1, 999)
    assert sum(length > 400 for length in lengths) >= 2
    roles = [row.role for row in found]
    assert max(roles.count(role) for role in set(roles)) <= 20 + 20
    with pytest.raises(ValueError, match="999 distinct rows"):
        short_and_spread(rows, 1000, 20)


def test_memory_within_its_bound() -> None:
    found = memory.measure("tiny", 2048, 32)
    assert 1000 < found["tokens"] <= 2048
    # At least q, k, v and x of every token lie in memory at once.
    assert found["tokens"] * 160 * 2 * 4 < found["peak_bytes"] <= found["bound_bytes"]


def test_memory_above_its_bound_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        stdout = json.dumps(
            {"pack_tokens": 1, "tokens": 1, "bound_bytes": 10, "peak_bytes": 11}
        )  # fmt: skip

    monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: Done)
    app = typer.Typer()
    app.command()(memory.main)
    done = CliRunner().invoke(app, ["--pack-tokens", "1"])
    assert done.exit_code == 1
    assert json.loads(done.output.splitlines()[-1])[0]["peak_bytes"] == 11
