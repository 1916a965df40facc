"""Finished runs as `golden.replay` leaves them, written here without a model; nothing is a test."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from charrm.identity import AUDITED_SHA256, digest_json
from charrm.ledger import Ledger
from charrm.protocol import METRICS
from golden import plots
from golden.criteria import DEFAULT, read_criteria
from golden.replay import FORMAT, dump

CODE = {"charrm": "c" * 64, "golden": "d" * 64}
FILES = {
    "data/character_profiles.json": "1" * 64,
    "results/generation_trans_qwen_7b.jsonl": "2" * 64,
}
FAILURE = {"side": "candidate", "kind": "not_finite", "message": "logit: found nan."}


def write_run(
    folder: Path,
    *,
    models: tuple[str, ...] = ("internlm_7b", "qwen_7b"),
    rows: int = 120,
    level: str = "scores",
    reference: str = "slow",
    tables: tuple[str, ...] = ("slow",),
    failing: int = 0,
    differing: int = 0,
    audited: bool = True,
    selftest: bool = False,
    **manifest: Any,
) -> Path:
    """Write a run of `rows` rows per model.

    The first rows of the first model fail, the last rows of the last model differ by one step of
    the bf16 grid. What is in `manifest` replaces fields; `standin` and `published` are of the set.
    """
    folder.mkdir(parents=True)
    numbers = random.Random(7)
    slots = [f"{model}/{position:05d}" for model in models for position in range(rows)]
    lines = []
    for index in range(len(slots)):
        steps = 1 if index >= len(slots) - differing else 0
        line = a_line(index, level, numbers, steps, tells_p=reference != "row-anchor")
        if index < failing:
            line |= {"candidate": None, "error": FAILURE}
            line |= {
                name: line[name] | {"candidate": None} for name in ("ids", "tokens", "dropped")
            }
        lines.append(line)
    with Ledger(folder / "ledger.jsonl") as ledger:
        for slot, line in zip(slots, lines, strict=True):
            ledger.append(slot, line)
    facts = {
        "digest": "e" * 64,
        "files": FILES,
        "is_standin": manifest.pop("standin", False),
        "is_published": manifest.pop("published", False),
    }
    content = {
        "format": FORMAT,
        "level": level,
        "reference": reference,
        "candidate": identity(audited),
        "reference_identity": {"name": reference, "code_sha256": "a" * 64, "threads": 1},
        "set": facts,
        "rows": len(slots),
        "rows_sha256": hashlib.sha256("\n".join(slots).encode()).hexdigest(),
        "sample": None,
        "criteria_sha256": read_criteria().digest,
        "criteria_tables": list(tables),
        "code_sha256": CODE,
    }
    (folder / "manifest.json").write_text(dump(content | manifest), encoding="utf-8")
    (folder / "criteria.toml").write_bytes(DEFAULT.read_bytes())
    write_times(folder, "2024-03-01T10:00:00+00:00", 751.25)
    if selftest:
        write_selftest(folder)
    return folder


def a_line(
    index: int, level: str, numbers: random.Random, steps: int, tells_p: bool
) -> dict[str, Any]:
    """One row's ledger line without its slot; the candidate is `steps` above the reference."""
    tokens = min(4096, int(numbers.lognormvariate(7.2, 0.5)))
    logit = round(numbers.gauss(0.4, 0.9), 3)
    p = round(256 / (1 + math.exp(-logit))) / 256
    bits = [hashlib.sha256(f"{index} {s}".encode()).hexdigest() for s in (0, steps)]

    def side(hidden: str, p: float) -> dict[str, Any] | None:
        if level == "tokens":
            return None
        return {"hidden": hidden, "logit": logit, "p": p, "score": p * 4 + 1}

    other = side(bits[0], p)
    if other is not None and not tells_p:
        other |= {"hidden": None, "logit": None, "p": None}
    return {
        "id": 1000 + index,
        "metric": list(METRICS)[index % len(METRICS)],
        "ids": dict.fromkeys(("candidate", "reference"), bits[0]),
        "tokens": dict.fromkeys(("candidate", "reference"), tokens),
        "dropped": dict.fromkeys(("candidate", "reference"), 0),
        "candidate": side(bits[1], p + (steps / 256 if p < 1 else -steps / 256)),
        "reference": other,
        "error": None,
    }


def identity(audited: bool = True) -> dict[str, Any]:
    """A candidate's identity, shaped as the library gives it."""
    audit = dict.fromkeys(AUDITED_SHA256, "matches")
    return {
        "protocol": "charrm/1",
        "is_protocol": True,
        "engine": "eager",
        "dtype": "bfloat16",
        "device": "cpu",
        "source": "a/checkpoint",
        "files": {"config.json": "5" * 64, "model-00001-of-00002.safetensors": "6" * 64},
        "weights_sha256": "7" * 64,
        "stored_dtype": "bfloat16",
        "audit": audit if audited else audit | {"config.json": "differs"},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "environment": {"capability": "AVX2", "threads": 1, "flags": {"tf32": False}},
        "code_sha256": CODE["charrm"],
        "content": "8" * 64,
        "digest": "9" * 64,
    }


def write_times(folder: Path, started: str, seconds: float) -> None:
    content = {
        "started": started,
        "finished": "2024-03-01T11:00:00+00:00",
        "seconds": seconds,
        "rows": 240,
        "rows_per_second": round(240 / seconds, 3),
        "sessions": 2,
    }
    (folder / "times.json").write_text(dump(content), encoding="utf-8")


def write_selftest(folder: Path, outcome: str = "red", code: dict[str, str] = CODE) -> None:
    faults = [{"fault": "NONE", "outcome": "green"}, {"fault": "LEFT_PADDING", "outcome": outcome}]
    content = {"ok": outcome == "red", "faults": faults, "code_sha256": code}
    date = "2024-02-29T09:00:00+00:00"
    result = {"date": date, "digest": digest_json(content), **content}
    (folder / "selftest.json").write_text(dump(result), encoding="utf-8")


def edit_ledger(folder: Path, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the lines of a ledger as a careful hand would."""
    path = folder / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    edit(lines)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


@contextmanager
def no_plots() -> Iterator[None]:
    """Leave the drawing out, which is most of the time of writing and verifying a bundle."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("step_histogram", "length_plot", "metric_bars"):
            patch.setattr(plots, name, lambda *_: "<svg ></svg>")
        patch.setattr(plots, "score_scatter", lambda _: ("<svg ></svg>", "1"))
        yield
