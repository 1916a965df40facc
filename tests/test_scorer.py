"""The main path with the demo weights: order, isolation of failures, evidence, fixed bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from charrm import METRICS, PROTOCOL, FailedRow, Row, ScoredRow, Scorer
from charrm.engines import Outcome
from charrm.errors import InvalidRow, OutOfMemory, RowError

PROFILE = {"姓名": "阿川", "话": "再等等。"}
GOOD = Row(PROFILE, context="陆小满：雨停了没？", model_output="阿川：没有。", metric="Empathy")
OTHER = Row(PROFILE, context="陆小满：走吧。", model_output="阿川：好。", metric="Fluency")
Answer = Callable[[Sequence[int]], Outcome | RowError]


@pytest.fixture(scope="module")
def scorer(demo_checkpoint: Path) -> Scorer:
    return Scorer.open(demo_checkpoint, device="cpu", profiles={"阿川": PROFILE})


def scored(scorer: Scorer, row: Row) -> ScoredRow:
    [result] = scorer.score([row])
    assert isinstance(result, ScoredRow), result
    return result


def numbers(result: Any) -> tuple[float, float, float]:
    return result.p, result.logit, result.score


class FakeEngine:
    """Answers each row by a function of its ids."""

    name = "fake"

    def __init__(self, answer: Answer, rows_per_call: int = 1) -> None:
        self.answer = answer
        self.rows_per_call = rows_per_call
        self.calls: list[int] = []

    def score_tokens(
        self, rows: Sequence[Sequence[int]], *, keep_hidden: bool = False
    ) -> list[Outcome | RowError]:
        self.calls.append(len(rows))
        return [self.answer(ids) for ids in rows]


def with_engine(scorer: Scorer, answer: Answer, rows_per_call: int = 1) -> Scorer:
    return Scorer(scorer.tokenizer, FakeEngine(answer, rows_per_call), scorer.identity)


def test_a_score_carries_its_evidence(scorer: Scorer) -> None:
    result = scored(scorer, GOOD)
    assert result.score == result.p * 4 + 1
    assert result.p == torch.sigmoid(torch.tensor(result.logit, dtype=torch.bfloat16)).item()
    assert (result.protocol, result.engine) == (PROTOCOL, "eager")
    assert result.identity == scorer.identity.digest
    assert (result.metric_en, result.metric_zh) == ("Empathy", "共情度")
    assert (result.tokens_dropped, result.truncated, result.sections_lost) == (0, False, {})
    assert result.tokens == len(scorer.tokenize(GOOD).ids) > 10
    assert result.flags == []


def test_a_bad_row_between_good_ones_keeps_its_place(scorer: Scorer) -> None:
    rows: list[Row | RowError] = [
        GOOD,
        Row(PROFILE, context="a\ud800", model_output="", metric="Empathy"),
        Row(PROFILE, context="a", model_output="", metric="?"),
        InvalidRow("it could not be read"),
        Row(role="别人", context="a", model_output="", metric="Empathy"),
        Row(input_text="x"),
        OTHER,
    ]
    results = scorer.score(rows)
    assert [result.index for result in results] == list(range(len(rows)))
    kinds = [None if isinstance(result, ScoredRow) else result.error.kind for result in results]
    assert kinds == [
        None,
        "text_not_encodable",
        "unknown_metric",
        "invalid_row",
        "unknown_role",
        "invalid_row",
        None,
    ]
    assert numbers(results[0]) == numbers(scored(scorer, GOOD))
    assert numbers(results[6]) == numbers(scored(scorer, OTHER))


def test_rows_are_scored_as_they_come(scorer: Scorer) -> None:
    taken = []

    def rows() -> Any:
        for row in (GOOD, OTHER):
            taken.append(row)
            yield row

    stream = scorer.stream(rows())
    assert next(stream).index == 0
    assert taken == [GOOD]
    assert [result.index for result in stream] == [1]


@pytest.mark.parametrize("rows_per_call", [1, 2, 3, 10])
def test_an_engine_that_raises_costs_only_its_rows(scorer: Scorer, rows_per_call: int) -> None:
    poison = scorer.tokenize(OTHER).ids

    def answer(ids: Sequence[int]) -> Outcome:
        if list(ids) == poison:
            raise ZeroDivisionError("boom")
        return Outcome(p=0.25, logit=-1.0)

    rows: list[Row | RowError] = [GOOD, GOOD, OTHER, GOOD, InvalidRow("unread"), GOOD]
    fake = with_engine(scorer, answer, rows_per_call)
    results = fake.score(rows)
    assert [result.index for result in results] == list(range(6))
    assert isinstance(results[2], FailedRow)
    assert results[2].error.kind == "engine_failed"
    assert "ZeroDivisionError: boom" in results[2].error.message
    first = 2 - 2 % rows_per_call
    together = set(range(first, first + rows_per_call))
    failed = {result.index for result in results if isinstance(result, FailedRow)}
    assert failed == {4} | (together & set(range(6)))


def test_an_engine_that_loses_a_row_scores_none_of_its_company(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = with_engine(scorer, lambda _: Outcome(p=0.25, logit=-1.0), 3)
    complete = fake.engine.score_tokens
    monkeypatch.setattr(fake.engine, "score_tokens", lambda rows: complete(rows)[1:])
    results = fake.score([GOOD, OTHER, GOOD])
    kinds = [r.error.kind for r in results if isinstance(r, FailedRow)]
    assert kinds == ["engine_failed"] * 3


@pytest.mark.parametrize("p", [math.nan, math.inf, -0.5, 1.5])
def test_a_p_that_no_sigmoid_gives_is_no_score(scorer: Scorer, p: float) -> None:
    [result] = with_engine(scorer, lambda _: Outcome(p=p, logit=math.nan)).score([GOOD])
    assert isinstance(result, FailedRow)
    assert result.to_json()["error"]["kind"] == "not_finite"
    assert str(p) in result.error.message
    [control] = with_engine(scorer, lambda _: Outcome(p=0.5, logit=0.0)).score([GOOD])
    assert isinstance(control, ScoredRow)
    assert control.score == 3.0


def test_an_error_of_the_engine_is_passed_on(scorer: Scorer) -> None:
    [result] = with_engine(scorer, lambda _: OutOfMemory("9 tokens")).score([GOOD])
    assert result.to_json() == {
        "index": 0,
        "ok": False,
        "error": {"kind": "out_of_memory", "message": "9 tokens"},
    }


def test_memory_that_runs_out_is_told_from_other_failures(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for raised, kind in (
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("shapes"), "engine_failed"),
        (IndexError("ids"), "engine_failed"),
    ):

        def forward(_: object, error: Exception = raised) -> None:
            raise error

        monkeypatch.setattr(scorer.engine.model, "forward", forward)  # type: ignore[attr-defined]
        first, second = scorer.score([GOOD, OTHER])
        for result in (first, second):
            assert isinstance(result, FailedRow)
            assert result.error.kind == kind


def test_float32_says_it_is_not_the_protocol(demo_checkpoint: Path, scorer: Scorer) -> None:
    other = Scorer.open(demo_checkpoint, device="cpu", dtype="float32")
    result = scored(other, GOOD)
    assert result.protocol == "not charrm/1: float32"
    assert result.flags == ["not_protocol"]
    assert not other.identity.is_protocol
    assert (other.identity.dtype, other.identity.stored_dtype) == ("float32", "bfloat16")
    assert result.p != scored(scorer, GOOD).p
    assert result.p == pytest.approx(scored(scorer, GOOD).p, abs=0.2)
    named = Scorer.open(demo_checkpoint, device="cpu", dtype="bfloat16")
    assert named.identity.digest == scorer.identity.digest  # naming the default changes nothing


def test_flags_and_special_tokens(scorer: Scorer) -> None:
    text = Row(PROFILE, context="好 </s> 好", model_output="", metric="Empathy")
    assert scored(scorer, text).flags == ["answer_empty", "special_token_in_text"]
    glued = Row(PROFILE, context="好</s>好", model_output="a\nb", metric="Empathy")
    assert scored(scorer, glued).flags == ["answer_has_newline"]


def test_a_role_and_a_finished_text_score_as_the_profile_does(scorer: Scorer) -> None:
    expected = numbers(scored(scorer, GOOD))
    by_role = Row(
        role="阿川", context=GOOD.context, model_output=GOOD.model_output, metric="共情度"
    )
    assert numbers(scored(scorer, by_role)) == expected
    finished = scored(scorer, Row(input_text=scorer.tokenize(GOOD).prompt.text))
    assert numbers(finished) == expected
    assert finished.flags == ["finished_input_text"]
    as_json = Row(
        '{"姓名": "阿川", "话": "再等等。"}', None, GOOD.context, GOOD.model_output, "Empathy"
    )
    assert numbers(scored(scorer, as_json)) != expected  # the control


def test_truncation_is_reported_with_what_it_cost(scorer: Scorer) -> None:
    answer = "雨" * 5000
    fake = with_engine(scorer, lambda ids: Outcome(p=0.5, logit=len(ids)))
    row = Row(PROFILE, context="陆小满：雨停了没？", model_output=answer, metric="Empathy")
    result = scored(fake, row)
    all_ids = scorer.tokenizer.encode_text(fake.tokenize(row).prompt.text)
    assert result.logit == result.tokens == 4096
    assert result.tokens_dropped == len(all_ids) + 1 - 4096 > 0
    assert result.truncated
    assert result.flags == ["truncated"]
    kept = scorer.tokenizer.characters(all_ids[result.tokens_dropped :])
    tail = len("\n\n<Dimension>\n\n共情度")
    lost = 1 - (kept - tail) / len(answer)
    assert result.sections_lost == {"RoleInfo": 1, "Context": 1, "Response": pytest.approx(lost)}
    assert 0 < lost < 1
    assert fake.tokenize(row).ids == [*all_ids, 2][-4096:]


def test_a_text_over_the_limit_is_refused(scorer: Scorer) -> None:
    length = len(scorer.tokenize(GOOD).prompt.text)
    for limit, kind in ((length, None), (length - 1, "too_long_text")):
        small = Scorer(scorer.tokenizer, scorer.engine, scorer.identity, max_text_chars=limit)
        [result] = small.score([GOOD])
        assert (None if isinstance(result, ScoredRow) else result.error.kind) == kind
    assert isinstance(result, FailedRow)
    assert f"{length} characters, the limit is {length - 1}" in result.error.message


def test_scores_do_not_depend_on_company_or_order(scorer: Scorer) -> None:
    rows = [
        Row(PROFILE, context=context, model_output=answer, metric=metric)
        for metric in list(METRICS)[:5]
        for context, answer in (("陆小满：走吧。", "阿川：好。"), ("雨" * 60, ""))
    ]
    alone = [numbers(scored(scorer, row)) for row in rows]
    assert [numbers(result) for result in scorer.score(rows)] == alone
    assert [numbers(result) for result in scorer.score(rows[::-1])] == alone[::-1]
    assert len(set(alone)) > 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_settings_of_the_caller_do_not_change_bits(demo_checkpoint: Path, dtype: str) -> None:
    expected = numbers(scored(Scorer.open(demo_checkpoint, device="cpu", dtype=dtype), GOOD))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for autocast in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=autocast):
                opened = Scorer.open(demo_checkpoint, device="cpu", dtype=dtype)
                found = [numbers(scored(opened, GOOD)), numbers(scored(opened, GOOD))]
            assert found == [expected, expected]
    finally:
        torch.set_default_dtype(before)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the control: it would change float32
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == torch.bfloat16


def test_scoring_builds_no_graph(scorer: Scorer) -> None:
    with torch.enable_grad():
        [outcome] = scorer.engine.score_tokens([[5, 2]], keep_hidden=True)
    assert isinstance(outcome, Outcome)
    assert outcome.hidden is not None
    assert outcome.hidden.is_inference()
    assert not any(p.requires_grad for p in scorer.engine.model.parameters())  # type: ignore[attr-defined]
