"""The run on one GPU, in miniature: it ends, it sees planted differences, it survives being cut."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from bench import gpu, gpu_probe
from bench.gpu_probe import Case, Classes, blas, difference
from bench.workload import PRESETS, random_model
from charrm.engines.classes import NumericClasses
from charrm.errors import NotCertified, OutOfMemory
from charrm.model import CharRM

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--preset", "tiny", "--device", "cpu", "--rows", "12", "--largest", "96")
STEPS = ["facts", "weights", "probe", "compare", "extrapolate"]
FAMILIES = {"W_pack", "o_proj", "gate", "down", "softmax", "softmax, unaligned rows", "q k^T",
            "P v", "mean", "head", "sigmoid"}  # fmt: skip
BLOCKED = """
import runpy, sys
for name in ("transformers", "sentencepiece", "tokenizers", "accelerate"):
    sys.modules[name] = None
import bench.gpu_probe, bench.workload, charrm.engines.classes, dataclasses
charrm.engines.classes.ROW_COUNTS = (1, 4, 16, 33, 257, 1025)
charrm.engines.classes.SOFTMAX_ELEMENTS = 1 << 18
bench.gpu_probe.ROW_COUNTS = bench.gpu_probe.ROW_COUNTS[::5]
tiny = bench.workload.PRESETS["tiny"]
bench.workload.PRESETS["tiny"] = dataclasses.replace(
    tiny, hidden_size=64, num_attention_heads=2, intermediate_size=96, num_hidden_layers=2
)
runpy.run_module("bench.gpu", run_name="__main__")
"""


def lines_of(folder: Path) -> list[Any]:
    """Every line but one that a killed process did not finish."""
    whole = (folder / "results.jsonl").read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def summary_of(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def subprocess_arguments(folder: Path) -> list[str]:
    return [sys.executable, "-c", BLOCKED, str(folder), *SMALL]


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One whole run in a process that has no transformers: its folder and its summary."""
    folder = tmp_path_factory.mktemp("gpu") / "out"
    ended = subprocess.run(
        subprocess_arguments(folder), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "no GPU was measured" in ended.stdout
    summary = summary_of(folder)
    assert json.loads(ended.stdout.splitlines()[-1]) == gpu.brief(summary)
    assert len(ended.stdout.splitlines()[-1]) < 8000  # readable where only an end is kept
    return folder, summary


def test_the_block_is_one() -> None:
    code = BLOCKED.partition("import bench")[0] + "import transformers"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ModuleNotFoundError" in ended.stderr


def test_a_miniature_run_ends_with_every_step(miniature: tuple[Path, Any]) -> None:
    folder, summary = miniature
    assert [(s["name"], s["status"]) for s in summary["steps"]] == [(n, "done") for n in STEPS]
    lines = lines_of(folder)
    assert {line["step"] for line in lines} == {"run", *STEPS}
    assert summary["facts"]["matmul_tflops"] > 0
    assert summary["weights"]["bytes"] > 5e5
    assert set(summary["probe"]["families"]) == FAMILIES
    for name, family in summary["probe"]["families"].items():
        cases = [line for line in lines if line.get("family") == name and "case" in line]
        assert family["cases"] == len(cases) > 1
        members = [
            label for one in family["classes"] for labels in one.values() for label in labels
        ]
        assert members
        assert {line["case"] for line in cases} <= set(members)


def test_the_tree_of_the_miniature_run_is_equal(miniature: tuple[Path, Any]) -> None:
    folder, summary = miniature
    compared = summary["compare"]
    assert compared["compared"] == compared["equal"] == compared["eager_rows"] == 12
    assert compared["token_ratio"] > 1
    assert compared["rows_skipped_time"] == 0
    assert compared["flops"]["loop_over_tree"] > 1
    assert sum(line.get("equal", False) is True for line in lines_of(folder)
               if line["step"] == "compare" and "row" in line) == 12  # fmt: skip
    found = summary["extrapolate"]
    assert found["loop_seconds"] == pytest.approx(
        compared["eager_seconds"] / compared["eager_tokens"] * 40_160 * 800
    )
    assert found["tree_seconds"] == pytest.approx(
        compared["tree_seconds"][-1] / compared["unique_tokens"] * 40_160 * 800 / 24.7
    )


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = subprocess.Popen(
        subprocess_arguments(folder), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None:
            if folder.joinpath("results.jsonl").is_file() and len(lines_of(folder)) > 30:
                break
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert lines_of(folder)[-1]["step"] == "probe"
    assert not (folder / "summary.json").exists()


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sizes in this process as in the others; bf16 on a CPU is slow."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
    tiny = replace(PRESETS["tiny"], **sizes, num_hidden_layers=2)
    monkeypatch.setitem(PRESETS, "tiny", tiny)


def run(folder: Path, *arguments: str) -> tuple[Result, Any]:
    """In this process; the result and the summary."""
    ended = CliRunner().invoke(gpu.app, [str(folder), *SMALL, *arguments])
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    assert json.loads(ended.stdout.splitlines()[-1])["run"]["device"].startswith("cpu (")
    return ended, summary_of(folder)


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "ROW_COUNTS", (16, 17, 64, 96, 257))
    monkeypatch.setattr(gpu_probe, "LENGTHS", (64, 65, 80, 81, 96))
    monkeypatch.setattr(gpu_probe, "QUERIES", (16, 37))


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(gpu, "STEPS", [step for step in gpu.STEPS if step[0] in names])


def test_no_time_skips_every_step(tmp_path: Path) -> None:
    ended, summary = run(tmp_path / "out", "--minutes", "0")
    assert ended.exit_code == 0
    assert [(s["name"], s["status"]) for s in summary["steps"]] == [
        (name, "skipped: time") for name in STEPS
    ]
    assert [line["status"] for line in lines_of(tmp_path / "out")[1:]] == 5 * ["skipped: time"]


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "--minutes", "0")
    before = lines_of(tmp_path)
    ended = CliRunner().invoke(gpu.app, [str(tmp_path), *SMALL, "--minutes", "0"])
    assert ended.exit_code == 2
    assert lines_of(tmp_path) == before


