"""The comparator and the verdicts, on lines whose answer is known by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from charrm.errors import BadFile
from charrm.protocol import METRICS
from charrm.published import PUBLISHED, ROWS_PER_METRIC
from golden.compare import compare, grid_steps, measured_values
from golden.criteria import DEFAULT, Outcome, exit_code, judge, read_criteria


def side(value: float, **changes: Any) -> dict[str, Any]:
    numbers = {"logit": 2 * value, "p": value, "score": value * 4 + 1}
    return {"hidden": "h" * 64, **numbers, **changes}


def line(position: int = 0, metric: str = "Fluency", p: float = 0.5, **changes: Any) -> Any:
    return {
        "slot": f"qwen_7b/{position:05d}",
        "id": 100 + position,
        "metric": metric,
        "ids": {"candidate": "i" * 64, "reference": "i" * 64},
        "tokens": {"candidate": 9, "reference": 9},
        "dropped": {"candidate": 0, "reference": 0},
        "candidate": side(p),
        "reference": side(p),
        "error": None,
        **changes,
    }


def lines(n: int = 5) -> list[Any]:
    return [line(i, list(METRICS)[i % 12], (i + 1) / 64) for i in range(n)]


def outcomes(some: list[Any], tables: tuple[str, ...] = ("slow",)) -> dict[str, Outcome]:
    verdicts = judge(read_criteria(), list(tables), compare(some))
    return {verdict.criterion: verdict.outcome for verdict in verdicts}


FAILED = {"side": "candidate", "kind": "not_finite", "message": "planted"}
NO_SIDES = {name: {"candidate": None, "reference": "i"} for name in ("ids", "tokens", "dropped")}


def test_equal_sides_pass_every_criterion() -> None:
    assert set(outcomes(lines()).values()) == {Outcome.PASS}
    assert exit_code(judge(read_criteria(), ["slow"], compare(lines()))) == 0


# One fault at a time: what is changed in one line, and exactly which criteria notice it.
FAULTS: dict[str, tuple[Mapping[str, Any], set[str]]] = {
    "ids": ({"ids": {"candidate": "x", "reference": "i"}}, {"ids_unequal"}),
    "hidden": ({"candidate": side(0.5, hidden="x")}, {"hidden_unequal"}),
    "logit": ({"candidate": side(0.5, logit=math.nextafter(1.0, 2.0))}, {"logit_unequal"}),
    "p": (
        {"candidate": side(0.5 + 2**-8, logit=1.0, hidden="h" * 64)},
        {"p_unequal", "score_unequal", "steps_max", "score_difference_max",
         "score_difference_mean", "metric_mean_difference_max"},
    ),
    "score": (
        {"candidate": side(0.5, score=3.25)},
        {"score_unequal", "score_difference_max", "score_difference_mean",
         "metric_mean_difference_max"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_criterion_notices_its_fault(fault: str) -> None:
    change, expected = FAULTS[fault]
    some = [*lines(), line(5, **change)]
    assert {name for name, o in outcomes(some).items() if o is Outcome.FAIL} == expected
    assert exit_code(judge(read_criteria(), ["slow"], compare(some))) == 1


def test_an_unresolved_row_leaves_nothing_passed() -> None:
    some = [*lines(), line(5, "Hallucination", **NO_SIDES, candidate=None, error=FAILED)]
    found = outcomes(some)
    assert found.pop("unresolved_rows") is Outcome.FAIL
    assert set(found.values()) == {Outcome.UNKNOWN}
    comparison = compare(some)
    assert comparison.unresolved == [{"slot": "qwen_7b/00005", "error": FAILED}]
    assert comparison.rows == 6
    means = comparison.models["qwen_7b"]["Hallucination"]
    assert (means.rows, means.unresolved, means.candidate) == (1, 1, None)
    assert (means.low, means.high) == (1.0, 5.0)


def test_bounds_count_unresolved_rows_as_1_and_as_5() -> None:
    some = [line(0, p=0.5), line(1, p=0.25), line(2, **NO_SIDES, candidate=None, error=FAILED)]
    means = compare(some).models["qwen_7b"]["Fluency"]
    assert (means.candidate, means.low, means.high) == (2.5, 2.0, 10 / 3)


def test_tokens_alone_are_not_scores() -> None:
    some = [line(i, candidate=None, reference=None) for i in range(3)]
    found = outcomes(some)
    assert found["ids_unequal"] is found["unresolved_rows"] is Outcome.PASS
    assert found["p_unequal"] is found["score_difference_max"] is Outcome.UNKNOWN
    assert exit_code(judge(read_criteria(), ["slow"], compare(some))) == 3
    assert set(outcomes(some, ("tokens",)).values()) == {Outcome.PASS}
    some[1]["tokens"] = {"candidate": 9, "reference": 8}
    assert outcomes(some, ("tokens",))["tokens_unequal"] is Outcome.FAIL


def test_what_a_side_does_not_tell_is_not_measured() -> None:
    told = {"ids": {"candidate": "i", "reference": None}, "reference": side(0.5, hidden=None)}
    found = outcomes([line(**told)])
    assert found["ids_unequal"] is found["hidden_unequal"] is Outcome.UNKNOWN
    assert found["p_unequal"] is Outcome.PASS
    assert set(outcomes([line(**told)], ("server",)).values()) == {Outcome.PASS}


def test_a_measurement_has_no_verdict() -> None:
    far = line(reference=side(0.75))
    assert outcomes([far], ("fp32",))["score_difference_max"] is Outcome.MEASURED
    assert exit_code(judge(read_criteria(), ["fp32"], compare([far]))) == 0
    anchor = line(reference=side(0.75, hidden=None, logit=None, p=None))
    assert outcomes([anchor], ("row-anchor",))["score_difference_max"] is Outcome.MEASURED
    assert compare([anchor]).steps_max is None


def test_no_rows_prove_nothing() -> None:
    assert Outcome.PASS not in outcomes([]).values()


@pytest.mark.parametrize(
    ("p", "reference", "steps"),
    [(0.5, 0.5, 0), (0.50390625, 0.5, 1), (0.498046875, 0.5, 0.5), (0.25, 0.25 + 2**-9, 1),
     (1.0, 1 - 2**-8, 1)],
)  # fmt: skip
def test_steps_of_the_bf16_grid(p: float, reference: float, steps: float) -> None:
    assert grid_steps(p, reference) == steps


def test_differences_are_counted_and_the_worst_named() -> None:
    some = [line(0, p=0.5), line(1, candidate=side(0.5 + 2**-7)), line(2, candidate=side(0.75)),
            line(3, candidate=side(0.5, hidden="x"))]  # fmt: skip
    comparison = compare(some)
    assert [worst["slot"][-1] for worst in comparison.worst] == ["2", "1", "3"]
    assert comparison.steps_histogram["0"] == 2
    assert comparison.steps_histogram["2"] == 1
    assert comparison.steps_histogram[">8"] == 1
    assert comparison.score_difference_max == 1.0
    assert comparison.score_difference_mean == pytest.approx((1.0 + 2**-5) / 4)


def test_the_paper_is_compared_cell_by_cell() -> None:
    """Lines whose means are the paper's printed ones, within what p can express."""
    paper = PUBLISHED["Qwen-7B"].metrics
    some = [
        line(position, metric, candidate=side((paper[metric] - 1) / 4))
        for position, metric in enumerate(ROWS_PER_METRIC)
    ]
    comparison = compare(some)
    cells = {cell["name"]: cell for cell in comparison.paper["qwen_7b"]}
    assert len(cells) == 15
    largest = measured_values(comparison)["paper_cell_difference_max"]
    assert largest is not None
    assert largest < 0.001  # the printed averages are rounded themselves
    assert outcomes(some, ("paper",)) == {"paper_cell_difference_max": Outcome.PASS}
    some[0]["candidate"] = side(some[0]["candidate"]["p"] + 0.01)
    assert outcomes(some, ("paper",)) == {"paper_cell_difference_max": Outcome.FAIL}
    assert outcomes(some[1:], ("paper",)) == {"paper_cell_difference_max": Outcome.UNKNOWN}


