"""charrm: the exact score of a CharacterEval row by BaichuanCharRM, with proof of how it was made.

Importing this package loads no torch and changes no global state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from charrm.errors import MissingDependency
from charrm.protocol import METRICS, PROTOCOL, Row
from charrm.results import FailedRow, ScoredRow

if TYPE_CHECKING:
    from charrm.scorer import Scorer

__version__ = "0.1.0"
__all__ = ["METRICS", "PROTOCOL", "FailedRow", "Row", "ScoredRow", "Scorer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Scorer":
        try:
            from charrm.scorer import Scorer
        except ModuleNotFoundError as error:
            raise MissingDependency(
                f"{error.name}: not installed. The base package is the client and the file "
                "formats; scoring here needs the extra: pip install '.[serve]'."
            ) from error
        return Scorer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