def test_a_device_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu", str(tmp_path), "--device", "tpu"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "found 'tpu', expected auto, cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("few_cases")
def test_a_step_out_of_time_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "weights", "probe", "extrapolate")
    answers = iter(5 * [False])
    monkeypatch.setattr(gpu.Run, "late", lambda self: next(answers, True))
    ended, summary = run(tmp_path / "out")
    assert ended.exit_code == 0
    assert [s["status"] for s in summary["steps"]] == ["done", "cut: time", "done"]
    assert list(summary["probe"]["families"]) == ["W_pack"]
    assert summary["probe"]["families"]["W_pack"]["cases"] == 5
    assert summary["probe"]["families"]["W_pack"]["cut"] == "time"
    assert summary["extrapolate"]["no_tree"] == "it did not run"
    skipped = [line for line in lines_of(tmp_path / "out") if line.get("status") == "skipped: time"]
    default = {line["family"] for line in skipped if line["setting"] == gpu_probe.OFFICIAL}
    assert default == FAMILIES - {"W_pack"}
    assert {line["family"] for line in skipped if line["setting"] == "no reduced precision"} == {
        "W_pack", "o_proj", "gate", "down"
    }  # fmt: skip


@pytest.mark.usefixtures("few_cases")
def test_what_fails_is_recorded_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_facts(_: gpu.Run) -> bool:
        raise OSError("no such device")

    def no_mean(_: gpu_probe.Probe) -> Iterator[Case]:
        raise RuntimeError("not implemented for this device")
        yield

    steps = [("facts", 0.1, no_facts), *(s for s in gpu.STEPS if s[0] in ("weights", "probe"))]
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu_probe.Probe, "mean", no_mean)
    ended, summary = run(tmp_path / "out")
    assert ended.exit_code == 1
    assert summary["steps"][0]["error"] == "OSError: no such device"
    assert [s["status"] for s in summary["steps"]] == ["failed", "done", "done"]
    families = summary["probe"]["families"]
    assert families["mean"]["error"] == "RuntimeError: not implemented for this device"
    assert families["mean"]["cases"] == 0
    assert {name for name, family in families.items() if "error" not in family} == FAMILIES - {
        "mean"
    }


