"""Engines with other attention, to see what their speed costs in score. For comparison only.

All share one forward, made of the project's own modules in the official order; only attention
differs. None gives official scores, except `padded` where its shapes happen not to matter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from charrm.engines import Outcome
from charrm.engines.eager import EagerEngine, is_out_of_memory
from charrm.errors import OutOfMemory, RowError
from charrm.model import Attention, CharRM, DecoderLayer, alibi_bias, alibi_slopes

PAD_ID = 0
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k and v, each (B, A, L, D), to (B, A, L, D) in the same dtype."""


class ControlEngine(ABC):
    """The forward of the controls: `rows_per_call` rows at a time, padded on the right."""

    name: str
    rows_per_call = 1

    def __init__(self, model: CharRM) -> None:
        self.model = model.eval()

    @abstractmethod
    def attention(self, lengths: Tensor, width: int, dtype: torch.dtype) -> Attend:
        """Return the attention of a batch: `lengths` (B,) int64 of rows padded to `width`."""

    def score_tokens(
        self, rows: Sequence[Sequence[int]], *, keep_hidden: bool = False
    ) -> list[Outcome | RowError]:
        """See `Engine`; a batch that runs out of memory holds the error in each of its rows."""
        outcomes: list[Outcome | RowError] = []
        for start in range(0, len(rows), self.rows_per_call):
            batch = rows[start : start + self.rows_per_call]
            try:
                outcomes += self._score(batch, keep_hidden)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                longest = max(map(len, batch))
                text = f"{len(batch)} rows of up to {longest} tokens did not fit: {error}"
                outcomes += [OutOfMemory(text) for _ in batch]
        return outcomes

    def _score(self, rows: Sequence[Sequence[int]], keep: bool) -> list[Outcome]:
        body = self.model.model
        device = body.embed_tokens.weight.device
        width = max(map(len, rows))
        padded = [[*ids, *[PAD_ID] * (width - len(ids))] for ids in rows]
        lengths = torch.tensor([len(ids) for ids in rows], device=device)
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            x = body.embed_tokens(torch.tensor(padded, dtype=torch.int64, device=device))
            attend = self.attention(lengths, width, x.dtype)
            for layer in body.layers:
                assert isinstance(layer, DecoderLayer)
                x = x + _attention(layer.self_attn, layer.input_layernorm(x), attend)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            ends = torch.arange(len(rows), device=device), lengths - 1
            hidden = body.norm(x)[ends]  # (B, H)
            logits = self.model.score(hidden)  # (B, 1)
            kept = list(hidden.cpu()) if keep else [None] * len(rows)
            p = torch.sigmoid(logits)
            numbers = zip(p[:, 0].tolist(), logits[:, 0].tolist(), kept, strict=True)
            return [Outcome(*of_row) for of_row in numbers]


def _attention(attention: Attention, x: Tensor, attend: Attend) -> Tensor:
    batch, length, hidden = x.shape
    q, k, v = (
        part.view(batch, length, attention.heads, attention.head_dim).transpose(1, 2)
        for part in attention.W_pack(x).chunk(3, dim=-1)
    )
    out: Tensor = attention.o_proj(attend(q, k, v).transpose(1, 2).reshape(batch, length, hidden))
    return out


def _future(width: int, device: torch.device) -> Tensor:
    """Which keys come after the query: (L, L) bool."""
    return torch.ones(width, width, dtype=torch.bool, device=device).triu(1)


class PaddedEngine(ControlEngine):
    """Changes the shapes only: several rows in a batch, padded on the right, with a mask.

    Every rounding point is the official one and positions count from the row's own first token, but
    softmax and the products see other widths, row counts and layouts than a row alone: of several
    rows `matmul` copies k^T, and the copy may be summed in another order. Batches are consecutive
    rows, so rows of like length should be neighbours. For comparison only.
    """

    name = "padded"
    rows_per_call = 8

    def attention(self, lengths: Tensor, width: int, dtype: torch.dtype) -> Attend:
        lowest = torch.finfo(dtype).min
        bias = alibi_bias(self.model.config.num_attention_heads, width, dtype, lengths.device)
        padding = torch.arange(width, device=lengths.device) >= lengths[:, None]  # (B, L)
        hidden = _future(width, lengths.device) | padding[:, None, None, :]  # (B, 1, L, L)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
            scores += bias[:, None, :]
            scores.clamp_(min=lowest).masked_fill_(hidden, lowest)
            return torch.matmul(F.softmax(scores, dim=-1), v)

        return attend


class SdpaEngine(ControlEngine):
    """Changes the roundings: torch's fused attention with the official bias, itself in the
    model's dtype, as the mask. Scores stay in float32 inside the kernel, where the official order
    rounds them three times. For comparison only.
    """

    name = "sdpa"

    def attention(self, lengths: Tensor, width: int, dtype: torch.dtype) -> Attend:
        bias = alibi_bias(self.model.config.num_attention_heads, width, dtype, lengths.device)
        future = _future(width, lengths.device)
        mask = bias[:, None, :].masked_fill(future, -math.inf)[None]  # (1, A, L, L)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class RelativeEngine(ControlEngine):
    """Changes the bias: `slope * (j - i)`, equal in real numbers but exact in float32, as vLLM and
    flash-attn compute it; all of attention in float32, its output in the model's dtype.

    Those libraries multiply in bf16 with float32 sums, so their speed is not that of this engine;
    their scores are close to its. For comparison only.
    """

    name = "relative"

    def attention(self, lengths: Tensor, width: int, dtype: torch.dtype) -> Attend:
        device = lengths.device
        slopes = torch.tensor(
            alibi_slopes(self.model.config.num_attention_heads), dtype=torch.float32, device=device
        )
        positions = torch.arange(width, dtype=torch.float32, device=device)
        distances = positions - positions[:, None]  # (i, j): j - i
        mask = (slopes[:, None, None] * distances).masked_fill_(_future(width, device), -math.inf)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.float(), k.float(), v.float()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None]).to(dtype)

        return attend


class Float32Engine(EagerEngine):
    """Changes the dtype: the official order with the weights cast to float32, nothing rounded to
    bf16. Holds its own copy of the model. For comparison only.
    """

    name = "fp32"

    def __init__(self, model: CharRM) -> None:
        with torch.device("meta"):
            copy = CharRM(model.config)
        weights = {name: weight.float() for name, weight in model.state_dict().items()}
        copy.load_state_dict(weights, assign=True)
        super().__init__(copy.requires_grad_(False))


CONTROLS: dict[str, Callable[[CharRM], ControlEngine | Float32Engine]] = {
    engine.name: engine for engine in (PaddedEngine, SdpaEngine, RelativeEngine, Float32Engine)
}
