"""Numeric classes: which work may be shared on this machine without changing a bit, measured.

Kernels pick another code path by shape: a softmax may treat the end of its rows apart, a product
may sum in other blocks above some length. A probe cannot prove a rule for all inputs; it finds the
rules that hold on its random inputs, and whoever relies on them compares whole rows against the
official order afterwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from charrm.errors import BadFile, NotCertified
from charrm.model import CharRM, DecoderLayer
from charrm.protocol import MAX_TOKENS
from charrm.runtime import describe_device

TAILS = (1, 2, 4, 8, 16, 32, 64)
ROW_COUNTS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 255, 257, 512,
              1000, 1024, 1025, 2048, 4096)  # fmt: skip
LENGTHS = (16, 17, 31, 33, 63, 64, 65, 100, 128, 129, 200, 256, 257, 384, 511, 512, 513, 640, 768,
           1000, 1023, 1024, 1025, 1280, 1536, 2047, 2048, 2049, 2560, 3072, 4095,
           4096)  # fmt: skip
# Rows below are never shared: products this small may take another path, and no prompt is.
LEAST_LENGTH = 16
MOST_LEAST_ROWS = 64


@dataclass(frozen=True)
class NumericClasses:
    """What may be shared, and the environment in which it was measured."""

    softmax_tail: int  # the last L % softmax_tail tokens of a row are its own
    pv_edges: tuple[int, ...]  # P.v differs between L <= edge and L > edge
    min_rows: int  # linears and attention see at least so many rows
    min_length: int  # rows shorter than this are computed alone, in the official order
    linear_rows_invariant: bool
    norm_rows_invariant: bool
    head_rows_invariant: bool  # evidence only: the head runs row by row
    torch_version: str
    device: str
    cpu_capability: str
    threads: int
    dtype: str

    def width_class(self, length: int) -> int:
        """Number of edges below a row's length."""
        return sum(length > edge for edge in self.pv_edges)

    def widths(self, width_class: int) -> tuple[int, int]:
        """Smallest and largest number of P.v columns of a class."""
        edges = (0, *self.pv_edges, MAX_TOKENS)
        return edges[width_class] + 1, edges[width_class + 1]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NumericClasses:
        """Read what `to_json` wrote; raises BadFile."""
        try:
            content: Any = json.loads(text)
            if not isinstance(content, dict) or content.keys() != {f.name for f in fields(cls)}:
                raise ValueError(f"expected the fields {', '.join(f.name for f in fields(cls))}")
            edges = content["pv_edges"]
            types = {f.name: type(content[f.name]).__name__ for f in fields(cls)}
            wanted = {f.name: f.type for f in fields(cls)} | {"pv_edges": "list"}
            if types != wanted or any(type(edge) is not int for edge in edges):
                raise ValueError(f"found the types {types}, expected {wanted}")
            classes = cls(**(content | {"pv_edges": tuple(edges)}))
            classes._check()
        except ValueError as error:
            raise BadFile(f"numeric classes cannot be read: {error}; probe again.") from None
        return classes

    def _check(self) -> None:
        edges = (0, *self.pv_edges, MAX_TOKENS)
        apart = all(b - a >= self.softmax_tail for a, b in pairwise(edges))
        if self.softmax_tail < 1 or self.min_rows < 1 or self.min_length < 1 or not apart:
            raise ValueError(f"found {self}")


def probe_classes(model: CharRM, device: torch.device) -> NumericClasses:
    """Measure the classes of the model's shapes on this machine. Raises NotCertified."""
    layer = model.model.layers[0]
    assert isinstance(layer, DecoderLayer)
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        probe = _Probe(model, layer, device)
        min_rows = probe.least_rows()
        tail = probe.softmax_tail()
        edges = probe.pv_edges(tail, min_rows)
        probe.products(min_rows)
        return NumericClasses(
            softmax_tail=tail,
            pv_edges=edges,
            min_rows=min_rows,
            min_length=max(LEAST_LENGTH, min_rows, tail),
            linear_rows_invariant=True,  # least_rows raises otherwise
            norm_rows_invariant=probe.norm_is_invariant(min_rows),
            head_rows_invariant=probe.head_is_invariant(),
            **environment_facts(model, device),
        )


