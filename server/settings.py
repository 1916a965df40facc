"""What an operator can set; read once at start, from options or CHARRM_* variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from charrm.engines import TreeSettings
from charrm.scorer import MAX_TEXT_CHARS


@dataclass(frozen=True)
class Settings:
    """Nothing here can change a score except `model`, `revision` and `dtype`, which the identity
    of every result names."""

    model: str
    revision: str | None = None
    device: str = "auto"
    dtype: str | None = None
    profiles: Path | None = None
    engine: str = "eager"
    tree: TreeSettings = field(default_factory=TreeSettings)
    certificate: Path | None = None
    certify: bool = False
    certify_rows: tuple[Path, ...] = ()
    certify_sample: int = 512
    certify_minutes: float = 10.0
    max_text_chars: int = MAX_TEXT_CHARS
    max_body_bytes: int = 64 * 2**20
    max_rows: int = 10_000  # in one request, counted per metric
    max_waiting_rows: int = 50_000  # over all requests
