"""Which shapes of an operation give a row the same bits: every case is measured and compared.

Each family computes the same rows in many shapes: those of the official forward (batch 1, as
`charrm.model` lays tensors out) and those of an engine that shares or batches. Cases whose common
part holds the same bits form a class. Where a tree case is in the class of an official length,
that engine may use its shape for rows of that length, as far as random inputs can tell.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from charrm.model import CharRM, DecoderLayer, alibi_bias

Line = dict[str, Any]
# Bases of 16, 32 and 64 and their neighbours, and around 512, 1,024, 2,048 and 4,096 more of them.
ROW_COUNTS = (16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129, 160, 192, 200, 255,
              256, 257, 320, 384, 400, 500, 511, 512, 513, 640, 700, 768, 800, 801, 900, 1000, 1023,
              1024, 1025, 1200, 1280, 1500, 1536, 1792, 2000, 2047, 2048, 2049, 2500, 2560, 3000,
              3072, 3500, 4000, 4095, 4096, 5000, 6144, 8191, 8192, 12288, 16384, 16387, 24576,
              32768)  # fmt: skip
LENGTHS = (64, 65, 72, 96, 100, 127, 128, 129, 160, 192, 200, 255, 256, 257, 320, 384, 448, 500,
           504, 511, 512, 513, 520, 576, 640, 700, 768, 800, 801, 896, 960, 1000, 1008, 1016, 1022,
           1023, 1024, 1025, 1026, 1028, 1032, 1040, 1056, 1088, 1152, 1280, 1281, 1500, 1536, 1792,
           2000, 2040, 2046, 2047, 2048, 2049, 2050, 2056, 2064, 2080, 2176, 2304, 2560, 2561, 3000,
           3072, 3500, 3584, 4000, 4064, 4088, 4095, 4096)  # fmt: skip
FEW_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 100, 128, 200, 256,
            257, 512, 1000, 1024, 2048, 4096)  # fmt: skip
QUERIES = (16, 37, 256)
STARTS = (0, 200, 700, 960, 1500, 2500, 3800)  # positions of the first query
BASE = 13  # distinct rows that repeat, so that each meets every place of a tile or vector
ODD_OFFSET = 37
SOFTMAX_ROWS = 499  # odd: the copies of a row lie at all alignments; one row in 5,000 was seen
MOST_CLASSES = 8  # the representatives of all are kept on the device

# What decides how cuBLAS may sum: (reduced precision, split-K) of bf16, and torch's library for
# products. Official is the first; torch refuses to forbid split-K to any library but cuBLASLt.
OFFICIAL = "torch's default"
SETTINGS: dict[str, tuple[tuple[bool, bool], str | None]] = {
    OFFICIAL: ((True, True), None),
    "no reduced precision": ((False, True), None),
    "cuBLASLt": ((True, True), "cublaslt"),
    "cuBLASLt, no split-K": ((False, False), "cublaslt"),
}


class Case(NamedTuple):
    """A result (..., rows, columns); its first row is the family's row `start`."""

    kind: str
    label: int | str
    result: Tensor
    start: int = 0
    facts: Mapping[str, Any] = {}


class Classes:
    """Groups cases by the bits of what they have in common; the first one is the canonical run."""

    def __init__(self) -> None:
        self.kept: list[Case] = []
        self.members: list[dict[str, list[int | str]]] = []
        self.more: dict[str, list[int | str]] = {}  # in none of the first MOST_CLASSES
        self.cases = self.equal = 0

    def add(self, case: Case) -> Line:
        """Compare with the canonical run and find the class."""
        first = self.kept[0] if self.kept else case
        line: Line = {"kind": case.kind, "case": case.label, **case.facts, "against": first.label}
        line |= difference(*_common(first, case))
        number: int | None = 0
        if not line["equal"]:
            fitting = (i for i, kept in enumerate(self.kept) if i and _fits(kept, case))
            number = next(fitting, len(self.kept))
        if number == len(self.kept) or not self.kept:
            number = len(self.kept)
            if number < MOST_CLASSES:
                self.kept.append(case)
                self.members.append({})
            else:
                number = None
        into = self.more if number is None else self.members[number]
        names = into.setdefault(case.kind, [])
        if case.label not in names:
            names.append(case.label)
        self.cases += 1
        self.equal += line["equal"]
        return line | {"class": number}

    def summary(self) -> Line:
        """How many cases equal the canonical run, and the members of every class."""
        line: Line = {"cases": self.cases, "equal": self.equal, "classes": self.members}
        return line | ({"in_none_of_these": self.more} if self.more else {})


