"""Numeric classes: written and read, probed here, and found where kernels are made to differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from charrm.checkpoint import find_checkpoint, load_model
from charrm.engines.classes import NumericClasses, probe_classes
from charrm.errors import BadFile, NotCertified
from charrm.model import CharRM

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(demo_checkpoint: Path) -> CharRM:
    return load_model(find_checkpoint(demo_checkpoint), CPU, torch.bfloat16, cast=False).model


@pytest.fixture(scope="module")
def classes(model: CharRM) -> NumericClasses:
    return probe_classes(model, CPU)


def test_the_probe_says_the_same_twice_and_names_its_machine(
    model: CharRM, classes: NumericClasses
) -> None:
    state = torch.get_rng_state()
    assert probe_classes(model, CPU) == classes
    assert torch.equal(torch.get_rng_state(), state)
    assert classes.torch_version == torch.__version__
    assert classes.threads == torch.get_num_threads()
    assert (classes.dtype, classes.linear_rows_invariant) == ("bfloat16", True)


def test_width_classes() -> None:
    found = NumericClasses(32, (1024, 2048), 1, 32, True, True, True, "0", "d", "c", 1, "b")
    assert [found.width_class(n) for n in (1, 1024, 1025, 2048, 2049, 4096)] == [0, 0, 1, 1, 2, 2]
    assert [found.widths(c) for c in (0, 1, 2)] == [(1, 1024), (1025, 2048), (2049, 4096)]


def test_json_round_trip(classes: NumericClasses) -> None:
    assert NumericClasses.from_json(classes.to_json()) == classes


@pytest.mark.parametrize(
    "change",
    [
        {"softmax_tail": "32"},
        {"softmax_tail": 0},
        {"softmax_tail": True},
        {"pv_edges": [1024.0]},
        {"pv_edges": [2048, 1024]},
        {"pv_edges": None},
        {"min_rows": -1},
        {"linear_rows_invariant": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_other_json_is_refused(classes: NumericClasses, change: dict[str, Any]) -> None:
    content = json.loads(classes.to_json())
    for text in (json.dumps(content | change), "{", "[]"):
        with pytest.raises(BadFile, match="probe again"):
            NumericClasses.from_json(text)


def tail_of_32(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A softmax whose last partial block of 32 columns takes another exp."""

    def changed(x: Tensor, dim: int) -> Tensor:
        out = softmax(x, dim=dim)
        whole = x.shape[-1] - x.shape[-1] % 32
        out[..., whole:] *= 1.01
        return out

    return changed


def test_a_softmax_tail_is_found(model: CharRM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "softmax", tail_of_32(F.softmax))
    found = probe_classes(model, CPU)
    assert (found.softmax_tail, found.min_length) == (32, 32)


def wide_product_differs(edge: int) -> Callable[[Tensor, Tensor], Tensor]:
    matmul = torch.matmul

    def changed(a: Tensor, b: Tensor) -> Tensor:
        out = matmul(a, b)
        return out * 1.01 if a.shape[-1] > edge else out

    return changed


@pytest.mark.parametrize("edge", [700, 2048])
def test_an_edge_of_pv_is_found(
    model: CharRM, classes: NumericClasses, monkeypatch: pytest.MonkeyPatch, edge: int
) -> None:
    monkeypatch.setattr(torch, "matmul", wide_product_differs(edge))
    found = probe_classes(model, CPU)
    assert edge in found.pv_edges
    assert set(found.pv_edges) == {*classes.pv_edges, edge}


class RowsMatter(nn.Module):
    """A layer that changes its bits when it sees fewer rows than `least`."""

    def __init__(self, inner: nn.Module, least: int) -> None:
        super().__init__()
        self.inner, self.least = inner, least

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * 1.01 if x.shape[1] < self.least else out


@pytest.mark.parametrize(("least", "expected"), [(5, 16), (30, 32), (500, None)])
def test_linears_that_depend_on_company_are_found(
    model: CharRM, monkeypatch: pytest.MonkeyPatch, least: int, expected: int | None
) -> None:
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, nn.Module)
    monkeypatch.setitem(attention._modules, "W_pack", RowsMatter(attention.W_pack, least))  # type: ignore[arg-type]
    if expected is None:
        with pytest.raises(NotCertified, match="only the eager engine"):
            probe_classes(model, CPU)
    else:
        assert probe_classes(model, CPU).min_rows == expected


def test_a_norm_that_depends_on_company_is_refused(
    model: CharRM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model.model._modules, "norm", RowsMatter(model.model.norm, 100))
    with pytest.raises(NotCertified, match="RMSNorm"):
        probe_classes(model, CPU)
