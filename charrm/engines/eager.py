"""The reference engine: the official forward, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from charrm.engines import Outcome
from charrm.errors import OutOfMemory, RowError
from charrm.model import CharRM


class EagerEngine:
    """Batch 1, no padding, explicit attention: the numbers of the official script."""

    name = "eager"
    rows_per_call = 1

    def __init__(self, model: CharRM) -> None:
        self.model = model.eval()

    def score_tokens(
        self, rows: Sequence[Sequence[int]], *, keep_hidden: bool = False
    ) -> list[Outcome | RowError]:
        """See `Engine`; a row that runs out of memory leaves the others untouched."""
        return [self._score_row(ids, keep_hidden) for ids in rows]

    def _score_row(self, ids: Sequence[int], keep_hidden: bool) -> Outcome | RowError:
        device = self.model.model.embed_tokens.weight.device
        try:
            # A caller's autocast would change the dtype of every operation.
            with torch.inference_mode(), torch.autocast(device.type, enabled=False):
                output = self.model(torch.tensor([list(ids)], dtype=torch.int64, device=device))
                hidden = output.hidden.cpu() if keep_hidden else None
                return Outcome(float(output.p), float(output.logit), hidden)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return OutOfMemory(f"{len(ids)} tokens did not fit on {device}: {error}")


def is_out_of_memory(error: Exception) -> bool:
    """CUDA and python have classes for it, torch's CPU allocator only a text."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or "can't allocate memory" in str(error)