def environment_facts(model: CharRM, device: torch.device) -> dict[str, Any]:
    """The part of `NumericClasses` that says where it was measured."""
    return {
        "torch_version": str(torch.__version__),
        "device": describe_device(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": str(model.score.weight.dtype).removeprefix("torch."),
    }


class _Probe:
    def __init__(self, model: CharRM, layer: DecoderLayer, device: torch.device) -> None:
        config = model.config
        self.model, self.layer, self.device = model, layer, device
        self.hidden, self.feed_forward = config.hidden_size, config.intermediate_size
        self.heads = min(config.num_attention_heads, 4)
        self.head_dim = config.head_dim
        self.dtype = model.score.weight.dtype
        # A generator of its own: the caller's random state stays as it is.
        self.generator = torch.Generator().manual_seed(1024)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def least_rows(self) -> int:
        """Smallest M from which every linear gives a row the same bits, alone or in company."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        parts: list[tuple[nn.Module, int]] = [
            (attention.W_pack, self.hidden),
            (attention.o_proj, self.hidden),
            (mlp, self.hidden),
        ]
        least = 1
        for module, width in parts:
            x = self.normal(1, max(ROW_COUNTS), width)
            bad = _differing_counts(module, x)
            if bad:
                least = max(least, max(bad) + 1)
        if least > MOST_LEAST_ROWS:
            raise NotCertified(
                f"a row's bits depend on the {least - 1} rows computed with it in a linear layer, "
                "on this machine; only the eager engine gives official scores here."
            )
        return 1 if least == 1 else max(16, _up(least, 16))

    def norm_is_invariant(self, least: int) -> bool:
        bad = _differing_counts(self.model.model.norm, self.normal(1, 4096, self.hidden))
        if [count for count in bad if count >= max(16, least)]:
            raise NotCertified(
                f"RMSNorm gives a row other bits among {bad} rows than among 4,096 on this "
                "machine; only the eager engine gives official scores here."
            )
        return not bad

    def head_is_invariant(self) -> bool:
        return not _differing_counts(self.model.score, self.normal(1, 256, self.hidden))

    def products(self, least: int) -> None:
        """q k^T and P.v over other numbers of queries, keys and items. Raises NotCertified."""
        q, k = (self.normal(1, self.heads, 1100, self.head_dim) for _ in range(2))
        full = torch.matmul(q, k.transpose(2, 3))
        for rows in {least, 16, 33, 256, 1000}:
            for columns in (16, 33, 64, 513, 1024, 1100):
                part = torch.matmul(q[:, :, -rows:], k[:, :, :columns].transpose(2, 3))
                batched = torch.matmul(  # as the tree engine does it: several items at once
                    q[:, :, -rows:].repeat(3, 1, 1, 1),
                    k[:, :, :columns].repeat(3, 1, 1, 1).transpose(2, 3),
                )
                expected = full[:, :, -rows:, :columns]
                if not (torch.equal(part, expected) and torch.equal(batched[1:2], expected)):
                    raise NotCertified(
                        f"q k^T of {rows} queries and {columns} keys differs from the same part "
                        "of 1,100 by 1,100; only the eager engine gives official scores here."
                    )

        weights = F.softmax(self.normal(1, self.heads, 300, 1100), dim=-1)
        attended = torch.matmul(weights, k)
        for rows in {least, 16, 33, 256}:
            part = torch.matmul(weights[:, :, -rows:], k)
            batched = torch.matmul(weights[:, :, -rows:].repeat(3, 1, 1, 1), k.repeat(3, 1, 1, 1))
            expected = attended[:, :, -rows:]
            if not (torch.equal(part, expected) and torch.equal(batched[1:2], expected)):
                raise NotCertified(
                    f"P.v of {rows} queries differs from the same part of 300; only the eager "
                    "engine gives official scores here."
                )

    def softmax_tail(self) -> int:
        """Smallest multiple to which widths may be padded without changing settled rows."""
        for tail in TAILS:
            if all(self._tail_holds(tail, length) for length in (*LENGTHS[:17], 1000, 1025, 2049)):
                return tail
        raise NotCertified(
            f"softmax rows depend on the width beyond the last {TAILS[-1]} columns on this "
            "machine; only the eager engine gives official scores here."
        )

    def _tail_holds(self, tail: int, length: int) -> bool:
        settled = length - length % tail
        rows = torch.arange(length, device=self.device)
        if length > 300:  # a spread of rows, always with the last settled ones
            rows = rows[:settled][-100:] if settled else rows[:0]
        rows = rows[rows < settled]
        if not len(rows):
            return True
        lowest = torch.finfo(self.dtype).min
        scores = self.normal(self.heads, len(rows), length) * 3
        columns = torch.arange(length, device=self.device)
        scores = scores.masked_fill(columns > rows[:, None], lowest)
        expected = F.softmax(scores, dim=-1)
        for width in {settled, _up(length, tail), _up(length, 64), 1024, 1088, 2048, 4096}:
            if width % tail == 0 and width >= settled:
                padded = F.pad(scores, (0, max(0, width - length)), value=lowest)[..., :width]
                found = F.softmax(padded.contiguous(), dim=-1)
                both = min(width, length)
                if not torch.equal(found[..., :both], expected[..., :both]):
                    return False
        return True

    def pv_edges(self, tail: int, least: int) -> tuple[int, ...]:
        """Lengths after which P.v of the same rows, zero-padded, changes."""
        rows, kept = max(least, 16), LENGTHS[0]
        weights = torch.zeros(self.heads, rows, MAX_TOKENS, dtype=self.dtype, device=self.device)
        values = self.normal(self.heads, MAX_TOKENS, self.head_dim)
        edges: list[int] = []
        for low, high in pairwise(LENGTHS):
            # Non-zero columns as far as both widths have them.
            kept = low - low % tail if low >= tail else low
            weights.zero_()
            weights[..., :kept] = F.softmax(self.normal(self.heads, rows, kept), dim=-1)

            def product(width: int, p: Tensor = weights, v: Tensor = values) -> Tensor:
                return torch.matmul(p[..., :width].contiguous(), v[:, :width].contiguous())

            at_low = product(low)
            if torch.equal(product(high), at_low):
                continue
            below, above = low, high
            while above - below > 1:
                middle = (below + above) // 2
                if torch.equal(product(middle), at_low):
                    below = middle
                else:
                    above = middle
            edges.append(below)
        if len(edges) > 4 or any(b - a < 2 * tail for a, b in pairwise((0, *edges, MAX_TOKENS))):
            raise NotCertified(
                f"P.v changes its bits at the lengths {edges} on this machine, too often to share "
                "prefixes; only the eager engine gives official scores here."
            )
        return tuple(edges)


def _differing_counts(module: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """Row counts at which a row differs from what it is among all rows of `x` (1, M, width)."""
    full = module(x)
    most = x.shape[1]
    bad = []
    for count in ROW_COUNTS:
        if count > most:
            continue
        # From the start, and from an odd row on: the position inside the batch changes too.
        for first in {0, min(most - count, 37)}:
            part = module(x[:, first : first + count].contiguous())
            if not torch.equal(part, full[:, first : first + count]):
                bad.append(count)
    return sorted(set(bad))


def _up(number: int, step: int) -> int:
    return math.ceil(number / step) * step
