"""The tree engine: every distinct token once, layer first, with the official bits.

Linears, norms and MLPs see every entry of a pack once, through the model's own modules, in blocks
small enough for a cache. Attention is the official sequence of roundings over the keys of each row
in their order; the widths are those the plan chose inside the measured numeric classes. What one
row costs in the end (head, sigmoid) runs row by row exactly as the reference does.

Nothing here proves that the bits are the official ones: `charrm.certificate` compares them where
the engine is to serve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from charrm.engines import Outcome, TreeSettings
from charrm.engines.classes import NumericClasses
from charrm.engines.eager import EagerEngine, is_out_of_memory
from charrm.engines.plan import Group, Limits, Pack, Plan, check_limits, make_plan
from charrm.errors import EngineFailed, InvalidSetting, NotCertified, OutOfMemory, RowError
from charrm.model import Attention, CharRM, DecoderLayer, alibi_bias
from charrm.protocol import MAX_TOKENS

# A mean over fewer rows takes another kernel on CUDA; the official norm saw a whole row.
NORM_ROWS = 16
Answers = list[Outcome | RowError | None]


@dataclass(frozen=True)
class _Batch:
    """A group on the device: G items of M queries over W keys.

    Kept as runs of entries; index and mask tensors exist only while the group has its turn.
    """

    queries: int
    width: int
    shifts: Tensor  # (S,) first entry of each run of keys less its place among the G * W
    sizes: Tensor  # (S,) lengths of the runs, G * W together
    first: Tensor  # (G, 1) entry of position 0; keys after a run's end repeat it, always masked
    end: Tensor  # (G, 1) number of keys
    entry: Tensor  # (G, 1) of the first query
    position: Tensor  # (G, 1) of the first query
    size: Tensor  # (G, 1) queries before the last one is repeated

    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Entries of the queries (G * M,) and keys (G, W), and which keys are hidden
        (G, 1, M, W) bool because they come after the query."""
        device = self.sizes.device
        columns = torch.arange(self.width, device=device)
        items = len(self.entry)
        keys = torch.arange(items * self.width, device=device)
        keys += self.shifts.repeat_interleave(self.sizes, output_size=items * self.width)
        keys = torch.where(columns < self.end, keys.view(items, self.width), self.first)
        steps = torch.minimum(torch.arange(self.queries, device=device), self.size - 1)
        hidden = columns > (self.position + steps)[:, None, :, None]
        return (self.entry + steps).flatten(), keys, hidden


