"""What one side says of a row, and the interface of everything that can say it.

Digests stand for ids and hidden states: they compare bit for bit and hold no text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from charrm.protocol import METRICS
from golden.structure import ReplayRow

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Side:
    """One side's values for one row; None is what it does not tell."""

    ids: str | None = None  # digest of the scored ids
    tokens: int | None = None  # scored, with the appended </s>
    dropped: int | None = None
    hidden: str | None = None  # digest of the bits of the last hidden state after the final norm
    logit: float | None = None
    p: float | None = None
    score: float | None = None


class Source(Protocol):
    """A candidate or a reference. Both methods raise RowError kinds for a row they cannot do;
    any other CharrmError ends the run, which can be continued later."""

    name: str

    def identity(self) -> dict[str, Any]:
        """Return what it is made of, as JSON-ready values without times; fixed for a run."""
        ...

    def tokenize(self, row: ReplayRow) -> Side:
        """Return ids, tokens and dropped, as far as it tells."""
        ...

    def score(self, row: ReplayRow) -> Side:
        """Return everything it tells."""
        ...

    def close(self) -> None:
        """Release processes and connections."""
        ...


def input_text(row: ReplayRow) -> str:
    """Return the input text, written a second time so that references share no code with charrm."""
    r = row.row
    return (
        f"<RoleInfo>\n\n{r.profile!s}\n\n<Context>\n\n{r.context}"
        f"\n\n<Response>\n\n{r.model_output}\n\n<Dimension>\n\n{METRICS[row.metric_en]}"
    )


def digest_ids(ids: Sequence[int]) -> str:
    """Return the sha256 over the ids as little-endian uint32."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def digest_hidden(hidden: torch.Tensor) -> str:
    """Return the sha256 over the bits of a (hidden_size,) tensor; its dtype is not part of it."""
    import torch

    return hashlib.sha256(hidden.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
