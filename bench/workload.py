"""What the benchmarks run on: random models of three sizes, and rows that share prefixes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from charrm.charactereval import read_profiles, read_trans, to_row
from charrm.errors import BadFile
from charrm.model import CharRM, ModelConfig
from charrm.protocol import EOS_ID, MAX_TOKENS, compose, keep_last

SEED = 20240102


def _config(vocab: int, hidden: int, layers: int, heads: int, feed_forward: int) -> ModelConfig:
    return ModelConfig(vocab, hidden, layers, heads, feed_forward, 1e-6, "silu", MAX_TOKENS)


PRESETS = {
    "tiny": _config(4_000, 160, 3, 5, 432),
    "mid": _config(125_696, 640, 12, 5, 1_712),
    "13b": _config(125_696, 5_120, 40, 40, 13_696),  # the published sizes
}


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> CharRM:
    """A model with random weights drawn on the device: the published initialisation (0.02), norms
    around one, and a head wide enough that p spreads over (0, 1)."""
    with torch.device("meta"):
        model = CharRM(config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(SEED)
    for name, weight in sorted(model.state_dict().items()):
        if name == "score.weight":
            weight.normal_(0, 2 / config.hidden_size**0.5, generator=generator)
        elif weight.dim() == 2:
            weight.normal_(0, 0.02, generator=generator)
        elif name == "score.bias":
            weight.zero_()
        else:
            weight.normal_(1, 0.05, generator=generator)
    return model


@dataclass(frozen=True)
class BenchRow:
    """One row of a set with its ids, at most 4,096."""

    slot: str  # generating model / place in its file
    role: str
    test_id: str
    ids: list[int]


def result_files(folder: Path) -> dict[str, Path]:
    """The result files of a set by generating model, in the order of names. Raises BadFile."""
    files = sorted((folder / "results").glob("generation_trans_*.jsonl"))
    if not files:
        raise BadFile(
            f"{folder / 'results'}: no generation_trans_*.jsonl; expected a set as "
            "`python -m golden fetch` or `synth` leaves it."
        )
    return {path.stem.removeprefix("generation_trans_"): path for path in files}


def read_rows(
    folder: Path,
    tokenizer: Path,
    keep: Callable[[str, str], bool],
    tests: Collection[str] | None = None,
) -> list[BenchRow]:
    """Tokenize the rows of a set (`data/character_profiles.json`, `results/*`).

    `keep(model, role)` chooses, and `tests` the test ids, None being all. Raises BadFile and what
    the tokenizer folder lacks.
    """
    from charrm.tokenizer import load_tokenizer  # random ids need no transformers

    files = result_files(folder)
    encode = load_tokenizer(tokenizer).encode_text
    profiles = read_profiles(folder / "data" / "character_profiles.json")
    rows = []
    for model, path in files.items():
        for place, row in enumerate(read_trans(path)):
            role, test_id = str(row.fields["role"]), str(row.fields["id"])
            if keep(model, role) and (tests is None or test_id in tests):
                ids, _ = keep_last(encode(compose(to_row(row, profiles)).text))
                rows.append(BenchRow(f"{model}/{place:05d}", role, test_id, ids))
    return rows


def short_and_spread(rows: Sequence[BenchRow], count: int, spread: int) -> list[BenchRow]:
    """`count` distinct rows: `spread` of them over all lengths, evenly in the logarithm, with the
    shortest and longest; the others are the shortest with at most a fifteenth from any one role.
    """
    distinct = list({tuple(row.ids): row for row in rows}.values())
    distinct.sort(key=lambda row: (len(row.ids), row.slot))
    if count > len(distinct) or not 2 <= spread <= count:
        raise ValueError(f"{len(distinct)} distinct rows, asked for {count} with {spread} spread")
    low, high = len(distinct[0].ids), len(distinct[-1].ids)
    chosen: dict[str, BenchRow] = {}
    for step in range(spread):
        wanted = low * (high / low) ** (step / (spread - 1))
        free = (row for row in distinct if row.slot not in chosen)
        row = min(free, key=lambda row: abs(len(row.ids) - wanted))
        chosen[row.slot] = row
    most = -(-count // 15)
    roles: dict[str, int] = {}
    for row in distinct:
        if len(chosen) == count:
            break
        if row.slot not in chosen and roles.get(row.role, 0) < most:
            roles[row.role] = roles.get(row.role, 0) + 1
            chosen[row.slot] = row
    return list(chosen.values())


def shaped_rows(
    vocab: int, *, roles: int, contexts: int, models: int = 1, metrics: int = 6, scale: float = 1.0
) -> list[list[int]]:
    """Random ids that share prefixes as the published rows do; no dataset needed.

    Rows of one role share its profile, those of one dialogue the context, those of one answer all
    but the metric. With `scale=1` lengths have about the published mean of 800 and range.
    """
    draw = random.Random(SEED)

    def ids(low: int, high: int) -> list[int]:
        length = math.exp(draw.uniform(math.log(low), math.log(high)))
        return [draw.randrange(EOS_ID + 1, vocab) for _ in range(max(1, round(length * scale)))]

    rows = []
    frame, names = ids(12, 12), [ids(4, 8) for _ in range(12)]
    for _ in range(roles):
        profile = frame + ids(60, 900)
        for dialogue in range(contexts):
            long = 4 if dialogue % 40 == 9 else 1
            context = profile + ids(60 * long, 1200 * long)
            asked = draw.sample(range(12), metrics)
            for _ in range(models):
                answer = context + ids(10, 300)
                rows += [[*answer, *names[m], EOS_ID][-MAX_TOKENS:] for m in sorted(asked)]
    return rows