def difference(expected: Tensor, found: Tensor) -> Line:
    """Bits of two tensors (..., rows, columns) of one shape and dtype compared."""
    shape = (-1, *expected.shape[-2:])
    one, other = expected.reshape(shape), found.reshape(shape)
    unequal = _bits(one) != _bits(other)
    rows = unequal.any(-1).any(0).nonzero()[:, 0].tolist()
    line: Line = {"equal": not rows, "elements": expected.numel(), "different": int(unequal.sum())}
    if rows:
        parts = zip(one, other, strict=True)  # float32 copies of everything need not fit
        largest = max(float((a.float() - b.float()).abs().max()) for a, b in parts)
        line |= {
            "largest": largest if math.isfinite(largest) else str(largest),
            "rows_different": len(rows),
            "first_row": rows[0],
            "last_row": rows[-1],
        }
    return line


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def _common(one: Case, other: Case) -> tuple[Tensor, Tensor]:
    low = max(one.start, other.start)
    high = min(case.start + case.result.shape[-2] for case in (one, other))
    columns = min(one.result.shape[-1], other.result.shape[-1])
    first, second = (
        case.result[..., low - case.start : max(low, high) - case.start, :columns]
        for case in (one, other)
    )
    return first, second


def _fits(kept: Case, case: Case) -> bool:
    one, other = _common(kept, case)
    return one.numel() > 0 and torch.equal(_bits(one), _bits(other))


@contextmanager
def blas(setting: str) -> Iterator[None]:
    """Run under one of `SETTINGS`; raises RuntimeError where this torch does not know it."""
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_bf16_reduced_precision_reduction,
        getattr(matmul, "allow_bf16_reduced_precision_reduction_split_k", True),
    )
    library = torch.backends.cuda.preferred_blas_library()
    reduction, wanted = SETTINGS[setting]
    try:
        if setting != OFFICIAL:
            if wanted:
                torch.backends.cuda.preferred_blas_library(wanted)
            matmul.allow_bf16_reduced_precision_reduction = reduction
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
        if wanted:
            torch.backends.cuda.preferred_blas_library(library)


