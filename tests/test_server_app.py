"""Routes over a fake engine: what goes in, what comes out, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, fake_outcome, fake_scorer, row
from starlette.testclient import TestClient

from charrm import METRICS, Row
from charrm.engines import Outcome
from charrm.errors import CharrmError, OutOfMemory
from server import openapi
from server.app import STATUS, create_app, status_of
from server.dispatch import Dispatch
from server.schemas import BatchOut, ErrorOut, Evidence
from server.settings import Settings

PROFILES = {"阿岚": {"姓名": "阿岚"}}


@contextmanager
def serving(
    checkpoint: Path, engine: FakeEngine | None = None, **settings: Any
) -> Iterator[TestClient]:
    options = Settings(model="fake", **settings)

    def open_scorer() -> Any:
        return fake_scorer(
            checkpoint, engine, profiles=PROFILES, max_text_chars=options.max_text_chars
        )

    dispatch = Dispatch(open_scorer, options.max_waiting_rows)
    app = create_app(options, dispatch)
    with TestClient(app, raise_server_exceptions=False) as client:
        while client.get("/health/ready").status_code != 200:
            assert dispatch.failure is None
        yield client


@pytest.fixture(scope="module")
def client(demo_checkpoint: Path) -> Iterator[TestClient]:
    with serving(demo_checkpoint) as client:
        yield client


def post_text(client: TestClient, path: str, body: str | bytes) -> Any:
    return client.post(path, content=body)


def error_of(response: Any, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    ErrorOut.model_validate(response.json())
    error: dict[str, str] = response.json()["error"]
    return error


def test_one_row_carries_its_evidence(client: TestClient, demo_checkpoint: Path) -> None:
    answer = client.post("/v1/score", json=row())
    assert answer.status_code == 200
    evidence = Evidence.model_validate(answer.json())
    (expected,) = fake_scorer(demo_checkpoint).score([Row(**row())])
    assert evidence.model_dump() == {
        k: v for k, v in expected.to_json().items() if k not in ("index", "ok")
    }
    assert evidence.score == evidence.p * 4 + 1
    assert evidence.identity == client.get("/v1/identity").json()["digest"]


def test_batch_reports_scores_and_errors_in_input_order(client: TestClient) -> None:
    rows = [row(), row(metric="Charm"), row(context=3), "no row", row(model_output=""), row(x=1)]
    answer = client.post("/v1/score/batch", json={"rows": rows})
    assert answer.status_code == 200
    BatchOut.model_validate(answer.json())
    results = answer.json()["results"]
    assert [r["index"] for r in results] == list(range(6))
    assert [r.get("error", {}).get("kind") for r in results] == [
        None, "unknown_metric", "invalid_row", "invalid_row", None, "invalid_row",
    ]  # fmt: skip
    alone = client.post("/v1/score", json=row()).json()
    assert {k: v for k, v in results[0].items() if k not in ("index", "ok")} == alone


def test_several_metrics_of_a_row(client: TestClient) -> None:
    rows = [row(metric="all"), row(metric=["Empathy", "对话流利度"]), row(metric=["Empathy", "x"])]
    answer = client.post("/v1/score/batch", json={"rows": rows})
    BatchOut.model_validate(answer.json())
    results = answer.json()["results"]
    assert [r["metric_en"] for r in results[:12]] == list(METRICS)
    assert [(r["index"], r["ok"]) for r in results[12:]] == [
        (1, True), (1, True), (2, True), (2, False),
    ]  # fmt: skip
    assert results[13]["metric_en"] == "Fluency"
    assert results[15]["metric"] == "x"


def test_ndjson_holds_the_same_results_line_by_line(client: TestClient) -> None:
    body = {"rows": [row(), row(metric="x"), row(metric="Empathy")]}
    whole = client.post("/v1/score/batch", json=body).json()["results"]
    streamed = client.post("/v1/score/batch", json=body, headers={"Accept": "application/x-ndjson"})
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    assert [json.loads(line) for line in streamed.text.splitlines()] == whole


def test_role_works_with_loaded_profiles(client: TestClient) -> None:
    by_role = client.post("/v1/score", json=row(profile=None, role="阿岚"))
    by_profile = client.post("/v1/score", json=row(profile=PROFILES["阿岚"]))
    assert by_role.json()["p"] == by_profile.json()["p"]
    error = error_of(client.post("/v1/score", json=row(profile=None, role="无名")), 422)
    assert error["kind"] == "unknown_role"


def test_finished_input_text(client: TestClient) -> None:
    fields = row()
    text = (
        f"<RoleInfo>\n\n{fields['profile']}\n\n<Context>\n\n{fields['context']}\n\n<Response>\n\n"
        f"{fields['model_output']}\n\n<Dimension>\n\n对话流利度"
    )
    finished = client.post("/v1/score", json={"input_text": text}).json()
    assert finished["p"] == client.post("/v1/score", json=fields).json()["p"]
    assert finished["flags"] == ["finished_input_text"]
    error = error_of(client.post("/v1/score", json={"input_text": text + " "}), 422)
    assert error["kind"] == "unknown_metric"


BAD_BODIES = {
    "empty": b"",
    "cut off": b'{"profile": "x", ',
    "NaN": b'{"profile": {"a": NaN}, "context": "", "model_output": "", "metric": "Fluency"}',
    "Infinity": b'{"rows": [-Infinity]}',
    "twice": b'{"metric": "Fluency", "metric": "Empathy"}',
    "UTF-16": '{"rows": []}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"rows": []}',
    "GBK": '{"context": "等"}'.encode("gbk"),
    "deep": b"[" * 200_000,
    "long integer": b'{"rows": [' + b"9" * 5000 + b"]}",
}


@pytest.mark.parametrize("path", ["/v1/score", "/v1/score/batch"])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_bodies_that_are_not_json(client: TestClient, path: str, name: str) -> None:
    assert error_of(post_text(client, path, BAD_BODIES[name]), 400)["kind"] == "bad_request"


@pytest.mark.parametrize("body", [[], 3, None, "rows", {}, {"rows": {}}, {"rows": [], "dtype": 1}])
def test_batch_bodies_of_the_wrong_form(client: TestClient, body: Any) -> None:
    answer = post_text(client, "/v1/score/batch", json.dumps(body))
    assert error_of(answer, 422)["kind"] == "invalid_request"


BAD_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "number for text": (row(context=3), "invalid_row", "context: found int"),
    "bool for text": (row(model_output=True), "invalid_row", "model_output: found bool"),
    "array for profile": (row(profile=["x"]), "invalid_row", "profile: found list"),
    "no answer": (row(model_output=None), "invalid_row", "model_output: found nothing"),
    "no metric": (row(metric=None), "unknown_metric", "metric: found None"),
    "no profile": (row(profile=None), "invalid_row", "profile: missing"),
    "unknown field": (row(temperature=0), "invalid_row", '"temperature"'),
    "override": (row(max_length=128), "invalid_row", '"max_length"'),
    "surrogate field": (row(**{"\ud800": 1}), "invalid_row", "\\ud800"),
    "surrogate answer": (row(model_output="\udfff"), "text_not_encodable", "Response"),
    "surrogate role": (row(profile=None, role="\ud800"), "unknown_role", "\\ud800"),
    "surrogate metric": (row(metric="\ud800"), "unknown_metric", "\\ud800"),
    "failed generation": (row(model_output="ERROR"), "invalid_row", "ERROR"),
    "several metrics": (row(metric="all"), "invalid_row", "/v1/score/batch"),
    "personality": (row(metric="personality"), "unknown_metric", "13th metric"),
    "both forms": (row(input_text="x"), "invalid_row", "beside input_text"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_are_refused(client: TestClient, name: str) -> None:
    content, kind, part = BAD_ROWS[name]
    error = error_of(post_text(client, "/v1/score", json.dumps(content)), 422)
    assert error["kind"] == kind
    assert part in error["message"]


def test_a_surrogate_inside_a_profile_object_is_escaped_by_its_repr(client: TestClient) -> None:
    answer = post_text(client, "/v1/score", json.dumps(row(profile={"名": "\ud800"})))
    assert answer.status_code == 200
    literal = client.post("/v1/score", json=row(profile="{'名': '\\ud800'}"))
    assert answer.json()["p"] == literal.json()["p"]


def test_limits(demo_checkpoint: Path) -> None:
    limits = {"max_body_bytes": 3000, "max_rows": 12, "max_text_chars": 200}
    with serving(demo_checkpoint, **limits) as client:
        big = error_of(client.post("/v1/score", json=row(context="长" * 3000)), 413)
        assert big["kind"] == "too_large_request"
        long = error_of(client.post("/v1/score", json=row(context="长" * 200)), 413)
        assert long["kind"] == "too_long_text"
        assert client.post("/v1/score/batch", json={"rows": [row(metric="all")]}).is_success
        many = {"rows": [row(metric="all"), row()]}
        assert error_of(client.post("/v1/score/batch", json=many), 413)["kind"] == (
            "too_large_request"
        )


@pytest.mark.parametrize("p", [float("nan"), float("inf"), -0.25, 1.5])
def test_a_p_that_is_no_probability_never_becomes_a_number(demo_checkpoint: Path, p: float) -> None:
    def script(ids: Any) -> Outcome:
        return Outcome(p, 0.5) if len(ids) > 250 else fake_outcome(ids)

    with serving(demo_checkpoint, FakeEngine(script)) as client:
        bad = row(context="长" * 300)
        assert error_of(client.post("/v1/score", json=bad), 500)["kind"] == "not_finite"
        results = client.post("/v1/score/batch", json={"rows": [row(), bad, row()]}).json()
        assert [r["ok"] for r in results["results"]] == [True, False, True]


def test_an_engine_that_raises_answers_every_row(demo_checkpoint: Path) -> None:
    def script(ids: Any) -> Any:
        if len(ids) > 1000:
            raise ValueError("planted")
        if len(ids) > 250:
            return OutOfMemory("planted")
        return fake_outcome(ids)

    with serving(demo_checkpoint, FakeEngine(script)) as client:
        rows = [row(), row(context="长" * 300), row(context="长" * 1200), row()]
        results = client.post("/v1/score/batch", json={"rows": rows}).json()["results"]
        kinds = [r.get("error", {}).get("kind") for r in results]
        assert kinds == [None, "out_of_memory", "engine_failed", None]
        assert client.post("/v1/score", json=row()).status_code == 200


def test_health_docs_and_unknown_routes(client: TestClient) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/docs").status_code == 200
    assert error_of(client.get("/nowhere"), 404)["kind"] == "not_found"
    assert error_of(client.get("/v1/score"), 405)["kind"] == "method_not_allowed"


def test_openapi_is_the_committed_one(client: TestClient) -> None:
    assert openapi.PATH.read_text(encoding="utf-8") == openapi.render()
    assert set(client.get("/openapi.json").json()["paths"]) == {
        "/v1/score", "/v1/score/batch", "/v1/identity", "/health/live", "/health/ready",
    }  # fmt: skip


def test_every_error_class_has_a_status() -> None:
    todo, statuses = [CharrmError], {}
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        statuses[cls.kind] = status_of(cls("x"))
    assert set(STATUS.values()) | {500} == {400, 413, 422, 429, 500, 503}
    assert statuses["overloaded"] == 429
    assert statuses["starting"] == statuses["shutting_down"] == 503
    assert statuses["invalid_row"] == statuses["unknown_metric"] == 422
    assert statuses["engine_failed"] == 500