class RowsMatter(nn.Module):
    """A linear that changes its bits when it sees at least `most` rows."""

    def __init__(self, inner: nn.Module, most: int) -> None:
        super().__init__()
        self.inner, self.most = inner, most

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * 1.01 if x.shape[1] >= self.most else out


@pytest.mark.usefixtures("few_cases")
def test_planted_differences_are_classes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    softmax, matmul = F.softmax, torch.matmul

    def wide_softmax(x: Tensor, dim: int) -> Tensor:
        out = softmax(x, dim=dim)
        return out * 1.01 if x.shape[-1] > 80 else out

    def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
        out = matmul(a, b)
        return out * 1.01 if a.shape[-1] > 64 else out  # heads have 32

    def odd_model(*arguments: Any) -> CharRM:
        model = random_model(*arguments)
        attention = model.model.layers[0].self_attn
        assert isinstance(attention, nn.Module)
        attention._modules["W_pack"] = RowsMatter(attention._modules["W_pack"], 90)  # type: ignore[arg-type]
        return model

    monkeypatch.setattr(F, "softmax", wide_softmax)
    monkeypatch.setattr(torch, "matmul", wide_matmul)
    monkeypatch.setattr(gpu, "random_model", odd_model)
    only(monkeypatch, "weights", "probe")
    _, summary = run(tmp_path / "out")
    families = summary["probe"]["families"]

    def members(name: str, kind: str) -> list[set[int]]:
        return [set(one.get(kind, [])) for one in families[name]["classes"]]

    short = set(summary["probe"]["official_lengths"])
    assert max(short) < 64
    assert members("softmax", "official") == [{81, 96}, {64, 65, 80} | short]
    assert members("P v", "official") == [{65, 80, 81, 96}, {64} | short]
    assert members("W_pack", "other M") == [{96, 257}, {16, 17, 64} - short]
    assert members("W_pack", "no reduced precision") == [{96, 257}, {16, 17, 64} | short]
    for name in FAMILIES - {"softmax", "P v", "W_pack"}:
        assert families[name]["equal"] == families[name]["cases"], name
    [line] = [
        line for line in lines_of(tmp_path / "out")
        if line.get("family") == "W_pack" and line.get("case") == 64 and line["offset"] == 37
        and line["kind"] == "other M"
    ]  # fmt: skip
    assert (line["equal"], line["copies_agree"], line["class"]) == (False, True, 1)
    assert line["different"] > 0
    assert line["largest"] > 0


