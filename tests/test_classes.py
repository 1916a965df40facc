"""Numeric classes: written and read, probed here, and found where kernels are made to differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="module", autouse=True)
def fewer_cases() -> Iterator[None]:
    """The probe's method over fewer lengths and counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "charrm.engines.classes.LENGTHS", (17, 33, 63, 257, 1023, 1025, 2047, 2049, 3001)
        )
        patch.setattr("charrm.engines.classes.ROW_COUNTS", (1, 4, 16, 29, 33, 257, 499, 1025))
        patch.setattr("charrm.engines.classes.SOFTMAX_ELEMENTS", 1 << 18)
        yield


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
    found = NumericClasses(32, (1024, 2048), 1, 32, 4096, True, True, True, "0", "d", "c", 1, "b")
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
        {"width_edges": [1024.0]},
        {"width_edges": [2048, 1024]},
        {"width_edges": None},
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


def tail_of_32(softmax: Callable[..., Tensor], every: int) -> Callable[..., Tensor]:
    """A softmax whose last partial block of 32 columns differs in one row out of `every`."""

    def changed(x: Tensor, dim: int) -> Tensor:
        out = softmax(x, dim=dim)
        whole = x.shape[-1] - x.shape[-1] % 32
        out.view(-1, x.shape[-1])[::every, whole:] *= 1.01
        return out

    return changed


@pytest.mark.parametrize("every", [1, 997])
def test_a_softmax_tail_is_found(
    model: CharRM, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr(F, "softmax", tail_of_32(F.softmax, every))
    found = probe_classes(model, CPU)
    assert (found.softmax_tail, found.min_length) == (32, 32)


@pytest.mark.parametrize(
    ("edge", "expected"), [(1024, ((1024,), 4096)), (None, ((), 2048))], ids=str
)
def test_a_softmax_of_wide_rows(
    model: CharRM,
    classes: NumericClasses,
    monkeypatch: pytest.MonkeyPatch,
    edge: int | None,
    expected: tuple[tuple[int, ...], int],
) -> None:
    """Another kernel above a width is a class; a kernel that depends on every width is none."""
    softmax = F.softmax

    def changed(x: Tensor, dim: int) -> Tensor:
        out, width = softmax(x, dim=dim), x.shape[-1]
        if edge is not None:
            return out * 1.01 if width > edge else out
        return out * (1 + width % 64 / 64) if width > 2048 else out

    monkeypatch.setattr(F, "softmax", changed)
    found = probe_classes(model, CPU)
    assert (found.width_edges, found.max_length) == expected


def test_products_of_another_layout_are_refused(
    model: CharRM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several items at once, summed in another order in a few elements."""
    matmul = torch.matmul

    def changed(a: Tensor, b: Tensor) -> Tensor:
        out = matmul(a, b)
        if a.shape[0] > 1:
            out.view(-1)[::100_003] *= 1.01
        return out

    monkeypatch.setattr(torch, "matmul", changed)
    with pytest.raises(NotCertified, match="q k"):
        probe_classes(model, CPU)


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
    assert edge in found.width_edges
    assert set(found.width_edges) == {*classes.width_edges, edge}


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
