"""A scorer without weights: the real tokenizer and protocol, an engine that only counts."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from charrm.engines import Outcome
from charrm.errors import RowError
from charrm.identity import Identity
from charrm.scorer import Scorer
from charrm.tokenizer import load_tokenizer


class FakeEngine:
    """p is a function of the ids alone; `script` may replace single outcomes or raise."""

    name = "fake"
    rows_per_call = 1

    def __init__(self, script: Callable[[Sequence[int]], Outcome | RowError] | None = None) -> None:
        self.script = script
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.rows = 0

    def score_tokens(
        self, rows: Sequence[Sequence[int]], *, keep_hidden: bool = False
    ) -> list[Outcome | RowError]:
        self.entered.release()
        assert self.gate.wait(30)
        self.rows += len(rows)
        return [self.script(ids) if self.script else fake_outcome(ids) for ids in rows]


def fake_outcome(ids: Sequence[int]) -> Outcome:
    p = (sum(i * n for n, i in enumerate(ids, 1)) % 251 + 1) / 256
    return Outcome(p, math.log(p / (1 - p)))


def fake_identity() -> Identity:
    return Identity(
        protocol="charrm/1",
        is_protocol=True,
        engine="fake",
        engine_settings={},
        certificate="",
        dtype="bfloat16",
        device="none",
        source="nowhere",
        files={},
        weights_sha256="0" * 64,
        stored_dtype="bfloat16",
        audit={},
        versions={},
        environment={},
        code_sha256="0" * 64,
    )


def fake_scorer(checkpoint: Path, engine: FakeEngine | None = None, **options: Any) -> Scorer:
    return Scorer(load_tokenizer(checkpoint), engine or FakeEngine(), fake_identity(), **options)


def row(**changes: Any) -> dict[str, Any]:
    """A complete row as JSON; a change to None drops the field."""
    content = {
        "profile": {"姓名": "阿岚", "年龄": 19, "师父": None},
        "context": "阿岚：船几时开？\n老舵手：等潮水。",
        "model_output": "阿岚：那就等。",
        "metric": "Fluency",
        **changes,
    }
    return {name: value for name, value in content.items() if value is not None}
