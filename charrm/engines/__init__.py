"""Engines: token ids in, one outcome per row out, in input order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from charrm.errors import RowError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Outcome:
    """What the model gave for one row; `hidden` (H,) is kept only when asked for."""

    p: float
    logit: float
    hidden: torch.Tensor | None = None

    def same_bits(self, other: Outcome) -> bool:
        """Whether hidden state, logit and p of two kept outcomes are equal bit for bit."""
        import torch

        assert self.hidden is not None
        assert other.hidden is not None
        # Bits, not values: NaN must equal itself, and 0.0 must not equal -0.0.
        mine, others = self.hidden.view(torch.uint8), other.hidden.view(torch.uint8)
        numbers = (str(self.logit), str(self.p)) == (str(other.logit), str(other.p))
        return numbers and torch.equal(mine, others)


@dataclass(frozen=True)
class TreeSettings:
    """What an operator may set for the tree engine; a certificate is bound to it."""

    pack_tokens: int = 16384  # unique tokens computed together
    attention_bytes: int = 1 << 30  # for the attention of one group
    block_tokens: int = 1024  # of them, norms and linears see so many at once
    query_chunk: int = 128  # queries of one run


class Engine(Protocol):
    """Computes rows of ids (each with its `</s>`, at most 4,096 long)."""

    name: str
    rows_per_call: int  # how many rows the engine profits from seeing together

    def score_tokens(
        self, rows: Sequence[Sequence[int]], *, keep_hidden: bool = False
    ) -> list[Outcome | RowError]:
        """Return one outcome per row, in order; a row that failed holds its error."""
        ...