def _unavailable(setting: str) -> str:
    try:
        with blas(setting):
            return ""
    except RuntimeError as error:  # torch was built without this library
        return str(error).splitlines()[0]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Probe:
    """The families of one model's shapes on one device."""

    def __init__(
        self, model: CharRM, device: torch.device, largest: int, lengths: Sequence[int]
    ) -> None:
        """`largest` bounds attention's lengths, 8 times as many rows the linears; `lengths` are
        official ones to add to the fixed ones."""
        layer = model.model.layers[0]
        assert isinstance(layer, DecoderLayer)
        self.model, self.layer, self.device, self.largest = model, layer, device, largest
        self.heads, self.head_dim = model.config.num_attention_heads, model.config.head_dim
        self.hidden, self.dtype = model.config.hidden_size, model.score.weight.dtype
        self.official = {n for n in lengths if ROW_COUNTS[0] <= n <= largest}
        self.lengths = sorted({*self.official, largest, *(n for n in LENGTHS if n <= largest)})
        self.lengths.reverse()  # the longest is the canonical run: it holds all rows
        self.generator = torch.Generator(device).manual_seed(4096)
        self.packed = self.normal(1, largest, 3 * self.hidden)  # as W_pack leaves q, k and v
        self.linear_classes: dict[str, Classes] = {}

    def normal(self, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return x.to(self.dtype)

    def run(self, emit: Callable[[Line], None], late: Callable[[], bool]) -> bool:
        """Emit a line for every case and one for each family; False when `late` cut it off.

        A family that fails leaves a line with its error, and the next one runs; those after the
        cut leave a line too.
        """
        settings = {setting: _unavailable(setting) for setting in SETTINGS}
        emit({"settings": {name: why or "available" for name, why in settings.items()}})
        cut = False
        known = [name for name, why in settings.items() if not why]
        for name, setting, classes, cases in self.families(known):
            if cut:
                emit({"family": name, "setting": setting, "status": "skipped: time"})
                continue
            error = None
            try:
                with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
                    while not (cut := late()) and (case := next(cases, None)) is not None:
                        emit({"family": name, **classes.add(case)})
                        del case
            except Exception as failure:  # an unsupported shape, or out of memory
                error = f"{type(failure).__name__}: {failure}"
            summary: Line = {"family": name, "summary": True, **classes.summary()}
            emit(summary | ({"error": error} if error else {}) | ({"cut": "time"} if cut else {}))
            classes.kept = classes.kept if name in self.linear_classes else []
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return not cut

    def families(
        self, settings: Sequence[str]
    ) -> Iterator[tuple[str, str, Classes, Iterator[Case]]]:
        """Name, setting, classes and cases, what matters most first, torch's default before
        the other settings."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        wide = self.model.config.intermediate_size
        linears: dict[str, tuple[nn.Module, int]] = {
            "W_pack": (attention.W_pack, self.hidden),
            "o_proj": (attention.o_proj, self.hidden),
            "gate": (mlp.gate_proj, self.hidden),
            "down": (mlp.down_proj, wide),
        }
        self.linear_classes = {name: Classes() for name in linears}
        for name, (linear, width) in linears.items():
            cases = self.linear(linear, width, OFFICIAL)
            yield name, OFFICIAL, self.linear_classes[name], cases
        for name, family in {
            "softmax": self.softmax,
            "softmax, unaligned rows": self.softmax_rows,
            "q k^T": self.scores,
            "P v": self.attended,
            "mean": self.mean,
            "head": self.head,
            "sigmoid": self.sigmoid,
        }.items():
            yield name, OFFICIAL, Classes(), family()
        for setting in settings:
            for name, (linear, width) in linears.items():
                if setting != OFFICIAL:
                    cases = self.linear(linear, width, setting)
                    yield name, setting, self.linear_classes[name], cases

    def linear(self, linear: nn.Module, width: int, setting: str) -> Iterator[Case]:
        """A row's bits among M rows. Kinds: `official`, M being an official length; `other M`; or
        the setting. `copies_agree` says that its place among the M does not matter."""
        generator = torch.Generator(self.device).manual_seed(width)  # the same under all settings
        base = torch.randn(BASE, width, generator=generator, device=self.device).to(self.dtype)
        counts = {*self.official, *(n for n in ROW_COUNTS if n <= 8 * self.largest)}
        for count in [self.largest, *sorted(counts - {self.largest})]:
            for offset in (0, ODD_OFFSET):
                index = (torch.arange(count, device=self.device) + offset) % BASE
                x = base[index][None]
                facts: Line = {"setting": setting, "rows": count, "offset": offset}
                with blas(setting):
                    out = linear(x)[0]
                    if not offset:
                        synchronize(self.device)
                        begin = time.perf_counter()
                        linear(x)
                        synchronize(self.device)
                        facts["ms"] = round(1e3 * (time.perf_counter() - begin), 4)
                facts["copies_agree"] = torch.equal(_bits(out[BASE:]), _bits(out[:-BASE]))
                kind = "official" if count in self.official else "other M"
                places = (torch.arange(BASE, device=self.device) - offset) % BASE
                result = out[places]  # the distinct rows in the order of `base`
                del out
                yield Case(kind if setting == OFFICIAL else setting, count, result, 0, facts)

    def parts(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (1, A, length, D) as the official forward has them: views of `packed`."""
        q, k, v = (
            part.view(1, length, self.heads, self.head_dim).transpose(1, 2)
            for part in self.packed[:, :length].chunk(3, dim=-1)
        )
        return q, k, v

    def masked_scores(self) -> Tensor:
        """What the official forward gives its softmax at the largest length: (1, A, L, L)."""
        q, k, _ = self.parts(self.largest)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        bias = alibi_bias(self.heads, self.largest, self.dtype, self.device)
        scores[:, ::2] += bias[::2, None]  # without it, far keys weigh as much as near ones
        lowest = torch.finfo(self.dtype).min
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=self.device).triu(1)
        return scores.clamp_(min=lowest).masked_fill_(future, lowest)

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Queries, first position, columns and items of the tree engine's batched attention."""
        for queries in QUERIES:
            for start in STARTS:
                end = start + queries
                steps = {-(-end // step) * step for step in (1, 8, 16, 32, 64)}
                edges = {n for n in (1024, 1025, 2048, 2049, 4096) if n >= end}
                for width in sorted({*steps, end + 1, *edges}):
                    if width <= self.largest:
                        yield queries, start, width, 1
                        if queries == max(QUERIES):
                            yield queries, start, width, 3

    def softmax(self) -> Iterator[Case]:
        """A token's weights in rows of length L, and in the tree's runs. Kinds: `official` is
        L by L, `tree` M by W from a position on."""
        scores = self.masked_scores()
        for length in self.lengths:
            part = scores[..., :length, :length].contiguous()
            yield Case("official", length, F.softmax(part, dim=-1))
        for queries, start, width, items in self.runs():
            part = scores[..., start : start + queries, :width].repeat(items, 1, 1, 1)
            yield _tree(queries, start, width, items, F.softmax(part, dim=-1))

    def softmax_rows(self) -> Iterator[Case]:
        """Which copies (8, SOFTMAX_ROWS) of a row differ from its first one, for every width: rows
        of odd widths start at addresses that vector loads treat in other ways."""
        none = torch.zeros(8, SOFTMAX_ROWS, dtype=self.dtype, device=self.device)
        yield Case("expected", "no copy differs", none)
        for width in self.lengths:
            rows = 3 * self.normal(SOFTMAX_ROWS, width)
            out = F.softmax(rows.repeat(8, 1), dim=-1).view(8, SOFTMAX_ROWS, width)
            yield Case("width", width, (out != out[0]).any(-1).to(self.dtype))

    def scores(self) -> Iterator[Case]:
        """q k^T: `official` L by L of packed views, `contiguous` the same of copies, `tree`."""
        for layout in ("official", "contiguous"):
            for length in self.lengths:
                q, k, _ = self.parts(length)
                if layout == "contiguous":
                    q, k = q.contiguous(), k.contiguous()
                yield Case(layout, length, torch.matmul(q, k.transpose(2, 3)))
        for queries, start, width, items in self.runs():
            q, k, _ = self.parts(self.largest)
            q = self.gathered(q[:, :, start : start + queries], items)
            k = self.gathered(k[:, :, :width], items).contiguous()
            yield _tree(queries, start, width, items, torch.matmul(q, k.transpose(2, 3)))

    def attended(self) -> Iterator[Case]:
        """P v with zeros beyond a token's position; kinds as for q k^T."""
        weights = F.softmax(self.masked_scores(), dim=-1)
        for layout in ("official", "contiguous"):
            for length in self.lengths:
                _, _, v = self.parts(length)
                v = v.contiguous() if layout == "contiguous" else v
                part = weights[..., :length, :length].contiguous()
                yield Case(layout, length, torch.matmul(part, v))
        for queries, start, width, items in self.runs():
            v = self.gathered(self.parts(width)[2], items)
            part = weights[..., start : start + queries, :width].repeat(items, 1, 1, 1)
            yield _tree(queries, start, width, items, torch.matmul(part, v))

    def gathered(self, x: Tensor, items: int) -> Tensor:
        """x (1, A, M, D) as the tree engine gathers it: token by token, (items, A, M, D)."""
        tokens = x.transpose(1, 2).reshape(x.shape[2], -1).repeat(items, 1)
        return tokens.view(items, x.shape[2], self.heads, self.head_dim).transpose(1, 2)

    def mean(self) -> Iterator[Case]:
        """The float32 mean of squares in RMSNorm over n rows."""
        x = self.normal(1, self.largest, self.hidden)
        for count in sorted({n for n in FEW_ROWS if n <= self.largest}, reverse=True):
            part = x[:, :count].contiguous().to(torch.float32)
            yield Case("rows", count, part.pow(2).mean(-1, keepdim=True))

    def head(self) -> Iterator[Case]:
        """The head over n rows; the canonical run, `official`, is row by row."""
        head = self.model.score
        x = self.normal(min(256, self.largest), self.hidden)
        yield Case("official", 1, torch.cat([head(row[None]) for row in x]))
        for count in (n for n in FEW_ROWS if n <= len(x)):
            yield Case("rows", count, head(x[:count].contiguous()))

    def sigmoid(self) -> Iterator[Case]:
        """The same for the sigmoid of (n, 1) logits."""
        x = 2 * self.normal(min(256, self.largest), 1)
        yield Case("official", 1, torch.cat([torch.sigmoid(row[None]) for row in x]))
        for count in (n for n in FEW_ROWS if n <= len(x)):
            yield Case("rows", count, torch.sigmoid(x[:count].contiguous()))


def _tree(queries: int, start: int, width: int, items: int, result: Tensor) -> Case:
    facts = {"queries": queries, "start": start, "width": width, "items": items}
    label = f"{queries}x{width} at {start}" + (f", {items} items" if items > 1 else "")
    return Case("tree", label, result[-1:], start, facts)