class TreeEngine:
    """Shares prefixes between rows; exact where `classes` describe the machine it runs on."""

    name = "tree"
    rows_per_call = 2048  # enough to share; a server's other requests wait for so many

    def __init__(
        self, model: CharRM, classes: NumericClasses, settings: TreeSettings | None = None
    ) -> None:
        """Raises InvalidSetting when 4,096 keys do not fit `attention_bytes` or a block is too
        small, NotCertified when `classes` say that nothing may be shared."""
        settings = settings or TreeSettings()
        if not classes.linear_rows_invariant:
            raise NotCertified("the numeric classes of this machine allow no sharing; use eager.")
        self.settings = settings
        self.model = model.eval()
        self.classes = classes
        self.eager = EagerEngine(model)
        config = model.config
        item = model.score.weight.dtype.itemsize
        self.limits = Limits(
            pack_tokens=settings.pack_tokens,
            attention_bytes=settings.attention_bytes,
            # Scores, one rounding step of them and the weights, and the mask.
            score_bytes=3 * item * config.num_attention_heads + 1,
            # Gathered k and v, and each once more in the order that the product needs.
            # Three index tensors live while one is made.
            key_bytes=4 * item * config.hidden_size + 24,
            query_bytes=4 * item * config.hidden_size + 24,
            query_chunk=settings.query_chunk,
        )
        if settings.query_chunk < 1 or not check_limits(self.limits, classes.min_rows):
            raise InvalidSetting(
                f"{settings}: {classes.min_rows} queries over {MAX_TOKENS} keys need "
                f"{self.limits.cost(1, classes.min_rows, MAX_TOKENS)} bytes; all must be positive."
            )
        # Cut evenly, no block has less than half of them.
        least_block = 2 * max(NORM_ROWS, classes.min_rows)
        if settings.block_tokens < least_block:
            raise InvalidSetting(f"{settings}: block_tokens must be at least {least_block} here.")

    def plan(self, rows: Sequence[Sequence[int]]) -> Plan:
        """What `score_tokens` would compute, without computing it."""
        return make_plan(rows, self.classes, self.limits)

    def workspace_bytes(self) -> int:
        """Upper bound of the bytes beside the weights while one pack runs.

        Per entry: x, q, k, v and attended. Per token of a block: the norm's copies, the larger two
        of them in float32, and either what W_pack gives or the MLP's three, their product and its
        result. Attention comes on top. A row longer than `pack_tokens` counts as 4,096.
        """
        config, item = self.model.config, self.model.score.weight.dtype.itemsize
        hidden = config.hidden_size
        norm = hidden * (2 * item + 3 * 4)
        linear = item * max(3 * hidden, 4 * config.intermediate_size + hidden)
        entries = max(self.limits.pack_tokens, MAX_TOKENS)
        block = min(self.settings.block_tokens, entries)
        return entries * 5 * hidden * item + block * (norm + linear) + self.limits.attention_bytes

    def score_tokens(
        self, rows: Sequence[Sequence[int]], *, keep_hidden: bool = False
    ) -> list[Outcome | RowError]:
        """See `Engine`. A pack that fails is tried again in halves, so that one row fails alone."""
        answers: Answers = [_refuse(ids, self.model.config.vocab_size) for ids in rows]
        self._score([i for i, answer in enumerate(answers) if answer is None], rows, answers,
                    keep_hidden)  # fmt: skip
        done = [answer for answer in answers if answer is not None]
        assert len(done) == len(rows)
        return done

    def _score(
        self, chosen: list[int], rows: Sequence[Sequence[int]], answers: Answers, keep: bool
    ) -> None:
        plan = make_plan([rows[i] for i in chosen], self.classes, self.limits)
        for index in plan.alone:
            [answers[chosen[index]]] = self._alone(rows[chosen[index]], keep)
        for pack in plan.packs:
            try:
                outcomes = self._run(pack, keep)
            except Exception as error:
                failure = _row_error(error, pack)
                outcomes = None
            if outcomes is not None:
                for row, outcome in zip(pack.rows, outcomes, strict=True):
                    for index in row.indices:
                        answers[chosen[index]] = outcome
                continue
            if isinstance(failure, OutOfMemory) and torch.cuda.is_available():
                torch.cuda.empty_cache()
            groups = [[chosen[i] for i in row.indices] for row in pack.rows]
            if len(groups) == 1:
                for index in groups[0]:
                    answers[index] = failure
                continue
            for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
                self._score([i for group in half for i in group], rows, answers, keep)

    def _alone(self, ids: Sequence[int], keep: bool) -> list[Outcome | RowError]:
        try:
            return self.eager.score_tokens([ids], keep_hidden=keep)
        except Exception as error:
            return [EngineFailed(f"the forward failed: {type(error).__name__}: {error}")]

    def _run(self, pack: Pack, keep: bool) -> list[Outcome]:
        body = self.model.model
        device = body.embed_tokens.weight.device
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            ids = _padded(pack.tokens, self.classes.min_rows)
            x = body.embed_tokens(torch.tensor([ids], dtype=torch.int64, device=device))
            batches = [_batch(pack, group, device) for group in pack.groups]
            heads = self.model.config.num_attention_heads
            bias = alibi_bias(heads, MAX_TOKENS, x.dtype, device)
            packed = x.new_empty(1, len(ids), 3 * x.shape[-1])
            attended = torch.empty_like(x)
            parts = -(-len(ids) // self.settings.block_tokens)
            for layer in body.layers:
                assert isinstance(layer, DecoderLayer)
                attention = layer.self_attn
                for block, out in _together(parts, x, packed):
                    out.copy_(attention.W_pack(layer.input_layernorm(block)))
                _attend(attention, packed[0], attended[0], batches, bias)
                # What was added to reach `min_rows` repeats the last entry.
                attended[:, len(pack.tokens) :] = attended[:, len(pack.tokens) - 1]
                for block, seen in _together(parts, x, attended):
                    block += attention.o_proj(seen)
                    block += layer.mlp(layer.post_attention_layernorm(block))
            ends = _padded([row.last_entry for row in pack.rows], NORM_ROWS)
            hidden = body.norm(x[:, torch.tensor(ends, device=device)])  # (1, rows, H)
            outcomes = []
            for i in range(len(pack.rows)):
                # Head and sigmoid over several rows may take vector code with another exp.
                logit = self.model.score(hidden[:, i])
                p = torch.sigmoid(logit)
                kept = hidden[0, i].cpu() if keep else None
                outcomes.append(Outcome(float(p), float(logit), kept))
            return outcomes


def _together(parts: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Views of the tensors (1, M, *) in as many even parts of M."""
    return zip(*(tensor.tensor_split(parts, dim=1) for tensor in tensors), strict=True)


def _attend(
    attention: Attention, packed: Tensor, attended: Tensor, batches: list[_Batch], bias: Tensor
) -> None:
    """Attention of all entries: q, k and v in `packed` (M, 3 H), written to `attended` (M, H)."""
    heads, head_dim = attention.heads, attention.head_dim
    q, k, v = packed.chunk(3, dim=-1)  # (M, H) each
    lowest = torch.finfo(packed.dtype).min
    for batch in batches:
        chosen, used, hidden_keys = batch.indices()
        # (G * M, H) and (G, W, H) to (G, A, M or W, D)
        queries, keys, values = (
            part.view(len(used), -1, heads, head_dim).transpose(1, 2)
            for part in (q[chosen], k[used], v[used])
        )
        # Made contiguous here, or matmul copies the transposed keys and sums in another order.
        keys = keys.contiguous()
        scores = torch.matmul(queries, keys.transpose(2, 3)).div_(math.sqrt(head_dim))
        scores += bias[:, None, : batch.width]
        scores.clamp_(min=lowest).masked_fill_(hidden_keys, lowest)
        weights = F.softmax(scores, dim=-1)  # float32 inside, normalised result rounded
        del scores
        out = torch.matmul(weights, values).transpose(1, 2).reshape(len(chosen), -1)
        # Repeated queries hold equal bits, so which copy is written last does not matter.
        attended[chosen] = out


def _batch(pack: Pack, group: Group, device: torch.device) -> _Batch:
    width = group.width
    shifts: list[int] = []
    sizes: list[int] = []
    columns: list[tuple[int, int, int, int, int]] = []
    for place, item in enumerate(group.items):
        path = pack.segments[item.segment].path
        at = place * width
        for part in path:
            size = min(part.size, (place + 1) * width - at)
            if size > 0:
                shifts.append(part.entry - at)
                sizes.append(size)
                at += size
        sizes[-1] += (place + 1) * width - at  # beyond the end, replaced by the first entry
        columns.append((path[0].entry, item.end, item.entry, item.position, item.size))

    def column(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    by_item = (column(numbers)[:, None] for numbers in zip(*columns, strict=True))
    return _Batch(group.queries, width, column(shifts), column(sizes), *by_item)


def _padded(numbers: list[int], least: int) -> list[int]:
    return numbers + numbers[-1:] * (least - len(numbers))


def _refuse(ids: Sequence[int], vocab: int) -> RowError | None:
    """What must not reach the device: a bad index there would end the whole process's CUDA."""
    if not 1 <= len(ids) <= MAX_TOKENS:
        return EngineFailed(f"{len(ids)} ids, expected 1 to {MAX_TOKENS}.")
    if min(ids) < 0 or max(ids) >= vocab:
        return EngineFailed(f"ids {min(ids)} to {max(ids)}, expected 0 to {vocab - 1}.")
    return None


def _row_error(error: Exception, pack: Pack) -> RowError:
    if isinstance(error, (RuntimeError, MemoryError)) and is_out_of_memory(error):
        return OutOfMemory(f"a pack of {len(pack.tokens)} tokens did not fit: {error}")
    return EngineFailed(f"the forward failed: {type(error).__name__}: {error}")