BAD_CRITERIA = {
    "not TOML": ("[slow", "cannot be read as TOML"),
    "unknown name": ("[slow]\nrows = 1", "rows: expected each once"),
    "twice": ('[slow]\nsteps_max = 1\nmeasure = ["steps_max"]', "steps_max: expected each once"),
    "negative": ("[slow]\nsteps_max = -1", "expected a number from 0 up"),
    "infinite": ("[slow]\nsteps_max = inf", "expected a number from 0 up"),
    "nan": ("[slow]\nsteps_max = nan", "expected a number from 0 up"),
    "boolean": ("[slow]\nsteps_max = true", "expected a number from 0 up"),
    "no table": ("steps_max = 1", "not a table"),
    "measure": ("[slow]\nmeasure = 1", "expected an array"),
}


@pytest.mark.parametrize("case", BAD_CRITERIA)
def test_criteria_that_could_hide_something_are_refused(tmp_path: Path, case: str) -> None:
    text, message = BAD_CRITERIA[case]
    path = tmp_path / "criteria.toml"
    path.write_text(text)
    with pytest.raises(BadFile, match=message):
        read_criteria(path)


def test_the_digest_is_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "criteria.toml"
    path.write_bytes(DEFAULT.read_bytes())
    assert read_criteria(path).digest == read_criteria().digest
    path.write_bytes(DEFAULT.read_bytes() + b"# one more word\n")
    assert read_criteria(path).digest != read_criteria().digest
    with pytest.raises(BadFile, match=r"no table \[nothing\]"):
        judge(read_criteria(), ["nothing"], compare(lines()))
