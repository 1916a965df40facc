"""Numeric classes: which work may be shared on this machine without changing a bit, measured.

Kernels pick another code path by shape: a softmax may treat the end of its rows apart or take
another kernel above some length, a product may sum in other blocks there. A probe cannot prove a
rule for all inputs; it finds the rules that hold on its random inputs, and whoever relies on them
compares whole rows against the official order afterwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
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
LENGTHS = (16, 17, 31, 33, 63, 65, 100, 129, 200, 257, 384, 511, 513, 768, 1000, 1023, 1025, 1536,
           2047, 2049, 3072, 4095, 4096)  # fmt: skip
# Rows below are never shared: products this small may take another path, and no prompt is.
LEAST_LENGTH = 16
MOST_LEAST_ROWS = 64
# Where sharing fails for long rows, shorter ones may still share; longer ones then run alone.
LONGEST = (MAX_TOKENS, 2048, 1024)
MOST_EDGES = 4
# A scalar exp at the end of a softmax row was seen to change one element in some thousands.
SOFTMAX_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class NumericClasses:
    """What may be shared, and the environment in which it was measured."""

    softmax_tail: int  # the last L % softmax_tail tokens of a row are its own
    width_edges: tuple[int, ...]  # softmax or P.v differ between L <= edge and L > edge
    min_rows: int  # linears and attention see at least so many rows
    min_length: int  # shorter rows are computed alone, in the official order
    max_length: int  # and so are longer ones
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
        return sum(length > edge for edge in self.width_edges)

    def widths(self, width_class: int) -> tuple[int, int]:
        """Smallest and largest number of attention columns of a class."""
        edges = (0, *self.width_edges, self.max_length)
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
            edges = content["width_edges"]
            types = {f.name: type(content[f.name]).__name__ for f in fields(cls)}
            wanted = {f.name: f.type for f in fields(cls)} | {"width_edges": "list"}
            if types != wanted or any(type(edge) is not int for edge in edges):
                raise ValueError(f"found the types {types}, expected {wanted}")
            classes = cls(**(content | {"width_edges": tuple(edges)}))
            classes._check()
        except ValueError as error:
            raise BadFile(f"numeric classes cannot be read: {error}; probe again.") from None
        return classes

    def _check(self) -> None:
        edges = (0, *self.width_edges, self.max_length)
        apart = all(b - a >= self.softmax_tail for a, b in pairwise(edges))
        least = min(self.softmax_tail, self.min_rows, self.min_length)
        if least < 1 or not apart or self.max_length > MAX_TOKENS:
            raise ValueError(f"found {self}")


def probe_classes(model: CharRM, device: torch.device) -> NumericClasses:
    """Measure the classes of the model's shapes on this machine. Raises NotCertified."""
    layer = model.model.layers[0]
    assert isinstance(layer, DecoderLayer)
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        probe = _Probe(model, layer, device)
        min_rows = probe.least_rows()
        tail, edges, longest = probe.widths(min_rows)
        probe.products(min_rows)
        return NumericClasses(
            softmax_tail=tail,
            width_edges=edges,
            min_rows=min_rows,
            min_length=max(LEAST_LENGTH, min_rows, tail),
            max_length=longest,
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
        # Views of one packed tensor, as the official forward has them.
        packed = self.normal(1, 1100, 3 * self.heads * self.head_dim)
        q, k, v = (
            part.view(1, 1100, self.heads, self.head_dim).transpose(1, 2)
            for part in packed.chunk(3, dim=-1)
        )
        full = torch.matmul(q, k.transpose(2, 3))
        for rows in {least, 16, 33, 256, 1000}:
            for columns in (16, 33, 64, 513, 1024, 1100):
                expected = full[:, :, -rows:, :columns]
                found = [  # as the tree engine does it: several items at once
                    torch.matmul(
                        _items(q[:, :, -rows:], items),
                        _items(k[:, :, :columns], items).contiguous().transpose(2, 3),
                    )[-1:]
                    for items in (1, 3)
                ]
                if not all(torch.equal(part, expected) for part in found):
                    raise NotCertified(
                        f"q k^T of {rows} queries and {columns} keys differs from the same part "
                        "of 1,100 by 1,100; only the eager engine gives official scores here."
                    )

        weights = F.softmax(self.normal(1, self.heads, 300, 1100), dim=-1)
        attended = torch.matmul(weights, v)
        for rows in {least, 16, 33, 256}:
            expected = attended[:, :, -rows:]
            part = weights[:, :, -rows:]
            found = [
                torch.matmul(part.repeat(items, 1, 1, 1), _items(v, items))[-1:] for items in (1, 3)
            ]
            if not all(torch.equal(part, expected) for part in found):
                raise NotCertified(
                    f"P.v of {rows} queries differs from the same part of 300; only the eager "
                    "engine gives official scores here."
                )

    def widths(self, least: int) -> tuple[int, tuple[int, ...], int]:
        """Softmax tail, width edges and the length up to which they hold. Raises NotCertified.

        The tail is the smallest multiple to which widths may be padded, inside their class,
        without changing settled rows (those below `L - L % tail`).
        """
        for longest in LONGEST:
            lengths = [length for length in LENGTHS if length <= longest]
            candidates = []
            for tail in TAILS:
                edges = self._edges(lengths, tail, self._settled_softmax(tail))
                if edges is not None and self._tail_holds(lengths, tail, edges):
                    candidates.append((len(edges), tail, edges))
                    if not edges:
                        break
            if candidates:
                # Too small a tail shows as edges of its own, so the fewest are the right ones.
                _, tail, edges = min(candidates)
                more = self._edges(lengths, tail, self._attended(least))
                both = tuple(sorted({*edges, *(more or ())}))
                bounds = (0, *both, longest)
                if more is not None and all(b - a >= 2 * tail for a, b in pairwise(bounds)):
                    return tail, both, longest
        raise NotCertified(
            f"softmax or P.v of the same row change their bits with the width, beyond tails of "
            f"{TAILS[-1]} columns and {MOST_EDGES} edges even below {LONGEST[-1]}, on this "
            "machine; only the eager engine gives official scores here."
        )

    def _edges(
        self, lengths: Sequence[int], tail: int, prepare: Callable[[int], Callable[[int], Tensor]]
    ) -> tuple[int, ...] | None:
        """Widths after which a result changes; None when there are too many to be classes.

        `prepare(kept)` draws rows with support in the first `kept` columns and returns the result
        (..., kept) as a function of the width.
        """
        edges: list[int] = []
        for low, high in pairwise(length for length in lengths if length >= tail):
            at = prepare(low - low % tail)
            at_low = at(low)
            if torch.equal(at(high), at_low):
                continue
            below, above = low, high
            while above - below > 1:
                middle = (below + above) // 2
                if torch.equal(at(middle), at_low):
                    below = middle
                else:
                    above = middle
            edges.append(below)
            if len(edges) > MOST_EDGES:
                return None
        return tuple(edges)

    def _settled_softmax(self, tail: int) -> Callable[[int], Callable[[int], Tensor]]:
        def prepare(kept: int) -> Callable[[int], Tensor]:
            scores = self._settled_scores(kept, kept)
            return lambda width: self._softmax(scores, width)[..., :kept]

        return prepare

    def _attended(self, least: int) -> Callable[[int], Callable[[int], Tensor]]:
        rows = max(least, 64)
        values = self.normal(self.heads, MAX_TOKENS, self.head_dim)

        def prepare(kept: int) -> Callable[[int], Tensor]:
            weights = F.softmax(self.normal(self.heads, rows, kept), dim=-1)

            def product(width: int) -> Tensor:
                p = F.pad(weights, (0, width - kept))
                return torch.matmul(p, values[:, :width].contiguous())

            return product

        return prepare

    def _tail_holds(self, lengths: Sequence[int], tail: int, edges: tuple[int, ...]) -> bool:
        """Whether settled rows of every length agree at the widths their class may pad them to."""
        bounds = (0, *edges, lengths[-1])
        for length in lengths:
            settled = length - length % tail
            low, high = next((a, b) for a, b in pairwise(bounds) if a < length <= b)
            if not settled:
                continue
            scores = self._settled_scores(settled, length)
            expected = self._softmax(scores, length)
            high -= high % tail
            for width in {settled, _up(length, tail), _up(length, 64), _up(low + 1, tail), high}:
                if not (max(settled, low + 1) <= width <= high):
                    continue
                both = min(width, length)
                some = SOFTMAX_ELEMENTS // width
                found = self._softmax(scores[:some, :both], width)
                if not torch.equal(found[:, :both], expected[:some, :both]):
                    return False
        return True

    def _settled_scores(self, settled: int, length: int) -> Tensor:
        """Scores (rows, length) of which the first `settled` columns, or fewer, are not masked."""
        count = SOFTMAX_ELEMENTS // length
        last = settled - 1 - torch.arange(count, device=self.device) % min(settled, 64)
        columns = torch.arange(length, device=self.device)
        scores = self.normal(count, length) * 3
        return scores.masked_fill(columns > last[:, None], torch.finfo(self.dtype).min)

    def _softmax(self, scores: Tensor, width: int) -> Tensor:
        lowest = torch.finfo(self.dtype).min
        return F.softmax(F.pad(scores, (0, width - scores.shape[-1]), value=lowest), dim=-1)


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


def _items(x: Tensor, count: int) -> Tensor:
    """`count` copies of x (1, A, M, D) gathered by token, hence strided as the tree's are."""
    tokens = x.transpose(1, 2).reshape(x.shape[2], -1)
    return tokens.repeat(count, 1).view(count, x.shape[2], x.shape[1], -1).transpose(1, 2)


def _up(number: int, step: int) -> int:
    return math.ceil(number / step) * step