@pytest.mark.parametrize("operation", ["softmax", "matmul"])
def test_an_edge_at_1024_columns_is_found(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Of rows and of the tree's runs alike, and nothing else is seen."""
    monkeypatch.setattr(gpu_probe, "LENGTHS", (64, 1000, 1023, 1024, 1025, 1100))
    monkeypatch.setattr(gpu_probe, "QUERIES", (16,))
    monkeypatch.setattr(gpu_probe, "STARTS", (960,))
    config = replace(PRESETS["tiny"], hidden_size=32, num_attention_heads=1, num_hidden_layers=1)
    device = torch.device("cpu")
    probe = gpu_probe.Probe(random_model(config, device), device, 1100, [])
    module = F if operation == "softmax" else torch
    inner = getattr(module, operation)

    def wide(x: Tensor, *others: Any, **options: Any) -> Tensor:
        out: Tensor = inner(x, *others, **options)
        return out * 1.01 if x.shape[-1] > 1024 else out

    monkeypatch.setattr(module, operation, wide)
    classes = Classes()
    for case in probe.softmax() if operation == "softmax" else probe.attended():
        classes.add(case)
    long, short = classes.members
    assert set(long["official"]) == {1100, 1025}
    assert set(short["official"]) == {64, 1000, 1023, 1024}
    runs = [{str(label).partition(",")[0] for label in one["tree"]} for one in (long, short)]
    assert runs == [{"16x1025 at 960"}, {f"16x{w} at 960" for w in (976, 977, 992, 1024)}]


def test_a_difference_has_its_place_and_size() -> None:
    one = torch.zeros(2, 5, 3, dtype=torch.bfloat16)
    other = one.clone()
    assert difference(one, other) == {"equal": True, "elements": 30, "different": 0}
    other[1, 2:4, 0] = torch.tensor([0.5, -2.0])
    assert difference(one, other) == {
        "equal": False, "elements": 30, "different": 2, "largest": 2.0, "rows_different": 2,
        "first_row": 2, "last_row": 3,
    }  # fmt: skip
    other[0, 0, 0] = math.nan
    assert difference(one, other)["largest"] == "nan"
    assert not difference(one, -one)["equal"]  # bits, not numbers


def test_classes_compare_common_rows_and_columns() -> None:
    whole = torch.arange(20, dtype=torch.float32).view(5, 4)
    classes = Classes()
    classes.add(Case("official", 5, whole))
    assert classes.add(Case("tree", "in the middle", whole[2:4, :2], start=2))["class"] == 0
    assert classes.add(Case("tree", "displaced", whole[2:4, :2], start=1))["class"] == 1
    assert classes.summary()["classes"] == [
        {"official": [5], "tree": ["in the middle"]}, {"tree": ["displaced"]}
    ]  # fmt: skip
    for number in range(10):
        line = classes.add(Case("many", number, whole + 100 * (number + 1)))
    assert line["class"] is None
    assert classes.summary()["in_none_of_these"] == {"many": [6, 7, 8, 9]}


def test_the_setting_of_split_k_is_put_back() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    with suppress(KeyError), blas("no reduced precision"):
        assert matmul.allow_bf16_reduced_precision_reduction is not before
        raise KeyError
    assert matmul.allow_bf16_reduced_precision_reduction is before


def test_any_beginning_of_the_rows_holds_all_lengths() -> None:
    rows = gpu.official_rows(4000, 300, 4096)
    lengths = sorted(map(len, rows))
    assert len(rows) == 300
    assert lengths[0] < 200
    assert lengths[-1] == 4096
    for count in (10, 37, 150):
        part = sorted(map(len, rows[:count]))
        assert abs(part[count // 2] - lengths[150]) < 200
        assert part[0] < 300
        assert part[-1] > 1800


@pytest.fixture
def measured(miniature: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of the miniature run, without measuring them again."""
    classes = NumericClasses.from_json(json.dumps(miniature[1]["compare"]["classes"]))
    monkeypatch.setattr(gpu, "probe_classes", lambda *_: classes)
    only(monkeypatch, "weights", "compare", "extrapolate")


@pytest.mark.usefixtures("measured")
def test_a_tree_that_differs_ends_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = gpu.TreeEngine.score_tokens

    def other(self: Any, rows: Any, **options: Any) -> Any:
        outcomes = inner(self, rows, **options)
        return [*outcomes[:3], outcomes[4], *outcomes[4:]]

    monkeypatch.setattr(gpu.TreeEngine, "score_tokens", other)
    ended, summary = run(tmp_path / "out")
    assert ended.exit_code == 1
    found = summary["compare"]
    assert (found["compared"], found["equal"]) == (12, 11)
    assert [line["row"] for line in found["different"]] == [3]
    assert found["largest_difference"]["hidden"] > 0
    assert summary["extrapolate"]["tree_equal_here"] == "11 of 12"


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", ["not_certified", "tree_error", "row"])
def test_without_a_tree_eager_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise {"not_certified": NotCertified, "tree_error": TypeError}[name]("planted")

    if name == "row":
        rows = [OutOfMemory("planted")] * 12
        monkeypatch.setattr(gpu.TreeEngine, "score_tokens", lambda *_, **__: rows)
    else:
        monkeypatch.setattr(gpu, "probe_classes", fail)
    ended, summary = run(tmp_path / "out")
    found = summary["compare"]
    assert (found["eager_rows"], found["compared"]) == (12, 0)
    assert ended.exit_code == (0 if name == "not_certified" else 1)
    assert summary["extrapolate"]["loop_seconds"] > 0
    if name == "row":
        assert "planted" in summary["steps"][1]["error"]
    else:
        assert "planted" in summary["extrapolate"]["no_tree"]
