"""Issue a certificate: the tree engine against the official order, row by row, bit by bit."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from charrm.certificate import Certificate, bound_to
from charrm.charactereval import read_profiles, read_trans, to_row
from charrm.engines import Outcome, TreeSettings
from charrm.engines.classes import NumericClasses, probe_classes
from charrm.engines.eager import EagerEngine
from charrm.engines.tree import TreeEngine
from charrm.errors import InvalidSetting, NotCertified, RowError
from charrm.protocol import EOS_ID, MAX_TOKENS, METRICS, Row
from charrm.scorer import Scorer

DEFAULT_MINUTES = 10.0
LEAST_SAMPLE = 64  # rows below which a certificate would say too little
SEED = 512


@dataclass(frozen=True)
class Case:
    """One row to compare, and why it was chosen."""

    family: str
    ids: list[int]


@dataclass
class Progress:
    """What `report` is told after every row: done of `total` in the part named."""

    part: str
    done: int
    total: int


def certify(
    scorer: Scorer,
    sample: Sequence[Sequence[int]],
    settings: TreeSettings,
    *,
    minutes: float = DEFAULT_MINUTES,
    report: Callable[[Progress], None] = lambda _: None,
) -> Certificate:
    """Compare the tree with the eager engine of `scorer` and return the certificate.

    Hidden state, logit and p of every row must be equal: adversarial rows first, all of them; then
    `sample` (ids of tokenized rows, as `sample_of` or `demo_sample` choose them) until `minutes`
    are over. The tree computes them together, in another order and company, and some alone.
    Raises NotCertified (a difference, too few rows), InvalidSetting.
    """
    eager = scorer.engine
    if not isinstance(eager, EagerEngine):
        raise InvalidSetting(f"certify compares with the eager engine, found {eager.name}.")
    device = eager.model.score.weight.device
    begin = time.perf_counter()
    classes = probe_classes(eager.model, device)
    tree = TreeEngine(eager.model, classes, settings)
    seconds = {"probe": time.perf_counter() - begin}

    hard = list(adversarial_rows(eager.model.config.vocab_size, classes))
    wanted = _run(eager, hard, report, "adversarial rows, official order")
    counts, _ = _compare(tree, hard, wanted)

    # Neighbours share; whatever is computed before the time is over keeps them together.
    easy = [Case("sample", list(ids)) for ids in sample]
    deadline = begin + 60 * minutes
    at = time.perf_counter()
    expected = _run(eager, easy, report, "sample, official order", deadline)
    seconds["eager"] = time.perf_counter() - at
    easy = easy[: len(expected)]
    if len(easy) < LEAST_SAMPLE:
        raise NotCertified(
            f"{minutes:g} minutes were enough for {len(easy)} of the sample's {len(sample)} rows; "
            f"a certificate needs {LEAST_SAMPLE}. Give it more minutes or more rows."
        )
    sampled, seconds["tree"] = _compare(tree, easy, expected)
    counts |= sampled
    seconds["all"] = time.perf_counter() - begin

    saved = (seconds["eager"] - seconds["tree"]) / len(easy)
    lengths = [len(case.ids) for case in easy]
    measured = {
        "rows": counts,
        "orders": ["together", "shuffled halves", "alone (every eighth)"],
        "sample": {
            "shortest": min(lengths),
            "longest": max(lengths),
            "token_ratio": tree.plan([case.ids for case in easy]).token_ratio,
            "of": len(sample),
        },
        "seconds": seconds,
        "saved_seconds_per_row": saved,
        "break_even_rows": math.ceil(seconds["all"] / saved) if saved > 0 else None,
    }
    issued = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Certificate(bound_to(scorer.identity, settings), classes.to_json(), measured, issued)


def adversarial_rows(vocab: int, classes: NumericClasses) -> Iterator[Case]:
    """Rows at which sharing would break first; random ids, the same on every machine."""
    draw = random.Random(SEED)
    base = [draw.randrange(EOS_ID + 1, vocab) for _ in range(MAX_TOKENS + 200)]
    other = [EOS_ID + 1 + (i - EOS_ID) % (vocab - EOS_ID - 1) for i in base]  # never the same id
    edges = {classes.min_length, 1024, *classes.width_edges, min(classes.max_length, 2048)}
    around = {n for edge in edges for n in (edge - 1, edge, edge + 1)}
    tail = max(classes.softmax_tail, 32)
    around |= {n for k in (4, 9) for n in (k * tail - 1, k * tail, k * tail + 1)}
    for length in sorted(n for n in around if 1 <= n < MAX_TOKENS):
        yield Case("around an edge", [*base[: length - 1], EOS_ID])
    for length in (1, 2, 15, 40, 100, 127, 200, 250):
        yield Case("prefix of others", base[:length])
    for _ in range(2):
        yield Case("identical", base[:250])
    for at in (0, 100, 249 - 250 % tail, 248, 249):
        yield Case("one token apart", [*base[:at], other[at], *base[at + 1 : 250]])
    yield Case("full length", base[:MAX_TOKENS])
    yield Case("full length", [*base[: MAX_TOKENS - 1], EOS_ID])
    yield Case("cut at the front", base[-MAX_TOKENS:])


def choose_sample(
    scorer: Scorer, files: Sequence[Path], profiles: Path | None, count: int
) -> list[list[int]]:
    """Ids of `count` rows of the benchmark's files, or of the demo's texts when there are none.

    Rows that cannot be scored are left out. Raises BadFile, InvalidSetting.
    """
    if not files:
        return demo_sample(scorer, count)
    if profiles is None:
        raise InvalidSetting("rows to certify with name roles only: they need --profiles.")
    known = read_profiles(profiles)
    found = []
    for path in files:
        for row in read_trans(path):
            with suppress(RowError):
                found.append(scorer.tokenize(to_row(row, known)).ids)
    if not found:
        raise InvalidSetting(f"{', '.join(map(str, files))}: no row that can be scored.")
    return sample_of(found, count)


@contextmanager
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr for `certify`'s `report`."""
    with ProgressBar(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:  # fmt: skip
        tasks: dict[str, TaskID] = {}

        def report(progress: Progress) -> None:
            if progress.part not in tasks:
                tasks[progress.part] = bar.add_task(progress.part, total=progress.total)
            bar.update(tasks[progress.part], completed=progress.done)

        yield report


def demo_sample(scorer: Scorer, count: int) -> list[list[int]]:
    """Ids of `count` rows made of the demo's texts: related, of many lengths, some answers empty.

    For a machine without the benchmark's files; `sample_of` takes real rows.
    """
    from charrm.demo import demo_profiles, demo_rows

    draw = random.Random(SEED)
    profiles, rows = demo_profiles(), demo_rows()
    lines = [line for row in rows for line in row["context"].split("\n")[:40]]
    found: list[list[int]] = []
    for role in cycle(sorted(profiles)):
        # Log-uniform: as published, most dialogues are short and few very long.
        dialogue = "\n".join(draw.choices(lines, k=round(math.exp(draw.uniform(0, 4.2)))))
        for answer in ("", draw.choice(rows)["model_output"]):
            for metric in draw.sample(list(METRICS), 3):
                row = Row(profiles[role], context=dialogue, model_output=answer, metric=metric)
                found.append(scorer.tokenize(row).ids)
                if len(found) == count:
                    return found
    raise AssertionError("unreachable")


def sample_of(rows: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` of the rows, or all: spread evenly over the lengths, each with a neighbour.

    Neighbours in the order given usually share a prefix, as a whole file's rows would.
    """
    if count >= len(rows):
        return [list(row) for row in rows]
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    half = -(-count // 2)
    chosen: dict[int, None] = {}
    for step in range(half):
        anchor = by_length[int((step + 0.5) * len(rows) / half)]
        for i in (anchor, anchor + 1 if anchor + 1 < len(rows) else anchor - 1):
            chosen[i] = None
    for i in range(len(rows)):
        if len(chosen) >= count:
            break
        chosen[i] = None
    picked = list(chosen)[:count]
    pairs = [picked[i : i + 2] for i in range(0, len(picked), 2)]
    random.Random(SEED).shuffle(pairs)  # any beginning holds all lengths
    return [list(rows[i]) for pair in pairs for i in pair]


def _run(
    engine: EagerEngine,
    cases: Sequence[Case],
    report: Callable[[Progress], None],
    part: str,
    deadline: float = math.inf,
) -> list[Outcome]:
    outcomes = []
    for number, case in enumerate(cases):
        if time.perf_counter() > deadline:
            break
        outcomes += _good(engine.score_tokens([case.ids], keep_hidden=True), [case])
        report(Progress(part, number + 1, len(cases)))
    return outcomes


def _compare(
    tree: TreeEngine, cases: Sequence[Case], expected: Sequence[Outcome]
) -> tuple[dict[str, int], float]:
    """Rows per family, and the tree's seconds for all of them together.

    Raises NotCertified at the first order in which any bit differs.
    """
    order = random.Random(SEED).sample(range(len(cases)), len(cases))
    half = len(order) // 2
    orders = {
        "together": [list(range(len(cases)))],
        "in another order and company": [order[:half], order[half:]],
        "alone": [[i] for i in range(0, len(cases), 8)],
    }
    seconds = dict.fromkeys(orders, 0.0)
    for name, calls in orders.items():
        for call in calls:
            chosen = [cases[i] for i in call]
            begin = time.perf_counter()
            outcomes = tree.score_tokens([case.ids for case in chosen], keep_hidden=True)
            seconds[name] += time.perf_counter() - begin
            found = _good(outcomes, chosen)
            wrong = [
                f"{case.family} ({len(case.ids)} tokens): p {outcome.p}, official {expected[i].p}"
                for i, case, outcome in zip(call, chosen, found, strict=True)
                if not outcome.same_bits(expected[i])
            ]
            if wrong:
                raise NotCertified(
                    f"the tree engine does not give the official bits on this machine: of "
                    f"{len(call)} rows computed {name}, {len(wrong)} differ in hidden state, logit "
                    f"or p: {'; '.join(wrong[:5])}. Use --engine eager."
                )
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.family] = counts.get(case.family, 0) + 1
    return counts, seconds["together"]


def _good(outcomes: Sequence[Outcome | RowError], cases: Sequence[Case]) -> list[Outcome]:
    good = []
    for outcome, case in zip(outcomes, cases, strict=True):
        if isinstance(outcome, RowError):
            raise NotCertified(
                f"a row of the family {case.family!r} ({len(case.ids)} tokens) could not be "
                f"computed: {outcome.kind}: {outcome.message}"
            )
        good.append(outcome)
    return good
