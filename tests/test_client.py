"""The client: typed results, typed errors, and nothing of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fakes import row

from charrm import Row
from charrm.client import Client
from charrm.errors import (
    CharrmError,
    InvalidRow,
    NotFinite,
    Overloaded,
    RowError,
    ShuttingDown,
    Starting,
    UnexpectedAnswer,
    UnknownMetric,
    Unreachable,
)
from charrm.results import FailedRow, ScoredRow

SCORED = {
    "score": 2.6015625, "p": 0.400390625, "logit": -0.404296875, "protocol": "charrm/1",
    "engine": "eager", "identity": "ab" * 32, "tokens": 90, "tokens_dropped": 0,
    "truncated": False, "sections_lost": {}, "metric_en": "Fluency", "metric_zh": "对话流利度",
    "flags": [],
}  # fmt: skip
FAILED = {"index": 1, "ok": False, "error": {"kind": "unknown_metric", "message": "metric: x"}}


def client(handler: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://test", transport=httpx.MockTransport(handler))


def answering(status: int, content: Any) -> Client:
    return client(lambda _: httpx.Response(status, json=content))


def refused(kind: str, status: int) -> Client:
    return answering(status, {"error": {"kind": kind, "message": "planted"}})


def test_a_row_becomes_a_request_and_its_answer_a_result() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=SCORED)

    result = client(handler).score(Row(**row()))
    assert json.loads(seen[0].content) == row()
    assert seen[0].url == "http://test/v1/score"
    assert result == ScoredRow(index=0, **SCORED)


def test_a_batch_keeps_failures_as_results() -> None:
    ok = {"index": 0, "ok": True, **SCORED}
    results = answering(200, {"results": [ok, {**FAILED, "metric": "x"}], "identity": "ab"})
    scored, failed = results.score_batch([row(), row(metric="x")])
    assert scored == ScoredRow(index=0, **SCORED)
    assert isinstance(failed, FailedRow)
    assert isinstance(failed.error, UnknownMetric)


def test_a_stream_yields_results_and_raises_its_early_end() -> None:
    lines = [{"index": 0, "ok": True, **SCORED}, FAILED,
             {"error": {"kind": "shutting_down", "message": "planted"}}]  # fmt: skip
    body = "\n".join(json.dumps(line) for line in lines)
    stream = client(lambda _: httpx.Response(200, text=body)).stream_batch([row()])
    assert next(stream).ok
    assert not next(stream).ok
    with pytest.raises(ShuttingDown):
        next(stream)


def test_a_refused_stream_raises_its_error() -> None:
    with pytest.raises(Overloaded):
        list(refused("overloaded", 429).stream_batch([row()]))


@pytest.mark.parametrize(
    ("kind", "status", "error"),
    [
        ("invalid_row", 422, InvalidRow),
        ("not_finite", 500, NotFinite),
        ("overloaded", 429, Overloaded),
        ("starting", 503, Starting),
        ("of_the_future", 500, CharrmError),
    ],
)
def test_refusals_arrive_as_their_own_class(
    kind: str, status: int, error: type[CharrmError]
) -> None:
    with pytest.raises(error) as caught:
        refused(kind, status).score(row())
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("status", "text"),
    [(200, "<html>"), (200, "[1]"), (200, '{"score": 3.0}'), (502, "bad gateway"), (500, "{}")],
)
def test_other_answers_are_never_a_score(status: int, text: str) -> None:
    with pytest.raises(UnexpectedAnswer):
        client(lambda _: httpx.Response(status, text=text)).score(row())


def test_a_batch_answer_without_results_is_refused() -> None:
    with pytest.raises(UnexpectedAnswer):
        answering(200, {"scores": [1.0]}).score_batch([row()])


def test_an_unknown_row_error_of_a_batch_stays_a_row_error() -> None:
    line = {"index": 0, "ok": False, "error": {"kind": "of_the_future", "message": "planted"}}
    (failed,) = answering(200, {"results": [line]}).score_batch([row()])
    assert isinstance(failed, FailedRow)
    assert type(failed.error) is RowError


def test_no_server() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    for call in ("score", "score_batch", "stream_batch"):
        with pytest.raises(Unreachable, match="python -m server"):
            list(getattr(client(handler), call)([row()] if "batch" in call else row()))
    with pytest.raises(Unreachable):
        client(handler).wait_until_ready(seconds=0)


def test_waiting_until_ready() -> None:
    answers = iter([503, 503, 200])
    body = {"error": {"kind": "starting", "message": "planted"}}
    with client(lambda _: httpx.Response(next(answers), json=body)) as waiting:
        waiting.wait_until_ready(seconds=30)
    assert next(answers, None) is None


def test_lone_surrogates_are_sent_and_nan_is_not() -> None:
    sent: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        return httpx.Response(200, json=SCORED)

    client(handler).score(row(context="\ud800"))
    assert b"\\ud800" in sent[0]
    for value in (float("nan"), {1, 2}):
        with pytest.raises(InvalidRow):
            client(handler).score(row(profile={"a": value}))


def test_the_client_loads_no_torch() -> None:
    code = (
        "import sys, charrm.client, charrm.charactereval; "
        "heavy = {'torch', 'transformers', 'sentencepiece', 'accelerate', 'fastapi'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
