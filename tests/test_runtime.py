"""Settings that decide bits, and what is told about the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from charrm import Scorer
from charrm.engines import Outcome
from charrm.errors import InvalidSetting
from charrm.runtime import (
    SETTINGS,
    apply_settings,
    describe_device,
    environment,
    library_versions,
    numeric_fingerprint,
    parse_device,
    parse_dtype,
)

CPU = torch.device("cpu")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_dtypes_and_devices() -> None:
    assert parse_dtype("bfloat16") is torch.bfloat16
    assert parse_device("cpu") == CPU
    assert parse_device("auto").type in ("cpu", "cuda")
    for name in ("float16", "bf16", ""):
        with pytest.raises(InvalidSetting, match="expected one of bfloat16, float32"):
            parse_dtype(name)
    for name in ("tpu", "mps", "", "cuda:99", "cpu:x"):
        with pytest.raises(InvalidSetting, match="device: found"):
            parse_device(name)


def test_settings_of_the_process_are_put_right() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.mkldnn.enabled = False
    apply_settings()
    assert torch.get_float32_matmul_precision() == SETTINGS["float32_matmul_precision"][0]
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert all(reason for _, reason in SETTINGS.values())


def test_the_environment_names_what_can_change_bits() -> None:
    known = environment(CPU)
    assert known["threads"] == torch.get_num_threads()
    assert known["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert known["settings"].keys() == SETTINGS.keys()
    assert describe_device(CPU).startswith("cpu (")
    assert library_versions()["transformers"] == "4.36.2"


def test_the_fingerprint_is_of_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = numeric_fingerprint(CPU)
    assert found == numeric_fingerprint(CPU)
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr("charrm.runtime.F.softmax", lambda x, dim: softmax(x.float(), dim).half())
    with pytest.raises(RuntimeError, match="dtype"):
        numeric_fingerprint(CPU)
    monkeypatch.setattr(
        "charrm.runtime.F.softmax", lambda x, dim: (softmax(x.float(), dim) * 1.01).bfloat16()
    )
    assert numeric_fingerprint(CPU) != found


def test_one_and_two_threads_give_the_same_bits(demo_checkpoint: Path, threads: None) -> None:
    """Measured, not promised: a machine where this fails needs the thread count pinned."""
    engine = Scorer.open(demo_checkpoint, device="cpu").engine
    rows = [[3 + (7 * i * i) % 1900 for i in range(n)] + [2] for n in (1, 31, 200, 700)]
    outcomes = []
    for count in (1, 2):
        torch.set_num_threads(count)
        outcomes.append(engine.score_tokens(rows, keep_hidden=True))
    for one, two in zip(*outcomes, strict=True):
        assert isinstance(one, Outcome)
        assert isinstance(two, Outcome)
        assert (one.p, one.logit) == (two.p, two.logit)
        assert one.hidden is not None
        assert two.hidden is not None
        assert torch.equal(one.hidden, two.hidden)
