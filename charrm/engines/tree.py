"""The tree engine: every distinct token once, layer first, with the official bits.

Linears, norms and MLPs see all entries of a pack as one (1, M, H) input of the model's own
modules. Attention is the official sequence of roundings over the keys of each row in their order;
the widths are those the plan chose inside the measured numeric classes. What one row costs in the
end (head, sigmoid) runs row by row exactly as the reference does.

Nothing here proves that the bits are the official ones: `charrm.certificate` compares them where
the engine is to serve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from charrm.engines import Outcome
from charrm.engines.classes import NumericClasses
from charrm.engines.eager import EagerEngine, is_out_of_memory
from charrm.engines.plan import Group, Limits, Pack, Plan, check_limits, make_plan
from charrm.errors import EngineFailed, InvalidSetting, NotCertified, OutOfMemory, RowError
from charrm.model import Attention, CharRM, DecoderLayer, ModelConfig, alibi_bias
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
        self,
        model: CharRM,
        classes: NumericClasses,
        *,
        pack_tokens: int = 16384,
        attention_bytes: int = 1 << 30,
        query_chunk: int = 256,
    ) -> None:
        """Raises InvalidSetting when 4,096 keys do not fit `attention_bytes`, NotCertified when
        `classes` say that nothing may be shared."""
        if not classes.linear_rows_invariant:
            raise NotCertified("the numeric classes of this machine allow no sharing; use eager.")
        self.model = model.eval()
        self.classes = classes
        self.eager = EagerEngine(model)
        config = model.config
        item = model.score.weight.dtype.itemsize
        self.limits = Limits(
            pack_tokens=pack_tokens,
            attention_bytes=attention_bytes,
            # Scores, one rounding step of them and the weights, and the mask.
            score_bytes=3 * item * config.num_attention_heads + 1,
            # Gathered k and v, and each once more in the order that the product needs.
            # Three index tensors live while one is made.
            key_bytes=4 * item * config.hidden_size + 24,
            query_bytes=4 * item * config.hidden_size + 24,
            query_chunk=query_chunk,
        )
        if query_chunk < 1 or not check_limits(self.limits, classes.min_rows):
            raise InvalidSetting(
                f"attention_bytes={attention_bytes}, pack_tokens={pack_tokens}, "
                f"query_chunk={query_chunk}: {classes.min_rows} queries over {MAX_TOKENS} keys "
                f"need {self.limits.cost(1, classes.min_rows, MAX_TOKENS)} bytes; all must be "
                "positive."
            )

    def plan(self, rows: Sequence[Sequence[int]]) -> Plan:
        """What `score_tokens` would compute, without computing it."""
        return make_plan(rows, self.classes, self.limits)

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
            for layer in body.layers:
                assert isinstance(layer, DecoderLayer)
                normed = layer.input_layernorm(x)
                x = x + _attend(layer.self_attn, normed, batches, bias, len(pack.tokens))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
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


def _attend(
    attention: Attention, x: Tensor, batches: list[_Batch], bias: Tensor, entries: int
) -> Tensor:
    """Attention of all entries: x (1, M, H) after the norm, to (1, M, H) after o_proj."""
    heads, head_dim = attention.heads, attention.head_dim
    q, k, v = attention.W_pack(x)[0].chunk(3, dim=-1)  # (M, H) each
    attended = torch.empty_like(x)
    lowest = torch.finfo(x.dtype).min
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
        attended[0, chosen] = out
    # What was added to reach `min_rows` repeats the last entry.
    attended[0, entries:] = attended[0, entries - 1]
    projected: Tensor = attention.o_proj(attended)
    return projected


def workspace_bytes(config: ModelConfig, dtype: torch.dtype, limits: Limits) -> int:
    """Upper bound of the bytes beside the weights while one pack runs.

    Per entry: x, its normed copy and the float32 of the norm; or q, k, v, attended and o_proj;
    or, at the MLP, the feed-forward's three and their product. Attention comes on top. A single
    row longer than `pack_tokens` counts as 4,096.
    """
    entries = max(limits.pack_tokens, MAX_TOKENS)
    hidden, item = config.hidden_size, dtype.itemsize
    norm = hidden * (2 * item + 3 * 4)
    mlp = 2 * hidden * item + 4 * config.intermediate_size * item + hidden * item
    attention = 8 * hidden * item
    return entries * max(norm, mlp, attention) + limits.attention_bytes


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
